//! Unions over all layers, and the table of layers.

use super::{FEW, View, WORST, range_of};
use crate::metric::Unit;
use crate::metric::report::{LayerReport, Overall, WindowStats};
use crate::report::bars::spark;
use crate::report::shapes;
use crate::report::table::{self, Column};
use crate::report::tables::{self, LayerRow, Look};
use crate::report::words::counted;
use crate::report::wrap::paragraph;
use anstyle::AnsiColor;

impl View<'_> {
    pub(super) fn unions(&self, overall: &Overall) -> String {
        let stats = &overall.stats;
        let Some(union) = &stats.union else { return String::new() };
        let mut text = format!(
            "{:.2} experts{} over {}, p99 {}{}",
            union.mean,
            range_of(union.ci95),
            counted(stats.rows.into(), "row"),
            union.p99,
            of_uniform(stats).map_or_else(String::new, |(share, n)| format!(", {share} of uniform ({n:.2})"))
        );
        if let Some(lift) = stats.lift {
            text.push_str(&format!(", lift {lift:.2}"));
        }
        if let Some(lift) = stats.popularity_lift {
            let beyond = format!("{lift:.2} beyond popularity");
            text.push_str(&if stats.lift.is_some() { format!(" ({beyond})") } else { format!(", lift {beyond}") });
        }
        let mut out = self.lines("union", &text);
        let rows = |values: &[f64]| values.iter().map(|v| format!("{v:.2}")).collect::<Vec<_>>().join("  ");
        let mut by_row = format!("by row {}", rows(&stats.marginal));
        if let (Some(kept), Some(rejected)) = (stats.marginal_kept, stats.marginal_rejected) {
            by_row.push_str(&format!("; per kept row (anchor included) {kept:.2}, per rejected row {rejected:.2}"));
        }
        if let Some(wasted) = stats.wasted_mean {
            by_row.push_str(&format!("; {wasted:.2} wasted ({:.0} %)", wasted / union.mean * 100.0));
        }
        out.push_str(&self.lines("", &by_row));
        for line in shapes::trees(stats) {
            out.push_str(&self.lines("", &line));
        }
        for other in &overall.by_rows {
            let mean = other.union.as_ref().map(|u| u.mean);
            out.push_str(&self.lines(
                "",
                &format!(
                    "also {} of {}: union {}",
                    counted(self.windows_of(other.rows), "window"),
                    counted(other.rows.into(), "row"),
                    Unit::Experts.show_option(mean)
                ),
            ));
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

    /// Windows of this many rows: in how many steps, not in how many layers of them.
    fn windows_of(&self, rows: u16) -> u64 {
        let of = |l: &LayerReport| l.by_rows.iter().filter(|s| s.rows == rows).map(|s| s.windows).sum();
        self.report.layers.iter().map(of).max().unwrap_or(0)
    }

    /// Worst first when only a few are shown, else in order with the worst marked.
    pub(super) fn layers(&self) -> String {
        let mut ranked: Vec<&LayerReport> = self.report.layers.iter().filter(|l| l.stats.union.is_some()).collect();
        ranked.sort_by(|a, b| mean(b).total_cmp(&mean(a)).then(a.layer.cmp(&b.layer)));
        let marked = ranked.len().div_ceil(4).min(WORST);
        let worst: Vec<u16> = ranked.iter().take(marked).map(|l| l.layer).collect();
        let named = ranked.iter().take(marked).map(|l| format!("{} ({:.2})", l.layer, mean(l))).collect::<Vec<_>>().join(", ");
        let mut out = self.lines("worst", &format!("layer {named}: most experts, marked !"));
        out.push('\n');
        let shown: Vec<&LayerReport> =
            if self.options.per_layer { self.report.layers.iter().collect() } else { ranked.iter().take(FEW).copied().collect() };
        let red = AnsiColor::Red.on_default();
        let color = |row: usize, line: &str| match shown.get(row) {
            Some(layer) if worst.contains(&layer.layer) => self.paint(red, line),
            _ => line.to_owned(),
        };
        let table = table::render(self.columns(&shown, &worst), self.options.width, color);
        let doubtful = shown.iter().any(|l| tables::is_slope_doubtful(&LayerRow::of(l)));
        let note = table.lines().next().is_some_and(|titles| titles.contains("/expert")) && doubtful;
        out.push_str(&table);
        if note {
            let per_expert = if self.options.unicode { "µs/expert" } else { "us/expert" };
            let text = format!("{per_expert} -: the slope is not told apart from 0, or explains next to nothing of the times");
            out.push_str(&paragraph("", &text, self.options.width));
        }
        if shown.len() < self.report.layers.len() {
            out.push_str(&format!("{} of {} routed layers shown; all with --per-layer\n", shown.len(), self.report.layers.len()));
        }
        out
    }

    fn columns(&self, layers: &[&LayerReport], worst: &[u16]) -> Vec<Column> {
        let most = self.report.layers.iter().map(mean).fold(0.0, f64::max);
        let rows: Vec<LayerRow<'_>> = layers
            .iter()
            .map(|l| {
                let row = LayerRow::of(l);
                if worst.contains(&l.layer) { row.marked() } else { row }
            })
            .collect();
        tables::layers(&rows, Look { unicode: self.options.unicode, most: Some(most) })
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
