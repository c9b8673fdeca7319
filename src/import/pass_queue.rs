//! Steps that wait in the order of their forward passes, until all of a pass is known.
//!
//! The next pass of a request says what a step of it kept; a trace has the steps of a pass one after the other. So passes
//! leave in the order in which they ran, each when its last step is settled.

use super::{ImportError, Sink};
use crate::trace::{FinishReason, StepEvent};
use std::collections::VecDeque;

/// Where a waiting step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    pass: u64,
    slot: usize,
}

/// A request that has ended, behind its steps.
#[derive(Debug)]
pub struct Ended {
    /// Number of the request.
    pub request: u32,
    /// Rows of its prompt.
    pub prompt: u32,
    /// JSON.
    pub tags: String,
}

#[derive(Debug, Default)]
struct Pass {
    /// Its steps, and whether they are settled; `None` when they are left out.
    steps: Vec<Option<(StepEvent, bool)>>,
    /// Requests that end when these steps are written.
    ended: Vec<Ended>,
    /// Whether all rows that the pass had are in its steps.
    whole: bool,
}

/// Passes on their way into the trace.
#[derive(Debug, Default)]
pub struct PassQueue {
    passes: VecDeque<Pass>,
    /// Number of the pass in front.
    front: u64,
    /// Passes that have left without all of their rows.
    not_whole: u64,
}

impl PassQueue {
    /// Begins the next pass; `whole` says whether the recording has all of its rows.
    pub fn begin(&mut self, whole: bool) {
        self.passes.push_back(Pass { whole, ..Pass::default() });
    }

    /// Adds a step to the pass that was begun last. A request with more than one step in it makes that pass one that is not whole:
    /// the trace has one step of a request and pass.
    pub fn push(&mut self, step: StepEvent) -> Ticket {
        if self.passes.is_empty() {
            self.begin(false);
        }
        let number = self.front + self.passes.len() as u64 - 1;
        let Some(pass) = self.passes.back_mut() else { return Ticket { pass: number, slot: 0 } };
        // The steps of a request are pushed one after the other.
        pass.whole &= pass.steps.last().and_then(Option::as_ref).is_none_or(|(before, _)| before.request_id != step.request_id);
        pass.steps.push(Some((step, false)));
        Ticket { pass: number, slot: pass.steps.len() - 1 }
    }

    fn pass(&mut self, ticket: Ticket) -> Option<&mut Pass> {
        let at = usize::try_from(ticket.pass.checked_sub(self.front)?).ok()?;
        self.passes.get_mut(at)
    }

    /// A step that waits.
    pub fn step(&mut self, ticket: Ticket) -> Option<&mut StepEvent> {
        self.pass(ticket)?.steps.get_mut(ticket.slot)?.as_mut().map(|(step, _)| step)
    }

    /// Nothing more will be known of a step.
    pub fn settle(&mut self, ticket: Ticket) {
        if let Some((_, settled)) = self.pass(ticket).and_then(|p| p.steps.get_mut(ticket.slot)).and_then(Option::as_mut) {
            *settled = true;
        }
    }

    /// Leaves a step out. Its pass is not whole then.
    pub fn leave_out(&mut self, ticket: Ticket) -> Option<StepEvent> {
        let pass = self.pass(ticket)?;
        pass.whole = false;
        pass.steps.get_mut(ticket.slot)?.take().map(|(step, _)| step)
    }

    /// The pass that was begun last lacks rows.
    pub fn lacks_rows(&mut self) {
        if let Some(pass) = self.passes.back_mut() {
            pass.whole = false;
        }
    }

