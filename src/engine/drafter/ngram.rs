//! Prompt lookup: what followed when the text last ended like this.
//!
//! The longest suffix of prompt and output, up to [`MAX_SUFFIX`] tokens, that occurred before is looked up, and what came
//! after it is proposed. Of equally long matches the latest with a full continuation wins, else the one with the longest.
//! It costs no pass of any model, proposes nothing on new text, and does best where output repeats the prompt.

use super::{Drafter, Drafts, EngineError, RouteTap, Sampler};
use crate::engine::verify::DraftDist;
use crate::trace::{Component, Module};

/// Longest suffix that is looked up.
pub const MAX_SUFFIX: usize = 4;
/// Shortest suffix that is looked up: a single token says too little.
pub const MIN_SUFFIX: usize = 2;

/// The lookup drafter. It keeps no state: the history is all it needs.
#[derive(Debug, Default, Clone, Copy)]
pub struct NgramDrafter;

impl Drafter for NgramDrafter {
    fn reset(&mut self) {}

    fn observe(&mut self, _: &[u32], _: &[f32]) -> Result<(), EngineError> {
        Ok(())
    }

    fn propose(&mut self, history: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError> {
        let tokens = tap.time(Module::Draft, Component::Draft, || lookup(history, limit).to_vec());
        // Drafts were not drawn from anything: q is one-hot, and no probability of them is known.
        let dists = if sampler.is_greedy() { Vec::new() } else { vec![DraftDist::OneHot; tokens.len()] };
        Ok(Drafts { tokens, dists, ..Drafts::default() })
    }
}

/// Up to `limit` tokens that followed an earlier occurrence of the longest suffix of `history`; empty without one.
pub fn lookup(history: &[u32], limit: usize) -> &[u32] {
    let end = history.len();
    if limit == 0 {
        return &[];
    }
    // One scan from the back: the length of the match before each position, cut at MAX_SUFFIX.
    let (mut best, mut best_len, mut best_follow) = (end, MIN_SUFFIX - 1, 0);
    for position in (MIN_SUFFIX..end).rev() {
        let common = history[..position].iter().rev().zip(history.iter().rev()).take(MAX_SUFFIX).take_while(|(a, b)| a == b).count();
        let follow = (end - position).min(limit);
        if common > best_len || (common == best_len && follow > best_follow && best < end) {
            (best, best_len, best_follow) = (position, common, follow);
        }
        if best_len == MAX_SUFFIX && best_follow == limit {
            break;
        }
    }
    &history[best..best + best_follow]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_longest_match_wins_over_the_latest() {
        // Suffix 1 2 3: the early one continues with 7 8 9, the later 2 3 with 5 5.
        assert_eq!(lookup(&[1, 2, 3, 7, 8, 9, 4, 2, 3, 5, 5, 1, 2, 3], 3), [7, 8, 9]);
    }

    #[test]
    fn the_latest_of_equal_matches_wins() {
        assert_eq!(lookup(&[2, 3, 7, 7, 9, 2, 3, 5, 5, 1, 2, 3], 2), [5, 5]);
    }

    #[test]
    fn a_full_continuation_wins_over_a_later_short_one() {
        // All 6: the match next to the end could give one token only.
        assert_eq!(lookup(&[6; 8], 3), [6, 6, 6]);
        assert_eq!(lookup(&[6; 5], 15), [6]);
    }

    #[test]
    fn new_text_proposes_nothing() {
        assert!(lookup(&[1, 2, 3, 4], 3).is_empty());
        assert!(lookup(&[1, 1], 3).is_empty());
        assert!(lookup(&[], 3).is_empty());
        assert!(lookup(&[1, 2, 1, 2, 1, 2], 0).is_empty());
        // One common token is not enough.
        assert!(lookup(&[5, 1, 6, 1], 3).is_empty());
    }

    proptest! {
        #[test]
        fn equals_a_search_by_length(history in prop::collection::vec(0u32..3, 0..40), limit in 1usize..6) {
            let end = history.len();
            let mut want: &[u32] = &[];
            'length: for length in (MIN_SUFFIX..=MAX_SUFFIX).rev() {
                if length >= end { continue; }
                let suffix = &history[end - length..];
                for position in (length..end).rev() {
                    if &history[position - length..position] == suffix {
                        let follow = &history[position..(position + limit).min(end)];
                        if follow.len() > want.len() { want = follow; }
                    }
                }
                if !want.is_empty() { break 'length; }
            }
            prop_assert_eq!(lookup(&history, limit), want);
        }
    }
}
