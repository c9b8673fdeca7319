//! Traces of trees and of shared passes: recomputed in SQL, and as users see them.

use crate::report::{oracle, python, report};
use crate::trace::small;
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::{Ending, Phase, Probe, RequestEvent, StepEvent, Synth, TraceError, TraceWriter, WriterOptions};
use std::fs;
use std::path::Path;

/// Rows of a window: the anchor and four drafts.
const ROWS: u16 = 5;
/// Shapes by turns: a chain, and two trees, the second in depth-first order.
const PARENTS: [[i16; ROWS as usize]; 3] = [[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 1], [-1, 0, 1, 0, 3]];

/// Makes trees of synthetic windows, and gives pairs of requests one pass.
struct Shaped<'a> {
    to: &'a mut TraceWriter,
    /// Every fifth tree has two branches with the same tokens, both of which were accepted.
    twins: bool,
}

impl Probe for Shaped<'_> {
    fn step(&mut self, mut step: StepEvent) -> Result<(), TraceError> {
        let i = step.step_id;
        // Requests 0 and 1 meet, and 2 and 3 do.
        (step.request_id, step.pass_id) = (i % 4, Some(i / 2));
        if step.phase == Phase::Verify {
            let parents = PARENTS[i as usize % 3];
            let twins = self.twins && i % 5 == 0;
            step.input_tokens = (0..u32::from(ROWS)).map(|row| if twins { 40 } else { 40 + row }).collect();
            let end = (i / 3) as i16 % ROWS as i16;
            let above = |&row: &i16| Some(parents[row as usize]).filter(|&parent| parent >= 0);
            let mut path: Vec<i16> = std::iter::successors(Some(end), above).collect();
            path.reverse();
            step.accepted = path.len() as u16 - 1;
            step.emitted_tokens = path[1..].iter().map(|&row| step.input_tokens[row as usize]).chain([9]).collect();
            step.parents = (i % 3 > 0).then(|| parents.to_vec());
        }
        self.to.step(step)
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.to.request(request)
    }
}

fn write(dir: &Path, twins: bool) {
    let synth = Synth { requests: 4, verify_steps: 30, rows: ROWS, prompt_rows: 0, decode_every: 3, weights: false, ..small() };
    let mut writer = TraceWriter::create(dir, synth.manifest(), &WriterOptions::default()).unwrap();
    synth.emit(&mut Shaped { to: &mut writer, twins }).unwrap();
    writer.finish(Ending::Complete).unwrap();
}

/// The report, and what the oracle says of it.
fn recomputed(trace: &Path) -> (Value, String) {
    let json = trace.with_extension("json");
    report().arg(trace).args(["--format", "json", "-o"]).arg(&json).assert().success().stdout("");
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/schema/report.v1.schema.json");
    let checked = Command::new(python()).arg(oracle("shapes.py")).args([trace, &json, &schema]).assert().success();
    let said = String::from_utf8(checked.get_output().stdout.clone()).unwrap();
    (serde_json::from_slice(&fs::read(&json).unwrap()).unwrap(), said)
}

#[test]
fn sql_agrees_on_trees_and_passes() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    write(&trace, false);
    let (report, said) = recomputed(&trace);
    assert!(said.contains("numbers agree"), "{said}");
    let path = &report["overall"]["accepted_path"];
    assert_eq!((path["unknown_windows"].as_u64(), report["overall"]["wasted_mean"].is_number()), (Some(0), true));
    assert!(report["batch"]["overall"]["pass_union_ci95"].is_array() && report["advice"].is_null());
    assert_eq!(report["batch"]["requests_histogram"].as_array().map(Vec::len), Some(3));
}

#[test]
fn sql_agrees_where_accepted_rows_cannot_be_told() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    write(&trace, true);
    let (report, said) = recomputed(&trace);
    assert!(said.contains("numbers agree"), "{said}");
    let overall = &report["overall"];
    assert!(overall["accepted_path"]["unknown_windows"].as_u64().unwrap() > 0 && overall["wasted_mean"].is_null());
    assert!(report["warnings"].to_string().contains("unknown_paths"));
}

#[test]
fn the_oracle_notices_a_wrong_number() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    write(&trace, false);
    let (mut wrong, _) = recomputed(&trace);
    let json = trace.with_extension("json");
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/schema/report.v1.schema.json");
    for place in ["/layers/1/by_depth/1/prefix_union", "/batch/layers/0/pass_union_mean"] {
        let value = wrong.pointer_mut(place).unwrap();
        let good = value.clone();
        *value = (good.as_f64().unwrap() + 1e-6).into();
        fs::write(&json, wrong.to_string()).unwrap();
        Command::new(python()).arg(oracle("shapes.py")).args([&trace, &json, &schema]).assert().code(1).stdout(contains("1 of"));
        *wrong.pointer_mut(place).unwrap() = good;
    }
}

#[test]
fn text_tables_and_page_show_them() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    write(&trace, false);
    let text = report().arg(&trace).assert().success();
    let words = ["by depth", "accepted path", "batch", "all, 2 requests", "trees: "];
    words.into_iter().fold(text, |text, word| text.stdout(contains(word)));
    for (table, head) in
        [("depths", "depth,windows,rows_mean,union_mean,prefix_union,marginal"), ("passes", "layer,passes,request_union_mean")]
    {
        report().arg(&trace).args(["--format", "csv", "--table", table]).assert().success().stdout(contains(head));
    }
    report().arg(&trace).args(["--table", "depths"]).assert().code(2).stdout("").stderr(contains("--format csv"));
    report().args([&trace, &trace]).arg("--per-layer").assert().code(2).stdout("").stderr(contains("one trace"));
    report().arg(&trace).args(["--format", "markdown"]).assert().success().stdout(contains("Passes that requests share"));
    report().arg(&trace).args(["--format", "html", "-o", "-"]).assert().success().stdout(contains("Rows by depth"));
    let plain = dir.path().join("plain");
    small().write(&plain).unwrap();
    report().arg(&plain).assert().success().stdout(contains("by depth").or(contains("requests and")).not());
}
