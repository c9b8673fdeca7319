//! One request from prompt to last token, step by step, every step an event.
//!
//! The first generated token comes with the last chunk of the prompt. It is the first *anchor*: decided, but not in the
//! cache. From then on a step is:
//!
//! 1. **draft**: the drafter proposes up to γ tokens after the anchor (none in a baseline step);
//! 2. **verify**: one forward pass of the target over anchor and drafts, every row pending;
//! 3. **accept**: the rows' logits decide how many drafts are kept and which token follows them;
//! 4. **commit**: the anchor's and the kept drafts' rows stay in the cache, the others are rolled back exactly, and the
//!    drafter is told of the kept rows;
//! 5. **emit**: kept drafts and the new token are added to the output, cut where the request ends; the new token is the
//!    next anchor.
//!
//! A step without drafts is a plain decode step of one row. Windows are full to the end: that fewer tokens than drafts are
//! wanted does not shorten them, and `accepted` counts what the rule accepts even where the output is cut. Only the end of
//! the model's context shortens a window.

use super::clock::Clock;
use super::drafter::{Drafter, Drafts};
use super::route_tap::RouteTap;
use super::sampling::{Sampler, Sampling};
use super::session::LogitRows;
use super::target::Target;
use super::window::Parties;
use super::{EngineError, ModelConfig};
use crate::trace::probe::NoProbe;
use crate::trace::{Component, FinishReason, Module, Phase, Probe, StepEvent, TraceError};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a generation ended before its time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpeculateError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The steps cannot be kept any more.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// What all requests of a run have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// γ: drafts per window.
    pub draft_len: usize,
    /// Rows of one prefill step.
    pub prefill_chunk: usize,
    /// Tokens that end a request; empty when it goes on regardless.
    pub stop_tokens: Vec<u32>,
    /// Of so many steps the operations of one are timed; at least 1.
    pub kernel_every: u32,
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Its number in the run, which is also the stream of its random numbers.
    pub request_id: u32,
    /// The prompt's tokens, at least one.
    pub prompt: &'a [u32],
    /// Tokens to generate, at least one.
    pub max_new_tokens: usize,
    /// Plain decode steps to interleave, at evenly spread points of the output.
    pub baseline_steps: usize,
}

/// What a request came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Baseline steps that were made.
    pub baseline_steps: usize,
}

/// The target, its drafter and a clock: runs requests one after the other.
pub struct Speculator<'m> {
    config: &'m ModelConfig,
    session: Box<dyn Target + 'm>,
    drafter: Box<dyn Drafter + 'm>,
    settings: Settings,
    clock: Clock,
    next_step: u32,
}

/// Where a request stands.
struct Timeline<'a> {
    request: Request<'a>,
    /// Prompt and output; the last token is the anchor.
    history: Vec<u32>,
    finish: Option<FinishReason>,
    baseline_done: usize,
    sampler: Sampler,
    tap: RouteTap,
}

impl<'m> Speculator<'m> {
    /// A speculator of a target, which must be of `config`. Steps are numbered from 0 over all its requests and stamped by `clock`.
    pub fn new(
        config: &'m ModelConfig,
        session: Box<dyn Target + 'm>,
        drafter: Box<dyn Drafter + 'm>,
        settings: Settings,
        clock: Clock,
    ) -> Self {
        Self { config, session, drafter, settings, clock, next_step: 0 }
    }

    /// Runs one request. `stop` is looked at between steps; when it is set the request ends as aborted.
    ///
    /// # Errors
    /// When a pass fails, or the probe cannot take a step.
    pub fn run(&mut self, request: Request<'_>, probe: &mut dyn Probe, stop: &AtomicBool) -> Result<Generated, SpeculateError> {
        if request.prompt.is_empty() {
            return Err(EngineError::Request("the prompt has no tokens".into()).into());
        }
        self.session.reset()?;
        self.drafter.reset();
        let mut timeline = Timeline {
            request,
            history: request.prompt.to_vec(),
            finish: None,
            baseline_done: 0,
            sampler: Sampler::new(self.settings.sampling, u64::from(request.request_id)),
            tap: RouteTap::new(self.config.experts_per_token, probe.wants_routes(), probe.wants_weights())
                .tapping(self.drafter.tapped_layers(), self.config.hidden),
        };
        self.prefill(&mut timeline, probe, stop)?;
        let mut after_baseline = false;
        while timeline.finish.is_none() {
            if stop.load(Ordering::Relaxed) {
                timeline.finish = Some(FinishReason::Aborted);
                break;
            }
            // Never two in a row: the windows between them are what the baseline is compared with.
            let baseline = !after_baseline && timeline.baseline_due();
            after_baseline = baseline;
            timeline.baseline_done += usize::from(baseline);
            self.time_or_not(&mut timeline, probe);
            let step = self.step(&mut timeline, baseline)?;
            self.hand_over(&mut timeline, step, probe)?;
        }
        Ok(Generated {
            tokens: timeline.history.split_off(request.prompt.len()),
            finish: timeline.finish.unwrap_or(FinishReason::Aborted),
            baseline_steps: timeline.baseline_done,
        })
    }

