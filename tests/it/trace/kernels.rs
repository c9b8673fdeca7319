//! The table of operations: written, read back, refused where it cannot be.

use super::{edit_manifest, only_part, rewrite, small};
use arrow_array::{ArrayRef, Int64Array, RecordBatch, UInt16Array, UInt32Array};
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;
use specprof::trace::synth::{PlantedTimes, Synth};
use specprof::trace::{Component, Ending, KernelEvent, Module, Probe, Trace, TraceError, TraceWriter, WriterOptions, validate};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(crate) fn timed() -> Synth {
    let times = PlantedTimes { base: 177.0, per_expert: 36.0, per_row: 5.0, attention: 80.0, attention_per_row: 11.0, noise: 3.0 };
    Synth { times: Some(times), ..small() }
}

fn any_event() -> impl Strategy<Value = KernelEvent> {
    let place = (any::<Option<u16>>(), any::<bool>(), 0..Component::ALL.len(), "[a-z_<>, ]{0,40}");
    let times = (any::<i32>(), 0u32..1_000_000);
    let launch = (any::<Option<u32>>(), any::<Option<u64>>(), any::<Option<u64>>(), any::<Option<[u32; 3]>>(), any::<Option<[u32; 3]>>());
    (place, times, launch, any::<Option<u32>>(), any::<Option<u32>>()).prop_map(|(place, times, launch, registers, shared_bytes)| {
        let begin_ns = i64::from(times.0);
        KernelEvent {
            layer: place.0,
            module: if place.1 { Module::Draft } else { Module::Target },
            component: Component::ALL[place.2],
            name: Cow::Owned(place.3),
            stream: launch.0,
            begin_ns,
            end_ns: begin_ns + i64::from(times.1),
            correlation_id: launch.1,
            graph_node_id: launch.2,
            grid: launch.3,
            block: launch.4,
            registers,
            shared_bytes,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]
    #[test]
    fn any_operations_are_read_back_as_they_were(
        by_step in prop::collection::vec(prop::collection::vec(any_event(), 0..6), 10),
        often in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        let flush_interval = Duration::from_millis(if often { 0 } else { 500 });
        let options = WriterOptions { flush_interval, kernels: true, ..WriterOptions::default() };
        let mut writer = TraceWriter::create(&path, small().manifest(), &options).unwrap();
        let mut want = Vec::new();
        let mut source = Steps(Vec::new());
        small().emit(&mut source).unwrap();
        for (step, events) in source.0.into_iter().zip(by_step) {
            let step_id = step.step_id;
            writer.step(step).unwrap();
            writer.kernels(step_id, events.clone()).unwrap();
            want.extend(events.into_iter().map(|event| (step_id, event)));
        }
        let manifest = writer.finish(Ending::Complete).unwrap();
        prop_assert!(manifest.tables["kernels"].len() <= 1);
        let trace = Trace::open(&path).unwrap();
        prop_assert_eq!(trace.has_kernels(), !want.is_empty());
        prop_assert_eq!(&trace.kernels().unwrap(), &want);
        let mut at = 0;
        trace.each_kernels(|rows| {
            for i in 0..rows.len() {
                let (step, event) = &want[at];
                assert_eq!((rows.step_id[i], rows.layer[i], rows.module[i]), (*step, event.layer, event.module));
                assert_eq!((rows.component[i], rows.begin_ns[i], rows.end_ns[i]), (event.component, event.begin_ns, event.end_ns));
                at += 1;
            }
            Ok::<_, TraceError>(())
        }).unwrap();
        prop_assert_eq!(at, want.len());
    }
}

/// Keeps the steps.
struct Steps(Vec<specprof::trace::StepEvent>);

impl Probe for Steps {
    fn wants_weights(&self) -> bool {
        true
    }

    fn step(&mut self, step: specprof::trace::StepEvent) -> Result<(), TraceError> {
        self.0.push(step);
        Ok(())
    }

    fn request(&mut self, _: specprof::trace::RequestEvent) -> Result<(), TraceError> {
        Ok(())
    }
}

#[test]
fn planted_times_make_a_valid_trace() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    timed().write(&path).unwrap();
    let trace = Trace::open(&path).unwrap();
    let validation = validate(&trace).unwrap();
    assert_eq!(validation.failed(), 0, "{validation:#?}");
    let kernels = trace.kernels().unwrap();
    // Two operations in each of three layers of every step.
    assert_eq!(kernels.len(), 6 * trace.steps().unwrap().len());
    // Decode: k = 4 experts, one row.
    let steps = trace.steps().unwrap();
    let decode = steps.rows.iter().position(|&rows| rows == 1).unwrap();
    let of_decode: Vec<i64> = kernels.iter().filter(|k| k.0 == steps.step_id[decode]).map(|k| k.1.end_ns - k.1.begin_ns).collect();
    for pair in of_decode.chunks(2) {
        assert!((pair[0] - 326_000).abs() <= 3_000 && (pair[1] - 91_000).abs() <= 3_000, "{pair:?}");
    }
    assert_eq!(steps.target_host_ns[decode], of_decode.iter().sum::<i64>());
}

#[test]
fn a_trace_without_the_table_has_no_operations() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    timed().write(&path).unwrap();
    edit_manifest(&path, |m| drop(m.tables.remove("kernels")));
    let trace = Trace::open(&path).unwrap();
    assert!(!trace.has_kernels() && trace.kernels().unwrap().is_empty());
    assert_eq!(validate(&trace).unwrap().failed(), 0);
}

