//! Which drafts a target keeps: greedy match, and token-wise rejection sampling that leaves the target's distribution as it is.
//!
//! Row j of a window predicts the token after its input j. Input 0 is the anchor, inputs 1...D are the drafts d_1...d_D,
//! so draft j is judged by row j - 1, and the token after the accepted drafts comes from the row that they end in. A window is a
//! chain: each draft continues the one before. Trees of drafts come from other engines alone (`steps.parents`); this one has none.
//!
//! Sampled (Leviathan et al. 2023, Chen et al. 2023): draft d is accepted when `u * q(d) < p(d)`, that is with probability
//! `min(1, p(d) / q(d))`; at the first rejection the token is drawn from `max(p - q, 0)` normalised, without a rejection from
//! the last row's p. What comes out is distributed as plain sampling from p, whatever q is.

use super::sampling::inverse_cdf;

/// What became of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Number of accepted drafts.
    pub accepted: usize,
    /// The token after them: the correction of the first rejected draft, or the bonus.
    pub next: u32,
}

/// The distribution that a draft was drawn from.
#[derive(Debug, Clone, PartialEq)]
pub enum DraftDist {
    /// All mass on the draft: it was not drawn, as with a lookup.
    OneHot,
    /// `[V]`, after the drafter's temperature and filters.
    Dense(Vec<f64>),
}

impl DraftDist {
    /// q of a token, where `draft` is the one that was drawn. Not a probability (NaN, negative, above 1) counts as 0.
    pub fn of(&self, token: u32, draft: u32) -> f64 {
        match self {
            Self::OneHot => f64::from(u8::from(token == draft)),
            Self::Dense(q) => sane(q.get(token as usize).copied().unwrap_or(0.0)),
        }
    }
}

/// Greedy rule: drafts are kept while each is the argmax of the row before it. `argmax[j]` is row j's, one per window row.
pub fn greedy(drafts: &[u32], argmax: &[u32]) -> Verdict {
    let accepted = drafts.iter().zip(argmax).take_while(|(draft, best)| draft == best).count();
    Verdict { accepted, next: argmax[accepted] }
}

/// Whether a draft with target probability `p` and draft probability `q` is kept: `0 < q <= 1` and `u q < p`.
pub fn accepts(p: f64, q: f64, u: f64) -> bool {
    q > 0.0 && q <= 1.0 && u * q < p
}

/// Turns `p` into the unnormalised residual `max(p - q, 0)` in place. NaN and values outside `[0, 1]` of q count as 0.
pub fn residual(p: &mut [f64], q: &DraftDist, draft: u32) {
    match q {
        DraftDist::OneHot => {
            if let Some(p) = p.get_mut(draft as usize) {
                *p = (*p - 1.0).max(0.0);
            }
        }
        DraftDist::Dense(q) => {
            for (p, &q) in p.iter_mut().zip(q) {
                *p = (*p - sane(q)).max(0.0);
            }
        }
    }
}

/// Token-wise rejection sampling of one window.
///
/// `q[j]` is what draft j was drawn from; `target(j, probs)` writes row j's distribution `[V]` into `probs` and is asked for the
/// rows that are needed only; `uniforms` are numbers in `[0, 1)`: one per draft, then the one that the last token is drawn with.
pub fn sampled(drafts: &[u32], q: &[DraftDist], uniforms: &[f64], mut target: impl FnMut(usize, &mut Vec<f64>)) -> Verdict {
    debug_assert!(q.len() == drafts.len() && uniforms.len() == drafts.len() + 1);
    let last = uniforms[drafts.len()];
    let mut p = Vec::new();
    for (j, ((&draft, q), &u)) in drafts.iter().zip(q).zip(uniforms).enumerate() {
        target(j, &mut p);
        let mass = p.get(draft as usize).copied().unwrap_or(0.0);
        if !accepts(mass, q.of(draft, draft), u) {
            residual(&mut p, q, draft);
            return Verdict { accepted: j, next: inverse_cdf(&p, last) };
        }
    }
    target(drafts.len(), &mut p);
    Verdict { accepted: drafts.len(), next: inverse_cdf(&p, last) }
}

