//! Trace tables to report structs. The only place with polars, and that only in `frames`.
//!
//! [`analyze_input`] reads the routes once, in parallel over units, into integer counts (`unit`, `counts`); everything
//! else is arithmetic on those counts.

mod acceptance;
mod assemble;
mod counts;
mod coverage;
mod formulas;
mod frames;
mod layer_state;
mod overlap;
mod pass;
pub mod source;
mod stats;
pub mod steps;
#[cfg(test)]
pub(crate) mod tests;
mod trace_source;
mod transpose;
mod unit;
mod warnings;

use crate::metric::report::Report;
use crate::trace::TraceError;
use crate::trace::manifest::{Manifest, WindowCompleteness};
use source::RouteSource;
use steps::{StepRow, StepTable};
pub use trace_source::{analyze, analyze_trace};

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

/// A trace's content as the analysis needs it, wherever it is from.
pub struct Input<'a> {
    /// The trace's directory name.
    pub name: &'a str,
    /// Its manifest.
    pub manifest: &'a Manifest,
    /// Its steps, ascending.
    pub steps: &'a [StepRow],
    /// Ids of the requests that have an entry of their own.
    pub requests: &'a [u32],
    /// Its routes.
    pub routes: &'a dyn RouteSource,
}

/// The report of a trace.
///
/// # Errors
/// When it cannot be read, or its tables contradict each other.
pub fn analyze_input(input: &Input<'_>, options: &Options) -> Result<Report, AnalysisError> {
    let table = StepTable::new(input.steps)?;
    let model = &input.manifest.model;
    let kept_rows_only = input.manifest.window_completeness == WindowCompleteness::AcceptedOnly;
    let plan = pass::Plan::new(&table, &model.moe_layers, model.experts_per_token, model.experts, kept_rows_only)?;
    let counts = match input.manifest.window_completeness {
        WindowCompleteness::Full | WindowCompleteness::AcceptedOnly if model.experts_per_token == 0 => {
            return Err(AnalysisError::Shape { reason: "0 experts per token".into() });
        }
        WindowCompleteness::Full | WindowCompleteness::AcceptedOnly => pass::run(input.routes, &plan)?,
        // Whatever rows there are, they are not windows; how they load the experts is known all the same.
        WindowCompleteness::None => pass::loads(input.routes, &plan)?,
        WindowCompleteness::Counts => pass::PassCounts::of_loads(&plan, input.manifest.expert_counts.as_ref()),
    };
    assemble::assemble(input, &plan, &counts, options)
}
