//! `specprof export`: timelines by the rules that viewers apply, and lines that hold every row of the trace.

use crate::trace::{Row, route_rows, small};
use assert_cmd::Command;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::{Ending, FinishReason, Phase, Probe, RequestEvent, StepEvent, Synth, Trace, TraceError, TraceWriter, WriterOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

fn export(trace: &Path, args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.arg("export").arg(trace).args(args);
    command
}

pub fn output(trace: &Path, args: &[&str]) -> String {
    String::from_utf8(export(trace, args).assert().success().stderr("").get_output().stdout.clone()).unwrap()
}

fn written(synth: &Synth) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    synth.write(&trace).unwrap();
    (dir, trace)
}

/// A recording of the built-in model, which has times of operations.
pub fn recorded() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t");
    let args = ["record", "--model", "demo", "--prompt", "def f(x):\n", "--prompt", "class A:", "--max-new-tokens", "24", "--quiet"];
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.args(args).args(["--baseline-steps", "8", "--router-probs", "--store-text", "--out"]).arg(&trace).assert().success();
    (dir, trace)
}

/// What breaks the rules of a Chrome trace: integer ids, order, named tracks, slices that nest.
fn broken(timeline: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let mut named = BTreeSet::new();
    let mut last = 0.0;
    // Ends of the open slices of each track, ns.
    let mut open: BTreeMap<(u64, u64), Vec<i64>> = BTreeMap::new();
    let ns = |v: &Value| v.as_f64().map(|us| (us * 1000.0).round() as i64);
    for (i, event) in timeline["traceEvents"].as_array().into_iter().flatten().enumerate() {
        let (Some(pid), Some(tid)) = (event["pid"].as_u64(), event["tid"].as_u64()) else {
            found.push(format!("event {i}: pid and tid are not integers"));
            continue;
        };
        let (Some(ts), Some(at)) = (event["ts"].as_f64(), ns(&event["ts"])) else {
            found.push(format!("event {i}: no time"));
            continue;
        };
        if ts < last {
            found.push(format!("event {i}: {ts} after {last}"));
        }
        last = ts;
        if event["name"].as_str().is_none_or(str::is_empty) || !event["args"].is_object() {
            found.push(format!("event {i}: no name or arguments"));
        }
        match event["ph"].as_str() {
            Some("M") => {
                if event["name"] == "thread_name" {
                    named.insert((pid, tid));
                }
            }
            Some("C") => {
                let args = event["args"].as_object().into_iter().flatten();
                if args.clone().count() == 0 || args.clone().any(|(_, v)| !v.is_number()) {
                    found.push(format!("event {i}: a counter without numbers"));
                }
            }
            Some("X") => {
                if !named.contains(&(pid, tid)) {
                    found.push(format!("event {i}: track {pid}/{tid} has no name"));
                }
                let Some(length) = ns(&event["dur"]).filter(|d| *d >= 0) else {
                    found.push(format!("event {i}: no duration"));
                    continue;
                };
                let (end, open) = (at + length, open.entry((pid, tid)).or_default());
                while open.last().is_some_and(|&outer| outer <= at) {
                    open.pop();
                }
                if open.last().is_some_and(|&outer| end > outer) {
                    found.push(format!("event {i}: a slice of track {pid}/{tid} ends after the one around it"));
                }
                open.push(end);
            }
            other => found.push(format!("event {i}: phase {other:?}")),
        }
    }
    found
}

fn timeline(trace: &Path, args: &[&str]) -> Value {
    let timeline: Value = serde_json::from_str(&output(trace, &[&["--format", "perfetto"], args].concat())).unwrap();
    assert_eq!(broken(&timeline), Vec::<String>::new());
    timeline
}

fn slices<'a>(timeline: &'a Value, category: &str) -> Vec<&'a Value> {
    timeline["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X" && e["cat"] == category).collect()
}

/// Unions by step and layer, by sets.
fn unions(trace: &Trace) -> BTreeMap<(u64, u64), usize> {
    let mut sets: BTreeMap<(u64, u64), BTreeSet<u16>> = BTreeMap::new();
    for (step, layer, _, draft, ids, _) in route_rows(trace).unwrap() {
        if !draft {
            sets.entry((step.into(), layer.into())).or_default().extend(ids);
        }
    }
    sets.into_iter().map(|(key, set)| (key, set.len())).collect()
}

