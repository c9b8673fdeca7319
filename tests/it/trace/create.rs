//! What the writer accepts: directories and events.

use super::{edit_manifest, files, only_part, small};
use specprof::trace::synth::Synth;
use specprof::trace::{Ending, Probe, StepEvent, Trace, TraceError, TraceWriter, WriterOptions, validate};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn options(force: bool) -> WriterOptions {
    WriterOptions { force, ..WriterOptions::default() }
}

#[test]
fn an_existing_trace_is_replaced_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    let error = TraceWriter::create(&path, small().manifest(), &options(false)).unwrap_err();
    assert!(matches!(error, TraceError::Exists { .. }), "{error}");
    fs::write(path.join("notes.txt"), "mine").unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "not ours").unwrap();
    #[cfg(unix)]
    {
        fs::remove_dir_all(path.join("telemetry")).unwrap();
        std::os::unix::fs::symlink(&outside, path.join("telemetry")).unwrap();
    }
    let writer = TraceWriter::create(&path, small().manifest(), &options(true)).unwrap();
    writer.finish(Ending::Complete).unwrap();
    assert_eq!(Trace::open(&path).unwrap().steps().unwrap().len(), 0);
    assert_eq!(fs::read_to_string(path.join("notes.txt")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "not ours", "a link was followed");
}

#[test]
fn what_is_no_trace_is_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let full = dir.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("thesis.tex"), "years of work").unwrap();
    fs::write(full.join("manifest.json"), r#"{"name": "a web app"}"#).unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [&full, &file] {
        for force in [false, true] {
            let error = TraceWriter::create(path, small().manifest(), &options(force)).unwrap_err();
            assert_eq!(matches!(error, TraceError::NotATrace { .. }), force, "{error}");
            assert_eq!(matches!(error, TraceError::Exists { .. }), !force, "{error}");
        }
    }
    assert_eq!(files(dir.path()).len(), 3);
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    TraceWriter::create(&empty, small().manifest(), &options(false)).unwrap().finish(Ending::Complete).unwrap();
}

#[test]
fn a_place_that_cannot_be_written_is_said_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    // Refused to every user, root included.
    let error = TraceWriter::create(&file.join("trace"), small().manifest(), &options(false)).unwrap_err();
    assert!(matches!(error, TraceError::Io { .. }) && error.to_string().contains("cannot create the directory"), "{error}");
}

/// Keeps the first verify step.
#[derive(Default)]
struct FirstVerify(Option<StepEvent>);

impl Probe for FirstVerify {
    fn wants_weights(&self) -> bool {
        true
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        if step.rows() == 3 && self.0.is_none() {
            self.0 = Some(step);
        }
        Ok(())
    }

    fn request(&mut self, _: specprof::trace::RequestEvent) -> Result<(), TraceError> {
        Ok(())
    }
}

#[test]
fn events_that_could_not_be_read_back_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = TraceWriter::create(&dir.path().join("t"), small().manifest(), &options(false)).unwrap();
    let mut probe = FirstVerify::default();
    small().emit(&mut probe).unwrap();
    let good = probe.0.unwrap();
    let changes: [(&str, fn(&mut StepEvent)); 9] = [
        ("accepts 3 drafts", |s| s.accepted = 3),
        ("0 rows", |s| s.input_tokens.clear()),
        ("parents", |s| s.parents = Some(vec![-1])),
        ("row 1 continues row 2", |s| s.parents = Some(vec![-1, 2, 0])),
        ("row 0 continues row 0", |s| s.parents = Some(vec![0, 0, 0])),
        ("confidences", |s| s.draft_confidences = Some(vec![0.5])),
        ("expert 16 of 16", |s| s.routes.ids[5] = 16),
        ("gate weights", |s| s.routes.weights.truncate(3)),
        ("experts per row", |s| s.routes.k = 2),
    ];
    for (text, change) in changes {
        let mut step = good.clone();
        change(&mut step);
        let error = writer.step(step).unwrap_err().to_string();
        assert!(error.contains(text), "{error} / {text}");
    }
    writer.step(good.clone()).unwrap();
    assert!(writer.step(good).unwrap_err().to_string().contains("not come after"));
    writer.finish(Ending::Incomplete("interrupted".into())).unwrap();
    let trace = Trace::open(&dir.path().join("t")).unwrap();
    assert_eq!(trace.steps().unwrap().len(), 1);
    assert_eq!(trace.manifest().incomplete_reason.as_deref(), Some("interrupted"));
}

