//! The figures of the page: which numbers of a report go into which picture, and what they say.

use super::figure::{Figure, Grids, Section};
use crate::metric::Unit;
use crate::metric::report::{LayerReport, Overall, Report};
use crate::report::svg::{self, Frame, Grid, Line, short};
use crate::report::tables;
use crate::report::words::counted;

/// Columns of the map of loads at most; of more experts, neighbours are put together.
const LOAD_COLUMNS: usize = 64;
/// Cells of that map at most: of many layers, more neighbours are put together.
const LOAD_CELLS: usize = 4096;
const NO_WINDOWS: &str = "Not known: the trace has no routed verify windows.";

/// The sections of the report that do not need times.
pub fn sections(report: &Report) -> Vec<Section> {
    let mut unions = vec![union_map(report), marginal_map(report), wasted_map(report)];
    unions.extend([by_rows(report), histogram(report)]);
    vec![
        Section {
            id: "acceptance",
            title: "Acceptance",
            intro: "How many drafts a verify step keeps, and which.".into(),
            figures: vec![acceptance(report), accepted_histogram(report)],
        },
        Section {
            id: "unions",
            title: "Unions",
            intro: "How many distinct experts the rows of a verify window touch in a layer: the weights that the step has to read.".into(),
            figures: unions,
        },
        Section {
            id: "overlap",
            title: "Overlap of rows",
            intro: "How far the rows of a window agree on their experts.".into(),
            figures: vec![pairwise(report), by_lag(report)],
        },
        Section {
            id: "load",
            title: "Load of the experts",
            intro: "How unevenly the verify rows fall on the experts.".into(),
            figures: vec![load_map(report), load_by_layer(report)],
        },
    ]
}

fn count(n: u64) -> String {
    Unit::Count.show(n as f64)
}

fn two(v: f64) -> String {
    format!("{v:.2}")
}

/// A share whose sign stays on the number's line.
fn percent(v: f64) -> String {
    format!("{:.0}\u{a0}%", v * 100.0)
}

fn windows(overall: &Overall) -> String {
    let layers = overall.stats.windows;
    format!("n = {} windows of {} rows, each layer counted", count(layers), overall.stats.rows)
}

/// The layers that have windows.
fn layers(report: &Report) -> impl Iterator<Item = &LayerReport> {
    report.layers.iter().filter(|l| l.stats.windows > 0)
}

/// A grid of layers by rows of the window.
fn layer_grid(report: &Report, of: impl Fn(&LayerReport) -> Vec<Option<f64>>) -> Grid {
    let width = layers(report).map(|l| usize::from(l.stats.rows)).max().unwrap_or(0);
    let row = |l: &LayerReport| {
        let mut values = of(l);
        values.resize(width, None);
        values
    };
    Grid {
        rows: layers(report).map(|l| l.layer.to_string()).collect(),
        columns: (0..width).map(|i| i.to_string()).collect(),
        values: layers(report).map(row).collect(),
    }
}

/// A heat map of experts over layers and rows.
fn layer_map(id: &'static str, title: &str, grid: &Grid, why: &str) -> Figure {
    let frame = Frame { label: title, x: "row", y: "layer" };
    let range = grid.range();
    let map = range.and_then(|(_, high)| svg::heat_map(frame, grid, (0.0, high), |v| format!("{} experts", two(v))));
    let mut figure = Figure::new(id, title, map, why);
    figure.ramp = range.map(|(_, high)| ("0".to_owned(), format!("{} experts", two(high))));
    figure.table = Some(Grids::values(title, "layer", grid, two));
    figure
}

fn some(values: &[f64]) -> Vec<Option<f64>> {
    values.iter().copied().map(Some).collect()
}

