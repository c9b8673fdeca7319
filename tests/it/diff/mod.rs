//! `specprof diff` as its users see it.

mod ci;
mod formats;

use crate::report::{oracle, python};
use crate::trace::{edit_manifest, small};
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::Synth;
use specprof::trace::synth::Routing;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn diff() -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.arg("diff").env_remove("NO_COLOR").env_remove("GITHUB_STEP_SUMMARY").env("COLUMNS", "100").env("LC_ALL", "C.UTF-8");
    command
}

/// Runs of eight requests of other prompts, whose rows agree more or less.
fn pair(dir: &Path) -> (PathBuf, PathBuf) {
    let run = |name: &str, seed: u64, carry: f64| {
        let path = dir.join(name);
        let routing = Routing::Zipf { low: 0.5, high: 0.9, carry };
        Synth { seed, requests: 8, verify_steps: 12, rows: 3, layers: vec![1, 2], experts: 64, k: 4, routing, ..Synth::default() }
            .write(&path)
            .unwrap();
        path
    };
    (run("main", 1, 0.4), run("branch", 2, 0.1))
}

fn report(trace: &Path) -> PathBuf {
    let path = trace.with_extension("json");
    Command::cargo_bin("specprof").unwrap().arg("report").arg(trace).args(["--format", "json", "-o"]).arg(&path).assert().success();
    path
}

/// The report with something changed.
fn changed(report: &Path, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let mut value: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    change(&mut value);
    let path = report.with_file_name(name);
    fs::write(&path, value.to_string()).unwrap();
    path
}

fn json(assert: &assert_cmd::assert::Assert) -> Value {
    serde_json::from_slice(&assert.get_output().stdout).unwrap()
}

#[test]
fn a_run_is_the_same_as_itself() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    small().write(&trace).unwrap();
    let (main, _) = pair(dir.path());
    let compat = root().join("traces/compat/v1.0/trace");
    let early = root().join("reports/compat/report.v1.json");
    let written = report(&trace);
    for (a, b) in [(&trace, &trace), (&main, &main), (&compat, &compat), (&early, &early), (&trace, &written)] {
        let out =
            diff().args([a, b]).args(["--format", "json", "--fail-on", "union.mean>+0%", "--fail-on", "layer:*:union.p99>+0%"]).assert();
        let json = json(&out.success().stderr(""));
        let metrics = json["metrics"].as_array().unwrap();
        assert!(metrics.len() > 50);
        for metric in metrics {
            assert_eq!((&metric["change"], &metric["verdict"]), (&0.0.into(), &"same".into()), "{}: {metric}", a.display());
        }
        assert_eq!(json["failed"], false);
        if let Some(routing) = json["routing"].as_object() {
            assert_eq!((routing["differing"].as_u64(), routing["share"].as_f64()), (Some(0), Some(0.0)));
        }
        assert_eq!(json["routing"].is_null(), a.is_file() || b.is_file());
    }
}

#[test]
fn other_prompts_are_refused_unless_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    diff()
        .args([&main, &branch])
        .assert()
        .code(2)
        .stdout("")
        .stderr(contains("workload: 8 prompts (8 only here)").and(contains("--allow workload")));
    let out = diff().args([&main, &branch]).args(["--allow", "workload", "--format", "json"]).assert().code(1);
    let out = json(&out.stderr(contains("1 rule failed: union.mean>+2%")));
    assert_eq!((out["allowed"][0]["kind"].as_str(), out["pairing"]["paired"].as_bool()), (Some("workload"), Some(false)));
    assert_eq!(out["gates"][0]["status"], "failed");
    diff().args([&main, &branch]).args(["--allow", "workload", "--fail-on", "none"]).assert().success();
    diff().args([&branch, &main]).args(["--allow", "workload,device", "--fail-on", "union.mean>+2%"]).assert().success();
}

#[test]
fn every_kind_is_refused_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    small().write(&base).unwrap();
    type Edit = fn(&mut specprof::trace::Manifest);
    let edits: [(&str, Edit); 6] = [
        ("model", |m| m.model.name = "other".into()),
        ("draft_len", |m| m.drafter.draft_len = Some(9)),
        ("drafter", |m| m.drafter.kind = "mtp".into()),
        ("quantisation", |m| m.model.quantisation = "fp8".into()),
        ("id_space", |m| m.id_space = specprof::trace::manifest::IdSpace::Physical),
        ("device", |m| m.device.name = "other".into()),
    ];
    for (kind, edit) in edits {
        let other = dir.path().join(kind);
        small().write(&other).unwrap();
        edit_manifest(&other, edit);
        diff().args([&base, &other]).assert().code(2).stdout("").stderr(contains(format!("--allow {kind}\n")));
        diff().args([&base, &other]).args(["--allow", kind]).assert().success().stdout(contains(format!("allowed     {kind}: ")));
    }
    diff()
        .args([&base, &base])
        .args(["--allow", "everything"])
        .assert()
        .code(2)
        .stderr(contains("nothing to allow; write model, draft_len"));
}

