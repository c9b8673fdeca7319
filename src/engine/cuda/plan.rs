//! What a run needs of the device's memory, counted before anything is loaded.

use super::long::longest_pass;
use super::matrix::planned_bytes;
use super::workspace;
use super::{PASS_ROWS, block_space, block_weights, choose, drafted, planned, upload};
use crate::engine::dspark::DsparkCheckpoint;
use crate::engine::matrix::Matrix;
use crate::engine::sampling::Sampling;
use crate::engine::weights::{Attention, GatedMlp, LayerWeights, MlaQuery, Mlp, ModelWeights};
use crate::engine::{EngineError, ModelConfig};
use crate::metric::Unit;
use std::fmt;

/// Bytes by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights in their stored format, scales of FP8 widened to F32, vectors in F32.
    pub weights: usize,
    /// Latent caches for `tokens` tokens, the draft module's among them.
    pub caches: usize,
    /// Recurrent states, their staged rows and convolution inputs.
    pub states: usize,
    /// Rows of a pass, of the target and of the draft module.
    pub workspace: usize,
    /// Page-locked memory of the host, which is none of the device's: what copies of passes run to and from.
    pub pinned: usize,
    /// Tokens that the caches have room for.
    pub tokens: usize,
}

impl MemoryPlan {
    /// The plan for timelines of up to `tokens` tokens, with the draft module or without.
    ///
    /// # Errors
    /// When a matrix is stored in a way that no kernel reads.
    pub fn new(config: &ModelConfig, weights: &ModelWeights, tokens: usize, draft: bool) -> Result<Self, EngineError> {
        let mut bytes = matrices("embeddings and head", &[&weights.embedding, &weights.head])? + weights.final_norm.len() * 4;
        for (i, w) in weights.layers.iter().enumerate() {
            bytes += layer_bytes(&format!("layer {i}"), w)?;
        }
        if let Some(w) = &weights.mtp {
            bytes += matrices("draft module", &[&w.projection])? + layer_bytes("draft module", &w.layer)? + 3 * config.hidden * 4;
        }
        let is_mla = |w: &&LayerWeights| matches!(w.attention, Attention::Mla(_));
        let mla = weights.layers.iter().filter(is_mla).count();
        let kda = weights.layers.len() - mla;
        let cached = config.kv_lora_rank + config.qk_rope_head_dim;
        let routed = weights.layers.iter().filter(|l| matches!(l.mlp, Mlp::Moe(_))).count();
        let experts = planned::planned_bytes(routed, config.experts_per_token, tokens);
        // Rows that wait for the draft module.
        let waiting = if draft { 2 * PASS_ROWS * config.hidden * 4 } else { 0 };
        let (mut workspace, mut pinned) = (experts + waiting, experts);
        // Rows of windows, and of long passes where there can be any.
        for rows in std::iter::once(PASS_ROWS).chain(longest_pass(tokens)) {
            workspace += workspace::planned_bytes(config, (rows, routed), tokens, true);
            pinned += workspace::planned_pinned(config, (rows, routed));
            if draft {
                let own = (rows, if rows == PASS_ROWS { drafted::MOST } else { 1 });
                workspace += workspace::planned_bytes(config, own, tokens, false);
                pinned += workspace::planned_pinned(config, own);
            }
        }
        Ok(Self {
            weights: bytes,
            caches: (mla + usize::from(draft)) * tokens * cached * 4,
            states: kda * super::state::kda_floats(config) * 4,
            workspace,
            pinned,
            tokens,
        })
    }

    /// The plan with a target that chooses by itself, by windows that are `drafted` on the device or come from the host.
    pub fn choosing(self, config: &ModelConfig, sampling: Sampling, drafted: bool) -> Self {
        let staged = if drafted { drafted::BYTES } else { 0 };
        Self { workspace: self.workspace + choose::planned_bytes(config, sampling, drafted), pinned: self.pinned + staged, ..self }
    }

    /// The plan with an external drafter beside the target.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`].
    pub fn with_drafter(self, drafter: &DsparkCheckpoint) -> Result<Self, EngineError> {
        let own = block_weights::planned(&drafter.config, &drafter.weights, self.tokens)?;
        // The target's tapped rows leave its passes.
        let longest = longest_pass(self.tokens).unwrap_or(PASS_ROWS);
        let tapped = drafter.config.taps.len() * longest * drafter.config.hidden * 4;
        Ok(Self {
            weights: self.weights + own.weights,
            caches: self.caches + own.caches,
            workspace: self.workspace + own.workspace + tapped,
            pinned: self.pinned + tapped + block_space::TOLD_BYTES,
            ..self
        })
    }

    /// All of the device's.
    pub fn total(&self) -> usize {
        self.weights + self.caches + self.states + self.workspace
    }

    /// All page-locked memory of the host: that of passes, and what weights go through on their way to the device.
    pub fn page_locked(&self) -> usize {
        self.pinned + upload::planned_bytes(self.weights)
    }

    /// Refuses a plan that `free` bytes do not hold.
    ///
    /// # Errors
    /// [`EngineError::Device`] with the numbers.
    pub fn check(&self, free: usize) -> Result<(), EngineError> {
        if self.total() <= free {
            return Ok(());
        }
        let free = Unit::Bytes.show(free as f64);
        Err(EngineError::Device(format!(
            "CUDA: {self} do not fit into the {free} that are free; shorten the requests, take a smaller model or storage, or use \
             --backend cpu"
        )))
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |bytes: usize| Unit::Bytes.show(bytes as f64);
        write!(
            f,
            "{} of device memory (weights {}, caches of {} tokens {}, states {}, workspace {}; {} of page-locked host memory beside it)",
            show(self.total()),
            show(self.weights),
            self.tokens,
            show(self.caches),
            show(self.states),
            show(self.workspace),
            show(self.page_locked())
        )
    }
}

fn matrices(name: &str, all: &[&Matrix]) -> Result<usize, EngineError> {
    all.iter().map(|m| planned_bytes(name, m)).sum()
}

fn gated_bytes(name: &str, m: &GatedMlp) -> Result<usize, EngineError> {
    matrices(name, &[&m.gate, &m.up, &m.down])
}

fn layer_bytes(name: &str, w: &LayerWeights) -> Result<usize, EngineError> {
    let attention = match &w.attention {
        Attention::Kda(w) => {
            let vectors = [&w.q_conv, &w.k_conv, &w.v_conv, &w.decay_scale, &w.dt_bias, &w.out_norm];
            matrices(name, &[&w.q, &w.k, &w.v, &w.f, &w.g, &w.b, &w.out])? + vectors.iter().map(|v| v.len() * 4).sum::<usize>()
        }
        Attention::Mla(w) => {
            let query = match &w.query {
                MlaQuery::Full(q) => matrices(name, &[q])?,
                MlaQuery::LowRank { a, norm, b } => matrices(name, &[a, b])? + norm.len() * 4,
            };
            query + matrices(name, &[&w.kv_a, &w.kv_b, &w.gate, &w.out])? + w.kv_norm.len() * 4
        }
    };
    let mlp = match &w.mlp {
        Mlp::Dense(m) => gated_bytes(name, m)?,
        Mlp::Moe(m) => {
            let experts: usize = m.experts.iter().map(|e| gated_bytes(name, e)).sum::<Result<_, _>>()?;
            matrices(name, &[&m.router])? + m.bias.len() * 4 + experts + gated_bytes(name, &m.shared)?
        }
    };
    Ok(attention + mlp + (w.input_norm.len() + w.post_norm.len()) * 4)
}
