//! The built-in model: ling-nano, a tiny trained model of the Ling-3.0 architecture.
//!
//! Its provenance and licence are in `builtin/ling-nano/README.md`.

use super::files::CheckpointFiles;

/// The name by which users ask for it.
pub const ALIAS: &str = "demo";

macro_rules! nano {
    ($($file:literal),* $(,)?) => { &[$(($file, include_bytes!(concat!("builtin/ling-nano/", $file)))),*] };
}

static LING_NANO: &[(&str, &[u8])] = nano![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// What it has besides weights.
static LING_NANO_TEXTS: &[(&str, &[u8])] = nano![
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// The text of its `config.json`.
pub(super) fn nano_config() -> &'static str {
    include_str!("builtin/ling-nano/config.json")
}

/// Its files without the weights.
pub(super) fn nano_texts() -> &'static [(&'static str, &'static [u8])] {
    LING_NANO_TEXTS
}

/// The files of ling-nano.
pub fn ling_nano() -> CheckpointFiles {
    CheckpointFiles::Embedded { name: "ling-nano", files: LING_NANO }
}
