//! What `export --format jsonl` writes is read back as the same trace, whatever the trace knows.

use super::*;
use specprof::trace::TraceWriter;
use specprof::trace::{Component, Ending, KernelEvent, Module, Probe, Synth, WriterOptions};

fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/samples/ling-nano")
}

fn export(trace: &Path) -> String {
    let out = specprof().args(["export", "--format", "jsonl"]).arg(trace).assert().success();
    String::from_utf8(out.get_output().stdout.clone()).unwrap()
}

/// Exports, imports and exports again: both traces and both texts must be the same. Gives the second trace.
pub(super) fn round_trip(trace: &Path) -> Imported {
    let first = export(trace);
    let dir = tempfile::tempdir().unwrap();
    let lines = dir.path().join("t.jsonl");
    std::fs::write(&lines, &first).unwrap();
    let back = import(&["jsonl", text(&lines)]);
    let second = export(&back.path);
    let differs = first.lines().zip(second.lines()).find(|(a, b)| a != b);
    assert_eq!(differs, None);
    assert_eq!(first.len(), second.len());
    let before = Trace::open(trace).unwrap();
    assert_eq!(back.trace.steps_with_details().unwrap(), before.steps_with_details().unwrap());
    assert_eq!(back.trace.requests().unwrap(), before.requests().unwrap());
    assert_eq!(back.trace.kernels().unwrap(), before.kernels().unwrap());
    assert_eq!(back.trace.telemetry().unwrap(), before.telemetry().unwrap());
    assert_eq!(route_rows(&back.trace).unwrap(), route_rows(&before).unwrap());
    let facts = |m: &Manifest| Manifest { tables: BTreeMap::new(), format_version: String::new(), ..m.clone() };
    assert_eq!(facts(back.manifest()), facts(before.manifest()));
    back
}

#[test]
fn the_sample_with_its_times_and_weights_comes_back() {
    let back = round_trip(&sample());
    assert!(back.trace.has_kernels());
    // The same numbers, costs and advice included.
    let report = |trace: &Path| -> Value {
        let out = specprof().arg("report").arg(trace).args(["--format", "json"]).assert().success();
        let mut report: Value = serde_json::from_slice(&out.get_output().stdout).unwrap();
        for key in ["name", "format_version"] {
            report["run"].as_object_mut().unwrap().remove(key);
        }
        report
    };
    let (theirs, ours) = (report(&sample()), report(&back.path));
    assert!(theirs["cost"]["verify_ratio"].is_number());
    assert_eq!(theirs, ours);
}

#[test]
fn what_an_import_does_not_know_stays_unknown() {
    for (name, args) in [
        ("vllm/completions_response_v0.33.json", &["--experts", "64"][..]),
        ("vllm/completions_response_v0.33.json", &[]),
        ("acceptance/per_request_examples.json", &[]),
        ("llamacpp/F_moetrc01.moetrace", &[]),
        ("llamacpp/C_int32_records.bin", &["--prompt-tokens", "4"]),
    ] {
        let path = data(name);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("t");
        let imported = specprof().arg("import").args(args).arg(&path).arg("-o").arg(&out).output().unwrap();
        if imported.status.success() {
            let back = round_trip(&out);
            assert!(!back.manifest().host_times && back.manifest().sampling.is_none(), "{name}");
        } else {
            assert_eq!(imported.status.code(), Some(2), "{name}");
        }
    }
}

#[test]
fn every_column_of_kernels_comes_back_and_an_incomplete_trace_stays_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let synth = Synth { verify_steps: 3, ..Synth::default() };
    let mut facts = synth.manifest();
    facts.ended_unix_ns = Some(7);
    let mut writer = TraceWriter::create(&path, facts, &WriterOptions::default()).unwrap();
    synth.emit(&mut writer).unwrap();
    let bare = KernelEvent::cpu(Module::Draft, Some(42), Component::Experts, -5, i64::MAX);
    let full = KernelEvent {
        name: "void moe<\"x\",\\n>\u{e9}\u{0}".into(),
        stream: Some(u32::MAX),
        correlation_id: Some(u64::MAX),
        graph_node_id: Some(0),
        grid: Some([1, 2, 3]),
        block: Some([1024, 1, 1]),
        registers: Some(255),
        shared_bytes: Some(0),
        ..KernelEvent::cpu(Module::Target, None, Component::Other, 0, 0)
    };
    writer.kernels(0, vec![full.clone(), bare.clone()]).unwrap();
    writer.kernels(2, vec![bare, full]).unwrap();
    writer.finish(Ending::Incomplete("interrupted".into())).unwrap();
    let back = round_trip(&path);
    assert_eq!((back.manifest().complete, back.manifest().incomplete_reason.as_deref()), (false, Some("interrupted")));
}
