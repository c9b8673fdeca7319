//! How a request's rows are cut into steps.

use super::acceptance::Acceptance;
use super::sample::Sample;
use crate::trace::event::UNKNOWN_TOKEN;
use std::ops::Range;

/// How a request's rows are cut into steps. Positions count from the prompt's first token.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Position of the first row.
    pub start: usize,
    /// Length of the prompt.
    pub prompt: usize,
    /// Position behind the last row.
    pub end: usize,
    /// Generated tokens, when known.
    pub generated: Option<usize>,
    /// Accepted and drafted of each window; `None` when rows cannot be told apart.
    pub windows: Option<Vec<(u32, u32)>>,
    /// Why the windows that the engine reported are not used.
    pub doubt: Option<String>,
}

impl Plan {
    /// The plan of a request that has this many rows of routes; `None` when it has none.
    ///
    /// # Errors
    /// A sentence when rows and tokens contradict each other.
    pub fn of(sample: &Sample, rows: Option<usize>) -> Result<Self, String> {
        let generated = sample.output_ids.as_ref().map(Vec::len).or(sample.output_tokens);
        let prompt = sample.prompt_ids.as_ref().map(Vec::len).or(sample.prompt_tokens);
        let ordered = sample.acceptance.as_ref().and_then(Acceptance::steps_in_order);
        let Some(rows) = rows else {
            // Acceptance alone: as many rows as the windows kept.
            let (prompt, windows) = (prompt.unwrap_or(0), ordered.unwrap_or_default().to_vec());
            let kept: usize = windows.iter().map(|(a, _)| *a as usize + 1).sum();
            let end = generated.map_or(prompt + kept, |g| prompt + g.saturating_sub(1));
            return Ok(Self { start: prompt, prompt, end, generated, windows: Some(windows), doubt: None });
        };
        let (prompt, start) = match (prompt, generated) {
            (Some(p), Some(g)) => {
                let all = (p + g).saturating_sub(1);
                let start = all.checked_sub(rows).ok_or_else(|| {
                    format!(
                        "{rows} rows of routes for {} tokens ({p} prompt, {g} generated), {all} are possible: was one of them cut?",
                        p + g
                    )
                })?;
                if start > p {
                    return Err(format!("{rows} rows of routes for {p} prompt and {g} generated tokens, at least {} are needed", all - p));
                }
                (p, start)
            }
            (None, Some(g)) => {
                let p = (rows + 1).checked_sub(g).ok_or_else(|| format!("{rows} rows of routes for {g} generated tokens"))?;
                (p, 0)
            }
            (Some(p), None) if p <= rows => (p, 0),
            (Some(p), None) => return Err(format!("{rows} rows of routes for {p} prompt tokens")),
            (None, None) => return Err("nothing says where the prompt ends: neither token ids nor `usage`; give --prompt-tokens".into()),
        };
        let end = start + rows;
        let generated = generated.or(Some(end + 1 - prompt));
        let mut plan = Self { start, prompt, end, generated, windows: None, doubt: None };
        if let Some(ordered) = ordered {
            let (have, last) = (end - prompt, ordered.last().map_or(0, |(a, _)| *a as usize));
            let kept: usize = ordered.iter().map(|(a, _)| *a as usize + 1).sum();
            if kept >= have && kept - have <= last {
                plan.windows = Some(ordered.to_vec());
            } else {
                plan.doubt = Some(format!("its {} windows keep {kept} rows, {have} generated rows are there", ordered.len()));
            }
        }
        Ok(plan)
    }

    /// Tokens at these positions, as far as they are known.
    pub fn tokens(&self, sample: &Sample, positions: Range<usize>) -> Vec<u32> {
        let of = |position: usize| match position.checked_sub(self.prompt) {
            None => sample.prompt_ids.as_ref().and_then(|ids| ids.get(position)),
            Some(i) => sample.output_ids.as_ref().and_then(|ids| ids.get(i)),
        };
        positions.map(|position| of(position).copied().unwrap_or(UNKNOWN_TOKEN)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(prompt: usize, generated: usize, steps: &[(u32, u32)]) -> Sample {
        let acceptance = Acceptance { ordered: Some(steps.to_vec()), ..Acceptance::default() };
        Sample { prompt_tokens: Some(prompt), output_tokens: Some(generated), acceptance: Some(acceptance), ..Sample::default() }
    }

    #[test]
    fn rows_decide_where_they_begin() {
        // 7 prompt and 15 generated tokens, windows that keep 4 + 1 + 3 + 2 + 4 rows.
        let s = sample(7, 15, &[(3, 3), (0, 3), (2, 3), (1, 3), (3, 3)]);
        let plan = Plan::of(&s, Some(21)).unwrap();
        assert_eq!((plan.start, plan.end, plan.windows.as_ref().map(Vec::len)), (0, 21, Some(5)));
        assert_eq!(Plan::of(&s, Some(18)).unwrap().start, 3);
        assert!(Plan::of(&s, Some(22)).unwrap_err().contains("22 rows of routes for 22 tokens"));
        assert!(Plan::of(&s, Some(13)).unwrap_err().contains("at least 14"));
        // The client has cut the tokens and not the routes.
        assert!(Plan::of(&sample(7, 11, &[]), Some(21)).unwrap_err().contains("21 rows of routes for 18 tokens"));
    }

    #[test]
    fn windows_that_do_not_fit_the_rows_are_not_shifted() {
        // The last window was cut: 1 + 4 of 1 + 4 + 4 rows... and one more than that is not a cut.
        assert_eq!(Plan::of(&sample(5, 7, &[(0, 3), (3, 3), (3, 3)]), Some(11)).unwrap().windows.map(|w| w.len()), Some(3));
        let plan = Plan::of(&sample(5, 6, &[(0, 3), (3, 3), (3, 3)]), Some(10)).unwrap();
        assert!(plan.windows.is_none() && plan.doubt.unwrap().contains("keep 9 rows, 5 generated"));
        // Steps without drafts are not in the arrays: too few rows.
        assert!(Plan::of(&sample(5, 12, &[(3, 3)]), Some(16)).unwrap().windows.is_none());
        assert!(Plan::of(&Sample::default(), Some(3)).unwrap_err().contains("--prompt-tokens"));
    }

    proptest! {
        #[test]
        fn whole_windows_always_fit(prompt in 1usize..20, steps in prop::collection::vec((0u32..5, 0u32..5), 1..9), skipped in 0usize..20) {
            let steps: Vec<(u32, u32)> = steps.into_iter().map(|(a, d)| (a.min(d), d)).collect();
            let kept: usize = steps.iter().map(|(a, _)| *a as usize + 1).sum();
            let skipped = skipped.min(prompt);
            let plan = Plan::of(&sample(prompt, kept + 1, &steps), Some(prompt + kept - skipped)).unwrap();
            prop_assert_eq!(plan.start, skipped);
            prop_assert_eq!(plan.windows, Some(steps));
            prop_assert_eq!(plan.end, prompt + kept);
        }
    }
}
