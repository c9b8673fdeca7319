//! The feed-forward part of a layer: one gated MLP, or router, routed experts and shared expert.
//!
//! Each distinct expert of a pass is multiplied once, with all rows that chose it. Its outputs are kept by
//! row and rank and added up in rank order, then the shared expert: the order, and so the bits, of a
//! row's sum do not depend on which other rows are in the pass.

use super::config::ModelConfig;
use super::laps::Laps;
use super::matmul::matmul;
use super::norm::{Damage, check, swiglu};
use super::router::Routing;
use super::routing_plan::RoutingPlan;
use super::scratch::fit;
use super::weights::{GatedMlp, MoeWeights};
use crate::trace::Component;
use rayon::prelude::*;

/// Multiplications below which one thread does all experts.
const PARALLEL: usize = 1 << 22;

/// Intermediate rows of a pass.
#[derive(Debug, Default)]
pub(super) struct MoeScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
    logits: Vec<f32>,
    biased: Vec<f32>,
    ids: Vec<u16>,
    weights: Vec<f32>,
    /// Rows in the order of their experts, `[rows * k, H]`, and the experts' outputs for them.
    gathered: Vec<f32>,
    outputs: Vec<f32>,
    /// For each expert the first of its slots, `[E + 1]`.
    starts: Vec<usize>,
    /// The slot of each row and rank, `[rows, k]`, and the row of each slot.
    slots: Vec<usize>,
    slot_rows: Vec<usize>,
}

/// The rows' choice, in rank order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chosen<'a> {
    /// `[rows, k]`
    pub ids: &'a [u16],
    /// `[rows, k]`, normalised and scaled.
    pub weights: &'a [f32],
}

/// Experts by a plan instead of the router's choice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planned<'a> {
    pub plan: &'a RoutingPlan,
    /// Number of the layer.
    pub layer: usize,
    /// Position of the pass's first row in the text.
    pub first: usize,
}

/// SwiGLU limits of a layer, 0 = none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limits {
    pub expert: f32,
    pub shared: f32,
}

/// `down(silu(gate(x)) * up(x))` for the rows of `x`; never clamped in a dense layer.
///
/// # Errors
/// Where a number stopped being finite.
pub(super) fn dense(mlp: &GatedMlp, x: &[f32], out: &mut [f32], s: &mut MoeScratch) -> Result<(), Damage> {
    let size = x.len() / mlp.gate.cols() * mlp.gate.rows();
    gated(mlp, x, out, 0.0, (fit(&mut s.gate, size), fit(&mut s.up, size)))
}

fn gated(mlp: &GatedMlp, x: &[f32], out: &mut [f32], limit: f32, (gate, up): (&mut [f32], &mut [f32])) -> Result<(), Damage> {
    matmul(&mlp.gate, x, gate);
    matmul(&mlp.up, x, up);
    // An infinity would vanish in the clamp.
    check(gate, "gate_proj output")?;
    check(up, "up_proj output")?;
    for (g, u) in gate.iter_mut().zip(up.iter()) {
        *g = swiglu(*g, *u, limit);
    }
    matmul(&mlp.down, gate, out);
    Ok(())
}

