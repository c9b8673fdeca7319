//! The report for people: facts of the run, acceptance, unions by layer, and what limits them.

mod facts;
mod layers;

use super::cost;
use super::sections;
use super::shapes;
use super::wrap::{paragraph, plain, titled};
use crate::metric::report::Report;
use crate::metric::{Interval, METRICS, Unit};
use anstyle::{AnsiColor, Style};

/// Most layers that are named as the worst; of few layers it is a quarter.
const WORST: usize = 3;
/// Layers in the table when not all are asked for.
pub(super) const FEW: usize = 5;

/// How to show a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOptions {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to mark with colour as well.
    pub color: bool,
    /// Whether block characters can be shown.
    pub unicode: bool,
    /// All layers instead of the worst few.
    pub per_layer: bool,
    /// What each number means, at the end.
    pub explain: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { width: 100, color: false, unicode: true, per_layer: false, explain: false }
    }
}

/// The report as text.
pub fn render(report: &Report, options: &TextOptions) -> String {
    let view = View { report, options };
    let mut out = view.header();
    out.push('\n');
    out.push_str(&view.acceptance());
    out.push_str(&view.cost());
    if let Some(overall) = &report.overall {
        out.push_str(&view.unions(overall));
        out.push('\n');
        out.push_str(&view.layers());
    } else {
        out.push_str(&sections::loads(report, options));
    }
    out.push_str(&view.attribution());
    out.push_str(&view.routers());
    if let Some(batch) = &report.batch {
        out.push_str(&shapes::batch(batch, options));
    }
    if let Some(groups) = &report.groups {
        out.push_str(&sections::groups(groups, options));
    }
    if let Some(parallel) = &report.expert_parallel {
        out.push_str(&sections::parallel(parallel, options));
    }
    out.push_str(&view.warnings());
    if options.explain {
        out.push_str(&view.explanations());
    }
    out
}

/// The run's facts, as every page about a trace begins: model, quantisation, drafting, workload, device.
pub(super) fn header(report: &Report, options: &TextOptions) -> String {
    View { report, options }.header()
}

struct View<'a> {
    report: &'a Report,
    options: &'a TextOptions,
}

impl View<'_> {
    fn paint(&self, style: Style, text: &str) -> String {
        if self.options.color { format!("{style}{text}{style:#}") } else { text.to_owned() }
    }

    fn lines(&self, title: &str, text: &str) -> String {
        titled(title, text, self.options.width, self.options.color)
    }

    fn acceptance(&self) -> String {
        let a = &self.report.acceptance;
        let Some(tokens) = a.tokens_per_step else {
            return self.lines("acceptance", "unknown");
        };
        let kept = a.accepted_drafts_mean.unwrap_or_default();
        let mut text = format!("{tokens:.3} tokens per step{}; {kept:.3} drafts kept per step", range_of(a.tokens_per_step_ci95));
        // The last window of a request may accept more than the request still wanted.
        if let Some(emitted) = a.emitted_per_step.filter(|e| *e < tokens) {
            text.push_str(&format!("; {emitted:.3} of the tokens emitted, the rest cut where a request ended"));
        }
        let mut out = self.lines("acceptance", &text);
        let shares = |values: &[Option<f64>]| {
            let show = |v: &Option<f64>| v.map_or_else(|| "-".to_owned(), |v| format!("{:.0} %", v * 100.0));
            values.iter().map(show).collect::<Vec<_>>().join("  ")
        };
        let mut text = format!("by position {}", shares(&a.by_position));
        // Where windows differ in length, a later position is of other windows than an earlier one.
        if a.windows_by_position.windows(2).any(|pair| pair[0] != pair[1]) {
            let of: Vec<String> = a.windows_by_position.iter().map(|&n| Unit::Count.show(n as f64)).collect();
            text.push_str(&format!(" of the windows with such a draft ({})", of.join(", ")));
        }
        text.push_str(&format!("; given all before {}", shares(&a.conditional_by_position)));
        out.push_str(&self.lines("", &text));
        out
    }

    /// What a step costs and what an expert costs, in words.
    fn cost(&self) -> String {
        let Some(cost) = &self.report.cost else { return String::new() };
        let overall = self.report.overall.as_ref();
        let rows = overall.map_or(0, |o| o.stats.rows);
        let copy = self.report.run.instrumentation.copy_gb_per_s;
        let experts = overall.and_then(|o| cost::experts(o.cost.as_ref()?, copy));
        let said = [cost::sentence(cost, rows, self.report), experts, cost::bytes(cost)];
        let titles = std::iter::once("cost").chain(std::iter::repeat(""));
        said.into_iter().flatten().zip(titles).map(|(text, title)| self.lines(title, &self.letters(&text))).collect()
    }

    /// Where the difference between a verify and a decode step comes from.
    fn attribution(&self) -> String {
        let table = cost::attribution(self.report, self.options.width);
        if table.is_empty() { table } else { format!("\n{}", self.letters(&table)) }
    }

    /// The text in letters that the terminal has.
    fn letters(&self, text: &str) -> String {
        if self.options.unicode { text.to_owned() } else { text.replace('µ', "u").replace('²', "2") }
    }

    /// Rows that are no windows: the draft module's, and those of prefill steps.
    fn routers(&self) -> String {
        let mut out = String::new();
        for layer in self.report.draft.iter().flat_map(|d| &d.layers) {
            let load = layer.load.map_or_else(String::new, |l| {
                format!(", {:.0} effective experts, most loaded {:.1} times the mean", l.effective_experts, l.max_over_mean)
            });
            let rows = Unit::Count.show(layer.rows as f64);
            out.push_str(
                &self.lines("draft", &format!("its layer {} routed {rows} rows{load}; not part of the numbers above", layer.layer)),
            );
        }
        if let Some(prefill) = &self.report.prefill {
            let loads: Vec<f64> = prefill.layers.iter().filter_map(|l| Some(l.load?.effective_experts)).collect();
            let mean = loads.iter().sum::<f64>() / loads.len() as f64;
            let load = if loads.is_empty() { String::new() } else { format!(", {mean:.0} effective experts on average") };
            let rows = Unit::Count.show(prefill.layers.iter().map(|l| l.rows).max().unwrap_or(0) as f64);
            let text = format!("{rows} rows a layer{load}; not part of the numbers above");
            out.push_str(&self.lines("prefill", &text));
        }
        if out.is_empty() { out } else { format!("\n{out}") }
    }

    fn warnings(&self) -> String {
        let mut out = String::from("\n");
        let yellow = AnsiColor::Yellow.on_default();
        for (i, warning) in self.report.warnings.iter().enumerate() {
            let text = format!("{}: {}", plain(&warning.code), plain(&warning.message));
            let lines = paragraph(&format!("[{}] ", i + 1), &text, self.options.width);
            out.push_str(&self.paint(yellow, lines.trim_end()));
            out.push('\n');
        }
        if self.report.warnings.is_empty() { String::new() } else { out }
    }

    fn explanations(&self) -> String {
        let mut out = String::from("\n");
        // As wide as the longest name, so that the texts begin in one column.
        let width = METRICS.iter().map(|metric| metric.id.chars().count()).max().unwrap_or(0) + 1;
        for metric in METRICS {
            let text = format!("{} [{}]: {}", metric.meaning, metric.unit.name(), metric.formula);
            out.push_str(&self.letters(&paragraph(&format!("{:<width$}", metric.id), &text, self.options.width)));
        }
        let intervals = "95 % intervals are bootstrapped over requests. Those of times and costs hold for drawing other requests on the same \
                         undisturbed machine, not for another run on a machine whose state changes.";
        out.push_str(&format!("\n{}", paragraph("", intervals, self.options.width)));
        out
    }
}

