//! A DSpark drafter's passes on a device, as [`crate::engine::dspark::Dspark`]: context, block and corrected logits. `block_chain` makes a
//! window's drafts of them.

use super::PASS_ROWS;
use super::block_ops::{self, BlockShape};
use super::block_space::BlockSpace;
use super::block_weights::{DeviceBlockLayer, DeviceDspark};
use super::device::Device;
use super::ops::{self, Projection};
use super::site::Part;
use super::weights::DeviceWeights;
use crate::engine::EngineError;
use crate::engine::dspark::{DsparkCheckpoint, DsparkConfig};
use crate::trace::Component;
use std::rc::Rc;

/// One timeline of a drafter.
#[derive(Debug)]
pub struct CudaDspark<'m> {
    pub(super) device: Rc<Device>,
    pub(super) config: &'m DsparkConfig,
    pub(super) weights: DeviceDspark,
    target: Rc<DeviceWeights>,
    pub(super) space: BlockSpace,
    /// Tokens that the caches have room for, a block's own among them.
    pub(super) room: usize,
    /// Tokens in the context.
    pub(super) len: usize,
}

/// A block to run: where its tokens and its span (first position, 0 and rows) are, the splits of the cache that are launched for, and its
/// rows with logits, from `first` on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub tokens: u64,
    pub span: u64,
    pub splits: usize,
    pub first: usize,
    pub drafts: usize,
}

impl<'m> CudaDspark<'m> {
    /// An empty timeline for contexts of up to `tokens` tokens, beside the target whose weights are `target`.
    ///
    /// # Errors
    /// When device memory runs out, or the drafter has a shape or a format that no kernel takes.
    pub fn new(
        device: &Rc<Device>,
        checkpoint: &'m DsparkCheckpoint,
        target: &Rc<DeviceWeights>,
        tokens: usize,
    ) -> Result<Self, EngineError> {
        let config = &checkpoint.config;
        if config.head_dim > block_ops::MAX_BLOCK_HEAD || config.block_size > PASS_ROWS {
            return Err(EngineError::Device(format!(
                "CUDA: the DSpark drafter has heads of {} numbers and blocks of {} rows; the kernels take {} and {PASS_ROWS}; use --backend cpu",
                config.head_dim,
                config.block_size,
                block_ops::MAX_BLOCK_HEAD
            )));
        }
        let room = tokens + config.block_size;
        Ok(Self {
            weights: DeviceDspark::upload(device, config, &checkpoint.weights)?,
            space: BlockSpace::new(device, config, room)?,
            device: Rc::clone(device),
            config,
            target: Rc::clone(target),
            room,
            len: 0,
        })
    }

    pub(super) fn label(&self, layer: Option<usize>, component: Component) {
        self.device.label(layer, component);
    }

    /// Numbers of a row of the target's taps.
    pub(super) fn tapped_width(&self) -> usize {
        self.config.taps.len() * self.config.hidden
    }

    /// Whether `rows` more tokens and a block after them have room.
    ///
    /// # Errors
    /// When they have not.
    pub(super) fn check_room(&self, rows: usize) -> Result<(), EngineError> {
        if self.len + rows + self.config.block_size > self.room {
            let most = self.room - self.config.block_size;
            let text = format!("{rows} tokens after {} exceed the drafter's context of {most}", self.len);
            return Err(EngineError::Request(text));
        }
        Ok(())
    }

    fn shape(&self, rows: usize, span: u64) -> BlockShape {
        let c = self.config;
        BlockShape {
            heads: c.heads,
            kv_heads: c.kv_heads,
            dim: c.head_dim,
            rows,
            causal: c.causal,
            turns: self.weights.turns.at(0),
            base: span,
        }
    }

    /// Appends keys and values of the rows at `x` to a layer's cache; a block's rows have queries as well.
    fn append(&self, layer: usize, w: &DeviceBlockLayer, x: u64, shape: BlockShape, queries: bool) -> Result<(), EngineError> {
        let (d, s, width) = (&*self.device, &self.space, self.config.kv_width());
        let (damage, eps, [keys, values, raw]) = (s.damage(layer, Part::Attention), self.config.rms_eps, s.raw());
        let all = [
            Projection { w: &w.k, out: keys, stride: width },
            Projection { w: &w.v, out: values, stride: width },
            Projection { w: &w.q, out: raw, stride: self.config.query_width() },
        ];
        ops::project(d, x, shape.rows, if queries { &all } else { &all[..2] })?;
        block_ops::block_heads(d, shape, self.config.kv_heads, (keys, w.k_norm.at(0)), eps, true, s.keys(layer), damage)?;
        block_ops::block_values(d, shape, values, width, s.values(layer))?;
        if queries {
            block_ops::block_heads(d, shape, self.config.heads, (raw, w.q_norm.at(0)), eps, false, s.queries.at(0), damage)?;
        }
        Ok(())
    }

