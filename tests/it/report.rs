//! `specprof report` against an independent recomputation in SQL, and as its users see it.

use crate::trace::small;
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::event::RouteBlock;
use specprof::trace::manifest::WindowCompleteness;
use specprof::trace::{Ending, Module, Phase, Probe, RequestEvent, StepEvent, StepRoutes, Synth, TraceError, TraceWriter, WriterOptions};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A Python that has the oracle's packages: `SPECPROF_TEST_PYTHON`, or a virtual environment that is made once.
fn python() -> &'static Path {
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

fn oracle(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle").join(file)
}

fn report() -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.arg("report").env_remove("NO_COLOR").env("COLUMNS", "100").env("LC_ALL", "C.UTF-8");
    command
}

/// Writes the report of a trace and lets the oracle recompute it; gives what it says.
fn recomputed(trace: &Path) -> (Value, String) {
    let json = trace.with_extension("json");
    report().arg(trace).args(["--format", "json", "-o"]).arg(&json).assert().success().stdout("");
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
            step.draft_probs = None;
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
    let (report, said) = recomputed(&trace);
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
    let (report, _) = recomputed(&trace);
    let rows = |value: &Value| value["by_rows"].as_array().unwrap().iter().map(|s| s["rows"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(report["overall"]["rows"], 5);
    assert_eq!((rows(&report["overall"]), rows(&report["layers"][1])), (vec![3, 4], vec![3, 4]));
    let codes: Vec<&str> = report["warnings"].as_array().unwrap().iter().filter_map(|w| w["code"].as_str()).collect();
    assert!(codes.contains(&"mixed_rows") && codes.contains(&"no_device_times"), "{codes:?}");
    assert_eq!((&report["cost"], &report["advice"]), (&Value::Null, &Value::Null));
}

#[test]
fn sql_agrees_on_a_trace_of_kept_rows() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    altered(&trace, &Synth { requests: 4, verify_steps: 30, layers: vec![1, 2], ..Synth::default() }, false, false, true);
    let (report, _) = recomputed(&trace);
    assert_eq!(report["overall"]["wasted_mean"], Value::Null);
    assert!(report["warnings"].to_string().contains("lower bounds"));
}

#[test]
fn the_oracle_notices_a_wrong_number() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    small().write(&trace).unwrap();
    recomputed(&trace);
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
