//! Counts to the report's structs: the only divisions.

use super::acceptance::acceptance;
use super::counts::{COVERAGE_ONE, LoadCounts, RequestSums, WindowCounts};
use super::frames::{self, By, NarrowRow};
use super::pass::{PassCounts, Plan};
use super::stats::Ratios;
use super::{AnalysisError, Input, Options, Wanted, advise, batch, forget, formulas, groups, warnings};
use crate::metric::Interval;
use crate::metric::report::{
    self, DraftLayer, DraftReport, LayerReport, Load, Overall, Report, RequestReport, RunFacts, SCHEMA, Spread, Totals, WindowStats,
};
use crate::trace::manifest::Manifest;
use crate::trace::{Phase, RequestEvent};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Makes the report of what the pass counted.
///
/// # Errors
/// When the data-frame engine fails.
pub fn assemble(
    input: &Input<'_>,
    plan: &Plan<'_>,
    counts: &PassCounts,
    options: &Options,
    wanted: &Wanted,
) -> Result<Report, AnalysisError> {
    let dominant = dominant_rows(counts);
    let builder = Builder { plan, counts, options };
    let groups: Vec<(usize, Vec<WindowStats>, WindowStats)> =
        counts.groups.iter().map(|(rows, layers)| builder.group(*rows, layers)).collect();

    let mut layers = Vec::with_capacity(plan.layers.len());
    for (slot, &layer) in plan.layers.iter().enumerate() {
        let of = |wanted: bool| {
            let chosen = groups.iter().filter(move |(rows, ..)| (Some(*rows) == dominant) == wanted);
            chosen.filter_map(move |(_, layers, _)| layers.get(slot)).filter(|s| s.windows > 0).cloned()
        };
        let load = counts.load.get(slot);
        layers.push(LayerReport {
            layer,
            k: plan.k as u16,
            experts: plan.experts as u16,
            stats: of(true).next().unwrap_or_else(|| empty(dominant.unwrap_or(0))),
            load: load.and_then(formulas::load),
            load_by_expert: load.filter(|l| l.by_expert.iter().any(|&n| n > 0)).map(|l| l.by_expert.clone()),
            mass_coverage: dominant.and_then(|rows| coverage(builder.counts_of(rows, slot)?)),
            time: None,
            cost: None,
            by_rows: of(false).collect(),
        });
    }
    // What is compared between layers and requests is grouped from one narrow frame.
    let frame = narrow(plan, counts);
    let grouped = |by| match dominant {
        Some(rows) => frames::group(&frame, rows as u16, by).map_err(|reason| AnalysisError::Frame { reason }),
        None => Ok(Vec::new()),
    };
    let means: Vec<(u16, f64)> = grouped(By::Layer)?.iter().filter_map(|g| Some((u16::try_from(g.key).ok()?, g.union_mean()?))).collect();
    let overall = dominant.and_then(|rows| {
        let stats = |wanted: bool| groups.iter().filter(move |(r, ..)| (*r == rows) == wanted).map(|(.., all)| all.clone());
        overall(plan, &layers, &means, stats(true).next()?, stats(false).collect(), merged(counts, rows).as_ref().and_then(coverage))
    });
    let mut report = Report {
        schema: SCHEMA.to_owned(),
        run: run_facts(input.name, input.manifest),
        totals: totals(input),
        acceptance: acceptance(plan.steps, options.resamples, options.seed),
        layers,
        overall,
        draft: routers(&counts.draft),
        prefill: routers(&counts.prefill),
        by_request: by_request(plan, counts, input.requests, dominant, &grouped(By::Request)?),
        telemetry: None,
        cost: None,
        advice: None,
        groups: None,
        expert_parallel: None,
        batch: None,
        warnings: Vec::new(),
    };
    forget::unknown(&mut report, input.manifest);
    report.batch = batch::analyze(input, plan, options)?;
    let costs = super::cost::fill(&mut report, input, plan, counts, options)?;
    if let Some(by) = &wanted.by {
        report.groups = Some(groups::groups(input, plan, counts, &report.layers, dominant, by, options)?);
    }
    let advice = dominant.and_then(|rows| advise::advice((input, plan, counts), rows, &report, costs.draws.as_ref(), options, wanted));
    report.warnings = warnings::of(input, plan, counts, &report, advice.as_ref());
    report.warnings.extend(costs.warnings);
    if let Some(table) = wanted.costs.as_ref().filter(|_| advice.is_some()) {
        report.warnings.extend(advise::table_warnings(table, options));
    }
    report.advice = advice;
    Ok(report)
}

