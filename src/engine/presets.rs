//! Configurations of released models, for sums and forecasts without their weights.
//!
//! Values as in the `config.json` of `inclusionAI/Ling-3.0-flash` and `inclusionAI/Ling-3.0-tiny`, training-only keys left out.

use super::config::ModelConfig;
use super::config_read::parse_config;
use super::error::EngineError;
use super::inventory::{Amount, Inventory};
use super::matrix::{MXFP4_GROUP, Matrix};
use super::tensors::{self, Component, Slot, TensorSource};
use std::path::Path;

/// How a released checkpoint stores its matrices. Decay, bias of the router and `dt_bias` are F32 in all of them, other small
/// tensors BF16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Everything BF16.
    Bf16,
    /// FP8 with F32 scales for blocks of 128 x 128; embedding, head, router, MLA's latent projections and gates BF16.
    Fp8,
    /// As FP8, with MXFP4 routed experts.
    Fp4,
    /// As BF16, with INT4 routed experts in groups of 32 and BF16 scales.
    Int4,
}

/// A released model without its weights.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// The name to ask for it by.
    pub name: &'static str,
    /// Its `config.json`.
    pub config: &'static str,
    /// Its storage.
    pub layout: Layout,
}

/// All presets.
pub const PRESETS: &[Preset] = &[
    Preset { name: "ling-3.0-flash", config: FLASH_CONFIG, layout: Layout::Bf16 },
    Preset { name: "ling-3.0-flash-fp8", config: FLASH_CONFIG, layout: Layout::Fp8 },
    Preset { name: "ling-3.0-flash-fp4", config: FLASH_CONFIG, layout: Layout::Fp4 },
    Preset { name: "ling-3.0-flash-int4", config: FLASH_CONFIG, layout: Layout::Int4 },
    Preset { name: "ling-3.0-tiny", config: TINY_CONFIG, layout: Layout::Bf16 },
];

impl Preset {
    /// The preset of this name.
    pub fn find(name: &str) -> Option<Self> {
        PRESETS.iter().copied().find(|preset| preset.name == name)
    }

    /// Its shape.
    ///
    /// # Errors
    /// None for the presets of this file; their configurations are tested.
    pub fn model(&self) -> Result<ModelConfig, EngineError> {
        Ok(parse_config(Path::new(self.name), self.config.as_bytes(), None)?.model)
    }

    /// Parameters and bytes of its tensors.
    ///
    /// # Errors
    /// As [`Preset::model`].
    pub fn inventory(&self) -> Result<Inventory, EngineError> {
        let mut counter = Counter::new(self.layout);
        tensors::walk(&self.model()?, &mut counter)?;
        Ok(counter.inventory)
    }

    /// Stored format of the routed experts, as in a trace's manifest.
    pub fn expert_format(&self) -> &'static str {
        match self.layout {
            Layout::Bf16 => "bf16",
            Layout::Fp8 => "fp8",
            Layout::Fp4 => "mxfp4",
            Layout::Int4 => "int4",
        }
    }
}

/// Counts what a layout would store, without storing anything.
pub(super) struct Counter {
    layout: Layout,
    pub inventory: Inventory,
}

impl Counter {
    /// A counter that has seen nothing.
    pub fn new(layout: Layout) -> Self {
        Self { layout, inventory: Inventory::default() }
    }
}

impl TensorSource for Counter {
    fn matrix(&mut self, slot: Slot<'_>, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
        let (rows, cols) = (rows as u64, cols as u64);
        let parameters = rows * cols;
        let routed = slot.component == Component::RoutedExperts;
        let amount = match self.layout {
            Layout::Fp4 if routed => {
                Amount { parameters, bytes: parameters / 2 + parameters / MXFP4_GROUP as u64, note_bytes: 0, tensors: 2 }
            }
            // Two I64 sizes beside every packed matrix.
            Layout::Int4 if routed => Amount { parameters, bytes: parameters / 2 + parameters / 32 * 2 + 16, note_bytes: 16, tensors: 3 },
            Layout::Fp8 | Layout::Fp4 if stored_as_fp8(&slot) => {
                Amount { parameters, bytes: parameters + rows.div_ceil(128) * cols.div_ceil(128) * 4, note_bytes: 0, tensors: 2 }
            }
            _ => Amount { parameters, bytes: parameters * 2, note_bytes: 0, tensors: 1 },
        };
        self.inventory.count(slot, amount);
        Ok(Matrix::empty())
    }