fn union_map(report: &Report) -> Figure {
    let (id, title) = ("union-map", "Union of the rows so far, by layer and row");
    let Some(all) = &report.overall else { return Figure::missing(id, title, NO_WINDOWS) };
    let grid = layer_grid(report, |l| some(&l.stats.prefix_union));
    let spread = all.layer_spread;
    let reading = format!(
        "Layer {} touches most: {} experts by the last row; the layer that touches fewest, {}. One row alone touches {}.",
        all.worst_layer,
        two(spread.max),
        two(spread.min),
        all.k
    );
    layer_map(id, title, &grid, NO_WINDOWS).says(reading, windows(all), "experts")
}

fn marginal_map(report: &Report) -> Figure {
    let (id, title) = ("marginal-map", "Experts that each row adds");
    let Some(all) = &report.overall else { return Figure::missing(id, title, NO_WINDOWS) };
    let grid = layer_grid(report, |l| some(&l.stats.marginal));
    let last = all.stats.marginal.last().copied().unwrap_or_default();
    let reading = format!(
        "Over all layers, row {} still adds {} experts of its {}; rows that agreed entirely would add none.",
        all.stats.marginal.len().saturating_sub(1),
        two(last),
        all.k
    );
    layer_map(id, title, &grid, NO_WINDOWS).says(reading, windows(all), "experts")
}

fn wasted_map(report: &Report) -> Figure {
    let (id, title) = ("wasted-map", "Wasted experts, by layer and row");
    let why = "Not known: rejected rows are not in the trace.";
    let Some(all) = &report.overall else { return Figure::missing(id, title, NO_WINDOWS) };
    let grid = layer_grid(report, |l| l.stats.wasted_by_row.as_deref().map(some).unwrap_or_default());
    let (wasted, union) = (all.stats.wasted_mean, all.stats.union.as_ref());
    let reading = wasted.zip(union).map_or_else(String::new, |(wasted, union)| {
        format!(
            "Of {} experts that a window touches, {} ({}) serve rejected rows only.",
            two(union.mean),
            two(wasted),
            percent(wasted / union.mean)
        )
    });
    layer_map(id, title, &grid, why).says(reading, windows(all), "experts that rejected rows add, per window")
}

/// The union by number of rows, beside what chance and popularity would give.
fn by_rows(report: &Report) -> Figure {
    let (id, title) = ("union-growth", "Growth of the union with the rows");
    let Some(all) = &report.overall else { return Figure::missing(id, title, NO_WINDOWS) };
    let (e, k) = (f64::from(all.experts), f64::from(all.k));
    let uniform: Vec<f64> = (1..=all.stats.prefix_union.len()).map(|rows| e * (1.0 - (1.0 - k / e).powi(rows as i32))).collect();
    let points = |values: &[f64]| values.iter().zip(1..).map(|(&v, rows)| (f64::from(rows), v)).collect::<Vec<_>>();
    let line = |values: &[f64], color, dashed| Line { points: points(values), color, dashed, interval: None };
    let mut lines = vec![line(&all.stats.prefix_union, "--s1", false), line(&uniform, "--s2", true)];
    let last = all.stats.prefix_union.len() as f64;
    if let Some(popularity) = all.stats.popularity_union {
        lines.push(Line { points: vec![(last, popularity)], color: "--s3", dashed: false, interval: None });
    }
    let picture = svg::curves(Frame { label: title, x: "rows", y: "distinct experts" }, &[], &lines, true);
    let reading = match (all.stats.lift, all.stats.popularity_lift) {
        (Some(lift), Some(popularity)) => format!(
            "Lift {}: the rows go {} of the way from chance to full agreement; beyond what unequal popularity explains, {}.",
            two(lift),
            percent(lift),
            percent(popularity)
        ),
        _ => String::new(),
    };
    let mut figure = Figure::new(id, title, picture, NO_WINDOWS).says(reading, windows(all), "experts, mean over layers");
    figure = figure.legend([
        ("line", "--s1", "measured".to_owned()),
        ("dashed", "--s2", "independent uniform rows".to_owned()),
        ("dot", "--s3", "independent rows of the observed popularity (all rows)".to_owned()),
    ]);
    let names: Vec<String> = (1..=uniform.len()).map(|i| i.to_string()).collect();
    figure.table =
        Some(Grids::series(title, "rows", &names, &[("measured", some(&all.stats.prefix_union)), ("uniform", some(&uniform))], two));
    figure
}

