//! The inner loops, built for each instruction set and chosen at run time.
//!
//! A dot product is always 16 partial sums, lane `l` over elements `l, l+16, ...`, added up by one fixed
//! tree. Blocking over outputs or rows changes which sums are computed together, never the order inside
//! one, so a row's result has the same bits in a pass of 1 row and of 512. The AVX2 and AVX-512 builds use
//! fused multiply-adds on the same lanes and agree bit for bit with each other; the portable build rounds
//! twice where the processor has no fused form.
//!
//! The bodies use plain loops over registers, not `array::from_fn` or iterators: a closure is a function of
//! its own, built without the instruction set, and every operation in it would become a call.

#![expect(clippy::needless_range_loop, reason = "closures would not be built for the instruction set")]

use super::lanes::{LANES, Lanes, Portable};
use std::array::from_fn;

/// Vectors of columns that [`accumulate`] and [`delta_step`] keep in registers.
const BLOCK: usize = 4;

/// `rows` vectors of `cols` numbers, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub rows: usize,
    pub cols: usize,
}

impl<'a> Rows<'a> {
    /// Vectors of `cols` numbers, one directly after the other.
    pub fn dense(data: &'a [f32], cols: usize) -> Self {
        Self { data, stride: cols, rows: data.len() / cols.max(1), cols }
    }

    #[inline(always)]
    fn row(&self, n: usize) -> &'a [f32] {
        &self.data[n * self.stride..][..self.cols]
    }
}

/// Where the product of output `r` and row `n` goes: `out[r * output + n * row]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    pub output: usize,
    pub row: usize,
}

/// Defines a function that runs `$body` as built for the best instruction set of this machine.
macro_rules! dispatched {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use super::lanes::{Avx2, Avx512};
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512(lanes: Avx512, $($arg: $ty),*) $(-> $ret)? {
                    $body(lanes, $($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2(lanes: Avx2, $($arg: $ty),*) $(-> $ret)? {
                    $body(lanes, $($arg),*)
                }
                if let Some(lanes) = Avx512::detect() {
                    // SAFETY: the token exists only where the processor has every feature the function is built for.
                    return unsafe { avx512(lanes, $($arg),*) };
                }
                if let Some(lanes) = Avx2::detect() {
                    // SAFETY: as above.
                    return unsafe { avx2(lanes, $($arg),*) };
                }
            }
            $body(Portable, $($arg),*)
        }
    };
}

