//! `routes` as plain slices: units that threads can read independently of each other, batch by batch.

use super::dictionary_pages::{ModuleCode, Pages, Value};
use super::part_file::{PartHandle, guarded};
use super::{TraceError, bounds, schema};
use parquet::basic::{Encoding, Type};
use parquet::column::page::PageReader;
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int32Type};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::file::statistics::Statistics;
use std::fs::File;
use std::sync::Arc;

/// Rows of a batch: as many as the caches hold the ids of, in columns and in rows...
pub const BATCH_ROWS: usize = 16_384;
/// ...unless they have more ids than this.
const BATCH_IDS: usize = 1 << 20;
/// Row groups are put together into units of at least this many rows: less is not worth a thread's while.
const LEAST_UNIT_ROWS: u64 = 16_384;
/// Text of `module` that may be decoded at a time, bytes.
const BATCH_TEXT: u64 = 16 << 20;

/// A run of consecutive row groups that shares no step with any other unit.
#[derive(Debug, Clone)]
pub struct RouteUnit {
    parts: Arc<Vec<PartHandle>>,
    /// Part, row group, and the first row of the group within its part.
    groups: Vec<(usize, usize, u64)>,
    k: usize,
    experts: u16,
    weights: bool,
    /// Range of step ids by the statistics, where there are any.
    steps: Option<(u32, u32)>,
    rows: u64,
}

/// Consecutive rows of `routes`, one slice a column, all of the same length.
#[derive(Debug)]
pub struct RouteBatch<'a> {
    /// Step of each row, non-decreasing.
    pub step_id: &'a [u32],
    /// Layer of each row, non-decreasing within a step.
    pub layer: &'a [u16],
    /// Row of the pass, ascending within a layer.
    pub row: &'a [u16],
    /// Whether the row is of the draft module.
    pub draft: &'a [bool],
    /// The k expert columns in rank order, each id below the model's number of experts.
    pub ids: &'a [Vec<u16>],
    /// The k weight columns, when asked for and kept.
    pub weights: Option<&'a [Vec<f32>]>,
    /// Where the first row is: part file and row within it, for messages.
    pub part: &'a std::path::Path,
    /// See `part`.
    pub first_row: u64,
}

impl RouteBatch<'_> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.step_id.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.step_id.is_empty()
    }
}

/// Plans the units of all parts. `weights` says whether the weight columns are there.
pub(super) fn plan(parts: &Arc<Vec<PartHandle>>, k: usize, experts: u16, weights: bool) -> Result<Vec<RouteUnit>, TraceError> {
    bounds::check_routes(parts, k)?;
    let mut units: Vec<RouteUnit> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        check_columns(part, k, weights)?;
        let step_column = column(part, schema::col::STEP_ID)?;
        let mut first_row = 0;
        for group in 0..part.footer().num_row_groups() {
            let rows = part.group_rows(group) as u64;
            if rows == 0 {
                continue;
            }
            let steps = step_range(part.footer().row_group(group).column(step_column));
            let group = (index, group, first_row);
            first_row += rows;
            // A group belongs to the unit before unless the statistics show that they share no step.
            match units.last_mut() {
                Some(last)
                    if last.rows < LEAST_UNIT_ROWS || !matches!((last.steps, steps), (Some((_, end)), Some((begin, _))) if begin > end) =>
                {
                    last.groups.push(group);
                    last.rows += rows;
                    last.steps = last.steps.zip(steps).map(|((a, b), (c, d))| (a.min(c), b.max(d)));
                }
                _ => units.push(RouteUnit { parts: Arc::clone(parts), groups: vec![group], k, experts, weights, steps, rows }),
            }
        }
    }
    Ok(units)
}

impl RouteUnit {
    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// First and last step by the files' statistics; `None` where they have none.
    pub fn steps(&self) -> Option<(u32, u32)> {
        self.steps
    }

    /// Reads the unit from its beginning; `weights` asks for gate weights where they are kept.
    pub fn read(&self, weights: bool) -> RouteReader<'_> {
        let weights = weights && self.weights;
        RouteReader {
            unit: self,
            next_group: 0,
            group: None,
            last_key: None,
            buffers: Buffers {
                ids: vec![Vec::new(); self.k],
                weights: vec![Vec::new(); if weights { self.k } else { 0 }],
                ..Buffers::default()
            },
        }
    }
}

