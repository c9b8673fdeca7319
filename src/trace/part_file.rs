//! One Parquet file of a trace, opened with distrust.

use super::thrift::walk_struct;
use super::{TraceError, quiet};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// A footer larger than this is refused; a part of 650k rows has a few kilobytes.
const MAX_FOOTER_BYTES: u64 = 16 << 20;
/// A page may always have this many bytes decompressed...
const FREE_PAGE_BYTES: u64 = 4 << 20;
/// ...and beyond that this many times what it has in the file.
const MAX_EXPANSION: u64 = 1024;

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
        let mut file = File::open(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => corrupt(&path, "the manifest lists it, but it is not there"),
            _ => TraceError::Io { path: path.clone(), action: "open", source: e },
        })?;
        let read_error = |source| TraceError::Io { path: path.clone(), action: "read", source };
        let found = file.metadata().map_err(read_error)?;
        if !found.is_file() {
            return Err(corrupt(&path, "not a file"));
        }
        let bytes = found.len();
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
        self.footer().row_groups().iter().map(|g| u64::try_from(g.num_rows()).unwrap_or(0)).sum()
    }

    /// An error about this file.
    pub(super) fn corrupt(&self, reason: impl Into<String>) -> TraceError {
        corrupt(&self.path, reason)
    }

    /// A file handle of its own: reads of two threads must not share a position.
    pub(super) fn reopen(&self) -> Result<File, TraceError> {
        File::open(&self.path).map_err(|source| TraceError::Io { path: self.path.clone(), action: "open", source })
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
    pub(super) fn check_pages(&self, file: &mut File, chunk: &ColumnChunkMetaData) -> Result<(), TraceError> {
        let broken = || self.corrupt(format!("column {}: broken page header", chunk.column_path().string()));
        let (mut at, len) = chunk_range(chunk).ok_or_else(broken)?;
        let end = at + len;
        let mut buffer = Vec::new();
        while at < end {
            let (header, compressed, uncompressed) =
                [4096, end - at].into_iter().find_map(|want| page_header(file, at, want.min(end - at), &mut buffer)).ok_or_else(broken)?;
            let next = at.checked_add(header).and_then(|p| p.checked_add(compressed)).filter(|&next| next <= end).ok_or_else(broken)?;
            if uncompressed > FREE_PAGE_BYTES.max(compressed.saturating_mul(MAX_EXPANSION)) {
                let reason = format!("column {}: a page of {compressed} bytes claims to hold {uncompressed}", chunk.column_path().string());
                return Err(self.corrupt(reason));
            }
            at = next;
        }
        Ok(())
    }
}

/// Length of the header, compressed and uncompressed size of the page at `at`.
fn page_header(file: &mut File, at: u64, want: u64, buffer: &mut Vec<u8>) -> Option<(u64, u64, u64)> {
    file.seek(SeekFrom::Start(at)).ok()?;
    buffer.clear();
    file.take(want).read_to_end(buffer).ok()?;
    let (mut uncompressed, mut compressed) = (None, None);
    let header = walk_struct(buffer, |id, value| match id {
        2 => uncompressed = u64::try_from(value).ok(),
        3 => compressed = u64::try_from(value).ok(),
        _ => {}
    })?;
    Some((header as u64, compressed?, uncompressed?))
}

/// Begin and length of a column chunk.
fn chunk_range(chunk: &ColumnChunkMetaData) -> Option<(u64, u64)> {
    let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
    Some((u64::try_from(start).ok()?, u64::try_from(chunk.compressed_size()).ok()?))
}

fn check_footer(path: &Path, file: &mut File, bytes: u64) -> Result<(), TraceError> {
    let not_parquet = || corrupt(path, "not a whole Parquet file: it has no footer");
    let mut tail = [0u8; 8];
    let read = |file: &mut File, at: u64, into: &mut [u8]| file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(into));
    if bytes < 12 || read(file, bytes - 8, &mut tail).is_err() || tail[4..] != *b"PAR1" {
        return Err(not_parquet());
    }
    let len = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
    if len > bytes - 12 || len > MAX_FOOTER_BYTES {
        return Err(not_parquet());
    }
    let mut footer = vec![0; usize::try_from(len).unwrap_or(0)];
    read(file, bytes - 8 - len, &mut footer).map_err(|_| not_parquet())?;
    walk_struct(&footer, |_, _| {}).map(drop).ok_or_else(|| corrupt(path, "broken Parquet footer"))
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
        Some(Err(error)) => Err(corrupt(path, error.to_string())),
        None => Err(corrupt(path, "broken Parquet data")),
    }
}
