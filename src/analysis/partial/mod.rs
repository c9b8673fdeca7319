//! Partial reports: a trace reduced to what its report is finished from, and several of them put together.
//!
//! The routes are reduced to the counts of the pass over them, kernels to sums by step, layer and component, tokens to fingerprints. All
//! of it are integers by request, step or layer, so that putting partials together gives the very numbers of one trace that holds their
//! requests. What goes by request or step is put into the order of ids, then of the files' fingerprints: the order in which partials are
//! given does not matter.

mod check;
mod entries;
mod merge;
mod operations;
mod pass_entries;
mod read;
mod repeats;
#[cfg(test)]
mod tests;
mod tree_entries;

use super::batch::{self, PassUnions};
use super::pass::{PassCounts, Plan};
use super::source::{RouteSlice, RouteSource};
use super::steps::{StepRow, StepTable};
use super::trace_source::{Loaded, Other};
use super::trees::Trees;
use super::{AnalysisError, Input, Options, StepTime, Timed, Wanted, finish, limits, plan_of, scan};
use crate::metric::report::{Report, RequestIdentity};
use crate::trace::manifest::Warning;
use crate::trace::partial_file::encode;
use crate::trace::{Manifest, RequestEvent, Trace};
pub use merge::merge;
use operations::Operations;
use std::collections::{BTreeMap, HashMap};

/// What a report is finished from.
#[derive(Debug, Clone)]
pub struct Partial {
    /// Where it was read, for messages.
    origin: String,
    /// Fingerprint of its file: its place among others.
    fingerprint: [u8; 32],
    name: String,
    manifest: Manifest,
    steps: Vec<StepRow>,
    times: Vec<StepTime>,
    draft_probs: Vec<Option<Vec<f32>>>,
    trees: Trees,
    /// The forward pass of each step, where it shared one.
    passes: Vec<Option<u32>>,
    pass_unions: PassUnions,
    requests: Vec<RequestEvent>,
    identities: BTreeMap<u32, RequestIdentity>,
    counts: PassCounts,
    /// Numbers of rows whose pairs are not counted.
    without_pairs: Vec<u16>,
    operations: Operations,
}

/// Of routes, there are none any more.
struct NoRoutes;

impl RouteSource for NoRoutes {
    fn units(&self) -> usize {
        0
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn read(&self, _: usize, _: &mut dyn FnMut(RouteSlice<'_>) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        Ok(())
    }
}

impl Partial {
    /// The partial of an open trace.
    ///
    /// # Errors
    /// When the trace cannot be read or contradicts itself.
    pub fn of(trace: &Trace) -> Result<Self, AnalysisError> {
        let loaded = Loaded::new(trace)?;
        let mut partial = Self::of_input(&loaded.input(trace, None), loaded.identities.clone())?;
        if !trace.telemetry()?.is_empty() {
            partial.manifest.warnings.push(Warning::new(
                "telemetry_left_out",
                "partial reports do not have the machine's state during their runs: `telemetry` is unknown",
            ));
        }
        Ok(partial)
    }

    /// The same of a trace wherever it is from.
    pub(super) fn of_input(input: &Input<'_>, identities: HashMap<u32, RequestIdentity>) -> Result<Self, AnalysisError> {
        let table = StepTable::new(input.steps)?.with_trees(input.trees);
        let (plan, counts) = scan(input, &table)?;
        let passes = batch::passes_of_part(input.manifest, &table, input.passes)?;
        let pass_unions = passes.map(|passes| batch::scan(input.routes, &plan, &passes)).transpose()?.unwrap_or_default();
        let operations = Operations::of(input.timed.kernels, &table, &plan)?;
        let mut manifest = input.manifest.clone();
        manifest.tables.clear();
        // They are in the loads.
        manifest.expert_counts = None;
        Ok(Self {
            origin: input.name.to_owned(),
            fingerprint: [0; 32],
            name: input.name.to_owned(),
            manifest,
            steps: input.steps.to_vec(),
            times: (0..input.steps.len()).map(|at| input.timed.times.get(at).copied().unwrap_or_default()).collect(),
            draft_probs: (0..input.steps.len()).map(|at| input.draft_probs.get(at).cloned().flatten()).collect(),
            trees: input.trees.clone(),
            passes: (0..input.steps.len()).map(|at| input.passes.get(at).copied().flatten()).collect(),
            pass_unions,
            requests: input.requests.to_vec(),
            identities: identities.into_iter().collect(),
            counts,
            without_pairs: plan.limits.without_pairs.clone(),
            operations,
        })
    }

    /// The name of its trace, or of those that it was put together from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// When the Parquet library fails.
    pub fn encode(&self) -> Result<Vec<u8>, AnalysisError> {
        let layers = self.layers();
        Ok(encode(&self.name, &self.manifest, self.entries(&layers)?)?)
    }

    /// The target's routed layers by slot.
    fn layers(&self) -> Vec<u16> {
        let mut layers = self.manifest.model.moe_layers.clone();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// The report.
    ///
    /// # Errors
    /// When what is wanted is not in a partial or does not fit it, or it contradicts itself.
    pub fn report(&self, baseline: Option<&Trace>, options: &Options, wanted: &Wanted) -> Result<Report, AnalysisError> {
        if wanted.parallel.is_some() {
            let reason = "ranks of experts need the routes, which partial reports do not have; report on the trace itself";
            return Err(AnalysisError::NoPartial { reason: reason.into() });
        }
        let other = baseline.map(Other::new).transpose()?;
        let input = Input {
            name: &self.name,
            manifest: &self.manifest,
            steps: &self.steps,
            draft_probs: &self.draft_probs,
            trees: &self.trees,
            passes: &self.passes,
            pass_unions: Some(&self.pass_unions),
            requests: &self.requests,
            routes: &NoRoutes,
            timed: Timed { times: &self.times, kernels: &self.operations },
            baseline: other.as_ref().map(Other::baseline),
        };
        let table = self.table()?;
        let plan = self.plan(&table)?;
        let mut report = finish(&input, &plan, &self.counts, options, wanted)?;
        for request in &mut report.by_request {
            request.identity = self.identities.get(&request.request_id).cloned();
        }
        Ok(report)
    }

    fn table(&self) -> Result<StepTable, AnalysisError> {
        Ok(StepTable::new(&self.steps)?.with_trees(&self.trees))
    }

    fn plan<'a>(&'a self, table: &'a StepTable) -> Result<Plan<'a>, AnalysisError> {
        let mut plan = plan_of(&self.manifest, table)?;
        plan.trees = Some(&self.trees).filter(|trees| !trees.is_empty());
        plan.limits = limits::Limits::of_partial(self.without_pairs.clone());
        Ok(plan)
    }
}
