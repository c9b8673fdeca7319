//! Several reports in one table: a line a number, a column a trace.

use super::advice::is_undecided;
use super::cost;
use super::json::pretty;
use super::sections;
use super::table::{self, Column};
use super::text::TextOptions;
use super::words;
use super::wrap::{paragraph, plain};
use crate::metric::Report;
use crate::metric::advice::{CostSource, DraftLength};
use crate::metric::report::{DraftReport, Overall};
use crate::trace::manifest::requests_unknown;
use serde::Serialize;
use std::collections::BTreeSet;

/// The value of `schema` of several reports as JSON.
pub const SCHEMA: &str = "specprof.reports/1";

/// Longest name of a column.
const NAME: usize = 28;

/// The reports as JSON: `schema` and `reports`, in their order.
///
/// # Errors
/// Never for reports made by `analysis`; a value that JSON cannot hold otherwise.
pub fn json(reports: &[Report]) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Document<'a> {
        schema: &'a str,
        reports: &'a [Report],
    }
    pretty(&Document { schema: SCHEMA, reports })
}

/// Numbers of one report, by line.
type Line = (&'static str, fn(&Report) -> Option<String>);

fn overall(report: &Report) -> Option<&Overall> {
    report.overall.as_ref()
}

fn two(value: Option<f64>) -> Option<String> {
    value.map(|v| format!("{v:.2}"))
}

fn percent(value: Option<f64>) -> Option<String> {
    value.map(|v| format!("{:.0} %", v * 100.0))
}

fn with_interval(value: Option<f64>, interval: Option<[f64; 2]>) -> Option<String> {
    let [low, high] = match interval {
        Some(interval) => interval,
        None => return two(value),
    };
    value.map(|v| format!("{v:.2} ({low:.2}-{high:.2})"))
}

/// Mean over the layers of the effective experts.
fn effective(routers: Option<&DraftReport>) -> Option<String> {
    let loads: Vec<f64> = routers?.layers.iter().filter_map(|l| Some(l.load?.effective_experts)).collect();
    (!loads.is_empty()).then(|| format!("{:.0}", loads.iter().sum::<f64>() / loads.len() as f64))
}

/// ` (model)` where the advice is by the model of bytes.
fn by_model(report: &Report) -> &'static str {
    let source = report.advice.as_ref().and_then(|a| a.cost_source);
    if source == Some(CostSource::Model) { " (model)" } else { "" }
}

/// The measured number with its interval, as the report of one trace has it, or else the advice's with its source; by medians, and marked so, where a few
/// steps decide the means.
fn measured_or(measured: Option<Measured>, report: &Report, advised: fn(&DraftLength) -> Advised) -> Option<String> {
    match measured.filter(|m| m.mean.is_some()) {
        Some(Measured { median: Some(median), .. }) if cost::is_noisy(report) => Some(format!("{median:.2} (median, noisy)")),
        Some(m) => Some(with_interval(m.mean, m.ci95)? + if cost::is_noisy(report) { " noisy" } else { "" }),
        None => {
            let (value, ci95) = recorded(report).map(advised)?;
            Some(with_interval(value, ci95)? + by_model(report))
        }
    }
}

/// A ratio of times.
struct Measured {
    mean: Option<f64>,
    ci95: Option<[f64; 2]>,
    median: Option<f64>,
}

/// A number of an advice with its interval.
type Advised = (Option<f64>, Option<[f64; 2]>);

fn step_ratio(report: &Report) -> Option<Measured> {
    report.cost.as_ref().map(|c| Measured { mean: c.step_ratio, ci95: c.step_ratio_ci95, median: c.step_ratio_median })
}

fn speedup(report: &Report) -> Option<Measured> {
    report.cost.as_ref().map(|c| Measured { mean: c.speedup, ci95: c.speedup_ci95, median: c.speedup_median })
}

/// The best draft length, where the times tell one.
fn best_length(report: &Report) -> Option<String> {
    let best = report.advice.as_ref()?.best_draft_len?;
    Some(if is_undecided(report) { "not told (noisy)".to_owned() } else { format!("{best}{}", by_model(report)) })
}

/// The recorded draft length's entry of the advice.
fn recorded(report: &Report) -> Option<&DraftLength> {
    report.advice.as_ref()?.by_draft_len.last()
}

