//! Trace tables to report structs. The only place with polars, and that only in `frames`.
//!
//! [`analyze_input`] reads the routes once, in parallel over units, into integer counts (`unit`, `counts`); everything
//! else is arithmetic on those counts.

mod acceptance;
mod advise;
mod assemble;
mod batch;
pub mod cost;
mod counting;
mod counts;
mod coverage;
mod forget;
mod formulas;
mod frames;
pub mod groups;
mod identity;
mod idle;
mod layer_state;
mod limits;
mod loads;
mod overlap;
pub mod parallel;
pub mod partial;
mod pass;
mod passes;
pub mod request_totals;
pub mod source;
mod stats;
mod step_sums;
pub mod steps;
mod telemetry;
#[cfg(test)]
pub(crate) mod tests;
mod trace_source;
mod transpose;
mod tree_counts;
pub mod trees;
mod unit;
mod warnings;
mod window;

use crate::metric::costs::CostTable;
use crate::metric::report::Report;
use crate::trace::manifest::{Manifest, WindowCompleteness};
use crate::trace::{RequestEvent, TraceError};
pub use advise::{
    PassCosts, fits as costs_fit, slope_intervals as cost_slope_intervals, slopes as cost_slopes, table_warnings as cost_warnings,
};
pub use cost::{Baseline, KernelSource, StepTime, Timed};
pub use groups::GroupBy;
pub use parallel::Parallel;
use source::RouteSource;
use steps::{StepRow, StepTable};
pub use trace_source::{analyze, analyze_trace, analyze_wanted};
use trees::Trees;

/// Why a trace cannot be analysed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnalysisError {
    /// It cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Its manifest's model cannot be one.
    #[error("manifest.json: not the shape of a routed model: {reason}")]
    Shape {
        /// What is wrong.
        reason: String,
    },
    /// A row of `steps` that contradicts others.
    #[error("steps: step {step}: {reason}")]
    Steps {
        /// The step.
        step: u32,
        /// What is wrong.
        reason: String,
    },
    /// A row of `routes` that contradicts the other tables.
    #[error("routes: step {step}, layer {layer}: {reason}")]
    Routes {
        /// The step.
        step: u32,
        /// The layer.
        layer: u16,
        /// What is wrong.
        reason: String,
    },
    /// What was asked for is not in the trace.
    #[error("{reason}")]
    Group {
        /// What is missing.
        reason: String,
    },
    /// A placement of experts does not fit the model.
    #[error("{origin}: {reason}")]
    Placement {
        /// Where it was read.
        origin: String,
        /// What is wrong.
        reason: String,
    },
    /// A row of `kernels` that contradicts others.
    #[error("kernels: step {step}: {reason}")]
    Kernels {
        /// The step.
        step: u32,
        /// What is wrong.
        reason: String,
    },
    /// The trace of plain decoding is not one of the same model on the same device.
    #[error("the baseline trace cannot be compared with: {reason}")]
    Baseline {
        /// What is wrong.
        reason: String,
    },
    /// It stands for more than its files can hold: run lengths and compression of another's making.
    #[error("not analysed: {reason}")]
    TooLarge {
        /// What there is too much of.
        reason: String,
    },
    /// What cannot be said by, or made into, a partial report.
    #[error("not by partial reports: {reason}")]
    NoPartial {
        /// Why.
        reason: String,
    },
    /// A partial report that contradicts itself.
    #[error("{origin}: {reason}")]
    Partial {
        /// Its file.
        origin: String,
        /// What is wrong.
        reason: String,
    },
    /// Partial reports that are not of one thing.
    #[error("{reason}")]
    Incomparable {
        /// What differs.
        reason: String,
    },
    /// The data-frame engine failed.
    #[error("cannot group the windows by request: {reason}")]
    Frame {
        /// What it says.
        reason: String,
    },
}

/// How to analyse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Bootstrap resamples of every interval.
    pub resamples: usize,
    /// Seed of the resamples.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { resamples: stats::RESAMPLES, seed: 0x5eed }
    }
}

