//! The small tables as plain columns and structs: `steps`, `requests`, `telemetry`.

use super::bounds::Budget;
use super::part_file::{PartHandle, guarded};
use super::schema::{self, col};
use super::telemetry::TelemetrySample;
use super::{FinishReason, Phase, RequestEvent, StepEvent, StepRoutes, TraceError};
use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Float32Type, Float64Type, Int16Type, Int64Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Type;

/// Rows that are decoded at a time: few, since a row may hold a long text.
const BATCH_ROWS: usize = 1024;
/// Text that may be decoded at a time, bytes: no more rows than this has room for, each as long as its page.
const BATCH_TEXT: u64 = 16 << 20;

/// Lists of numbers, one a row, end to end.
#[derive(Debug, Clone, PartialEq)]
pub struct Lists<T> {
    values: Vec<T>,
    ends: Vec<usize>,
}

impl<T> Default for Lists<T> {
    fn default() -> Self {
        Self { values: Vec::new(), ends: Vec::new() }
    }
}

impl<T: Copy> Lists<T> {
    fn push(&mut self, list: &[T]) {
        self.values.extend_from_slice(list);
        self.ends.push(self.values.len());
    }

    /// The list of a row; empty beyond the end and where there is none.
    pub fn get(&self, row: usize) -> &[T] {
        let Some(&end) = self.ends.get(row) else { return &[] };
        let begin = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[begin..end]
    }

    /// All lists end to end.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Number of lists.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// `steps`, one vector a column, in order of `step_id`.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(missing_docs, reason = "as the fields of StepEvent")]
pub struct Steps {
    pub step_id: Vec<u32>,
    pub request_id: Vec<u32>,
    pub phase: Vec<Phase>,
    pub rows: Vec<u16>,
    pub accepted: Vec<u16>,
    pub context_len: Vec<u32>,
    pub host_begin_ns: Vec<i64>,
    pub host_end_ns: Vec<i64>,
    pub draft_host_ns: Vec<i64>,
    pub target_host_ns: Vec<i64>,
    pub device_ns: Vec<Option<i64>>,
    /// Whether the host times are known; they are all 0 and mean nothing otherwise.
    pub host_times: bool,
    /// `None` where a step had a pass to itself, and everywhere in traces before 1.2.
    pub pass_id: Vec<Option<u32>>,
    pub emitted_tokens: Lists<u32>,
    /// Empty unless asked for.
    pub input_tokens: Lists<u32>,
    /// `None` for a chain. Empty unless asked for.
    pub parents: Vec<Option<Vec<i16>>>,
    pub draft_probs: Vec<Option<Vec<f32>>>,
    /// Empty unless asked for.
    pub draft_confidences: Vec<Option<Vec<f32>>>,
}

impl Steps {
    /// Number of steps.
    pub fn len(&self) -> usize {
        self.step_id.len()
    }

    /// Whether there is no step.
    pub fn is_empty(&self) -> bool {
        self.step_id.is_empty()
    }

