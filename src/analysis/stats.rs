//! Percentile bootstrap clustered by request: steps of one request are not independent, so whole requests are drawn.

use crate::metric::Interval;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

/// Resamples of every interval, unless told otherwise.
pub const RESAMPLES: usize = 2000;

/// More requests than this are put together into so many clusters.
const MAX_CLUSTERS: usize = 4096;
/// Fewer clusters where there are so many columns that the resamples would take more additions than this...
const MAX_ADDITIONS: usize = 4_000_000_000;
/// ...but never fewer than this.
const MIN_CLUSTERS: usize = 64;

/// Sums of several columns by cluster (request), and what is computed from their totals.
#[derive(Debug, Clone, Default)]
pub struct Clusters {
    width: usize,
    /// `[clusters][width]`.
    rows: Vec<f64>,
}

impl Clusters {
    /// No clusters, `width` columns.
    pub fn new(width: usize) -> Self {
        Self { width, rows: Vec::new() }
    }

    /// Adds one cluster's sums, `width` of them. Integers below 2^53 add up exactly, so their order does not matter.
    pub fn push(&mut self, sums: impl Iterator<Item = f64>) {
        self.rows.extend(sums);
        debug_assert!(self.rows.len().is_multiple_of(self.width.max(1)));
    }

    /// Number of clusters.
    pub fn len(&self) -> usize {
        self.rows.len() / self.width.max(1)
    }

    /// The same sums in at most so many clusters that `resamples` draws stay affordable; `None` where there are no more already.
    ///
    /// The spread of a sum over independent requests is the same however they are put together, and thousands of clusters show it well.
    /// Each request is in one by chance: workloads repeat, and clusters of one kind of request would spread wider than the requests do.
    fn affordable(&self, resamples: usize, seed: u64) -> Option<Self> {
        let most = (MAX_ADDITIONS / (self.width * resamples).max(1)).clamp(MIN_CLUSTERS, MAX_CLUSTERS);
        if self.len() <= most {
            return None;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // Not a stream of any resample.
        rng.set_stream(u64::MAX);
        let mut rows = vec![0.0; most * self.width];
        for row in self.rows.chunks_exact(self.width.max(1)) {
            let at = ((u64::from(rng.next_u32()) * most as u64) >> 32) as usize * self.width;
            rows[at..at + self.width].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        Some(Self { width: self.width, rows })
    }

    /// Totals of all columns.
    #[cfg(test)]
    pub fn totals(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.width];
        for row in self.rows.chunks_exact(self.width.max(1)) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        sums
    }

    /// `of(totals)` for `resamples` draws of as many clusters as there are, with replacement; nothing for fewer than two clusters.
    /// `of` gives the same number of values every time.
    pub fn draws<I: IntoIterator<Item = f64>>(&self, resamples: usize, seed: u64, of: impl Fn(&[f64]) -> I + Sync) -> Vec<Vec<f64>> {
        self.numbered_draws((resamples, seed, Streams::Common), |_, totals| of(totals))
    }

    /// The same by other random numbers, and `of` is told the number of the resample, too.
    pub fn numbered_draws<I: IntoIterator<Item = f64>>(
        &self,
        (resamples, seed, streams): (usize, u64, Streams),
        of: impl Fn(usize, &[f64]) -> I + Sync,
    ) -> Vec<Vec<f64>> {
        draws(self.len(), (resamples, seed, streams), |resample, times| {
            let mut sums = vec![0.0; self.width];
            add_times(&self.rows, self.width, times, &mut sums);
            of(resample, &sums).into_iter().collect()
        })
    }
}

/// Which random numbers resamples are drawn by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// Those of every interval of a report: draws of the same requests are the same draws.
    Common,
    /// Others, for requests that are put beside resamples of other ones: draws of two numbers of requests by the same random numbers
    /// choose from the same places of both lists, and would go together without a reason.
    Apart,
}

impl Streams {
    /// Of so many resamples the first one's stream.
    fn first(self) -> u64 {
        match self {
            Self::Common => 0,
            Self::Apart => 1 << 48,
        }
    }
}

/// `count` independent standard normal numbers of one resample, by random numbers that draw nothing else (Box and Muller).
pub fn normals((resample, seed): (usize, u64), count: usize) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream((1 << 49) + resample as u64);
    // Never 0, of which there is no logarithm.
    let mut unit = || (f64::from(rng.next_u32()) + 0.5) / 4_294_967_296.0;
    let pair = |_| {
        let (radius, angle) = ((-2.0 * unit().ln()).sqrt(), std::f64::consts::TAU * unit());
        [radius * angle.cos(), radius * angle.sin()]
    };
    let mut numbers: Vec<f64> = (0..count.div_ceil(2)).flat_map(pair).collect();
    numbers.truncate(count);
    numbers
}

/// Adds rows of `width` numbers to `sums`, each as often as `times` says.
pub fn add_times(rows: &[f64], width: usize, times: &[u32], sums: &mut [f64]) {
    for (row, &n) in rows.chunks_exact(width.max(1)).zip(times).filter(|(_, n)| **n > 0) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += f64::from(n) * x;
        }
    }
}

/// Statistics of `resamples` draws of as many requests as there are, with replacement; nothing for fewer than two requests.
/// `statistics` is told the number of the resample and how often each request was drawn, and gives the same number of values every time.
///
/// Resample i uses stream i of the seeded generator (of those that `streams` names), so the result does not depend on threads.
pub fn draws(
    requests: usize,
    (resamples, seed, streams): (usize, u64, Streams),
    statistics: impl Fn(usize, &[u32]) -> Vec<f64> + Sync,
) -> Vec<Vec<f64>> {
    if requests < 2 {
        return Vec::new();
    }
    let draw = |resample: usize| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(streams.first() + resample as u64);
        let mut times = vec![0u32; requests];
        for _ in 0..requests {
            // The high half of a product: the bias is below requests / 2^32.
            let drawn = (u64::from(rng.next_u32()) * requests as u64) >> 32;
            times[drawn as usize] += 1;
        }
        statistics(resample, &times)
    };
    (0..resamples).into_par_iter().map(draw).collect()
}

