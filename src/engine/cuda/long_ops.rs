//! One function a kernel of those that only passes of more than [`PASS_ROWS`](super::PASS_ROWS) rows need, as `ops` has the others.

#![expect(clippy::too_many_arguments, reason = "a kernel has the arguments that it has")]

use super::PASS_ROWS;
use super::device::Device;
use super::launch::Launch;
use super::matrix::{DeviceMatrix, Form};
use super::moved::Moved;
use super::ops::{Damage, Delta, KdaShape, MlaShape, Mlp, no_kernel};
use crate::engine::EngineError;

type Done = Result<(), EngineError>;

/// Rows of a tile of an expert, `SP_EXPERT_ROWS` of `kernels/sp_tiles.cuh`, and of one of a dense projection.
pub(super) const EXPERT_ROWS: usize = 32;
const DENSE_ROWS: usize = 64;
/// Columns and weight rows of a tile.
const COLS: usize = 32;
const OUTPUTS: usize = 64;
/// Bytes of a number in three terms.
const TERMS: usize = 6;

/// `SpTiles` of `kernels/experts_tiles.cu`; all 0: one expert, which all rows have.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tiles {
    pub count: u64,
    pub expert: u64,
    pub begin: u64,
    pub end: u64,
    pub slot_row: u64,
}

/// Bytes of a row of `cols` numbers in three terms of BF16.
pub(super) const fn split_bytes(cols: usize) -> usize {
    cols.next_multiple_of(COLS) * TERMS
}

/// Most tiles of `slots` choices among `experts` experts.
pub(super) fn most_tiles(slots: usize, experts: usize) -> usize {
    slots.min(experts) + slots / EXPERT_ROWS
}

/// Bytes of shared memory of a product on tensor cores.
fn shared(form: Form, rows: usize) -> usize {
    let weights = match form {
        Form::F32 => 0,
        Form::Bf16 => 2 * COLS,
        Form::Fp8 => COLS,
        Form::Int4 | Form::Mxfp4 => COLS / 2,
    };
    let stages = if rows > EXPERT_ROWS { 3 } else { 4 };
    stages * (OUTPUTS * weights + rows * COLS * TERMS)
}

/// Rows `[rows, cols]` in three terms, at `out`.
pub(super) fn split_rows(d: &Device, x: u64, (rows, cols): (usize, usize), out: u64) -> Done {
    let moved = Moved::bytes(rows * (cols * 4 + split_bytes(cols)));
    let units = cols.next_multiple_of(COLS) / 4;
    let launch = Launch::new(d, "split_rows", [units.div_ceil(128), rows, 1], 128).moves(moved);
    launch.arg(x).int(cols).arg(out).run()
}

/// `out[n * stride ..] = W x[n]` for dense rows of x, which are at `plain` as they are and at `split` in three terms.
pub(super) fn dense(d: &Device, w: &DeviceMatrix, (plain, split): (u64, u64), rows: usize, out: u64, stride: usize) -> Done {
    let name = match w.form {
        Form::F32 => {
            let moved = Moved::bytes(w.stored() + rows * (w.cols() + w.rows()) * 4);
            let grid = [w.rows().div_ceil(16), rows.div_ceil(PASS_ROWS), 1];
            let launch = Launch::new(d, "dense_f32_rows", grid, 128).moves(moved);
            return launch.arg(w.raw).arg(plain).int(w.cols()).arg(out).int(stride).int(rows).run();
        }
        Form::Bf16 => "dense_tiles_bf16",
        Form::Fp8 => "dense_tiles_fp8",
        Form::Int4 => "dense_tiles_int4",
        Form::Mxfp4 => "dense_tiles_mxfp4",
    };
    let moved = Moved::bytes(w.stored() + rows * (split_bytes(w.cols()) + w.rows() * 4));
    let grid = [rows.div_ceil(DENSE_ROWS), w.rows().div_ceil(OUTPUTS), 1];
    let launch = Launch::new(d, name, grid, 128).shared(shared(w.form, DENSE_ROWS)).moves(moved);
    launch.arg(w.raw).arg(split).arg(out).int(stride).int(rows).run()
}

