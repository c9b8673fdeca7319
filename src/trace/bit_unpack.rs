//! Bit-packed numbers of up to sixteen bits, eight at a time, by vector instructions.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_add_epi16, _mm256_and_si256, _mm256_broadcastsi128_si256,
    _mm256_castsi256_si128, _mm256_loadu_si256, _mm256_max_epu16, _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srlv_epi32, _mm256_storeu_si256,
};

/// Unpacks groups of eight numbers of `width` bits (1 to 16), lowest bit first, and adds `first` to each. Gives how many values of `out`
/// were written and the largest number before the addition. The last groups are left out, since whole vectors are loaded.
///
/// A number lies within four bytes: each of eight 32-bit lanes takes those, shifts the number down and masks it.
#[target_feature(enable = "avx2")]
pub(super) fn eights(packed: &[u8], width: u32, first: u16, out: &mut [u16]) -> (usize, usize) {
    const LOADED: usize = 16;
    if !(1..=16).contains(&width) {
        return (0, 0);
    }
    let width = width as usize;
    // Bytes of each lane, within the sixteen that are loaded: bit 7 * 16 / 8 + 3 = 17 would be beyond, but is never of the number.
    let mut bytes = [0u8; 32];
    let mut shifts = [0u32; 8];
    for lane in 0..8 {
        let bit = lane * width;
        shifts[lane] = (bit % 8) as u32;
        for byte in 0..4 {
            let at = bit / 8 + byte;
            bytes[lane * 4 + byte] = if at < LOADED { at as u8 } else { 0x80 };
        }
    }
    // SAFETY: both arrays have the 32 bytes that are read.
    let (bytes, shifts) =
        unsafe { (_mm256_loadu_si256(bytes.as_ptr().cast::<__m256i>()), _mm256_loadu_si256(shifts.as_ptr().cast::<__m256i>())) };
    let mask = _mm256_set1_epi32((1i32 << width) - 1);
    let first = _mm256_set1_epi16(first.cast_signed());
    let groups = (out.len() / 8).min(packed.len().saturating_sub(LOADED - 1).div_ceil(width));
    let mut largest = _mm256_setzero_si256();
    for group in 0..groups {
        // SAFETY: the group begins at most `packed.len() - 16` bytes in, and `out` has eight values a group.
        unsafe {
            let loaded = _mm256_broadcastsi128_si256(_mm_loadu_si128(packed.as_ptr().add(group * width).cast::<__m128i>()));
            let numbers = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(loaded, bytes), shifts), mask);
            // Both halves pack within themselves: the four numbers of each are brought together.
            let numbers = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(numbers, numbers));
            largest = _mm256_max_epu16(largest, numbers);
            let values = _mm256_castsi256_si128(_mm256_add_epi16(numbers, first));
            _mm_storeu_si128(out.as_mut_ptr().add(group * 8).cast::<__m128i>(), values);
        }
    }
    let mut lanes = [0u16; 16];
    // SAFETY: the array has the 32 bytes that are written.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast::<__m256i>(), largest) };
    (groups * 8, lanes.into_iter().max().map_or(0, usize::from))
}