#[test]
fn a_timeline_has_every_step_row_and_layer() {
    let (_dir, path) = written(&small());
    let trace = Trace::open(&path).unwrap();
    let (steps, unions) = (trace.steps().unwrap(), unions(&trace));
    let timeline = timeline(&path, &[]);
    assert_eq!(slices(&timeline, "step").len(), steps.len());
    let detailed: usize = (0..steps.len()).filter(|&i| steps.phase[i] != Phase::Prefill).map(|i| usize::from(steps.rows[i])).sum();
    assert_eq!(slices(&timeline, "row").len(), detailed);
    let layers = slices(&timeline, "layer");
    assert_eq!(layers.len(), 3 * steps.phase.iter().filter(|p| **p != Phase::Prefill).count());
    let names: BTreeMap<u64, String> = timeline["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["name"] == "thread_name" && e["pid"] == 3)
        .map(|e| (e["tid"].as_u64().unwrap(), e["args"]["name"].as_str().unwrap().to_owned()))
        .collect();
    for slice in layers {
        let layer: u64 = names[&slice["tid"].as_u64().unwrap()].strip_prefix("layer ").unwrap().parse().unwrap();
        let union = unions[&(slice["args"]["step"].as_u64().unwrap(), layer)];
        assert_eq!(
            (slice["args"]["union"].as_u64(), slice["name"].as_str()),
            (Some(union as u64), Some(format!("union {union}").as_str()))
        );
    }
    let counted = timeline["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "C" && e["name"] == "layer 2").count();
    assert_eq!(counted, steps.phase.iter().filter(|p| **p != Phase::Prefill).count());
    assert_eq!(timeline["otherData"]["emulated"], true);
}

/// Kernels of an emulated device have times that are nobody's: there is no slice of them.
#[test]
fn an_emulated_device_has_no_slices_of_kernels() {
    let (_dir, path) = recorded();
    let manifest = path.join("manifest.json");
    let emulated = |text: String| text.replace("\"emulated\": false", "\"emulated\": true");
    let before = timeline(&path, &[]);
    std::fs::write(&manifest, emulated(std::fs::read_to_string(&manifest).unwrap())).unwrap();
    let after = timeline(&path, &[]);
    let kernels = |timeline: &Value| timeline["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X" && e["pid"] == 6).count();
    assert!(kernels(&before) > 0 && kernels(&after) == 0);
    assert!(after["otherData"]["times"].as_str().unwrap().contains("left out"));
    assert_eq!(slices(&before, "step").len(), slices(&after, "step").len());
}

#[test]
fn a_recording_has_its_operations_and_samples_on_tracks() {
    let (_dir, path) = recorded();
    let trace = Trace::open(&path).unwrap();
    let kernels = trace.kernels().unwrap();
    assert!(!kernels.is_empty(), "the recording has no operations");
    let timeline = timeline(&path, &[]);
    let events = timeline["traceEvents"].as_array().unwrap();
    assert_eq!(events.iter().filter(|e| e["ph"] == "X" && e["pid"] == 6).count(), kernels.len());
    assert!(slices(&timeline, "layer").iter().all(|l| l["args"]["spans"] == "its operations"));
    assert!(trace.telemetry().unwrap().is_empty() || events.iter().any(|e| e["ph"] == "C" && e["pid"] == 5));
    // Times are exact to the nanosecond.
    let origin = timeline["otherData"]["origin_unix_ns"].as_i64().unwrap();
    let (first, steps) = (slices(&timeline, "step")[0].clone(), trace.steps().unwrap());
    assert_eq!(origin + (first["ts"].as_f64().unwrap() * 1000.0).round() as i64, steps.host_begin_ns[0]);
    let part = self::timeline(&path, &["--steps", "2..=3"]);
    assert_eq!(slices(&part, "step").len(), 2);
}

/// Steps that all run at once, as a batching engine has them.
struct AtOnce<'a>(&'a mut TraceWriter);

impl Probe for AtOnce<'_> {
    fn wants_weights(&self) -> bool {
        self.0.wants_weights()
    }

    fn step(&mut self, mut step: StepEvent) -> Result<(), TraceError> {
        let slot = i64::from(step.step_id / 3);
        step.host_begin_ns = 1_700_000_000_000_000_000 + slot * 1000 + i64::from(step.step_id % 3) * 10;
        step.host_end_ns = step.host_begin_ns + 995;
        (step.draft_host_ns, step.target_host_ns) = (900, 900);
        self.0.step(step)
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.0.request(request)
    }
}

#[test]
fn steps_that_overlap_are_on_tracks_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let synth = small();
    let mut writer = TraceWriter::create(&path, synth.manifest(), &WriterOptions::default()).unwrap();
    synth.emit(&mut AtOnce(&mut writer)).unwrap();
    writer.finish(Ending::Complete).unwrap();
    let timeline = timeline(&path, &[]);
    let tracks: BTreeSet<u64> = slices(&timeline, "step").iter().map(|s| s["tid"].as_u64().unwrap()).collect();
    assert!(tracks.len() >= 3, "{tracks:?}");
}

