//! A DSpark drafter's weights and the names that they are stored under. An optional prefix `model.` is gone by then.

use super::config::DsparkConfig;
use crate::engine::EngineError;
use crate::engine::matrix::Matrix;
use crate::engine::tensors::{Component, Slot, TensorSource};
use crate::engine::weights::GatedMlp;

/// Copies of the target's embedding and head that releases carry along: frozen in training, so that the target's own are used.
pub const FROZEN_COPIES: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

/// All weights of a drafter. Vectors are decoded to `f32` at load; matrices stay in their stored format.
#[derive(Debug)]
pub struct DsparkWeights {
    /// `fc.weight`, `[H, taps * H]`: taps in ascending order of layers.
    pub taps: Matrix,
    /// `hidden_norm.weight`, `[H]`.
    pub taps_norm: Vec<f32>,
    /// The layers.
    pub layers: Vec<DsparkLayer>,
    /// `norm.weight`, `[H]`.
    pub final_norm: Vec<f32>,
    /// The Markov head, when there is one.
    pub markov: Option<MarkovHead>,
    /// The confidence head, when there is one.
    pub confidence: Option<ConfidenceHead>,
}

/// One decoder layer.
#[derive(Debug)]
pub struct DsparkLayer {
    /// `input_layernorm.weight`, `[H]`; rows of the block only.
    pub input_norm: Vec<f32>,
    /// The attention.
    pub attention: BlockAttention,
    /// `post_attention_layernorm.weight`, `[H]`.
    pub post_norm: Vec<f32>,
    /// The MLP.
    pub mlp: GatedMlp,
}

/// Attention with norms of queries and keys.
#[derive(Debug)]
pub struct BlockAttention {
    /// `q_proj`, `[heads * head_dim, H]`.
    pub q: Matrix,
    /// `k_proj`, `[kv_heads * head_dim, H]`.
    pub k: Matrix,
    /// `v_proj`, `[kv_heads * head_dim, H]`.
    pub v: Matrix,
    /// `o_proj`, `[H, heads * head_dim]`.
    pub out: Matrix,
    /// `q_norm.weight`, `[head_dim]`.
    pub q_norm: Vec<f32>,
    /// `k_norm.weight`, `[head_dim]`.
    pub k_norm: Vec<f32>,
}

/// What a token says about the next one: `logits += next . of[token]`.
#[derive(Debug)]
pub struct MarkovHead {
    /// `markov_w1.weight`, `[vocab, rank]`: a token's embedding.
    pub of: Matrix,
    /// `markov_w2.weight`, `[vocab, rank]`.
    pub next: Matrix,
}

/// `sigmoid(proj . inputs + bias)`.
#[derive(Debug)]
pub struct ConfidenceHead {
    /// `proj.weight`, `[H + rank]`, or `[H]` without Markov features.
    pub proj: Vec<f32>,
    /// `proj.bias`.
    pub bias: f32,
}

/// Collects a drafter from a source, tensor by tensor; `confidence`: whether it has a confidence head.
///
/// # Errors
/// The first that the source gives.
pub fn walk(config: &DsparkConfig, confidence: bool, source: &mut dyn TensorSource) -> Result<DsparkWeights, EngineError> {
    let mut walk = Walk { config, source };
    let taps = walk.matrix("fc.weight", Component::DraftProjection, config.hidden, config.taps.len() * config.hidden)?;
    let taps_norm = walk.norm("hidden_norm.weight")?;
    let layers = (0..config.layers).map(|layer| walk.layer(layer)).collect::<Result<_, _>>()?;
    let final_norm = walk.norm("norm.weight")?;
    let markov = if config.markov_rank > 0 { Some(walk.markov()?) } else { None };
    let confidence = if confidence { Some(walk.confidence()?) } else { None };
    Ok(DsparkWeights { taps, taps_norm, layers, final_norm, markov, confidence })
}

struct Walk<'a> {
    config: &'a DsparkConfig,
    source: &'a mut dyn TensorSource,
}

