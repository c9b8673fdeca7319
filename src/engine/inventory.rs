//! Parameters and stored bytes of a model by component.

use super::config::ModelConfig;
use super::tensors::{Component, Slot};
use std::collections::BTreeMap;

/// Sums over the tensors of one component.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Weights as the model has them, whatever the storage.
    pub parameters: u64,
    /// Stored bytes, scales included.
    pub bytes: u64,
    /// Those of them that no pass reads: notes of the original shape.
    pub note_bytes: u64,
    /// Entries in the safetensors files, scales included.
    pub tensors: u64,
}

impl Amount {
    /// Bytes that a pass over all of it reads.
    pub fn read_bytes(&self) -> u64 {
        self.bytes - self.note_bytes
    }

    fn add(&mut self, other: Self) {
        self.parameters += other.parameters;
        self.bytes += other.bytes;
        self.note_bytes += other.note_bytes;
        self.tensors += other.tensors;
    }
}

/// What a model consists of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The target's components.
    pub target: BTreeMap<Component, Amount>,
    /// The MTP block's components.
    pub draft: BTreeMap<Component, Amount>,
}

impl Inventory {
    /// Counts one tensor of the model.
    pub fn count(&mut self, slot: Slot<'_>, amount: Amount) {
        let side = if slot.draft { &mut self.draft } else { &mut self.target };
        side.entry(slot.component).or_default().add(amount);
    }

    /// The target's total, MTP block not included.
    pub fn target_total(&self) -> Amount {
        sum(&self.target)
    }

    /// The MTP block's total.
    pub fn draft_total(&self) -> Amount {
        sum(&self.draft)
    }

    /// Everything.
    pub fn total(&self) -> Amount {
        let mut total = self.target_total();
        total.add(self.draft_total());
        total
    }

    /// A component of the target, zero when it has none.
    pub fn of(&self, component: Component) -> Amount {
        self.target.get(&component).copied().unwrap_or_default()
    }

    /// A component of the MTP block, zero when it has none.
    pub fn draft_of(&self, component: Component) -> Amount {
        self.draft.get(&component).copied().unwrap_or_default()
    }

    /// Bytes that every decode step of the target reads besides routed experts: everything but the embedding, of which one row
    /// is looked up.
    pub fn other_bytes_per_step(&self) -> u64 {
        self.target_total().read_bytes() - self.of(Component::Embedding).read_bytes() - self.of(Component::RoutedExperts).read_bytes()
    }

    /// Stored bytes of one routed expert of the target, scales included; the mean where layers differ.
    pub fn bytes_per_expert(&self, config: &ModelConfig) -> u64 {
        let experts = (config.experts * config.moe_layers()) as u64;
        self.of(Component::RoutedExperts).read_bytes().checked_div(experts).unwrap_or(0)
    }

    /// Parameters that one token's pass through the target multiplies with: all but the embedding, k of E experts.
    pub fn active_parameters(&self, config: &ModelConfig) -> u64 {
        let routed = self.of(Component::RoutedExperts).parameters;
        let chosen = routed / config.experts as u64 * config.experts_per_token as u64;
        self.target_total().parameters - self.of(Component::Embedding).parameters - routed + chosen
    }
}

fn sum(side: &BTreeMap<Component, Amount>) -> Amount {
    let mut total = Amount::default();
    side.values().for_each(|amount| total.add(*amount));
    total
}
