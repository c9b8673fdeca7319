//! The launches of one layer and of a pass's end, in the order of the CPU engine.

use super::buffer::Buffer;
use super::device::Device;
use super::long::LongRows;
use super::long_ops::{self, EXPERT_ROWS, Tiles, most_tiles};
use super::matrix::DeviceMatrix;
use super::ops::{self, Choice, Heads, KdaFilters, MlaShape, Projection};
use super::planned::PlannedRows;
use super::ring::{Shape, Taken};
use super::site::{Part, Site};
use super::state::KdaStates;
use super::weights::{DeviceAttention, DeviceGated, DeviceKda, DeviceLayer, DeviceMla, DeviceMlp};
use super::workspace::Workspace;
use crate::engine::moe::Limits;
use crate::engine::{EngineError, ModelConfig};
use crate::trace::Component;

type Done = Result<(), EngineError>;

/// A pass of one side. One of more than `PASS_ROWS` rows has a workspace that has [`LongRows`].
pub(super) struct Pass<'a> {
    pub device: &'a Device,
    pub config: &'a ModelConfig,
    pub ws: &'a Workspace,
    pub turns: u64,
    pub rows: usize,
    /// Splits of the cache that are enough for its last row.
    pub splits: usize,
    /// Pending rows before this pass.
    pub pending: usize,
    /// Where its first position is, and behind that 0 and the number of its rows.
    pub span: u64,
    /// Experts that a plan chooses instead of the routers.
    pub planned: Option<&'a PlannedRows>,
}

/// What a layer remembers.
pub(super) enum LayerMemory<'a> {
    /// The states of all KDA layers, and which of them this is.
    Kda(&'a KdaStates, usize),
    /// Its cache.
    Mla(u64),
}

