//! A DSpark drafter on a device, as [`crate::engine::dspark::Dspark`]: context, blocks and corrected logits.
//!
//! The target's tapped rows come by way of the host, where rejected ones are dropped: a few rows of `taps * H` numbers a step.
//! Drafts are drawn on the host, one after the other; each costs a look at the Markov head. Contexts, blocks and looks run as graphs, each
//! with one wait.

use super::PASS_ROWS;
use super::block_ops::{self, BlockShape};
use super::block_space::BlockSpace;
use super::block_weights::{DeviceBlockLayer, DeviceDspark};
use super::device::Device;
use super::graph::Graphs;
use super::ops;
use super::site::Part;
use super::weights::DeviceWeights;
use crate::engine::dspark::{Corrected, DsparkCheckpoint, DsparkConfig, DsparkWeights, correct_row, known_token};
use crate::engine::norm::all_finite;
use crate::engine::target::BlockModule;
use crate::engine::{EngineError, ForwardTap};
use crate::trace::{Component, Module};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// One timeline of a drafter.
#[derive(Debug)]
pub struct CudaDspark<'m> {
    device: Rc<Device>,
    config: &'m DsparkConfig,
    /// On the host, for the confidence head.
    host: &'m DsparkWeights,
    weights: DeviceDspark,
    target: Rc<DeviceWeights>,
    space: BlockSpace,
    /// Tokens that the caches have room for, a block's own among them.
    room: usize,
    len: usize,
    rows: BlockRows,
    graphs: RefCell<Graphs<Work>>,
}

/// What is launched together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Work {
    /// So many tapped rows into the context.
    Inject(usize),
    /// A block, and logits from row `first` on of `drafts` rows.
    Block {
        splits: usize,
        first: usize,
        drafts: usize,
    },
    Markov,
}

/// What a block leaves on the host.
#[derive(Debug, Default)]
struct BlockRows {
    output: Vec<f32>,
    logits: Vec<f32>,
    embedded: Vec<f32>,
    bias: Vec<f32>,
    corrected: Vec<f32>,
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
            host: &checkpoint.weights,
            target: Rc::clone(target),
            room,
            len: 0,
            rows: BlockRows::default(),
            graphs: RefCell::new(Graphs::new(device)),
        })
    }

    fn label(&self, layer: Option<usize>, component: Component) {
        self.device.label(layer, component);
    }

    /// Does some work and waits for it, by its graph once there is one.
    fn run(&self, work: Work, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let d = &*self.device;
        d.start(Module::Draft, tap.clock())?;
        self.graphs.borrow_mut().run(work, || {
            match work {
                Work::Inject(rows) => self.launch_inject(rows)?,
                Work::Block { splits, first, drafts } => self.launch_block(splits, first, drafts)?,
                Work::Markov => self.launch_markov()?,
            }
            self.space.bring_damage()
        })?;
        d.end()?;
        d.wait()?;
        d.timer.borrow_mut().finish()?.into_iter().for_each(|kernel| tap.kernel(kernel));
        self.space.check()
    }

    fn shape(&self, rows: usize) -> BlockShape {
        let c = self.config;
        BlockShape {
            heads: c.heads,
            kv_heads: c.kv_heads,
            dim: c.head_dim,
            rows,
            causal: c.causal,
            turns: self.weights.turns.at(0),
            base: self.space.base(),
        }
    }

    /// Appends keys and values of `rows` rows at `x` to a layer's cache.
    fn append(&self, layer: usize, w: &DeviceBlockLayer, x: u64, rows: usize) -> Result<(), EngineError> {
        let (d, s, width) = (&*self.device, &self.space, self.config.kv_width());
        let damage = s.damage(layer, Part::Attention);
        ops::dense(d, &w.k, x, rows, s.raw.at(0), width)?;
        block_ops::block_heads(
            d,
            self.shape(rows),
            self.config.kv_heads,
            (s.raw.at(0), w.k_norm.at(0)),
            self.config.rms_eps,
            true,
            s.keys(layer),
            damage,
        )?;
        ops::dense(d, &w.v, x, rows, s.raw.at(0), width)?;
        block_ops::block_values(d, self.shape(rows), s.raw.at(0), width, s.values(layer))
    }

    /// Puts up to [`PASS_ROWS`] tapped rows into the stream.
    fn launch_inject(&self, rows: usize) -> Result<(), EngineError> {
        let (d, s, w, c) = (&*self.device, &self.space, &self.weights, self.config);
        self.label(None, Component::Commit);
        s.send()?;
        s.send_taps(rows * c.taps.len() * c.hidden)?;
        ops::dense(d, &w.taps, s.taps.at(0), rows, s.residual.at(0), c.hidden)?;
        let damage = s.damage(0, Part::Input);
        ops::rmsnorm(d, s.residual.at(0), 0, w.taps_norm.at(0), c.rms_eps, (rows, c.hidden), s.normed.at(0), damage)?;
        for (number, layer) in w.layers.iter().enumerate() {
            self.label(Some(number), Component::Commit);
            // The rows as they are: the layer's input norm is for the block's rows only.
            self.append(number, layer, s.normed.at(0), rows)?;
        }
        Ok(())
    }

    /// Puts a block into the stream.
    fn launch_block(&self, splits: usize, first: usize, drafts: usize) -> Result<(), EngineError> {
        let (d, s, w, c) = (&*self.device, &self.space, &self.weights, self.config);
        let size = (c.block_size, c.hidden);
        let (residual, normed, branch) = (s.residual.at(0), s.normed.at(0), s.branch.at(0));
        let norm = |waiting, weight, out, damage| ops::rmsnorm(d, residual, waiting, weight, c.rms_eps, size, out, damage);
        self.label(None, Component::Embedding);
        s.send()?;
        ops::embed(d, &self.target.embedding, s.tokens(), c.block_size, residual, s.damage(0, Part::Embedding))?;
        for (number, layer) in w.layers.iter().enumerate() {
            self.label(Some(number), Component::Draft);
            // The branch of the layer before is added here.
            norm(if number == 0 { 0 } else { branch }, layer.input_norm.at(0), normed, s.damage(number, Part::Input))?;
            self.append(number, layer, normed, c.block_size)?;
            let (shape, damage) = (self.shape(c.block_size), s.damage(number, Part::Attention));
            ops::dense(d, &layer.q, normed, c.block_size, s.raw.at(0), c.query_width())?;
            let queries = s.queries.at(0);
            block_ops::block_heads(d, shape, c.heads, (s.raw.at(0), layer.q_norm.at(0)), c.rms_eps, false, queries, damage)?;
            let cache = (s.keys(number), s.values(number));
            block_ops::block_attend(d, shape, queries, cache, splits, (s.parts.at(0), s.stats.at(0)), s.mixed.at(0))?;
            ops::dense(d, &layer.out, s.mixed.at(0), c.block_size, branch, c.hidden)?;
            norm(branch, layer.post_norm.at(0), normed, s.damage(number, Part::PostNorm))?;
            self.label(Some(number), Component::Dense);
            let mlp = ops::Mlp { gate: &layer.mlp.gate, up: &layer.mlp.up, down: &layer.mlp.down };
            let out = (s.mid.at(0), branch);
            ops::experts(d, &mlp, s.plan(), (1, c.block_size, c.block_size), normed, 0.0, out, s.damage(number, Part::Mlp))?;
        }
        self.label(None, Component::Norm);
        norm(if w.layers.is_empty() { 0 } else { branch }, w.final_norm.at(0), s.output.at(0), s.damage(0, Part::Output))?;
        self.label(None, Component::Head);
        if drafts > 0 {
            ops::dense(d, &self.target.head, s.output.float(first * c.hidden), drafts, s.logits.at(0), c.vocab)?;
        }
        s.bring_block(c, drafts)
    }

    /// Puts the Markov embedding of a token, and what it says of the next one, into the stream.
    fn launch_markov(&self) -> Result<(), EngineError> {
        let (d, s, c) = (&*self.device, &self.space, self.config);
        let Some((of, next)) = &self.weights.markov else { return Ok(()) };
        self.label(None, Component::Head);
        s.send()?;
        ops::embed(d, of, s.tokens(), 1, s.embedded.at(0), s.damage(0, Part::Embedding))?;
        ops::dense(d, next, s.embedded.at(0), 1, s.bias.at(0), c.vocab)?;
        s.bring_markov(c)
    }
}

