//! What a timeline remembers on the device: recurrent states with the staged rows of a window, and latent caches.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::device::Device;
use super::ops::{Delta, KdaRows, KdaShape};
use super::pinned::Pinned;
use crate::engine::{EngineError, ModelConfig};
use std::rc::Rc;

/// The states of all KDA layers, one layer after the other in every buffer, so that one launch commits them all.
#[derive(Debug)]
pub(super) struct KdaStates {
    pub shape: KdaShape,
    pub layers: usize,
    /// `[layers, heads, V, K]`
    state: Buffer,
    /// q, k, v before the convolution, `[layers, taps - 1 + PASS_ROWS, 3 P]`.
    raw: Buffer,
    /// Scaled queries of a pass, shared by the layers, `[PASS_ROWS, P]`.
    query: Buffer,
    /// Keys, values and decays of the pending rows, `[layers, PASS_ROWS, P]` each, and betas, `[layers, PASS_ROWS, heads]`.
    keys: Buffer,
    values: Buffer,
    decays: Buffer,
    betas: Buffer,
    /// How many rows are kept, for the kernels.
    keep: Buffer,
    staged_keep: Pinned,
}

/// F32s of one layer.
pub(super) fn kda_floats(config: &ModelConfig) -> usize {
    let width = config.kda_width();
    config.heads * config.head_dim * config.head_dim
        + (config.conv_kernel - 1 + PASS_ROWS) * 3 * width
        + PASS_ROWS * (3 * width + config.heads)
}

impl KdaStates {
    /// The states before the first token.
    pub fn new(device: &Rc<Device>, config: &ModelConfig, layers: usize) -> Result<Self, EngineError> {
        let (heads, dim, taps, width) = (config.heads, config.head_dim, config.conv_kernel, config.kda_width());
        let floats = |n: usize| device.zeros(n * 4);
        Ok(Self {
            shape: KdaShape { heads, dim, taps, bound: config.kda_lower_bound },
            layers,
            state: floats(layers * heads * dim * dim)?,
            raw: floats(layers * (taps - 1 + PASS_ROWS) * 3 * width)?,
            query: floats(PASS_ROWS * width)?,
            keys: floats(layers * PASS_ROWS * width)?,
            values: floats(layers * PASS_ROWS * width)?,
            decays: floats(layers * PASS_ROWS * width)?,
            betas: floats(layers * PASS_ROWS * heads)?,
            keep: floats(1)?,
            staged_keep: Pinned::new(device, 4)?,
        })
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.dim
    }

    fn state_stride(&self) -> usize {
        self.shape.heads * self.shape.dim * self.shape.dim
    }

    fn raw_stride(&self) -> usize {
        (self.shape.taps - 1 + PASS_ROWS) * 3 * self.width()
    }

    /// The state of KDA layer number `layer`.
    pub fn state(&self, layer: usize) -> u64 {
        self.state.float(layer * self.state_stride())
    }

    /// The committed state of KDA layer number `layer`, `[heads, K, V]` as the CPU engine has it; waits for the device.
    pub fn read_state(&self, layer: usize) -> Result<Vec<f32>, EngineError> {
        let (dim, mut state) = (self.shape.dim, vec![0.0; self.state_stride()]);
        self.state.read(layer * self.state_stride() * 4, &mut state)?;
        // The device keeps a value's keys together.
        for head in state.chunks_exact_mut(dim * dim) {
            for key in 0..dim {
                (0..key).for_each(|value| head.swap(key * dim + value, value * dim + key));
            }
        }
        Ok(state)
    }

    /// The last committed rows of the convolution's input, `[taps - 1, 3 P]`; waits for the device.
    pub fn read_history(&self, layer: usize) -> Result<Vec<f32>, EngineError> {
        let mut rows = vec![0.0; (self.shape.taps - 1) * 3 * self.width()];
        self.raw.read(layer * self.raw_stride() * 4, &mut rows)?;
        Ok(rows)
    }

    /// Row `row` of the convolution's input, the history's first being 0.
    pub fn raw(&self, layer: usize, row: usize) -> u64 {
        self.raw.float(layer * self.raw_stride() + row * 3 * self.width())
    }

    /// Where a pass's rows are staged.
    pub fn rows(&self, layer: usize) -> KdaRows {
        let d = self.delta(layer);
        KdaRows { query: self.query.at(0), keys: d.keys, values: d.values, decays: d.decays, betas: d.betas }
    }

    /// The staged rows as the delta rule takes them.
    pub fn delta(&self, layer: usize) -> Delta {
        let at = |b: &Buffer| b.float(layer * PASS_ROWS * self.width());
        Delta {
            heads: self.shape.heads as i32,
            dim: self.shape.dim as i32,
            keys: at(&self.keys),
            values: at(&self.values),
            decays: at(&self.decays),
            betas: self.betas.float(layer * PASS_ROWS * self.shape.heads),
        }
    }

    /// Says that the first `keep` pending rows are kept. The commit before must have been waited for.
    pub fn begin_commit(&self, keep: usize) -> Result<(), EngineError> {
        self.staged_keep.put(0, &[keep as u32])
    }

    /// Makes as many rows part of the states of all layers as [`KdaStates::begin_commit`] said.
    pub fn commit_said(&self, device: &Device) -> Result<(), EngineError> {
        self.staged_keep.send(0, 4, &self.keep)?;
        self.commit(device, self.keep.at(0))
    }

    /// Makes the kept rows part of the states of all layers; how many they are is read at `keep`.
    pub fn commit(&self, device: &Device, keep: u64) -> Result<(), EngineError> {
        let (row_stride, beta_stride) = (PASS_ROWS * self.width(), PASS_ROWS * self.shape.heads);
        let state = (self.state.at(0), self.state_stride());
        super::ops::kda_commit(device, self.shape, self.layers, state, self.delta(0), (row_stride, beta_stride), keep)?;
        super::ops::kda_shift(device, self.shape, self.layers, (self.raw.at(0), self.raw_stride()), keep)
    }

    /// Forgets every token.
    pub fn clear(&self) -> Result<(), EngineError> {
        self.state.clear()?;
        self.raw.clear()
    }
}

/// Latent caches, `[layers, tokens, latent + rope]`.
#[derive(Debug)]
pub(super) struct MlaCaches {
    rows: Buffer,
    layers: usize,
    width: usize,
    /// Tokens that there is room for.
    pub tokens: usize,
}

impl MlaCaches {
    /// Empty caches with room for `tokens` tokens.
    pub fn new(device: &Rc<Device>, config: &ModelConfig, layers: usize, tokens: usize) -> Result<Self, EngineError> {
        let width = config.kv_lora_rank + config.qk_rope_head_dim;
        Ok(Self { rows: device.room(layers * tokens * width * 4)?, layers, width, tokens })
    }

    /// The first `tokens` rows of MLA layer number `layer`, `[tokens, latent + rope]`; waits for the device.
    pub fn read(&self, layer: usize, tokens: usize) -> Result<Vec<f32>, EngineError> {
        let mut rows = vec![0.0; tokens * self.width];
        self.rows.read(layer * self.tokens * self.width * 4, &mut rows)?;
        Ok(rows)
    }

    /// The cache of MLA layer number `layer`.
    pub fn layer(&self, layer: usize) -> u64 {
        debug_assert!(layer < self.layers);
        self.rows.float(layer * self.tokens * self.width)
    }
}
