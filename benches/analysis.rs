//! File to report: tokens per second and peak memory, against bare decoding of the same columns (by the Parquet library's
//! reader, and by the faster one that the report uses) and, with feature `peers`, against the idiomatic data-frame way. One token is one position of a verify window through all layers.
//!
//! `SPECPROF_BENCH_TOKENS` (50000) and `SPECPROF_BENCH_LAYERS` (40) set the size; `SPECPROF_BENCH_PEER_TOKENS` (50000) is
//! the largest trace that the peer is given.

use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use rayon::prelude::*;
use specprof::analysis::{Options, analyze};
use specprof::trace::{Synth, Trace};
use std::fs;
use std::path::Path;
use std::time::Instant;

/// A number from the environment.
fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Forgets the peak of the resident memory; without the right to do so the next peak is that of the whole process.
fn reset_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Peak resident memory since [`reset_peak`], MB.
fn peak_mb() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<f64>().ok()).map_or(f64::NAN, |kb| kb / 1024.0)
}

/// CPU time of all threads, seconds.
fn cpu_s() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) / 100.0
}

/// Runs `work` a few times and prints the best; returns its seconds.
fn measure<T>(name: &str, tokens: usize, times: usize, mut work: impl FnMut() -> T) -> (f64, T) {
    reset_peak();
    let (before, mut best, mut result) = (cpu_s(), f64::INFINITY, None);
    for _ in 0..times {
        let start = Instant::now();
        result = Some(work());
        best = best.min(start.elapsed().as_secs_f64());
    }
    let cpu = (cpu_s() - before) / times as f64;
    println!(
        "{name:<28} {:>9.3} Mtok/s  {:>8.3} us/token wall  {:>7.3} us/token CPU  peak {:>6.0} MB",
        tokens as f64 / best / 1e6,
        best / tokens as f64 * 1e6,
        cpu / tokens as f64 * 1e6,
        peak_mb()
    );
    (best, result.expect("at least one run"))
}

/// The same columns by the Parquet library's own reader, row groups in parallel, nothing else done.
fn decode_by_library(dir: &Path) -> u64 {
    let trace = Trace::open(dir).expect("trace");
    let parts: Vec<_> = trace.manifest().tables["routes"].iter().map(|part| dir.join(&part.path)).collect();
    let open = |part: &Path| ParquetRecordBatchReaderBuilder::try_new(fs::File::open(part).expect("part")).expect("a Parquet file");
    let groups = parts.iter().flat_map(|part| (0..open(part).metadata().num_row_groups()).map(move |group| (part, group)));
    let rows = |(part, group): (&std::path::PathBuf, usize)| -> u64 {
        let builder = open(part);
        let columns = ["step_id", "layer", "row", "e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7"];
        let mask = ProjectionMask::columns(builder.parquet_schema(), columns);
        let reader = builder.with_projection(mask).with_row_groups(vec![group]).with_batch_size(16_384).build().expect("a reader");
        reader.map(|batch| batch.expect("batch").num_rows() as u64).sum()
    };
    groups.collect::<Vec<_>>().into_par_iter().map(rows).sum()
}

/// Every column that the analysis needs, decoded and touched, nothing more.
fn decode(dir: &Path) -> u64 {
    let trace = Trace::open(dir).expect("trace");
    let units = trace.route_units().expect("units");
    let sum = |unit: &specprof::trace::RouteUnit| {
        let mut reader = unit.read(false);
        let mut sum = 0;
        while let Some(batch) = reader.next_batch().expect("batch") {
            sum += batch.len() as u64 + batch.ids.iter().map(|c| u64::from(c.last().copied().unwrap_or(0))).sum::<u64>();
        }
        sum
    };
    units.par_iter().map(sum).sum()
}

