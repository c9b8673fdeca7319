//! Unions of whole forward passes, where steps of several requests share them: a reading of the routes of its own.
//!
//! A unit of routes may begin or end within a pass. What it has of such a pass is kept as the experts of each layer, and put
//! together when all units are read.

use super::AnalysisError;
use super::pass::Plan;
use super::passes::{Pass, Passes};
use super::source::{RouteSlice, RouteSource};
use super::stats::Ratios;
use super::steps::StepTable;
use super::window::{Context, outside, unlisted};
use super::{Input, Options};
use crate::metric::batch::{Batch, BatchLayer, BatchSize, BatchStats};
use crate::trace::manifest::WindowCompleteness;
use crate::trace::{Manifest, Phase};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Sums over passes of one layer, or of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sums {
    /// Number of passes.
    pub passes: u64,
    /// Steps of those passes.
    pub steps: u64,
    /// Sum over passes and steps of the step's union.
    pub by_step: u64,
    /// Sum over passes of the pass's union.
    pub by_pass: u64,
}

impl Sums {
    /// Adds other passes.
    pub fn merge(&mut self, other: &Self) {
        self.passes += other.passes;
        self.steps += other.steps;
        self.by_step += other.by_step;
        self.by_pass += other.by_pass;
    }

    /// Numerators and denominators of [`BatchStats`], in its order.
    fn ratios(&self) -> [(u64, u64); 4] {
        [(self.by_step, self.steps), (self.by_step, self.passes), (self.by_pass, self.passes), (self.by_step, self.by_pass)]
    }

    /// The means, without intervals; `None` without passes.
    fn stats(&self) -> Option<BatchStats> {
        let [request, sum, pass, sharing] = self.ratios().map(|(n, d)| n as f64 / d as f64);
        (self.passes > 0 && self.by_pass > 0).then_some(BatchStats {
            passes: self.passes,
            request_union_mean: request,
            request_union_ci95: None,
            union_sum_mean: sum,
            union_sum_ci95: None,
            pass_union_mean: pass,
            pass_union_ci95: None,
            sharing_ratio: sharing,
            sharing_ratio_ci95: None,
        })
    }
}

/// What whole passes come to, before anything is divided: all that is kept of them in a partial report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassUnions {
    /// By (group of requests, slot).
    pub by_group: BTreeMap<(u32, usize), Sums>,
    /// By number of requests in the pass, all layers together.
    pub by_requests: BTreeMap<u32, Sums>,
}

impl PassUnions {
    /// Adds others of the same groups.
    pub fn merge(&mut self, other: &Self) {
        for (key, sums) in &other.by_group {
            self.by_group.entry(*key).or_default().merge(sums);
        }
        for (requests, sums) in &other.by_requests {
            self.by_requests.entry(*requests).or_default().merge(sums);
        }
    }
}

/// A layer's part of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Part {
    /// Steps with all their rows.
    steps: u32,
    /// Sum of their unions.
    by_step: u64,
    /// Whether a step was not recorded as a window has to be.
    broken: bool,
    /// The experts that they touched, any number of times.
    experts: Vec<u16>,
}

/// What some units have counted.
#[derive(Debug, Default)]
struct Counted {
    unions: PassUnions,
    /// By (pass, slot): passes that may go on in another unit.
    parts: BTreeMap<(u32, usize), Part>,
    /// Experts in the parts.
    held: usize,
}

impl Counted {
    fn add(&mut self, pass: Pass, slot: usize, by_step: u64, by_pass: u64) {
        let sums = Sums { passes: 1, steps: u64::from(pass.steps), by_step, by_pass };
        self.unions.by_group.entry((pass.group, slot)).or_default().merge(&sums);
        self.unions.by_requests.entry(pass.steps).or_default().merge(&sums);
    }

    fn merge(&mut self, other: Self) {
        self.unions.merge(&other.unions);
        self.held += other.held;
        for (key, part) in other.parts {
            let mine = self.parts.entry(key).or_default();
            mine.steps += part.steps;
            mine.by_step += part.by_step;
            mine.broken |= part.broken;
            mine.experts.extend(part.experts);
        }
    }

