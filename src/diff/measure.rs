//! A report as a flat list of numbers, each with its meaning and with what is known of its uncertainty.

use super::estimate::Estimate;
use super::quantile::{Clustered, share};
use crate::metric::report::{Acceptance, Load, Report, RequestReport, WindowStats};
use crate::metric::{Better, Interval, Metric, Noise, Unit, find};
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

const fn noisy(id: &'static str, unit: Unit, better: Better, meaning: &'static str) -> Metric {
    Metric { id, unit, better, noise: Noise::Noisy, meaning, formula: "" }
}

/// Step costs. They depend on clocks.
const COST: [Metric; 4] = [
    noisy("verify_ratio", Unit::Ratio, Better::Lower, "time of a verify step over that of a decode step"),
    noisy("step_ratio", Unit::Ratio, Better::Lower, "the same with drafting and sampling"),
    noisy("break_even", Unit::Tokens, Better::Lower, "tokens per step at which drafting pays"),
    noisy("speedup", Unit::Ratio, Better::Higher, "tokens per step over the step ratio"),
];

/// A layer's costs, by the object that they are in.
const LAYER_COST: [(&str, Metric); 5] = [
    ("time", noisy("verify_us", Unit::Ratio, Better::Lower, "µs of a verify step in the layer, or in all routed ones")),
    ("time", noisy("decode_us", Unit::Ratio, Better::Lower, "µs of a decode step in the layer, or in all routed ones")),
    ("cost", noisy("us_per_expert", Unit::Ratio, Better::Lower, "µs that an expert more costs")),
    ("cost", noisy("intercept_us", Unit::Ratio, Better::Neither, "µs without any expert")),
    ("cost", noisy("implied_gb_per_s", Unit::Ratio, Better::Higher, "bytes of an expert over its cost")),
];

/// Numbers of the distribution of unions.
const UNION: [&str; 5] = ["mean", "p50", "p90", "p99", "max"];

/// Whether a rule can be about this name in any report, and if so whether in a layer, too. An index is any number.
pub fn is_known(name: &str) -> Option<bool> {
    let (scope, field) = name.split_once('.').unwrap_or(("", name));
    let bare = |text: &'static [&'static str]| text.contains(&field);
    match scope {
        "acceptance" => bare(&["accepted_drafts_mean", "tokens_per_step", "by_position[]", "conditional_by_position[]"]).then_some(false),
        "union" => UNION.contains(&field).then_some(true),
        "load" => find(name).map(|_| true),
        "cost" | "time" if LAYER_COST.iter().any(|(object, m)| *object == scope && m.id == field) => Some(true),
        "cost" => COST.iter().any(|m| m.id == field).then_some(false),
        "" => bare(&[
            "prefix_union[]",
            "marginal[]",
            "marginal_kept",
            "marginal_rejected",
            "wasted_mean",
            "pairwise[][]",
            "lag_overlap_frac[]",
            "lag_jaccard[]",
            "step_reuse",
            "uniform_union",
            "popularity_union",
            "lift",
            "popularity_lift",
            "mass_coverage[]",
        ])
        .then_some(true),
        _ => None,
    }
}

/// Whether a name that [`is_known`] is of a share, which can be written in percent.
pub fn is_share(name: &str) -> bool {
    let field = if name.starts_with("load.") { name } else { name.rsplit('.').next().unwrap_or(name) };
    find(field.split('[').next().unwrap_or(field)).is_some_and(|metric| metric.unit == Unit::Share)
}

