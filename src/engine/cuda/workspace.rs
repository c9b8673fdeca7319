//! Device memory of a pass: rows between kernels, reused by every layer.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::device::Device;
use super::long::{self, LongRows};
use super::long_ops::split_bytes;
use super::ops::{Damage, Plan, SPLIT};
use super::pinned::Pinned;
use super::ring::{Ring, Shape, Taken};
use super::session::HostRows;
use super::site::{Site, refuse_damage};
use crate::engine::{EngineError, ModelConfig};
use std::ops::Range;
use std::rc::Rc;

/// Rows of a pass of one side (target or draft module): of a window's, or of a long one's.
#[derive(Debug)]
pub(super) struct Workspace {
    /// Rows that there is room for.
    pub rows: usize,
    /// What the host says of a pass: its tokens, the first position, two numbers of the plan of all rows (0 and the rows), and [`PASS_ROWS`]
    /// uniform numbers in doubles.
    inputs: Buffer,
    /// The same on the host, and behind it the draft module's hidden rows.
    staged: Pinned,
    /// Hidden rows, logits and ring on the host.
    results: Pinned,
    pub residual: Buffer,
    pub normed: Buffer,
    pub branch: Buffer,
    /// The draft module's joined input, `[rows, 2 H]`.
    pub joined: Buffer,
    /// Rows after the final norm; the draft module reads the target's where they are.
    pub hidden: Rc<Buffer>,
    pub logits: Buffer,
    /// The argmax of each row.
    pub best: Buffer,
    /// Gate, forget, read and mixed rows of attention, `[rows, widest]` each.
    pub wide: [Buffer; 4],
    pub beta: Buffer,
    pub low: [Buffer; 2],
    pub query: Buffer,
    pub compressed: Buffer,
    pub absorbed: Buffer,
    pub parts: Buffer,
    pub stats: Buffer,
    pub context: Buffer,
    pub router: Buffer,
    pub mid: Buffer,
    pub routed: Buffer,
    /// What the routers chose: it leaves the device in one copy. See [`Ring`].
    ring: Buffer,
    ring_at: Ring,
    /// Splits of the longest context.
    pub most_splits: usize,
    pub slot_of: Buffer,
    plan: [Buffer; 4],
    one: AllRows,
    /// Of a workspace of long passes.
    pub long: Option<LongRows>,
}

/// The plan of a gated MLP outside the routing: one expert, all rows. Only its end depends on the pass.
#[derive(Debug)]
pub(super) struct AllRows([Buffer; 4]);

impl AllRows {
    pub fn new(device: &Rc<Device>) -> Result<Self, EngineError> {
        let identity: Vec<i32> = (0..PASS_ROWS as i32).collect();
        Ok(Self([device.upload(&[1_i32])?, device.upload(&[0_i32])?, device.upload(&[0_i32, 0])?, device.upload(&identity)?]))
    }

    /// The plan, whose end the pass's own inputs must say.
    pub fn plan(&self) -> Plan {
        plan_of(&self.0)
    }
}

fn plan_of([count, expert, start, slot_row]: &[Buffer; 4]) -> Plan {
    Plan { count: count.at(0), expert: expert.at(0), start: start.at(0), slot_row: slot_row.at(0) }
}

/// Bytes of [`Workspace::inputs`] for passes of `rows` rows.
fn input_bytes(rows: usize) -> usize {
    uniforms_at(rows) + PASS_ROWS * 8
}

/// Where its uniform numbers begin, and before them where the first position is.
fn uniforms_at(rows: usize) -> usize {
    span_at(rows) + 16
}

fn span_at(rows: usize) -> usize {
    (rows * 4).next_multiple_of(8)
}

/// Whether passes of so many rows are long.
fn is_long(rows: usize) -> bool {
    rows > PASS_ROWS
}

/// Most rows of a pass that have logits: of a prompt's only the last has.
fn most_logits(rows: usize) -> usize {
    if is_long(rows) { 1 } else { rows }
}

/// Bytes of each buffer, in the order in which [`Workspace`] takes them.
struct Sizes {
    row: usize,
    wide: usize,
    query: usize,
    absorbed: usize,
    splits: usize,
    mid: usize,
    slots: usize,
}

