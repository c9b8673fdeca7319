//! Following requests through the passes of an engine that does not name them.
//!
//! A pass lists its requests in the batch's order. Requests end, and later ones move up, but nobody overtakes; and where a
//! request goes on, its position says. So the requests of one pass are found again in the next by an order-preserving match
//! on positions. When there is more than one such match, the requests in doubt are taken for new ones rather than guessed.

use std::ops::RangeInclusive;

/// So many requests may end between two passes.
const LOOK_AHEAD: usize = 512;

/// Who in the batch before goes on in this pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// For each request of the pass, its index in the batch before; `None` when it was not there or that is in doubt.
    pub before: Vec<Option<usize>>,
    /// Requests of the pass whose match is in doubt.
    pub doubtful: usize,
}

/// Matches the first positions of a pass with where the requests before may go on, both in the batch's order.
pub fn match_batch(expected: &[RangeInclusive<u32>], starts: &[u32]) -> Match {
    let early = greedy(expected, starts);
    let (turned, backwards): (Vec<_>, Vec<_>) = (expected.iter().rev().cloned().collect(), starts.iter().rev().copied().collect());
    let mut late = greedy(&turned, &backwards);
    late.reverse();
    let mut doubtful = 0;
    let before = early.into_iter().zip(late).map(|(early, late)| {
        let late = late.and_then(|at| expected.len().checked_sub(at + 1));
        if early == late {
            return early;
        }
        doubtful += 1;
        None
    });
    let before = before.collect();
    Match { before, doubtful }
}

/// Matches each start with the first expectation that fits, behind the one of the start before. A start that fits nobody
/// leaves the others where they are.
fn greedy(expected: &[RangeInclusive<u32>], starts: &[u32]) -> Vec<Option<usize>> {
    let mut next = 0;
    let find = |start: &u32| {
        let ahead = expected.get(next..(next + LOOK_AHEAD).min(expected.len())).unwrap_or_default();
        let found = ahead.iter().position(|range| range.contains(start)).map(|at| next + at);
        next = found.map_or(next, |at| at + 1);
        found
    };
    starts.iter().map(find).collect()
}

/// Rows of each window of the passes whose positions are given: the largest number that all runs of consecutive positions
/// are multiples of.
///
/// # Errors
/// A sentence, when windows are no chains or nothing says where they end.
pub fn window_rows<'a>(passes: impl Iterator<Item = &'a [u32]>, draft_len: Option<u16>) -> Result<usize, String> {
    let mut common = 0usize;
    for positions in passes {
        let mut run = 0usize;
        for (i, &position) in positions.iter().enumerate() {
            if i > 0 && positions.get(i - 1).is_some_and(|&before| before.checked_add(1) != Some(position)) {
                common = divisor(common, run);
                run = 0;
            }
            run += 1;
        }
        common = divisor(common, run);
    }
    match draft_len.map(|n| usize::from(n) + 1) {
        Some(rows) if common > 0 && common.is_multiple_of(rows) => Ok(rows),
        Some(rows) => Err(format!(
            "--draft-len says windows of {rows} rows, the positions show windows of {common}, or a tree of drafts; only chains are read"
        )),
        None if common >= 2 => Ok(common),
        None => {
            Err("the drafts of a window do not stand at consecutive positions: a tree, of which the recording does not say what was kept; \
                     record with one draft a position (--speculative-eagle-topk 1)"
                .into())
        }
    }
}

fn divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_goes_on_is_found_by_order_and_position() {
        // Two windows of 3 at 5 and 3: they go on at 6..=8 and 4..=6.
        let found = match_batch(&[6..=8, 4..=6], &[7, 4]);
        assert_eq!((found.before, found.doubtful), (vec![Some(0), Some(1)], 0));
        // The first has ended; the one that is left can only be the second.
        assert_eq!(match_batch(&[6..=8, 4..=6], &[4]).before, [Some(1)]);
        // It could be either: nobody is guessed.
        let found = match_batch(&[6..=8, 4..=6], &[6]);
        assert_eq!((found.before, found.doubtful), (vec![None], 1));
        // Somebody new at the end, somebody unknown in the middle.
        assert_eq!(match_batch(&[6..=8], &[6, 100]).before, [Some(0), None]);
        assert_eq!(match_batch(&[6..=8, 50..=52], &[6, 100, 50]).before, [Some(0), None, Some(1)]);
        assert_eq!(match_batch(&[], &[1]).before, [None]);
        assert_eq!(match_batch(&[1..=2], &[]).before, []);
    }

    #[test]
    fn windows_are_cut_where_positions_break() {
        let rows = |passes: &[&[u32]], said| window_rows(passes.iter().copied(), said);
        assert_eq!(rows(&[&[5, 6, 7, 3, 4, 5]], None), Ok(3));
        // Neighbours by chance: another pass shows where the windows end.
        assert_eq!(rows(&[&[5, 6, 7, 8, 9, 10], &[1, 2, 3, 40, 41, 42]], None), Ok(3));
        assert_eq!(rows(&[&[5, 6, 7, 8, 9, 10]], Some(2)), Ok(3));
        assert!(rows(&[&[5, 6, 7, 8]], Some(2)).is_err());
        assert!(rows(&[&[5, 6, 6, 7, 7]], None).unwrap_err().contains("a tree"));
        assert!(rows(&[&[5, 9, 20]], None).is_err());
    }

    proptest! {
        /// Batches that lose some requests and gain others at the end are either matched as they went on, or in doubt.
        #[test]
        fn a_match_is_right_or_in_doubt(
            batch in prop::collection::vec((0u32..400, 0u32..4, any::<bool>()), 0..12),
            new in prop::collection::vec(1000u32..2000, 0..3),
        ) {
            let rows = 4;
            let expected: Vec<_> = batch.iter().map(|(start, ..)| start + 1..=start + rows).collect();
            let (mut starts, mut truth) = (Vec::new(), Vec::new());
            for (i, (start, accepted, stays)) in batch.iter().enumerate() {
                if *stays {
                    starts.push(start + 1 + accepted);
                    truth.push(Some(i));
                }
            }
            starts.extend(&new);
            let found = match_batch(&expected, &starts);
            for (i, before) in found.before.iter().enumerate() {
                if let Some(before) = before {
                    prop_assert_eq!(truth.get(i).copied().flatten(), Some(*before));
                }
            }
            // Nobody has ended: nobody is in doubt.
            if batch.iter().all(|(.., stays)| *stays) {
                prop_assert_eq!(found.doubtful, 0);
            }
        }
    }
}
