//! Two lists of numbers to rows with verdicts.

use super::estimate::{Estimate, Pairs, Shift, difference, false_discovery, log_ratio};
use super::measure::Measure;
use super::pairing::Pairing;
use crate::metric::{Better, Interval, Metric, Noise};
use serde::Serialize;
use std::collections::BTreeMap;

/// Claims of a change are made at this rate of false discoveries.
pub const FALSE_DISCOVERIES: f64 = 0.05;

/// What became of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Changed in the metric's bad direction.
    Worse,
    /// Changed in the metric's good direction.
    Better,
    /// Equal, or certainly closer than the margin.
    Same,
    /// It cannot be told.
    Unclear,
}

impl Verdict {
    /// The word of it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Worse => "worse",
            Self::Better => "better",
            Self::Same => "same",
            Self::Unclear => "unclear",
        }
    }
}

/// How two numbers were compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The same tokens went through the same windows: equal or not.
    Exact,
    /// Request by request.
    Paired,
    /// As samples of different requests.
    Unpaired,
    /// By the intervals that both reports state.
    Intervals,
    /// Without any uncertainty: only equality can be told.
    Point,
}

/// One number of both runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The layer; `None` for numbers over the whole run.
    pub layer: Option<u16>,
    /// The number's name, as in rules.
    pub path: String,
    /// Its meaning.
    pub metric: Metric,
    /// The base's number.
    pub base: Estimate,
    /// The candidate's.
    pub candidate: Estimate,
    /// How they were compared.
    pub method: Method,
    /// What became of it.
    pub verdict: Verdict,
    /// candidate - base.
    pub change: Option<Shift>,
    /// ln(candidate / base).
    pub log_change: Option<Shift>,
    /// p-value of no change.
    pub p: Option<f64>,
    /// The same, adjusted for all numbers that were tested with it.
    pub q: Option<f64>,
    /// Why it is not clearer, where there is something to say.
    pub note: Option<&'static str>,
    /// Whether it is made of times that a side's report calls noisy.
    pub noisy_times: bool,
}

impl Row {
    /// The number's name with its layer, as rules spell it.
    pub fn name(&self) -> String {
        self.layer.map_or_else(|| self.path.clone(), |layer| format!("layer:{layer}:{}", self.path))
    }

    /// Whether it is made of times of steps: every noisy number is, but for the tokens that a speedup is of.
    pub fn is_of_times(&self) -> bool {
        self.metric.noise == Noise::Noisy && self.metric.id != "tokens_per_step"
    }

    /// Marks it as made of noisy times: a change of it is not told, whatever its interval says, for that holds for other requests on the same
    /// undisturbed machine.
    pub fn rests_on_noise(&mut self) {
        self.noisy_times = true;
        if matches!(self.verdict, Verdict::Better | Verdict::Worse) {
            (self.verdict, self.note) = (Verdict::Unclear, Some("a few steps decide the times"));
        }
    }

    /// candidate - base.
    pub fn difference(&self) -> f64 {
        self.candidate.value - self.base.value
    }

    /// candidate / base - 1; `None` unless both are above 0, or equal.
    pub fn relative(&self) -> Option<f64> {
        if self.base.value > 0.0 && self.candidate.value >= 0.0 {
            Some(self.candidate.value / self.base.value - 1.0)
        } else {
            (self.base.value == self.candidate.value).then_some(0.0)
        }
    }

    /// 95 % interval of [`Row::relative`].
    pub fn relative_interval(&self) -> Option<Interval> {
        let [low, high] = self.log_change?.interval();
        Some([low.exp_m1(), high.exp_m1()])
    }

    /// The smallest relative change that would be seen in four of five such comparisons.
    pub fn detectable(&self) -> Option<f64> {
        Some(self.log_change?.detectable().exp_m1()).filter(|d| d.is_finite())
    }
}

/// Names of the numbers that only one side has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct OneSided {
    /// Only the base has them.
    pub base: Vec<String>,
    /// Only the candidate has them.
    pub candidate: Vec<String>,
}