fn sizes(config: &ModelConfig, rows: usize, tokens: usize) -> Sizes {
    let k = config.experts_per_token;
    let inter = |n: usize| if is_long(rows) { split_bytes(n) } else { n * 4 };
    // Long passes do not split the cache.
    let split_rows = if is_long(rows) { 0 } else { rows };
    let wide = config.kda_width().max(config.heads * config.v_head_dim).max(config.mla_gate_rows());
    Sizes {
        row: rows * config.hidden * 4,
        wide: rows * wide * 4,
        query: rows * config.heads * config.qk_head_dim() * 4,
        absorbed: rows * config.heads * (config.kv_lora_rank + config.qk_rope_head_dim) * 4,
        splits: split_rows * config.heads * tokens.div_ceil(SPLIT),
        mid: rows * (k * inter(config.expert_inter)).max(inter(config.shared_inter)).max(inter(config.dense_inter)),
        slots: rows * k,
    }
}

/// Bytes of a workspace with choices of `routed` layers, to within a few hundred; `recurrent`: of a model's layers, not of its draft module.
pub(super) fn planned_bytes(config: &ModelConfig, (rows, routed): (usize, usize), tokens: usize, recurrent: bool) -> usize {
    let s = sizes(config, rows, tokens);
    7 * s.row
        + input_bytes(rows)
        + most_logits(rows) * config.vocab * 4
        + rows * (1 + config.experts + config.heads + config.kv_lora_rank + config.qk_rope_head_dim) * 4
        + 4 * s.wide
        + 2 * rows * config.q_lora_rank.unwrap_or(1) * 4
        + s.query
        + s.absorbed
        + s.splits * (config.kv_lora_rank + 2) * 4
        + rows * config.heads * config.kv_lora_rank * 4
        + s.mid
        + s.slots * (config.hidden * 4 + 16 + routed * 6)
        + if is_long(rows) { long::planned_bytes(config, rows, recurrent) } else { 0 }
}

/// Bytes of page-locked memory of a workspace with choices of `routed` layers.
pub(super) fn planned_pinned(config: &ModelConfig, (rows, routed): (usize, usize)) -> usize {
    let row = rows * config.hidden * 4;
    input_bytes(rows) + 2 * row + most_logits(rows) * config.vocab * 4 + Ring::new(routed, rows * config.experts_per_token).end
}

impl Workspace {
    /// Rows for windows in timelines of up to `tokens` tokens, and choices of `routed` layers.
    pub fn new(device: &Rc<Device>, config: &ModelConfig, routed: usize, tokens: usize) -> Result<Self, EngineError> {
        Self::with_rows(device, config, (PASS_ROWS, routed), tokens, None)
    }

    /// Rows for long passes in such timelines, if they can have any; `recurrent`: of a model's layers, not of its draft module.
    pub fn long(
        device: &Rc<Device>,
        config: &ModelConfig,
        routed: usize,
        tokens: usize,
        recurrent: bool,
    ) -> Result<Option<Self>, EngineError> {
        let Some(rows) = long::longest_pass(tokens) else { return Ok(None) };
        let long = LongRows::new(device, config, rows, recurrent)?;
        Self::with_rows(device, config, (rows, routed), tokens, Some(long)).map(Some)
    }

    fn with_rows(
        device: &Rc<Device>,
        config: &ModelConfig,
        (rows, routed): (usize, usize),
        tokens: usize,
        long: Option<LongRows>,
    ) -> Result<Self, EngineError> {
        let s = sizes(config, rows, tokens);
        let room = |bytes: usize| device.room(bytes);
        let wide = || device.room(s.wide);
        let low = || device.room(rows * config.q_lora_rank.unwrap_or(1) * 4);
        let ints = |n: usize| device.room(n * 4);
        let ring_at = Ring::new(routed, s.slots);
        Ok(Self {
            rows,
            inputs: room(input_bytes(rows))?,
            staged: Pinned::new(device, input_bytes(rows) + s.row)?,
            results: Pinned::new(device, s.row + most_logits(rows) * config.vocab * 4 + ring_at.end)?,
            residual: room(s.row)?,
            normed: room(s.row)?,
            branch: room(s.row)?,
            joined: room(2 * s.row)?,
            hidden: Rc::new(room(s.row)?),
            logits: room(most_logits(rows) * config.vocab * 4)?,
            best: ints(rows)?,
            wide: [wide()?, wide()?, wide()?, wide()?],
            beta: ints(rows * config.heads)?,
            low: [low()?, low()?],
            query: room(s.query)?,
            compressed: ints(rows * (config.kv_lora_rank + config.qk_rope_head_dim))?,
            absorbed: room(s.absorbed)?,
            parts: room(s.splits * config.kv_lora_rank * 4)?,
            stats: room(s.splits * 8)?,
            context: room(rows * config.heads * config.kv_lora_rank * 4)?,
            router: ints(rows * config.experts)?,
            mid: room(s.mid)?,
            routed: room(s.slots * config.hidden * 4)?,
            ring: device.zeros(ring_at.end)?,
            ring_at,
            most_splits: tokens.div_ceil(SPLIT).max(1),
            slot_of: ints(s.slots)?,
            plan: [ints(1)?, ints(s.slots)?, ints(s.slots + 1)?, ints(s.slots)?],
            one: AllRows::new(device)?,
            long,
        })
    }

