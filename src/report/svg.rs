//! Charts as SVG text. The only file that names the chart crate.
//!
//! Every colour is a CSS variable of the page (`--ink`, `--s1`, `--h0` to `--h20`), so that one picture serves
//! light and dark; every mark carries its value as a tooltip. A chart scales to the width that it is given.

use kuva::prelude::{BarPlot, ColorMap, Heatmap, Layout, LinePlot, Plot, ScatterPlot, Theme, TickFormat};
use std::fmt::Write;
use std::sync::Arc;

/// Steps of the scale of a heat map, `--h0` to `--h20`.
pub const SHADES: usize = 20;
/// Categories that are labelled on a vertical axis at most; of more, every n-th is.
const LABELS: usize = 24;
/// Characters of all labels of a horizontal axis at most, a gap counted for each label.
const CHARACTERS: usize = 52;
/// Characters' width of the gap behind a label.
const GAP: usize = 2;
/// Text sizes in a picture of [`WIDTH`]: still legible when it is shown at 340 pixels.
const TICK_SIZE: u32 = 13;
const LABEL_SIZE: u32 = 14;
/// Width of a chart in its own units.
pub const WIDTH: f64 = 460.0;
/// Height of a chart that does not need another one.
pub const HEIGHT: f64 = 260.0;

/// What a chart says about itself.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// For those who cannot see it.
    pub label: &'a str,
    /// The horizontal axis, with its unit.
    pub x: &'a str,
    /// The vertical axis, with its unit.
    pub y: &'a str,
}

/// One curve.
#[derive(Debug, Clone)]
pub struct Line<'a> {
    /// Its points.
    pub points: Vec<(f64, f64)>,
    /// The CSS variable of its colour, `--s1`.
    pub color: &'a str,
    /// Whether it is dashed.
    pub dashed: bool,
    /// Low and high of each point.
    pub interval: Option<Vec<(f64, f64)>>,
}

/// A grid of values: rows from top to bottom.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Names of the rows.
    pub rows: Vec<String>,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// `[rows][columns]`; what is unknown is drawn as such.
    pub values: Vec<Vec<Option<f64>>>,
}

impl Grid {
    /// Smallest and largest known value.
    pub fn range(&self) -> Option<(f64, f64)> {
        range(self.values.iter().flatten().copied().flatten())
    }
}

/// Smallest and largest of some numbers; `None` of none.
pub fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.into_iter().filter(|v| v.is_finite());
    finite.fold(None, |range, v| Some(range.map_or((v, v), |(low, high): (f64, f64)| (low.min(v), high.max(v)))))
}

/// The shade of a value on a scale from `low` to `high`, 0 to [`SHADES`].
pub fn shade(value: f64, low: f64, high: f64) -> usize {
    let share = if high > low { ((value - low) / (high - low)).clamp(0.0, 1.0) } else { 1.0 };
    (share * SHADES as f64).round() as usize
}

/// A heat map, shaded from `low` to `high`. `show` makes the tooltip's number. `None` without any value.
pub fn heat_map(frame: Frame<'_>, grid: &Grid, (low, high): (f64, f64), show: impl Fn(f64) -> String) -> Option<String> {
    let (min, max) = grid.range()?;
    let color = move |share: f64| {
        if share.is_finite() { format!("var(--h{})", shade(min + share * (max - min), low, high)) } else { "var(--unknown)".to_owned() }
    };
    // The crate counts rows from the bottom.
    let data = grid.values.iter().rev().map(|row| row.iter().map(|v| v.unwrap_or(f64::NAN)).collect::<Vec<_>>());
    let tips = grid.values.iter().zip(&grid.rows).rev().flat_map(|(row, name)| {
        let tip = |(value, column): (&Option<f64>, &String)| {
            format!("{} {name}, {} {column}: {}", frame.y, frame.x, value.map_or_else(|| "unknown".to_owned(), &show))
        };
        row.iter().zip(&grid.columns).map(tip).collect::<Vec<_>>()
    });
    let map =
        Heatmap::new().with_data(data).with_color_map(ColorMap::Custom(Arc::new(color))).with_tooltip_labels(tips).with_cell_size(1.0);
    let plots: Vec<Plot> = vec![map.into()];
    let cell = (320.0 / grid.rows.len().max(1) as f64).clamp(9.0, 30.0);
    let mut layout = base(&plots, frame, 70.0 + cell * grid.rows.len() as f64).with_show_grid(false);
    layout = layout.with_x_categories(beside(&grid.columns)).with_y_categories(thinned(&grid.rows, LABELS).into_iter().rev().collect());
    layout.show_colorbar = false;
    Some(finish(plots, layout, frame))
}