    fn vector(&mut self, slot: Slot<'_>, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let parameters = shape.iter().product::<usize>() as u64;
        let wide = [".A_log", ".dt_bias", ".expert_bias"].iter().any(|suffix| slot.name.ends_with(suffix));
        self.inventory.count(slot, Amount { parameters, bytes: parameters * if wide { 4 } else { 2 }, note_bytes: 0, tensors: 1 });
        Ok(Vec::new())
    }
}

/// Which matrices the FP8 releases quantise.
pub(super) fn stored_as_fp8(slot: &Slot<'_>) -> bool {
    let is = |names: &[&str]| names.iter().any(|name| slot.name.ends_with(&format!(".{name}.weight")));
    match slot.component {
        Component::Kda => !is(&["b_proj"]),
        Component::Mla => is(&["q_proj", "q_a_proj", "q_b_proj", "dense"]),
        Component::Dense | Component::RoutedExperts | Component::SharedExperts | Component::DraftProjection => true,
        Component::Embedding | Component::Head | Component::Router | Component::RouterBias | Component::Norms => false,
        // No part of a target's checkpoint.
        Component::DraftAttention | Component::MarkovHead | Component::ConfidenceHead => false,
    }
}

/// `inclusionAI/Ling-3.0-flash`.
pub const FLASH_CONFIG: &str = r#"{
  "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
  "hidden_size": 2560, "num_hidden_layers": 42, "layer_group_size": 6,
  "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "num_kv_heads_for_linear_attn": 0,
  "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128,
  "rope_theta": 6000000, "rope_interleave": true, "rope_scaling": null, "partial_rotary_factor": 0.5, "rotary_dim": 64, "use_mla_nope": false,
  "max_position_embeddings": 262144, "vocab_size": 157184, "tie_word_embeddings": false,
  "first_k_dense_replace": 2, "intermediate_size": 6144,
  "num_experts": 512, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 768, "moe_shared_expert_intermediate_size": 768,
  "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
  "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_enable_expert_bias": true, "router_dtype": "fp32",
  "expert_swiglu_limit_list": [0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,4,4,4,4,4,4,4],
  "share_expert_swiglu_limit_list": [0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,5,5,5,5,5,5,7,7],
  "rms_norm_eps": 1e-06, "hidden_act": "silu", "short_conv_kernel_size": 4, "linear_silu": true,
  "no_kda_lora": true, "use_kda_lora": false, "kda_safe_gate": true, "kda_lower_bound": -5.0,
  "gated_attention_proj_granularity_type": "head_wise", "use_qk_norm": true, "use_bias": false, "use_qkv_bias": false,
  "num_nextn_predict_layers": 1, "mtp_use_kda": false,
  "scale_router_input": false, "up_proj_norm": false, "value_norm": false, "use_nGPT": false,
  "pad_token_id": 156892, "eos_token_id": 156895, "dtype": "bfloat16"
}"#;

