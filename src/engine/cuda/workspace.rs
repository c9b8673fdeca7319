//! Device memory of a pass: rows between kernels, reused by every layer.

use super::PASS_ROWS;
use super::device::{Buffer, Device};
use super::ops::{Damage, Plan, SPLIT};
use crate::engine::{EngineError, ModelConfig};
use std::rc::Rc;

/// Rows of a pass of one side (target or draft module).
#[derive(Debug)]
pub(super) struct Workspace {
    pub tokens: Buffer,
    /// The pass's first position.
    pub base: Buffer,
    pub damage: Buffer,
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
    /// Choices of every routed layer, `[layers, PASS_ROWS, k]`: ids of u16 and weights.
    pub ids: Buffer,
    pub weights: Buffer,
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

    /// Says how many rows the pass has.
    pub fn begin(&self, rows: usize) -> Result<(), EngineError> {
        self.0[2].write(4, &[rows as i32])
    }

    pub fn plan(&self) -> Plan {
        plan_of(&self.0)
    }
}

fn plan_of([count, expert, start, slot_row]: &[Buffer; 4]) -> Plan {
    Plan { count: count.at(0), expert: expert.at(0), start: start.at(0), slot_row: slot_row.at(0) }
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
        Ok(Self {
            tokens: ints(rows)?,
            base: ints(1)?,
            damage: device.zeros(4)?,
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
            ids: room(routed * s.slots * 2)?,
            weights: room(routed * s.slots * 4)?,
            slot_of: ints(s.slots)?,
            plan: [ints(1)?, ints(s.slots)?, ints(s.slots + 1)?, ints(s.slots)?],
            one: AllRows::new(device)?,
        })
    }

    /// Says what is to be done for a pass of `rows` rows at `position`.
    pub fn begin(&self, tokens: &[u32], position: usize) -> Result<(), EngineError> {
        self.tokens.write(0, tokens)?;
        self.base.write(0, &[position as u32])?;
        self.one.begin(tokens.len())
    }

    /// The plan that the router's choice makes.
    pub fn plan(&self) -> Plan {
        plan_of(&self.plan)
    }

    /// The plan of one expert and all rows.
    pub fn one(&self) -> Plan {
        self.one.plan()
    }

    /// Where `site` notes damage.
    pub fn damage(&self, site: Site) -> Damage {
        Damage { at: self.damage.at(0), site: site.code() }
    }

    /// Fails with the first place at which a number of the pass was not finite; waits for the pass.
    pub fn check(&self, describe: impl Fn(Site) -> String) -> Result<(), EngineError> {
        check_damage(&self.damage, describe)
    }
}

/// Fails with the site that `damage` names, which is taken back; waits for the pass.
pub(super) fn check_damage(damage: &Buffer, describe: impl Fn(Site) -> String) -> Result<(), EngineError> {
    let mut code = [0_i32];
    damage.read(0, &mut code)?;
    let Some(site) = Site::of(code[0]) else { return Ok(()) };
    damage.clear()?;
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