    /// The step at an index, without its routes; `None` beyond the last one. All columns must have been read.
    pub fn event(&self, at: usize) -> Option<StepEvent> {
        Some(StepEvent {
            step_id: *self.step_id.get(at)?,
            request_id: *self.request_id.get(at)?,
            phase: *self.phase.get(at)?,
            accepted: *self.accepted.get(at)?,
            context_len: *self.context_len.get(at)?,
            input_tokens: self.input_tokens.get(at).to_vec(),
            parents: self.parents.get(at)?.clone(),
            emitted_tokens: self.emitted_tokens.get(at).to_vec(),
            draft_probs: self.draft_probs.get(at)?.clone(),
            draft_confidences: self.draft_confidences.get(at)?.clone(),
            pass_id: *self.pass_id.get(at)?,
            host_begin_ns: *self.host_begin_ns.get(at)?,
            host_end_ns: *self.host_end_ns.get(at)?,
            draft_host_ns: *self.draft_host_ns.get(at)?,
            target_host_ns: *self.target_host_ns.get(at)?,
            device_ns: *self.device_ns.get(at)?,
            routes: StepRoutes::default(),
        })
    }
}

/// Reads `steps`, with input tokens, parents and confidences when `details` are wanted. `times` says whether host times are known,
/// `bytes` are those of all tables: of tokens that nobody has named, hardly any are in this one.
pub(super) fn read_steps(parts: &[PartHandle], bytes: u64, details: bool, times: bool) -> Result<Steps, TraceError> {
    let mut steps = Steps { host_times: times, ..Steps::default() };
    let mut wanted = schema::steps(times);
    // Traces before 1.2 have no such column.
    let confidences = details && parts.iter().all(|part| part.metadata.schema().field_with_name(col::DRAFT_CONFIDENCES).is_ok());
    let read = |name: &str| match name {
        col::PARENTS | col::INPUT_TOKENS => details,
        col::DRAFT_CONFIDENCES => confidences,
        _ => true,
    };
    let kept: Vec<_> = wanted.fields().iter().filter(|f| read(f.name())).cloned().collect();
    wanted = Schema::new(kept).into();
    let host = |rows: &Rows<'_>, name: &str| {
        // Whatever stands in a column that the manifest calls unknown is not read.
        if times { rows.numbers::<Int64Type>(name) } else { rows.maybe_numbers::<Int64Type>(name).map(|values| vec![0; values.len()]) }
    };
    let older = Schema::new(wanted.fields().iter().filter(|f| f.name() != col::PASS_ID).cloned().collect::<Vec<_>>());
    let mut budget = Budget::new(schema::STEPS, parts)?.with_lists_of(bytes);
    for part in parts {
        let has_passes = part.metadata.schema().fields().iter().any(|f| f.name() == col::PASS_ID);
        let wanted: &Schema = if has_passes { &wanted } else { &older };
        read_part(part, schema::STEPS, wanted, &mut budget, |rows, _| {
            let first = steps.len();
            steps.step_id.extend(rows.numbers::<UInt32Type>(col::STEP_ID)?);
            steps.request_id.extend(rows.numbers::<UInt32Type>(col::REQUEST_ID)?);
            steps.phase.extend(rows.words(col::PHASE, Phase::parse)?);
            steps.rows.extend(rows.numbers::<UInt16Type>(col::ROWS)?);
            steps.accepted.extend(rows.numbers::<UInt16Type>(col::ACCEPTED)?);
            steps.context_len.extend(rows.numbers::<UInt32Type>(col::CONTEXT_LEN)?);
            steps.host_begin_ns.extend(host(rows, col::HOST_BEGIN_NS)?);
            steps.host_end_ns.extend(host(rows, col::HOST_END_NS)?);
            steps.draft_host_ns.extend(host(rows, col::DRAFT_HOST_NS)?);
            steps.target_host_ns.extend(host(rows, col::TARGET_HOST_NS)?);
            steps.device_ns.extend(rows.maybe_numbers::<Int64Type>(col::DEVICE_NS)?);
            let passes = if has_passes { rows.maybe_numbers::<UInt32Type>(col::PASS_ID)? } else { Vec::new() };
            steps.pass_id.extend(passes);
            steps.pass_id.resize(steps.step_id.len(), None);
            rows.lists::<UInt32Type>(col::EMITTED_TOKENS, |list| {
                steps.emitted_tokens.push(list.unwrap_or_default());
                list.is_some()
            })?;
            if details {
                rows.lists::<UInt32Type>(col::INPUT_TOKENS, |list| {
                    steps.input_tokens.push(list.unwrap_or_default());
                    list.is_some()
                })?;
            }
            if details {
                rows.lists::<Int16Type>(col::PARENTS, |list| {
                    steps.parents.push(list.map(<[i16]>::to_vec));
                    true
                })?;
            }
            rows.lists::<Float32Type>(col::DRAFT_PROBS, |list| {
                steps.draft_probs.push(list.map(<[f32]>::to_vec));
                true
            })?;
            if confidences {
                rows.lists::<Float32Type>(col::DRAFT_CONFIDENCES, |list| {
                    steps.draft_confidences.push(list.map(<[f32]>::to_vec));
                    true
                })?;
            } else if details {
                steps.draft_confidences.resize(steps.step_id.len(), None);
            }
            let before = first.saturating_sub(1);
            match (before + 1..steps.step_id.len()).find(|&i| steps.step_id[i] <= steps.step_id[i - 1]) {
                Some(i) if i >= first => Err(rows.error(i - first, &format!("step {} is out of order", steps.step_id[i]))),
                _ => Ok(()),
            }
        })?;
    }
    Ok(steps)
}

