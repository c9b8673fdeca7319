//! `record --kernels-pass second`: kernels of a second pass under the steps of the first.

use crate::cuda::{DEMO, cupti, has_warning, labels, record};
use assert_cmd::Command;
use specprof::engine::{Checkpoint, builtin};
use specprof::record::{Options, Plan, Progress, workload};
use specprof::trace::{Trace, validate};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Records on a backend into `name`; gives code, stderr and what was recorded, if anything.
fn passes(dir: &Path, backend: &str, name: &str, args: &[&str], knobs: &[(&str, &str)]) -> (i32, String, Option<Trace>) {
    let library = cupti();
    let all = [&DEMO[..], &["--telemetry", "off", "--force", "--backend", backend, "--out", name], args].concat();
    let (code, _, stderr) = record(dir, &all, &[&[("SPECPROF_CUPTI", library.as_str())][..], knobs].concat());
    (code, stderr, Trace::open(&dir.join(name)).ok())
}

/// The trace is that of one pass, the kernels' own times apart: tokens, steps, and every step's kernels with their labels.
#[test]
fn the_kernels_of_a_second_pass_are_those_of_the_first_pass_s_steps() {
    let dir = tempfile::tempdir().unwrap();
    let counted = ["--baseline-steps", "8"];
    for (backend, args) in
        [("cpu", &["--kernels", "auto"][..]), ("cuda", &["--kernels", "cupti"]), ("cuda", &["--kernels", "cupti", "--kernel-every", "3"])]
    {
        let (code, stderr, same) = passes(dir.path(), backend, "same", &[&counted, args].concat(), &[]);
        assert_eq!(code, 0, "{backend}: {stderr}");
        let (code, stderr, trace) = passes(dir.path(), backend, "second", &[&counted, args, &["--kernels-pass", "second"]].concat(), &[]);
        assert_eq!(code, 0, "{backend}: {stderr}");
        let (same, trace) = (same.unwrap(), trace.unwrap());
        assert_eq!(validate(&trace).unwrap().failed(), 0, "{backend}");
        let (one, two) = (same.manifest(), trace.manifest());
        assert!(two.complete && two.token_hash.is_some() && one.token_hash == two.token_hash, "{backend}");
        let (a, b) = (same.steps().unwrap(), trace.steps().unwrap());
        assert_eq!((&a.step_id, &a.request_id, &a.rows, &a.accepted), (&b.step_id, &b.request_id, &b.rows, &b.accepted), "{backend}");
        let pass = two.instrumentation.second_pass.as_ref().unwrap();
        assert_eq!((pass.steps, Some(&pass.token_hash)), (b.len() as u64, two.token_hash.as_ref()), "{backend}");
        assert!(one.instrumentation.second_pass.is_none() && has_warning(&trace, "kernels_second_pass"), "{backend}");
        // All of them ran when all steps were over.
        let (first_s, second_s) = (same.kernels().unwrap(), trace.kernels().unwrap());
        let end = b.host_end_ns.iter().max().unwrap();
        assert!(pass.started_unix_ns >= *end && second_s.iter().all(|(_, k)| k.begin_ns >= *end), "{backend}: {pass:?}, {end}");
        let named = |kernels: &[(u32, specprof::trace::KernelEvent)]| {
            let mut all: Vec<_> = kernels.iter().map(|(step, k)| (*step, k.layer, k.component, k.name.to_string())).collect();
            all.sort();
            all
        };
        assert!(second_s.len() > 200 && named(&first_s) == named(&second_s), "{backend}: {} {}", first_s.len(), second_s.len());
        if backend == "cuda" {
            assert_eq!(labels(&same), labels(&trace));
            let (profiler, graphs) = (two.instrumentation.profiler.as_ref().unwrap(), two.instrumentation.graphs.unwrap());
            let timed: BTreeSet<u32> = second_s.iter().map(|(step, _)| *step).collect();
            assert_eq!((profiler.steps, profiler.missing), (timed.len() as u64, 0));
            assert!(graphs.launches > 0 && !has_warning(&trace, "kernels_timed_by_events"));
        }
    }
}