impl Walk<'_> {
    fn matrix(&mut self, name: &str, component: Component, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
        self.source.matrix(Slot { name, component, draft: true }, rows, cols)
    }

    fn vector(&mut self, name: &str, component: Component, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        self.source.vector(Slot { name, component, draft: true }, shape)
    }

    fn norm(&mut self, name: &str) -> Result<Vec<f32>, EngineError> {
        self.vector(name, Component::Norms, &[self.config.hidden])
    }

    fn layer(&mut self, layer: usize) -> Result<DsparkLayer, EngineError> {
        let p = format!("layers.{layer}");
        let DsparkConfig { hidden, inter, .. } = *self.config;
        let mut mlp = |name: &str, rows, cols| self.matrix(&format!("{p}.mlp.{name}.weight"), Component::Dense, rows, cols);
        let mlp =
            GatedMlp { gate: mlp("gate_proj", inter, hidden)?, up: mlp("up_proj", inter, hidden)?, down: mlp("down_proj", hidden, inter)? };
        Ok(DsparkLayer {
            input_norm: self.norm(&format!("{p}.input_layernorm.weight"))?,
            attention: self.attention(&format!("{p}.self_attn"))?,
            post_norm: self.norm(&format!("{p}.post_attention_layernorm.weight"))?,
            mlp,
        })
    }

    fn attention(&mut self, a: &str) -> Result<BlockAttention, EngineError> {
        let (hidden, queries, keys) = (self.config.hidden, self.config.query_width(), self.config.kv_width());
        let c = Component::DraftAttention;
        let mut projection = |name: &str, rows, cols| self.matrix(&format!("{a}.{name}.weight"), c, rows, cols);
        let (q, k, v) = (projection("q_proj", queries, hidden)?, projection("k_proj", keys, hidden)?, projection("v_proj", keys, hidden)?);
        let out = projection("o_proj", hidden, queries)?;
        let size = [self.config.head_dim];
        let q_norm = self.vector(&format!("{a}.q_norm.weight"), c, &size)?;
        let k_norm = self.vector(&format!("{a}.k_norm.weight"), c, &size)?;
        Ok(BlockAttention { q, k, v, out, q_norm, k_norm })
    }

    fn markov(&mut self) -> Result<MarkovHead, EngineError> {
        let DsparkConfig { vocab, markov_rank, .. } = *self.config;
        let mut table = |name: &str| self.matrix(&format!("markov_head.{name}.weight"), Component::MarkovHead, vocab, markov_rank);
        Ok(MarkovHead { of: table("markov_w1")?, next: table("markov_w2")? })
    }

    fn confidence(&mut self) -> Result<ConfidenceHead, EngineError> {
        let inputs = self.config.confidence_inputs();
        let proj = self.vector("confidence_head.proj.weight", Component::ConfidenceHead, &[1, inputs])?;
        let bias = self.vector("confidence_head.proj.bias", Component::ConfidenceHead, &[1])?;
        // Without its tensor the load fails when it ends.
        Ok(ConfidenceHead { proj, bias: bias.first().copied().unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::inventory::{Amount, Inventory};
    use std::path::Path;

    /// Has every tensor that it is asked for, and counts.
    #[derive(Default)]
    struct Counting(Inventory, Vec<String>);

    impl Counting {
        fn count(&mut self, slot: Slot<'_>, parameters: usize) {
            self.1.push(slot.name.to_owned());
            self.0.count(slot, Amount { parameters: parameters as u64, bytes: 0, note_bytes: 0, tensors: 1 });
        }
    }

    impl TensorSource for Counting {
        fn matrix(&mut self, slot: Slot<'_>, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
            self.count(slot, rows * cols);
            Ok(Matrix::empty())
        }

        fn vector(&mut self, slot: Slot<'_>, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
            self.count(slot, shape.iter().product());
            Ok(Vec::new())
        }
    }

    #[test]
    fn the_released_drafter_has_its_published_parameters() {
        let json = serde_json::json!({
            "architectures": ["LingDSparkModel"], "num_hidden_layers": 5, "hidden_size": 2560, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 157_184, "rope_theta": 6e6,
            "block_size": 8, "mask_token_id": 156_900, "target_layer_ids": [1, 11, 23, 29, 35], "markov_rank": 256,
            "markov_head_type": "vanilla", "enable_confidence_head": true, "partial_rotary_factor": 0.5
        });
        let (config, _) = DsparkConfig::parse(Path::new("config.json"), json.to_string().as_bytes()).unwrap();
        let mut source = Counting::default();
        walk(&config, true, &mut source).unwrap();
        // All but the two frozen copies of 402 391 040.
        assert_eq!(source.0.total().parameters, 1_363_707_905 - 2 * 402_391_040);
        let draft = |component| source.0.draft_of(component).parameters;
        assert_eq!((draft(Component::DraftProjection), draft(Component::MarkovHead)), (32_768_000, 80_478_208));
        assert_eq!((draft(Component::ConfidenceHead), source.1.len()), (2817, 5 * 11 + 7));
    }
}
