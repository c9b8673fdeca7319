//! One decoder layer over the rows of a pass: attention and feed-forward part, each after a norm and added
//! to the residual stream.

use super::config::ModelConfig;
use super::error::EngineError;
use super::kda::{KdaScratch, KdaState};
use super::laps::Laps;
use super::matrix::Matrix;
use super::mla::{MlaCache, MlaScratch};
use super::moe::{self, Limits, MoeScratch, Planned};
use super::norm::{Damage, check, rms_norm_rows};
use super::rope::Rope;
use super::scratch::fit;
use super::tap::ForwardTap;
use super::weights::{Attention, LayerWeights, Mlp};
use crate::trace::{Component, Module};

/// What a layer remembers of the tokens before.
#[derive(Debug)]
pub(super) enum LayerState {
    Kda(KdaState),
    Mla(MlaCache),
}

impl LayerState {
    /// The state before the first token.
    pub fn new(weights: &LayerWeights, config: &ModelConfig) -> Self {
        match weights.attention {
            Attention::Kda(_) => Self::Kda(KdaState::new(config)),
            Attention::Mla(_) => Self::Mla(MlaCache::new(config)),
        }
    }

    /// Keeps `committed` tokens and the first `pending` rows after them.
    pub fn truncate(&mut self, committed: usize, pending: usize) {
        match self {
            Self::Kda(state) => state.truncate(pending),
            Self::Mla(cache) => cache.truncate(committed + pending),
        }
    }

    /// Keeps `committed` tokens and commits the first `pending` rows after them.
    pub fn commit(&mut self, committed: usize, pending: usize) {
        match self {
            Self::Kda(state) => state.commit(pending),
            Self::Mla(cache) => cache.truncate(committed + pending),
        }
    }
}

/// Intermediate rows of a pass.
#[derive(Debug, Default)]
pub(super) struct LayerScratch {
    normed: Vec<f32>,
    branch: Vec<f32>,
    kda: KdaScratch,
    mla: MlaScratch,
    moe: MoeScratch,
}

/// A layer's place in the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub config: &'a ModelConfig,
    pub rope: &'a Rope,
    pub module: Module,
    /// As numbered in the checkpoint.
    pub layer: usize,
    pub limits: Limits,
    pub planned: Option<Planned<'a>>,
}

impl Place<'_> {
    /// Runs the rows of the residual stream `x`, `[rows, H]`, through the layer, in place.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`]; `state` then holds rows that the caller must truncate.
    pub fn forward(
        &self,
        w: &LayerWeights,
        state: &mut LayerState,
        x: &mut [f32],
        tap: &mut dyn ForwardTap,
        s: &mut LayerScratch,
    ) -> Result<(), EngineError> {
        let config = self.config;
        let mut laps = Laps::start(tap, self.module, Some(self.layer));
        let normed = fit(&mut s.normed, x.len());
        let branch = fit(&mut s.branch, x.len());
        rms_norm_rows(x, &w.input_norm, config.rms_eps, normed);
        laps.lap(Component::Norm);
        let attended = match (&w.attention, state) {
            (Attention::Kda(w), LayerState::Kda(state)) => state.forward(w, config, normed, branch, &mut s.kda),
            (Attention::Mla(w), LayerState::Mla(cache)) => cache.forward(w, config, self.rope, normed, branch, &mut s.mla),
            _ => return Err(EngineError::Request(format!("layer {}: the session belongs to another model", self.layer))),
        };
        attended.and_then(|()| check(branch, "output")).map_err(|d| self.damaged("attention", d, w))?;
        add(x, branch);
        laps.lap(match w.attention {
            Attention::Kda(_) => Component::Kda,
            Attention::Mla(_) => Component::Mla,
        });
        laps.tap.after_attention(self.module, self.layer, x);

        rms_norm_rows(x, &w.post_norm, config.rms_eps, normed);
        laps.lap(Component::Norm);
        match &w.mlp {
            Mlp::Dense(mlp) => {
                moe::dense(mlp, normed, branch, &mut s.moe).map_err(|d| self.damaged("mlp", d, w))?;
                laps.lap(Component::Dense);
            }
            Mlp::Moe(moe) => {
                let io = (&*normed, &mut *branch);
                let chosen =
                    moe::moe(moe, config, self.limits, self.planned, io, &mut s.moe, &mut laps).map_err(|d| self.damaged("mlp", d, w))?;
                let weights = if laps.tap.wants_weights() { chosen.weights } else { &[] };
                laps.tap.routed(self.module, self.layer, chosen.ids, weights);
            }
        }
        check(branch, "output").map_err(|d| self.damaged("mlp", d, w))?;
        add(x, branch);
        laps.tap.after_layer(self.module, self.layer, x);
        Ok(())
    }

    /// The error for a number that is not finite, with the weight that is to blame when one is.
    fn damaged(&self, part: &str, damage: Damage, w: &LayerWeights) -> EngineError {
        let mut what = format!("layer {}, {part}: {}", self.layer, damage.0);
        let found = if part == "attention" { damaged_attention(&w.attention) } else { damaged_mlp(&w.mlp) };
        if let Some((name, row)) = found {
            what = format!("{what} (model.layers.{}.{part}.{name}.weight, row {row})", self.layer);
        }
        EngineError::NotFinite { what }
    }
}

fn add(x: &mut [f32], branch: &[f32]) {
    for (x, b) in x.iter_mut().zip(branch) {
        *x += *b;
    }
}

/// The first row of `matrix` with a number that is not finite.
pub(super) fn damaged_row(matrix: &Matrix) -> Option<usize> {
    let mut row = vec![0.0; matrix.cols()];
    (0..matrix.rows()).find(|&r| {
        matrix.decode_row(r, &mut row);
        check(&row, "").is_err()
    })
}

fn damaged_attention(attention: &Attention) -> Option<(String, usize)> {
    use super::weights::MlaQuery;
    let named: Vec<(&str, &Matrix)> = match attention {
        Attention::Kda(w) => {
            vec![
                ("q_proj", &w.q),
                ("k_proj", &w.k),
                ("v_proj", &w.v),
                ("f_proj", &w.f),
                ("g_proj", &w.g),
                ("b_proj", &w.b),
                ("o_proj", &w.out),
            ]
        }
        Attention::Mla(w) => {
            let mut named = match &w.query {
                MlaQuery::Full(q) => vec![("q_proj", q)],
                MlaQuery::LowRank { a, b, .. } => vec![("q_a_proj", a), ("q_b_proj", b)],
            };
            named.extend([("kv_a_proj_with_mqa", &w.kv_a), ("kv_b_proj", &w.kv_b), ("g_proj", &w.gate), ("dense", &w.out)]);
            named
        }
    };
    named.into_iter().find_map(|(name, m)| Some((name.to_owned(), damaged_row(m)?)))
}

fn damaged_mlp(mlp: &Mlp) -> Option<(String, usize)> {
    let gated = |prefix: &str, m: &super::weights::GatedMlp| {
        let named = [("gate_proj", &m.gate), ("up_proj", &m.up), ("down_proj", &m.down)];
        named.into_iter().find_map(|(name, m)| Some((format!("{prefix}{name}"), damaged_row(m)?)))
    };
    match mlp {
        Mlp::Dense(m) => gated("", m),
        Mlp::Moe(m) => damaged_row(&m.router)
            .map(|row| ("gate".to_owned(), row))
            .or_else(|| gated("shared_experts.", &m.shared))
            .or_else(|| m.experts.iter().enumerate().find_map(|(e, m)| gated(&format!("experts.{e}."), m))),
    }
}
