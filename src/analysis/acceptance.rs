//! How many drafts were kept, from the step table alone.

use super::stats::Ratios;
use super::steps::{Step, StepTable};
use crate::metric::report::Acceptance;
use std::collections::BTreeMap;

/// Acceptance over all verify steps.
///
/// * tokens per step τ = mean of accepted + 1
/// * emitted per step = mean number of tokens added to the output; less than τ where a request ended inside a window
/// * by position i: windows with accepted >= i / windows that had draft i (rows > i; of trees, a row i deep)
/// * conditional: windows that had draft i and accepted >= i / those that had it and accepted >= i - 1
///
/// Accepted 0, 2, 3, 3 of three drafts: mean 2, τ 3; positions 3/4, 3/4, 2/4; conditional 3/4, 3/3, 2/3; histogram [1, 0, 1, 2].
pub fn acceptance(table: &StepTable, resamples: usize, seed: u64) -> Acceptance {
    acceptance_of(table.steps.iter(), resamples, seed)
}

/// [`acceptance`] over the verify steps among some steps.
pub fn acceptance_of<'a>(steps: impl Iterator<Item = &'a Step>, resamples: usize, seed: u64) -> Acceptance {
    let verify: Vec<&Step> = steps.filter(|s| s.is_verify() && s.rows > 0).collect();
    let Some(most) = verify.iter().map(|s| usize::from(s.drafts)).max() else { return Acceptance::default() };
    // had[i]: windows with draft i; reached[i]: of those, accepted >= i - 1; kept[i]: accepted >= i. Entry 0 is unused.
    // A window counts for every i up to a last one: it is counted there, and the sums run down from the end.
    let (mut histogram, mut had, mut reached, mut kept) =
        (vec![0u64; most + 1], vec![0u64; most + 1], vec![0u64; most + 1], vec![0u64; most + 1]);
    let mut by_request: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for step in &verify {
        let (drafts, accepted) = (usize::from(step.drafts), usize::from(step.accepted));
        histogram[accepted.min(most)] += 1;
        had[drafts] += 1;
        reached[drafts.min(accepted + 1)] += 1;
        kept[drafts.min(accepted)] += 1;
        let (tokens, steps) = by_request.entry(step.request).or_default();
        *tokens += accepted as u64 + 1;
        *steps += 1;
    }
    for counts in [&mut had, &mut reached, &mut kept] {
        for i in (0..most).rev() {
            counts[i] += counts[i + 1];
        }
    }
    let share = |a: &[u64], b: &[u64]| a.iter().zip(b).skip(1).map(|(&a, &b)| (b > 0).then(|| a as f64 / b as f64)).collect();
    let accepted: u64 = verify.iter().map(|s| u64::from(s.accepted)).sum();
    let emitted: u64 = verify.iter().map(|s| u64::from(s.emitted)).sum();
    let mut ratios = Ratios::new(1);
    by_request.into_values().for_each(|pair| ratios.push(std::iter::once(pair)));
    let steps = verify.len() as f64;
    Acceptance {
        accepted_drafts_mean: Some(accepted as f64 / steps),
        tokens_per_step: Some((accepted + verify.len() as u64) as f64 / steps),
        emitted_per_step: Some(emitted as f64 / steps),
        tokens_per_step_ci95: ratios.intervals(resamples, seed).into_iter().next().flatten(),
        by_position: share(&kept, &had),
        windows_by_position: had.iter().skip(1).copied().collect(),
        conditional_by_position: share(&kept, &reached),
        histogram,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::steps::StepRow;
    use crate::trace::Phase;

    fn table(steps: &[(u32, u16, u16)]) -> StepTable {
        let row = |(i, &(request_id, rows, accepted)): (usize, &(u32, u16, u16))| {
            let phase = if rows > 1 { Phase::Verify } else { Phase::Decode };
            StepRow { step_id: i as u32, request_id, phase, rows, accepted, emitted: 1, context_len: 0 }
        };
        StepTable::new(&steps.iter().enumerate().map(row).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn worked_example() {
        let a = acceptance(&table(&[(0, 4, 0), (0, 4, 2), (1, 4, 3), (1, 4, 3), (1, 1, 0)]), 100, 1);
        assert_eq!((a.accepted_drafts_mean, a.tokens_per_step), (Some(2.0), Some(3.0)));
        assert_eq!(a.emitted_per_step, Some(1.0));
        assert_eq!(a.by_position, [Some(0.75), Some(0.75), Some(0.5)]);
        assert_eq!(a.conditional_by_position, [Some(0.75), Some(1.0), Some(2.0 / 3.0)]);
        assert_eq!(a.histogram, [1, 0, 1, 2]);
        assert_eq!(a.tokens_per_step_ci95, Some([2.0, 4.0]));
    }

    #[test]
    fn a_window_counts_only_for_the_drafts_it_had() {
        let a = acceptance(&table(&[(0, 2, 1), (0, 4, 1), (0, 4, 0)]), 100, 1);
        assert_eq!(a.by_position, [Some(2.0 / 3.0), Some(0.0), Some(0.0)]);
        assert_eq!(a.windows_by_position, [3, 2, 2]);
        // Nobody got as far as the third draft: unknown, not 0.
        assert_eq!(a.conditional_by_position, [Some(2.0 / 3.0), Some(0.0), None]);
        assert_eq!(a.tokens_per_step_ci95, None);
    }

    #[test]
    fn agrees_with_a_loop_over_every_draft() {
        let steps: Vec<(u32, u16, u16)> = (0..200u16).map(|i| (u32::from(i % 5), 2 + i * 7 % 13, i * 11 % (2 + i * 7 % 13))).collect();
        let a = acceptance(&table(&steps), 10, 1);
        for i in 1..a.by_position.len() + 1 {
            let of =
                |which: &dyn Fn(usize) -> bool| steps.iter().filter(|s| usize::from(s.1) > i && which(usize::from(s.2))).count() as f64;
            let (had, reached, kept) = (of(&|_| true), of(&|accepted| accepted + 1 >= i), of(&|accepted| accepted >= i));
            assert_eq!(a.by_position[i - 1], Some(kept / had), "draft {i}");
            assert_eq!(a.conditional_by_position[i - 1], (reached > 0.0).then(|| kept / reached), "draft {i}");
        }
        assert_eq!(a.by_position.len(), 13);
    }

    #[test]
    fn many_long_windows_take_no_time() {
        // A loop over every draft of every window would take 13 billion turns.
        let begin = std::time::Instant::now();
        let a = acceptance(&table(&vec![(0, u16::MAX, 3); 200_000]), 10, 1);
        assert_eq!((a.by_position[2], a.by_position[3], a.by_position.len()), (Some(1.0), Some(0.0), 65_534));
        assert!(begin.elapsed() < std::time::Duration::from_secs(5));
    }

    #[test]
    fn nothing_is_known_without_verify_steps() {
        assert_eq!(acceptance(&table(&[(0, 1, 0)]), 100, 1), Acceptance::default());
    }
}