    /// Ends a request behind all steps that are here.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn end(&mut self, ended: Ended, sink: &mut Sink) -> Result<(), ImportError> {
        match self.passes.back_mut() {
            Some(pass) => pass.ended.push(ended),
            None => write_end(ended, sink)?,
        }
        Ok(())
    }

    /// Writes the passes in front whose steps are all settled.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn flush(&mut self, sink: &mut Sink) -> Result<(), ImportError> {
        let settled = |pass: &mut Pass| pass.steps.iter().flatten().all(|(_, settled)| *settled);
        while let Some(pass) = self.passes.pop_front_if(settled) {
            self.front += 1;
            let number = if pass.whole && !pass.steps.is_empty() { Some(sink.pass_id()?) } else { None };
            self.not_whole += u64::from(!pass.whole);
            for (step, _) in pass.steps.into_iter().flatten() {
                sink.step(StepEvent { pass_id: number, ..step })?;
            }
            for ended in pass.ended {
                write_end(ended, sink)?;
            }
        }
        Ok(())
    }

    /// Writes what is left and says how many passes were not whole.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn finish(mut self, sink: &mut Sink) -> Result<(), ImportError> {
        self.passes.iter_mut().flat_map(|p| &mut p.steps).flatten().for_each(|(_, settled)| *settled = true);
        self.flush(sink)?;
        if self.not_whole > 0 {
            let message = format!(
                "{} not whole in the trace (a request's last window, rows without routes, prompts cut into several steps): the steps of such a \
                 pass have no pass_id and count in no number of `batch`",
                match self.not_whole {
                    1 => "1 forward pass is".to_owned(),
                    n => format!("{n} forward passes are"),
                }
            );
            sink.warn("passes_not_whole", message);
            if let Some(facts) = sink.facts_mut() {
                facts.passes_known = false;
            }
        }
        Ok(())
    }
}

fn write_end(ended: Ended, sink: &mut Sink) -> Result<(), ImportError> {
    sink.end_request(ended.request, String::new(), ended.prompt, FinishReason::Unknown, ended.tags)
}

#[cfg(test)]
mod tests {
    use super::super::Options;
    use super::super::events::{self, Source};
    use super::*;
    use crate::trace::{Phase, Trace};

    #[test]
    fn passes_leave_in_order_and_whole_ones_have_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("t");
        let mut sink = Sink::create(&out, &Options::default()).unwrap();
        sink.begin(&out, &Source { drafter: "none".into(), ..Source::default() }).unwrap();
        let requests = [sink.request_id(), sink.request_id()];
        let step = |request: usize, token: u32| events::step(requests[request], Phase::Decode, vec![token]);
        let mut queue = PassQueue::default();
        queue.begin(true);
        let first = [queue.push(step(0, 1)), queue.push(step(1, 2))];
        queue.begin(true);
        let second = [queue.push(step(0, 3)), queue.push(step(1, 4))];
        // The second pass waits for the first, which waits for its second step.
        second.iter().for_each(|t| queue.settle(*t));
        queue.settle(first[0]);
        queue.flush(&mut sink).unwrap();
        assert_eq!(sink.steps(), 0);
        queue.settle(first[1]);
        queue.flush(&mut sink).unwrap();
        assert_eq!(sink.steps(), 4);
        assert!(queue.step(first[0]).is_none());
        // One that lacks a step, one with two steps of a request, one whose rows are not all there.
        queue.begin(true);
        let lost = queue.push(step(0, 5));
        queue.push(step(1, 6));
        assert_eq!(queue.leave_out(lost).unwrap().input_tokens, [5]);
        queue.begin(true);
        queue.push(step(0, 7));
        queue.push(step(0, 8));
        queue.begin(true);
        queue.push(step(0, 9));
        queue.lacks_rows();
        queue.begin(true);
        queue.push(step(1, 10));
        for request in requests {
            queue.end(Ended { request, prompt: 0, tags: "{}".into() }, &mut sink).unwrap();
        }
        queue.finish(&mut sink).unwrap();
        let manifest = sink.finish().unwrap();
        assert!(manifest.warnings[0].message.starts_with("3 forward passes") && !manifest.passes_known);
        let steps = Trace::open(&out).unwrap().steps().unwrap();
        let (a, b, c) = (Some(0), Some(1), Some(2));
        assert_eq!(steps.pass_id, [a, a, b, b, None, None, None, None, c]);
        assert_eq!(steps.request_id, [0, 1, 0, 1, 1, 0, 0, 0, 1].map(|r| requests[r]));
    }
}
