//! Pairwise overlaps of the rows of one window: the inner loop of the whole analysis.
//!
//! A row's k ids are distinct, so |R(i) ∩ R(j)| is the number of equal pairs of lanes. For k = 8 on a
//! CPU with AVX2, row i is held in all its 8 rotations and compared with two rows j at a time; the lanes of row j that
//! no earlier row has are what it adds to the union. Everywhere else the overlaps are counted by plain loops, which the
//! compiler vectorises for k = 8.

/// Unused lanes that the buffer must have behind the last row, so that two rows can be loaded at once.
pub const PADDING: usize = 8;

/// Windows of more rows than this have no pairwise statistics: their number grows with the square.
pub const MAX_PAIR_ROWS: usize = 64;

/// Number of pairs i < j of `rows` rows.
pub const fn pairs(rows: usize) -> usize {
    rows * rows.saturating_sub(1) / 2
}

/// Place of the pair (i, j), i < j < rows, in the order (0,1), (0,2)...(0,rows-1), (1,2)...
pub const fn pair_index(rows: usize, i: usize, j: usize) -> usize {
    i * (2 * rows - i - 1) / 2 + (j - i - 1)
}

/// Which code counts the overlaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlaps {
    /// Any k, any machine.
    Generic,
    /// k = 8 with the baseline vector instructions.
    Eight,
    /// k = 8 with AVX2. Only [`Overlaps::detect`] makes this value: it is the proof that the CPU has it.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2Token),
}

/// Proof that AVX2, POPCNT and BMI were detected.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2Token(());

impl Overlaps {
    /// The fastest code for rows of k ids on this machine.
    pub fn detect(k: usize) -> Self {
        if k != 8 {
            return Self::Generic;
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt") && is_x86_feature_detected!("bmi1") {
            return Self::Avx2(Avx2Token(()));
        }
        Self::Eight
    }

    /// Writes the overlap of every pair of rows, in the order of [`pair_index`].
    ///
    /// `ids` holds `rows` rows of k ids and at least [`PADDING`] more values of any kind; `out` at least [`pairs`]`(rows)`.
    /// Shorter slices are a bug of the caller: nothing is written then.
    pub fn count(self, ids: &[u16], k: usize, rows: usize, out: &mut [u16]) {
        if k == 0 || ids.len() < rows * k + PADDING || out.len() < pairs(rows) {
            debug_assert!(false, "window of {rows} rows of {k}: {} ids, room for {} pairs", ids.len(), out.len());
            return;
        }
        match self {
            Self::Generic => generic(&ids[..rows * k], k, out),
            Self::Eight => eight(&ids[..rows * 8], out),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => eight(&ids[..rows * 8], out),
        }
    }
}

fn generic(ids: &[u16], k: usize, out: &mut [u16]) {
    let mut out = out.iter_mut();
    for (i, a) in ids.chunks_exact(k).enumerate() {
        for b in ids.chunks_exact(k).skip(i + 1) {
            let equal: u16 = a.iter().map(|x| b.iter().map(|y| u16::from(x == y)).sum::<u16>()).sum();
            if let Some(out) = out.next() {
                *out = equal;
            }
        }
    }
}

fn eight(ids: &[u16], out: &mut [u16]) {
    let (rows, _) = ids.as_chunks::<8>();
    let mut out = out.iter_mut();
    for (i, a) in rows.iter().enumerate() {
        for b in rows.iter().skip(i + 1) {
            // One counter a lane: no horizontal sum until the end.
            let mut lanes = [0u16; 8];
            for &x in a {
                for (lane, &y) in lanes.iter_mut().zip(b) {
                    *lane += u16::from(x == y);
                }
            }
            if let Some(out) = out.next() {
                *out = lanes.iter().sum();
            }
        }
    }
}

