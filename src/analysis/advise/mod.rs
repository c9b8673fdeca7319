//! The best draft length, and what would help: everything out of one recording.

mod calibrated;
mod confidence;
mod doubt;
mod prefixes;
mod step_cost;
mod table_doubt;
#[cfg(test)]
mod tests;

use super::cost::TimeDraws;
use super::groups::tags;
use super::pass::{PassCounts, Plan};
use super::stats::{interval_of, percentile_interval};
use super::steps::Step;
use super::{Input, Options, Wanted};
use crate::metric::Interval;
use crate::metric::advice::{Advice, Best, Budget, CostSource, DraftLength, GroupAdvice, WhatIf};
use crate::metric::bounds::FEW_REQUESTS;
use crate::metric::report::{Overall, Report};
use crate::trace::manifest::WindowCompleteness;
pub use calibrated::{PassCosts, fits, slope_intervals, slopes};
use doubt::{Costs, Doubt, Drawn, Row, Whose};
use prefixes::{DraftSums, Ideal, Point, Windows, best, curve, point};
use rayon::prelude::*;
use std::collections::BTreeMap;
use step_cost::{Coefficients, Recorded, StepCost};
pub use table_doubt::warnings as table_warnings;

/// Shares of the gate mass that budgets of experts are looked for at.
const BUDGET_MASS: [f64; 6] = [0.8, 0.9, 0.95, 0.98, 0.99, 0.999];