    /// Counts the passes that were read in several units; those that lack rows are dropped.
    fn put_together(&mut self, passes: &Passes) {
        for ((at, slot), mut part) in std::mem::take(&mut self.parts) {
            part.experts.sort_unstable();
            part.experts.dedup();
            let Some(&pass) = passes.passes.get(at as usize) else { continue };
            if part.steps == pass.steps && !part.broken {
                self.add(pass, slot, part.by_step, part.experts.len() as u64);
            }
        }
    }
}

/// An expert of a layer: the step and the pass that touched it last, each by one more than its place.
#[derive(Debug, Clone, Copy, Default)]
struct Touched {
    step: u32,
    pass: u32,
}

/// A layer's part of the open pass.
#[derive(Debug, Clone, Copy, Default)]
struct Open {
    steps: u32,
    by_step: u64,
    union: u64,
    broken: bool,
}

/// The rows of one step in one layer.
#[derive(Debug, Clone, Copy)]
struct Run {
    step_id: u32,
    layer: u16,
    slot: usize,
    at: usize,
    rows: usize,
    union: u64,
    broken: bool,
}

/// Reads one unit.
struct Reader<'a> {
    plan: &'a Plan<'a>,
    passes: &'a Passes,
    touched: Vec<Touched>,
    open: Vec<Open>,
    /// The open pass.
    pass: Option<u32>,
    run: Option<Run>,
    /// Where the step of the last row is.
    hint: usize,
    out: Counted,
    /// Whether a pass was closed: the open one is not the unit's first.
    has_closed: bool,
}

impl<'a> Reader<'a> {
    fn new(plan: &'a Plan<'a>, passes: &'a Passes) -> Self {
        let (layers, experts) = (plan.layers.len(), plan.experts);
        Self {
            plan,
            passes,
            touched: vec![Touched::default(); layers * experts],
            open: vec![Open::default(); layers],
            pass: None,
            run: None,
            hint: 0,
            out: Counted::default(),
            has_closed: false,
        }
    }

    fn feed(&mut self, slice: &RouteSlice<'_>) -> Result<(), AnalysisError> {
        let k = self.plan.k;
        if !slice.is_rectangular() || slice.ids.len() != k {
            let reason = format!("{} id columns where the manifest says {k} experts per token", slice.ids.len());
            return Err(AnalysisError::Routes { step: slice.step_id.first().copied().unwrap_or(0), layer: 0, reason });
        }
        for i in 0..slice.len() {
            if slice.draft[i] {
                continue;
            }
            let (step_id, layer) = (slice.step_id[i], slice.layer[i]);
            if self.run.is_none_or(|run| run.step_id != step_id || run.layer != layer) {
                self.close_run();
                self.begin(step_id, layer)?;
            }
            let Some(run) = &mut self.run else { continue };
            run.broken |= usize::from(slice.row[i]) != run.rows;
            run.rows += 1;
            let Some(pass) = self.pass else { continue };
            let cells = &mut self.touched[run.slot * self.plan.experts..(run.slot + 1) * self.plan.experts];
            for column in slice.ids {
                let Some(cell) = cells.get_mut(usize::from(column[i])) else {
                    return Err(outside(context(self.plan, run), layer, self.plan.experts));
                };
                run.union += u64::from(cell.step != run.at as u32 + 1);
                self.open[run.slot].union += u64::from(cell.pass != pass + 1);
                *cell = Touched { step: run.at as u32 + 1, pass: pass + 1 };
            }
        }
        Ok(())
    }

