//! The matrix product `Y = X W^T` over the rows of a pass.
//!
//! Each weight row is decoded once and meets all rows of the pass while it is in the cache, so a pass
//! reads every weight byte once. The bits of a row's result do not depend on the other rows, on the block
//! sizes here or on the number of threads (see [`super::simd`]). No matrix library promises that.

use super::matrix::Matrix;
use super::simd::{self, Rows, Steps};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// Multiplications below which threads cost more than they bring.
const PARALLEL: usize = 1 << 22;
/// Decoded weights kept at a time: 32 KiB, what a first-level cache holds.
const DECODED: usize = 8 * 1024;
/// Rows up to which BF16 is decoded in registers, for each group of rows anew.
const IN_REGISTERS: usize = 4;

thread_local! {
    static DECODE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static TRANSPOSED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Where a product's rows go: row `n` at `out[n * stride + offset..]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub stride: usize,
    pub offset: usize,
}

/// `out[n, W.rows] = x[n, W.cols] W^T`, both dense.
///
/// # Panics
/// When `out` is shorter than the product.
pub fn matmul(w: &Matrix, x: &[f32], out: &mut [f32]) {
    let place = Place { stride: w.rows(), offset: 0 };
    matmul_into(w, Rows::dense(x, w.cols()), out, place);
}

/// [`matmul`] with strided rows in and out.
pub(super) fn matmul_into(w: &Matrix, x: Rows<'_>, out: &mut [f32], place: Place) {
    let outputs = w.rows();
    if x.rows == 0 || outputs == 0 {
        return;
    }
    if outputs * w.cols() * x.rows < PARALLEL || rayon::current_num_threads() == 1 {
        outputs_of(w, 0..outputs, x, &mut out[place.offset..], Steps { output: 1, row: place.stride });
        return;
    }
    let each = outputs.div_ceil(rayon::current_num_threads() * 4).next_multiple_of(8);
    if x.rows == 1 {
        out[place.offset..][..outputs].par_chunks_mut(each).enumerate().for_each(|(i, part)| {
            let first = i * each;
            outputs_of(w, first..first + part.len(), x, part, Steps { output: 1, row: 0 });
        });
        return;
    }
    // Threads own outputs, not rows: they write a transposed product, which is turned at the end.
    let mut transposed = TRANSPOSED.take();
    transposed.resize(outputs * x.rows, 0.0);
    transposed.par_chunks_mut(each * x.rows).enumerate().for_each(|(i, part)| {
        let first = i * each;
        outputs_of(w, first..first + part.len() / x.rows, x, part, Steps { output: x.rows, row: 1 });
    });
    for n in 0..x.rows {
        let row = &mut out[n * place.stride + place.offset..][..outputs];
        for (o, t) in row.iter_mut().zip(transposed.chunks_exact(x.rows)) {
            *o = t[n];
        }
    }
    TRANSPOSED.set(transposed);
}

/// Outputs `range` of `W`, on this thread. `out` begins with the first of them.
pub(super) fn outputs_of(w: &Matrix, range: Range<usize>, x: Rows<'_>, out: &mut [f32], steps: Steps) {
    if x.rows <= IN_REGISTERS
        && let Some(bytes) = w.bf16_rows(range.clone())
    {
        simd::dots_bf16(bytes, x, out, steps);
        return;
    }
    decoded_blocks(w, range.clone(), |first, block| {
        simd::dots_f32(block, x, &mut out[(first - range.start) * steps.output..], steps);
    });
}