#[test]
fn the_check_of_timelines_sees_what_it_must() {
    let event = |ts: f64, dur: f64| serde_json::json!({"ph": "X", "pid": 1, "tid": 1, "ts": ts, "dur": dur, "name": "a", "args": {}});
    let name = serde_json::json!({"ph": "M", "pid": 1, "tid": 1, "ts": 0, "name": "thread_name", "args": {"name": "t"}});
    let of = |events: Vec<Value>| broken(&serde_json::json!({ "traceEvents": events }));
    assert!(of(vec![name.clone(), event(1.0, 5.0), event(1.0, 2.0), event(3.0, 3.0), event(6.0, 1.0)]).is_empty());
    assert!(of(vec![name.clone(), event(1.0, 5.0), event(2.0, 5.0)])[0].contains("ends after"));
    assert!(of(vec![name.clone(), event(3.0, 1.0), event(1.0, 1.0)])[0].contains("after 3"));
    assert!(of(vec![event(1.0, 1.0)])[0].contains("no name"));
    let mut text_id = event(1.0, 1.0);
    text_id["tid"] = "1".into();
    assert!(of(vec![name, text_id])[0].contains("not integers"));
}

/// The lines, read by hand as `docs/jsonl.md` says, against the tables of the trace.
fn check_lines(path: &Path) {
    let trace = Trace::open(path).unwrap();
    let text = output(path, &["--format", "jsonl"]);
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let of = |kind: &str| lines.iter().filter(|l| l["type"] == kind).collect::<Vec<_>>();
    let header = &lines[0];
    assert_eq!((&header["type"], &header["format"]), (&Value::from("header"), &Value::from("specprof.jsonl/1")));
    assert_eq!(of("header").len(), 1);
    let manifest = serde_json::to_value(trace.manifest()).unwrap();
    for (key, value) in manifest.as_object().unwrap() {
        let left_out = ["format_version", "tables", "token_hash"].contains(&key.as_str());
        assert_eq!(header.get(key), (!left_out).then_some(value), "{key}");
    }

    let steps = trace.steps_with_details().unwrap();
    let numbers = |v: &Value| v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect::<Vec<_>>();
    assert_eq!(of("step").len(), steps.len());
    let mut rows: Vec<Row> = Vec::new();
    let layers = numbers(&header["model"]["moe_layers"]);
    for (i, line) in of("step").into_iter().enumerate() {
        let number = |key: &str| line[key].as_i64().unwrap_or_else(|| panic!("{key} of {line}"));
        assert_eq!((number("step_id"), number("request_id")), (steps.step_id[i].into(), steps.request_id[i].into()));
        assert_eq!((line["phase"].as_str().unwrap(), number("accepted")), (steps.phase[i].as_str(), steps.accepted[i].into()));
        assert_eq!(numbers(&line["tokens"]), steps.input_tokens.get(i));
        assert_eq!(numbers(&line["emitted"]), steps.emitted_tokens.get(i));
        assert_eq!(
            (number("context_len"), number("begin_ns"), number("end_ns")),
            (steps.context_len[i].into(), steps.host_begin_ns[i], steps.host_end_ns[i])
        );
        assert_eq!((number("draft_ns"), number("target_ns")), (steps.draft_host_ns[i], steps.target_host_ns[i]));
        assert_eq!(line["device_ns"].as_i64(), steps.device_ns[i]);
        let probabilities = line["draft_probs"].as_array().map(|p| p.iter().map(|v| v.as_f64().unwrap() as f32).collect::<Vec<_>>());
        assert_eq!(probabilities, steps.draft_probs[i]);
        let confidences = line["draft_confidences"].as_array().map(|p| p.iter().map(|v| v.as_f64().unwrap() as f32).collect::<Vec<_>>());
        assert_eq!(confidences, steps.draft_confidences[i]);
        let id = steps.step_id[i];
        let mut own: Vec<Row> = Vec::new();
        let mut add = |layer: u32, row: usize, draft: bool, ids: &Value, weights: &Value| {
            let weights = weights.as_array().into_iter().flatten().map(|w| (w.as_f64().unwrap() as f32).to_bits()).collect();
            own.push((id, layer as u16, row as u16, draft, numbers(ids).into_iter().map(|e| e as u16).collect(), weights));
        };
        for (slot, layer) in line["routes"].as_array().into_iter().flatten().enumerate() {
            for (row, ids) in layer.as_array().into_iter().flatten().enumerate().filter(|(_, ids)| !ids.is_null()) {
                add(layers[slot], row, false, ids, &line["weights"][slot][row]);
            }
        }
        for (block, entry) in line["draft_routes"].as_array().into_iter().flatten().enumerate() {
            let (layer, first) = (entry[0].as_u64().unwrap() as u32, entry[1].as_u64().unwrap() as usize);
            for (row, ids) in entry[2].as_array().unwrap().iter().enumerate() {
                add(layer, first + row, true, ids, &line["draft_weights"][block][row]);
            }
        }
        own.sort_by_key(|r| (r.1, r.2, r.3));
        rows.extend(own);
    }
    let mut expected = route_rows(&trace).unwrap();
    expected.sort_by_key(|r| (r.0, r.1, r.2, r.3));
    assert_eq!(rows, expected);

    let requests = trace.requests().unwrap();
    assert_eq!(of("request").len(), requests.len());
    for (line, request) in of("request").into_iter().zip(&requests) {
        let tags = if line["tags"].is_string() { line["tags"].as_str().unwrap().to_owned() } else { line["tags"].to_string() };
        let text = |key: &str| line[key].as_str().map(str::to_owned);
        let read = RequestEvent {
            request_id: line["request_id"].as_u64().unwrap() as u32,
            id: text("id").unwrap(),
            prompt_tokens: line["prompt_tokens"].as_u64().unwrap() as u32,
            generated_tokens: line["generated_tokens"].as_u64().unwrap() as u32,
            finish_reason: FinishReason::parse(line["finish_reason"].as_str().unwrap()).unwrap(),
            tags,
            prompt_text: text("prompt_text"),
            output_text: text("output_text"),
        };
        assert_eq!(&read, request);
    }
    // A request comes after its last step.
    for request in &requests {
        let at = lines.iter().position(|l| l["type"] == "request" && l["request_id"] == request.request_id).unwrap();
        assert!(lines[at..].iter().all(|l| l["type"] != "step" || l["request_id"] != request.request_id));
    }
    let samples = trace.telemetry().unwrap();
    assert_eq!(of("telemetry").len(), samples.len());
    for (line, sample) in of("telemetry").into_iter().zip(&samples) {
        assert_eq!((line["time_ns"].as_i64(), line["host_load"].as_f64()), (Some(sample.time_ns), sample.host_load));
        assert_eq!((line["rss_bytes"].as_u64(), line["cpu_mhz"].as_f64()), (sample.rss_bytes, sample.cpu_mhz));
    }
    let kernels = trace.kernels().unwrap();
    assert_eq!(of("kernel").len(), kernels.len());
    for (line, (step, kernel)) in of("kernel").into_iter().zip(&kernels) {
        assert_eq!((line["step_id"].as_u64(), line["component"].as_str()), (Some(u64::from(*step)), Some(kernel.component.as_str())));
        assert_eq!(
            (line["begin_ns"].as_i64(), line["end_ns"].as_i64(), line["name"].as_str()),
            (Some(kernel.begin_ns), Some(kernel.end_ns), Some(&*kernel.name))
        );
        assert_eq!((line["layer"].as_u64(), line["module"].as_str()), (kernel.layer.map(u64::from), Some(kernel.module.as_str())));
    }
}

