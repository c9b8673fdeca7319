//! A comparison as text, Markdown, JSON, GitHub commands and JUnit. All show the same facts; this file holds their words.

pub mod github;
pub mod json;
pub mod junit;
pub mod markdown;
pub mod text;

use super::compare::{Row, Verdict};
use super::gate::{Finding, Gate, Status};
use super::rule::Limit;
use super::rules::Origin;
use super::{Comparison, compare::Method};
use crate::metric::report::RunFacts;
use crate::report::wrap::plain;

/// A change that comparisons are asked to see: its size is the example in every output.
pub const WANTED: f64 = 0.02;
/// Above this, the smallest change that would be seen is not worth a number.
const MOST_SEEN: f64 = 1.0;
/// More requests than this are not worth naming.
const MOST_REQUESTS: u64 = 100_000;

/// What a run was, on one line.
fn facts(run: &RunFacts, requests: u64) -> String {
    let emulated = if run.emulated { " (emulated)" } else { "" };
    let drafter = match run.drafter.draft_len {
        Some(0) => "no drafts".to_owned(),
        Some(n) => format!("{} γ {n}", run.drafter.label()),
        None => format!("{} γ unknown", run.drafter.label()),
    };
    let requests = counted(requests, "request");
    plain(&format!(
        "{}, {}, {drafter}, {} {}{emulated}, {requests}",
        run.model.name, run.model.quantisation, run.device.kind, run.device.name
    ))
}

/// How requests were compared, in words.
fn pairing(c: &Comparison) -> String {
    let pairs = c.pairing.pairs.len();
    if c.pairing.same_report {
        "exactly: both are of one run".to_owned()
    } else if c.pairing.is_exact() {
        format!("exactly: {} of the same prompts, tokens and windows", counted(pairs as u64, "request"))
    } else if c.pairing.is_paired() {
        let same = if c.pairing.same_output { " and the same output" } else { "" };
        format!("request by request: {} of the same prompt{same}", counted(pairs as u64, "pair"))
    } else {
        format!("as different requests: {} against {}", c.requests.0, c.requests.1)
    }
}

