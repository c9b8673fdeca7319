//! Two runs compared: what changed, how sure that is, and which rules that breaks.
//!
//! ```text
//! trace or report JSON   -> source, ranges      a report, checked, and the trace where there is one, with sums by request
//! two reports            -> pairing, kind       which requests are the same; what makes the runs incomparable
//! one report             -> measure             a flat list of numbers with their uncertainty
//! two lists              -> compare             rows with verdicts, false discoveries controlled
//! rows and rules         -> gate                what fails
//! Comparison             -> render              text | markdown | json | github | junit
//! ```

pub mod compare;
pub mod estimate;
pub mod gate;
pub mod kind;
pub mod measure;
mod near_ties;
pub mod pairing;
pub mod quantile;
mod ranges;
pub mod render;
pub mod routing;
pub mod rule;
pub mod rules;
pub mod source;
pub mod student;
#[cfg(test)]
mod testing;

use crate::analysis::request_totals::RequestTotals;
use crate::metric::bounds::{FEW_REQUESTS, FEW_REQUESTS_CODE, NOISY_TIMES};
use crate::metric::report::RunFacts;
use crate::metric::{Noise, Report};
use crate::trace::TraceError;
use crate::trace::manifest::{Verification, Warning};
use compare::{Method, OneSided, Row, Verdict};
use gate::{Gate, Status};
use kind::{Difference, Kind};
use pairing::Pairing;
use routing::Disagreement;
use rules::Rules;
use source::Side;

/// The value of `schema` in every comparison of this version.
pub const SCHEMA: &str = "specprof.diff/1";

/// How to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// What may differ between the runs.
    pub allow: Vec<Kind>,
    /// The relative change that does not matter.
    pub margin: f64,
    /// Whether rules fail by the numbers alone.
    pub strict: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { allow: Vec::new(), margin: 0.01, strict: false }
    }
}

/// Two runs compared.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// The base's facts.
    pub base: RunFacts,
    /// The candidate's.
    pub candidate: RunFacts,
    /// Requests of base and candidate.
    pub requests: (u64, u64),
    /// How requests belong together.
    pub pairing: Pairing,
    /// What differs although it should not, and was allowed.
    pub differences: Vec<Difference>,
    /// The options.
    pub options: Options,
    /// Every number that both have: the run's, then each layer's.
    pub rows: Vec<Row>,
    /// What only one has.
    pub one_sided: OneSided,
    /// How often rows of the same text were routed differently; `None` without two traces of the same prompts.
    pub routing: Option<Disagreement>,
    /// The rules and what became of them.
    pub gates: Vec<Gate>,
    /// What limits the comparison.
    pub warnings: Vec<Warning>,
}

/// Why two runs were not compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiffError {
    /// They are incomparable.
    #[error("base and candidate are not comparable: {what}; to compare them anyway: --allow {kinds}")]
    Incomparable {
        /// The differences, in words.
        what: String,
        /// The words for `--allow`.
        kinds: String,
        /// The differences.
        differences: Vec<Difference>,
    },
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

impl Comparison {
    /// Whether a rule failed.
    pub fn failed(&self) -> bool {
        self.gates.iter().any(|gate| gate.status == Status::Failed)
    }

    /// Rows of this verdict, of layers or of the whole run.
    pub fn count(&self, verdict: Verdict, of_layers: bool) -> usize {
        self.rows.iter().filter(|row| row.verdict == verdict && row.layer.is_some() == of_layers).count()
    }
}

/// Compares two sides and holds the rules against them.
///
/// # Errors
/// When they are incomparable in a way that is not allowed, or a trace cannot be read.
pub fn diff(base: &Side, candidate: &Side, rules: &Rules, options: &Options) -> Result<Comparison, DiffError> {
    let sides = [(&base.report, base.totals.as_ref()), (&candidate.report, candidate.totals.as_ref())];
    let mut comparison = diff_numbers(sides, rules, options)?;
    if let (Some(a), Some(b)) = (&base.trace, &candidate.trace) {
        comparison.routing = routing::disagreement((a, &base.report), (b, &candidate.report), &comparison.pairing)?;
    }
    Ok(comparison)
}

/// The same of reports alone.
///
/// # Errors
/// When they are incomparable in a way that is not allowed.
pub fn diff_reports(base: &Report, candidate: &Report, rules: &Rules, options: &Options) -> Result<Comparison, DiffError> {
    diff_numbers([(base, None), (candidate, None)], rules, options)
}

/// A report, and the sums by request of its trace.
type Numbers<'a> = (&'a Report, Option<&'a RequestTotals>);

