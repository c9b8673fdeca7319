//! What each key's number can be, whatever object it is in.

use super::SLACK;
use serde_json::Value;

/// Beyond this a number is none of a report's: bytes of all experts of a large model are a millionth of it.
const LARGEST: f64 = 1e15;

/// Which numbers a key can have. None is beyond [`LARGEST`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Range {
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
pub(super) enum Null {
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

/// What a key's number can be; `None` of a key that this build does not know.
pub(super) fn rule(key: &str) -> Option<(Range, Null)> {
    let of = |key: &str| KEYS.iter().find(|(keys, ..)| keys.contains(&key)).map(|&(_, range, null)| (range, null));
    // An interval or a median is unknown more often than its number.
    of(key).or_else(|| ["_ci95", "_median"].iter().find_map(|end| of(key.strip_suffix(end)?)).map(|(range, _)| (range, Fine)))
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
