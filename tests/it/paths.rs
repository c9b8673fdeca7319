//! What a command line names: outputs and inputs that cannot be, names that are no text, and what killed processes leave behind.

use crate::trace::small;
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn specprof(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.current_dir(dir).args(args).timeout(Duration::from_secs(120));
    command
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn an_output_into_a_folder_that_is_not_there_is_usage_everywhere() {
    let dir = TempDir::new().unwrap();
    small().write(&dir.path().join("t")).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for args in [
        &["report", "t"][..],
        &["diff", "t", "t"],
        &["advise", "t"],
        &["inspect", "t"],
        &["doctor"],
        &["export", "t", "--format", "jsonl"],
        &["calibrate", "--model", "demo"],
    ] {
        let refused = specprof(dir.path(), args).args(["-o", "missing/x"]).assert().code(2).stdout("");
        refused.stderr(contains("missing/x: cannot write: there is no folder missing; make it first"));
        let refused = specprof(dir.path(), args).args(["-o", "file/x"]).assert().code(2).stdout("");
        refused.stderr(contains("file/x: cannot write: file is no folder"));
    }
    let ranks = ["report", "t", "--ep", "2", "--placement-out", "missing/x"];
    specprof(dir.path(), &ranks).assert().code(2).stderr(contains("there is no folder missing"));
    // A trace's folders are made, but not in a file.
    let record = ["record", "--model", "demo", "--prompt", "x", "--max-new-tokens", "1", "-q", "--out", "file/x"];
    specprof(dir.path(), &record).assert().code(2).stderr(contains("file/x: cannot create the directory"));
    let sweep = ["sweep", "--model", "demo", "--prompt", "x", "--max-new-tokens", "1", "-q", "--out", "file/x"];
    specprof(dir.path(), &sweep).assert().code(2).stderr(contains("file/x: cannot create"));
    assert_eq!(names(dir.path()), ["file", "t"]);
}

#[test]
fn sockets_and_pipes_without_a_writer_are_told_and_never_waited_for() {
    let dir = TempDir::new().unwrap();
    small().write(&dir.path().join("t")).unwrap();
    let _socket = UnixListener::bind(dir.path().join("socket")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(dir.path().join("pipe")).status().unwrap().success());
    let readers: [&[&str]; 9] = [
        &["advise", "t", "--costs"],
        &["export", "--format", "sps"],
        &["diff", "t"],
        &["diff", "t", "t", "--rules"],
        &["report", "t", "--ep", "2", "--placement"],
        &["record", "--model", "demo", "--out", "new", "--prompts"],
        &["import", "-o", "new"],
        &["import", "nsys", "-o", "new"],
        &["import", "t/manifest.json", "-o", "new", "--model-config"],
    ];
    for before in readers {
        for (name, why) in [("socket", "socket: cannot read: is a socket, not a file"), ("pipe", "pipe: cannot read: is a pipe")] {
            let begin = Instant::now();
            let refused = specprof(dir.path(), before).arg(name).assert().code(2).stdout("");
            refused.stderr(contains(why));
            assert!(begin.elapsed() < Duration::from_secs(60), "{before:?} {name}");
        }
    }
    for command in [&["report"][..], &["inspect"], &["advise"]] {
        for name in ["socket", "pipe"] {
            specprof(dir.path(), command).arg(name).assert().code(2).stderr(contains("no trace here"));
        }
    }
    assert_eq!(names(dir.path()), ["pipe", "socket", "t"]);
    // What somebody writes is read.
    let report = specprof(dir.path(), &["report", "t", "--format", "json"]).output().unwrap().stdout;
    let pipe = dir.path().join("pipe");
    let writer = std::thread::spawn(move || fs::write(pipe, report).unwrap());
    specprof(dir.path(), &["diff", "pipe", "t", "--fail-on", "none"]).assert().success();
    writer.join().unwrap();
}

#[test]
fn names_that_are_no_text_are_traces_like_others() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("runs");
    fs::create_dir(&folder).unwrap();
    for name in [&b"run-\xff"[..], b"run-\xfe\xff", b"other"] {
        small().write(&folder.join(OsStr::from_bytes(name))).unwrap();
    }
    specprof(dir.path(), &["report", "runs/*"]).assert().success().stdout(contains("other"));
    specprof(dir.path(), &["inspect", "runs/run-?", "--check"]).assert().success();
    specprof(dir.path(), &["report", "runs/run-*", "--format", "json"]).assert().success();
    let partial = ["report", "runs/run-?", "--partial", "-o"];
    specprof(dir.path(), &partial).arg(OsStr::from_bytes(b"p-\xfc")).assert().success();
    specprof(dir.path(), &["report", "p-*"]).assert().success();
}