/// ` (95 %: low to high)`, or nothing where no interval is known.
pub(super) fn range_of(interval: Option<Interval>) -> String {
    interval.map_or_else(String::new, |[low, high]| format!(" (95 %: {low:.2} to {high:.2})"))
}

/// `1 request`, `2 requests`.
#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;
    use crate::trace::manifest::Warning;

    /// Five layers that agree more and more, two requests, rows of the draft module.
    pub(crate) fn report() -> Report {
        let mut trace = Memory::new(&[2, 3, 4, 5, 6, 7], 64, 4);
        trace.manifest.model.name = "tiny \x1b[31mmodel".into();
        for request in 0..2u16 {
            for step in 0..60u16 {
                // Row i of layer l shifts by l * i / 4 experts.
                let row = |l: u16, i: u16| (0..4).map(|e| (step * 3 + request + e * 16 + l * i / 4) % 64).collect();
                let layers: Vec<Vec<Vec<u16>>> = (1..7).map(|l| (0..4).map(|i| row(l, i)).collect()).collect();
                trace.verify(u32::from(request), (step + request) % 4, &layers);
            }
        }
        let mut draft = trace.routes.last().unwrap().clone();
        (draft.layer, draft.row, draft.draft) = (42, 0, true);
        trace.routes.push(draft);
        let mut report = trace.report();
        report.warnings.push(Warning::new("note", "a note with \x07 a bell"));
        report
    }

    fn show(options: TextOptions) -> String {
        render(&report(), &options)
    }

    #[test]
    fn every_layer_at_100_columns() {
        insta::assert_snapshot!(show(TextOptions { per_layer: true, ..TextOptions::default() }));
    }

    #[test]
    fn the_worst_layers_at_80_columns_in_ascii() {
        insta::assert_snapshot!(show(TextOptions { width: 80, unicode: false, ..TextOptions::default() }));
    }

    #[test]
    fn nothing_is_wider_than_the_terminal_or_escapes() {
        for width in [60, 72, 80, 100, 120, 160] {
            for (per_layer, unicode) in [(true, true), (true, false), (false, true)] {
                let text = show(TextOptions { width, per_layer, unicode, explain: true, ..TextOptions::default() });
                for line in text.lines() {
                    assert!(line.chars().count() <= width, "{width}: {line}");
                    assert!(!line.chars().any(char::is_control), "{line:?}");
                    assert!(
                        unicode
                            || width > 160
                            || line.is_ascii()
                            || line.contains('τ')
                            || line.contains('∪')
                            || line.contains('Σ')
                            || line.contains('∩'),
                        "{line}"
                    );
                }
            }
        }
    }

    #[test]
    fn colour_adds_nothing_but_escapes() {
        let plain = show(TextOptions { per_layer: true, ..TextOptions::default() });
        let colored = show(TextOptions { per_layer: true, color: true, ..TextOptions::default() });
        assert_ne!(plain, colored);
        let stripped = colored.split('\x1b').enumerate().map(|(i, part)| if i == 0 { part } else { part.split_once('m').unwrap().1 });
        assert_eq!(stripped.collect::<String>(), plain);
    }

    #[test]
    fn a_report_without_windows_says_what_is_unknown() {
        let text = render(&Memory::new(&[1], 8, 2).report(), &TextOptions::default());
        assert!(text.contains("acceptance  unknown") && text.contains("no_verify_steps"), "{text}");
    }
}
