//! One Parquet file of a trace, opened with distrust.

use super::thrift::walk_struct;
use super::{TraceError, bounds, quiet};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// A footer larger than this is refused; a part of 650k rows has a few kilobytes.
const MAX_FOOTER_BYTES: u64 = 16 << 20;
/// A page may always have this many bytes decompressed...
const FREE_PAGE_BYTES: u64 = 4 << 20;
/// ...and beyond that this many times what it has in the file.
const MAX_EXPANSION: u64 = 1024;
/// But this many times only when it becomes no larger than this...
const MAX_EXPANDED_BYTES: u64 = 64 << 20;
/// ...and so many times whatever it becomes.
const LARGE_EXPANSION: u64 = 16;

/// A part file: where it is and what its footer says.
#[derive(Debug, Clone)]
pub(super) struct PartHandle {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) metadata: ArrowReaderMetadata,
}

impl PartHandle {
    /// Opens the file and checks its footer against its size.
    pub(super) fn open(path: PathBuf) -> Result<Self, TraceError> {
        let (mut file, bytes) = open_file(&path)?;
        check_footer(&path, &mut file, bytes)?;
        // Types come from the file's own Parquet schema; what a producer's library added is not needed.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata = guarded(&path, || ArrowReaderMetadata::load(&file, options))?;
        let part = Self { path, bytes, metadata };
        part.check_chunks()?;
        Ok(part)
    }

    /// What the footer says.
    pub(super) fn footer(&self) -> &ParquetMetaData {
        self.metadata.metadata()
    }

    /// Number of rows by the row groups, which are what is read.
    pub(super) fn rows(&self) -> u64 {
        self.footer().row_groups().iter().map(|g| u64::try_from(g.num_rows()).unwrap_or(0)).fold(0, u64::saturating_add)
    }

    /// An error about this file.
    pub(super) fn corrupt(&self, reason: impl Into<String>) -> TraceError {
        corrupt(&self.path, reason)
    }

    /// A file handle of its own: reads of two threads must not share a position.
    pub(super) fn reopen(&self) -> Result<File, TraceError> {
        open_file(&self.path).map(|(file, _)| file)
    }

    /// Rows of a row group.
    pub(super) fn group_rows(&self, group: usize) -> usize {
        usize::try_from(self.footer().row_group(group).num_rows()).unwrap_or(0)
    }