/// Reads `requests`.
pub(super) fn read_requests(parts: &[PartHandle]) -> Result<Vec<RequestEvent>, TraceError> {
    let mut requests = Vec::new();
    let mut budget = Budget::new(schema::REQUESTS, parts)?;
    for part in parts {
        read_part(part, schema::REQUESTS, &schema::requests(), &mut budget, |rows, budget| {
            let request_id = rows.numbers::<UInt32Type>(col::REQUEST_ID)?;
            let prompt_tokens = rows.numbers::<UInt32Type>(col::PROMPT_TOKENS)?;
            let generated_tokens = rows.numbers::<UInt32Type>(col::GENERATED_TOKENS)?;
            let finish_reason = rows.words(col::FINISH_REASON, FinishReason::parse)?;
            let (ids, tags) = (rows.texts(col::ID, budget)?, rows.texts(col::TAGS, budget)?);
            let (prompts, outputs) = (rows.texts(col::PROMPT_TEXT, budget)?, rows.texts(col::OUTPUT_TEXT, budget)?);
            let texts = ids.into_iter().zip(tags).zip(prompts.into_iter().zip(outputs));
            for (i, ((id, tags), (prompt_text, output_text))) in texts.enumerate() {
                requests.push(RequestEvent {
                    request_id: request_id[i],
                    id: id.ok_or_else(|| rows.null(col::ID, i))?,
                    prompt_tokens: prompt_tokens[i],
                    generated_tokens: generated_tokens[i],
                    finish_reason: finish_reason[i],
                    tags: tags.ok_or_else(|| rows.null(col::TAGS, i))?,
                    prompt_text,
                    output_text,
                });
            }
            Ok(())
        })?;
    }
    Ok(requests)
}

/// Reads `request_id` of `requests`.
pub(super) fn read_request_ids(parts: &[PartHandle]) -> Result<Vec<u32>, TraceError> {
    let mut ids = Vec::new();
    let mut budget = Budget::new(schema::REQUESTS, parts)?;
    let all = schema::requests();
    let wanted = Schema::new(all.fields().iter().filter(|f| f.name() == col::REQUEST_ID).cloned().collect::<Vec<_>>());
    for part in parts {
        read_part(part, schema::REQUESTS, &wanted, &mut budget, |rows, _| {
            ids.extend(rows.numbers::<UInt32Type>(col::REQUEST_ID)?);
            Ok(())
        })?;
    }
    Ok(ids)
}

