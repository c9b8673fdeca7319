//! A trace on disk as the input of the analysis.

use super::idle::WithIdle;
use super::pass::Plan;
use super::source::{RouteSlice, RouteSource};
use super::steps::{StepRow, StepTable};
use super::trees::{TreeRow, Trees};
use super::{AnalysisError, Baseline, Input, KernelSource, Options, StepTime, Timed, Wanted, analyze_input, identity, plan_of, telemetry};
use crate::metric::report::{Report, RequestIdentity};
use crate::trace::throttling::THROTTLED;
use crate::trace::{Kernels, Phase, RequestEvent, RouteUnit, Steps, Throttling, Trace};
use std::collections::HashMap;
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
    analyze_wanted(trace, None, options, &Wanted::default())
}

/// The report of an open trace with more than every report has; its verify steps are compared with the decode steps of another one as
/// well.
///
/// # Errors
/// As [`analyze`]; when what is wanted is not in the trace or does not fit it; [`AnalysisError::Baseline`] when the other trace is of
/// another model or device.
pub fn analyze_wanted(trace: &Trace, baseline: Option<&Trace>, options: &Options, wanted: &Wanted) -> Result<Report, AnalysisError> {
    let mut loaded = Loaded::new(trace)?;
    let other = baseline.map(Other::new).transpose()?;
    let mut report = analyze_input(&loaded.input(trace, other.as_ref().map(Other::baseline)), options, wanted)?;
    for request in &mut report.by_request {
        request.identity = loaded.identities.remove(&request.request_id);
    }
    let samples = trace.telemetry()?;
    report.telemetry = telemetry::strip(&samples, trace.manifest().started_unix_ns);
    // Traces of other writers do not say so themselves.
    let told = report.warnings.iter().any(|w| w.code == THROTTLED);
    report.warnings.extend(Throttling::of(&samples).warning().filter(|_| !told));
    Ok(report)
}

/// The small tables of a trace, and where its routes and operations are.
pub(super) struct Loaded<'t> {
    name: String,
    steps: Vec<StepRow>,
    times: Vec<StepTime>,
    draft_probs: Vec<Option<Vec<f32>>>,
    trees: Trees,
    passes: Vec<Option<u32>>,
    requests: Vec<RequestEvent>,
    /// By request.
    pub(super) identities: HashMap<u32, RequestIdentity>,
    routes: Units,
    kernels: WithIdle<'t>,
}

impl<'t> Loaded<'t> {
    /// Reads the tables.
    ///
    /// # Errors
    /// When they cannot be read, or contradict each other.
    pub(super) fn new(trace: &'t Trace) -> Result<Self, AnalysisError> {
        let table = trace.steps_with_details()?;
        let requests = trace.requests()?;
        // The directory as it was named: `.` has no name of its own.
        let name = trace.dir().file_name().map_or_else(|| trace.dir().to_string_lossy(), |name| name.to_string_lossy());
        let routes = Units { units: trace.route_units()?, bytes: trace.route_bytes(), weights: trace.manifest().router_weights };
        let rest = || (trees(&table), step_rows(&table), step_times(&table));
        let (identities, (trees, steps, times)) = rayon::join(|| identity::of(&table, &requests), rest);
        Ok(Self {
            kernels: WithIdle::new(trace, trace.manifest(), &steps, &times),
            name: name.into_owned(),
            identities,
            trees: trees?,
            steps,
            times,
            draft_probs: table.draft_probs,
            passes: table.pass_id,
            requests,
            routes,
        })
    }

    /// All of the trace as the analysis needs it.
    pub(super) fn input<'a>(&'a self, trace: &'a Trace, baseline: Option<Baseline<'a>>) -> Input<'a> {
        Input {
            name: &self.name,
            manifest: trace.manifest(),
            steps: &self.steps,
            draft_probs: &self.draft_probs,
            trees: &self.trees,
            passes: &self.passes,
            pass_unions: None,
            requests: &self.requests,
            routes: &self.routes,
            timed: Timed { times: &self.times, kernels: &self.kernels },
            baseline,
        }
    }
}

