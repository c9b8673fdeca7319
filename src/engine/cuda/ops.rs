//! One function a kernel: its grid, its block, and its arguments in the order of its source. Sizes are numbers of elements,
//! addresses are device addresses; a kernel's meaning and its bytes are in the head of its source.

#![expect(clippy::too_many_arguments, reason = "a kernel has the arguments that it has")]

use super::PASS_ROWS;
use super::device::Device;
use super::launch::Launch;
use super::matrix::{DeviceMatrix, Form, RawMatrix};
use super::moved::Moved;
use crate::engine::EngineError;
use crate::engine::made::Recipe;

type Done = Result<(), EngineError>;

/// Tokens of a split of the cache: `SP_SPLIT` of `kernels/sp_splits.cuh`.
pub(super) const SPLIT: usize = 64;

/// Where a kernel notes a number that is not finite, and as what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Damage {
    pub at: u64,
    pub site: i32,
}

/// `SpPlan` of `kernels/experts.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub count: u64,
    pub expert: u64,
    pub start: u64,
    pub slot_row: u64,
}

/// `SpKdaRows` of `kernels/kda_mix.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct KdaRows {
    pub query: u64,
    pub keys: u64,
    pub values: u64,
    pub decays: u64,
    pub betas: u64,
}

/// `SpDelta` of `kernels/kda_delta.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Delta {
    pub heads: i32,
    pub dim: i32,
    pub keys: u64,
    pub values: u64,
    pub decays: u64,
    pub betas: u64,
}

/// `SpHeads` of `kernels/mla_query.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub heads: i32,
    pub nope: i32,
    pub rope: i32,
    pub v: i32,
}

/// Threads of a block of `fill`, and words of eight bytes that each makes.
const FILL: (usize, usize) = (256, 16);

/// Makes a tensor's bytes at `out`. More blocks than a grid has are never needed: 2^31 of them make 2^46 bytes.
pub(super) fn fill(d: &Device, out: u64, recipe: &Recipe) -> Done {
    if recipe.bytes == 0 {
        return Ok(());
    }
    let (rule, parameter) = recipe.rule.code();
    let blocks = recipe.bytes.div_ceil(8 * FILL.0 * FILL.1);
    let launch = Launch::new(d, "fill", [blocks, 1, 1], FILL.0 as u32);
    launch.arg(out).arg(recipe.bytes as u64).arg(recipe.key).arg(rule).arg(parameter).run()
}

/// Reads `bytes` bytes, a multiple of 16, and nothing else; `blocks` for each multiprocessor keep it busy.
pub(super) fn stream_read(d: &Device, from: u64, bytes: usize, seen: u64) -> Done {
    const BLOCKS: usize = 8;
    let blocks = d.units().map_or(1, |units| units as usize) * BLOCKS;
    let launch = Launch::new(d, "stream_read", [blocks, 1, 1], 256).moves(Moved::bytes(bytes));
    launch.arg(from).arg(bytes as u64 / 16).arg(seen).run()
}

pub(super) fn no_kernel(what: &str, form: Form) -> EngineError {
    EngineError::Device(format!("CUDA: there is no kernel for {what} in {form:?}; use --backend cpu"))
}

pub(super) fn rmsnorm(
    d: &Device,
    residual: u64,
    branch: u64,
    weight: u64,
    eps: f32,
    (rows, width): (usize, usize),
    out: u64,
    damage: Damage,
) -> Done {
    let row = width * 4 * if branch == 0 { 2 } else { 4 };
    let launch = Launch::new(d, "rmsnorm", [rows, 1, 1], 256).shared(32).moves(Moved::bytes(rows * row + width * 4));
    launch.arg(residual).arg(branch).arg(weight).arg(eps).int(width).arg(out).arg(damage.at).arg(damage.site).run()
}