const LINES: &[Line] = &[
    ("model", |r| Some(plain(&r.run.model.name))),
    ("device", |r| Some(format!("{}{}", plain(&r.run.device.kind), if r.run.emulated { ", emulated" } else { "" }))),
    ("drafter", |r| Some(plain(&r.run.drafter.label()))),
    ("draft length", |r| r.run.drafter.draft_len.map(|n| n.to_string())),
    ("temperature", |r| r.run.sampling.as_ref().map(|s| s.temperature.to_string())),
    ("requests", |r| (!requests_unknown(&r.warnings)).then(|| r.totals.requests.to_string())),
    ("verify steps", |r| Some(r.totals.verify_steps.to_string())),
    ("tokens", |r| words::tokens_known(r).map(|n| n.to_string())),
    ("tokens per step", |r| with_interval(r.acceptance.tokens_per_step, r.acceptance.tokens_per_step_ci95)),
    ("rows", |r| overall(r).map(|o| o.stats.rows.to_string())),
    ("union", |r| {
        let union = overall(r)?.stats.union.as_ref()?;
        with_interval(Some(union.mean), union.ci95)
    }),
    ("of uniform", |r| percent(Some(overall(r)?.stats.union.as_ref()?.mean / overall(r)?.stats.uniform_union?))),
    ("lift", |r| two(overall(r)?.stats.lift)),
    ("popularity lift", |r| two(overall(r)?.stats.popularity_lift)),
    ("per kept row", |r| two(overall(r)?.stats.marginal_kept)),
    ("per rejected row", |r| two(overall(r)?.stats.marginal_rejected)),
    ("wasted", |r| two(overall(r)?.stats.wasted_mean)),
    ("step reuse", |r| percent(overall(r)?.stats.step_reuse)),
    ("worst layer", |r| overall(r).map(|o| o.worst_layer.to_string())),
    ("effective experts, verify", |r| Some(format!("{:.0}", overall(r)?.load?.effective_experts))),
    ("effective experts, prefill", |r| effective(r.prefill.as_ref())),
    ("effective experts, drafter", |r| effective(r.draft.as_ref())),
    ("step ratio", |r| measured_or(step_ratio(r), r, |p| (p.step_ratio, p.step_ratio_ci95))),
    ("speedup", |r| measured_or(speedup(r), r, |p| (p.speedup, p.ci95))),
    ("best draft length", best_length),
];

/// The reports side by side. Columns that do not fit are continued below.
pub fn render(reports: &[Report], options: &TextOptions) -> String {
    let titles: Vec<&Line> = LINES.iter().filter(|(_, of)| reports.iter().any(|r| of(r).is_some())).collect();
    let column = |(i, report): (usize, &Report)| {
        let name: String = plain(&report.run.name).chars().take(NAME).collect();
        let cells: Vec<String> = titles.iter().map(|(_, of)| of(report).unwrap_or_else(|| "-".to_owned())).collect();
        let width = cells.iter().map(|c| c.chars().count()).max().unwrap_or(0).max(name.chars().count() + 4);
        (Column::new(&format!("[{}] {name}", i + 1)).cells(cells), width + 2)
    };
    let first = titles.iter().map(|(title, _)| title.len()).max().unwrap_or(0);
    let mut out = String::new();
    let mut columns = reports.iter().enumerate().map(column).peekable();
    while columns.peek().is_some() {
        let mut block = vec![Column::new("").left().cells(titles.iter().map(|(title, _)| (*title).to_owned()))];
        let mut width = first;
        while let Some((column, wide)) = columns.next_if(|(_, wide)| block.len() == 1 || width + wide <= options.width) {
            width += wide;
            block.push(column);
        }
        out.push_str(if out.is_empty() { "" } else { "\n" });
        out.push_str(&table::render(block, options.width, |_, line| line.to_owned()));
    }
    for (i, report) in reports.iter().enumerate() {
        let sections = [
            report.groups.as_ref().map(|g| sections::groups(g, options)),
            report.expert_parallel.as_ref().map(|p| sections::parallel(p, options)),
        ];
        for section in sections.into_iter().flatten() {
            out.push_str(&format!("\n[{}] {}", i + 1, plain(&report.run.name)));
            out.push_str(&section);
        }
    }
    out.push_str(&warnings(reports, options));
    out
}

