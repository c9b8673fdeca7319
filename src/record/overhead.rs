//! What timing the operations costs, measured in the run itself: steps with and without, in turn (`--kernel-every N`).

use crate::trace::{Phase, StepEvent};

/// Fewest pairs that a share is told of.
const FEWEST_PAIRS: usize = 10;

/// Pairs of a step with its operations timed and the next one like it without.
#[derive(Debug, Default)]
pub(super) struct TimingCost {
    with: Option<(Kin, i64)>,
    ratios: Vec<f64>,
}

/// Steps that can be compared: of one request, phase and number of rows.
type Kin = (u32, Phase, usize);

impl TimingCost {
    /// Adds a step; `timed`: its operations were.
    pub fn add(&mut self, step: &StepEvent, timed: bool) {
        self.add_time((step.request_id, step.phase, step.rows()), step.host_end_ns - step.host_begin_ns, timed);
    }

    fn add_time(&mut self, kin: Kin, ns: i64, timed: bool) {
        if timed {
            self.with = Some((kin, ns));
        } else if let Some((_, with)) = self.with.take_if(|(other, _)| *other == kin)
            && ns > 0
        {
            self.ratios.push(with as f64 / ns as f64);
        }
    }

    /// median(tᵢ / uᵢ) − 1 over pairs of a timed step's time tᵢ and the time uᵢ of the first untimed step after it that has its request,
    /// phase and rows, both by the host's clock. `None` of fewer than ten pairs. May be below 0: it is as uncertain as the times are.
    pub fn share(&self) -> Option<f64> {
        if self.ratios.len() < FEWEST_PAIRS {
            return None;
        }
        let mut sorted = self.ratios.clone();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(f64::midpoint(low, high) - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A timed step of 110 ns before each untimed one of 100 costs a tenth; steps of other rows in between count for nothing.
    #[test]
    fn a_share_is_the_median_of_pairs() {
        let mut cost = TimingCost::default();
        let window = (0, Phase::Verify, 4);
        for n in 0..10 {
            assert_eq!(cost.share(), None);
            cost.add_time(window, if n == 3 { 9000 } else { 110 }, true);
            cost.add_time((0, Phase::Decode, 1), 1, false);
            cost.add_time(window, 100, false);
            // The pair is complete.
            cost.add_time(window, 50, false);
        }
        assert!((cost.share().unwrap() - 0.1).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn a_share_does_not_depend_on_the_unit(times in proptest::collection::vec((1_i64..1_000_000, 1_i64..1_000_000), 10..40), unit in 1_i64..1000) {
            let share = |unit: i64| {
                let mut cost = TimingCost::default();
                for (with, without) in &times {
                    cost.add_time((0, Phase::Decode, 1), with * unit, true);
                    cost.add_time((0, Phase::Decode, 1), without * unit, false);
                }
                cost.share().unwrap()
            };
            let (one, many) = (share(1), share(unit));
            prop_assert!((one - many).abs() <= 1e-9 * (1.0 + one.abs()) && one > -1.0);
        }
    }
}
