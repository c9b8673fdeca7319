//! A safetensors file: its header, and whole-number tensors read one at a time.

use super::npy::Dtype;
use super::trtllm::dtype;
use crate::trace::input_file;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Headers are not larger than this.
const MAX_HEADER: u64 = 64 << 20;
/// One tensor has at most this many bytes.
const MAX_TENSOR: u64 = 64 << 20;

/// A tensor's type and place.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Entry {
    dtype: String,
    /// Lengths of the axes.
    pub shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// An open file.
pub struct TensorFile {
    file: File,
    data: u64,
    bytes: u64,
    tensors: BTreeMap<String, Entry>,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// # Errors
    /// A sentence, when it is not such a file or is cut off.
    pub fn open(path: &Path) -> Result<Self, String> {
        let mut file = input_file::open_regular(path).map_err(|e| format!("cannot read: {e}"))?;
        let bytes = file.metadata().map_err(|e| format!("cannot read: {e}"))?.len();
        let mut len = [0; 8];
        file.read_exact(&mut len).map_err(|_| "too short for a safetensors file")?;
        let len = u64::from_le_bytes(len);
        let data = len.checked_add(8).filter(|&data| data <= bytes && len <= MAX_HEADER);
        let data = data.ok_or_else(|| format!("announces a header of {len} bytes in a file of {bytes}; cut off, or not safetensors"))?;
        let mut json = Vec::new();
        (&mut file).take(len).read_to_end(&mut json).map_err(|e| format!("cannot read: {e}"))?;
        let mut header: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&json).map_err(|e| format!("its header is not JSON: {e}"))?;
        header.remove("__metadata__");
        let tensors = header
            .into_iter()
            .map(|(name, value)| {
                let entry = Entry::deserialize(value).map_err(|e| format!("tensor `{}`: {e}", name.escape_debug()))?;
                Ok((name, entry))
            })
            .collect::<Result<_, String>>()?;
        Ok(Self { file, data, bytes, tensors })
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, Entry> {
        &self.tensors
    }

    fn read(&mut self, entry: &Entry) -> Result<(Dtype, Vec<u8>), String> {
        let kind = dtype(&entry.dtype).ok_or_else(|| format!("numbers of type {} are not read", entry.dtype.escape_debug()))?;
        let [begin, end] = entry.data_offsets;
        let need = entry.shape.iter().try_fold(kind.size() as u64, |n, &len| n.checked_mul(len));
        let len = end.checked_sub(begin).filter(|&len| Some(len) == need);
        let len = len.ok_or_else(|| format!("shape {:?} of {} is not {} bytes", entry.shape, kind.name(), end.saturating_sub(begin)))?;
        let at = self.data.checked_add(begin);
        let at = at.filter(|at| at.checked_add(len).is_some_and(|end| end <= self.bytes)).ok_or("it ends beyond the file: cut off")?;
        if len > MAX_TENSOR {
            return Err(format!("a tensor of {len} bytes, at most {MAX_TENSOR} are read"));
        }
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(at)).map_err(|e| format!("cannot read: {e}"))?;
        (&mut self.file).take(len).read_to_end(&mut bytes).map_err(|e| format!("cannot read: {e}"))?;
        Ok((kind, bytes))
    }

    /// A tensor as expert ids.
    ///
    /// # Errors
    /// A sentence, when it is not whole or holds something else.
    pub fn ids(&mut self, entry: &Entry) -> Result<Vec<i32>, String> {
        let (kind, bytes) = self.read(entry)?;
        let mut ids = Vec::new();
        kind.decode(&bytes, &mut ids)?;
        Ok(ids)
    }

    /// A tensor as counts.
    ///
    /// # Errors
    /// As [`TensorFile::ids`].
    pub fn unsigned(&mut self, entry: &Entry) -> Result<Vec<u64>, String> {
        let (dtype, bytes) = self.read(entry)?;
        super::torch::Numbers { dtype, shape: Vec::new(), bytes }.counts()
    }
}