/// Curves, and bars behind them. `None` without any point.
pub fn curves(frame: Frame<'_>, bars: &[(f64, f64)], lines: &[Line<'_>], y_from_zero: bool) -> Option<String> {
    let points = || lines.iter().flat_map(|l| l.points.iter().copied()).chain(bars.iter().copied());
    let ends = lines.iter().flat_map(|l| l.interval.iter().flatten()).flat_map(|&(low, high)| [low, high]);
    let (x_low, x_high) = range(points().map(|p| p.0))?;
    let (y_low, y_high) = range(points().map(|p| p.1).chain(ends))?;
    let mut plots: Vec<Plot> = Vec::new();
    if !bars.is_empty() {
        let step = bars.windows(2).map(|w| w[1].0 - w[0].0).fold(f64::INFINITY, f64::min);
        let half = if step.is_finite() && step > 0.0 { step / 2.0 } else { 0.5 };
        let edges: Vec<f64> = bars.iter().map(|b| b.0 - half).chain(bars.last().map(|b| b.0 + half)).collect();
        let tips: Vec<String> = bars.iter().map(|(x, y)| format!("{} {x}: {} {y}", frame.x, frame.y)).collect();
        let counts = bars.iter().map(|b| b.1).collect();
        plots.push(kuva::prelude::Histogram::from_bins(edges, counts).with_color("var(--bar)").with_tooltip_labels(tips).into());
    }
    for line in lines {
        let color = format!("var({})", line.color);
        let mut plot = LinePlot::new().with_data(line.points.iter().copied()).with_color(color.clone()).with_stroke_width(2.0);
        if line.dashed {
            plot = plot.with_dashed();
        }
        if let Some(interval) = &line.interval {
            plot = plot.with_band(interval.iter().map(|i| i.0), interval.iter().map(|i| i.1));
        }
        plots.push(plot.into());
        let tips: Vec<String> = line.points.iter().map(|(x, y)| format!("{} {}: {} {}", frame.x, short(*x), frame.y, short(*y))).collect();
        let upright = line.points.len() == 2 && line.points[0].0 == line.points[1].0;
        if line.points.len() <= 64 && !upright {
            let dots = ScatterPlot::new().with_data(line.points.iter().copied()).with_color(color).with_size(3.0);
            plots.push(dots.with_tooltip_labels(tips).into());
        }
    }
    let pad = if y_high > y_low { (y_high - y_low) * 0.08 } else { y_high.abs().max(1.0) * 0.1 };
    let bottom = if y_from_zero && y_low >= 0.0 { 0.0 } else { y_low - pad };
    let margin = if bars.is_empty() { ((x_high - x_low) * 0.03).max(0.02) } else { 1.0 };
    let mut layout = base(&plots, frame, HEIGHT).with_x_axis_min(x_low - margin).with_x_axis_max(x_high + margin);
    if lines.iter().all(|l| l.points.windows(2).all(|w| w[0].0 == w[1].0 || w[0].0.fract() == 0.0)) {
        // Rows, drafts, experts, layers: there is nothing between two of them.
        layout = layout.with_x_tick_step(((x_high - x_low) / 9.0).ceil().max(1.0));
    }
    Some(finish(plots, layout.with_y_axis_min(bottom).with_y_axis_max(y_high + pad), frame))
}