    /// Begins the rows of a step in a layer, unless they belong to no pass that counts.
    fn begin(&mut self, step_id: u32, layer: u16) -> Result<(), AnalysisError> {
        let Some(at) = self.plan.steps.find(step_id, self.hint) else {
            return Err(AnalysisError::Routes { step: step_id, layer, reason: "the step is not in `steps`".into() });
        };
        self.hint = at;
        let pass = self.passes.of(at);
        if pass != self.pass {
            self.close_pass(true);
            self.pass = pass;
        }
        if pass.is_some() {
            let run = Run { step_id, layer, slot: 0, at, rows: 0, union: 0, broken: false };
            let slot = self.plan.slot(layer).ok_or_else(|| unlisted(context(self.plan, &run), layer))?;
            self.run = Some(Run { slot, ..run });
        }
        Ok(())
    }

    fn close_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        let Some(step) = self.plan.steps.steps.get(run.at) else { return };
        let (wanted, open) = (usize::from(step.rows), &mut self.open[run.slot]);
        let whole = run.rows == wanted || (self.plan.kept_rows_only && step.phase == Phase::Verify && run.rows < wanted);
        open.steps += 1;
        open.by_step += run.union;
        open.broken |= run.broken || !whole;
    }

    /// Ends the open pass. The unit's first and last may have more steps in another unit, `behind` says whether one follows.
    fn close_pass(&mut self, behind: bool) {
        let may_go_on = !(behind && self.has_closed);
        let Some(at) = self.pass.take() else { return };
        self.has_closed = true;
        let Some(&pass) = self.passes.passes.get(at as usize) else { return };
        for (slot, open) in self.open.iter_mut().enumerate() {
            let Open { steps, by_step, union, broken } = std::mem::take(open);
            if steps == pass.steps && !broken {
                self.out.add(pass, slot, by_step, union);
            } else if steps > 0 && may_go_on {
                let cells = &self.touched[slot * self.plan.experts..(slot + 1) * self.plan.experts];
                let experts: Vec<u16> = (0u16..).zip(cells).filter(|(_, cell)| cell.pass == at + 1).map(|(id, _)| id).collect();
                self.out.held += experts.len();
                self.out.parts.insert((at, slot), Part { steps, by_step, broken, experts });
            }
        }
    }

    fn finish(mut self) -> Counted {
        self.close_run();
        self.close_pass(false);
        self.out
    }
}

/// Where a run's rows are from, for an error.
fn context(plan: &Plan<'_>, run: &Run) -> Context {
    let step = plan.steps.steps.get(run.at);
    Context {
        step_id: run.step_id,
        at: run.at,
        first: run.at,
        request: step.map_or(0, |s| s.request),
        phase: step.map_or(Phase::Verify, |s| s.phase),
        rows: step.map_or(0, |s| usize::from(s.rows)),
        accepted: step.map_or(0, |s| usize::from(s.accepted)),
    }
}

fn count(source: &dyn RouteSource, plan: &Plan<'_>, passes: &Passes) -> Result<PassUnions, AnalysisError> {
    let unit = |mut sum: Counted, at: usize| -> Result<Counted, AnalysisError> {
        let mut reader = Reader::new(plan, passes);
        source.read(at, &mut |slice| reader.feed(&slice))?;
        sum.merge(reader.finish());
        plan.limits.check_waiting(sum.held, 1)?;
        Ok(sum)
    };
    let both = |mut a: Counted, b: Counted| -> Result<Counted, AnalysisError> {
        a.merge(b);
        plan.limits.check_waiting(a.held, 1)?;
        Ok(a)
    };
    let mut counted = (0..source.units()).into_par_iter().try_fold(Counted::default, unit).try_reduce(Counted::default, both)?;
    counted.put_together(passes);
    Ok(counted.unions)
}

/// Whether rows are those of windows; whatever they are otherwise, they are not those of a pass.
fn has_windows(manifest: &Manifest) -> bool {
    matches!(manifest.window_completeness, WindowCompleteness::Full | WindowCompleteness::AcceptedOnly)
}