#[derive(Debug, Default)]
struct Buffers {
    step_id: Vec<u32>,
    layer: Vec<u16>,
    row: Vec<u16>,
    module: Vec<ModuleCode>,
    draft: Vec<bool>,
    ids: Vec<Vec<u16>>,
    weights: Vec<Vec<f32>>,
}

/// The row group that is being read.
struct Group {
    part: usize,
    first_row: u64,
    left: usize,
    step_id: Numbers<u32>,
    layer: Numbers<u16>,
    row: Numbers<u16>,
    module: Modules,
    ids: Vec<Numbers<u16>>,
    weights: Vec<ColumnReaderImpl<FloatType>>,
}

/// Hands out the batches of a unit in order.
pub struct RouteReader<'a> {
    unit: &'a RouteUnit,
    next_group: usize,
    group: Option<Group>,
    /// Step, layer, row and module of the last row.
    last_key: Option<(u32, u16, u16, bool)>,
    buffers: Buffers,
}

impl RouteReader<'_> {
    /// The next batch; `None` at the end. Batches are of at most [`BATCH_ROWS`] rows and need not end with a step.
    ///
    /// # Errors
    /// [`TraceError::Corrupt`] naming the part and the row: an id that the model does not have, a null,
    /// rows out of order, data that cannot be decoded.
    pub fn next_batch(&mut self) -> Result<Option<RouteBatch<'_>>, TraceError> {
        if self.group.as_ref().is_none_or(|g| g.left == 0) {
            let Some(&(part, group, first_row)) = self.unit.groups.get(self.next_group) else {
                self.check_end()?;
                return Ok(None);
            };
            self.next_group += 1;
            self.group = Some(self.open(part, group, first_row)?);
        }
        let Some(group) = self.group.as_mut() else { return Ok(None) };
        let part = &self.unit.parts[group.part];
        let rows = group.left.min(BATCH_ROWS).min((BATCH_IDS / self.unit.k.max(1)).max(1));
        let first_row = group.first_row;
        group.fill(part, first_row, rows, &mut self.buffers)?;
        group.left -= rows;
        group.first_row += rows as u64;
        self.check_order(part, first_row)?;
        let b = &self.buffers;
        Ok(Some(RouteBatch {
            step_id: &b.step_id,
            layer: &b.layer,
            row: &b.row,
            draft: &b.draft,
            ids: &b.ids,
            weights: (!b.weights.is_empty()).then_some(&b.weights),
            part: &part.path,
            first_row,
        }))
    }

    fn open(&self, part_index: usize, group: usize, first_row: u64) -> Result<Group, TraceError> {
        let part = &self.unit.parts[part_index];
        let mut file = part.reopen()?;
        let own = Arc::new(part.reopen()?);
        let unit = self.unit;
        let mut together = 0u64;
        let mut chunk = |name: &str| -> Result<Chunk<'_>, TraceError> {
            let index = column(part, name)?;
            let metadata = part.footer().row_group(group).column(index);
            let largest_page = part.check_pages(&mut file, metadata)?.largest;
            together = together.saturating_add(largest_page);
            part.check_page_bytes(together)?;
            Ok(Chunk { part, file: Arc::clone(&own), rows: part.group_rows(group), metadata, largest_page })
        };
        let limit = u32::from(unit.experts).saturating_sub(1);
        Ok(Group {
            part: part_index,
            first_row,
            left: part.group_rows(group),
            step_id: chunk(schema::col::STEP_ID)?.numbers(u32::MAX)?,
            layer: chunk(schema::col::LAYER)?.numbers(u32::from(u16::MAX))?,
            row: chunk(schema::col::ROW)?.numbers(u32::from(u16::MAX))?,
            module: chunk(schema::col::MODULE)?.modules()?,
            ids: (0..unit.k).map(|rank| chunk(&schema::expert_column(rank))?.numbers(limit)).collect::<Result<_, _>>()?,
            weights: (0..self.buffers.weights.len())
                .map(|rank| chunk(&schema::weight_column(rank))?.weights())
                .collect::<Result<_, _>>()?,
        })
    }

    /// Rows come in order of (step, layer, row); a drafter's rows may share a place with others.
    fn check_order(&mut self, part: &PartHandle, first_row: u64) -> Result<(), TraceError> {
        let b = &self.buffers;
        let at = |i: usize| (b.step_id[i], b.layer[i], b.row[i], b.draft[i]);
        let Some(last) = b.step_id.len().checked_sub(1) else { return Ok(()) };
        let unordered = |before: (u32, u16, u16, bool), now: (u32, u16, u16, bool)| {
            let place = |k: (u32, u16, u16, bool)| (k.0, k.1, k.2);
            place(now) < place(before) || (place(now) == place(before) && !now.3)
        };
        let error = |i: usize| {
            let (step, layer, row, _) = at(i);
            let row_number = first_row + i as u64;
            Err(part.corrupt(format!("table routes, row {row_number}: step {step}, layer {layer}, row {row} is out of order")))
        };
        match self.last_key {
            Some(before) if unordered(before, at(0)) => return error(0),
            None if self.unit.steps.is_some_and(|(first, _)| b.step_id[0] < first) => {
                return Err(part.corrupt("column step_id: a value below what its statistics say"));
            }
            _ => {}
        }
        // Almost always the places just rise; only otherwise does it matter whose rows they are.
        if !rise(&b.step_id, &b.layer, &b.row)
            && let Some(i) = (0..last).find(|&i| unordered(at(i), at(i + 1)))
        {
            return error(i + 1);
        }
        self.last_key = Some(at(last));
        Ok(())
    }

    fn check_end(&self) -> Result<(), TraceError> {
        match (self.unit.steps, self.last_key, self.group.as_ref()) {
            (Some((_, last)), Some((step, ..)), Some(group)) if step > last => {
                Err(self.unit.parts[group.part].corrupt("column step_id: a value above what its statistics say"))
            }
            _ => Ok(()),
        }
    }
}