/// The advice of a trace whose windows have `rows` rows; `None` when acceptance or rejected rows are unknown, some windows are
/// trees, or there are none. `times` are the measured ones by resample, where they have intervals.
pub fn advice(
    (input, plan, counts): (&Input<'_>, &Plan<'_>, &PassCounts),
    rows: usize,
    report: &Report,
    times: Option<&TimeDraws>,
    options: &Options,
    wanted: &Wanted,
) -> Option<Advice> {
    if input.manifest.window_completeness != WindowCompleteness::Full || !input.manifest.acceptance_known || rows < 2 {
        return None;
    }
    // The first rows of a tree are not what a shorter draft would have been.
    let is_tree = |(at, step): (usize, &Step)| usize::from(step.rows) == rows && plan.trees.is_some_and(|trees| trees.get(at).is_some());
    if plan.steps.steps.iter().enumerate().any(is_tree) {
        return None;
    }
    let windows = Windows::new(plan.steps, &counts.steps, rows);
    let requests = windows.by_request(|_| true);
    if requests.is_empty() {
        return None;
    }
    let experts: u64 = windows.steps.iter().map(|(_, sum)| sum.union()).sum();
    let recorded = Recorded {
        drafts: windows.drafts as f64,
        block: input.manifest.drafter.external.is_some(),
        decode_experts: (plan.k * windows.layers as usize) as f64,
        draft_cost: wanted.draft_cost,
    };
    // Measured or modelled, never both.
    let measured = || StepCost::measured(report, &recorded, experts as f64 / windows.steps.len() as f64);
    let measured = match &wanted.costs {
        _ if wanted.model_only => Err("the model of bytes was asked for".to_owned()),
        Some(table) => StepCost::calibrated(table, input.manifest, rows, wanted.draft_cost),
        None => measured(),
    };
    let measured_unused_because = measured.as_ref().err().cloned();
    let cost = measured.ok().or_else(|| StepCost::model(input.manifest, windows.layers, wanted.draft_cost));
    let unknown_because = measured_unused_because.as_ref().filter(|_| cost.is_none()).map(|why| {
        let missing = StepCost::missing(input.manifest, wanted.draft_cost);
        // A share of a decode step helps only where a decode step is known.
        let help = if missing == ["bytes_per_draft"] { "; --draft-cost of `advise` stands in for it" } else { "" };
        let times = if wanted.model_only { String::new() } else { format!("no measured times ({why}) and ") };
        format!("{times}no model of bytes (the manifest lacks {}{help})", missing.join(", "))
    });
    let whole_only = cost.as_ref().is_some_and(|c| c.coefficients.whole_only);
    let doubt = match cost.as_ref().map(|c| c.source) {
        Some(CostSource::Measured) => {
            times.filter(|t| whole_only || t.times.iter().any(|t| t.per_expert.is_finite())).map_or(Doubt::Unknown, |times| {
                let sums =
                    |(at, sums): &(u32, DraftSums)| (*at, vec![sums.steps as f64, sums.experts.last().map_or(f64::NAN, |&n| n as f64)]);
                Doubt::Drawn(Drawn::measured(times, &recorded, &requests.iter().map(sums).collect::<Vec<_>>(), whole_only, options))
            })
        }
        Some(CostSource::Calibrated) => {
            let draws = wanted.costs.as_ref().and_then(|table| calibrated::draws(table, input.manifest, wanted.draft_cost, options));
            draws.map_or(Doubt::Exact, |draws| Doubt::Drawn(Drawn::apart(draws, requests.iter().map(|(at, _)| *at))))
        }
        Some(CostSource::Model) | None => Doubt::Exact,
    };
    let costs = Costs { point: cost.as_ref(), doubt: &doubt, options };
    // Of windows that were cut or idealised nothing is known where whole ones alone have a cost.
    let of_cut = if whole_only { Costs { point: None, doubt: &Doubt::Exact, options } } else { costs };
    let view = View { windows: &windows, costs, requests: requests.len() };
    let all = sum(&requests);
    let points = view.curve(&all, Ideal::default());
    let by_draft_len = view.by_draft_len(&requests, &points);
    let best_at = best(&points);
    let request_id = |at: u32| plan.steps.requests.get(at as usize).map_or(at, |r| r.request_id);
    let mut assumptions = vec![
        "a shorter draft length is judged by the first drafts of the recorded windows; recorded with it, windows would start at other \
         tokens"
            .to_owned(),
    ];
    assumptions.extend(cost.iter().flat_map(|c| c.assumptions.clone()));
    assumptions.extend(costs.assumption());
    // Where these are all requests, the report's own warning says it.
    let few = (2..FEW_REQUESTS).contains(&(requests.len() as u64));
    if few && requests.len() != report.by_request.iter().filter(|r| r.verify_steps > 0).count() {
        assumptions.push(format!("intervals come from {} requests; of fewer than {FEW_REQUESTS} they are too narrow", requests.len()));
    }
    assumptions.push("the best of several draft lengths is chosen and judged by the same steps".to_owned());
    let tokens = points.last().map_or(1.0, |p| p.tokens);
    Some(Advice {
        best_draft_len: best_at.map(|at| at as u16),
        recorded_draft_len: windows.drafts as u16,
        cost_source: cost.as_ref().map(|c| c.source),
        measured_unused_because,
        unknown_because,
        other_lengths_unknown_because: cost.as_ref().and_then(|c| c.shorter_unknown_because).map(str::to_owned),
        steps: windows.steps.len() as u64,
        steps_left_out: windows.left_out,
        requests: requests.len() as u64,
        by_draft_len,
        request_speedup_mean: best_at.map(|at| {
            let speedup = |(_, sums): &(u32, DraftSums)| view.curve(&sums.row(), Ideal::default())[at].speedup;
            requests.iter().map(speedup).sum::<f64>() / requests.len() as f64
        }),
        by_tag: by_tag(input, plan, &view, &requests),
        by_request: requests.par_iter().map(|r| view.group(request_id(r.0).to_string(), std::slice::from_ref(r))).collect(),
        what_if: if whole_only { None } else { what_if(&view, &all) },
        confidence: confidence::sweep(&windows, input.draft_probs, &of_cut),
        expert_budget: report.overall.as_ref().and_then(|overall| budget(overall, &windows, of_cut.coefficients(), tokens)),
        resamples_left_out: costs.left_out(),
        assumptions,
    })
}

struct View<'a> {
    windows: &'a Windows<'a>,
    costs: Costs<'a>,
    /// How many have windows.
    requests: usize,
}