/// A share that is none is written as it is and found by the checks; a trace before 1.2 has no confidences.
#[test]
fn confidences_are_checked_where_there_are_any() {
    let dir = tempfile::tempdir().unwrap();
    let mut probe = FirstVerify::default();
    small().emit(&mut probe).unwrap();
    let good = probe.0.unwrap();
    for (value, failed) in [(0.5, 0), (1.5, 1), (f32::NAN, 1)] {
        let path = dir.path().join(format!("t{value}"));
        let mut writer = TraceWriter::create(&path, small().manifest(), &options(false)).unwrap();
        writer.step(StepEvent { draft_confidences: Some(vec![value; good.rows() - 1]), ..good.clone() }).unwrap();
        writer.finish(Ending::Incomplete("interrupted".into())).unwrap();
        let trace = Trace::open(&path).unwrap();
        let of_drafts = validate(&trace).unwrap().checks.into_iter().filter(|c| c.name == "step_drafts" && !c.ok).count();
        assert_eq!(of_drafts, failed, "{value}");
    }
    for version in ["v1.0", "v1.1"] {
        let trace = Trace::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/compat").join(version).join("trace")).unwrap();
        let steps = trace.steps_with_details().unwrap();
        assert_eq!(steps.draft_confidences.len(), steps.len());
        assert!(steps.draft_confidences.iter().all(Option::is_none));
    }
}

/// All files with their content.
fn content(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    files(dir).into_iter().map(|file| (file.clone(), fs::read(&file).unwrap())).collect()
}

/// A trace that is easily told from [`small`].
fn other() -> Synth {
    Synth { seed: 99, verify_steps: 9, ..small() }
}

#[test]
fn a_run_without_a_step_gives_the_replaced_trace_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    fs::write(path.join("notes.txt"), "mine").unwrap();
    let before = content(dir.path());
    let create = || TraceWriter::create(&path, other().manifest(), &options(true)).unwrap();
    assert_eq!(create().abandon("failed".into()).unwrap(), None);
    assert_eq!(content(dir.path()), before);
    drop(create());
    assert_eq!(content(dir.path()), before);
    // What was in its place all the time was not lost to a killed process either: it comes back after the next failure.
    let aside = path.join(".replaced");
    fs::create_dir(&aside).unwrap();
    for name in ["requests", "steps", "routes", "telemetry", "manifest.json"] {
        fs::rename(path.join(name), aside.join(name)).unwrap();
    }
    let mut empty: specprof::trace::Manifest = serde_json::from_slice(&fs::read(aside.join("manifest.json")).unwrap()).unwrap();
    empty.tables.clear();
    fs::write(path.join("manifest.json"), serde_json::to_vec(&empty).unwrap()).unwrap();
    drop(create());
    assert_eq!(content(dir.path()), before);
    // With a step, the new one stays.
    let mut writer = create();
    let mut probe = FirstVerify::default();
    small().emit(&mut probe).unwrap();
    writer.step(probe.0.unwrap()).unwrap();
    let manifest = writer.abandon("failed: it".into()).unwrap().unwrap();
    assert_eq!(manifest.incomplete_reason.as_deref(), Some("failed: it"));
    assert_eq!(Trace::open(&path).unwrap().steps().unwrap().len(), 1);
    assert!(!aside.exists() && path.join("notes.txt").exists());
}

#[test]
fn a_run_without_a_step_leaves_no_directory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b/t");
    let create = |path: &Path| TraceWriter::create(path, small().manifest(), &options(false)).unwrap();
    assert_eq!(create(&path).abandon("failed".into()).unwrap(), None);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // What was there before stays.
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    drop(create(&path));
    assert!(path.parent().unwrap().exists() && !path.exists());
    fs::create_dir(&path).unwrap();
    drop(create(&path));
    assert!(path.exists() && files(&path).is_empty());
    create(&path).finish(Ending::Complete).unwrap();
}

