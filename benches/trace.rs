//! Bytes and CPU time per token of writing and reading a trace.
//!
//! `cargo bench --bench trace [-- TOKENS]`. A token is one row of a pass through 40 layers with 8 of 512
//! experts each. Times are CPU seconds of all threads, since wall time depends on what else runs.

use specprof::trace::synth::Synth;
use specprof::trace::{Ending, Probe, RequestEvent, StepEvent, Trace, TraceError, TraceWriter, WriterOptions};
use std::time::{Duration, Instant};

/// CPU time of the process so far, seconds.
fn cpu_seconds() -> f64 {
    // Fields 14 and 15 after the command's name: user and system time in ticks of 10 ms.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks: u64 = after_name.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks as f64 / 100.0
}

/// Counts events without keeping them: the cost of making them.
#[derive(Default)]
struct Counter {
    rows: u64,
    ids: u64,
}

impl Probe for Counter {
    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        self.rows += step.rows() as u64;
        self.ids += step.routes.ids.len() as u64;
        Ok(())
    }

    fn request(&mut self, _: RequestEvent) -> Result<(), TraceError> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens: u32 = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(100_000);
    let requests = 10;
    let synth = |weights| Synth {
        requests,
        prompt_rows: 0,
        verify_steps: (tokens / 4 / requests).max(1),
        decode_every: 0,
        weights,
        ..Synth::default()
    };
    println!("{:<42}{:>10}{:>14}{:>18}", "", "B/token", "CPU us/token", "tokens/s (wall)");
    for weights in [false, true] {
        let synth = synth(weights);
        let begin = cpu_seconds();
        let mut counter = Counter::default();
        synth.emit(&mut counter)?;
        let making = cpu_seconds() - begin;
        let rows = counter.rows as f64;

        let dir = tempfile::tempdir()?;
        let path = dir.path().join("trace");
        // Slower than the disk's commits, as a recording is, every row is first in a small part.
        for (name, flush_ms) in [("write, small parts first", 10), ("write", 500)] {
            let options = WriterOptions { force: true, flush_interval: Duration::from_millis(flush_ms), ..WriterOptions::default() };
            let (begin, clock) = (cpu_seconds(), Instant::now());
            let mut writer = TraceWriter::create(&path, synth.manifest(), &options)?;
            synth.emit(&mut writer)?;
            writer.finish(Ending::Complete)?;
            let (cpu, wall) = (cpu_seconds() - begin - making, clock.elapsed().as_secs_f64());
            let trace = Trace::open(&path)?;
            let bytes = trace.tables().iter().find(|t| t.name == "routes").map_or(0, |t| t.bytes) as f64;
            let what = if weights { "ids and weights" } else { "ids" };
            println!("{:<42}{:>10.1}{:>14.2}{:>18.0}", format!("{name}: {what}"), bytes / rows, cpu / rows * 1e6, rows / wall);
        }
        let trace = Trace::open(&path)?;
        let units = trace.route_units()?;
        for threads in [1, 2] {
            let (begin, clock) = (cpu_seconds(), Instant::now());
            let next = std::sync::atomic::AtomicUsize::new(0);
            let read = || -> Result<u64, TraceError> {
                let mut sum = 0;
                while let Some(unit) = units.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    let mut reader = unit.read(weights);
                    while let Some(batch) = reader.next_batch()? {
                        sum += batch.ids.iter().map(|column| column.len() as u64).sum::<u64>();
                    }
                }
                Ok(sum)
            };
            let ids = std::thread::scope(|scope| {
                let workers: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
                workers.into_iter().map(|w| w.join().unwrap_or(Ok(0))).sum::<Result<u64, _>>()
            })?;
            assert_eq!(ids, counter.ids, "every id is read once");
            let (cpu, wall) = (cpu_seconds() - begin, clock.elapsed().as_secs_f64());
            println!("{:<42}{:>10}{:>14.2}{:>18.0}", format!("read, {threads} thread(s)"), "", cpu / rows * 1e6, rows / wall);
        }
    }
    Ok(())
}
