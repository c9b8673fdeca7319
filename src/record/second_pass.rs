//! A second pass over the same prompts, for the times of the kernels alone (`record --kernels-pass second`): timing them slows no step of
//! the trace. Its kernels are written under the steps of the first pass, which its own steps must equal one by one.

use super::backend::{Backend, check_profiler};
use super::run::{Progress, Running, Totals, ready, run_requests};
use super::{Plan, RecordError};
use crate::engine::clock::Clock;
use crate::engine::cuda::Opening;
use crate::trace::manifest::{SecondPass, Warning};
use crate::trace::token_hash::TokenHasher;
use crate::trace::{KernelEvent, Phase, Probe, RequestEvent, StepEvent, TraceError, TraceWriter};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What a step must have in both passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    step_id: u32,
    request_id: u32,
    phase: Phase,
    accepted: u16,
    context_len: u32,
    /// Of what went in and what came out.
    tokens: u64,
}

impl Mark {
    fn of(step: &StepEvent) -> Self {
        let mut hasher = DefaultHasher::new();
        (&step.input_tokens, &step.emitted_tokens).hash(&mut hasher);
        Self {
            step_id: step.step_id,
            request_id: step.request_id,
            phase: step.phase,
            accepted: step.accepted,
            context_len: step.context_len,
            tokens: hasher.finish(),
        }
    }
}

/// What the second pass is held against.
#[derive(Debug, Default)]
pub(super) struct FirstPass {
    marks: Vec<Mark>,
    tokens: TokenHasher,
}

impl FirstPass {
    /// Looks for what the second pass will need and what can be seen to be missing before the first.
    ///
    /// # Errors
    /// When there is no CUPTI that could be used.
    pub fn prepare(plan: &Plan<'_>) -> Result<Self, RecordError> {
        check_profiler(plan)?;
        Ok(Self::default())
    }

    /// A probe of the first pass: hands everything on to `inner`, and no operation is timed.
    pub fn through<'p>(&'p mut self, inner: &'p mut dyn Probe) -> impl Probe + 'p {
        Untimed { first: self, inner }
    }
}

struct Untimed<'p> {
    first: &'p mut FirstPass,
    inner: &'p mut dyn Probe,
}

impl Probe for Untimed<'_> {
    fn wants_weights(&self) -> bool {
        self.inner.wants_weights()
    }

    fn wants_routes(&self) -> bool {
        self.inner.wants_routes()
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        self.first.marks.push(Mark::of(&step));
        self.first.tokens.add(step.request_id, &step.emitted_tokens);
        self.inner.step(step)
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.inner.request(request)
    }
}

/// A probe of the second pass: of its steps it keeps the operations, as long as they are those of the first.
struct Timed<'p> {
    first: &'p FirstPass,
    writer: &'p mut dyn Probe,
    done: usize,
    tokens: TokenHasher,
    /// What the passes differ in.
    difference: Option<String>,
}

impl Probe for Timed<'_> {
    fn wants_weights(&self) -> bool {
        self.writer.wants_weights()
    }

    /// The routers' choices leave the device as in the first pass, and are dropped.
    fn wants_routes(&self) -> bool {
        self.writer.wants_routes()
    }

    fn wants_kernels(&self) -> bool {
        true
    }

    fn kernels(&mut self, step_id: u32, kernels: Vec<KernelEvent>) -> Result<(), TraceError> {
        self.writer.kernels(step_id, kernels)
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        let expected = self.first.marks.get(self.done);
        if expected != Some(&Mark::of(&step)) {
            let what = match expected {
                Some(mark) if mark.request_id == step.request_id => {
                    "is not the same step in both: other tokens or another number of drafts"
                }
                _ => "has no such step in the first",
            };
            let difference = format!("step {} of request {} {what}", step.step_id, step.request_id);
            self.difference = Some(difference.clone());
            return Err(TraceError::Event { what: difference });
        }
        self.done += 1;
        self.tokens.add(step.request_id, &step.emitted_tokens);
        Ok(())
    }

    fn request(&mut self, _: RequestEvent) -> Result<(), TraceError> {
        Ok(())
    }
}

/// Runs the plan's requests again, with their kernels timed, and writes these under the steps of the first pass. Gives whether it was stopped.
///
/// # Errors
/// When the passes differ, or as the first pass.
pub(super) fn run(
    plan: &Plan<'_>,
    clock: Clock,
    dir: &Path,
    first: &FirstPass,
    writer: &mut TraceWriter,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<bool, RecordError> {
    // The plan is the first pass's, and was told.
    let backend = Backend::open(plan, true, &mut |opening| {
        if !matches!(opening, Opening::Planned(_)) {
            progress(Progress::Opening(opening));
        }
    })?;
    let witness = backend.witness();
    backend.describe(writer.facts_mut(), true);
    let mut speculator = ready(backend, plan, clock, stop)?;
    let started_unix_ns = clock.now_ns();
    let mut probe = Timed { first, writer, done: 0, tokens: TokenHasher::default(), difference: None };
    let mut show = |p: Progress| {
        progress(match p {
            Progress::Running(running) => Progress::Running(Running { second_pass: true, ..running }),
            opening => opening,
        });
    };
    let ran = run_requests(plan, &mut speculator, &mut probe, stop, &mut show);
    let (done, difference, token_hash) = (probe.done, probe.difference.take(), probe.tokens.finish());
    let differs = |what: String| RecordError::PassesDiffer { dir: dir.to_owned(), what };
    if let Some(what) = difference {
        return Err(differs(what));
    }
    let Totals { interrupted, .. } = ran?.0;
    let wanted = first.tokens.finish();
    if !interrupted && (done != first.marks.len() || token_hash != wanted) {
        return Err(differs(format!("{done} steps and hash {token_hash} of the tokens, in the first {} and {wanted}", first.marks.len())));
    }
    let facts = writer.facts_mut();
    // The passes that the trace's steps were are the first one's.
    let graphs = facts.instrumentation.graphs;
    witness.describe(facts, plan.options.kernel_every);
    facts.instrumentation.graphs = graphs;
    facts.instrumentation.second_pass = Some(SecondPass { started_unix_ns, steps: done as u64, token_hash });
    let text = "kernels were timed in a second pass over the same prompts, steps in the first, where nothing was timed inside them: what a report \
                leaves unattributed is the difference between two passes";
    facts.warnings.push(Warning::new("kernels_second_pass", text));
    let mut told = BTreeSet::new();
    facts.warnings.retain(|warning| told.insert((warning.code.clone(), warning.message.clone())));
    Ok(interrupted)
}
