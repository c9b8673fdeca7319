//! What the numbers of a report can be, so that a file with impossible ones is refused instead of compared.
//!
//! Two checks: every known key has a range of its own, whatever object it is in ([`check_keys`]); and what a number may be by the others
//! (a union by its rows, a share by its parts) is checked of the report as it was read ([`check_report`]). Keys that this build does not
//! know are passed over.

use crate::metric::report::{Load, Report, WindowStats};
use serde_json::Value;

/// Beyond this a number is none of a report's: bytes of all experts of a large model are a millionth of it.
const LARGEST: f64 = 1e15;
/// Means are rounded.
const SLACK: f64 = 1e-6;

/// Which numbers a key can have. None is beyond [`LARGEST`].
#[derive(Debug, Clone, Copy, PartialEq)]
enum Range {
    /// At least this.
    From(f64),
    /// 0...1.
    Share,
    /// At most 1: a share of what is gained or saved, which may be lost.
    UpToOne,
    /// Differences and fitted coefficients.
    Any,
}

/// Whether `null` can stand for a key's number or list of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Null {
    /// Unknown numbers are null.
    Fine,
    /// So are the entries of a list.
    AndEntries,
    /// It is always known.
    Never,
}

use Null::{AndEntries, Fine, Never};
use Range::{Any, From, Share, UpToOne};

/// Every key of a report that is a number or a list of them, outside `run`. Intervals (`NAME_ci95`) have their number's range.
const KEYS: &[(&[&str], Range, Null)] = &[
    (&["tokens_per_step"], From(1.0), Fine),
    (&["by_position", "conditional_by_position", "host_load", "throttled"], Share, AndEntries),
    (&["lag_overlap_frac", "lag_jaccard", "step_reuse", "mass_coverage", "r2", "best_share"], Share, Fine),
    (&["top_1pct_share", "decode_share", "threshold", "mass"], Share, Never),
    (&["lift", "popularity_lift", "gain"], UpToOne, Fine),
    (&["ranks"], From(1.0), Never),
    (&["effective_experts", "max_over_mean", "sharing_ratio"], From(1.0), Never),
    (
        &[
            "k",
            "experts",
            "requests",
            "steps",
            "prefill_steps",
            "decode_steps",
            "verify_steps",
            "tokens_emitted",
            "layer",
            "rows",
            "windows",
            "prefix_union",
            "marginal",
            "mean",
            "p50",
            "p90",
            "p99",
            "max",
            "min",
            "sd",
            "histogram",
            "entropy_bits",
            "worst_layer",
            "request_id",
            "depth",
            "unknown_windows",
            "points",
            "samples",
            "time_s",
            "from",
            "to",
            "windows_by_position",
            "passes",
            "passes_with_prefill",
            "requests_per_pass",
            "rows_per_pass",
            "requests_histogram",
            "request_union_mean",
            "union_sum_mean",
            "pass_union_mean",
            "busiest_mean",
            "busiest_p99",
            "busiest_floor_mean",
            "imbalance_mean",
            "imbalance_p99",
            "ranks_touched_mean",
            "draft_len",
            "recorded_draft_len",
            "steps_left_out",
            "drafts_mean",
            "decode_bytes",
            "verify_bytes",
            "per_window",
            "per_decode_token",
        ],
        From(0.0),
        Never,
    ),
    (
        &[
            "accepted_drafts_mean",
            "emitted_per_step",
            "marginal_kept",
            "marginal_rejected",
            "wasted_mean",
            "wasted_by_row",
            "pairwise",
            "uniform_union",
            "popularity_union",
            "union",
            "wasted",
            "accepted",
            "union_mean",
            "union_ci95",
            "rows_mean",
            "load_by_expert",
            "verify_ratio",
            "step_ratio",
            "break_even",
            "speedup",
            "verify_us",
            "decode_us",
            "verify_step_us",
            "decode_step_us",
            "mean_us",
            "best_draft_len",
            "best_speedup",
            "resamples_left_out",
            "request_speedup_mean",
            "speedup_if_drafts_are_free",
            "per_token",
            "wasted_per_window",
            "row_bytes",
            "token_dispatch_bytes",
            "expert_dispatch_bytes",
            "weight_dispatch_bytes",
            "request_union",
            "union_sum",
            "pass_union",
        ],
        From(0.0),
        Fine,
    ),
    (&["cpu_mhz", "sm_clock_mhz", "power_w", "memory_bytes"], From(0.0), AndEntries),
    (&["temperature_c"], Any, AndEntries),
    (
        &[
            "us_per_expert",
            "us_per_row",
            "intercept_us",
            "implied_gb_per_s",
            "residual_us",
            "unattributed_us",
            "delta_us",
            "share_of_delta",
            "union_us",
            "shape_us",
            "marginal_utility",
            "ci95",
        ],
        Any,
        Fine,
    ),
];