dispatched! {
    /// `out[r, n] = w_r . x_n` for dense `f32` weight rows `w`.
    fn dots_f32(w: Rows<'_>, x: Rows<'_>, out: &mut [f32], steps: Steps) = dots_f32_body
}
dispatched! {
    /// [`dots_f32`] for weight rows stored as BF16, little endian, `x.cols` elements a row.
    fn dots_bf16(w: &[u8], x: Rows<'_>, out: &mut [f32], steps: Steps) = dots_bf16_body
}
dispatched! {
    /// BF16 bytes to `f32`.
    fn decode_bf16(bytes: &[u8], out: &mut [f32]) = decode_bf16_body
}
dispatched! {
    /// `x . y` in the fixed order.
    fn dot(x: &[f32], y: &[f32]) -> f32 = dot_body
}
dispatched! {
    /// Sum of `x` in the fixed order.
    fn sum(x: &[f32]) -> f32 = sum_body
}
dispatched! {
    /// `out += sum_i coefficients[i] * rows_i`, added in order of `i`. `rows.cols` is `out`'s length.
    fn accumulate(coefficients: &[f32], rows: Rows<'_>, out: &mut [f32]) = accumulate_body
}
dispatched! {
    /// One token of the delta rule in one head; see [`DeltaStep`].
    fn delta_step(step: DeltaStep<'_>) = delta_step_body
}

/// One token of the delta rule in one head with state `S[key, value]`:
/// decay the rows, predict `p = S^T k`, write `k (beta (v - p))^T`, read `o = S^T q`, in this order.
/// Value columns do not meet, so a few of them take all steps before the next ones begin.
pub(super) struct DeltaStep<'a> {
    /// `[K, V]`, the state before the token, when it is not `state` itself.
    pub from: Option<&'a [f32]>,
    /// `[K, V]`, the state after the token.
    pub state: &'a mut [f32],
    pub key: &'a [f32],
    pub value: &'a [f32],
    /// `[K]`, factors in (0, 1).
    pub decay: &'a [f32],
    pub beta: f32,
    /// The scaled query `[K]` and the output `[V]`; `None` when only the state is wanted.
    pub read: Option<(&'a [f32], &'a mut [f32])>,
}

/// Weight rows as 16 lanes at a time.
trait Weights: Copy {
    type Chunk;
    /// Whole chunks of row `r`, `cols` elements long.
    fn chunks(&self, r: usize, cols: usize) -> &[Self::Chunk];
    /// The elements after the last whole chunk, zero-filled.
    fn tail(&self, r: usize, cols: usize) -> [f32; LANES];
    fn load<S: Lanes>(lanes: S, chunk: &Self::Chunk) -> S::Vector;
}

impl Weights for Rows<'_> {
    type Chunk = [f32; LANES];
    #[inline(always)]
    fn chunks(&self, r: usize, _cols: usize) -> &[Self::Chunk] {
        self.row(r).as_chunks::<LANES>().0
    }
    #[inline(always)]
    fn tail(&self, r: usize, _cols: usize) -> [f32; LANES] {
        padded(self.row(r).as_chunks::<LANES>().1)
    }
    #[inline(always)]
    fn load<S: Lanes>(lanes: S, chunk: &Self::Chunk) -> S::Vector {
        lanes.load(chunk)
    }
}

#[derive(Clone, Copy)]
struct Bf16Rows<'a>(&'a [u8]);

impl Bf16Rows<'_> {
    #[inline(always)]
    fn row(&self, r: usize, cols: usize) -> &[[u8; 2]] {
        self.0[r * cols * 2..][..cols * 2].as_chunks::<2>().0
    }
}

impl Weights for Bf16Rows<'_> {
    type Chunk = [[u8; 2]; LANES];
    #[inline(always)]
    fn chunks(&self, r: usize, cols: usize) -> &[Self::Chunk] {
        self.row(r, cols).as_chunks::<LANES>().0
    }
    #[inline(always)]
    fn tail(&self, r: usize, cols: usize) -> [f32; LANES] {
        let rest = self.row(r, cols).as_chunks::<LANES>().1;
        from_fn(|l| rest.get(l).map_or(0.0, |b| bf16(*b)))
    }
    #[inline(always)]
    fn load<S: Lanes>(lanes: S, chunk: &Self::Chunk) -> S::Vector {
        lanes.load_bf16(chunk)
    }
}

#[inline(always)]
fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    from_fn(|l| rest.get(l).copied().unwrap_or(0.0))
}

/// R outputs times N rows, starting at output `r` and row `n`.
#[inline(always)]
fn tile<S: Lanes, W: Weights, const R: usize, const N: usize>(lanes: S, w: &W, r: usize, x: Rows<'_>, n: usize) -> [[f32; N]; R] {
    let cols = x.cols;
    let whole = cols / LANES;
    let weights: [&[W::Chunk]; R] = from_fn(|i| &w.chunks(r + i, cols)[..whole]);
    let inputs: [&[[f32; LANES]]; N] = from_fn(|j| &x.row(n + j).as_chunks::<LANES>().0[..whole]);
    let mut acc = [[lanes.splat(0.0); N]; R];
    for c in 0..whole {
        let mut input = [lanes.splat(0.0); N];
        for j in 0..N {
            input[j] = lanes.load(&inputs[j][c]);
        }
        for i in 0..R {
            let weight = W::load(lanes, &weights[i][c]);
            for j in 0..N {
                acc[i][j] = lanes.fma(weight, input[j], acc[i][j]);
            }
        }
    }
    if !cols.is_multiple_of(LANES) {
        for i in 0..R {
            let weight = lanes.load(&w.tail(r + i, cols));
            for j in 0..N {
                let input = lanes.load(&padded(x.row(n + j).as_chunks::<LANES>().1));
                acc[i][j] = lanes.fma(weight, input, acc[i][j]);
            }
        }
    }
    let mut out = [[0.0; N]; R];
    for i in 0..R {
        for j in 0..N {
            out[i][j] = lanes.reduce(acc[i][j]);
        }
    }
    out
}

