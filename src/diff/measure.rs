//! A report as a flat list of numbers, each with its meaning and with what is known of its uncertainty.

use super::estimate::{Estimate, Spread};
use super::quantile::{Clustered, share};
use crate::analysis::request_totals::{Cells, LoadMetric, PositionSums, RequestTotals, Table};
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

/// The same over the verify steps of every number of rows, which are `cost.all_rows`.
const ALL_ROWS: [Metric; 3] = [
    noisy("tokens_per_step", Unit::Tokens, Better::Higher, "tokens per verify step of any number of rows"),
    noisy("step_ratio", Unit::Ratio, Better::Lower, "time of a verify step of any number of rows over that of a decode step"),
    noisy("speedup", Unit::Ratio, Better::Higher, "their quotient"),
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
        "cost" if let Some(field) = field.strip_prefix("all_rows.") => ALL_ROWS.iter().any(|m| m.id == field).then_some(false),
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

/// One request's sums in one scope.
#[derive(Debug, Clone, Copy)]
struct Sums {
    windows: u64,
    union: u64,
    wasted: Option<u64>,
}

struct List<'a> {
    out: Vec<Measure>,
    layer: Option<u16>,
    /// Sums by request in the scope at hand.
    table: Option<Table<'a>>,
}

impl List<'_> {
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

    /// A number that is a ratio of sums over requests.
    fn ratio(&mut self, path: &str, id: &str, value: Option<f64>, of: impl Fn(&Cells<'_>) -> Option<(f64, f64)>) {
        let estimate = value.map(|value| {
            // A request without windows has a denominator of 0 and no influence.
            let pairs = self.table.map(|table| table.each(|cells| of(&cells)));
            let pairs = pairs.filter(|pairs| pairs.iter().any(Option::is_some));
            let ratio = pairs.and_then(|pairs| Estimate::ratio(pairs.iter().map(|pair| pair.unwrap_or_default())));
            // The ratio of sums is the reported mean; the report's value is kept, so that nothing differs by rounding.
            ratio.map_or_else(|| Estimate::point(value), |ratio| Estimate { value, ..ratio })
        });
        self.known(path, id, estimate);
    }

    /// The influences of requests on a number of the load.
    fn of_load(&self, value: Option<f64>, metric: LoadMetric) -> Option<Estimate> {
        let spread = self.table.map(|table| Spread::Requests(table.each(|cells| cells.load(metric))));
        value.map(|value| Estimate { value, spread: spread.unwrap_or(Spread::Unknown) })
    }

    /// The entries of a curve, each a ratio of sums.
    fn curve(&mut self, id: &str, values: &[f64], of: impl Fn(&Cells<'_>, usize) -> Option<(f64, f64)>) {
        for (i, &value) in values.iter().enumerate() {
            self.ratio(&format!("{id}[{i}]"), id, Some(value), |cells| of(cells, i));
        }
    }

    fn acceptance(&mut self, a: &Acceptance, requests: &[RequestReport], uniform: bool, totals: Option<&RequestTotals>) {
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
            let conditional = id == "conditional_by_position";
            for (i, value) in values.iter().enumerate() {
                let sums = totals.and_then(|totals| totals.position(i)).filter(|sums| !sums.is_empty());
                let pair = |s: &PositionSums| (s.kept as f64, if conditional { s.reached } else { s.had } as f64);
                let exact = sums.and_then(|sums| Estimate::ratio(sums.iter().map(pair)));
                let windows: u64 = a.histogram.iter().skip(if conditional { i } else { 0 }).sum();
                let stated = |v: f64| clustered.as_ref().and_then(|c| share(v, windows as f64 / c.design_effect()));
                let estimate = value.map(|value| match exact {
                    Some(exact) => Estimate { value, ..exact },
                    None => Estimate::with_interval(value, stated(value)),
                });
                self.known(&format!("acceptance.{id}[{i}]"), id, estimate);
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
        self.curve("prefix_union", &stats.prefix_union, |c, i| c.prefix(i));
        self.curve("marginal", &stats.marginal, |c, i| c.marginal(i));
        self.ratio("marginal_kept", "marginal_kept", stats.marginal_kept, |c| c.kept());
        self.ratio("marginal_rejected", "marginal_rejected", stats.marginal_rejected, |c| c.rejected());
        let wasted = stats.wasted_mean.map(|value| match of(|s| s.wasted) {
            Some(e) => Estimate { value, ..e },
            None => Estimate::point(value),
        });
        self.known("wasted_mean", "wasted_mean", wasted);
        for (i, row) in stats.pairwise.iter().flatten().enumerate() {
            // The diagonal is k, and the matrix is symmetric.
            for (j, &value) in row.iter().enumerate().skip(i + 1) {
                self.ratio(&format!("pairwise[{i}][{j}]"), "pairwise", Some(value), |cells| cells.pair(i, j));
            }
        }
        type AtLag = fn(&Cells<'_>, usize) -> Option<(f64, f64)>;
        let lags: [(_, _, AtLag); 2] = [
            ("lag_overlap_frac", &stats.lag_overlap_frac, |c, d| c.lag_overlap_frac(d)),
            ("lag_jaccard", &stats.lag_jaccard, |c, d| c.lag_jaccard(d)),
        ];
        for (id, lags, of) in lags {
            for (d, &value) in lags.iter().flatten().enumerate().skip(1) {
                self.ratio(&format!("{id}[{d}]"), id, Some(value), |cells| of(cells, d));
            }
        }
        self.ratio("step_reuse", "step_reuse", stats.step_reuse, |c| c.reuse());
        // It follows from the model's shape alone.
        let uniform = stats.uniform_union.map(|value| Estimate::with_interval(value, Some([value, value])));
        self.known("uniform_union", "uniform_union", uniform);
        let popularity = self.of_load(stats.popularity_union, LoadMetric::Popularity);
        self.known("popularity_union", "popularity_union", popularity.clone());
        // lift = (N - union) / (N - k) is a straight line in the mean union.
        let lift = stats.lift.zip(stats.uniform_union).zip(mean.clone()).map(|((value, n), mean)| {
            let span = n - f64::from(k);
            Estimate { value, ..mean.affine(n / span, -1.0 / span) }
        });
        self.known("lift", "lift", lift.filter(|_| experts > k));
        let lift = stats.popularity_lift.map(|value| match popularity.zip(mean) {
            Some((popularity, union)) => popularity_lift(value, &popularity, &union, f64::from(k)),
            None => Estimate::point(value),
        });
        self.known("popularity_lift", "popularity_lift", lift);
        type OfLoad = fn(&Load) -> f64;
        let loads: [(_, OfLoad, _); 4] = [
            ("load.entropy_bits", |l| l.entropy_bits, LoadMetric::Entropy),
            ("load.effective_experts", |l| l.effective_experts, LoadMetric::Effective),
            ("load.top_1pct_share", |l| l.top_1pct_share, LoadMetric::Top),
            ("load.max_over_mean", |l| l.max_over_mean, LoadMetric::Max),
        ];
        for (id, value, metric) in loads {
            let estimate = self.of_load(load.map(value), metric);
            self.known(id, id, estimate);
        }
        self.curve("mass_coverage", mass_coverage.unwrap_or_default(), |c, i| c.coverage(i));
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

/// (P - U) / (P - k) of a popularity union P and a mean union U: moved by ((U - k) dP - (P - k) dU) / (P - k)².
///
/// P = 12, U = 10, k = 8: 0.5. P higher by 0.1 moves it by 2 x 0.1 / 16 = 0.0125: 2.1 / 4.1 = 0.5122.
fn popularity_lift(value: f64, popularity: &Estimate, union: &Estimate, k: f64) -> Estimate {
    let (Spread::Requests(dp), Spread::Requests(du)) = (&popularity.spread, &union.spread) else { return Estimate::point(value) };
    let (above, span) = (union.value - k, popularity.value - k);
    let moved = |(dp, du): (&Option<f64>, &Option<f64>)| match (dp, du) {
        (None, None) => None,
        (dp, du) => Some((above * dp.unwrap_or(0.0) - span * du.unwrap_or(0.0)) / (span * span)),
    };
    Estimate { value, spread: Spread::Requests(dp.iter().zip(du).map(moved).collect()) }
}

fn interval(value: &Value) -> Option<Interval> {
    match value.as_array()?.as_slice() {
        [low, high] => Some([low.as_f64()?, high.as_f64()?]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;
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
