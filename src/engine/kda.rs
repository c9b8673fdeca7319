//! Kimi Delta Attention (ling3.md 3.2) and its rollback.
//!
//! The recurrence runs token by token in prefill too. The chunked form is faster on a long prompt but
//! adds in another order, so its bits would depend on where a prompt is cut; here they must not.
//!
//! A pass reads the committed state and writes another buffer, and notes what went into each row's
//! update (normalised key, value, decay, beta). When all pending rows are kept the buffers change places;
//! when fewer are, the kept ones are replayed on the committed state by the same arithmetic, which gives
//! the bits of a pass that never had the others. A pending row costs `8 P + heads` numbers in each layer.

use super::config::ModelConfig;
use super::matmul::{Place, matmul, matmul_into};
use super::norm::{Damage, check, l2_norm, rms_scale, sigmoid, silu};
use super::scratch::fit;
use super::simd::{self, DeltaStep, Rows};
use super::weights::KdaWeights;
use rayon::prelude::*;

/// State updates (elements times rows) below which one thread does all heads.
const PARALLEL: usize = 1 << 18;

/// The recurrent state of one layer.
#[derive(Debug)]
pub(super) struct KdaState {
    heads: usize,
    dim: usize,
    taps: usize,
    /// `[heads, K, V]` before the pending rows.
    committed: Vec<f32>,
    /// `[heads, K, V]` after the pending rows; meaningless when there are none.
    working: Vec<f32>,
    /// q, k, v before the convolution, `[taps - 1 + pending, 3 P]`, oldest first.
    raw: Vec<f32>,
    /// Of each pending row: normalised key, value and decay, `[pending, P]`, and beta, `[pending, heads]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    decays: Vec<f32>,
    betas: Vec<f32>,
}

/// Intermediate rows of a pass.
#[derive(Debug, Default)]
pub(super) struct KdaScratch {
    forget: Vec<f32>,
    gate: Vec<f32>,
    beta: Vec<f32>,
    query: Vec<f32>,
    read: Vec<f32>,
    mixed: Vec<f32>,
}

impl KdaState {
    /// The state before the first token.
    pub fn new(config: &ModelConfig) -> Self {
        let (heads, dim, taps) = (config.heads, config.head_dim, config.conv_kernel);
        let size = heads * dim * dim;
        Self {
            heads,
            dim,
            taps,
            committed: vec![0.0; size],
            working: vec![0.0; size],
            raw: vec![0.0; (taps - 1) * 3 * heads * dim],
            keys: Vec::new(),
            values: Vec::new(),
            decays: Vec::new(),
            betas: Vec::new(),
        }
    }

    fn width(&self) -> usize {
        self.heads * self.dim
    }

    /// Rows not yet committed.
    fn pending(&self) -> usize {
        self.betas.len() / self.heads
    }

    /// `[heads, K, V]` after the committed rows.
    pub fn state(&self) -> &[f32] {
        &self.committed
    }

    /// q, k, v of the last committed rows before the convolution, `[taps - 1, 3 P]`, oldest first.
    pub fn history(&self) -> &[f32] {
        &self.raw[..(self.taps - 1) * 3 * self.width()]
    }

