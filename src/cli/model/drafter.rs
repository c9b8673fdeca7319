//! `specprof model DRAFTER --target DIR`: what a DSpark drafter consists of and how it drafts.

use super::render::{bytes, count, finish, indented, table, title};
use crate::engine::DsparkCheckpoint;
use crate::engine::tensors::Component;
use crate::metric::Unit;
use serde::Serialize;

/// Everything that the command shows.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Version of this structure.
    schema: &'static str,
    /// The checkpoint's folder.
    name: String,
    /// SHA-256 over configuration and weight headers.
    identity: String,
    layers: usize,
    hidden_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    rope_theta: f64,
    /// Rows of a block, and the drafts that they make.
    block_size: usize,
    drafts: usize,
    mask_token_id: u32,
    is_causal: bool,
    sample_from_anchor: bool,
    /// Layers of the target that the context is made of.
    target_layer_ids: Vec<usize>,
    markov_rank: usize,
    confidence_head: bool,
    /// Without frozen copies of the target's embedding and head.
    total_parameters: u64,
    total_bytes: u64,
    tensors: u64,
    components: Vec<Part>,
}

/// Parameters of one component.
#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    parameters: u64,
    bytes: u64,
    tensors: u64,
    share_of_bytes: f64,
}

impl Summary {
    /// Of an opened drafter.
    pub fn of(drafter: &DsparkCheckpoint) -> Self {
        let (config, total) = (&drafter.config, drafter.inventory.total());
        let part = |(component, amount): (&Component, &crate::engine::inventory::Amount)| Part {
            name: component.name(),
            parameters: amount.parameters,
            bytes: amount.bytes,
            tensors: amount.tensors,
            share_of_bytes: amount.bytes as f64 / total.bytes.max(1) as f64,
        };
        Self {
            schema: "specprof.drafter/1",
            name: drafter.name.clone(),
            identity: drafter.identity.clone(),
            layers: config.layers,
            hidden_size: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            intermediate_size: config.inter,
            rope_theta: config.rope_theta,
            block_size: config.block_size,
            drafts: config.drafts(),
            mask_token_id: config.mask_token,
            is_causal: config.causal,
            sample_from_anchor: config.sample_from_anchor,
            target_layer_ids: config.taps.clone(),
            markov_rank: config.markov_rank,
            confidence_head: drafter.weights.confidence.is_some(),
            total_parameters: total.parameters,
            total_bytes: total.bytes,
            tensors: total.tensors,
            components: drafter.inventory.draft.iter().map(part).collect(),
        }
    }

    /// As text of at most `width` columns.
    pub fn text(&self, width: usize, color: bool) -> String {
        let mut out = String::new();
        title(&mut out, &self.name, color);
        let taps: Vec<String> = self.target_layer_ids.iter().map(usize::to_string).collect();
        let seen = if self.is_causal { "each row sees those before it" } else { "each row sees the whole block" };
        let markov = if self.markov_rank > 0 { format!("a Markov head of rank {}", self.markov_rank) } else { "no Markov head".to_owned() };
        let confidence = if self.confidence_head { "a confidence head" } else { "no confidence head" };
        let lines = [
            format!(
                "a DSpark drafter of {} layers, hidden size {}; {} heads of {}, {} for keys and values",
                self.layers, self.hidden_size, self.heads, self.head_dim, self.kv_heads
            ),
            format!("a block of {} rows makes {} drafts; {seen}; mask token {}", self.block_size, self.drafts, self.mask_token_id),
            format!("its context is made of the target's tapped layers {}", taps.join(", ")),
            format!("{markov}, {confidence}"),
            format!(
                "{} parameters, {} in {} tensors, without frozen copies of the target's embedding and head",
                count(self.total_parameters as f64),
                bytes(self.total_bytes as f64),
                self.tensors
            ),
            format!("identity {}", self.identity.get(..16).unwrap_or(&self.identity)),
        ];
        for line in lines {
            indented(&mut out, &line, width, "  ", "    ");
        }
        out.push('\n');
        title(&mut out, "Components", color);
        let mut rows = table(width, &["component", "parameters", "bytes", "share"]);
        for part in &self.components {
            let (parameters, share) = (Unit::Count.show(part.parameters as f64), Unit::Share.show(part.share_of_bytes));
            rows.add_row([part.name.to_owned(), parameters, bytes(part.bytes as f64), share]);
        }
        let total = Unit::Count.show(self.total_parameters as f64);
        rows.add_row(["total".to_owned(), total, bytes(self.total_bytes as f64), Unit::Share.show(1.0)]);
        finish(&mut out, rows);
        out
    }
}
