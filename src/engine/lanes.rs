//! Sixteen `f32` lanes in the registers of an instruction set.
//!
//! A value of [`Avx2`] or [`Avx512`] is the proof that the processor has the instructions: it comes only
//! from `detect`. That makes the operations safe to call; they are fast once inlined into a function that
//! is built for the set. This file and the calls of such functions in [`super::simd`] are the only `unsafe`
//! code of the engine's arithmetic.

/// Lanes of a vector, and partial sums of a dot product.
pub(super) const LANES: usize = 16;

/// Operations on 16 lanes. `fma` rounds once where [`Lanes::fma_one`] does.
pub(super) trait Lanes: Copy {
    type Vector: Copy;
    fn splat(self, x: f32) -> Self::Vector;
    fn load(self, x: &[f32; LANES]) -> Self::Vector;
    /// Little-endian BF16.
    fn load_bf16(self, x: &[[u8; 2]; LANES]) -> Self::Vector;
    fn store(self, x: Self::Vector, to: &mut [f32; LANES]);
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`.
    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The sum of the lanes: 8 + 8, 4 + 4, 2 + 2, 1 + 1, upper half onto lower.
    fn reduce(self, x: Self::Vector) -> f32;
    /// [`Lanes::fma`] of single numbers.
    fn fma_one(a: f32, b: f32, c: f32) -> f32;
}

/// Plain arrays, for every processor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

impl Lanes for Portable {
    type Vector = [f32; LANES];
    #[inline(always)]
    fn splat(self, x: f32) -> Self::Vector {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::Vector {
        *x
    }
    #[inline(always)]
    fn load_bf16(self, x: &[[u8; 2]; LANES]) -> Self::Vector {
        x.map(|b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
    }
    #[inline(always)]
    fn store(self, x: Self::Vector, to: &mut [f32; LANES]) {
        *to = x;
    }
    #[inline(always)]
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|l| a[l] * b[l])
    }
    #[inline(always)]
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|l| a[l] - b[l])
    }
    #[inline(always)]
    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        std::array::from_fn(|l| Self::fma_one(a[l], b[l], c[l]))
    }
    #[inline(always)]
    fn reduce(self, mut x: Self::Vector) -> f32 {
        let mut width = LANES / 2;
        while width > 0 {
            for l in 0..width {
                x[l] += x[l + width];
            }
            width /= 2;
        }
        x[0]
    }
    #[inline(always)]
    fn fma_one(a: f32, b: f32, c: f32) -> f32 {
        // Without the instruction `mul_add` is a slow function call.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Lanes};
    use std::arch::x86_64::*;

    /// Proof of AVX2 and FMA.
    #[derive(Debug, Clone, Copy)]
    pub(in crate::engine) struct Avx2(());

    /// Proof of AVX-512F, AVX2 and FMA.
    #[derive(Debug, Clone, Copy)]
    pub(in crate::engine) struct Avx512(());

    impl Avx2 {
        /// The proof, where this processor has the instructions.
        #[inline]
        pub fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
        }
    }

    impl Avx512 {
        /// The proof, where this processor has the instructions.
        #[inline]
        pub fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx512f") && Avx2::detect().is_some()).then_some(Self(()))
        }
    }

    /// The tree of [`Lanes::reduce`] from 8 lanes on.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn reduce8(x: __m256) -> f32 {
        // SAFETY: as promised by the caller.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    impl Lanes for Avx2 {
        type Vector = [__m256; 2];
        #[inline(always)]
        fn splat(self, x: f32) -> Self::Vector {
            // SAFETY: `self` proves the instructions, here and in all of its functions.
            unsafe { [_mm256_set1_ps(x); 2] }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::Vector {
            // SAFETY: see `splat`; 8 floats are read from each half of an array of 16.
            unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn load_bf16(self, x: &[[u8; 2]; LANES]) -> Self::Vector {
            // SAFETY: see `splat`; 16 bytes are read from each half of an array of 32.
            unsafe {
                let at = x.as_ptr().cast::<__m128i>();
                let low = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)));
                let high = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(1))));
                [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
            }
        }
        #[inline(always)]
        fn store(self, x: Self::Vector, to: &mut [f32; LANES]) {
            // SAFETY: see `splat`; 8 floats are written to each half of an array of 16.
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), x[0]);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), x[1]);
            }
        }
        #[inline(always)]
        fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
            // SAFETY: see `splat`.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
            // SAFETY: see `splat`.
            unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
            // SAFETY: see `splat`.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
        }
        #[inline(always)]
        fn reduce(self, x: Self::Vector) -> f32 {
            // SAFETY: see `splat`.
            unsafe { reduce8(_mm256_add_ps(x[0], x[1])) }
        }
        #[inline(always)]
        fn fma_one(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }

    impl Lanes for Avx512 {
        type Vector = __m512;
        #[inline(always)]
        fn splat(self, x: f32) -> Self::Vector {
            // SAFETY: `self` proves the instructions, here and in all of its functions.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Self::Vector {
            // SAFETY: see `splat`; 16 floats are read from an array of 16.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn load_bf16(self, x: &[[u8; 2]; LANES]) -> Self::Vector {
            // SAFETY: see `splat`; 32 bytes are read from an array of 32.
            unsafe {
                let codes = _mm256_loadu_si256(x.as_ptr().cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(codes)))
            }
        }
        #[inline(always)]
        fn store(self, x: Self::Vector, to: &mut [f32; LANES]) {
            // SAFETY: see `splat`; 16 floats are written to an array of 16.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
        }
        #[inline(always)]
        fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
            // SAFETY: see `splat`.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
            // SAFETY: see `splat`.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
            // SAFETY: see `splat`.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn reduce(self, x: Self::Vector) -> f32 {
            // SAFETY: see `splat`.
            unsafe {
                let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)));
                reduce8(_mm256_add_ps(_mm512_castps512_ps256(x), upper))
            }
        }
        #[inline(always)]
        fn fma_one(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on the same numbers.
    fn all<S: Lanes>(lanes: S) -> (Vec<[u32; LANES]>, u32) {
        let numbers = |seed: u32| -> [f32; LANES] { std::array::from_fn(|l| ((l as u32 * 7 + seed) as f32 * 0.613).sin() * 3.0) };
        let (a, b, c) = (lanes.load(&numbers(1)), lanes.load(&numbers(2)), lanes.load(&numbers(3)));
        let codes: [[u8; 2]; LANES] = std::array::from_fn(|l| [l as u8 * 15, 0x3f + (l as u8 & 1) * 0x80]);
        let vectors = [lanes.mul(a, b), lanes.sub(a, b), lanes.load_bf16(&codes), lanes.splat(2.5)];
        let stored = vectors.map(|v| {
            let mut out = [0.0; LANES];
            lanes.store(v, &mut out);
            out.map(f32::to_bits)
        });
        // Small integers, so that one and two roundings are the same.
        let whole = |seed: usize| lanes.load(&std::array::from_fn(|l| ((l * 5 + seed) % 9) as f32 - 4.0));
        let mut fused = [0.0; LANES];
        lanes.store(lanes.fma(whole(1), whole(2), whole(3)), &mut fused);
        ([&stored[..], &[fused.map(f32::to_bits)]].concat(), lanes.reduce(c).to_bits())
    }

    #[test]
    fn instruction_sets_agree() {
        let want = all(Portable);
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(lanes) = Avx2::detect() {
                assert_eq!(all(lanes), want);
            }
            if let Some(lanes) = Avx512::detect() {
                assert_eq!(all(lanes), want);
            }
        }
        // The tree by hand.
        let c: [f32; LANES] = std::array::from_fn(|l| ((l as u32 * 7 + 3) as f32 * 0.613).sin() * 3.0);
        let eight: [f32; 8] = std::array::from_fn(|l| c[l] + c[l + 8]);
        let four: [f32; 4] = std::array::from_fn(|l| eight[l] + eight[l + 4]);
        assert_eq!(want.1, ((four[0] + four[2]) + (four[1] + four[3])).to_bits());
    }
}
