//! Device memory of a pass: rows between kernels, reused by every layer.

use super::PASS_ROWS;
use super::device::{Buffer, Device};
use super::ops::{Damage, Plan, SPLIT};
use super::pinned::Pinned;
use super::session::HostRows;
use crate::engine::{EngineError, ModelConfig};
use std::rc::Rc;

/// Rows of a pass of one side (target or draft module).
#[derive(Debug)]
pub(super) struct Workspace {
    /// What the host says of a pass: [`PASS_ROWS`] tokens, the first position, and two numbers of the plan of all rows (0 and the rows).
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
    pub hidden: Buffer,
    pub logits: Buffer,
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
}

/// The plan of a gated MLP outside the routing: one expert, all rows. Only its end depends on the pass.
#[derive(Debug)]
pub(super) struct AllRows([Buffer; 4]);

impl AllRows {
    pub fn new(device: &Rc<Device>) -> Result<Self, EngineError> {
        let identity: Vec<i32> = (0..PASS_ROWS as i32).collect();
        Ok(Self([device.upload(&[1_i32])?, device.upload(&[0_i32])?, device.upload(&[0_i32, 0])?, device.upload(&identity)?]))
    }

    /// Says how many rows the pass has; waits for the passes before.
    pub fn begin(&self, rows: usize) -> Result<(), EngineError> {
        self.0[2].write(4, &[rows as i32])
    }

    pub fn plan(&self) -> Plan {
        plan_of(&self.0)
    }
}

/// Where things are in the ring, in bytes: the damage note, then of every routed layer `[layers, PASS_ROWS, k]` ids (u16), then gate
/// weights.
#[derive(Debug, Clone, Copy)]
struct Ring {
    layers: usize,
    /// Choices of one layer.
    slots: usize,
    weights: usize,
    end: usize,
}

impl Ring {
    const IDS: usize = 16;

    fn new(layers: usize, slots: usize) -> Self {
        let weights = Self::IDS + (layers * slots * 2).next_multiple_of(16);
        Self { layers, slots, weights, end: weights + layers * slots * 4 }
    }

    /// Bytes from the beginning that hold what is wanted.
    fn wanted(self, taken: Taken) -> usize {
        match taken {
            Taken::Nothing => Self::IDS,
            Taken::Ids => self.weights,
            Taken::IdsAndWeights => self.end,
        }
    }
}

/// What a pass's tap takes of the routers' choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Taken {
    Nothing,
    Ids,
    IdsAndWeights,
}

/// Everything but its inputs that a pass's launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub rows: usize,
    /// Rows with logits.
    pub wanted: usize,
    /// Pending rows before it.
    pub pending: usize,
    /// Splits of the cache that are launched for.
    pub splits: usize,
    pub taken: Taken,
    /// Whether a plan chooses the experts.
    pub planned: bool,
}

fn plan_of([count, expert, start, slot_row]: &[Buffer; 4]) -> Plan {
    Plan { count: count.at(0), expert: expert.at(0), start: start.at(0), slot_row: slot_row.at(0) }
}

/// Bytes of [`Workspace::inputs`].
const INPUT_BYTES: usize = (PASS_ROWS + 4) * 4;

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
    let wide = config.kda_width().max(config.heads * config.v_head_dim).max(config.mla_gate_rows());
    Sizes {
        row: rows * config.hidden * 4,
        wide: rows * wide * 4,
        query: rows * config.heads * config.qk_head_dim() * 4,
        absorbed: rows * config.heads * (config.kv_lora_rank + config.qk_rope_head_dim) * 4,
        splits: rows * config.heads * tokens.div_ceil(SPLIT),
        mid: rows * (k * config.expert_inter).max(config.shared_inter).max(config.dense_inter) * 4,
        slots: rows * k,
    }
}