/// Parts of a report that are not numbers of the analysis.
const PASSED_OVER: [&str; 5] = ["schema", "run", "warnings", "identity", "tags"];

fn rule(key: &str) -> Option<(Range, Null)> {
    let of = |key: &str| KEYS.iter().find(|(keys, ..)| keys.contains(&key)).map(|&(_, range, null)| (range, null));
    // An interval is unknown more often than its number.
    of(key).or_else(|| key.strip_suffix("_ci95").and_then(of).map(|(range, _)| (range, Fine)))
}

/// Checks every number of a report's JSON by its key.
///
/// # Errors
/// The path of the first key whose number cannot be, and what it can be.
pub fn check_keys(report: &Value) -> Result<(), String> {
    check(report, "", "", false)
}

fn check(value: &Value, key: &str, path: &str, entry: bool) -> Result<(), String> {
    let wrong = |what: String| Err(format!("{path}: {what}"));
    let rule = rule(key);
    match (value, rule) {
        (Value::Object(object), _) => {
            for (key, value) in object.iter().filter(|(key, _)| !PASSED_OVER.contains(&key.as_str())) {
                let name = key.chars().take(60).collect::<String>().escape_debug().to_string();
                check(value, key, &if path.is_empty() { name } else { format!("{path}.{name}") }, false)?;
            }
            Ok(())
        }
        (Value::Array(list), _) => {
            for (i, value) in list.iter().enumerate() {
                check(value, key, &format!("{path}[{i}]"), true)?;
            }
            if key.ends_with("ci95") { interval(list, path) } else { Ok(()) }
        }
        (Value::Null, Some((_, null))) if null == Never || (entry && null != AndEntries) => wrong("null where only a number can be".into()),
        (Value::String(_) | Value::Bool(_), Some(_)) => wrong("not a number".into()),
        (Value::Number(number), Some((range, _))) => {
            let n = number.as_f64().unwrap_or(f64::NAN);
            let fits = n.abs() <= LARGEST
                && match range {
                    From(least) => n >= least,
                    Share => (-SLACK..=1.0 + SLACK).contains(&n),
                    UpToOne => n <= 1.0 + SLACK,
                    Any => true,
                };
            let allowed = match range {
                _ if n.abs() > LARGEST => "larger than any number of a report".to_owned(),
                From(least) => format!("less than {least}"),
                Share => "not from 0 to 1".to_owned(),
                UpToOne => "more than 1".to_owned(),
                Any => "no number".to_owned(),
            };
            if fits { Ok(()) } else { wrong(format!("{number} is {allowed}")) }
        }
        _ => Ok(()),
    }
}

fn interval(list: &[Value], path: &str) -> Result<(), String> {
    match list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>().as_deref() {
        Some(&[low, high]) if low <= high => Ok(()),
        Some(&[low, high]) => Err(format!("{path}: [{low}, {high}] is no interval, its low end is the higher one")),
        _ => Err(format!("{path}: an interval is two numbers")),
    }
}

/// Checks what numbers can be by others.
///
/// # Errors
/// The path of the first key whose number cannot be, and what it can be.
pub fn check_report(report: &Report) -> Result<(), String> {
    for (i, layer) in report.layers.iter().enumerate() {
        let path = format!("layers[{i}]");
        let scope = Scope { path: &path, k: layer.k, experts: layer.experts };
        scope.windows(&layer.stats, "")?;
        layer.by_rows.iter().enumerate().try_for_each(|(at, stats)| scope.windows(stats, &format!(".by_rows[{at}]")))?;
        layer.load.as_ref().map_or(Ok(()), |load| scope.load(load))?;
        if layer.load_by_expert.as_ref().is_some_and(|load| load.len() > usize::from(layer.experts)) {
            return Err(format!("{path}.load_by_expert: more entries than the layer's {} experts", layer.experts));
        }
    }
    if let Some(overall) = &report.overall {
        let scope = Scope { path: "overall", k: overall.k, experts: overall.experts };
        scope.windows(&overall.stats, "")?;
        overall.by_rows.iter().enumerate().try_for_each(|(at, stats)| scope.windows(stats, &format!(".by_rows[{at}]")))?;
        overall.load.as_ref().map_or(Ok(()), |load| scope.load(load))?;
    }
    acceptance(report)?;
    requests(report)
}

