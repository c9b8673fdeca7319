//! Device memory of a block drafter: rows of a pass, and the keys and values of its context.

use super::PASS_ROWS;
use super::block_weights::block_floats;
use super::buffer::Buffer;
use super::device::Device;
use super::drafted;
use super::ops::{Damage, Plan, SPLIT};
use super::pinned::Pinned;
use super::site::{Part, Site, refuse_damage};
use super::workspace::AllRows;
use crate::engine::EngineError;
use crate::engine::dspark::DsparkConfig;
use std::rc::Rc;

/// Rows of a pass, reused by every layer.
#[derive(Debug)]
pub(super) struct BlockSpace {
    /// What a chain tells the host by one copy: the damage note, then of each draft its probability, then of each its confidence before the
    /// sigmoid.
    told: Buffer,
    /// The same on the host.
    results: Pinned,
    all: AllRows,
    /// Splits of the longest context.
    most_splits: usize,
    /// The target's tapped rows that wait for a place in the context, `[2 PASS_ROWS, taps * H]`.
    pub taps: Buffer,
    pub residual: Buffer,
    pub normed: Buffer,
    pub branch: Buffer,
    /// Rows after the final norm.
    pub output: Buffer,
    /// Keys, values and queries before norms, `[PASS_ROWS, width]` each; see [`BlockSpace::raw`].
    raw: Buffer,
    /// Numbers of all keys of it.
    raw_keys: usize,
    pub queries: Buffer,
    pub parts: Buffer,
    pub stats: Buffer,
    pub mixed: Buffer,
    pub mid: Buffer,
    /// Of each draft, `[drafts, vocab]`.
    pub logits: Buffer,
    /// The Markov embedding of the token before each draft, `[drafts, rank]`.
    pub embedded: Buffer,
    /// What such a token says of the next one, `[vocab]`.
    pub bias: Buffer,
    cache: KvCaches,
}

/// Keys and values of all layers, `[layers, room, kv_heads * head_dim]` each.
#[derive(Debug)]
struct KvCaches {
    keys: Buffer,
    values: Buffer,
    stride: usize,
}

/// Where probabilities and confidences are in what a chain tells, and its bytes.
const PROBS: usize = 16;
const CONFIDENCES: usize = PROBS + drafted::MOST * 4;
pub(super) const TOLD_BYTES: usize = CONFIDENCES + drafted::MOST * 4;

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
            told: device.zeros(TOLD_BYTES)?,
            results: Pinned::new(device, TOLD_BYTES)?,
            all: AllRows::new(device)?,
            most_splits: room.div_ceil(SPLIT).max(1),
            taps: floats(taps)?,
            residual: floats(residual)?,
            normed: floats(normed)?,
            branch: floats(branch)?,
            output: floats(output)?,
            raw: floats(raw)?,
            raw_keys: PASS_ROWS * width,
            queries: floats(queries)?,
            parts: floats(parts)?,
            stats: floats(stats)?,
            mixed: floats(mixed)?,
            mid: floats(mid)?,
            logits: floats(logits)?,
            embedded: floats(embedded)?,
            bias: floats(bias)?,
            cache: KvCaches { keys: floats(cached)?, values: floats(cached)?, stride: room * width },
        })
    }

    /// Where keys, values and queries are before norms.
    pub fn raw(&self) -> [u64; 3] {
        [0, 1, 2].map(|part| self.raw.float(part * self.raw_keys))
    }

    /// A layer's keys.
    pub fn keys(&self, layer: usize) -> u64 {
        self.cache.keys.float(layer * self.cache.stride)
    }

    /// A layer's values.
    pub fn values(&self, layer: usize) -> u64 {
        self.cache.values.float(layer * self.cache.stride)
    }

    /// The plan of one expert and all rows of the pass whose position, 0 and rows are at `span`.
    pub fn plan(&self, span: u64) -> Plan {
        Plan { start: span + 4, ..self.all.plan() }
    }

    /// The splits that are launched for when `tokens` tokens are seen: few different numbers, so that graphs are few.
    pub fn splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(SPLIT).max(1).next_power_of_two().min(self.most_splits)
    }

    /// Where the probability of draft `draft` goes.
    pub fn prob(&self, draft: usize) -> u64 {
        self.told.at(PROBS + draft * 4)
    }

    /// Where the drafts' confidences go.
    pub fn confidences(&self) -> u64 {
        self.told.at(CONFIDENCES)
    }

    /// Lets the stream bring what there is to tell of a chain.
    pub fn bring(&self) -> Result<(), EngineError> {
        self.results.receive(0, TOLD_BYTES, &self.told)
    }

    /// The probabilities of `drafts` drafts that were waited for.
    pub fn collect_probs(&self, drafts: usize) -> Result<Vec<f32>, EngineError> {
        let mut probs = Vec::new();
        self.results.append(PROBS, drafts, &mut probs)?;
        Ok(probs)
    }

    /// Their confidences before the sigmoid.
    pub fn collect_confidences(&self, drafts: usize) -> Result<Vec<f32>, EngineError> {
        let mut logits = Vec::new();
        self.results.append(CONFIDENCES, drafts, &mut logits)?;
        Ok(logits)
    }

    /// Where a part of a layer notes damage.
    pub fn damage(&self, layer: usize, part: Part) -> Damage {
        Damage { at: self.told.at(0), site: Site { layer, part }.code() }
    }

    /// Fails with the first place at which a number of the pass that was waited for was not finite.
    pub fn check(&self) -> Result<(), EngineError> {
        let mut code = Vec::new();
        self.results.append(0, 1, &mut code)?;
        refuse_damage(code[0], || self.told.clear(), |site| format!("DSpark drafter, {}", site.describe()))
    }
}
