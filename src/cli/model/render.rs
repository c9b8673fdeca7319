//! `specprof model` as tables.

use super::summary::{Case, Summary};
use crate::metric::Unit;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use std::fmt::Write as _;

/// The whole result as text of at most `width` columns.
pub fn text(summary: &Summary, width: usize, color: bool) -> String {
    let mut out = String::new();
    head(&mut out, summary, width, color);
    components(&mut out, summary, width, color);
    decode(&mut out, summary, color);
    forecast(&mut out, summary, width, color);
    out
}

pub(super) fn title(out: &mut String, text: &str, color: bool) {
    let bold = if color { anstyle::Style::new().bold() } else { anstyle::Style::new() };
    let _ = writeln!(out, "{bold}{text}{bold:#}");
}

fn head(out: &mut String, s: &Summary, width: usize, color: bool) {
    let shape = &s.shape;
    title(out, &s.name, color);
    let layers = format!("{} layers: {} KDA, {} MLA; {} with experts", shape.layers, shape.kda_layers, shape.mla_layers, shape.moe_layers);
    let mtp = if shape.mtp_layers > 0 { "an MTP block" } else { "no MTP block" };
    let experts = format!("{} experts, {} a token, {} shared", shape.experts, shape.experts_per_token, shape.shared_experts);
    let (all, active) = (count(s.total_parameters as f64), count(s.active_parameters as f64));
    let mut lines = vec![
        format!("{layers}; {mtp}"),
        format!("{experts}; an expert is {} in {}", bytes(s.bytes_per_expert as f64), shape.quantisation),
        format!("{all} parameters ({active} active a token), {} in {} tensors", bytes(s.total_bytes as f64), s.tensors),
    ];
    let memory = &s.memory;
    if let (Some(total), Some(available), Some(fits)) = (memory.host_total_bytes, memory.host_available_bytes, memory.fits_host) {
        let verdict = if fits { "fit into" } else { "do not fit into" };
        let (available, total) = (bytes(available as f64), bytes(total as f64));
        lines.push(format!("the weights {verdict} host memory: {available} of {total} are available"));
    }
    if s.source == "synthetic" {
        lines.push("the weights are made up by a seeded function when it is recorded: what it says means nothing".to_owned());
    }
    if let Some(identity) = &s.identity {
        lines.push(format!("identity {}", identity.get(..16).unwrap_or(identity)));
    }
    for line in lines {
        indented(out, &line, width, "  ", "    ");
    }
}

/// A sentence in as many lines as it needs.
pub(super) fn indented(out: &mut String, text: &str, width: usize, first: &str, next: &str) {
    for (i, line) in wrap(text, width.saturating_sub(next.len())).iter().enumerate() {
        let _ = writeln!(out, "{}{line}", if i == 0 { first } else { next });
    }
}

fn components(out: &mut String, s: &Summary, width: usize, color: bool) {
    let _ = writeln!(out);
    title(out, "Components", color);
    let mut table = table(width, &["component", "parameters", "bytes", "share"]);
    for part in &s.components {
        let name = if part.module == "draft" { format!("mtp {}", part.name) } else { part.name.to_owned() };
        table.add_row([name, Unit::Count.show(part.parameters as f64), bytes(part.bytes as f64), Unit::Share.show(part.share_of_bytes)]);
    }
    table.add_row(["total".to_owned(), Unit::Count.show(s.total_parameters as f64), bytes(s.total_bytes as f64), Unit::Share.show(1.0)]);
    if s.shape.mtp_layers > 0 {
        table.add_row(["without MTP".to_owned(), Unit::Count.show(s.total_parameters_without_mtp as f64), String::new(), String::new()]);
    }
    finish(out, table);
}

fn decode(out: &mut String, s: &Summary, color: bool) {
    let d = &s.decode;
    let _ = writeln!(out);
    title(out, &format!("Bytes of a decode step at batch 1, context {}", d.context), color);
    let rows = [
        (format!("{} routed experts a layer", s.shape.experts_per_token), d.routed_bytes),
        ("other weights".to_owned(), d.other_bytes),
        ("KDA state, read and written".to_owned(), d.state_bytes),
        ("MLA cache".to_owned(), d.cache_bytes),
        ("total".to_owned(), d.total_bytes),
    ];
    for (name, value) in rows {
        let share = value as f64 / d.total_bytes.max(1) as f64;
        let _ = writeln!(out, "  {name:<30}{:>12}{:>9}", bytes(value as f64), Unit::Share.show(share));
    }
    if let Some(draft) = d.draft_pass_bytes {
        let _ = writeln!(out, "  {:<30}{:>12}", "a draft by the MTP block", bytes(draft as f64));
    }
}

