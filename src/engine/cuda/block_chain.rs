//! A window of a DSpark drafter on its device: the rows that the target has kept become context, a block is run, and each draft is drawn from
//! logits that the token before it has corrected, one after the other without a look by the host. The target finds the window where the
//! chain leaves it, as of the draft module (`chain`), so that a step waits once, for the verdict. Where windows end by confidence, how many rows
//! the target's pass has is the host's to say: then it waits for the confidences, too.
//!
//! A prompt's tapped rows come by way of the host. The random numbers are those of [`crate::engine::drafter::DsparkDrafter`], so that both
//! engines draw the same drafts; a draft that is not verified has drawn none.

use super::block::{Block, CudaDspark};
use super::block_space::BlockSpace;
use super::buffer::Buffer;
use super::drafted::{self, ChainInputs, Drafted};
use super::graph::Graphs;
use super::pinned::Pinned;
use super::session::CudaSession;
use super::site::Part;
use super::{Device, PASS_ROWS};
use crate::engine::EngineError;
use crate::engine::drafter::{Drafter, Drafts, MAX_WAITING};
use crate::engine::norm::sigmoid;
use crate::engine::route_tap::RouteTap;
use crate::engine::sampling::{Sampler, Sampling};
use crate::engine::tap::ForwardTap;
use crate::trace::{Component, Module};
use std::cell::RefCell;
use std::rc::Rc;

/// Everything but its inputs that a chain's launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ChainShape {
    /// Rows that become context.
    rows: usize,
    drafts: usize,
    splits: usize,
    /// Whether the drafts' probabilities are wanted.
    probs: bool,
    /// Whether their confidences are.
    confidences: bool,
}

/// The DSpark drafter of one request at a time beside a target on the same device.
#[derive(Debug)]
pub struct CudaDsparkDrafter<'m> {
    dspark: CudaDspark<'m>,
    sampling: Sampling,
    /// Survival below which a window ends; 0 never ends it.
    min_survival: f64,
    drafted: Rc<Drafted>,
    staged: Pinned,
    /// The target's tapped rows of its last pass.
    target: Rc<Buffer>,
    /// Tapped rows in [`BlockSpace::taps`] that are not in the context yet.
    waiting: usize,
    graphs: RefCell<Graphs<ChainShape>>,
    /// The chain that was launched last.
    chain: Option<ChainShape>,
}

impl<'m> CudaDsparkDrafter<'m> {
    /// A drafter of `dspark` for a session that [chooses](CudaSession::choosing) by itself and taps the layers that the drafter is made of;
    /// its windows end where the product of the confidences falls below `min_survival`.
    ///
    /// # Errors
    /// When memory runs out, or the session does not do so.
    pub fn new(dspark: CudaDspark<'m>, session: &CudaSession<'_>, sampling: Sampling, min_survival: f64) -> Result<Self, EngineError> {
        let taps = session.taps.as_ref().filter(|taps| taps.stride() == dspark.tapped_width());
        let (Some(chooser), Some(taps)) = (&session.chooser, taps) else {
            return Err(EngineError::Request("a block drafter needs a target that chooses by itself and taps its layers".to_owned()));
        };
        Ok(Self {
            sampling,
            min_survival,
            drafted: Rc::clone(&chooser.drafted),
            staged: Pinned::new(&dspark.device, drafted::BYTES)?,
            target: Rc::clone(&taps.rows),
            waiting: 0,
            graphs: RefCell::new(Graphs::new(&dspark.device)),
            chain: None,
            dspark,
        })
    }

    /// Bytes of a tapped row.
    fn row_bytes(&self) -> usize {
        self.dspark.tapped_width() * 4
    }

    /// Makes `rows` tapped rows from row `first` of those that wait on context, and waits; nothing is told of it.
    fn inject(&mut self, first: usize, rows: usize) -> Result<(), EngineError> {
        let m = &mut self.dspark;
        m.check_room(rows)?;
        ChainInputs { anchor: 0, tokens: &[], spans: &[(m.len, rows)], uniforms: &[] }.put(&self.staged)?;
        m.device.of_module(Module::Draft);
        m.label(None, Component::Commit);
        self.staged.send(0, drafted::BYTES, &self.drafted.inputs)?;
        m.inject(m.space.taps.float(first * m.tapped_width()), rows, self.drafted.span(0))?;
        m.space.bring()?;
        m.device.wait()?;
        m.space.check()?;
        m.len += rows;
        Ok(())
    }

    /// Makes all waiting rows context.
    fn flush(&mut self) -> Result<(), EngineError> {
        let waiting = std::mem::take(&mut self.waiting);
        (0..waiting).step_by(PASS_ROWS).try_for_each(|first| self.inject(first, PASS_ROWS.min(waiting - first)))
    }

    /// Puts a chain into the stream.
    fn launch(&self, shape: ChainShape) -> Result<(), EngineError> {
        let (m, inputs, s) = (&self.dspark, &*self.drafted, &self.dspark.space);
        let (d, vocab, first): (&Device, _, _) = (&m.device, m.config.vocab, m.config.first_row());
        m.label(None, Component::Commit);
        self.staged.send(0, drafted::BYTES, &inputs.inputs)?;
        if shape.rows > 0 {
            m.inject(s.taps.at(0), shape.rows, inputs.span(0))?;
        }
        let (tokens, span) = (inputs.first(), inputs.span(1));
        m.block(Block { tokens, span, splits: shape.splits, first, drafts: shape.drafts })?;
        for draft in 0..shape.drafts {
            let logits = m.correct(draft, inputs.window(draft))?;
            m.label(None, Component::Sampling);
            let prob = if shape.probs { s.prob(draft) } else { 0 };
            inputs.choose(d, draft, (logits, vocab), self.sampling, prob, s.damage(0, Part::Logits))?;
        }
        if shape.confidences {
            m.confidences(first, shape.drafts)?;
        }
        m.label(None, Component::Head);
        s.bring()
    }

