//! A run's facts in words, the same in text and on a page.

use crate::metric::Unit;
use crate::metric::report::{Report, RunFacts};
use crate::trace::manifest::{Verification, WindowCompleteness, requests_unknown};

/// A number of things: `1 step`, `2 steps`.
pub fn counted(n: u64, what: &str) -> String {
    format!("{} {what}{}", Unit::Count.show(n as f64), if n == 1 { "" } else { "s" })
}

/// The requests of a report; a trace of whole batches has one that stands for all.
pub fn requests(report: &Report) -> String {
    if requests_unknown(&report.warnings) { "unknown requests".to_owned() } else { counted(report.totals.requests, "request") }
}

/// The emitted tokens. Verify steps of unknown acceptance have a placeholder for theirs, which is no count of tokens.
pub fn tokens(report: &Report) -> String {
    tokens_known(report).map_or_else(|| "unknown tokens".to_owned(), |n| counted(n, "token"))
}

/// The number of emitted tokens, where it is one: not of steps of batches, which stand with one token each.
pub fn tokens_known(report: &Report) -> Option<u64> {
    let unknown = requests_unknown(&report.warnings);
    let unaccepted = report.totals.verify_steps > 0 && report.warnings.iter().any(|w| w.code == "acceptance_unknown");
    (!unknown && !unaccepted).then_some(report.totals.tokens_emitted)
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
