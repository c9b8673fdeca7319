//! Part files of a table: small ones at each commit, merged into large ones as they add up.
//!
//! The rows of small parts stay in memory until they are in a large one, so merging never reads.

use super::columns::Columns;
use super::manifest::PartFile;
use super::output::create_new;
use super::{TraceError, route_pages, schema};
use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Int8Type, UInt16Type, UInt32Type};
use arrow_schema::{DataType, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::compute_leaves;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder};
use parquet::schema::types::ColumnPath;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Rows at which the small parts of `routes` become a large one: 4096 windows of 4 rows and 40 layers.
pub const ROUTE_ROWS_PER_GROUP: usize = 650_000;
/// The same for the other tables.
const ROWS_PER_GROUP: usize = 65_536;
/// Numbers in lists that make a large part of fewer rows: the rows of long prompts have a token each.
const LIST_VALUES_PER_GROUP: usize = 16 << 20;
/// Small parts beyond this are merged although they are not a large one yet.
const MAX_SMALL_PARTS: usize = 32;
/// Name ending of files that are being written.
pub(super) const TEMPORARY: &str = ".tmp";

/// A table of a trace that is being written.
pub(super) struct Table<C> {
    /// Rows of the next commit.
    pub(super) pending: C,
    name: &'static str,
    dir: PathBuf,
    schema: SchemaRef,
    /// Of large parts, which stay.
    properties: WriterProperties,
    /// Of small parts, which are soon replaced: cheap to write.
    small_properties: WriterProperties,
    rows_per_group: usize,
    next_part: u32,
    large: Vec<PartFile>,
    small: Vec<PartFile>,
    /// The rows of the small parts.
    tail: Vec<RecordBatch>,
    tail_rows: usize,
    tail_list_values: usize,
}

impl<C: Columns> Table<C> {
    /// A table without parts; its folder is created.
    pub(super) fn create(trace: &Path, name: &'static str, schema: SchemaRef, pending: C) -> Result<Self, TraceError> {
        let dir = trace.join(name);
        fs::create_dir_all(&dir).map_err(io_error(&dir, "create the directory"))?;
        let (properties, small_properties, rows_per_group) = if name == schema::ROUTES {
            (route_properties(&schema), small_route_properties(&schema), ROUTE_ROWS_PER_GROUP)
        } else {
            // A codec's state is made anew for every column: of small parts that would be most of the work.
            let small = base_properties().set_dictionary_enabled(false).set_compression(Compression::UNCOMPRESSED);
            (base_properties().set_compression(zstd()).build(), small.build(), ROWS_PER_GROUP)
        };
        Ok(Self {
            pending,
            name,
            dir,
            schema,
            properties,
            small_properties,
            rows_per_group,
            next_part: 0,
            large: Vec::new(),
            small: Vec::new(),
            tail: Vec::new(),
            tail_rows: 0,
            tail_list_values: 0,
        })
    }

    /// Whether there is enough for a large part: a commit now keeps memory bounded.
    pub(super) fn is_full(&self) -> bool {
        self.tail_rows + self.pending.rows() >= self.rows_per_group
            || self.tail_list_values + self.pending.list_values() >= LIST_VALUES_PER_GROUP
    }

    /// Puts the pending rows on disk; `last` merges what is left. Files that the parts do not name any
    /// more are added to `obsolete`, to be removed once the manifest is in place.
    pub(super) fn flush(&mut self, last: bool, obsolete: &mut Vec<PathBuf>) -> Result<(), TraceError> {
        let (new_rows, full) = (self.pending.rows(), self.is_full());
        let merge = full || self.small.len() >= MAX_SMALL_PARTS || last;
        if new_rows == 0 && !(merge && self.small.len() > 1) {
            return Ok(());
        }
        if new_rows > 0 {
            self.tail_list_values += self.pending.list_values();
            let batch = self.pending.take().map_err(|e| TraceError::Event { what: format!("table {}: {e}", self.name) })?;
            self.tail.push(batch);
            self.tail_rows += new_rows;
        }
        if !merge {
            let part = self.write(self.tail.len() - 1, false)?;
            self.small.push(part);
            return Ok(());
        }
        let large = full || last;
        let part = self.write(0, large)?;
        obsolete.extend(self.small.drain(..).filter_map(|p| Some(self.dir.join(Path::new(&p.path).file_name()?))));
        if large {
            self.large.push(part);
            self.tail.clear();
            (self.tail_rows, self.tail_list_values) = (0, 0);
        } else {
            self.small.push(part);
        }
        Ok(())
    }

