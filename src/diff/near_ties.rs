//! Rows that chose other experts although their routers saw the same: near-ties, which fall by the last bits of a sum.
//!
//! Gate weights are scores over their sum (and a factor), so of the experts S that both runs have chosen w_i / v_i is one number when the scores
//! are the same. A row that differs is a near-tie when |S| ≥ 2 and max_S(w_i / v_i) / min_S(w_i / v_i) - 1 ≤ [`SAME`]: what was chosen
//! otherwise then stood at the border of the choice in both runs, biases and groups included. A row whose scores differ by more follows from something else:
//! another formula, coarser numbers, or an earlier near-tie.

use std::collections::HashMap;

/// Relative difference of scores up to which a router has seen the same: FP32 sums in another order stay a hundred times below, BF16 activations are
/// ten times beyond.
pub(super) const SAME: f64 = 1e-3;
/// Most rows x layers that are looked at.
pub(super) const MOST: usize = 1 << 16;

/// Experts and their gate weights.
pub(super) type Choice = Vec<(u16, f32)>;

/// Whether two choices that differ are a near-tie.
fn is_near_tie(base: &[(u16, f32)], candidate: &[(u16, f32)]) -> bool {
    let shared =
        base.iter().filter_map(|(id, w)| candidate.iter().find(|(other, _)| other == id).map(|(_, v)| f64::from(*w) / f64::from(*v)));
    let (n, low, high) = shared.fold((0, f64::INFINITY, 0.0_f64), |(n, low, high), r| (n + 1, low.min(r), high.max(r)));
    // What is no number is not the same.
    n >= 2 && low > 0.0 && high / low - 1.0 <= SAME
}

/// How many of the cells that both runs have a choice of are near-ties.
pub(super) fn count(base: &HashMap<usize, Choice>, candidate: &HashMap<usize, Choice>) -> u64 {
    let both = base.iter().filter_map(|(cell, choice)| Some((choice, candidate.get(cell)?)));
    both.filter(|(a, b)| is_near_tie(a, b)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn worked_example() {
        // Scores 3, 2, 1.0001 and 1 of experts 4, 9, 2 and 7: two runs take 2 or 7 beside 4 and 9, each over its own sum.
        let base = [(4, 3.0 / 6.0001), (9, 2.0 / 6.0001), (2, 1.0001 / 6.0001)];
        let tie = [(9, 2.0 / 6.0), (4, 3.0 / 6.0), (7, 1.0 / 6.0)];
        assert!(is_near_tie(&base, &tie));
        // Expert 9 has another score: not the same row any more.
        assert!(!is_near_tie(&base, &[(9, 2.1 / 6.1), (4, 3.0 / 6.1), (7, 1.0 / 6.1)]));
        // One shared expert says nothing, and neither do weights that are none.
        assert!(!is_near_tie(&base, &[(4, 0.5), (1, 0.3), (7, 0.2)]));
        assert!(
            !is_near_tie(&[(4, 0.0), (9, 0.0)], &[(4, 0.0), (9, 0.0)]) && !is_near_tie(&[(4, f32::NAN), (9, 0.5)], &[(4, 0.5), (9, 0.5)])
        );
        let of = |choice: &[(u16, f32)]| HashMap::from([(3, choice.to_vec()), (8, base.to_vec())]);
        assert_eq!(count(&of(&base), &HashMap::from([(3, tie.to_vec()), (5, tie.to_vec())])), 1);
    }

    proptest! {
        /// Whatever the factor of a row, and whichever way round.
        #[test]
        fn factors_and_sides_do_not_matter(scores in prop::collection::vec(0.01f32..1.0, 3..8), factor in 0.1f32..10.0, off in 0.0f32..0.01) {
            let base: Choice = scores.iter().zip(0u16..).map(|(w, id)| (id, *w)).collect();
            let mut other: Choice = base.iter().map(|(id, w)| (*id, w * factor)).collect();
            other[0].1 *= 1.0 + off;
            prop_assert_eq!(is_near_tie(&base, &other), is_near_tie(&other, &base));
            if !(0.0009..0.0011).contains(&off) {
                prop_assert_eq!(is_near_tie(&base, &other), off < 0.001);
            }
        }
    }
}
