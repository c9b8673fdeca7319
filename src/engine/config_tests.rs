use super::*;
use crate::engine::config::AttentionKind;
use crate::engine::presets;
use proptest::prelude::*;
use serde_json::json;

fn flash() -> Value {
    serde_json::from_slice(presets::FLASH_CONFIG.as_bytes()).unwrap()
}

fn read(value: &Value) -> Result<ModelConfig, EngineError> {
    ModelConfig::from_json(Path::new("config.json"), value.to_string().as_bytes())
}

fn with(key: &str, value: Value) -> Result<ModelConfig, EngineError> {
    let mut config = flash();
    config[key] = value;
    read(&config)
}

#[test]
fn flash_has_its_published_layout() {
    let c = read(&flash()).unwrap();
    let mla: Vec<usize> = (0..c.layers).filter(|&l| c.attention(l) == AttentionKind::Mla).collect();
    assert_eq!(mla, [5, 11, 17, 23, 29, 35, 41]);
    assert_eq!((c.kda_width(), c.qk_head_dim(), c.moe_layers(), c.shared_inter), (4096, 192, 40, 768));
    assert_eq!(
        (c.expert_limits[34], c.expert_limits[35], c.shared_limits[33], c.shared_limits[34], c.shared_limits[41]),
        (0.0, 4.0, 0.0, 5.0, 7.0)
    );
    assert_eq!(c.plain_tensors(), 63_783);
    assert_eq!(c.eos, [156_895]);
}

#[test]
fn everything_not_implemented_is_refused_by_name() {
    for (key, value) in [
        ("kda_safe_gate", json!(false)),
        ("use_nGPT", json!(true)),
        ("scale_router_input", json!(true)),
        ("up_proj_norm", json!(true)),
        ("value_norm", json!(true)),
        ("use_kda_lora", json!(true)),
        ("no_kda_lora", json!(false)),
        ("linear_silu", json!(false)),
        ("hidden_act", json!("gelu")),
        ("score_function", json!("softmax")),
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("use_bias", json!(true)),
        ("use_qkv_bias", json!(true)),
        ("rope_scaling", json!({"type": "yarn", "factor": 2.0})),
        ("rope_interleave", json!(false)),
        ("use_mla_nope", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("mtp_use_kda", json!(true)),
        ("num_nextn_predict_layers", json!(2)),
        ("num_kv_heads_for_linear_attn", json!(8)),
        ("num_key_value_heads", json!(8)),
        ("gated_attention_proj_granularity_type", json!("token_wise")),
    ] {
        let error = with(key, value.clone()).unwrap_err();
        assert!(
            matches!(&error, EngineError::Unsupported { key: k, found, .. } if k == key && *found == value.to_string()),
            "{key}: {error}"
        );
        assert_eq!(error.to_string().lines().count(), 1);
    }
    assert!(with("rope_scaling", json!({"type": "yarn"})).unwrap_err().to_string().contains("YaRN"));
    let ling25 = with("architectures", json!(["BailingMoeV2_5ForCausalLM"])).unwrap_err().to_string();
    assert!(ling25.contains("architectures[0]") && ling25.contains(ARCHITECTURE), "{ling25}");
    let other = with("quantization_config", json!({"quant_method": "modelopt"})).unwrap_err().to_string();
    assert!(other.contains("quantization_config.quant_method") && other.contains("modelopt"), "{other}");
}

#[test]
fn missing_optional_keys_get_defaults_and_missing_required_keys_are_named() {
    let mut config = flash();
    let map = config.as_object_mut().unwrap();
    for key in [
        "model_type",
        "q_lora_rank",
        "rope_theta",
        "rms_norm_eps",
        "hidden_act",
        "kda_lower_bound",
        "partial_rotary_factor",
        "norm_topk_prob",
        "routed_scaling_factor",
    ] {
        map.remove(key);
    }
    assert_eq!(read(&config).unwrap(), read(&flash()).unwrap());
    let mut config = flash();
    config.as_object_mut().unwrap().remove("hidden_size");
    assert!(read(&config).unwrap_err().to_string().contains("`hidden_size` is missing"));
}

#[test]
fn the_partial_rotary_factor_is_ignored() {
    assert_eq!(with("partial_rotary_factor", json!(0.25)).unwrap().qk_rope_head_dim, 64);
}

#[test]
fn numbers_out_of_relation_are_errors() {
    for (key, value, word) in [
        ("n_group", json!(7), "not a multiple"),
        ("topk_group", json!(9), "exceeds `n_group`"),
        ("num_experts_per_tok", json!(400), "groups kept"),
        ("num_experts", json!(513), "num_experts"),
        ("qk_rope_head_dim", json!(63), "odd"),
        ("hidden_size", json!(0), "hidden_size"),
        ("hidden_size", json!(-4), "hidden_size"),
        ("hidden_size", json!(1e18), "hidden_size"),
        ("num_hidden_layers", json!(1_000_000), "num_hidden_layers"),
        ("first_k_dense_replace", json!(43), "first_k_dense_replace"),
        ("qk_head_dim", json!(128), "qk_head_dim"),
        ("num_attention_heads", json!(4097), "num_attention_heads"),
        ("expert_swiglu_limit_list", json!([1, 2, 3]), "expert_swiglu_limit_list"),
        ("rms_norm_eps", json!("small"), "rms_norm_eps"),
        ("rope_theta", json!(0), "rope_theta"),
        ("eos_token_id", json!("eos"), "eos_token_id"),
    ] {
        let error = with(key, value).unwrap_err().to_string();
        assert!(error.contains(word) && error.starts_with("config.json: "), "{key}: {error}");
    }
}

#[test]
fn end_of_sequence_ids_come_from_both_files() {
    let generation = json!({"eos_token_id": [156_895, 156_892, 4_000_000]}).to_string();
    let config = flash().to_string();
    let parsed =
        parse_config(Path::new("config.json"), config.as_bytes(), Some((Path::new("generation_config.json"), generation.as_bytes())))
            .unwrap();
    assert_eq!(parsed.model.eos, [156_895, 156_892]);
}

proptest! {
    /// Any replacement of any value gives a config or an error, never a panic.
    #[test]
    fn mutated_configs_never_panic(pick in any::<prop::sample::Index>(), value in prop_oneof![
        Just(Value::Null), Just(json!(true)), Just(json!([])), Just(json!({})), Just(json!("x")), Just(json!(-1)), Just(json!(0)),
        any::<u64>().prop_map(|n| json!(n)), (0u64..10_000).prop_map(|n| json!(n)), any::<f64>().prop_map(|f| json!(f)),
    ]) {
        let mut config = flash();
        let map = config.as_object_mut().unwrap();
        let key = map.keys().nth(pick.index(map.len())).unwrap().clone();
        map.insert(key, value);
        if let Ok(c) = read(&config) {
            prop_assert!(c.experts <= 512 && c.layers <= 1024 && c.experts.is_multiple_of(c.groups));
            prop_assert_eq!(c.expert_limits.len(), c.layers);
            prop_assert!(c.plain_tensors() > 0);
        }
    }

    #[test]
    fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(ModelConfig::from_json(Path::new("config.json"), &bytes).is_err());
    }
}