fn sane(q: f64) -> f64 {
    if (0.0..=1.0).contains(&q) { q } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::sampling::{Sampler, Sampling};
    use proptest::prelude::*;

    #[test]
    fn greedy_stops_at_the_first_mismatch() {
        assert_eq!(greedy(&[5, 6, 7], &[5, 6, 9, 1]), Verdict { accepted: 2, next: 9 });
        assert_eq!(greedy(&[5, 6, 7], &[5, 6, 7, 1]), Verdict { accepted: 3, next: 1 });
        // A later draft that would match does not count after a rejection.
        assert_eq!(greedy(&[5, 6, 7], &[4, 6, 7, 1]), Verdict { accepted: 0, next: 4 });
        assert_eq!(greedy(&[], &[8]), Verdict { accepted: 0, next: 8 });
    }

    #[test]
    fn acceptance_is_strict_and_refuses_impossible_q() {
        assert!(accepts(0.2, 0.4, 0.499));
        assert!(!accepts(0.2, 0.4, 0.5));
        assert!(accepts(0.4, 0.2, 0.999));
        assert!(!accepts(0.0, 0.4, 0.0));
        assert!(!accepts(0.5, 0.0, 0.0));
        assert!(!accepts(0.5, 1.1, 0.0));
        assert!(!accepts(0.5, f64::NAN, 0.0));
    }

    #[test]
    fn residual_of_worked_examples() {
        let mut p = vec![0.5, 0.3, 0.2];
        residual(&mut p, &DraftDist::Dense(vec![0.2, 0.6, 0.2]), 1);
        assert_eq!(p, [0.3, 0.0, 0.0]);
        let mut p = vec![0.5, 0.3, 0.2];
        residual(&mut p, &DraftDist::OneHot, 1);
        assert_eq!(p, [0.5, 0.0, 0.2]);
        let mut p = vec![0.5, 0.3, 0.2];
        residual(&mut p, &DraftDist::Dense(vec![f64::NAN, f64::INFINITY, -1.0]), 0);
        assert_eq!(p, [0.5, 0.3, 0.2]);
    }

    #[test]
    fn sampled_by_hand() {
        let rows = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]];
        let q = [DraftDist::Dense(vec![0.2, 0.6, 0.2])];
        let run = |uniforms: &[f64]| sampled(&[1], &q, uniforms, |j, p| *p = rows[j].to_vec());
        // p(1) / q(1) = 0.5: below it the draft is kept and the bonus comes from row 1, above it the residual is all token 0.
        assert_eq!(run(&[0.49, 0.15]), Verdict { accepted: 1, next: 1 });
        assert_eq!(run(&[0.49, 0.99]), Verdict { accepted: 1, next: 2 });
        assert_eq!(run(&[0.51, 0.99]), Verdict { accepted: 0, next: 0 });
    }

    proptest! {
        #[test]
        fn greedy_equals_the_plain_loop(rows in prop::collection::vec((0u32..3, 0u32..3), 0..16), bonus in 0u32..3) {
            let drafts: Vec<u32> = rows.iter().map(|r| r.0).collect();
            let best: Vec<u32> = rows.iter().map(|r| r.1).chain([bonus]).collect();
            // What plain decoding would emit while its input is the window's.
            let mut emitted = vec![best[0]];
            while emitted.len() <= drafts.len() && emitted[emitted.len() - 1] == drafts[emitted.len() - 1] {
                emitted.push(best[emitted.len()]);
            }
            let verdict = greedy(&drafts, &best);
            prop_assert_eq!(verdict.accepted + 1, emitted.len());
            prop_assert_eq!(verdict.next, emitted[emitted.len() - 1]);
        }

        /// With one-hot rows, sampling is the greedy rule.
        #[test]
        fn one_hot_sampling_is_greedy(rows in prop::collection::vec((0u32..4, 0u32..4), 0..9), bonus in 0u32..4, seed in 0u64..1000) {
            let drafts: Vec<u32> = rows.iter().map(|r| r.0).collect();
            let best: Vec<u32> = rows.iter().map(|r| r.1).chain([bonus]).collect();
            let q = vec![DraftDist::OneHot; drafts.len()];
            let mut sampler = Sampler::new(Sampling { seed, ..Sampling::GREEDY }, 0);
            let uniforms: Vec<f64> = best.iter().map(|_| sampler.uniform()).collect();
            let verdict = sampled(&drafts, &q, &uniforms, |j, p| { p.clear(); p.resize(4, 0.0); p[best[j] as usize] = 1.0; });
            prop_assert_eq!(verdict, greedy(&drafts, &best));
        }
    }

    const V: usize = 6;
    const DRAWS: usize = 240_000;
    /// Upper 1e-6 quantiles of chi-square: 5 degrees of freedom for the first token, 35 for the pair of the first two.
    const LIMIT_5: f64 = 35.9;
    const LIMIT_35: f64 = 89.9;

    /// Target distributions of the first row, and of the second row given the first token: a small Markov chain.
    fn second(p: &[f64; V], first: u32) -> [f64; V] {
        std::array::from_fn(|i| p[(i + 1 + first as usize) % V])
    }

    /// Chi-square of counts against expected probabilities; any count where nothing may be is infinitely bad.
    fn chi_square(counts: &[usize], expected: &[f64]) -> f64 {
        let total: usize = counts.iter().sum();
        counts
            .iter()
            .zip(expected)
            .map(|(&n, &p)| {
                let want = p * total as f64;
                if want > 0.0 {
                    (n as f64 - want).powi(2) / want
                } else if n > 0 {
                    f64::INFINITY
                } else {
                    0.0
                }
            })
            .sum()
    }

    /// Speculates two drafts and counts the first token and the pair of the first two tokens. `biased` draws a correction from p instead of the residual.
    fn statistics(p: &[f64; V], q: &[f64; V], biased: bool) -> (f64, f64) {
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed: 11, ..Sampling::GREEDY }, 5);
        let (mut singles, mut pairs) = (vec![0usize; V], vec![0usize; V * V]);
        for _ in 0..DRAWS {
            let d1 = inverse_cdf(q, sampler.uniform());
            let q2 = second(q, d1);
            let d2 = inverse_cdf(&q2, sampler.uniform());
            let dists = [DraftDist::Dense(q.to_vec()), DraftDist::Dense(q2.to_vec())];
            let rows = [*p, second(p, d1), second(p, d2)];
            let mut verdict = sampled(&[d1, d2], &dists, &[(); 3].map(|()| sampler.uniform()), |j, out| *out = rows[j].to_vec());
            if biased && verdict.accepted < 2 {
                verdict.next = inverse_cdf(&rows[verdict.accepted], sampler.uniform());
            }
            let (first, then) = match verdict.accepted {
                // The step ended after one token: the second is the next step's, plain sampling as far as this rule goes.
                0 => (verdict.next, inverse_cdf(&second(p, verdict.next), sampler.uniform())),
                1 => (d1, verdict.next),
                _ => (d1, d2),
            };
            singles[first as usize] += 1;
            pairs[first as usize * V + then as usize] += 1;
        }
        let joint: Vec<f64> = (0..V * V).map(|i| p[i / V] * second(p, (i / V) as u32)[i % V]).collect();
        (chi_square(&singles, p), chi_square(&pairs, &joint))
    }

    #[test]
    fn emitted_tokens_follow_the_target_exactly() {
        let even = [1.0 / 6.0; V];
        let skewed = [0.5, 0.2, 0.15, 0.1, 0.04, 0.01];
        let reversed = [0.01, 0.04, 0.1, 0.15, 0.2, 0.5];
        let left = [0.6, 0.3, 0.1, 0.0, 0.0, 0.0];
        let right = [0.0, 0.0, 0.0, 0.1, 0.3, 0.6];
        let one_hot = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
        let cases = [
            (skewed, skewed),
            (skewed, even),
            (even, skewed),
            (skewed, reversed),
            (left, right),
            (left, skewed),
            (skewed, left),
            (skewed, one_hot),
            (one_hot, skewed),
        ];
        for (case, (p, q)) in cases.iter().enumerate() {
            let (single, pair) = statistics(p, q, false);
            assert!(single < LIMIT_5, "case {case}: first token, chi-square {single}");
            assert!(pair < LIMIT_35, "case {case}: first two tokens, chi-square {pair}");
        }
        // The statistic sees a wrong residual wherever there is one to see.
        for (p, q) in [(skewed, even), (skewed, reversed), (even, skewed), (skewed, one_hot)] {
            let (single, pair) = statistics(&p, &q, true);
            assert!(single > 10.0 * LIMIT_5 && pair > 10.0 * LIMIT_35, "a biased residual went unseen: {single} {pair}");
        }
    }

    #[test]
    fn the_lookup_drafter_s_one_hot_leaves_the_target_alone() {
        let p = [0.5, 0.2, 0.15, 0.1, 0.04, 0.01];
        for draft in 0..V as u32 {
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed: 3, ..Sampling::GREEDY }, u64::from(draft));
            let mut counts = vec![0usize; V];
            for _ in 0..DRAWS {
                let verdict = sampled(&[draft], &[DraftDist::OneHot], &[(); 2].map(|()| sampler.uniform()), |_, out| *out = p.to_vec());
                counts[if verdict.accepted == 1 { draft } else { verdict.next } as usize] += 1;
            }
            let chi = chi_square(&counts, &p);
            assert!(chi < LIMIT_5, "draft {draft}: chi-square {chi}");
        }
    }

    /// What comes out at one position, over all draws of the draft and a grid of uniform numbers; `verified` says whether a drawn
    /// draft is verified, else the token comes from the target alone.
    fn output(p: &[f64], q: &[f64], verified: impl Fn(usize) -> f64) -> Vec<f64> {
        const GRID: usize = 400;
        let uniform = |i: usize| (i as f64 + 0.5) / GRID as f64;
        let dist = [DraftDist::Dense(q.to_vec())];
        let mut out = vec![0.0; p.len()];
        for (draft, &mass) in q.iter().enumerate() {
            let share = verified(draft);
            out.iter_mut().zip(p).for_each(|(o, p)| *o += mass * (1.0 - share) * p);
            for (i, j) in (0..GRID).flat_map(|i| (0..GRID).map(move |j| (i, j))) {
                let verdict = sampled(&[draft as u32], &dist, &[uniform(i), uniform(j)], |_, row| *row = p.to_vec());
                let token = if verdict.accepted == 1 { draft } else { verdict.next as usize };
                out[token] += mass * share / (GRID * GRID) as f64;
            }
        }
        out
    }

    /// A window may end where something says so that is known before the draft is drawn, and not where the drawn draft says so.
    #[test]
    fn a_cut_that_looks_at_the_draft_bends_the_distribution() {
        let (p, q) = ([0.5, 0.3, 0.2], [0.2, 0.6, 0.2]);
        let off = |out: Vec<f64>| out.iter().zip(&p).map(|(o, p)| (o - p).abs()).fold(0.0, f64::max);
        for share in [0.0, 0.3, 1.0] {
            assert!(off(output(&p, &q, |_| share)) < 0.005, "share {share}");
        }
        // Only drafts of a probability above .5 are verified: p = .4 (.5, .3, .2) + .6 (.5, .5, 0).
        let bent = output(&p, &q, |draft| f64::from(u8::from(q[draft] > 0.5)));
        for (got, want) in bent.iter().zip([0.5, 0.42, 0.08]) {
            assert!((got - want).abs() < 0.005, "{bent:?}");
        }
    }
}