/// The outputs from `r` on, R at a time, with all rows; returns the first output that is left.
#[inline(always)]
fn strips<S: Lanes, W: Weights, const R: usize>(
    lanes: S,
    w: &W,
    (mut r, end): (usize, usize),
    x: Rows<'_>,
    out: &mut [f32],
    steps: Steps,
) -> usize {
    while r + R <= end {
        let mut n = 0;
        while n + 4 <= x.rows {
            put(tile::<S, W, R, 4>(lanes, w, r, x, n), r, n, out, steps);
            n += 4;
        }
        if n + 2 <= x.rows {
            put(tile::<S, W, R, 2>(lanes, w, r, x, n), r, n, out, steps);
            n += 2;
        }
        if n < x.rows {
            put(tile::<S, W, R, 1>(lanes, w, r, x, n), r, n, out, steps);
        }
        r += R;
    }
    r
}

#[inline(always)]
fn put<const R: usize, const N: usize>(tile: [[f32; N]; R], r: usize, n: usize, out: &mut [f32], steps: Steps) {
    for (i, row) in tile.iter().enumerate() {
        for (j, value) in row.iter().enumerate() {
            out[(r + i) * steps.output + (n + j) * steps.row] = *value;
        }
    }
}

#[inline(always)]
fn dots<S: Lanes, W: Weights>(lanes: S, w: W, outputs: usize, x: Rows<'_>, out: &mut [f32], steps: Steps) {
    let mut r = 0;
    // A single row needs many outputs at once to hide the latency of the additions.
    if x.rows == 1 {
        while r + 8 <= outputs {
            put(tile::<S, W, 8, 1>(lanes, &w, r, x, 0), r, 0, out, steps);
            r += 8;
        }
    }
    r = strips::<S, W, 4>(lanes, &w, (r, outputs), x, out, steps);
    strips::<S, W, 1>(lanes, &w, (r, outputs), x, out, steps);
}

#[inline(always)]
fn dots_f32_body<S: Lanes>(lanes: S, w: Rows<'_>, x: Rows<'_>, out: &mut [f32], steps: Steps) {
    dots(lanes, w, w.rows, x, out, steps);
}

#[inline(always)]
fn dots_bf16_body<S: Lanes>(lanes: S, w: &[u8], x: Rows<'_>, out: &mut [f32], steps: Steps) {
    dots(lanes, Bf16Rows(w), w.len() / (2 * x.cols.max(1)), x, out, steps);
}

#[inline(always)]
fn decode_bf16_body<S: Lanes>(lanes: S, bytes: &[u8], out: &mut [f32]) {
    let (codes, rest) = bytes.as_chunks::<2>().0.as_chunks::<LANES>();
    let (whole, tail) = out.as_chunks_mut::<LANES>();
    for (o, c) in whole.iter_mut().zip(codes) {
        lanes.store(lanes.load_bf16(c), o);
    }
    for (o, b) in tail.iter_mut().zip(rest) {
        *o = bf16(*b);
    }
}

#[inline(always)]
fn dot_body<S: Lanes>(lanes: S, x: &[f32], y: &[f32]) -> f32 {
    let len = x.len().min(y.len());
    let rows = |data| Rows { data, stride: len, rows: 1, cols: len };
    tile::<S, _, 1, 1>(lanes, &rows(x), 0, rows(y), 0)[0][0]
}