/// The most frequent number of rows among windows; the larger on a tie.
fn dominant_rows(counts: &PassCounts) -> Option<usize> {
    let windows = |layers: &[Option<WindowCounts>]| layers.iter().flatten().map(|c| c.windows).sum::<u64>();
    counts.groups.iter().map(|(rows, layers)| (windows(layers), *rows)).filter(|(n, _)| *n > 0).max().map(|(_, rows)| rows)
}

struct Builder<'a> {
    plan: &'a Plan<'a>,
    counts: &'a PassCounts,
    options: &'a Options,
}

impl Builder<'_> {
    fn counts_of(&self, rows: usize, slot: usize) -> Option<&WindowCounts> {
        self.counts.groups.iter().find(|(r, _)| *r == rows)?.1.get(slot)?.as_ref()
    }

    /// Statistics of all layers for one number of rows, and of all layers together.
    fn group(&self, rows: usize, layers: &[Option<WindowCounts>]) -> (usize, Vec<WindowStats>, WindowStats) {
        // One ratio a layer and one over all of them, from the same resamples.
        let mut ratios = Ratios::new(layers.len() + 1);
        for (_, sums) in self.counts.sums.iter().filter(|((_, r), _)| *r == rows) {
            let mut all = RequestSums::default();
            sums.iter().for_each(|s| all.merge(s));
            ratios.push(sums.iter().chain(std::iter::once(&all)).map(|s| (s.union, s.windows)));
        }
        let intervals = ratios.intervals(self.options.resamples, self.options.seed);
        let interval = |at: usize| intervals.get(at).copied().flatten();
        let popularity = |slot: usize| self.counts.load.get(slot).and_then(|load| formulas::popularity_union(load, rows));
        let stats: Vec<WindowStats> = layers
            .iter()
            .enumerate()
            .map(|(slot, counts)| match counts {
                Some(counts) => self.stats(counts, interval(slot), popularity(slot)),
                None => empty(rows),
            })
            .collect();
        // The expectation over all layers weighs each layer by its windows, as the mean union does.
        let weighed = stats.iter().map(|s| Some((s.popularity_union? * s.windows as f64, s.windows)));
        let (sum, windows) = weighed.flatten().fold((0.0, 0), |(s, w), (x, n)| (s + x, w + n));
        let popularity = (windows > 0).then(|| sum / windows as f64);
        let all = match merged(self.counts, rows) {
            Some(counts) => self.stats(&counts, interval(layers.len()), popularity),
            None => empty(rows),
        };
        (rows, stats, all)
    }

    fn stats(&self, counts: &WindowCounts, ci95: Option<Interval>, popularity: Option<f64>) -> WindowStats {
        let (windows, k, experts) = (counts.windows, self.plan.k as f64, self.plan.experts as f64);
        let mean = |sum: u64| sum as f64 / windows as f64;
        // Nothing is said of kept and rejected rows where they are not known of every window.
        let known = counts.trees.as_ref().is_none_or(|trees| trees.unknown == 0);
        let ratio = |sum: u64, n: u64| (known && n > 0).then(|| sum as f64 / n as f64);
        let union = formulas::union(&counts.union_hist).map(|u| crate::metric::report::Union { ci95, ..u });
        let mut prefix = 0;
        let prefix_union = counts.marginal.iter().map(|m| {
            prefix += m;
            mean(prefix)
        });
        let uniform = formulas::uniform_union(experts, k, counts.rows);
        let lift = |expected: Option<f64>| formulas::lift(expected?, union.as_ref()?.mean, k);
        WindowStats {
            rows: counts.rows as u16,
            windows,
            prefix_union: prefix_union.collect(),
            marginal: counts.marginal.iter().map(|&m| mean(m)).collect(),
            marginal_kept: ratio(counts.kept_experts, counts.kept_rows),
            // What rejected rows add up to is what the kept rows had not touched: the wasted experts.
            marginal_rejected: ratio(counts.wasted, counts.rejected_rows),
            wasted_mean: ratio(counts.wasted, windows),
            wasted_by_row: (known && windows > 0).then(|| counts.wasted_by_row.iter().map(|&w| mean(w)).collect()),
            pairwise: formulas::pairwise(counts),
            lag_overlap_frac: formulas::by_lag(counts, |o, k| o / k),
            lag_jaccard: formulas::by_lag(counts, |o, k| o / (2.0 * k - o)),
            step_reuse: formulas::step_reuse(counts),
            uniform_union: Some(uniform),
            popularity_union: popularity,
            lift: lift(Some(uniform)),
            popularity_lift: lift(popularity),
            by_depth: formulas::by_depth(counts),
            accepted_path: formulas::accepted_path(counts),
            union,
        }
    }
}

