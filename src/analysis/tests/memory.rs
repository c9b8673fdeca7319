//! A trace in memory: rows as tuples, cut into units and slices wherever a test wants.

use crate::analysis::source::{RouteSlice, RouteSource};
use crate::analysis::steps::StepRow;
use crate::analysis::trees::{TreeRow, Trees};
use crate::analysis::{AnalysisError, Input, KernelSource, Options, StepTime, Timed, Wanted, analyze_input};
use crate::metric::report::Report;
use crate::trace::manifest::{
    DeviceInfo, DrafterInfo, IdSpace, Instrumentation, Manifest, ModelShape, SamplingInfo, Verification, WindowCompleteness,
};
use crate::trace::{Kernels, Phase, RequestEvent};
use std::collections::BTreeMap;

/// How tests analyse.
pub const OPTIONS: Options = Options { resamples: 200, seed: 1 };

/// One row of `routes`.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    pub step: u32,
    pub layer: u16,
    pub row: u16,
    pub draft: bool,
    pub ids: Vec<u16>,
    pub weights: Vec<f32>,
}

/// A whole trace.
#[derive(Debug, Clone)]
pub struct Memory {
    pub manifest: Manifest,
    pub steps: Vec<StepRow>,
    pub routes: Vec<Route>,
    pub draft_probs: Vec<Option<Vec<f32>>>,
    /// Parents, tokens and emitted tokens of the steps whose windows are no chains, by step.
    pub trees: BTreeMap<u32, (Vec<i16>, Vec<u32>, Vec<u32>)>,
    /// The pass of each step; empty for passes of their own.
    pub passes: Vec<Option<u32>>,
    pub requests: Vec<RequestEvent>,
    /// First step of every unit but the first.
    pub cuts: Vec<u32>,
    /// Rows per slice.
    pub slice: usize,
    /// One a step, or none at all.
    pub times: Vec<StepTime>,
    /// Operations in order of steps.
    pub kernels: Kernels,
}

impl Memory {
    /// A trace without steps.
    pub fn new(layers: &[u16], experts: u16, k: u16) -> Self {
        Self {
            manifest: manifest(layers, experts, k),
            steps: Vec::new(),
            routes: Vec::new(),
            draft_probs: Vec::new(),
            trees: BTreeMap::new(),
            passes: Vec::new(),
            requests: Vec::new(),
            cuts: Vec::new(),
            slice: 1000,
            times: Vec::new(),
            kernels: Kernels::default(),
        }
    }

    /// Appends a verify step; `ids[layer place][row]`.
    pub fn verify(&mut self, request_id: u32, accepted: u16, ids: &[Vec<Vec<u16>>]) {
        let step_id = self.steps.last().map_or(0, |s| s.step_id + 1);
        let rows = ids.first().map_or(0, Vec::len) as u16;
        let emitted = u32::from(accepted) + 1;
        let context_len = self.steps.iter().filter(|s| s.request_id == request_id).map(|s| s.emitted).sum();
        self.steps.push(StepRow { step_id, request_id, phase: Phase::Verify, rows, accepted, emitted, context_len });
        let layers = self.manifest.model.moe_layers.clone();
        for (&layer, rows) in layers.iter().zip(ids) {
            for (row, ids) in (0u16..).zip(rows) {
                self.routes.push(Route { step: step_id, layer, row, draft: false, ids: ids.clone(), weights: Vec::new() });
            }
        }
    }

    pub fn try_report(&self) -> Result<Report, AnalysisError> {
        self.try_report_of(&Wanted::default())
    }

    pub fn try_report_of(&self, wanted: &Wanted) -> Result<Report, AnalysisError> {
        self.with_input(|input| analyze_input(input, &OPTIONS, wanted))
    }