    /// Column chunks lie within the file, row counts are numbers.
    fn check_chunks(&self) -> Result<(), TraceError> {
        let mut rows = 0u64;
        for (index, group) in self.footer().row_groups().iter().enumerate() {
            let group_rows =
                u64::try_from(group.num_rows()).map_err(|_| self.corrupt(format!("row group {index} has a negative row count")))?;
            rows = rows.checked_add(group_rows).ok_or_else(|| self.corrupt("more rows than can be counted"))?;
            for chunk in group.columns() {
                let range = chunk_range(chunk);
                if range.is_none_or(|(start, len)| start.checked_add(len).is_none_or(|end| end > self.bytes)) || chunk.file_path().is_some()
                {
                    return Err(
                        self.corrupt(format!("column {} of row group {index} is not within the file", chunk.column_path().string()))
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks the page headers of one column chunk: no page is to become much larger than the file allows.
    pub(super) fn check_pages(&self, file: &mut File, chunk: &ColumnChunkMetaData) -> Result<PageSums, TraceError> {
        let broken = || self.corrupt(format!("column {}: broken page header", chunk.column_path().string()));
        let (mut at, len) = chunk_range(chunk).ok_or_else(broken)?;
        let end = at + len;
        let mut buffer = Vec::new();
        let mut sums = PageSums::default();
        while at < end {
            let mut found = None;
            for want in [4096, end - at] {
                let read = page_header(file, at, want.min(end - at), &mut buffer);
                found = read.map_err(|source| io_or_corrupt(&self.path, source, "broken page header"))?;
                if found.is_some() {
                    break;
                }
            }
            let PageHeader { length, compressed, uncompressed, values } = found.ok_or_else(broken)?;
            let next = at.checked_add(length).and_then(|p| p.checked_add(compressed)).filter(|&next| next <= end).ok_or_else(broken)?;
            let expanded = compressed.saturating_mul(MAX_EXPANSION).min(MAX_EXPANDED_BYTES);
            if uncompressed > FREE_PAGE_BYTES.max(expanded).max(compressed.saturating_mul(LARGE_EXPANSION)) {
                let reason = format!("column {}: a page of {compressed} bytes claims to hold {uncompressed}", chunk.column_path().string());
                return Err(self.corrupt(reason));
            }
            sums.largest = sums.largest.max(uncompressed);
            sums.values = sums.values.saturating_add(values);
            at = next;
        }
        Ok(sums)
    }

    /// Checks that the pages of the columns that are read together, one of each, may be in memory at one time.
    pub(super) fn check_page_bytes(&self, largest: u64) -> Result<(), TraceError> {
        if largest > bounds::page_bytes(self.bytes) {
            return Err(self.corrupt(format!("pages of {largest} bytes, read together, in {} bytes", self.bytes)));
        }
        Ok(())
    }
}

/// What the page headers of a column chunk add up to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PageSums {
    /// Bytes of the largest page, decompressed. No value of the column is larger.
    pub(super) largest: u64,
    /// Values of all pages, as their headers say; a reader decodes no more.
    pub(super) values: u64,
}

struct PageHeader {
    /// Bytes of the header itself.
    length: u64,
    compressed: u64,
    uncompressed: u64,
    /// Of a data page.
    values: u64,
}

/// The header of the page at `at`; `None` where there is none within `want` bytes.
fn page_header(file: &mut File, at: u64, want: u64, buffer: &mut Vec<u8>) -> io::Result<Option<PageHeader>> {
    file.seek(SeekFrom::Start(at))?;
    buffer.clear();
    file.take(want).read_to_end(buffer)?;
    let (mut uncompressed, mut compressed, mut values) = (None, None, 0);
    // The headers of data pages, old and new, are in fields 5 and 8; the number of values is the first field of each.
    let length = walk_struct(buffer, |of, id, value| match (of, id) {
        (0, 2) => uncompressed = u64::try_from(value).ok(),
        (0, 3) => compressed = u64::try_from(value).ok(),
        (5 | 8, 1) => values = u64::try_from(value).unwrap_or(u64::MAX),
        _ => {}
    });
    let found = length.zip(compressed).zip(uncompressed);
    Ok(found.map(|((length, compressed), uncompressed)| PageHeader { length: length as u64, compressed, uncompressed, values }))
}

/// Begin and length of a column chunk.
fn chunk_range(chunk: &ColumnChunkMetaData) -> Option<(u64, u64)> {
    let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
    Some((u64::try_from(start).ok()?, u64::try_from(chunk.compressed_size()).ok()?))
}

const NO_FOOTER: &str = "not a whole Parquet file: it has no footer";

fn check_footer(path: &Path, file: &mut File, bytes: u64) -> Result<(), TraceError> {
    let not_parquet = || corrupt(path, NO_FOOTER);
    let mut tail = [0u8; 8];
    let read = |file: &mut File, at: u64, into: &mut [u8]| {
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(into));
        read.map_err(|error| io_or_corrupt(path, error, NO_FOOTER))
    };
    if bytes < 12 {
        return Err(not_parquet());
    }
    read(file, bytes - 8, &mut tail)?;
    if tail[4..] != *b"PAR1" {
        return Err(not_parquet());
    }
    let len = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
    if len > bytes - 12 || len > MAX_FOOTER_BYTES {
        return Err(not_parquet());
    }
    let mut footer = vec![0; usize::try_from(len).unwrap_or(0)];
    read(file, bytes - 8 - len, &mut footer)?;
    walk_struct(&footer, |_, _, _| {}).map(drop).ok_or_else(|| corrupt(path, "broken Parquet footer"))
}

/// Opens a file of a trace and gives its size. Pipes, devices and directories are refused unopened: opening them may wait
/// for ever.
pub(super) fn open_file(path: &Path) -> Result<(File, u64), TraceError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => corrupt(path, "the manifest lists it, but it is not there"),
        _ if leads_nowhere(&source) => corrupt(path, "its path leads nowhere"),
        _ => TraceError::Io { path: path.to_owned(), action: "open", source },
    };
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(corrupt(path, "not a file"));
    }
    let file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    // Once more, of what was opened.
    if found.is_file() { Ok((file, found.len())) } else { Err(corrupt(path, "not a file")) }
}