/// A layer, or all of them.
struct Scope<'a> {
    path: &'a str,
    k: u16,
    experts: u16,
}

impl Scope<'_> {
    fn windows(&self, s: &WindowStats, sub: &str) -> Result<(), String> {
        let (k, experts, rows) = (f64::from(self.k), f64::from(self.experts), usize::from(s.rows));
        if self.k > self.experts {
            return Err(format!("{}.k: {} experts of {}", self.path, self.k, self.experts));
        }
        let most = (rows as f64 * k).min(experts);
        let at_most = |key: &str, value: f64, most: f64| {
            let fits = value <= most * (1.0 + SLACK);
            let why = || format!("{}{sub}.{key}: {value} is above {most}, the most of {rows} rows of {k} out of {experts}", self.path);
            if fits { Ok(()) } else { Err(why()) }
        };
        let each = |key: &str, values: &[f64], entries: usize, most: &dyn Fn(usize) -> f64| {
            if values.len() > entries {
                return Err(format!("{}{sub}.{key}: {} entries for {rows} rows", self.path, values.len()));
            }
            values.iter().enumerate().try_for_each(|(i, &v)| at_most(&format!("{key}[{i}]"), v, most(i)))
        };
        if let Some(u) = &s.union {
            at_most("union.mean", u.mean, most)?;
            at_most("union.max", f64::from(u.max), most)?;
            let ranks = [("p50", u.p50), ("p90", u.p90), ("p99", u.p99), ("max", u.max)];
            if let Some([low, high]) = ranks.windows(2).find_map(|pair| <[_; 2]>::try_from(pair).ok().filter(|[a, b]| a.1 > b.1)) {
                return Err(format!("{}{sub}.union.{}: {} is above {}, {}", self.path, low.0, low.1, high.0, high.1));
            }
            if let Some([low, high]) = u.ci95 {
                at_most("union.ci95", high, most)?;
                at_most("union.ci95", -low, 0.0)?;
            }
            at_most("union.histogram", u.histogram.len() as f64 - 1.0, most)?;
        }
        each("prefix_union", &s.prefix_union, rows, &|j| ((j + 1) as f64 * k).min(experts))?;
        each("marginal", &s.marginal, rows, &|_| k)?;
        each("wasted_by_row", s.wasted_by_row.as_deref().unwrap_or_default(), rows, &|_| k)?;
        each("lag_overlap_frac", s.lag_overlap_frac.as_deref().unwrap_or_default(), rows, &|_| 1.0)?;
        each("lag_jaccard", s.lag_jaccard.as_deref().unwrap_or_default(), rows, &|_| 1.0)?;
        let pairwise = s.pairwise.as_deref().unwrap_or_default();
        if pairwise.len() > rows {
            return Err(format!("{}{sub}.pairwise: {} entries for {rows} rows", self.path, pairwise.len()));
        }
        pairwise.iter().enumerate().try_for_each(|(i, row)| each(&format!("pairwise[{i}]"), row, rows, &|_| k))?;
        let numbers = [
            ("marginal_kept", s.marginal_kept, k),
            ("marginal_rejected", s.marginal_rejected, k),
            ("wasted_mean", s.wasted_mean, most),
            ("uniform_union", s.uniform_union, most),
            ("popularity_union", s.popularity_union, most),
        ];
        numbers.into_iter().try_for_each(|(key, value, most)| value.map_or(Ok(()), |value| at_most(key, value, most)))
    }

    fn load(&self, load: &Load) -> Result<(), String> {
        let experts = f64::from(self.experts);
        let numbers = [
            ("entropy_bits", load.entropy_bits, experts.log2()),
            ("effective_experts", load.effective_experts, experts),
            ("max_over_mean", load.max_over_mean, experts),
        ];
        let above = numbers.into_iter().find(|&(_, value, most)| value > most * (1.0 + SLACK) + SLACK);
        above.map_or(Ok(()), |(key, value, most)| {
            Err(format!("{}.load.{key}: {value} is above {most}, the most of {experts} experts", self.path))
        })
    }
}

fn acceptance(report: &Report) -> Result<(), String> {
    let a = &report.acceptance;
    let most = a.histogram.len().saturating_sub(1) as f64;
    if let Some((mean, tokens)) = a.accepted_drafts_mean.zip(a.tokens_per_step)
        && (tokens - mean - 1.0).abs() > SLACK * tokens
    {
        return Err(format!("acceptance.tokens_per_step: {tokens} is not one more than accepted_drafts_mean, {mean}"));
    }
    if let Some(mean) = a.accepted_drafts_mean.filter(|&mean| mean > most * (1.0 + SLACK)) {
        return Err(format!("acceptance.accepted_drafts_mean: {mean} is above {most}, the most drafts of the histogram"));
    }
    let positions = [("by_position", a.by_position.len()), ("conditional_by_position", a.conditional_by_position.len())];
    let longer = positions.into_iter().find(|&(_, n)| n as f64 > most);
    longer.map_or(Ok(()), |(key, n)| Err(format!("acceptance.{key}: {n} positions, windows have {most} drafts at most")))
}

