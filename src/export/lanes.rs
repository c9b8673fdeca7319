//! Spans of time put on as few tracks as need be, so that none overlaps another one of its track.

/// Track of each span, by first fit. Spans are `(begin, end)`, ascending by begin; an end before its begin counts as it.
///
/// A viewer shows slices of one track as nested calls: slices that overlap without nesting are dropped or misplaced.
pub fn assign(spans: &[(i64, i64)]) -> Vec<u32> {
    let mut ends: Vec<i64> = Vec::new();
    let lane_of = |&(begin, end): &(i64, i64)| {
        let end = end.max(begin);
        match ends.iter_mut().zip(0u32..).find(|(free, _)| **free <= begin) {
            Some((free, lane)) => {
                *free = end;
                lane
            }
            None => {
                ends.push(end);
                (ends.len() - 1) as u32
            }
        }
    };
    spans.iter().map(lane_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spans_in_turn_share_a_track() {
        assert_eq!(assign(&[(0, 5), (5, 9), (9, 9), (9, 12)]), [0, 0, 0, 0]);
        assert_eq!(assign(&[(0, 5), (3, 9), (4, 6), (5, 6), (6, 7)]), [0, 1, 2, 0, 0]);
    }

    proptest! {
        #[test]
        fn no_two_spans_of_a_track_overlap(spans in prop::collection::vec((0i64..1000, 0i64..50), 0..100)) {
            let mut spans: Vec<(i64, i64)> = spans.into_iter().map(|(begin, length)| (begin, begin + length)).collect();
            spans.sort_unstable();
            let lanes = assign(&spans);
            for (i, a) in spans.iter().enumerate() {
                for (j, b) in spans.iter().enumerate().skip(i + 1) {
                    prop_assert!(lanes[i] != lanes[j] || a.1 <= b.0);
                }
            }
            let most = (0..1100).map(|t| spans.iter().filter(|s| s.0 <= t && t < s.1.max(s.0 + 1)).count()).max().unwrap_or(0);
            prop_assert!(lanes.iter().max().map_or(0, |&l| l as usize + 1) <= most.max(1));
        }
    }
}