    /// Puts the injection of up to [`PASS_ROWS`] tapped rows at `taps`, `[rows, taps * H]`, into the stream: they become context.
    pub(super) fn inject(&self, taps: u64, rows: usize, span: u64) -> Result<(), EngineError> {
        let (d, s, w, c) = (&*self.device, &self.space, &self.weights, self.config);
        self.label(None, Component::Commit);
        ops::dense(d, &w.taps, taps, rows, s.residual.at(0), c.hidden)?;
        let damage = s.damage(0, Part::Input);
        ops::rmsnorm(d, s.residual.at(0), 0, w.taps_norm.at(0), c.rms_eps, (rows, c.hidden), s.normed.at(0), damage)?;
        for (number, layer) in w.layers.iter().enumerate() {
            self.label(Some(number), Component::Commit);
            // The rows as they are: the layer's input norm is for the block's rows only.
            self.append(number, layer, s.normed.at(0), self.shape(rows, span), false)?;
        }
        Ok(())
    }

    /// Puts a block into the stream.
    pub(super) fn block(&self, block: Block) -> Result<(), EngineError> {
        let (d, s, w, c) = (&*self.device, &self.space, &self.weights, self.config);
        let (size, shape) = ((c.block_size, c.hidden), self.shape(c.block_size, block.span));
        let (residual, normed, branch) = (s.residual.at(0), s.normed.at(0), s.branch.at(0));
        let norm = |waiting, weight, out, damage| ops::rmsnorm(d, residual, waiting, weight, c.rms_eps, size, out, damage);
        self.label(None, Component::Embedding);
        ops::embed(d, &self.target.embedding, block.tokens, c.block_size, residual, s.damage(0, Part::Embedding))?;
        for (number, layer) in w.layers.iter().enumerate() {
            self.label(Some(number), Component::Draft);
            // The branch of the layer before is added here.
            norm(if number == 0 { 0 } else { branch }, layer.input_norm.at(0), normed, s.damage(number, Part::Input))?;
            self.append(number, layer, normed, shape, true)?;
            let cache = (s.keys(number), s.values(number));
            block_ops::block_attend(d, shape, s.queries.at(0), cache, block.splits, (s.parts.at(0), s.stats.at(0)), s.mixed.at(0))?;
            ops::dense(d, &layer.out, s.mixed.at(0), c.block_size, branch, c.hidden)?;
            norm(branch, layer.post_norm.at(0), normed, s.damage(number, Part::PostNorm))?;
            self.label(Some(number), Component::Dense);
            let mlp = ops::Mlp { gate: &layer.mlp.gate, up: &layer.mlp.up, down: &layer.mlp.down };
            let (plan, out) = (s.plan(block.span), (s.mid.at(0), branch));
            ops::experts(d, &mlp, plan, (1, c.block_size, c.block_size), normed, 0.0, out, s.damage(number, Part::Mlp))?;
        }
        self.label(None, Component::Norm);
        norm(if w.layers.is_empty() { 0 } else { branch }, w.final_norm.at(0), s.output.at(0), s.damage(0, Part::Output))?;
        self.label(None, Component::Head);
        ops::dense(d, &self.target.head, s.output.float(block.first * c.hidden), block.drafts, s.logits.at(0), c.vocab)
    }

    /// Corrects the logits of draft `draft` of the block before by what the token at `previous` says, in their place; gives that place.
    pub(super) fn correct(&self, draft: usize, previous: u64) -> Result<u64, EngineError> {
        let (d, s, c) = (&*self.device, &self.space, self.config);
        let logits = s.logits.float(draft * c.vocab);
        let Some((of, next)) = &self.weights.markov else { return Ok(logits) };
        self.label(None, Component::Head);
        let embedded = s.embedded.float(draft * c.markov_rank);
        ops::embed(d, of, previous, 1, embedded, s.damage(0, Part::Embedding))?;
        ops::dense(d, next, embedded, 1, s.bias.at(0), c.vocab)?;
        ops::add_rows(d, (logits, s.bias.at(0)), (1, c.vocab), logits, c.vocab)?;
        Ok(logits)
    }

    /// Puts into the stream how sure it is of each of `drafts` drafts, whose rows begin with row `first` of the block.
    pub(super) fn confidences(&self, first: usize, drafts: usize) -> Result<(), EngineError> {
        let (s, c) = (&self.space, self.config);
        let Some((proj, bias)) = &self.weights.confidence else { return Ok(()) };
        self.label(None, Component::Head);
        let rank = if c.confidence_with_markov { c.markov_rank } else { 0 };
        let rows = (s.output.float(first * c.hidden), c.hidden);
        block_ops::confidence(&self.device, drafts, rows, (s.embedded.at(0), rank), (proj.at(0), *bias), s.confidences())
    }
}
