//! The kernels of a block drafter's attention, one function a kernel, as `ops` has the others.

#![expect(clippy::too_many_arguments, reason = "a kernel has the arguments that it has")]

use super::device::Device;
use super::launch::Launch;
use super::moved::Moved;
use super::ops::Damage;
use crate::engine::EngineError;

type Done = Result<(), EngineError>;

/// Sizes of a block drafter's attention over a pass of `rows` rows, and where the angles' frequencies and the first position are.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub rows: usize,
    /// Whether a row sees only the rows before it.
    pub causal: bool,
    pub turns: u64,
    pub base: u64,
}

/// Largest head of `kernels/block_attend.cu`.
pub(super) const MAX_BLOCK_HEAD: usize = 256;

/// `heads` heads of each row, normed and rotated; with `into_cache` they go to the rows of `out` from the first position on.
pub(super) fn block_heads(
    d: &Device,
    s: BlockShape,
    heads: usize,
    (raw, weight): (u64, u64),
    eps: f32,
    into_cache: bool,
    out: u64,
    damage: Damage,
) -> Done {
    let launch = Launch::new(d, "block_heads", [heads, s.rows, 1], 64).shared(8).arg(raw).arg(weight).arg(eps).arg(s.turns).arg(s.base);
    launch.arg(i32::from(into_cache)).int(s.dim).arg(out).arg(damage.at).arg(damage.site).run()
}

/// `width` numbers of each row to the rows of `cache` from the first position on.
pub(super) fn block_values(d: &Device, s: BlockShape, raw: u64, width: usize, cache: u64) -> Done {
    Launch::new(d, "block_values", [width.div_ceil(256), s.rows, 1], 256).arg(raw).arg(s.base).int(width).arg(cache).run()
}

/// `splits` are enough for the last row; `parts` and `stats` have room for them.
pub(super) fn block_attend(
    d: &Device,
    s: BlockShape,
    queries: u64,
    (keys, values): (u64, u64),
    splits: usize,
    (parts, stats): (u64, u64),
    merged: u64,
) -> Done {
    let (causal, scale) = (i32::from(s.causal), 1.0 / (s.dim as f32).sqrt());
    let launch = Launch::new(d, "block_attend", [splits, s.heads.div_ceil(4), s.rows], 128).arg(queries).arg(keys).arg(values);
    let launch = launch.arg(s.base).arg(causal).int(s.heads).int(s.kv_heads).int(s.dim).arg(scale);
    launch.arg(parts).arg(stats).run()?;
    let launch = Launch::new(d, "block_merge", [s.heads, s.rows, 1], 64).arg(parts).arg(stats).arg(s.base).arg(causal);
    launch.int(s.dim).int(splits).arg(merged).run()
}

/// How sure the drafter is of each of `drafts` drafts before the sigmoid, by its row of `width` numbers and the `rank` numbers of the token
/// before it.
pub(super) fn confidence(
    d: &Device,
    drafts: usize,
    (rows, width): (u64, usize),
    (embedded, rank): (u64, usize),
    (proj, bias): (u64, f32),
    out: u64,
) -> Done {
    let moved = Moved::bytes((drafts + 1) * (width + rank) * 4);
    let launch = Launch::new(d, "confidence", [drafts, 1, 1], 128).shared(16).moves(moved).arg(rows).int(width).arg(embedded).int(rank);
    launch.arg(proj).arg(bias).arg(out).run()
}
