//! What timing the operations costs, measured in the run itself: steps with and without, in turn (`--kernel-every N`).

use crate::trace::{Phase, StepEvent};

/// Fewest pairs that a share is told of.
const FEWEST_PAIRS: usize = 10;

/// Pairs of neighbours, a step with its operations timed and one like it without. By turns the timed one is the first and the second of its
/// pair, so that what changes from step to step (context, temperature) does not count as the timing's.
#[derive(Debug, Default)]
pub(super) struct TimingCost {
    /// Steps that could be the first of a pair, the last one of each kind.
    waiting: Vec<(Kin, i64)>,
    /// Whether the first step of the next pair is to be the untimed one.
    untimed_first: bool,
    /// Timed over untimed, of pairs with the timed step first, and of the others.
    ratios: [Vec<f64>; 2],
}

/// Steps that can be compared: of one request, phase and number of rows.
type Kin = (u32, Phase, usize);

impl TimingCost {
    /// Adds a step; `timed`: its operations were.
    pub fn add(&mut self, step: &StepEvent, timed: bool) {
        self.add_time((step.request_id, step.phase, step.rows()), step.host_end_ns - step.host_begin_ns, timed);
    }

    fn add_time(&mut self, kin: Kin, ns: i64, timed: bool) {
        // Nothing is compared across requests.
        self.waiting.retain(|((request, ..), _)| *request == kin.0);
        let found = self.waiting.iter().position(|(other, _)| *other == kin);
        if timed != self.untimed_first {
            match found {
                Some(at) => self.waiting[at].1 = ns,
                None => self.waiting.push((kin, ns)),
            }
        } else if let Some(at) = found {
            let (_, first) = self.waiting.swap_remove(at);
            if first > 0 && ns > 0 {
                let ratio = if timed { ns as f64 / first as f64 } else { first as f64 / ns as f64 };
                self.ratios[usize::from(self.untimed_first)].push(ratio);
                self.untimed_first = !self.untimed_first;
                // They were to be the first of a pair of the other kind.
                self.waiting.clear();
            }
        }
    }

    /// Pairs so far.
    pub fn pairs(&self) -> usize {
        self.ratios.iter().map(Vec::len).sum()
    }

    /// √(m₁ m₂) − 1: m₁ is the median of tᵢ / uᵢ over pairs of a timed step's time tᵢ and the time uᵢ of the first untimed step after it that
    /// has its request, phase and rows, m₂ that over pairs with the last such step before it; by the host's clock. A drift from step to step
    /// by d makes the one (1 + d) times smaller and the other as much larger. `None` of fewer than ten pairs. May be below 0: it is as
    /// uncertain as the times are.
    pub fn share(&self) -> Option<f64> {
        let [first, second] = &self.ratios;
        if self.pairs() < FEWEST_PAIRS {
            return None;
        }
        Some((median(first)? * median(second)?).sqrt() - 1.0)
    }
}

/// The middle of some numbers, of two middle ones their mean; `None` of none.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    Some(f64::midpoint(sorted[last / 2], sorted[sorted.len() / 2]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A timed step of 110 ns beside each untimed one of 100 costs a tenth; steps of other rows in between count for nothing.
    #[test]
    fn a_share_is_the_median_of_pairs() {
        let mut cost = TimingCost::default();
        let window = (0, Phase::Verify, 4);
        for n in 0..10 {
            assert_eq!((cost.share(), cost.pairs()), (None, n));
            let disturbed = if n == 3 { 9000 } else { 110 };
            if n % 2 == 0 {
                cost.add_time(window, disturbed, true);
                cost.add_time((0, Phase::Decode, 1), 1, false);
                cost.add_time(window, 100, false);
            } else {
                cost.add_time(window, 50, false);
                cost.add_time(window, 100, false);
                cost.add_time((0, Phase::Decode, 1), 1, false);
                cost.add_time(window, disturbed, true);
            }
            // The pair is complete: another step of the kind that came second makes none.
            cost.add_time(window, 50, n % 2 == 1);
        }
        assert!((cost.share().unwrap() - 0.1).abs() < 1e-12);
    }

    /// Steps that take a hundredth longer each time do not make timing look cheaper or dearer, whatever one step in so many is timed, and
    /// whether the number of pairs is even or odd.
    #[test]
    fn a_drift_from_step_to_step_is_no_cost() {
        for (every, steps) in [(2, 60), (2, 63), (3, 100), (7, 150)] {
            let mut cost = TimingCost::default();
            let mut plain = 1e6;
            for step in 0..steps {
                let timed = step % every == 0;
                cost.add_time((0, Phase::Decode, 1), (plain * if timed { 1.05 } else { 1.0 }) as i64, timed);
                plain *= 1.01;
            }
            let share = cost.share().unwrap();
            assert!((share - 0.05).abs() < 1e-4, "one in {every}: {share} of {} pairs", cost.pairs());
        }
    }

    #[test]
    fn nothing_is_compared_across_requests() {
        let mut cost = TimingCost::default();
        for request in 0..40 {
            cost.add_time((request, Phase::Decode, 1), 100, true);
        }
        for request in 0..40 {
            cost.add_time((request, Phase::Decode, 1), 100, false);
        }
        assert_eq!((cost.pairs(), cost.share()), (0, None));
    }

    proptest! {
        #[test]
        fn a_share_does_not_depend_on_the_unit(times in proptest::collection::vec((1_i64..1_000_000, 1_i64..1_000_000), 10..40), unit in 1_i64..1000) {
            let share = |unit: i64| {
                let mut cost = TimingCost::default();
                for (number, (with, without)) in times.iter().enumerate() {
                    let mut pair = [(with, true), (without, false)];
                    if number % 2 == 1 {
                        pair.reverse();
                    }
                    pair.into_iter().for_each(|(ns, timed)| cost.add_time((0, Phase::Decode, 1), ns * unit, timed));
                }
                cost.share().unwrap()
            };
            let (one, many) = (share(1), share(unit));
            prop_assert!((one - many).abs() <= 1e-9 * (1.0 + one.abs()) && one > -1.0);
        }
    }
}