fn diff_numbers(sides: [Numbers<'_>; 2], rules: &Rules, options: &Options) -> Result<Comparison, DiffError> {
    let [(base, base_totals), (candidate, candidate_totals)] = sides;
    let pairing = Pairing::of(base, candidate);
    let differences = kind::differences(base, candidate, &pairing);
    let mut options = options.clone();
    options.allow.extend(&rules.allow);
    let refused: Vec<Difference> = differences.iter().filter(|d| !options.allow.contains(&d.kind)).cloned().collect();
    if !refused.is_empty() {
        let what: Vec<String> = refused.iter().map(|d| format!("{}: {} against {}", d.kind.as_str(), d.base, d.candidate)).collect();
        let kinds: Vec<&str> = refused.iter().map(|d| d.kind.as_str()).collect();
        return Err(DiffError::Incomparable { what: what.join("; "), kinds: kinds.join(","), differences: refused });
    }
    let (mut rows, one_sided) =
        compare::compare(measure::measures(base, base_totals), measure::measures(candidate, candidate_totals), &pairing, options.margin);
    let noisy = noisy_sides(base, candidate);
    for row in rows.iter_mut().filter(|row| row.is_of_times() && row.method != Method::Exact) {
        if !noisy.is_empty() {
            row.rests_on_noise();
        }
    }
    let gates: Vec<Gate> = rules.rules.iter().map(|(rule, origin)| gate::hold(rule, origin, &rows, options.strict)).collect();
    let requests = (base.totals.requests, candidate.totals.requests);
    let mut comparison = Comparison {
        base: base.run.clone(),
        candidate: candidate.run.clone(),
        requests,
        pairing,
        differences,
        options,
        rows,
        one_sided,
        routing: None,
        gates,
        warnings: Vec::new(),
    };
    comparison.warnings = warnings(&comparison, &noisy);
    let totals = [("base", base_totals), ("candidate", candidate_totals)];
    comparison.warnings.extend(totals.into_iter().filter_map(|(side, totals)| sums_left_out(side, totals?)));
    Ok(comparison)
}

/// Sums by request are bounded: what is left out has no interval.
fn sums_left_out(side: &str, totals: &RequestTotals) -> Option<Warning> {
    let what = if totals.without_any { "its numbers" } else { "its layers' numbers" };
    let message = format!("the {side} has more requests than sums are kept of: most of {what} are shown without an interval");
    totals.without_layers.then(|| Warning::new("sums_left_out", message))
}

/// The sides whose reports say that a few steps decide their mean times, with what they say.
fn noisy_sides<'a>(base: &'a Report, candidate: &'a Report) -> Vec<(&'static str, &'a str)> {
    let of = |(side, report): (&'static str, &'a Report)| {
        report.warnings.iter().find(|w| w.code == NOISY_TIMES).map(|w| (side, w.message.as_str()))
    };
    [("base", base), ("candidate", candidate)].into_iter().filter_map(of).collect()
}

fn warnings(c: &Comparison, noisy: &[(&str, &str)]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut warn = |code: &str, message: String| warnings.push(Warning::new(code, message));
    if !c.pairing.known {
        warn("prompts_unknown", "not both runs know their prompts: requests are compared as different ones".into());
    } else if !c.pairing.is_paired() {
        warn("unpaired", "the prompts are not the same: requests are compared as different ones, which sees less".into());
    }
    let fewest = c.requests.0.min(c.requests.1);
    let exact = c.pairing.is_exact_for(Noise::Exact);
    if fewest < 2 && !exact {
        warn("one_request", "uncertainty is between requests and needs at least two of them: changes are shown, not judged".into());
    } else if fewest < FEW_REQUESTS && !exact {
        warn(FEW_REQUESTS_CODE, format!("{fewest} requests: only large changes can be seen; record {FEW_REQUESTS} or more"));
    }
    if c.rows.iter().any(|row| row.noisy_times) {
        for (side, says) in noisy {
            warn(
                NOISY_TIMES,
                format!("changes of times and costs are unclear, and rules of them not held, by noisy times; of the {side}: {says}"),
            );
        }
    }
    for (name, run) in [("base", &c.base), ("candidate", &c.candidate)] {
        if !run.complete {
            let why = run.incomplete_reason.as_deref().unwrap_or("no reason given");
            warn("incomplete", format!("the {name} is incomplete ({why}): it is compared as far as it goes"));
        }
    }
    match (c.base.verification, c.candidate.verification) {
        (Verification::Unknown, _) | (_, Verification::Unknown) => {
            warn("verification", "not both runs say whether rows depend on the batch: near-ties may fall otherwise".into());
        }
        (base, candidate) if base != candidate => {
            warn("verification", "one run's rows depend on the batch, the other's do not: near-ties may fall otherwise".into());
        }
        _ => {}
    }
    let unknown: Vec<&str> = kind::unknown_to_both(&c.base, &c.candidate).into_iter().map(Kind::as_str).collect();
    if !unknown.is_empty() {
        warn("unknown_facts", format!("neither run says its {}: whether they differ in it is unknown", unknown.join(", ")));
    }
    for gate in c.gates.iter().filter(|gate| gate.origin != rules::Origin::Default) {
        match gate.status {
            Status::Skipped => warn(
                "gate_skipped",
                format!("{}: it matches no number that both runs have; the rule was not held (with --strict it fails)", gate.rule),
            ),
            Status::Unclear => warn("gate_unclear", format!("{}: {}", gate.rule, gate.doubt())),
            Status::Passed | Status::Failed => {}
        }
    }
    warnings
}

#[cfg(test)]
#[path = "seeded_sums_tests.rs"]
mod seeded_sums_tests;
#[cfg(test)]
#[path = "seeded_tests.rs"]
mod seeded_tests;