/// The steps of another trace, to be compared with.
pub(super) struct Other<'a> {
    trace: &'a Trace,
    steps: Vec<StepRow>,
    times: Vec<StepTime>,
    kernels: WithIdle<'a>,
}

impl<'a> Other<'a> {
    /// Reads them.
    ///
    /// # Errors
    /// When they cannot be read.
    pub(super) fn new(trace: &'a Trace) -> Result<Self, AnalysisError> {
        let table = trace.steps()?;
        let (steps, times) = (step_rows(&table), step_times(&table));
        Ok(Self { kernels: WithIdle::new(trace, trace.manifest(), &steps, &times), trace, steps, times })
    }

    /// What is compared with.
    pub(super) fn baseline(&self) -> Baseline<'_> {
        Baseline { manifest: self.trace.manifest(), steps: &self.steps, timed: Timed { times: &self.times, kernels: &self.kernels } }
    }
}

/// The plan and the routes of an open trace, for a pass of its own; with their gate weights, if wanted.
///
/// # Errors
/// When it cannot be read, or its tables contradict each other; then what `work` returned.
pub(super) fn with_plan<T>(
    trace: &Trace,
    weights: bool,
    work: impl FnOnce(&Plan<'_>, &dyn RouteSource) -> Result<T, AnalysisError>,
) -> Result<T, AnalysisError> {
    let steps = trace.steps_with_details()?;
    let trees = trees(&steps)?;
    let table = StepTable::new(&step_rows(&steps))?.with_trees(&trees);
    drop(steps);
    let mut plan = plan_of(trace.manifest(), &table)?;
    plan.trees = Some(&trees).filter(|trees| !trees.is_empty());
    work(&plan, &Units { units: trace.route_units()?, bytes: trace.route_bytes(), weights })
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
            context_len: *steps.context_len.get(at)?,
        })
    };
    (0..steps.len()).map_while(of).collect()
}

/// The verify steps whose windows are no chains.
fn trees(steps: &Steps) -> Result<Trees, AnalysisError> {
    let mut trees = Trees::default();
    for (at, parents) in steps.parents.iter().enumerate() {
        let Some(parents) = parents.as_deref().filter(|_| steps.phase.get(at) == Some(&Phase::Verify)) else { continue };
        let step = (steps.step_id.get(at), steps.rows.get(at), steps.accepted.get(at));
        let (Some(&step_id), Some(&rows), Some(&accepted)) = step else { continue };
        let (tokens, emitted) = (steps.input_tokens.get(at), steps.emitted_tokens.get(at));
        trees.add(at, TreeRow { step_id, rows, parents, tokens, emitted, accepted })?;
    }
    Ok(trees)
}

/// Times by step. Without host times there are none by the host's clock, whatever stands in the columns.
fn step_times(steps: &Steps) -> Vec<StepTime> {
    let host = |ns: i64| if steps.host_times { ns } else { 0 };
    let of = |at: usize| {
        Some(StepTime {
            context_len: *steps.context_len.get(at)?,
            step_ns: host(steps.host_end_ns.get(at)?.saturating_sub(*steps.host_begin_ns.get(at)?)),
            target_ns: host(*steps.target_host_ns.get(at)?),
            device_ns: *steps.device_ns.get(at)?,
        })
    };
    (0..steps.len()).map_while(of).collect()
}

impl KernelSource for Trace {
    fn any(&self) -> bool {
        self.has_kernels()
    }

    fn each(&self, sink: &mut dyn FnMut(&Kernels) -> Result<(), AnalysisError>) -> Result<(), AnalysisError> {
        self.each_kernels(sink)
    }
}

struct Units {
    units: Vec<RouteUnit>,
    bytes: u64,
    weights: bool,
}

impl RouteSource for Units {
    fn units(&self) -> usize {
        self.units.len()
    }

    fn bytes(&self) -> u64 {
        self.bytes
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
