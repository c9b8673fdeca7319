//! `specprof record` and `specprof demo` from outside: traces, exit codes, errors, Ctrl-C.

use crate::speculation::NANO;
use assert_cmd::Command;
use specprof::record::{Options, Plan, Progress, record, workload};
use specprof::trace::manifest::{Verification, WindowCompleteness};
use specprof::trace::{Component, FinishReason, Module, Phase, Trace, validate};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn specprof(dir: &Path) -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.current_dir(dir).args(["record", "--model", "demo"]);
    command
}

/// Runs `record` with a model and arguments; gives exit code, stdout and stderr.
fn outcome(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let out = Command::cargo_bin("specprof").unwrap().current_dir(dir).arg("record").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

fn prompts(dir: &Path, lines: &str) -> PathBuf {
    let path = dir.join("p.jsonl");
    std::fs::write(&path, lines).unwrap();
    path
}

const PROMPTS: &str = "{\"id\": \"code\", \"prompt\": \"def main():\\n\", \"tags\": {\"kind\": \"code\"}}\n\
    {\"messages\": [{\"role\": \"user\", \"content\": \"Write the function size: Return the size.\"}], \"enable_thinking\": false, \"max_new_tokens\": 5}\n\
    {\"token_ids\": [258, 339, 355], \"tags\": [\"a\", \"b\"]}\n";

#[test]
fn a_recording_is_a_valid_trace_and_says_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    prompts(dir.path(), PROMPTS);
    let args =
        ["--prompts", "p.jsonl", "--max-new-tokens", "20", "--ignore-eos", "--baseline-steps", "4", "--router-probs", "--store-text"];
    let out = specprof(dir.path()).args(args).assert().code(0);
    let (stdout, stderr) = (String::from_utf8_lossy(&out.get_output().stdout), String::from_utf8_lossy(&out.get_output().stderr));
    assert_eq!(stdout, "traces/ling-nano-mtp-1\n");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("3 requests") && stderr.contains("45 tokens") && stderr.contains("tokens per verify step"), "{stderr}");

    let trace = Trace::open(&dir.path().join("traces/ling-nano-mtp-1")).unwrap();
    let validation = validate(&trace).unwrap();
    assert_eq!(validation.failed(), 0, "{validation:#?}");
    let manifest = trace.manifest();
    assert!(manifest.complete && !manifest.emulated && manifest.router_weights && manifest.text_stored);
    assert_eq!((manifest.drafter.kind.as_str(), manifest.drafter.draft_len), ("mtp", Some(3)));
    assert_eq!((manifest.verification, manifest.window_completeness), (Verification::Exact, WindowCompleteness::Full));
    let model = &manifest.model;
    assert_eq!((model.moe_layers.as_slice(), model.draft_layers.as_slice()), ([1, 2, 3, 4, 5].as_slice(), [6].as_slice()));
    // Three BF16 matrices of 128 x 32.
    assert_eq!((model.quantisation.as_str(), model.bytes_per_expert), ("bf16", Some(3 * 128 * 32 * 2)));
    assert_eq!(model.identity.as_deref(), Some(NANO.identity.as_str()));
    assert_eq!(manifest.device.kind, "cpu");

    let requests = trace.requests().unwrap();
    let facts: Vec<_> = requests.iter().map(|r| (r.id.as_str(), r.generated_tokens, r.finish_reason, r.tags.as_str())).collect();
    let length = FinishReason::Length;
    assert_eq!(facts, [("code", 20, length, "{\"kind\":\"code\"}"), ("", 5, length, "{}"), ("", 20, length, "[\"a\",\"b\"]")]);
    assert_eq!(requests[0].prompt_text.as_deref(), Some("def main():\n"));
    assert!(requests[1].prompt_text.as_ref().unwrap().ends_with("<role>ASSISTANT</role>\n<think></think>"));
    assert!(requests.iter().all(|r| r.output_text.as_ref().is_some_and(|t| !t.is_empty())));
    let steps = trace.steps().unwrap();
    assert_eq!(steps.phase.iter().filter(|p| **p == Phase::Decode).count(), 4);

    // The next one gets the next name; a named one is not overwritten without --force, and only a trace is with it.
    let again = ["--prompt", "x", "--max-new-tokens", "2"];
    specprof(dir.path()).args(again).assert().code(0).stdout("traces/ling-nano-mtp-2\n");
    let (code, stdout, stderr) = outcome(dir.path(), &["--model", "demo", "--prompt", "x", "--out", "traces/ling-nano-mtp-1"]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("traces/ling-nano-mtp-1") && stderr.contains("--force"), "{stderr}");
    specprof(dir.path()).args(again).args(["--out", "traces/ling-nano-mtp-1", "--force"]).assert().code(0);
    assert_eq!(Trace::open(&dir.path().join("traces/ling-nano-mtp-1")).unwrap().requests().unwrap().len(), 1);
    std::fs::create_dir(dir.path().join("mine")).unwrap();
    std::fs::write(dir.path().join("mine/file"), "x").unwrap();
    specprof(dir.path()).args(again).args(["--out", "mine", "--force"]).assert().code(2);
    assert!(dir.path().join("mine/file").exists());
}

