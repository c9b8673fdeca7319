//! Windows that end before the first draft that the drafter is not sure of.
//!
//! With draft probabilities p_1...p_γ and a threshold t, g = the largest number with p_1...p_g >= t:
//!
//! tokens = min(accepted, g) + 1, experts = P(g), drafts made = min(g + 1, γ)
//!
//! A window without drafts left (g = 0) is a decode step, with one draft made. Probabilities .9 .4 .8, accepted 3, t = .5: g = 1, 2 tokens,
//! the experts of rows 0 and 1, two drafts made.

use super::doubt::{Costs, Row, Whose};
use super::prefixes::Windows;
use super::step_cost::Coefficients;
use crate::analysis::stats::percentile_interval;
use crate::metric::advice::Confidence;
use std::collections::BTreeMap;

const THRESHOLDS: [f64; 13] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99];

/// Sums at one threshold.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    steps: u64,
    tokens: u64,
    experts: u64,
    /// Verified drafts.
    drafts: u64,
    /// Drafts made.
    made: u64,
    /// Steps with drafts, and the experts of them.
    verify: u64,
    verify_experts: u64,
}

const WIDTH: usize = 7;

impl Sums {
    fn add(&mut self, accepted: u64, verified: usize, drafts: usize, experts: u64) {
        self.steps += 1;
        self.tokens += accepted.min(verified as u64) + 1;
        self.experts += experts;
        self.drafts += verified as u64;
        self.made += (verified + 1).min(drafts) as u64;
        if verified > 0 {
            self.verify += 1;
            self.verify_experts += experts;
        }
    }

    fn row(&self) -> [f64; WIDTH] {
        [self.steps, self.tokens, self.experts, self.drafts, self.made, self.verify, self.verify_experts].map(|n| n as f64)
    }
}

/// Cost of a step in decode steps.
fn ratio(row: &[f64], cost: &Coefficients) -> f64 {
    let [steps, _, _, drafts, made, verify, verify_experts] = row else { return f64::NAN };
    let passes = cost.passes(*verify, drafts + verify, *verify_experts) + cost.decode * (steps - verify);
    let spent = passes + cost.drafting(*steps, *made);
    spent / (cost.decode * steps)
}

