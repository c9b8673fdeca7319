//! The model's own multi-token-prediction block, chained.
//!
//! Row t of its cache is made of (hidden of token t, token t + 1). Rows of tokens that the target has taken in are made of
//! the target's hidden states ("draft extend"); the last of them predicts the first draft. Every further draft feeds the
//! block its own output and the draft before it, and these rows leave the cache as soon as the window is proposed:
//! whatever is accepted comes back with true hidden states.

use super::{Drafter, Drafts, EngineError, MAX_WAITING, RouteTap, Sampler};
use crate::engine::NoTap;
use crate::engine::session::LogitRows;
use crate::engine::target::DraftModule;
use crate::trace::{Component, Module};

/// The MTP drafter of one request at a time.
pub struct MtpDrafter<'m> {
    mtp: Box<dyn DraftModule + 'm>,
    width: usize,
    /// Observed rows that are not in the cache yet: the token after each, and hidden states `[rows, H]`.
    waiting: Vec<u32>,
    waiting_hidden: Vec<f32>,
    /// The block's output that the next link of the chain takes in, `[H]`.
    link: Vec<f32>,
}

impl<'m> MtpDrafter<'m> {
    /// A drafter over an MTP block with hidden size `width`.
    pub fn new(mtp: Box<dyn DraftModule + 'm>, width: usize) -> Self {
        Self { mtp, width, waiting: Vec::new(), waiting_hidden: Vec::new(), link: Vec::new() }
    }

    /// Rows in its cache.
    pub fn cached(&self) -> usize {
        self.mtp.len()
    }
}

impl Drafter for MtpDrafter<'_> {
    fn reset(&mut self) {
        self.mtp.truncate(0);
        self.waiting.clear();
        self.waiting_hidden.clear();
    }

    fn needs_hidden(&self) -> bool {
        true
    }

    fn observe(&mut self, next_tokens: &[u32], hidden: &[f32]) -> Result<(), EngineError> {
        self.waiting.extend_from_slice(next_tokens);
        self.waiting_hidden.extend_from_slice(hidden);
        if self.waiting.len() > MAX_WAITING {
            // The last row stays: its logits are the first draft.
            let rows = self.waiting.len() - 1;
            self.mtp.extend(&self.waiting[..rows], &self.waiting_hidden[..rows * self.width], LogitRows::None, &mut NoTap)?;
            self.waiting.drain(..rows);
            self.waiting_hidden.drain(..rows * self.width);
        }
        Ok(())
    }

    fn propose(&mut self, _: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError> {
        let mut drafts = Drafts { probs: tap.is_on().then(Vec::new), ..Drafts::default() };
        if limit == 0 || self.waiting.is_empty() {
            return Ok(Drafts::default());
        }
        tap.begin_draft(0);
        let out = self.mtp.extend(&self.waiting, &self.waiting_hidden, LogitRows::Last, tap)?;
        tap.time(Module::Draft, Component::Sampling, || drafts.push(out.logits, sampler));
        self.link.clear();
        self.link.extend_from_slice(&out.hidden[out.hidden.len() - self.width..]);
        self.waiting.clear();
        self.waiting_hidden.clear();
        let observed = self.mtp.len();
        for draft in 1..limit {
            tap.begin_draft(draft);
            let out = self.mtp.extend(&drafts.tokens[draft - 1..], &self.link, LogitRows::Last, tap)?;
            tap.time(Module::Draft, Component::Sampling, || drafts.push(out.logits, sampler));
            self.link.copy_from_slice(out.hidden);
        }
        self.mtp.truncate(observed);
        Ok(drafts)
    }
}