impl BlockModule for CudaDspark<'_> {
    fn config(&self) -> &DsparkConfig {
        self.config
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn inject(&mut self, taps: &[f32], tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let (each, before) = (self.config.taps.len() * self.config.hidden, self.len);
        let rows = self.config.tapped_rows(taps)?;
        if before + rows + self.config.block_size > self.room {
            let most = self.room - self.config.block_size;
            return Err(EngineError::Request(format!("{rows} tokens after {before} exceed the drafter's context of {most}")));
        }
        for part in taps.chunks(PASS_ROWS * each) {
            let rows = part.len() / each;
            self.space.begin(&[], self.len, rows)?;
            self.space.begin_taps(part)?;
            if let Err(error) = self.run(Work::Inject(rows), tap) {
                self.len = before;
                return Err(error);
            }
            self.len += rows;
        }
        Ok(())
    }

    fn block(&mut self, anchor: u32, rows: Range<usize>, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let c = self.config;
        known_token(anchor, c)?;
        let mut ids = vec![c.mask_token; c.block_size];
        ids[0] = anchor;
        self.space.begin(&ids, self.len, c.block_size)?;
        let splits = self.space.splits(self.len + c.block_size);
        self.run(Work::Block { splits, first: rows.start, drafts: rows.len() }, tap)?;
        self.space.collect_block(c, rows.len(), (&mut self.rows.output, &mut self.rows.logits))?;
        match all_finite(&self.rows.logits) {
            true => Ok(()),
            false => Err(EngineError::NotFinite { what: "DSpark drafter, logits".to_owned() }),
        }
    }

    fn correct(&mut self, draft: usize, logits_row: usize, previous: u32, tap: &mut dyn ForwardTap) -> Result<Corrected<'_>, EngineError> {
        if self.weights.markov.is_some() {
            known_token(previous, self.config)?;
            self.space.begin(&[previous], self.len, 1)?;
            self.run(Work::Markov, tap)?;
            self.space.collect_markov(self.config, (&mut self.rows.embedded, &mut self.rows.bias))?;
        }
        let (c, r) = (self.config, &mut self.rows);
        let row = &r.output[(draft + c.first_row()) * c.hidden..][..c.hidden];
        let base = &r.logits[logits_row * c.vocab..][..c.vocab];
        r.corrected.resize(c.vocab, 0.0);
        let bias = self.weights.markov.is_some().then_some(&r.bias[..]);
        correct_row(self.host, base, bias, (row, &r.embedded), &mut r.corrected)
    }
}
