//! How much a row's choice of an expert moves the numbers of a layer's load.
//!
//! Such a number is a function f of the shares q_e of slots. A request r with n_re of the layer's N slots moves it, to first order, by
//!
//! u_r = Σ_e n_re (g_e - Σ_e q_e g_e) / N, g_e = ∂f/∂q_e
//!
//! as a ratio of sums is moved by (n_r - R d_r) / Σ d. The u_r add up to 0, and their squares to the variance. So one sum a request
//! stands for its whole load.
//!
//! * entropy H = -Σ q log2 q: g_e = -log2 q_e (a constant more or less makes no difference)
//! * effective experts 2^H: g_e = -2^H ln 2 log2 q_e
//! * share of the most loaded 1 %: g_e = 1 of those experts
//! * most loaded over mean E max q: g_e = E of that expert
//! * popularity union Σ (1 - (1 - p_e)^W) with p_e = k q_e: g_e = k W (1 - p_e)^(W - 1)
//!
//! Which experts are the most loaded is taken for given; where two are nearly so, the interval is too narrow or too wide.

use super::layout::{GRADIENT_ONE, Layout};
use crate::metric::Report;

/// Numbers of a load.
pub const GRADIENTS: usize = 5;

/// A number of a load, by its place among a request's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadMetric {
    /// `load.entropy_bits`.
    Entropy,
    /// `load.effective_experts`.
    Effective,
    /// `load.top_1pct_share`.
    Top,
    /// `load.max_over_mean`.
    Max,
    /// `popularity_union`.
    Popularity,
}

impl LoadMetric {
    /// All of them, by place.
    pub const ALL: [Self; GRADIENTS] = [Self::Entropy, Self::Effective, Self::Top, Self::Max, Self::Popularity];
}

/// What each expert's slots move, by layer.
#[derive(Debug, Clone)]
pub struct Gradients {
    experts: usize,
    /// `[layers][experts]`, in units of 1 / [`GRADIENT_ONE`].
    by_expert: Vec<[i64; GRADIENTS]>,
    /// By layer: its weight in the mean over layers of a load's numbers, and of the popularity union.
    weights: Vec<(f64, f64)>,
}

impl Gradients {
    /// Those of a report's layers; `weighed` by their layer's weight in the mean over layers, where that is all that is summed.
    pub fn of(report: &Report, layout: &Layout, experts: usize, weighed: bool) -> Self {
        let loads = report.layers.iter().filter(|l| l.load.is_some()).count().max(1) as f64;
        let counted = |l: &crate::metric::report::LayerReport| l.stats.popularity_union.map_or(0, |_| l.stats.windows);
        let windows = report.layers.iter().map(counted).fold(0u64, u64::saturating_add).max(1) as f64;
        let weights: Vec<(f64, f64)> = report.layers.iter().map(|l| (1.0 / loads, counted(l) as f64 / windows)).collect();
        let mut by_expert = Vec::with_capacity(report.layers.len() * experts);
        for (layer, &(load, popularity)) in report.layers.iter().zip(&weights) {
            let slots: &[u64] = layer.load_by_expert.as_deref().unwrap_or_default();
            let of_layer = of_layer(slots, layout.k, layout.rows);
            let scaled = |(i, g): (usize, f64)| {
                let weight = if !weighed {
                    1.0
                } else if i == LoadMetric::Popularity as usize {
                    popularity
                } else {
                    load
                };
                (g * weight * GRADIENT_ONE).round() as i64
            };
            for e in 0..experts {
                let g = of_layer.get(e).copied().unwrap_or_default();
                by_expert.push(std::array::from_fn(|i| scaled((i, g[i]))));
            }
        }
        Self { experts, by_expert, weights }
    }

    /// What a slot of this expert moves.
    pub fn get(&self, slot: usize, expert: u16) -> Option<&[i64; GRADIENTS]> {
        self.by_expert.get(slot * self.experts..(slot + 1) * self.experts)?.get(usize::from(expert))
    }

    /// A layer's weight in the mean over layers.
    pub fn weight(&self, slot: usize, metric: LoadMetric) -> f64 {
        let &(load, popularity) = self.weights.get(slot).unwrap_or(&(0.0, 0.0));
        if metric == LoadMetric::Popularity { popularity } else { load }
    }
}

