//! One window from its drafts to its commit: judged by the target itself where it can, else by its logits.

use super::clock::Clock;
use super::drafter::{Drafter, Drafts};
use super::route_tap::RouteTap;
use super::sampling::{Sampler, argmax};
use super::session::LogitRows;
use super::target::Target;
use super::verify::{self, Verdict};
use super::{EngineError, ModelConfig};
use crate::trace::{Component, Module};

/// Who takes part in a window.
pub(super) struct Parties<'a, 'm> {
    pub config: &'m ModelConfig,
    pub session: &'a mut (dyn Target + 'm),
    pub drafter: &'a mut (dyn Drafter + 'm),
    pub clock: Clock,
}

/// What became of a window.
pub(super) struct Window {
    pub verdict: Verdict,
    /// The kept drafts and the token after them.
    pub new_tokens: Vec<u32>,
    /// When the target's pass had ended, by the clock.
    pub forwarded_ns: i64,
    /// Time in which the drafter was told of the kept rows.
    pub observing_ns: i64,
}

impl Parties<'_, '_> {
    /// Runs, judges and commits the window of `anchor` and the drafts, and tells the drafter. Afterwards all is known of the drafts.
    pub fn window(&mut self, anchor: u32, drafts: &mut Drafts, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Window, EngineError> {
        let by_target = !self.drafter.needs_hidden() && self.session.judge().is_some_and(|judge| judge.takes(drafts));
        if by_target { self.by_target(anchor, drafts, sampler, tap) } else { self.by_logits(anchor, drafts, sampler, tap) }
    }

    fn by_target(&mut self, anchor: u32, drafts: &mut Drafts, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Window, EngineError> {
        let Some(judge) = self.session.judge() else { return Err(EngineError::Request("the target judges no windows".to_owned())) };
        let judged = judge.window(anchor, drafts, sampler, tap)?;
        let forwarded_ns = self.clock.now_ns();
        drafts.tokens = judged.drafts;
        self.drafter.fetch(drafts, tap)?;
        let new_tokens = new_tokens(drafts, judged.verdict);
        let observing_ns = observe(self.drafter, &new_tokens, (&[], &[]), self.clock)?;
        Ok(Window { verdict: judged.verdict, new_tokens, forwarded_ns, observing_ns })
    }

    fn by_logits(&mut self, anchor: u32, drafts: &Drafts, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Window, EngineError> {
        if drafts.on_device > 0 {
            return Err(EngineError::Request("the drafts are on a device, and the target does not judge them there".to_owned()));
        }
        let tokens: Vec<u32> = std::iter::once(anchor).chain(drafts.tokens.iter().copied()).collect();
        let (vocab, width) = (self.config.vocab, self.config.hidden);
        let pass = self.session.forward(&tokens, LogitRows::All, tap)?;
        let forwarded_ns = self.clock.now_ns();
        let verdict = tap.time(Module::Target, Component::Sampling, || by_rule(drafts, pass.logits, vocab, sampler));
        let (kept, new_tokens) = (verdict.accepted + 1, new_tokens(drafts, verdict));
        let tapped = &tap.tapped_rows()[..kept * self.drafter.tapped_layers().len() * width];
        let observing_ns = observe(self.drafter, &new_tokens, (&pass.hidden[..kept * width], tapped), self.clock)?;
        self.session.commit(kept, tap)?;
        Ok(Window { verdict, new_tokens, forwarded_ns, observing_ns })
    }
}

/// Tells the drafter of the rows that were kept, by their hidden rows and those of the tapped layers, where these are on the host; gives the
/// time that it took.
fn observe(drafter: &mut dyn Drafter, new_tokens: &[u32], (hidden, tapped): (&[f32], &[f32]), clock: Clock) -> Result<i64, EngineError> {
    let begin = clock.now_ns();
    drafter.observe_taps(tapped)?;
    drafter.observe(new_tokens, hidden)?;
    Ok(clock.now_ns() - begin)
}

fn new_tokens(drafts: &Drafts, verdict: Verdict) -> Vec<u32> {
    drafts.tokens[..verdict.accepted].iter().copied().chain([verdict.next]).collect()
}

/// Judges a window by the request's rule; `logits` is `[rows, vocab]`.
fn by_rule(drafts: &Drafts, logits: &[f32], vocab: usize, sampler: &mut Sampler) -> Verdict {
    if sampler.is_greedy() {
        let best: Vec<u32> = logits.chunks_exact(vocab).map(argmax).collect();
        return verify::greedy(&drafts.tokens, &best);
    }
    let uniforms: Vec<f64> = (0..=drafts.tokens.len()).map(|_| sampler.uniform()).collect();
    verify::sampled(&drafts.tokens, &drafts.dists, &uniforms, |row, probs| {
        sampler.distribution(&logits[row * vocab..][..vocab], probs);
    })
}
