//! Opening foreign files: gzip by its magic, bounded lines.

use super::ImportError;
pub use super::json_values::{MAX_VALUE_BYTES, json_values};
use crate::trace::input_file;
use flate2::read::MultiGzDecoder;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const BUFFER_BYTES: usize = 1 << 20;
const KEPT_BYTES: usize = 16 << 20;

/// Opens a file, unpacking gzip (of one or more members) on the way.
///
/// # Errors
/// When it cannot be read.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>, ImportError> {
    let io = ImportError::io(path);
    let mut file = input_file::open_regular(path).map_err(&io)?;
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
            // One long line does not keep its room.
            self.line.shrink_to(KEPT_BYTES);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
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
