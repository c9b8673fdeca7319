//! A report as a flat list of numbers, each with its meaning and with what is known of its uncertainty.

mod list;
mod names;

use super::estimate::Estimate;
use crate::analysis::request_totals::RequestTotals;
use crate::metric::Metric;
use crate::metric::report::{Report, RequestReport};
use list::{List, Sums};
use names::{ALL_ROWS, COST};
pub use names::{is_known, is_share};
use serde::Serialize;
use serde_json::Value;

/// One number of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Measure {
    /// The layer; `None` for numbers over the whole run.
    pub layer: Option<u16>,
    /// Its name as rules spell it: `union.mean`, `acceptance.by_position[0]`. Indices are those of the report.
    pub path: String,
    /// What it means.
    pub metric: Metric,
    /// Its value and uncertainty.
    pub estimate: Estimate,
}

/// Every number of a report that is known. `totals` are the sums by request of the trace that it is the report of, where there is one:
/// without them, only some numbers have an uncertainty.
pub fn measures(report: &Report, totals: Option<&RequestTotals>) -> Vec<Measure> {
    let mut list = List { out: Vec::new(), layer: None, table: None };
    list.acceptance(&report.acceptance, &report.by_request, uniform_rows(report), totals);
    list.table = totals.and_then(|totals| totals.table(None));
    if let Some(overall) = &report.overall {
        let sums = |request: &RequestReport| {
            let s = request.sums.as_ref()?;
            Some(Sums { windows: s.windows.iter().sum(), union: s.union.iter().sum(), wasted: s.wasted.as_ref().map(|w| w.iter().sum()) })
        };
        let sums: Option<Vec<Sums>> = report.by_request.iter().map(sums).collect();
        list.windows(&overall.stats, overall.load.as_ref(), overall.mass_coverage.as_deref(), overall.experts, overall.k, sums.as_deref());
        list.costs(as_json(&overall.time).as_ref(), as_json(&overall.cost).as_ref());
    }
    let cost = as_json(&report.cost);
    for metric in COST {
        list.foreign("cost", metric, cost.as_ref());
    }
    for metric in ALL_ROWS {
        list.foreign("cost.all_rows", metric, cost.as_ref().and_then(|cost| cost.get("all_rows")));
    }
    for (slot, layer) in report.layers.iter().enumerate() {
        list.layer = Some(layer.layer);
        list.table = totals.and_then(|totals| totals.table(Some(slot)));
        let sums = |request: &RequestReport| {
            let s = request.sums.as_ref()?;
            let wasted = s.wasted.as_ref().map(|w| w.get(slot).copied().unwrap_or(0));
            Some(Sums { windows: *s.windows.get(slot)?, union: *s.union.get(slot)?, wasted })
        };
        let sums: Option<Vec<Sums>> = report.by_request.iter().map(sums).collect();
        list.windows(&layer.stats, layer.load.as_ref(), layer.mass_coverage.as_deref(), layer.experts, layer.k, sums.as_deref());
        list.costs(as_json(&layer.time).as_ref(), as_json(&layer.cost).as_ref());
    }
    list.out
}

/// A part of the report as its JSON, in which measures are looked up by name.
fn as_json(part: &Option<impl Serialize>) -> Option<Value> {
    part.as_ref().and_then(|part| serde_json::to_value(part).ok())
}

