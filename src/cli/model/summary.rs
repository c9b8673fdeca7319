//! The numbers of `specprof model`, as its `--json` shows them.

use crate::analysis::{Options, PassCosts, cost_warnings};
use crate::engine::checkpoint::Checkpoint;
use crate::engine::config::{AttentionKind, ModelConfig};
use crate::engine::error::EngineError;
use crate::engine::forecast::{ASSUMPTIONS, StepBytes};
use crate::engine::inventory::{Amount, Inventory};
use crate::engine::operations::{self, Operations};
use crate::engine::presets::Preset;
use crate::engine::synthetic::Synthetic;
use crate::engine::tensors::Component;
use crate::metric::costs::{CostTable, MeasuredModel};
use crate::record::machine;
use serde::Serialize;
use std::collections::BTreeMap;

/// Everything that the command shows.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Version of this structure.
    pub schema: &'static str,
    /// Checkpoint or preset.
    pub name: String,
    /// `checkpoint`, `preset` (no weights were read) or `synthetic` (weights are made up when it is recorded).
    pub source: &'static str,
    /// SHA-256 over configuration, tokenizer and weight headers; `null` for presets.
    pub identity: Option<String>,
    /// The shape.
    pub shape: Shape,
    /// All parameters, MTP block included.
    pub total_parameters: u64,
    /// Parameters of the target.
    pub total_parameters_without_mtp: u64,
    /// Parameters that one token is multiplied with.
    pub active_parameters: u64,
    /// Stored bytes of all tensors.
    pub total_bytes: u64,
    /// Number of stored tensors.
    pub tensors: u64,
    /// One routed expert, stored.
    pub bytes_per_expert: u64,
    /// Parameters and bytes by part.
    pub components: Vec<Part>,
    /// Whether the weights fit into this machine's memory.
    pub memory: Memory,
    /// Bytes of a decode step at batch 1.
    pub decode: Decode,
    /// Verify steps.
    pub forecast: Forecast,
    /// Arithmetic of a prompt's pass.
    pub prompt_pass: PromptPass,
}

/// What is asked of a model beside its shape.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Tokens of context.
    pub context: usize,
    /// Rows of the verify steps to forecast.
    pub rows: &'a [usize],
    /// Rows of a prompt's pass.
    pub prompt_rows: usize,
}

/// A prompt's pass.
#[derive(Debug, Serialize)]
pub struct PromptPass {
    /// Its rows.
    pub prompt_rows: usize,
    /// Tokens before it.
    pub context: usize,
    /// Floating-point operations of all parts.
    pub total_operations: u64,
    /// By component and part.
    pub parts: Vec<Operations>,
}

/// The shape as far as costs depend on it.
#[derive(Debug, Serialize)]
pub struct Shape {
    /// Target layers.
    pub layers: usize,
    /// Layers with Kimi Delta Attention.
    pub kda_layers: usize,
    /// Layers with latent attention.
    pub mla_layers: usize,
    /// Layers with experts.
    pub moe_layers: usize,
    /// MTP blocks.
    pub mtp_layers: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Vocabulary.
    pub vocab_size: usize,
    /// E.
    pub experts: usize,
    /// k.
    pub experts_per_token: usize,
    /// Shared experts.
    pub shared_experts: usize,
    /// Intermediate size of a routed expert.
    pub expert_size: usize,
    /// Stored format of the routed experts.
    pub quantisation: String,
}

/// One component of the target or of the draft module.
#[derive(Debug, Serialize)]
pub struct Part {
    /// Word for it.
    pub name: &'static str,
    /// `target` or `draft`.
    pub module: &'static str,
    /// Weights.
    pub parameters: u64,
    /// Stored bytes.
    pub bytes: u64,
    /// Stored tensors.
    pub tensors: u64,
    /// Of all bytes.
    pub share_of_bytes: f64,
}

/// Host memory beside the weights.
#[derive(Debug, Serialize)]
pub struct Memory {
    /// Bytes of weights.
    pub weights_bytes: u64,
    /// Host memory, `null` where the system does not say.
    pub host_total_bytes: Option<u64>,
    /// Of it available now.
    pub host_available_bytes: Option<u64>,
    /// Whether the weights fit into what is available.
    pub fits_host: Option<bool>,
}

/// Bytes of a decode step.
#[derive(Debug, Serialize)]
pub struct Decode {
    /// Tokens of context.
    pub context: usize,
    /// k routed experts in every MoE layer.
    pub routed_bytes: u64,
    /// All other weights.
    pub other_bytes: u64,
    /// Recurrent state, read and written.
    pub state_bytes: u64,
    /// Attention cache, read.
    pub cache_bytes: u64,
    /// Sum.
    pub total_bytes: u64,
    /// One pass of the MTP block and the head; `null` without a block.
    pub draft_pass_bytes: Option<u64>,
}