/// Bytes of a workspace, to within a few hundred.
pub(super) fn planned_bytes(config: &ModelConfig, rows: usize, tokens: usize) -> usize {
    let s = sizes(config, rows, tokens);
    let routed = config.layers + 1;
    7 * s.row
        + rows * (config.vocab + config.experts + config.heads + config.kv_lora_rank + config.qk_rope_head_dim) * 4
        + 4 * s.wide
        + 2 * rows * config.q_lora_rank.unwrap_or(1) * 4
        + s.query
        + s.absorbed
        + s.splits * (config.kv_lora_rank + 2) * 4
        + rows * config.heads * config.kv_lora_rank * 4
        + s.mid
        + s.slots * (config.hidden * 4 + 24 + routed * 6)
        + super::planned::planned_bytes(routed, config.experts_per_token)
}

impl Workspace {
    /// Rows for passes of [`PASS_ROWS`] in timelines of up to `tokens` tokens, and choices of `routed` layers.
    pub fn new(device: &Rc<Device>, config: &ModelConfig, routed: usize, tokens: usize) -> Result<Self, EngineError> {
        let rows = PASS_ROWS;
        let s = sizes(config, rows, tokens);
        let room = |bytes: usize| device.room(bytes);
        let wide = || device.room(s.wide);
        let low = || device.room(rows * config.q_lora_rank.unwrap_or(1) * 4);
        let ints = |n: usize| device.room(n * 4);
        let ring_at = Ring::new(routed, s.slots);
        Ok(Self {
            inputs: room(INPUT_BYTES)?,
            staged: Pinned::new(device, INPUT_BYTES + s.row)?,
            results: Pinned::new(device, s.row + rows * config.vocab * 4 + ring_at.end)?,
            residual: room(s.row)?,
            normed: room(s.row)?,
            branch: room(s.row)?,
            joined: room(2 * s.row)?,
            hidden: room(s.row)?,
            logits: room(rows * config.vocab * 4)?,
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
        })
    }

    /// Says what is to be done for a pass of `rows` rows at `position`.
    pub fn begin(&self, tokens: &[u32], position: usize) -> Result<(), EngineError> {
        self.staged.put(0, tokens)?;
        self.staged.put(PASS_ROWS * 4, &[position as u32, 0, tokens.len() as u32])
    }

    /// Puts the draft module's hidden rows beside it.
    pub fn begin_hidden(&self, hidden: &[f32]) -> Result<(), EngineError> {
        self.staged.put(INPUT_BYTES, hidden)
    }

    /// Lets the stream take over what [`Workspace::begin`] said.
    pub fn send(&self) -> Result<(), EngineError> {
        self.staged.send(0, INPUT_BYTES, &self.inputs)
    }

    /// Lets the stream take over `numbers` numbers of hidden rows.
    pub fn send_hidden(&self, numbers: usize) -> Result<(), EngineError> {
        self.staged.send(INPUT_BYTES, numbers * 4, &self.hidden)
    }

    /// Lets the stream bring a pass's hidden rows and logits to the host.
    pub fn bring(&self, shape: Shape, config: &ModelConfig) -> Result<(), EngineError> {
        let [hidden, logits, _] = self.results_at(config);
        self.results.receive(hidden, shape.rows * config.hidden * 4, &self.hidden)?;
        self.results.receive(logits, shape.wanted * config.vocab * 4, &self.logits)
    }

    /// Lets the stream bring the damage note and the routers' choices, as far as they are taken, by one copy.
    pub fn bring_choices(&self, shape: Shape, config: &ModelConfig) -> Result<(), EngineError> {
        let [_, _, ring] = self.results_at(config);
        self.results.receive(ring, self.ring_at.wanted(shape.taken), &self.ring)
    }

    /// Where hidden rows, logits and ring are in the results.
    fn results_at(&self, config: &ModelConfig) -> [usize; 3] {
        let logits = PASS_ROWS * config.hidden * 4;
        [0, logits, logits + PASS_ROWS * config.vocab * 4]
    }

