//! The multi-token-prediction block (ling3.md 5.1): one MLA layer with experts that drafts from a hidden
//! row of the target and the token after it.
//!
//! Row `t` takes `h_t` (after the target's final norm) and token `t+1`, stands at position `t` and predicts
//! token `t+2`. A chain feeds the block's own output as the next row's hidden.

use super::config::ModelConfig;
use super::error::EngineError;
use super::laps::Laps;
use super::layer::{LayerScratch, LayerState, Place};
use super::matmul::matmul;
use super::moe::Limits;
use super::norm::rms_norm;
use super::rope::Rope;
use super::scratch::fit;
use super::session::{Forward, LogitRows, Output, embed};
use super::tap::ForwardTap;
use super::weights::{Attention, ModelWeights, MtpWeights};
use crate::trace::{Component, Module};

/// One timeline of the draft module, with a cache of its own.
#[derive(Debug)]
pub struct Mtp<'m> {
    config: &'m ModelConfig,
    weights: &'m ModelWeights,
    block: &'m MtpWeights,
    state: LayerState,
    len: usize,
    rope: Rope,
    scratch: LayerScratch,
    embedded: Vec<f32>,
    joined: Vec<f32>,
    residual: Vec<f32>,
    output: Output,
}

impl<'m> Mtp<'m> {
    /// An empty timeline; `None` when the model has no such block.
    pub fn new(config: &'m ModelConfig, weights: &'m ModelWeights) -> Option<Self> {
        // A recurrent block could not be truncated; the loader refuses `mtp_use_kda`.
        let block = weights.mtp.as_ref().filter(|b| matches!(b.layer.attention, Attention::Mla(_)))?;
        Some(Self {
            config,
            weights,
            block,
            state: LayerState::new(&block.layer, config),
            len: 0,
            rope: Rope::new(config.qk_rope_head_dim, config.rope_theta),
            scratch: LayerScratch::default(),
            embedded: Vec::new(),
            joined: Vec::new(),
            residual: Vec::new(),
            output: Output::default(),
        })
    }

    /// Rows in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends rows: row `j` joins the embedding of `next_tokens[j]` and `hidden[j]` (`[rows, H]`). The
    /// result has the logits and the rows after the block's final norm, which feed a chain.
    ///
    /// # Errors
    /// As [`super::Session::forward`]; the cache is then as before the call.
    pub fn extend(
        &mut self,
        next_tokens: &[u32],
        hidden: &[f32],
        logits: LogitRows,
        tap: &mut dyn ForwardTap,
    ) -> Result<Forward<'_>, EngineError> {
        let (config, width, rows) = (self.config, self.config.hidden, next_tokens.len());
        if hidden.len() != rows * width {
            return Err(EngineError::Request(format!(
                "{rows} draft rows need {rows} hidden rows of {width}, not {} numbers",
                hidden.len()
            )));
        }
        if rows > config.max_position.saturating_sub(self.len) {
            return Err(EngineError::Request(format!(
                "{rows} draft rows after {} exceed the model's context of {}",
                self.len, config.max_position
            )));
        }
        let mut laps = Laps::start(tap, Module::Draft, None);
        let embedded = fit(&mut self.embedded, rows * width);
        embed(config, self.weights, next_tokens, embedded)?;
        let joined = fit(&mut self.joined, rows * 2 * width);
        let halves = embedded.chunks_exact(width).zip(hidden.chunks_exact(width));
        for (to, (embedded, hidden)) in joined.chunks_exact_mut(2 * width).zip(halves) {
            let (first, second) = to.split_at_mut(width);
            rms_norm(embedded, &self.block.token_norm, config.rms_eps, first);
            rms_norm(hidden, &self.block.hidden_norm, config.rms_eps, second);
        }
        let x = fit(&mut self.residual, rows * width);
        matmul(&self.block.projection, joined, x);
        self.rope.prepare(self.len, rows);
        laps.lap(Component::Embedding);
        // The block's experts are never clamped.
        let limits = Limits::default();
        let place = Place { config, rope: &self.rope, module: Module::Draft, layer: config.layers, limits, planned: None };
        let norm = (&*self.block.final_norm, "the draft module's final_layernorm");
        let run = if rows == 0 { Ok(()) } else { place.forward(&self.block.layer, &mut self.state, x, tap, &mut self.scratch) };
        let mut laps = Laps::start(tap, Module::Draft, None);
        let result = run.and_then(|()| self.output.run(config, self.weights, norm, x, logits, &mut laps));
        match &result {
            Ok(_) => self.len += rows,
            Err(_) => self.state.truncate(self.len, 0),
        }
        result
    }

    /// Keeps the first `len` rows.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.state.truncate(self.len, 0);
    }
}
