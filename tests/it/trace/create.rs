//! What the writer accepts: directories and events.

use super::{files, small};
use specprof::trace::{Ending, Probe, StepEvent, Trace, TraceError, TraceWriter, WriterOptions};
use std::fs;

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
    let changes: [(&str, fn(&mut StepEvent)); 6] = [
        ("accepts 3 drafts", |s| s.accepted = 3),
        ("0 rows", |s| s.input_tokens.clear()),
        ("parents", |s| s.parents = Some(vec![-1])),
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
