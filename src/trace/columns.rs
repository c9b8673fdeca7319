//! Events to columns: growing buffers of one table each, turned into a record batch at a commit.

use super::event::RouteBlock;
use super::telemetry::TelemetrySample;
use super::{FinishReason, Module, Phase, RequestEvent, StepEvent, StepRoutes, schema};
use arrow_array::builder::{ArrayBuilder, Float32Builder, Int16Builder, ListBuilder, StringBuilder, UInt32Builder};
use arrow_array::{
    ArrayRef, DictionaryArray, Float32Array, Float64Array, Int8Array, Int64Array, RecordBatch, StringArray, UInt16Array, UInt32Array,
    UInt64Array,
};
use arrow_schema::{ArrowError, DataType, Field, SchemaRef};
use std::mem::take;
use std::sync::Arc;

/// Rows of one table that are not yet in a part file.
pub(super) trait Columns {
    /// Number of buffered rows.
    fn rows(&self) -> usize;

    /// Numbers in the lists of the buffered rows, which may be many in few rows.
    fn list_values(&self) -> usize {
        0
    }

    /// The buffered rows as one batch; the buffer is empty afterwards.
    fn take(&mut self) -> Result<RecordBatch, ArrowError>;
}

/// The modules' words by their codes.
pub(super) const WORDS_OF_MODULES: [&str; 2] = [Module::Target.as_str(), Module::Draft.as_str()];

/// Text of few distinct words: `codes` index `words`.
pub(super) fn dictionary(codes: Vec<i8>, words: &[&str]) -> Result<ArrayRef, ArrowError> {
    let values: ArrayRef = Arc::new(StringArray::from_iter_values(words));
    Ok(Arc::new(DictionaryArray::try_new(Int8Array::from(codes), values)?))
}

/// Rows of `routes`, one vector a column.
#[derive(Debug)]
pub(super) struct RouteColumns {
    schema: SchemaRef,
    weights_kept: bool,
    step_id: Vec<u32>,
    layer: Vec<u16>,
    row: Vec<u16>,
    module: Vec<i8>,
    experts: Vec<Vec<u16>>,
    weights: Vec<Vec<f32>>,
    /// Scratch: blocks of a step in order, each with the index of its first row in the event.
    order: Vec<(RouteBlock, usize)>,
}

impl RouteColumns {
    pub(super) fn new(k: usize, weights: bool) -> Self {
        Self {
            schema: schema::routes(k, weights),
            weights_kept: weights,
            step_id: Vec::new(),
            layer: Vec::new(),
            row: Vec::new(),
            module: Vec::new(),
            experts: vec![Vec::new(); k],
            weights: vec![Vec::new(); if weights { k } else { 0 }],
            order: Vec::new(),
        }
    }

    /// Appends the routes of a step in order of (layer, row); their shape was checked before.
    pub(super) fn push(&mut self, step_id: u32, routes: &StepRoutes) {
        let mut order = take(&mut self.order);
        order.clear();
        let mut first = 0;
        for block in &routes.blocks {
            order.push((*block, first));
            first += usize::from(block.rows);
        }
        let key = |block: &RouteBlock| (block.layer, block.first_row, block.module);
        order.sort_by_key(|(block, _)| key(block));
        // Blocks of one layer that overlap (a drafter's beside the target's) are ordered row by row.
        let overlap = order.windows(2).any(|pair| {
            let ((a, _), (b, _)) = (&pair[0], &pair[1]);
            a.layer == b.layer && u32::from(a.first_row) + u32::from(a.rows) > u32::from(b.first_row)
        });
        if overlap {
            let by_row = |&(block, first): &(RouteBlock, usize)| {
                (0..block.rows).map(move |i| (RouteBlock { first_row: block.first_row + i, rows: 1, ..block }, first + usize::from(i)))
            };
            order = order.iter().flat_map(by_row).collect();
            order.sort_by_key(|(block, _)| key(block));
        }
        for &(block, first) in &order {
            self.push_block(step_id, block, first, routes);
        }
        self.order = order;
    }

    fn push_block(&mut self, step_id: u32, block: RouteBlock, first: usize, routes: &StepRoutes) {
        let rows = usize::from(block.rows);
        let len = self.step_id.len() + rows;
        self.step_id.resize(len, step_id);
        self.layer.resize(len, block.layer);
        self.row.extend((0..block.rows).map(|i| block.first_row + i));
        self.module.resize(len, block.module as i8);
        let k = self.experts.len();
        let values = first * k..(first + rows) * k;
        let ids = &routes.ids[values.clone()];
        for (rank, column) in self.experts.iter_mut().enumerate() {
            column.extend(ids.chunks_exact(k.max(1)).map(|row| row[rank]));
        }
        if self.weights_kept {
            let weights = &routes.weights[values];
            for (rank, column) in self.weights.iter_mut().enumerate() {
                column.extend(weights.iter().skip(rank).step_by(k));
            }
        }
    }
}

