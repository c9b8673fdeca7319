//! Medians beside the mean times of steps, and whether a few steps decide those means.
//!
//! A mean is what steps cost; on a disturbed machine it is what the disturbance cost. Steps have the weights that they have in the means: of
//! octave b with v_b verify and d_b decode steps a verify step has 1 and a decode step v_b / d_b, over the octaves that have both; where none has,
//! every step has 1. With weights w and times T,
//!
//! ```text
//! mean = Σ w T / Σ w      median = the least T at which the weights up to it reach half of all; between two that share the middle, their mean
//! noisy: mean > 1.5 median, or median > 1.5 mean, or of at least ten steps one has w (T - median) > 0.1 Σ w T
//! ```

use super::collect::{DECODE, VERIFY};
use super::ratios::Cell;
use crate::metric::Unit;
use crate::metric::bounds::{FEW_DECODE_STEPS, NOISY_MEAN, NOISY_STEP_SHARE};

/// Times of one step that is compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Lasted {
    pub step_id: u32,
    /// Octave of its context length.
    pub bucket: u8,
    /// [`VERIFY`] or [`DECODE`].
    pub phase: u8,
    /// Whether it is a step of the baseline trace.
    pub of_baseline: bool,
    /// Of the target's pass, ns.
    pub pass: u64,
    /// Of the whole step, ns.
    pub whole: u64,
}

/// Where the times of some steps lie, ns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Middle {
    pub mean: f64,
    pub median: f64,
    steps: u64,
    /// The step with the largest part of the time.
    largest: Lasted,
    largest_ns: u64,
    /// Its share of the time of all.
    share: f64,
    /// What of all time it has beyond the median, as a share.
    beyond: f64,
}

impl Middle {
    /// Of steps with their weights; `None` without any.
    ///
    /// Ten steps of 10 and one of 1000, each of weight 1: mean 100, median 10, the longest has 1000 / 1100 = 91 % of the time.
    fn of(mut steps: Vec<(Lasted, u64, f64)>) -> Option<Self> {
        steps.sort_unstable_by_key(|&(step, ns, _)| (ns, step.of_baseline, step.step_id));
        let weights: f64 = steps.iter().map(|(.., weight)| weight).sum();
        let total: f64 = steps.iter().map(|&(_, ns, weight)| weight * ns as f64).sum();
        let &(largest, largest_ns, weight) = steps.iter().max_by(|a, b| (a.2 * a.1 as f64).total_cmp(&(b.2 * b.1 as f64)))?;
        let mut below = 0.0;
        let mut median = largest_ns as f64;
        // Sums of weights that are no integers are rounded.
        let rounding = 1e-9 * weights;
        for (at, &(_, ns, weight)) in steps.iter().enumerate() {
            below += weight;
            let more = 2.0 * below - weights;
            if more >= -rounding {
                let next = steps.get(at + 1).filter(|_| more <= rounding).map_or(ns, |(_, next, _)| *next);
                median = f64::midpoint(ns as f64, next as f64);
                break;
            }
        }
        let known = weights > 0.0 && total > 0.0;
        known.then(|| Self {
            mean: total / weights,
            median,
            steps: steps.len() as u64,
            largest,
            largest_ns,
            share: weight * largest_ns as f64 / total,
            beyond: weight * (largest_ns as f64 - median) / total,
        })
    }

    /// Whether the mean says little of a usual step.
    pub fn is_noisy(&self) -> bool {
        let apart = self.mean > NOISY_MEAN * self.median || self.median > NOISY_MEAN * self.mean;
        apart || (self.steps >= FEW_DECODE_STEPS && self.beyond > NOISY_STEP_SHARE)
    }

    /// How far mean and median are apart, as a factor of at least 1.
    fn apart(&self) -> f64 {
        (self.mean / self.median).max(self.median / self.mean)
    }

    /// `decode steps take 41.0 ms by mean and 500 µs by median, step 17 (9.90 s) alone is 95 % of their time`.
    fn said(&self, what: &str) -> String {
        let time = |ns: f64| Unit::Nanoseconds.show(ns);
        format!(
            "{what} take {} by mean and {} by median, step {}{} ({}) alone is {:.0} % of their time",
            time(self.mean),
            time(self.median),
            self.largest.step_id,
            if self.largest.of_baseline { " of the baseline" } else { "" },
            time(self.largest_ns as f64),
            self.share * 100.0
        )
    }
}

/// Of verify and of decode steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Middles {
    /// Of the target's passes.
    pub pass: [Option<Middle>; 2],
    /// Of the whole steps.
    pub whole: [Option<Middle>; 2],
}

impl Middles {
    /// Of all compared steps, weighed by the octaves' numbers of steps.
    pub fn of(steps: &[Lasted], buckets: &[Cell]) -> Self {
        let matched = buckets.iter().any(Cell::is_matched);
        let weight = |step: &Lasted| {
            let cell = buckets.get(usize::from(step.bucket))?;
            match usize::from(step.phase) {
                _ if !matched => Some(1.0),
                _ if !cell.is_matched() => None,
                DECODE => Some(cell.n[VERIFY] as f64 / cell.n[DECODE] as f64),
                _ => Some(1.0),
            }
        };
        let of = |phase: usize, ns: fn(&Lasted) -> u64| {
            let own = steps.iter().filter(|step| usize::from(step.phase) == phase);
            Middle::of(own.filter_map(|step| Some((*step, ns(step), weight(step)?))).collect())
        };
        let both = |ns: fn(&Lasted) -> u64| [of(VERIFY, ns), of(DECODE, ns)];
        Self { pass: both(|step| step.pass), whole: both(|step| step.whole) }
    }

