//! The DSpark drafter (ling3.md 5.2): an external model that drafts a block of tokens in one pass.
//!
//! ```text
//! inject(taps)   rows that the target has committed become context: keys and values, no queries
//! block(anchor)  anchor and masks through the layers, every row seeing the context and the block; then the context again
//! correct(row)   one row's logits with what the token before says, and how sure the drafter is of its draft
//! ```
//!
//! The context is exactly the tokens that the target has taken in, position 0 on; the anchor stands after them and is not in
//! it. Embedding and head are the target's own.

mod attention;
mod checkpoint;
mod config;
pub mod golden;
mod weights;

pub use checkpoint::DsparkCheckpoint;
pub use config::{ARCHITECTURES, DsparkConfig};
pub use weights::{DsparkLayer, DsparkWeights};

use super::error::EngineError;
use super::laps::Laps;
use super::matmul::matmul;
use super::moe::{self, MoeScratch};
use super::norm::{Damage, all_finite, check, rms_norm_rows, sigmoid};
use super::rope::Rope;
use super::scratch::fit;
use super::session::embed;
use super::simd;
use super::tap::ForwardTap;
use super::{ModelConfig, ModelWeights};
use crate::trace::{Component, Module};
use attention::{AttentionScratch, KvCache};
use std::ops::Range;

/// One timeline of a drafter beside its target's.
#[derive(Debug)]
pub struct Dspark<'m> {
    config: &'m DsparkConfig,
    weights: &'m DsparkWeights,
    target: &'m ModelConfig,
    target_weights: &'m ModelWeights,
    caches: Vec<KvCache>,
    len: usize,
    rope: Rope,
    ids: Vec<u32>,
    scratch: Scratch,
}

/// Buffers of a pass.
#[derive(Debug, Default)]
struct Scratch {
    features: Vec<f32>,
    residual: Vec<f32>,
    normed: Vec<f32>,
    branch: Vec<f32>,
    attention: AttentionScratch,
    mlp: MoeScratch,
    output: Vec<f32>,
    logits: Vec<f32>,
    embedded: Vec<f32>,
    bias: Vec<f32>,
    corrected: Vec<f32>,
}

/// The results of a block, in buffers of the drafter that made it.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// Token ids, anchor first, `[block_size]`.
    pub ids: &'a [u32],
    /// Rows after the final norm, `[block_size, H]`.
    pub hidden: &'a [f32],
    /// The target's head over the rows that were asked for, `[rows, vocab]`.
    pub logits: &'a [f32],
}

/// A row's logits after the Markov correction, and how sure the drafter is of the token drawn from them.
#[derive(Debug, Clone, Copy)]
pub struct Corrected<'a> {
    /// `[vocab]`.
    pub logits: &'a [f32],
    /// Before the sigmoid; `None` without a confidence head.
    pub confidence_logit: Option<f32>,
}

impl Corrected<'_> {
    /// The estimated probability that the target keeps the row's draft, given that it keeps those before.
    pub fn confidence(&self) -> Option<f32> {
        self.confidence_logit.map(sigmoid)
    }
}

impl<'m> Dspark<'m> {
    /// An empty timeline. `checkpoint` must have been [opened](DsparkCheckpoint::open) for this target.
    pub fn new(checkpoint: &'m DsparkCheckpoint, target: &'m ModelConfig, target_weights: &'m ModelWeights) -> Self {
        let config = &checkpoint.config;
        Self {
            config,
            weights: &checkpoint.weights,
            target,
            target_weights,
            caches: (0..config.layers).map(|_| KvCache::default()).collect(),
            len: 0,
            rope: Rope::new(config.head_dim, config.rope_theta),
            ids: Vec::new(),
            scratch: Scratch::default(),
        }
    }