    /// Lets `work` have the trace as the analysis' input.
    pub fn with_input<T>(&self, work: impl FnOnce(&Input<'_>) -> Result<T, AnalysisError>) -> Result<T, AnalysisError> {
        let mut trees = Trees::default();
        for (at, step) in self.steps.iter().enumerate() {
            let Some((parents, tokens, emitted)) = self.trees.get(&step.step_id) else { continue };
            trees.add(at, TreeRow { step_id: step.step_id, rows: step.rows, parents, tokens, emitted, accepted: step.accepted })?;
        }
        let input = Input {
            name: "memory",
            manifest: &self.manifest,
            steps: &self.steps,
            draft_probs: &self.draft_probs,
            trees: &trees,
            passes: &self.passes,
            pass_unions: None,
            requests: &self.requests,
            routes: self,
            timed: Timed { times: &self.times, kernels: self },
            baseline: None,
        };
        work(&input)
    }

    pub fn report(&self) -> Report {
        self.try_report().unwrap()
    }
}

impl KernelSource for Memory {
    fn any(&self) -> bool {
        !self.kernels.is_empty()
    }

    fn each(&self, sink: &mut dyn FnMut(&Kernels) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        sink(&self.kernels)
    }
}

impl RouteSource for Memory {
    fn units(&self) -> usize {
        self.cuts.len() + 1
    }

    fn read(&self, unit: usize, sink: &mut dyn FnMut(RouteSlice<'_>) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        let from = if unit == 0 { 0 } else { self.cuts[unit - 1] };
        let to = self.cuts.get(unit).copied().unwrap_or(u32::MAX);
        let rows: Vec<&Route> = self.routes.iter().filter(|r| (from..to).contains(&r.step)).collect();
        for rows in rows.chunks(self.slice) {
            let k = rows[0].ids.len();
            let ids: Vec<Vec<u16>> = (0..k).map(|c| rows.iter().map(|r| r.ids[c]).collect()).collect();
            let weights: Vec<Vec<f32>> = (0..rows[0].weights.len()).map(|c| rows.iter().map(|r| r.weights[c]).collect()).collect();
            sink(RouteSlice {
                step_id: &rows.iter().map(|r| r.step).collect::<Vec<_>>(),
                layer: &rows.iter().map(|r| r.layer).collect::<Vec<_>>(),
                row: &rows.iter().map(|r| r.row).collect::<Vec<_>>(),
                draft: &rows.iter().map(|r| r.draft).collect::<Vec<_>>(),
                ids: &ids.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                weights: &weights.iter().map(Vec::as_slice).collect::<Vec<_>>(),
            })?;
        }
        Ok(())
    }
}

/// The manifest of a run that never was.
pub fn manifest(layers: &[u16], experts: u16, k: u16) -> Manifest {
    Manifest {
        format_version: "1.0".into(),
        written_by: "test".into(),
        complete: true,
        incomplete_reason: None,
        started_unix_ns: 0,
        ended_unix_ns: Some(1),
        model: ModelShape {
            name: "tiny".into(),
            architecture: "test".into(),
            identity: None,
            layers: layers.iter().max().map_or(0, |l| l + 1),
            moe_layers: layers.to_vec(),
            draft_layers: vec![42],
            experts,
            experts_known: true,
            experts_per_token: k,
            shared_experts: Some(1),
            hidden_size: Some(64),
            expert_size: Some(32),
            vocab_size: Some(100),
            quantisation: "bf16".into(),
            bytes_per_expert: Some(12288),
            bytes_other_per_step: None,
            synthetic: false,
            routing: None,
        },
        drafter: DrafterInfo { kind: "mtp".into(), draft_len: Some(3), bytes_per_draft: None, external: None },
        sampling: Some(SamplingInfo { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, max_new_tokens: 64, ignore_eos: false }),
        verification: Verification::Exact,
        engine: "test".into(),
        device: DeviceInfo { kind: "cpu".into(), name: "none".into(), units: Some(1) },
        window_completeness: WindowCompleteness::Full,
        id_space: IdSpace::Logical,
        token_hash: None,
        instrumentation: Instrumentation::default(),
        emulated: true,
        host_times: true,
        acceptance_known: true,
        passes_known: true,
        irregular_steps: 0,
        expert_counts: None,
        router_weights: false,
        text_stored: false,
        warnings: Vec::new(),
        tables: Default::default(),
    }
}
