//! A drafter layer's attention: the block's rows over the context and over the block itself.
//!
//! Keys and values of the context come from the target's tapped layers and stay; those of a block are put after them for the
//! block's own pass and leave with it. Both are made by the same projections. A row's bits do not depend on how the context
//! was cut into passes.

use super::config::DsparkConfig;
use super::weights::BlockAttention;
use crate::engine::matmul::matmul;
use crate::engine::mla::softmax;
use crate::engine::norm::{Damage, check, rms_norm_rows};
use crate::engine::rope::Rope;
use crate::engine::scratch::fit;
use crate::engine::simd::{self, Rows, Steps};
use crate::engine::tap::BlockParts;
use rayon::prelude::*;

/// Multiplications below which one thread does all heads.
const PARALLEL: usize = 1 << 22;

/// Keys (normed, rotated) and values of one layer, each `[tokens, kv_heads * head_dim]`.
#[derive(Debug, Default)]
pub(super) struct KvCache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Intermediate rows of a pass.
#[derive(Debug, Default)]
pub(super) struct AttentionScratch {
    raw: Vec<f32>,
    queries: Vec<f32>,
    scores: Vec<f32>,
    heads: Vec<f32>,
    mixed: Vec<f32>,
}

impl KvCache {
    /// Keys, `[tokens, kv_heads * head_dim]`.
    pub fn keys(&self) -> &[f32] {
        &self.keys
    }

    /// Values, same shape.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Keeps the first `tokens` rows of `width` numbers.
    pub fn truncate(&mut self, tokens: usize, width: usize) {
        self.keys.truncate(tokens * width);
        self.values.truncate(tokens * width);
    }

    /// Appends keys and values of the rows of `x`, `[rows, H]`, whose angles `rope` holds.
    ///
    /// # Errors
    /// Where a number stopped being finite; the caller truncates.
    pub fn append(
        &mut self,
        w: &BlockAttention,
        config: &DsparkConfig,
        rope: &Rope,
        x: &[f32],
        s: &mut AttentionScratch,
    ) -> Result<(), Damage> {
        let rows = x.len() / config.hidden;
        let (width, begin) = (config.kv_width(), self.keys.len());
        let raw = fit(&mut s.raw, rows * width);
        matmul(&w.k, x, raw);
        // The norm would turn an infinite key into a row of NaN and zeros: name it where it arises.
        check(raw, "k_proj output")?;
        self.keys.resize(begin + rows * width, 0.0);
        let keys = &mut self.keys[begin..];
        normed_and_rotated(raw, (&w.k_norm, config.kv_heads), config, rope, keys);
        self.values.resize(begin + rows * width, 0.0);
        let values = &mut self.values[begin..];
        matmul(&w.v, x, values);
        check(values, "v_proj output")
    }

    /// The attention of the cache's last `rows` rows, whose normed residual rows are `x`; `out` is `[rows, H]`.
    /// Gives the parts of it.
    ///
    /// # Errors
    /// Where a number stopped being finite.
    pub fn attend<'a>(
        &'a self,
        w: &BlockAttention,
        config: &DsparkConfig,
        rope: &Rope,
        x: &[f32],
        out: &mut [f32],
        s: &'a mut AttentionScratch,
    ) -> Result<BlockParts<'a>, Damage> {
        let rows = x.len() / config.hidden;
        let (size, heads, width) = (config.head_dim, config.heads, config.kv_width());
        let tokens = self.keys.len() / width;
        let context = tokens.saturating_sub(rows);
        let raw = fit(&mut s.raw, rows * config.query_width());
        let queries = fit(&mut s.queries, rows * config.query_width());
        matmul(&w.q, x, raw);
        check(raw, "q_proj output")?;
        normed_and_rotated(raw, (&w.q_norm, heads), config, rope, queries);

        let scores = fit(&mut s.scores, heads * tokens);
        let by_head = fit(&mut s.heads, heads * rows * size);
        let queries = &*queries;
        let attend = |head: usize, out: &mut [f32], scores: &mut [f32]| {
            let at = head / (heads / config.kv_heads) * size;
            for (row, out) in out.chunks_exact_mut(size).enumerate() {
                // Every row sees the whole block, unless the drafter was trained causally.
                let seen = if config.causal { context + row + 1 } else { tokens };
                let of = |data| Rows { data, stride: width, rows: seen, cols: size };
                let query = &queries[(row * heads + head) * size..][..size];
                let scores = &mut scores[..seen];
                simd::dots_f32(of(&self.keys[at..]), Rows::dense(query, size), scores, Steps { output: 1, row: 0 });
                softmax(scores, 1.0 / (size as f32).sqrt());
                out.fill(0.0);
                simd::accumulate(scores, of(&self.values[at..]), out);
            }
        };
        if heads * rows * tokens * 2 * size >= PARALLEL && rayon::current_num_threads() > 1 {
            let parts = by_head.par_chunks_mut(rows * size).zip(scores.par_chunks_mut(tokens));
            parts.enumerate().for_each(|(head, (out, scores))| attend(head, out, scores));
        } else {
            let parts = by_head.chunks_mut(rows * size).zip(scores.chunks_mut(tokens));
            parts.enumerate().for_each(|(head, (out, scores))| attend(head, out, scores));
        }

        let mixed = fit(&mut s.mixed, rows * config.query_width());
        for (head, from) in by_head.chunks_exact(rows * size).enumerate() {
            for (row, from) in from.chunks_exact(size).enumerate() {
                mixed[(row * heads + head) * size..][..size].copy_from_slice(from);
            }
        }
        matmul(&w.out, mixed, out);
        let block = context * width..tokens * width;
        Ok(BlockParts { queries, keys: &self.keys[block.clone()], values: &self.values[block], mixed })
    }
}

