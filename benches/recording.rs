//! What recording costs the decode loop: the built-in model with the trace writer on against off, in pairs.
//!
//! `cargo bench --bench recording [-- PAIRS] [kernels]`; with the word `kernels` the times of operations are recorded as
//! well. Each pair runs the same prompts twice, once into a trace and once into nothing, the order changing from pair to
//! pair; the ratio of the two wall times is one sample. The machine's drift is in both halves of a pair, so the median of
//! the ratios is what to quote. Opening and closing the trace are not timed.

use specprof::engine::clock::Clock;
use specprof::engine::{Checkpoint, builtin};
use specprof::record::{self, DEMO_PROMPTS, Options, Plan, workload};
use specprof::trace::probe::NoProbe;
use specprof::trace::{Ending, Probe, TraceWriter, WriterOptions};
use std::error::Error;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Seconds that the plan's requests take into `probe`.
fn seconds(plan: &Plan<'_>, probe: &mut dyn Probe) -> Result<f64, Box<dyn Error>> {
    let begin = Instant::now();
    record::run(plan, Clock::start(), probe, &AtomicBool::new(false), &mut |_| {})?;
    Ok(begin.elapsed().as_secs_f64())
}

/// The value below which `share` of the sorted samples lie.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

fn main() -> Result<(), Box<dyn Error>> {
    let pairs: usize = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(30);
    let kernels = std::env::args().any(|arg| arg == "kernels");
    let checkpoint = Checkpoint::load(builtin::ling_nano())?;
    let prompts = workload::parse(DEMO_PROMPTS, Path::new("demo prompts"))?;
    let options = Options { max_new_tokens: 96, ignore_eos: true, ..Options::default() };
    let plan = Plan::new(&checkpoint, &prompts, options)?;
    let dir = std::env::temp_dir().join(format!("specprof-bench-{}", std::process::id()));

    let mut ratios = Vec::new();
    for pair in 0..=pairs {
        let on = || -> Result<f64, Box<dyn Error>> {
            let mut writer = TraceWriter::create(
                &dir,
                record::run_facts(&plan, 0),
                &WriterOptions { force: true, kernels, ..WriterOptions::default() },
            )?;
            let seconds = seconds(&plan, &mut writer)?;
            writer.finish(Ending::Complete)?;
            Ok(seconds)
        };
        let off = || seconds(&plan, &mut NoProbe);
        let (on, off) = if pair % 2 == 0 {
            let first = on()?;
            (first, off()?)
        } else {
            let first = off()?;
            (on()?, first)
        };
        // The first pair warms the caches.
        if pair > 0 {
            ratios.push(on / off);
        }
    }
    std::fs::remove_dir_all(&dir)?;
    ratios.sort_by(f64::total_cmp);
    // Order statistics around the median: their ranks are binomial, 0.98 = 1.96 / 2 standard deviations away.
    let away = 0.98 / (ratios.len() as f64).sqrt();
    println!(
        "decode time with recording / without, {pairs} pairs: median {:.4} (95 %: {:.4} to {:.4}), quartiles {:.4} to {:.4}",
        quantile(&ratios, 0.5),
        quantile(&ratios, (0.5 - away).max(0.0)),
        quantile(&ratios, (0.5 + away).min(1.0)),
        quantile(&ratios, 0.25),
        quantile(&ratios, 0.75)
    );
    Ok(())
}
