//! Every shorter draft length out of one recording: the first γ' drafts of the same windows.
//!
//! With a_w accepted of γ drafts and P_w(j) the distinct experts of rows 0...j, summed over the layers:
//!
//! tokens(γ') = Σ_w (min(a_w, γ') + 1), experts(γ') = Σ_w P_w(γ')
//!
//! Accepted 0, 2, 3 of three drafts: tokens(1) = 1 + 2 + 2 = 5, tokens(2) = 1 + 3 + 3 = 7, tokens(3) = 1 + 3 + 4 = 8.

use super::step_cost::Coefficients;
use crate::analysis::step_sums::{StepSum, StepSums};
use crate::analysis::steps::{Step, StepTable};

/// The windows that the advice is made of: those of one length with all layers.
pub struct Windows<'a> {
    /// γ.
    pub drafts: usize,
    /// Layers of each of them.
    pub layers: u32,
    /// Each with its step, ascending.
    pub steps: Vec<(&'a Step, StepSum<'a>)>,
    /// Verify steps that are not among them.
    pub left_out: u64,
}

impl<'a> Windows<'a> {
    /// The windows of `rows` rows.
    pub fn new(table: &'a StepTable, sums: &'a StepSums, rows: usize) -> Self {
        let layers = sums.iter().filter(|s| s.added.len() == rows).map(|s| s.layers).max().unwrap_or(0);
        let of = |sum: StepSum<'a>| table.steps.get(sum.at as usize).map(|step| (step, sum));
        let steps: Vec<_> = sums.iter().filter(|s| s.added.len() == rows && s.layers == layers).filter_map(of).collect();
        let all = table.steps.iter().filter(|s| s.is_verify()).count();
        Self { drafts: rows.saturating_sub(1), layers, left_out: (all - steps.len().min(all)) as u64, steps }
    }

    /// Sums by draft length of each request that has windows, ascending by request. `chosen` are indices of requests.
    pub fn by_request(&self, chosen: impl Fn(u32) -> bool) -> Vec<(u32, DraftSums)> {
        let mut sums: std::collections::BTreeMap<u32, DraftSums> = std::collections::BTreeMap::new();
        for (step, sum) in self.steps.iter().filter(|(step, _)| chosen(step.request)) {
            sums.entry(step.request).or_insert_with(|| DraftSums::new(self.drafts)).add(step, sum);
        }
        sums.into_iter().collect()
    }
}

/// Sums of some windows, entry γ' = 0...γ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftSums {
    /// Number of steps.
    pub steps: u64,
    /// Tokens.
    pub tokens: Vec<u64>,
    /// Experts over all layers.
    pub experts: Vec<u64>,
}

impl DraftSums {
    /// No windows of `drafts` drafts.
    pub fn new(drafts: usize) -> Self {
        Self { steps: 0, tokens: vec![0; drafts + 1], experts: vec![0; drafts + 1] }
    }

    fn add(&mut self, step: &Step, sum: &StepSum<'_>) {
        self.steps += 1;
        let mut prefix = 0;
        for (length, ((tokens, experts), &added)) in self.tokens.iter_mut().zip(&mut self.experts).zip(sum.added).enumerate() {
            prefix += u64::from(added);
            *tokens += u64::from(step.accepted).min(length as u64) + 1;
            *experts += prefix;
        }
    }

    /// As one row of floating-point numbers: steps, tokens, experts.
    pub fn row(&self) -> Vec<f64> {
        std::iter::once(self.steps).chain(self.tokens.iter().copied()).chain(self.experts.iter().copied()).map(|n| n as f64).collect()
    }
}

/// What one draft length comes to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Tokens per step, τ.
    pub tokens: f64,
    /// Distinct experts a layer.
    pub union: f64,
    /// Cost of a step in decode steps; no number when costs are unknown.
    pub ratio: f64,
    /// τ / ratio.
    pub speedup: f64,
}

/// How tokens and experts are idealised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ideal {
    /// Every draft is accepted.
    pub drafter: bool,
    /// Every row chooses the anchor's experts.
    pub overlap: bool,
    /// Drafts cost nothing.
    pub free_drafts: bool,
}

/// The points γ' = 0...γ of a row of [`DraftSums::row`] (or a sum of such rows).
pub fn curve(row: &[f64], layers: u32, cost: Option<&Coefficients>, ideal: Ideal) -> Vec<Point> {
    (0..row.len() / 2).map(|length| point(row, layers, cost, ideal, length)).collect()
}

/// One of them, γ' = `length`.
///
/// ratio(γ') = (passes(steps, (γ' + 1) steps, experts(γ')) + drafting(steps, γ' steps)) / (decode steps), and 1 for γ' = 0. By costs of whole windows
/// alone it is no number for 0 < γ' < γ, nor where the experts are idealised.
pub fn point(row: &[f64], layers: u32, cost: Option<&Coefficients>, ideal: Ideal, length: usize) -> Point {
    let lengths = row.len() / 2;
    let steps = row[0];
    let tokens = if ideal.drafter { (length + 1) as f64 } else { row[1 + length] / steps };
    let experts = if ideal.overlap { row[1 + lengths] } else { row[1 + lengths + length] };
    let ratio = match cost {
        Some(_) if length == 0 => 1.0,
        Some(cost) if cost.whole_only && (length + 1 < lengths || ideal.overlap) => f64::NAN,
        Some(cost) => {
            let drafting = if ideal.free_drafts { 0.0 } else { cost.drafting(steps, length as f64 * steps) };
            (cost.passes(steps, (length + 1) as f64 * steps, experts) + drafting) / (cost.decode * steps)
        }
        None => f64::NAN,
    };
    Point { tokens, union: experts / steps / f64::from(layers), ratio, speedup: tokens / ratio }
}