/// The sums of some requests.
fn sum(requests: &[(u32, DraftSums)]) -> Vec<f64> {
    let mut rows = requests.iter().map(|(_, sums)| sums.row());
    let first = rows.next().unwrap_or_default();
    rows.fold(first, |sums, row| sums.iter().zip(row).map(|(sum, x)| sum + x).collect())
}

impl View<'_> {
    fn curve(&self, row: &[f64], ideal: Ideal) -> Vec<Point> {
        curve(row, self.windows.layers, self.costs.coefficients(), ideal)
    }

    /// Sums of a row of [`DraftSums::row`].
    fn width(&self) -> usize {
        2 * self.windows.drafts + 3
    }

    fn by_draft_len(&self, requests: &[(u32, DraftSums)], points: &[Point]) -> Vec<DraftLength> {
        let rows: Vec<Row> = requests.iter().map(|(at, sums)| (*at, sums.row())).collect();
        let layers = self.windows.layers;
        // Four numbers a length and the best one, all from the same resamples.
        let draws = self.costs.draws((&rows, self.width(), Whose::All), |row, costs| {
            let points = curve(row, layers, costs, Ideal::default());
            let best = best(&points).map_or(f64::NAN, |at| at as f64);
            points.iter().flat_map(|p| [p.tokens, p.union, p.ratio, p.speedup]).chain([best]).collect()
        });
        // Tokens and unions do not depend on costs, nor on requests that have no windows.
        let own = (!self.costs.drawn_are(&rows)).then(|| {
            let exact = Costs { point: None, doubt: &Doubt::Exact, ..self.costs };
            exact.draws((&rows, self.width(), Whose::All), |row, _| {
                curve(row, layers, None, Ideal::default()).iter().flat_map(|p| [p.tokens, p.union, f64::NAN, f64::NAN]).collect()
            })
        });
        let of_windows = |column: usize| -> Option<Interval> { percentile_interval(own.as_ref().unwrap_or(&draws), column) };
        let of_costs = |column: usize| percentile_interval(&draws, column).filter(|_| self.costs.are_known());
        let known = |value: f64| value.is_finite().then_some(value);
        let bests: Vec<f64> = draws.iter().filter_map(|d| d.last()).copied().filter(|best| best.is_finite()).collect();
        let of = |(length, point): (usize, &Point)| {
            let before = length.checked_sub(1).and_then(|before| points.get(before));
            let marginal = before.map(|before| (point.tokens - before.tokens) / (point.ratio - before.ratio));
            let wins = bests.iter().filter(|&&best| best == length as f64).count();
            DraftLength {
                draft_len: length as u16,
                tokens_per_step: point.tokens,
                tokens_per_step_ci95: of_windows(4 * length),
                union_mean: point.union,
                union_ci95: of_windows(4 * length + 1),
                step_ratio: known(point.ratio),
                step_ratio_ci95: of_costs(4 * length + 2),
                speedup: known(point.speedup),
                ci95: of_costs(4 * length + 3),
                marginal_utility: marginal.and_then(known),
                best_share: (!bests.is_empty() && self.costs.are_known() && point.speedup.is_finite())
                    .then(|| wins as f64 / bests.len() as f64),
            }
        };
        points.iter().enumerate().map(of).collect()
    }

    fn group(&self, key: String, requests: &[(u32, DraftSums)]) -> GroupAdvice {
        let points = self.curve(&sum(requests), Ideal::default());
        let known = |value: f64| value.is_finite().then_some(value);
        let last = points.last().copied().unwrap_or(Point { tokens: 1.0, union: 0.0, ratio: f64::NAN, speedup: f64::NAN });
        let best_at = best(&points);
        let (layers, drafts, whole) = (self.windows.layers, self.windows.drafts, Ideal::default());
        let speedup = |row: &[f64], costs: Option<&Coefficients>| point(row, layers, costs, whole, drafts).speedup;
        let ci95 = match requests {
            _ if !self.costs.are_known() => None,
            // What a single request brought is what it is.
            [(_, sums)] => {
                let row = sums.row();
                interval_of(self.costs.each(|costs| speedup(&row, Some(costs))))
            }
            _ => {
                let rows: Vec<Row> = requests.iter().map(|(at, sums)| (*at, sums.row())).collect();
                let whose = if requests.len() == self.requests { Whose::All } else { Whose::Some };
                percentile_interval(&self.costs.draws((&rows, self.width(), whose), |row, costs| vec![speedup(row, costs)]), 0)
            }
        };
        GroupAdvice {
            key,
            requests: requests.len() as u64,
            steps: requests.iter().map(|(_, s)| s.steps).sum(),
            best_draft_len: best_at.map(|at| at as u16),
            best_speedup: best_at.and_then(|at| points.get(at)).map(|p| p.speedup),
            tokens_per_step: last.tokens,
            speedup: known(last.speedup),
            ci95,
        }
    }
}

