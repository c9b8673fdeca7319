//! `.pt` files, as `torch.save` writes them: an archive of one pickle and the bytes of its tensors.

use super::ImportError;
use super::npy::Dtype;
use super::pickle::{Element, Pickle, Tensor};
use super::zip::Archive;
use crate::trace::input_file;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

/// The pickle has at most this many bytes, each storage at most [`MAX_STORAGE`].
const MAX_PICKLE: u64 = 128 << 20;
const MAX_STORAGE: u64 = 256 << 20;
/// What is taken of a storage at once: it is in memory three times.
const MAX_TENSOR: u64 = 64 << 20;
/// All tensors that are read have together at most this many times the file's bytes: views may overlap, but not without end.
const READ_FACTOR: u64 = 8;
/// The first bytes of torch's container before archives.
pub const LEGACY_MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

/// An open file.
pub struct TorchFile {
    path: PathBuf,
    archive: Archive<BufReader<File>>,
    /// Index of the member by the storage's key.
    storages: BTreeMap<String, usize>,
    pickle: Pickle,
    /// Bytes that may still be read.
    left: u64,
    /// The storage that was read last.
    last: Option<(usize, Vec<u8>)>,
}

/// Numbers of a tensor, in C order.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbers {
    /// Their type; half floats have become floats, truth values bytes.
    pub dtype: Dtype,
    /// Lengths of the axes.
    pub shape: Vec<usize>,
    /// Little-endian.
    pub bytes: Vec<u8>,
}

impl Numbers {
    /// As expert ids.
    ///
    /// # Errors
    /// The number that is none.
    pub fn ids(&self) -> Result<Vec<i32>, String> {
        let mut ids = Vec::new();
        self.dtype.decode(&self.bytes, &mut ids)?;
        Ok(ids)
    }

    /// As counts.
    ///
    /// # Errors
    /// The number that is none.
    pub fn counts(&self) -> Result<Vec<u64>, String> {
        if self.dtype == Dtype::I64 {
            let (numbers, _) = self.bytes.as_chunks::<8>();
            return numbers.iter().map(|&b| count(i64::from_le_bytes(b))).collect();
        }
        if self.dtype == Dtype::U64 {
            return Ok(self.bytes.as_chunks::<8>().0.iter().map(|&b| u64::from_le_bytes(b)).collect());
        }
        self.ids()?.into_iter().map(|n| count(i64::from(n))).collect()
    }
}

fn count(n: i64) -> Result<u64, String> {
    u64::try_from(n).map_err(|_| format!("{n} is not a count"))
}

