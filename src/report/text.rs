//! The report for people: facts of the run, acceptance, unions by layer, and what limits them.

use super::bars::{bar, spark};
use super::table::{self, Column};
use super::wrap::{paragraph, plain};
use crate::metric::report::{LayerReport, Overall, Report, WindowStats};
use crate::metric::{Interval, METRICS, Unit};
use crate::trace::manifest::{Verification, WindowCompleteness};
use anstyle::{AnsiColor, Style};

/// Most layers that are named as the worst; of few layers it is a quarter.
const WORST: usize = 3;
/// Layers in the table when not all are asked for.
const FEW: usize = 5;
const BAR: usize = 16;

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
    if let Some(overall) = &report.overall {
        out.push_str(&view.unions(overall));
        out.push('\n');
        out.push_str(&view.layers());
    } else {
        out.push_str(&view.loads());
    }
    out.push_str(&view.draft());
    out.push_str(&view.warnings());
    if options.explain {
        out.push_str(&view.explanations());
    }
    out
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
        let lines = paragraph(&format!("{title:<12}"), text, self.options.width);
        match lines.strip_prefix(title) {
            Some(rest) => self.paint(Style::new().bold(), title) + rest,
            None => lines,
        }
    }

    /// `plus-minus` half the interval's width.
    fn half(&self, interval: Option<Interval>, digits: usize) -> String {
        let sign = if self.options.unicode { "±" } else { "+-" };
        interval.map_or_else(|| "-".to_owned(), |[low, high]| format!("{sign}{:.digits$}", (high - low) / 2.0))
    }

    /// Always: model, quantisation, γ, workload, device.
    fn header(&self) -> String {
        let run = &self.report.run;
        let (m, s, t) = (&run.model, &run.sampling, &self.report.totals);
        let unknown = || "unknown".to_owned();
        let count = |n: u64| Unit::Count.show(n as f64);
        let gamma = if self.options.unicode { "γ" } else { "draft length" };
        let model = format!(
            "{} ({}), {} layers, {} routed, {} experts, top {} + {} shared, {}, {} per expert",
            m.name,
            m.architecture,
            m.layers,
            m.moe_layers.len(),
            if m.experts_known { m.experts.to_string() } else { format!("at least {}", m.experts) },
            m.experts_per_token,
            m.shared_experts.map_or_else(unknown, |n| n.to_string()),
            if m.quantisation == "unknown" { "unknown format" } else { &m.quantisation },
            m.bytes_per_expert.map_or_else(|| "unknown bytes".to_owned(), |n| Unit::Bytes.show(n as f64))
        );
        let sampling = match s {
            None => "unknown sampling".to_owned(),
            Some(s) if s.temperature == 0.0 => "greedy".to_owned(),
            Some(s) => format!("temperature {}, top-p {}, top-k {}, seed {}", s.temperature, s.top_p, s.top_k, s.seed),
        };
        let verification = match run.verification {
            Verification::Exact => "exact",
            Verification::Batched => "batched",
            Verification::Unknown => "unknown",
        };
        let windows = match run.window_completeness {
            WindowCompleteness::Full => "all rows recorded",
            WindowCompleteness::AcceptedOnly => "kept rows recorded only",
            WindowCompleteness::Counts => "counts recorded only",
            WindowCompleteness::None => "no windows recorded",
        };
        let draft_len = run.drafter.draft_len.map_or_else(unknown, |n| n.to_string());
        let drafting = format!("{}, {gamma} {draft_len}, {sampling}, {verification} verification, {windows}", run.drafter.kind);
        let workload = format!(
            "{} requests, {} steps ({} prefill, {} decode, {} verify), {} tokens",
            count(t.requests),
            count(t.steps),
            count(t.prefill_steps),
            count(t.decode_steps),
            count(t.verify_steps),
            count(t.tokens_emitted)
        );
        let units = run
            .device
            .units
            .map_or_else(String::new, |n| format!(", {n} {}", if run.device.kind == "cpu" { "thread(s)" } else { "multiprocessors" }));
        let emulated = if run.emulated { ", emulated" } else { "" };
        let device = format!("{} {}{units}, {}{emulated}", run.device.kind, run.device.name, run.engine);
        [("trace", &run.name), ("model", &model), ("drafting", &drafting), ("workload", &workload), ("device", &device)]
            .map(|(title, text)| self.lines(title, &plain(text)))
            .concat()
    }

    fn acceptance(&self) -> String {
        let a = &self.report.acceptance;
        let Some(tokens) = a.tokens_per_step else {
            return self.lines("acceptance", "unknown");
        };
        let interval = a.tokens_per_step_ci95.map_or_else(String::new, |[low, high]| format!(" (95 %: {low:.2} to {high:.2})"));
        let kept = a.accepted_drafts_mean.unwrap_or_default();
        let mut out = self.lines("acceptance", &format!("{tokens:.3} tokens per step{interval}; {kept:.3} drafts kept per step"));
        let shares = |values: &[Option<f64>]| {
            let show = |v: &Option<f64>| v.map_or_else(|| "-".to_owned(), |v| format!("{:.0} %", v * 100.0));
            values.iter().map(show).collect::<Vec<_>>().join("  ")
        };
        out.push_str(
            &self.lines("", &format!("by position {}; given all before {}", shares(&a.by_position), shares(&a.conditional_by_position))),
        );
        out
    }

    fn unions(&self, overall: &Overall) -> String {
        let stats = &overall.stats;
        let Some(union) = &stats.union else { return String::new() };
        let mut text = format!(
            "{:.2} {} experts of {} rows, p99 {}, {}",
            union.mean,
            self.half(union.ci95, 2),
            stats.rows,
            union.p99,
            of_uniform(stats).map_or_else(String::new, |(share, n)| format!("{share} of uniform ({n:.2})"))
        );
        if let Some(lift) = stats.lift {
            text.push_str(&format!(", lift {lift:.2}"));
        }
        if let Some(lift) = stats.popularity_lift {
            text.push_str(&format!(" ({lift:.2} beyond popularity)"));
        }
        let mut out = self.lines("union", &text);
        let rows = |values: &[f64]| values.iter().map(|v| format!("{v:.2}")).collect::<Vec<_>>().join("  ");
        let mut by_row = format!("by row {}", rows(&stats.marginal));
        if let (Some(kept), Some(rejected)) = (stats.marginal_kept, stats.marginal_rejected) {
            by_row.push_str(&format!("; per kept row {kept:.2}, per rejected row {rejected:.2}"));
        }
        if let Some(wasted) = stats.wasted_mean {
            by_row.push_str(&format!("; {wasted:.2} wasted ({:.0} %)", wasted / union.mean * 100.0));
        }
        out.push_str(&self.lines("", &by_row));
        for other in &overall.by_rows {
            let mean = other.union.as_ref().map(|u| u.mean);
            out.push_str(
                &self.lines(
                    "",
                    &format!("also {} windows of {} rows: union {}", other.windows, other.rows, Unit::Experts.show_option(mean)),
                ),
            );
        }
        let spread = &overall.layer_spread;
        let means: Vec<Option<f64>> = self.report.layers.iter().map(|l| l.stats.union.as_ref().map(|u| u.mean)).collect();
        let layers = format!("{:.2} to {:.2}, sd {:.2}, first to last ", spread.min, spread.max, spread.sd);
        // The sparkline may hold blanks, which a paragraph would fold.
        out.push_str(self.lines("layers", &layers).trim_end());
        out.push(' ');
        out.push_str(&spark(means, spread.min, spread.max, self.options.unicode));
        out.push('\n');
        out
    }

    /// Loads alone, of a trace without windows.
    fn loads(&self) -> String {
        let loads: Vec<_> = self.report.layers.iter().filter_map(|l| Some((l.layer, l.experts, l.load?))).collect();
        let Some(worst) = loads.iter().max_by(|a, b| a.2.max_over_mean.total_cmp(&b.2.max_over_mean)) else { return String::new() };
        let shown = if self.options.per_layer { loads.len() } else { FEW };
        let text = format!("{} routed layers; most uneven is layer {} ({:.2} max / mean)", loads.len(), worst.0, worst.2.max_over_mean);
        let mut out = self.lines("loads", &text);
        out.push_str("\nlayer  experts  effective  entropy  top 1 %  max / mean\n");
        for (layer, experts, load) in loads.iter().take(shown) {
            out.push_str(&format!(
                "{layer:>5}  {experts:>7}  {:>9.1}  {:>7.2}  {:>5.1} %  {:>10.2}\n",
                load.effective_experts,
                load.entropy_bits,
                load.top_1pct_share * 100.0,
                load.max_over_mean
            ));
        }
        if loads.len() > shown {
            out.push_str(&format!("{} more with --per-layer\n", loads.len() - shown));
        }
        out
    }

    /// Worst first when only a few are shown, else in order with the worst marked.
    fn layers(&self) -> String {
        let mut ranked: Vec<&LayerReport> = self.report.layers.iter().filter(|l| l.stats.union.is_some()).collect();
        ranked.sort_by(|a, b| mean(b).total_cmp(&mean(a)).then(a.layer.cmp(&b.layer)));
        let marked = ranked.len().div_ceil(4).min(WORST);
        let worst: Vec<u16> = ranked.iter().take(marked).map(|l| l.layer).collect();
        let named = ranked.iter().take(marked).map(|l| format!("{} ({:.2})", l.layer, mean(l))).collect::<Vec<_>>().join(", ");
        let mut out = self.lines("worst", &format!("layer {named}, marked !"));
        out.push('\n');
        let shown: Vec<&LayerReport> =
            if self.options.per_layer { self.report.layers.iter().collect() } else { ranked.iter().take(FEW).copied().collect() };
        let red = AnsiColor::Red.on_default();
        let color = |row: usize, line: &str| match shown.get(row) {
            Some(layer) if worst.contains(&layer.layer) => self.paint(red, line),
            _ => line.to_owned(),
        };
        out.push_str(&table::render(self.columns(&shown, &worst), self.options.width, color));
        if shown.len() < self.report.layers.len() {
            out.push_str(&format!("{} of {} routed layers shown; all with --per-layer\n", shown.len(), self.report.layers.len()));
        }
        out
    }

    fn columns(&self, layers: &[&LayerReport], worst: &[u16]) -> Vec<Column> {
        let unicode = self.options.unicode;
        let most = self.report.layers.iter().map(mean).fold(0.0, f64::max);
        let k = layers.first().map_or(1.0, |l| f64::from(l.k));
        let cells = |of: &dyn Fn(&LayerReport) -> Option<String>| -> Vec<String> {
            layers.iter().map(|l| of(l).unwrap_or_else(|| "-".to_owned())).collect()
        };
        let number = |v: f64| format!("{v:.2}");
        let percent = |v: f64| format!("{:.0} %", v * 100.0);
        let marginal = |l: &LayerReport| spark(l.stats.marginal.iter().map(|&m| Some(m)), 0.0, k, unicode);
        let mark = |l: &LayerReport| if worst.contains(&l.layer) { "!" } else { "" };
        vec![
            Column::new("layer").cells(cells(&|l| Some(format!("{}{}", mark(l), l.layer)))),
            Column::new("windows").optional(4).cells(cells(&|l| Some(l.stats.windows.to_string()))),
            Column::new("union").cells(cells(&|l| Some(number(l.stats.union.as_ref()?.mean)))),
            Column::new("95 %").optional(9).cells(cells(&|l| Some(self.half(l.stats.union.as_ref()?.ci95, 2)))),
            Column::new("p99").optional(8).cells(cells(&|l| Some(l.stats.union.as_ref()?.p99.to_string()))),
            Column::new("of uniform").cells(cells(&|l| Some(of_uniform(&l.stats)?.0))),
            Column::new("lift").optional(7).cells(cells(&|l| Some(number(l.stats.lift?)))),
            Column::new("pop. lift").optional(1).cells(cells(&|l| Some(number(l.stats.popularity_lift?)))),
            Column::new("wasted").cells(cells(&|l| Some(number(l.stats.wasted_mean?)))),
            Column::new("reuse").optional(6).cells(cells(&|l| Some(percent(l.stats.step_reuse?)))),
            Column::new("lag 1").optional(5).cells(cells(&|l| Some(percent(*l.stats.lag_overlap_frac.as_ref()?.get(1)?)))),
            Column::new("eff. experts").optional(0).cells(cells(&|l| Some(format!("{:.0}", l.load?.effective_experts)))),
            Column::new("by row").left().optional(3).cells(cells(&|l| Some(marginal(l)))),
            Column::new("").left().optional(2).cells(cells(&|l| Some(bar(mean(l) / most, BAR, unicode)))),
        ]
    }

    fn draft(&self) -> String {
        let Some(draft) = &self.report.draft else { return String::new() };
        let mut out = String::from("\n");
        for layer in &draft.layers {
            let load = layer.load.map_or_else(String::new, |l| {
                format!(", {:.0} effective experts, most loaded {:.1} times the mean", l.effective_experts, l.max_over_mean)
            });
            let text = format!(
                "its layer {} routed {} rows{load}; not part of the numbers above",
                layer.layer,
                Unit::Count.show(layer.rows as f64)
            );
            out.push_str(&self.lines("draft", &text));
        }
        out
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
        for metric in METRICS {
            let text = format!("{} [{}]: {}", metric.meaning, metric.unit.name(), metric.formula);
            out.push_str(&paragraph(&format!("{:<26}", metric.id), &text, self.options.width));
        }
        out
    }
}

fn mean(layer: &LayerReport) -> f64 {
    layer.stats.union.as_ref().map_or(0.0, |u| u.mean)
}

/// The union as a share of the uniform union, and the latter.
fn of_uniform(stats: &WindowStats) -> Option<(String, f64)> {
    let uniform = stats.uniform_union?;
    Some((format!("{:.0} %", stats.union.as_ref()?.mean / uniform * 100.0), uniform))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;
    use crate::trace::manifest::Warning;

    /// Five layers that agree more and more, two requests, rows of the draft module.
    fn report() -> Report {
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
        assert_eq!(anstream::adapter::strip_str(&colored).to_string(), plain);
    }

    #[test]
    fn a_report_without_windows_says_what_is_unknown() {
        let text = render(&Memory::new(&[1], 8, 2).report(), &TextOptions::default());
        assert!(text.contains("acceptance  unknown") && text.contains("no_verify_steps"), "{text}");
    }
}