/// Each head of each row normed by `weight` and rotated to its row's position; `raw` and `out` are `[rows, heads, head_dim]`.
fn normed_and_rotated(raw: &[f32], (weight, heads): (&[f32], usize), config: &DsparkConfig, rope: &Rope, out: &mut [f32]) {
    rms_norm_rows(raw, weight, config.rms_eps, out);
    for (row, out) in out.chunks_exact_mut(heads * config.head_dim).enumerate() {
        out.chunks_exact_mut(config.head_dim).for_each(|head| rope.rotate_halves(row, head));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::matrix::Matrix;

    struct Seed(u32);

    impl Seed {
        fn vector(&mut self, n: usize) -> Vec<f32> {
            let mut next = || {
                self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..n).map(|_| next()).collect()
        }

        fn matrix(&mut self, rows: usize, cols: usize) -> (Matrix, Vec<f32>) {
            let values = self.vector(rows * cols);
            (Matrix::from_f32(rows, cols, &values).unwrap(), values)
        }
    }

    /// Row `row` of `x W^T` in f64.
    fn product(w: &[f32], x: &[f32]) -> Vec<f64> {
        w.chunks(x.len()).map(|w| w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()).collect()
    }

    /// One head, normed and rotated in f64.
    fn head(x: &[f64], weight: &[f32], position: usize, theta: f64) -> Vec<f64> {
        let (size, half) = (x.len(), x.len() / 2);
        let scale = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / size as f64 + 1e-6).sqrt();
        let n: Vec<f64> = x.iter().zip(weight).map(|(v, w)| v * scale * f64::from(*w)).collect();
        let turned = |i: usize| {
            let (sin, cos) = (position as f64 * theta.powf(-2.0 * (i % half) as f64 / size as f64)).sin_cos();
            if i < half { n[i] * cos - n[i + half] * sin } else { n[i] * cos + n[i - half] * sin }
        };
        (0..size).map(turned).collect()
    }

    /// Grouped heads, a context whose rows come without the block's own, causal blocks and others, beside sums in f64.
    #[test]
    fn attention_is_the_formula() {
        let (hidden, heads, kv_heads, size, context, rows) = (12, 6, 2, 8, 5, 4);
        let json = serde_json::json!({
            "architectures": ["LingDSparkModel"], "num_hidden_layers": 1, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": size, "intermediate_size": 4, "vocab_size": 9, "rope_theta": 100.0,
            "block_size": rows, "mask_token_id": 8, "target_layer_ids": [0], "markov_rank": 0
        });
        let (mut config, _) = DsparkConfig::parse(std::path::Path::new("c"), json.to_string().as_bytes()).unwrap();
        let mut seed = Seed(3);
        let ((q, q_), (k, k_), (v, v_)) = (seed.matrix(48, hidden), seed.matrix(16, hidden), seed.matrix(16, hidden));
        let (out, out_) = seed.matrix(hidden, 48);
        let w = BlockAttention { q, k, v, out, q_norm: seed.vector(size), k_norm: seed.vector(size) };
        let x = seed.vector((context + rows) * hidden);
        for causal in [false, true] {
            config.causal = causal;
            let (mut cache, mut s, mut rope) = (KvCache::default(), AttentionScratch::default(), Rope::new(size, config.rope_theta));
            // The context in two pieces.
            for (from, to) in [(0, 2), (2, context), (context, context + rows)] {
                rope.prepare(from, to - from);
                cache.append(&w, &config, &rope, &x[from * hidden..to * hidden], &mut s).unwrap();
            }
            let block = &x[context * hidden..];
            let mut got = vec![0.0; rows * hidden];
            cache.attend(&w, &config, &rope, block, &mut got, &mut s).unwrap();
            for row in 0..rows {
                let query = product(&q_, &block[row * hidden..][..hidden]);
                let seen = if causal { context + row + 1 } else { context + rows };
                let mut mixed = Vec::new();
                for h in 0..heads {
                    let own = head(&query[h * size..][..size], &w.q_norm, context + row, config.rope_theta);
                    let at = h / 3 * size;
                    let pairs: Vec<(f64, Vec<f64>)> = (0..seen)
                        .map(|t| {
                            let (keys, values) = (product(&k_, &x[t * hidden..][..hidden]), product(&v_, &x[t * hidden..][..hidden]));
                            let key = head(&keys[at..][..size], &w.k_norm, t, config.rope_theta);
                            let score: f64 = own.iter().zip(&key).map(|(a, b)| a * b).sum();
                            ((score / (size as f64).sqrt()).exp(), values[at..][..size].to_vec())
                        })
                        .collect();
                    let total: f64 = pairs.iter().map(|(e, _)| e).sum();
                    mixed.extend((0..size).map(|i| pairs.iter().map(|(e, v)| e / total * v[i]).sum::<f64>() as f32));
                }
                for (got, want) in got[row * hidden..][..hidden].iter().zip(product(&out_, &mixed)) {
                    assert!((f64::from(*got) - want).abs() < 2e-5, "row {row}, causal {causal}: {got} {want}");
                }
            }
        }
    }
}