#[inline(always)]
fn sum_body<S: Lanes>(lanes: S, x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let one = lanes.splat(1.0);
    let mut acc = lanes.splat(0.0);
    for chunk in chunks {
        acc = lanes.fma(one, lanes.load(chunk), acc);
    }
    if !rest.is_empty() {
        acc = lanes.fma(one, lanes.load(&padded(rest)), acc);
    }
    lanes.reduce(acc)
}

/// `out += sum_i coefficients[i] * rows_i` for B vectors of columns.
#[inline(always)]
fn accumulate_block<S: Lanes, const B: usize>(lanes: S, coefficients: &[f32], rows: Rows<'_>, first: usize, out: &mut [[f32; LANES]]) {
    let mut acc = [lanes.splat(0.0); B];
    for b in 0..B {
        acc[b] = lanes.load(&out[b]);
    }
    for (i, a) in coefficients.iter().enumerate() {
        let a = lanes.splat(*a);
        let row = &rows.data[i * rows.stride + first..].as_chunks::<LANES>().0[..B];
        for b in 0..B {
            acc[b] = lanes.fma(a, lanes.load(&row[b]), acc[b]);
        }
    }
    for b in 0..B {
        lanes.store(acc[b], &mut out[b]);
    }
}

#[inline(always)]
fn accumulate_body<S: Lanes>(lanes: S, coefficients: &[f32], rows: Rows<'_>, out: &mut [f32]) {
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    let mut first = 0;
    for block in whole.chunks_mut(BLOCK) {
        if block.len() == BLOCK {
            accumulate_block::<S, BLOCK>(lanes, coefficients, rows, first, block);
        } else {
            for (b, one) in block.chunks_mut(1).enumerate() {
                accumulate_block::<S, 1>(lanes, coefficients, rows, first + b * LANES, one);
            }
        }
        first += block.len() * LANES;
    }
    if rest.is_empty() {
        return;
    }
    for (i, &a) in coefficients.iter().enumerate() {
        for (o, v) in rest.iter_mut().zip(&rows.data[i * rows.stride + first..]) {
            *o = S::fma_one(a, *v, *o);
        }
    }
}

/// All steps for B vectors of value columns from column `first` on.
#[inline(always)]
fn delta_block<S: Lanes, const B: usize>(lanes: S, step: &mut DeltaStep<'_>, first: usize) {
    let width = step.value.len();
    let keys = step.key.len().min(step.decay.len());
    let mut prediction = [lanes.splat(0.0); B];
    for i in 0..keys {
        let (a, k) = (lanes.splat(step.decay[i]), lanes.splat(step.key[i]));
        let at = i * width + first..i * width + first + B * LANES;
        let source: &[f32] = match step.from {
            Some(from) => from,
            None => step.state,
        };
        let source = source[at.clone()].as_chunks::<LANES>().0;
        let mut old = [lanes.splat(0.0); B];
        for b in 0..B {
            old[b] = lanes.load(&source[b]);
        }
        let row = step.state[at].as_chunks_mut::<LANES>().0;
        for b in 0..B {
            let decayed = lanes.mul(a, old[b]);
            lanes.store(decayed, &mut row[b]);
            prediction[b] = lanes.fma(k, decayed, prediction[b]);
        }
    }
    let value = step.value[first..first + B * LANES].as_chunks::<LANES>().0;
    let beta = lanes.splat(step.beta);
    let mut update = prediction;
    for b in 0..B {
        update[b] = lanes.mul(beta, lanes.sub(lanes.load(&value[b]), prediction[b]));
    }
    let mut out = [lanes.splat(0.0); B];
    for i in 0..keys {
        let k = lanes.splat(step.key[i]);
        let q = match &step.read {
            Some((query, _)) => lanes.splat(query[i]),
            None => lanes.splat(0.0),
        };
        let row = step.state[i * width + first..][..B * LANES].as_chunks_mut::<LANES>().0;
        for b in 0..B {
            let written = lanes.fma(k, update[b], lanes.load(&row[b]));
            lanes.store(written, &mut row[b]);
            out[b] = lanes.fma(q, written, out[b]);
        }
    }
    if let Some((_, output)) = &mut step.read {
        let output = output[first..][..B * LANES].as_chunks_mut::<LANES>().0;
        for b in 0..B {
            lanes.store(out[b], &mut output[b]);
        }
    }
}

