//! `specprof inspect`: what a trace holds, and whether it keeps the format's rules.

use super::exit::Failure;
use super::text_or_json::TextOrJson;
use super::traces::{self, Kind};
use super::ui::{Output, Ui};
use crate::metric::{Unit, counted_plain};
use crate::report::wrap::paragraph;
use crate::trace::event::UNKNOWN_TOKEN;
use crate::trace::manifest::Warning;
use crate::trace::reader::TableSize;
use crate::trace::validate::{Check, Validation, validate};
use crate::trace::{Manifest, Phase, RequestEvent, Steps, Trace};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

/// Show what a trace holds
///
/// Prints where the trace comes from, its model, its tables and the number of steps of each phase.
/// With --check every rule of the format is verified: references, counts, order, hashes.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:
  specprof inspect traces/run1
  specprof inspect traces/run1 --check
  specprof inspect traces/run1 --json | jq .totals")]
pub struct Args {
    /// Trace directory
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Verify the trace; exit 1 when a check fails
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    shape: TextOrJson,
    /// Where to write to; `-` is stdout
    #[arg(short, long, value_name = "FILE", default_value = "-", help_heading = "Output")]
    output: PathBuf,
}

/// Everything that is shown; with `--json`, as it is.
#[derive(Serialize)]
struct Inspection<'a> {
    schema: &'static str,
    manifest: &'a Manifest,
    tables: Vec<TableSize>,
    totals: Totals,
    warnings: &'a [Warning],
    #[serde(skip_serializing_if = "Option::is_none")]
    relaxed: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checks: Option<Vec<Check>>,
}

/// Sums over the trace.
#[derive(Serialize)]
struct Totals {
    /// Requests with a step, ended or not.
    requests: u64,
    /// Requests that have ended, by how they did.
    finished: BTreeMap<&'static str, u64>,
    steps: u64,
    prefill_steps: u64,
    decode_steps: u64,
    verify_steps: u64,
    rows: u64,
    tokens_emitted: u64,
    lowest_token: Option<u32>,
    highest_token: Option<u32>,
    bytes: u64,
    /// Bytes of `routes` for one row of a pass through all layers; `null` without routes.
    route_bytes_per_row: Option<f64>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let path = traces::one(&args.trace, Kind::Traces, ui)?;
    let output = Output::open(Some(&args.output))?.not_inside(&path)?;
    let trace = Trace::open(&path)?;
    let tables = trace.tables();
    let totals = Totals::of(&trace.steps()?, &trace.requests()?, &tables);
    let validation = args.check.then(|| validate(&trace)).transpose()?;
    let failed = validation.as_ref().map_or(0, Validation::failed);
    let count = validation.as_ref().map_or(0, |v| v.checks.len());
    let (relaxed, checks) = validation.map(|v| (v.relaxed, v.checks)).unzip();
    let inspection = Inspection {
        schema: "specprof.inspect/1",
        manifest: trace.manifest(),
        tables,
        totals,
        warnings: trace.warnings(),
        relaxed,
        checks,
    };
    let text = if args.shape.json() {
        let json = serde_json::to_string_pretty(&inspection).map_err(|e| Failure::Input(format!("cannot render JSON: {e}")))?;
        format!("{json}\n")
    } else {
        inspection.text(&trace, if matches!(output, Output::Stdout) { ui.width() } else { 100 })
    };
    output.finish(ui, &text)?;
    if failed > 0 {
        return Err(Failure::Check(format!("{}: {failed} of {count} checks failed", path.display())));
    }
    Ok(())
}

impl Totals {
    fn of(steps: &Steps, requests: &[RequestEvent], tables: &[TableSize]) -> Self {
        let mut ids: Vec<u32> = steps.request_id.iter().copied().chain(requests.iter().map(|r| r.request_id)).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut finished = BTreeMap::new();
        for request in requests {
            *finished.entry(request.finish_reason.as_str()).or_default() += 1;
        }
        let of = |name: &str| tables.iter().find(|t| t.name == name);
        let phase = |wanted: Phase| steps.phase.iter().filter(|&&p| p == wanted).count() as u64;
        let tokens = steps.emitted_tokens.values();
        let known = || tokens.iter().copied().filter(|&token| token != UNKNOWN_TOKEN);
        let rows: u64 = steps.rows.iter().copied().map(u64::from).sum();
        let routes = of("routes").filter(|t| t.rows > 0 && rows > 0);
        Self {
            requests: ids.len() as u64,
            finished,
            steps: steps.len() as u64,
            prefill_steps: phase(Phase::Prefill),
            decode_steps: phase(Phase::Decode),
            verify_steps: phase(Phase::Verify),
            rows,
            tokens_emitted: tokens.len() as u64,
            lowest_token: known().min(),
            highest_token: known().max(),
            bytes: tables.iter().map(|t| t.bytes).sum(),
            route_bytes_per_row: routes.map(|t| t.bytes as f64 / rows as f64),
        }
    }
}

/// Words of a trace come from anywhere: nothing in them may steer the terminal.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