    /// Appends the results of a pass that was waited for.
    ///
    /// # Errors
    /// With the first place at which a number of the pass was not finite.
    pub fn collect(&self, shape: Shape, config: &ModelConfig, out: &mut HostRows) -> Result<(), EngineError> {
        let [hidden, logits, ring] = self.results_at(config);
        let mut damage = Vec::new();
        self.results.append(ring, 1, &mut damage)?;
        refuse_damage(damage[0], || self.ring.write(0, &[0_i32]), Site::describe)?;
        self.results.append(hidden, shape.rows * config.hidden, &mut out.hidden)?;
        self.results.append(logits, shape.wanted * config.vocab, &mut out.logits)?;
        let own = shape.rows * config.experts_per_token;
        for layer in 0..self.ring_at.layers {
            let first = layer * self.ring_at.slots;
            if shape.taken != Taken::Nothing {
                self.results.append(ring + Ring::IDS + first * 2, own, &mut out.ids[layer])?;
            }
            if shape.taken == Taken::IdsAndWeights {
                self.results.append(ring + self.ring_at.weights + first * 4, own, &mut out.weights[layer])?;
            }
        }
        match out.logits.iter().all(|v| v.is_finite()) {
            true => Ok(()),
            false => Err(EngineError::NotFinite { what: "logits".to_owned() }),
        }
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

    /// The pass's first position.
    pub fn base(&self) -> u64 {
        self.inputs.at(PASS_ROWS * 4)
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

    /// The plan of one expert and all rows.
    pub fn one(&self) -> Plan {
        Plan { start: self.inputs.at(PASS_ROWS * 4 + 4), ..self.one.plan() }
    }

    /// Where `site` notes damage.
    pub fn damage(&self, site: Site) -> Damage {
        Damage { at: self.ring.at(0), site: site.code() }
    }
}

/// Fails with the site that `damage` names, which is taken back; waits for the pass.
pub(super) fn check_damage(damage: &Buffer, describe: impl Fn(Site) -> String) -> Result<(), EngineError> {
    let mut code = [0_i32];
    damage.read(0, &mut code)?;
    refuse_damage(code[0], || damage.clear(), describe)
}

fn refuse_damage(
    code: i32,
    take_back: impl FnOnce() -> Result<(), EngineError>,
    describe: impl Fn(Site) -> String,
) -> Result<(), EngineError> {
    let Some(site) = Site::of(code) else { return Ok(()) };
    take_back()?;
    Err(EngineError::NotFinite { what: describe(site) })
}

/// Parts of a pass in which damage can be noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Embedding,
    Input,
    Attention,
    PostNorm,
    Router,
    Experts,
    Mlp,
    Output,
}

const PARTS: [Part; 8] =
    [Part::Embedding, Part::Input, Part::Attention, Part::PostNorm, Part::Router, Part::Experts, Part::Mlp, Part::Output];

/// A part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Site {
    pub layer: usize,
    pub part: Part,
}

impl Site {
    /// As the kernels note it; 0 is none.
    pub fn code(self) -> i32 {
        let part = PARTS.iter().position(|p| *p == self.part).unwrap_or_default();
        i32::try_from(1 + self.layer * PARTS.len() + part).unwrap_or(i32::MAX)
    }

    fn of(code: i32) -> Option<Self> {
        let code = usize::try_from(code).ok()?.checked_sub(1)?;
        Some(Self { layer: code / PARTS.len(), part: PARTS[code % PARTS.len()] })
    }

    /// In words, as the CPU engine names them.
    pub fn describe(self) -> String {
        let layer = self.layer;
        match self.part {
            Part::Embedding => "model.word_embeddings.weight".to_owned(),
            Part::Input => format!("layer {layer}: its input"),
            Part::Attention => format!("layer {layer}, attention: a projection's output"),
            Part::PostNorm => format!("layer {layer}, attention: output"),
            Part::Router => format!("layer {layer}, mlp: router logits"),
            Part::Experts => format!("layer {layer}, mlp: an expert's gate_proj or up_proj output"),
            Part::Mlp => format!("layer {layer}, mlp: gate_proj or up_proj output"),
            Part::Output => "the final norm's input or the logits".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_survive_their_code() {
        for layer in [0, 1, 41, 511] {
            for part in PARTS {
                let site = Site { layer, part };
                assert_eq!(Site::of(site.code()), Some(site));
            }
        }
        assert_eq!(Site::of(0), None);
        assert_eq!(Site::of(-1), None);
    }
}