#[test]
fn a_sweeps_folder_is_a_pattern_of_its_traces() {
    let dir = TempDir::new().unwrap();
    for name in ["s/mtp-1-t0", "s/mtp-2-t0"] {
        small().write(&dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("s/sweep.json"), "{}").unwrap();
    let found = specprof(dir.path(), &["report", "s/*"]).assert().success();
    found.stderr("s/*: passed over, neither a trace nor a partial report: s/sweep.json\n").stdout(contains("mtp-2-t0"));
    specprof(dir.path(), &["report", "s/*", "-q"]).assert().success().stderr("");
    specprof(dir.path(), &["inspect", "s/*1*"]).assert().success().stderr("");
    let nothing = specprof(dir.path(), &["report", "s/*.json"]).assert().code(2);
    nothing.stderr(contains("s/*.json: matches s/sweep.json, which is neither a trace nor a partial report"));
}

/// The next run takes away what a killed one was making.
#[test]
fn leftovers_of_a_killed_run_go_with_the_next() {
    let dir = TempDir::new().unwrap();
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/import/vllm/completions_response_v0.33.json");
    let args = ["calibrate", "--model", "demo", "--repeats", "100000", "--json", "-o", "x"];
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("specprof"))
        .current_dir(dir.path())
        .args(args)
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let own = format!(".x.{}.tmp", child.id());
    let begin = Instant::now();
    while names(dir.path()) != [own.as_str()] {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", names(dir.path()));
        std::thread::sleep(Duration::from_millis(10));
    }
    // While it lives, it keeps what it makes.
    specprof(dir.path(), &["doctor", "-o", "x"]).assert().success();
    assert_eq!(names(dir.path()), [own.as_str(), "x"]);
    child.kill().unwrap();
    let dead = child.id();
    child.wait().unwrap();
    let making = dir.path().join(format!(".t.{dead}.importing"));
    small().write(&making).unwrap();
    fs::write(dir.path().join(format!(".y.{dead}.tmp")), "of another target").unwrap();
    specprof(dir.path(), &["doctor", "-o", "x"]).assert().success();
    specprof(dir.path(), &["import", sample.to_str().unwrap(), "-o", "t", "-q"]).assert().success();
    assert_eq!(names(dir.path()), [format!(".y.{dead}.tmp"), "t".into(), "x".into()]);
}

#[test]
fn json_has_one_name_everywhere() {
    let dir = TempDir::new().unwrap();
    small().write(&dir.path().join("t")).unwrap();
    for args in [&["report", "t"][..], &["diff", "t", "t"], &["advise", "t"], &["inspect", "t"], &["model", "demo"]] {
        let json = |more: &[&str]| specprof(dir.path(), args).args(more).assert().success().get_output().stdout.clone();
        let (short, long) = (json(&["--json"]), json(&["--format", "json"]));
        let keys = |json: &[u8]| {
            serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(json).unwrap().keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(keys(&short), keys(&long), "{args:?}");
        // How much memory is free changes from one call to the next.
        assert!(args[0] == "model" || short == long, "{args:?}");
        let text = json(&["--format", "text"]);
        assert!(!text.starts_with(b"{") && (args[0] == "model" || text == json(&[])), "{args:?}");
        specprof(dir.path(), args).args(["--json", "--format", "text"]).assert().code(2).stderr(contains("cannot be used with"));
    }
    let doctor = specprof(dir.path(), &["doctor", "--format", "json"]).assert().success();
    doctor.stdout(predicate::str::starts_with("{"));
    for command in ["calibrate", "sweep"] {
        specprof(dir.path(), &[command, "--help"]).assert().success().stdout(contains("--json").and(contains("`--format json`").count(1)));
        specprof(dir.path(), &[command, "--format", "yaml"]).assert().code(2).stderr(contains("json"));
    }
}
