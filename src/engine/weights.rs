//! The model's weights, by role rather than by checkpoint name.

use super::matrix::Matrix;

/// All weights of a model. Vectors are decoded to `f32` at load; matrices stay in their stored format.
#[derive(Debug)]
pub struct ModelWeights {
    /// `model.word_embeddings.weight`, `[vocab, H]`.
    pub embedding: Matrix,
    /// `model.norm.weight`, `[H]`.
    pub final_norm: Vec<f32>,
    /// `lm_head.weight`, `[vocab, H]`.
    pub head: Matrix,
    /// The target's layers.
    pub layers: Vec<LayerWeights>,
    /// The MTP block, when the checkpoint has one.
    pub mtp: Option<MtpWeights>,
}

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// `input_layernorm.weight`, `[H]`.
    pub input_norm: Vec<f32>,
    /// `post_attention_layernorm.weight`, `[H]`.
    pub post_norm: Vec<f32>,
    /// KDA or MLA.
    pub attention: Attention,
    /// Dense or MoE.
    pub mlp: Mlp,
}

/// A layer's attention.
#[derive(Debug)]
pub enum Attention {
    /// Kimi Delta Attention.
    Kda(KdaWeights),
    /// Gated multi-head latent attention.
    Mla(MlaWeights),
}

/// Kimi Delta Attention; P = heads x head_dim.
#[derive(Debug)]
pub struct KdaWeights {
    /// `q_proj`, `[P, H]`.
    pub q: Matrix,
    /// `k_proj`, `[P, H]`.
    pub k: Matrix,
    /// `v_proj`, `[P, H]`.
    pub v: Matrix,
    /// `f_proj` (decay gate), `[P, H]`.
    pub f: Matrix,
    /// `g_proj` (output gate), `[P, H]`.
    pub g: Matrix,
    /// `b_proj` (beta), `[heads, H]`.
    pub b: Matrix,
    /// `q_conv1d`, `[P, taps]`, oldest tap first.
    pub q_conv: Vec<f32>,
    /// `k_conv1d`.
    pub k_conv: Vec<f32>,
    /// `v_conv1d`.
    pub v_conv: Vec<f32>,
    /// `exp(A_log)`, `[heads]`.
    pub decay_scale: Vec<f32>,
    /// `dt_bias`, `[P]`.
    pub dt_bias: Vec<f32>,
    /// `o_norm.weight`, `[head_dim]`.
    pub out_norm: Vec<f32>,
    /// `o_proj`, `[H, P]`.
    pub out: Matrix,
}

/// MLA's query projection.
#[derive(Debug)]
pub enum MlaQuery {
    /// `q_proj`, `[heads * qk_head_dim, H]`.
    Full(Matrix),
    /// `q_a_proj`, `q_a_layernorm`, `q_b_proj`.
    LowRank {
        /// `[q_lora, H]`.
        a: Matrix,
        /// `[q_lora]`.
        norm: Vec<f32>,
        /// `[heads * qk_head_dim, q_lora]`.
        b: Matrix,
    },
}

/// Gated multi-head latent attention.
#[derive(Debug)]
pub struct MlaWeights {
    /// The query projection.
    pub query: MlaQuery,
    /// `kv_a_proj_with_mqa`, `[kv_lora + rope, H]`.
    pub kv_a: Matrix,
    /// `kv_a_layernorm.weight`, `[kv_lora]`.
    pub kv_norm: Vec<f32>,
    /// `kv_b_proj`, `[heads * (nope + v), kv_lora]`, per head nope rows then value rows.
    pub kv_b: Matrix,
    /// `g_proj`, `[heads, H]` or `[heads * v, H]`.
    pub gate: Matrix,
    /// `dense`, `[H, heads * v]`.
    pub out: Matrix,
}

/// A layer's feed-forward part.
#[derive(Debug)]
pub enum Mlp {
    /// One gated MLP.
    Dense(GatedMlp),
    /// Router, routed experts, shared expert.
    Moe(MoeWeights),
}

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct GatedMlp {
    /// `[inter, H]`.
    pub gate: Matrix,
    /// `[inter, H]`.
    pub up: Matrix,
    /// `[H, inter]`.
    pub down: Matrix,
}

/// Router and experts.
#[derive(Debug)]
pub struct MoeWeights {
    /// `gate.weight`, `[E, H]`.
    pub router: Matrix,
    /// `gate.expert_bias`, `[E]`; zeros when the config has none.
    pub bias: Vec<f32>,
    /// The routed experts.
    pub experts: Vec<GatedMlp>,
    /// The shared expert (all shared experts as one).
    pub shared: GatedMlp,
}

/// The multi-token-prediction block: a decoder layer fed by a token's embedding and a hidden state.
#[derive(Debug)]
pub struct MtpWeights {
    /// `enorm.weight`, `[H]`.
    pub token_norm: Vec<f32>,
    /// `hnorm.weight`, `[H]`.
    pub hidden_norm: Vec<f32>,
    /// `eh_proj`, `[H, 2H]`, embedding half first.
    pub projection: Matrix,
    /// The layer (MLA and MoE).
    pub layer: LayerWeights,
    /// `final_layernorm.weight`, `[H]`.
    pub final_norm: Vec<f32>,
}