fn histogram(report: &Report) -> Figure {
    let (id, title) = ("union-histogram", "Distribution of the union");
    let Some((all, union)) = report.overall.as_ref().and_then(|o| Some((o, o.stats.union.as_ref()?))) else {
        return Figure::missing(id, title, NO_WINDOWS);
    };
    let first = union.histogram.iter().position(|&n| n > 0).unwrap_or(0);
    let bars: Vec<(f64, f64)> = union.histogram.iter().enumerate().skip(first).map(|(u, &n)| (u as f64, n as f64)).collect();
    let high = bars.iter().map(|b| b.1).fold(0.0, f64::max);
    let at = |x: Option<f64>, color| x.map(|x| Line { points: vec![(x, 0.0), (x, high)], color, dashed: true, interval: None });
    let lines: Vec<Line<'_>> = [at(Some(union.mean), "--s1"), at(all.stats.uniform_union, "--s2"), at(all.stats.popularity_union, "--s3")]
        .into_iter()
        .flatten()
        .collect();
    let picture = svg::curves(Frame { label: title, x: "union", y: "windows" }, &bars, &lines, true);
    let reading = format!(
        "Half of the windows touch {} experts or fewer, one in a hundred more than {}; the mean is {}.",
        union.p50,
        union.p99,
        two(union.mean)
    );
    let mut legend = vec![("block", "--bar", "windows".to_owned()), ("dashed", "--s1", format!("mean, {}", two(union.mean)))];
    legend.extend(all.stats.uniform_union.map(|u| ("dashed", "--s2", format!("uniform, {}", two(u)))));
    legend.extend(all.stats.popularity_union.map(|u| ("dashed", "--s3", format!("popularity, {}", two(u)))));
    let mut figure = Figure::new(id, title, picture, NO_WINDOWS).says(reading, windows(all), "windows by experts").legend(legend);
    let names: Vec<String> = bars.iter().map(|b| short(b.0)).collect();
    figure.table =
        Some(Grids::series(title, "union", &names, &[("windows", bars.iter().map(|b| Some(b.1)).collect())], |v| count(v as u64)));
    figure
}

fn acceptance(report: &Report) -> Figure {
    let (id, title) = ("acceptance-positions", "Acceptance by draft position");
    let why = "Not known: the trace has no verify steps.";
    let a = &report.acceptance;
    let points =
        |values: &[Option<f64>]| values.iter().zip(1..).filter_map(|(v, i)| Some((f64::from(i), (*v)? * 100.0))).collect::<Vec<_>>();
    let line = |values: &[Option<f64>], color, dashed| Line { points: points(values), color, dashed, interval: None };
    let lines = [line(&a.by_position, "--s1", false), line(&a.conditional_by_position, "--s2", true)];
    let picture = svg::curves(Frame { label: title, x: "draft", y: "accepted, %" }, &[], &lines, true);
    let Some(tokens) = a.tokens_per_step else { return Figure::missing(id, title, why) };
    let interval = a.tokens_per_step_ci95.map_or_else(String::new, |[low, high]| format!(" (95 %: {} to {})", two(low), two(high)));
    let reading = format!("A verify step is worth {tokens:.3} tokens in the mean{interval}: the drafts it keeps, and one more.");
    let n = format!("n = {}, {}", counted(report.totals.verify_steps, "verify step"), counted(report.totals.requests, "request"));
    let mut figure = Figure::new(id, title, picture, why)
        .says(reading, n, "% of the windows that had the draft")
        .legend([("line", "--s1", "accepted".to_owned()), ("dashed", "--s2", "accepted once all before it were".to_owned())]);
    figure.table = Some(Grids::of("", title, &tables::acceptance(report), a.histogram.len()));
    figure
}

