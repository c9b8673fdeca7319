//! Device memory of a block drafter: rows of a pass, and the keys and values of its context.

use super::block_weights::block_floats;
use super::buffer::Buffer;
use super::device::Device;
use super::ops::Damage;
use super::site::{Part, Site, check_damage};
use super::workspace::AllRows;
use crate::engine::EngineError;
use crate::engine::dspark::DsparkConfig;
use std::rc::Rc;

/// Rows of a pass, reused by every layer.
#[derive(Debug)]
pub(super) struct BlockSpace {
    pub tokens: Buffer,
    /// Tokens in the context: the pass's first position.
    pub base: Buffer,
    damage: Buffer,
    pub all: AllRows,
    /// The target's tapped rows, `[rows, taps * H]`.
    pub taps: Buffer,
    pub residual: Buffer,
    pub normed: Buffer,
    pub branch: Buffer,
    /// Rows after the final norm.
    pub output: Buffer,
    /// Queries or keys before their norm.
    pub raw: Buffer,
    pub queries: Buffer,
    pub parts: Buffer,
    pub stats: Buffer,
    pub mixed: Buffer,
    pub mid: Buffer,
    pub logits: Buffer,
    /// The Markov embedding of the token before, `[rank]`.
    pub embedded: Buffer,
    /// What it says of the next token, `[vocab]`.
    pub bias: Buffer,
    cache: KvCaches,
}

/// Keys and values of all layers, `[layers, room, kv_heads * head_dim]` each.
#[derive(Debug)]
struct KvCaches {
    keys: Buffer,
    values: Buffer,
    stride: usize,
    width: usize,
}

impl BlockSpace {
    /// Room for a context and a block of `room` tokens.
    ///
    /// # Errors
    /// When device memory runs out.
    pub fn new(device: &Rc<Device>, config: &DsparkConfig, room: usize) -> Result<Self, EngineError> {
        let floats = |n: usize| device.room(n * 4);
        let [taps, residual, normed, branch, output, raw, queries, parts, stats, mixed, mid, logits, embedded, bias] =
            block_floats(config, room);
        let width = config.kv_width();
        let cached = config.layers * room * width;
        Ok(Self {
            tokens: floats(super::PASS_ROWS)?,
            base: floats(1)?,
            damage: device.zeros(4)?,
            all: AllRows::new(device)?,
            taps: floats(taps)?,
            residual: floats(residual)?,
            normed: floats(normed)?,
            branch: floats(branch)?,
            output: floats(output)?,
            raw: floats(raw)?,
            queries: floats(queries)?,
            parts: floats(parts)?,
            stats: floats(stats)?,
            mixed: floats(mixed)?,
            mid: floats(mid)?,
            logits: floats(logits)?,
            embedded: floats(embedded)?,
            bias: floats(bias)?,
            cache: KvCaches { keys: floats(cached)?, values: floats(cached)?, stride: room * width, width },
        })
    }

    /// A layer's keys.
    pub fn keys(&self, layer: usize) -> u64 {
        self.cache.keys.float(layer * self.cache.stride)
    }

    /// A layer's values, from token `token` on.
    pub fn values(&self, layer: usize, token: usize) -> u64 {
        self.cache.values.float(layer * self.cache.stride + token * self.cache.width)
    }

    /// Where a part of a layer notes damage.
    pub fn damage(&self, layer: usize, part: Part) -> Damage {
        Damage { at: self.damage.at(0), site: Site { layer, part }.code() }
    }

    /// Fails with the first place at which a number of the pass was not finite; waits for the pass.
    pub fn check(&self) -> Result<(), EngineError> {
        check_damage(&self.damage, |site| format!("DSpark drafter, {}", site.describe()))
    }
}
