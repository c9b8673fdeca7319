//! `specprof inspect` as its users see it: text, JSON, exit codes.

use crate::trace::{edit_manifest, only_part, small};
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

fn trace() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    (dir, path)
}

fn inspect() -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.arg("inspect");
    command
}

#[test]
fn tells_what_a_trace_holds() {
    let (_dir, path) = trace();
    let text = inspect().arg(&path).assert().success();
    let facts =
        ["4 of 16 experts per token", "routed layers   1-3; draft 4", "18: 2 prefill, 4 decode, 12 verify", "emulated", "B per token"];
    facts.into_iter().fold(text, |text, fact| text.stdout(contains(fact)));
}

#[test]
fn json_has_the_manifest_tables_and_checks() {
    let (dir, path) = trace();
    let file = dir.path().join("out.json");
    inspect().arg(&path).args(["--check", "--json", "-o"]).arg(&file).assert().success().stdout("");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(json["schema"], "specprof.inspect/1");
    assert_eq!(json["totals"]["verify_steps"], 12);
    // 2 requests of 6 verify steps (3 target layers x 3 rows, 2 drafts), 2 decodes and 5 prompt rows.
    assert_eq!(json["tables"][2]["rows"], 2 * (6 * (9 + 2) + 2 * 3 + 5 * 3));
    assert_eq!(json["manifest"]["window_completeness"], "full");
    assert!(json["checks"].as_array().unwrap().len() > 15);
    assert!(json["checks"].as_array().unwrap().iter().all(|check| check["ok"] == true));
}

/// In packed ids a bit makes another expert, which breaks no rule of the tables.
#[test]
fn flipped_bits_are_seen_wherever_they_are() {
    let (_dir, path) = trace();
    for table in ["routes", "steps"] {
        let part = only_part(&path, table);
        let whole = fs::read(&part).unwrap();
        // Behind the magic number, in the middle, in the footer.
        for at in [5, whole.len() / 2, whole.len() - 30] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&part, damaged).unwrap();
            let assert = inspect().arg(&path).arg("--check").assert().failure();
            let out = assert.get_output();
            // What cannot be read at all is told as such.
            let told = if out.status.code() == Some(1) { &out.stdout } else { &out.stderr };
            assert!(String::from_utf8_lossy(told).contains(part.file_name().unwrap().to_str().unwrap()), "{table}, byte {at}");
        }
        fs::write(&part, whole).unwrap();
    }
    inspect().arg(&path).arg("--check").assert().success().stdout(contains("as written"));
    // Traces of before have no sums.
    edit_manifest(&path, |m| m.tables.values_mut().flatten().for_each(|part| part.crc32 = None));
    inspect().arg(&path).arg("--check").assert().success().stdout(contains("without a sum"));
}

#[test]
fn a_failed_check_is_exit_1_after_the_result() {
    let (_dir, path) = trace();
    inspect().arg(&path).arg("--check").assert().success().stdout(contains("FAILED").not());
    edit_manifest(&path, |m| m.token_hash = Some("00".into()));
    inspect().arg(&path).assert().success();
    inspect()
        .arg(&path)
        .arg("--check")
        .assert()
        .code(1)
        .stdout(contains("FAILED token_hash"))
        .stderr(contains("1 of").and(contains("checks failed")));
}

#[test]
fn what_cannot_be_read_is_exit_4_on_one_line() {
    let (_dir, path) = trace();
    let one_line = || predicate::function(|text: &str| text.lines().count() == 1);
    edit_manifest(&path, |m| m.format_version = "2.0".into());
    inspect()
        .arg(&path)
        .assert()
        .code(4)
        .stdout("")
        .stderr(contains("trace format 2.0 is not readable").and(contains("newer specprof")).and(one_line()));
    edit_manifest(&path, |m| m.format_version = "0.9".into());
    inspect().arg(&path).assert().code(4).stderr(contains("the specprof that wrote it"));
    edit_manifest(&path, |m| m.format_version = "1.0".into());
    let part = only_part(&path, "steps");
    let bytes = fs::read(&part).unwrap();
    fs::write(&part, &bytes[..bytes.len() / 2]).unwrap();
    inspect().arg(&path).assert().code(4).stdout("").stderr(contains("steps/part-").and(contains("corrupt")).and(one_line()));
    fs::write(path.join("manifest.json"), "{").unwrap();
    inspect().arg(&path).assert().code(4).stderr(contains("manifest.json").and(one_line()));
}

#[test]
fn a_wrong_path_is_exit_2_and_an_unwritable_output_leaves_nothing() {
    let (dir, path) = trace();
    inspect().arg(dir.path().join("nowhere")).assert().code(2).stderr(contains("no trace here"));
    inspect().assert().code(2);
    inspect().arg(&path).arg("-o").arg(dir.path().join("no/such/dir/file")).assert().code(2).stderr(contains("cannot write"));
}

#[test]
fn words_of_a_trace_do_not_steer_the_terminal() {
    let (_dir, path) = trace();
    edit_manifest(&path, |m| m.model.name = "evil\u{1b}[2J".into());
    inspect().args(["--color", "always"]).arg(&path).assert().success().stdout(contains("\u{1b}").not());
}
