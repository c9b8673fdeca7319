//! `config.json` to [`ModelConfig`], refusing by name what is not implemented.
//!
//! Every number is bounded before it is used in a product, so that a hostile file ends in an error
//! and never in an overflow or a huge allocation.

use super::config::{MlaGate, ModelConfig};
use super::config_keys::{Keys, MAX_LAYERS, MAX_WIDTH};
use super::error::EngineError;
use crate::trace::expert_set::MAX_EXPERTS;
use serde_json::{Map, Value};
use std::path::Path;

/// The architecture that the engine implements. `model_type` is shared with Ling 2.5 and therefore not looked at.
pub const ARCHITECTURE: &str = "BailingMoeV3ForCausalLM";

/// Upper bound of heads x head size.
const MAX_PRODUCT: usize = 1 << 24;

/// What `config.json` says, including hints about the storage.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigFile {
    /// The shape.
    pub model: ModelConfig,
    /// Rows and columns that share one FP8 scale (`quantization_config.weight_block_size`).
    pub fp8_block: [usize; 2],
}

impl ModelConfig {
    /// Reads `config.json` and, when there is one, `generation_config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// When the file cannot be read, is not such a configuration, or asks for what is not implemented.
    pub fn read(dir: &Path) -> Result<Self, EngineError> {
        let files = super::files::CheckpointFiles::Directory(dir.to_owned());
        Ok(read_config(&files)?.model)
    }

    /// Parses the text of a `config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// As [`ModelConfig::read`].
    pub fn from_json(path: &Path, json: &[u8]) -> Result<Self, EngineError> {
        Ok(parse_config(path, json, None)?.model)
    }
}

/// Reads the configuration files of a checkpoint.
///
/// # Errors
/// As [`ModelConfig::read`].
pub fn read_config(files: &super::files::CheckpointFiles) -> Result<ConfigFile, EngineError> {
    let json = files.require("config.json")?;
    let generation = files.read("generation_config.json")?;
    let generation_path = files.path("generation_config.json");
    parse_config(&files.path("config.json"), &json, generation.as_deref().map(|json| (generation_path.as_path(), json)))
}

/// Parses `config.json` and optionally `generation_config.json` (for its end-of-sequence ids).
///
/// # Errors
/// As [`ModelConfig::read`].
pub fn parse_config(path: &Path, json: &[u8], generation: Option<(&Path, &[u8])>) -> Result<ConfigFile, EngineError> {
    let keys = Keys::parse(path, json)?;
    keys.check_architecture()?;
    keys.refuse_unimplemented()?;
    let fp8_block = keys.quantisation()?;
    let mut model = keys.model()?;
    if let Some((path, json)) = generation {
        let generation = Keys::parse(path, json)?;
        for id in generation.ids("eos_token_id")? {
            if !model.eos.contains(&id) {
                model.eos.push(id);
            }
        }
    }
    // An id outside the vocabulary can never be emitted.
    model.eos.retain(|&id| (id as usize) < model.vocab);
    Ok(ConfigFile { model, fp8_block })
}

impl Keys {
    fn check_architecture(&self) -> Result<(), EngineError> {
        let found = self.architecture();
        if found.as_str() == Some(ARCHITECTURE) {
            return Ok(());
        }
        let wanted = match found.as_str().is_some_and(|name| super::dspark::ARCHITECTURES.contains(&name)) {
            true => "it is a drafter: name its target as the model, and the drafter with --draft-model".to_owned(),
            false => format!("use a checkpoint of {ARCHITECTURE} (Ling 3.0)"),
        };
        Err(self.unsupported("architectures[0]", found, wanted))
    }