    /// The drafter's shape and rules.
    pub fn config(&self) -> &'m DsparkConfig {
        self.config
    }

    /// Tokens in the context.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the context is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A layer's context keys (normed, rotated) and values, each `[len, kv_heads, head_dim]`.
    pub fn context(&self, layer: usize) -> Option<(&[f32], &[f32])> {
        let numbers = self.len * self.config.kv_width();
        let cache = self.caches.get(layer)?;
        Some((cache.keys().get(..numbers)?, cache.values().get(..numbers)?))
    }

    /// Appends tokens to the context. `taps` is `[rows, taps * H]`: the outputs of the tapped layers of the target, ascending.
    /// Gives the rows that the keys and values are made of, `[rows, H]`.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`], and [`EngineError::Request`] for numbers that are no whole rows; the context is then as
    /// before the call.
    pub fn inject(&mut self, taps: &[f32], tap: &mut dyn ForwardTap) -> Result<&[f32], EngineError> {
        let rows = self.config.tapped_rows(taps)?;
        let appended = self.append(taps, rows, tap);
        if appended.is_ok() {
            self.len += rows;
        }
        // After an error nothing of the rows stays.
        self.truncate(self.len);
        appended?;
        Ok(&self.scratch.features[..rows * self.config.hidden])
    }

    fn append(&mut self, taps: &[f32], rows: usize, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let (config, s) = (self.config, &mut self.scratch);
        let mut laps = Laps::start(tap, Module::Draft, None);
        let joined = fit(&mut s.branch, rows * config.hidden);
        let features = fit(&mut s.features, rows * config.hidden);
        matmul(&self.weights.taps, taps, joined);
        check(joined, "fc output").map_err(|d| damaged(None, d))?;
        rms_norm_rows(joined, &self.weights.taps_norm, config.rms_eps, features);
        self.rope.prepare(self.len, rows);
        for (layer, (w, cache)) in self.weights.layers.iter().zip(&mut self.caches).enumerate() {
            // The rows as they are: the layer's input norm is for the block's rows only.
            let appended = cache.append(&w.attention, config, &self.rope, features, &mut s.attention);
            appended.map_err(|d| damaged(Some(layer), d))?;
        }
        laps.lap(Component::Commit);
        Ok(())
    }

    /// Keeps the first `len` tokens of the context.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let width = self.config.kv_width();
        self.caches.iter_mut().for_each(|cache| cache.truncate(self.len, width));
    }

    /// Runs a block after the context: `anchor` and masks. The rows `rows` of it get logits. The context is unchanged.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`], and [`EngineError::Request`] for an anchor that is not in the vocabulary.
    pub fn block(&mut self, anchor: u32, rows: Range<usize>, tap: &mut dyn ForwardTap) -> Result<Block<'_>, EngineError> {
        let result = self.run_block(anchor, rows.clone(), tap);
        // A block's own keys and values never stay.
        self.truncate(self.len);
        result?;
        let (width, size) = (self.config.hidden, self.config.block_size);
        Ok(Block {
            ids: &self.ids,
            hidden: &self.scratch.output[..size * width],
            logits: &self.scratch.logits[..rows.len() * self.config.vocab],
        })
    }

    fn run_block(&mut self, anchor: u32, rows: Range<usize>, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let (config, width) = (self.config, self.config.hidden);
        self.ids.clear();
        self.ids.push(anchor);
        self.ids.resize(config.block_size, config.mask_token);
        let s = &mut self.scratch;
        let x = fit(&mut s.residual, config.block_size * width);
        let normed = fit(&mut s.normed, x.len());
        let branch = fit(&mut s.branch, x.len());
        let mut laps = Laps::start(tap, Module::Draft, None);
        embed(self.target, self.target_weights, &self.ids, x)?;
        self.rope.prepare(self.len, config.block_size);
        laps.lap(Component::Embedding);
        for (layer, (w, cache)) in self.weights.layers.iter().zip(&mut self.caches).enumerate() {
            let damaged = |damage| damaged(Some(layer), damage);
            rms_norm_rows(x, &w.input_norm, config.rms_eps, normed);
            cache.append(&w.attention, config, &self.rope, normed, &mut s.attention).map_err(damaged)?;
            let attended = cache.attend(&w.attention, config, &self.rope, normed, branch, &mut s.attention).map_err(damaged)?;
            laps.tap.attended(layer, attended);
            add(x, branch);
            laps.lap(Component::Draft);
            laps.tap.after_attention(Module::Draft, layer, x);
            rms_norm_rows(x, &w.post_norm, config.rms_eps, normed);
            moe::dense(&w.mlp, normed, branch, &mut s.mlp).map_err(damaged)?;
            add(x, branch);
            check(x, "output").map_err(damaged)?;
            laps.lap(Component::Dense);
            laps.tap.after_layer(Module::Draft, layer, x);
        }
        let output = fit(&mut s.output, x.len());
        rms_norm_rows(x, &self.weights.final_norm, config.rms_eps, output);
        laps.lap(Component::Norm);
        let logits = fit(&mut s.logits, rows.len() * config.vocab);
        matmul(&self.target_weights.head, &output[rows.start * width..rows.end * width], logits);
        if !all_finite(logits) {
            return Err(damaged(None, Damage("logits")));
        }
        laps.lap(Component::Head);
        Ok(())
    }

    /// The logits of draft `draft`, whose block row has the logits row `logits_row` of the last [`Dspark::block`], when the token
    /// before it is `previous`: `base + markov_w2 . markov_w1[previous]`.
    ///
    /// The confidence is made of the row and of the token before, not of the token that is drawn.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`], and [`EngineError::Request`] for a token that is not in the vocabulary.
    pub fn correct(&mut self, draft: usize, logits_row: usize, previous: u32) -> Result<Corrected<'_>, EngineError> {
        let config = self.config;
        let s = &mut self.scratch;
        let base = &s.logits[logits_row * config.vocab..][..config.vocab];
        let embedded = fit(&mut s.embedded, config.markov_rank);
        let bias = match &self.weights.markov {
            None => None,
            Some(markov) => {
                markov.of.decode_row(known_token(previous, config)?, embedded);
                let bias = fit(&mut s.bias, config.vocab);
                matmul(&markov.next, embedded, bias);
                Some(&*bias)
            }
        };
        let row = &s.output[(draft + config.first_row()) * config.hidden..][..config.hidden];
        let out = fit(&mut s.corrected, config.vocab);
        out.copy_from_slice(base);
        add(out, bias.unwrap_or_default());
        if !all_finite(out) {
            return Err(damaged(None, Damage("Markov head")));
        }
        let confidence_logit = self.weights.confidence.as_ref().map(|head| {
            let (of_row, of_token) = head.proj.split_at(row.len());
            let token = if of_token.is_empty() { 0.0 } else { simd::dot(of_token, embedded) };
            simd::dot(of_row, row) + token + head.bias
        });
        if confidence_logit.is_some_and(|logit| !logit.is_finite()) {
            return Err(damaged(None, Damage("confidence head")));
        }
        Ok(Corrected { logits: out, confidence_logit })
    }
}

/// A token as a row of the vocabulary's tables.
///
/// # Errors
/// [`EngineError::Request`] for a token that is not in the vocabulary.
fn known_token(token: u32, config: &DsparkConfig) -> Result<usize, EngineError> {
    let known = usize::try_from(token).ok().filter(|id| *id < config.vocab);
    known.ok_or_else(|| EngineError::Request(format!("token id {token} is not below the vocabulary size {}", config.vocab)))
}

fn add(x: &mut [f32], branch: &[f32]) {
    for (x, b) in x.iter_mut().zip(branch) {
        *x += *b;
    }
}

/// The error for a number of the drafter that is not finite.
fn damaged(layer: Option<usize>, damage: Damage) -> EngineError {
    let place = layer.map(|layer| format!("layer {layer}: ")).unwrap_or_default();
    EngineError::NotFinite { what: format!("DSpark drafter, {place}{}", damage.0) }
}