/// Reads `telemetry`.
pub(super) fn read_telemetry(parts: &[PartHandle]) -> Result<Vec<TelemetrySample>, TraceError> {
    let mut samples = Vec::new();
    let mut budget = Budget::new(schema::TELEMETRY, parts)?;
    for part in parts {
        read_part(part, schema::TELEMETRY, &schema::telemetry(), &mut budget, |rows, budget| {
            let time_ns = rows.numbers::<Int64Type>(col::TIME_NS)?;
            let sm_clock_mhz = rows.maybe_numbers::<UInt32Type>(col::SM_CLOCK_MHZ)?;
            let memory_clock_mhz = rows.maybe_numbers::<UInt32Type>(col::MEMORY_CLOCK_MHZ)?;
            let power_w = rows.maybe_numbers::<Float64Type>(col::POWER_W)?;
            let temperature_c = rows.maybe_numbers::<Float64Type>(col::TEMPERATURE_C)?;
            let memory_used_bytes = rows.maybe_numbers::<UInt64Type>(col::MEMORY_USED_BYTES)?;
            let host_load = rows.maybe_numbers::<Float64Type>(col::HOST_LOAD)?;
            let cpu_mhz = rows.maybe_numbers::<Float64Type>(col::CPU_MHZ)?;
            let rss_bytes = rows.maybe_numbers::<UInt64Type>(col::RSS_BYTES)?;
            for (i, throttle_reasons) in rows.texts(col::THROTTLE_REASONS, budget)?.into_iter().enumerate() {
                samples.push(TelemetrySample {
                    time_ns: time_ns[i],
                    sm_clock_mhz: sm_clock_mhz[i],
                    memory_clock_mhz: memory_clock_mhz[i],
                    power_w: power_w[i],
                    temperature_c: temperature_c[i],
                    throttle_reasons,
                    memory_used_bytes: memory_used_bytes[i],
                    host_load: host_load[i],
                    cpu_mhz: cpu_mhz[i],
                    rss_bytes: rss_bytes[i],
                });
            }
            Ok(())
        })?;
    }
    Ok(samples)
}

/// Some decoded rows of a part, with what is needed to say where they are.
pub(super) struct Rows<'a> {
    part: &'a PartHandle,
    table: &'static str,
    first_row: usize,
    batch: RecordBatch,
}