#[test]
fn lines_hold_every_row_of_a_made_up_trace() {
    let (_dir, path) = written(&small());
    check_lines(&path);
    let (_dir, path) = written(&Synth { weights: false, draft_layer: None, ..small() });
    check_lines(&path);
}

#[test]
fn lines_hold_every_row_of_a_recording() {
    let (_dir, path) = recorded();
    check_lines(&path);
}

#[test]
fn what_cannot_be_exported_is_said_on_one_line() {
    let (dir, path) = written(&small());
    let refused = |args: &[&str], what: &str| {
        let out = export(&path, args).assert().code(2).stdout("").stderr(contains(what.to_owned()));
        assert_eq!(String::from_utf8_lossy(&out.get_output().stderr).lines().count(), 1);
    };
    refused(&["--format", "perfetto", "--steps", "5000.."], "the trace has steps 0 to");
    refused(&["--format", "perfetto", "--steps", "7..=3"], "steps 7 to 3");
    refused(&["--format", "jsonl", "--steps", "1"], "--steps goes with --format perfetto");
    export(&path, &[]).assert().code(2);
    export(&dir.path().join("none"), &["--format", "jsonl", "-o", "x"]).assert().code(2);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the trace");
    let file = dir.path().join("p.json");
    export(&path, &["--format", "perfetto", "-o"]).arg(&file).assert().success().stdout("");
    assert!(broken(&serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap()).is_empty());
    // Nobody reads: not a failure.
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("specprof"));
    let mut child = child.args(["export", "--format", "jsonl"]).arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
