//! Operations to the columns of `kernels`.

use super::columns::{Columns, dictionary};
use super::kernel::{Component, KernelEvent};
use super::{Module, schema};
use arrow_array::builder::{ListBuilder, StringBuilder, UInt32Builder};
use arrow_array::{ArrayRef, Int64Array, RecordBatch, UInt16Array, UInt32Array, UInt64Array};
use arrow_schema::{ArrowError, DataType, Field, SchemaRef};
use std::mem::take;
use std::sync::Arc;

/// Rows of `kernels`: kept as events, which are small, and turned into columns at the commit.
#[derive(Debug)]
pub(super) struct KernelColumns {
    schema: SchemaRef,
    step_id: Vec<u32>,
    events: Vec<KernelEvent>,
}

impl KernelColumns {
    pub(super) fn new() -> Self {
        Self { schema: schema::kernels(), step_id: Vec::new(), events: Vec::new() }
    }

    /// Appends the operations of a step.
    pub(super) fn push(&mut self, step_id: u32, kernels: Vec<KernelEvent>) {
        self.step_id.resize(self.step_id.len() + kernels.len(), step_id);
        self.events.extend(kernels);
    }
}

impl Columns for KernelColumns {
    fn rows(&self) -> usize {
        self.events.len()
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let events = take(&mut self.events);
        let u32s = |of: fn(&KernelEvent) -> Option<u32>| -> ArrayRef { Arc::new(events.iter().map(of).collect::<UInt32Array>()) };
        let u64s = |of: fn(&KernelEvent) -> Option<u64>| -> ArrayRef { Arc::new(events.iter().map(of).collect::<UInt64Array>()) };
        let dimensions = |of: fn(&KernelEvent) -> Option<[u32; 3]>| -> ArrayRef {
            let mut column = ListBuilder::new(UInt32Builder::new()).with_field(Field::new("item", DataType::UInt32, false));
            for event in &events {
                let sizes = of(event);
                column.values().append_slice(sizes.as_ref().map_or(&[], <[u32; 3]>::as_slice));
                column.append(sizes.is_some());
            }
            Arc::new(column.finish())
        };
        let mut names = StringBuilder::new();
        events.iter().for_each(|e| names.append_value(&e.name));
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(take(&mut self.step_id))),
            Arc::new(events.iter().map(|e| e.layer).collect::<UInt16Array>()),
            dictionary(events.iter().map(|e| e.module as i8).collect(), &[Module::Target.as_str(), Module::Draft.as_str()])?,
            dictionary(events.iter().map(|e| e.component.index() as i8).collect(), &Component::ALL.map(Component::as_str))?,
            Arc::new(names.finish()),
            u32s(|e| e.stream),
            Arc::new(Int64Array::from_iter_values(events.iter().map(|e| e.begin_ns))),
            Arc::new(Int64Array::from_iter_values(events.iter().map(|e| e.end_ns))),
            u64s(|e| e.correlation_id),
            u64s(|e| e.graph_node_id),
            dimensions(|e| e.grid),
            dimensions(|e| e.block),
            u32s(|e| e.registers),
            u32s(|e| e.shared_bytes),
        ];
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}
