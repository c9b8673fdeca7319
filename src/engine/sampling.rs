//! Logits to a token: temperature, then top-k, then top-p, then one uniform number through the inverse CDF.
//!
//! The same filters make the target's distribution p and a sampling drafter's q, so that both are what
//! `verify` takes them for. Sums are `f64`: with 150 000 tokens a single-precision CDF would lose the tail.

use super::EngineError;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::cmp::Ordering;

/// How a token is chosen from logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 = greedy.
    pub temperature: f64,
    /// Smallest set of most likely tokens with at least this mass is kept; 1 = off. Masses are counted in whole units of 2^-40 of the
    /// largest, so that every engine ends the set at the same token whatever the order in which it adds.
    pub top_p: f64,
    /// Most likely tokens kept; 0 = off, 1 = greedy.
    pub top_k: u32,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 };

    /// Whether the choice needs no random numbers.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Refuses values outside their ranges by name.
    ///
    /// # Errors
    /// [`EngineError::Request`] when the temperature is negative or not finite, or top-p is outside (0, 1].
    pub fn check(&self) -> Result<(), EngineError> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(EngineError::Request(format!("temperature {} is not a number of 0 (greedy) or more", self.temperature)));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(EngineError::Request(format!("top-p {} is not above 0 and at most 1 (off)", self.top_p)));
        }
        Ok(())
    }
}

/// The token with the largest logit; the lowest id wins a tie. 0 for no logits.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Probability of `token` in the plain softmax of `logits` (no temperature, no filters), to 1e-6 of itself.
///
/// Recording asks for it once a draft, over the whole vocabulary: the library's `exp` would be felt beside a small model.
pub fn softmax_of(logits: &[f32], token: u32) -> f32 {
    const LANES: usize = 16;
    let mut tops = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        tops.iter_mut().zip(chunk).for_each(|(top, &l)| *top = if l > *top { l } else { *top });
    }
    let max = tops.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum: f64 = rest.iter().map(|&l| f64::from(exp_of_negative(l - max))).sum();
    // Few terms a lane before they go into double precision.
    for block in chunks.chunks(64) {
        let mut lanes = [0.0f32; LANES];
        for chunk in block {
            lanes.iter_mut().zip(chunk).for_each(|(lane, &l)| *lane += exp_of_negative(l - max));
        }
        sum += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
    }
    logits.get(token as usize).map_or(0.0, |&l| (f64::from(l - max).exp() / sum) as f32)
}

/// e^x of x <= 0, to 4e-7 + 7e-8 |x| of itself (the product with log2 e is rounded); of anything below -87, e^-87. Without
/// branches and calls, so that loops of it are made of vector instructions: 2^n by its bits times the series of 2^f, |f| <= 1/2.
fn exp_of_negative(x: f32) -> f32 {
    // Adding it rounds to whole numbers, which then are the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let t = if x < -87.0 { -87.0 } else { x } * std::f32::consts::LOG2_E;
    let rounded = t + ROUND;
    let f = t - (rounded - ROUND);
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let series = 1.0
        + f * (std::f32::consts::LN_2
            + f * (0.240_226_5 + f * (0.055_504_11 + f * (0.009_618_129 + f * (0.001_333_355_8 + f * 0.000_154_035_3)))));
    series * f32::from_bits(n.wrapping_add(127) << 23)
}

/// The token whose interval of the CDF holds `u` x the total mass; `u` is in `[0, 1)`.
///
/// `probs` need not sum to 1. Without any mass the last id is returned, as the serving engines do.
pub fn inverse_cdf(probs: &[f64], u: f64) -> u32 {
    let total: f64 = probs.iter().sum();
    let target = u * total;
    let mut below = 0.0;
    let mut last = probs.len().saturating_sub(1);
    for (i, &p) in probs.iter().enumerate() {
        if p > 0.0 {
            below += p;
            if target < below {
                return i as u32;
            }
            last = i;
        }
    }
    // Rounding only: the sum in order is the same sum, so this is reached without mass, or with NaN.
    last as u32
}

