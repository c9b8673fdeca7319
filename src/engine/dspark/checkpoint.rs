//! A DSpark drafter's checkpoint, opened for one target.

use super::config::DsparkConfig;
use super::weights::{DsparkWeights, FROZEN_COPIES, walk};
use crate::engine::binder::Binder;
use crate::engine::files::CheckpointFiles;
use crate::engine::inventory::Inventory;
use crate::engine::shards::{Shards, Stored};
use crate::engine::{EngineError, ModelConfig};
use std::collections::HashMap;
use std::path::Path;

/// An opened drafter that fits its target.
#[derive(Debug)]
pub struct DsparkCheckpoint {
    /// The shape and the rules.
    pub config: DsparkConfig,
    /// The weights, mapped; frozen copies of the target's embedding and head are left out.
    pub weights: DsparkWeights,
    /// Parameters and bytes by component, all of them of the draft side.
    pub inventory: Inventory,
    /// SHA-256 over config.json and the safetensors headers, hexadecimal.
    pub identity: String,
    /// Name of the directory.
    pub name: String,
}

impl DsparkCheckpoint {
    /// Opens a directory in the Hugging Face layout as the drafter of `target`.
    ///
    /// # Errors
    /// When a file is absent or damaged, the configuration asks for what is not implemented or belongs to another target, or
    /// tensors do not fit it; the last names all tensors that are missing, unexpected or of a wrong shape.
    pub fn open(dir: &Path, target: &ModelConfig) -> Result<Self, EngineError> {
        if !dir.is_dir() {
            let reason = if dir.exists() { "is not a directory" } else { "does not exist" };
            let reason = format!("{reason}; name the folder of a DSpark drafter");
            return Err(EngineError::Checkpoint { path: dir.to_owned(), reason });
        }
        let files = CheckpointFiles::Directory(dir.to_owned());
        let json = files.require("config.json")?;
        let path = files.path("config.json");
        let (config, fp8_block) = DsparkConfig::parse(&path, &json)?;
        config.check_target(target).map_err(|reason| EngineError::Checkpoint { path, reason })?;
        let mut shards = Shards::open(&files)?;
        shards.tensors = without_prefix(std::mem::take(&mut shards.tensors), &shards.path)?;
        let identity = shards.identity.clone();
        // Writers that leave the key out differ in what they mean by it; the file shows what there is.
        let confidence = config.confidence.unwrap_or_else(|| shards.tensors.contains_key("confidence_head.proj.weight"));
        let mut binder = Binder::new(shards, fp8_block);
        let weights = walk(&config, confidence, &mut binder)?;
        let unused = |name: &str| FROZEN_COPIES.contains(&name) || name.ends_with(".inv_freq");
        let inventory = binder.finish(|name| unused(name) || !confidence && name.starts_with("confidence_head."))?;
        Ok(Self { config, weights, inventory, identity, name: files.name() })
    }
}

/// Names without the prefix `model.` that some writers put before them.
fn without_prefix(tensors: HashMap<String, Stored>, path: &Path) -> Result<HashMap<String, Stored>, EngineError> {
    let mut plain = HashMap::with_capacity(tensors.len());
    for (name, stored) in tensors {
        let short = name.strip_prefix("model.").unwrap_or(&name).to_owned();
        if plain.insert(short, stored).is_some() {
            let reason = format!("tensor {name:?} is there with the prefix `model.` and without it");
            return Err(EngineError::Checkpoint { path: path.to_owned(), reason });
        }
    }
    Ok(plain)
}
