//! Each sample gives the ids that its `expected.json` has.

use super::*;
use specprof::trace::manifest::{IdSpace, WindowCompleteness};

#[test]
fn vllm_windows_are_cut_as_the_acceptance_says() {
    let expected = json("vllm/expected.json");
    let t = import(&[text(&data("vllm/completions_response_v0.33.json")), "--experts", "64"]);
    assert_eq!(t.by_position(), matrix(&expected["routed_experts"], 0));
    let m = t.manifest();
    assert_eq!((m.window_completeness, m.id_space, m.drafter.draft_len), (WindowCompleteness::AcceptedOnly, IdSpace::Logical, Some(3)));
    assert_eq!((m.model.moe_layers.as_slice(), m.model.layers, m.model.experts), (&[1, 2, 3, 4, 5][..], 6, 64));
    let steps = t.trace.steps().unwrap();
    let windows = expected["windows"].as_array().unwrap();
    assert_eq!(steps.len(), windows.len() + 1);
    for (i, window) in windows.iter().enumerate().map(|(i, w)| (i + 1, w)) {
        assert_eq!(steps.context_len[i], window["row_start"].as_u64().unwrap() as u32);
        assert_eq!(u64::from(steps.rows[i]), window["drafted"].as_u64().unwrap() + 1);
        assert_eq!(u64::from(steps.accepted[i]), window["accepted"].as_u64().unwrap());
    }
    let all: Vec<u32> = (2000..2015).collect();
    assert_eq!(steps.emitted_tokens.values(), all);
    assert!(m.token_hash.is_some());
    // Unions are of kept rows: lower bounds, and they are said to be.
    let report = t.report();
    assert_eq!(report["acceptance"]["tokens_per_step"], 2.8);
    assert!(
        report["warnings"]
            .as_array()
            .unwrap()
            .iter()
            .any(|w| w["code"] == "accepted_only" && w["message"].as_str().unwrap().contains("lower bound"))
    );
    assert_eq!(report["overall"]["wasted_mean"], Value::Null);
}

#[test]
fn vllm_of_0_21_has_split_lists_and_no_windows() {
    let response = json("vllm/completions_response_v0.21_nested_lists.json");
    let mut rows = response["prompt_routed_experts"].as_array().unwrap().clone();
    rows.extend(response["choices"][0]["routed_experts"].as_array().unwrap().clone());
    let t = import(&[text(&data("vllm/completions_response_v0.21_nested_lists.json")), "--experts", "64"]);
    assert_eq!(t.by_position(), matrix(&Value::Array(rows), 0));
    assert_eq!(t.manifest().window_completeness, WindowCompleteness::None);
    assert!(t.warning("steps_unknown").starts_with("14 generated rows"));
    // Loads of all rows are known all the same: 21 rows of 4 in each of 5 layers.
    let layers = t.report()["layers"].as_array().unwrap().clone();
    assert_eq!(layers.len(), 5);
    assert!(layers.iter().all(|l| l["load"]["effective_experts"].as_f64().unwrap() > 4.0 && l["union"].is_null()));
}

#[test]
fn offline_arrays_of_all_types() {
    for (file, experts) in [("uint8", "64"), ("int32_pre0.21", "64"), ("uint16_512experts", "512")] {
        let t = import(&["npy", text(&data(&format!("vllm/routed_experts_{file}.npy"))), "--experts", experts, "--prompt-tokens", "7"]);
        assert!(t.by_position().len() > 50, "{file}");
        if file == "uint8" {
            assert_eq!(t.by_position(), matrix(&json("vllm/expected.json")["routed_experts"], 0));
        }
    }
}