    /// Median of the verify steps over that of the decode steps.
    pub fn ratio([verify, decode]: [Option<Middle>; 2]) -> Option<f64> {
        let (verify, decode) = (verify?.median, decode?.median);
        (decode > 0.0).then(|| verify / decode)
    }

    /// Which kinds of steps have means that a few steps decide; `None` where neither has. Of a kind that has them twice, passes or whole
    /// steps are told, whichever are further apart.
    pub fn noise(&self) -> Option<String> {
        let of = |phase: usize, name: &str| {
            let noisy = |middle: Option<Middle>, what: &str| middle.filter(Middle::is_noisy).map(|m| (m, format!("{name} {what}")));
            let (whole, pass) = (noisy(self.whole[phase], "steps"), noisy(self.pass[phase], "passes"));
            let worst = match (whole, pass) {
                (Some(whole), Some(pass)) if pass.0.apart() > whole.0.apart() => Some(pass),
                (whole, pass) => whole.or(pass),
            };
            worst.map(|(middle, what)| middle.said(&what))
        };
        let said: Vec<String> = [of(VERIFY, "verify"), of(DECODE, "decode")].into_iter().flatten().collect();
        (!said.is_empty()).then(|| said.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::cost::collect::BUCKETS;
    use proptest::prelude::*;

    fn step(step_id: u32, phase: usize, bucket: u8, ns: u64) -> Lasted {
        Lasted { step_id, bucket, phase: phase as u8, of_baseline: false, pass: ns, whole: ns }
    }

    fn middle(times: &[(u64, f64)]) -> Middle {
        let steps = (0..).zip(times).map(|(id, &(ns, weight))| (step(id, DECODE, 0, ns), ns, weight)).collect();
        Middle::of(steps).unwrap()
    }

    #[test]
    fn worked_example() {
        let mut times = vec![(10, 1.0); 11];
        times[4].0 = 1000;
        let found = middle(&times);
        assert_eq!((found.mean, found.median, found.largest.step_id, found.is_noisy()), (100.0, 10.0, 4, true));
        assert!((found.share - 1000.0 / 1100.0).abs() < 1e-12 && (found.beyond - 0.9).abs() < 1e-12);
        assert_eq!(
            found.said("decode steps"),
            "decode steps take 100 ns by mean and 10 ns by median, step 4 (1.00 µs) alone is 91 % of their time"
        );
        // An even number has the mean of the two in the middle; weights shift it.
        assert_eq!(middle(&[(1, 1.0), (3, 1.0)]).median, 2.0);
        assert_eq!(middle(&[(1, 1.0), (3, 1.0), (8, 3.0)]).median, 8.0);
        assert_eq!(Middle::of(Vec::new()), None);
    }

    #[test]
    fn the_bounds_are_the_stated_ones() {
        // One step in ten at 2.1 times the others has 1.1 / 11.1 = 9.9 % beyond the median, at 2.2 times 10.7 %.
        let one = |ns: u64| middle(&[vec![(100, 1.0); 9], vec![(ns, 1.0)]].concat()).is_noisy();
        assert_eq!((one(210), one(220)), (false, true));
        // Of nine any is a large share; there the means must be apart.
        let nine = |ns: u64| middle(&[vec![(100, 1.0); 8], vec![(ns, 1.0)]].concat()).is_noisy();
        assert_eq!((nine(220), nine(540), nine(560)), (false, false, true));
        // Steps that are much shorter than the usual one: 3 of 14 are no noise, 10 of 21 are.
        let short = |n: usize| middle(&[vec![(100, 1.0); 11], vec![(1, 1.0); n]].concat()).is_noisy();
        assert_eq!((short(3), short(10)), (false, true));
    }

    #[test]
    fn weights_are_those_of_the_means() {
        // The example of `Matched::of`: octave 3 has no decode step and counts for nothing.
        let mut buckets = [Cell::default(); BUCKETS];
        buckets[1].n = [3, 1];
        buckets[2].n = [1, 2];
        buckets[3].n = [1, 0];
        let steps = [
            (VERIFY, 1, 20),
            (VERIFY, 1, 20),
            (VERIFY, 1, 20),
            (DECODE, 1, 10),
            (VERIFY, 2, 40),
            (DECODE, 2, 20),
            (DECODE, 2, 20),
            (VERIFY, 3, 9000),
        ];
        let steps: Vec<Lasted> = (0..).zip(steps).map(|(id, (phase, bucket, ns))| step(id, phase, bucket, ns)).collect();
        let found = Middles::of(&steps, &buckets);
        let [verify, decode] = found.whole.map(Option::unwrap);
        assert_eq!((verify.mean, decode.mean, verify.median, decode.median), (25.0, 12.5, 20.0, 10.0));
        assert_eq!((Middles::ratio(found.whole), found.noise()), (Some(2.0), None));
        // Without any pair of octaves all steps count.
        buckets[1].n = [3, 0];
        buckets[2].n = [0, 2];
        assert!(
            Middles::of(&steps, &buckets).noise().unwrap().starts_with("verify steps take 1.82 µs by mean and 20 ns by median, step 7")
        );
    }

    proptest! {
        #[test]
        fn half_of_the_weight_is_on_either_side(times in prop::collection::vec((1u64..1000, 1u8..4), 1..60)) {
            let times: Vec<(u64, f64)> = times.into_iter().map(|(ns, weight)| (ns, f64::from(weight))).collect();
            let found = middle(&times);
            let all: f64 = times.iter().map(|t| t.1).sum();
            let below: f64 = times.iter().filter(|t| (t.0 as f64) < found.median).map(|t| t.1).sum();
            let above: f64 = times.iter().filter(|t| t.0 as f64 > found.median).map(|t| t.1).sum();
            prop_assert!(below <= all / 2.0 && above <= all / 2.0);
        }
    }
}
