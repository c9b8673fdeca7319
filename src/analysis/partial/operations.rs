//! Kernels reduced to sums by step, layer and component: all that costs are made of.

use crate::analysis::pass::Plan;
use crate::analysis::steps::StepTable;
use crate::analysis::{AnalysisError, KernelSource};
use crate::trace::{Component, Kernels, Module};

const COMPONENTS: usize = Component::ALL.len();
/// Operations that are handed over together.
const BATCH: usize = 4096;

/// Sums of the operations of a trace's steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Operations {
    /// The layer of each slot.
    layers: Vec<u16>,
    step_id: Vec<u32>,
    component: Vec<Component>,
    /// `[entries][slots + 1]`, ns; the last place is outside the routed layers.
    ns: Vec<u64>,
}

/// One component of one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation<'a> {
    pub step_id: u32,
    pub component: Component,
    /// By slot, and outside the routed layers.
    pub ns: &'a [u64],
}

impl Operations {
    /// None, of a model of these routed layers.
    pub(super) fn new(layers: &[u16]) -> Self {
        Self { layers: layers.to_vec(), ..Self::default() }
    }

    /// The sums of a trace's operations.
    ///
    /// # Errors
    /// When they cannot be read, are of no step, or end before they begin.
    pub(super) fn of(kernels: &dyn KernelSource, table: &StepTable, plan: &Plan<'_>) -> Result<Self, AnalysisError> {
        let mut all = Self::new(&plan.layers);
        if !kernels.any() {
            return Ok(all);
        }
        let places = plan.layers.len() + 1;
        let mut sums: Vec<Option<Vec<u64>>> = vec![None; COMPONENTS];
        let mut step: Option<(u32, usize)> = None;
        kernels.each(&mut |kernels| {
            for i in 0..kernels.len() {
                let id = kernels.step_id[i];
                let wrong = |reason: &str| AnalysisError::Kernels { step: id, reason: reason.into() };
                if step.is_none_or(|(before, _)| before != id) {
                    if let Some((before, _)) = step {
                        all.flush(before, &mut sums);
                    }
                    let at = table.find(id, step.map_or(0, |(_, at)| at + 1));
                    step = Some((id, at.ok_or_else(|| wrong("the step is not in `steps`"))?));
                }
                let ns = kernels.end_ns[i].checked_sub(kernels.begin_ns[i]).and_then(|ns| u64::try_from(ns).ok());
                let ns = ns.ok_or_else(|| wrong("an operation ends before it begins"))?;
                let draft = kernels.module[i] == Module::Draft;
                let place = kernels.layer[i].filter(|_| !draft).and_then(|layer| plan.slot(layer)).unwrap_or(places - 1);
                let component = if draft { Component::Draft } else { kernels.component[i] };
                let sum = &mut sums[component.index()].get_or_insert_with(|| vec![0; places])[place];
                *sum = sum.saturating_add(ns).min(i64::MAX as u64);
            }
            Ok(())
        })?;
        if let Some((before, _)) = step {
            all.flush(before, &mut sums);
        }
        Ok(all)
    }

    fn flush(&mut self, step_id: u32, sums: &mut [Option<Vec<u64>>]) {
        for (component, ns) in Component::ALL.into_iter().zip(sums) {
            if let Some(ns) = ns.take() {
                self.push(Operation { step_id, component, ns: &ns });
            }
        }
    }

    /// Appends a component of a step, which has one number a slot and one more.
    pub(super) fn push(&mut self, operation: Operation<'_>) {
        debug_assert_eq!(operation.ns.len(), self.places());
        self.step_id.push(operation.step_id);
        self.component.push(operation.component);
        self.ns.extend_from_slice(operation.ns);
    }

    /// Numbers of an entry.
    pub(super) fn places(&self) -> usize {
        self.layers.len() + 1
    }

    /// All entries, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Operation<'_>> {
        let keys = self.step_id.iter().zip(&self.component);
        keys.zip(self.ns.chunks_exact(self.places())).map(|((&step_id, &component), ns)| Operation { step_id, component, ns })
    }
}

impl KernelSource for Operations {
    fn any(&self) -> bool {
        !self.step_id.is_empty()
    }

    fn each(&self, sink: &mut dyn FnMut(&Kernels) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        let mut batch = Kernels::default();
        for Operation { step_id, component, ns } in self.iter() {
            for (place, &ns) in ns.iter().enumerate() {
                let layer = self.layers.get(place).copied();
                // The last place is handed over even where nothing took time there: the step has operations.
                if ns == 0 && layer.is_some() {
                    continue;
                }
                batch.step_id.push(step_id);
                batch.layer.push(layer);
                batch.module.push(Module::Target);
                batch.component.push(component);
                batch.begin_ns.push(0);
                batch.end_ns.push(i64::try_from(ns).unwrap_or(i64::MAX));
            }
            if batch.len() >= BATCH {
                sink(&batch)?;
                batch = Kernels::default();
            }
        }
        sink(&batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::steps::StepRow;
    use crate::trace::Phase;

    struct Listed(Kernels);

    impl KernelSource for Listed {
        fn any(&self) -> bool {
            !self.0.is_empty()
        }

        fn each(&self, sink: &mut dyn FnMut(&Kernels) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
            sink(&self.0)
        }
    }

    fn table() -> StepTable {
        let row = |step_id| StepRow { step_id, request_id: 0, phase: Phase::Decode, rows: 1, accepted: 0, emitted: 1, context_len: 0 };
        StepTable::new(&[row(4), row(9)]).unwrap()
    }

    #[test]
    fn worked_example() {
        let table = table();
        let plan = Plan::new(&table, &[2, 3], 1, 4, false).unwrap();
        let kernels = Listed(Kernels {
            step_id: vec![4, 4, 4, 4, 9],
            // Layer 1 is dense.
            layer: vec![Some(3), Some(3), Some(1), Some(3), None],
            module: vec![Module::Target, Module::Target, Module::Target, Module::Draft, Module::Target],
            component: vec![Component::Experts, Component::Experts, Component::Experts, Component::Experts, Component::Norm],
            begin_ns: vec![0, 10, 20, 30, 40],
            end_ns: vec![7, 15, 21, 33, 40],
        });
        let sums = Operations::of(&kernels, &table, &plan).unwrap();
        let entries: Vec<_> = sums.iter().map(|o| (o.step_id, o.component, o.ns.to_vec())).collect();
        let expected = [(4, Component::Experts, vec![0, 12, 1]), (4, Component::Draft, vec![0, 0, 3]), (9, Component::Norm, vec![0, 0, 0])];
        assert_eq!(entries.len(), 3);
        expected.iter().for_each(|entry| assert!(entries.contains(entry), "{entry:?}"));
        // Summed once more, the sums are the same.
        assert_eq!(Operations::of(&sums, &table, &plan).unwrap(), sums);
    }

    #[test]
    fn broken_operations_are_named() {
        let table = table();
        let plan = Plan::new(&table, &[2], 1, 4, false).unwrap();
        let one = |step_id, end| {
            Listed(Kernels {
                step_id: vec![step_id],
                layer: vec![None],
                module: vec![Module::Target],
                component: vec![Component::Norm],
                begin_ns: vec![0],
                end_ns: vec![end],
            })
        };
        let error = |kernels: Listed| Operations::of(&kernels, &table, &plan).unwrap_err().to_string();
        assert_eq!(error(one(5, 1)), "kernels: step 5: the step is not in `steps`");
        assert_eq!(error(one(9, -1)), "kernels: step 9: an operation ends before it begins");
    }
}
