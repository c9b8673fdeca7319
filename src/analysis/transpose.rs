//! k columns of ids to rows of k ids.

/// Writes `columns[c][r]` to `out[r * k + c]`. `out` must hold the columns' length times k values.
pub fn rows_of<T: Copy>(columns: &[&[T]], out: &mut [T]) {
    let k = columns.len();
    for (c, column) in columns.iter().enumerate() {
        for (row, &value) in out.chunks_exact_mut(k.max(1)).zip(*column) {
            row[c] = value;
        }
    }
}

/// [`rows_of`] for ids: eight columns go through vector registers, eight rows at a time.
pub fn id_rows(columns: &[&[u16]], out: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    if let Ok(columns) = <[&[u16]; 8]>::try_from(columns) {
        let rows = columns.iter().map(|c| c.len()).min().unwrap_or(0).min(out.len() / 8);
        let blocks = rows / 8;
        for block in 0..blocks {
            eight_by_eight(&columns, block * 8, &mut out[block * 64..block * 64 + 64]);
        }
        rows_of(&columns.map(|c| &c[blocks * 8..rows]), &mut out[blocks * 64..rows * 8]);
        return;
    }
    rows_of(columns, out);
}

/// Transposes rows `from..from + 8` of eight columns that are at least that long, into 64 values.
#[cfg(target_arch = "x86_64")]
#[inline]
fn eight_by_eight(columns: &[&[u16]; 8], from: usize, out: &mut [u16]) {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi16,
        _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };
    let load = |c: usize| {
        let eight: &[u16] = &columns[c][from..from + 8];
        // SAFETY: the slice has the 16 bytes that are read; SSE2 is part of x86-64.
        unsafe { _mm_loadu_si128(eight.as_ptr().cast::<__m128i>()) }
    };
    let a: [__m128i; 8] = std::array::from_fn(load);
    let (out, _) = out.as_chunks_mut::<8>();
    // SAFETY: SSE2 is part of x86-64; each store writes 16 bytes into an array of 16 bytes.
    unsafe {
        // Pairs of columns, then fours, then all eight.
        let b: [__m128i; 8] = std::array::from_fn(|i| {
            let (x, y) = (a[i / 2 * 2], a[i / 2 * 2 + 1]);
            if i % 2 == 0 { _mm_unpacklo_epi16(x, y) } else { _mm_unpackhi_epi16(x, y) }
        });
        for half in 0..2 {
            let lo = (_mm_unpacklo_epi32(b[half], b[half + 2]), _mm_unpackhi_epi32(b[half], b[half + 2]));
            let hi = (_mm_unpacklo_epi32(b[half + 4], b[half + 6]), _mm_unpackhi_epi32(b[half + 4], b[half + 6]));
            let rows = [
                _mm_unpacklo_epi64(lo.0, hi.0),
                _mm_unpackhi_epi64(lo.0, hi.0),
                _mm_unpacklo_epi64(lo.1, hi.1),
                _mm_unpackhi_epi64(lo.1, hi.1),
            ];
            for (row, out) in rows.into_iter().zip(&mut out[half * 4..half * 4 + 4]) {
                _mm_storeu_si128(out.as_mut_ptr().cast::<__m128i>(), row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_value_finds_its_place(k in prop_oneof![Just(8usize), 1usize..12], rows in 0usize..40) {
            let columns: Vec<Vec<u16>> = (0..k).map(|c| (0..rows).map(|r| (r * 16 + c) as u16).collect()).collect();
            let columns: Vec<&[u16]> = columns.iter().map(Vec::as_slice).collect();
            let expected: Vec<u16> = (0..rows).flat_map(|r| (0..k).map(move |c| (r * 16 + c) as u16)).collect();
            let mut out = vec![u16::MAX; rows * k];
            id_rows(&columns, &mut out);
            prop_assert_eq!(out, expected);
        }
    }
}