/// Adds a window of rows of eight ids to `hist`, `[pairs][9]` counts by overlap in the order of [`pair_index`], and writes
/// to `added` how many ids each row has that no earlier one has. `ids` has [`PADDING`] values behind its `rows` rows.
///
/// Gives false, with nothing counted, where that is no answer: a row that has an id twice, more than [`MAX_PAIR_ROWS`]
/// rows, or slices that are too short.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,popcnt,bmi1")]
#[inline]
pub fn add_window(ids: &[u16], rows: usize, hist: &mut [u64], added: &mut [u64]) -> bool {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_alignr_epi8, _mm_loadu_si128, _mm256_alignr_epi8, _mm256_broadcastsi128_si256, _mm256_cmpeq_epi16,
        _mm256_loadu_si256, _mm256_movemask_epi8, _mm256_or_si256,
    };
    if rows > MAX_PAIR_ROWS || ids.len() < rows * 8 + PADDING || hist.len() < pairs(rows) * 9 || added.len() < rows {
        return false;
    }
    // SAFETY: rows i and i + 1 lie within `ids`, the latter within the padding at worst.
    let two = |i: usize| unsafe { _mm256_loadu_si256(ids.as_ptr().add(i * 8).cast::<__m256i>()) };
    for i in (0..rows).step_by(2) {
        let b = two(i);
        // Each lane against the four behind it, in a circle: all pairs of the row.
        let near =
            _mm256_or_si256(_mm256_cmpeq_epi16(b, _mm256_alignr_epi8::<2>(b, b)), _mm256_cmpeq_epi16(b, _mm256_alignr_epi8::<4>(b, b)));
        let far =
            _mm256_or_si256(_mm256_cmpeq_epi16(b, _mm256_alignr_epi8::<6>(b, b)), _mm256_cmpeq_epi16(b, _mm256_alignr_epi8::<8>(b, b)));
        let twice = _mm256_movemask_epi8(_mm256_or_si256(near, far)).cast_unsigned();
        if twice & if i + 1 < rows { u32::MAX } else { 0xffff } != 0 {
            return false;
        }
    }
    // Two mask bits for each lane that an earlier row has.
    let mut seen = [0u32; MAX_PAIR_ROWS + 1];
    let mut hist = hist.chunks_exact_mut(9);
    let mut count = |mask: u32| {
        if let Some(count) = hist.next().and_then(|h| h.get_mut((mask.count_ones() / 2) as usize)) {
            *count += 1;
        }
    };
    for i in 0..rows {
        added[i] = u64::from(8 - seen[i].count_ones() / 2);
        // SAFETY: row i lies within `ids`.
        let a = unsafe { _mm_loadu_si128(ids.as_ptr().add(i * 8).cast::<__m128i>()) };
        let rotations = [
            _mm256_broadcastsi128_si256(a),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<2>(a, a)),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<4>(a, a)),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<6>(a, a)),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<8>(a, a)),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<10>(a, a)),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<12>(a, a)),
            _mm256_broadcastsi128_si256(_mm_alignr_epi8::<14>(a, a)),
        ];
        for j in (i + 1..rows).step_by(2) {
            let b = two(j);
            let mut any = _mm256_cmpeq_epi16(rotations[0], b);
            for rotation in &rotations[1..] {
                any = _mm256_or_si256(any, _mm256_cmpeq_epi16(*rotation, b));
            }
            // Row j in the low half, row j + 1 in the high half.
            let mask = _mm256_movemask_epi8(any).cast_unsigned();
            seen[j] |= mask & 0xffff;
            count(mask & 0xffff);
            if j + 1 < rows {
                seen[j + 1] |= mask >> 16;
                count(mask >> 16);
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Windows of distinct ids a row, from few enough experts that overlaps are common.
    fn windows() -> impl Strategy<Value = (usize, Vec<Vec<u16>>)> {
        (prop_oneof![3 => Just(8usize), 1 => 1usize..14], 0usize..18).prop_flat_map(|(k, rows)| {
            let experts: Vec<u16> = (0..40u16).map(|e| e * 1601).collect();
            let row = proptest::sample::subsequence(experts, k).prop_shuffle();
            (Just(k), prop::collection::vec(row, rows))
        })
    }

    proptest! {
        #[test]
        fn every_path_agrees_with_tree_sets((k, rows) in windows(), filler in any::<u16>()) {
            let n = rows.len();
            let mut ids: Vec<u16> = rows.concat();
            // What lies behind the window must not count, even when it equals a row of it.
            ids.extend(rows.first().into_iter().flatten().copied().chain(std::iter::repeat(filler)).take(PADDING));
            let sets: Vec<BTreeSet<u16>> = rows.iter().map(|r| r.iter().copied().collect()).collect();
            let mut expected = vec![0; pairs(n)];
            for i in 0..n {
                for j in i + 1..n {
                    expected[pair_index(n, i, j)] = sets[i].intersection(&sets[j]).count() as u16;
                }
            }
            let mut paths = vec![Overlaps::Generic];
            if k == 8 {
                paths.push(Overlaps::Eight);
            }
            for path in paths {
                let mut out = vec![u16::MAX; pairs(n) + 1];
                path.count(&ids, k, n, &mut out);
                prop_assert_eq!(&out[..pairs(n)], &expected[..], "{:?}", path);
                prop_assert_eq!(out[pairs(n)], u16::MAX, "wrote behind the last pair");
            }
            if let Some(counted) = by_vectors(&ids, k, n) {
                let (hist, added) = counted.expect("rows of distinct ids");
                for (pair, hist) in hist.chunks(9).enumerate() {
                    let want: Vec<u64> = (0..9).map(|o| u64::from(o == usize::from(expected[pair]))).collect();
                    prop_assert_eq!(hist, &want[..]);
                }
                let mut union = BTreeSet::new();
                let want: Vec<u64> = sets.iter().map(|set| set.iter().filter(|&&id| union.insert(id)).count() as u64).collect();
                prop_assert_eq!(added, want);
            }
        }

        #[test]
        fn a_row_with_an_id_twice_is_noticed(rows in 1usize..9, row in 0usize..8, a in 0usize..8, b in 1usize..8) {
            let mut ids: Vec<u16> = (0..rows as u16 * 8).collect();
            // Behind the window, equal ids do not matter.
            ids.extend([7; PADDING]);
            if let Some(counted) = by_vectors(&ids, 8, rows) {
                prop_assert!(counted.is_some());
                let row = row % rows * 8;
                ids[row + (a + b) % 8] = ids[row + a];
                prop_assert_eq!(by_vectors(&ids, 8, rows), Some(None));
            }
        }
    }

    /// Histograms and added ids by [`add_window`], `None` where it gives none; nothing on a machine without its instructions.
    fn by_vectors(ids: &[u16], k: usize, rows: usize) -> Option<Option<(Vec<u64>, Vec<u64>)>> {
        #[cfg(target_arch = "x86_64")]
        if let Overlaps::Avx2(_) = Overlaps::detect(k) {
            let (mut hist, mut added) = (vec![0; pairs(rows) * 9], vec![0; rows]);
            // SAFETY: the value is the proof that the CPU has the features.
            let known = unsafe { add_window(ids, rows, &mut hist, &mut added) };
            assert!(known || hist.iter().all(|&n| n == 0), "counted before it knew");
            return Some(known.then_some((hist, added)));
        }
        None
    }

    #[test]
    fn two_rows_that_share_three() {
        let ids: Vec<u16> = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 9, 10, 11, 1, 12, 13, 3], [0; 8]].concat();
        let mut out = [0; 1];
        Overlaps::Eight.count(&ids, 8, 2, &mut out);
        assert_eq!(out, [3]);
    }
}