/// Draws tokens for one request: its own random stream, so that one request's draws do not depend on the others'.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    order: Vec<u32>,
    probs: Vec<f64>,
}

impl Sampler {
    /// The sampler of the request number `stream`.
    pub fn new(sampling: Sampling, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        rng.set_stream(stream);
        Self { sampling, rng, order: Vec::new(), probs: Vec::new() }
    }

    /// Whether the choice needs no random numbers.
    pub fn is_greedy(&self) -> bool {
        self.sampling.is_greedy()
    }

    /// Its rules.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// The next uniform number in `[0, 1)`, 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// The distribution that a token is drawn from, `[V]`, into `probs`. Sums to 1.
    ///
    /// Softmax of logits / temperature, cut to the k most likely tokens and renormalised, cut to the smallest
    /// set of mass top-p and renormalised. Equally likely tokens are kept in order of their ids.
    pub fn distribution(&mut self, logits: &[f32], probs: &mut Vec<f64>) {
        probs.clear();
        if self.is_greedy() {
            probs.resize(logits.len(), 0.0);
            if let Some(p) = probs.get_mut(argmax(logits) as usize) {
                *p = 1.0;
            }
            return;
        }
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let scale = self.sampling.temperature;
        probs.extend(logits.iter().map(|&l| ((f64::from(l) - max) / scale).exp()));
        let total: f64 = probs.iter().sum();

        let top_k = self.sampling.top_k as usize;
        let limited = top_k > 0 && top_k < probs.len();
        if !limited && self.sampling.top_p >= 1.0 {
            probs.iter_mut().for_each(|p| *p /= total);
            return;
        }
        let order = &mut self.order;
        order.clear();
        order.extend(0..probs.len() as u32);
        let mut mass = total;
        if limited {
            order.select_nth_unstable_by(top_k - 1, |&a, &b| by_mass(probs, a, b));
            order.truncate(top_k);
            mass = order.iter().map(|&i| probs[i as usize]).sum();
        }
        if self.sampling.top_p < 1.0 {
            let all: u64 = order.iter().map(|&i| units(probs[i as usize])).sum();
            nucleus(probs, order, ((self.sampling.top_p * all as f64) as u64).max(1));
            mass = order.iter().map(|&i| probs[i as usize]).sum();
        }
        // Kept tokens are marked by a negative value first: no second buffer of the vocabulary's size.
        order.iter().for_each(|&i| probs[i as usize] = -probs[i as usize] / mass);
        probs.iter_mut().for_each(|p| *p = if *p < 0.0 { -*p } else { 0.0 });
    }

    /// Draws a token: the argmax when greedy, else one uniform number through the inverse CDF.
    pub fn pick(&mut self, logits: &[f32]) -> u32 {
        if self.is_greedy() {
            return argmax(logits);
        }
        let mut probs = std::mem::take(&mut self.probs);
        self.distribution(logits, &mut probs);
        let u = self.uniform();
        let token = inverse_cdf(&probs, u);
        self.probs = probs;
        token
    }
}

/// Most mass first, then lowest id.
fn by_mass(probs: &[f64], a: u32, b: u32) -> Ordering {
    probs[b as usize].total_cmp(&probs[a as usize]).then(a.cmp(&b))
}

/// A mass in units of 2^-40 of the largest, which is 1; a vocabulary's sum fits.
fn units(mass: f64) -> u64 {
    (mass * (1u64 << 40) as f64) as u64
}