    /// Says what is to be done for a pass of `rows` rows at `position`.
    pub fn begin(&self, tokens: &[u32], position: usize) -> Result<(), EngineError> {
        self.staged.put(0, tokens)?;
        self.staged.put(span_at(self.rows), &[position as u32, 0, tokens.len() as u32])
    }

    /// Puts the numbers beside it that choices are drawn with.
    pub fn begin_uniforms(&self, uniforms: &[f64]) -> Result<(), EngineError> {
        self.staged.put(uniforms_at(self.rows), uniforms)
    }

    /// Puts the draft module's hidden rows beside it.
    pub fn begin_hidden(&self, hidden: &[f32]) -> Result<(), EngineError> {
        self.staged.put(input_bytes(self.rows), hidden)
    }

    /// Lets the stream take over what [`Workspace::begin`] said.
    pub fn send(&self) -> Result<(), EngineError> {
        self.staged.send(0, input_bytes(self.rows), &self.inputs)
    }

    /// Lets the stream take over `numbers` numbers of hidden rows.
    pub fn send_hidden(&self, numbers: usize) -> Result<(), EngineError> {
        self.staged.send(input_bytes(self.rows), numbers * 4, &self.hidden)
    }

    /// Lets the stream bring a pass's hidden rows and logits to the host, as its ending says.
    pub fn bring(&self, shape: Shape, config: &ModelConfig) -> Result<(), EngineError> {
        let [hidden, logits, _] = self.results_at(config);
        self.results.receive(hidden, shape.hidden_rows() * config.hidden * 4, &self.hidden)?;
        self.results.receive(logits, shape.logit_rows() * config.vocab * 4, &self.logits)
    }

    /// Lets the stream bring the damage note, what was chosen and the routers' choices, as far as they are taken, by one copy.
    pub fn bring_choices(&self, taken: Taken, config: &ModelConfig) -> Result<(), EngineError> {
        let [_, _, ring] = self.results_at(config);
        self.results.receive(ring, self.ring_at.wanted(taken), &self.ring)
    }

    /// Where hidden rows, logits and ring are in the results.
    fn results_at(&self, config: &ModelConfig) -> [usize; 3] {
        let logits = self.rows * config.hidden * 4;
        [0, logits, logits + most_logits(self.rows) * config.vocab * 4]
    }

    /// Fails with the first place at which a number of what was waited for was not finite.
    pub fn refuse_damage(&self, config: &ModelConfig) -> Result<(), EngineError> {
        let [_, _, ring] = self.results_at(config);
        let mut damage = Vec::new();
        self.results.append(ring, 1, &mut damage)?;
        refuse_damage(damage[0], || self.ring.write(0, &[0_i32]), Site::describe)
    }

    /// Appends the results of a pass that was waited for.
    ///
    /// # Errors
    /// With the first place at which a number of the pass was not finite.
    pub fn collect(&self, shape: Shape, config: &ModelConfig, out: &mut HostRows) -> Result<(), EngineError> {
        let [hidden, logits, _] = self.results_at(config);
        self.refuse_damage(config)?;
        self.results.append(hidden, shape.hidden_rows() * config.hidden, &mut out.hidden)?;
        self.results.append(logits, shape.logit_rows() * config.vocab, &mut out.logits)?;
        for layer in 0..out.ids.len() {
            self.collect_choices(shape.taken, layer, 0..shape.rows, config, (&mut out.ids[layer], &mut out.weights[layer]))?;
        }
        match out.logits.iter().all(|v| v.is_finite()) {
            true => Ok(()),
            false => Err(EngineError::NotFinite { what: "logits".to_owned() }),
        }
    }