/// Verify steps by rows.
#[derive(Debug, Serialize)]
pub struct Forecast {
    /// What kind of number this is.
    pub kind: &'static str,
    /// What it takes for granted.
    pub assumptions: &'static [&'static str],
    /// By rows.
    pub by_rows: Vec<ForecastRow>,
    /// Where `calibrated_ratio` is from; `null` without a table.
    pub calibrated: Option<CalibratedBy>,
}

/// The table that times are from.
#[derive(Debug, Serialize)]
pub struct CalibratedBy {
    /// The device that was measured.
    pub device: String,
    /// What ran on it.
    pub engine: String,
    /// Tokens of context before each pass.
    pub context: usize,
    /// Rows of its widest pass: beyond them times are extrapolated.
    pub most_rows: usize,
    /// What limits it.
    pub warnings: Vec<String>,
}

/// A verify step.
#[derive(Debug, Serialize)]
pub struct ForecastRow {
    /// Anchor and drafts.
    pub rows: usize,
    /// With the union of independent uniform routing.
    pub uniform: Case,
    /// With the largest union there can be.
    pub maximum: Case,
}

/// A verify step with some union.
#[derive(Debug, Serialize)]
pub struct Case {
    /// Distinct routed experts in a layer.
    pub union: f64,
    /// Bytes of the step.
    pub bytes: u64,
    /// By those of a decode step.
    pub verify_ratio: f64,
    /// With the drafting by the MTP block; `null` without a block.
    pub step_ratio: Option<f64>,
    /// Time of the pass by that of a decode pass, by a table of `calibrate`; `null` without a table.
    pub calibrated_ratio: Option<f64>,
}

impl Summary {
    /// The forecast with what a table of `calibrate` says beside the bytes.
    ///
    /// # Errors
    /// Why the table says nothing of this model, as half a sentence.
    pub fn with_costs(mut self, table: &CostTable) -> Result<Self, String> {
        let small = |n: usize| u32::try_from(n).ok();
        let model = MeasuredModel {
            name: self.name.clone(),
            moe_layers: u16::try_from(self.shape.moe_layers).unwrap_or(u16::MAX),
            experts: u16::try_from(self.shape.experts).unwrap_or(u16::MAX),
            experts_per_token: u16::try_from(self.shape.experts_per_token).unwrap_or(u16::MAX),
            hidden_size: small(self.shape.hidden_size),
            expert_size: small(self.shape.expert_size),
            quantisation: self.shape.quantisation.clone(),
            synthetic: self.source == "synthetic",
        };
        let costs = PassCosts::of(table, &model)?;
        for row in &mut self.forecast.by_rows {
            for case in [&mut row.uniform, &mut row.maximum] {
                case.calibrated_ratio = Some(costs.verify_ratio(row.rows, case.union));
            }
        }
        let most = table.cells.iter().map(|cell| usize::from(cell.rows)).max().unwrap_or(1);
        self.forecast.calibrated = Some(CalibratedBy {
            device: table.device.clone(),
            engine: table.engine.clone(),
            context: table.context_len as usize,
            most_rows: most,
            warnings: cost_warnings(table, &Options::default()).into_iter().map(|warning| warning.message).collect(),
        });
        Ok(self)
    }

    /// Of an opened checkpoint.
    pub fn of_checkpoint(checkpoint: &Checkpoint, asked: Asked<'_>) -> Self {
        let Checkpoint { config, inventory, name, .. } = checkpoint;
        let mut summary = Self::new(name.clone(), config, inventory, checkpoint.expert_format(), asked);
        summary.identity = Some(checkpoint.identity.clone());
        summary
    }

    /// Of a model without weights.
    pub fn of_preset(preset: &Preset, asked: Asked<'_>) -> Result<Self, EngineError> {
        let mut summary = Self::new(preset.name.to_owned(), &preset.model()?, &preset.inventory()?, preset.expert_format(), asked);
        summary.source = "preset";
        Ok(summary)
    }

    /// Of a synthetic model, none of whose weights are made for it.
    pub fn of_synthetic(model: &Synthetic, asked: Asked<'_>) -> Result<Self, EngineError> {
        let format = model.preset.expert_format();
        let mut summary = Self::new(model.name(), &model.config()?, &model.inventory()?, format, asked);
        summary.source = "synthetic";
        Ok(summary)
    }