fn main() {
    let tokens = setting("SPECPROF_BENCH_TOKENS", 50_000);
    let layers = setting("SPECPROF_BENCH_LAYERS", 40) as u16;
    let requests = 16u32;
    let verify_steps = tokens.div_ceil(4 * requests as usize) as u32;
    let synth = Synth { requests, verify_steps, decode_every: 0, prompt_rows: 5, layers: (2..2 + layers).collect(), ..Synth::default() };
    let tokens = (requests * verify_steps * 4) as usize;
    let dir = tempfile::tempdir().expect("a directory");
    let trace = dir.path().join("trace");
    let start = Instant::now();
    synth.write(&trace).expect("synthetic trace");
    println!("{tokens} tokens, {layers} layers, {} threads (made in {:.1} s)", rayon::current_num_threads(), start.elapsed().as_secs_f64());

    let times = if tokens > 200_000 { 2 } else { 5 };
    let (library, _) = measure("decode, Parquet library", tokens, times, || decode_by_library(&trace));
    let (bare, _) = measure("decode, as the report reads", tokens, times, || decode(&trace));
    let (ours, report) = measure("file to report", tokens, times, || analyze(&trace, &Options::default()).expect("report"));
    println!("file to report / decode: {:.2} by the Parquet library, {:.2} as the report reads", ours / library, ours / bare);
    peers(&trace, tokens, ours, &report);
}

#[cfg(not(feature = "peers"))]
fn peers(_: &Path, _: usize, _: f64, _: &specprof::metric::Report) {
    println!("built without feature `peers`: no comparison with the data-frame way");
}

/// Mean union by layer the idiomatic way: read the parts, one row per slot, count distinct per window, group by layer.
#[cfg(feature = "peers")]
fn peers(trace: &Path, tokens: usize, ours: f64, report: &specprof::metric::Report) {
    use polars::prelude::*;
    use polars_io::SerReader;
    use polars_io::parquet::read::ParquetReader;

    if tokens > setting("SPECPROF_BENCH_PEER_TOKENS", 50_000) {
        println!("too large for the peer; see SPECPROF_BENCH_PEER_TOKENS");
        return;
    }
    let opened = Trace::open(trace).expect("trace");
    let parts: Vec<_> = opened.manifest().tables["routes"].iter().map(|p| trace.join(&p.path)).collect();
    let steps: Vec<_> = opened.manifest().tables["steps"].iter().map(|p| trace.join(&p.path)).collect();
    let read = |path: &Path, columns: &[&str]| -> LazyFrame {
        let file = fs::File::open(path).expect("part");
        let columns = columns.iter().map(|c| (*c).to_owned()).collect();
        ParquetReader::new(file).with_columns(Some(columns)).finish().expect("frame").lazy()
    };
    let ids: Vec<String> = (0..8).map(|i| format!("e{i}")).collect();
    let (taken, frame) = measure("polars, unions only", tokens, 1, || -> DataFrame {
        let mut columns: Vec<&str> = ids.iter().map(String::as_str).collect();
        columns.extend(["step_id", "layer"]);
        let routes = concat(parts.iter().map(|p| read(p, &columns)).collect::<Vec<_>>(), UnionArgs::default()).expect("concat");
        let steps = concat(steps.iter().map(|p| read(p, &["step_id", "rows"])).collect::<Vec<_>>(), UnionArgs::default()).expect("concat");
        let verify = steps.filter(col("rows").eq(lit(4u16))).select([col("step_id")]);
        let slots = ids.iter().map(|id| routes.clone().select([col("step_id"), col("layer"), col(id.as_str()).alias("id")]));
        let slots = concat(slots.collect::<Vec<_>>(), UnionArgs::default()).expect("concat");
        slots
            .join(verify, [col("step_id")], [col("step_id")], JoinArgs::new(JoinType::Inner))
            .group_by([col("step_id"), col("layer")])
            .agg([col("id").n_unique()])
            .group_by([col("layer")])
            .agg([col("id").mean()])
            .sort(["layer"], SortMultipleOptions::default())
            .collect()
            .expect("polars")
    });
    let means: Vec<f64> = frame.column("id").expect("id").f64().expect("mean").into_no_null_iter().collect();
    for (layer, mean) in report.layers.iter().zip(&means) {
        let union = layer.stats.union.as_ref().expect("windows").mean;
        assert!((union - mean).abs() < 1e-9, "layer {}: {union} and {mean}", layer.layer);
    }
    assert_eq!(means.len(), report.layers.len());
    println!("the same unions; file to report is {:.0} times as fast as polars for unions only", taken / ours);
}
