//! Partial reports as their users see them: written, put together in any order, refused where they do not belong together.

use crate::report::report;
use crate::trace::{edit_manifest, small};
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::Synth;
use specprof::trace::synth::PlantedTimes;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn write(dir: &Path, name: &str, synth: &Synth) {
    synth.write(&dir.join(name)).unwrap();
    // As if a device had run: only then are there times.
    edit_manifest(&dir.join(name), |m| m.emulated = false);
    report().current_dir(dir).args([name, "--partial", "-o"]).arg(format!("{name}.parquet")).assert().success().stdout("").stderr("");
}

fn json(dir: &Path, args: &[&str]) -> Value {
    let out = report().current_dir(dir).args(args).args(["--format", "json"]).assert().success().stderr("");
    serde_json::from_slice(&out.get_output().stdout).unwrap()
}

#[test]
fn one_partial_is_its_trace() {
    let dir = TempDir::new().unwrap();
    let times = PlantedTimes { base: 177.0, per_expert: 36.0, per_row: 0.0, attention: 90.0, attention_per_row: 30.0, noise: 10.0 };
    for (name, synth) in [("plain", small()), ("timed", Synth { times: Some(times), requests: 4, weights: false, ..small() })] {
        write(dir.path(), name, &synth);
        for by in [&[][..], &["--by", "request"], &["--by", "context"], &["--by", "layer"]] {
            let mut expected = json(dir.path(), &[&[name][..], by].concat());
            // Whatever samples there are of the machine are not in the file.
            let telemetry = expected["telemetry"].take();
            let mut found = json(dir.path(), &[&[format!("{name}.parquet").as_str()][..], by].concat());
            let warnings = found["warnings"].as_array_mut().unwrap();
            let before = warnings.len();
            warnings.retain(|w| w["code"] != "telemetry_left_out");
            assert_eq!(warnings.len() + usize::from(!telemetry.is_null()), before);
            assert!(found == expected, "{name} {by:?}");
        }
    }
    // The same file every time.
    let bytes = fs::read(dir.path().join("plain.parquet")).unwrap();
    report().current_dir(dir.path()).args(["plain", "--partial", "-o", "again.parquet"]).assert().success();
    assert!(bytes == fs::read(dir.path().join("again.parquet")).unwrap());
}

#[test]
fn several_make_one_report_in_any_order() {
    let dir = TempDir::new().unwrap();
    for seed in 1..4u64 {
        write(dir.path(), &format!("shard-{seed}"), &Synth { seed, requests: 3, ..small() });
    }
    let names = ["shard-1.parquet", "shard-2.parquet", "shard-3.parquet"];
    let whole = json(dir.path(), &names);
    assert_eq!(whole, json(dir.path(), &[names[2], names[0], names[1]]));
    assert_eq!(whole, json(dir.path(), &["shard-*.parquet"]));
    let parts: Vec<Value> = (1..4).map(|n| json(dir.path(), &[format!("shard-{n}").as_str()])).collect();
    for key in ["requests", "steps", "verify_steps", "tokens_emitted"] {
        let sum: u64 = parts.iter().map(|p| p["totals"][key].as_u64().unwrap()).sum();
        assert_eq!(whole["totals"][key], sum, "{key}");
    }
    let windows: u64 = parts.iter().map(|p| p["layers"][0]["windows"].as_u64().unwrap()).sum();
    assert_eq!(whole["layers"][0]["windows"], windows);
    assert_eq!(whole["run"]["token_hash"], Value::Null);
    // Every format takes them.
    report().current_dir(dir.path()).args(names).args(["--per-layer"]).assert().success().stdout(contains("shard-1, shard-2, shard-3"));
    report().current_dir(dir.path()).args(names).args(["--format", "html", "-o", "page.html"]).assert().success();
}