    /// Refuses every switch whose other position is another architecture.
    fn refuse_unimplemented(&self) -> Result<(), EngineError> {
        const FLAGS: &[(&str, bool)] = &[
            ("kda_safe_gate", true),
            ("no_kda_lora", true),
            ("use_kda_lora", false),
            ("linear_silu", true),
            ("rope_interleave", true),
            ("use_mla_nope", false),
            ("use_bias", false),
            ("use_qkv_bias", false),
            ("use_nGPT", false),
            ("scale_router_input", false),
            ("up_proj_norm", false),
            ("value_norm", false),
            ("mtp_use_kda", false),
            ("tie_word_embeddings", false),
        ];
        for &(key, wanted) in FLAGS {
            if self.flag(key, wanted)? != wanted {
                return Err(self.unsupported(key, &Value::Bool(!wanted), format!("only {wanted} is")));
            }
        }
        const WORDS: &[(&str, &str)] =
            &[("hidden_act", "silu"), ("score_function", "sigmoid"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")];
        for &(key, wanted) in WORDS {
            if let Some(found) = self.get(key).filter(|v| v.as_str() != Some(wanted)) {
                return Err(self.unsupported(key, found, format!("only \"{wanted}\" is")));
            }
        }
        if let Some(found) = self.get("rope_scaling") {
            return Err(self.unsupported("rope_scaling", found, "only null is: YaRN and other RoPE scalings are not"));
        }
        // Newer writers keep the base of RoPE in an object of its own.
        if let Some(kind) = self.get("rope_parameters").and_then(|v| v.get("rope_type")).filter(|v| v.as_str() != Some("default")) {
            return Err(self.unsupported("rope_parameters.rope_type", kind, "only \"default\" is: YaRN and other RoPE scalings are not"));
        }
        Ok(())
    }

    /// Refuses quantisations other than the three released layouts; gives the block of FP8 scales.
    ///
    /// Which tensor is quantised is decided by the tensors themselves, not by the lists in here.
    pub fn quantisation(&self) -> Result<[usize; 2], EngineError> {
        const DEFAULT: [usize; 2] = [128, 128];
        let Some(quant) = self.get("quantization_config") else { return Ok(DEFAULT) };
        let key = |k: &str| format!("quantization_config.{k}");
        let method = quant.get("quant_method").unwrap_or(&Value::Null);
        match method.as_str() {
            Some("fp8") => {
                if let Some(found) =
                    quant.get("routed_experts_quant_method").filter(|v| !v.is_null() && !matches!(v.as_str(), Some("mxfp4" | "fp8")))
                {
                    return Err(self.unsupported(&key("routed_experts_quant_method"), found, "only \"mxfp4\" is"));
                }
                if let Some(found) = quant.get("fmt").filter(|v| v.as_str() != Some("e4m3")) {
                    return Err(self.unsupported(&key("fmt"), found, "only \"e4m3\" is"));
                }
                let Some(block) = quant.get("weight_block_size").filter(|v| !v.is_null()) else { return Ok(DEFAULT) };
                let side = |i: usize| block.get(i).and_then(Value::as_u64).filter(|n| (1..=MAX_WIDTH).contains(n)).map(|n| n as usize);
                match (side(0), side(1), block.as_array().map(Vec::len)) {
                    (Some(rows), Some(cols), Some(2)) => Ok([rows, cols]),
                    _ => Err(self.unsupported(&key("weight_block_size"), block, "two numbers of rows and columns are")),
                }
            }
            Some("compressed-tensors") => {
                if let Some(found) = quant.get("format").filter(|v| v.as_str() != Some("pack-quantized")) {
                    return Err(self.unsupported(&key("format"), found, "only \"pack-quantized\" is"));
                }
                let groups = quant.get("config_groups").and_then(Value::as_object);
                for weights in groups.into_iter().flat_map(Map::values).filter_map(|g| g.get("weights")) {
                    if let Some(found) = weights.get("num_bits").filter(|v| v.as_u64() != Some(4)) {
                        return Err(self.unsupported(&key("config_groups.weights.num_bits"), found, "only 4 is"));
                    }
                    if let Some(found) = weights.get("symmetric").filter(|v| v.as_bool() != Some(true)) {
                        return Err(self.unsupported(&key("config_groups.weights.symmetric"), found, "only true is"));
                    }
                    if let Some(found) = weights.get("actorder").filter(|v| !v.is_null() && v.as_bool() != Some(false)) {
                        return Err(self.unsupported(&key("config_groups.weights.actorder"), found, "only null is"));
                    }
                }
                Ok(DEFAULT)
            }
            _ => Err(self.unsupported(
                &key("quant_method"),
                method,
                "\"fp8\" (with or without MXFP4 experts) and \"compressed-tensors\" are",
            )),
        }
    }

    fn rope_theta(&self) -> Result<f64, EngineError> {
        let nested = self.get("rope_parameters").and_then(|v| v.get("rope_theta")).and_then(Value::as_f64);
        let theta = self.float("rope_theta", nested.unwrap_or(6e6))?;
        if theta.is_finite() && theta >= 1.0 { Ok(theta) } else { Err(self.bad(format!("`rope_theta` is {theta}; expected at least 1"))) }
    }

    /// A SwiGLU limit list: absent = no limits; entries for MTP layers at its end are ignored.
    fn limits(&self, key: &str, layers: usize) -> Result<Vec<f32>, EngineError> {
        let Some(value) = self.get(key) else { return Ok(vec![0.0; layers]) };
        let wrong = || self.bad(format!("`{key}` must be a list of {layers} numbers >= 0, one per layer"));
        let list = value.as_array().filter(|l| l.len() >= layers && l.len() <= layers + 1).ok_or_else(wrong)?;
        let limit = |v: &Value| match v {
            Value::Null => Some(0.0),
            v => v.as_f64().map(|f| f as f32).filter(|f| f.is_finite() && *f >= 0.0),
        };
        list.iter().take(layers).map(|v| limit(v).ok_or_else(wrong)).collect()
    }

    fn model(&self) -> Result<ModelConfig, EngineError> {
        let layers = self.required("num_hidden_layers", 1, MAX_LAYERS)?;
        let heads = self.required("num_attention_heads", 1, 4096)?;
        if let Some(kv) = self.number("num_key_value_heads", 1, 4096)?.filter(|&kv| kv != heads) {
            return Err(self.unsupported("num_key_value_heads", &kv.into(), format!("only num_attention_heads ({heads}) is")));
        }
        if let Some(kv) = self.number("num_kv_heads_for_linear_attn", 0, 4096)?.filter(|&kv| kv != 0 && kv != heads) {
            return Err(self.unsupported("num_kv_heads_for_linear_attn", &kv.into(), format!("0 and num_attention_heads ({heads}) are")));
        }
        let mtp_layers = self.number("num_nextn_predict_layers", 0, MAX_LAYERS)?.unwrap_or(0);
        if mtp_layers > 1 {
            return Err(self.unsupported("num_nextn_predict_layers", &mtp_layers.into(), "0 and 1 are"));
        }
        let mla_gate = match self.get("gated_attention_proj_granularity_type") {
            None => MlaGate::HeadWise,
            Some(v) => match v.as_str() {
                Some("head_wise") => MlaGate::HeadWise,
                Some("element_wise") => MlaGate::ElementWise,
                _ => {
                    let key = "gated_attention_proj_granularity_type";
                    return Err(self.unsupported(key, v, "\"head_wise\" and \"element_wise\" are"));
                }
            },
        };
        let experts = self.required("num_experts", 1, MAX_EXPERTS as u64)?;
        let shared_experts = self.number("num_shared_experts", 1, 64)?.unwrap_or(1);
        let expert_inter = self.width("moe_intermediate_size")?;
        let shared_each = self.number("moe_shared_expert_intermediate_size", 1, MAX_WIDTH)?.unwrap_or(expert_inter);
        let config = ModelConfig {
            hidden: self.width("hidden_size")?,
            layers,
            layer_group: self.required("layer_group_size", 1, MAX_LAYERS)?,
            heads,
            head_dim: self.width("head_dim")?,
            q_lora_rank: self.number("q_lora_rank", 0, MAX_WIDTH)?.filter(|&rank| rank > 0),
            kv_lora_rank: self.width("kv_lora_rank")?,
            qk_nope_head_dim: self.width("qk_nope_head_dim")?,
            qk_rope_head_dim: self.width("qk_rope_head_dim")?,
            v_head_dim: self.width("v_head_dim")?,
            rope_theta: self.rope_theta()?,
            dense_layers: self.required("first_k_dense_replace", 0, MAX_LAYERS)?,
            dense_inter: self.width("intermediate_size")?,
            experts,
            experts_per_token: self.required("num_experts_per_tok", 1, experts as u64)?,
            shared_experts,
            expert_inter,
            shared_inter: shared_each * shared_experts,
            groups: self.required("n_group", 1, experts as u64)?,
            groups_kept: self.required("topk_group", 1, experts as u64)?,
            router_bias: self.flag("moe_router_enable_expert_bias", true)?,
            routed_scaling: self.float("routed_scaling_factor", 2.5)? as f32,
            norm_topk: self.flag("norm_topk_prob", true)?,
            expert_limits: self.limits("expert_swiglu_limit_list", layers)?,
            shared_limits: self.limits("share_expert_swiglu_limit_list", layers)?,
            conv_kernel: self.number("short_conv_kernel_size", 1, 64)?.unwrap_or(4),
            kda_lower_bound: self.float("kda_lower_bound", -5.0)? as f32,
            mla_gate,
            vocab: self.required("vocab_size", 1, 1 << 24)?,
            rms_eps: self.float("rms_norm_eps", 1e-6)? as f32,
            mtp_layers,
            eos: self.ids("eos_token_id")?,
            max_position: self.number("max_position_embeddings", 1, 1 << 32)?.unwrap_or(131_072),
        };
        self.check_relations(&config)?;
        Ok(config)
    }

    /// Relations between numbers that the forward pass relies on.
    fn check_relations(&self, c: &ModelConfig) -> Result<(), EngineError> {
        let ensure = |ok: bool, reason: String| if ok { Ok(()) } else { Err(self.bad(reason)) };
        ensure(
            c.dense_layers <= c.layers,
            format!("`first_k_dense_replace` ({}) exceeds `num_hidden_layers` ({})", c.dense_layers, c.layers),
        )?;
        ensure(c.experts.is_multiple_of(c.groups), format!("`num_experts` ({}) is not a multiple of `n_group` ({})", c.experts, c.groups))?;
        ensure(c.groups_kept <= c.groups, format!("`topk_group` ({}) exceeds `n_group` ({})", c.groups_kept, c.groups))?;
        let kept = c.experts / c.groups * c.groups_kept;
        let k = c.experts_per_token;
        ensure(k <= kept, format!("`num_experts_per_tok` ({k}) exceeds the {kept} experts of the `topk_group` groups kept"))?;
        ensure(c.qk_rope_head_dim.is_multiple_of(2), format!("`qk_rope_head_dim` ({}) is odd", c.qk_rope_head_dim))?;
        ensure(c.head_dim.is_multiple_of(2), format!("`head_dim` ({}) is odd", c.head_dim))?;
        if let Some(qk) = self.number("qk_head_dim", 1, 2 * MAX_WIDTH)? {
            ensure(
                qk == c.qk_head_dim(),
                format!("`qk_head_dim` ({qk}) is not `qk_nope_head_dim` + `qk_rope_head_dim` ({})", c.qk_head_dim()),
            )?;
        }
        let widest = c.head_dim.max(c.qk_head_dim()).max(c.qk_nope_head_dim + c.v_head_dim);
        ensure(
            c.heads.saturating_mul(widest) <= MAX_PRODUCT,
            format!("`num_attention_heads` ({}) x head size ({widest}) is too large", c.heads),
        )?;
        ensure(c.shared_inter <= MAX_PRODUCT, "`moe_shared_expert_intermediate_size` x `num_shared_experts` is too large".to_owned())?;
        ensure(c.rms_eps > 0.0 && c.rms_eps.is_finite(), format!("`rms_norm_eps` ({}) is not above 0", c.rms_eps))?;
        ensure(
            c.kda_lower_bound < 0.0 && c.kda_lower_bound.is_finite(),
            format!("`kda_lower_bound` ({}) is not below 0", c.kda_lower_bound),
        )?;
        ensure(
            c.routed_scaling.is_finite() && c.routed_scaling > 0.0,
            format!("`routed_scaling_factor` ({}) is not above 0", c.routed_scaling),
        )
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