/// The same requests with other windows: 5 % more experts, a little more or less in each request.
fn heavier(report: &Path) -> PathBuf {
    changed(report, "heavier.json", |report| {
        let layers = report["layers"].as_array().unwrap().len();
        let (mut windows, mut unions) = (vec![0; layers], vec![0; layers]);
        for (i, request) in report["by_request"].as_array_mut().unwrap().iter_mut().enumerate() {
            request["identity"]["windows"] = format!("{:032x}", i + 1).into();
            for layer in 0..layers {
                let n = request["sums"]["windows"][layer].as_u64().unwrap();
                let more = request["sums"]["union"][layer].as_u64().unwrap() * 105 / 100 + (i % 3) as u64;
                request["sums"]["union"][layer] = more.into();
                windows[layer] += n;
                unions[layer] += more;
            }
        }
        for layer in 0..layers {
            report["layers"][layer]["union"]["mean"] = (unions[layer] as f64 / windows[layer] as f64).into();
        }
        report["overall"]["union"]["mean"] = (unions.iter().sum::<u64>() as f64 / windows.iter().sum::<u64>() as f64).into();
    })
}

#[test]
fn requests_are_paired_and_the_oracle_agrees() {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    let (main, branch) = (report(&main), report(&branch));
    let schema = root().join("reports/schema/diff.v1.schema.json");
    let heavier = heavier(&main);
    for (candidate, paired) in [(&heavier, true), (&branch, false)] {
        let out = dir.path().join("diff.json");
        let options = ["--allow", "workload", "--format", "json", "-o"];
        diff().args([&main, candidate]).args(options).arg(&out).assert().code(1).stdout("");
        let value: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
        assert_eq!((value["pairing"]["paired"].as_bool(), value["pairing"]["exact"].as_bool()), (Some(paired), Some(false)));
        let said = Command::new(python()).arg(oracle("diff.py")).args([&main, candidate, &out, &schema]).assert().success();
        assert!(String::from_utf8_lossy(&said.get_output().stdout).contains(" 0 differ"));
        // The oracle sees a wrong number.
        let wrong = changed(&out, "wrong.json", |value| {
            let row = value["metrics"].as_array_mut().unwrap().iter_mut().find(|m| m["path"] == "union.mean").unwrap();
            row["change_ci95"][0] = (row["change_ci95"][0].as_f64().unwrap() * 1.01).into();
        });
        Command::new(python())
            .arg(oracle("diff.py"))
            .args([&main, candidate, &wrong, &schema])
            .assert()
            .code(1)
            .stdout(contains("union.mean.change_ci95[0]"));
    }
}

#[test]
fn early_reports_are_compared_by_their_intervals() {
    let early = root().join("reports/compat/report.v1.json");
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("early.json");
    fs::copy(&early, &copy).unwrap();
    let more = changed(&copy, "more.json", |r| {
        for key in ["mean", "p50", "p90", "p99", "max"] {
            r["overall"]["union"][key] = 11.into();
        }
        r["overall"]["union"]["ci95"] = serde_json::json!([10.9, 11.1]);
    });
    let out = diff().args([&copy, &more]).args(["--format", "json"]).assert().code(1);
    let json = json(&out);
    let row = json["metrics"].as_array().unwrap().iter().find(|m| m["path"] == "union.mean" && m["layer"].is_null()).unwrap();
    assert_eq!((row["method"].as_str(), row["verdict"].as_str()), (Some("intervals"), Some("worse")));
    assert!(json["warnings"].to_string().contains("prompts_unknown"));
}