/// What to report beyond what every report has.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Wanted {
    /// Acceptance and unions by group.
    pub by: Option<GroupBy>,
    /// Windows over the ranks of an expert-parallel machine.
    pub parallel: Option<Parallel>,
    /// Cost of one draft in decode steps, where the trace does not tell it.
    pub draft_cost: Option<f64>,
    /// A table whose costs of passes and drafts are used instead of the trace's own times.
    pub costs: Option<CostTable>,
    /// Step costs by the model of bytes even where times were measured: for comparisons in which not all have measured times.
    pub model_only: bool,
}

/// A trace's content as the analysis needs it, wherever it is from.
pub struct Input<'a> {
    /// The trace's directory name.
    pub name: &'a str,
    /// Its manifest.
    pub manifest: &'a Manifest,
    /// Its steps, ascending.
    pub steps: &'a [StepRow],
    /// The drafter's probability of each draft, by step; empty where nothing is known.
    pub draft_probs: &'a [Option<Vec<f32>>],
    /// Its windows that are trees.
    pub trees: &'a Trees,
    /// The forward pass of each step, where it shared one; empty where none did.
    pub passes: &'a [Option<u32>],
    /// The unions of those passes, where they were counted before; read from the routes otherwise.
    pub pass_unions: Option<&'a batch::PassUnions>,
    /// The requests that have an entry of their own.
    pub requests: &'a [RequestEvent],
    /// Its routes.
    pub routes: &'a dyn RouteSource,
    /// Its times.
    pub timed: Timed<'a>,
    /// Decode steps of another trace.
    pub baseline: Option<Baseline<'a>>,
}

/// The report of a trace.
///
/// # Errors
/// When it cannot be read, or its tables contradict each other.
pub fn analyze_input(input: &Input<'_>, options: &Options, wanted: &Wanted) -> Result<Report, AnalysisError> {
    let table = StepTable::new(input.steps)?.with_trees(input.trees);
    let (plan, counts) = scan(input, &table)?;
    finish(input, &plan, &counts, options, wanted)
}

/// Everything that is counted of the routes: what a report is finished from.
fn scan<'a>(input: &Input<'a>, table: &'a StepTable) -> Result<(pass::Plan<'a>, pass::PassCounts), AnalysisError> {
    let mut plan = plan_of(input.manifest, table)?;
    plan.trees = Some(input.trees).filter(|trees| !trees.is_empty());
    plan.keep_unions = input.timed.kernels.any();
    plan.limits = limits::Limits::new(&plan, input.routes.bytes());
    let counts = match input.manifest.window_completeness {
        WindowCompleteness::Full | WindowCompleteness::AcceptedOnly => pass::run(input.routes, &plan)?,
        // Whatever rows there are, they are not windows; how they load the experts is known all the same.
        WindowCompleteness::None => loads::of_rows(input.routes, &plan)?,
        WindowCompleteness::Counts => loads::of_counts(&plan, input.manifest.expert_counts.as_ref())?,
    };
    Ok((plan, counts))
}

/// The report of what was counted.
fn finish(
    input: &Input<'_>,
    plan: &pass::Plan<'_>,
    counts: &pass::PassCounts,
    options: &Options,
    wanted: &Wanted,
) -> Result<Report, AnalysisError> {
    let mut report = assemble::assemble(input, plan, counts, options, wanted)?;
    if let (Some(parallel), Some(overall)) = (&wanted.parallel, &report.overall) {
        report.expert_parallel = Some(parallel::analyze(input, plan, usize::from(overall.stats.rows), parallel)?);
    }
    Ok(report)
}

/// What the pass over a trace must know beforehand.
fn plan_of<'a>(manifest: &Manifest, table: &'a StepTable) -> Result<pass::Plan<'a>, AnalysisError> {
    let model = &manifest.model;
    let windows = matches!(manifest.window_completeness, WindowCompleteness::Full | WindowCompleteness::AcceptedOnly);
    if windows && model.experts_per_token == 0 {
        return Err(AnalysisError::Shape { reason: "0 experts per token".into() });
    }
    let kept_rows_only = manifest.window_completeness == WindowCompleteness::AcceptedOnly;
    let mut plan = pass::Plan::new(table, &model.moe_layers, model.experts_per_token, model.experts, kept_rows_only)?;
    plan.draft_layers.clone_from(&model.draft_layers);
    Ok(plan)
}
