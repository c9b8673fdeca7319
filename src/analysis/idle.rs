//! The time of a device's step in which nothing ran, beside the kernels of the step.
//!
//! idle = max(0, T - |∪ [begin, end)|) of a step with device time T, over the kernels of the step on whatever stream. It is what lies between
//! the kernels and around them: launches, dependencies, waits. Only a profiler's kernels say it; where events time them, the gap before a kernel
//! is part of the kernel.

use super::{AnalysisError, KernelSource, StepTime};
use crate::analysis::steps::StepRow;
use crate::trace::manifest::{KERNELS_TIMED_BY_EVENTS, Manifest};
use crate::trace::{Component, Kernels, Module};

/// A trace's operations, behind those of each step the time in which there were none.
pub(super) struct WithIdle<'a> {
    kernels: &'a dyn KernelSource,
    /// Steps whose idle time is known, ascending, and the device's time of each, ns.
    spans: Vec<(u32, i64)>,
}

impl<'a> WithIdle<'a> {
    /// The operations of a trace with these steps.
    pub fn new(kernels: &'a dyn KernelSource, manifest: &Manifest, steps: &[StepRow], times: &[StepTime]) -> Self {
        let by_events = manifest.warnings.iter().any(|w| w.code == KERNELS_TIMED_BY_EVENTS);
        let known = manifest.device.kind != "cpu" && !by_events;
        let span = |(step, time): (&StepRow, &StepTime)| Some((step.step_id, time.device_ns?));
        Self { kernels, spans: steps.iter().zip(times).filter_map(span).filter(|_| known).collect() }
    }

    /// Appends the idle time of a step with these kernels.
    fn idle(&self, step_id: u32, kernels: &mut Vec<(i64, i64)>, out: &mut Kernels) {
        let Ok(at) = self.spans.binary_search_by_key(&step_id, |(step, _)| *step) else { return };
        let idle = self.spans[at].1.saturating_sub(covered(kernels)).max(0);
        out.step_id.push(step_id);
        out.layer.push(None);
        out.module.push(Module::Target);
        out.component.push(Component::Idle);
        out.begin_ns.push(0);
        out.end_ns.push(idle);
    }
}

/// ns in which any of the intervals runs.
fn covered(intervals: &mut Vec<(i64, i64)>) -> i64 {
    intervals.sort_unstable();
    let (mut sum, mut until) = (0_i64, i64::MIN);
    for &(begin, end) in intervals.iter() {
        let from = begin.max(until);
        if end > from {
            sum = sum.saturating_add(end.saturating_sub(from));
            until = end;
        }
    }
    intervals.clear();
    sum
}

impl KernelSource for WithIdle<'_> {
    fn any(&self) -> bool {
        self.kernels.any()
    }

    fn each(&self, sink: &mut dyn FnMut(&Kernels) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        if self.spans.is_empty() {
            return self.kernels.each(sink);
        }
        let mut step: Option<u32> = None;
        let (mut of_step, mut out) = (Vec::new(), Kernels::default());
        self.kernels.each(&mut |kernels| {
            for i in 0..kernels.len() {
                let id = kernels.step_id[i];
                if let Some(before) = step.replace(id).filter(|before| *before != id) {
                    self.idle(before, &mut of_step, &mut out);
                }
                of_step.push((kernels.begin_ns[i], kernels.end_ns[i]));
                out.step_id.push(id);
                out.layer.push(kernels.layer[i]);
                out.module.push(kernels.module[i]);
                out.component.push(kernels.component[i]);
                out.begin_ns.push(kernels.begin_ns[i]);
                out.end_ns.push(kernels.end_ns[i]);
            }
            sink(&std::mem::take(&mut out))
        })?;
        if let Some(last) = step {
            self.idle(last, &mut of_step, &mut out);
        }
        sink(&out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn covered_time_is_counted_once() {
        // 10 to 20 and 15 to 30 cover 20, 40 to 45 five more; 42 to 44 is inside, 50 to 50 is nothing.
        assert_eq!(covered(&mut vec![(40, 45), (15, 30), (10, 20), (42, 44), (50, 50)]), 25);
        assert_eq!(covered(&mut vec![]), 0);
        assert_eq!(covered(&mut vec![(i64::MIN, i64::MAX), (0, 5)]), i64::MAX);
    }

    proptest! {
        /// Tick by tick.
        #[test]
        fn covered_time_is_that_of_the_ticks(spans in prop::collection::vec((0i64..60, 0i64..20), 0..12)) {
            let mut intervals: Vec<(i64, i64)> = spans.iter().map(|&(begin, long)| (begin, begin + long)).collect();
            let ticks = (0..80).filter(|t| intervals.iter().any(|(begin, end)| begin <= t && t < end)).count();
            prop_assert_eq!(covered(&mut intervals), ticks as i64);
        }
    }
}