    /// Runs the rows of `x` (normed, `[rows, H]`) after the pending ones; `out` is `[rows, H]`.
    ///
    /// # Errors
    /// Where a number stopped being finite; the caller truncates.
    pub fn forward(&mut self, w: &KdaWeights, config: &ModelConfig, x: &[f32], out: &mut [f32], s: &mut KdaScratch) -> Result<(), Damage> {
        let rows = x.len() / config.hidden;
        let (heads, dim, width) = (self.heads, self.dim, self.width());
        let before = self.pending();
        let x_rows = Rows::dense(x, config.hidden);
        self.raw.resize((self.taps - 1 + before + rows) * 3 * width, 0.0);
        let fresh = &mut self.raw[(self.taps - 1 + before) * 3 * width..];
        for (i, matrix) in [&w.q, &w.k, &w.v].into_iter().enumerate() {
            matmul_into(matrix, x_rows, fresh, Place { stride: 3 * width, offset: i * width });
        }
        let forget = fit(&mut s.forget, rows * width);
        let gate = fit(&mut s.gate, rows * width);
        let beta = fit(&mut s.beta, rows * heads);
        matmul(&w.f, x, forget);
        matmul(&w.g, x, gate);
        matmul(&w.b, x, beta);

        // Before the state is touched: sigmoids would hide an infinity.
        let damage = [(&*fresh, "q, k, v projections"), (forget, "f_proj output"), (gate, "g_proj output"), (beta, "b_proj output")];
        let damage = damage.iter().find_map(|(x, name)| check(x, name).err());
        if let Some(damage) = damage {
            self.raw.truncate((self.taps - 1 + before) * 3 * width);
            return Err(damage);
        }

        self.betas.extend(beta.iter().map(|b| sigmoid(*b)));
        for part in [&mut self.keys, &mut self.values, &mut self.decays] {
            part.resize((before + rows) * width, 0.0);
        }
        let query = fit(&mut s.query, rows * width);
        let scale = 1.0 / (dim as f32).sqrt();
        for row in 0..rows {
            let window = &self.raw[(before + row) * 3 * width..][..self.taps * 3 * width];
            let at = (before + row) * width..(before + row + 1) * width;
            let q = &mut query[row * width..][..width];
            convolve(window, &w.q_conv, 0, q);
            convolve(window, &w.k_conv, width, &mut self.keys[at.clone()]);
            convolve(window, &w.v_conv, 2 * width, &mut self.values[at.clone()]);
            for (q, k) in q.chunks_exact_mut(dim).zip(self.keys[at.clone()].chunks_exact_mut(dim)) {
                l2_norm(q, scale);
                l2_norm(k, 1.0);
            }
            let forget = &forget[row * width..][..width];
            decay(forget, &w.dt_bias, &w.decay_scale, config.kda_lower_bound, &mut self.decays[at]);
        }

        let read = fit(&mut s.read, heads * rows * dim);
        self.recur(before, rows, Some((query, read)));

        let mixed = fit(&mut s.mixed, rows * width);
        for row in 0..rows {
            for head in 0..heads {
                let o = &read[(head * rows + row) * dim..][..dim];
                let at = row * width + head * dim;
                let scale = rms_scale(o, config.rms_eps);
                for i in 0..dim {
                    mixed[at + i] = o[i] * scale * w.out_norm[i] * sigmoid(gate[at + i]);
                }
            }
        }
        matmul(&w.out, mixed, out);
        Ok(())
    }

    /// Applies pending rows `first..first + rows` to the state, head by head. `read` has the scaled
    /// queries `[rows, P]` and takes the outputs `[heads, rows, V]`; without it only the state moves.
    /// The committed state is read by row 0 and left as it is.
    fn recur(&mut self, first: usize, rows: usize, read: Option<(&[f32], &mut [f32])>) {
        let (heads, dim, width) = (self.heads, self.dim, self.width());
        let (committed, keys, values, decays, betas) = (&self.committed, &self.keys, &self.values, &self.decays, &self.betas);
        let head_rows = |head: usize, state: &mut [f32], mut read: Option<(&[f32], &mut [f32])>| {
            for row in 0..rows {
                let at = (first + row) * width + head * dim;
                simd::delta_step(DeltaStep {
                    from: (first + row == 0).then(|| &committed[head * dim * dim..][..dim * dim]),
                    state,
                    key: &keys[at..at + dim],
                    value: &values[at..at + dim],
                    decay: &decays[at..at + dim],
                    beta: betas[(first + row) * heads + head],
                    read: read.as_mut().map(|(q, o)| (&q[row * width + head * dim..][..dim], &mut o[row * dim..][..dim])),
                });
            }
        };
        let parallel = heads * dim * dim * rows >= PARALLEL && rayon::current_num_threads() > 1;
        let states = &mut self.working;
        match read {
            Some((query, out)) if parallel => states
                .par_chunks_mut(dim * dim)
                .zip(out.par_chunks_mut(rows * dim))
                .enumerate()
                .for_each(|(head, (state, out))| head_rows(head, state, Some((query, out)))),
            Some((query, out)) => {
                let parts = states.chunks_mut(dim * dim).zip(out.chunks_mut(rows * dim));
                for (head, (state, out)) in parts.enumerate() {
                    head_rows(head, state, Some((query, out)));
                }
            }
            None => states
                .par_chunks_mut(dim * dim)
                .enumerate()
                .with_min_len(if parallel { 1 } else { heads })
                .for_each(|(head, state)| head_rows(head, state, None)),
        }
    }

    /// Forgets all pending rows but the first `keep`, which stay pending.
    pub fn truncate(&mut self, keep: usize) {
        let pending = self.pending();
        if keep >= pending {
            return;
        }
        let width = self.width();
        self.betas.truncate(keep * self.heads);
        for part in [&mut self.keys, &mut self.values, &mut self.decays] {
            part.truncate(keep * width);
        }
        self.raw.truncate((self.taps - 1 + keep) * 3 * width);
        if keep > 0 {
            self.recur(0, keep, None);
        }
    }

    /// Makes the first `keep` pending rows part of the committed state and forgets the others.
    pub fn commit(&mut self, keep: usize) {
        self.truncate(keep);
        if self.pending() > 0 {
            std::mem::swap(&mut self.committed, &mut self.working);
        }
        let row = 3 * self.width();
        let kept = self.pending() * row;
        self.raw.copy_within(kept.., 0);
        self.raw.truncate((self.taps - 1) * row);
        for part in [&mut self.betas, &mut self.keys, &mut self.values, &mut self.decays] {
            part.clear();
        }
    }
}

