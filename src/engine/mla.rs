//! Gated multi-head latent attention (ling3.md 3.3), always in the absorbed form.
//!
//! The cache keeps one row per token: the latent after its norm and the rotated key, shared by all
//! heads. Queries are taken through the key half of `kv_b` into the latent space, and the weighted latents
//! come back through its value half. Prefill takes the same way: expanding keys and values would save work
//! there but add in another order, and a row's bits must not depend on the pass it is in.

use super::config::{MlaGate, ModelConfig};
use super::matmul::{Place, decoded_blocks, matmul, matmul_into, outputs_of};
use super::norm::{Damage, check, rms_norm, rms_norm_rows, sigmoid};
use super::rope::Rope;
use super::scratch::fit;
use super::simd::{self, Rows, Steps};
use super::weights::{MlaQuery, MlaWeights};
use rayon::prelude::*;

/// Multiplications below which one thread does all heads.
const PARALLEL: usize = 1 << 22;

/// The cache of one layer: `[tokens, latent + rope]`.
#[derive(Debug)]
pub(super) struct MlaCache {
    latent: usize,
    rope: usize,
    rows: Vec<f32>,
}

/// Intermediate rows of a pass.
#[derive(Debug, Default)]
pub(super) struct MlaScratch {
    low: Vec<f32>,
    low_normed: Vec<f32>,
    query: Vec<f32>,
    compressed: Vec<f32>,
    gate: Vec<f32>,
    absorbed: Vec<f32>,
    context: Vec<f32>,
    scores: Vec<f32>,
    values: Vec<f32>,
    mixed: Vec<f32>,
}

/// What is the same for all heads of a pass.
struct Heads<'a> {
    w: &'a MlaWeights,
    config: &'a ModelConfig,
    cache: &'a MlaCache,
    rope: &'a Rope,
    query: &'a [f32],
    first: usize,
}

/// One head's buffers: absorbed queries `[rows, latent + rope]`, contexts `[rows, latent]`,
/// scores `[tokens]`, values `[rows, v]`.
struct HeadBuffers<'a> {
    absorbed: &'a mut [f32],
    context: &'a mut [f32],
    scores: &'a mut [f32],
    values: &'a mut [f32],
}

impl MlaCache {
    /// An empty cache.
    pub fn new(config: &ModelConfig) -> Self {
        Self { latent: config.kv_lora_rank, rope: config.qk_rope_head_dim, rows: Vec::new() }
    }

    fn width(&self) -> usize {
        self.latent + self.rope
    }

    /// The rows, `[tokens, latent + rope]`, pending ones included.
    pub fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// Keeps the first `tokens` rows.
    pub fn truncate(&mut self, tokens: usize) {
        self.rows.truncate(tokens * self.width());
    }