/// One bar for each name. `show` makes the tooltip's number. `None` without any.
pub fn bars(frame: Frame<'_>, bars: &[(String, f64)], show: impl Fn(f64) -> String) -> Option<String> {
    if bars.is_empty() {
        return None;
    }
    let names: Vec<String> = beside(&bars.iter().map(|b| escape(&b.0)).collect::<Vec<_>>());
    let tips: Vec<String> = bars.iter().map(|(name, value)| format!("{} {name}: {}", frame.x, show(*value))).collect();
    let one = |plot: BarPlot, (name, bar): (&String, &(String, f64))| plot.with_colored_bar(name.clone(), bar.1, "var(--s1)");
    let plot = names.iter().zip(bars).fold(BarPlot::new(), one);
    let plots: Vec<Plot> = vec![plot.with_tooltip_labels(tips).into()];
    let layout = base(&plots, frame, HEIGHT).with_y_axis_min(0.0);
    Some(finish(plots, layout, frame))
}

/// From one total to another by signed parts. `show` makes the tooltip's number.
pub fn waterfall(frame: Frame<'_>, from: (&str, f64), parts: &[(String, f64)], to: &str, show: impl Fn(f64) -> String) -> String {
    // Each bar stands on an invisible one; both have the tooltip.
    let mut tips = Vec::new();
    let mut plot = BarPlot::new().with_stacked();
    let mut bar = |name: &str, low: f64, height: f64, color: &str, tip: String| {
        plot = std::mem::take(&mut plot).with_group(escape(name), vec![(low, "none"), (height, color)]);
        tips.extend([tip.clone(), tip]);
    };
    bar(from.0, 0.0, from.1, "var(--s1)", format!("{}: {}", from.0, show(from.1)));
    let mut at = from.1;
    for (name, value) in parts {
        let (color, sign) = if *value >= 0.0 { ("var(--worse)", "+") } else { ("var(--better)", "") };
        bar(name, at.min(at + value), value.abs(), color, format!("{name}: {sign}{}", show(*value)));
        at += value;
    }
    bar(to, 0.0, at, "var(--s1)", format!("{to}: {}", show(at)));
    let plots: Vec<Plot> = vec![plot.with_tooltip_labels(tips).into()];
    let layout = base(&plots, frame, HEIGHT + 50.0).with_y_axis_min(0.0).with_x_tick_rotate(-40.0);
    finish(plots, layout, frame)
}

/// Points of one kind and the line fitted to them.
#[derive(Debug, Clone)]
pub struct Cloud<'a> {
    /// Its points.
    pub points: Vec<(f64, f64)>,
    /// The CSS variable of its colour.
    pub color: &'a str,
    /// Ends of the line.
    pub line: Option<[(f64, f64); 2]>,
}

/// Points with straight lines through them. `None` without any.
pub fn scatter(frame: Frame<'_>, clouds: &[Cloud<'_>]) -> Option<String> {
    if clouds.iter().all(|c| c.points.is_empty()) {
        return None;
    }
    let mut plots: Vec<Plot> = Vec::new();
    for cloud in clouds {
        let color = format!("var({})", cloud.color);
        let tips = cloud.points.iter().map(|(x, y)| format!("{} {}: {} {}", frame.x, short(*x), frame.y, short(*y))).collect::<Vec<_>>();
        let dots = ScatterPlot::new().with_data(cloud.points.iter().copied()).with_color(color.clone()).with_size(3.0);
        plots.push(dots.with_marker_opacity(0.8).with_tooltip_labels(tips).into());
        if let Some(line) = cloud.line {
            plots.push(LinePlot::new().with_data(line).with_color(color).with_stroke_width(1.5).into());
        }
    }
    let layout = base(&plots, frame, HEIGHT);
    Some(finish(plots, layout, frame))
}

