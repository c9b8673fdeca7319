//! The step table as the pass needs it: who a step belongs to, what it did, how many drafts it kept.

use super::AnalysisError;
use super::trees::{Shape, Trees};
use crate::trace::Phase;
use std::collections::HashMap;

/// One row of `steps`, without times and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRow {
    /// The step.
    pub step_id: u32,
    /// The request as the trace numbers it.
    pub request_id: u32,
    /// What the step did.
    pub phase: Phase,
    /// Rows of the pass.
    pub rows: u16,
    /// Accepted drafts.
    pub accepted: u16,
    /// Tokens added to the output.
    pub emitted: u32,
    /// Tokens of the request in the cache before the step.
    pub context_len: u32,
}

/// One step, its request as an index into [`StepTable::requests`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The step.
    pub step_id: u32,
    /// Index of its request.
    pub request: u32,
    /// What the step did.
    pub phase: Phase,
    /// Rows of the pass.
    pub rows: u16,
    /// Accepted drafts.
    pub accepted: u16,
    /// Most drafts that could be accepted: all of a chain, of a tree those of its deepest row.
    pub drafts: u16,
    /// Tokens added to the output.
    pub emitted: u32,
    /// Tokens of the request in the cache before the step.
    pub context_len: u32,
}

impl Step {
    /// Whether it is a verify step.
    pub fn is_verify(&self) -> bool {
        self.phase == Phase::Verify
    }
}

/// A request's verify steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestSpan {
    /// The request as the trace numbers it.
    pub request_id: u32,
    /// Index of its first verify step; `u32::MAX` without any.
    pub first_verify: u32,
    /// Index of its last verify step; 0 without any.
    pub last_verify: u32,
    /// Number of verify steps.
    pub verify_steps: u64,
    /// Sum of accepted drafts.
    pub accepted: u64,
}

/// All steps in order, and the requests in order of their ids.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepTable {
    /// Steps, ascending by id.
    pub steps: Vec<Step>,
    /// Requests, ascending by id.
    pub requests: Vec<RequestSpan>,
}

impl StepTable {
    /// Indexes the steps. Ids must ascend, and a step cannot keep more drafts than it had.
    ///
    /// # Errors
    /// [`AnalysisError::Steps`] naming the step.
    pub fn new(rows: &[StepRow]) -> Result<Self, AnalysisError> {
        let mut ids: Vec<u32> = rows.iter().map(|r| r.request_id).collect();
        ids.sort_unstable();
        ids.dedup();
        let index: HashMap<u32, u32> = ids.iter().copied().zip(0u32..).collect();
        let mut requests: Vec<RequestSpan> = ids
            .into_iter()
            .map(|request_id| RequestSpan { request_id, first_verify: u32::MAX, last_verify: 0, verify_steps: 0, accepted: 0 })
            .collect();
        let mut steps = Vec::with_capacity(rows.len());
        let mut before = None;
        for (at, row) in (0u32..).zip(rows) {
            if before.is_some_and(|b| b >= row.step_id) {
                return Err(AnalysisError::Steps { step: row.step_id, reason: "step ids do not ascend".into() });
            }
            before = Some(row.step_id);
            if row.accepted > 0 && row.accepted >= row.rows {
                let reason = format!("{} drafts accepted of {} rows; at most rows - 1 can be", row.accepted, row.rows);
                return Err(AnalysisError::Steps { step: row.step_id, reason });
            }
            let request = index.get(&row.request_id).copied().unwrap_or_default();
            let verify = row.phase == Phase::Verify;
            if let Some(span) = requests.get_mut(request as usize).filter(|_| verify) {
                span.first_verify = span.first_verify.min(at);
                span.last_verify = at;
                span.verify_steps += 1;
                span.accepted += u64::from(row.accepted);
            }
            let StepRow { step_id, phase, rows, accepted, emitted, context_len, .. } = *row;
            steps.push(Step { step_id, request, phase, rows, accepted, drafts: rows.saturating_sub(1), emitted, context_len });
        }
        Ok(Self { steps, requests })
    }

    /// The same with the depths of its trees.
    #[must_use]
    pub fn with_trees(mut self, trees: &Trees) -> Self {
        for (at, step) in self.steps.iter_mut().enumerate() {
            step.drafts = trees.get(at).map_or(step.drafts, Shape::deepest);
        }
        self
    }

    /// Index of a step, looked for at `hint` and the place behind it first.
    pub fn find(&self, step_id: u32, hint: usize) -> Option<usize> {
        (hint..hint.saturating_add(2))
            .find(|&i| self.steps.get(i).is_some_and(|s| s.step_id == step_id))
            .or_else(|| self.steps.binary_search_by_key(&step_id, |s| s.step_id).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step_id: u32, request_id: u32, rows: u16, accepted: u16) -> StepRow {
        let phase = if rows > 1 { Phase::Verify } else { Phase::Decode };
        StepRow { step_id, request_id, phase, rows, accepted, emitted: u32::from(accepted) + 1, context_len: 0 }
    }

    #[test]
    fn spans_of_interleaved_requests() {
        let table = StepTable::new(&[row(2, 9, 4, 1), row(5, 3, 4, 3), row(6, 9, 1, 0), row(7, 9, 4, 2)]).unwrap();
        let spans: Vec<_> =
            table.requests.iter().map(|r| (r.request_id, r.first_verify, r.last_verify, r.verify_steps, r.accepted)).collect();
        assert_eq!(spans, [(3, 1, 1, 1, 3), (9, 0, 3, 2, 3)]);
        assert_eq!((table.find(7, 0), table.find(5, 1), table.find(6, 1), table.find(3, 0)), (Some(3), Some(1), Some(2), None));
    }

    #[test]
    fn impossible_steps_are_refused() {
        let message = |rows: &[StepRow]| StepTable::new(rows).unwrap_err().to_string();
        assert!(message(&[row(1, 0, 4, 4)]).contains("step 1"));
        assert!(message(&[row(4, 0, 4, 0), row(4, 0, 4, 0)]).contains("ascend"));
        assert!(StepTable::new(&[row(1, 0, 4, 3), row(2, 0, 1, 0)]).is_ok());
    }
}
