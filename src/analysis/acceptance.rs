//! How many drafts were kept, from the step table alone.

use super::stats::Ratios;
use super::steps::{Step, StepTable};
use crate::metric::report::Acceptance;

/// Acceptance over all verify steps.
///
/// * tokens per step τ = mean of accepted + 1
/// * emitted per step = mean number of tokens added to the output; less than τ where a request ended inside a window
/// * by position i: windows with accepted >= i / windows that had draft i (rows > i)
/// * conditional: windows that had draft i and accepted >= i / those that had it and accepted >= i - 1
///
/// Accepted 0, 2, 3, 3 of three drafts: mean 2, τ 3; positions 3/4, 3/4, 2/4; conditional 3/4, 3/3, 2/3; histogram [1, 0, 1, 2].
pub fn acceptance(table: &StepTable, resamples: usize, seed: u64) -> Acceptance {
    let verify: Vec<&Step> = table.steps.iter().filter(|s| s.verify && s.rows > 0).collect();
    let Some(most) = verify.iter().map(|s| usize::from(s.rows) - 1).max() else { return Acceptance::default() };
    // had[i]: windows with draft i; reached[i]: of those, accepted >= i - 1; kept[i]: accepted >= i. Entry 0 is unused.
    let (mut histogram, mut had, mut reached, mut kept) =
        (vec![0u64; most + 1], vec![0u64; most + 1], vec![0u64; most + 1], vec![0u64; most + 1]);
    for step in &verify {
        let (drafts, accepted) = (usize::from(step.rows) - 1, usize::from(step.accepted));
        histogram[accepted.min(most)] += 1;
        for i in 1..=drafts {
            had[i] += 1;
            reached[i] += u64::from(accepted + 1 >= i);
            kept[i] += u64::from(accepted >= i);
        }
    }
    let share = |a: &[u64], b: &[u64]| a.iter().zip(b).skip(1).map(|(&a, &b)| (b > 0).then(|| a as f64 / b as f64)).collect();
    let accepted: u64 = verify.iter().map(|s| u64::from(s.accepted)).sum();
    let emitted: u64 = verify.iter().map(|s| u64::from(s.emitted)).sum();
    let mut ratios = Ratios::new(1);
    for request in table.requests.iter().filter(|r| r.verify_steps > 0) {
        ratios.push(std::iter::once((request.accepted + request.verify_steps, request.verify_steps)));
    }
    let steps = verify.len() as f64;
    Acceptance {
        accepted_drafts_mean: Some(accepted as f64 / steps),
        tokens_per_step: Some((accepted + verify.len() as u64) as f64 / steps),
        emitted_per_step: Some(emitted as f64 / steps),
        tokens_per_step_ci95: ratios.intervals(resamples, seed).into_iter().next().flatten(),
        by_position: share(&kept, &had),
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
            StepRow { step_id: i as u32, request_id, phase, rows, accepted, emitted: 1 }
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
        // Nobody got as far as the third draft: unknown, not 0.
        assert_eq!(a.conditional_by_position, [Some(2.0 / 3.0), Some(0.0), None]);
        assert_eq!(a.tokens_per_step_ci95, None);
    }

    #[test]
    fn nothing_is_known_without_verify_steps() {
        assert_eq!(acceptance(&table(&[(0, 1, 0)]), 100, 1), Acceptance::default());
    }
}
