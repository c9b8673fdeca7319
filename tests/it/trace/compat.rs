//! One tiny trace of every published format version keeps opening with the same numbers.

use super::kernels::timed;
use super::{Row, files, route_rows};
use serde_json::{Value, json};
use specprof::trace::manifest::{IdSpace, Verification};
use specprof::trace::token_hash::TokenHasher;
use specprof::trace::{Ending, TelemetrySample, Trace, TraceWriter, WriterOptions, validate};
use std::fs;
use std::path::{Path, PathBuf};

fn compat() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/compat")
}

/// Numbers that change when anything is read otherwise than it was meant.
fn numbers(trace: &Trace) -> Value {
    let steps = trace.steps_with_details().unwrap();
    let rows = route_rows(trace).unwrap();
    let sum = |of: fn(&Row) -> u64| rows.iter().map(of).sum::<u64>();
    let mut ids = TokenHasher::default();
    rows.iter().for_each(|row| row.4.iter().for_each(|&id| ids.add(0, &[u32::from(id)])));
    let kernels = trace.kernels().unwrap();
    let mut numbers = json!({
        "format_version": trace.manifest().format_version,
        "complete": trace.manifest().complete,
        "token_hash": trace.manifest().token_hash,
        "requests": trace.requests().unwrap().iter().map(|r| json!([r.id, r.prompt_tokens, r.generated_tokens, r.finish_reason])).collect::<Vec<_>>(),
        "steps": steps.len(),
        "rows": steps.rows.iter().map(|&r| u64::from(r)).sum::<u64>(),
        "accepted": steps.accepted.iter().map(|&a| u64::from(a)).sum::<u64>(),
        "emitted": steps.emitted_tokens.values().len(),
        "input_token_sum": steps.input_tokens.values().iter().map(|&t| u64::from(t)).sum::<u64>(),
        "target_host_ns": steps.target_host_ns.iter().sum::<i64>(),
        "route_rows": rows.len(),
        "draft_rows": sum(|row| u64::from(row.3)),
        "layer_sum": sum(|row| u64::from(row.1)),
        "id_hash": ids.finish(),
        "weight_bits_sum": sum(|row| row.5.iter().map(|&w| u64::from(w)).sum()),
        "telemetry": trace.telemetry().unwrap().len(),
    });
    if !kernels.is_empty() {
        numbers["kernels"] = json!(kernels.len());
        numbers["kernel_ns"] = json!(kernels.iter().map(|(_, k)| k.end_ns - k.begin_ns).sum::<i64>());
        numbers["kernel_name_bytes"] = json!(kernels.iter().map(|(_, k)| k.name.len()).sum::<usize>());
    }
    numbers
}

#[test]
fn every_published_version_opens_with_its_numbers() {
    let mut versions = 0;
    for entry in fs::read_dir(compat()).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.is_dir() {
            continue;
        }
        versions += 1;
        let trace = Trace::open(&dir.join("trace")).unwrap();
        let expected: Value = serde_json::from_slice(&fs::read(dir.join("expected.json")).unwrap()).unwrap();
        assert_eq!(numbers(&trace), expected, "{}", dir.display());
        assert_eq!(validate(&trace).unwrap().failed(), 0, "{}", dir.display());
        let bytes: u64 = files(&dir.join("trace")).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        assert!(bytes < 30_000, "{bytes} bytes");
    }
    assert!(versions > 0, "no version is there");
}

/// Makes the trace of the version that this build writes, once; a published one is never changed.
#[test]
#[ignore = "writes a new version's trace into the source tree"]
fn publish_this_version() {
    let dir = compat().join(format!("v{}", specprof::trace::FORMAT_VERSION));
    fs::create_dir_all(&dir).unwrap();
    let path = dir.join("trace");
    // With what this version brought: facts that nobody said.
    let mut facts = timed().manifest();
    (facts.sampling, facts.drafter.draft_len, facts.host_times) = (None, None, false);
    (facts.verification, facts.id_space) = (Verification::Unknown, IdSpace::Unknown);
    (facts.model.hidden_size, facts.model.bytes_per_expert, facts.model.experts_known) = (None, None, false);
    let mut writer = TraceWriter::create(&path, facts, &WriterOptions { kernels: true, ..WriterOptions::default() }).unwrap();
    writer.telemetry().offer(TelemetrySample { time_ns: 1_700_000_000_000_000_000, host_load: Some(0.25), ..TelemetrySample::default() });
    timed().emit(&mut writer).unwrap();
    writer.finish(Ending::Complete).unwrap();
    let numbers = numbers(&Trace::open(&path).unwrap());
    fs::write(dir.join("expected.json"), serde_json::to_string_pretty(&numbers).unwrap() + "\n").unwrap();
}
