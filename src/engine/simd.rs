//! The inner loops, compiled once per instruction set and chosen at run time.
//!
//! A dot product is always 16 partial sums, lane `l` over elements `l, l+16, ...`, added up by one fixed
//! tree. Blocking over outputs or rows changes which sums are computed together, never the order inside
//! one, so a row's result has the same bits in a pass of 1 row and of 512. The AVX2 and AVX-512 builds use
//! fused multiply-adds on the same lanes and agree bit for bit with each other; the portable build rounds
//! twice where the processor has no fused form.
//!
//! This is the only file of the engine with `unsafe`: calls into functions built for an instruction set
//! whose presence has just been checked.

use std::array::from_fn;

/// Partial sums of a dot product.
pub(super) const LANES: usize = 16;

/// Columns that [`accumulate`] keeps in registers.
const BLOCK: usize = 64;

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

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA || cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
}

/// Defines a function that runs `$body::<FMA>` as built for the best instruction set of this machine.
macro_rules! dispatched {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: every feature that the function is built for was just found on this processor.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body::<false>($($arg),*)
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
    /// `[V]`, overwritten.
    pub scratch: &'a mut [f32],
    /// The scaled query `[K]` and the output `[V]`; `None` when only the state is wanted.
    pub read: Option<(&'a [f32], &'a mut [f32])>,
}

/// Weight rows as 16 lanes at a time.
trait Weights: Copy {
    type Chunk: Copy;
    /// Whole chunks of row `r`, `cols` elements long.
    fn chunks<'a>(&'a self, r: usize, cols: usize) -> &'a [Self::Chunk];
    /// The elements after the last whole chunk, zero-filled.
    fn tail(&self, r: usize, cols: usize) -> [f32; LANES];
    fn decode(chunk: Self::Chunk) -> [f32; LANES];
}

impl Weights for Rows<'_> {
    type Chunk = [f32; LANES];
    #[inline(always)]
    fn chunks<'a>(&'a self, r: usize, _cols: usize) -> &'a [Self::Chunk] {
        self.row(r).as_chunks::<LANES>().0
    }
    #[inline(always)]
    fn tail(&self, r: usize, _cols: usize) -> [f32; LANES] {
        let rest = self.row(r).as_chunks::<LANES>().1;
        from_fn(|l| rest.get(l).copied().unwrap_or(0.0))
    }
    #[inline(always)]
    fn decode(chunk: Self::Chunk) -> [f32; LANES] {
        chunk
    }
}

#[derive(Clone, Copy)]
struct Bf16Rows<'a>(&'a [u8]);

impl Bf16Rows<'_> {
    #[inline(always)]
    fn row(&self, r: usize, cols: usize) -> &[u8] {
        &self.0[r * cols * 2..][..cols * 2]
    }
}

impl Weights for Bf16Rows<'_> {
    type Chunk = [[u8; 2]; LANES];
    #[inline(always)]
    fn chunks<'a>(&'a self, r: usize, cols: usize) -> &'a [Self::Chunk] {
        self.row(r, cols).as_chunks::<2>().0.as_chunks::<LANES>().0
    }
    #[inline(always)]
    fn tail(&self, r: usize, cols: usize) -> [f32; LANES] {
        let rest = self.row(r, cols).as_chunks::<2>().0.as_chunks::<LANES>().1;
        from_fn(|l| rest.get(l).map_or(0.0, |b| bf16(*b)))
    }
    #[inline(always)]
    fn decode(chunk: Self::Chunk) -> [f32; LANES] {
        from_fn(|l| bf16(chunk[l]))
    }
}

#[inline(always)]
fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The fixed tree: halves onto each other.
#[inline(always)]
fn reduce(mut acc: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] += acc[l + width];
        }
        width /= 2;
    }
    acc[0]
}

/// R outputs times N rows, starting at output `r` and row `n`.
#[inline(always)]
fn tile<const FMA: bool, W: Weights, const R: usize, const N: usize>(
    w: &W,
    r: usize,
    x: Rows<'_>,
    n: usize,
    out: &mut [f32],
    steps: Steps,
) {
    let cols = x.cols;
    let whole = cols / LANES;
    let weights: [&[W::Chunk]; R] = from_fn(|i| &w.chunks(r + i, cols)[..whole]);
    let inputs: [&[[f32; LANES]]; N] = from_fn(|i| &x.row(n + i).as_chunks::<LANES>().0[..whole]);
    let mut acc = [[[0.0_f32; LANES]; N]; R];
    for c in 0..whole {
        for i in 0..R {
            let weight = W::decode(weights[i][c]);
            for j in 0..N {
                let input = &inputs[j][c];
                for l in 0..LANES {
                    acc[i][j][l] = fma::<FMA>(weight[l], input[l], acc[i][j][l]);
                }
            }
        }
    }
    if cols % LANES > 0 {
        for i in 0..R {
            let weight = w.tail(r + i, cols);
            for j in 0..N {
                let rest = x.row(n + j).as_chunks::<LANES>().1;
                for l in 0..rest.len().min(LANES) {
                    acc[i][j][l] = fma::<FMA>(weight[l], rest[l], acc[i][j][l]);
                }
            }
        }
    }
    for i in 0..R {
        for j in 0..N {
            out[(r + i) * steps.output + (n + j) * steps.row] = reduce(acc[i][j]);
        }
    }
}