#[test]
fn operations_are_timed_by_step_layer_and_component_unless_switched_off() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--prompt", "import os\n", "--max-new-tokens", "24", "--ignore-eos", "--baseline-steps", "2"];
    specprof(dir.path()).args(args).args(["--out", "on"]).assert().code(0);
    specprof(dir.path()).args(args).args(["--out", "off", "--kernels", "off"]).assert().code(0);
    let open = |name: &str| Trace::open(&dir.path().join(name)).unwrap();
    let (on, off) = (open("on"), open("off"));
    assert_eq!(on.manifest().token_hash, off.manifest().token_hash, "looking at the clock changes no token");
    assert!(!off.has_kernels() && off.manifest().instrumentation.copy_gb_per_s.is_none());
    assert!(on.manifest().instrumentation.copy_gb_per_s.unwrap() > 0.0);
    for trace in [&on, &off] {
        assert_eq!(validate(trace).unwrap().failed(), 0, "{:#?}", validate(trace).unwrap());
    }
    let steps = on.steps().unwrap();
    let kernels = on.kernels().unwrap();
    assert!(kernels.iter().all(|(_, k)| k.name.starts_with("cpu.") && k.grid.is_none() && k.stream.is_none()));
    for i in 0..steps.len() {
        let of_step: Vec<_> = kernels.iter().filter(|k| k.0 == steps.step_id[i]).map(|k| &k.1).collect();
        // One after the other, all within the step.
        assert!(of_step.windows(2).all(|pair| pair[0].end_ns <= pair[1].begin_ns), "step {i}: {of_step:?}");
        assert!(of_step[0].begin_ns >= steps.host_begin_ns[i] && of_step.last().unwrap().end_ns <= steps.host_end_ns[i]);
        let count = |component: Component, layer: Option<u16>| {
            of_step.iter().filter(|k| k.component == component && k.layer == layer && k.module == Module::Target).count()
        };
        let moe = &on.manifest().model.moe_layers;
        assert!(moe.iter().all(|&l| count(Component::Experts, Some(l)) == 2 && count(Component::Router, Some(l)) == 1));
        assert!(moe.iter().all(|&l| count(Component::Kda, Some(l)) + count(Component::Mla, Some(l)) == 1));
        assert_eq!((count(Component::Dense, Some(0)), count(Component::Head, None), count(Component::Commit, None)), (1, 1, 1));
        let drafts = of_step.iter().filter(|k| k.name == "cpu.draft.head").count();
        assert_eq!(drafts, if steps.phase[i] == Phase::Verify { 3 } else { 0 }, "a head pass a draft");
        assert!(of_step.iter().all(|k| (k.module == Module::Draft) == (k.component == Component::Draft)));
    }
}

#[test]
fn the_same_command_gives_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let hash = |args: &[&str], out: &str| {
        let all = [&["--prompt", "import os\n", "--prompt", "class A:\n", "--max-new-tokens", "24", "--out", out], args].concat();
        specprof(dir.path()).args(all).assert().code(0);
        Trace::open(&dir.path().join(out)).unwrap().manifest().token_hash.clone().unwrap()
    };
    let greedy = hash(&[], "a");
    assert_eq!(greedy, hash(&["--draft", "none"], "b"));
    assert_eq!(greedy, hash(&["--draft", "ngram", "--draft-len", "5", "--telemetry", "off"], "c"));
    let sampled = ["--temperature", "0.8", "--top-p", "0.95", "--top-k", "20", "--seed", "3"];
    assert_eq!(hash(&sampled, "d"), hash(&sampled, "e"));
    assert_ne!(hash(&sampled, "f"), greedy);
}