/// Whether the places (step, layer, row) rise strictly.
fn rise(step_id: &[u32], layer: &[u16], row: &[u16]) -> bool {
    /// Without a branch, so that it is done in vectors.
    #[inline(always)]
    fn all(step_id: &[u32], layer: &[u16], row: &[u16]) -> bool {
        let place = |((&step, &layer), &row): ((&u32, &u16), &u16)| u64::from(step) << 32 | u64::from(layer) << 16 | u64::from(row);
        let places = || step_id.iter().zip(layer).zip(row);
        let falls = places().zip(places().skip(1)).map(|(a, b)| u64::from(place(b) <= place(a)));
        falls.fold(0, |sum, falls| sum | falls) == 0
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn with_vectors(step_id: &[u32], layer: &[u16], row: &[u16]) -> bool {
            all(step_id, layer, row)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has it.
            return unsafe { with_vectors(step_id, layer, row) };
        }
    }
    all(step_id, layer, row)
}

impl Group {
    fn fill(&mut self, part: &PartHandle, first_row: u64, rows: usize, b: &mut Buffers) -> Result<(), TraceError> {
        let beyond = |name: &str, at: usize, what: &str| {
            Err(part.corrupt(format!("table routes, column {name}, row {}: {what}", first_row + at as u64)))
        };
        let in_column = |name: &str, error: TraceError| match error {
            TraceError::Corrupt { path, reason } => {
                let to = first_row + rows as u64;
                TraceError::Corrupt { path, reason: format!("table routes, column {name}, rows {first_row} to {to}: {reason}") }
            }
            other => other,
        };
        macro_rules! fill {
            ($source:expr, $into:expr, $name:expr, $what:expr) => {
                if let Some(at) = $source.fill(part, rows, &mut $into).map_err(|e| in_column($name, e))? {
                    return beyond($name, at, $what);
                }
            };
        }
        fill!(self.step_id, b.step_id, schema::col::STEP_ID, "not a step id");
        fill!(self.layer, b.layer, schema::col::LAYER, "not a layer");
        fill!(self.row, b.row, schema::col::ROW, "not a row");
        for (rank, (source, into)) in self.ids.iter_mut().zip(&mut b.ids).enumerate() {
            fill!(source, *into, &schema::expert_column(rank), "an expert that the model does not have");
        }
        for (rank, (source, into)) in self.weights.iter_mut().zip(&mut b.weights).enumerate() {
            into.clear();
            let read = guarded(&part.path, || read_all(source, rows, into)).map_err(|e| in_column(&schema::weight_column(rank), e))?;
            if read < rows {
                return beyond(&schema::weight_column(rank), read, "a null, or no value");
            }
        }
        if let Modules::All(code) = self.module {
            b.draft.clear();
            b.draft.resize(rows, code == ModuleCode(1));
        } else {
            fill!(self.module, b.module, schema::col::MODULE, "neither `target` nor `draft`");
            b.draft.clear();
            b.draft.extend(b.module.iter().map(|&code| code == ModuleCode(1)));
        }
        Ok(())
    }
}