    /// The parts that hold the table's rows now, in order.
    pub(super) fn parts(&self) -> Vec<PartFile> {
        self.large.iter().chain(&self.small).cloned().collect()
    }

    /// Writes the tail's batches from `first` on as one part file, whole or not at all.
    fn write(&mut self, first: usize, large: bool) -> Result<PartFile, TraceError> {
        let name = format!("part-{:05}.parquet", self.next_part);
        let path = self.dir.join(&name);
        let temporary = self.dir.join(format!("{name}{TEMPORARY}"));
        let written = self.write_file(&temporary, &self.tail[first..], large).and_then(|of_file| {
            fs::rename(&temporary, &path).map_err(io_error(&path, "rename into place"))?;
            Ok(of_file)
        });
        let (rows, crc32) = written.inspect_err(|_| {
            // Nothing half-written stays; what cannot be removed is not in the manifest either.
            let _ = fs::remove_file(&temporary);
        })?;
        self.next_part += 1;
        Ok(PartFile { path: format!("{}/{name}", self.name), rows, crc32: Some(crc32) })
    }

    /// Gives the rows, and the CRC-32 of the file.
    fn write_file(&self, path: &Path, batches: &[RecordBatch], large: bool) -> Result<(u64, u32), TraceError> {
        let file = create_new(path).map_err(io_error(path, "create the file"))?;
        let mut summed = Summed { file: &file, crc32: crc32fast::Hasher::new() };
        let parquet = |error| parquet_error(path, error);
        let properties = if large { &self.properties } else { &self.small_properties };
        let mut writer = ArrowWriter::try_new(&mut summed, self.schema.clone(), Some(properties.clone())).map_err(parquet)?;
        let all: usize = batches.iter().map(RecordBatch::num_rows).sum();
        if large && self.name == schema::ROUTES && all >= route_pages::LEAST_ROWS {
            self.write_routes(writer, batches).map_err(parquet)?;
            file.sync_all().map_err(io_error(path, "write"))?;
            return Ok((all as u64, summed.crc32.finalize()));
        }
        let mut rows = 0;
        // Every batch ends with a step, so a row group that ends with a batch does, too.
        for batch in batches {
            writer.write(batch).map_err(parquet)?;
            rows += batch.num_rows() as u64;
            if writer.in_progress_rows() >= self.rows_per_group {
                writer.flush().map_err(parquet)?;
            }
        }
        writer.close().map_err(parquet)?;
        file.sync_all().map_err(io_error(path, "write"))?;
        Ok((rows, summed.crc32.finalize()))
    }
}

impl<C> Table<C> {
    /// Writes routes: gate weights as the library does, everything else as [`route_pages`].
    fn write_routes(&self, writer: ArrowWriter<&mut Summed<'_>>, batches: &[RecordBatch]) -> Result<(), ParquetError> {
        let (mut file, factory) = writer.into_serialized_writer()?;
        let columns = file.schema_descr().columns().to_vec();
        let mut left = batches;
        let mut index = 0;
        while !left.is_empty() {
            // Every batch ends with a step, so a row group that ends with a batch does, too.
            let mut rows = 0;
            let full = |batch: &RecordBatch| {
                rows += batch.num_rows();
                rows >= self.rows_per_group
            };
            let n = left.iter().position(full).map_or(left.len(), |at| at + 1);
            let (group, rest) = left.split_at(n);
            let writers = factory.create_column_writers(index)?;
            let mut out = file.next_row_group()?;
            for (((place, field), column), mut writer) in self.schema.fields().iter().enumerate().zip(&columns).zip(writers) {
                let column = || column.clone();
                let chunk = match field.data_type() {
                    DataType::UInt16 if schema::rank_of_column(field.name()).is_some() => {
                        route_pages::experts(column(), &values::<UInt16Type>(group, place))?
                    }
                    DataType::UInt16 => route_pages::keys(column(), &values::<UInt16Type>(group, place))?,
                    DataType::UInt32 => route_pages::steps(column(), &values::<UInt32Type>(group, place))?,
                    DataType::Dictionary(..) => {
                        let codes = group.iter().filter_map(|b| Some(&**b.column(place).as_dictionary_opt::<Int8Type>()?.keys().values()));
                        route_pages::modules(column(), &codes.collect::<Vec<_>>().concat())?
                    }
                    _ => {
                        for batch in group {
                            for leaf in compute_leaves(field, batch.column(place))? {
                                writer.write(&leaf)?;
                            }
                        }
                        writer.close()?.append_to_row_group(&mut out)?;
                        continue;
                    }
                };
                out.append_column(&chunk.0, chunk.1)?;
            }
            out.close()?;
            left = rest;
            index += 1;
        }
        file.close().map(drop)
    }
}

