//! The one place that knows the checkpoint's tensor names: names to roles, in the order of the model.
//!
//! [`walk`] asks a [`TensorSource`] for every tensor. A checkpoint gives weights, a preset only counts.
//! All matrices are `[outputs, inputs]`, row-major; there are no biases.

use super::config::{AttentionKind, ModelConfig};
use super::error::EngineError;
use super::matrix::Matrix;
use super::weights::{Attention, GatedMlp, KdaWeights, LayerWeights, MlaQuery, MlaWeights, Mlp, ModelWeights, MoeWeights, MtpWeights};

/// The part of the model that a tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Token embedding.
    Embedding,
    /// Output head.
    Head,
    /// Kimi Delta Attention: projections, convolutions, gates, output norm.
    Kda,
    /// Multi-head latent attention with its inner norms.
    Mla,
    /// MLPs of dense layers.
    Dense,
    /// Router matrices.
    Router,
    /// Biases that routers add for selection.
    RouterBias,
    /// Routed experts.
    RoutedExperts,
    /// Shared experts.
    SharedExperts,
    /// Norms of the residual stream.
    Norms,
    /// The MTP block's projection of (embedding, hidden), or a DSpark drafter's of the tapped layers.
    DraftProjection,
    /// Attention of a DSpark drafter, with its inner norms.
    DraftAttention,
    /// What a token says about the next one, in a DSpark drafter.
    MarkovHead,
    /// How sure a DSpark drafter is of a draft.
    ConfidenceHead,
}

impl Component {
    /// The word for it in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::Kda => "kda",
            Self::Mla => "mla",
            Self::Dense => "dense_mlp",
            Self::Router => "router",
            Self::RouterBias => "router_bias",
            Self::RoutedExperts => "routed_experts",
            Self::SharedExperts => "shared_experts",
            Self::Norms => "norms",
            Self::DraftProjection => "projection",
            Self::DraftAttention => "attention",
            Self::MarkovHead => "markov_head",
            Self::ConfidenceHead => "confidence_head",
        }
    }
}

/// A tensor's name and place.
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    /// Safetensors name without quantisation suffixes, `...weight` for matrices.
    pub name: &'a str,
    /// What it belongs to.
    pub component: Component,
    /// Whether it is the MTP block's.
    pub draft: bool,
}

/// Something that has, or pretends to have, the tensors of a model.
pub trait TensorSource {
    /// The `[rows, cols]` matrix of a slot, in whatever format it is stored.
    ///
    /// # Errors
    /// To end the walk.
    fn matrix(&mut self, slot: Slot<'_>, rows: usize, cols: usize) -> Result<Matrix, EngineError>;

    /// The small tensor of a slot, decoded; sizes of 1 in `shape` may be absent or added in the file.
    ///
    /// # Errors
    /// To end the walk.
    fn vector(&mut self, slot: Slot<'_>, shape: &[usize]) -> Result<Vec<f32>, EngineError>;
}

/// Collects a model from a source, tensor by tensor.
///
/// # Errors
/// The first that the source gives.
pub fn walk(config: &ModelConfig, source: &mut dyn TensorSource) -> Result<ModelWeights, EngineError> {
    let mut walk = Walk { config, source, draft: false };
    let embedding = walk.matrix("model.word_embeddings.weight", Component::Embedding, config.vocab, config.hidden)?;
    let layers = (0..config.layers).map(|layer| walk.layer(layer)).collect::<Result<_, _>>()?;
    let final_norm = walk.norm("model.norm.weight")?;
    let head = walk.matrix("lm_head.weight", Component::Head, config.vocab, config.hidden)?;
    let mtp = if config.mtp_layers > 0 { Some(walk.mtp()?) } else { None };
    Ok(ModelWeights { embedding, final_norm, head, layers, mtp })
}

struct Walk<'a> {
    config: &'a ModelConfig,
    source: &'a mut dyn TensorSource,
    draft: bool,
}

impl Walk<'_> {
    fn matrix(&mut self, name: &str, component: Component, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
        self.source.matrix(Slot { name, component, draft: self.draft }, rows, cols)
    }

    fn vector(&mut self, name: &str, component: Component, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        self.source.vector(Slot { name, component, draft: self.draft }, shape)
    }

