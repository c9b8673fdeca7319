//! `specprof advise`, groups, ranks and several traces, from outside and against the independent recomputation.

use crate::report::{recomputed, report};
use crate::trace::small;
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::Synth;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const PROMPTS: &str = "{\"prompt\": \"import os\\n\", \"tags\": {\"kind\": \"code\"}}\n\
    {\"prompt\": \"def main(argv):\\n\", \"id\": \"main\", \"tags\": {\"kind\": \"code\", \"long\": true}}\n\
    {\"prompt\": \"class A:\\n\", \"tags\": [\"class\"]}\n\
    {\"prompt\": \"Once upon a time\", \"tags\": {\"kind\": \"text\"}}\n";

fn specprof(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.args(args).env("COLUMNS", "100").env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
    command
}

/// A recording of the built-in model with gate weights, made once.
fn recorded() -> &'static Path {
    static TRACE: OnceLock<PathBuf> = OnceLock::new();
    TRACE.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("advise-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("p.jsonl"), PROMPTS).unwrap();
        let trace = dir.join("nano");
        let args = [
            "record",
            "--model",
            "demo",
            "--draft-len",
            "4",
            "--max-new-tokens",
            "90",
            "--ignore-eos",
            "--router-probs",
            "--kernels",
            "off",
            "-q",
        ];
        specprof(&args).arg("--prompts").arg(dir.join("p.jsonl")).arg("--out").arg(&trace).arg("--force").assert().success();
        trace
    })
}

fn json(command: &mut Command) -> Value {
    let done = command.assert().success();
    serde_json::from_slice(&done.get_output().stdout).unwrap()
}

#[test]
fn sql_agrees_on_advice_groups_and_ranks_of_a_recording() {
    for (by, placement) in [("tag:kind", "contiguous"), ("context", "round-robin"), ("request", "contiguous"), ("layer", "contiguous")] {
        let (report, said) = recomputed(recorded(), &["--by", by, "--ep", "4", "--placement", placement]);
        assert!(said.contains("numbers agree"), "{said}");
        assert_eq!((&report["groups"]["by"], &report["expert_parallel"]["placement"]), (&Value::from(by), &Value::from(placement)));
        assert_eq!(report["advice"]["cost_source"], "model");
        assert!(report["advice"]["confidence"].as_array().is_some_and(|c| c.len() > 5), "mtp knows its probabilities");
        assert!(report["advice"]["expert_budget"].as_array().is_some_and(|b| !b.is_empty()));
        assert!(report["prefill"]["layers"].as_array().is_some_and(|l| !l.is_empty()));
    }
}

#[test]
fn measured_times_are_taken_where_there_are_any() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    let args = ["record", "--model", "demo", "--draft-len", "3", "--max-new-tokens", "70", "--ignore-eos", "--baseline-steps", "24", "-q"];
    specprof(&args)
        .args(["--prompt", "import os\n", "--prompt", "class A:\n", "--prompt", "def f(x):\n"])
        .arg("--out")
        .arg(&trace)
        .assert()
        .success();
    let (report, said) = recomputed(&trace, &[]);
    assert!(said.contains("numbers agree"), "{said}");
    let advice = &report["advice"];
    // A fit of noisy times may give an expert no positive cost; then the recorded length alone has one.
    let slope = report["overall"]["cost"]["us_per_expert"].as_f64();
    let contexts = report["cost"]["contexts"].as_array().unwrap();
    let both = contexts.iter().filter(|c| c["verify_steps"] != 0).map(|c| c["decode_steps"].as_u64().unwrap());
    let source = if both.sum::<u64>() >= 10 { "measured" } else { "model" };
    let told = source == "model" || slope.is_some_and(|s| s > 0.0);
    assert_eq!(advice["other_lengths_unknown_because"].is_null(), told, "{advice}");
    assert!(told || advice["by_draft_len"][1]["speedup"].is_null(), "{advice}");
    assert_eq!(advice["cost_source"], source, "{}", report["cost"]);
    assert!(advice["assumptions"].to_string().contains(if source == "model" {
        "model, not measured"
    } else {
        "measured, wall times of the CPU"
    }));
    if source == "measured" && report["cost"]["contexts"].as_array().unwrap().iter().all(|c| c["decode_steps"] != 0) {
        // At the recorded draft length the ratio is the measured one.
        let last = advice["by_draft_len"].as_array().unwrap().last().unwrap();
        let (found, measured) = (last["step_ratio"].as_f64().unwrap(), report["cost"]["step_ratio"].as_f64().unwrap());
        assert!((found / measured - 1.0).abs() < 1e-9, "{found} {measured}");
        // And so is its interval, where no resample is left out.
        let ends = |of: &Value| of["step_ratio_ci95"].as_array().map(|ends| ends.iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>());
        let (found, measured) = (ends(last).unwrap(), ends(&report["cost"]).unwrap());
        let same = found.iter().zip(&measured).all(|(a, b)| (a / b - 1.0).abs() < 1e-9);
        assert!(same || advice["resamples_left_out"] != 0, "{found:?} {measured:?}");
    }
}

