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
