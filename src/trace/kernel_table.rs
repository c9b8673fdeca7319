//! `kernels` read back, some rows at a time: it can be the largest table of a trace.

use super::bounds::Budget;
use super::kernel::{Component, KernelEvent};
use super::part_file::PartHandle;
use super::schema::{self, col};
use super::tables::{Rows, read_part};
use super::{Module, TraceError};
use arrow_array::types::{Int64Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_schema::Schema;
use std::borrow::Cow;

/// Some consecutive rows of `kernels`, one vector a column: what the analysis needs of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "as the fields of KernelEvent")]
pub struct Kernels {
    /// Ascending; a step has any number of rows.
    pub step_id: Vec<u32>,
    pub layer: Vec<Option<u16>>,
    pub module: Vec<Module>,
    pub component: Vec<Component>,
    pub begin_ns: Vec<i64>,
    pub end_ns: Vec<i64>,
}

impl Kernels {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.step_id.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.step_id.is_empty()
    }
}

/// Whether rows go on in order of steps.
fn check_order(rows: &Rows<'_>, steps: &[u32], before: &mut Option<u32>) -> Result<(), TraceError> {
    for (i, &step) in steps.iter().enumerate() {
        if before.is_some_and(|b| step < b) {
            return Err(rows.error(i, &format!("step {step} is out of order")));
        }
        *before = Some(step);
    }
    Ok(())
}

/// Hands out all rows, a batch at a time, in order.
pub(super) fn each<E: From<TraceError>>(parts: &[PartHandle], mut sink: impl FnMut(&Kernels) -> Result<(), E>) -> Result<(), E> {
    let needed = [col::STEP_ID, col::LAYER, col::MODULE, col::COMPONENT, col::BEGIN_NS, col::END_NS];
    let kept: Vec<_> = schema::kernels().fields().iter().filter(|f| needed.contains(&f.name().as_str())).cloned().collect();
    let wanted = Schema::new(kept);
    let mut before = None;
    // An error of the sink travels past the reader, which knows only its own.
    let mut failed = None;
    let mut budget = Budget::new(schema::KERNELS, parts)?;
    for part in parts {
        let read = read_part(part, schema::KERNELS, &wanted, &mut budget, |rows, _| {
            if failed.is_some() {
                return Ok(());
            }
            let batch = Kernels {
                step_id: rows.numbers::<UInt32Type>(col::STEP_ID)?,
                layer: rows.maybe_numbers::<UInt16Type>(col::LAYER)?,
                module: rows.words(col::MODULE, Module::parse)?,
                component: rows.words(col::COMPONENT, Component::parse)?,
                begin_ns: rows.numbers::<Int64Type>(col::BEGIN_NS)?,
                end_ns: rows.numbers::<Int64Type>(col::END_NS)?,
            };
            check_order(rows, &batch.step_id, &mut before)?;
            failed = sink(&batch).err();
            Ok(())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        read?;
    }
    Ok(())
}

/// Reads all rows with all columns: the step and the operation.
pub(super) fn read_all(parts: &[PartHandle]) -> Result<Vec<(u32, KernelEvent)>, TraceError> {
    let mut events = Vec::new();
    let mut before = None;
    let mut budget = Budget::new(schema::KERNELS, parts)?;
    for part in parts {
        read_part(part, schema::KERNELS, &schema::kernels(), &mut budget, |rows, budget| {
            let step_id = rows.numbers::<UInt32Type>(col::STEP_ID)?;
            check_order(rows, &step_id, &mut before)?;
            let layer = rows.maybe_numbers::<UInt16Type>(col::LAYER)?;
            let module = rows.words(col::MODULE, Module::parse)?;
            let component = rows.words(col::COMPONENT, Component::parse)?;
            let stream = rows.maybe_numbers::<UInt32Type>(col::STREAM)?;
            let begin_ns = rows.numbers::<Int64Type>(col::BEGIN_NS)?;
            let end_ns = rows.numbers::<Int64Type>(col::END_NS)?;
            let correlation_id = rows.maybe_numbers::<UInt64Type>(col::CORRELATION_ID)?;
            let graph_node_id = rows.maybe_numbers::<UInt64Type>(col::GRAPH_NODE_ID)?;
            let registers = rows.maybe_numbers::<UInt32Type>(col::REGISTERS)?;
            let shared_bytes = rows.maybe_numbers::<UInt32Type>(col::SHARED_BYTES)?;
            let (grid, block) = (dimensions(rows, col::GRID)?, dimensions(rows, col::BLOCK)?);
            for (i, name) in rows.texts(col::NAME, budget)?.into_iter().enumerate() {
                let event = KernelEvent {
                    layer: layer[i],
                    module: module[i],
                    component: component[i],
                    name: Cow::Owned(name.ok_or_else(|| rows.null(col::NAME, i))?),
                    stream: stream[i],
                    begin_ns: begin_ns[i],
                    end_ns: end_ns[i],
                    correlation_id: correlation_id[i],
                    graph_node_id: graph_node_id[i],
                    grid: grid[i],
                    block: block[i],
                    registers: registers[i],
                    shared_bytes: shared_bytes[i],
                };
                events.push((step_id[i], event));
            }
            Ok(())
        })?;
    }
    Ok(events)
}

/// Lists of three sizes, or null.
fn dimensions(rows: &Rows<'_>, name: &str) -> Result<Vec<Option<[u32; 3]>>, TraceError> {
    let mut sizes: Vec<Option<[u32; 3]>> = Vec::new();
    let mut wrong = None;
    rows.lists::<UInt32Type>(name, |list| {
        let three = list.map(<[u32; 3]>::try_from);
        if matches!(three, Some(Err(_))) {
            wrong.get_or_insert(sizes.len());
        }
        sizes.push(three.and_then(Result::ok));
        true
    })?;
    match wrong {
        Some(row) => Err(rows.error(row, &format!("column {name} is not three sizes"))),
        None => Ok(sizes),
    }
}
