//! The golden form of every format, and what each format's readers demand.

use super::{diff, oracle, pair, python, root};
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

fn shown(args: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    let rules = dir.path().join("specprof.rules");
    fs::write(&rules, "# gates\nunion.mean > +3%\nlayer:*:union.p99>+50%\nunion.max>+0%\ncost.verify_ratio>2.4\nallow workload\n").unwrap();
    let out = diff()
        .current_dir(dir.path())
        .args([main.file_name().unwrap(), branch.file_name().unwrap()])
        .args(["--rules", "specprof.rules"])
        .args(args)
        .assert()
        .code(1);
    String::from_utf8(out.get_output().stdout.clone()).unwrap()
}

#[test]
fn text() {
    let text = shown(&[]);
    assert!(text.lines().all(|line| line.chars().count() <= 100));
    insta::assert_snapshot!(text);
}

#[test]
fn text_of_80_columns_with_every_layer() {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    let narrow = diff()
        .current_dir(dir.path())
        .args([&main, &branch])
        .args(["--allow", "workload", "--per-layer"])
        .env("COLUMNS", "80")
        .assert()
        .code(1);
    let narrow = String::from_utf8(narrow.get_output().stdout.clone()).unwrap();
    assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    assert!(narrow.contains("layer 2") && narrow.contains("marginal[2]") && !narrow.contains('\x1b'));
    let colour = diff().args([&main, &branch]).args(["--allow", "workload", "--color", "always"]).assert().code(1);
    colour.stdout(contains('\x1b'));
}

#[test]
fn markdown() {
    insta::assert_snapshot!(shown(&["--format", "markdown"]));
}

#[test]
fn github() {
    insta::assert_snapshot!(shown(&["--format", "github"]));
}

#[test]
fn junit() {
    let xml = shown(&["--format", "junit"]);
    insta::assert_snapshot!(xml);
}

/// Numbers to six digits: the last ones are the processor's.
fn rounded(value: &mut Value) {
    match value {
        Value::Number(n) if n.is_f64() => {
            let short: f64 = format!("{:.5e}", n.as_f64().unwrap()).parse().unwrap();
            *value = short.into();
        }
        Value::Array(list) => list.iter_mut().for_each(rounded),
        Value::Object(map) => map.values_mut().for_each(rounded),
        _ => {}
    }
}

#[test]
fn json() {
    let mut value: Value = serde_json::from_str(&shown(&["--format", "json"])).unwrap();
    rounded(&mut value);
    // A few of the many numbers: one of each method and verdict.
    let mut seen = Vec::new();
    value["metrics"].as_array_mut().unwrap().retain(|m| {
        let key = (m["layer"].is_null(), m["method"].clone(), m["verdict"].clone());
        let new = !seen.contains(&key);
        seen.push(key);
        new
    });
    value["base"]["written_by"] = "specprof".into();
    value["candidate"]["written_by"] = "specprof".into();
    insta::assert_snapshot!(serde_json::to_string_pretty(&value).unwrap());
}

fn hostile() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    for (path, name) in [(&main, "a"), (&branch, "b")] {
        crate::trace::edit_manifest(path, |m| {
            m.model.name = "</failure><script>alert(1)</script>|`x`\"'&\u{1b}[31m\n::set-output name=x::y ##[error]z".into();
            m.device.name = "cpu\r\n::error::x".into();
            m.incomplete_reason = Some("]]><b>".into());
            m.complete = false;
        });
        fs::rename(path, dir.path().join(format!("{name} <i>&|`"))).unwrap();
    }
    let root = dir.path().to_owned();
    (dir, root)
}