pub(super) fn embed(d: &Device, table: &DeviceMatrix, tokens: u64, rows: usize, out: u64, damage: Damage) -> Done {
    let (name, element) = match table.form {
        Form::F32 => ("embed_f32", 4),
        Form::Bf16 => ("embed_bf16", 2),
        form => return Err(no_kernel("embeddings", form)),
    };
    let moved = Moved::bytes(rows * table.cols() * (element + 4));
    Launch::new(d, name, [rows, 1, 1], 128).moves(moved).arg(table.raw).arg(tokens).arg(out).arg(damage.at).arg(damage.site).run()
}

/// Projections of one launch, `SP_PROJECTIONS` of `kernels/dense.cu`.
const PROJECTIONS: usize = 6;

/// `SpProjections` of `kernels/dense.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawProjections {
    w: [RawMatrix; PROJECTIONS],
    out: [u64; PROJECTIONS],
    stride: [i32; PROJECTIONS],
    first: [i32; PROJECTIONS],
    count: i32,
}

/// A projection of a pass's rows: `out[n * stride ..] = W x[n]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Projection<'w> {
    pub w: &'w DeviceMatrix,
    pub out: u64,
    pub stride: usize,
}

/// `out[n * stride ..] = W x[n]` for dense rows of x.
pub(super) fn dense(d: &Device, w: &DeviceMatrix, x: u64, rows: usize, out: u64, stride: usize) -> Done {
    project(d, x, rows, &[Projection { w, out, stride }])
}

/// Projections of the same rows. Those in the same format are one launch.
pub(super) fn project(d: &Device, x: u64, rows: usize, projections: &[Projection<'_>]) -> Done {
    let mut forms: Vec<Form> = Vec::new();
    for p in projections {
        if !forms.contains(&p.w.form) {
            forms.push(p.w.form);
            let alike: Vec<_> = projections.iter().filter(|other| other.w.form == p.w.form).collect();
            alike.chunks(PROJECTIONS).try_for_each(|some| launch_projections(d, x, rows, some))?;
        }
    }
    Ok(())
}

fn launch_projections(d: &Device, x: u64, rows: usize, projections: &[&Projection<'_>]) -> Done {
    let Some(Projection { w: any, .. }) = projections.first() else { return Ok(()) };
    let name = match (any.form, rows) {
        (Form::F32, 1) => "dense_f32_r1",
        (Form::F32, ..=4) => "dense_f32_r4",
        (Form::F32, _) => "dense_f32_r16",
        (Form::Bf16, 1) => "dense_bf16_r1",
        (Form::Bf16, ..=4) => "dense_bf16_r4",
        (Form::Bf16, _) => "dense_bf16_r16",
        (Form::Fp8, 1) => "dense_fp8_r1",
        (Form::Fp8, ..=4) => "dense_fp8_r4",
        (Form::Fp8, _) => "dense_fp8_r16",
        (Form::Int4, 1) => "dense_int4_r1",
        (Form::Int4, ..=4) => "dense_int4_r4",
        (Form::Int4, _) => "dense_int4_r16",
        (Form::Mxfp4, 1) => "dense_mxfp4_r1",
        (Form::Mxfp4, ..=4) => "dense_mxfp4_r4",
        (Form::Mxfp4, _) => "dense_mxfp4_r16",
    };
    // Four outputs a warp. Few warps are spread one a block, so that each multiprocessor has some.
    let warps: usize = projections.iter().map(|p| p.w.rows().div_ceil(4)).sum();
    let per_block = if warps < SPREAD * d.units().map_or(1, |units| units as usize) { 1 } else { 4 };
    let none = RawMatrix { codes: 0, scales: 0, rows: 0, cols: 0, row_shift: 0, col_shift: 0 };
    let mut raw =
        RawProjections { w: [none; PROJECTIONS], out: [0; PROJECTIONS], stride: [0; PROJECTIONS], first: [0; PROJECTIONS], count: 0 };
    let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let (mut blocks, mut bytes) = (0, 0);
    for (m, p) in projections.iter().enumerate() {
        (raw.w[m], raw.out[m], raw.stride[m], raw.first[m]) = (p.w.raw, p.out, int(p.stride), int(blocks));
        blocks += p.w.rows().div_ceil(4 * per_block);
        bytes += p.w.stored() + rows * (p.w.cols() + p.w.rows()) * 4;
    }
    raw.count = int(projections.len());
    let launch = Launch::new(d, name, [blocks, 1, 1], 32 * per_block as u32).moves(Moved::bytes(bytes));
    launch.arg(raw).arg(x).int(any.cols()).int(rows).run()
}

/// Warps a multiprocessor below which a launch of [`project`] has one a block.
const SPREAD: usize = 16;

/// The numbers of a router's choice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub experts: usize,
    pub k: usize,
    pub groups: usize,
    pub groups_kept: usize,
    pub scaling: f32,
    pub normalise: bool,
}

/// `planned` are the experts of a plan, `[rows, k]`, or 0.
pub(super) fn route(
    d: &Device,
    logits: u64,
    bias: u64,
    c: Choice,
    planned: u64,
    rows: usize,
    (ids, weights): (u64, u64),
    damage: Damage,
) -> Done {
    let chosen = rows * c.k * if planned == 0 { 6 } else { 8 };
    let moved = Moved::bytes((rows + 1) * c.experts * 4 + chosen);
    let launch = Launch::new(d, "route", [rows, 1, 1], 32).shared((2 * c.experts + c.groups) * 4).moves(moved);
    let launch = launch.arg(logits).arg(bias).int(c.experts).int(c.k).int(c.groups).int(c.groups_kept).arg(c.scaling);
    launch.arg(i32::from(c.normalise)).arg(planned).arg(ids).arg(weights).arg(damage.at).arg(damage.site).run()
}

pub(super) fn moe_plan(d: &Device, ids: u64, rows: usize, k: usize, plan: Plan, slot_of: u64) -> Done {
    let launch =
        Launch::new(d, "moe_plan", [1, 1, 1], 512).shared(rows * k * 8).moves(Moved::bytes(rows * k * 18)).arg(ids).int(rows).int(k);
    launch.arg(plan.count).arg(plan.expert).arg(plan.start).arg(plan.slot_row).arg(slot_of).run()
}

/// Gate, up and down of experts.
pub(super) struct Mlp<'w> {
    pub gate: &'w DeviceMatrix,
    pub up: &'w DeviceMatrix,
    pub down: &'w DeviceMatrix,
}