/// Checks that the file has the wanted columns in the wanted types, then decodes them.
pub(super) fn read_part(
    part: &PartHandle,
    table: &'static str,
    wanted: &Schema,
    budget: &mut Budget,
    mut take: impl FnMut(&Rows<'_>, &mut Budget) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let found = part.metadata.schema();
    let mut roots = Vec::with_capacity(wanted.fields().len());
    for field in wanted.fields() {
        let Some((index, column)) = found.fields().iter().enumerate().find(|(_, f)| f.name() == field.name()) else {
            return Err(part.corrupt(format!("table {table} has no column {}", field.name())));
        };
        if !same_type(field.data_type(), column.data_type()) {
            let (is, should) = (column.data_type(), field.data_type());
            return Err(part.corrupt(format!("table {table}, column {} is of type {is}, not {should}", field.name())));
        }
        roots.push(index);
    }
    let mut file = part.reopen()?;
    let mask = ProjectionMask::roots(part.footer().file_metadata().schema_descr(), roots);
    let mut largest_text = 1;
    for group in part.footer().row_groups() {
        let mut together = 0u64;
        for (index, chunk) in group.columns().iter().enumerate() {
            if !mask.leaf_included(index) {
                continue;
            }
            let pages = part.check_pages(&mut file, chunk)?;
            together = together.saturating_add(pages.largest);
            if chunk.column_type() == Type::BYTE_ARRAY {
                largest_text = largest_text.max(pages.largest);
            }
            let name = chunk.column_path().parts().first().map_or("", String::as_str);
            if chunk.column_descr().max_rep_level() > 0 && !budget.take_list_values(name, pages.values) {
                return Err(part.corrupt(format!("table {table}, column {name}: more numbers than its files can stand for")));
            }
        }
        part.check_page_bytes(together)?;
    }
    let batch_rows = usize::try_from(BATCH_TEXT / largest_text).unwrap_or(BATCH_ROWS).clamp(1, BATCH_ROWS);
    let build = || {
        ParquetRecordBatchReaderBuilder::new_with_metadata(file, part.metadata.clone())
            .with_projection(mask)
            .with_batch_size(batch_rows)
            .build()
    };
    let mut reader = guarded(&part.path, build)?;
    let mut first_row = 0;
    while let Some(batch) = guarded(&part.path, || reader.next().transpose().map_err(Into::into))? {
        let rows = Rows { part, table, first_row, batch };
        take(&rows, budget)?;
        first_row += rows.batch.num_rows();
    }
    if first_row as u64 != part.rows() {
        return Err(part.corrupt(format!("table {table}: {first_row} rows, its footer says {}", part.rows())));
    }
    Ok(())
}

/// Whether a column of a file can be read as wanted. The file's types come from Parquet alone, where a
/// dictionary is an encoding and no type, and lists may name their items differently.
fn same_type(wanted: &DataType, found: &DataType) -> bool {
    match (wanted, found) {
        (DataType::Dictionary(_, wanted), found) => **wanted == *found,
        (DataType::List(wanted), DataType::List(found)) => wanted.data_type() == found.data_type(),
        (wanted, found) => wanted == found,
    }
}

impl Rows<'_> {
    pub(super) fn error(&self, row: usize, what: &str) -> TraceError {
        self.part.corrupt(format!("table {}, row {}: {what}", self.table, self.first_row + row))
    }

    pub(super) fn null(&self, name: &str, row: usize) -> TraceError {
        self.error(row, &format!("column {name} is null"))
    }

    fn column(&self, name: &str) -> Result<&dyn Array, TraceError> {
        let column = self.batch.column_by_name(name);
        column.map(AsRef::as_ref).ok_or_else(|| self.part.corrupt(format!("table {} has no column {name}", self.table)))
    }

    pub(super) fn maybe_numbers<T: ArrowPrimitiveType>(&self, name: &str) -> Result<Vec<Option<T::Native>>, TraceError> {
        let column = self.column(name)?.as_primitive_opt::<T>();
        column.map(|c| c.iter().collect()).ok_or_else(|| self.part.corrupt(format!("table {}, column {name}: wrong type", self.table)))
    }

    pub(super) fn numbers<T: ArrowPrimitiveType>(&self, name: &str) -> Result<Vec<T::Native>, TraceError> {
        let values = self.maybe_numbers::<T>(name)?;
        values.into_iter().enumerate().map(|(i, value)| value.ok_or_else(|| self.null(name, i))).collect()
    }

    fn text_column(&self, name: &str) -> Result<&arrow_array::StringArray, TraceError> {
        let column = self.column(name)?.as_string_opt::<i32>();
        column.ok_or_else(|| self.part.corrupt(format!("table {}, column {name}: wrong type", self.table)))
    }

    pub(super) fn texts(&self, name: &str, budget: &mut Budget) -> Result<Vec<Option<String>>, TraceError> {
        let texts = self.text_column(name)?.iter().enumerate().map(|(i, text)| {
            let left = budget.text.checked_sub(text.map_or(0, str::len) as u64);
            budget.text = left.ok_or_else(|| self.error(i, "more text than the file can hold"))?;
            Ok(text.map(str::to_owned))
        });
        texts.collect()
    }

    pub(super) fn words<T>(&self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, TraceError> {
        let words = self.text_column(name)?.iter().enumerate().map(|(i, word)| {
            let word = word.ok_or_else(|| self.null(name, i))?;
            parse(word).ok_or_else(|| {
                self.error(i, &format!("column {name} has the unknown word `{}`", word.chars().take(40).collect::<String>().escape_debug()))
            })
        });
        words.collect()
    }

    /// Hands over each row's list; `take` says whether that was allowed to be null.
    pub(super) fn lists<T: ArrowPrimitiveType>(
        &self,
        name: &str,
        mut take: impl FnMut(Option<&[T::Native]>) -> bool,
    ) -> Result<(), TraceError> {
        let wrong = || self.part.corrupt(format!("table {}, column {name}: wrong type", self.table));
        let lists = self.column(name)?.as_list_opt::<i32>().ok_or_else(wrong)?;
        for i in 0..lists.len() {
            let items = lists.is_valid(i).then(|| lists.value(i));
            let items = items.as_ref().map(|items| items.as_primitive_opt::<T>().ok_or_else(wrong)).transpose()?;
            if items.is_some_and(|items| items.null_count() > 0) || !take(items.map(|items| &items.values()[..])) {
                return Err(self.null(name, i));
            }
        }
        Ok(())
    }
}
