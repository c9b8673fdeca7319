//! What is known of a source before its first step, and of a step of which little is known.

use super::Options;
use crate::trace::event::{UNKNOWN_CONTEXT, UNKNOWN_TOKEN};
use crate::trace::expert_set::MAX_EXPERTS;
use crate::trace::manifest::{
    DeviceInfo, DrafterInfo, IdSpace, Instrumentation, Manifest, ModelShape, SamplingInfo, Verification, WindowCompleteness,
};
use crate::trace::{FORMAT_VERSION, Phase, StepEvent, StepRoutes};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// What an importer knows of its source before the first step. The rest is unknown until [`facts_mut`](super::Sink::facts_mut) says it.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// The engine and, when known, its version: `vllm 0.33`.
    pub engine: String,
    /// The model's name as the file has it; the configuration's and then `unknown` otherwise.
    pub model_name: Option<String>,
    /// Name of the device, when the file has it.
    pub device: Option<String>,
    /// The drafter's word; `unknown` when the file does not say, `none` when there was none.
    pub drafter: String,
    /// Drafts per verify step, when known.
    pub draft_len: Option<u16>,
    /// Experts per row in `routes`; 0 when there are no routes, and then what the options say stands in the manifest.
    pub k: u16,
    /// What is known of rejected rows.
    pub window_completeness: WindowCompleteness,
    /// What the ids mean.
    pub id_space: IdSpace,
    /// Whether gate weights come with the ids.
    pub router_weights: bool,
    /// Whether the verify steps' `accepted` is known.
    pub acceptance_known: bool,
    /// Whether the steps' host times are known.
    pub host_times: bool,
    /// How tokens were chosen, when known.
    pub sampling: Option<SamplingInfo>,
}

impl Default for Source {
    fn default() -> Self {
        Self {
            engine: "unknown".into(),
            model_name: None,
            device: None,
            drafter: "unknown".into(),
            draft_len: None,
            k: 0,
            window_completeness: WindowCompleteness::None,
            id_space: IdSpace::Unknown,
            router_weights: false,
            acceptance_known: true,
            host_times: false,
            sampling: None,
        }
    }
}

impl Source {
    /// What a manifest says when only this much is known.
    pub fn manifest(&self, options: &Options, experts: Option<u16>) -> Manifest {
        let unknown = || "unknown".to_owned();
        let config = options.model.clone().unwrap_or_default();
        let moe_layers = config.moe_layers.clone().unwrap_or_default();
        Manifest {
            format_version: FORMAT_VERSION.to_string(),
            written_by: format!("specprof {}", env!("CARGO_PKG_VERSION")),
            complete: false,
            incomplete_reason: None,
            // The run is the import: when the engine ran is not known.
            started_unix_ns: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)),
            ended_unix_ns: None,
            model: ModelShape {
                name: self.model_name.clone().or(config.name).unwrap_or_else(unknown),
                architecture: config.architecture.unwrap_or_else(unknown),
                identity: None,
                layers: config.layers.unwrap_or(0),
                moe_layers,
                draft_layers: Vec::new(),
                // Until the end, so that every id may come.
                experts: experts.unwrap_or(MAX_EXPERTS as u16),
                experts_known: experts.is_some(),
                experts_per_token: if self.k == 0 { options.known_k().unwrap_or(0) } else { self.k },
                shared_experts: config.shared_experts,
                hidden_size: config.hidden_size,
                expert_size: config.expert_size,
                vocab_size: config.vocab_size,
                quantisation: config.quantisation.unwrap_or_else(unknown),
                bytes_per_expert: None,
                bytes_other_per_step: None,
                synthetic: false,
                routing: None,
            },
            drafter: DrafterInfo { kind: self.drafter.clone(), draft_len: self.draft_len, bytes_per_draft: None, external: None },
            sampling: self.sampling.clone(),
            verification: Verification::Unknown,
            engine: self.engine.clone(),
            device: DeviceInfo { kind: unknown(), name: self.device.clone().unwrap_or_else(unknown), units: None },
            window_completeness: self.window_completeness,
            id_space: options.id_space.unwrap_or(self.id_space),
            token_hash: None,
            instrumentation: Instrumentation::default(),
            emulated: false,
            host_times: self.host_times,
            acceptance_known: self.acceptance_known,
            passes_known: true,
            irregular_steps: 0,
            expert_counts: None,
            router_weights: self.router_weights,
            text_stored: false,
            warnings: Vec::new(),
            tables: BTreeMap::new(),
        }
    }
}

/// A step of which only this much is known: no times, no context, nothing emitted, no routes.
pub fn step(request_id: u32, phase: Phase, input_tokens: Vec<u32>) -> StepEvent {
    StepEvent {
        step_id: 0,
        request_id,
        phase,
        accepted: 0,
        context_len: UNKNOWN_CONTEXT,
        input_tokens,
        parents: None,
        emitted_tokens: Vec::new(),
        draft_probs: None,
        draft_confidences: None,
        pass_id: None,
        host_begin_ns: 0,
        host_end_ns: 0,
        draft_host_ns: 0,
        target_host_ns: 0,
        device_ns: None,
        routes: StepRoutes::default(),
    }
}

/// `n` tokens that nobody named.
pub fn unknown_tokens(n: usize) -> Vec<u32> {
    vec![UNKNOWN_TOKEN; n]
}
