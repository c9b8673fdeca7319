//! What an imported trace does not know: `null` in every JSON, said in every text, no cost out of nothing, no comparison blindly.

use super::*;
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;

/// vLLM's sample: windows of accepted rows, no times, no sampling, no sizes.
fn imported() -> Imported {
    import(&[text(&data("vllm/completions_response_v0.33.json")), "--experts", "64"])
}

fn shown(trace: &Path, command: &str, args: &[&str]) -> String {
    let out = specprof().arg(command).arg(trace).args(args).assert().success();
    String::from_utf8(out.get_output().stdout.clone()).unwrap()
}

#[test]
fn unknown_facts_are_null_and_are_said() {
    let t = imported();
    let report = t.report();
    let run = &report["run"];
    assert_eq!((&run["sampling"], &run["verification"], &run["model"]["hidden_size"]), (&Value::Null, &"unknown".into(), &Value::Null));
    assert_eq!((&run["model"]["bytes_per_expert"], &run["model"]["shared_experts"]), (&Value::Null, &Value::Null));
    // A model of bytes needs bytes, a cost needs times, advice needs rejected rows.
    assert_eq!(
        (&report["cost"]["bytes"], &report["cost"]["model"], &report["cost"]["verify_ratio"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!(report["advice"], Value::Null);
    let codes: Vec<&str> = report["warnings"].as_array().unwrap().iter().filter_map(|w| w["code"].as_str()).collect();
    for code in ["accepted_only", "unknown_verification", "no_step_times", "no_device_times", "no_advice"] {
        assert!(codes.contains(&code), "{code}: {codes:?}");
    }
    let said = shown(&t.path, "report", &[]);
    for words in ["unknown shared", "unknown bytes per expert", "unknown sampling", "unknown verification", "kept rows recorded only"] {
        assert!(said.replace('\n', " ").contains(words) || said.contains(words), "{words}: {said}");
    }
    let page = shown(&t.path, "report", &["--format", "html"]);
    assert!(page.contains("and unknown shared") && page.contains("<title>"));
    for format in ["markdown", "csv"] {
        assert!(!shown(&t.path, "report", &["--format", format]).is_empty());
    }
    let ranks: Value = serde_json::from_str(&shown(&t.path, "report", &["--ep", "4", "--format", "json"])).unwrap();
    let ranks = &ranks["expert_parallel"];
    assert_eq!((&ranks["row_bytes"], &ranks["overall"]["weight_dispatch_bytes"]), (&Value::Null, &Value::Null));
    assert!(ranks["overall"]["busiest_mean"].is_number());
    assert!(shown(&t.path, "report", &["--ep", "4"]).contains("unknown bytes"));
    assert!(shown(&t.path, "inspect", &["--check"]).contains("unknown bytes"));
    specprof().arg("export").arg(&t.path).args(["--format", "perfetto"]).assert().code(2).stderr(contains("no times"));
}

#[test]
fn a_comparison_does_not_take_the_unknown_for_the_same() {
    let t = imported();
    // With itself: allowed, and what neither says is named.
    specprof().arg("diff").arg(&t.path).arg(&t.path).assert().success().stderr("").stdout(contains("neither run says its"));
    // One run says its sampling and device, the other does not.
    let mut known = t.report();
    known["run"]["sampling"] =
        serde_json::json!({"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 1, "max_new_tokens": 9, "ignore_eos": false});
    known["run"]["device"] = serde_json::json!({"kind": "cuda", "name": "H200", "units": 132});
    let path = t.dir.path().join("known.json");
    std::fs::write(&path, known.to_string()).unwrap();
    let refused = specprof().arg("diff").arg(&path).arg(&t.path).assert().code(2);
    refused.stderr(contains("workload: temperature 0").and(contains("against unknown")).and(contains("--allow device,workload")));
    specprof().arg("diff").arg(&path).arg(&t.path).args(["--allow", "device,workload"]).assert().success();
    let diff = specprof().arg("diff").arg(&t.path).arg(&t.path).args(["--format", "json"]).assert().success();
    let diff: Value = serde_json::from_slice(&diff.get_output().stdout).unwrap();
    assert_eq!(diff["base"]["draft_len"], 3);
}

#[test]
fn a_trace_without_windows_shows_loads() {
    let t = import(&[text(&data("r3/moe_layers_only_shift1_int32.npy")), "--layers", "moe-only", "--first-dense", "1", "--experts", "64"]);
    let said = shown(&t.path, "report", &[]);
    assert!(said.contains("most uneven is layer") && said.contains("max / mean"), "{said}");
    let report = t.report();
    assert!(report["overall"].is_null() && report["layers"][0]["load"]["effective_experts"].is_number());
    // Without the number of experts a load has nothing to be compared with.
    let t = import(&[text(&data("r3/moe_layers_only_shift1_int32.npy")), "--layers", "moe-only", "--first-dense", "1"]);
    let report = t.report();
    assert!(report["layers"][0]["load"].is_null() && report["layers"][0]["load_by_expert"].is_array());
    assert_eq!(report["run"]["model"]["experts_known"], false);
    assert!(shown(&t.path, "report", &[]).contains("at least"));
}

#[test]
fn acceptance_or_times_alone_with_a_configuration_keep_every_rule() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    for (k, known) in [(r#","num_experts_per_tok":8"#, 8), ("", 0)] {
        let text_of = format!(r#"{{"num_hidden_layers":6,"first_k_dense_replace":1,"num_experts":128{k}}}"#);
        std::fs::write(&config, text_of).unwrap();
        for file in ["acceptance/vllm_stream_sse.txt", "kineto/synthetic_cuda_graph_steps.json"] {
            let t = import(&[text(&data(file)), "--model-config", text(&config)]);
            let model = &t.manifest().model;
            assert_eq!((model.experts_per_token, model.experts, model.moe_layers.len()), (known, 128, 5), "{file}");
            t.report();
        }
    }
}

#[test]
fn windows_of_more_drafts_than_rows_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.json");
    // Nothing of such a size is made before it is refused.
    let response = r#"{"id":"a","choices":[{"index":0}],"usage":{"prompt_tokens":2,"completion_tokens":2},
        "metrics":{"speculative_decoding":{"num_spec_steps":1,"per_step_accepted":[1],"per_step_drafted":[4294967295]}}}"#;
    std::fs::write(&path, response).unwrap();
    assert!(refused(&["vllm", text(&path)]).contains("request a: 4294967295 drafts in a step"));
}