/// Whether all windows have the same number of rows.
fn uniform_rows(report: &Report) -> bool {
    report.overall.as_ref().is_some_and(|o| o.by_rows.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;
    use crate::diff::estimate::Spread;
    use crate::metric::cost::{AllRows, ExpertCost, LayerTime, StepCost};

    fn get<'a>(all: &'a [Measure], layer: Option<u16>, path: &str) -> &'a Measure {
        all.iter().find(|m| m.layer == layer && m.path == path).unwrap_or_else(|| panic!("{path}"))
    }

    #[test]
    fn the_sums_are_the_reports_means() {
        let report = report();
        let all = measures(&report, None);
        let ratio = |of: fn(&RequestReport) -> (u64, u64)| {
            let (n, d) = report.by_request.iter().map(of).fold((0, 0), |(n, d), (a, b)| (n + a, d + b));
            n as f64 / d as f64
        };
        let union = ratio(|r| {
            let s = r.sums.as_ref().unwrap();
            (s.union.iter().sum(), s.windows.iter().sum())
        });
        let wasted = ratio(|r| {
            let s = r.sums.as_ref().unwrap();
            (s.wasted.as_ref().unwrap().iter().sum(), s.windows.iter().sum())
        });
        let layer = ratio(|r| {
            let s = r.sums.as_ref().unwrap();
            (s.union[1], s.windows[1])
        });
        let close = |m: &Measure, value: f64| assert!((m.estimate.value - value).abs() < 1e-9, "{} {value}", m.estimate.value);
        close(get(&all, None, "union.mean"), union);
        close(get(&all, None, "wasted_mean"), wasted);
        close(get(&all, Some(report.layers[1].layer), "union.mean"), layer);
        close(get(&all, None, "acceptance.accepted_drafts_mean"), ratio(|r| (r.accepted.unwrap(), r.verify_steps)));
    }

    #[test]
    fn what_is_known_of_uncertainty() {
        let report = report();
        let all = measures(&report, None);
        let requests = |path: &str| matches!(get(&all, None, path).estimate.spread, Spread::Requests(_));
        assert!(requests("union.mean") && requests("lift") && requests("wasted_mean") && requests("acceptance.tokens_per_step"));
        assert!(matches!(get(&all, None, "union.p90").estimate.spread, Spread::Interval(_)));
        assert!(matches!(get(&all, None, "acceptance.by_position[0]").estimate.spread, Spread::Interval(_)));
        assert_eq!(get(&all, None, "step_reuse").estimate.spread, Spread::Unknown);
        // A report of the first version has no sums: its own intervals are what is known.
        let mut old = report.clone();
        for request in &mut old.by_request {
            (request.sums, request.accepted) = (None, None);
        }
        let old = measures(&old, None);
        assert_eq!(old.len(), all.len());
        for path in ["union.mean", "acceptance.tokens_per_step", "lift"] {
            assert!(matches!(get(&old, None, path).estimate.spread, Spread::Interval(_)), "{path}");
        }
    }

    #[test]
    fn every_measure_is_a_name_that_rules_know() {
        let mut report = report();
        report.layers[0].time =
            Some(LayerTime { verify_us: Some(5.0), verify_us_ci95: Some([4.0, 6.0]), decode_us: Some(2.0), ..LayerTime::default() });
        report.layers[0].cost = Some(ExpertCost {
            us_per_expert: Some(0.5),
            ci95: Some([0.4, 0.6]),
            intercept_us: Some(1.0),
            implied_gb_per_s: Some(9.0),
            ..ExpertCost::default()
        });
        report.cost = Some(StepCost {
            verify_ratio: Some(2.5),
            verify_ratio_ci95: Some([2.4, 2.7]),
            speedup: Some(1.1),
            speedup_ci95: Some([1.0, 1.2]),
            all_rows: Some(AllRows { step_ratio: Some(2.75), step_ratio_ci95: Some([2.7, 2.8]), ..AllRows::default() }),
            ..StepCost::default()
        });
        report.overall.as_mut().unwrap().mass_coverage = Some(vec![0.5]);
        let all = measures(&report, None);
        for m in &all {
            let bare: String = m.path.chars().filter(|c| !c.is_ascii_digit() || !m.path.contains('[')).collect();
            let known = is_known(&bare).unwrap_or_else(|| panic!("{}", m.path));
            assert!(known || m.layer.is_none(), "{}", m.path);
        }
        assert_eq!(get(&all, None, "cost.speedup").estimate.spread, Spread::Interval([1.0, 1.2]));
        assert_eq!(get(&all, None, "cost.all_rows.step_ratio").estimate, Estimate::with_interval(2.75, Some([2.7, 2.8])));
        assert!(!all.iter().any(|m| m.path == "cost.all_rows.speedup"), "what is unknown is no measure");
        assert_eq!(
            (is_known("cost.all_rows.speedup"), is_known("cost.all_rows.verify_ratio"), is_known("cost.all_rows")),
            (Some(false), None, None)
        );
        assert_eq!(get(&all, None, "cost.verify_ratio").estimate.spread, Spread::Interval([2.4, 2.7]));
        let layer = Some(report.layers[0].layer);
        assert_eq!(get(&all, layer, "cost.us_per_expert").estimate.spread, Spread::Interval([0.4, 0.6]));
        assert_eq!(get(&all, layer, "time.verify_us").estimate, Estimate::with_interval(5.0, Some([4.0, 6.0])));
        assert_eq!(get(&all, layer, "time.decode_us").estimate.spread, Spread::Unknown);
    }
}