fn by_tag(input: &Input<'_>, plan: &Plan<'_>, view: &View<'_>, requests: &[(u32, DraftSums)]) -> Vec<GroupAdvice> {
    let by_id: BTreeMap<u32, &(u32, DraftSums)> =
        requests.iter().filter_map(|r| Some((plan.steps.requests.get(r.0 as usize)?.request_id, r))).collect();
    let mut groups: BTreeMap<String, BTreeMap<u32, DraftSums>> = BTreeMap::new();
    for request in input.requests {
        let Some((at, sums)) = by_id.get(&request.request_id) else { continue };
        for (name, value) in tags(request) {
            groups.entry(format!("{name}={value}")).or_default().insert(*at, sums.clone());
        }
    }
    groups.into_iter().map(|(key, requests)| view.group(key, &requests.into_iter().collect::<Vec<_>>())).collect()
}

fn what_if(view: &View<'_>, totals: &[f64]) -> Option<WhatIf> {
    let best_of = |ideal| {
        let points = view.curve(totals, ideal);
        best(&points).map(|at| Best { draft_len: at as u16, speedup: points[at].speedup })
    };
    let none = Ideal::default();
    Some(WhatIf {
        as_recorded: best_of(none)?,
        perfect_drafter: best_of(Ideal { drafter: true, ..none })?,
        perfect_overlap: best_of(Ideal { overlap: true, ..none })?,
        free_drafting: best_of(Ideal { free_drafts: true, ..none })?,
        both: best_of(Ideal { drafter: true, overlap: true, ..none })?,
    })
}

/// Budgets at which windows keep the shares [`BUDGET_MASS`] of their gate mass, the smallest that does.
///
/// union(B) = Σ_u windows(u) min(u, B) / Σ_u windows(u); step_ratio and speedup at the recorded γ and τ.
fn budget(overall: &Overall, windows: &Windows<'_>, cost: Option<&Coefficients>, tokens: f64) -> Option<Vec<Budget>> {
    let (coverage, union) = (overall.mass_coverage.as_ref()?, overall.stats.union.as_ref()?);
    let count: u64 = union.histogram.iter().sum();
    let mut budgets: Vec<Budget> = Vec::new();
    for wanted in BUDGET_MASS {
        let Some(at) = coverage.iter().position(|&mass| mass >= wanted) else { continue };
        let experts = at as u64 + 1;
        if budgets.last().is_some_and(|b| u64::from(b.experts) == experts) {
            continue;
        }
        let kept: u64 = union.histogram.iter().zip(0u64..).map(|(n, u)| n * u.min(experts)).sum();
        let union_mean = kept as f64 / count as f64;
        let (rows, drafts) = (windows.drafts as f64 + 1.0, windows.drafts as f64);
        let spent = |c: &Coefficients| c.passes(1.0, rows, union_mean * f64::from(windows.layers)) + c.drafting(1.0, drafts);
        let step_ratio = cost.map(|c| spent(c) / c.decode);
        budgets.push(Budget {
            experts: experts as u32,
            mass: coverage[at],
            union_mean,
            step_ratio,
            speedup: step_ratio.map(|r| tokens / r),
        });
    }
    Some(budgets)
}