fn accepted_histogram(report: &Report) -> Figure {
    let (id, title) = ("accepted-histogram", "Drafts kept per step");
    let histogram = &report.acceptance.histogram;
    let all: u64 = histogram.iter().sum();
    let bars: Vec<(String, f64)> = histogram.iter().enumerate().map(|(i, &n)| (i.to_string(), n as f64)).collect();
    let picture = if all > 0 { svg::bars(Frame { label: title, x: "drafts kept", y: "steps" }, &bars, |v| count(v as u64)) } else { None };
    let none = histogram.first().copied().unwrap_or(0);
    let full = histogram.last().copied().unwrap_or(0);
    let share = |n: u64| percent(n as f64 / all.max(1) as f64);
    let reading = format!("{} of the steps keep no draft, {} keep all {}.", share(none), share(full), histogram.len().saturating_sub(1));
    let mut figure = Figure::new(id, title, picture, "Not known: the trace has no verify steps.");
    figure = figure.says(reading, format!("n = {} verify steps", count(all)), "steps");
    let names: Vec<String> = bars.iter().map(|b| b.0.clone()).collect();
    figure.table = Some(Grids::series(title, "kept", &names, &[("steps", bars.iter().map(|b| Some(b.1)).collect())], |v| count(v as u64)));
    figure
}

fn pairwise(report: &Report) -> Figure {
    let (id, title) = ("pairwise", "Experts that two rows share");
    let why = "Not known: no windows, or windows of too many rows.";
    let Some((all, pairs)) = report.overall.as_ref().and_then(|o| Some((o, o.stats.pairwise.as_ref()?))) else {
        return Figure::missing(id, title, why);
    };
    let names: Vec<String> = (0..pairs.len()).map(|i| i.to_string()).collect();
    let grid = Grid { rows: names.clone(), columns: names, values: pairs.iter().map(|row| some(row)).collect() };
    let k = f64::from(all.k);
    let picture = svg::heat_map(Frame { label: title, x: "row", y: "row" }, &grid, (0.0, k), |v| format!("{} experts", two(v)));
    let next = all.stats.lag_overlap_frac.as_ref().and_then(|l| l.get(1)).map_or_else(|| "-".to_owned(), |&v| percent(v));
    let chance = percent(k / f64::from(all.experts));
    let who = if all.stats.by_depth.is_some() { "A row and its parent" } else { "Neighbouring rows" };
    let reading = format!("{who} share {next} of their experts; independent uniform rows would share {chance}.");
    let mut figure = Figure::new(id, title, picture, why).says(reading, windows(all), "experts of k, mean over layers");
    figure.ramp = Some(("0".to_owned(), format!("{} experts", all.k)));
    figure.table = Some(Grids::values(title, "row", &grid, two));
    figure
}

fn by_lag(report: &Report) -> Figure {
    let (id, title) = ("by-lag", "Overlap by distance of the rows");
    let why = "Not known: windows of one row, or none.";
    let lags = report.overall.as_ref().and_then(|o| Some((o, o.stats.lag_overlap_frac.as_ref()?, o.stats.lag_jaccard.as_ref()?)));
    let Some((all, overlap, jaccard)) = lags else { return Figure::missing(id, title, why) };
    let points = |values: &[f64]| values.iter().enumerate().skip(1).map(|(d, &v)| (d as f64, v * 100.0)).collect::<Vec<_>>();
    let line = |values: &[f64], color, dashed| Line { points: points(values), color, dashed, interval: None };
    let chance = vec![f64::from(all.k) / f64::from(all.experts); overlap.len()];
    let lines = [line(overlap, "--s1", false), line(jaccard, "--s3", false), line(&chance, "--s2", true)];
    let x = if all.stats.by_depth.is_some() { "distance, rows from parent to parent" } else { "distance, rows" };
    let picture = svg::curves(Frame { label: title, x, y: "%" }, &[], &lines, true);
    let ends = overlap.get(1).zip(overlap.last());
    let reading = ends.map_or_else(String::new, |(&first, &last)| {
        format!("From distance 1 to {} the shared part goes from {} to {} of k.", overlap.len() - 1, percent(first), percent(last))
    });
    let mut figure = Figure::new(id, title, picture, why).says(reading, windows(all), "%").legend([
        ("line", "--s1", "shared part of k".to_owned()),
        ("line", "--s3", "Jaccard index".to_owned()),
        ("dashed", "--s2", "independent uniform rows, of k".to_owned()),
    ]);
    let names: Vec<String> = (0..overlap.len()).map(|i| i.to_string()).collect();
    figure.table =
        Some(Grids::series(title, "distance", &names, &[("of k", some(overlap)), ("Jaccard", some(jaccard))], |v| Unit::Share.show(v)));
    figure
}