#[test]
fn what_cannot_be_done_is_said_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tiny8/checkpoint");
    let tiny = tiny.to_str().unwrap();
    prompts(dir.path(), "{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n");
    std::fs::write(dir.path().join("ids.jsonl"), "{\"token_ids\": [1, 99999]}").unwrap();
    std::fs::write(dir.path().join("long.jsonl"), "{\"prompt\": \"a\", \"max_new_tokens\": 5000}").unwrap();
    std::fs::write(dir.path().join("empty.jsonl"), "\n").unwrap();
    std::fs::write(dir.path().join("blank.jsonl"), "{\"prompt\": \"\"}").unwrap();
    std::fs::write(dir.path().join("chat.jsonl"), "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}").unwrap();
    let before = std::fs::read_dir(dir.path()).unwrap().count();
    let demo = ["--model", "demo", "--prompt", "x"];
    let file = |name| ["--model", "demo", "--prompts", name];
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&[&demo[..], &["--backend", "cuda"]].concat(), 3, &["--backend cuda", "--backend cpu"]),
        (&[&demo[..], &["--kernels", "cupti"]].concat(), 3, &["--kernels cupti", "CPU"]),
        (&[&demo[..], &["--draft", "dspark"]].concat(), 2, &["--draft dspark", "--draft-model DIR"]),
        (&[&demo[..], &["--draft-model", "x"]].concat(), 2, &["--draft-model"]),
        (&[&demo[..], &["--draft-len", "0"]].concat(), 2, &["--draft-len"]),
        (&[&demo[..], &["--draft-len", "16"]].concat(), 2, &["--draft-len"]),
        (&[&demo[..], &["--max-new-tokens", "0"]].concat(), 2, &["--max-new-tokens"]),
        (&[&demo[..], &["--temperature", "-1"]].concat(), 2, &["temperature -1"]),
        (&[&demo[..], &["--top-p", "0"]].concat(), 2, &["top-p 0"]),
        (&["--model", "demo"], 2, &["--prompts <FILE.jsonl>", "--prompt <TEXT>", "--workload <NAME>"]),
        (&["--model", "no/such/dir", "--prompt", "x"], 2, &["no/such/dir"]),
        (&["--model", tiny, "--prompt", "x"], 2, &["no MTP block", "--draft ngram", "--draft none"]),
        (&file("p.jsonl"), 2, &["p.jsonl:2", "`promt`"]),
        (&file("ids.jsonl"), 2, &["ids.jsonl:1", "99999", "2047"]),
        (&file("long.jsonl"), 2, &["long.jsonl:1", "5000", "2048"]),
        (&file("empty.jsonl"), 2, &["empty.jsonl", "no prompts"]),
        (&file("blank.jsonl"), 2, &["blank.jsonl:1", "no tokens"]),
        (&file("none.jsonl"), 2, &["none.jsonl"]),
        (&["--model", tiny, "--prompts", "chat.jsonl", "--draft", "none"], 2, &["chat.jsonl:1", "chat template"]),
        (&[&demo[..], &["--out", "p.jsonl"]].concat(), 2, &["p.jsonl"]),
        (&[&demo[..], &["--out", "p.jsonl/below"]].concat(), 2, &["p.jsonl"]),
    ];
    for (args, want, words) in cases {
        let (code, stdout, stderr) = outcome(dir.path(), args);
        assert_eq!((code, stdout.as_str()), (*want, ""), "{args:?}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{args:?}: {stderr}");
        let ours = stderr.lines().filter(|l| l.starts_with("error:")).count();
        assert_eq!(ours, 1, "{args:?}: {stderr}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), before, "{args:?} left something behind");
    }
    // A model without the block records with what was named as the way out.
    let (code, _, stderr) = outcome(dir.path(), &["--model", tiny, "--prompt", "the the the", "--draft", "ngram", "--max-new-tokens", "8"]);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn a_stopped_recording_is_closed_and_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let texts = workload::from_texts(&["def f(x):\n".to_owned(), "class B:\n".to_owned()]);
    let plan = Plan::new(&NANO, &texts, Options { max_new_tokens: 60, ignore_eos: true, ..Options::default() }).unwrap();
    let stop = AtomicBool::new(false);
    let mut at_stop = 0;
    let recording = record(&plan, &path, false, true, &stop, &mut |p| {
        let Progress::Running(p) = p else { return };
        at_stop = p.totals.steps;
        stop.store(p.totals.steps == 5, Ordering::Relaxed);
    })
    .unwrap();
    assert!(recording.totals.interrupted);
    assert_eq!((recording.totals.steps, at_stop), (5, 5));
    let trace = Trace::open(&path).unwrap();
    assert_eq!((trace.manifest().complete, trace.manifest().incomplete_reason.as_deref()), (false, Some("interrupted")));
    assert_eq!(validate(&trace).unwrap().failed(), 0);
    assert_eq!((trace.steps().unwrap().len(), trace.requests().unwrap()[0].finish_reason), (5, FinishReason::Aborted));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_with_130_and_keeps_what_was_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("specprof"))
        .args(["record", "--model", "demo", "--prompt", "a", "--max-new-tokens", "2000", "--ignore-eos", "--draft", "none", "--out"])
        .arg(&path)
        .args(std::iter::repeat_n(["--prompt", "b"], 200).flatten())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Some steps must be on disk before the signal.
    let begin = Instant::now();
    while !Trace::open(&path).is_ok_and(|t| t.tables().iter().any(|table| table.name == "steps" && table.rows > 0)) {
        assert!(begin.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none(), "no step was ever written");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("interrupted") && stderr.contains("incomplete"), "{stderr}");
    let trace = Trace::open(&path).unwrap();
    assert_eq!(trace.manifest().incomplete_reason.as_deref(), Some("interrupted"));
    assert_eq!(validate(&trace).unwrap().failed(), 0);
    assert_eq!(trace.requests().unwrap().last().unwrap().finish_reason, FinishReason::Aborted);
}