/// The reader of an integer column: the fast way where the encoding allows it, else the library's.
enum Numbers<T> {
    Pages(Pages<T>),
    Library { reader: ColumnReaderImpl<Int32Type>, limit: u32 },
}

impl<T: Value + TryFrom<u32>> Numbers<T> {
    /// Reads `rows` values; gives the place of the first that the column must not have.
    fn fill(&mut self, part: &PartHandle, rows: usize, out: &mut Vec<T>) -> Result<Option<usize>, TraceError> {
        match self {
            Self::Pages(pages) => fill_from_pages(pages, part, rows, out),
            Self::Library { reader, limit } => {
                let mut values = Vec::with_capacity(rows);
                let read = guarded(&part.path, || read_all(reader, rows, &mut values))?;
                out.clear();
                for (at, value) in values.iter().enumerate() {
                    match T::try_from(value.cast_unsigned()) {
                        Ok(narrow) if value.cast_unsigned() <= *limit => out.push(narrow),
                        _ => return Ok(Some(at)),
                    }
                }
                Ok((read < rows).then_some(read))
            }
        }
    }
}

/// The reader of the `module` column.
enum Modules {
    /// By the statistics, every row has this value.
    All(ModuleCode),
    Pages(Pages<ModuleCode>),
    /// The library's, so many rows at a time.
    Library(ColumnReaderImpl<ByteArrayType>, usize),
}

impl Modules {
    fn fill(&mut self, part: &PartHandle, rows: usize, out: &mut Vec<ModuleCode>) -> Result<Option<usize>, TraceError> {
        match self {
            Self::All(code) => {
                out.clear();
                out.resize(rows, *code);
                Ok(None)
            }
            Self::Pages(pages) => fill_from_pages(pages, part, rows, out),
            Self::Library(reader, step) => {
                out.clear();
                let mut values: Vec<ByteArray> = Vec::new();
                while out.len() < rows {
                    let wanted = (rows - out.len()).min(*step);
                    values.clear();
                    let read = guarded(&part.path, || read_all(reader, wanted, &mut values))?;
                    let before = out.len();
                    out.extend(values.iter().map(|word| ModuleCode::of(word.data())));
                    let bad = out[before..].iter().position(|&code| code == ModuleCode::BAD).or((read < wanted).then_some(read));
                    if let Some(at) = bad {
                        return Ok(Some(before + at));
                    }
                }
                Ok(None)
            }
        }
    }
}

fn fill_from_pages<T: Value>(pages: &mut Pages<T>, part: &PartHandle, rows: usize, out: &mut Vec<T>) -> Result<Option<usize>, TraceError> {
    out.resize(rows, T::BAD);
    guarded(&part.path, || pages.fill(out))?;
    let bad = pages.has_bad && out.contains(&T::BAD);
    Ok(bad.then(|| out.iter().position(|&value| value == T::BAD)).flatten())
}

/// Reads up to `rows` values of a column without lists; fewer when there is a null.
fn read_all<T: parquet::data_type::DataType>(
    reader: &mut ColumnReaderImpl<T>,
    rows: usize,
    values: &mut Vec<T::T>,
) -> Result<usize, parquet::errors::ParquetError> {
    let mut levels = Vec::new();
    let (_, read, _) = reader.read_records(rows, Some(&mut levels), None, values)?;
    // Of a chunk with nulls, the first one's place.
    Ok(levels.iter().position(|&level| level == 0).unwrap_or(read).min(read))
}

/// A column chunk that is about to be read.
struct Chunk<'a> {
    part: &'a PartHandle,
    file: Arc<File>,
    rows: usize,
    metadata: &'a ColumnChunkMetaData,
    largest_page: u64,
}