#[test]
fn sglang_needs_the_shape_and_row_counts_decide() {
    let expected = json("sglang/expected_meta_info.json");
    let shape = ["--layers", "6", "--k", "8", "--experts", "128"];
    for file in ["generate_response_v0.5.23.json", "openai_chat_response_sglext.json"] {
        let path = data(&format!("sglang/{file}"));
        assert!(refused(&[text(&path)]).contains("--model-config"), "{file}");
        let t = import(&[&[text(&path)], &shape[..]].concat());
        assert_eq!(t.by_position(), matrix(&expected["routed_experts"], 0), "{file}");
        assert_eq!(t.manifest().window_completeness, WindowCompleteness::None);
        assert!(t.warning("acceptance_summary").contains("7 of 16 drafts accepted in 4 verify steps, 2.75 tokens per step"));
    }
    let t = import(&[&[text(&data("sglang/generate_response_start_len3.json"))], &shape[..]].concat());
    assert_eq!(t.by_position(), matrix(&expected["routed_experts"], 3));
    assert!(refused(&[text(&data("sglang/generate_response_v0.5.23.json")), "--layers", "7", "--k", "8"]).contains("check --layers"));
    let config = t.dir.path().join("config.json");
    std::fs::write(&config, r#"{"num_hidden_layers":6,"first_k_dense_replace":1,"num_experts":128,"num_experts_per_tok":8}"#).unwrap();
    let by_config = import(&[text(&data("sglang/generate_response_v0.5.23.json")), "--model-config", text(&config)]);
    assert_eq!(by_config.by_position(), matrix(&expected["routed_experts"], 0));
}

#[test]
fn containers_of_trainers_hold_the_same_matrix() {
    let want = matrix(&json("r3/expected.json")["routed_experts"], 0);
    for file in ["routed_experts.npz", "routed_experts_compressed_int16.npz"] {
        assert_eq!(import(&[text(&data(&format!("r3/{file}"))), "--experts", "32"]).by_position(), want, "{file}");
    }
    let shifted = text(&data("r3/moe_layers_only_shift1_int32.npy")).to_owned();
    let error = refused(&[&shifted, "--experts", "32"]);
    assert!(error.contains("--layers moe-only") && error.contains("--first-dense"), "{error}");
    let t = import(&[&shifted, "--layers", "moe-only", "--first-dense", "1", "--experts", "32"]);
    assert_eq!(t.by_position(), want);
    // The same per-layer numbers whichever way it came.
    let other = import(&[text(&data("r3/routed_experts.npz")), "--experts", "32"]);
    assert_eq!(t.report()["layers"], other.report()["layers"]);
    let padded = import(&[text(&data("r3/nemo_rl_int8_sentinel_minus1_arange_pad.npy")), "--experts", "32"]);
    let ten: BTreeMap<_, _> = want.into_iter().filter(|((position, _), _)| *position < 10).collect();
    assert_eq!(padded.by_position(), ten);
    assert!(padded.warning("padding_arange").starts_with("3 rows") && padded.warning("padding_missing").starts_with("1 row"));
}

#[test]
fn every_encoding_of_llama_cpp_holds_the_same_matrix() {
    let want = matrix(&json("llamacpp/expected.json")["ids"], 0);
    let prompt: BTreeMap<_, _> = want.clone().into_iter().filter(|((position, _), _)| *position < 6).collect();
    for (file, ids) in [
        ("A_pr28544_layer_expert.csv", &want),
        ("B_fork_pos_layer_ids.csv", &want),
        ("C_int32_records.bin", &want),
        ("D_phase_token_layer_rank_expert.csv", &want),
        ("E_user_query_prefill_only.csv", &prompt),
        ("G_flash_moe.jsonl", &want),
    ] {
        let t = import(&[text(&data(&format!("llamacpp/{file}"))), "--experts", "32", "--k", "4"]);
        assert_eq!(t.by_position(), *ids, "{file}");
    }
    // F has only the last of two rows in the last layer of the prompt's second part.
    let t = import(&["llamacpp", text(&data("llamacpp/F_moetrc01.moetrace"))]);
    let mut without = want;
    without.remove(&(4, 5));
    assert_eq!(t.by_position(), without);
    assert_eq!((t.manifest().model.name.as_str(), t.manifest().model.architecture.as_str()), ("tiny.gguf", "qwen3moe"));
    t.warning("last_layer_rows");
    let bad = import(&[text(&data("llamacpp/A_bad_contiguous_read.csv")), "--experts", "32", "--k", "4"]);
    assert!(bad.warning("read_with_wrong_strides").contains("contiguous"));
    assert!(refused(&[text(&data("llamacpp/A_pr28544_layer_expert.csv"))]).contains("--k"));
}

#[test]
fn counts_are_loads_and_nothing_else() {
    let t = import(&[text(&data("r3/moe_infinity_trace_capacity_layers_experts.npy")), "--kind", "counts"]);
    assert_eq!(t.manifest().window_completeness, WindowCompleteness::Counts);
    let report = t.report();
    let layers = report["layers"].as_array().unwrap();
    assert!(layers.iter().all(|l| l["load"]["entropy_bits"].as_f64().unwrap() > 0.0 && l["union"].is_null()));
    assert_eq!(report["overall"], Value::Null);
    let shown = specprof().arg("report").arg(&t.path).arg("--per-layer").assert().success();
    assert!(String::from_utf8_lossy(&shown.get_output().stdout).contains("max / mean"));
}

#[test]
fn a_stream_has_its_metrics_in_the_last_chunk() {
    let t = import(&[text(&data("acceptance/vllm_stream_sse.txt"))]);
    assert_eq!(t.report()["acceptance"]["tokens_per_step"], 2.8);
    assert_eq!(t.report()["acceptance"]["histogram"], serde_json::json!([1, 1, 1, 2]));
    assert!(t.manifest().token_hash.is_none(), "nobody named the tokens");
    t.warning("no_routes");
}