/// The 2.5 % and 97.5 % quantiles (nearest rank) of entry `column` of every draw: [`interval_of`] them.
pub fn percentile_interval(draws: &[Vec<f64>], column: usize) -> Option<Interval> {
    interval_of(draws.iter().filter_map(|d| d.get(column)).copied().collect())
}

/// The 2.5 % and 97.5 % quantiles (nearest rank). What is no number (a ratio without any denominator) is left out; `None` when all are.
pub fn interval_of(mut values: Vec<f64>) -> Option<Interval> {
    values.retain(|v| v.is_finite());
    values.sort_unstable_by(f64::total_cmp);
    let rank = |share: f64| values.get(((values.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied();
    Some([rank(0.025)?, rank(0.975)?])
}

/// Ratios of sums over requests, several at once: column c is Σ_r numerator(r, c) / Σ_r denominator(r, c).
#[derive(Debug, Clone, Default)]
pub struct Ratios {
    columns: usize,
    /// Numerators, then denominators.
    sums: Clusters,
}

impl Ratios {
    /// No requests, `columns` ratios.
    pub fn new(columns: usize) -> Self {
        Self { columns, sums: Clusters::new(2 * columns) }
    }

    /// Adds one request's integer numerators and denominators, one pair a column.
    pub fn push(&mut self, pairs: impl Iterator<Item = (u64, u64)> + Clone) {
        self.sums.push(pairs.clone().map(|(n, _)| n as f64).chain(pairs.map(|(_, d)| d as f64)));
    }

    /// 95 % interval of every column: [`percentile_interval`] over `resamples` draws of as many requests as there are, with
    /// replacement. `None` where fewer than two requests have a denominator.
    pub fn intervals(&self, resamples: usize, seed: u64) -> Vec<Option<Interval>> {
        let columns = self.columns;
        let fewer = self.sums.affordable(resamples, seed);
        let draws = fewer
            .as_ref()
            .unwrap_or(&self.sums)
            .draws(resamples, seed, |sums| (0..columns).map(|c| sums[c] / sums[columns + c]).collect::<Vec<f64>>());
        let rows = || self.sums.rows.chunks_exact((2 * columns).max(1));
        let with_denominator = |c: usize| rows().filter(|row| row[columns + c] > 0.0).take(2).count() == 2;
        (0..columns).map(|c| if with_denominator(c) { percentile_interval(&draws, c) } else { None }).collect()
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
    fn a_hundred_thousand_requests_are_drawn_in_clusters() {
        // Values 0...99 in an order without a pattern: 1.96 * 28.87 / sqrt(100 000) = 0.179.
        let ratios = of(&(0..100_000u64).map(|i| (i * 7919 % 100_003 % 100, 1)).collect::<Vec<_>>());
        let [low, high] = ratios.intervals(RESAMPLES, 3)[0].unwrap();
        assert!((high - low - 2.0 * 0.179).abs() < 0.04, "{low} {high}");
        assert!(low < 49.5 && 49.5 < high, "{low} {high}");
        let fewer = ratios.sums.affordable(RESAMPLES, 3).unwrap();
        assert_eq!(fewer.len(), MAX_CLUSTERS);
        assert_eq!(fewer.totals(), ratios.sums.totals());
    }

    #[test]
    fn draws_are_numbered_and_have_streams_of_their_own() {
        let mut clusters = Clusters::new(1);
        (0..9).for_each(|i| clusters.push(std::iter::once(f64::from(1 << i))));
        let common = clusters.draws(40, 7, |sums| [sums[0]]);
        assert_eq!(common, clusters.numbered_draws((40, 7, Streams::Common), |_, sums| [sums[0]]));
        let apart = clusters.numbered_draws((40, 7, Streams::Apart), |i, sums| [sums[0], i as f64]);
        assert!(apart.iter().enumerate().all(|(i, draw)| draw[1] == i as f64));
        // Of 9^9 draws hardly two are the same by chance.
        assert!(common.iter().zip(&apart).all(|(a, b)| a[0] != b[0]));
    }

    #[test]
    fn normal_numbers_are_normal() {
        let all: Vec<f64> = (0..2000).flat_map(|i| normals((i, 7), 5)).collect();
        assert_eq!(all.len(), 10_000);
        let mean = |of: fn(f64) -> f64| all.iter().map(|&x| of(x)).sum::<f64>() / 10_000.0;
        assert!(mean(|x| x).abs() < 0.03 && (mean(|x| x * x) - 1.0).abs() < 0.05 && (mean(|x| x.powi(4)) - 3.0).abs() < 0.3);
        let within = all.iter().filter(|x| x.abs() < 1.96).count();
        assert!((9_430..9_570).contains(&within), "{within}");
        assert_ne!(normals((0, 7), 3), normals((1, 7), 3));
    }

    #[test]
    fn clusters_are_drawn_whole() {
        // Two requests of 1000 equal steps each: the interval is that of two draws, not of 2000.
        let [low, high] = of(&[(1000, 1000), (3000, 1000)]).intervals(RESAMPLES, 3)[0].unwrap();
        assert_eq!([low, high], [1.0, 3.0]);
    }
}