/// Compares what both sides have, in the base's order, and names what only one has. `margin` is the relative change that
/// does not matter.
pub fn compare(base: Vec<Measure>, candidate: Vec<Measure>, pairing: &Pairing, margin: f64) -> (Vec<Row>, OneSided) {
    let name = |m: &Measure| m.layer.map_or_else(|| m.path.clone(), |layer| format!("layer:{layer}:{}", m.path));
    let mut others: BTreeMap<(Option<u16>, String), Measure> = candidate.into_iter().map(|m| ((m.layer, m.path.clone()), m)).collect();
    let mut one_sided = OneSided::default();
    let mut rows = Vec::with_capacity(base.len());
    for measure in base {
        match others.remove(&(measure.layer, measure.path.clone())) {
            Some(other) => rows.push(row(measure, other.estimate, pairing)),
            None => one_sided.base.push(name(&measure)),
        }
    }
    one_sided.candidate = others.values().map(name).collect();
    // Two families: the run's numbers, and the layers'. Of the changes that are claimed in either, at most 5 % are expected to be none.
    for of_layers in [false, true] {
        let family: Vec<usize> = (0..rows.len()).filter(|&i| rows[i].layer.is_some() == of_layers && rows[i].p.is_some()).collect();
        let p: Vec<f64> = family.iter().filter_map(|&i| rows[i].p).collect();
        for (&i, q) in family.iter().zip(false_discovery(&p)) {
            rows[i].q = Some(q);
        }
    }
    for row in &mut rows {
        (row.verdict, row.note) = verdict(row, margin);
    }
    (rows, one_sided)
}

fn row(base: Measure, candidate: Estimate, pairing: &Pairing) -> Row {
    use super::estimate::Spread::{Requests, Unknown};
    let exact = pairing.is_exact_for(base.metric.noise);
    let (pairs, method) = match (&base.estimate.spread, &candidate.spread) {
        _ if exact => (Pairs::Exact, Method::Exact),
        (Unknown, _) | (_, Unknown) => (Pairs::Different, Method::Point),
        (Requests(_), Requests(_)) if pairing.is_paired() => (Pairs::Same(&pairing.pairs), Method::Paired),
        (Requests(_), Requests(_)) => (Pairs::Different, Method::Unpaired),
        _ => (Pairs::Different, Method::Intervals),
    };
    let change = difference(&base.estimate, &candidate, pairs);
    let log_change = log_ratio(&base.estimate, &candidate, pairs);
    let method = if change.is_none() { Method::Point } else { method };
    // Exact comparisons are no tests: there is nothing to be wrong about.
    let p = change.filter(|_| method != Method::Exact).map(|shift| shift.p_zero());
    let Measure { layer, path, metric, estimate, .. } = base;
    Row {
        layer,
        path,
        metric,
        base: estimate,
        candidate,
        method,
        verdict: Verdict::Unclear,
        change,
        log_change,
        p,
        q: None,
        note: None,
        noisy_times: false,
    }
}