    /// Appends the choices of some rows of routed layer number `layer` of a pass that was waited for, as far as they were taken.
    pub fn collect_choices(
        &self,
        taken: Taken,
        layer: usize,
        rows: Range<usize>,
        config: &ModelConfig,
        (ids, weights): (&mut Vec<u16>, &mut Vec<f32>),
    ) -> Result<(), EngineError> {
        let ([_, _, ring], k) = (self.results_at(config), config.experts_per_token);
        let (first, count) = (layer * self.ring_at.slots + rows.start * k, rows.len() * k);
        if taken != Taken::Nothing {
            self.results.append(ring + Ring::IDS + first * 2, count, ids)?;
        }
        if taken == Taken::IdsAndWeights {
            self.results.append(ring + self.ring_at.weights + first * 4, count, weights)?;
        }
        Ok(())
    }

    /// Accepted drafts, the token after them, and the window's first `rows` tokens, of a pass that was waited for.
    pub fn collect_verdict(&self, rows: usize, config: &ModelConfig) -> Result<(usize, u32, Vec<u32>), EngineError> {
        let [_, _, ring] = self.results_at(config);
        let (mut head, mut window) = (Vec::new(), Vec::new());
        self.results.append(ring + Ring::VERDICT, 2, &mut head)?;
        self.results.append(ring + Ring::VERDICT + 12, rows, &mut window)?;
        // No more than there are, whatever a device may say.
        Ok(((head[0] as usize).min(rows.saturating_sub(1)), head[1], window))
    }

    /// The probabilities of `drafts` drafts that were waited for.
    pub fn collect_probs(&self, drafts: usize, config: &ModelConfig, probs: &mut Vec<f32>) -> Result<(), EngineError> {
        let [_, _, ring] = self.results_at(config);
        self.results.append(ring + Ring::PROBS, drafts, probs)
    }

    /// The splits that are launched for when `tokens` tokens are seen: few different numbers, so that graphs are few. Blocks beyond a
    /// row's last token leave at once.
    pub fn splits(&self, tokens: usize) -> usize {
        tokens.div_ceil(SPLIT).max(1).next_power_of_two().min(self.most_splits)
    }

    /// The pass's tokens.
    pub fn tokens(&self) -> u64 {
        self.inputs.at(0)
    }

    /// The pass's first position, and behind it 0 and the number of its rows.
    pub fn span(&self) -> u64 {
        self.inputs.at(span_at(self.rows))
    }

    /// The numbers that choices are drawn with.
    pub fn uniforms(&self) -> u64 {
        self.inputs.at(uniforms_at(self.rows))
    }

    /// Where `kernels/accept.cu` leaves a verdict, and where it says how many rows are kept.
    pub fn verdict(&self) -> (u64, u64) {
        (self.ring.at(Ring::VERDICT), self.ring.at(Ring::VERDICT + 8))
    }

    /// Where the probability of draft `draft` of a chain goes.
    pub fn prob(&self, draft: usize) -> u64 {
        self.ring.at(Ring::PROBS + draft * 4)
    }

    /// Ids and gate weights of the choices of routed layer number `layer`.
    pub fn choices(&self, layer: usize) -> (u64, u64) {
        let first = layer * self.ring_at.slots;
        (self.ring.at(Ring::IDS + first * 2), self.ring.at(self.ring_at.weights + first * 4))
    }

    /// The plan that the router's choice makes.
    pub fn plan(&self) -> Plan {
        plan_of(&self.plan)
    }

    /// The plan of one expert and all rows of the pass whose [`Workspace::span`] is at `span`.
    pub fn one(&self, span: u64) -> Plan {
        Plan { start: span + 4, ..self.one.plan() }
    }

    /// Where `site` notes damage.
    pub fn damage(&self, site: Site) -> Damage {
        Damage { at: self.ring.at(0), site: site.code() }
    }
}
