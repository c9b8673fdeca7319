//! The figures of times: what a verify step costs more than a decode step, and which draft length is worth it.

use super::figure::{Figure, Grids, Section};
use crate::metric::Unit;
use crate::metric::advice::{Advice, CostSource, DraftLength};
use crate::metric::cost::{ExpertCost, ResidualPoint};
use crate::metric::report::Report;
use crate::report::advice::is_undecided;
use crate::report::cost as words;
use crate::report::lookup::{interval, json, list, number, word};
use crate::report::svg::{self, Cloud, Frame, Grid, Line, short};
use crate::report::words::counted;
use crate::report::wrap::plain;
use serde_json::Value;

/// Colours of passes of different numbers of rows.
const COLORS: [&str; 3] = ["--s1", "--s2", "--s3"];

/// The sections of costs and advice.
pub fn sections(report: &Report) -> Vec<Section> {
    let (cost, advice) = (json(&report.cost), report.advice.as_ref());
    let emulated = if report.run.emulated { " The device was emulated: these are not a device's times." } else { "" };
    let rows = report.overall.as_ref().map_or(0, |o| o.stats.rows);
    let said =
        report.cost.as_ref().and_then(|c| words::sentence(c, rows, report)).map_or_else(String::new, |said| format!(" Here: {said}."));
    vec![
        Section {
            id: "cost",
            title: "Cost",
            intro: format!("What a verify step takes more than a plain decode step, and why.{said}{emulated}"),
            figures: vec![
                attribution(&cost, words::shares_doubt(report).is_some()),
                scatter(report),
                cost_by_layer(report),
                telemetry(report),
            ],
        },
        Section {
            id: "draft-length",
            title: "Draft length",
            intro: format!("What other draft lengths would give, judged from the prefixes of the recorded windows.{}", source(advice)),
            figures: vec![speedup(advice, is_undecided(report)), step_ratio(advice)],
        },
    ]
}

/// Where the costs of steps are from, as a sentence behind another one.
fn source(advice: Option<&Advice>) -> String {
    let Some(advice) = advice else { return String::new() };
    match (advice.cost_source, &advice.measured_unused_because) {
        (Some(CostSource::Measured), _) => " Step costs are measured times.".to_owned(),
        (Some(CostSource::Calibrated), _) => " Step costs are those of a calibrated table.".to_owned(),
        (Some(CostSource::Model), Some(why)) => format!(" Step costs are a model of bytes, not measured times: {}.", plain(why)),
        (Some(CostSource::Model), None) => " Step costs are a model of bytes, not measured times.".to_owned(),
        (None, _) => String::new(),
    }
}

fn micros(v: f64) -> String {
    format!("{} µs", short(v))
}

/// `unsure`: whether the difference is one of noisy means, or may be 0.
fn attribution(cost: &Value, unsure: bool) -> Figure {
    let (id, title) = ("attribution", "From a decode step to a verify step");
    let why = "Not known: the trace has no times by component of both decode and verify steps; record with --baseline-steps.";
    let parts = list(cost, "attribution");
    let mut deltas: Vec<(String, f64)> =
        parts.iter().filter_map(|p| Some((word(p, "component").to_owned(), number(p, &["delta_us"])?))).collect();
    let (decode, verify) = (number(cost, &["decode_step_us"]), number(cost, &["verify_step_us"]));
    let (Some(decode), Some(verify), false) = (decode, verify, deltas.is_empty()) else {
        return Figure::missing(id, title, why);
    };
    deltas.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let largest = deltas.first().map_or_else(String::new, |(name, delta)| format!("; the largest part is {name}, {}", micros(*delta)));
    let ratio = number(cost, &["step_ratio"]).map_or_else(String::new, |r| format!(", {r:.2} times as long"));
    let doubt = if unsure { " The difference is noisy, or not told apart from 0; its parts are no facts." } else { "" };
    let reading = format!("A verify step takes {} where a decode step takes {}{ratio}{largest}.{doubt}", micros(verify), micros(decode));
    // What is in no component is shown as such, so that the bars lead from one total to the other.
    let rest = verify - decode - deltas.iter().map(|d| d.1).sum::<f64>();
    deltas.push(("not attributed".to_owned(), rest));
    let frame = Frame { label: title, x: "", y: "µs per step" };
    let picture = svg::waterfall(frame, ("decode step", decode), &deltas, "verify step", micros);
    let mut figure = Figure::new(id, title, Some(picture), why);
    let n = format!("n = {} components; {} of the difference are in no component", parts.len(), micros(rest));
    figure = figure.says(reading, n, "µs per step, mean").legend([
        ("block", "--s1", "whole step".to_owned()),
        ("block", "--worse", "takes longer".to_owned()),
        ("block", "--better", "takes less".to_owned()),
    ]);
    let names: Vec<String> = parts.iter().map(|p| word(p, "component").to_owned()).collect();
    let of = |key: &str| parts.iter().map(|p| number(p, &[key])).collect::<Vec<_>>();
    let series = [("decode", of("decode_us")), ("verify", of("verify_us")), ("more", of("delta_us"))];
    figure.table = Some(Grids::series(title, "component", &names, &series, short));
    figure
}

