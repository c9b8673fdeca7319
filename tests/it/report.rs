//! `specprof report` against an independent recomputation in SQL, and as its users see it.

use crate::trace::{edit_manifest, small};
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::event::RouteBlock;
use specprof::trace::manifest::WindowCompleteness;
use specprof::trace::synth::PlantedTimes;
use specprof::trace::{
    Ending, Module, Phase, Probe, RequestEvent, StepEvent, StepRoutes, Synth, Trace, TraceError, TraceWriter, WriterOptions,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A Python that has the oracle's packages: `SPECPROF_TEST_PYTHON`, or a virtual environment that is made once.
pub(crate) fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        if let Some(python) = std::env::var_os("SPECPROF_TEST_PYTHON") {
            return python.into();
        }
        let requirements = oracle("requirements.txt");
        let wanted = fs::read_to_string(&requirements).unwrap();
        let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("oracle-venv");
        let (python, installed) = (venv.join("bin/python"), venv.join("installed.txt"));
        if fs::read_to_string(&installed).is_ok_and(|i| i == wanted) {
            return python;
        }
        Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv).assert().success();
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&requirements).assert().success();
        fs::write(&installed, wanted).unwrap();
        python
    })
}

pub(crate) fn oracle(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle").join(file)
}

pub fn report() -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.arg("report").env_remove("NO_COLOR").env("COLUMNS", "100").env("LC_ALL", "C.UTF-8");
    command
}

/// Writes the report of a trace and lets the oracle recompute it; gives what it says.
pub fn recomputed(trace: &Path, args: &[&str]) -> (Value, String) {
    let json = trace.with_extension("json");
    report().arg(trace).args(args).args(["--format", "json", "-o"]).arg(&json).assert().success().stdout("");
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/schema/report.v1.schema.json");
    let checked = Command::new(python()).arg(oracle("recompute.py")).args([trace, &json, &schema]).assert().success();
    let said = String::from_utf8(checked.get_output().stdout.clone()).unwrap();
    (serde_json::from_slice(&fs::read(&json).unwrap()).unwrap(), said)
}

/// Changes synthetic steps on their way to the writer.
struct Altered<'a> {
    to: &'a mut TraceWriter,
    /// Every third window loses its last draft, every fifth the last two.
    lengths: bool,
    /// Steps belong to three requests in turn.
    interleaved: bool,
    /// Only kept rows are in the routes.
    kept_only: bool,
}

/// The first `rows` rows of every block of the target.
fn cut(routes: &StepRoutes, rows: usize) -> StepRoutes {
    let (k, mut at, mut kept) = (routes.k, 0, StepRoutes::new(routes.k));
    for &RouteBlock { layer, module, first_row, rows: n } in &routes.blocks {
        let keep = if module == Module::Target { usize::from(n).min(rows) } else { usize::from(n) };
        let weights = if routes.weights.is_empty() { &[][..] } else { &routes.weights[at..at + keep * k] };
        kept.push(module, layer, first_row, &routes.ids[at..at + keep * k], weights);
        at += usize::from(n) * k;
    }
    kept
}

impl Probe for Altered<'_> {
    fn wants_weights(&self) -> bool {
        self.to.wants_weights()
    }

    fn step(&mut self, mut step: StepEvent) -> Result<(), TraceError> {
        if self.interleaved {
            step.request_id = step.step_id % 3;
        }
        if step.phase == Phase::Verify {
            let less = if !self.lengths {
                0
            } else if step.step_id % 5 == 0 {
                2
            } else {
                usize::from(step.step_id % 3 == 0)
            };
            step.input_tokens.truncate(step.rows() - less);
            step.accepted = step.accepted.min(step.rows() as u16 - 1);
            (step.draft_probs, step.draft_confidences) = (None, None);
            step.emitted_tokens.truncate(usize::from(step.accepted) + 1);
            let rows = if self.kept_only { usize::from(step.accepted) + 1 } else { step.rows() };
            step.routes = cut(&step.routes, rows);
        }
        self.to.step(step)
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.to.request(request)
    }
}

