//! Opening foreign files: gzip by its magic, bounded lines, JSON values one after the other.

use super::ImportError;
use flate2::read::MultiGzDecoder;
use serde::de::{DeserializeOwned, DeserializeSeed, SeqAccess, Visitor};
use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::marker::PhantomData;
use std::path::Path;
use std::rc::Rc;

/// A line, or one JSON value of several, has at most this many bytes.
pub const MAX_VALUE_BYTES: u64 = 256 << 20;
const GZIP: [u8; 2] = [0x1f, 0x8b];
const BUFFER_BYTES: usize = 1 << 20;

/// Opens a file, unpacking gzip (of one or more members) on the way.
///
/// # Errors
/// When it cannot be read.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>, ImportError> {
    let io = ImportError::io(path);
    let mut file = File::open(path).map_err(&io)?;
    let mut magic = [0; 2];
    let gzip = match file.read_exact(&mut magic) {
        Ok(()) => magic == GZIP,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(io(error)),
    };
    file.seek(SeekFrom::Start(0)).map_err(&io)?;
    if gzip {
        return Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, file)))));
    }
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, file)))
}

/// The lines of a file, numbered from 1, without their ends.
pub struct Lines<'a> {
    path: &'a Path,
    reader: Box<dyn BufRead>,
    line: Vec<u8>,
    number: u64,
}

impl<'a> Lines<'a> {
    /// Opens a file.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open(path: &'a Path) -> Result<Self, ImportError> {
        Ok(Self { path, reader: open(path)?, line: Vec::new(), number: 0 })
    }

    /// The next line that is not empty, and its number.
    ///
    /// # Errors
    /// When it cannot be read or is longer than `limit` bytes.
    pub fn next(&mut self, limit: u64) -> Result<Option<(u64, &[u8])>, ImportError> {
        loop {
            self.line.clear();
            let read = (&mut self.reader).take(limit.saturating_add(1)).read_until(b'\n', &mut self.line);
            if read.map_err(ImportError::io(self.path))? == 0 {
                return Ok(None);
            }
            self.number += 1;
            if self.line.len() as u64 > limit {
                return Err(ImportError::input(self.path, format!("line {}: longer than {limit} bytes", self.number)));
            }
            if self.line.iter().any(|b| !b.is_ascii_whitespace()) {
                break;
            }
        }
        Ok(Some((self.number, self.line.trim_ascii())))
    }
}

/// Hands every JSON value of a file to `take`: the elements of one array, or values one after the other, on lines or not.
/// Gives their number.
///
/// # Errors
/// When the text is not JSON (with line and column), one value is larger than [`MAX_VALUE_BYTES`], or what `take` returns.
pub fn json_values<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T) -> Result<(), ImportError>) -> Result<u64, ImportError> {
    let mut reader = open(path)?;
    let array = first_byte(&mut reader).map_err(ImportError::io(path))? == Some(b'[');
    let budget = Rc::new(Cell::new(MAX_VALUE_BYTES));
    let reader = BufReader::with_capacity(BUFFER_BYTES, Budgeted { reader, budget: Rc::clone(&budget) });
    let wrong = |error: &serde_json::Error| ImportError::input(path, format!("not JSON: {error}"));
    let mut count = 0;
    if array {
        let mut failure = None;
        let elements = Elements {
            take: |value: T| {
                budget.set(MAX_VALUE_BYTES);
                count += 1;
                take(value)
            },
            failure: &mut failure,
            of: PhantomData,
        };
        let mut json = serde_json::Deserializer::from_reader(reader);
        let read = elements.deserialize(&mut json).and_then(|()| json.end());
        return match (failure, read) {
            (Some(failure), _) => Err(failure),
            (None, Err(error)) => Err(wrong(&error)),
            (None, Ok(())) => Ok(count),
        };
    }
    for value in serde_json::Deserializer::from_reader(reader).into_iter::<T>() {
        take(value.map_err(|error| wrong(&error))?)?;
        budget.set(MAX_VALUE_BYTES);
        count += 1;
    }
    Ok(count)
}

fn first_byte(reader: &mut impl BufRead) -> io::Result<Option<u8>> {
    loop {
        let buffer = reader.fill_buf()?;
        let blank = buffer.iter().take_while(|b| b.is_ascii_whitespace()).count();
        match buffer.get(blank) {
            Some(&byte) => return Ok(Some(byte)),
            None if buffer.is_empty() => return Ok(None),
            None => reader.consume(blank),
        }
    }
}

/// Ends with an error when one value takes too many bytes.
struct Budgeted<R> {
    reader: R,
    budget: Rc<Cell<u64>>,
}

impl<R: Read> Read for Budgeted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        let left = self.budget.get().checked_sub(read as u64);
        self.budget.set(left.ok_or_else(|| io::Error::other(format!("one value has more than {} MiB", MAX_VALUE_BYTES >> 20)))?);
        Ok(read)
    }
}

struct Elements<'a, T, F> {
    take: F,
    failure: &'a mut Option<ImportError>,
    of: PhantomData<T>,
}

impl<'de, T: DeserializeOwned, F: FnMut(T) -> Result<(), ImportError>> DeserializeSeed<'de> for Elements<'_, T, F> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: DeserializeOwned, F: FnMut(T) -> Result<(), ImportError>> Visitor<'de> for Elements<'_, T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        while let Some(value) = list.next_element::<T>()? {
            if let Err(failure) = (self.take)(value) {
                *self.failure = Some(failure);
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::io::Write;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn values(bytes: &[u8]) -> Result<Vec<Value>, ImportError> {
        let file = file(bytes);
        let mut found = Vec::new();
        json_values(file.path(), |value: Value| {
            found.push(value);
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn one_object_lines_and_an_array_are_the_same() {
        let want = vec![serde_json::json!({"a": 1}), serde_json::json!({"a": 2})];
        assert_eq!(values(b"{\"a\":1}\n{\"a\":2}\n").unwrap(), want);
        assert_eq!(values(b" [{\"a\": 1},\n {\"a\": 2}]\n").unwrap(), want);
        assert_eq!(values(b"{\n \"a\": 1\n}").unwrap(), want[..1]);
        assert_eq!(values(b"").unwrap(), Vec::<Value>::new());
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(b"{\"a\":1}").unwrap();
        let mut bytes = packed.finish().unwrap();
        let again = bytes.clone();
        bytes.extend(again);
        assert_eq!(values(&bytes).unwrap(), [want[0].clone(), want[0].clone()]);
    }

    #[test]
    fn broken_text_names_its_place() {
        for bad in ["{\"a\":1}\n{\"a\":", "[{\"a\":1},", "[{\"a\":1}] x", "{\"a\":1}\nnothing"] {
            let error = values(bad.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("line") && error.contains("column"), "{bad}: {error}");
        }
    }

    #[test]
    fn lines_are_numbered_and_bounded() {
        let file = file(b"one\n\n  \ntwo  \r\nthree");
        let mut lines = Lines::open(file.path()).unwrap();
        assert_eq!(lines.next(10).unwrap(), Some((1, &b"one"[..])));
        assert_eq!(lines.next(10).unwrap(), Some((4, &b"two"[..])));
        let error = lines.next(4).unwrap_err().to_string();
        assert!(error.contains("line 5"), "{error}");
    }
}
