//! The list of measures, filled object by object.

use super::Measure;
use super::names::LAYER_COST;
use crate::analysis::request_totals::{Cells, LoadMetric, PositionSums, RequestTotals, Table};
use crate::diff::estimate::{Estimate, Spread};
use crate::diff::quantile::{Clustered, share};
use crate::metric::report::{Acceptance, Load, RequestReport, WindowStats};
use crate::metric::{Interval, Metric, find};
use serde_json::Value;

/// One request's sums in one scope.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    pub(super) windows: u64,
    pub(super) union: u64,
    pub(super) wasted: Option<u64>,
}

/// The measures so far, and the scope of the next ones.
pub(super) struct List<'a> {
    pub(super) out: Vec<Measure>,
    pub(super) layer: Option<u16>,
    /// Sums by request in the scope at hand.
    pub(super) table: Option<Table<'a>>,
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

    pub(super) fn acceptance(&mut self, a: &Acceptance, requests: &[RequestReport], uniform: bool, totals: Option<&RequestTotals>) {
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

    pub(super) fn windows(
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

    pub(super) fn costs(&mut self, time: Option<&Value>, cost: Option<&Value>) {
        for (object, metric) in LAYER_COST {
            self.foreign(object, metric, if object == "time" { time } else { cost });
        }
    }

    /// A number of an object that this layer does not know the type of: `{x: 1, x_ci95: [..]}`, or `{x: {value: 1, ci95: [..]}}`, or
    /// `{x: 1, ci95: [..]}` where the interval belongs to the object's only number that has one.
    pub(super) fn foreign(&mut self, object: &str, metric: Metric, value: Option<&Value>) {
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