fn verdict(row: &Row, margin: f64) -> (Verdict, Option<&'static str>) {
    let difference = row.difference();
    let certain = row.method == Method::Exact || row.q.is_some_and(|q| q <= FALSE_DISCOVERIES);
    if difference != 0.0 && certain {
        return match (row.metric.better, difference > 0.0) {
            (Better::Neither, _) => (Verdict::Unclear, Some("changed; neither direction is better")),
            (Better::Higher, true) | (Better::Lower, false) => (Verdict::Better, None),
            _ => (Verdict::Worse, None),
        };
    }
    let within = row.relative_interval().is_some_and(|[low, high]| -margin <= low && high <= margin);
    match row.method {
        _ if within => (Verdict::Same, None),
        Method::Exact => (Verdict::Same, None),
        // The same number without any uncertainty known, from runs that need not be the same.
        Method::Point if difference == 0.0 => (Verdict::Same, Some("equal; its uncertainty is unknown")),
        Method::Point => (Verdict::Unclear, Some("its uncertainty is unknown")),
        _ if difference == 0.0 && row.change.is_some_and(|s| s.below + s.above == 0.0) => (Verdict::Same, None),
        _ => (Verdict::Unclear, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::find;

    fn measure(layer: Option<u16>, path: &str, pairs: &[(f64, f64)]) -> Measure {
        let estimate = Estimate::ratio(pairs.iter().copied()).unwrap();
        Measure { layer, path: path.into(), metric: *find("union").unwrap(), estimate }
    }

    fn paired(n: usize) -> Pairing {
        Pairing { pairs: (0..n).map(|i| (i, i)).collect(), known: true, repeatable: true, ..Pairing::default() }
    }

    fn only(base: Measure, candidate: Measure, pairing: &Pairing) -> Row {
        compare(vec![base], vec![candidate], pairing, 0.01).0.remove(0)
    }

    fn run(by: f64, noise: f64) -> Vec<(f64, f64)> {
        (0..26).map(|i| (250.0 + by * 10.0 + noise * f64::from(i * 7 % 13 - 6), 10.0)).collect()
    }

    #[test]
    fn verdicts_follow_size_direction_and_certainty() {
        let of = |by: f64, noise: f64| {
            let row = only(measure(None, "union.mean", &run(0.0, 0.0)), measure(None, "union.mean", &run(by, noise)), &paired(26));
            (row.method, row.verdict)
        };
        assert_eq!(of(2.0, 1.0), (Method::Paired, Verdict::Worse));
        assert_eq!(of(-2.0, 1.0), (Method::Paired, Verdict::Better));
        assert_eq!(of(0.01, 1.0), (Method::Paired, Verdict::Same));
        assert_eq!(of(0.5, 40.0), (Method::Paired, Verdict::Unclear));
        assert_eq!(of(0.0, 0.0), (Method::Paired, Verdict::Same));
    }

    #[test]
    fn exact_runs_differ_in_anything_or_in_nothing() {
        let exact = Pairing { same_windows: true, ..paired(26) };
        let of = |by: f64| only(measure(None, "union.mean", &run(0.0, 5.0)), measure(None, "union.mean", &run(by, 5.0)), &exact);
        assert_eq!((of(0.0).method, of(0.0).verdict, of(0.0).p), (Method::Exact, Verdict::Same, None));
        assert_eq!(of(1e-6).verdict, Verdict::Worse);
        let [low, high] = of(1.0).relative_interval().unwrap();
        assert!((low - 0.04).abs() < 1e-9 && low == high);
        // Batched verification: the same windows, but rows that may fall otherwise.
        let batched = Pairing { repeatable: false, ..exact };
        assert_eq!(
            only(measure(None, "union.mean", &run(0.0, 5.0)), measure(None, "union.mean", &run(0.0, 5.0)), &batched).method,
            Method::Paired
        );
    }

    #[test]
    fn layers_are_aligned_and_the_rest_is_named() {
        let layer = |l| measure(Some(l), "union.mean", &run(0.0, 1.0));
        let (rows, one) = compare(vec![layer(1), layer(2)], vec![layer(3), layer(2)], &paired(26), 0.01);
        assert_eq!(rows.iter().map(Row::name).collect::<Vec<_>>(), ["layer:2:union.mean"]);
        assert_eq!((one.base, one.candidate), (vec!["layer:1:union.mean".to_owned()], vec!["layer:3:union.mean".to_owned()]));
    }

    #[test]
    fn a_change_of_noisy_times_is_unclear() {
        let of = |by: f64| {
            let mut row = only(measure(None, "union.mean", &run(0.0, 0.0)), measure(None, "union.mean", &run(by, 1.0)), &paired(26));
            row.rests_on_noise();
            (row.verdict, row.note.is_some(), row.noisy_times)
        };
        // Worse and better by quiet times; the same is the same by any.
        assert_eq!((of(2.0), of(-2.0)), ((Verdict::Unclear, true, true), (Verdict::Unclear, true, true)));
        assert_eq!(of(0.01), (Verdict::Same, false, true));
    }

    #[test]
    fn one_request_is_unclear_and_says_so() {
        let row = only(measure(None, "union.mean", &[(25.0, 1.0)]), measure(None, "union.mean", &[(26.0, 1.0)]), &paired(1));
        assert_eq!((row.method, row.verdict, row.note), (Method::Point, Verdict::Unclear, Some("its uncertainty is unknown")));
        assert!((row.relative().unwrap() - 0.04).abs() < 1e-12);
    }
}