/// Routes and runs the rows of `x` (normed, `[rows, H]`); `out` is `[rows, H]`. What is `planned` replaces the router's choice.
/// Router, experts and shared expert are a lap each.
///
/// # Errors
/// Where a number stopped being finite.
pub(super) fn moe<'s>(
    w: &MoeWeights,
    config: &ModelConfig,
    limits: Limits,
    planned: Option<Planned<'_>>,
    (x, out): (&[f32], &mut [f32]),
    s: &'s mut MoeScratch,
    laps: &mut Laps<'_>,
) -> Result<Chosen<'s>, Damage> {
    let hidden = config.hidden;
    let rows = x.len() / hidden;
    let (experts, k) = (w.experts.len(), config.experts_per_token);
    let logits = fit(&mut s.logits, rows * experts);
    matmul(&w.router, x, logits);
    // A score that is not a number would only keep its expert from being chosen.
    check(logits, "router logits")?;
    let routing = Routing::new(config);
    let biased = fit(&mut s.biased, experts);
    let ids = fit(&mut s.ids, rows * k);
    let weights = fit(&mut s.weights, rows * k);
    for row in 0..rows {
        let at = row * k..(row + 1) * k;
        let (scores, ids, weights) = (&mut logits[row * experts..][..experts], &mut ids[at.clone()], &mut weights[at]);
        routing.choose(scores, &w.bias, biased, ids, weights);
    }
    if let Some(planned) = planned {
        planned.plan.choose(planned.layer, planned.first, ids);
        for row in 0..rows {
            let at = row * k..(row + 1) * k;
            routing.adopt(&logits[row * experts..][..experts], &mut ids[at.clone()], &mut weights[at]);
        }
    }

    // Count, then place: rows in order within each expert.
    let starts = fit(&mut s.starts, experts + 1);
    starts.fill(0);
    ids.iter().for_each(|id| starts[usize::from(*id) + 1] += 1);
    for e in 0..experts {
        starts[e + 1] += starts[e];
    }
    let slots = fit(&mut s.slots, rows * k);
    let slot_rows = fit(&mut s.slot_rows, rows * k);
    for (i, id) in ids.iter().enumerate() {
        let next = &mut starts[usize::from(*id)];
        slots[i] = *next;
        slot_rows[*next] = i / k;
        *next += 1;
    }
    laps.lap(Component::Router);
    // Each start has moved to the next expert's: expert e has slots ends[e-1]..ends[e].
    let ends = &*starts;
    let gathered = fit(&mut s.gathered, rows * k * hidden);
    for (to, row) in gathered.chunks_exact_mut(hidden).zip(slot_rows.iter()) {
        to.copy_from_slice(&x[row * hidden..][..hidden]);
    }

    let inter = config.expert_inter;
    let gate = fit(&mut s.gate, (rows * k * inter).max(rows * config.shared_inter));
    let up = fit(&mut s.up, (rows * k * inter).max(rows * config.shared_inter));
    let outputs = fit(&mut s.outputs, rows * k * hidden);
    let begin = |e: usize| if e == 0 { 0 } else { ends[e - 1] };
    if rows * k * 3 * hidden * inter < PARALLEL || rayon::current_num_threads() == 1 {
        for (e, &to) in ends[..experts].iter().enumerate() {
            let from = begin(e);
            if from < to {
                let inner = (&mut gate[from * inter..to * inter], &mut up[from * inter..to * inter]);
                gated(
                    &w.experts[e],
                    &gathered[from * hidden..to * hidden],
                    &mut outputs[from * hidden..to * hidden],
                    limits.expert,
                    inner,
                )?;
            }
        }
    } else {
        let (mut gate, mut up, mut outputs) = (&mut *gate, &mut *up, &mut *outputs);
        let mut jobs = Vec::with_capacity(experts.min(rows * k));
        for (e, &to) in ends[..experts].iter().enumerate() {
            let from = begin(e);
            if from < to {
                let inner = (take(&mut gate, (to - from) * inter), take(&mut up, (to - from) * inter));
                jobs.push((e, &gathered[from * hidden..to * hidden], take(&mut outputs, (to - from) * hidden), inner));
            }
        }
        let run = |(e, x, out, inner): (usize, &[f32], &mut [f32], _)| gated(&w.experts[e], x, out, limits.expert, inner);
        jobs.into_par_iter().with_max_len(1).try_for_each(run)?;
    }

    laps.lap(Component::Experts);
    // The shared expert's output goes to `out`; the routed sum is formed first and comes before it.
    let size = rows * config.shared_inter;
    gated(&w.shared, x, out, limits.shared, (&mut gate[..size], &mut up[..size]))?;
    laps.lap(Component::Shared);
    for (row, out) in out.chunks_exact_mut(hidden).enumerate() {
        let (slots, weights) = (&slots[row * k..][..k], &weights[row * k..][..k]);
        combine(slots, weights, outputs, out);
    }
    laps.lap(Component::Experts);
    Ok(Chosen { ids, weights })
}

/// Cuts the first `size` elements off `rest`.
fn take<'a>(rest: &mut &'a mut [f32], size: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(rest).split_at_mut(size);
    *rest = tail;
    head
}

/// `out = (((w_0 o_0 + w_1 o_1) + w_2 o_2) ...) + out`.
fn combine(slots: &[usize], weights: &[f32], outputs: &[f32], out: &mut [f32]) {
    const BLOCK: usize = 32;
    let hidden = out.len();
    let mut sums = [0.0_f32; BLOCK];
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let sums = &mut sums[..out.len()];
        sums.fill(0.0);
        for (slot, w) in slots.iter().zip(weights) {
            let from = &outputs[slot * hidden + block * BLOCK..][..sums.len()];
            sums.iter_mut().zip(from).for_each(|(s, o)| *s += w * o);
        }
        out.iter_mut().zip(sums.iter()).for_each(|(o, s)| *o += *s);
    }
}
