//! A checkpoint: configuration, weights by role, inventory and identity, every tensor checked before it is used.

use super::binder::Binder;
use super::builtin;
use super::config::ModelConfig;
use super::config_read::{ConfigFile, read_config};
use super::error::EngineError;
use super::files::CheckpointFiles;
use super::inventory::Inventory;
use super::presets::Preset;
use super::shards::Shards;
use super::tensors;
use super::weights::{Attention, ModelWeights};
use std::borrow::Cow;
use std::path::Path;

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// The shape.
    pub config: ModelConfig,
    /// The weights, mapped.
    pub weights: ModelWeights,
    /// Parameters and bytes by component.
    pub inventory: Inventory,
    /// SHA-256 over config.json, tokenizer.json and the safetensors headers, hexadecimal. The weights' values are not in it.
    pub identity: String,
    /// Name of the directory, or of the built-in model.
    pub name: String,
    /// Where it came from.
    pub files: CheckpointFiles,
    /// Whether the weights were made up: see [`super::synthetic`].
    pub synthetic: bool,
}

impl Checkpoint {
    /// Opens a directory in the Hugging Face layout.
    ///
    /// # Errors
    /// When a file is absent or damaged, the configuration asks for what is not implemented, or tensors do not fit it; the
    /// last names all tensors that are missing, unexpected or of a wrong shape.
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        Self::load(CheckpointFiles::Directory(dir.to_owned()))
    }

    /// Opens what a user named: `demo` for the built-in model, or a directory.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn resolve(name: &Path) -> Result<Self, EngineError> {
        if name.as_os_str() == builtin::ALIAS { Self::load(builtin::ling_nano()) } else { Self::open(name) }
    }

    /// Opens files of whatever origin.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn load(files: CheckpointFiles) -> Result<Self, EngineError> {
        if let CheckpointFiles::Directory(dir) = &files
            && !dir.is_dir()
        {
            let reason = if dir.exists() {
                "is not a directory; name a checkpoint's folder"
            } else if dir.to_str().is_some_and(|name| Preset::find(name).is_some()) {
                "is a preset: a shape without weights, which only `specprof model` can use; name a checkpoint's folder, or `demo`"
            } else {
                "does not exist; name a checkpoint's folder, or `demo`"
            };
            return Err(EngineError::Checkpoint { path: dir.clone(), reason: reason.to_owned() });
        }
        let ConfigFile { model: config, fp8_block } = read_config(&files)?;
        let shards = Shards::open(&files)?;
        let identity = shards.identity.clone();
        let mut binder = Binder::new(shards, fp8_block);
        let weights = tensors::walk(&config, &mut binder)?;
        let inventory = binder.finish(|name| ignored(name, &config))?;
        check_decay(&weights)?;
        Ok(Self { config, weights, inventory, identity, name: files.name(), files, synthetic: false })
    }

    /// The content of one of its small files, such as `tokenizer.json` or `chat_template.jinja`; `None` when it has none.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, EngineError> {
        self.files.read(name)
    }
}

/// A finite `A_log` may still overflow in `exp(A_log)`.
fn check_decay(weights: &ModelWeights) -> Result<(), EngineError> {
    for (layer, weights) in weights.layers.iter().enumerate() {
        if let Attention::Kda(kda) = &weights.attention
            && kda.decay_scale.iter().any(|scale| !scale.is_finite())
        {
            return Err(EngineError::NotFinite { what: format!("exp(model.layers.{layer}.attention.A_log)") });
        }
    }
    Ok(())
}

/// Tensors that some writers leave behind and nothing uses.
fn ignored(name: &str, config: &ModelConfig) -> bool {
    name.ends_with(".inv_freq")
        || name.starts_with("model.mtp")
        || config.mtp_layers == 0
            && name.strip_prefix("model.layers.").is_some_and(|rest| rest.split('.').next() == Some(&config.layers.to_string()))
}