/// `groups` is the most distinct experts that there can be, `rows` the most rows of one, `slots` the choices in all.
pub(super) fn experts(
    d: &Device,
    m: &Mlp<'_>,
    plan: Plan,
    (groups, rows, slots): (usize, usize, usize),
    x: u64,
    limit: f32,
    (mid, out): (u64, u64),
    damage: Damage,
) -> Done {
    let few = rows <= 4;
    let name = match (m.gate.form, few) {
        _ if m.up.form != m.gate.form => return Err(no_kernel("gate and up of different formats", m.up.form)),
        (Form::Bf16, true) => "experts_gate_up_bf16_r4",
        (Form::Bf16, false) => "experts_gate_up_bf16_r16",
        (Form::Fp8, true) => "experts_gate_up_fp8_r4",
        (Form::Fp8, false) => "experts_gate_up_fp8_r16",
        (Form::Int4, true) => "experts_gate_up_int4_r4",
        (Form::Int4, false) => "experts_gate_up_int4_r16",
        (Form::Mxfp4, true) => "experts_gate_up_mxfp4_r4",
        (Form::Mxfp4, false) => "experts_gate_up_mxfp4_r16",
        (form @ Form::F32, _) => return Err(no_kernel("a gated MLP", form)),
    };
    let rows_moved = slots * (m.gate.cols() + m.gate.rows()) * 4;
    // A plan of one expert has a union of 1 whatever the routers choose.
    let moved = |stored: usize| match groups {
        1 => Moved::bytes(stored + rows_moved),
        _ => Moved { per_expert: stored as u64, ..Moved::bytes(rows_moved) },
    };
    let launch = Launch::new(d, name, [m.gate.rows().div_ceil(8), groups, 1], 128).moves(moved(m.gate.stored() + m.up.stored()));
    let launch = launch.arg(m.gate.raw).arg(m.up.raw).arg(m.gate.strides).arg(m.up.strides).arg(plan).arg(x).arg(limit);
    launch.arg(mid).arg(damage.at).arg(damage.site).run()?;
    let name = match (m.down.form, few) {
        (Form::Bf16, true) => "experts_down_bf16_r4",
        (Form::Bf16, false) => "experts_down_bf16_r16",
        (Form::Fp8, true) => "experts_down_fp8_r4",
        (Form::Fp8, false) => "experts_down_fp8_r16",
        (Form::Int4, true) => "experts_down_int4_r4",
        (Form::Int4, false) => "experts_down_int4_r16",
        (Form::Mxfp4, true) => "experts_down_mxfp4_r4",
        (Form::Mxfp4, false) => "experts_down_mxfp4_r16",
        (form @ Form::F32, _) => return Err(no_kernel("a gated MLP", form)),
    };
    let launch = Launch::new(d, name, [m.down.rows().div_ceil(16), groups, 1], 128).moves(moved(m.down.stored()));
    launch.arg(m.down.raw).arg(m.down.strides).arg(plan).arg(mid).arg(out).run()
}