    fn new(name: String, config: &ModelConfig, inventory: &Inventory, format: &str, asked: Asked<'_>) -> Self {
        let Asked { context, rows, prompt_rows } = asked;
        let parts_of_pass = operations::of_prompt(config, inventory, prompt_rows as u64, context as u64);
        let step = StepBytes::new(config, inventory, context);
        let total = inventory.total();
        let whole = |bytes: f64| bytes.round() as u64;
        let case = |rows: usize, union: f64| Case {
            union,
            bytes: whole(step.verify(rows, union)),
            verify_ratio: step.verify_ratio(rows, union),
            step_ratio: step.step_ratio(rows, union),
            calibrated_ratio: None,
        };
        let host = machine::memory();
        Self {
            schema: "specprof.model/1",
            name,
            source: "checkpoint",
            identity: None,
            shape: Shape {
                layers: config.layers,
                kda_layers: config.layers_of(AttentionKind::Kda),
                mla_layers: config.layers_of(AttentionKind::Mla),
                moe_layers: config.moe_layers(),
                mtp_layers: config.mtp_layers,
                hidden_size: config.hidden,
                vocab_size: config.vocab,
                experts: config.experts,
                experts_per_token: config.experts_per_token,
                shared_experts: config.shared_experts,
                expert_size: config.expert_inter,
                quantisation: format.to_owned(),
            },
            total_parameters: total.parameters,
            total_parameters_without_mtp: inventory.target_total().parameters,
            active_parameters: inventory.active_parameters(config),
            total_bytes: total.bytes,
            tensors: total.tensors,
            bytes_per_expert: inventory.bytes_per_expert(config),
            components: parts("target", &inventory.target, total.bytes).chain(parts("draft", &inventory.draft, total.bytes)).collect(),
            memory: Memory {
                weights_bytes: total.bytes,
                host_total_bytes: host.map(|h| h.total),
                host_available_bytes: host.map(|h| h.available),
                fits_host: host.map(|h| total.bytes <= h.available),
            },
            decode: Decode {
                context,
                routed_bytes: whole(config.experts_per_token as f64 * step.per_union),
                other_bytes: whole(step.other),
                state_bytes: whole(2.0 * step.state),
                cache_bytes: whole(step.cache),
                total_bytes: whole(step.decode()),
                draft_pass_bytes: step.draft_pass.map(whole),
            },
            forecast: Forecast {
                kind: "model of bytes, not a measurement",
                assumptions: ASSUMPTIONS,
                by_rows: rows
                    .iter()
                    .map(|&rows| ForecastRow {
                        rows,
                        uniform: case(rows, step.uniform_union(rows)),
                        maximum: case(rows, step.max_union(rows) as f64),
                    })
                    .collect(),
                calibrated: None,
            },
            prompt_pass: PromptPass {
                prompt_rows,
                context,
                total_operations: parts_of_pass.iter().fold(0, |sum, part| part.operations.saturating_add(sum)),
                parts: parts_of_pass,
            },
        }
    }
}

fn parts<'a>(module: &'static str, side: &'a BTreeMap<Component, Amount>, total: u64) -> impl Iterator<Item = Part> + 'a {
    side.iter().map(move |(component, amount)| Part {
        name: component.name(),
        module,
        parameters: amount.parameters,
        bytes: amount.bytes,
        tensors: amount.tensors,
        share_of_bytes: amount.bytes as f64 / total.max(1) as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_flash() {
        let summary =
            Summary::of_preset(&Preset::find("ling-3.0-flash").unwrap(), Asked { context: 0, rows: &[4], prompt_rows: 512 }).unwrap();
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["total_parameters"], 127_486_405_600u64);
        assert_eq!(json["total_parameters_without_mtp"], 124_414_211_552u64);
        assert_eq!(json["tensors"], 63_783);
        assert_eq!((&json["source"], &json["identity"]), (&"preset".into(), &serde_json::Value::Null));
        let row = &json["forecast"]["by_rows"][0];
        assert_eq!(row["rows"], 4);
        assert!((row["uniform"]["verify_ratio"].as_f64().unwrap() - 2.10).abs() < 0.006);
        assert!((row["maximum"]["verify_ratio"].as_f64().unwrap() - 2.13).abs() < 0.006);
        let decode = &json["decode"];
        let sum: u64 = ["routed_bytes", "other_bytes", "state_bytes", "cache_bytes"].iter().map(|k| decode[k].as_u64().unwrap()).sum();
        assert_eq!(decode["total_bytes"], sum);
        let shares: f64 = json["components"].as_array().unwrap().iter().map(|c| c["share_of_bytes"].as_f64().unwrap()).sum();
        assert!((shares - 1.0).abs() < 1e-9);
    }
}