impl TorchFile {
    /// Reads the archive's directory and the pickle.
    ///
    /// # Errors
    /// When it is not such a file, or its pickle holds anything but data.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let wrong = |reason: String| ImportError::input(path, reason);
        let io = ImportError::io(path);
        let file = input_file::open_regular(path).map_err(&io)?;
        let bytes = file.metadata().map_err(&io)?.len();
        let mut archive = Archive::open(BufReader::new(file)).map_err(|e| wrong(e.to_string()))?;
        // All members stand below one folder; its name is free.
        let names: Vec<String> = archive.members().iter().map(|m| m.name.clone()).collect();
        let found = names.iter().position(|name| name == "data.pkl" || name.ends_with("/data.pkl"));
        let index = found.ok_or_else(|| wrong("an archive without data.pkl: not made by torch.save".into()))?;
        let folder = names.get(index).and_then(|n| n.strip_suffix("data.pkl")).unwrap_or_default().to_owned();
        if let Some(order) = names.iter().position(|name| *name == format!("{folder}byteorder")) {
            let order = archive.read(order, 64).map_err(|e| wrong(e.to_string()))?;
            if order.trim_ascii() != b"little" {
                return Err(wrong("its numbers are big-endian; save it on a little-endian machine".into()));
            }
        }
        let data = format!("{folder}data/");
        let storages = names.iter().enumerate().filter_map(|(i, n)| n.strip_prefix(&data).map(|key| (key.to_owned(), i))).collect();
        let pickle = archive.read(index, MAX_PICKLE).map_err(|e| wrong(e.to_string()))?;
        let pickle = Pickle::parse(pickle).map_err(&wrong)?;
        Ok(Self { path: path.to_owned(), archive, storages, pickle, left: bytes.saturating_mul(READ_FACTOR), last: None })
    }

    /// What the file holds.
    pub fn pickle(&self) -> &Pickle {
        &self.pickle
    }

    /// An error of this file.
    pub fn wrong(&self, reason: impl Into<String>) -> ImportError {
        ImportError::input(&self.path, reason)
    }

    fn charge(&mut self, bytes: u64) -> Result<(), String> {
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or_else(|| format!("its tensors have more than {READ_FACTOR} times the file's bytes"))?;
        Ok(())
    }

    /// Reads a tensor's numbers in C order.
    ///
    /// # Errors
    /// When the storage is not there, does not have the size that the pickle says, or is too large.
    pub fn read(&mut self, tensor: &Tensor) -> Result<Numbers, String> {
        let key = &tensor.storage.key;
        let index = *self.storages.get(key).ok_or_else(|| format!("storage {} is not in the archive", key.escape_debug()))?;
        let size = element_size(tensor.storage.element);
        if self.last.as_ref().is_none_or(|(last, _)| *last != index) {
            let bytes = self.archive.members().get(index).map_or(0, |m| m.size);
            self.charge(bytes)?;
            // The one before goes first: two would be in memory otherwise.
            self.last = None;
            let content = self.archive.read(index, MAX_STORAGE).map_err(|e: io::Error| e.to_string())?;
            self.last = Some((index, content));
        }
        let elements = tensor.shape.iter().try_fold(1u64, |n, &len| n.checked_mul(len));
        let bytes = elements.and_then(|n| n.checked_mul(size as u64)).ok_or("a tensor of more elements than any file has")?;
        self.charge(bytes)?;
        if bytes > MAX_TENSOR {
            return Err(format!("a tensor of {bytes} bytes, at most {MAX_TENSOR} are read at once"));
        }
        let content = self.last.as_ref().map(|(_, content)| content.as_slice()).unwrap_or_default();
        if tensor.storage.len.checked_mul(size as u64) != Some(content.len() as u64) {
            return Err(format!(
                "storage {} has {} bytes, the pickle says {} elements of {size}",
                key.escape_debug(),
                content.len(),
                tensor.storage.len
            ));
        }
        let gathered = gather(tensor, content, size, bytes)?;
        let (dtype, bytes) = plain(tensor.storage.element, gathered);
        let shape = tensor.shape.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).collect();
        Ok(Numbers { dtype, shape, bytes })
    }
}

/// The elements of a view, in C order.
fn gather(tensor: &Tensor, content: &[u8], size: usize, bytes: u64) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(usize::try_from(bytes).map_err(|_| "a tensor larger than memory")?);
    if bytes == 0 {
        return Ok(out);
    }
    let of = |at: u64, n: u64| -> Result<&[u8], String> {
        let begin = usize::try_from(at).ok().and_then(|at| at.checked_mul(size));
        let end = usize::try_from(n).ok().and_then(|n| n.checked_mul(size)).zip(begin).and_then(|(n, begin)| begin.checked_add(n));
        begin.zip(end).and_then(|(begin, end)| content.get(begin..end)).ok_or_else(|| "a tensor reaches beyond its storage".to_owned())
    };
    // The last axis in one piece where its elements are neighbours.
    let last_axis = tensor.shape.len().saturating_sub(1);
    let whole_last = tensor.strides.last().is_none_or(|&s| s == 1);
    let run = if whole_last { tensor.shape.last().copied().unwrap_or(1) } else { 1 };
    let outer = if whole_last { last_axis.min(tensor.shape.len()) } else { tensor.shape.len() };
    let (shape, strides) = (tensor.shape.get(..outer).unwrap_or_default(), tensor.strides.get(..outer).unwrap_or_default());
    let mut index = vec![0u64; outer];
    loop {
        let at = index.iter().zip(strides).fold(tensor.offset, |sum, (i, s)| sum.saturating_add(i.saturating_mul(*s)));
        out.extend_from_slice(of(at, run)?);
        let mut carried = true;
        for (i, len) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < *len {
                carried = false;
                break;
            }
            *i = 0;
        }
        if carried {
            return Ok(out);
        }
    }
}