pub(super) fn moe_combine(d: &Device, routed: u64, weights: u64, slot_of: u64, (rows, k, hidden): (usize, usize, usize), out: u64) -> Done {
    let moved = Moved::bytes(rows * (hidden * 4 * (k + 2) + k * 8));
    let launch = Launch::new(d, "moe_combine", [hidden.div_ceil(256), rows, 1], 256).moves(moved);
    launch.arg(routed).arg(weights).arg(slot_of).int(k).int(hidden).arg(out).run()
}

/// Addresses of a KDA layer's small weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct KdaFilters {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub dt_bias: u64,
    pub decay_scale: u64,
}

/// Heads, their size, taps of the convolution and the gate's bound.
#[derive(Debug, Clone, Copy)]
pub(super) struct KdaShape {
    pub heads: usize,
    pub dim: usize,
    pub taps: usize,
    pub bound: f32,
}

pub(super) fn kda_mix(
    d: &Device,
    s: KdaShape,
    f: KdaFilters,
    (raw, forget, beta): (u64, u64, u64),
    (first, rows): (usize, usize),
    to: KdaRows,
    damage: Damage,
) -> Done {
    let moved = Moved::bytes(s.heads * s.dim * 4 * (rows * (3 * s.taps + 5) + 3 * s.taps + 1));
    let launch = Launch::new(d, "kda_mix", [s.heads, rows, 1], 128).shared((2 * s.dim + 4) * 4).moves(moved);
    let launch = launch.arg(raw).arg(f.q).arg(f.k).arg(f.v).arg(forget).arg(f.dt_bias).arg(f.decay_scale).arg(s.bound).arg(beta);
    launch.int(s.heads).int(s.dim).int(s.taps).int(first).arg(to).arg(damage.at).arg(damage.site).run()
}

pub(super) fn kda_delta(d: &Device, s: KdaShape, state: u64, delta: Delta, (first, rows): (usize, usize), query: u64, out: u64) -> Done {
    let width = s.heads * s.dim;
    let moved = Moved::bytes(width * s.dim * 4 + (first + rows) * (4 * width + s.heads) * 4 + rows * width * 4);
    let launch = Launch::new(d, "kda_delta", [s.heads, s.dim.div_ceil(16), 1], 128).moves(moved);
    launch.arg(state).arg(delta).int(first).int(rows).arg(query).arg(out).run()
}