/// Decodes rows `range` of `W` a block at a time and shows each block with the number of its first row.
pub(super) fn decoded_blocks(w: &Matrix, range: Range<usize>, mut each: impl FnMut(usize, Rows<'_>)) {
    let cols = w.cols();
    let rows = (DECODED / cols.max(1)).clamp(4, 64);
    let mut buffer = DECODE.take();
    if buffer.len() < rows * cols {
        buffer.resize(rows * cols, 0.0);
    }
    let mut first = range.start;
    while first < range.end {
        let count = rows.min(range.end - first);
        let block = &mut buffer[..count * cols];
        if let Some(bytes) = w.bf16_rows(first..first + count) {
            simd::decode_bf16(bytes, block);
        } else {
            for (i, row) in block.chunks_exact_mut(cols).enumerate() {
                w.decode_row(first + i, row);
            }
        }
        each(first, Rows { data: block, stride: cols, rows: count, cols });
        first += count;
    }
    DECODE.set(buffer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::matrix::{MatrixFormat, ScaleFormat, TensorBytes};
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use std::sync::Arc;

    const FORMATS: [&str; 6] = ["f32", "bf16", "f16", "fp8", "mxfp4", "int4"];

    fn random_bytes(rng: &mut ChaCha8Rng, count: usize, mut each: impl FnMut(u8) -> u8) -> TensorBytes {
        let bytes: Vec<u8> = (0..count).map(|_| each(rng.random())).collect();
        TensorBytes::new(Arc::new(bytes), 0..count).unwrap()
    }

    fn floats(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    /// A matrix of random codes. `cols` is a multiple of 32 for the formats with groups.
    fn matrix(rng: &mut ChaCha8Rng, name: &str, rows: usize, cols: usize) -> Matrix {
        let values = floats(rng, rows * cols);
        let stored = |bytes: Vec<u8>| {
            let count = bytes.len();
            TensorBytes::new(Arc::new(bytes), 0..count).unwrap()
        };
        let (data, format) = match name {
            "f32" => return Matrix::from_f32(rows, cols, &values).unwrap(),
            "bf16" => (stored(values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()), MatrixFormat::Bf16),
            "f16" => (stored(values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()), MatrixFormat::F16),
            "fp8" => {
                let scales = random_bytes(rng, rows.div_ceil(16) * cols.div_ceil(16), |b| 120 + b % 4);
                // Exponents below the one that holds NaN.
                let codes = random_bytes(rng, rows * cols, |b| b & 0xbf);
                (codes, MatrixFormat::Fp8 { scales, scale_format: ScaleFormat::E8m0, block: [16, 16] })
            }
            "mxfp4" => {
                let scales = random_bytes(rng, rows * cols / 32, |b| 122 + b % 4);
                (random_bytes(rng, rows * cols / 2, |b| b), MatrixFormat::Mxfp4 { scales })
            }
            _ => {
                let scales = stored(floats(rng, rows * cols / 32).iter().flat_map(|v| v.to_le_bytes()).collect());
                let codes = random_bytes(rng, rows * cols / 2, |b| b);
                (codes, MatrixFormat::Int4 { scales, scale_format: ScaleFormat::F32, group: 32 })
            }
        };
        Matrix::new(rows, cols, data, format).unwrap()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    fn alone(w: &Matrix, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; w.rows()];
        outputs_of(w, 0..w.rows(), Rows::dense(x, w.cols()), &mut out, Steps { output: 1, row: 0 });
        out
    }

    fn compare_with_single_rows(name: &str, w: &Matrix, x: &[f32]) {
        let (rows, cols) = (w.rows(), w.cols());
        let mut out = vec![0.0; x.len() / cols * rows];
        matmul(w, x, &mut out);
        let mut weight = vec![0.0; cols];
        for (x, out) in x.chunks(cols).zip(out.chunks(rows)) {
            assert_eq!(bits(out), bits(&alone(w, x)), "{name} {rows}x{cols}: a row depends on its company");
            for (r, value) in out.iter().enumerate() {
                w.decode_row(r, &mut weight);
                let products = || weight.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b));
                let (want, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                assert!((f64::from(*value) - want).abs() <= 1e-6 * size + 1e-9, "{name} output {r}: {value} {want}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn a_row_has_the_same_bits_alone_and_in_company(seed: u64, rows in 1usize..70, groups in 1usize..6, odd in 0usize..32, n in 1usize..18) {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            for name in FORMATS {
                let cols = if matches!(name, "mxfp4" | "int4") { groups * 32 } else { groups * 32 - odd };
                let w = matrix(&mut rng, name, rows, cols);
                let x = floats(&mut rng, n * cols);
                compare_with_single_rows(name, &w, &x);
            }
        }
    }

    #[test]
    fn threads_do_not_change_bits() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for name in FORMATS {
            // Enough work for threads with one row and with several.
            let w = matrix(&mut rng, name, PARALLEL / 512 + 13, 512);
            let x = floats(&mut rng, 5 * 512);
            let (mut one, mut many) = (vec![0.0; w.rows()], vec![0.0; 5 * w.rows()]);
            pool.install(|| {
                matmul(&w, &x[..512], &mut one);
                matmul(&w, &x, &mut many);
            });
            assert_eq!(bits(&one), bits(&alone(&w, &x[..512])), "{name}");
            for (x, out) in x.chunks(512).zip(many.chunks(w.rows())) {
                assert_eq!(bits(out), bits(&alone(&w, x)), "{name}");
            }
        }
    }

    #[test]
    fn strided_rows_leave_their_neighbours_alone() {
        let mut rng = ChaCha8Rng::seed_from_u64(8);
        let w = matrix(&mut rng, "bf16", 5, 32);
        let x = floats(&mut rng, 3 * 32);
        let mut out = vec![9.0; 3 * 8];
        matmul_into(&w, Rows::dense(&x, 32), &mut out, Place { stride: 8, offset: 2 });
        for (n, row) in out.chunks(8).enumerate() {
            assert_eq!(bits(&row[2..7]), bits(&alone(&w, &x[n * 32..][..32])));
            assert_eq!([row[0], row[1], row[7]], [9.0; 3]);
        }
    }
}