fn element_size(element: Element) -> usize {
    match element {
        Element::Byte | Element::Char | Element::Bool => 1,
        Element::Short | Element::Half | Element::BFloat16 => 2,
        Element::Int | Element::Float => 4,
        Element::Long | Element::Double => 8,
    }
}

/// The type of NumPy that holds the same numbers.
fn plain(element: Element, bytes: Vec<u8>) -> (Dtype, Vec<u8>) {
    let widen = |of: fn([u8; 2]) -> f32| bytes.as_chunks::<2>().0.iter().flat_map(|&b| of(b).to_le_bytes()).collect();
    match element {
        Element::Byte | Element::Bool => (Dtype::U8, bytes),
        Element::Char => (Dtype::I8, bytes),
        Element::Short => (Dtype::I16, bytes),
        Element::Int => (Dtype::I32, bytes),
        Element::Long => (Dtype::I64, bytes),
        Element::Float => (Dtype::F32, bytes),
        Element::Double => (Dtype::F64, bytes),
        Element::Half => (Dtype::F32, widen(|b| half::f16::from_le_bytes(b).to_f32())),
        Element::BFloat16 => (Dtype::F32, widen(|b| half::bf16::from_le_bytes(b).to_f32())),
    }
}

/// A view of the same storage with its axes in another order.
pub fn permuted(tensor: &Tensor, order: &[usize]) -> Option<Tensor> {
    let pick = |of: &[u64]| order.iter().map(|&axis| of.get(axis).copied()).collect::<Option<Vec<u64>>>();
    Some(Tensor { shape: pick(&tensor.shape)?, strides: pick(&tensor.strides)?, ..tensor.clone() })
}

/// The view at one index of the first axis.
pub fn slice(tensor: &Tensor, index: u64) -> Option<Tensor> {
    let ([len, shape @ ..], [stride, strides @ ..]) = (tensor.shape.as_slice(), tensor.strides.as_slice()) else { return None };
    let offset = tensor.offset.checked_add(index.checked_mul(*stride)?)?;
    (index < *len).then(|| Tensor { offset, shape: shape.to_vec(), strides: strides.to_vec(), storage: tensor.storage.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::pickle::Storage;

    fn tensor(element: Element, offset: u64, shape: &[u64], strides: &[u64]) -> Tensor {
        Tensor { storage: Storage { element, key: "0".into(), len: 12 }, offset, shape: shape.into(), strides: strides.into() }
    }

    #[test]
    fn views_are_read_in_c_order() {
        let content: Vec<u8> = (0..12).collect();
        let read = |t: &Tensor| gather(t, &content, 1, t.shape.iter().product()).unwrap();
        let whole = tensor(Element::Byte, 0, &[3, 4], &[4, 1]);
        assert_eq!(read(&whole), content);
        assert_eq!(read(&permuted(&whole, &[1, 0]).unwrap()), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]);
        assert_eq!(read(&slice(&whole, 2).unwrap()), [8, 9, 10, 11]);
        assert_eq!(slice(&whole, 3), None);
        assert_eq!(read(&tensor(Element::Byte, 1, &[2, 2], &[4, 2])), [1, 3, 5, 7]);
        assert_eq!(read(&tensor(Element::Byte, 5, &[], &[])), [5]);
        assert!(read(&tensor(Element::Byte, 5, &[0, 3], &[1, 1])).is_empty());
        assert!(gather(&tensor(Element::Byte, 10, &[3], &[1]), &content, 1, 3).is_err());
    }

    #[test]
    fn half_floats_and_truth_values_become_numbers() {
        let (dtype, bytes) = plain(Element::BFloat16, vec![0x80, 0x3f]);
        assert_eq!((dtype, bytes), (Dtype::F32, 1f32.to_le_bytes().to_vec()));
        let (dtype, bytes) = plain(Element::Half, vec![0x00, 0x40]);
        assert_eq!(Numbers { dtype, shape: vec![1], bytes }.ids(), Ok(vec![2]));
        let long = Numbers { dtype: Dtype::I64, shape: vec![1], bytes: 5_000_000_000i64.to_le_bytes().to_vec() };
        assert_eq!(long.counts(), Ok(vec![5_000_000_000]));
        assert!(long.ids().is_err());
        assert!(Numbers { dtype: Dtype::I8, shape: vec![1], bytes: vec![0xff] }.counts().is_err());
    }
}
