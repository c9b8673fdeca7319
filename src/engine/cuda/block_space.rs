//! Device memory of a block drafter: rows of a pass, and the keys and values of its context.

use super::PASS_ROWS;
use super::block_weights::block_floats;
use super::buffer::Buffer;
use super::device::Device;
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
    /// What the host says of a pass: [`PASS_ROWS`] tokens, the tokens in the context, which is the first position, 0 and the rows.
    inputs: Buffer,
    /// The same on the host, and behind it the target's tapped rows.
    staged: Pinned,
    /// Damage note, a block's rows, its logits, a Markov embedding and its bias on the host.
    results: Pinned,
    damage: Buffer,
    all: AllRows,
    /// Splits of the longest context.
    most_splits: usize,
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
            inputs: device.room(INPUT_BYTES)?,
            staged: Pinned::new(device, INPUT_BYTES + taps * 4)?,
            results: Pinned::new(device, result_bytes(config))?,
            damage: device.zeros(4)?,
            all: AllRows::new(device)?,
            most_splits: room.div_ceil(SPLIT).max(1),
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
            cache: KvCaches { keys: floats(cached)?, values: floats(cached)?, stride: room * width },
        })
    }

    /// A layer's keys.
    pub fn keys(&self, layer: usize) -> u64 {
        self.cache.keys.float(layer * self.cache.stride)
    }

    /// A layer's values.
    pub fn values(&self, layer: usize) -> u64 {
        self.cache.values.float(layer * self.cache.stride)
    }

    /// Says what is to be done: `rows` rows after `context` tokens, of `tokens` where they have any.
    pub fn begin(&self, tokens: &[u32], context: usize, rows: usize) -> Result<(), EngineError> {
        self.staged.put(0, tokens)?;
        self.staged.put(BASE, &[context as u32, 0, rows as u32])
    }

    /// Puts the target's tapped rows beside it.
    pub fn begin_taps(&self, taps: &[f32]) -> Result<(), EngineError> {
        self.staged.put(INPUT_BYTES, taps)
    }

    /// Lets the stream take over what [`BlockSpace::begin`] said.
    pub fn send(&self) -> Result<(), EngineError> {
        self.staged.send(0, INPUT_BYTES, &self.inputs)
    }

    /// Lets the stream take over `numbers` numbers of tapped rows.
    pub fn send_taps(&self, numbers: usize) -> Result<(), EngineError> {
        self.staged.send(INPUT_BYTES, numbers * 4, &self.taps)
    }

    /// The pass's tokens, and its first position.
    pub fn tokens(&self) -> u64 {
        self.inputs.at(0)
    }

    /// Tokens in the context: the pass's first position.
    pub fn base(&self) -> u64 {
        self.inputs.at(BASE)
    }

    /// The plan of one expert and all rows.
    pub fn plan(&self) -> Plan {
        Plan { start: self.inputs.at(BASE + 4), ..self.all.plan() }
    }

    /// The splits that are launched for when `tokens` tokens are seen: few different numbers, so that graphs are few.
    pub fn splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(SPLIT).max(1).next_power_of_two().min(self.most_splits)
    }

    /// Lets the stream bring the damage note.
    pub fn bring_damage(&self) -> Result<(), EngineError> {
        self.results.receive(0, 4, &self.damage)
    }

    /// Lets the stream bring a block's rows and the logits of `drafts` of them.
    pub fn bring_block(&self, config: &DsparkConfig, drafts: usize) -> Result<(), EngineError> {
        let [rows, logits, ..] = results_at(config);
        self.results.receive(rows, config.block_size * config.hidden * 4, &self.output)?;
        self.results.receive(logits, drafts * config.vocab * 4, &self.logits)
    }

    /// Lets the stream bring a Markov embedding and what it says of the next token.
    pub fn bring_markov(&self, config: &DsparkConfig) -> Result<(), EngineError> {
        let [_, _, embedded, bias] = results_at(config);
        self.results.receive(embedded, config.markov_rank * 4, &self.embedded)?;
        self.results.receive(bias, config.vocab * 4, &self.bias)
    }

    /// A block's rows and logits that were waited for.
    pub fn collect_block(&self, config: &DsparkConfig, drafts: usize, to: (&mut Vec<f32>, &mut Vec<f32>)) -> Result<(), EngineError> {
        let [rows, logits, ..] = results_at(config);
        to.0.clear();
        to.1.clear();
        self.results.append(rows, config.block_size * config.hidden, to.0)?;
        self.results.append(logits, drafts * config.vocab, to.1)
    }

    /// A Markov embedding and its bias that were waited for.
    pub fn collect_markov(&self, config: &DsparkConfig, to: (&mut Vec<f32>, &mut Vec<f32>)) -> Result<(), EngineError> {
        let [_, _, embedded, bias] = results_at(config);
        to.0.clear();
        to.1.clear();
        self.results.append(embedded, config.markov_rank, to.0)?;
        self.results.append(bias, config.vocab, to.1)
    }

    /// Where a part of a layer notes damage.
    pub fn damage(&self, layer: usize, part: Part) -> Damage {
        Damage { at: self.damage.at(0), site: Site { layer, part }.code() }
    }

    /// Fails with the first place at which a number of the pass that was waited for was not finite.
    pub fn check(&self) -> Result<(), EngineError> {
        let mut code = Vec::new();
        self.results.append(0, 1, &mut code)?;
        refuse_damage(code[0], || self.damage.clear(), |site| format!("DSpark drafter, {}", site.describe()))
    }
}

/// Bytes of [`BlockSpace::inputs`], and where the first position is.
const INPUT_BYTES: usize = BASE + 16;
const BASE: usize = PASS_ROWS * 4;

/// Where a block's rows, its logits, a Markov embedding and its bias are in the results.
fn results_at(config: &DsparkConfig) -> [usize; 4] {
    let rows = 16;
    let logits = rows + config.block_size * config.hidden * 4;
    let embedded = logits + config.block_size * config.vocab * 4;
    [rows, logits, embedded, embedded + config.markov_rank * 4]
}

fn result_bytes(config: &DsparkConfig) -> usize {
    results_at(config)[3] + config.vocab * 4
}

/// Bytes of page-locked memory of a block drafter.
pub(super) fn planned_pinned(config: &DsparkConfig) -> usize {
    INPUT_BYTES + PASS_ROWS * config.hidden * config.taps.len() * 4 + result_bytes(config)
}
