//! The launches of one layer and of a pass's end, in the order of the CPU engine.

use super::buffer::Buffer;
use super::device::Device;
use super::ops::{self, Choice, Heads, KdaFilters, MlaShape};
use super::planned::PlannedRows;
use super::ring::Shape;
use super::site::{Part, Site};
use super::state::KdaStates;
use super::weights::{DeviceAttention, DeviceGated, DeviceKda, DeviceLayer, DeviceMla, DeviceMlp};
use super::workspace::Workspace;
use crate::engine::moe::Limits;
use crate::engine::{EngineError, ModelConfig};
use crate::trace::Component;

type Done = Result<(), EngineError>;

/// A pass of up to `PASS_ROWS` rows on one side.
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
        match &w.mlp {
            DeviceMlp::Dense(m) => {
                self.label(Some(layer), Component::Dense);
                self.gated(layer, m, 0.0)
            }
            DeviceMlp::Moe(m) => {
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

    /// Copies the residual rows, with the branch that waits to be added, to `to`.
    pub fn copy_rows(&self, layer: usize, to: u64) -> Done {
        self.label(Some(layer), Component::Draft);
        ops::layer_output(self.device, self.ws.residual.at(0), self.ws.branch.at(0), self.rows * self.config.hidden, to)
    }

    fn kda(&self, layer: usize, w: &DeviceKda, states: &KdaStates, number: usize) -> Done {
        let (d, ws, rows) = (self.device, self.ws, self.rows);
        let shape = states.shape;
        let width = shape.heads * shape.dim;
        let x = ws.normed.at(0);
        let [forget, gate, read, mixed] = [0, 1, 2, 3].map(|i: usize| ws.wide[i].at(0));
        let fresh = states.raw(number, shape.taps - 1 + self.pending);
        for (i, matrix) in [&w.q, &w.k, &w.v].into_iter().enumerate() {
            ops::dense(d, matrix, x, rows, fresh + (i * width * 4) as u64, 3 * width)?;
        }
        ops::dense(d, &w.f, x, rows, forget, width)?;
        ops::dense(d, &w.g, x, rows, gate, width)?;
        ops::dense(d, &w.b, x, rows, ws.beta.at(0), shape.heads)?;
        let filters = KdaFilters {
            q: w.q_conv.at(0),
            k: w.k_conv.at(0),
            v: w.v_conv.at(0),
            dt_bias: w.dt_bias.at(0),
            decay_scale: w.decay_scale.at(0),
        };
        let (raw, span) = (states.raw(number, 0), (self.pending, rows));
        let damage = self.site(layer, Part::Attention);
        ops::kda_mix(d, shape, filters, (raw, forget, ws.beta.at(0)), span, states.rows(number), damage)?;
        ops::kda_delta(d, shape, states.state(number), states.delta(number), span, states.rows(number).query, read)?;
        ops::kda_out(d, shape, read, gate, w.out_norm.at(0), self.config.rms_eps, rows, mixed, damage)?;
        ops::dense(d, &w.out, mixed, rows, ws.branch.at(0), self.config.hidden)
    }

    fn mla(&self, layer: usize, w: &DeviceMla, cache: u64) -> Done {
        let (d, ws, c, rows) = (self.device, self.ws, self.config, self.rows);
        let int = |n: usize| n as i32;
        let heads = Heads { heads: int(c.heads), nope: int(c.qk_nope_head_dim), rope: int(c.qk_rope_head_dim), v: int(c.v_head_dim) };
        let shape = MlaShape { heads, latent: c.kv_lora_rank, turns: self.turns, base: self.span };
        let (x, query, damage) = (ws.normed.at(0), ws.query.at(0), self.site(layer, Part::Attention));
        let [gate, mixed] = [0, 1].map(|i: usize| ws.wide[i].at(0));
        let outputs = c.heads * c.qk_head_dim();
        match &w.query_low {
            None => ops::dense(d, &w.query, x, rows, query, outputs)?,
            Some((norm, second)) => {
                let [low, normed] = [0, 1].map(|i: usize| ws.low[i].at(0));
                let rank = w.query.rows();
                ops::dense(d, &w.query, x, rows, low, rank)?;
                ops::rmsnorm(d, low, 0, norm.at(0), c.rms_eps, (rows, rank), normed, damage)?;
                ops::dense(d, second, normed, rows, query, outputs)?;
            }
        }
        ops::dense(d, &w.kv_a, x, rows, ws.compressed.at(0), c.kv_lora_rank + c.qk_rope_head_dim)?;
        ops::dense(d, &w.gate, x, rows, gate, c.mla_gate_rows())?;
        ops::mla_append(d, shape, ws.compressed.at(0), w.kv_norm.at(0), c.rms_eps, rows, cache, damage)?;
        ops::mla_query(d, shape, &w.kv_b, query, rows, ws.absorbed.at(0))?;
        ops::mla_attend(d, shape, (ws.absorbed.at(0), cache), (rows, self.splits), (ws.parts.at(0), ws.stats.at(0)), ws.context.at(0))?;
        ops::mla_value(d, shape, &w.kv_b, ws.context.at(0), (gate, c.mla_gate_rows()), rows, mixed, damage)?;
        ops::dense(d, &w.out, mixed, rows, ws.branch.at(0), c.hidden)
    }

    /// Router, plan and the experts' outputs by slot.
    fn routed(&self, layer: usize, (router, bias): (&super::matrix::DeviceMatrix, u64), m: &DeviceGated, ring: usize, limit: f32) -> Done {
        let (d, ws, c, rows) = (self.device, self.ws, self.config, self.rows);
        let (x, k) = (ws.normed.at(0), c.experts_per_token);
        self.label(Some(layer), Component::Router);
        ops::dense(d, router, x, rows, ws.router.at(0), c.experts)?;
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
        let planned = self.planned.map_or(0, |planned| planned.layer(ring));
        ops::route(d, ws.router.at(0), bias, choice, planned, rows, (ids, weights), self.site(layer, Part::Router))?;
        ops::moe_plan(d, ids, rows, k, ws.plan(), ws.slot_of.at(0))?;
        self.label(Some(layer), Component::Experts);
        // An expert is chosen once a row, and there are no more distinct ones than choices or experts.
        let most = (rows * k).min(c.experts);
        let mlp = ops::Mlp { gate: &m.gate, up: &m.up, down: &m.down };
        ops::experts(d, &mlp, ws.plan(), (most, rows, rows * k), x, limit, (ws.mid.at(0), ws.routed.at(0)), self.site(layer, Part::Experts))
    }

    /// A gated MLP outside the routing, over all rows.
    fn gated(&self, layer: usize, m: &DeviceGated, limit: f32) -> Done {
        let ws = self.ws;
        let mlp = ops::Mlp { gate: &m.gate, up: &m.up, down: &m.down };
        let out = (ws.mid.at(0), ws.branch.at(0));
        ops::experts(
            self.device,
            &mlp,
            ws.one(self.span),
            (1, self.rows, self.rows),
            ws.normed.at(0),
            limit,
            out,
            self.site(layer, Part::Mlp),
        )
    }

    /// Brings the results to the host: logits and hidden rows where they go there, then what was chosen.
    pub fn bring(&self, shape: Shape) -> Done {
        self.label(None, Component::Head);
        self.ws.bring(shape, self.config)?;
        self.label(None, Component::Router);
        self.ws.bring_choices(shape.taken, self.config)
    }

    /// The final norm over all rows and the head over the last `wanted` of them; logits begin at 0.
    pub fn output(&self, norm: u64, head: &super::matrix::DeviceMatrix, wanted: usize) -> Done {
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