/// The draft length of the largest speedup, the shortest on a tie; `None` without costs.
pub fn best(curve: &[Point]) -> Option<usize> {
    let known = curve.iter().enumerate().filter(|(_, p)| p.speedup.is_finite());
    known.reduce(|best, next| if next.1.speedup > best.1.speedup { next } else { best }).map(|(length, _)| length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Phase;
    use proptest::prelude::*;

    fn step(request: u32, accepted: u16) -> Step {
        Step { step_id: 0, request, phase: Phase::Verify, rows: 4, accepted, drafts: 3, emitted: u32::from(accepted) + 1, context_len: 0 }
    }

    fn cost(fixed: f64, per_expert: f64, per_draft: f64, k: f64) -> Coefficients {
        Coefficients { decode: fixed + per_expert * k, fixed, per_expert, per_draft, ..Coefficients::default() }
    }

    #[test]
    fn worked_example_of_the_docs() {
        let mut sums = DraftSums::new(3);
        for (accepted, added) in [(0, [4, 2, 2, 1]), (2, [4, 1, 1, 1]), (3, [4, 0, 3, 3])] {
            sums.add(&step(0, accepted), &StepSum { at: 0, layers: 2, added: &added });
        }
        assert_eq!((sums.steps, &sums.tokens, &sums.experts), (3, &vec![3, 5, 7, 8], &vec![12, 15, 21, 26]));
        // k = 2 in two layers; fixed 4, one an expert, one a draft: decode 8; two drafts: 4 + 7 + 2 = 13.
        let row = sums.row();
        let cost = cost(4.0, 1.0, 1.0, 4.0);
        let points = curve(&row, 2, Some(&cost), Ideal::default());
        assert_eq!((points[0].tokens, points[0].union, points[0].ratio, points[0].speedup), (1.0, 2.0, 1.0, 1.0));
        assert_eq!((points[2].tokens, points[2].union, points[2].ratio), (7.0 / 3.0, 3.5, 13.0 / 8.0));
        let at = |ideal| curve(&row, 2, Some(&cost), ideal)[2];
        assert_eq!(at(Ideal { drafter: true, ..Ideal::default() }).tokens, 3.0);
        assert_eq!(at(Ideal { overlap: true, ..Ideal::default() }).ratio, 10.0 / 8.0);
        assert_eq!(at(Ideal { free_drafts: true, ..Ideal::default() }).ratio, 11.0 / 8.0);
        assert_eq!(best(&curve(&row, 2, None, Ideal::default())), None);
        // Drafts made as one block for 3: one draft costs as many bytes of drafting as three.
        let block = Coefficients { per_draft: 0.0, per_block: 3.0, ..cost };
        let points = curve(&row, 2, Some(&block), Ideal::default());
        assert_eq!((points[0].ratio, points[1].ratio, points[2].ratio), (1.0, 12.0 / 8.0, 14.0 / 8.0));
        assert_eq!(curve(&row, 2, Some(&block), Ideal { free_drafts: true, ..Ideal::default() })[2].ratio, 11.0 / 8.0);
    }

    #[test]
    fn the_published_loss_of_one_draft() {
        // 0.9 accepted of one draft at a ratio of 2.2: 1.9 / 2.2 = 0.86, so no draft at all is best.
        let row = [10.0, 10.0, 19.0, 80.0, 160.0];
        let mut cost = cost(0.0, 1.0, 0.0, 8.0);
        cost.per_draft = 0.2 * cost.decode;
        let points = curve(&row, 1, Some(&cost), Ideal::default());
        assert!((points[1].ratio - 2.2).abs() < 1e-12 && (points[1].speedup - 0.8636).abs() < 1e-4);
        assert_eq!(best(&points), Some(0));
    }

    proptest! {
        #[test]
        fn longer_windows_bring_no_less_and_cost_no_less(
            windows in prop::collection::vec((0u16..5, prop::collection::vec(0u32..20, 5)), 1..40), per_draft in 0.0f64..3.0
        ) {
            let mut sums = DraftSums::new(4);
            for (accepted, added) in &windows {
                sums.add(&step(0, *accepted), &StepSum { at: 0, layers: 1, added });
            }
            // Naively, by draft length.
            for length in 0..5usize {
                let tokens: u64 = windows.iter().map(|(a, _)| u64::from(*a).min(length as u64) + 1).sum();
                let experts: u64 = windows.iter().flat_map(|(_, added)| &added[..=length]).map(|&n| u64::from(n)).sum();
                prop_assert_eq!((sums.tokens[length], sums.experts[length]), (tokens, experts));
            }
            let row = sums.row();
            let cost = cost(5.0, 1.0, per_draft, 0.0);
            let points = curve(&row, 1, Some(&cost), Ideal::default());
            prop_assert!(points.windows(2).all(|p| p[0].tokens <= p[1].tokens + 1e-12 && p[0].union <= p[1].union + 1e-12));
            prop_assert!(points.iter().skip(1).collect::<Vec<_>>().windows(2).all(|p| p[0].ratio <= p[1].ratio + 1e-12));
            for ideal in [Ideal { drafter: true, ..Ideal::default() }, Ideal { overlap: true, ..Ideal::default() }] {
                let better = curve(&row, 1, Some(&cost), ideal);
                prop_assert!(points.iter().zip(&better).all(|(p, b)| p.speedup <= b.speedup + 1e-12));
            }
        }
    }
}