/// Strides between layers are numbers of F32s.
pub(super) fn kda_commit(
    d: &Device,
    s: KdaShape,
    layers: usize,
    (state, state_stride): (u64, usize),
    delta: Delta,
    (row_stride, beta_stride): (usize, usize),
    keep: u64,
) -> Done {
    let launch = Launch::new(d, "kda_commit", [s.heads, s.dim.div_ceil(16), layers], 128);
    launch.arg(state).arg(state_stride as u64).arg(delta).arg(row_stride as u64).arg(beta_stride as u64).arg(keep).run()
}

pub(super) fn kda_shift(d: &Device, s: KdaShape, layers: usize, (raw, raw_stride): (u64, usize), keep: u64) -> Done {
    let width = 3 * s.heads * s.dim;
    let launch = Launch::new(d, "kda_shift", [width.div_ceil(256), layers, 1], 256);
    launch.arg(raw).arg(raw_stride as u64).int(width).int(s.taps).arg(keep).run()
}

pub(super) fn kda_out(
    d: &Device,
    s: KdaShape,
    read: u64,
    gate: u64,
    weight: u64,
    eps: f32,
    rows: usize,
    mixed: u64,
    damage: Damage,
) -> Done {
    let moved = Moved::bytes(rows * s.heads * s.dim * 12 + s.dim * 4);
    let launch = Launch::new(d, "kda_out", [s.heads, rows, 1], 128).shared(16).moves(moved);
    launch.arg(read).arg(gate).arg(weight).arg(eps).int(s.heads).int(s.dim).arg(mixed).arg(damage.at).arg(damage.site).run()
}

/// Sizes of latent attention, and where the angles' frequencies and the pass's first position are.
#[derive(Debug, Clone, Copy)]
pub(super) struct MlaShape {
    pub heads: Heads,
    pub latent: usize,
    pub turns: u64,
    pub base: u64,
}

impl MlaShape {
    fn rope(&self) -> usize {
        self.heads.rope as usize
    }

    fn heads(&self) -> usize {
        self.heads.heads as usize
    }

    /// What scores are multiplied by.
    pub fn scale(&self) -> f32 {
        1.0 / ((self.heads.nope + self.heads.rope) as f32).sqrt()
    }

    /// Bytes of a token in the cache.
    fn token(&self) -> usize {
        (self.latent + self.rope()) * 4
    }

    /// Bytes of a head's `size` of the rows of `kv_b`, which has those of keys and values.
    fn share(&self, kv_b: &DeviceMatrix, size: i32) -> usize {
        kv_b.stored() * size as usize / (self.heads.nope + self.heads.v).max(1) as usize
    }
}

pub(super) fn mla_append(d: &Device, s: MlaShape, compressed: u64, norm: u64, eps: f32, rows: usize, cache: u64, damage: Damage) -> Done {
    let moved = Moved::bytes(rows * s.token() * 2 + s.latent * 4);
    let launch = Launch::new(d, "mla_append", [rows, 1, 1], 128).shared(16).moves(moved);
    let launch = launch.arg(compressed).arg(norm).arg(eps).arg(s.turns).arg(s.base).int(s.latent).int(s.rope());
    launch.arg(cache).arg(damage.at).arg(damage.site).run()
}

pub(super) fn mla_query(d: &Device, s: MlaShape, kv_b: &DeviceMatrix, query: u64, rows: usize, absorbed: u64) -> Done {
    let name = match (kv_b.form, rows > PASS_ROWS) {
        (Form::Bf16, false) => "mla_query_bf16",
        (Form::Fp8, false) => "mla_query_fp8",
        (Form::Bf16, true) => "mla_query_rows_bf16",
        (Form::Fp8, true) => "mla_query_rows_fp8",
        (form, _) => return Err(no_kernel("kv_b_proj", form)),
    };
    let row = s.heads() * (s.heads.nope as usize + s.latent + 2 * s.rope()) * 4;
    let moved = Moved::bytes(s.share(kv_b, s.heads.nope) + rows * row);
    let grid = [s.latent.div_ceil(128), s.heads(), rows.div_ceil(PASS_ROWS)];
    let launch = Launch::new(d, name, grid, 128).shared(4 * rows.min(PASS_ROWS) * 128 * 4).moves(moved);
    launch.arg(kv_b.raw).arg(s.heads).arg(query).arg(s.turns).arg(s.base).int(rows).arg(absorbed).run()
}