    /// Runs the rows of `x` (normed, `[rows, H]`), which are the tokens after the cached ones; `out` is
    /// `[rows, H]`. `rope` holds their angles.
    ///
    /// # Errors
    /// Where a number stopped being finite; the caller truncates.
    pub fn forward(
        &mut self,
        w: &MlaWeights,
        config: &ModelConfig,
        rope: &Rope,
        x: &[f32],
        out: &mut [f32],
        s: &mut MlaScratch,
    ) -> Result<(), Damage> {
        let rows = x.len() / config.hidden;
        let first = self.rows.len() / self.width();
        let (heads, v) = (config.heads, config.v_head_dim);
        let query = fit(&mut s.query, rows * heads * config.qk_head_dim());
        match &w.query {
            MlaQuery::Full(q) => matmul(q, x, query),
            MlaQuery::LowRank { a, norm, b } => {
                let low = fit(&mut s.low, rows * a.rows());
                let normed = fit(&mut s.low_normed, rows * a.rows());
                matmul(a, x, low);
                rms_norm_rows(low, norm, config.rms_eps, normed);
                matmul(b, normed, query);
            }
        }
        let compressed = fit(&mut s.compressed, rows * self.width());
        matmul_into(&w.kv_a, Rows::dense(x, config.hidden), compressed, Place { stride: self.width(), offset: 0 });
        // A key of -inf would only lose its weight in the softmax.
        check(compressed, "kv_a_proj_with_mqa output")?;
        check(query, "query")?;
        let begin = self.rows.len();
        self.rows.resize(begin + rows * self.width(), 0.0);
        let fresh = &mut self.rows[begin..];
        let width = self.latent + self.rope;
        for (row, (new, c)) in fresh.chunks_exact_mut(width).zip(compressed.chunks_exact(width)).enumerate() {
            let (latent, key) = new.split_at_mut(self.latent);
            rms_norm(&c[..self.latent], &w.kv_norm, config.rms_eps, latent);
            key.copy_from_slice(&c[self.latent..]);
            rope.rotate(row, key);
        }

        let tokens = first + rows;
        let absorbed = fit(&mut s.absorbed, heads * rows * width);
        let context = fit(&mut s.context, heads * rows * self.latent);
        let scores = fit(&mut s.scores, heads * tokens);
        let values = fit(&mut s.values, heads * rows * v);
        let all = Heads { w, config, cache: self, rope, query, first };
        let parts = absorbed.par_chunks_mut(rows * width).zip(context.par_chunks_mut(rows * self.latent));
        let parts = parts.zip(scores.par_chunks_mut(tokens).zip(values.par_chunks_mut(rows * v)));
        let work = heads * rows * (self.latent * (config.qk_nope_head_dim + v) + tokens * (width + self.latent));
        if work >= PARALLEL && rayon::current_num_threads() > 1 {
            parts.enumerate().for_each(|(head, ((absorbed, context), (scores, values)))| {
                all.attend(head, HeadBuffers { absorbed, context, scores, values });
            });
        } else {
            let parts = absorbed.chunks_mut(rows * width).zip(context.chunks_mut(rows * self.latent));
            let parts = parts.zip(scores.chunks_mut(tokens).zip(values.chunks_mut(rows * v)));
            for (head, ((absorbed, context), (scores, values))) in parts.enumerate() {
                all.attend(head, HeadBuffers { absorbed, context, scores, values });
            }
        }

        let gate = fit(&mut s.gate, rows * w.gate.rows());
        matmul(&w.gate, x, gate);
        check(gate, "g_proj output")?;
        let mixed = fit(&mut s.mixed, rows * heads * v);
        for row in 0..rows {
            for head in 0..heads {
                let from = &values[(head * rows + row) * v..][..v];
                let to = &mut mixed[(row * heads + head) * v..][..v];
                match config.mla_gate {
                    MlaGate::HeadWise => {
                        let g = sigmoid(gate[row * heads + head]);
                        to.iter_mut().zip(from).for_each(|(t, f)| *t = f * g);
                    }
                    MlaGate::ElementWise => {
                        let gates = &gate[(row * heads + head) * v..][..v];
                        to.iter_mut().zip(from).zip(gates).for_each(|((t, f), g)| *t = f * sigmoid(*g));
                    }
                }
            }
        }
        matmul(&w.out, mixed, out);
        Ok(())
    }
}

impl Heads<'_> {
    /// All rows of one head.
    fn attend(&self, head: usize, b: HeadBuffers<'_>) {
        let config = self.config;
        let (nope, v) = (config.qk_nope_head_dim, config.v_head_dim);
        let (latent, width) = (self.cache.latent, self.cache.width());
        let size = config.qk_head_dim();
        let scale = 1.0 / (size as f32).sqrt();
        let query = |row: usize| &self.query[(row * config.heads + head) * size..][..size];
        for (row, absorbed) in b.absorbed.chunks_exact_mut(width).enumerate() {
            let (low, rotated) = absorbed.split_at_mut(latent);
            low.fill(0.0);
            rotated.copy_from_slice(&query(row)[nope..]);
            self.rope.rotate(row, rotated);
        }
        let keys = head * (nope + v);
        decoded_blocks(&self.w.kv_b, keys..keys + nope, |first, block| {
            for (row, absorbed) in b.absorbed.chunks_exact_mut(width).enumerate() {
                let from = first - keys;
                simd::accumulate(&query(row)[from..from + block.rows], block, &mut absorbed[..latent]);
            }
        });
        for (row, (absorbed, context)) in b.absorbed.chunks_exact(width).zip(b.context.chunks_exact_mut(latent)).enumerate() {
            let tokens = self.first + row + 1;
            let scores = &mut b.scores[..tokens];
            let cached = Rows { data: &self.cache.rows, stride: width, rows: tokens, cols: width };
            simd::dots_f32(cached, Rows::dense(absorbed, width), scores, Steps { output: 1, row: 0 });
            softmax(scores, scale);
            context.fill(0.0);
            simd::accumulate(scores, Rows { cols: latent, ..cached }, context);
        }
        let values = keys + nope;
        outputs_of(&self.w.kv_b, values..values + v, Rows::dense(b.context, latent), b.values, Steps { output: 1, row: v });
    }
}