#[inline(always)]
fn dots<const FMA: bool, W: Weights>(w: W, outputs: usize, x: Rows<'_>, out: &mut [f32], steps: Steps) {
    let mut r = 0;
    // A single row needs many outputs at once to hide the latency of the additions.
    if x.rows == 1 {
        while r + 8 <= outputs {
            tile::<FMA, W, 8, 1>(&w, r, x, 0, out, steps);
            r += 8;
        }
    }
    while r + 4 <= outputs {
        let mut n = 0;
        while n + 4 <= x.rows {
            tile::<FMA, W, 4, 4>(&w, r, x, n, out, steps);
            n += 4;
        }
        if n + 2 <= x.rows {
            tile::<FMA, W, 4, 2>(&w, r, x, n, out, steps);
            n += 2;
        }
        if n < x.rows {
            tile::<FMA, W, 4, 1>(&w, r, x, n, out, steps);
        }
        r += 4;
    }
    while r < outputs {
        for n in 0..x.rows {
            tile::<FMA, W, 1, 1>(&w, r, x, n, out, steps);
        }
        r += 1;
    }
}

#[inline(always)]
fn dots_f32_body<const FMA: bool>(w: Rows<'_>, x: Rows<'_>, out: &mut [f32], steps: Steps) {
    dots::<FMA, _>(w, w.rows, x, out, steps);
}

#[inline(always)]
fn dots_bf16_body<const FMA: bool>(w: &[u8], x: Rows<'_>, out: &mut [f32], steps: Steps) {
    dots::<FMA, _>(Bf16Rows(w), w.len() / (2 * x.cols.max(1)), x, out, steps);
}

#[inline(always)]
fn decode_bf16_body<const FMA: bool>(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *o = bf16(*b);
    }
}

#[inline(always)]
fn dot_body<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    let len = x.len().min(y.len());
    let mut out = [0.0];
    let rows = |data| Rows { data, stride: len, rows: 1, cols: len };
    tile::<FMA, _, 1, 1>(&rows(x), 0, rows(y), 0, &mut out, Steps { output: 0, row: 0 });
    out[0]
}

#[inline(always)]
fn sum_body<const FMA: bool>(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut acc = [0.0; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            acc[l] += chunk[l];
        }
    }
    for (a, v) in acc.iter_mut().zip(rest) {
        *a += v;
    }
    reduce(acc)
}

#[inline(always)]
fn accumulate_body<const FMA: bool>(coefficients: &[f32], rows: Rows<'_>, out: &mut [f32]) {
    let mut first = 0;
    let (blocks, rest) = out.as_chunks_mut::<BLOCK>();
    for block in blocks {
        let mut acc = *block;
        for (i, &a) in coefficients.iter().enumerate() {
            if let Some(row) = rows.data[i * rows.stride + first..].first_chunk::<BLOCK>() {
                for l in 0..BLOCK {
                    acc[l] = fma::<FMA>(a, row[l], acc[l]);
                }
            }
        }
        *block = acc;
        first += BLOCK;
    }
    let left = rest.len();
    for (i, &a) in coefficients.iter().enumerate() {
        for (o, v) in rest.iter_mut().zip(&rows.data[i * rows.stride + first..][..left]) {
            *o = fma::<FMA>(a, *v, *o);
        }
    }
}

#[inline(always)]
fn delta_step_body<const FMA: bool>(step: DeltaStep<'_>) {
    let DeltaStep { from, state, key, value, decay, beta, scratch, read } = step;
    let width = value.len();
    let prediction = &mut scratch[..width];
    prediction.fill(0.0);
    match from {
        Some(from) => {
            for (i, (row, old)) in state.chunks_exact_mut(width).zip(from.chunks_exact(width)).enumerate() {
                let (a, k) = (decay[i], key[i]);
                for ((s, o), p) in row.iter_mut().zip(old).zip(prediction.iter_mut()) {
                    *s = a * *o;
                    *p = fma::<FMA>(k, *s, *p);
                }
            }
        }
        None => {
            for (i, row) in state.chunks_exact_mut(width).enumerate() {
                let (a, k) = (decay[i], key[i]);
                for (s, p) in row.iter_mut().zip(prediction.iter_mut()) {
                    *s *= a;
                    *p = fma::<FMA>(k, *s, *p);
                }
            }
        }
    }
    for (p, v) in prediction.iter_mut().zip(value) {
        *p = beta * (*v - *p);
    }
    let update = prediction;
    match read {
        Some((query, out)) => {
            out.fill(0.0);
            for (i, row) in state.chunks_exact_mut(width).enumerate() {
                let (k, q) = (key[i], query[i]);
                for ((s, u), o) in row.iter_mut().zip(update.iter()).zip(out.iter_mut()) {
                    *s = fma::<FMA>(k, *u, *s);
                    *o = fma::<FMA>(q, *s, *o);
                }
            }
        }
        None => {
            for (i, row) in state.chunks_exact_mut(width).enumerate() {
                let k = key[i];
                for (s, u) in row.iter_mut().zip(update.iter()) {
                    *s = fma::<FMA>(k, *u, *s);
                }
            }
        }
    }
}