impl Pass<'_> {
    fn site(&self, layer: usize, part: Part) -> ops::Damage {
        self.ws.damage(Site { layer, part })
    }

    /// What the next launches work for.
    pub fn label(&self, layer: Option<usize>, component: Component) {
        self.device.label(layer, component);
    }

    /// The residual rows, with the branch `waiting` added, normed.
    fn norm(&self, layer: usize, waiting: u64, weight: &Buffer, part: Part) -> Done {
        let (ws, size) = (self.ws, (self.rows, self.config.hidden));
        self.label(Some(layer), Component::Norm);
        let (residual, normed) = (ws.residual.at(0), ws.normed.at(0));
        ops::rmsnorm(self.device, residual, waiting, weight.at(0), self.config.rms_eps, size, normed, self.site(layer, part))
    }

    /// One layer's attention over the residual rows. `branch`: whether a branch of the layer before waits to be added. Leaves its output
    /// as the branch.
    pub fn attention(&self, layer: usize, w: &DeviceLayer, memory: &LayerMemory<'_>, branch: bool) -> Done {
        self.norm(layer, if branch { self.ws.branch.at(0) } else { 0 }, &w.input_norm, Part::Input)?;
        match (&w.attention, memory) {
            (DeviceAttention::Kda(w), LayerMemory::Kda(states, number)) => {
                self.label(Some(layer), Component::Kda);
                self.kda(layer, w, states, *number)
            }
            (DeviceAttention::Mla(w), LayerMemory::Mla(cache)) => {
                self.label(Some(layer), Component::Mla);
                self.mla(layer, w, *cache)
            }
            _ => Err(EngineError::Request(format!("layer {layer}: the session belongs to another model"))),
        }
    }

    /// The layer's feed-forward part, after its attention. `ring` is the number of this layer's choices, when it has any. Leaves its
    /// output as the branch.
    pub fn feed_forward(&self, layer: usize, w: &DeviceLayer, ring: usize, limits: Limits) -> Done {
        let ws = self.ws;
        self.norm(layer, ws.branch.at(0), &w.post_norm, Part::PostNorm)?;
        // Router, experts and shared expert read the same rows.
        let split = || self.input(ws.normed.at(0), self.config.hidden);
        match &w.mlp {
            DeviceMlp::Dense(m) => {
                self.label(Some(layer), Component::Dense);
                split()?;
                self.gated(layer, m, 0.0)
            }
            DeviceMlp::Moe(m) => {
                self.label(Some(layer), Component::Router);
                split()?;
                self.routed(layer, (&m.router, m.bias.at(0)), &m.experts, ring, limits.expert)?;
                self.label(Some(layer), Component::Shared);
                self.gated(layer, &m.shared, limits.shared)?;
                self.label(Some(layer), Component::Experts);
                let (k, hidden) = (self.config.experts_per_token, self.config.hidden);
                let (_, weights) = ws.choices(ring);
                ops::moe_combine(self.device, ws.routed.at(0), weights, ws.slot_of.at(0), (self.rows, k, hidden), ws.branch.at(0))
            }
        }
    }

    /// Copies the residual rows, with the branch that waits to be added, to a place whose rows are `stride` numbers apart.
    pub fn copy_rows(&self, layer: usize, (to, stride): (u64, usize)) -> Done {
        self.label(Some(layer), Component::Draft);
        ops::add_rows(self.device, (self.ws.residual.at(0), self.ws.branch.at(0)), (self.rows, self.config.hidden), to, stride)
    }

    /// What a long pass has beside the workspace's rows.
    fn long(&self) -> Option<&LongRows> {
        self.ws.long.as_ref()
    }

    /// Makes `x`, `[rows, cols]`, the input of the [`Pass::dense`] after it.
    pub fn input(&self, x: u64, cols: usize) -> Done {
        match self.long() {
            Some(long) => long_ops::split_rows(self.device, x, (self.rows, cols), long.split.at(0)),
            None => Ok(()),
        }
    }

    /// `out[n * stride ..] = W x[n]` for the rows at `x` that the last [`Pass::input`] has named.
    pub fn dense(&self, w: &DeviceMatrix, x: u64, out: u64, stride: usize) -> Done {
        match self.long() {
            Some(long) => long_ops::dense(self.device, w, (x, long.split.at(0)), self.rows, out, stride),
            None => ops::dense(self.device, w, x, self.rows, out, stride),
        }
    }

    /// Several projections of those rows.
    fn project(&self, x: u64, projections: &[Projection<'_>]) -> Done {
        match self.long() {
            Some(_) => projections.iter().try_for_each(|p| self.dense(p.w, x, p.out, p.stride)),
            None => ops::project(self.device, x, self.rows, projections),
        }
    }

    fn kda(&self, layer: usize, w: &DeviceKda, states: &KdaStates, number: usize) -> Done {
        let (d, ws, rows) = (self.device, self.ws, self.rows);
        let shape = states.shape;
        let width = shape.heads * shape.dim;
        let x = ws.normed.at(0);
        let [forget, gate, read, mixed] = [0, 1, 2, 3].map(|i: usize| ws.wide[i].at(0));
        let long = self.long().map(LongRows::kda).transpose()?;
        if let Some(long) = long {
            long.begin(d, states.raw(number, 0))?;
        }
        let fresh = long.map_or_else(|| states.raw(number, shape.taps - 1 + self.pending), |long| long.raw(shape.taps - 1));
        self.input(x, self.config.hidden)?;
        let raw = |i: usize| fresh + (i * width * 4) as u64;
        self.project(
            x,
            &[
                Projection { w: &w.q, out: raw(0), stride: 3 * width },
                Projection { w: &w.k, out: raw(1), stride: 3 * width },
                Projection { w: &w.v, out: raw(2), stride: 3 * width },
                Projection { w: &w.f, out: forget, stride: width },
                Projection { w: &w.g, out: gate, stride: width },
                Projection { w: &w.b, out: ws.beta.at(0), stride: shape.heads },
            ],
        )?;
        let filters = KdaFilters {
            q: w.q_conv.at(0),
            k: w.k_conv.at(0),
            v: w.v_conv.at(0),
            dt_bias: w.dt_bias.at(0),
            decay_scale: w.decay_scale.at(0),
        };
        let (state, damage) = (states.state(number), self.site(layer, Part::Attention));
        if let Some(long) = long {
            ops::kda_mix(d, shape, filters, (long.raw(0), forget, ws.beta.at(0)), (0, rows), long.rows(), damage)?;
            long_ops::kda_scan(d, shape, state, long.delta(), rows, long.rows().query, read)?;
            long.end(d, rows, states.raw(number, 0))?;
        } else {
            let (raw, span) = (states.raw(number, 0), (self.pending, rows));
            ops::kda_mix(d, shape, filters, (raw, forget, ws.beta.at(0)), span, states.rows(number), damage)?;
            ops::kda_delta(d, shape, state, states.delta(number), span, states.rows(number).query, read)?;
        }
        ops::kda_out(d, shape, read, gate, w.out_norm.at(0), self.config.rms_eps, rows, mixed, damage)?;
        self.input(mixed, width)?;
        self.dense(&w.out, mixed, ws.branch.at(0), self.config.hidden)
    }

    fn mla(&self, layer: usize, w: &DeviceMla, cache: u64) -> Done {
        let (d, ws, c, rows) = (self.device, self.ws, self.config, self.rows);
        let int = |n: usize| n as i32;
        let heads = Heads { heads: int(c.heads), nope: int(c.qk_nope_head_dim), rope: int(c.qk_rope_head_dim), v: int(c.v_head_dim) };
        let shape = MlaShape { heads, latent: c.kv_lora_rank, turns: self.turns, base: self.span };
        let (x, query, damage) = (ws.normed.at(0), ws.query.at(0), self.site(layer, Part::Attention));
        let [gate, mixed] = [0, 1].map(|i: usize| ws.wide[i].at(0));
        let outputs = c.heads * c.qk_head_dim();
        self.input(x, c.hidden)?;
        let (rank, low) = (w.query.rows(), [0, 1].map(|i: usize| ws.low[i].at(0)));
        let first = if w.query_low.is_some() { (low[0], rank) } else { (query, outputs) };
        self.project(
            x,
            &[
                Projection { w: &w.query, out: first.0, stride: first.1 },
                Projection { w: &w.kv_a, out: ws.compressed.at(0), stride: c.kv_lora_rank + c.qk_rope_head_dim },
                Projection { w: &w.gate, out: gate, stride: c.mla_gate_rows() },
            ],
        )?;
        if let Some((norm, second)) = &w.query_low {
            ops::rmsnorm(d, low[0], 0, norm.at(0), c.rms_eps, (rows, rank), low[1], damage)?;
            self.input(low[1], rank)?;
            self.dense(second, low[1], query, outputs)?;
        }
        ops::mla_append(d, shape, ws.compressed.at(0), w.kv_norm.at(0), c.rms_eps, rows, cache, damage)?;
        ops::mla_query(d, shape, &w.kv_b, query, rows, ws.absorbed.at(0))?;
        let (read, context) = ((ws.absorbed.at(0), cache), ws.context.at(0));
        match self.long() {
            Some(_) => long_ops::mla_prefill(d, shape, read, rows, context)?,
            None => ops::mla_attend(d, shape, read, (rows, self.splits), (ws.parts.at(0), ws.stats.at(0)), context)?,
        }
        ops::mla_value(d, shape, &w.kv_b, context, (gate, c.mla_gate_rows()), rows, mixed, damage)?;
        self.input(mixed, c.heads * c.v_head_dim)?;
        self.dense(&w.out, mixed, ws.branch.at(0), c.hidden)
    }

    /// Router, plan and the experts' outputs by slot.
    fn routed(&self, layer: usize, (router, bias): (&DeviceMatrix, u64), m: &DeviceGated, ring: usize, limit: f32) -> Done {
        let (d, ws, c, rows) = (self.device, self.ws, self.config, self.rows);
        let (x, k) = (ws.normed.at(0), c.experts_per_token);
        self.label(Some(layer), Component::Router);
        self.dense(router, x, ws.router.at(0), c.experts)?;
        let groups = c.groups.max(1);
        let choice = Choice {
            experts: c.experts,
            k,
            groups,
            groups_kept: c.groups_kept.min(groups),
            scaling: c.routed_scaling,
            normalise: c.norm_topk,
        };
        let (ids, weights) = ws.choices(ring);
        let planned = self.planned.map_or(0, |planned| planned.layer(ring, rows));
        ops::route(d, ws.router.at(0), bias, choice, planned, rows, (ids, weights), self.site(layer, Part::Router))?;
        let mlp = ops::Mlp { gate: &m.gate, up: &m.up, down: &m.down };
        let (slots, out, damage) = (rows * k, (ws.mid.at(0), ws.routed.at(0)), self.site(layer, Part::Experts));
        if let Some(long) = self.long() {
            let tiles = long.tiles(ws.plan().slot_row);
            long_ops::moe_sort(d, ids, (rows, k, c.experts), tiles, ws.slot_of.at(0))?;
            self.label(Some(layer), Component::Experts);
            let most = most_tiles(slots, c.experts);
            return long_ops::experts(d, &mlp, tiles, (most, rows, slots), long.split.at(0), limit, out, damage);
        }
        ops::moe_plan(d, ids, rows, k, ws.plan(), ws.slot_of.at(0))?;
        self.label(Some(layer), Component::Experts);
        // An expert is chosen once a row, and there are no more distinct ones than choices or experts.
        ops::experts(d, &mlp, ws.plan(), (slots.min(c.experts), rows, slots), x, limit, out, damage)
    }

    /// A gated MLP outside the routing, over all rows.
    fn gated(&self, layer: usize, m: &DeviceGated, limit: f32) -> Done {
        let (d, ws, rows) = (self.device, self.ws, self.rows);
        let mlp = ops::Mlp { gate: &m.gate, up: &m.up, down: &m.down };
        let (out, damage) = ((ws.mid.at(0), ws.branch.at(0)), self.site(layer, Part::Mlp));
        if let Some(long) = self.long() {
            let size = (rows.div_ceil(EXPERT_ROWS), rows, rows);
            return long_ops::experts(d, &mlp, Tiles::default(), size, long.split.at(0), limit, out, damage);
        }
        ops::experts(d, &mlp, ws.one(self.span), (1, rows, rows), ws.normed.at(0), limit, out, damage)
    }

    /// Brings the results to the host: logits and hidden rows where they go there, then what was chosen.
    pub fn bring(&self, shape: Shape) -> Done {
        self.label(None, Component::Head);
        self.ws.bring(shape, self.config)?;
        // The verdict comes with the choices; without them the copy is the verdict's.
        self.label(None, if shape.taken == Taken::Nothing { Component::Sampling } else { Component::Tap });
        self.ws.bring_choices(shape.taken, self.config)
    }

    /// The final norm over all rows and the head over the last `wanted` of them; logits begin at 0.
    pub fn output(&self, norm: u64, head: &DeviceMatrix, wanted: usize) -> Done {
        let (ws, c) = (self.ws, self.config);
        let damage = self.site(0, Part::Output);
        self.label(None, Component::Norm);
        ops::rmsnorm(self.device, ws.residual.at(0), ws.branch.at(0), norm, c.rms_eps, (self.rows, c.hidden), ws.hidden.at(0), damage)?;
        if wanted == 0 {
            return Ok(());
        }
        self.label(None, Component::Head);
        let first = (self.rows - wanted) * c.hidden;
        ops::dense(self.device, head, ws.hidden.float(first), wanted, ws.logits.at(0), c.vocab)
    }
}