fn base(plots: &[Plot], frame: Frame<'_>, height: f64) -> Layout {
    let ink = || "var(--ink)".to_owned();
    let theme = Theme {
        background: "none".into(),
        axis_color: "var(--axis)".into(),
        grid_color: "var(--grid)".into(),
        tick_color: "var(--axis)".into(),
        text_color: ink(),
        legend_bg: "none".into(),
        legend_border: "none".into(),
        pie_leader: ink(),
        box_median: ink(),
        violin_border: ink(),
        colorbar_border: ink(),
        font_family: None,
        show_grid: true,
    };
    let mut layout = Layout::auto_from_plots(plots).with_width(WIDTH).with_height(height).with_theme(theme);
    layout = layout.with_x_label(escape(frame.x)).with_y_label(escape(frame.y)).with_tick_size(TICK_SIZE).with_label_size(LABEL_SIZE);
    layout.show_legend = false;
    layout.with_tick_format(TickFormat::Custom(Arc::new(short)))
}

/// The picture with a view box instead of a size, and a name for those who cannot see it.
fn finish(plots: Vec<Plot>, layout: Layout, frame: Frame<'_>) -> String {
    let svg = kuva::render_to_svg(plots, layout);
    let attribute = |name: &str| {
        let at = svg.find(&format!(" {name}=\""))? + name.len() + 3;
        svg.get(at..)?.split('"').next()?.parse::<f64>().ok()
    };
    let (width, height) = (attribute("width").unwrap_or(WIDTH), attribute("height").unwrap_or(HEIGHT));
    let body = svg.split_once('>').map_or("", |(_, body)| body);
    let mut out = String::with_capacity(svg.len() + 200);
    let label = attribute_text(frame.label);
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" fill=\"var(--ink)\" aria-label=\"{label}\">"
    );
    let (before, after) =
        body.split_once("<!--").and_then(|(before, rest)| Some((before, rest.split_once("-->")?.1))).unwrap_or(("", body));
    out.push_str(&closed(&[before, after].concat()));
    out
}

/// The crate (0.6.0) does not close the groups that hold upright bars and their tooltips: each is closed behind its mark.
fn closed(svg: &str) -> String {
    const OPEN: &str = "<g class=\"tt\">";
    if svg.matches("<g ").count() == svg.matches("</g>").count() {
        return svg.to_owned();
    }
    let mut parts = svg.split(OPEN);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (mark, rest) = part.split_at(part.find("/>").map_or(part.len(), |at| at + 2));
        out.extend([OPEN, mark, "</g>", rest]);
    }
    out
}

/// Labels of which only every n-th is not empty, so that at most `most` are left.
fn thinned(labels: &[String], most: usize) -> Vec<String> {
    let every = labels.len().div_ceil(most.max(1)).max(1);
    labels.iter().enumerate().map(|(i, label)| if i % every == 0 { label.clone() } else { String::new() }).collect()
}

/// Labels of a horizontal axis: as many as fit beside each other.
fn beside(labels: &[String]) -> Vec<String> {
    let widest = labels.iter().map(|l| l.chars().count()).max().unwrap_or(0);
    thinned(labels, CHARACTERS / (widest + GAP))
}

/// A dollar sign would begin a formula.
fn escape(text: &str) -> String {
    text.replace('$', "\\$")
}

