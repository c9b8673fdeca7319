//! The draft module's chain on its device: each draft's token and hidden row go into the next pass without a look by the host, and the
//! target finds the window where the chain leaves it. How many rows the target has kept is known when the chain begins, so that nothing
//! waits between a step's first launch and the verdict.

use super::buffer::Buffer;
use super::drafted::{self, ChainInputs, Drafted};
use super::mtp::{CudaMtp, Link, Work};
use super::pinned::Pinned;
use super::ring::Taken;
use super::session::{CudaSession, Wants};
use super::site::{Part, Site};
use super::{Device, PASS_ROWS};
use crate::engine::drafter::{Drafter, Drafts, MAX_WAITING};
use crate::engine::route_tap::RouteTap;
use crate::engine::sampling::{Sampler, Sampling};
use crate::engine::session::LogitRows;
use crate::engine::target::DraftModule;
use crate::engine::{EngineError, ForwardTap, NoTap};
use crate::trace::{Component, Module};
use std::rc::Rc;

/// Everything but its inputs that a chain's launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ChainShape {
    /// Rows of the first pass, which the target has kept.
    rows: usize,
    drafts: usize,
    splits: usize,
    taken: Taken,
    /// Whether the drafts' probabilities are wanted.
    probs: bool,
}

/// The MTP drafter of one request at a time beside a target on the same device.
#[derive(Debug)]
pub struct CudaMtpDrafter<'m> {
    mtp: CudaMtp<'m>,
    sampling: Sampling,
    drafted: Rc<Drafted>,
    staged: Pinned,
    /// The target's rows after its final norm, of its last pass.
    target: Rc<Buffer>,
    /// Observed rows that are not in the cache yet: the token after each, and hidden states `[2 PASS_ROWS, H]`.
    waiting: Vec<u32>,
    rows: Buffer,
    /// The chain that was launched last.
    chain: Option<ChainShape>,
}

impl<'m> CudaMtpDrafter<'m> {
    /// A drafter of `mtp` for a session that [chooses](CudaSession::choosing) by itself.
    ///
    /// # Errors
    /// When memory runs out, or the session does not choose.
    pub fn new(mtp: CudaMtp<'m>, session: &CudaSession<'_>, sampling: Sampling) -> Result<Self, EngineError> {
        let Some(chooser) = &session.chooser else {
            return Err(EngineError::Request("a chain of drafts needs a target that chooses by itself".to_owned()));
        };
        Ok(Self {
            sampling,
            drafted: Rc::clone(&chooser.drafted),
            staged: Pinned::new(&mtp.device, drafted::BYTES)?,
            target: Rc::clone(&session.ws.hidden),
            waiting: Vec::new(),
            rows: mtp.device.room(2 * PASS_ROWS * mtp.config.hidden * 4)?,
            chain: None,
            mtp,
        })
    }

    /// Bytes of a hidden row.
    fn row_bytes(&self) -> usize {
        self.mtp.config.hidden * 4
    }

    /// Takes all waiting rows but the last `left` into the cache.
    fn flush(&mut self, left: usize) -> Result<(), EngineError> {
        let each = self.row_bytes();
        let taken = self.waiting.len().saturating_sub(left);
        for begin in (0..taken).step_by(PASS_ROWS) {
            let end = taken.min(begin + PASS_ROWS);
            self.mtp.append(&self.waiting[begin..end], self.rows.at(begin * each))?;
        }
        self.waiting.drain(..taken);
        if taken > 0 && left > 0 {
            // They are fewer than those before them: the two places are apart.
            self.mtp.device.copy(self.rows.inside(taken * each, left * each)?, self.rows.at(0), left * each)?;
        }
        Ok(())
    }

    /// Rows of a prompt, which come by way of the host.
    fn observe_prompt(&mut self, next_tokens: &[u32], hidden: &[f32]) -> Result<(), EngineError> {
        let (width, mut from) = (self.mtp.config.hidden, 0);
        if self.waiting.len() + next_tokens.len() > MAX_WAITING {
            self.mtp.device.start(Module::Draft, None)?;
            self.flush(0)?;
            from = next_tokens.len() - 1;
            self.mtp.extend(&next_tokens[..from], &hidden[..from * width], LogitRows::None, &mut NoTap)?;
        }
        self.rows.write(self.waiting.len() * self.row_bytes(), &hidden[from * width..])?;
        self.waiting.extend_from_slice(&next_tokens[from..]);
        Ok(())
    }

