//! One timeline of the target model: passes, commits and exact rollback.
//!
//! ```text
//! forward(rows)   rows become pending: attention caches and recurrent states have run ahead
//! commit(n)       the first n pending rows become part of the timeline, the others never were
//! ```
//!
//! A row's logits, hidden row, routes and effect on the state have the same bits however the tokens were
//! cut into passes, and however many rejected rows came between. Memory per pending row is the KDA
//! layers' ingredients (see [`super::kda`]): cut a long prompt into chunks.

use super::config::ModelConfig;
use super::error::EngineError;
use super::laps::Laps;
use super::layer::{LayerScratch, LayerState, Place, damaged_row};
use super::matmul::matmul;
use super::moe::{Limits, Planned};
use super::norm::{all_finite, rms_norm_rows};
use super::rope::Rope;
use super::routing_plan::RoutingPlan;
use super::scratch::fit;
use super::tap::ForwardTap;
use super::weights::ModelWeights;
use crate::trace::{Component, Module};

/// Which rows of a pass get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// Every row.
    All,
    /// The last one.
    Last,
    /// None.
    None,
}

/// The results of a pass, in buffers of the session that made it.
#[derive(Debug, Clone, Copy)]
pub struct Forward<'a> {
    /// `[n, vocab]`, n as asked for by [`LogitRows`].
    pub logits: &'a [f32],
    /// `[rows, H]`, after the final norm.
    pub hidden: &'a [f32],
    /// Vocabulary size.
    pub vocab: usize,
    /// H.
    pub width: usize,
}

impl<'a> Forward<'a> {
    /// Row `n` of the logits.
    pub fn logits_row(&self, n: usize) -> &'a [f32] {
        &self.logits[n * self.vocab..][..self.vocab]
    }

    /// Row `n` of the hidden rows.
    pub fn hidden_row(&self, n: usize) -> &'a [f32] {
        &self.hidden[n * self.width..][..self.width]
    }
}

/// One timeline of a model.
#[derive(Debug)]
pub struct Session<'m> {
    config: &'m ModelConfig,
    weights: &'m ModelWeights,
    plan: Option<RoutingPlan>,
    states: Vec<LayerState>,
    committed: usize,
    pending: usize,
    rope: Rope,
    scratch: LayerScratch,
    residual: Vec<f32>,
    output: Output,
}

/// A pass's last two steps, shared with the draft module.
#[derive(Debug, Default)]
pub(super) struct Output {
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl Output {
    /// The final norm and the head over the residual rows `x`.
    pub fn run<'a>(
        &'a mut self,
        config: &ModelConfig,
        weights: &ModelWeights,
        (norm, norm_name): (&[f32], &str),
        x: &[f32],
        wanted: LogitRows,
        laps: &mut Laps<'_>,
    ) -> Result<Forward<'a>, EngineError> {
        let hidden = fit(&mut self.hidden, x.len());
        rms_norm_rows(x, norm, config.rms_eps, hidden);
        if !all_finite(hidden) {
            return Err(EngineError::NotFinite { what: format!("output of {norm_name}") });
        }
        laps.lap(Component::Norm);
        let rows = x.len() / config.hidden;
        let first = match wanted {
            LogitRows::All => 0,
            LogitRows::Last => rows.saturating_sub(1),
            LogitRows::None => rows,
        };
        let logits = fit(&mut self.logits, (rows - first) * config.vocab);
        matmul(&weights.head, &hidden[first * config.hidden..], logits);
        if !all_finite(logits) {
            let row = damaged_row(&weights.head).map(|row| format!(" (lm_head.weight, row {row})"));
            return Err(EngineError::NotFinite { what: format!("logits{}", row.unwrap_or_default()) });
        }
        if !logits.is_empty() {
            laps.lap(Component::Head);
        }
        Ok(Forward { logits, hidden, vocab: config.vocab, width: config.hidden })
    }
}

/// Looks up the embeddings of `tokens` into `out`, row `n` at `out[n * H]`.
pub(super) fn embed(config: &ModelConfig, weights: &ModelWeights, tokens: &[u32], out: &mut [f32]) -> Result<(), EngineError> {
    for (token, row) in tokens.iter().zip(out.chunks_exact_mut(config.hidden)) {
        let id = usize::try_from(*token).ok().filter(|id| *id < config.vocab);
        let Some(id) = id else {
            return Err(EngineError::Request(format!("token id {token} is not below the vocabulary size {}", config.vocab)));
        };
        weights.embedding.decode_row(id, row);
        if !all_finite(row) {
            return Err(EngineError::NotFinite { what: format!("model.word_embeddings.weight, row {id}") });
        }
    }
    Ok(())
}

impl<'m> Session<'m> {
    /// A timeline without tokens. `weights` must be those loaded with `config`.
    pub fn new(config: &'m ModelConfig, weights: &'m ModelWeights) -> Self {
        Self {
            config,
            weights,
            plan: None,
            states: weights.layers.iter().map(|w| LayerState::new(w, config)).collect(),
            committed: 0,
            pending: 0,
            rope: Rope::new(config.qk_rope_head_dim, config.rope_theta),
            scratch: LayerScratch::default(),
            residual: Vec::new(),
            output: Output::default(),
        }
    }

    /// Chooses experts by a plan instead of the routers from here on, or by the routers again.
    pub fn route_by(&mut self, plan: Option<RoutingPlan>) {
        self.plan = plan;
    }