/// SiLU of the causal convolution, one filter of `taps` weights a channel, oldest tap first. `window` is
/// `[taps, 3 P]` with the current token last; the channels begin at `offset`.
fn convolve(window: &[f32], filters: &[f32], offset: usize, out: &mut [f32]) {
    let width = out.len();
    let taps = window.len() / (3 * width).max(1);
    for (c, (o, filter)) in out.iter_mut().zip(filters.chunks_exact(taps)).enumerate() {
        let mut sum = 0.0;
        for (j, f) in filter.iter().enumerate() {
            sum += f * window[j * 3 * width + offset + c];
        }
        *o = silu(sum);
    }
}

/// `exp(bound * sigmoid(exp(A_log) * (f + dt_bias)))`, per key channel: in `(e^bound, 1)`.
fn decay(forget: &[f32], bias: &[f32], scale: &[f32], bound: f32, out: &mut [f32]) {
    let dim = out.len() / scale.len().max(1);
    for (c, ((o, f), b)) in out.iter_mut().zip(forget).zip(bias).enumerate() {
        *o = (bound * sigmoid(scale[c / dim] * (f + b))).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tap_meets_the_current_token() {
        // One channel of q (width 1), taps 4, window oldest first; k and v columns must not leak in.
        let window = [1.0, 90.0, 91.0, 2.0, 92.0, 93.0, 3.0, 94.0, 95.0, 4.0, 96.0, 97.0];
        let mut out = [0.0];
        convolve(&window, &[0.0, 0.0, 0.0, 1.0], 0, &mut out);
        assert_eq!(out[0], silu(4.0));
        convolve(&window, &[1.0, 0.0, 0.0, 0.0], 0, &mut out);
        assert_eq!(out[0], silu(1.0));
        convolve(&window, &[0.0, 1.0, 0.0, 0.0], 2, &mut out);
        assert_eq!(out[0], silu(93.0));
    }

    #[test]
    fn the_gate_stays_between_the_bound_and_one() {
        let forget = [-1e4, -3.0, 0.0, 3.0, 1e4];
        let mut out = [0.0; 5];
        decay(&forget, &[0.5; 5], &[2.0], -5.0, &mut out);
        assert_eq!(out[0], 1.0);
        assert!((out[4] - (-5.0_f32).exp()).abs() < 1e-7);
        assert!(out.windows(2).all(|w| w[0] > w[1]));
        // The bias is added before the multiplication by exp(A_log).
        let want = (-5.0 / (1.0 + (-2.0_f64 * 0.5).exp())).exp();
        assert!((f64::from(out[2]) - want).abs() < 1e-6);
    }

    #[test]
    fn the_recurrence_is_decay_predict_write_read() {
        // Only single columns; a vector and columns; a block of vectors, a vector and columns.
        for dim in [6, 19, 83] {
            check_recurrence(dim);
        }
    }

    fn check_recurrence(dim: usize) {
        let value = |seed: usize, i: usize| ((seed * 31 + i * 17) as f32 * 0.37).sin();
        let mut state = vec![0.0_f32; dim * dim];
        let mut reference = vec![0.0_f64; dim * dim];
        for t in 0..12 {
            let vector = |salt: usize| -> Vec<f32> { (0..dim).map(|i| value(t * 5 + salt, i)).collect() };
            // Keys of length one, as the layer makes them: longer ones let the state grow without bound.
            let (mut k, v, q) = (vector(1), vector(2), vector(3));
            l2_norm(&mut k, 1.0);
            let a: Vec<f32> = vector(4).iter().map(|x| 0.6 + 0.3 * x).collect();
            let beta = 0.3 + 0.05 * t as f32;
            let mut out = vec![0.0; dim];
            simd::delta_step(DeltaStep { from: None, state: &mut state, key: &k, value: &v, decay: &a, beta, read: Some((&q, &mut out)) });
            let f = |x: &Vec<f32>, i: usize| f64::from(x[i]);
            for i in 0..dim {
                for j in 0..dim {
                    reference[i * dim + j] *= f(&a, i);
                }
            }
            for j in 0..dim {
                let predicted: f64 = (0..dim).map(|i| reference[i * dim + j] * f(&k, i)).sum();
                let u = f64::from(beta) * (f(&v, j) - predicted);
                for i in 0..dim {
                    reference[i * dim + j] += f(&k, i) * u;
                }
                let read: f64 = (0..dim).map(|i| reference[i * dim + j] * f(&q, i)).sum();
                assert!((read - f64::from(out[j])).abs() < 1e-5, "token {t} value {j}: {read} {}", out[j]);
            }
        }
    }
}
