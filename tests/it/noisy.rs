//! Times of a disturbed machine and too little data: every command that rests on them says so.

use crate::report::{recomputed, report};
use crate::trace::edit_manifest;
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::synth::PlantedTimes;
use specprof::trace::{Ending, KernelEvent, Phase, Probe, RequestEvent, StepEvent, Synth, Trace, TraceError, TraceWriter, WriterOptions};
use std::path::{Path, PathBuf};

/// How long the disturbed step lasts.
const LOST_NS: i64 = 1_000_000_000;

/// Lets one decode step take a second more on its way to the writer.
struct Disturbed<'a> {
    to: &'a mut TraceWriter,
    /// Which of the decode steps; `None` for none.
    which: Option<u32>,
    decodes: u32,
    /// By how much the steps behind it are late.
    late: i64,
}

impl Probe for Disturbed<'_> {
    fn wants_weights(&self) -> bool {
        self.to.wants_weights()
    }

    fn wants_kernels(&self) -> bool {
        self.to.wants_kernels()
    }

    fn kernels(&mut self, step_id: u32, mut kernels: Vec<KernelEvent>) -> Result<(), TraceError> {
        kernels.iter_mut().for_each(|k| (k.begin_ns, k.end_ns) = (k.begin_ns + self.late, k.end_ns + self.late));
        self.to.kernels(step_id, kernels)
    }

    fn step(&mut self, mut step: StepEvent) -> Result<(), TraceError> {
        (step.host_begin_ns, step.host_end_ns) = (step.host_begin_ns + self.late, step.host_end_ns + self.late);
        if step.phase == Phase::Decode {
            if self.which == Some(self.decodes) {
                (step.host_end_ns, step.target_host_ns) = (step.host_end_ns + LOST_NS, step.target_host_ns + LOST_NS);
                self.late += LOST_NS;
            }
            self.decodes += 1;
        }
        self.to.step(step)
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.to.request(request)
    }
}

/// Writes a trace of planted times; `requests` have four decode steps each, `which` of them lasts long.
fn planted(dir: &Path, name: &str, requests: u32, which: Option<u32>) -> PathBuf {
    let times = PlantedTimes { base: 177.0, per_expert: 36.0, per_row: 1.0, attention: 90.0, attention_per_row: 3.0, noise: 10.0 };
    let synth = Synth { requests, verify_steps: 20, layers: vec![2, 17], times: Some(times), ..Synth::default() };
    let trace = dir.join(name);
    let mut writer = TraceWriter::create(&trace, synth.manifest(), &WriterOptions { kernels: true, ..WriterOptions::default() }).unwrap();
    synth.emit(&mut Disturbed { to: &mut writer, which, decodes: 0, late: 0 }).unwrap();
    writer.finish(Ending::Complete).unwrap();
    edit_manifest(&trace, |m| m.emulated = false);
    trace
}

fn specprof(args: &[&str], paths: &[&Path]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.args(args).args(paths).env("COLUMNS", "400").env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR").assert()
}

fn json(args: &[&str], paths: &[&Path]) -> Value {
    serde_json::from_slice(&specprof(args, paths).get_output().stdout).unwrap()
}

fn warning<'a>(of: &'a Value, code: &str) -> Option<&'a str> {
    of["warnings"].as_array().unwrap().iter().find(|w| w["code"] == code).and_then(|w| w["message"].as_str())
}