    fn norm(&mut self, name: &str) -> Result<Vec<f32>, EngineError> {
        self.vector(name, Component::Norms, &[self.config.hidden])
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights, EngineError> {
        let p = format!("model.layers.{layer}");
        let kind = self.config.attention(layer);
        let input_norm = self.norm(&format!("{p}.input_layernorm.weight"))?;
        let attention = self.attention(&format!("{p}.attention"), kind)?;
        let post_norm = self.norm(&format!("{p}.post_attention_layernorm.weight"))?;
        let mlp = if self.config.is_dense(layer) {
            Mlp::Dense(self.gated(&format!("{p}.mlp"), Component::Dense, self.config.dense_inter)?)
        } else {
            Mlp::Moe(self.moe(&format!("{p}.mlp"))?)
        };
        Ok(LayerWeights { input_norm, post_norm, attention, mlp })
    }

    fn attention(&mut self, a: &str, kind: AttentionKind) -> Result<Attention, EngineError> {
        match kind {
            AttentionKind::Kda => self.kda(a).map(Attention::Kda),
            AttentionKind::Mla => self.mla(a).map(Attention::Mla),
        }
    }

    fn kda(&mut self, a: &str) -> Result<KdaWeights, EngineError> {
        let ModelConfig { hidden, heads, head_dim, conv_kernel, .. } = *self.config;
        let width = heads * head_dim;
        let c = Component::Kda;
        let mut projection = |name: &str| self.matrix(&format!("{a}.{name}.weight"), c, width, hidden);
        let (q, k, v) = (projection("q_proj")?, projection("k_proj")?, projection("v_proj")?);
        let (f, g) = (projection("f_proj")?, projection("g_proj")?);
        let b = self.matrix(&format!("{a}.b_proj.weight"), c, heads, hidden)?;
        let mut conv = |name: &str| self.vector(&format!("{a}.{name}.weight"), c, &[width, 1, conv_kernel]);
        let (q_conv, k_conv, v_conv) = (conv("q_conv1d")?, conv("k_conv1d")?, conv("v_conv1d")?);
        // These two have no `.weight`.
        let mut decay_scale = self.vector(&format!("{a}.A_log"), c, &[heads])?;
        decay_scale.iter_mut().for_each(|a| *a = a.exp());
        let dt_bias = self.vector(&format!("{a}.dt_bias"), c, &[width])?;
        let out_norm = self.vector(&format!("{a}.o_norm.weight"), c, &[head_dim])?;
        let out = self.matrix(&format!("{a}.o_proj.weight"), c, hidden, width)?;
        Ok(KdaWeights { q, k, v, f, g, b, q_conv, k_conv, v_conv, decay_scale, dt_bias, out_norm, out })
    }

    fn mla(&mut self, a: &str) -> Result<MlaWeights, EngineError> {
        let config = self.config;
        let ModelConfig { hidden, heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } = *config;
        let c = Component::Mla;
        let queries = heads * config.qk_head_dim();
        let query = match config.q_lora_rank {
            None => MlaQuery::Full(self.matrix(&format!("{a}.q_proj.weight"), c, queries, hidden)?),
            Some(rank) => MlaQuery::LowRank {
                a: self.matrix(&format!("{a}.q_a_proj.weight"), c, rank, hidden)?,
                norm: self.vector(&format!("{a}.q_a_layernorm.weight"), c, &[rank])?,
                b: self.matrix(&format!("{a}.q_b_proj.weight"), c, queries, rank)?,
            },
        };
        Ok(MlaWeights {
            query,
            kv_a: self.matrix(&format!("{a}.kv_a_proj_with_mqa.weight"), c, kv_lora_rank + qk_rope_head_dim, hidden)?,
            kv_norm: self.vector(&format!("{a}.kv_a_layernorm.weight"), c, &[kv_lora_rank])?,
            kv_b: self.matrix(&format!("{a}.kv_b_proj.weight"), c, heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)?,
            gate: self.matrix(&format!("{a}.g_proj.weight"), c, config.mla_gate_rows(), hidden)?,
            out: self.matrix(&format!("{a}.dense.weight"), c, hidden, heads * v_head_dim)?,
        })
    }

    fn gated(&mut self, m: &str, component: Component, inter: usize) -> Result<GatedMlp, EngineError> {
        let hidden = self.config.hidden;
        Ok(GatedMlp {
            gate: self.matrix(&format!("{m}.gate_proj.weight"), component, inter, hidden)?,
            up: self.matrix(&format!("{m}.up_proj.weight"), component, inter, hidden)?,
            down: self.matrix(&format!("{m}.down_proj.weight"), component, hidden, inter)?,
        })
    }

    fn moe(&mut self, m: &str) -> Result<MoeWeights, EngineError> {
        let ModelConfig { hidden, experts, expert_inter, shared_inter, router_bias, .. } = *self.config;
        let router = self.matrix(&format!("{m}.gate.weight"), Component::Router, experts, hidden)?;
        let bias = if router_bias {
            self.vector(&format!("{m}.gate.expert_bias"), Component::RouterBias, &[experts])?
        } else {
            vec![0.0; experts]
        };
        let expert = |e: usize| format!("{m}.experts.{e}");
        let experts = (0..experts).map(|e| self.gated(&expert(e), Component::RoutedExperts, expert_inter)).collect::<Result<_, _>>()?;
        let shared = self.gated(&format!("{m}.shared_experts"), Component::SharedExperts, shared_inter)?;
        Ok(MoeWeights { router, bias, experts, shared })
    }

    /// The MTP block, stored as the layer after the last one: MLA and experts, without embedding and head of its own.
    fn mtp(&mut self) -> Result<MtpWeights, EngineError> {
        self.draft = true;
        let hidden = self.config.hidden;
        let p = format!("model.layers.{}", self.config.layers);
        let token_norm = self.norm(&format!("{p}.enorm.weight"))?;
        let hidden_norm = self.norm(&format!("{p}.hnorm.weight"))?;
        let projection = self.matrix(&format!("{p}.eh_proj.weight"), Component::DraftProjection, hidden, 2 * hidden)?;
        let input_norm = self.norm(&format!("{p}.input_layernorm.weight"))?;
        let attention = self.attention(&format!("{p}.attention"), AttentionKind::Mla)?;
        let post_norm = self.norm(&format!("{p}.post_attention_layernorm.weight"))?;
        let mlp = Mlp::Moe(self.moe(&format!("{p}.mlp"))?);
        let final_norm = self.norm(&format!("{p}.final_layernorm.weight"))?;
        self.draft = false;
        Ok(MtpWeights { token_norm, hidden_norm, projection, layer: LayerWeights { input_norm, post_norm, attention, mlp }, final_norm })
    }
}