/// `inclusionAI/Ling-3.0-tiny`.
pub const TINY_CONFIG: &str = r#"{
  "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
  "hidden_size": 1536, "num_hidden_layers": 24, "layer_group_size": 4,
  "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "num_kv_heads_for_linear_attn": 0,
  "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128,
  "rope_theta": 6000000, "rope_interleave": true, "rope_scaling": null, "partial_rotary_factor": 0.5, "rotary_dim": 64, "use_mla_nope": false,
  "max_position_embeddings": 131072, "vocab_size": 157184, "tie_word_embeddings": false,
  "first_k_dense_replace": 1, "intermediate_size": 4608,
  "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
  "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
  "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_enable_expert_bias": true, "router_dtype": "fp32",
  "rms_norm_eps": 1e-06, "hidden_act": "silu", "short_conv_kernel_size": 4, "linear_silu": true,
  "no_kda_lora": true, "use_kda_lora": false, "kda_safe_gate": true, "kda_lower_bound": -5.0,
  "gated_attention_proj_granularity_type": "head_wise", "use_qk_norm": true, "use_bias": false, "use_qkv_bias": false,
  "num_nextn_predict_layers": 0, "mtp_use_kda": false,
  "scale_router_input": false, "up_proj_norm": false, "value_norm": false, "use_nGPT": false,
  "pad_token_id": 156892, "eos_token_id": 156895, "dtype": "bfloat16"
}"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn inventory(name: &str) -> Inventory {
        Preset::find(name).unwrap().inventory().unwrap()
    }

    #[test]
    fn flash_has_its_published_parameters() {
        let flash = inventory("ling-3.0-flash");
        let of = |component| flash.of(component).parameters;
        assert_eq!(of(Component::Embedding), 402_391_040);
        assert_eq!(of(Component::Head), 402_391_040);
        assert_eq!(of(Component::Kda), 2_206_746_080);
        assert_eq!(of(Component::Kda), 35 * 63_049_888);
        assert_eq!(of(Component::Mla), 223_759_872);
        assert_eq!(of(Component::Dense), 94_371_840);
        assert_eq!(of(Component::Router), 52_428_800);
        assert_eq!(of(Component::RouterBias), 20_480);
        assert_eq!(of(Component::RoutedExperts), 120_795_955_200);
        assert_eq!(of(Component::SharedExperts), 235_929_600);
        assert_eq!(of(Component::Norms), 217_600);
        assert_eq!(flash.target_total().parameters, 124_414_211_552);
        assert_eq!(flash.total().parameters, 127_486_405_600);
        assert_eq!(flash.total().tensors, 63_783);

        let draft = |component| flash.draft_of(component).parameters;
        assert_eq!(draft(Component::DraftProjection), 13_107_200);
        assert_eq!(draft(Component::Mla), 31_965_696);
        assert_eq!((draft(Component::Router), draft(Component::RouterBias)), (1_310_720, 512));
        assert_eq!((draft(Component::RoutedExperts), draft(Component::SharedExperts)), (3_019_898_880, 5_898_240));
        assert_eq!(draft(Component::Norms), 12_800);
        assert_eq!(flash.draft_total().parameters, 3_072_194_048);

        let config = Preset::find("ling-3.0-flash").unwrap().model().unwrap();
        assert_eq!(flash.bytes_per_expert(&config), 11_796_480);
        assert_eq!(flash.active_parameters(&config), 5_103_302_112);
    }

    #[test]
    fn tiny_has_its_published_parameters() {
        let tiny = inventory("ling-3.0-tiny");
        let of = |component| tiny.of(component).parameters;
        assert_eq!((of(Component::Embedding), of(Component::Head)), (241_434_624, 241_434_624));
        assert_eq!((of(Component::Kda), of(Component::Mla)), (340_662_816, 43_995_648));
        assert_eq!((of(Component::Dense), of(Component::Norms)), (21_233_664, 75_264));
        assert_eq!((of(Component::Router), of(Component::RouterBias)), (4_521_984, 2_944));
        assert_eq!((of(Component::RoutedExperts), of(Component::SharedExperts)), (6_945_767_424, 54_263_808));
        assert_eq!(tiny.total().parameters, 7_893_392_800);
        assert_eq!(tiny.total().tensors, 9_283);
        assert!(tiny.draft.is_empty());
    }

    #[test]
    fn quantised_layouts_have_their_published_bytes() {
        assert_eq!(inventory("ling-3.0-flash-fp8").total().bytes, 128_427_158_944);
        let gigabytes = |name: &str| inventory(name).total().bytes as f64 / 1e9;
        assert!((gigabytes("ling-3.0-flash-fp4") - 70.36).abs() < 0.01, "{}", gigabytes("ling-3.0-flash-fp4"));
        assert!((gigabytes("ling-3.0-flash-int4") - 77.0).abs() < 0.05, "{}", gigabytes("ling-3.0-flash-int4"));
        assert!((gigabytes("ling-3.0-flash") - 255.0).abs() < 0.05, "{}", gigabytes("ling-3.0-flash"));
        for preset in PRESETS {
            assert_eq!(
                preset.inventory().unwrap().total().parameters,
                inventory(if preset.name.contains("tiny") { "ling-3.0-tiny" } else { "ling-3.0-flash" }).total().parameters
            );
        }
    }
}
