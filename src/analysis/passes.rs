//! Which steps ran in one forward pass, and which requests meet in one.

use super::AnalysisError;
use super::steps::StepTable;
use crate::trace::Phase;
use crate::trace::passes::PassOrder;

/// Mark of a step whose pass is not counted.
const NONE: u32 = u32::MAX;

/// A forward pass with a verify step and without prompt rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Its steps, each of another request.
    pub steps: u32,
    /// Rows of all of them.
    pub rows: u64,
    /// Place of its group among all groups of requests that share no pass with those of another group.
    pub group: u32,
}

/// The passes of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Passes {
    /// By step: the place of its pass.
    of_step: Vec<u32>,
    /// In order of steps.
    pub passes: Vec<Pass>,
    /// Passes with a verify step and with prompt rows.
    pub with_prefill: u64,
    /// Number of groups.
    pub groups: u32,
    /// Whether any two steps share a pass.
    shared: bool,
}

impl Passes {
    /// The passes of these steps, of which `ids` are the shared passes; `None` where no two steps share one. A step without
    /// one had a pass to itself; where `known` is false that is not certain, and it is not counted.
    ///
    /// # Errors
    /// [`AnalysisError::Steps`] when the numbers of passes break the format's rules.
    pub fn new(table: &StepTable, ids: &[Option<u32>], known: bool) -> Result<Option<Self>, AnalysisError> {
        if ids.iter().all(Option::is_none) {
            return Ok(None);
        }
        Ok(Some(Self::of_steps(table, ids, known)?).filter(|passes| passes.shared))
    }

    /// The same whether any pass is shared or not.
    ///
    /// # Errors
    /// As [`Passes::new`].
    pub fn of_steps(table: &StepTable, ids: &[Option<u32>], known: bool) -> Result<Self, AnalysisError> {
        let mut order = PassOrder::default();
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for (at, step) in table.steps.iter().enumerate() {
            let wrong = |reason| AnalysisError::Steps { step: step.step_id, reason };
            let begins = order.next(ids.get(at).copied().flatten(), step.request).map_err(wrong)?;
            match runs.last_mut() {
                Some(run) if !begins => run.end = at + 1,
                _ => runs.push(at..at + 1),
            }
        }
        let shared = runs.iter().any(|run| run.len() > 1);
        let mut found = Self { of_step: vec![NONE; table.steps.len()], shared, ..Self::default() };
        let mut groups = Groups::new(table.requests.len());
        let mut firsts = Vec::new();
        for run in runs {
            let steps = &table.steps[run.clone()];
            if !known && ids.get(run.start).copied().flatten().is_none() {
                continue;
            }
            if !steps.iter().any(|s| s.is_verify()) {
                continue;
            }
            if steps.iter().any(|s| s.phase == Phase::Prefill) {
                found.with_prefill += 1;
                continue;
            }
            let first = steps.first().map_or(0, |s| s.request);
            steps.iter().for_each(|s| groups.join(first, s.request));
            let place = found.passes.len() as u32;
            found.of_step[run].fill(place);
            found.passes.push(Pass { steps: steps.len() as u32, rows: steps.iter().map(|s| u64::from(s.rows)).sum(), group: 0 });
            firsts.push(first);
        }
        let mut numbers = vec![NONE; table.requests.len()];
        for (pass, first) in found.passes.iter_mut().zip(firsts) {
            let number = &mut numbers[groups.find(first) as usize];
            if *number == NONE {
                *number = found.groups;
                found.groups += 1;
            }
            pass.group = *number;
        }
        Ok(found)
    }

    /// The group of the pass of the step at `at`; `None` when it is not counted.
    pub fn group_of(&self, at: usize) -> Option<u32> {
        self.passes.get(self.of(at)? as usize).map(|pass| pass.group)
    }

    /// By group: its first step in a pass that counts.
    pub fn firsts(&self) -> Vec<usize> {
        let mut firsts = vec![usize::MAX; self.groups as usize];
        for (at, group) in (0..self.of_step.len()).filter_map(|at| Some((at, self.group_of(at)?))) {
            if let Some(first) = firsts.get_mut(group as usize).filter(|first| **first == usize::MAX) {
                *first = at;
            }
        }
        firsts
    }

    /// The place of the pass of the step at `at`; `None` when it is not counted.
    #[inline]
    pub fn of(&self, at: usize) -> Option<u32> {
        self.of_step.get(at).copied().filter(|&pass| pass != NONE)
    }
}

/// Disjoint sets of requests.
struct Groups(Vec<u32>);

impl Groups {
    fn new(requests: usize) -> Self {
        Self((0..requests as u32).collect())
    }

    fn find(&mut self, mut request: u32) -> u32 {
        while self.0[request as usize] != request {
            // Halves the way for those that come after.
            let above = self.0[self.0[request as usize] as usize];
            self.0[request as usize] = above;
            request = above;
        }
        request
    }

    fn join(&mut self, a: u32, b: u32) {
        let (a, b) = (self.find(a), self.find(b));
        self.0[a.max(b) as usize] = a.min(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::steps::StepRow;

    fn table(steps: &[(u32, u16)]) -> StepTable {
        let row = |(step_id, &(request_id, rows)): (u32, &(u32, u16))| {
            let phase = match rows {
                1 => Phase::Decode,
                2..=9 => Phase::Verify,
                _ => Phase::Prefill,
            };
            StepRow { step_id, request_id, phase, rows, accepted: 0, emitted: 1, context_len: 0 }
        };
        StepTable::new(&(0..).zip(steps).map(row).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn worked_example() {
        // Requests 5 and 6 meet, 6 and 7 do, 8 and 9 do; one pass has a prompt, one has decode steps only.
        let steps = [(5, 4), (6, 1), (6, 4), (7, 4), (8, 4), (9, 4), (5, 4), (8, 20), (9, 4), (5, 1), (6, 1), (8, 2)];
        let ids = [Some(1), Some(1), Some(3), Some(3), Some(4), Some(4), None, Some(5), Some(5), Some(6), Some(6), Some(7)];
        let passes = Passes::new(&table(&steps), &ids, true).unwrap().unwrap();
        let of: Vec<_> = passes.passes.iter().map(|p| (p.steps, p.rows, p.group)).collect();
        assert_eq!(of, [(2, 5, 0), (2, 8, 0), (2, 8, 1), (1, 4, 0), (1, 2, 1)]);
        assert_eq!((passes.with_prefill, passes.groups), (1, 2));
        // Where it is not known that nobody else was in its pass, step 6 is not counted.
        let sure = Passes::new(&table(&steps), &ids, false).unwrap().unwrap();
        assert_eq!((sure.passes.len(), sure.of(6)), (4, None));
        assert_eq!((0..12).map(|at| passes.of(at)).collect::<Vec<_>>()[5..], [Some(2), Some(3), None, None, None, None, Some(4)]);
    }

    #[test]
    fn steps_with_passes_of_their_own_are_no_batches() {
        let steps = table(&[(0, 4), (1, 4)]);
        for ids in [&[][..], &[None, None], &[Some(0), Some(1)]] {
            assert_eq!(Passes::new(&steps, ids, true).unwrap(), None);
        }
        let error = Passes::new(&table(&[(0, 4), (0, 4)]), &[Some(2), Some(2)], true).unwrap_err().to_string();
        assert!(error.contains("step 1: request 0 is twice in pass 2"), "{error}");
    }
}