fn attribute_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number in few digits.
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == v.trunc() => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 => 2,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Frame<'_> = Frame { label: "a <b> \"c\"", x: "row", y: "layer" };

    fn grid() -> Grid {
        let names = |n: usize| (0..n).map(|i| i.to_string()).collect();
        Grid { rows: names(2), columns: names(3), values: vec![vec![Some(1.0), Some(2.0), None], vec![Some(3.0), Some(4.0), Some(5.0)]] }
    }

    #[test]
    fn shades_span_the_scale() {
        assert_eq!((shade(1.0, 1.0, 5.0), shade(5.0, 1.0, 5.0), shade(3.0, 1.0, 5.0)), (0, SHADES, SHADES / 2));
        assert_eq!((shade(9.0, 1.0, 5.0), shade(-9.0, 1.0, 5.0), shade(2.0, 2.0, 2.0)), (SHADES, 0, SHADES));
        assert_eq!(range([2.0, f64::NAN, -1.0]), Some((-1.0, 2.0)));
    }

    #[test]
    fn a_heat_map_has_every_value_its_shade_and_no_colour_of_its_own() {
        let svg = heat_map(FRAME, &grid(), (1.0, 5.0), |v| format!("{v} experts")).unwrap();
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 460 "), "{svg}");
        assert!(svg.contains("aria-label=\"a &lt;b&gt; &quot;c&quot;\""), "{svg}");
        for (row, column, value, shade) in [(0, 0, "1 experts", "--h0"), (1, 2, "5 experts", "--h20"), (0, 2, "unknown", "--unknown")] {
            let tip = svg.find(&format!("layer {row}, row {column}: {value}<")).unwrap_or_else(|| panic!("{svg}"));
            assert!(svg[tip..].split("fill=\"").nth(1).unwrap().starts_with(&format!("var({shade})")), "{svg}");
        }
        assert!(!svg.contains("fill=\"#") && !svg.contains("stroke=\"#"), "{svg}");
        assert_eq!(heat_map(FRAME, &Grid { values: vec![vec![None]], ..grid() }, (0.0, 1.0), short), None);
    }

    #[test]
    fn curves_bars_and_points_are_drawn_or_refused() {
        let line = Line { points: vec![(0.0, 1.0), (1.0, 2.5)], color: "--s1", dashed: true, interval: Some(vec![(0.5, 1.5), (2.0, 3.0)]) };
        let svg = curves(FRAME, &[(0.0, 3.0), (1.0, 4.0)], &[line], true).unwrap();
        assert!(svg.contains("var(--s1)") && svg.contains("row 1: layer 2.5") && svg.contains("row 1: layer 4"), "{svg}");
        assert_eq!(curves(FRAME, &[], &[], true), None);
        let below = Line { points: vec![(0.0, -1.0), (1.0, 2.5)], color: "--s1", dashed: false, interval: None };
        assert!(curves(FRAME, &[], &[below], true).unwrap().contains(">-1<"), "what lies below zero is not cut off");
        let svg = bars(FRAME, &[("a$b$".into(), 2.0), ("c".into(), 0.0)], short).unwrap();
        assert!(svg.contains("row a$b$: 2") && svg.matches("<g").count() == svg.matches("</g>").count(), "{svg}");
        assert_eq!((bars(FRAME, &[], short), scatter(FRAME, &[])), (None, None));
        let cloud = Cloud { points: vec![(1.0, 2.0), (2.0, 3.0)], color: "--s2", line: Some([(1.0, 2.0), (2.0, 3.0)]) };
        let svg = scatter(FRAME, &[cloud]).unwrap();
        assert!(svg.contains("var(--s2)") && svg.contains("row 2: layer 3"), "{svg}");
        let svg = waterfall(FRAME, ("decode", 10.0), &[("experts".into(), 5.0), ("<i>".into(), -1.0)], "verify", short);
        assert!(
            svg.contains("experts: +5") && svg.contains("verify: 14") && svg.contains("&lt;i&gt;: -1") && !svg.contains("<i>"),
            "{svg}"
        );
    }

    #[test]
    fn numbers_are_short_and_labels_few() {
        assert_eq!([0.0, 12.0, 12.34, 0.5, 0.00123, 1234.5].map(short), ["0", "12", "12.3", "0.5", "0.0012", "1234"]);
        let labels: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        let few = thinned(&labels, LABELS);
        assert_eq!((few.len(), few.iter().filter(|l| !l.is_empty()).count(), few[5].as_str()), (100, 20, "5"));
        // Two digits and a gap: 14 fit, and every eighth of a hundred is shown.
        assert_eq!(beside(&labels).iter().filter(|l| !l.is_empty()).count(), 13);
    }
}