#[test]
fn force_removes_parts_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    let replace = || TraceWriter::create(&path, other().manifest(), &options(true));
    for foreign in ["steps/notes.txt", "routes/part-1.csv", "kernels/deep/part-00000.parquet"] {
        fs::create_dir_all(path.join(foreign).parent().unwrap()).unwrap();
        fs::write(path.join(foreign), "mine").unwrap();
        let before = content(dir.path());
        let error = replace().unwrap_err();
        assert!(matches!(error, TraceError::NotATrace { .. }), "{error}");
        assert!(error.to_string().contains(&foreign[..12]), "{error} / {foreign}");
        assert_eq!(content(dir.path()), before);
        fs::remove_file(path.join(foreign)).unwrap();
    }
    fs::remove_dir_all(path.join("kernels")).unwrap();
    // A part of another name is the trace's own when its manifest lists it.
    let part = only_part(&path, "steps");
    fs::rename(&part, path.join("steps/all.parquet")).unwrap();
    assert!(replace().is_err());
    edit_manifest(&path, |m| m.tables.get_mut("steps").unwrap()[0].path = "steps/all.parquet".into());
    let mut writer = replace().unwrap();
    other().emit(&mut writer).unwrap();
    writer.finish(Ending::Complete).unwrap();
    assert!(!path.join("steps/all.parquet").exists() && !path.join(".replaced").exists());
    assert_eq!(validate(&Trace::open(&path).unwrap()).unwrap().failed(), 0);
}

#[test]
fn of_many_that_want_one_place_one_gets_it() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let path = dir.path().join(format!("t{round}"));
        if round % 2 == 1 {
            fs::create_dir(&path).unwrap();
        }
        let create = || TraceWriter::create(&path, small().manifest(), &options(false));
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(create)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut writers = Vec::new();
        for result in results {
            match result {
                Ok(writer) => writers.push(writer),
                Err(error) => assert!(matches!(error, TraceError::Exists { .. }), "{error}"),
            }
        }
        assert_eq!(writers.len(), 1);
        let mut writer = writers.pop().unwrap();
        #[cfg(unix)]
        {
            let error = TraceWriter::create(&path, small().manifest(), &options(true)).unwrap_err().to_string();
            assert!(error.contains("another process is recording"), "{error}");
        }
        small().emit(&mut writer).unwrap();
        writer.finish(Ending::Complete).unwrap();
        assert_eq!(validate(&Trace::open(&path).unwrap()).unwrap().failed(), 0);
    }
}

#[test]
fn default_names_are_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let record = || {
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("specprof"));
        command.current_dir(dir.path()).args(["record", "--model", "demo", "--prompt", "x", "--max-new-tokens", "3"]);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..4).map(|_| record()).collect();
    let mut names: Vec<String> = Vec::new();
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        names.push(String::from_utf8(out.stdout).unwrap().trim().to_owned());
    }
    names.sort();
    assert_eq!(names, (1..5).map(|n| format!("traces/ling-nano-mtp-{n}")).collect::<Vec<_>>());
    for name in names {
        assert_eq!(validate(&Trace::open(&dir.path().join(name)).unwrap()).unwrap().failed(), 0);
    }
}

#[test]
fn a_stream_is_no_place_for_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    for command in [&["record", "--model", "demo", "--prompt", "x"][..], &["demo"]] {
        let mut run = assert_cmd::Command::cargo_bin("specprof").unwrap();
        let out = run.current_dir(dir.path()).args(command).args(["--out", "-", "--force"]).assert().code(2).stdout("");
        let stderr = String::from_utf8_lossy(&out.get_output().stderr).into_owned();
        assert!(stderr.contains("a trace is a directory"), "{stderr}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn planted_links_are_not_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let (path, victim) = (dir.path().join("t"), dir.path().join("victim"));
    fs::write(&victim, "precious").unwrap();
    let mut writer = TraceWriter::create(&path, small().manifest(), &options(false)).unwrap();
    for name in ["manifest.json.tmp", "steps/part-00000.parquet.tmp"] {
        std::os::unix::fs::symlink(&victim, path.join(name)).unwrap();
    }
    small().emit(&mut writer).unwrap();
    writer.finish(Ending::Complete).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert_eq!(validate(&Trace::open(&path).unwrap()).unwrap().failed(), 0);
}