#[test]
fn what_does_not_go_together_is_usage() {
    let dir = TempDir::new().unwrap();
    write(dir.path(), "a", &small());
    write(dir.path(), "b", &Synth { k: 3, ..small() });
    let refused = |args: &[&str], what: &str| {
        report().current_dir(dir.path()).args(args).assert().code(2).stdout("").stderr(contains(what));
    };
    refused(&["a.parquet", "b.parquet"], "experts per token (k)");
    refused(&["a.parquet", "a.parquet"], "are the same partial report");
    // The same recording under another name is another file.
    fs::rename(dir.path().join("a"), dir.path().join("c")).unwrap();
    report().current_dir(dir.path()).args(["c", "--partial", "-o", "renamed.parquet"]).assert().success();
    fs::rename(dir.path().join("c"), dir.path().join("a")).unwrap();
    refused(&["a.parquet", "renamed.parquet"], "are of the same recording");
    refused(&["a", "a.parquet"], "a: a trace among partial reports");
    refused(&["a.parquet", "missing.parquet"], "missing.parquet: no such file");
    let before = fs::read(dir.path().join("a.parquet")).unwrap();
    refused(&["a.parquet", "-o", "a.parquet"], "a.parquet: is read by this command");
    assert!(before == fs::read(dir.path().join("a.parquet")).unwrap());
    let mut diff = assert_cmd::Command::cargo_bin("specprof").unwrap();
    diff.current_dir(dir.path())
        .args(["diff", "a.parquet", "b.parquet"])
        .assert()
        .code(2)
        .stderr(contains("a.parquet: it is a partial report"));
    refused(&["a.parquet", "--ep", "2"], "need the routes");
    refused(&["a", "b", "--partial", "-o", "c.parquet"], "--partial takes one trace, not 2");
    refused(&["a", "--partial"], "--output");
    refused(&["a", "--partial", "-o", "c.parquet", "--format", "json"], "cannot be used with");
    assert!(!dir.path().join("c.parquet").exists());
    fs::write(dir.path().join("r.json"), "{}").unwrap();
    refused(&["r.json"], "neither a directory nor a partial report");
    refused(&["a", "r.json"], "r.json: ");
    let part = fs::read_dir(dir.path().join("a/steps")).unwrap().next().unwrap().unwrap().path();
    refused(&[part.to_str().unwrap()], "neither a directory nor a partial report");
}

#[test]
fn broken_files_are_corrupt_and_never_a_panic() {
    let dir = TempDir::new().unwrap();
    write(dir.path(), "a", &small());
    let bytes = fs::read(dir.path().join("a.parquet")).unwrap();
    let right = report().current_dir(dir.path()).arg("a.parquet").output().unwrap().stdout;
    let mut found = 0;
    for at in (4..bytes.len()).step_by(bytes.len() / 60) {
        let mut broken = bytes.clone();
        broken[at] ^= 0x55;
        fs::write(dir.path().join("x.parquet"), broken).unwrap();
        let out = report().current_dir(dir.path()).arg("x.parquet").output().unwrap();
        assert!(matches!(out.status.code(), Some(0 | 2 | 4)), "byte {at}: {out:?}");
        assert!(!String::from_utf8_lossy(&out.stderr).contains("panicked"), "byte {at}");
        // What can still be read is what was written: damage to the numbers is found by their digest.
        assert!(out.status.code() != Some(0) || out.stdout == right, "byte {at}: another report");
        found += usize::from(out.status.code() == Some(4));
    }
    assert!(found > 30, "{found} of 60 damaged files were found");
    fs::write(dir.path().join("x.parquet"), &bytes[..bytes.len() - 9]).unwrap();
    report().current_dir(dir.path()).arg("x.parquet").assert().code(4).stderr(contains("x.parquet: corrupt"));
}

#[test]
fn numbers_that_no_trace_comes_to_are_corrupt() {
    use specprof::trace::partial_file::{EntryKind, PartialFile, encode};
    let dir = TempDir::new().unwrap();
    write(dir.path(), "a", &small());
    let file = PartialFile::open(&dir.path().join("a.parquet")).unwrap();
    let mut entries = Vec::new();
    file.each(|entry| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    let wasted = entries.iter_mut().find(|e| e.kind == EntryKind::Window && e.name == "wasted").unwrap();
    wasted.values[0] += 1000;
    // With a digest of its own: as whoever has read how the file is made would do it.
    fs::write(dir.path().join("x.parquet"), encode(file.name(), file.manifest(), entries.into_iter()).unwrap()).unwrap();
    for args in [&["x.parquet"][..], &["a.parquet", "x.parquet"]] {
        let refused = report().current_dir(dir.path()).args(args).assert().code(4).stdout("");
        refused.stderr(contains("x.parquet: ").and(contains("`wasted_by_row` comes to ")));
    }
}
