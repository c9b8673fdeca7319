//! What a draft module leaves on its device for the target: a window's tokens, and what they were drawn from. The host knows neither before
//! the target has judged them.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::choice_ops;
use super::device::Device;
use super::ops::Damage;
use crate::engine::drafter::MAX_DRAFT_LEN;
use crate::engine::sampling::Sampling;
use crate::engine::{EngineError, ModelConfig};
use std::rc::Rc;

/// Drafts of a chain.
pub(super) const MOST: usize = MAX_DRAFT_LEN;

/// Where things are in the inputs of a chain, in bytes: the window (the anchor, then drafts), the tokens of the first pass's rows or of a block,
/// of each pass its first position, 0 and its rows, and the uniform numbers that drafts are drawn with.
const FIRST: usize = PASS_ROWS * 4;
const SPANS: usize = FIRST + PASS_ROWS * 4;
const SPAN: usize = 16;
const UNIFORMS: usize = SPANS + MOST.next_multiple_of(2) * SPAN;
/// Bytes of them all.
pub(super) const BYTES: usize = UNIFORMS + MOST.next_multiple_of(2) * 8;

/// A chain's inputs and what comes of it.
#[derive(Debug)]
pub(super) struct Drafted {
    /// The host sends it as a whole; the window's drafts are written by the chain itself.
    pub inputs: Buffer,
    /// `[MOST, vocab]` doubles; none when drafts are not drawn.
    dists: Option<Buffer>,
}

/// The same inputs on the host.
#[derive(Debug)]
pub(super) struct ChainInputs<'a> {
    pub anchor: u32,
    /// Tokens of the first pass's rows, or of a block.
    pub tokens: &'a [u32],
    /// Of each pass its first position and its rows.
    pub spans: &'a [(usize, usize)],
    /// One a draft, or none.
    pub uniforms: &'a [f64],
}

impl ChainInputs<'_> {
    /// Puts them into page-locked memory of [`BYTES`] bytes.
    pub fn put(&self, to: &super::pinned::Pinned) -> Result<(), EngineError> {
        to.put(0, &[self.anchor])?;
        to.put(FIRST, self.tokens)?;
        for (pass, (position, rows)) in self.spans.iter().enumerate() {
            to.put(SPANS + pass * SPAN, &[*position as u32, 0, *rows as u32])?;
        }
        to.put(UNIFORMS, self.uniforms)
    }
}

impl Drafted {
    /// Room for chains; with distributions when drafts are drawn.
    pub fn new(device: &Rc<Device>, config: &ModelConfig, drawn: bool) -> Result<Self, EngineError> {
        let dists = if drawn { Some(device.room(MOST * config.vocab * 8)?) } else { None };
        Ok(Self { inputs: device.zeros(BYTES)?, dists })
    }

    /// Token `row` of the window.
    pub fn window(&self, row: usize) -> u64 {
        self.inputs.at(row * 4)
    }

    /// The tokens of the first pass's rows, or of a block.
    pub fn first(&self) -> u64 {
        self.inputs.at(FIRST)
    }

    /// Position, 0 and rows of pass `pass`.
    pub fn span(&self, pass: usize) -> u64 {
        self.inputs.at(SPANS + pass * SPAN)
    }

    /// What draft `draft` is drawn with.
    pub fn uniform(&self, draft: usize) -> u64 {
        self.inputs.at(UNIFORMS + draft * 8)
    }

    /// What draft `draft` is drawn from, `vocab` doubles; 0 when drafts are not drawn.
    pub fn dist(&self, draft: usize, vocab: usize) -> u64 {
        self.dists.as_ref().map_or(0, |dists| dists.at(draft * vocab * 8))
    }

    /// Puts the choice of draft `draft` into the stream by its `[vocab]` logits: into the window, its probability to `prob` unless that is 0.
    pub fn choose(
        &self,
        d: &Device,
        draft: usize,
        (logits, vocab): (u64, usize),
        sampling: Sampling,
        prob: u64,
        damage: Damage,
    ) -> Result<(), EngineError> {
        let token = self.window(draft + 1);
        if sampling.is_greedy() {
            return choice_ops::argmax(d, logits, (1, vocab), token, prob, damage);
        }
        let dist = self.dist(draft, vocab);
        choice_ops::sample(d, logits, (1, vocab), sampling, dist, damage)?;
        choice_ops::draw(d, dist, vocab, self.uniform(draft), token, prob)
    }
}
