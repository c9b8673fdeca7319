//! What a trace's manifest says of the model, the machine and the way tokens are chosen.

use super::Plan;
use crate::engine::drafter::DraftKind;
use crate::engine::forecast::StepBytes;
use crate::engine::tensors::Component;
use crate::engine::weights::{Mlp, MoeWeights};
use crate::engine::{Checkpoint, Routing};
use crate::trace::manifest::{
    DeviceInfo, DrafterInfo, ExternalDrafter, IdSpace, Instrumentation, Manifest, ModelShape, SamplingInfo, Verification,
    WindowCompleteness,
};
use std::collections::BTreeMap;

/// The shape of a checkpoint's model.
pub fn model_shape(checkpoint: &Checkpoint) -> ModelShape {
    let config = &checkpoint.config;
    let weights = &checkpoint.weights;
    let moe_layers = (0..config.layers).filter(|&l| !config.is_dense(l)).map(small).collect();
    let draft_layers = if weights.mtp.is_some() { vec![small(config.layers)] } else { Vec::new() };
    let first_expert = weights.layers.iter().find_map(|l| match &l.mlp {
        Mlp::Moe(MoeWeights { experts, .. }) => experts.first(),
        Mlp::Dense(_) => None,
    });
    // Embedding rows are looked up, not read through; routed experts are what the rest is told apart from.
    let inventory = &checkpoint.inventory;
    let not_always = inventory.of(Component::Embedding).bytes + inventory.of(Component::RoutedExperts).bytes;
    ModelShape {
        name: checkpoint.name.clone(),
        architecture: "BailingMoeV3ForCausalLM".to_owned(),
        identity: Some(checkpoint.identity.clone()),
        layers: small(config.layers),
        moe_layers,
        draft_layers,
        experts: small(config.experts),
        experts_known: true,
        experts_per_token: small(config.experts_per_token),
        shared_experts: Some(small(config.shared_experts)),
        hidden_size: Some(wide(config.hidden)),
        expert_size: Some(wide(config.expert_inter)),
        vocab_size: Some(wide(config.vocab)),
        quantisation: first_expert.map_or("none", |e| e.gate.format().name()).to_owned(),
        bytes_per_expert: first_expert.map(|e| (e.gate.bytes() + e.up.bytes() + e.down.bytes()) as u64),
        bytes_other_per_step: Some(inventory.target_total().bytes.saturating_sub(not_always)),
        synthetic: checkpoint.synthetic,
        routing: None,
    }
}

/// The manifest of a plan that starts at `started_unix_ns`. What only the writer knows is left to it.
pub fn run_facts(plan: &Plan<'_>, started_unix_ns: i64) -> Manifest {
    let options = &plan.options;
    let version = env!("CARGO_PKG_VERSION");
    let draft_len = if options.draft == DraftKind::None { 0 } else { options.draft_len };
    Manifest {
        format_version: crate::trace::FORMAT_VERSION.to_string(),
        written_by: format!("specprof {version}"),
        complete: false,
        incomplete_reason: None,
        started_unix_ns,
        ended_unix_ns: None,
        model: ModelShape {
            routing: (options.routing != Routing::Model).then(|| options.routing.to_string()),
            ..model_shape(plan.checkpoint)
        },
        drafter: DrafterInfo {
            kind: options.draft.as_str().to_owned(),
            draft_len: Some(small(draft_len)),
            bytes_per_draft: bytes_per_draft(plan.checkpoint, options.draft),
            external: plan.drafter.map(|drafter| ExternalDrafter {
                name: drafter.name.clone(),
                identity: drafter.identity.clone(),
                block_size: small(drafter.config.block_size),
                min_survival: (options.min_survival > 0.0).then_some(options.min_survival),
            }),
        },
        sampling: Some(SamplingInfo {
            temperature: options.sampling.temperature,
            top_p: options.sampling.top_p,
            top_k: options.sampling.top_k,
            seed: options.sampling.seed,
            max_new_tokens: options.max_new_tokens,
            ignore_eos: options.ignore_eos,
        }),
        // The CPU engine's rows do not depend on the pass that they are in.
        verification: Verification::Exact,
        engine: format!("specprof-cpu {version}"),
        device: DeviceInfo { kind: "cpu".to_owned(), name: super::machine::cpu_name(), units: Some(wide(rayon::current_num_threads())) },
        window_completeness: WindowCompleteness::Full,
        id_space: IdSpace::Logical,
        token_hash: None,
        instrumentation: Instrumentation { warmup_requests: Some(options.warmup), ..Instrumentation::default() },
        emulated: false,
        host_times: true,
        acceptance_known: true,
        passes_known: true,
        irregular_steps: 0,
        expert_counts: None,
        router_weights: options.router_weights,
        text_stored: options.store_text,
        warnings: Vec::new(),
        tables: BTreeMap::new(),
    }
}

/// Weight bytes of one draft: a pass of the MTP block and the head; a lookup reads no weights.
fn bytes_per_draft(checkpoint: &Checkpoint, draft: DraftKind) -> Option<u64> {
    match draft {
        DraftKind::Mtp => StepBytes::new(&checkpoint.config, &checkpoint.inventory, 0).draft_pass.map(|bytes| bytes as u64),
        // A block makes all its drafts at once: there is no cost of one.
        DraftKind::Dspark => None,
        DraftKind::Ngram | DraftKind::None => Some(0),
    }
}

/// Layer and expert numbers, which the configuration's bounds keep below 65 536.
fn small(n: usize) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}

fn wide(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
