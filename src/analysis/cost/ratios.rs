//! Verify steps against decode steps at the same context length.
//!
//! Attention takes longer the longer the context is, so a verify step is compared with decode steps of its own octave of
//! context length: with v_b verify steps and d_b decode steps in octave b,
//!
//! ```text
//! verify = Σ_b Σ T_verify / Σ_b v_b          decode = Σ_b v_b (Σ T_decode / d_b) / Σ_b v_b
//! ```
//!
//! over the octaves that have both. The ratio is verify / decode: a ratio of means, not a mean of ratios.

use super::collect::{BUCKETS, Compared, DECODE, VERIFY};
use crate::analysis::Options;
use crate::analysis::stats::{self, Streams, percentile_interval};
use crate::metric::Interval;

/// Steps of one octave: verify and decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cell {
    pub n: [u64; 2],
    /// Of the target's passes, ns.
    pub pass_ns: [u64; 2],
    /// Of the whole steps, ns.
    pub step_ns: [u64; 2],
}

impl Cell {
    /// Adds another cell, `times` times.
    pub fn add(&mut self, other: &Self, times: u64) {
        for phase in [VERIFY, DECODE] {
            self.n[phase] += times * other.n[phase];
            self.pass_ns[phase] = self.pass_ns[phase].saturating_add(times.saturating_mul(other.pass_ns[phase]));
            self.step_ns[phase] = self.step_ns[phase].saturating_add(times.saturating_mul(other.step_ns[phase]));
        }
    }

    /// Whether it has steps of both kinds.
    pub fn is_matched(&self) -> bool {
        self.n[VERIFY] > 0 && self.n[DECODE] > 0
    }
}

/// Means over matched steps, ns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Matched {
    pub verify_ns: f64,
    pub decode_ns: f64,
    pub verify_step_ns: f64,
    pub decode_step_ns: f64,
}

impl Matched {
    /// Of sums by octave; `None` where no octave has both.
    ///
    /// Octave 1: 3 verify steps of 20 ns, 1 decode step of 10; octave 2: 1 verify step of 40, 2 decode steps of 20; octave 3: a verify
    /// step and no decode step. verify = 100 / 4 = 25, decode = (3 x 10 + 1 x 20) / 4 = 12.5, the ratio is 2.
    pub fn of(buckets: &[Cell]) -> Option<Self> {
        let mut sums = [0.0; 4];
        let mut n = 0;
        for cell in buckets.iter().filter(|c| c.is_matched()) {
            let weight = cell.n[VERIFY] as f64 / cell.n[DECODE] as f64;
            n += cell.n[VERIFY];
            sums[0] += cell.pass_ns[VERIFY] as f64;
            sums[1] += weight * cell.pass_ns[DECODE] as f64;
            sums[2] += cell.step_ns[VERIFY] as f64;
            sums[3] += weight * cell.step_ns[DECODE] as f64;
        }
        let [verify_ns, decode_ns, verify_step_ns, decode_step_ns] = sums.map(|sum| sum / n as f64);
        (n > 0).then_some(Self { verify_ns, decode_ns, verify_step_ns, decode_step_ns })
    }

    /// A quotient of two of its means.
    pub fn ratio(&self, a: f64, b: f64) -> Option<f64> {
        (b > 0.0).then(|| a / b)
    }
}

/// 95 % intervals.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Intervals {
    pub verify_ratio: Option<Interval>,
    pub step_ratio: Option<Interval>,
    pub speedup: Option<Interval>,
    pub tokens_per_step: Option<Interval>,
}

/// What the resamples come to.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Draws(Vec<Vec<f64>>);

impl Draws {
    /// The intervals of the ratios and the speedup.
    pub fn intervals(&self) -> Intervals {
        let at = |column: usize| percentile_interval(&self.0, column);
        Intervals { verify_ratio: at(0), step_ratio: at(1), speedup: at(2), tokens_per_step: at(7) }
    }

    /// The means of each resample; no numbers where it has no matched steps. Empty where there are no intervals.
    pub fn means(&self) -> impl Iterator<Item = Matched> {
        self.0.iter().map(|draw| Matched { verify_ns: draw[3], decode_ns: draw[4], verify_step_ns: draw[5], decode_step_ns: draw[6] })
    }
}