fn forecast(out: &mut String, s: &Summary, width: usize, color: bool) {
    let _ = writeln!(out);
    title(out, "Forecast of a verify step: a model of bytes, not a measurement", color);
    // Two columns less where the screen would cut numbers in two.
    let timed = s.forecast.calibrated.as_ref();
    let drafts = s.decode.draft_pass_bytes.is_some() && width >= if timed.is_some() { 100 } else { 80 };
    let more = [timed.map(|_| "timed"), drafts.then_some("+drafts")].into_iter().flatten();
    let half = |union| ["union", "bytes", "verify"].map(|head| if head == "union" { union } else { head }).into_iter().chain(more.clone());
    let heads: Vec<&str> = std::iter::once("rows").chain(half("union")).chain(half("max union")).collect();
    let mut table = table(width, &heads);
    let case = |case: &Case| {
        let mut cells = vec![format!("{:.2}", case.union), bytes(case.bytes as f64), format!("{:.2}x", case.verify_ratio)];
        cells.extend(case.calibrated_ratio.map(|ratio| format!("{ratio:.2}x")));
        cells.extend(case.step_ratio.filter(|_| drafts).map(|ratio| format!("{ratio:.2}x")));
        cells
    };
    for row in &s.forecast.by_rows {
        let mut cells = vec![row.rows.to_string()];
        cells.extend(case(&row.uniform));
        cells.extend(case(&row.maximum));
        table.add_row(cells);
    }
    finish(out, table);
    let mut legend = "union: distinct routed experts a layer; verify: by the bytes of a decode step".to_owned();
    if drafts {
        legend.push_str("; +drafts: with the MTP block drafting rows - 1 tokens");
    }
    if timed.is_some() {
        legend.push_str("; timed: by the times of a table");
    }
    indented(out, &legend, width, "  ", "    ");
    if let Some(by) = timed {
        let text = format!(
            "timed by {} on {}, after {} tokens of context, in passes of up to {} rows: more are extrapolated",
            by.engine, by.device, by.context, by.most_rows
        );
        indented(out, &text, width, "  - ", "    ");
        by.warnings.iter().for_each(|warning| indented(out, warning, width, "  - ", "    "));
    }
    for assumption in s.forecast.assumptions {
        indented(out, assumption, width, "  - ", "    ");
    }
}

/// A table without lines, numbers to the right.
pub(super) fn table(width: usize, heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(u16::try_from(width.saturating_sub(1)).unwrap_or(u16::MAX));
    table.set_header(heads.iter().map(Cell::new));
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if i == 0 { 1 } else { 2 }, 0));
        if i > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

pub(super) fn finish(out: &mut String, table: Table) {
    for line in table.to_string().lines() {
        let _ = writeln!(out, " {}", line.trim_end());
    }
}

/// Lines of at most `width` columns, broken at spaces.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// `11.80 MB`: decimal units, as vendors quote bandwidth.
pub(super) fn bytes(value: f64) -> String {
    scaled(value, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// `127.49 B`: thousand, million, billion.
pub(super) fn count(value: f64) -> String {
    scaled(value, &["", "k", "M", "B", "T"]).trim_end().to_owned()
}

fn scaled(value: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (value, 0);
    // Below 999.995 so that two decimals never show 1000.00.
    while value >= 999.995 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} {}", units[0]) } else { format!("{value:.2} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::super::summary::Asked;
    use super::*;
    use crate::engine::presets::Preset;

    #[test]
    fn numbers_for_people() {
        assert_eq!((bytes(11_796_480.0), bytes(999.0), bytes(999_999.0)), ("11.80 MB".into(), "999 B".into(), "1.00 MB".into()));
        assert_eq!((count(127_486_405_600.0), count(12.0)), ("127.49 B".into(), "12".into()));
    }

    #[test]
    fn the_text_keeps_to_the_width_and_shows_the_totals() {
        let summary =
            Summary::of_preset(&Preset::find("ling-3.0-flash").unwrap(), Asked { context: 8192, rows: &[4, 9], prompt_rows: 512 }).unwrap();
        for width in [64, 80, 100, 160] {
            let text = text(&summary, width, false);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}:\n{text}");
            assert!(!text.contains('\u{1b}'));
            assert!(text.contains("127 486 405 600") && text.contains("124 414 211 552"), "{text}");
            assert!(text.contains("31.26  21.76 GB   2.09x") && text.contains("not a measurement"), "{width}:\n{text}");
        }
    }
}