/// Cuts `order` to the smallest set of most likely tokens with a mass of at least `wanted` units.
///
/// Selects growing heads rather than sorting the vocabulary: a nucleus is a few dozen tokens as a rule.
fn nucleus(probs: &[f64], order: &mut Vec<u32>, wanted: u64) {
    let mut head = 64.min(order.len());
    loop {
        if head < order.len() {
            order.select_nth_unstable_by(head - 1, |&a, &b| by_mass(probs, a, b));
        }
        let mass: u64 = order[..head].iter().map(|&i| units(probs[i as usize])).sum();
        if mass >= wanted || head == order.len() {
            break;
        }
        head = (head * 8).min(order.len());
    }
    order.truncate(head);
    order.sort_unstable_by(|&a, &b| by_mass(probs, a, b));
    let mut mass = 0;
    let kept = order.iter().position(|&i| {
        mass += units(probs[i as usize]);
        mass >= wanted
    });
    order.truncate(kept.map_or(order.len(), |i| i + 1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn distribution(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut probs = Vec::new();
        Sampler::new(sampling, 0).distribution(logits, &mut probs);
        probs
    }

    /// Logits whose softmax is `probs`.
    fn logits_of(probs: &[f32]) -> Vec<f32> {
        probs.iter().map(|p| p.ln()).collect()
    }

    fn close(a: &[f64], b: &[f64]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6)
    }

    #[test]
    fn the_exponential_is_near_the_librarys_everywhere() {
        for i in 0..870_000u32 {
            let x = -(i as f32) * 1e-4;
            let (got, want) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 4e-7 + 7e-8 * f64::from(-x), "{x}: {got} {want}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert!(exp_of_negative(f32::NEG_INFINITY) < 2e-38 && exp_of_negative(f32::NAN).is_nan());
    }

    proptest::proptest! {
        #[test]
        fn a_softmax_is_that_of_double_precision(logits in proptest::collection::vec(-30.0f32..30.0, 1..3000), at in 0usize..3000) {
            let at = at % logits.len();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
            let want = f64::from(logits[at] - max).exp() / sum;
            let got = f64::from(softmax_of(&logits, at as u32));
            proptest::prop_assert!((got - want).abs() <= want * 1e-6 + 1e-38, "{got} {want}");
        }
    }

    #[test]
    fn the_lowest_id_wins_a_tie() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
        assert_eq!(argmax(&[]), 0);
    }

    #[test]
    fn temperature_comes_before_the_filters() {
        let logits = logits_of(&[0.5, 0.3, 0.2]);
        let plain = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        assert!(close(&distribution(plain, &logits), &[0.5, 0.3, 0.2]));
        // Temperature 0.5 squares the probabilities: 25, 9, 4 of 38. Top-p 0.8 then needs two tokens (25 + 9 = 34 of 38).
        let cold = Sampling { temperature: 0.5, top_p: 0.8, ..plain };
        assert!(close(&distribution(cold, &logits), &[25.0 / 34.0, 9.0 / 34.0, 0.0]));
        // Filtered before the temperature it would have needed the same two; at 0.79 of the unscaled mass it would not have been 25 + 9.
        let narrow = Sampling { temperature: 0.5, top_p: 0.65, ..plain };
        assert!(close(&distribution(narrow, &logits), &[1.0, 0.0, 0.0]));
    }

    #[test]
    fn top_p_takes_its_share_of_what_top_k_left() {
        let logits = logits_of(&[0.4, 0.3, 0.2, 0.1]);
        // After top-k 3: 4/9, 3/9, 2/9. Mass 0.75 needs two (7/9); of the whole distribution it would have needed three.
        let both = Sampling { temperature: 1.0, top_p: 0.75, top_k: 3, seed: 0 };
        assert!(close(&distribution(both, &logits), &[4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0]));
    }

    #[test]
    fn equally_likely_tokens_are_kept_by_id() {
        let two = Sampling { temperature: 1.0, top_k: 2, ..Sampling::GREEDY };
        assert!(close(&distribution(two, &[1.0; 5]), &[0.5, 0.5, 0.0, 0.0, 0.0]));
        let half = Sampling { temperature: 1.0, top_p: 0.5, ..Sampling::GREEDY };
        assert!(close(&distribution(half, &[1.0; 4]), &[0.5, 0.5, 0.0, 0.0]));
        // 0.55 * 100 is 55.00000000000001 in doubles: the set ends where whole units end it.
        let most = Sampling { temperature: 1.0, top_p: 0.55, ..Sampling::GREEDY };
        assert_eq!(distribution(most, &[2.0; 100]).iter().filter(|p| **p > 0.0).count(), 55);
    }

    #[test]
    fn greedy_is_one_hot() {
        for greedy in [Sampling::GREEDY, Sampling { temperature: 0.7, top_k: 1, ..Sampling::GREEDY }] {
            assert!(greedy.is_greedy());
            assert_eq!(distribution(greedy, &[0.0, 2.0, 1.0]), [0.0, 1.0, 0.0]);
        }
    }

    #[test]
    fn the_inverse_cdf_respects_the_borders() {
        let probs = [0.25, 0.0, 0.5, 0.25];
        assert_eq!(inverse_cdf(&probs, 0.0), 0);
        assert_eq!(inverse_cdf(&probs, 0.249), 0);
        assert_eq!(inverse_cdf(&probs, 0.25), 2);
        assert_eq!(inverse_cdf(&probs, 0.75), 3);
        assert_eq!(inverse_cdf(&probs, 1.0 - f64::EPSILON), 3);
        // Mass that does not sum to 1 is a share of what there is; without mass it is the last id.
        assert_eq!(inverse_cdf(&[0.0, 0.2, 0.0], 0.99), 1);
        assert_eq!(inverse_cdf(&[0.0, 0.0, 0.0], 0.5), 2);
    }

    #[test]
    fn streams_are_independent_and_repeatable() {
        let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::GREEDY };
        let draws = |stream| {
            let mut sampler = Sampler::new(sampling, stream);
            (0..8).map(|_| sampler.uniform()).collect::<Vec<_>>()
        };
        assert_eq!(draws(3), draws(3));
        assert_ne!(draws(3), draws(4));
        assert!(draws(3).iter().all(|u| (0.0..1.0).contains(u)));
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let of = |temperature, top_p| Sampling { temperature, top_p, top_k: 0, seed: 0 }.check().map_err(|e| e.to_string());
        assert!(of(-0.1, 1.0).unwrap_err().contains("temperature"));
        assert!(of(f64::NAN, 1.0).unwrap_err().contains("temperature"));
        assert!(of(1.0, 0.0).unwrap_err().contains("top-p"));
        assert!(of(1.0, 1.5).unwrap_err().contains("top-p"));
        assert!(of(0.6, 0.95).is_ok());
    }

    proptest! {
        /// The growing head of `nucleus` and the partial selection of top-k equal a full sort.
        #[test]
        fn filters_equal_a_full_sort(
            logits in prop::collection::vec(-8.0f32..8.0, 1..900), top_p in 0.01f64..1.0, top_k in 0u32..1000, temperature in 0.05f64..4.0
        ) {
            prop_assume!(top_k != 1);
            let sampling = Sampling { temperature, top_p, top_k, seed: 0 };
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sorted: Vec<(f64, usize)> = logits.iter().enumerate().map(|(i, &l)| (((f64::from(l) - f64::from(max)) / temperature).exp(), i)).collect();
            sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            if top_k > 0 { sorted.truncate(top_k as usize); }
            let mass: f64 = sorted.iter().map(|s| s.0).sum();
            let mut sum = 0.0;
            let kept: Vec<_> = sorted.into_iter().take_while(|s| { let before = sum; sum += s.0; before < top_p * mass * (1.0 - 1e-12) }).collect();
            let mass: f64 = kept.iter().map(|s| s.0).sum();
            let mut want = vec![0.0; logits.len()];
            for (p, i) in kept { want[i] = p / mass; }
            let got = distribution(sampling, &logits);
            prop_assert!((got.iter().sum::<f64>() - 1.0).abs() < 1e-9);
            for (g, w) in got.iter().zip(&want) { prop_assert!((g - w).abs() < 1e-9, "{g} {w}"); }
        }
    }
}
