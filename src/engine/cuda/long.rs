//! What passes of more than [`PASS_ROWS`](super::PASS_ROWS) rows need beside the rows between kernels: a prompt's, which are never taken back.
//!
//! A window's rows are staged in every KDA layer until it is known how many are kept; those of a long pass go into a layer's state while
//! the layer runs, and one place for their ingredients serves all layers.

use super::LONG_ROWS;
use super::PASS_ROWS;
use super::buffer::Buffer;
use super::device::Device;
use super::long_ops::{Tiles, most_tiles, split_bytes};
use super::ops::{Delta, KdaRows};
use crate::engine::{EngineError, ModelConfig};
use std::rc::Rc;

/// Rows of the longest pass of timelines of up to `tokens` tokens; `None` where all fit into a window's.
pub(super) fn longest_pass(tokens: usize) -> Option<usize> {
    Some(tokens.min(LONG_ROWS)).filter(|&rows| rows > PASS_ROWS)
}

/// Device memory of long passes.
#[derive(Debug)]
pub(super) struct LongRows {
    /// Rows in three terms of BF16, the input of products on tensor cores.
    pub split: Buffer,
    tiles: [Buffer; 4],
    kda: Option<KdaLong>,
}

/// A KDA layer's rows of a pass.
#[derive(Debug)]
pub(super) struct KdaLong {
    /// q, k, v before the convolution, `[taps - 1 + rows, 3 P]`.
    raw: Buffer,
    /// Queries, keys, values and decays, `[rows, P]` each.
    rows: [Buffer; 4],
    /// `[rows, heads]`
    betas: Buffer,
    heads: usize,
    dim: usize,
    taps: usize,
}

/// Bytes of the widest row that is split: of the residual, of the draft module's input, of attention.
fn widest(config: &ModelConfig) -> usize {
    let attention = config.kda_width().max(config.heads * config.v_head_dim);
    split_bytes((2 * config.hidden).max(attention).max(config.q_lora_rank.unwrap_or(0)))
}

fn kda_floats(config: &ModelConfig, rows: usize) -> usize {
    let width = config.kda_width();
    (config.conv_kernel - 1 + rows) * 3 * width + rows * (4 * width + config.heads)
}

/// Bytes for passes of up to `rows` rows; `recurrent`: of a model's layers, not of its draft module.
pub(super) fn planned_bytes(config: &ModelConfig, rows: usize, recurrent: bool) -> usize {
    let tiles = most_tiles(rows * config.experts_per_token, config.experts);
    rows * widest(config) + (3 * tiles + if recurrent { kda_floats(config, rows) } else { 0 }) * 4
}

impl LongRows {
    /// Room for passes of up to `rows` rows.
    pub fn new(device: &Rc<Device>, config: &ModelConfig, rows: usize, recurrent: bool) -> Result<Self, EngineError> {
        let floats = |n: usize| device.room(n * 4);
        let tiles = most_tiles(rows * config.experts_per_token, config.experts);
        let width = config.kda_width();
        let kda = || -> Result<KdaLong, EngineError> {
            let each = || floats(rows * width);
            Ok(KdaLong {
                raw: floats((config.conv_kernel - 1 + rows) * 3 * width)?,
                rows: [each()?, each()?, each()?, each()?],
                betas: floats(rows * config.heads)?,
                heads: config.heads,
                dim: config.head_dim,
                taps: config.conv_kernel,
            })
        };
        Ok(Self {
            split: device.room(rows * widest(config))?,
            tiles: [floats(1)?, floats(tiles)?, floats(tiles)?, floats(tiles)?],
            kda: recurrent.then(kda).transpose()?,
        })
    }

    /// The tiles of the choices whose rows are at `slot_row`.
    pub fn tiles(&self, slot_row: u64) -> Tiles {
        let [count, expert, begin, end] = [0, 1, 2, 3].map(|i: usize| self.tiles[i].at(0));
        Tiles { count, expert, begin, end, slot_row }
    }

    /// A KDA layer's rows.
    pub fn kda(&self) -> Result<&KdaLong, EngineError> {
        self.kda.as_ref().ok_or_else(|| EngineError::Request("a draft module has no recurrent layers".to_owned()))
    }
}

impl KdaLong {
    fn row(&self) -> usize {
        3 * self.heads * self.dim
    }

    /// Row `row` of the convolution's input, the history's first being 0.
    pub fn raw(&self, row: usize) -> u64 {
        self.raw.float(row * self.row())
    }

    /// Lets the stream take over a layer's last rows of the convolution's input, at `history`.
    pub fn begin(&self, device: &Device, history: u64) -> Result<(), EngineError> {
        let bytes = (self.taps - 1) * self.row() * 4;
        device.copy(history, self.raw.inside(0, bytes)?, bytes)
    }

    /// Lets it leave those of a pass of `rows` rows there.
    pub fn end(&self, device: &Device, rows: usize, history: u64) -> Result<(), EngineError> {
        let bytes = (self.taps - 1) * self.row() * 4;
        device.copy(self.raw.inside(rows * self.row() * 4, bytes)?, history, bytes)
    }

    /// Where a pass's rows are put.
    pub fn rows(&self) -> KdaRows {
        let d = self.delta();
        KdaRows { query: self.rows[0].at(0), keys: d.keys, values: d.values, decays: d.decays, betas: d.betas }
    }

    /// The rows as the delta rule takes them.
    pub fn delta(&self) -> Delta {
        let [_, keys, values, decays] = [0, 1, 2, 3].map(|i: usize| self.rows[i].at(0));
        Delta { heads: self.heads as i32, dim: self.dim as i32, keys, values, decays, betas: self.betas.at(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_long_beyond_a_window_and_end_at_512_rows() {
        assert_eq!([0, 16, 17, 512, 9000].map(longest_pass), [None, None, Some(17), Some(512), Some(512)]);
        // Whole tiles of 32 columns, three terms of two bytes.
        assert_eq!([1, 24, 32, 33].map(split_bytes), [192, 192, 192, 384]);
        // Rows of one expert each; all rows of few experts; some of both.
        assert_eq!([(5, 64), (128, 2), (100, 64)].map(|(slots, experts)| most_tiles(slots, experts)), [5, 6, 67]);
    }
}