/// `softmax(scale * scores)`, in place.
pub(super) fn softmax(scores: &mut [f32], scale: f32) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for s in scores.iter_mut() {
        *s = ((*s - max) * scale).exp();
    }
    let sum = simd::sum(scores);
    for s in scores.iter_mut() {
        *s /= sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Checkpoint;
    use crate::engine::matrix::Matrix;
    use std::path::Path;

    struct Seed(u32);

    impl Seed {
        fn next(&mut self) -> f32 {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
        }

        fn vector(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| self.next()).collect()
        }

        fn matrix(&mut self, rows: usize, cols: usize) -> Matrix {
            let values = self.vector(rows * cols);
            Matrix::from_f32(rows, cols, &values).unwrap()
        }
    }

    /// `W x` in f64.
    fn product(w: &Matrix, x: &[f64]) -> Vec<f64> {
        let mut row = vec![0.0; w.cols()];
        (0..w.rows())
            .map(|r| {
                w.decode_row(r, &mut row);
                row.iter().zip(x).map(|(a, b)| f64::from(*a) * b).sum()
            })
            .collect()
    }

    fn normed(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(v, w)| v / (mean + f64::from(eps)).sqrt() * f64::from(*w)).collect()
    }

    fn rotated(x: &[f64], position: usize, theta: f64) -> Vec<f64> {
        let angle = |j: usize| position as f64 * theta.powf(-2.0 * j as f64 / x.len() as f64);
        x.chunks(2)
            .enumerate()
            .flat_map(|(j, p)| {
                let (sin, cos) = angle(j).sin_cos();
                [p[0] * cos - p[1] * sin, p[1] * cos + p[0] * sin]
            })
            .collect()
    }

    /// The expanded form of ling3.md 3.3, step by step in f64.
    fn expanded(w: &MlaWeights, config: &ModelConfig, x: &[f32], position: usize) -> Vec<f64> {
        let (nope, rope, v, lora) = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank);
        let rows: Vec<Vec<f64>> = x.chunks(config.hidden).map(|r| r.iter().map(|v| f64::from(*v)).collect()).collect();
        let query = match &w.query {
            MlaQuery::Full(q) => product(q, &rows[position]),
            MlaQuery::LowRank { a, norm, b } => product(b, &normed(&product(a, &rows[position]), norm, config.rms_eps)),
        };
        let gate: Vec<f64> = product(&w.gate, &rows[position]).iter().map(|g| 1.0 / (1.0 + (-g).exp())).collect();
        let mut joined = Vec::new();
        for head in 0..config.heads {
            let q = &query[head * (nope + rope)..][..nope + rope];
            let q_rope = rotated(&q[nope..], position, config.rope_theta);
            let (mut scores, mut values) = (Vec::new(), Vec::new());
            for (s, row) in rows[..=position].iter().enumerate() {
                let c = product(&w.kv_a, row);
                let expanded = product(&w.kv_b, &normed(&c[..lora], &w.kv_norm, config.rms_eps));
                let part = &expanded[head * (nope + v)..][..nope + v];
                let k_rope = rotated(&c[lora..], s, config.rope_theta);
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                scores.push((dot(&q[..nope], &part[..nope]) + dot(&q_rope, &k_rope)) / ((nope + rope) as f64).sqrt());
                values.push(part[nope..].to_vec());
            }
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for i in 0..v {
                let o: f64 = scores.iter().zip(&values).map(|(s, value)| (s - max).exp() / sum * value[i]).sum();
                joined.push(o * if config.mla_gate == MlaGate::HeadWise { gate[head] } else { gate[head * v + i] });
            }
        }
        product(&w.out, &joined)
    }

    #[test]
    fn absorbed_equals_expanded_with_the_gate_before_the_output() {
        let mut config = Checkpoint::resolve(Path::new("demo")).unwrap().config;
        (config.hidden, config.heads, config.kv_lora_rank) = (18, 3, 21);
        (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) = (6, 4, 5);
        let mut seed = Seed(1);
        for (gate, low) in [(MlaGate::HeadWise, false), (MlaGate::ElementWise, true)] {
            config.mla_gate = gate;
            let gates = if gate == MlaGate::HeadWise { 3 } else { 15 };
            let query = if low {
                MlaQuery::LowRank { a: seed.matrix(7, 18), norm: seed.vector(7), b: seed.matrix(30, 7) }
            } else {
                MlaQuery::Full(seed.matrix(30, 18))
            };
            let w = MlaWeights {
                query,
                kv_a: seed.matrix(25, 18),
                kv_norm: seed.vector(21),
                kv_b: seed.matrix(33, 21),
                gate: seed.matrix(gates, 18),
                out: seed.matrix(18, 15),
            };
            let x = seed.vector(9 * 18);
            let mut cache = MlaCache::new(&config);
            let mut rope = Rope::new(4, config.rope_theta);
            rope.prepare(0, 9);
            let mut out = vec![0.0; x.len()];
            cache.forward(&w, &config, &rope, &x, &mut out, &mut MlaScratch::default()).unwrap();
            for (position, row) in out.chunks(18).enumerate() {
                for (got, want) in row.iter().zip(expanded(&w, &config, &x, position)) {
                    assert!((f64::from(*got) - want).abs() < 2e-5, "position {position}: {got} {want}");
                }
            }
        }
    }
}