#[test]
fn sql_agrees_on_a_large_synthetic_shape() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    Synth { requests: 4, verify_steps: 25, layers: vec![2, 9, 41], draft_layer: Some(42), rows: 6, ..Synth::default() }
        .write(&trace)
        .unwrap();
    let (report, _) = recomputed(&trace, &["--by", "context", "--ep", "8"]);
    assert_eq!(report["advice"]["by_draft_len"].as_array().unwrap().len(), 6);
    assert_eq!(report["expert_parallel"]["balanced"]["held_out"], true);
}

#[test]
fn advice_is_sentences_first_and_one_json_object() {
    let trace = recorded().to_str().unwrap();
    let text = specprof(&["advise", trace]).assert().success().stderr("");
    let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
    let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what}: {text}"));
    assert!(at("\nadvice ") < at("\nworth ") && at("\nworth ") < at("tokens/step  ") && at("tokens/step  ") < at("\nassumed "));
    assert!(text.contains("by the model of bytes") && text.contains("kind=code"), "{text}");

    let advice = json(&mut specprof(&["advise", trace, "--json"]));
    assert_eq!((advice["schema"].as_str(), advice["advice"]["recorded_draft_len"].as_u64()), (Some("specprof.advice/1"), Some(4)));
    let whole = json(report().arg(trace).args(["--format", "json"]));
    assert_eq!(whole["advice"], advice["advice"], "the report's section is the same");
    // Dearer drafts can only lower every speedup.
    let dear = json(&mut specprof(&["advise", trace, "--json", "--draft-cost", "0.9"]));
    let speedup = |of: &Value, at: usize| of["advice"]["by_draft_len"][at]["speedup"].as_f64().unwrap();
    assert!((1..=4).all(|at| speedup(&dear, at) < speedup(&advice, at)) && speedup(&dear, 0) == 1.0);
    assert!(dear["advice"]["assumptions"].to_string().contains("a draft costs 0.9 decode steps"));

    specprof(&["advise", "nowhere"]).assert().code(2).stdout("").stderr(contains("nowhere"));
    specprof(&["advise", trace, "--draft-cost", "-1"]).assert().code(2);
}

#[test]
fn groups_in_text_and_unknown_tags() {
    let trace = recorded();
    report().arg(trace).args(["--by", "tag:kind"]).assert().success().stdout(contains("(no kind)").and(contains("per rejected")));
    report().arg(trace).args(["--by", "request"]).assert().success().stdout(contains("1 main"));
    report().arg(trace).args(["--by", "tag:kid"]).assert().code(2).stdout("").stderr(contains("`kid`").and(contains("kind")));
    report().arg(trace).args(["--by", "mood"]).assert().code(2).stderr(contains("tag:NAME"));
}

#[test]
fn a_written_placement_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, out) = (recorded(), dir.path().join("balanced.json"));
    let text = report().arg(trace).args(["--ep", "4", "--placement-out"]).arg(&out).assert().success();
    text.stdout(contains("4 ranks, contiguous placement").and(contains("balanced")));
    let written: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    let facts = json(report().arg(trace).args(["--format", "json"]));
    let experts = facts["run"]["model"]["experts"].as_u64().unwrap();
    let rows = written["physical_to_logical_map"].as_array().unwrap();
    assert_eq!(rows.len() as u64, facts["run"]["model"]["layers"].as_u64().unwrap());
    for row in rows {
        let mut slots: Vec<u64> = row.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..experts).collect::<Vec<_>>());
    }
    let with = |placement: &Path| {
        let found = json(report().arg(trace).args(["--ep", "4", "--format", "json", "--placement"]).arg(placement));
        found["expert_parallel"]["overall"]["busiest_mean"].as_f64().unwrap()
    };
    let (file, contiguous) = (with(&out), with(Path::new("contiguous")));
    assert!(file != contiguous && file >= 1.0, "{file} {contiguous}");

    fs::write(&out, "{\"physical_to_logical_map\": [[0, 1]]}").unwrap();
    report()
        .arg(trace)
        .args(["--ep", "4", "--placement"])
        .arg(&out)
        .assert()
        .code(2)
        .stderr(contains("balanced.json").and(contains("1 layers")));
    report().arg(trace).args(["--ep", "4", "--placement", "nowhere.json"]).assert().code(2).stderr(contains("nowhere.json"));
    report().arg(trace).args(["--ep", "9999"]).assert().code(2).stderr(contains("9999 ranks"));
    report().arg(trace).args(["--placement", "contiguous"]).assert().code(2).stderr(contains("--ep"));
}

#[test]
fn several_traces_stand_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("other");
    small().write(&other).unwrap();
    let text = report().arg(recorded()).arg(&other).assert().success();
    text.stdout(
        contains("[1] nano").and(contains("[2] other")).and(contains("tokens per step")).and(contains("effective experts, prefill")),
    );
    let both = json(report().arg(recorded()).arg(&other).args(["--format", "json", "--by", "request"]));
    assert_eq!((both["schema"].as_str(), both["reports"].as_array().map(Vec::len)), (Some("specprof.reports/1"), Some(2)));
    assert_eq!(both["reports"][1]["run"]["name"], "other");
    report().arg(recorded()).arg(&other).args(["--ep", "2", "--placement-out"]).arg(dir.path().join("p")).assert().code(2);
}
