//! The tables' columns: the only file with column names.
//!
//! Only types that every Parquet reader has: integers, floats, text (plain or as a dictionary) and lists
//! of numbers. Times are `i64` columns whose names end in `_ns`.

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use std::sync::Arc;

/// One row per ended request.
pub const REQUESTS: &str = "requests";
/// One row per forward pass of the target.
pub const STEPS: &str = "steps";
/// One row per step, layer and row.
pub const ROUTES: &str = "routes";
/// One row per sample of the machine's state.
pub const TELEMETRY: &str = "telemetry";
/// One row per kernel launch, or per operation of the CPU engine.
pub const KERNELS: &str = "kernels";

/// The entries of a partial report, which is no table of a trace.
pub const PARTIAL: &str = "partial";

/// The tables of this version.
pub const TABLES: [&str; 5] = [REQUESTS, STEPS, ROUTES, KERNELS, TELEMETRY];

/// Column names.
pub mod col {
    #![expect(missing_docs, reason = "each constant is the name it spells; traces/README.md says what is in the column")]
    pub const STEP_ID: &str = "step_id";
    pub const LAYER: &str = "layer";
    pub const ROW: &str = "row";
    pub const MODULE: &str = "module";

    pub const REQUEST_ID: &str = "request_id";
    pub const PHASE: &str = "phase";
    pub const ROWS: &str = "rows";
    pub const ACCEPTED: &str = "accepted";
    pub const CONTEXT_LEN: &str = "context_len";
    pub const INPUT_TOKENS: &str = "input_tokens";
    pub const PASS_ID: &str = "pass_id";
    pub const PARENTS: &str = "parents";
    pub const EMITTED_TOKENS: &str = "emitted_tokens";
    pub const DRAFT_PROBS: &str = "draft_probs";
    pub const DRAFT_CONFIDENCES: &str = "draft_confidences";
    pub const HOST_BEGIN_NS: &str = "host_begin_ns";
    pub const HOST_END_NS: &str = "host_end_ns";
    pub const DRAFT_HOST_NS: &str = "draft_host_ns";
    pub const TARGET_HOST_NS: &str = "target_host_ns";
    pub const DEVICE_NS: &str = "device_ns";

    pub const ID: &str = "id";
    pub const PROMPT_TOKENS: &str = "prompt_tokens";
    pub const GENERATED_TOKENS: &str = "generated_tokens";
    pub const FINISH_REASON: &str = "finish_reason";
    pub const TAGS: &str = "tags";
    pub const PROMPT_TEXT: &str = "prompt_text";
    pub const OUTPUT_TEXT: &str = "output_text";

    pub const COMPONENT: &str = "component";
    pub const NAME: &str = "name";
    pub const STREAM: &str = "stream";
    pub const BEGIN_NS: &str = "begin_ns";
    pub const END_NS: &str = "end_ns";
    pub const CORRELATION_ID: &str = "correlation_id";
    pub const GRAPH_NODE_ID: &str = "graph_node_id";
    pub const GRID: &str = "grid";
    pub const BLOCK: &str = "block";
    pub const REGISTERS: &str = "registers";
    pub const SHARED_BYTES: &str = "shared_bytes";

    pub const KIND: &str = "kind";
    pub const VALUES: &str = "values";

    pub const TIME_NS: &str = "time_ns";
    pub const SM_CLOCK_MHZ: &str = "sm_clock_mhz";
    pub const MEMORY_CLOCK_MHZ: &str = "memory_clock_mhz";
    pub const POWER_W: &str = "power_w";
    pub const TEMPERATURE_C: &str = "temperature_c";
    pub const THROTTLE_REASONS: &str = "throttle_reasons";
    pub const MEMORY_USED_BYTES: &str = "memory_used_bytes";
    pub const HOST_LOAD: &str = "host_load";
    pub const CPU_MHZ: &str = "cpu_mhz";
    pub const RSS_BYTES: &str = "rss_bytes";
}

/// Name of the column of the expert at a rank.
pub fn expert_column(rank: usize) -> String {
    format!("e{rank}")
}

/// Name of the column of the gate weight at a rank.
pub fn weight_column(rank: usize) -> String {
    format!("w{rank}")
}

/// The rank of an expert or weight column; `None` of any other.
pub fn rank_of_column(name: &str) -> Option<usize> {
    let digits = name.strip_prefix(['e', 'w'])?;
    let rank: usize = digits.parse().ok()?;
    (rank.to_string() == digits).then_some(rank)
}

fn required(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, false)
}

fn optional(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, true)
}

fn list_of(item: DataType) -> DataType {
    DataType::List(Arc::new(Field::new("item", item, false)))
}

/// Text of few distinct words.
fn words() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8))
}