fn altered(dir: &Path, synth: &Synth, lengths: bool, interleaved: bool, kept_only: bool) {
    let mut manifest = synth.manifest();
    if kept_only {
        manifest.window_completeness = WindowCompleteness::AcceptedOnly;
    }
    let mut writer = TraceWriter::create(dir, manifest, &WriterOptions::default()).unwrap();
    synth.emit(&mut Altered { to: &mut writer, lengths, interleaved, kept_only }).unwrap();
    writer.finish(Ending::Complete).unwrap();
}

#[test]
fn sql_agrees_on_a_trace_with_weights_and_a_draft_module() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    Synth { requests: 5, verify_steps: 20, ..small() }.write(&trace).unwrap();
    let (report, said) = recomputed(&trace, &[]);
    assert!(said.contains("numbers agree"), "{said}");
    assert!(report["layers"][0]["mass_coverage"].as_array().is_some_and(|c| c.len() == 12));
    assert_eq!(report["draft"]["layers"][0]["layer"], 4);
    assert_eq!(report["layers"].as_array().unwrap().iter().map(|l| l["layer"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn sql_agrees_on_a_large_shape_with_interleaved_requests_and_mixed_lengths() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    let synth = Synth { requests: 3, verify_steps: 40, layers: vec![2, 17, 41], draft_layer: Some(42), rows: 5, ..Synth::default() };
    altered(&trace, &synth, true, true, false);
    let (report, _) = recomputed(&trace, &[]);
    let rows = |value: &Value| value["by_rows"].as_array().unwrap().iter().map(|s| s["rows"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(report["overall"]["rows"], 5);
    assert_eq!((rows(&report["overall"]), rows(&report["layers"][1])), (vec![3, 4], vec![3, 4]));
    let codes: Vec<&str> = report["warnings"].as_array().unwrap().iter().filter_map(|w| w["code"].as_str()).collect();
    assert!(codes.contains(&"mixed_rows") && codes.contains(&"no_device_times"), "{codes:?}");
    assert_eq!((&report["cost"]["verify_ratio"], &report["cost"]["source"]), (&Value::Null, &Value::Null));
    assert!(report["advice"]["steps_left_out"].as_u64().is_some_and(|n| n > 0));
}

/// Records with the built-in model.
fn record(dir: &Path, name: &str, args: &[&str]) -> PathBuf {
    let trace = dir.join(name);
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.args(["record", "--model", "demo", "--ignore-eos", "-q"]).args(args).arg("--out").arg(&trace).assert().success();
    trace
}

const PROMPTS: [&str; 8] = ["--prompt", "import os\n", "--prompt", "class A:\n", "--prompt", "def main():\n", "--prompt", "x = [1, 2"];

#[test]
fn sql_agrees_on_the_times_of_a_recording() {
    let dir = tempfile::tempdir().unwrap();
    let args = [&PROMPTS[..], &["--max-new-tokens", "48", "--baseline-steps", "24", "--draft-len", "4"]].concat();
    let trace = record(dir.path(), "t", &args);
    let (report, said) = recomputed(&trace, &[]);
    assert!(said.contains("numbers agree"), "{said}");
    let cost = &report["cost"];
    assert_eq!(cost["source"], "cpu");
    let ratio = |key: &str| cost[key].as_f64().unwrap();
    // How large they are is the machine's business, and that of whatever else it runs; that they are right is SQL's.
    assert!(ratio("verify_ratio") > 0.0 && ratio("step_ratio") > 0.0 && ratio("speedup") > 0.0, "{cost}");
    let components: Vec<&str> = cost["attribution"].as_array().unwrap().iter().map(|a| a["component"].as_str().unwrap()).collect();
    let expected = ["draft", "embedding", "norm", "kda", "mla", "dense", "router", "experts", "shared", "head", "sampling", "commit"];
    assert_eq!(components, expected);
    // What the operations leave out is little: loops around them, the writer's queue.
    let sum: f64 = cost["attribution"].as_array().unwrap().iter().map(|a| a["verify_us"].as_f64().unwrap()).sum();
    assert!(sum > 0.0 && sum <= ratio("verify_step_us"), "{cost}");
    let open = Trace::open(&trace).unwrap();
    let (steps, kernels) = (open.steps().unwrap(), open.kernels().unwrap());
    let covered = |i: usize| {
        let of_step = kernels.iter().filter(|(step, _)| *step == steps.step_id[i]);
        let ns: i64 = of_step.map(|(_, k)| k.end_ns - k.begin_ns).sum();
        ns as f64 / (steps.host_end_ns[i] - steps.host_begin_ns[i]) as f64
    };
    let mut shares: Vec<f64> = (0..steps.len()).map(covered).collect();
    shares.sort_by(f64::total_cmp);
    // The median step: a pause of the machine may fall between two operations of any other.
    assert!(shares[shares.len() / 2] > 0.8 && shares[shares.len() - 1] <= 1.0, "{shares:?}");
    assert!(report["layers"].as_array().unwrap().iter().all(|l| l["cost"]["us_per_expert"].is_number()), "{}", report["layers"][0]["cost"]);
    assert!(report["run"]["instrumentation"]["copy_gb_per_s"].as_f64().unwrap() > 0.1);
    let text = self::report().arg(&trace).env("COLUMNS", "100").assert().success();
    text.stdout(contains("CPU wall times").and(contains("per distinct expert")).and(contains("unattributed")));
}

#[test]
fn a_planted_cost_of_a_large_shape_is_found_and_sql_agrees() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    let times = PlantedTimes { base: 177.0, per_expert: 36.0, per_row: 0.0, attention: 90.0, attention_per_row: 30.0, noise: 10.0 };
    Synth { requests: 8, verify_steps: 20, layers: vec![2, 17, 41], times: Some(times), ..Synth::default() }.write(&trace).unwrap();
    // Of a trace that no device made, no time is shown.
    let (emulated, _) = recomputed(&trace, &[]);
    assert_eq!((&emulated["cost"]["source"], &emulated["layers"][0]["cost"]), (&Value::Null, &Value::Null));
    edit_manifest(&trace, |m| m.emulated = false);
    let (report, _) = recomputed(&trace, &[]);
    for cost in [&report["overall"]["cost"], &report["layers"][1]["cost"]] {
        let number = |key: &str| cost[key].as_f64().unwrap();
        assert!((number("us_per_expert") - 36.0).abs() < 0.6 && (number("intercept_us") - 177.0).abs() < 8.0, "{cost}");
        let ends = cost["ci95"].as_array().unwrap();
        assert!(ends[0].as_f64().unwrap() < 36.3 && ends[1].as_f64().unwrap() > 35.7, "{cost}");
    }
}

#[test]
fn decode_steps_may_come_from_another_trace() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = ["--max-new-tokens", "32"];
    let verify = record(dir.path(), "verify", &[&PROMPTS[..], &tokens].concat());
    let plain = record(dir.path(), "plain", &[&PROMPTS[..], &tokens, &["--draft", "none"]].concat());
    let json = |args: &[&Path]| -> Value {
        let out = report().args(["--format", "json"]).args(args).assert().success();
        serde_json::from_slice(&out.get_output().stdout).unwrap()
    };
    let alone = json(&[&verify]);
    assert_eq!(alone["cost"]["verify_ratio"], Value::Null);
    assert!(alone["warnings"].to_string().contains("--baseline-steps"));
    assert_eq!(alone["cost"]["model"]["kind"], "model");
    let both = json(&[&verify, Path::new("--baseline"), &plain]);
    let ratio = both["cost"]["verify_ratio"].as_f64().unwrap();
    let us = |key: &str| both["cost"][key].as_f64().unwrap();
    assert!((ratio - us("verify_us") / us("decode_us")).abs() < 1e-9 * ratio && us("step_ratio") > 0.0, "{}", both["cost"]);
    let decode: u64 = both["cost"]["contexts"].as_array().unwrap().iter().map(|c| c["decode_steps"].as_u64().unwrap()).sum();
    // Four requests of 32 tokens, the first of each from the prompt.
    assert_eq!(decode, 4 * 31);
    assert_eq!(both["totals"], alone["totals"], "the other trace's steps are not this one's");
    assert_eq!(both["acceptance"], alone["acceptance"]);
    // A trace of another model says nothing.
    let other = dir.path().join("other");
    small().write(&other).unwrap();
    report().args([&verify, Path::new("--baseline"), &other]).assert().code(2).stderr(contains("model").and(contains("other")));
    // What differs is said with both values.
    let refused = |what: &str| report().args([&verify, Path::new("--baseline"), &plain]).assert().code(2).stderr(contains(what.to_owned()));
    edit_manifest(&plain, |m| m.emulated = true);
    refused("its clock of the steps' times is unknown, not cpu");
    edit_manifest(&plain, |m| m.device.kind = "gpu".into());
    refused("its device is gpu ");
}

#[test]
fn sql_agrees_on_a_trace_of_kept_rows() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    altered(&trace, &Synth { requests: 4, verify_steps: 30, layers: vec![1, 2], ..Synth::default() }, false, false, true);
    let (report, _) = recomputed(&trace, &[]);
    assert_eq!((&report["overall"]["wasted_mean"], &report["advice"]), (&Value::Null, &Value::Null));
    assert!(report["warnings"].to_string().contains("lower bounds"));
}

#[test]
fn the_oracle_notices_a_wrong_number() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    small().write(&trace).unwrap();
    recomputed(&trace, &[]);
    let json = trace.with_extension("json");
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/schema/report.v1.schema.json");
    let mut wrong: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    wrong["layers"][1]["step_reuse"] = (wrong["layers"][1]["step_reuse"].as_f64().unwrap() + 1e-6).into();
    fs::write(&json, wrong.to_string()).unwrap();
    let run = || Command::new(python()).arg(oracle("recompute.py")).args([&trace, &json, &schema]).assert();
    run().code(1).stdout(contains("layers[2].step_reuse").and(contains("1 of")));
    wrong["layers"][1].as_object_mut().unwrap().remove("lift");
    fs::write(&json, wrong.to_string()).unwrap();
    run().failure().stderr(contains("'lift' is a required property"));
}

