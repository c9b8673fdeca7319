//! The small tables as plain structs: `requests`, `telemetry`; and how any small table is read.

use super::bounds::Budget;
use super::part_file::{PartHandle, guarded};
use super::schema::{self, col};
use super::telemetry::TelemetrySample;
use super::{FinishReason, RequestEvent, TraceError};
use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Float64Type, Int64Type, UInt32Type, UInt64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Type;

/// Rows that are decoded at a time...
const BATCH_ROWS: usize = 8192;
/// ...unless they have more text than this, bytes: each may hold one as long as its page.
const BATCH_TEXT: u64 = 16 << 20;

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

/// Where the wanted columns are in a file, whose types they have.
pub(super) fn roots(part: &PartHandle, table: &'static str, wanted: &Schema) -> Result<Vec<usize>, TraceError> {
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
    Ok(roots)
}

/// Checks that the file has the wanted columns in the wanted types, then decodes them.
pub(super) fn read_part(
    part: &PartHandle,
    table: &'static str,
    wanted: &Schema,
    budget: &mut Budget,
    mut take: impl FnMut(&Rows<'_>, &mut Budget) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let roots = roots(part, table, wanted)?;
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
        // The items of all rows end to end: an array of its own for every row would take longer than reading them.
        let items = lists.values().as_primitive_opt::<T>().ok_or_else(wrong)?;
        for (i, ends) in lists.value_offsets().windows(2).enumerate() {
            let range = usize::try_from(ends[0]).ok().zip(usize::try_from(ends[1]).ok());
            let list = range.and_then(|(begin, end)| Some((begin..end, items.values().get(begin..end)?))).filter(|_| lists.is_valid(i));
            let null_inside = list.as_ref().is_some_and(|(range, _)| items.null_count() > 0 && range.clone().any(|at| items.is_null(at)));
            if null_inside || !take(list.map(|(_, list)| list)) {
                return Err(self.null(name, i));
            }
        }
        Ok(())
    }
}