#[test]
fn operations_that_no_trace_can_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = WriterOptions { kernels: true, ..WriterOptions::default() };
    let mut writer = TraceWriter::create(&dir.path().join("t"), small().manifest(), &options).unwrap();
    let mut source = Steps(Vec::new());
    small().emit(&mut source).unwrap();
    let op = || KernelEvent::cpu(Module::Target, None, Component::Head, 5, 9);
    let message = |r: Result<(), TraceError>| r.unwrap_err().to_string();
    assert!(message(writer.kernels(0, vec![op()])).contains("before it"));
    let mut steps = source.0.into_iter();
    writer.step(steps.next().unwrap()).unwrap();
    writer.step(steps.next().unwrap()).unwrap();
    assert!(message(writer.kernels(1, vec![KernelEvent { end_ns: 4, ..op() }])).contains("ends before it begins"));
    writer.kernels(1, vec![op()]).unwrap();
    assert!(message(writer.kernels(0, vec![op()])).contains("step before"));
}

/// Writes a timed trace, changes one column of its operations and gives what is wrong with it.
fn broken(change: impl Fn(&Path)) -> Result<Vec<String>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    timed().write(&path).unwrap();
    change(&path);
    let trace = Trace::open(&path).map_err(|e| e.to_string())?;
    let validation = validate(&trace).map_err(|e| e.to_string())?;
    Ok(validation.checks.into_iter().filter(|c| !c.ok).map(|c| format!("{}: {}", c.name, c.detail)).collect())
}

fn with_column(trace: &Path, name: &str, of: impl Fn(usize) -> ArrayRef) {
    rewrite(trace, "kernels", WriterProperties::builder().build(), |batch| {
        let (at, _) = batch.schema().column_with_name(name).unwrap();
        let mut columns = batch.columns().to_vec();
        columns[at] = of(batch.num_rows());
        RecordBatch::try_new(batch.schema(), columns).unwrap()
    });
}

#[test]
fn what_is_wrong_is_named() {
    let step = |trace: &Path| with_column(trace, "step_id", |n| Arc::new(UInt32Array::from_iter_values((0..n).map(|i| i as u32))));
    let found = broken(step).unwrap();
    assert!(found.len() == 1 && found[0].starts_with("kernel_step: kernels, row "), "{found:?}");
    let layer = |trace: &Path| with_column(trace, "layer", |n| Arc::new(UInt16Array::from(vec![99; n])));
    assert_eq!(broken(layer).unwrap(), ["kernel_layer: kernels, row 0: layer 99 of a target of 4 layers"]);
    let time = |trace: &Path| with_column(trace, "end_ns", |n| Arc::new(Int64Array::from(vec![0; n])));
    assert_eq!(broken(time).unwrap(), ["kernel_times: kernels, row 0: it ends before it begins"]);
    let order =
        |trace: &Path| with_column(trace, "step_id", |n| Arc::new(UInt32Array::from_iter_values((0..n).map(|i| u32::from(i == 0)))));
    let message = broken(order).unwrap_err();
    assert!(message.contains("kernels") && message.contains("row 1") && message.contains("out of order"), "{message}");
    let garbage = |trace: &Path| std::fs::write(only_part(trace, "kernels"), b"PAR1 not a table PAR1").unwrap();
    assert!(broken(garbage).unwrap_err().contains("kernels/part-"));
}

#[test]
fn killed_between_a_step_and_its_operations_it_still_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let options = WriterOptions { kernels: true, flush_interval: Duration::ZERO, ..WriterOptions::default() };
    let mut writer = TraceWriter::create(&path, small().manifest(), &options).unwrap();
    let mut source = Steps(Vec::new());
    small().emit(&mut source).unwrap();
    writer.step(source.0[0].clone()).unwrap();
    drop(writer);
    let trace = Trace::open(&path).unwrap();
    assert!(!trace.has_kernels());
    assert_eq!(validate(&trace).unwrap().failed(), 0);
}