/// Mean times by union, one point for each number of rows and each group of neighbouring unions.
struct Points {
    rows: u16,
    points: Vec<(f64, f64)>,
}

/// Of all layers' points, where those of all layers together are not kept.
fn residuals(report: &Report, all: &ExpertCost) -> Vec<Points> {
    let layers = report.layers.iter().filter_map(|l| l.cost.as_ref()).flat_map(|c| &c.residuals);
    let points: Vec<&ResidualPoint> = if all.residuals.is_empty() { layers.collect() } else { all.residuals.iter().collect() };
    let mut groups: Vec<Points> = Vec::new();
    for p in points {
        match groups.iter_mut().find(|g| g.rows == p.rows) {
            Some(group) => group.points.push((p.union, p.mean_us)),
            None => groups.push(Points { rows: p.rows, points: vec![(p.union, p.mean_us)] }),
        }
    }
    groups.sort_by_key(|g| std::cmp::Reverse(g.points.len()));
    groups.truncate(COLORS.len());
    groups
}

fn scatter(report: &Report) -> Figure {
    let (id, title) = ("time-union", "Time of the experts against the union");
    let why = "Not known: the trace has no expert times by layer.";
    let Some(cost) = report.overall.as_ref().and_then(|o| o.cost.as_ref()) else { return Figure::missing(id, title, why) };
    let groups = residuals(report, cost);
    let fit = cost.us_per_expert.zip(cost.intercept_us);
    let line = |g: &Points| {
        let ((b, a), (low, high)) = fit.zip(svg::range(g.points.iter().map(|p| p.0)))?;
        let rows = cost.us_per_row.map_or(0.0, |c| c * f64::from(g.rows));
        (high > low).then_some([(low, a + rows + b * low), (high, a + rows + b * high)])
    };
    let clouds: Vec<Cloud<'static>> =
        groups.iter().zip(COLORS).map(|(g, color)| Cloud { points: g.points.clone(), color, line: line(g) }).collect();
    let picture = svg::scatter(Frame { label: title, x: "distinct experts", y: "µs per layer" }, &clouds);
    let said = words::experts(cost, report.run.instrumentation.copy_gb_per_s).unwrap_or_else(|| "no line could be fitted".to_owned());
    let n = format!(
        "n = {} passes of a layer, in {} points",
        Unit::Count.show(cost.points as f64),
        groups.iter().map(|g| g.points.len()).sum::<usize>()
    );
    let figure =
        Figure::new(id, title, picture, why).says(format!("Fit: {said}."), n, "µs, mean over the layers' passes of neighbouring unions");
    figure.legend(groups.iter().zip(&clouds).map(|(g, cloud)| {
        let fitted = if cloud.line.is_some() { " and the fitted line" } else { "" };
        ("block", cloud.color, format!("passes of {}{fitted}", counted(u64::from(g.rows), "row")))
    }))
}

