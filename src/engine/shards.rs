//! The safetensors files of a checkpoint as one directory of named tensors.

use super::error::EngineError;
use super::files::CheckpointFiles;
use super::matrix::{Storage, TensorBytes};
use safetensors::{Dtype, SafeTensors};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// The only file of an unsharded checkpoint.
pub const SINGLE: &str = "model.safetensors";

/// One stored tensor.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Content.
    pub bytes: TensorBytes,
}

/// All tensors of a checkpoint by name.
#[derive(Debug)]
pub struct Shards {
    /// By safetensors name.
    pub tensors: HashMap<String, Stored>,
    /// The index, or the only file: what errors about tensors name.
    pub path: PathBuf,
    /// Number of files.
    pub files: usize,
    /// SHA-256 over config.json, tokenizer.json and the headers of the files in order of their names, hexadecimal.
    pub identity: String,
}

impl Shards {
    /// Maps all weight files and reads their headers.
    ///
    /// # Errors
    /// When a file is absent, cannot be mapped, or its header does not describe the file exactly.
    pub fn open(files: &CheckpointFiles) -> Result<Self, EngineError> {
        let (path, names) = match files.read(INDEX)? {
            Some(index) => (files.path(INDEX), shard_names(&files.path(INDEX), &index)?),
            None => (files.path(SINGLE), BTreeSet::from([SINGLE.to_owned()])),
        };
        let mut identity = Sha256::new();
        for file in ["config.json", "tokenizer.json"] {
            add(&mut identity, &files.read(file)?.unwrap_or_default());
        }
        let mut tensors: HashMap<String, Stored> = HashMap::new();
        for name in &names {
            let storage = files.map(name)?.ok_or_else(|| files.absent(name))?;
            let header = read_shard(&files.path(name), &storage, &mut tensors)?;
            add(&mut identity, header_bytes(&storage, header));
        }
        let identity = identity.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { tensors, path, files: names.len(), identity })
    }
}

/// Hashes a piece with its length, so that pieces cannot run into each other.
fn add(hash: &mut Sha256, piece: &[u8]) {
    hash.update((piece.len() as u64).to_le_bytes());
    hash.update(piece);
}

fn header_bytes(storage: &Arc<dyn Storage>, length: usize) -> &[u8] {
    (**storage).as_ref().get(8..8 + length).unwrap_or_default()
}

/// The distinct file names of an index, each a plain name inside the checkpoint.
fn shard_names(path: &Path, index: &[u8]) -> Result<BTreeSet<String>, EngineError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let fail = |reason: String| EngineError::Checkpoint { path: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(index).map_err(|e| fail(format!("is not a safetensors index: {e}")))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in index.weight_map {
        let plain = !file.is_empty() && !file.contains(['/', '\\', ':', '\0']) && file != ".." && file.ends_with(".safetensors");
        if !plain {
            return Err(fail(format!(
                "`weight_map` sends {tensor:?} to {file:?}; expected the name of a .safetensors file beside the index"
            )));
        }
        names.insert(file);
    }
    if names.is_empty() { Err(fail("`weight_map` is empty".to_owned())) } else { Ok(names) }
}

/// Adds the tensors of one file; gives the length of its header.
fn read_shard(path: &Path, storage: &Arc<dyn Storage>, tensors: &mut HashMap<String, Stored>) -> Result<usize, EngineError> {
    let fail = |reason: String| EngineError::Checkpoint { path: path.to_owned(), reason };
    let content = (**storage).as_ref();
    let length =
        content.first_chunk::<8>().map(|n| u64::from_le_bytes(*n)).ok_or_else(|| fail("is too short for a safetensors file".to_owned()))?;
    let room = content.len() - 8;
    let length = usize::try_from(length).ok().filter(|&n| n <= room).ok_or_else(|| {
        fail(format!(
            "announces a header of {length} bytes in a file of {} bytes; it is truncated or not a safetensors file",
            content.len()
        ))
    })?;
    let entries: Entries = serde_json::from_slice(&content[8..8 + length]).map_err(|e| fail(format!("has a damaged header: {e}")))?;
    let data = (room - length) as u64;
    if let Some((name, end)) = entries.beyond(data) {
        return Err(fail(format!("tensor {name:?} ends at byte {end} of {data} data bytes; the file is truncated or damaged")));
    }
    let (_, metadata) = SafeTensors::read_metadata(content).map_err(|e| fail(format!("has a damaged header: {e}")))?;
    for (name, info) in metadata.tensors() {
        let (begin, end) = info.data_offsets;
        let range = 8 + length + begin..8 + length + end;
        let bytes = TensorBytes::new(Arc::clone(storage), range).ok_or_else(|| fail(format!("tensor {name:?} lies outside the file")))?;
        let stored = Stored { dtype: info.dtype, shape: info.shape.clone(), bytes };
        if tensors.insert(name.clone(), stored).is_some() {
            return Err(fail(format!("tensor {name:?} is also in another file of the checkpoint")));
        }
    }
    Ok(length)
}

/// Names and ends of a header's entries; refuses a name that occurs twice, which a JSON map would swallow.
struct Entries(Vec<(String, u64)>);

impl Entries {
    fn beyond(&self, data: u64) -> Option<&(String, u64)> {
        self.0.iter().find(|(_, end)| *end > data)
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Entry {
            data_offsets: (u64, u64),
        }
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a safetensors header")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let (mut seen, mut entries) = (HashSet::new(), Vec::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let Entry { data_offsets: (_, end) } = map.next_value()?;
                        entries.push((name.clone(), end));
                    }
                    if seen.contains(&name) {
                        return Err(serde::de::Error::custom(format!("tensor {name:?} occurs twice")));
                    }
                    seen.insert(name);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Names)
    }
}