fn written() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("my-trace");
    small().write(&trace).unwrap();
    (dir, trace)
}

#[test]
fn text_names_the_run_and_every_layer() {
    let (_dir, trace) = written();
    let facts = ["my-trace", "synthetic", "f32", "γ", "acceptance", "of uniform", "worst", "[1] ", "no_device_times", "its layer 4"];
    let text = report().arg(&trace).arg("--per-layer").assert().success().stderr("");
    let text = facts.into_iter().fold(text, |text, fact| text.stdout(contains(fact)));
    text.stdout(contains('\x1b').not());
    report().arg(&trace).args(["--color", "always"]).assert().success().stdout(contains('\x1b'));
    report().arg(&trace).arg("--explain").env("COLUMNS", "160").assert().success().stdout(contains("E (1 - (1 - k/E)^rows)"));
    report().arg(&trace).env("LC_ALL", "C").assert().success().stdout(contains("±").not());
}

#[test]
fn what_would_do_nothing_is_refused_with_the_way_out() {
    let (dir, trace) = written();
    let markdown = |more: &[&str]| {
        let out = report().arg(&trace).args(["--format", "markdown"]).args(more).assert().success();
        String::from_utf8(out.get_output().stdout.clone()).unwrap()
    };
    let (plain, explained) = (markdown(&[]), markdown(&["--explain"]));
    assert!(explained.starts_with(plain.trim_end()) && explained.contains("## What each number means"), "{explained}");
    for format in ["json", "csv", "html"] {
        report().arg(&trace).args(["--explain", "--format", format]).assert().code(2).stderr(contains("--explain goes with --format text"));
    }
    report().arg(&trace).args(["--explain", "--json"]).assert().code(2).stderr(contains("--explain"));
    report().args([&trace, &trace]).arg("--explain").assert().code(2).stderr(contains("--explain goes with one trace"));
    for (table, way) in [("groups", "--by GROUP"), ("ranks", "--ep N")] {
        report().arg(&trace).args(["--format", "csv", "--table", table]).assert().code(2).stderr(contains(way));
    }
    // Files of other kinds than the command's, by the way from there to it.
    let (partial, lines) = (dir.path().join("p.parquet"), dir.path().join("t.jsonl"));
    report().arg(&trace).arg("--partial").arg("-o").arg(&partial).assert().success();
    let specprof = |command: &str| {
        let mut run = assert_cmd::Command::cargo_bin("specprof").unwrap();
        run.arg(command);
        run
    };
    specprof("export").arg(&trace).args(["--format", "jsonl", "-o"]).arg(&lines).assert().success();
    for command in ["inspect", "advise"] {
        specprof(command).arg(&partial).assert().code(2).stderr(contains("a partial report is for `specprof report`"));
        specprof(command).arg(&lines).assert().code(2).stderr(contains("specprof import jsonl"));
    }
    specprof("diff").args([&lines, &trace]).assert().code(2).stderr(contains("specprof import jsonl"));
}

