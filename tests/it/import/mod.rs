//! `specprof import`: every format's sample, the cases that people have met, hostile inputs.

mod cases;
mod counts;
mod hostile;
mod jsonl;
mod mutations;
mod passes;
mod profiles;
mod pt;
mod recorder;
mod refusals;
mod round_trip;
mod router_log;
mod samples;
mod shuffled;
mod unknown;

use crate::trace::route_rows;
use assert_cmd::Command;
use serde_json::Value;
use specprof::trace::{Manifest, Trace, validate};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A file of `tests/data/import`.
fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/import").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(data(name)).unwrap()).unwrap()
}

/// An imported trace, all of whose rules hold.
struct Imported {
    trace: Trace,
    path: PathBuf,
    dir: TempDir,
}

fn specprof() -> Command {
    Command::cargo_bin("specprof").unwrap()
}

/// Imports with the given arguments; the trace must keep every rule of the format.
fn import(args: &[&str]) -> Imported {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    specprof().arg("import").args(args).arg("-o").arg(&path).assert().success();
    let trace = Trace::open(&path).unwrap();
    let validation = validate(&trace).unwrap();
    let broken: Vec<_> = validation.checks.iter().filter(|c| !c.ok).collect();
    assert!(broken.is_empty(), "{args:?}: {broken:?}");
    Imported { trace, path, dir }
}

/// Every rule of the format holds for a trace, as `inspect --check` tries them.
fn passes_check(path: &Path, what: &str) {
    let broken: Vec<_> = validate(&Trace::open(path).unwrap()).unwrap().checks.into_iter().filter(|c| !c.ok).collect();
    assert!(broken.is_empty(), "{what}: {broken:?}");
}

/// What a refused import says; nothing may be left behind.
fn refused(args: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = specprof().arg("import").args(args).arg("-o").arg(dir.path().join("t")).assert().code(2).stdout("");
    let text = String::from_utf8(out.get_output().stderr.clone()).unwrap();
    assert_eq!(text.lines().filter(|l| l.starts_with("error:")).count(), 1, "{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something was left behind");
    text
}

impl Imported {
    fn manifest(&self) -> &Manifest {
        self.trace.manifest()
    }

    fn warning(&self, code: &str) -> String {
        let found = self.manifest().warnings.iter().find(|w| w.code == code);
        found.unwrap_or_else(|| panic!("no warning {code}: {:?}", self.manifest().warnings)).message.clone()
    }

    fn report(&self) -> Value {
        let out = specprof().arg("report").arg(&self.path).args(["--format", "json"]).assert().success();
        serde_json::from_slice(&out.get_output().stdout).unwrap()
    }

    /// Ids by position (of the one request) and layer.
    fn by_position(&self) -> BTreeMap<(u32, u16), Vec<u16>> {
        let steps = self.trace.steps().unwrap();
        let context = |step: u32| steps.context_len[steps.step_id.iter().position(|&s| s == step).unwrap()];
        let rows = route_rows(&self.trace).unwrap();
        rows.into_iter().map(|(step, layer, row, _, ids, _)| ((context(step) + u32::from(row), layer), ids)).collect()
    }
}

/// The same of a matrix `[rows][layers][k]` from row `from` on, without dense layers.
fn matrix(rows: &Value, from: usize) -> BTreeMap<(u32, u16), Vec<u16>> {
    let rows: Vec<Vec<Vec<u16>>> = serde_json::from_value(rows.clone()).unwrap();
    let mut want = BTreeMap::new();
    for (position, layers) in rows.iter().enumerate().skip(from) {
        for (layer, ids) in layers.iter().enumerate().filter(|(_, ids)| ids.iter().any(|id| *id != ids[0])) {
            want.insert((position as u32, layer as u16), ids.clone());
        }
    }
    want
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