/// `1 request`, `2 requests`.
fn counted(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A share as a signed percentage of one decimal, more for small ones: `+4.8 %`, `-0.03 %`.
fn percent(share: f64) -> String {
    let value = share * 100.0;
    if value == 0.0 {
        return "0 %".to_owned();
    }
    match value.abs() {
        a if a >= 99_999.5 => format!("{value:+.1e} %"),
        a if a >= 0.95 => format!("{value:+.1} %"),
        a if a >= 0.0095 => format!("{value:+.2} %"),
        _ => format!("{value:+.0e} %"),
    }
}

/// A number's name for people, with what a reader would take wrongly: the times are not those of whole steps.
fn label(row: &Row) -> String {
    let note = if row.path.starts_with("time.") { " (routed layers)" } else { "" };
    format!("{}{note}", row.path)
}

/// The change: relative where there is such a thing, else in the metric's unit.
fn change(row: &Row) -> String {
    row.relative().map_or_else(|| signed(row, row.difference()), percent)
}

fn signed(row: &Row, value: f64) -> String {
    format!("{}{}", if value > 0.0 { "+" } else { "" }, row.metric.unit.show(value))
}

/// Its 95 % interval, `-` where it is not known.
fn interval(row: &Row) -> String {
    if row.method == Method::Exact {
        return "exact".to_owned();
    }
    match (row.relative().and(row.relative_interval()), row.change) {
        (Some([low, high]), _) => bracket([percent(low), percent(high)]),
        (None, Some(shift)) => bracket(shift.interval().map(|v| signed(row, v))),
        (None, None) => "-".to_owned(),
    }
}

/// `[+1.0, +2.5] %`: the unit once.
fn bracket([low, high]: [String; 2]) -> String {
    match (low.strip_suffix(" %"), high.strip_suffix(" %")) {
        (Some(low), Some(high)) => format!("[{low}, {high}] %"),
        _ => format!("[{low}, {high}]"),
    }
}

/// The smallest change that would be seen; `-` where it is not known, 0 where everything is.
fn detectable(row: &Row) -> String {
    match row.detectable() {
        Some(d) if d > MOST_SEEN => format!("over {:.0} %", MOST_SEEN * 100.0),
        Some(d) => percent(d).trim_start_matches('+').to_owned(),
        None => "-".to_owned(),
    }
}

/// How many requests a change of [`WANTED`] needs, from how many see `detectable`: n (detectable / wanted)².
///
/// 64 requests that see 1 %: 16 see 2 %.
fn requests_needed(requests: u64, detectable: f64) -> u64 {
    ((requests as f64 * (detectable / WANTED).powi(2)).ceil() as u64).max(2)
}

/// What the comparison could have seen: a sentence for each of the numbers that gates are about.
fn sensitivity(c: &Comparison) -> Vec<String> {
    let requests = c.requests.0.min(c.requests.1);
    let of = |path: &str| {
        let row = c.rows.iter().find(|row| row.layer.is_none() && row.path == path)?;
        let wanted = format!("{:.0} %", WANTED * 100.0);
        Some(match (row.method, row.detectable()) {
            (Method::Exact, _) => format!("{path}: any change"),
            (_, Some(d)) if d > 0.0 => {
                let seen =
                    if d > MOST_SEEN { "no change of a usual size".to_owned() } else { format!("changes from {} on", detectable(row)) };
                let needed = match requests_needed(requests, d) {
                    n if n > MOST_REQUESTS => "cannot be seen with any sensible number of requests like these".to_owned(),
                    n => format!("needs about {}", counted(n, "request")),
                };
                format!("{path}: {seen}; {wanted} {needed}")
            }
            (_, Some(_)) => format!("{path}: any change"),
            (_, None) => format!("{path}: unknown, its uncertainty is not known"),
        })
    };
    ["union.mean", "acceptance.tokens_per_step", "cost.step_ratio"].into_iter().filter_map(of).collect()
}

/// The word of a gate's outcome.
fn status(status: Status) -> &'static str {
    match status {
        Status::Passed => "passed",
        Status::Failed => "failed",
        Status::Unclear => "unclear",
        Status::Skipped => "skipped",
    }
}

/// A finding's number, as its rule's limit is written.
fn finding(gate: &Gate, f: &Finding) -> String {
    let show = |v: f64| match gate.rule.limit {
        Limit::Relative(_) => percent(v),
        Limit::Change(_) => format!("{v:+.3}"),
        Limit::Value(_) => format!("{v:.3}"),
    };
    let interval = match f.interval {
        Some([low, high]) if low == high => "exact".to_owned(),
        Some(limits) => bracket(limits.map(show)),
        None => "uncertainty unknown".to_owned(),
    };
    let noisy = if f.noisy_times { ", by noisy times" } else { "" };
    format!("{} {}, {interval}{noisy}", f.name, show(f.value))
}

/// A gate on one line: its worst number, and how many others fail.
fn gate_line(gate: &Gate) -> String {
    let Some(worst) = gate.findings.first() else { return "it matches no number that both runs have".to_owned() };
    let others = gate.findings.iter().skip(1).filter(|f| f.failed).count();
    let more = if others > 0 { format!(" and {} more", counted(others as u64, "layer")) } else { String::new() };
    format!("{}{more}", finding(gate, worst))
}

/// A row's verdict, with what it rests on.
fn verdict(row: &Row) -> String {
    let noisy = if row.noisy_times { " (noisy times)" } else { "" };
    format!("{}{noisy}", row.verdict.as_str())
}

/// Where a rule is from, in words.
fn origin(origin: &Origin) -> String {
    match origin {
        Origin::Default => "default".to_owned(),
        Origin::CommandLine => "--fail-on".to_owned(),
        Origin::File { path, line } => plain(&format!("{}:{line}", path.display())),
    }
}