#[inline(always)]
fn delta_step_body<S: Lanes>(lanes: S, mut step: DeltaStep<'_>) {
    let width = step.value.len();
    let mut first = 0;
    while first + BLOCK * LANES <= width {
        delta_block::<S, BLOCK>(lanes, &mut step, first);
        first += BLOCK * LANES;
    }
    while first + LANES <= width {
        delta_block::<S, 1>(lanes, &mut step, first);
        first += LANES;
    }
    for j in first..width {
        let mut prediction = 0.0;
        for (i, (a, k)) in step.decay.iter().zip(step.key).enumerate() {
            let decayed = a * step.from.unwrap_or(&*step.state)[i * width + j];
            step.state[i * width + j] = decayed;
            prediction = S::fma_one(*k, decayed, prediction);
        }
        let update = step.beta * (step.value[j] - prediction);
        let mut out = 0.0;
        for (i, k) in step.key.iter().enumerate() {
            let written = S::fma_one(*k, update, step.state[i * width + j]);
            step.state[i * width + j] = written;
            out = S::fma_one(step.read.as_ref().map_or(0.0, |(query, _)| query[i]), written, out);
        }
        if let Some((_, output)) = &mut step.read {
            output[j] = out;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 101) as f32 * 0.713).sin()).collect()
    }

    /// Every kernel on the same numbers, sizes with blocks, single vectors and tails.
    fn all<S: Lanes>(lanes: S) -> Vec<f32> {
        let (cols, outputs, rows) = (83, 13, 7);
        let (w, x) = (numbers(cols * outputs, 1), numbers(cols * rows, 2));
        let bytes: Vec<u8> = w.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        let steps = Steps { output: 1, row: outputs };
        let mut out = vec![0.0; 2 * outputs * rows + 2 * cols];
        let (first, rest) = out.split_at_mut(outputs * rows);
        let (second, rest) = rest.split_at_mut(outputs * rows);
        dots_f32_body(lanes, Rows::dense(&w, cols), Rows::dense(&x, cols), first, steps);
        dots_bf16_body(lanes, &bytes, Rows::dense(&x, cols), second, steps);
        accumulate_body(lanes, &x[..outputs], Rows::dense(&w, cols), &mut rest[..cols]);
        let mut state = numbers(16 * cols, 3);
        let (key, decay, query) = (numbers(16, 4), numbers(16, 5), numbers(16, 6));
        let read = Some((&*query, &mut rest[cols..]));
        let value = &x[..cols];
        delta_step_body(lanes, DeltaStep { from: None, state: &mut state, key: &key, value, decay: &decay, beta: 0.7, read });
        let from = state.clone();
        let mut state = vec![0.0; from.len()];
        let step = DeltaStep { from: Some(&from), state: &mut state, key: &key, value, decay: &decay, beta: 0.7, read: None };
        delta_step_body(lanes, step);
        out.extend(state);
        out.extend([sum_body(lanes, &x), dot_body(lanes, &w, &x)]);
        out
    }

    #[test]
    fn instruction_sets_agree() {
        let want = all(Portable);
        #[cfg(target_arch = "x86_64")]
        {
            use super::super::lanes::{Avx2, Avx512};
            let (avx2, avx512) = (Avx2::detect().map(all), Avx512::detect().map(all));
            for got in [&avx2, &avx512].into_iter().flatten() {
                assert_eq!(got.len(), want.len());
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!((got - want).abs() < 1e-4, "number {i}: {got} {want}");
                }
            }
            if let (Some(avx2), Some(avx512)) = (avx2, avx512) {
                let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(avx2), bits(avx512));
            }
        }
        assert!(want.iter().all(|v| v.is_finite()));
    }
}
