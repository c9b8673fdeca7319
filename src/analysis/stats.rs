//! Percentile bootstrap clustered by request: steps of one request are not independent, so whole requests are drawn.

use crate::metric::Interval;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

/// Resamples of every interval, unless told otherwise.
pub const RESAMPLES: usize = 2000;

/// Ratios of sums over requests, several at once: column c is Σ_r numerator(r, c) / Σ_r denominator(r, c).
#[derive(Debug, Clone, Default)]
pub struct Ratios {
    columns: usize,
    /// `[requests][2 columns]`: numerators, then denominators.
    rows: Vec<f64>,
}

impl Ratios {
    /// No requests, `columns` ratios.
    pub fn new(columns: usize) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds one request's integer numerators and denominators, one pair a column. Integers below 2^53 add up
    /// exactly, so the order of requests does not matter.
    pub fn push(&mut self, pairs: impl Iterator<Item = (u64, u64)> + Clone) {
        self.rows.extend(pairs.clone().map(|(n, _)| n as f64).chain(pairs.map(|(_, d)| d as f64)));
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.rows.len() / (2 * self.columns).max(1)
    }

    /// 95 % interval of every column: its 2.5 % and 97.5 % quantiles (nearest rank) over `resamples` draws of as many
    /// requests as there are, with replacement. `None` where fewer than two requests have a denominator.
    ///
    /// Resample i uses stream i of the seeded generator, so the result does not depend on threads.
    pub fn intervals(&self, resamples: usize, seed: u64) -> Vec<Option<Interval>> {
        let (width, requests) = (2 * self.columns, self.requests());
        if requests < 2 || resamples == 0 {
            return vec![None; self.columns];
        }
        let draws: Vec<f64> = (0..resamples as u64)
            .into_par_iter()
            .flat_map_iter(|resample| {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(resample);
                let mut times = vec![0u32; requests];
                for _ in 0..requests {
                    // The high half of a product: the bias is below requests / 2^32.
                    let drawn = (u64::from(rng.next_u32()) * requests as u64) >> 32;
                    times[drawn as usize] += 1;
                }
                let mut sums = vec![0.0; width];
                for (row, &n) in self.rows.chunks_exact(width).zip(&times).filter(|(_, n)| **n > 0) {
                    for (sum, x) in sums.iter_mut().zip(row) {
                        *sum += f64::from(n) * x;
                    }
                }
                let columns = self.columns;
                (0..columns).map(move |c| sums[c] / sums[columns + c])
            })
            .collect();
        let with_denominator = |c: usize| self.rows.chunks_exact(width).filter(|row| row[self.columns + c] > 0.0).take(2).count() == 2;
        let interval = |c: usize| {
            // A draw without any denominator is no ratio.
            let mut values: Vec<f64> = draws.iter().skip(c).step_by(self.columns).copied().filter(|v| v.is_finite()).collect();
            values.sort_unstable_by(f64::total_cmp);
            let rank = |share: f64| values.get(((values.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied();
            Some([rank(0.025)?, rank(0.975)?])
        };
        (0..self.columns).map(|c| if with_denominator(c) { interval(c) } else { None }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(u64, u64)]) -> Ratios {
        let mut ratios = Ratios::new(1);
        for &pair in pairs {
            ratios.push(std::iter::once(pair));
        }
        ratios
    }

    #[test]
    fn one_request_has_no_interval() {
        assert_eq!(of(&[(30, 10)]).intervals(RESAMPLES, 1), [None]);
        assert_eq!(of(&[(30, 10), (0, 0)]).intervals(RESAMPLES, 1), [None]);
        assert_eq!(of(&[]).intervals(RESAMPLES, 1), [None]);
    }

    #[test]
    fn equal_requests_have_a_point() {
        assert_eq!(of(&[(30, 10), (60, 20), (3, 1)]).intervals(RESAMPLES, 1), [Some([3.0, 3.0])]);
    }

    #[test]
    fn it_repeats_whatever_the_threads() {
        let ratios = of(&(0..40).map(|i| (100 + i * i % 37, 10 + i % 3)).collect::<Vec<_>>());
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        let one = pool(1).install(|| ratios.intervals(RESAMPLES, 7));
        assert_eq!(one, pool(3).install(|| ratios.intervals(RESAMPLES, 7)));
        assert_ne!(one, ratios.intervals(RESAMPLES, 8));
    }

    #[test]
    fn width_is_that_of_the_normal_approximation() {
        // 400 requests of one window each, values 0...99: sd 28.87, so 1.96 sd / sqrt(400) = 2.83.
        let ratios = of(&(0..400).map(|i| (i % 100, 1)).collect::<Vec<_>>());
        let [low, high] = ratios.intervals(RESAMPLES, 3)[0].unwrap();
        assert!((high - low - 2.0 * 2.83).abs() < 0.4, "{low} {high}");
        assert!(low < 49.5 && 49.5 < high);
    }

    #[test]
    fn clusters_are_drawn_whole() {
        // Two requests of 1000 equal steps each: the interval is that of two draws, not of 2000.
        let [low, high] = of(&[(1000, 1000), (3000, 1000)]).intervals(RESAMPLES, 3)[0].unwrap();
        assert_eq!([low, high], [1.0, 3.0]);
    }
}