    /// Puts a chain into the stream.
    fn launch(&self, shape: ChainShape) -> Result<(), EngineError> {
        let (mtp, ws, c, inputs) = (&self.mtp, &self.mtp.ws, self.mtp.config, &*self.drafted);
        let d: &Device = &mtp.device;
        d.label(None, Component::Embedding);
        self.staged.send(0, drafted::BYTES, &inputs.inputs)?;
        for draft in 0..shape.drafts {
            let (tokens, hidden, rows) = match draft {
                0 => (inputs.first(), self.rows.at(0), shape.rows),
                // What the pass before has left: its last row.
                1 => (inputs.window(1), ws.hidden.float((shape.rows - 1) * c.hidden), 1),
                _ => (inputs.window(draft), ws.hidden.at(0), 1),
            };
            mtp.link(Link { tokens, hidden, rows, span: inputs.span(draft), splits: shape.splits, ring: draft, wanted: 1 })?;
            d.label(None, Component::Sampling);
            let prob = if shape.probs { ws.prob(draft) } else { 0 };
            let damage = ws.damage(Site { layer: c.layers, part: Part::Logits });
            inputs.choose(d, draft, (ws.logits.at(0), c.vocab), self.sampling, prob, damage)?;
        }
        d.label(None, Component::Router);
        ws.bring_choices(shape.taken, c)
    }
}

impl Drafter for CudaMtpDrafter<'_> {
    fn reset(&mut self) {
        self.mtp.truncate(0);
        self.waiting.clear();
        self.chain = None;
    }

    fn observe(&mut self, next_tokens: &[u32], hidden: &[f32]) -> Result<(), EngineError> {
        if !hidden.is_empty() {
            return self.observe_prompt(next_tokens, hidden);
        }
        let (each, count) = (self.row_bytes(), next_tokens.len());
        let to = self.rows.inside(self.waiting.len() * each, count * each)?;
        self.mtp.device.keep_rows(self.target.inside(0, count * each)?, to, count * each)?;
        self.waiting.extend_from_slice(next_tokens);
        if self.waiting.len() > MAX_WAITING { self.flush(1) } else { Ok(()) }
    }

    fn propose(&mut self, _: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError> {
        let (rows, drafts, mtp) = (self.waiting.len(), limit.min(drafted::MOST), &self.mtp);
        let Some(&anchor) = self.waiting.last().filter(|_| drafts > 0) else { return Ok(Drafts::default()) };
        if sampler.sampling() != self.sampling {
            return Err(EngineError::Request("the drafter chooses by other rules than the request's".to_owned()));
        }
        let after = mtp.len + rows + drafts - 1;
        if after > mtp.room() {
            return Err(EngineError::Request(format!("{after} draft rows exceed the context of {}", mtp.room())));
        }
        let drawn = if self.sampling.is_greedy() { 0 } else { drafts };
        let uniforms: Vec<f64> = (0..drawn).map(|_| sampler.uniform()).collect();
        // Every pass after the first has one row, which is the draft before.
        let later = (0..drafts - 1).map(|draft| (mtp.len + rows + draft, 1));
        let spans: Vec<_> = std::iter::once((mtp.len, rows)).chain(later).collect();
        let inputs = ChainInputs { anchor, tokens: &self.waiting, spans: &spans, uniforms: &uniforms };
        inputs.put(&self.staged)?;
        let wants = Wants::of(tap);
        mtp.device.start(Module::Draft, wants.clock)?;
        let shape = ChainShape { rows, drafts, splits: mtp.ws.splits(after), taken: wants.taken(), probs: tap.is_on() };
        mtp.graphs.borrow_mut().run(Work::Chain(shape), || self.launch(shape))?;
        mtp.device.end()?;
        // The chain's own rows leave the cache; those that the target has kept stay.
        self.mtp.len += rows;
        self.waiting.clear();
        self.chain = Some(shape);
        Ok(Drafts { probs: tap.is_on().then(Vec::new), on_device: drafts, ..Drafts::default() })
    }

    fn fetch(&mut self, drafts: &mut Drafts, tap: &mut RouteTap) -> Result<(), EngineError> {
        let Some(shape) = self.chain.take() else { return Ok(()) };
        let (ws, c) = (&self.mtp.ws, self.mtp.config);
        ws.refuse_damage(c)?;
        drafts.on_device = 0;
        if let Some(probs) = &mut drafts.probs {
            ws.collect_probs(shape.drafts, c, probs)?;
        }
        if shape.taken == Taken::Nothing {
            return Ok(());
        }
        for draft in 0..shape.drafts {
            let row = if draft == 0 { shape.rows - 1 } else { 0 };
            let (mut ids, mut weights) = (Vec::new(), Vec::new());
            ws.collect_choices(shape.taken, draft, row..row + 1, c, (&mut ids, &mut weights))?;
            tap.begin_draft(draft);
            tap.routed(Module::Draft, c.layers, &ids, &weights);
        }
        Ok(())
    }
}