impl Chunk<'_> {
    fn pages(&self) -> Result<Box<dyn PageReader>, TraceError> {
        let open = || SerializedPageReader::new(Arc::clone(&self.file), self.metadata, self.rows, None);
        Ok(Box::new(guarded(&self.part.path, open)?))
    }

    fn is_simple(&self) -> bool {
        let simple = [Encoding::PLAIN, Encoding::RLE, Encoding::RLE_DICTIONARY, Encoding::PLAIN_DICTIONARY];
        self.metadata.encodings().all(|encoding| simple.contains(&encoding))
    }

    fn nullable(&self) -> bool {
        self.metadata.column_descr().max_def_level() > 0
    }

    fn numbers<T: Value>(self, limit: u32) -> Result<Numbers<T>, TraceError> {
        let pages = self.pages()?;
        Ok(if self.is_simple() {
            Numbers::Pages(Pages::new(pages, limit, self.nullable()))
        } else {
            Numbers::Library { reader: ColumnReaderImpl::new(self.metadata.column_descr_ptr(), pages), limit }
        })
    }

    fn modules(self) -> Result<Modules, TraceError> {
        if let Some(code) = only_module(self.metadata) {
            return Ok(Modules::All(code));
        }
        let pages = self.pages()?;
        Ok(if self.is_simple() {
            Modules::Pages(Pages::new(pages, 0, self.nullable()))
        } else {
            // Words may be as long as their page each, whatever the page has of them.
            let step = usize::try_from(BATCH_TEXT / self.largest_page.max(1)).unwrap_or(BATCH_ROWS).clamp(1, BATCH_ROWS);
            Modules::Library(ColumnReaderImpl::new(self.metadata.column_descr_ptr(), pages), step)
        })
    }

    fn weights(self) -> Result<ColumnReaderImpl<FloatType>, TraceError> {
        Ok(ColumnReaderImpl::new(self.metadata.column_descr_ptr(), self.pages()?))
    }
}

/// The one word of a `module` chunk, where its statistics say that there is only one.
fn only_module(chunk: &ColumnChunkMetaData) -> Option<ModuleCode> {
    let Some(Statistics::ByteArray(s)) = chunk.statistics() else { return None };
    let exact = s.min_is_exact() && s.max_is_exact() && s.null_count_opt() == Some(0);
    let word = s.min_opt().filter(|min| exact && s.max_opt() == Some(min))?;
    Some(ModuleCode::of(word.data())).filter(|&code| code != ModuleCode::BAD)
}

/// Smallest and largest step id of a chunk by its statistics.
fn step_range(chunk: &ColumnChunkMetaData) -> Option<(u32, u32)> {
    let Some(Statistics::Int32(s)) = chunk.statistics() else { return None };
    let (min, max) = (s.min_opt()?.cast_unsigned(), s.max_opt()?.cast_unsigned());
    (min <= max).then_some((min, max))
}

/// Index of a top-level column.
fn column(part: &PartHandle, name: &str) -> Result<usize, TraceError> {
    let columns = part.footer().file_metadata().schema_descr().columns();
    let found = columns.iter().position(|c| matches!(c.path().parts(), [only] if only == name));
    found.ok_or_else(|| part.corrupt(format!("table routes has no column {name}")))
}

fn check_columns(part: &PartHandle, k: usize, weights: bool) -> Result<(), TraceError> {
    // A manifest with too small a k would make every statistic one of the first experts only.
    for found in part.footer().file_metadata().schema_descr().columns() {
        let [name] = found.path().parts() else { continue };
        if schema::rank_of_column(name).is_some_and(|rank| rank >= k) {
            return Err(part.corrupt(format!("table routes has a column {name}, the manifest says {k} experts per token")));
        }
    }
    let keys = [(schema::col::STEP_ID, Type::INT32), (schema::col::LAYER, Type::INT32), (schema::col::ROW, Type::INT32)];
    let experts = (0..k).map(|rank| (schema::expert_column(rank), Type::INT32));
    let gate = (0..if weights { k } else { 0 }).map(|rank| (schema::weight_column(rank), Type::FLOAT));
    let names = keys.into_iter().chain([(schema::col::MODULE, Type::BYTE_ARRAY)]).map(|(name, kind)| (name.to_owned(), kind));
    for (name, kind) in names.chain(experts).chain(gate) {
        let index = column(part, &name)?;
        let descr = part.footer().file_metadata().schema_descr().column(index);
        if descr.physical_type() != kind || descr.max_rep_level() > 0 || descr.max_def_level() > 1 {
            return Err(part.corrupt(format!("table routes, column {name} is of type {}, not {kind}", descr.physical_type())));
        }
    }
    Ok(())
}
