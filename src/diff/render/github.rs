//! GitHub Actions: annotations for stdout and a summary for the file that `GITHUB_STEP_SUMMARY` names.

use super::super::Comparison;
use super::super::gate::{Gate, Status};
use super::super::rules::Origin;
use super::{gate_line, headline, markdown, text};

/// Annotations of one kind that GitHub shows of a step.
const PER_KIND: usize = 10;
/// The most bytes that a step's summary may have; more makes GitHub refuse all of it.
pub const SUMMARY_BYTES: usize = 1 << 20;

/// The annotations and, folded, the comparison as text.
pub fn render(c: &Comparison) -> String {
    let mut out = String::new();
    out.push_str(&annotations(c, "error", &[(Status::Failed, "failed")]));
    out.push_str(&annotations(c, "warning", &[(Status::Unclear, "unclear"), (Status::Skipped, "matches nothing")]));
    out.push_str(&command("notice", &[("title", "specprof diff")], &headline(c)));
    out.push_str("::group::specprof diff\n");
    for line in text::render(c, &text::TextOptions::default()).lines() {
        out.push_str(&harmless(line));
        out.push('\n');
    }
    out.push_str("::endgroup::\n");
    out
}

/// What to append to the summary that has `taken` bytes already.
pub fn summary(c: &Comparison, taken: u64) -> String {
    let room = SUMMARY_BYTES.saturating_sub(usize::try_from(taken).unwrap_or(SUMMARY_BYTES));
    // A summary that is full already takes nothing.
    if room < 256 { String::new() } else { markdown::render(c, room) }
}

/// Annotations of one kind: a rule each, in the order of the outcomes that are of it.
fn annotations(c: &Comparison, kind: &str, outcomes: &[(Status, &str)]) -> String {
    let of = |status: Status| c.gates.iter().filter(move |g| g.status == status && (status != Status::Skipped || g.held_nothing()));
    let gates: Vec<(&Gate, &str)> = outcomes.iter().flat_map(|&(status, what)| of(status).map(move |gate| (gate, what))).collect();
    let shown = if gates.len() > PER_KIND { PER_KIND - 1 } else { gates.len() };
    let mut out = String::new();
    for (gate, what) in &gates[..shown] {
        let title = format!("specprof: {} {what}", gate.rule);
        let line;
        let mut properties = Vec::new();
        let path;
        if let Origin::File { path: file, line: at } = &gate.origin {
            (path, line) = (file.display().to_string(), at.to_string());
            properties.extend([("file", path.as_str()), ("line", line.as_str())]);
        }
        properties.push(("title", &title));
        out.push_str(&command(kind, &properties, &gate_line(gate)));
    }
    if shown < gates.len() {
        let what = outcomes.iter().map(|(_, what)| *what).collect::<Vec<_>>().join(" or ");
        let more = format!("{} more rules {what}; the summary has them", gates.len() - shown);
        out.push_str(&command(kind, &[("title", "specprof diff")], &more));
    }
    out
}

/// `::kind key=value,key=value::message`, one line.
fn command(kind: &str, properties: &[(&str, &str)], message: &str) -> String {
    let properties: Vec<String> = properties.iter().map(|(key, value)| format!("{key}={}", property(value))).collect();
    format!("::{kind} {}::{}\n", properties.join(","), data(message))
}

/// A message: percent first, or the escapes would be escaped.
fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

/// A line of text in which no run's name can be a command: `::x::` counts at a line's begin, `##[x]` anywhere.
fn harmless(line: &str) -> String {
    let line = line.replace("##[", "# #[");
    if line.trim_start().starts_with("::") { format!("| {line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_escaped() {
        let line = command("error", &[("file", "a,b:c"), ("title", "x")], "5 %\n::set-output::");
        assert_eq!(line, "::error file=a%2Cb%3Ac,title=x::5 %25%0A::set-output::\n");
        assert_eq!(harmless("  ::stop-commands::"), "|   ::stop-commands::");
        assert_eq!(harmless("name ##[error]"), "name # #[error]");
    }
}
