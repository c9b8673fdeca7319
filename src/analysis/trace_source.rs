//! A trace on disk as the input of the analysis.

use super::source::{RouteSlice, RouteSource};
use super::steps::StepRow;
use super::{AnalysisError, Input, Options, analyze_input};
use crate::metric::report::Report;
use crate::trace::{RouteUnit, Steps, Trace};
use std::path::Path;

/// The report of the trace in a directory.
///
/// # Errors
/// When it cannot be read, or its tables contradict each other.
pub fn analyze(dir: &Path, options: &Options) -> Result<Report, AnalysisError> {
    analyze_trace(&Trace::open(dir)?, options)
}

/// The report of an open trace.
///
/// # Errors
/// As [`analyze`].
pub fn analyze_trace(trace: &Trace, options: &Options) -> Result<Report, AnalysisError> {
    let steps = step_rows(&trace.steps()?);
    let requests: Vec<u32> = trace.requests()?.iter().map(|r| r.request_id).collect();
    let routes = Units { units: trace.route_units()?, weights: trace.manifest().router_weights };
    // The directory as it was named: `.` has no name of its own.
    let name = trace.dir().file_name().map_or_else(|| trace.dir().to_string_lossy(), |name| name.to_string_lossy());
    let input = Input { name: &name, manifest: trace.manifest(), steps: &steps, requests: &requests, routes: &routes };
    analyze_input(&input, options)
}

fn step_rows(steps: &Steps) -> Vec<StepRow> {
    let of = |at: usize| {
        Some(StepRow {
            step_id: *steps.step_id.get(at)?,
            request_id: *steps.request_id.get(at)?,
            phase: *steps.phase.get(at)?,
            rows: *steps.rows.get(at)?,
            accepted: *steps.accepted.get(at)?,
            emitted: u32::try_from(steps.emitted_tokens.get(at).len()).unwrap_or(u32::MAX),
        })
    };
    (0..steps.len()).map_while(of).collect()
}

struct Units {
    units: Vec<RouteUnit>,
    weights: bool,
}

impl RouteSource for Units {
    fn units(&self) -> usize {
        self.units.len()
    }

    fn read(&self, unit: usize, sink: &mut dyn FnMut(RouteSlice<'_>) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        let Some(unit) = self.units.get(unit) else { return Ok(()) };
        let mut reader = unit.read(self.weights);
        while let Some(batch) = reader.next_batch()? {
            let ids: Vec<&[u16]> = batch.ids.iter().map(Vec::as_slice).collect();
            let weights: Vec<&[f32]> = batch.weights.into_iter().flatten().map(Vec::as_slice).collect();
            sink(RouteSlice {
                step_id: batch.step_id,
                layer: batch.layer,
                row: batch.row,
                draft: batch.draft,
                ids: &ids,
                weights: &weights,
            })?;
        }
        Ok(())
    }
}
