//! What a trace does not know is taken out of its report again: `null`, never a number that only looks like one.

use crate::metric::report::{Acceptance, Report, WindowStats};
use crate::trace::manifest::{Manifest, WindowCompleteness};

/// Takes out what this manifest says is unknown. Costs and groups, which come later, ask the manifest themselves.
pub fn unknown(report: &mut Report, manifest: &Manifest) {
    if !manifest.acceptance_known {
        acceptance(report);
    } else if manifest.window_completeness == WindowCompleteness::AcceptedOnly {
        rejected(report);
    }
    if !manifest.model.experts_known {
        experts(report);
    }
}

/// The statistics of all layers and numbers of rows, and those over all layers.
fn all_stats(report: &mut Report) -> impl Iterator<Item = &mut WindowStats> {
    let layers = report.layers.iter_mut().flat_map(|l| std::iter::once(&mut l.stats).chain(&mut l.by_rows));
    layers.chain(report.overall.iter_mut().flat_map(|o| std::iter::once(&mut o.stats).chain(&mut o.by_rows)))
}

/// Without acceptance, nothing is known of kept rows either.
fn acceptance(report: &mut Report) {
    rejected(report);
    all_stats(report).for_each(|stats| (stats.marginal_kept, stats.accepted_path) = (None, None));
    for request in &mut report.by_request {
        (request.tokens_per_step, request.accepted) = (None, None);
    }
    report.acceptance = Acceptance::default();
}

/// Without the number of experts, there is nothing to compare unions and loads with.
fn experts(report: &mut Report) {
    for stats in all_stats(report) {
        (stats.uniform_union, stats.lift) = (None, None);
    }
    report.layers.iter_mut().for_each(|layer| layer.load = None);
    report.overall.iter_mut().for_each(|overall| overall.load = None);
    let routers = report.draft.iter_mut().chain(&mut report.prefill);
    routers.flat_map(|routers| &mut routers.layers).for_each(|layer| layer.load = None);
}

/// Of windows of kept rows only, nothing is known of rejected ones.
fn rejected(report: &mut Report) {
    for stats in all_stats(report) {
        (stats.wasted_mean, stats.wasted_by_row, stats.marginal_rejected) = (None, None, None);
        stats.accepted_path.iter_mut().for_each(|path| path.wasted_mean = None);
    }
    for request in &mut report.by_request {
        request.wasted_mean = None;
        if let Some(sums) = &mut request.sums {
            sums.wasted = None;
        }
    }
}