    /// Runs a request that warms up caches and buffers: none of its steps is counted or told to anyone. Gives the generated tokens.
    ///
    /// # Errors
    /// As [`Speculator::run`].
    pub fn warm_up(&mut self, request: Request<'_>, stop: &AtomicBool) -> Result<Generated, SpeculateError> {
        let next_step = self.next_step;
        let generated = self.run(request, &mut NoProbe, stop);
        self.next_step = next_step;
        generated
    }

    /// Takes in the prompt in chunks; the last one gives the first token.
    fn prefill(&mut self, timeline: &mut Timeline<'_>, probe: &mut dyn Probe, stop: &AtomicBool) -> Result<(), SpeculateError> {
        let prompt = timeline.request.prompt;
        let mut done = 0;
        for chunk in prompt.chunks(self.settings.prefill_chunk.max(1)) {
            if stop.load(Ordering::Relaxed) {
                timeline.finish = Some(FinishReason::Aborted);
                return Ok(());
            }
            self.time_or_not(timeline, probe);
            let begin = self.clock.now_ns();
            let context_len = self.session.len();
            done += chunk.len();
            let last = done == prompt.len();
            let Timeline { sampler, tap, .. } = &mut *timeline;
            let (pass, chosen) = match self.session.judge().filter(|_| last) {
                Some(judge) => judge.prompt_end(chunk, sampler, tap).map(|(pass, token)| (pass, Some(token)))?,
                None => (self.session.forward(chunk, if last { LogitRows::Last } else { LogitRows::None }, tap)?, None),
            };
            let forwarded = self.clock.now_ns();
            let first = match chosen {
                None if last => Some(tap.time(Module::Target, Component::Sampling, || sampler.pick(pass.logits))),
                chosen => chosen,
            };
            let mut next_tokens = prompt[done + 1 - chunk.len()..(done + 1).min(prompt.len())].to_vec();
            next_tokens.extend(first);
            let sampled = self.clock.now_ns();
            self.drafter.observe_taps(timeline.tap.tapped_rows())?;
            self.drafter.observe(&next_tokens, pass.hidden)?;
            let drafted = self.clock.now_ns();
            self.session.commit(chunk.len(), &mut timeline.tap)?;
            let emitted_tokens = first.map_or_else(Vec::new, |token| timeline.emit(&[token], &self.settings));
            let step = StepEvent {
                step_id: self.next_step,
                request_id: timeline.request.request_id,
                phase: Phase::Prefill,
                accepted: 0,
                context_len: context_len as u32,
                input_tokens: chunk.to_vec(),
                pass_id: None,
                parents: None,
                emitted_tokens,
                draft_probs: None,
                draft_confidences: None,
                host_begin_ns: begin,
                host_end_ns: self.clock.now_ns(),
                draft_host_ns: drafted - sampled,
                target_host_ns: forwarded - begin,
                device_ns: None,
                routes: timeline.tap.take(),
            };
            self.next_step += 1;
            self.hand_over(timeline, step, probe)?;
        }
        Ok(())
    }

    /// Gives the probe a step, whose end has been stamped, and its operations.
    fn hand_over(&mut self, timeline: &mut Timeline<'_>, step: StepEvent, probe: &mut dyn Probe) -> Result<(), SpeculateError> {
        self.session.settle(&mut timeline.tap)?;
        let (step_id, operations) = (step.step_id, timeline.tap.take_operations());
        probe.step(StepEvent { device_ns: timeline.tap.take_device_time(), ..step })?;
        if !operations.is_empty() {
            probe.kernels(step_id, operations)?;
        }
        Ok(())
    }

    /// Decides whether the next step's operations are timed.
    fn time_or_not(&self, timeline: &mut Timeline<'_>, probe: &dyn Probe) {
        let due = self.next_step.is_multiple_of(self.settings.kernel_every.max(1));
        timeline.tap.time_by((probe.wants_kernels() && due).then_some(self.clock));
    }