/// Whether a path cannot be one of any file: too long, a link to itself, a file where a directory should be.
pub(super) fn leads_nowhere(error: &io::Error) -> bool {
    // ELOOP has no stable kind.
    let link_loop = if cfg!(target_os = "linux") { 40 } else { 62 };
    matches!(error.kind(), io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput | io::ErrorKind::NotADirectory)
        || (cfg!(unix) && error.raw_os_error() == Some(link_loop))
}

/// An error of reading: the system's, unless the file only is shorter than it says or has offsets that no file has.
fn io_or_corrupt(path: &Path, error: io::Error, reason: &str) -> TraceError {
    match error.raw_os_error().filter(|&code| is_environment(code)) {
        Some(_) => TraceError::Io { path: path.to_owned(), action: "read", source: error },
        None => corrupt(path, reason),
    }
}

/// Whether an error of the operating system is about the system and not about an offset that a file gave.
fn is_environment(code: i32) -> bool {
    const INVALID: i32 = 22;
    const OVERFLOW: [i32; 2] = [75, 84];
    code != INVALID && !OVERFLOW.contains(&code)
}

/// The operating system's error within a message of the Parquet library, which passes causes on as text.
fn system_error(message: &str) -> Option<io::Error> {
    let code = message.split("(os error ").nth(1)?.split(')').next()?.parse().ok()?;
    is_environment(code).then(|| io::Error::from_raw_os_error(code))
}

/// An error about a file of a trace.
pub(super) fn corrupt(path: &Path, reason: impl Into<String>) -> TraceError {
    TraceError::Corrupt { path: path.to_owned(), reason: reason.into() }
}

/// Runs a piece of Parquet decoding. The library panics on some broken files: here that is an error, and
/// the only place where it can happen.
pub(super) fn guarded<T>(path: &Path, decode: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, TraceError> {
    match quiet::catch(decode) {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => {
            let text = error.to_string();
            Err(match system_error(&text) {
                Some(source) => TraceError::Io { path: path.to_owned(), action: "read", source },
                None => corrupt(path, text),
            })
        }
        None => Err(corrupt(path, "broken Parquet data")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_errors_are_found_in_the_librarys() {
        let too_many = io::Error::from_raw_os_error(24);
        let path = Path::new("part");
        let direct = guarded(path, || Err::<(), _>(ParquetError::External(Box::new(io::Error::from_raw_os_error(24))))).unwrap_err();
        let wrapped = guarded(path, || Err::<(), _>(ParquetError::ArrowError(format!("Parquet error: External: {too_many}")))).unwrap_err();
        for error in [direct, wrapped] {
            assert!(matches!(&error, TraceError::Io { source, .. } if source.raw_os_error() == Some(24)), "{error}");
        }
        let offset = io::Error::from_raw_os_error(22);
        for text in ["EOF: expected 8 bytes".to_owned(), format!("External: {offset}"), "(os error x)".to_owned()] {
            let error = guarded(path, || Err::<(), _>(ParquetError::General(text))).unwrap_err();
            assert!(matches!(error, TraceError::Corrupt { .. }), "{error}");
        }
    }
}