/// By expert: what one of its slots moves each number by.
///
/// Slots 3 and 1 of k = 1: q = .75 and .25, of the largest share g = 1 and 0, its mean .75: (1 - .75) / 4 = .0625 and -.1875.
fn of_layer(slots: &[u64], k: usize, rows: usize) -> Vec<[f64; GRADIENTS]> {
    let total = slots.iter().fold(0u64, |sum, &n| sum.saturating_add(n)) as f64;
    let q: Vec<f64> = slots.iter().map(|&n| if total > 0.0 { n as f64 / total } else { 0.0 }).collect();
    let bits = |q: f64| if q > 0.0 { -q.log2() } else { 0.0 };
    let entropy: f64 = q.iter().map(|&q| q * bits(q)).sum();
    let mut order: Vec<usize> = (0..q.len()).collect();
    order.sort_by(|&a, &b| slots[b].cmp(&slots[a]).then(a.cmp(&b)));
    let mut place = vec![0; q.len()];
    order.iter().enumerate().for_each(|(rank, &e)| place[e] = rank);
    let top = q.len().div_ceil(100);
    let (k, w) = (k as f64, rows as f64);
    let gradient = |(e, &q): (usize, &f64)| {
        [
            bits(q),
            entropy.exp2() * std::f64::consts::LN_2 * bits(q),
            f64::from(u8::from(place[e] < top)),
            if place[e] == 0 { slots.len() as f64 } else { 0.0 },
            k * w * (1.0 - (k * q).min(1.0)).powf(w - 1.0),
        ]
    };
    let gradients: Vec<[f64; GRADIENTS]> = q.iter().enumerate().map(gradient).collect();
    let mut mean = [0.0; GRADIENTS];
    for (g, q) in gradients.iter().zip(&q) {
        mean.iter_mut().zip(g).for_each(|(mean, g)| *mean += q * g);
    }
    gradients.into_iter().map(|g| std::array::from_fn(|i| if total > 0.0 { (g[i] - mean[i]) / total } else { 0.0 })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::counts::LoadCounts;
    use crate::analysis::formulas;
    use proptest::prelude::*;

    #[test]
    fn worked_example() {
        let g = of_layer(&[3, 1], 1, 2);
        assert!((g[0][LoadMetric::Top as usize] - 0.0625).abs() < 1e-12 && (g[1][LoadMetric::Top as usize] + 0.1875).abs() < 1e-12);
        assert!(of_layer(&[0, 0], 1, 2).iter().flatten().all(|&g| g == 0.0));
    }

    proptest! {
        /// A slot more moves a number by the gradient: the difference quotient of the report's own formulas.
        #[test]
        fn gradients_are_derivatives(mut slots in prop::collection::vec(1u64..1000, 2..150), e in 0usize..150, k in 1usize..4, w in 2usize..6) {
            let e = e % slots.len();
            // Large counts, so that one slot is a small step; no ties among the most loaded.
            slots.iter_mut().enumerate().for_each(|(i, n)| *n = *n * 1_000_000 + i as u64 * 1000);
            let of = |slots: &[u64]| {
                let counts = LoadCounts { rows: slots.iter().sum::<u64>() / k as u64, by_expert: slots.to_vec() };
                let load = formulas::load(&counts).unwrap();
                let popularity = formulas::popularity_union(&counts, w).unwrap();
                [load.entropy_bits, load.effective_experts, load.top_1pct_share, load.max_over_mean, popularity]
            };
            let g = of_layer(&slots, k, w)[e];
            let before = of(&slots);
            prop_assume!(slots.iter().all(|&n| n * k as u64 <= slots.iter().sum::<u64>()));
            let step = 100 * k as u64;
            slots[e] += step;
            let after = of(&slots);
            let total: f64 = slots.iter().sum::<u64>() as f64;
            for i in 0..GRADIENTS {
                let quotient = (after[i] - before[i]) / step as f64;
                // In units of the number's own size over all slots; what is left is rounding of the quotient.
                let scale = before[i].abs().max(1.0) / total;
                prop_assert!((quotient - g[i]).abs() < 2e-3 * scale + 1e-3 * g[i].abs(), "{i}: {quotient} {}", g[i]);
            }
        }
    }
}