/// `2 worse, 1 better, 30 same, 7 unclear`.
fn tally<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let mut counts = [(Verdict::Worse, 0u64), (Verdict::Better, 0), (Verdict::Same, 0), (Verdict::Unclear, 0)];
    for row in rows {
        for (verdict, count) in &mut counts {
            *count += u64::from(*verdict == row.verdict);
        }
    }
    counts.map(|(verdict, count)| format!("{count} {}", verdict.as_str())).join(", ")
}

/// One line over everything: the headline of every output.
fn headline(c: &Comparison) -> String {
    let failed = c.gates.iter().filter(|g| g.status == Status::Failed).count() as u64;
    let (worse, better) = (c.count(Verdict::Worse, false), c.count(Verdict::Better, false));
    let gates = if c.gates.is_empty() {
        "no rules".to_owned()
    } else if failed > 0 {
        format!("{failed} of {} failed", counted(c.gates.len() as u64, "rule"))
    } else {
        let nothing = c.gates.iter().filter(|g| g.held_nothing()).count() as u64;
        let unclear = c.gates.iter().filter(|g| g.status == Status::Unclear).count() as u64;
        let but = [(nothing, "matched nothing"), (unclear, "cannot be told")].into_iter().filter(|(n, _)| *n > 0);
        let but: Vec<String> = but.map(|(n, what)| format!("{} {what}", counted(n, "rule"))).collect();
        if but.is_empty() { "no rule failed".to_owned() } else { format!("no rule failed, but {}", but.join(" and ")) }
    };
    format!("{gates}; {worse} worse, {better} better of {}", counted(c.rows.iter().filter(|r| r.layer.is_none()).count() as u64, "number"))
}

/// The run's numbers without those of curves.
fn scalars(c: &Comparison) -> impl Iterator<Item = &Row> {
    c.rows.iter().filter(|row| row.layer.is_none() && !row.path.contains('['))
}

/// Entries of the run's curves.
fn curves(c: &Comparison) -> impl Iterator<Item = &Row> {
    c.rows.iter().filter(|row| row.layer.is_none() && row.path.contains('['))
}

/// Mean unions of the layers, the largest change to the worse first (by number with `by_number`).
fn layer_unions(c: &Comparison, by_number: bool) -> Vec<&Row> {
    let mut rows: Vec<&Row> = c.rows.iter().filter(|row| row.layer.is_some() && row.path == "union.mean").collect();
    if !by_number {
        rows.sort_by(|a, b| a.verdict.cmp(&b.verdict).then(b.difference().abs().total_cmp(&a.difference().abs())));
    }
    rows
}

/// Text for a table or a paragraph of Markdown: nothing in it is markup.
fn escape_markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in plain(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '~' | '#' | '@' | '!' => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_keep_their_size_and_sign() {
        for (share, text) in [
            (0.0, "0 %"),
            (0.0481, "+4.8 %"),
            (-0.0481, "-4.8 %"),
            (0.0003, "+0.03 %"),
            (12.0, "+1200.0 %"),
            (1e-9, "+1e-7 %"),
            (1e7, "+1.0e9 %"),
        ] {
            assert_eq!(percent(share), text);
        }
        assert_eq!(bracket([percent(-0.01), percent(0.02)]), "[-1.0, +2.0] %");
    }

    #[test]
    fn requests_needed_grow_with_the_square() {
        assert_eq!((requests_needed(64, 0.01), requests_needed(64, 0.04), requests_needed(2, 1e-9)), (16, 256, 2));
    }

    #[test]
    fn markdown_is_not_markup() {
        assert_eq!(escape_markdown("a|b<script>_x_`@me`\n"), "a\\|b&lt;script&gt;\\_x\\_\\`\\@me\\`?");
    }
}