fn load_map(report: &Report) -> Figure {
    let (id, title) = ("load-map", "Load of each expert, by layer");
    let why = "Not known: the report has no loads by expert.";
    let counts: Vec<(&LayerReport, &Vec<u64>)> =
        layers(report).filter_map(|l| Some((l, l.load_by_expert.as_ref()?))).filter(|(_, c)| c.iter().any(|&n| n > 0)).collect();
    let experts = counts.iter().map(|(_, c)| c.len()).max().unwrap_or(0);
    if experts == 0 {
        return Figure::missing(id, title, why);
    }
    let group = experts.div_ceil(LOAD_COLUMNS.min(LOAD_CELLS / counts.len()).max(1));
    let names = (0..experts.div_ceil(group)).map(|i| match group {
        1 => i.to_string(),
        _ => format!("{}-{}", i * group, ((i + 1) * group).min(experts) - 1),
    });
    let row = |c: &Vec<u64>| {
        let mean = c.iter().sum::<u64>() as f64 / c.len() as f64;
        c.chunks(group).map(|part| Some(part.iter().sum::<u64>() as f64 / part.len() as f64 / mean)).collect::<Vec<_>>()
    };
    let grid = Grid {
        rows: counts.iter().map(|(l, _)| l.layer.to_string()).collect(),
        columns: names.collect(),
        values: counts.iter().map(|(_, c)| row(c)).collect(),
    };
    let high = grid.range().map_or(1.0, |r| r.1);
    let picture =
        svg::heat_map(Frame { label: title, x: "expert", y: "layer" }, &grid, (0.0, high), |v| format!("{} times the mean", two(v)));
    let hottest = counts.iter().filter_map(|(l, _)| Some((l.layer, l.load?.max_over_mean))).reduce(|a, b| if b.1 > a.1 { b } else { a });
    let reading = hottest.map_or_else(String::new, |(layer, times)| {
        let grouped = if group > 1 { format!(" (the picture shows means of {group} neighbours)") } else { String::new() };
        format!("The most loaded expert of all is in layer {layer}: {} times the mean of its layer{grouped}.", short(times))
    });
    let slots: u64 = counts.iter().map(|(_, c)| c.iter().sum::<u64>()).sum();
    let n = format!("n = {} routed slots of verify rows in {} layers", count(slots), counts.len());
    let mut figure = Figure::new(id, title, picture, why).says(reading, n, "load over the layer's mean");
    figure.ramp = Some(("0".to_owned(), format!("{} times the mean", short(high))));
    figure
}

fn load_by_layer(report: &Report) -> Figure {
    let (id, title) = ("load-layers", "Effective experts, by layer");
    let why = "Not known: no routed verify rows.";
    let of: Vec<(String, f64)> = layers(report).filter_map(|l| Some((l.layer.to_string(), l.load?.effective_experts))).collect();
    let experts = report.overall.as_ref().map_or(0, |o| o.experts);
    let picture = svg::bars(Frame { label: title, x: "layer", y: "effective experts" }, &of, short);
    let fewest = of.iter().cloned().reduce(|a, b| if b.1 < a.1 { b } else { a });
    let reading = fewest.map_or_else(String::new, |(layer, n)| {
        format!("Layer {layer} uses its {experts} experts least evenly: as {} equally loaded ones would.", short(n))
    });
    Figure::new(id, title, picture, why).says(reading, format!("n = {} layers", of.len()), "experts (2 to the entropy of the loads)")
}