fn cost_by_layer(report: &Report) -> Figure {
    let (id, title) = ("cost-layers", "Cost of a further expert, by layer");
    let why = "Not known: the trace has no expert times by layer.";
    let known: Vec<(u16, f64, Option<[f64; 2]>)> = report
        .layers
        .iter()
        .filter_map(|l| {
            let cost = json(&l.cost);
            Some((l.layer, number(&cost, &["us_per_expert"])?, interval(&cost, &["ci95"])))
        })
        .collect();
    let intervals: Option<Vec<(f64, f64)>> = known.iter().map(|(.., ci)| ci.map(|[low, high]| (low, high))).collect();
    let line = Line { points: known.iter().map(|k| (f64::from(k.0), k.1)).collect(), color: "--s1", dashed: false, interval: intervals };
    let picture = svg::curves(Frame { label: title, x: "layer", y: "µs per expert" }, &[], &[line], true);
    let most = known.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a });
    let reading = most.map_or_else(String::new, |(layer, cost, ci)| {
        let interval = ci.map_or_else(String::new, |[low, high]| format!(" (95 %: {low:.2} to {high:.2})"));
        format!("Dearest in layer {layer}: {cost:.2} µs for each further expert{interval}.")
    });
    let figure = Figure::new(id, title, picture, why).says(reading, format!("n = {} layers", known.len()), "µs per distinct expert");
    figure.legend([("line", "--s1", "slope of the layer, with its 95 % interval".to_owned())])
}

fn telemetry(report: &Report) -> Figure {
    let (id, title) = ("telemetry", "The machine during the run");
    let Some(t) = report.telemetry.as_ref().filter(|t| !t.time_s.is_empty()) else {
        return Figure::missing(id, title, "Not known: the trace has no telemetry.");
    };
    let names = ["host load, %", "CPU clock", "device clock", "power", "temperature", "memory", "throttled, %"];
    let columns = [&t.host_load, &t.cpu_mhz, &t.sm_clock_mhz, &t.power_w, &t.temperature_c, &t.memory_bytes, &t.throttled];
    // Different units on one strip: each as a share of its own largest value.
    let rows: Vec<(&str, &Vec<Option<f64>>, f64)> = names
        .into_iter()
        .zip(columns)
        .filter_map(|(name, values)| Some((name, values, svg::range(values.iter().copied().flatten())?.1)))
        .collect();
    let grid = Grid {
        rows: rows.iter().map(|r| r.0.to_owned()).collect(),
        columns: t.time_s.iter().map(|s| format!("{s:.1}")).collect(),
        values: rows
            .iter()
            .map(|(_, values, max)| values.iter().map(|v| v.map(|v| if *max > 0.0 { v / max } else { 0.0 })).collect())
            .collect(),
    };
    let picture =
        svg::heat_map(Frame { label: title, x: "time, s", y: "" }, &grid, (0.0, 1.0), |v| format!("{:.0} % of its largest", v * 100.0));
    let shown = |name: &str, max: f64| match name {
        "host load, %" => format!("host load up to {:.0} %", max * 100.0),
        "throttled, %" => format!("throttled in up to {:.0} % of a span's samples", max * 100.0),
        "CPU clock" | "device clock" => format!("{name} up to {max:.0} MHz"),
        "power" => format!("power up to {max:.0} W"),
        "temperature" => format!("temperature up to {max:.0} °C"),
        _ => format!("memory up to {:.2} GiB", max / f64::from(1 << 30)),
    };
    let reading = rows.iter().map(|r| shown(r.0, r.2)).collect::<Vec<_>>().join(", ");
    let mut figure = Figure::new(id, title, picture, "Not known: the samples hold nothing.");
    figure = figure.says(
        format!("Seen: {reading}."),
        format!("n = {} samples, shown in {} spans", t.samples, t.time_s.len()),
        "share of the row's largest value",
    );
    figure.ramp = Some(("0".to_owned(), "its largest".to_owned()));
    figure
}