#[test]
fn the_demo_needs_nothing_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let demo = || {
        let mut command = Command::cargo_bin("specprof").unwrap();
        command.current_dir(dir.path()).env("TMPDIR", dir.path()).arg("demo");
        command
    };
    let begin = Instant::now();
    let out = demo().assert().code(0);
    assert!(begin.elapsed() < Duration::from_secs(60), "the demo took {:?}", begin.elapsed());
    let stdout = String::from_utf8_lossy(&out.get_output().stdout).into_owned();
    assert!(stdout.contains("ling-nano") && stdout.contains("layer"), "{stdout}");
    for cost in ["CPU wall times", "per distinct expert", "component", "unattributed", "whole step"] {
        assert!(stdout.contains(cost), "{cost} in {stdout}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the demo left something behind");
    demo().args(["--out", "kept"]).assert().code(0);
    let trace = Trace::open(&dir.path().join("kept")).unwrap();
    assert_eq!(validate(&trace).unwrap().failed(), 0);
    assert!(trace.requests().unwrap().len() >= 6);
}

/// One step in two is timed: the run itself says what timing costs, or why nobody knows.
#[test]
fn what_timing_costs_is_measured_in_the_run() {
    let dir = tempfile::tempdir().unwrap();
    for (tokens, every, known) in [("64", "2", true), ("12", "2", false), ("64", "1", false)] {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let args = ["record", "--model", "demo", "--prompt", "def main():", "--draft", "none", "--ignore-eos", "--force", "--out", "t"];
        let out = command.current_dir(dir.path()).args(args).args(["--max-new-tokens", tokens, "--kernel-every", every]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let trace = Trace::open(&dir.path().join("t")).unwrap();
        let share = trace.manifest().instrumentation.overhead_share;
        assert_eq!(share.is_some(), known, "{tokens} tokens, one in {every}: {share:?}");
        assert!(share.is_none_or(|share| share.is_finite() && share > -1.0), "{share:?}");
        let told: Vec<_> = trace.manifest().warnings.iter().filter(|w| w.code == "overhead_unknown").collect();
        // Without untimed steps nothing was to be measured.
        assert_eq!(told.len(), usize::from(!known && every != "1"), "{told:?}");
        assert!(told.iter().all(|w| w.message.contains("10 are needed")), "{told:?}");
    }
}