impl Columns for RouteColumns {
    fn rows(&self) -> usize {
        self.step_id.len()
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(take(&mut self.step_id))),
            Arc::new(UInt16Array::from(take(&mut self.layer))),
            Arc::new(UInt16Array::from(take(&mut self.row))),
            dictionary(take(&mut self.module), &WORDS_OF_MODULES)?,
        ];
        columns.extend(self.experts.iter_mut().map(|c| Arc::new(UInt16Array::from(take(c))) as ArrayRef));
        columns.extend(self.weights.iter_mut().map(|c| Arc::new(Float32Array::from(take(c))) as ArrayRef));
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}

/// Rows of `steps`.
#[derive(Debug)]
pub(super) struct StepColumns {
    schema: SchemaRef,
    step_id: Vec<u32>,
    request_id: Vec<u32>,
    phase: Vec<i8>,
    rows: Vec<u16>,
    accepted: Vec<u16>,
    context_len: Vec<u32>,
    input_tokens: ListBuilder<UInt32Builder>,
    parents: ListBuilder<Int16Builder>,
    emitted_tokens: ListBuilder<UInt32Builder>,
    draft_probs: ListBuilder<Float32Builder>,
    host_begin_ns: Vec<Option<i64>>,
    host_end_ns: Vec<Option<i64>>,
    draft_host_ns: Vec<Option<i64>>,
    target_host_ns: Vec<Option<i64>>,
    device_ns: Vec<Option<i64>>,
    draft_confidences: ListBuilder<Float32Builder>,
    pass_id: Vec<Option<u32>>,
    times: bool,
}

impl StepColumns {
    /// `times`: whether host times are known; they are null otherwise.
    pub(super) fn new(times: bool) -> Self {
        let item = |data_type| Field::new("item", data_type, false);
        let tokens = || ListBuilder::new(UInt32Builder::new()).with_field(item(DataType::UInt32));
        Self {
            schema: schema::steps(times),
            step_id: Vec::new(),
            request_id: Vec::new(),
            phase: Vec::new(),
            rows: Vec::new(),
            accepted: Vec::new(),
            context_len: Vec::new(),
            input_tokens: tokens(),
            parents: ListBuilder::new(Int16Builder::new()).with_field(item(DataType::Int16)),
            emitted_tokens: tokens(),
            draft_probs: ListBuilder::new(Float32Builder::new()).with_field(item(DataType::Float32)),
            draft_confidences: ListBuilder::new(Float32Builder::new()).with_field(item(DataType::Float32)),
            host_begin_ns: Vec::new(),
            host_end_ns: Vec::new(),
            draft_host_ns: Vec::new(),
            target_host_ns: Vec::new(),
            device_ns: Vec::new(),
            pass_id: Vec::new(),
            times,
        }
    }

    pub(super) fn push(&mut self, step: &StepEvent) {
        self.step_id.push(step.step_id);
        self.request_id.push(step.request_id);
        self.phase.push(step.phase as i8);
        self.rows.push(u16::try_from(step.rows()).unwrap_or(u16::MAX));
        self.accepted.push(step.accepted);
        self.context_len.push(step.context_len);
        self.input_tokens.values().append_slice(&step.input_tokens);
        self.input_tokens.append(true);
        self.parents.values().append_slice(step.parents.as_deref().unwrap_or_default());
        self.parents.append(step.parents.is_some());
        self.emitted_tokens.values().append_slice(&step.emitted_tokens);
        self.emitted_tokens.append(true);
        self.draft_probs.values().append_slice(step.draft_probs.as_deref().unwrap_or_default());
        self.draft_probs.append(step.draft_probs.is_some());
        self.host_begin_ns.push(self.times.then_some(step.host_begin_ns));
        self.host_end_ns.push(self.times.then_some(step.host_end_ns));
        self.draft_host_ns.push(self.times.then_some(step.draft_host_ns));
        self.target_host_ns.push(self.times.then_some(step.target_host_ns));
        self.device_ns.push(step.device_ns);
        self.draft_confidences.values().append_slice(step.draft_confidences.as_deref().unwrap_or_default());
        self.draft_confidences.append(step.draft_confidences.is_some());
        self.pass_id.push(step.pass_id);
    }
}

impl Columns for StepColumns {
    fn rows(&self) -> usize {
        self.step_id.len()
    }

