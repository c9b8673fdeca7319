//! Everything that limits a report's numbers, each with a stable code and one sentence.

use super::Input;
use super::overlap::MAX_PAIR_ROWS;
use super::pass::{PassCounts, Plan};
use crate::metric::advice::{Advice, CostSource};
use crate::metric::bounds::{FEW_REQUESTS, FEW_REQUESTS_CODE};
use crate::metric::report::Report;
use crate::metric::{Unit, counted_plain};
use crate::trace::manifest::{IdSpace, Verification, Warning, WindowCompleteness};

/// Below this, the 99th percentile is the largest value.
const FEW_WINDOWS: u64 = 100;

/// The warnings of a report whose numbers are there already; the manifest's own come first.
pub fn of(input: &Input<'_>, plan: &Plan<'_>, counts: &PassCounts, report: &Report, advice: Option<&Advice>) -> Vec<Warning> {
    let manifest = input.manifest;
    let mut warnings = manifest.warnings.clone();
    let mut warn = |code: &str, message: String| {
        if !warnings.iter().any(|w| w.code == code) {
            warnings.push(Warning::new(code, message));
        }
    };
    if !manifest.complete {
        let why = manifest.incomplete_reason.as_deref().unwrap_or("unknown");
        warn("trace_incomplete", format!("the trace is incomplete ({why}): numbers cover what was kept"));
    }
    if manifest.emulated {
        warn("emulated", "no real device ran: its times are not a device's times and none are shown".into());
    }
    match manifest.window_completeness {
        WindowCompleteness::Full => {}
        WindowCompleteness::AcceptedOnly => warn(
            "accepted_only",
            "only kept rows were recorded: a window's rows are its kept rows, unions are lower bounds of the verify windows', \
             wasted experts and rejected rows are unknown"
                .into(),
        ),
        WindowCompleteness::Counts => warn("no_windows", "only counts by expert were recorded: unions and overlaps are unknown".into()),
        WindowCompleteness::None if counts.load.iter().any(|load| load.rows > 0) => warn(
            "no_windows",
            "nobody said which rows were verified together: unions and overlaps are unknown, loads are of all rows".into(),
        ),
        WindowCompleteness::None => warn("no_windows", "no routes were recorded: unions and overlaps are unknown".into()),
    }
    match manifest.id_space {
        IdSpace::Logical => {}
        IdSpace::Physical => {
            warn("physical_ids", "expert ids are physical slots: replicas of one expert count as different experts".into());
        }
        IdSpace::Unknown => warn("unknown_ids", "nobody said whether expert ids are logical or physical slots".into()),
    }
    match manifest.verification {
        Verification::Exact => {}
        Verification::Batched => {
            warn(
                "batched_verification",
                "verify rows depend on the batch: near-ties may have fallen otherwise than in plain decoding".into(),
            );
        }
        Verification::Unknown => {
            warn("unknown_verification", "nobody said whether verify rows are computed as decode rows are: near-ties may differ".into());
        }
    }
    if !manifest.model.experts_known && !manifest.model.moe_layers.is_empty() {
        let message = format!(
            "the number of experts is not known ({} is the largest id seen + 1): uniform unions, lift and load are unknown; import with \
             --experts or --model-config",
            manifest.model.experts
        );
        warn("experts_unknown", message);
    }
    if !manifest.acceptance_known {
        warn("acceptance_unknown", "nobody said how many drafts were accepted: acceptance and rejected rows are unknown".into());
    }
    if report.totals.verify_steps == 0 {
        warn("no_verify_steps", "the trace has no verify step: acceptance and unions are unknown".into());
    } else if matches!(manifest.window_completeness, WindowCompleteness::Full | WindowCompleteness::AcceptedOnly) {
        let missing: Vec<String> = report.layers.iter().filter(|l| l.stats.windows == 0).map(|l| l.layer.to_string()).collect();
        if !missing.is_empty() {
            warn(
                "layers_without_windows",
                format!("no windows in {} of {} routed layers: {}", missing.len(), report.layers.len(), list(&missing)),
            );
        }
    }
    if let Some((step, layer, found, expected)) = counts.irregular.first {
        let message = format!(
            "{} left out because their rows are not those of their step; the first: step {step}, layer {layer} has {found} of {expected} rows",
            counted_plain(counts.irregular.windows, "window")
        );
        warn("irregular_windows", message);
    }
    if let Some(overall) = &report.overall {
        let stats = &overall.stats;
        if !overall.by_rows.is_empty() {
            let others: Vec<String> = overall.by_rows.iter().map(|s| s.rows.to_string()).collect();
            let message = format!(
                "windows have different lengths: numbers are of {}, those of {} rows are in `by_rows`",
                counted_plain(stats.rows, "row"),
                list(&others)
            );
            warn("mixed_rows", message);
        }
        if usize::from(stats.rows) > MAX_PAIR_ROWS {
            warn("many_rows", format!("windows of more than {MAX_PAIR_ROWS} rows have no pairwise overlaps"));
        }
        let left_out = &plan.limits.without_pairs;
        if !left_out.is_empty() {
            let rows: Vec<String> = left_out.iter().map(u16::to_string).collect();
            warn(
                "pairs_left_out",
                format!("windows of {} rows have no pairwise overlaps: their number times k squared is too large", list(&rows)),
            );
        }
        let fewest = report.layers.iter().map(|l| l.stats.windows).filter(|&n| n > 0).min().unwrap_or(0);
        if fewest < FEW_WINDOWS {
            warn(
                "few_windows",
                format!(
                    "{} in the least covered layer: p99 needs {FEW_WINDOWS} to differ from the largest value",
                    counted_plain(fewest, "window")
                ),
            );
        }
        if stats.union.as_ref().is_some_and(|u| u.ci95.is_none()) {
            warn("too_few_requests", "intervals are drawn over requests and need at least two".into());
        }
    } else if report.acceptance.tokens_per_step.is_some() && report.acceptance.tokens_per_step_ci95.is_none() {
        warn("too_few_requests", "intervals are drawn over requests and need at least two".into());
    }
    let requests = report.by_request.iter().filter(|r| r.verify_steps > 0).count() as u64;
    if (2..FEW_REQUESTS).contains(&requests) {
        let message =
            format!("intervals come from {requests} requests; of fewer than {FEW_REQUESTS} they are too narrow: record more requests");
        warn(FEW_REQUESTS_CODE, message);
    } else if let Some(groups) = &report.groups {
        // Of all requests together there are enough, of a group's own there need not be.
        let few = groups.groups.iter().filter(|g| g.has_few()).count();
        if few > 0 {
            let message = format!(
                "{few} of {} groups have fewer than {FEW_REQUESTS} requests: their intervals, marked !, are too narrow; record more requests of \
                 them",
                groups.groups.len()
            );
            warn("few_requests_in_groups", message);
        }
    }
    if let Some(trees) = plan.trees {
        let message = format!(
            "{} of {} verify windows are trees: a row's number is not its depth, see `by_depth` and `accepted_path`; `pairwise` and \
             `marginal` go by row, lags by ancestor",
            trees.len(),
            report.totals.verify_steps
        );
        warn("trees", message);
        let unknown: Vec<String> =
            trees.unknown_paths().filter_map(|at| plan.steps.steps.get(at)).map(|step| step.step_id.to_string()).collect();
        if !unknown.is_empty() {
            let message = format!(
                "the accepted rows of {} of {} trees are not known, for the emitted tokens fit several paths or none: steps {}; wasted \
                 experts and those of kept and rejected rows are unknown, but for the other windows' in `accepted_path`",
                unknown.len(),
                trees.len(),
                list(&unknown)
            );
            warn("unknown_paths", message);
        }
    }
    if let Some(batch) = &report.batch {
        let message = "steps of several requests share forward passes: a window's union is one request's, those of passes are in `batch`; \
                       a step's times are its pass's";
        warn("shared_passes", message.into());
        if batch.passes_with_prefill > 0 {
            warn("passes_with_prefill", format!("{} not in `batch`: prompt rows ran with them", are(batch.passes_with_prefill, "pass")));
        }
        if batch.overall.is_none() {
            warn("no_whole_passes", "no pass has all rows of all its steps in the routes: unions of passes are unknown".into());
        } else if batch.overall.is_some_and(|o| o.pass_union_ci95.is_none()) {
            let message = "intervals of passes are drawn over groups of requests that share no pass, and need at least two";
            warn("too_few_batches", message.into());
        }
    }
    if report.layers.iter().any(|l| l.stats.windows > 0) && report.layers.iter().all(|l| l.mass_coverage.is_none()) {
        // Only specprof's own engines take its options.
        let own = manifest.engine.starts_with("specprof") || manifest.engine == "synthetic";
        let how = if own { "recorded (`record --router-probs`)" } else { "in what was imported" };
        warn("no_router_weights", format!("gate weights were not {how}: mass coverage is unknown"));
    }
    let windows = || counts.groups.iter().flat_map(|(_, layers)| layers.iter().flatten());
    let left_out: u64 = windows().map(|w| w.coverage_left_out).sum();
    if left_out > 0 {
        let message =
            format!("{} not in the mass coverage, for gate weights that are all 0, negative or no numbers", are(left_out, "window"));
        warn("coverage_left_out", message);
    }
    match advice {
        None if plan.trees.is_some() => {
            warn(
                "no_advice",
                "a best draft length needs verify windows that are chains: the first rows of a tree are no shorter draft".into(),
            );
        }
        None => warn("no_advice", "a best draft length needs verify windows with all their rows and known acceptance".into()),
        Some(advice) if advice.best_draft_len.is_none() => {
            let why = advice.unknown_because.as_deref().unwrap_or("they come to no numbers");
            warn("no_step_cost", format!("a best draft length needs step costs, which are unknown: {why}"));
        }
        Some(advice) if advice.cost_source == Some(CostSource::Measured) => {
            let cost = report.overall.as_ref().and_then(|o| o.cost.as_ref());
            if let Some((slope, [low, high])) = cost.and_then(|c| Some((c.us_per_expert?, c.ci95?))).filter(|(_, [low, _])| *low <= 0.0) {
                let us = |us: f64| Unit::Microseconds.show(us);
                let message = format!(
                    "the advice's step costs rest on {} for each distinct expert (95 %: {} to {}), which is not told apart from 0: record more \
                     requests on a quiet machine",
                    us(slope),
                    us(low),
                    us(high)
                );
                warn("costs_unclear", message);
            }
        }
        Some(_) => {}
    }
    warnings
}

/// `1 pass is`, `2 passes are`.
fn are(n: u64, noun: &str) -> String {
    format!("{} {}", counted_plain(n, noun), if n == 1 { "is" } else { "are" })
}

/// The first few entries, and how many more.
fn list(entries: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = entries.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if entries.len() > SHOWN { format!("{shown} and {} more", entries.len() - SHOWN) } else { shown }
}