/// A layer without windows.
fn empty(rows: usize) -> WindowStats {
    WindowStats {
        rows: rows as u16,
        windows: 0,
        union: None,
        prefix_union: Vec::new(),
        marginal: Vec::new(),
        marginal_kept: None,
        marginal_rejected: None,
        wasted_mean: None,
        wasted_by_row: None,
        pairwise: None,
        lag_overlap_frac: None,
        lag_jaccard: None,
        step_reuse: None,
        uniform_union: None,
        popularity_union: None,
        lift: None,
        popularity_lift: None,
        by_depth: None,
        accepted_path: None,
    }
}

/// All layers' windows of one number of rows.
fn merged(counts: &PassCounts, rows: usize) -> Option<WindowCounts> {
    let (_, layers) = counts.groups.iter().find(|(r, _)| *r == rows)?;
    layers.iter().flatten().cloned().reduce(|mut sum, layer| {
        sum.merge(&layer);
        sum
    })
}

fn coverage(counts: &WindowCounts) -> Option<Vec<f64>> {
    let windows = counts.coverage_windows as f64;
    (counts.coverage_windows > 0).then(|| counts.coverage.iter().map(|&c| c as f64 / COVERAGE_ONE / windows).collect())
}

fn overall(
    plan: &Plan<'_>,
    layers: &[LayerReport],
    means: &[(u16, f64)],
    stats: WindowStats,
    by_rows: Vec<WindowStats>,
    mass_coverage: Option<Vec<f64>>,
) -> Option<Overall> {
    // Ascending layers: a later one must be strictly larger.
    let worst = means.iter().copied().reduce(|worst, next| if next.1 > worst.1 { next } else { worst })?;
    let n = means.len() as f64;
    let mean = means.iter().map(|m| m.1).sum::<f64>() / n;
    let variance = means.iter().map(|m| (m.1 - mean).powi(2)).sum::<f64>() / n;
    let loads: Vec<Load> = layers.iter().filter_map(|l| l.load).collect();
    let load_mean = |of: fn(&Load) -> f64| loads.iter().map(of).sum::<f64>() / loads.len() as f64;
    Some(Overall {
        k: plan.k as u16,
        experts: plan.experts as u16,
        stats,
        load: (!loads.is_empty()).then(|| Load {
            entropy_bits: load_mean(|l| l.entropy_bits),
            effective_experts: load_mean(|l| l.effective_experts),
            top_1pct_share: load_mean(|l| l.top_1pct_share),
            max_over_mean: load_mean(|l| l.max_over_mean),
        }),
        mass_coverage,
        time: None,
        cost: None,
        by_rows,
        worst_layer: worst.0,
        layer_spread: Spread { min: means.iter().map(|m| m.1).fold(f64::INFINITY, f64::min), max: worst.1, sd: variance.sqrt() },
    })
}

fn routers(loads: &BTreeMap<u16, LoadCounts>) -> Option<DraftReport> {
    let layer = |(&layer, load): (&u16, &LoadCounts)| DraftLayer { layer, rows: load.rows, load: formulas::load(load) };
    (!loads.is_empty()).then(|| DraftReport { layers: loads.iter().map(layer).collect() })
}

/// The narrow frame: one row per request, layer and number of rows that has windows.
fn narrow(plan: &Plan<'_>, counts: &PassCounts) -> Vec<NarrowRow> {
    let request = |at: u32| plan.steps.requests.get(at as usize).map_or(at, |r| r.request_id);
    let of = |((at, rows), sums): &((u32, usize), Vec<RequestSums>)| {
        let (request, rows) = (request(*at), *rows as u16);
        let row = move |(&layer, s): (&u16, RequestSums)| NarrowRow {
            request,
            layer,
            rows,
            windows: s.windows,
            union: s.union,
            wasted: s.wasted,
        };
        plan.layers.iter().zip(sums.clone()).map(row).filter(|r| r.windows > 0).collect::<Vec<_>>()
    };
    counts.sums.iter().flat_map(of).collect()
}

