//! What is known of a source before its first step, and of a step of which little is known.

use crate::trace::event::{UNKNOWN_CONTEXT, UNKNOWN_TOKEN};
use crate::trace::manifest::{IdSpace, SamplingInfo, WindowCompleteness};
use crate::trace::{Phase, StepEvent, StepRoutes};

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
    /// Experts per row in `routes`; 0 when there are no routes.
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
