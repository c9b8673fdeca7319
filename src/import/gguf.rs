//! The directory of a GGUF file, and its float tensors: as much as an importance matrix needs.

use crate::trace::input_file;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

const MAGIC: &[u8] = b"GGUF";
/// Texts, among them names, have at most this many bytes.
const MAX_TEXT: u64 = 64 << 10;
/// Arrays of arrays are not nested deeper.
const MAX_DEPTH: usize = 4;
/// Where tensors begin unless `general.alignment` says otherwise.
const ALIGNMENT: u64 = 32;
/// The tensor type of 32-bit floats.
const F32: u32 = 0;

/// A tensor's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Lengths of the axes, the fastest first.
    pub shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// An open file.
pub struct Gguf {
    reader: Bounded,
    /// Numbers and texts of the metadata; arrays are skipped.
    pub values: BTreeMap<String, Value>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
    data: u64,
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// An unsigned number.
    Unsigned(u64),
    /// A text.
    Text(String),
}

/// A reader that knows how many bytes are left.
struct Bounded {
    file: BufReader<File>,
    at: u64,
    len: u64,
}

fn bad(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

impl Bounded {
    fn take(&mut self, n: u64) -> io::Result<Vec<u8>> {
        if n > self.len.saturating_sub(self.at) {
            return Err(bad(format!("cut off at byte {}", self.at)));
        }
        let mut bytes = Vec::new();
        (&mut self.file).take(n).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != n {
            return Err(bad(format!("cut off at byte {}", self.at)));
        }
        self.at += n;
        Ok(bytes)
    }

    fn skip(&mut self, n: u64) -> io::Result<()> {
        if n > self.len.saturating_sub(self.at) {
            return Err(bad(format!("cut off at byte {}", self.at)));
        }
        self.at += n;
        // Within what is buffered already, nothing is read again: arrays have many short elements.
        self.file.seek_relative(i64::try_from(n).map_err(|_| bad("longer than any file"))?)
    }

    fn u32(&mut self) -> io::Result<u32> {
        let bytes = self.take(4)?;
        bytes.try_into().map(u32::from_le_bytes).map_err(|_| bad("cut off"))
    }

    fn u64(&mut self) -> io::Result<u64> {
        let bytes = self.take(8)?;
        bytes.try_into().map(u64::from_le_bytes).map_err(|_| bad("cut off"))
    }

    fn text(&mut self) -> io::Result<String> {
        let n = self.u64()?;
        if n > MAX_TEXT {
            return Err(bad(format!("a text of {n} bytes before byte {}", self.at)));
        }
        Ok(String::from_utf8_lossy(&self.take(n)?).into_owned())
    }
}

/// Bytes of a plain value of a metadata type; `None` of text (8), array (9) and what is not known.
fn size_of(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

impl Gguf {
    /// Reads the metadata and the directory of tensors.
    ///
    /// # Errors
    /// When it is not a GGUF file of version 2 or 3, or is cut off.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = input_file::open_regular(path)?;
        let len = file.metadata()?.len();
        let mut reader = Bounded { file: BufReader::with_capacity(1 << 16, file), at: 0, len };
        if reader.take(4)? != MAGIC {
            return Err(bad("not a GGUF file"));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(bad(format!("GGUF version {version} is not read")));
        }
        let (tensors, values) = (reader.u64()?, reader.u64()?);
        // A tensor takes 24 bytes of the directory, a value 13.
        if tensors.saturating_mul(24).saturating_add(values.saturating_mul(13)) > len {
            return Err(bad(format!("{tensors} tensors and {values} values do not fit the file")));
        }
        let mut gguf = Self { reader, values: BTreeMap::new(), tensors: BTreeMap::new(), data: 0 };
        for _ in 0..values {
            gguf.value()?;
        }
        for _ in 0..tensors {
            gguf.entry()?;
        }
        let alignment = match gguf.values.get("general.alignment") {
            Some(Value::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 20 => *n,
            Some(other) => return Err(bad(format!("general.alignment is {other:?}"))),
            None => ALIGNMENT,
        };
        gguf.data = gguf.reader.at.next_multiple_of(alignment);
        Ok(gguf)
    }

    fn value(&mut self) -> io::Result<()> {
        let (key, kind) = (self.reader.text()?, self.reader.u32()?);
        match kind {
            8 => {
                let text = self.reader.text()?;
                self.values.insert(key, Value::Text(text));
            }
            9 => self.array(0)?,
            _ => {
                let size = size_of(kind).ok_or_else(|| bad(format!("metadata of type {kind} is not known")))?;
                let bytes = self.reader.take(size)?;
                // Signed numbers and floats are of no interest here.
                if matches!(kind, 0 | 2 | 4 | 7 | 10) {
                    let n = bytes.iter().rev().fold(0u64, |n, &b| (n << 8) | u64::from(b));
                    self.values.insert(key, Value::Unsigned(n));
                }
            }
        }
        Ok(())
    }

    /// Skips an array.
    fn array(&mut self, depth: usize) -> io::Result<()> {
        let (kind, len) = (self.reader.u32()?, self.reader.u64()?);
        if let Some(size) = size_of(kind) {
            return self.reader.skip(len.checked_mul(size).ok_or_else(|| bad("an array that is longer than any file"))?);
        }
        if depth >= MAX_DEPTH || !matches!(kind, 8 | 9) {
            return Err(bad(format!("an array of type {kind} is not known")));
        }
        for _ in 0..len {
            if kind == 8 {
                let n = self.reader.u64()?;
                self.reader.skip(n)?;
            } else {
                self.array(depth + 1)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self) -> io::Result<()> {
        let (name, axes) = (self.reader.text()?, self.reader.u32()?);
        if axes > 8 {
            return Err(bad(format!("tensor `{}` has {axes} axes", name.escape_debug())));
        }
        let shape = (0..axes).map(|_| self.reader.u64()).collect::<io::Result<Vec<u64>>>()?;
        let (kind, offset) = (self.reader.u32()?, self.reader.u64()?);
        self.tensors.insert(name, Entry { shape, kind, offset });
        Ok(())
    }

    /// The numbers of a tensor of 32-bit floats.
    ///
    /// # Errors
    /// When it is of another type or reaches beyond the file.
    pub fn floats(&mut self, entry: &Entry) -> io::Result<Vec<f32>> {
        if entry.kind != F32 {
            return Err(bad(format!("numbers of type {}, not 32-bit floats", entry.kind)));
        }
        let bytes = entry.shape.iter().try_fold(4u64, |n, &len| n.checked_mul(len)).ok_or_else(|| bad("larger than any file"))?;
        let at = self.data.checked_add(entry.offset).filter(|&at| at <= self.reader.len).ok_or_else(|| bad("it begins beyond the file"))?;
        self.reader.at = at;
        self.reader.file.seek(SeekFrom::Start(at))?;
        let bytes = self.reader.take(bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }
}