/// `splits` are enough for the last row; `parts` and `stats` have room for them.
pub(super) fn mla_attend(
    d: &Device,
    s: MlaShape,
    (absorbed, cache): (u64, u64),
    (rows, splits): (usize, usize),
    (parts, stats): (u64, u64),
    merged: u64,
) -> Done {
    let (query, parts_moved) = (rows * s.heads() * s.token(), rows * s.heads() * splits * (s.latent + 2) * 4);
    let moved = Moved { per_token: s.token() as u64, ..Moved::bytes(query + parts_moved) };
    let launch = Launch::new(d, "mla_attend", [splits, s.heads().div_ceil(4), rows], 128).moves(moved).arg(absorbed).arg(cache).arg(s.base);
    launch.int(s.heads()).int(s.latent).int(s.rope()).arg(s.scale()).int(splits).arg(parts).arg(stats).run()?;
    let moved = Moved::bytes(parts_moved + rows * s.heads() * s.latent * 4);
    let launch = Launch::new(d, "mla_merge", [s.heads(), rows, 1], 128).moves(moved);
    launch.arg(parts).arg(stats).arg(s.base).int(s.latent).int(splits).arg(merged).run()
}

pub(super) fn mla_value(
    d: &Device,
    s: MlaShape,
    kv_b: &DeviceMatrix,
    context: u64,
    (gate, gates): (u64, usize),
    rows: usize,
    out: u64,
    damage: Damage,
) -> Done {
    let name = match (kv_b.form, rows > PASS_ROWS) {
        (Form::Bf16, false) => "mla_value_bf16",
        (Form::Fp8, false) => "mla_value_fp8",
        (Form::Bf16, true) => "mla_value_rows_bf16",
        (Form::Fp8, true) => "mla_value_rows_fp8",
        (form, _) => return Err(no_kernel("kv_b_proj", form)),
    };
    let row = (s.heads() * (s.latent + s.heads.v as usize) + gates) * 4;
    let moved = Moved::bytes(s.share(kv_b, s.heads.v) + rows * row);
    let grid = [(s.heads.v as usize).div_ceil(8), s.heads(), rows.div_ceil(PASS_ROWS)];
    let launch = Launch::new(d, name, grid, 128).moves(moved);
    let launch = launch.arg(kv_b.raw).arg(s.heads.heads).arg(s.heads.nope).arg(s.heads.v).arg(context).arg(gate).int(gates).int(rows);
    launch.arg(out).arg(damage.at).arg(damage.site).run()
}

/// `out[n * stride ..] = a[n] + b[n]` for rows of `width` numbers; `out` may be `a` when its stride is the width.
pub(super) fn add_rows(d: &Device, (a, b): (u64, u64), (rows, width): (usize, usize), out: u64, stride: usize) -> Done {
    let launch = Launch::new(d, "add_rows", [width.div_ceil(256), rows, 1], 256).moves(Moved::bytes(rows * width * 12));
    launch.arg(a).arg(b).int(width).arg(out).int(stride).run()
}

pub(super) fn mtp_join(
    d: &Device,
    (embedded, hidden): (u64, u64),
    (token_norm, hidden_norm): (u64, u64),
    eps: f32,
    (rows, width): (usize, usize),
    out: u64,
) -> Done {
    let launch = Launch::new(d, "mtp_join", [rows, 1, 1], 256).shared(32).moves(Moved::bytes(rows * width * 16 + width * 8));
    launch.arg(embedded).arg(hidden).arg(token_norm).arg(hidden_norm).arg(eps).int(width).arg(out).run()
}