/// Values by draft length, with the intervals where all are known.
fn by_length<'a>(advice: Option<&Advice>, of: fn(&DraftLength) -> Option<f64>, color: &'a str, intervals: bool) -> Line<'a> {
    let lengths = advice.map_or(&[][..], |advice| advice.by_draft_len.as_slice());
    let known = || lengths.iter().filter_map(|l| Some((l, of(l).filter(|v| v.is_finite())?)));
    let points = known().map(|(l, value)| (f64::from(l.draft_len), value)).collect();
    let ci: Option<Vec<(f64, f64)>> = known().map(|(l, _)| l.ci95.map(|[low, high]| (low, high))).collect();
    Line { points, color, dashed: false, interval: ci.filter(|_| intervals) }
}

fn speedup(advice: Option<&Advice>, undecided: bool) -> Figure {
    let (id, title) = ("speedup", "Speedup by draft length");
    let why = "Not known: the trace has too little to judge draft lengths by; see the limits below.";
    let line = by_length(advice, |l| l.speedup, "--s1", true);
    let n = line.points.len();
    let best = line.points.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a });
    let one = Line { points: line.points.iter().map(|p| (p.0, 1.0)).collect(), color: "--s2", dashed: true, interval: None };
    let picture = best.and_then(|_| svg::curves(Frame { label: title, x: "drafts", y: "speedup" }, &[], &[line, one], false));
    let recommended = advice.and_then(|advice| advice.by_draft_len.iter().find(|l| Some(l.draft_len) == advice.best_draft_len));
    let reading = match (recommended, best) {
        _ if undecided => "No advice from these times: a few steps decide their means; see the limits below.".to_owned(),
        (Some(DraftLength { draft_len: 0, .. }), _) => "Best without drafts: no draft length is faster than plain decoding.".to_owned(),
        (Some(DraftLength { draft_len, speedup: Some(speedup), ci95, .. }), _) => {
            let interval = ci95.map_or_else(String::new, |[low, high]| format!(" (95 %: {low:.2} to {high:.2})"));
            let doubt = if ci95.is_some_and(|[low, _]| low <= 1.0) { ", which is not told apart from plain decoding" } else { "" };
            format!("Best with {}: {speedup:.2} times plain decoding{interval}{doubt}.", counted(u64::from(*draft_len), "draft"))
        }
        (_, Some((length, speedup))) => format!("Largest with {}: {speedup:.2}.", counted(length as u64, "draft")),
        _ => String::new(),
    };
    let figure = Figure::new(id, title, picture, why).says(reading, format!("n = {n} draft lengths"), "tokens per step over step ratio");
    figure.legend([("line", "--s1", "speedup, with its 95 % interval".to_owned()), ("dashed", "--s2", "plain decoding".to_owned())])
}

fn step_ratio(advice: Option<&Advice>) -> Figure {
    let (id, title) = ("step-ratio", "Gain and cost by draft length");
    let why = "Not known: the trace has too little to judge draft lengths by; see the limits below.";
    let (tokens, ratio) =
        (by_length(advice, |l| Some(l.tokens_per_step), "--s1", false), by_length(advice, |l| l.step_ratio, "--s2", false));
    let (n, known) = (tokens.points.len(), !ratio.points.is_empty());
    let picture = svg::curves(Frame { label: title, x: "drafts", y: "plain decode steps" }, &[], &[tokens, ratio], true);
    let reading = if known { "Speculation pays where the tokens lie above the step." } else { "The cost of a step is not known." };
    let figure = Figure::new(id, title, picture, why).says(reading.to_owned(), format!("n = {n} draft lengths"), "plain decode steps");
    figure.legend([("line", "--s1", "tokens per step".to_owned()), ("line", "--s2", "what a step costs, in decode steps".to_owned())])
}
