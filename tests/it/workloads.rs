//! Built-in workloads, warm-up requests and thinking, from the command line to the trace.

use assert_cmd::Command;
use specprof::trace::{Manifest, Trace};
use std::path::Path;

fn record(dir: &Path, args: &[&str]) -> std::process::Output {
    Command::cargo_bin("specprof").unwrap().args(["record", "--model", "demo", "-q", "--out"]).arg(dir).args(args).output().unwrap()
}

fn recorded(args: &[&str]) -> (Trace, Manifest) {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("t");
    let out = record(&dir, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    let trace = Trace::open(&dir).unwrap();
    let manifest = trace.manifest().clone();
    // The part files are open; the directory may go.
    let requests = trace.requests().unwrap();
    assert!(!requests.is_empty());
    std::mem::forget(parent);
    (trace, manifest)
}

#[test]
fn sequences_run_one_after_the_other_with_their_tags() {
    let (trace, manifest) = recorded(&["--workload", "repeat,math", "--max-new-tokens", "6", "--ignore-eos", "--draft", "ngram"]);
    let requests = trace.requests().unwrap();
    assert_eq!((requests.len(), manifest.instrumentation.warmup_requests), (16, Some(0)));
    for (n, request) in requests.iter().enumerate() {
        let tags: serde_json::Value = serde_json::from_str(&request.tags).unwrap();
        assert_eq!(tags["workload"], if n < 8 { "repeat" } else { "math" });
        assert_eq!((request.request_id as usize, request.generated_tokens), (n, 6));
    }
    let steps = trace.steps().unwrap();
    assert!(steps.request_id.is_sorted());
}

#[test]
fn warm_up_requests_are_counted_and_leave_no_trace() {
    let args = ["--workload", "chat", "--max-new-tokens", "5", "--temperature", "0.9", "--seed", "4"];
    let (cold, cold_manifest) = recorded(&args);
    let (warm, warm_manifest) = recorded(&[&args[..], &["--warmup", "11"]].concat());
    assert_eq!((cold_manifest.instrumentation.warmup_requests, warm_manifest.instrumentation.warmup_requests), (Some(0), Some(11)));
    assert_eq!((warm.requests().unwrap().len(), warm_manifest.token_hash), (8, cold_manifest.token_hash));
    let ids = |trace: &Trace| trace.steps().unwrap().step_id;
    assert_eq!((ids(&warm)[0], ids(&warm)), (0, ids(&cold)));
}

#[test]
fn thinking_is_said_to_the_template() {
    let first_prompt = |args: &[&str]| {
        let (trace, _) = recorded(&[&["--workload", "code", "--max-new-tokens", "1", "--store-text"], args].concat());
        trace.requests().unwrap()[0].prompt_text.clone().unwrap()
    };
    let (on, off) = (first_prompt(&["--thinking", "on"]), first_prompt(&["--thinking", "off"]));
    assert!(on.contains("detailed thinking on") && on.ends_with("<think>"), "{on}");
    assert!(off.contains("detailed thinking off") && off.ends_with("</think>"), "{off}");
    assert_eq!(first_prompt(&[]), on);
}

#[test]
fn what_does_not_go_together_is_refused_or_said() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("t");
    for (args, code, words) in [
        (&["--workload", "poetry"][..], 2, &["poetry", "repeat"][..]),
        (&["--workload", "chat", "--prompt", "x"], 2, &["--workload", "--prompt"]),
        (&["--max-new-tokens", "3"], 2, &["--prompts", "--prompt <", "--workload"]),
        (&["--prompt", "x", "--draft", "dspark"], 2, &["--draft-model DIR"]),
        (&["--prompt", "x", "--draft-confidence", "0.5"], 2, &["--draft-confidence goes with --draft dspark", "mtp's recorded", "advise"]),
        (&["--workload", "chat", "--requests", "2"], 2, &["--requests goes with --prompt-tokens", "leave prompts out"]),
        (&["--prompt", "x", "--requests", "2"], 2, &["--requests goes with --prompt-tokens"]),
        (&["--prompt", "x", "--draft-confidence", "1.5"], 2, &["--draft-confidence 1.5"]),
        (&["--prompt", "x", "--draft-confidence", "nan"], 2, &["--draft-confidence NaN"]),
        (&["--prompt", "x", "--draft-model", "somewhere"], 2, &["--draft-model goes with --draft dspark"]),
        (&["--prompt", "x", "--draft", "dspark", "--draft-model", "nowhere"], 2, &["nowhere", "does not exist"]),
    ] {
        let out = record(&dir, args);
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{args:?}: {stderr}");
        assert!(!dir.exists(), "{args:?} left something behind");
    }
    let mut command = Command::cargo_bin("specprof").unwrap();
    let args = ["record", "--model", "demo", "--prompt", "x", "--thinking", "on", "--max-new-tokens", "1", "--out"];
    let stderr = String::from_utf8(command.args(args).arg(&dir).output().unwrap().stderr).unwrap();
    assert!(stderr.contains("--thinking has no effect"), "{stderr}");
    assert!(!stderr.contains("--draft-len"), "{stderr}");
    // What drafts is said, and there are no drafts.
    let args = ["record", "--model", "demo", "--prompt", "x", "--draft", "none", "--draft-len", "3", "--max-new-tokens", "2", "--out"];
    let out = Command::cargo_bin("specprof").unwrap().args(args).arg(parent.path().join("plain")).output().unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && stderr.contains("--draft-len has no effect with --draft none"), "{stderr}");
    assert!(stderr.contains("recorded 1 request in 2 steps (0 verify, 1 decode), 2 tokens"), "{stderr}");
}

#[test]
fn a_self_check_that_passes_says_so() {
    let parent = tempfile::tempdir().unwrap();
    let args = ["record", "--model", "demo", "--prompt", "x", "--max-new-tokens", "3", "--self-check", "--out"];
    let out = Command::cargo_bin("specprof").unwrap().args(args).arg(parent.path().join("t")).output().unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && stderr.contains("--self-check: passed, the tokens are those"), "{stderr}");
}
