//! The comparison for people at a terminal.

use super::super::Comparison;
use super::super::compare::{Row, Verdict};
use super::super::gate::Status;
use super::{
    change, curves, detectable, facts, gate_line, headline, interval, label, layer_unions, origin, pairing, scalars, sensitivity, status,
    tally, verdict,
};
use crate::report::table::{self, Column};
use crate::report::wrap::{paragraph, plain};
use anstyle::{AnsiColor, Style};

/// Layers in the table when not all are asked for.
const FEW: usize = 5;
/// Names that are listed of what only one side has.
const NAMES: usize = 6;

/// How to show a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOptions {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to mark with colour as well.
    pub color: bool,
    /// All layers and all entries of curves.
    pub per_layer: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { width: 100, color: false, per_layer: false }
    }
}

/// The comparison as text.
pub fn render(c: &Comparison, options: &TextOptions) -> String {
    let width = options.width;
    let mut out = String::new();
    let mut line = |title: &str, text: &str| out.push_str(&paragraph(&format!("{title:<12}"), text, width));
    line("base", &format!("{}: {}", plain(&c.base.name), facts(&c.base, c.requests.0)));
    line("candidate", &format!("{}: {}", plain(&c.candidate.name), facts(&c.candidate, c.requests.1)));
    line("compared", &pairing(c));
    for d in &c.differences {
        line("allowed", &plain(&format!("{}: {} against {}", d.kind.as_str(), d.base, d.candidate)));
    }
    out.push('\n');
    out.push_str(&rows_table(&rows(c, options), options, label, "over all layers"));
    if !options.per_layer && curves(c).next().is_some() {
        out.push_str(&paragraph("", &format!("and {} entries of curves: {}", curves(c).count(), tally(curves(c))), width));
    }
    let layers = layer_unions(c, options.per_layer);
    if !layers.is_empty() {
        let shown = if options.per_layer { layers.len() } else { FEW.min(layers.len()) };
        out.push('\n');
        let name = |row: &Row| format!("layer {}", row.layer.unwrap_or_default());
        out.push_str(&rows_table(&layers[..shown], options, name, "mean union"));
        let total = c.rows.iter().filter(|row| row.layer.is_some());
        let more = if shown < layers.len() { format!("{} more layers (--per-layer); ", layers.len() - shown) } else { String::new() };
        out.push_str(&paragraph("", &format!("{more}all numbers of layers: {}", tally(total)), width));
        let others = changed(c);
        if options.per_layer && !others.is_empty() {
            out.push('\n');
            out.push_str(&rows_table(&others, options, Row::name, "not the same"));
        }
    }
    out.push('\n');
    out.push_str(&tail(c, options));
    out
}

/// The other numbers of layers that are not the same: the worse ones first.
fn changed(c: &Comparison) -> Vec<&Row> {
    let is = |row: &&Row| row.layer.is_some() && row.path != "union.mean" && row.verdict != Verdict::Same;
    let mut rows: Vec<&Row> = c.rows.iter().filter(is).collect();
    rows.sort_by_key(|row| (row.verdict, row.layer));
    rows
}

fn rows<'a>(c: &'a Comparison, options: &TextOptions) -> Vec<&'a Row> {
    if options.per_layer { scalars(c).chain(curves(c)).collect() } else { scalars(c).collect() }
}

fn rows_table(rows: &[&Row], options: &TextOptions, name: impl Fn(&Row) -> String, title: &str) -> String {
    let cells = |of: &dyn Fn(&Row) -> String| rows.iter().map(|row| of(row)).collect::<Vec<_>>();
    let columns = vec![
        Column::new(title).left().cells(cells(&|r| name(r))),
        Column::new("base").cells(cells(&|r| r.metric.unit.show(r.base.value))),
        Column::new("candidate").cells(cells(&|r| r.metric.unit.show(r.candidate.value))),
        Column::new("change").cells(cells(&change)),
        Column::new("95 % interval").optional(2).cells(cells(&interval)),
        Column::new("could see").optional(1).cells(cells(&detectable)),
        Column::new("verdict").left().cells(cells(&verdict)),
    ];
    table::render(columns, options.width, |at, line| match rows.get(at).map(|row| row.verdict) {
        Some(Verdict::Worse) => paint(options.color, AnsiColor::Red, line),
        Some(Verdict::Better) => paint(options.color, AnsiColor::Green, line),
        _ => line.to_owned(),
    })
}

fn paint(color: bool, with: AnsiColor, line: &str) -> String {
    let style: Style = with.on_default();
    if color { format!("{style}{line}{style:#}") } else { line.to_owned() }
}

/// What stands below the tables: sensitivity, routing, gates, what only one side has, warnings.
fn tail(c: &Comparison, options: &TextOptions) -> String {
    let width = options.width;
    let mut out = String::new();
    for (i, text) in sensitivity(c).iter().enumerate() {
        out.push_str(&paragraph(if i == 0 { "could see   " } else { "            " }, text, width));
    }
    if let Some(r) = &c.routing {
        let share = r
            .share
            .map_or_else(|| "no rows to compare".to_owned(), |share| format!("{:.2} % of {} rows chose other sets", share * 100.0, r.rows));
        let worst = r.layers.iter().filter(|l| l.differing > 0).max_by(|a, b| (a.differing * b.rows).cmp(&(b.differing * a.rows)));
        let worst = worst.map_or_else(String::new, |l| format!(", most in layer {} ({} of {})", l.layer, l.differing, l.rows));
        let ties = r.near_ties.filter(|_| r.differing > 0).map_or_else(String::new, |n| format!("; {n} of {} are near-ties", r.differing));
        let cut = if r.truncated { "; rows beyond the first were left out" } else { "" };
        out.push_str(&paragraph("routing     ", &format!("{share}{worst}{ties}{cut}"), width));
    }
    for (side, names) in [("base", &c.one_sided.base), ("candidate", &c.one_sided.candidate)] {
        if !names.is_empty() {
            let shown = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
            let more = names.len().saturating_sub(NAMES);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            out.push_str(&paragraph("only in     ", &format!("{side}: {shown}{more}"), width));
        }
    }
    for gate in c.gates.iter().filter(|g| !(g.status == Status::Skipped && g.origin == super::super::rules::Origin::Default)) {
        let word = format!("{:<12}", status(gate.status));
        let text = format!("{} ({}): {}", gate.rule, origin(&gate.origin), gate_line(gate));
        let block = paragraph(&word, &text, width);
        match gate.status {
            Status::Failed => {
                for line in block.lines() {
                    out.push_str(&paint(options.color, AnsiColor::Red, line));
                    out.push('\n');
                }
            }
            _ => out.push_str(&block),
        }
    }
    out.push_str(&paragraph("result      ", &headline(c), width));
    for (i, warning) in c.warnings.iter().enumerate() {
        out.push_str(&paragraph(&format!("[{}] ", i + 1), &plain(&format!("{}: {}", warning.code, warning.message)), width));
    }
    out
}
