//! The shape of the model. [`super::config_read`] makes it from `config.json`.

/// Shape and constants of a BailingMoeV3 model. Sizes are numbers of elements.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// H.
    pub hidden: usize,
    /// Target layers.
    pub layers: usize,
    /// G: layer `i` is MLA when `(i+1) % G == 0` or `i >= (layers / G) * G`.
    pub layer_group: usize,
    /// Heads (KDA and MLA alike).
    pub heads: usize,
    /// KDA key and value size of a head.
    pub head_dim: usize,
    /// Rank of the low-rank query projection, `None` = full.
    pub q_lora_rank: Option<usize>,
    /// MLA latent size.
    pub kv_lora_rank: usize,
    /// MLA per-head size without position.
    pub qk_nope_head_dim: usize,
    /// MLA per-head size with position.
    pub qk_rope_head_dim: usize,
    /// MLA per-head value size.
    pub v_head_dim: usize,
    /// RoPE base.
    pub rope_theta: f64,
    /// First layers with a dense MLP.
    pub dense_layers: usize,
    /// Intermediate size of the dense MLP.
    pub dense_inter: usize,
    /// E.
    pub experts: usize,
    /// k.
    pub experts_per_token: usize,
    /// Shared experts.
    pub shared_experts: usize,
    /// Intermediate size of a routed expert.
    pub expert_inter: usize,
    /// Intermediate size of the shared expert (all of them together).
    pub shared_inter: usize,
    /// Expert groups.
    pub groups: usize,
    /// Groups kept per token.
    pub groups_kept: usize,
    /// Whether the router adds a bias to its scores when it selects.
    pub router_bias: bool,
    /// Factor on the normalised gate weights.
    pub routed_scaling: f32,
    /// Whether gate weights are normalised to sum 1 before scaling.
    pub norm_topk: bool,
    /// SwiGLU limit of the routed experts by layer, 0 = none. `[layers]`.
    pub expert_limits: Vec<f32>,
    /// SwiGLU limit of the shared expert by layer, 0 = none. `[layers]`.
    pub shared_limits: Vec<f32>,
    /// Taps of the short convolution.
    pub conv_kernel: usize,
    /// L of the decay gate, -5.
    pub kda_lower_bound: f32,
    /// Shape of MLA's output gate.
    pub mla_gate: MlaGate,
    /// Vocabulary rows.
    pub vocab: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// MTP blocks (0 or 1).
    pub mtp_layers: usize,
    /// End-of-sequence ids from config.json and generation_config.json.
    pub eos: Vec<u32>,
    /// Longest context.
    pub max_position: usize,
}

/// The kind of attention in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Kimi Delta Attention: a recurrent state per head.
    Kda,
    /// Multi-head latent attention: a cache row per token.
    Mla,
}

/// `gated_attention_proj_granularity_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlaGate {
    /// One gate per head.
    HeadWise,
    /// One gate per head and value channel.
    ElementWise,
}

impl ModelConfig {
    /// The kind of attention of a target layer.
    pub fn attention(&self, layer: usize) -> AttentionKind {
        let group = self.layer_group;
        if (layer + 1).is_multiple_of(group) || layer >= self.layers / group * group { AttentionKind::Mla } else { AttentionKind::Kda }
    }

    /// Whether a target layer has a dense MLP instead of experts.
    pub fn is_dense(&self, layer: usize) -> bool {
        layer < self.dense_layers
    }

    /// Width of q, k, v in KDA: heads x head_dim.
    pub fn kda_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Per-head query size of MLA: nope + rope.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Rows of MLA's output gate: one row per head, or per head and value channel.
    pub fn mla_gate_rows(&self) -> usize {
        match self.mla_gate {
            MlaGate::HeadWise => self.heads,
            MlaGate::ElementWise => self.heads * self.v_head_dim,
        }
    }

    /// Number of target layers with experts.
    pub fn moe_layers(&self) -> usize {
        self.layers.saturating_sub(self.dense_layers)
    }

    /// Number of target layers of a kind of attention.
    pub fn layers_of(&self, kind: AttentionKind) -> usize {
        (0..self.layers).filter(|&layer| self.attention(layer) == kind).count()
    }

    /// Number of safetensors entries of a checkpoint without quantisation.
    pub fn plain_tensors(&self) -> usize {
        let mla = 5 + if self.q_lora_rank.is_some() { 3 } else { 1 };
        let moe = 1 + usize::from(self.router_bias) + 3 * self.experts + 3;
        let attention = self.layers_of(AttentionKind::Kda) * 13 + self.layers_of(AttentionKind::Mla) * mla;
        let mlp = (self.layers - self.moe_layers()) * 3 + self.moe_layers() * moe;
        3 + self.layers * 2 + attention + mlp + self.mtp_layers * (5 + 1 + mla + moe)
    }
}