/// The sweep over thresholds; `None` when a window's draft probabilities are unknown or no numbers.
pub fn sweep(windows: &Windows<'_>, probs: &[Option<Vec<f32>>], costs: &Costs<'_>) -> Option<Vec<Confidence>> {
    let mut by_request: BTreeMap<u32, [Sums; THRESHOLDS.len()]> = BTreeMap::new();
    for (step, sum) in &windows.steps {
        let probs = probs.get(sum.at as usize)?.as_ref().filter(|p| p.len() == windows.drafts && p.iter().all(|p| p.is_finite()))?;
        let sums = by_request.entry(step.request).or_default();
        // Thresholds ascend, so no window has more drafts at a later one.
        let mut verified = windows.drafts;
        for (sums, threshold) in sums.iter_mut().zip(THRESHOLDS) {
            let sure = |p: &f32| f64::from(*p) >= threshold;
            verified = probs[..verified].iter().position(|p| !sure(p)).unwrap_or(verified);
            sums.add(u64::from(step.accepted), verified, windows.drafts, sum.prefix(verified));
        }
    }
    let rows: Vec<Row> = by_request.iter().map(|(&at, sums)| (at, sums.iter().flat_map(Sums::row).collect())).collect();
    let mut totals = vec![0.0; WIDTH * THRESHOLDS.len()];
    rows.iter().for_each(|(_, row)| totals.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
    let speedups = |totals: &[f64], cost: Option<&Coefficients>| -> Vec<f64> {
        let speedup = |row: &[f64]| cost.map_or(f64::NAN, |cost| row[1] / row[0] / ratio(row, cost));
        totals.chunks_exact(WIDTH).map(speedup).collect()
    };
    let draws = if costs.are_known() { costs.draws((&rows, totals.len(), Whose::All), speedups) } else { Vec::new() };
    let of = |(at, (threshold, row)): (usize, (f64, &[f64]))| {
        let (steps, layers) = (row[0], f64::from(windows.layers));
        let step_ratio = costs.coefficients().map(|cost| ratio(row, cost));
        Confidence {
            threshold,
            drafts_mean: row[3] / steps,
            decode_share: (steps - row[5]) / steps,
            tokens_per_step: row[1] / steps,
            union_mean: row[2] / steps / layers,
            step_ratio,
            speedup: step_ratio.map(|ratio| row[1] / steps / ratio),
            ci95: percentile_interval(&draws, at),
        }
    };
    (!by_request.is_empty()).then(|| THRESHOLDS.into_iter().zip(totals.chunks_exact(WIDTH)).enumerate().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::super::doubt::Doubt;
    use super::super::step_cost::StepCost;
    use super::*;
    use crate::analysis::Options;
    use crate::analysis::step_sums::StepSum;
    use crate::analysis::steps::Step;
    use crate::metric::advice::CostSource;
    use crate::trace::Phase;

    fn step(request: u32, accepted: u16) -> Step {
        Step { step_id: 0, request, phase: Phase::Verify, rows: 4, accepted, drafts: 3, emitted: u32::from(accepted) + 1, context_len: 0 }
    }

    #[test]
    fn worked_example() {
        let (steps, added) = ([step(0, 3), step(1, 0)], [[4, 2, 1, 1], [4, 3, 3, 3]]);
        let windows = Windows {
            drafts: 3,
            layers: 2,
            steps: vec![
                (&steps[0], StepSum { at: 0, layers: 2, added: &added[0] }),
                (&steps[1], StepSum { at: 1, layers: 2, added: &added[1] }),
            ],
            left_out: 0,
        };
        let probs = [Some(vec![0.9, 0.4, 0.8]), Some(vec![0.25, 0.99, 0.99])];
        let coefficients = Coefficients { decode: 8.0, fixed: 4.0, per_expert: 1.0, per_draft: 1.0, ..Coefficients::default() };
        let cost = StepCost { source: CostSource::Model, coefficients, assumptions: vec![], shorter_unknown_because: None };
        let options = Options { resamples: 50, seed: 1 };
        let costs = Costs { point: Some(&cost), doubt: &Doubt::Exact, options: &options };
        let sweep_of = |probs: &[Option<Vec<f32>>]| sweep(&windows, probs, &costs);
        let points = sweep_of(&probs).unwrap();
        // Nothing is cut: tokens (4 + 1) / 2; costs 4 + 8 + 3 and 4 + 13 + 3.
        assert_eq!((points[0].threshold, points[0].tokens_per_step, points[0].drafts_mean), (0.0, 2.5, 3.0));
        assert_eq!((points[0].step_ratio, points[0].union_mean), (Some(35.0 / 16.0), 21.0 / 4.0));
        // .5: the first window keeps one draft (2 tokens, 6 experts, 2 made), the second none (a decode step, 4 experts, 1 made).
        let half = &points[5];
        assert_eq!((half.threshold, half.tokens_per_step, half.drafts_mean, half.decode_share), (0.5, 1.5, 0.5, 0.5));
        assert_eq!((half.step_ratio, half.union_mean), (Some((4.0 + 6.0 + 2.0 + 8.0 + 1.0) / 16.0), 10.0 / 4.0));
        assert_eq!(half.speedup, Some(1.5 / (21.0 / 16.0)));
        // Two requests: the interval spans them, 2 tokens for 12 and 1 for 9.
        assert_eq!(half.ci95, Some([8.0 / 9.0, 2.0 * 8.0 / 12.0]));
        assert_eq!(sweep_of(&[Some(vec![0.9, 0.4, 0.8]), None]), None);
        assert_eq!(sweep_of(&[Some(vec![0.9, 0.4, 0.8]), Some(vec![0.1, f32::NAN, 0.2])]), None);
        let unknown = Costs { point: None, ..costs };
        assert!(sweep(&windows, &probs, &unknown).unwrap().iter().all(|p| p.speedup.is_none() && p.ci95.is_none()));
        let unsure = Costs { doubt: &Doubt::Unknown, ..costs };
        assert!(sweep(&windows, &probs, &unsure).unwrap().iter().all(|p| p.speedup.is_some() && p.ci95.is_none()));
    }
}