/// Every number of a report that is known.
pub fn measures(report: &Report) -> Vec<Measure> {
    let mut list = List { out: Vec::new(), layer: None };
    list.acceptance(&report.acceptance, &report.by_request, uniform_rows(report));
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
    for (slot, layer) in report.layers.iter().enumerate() {
        list.layer = Some(layer.layer);
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

/// One request's sums in one scope.
#[derive(Debug, Clone, Copy)]
struct Sums {
    windows: u64,
    union: u64,
    wasted: Option<u64>,
}

struct List {
    out: Vec<Measure>,
    layer: Option<u16>,
}

impl List {
    fn put(&mut self, path: String, metric: Metric, estimate: Option<Estimate>) {
        if let Some(estimate) = estimate.filter(|e| e.value.is_finite()) {
            self.out.push(Measure { layer: self.layer, path, metric, estimate });
        }
    }

    /// A number whose name in the registry is its path's.
    fn known(&mut self, path: &str, id: &str, estimate: Option<Estimate>) {
        if let Some(metric) = find(id) {
            self.put(path.to_owned(), *metric, estimate);
        }
    }

    fn point(&mut self, id: &str, value: Option<f64>) {
        self.known(id, id, value.map(Estimate::point));
    }

    fn entries(&mut self, id: &str, values: &[f64]) {
        for (i, &value) in values.iter().enumerate() {
            self.known(&format!("{id}[{i}]"), id, Some(Estimate::point(value)));
        }
    }

    fn acceptance(&mut self, a: &Acceptance, requests: &[RequestReport], uniform: bool) {
        let sums: Option<Vec<(f64, f64)>> = requests.iter().map(|r| Some((r.accepted? as f64, r.verify_steps as f64))).collect();
        let exact = sums.and_then(|sums| Estimate::ratio(sums.into_iter()));
        let stated = |value: Option<f64>, less: f64| {
            let interval = a.tokens_per_step_ci95.map(|[low, high]| [low - less, high - less]);
            value.map(|value| Estimate::with_interval(value, interval))
        };
        // The ratio of sums is the reported mean; the report's value is kept, so that nothing differs by rounding.
        let mean = |value: Option<f64>, less: f64| match (&exact, value) {
            (Some(e), Some(value)) => Some(Estimate { value, ..e.clone() }),
            _ => stated(value, less),
        };
        self.known("acceptance.accepted_drafts_mean", "accepted_drafts_mean", mean(a.accepted_drafts_mean, 1.0));
        self.known("acceptance.tokens_per_step", "tokens_per_step", mean(a.tokens_per_step, 0.0));
        let clustered = a.tokens_per_step.zip(a.tokens_per_step_ci95).and_then(|(tau, [low, high])| {
            Clustered::new(&a.histogram, [low - 1.0, high - 1.0]).filter(|c| (c.mean() - (tau - 1.0)).abs() < 1e-6)
        });
        // Of windows of different lengths, the histogram does not say how many had draft i.
        let clustered = clustered.filter(|_| uniform);
        for (id, values) in [("by_position", &a.by_position), ("conditional_by_position", &a.conditional_by_position)] {
            for (i, value) in values.iter().enumerate() {
                let reached = if id == "by_position" { 0 } else { i };
                let windows: u64 = a.histogram.iter().skip(reached).sum();
                let interval = value.zip(clustered.as_ref()).and_then(|(v, c)| share(v, windows as f64 / c.design_effect()));
                self.known(&format!("acceptance.{id}[{i}]"), id, value.map(|v| Estimate::with_interval(v, interval)));
            }
        }
    }

    fn windows(
        &mut self,
        stats: &WindowStats,
        load: Option<&Load>,
        mass_coverage: Option<&[f64]>,
        experts: u16,
        k: u16,
        sums: Option<&[Sums]>,
    ) {
        let of = |n: fn(&Sums) -> Option<u64>| {
            let pairs: Option<Vec<(f64, f64)>> = sums?.iter().map(|s| Some((n(s)? as f64, s.windows as f64))).collect();
            Estimate::ratio(pairs?.into_iter())
        };
        let union = stats.union.as_ref();
        let mean = union.map(|u| match of(|s| Some(s.union)) {
            Some(e) => Estimate { value: u.mean, ..e },
            None => Estimate::with_interval(u.mean, u.ci95),
        });
        self.known("union.mean", "union", mean.clone());
        let clustered = union.and_then(|u| Clustered::new(&u.histogram, u.ci95?));
        if let Some(u) = union {
            for (name, share, value) in [("union.p50", 0.5, u.p50), ("union.p90", 0.9, u.p90), ("union.p99", 0.99, u.p99)] {
                let interval = clustered.as_ref().and_then(|c| c.quantile(share));
                self.known(name, "union", Some(Estimate::with_interval(f64::from(value), interval)));
            }
            self.known("union.max", "union", Some(Estimate::point(f64::from(u.max))));
        }
        self.entries("prefix_union", &stats.prefix_union);
        self.entries("marginal", &stats.marginal);
        self.point("marginal_kept", stats.marginal_kept);
        self.point("marginal_rejected", stats.marginal_rejected);
        let wasted = stats.wasted_mean.map(|value| match of(|s| s.wasted) {
            Some(e) => Estimate { value, ..e },
            None => Estimate::point(value),
        });
        self.known("wasted_mean", "wasted_mean", wasted);
        for (i, row) in stats.pairwise.iter().flatten().enumerate() {
            // The diagonal is k, and the matrix is symmetric.
            for (j, &value) in row.iter().enumerate().skip(i + 1) {
                self.known(&format!("pairwise[{i}][{j}]"), "pairwise", Some(Estimate::point(value)));
            }
        }
        for (id, lags) in [("lag_overlap_frac", &stats.lag_overlap_frac), ("lag_jaccard", &stats.lag_jaccard)] {
            for (d, &value) in lags.iter().flatten().enumerate().skip(1) {
                self.known(&format!("{id}[{d}]"), id, Some(Estimate::point(value)));
            }
        }
        self.point("step_reuse", stats.step_reuse);
        self.point("uniform_union", stats.uniform_union);
        self.point("popularity_union", stats.popularity_union);
        // lift = (N - union) / (N - k) is a straight line in the mean union.
        let lift = stats.lift.zip(stats.uniform_union).zip(mean).map(|((value, n), mean)| {
            let span = n - f64::from(k);
            Estimate { value, ..mean.affine(n / span, -1.0 / span) }
        });
        self.known("lift", "lift", lift.filter(|_| experts > k));
        self.point("popularity_lift", stats.popularity_lift);
        self.point("load.entropy_bits", load.map(|l| l.entropy_bits));
        self.point("load.effective_experts", load.map(|l| l.effective_experts));
        self.point("load.top_1pct_share", load.map(|l| l.top_1pct_share));
        self.point("load.max_over_mean", load.map(|l| l.max_over_mean));
        self.entries("mass_coverage", mass_coverage.unwrap_or_default());
    }

    fn costs(&mut self, time: Option<&Value>, cost: Option<&Value>) {
        for (object, metric) in LAYER_COST {
            self.foreign(object, metric, if object == "time" { time } else { cost });
        }
    }

    /// A number of an object that this layer does not know the type of: `{x: 1, x_ci95: [..]}`, or `{x: {value: 1, ci95: [..]}}`, or
    /// `{x: 1, ci95: [..]}` where the interval belongs to the object's only number that has one.
    fn foreign(&mut self, object: &str, metric: Metric, value: Option<&Value>) {
        let Some(value) = value else { return };
        let Some(found) = value.get(metric.id) else { return };
        let number = found.as_f64().or_else(|| ["value", "mean", "estimate"].iter().find_map(|key| found.get(key)?.as_f64()));
        let alone = || if metric.id == "us_per_expert" { value.get("ci95") } else { None };
        let stated = found.get("ci95").or_else(|| value.get(format!("{}_ci95", metric.id))).or_else(alone).and_then(interval);
        self.put(format!("{object}.{}", metric.id), metric, number.map(|n| Estimate::with_interval(n, stated)));
    }
}

fn interval(value: &Value) -> Option<Interval> {
    match value.as_array()?.as_slice() {
        [low, high] => Some([low.as_f64()?, high.as_f64()?]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::estimate::Spread;
    use super::super::testing::report;
    use super::*;
    use crate::metric::cost::{ExpertCost, LayerTime, StepCost};

    fn get<'a>(all: &'a [Measure], layer: Option<u16>, path: &str) -> &'a Measure {
        all.iter().find(|m| m.layer == layer && m.path == path).unwrap_or_else(|| panic!("{path}"))
    }

    #[test]
    fn the_sums_are_the_reports_means() {
        let report = report();
        let all = measures(&report);
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
        let all = measures(&report);
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
        let old = measures(&old);
        assert_eq!(old.len(), all.len());
        for path in ["union.mean", "acceptance.tokens_per_step", "lift"] {
            assert!(matches!(get(&old, None, path).estimate.spread, Spread::Interval(_)), "{path}");
        }
    }

    #[test]
    fn every_measure_is_a_name_that_rules_know() {
        let mut report = report();
        report.layers[0].time = Some(LayerTime { verify_us: Some(5.0), decode_us: Some(2.0), by_component: Vec::new() });
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
            ..StepCost::default()
        });
        report.overall.as_mut().unwrap().mass_coverage = Some(vec![0.5]);
        let all = measures(&report);
        for m in &all {
            let bare: String = m.path.chars().filter(|c| !c.is_ascii_digit() || !m.path.contains('[')).collect();
            let known = is_known(&bare).unwrap_or_else(|| panic!("{}", m.path));
            assert!(known || m.layer.is_none(), "{}", m.path);
        }
        assert_eq!(get(&all, None, "cost.speedup").estimate.spread, Spread::Interval([1.0, 1.2]));
        assert_eq!(get(&all, None, "cost.verify_ratio").estimate.spread, Spread::Interval([2.4, 2.7]));
        let layer = Some(report.layers[0].layer);
        assert_eq!(get(&all, layer, "cost.us_per_expert").estimate.spread, Spread::Interval([0.4, 0.6]));
        assert_eq!(get(&all, layer, "time.verify_us").estimate.value, 5.0);
    }
}
