//! JUnit XML: one test case a rule, for every CI that shows test results.
//!
//! A rule that did not fail beyond its uncertainty is a passed case, with what was found in `system-out`; one that could not be held is skipped.

use super::super::Comparison;
use super::super::gate::{Gate, Status};
use super::{finding, gate_line, origin};

/// The comparison's rules as JUnit XML.
pub fn render(c: &Comparison) -> String {
    let of = |status: Status| c.gates.iter().filter(|gate| gate.status == status).count();
    let counts = format!("tests=\"{}\" failures=\"{}\" errors=\"0\"", c.gates.len(), of(Status::Failed));
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    out.push_str(&format!("<testsuites name=\"specprof diff\" {counts} time=\"0\">\n"));
    let name = escape(&format!("{} against {}", c.candidate.name, c.base.name));
    out.push_str(&format!("  <testsuite name=\"{name}\" {counts} skipped=\"{}\" time=\"0\">\n", of(Status::Skipped)));
    for gate in &c.gates {
        out.push_str(&case(gate));
    }
    out.push_str("  </testsuite>\n</testsuites>\n");
    out
}

fn case(gate: &Gate) -> String {
    let open = format!(
        "    <testcase classname=\"specprof.diff\" name=\"{}\" time=\"0\">",
        escape(&format!("{} ({})", gate.rule, origin(&gate.origin)))
    );
    let line = escape(&gate_line(gate));
    let inner = match gate.status {
        Status::Skipped => format!("<skipped message=\"{line}\"/>"),
        Status::Failed => {
            let all: Vec<String> = gate.findings.iter().filter(|f| f.failed).map(|f| finding(gate, f)).collect();
            format!("<failure type=\"regression\" message=\"{line}\">{}</failure>", escape(&all.join("\n")))
        }
        Status::Passed => format!("<system-out>{line}</system-out>"),
        Status::Unclear => format!("<system-out>unclear, {}: {line}</system-out>", gate.doubt()),
    };
    format!("{open}{inner}</testcase>\n")
}

/// Text for an attribute or an element. Characters that XML 1.0 cannot have at all become `?`.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_markup() {
        assert_eq!(escape("<a href=\"x\">&'\u{1b}[0m\u{ffff}\n"), "&lt;a href=&quot;x&quot;&gt;&amp;&apos;?[0m?\n");
    }
}
