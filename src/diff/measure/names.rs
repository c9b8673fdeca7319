//! The names that measures can have, as rules spell them.

use crate::metric::{Better, Metric, Noise, Unit, find};

const fn noisy(id: &'static str, unit: Unit, better: Better, meaning: &'static str) -> Metric {
    Metric { id, unit, better, noise: Noise::Noisy, meaning, formula: "" }
}

/// Step costs. They depend on clocks.
pub(super) const COST: [Metric; 4] = [
    noisy("verify_ratio", Unit::Ratio, Better::Lower, "time of a verify step over that of a decode step"),
    noisy("step_ratio", Unit::Ratio, Better::Lower, "the same with drafting and sampling"),
    noisy("break_even", Unit::Tokens, Better::Lower, "tokens per step at which drafting pays"),
    noisy("speedup", Unit::Ratio, Better::Higher, "tokens per step over the step ratio"),
];

/// The same over the verify steps of every number of rows, which are `cost.all_rows`.
pub(super) const ALL_ROWS: [Metric; 3] = [
    noisy("tokens_per_step", Unit::Tokens, Better::Higher, "tokens per verify step of any number of rows"),
    noisy("step_ratio", Unit::Ratio, Better::Lower, "time of a verify step of any number of rows over that of a decode step"),
    noisy("speedup", Unit::Ratio, Better::Higher, "their quotient"),
];

/// A layer's costs, by the object that they are in.
pub(super) const LAYER_COST: [(&str, Metric); 5] = [
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