#[test]
fn the_same_trace_gives_the_same_report() {
    let (_dir, trace) = written();
    let json = |threads: &str| {
        let run = report().arg(&trace).args(["--format", "json", "-o", "-"]).env("RAYON_NUM_THREADS", threads).assert().success();
        run.get_output().stdout.clone()
    };
    assert_eq!(json("1"), json("4"));
}

#[test]
fn exit_codes_and_files() {
    let (dir, trace) = written();
    let nowhere = dir.path().join("nowhere");
    report().arg(&nowhere).assert().code(2).stdout("").stderr(contains("nowhere"));
    report().assert().code(2);
    // A bad output fails before the trace is looked at, and a bad trace leaves no output behind.
    report().arg(&nowhere).arg("-o").arg(nowhere.join("r.txt")).assert().code(2).stderr(contains("r.txt"));
    let output = dir.path().join("r.txt");
    report().arg(&nowhere).arg("-o").arg(&output).assert().code(2);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the trace");
    report().arg(&trace).arg("-o").arg(&output).assert().success().stdout("");
    assert!(fs::read_to_string(&output).unwrap().starts_with("trace       my-trace\n"));

    let manifest = trace.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let mut value: Value = serde_json::from_str(&text).unwrap();
    value["model"]["moe_layers"] = serde_json::json!([1, 2]);
    fs::write(&manifest, value.to_string()).unwrap();
    report().arg(&trace).assert().code(4).stdout("").stderr(contains("layer 3").and(contains("inspect --check")));
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    report().arg(&trace).assert().code(4).stderr(contains("manifest.json"));
}