/// Columns of a partial report.
pub fn partial() -> SchemaRef {
    use DataType::{Float32, Int64, UInt16, UInt32, Utf8};
    Arc::new(Schema::new(vec![
        required(col::KIND, words()),
        optional(col::REQUEST_ID, UInt32),
        optional(col::STEP_ID, UInt32),
        optional(col::LAYER, UInt16),
        optional(col::ROWS, UInt16),
        required(col::NAME, Utf8),
        required(col::VALUES, list_of(Int64)),
        optional(col::DRAFT_PROBS, list_of(Float32)),
    ]))
}

/// Columns of `routes` for `k` experts per row, with gate weights or without.
pub fn routes(k: usize, weights: bool) -> SchemaRef {
    use DataType::{Float32, UInt16, UInt32};
    let mut fields =
        vec![required(col::STEP_ID, UInt32), required(col::LAYER, UInt16), required(col::ROW, UInt16), required(col::MODULE, words())];
    fields.extend((0..k).map(|rank| required(&expert_column(rank), UInt16)));
    if weights {
        fields.extend((0..k).map(|rank| required(&weight_column(rank), Float32)));
    }
    Arc::new(Schema::new(fields))
}

/// Columns of `steps`. `times`: whether host times are known; their columns are null otherwise.
pub fn steps(times: bool) -> SchemaRef {
    use DataType::{Float32, Int16, Int64, UInt16, UInt32};
    let host = |name| if times { required(name, Int64) } else { optional(name, Int64) };
    Arc::new(Schema::new(vec![
        required(col::STEP_ID, UInt32),
        required(col::REQUEST_ID, UInt32),
        required(col::PHASE, words()),
        required(col::ROWS, UInt16),
        required(col::ACCEPTED, UInt16),
        required(col::CONTEXT_LEN, UInt32),
        required(col::INPUT_TOKENS, list_of(UInt32)),
        optional(col::PARENTS, list_of(Int16)),
        required(col::EMITTED_TOKENS, list_of(UInt32)),
        optional(col::DRAFT_PROBS, list_of(Float32)),
        host(col::HOST_BEGIN_NS),
        host(col::HOST_END_NS),
        host(col::DRAFT_HOST_NS),
        host(col::TARGET_HOST_NS),
        optional(col::DEVICE_NS, Int64),
        optional(col::DRAFT_CONFIDENCES, list_of(Float32)),
        optional(col::PASS_ID, UInt32),
    ]))
}

/// Columns of `requests`.
pub fn requests() -> SchemaRef {
    use DataType::{UInt32, Utf8};
    Arc::new(Schema::new(vec![
        required(col::REQUEST_ID, UInt32),
        required(col::ID, Utf8),
        required(col::PROMPT_TOKENS, UInt32),
        required(col::GENERATED_TOKENS, UInt32),
        required(col::FINISH_REASON, words()),
        required(col::TAGS, Utf8),
        optional(col::PROMPT_TEXT, Utf8),
        optional(col::OUTPUT_TEXT, Utf8),
    ]))
}

/// Columns of `kernels`. What a producer does not know of a launch is null.
pub fn kernels() -> SchemaRef {
    use DataType::{Int64, UInt16, UInt32, UInt64, Utf8};
    Arc::new(Schema::new(vec![
        required(col::STEP_ID, UInt32),
        optional(col::LAYER, UInt16),
        required(col::MODULE, words()),
        required(col::COMPONENT, words()),
        required(col::NAME, Utf8),
        optional(col::STREAM, UInt32),
        required(col::BEGIN_NS, Int64),
        required(col::END_NS, Int64),
        optional(col::CORRELATION_ID, UInt64),
        optional(col::GRAPH_NODE_ID, UInt64),
        optional(col::GRID, list_of(UInt32)),
        optional(col::BLOCK, list_of(UInt32)),
        optional(col::REGISTERS, UInt32),
        optional(col::SHARED_BYTES, UInt32),
    ]))
}

/// Columns of `telemetry`. Whatever the machine does not tell is null.
pub fn telemetry() -> SchemaRef {
    use DataType::{Float64, Int64, UInt32, UInt64, Utf8};
    Arc::new(Schema::new(vec![
        required(col::TIME_NS, Int64),
        optional(col::SM_CLOCK_MHZ, UInt32),
        optional(col::MEMORY_CLOCK_MHZ, UInt32),
        optional(col::POWER_W, Float64),
        optional(col::TEMPERATURE_C, Float64),
        optional(col::THROTTLE_REASONS, Utf8),
        optional(col::MEMORY_USED_BYTES, UInt64),
        optional(col::HOST_LOAD, Float64),
        optional(col::CPU_MHZ, Float64),
        optional(col::RSS_BYTES, UInt64),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_from_the_names_that_are_written() {
        for rank in [0, 7, 12, 511] {
            assert_eq!(rank_of_column(&expert_column(rank)), Some(rank));
            assert_eq!(rank_of_column(&weight_column(rank)), Some(rank));
        }
        for other in ["e", "e01", "e+1", "w-1", "step_id", "entropy", "e9x", "x3"] {
            assert_eq!(rank_of_column(other), None, "{other}");
        }
    }
}
