//! How fast this machine copies memory: what the bandwidth implied by experts' times is compared with.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes that a copy reads: larger than most caches, small enough to be allocated anywhere.
const BYTES: usize = 64 << 20;
/// Passes stop after this long...
const BUDGET: Duration = Duration::from_millis(60);
/// ...but not before this many: the first one brings the pages in.
const MIN_PASSES: usize = 3;

/// Bandwidth of a large copy on all of the engine's threads, GB/s: bytes read plus bytes written, 10^9 a second, of the fastest
/// of a few passes. `None` where the memory for it cannot be had or the clock did not move.
///
/// A model that fits into the caches can be read faster than this.
pub fn copy_gb_per_s() -> Option<f64> {
    let room = |n: usize| {
        let mut buffer: Vec<u64> = Vec::new();
        buffer.try_reserve_exact(n).ok()?;
        buffer.resize(n, 1);
        Some(buffer)
    };
    let words = BYTES / size_of::<u64>();
    let (from, mut to) = (room(words)?, room(words)?);
    let chunk = words.div_ceil(rayon::current_num_threads().max(1));
    let begin = Instant::now();
    let mut fastest: Option<Duration> = None;
    for pass in 0.. {
        if pass >= MIN_PASSES && begin.elapsed() >= BUDGET {
            break;
        }
        let start = Instant::now();
        to.par_chunks_mut(chunk).zip(black_box(&from).par_chunks(chunk)).for_each(|(to, from)| to.copy_from_slice(from));
        black_box(&to);
        let took = start.elapsed();
        // The first pass is also that of page faults.
        if pass > 0 {
            fastest = Some(fastest.map_or(took, |best| best.min(took)));
        }
    }
    let seconds = fastest?.as_secs_f64();
    (seconds > 0.0).then(|| 2.0 * BYTES as f64 / seconds / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_a_bandwidth_that_memory_can_have() {
        let measured = copy_gb_per_s().unwrap();
        // From an old single-board computer to a large server's caches.
        assert!((0.2..20_000.0).contains(&measured), "{measured}");
    }
}