impl Inspection<'_> {
    /// Prose is broken at `width` columns; a word that is wider, as a hash, stays whole.
    fn text(&self, trace: &Trace, width: usize) -> String {
        let (m, t) = (self.manifest, &self.totals);
        // A path is no prose: its blanks are part of it.
        let mut out = format!("{:<16}{}\n", "trace", plain(&trace.dir().display().to_string()));
        let mut fact = |name: &str, value: String| {
            out.push_str(&paragraph(&format!("{name:<16}"), &plain(&value), width));
        };
        fact("format", format!("{}, written by {}", m.format_version, m.written_by));
        fact(
            "state",
            if m.complete {
                "complete".into()
            } else {
                format!("incomplete: {}", m.incomplete_reason.as_deref().unwrap_or("no reason given"))
            },
        );
        let model = &m.model;
        fact("model", format!("{} ({})", model.name, model.architecture));
        fact(
            "shape",
            format!(
                "{}, {} of them routed; {} of {} experts per token and {} shared; hidden {}, expert {}",
                counted_plain(model.layers, "layer"),
                model.moe_layers.len(),
                if model.experts_per_token == 0 { "unknown".to_owned() } else { model.experts_per_token.to_string() },
                model.experts_words(),
                known(model.shared_experts),
                known(model.hidden_size),
                known(model.expert_size)
            ),
        );
        fact(
            "routed layers",
            ranges(&model.moe_layers)
                + &if model.draft_layers.is_empty() { String::new() } else { format!("; draft {}", ranges(&model.draft_layers)) },
        );
        fact(
            "expert",
            format!(
                "{} as {}",
                model.bytes_per_expert.map_or_else(|| "unknown bytes".into(), |n| Unit::Bytes.show(n as f64)),
                model.quantisation
            ),
        );
        fact("drafter", format!("{}, {} drafts per step", m.drafter.label(), known(m.drafter.draft_len)));
        let chosen = match &m.sampling {
            None => "unknown".into(),
            Some(s) if s.temperature == 0.0 => format!("greedy, seed {}", s.seed),
            Some(s) => format!("temperature {}, top-p {}, top-k {}, seed {}", s.temperature, s.top_p, s.top_k, s.seed),
        };
        fact("sampling", chosen);
        let units = m
            .device
            .units
            .map_or(String::new(), |u| format!(", {u} {}", if m.device.kind == "cpu" { "threads" } else { "multiprocessors" }));
        fact("engine", format!("{} on {} ({}{units})", m.engine, m.device.kind, m.device.name));
        fact("verification", word(&m.verification));
        fact("windows", format!("{}, {} expert ids", word(&m.window_completeness), word(&m.id_space)));
        if m.emulated {
            fact("emulated", "yes: its times are not a device's times".into());
        }
        fact("steps", format!("{}: {} prefill, {} decode, {} verify", t.steps, t.prefill_steps, t.decode_steps, t.verify_steps));
        let range = t.lowest_token.zip(t.highest_token).map_or(String::new(), |(low, high)| format!(", ids {low} to {high}"));
        fact("tokens", format!("{} emitted in {}{range}", Unit::Count.show(t.tokens_emitted as f64), counted_plain(t.requests, "request")));
        let ended = t.finished.iter().map(|(how, n)| format!("{n} {how}")).collect::<Vec<_>>().join(", ");
        fact("ended by", if ended.is_empty() { "none has ended".into() } else { ended });
        fact("token hash", m.token_hash.clone().unwrap_or_else(|| "none".into()));
        let waits = &m.instrumentation;
        if waits.writer_waits > 0 {
            fact(
                "writer",
                format!(
                    "the engine waited {} for it, {:.1} ms in all",
                    counted_plain(waits.writer_waits, "time"),
                    waits.writer_wait_ns as f64 / 1e6
                ),
            );
        }
        let _ = writeln!(out, "\n{:<12}{:>8}{:>14}{:>12}", "table", "parts", "rows", "size");
        for table in &self.tables {
            let _ = writeln!(out, "{:<12}{:>8}{:>14}{:>12}", table.name, table.parts, table.rows, Unit::Bytes.show(table.bytes as f64));
        }
        if let Some(per_row) = t.route_bytes_per_row {
            let _ = writeln!(out, "\nroutes take {per_row:.1} B per token (one row of a pass through all layers)");
        }
        if let Some(checks) = &self.checks {
            let _ = writeln!(out);
            for check in checks {
                let first = format!("{:<7}{:<17}", if check.ok { "ok" } else { "FAILED" }, check.name);
                out.push_str(&paragraph(&first, &plain(&check.detail), width));
            }
        }
        for warning in self.warnings {
            out.push('\n');
            out.push_str(&paragraph("warning: ", &format!("{} [{}]", plain(&warning.message), plain(&warning.code)), width));
        }
        out
    }
}

/// The word that the manifest has for a value.
fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The number, or that it is not known.
fn known(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "unknown".into(), |value| value.to_string())
}

/// `2-41` for consecutive numbers, else a list of such ranges.
fn ranges(layers: &[u16]) -> String {
    let mut parts: Vec<(u16, u16)> = Vec::new();
    for &layer in layers {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(layer) => *last = layer,
            _ => parts.push((layer, layer)),
        }
    }
    let show = |&(a, b): &(u16, u16)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    if parts.is_empty() { "none".into() } else { parts.iter().map(show).collect::<Vec<_>>().join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_layers_as_ranges() {
        assert_eq!(ranges(&[]), "none");
        assert_eq!(ranges(&[2, 3, 4, 7, 9, 10]), "2-4, 7, 9-10");
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
    }
}