    /// One step after the prompt; `baseline` makes it a plain decode step.
    fn step(&mut self, timeline: &mut Timeline<'_>, baseline: bool) -> Result<StepEvent, SpeculateError> {
        let begin = self.clock.now_ns();
        let context_len = self.session.len();

        // 1. draft
        let room = self.config.max_position.saturating_sub(context_len + 1);
        let limit = if baseline { 0 } else { self.settings.draft_len.min(room) };
        let mut drafts = match limit {
            0 => Drafts::default(),
            _ => self.drafter.propose(&timeline.history, limit, &mut timeline.sampler, &mut timeline.tap)?,
        };
        let drafted = self.clock.now_ns();

        // 2. verify, 3. accept and 4. commit
        let anchor = timeline.history[timeline.history.len() - 1];
        let mut parties = Parties { config: self.config, session: &mut *self.session, drafter: &mut *self.drafter, clock: self.clock };
        let window = parties.window(anchor, &mut drafts, &mut timeline.sampler, &mut timeline.tap)?;

        // 5. emit
        let emitted_tokens = timeline.emit(&window.new_tokens, &self.settings);
        let input_tokens = std::iter::once(anchor).chain(drafts.tokens.iter().copied()).collect();
        let step_id = self.next_step;
        self.next_step += 1;
        Ok(StepEvent {
            step_id,
            request_id: timeline.request.request_id,
            phase: if drafts.tokens.is_empty() { Phase::Decode } else { Phase::Verify },
            accepted: window.verdict.accepted as u16,
            context_len: context_len as u32,
            input_tokens,
            pass_id: None,
            parents: None,
            emitted_tokens,
            draft_probs: drafts.probs.filter(|probs| !probs.is_empty()),
            draft_confidences: drafts.confidences.filter(|confidences| !confidences.is_empty()),
            host_begin_ns: begin,
            host_end_ns: self.clock.now_ns(),
            draft_host_ns: drafted - begin + window.observing_ns,
            target_host_ns: window.forwarded_ns - drafted,
            device_ns: None,
            routes: timeline.tap.take(),
        })
    }
}

impl Timeline<'_> {
    /// Adds tokens to the output until one ends the request; returns those that were added.
    fn emit(&mut self, tokens: &[u32], settings: &Settings) -> Vec<u32> {
        let mut emitted = Vec::with_capacity(tokens.len());
        for &token in tokens {
            self.history.push(token);
            emitted.push(token);
            if settings.stop_tokens.contains(&token) {
                self.finish = Some(FinishReason::Stop);
            } else if self.generated() >= self.request.max_new_tokens {
                self.finish = Some(FinishReason::Length);
            }
            if self.finish.is_some() {
                break;
            }
        }
        emitted
    }

    fn generated(&self) -> usize {
        self.history.len() - self.request.prompt.len()
    }

    /// Whether the output has reached the next of the evenly spread points.
    fn baseline_due(&self) -> bool {
        let quota = self.request.baseline_steps;
        self.baseline_done < quota && self.generated() * (quota + 1) >= (self.baseline_done + 1) * self.request.max_new_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(max_new_tokens: usize, baseline_steps: usize) -> Timeline<'static> {
        let request = Request { request_id: 0, prompt: &[1, 2], max_new_tokens, baseline_steps };
        let sampler = Sampler::new(Sampling::GREEDY, 0);
        Timeline { request, history: vec![1, 2], finish: None, baseline_done: 0, sampler, tap: RouteTap::new(4, false, false) }
    }

    fn settings(stop_tokens: Vec<u32>) -> Settings {
        Settings { sampling: Sampling::GREEDY, draft_len: 3, prefill_chunk: 8, stop_tokens, kernel_every: 1 }
    }

    #[test]
    fn output_is_cut_where_the_request_ends() {
        let mut t = timeline(3, 0);
        assert_eq!(t.emit(&[5, 6], &settings(vec![9])), [5, 6]);
        assert_eq!(t.finish, None);
        assert_eq!(t.emit(&[7, 8], &settings(vec![9])), [7]);
        assert_eq!((t.finish, t.history.as_slice()), (Some(FinishReason::Length), [1, 2, 5, 6, 7].as_slice()));

        let mut t = timeline(10, 0);
        assert_eq!(t.emit(&[5, 9, 6], &settings(vec![9])), [5, 9]);
        assert_eq!(t.finish, Some(FinishReason::Stop));
        let mut t = timeline(10, 0);
        assert_eq!(t.emit(&[5, 9, 6], &settings(vec![])), [5, 9, 6]);
        assert_eq!(t.finish, None);
    }

    #[test]
    fn baseline_points_are_evenly_spread() {
        let mut t = timeline(40, 3);
        let mut points = Vec::new();
        for generated in 1..=40u32 {
            t.history.push(generated);
            if t.baseline_due() {
                t.baseline_done += 1;
                points.push(generated);
            }
        }
        assert_eq!(points, [10, 20, 30]);
    }
}