#[test]
fn what_only_one_side_has_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    small().write(&trace).unwrap();
    let full = report(&trace);
    let less = changed(&full, "less.json", |r| {
        r["overall"]["step_reuse"] = Value::Null;
        r["layers"].as_array_mut().unwrap().pop();
        for request in r["by_request"].as_array_mut().unwrap() {
            for key in ["windows", "union", "wasted"] {
                request["sums"][key].as_array_mut().unwrap().pop();
            }
        }
    });
    let out = diff().args([&full, &less]).assert().success();
    out.stdout(contains("only in     base: step_reuse, layer:3:union.mean"));
    let out = json(&diff().args([&less, &full]).args(["--format", "json"]).assert().success());
    let only = out["one_sided"]["candidate"].as_array().unwrap();
    assert!(only.contains(&"step_reuse".into()) && only.contains(&"layer:3:lift".into()));
    assert_eq!(out["one_sided"]["base"], serde_json::json!([]));
    // A rule about it is not held, and that is said.
    let held = diff().args([&full, &less]).args(["--fail-on", "step_reuse<-1%"]).assert().success();
    held.stdout(
        contains("skipped     step_reuse<-1%").and(contains("gate_skipped")).and(contains("no rule failed, but 1 rule matched nothing")),
    );
    let nothing = ["--fail-on", "layer:9:union.mean>+3%"];
    diff().args([&full, &less]).args(nothing).args(["--format", "github"]).assert().success().stdout(contains("::warning title="));
    diff().args([&full, &less]).args(nothing).arg("--strict").assert().code(1).stderr(contains("1 rule failed: layer:9"));
}

#[test]
fn wrong_usage_and_broken_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    small().write(&trace).unwrap();
    let full = report(&trace);
    let rules = dir.path().join("r.rules");
    fs::write(&rules, "union.mean>+1%\nunoin.mean>+1%\n").unwrap();
    let usage = |args: &[&str]| diff().args([&trace, &trace]).args(args).assert().code(2).stdout("");
    usage(&["--fail-on", "unoin.mean>+1%"]).stderr(contains("no report has the number `unoin.mean`"));
    usage(&["--rules", rules.to_str().unwrap()]).stderr(contains("r.rules:2: rule `unoin.mean>+1%`"));
    usage(&["--rules", "/nowhere/r"]).stderr(contains("/nowhere/r: cannot read"));
    usage(&["--fail-on", "acceptance.tokens_per_step<2%"]).stderr(contains("`<-2%` for a change"));
    usage(&["--fail-on", "union.mean>+1%", "--fail-on", "none"]).stderr(contains("leave it or them out"));
    let several = dir.path().join("several.json");
    fs::write(&several, "{\"schema\": \"specprof.reports/1\", \"reports\": []}").unwrap();
    diff().args([&full, &several]).assert().code(2).stdout("").stderr(contains("holds several reports; give one"));
    usage(&["--margin", "-1"]).stderr(contains("margin"));
    diff().arg(&trace).arg(dir.path().join("nothing")).assert().code(2).stderr(contains("neither a trace nor a report"));
    // A bad output fails at once, and a failure leaves no output behind.
    diff().args([&trace, &trace]).args(["-o", "/nowhere/x"]).assert().code(2).stderr(contains("/nowhere/x"));
    let output = dir.path().join("out.txt");
    for (text, says) in [("{", "not JSON"), ("{}", "no report of specprof"), ("{\"schema\": \"specprof.report/9\"}", "specprof.report/9")] {
        let broken = dir.path().join("broken.json");
        fs::write(&broken, text).unwrap();
        diff()
            .args([&broken, &full])
            .arg("-o")
            .arg(&output)
            .assert()
            .code(4)
            .stdout("")
            .stderr(contains("broken.json").and(contains(says)));
        assert!(!output.exists());
    }
    fs::write(&full, &fs::read(&full).unwrap()[..2000]).unwrap();
    diff().args([&trace, &full]).assert().code(4).stderr(contains("not JSON"));
    let part = crate::trace::only_part(&trace, "routes");
    fs::write(&part, &fs::read(&part).unwrap()[..100]).unwrap();
    diff().args([&trace, &trace]).assert().code(4).stderr(predicates::str::is_match("^error: [^\n]*\n$").unwrap());
}

#[test]
fn strict_drops_the_uncertainty() {
    // One request each: nothing is known of the uncertainty.
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, seed| {
        let path = dir.path().join(name);
        Synth { seed, requests: 1, ..small() }.write(&path).unwrap();
        path
    };
    let (a, b) = (run("a", 1), run("b", 2));
    let rule = ["--allow", "workload", "--fail-on", "union.mean>+0%", "--fail-on", "union.mean<-0%"];
    let out = diff().args([&a, &b]).args(rule).assert().success();
    out.stdout(contains("unclear     union.mean").and(contains("uncertainty unknown")).and(contains("one_request")));
    diff().args([&a, &b]).args(rule).arg("--strict").assert().code(1).stderr(contains("1 rule failed: union.mean"));
}