#[test]
fn names_are_no_markup_and_no_commands() {
    let (_dir, root) = hostile();
    let run = |format: &str| {
        let out = diff().current_dir(&root).args(["a <i>&|`", "b <i>&|`", "--allow", "workload", "--format", format]).assert().code(1);
        String::from_utf8(out.get_output().stdout.clone()).unwrap()
    };
    let text = run("text");
    assert!(!text.contains('\x1b') && !text.lines().any(|l| l.starts_with("::")));
    let github = run("github");
    let commands: Vec<&str> = github.lines().filter(|l| l.trim_start().starts_with("::")).collect();
    assert!(
        commands.iter().all(|c| [
            "::error title=specprof",
            "::warning title=specprof",
            "::notice title=specprof",
            "::group::specprof",
            "::endgroup::"
        ]
        .iter()
        .any(|k| c.starts_with(k))),
        "{commands:?}"
    );
    assert!(!github.contains("##["));
    let markdown = run("markdown");
    assert!(!markdown.contains("<script") && !markdown.contains("<b>") && !markdown.contains("<i>"), "{markdown}");
    assert!(markdown.lines().filter(|l| l.starts_with('|')).all(|l| l.ends_with('|')));
    let xml = root.join("j.xml");
    fs::write(&xml, run("junit")).unwrap();
    let checked = Command::new(python()).arg(oracle("junit.py")).arg(&xml).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    serde_json::from_str::<Value>(&run("json")).unwrap();
}

#[test]
fn junit_is_what_its_readers_expect_and_the_check_sees_what_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let xml = dir.path().join("j.xml");
    let check = |text: &str| {
        fs::write(&xml, text).unwrap();
        Command::new(python()).arg(oracle("junit.py")).arg(&xml).output().unwrap()
    };
    let good = shown(&["--format", "junit"]);
    let checked = check(&good);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    assert!(String::from_utf8_lossy(&checked.stdout).starts_with("4 cases"));
    assert!(!check(&good.replacen("failures=\"1\"", "failures=\"3\"", 2)).status.success());
    assert!(!check(&good.replace("<testcase ", "<testcase colour=\"x\" ")).status.success());
}

#[test]
fn the_job_summary_grows_but_never_past_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    let summary = dir.path().join("summary.md");
    fs::write(&summary, "before\n").unwrap();
    let run = || {
        diff()
            .args([&main, &branch])
            .args(["--allow", "workload", "--format", "github"])
            .env("GITHUB_STEP_SUMMARY", &summary)
            .assert()
            .code(1)
            .stdout(contains("::error title=specprof%3A union.mean>+2%25 failed::"))
    };
    run();
    let text = fs::read_to_string(&summary).unwrap();
    assert!(text.starts_with("before\n### specprof: ") && text.contains("**failed**"));
    fs::write(&summary, "x".repeat((1 << 20) - 1000)).unwrap();
    run();
    let length = fs::metadata(&summary).unwrap().len();
    assert!(length > (1 << 20) - 1000 && length <= 1 << 20, "{length}");
    assert!(fs::read_to_string(&summary).unwrap().contains("cut: too long"));
}

#[test]
fn at_most_ten_annotations_of_a_kind() {
    let dir = tempfile::tempdir().unwrap();
    let (main, branch) = pair(dir.path());
    let mut command = diff();
    command.args([&main, &branch]).args(["--allow", "workload", "--format", "github"]);
    for i in 0..15 {
        command.args(["--fail-on", &format!("union.mean>+0.{i:02}1%")]);
    }
    let out = command.assert().code(1).stdout(contains("6 more rules failed"));
    let text = String::from_utf8(out.get_output().stdout.clone()).unwrap();
    assert_eq!(text.lines().filter(|l| l.starts_with("::error ")).count(), 10);
}

#[test]
fn json_is_as_the_schema_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.json");
    let validate =
        "import json,sys,jsonschema;s,d=(json.load(open(p)) for p in sys.argv[1:]);jsonschema.Draft202012Validator(s).validate(d)";
    let schema = root().join("reports/schema/diff.v1.schema.json");
    let valid = |text: &str| {
        fs::write(&path, text).unwrap();
        Command::new(python()).args(["-c", validate]).args([&schema, &path]).output().unwrap().status.success()
    };
    let text = shown(&["--format", "json", "--strict"]);
    assert!(valid(&text));
    assert!(!valid(&text.replace("\"worse\"", "\"bad\"")));
    assert!(predicate::str::contains("specprof.diff/1").eval(&text));
}
