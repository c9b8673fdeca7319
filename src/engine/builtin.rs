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

/// The files of ling-nano.
pub fn ling_nano() -> CheckpointFiles {
    CheckpointFiles::Embedded { name: "ling-nano", files: LING_NANO }
}