    fn list_values(&self) -> usize {
        // The other lists have as many numbers as a step has tokens, or fewer.
        self.input_tokens.values_ref().len()
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let phases = [Phase::Prefill, Phase::Decode, Phase::Verify].map(Phase::as_str);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(take(&mut self.step_id))),
            Arc::new(UInt32Array::from(take(&mut self.request_id))),
            dictionary(take(&mut self.phase), &phases)?,
            Arc::new(UInt16Array::from(take(&mut self.rows))),
            Arc::new(UInt16Array::from(take(&mut self.accepted))),
            Arc::new(UInt32Array::from(take(&mut self.context_len))),
            Arc::new(self.input_tokens.finish()),
            Arc::new(self.parents.finish()),
            Arc::new(self.emitted_tokens.finish()),
            Arc::new(self.draft_probs.finish()),
            Arc::new(Int64Array::from(take(&mut self.host_begin_ns))),
            Arc::new(Int64Array::from(take(&mut self.host_end_ns))),
            Arc::new(Int64Array::from(take(&mut self.draft_host_ns))),
            Arc::new(Int64Array::from(take(&mut self.target_host_ns))),
            Arc::new(Int64Array::from(take(&mut self.device_ns))),
            Arc::new(self.draft_confidences.finish()),
            Arc::new(UInt32Array::from(take(&mut self.pass_id))),
        ];
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}

/// Rows of `requests`. There are few: events are kept and turned into columns at the commit.
#[derive(Debug)]
pub(super) struct RequestColumns {
    schema: SchemaRef,
    events: Vec<RequestEvent>,
}

impl RequestColumns {
    pub(super) fn new() -> Self {
        Self { schema: schema::requests(), events: Vec::new() }
    }

    pub(super) fn push(&mut self, request: RequestEvent) {
        self.events.push(request);
    }
}

impl Columns for RequestColumns {
    fn rows(&self) -> usize {
        self.events.len()
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let events = take(&mut self.events);
        let words = [FinishReason::Stop, FinishReason::Length, FinishReason::Aborted, FinishReason::Unknown].map(FinishReason::as_str);
        let text = |of: fn(&RequestEvent) -> Option<&str>| -> ArrayRef {
            let mut column = StringBuilder::new();
            events.iter().for_each(|event| column.append_option(of(event)));
            Arc::new(column.finish())
        };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from_iter_values(events.iter().map(|e| e.request_id))),
            text(|e| Some(&e.id)),
            Arc::new(UInt32Array::from_iter_values(events.iter().map(|e| e.prompt_tokens))),
            Arc::new(UInt32Array::from_iter_values(events.iter().map(|e| e.generated_tokens))),
            dictionary(events.iter().map(|e| e.finish_reason as i8).collect(), &words)?,
            text(|e| Some(&e.tags)),
            text(|e| e.prompt_text.as_deref()),
            text(|e| e.output_text.as_deref()),
        ];
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}

/// Rows of `telemetry`.
#[derive(Debug)]
pub(super) struct TelemetryColumns {
    schema: SchemaRef,
    samples: Vec<TelemetrySample>,
}

impl TelemetryColumns {
    pub(super) fn new() -> Self {
        Self { schema: schema::telemetry(), samples: Vec::new() }
    }

    pub(super) fn push(&mut self, sample: TelemetrySample) {
        self.samples.push(sample);
    }
}

impl Columns for TelemetryColumns {
    fn rows(&self) -> usize {
        self.samples.len()
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let samples = take(&mut self.samples);
        let u32s = |of: fn(&TelemetrySample) -> Option<u32>| -> ArrayRef { Arc::new(samples.iter().map(of).collect::<UInt32Array>()) };
        let u64s = |of: fn(&TelemetrySample) -> Option<u64>| -> ArrayRef { Arc::new(samples.iter().map(of).collect::<UInt64Array>()) };
        let f64s = |of: fn(&TelemetrySample) -> Option<f64>| -> ArrayRef { Arc::new(samples.iter().map(of).collect::<Float64Array>()) };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from_iter_values(samples.iter().map(|s| s.time_ns))),
            u32s(|s| s.sm_clock_mhz),
            u32s(|s| s.memory_clock_mhz),
            f64s(|s| s.power_w),
            f64s(|s| s.temperature_c),
            Arc::new(samples.iter().map(|s| s.throttle_reasons.as_deref()).collect::<StringArray>()),
            u64s(|s| s.memory_used_bytes),
            f64s(|s| s.host_load),
            f64s(|s| s.cpu_mhz),
            u64s(|s| s.rss_bytes),
        ];
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}