/// Each warning once, with the traces that it is about.
fn warnings(reports: &[Report], options: &TextOptions) -> String {
    let all: BTreeSet<(&str, &str)> = reports.iter().flat_map(|r| &r.warnings).map(|w| (w.code.as_str(), w.message.as_str())).collect();
    let mut out = String::from(if all.is_empty() { "" } else { "\n" });
    for (code, message) in all {
        let has = |r: &Report| r.warnings.iter().any(|w| w.code == code && w.message == message);
        let of: Vec<String> = (1..).zip(reports).filter(|(_, r)| has(r)).map(|(i, _): (usize, _)| format!("[{i}]")).collect();
        let whose = if of.len() == reports.len() { "all".to_owned() } else { of.join(" ") };
        out.push_str(&paragraph("", &format!("{whose} {}: {}", plain(code), plain(message)), options.width));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;

    fn report(name: &str, accepted: u16) -> Report {
        let mut trace = Memory::new(&[1], 16, 2);
        for step in 0..6u16 {
            trace.verify(u32::from(step % 2), accepted, &[vec![vec![0, 1], vec![1, 2 + step % 3]]]);
        }
        let mut report = trace.report();
        report.run.name = name.into();
        report
    }

    #[test]
    fn columns_go_on_below_when_they_do_not_fit() {
        let reports: Vec<Report> = ["a", "b\x1b[31m", "a rather long name of a trace directory"].map(|n| report(n, 1)).into();
        for (width, blocks) in [(160, 1), (64, 2), (40, 3)] {
            let text = render(&reports, &TextOptions { width, ..TextOptions::default() });
            assert_eq!(text.lines().filter(|l| l.starts_with("tokens per step")).count(), blocks, "{text}");
            assert!(text.lines().all(|l| !l.chars().any(char::is_control)));
        }
        let text = render(&reports, &TextOptions::default());
        assert!(text.contains("2.00 (2.00-2.00)") && text.contains("all no_device_times"), "{text}");
        assert!(!text.contains("effective experts, prefill"), "{text}");
    }

    #[test]
    fn costs_are_the_measured_ones_or_say_that_they_are_a_model() {
        let mut trace = Memory::new(&[1], 16, 2);
        trace.manifest.model.bytes_other_per_step = Some(40 * 12_288);
        trace.manifest.drafter.bytes_per_draft = Some(12_288);
        for request in 0..2 {
            trace.verify(request, 1, &[vec![vec![0, 1], vec![1, 2]]]);
        }
        let model = trace.report();
        let mut measured = model.clone();
        let cost = measured.cost.as_mut().unwrap();
        (cost.step_ratio, cost.speedup) = (Some(5.51), Some(0.44));
        let text = render(&[model, measured], &TextOptions::default());
        let line = |title: &str| text.lines().find(|l| l.starts_with(title)).unwrap().to_owned();
        for (title, own) in [("step ratio", "5.51"), ("speedup", "0.44")] {
            assert!(line(title).ends_with(own) && line(title).contains("(model)"), "{text}");
        }
        assert_eq!(line("best draft length").matches("(model)").count(), 2, "{text}");
    }

    #[test]
    fn times_have_their_intervals_or_a_mark_of_noise() {
        let mut quiet = report("a", 1);
        quiet.cost = Some(crate::metric::cost::StepCost {
            step_ratio: Some(7.58),
            step_ratio_ci95: Some([5.5, 9.6]),
            step_ratio_median: Some(3.1),
            ..Default::default()
        });
        let mut noisy = quiet.clone();
        noisy.warnings.push(crate::trace::manifest::Warning::new("noisy_times", "a step of 9 s"));
        let text = render(&[quiet, noisy], &TextOptions { width: 200, ..TextOptions::default() });
        let line = text.lines().find(|l| l.starts_with("step ratio")).unwrap();
        assert!(line.contains("7.58 (5.50-9.60)") && line.ends_with("3.10 (median, noisy)"), "{text}");
    }

    #[test]
    fn json_holds_every_report() {
        let value: serde_json::Value = serde_json::from_str(&json(&[report("a", 0), report("b", 1)]).unwrap()).unwrap();
        assert_eq!((value["schema"].as_str(), value["reports"][1]["run"]["name"].as_str()), (Some(SCHEMA), Some("b")));
    }
}