/// Largest sum of one request: sums over layers must not overflow.
const LARGEST_SUM: u64 = 1 << 40;

fn requests(report: &Report) -> Result<(), String> {
    let layers = report.layers.len();
    let drafts = report.acceptance.histogram.len().saturating_sub(1) as u64;
    let most = report.overall.as_ref().map(|o| (u64::from(o.stats.rows) * u64::from(o.k)).min(u64::from(o.experts)));
    for (i, request) in report.by_request.iter().enumerate() {
        let path = format!("by_request[{i}]");
        let id = request.request_id;
        if request.verify_steps > LARGEST_SUM || request.accepted.is_some_and(|n| n > request.verify_steps.saturating_mul(drafts)) {
            return Err(format!("{path}.accepted: request {id} has accepted more drafts than its verify steps had"));
        }
        if let Some((mean, most)) = request.union_mean.zip(most).filter(|&(mean, most)| mean > most as f64 * (1.0 + SLACK)) {
            return Err(format!("{path}.union_mean: {mean} is above {most}, the most of a window"));
        }
        let Some(sums) = &request.sums else { continue };
        let wasted = sums.wasted.as_ref().map_or(layers, Vec::len);
        if sums.windows.len() != layers || sums.union.len() != layers || wasted != layers {
            return Err(format!("{path}.sums: those of request {id} are not of {layers} layers"));
        }
        for (slot, (&windows, &union)) in sums.windows.iter().zip(&sums.union).enumerate() {
            let wasted = sums.wasted.as_ref().and_then(|w| w.get(slot)).copied().unwrap_or(0);
            if windows > LARGEST_SUM || union > LARGEST_SUM {
                return Err(format!("{path}.sums: those of request {id} are larger than a trace can have"));
            }
            if most.is_some_and(|most| union > windows.saturating_mul(most)) || wasted > union {
                return Err(format!("{path}.sums: in layer {slot} of the list, request {id} has more experts than its windows can"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::source::read_report;
    use super::super::testing::report;
    use super::*;
    use proptest::prelude::*;

    fn read(value: &Value) -> Result<Report, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::fs::write(&path, value.to_string()).unwrap();
        read_report(&path).map_err(|e| e.to_string().replace(&path.display().to_string(), "r.json"))
    }

    /// Paths of all numbers of the analysis, as keys and indices, with the last key.
    fn numbers(value: &Value, path: &str, key: &str, out: &mut Vec<(String, String)>) {
        match value {
            Value::Object(object) => object.iter().for_each(|(k, v)| numbers(v, &format!("{path}/{k}"), k, out)),
            Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| numbers(v, &format!("{path}/{i}"), key, out)),
            Value::Number(_) => out.push((path.to_owned(), key.to_owned())),
            _ => {}
        }
    }

    fn all_numbers(report: &Value) -> Vec<(String, String)> {
        let mut out = Vec::new();
        numbers(report, "", "", &mut out);
        out.retain(|(path, _)| !path.starts_with("/run/") && !path.starts_with("/warnings/"));
        out
    }

    /// `/layers/0/union/mean` as errors write it.
    fn as_said(path: &str) -> String {
        let mut out = String::new();
        for part in path.split('/').skip(1) {
            match part.parse::<usize>() {
                Ok(i) => out.push_str(&format!("[{i}]")),
                Err(_) if out.is_empty() => out.push_str(part),
                Err(_) => out.push_str(&format!(".{part}")),
            }
        }
        out
    }

    #[test]
    fn impossible_numbers_are_refused_by_name() {
        let value = serde_json::to_value(report()).unwrap();
        let with = |path: &str, to: Value| {
            let mut value = value.clone();
            *value.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = to;
            read(&value).unwrap_err()
        };
        assert_eq!(with("/acceptance/tokens_per_step", 0.into()), "r.json: corrupt: acceptance.tokens_per_step: 0 is less than 1");
        assert!(with("/acceptance/tokens_per_step", (-2).into()).contains("acceptance.tokens_per_step: -2 is less than 1"));
        assert!(with("/acceptance/tokens_per_step", 2.75.into()).contains("is not one more than accepted_drafts_mean"));
        assert!(
            with("/acceptance/tokens_per_step_ci95", vec![9, 1].into()).contains("acceptance.tokens_per_step_ci95: [9, 1] is no interval")
        );
        assert!(with("/overall/union/mean", 1e308.into()).contains("overall.union.mean: 1e+308 is larger than any number"));
        assert!(with("/overall/union/mean", Value::Null).contains("overall.union.mean: null where only a number can be"));
        assert!(with("/layers/1/union/mean", 32.5.into()).contains("layers[1].union.mean: 32.5 is above 32, the most of 4 rows of 8"));
        assert!(with("/acceptance/by_position/0", 1.5.into()).contains("acceptance.by_position[0]: 1.5 is not from 0 to 1"));
        assert!(with("/layers/0/marginal/2", 8.5.into()).contains("layers[0].marginal[2]: 8.5 is above 8"));
        assert!(with("/layers/0/prefix_union/0", Value::Null).contains("layers[0].prefix_union[0]: null"));
        assert!(with("/layers/0/k", "8".into()).contains("layers[0].k: not a number"));
        assert!(
            with("/by_request/1/sums/union/0", 100_000.into()).contains("by_request[1].sums: in layer 0 of the list, request 1 has more")
        );
    }

    /// Keys of a schema that are numbers or lists of them.
    fn numeric_keys(schema: &Value, out: &mut Vec<String>) {
        for (key, of) in schema["properties"].as_object().into_iter().flatten() {
            let text = of.to_string();
            if !text.contains("\"properties\"") && (text.contains("\"number\"") || text.contains("\"integer\"")) {
                out.push(key.clone());
            }
        }
        match schema {
            Value::Object(object) => object.values().for_each(|part| numeric_keys(part, out)),
            Value::Array(list) => list.iter().for_each(|part| numeric_keys(part, out)),
            _ => {}
        }
    }

    #[test]
    fn every_number_of_a_report_has_a_range() {
        let mut found = all_numbers(&serde_json::to_value(report()).unwrap());
        let kept: Value = serde_json::from_str(include_str!("../../reports/compat/report.v1.json")).unwrap();
        found.extend(all_numbers(&kept));
        for (path, key) in found {
            assert!(rule(&key).is_some(), "{path}");
        }
        // And every one that the schema speaks of.
        let schema: Value = serde_json::from_str(include_str!("../../reports/schema/report.v1.schema.json")).unwrap();
        let mut keys = Vec::new();
        let definitions = schema["$defs"].as_object().unwrap().iter().filter(|(name, _)| name.as_str() != "run").map(|(_, d)| d);
        definitions.for_each(|definition| numeric_keys(definition, &mut keys));
        assert!(keys.len() > 150, "{}", keys.len());
        for key in keys {
            assert!(rule(&key).is_some(), "{key}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Any number of a real report, made impossible in any way that there is for it, is refused by its path.
        #[test]
        fn a_mutated_report_is_refused(at in any::<prop::sample::Index>(), way in 0usize..5) {
            let mut value = serde_json::to_value(report()).unwrap();
            let numbers = all_numbers(&value);
            let (path, key) = at.get(&numbers);
            let (range, null) = rule(key).unwrap();
            let entry = path.rsplit('/').next().unwrap().parse::<usize>().is_ok();
            let bad: Value = match (way, range) {
                (0, _) => 1e308.into(),
                (1, From(least)) => (least - 0.5).into(),
                (1, Share) => (-0.1).into(),
                (2, Share | UpToOne) => 1.1.into(),
                (3, _) if null == Never || (entry && null == Fine) => Value::Null,
                (_, _) => "x".into(),
            };
            *value.pointer_mut(path).unwrap() = bad;
            let error = read(&value).unwrap_err();
            prop_assert!(error.starts_with("r.json: corrupt: ") && error.contains(&as_said(path)), "{path}: {error}");
        }

        /// Whatever number is put in its place, reading gives a report or says why not.
        #[test]
        fn no_number_panics(at in any::<prop::sample::Index>(), number in any::<f64>(), whole in any::<Option<i64>>()) {
            let mut value = serde_json::to_value(report()).unwrap();
            let numbers = all_numbers(&value);
            let (path, _) = at.get(&numbers);
            *value.pointer_mut(path).unwrap() = whole.map_or_else(|| Value::from(number), Value::from);
            if let Ok(read) = read(&value) {
                let options = super::super::Options { allow: super::super::kind::Kind::ALL.to_vec(), ..Default::default() };
                super::super::diff_reports(&report(), &read, &super::super::rules::defaults(), &options).unwrap();
            }
        }
    }
}
