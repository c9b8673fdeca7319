//! What was written is what is read.

use super::{Row, files, route_rows};
use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, UInt16Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use proptest::prelude::*;
use specprof::trace::event::RouteBlock;
use specprof::trace::synth::Synth;
use specprof::trace::token_hash::TokenHasher;
use specprof::trace::{
    Ending, FinishReason, HostSampler, Module, Phase, Probe, RequestEvent, StepEvent, StepRoutes, TelemetrySample, Trace, TraceWriter,
    WriterOptions, validate,
};
use std::time::Duration;

const K: usize = 3;
const EXPERTS: u16 = 20;

fn synth(weights: bool) -> Synth {
    Synth { experts: EXPERTS, k: K as u16, layers: (0..6).collect(), draft_layer: Some(6), weights, ..Synth::default() }
}

fn any_routes(weights: bool) -> impl Strategy<Value = StepRoutes> {
    // One block per layer and module: those of the two modules may share rows.
    let block = (0u16..6, 1u16..5);
    let blocks = prop::collection::btree_map((0u16..6, any::<bool>()), block, 0..8);
    (blocks, prop::collection::vec(0..EXPERTS, 8 * 5 * K), prop::collection::vec(any::<u32>(), 8 * 5 * K)).prop_map(
        move |(blocks, ids, bits)| {
            let mut routes = StepRoutes::new(K);
            let mut at = 0;
            for ((layer, draft), (first_row, rows)) in blocks {
                let module = if draft { Module::Draft } else { Module::Target };
                let end = at + usize::from(rows) * K;
                let gates: Vec<f32> = bits[at..end].iter().map(|&b| f32::from_bits(b)).collect();
                // Not in order of layers: the writer sorts.
                routes.push(module, 5 - layer, first_row, &ids[at..end], if weights { &gates } else { &[] });
                at = end;
            }
            routes
        },
    )
}

fn any_step(weights: bool) -> impl Strategy<Value = StepEvent> {
    let tokens = || prop::collection::vec(any::<u32>(), 1..6);
    let times = (any::<i64>(), any::<i64>(), any::<i64>(), any::<i64>(), any::<Option<i64>>());
    (tokens(), tokens(), any::<u16>(), any::<u32>(), any::<bool>(), any::<bool>(), times, any_routes(weights), 0u32..3).prop_map(
        |(input_tokens, emitted_tokens, accepted, context_len, tree, probs, times, routes, request_id)| {
            let rows = input_tokens.len();
            StepEvent {
                step_id: 0,
                request_id,
                phase: if rows == 1 { Phase::Decode } else { Phase::Verify },
                accepted: accepted % rows as u16,
                context_len,
                pass_id: None,
                parents: tree.then(|| (0..rows as i16).map(|i| i - 1).collect()),
                draft_probs: probs.then(|| (1..rows).map(|i| i as f32 / 7.0).collect()),
                draft_confidences: (probs != tree).then(|| (1..rows).map(|i| 1.0 - i as f32 / 9.0).collect()),
                input_tokens,
                emitted_tokens,
                host_begin_ns: times.0,
                host_end_ns: times.1,
                draft_host_ns: times.2,
                target_host_ns: times.3,
                device_ns: times.4,
                routes,
            }
        },
    )
}

fn expected_rows(step: &StepEvent) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut at = 0;
    for &RouteBlock { layer, module, first_row, rows: n } in &step.routes.blocks {
        for i in 0..n {
            let weights = step.routes.weights.get(at..at + K).unwrap_or_default();
            let ids = step.routes.ids[at..at + K].to_vec();
            rows.push((step.step_id, layer, first_row + i, module == Module::Draft, ids, weights.iter().map(|w| w.to_bits()).collect()));
            at += K;
        }
    }
    rows.sort();
    rows
}