/// Bootstrap over `requests`, ascending, of the ratios, the speedup and the means. Decode steps are drawn with their requests, so that
/// what both have in common cancels. None where either kind of steps is of fewer than two requests.
pub(super) fn draws(compared: &Compared, requests: &[u32], options: &Options) -> Draws {
    if compared.is_one_sided() {
        return Draws::default();
    }
    let cells: Vec<Vec<(usize, Cell)>> =
        requests.iter().map(|r| compared.cells.get(r).into_iter().flatten().map(|(&bucket, &cell)| (bucket, cell)).collect()).collect();
    let tokens: Vec<(u64, u64)> = requests.iter().map(|r| compared.tokens.get(r).copied().unwrap_or_default()).collect();
    let statistics = |_, times: &[u32]| {
        let mut sums = [Cell::default(); BUCKETS];
        let (mut steps, mut emitted) = (0, 0);
        for ((cells, (s, t)), &n) in cells.iter().zip(&tokens).zip(times).filter(|(_, n)| **n > 0) {
            cells.iter().for_each(|(bucket, cell)| sums[*bucket].add(cell, u64::from(n)));
            (steps, emitted) = (steps + u64::from(n) * s, emitted + u64::from(n) * t);
        }
        Matched::of(&sums).map_or(vec![f64::NAN; 8], |m| {
            let step_ratio = m.verify_step_ns / m.decode_step_ns;
            let tokens = emitted as f64 / steps as f64;
            let ratios = [m.verify_ns / m.decode_ns, step_ratio, tokens / step_ratio];
            [&ratios[..], &[m.verify_ns, m.decode_ns, m.verify_step_ns, m.decode_step_ns, tokens]].concat()
        })
    };
    Draws(stats::draws(requests.len(), (options.resamples, options.seed, Streams::Common), statistics))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example() {
        let mut buckets = [Cell::default(); BUCKETS];
        buckets[1] = Cell { n: [3, 1], pass_ns: [60, 10], step_ns: [90, 10] };
        buckets[2] = Cell { n: [1, 2], pass_ns: [40, 40], step_ns: [60, 40] };
        buckets[3] = Cell { n: [1, 0], pass_ns: [1000, 0], step_ns: [1000, 0] };
        buckets[4] = Cell { n: [0, 7], pass_ns: [0, 7000], step_ns: [0, 7000] };
        let m = Matched::of(&buckets).unwrap();
        assert_eq!(m, Matched { verify_ns: 25.0, decode_ns: 12.5, verify_step_ns: 37.5, decode_step_ns: 12.5 });
        assert_eq!((m.ratio(m.verify_ns, m.decode_ns), m.ratio(1.0, 0.0)), (Some(2.0), None));
    }

    #[test]
    fn steps_that_cannot_be_matched_have_no_ratio() {
        let mut buckets = [Cell::default(); BUCKETS];
        buckets[3] = Cell { n: [5, 0], pass_ns: [50, 0], step_ns: [50, 0] };
        buckets[4] = Cell { n: [0, 5], pass_ns: [0, 50], step_ns: [0, 50] };
        assert_eq!(Matched::of(&buckets), None);
    }

    #[test]
    fn a_longer_context_of_verify_steps_does_not_count_as_verification() {
        // A pass takes 100 + context octave x 50, whatever its rows: matched, the ratio is 1; unmatched it would be above.
        let mut buckets = [Cell::default(); BUCKETS];
        for (bucket, n) in [(5, [1, 9]), (8, [9, 1])] {
            let ns = 100 + 50 * bucket as u64;
            buckets[bucket] = Cell { n, pass_ns: n.map(|n| n * ns), step_ns: n.map(|n| n * ns) };
        }
        let m = Matched::of(&buckets).unwrap();
        assert!((m.verify_ns / m.decode_ns - 1.0).abs() < 1e-12);
        let plain = |phase: usize| buckets.iter().map(|c| c.pass_ns[phase]).sum::<u64>() / 10;
        assert!(plain(VERIFY) > plain(DECODE) + 100);
    }
}
