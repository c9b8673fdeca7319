//! The comparison as Markdown for pull requests and job summaries.

use super::super::Comparison;
use super::super::compare::{Row, Verdict};
use super::super::gate::Status;
use super::{
    change, curves, detectable, escape_markdown, facts, gate_line, headline, interval, label, layer_unions, origin, pairing, scalars,
    sensitivity, status, tally, verdict,
};

/// The most bytes of a comment on GitHub; what is longer is cut at a line.
pub const COMMENT_BYTES: usize = 65_536;

/// The comparison as Markdown of at most `most` bytes: layers go first when there is no room for them.
pub fn render(c: &Comparison, most: usize) -> String {
    let whole = format!("{}{}", body(c), layers(c));
    if whole.len() <= most {
        return whole;
    }
    let body = body(c);
    if body.len() <= most { body } else { cut(&body, most) }
}

/// As many whole lines as fit, and a line that says so.
fn cut(text: &str, most: usize) -> String {
    const NOTE: &str = "\n_cut: too long; `--format json` has everything_\n";
    let room = most.saturating_sub(NOTE.len());
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        if out.len() + line.len() > room {
            break;
        }
        out.push_str(line);
    }
    out.push_str(NOTE);
    out
}

fn body(c: &Comparison) -> String {
    let mut out = format!("### specprof: {}\n\n", headline(c));
    out.push_str(&format!("* base: {}: {}\n", escape_markdown(&c.base.name), escape_markdown(&facts(&c.base, c.requests.0))));
    out.push_str(&format!(
        "* candidate: {}: {}\n",
        escape_markdown(&c.candidate.name),
        escape_markdown(&facts(&c.candidate, c.requests.1))
    ));
    out.push_str(&format!("* compared {}\n", pairing(c)));
    for d in &c.differences {
        let what = format!("{}: {} against {}", d.kind.as_str(), d.base, d.candidate);
        out.push_str(&format!("* allowed {}\n", escape_markdown(&what)));
    }
    let gates: Vec<_> =
        c.gates.iter().filter(|g| g.status != Status::Skipped || g.origin != super::super::rules::Origin::Default).collect();
    if !gates.is_empty() {
        out.push_str("\n| rule | outcome | found |\n|:---|:---|:---|\n");
        for gate in gates {
            let outcome = status(gate.status);
            let outcome = if gate.status == Status::Failed { format!("**{outcome}**") } else { outcome.to_owned() };
            let rule = format!("{} ({})", gate.rule, origin(&gate.origin));
            out.push_str(&format!("| {} | {outcome} | {} |\n", escape_markdown(&rule), escape_markdown(&gate_line(gate))));
        }
    }
    out.push('\n');
    out.push_str(&table(scalars(c), label, "metric"));
    if curves(c).next().is_some() {
        out.push_str(&format!("\nEntries of curves: {}.\n", tally(curves(c))));
    }
    for text in sensitivity(c) {
        out.push_str(&format!("\nCould see {}.\n", escape_markdown(&text)));
    }
    if let Some((r, share)) = c.routing.as_ref().and_then(|r| Some((r, r.share?))) {
        let ties = r.near_ties.filter(|_| r.differing > 0).map_or_else(String::new, |n| format!(", {n} of {} at near-ties", r.differing));
        out.push_str(&format!("\nRouting: {:.2} % of {} rows of the same text chose other sets{ties}.\n", share * 100.0, r.rows));
    }
    for (side, names) in [("base", &c.one_sided.base), ("candidate", &c.one_sided.candidate)] {
        if !names.is_empty() {
            out.push_str(&format!("\nOnly in the {side}: {} numbers, {} the first.\n", names.len(), escape_markdown(&names[0])));
        }
    }
    for warning in &c.warnings {
        out.push_str(&format!("\n> {}: {}\n", escape_markdown(&warning.code), escape_markdown(&warning.message)));
    }
    out
}

fn layers(c: &Comparison) -> String {
    let rows = layer_unions(c, true);
    if rows.is_empty() {
        return String::new();
    }
    let all = c.rows.iter().filter(|row| row.layer.is_some());
    let table = table(rows.into_iter(), |row| row.layer.unwrap_or_default().to_string(), "layer");
    format!("\n<details><summary>mean union per layer; all numbers of layers: {}</summary>\n\n{table}\n</details>\n", tally(all))
}

fn table<'a>(rows: impl Iterator<Item = &'a Row>, name: impl Fn(&Row) -> String, title: &str) -> String {
    let mut out =
        format!("| {title} | base | candidate | change | 95 % interval | could see | verdict |\n|:---|---:|---:|---:|---:|---:|:---|\n");
    for row in rows {
        let said = verdict(row);
        let said = if row.verdict == Verdict::Worse { format!("**{said}**") } else { said };
        let show = |value: f64| row.metric.unit.show(value);
        let cells = [name(row), show(row.base.value), show(row.candidate.value), change(row), interval(row), detectable(row)]
            .map(|c| escape_markdown(&c));
        out.push_str(&format!("| {} | {said} |\n", cells.join(" | ")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_at_a_line() {
        let text = "one line\n".repeat(100);
        let short = cut(&text, 200);
        assert!(short.len() <= 200 && short.starts_with("one line\none line\n") && short.contains("cut: too long"));
    }
}
