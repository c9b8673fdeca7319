//! The file of a golden set: named tensors of one reference run.

use super::error::EngineError;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The numbers of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Values {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// A tensor of a golden file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GoldenTensor {
    pub shape: Vec<usize>,
    pub values: Values,
}

/// All tensors of a golden file, and where the prompt ends when a `golden.json` beside it says so.
#[derive(Debug)]
pub(super) struct GoldenFile {
    pub path: PathBuf,
    pub tensors: BTreeMap<String, GoldenTensor>,
    pub prompt: Option<usize>,
}

impl GoldenFile {
    /// Reads `path` and the `golden.json` beside it.
    ///
    /// # Errors
    /// When a file cannot be read or is not what its name says.
    pub fn read(path: &Path) -> Result<Self, EngineError> {
        if path.metadata().is_ok_and(|about| !about.is_file()) {
            return Err(EngineError::Checkpoint { path: path.to_owned(), reason: "is not a regular file".to_owned() });
        }
        let bytes =
            std::fs::read(path).map_err(|source| EngineError::Io { path: path.to_owned(), action: "read the golden file", source })?;
        let mut golden = Self { path: path.to_owned(), tensors: BTreeMap::new(), prompt: None };
        let file = SafeTensors::deserialize(&bytes).map_err(|e| golden.wrong(&format!("not a safetensors file: {e}")))?;
        for (name, view) in file.tensors() {
            let data = view.data().as_chunks::<4>().0;
            let values = match view.dtype() {
                Dtype::F32 => Values::F32(data.iter().map(|b| f32::from_le_bytes(*b)).collect()),
                Dtype::I32 => Values::I32(data.iter().map(|b| i32::from_le_bytes(*b)).collect()),
                other => return Err(golden.wrong(&format!("`{name}` has dtype {other:?}; golden tensors are F32 or I32"))),
            };
            golden.tensors.insert(name, GoldenTensor { shape: view.shape().to_vec(), values });
        }
        golden.prompt = golden.prompt_beside()?;
        Ok(golden)
    }

    fn prompt_beside(&self) -> Result<Option<usize>, EngineError> {
        let path = self.path.with_file_name("golden.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(EngineError::Io { path, action: "read", source }),
        };
        let json: serde_json::Value = match serde_json::from_str(&text) {
            Ok(json) => json,
            Err(e) => return Err(EngineError::Checkpoint { path, reason: format!("not JSON: {e}") }),
        };
        let Some(prompt) = json.get("prompt_len") else { return Ok(None) };
        match prompt.as_u64().and_then(|p| usize::try_from(p).ok()) {
            Some(prompt) => Ok(Some(prompt)),
            None => Err(EngineError::Checkpoint { path, reason: format!("`prompt_len` is {prompt}, not a count") }),
        }
    }

    /// The error that the file is wrong in this way.
    pub fn wrong(&self, reason: &str) -> EngineError {
        EngineError::Checkpoint { path: self.path.clone(), reason: reason.to_owned() }
    }

    /// The integers of `name`, when the file has it.
    pub fn ints(&self, name: &str) -> Result<Option<&[i32]>, EngineError> {
        match self.tensors.get(name).map(|t| &t.values) {
            None => Ok(None),
            Some(Values::I32(values)) => Ok(Some(values)),
            Some(Values::F32(_)) => Err(self.wrong(&format!("`{name}` must be I32"))),
        }
    }

    /// The token ids of `name`, when the file has it.
    pub fn tokens(&self, name: &str) -> Result<Option<Vec<u32>>, EngineError> {
        let Some(ints) = self.ints(name)? else { return Ok(None) };
        let ids: Result<Vec<u32>, _> = ints.iter().map(|id| u32::try_from(*id)).collect();
        ids.map(Some).map_err(|_| self.wrong(&format!("`{name}` has a negative token id")))
    }
}