fn request(request_id: u32) -> RequestEvent {
    RequestEvent {
        request_id,
        id: format!("r{request_id} \u{e9}"),
        prompt_tokens: 7,
        generated_tokens: request_id,
        finish_reason: [FinishReason::Stop, FinishReason::Length, FinishReason::Aborted][request_id as usize % 3],
        tags: r#"{"a":[1]}"#.into(),
        prompt_text: (request_id == 1).then(|| "text".into()),
        output_text: (request_id == 2).then(String::new),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn any_events_are_read_back_as_they_were(
        (weights, mut steps) in any::<bool>().prop_flat_map(|w| (Just(w), prop::collection::vec(any_step(w), 0..30))),
        often in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        let flush_interval = Duration::from_millis(if often { 0 } else { 500 });
        let options = WriterOptions { flush_interval, queue: 4, ..WriterOptions::default() };
        let mut writer = TraceWriter::create(&path, synth(weights).manifest(), &options).unwrap();
        let mut hasher = TokenHasher::default();
        for (i, step) in steps.iter_mut().enumerate() {
            step.step_id = i as u32 * 3;
            hasher.add(step.request_id, &step.emitted_tokens);
            writer.step(step.clone()).unwrap();
        }
        let requests: Vec<_> = (0..3).map(request).collect();
        requests.iter().for_each(|r| writer.request(r.clone()).unwrap());
        let manifest = writer.finish(Ending::Complete).unwrap();
        prop_assert_eq!(manifest.token_hash.clone(), Some(hasher.finish()));

        let trace = Trace::open(&path).unwrap();
        prop_assert_eq!(trace.manifest(), &manifest);
        prop_assert!(trace.telemetry().unwrap().is_empty());
        prop_assert_eq!(trace.requests().unwrap(), requests);
        let want: Vec<Row> = steps.iter().flat_map(expected_rows).collect();
        prop_assert_eq!(route_rows(&trace).unwrap(), want);
        let got = trace.steps_with_details().unwrap();
        prop_assert_eq!(got.len(), steps.len());
        for (i, step) in steps.iter().enumerate() {
            let routes = step.routes.clone();
            let read = StepEvent {
                step_id: got.step_id[i],
                request_id: got.request_id[i],
                phase: got.phase[i],
                accepted: got.accepted[i],
                context_len: got.context_len[i],
                pass_id: got.pass_id[i],
                input_tokens: got.input_tokens.get(i).to_vec(),
                parents: got.parents[i].clone(),
                emitted_tokens: got.emitted_tokens.get(i).to_vec(),
                draft_probs: got.draft_probs[i].clone(),
                draft_confidences: got.draft_confidences[i].clone(),
                host_begin_ns: got.host_begin_ns[i],
                host_end_ns: got.host_end_ns[i],
                draft_host_ns: got.draft_host_ns[i],
                target_host_ns: got.target_host_ns[i],
                device_ns: got.device_ns[i],
                routes: routes.clone(),
            };
            // Weights may be NaN, which is not equal to itself; their bits were compared above.
            let want = StepEvent { routes, ..step.clone() };
            prop_assert_eq!(StepEvent { routes: StepRoutes::default(), ..read }, StepEvent { routes: StepRoutes::default(), ..want });
            prop_assert_eq!(usize::from(got.rows[i]), step.rows());
        }
    }
}

#[test]
fn a_synthetic_trace_keeps_every_rule() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let manifest = Synth { draft_layer: Some(42), weights: true, ..Synth::default() }.write(&path).unwrap();
    assert!(manifest.complete && manifest.emulated);
    let validation = validate(&Trace::open(&path).unwrap()).unwrap();
    assert_eq!(validation.failed(), 0, "{validation:#?}");
}

#[test]
fn many_small_parts_become_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let options = WriterOptions { flush_interval: Duration::ZERO, queue: 4, ..WriterOptions::default() };
    let synth = Synth { verify_steps: 60, ..synth(false) };
    let mut writer = TraceWriter::create(&path, synth.manifest(), &options).unwrap();
    let telemetry = writer.telemetry();
    let sample = TelemetrySample {
        time_ns: 1,
        sm_clock_mhz: Some(1980),
        memory_clock_mhz: None,
        power_w: Some(412.5),
        temperature_c: Some(61.0),
        throttle_reasons: Some("power cap".into()),
        memory_used_bytes: Some(1 << 36),
        host_load: Some(0.5),
        cpu_mhz: None,
        rss_bytes: Some(7),
    };
    telemetry.offer(sample.clone());
    synth.emit(&mut writer).unwrap();
    let manifest = writer.finish(Ending::Complete).unwrap();
    // Of a table without rows there is no part.
    let parts = |name: &str| usize::from(name != "kernels");
    assert!(manifest.tables.iter().all(|(name, p)| p.len() == parts(name)), "{:?}", manifest.tables);
    // More parts were written than are left, and no file is left that does not belong to the trace.
    assert_ne!(manifest.tables["routes"][0].path, "routes/part-00000.parquet");
    let listed = manifest.tables.values().flatten().count();
    assert_eq!(files(&path).len(), listed + 1, "{:?}", files(&path));
    let trace = Trace::open(&path).unwrap();
    assert_eq!(validate(&trace).unwrap().failed(), 0);
    assert_eq!(trace.telemetry().unwrap(), [sample]);
}