fn by_request(
    plan: &Plan<'_>,
    counts: &PassCounts,
    requests: &[RequestEvent],
    dominant: Option<usize>,
    grouped: &[frames::Group],
) -> Vec<RequestReport> {
    let named: HashMap<u32, &RequestEvent> = requests.iter().map(|r| (r.request_id, r)).collect();
    let unknown: BTreeSet<u32> = plan
        .trees
        .iter()
        .flat_map(|trees| trees.unknown_paths())
        .filter_map(|at| plan.steps.steps.get(at))
        .filter(|step| Some(usize::from(step.rows)) == dominant)
        .map(|step| step.request)
        .collect();
    let report = |(at, span): (u32, &super::steps::RequestSpan)| {
        let known = !unknown.contains(&at);
        let group = grouped.binary_search_by_key(&span.request_id, |g| g.key).ok().and_then(|at| grouped.get(at));
        let user = named.get(&span.request_id);
        RequestReport {
            request_id: span.request_id,
            verify_steps: span.verify_steps,
            tokens_per_step: (span.verify_steps > 0).then(|| (span.accepted + span.verify_steps) as f64 / span.verify_steps as f64),
            union_mean: group.and_then(frames::Group::union_mean),
            wasted_mean: group.filter(|g| known && g.windows > 0).map(|g| g.wasted as f64 / g.windows as f64),
            accepted: Some(span.accepted),
            id: user.map(|r| r.id.clone()).filter(|id| !id.is_empty()),
            tags: user.map(|r| groups::tags(r).into_iter().collect()).unwrap_or_default(),
            sums: dominant.map(|rows| sums_by_layer(plan, counts, (at, rows), known)),
            identity: None,
        }
    };
    (0u32..).zip(&plan.steps.requests).map(report).collect()
}

/// What a request adds to the layers' means: zeros where it has no window. `known` says whether its rejected rows are.
fn sums_by_layer(plan: &Plan<'_>, counts: &PassCounts, key: (u32, usize), known: bool) -> report::RequestSums {
    let none = vec![RequestSums::default(); plan.layers.len()];
    let found = counts.sums.binary_search_by_key(&key, |(k, _)| *k).ok().and_then(|at| counts.sums.get(at));
    let sums = found.map_or(&none, |(_, sums)| sums);
    let column = |of: fn(&RequestSums) -> u64| sums.iter().map(of).collect();
    report::RequestSums { windows: column(|s| s.windows), union: column(|s| s.union), wasted: known.then(|| column(|s| s.wasted)) }
}

fn totals(input: &Input<'_>) -> Totals {
    let of = |phase: Phase| input.steps.iter().filter(|s| s.phase == phase).count() as u64;
    let mut requests: Vec<u32> = input.requests.iter().map(|r| r.request_id).chain(input.steps.iter().map(|s| s.request_id)).collect();
    requests.sort_unstable();
    requests.dedup();
    Totals {
        requests: requests.len() as u64,
        steps: input.steps.len() as u64,
        prefill_steps: of(Phase::Prefill),
        decode_steps: of(Phase::Decode),
        verify_steps: of(Phase::Verify),
        tokens_emitted: input.steps.iter().map(|s| u64::from(s.emitted)).sum(),
    }
}

fn run_facts(name: &str, m: &Manifest) -> RunFacts {
    RunFacts {
        name: name.to_owned(),
        format_version: m.format_version.clone(),
        written_by: m.written_by.clone(),
        complete: m.complete,
        incomplete_reason: m.incomplete_reason.clone(),
        started_unix_ns: m.started_unix_ns,
        ended_unix_ns: m.ended_unix_ns,
        model: m.model.clone(),
        drafter: m.drafter.clone(),
        sampling: m.sampling.clone(),
        verification: m.verification,
        engine: m.engine.clone(),
        device: m.device.clone(),
        window_completeness: m.window_completeness,
        id_space: m.id_space,
        token_hash: m.token_hash.clone(),
        instrumentation: m.instrumentation.clone(),
        emulated: m.emulated,
        router_weights: m.router_weights,
    }
}