/// The passes of a trace that may be a part of one in which passes are shared; `None` where no step has the number of one.
///
/// # Errors
/// When the numbers of passes break the format's rules.
pub fn passes_of_part(manifest: &Manifest, table: &StepTable, ids: &[Option<u32>]) -> Result<Option<Passes>, AnalysisError> {
    if !has_windows(manifest) || ids.iter().all(Option::is_none) {
        return Ok(None);
    }
    Passes::of_steps(table, ids, manifest.passes_known).map(Some)
}

/// The passes of a whole trace; `None` where none is shared.
///
/// # Errors
/// As [`passes_of_part`].
pub fn passes_of(manifest: &Manifest, table: &StepTable, ids: &[Option<u32>]) -> Result<Option<Passes>, AnalysisError> {
    if has_windows(manifest) { Passes::new(table, ids, manifest.passes_known) } else { Ok(None) }
}

/// Counts the unions of these passes.
///
/// # Errors
/// When the routes cannot be read.
pub fn scan(routes: &dyn RouteSource, plan: &Plan<'_>, passes: &Passes) -> Result<PassUnions, AnalysisError> {
    plan.limits.check_sums(u64::from(passes.groups).saturating_mul(plan.layers.len() as u64))?;
    count(routes, plan, passes)
}

/// Unions by request and by pass; `None` where no steps share a pass. What was counted before is taken as it is.
///
/// # Errors
/// As [`passes_of`] and [`scan`].
pub fn analyze(input: &Input<'_>, plan: &Plan<'_>, options: &Options) -> Result<Option<Batch>, AnalysisError> {
    let Some(passes) = passes_of(input.manifest, plan.steps, input.passes)? else { return Ok(None) };
    let read;
    let unions = match input.pass_unions {
        Some(counted) => counted,
        None => {
            read = scan(input.routes, plan, &passes)?;
            &read
        }
    };
    Ok(Some(report(plan, &passes, unions, options)))
}

fn report(plan: &Plan<'_>, passes: &Passes, unions: &PassUnions, options: &Options) -> Batch {
    let layers = plan.layers.len();
    let mut totals = vec![Sums::default(); layers + 1];
    let mut ratios = Ratios::new(4 * (layers + 1));
    for group in 0..passes.groups {
        let mut row = vec![Sums::default(); layers + 1];
        for (&(_, slot), sums) in unions.by_group.range((group, 0)..(group + 1, 0)) {
            row[slot].merge(sums);
            row[layers].merge(sums);
        }
        ratios.push(row.iter().flat_map(Sums::ratios));
        totals.iter_mut().zip(&row).for_each(|(total, sums)| total.merge(sums));
    }
    let intervals = ratios.intervals(options.resamples, options.seed);
    let interval = |at: usize, which: usize| intervals.get(4 * at + which).copied().flatten();
    let stats = |at: usize| {
        totals[at].stats().map(|stats| BatchStats {
            request_union_ci95: interval(at, 0),
            union_sum_ci95: interval(at, 1),
            pass_union_ci95: interval(at, 2),
            sharing_ratio_ci95: interval(at, 3),
            ..stats
        })
    };
    let n = passes.passes.len();
    let mut requests_histogram = Vec::new();
    for pass in &passes.passes {
        let requests = pass.steps as usize;
        requests_histogram.resize(requests_histogram.len().max(requests + 1), 0);
        requests_histogram[requests] += 1;
    }
    let mean = |of: fn(&Pass) -> u64| passes.passes.iter().map(of).sum::<u64>() as f64 / n.max(1) as f64;
    Batch {
        passes: n as u64,
        passes_with_prefill: passes.with_prefill,
        requests_per_pass: mean(|pass| u64::from(pass.steps)),
        rows_per_pass: mean(|pass| pass.rows),
        requests_histogram,
        overall: stats(layers),
        layers: plan.layers.iter().enumerate().filter_map(|(at, &layer)| Some(BatchLayer { layer, stats: stats(at)? })).collect(),
        by_requests: unions.by_requests.iter().filter_map(|(&requests, sums)| Some(BatchSize { requests, stats: sums.stats()? })).collect(),
    }
}