#[test]
fn large_parts_end_with_a_step_and_are_small_enough() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let synth = Synth { requests: 5, verify_steps: 1000, prompt_rows: 0, decode_every: 0, ..Synth::default() };
    synth.write(&path).unwrap();
    let trace = Trace::open(&path).unwrap();
    let tables = trace.tables();
    let routes = tables.iter().find(|t| t.name == "routes").unwrap();
    assert_eq!(routes.rows, 5 * 1000 * 4 * 40);
    // 40 layers of 8 ids, keys included; performance.md measured 367 with the same encoding.
    let per_token = routes.bytes as f64 / (5.0 * 1000.0 * 4.0);
    assert!(per_token <= 380.0, "{per_token} B/token");
    let units = trace.route_units().unwrap();
    assert_eq!(units.len(), 2, "a unit a row group: 650k rows and the rest");
    let ranges: Vec<_> = units.iter().map(|u| u.steps().unwrap()).collect();
    assert_eq!((ranges[0].0, ranges[0].1 + 1, ranges[1].1), (0, ranges[1].0, 4999));
    assert_eq!(validate(&trace).unwrap().failed(), 0);
}

/// Parts of many rows are encoded by the trace's own code: its own reader and the library's must agree on every id.
#[test]
fn large_parts_are_read_by_the_librarys_reader_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    // Ids of nine bits, more rows than one page has.
    let synth =
        Synth { requests: 2, verify_steps: 450, layers: (1..21).collect(), draft_layer: Some(42), experts: 400, k: 3, ..synth(true) };
    synth.write(&path).unwrap();
    let mut ours = route_rows(&Trace::open(&path).unwrap()).unwrap();
    assert!(ours.len() > 66_000, "{}", ours.len());
    ours.reverse();
    let mut parts: Vec<_> = std::fs::read_dir(path.join("routes")).unwrap().map(|e| e.unwrap().path()).collect();
    parts.sort();
    for part in parts {
        let reader = ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(part).unwrap()).unwrap();
        let encodings: Vec<_> = reader.metadata().row_group(0).column(4).encodings().collect();
        assert!(encodings.contains(&parquet::basic::Encoding::RLE_DICTIONARY), "{encodings:?}");
        for batch in reader.build().unwrap() {
            let batch = batch.unwrap();
            let numbers = |name: &str| batch.column_by_name(name).unwrap().as_primitive::<UInt16Type>().values().to_vec();
            let (layer, row, ids) = (numbers("layer"), numbers("row"), ["e0", "e1", "e2"].map(numbers));
            let weights = batch.column_by_name("w2").unwrap().as_primitive::<Float32Type>().values().to_vec();
            for i in 0..batch.num_rows() {
                let mine = ours.pop().unwrap();
                let theirs = (layer[i], row[i], ids.iter().map(|column| column[i]).collect::<Vec<_>>(), weights[i].to_bits());
                assert_eq!((mine.1, mine.2, mine.4, mine.5[2]), theirs);
            }
        }
    }
    assert!(ours.is_empty());
}

#[test]
fn dropped_without_an_end_it_is_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let synth = synth(false);
    let mut writer = TraceWriter::create(&path, synth.manifest(), &WriterOptions::default()).unwrap();
    synth.emit(&mut writer).unwrap();
    drop(writer);
    let trace = Trace::open(&path).unwrap();
    assert!(!trace.manifest().complete && trace.manifest().token_hash.is_none());
    assert!(trace.warnings().iter().any(|w| w.code == "incomplete"));
    let validation = validate(&trace).unwrap();
    assert!(validation.relaxed && validation.failed() == 0, "{validation:#?}");
}

#[test]
#[cfg(target_os = "linux")]
fn the_sampler_fills_the_telemetry_table_and_stops_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let writer = TraceWriter::create(&path, synth(false).manifest(), &WriterOptions::default()).unwrap();
    let sampler = HostSampler::start(writer.telemetry(), Duration::from_millis(20), None).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(sampler);
    let long = HostSampler::start(writer.telemetry(), Duration::from_secs(3600), None).unwrap();
    let begin = std::time::Instant::now();
    drop(long);
    assert!(begin.elapsed() < Duration::from_secs(10), "it slept through its end");
    writer.finish(Ending::Complete).unwrap();
    let trace = Trace::open(&path).unwrap();
    let samples = trace.telemetry().unwrap();
    assert!(samples.len() >= 3 && samples.iter().all(|s| s.rss_bytes.is_some() && s.power_w.is_none()), "{samples:?}");
    assert_eq!(validate(&trace).unwrap().failed(), 0);
}
