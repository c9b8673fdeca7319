//! A cost table as text, and as the step rates that a planner of draft lengths looks up.

use super::table::{Column, render};
use super::wrap::{paragraph, plain, titled};
use super::{TextOptions, json};
use crate::metric::costs::{Cell, CostTable, KernelCost, Timed, TimedBy};
use crate::metric::{Interval, Unit};
use crate::trace::manifest::Warning;
use serde::Serialize;

/// The value of `schema` in every table of step rates of this version.
pub const RATES_SCHEMA: &str = "specprof.sps/1";

/// What a table's passes cost by experts and rows, in one line each; made by the analysis.
#[derive(Debug, Clone, PartialEq)]
pub struct Slopes {
    /// µs for each distinct expert in one layer.
    pub per_expert: f64,
    /// µs for each further row.
    pub per_row: f64,
    /// Share of the variance that the two explain.
    pub r2: Option<f64>,
    /// 95 % intervals of the two; `None` where a time has none.
    pub ci95: Option<[Interval; 2]>,
}

/// A time and half its interval as a share of it; the interval's ends where half of it is as much as the time, which would be below 0.
fn us(time: Timed) -> String {
    let show = |us: f64| Unit::Microseconds.show(us);
    let spread = time.ci95.map_or_else(String::new, |[low, high]| match 50.0 * (high - low) / time.us {
        half if half < 100.0 => format!(" ±{half:.0} %"),
        _ => format!(" ({} to {})", show(low), show(high)),
    });
    show(time.us) + &spread
}

/// A slope's interval in brackets.
fn between(interval: Option<Interval>) -> String {
    let us = |us: f64| Unit::Microseconds.show(us);
    interval.map_or_else(String::new, |[low, high]| format!(" (95 %: {} to {})", us(low), us(high)))
}

/// The warnings, numbered, below everything else.
fn warnings(table: &CostTable, options: &TextOptions) -> String {
    let mut out = String::new();
    for (i, warning) in table.warnings.iter().enumerate() {
        out.push_str(if i == 0 { "\n" } else { "" });
        out.push_str(&paragraph(&format!("[{}] ", i + 1), &plain(&format!("{}: {}", warning.code, warning.message)), options.width));
    }
    out
}

/// The table: facts, what follows, a row a cell.
pub fn text(table: &CostTable, slopes: Result<&Slopes, &str>, options: &TextOptions) -> String {
    let line = |title: &str, text: &str| titled(title, text, options.width, options.color);
    let m = &table.model;
    let mut out = line(
        "calibrated",
        &format!(
            "{}, {} routed layers of {} experts, top {}, {}; {} on {}",
            plain(&m.name),
            m.moe_layers,
            m.experts,
            m.experts_per_token,
            plain(&m.quantisation),
            plain(&table.engine),
            plain(&table.device)
        ),
    );
    if m.synthetic {
        out += &line("", "the model's weights are made up: what it costs is what one of its shape and storage costs");
    }
    if table.emulated {
        return out + &counts(table, options);
    }
    let passes = format!(
        "medians of {} passes a cell after {} tokens of context, experts drawn and not routed, ± half the 95 % interval{}",
        table.repeats,
        table.context_len,
        match table.timed_by {
            Some(TimedBy::Cupti) => "; times of the device's kernels by CUPTI, inside graphs",
            Some(TimedBy::Events) => "; times of the device by an event after each kernel, without graphs: gaps count with the kernels",
            Some(TimedBy::Host) | None => "",
        }
    );
    out += &line("", &passes);
    let decode = table.decode().and_then(|cell| cell.pass);
    if let Some(decode) = decode {
        let draft = table.draft.map_or_else(|| "; no block to draft with".to_owned(), |draft| format!("; a draft {}", us(draft)));
        out += &line("decode", &format!("{} a pass of 1 row{draft}", us(decode)));
    }
    let cost = match slopes {
        Ok(s) => format!(
            "{}{} for each distinct expert in one layer, {}{} a pass, of all layers, for each further row{}",
            Unit::Microseconds.show(s.per_expert),
            between(s.ci95.map(|both| both[0])),
            Unit::Microseconds.show(s.per_row),
            between(s.ci95.map(|both| both[1])),
            s.r2.map_or_else(String::new, |r2| format!(
                " (least squares over {} cells, weighed by their intervals, R² {r2:.2})",
                table.cells.len()
            ))
        ),
        Err(why) => format!("for each expert unknown: {why}"),
    };
    out += &line("cost", &cost);
    out.push('\n');
    let cells = &table.cells;
    let part = |name: &'static str| {
        cells.iter().map(move |c| c.components.get(name).map_or_else(|| "-".to_owned(), |t| Unit::Microseconds.show(t.us)))
    };
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let ratio = |c: &Cell| or_dash(c.pass.zip(decode).map(|(pass, decode)| format!("{:.2}", pass.us / decode.us)));
    let columns = vec![
        Column::new("rows").cells(cells.iter().map(|c| c.rows.to_string())),
        Column::new("experts").cells(cells.iter().map(|c| c.union.to_string())),
        Column::new("pass").cells(cells.iter().map(|c| or_dash(c.pass.map(us)))),
        Column::new("of decode").cells(cells.iter().map(ratio)),
        Column::new("experts'").cells(part("experts")),
        Column::new("kda").optional(2).cells(part("kda")),
        Column::new("mla").optional(2).cells(part("mla")),
        Column::new("head").optional(1).cells(part("head")),
    ];
    out + &render(columns, options.width, |_, cell| cell.to_owned()) + &kernels(table, options) + &warnings(table, options)
}

