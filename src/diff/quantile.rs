//! Intervals of quantiles and shares of a histogram whose entries come in clusters (windows of one request).

use super::estimate::TAIL;
use super::student::quantile as t_quantile;
use crate::metric::Interval;

/// A histogram, with what clustering costs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Clustered<'a> {
    histogram: &'a [u64],
    n: f64,
    mean: f64,
    design_effect: f64,
}

fn z() -> f64 {
    t_quantile(TAIL, 1e9)
}

impl<'a> Clustered<'a> {
    /// A histogram (entry v: number of windows with value v) and the interval of its mean over requests. The design effect is how
    /// much wider that interval is than that of independent windows, squared: (half width / 1.96)² / (variance / n), at least 1.
    ///
    /// `None` when it is empty.
    pub fn new(histogram: &'a [u64], mean_interval: Interval) -> Option<Self> {
        let n = histogram.iter().sum::<u64>() as f64;
        if n < 2.0 {
            return None;
        }
        let values = || histogram.iter().enumerate().map(|(v, &count)| (v as f64, count as f64));
        let mean = values().map(|(v, count)| v * count).sum::<f64>() / n;
        let variance = values().map(|(v, count)| count * (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let half = (mean_interval[1] - mean_interval[0]) / 2.0;
        let effect = if variance > 0.0 { (half / z()).powi(2) * n / variance } else { 1.0 };
        effect.is_finite().then(|| Self { histogram, n, mean, design_effect: effect.max(1.0) })
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// How many windows stand for one independent window.
    pub fn design_effect(&self) -> f64 {
        self.design_effect
    }

    /// 95 % interval of the nearest-rank quantile: the quantiles at p ± 1.96 sqrt(p (1 - p) deff / n) (Woodruff 1952), and half a
    /// unit more, since values are whole numbers and many windows share one. Beyond the last rank, no sample says how large the
    /// quantile can be: the limit is the largest possible value, the histogram's end.
    ///
    /// 100 windows of values 1...100, independent: the median's interval is that of ranks 41 and 60, 40.5 to 60.5.
    pub fn quantile(&self, p: f64) -> Option<Interval> {
        let half = z() * (p * (1.0 - p) * self.design_effect / self.n).sqrt();
        let low = if p <= half { 0.0 } else { self.at_rank((p - half) * self.n)? };
        let high = if p + half >= 1.0 { self.histogram.len().checked_sub(1)? as f64 } else { self.at_rank((p + half) * self.n)? };
        Some([low - 0.5, high + 0.5])
    }

    /// The value of rank ceil(rank), within the ranks that there are.
    fn at_rank(&self, rank: f64) -> Option<f64> {
        let rank = rank.ceil().clamp(1.0, self.n);
        let mut below = 0.0;
        let mut values = self.histogram.iter().enumerate();
        values.find_map(|(v, &count)| {
            below += count as f64;
            (below >= rank).then_some(v as f64)
        })
    }
}

/// 95 % interval of a share of n independent windows (Wilson 1927). `None` without any.
///
/// 8 of 10: 0.490 and 0.943.
pub fn share(p: f64, n: f64) -> Option<Interval> {
    let z = z();
    let spread = z * z / n;
    let middle = (p + spread / 2.0) / (1.0 + spread);
    let half = z / (1.0 + spread) * (p * (1.0 - p) / n + spread / (4.0 * n)).sqrt();
    // Rounding must not leave the share outside of its own interval at 0 and 1.
    (n > 0.0 && (0.0..=1.0).contains(&p)).then(|| [(middle - half).clamp(0.0, p), (middle + half).clamp(p, 1.0)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn worked_examples() {
        let mut histogram = vec![1u64; 101];
        histogram[0] = 0;
        // Independent: sd 29.01, so the mean's interval is ± 1.96 * 2.901.
        let half = 1.959_964 * (841.666_67f64 / 100.0).sqrt();
        let c = Clustered::new(&histogram, [50.5 - half, 50.5 + half]).unwrap();
        assert!((c.design_effect() - 1.0).abs() < 1e-6 && c.mean() == 50.5);
        assert_eq!(c.quantile(0.5), Some([40.5, 60.5]));
        assert_eq!(c.quantile(0.9), Some([84.5, 96.5]));
        // 0.99 + 0.0195 is beyond the last rank: the largest value of this sample limits nothing.
        assert_eq!(c.quantile(0.99), Some([97.5, 100.5]));
        let roomy: Vec<u64> = histogram.iter().copied().chain([0; 20]).collect();
        assert_eq!(Clustered::new(&roomy, [50.5 - half, 50.5 + half]).unwrap().quantile(0.99), Some([97.5, 120.5]));
        // Twice as wide: four windows stand for one.
        let wide = Clustered::new(&histogram, [50.5 - 2.0 * half, 50.5 + 2.0 * half]).unwrap();
        assert!((wide.design_effect() - 4.0).abs() < 1e-6);
        assert_eq!(wide.quantile(0.5), Some([30.5, 70.5]));
        assert_eq!(Clustered::new(&[1], [0.0, 0.0]), None);
        let [low, high] = share(0.8, 10.0).unwrap();
        assert!((low - 0.490_2).abs() < 1e-4 && (high - 0.943_3).abs() < 1e-4, "{low} {high}");
        assert_eq!(share(0.5, 0.0), None);
    }

    /// Unions of 20 requests of 30 windows: 33 at most, about 25, requests 1 apart, windows 3; and the interval of their mean.
    fn unions(rng: &mut rand_chacha::ChaCha8Rng, more: f64) -> (Vec<u64>, Interval) {
        use rand::Rng;
        let mut normal = || (0..12).map(|_| f64::from(rng.next_u32()) / f64::from(u32::MAX)).sum::<f64>() - 6.0;
        let mut histogram = vec![0u64; 34];
        let mut sums = Vec::new();
        for _ in 0..20 {
            let level = 25.0 + more + normal();
            let values: Vec<f64> = (0..30).map(|_| (level + 3.0 * normal()).round().clamp(8.0, 33.0)).collect();
            values.iter().for_each(|&v| histogram[v as usize] += 1);
            sums.push((values.iter().sum::<f64>(), 30.0));
        }
        let interval = super::super::estimate::Estimate::ratio(sums.into_iter()).unwrap().own().unwrap().interval();
        (histogram, interval)
    }

    #[test]
    fn percentiles_rarely_change_without_a_change_and_are_seen_to_change_with_one() {
        use super::super::estimate::{Estimate, Pairs, difference};
        use rand::SeedableRng;
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(8);
        let mut claims = |p: f64, more: f64| {
            (0..300)
                .filter(|_| {
                    let mut side = |more: f64| {
                        let (histogram, mean) = unions(&mut rng, more);
                        let n: u64 = histogram.iter().sum();
                        let c = Clustered::new(&histogram, mean).unwrap();
                        Estimate::with_interval(c.at_rank(p * n as f64).unwrap(), c.quantile(p))
                    };
                    difference(&side(0.0), &side(more), Pairs::Different).unwrap().p_zero() < 0.05
                })
                .count()
        };
        for p in [0.5, 0.9, 0.99] {
            // 5 % of 300 are 15; the half units make it fewer.
            let none = claims(p, 0.0);
            assert!(none <= 15, "p {p}: {none} of 300 without a change");
        }
        assert!(claims(0.5, 3.0) >= 270 && claims(0.9, 3.0) >= 240);
    }

    proptest! {
        #[test]
        fn intervals_hold_their_values(histogram in prop::collection::vec(0u64..40, 2..60), half in 0f64..10.0, p in 0.01f64..0.99) {
            let n: u64 = histogram.iter().sum();
            let Some(c) = Clustered::new(&histogram, [-half, half]) else { return Ok(()) };
            // The naive quantile, from the sorted list.
            let list: Vec<usize> = histogram.iter().enumerate().flat_map(|(v, &count)| std::iter::repeat_n(v, count as usize)).collect();
            let at = list[((p * n as f64).ceil() as usize).clamp(1, list.len()) - 1] as f64;
            let [low, high] = c.quantile(p).unwrap();
            prop_assert!(low <= at && at <= high);
            let [low, high] = share(p, n as f64).unwrap();
            prop_assert!(0.0 <= low && low <= p && p <= high && high <= 1.0);
        }
    }
}