/// A file that is written from its beginning to its end, and the sum over its bytes.
struct Summed<'a> {
    file: &'a File,
    crc32: crc32fast::Hasher,
}

impl Write for Summed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.crc32.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A column of all batches as one.
fn values<T: ArrowPrimitiveType>(batches: &[RecordBatch], place: usize) -> Vec<T::Native> {
    let parts: Vec<&[T::Native]> = batches.iter().filter_map(|b| Some(&**b.column(place).as_primitive_opt::<T>()?.values())).collect();
    parts.concat()
}

fn zstd() -> Compression {
    Compression::ZSTD(ZstdLevel::try_new(1).unwrap_or_default())
}

fn base_properties() -> WriterPropertiesBuilder {
    WriterProperties::builder()
        .set_created_by(concat!("specprof ", env!("CARGO_PKG_VERSION")).into())
        .set_max_row_group_row_count(None)
        .set_max_row_group_bytes(None)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true)
}

/// `routes`: readers plan by the range of `step_id` and skip `module` where it is all one word.
fn route_base() -> WriterPropertiesBuilder {
    let mut properties = base_properties()
        .set_compression(Compression::LZ4_RAW)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_write_batch_size(8192)
        .set_data_page_row_count_limit(65_536);
    for key in [schema::col::STEP_ID, schema::col::MODULE] {
        properties = properties.set_column_statistics_enabled(ColumnPath::from(key), EnabledStatistics::Chunk);
    }
    properties
}

/// Large parts: a dictionary of experts makes 9-bit indices, after which no codec finds anything; LZ4 is for
/// the keys and costs nothing to read. Weights are noise in their low bytes: split, then zstd.
fn route_properties(schema: &SchemaRef) -> WriterProperties {
    let mut properties = route_base();
    for field in schema.fields().iter().filter(|f| f.data_type() == &DataType::Float32) {
        let column = ColumnPath::from(field.name().as_str());
        properties = properties
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_encoding(column.clone(), Encoding::BYTE_STREAM_SPLIT)
            .set_column_compression(column, zstd());
    }
    properties.build()
}

/// Small parts: looking ids up in a dictionary is what writing costs, and every row would pay it twice.
fn small_route_properties(schema: &SchemaRef) -> WriterProperties {
    let mut properties = route_base();
    for field in schema.fields().iter().skip_while(|f| f.name() != schema::col::MODULE).skip(1) {
        let column = ColumnPath::from(field.name().as_str());
        properties =
            properties.set_column_dictionary_enabled(column.clone(), false).set_column_compression(column, Compression::UNCOMPRESSED);
    }
    properties.build()
}

/// Wraps an error of the file system.
pub(super) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> TraceError {
    let path = path.to_owned();
    move |source| TraceError::Io { path, action, source }
}

/// An error of the Parquet writer: the file system's, found again below the library's wrapping.
fn parquet_error(path: &Path, error: ParquetError) -> TraceError {
    let source = match error {
        ParquetError::External(cause) => match cause.downcast::<io::Error>() {
            Ok(io) => *io,
            Err(other) => io::Error::other(other.to_string()),
        },
        other => io::Error::other(other.to_string()),
    };
    TraceError::Io { path: path.to_owned(), action: "write", source }
}