    /// Drafts of a chain that was launched before its window ends: waits for the confidences.
    fn survivors(&self, drafts: usize) -> Result<usize, EngineError> {
        self.dspark.device.wait()?;
        self.dspark.space.check()?;
        let mut survival = 1.0;
        let confidences = confidences(&self.dspark.space, drafts)?;
        let ends = confidences.iter().enumerate().position(|(draft, confidence)| {
            survival *= f64::from(*confidence);
            draft > 0 && survival < self.min_survival
        });
        Ok(ends.unwrap_or(drafts))
    }
}

/// How sure the drafter is of each of the first `drafts` drafts of a chain that was waited for.
fn confidences(space: &BlockSpace, drafts: usize) -> Result<Vec<f32>, EngineError> {
    let logits = space.collect_confidences(drafts)?;
    match logits.iter().all(|logit| logit.is_finite()) {
        true => Ok(logits.into_iter().map(sigmoid).collect()),
        false => Err(EngineError::NotFinite { what: "DSpark drafter, confidence head".to_owned() }),
    }
}

impl Drafter for CudaDsparkDrafter<'_> {
    fn reset(&mut self) {
        (self.dspark.len, self.waiting, self.chain) = (0, 0, None);
    }

    fn tapped_layers(&self) -> &[usize] {
        &self.dspark.config.taps
    }

    fn observe_taps(&mut self, taps: &[f32]) -> Result<(), EngineError> {
        let width = self.dspark.tapped_width();
        let rows = self.dspark.config.tapped_rows(taps)?;
        if self.waiting + rows <= MAX_WAITING {
            self.dspark.space.taps.write(self.waiting * self.row_bytes(), taps)?;
            self.waiting += rows;
            return Ok(());
        }
        self.dspark.device.start(Module::Draft, None)?;
        self.flush()?;
        taps.chunks(PASS_ROWS * width).try_for_each(|part| {
            self.dspark.space.taps.write(0, part)?;
            self.inject(0, part.len() / width)
        })
    }

    fn observe(&mut self, next_tokens: &[u32], hidden: &[f32]) -> Result<(), EngineError> {
        if !hidden.is_empty() {
            // A prompt's, whose tapped rows came by way of the host.
            return Ok(());
        }
        let (each, count, m) = (self.row_bytes(), next_tokens.len(), &self.dspark);
        let to = m.space.taps.inside(self.waiting * each, count * each)?;
        m.device.keep_rows(self.target.inside(0, count * each)?, to, count * each)?;
        self.waiting += count;
        if self.waiting > MAX_WAITING { self.flush() } else { Ok(()) }
    }

    fn propose(&mut self, history: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError> {
        let (m, rows) = (&self.dspark, self.waiting);
        let (c, drafts) = (m.config, limit.min(m.config.drafts()));
        let Some(&anchor) = history.last().filter(|_| drafts > 0) else { return Ok(Drafts::default()) };
        if sampler.sampling() != self.sampling {
            return Err(EngineError::Request("the drafter chooses by other rules than the request's".to_owned()));
        }
        m.check_room(rows)?;
        let (sure, cuts) = (m.weights.confidence.is_some(), self.min_survival > 0.0 && m.weights.confidence.is_some());
        // Those of drafts that are not verified are drawn again.
        let mut ahead = cuts.then(|| sampler.clone());
        let drawn = if self.sampling.is_greedy() { 0 } else { drafts };
        let uniforms: Vec<f64> = (0..drawn).map(|_| ahead.as_mut().unwrap_or(sampler).uniform()).collect();
        let mut tokens = vec![c.mask_token; c.block_size];
        tokens[0] = anchor;
        let spans = [(m.len, rows), (m.len + rows, c.block_size)];
        ChainInputs { anchor, tokens: &tokens, spans: &spans, uniforms: &uniforms }.put(&self.staged)?;
        let (splits, probs) = (m.space.splits(m.len + rows + c.block_size), tap.is_on());
        let shape = ChainShape { rows, drafts, splits, probs, confidences: sure && (probs || cuts) };
        m.device.start(Module::Draft, tap.clock())?;
        self.graphs.borrow_mut().run(shape, || self.launch(shape))?;
        m.device.end()?;
        let kept = if cuts { self.survivors(drafts)? } else { drafts };
        (0..drawn.min(if cuts { kept } else { 0 })).for_each(|_| _ = sampler.uniform());
        // The block's own rows leave the cache; those that the target has kept stay.
        self.dspark.len += rows;
        self.waiting = 0;
        self.chain = Some(shape);
        let recorded = || tap.is_on().then(Vec::new);
        Ok(Drafts { probs: recorded(), confidences: recorded().filter(|_| sure), on_device: kept, ..Drafts::default() })
    }

    fn fetch(&mut self, drafts: &mut Drafts, _: &mut RouteTap) -> Result<(), EngineError> {
        let (Some(_), space) = (self.chain.take(), &self.dspark.space) else { return Ok(()) };
        space.check()?;
        let count = std::mem::take(&mut drafts.on_device);
        if let Some(probs) = &mut drafts.probs {
            *probs = space.collect_probs(count)?;
        }
        if let Some(list) = &mut drafts.confidences {
            *list = confidences(space, count)?;
        }
        Ok(())
    }
}
