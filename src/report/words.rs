//! A run's facts in words, the same in text and on a page.

use crate::metric::Unit;
use crate::metric::report::RunFacts;
use crate::trace::manifest::{Verification, WindowCompleteness};

/// A number of things: `1 step`, `2 steps`.
pub fn counted(n: u64, what: &str) -> String {
    format!("{} {what}{}", Unit::Count.show(n as f64), if n == 1 { "" } else { "s" })
}

/// How tokens were chosen; `unknown` where the run does not say.
pub fn sampling(run: &RunFacts) -> String {
    match &run.sampling {
        None => "unknown".to_owned(),
        Some(s) if s.temperature == 0.0 => "greedy".to_owned(),
        Some(s) => format!("temperature {}, top-p {}, top-k {}, seed {}", s.temperature, s.top_p, s.top_k, s.seed),
    }
}

/// Whether a row's result depends on the rows beside it.
pub fn verification(run: &RunFacts) -> &'static str {
    match run.verification {
        Verification::Exact => "exact",
        Verification::Batched => "batched",
        Verification::Unknown => "unknown",
    }
}

/// Which rows of the windows were recorded.
pub fn windows(run: &RunFacts) -> &'static str {
    match run.window_completeness {
        WindowCompleteness::Full => "all rows recorded",
        WindowCompleteness::AcceptedOnly => "kept rows recorded only",
        WindowCompleteness::Counts => "counts recorded only",
        WindowCompleteness::None => "no windows recorded",
    }
}

/// A number that may be unknown.
pub fn known(n: Option<u16>) -> String {
    n.map_or_else(|| "unknown".to_owned(), |n| n.to_string())
}

/// Why a run is incomplete; `None` of a complete one.
pub fn incomplete(run: &RunFacts) -> Option<&str> {
    (!run.complete).then(|| run.incomplete_reason.as_deref().unwrap_or("no reason given"))
}