    /// Forgets every token, as if it were new.
    pub fn clear(&mut self) {
        let plan = self.plan.take();
        *self = Self::new(self.config, self.weights);
        self.plan = plan;
    }

    /// Committed tokens.
    pub fn len(&self) -> usize {
        self.committed
    }

    /// Whether no token is committed.
    pub fn is_empty(&self) -> bool {
        self.committed == 0
    }

    /// Rows that wait for [`Session::commit`].
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Runs `tokens` after the committed and pending ones; they become pending.
    ///
    /// # Errors
    /// [`EngineError::Request`] when a token is not in the vocabulary or the context is full, and
    /// [`EngineError::NotFinite`] with the first layer and tensor; the timeline is then as before the call.
    pub fn forward(&mut self, tokens: &[u32], logits: LogitRows, tap: &mut dyn ForwardTap) -> Result<Forward<'_>, EngineError> {
        self.pass(tokens, tap)?;
        let before = self.pending;
        self.pending += tokens.len();
        let rows = &self.residual[..tokens.len() * self.config.hidden];
        let mut laps = Laps::start(tap, Module::Target, None);
        let norm = (&*self.weights.final_norm, "model.norm");
        let result = self.output.run(self.config, self.weights, norm, rows, logits, &mut laps);
        if result.is_err() {
            for state in &mut self.states {
                state.truncate(self.committed, before);
            }
            self.pending = before;
        }
        result
    }

    /// Embedding and layers; leaves the residual rows.
    fn pass(&mut self, tokens: &[u32], tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let config = self.config;
        let first = self.committed + self.pending;
        if tokens.len() > config.max_position.saturating_sub(first) {
            return Err(EngineError::Request(format!(
                "{} tokens after {first} exceed the model's context of {}",
                tokens.len(),
                config.max_position
            )));
        }
        let x = fit(&mut self.residual, tokens.len() * config.hidden);
        let mut laps = Laps::start(tap, Module::Target, None);
        embed(config, self.weights, tokens, x)?;
        if tokens.is_empty() {
            return Ok(());
        }
        self.rope.prepare(first, tokens.len());
        laps.lap(Component::Embedding);
        for (layer, (w, state)) in self.weights.layers.iter().zip(&mut self.states).enumerate() {
            let limit = |list: &[f32]| list.get(layer).copied().unwrap_or(0.0);
            let limits = Limits { expert: limit(&config.expert_limits), shared: limit(&config.shared_limits) };
            let planned = self.plan.as_ref().map(|plan| Planned { plan, layer, first });
            let place = Place { config, rope: &self.rope, module: Module::Target, layer, limits, planned };
            if let Err(error) = place.forward(w, state, x, tap, &mut self.scratch) {
                for state in &mut self.states[..=layer] {
                    state.truncate(self.committed, self.pending);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Commits the first `rows` pending rows (all when there are fewer) and rolls the others back.
    pub fn commit(&mut self, rows: usize) {
        let rows = rows.min(self.pending);
        for state in &mut self.states {
            state.commit(self.committed, rows);
        }
        self.committed += rows;
        self.pending = 0;
    }

    /// Runs and commits `tokens` in passes of at most `chunk` rows. The result has the logits of the last
    /// row and the hidden rows of the last pass. Rows that were pending are committed too.
    ///
    /// # Errors
    /// As [`Session::forward`]; the passes before the failing one stay committed.
    pub fn prefill(&mut self, tokens: &[u32], chunk: usize, tap: &mut dyn ForwardTap) -> Result<Forward<'_>, EngineError> {
        let chunk = chunk.max(1);
        let last = tokens.len().saturating_sub(1) / chunk * chunk;
        for part in tokens[..last].chunks(chunk) {
            self.forward(part, LogitRows::None, tap)?;
            self.commit(usize::MAX);
        }
        let rows = tokens.len() - last;
        self.forward(&tokens[last..], LogitRows::Last, tap)?;
        self.commit(usize::MAX);
        let (vocab, width) = (self.config.vocab, self.config.hidden);
        let n = rows.min(1);
        Ok(Forward { logits: &self.output.logits[..n * vocab], hidden: &self.output.hidden[..rows * width], vocab, width })
    }

    /// The recurrent state of a KDA layer after the committed tokens, `[heads, K, V]`.
    pub fn kda_state(&self, layer: usize) -> Option<&[f32]> {
        match self.states.get(layer)? {
            LayerState::Kda(state) => Some(state.state()),
            LayerState::Mla(_) => None,
        }
    }

    /// The last `conv_kernel - 1` committed rows of a KDA layer's q, k, v before the convolution,
    /// `[conv_kernel - 1, 3 * heads * head_dim]`, oldest first.
    pub fn conv_state(&self, layer: usize) -> Option<&[f32]> {
        match self.states.get(layer)? {
            LayerState::Kda(state) => Some(state.history()),
            LayerState::Mla(_) => None,
        }
    }

    /// The committed cache rows of an MLA layer, `[len, kv_lora_rank + qk_rope_head_dim]`: latent after its
    /// norm, then the rotated key.
    pub fn mla_cache(&self, layer: usize) -> Option<&[f32]> {
        match self.states.get(layer)? {
            LayerState::Kda(_) => None,
            LayerState::Mla(cache) => {
                let width = self.config.kv_lora_rank + self.config.qk_rope_head_dim;
                cache.rows().get(..self.committed * width)
            }
        }
    }
}