/// Reports take the times as they take any other's, and say where they are from; a timeline keeps both passes apart.
#[test]
fn reports_and_timelines_of_a_second_pass() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kernels-pass", "second", "--baseline-steps", "8", "--max-new-tokens", "40"];
    let args = [&DEMO[..6], &["--telemetry", "off", "--out", "t"], &args].concat();
    let (code, _, stderr) = record(dir.path(), &args, &[]);
    assert_eq!(code, 0, "{stderr}");
    let run = |args: &[&str]| {
        let out = Command::cargo_bin("specprof").unwrap().current_dir(dir.path()).args(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap()
    };
    let report = run(&["report", "t", "--format", "json"]);
    assert!(
        report["cost"]["attribution"].as_array().unwrap().len() > 5 && report["cost"]["verify_ratio"].is_number(),
        "{}",
        report["cost"]
    );
    assert!(report["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "kernels_second_pass"));
    let timeline = run(&["export", "t", "--format", "perfetto", "-o", "-"]);
    let events = timeline["traceEvents"].as_array().unwrap();
    let begins: Vec<f64> = events.iter().filter(|e| e["ph"] == "X" || e["ph"] == "B").map(|e| e["ts"].as_f64().unwrap()).collect();
    assert!(begins.len() > 500 && begins.is_sorted(), "{} slices", begins.len());
    assert!(events.iter().any(|e| e["args"]["name"] == "layers (each spans its pass)"));
}

/// What is told beside the memory plan.
fn errors(stderr: &str) -> Vec<&str> {
    stderr.lines().filter(|line| !line.starts_with("memory: ")).collect()
}

/// A device that does not repeat itself: the passes differ, and nobody takes the times of one for the other's.
#[test]
fn passes_that_differ_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    // The first context is the first pass's; a process of its own has looked at the device.
    let bad = [("EMU_BAD_CONTEXT", "2")];
    let (code, stderr, trace) = passes(dir.path(), "cuda", "differs", &["--kernels-pass", "second"], &bad);
    assert!(code == 1 && errors(&stderr).len() == 1, "{code} {stderr}");
    for words in ["--kernels-pass second", "request 0 is not the same step in both", "differs keeps the first", "--self-check"] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    let trace = trace.unwrap();
    let manifest = trace.manifest();
    assert!(!manifest.complete && manifest.incomplete_reason.as_ref().unwrap().contains("second pass"), "{manifest:?}");
    assert!(trace.steps().unwrap().len() > 10 && manifest.instrumentation.second_pass.is_none());
    // The check of a run with nothing recorded finds it as well.
    let (code, stderr, _) = passes(dir.path(), "cuda", "checked", &["--self-check", "--kernels", "off"], &bad);
    assert!(code == 1 && stderr.contains("emitted other tokens"), "{code} {stderr}");
}

/// What is missing is said before the first pass where it can be seen, and leaves the first pass where it cannot.
#[test]
fn a_second_pass_without_its_profiler_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kernels", "cupti", "--kernels-pass", "second"];
    let (code, stderr, trace) = passes(dir.path(), "cuda", "nowhere", &args, &[("SPECPROF_CUPTI", "/nowhere/libcupti.so")]);
    assert!(code == 3 && stderr.contains("cannot be loaded") && trace.is_none(), "{code} {stderr}");
    let (code, stderr, trace) = passes(dir.path(), "cuda", "denied", &args, &[("EMU_CUPTI_DENIED", "1")]);
    assert!(code == 3 && errors(&stderr).len() == 1 && stderr.contains("no permission"), "{code} {stderr}");
    assert!(!trace.unwrap().manifest().complete);
    let (code, stderr, trace) = passes(dir.path(), "cuda", "auto", &["--kernels-pass", "second"], &[("EMU_CUPTI_DENIED", "1")]);
    assert!(code == 0 && has_warning(&trace.unwrap(), "kernels_timed_by_events"), "{code} {stderr}");
    let (code, stderr, trace) = passes(dir.path(), "cpu", "off", &["--kernels", "off", "--kernels-pass", "second"], &[]);
    assert!(code == 0 && stderr.contains("--kernels-pass has no effect"), "{code} {stderr}");
    assert!(trace.unwrap().manifest().instrumentation.second_pass.is_none());
}

#[test]
fn a_second_pass_that_is_stopped_leaves_an_incomplete_trace() {
    let dir = tempfile::tempdir().unwrap();
    let model = Checkpoint::load(builtin::ling_nano()).unwrap();
    let prompts = workload::parse(b"{\"prompt\": \"def main():\"}\n", Path::new("p.jsonl")).unwrap();
    let options = Options { max_new_tokens: 24, second_pass: true, ..Options::default() };
    let plan = Plan::new(&model, &prompts, options).unwrap();
    let stop = AtomicBool::new(false);
    let mut progress = |p: Progress| {
        if let Progress::Running(p) = p
            && p.second_pass
            && p.totals.steps == 3
        {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let recording = specprof::record::record(&plan, &dir.path().join("t"), false, false, &stop, &mut progress).unwrap();
    let trace = Trace::open(&dir.path().join("t")).unwrap();
    assert!(recording.totals.interrupted && !trace.manifest().complete);
    assert_eq!(trace.manifest().incomplete_reason.as_deref(), Some("interrupted"));
    let timed: BTreeSet<u32> = trace.kernels().unwrap().iter().map(|(step, _)| *step).collect();
    assert!(timed.len() == 3 && trace.steps().unwrap().len() > 5, "{timed:?}");
    assert_eq!(trace.manifest().instrumentation.second_pass.as_ref().unwrap().steps, 3);
}