/// The kernels of the decode pass and of the widest pass, where they were told apart.
fn kernels(table: &CostTable, options: &TextOptions) -> String {
    let widest = table.cells.iter().max_by_key(|c| (c.rows, c.union)).filter(|c| c.rows > 1);
    let shown = table.decode().into_iter().chain(widest).filter(|c| !c.by_kernel.is_empty());
    shown.map(|cell| kernels_of(cell, table.stream_gb_per_s, options)).collect()
}

fn kernels_of(cell: &Cell, rate: Option<f64>, options: &TextOptions) -> String {
    let floor = rate.map_or_else(
        || "what they have to move, each byte once".to_owned(),
        |rate| format!("floor: what their bytes take at the {rate:.0} GB/s at which the device reads"),
    );
    let head = format!("of a pass of {} rows and {} experts a layer; {floor}", cell.rows, cell.union);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut all: Vec<&KernelCost> = cell.by_kernel.iter().collect();
    // The longest first; without times those that move most.
    all.sort_by(|a, b| {
        let key = |k: &KernelCost| (k.time.map_or(0.0, |time| time.us), k.bytes);
        key(b).0.total_cmp(&key(a).0).then(key(b).1.cmp(&key(a).1))
    });
    let floor = |k: &KernelCost| rate.and_then(|rate| k.floor_us(rate));
    let reached = |k: &KernelCost| Some(format!("{:.0} %", 100.0 * floor(k)? / k.time?.us));
    let columns = vec![
        Column::new("kernel").left().cells(all.iter().map(|k| plain(&k.kernel))),
        Column::new("for").left().cells(all.iter().map(|k| plain(&k.component))),
        Column::new("launches").cells(all.iter().map(|k| k.launches.to_string())),
        Column::new("time").cells(all.iter().map(|k| or_dash(k.time.map(us)))),
        Column::new("bytes").cells(all.iter().map(|k| or_dash(k.bytes.map(|bytes| Unit::Bytes.show(bytes as f64))))),
        Column::new("floor").cells(all.iter().map(|k| or_dash(floor(k).map(|us| Unit::Microseconds.show(us))))),
        Column::new("of the rate").cells(all.iter().map(|k| or_dash(reached(k)))),
    ];
    format!("\n{}\n{}", titled("kernels", &head, options.width, options.color), render(columns, options.width, |_, cell| cell.to_owned()))
}

/// What an emulated device shows: which kernels a pass has, and no times.
fn counts(table: &CostTable, options: &TextOptions) -> String {
    let text = "the device is the tests' emulator: kernels are counted, and there are no times";
    let mut out = titled("emulated", text, options.width, options.color);
    out.push('\n');
    let of = |c: &Cell, name: &str| c.kernels.get(name).copied().unwrap_or(0).to_string();
    let columns = vec![
        Column::new("rows").cells(table.cells.iter().map(|c| c.rows.to_string())),
        Column::new("experts").cells(table.cells.iter().map(|c| c.union.to_string())),
        Column::new("kernels").cells(table.cells.iter().map(|c| c.kernels.values().sum::<u32>().to_string())),
        Column::new("experts'").cells(table.cells.iter().map(|c| of(c, "experts"))),
        Column::new("kda").optional(2).cells(table.cells.iter().map(|c| of(c, "kda"))),
        Column::new("mla").optional(2).cells(table.cells.iter().map(|c| of(c, "mla"))),
        Column::new("head").optional(1).cells(table.cells.iter().map(|c| of(c, "head"))),
    ];
    out + &render(columns, options.width, |_, cell| cell.to_owned()) + &kernels(table, options)
}

/// A table's step rates.
#[derive(Debug, Serialize)]
struct Rates<'a> {
    schema: &'static str,
    model: &'a str,
    device: &'a str,
    engine: &'a str,
    context_len: u32,
    /// Steps a second of plain decoding.
    decode_steps_per_s: Option<f64>,
    rates: Vec<Rate>,
    /// What limits the times that the rates are of.
    warnings: Vec<Warning>,
}

/// Passes a second of some rows and distinct experts a layer.
#[derive(Debug, Serialize)]
struct Rate {
    rows: u16,
    union: u16,
    steps_per_s: f64,
    ci95: Option<[f64; 2]>,
    /// Its time in decode passes.
    verify_ratio: Option<f64>,
}

/// SPS(rows, union) = 10^6 / µs of a pass, as JSON; the interval's ends change places. Cells without a time are left out.
/// `warnings` are the analysis', whatever those of the table's own file say.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn rates(table: &CostTable, warnings: Vec<Warning>) -> Result<String, serde_json::Error> {
    let decode = table.decode().and_then(|c| Some(c.pass?.us));
    let rate = |c: &Cell| {
        let pass = c.pass?;
        Some(Rate {
            rows: c.rows,
            union: c.union,
            steps_per_s: 1e6 / pass.us,
            ci95: pass.ci95.map(|[low, high]| [1e6 / high, 1e6 / low]),
            verify_ratio: decode.map(|decode| pass.us / decode),
        })
    };
    json::pretty(&Rates {
        schema: RATES_SCHEMA,
        model: &table.model.name,
        device: &table.device,
        engine: &table.engine,
        context_len: table.context_len,
        decode_steps_per_s: decode.map(|us| 1e6 / us),
        rates: table.cells.iter().filter_map(rate).collect(),
        warnings,
    })
}

/// The table as JSON.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn table_json(table: &CostTable) -> Result<String, serde_json::Error> {
    json::pretty(table)
}