#[test]
fn one_long_step_is_named_wherever_its_time_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (quiet, noisy) = (planted(dir.path(), "quiet", 10, None), planted(dir.path(), "noisy", 10, Some(6)));
    let (calm, said) = recomputed(&quiet, &[]);
    assert!(said.contains("numbers agree") && warning(&calm, "noisy_times").is_none(), "{}", calm["warnings"]);
    assert!(warning(&calm, "few_requests").is_none() && warning(&calm, "few_decode_steps").is_none());
    // SQL agrees on the medians, and that such times are noisy.
    let (report, said) = recomputed(&noisy, &[]);
    assert!(said.contains("numbers agree"), "{said}");
    let cost = |of: &Value, key: &str| of["cost"][key].as_f64().unwrap();
    assert!(cost(&report, "step_ratio") < 0.3 * cost(&calm, "step_ratio"), "a second among forty decode steps");
    assert!((cost(&report, "step_ratio_median") / cost(&calm, "step_ratio_median") - 1.0).abs() < 0.02, "and no other median");
    let steps = Trace::open(&noisy).unwrap().steps().unwrap();
    let at = (0..steps.len()).find(|&i| steps.host_end_ns[i] - steps.host_begin_ns[i] > LOST_NS).unwrap();
    let message = warning(&report, "noisy_times").unwrap();
    let named = format!("step {} (1.0", steps.step_id[at]);
    assert!(message.starts_with("decode passes take ") && message.contains(&named) && message.contains("--warmup"), "{message}");

    let text = self::report().arg(&noisy).env("COLUMNS", "400").assert().success();
    text.stdout(contains("the times are noisy: verifying ").and(contains(" by medians, ")).and(contains("noisy_times: decode")));
    let advice = specprof(&["advise"], &[&noisy]).success();
    advice.stdout(
        contains("no advice from these times")
            .or(contains("by measured step times, which are noisy"))
            .and(contains("noisy_times: decode passes take")),
    );
    assert_eq!(warning(&json(&["advise", "--json"], &[&noisy]), "noisy_times"), Some(message));

    // A comparison marks what is of times, and says of which side.
    let both = json(&["diff", "--format", "json", "--fail-on", "cost.step_ratio<-2%"], &[&quiet, &noisy]);
    assert!(warning(&both, "noisy_times").unwrap().contains("of the candidate: decode passes take"), "{}", both["warnings"]);
    let metric =
        |path: &str| both["metrics"].as_array().unwrap().iter().find(|m| m["path"] == path && m["layer"].is_null()).unwrap().clone();
    assert_eq!((&metric("cost.step_ratio")["noisy_times"], &metric("union.mean")["noisy_times"]), (&true.into(), &false.into()));
    assert_eq!(both["gates"][0]["findings"][0]["noisy_times"], true);
    let text = specprof(&["diff", "--fail-on", "cost.step_ratio<-2%"], &[&quiet, &noisy]);
    text.stdout(
        contains("(noisy times)").and(contains(", by noisy times")).and(contains("noisy_times: changes of times and costs are unclear")),
    );
    let same = json(&["diff", "--format", "json", "--fail-on", "none"], &[&quiet, &quiet]);
    assert!(warning(&same, "noisy_times").is_none());
}

#[test]
fn few_decode_steps_and_requests_are_no_verdict_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let few = planted(dir.path(), "few", 2, None);
    let decodes = |report: &Value| -> u64 {
        let contexts = report["cost"]["contexts"].as_array().unwrap();
        contexts.iter().filter(|c| c["verify_steps"] != 0).map(|c| c["decode_steps"].as_u64().unwrap()).sum()
    };
    let n = decodes(&json(&["report", "--format", "json"], &[&few]));
    assert!((1..10).contains(&n), "{n}");
    let text = specprof(&["report"], &[&few]).success();
    let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
    assert!(text.contains(&format!("{n} decode steps are too few to tell whether speculation pays, 10 are needed")), "{text}");
    assert!(
        text.contains(&format!("few_decode_steps: only {n}")) && text.contains("few_requests: intervals come from 2 requests"),
        "{text}"
    );
    assert!(text.matches("speculation pays").count() == 1 && !text.contains("speculation loses"), "{text}");
    let advice = json(&["advise", "--json"], &[&few]);
    let why = advice["advice"]["measured_unused_because"].as_str().unwrap();
    assert!(why.starts_with(&format!("{n} decode steps")) && why.contains("10 are needed"), "{why}");
    assert!(warning(&advice, "few_decode_steps").is_some() && warning(&advice, "few_requests").is_some());
    // The bound is the same on the other side of it.
    let enough = planted(dir.path(), "enough", 4, None);
    let report = json(&["report", "--format", "json"], &[&enough]);
    assert!(decodes(&report) >= 10 && warning(&report, "few_decode_steps").is_none(), "{}", report["cost"]["contexts"]);
    let text = specprof(&["report"], &[&enough]).success();
    text.stdout(contains("speculation pays, ").and(contains("few_requests: intervals come from 4 requests")));
    assert_eq!(json(&["advise", "--json"], &[&enough])["advice"]["cost_source"], "measured");
}