/// Sorts the choices `[rows, k]` of `experts` experts.
pub(super) fn moe_sort(d: &Device, ids: u64, (rows, k, experts): (usize, usize, usize), tiles: Tiles, slot_of: u64) -> Done {
    // As many parts as a block's shared memory counts for.
    let parts = (8192 / experts.max(1)).clamp(1, 16);
    let moved = Moved::bytes(rows * k * 12 + most_tiles(rows * k, experts) * 12);
    let launch = Launch::new(d, "moe_sort", [1, 1, 1], 512).shared((parts * experts + 32) * 4).moves(moved);
    let launch = launch.arg(ids).int(rows).int(k).int(experts).int(parts);
    launch.arg(tiles.count).arg(tiles.expert).arg(tiles.begin).arg(tiles.end).arg(tiles.slot_row).arg(slot_of).run()
}

/// Experts over sorted choices, or one expert over all rows with `tiles` of 0. `most` is the most tiles that there can be; `x` are rows in
/// three terms, and `mid` has room for as many slots in three terms.
pub(super) fn experts(
    d: &Device,
    m: &Mlp<'_>,
    tiles: Tiles,
    (most, rows, slots): (usize, usize, usize),
    x: u64,
    limit: f32,
    (mid, out): (u64, u64),
    damage: Damage,
) -> Done {
    let name = match m.gate.form {
        _ if m.up.form != m.gate.form => return Err(no_kernel("gate and up of different formats", m.up.form)),
        Form::Bf16 => "experts_gate_up_tiles_bf16",
        Form::Fp8 => "experts_gate_up_tiles_fp8",
        Form::Int4 => "experts_gate_up_tiles_int4",
        Form::Mxfp4 => "experts_gate_up_tiles_mxfp4",
        form @ Form::F32 => return Err(no_kernel("a gated MLP", form)),
    };
    let (hidden, inter) = (m.gate.cols(), m.gate.rows());
    let moved = |stored: usize, row: usize| match tiles.count {
        0 => Moved::bytes(stored + slots * row),
        _ => Moved { per_expert: stored as u64, ..Moved::bytes(slots * row) },
    };
    let launch = Launch::new(d, name, [inter.div_ceil(OUTPUTS / 2), most, 1], 128).shared(shared(m.gate.form, EXPERT_ROWS));
    let launch = launch.moves(moved(m.gate.stored() + m.up.stored(), split_bytes(hidden) + split_bytes(inter)));
    let launch = launch.arg(m.gate.raw).arg(m.up.raw).arg(m.gate.strides).arg(m.up.strides).arg(tiles).int(rows).arg(x).arg(limit);
    launch.arg(mid).arg(damage.at).arg(damage.site).run()?;
    let name = match m.down.form {
        Form::Bf16 => "experts_down_tiles_bf16",
        Form::Fp8 => "experts_down_tiles_fp8",
        Form::Int4 => "experts_down_tiles_int4",
        Form::Mxfp4 => "experts_down_tiles_mxfp4",
        form @ Form::F32 => return Err(no_kernel("a gated MLP", form)),
    };
    let launch = Launch::new(d, name, [m.down.rows().div_ceil(OUTPUTS), most, 1], 128).shared(shared(m.down.form, EXPERT_ROWS));
    let launch = launch.moves(moved(m.down.stored(), split_bytes(inter) + hidden * 4));
    launch.arg(m.down.raw).arg(m.down.strides).arg(tiles).int(rows).arg(mid).arg(out).run()
}

/// The delta rule over rows that are kept.
pub(super) fn kda_scan(d: &Device, s: KdaShape, state: u64, delta: Delta, rows: usize, query: u64, out: u64) -> Done {
    let width = s.heads * s.dim;
    let moved = Moved::bytes(2 * width * s.dim * 4 + rows * (5 * width + s.heads) * 4);
    let launch = Launch::new(d, "kda_scan", [s.heads, s.dim.div_ceil(16), 1], 128).moves(moved);
    launch.arg(state).arg(delta).int(rows).arg(query).arg(out).run()
}

pub(super) fn mla_prefill(d: &Device, s: MlaShape, (absorbed, cache): (u64, u64), rows: usize, context: u64) -> Done {
    let (heads, rope) = (s.heads.heads as usize, s.heads.rope as usize);
    let fixed = rows * heads * (2 * s.latent + rope) * 4;
    let moved = Moved { per_token: (s.latent + rope) as u64 * 4, ..Moved::bytes(fixed) };
    let launch = Launch::new(d, "mla_prefill", [rows.div_ceil(2), heads.div_ceil(4), 1], 128).moves(moved);
    let launch = launch.arg(absorbed).arg(cache).arg(s.base).int(rows).int(heads).int(s.latent).int(rope);
    launch.arg(s.scale()).arg(context).run()
}