#[test]
fn patterns_stand_for_all_traces_that_match() {
    let dir = TempDir::new().unwrap();
    for name in ["run-1", "run-2", "other"] {
        small().write(&dir.path().join(name)).unwrap();
    }
    let names = |args: &[&str]| -> Vec<String> {
        let out = report().current_dir(dir.path()).args(args).args(["--format", "json"]).assert().success();
        let value: Value = serde_json::from_slice(&out.get_output().stdout).unwrap();
        value["reports"].as_array().unwrap().iter().map(|r| r["run"]["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&["run-*"]), ["run-1", "run-2"]);
    assert_eq!(names(&["other", "run-[12]"]), ["other", "run-1", "run-2"]);
    report().current_dir(dir.path()).arg("o*").assert().success().stdout(contains("other"));
    report().current_dir(dir.path()).arg("nil*").assert().code(2).stdout("").stderr(contains("nil*: no such path"));
    // Where one trace is meant, several are too many.
    for command in [&["inspect", "run-*"][..], &["advise", "run-*"], &["export", "run-*", "--format", "jsonl"], &["diff", "other", "run-*"]]
    {
        let failed = Command::cargo_bin("specprof").unwrap().current_dir(dir.path()).args(command).assert().code(2).stdout("");
        failed.stderr(contains("run-*: matches 2 paths, and one is wanted: run-1, run-2"));
    }
    Command::cargo_bin("specprof").unwrap().current_dir(dir.path()).args(["diff", "oth*", "run-?", "--fail-on", "none"]).assert().code(2);
    Command::cargo_bin("specprof").unwrap().current_dir(dir.path()).args(["inspect", "oth*", "--check"]).assert().success();
}
