//! Sums by request of what a report says of windows and loads, for comparisons: requests are the samples, so that a number whose sums by
//! request are known has an interval.
//!
//! A report keeps three sums by request and layer. These are all of them, made by a pass of their own over the routes and never stored:
//! requests x (layers + 1) x [`Layout::width`] numbers of eight bytes. Beyond [`MAX_CELLS`] of them the layers are left out, then
//! everything is.

mod collect;
mod gradients;
mod layout;

use super::trace_source::with_plan;
use super::{AnalysisError, pass::Plan, source::RouteSource};
use crate::metric::Report;
use crate::trace::Trace;
use crate::trace::manifest::WindowCompleteness;
pub use gradients::{GRADIENTS, LoadMetric};
pub use layout::{Cells, Layout};

/// Most numbers of one trace: 64 MB.
pub const MAX_CELLS: usize = 1 << 23;

/// What is known of how many drafts one request's windows kept, by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PositionSums {
    /// Windows that had draft i: of trees, a row i deep.
    pub had: u64,
    /// Of those, windows that accepted every draft before i.
    pub reached: u64,
    /// Windows that accepted draft i.
    pub kept: u64,
}

/// Sums by request, requests in the report's order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RequestTotals {
    layout: Layout,
    /// `[layers][requests]` sums; no layers where they would be too many.
    layers: Vec<Vec<Option<Box<[i64]>>>>,
    /// `[requests]` sums over all layers; empty where even they would be too many.
    overall: Vec<Option<Box<[i64]>>>,
    /// `[requests][drafts]`; empty where they would be too many.
    positions: Vec<Vec<PositionSums>>,
    /// Whether the layers were left out.
    pub without_layers: bool,
    /// Whether everything was left out.
    pub without_any: bool,
}

/// All requests' sums in one layer, or over all of them.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    layout: &'a Layout,
    requests: &'a [Option<Box<[i64]>>],
}

impl<'a> Table<'a> {
    /// What `of` says of each request, in the report's order; `None` of a request without windows.
    pub fn each<T>(&self, of: impl Fn(Cells<'a>) -> Option<T>) -> Vec<Option<T>> {
        let layout = self.layout;
        self.requests.iter().map(|cells| of(Cells { layout, cells: cells.as_deref()? })).collect()
    }
}

impl RequestTotals {
    /// The sums of the layer at that place in the report, or over all layers.
    pub fn table(&self, slot: Option<usize>) -> Option<Table<'_>> {
        let requests = match slot {
            Some(slot) => self.layers.get(slot)?,
            None => &self.overall,
        };
        (!requests.is_empty()).then_some(Table { layout: &self.layout, requests })
    }

    /// Each request's sums of the draft at place `i` (0 is the first).
    pub fn position(&self, i: usize) -> Option<Vec<PositionSums>> {
        self.positions.iter().map(|request| request.get(i).copied()).collect()
    }
}

/// The sums of an open trace, of which `report` is the report.
///
/// # Errors
/// When it cannot be read, or its tables contradict each other.
pub fn request_totals(trace: &Trace, report: &Report) -> Result<RequestTotals, AnalysisError> {
    if !matches!(report.run.window_completeness, WindowCompleteness::Full | WindowCompleteness::AcceptedOnly) {
        return Ok(RequestTotals::default());
    }
    with_plan(trace, trace.manifest().router_weights, |plan, routes| of_plan(plan, routes, report, MAX_CELLS))
}

fn of_plan(plan: &Plan<'_>, routes: &dyn RouteSource, report: &Report, most: usize) -> Result<RequestTotals, AnalysisError> {
    let Some(overall) = &report.overall else { return Ok(RequestTotals::default()) };
    let layout = Layout::of(overall);
    let requests = plan.steps.requests.iter().filter(|r| r.verify_steps > 0).count();
    let cells = |scopes: usize| requests.saturating_mul(scopes).saturating_mul(layout.width());
    let (without_layers, without_any) = (cells(plan.layers.len() + 1) > most, cells(1) > most);
    if without_any {
        return Ok(RequestTotals { without_layers, without_any, ..RequestTotals::default() });
    }
    let gradients = gradients::Gradients::of(report, &layout, plan.experts, without_layers);
    let found = collect::run(routes, plan, &layout, &gradients, if without_layers { 1 } else { plan.layers.len() })?;
    let (layers, overall) =
        if without_layers { (Vec::new(), split(found, 1, &layout).remove(0)) } else { by_layer(found, plan, &layout, &gradients) };
    let positions = if requests.saturating_mul(3 * report.acceptance.by_position.len()) <= most {
        positions(plan, report.acceptance.by_position.len())
    } else {
        Vec::new()
    };
    Ok(RequestTotals { layout, layers, overall, positions, without_layers, without_any })
}

/// `[scopes][requests]` of `[requests]` whose sums lie end to end. A request without windows in a scope has none there.
fn split(found: Vec<Option<Box<[i64]>>>, scopes: usize, layout: &Layout) -> Vec<Vec<Option<Box<[i64]>>>> {
    let mut out: Vec<Vec<Option<Box<[i64]>>>> = vec![Vec::with_capacity(found.len()); scopes];
    for cells in found {
        for (scope, out) in out.iter_mut().enumerate() {
            let part = cells.as_ref().and_then(|cells| cells.get(scope * layout.width()..(scope + 1) * layout.width()));
            out.push(part.filter(|part| part.iter().any(|&n| n != 0)).map(Into::into));
        }
    }
    out
}

type ByRequest = Vec<Option<Box<[i64]>>>;

/// The layers' sums, and those over all of them.
fn by_layer(found: ByRequest, plan: &Plan<'_>, layout: &Layout, gradients: &gradients::Gradients) -> (Vec<ByRequest>, ByRequest) {
    let layers = split(found, plan.layers.len(), layout);
    let requests = plan.steps.requests.len();
    let mut overall: ByRequest = vec![None; requests];
    for (slot, layer) in layers.iter().enumerate() {
        for (sum, cells) in overall.iter_mut().zip(layer) {
            let Some(cells) = cells else { continue };
            let sum = sum.get_or_insert_with(|| vec![0; layout.width()].into());
            for (at, (sum, &n)) in sum.iter_mut().zip(cells).enumerate() {
                // A layer's load moves the mean over layers by its weight in it.
                let n = layout.gradient_at(at).map_or(n, |metric| (n as f64 * gradients.weight(slot, metric)).round() as i64);
                *sum = sum.saturating_add(n);
            }
        }
    }
    (layers, overall)
}

/// As [`Acceptance`](crate::metric::report::Acceptance) counts them, by request.
fn positions(plan: &Plan<'_>, drafts: usize) -> Vec<Vec<PositionSums>> {
    let mut out = vec![vec![PositionSums::default(); drafts]; plan.steps.requests.len()];
    for step in plan.steps.steps.iter().filter(|s| s.is_verify() && s.rows > 0) {
        let Some(request) = out.get_mut(step.request as usize) else { continue };
        let (had, accepted) = (usize::from(step.drafts), usize::from(step.accepted));
        for (i, sums) in request.iter_mut().enumerate().take(had) {
            sums.had += 1;
            sums.reached += u64::from(accepted >= i);
            sums.kept += u64::from(accepted > i);
        }
    }
    out
}

#[cfg(test)]
pub(crate) mod tests;
