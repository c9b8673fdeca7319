//! `--model synthetic:SHAPE` and `--routing`: made-up weights and planned experts, labelled as such everywhere.

use assert_cmd::Command;
use specprof::trace::{Trace, validate};
use std::path::Path;

/// Exit code, stdout and stderr.
fn specprof(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let out = Command::cargo_bin("specprof").unwrap().current_dir(dir).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

fn record(dir: &Path, out: &str, args: &[&str]) -> Trace {
    let all = [&["record", "--out", out, "--force", "--telemetry", "off", "--kernels", "off"], args].concat();
    let (code, _, stderr) = specprof(dir, &all);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    let trace = Trace::open(&dir.join(out)).unwrap();
    assert_eq!(validate(&trace).unwrap().failed(), 0, "{args:?}");
    trace
}

fn report(dir: &Path, trace: &str) -> serde_json::Value {
    let (code, stdout, stderr) = specprof(dir, &["report", trace, "--format", "json"]);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn synthetic_models_of_every_storage_are_recorded_and_labelled() {
    let dir = tempfile::tempdir().unwrap();
    for (quant, bytes) in [("bf16", 24_576), ("fp8", 12_300), ("mxfp4", 6_528), ("int4", 6_912)] {
        let args =
            ["--model", "synthetic:ling-nano", "--quant", quant, "--prompt-tokens", "12", "--requests", "2", "--max-new-tokens", "12"];
        let trace = record(dir.path(), quant, &args);
        let model = &trace.manifest().model;
        assert!(model.synthetic && model.quantisation == quant, "{model:?}");
        assert_eq!((model.name.as_str(), model.bytes_per_expert), (format!("synthetic-ling-nano-{quant}").as_str(), Some(bytes)));
        let json = report(dir.path(), quant);
        assert_eq!(json["run"]["model"]["synthetic"], true);
        assert!(json["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "synthetic_weights"), "{json}");
        let (_, shown, _) = specprof(dir.path(), &["model", "synthetic:ling-nano", "--quant", quant, "--json"]);
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!((&shown["source"], &shown["bytes_per_expert"]), (&"synthetic".into(), &bytes.into()));
    }
    for format in ["text", "markdown", "html"] {
        let (_, text, _) = specprof(dir.path(), &["report", "fp8", "--format", format]);
        assert!(text.contains("synthetic-ling-nano-fp8") && text.contains("weights are made up"), "{format}: {text}");
    }
}

/// The same shape with other weights is another model, whatever the storage.
#[test]
fn synthetic_and_real_models_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    let common = ["--prompt", "import os", "--prompt", "def f(", "--max-new-tokens", "16"];
    record(dir.path(), "real", &[&["--model", "demo"][..], &common].concat());
    for quant in ["bf16", "fp8"] {
        record(dir.path(), quant, &[&["--model", "synthetic:ling-nano", "--quant", quant][..], &common].concat());
        let (code, _, stderr) = specprof(dir.path(), &["diff", "real", quant, "--allow", "quantisation"]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("model") && stderr.contains("synthetic"), "{stderr}");
        let (code, _, stderr) = specprof(dir.path(), &["diff", "real", quant, "--allow", "model,quantisation"]);
        // Compared, and found worse: nothing that it drafts is what it says.
        assert!(code == 1 && stderr.contains("acceptance.tokens_per_step"), "{code} {stderr}");
    }
}

#[test]
fn planned_routing_has_its_known_statistics_in_the_report() {
    let dir = tempfile::tempdir().unwrap();
    let common = ["--model", "demo", "--prompt-tokens", "8", "--requests", "6", "--max-new-tokens", "120", "--ignore-eos", "--seed", "5"];
    let overall = |plan: &str| {
        let trace = record(dir.path(), "planned", &[&common[..], &["--routing", plan]].concat());
        assert_eq!(trace.manifest().model.routing.as_deref(), Some(plan));
        let json = report(dir.path(), "planned");
        assert!(json["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "planned_routing"));
        json["overall"].clone()
    };
    let uniform = overall("uniform");
    let (mean, expected) = (uniform["union"]["mean"].as_f64().unwrap(), uniform["uniform_union"].as_f64().unwrap());
    assert!((mean - expected).abs() < 0.15, "{mean} and {expected}");
    let overlap = overall("overlap:0.7");
    let lag = overlap["lag_overlap_frac"][1].as_f64().unwrap();
    assert!((lag - 0.7).abs() < 0.03, "{lag}");
    let zipf = overall("zipf:1.5");
    // Popular experts make windows overlap; independent rows of that popularity explain it.
    let (mean, popular) = (zipf["union"]["mean"].as_f64().unwrap(), zipf["popularity_union"].as_f64().unwrap());
    assert!(mean < expected - 2.0 && (mean - popular).abs() < 0.35, "{mean} {popular} {expected}");
}

/// A plan is a function of the position: greedy speculation still gives the text of plain decoding.
#[test]
fn planned_speculation_equals_plain_decoding() {
    let dir = tempfile::tempdir().unwrap();
    for plan in ["uniform", "zipf:1", "overlap:0.5"] {
        let hash = |draft: &str| {
            let args = ["--model", "demo", "--prompt", "class A:", "--max-new-tokens", "40", "--routing", plan, "--draft", draft];
            record(dir.path(), draft, &args).manifest().token_hash.clone().unwrap()
        };
        assert_eq!(hash("mtp"), hash("none"), "{plan}");
    }
}

#[test]
fn what_cannot_be_done_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    for (args, code, words) in [
        (&["--model", "synthetic:ling-4", "--prompt-tokens", "4"][..], 2, "synthetic:ling-nano"),
        (&["--model", "demo", "--quant", "fp8", "--prompt-tokens", "4"], 2, "--quant goes with --model synthetic:SHAPE"),
        (&["--model", "demo", "--routing", "overlap:0.01", "--prompt-tokens", "4"], 2, "share 0.0625 already"),
        (&["--model", "demo", "--routing", "zipf", "--prompt-tokens", "4"], 2, "none of model, uniform, zipf:S, overlap:F"),
        (&["--model", "demo", "--prompt-tokens", "4000"], 2, "do not fit the model's context of 2048"),
        (&["--model", "synthetic:ling-3.0-flash", "--prompt-tokens", "4"], 3, "bytes of weights do not fit into"),
    ] {
        let (found, _, stderr) = specprof(dir.path(), &[&["record", "--out", "x"], args].concat());
        assert!(found == code && stderr.contains(words) && stderr.lines().count() == 1, "{args:?}: {found} {stderr}");
        assert!(!dir.path().join("x").exists());
    }
}
