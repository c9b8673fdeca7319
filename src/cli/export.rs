//! `specprof export`.

use super::calibrate::cost_table;
use super::exit::Failure;
use super::traces::{self, Kind};
use super::ui::{Output, Streamed, Ui};
use crate::analysis;
use crate::export::{ExportError, jsonl, perfetto};
use crate::metric::counted_plain;
use crate::report::costs;
use crate::trace::Trace;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// A timeline larger than this is slow to open in Perfetto.
const LARGE: u64 = 100_000_000;

/// Write a trace in another program's format
///
/// perfetto: a timeline in Chrome's trace format, to be opened at ui.perfetto.dev or in chrome://tracing, with steps,
/// rows, layers, unions and telemetry on tracks of their own. jsonl: every row of the trace as lines of JSON, which
/// `specprof import jsonl` reads back; docs/jsonl.md describes them. sps: step rates by rows and distinct experts, of a table
/// that `specprof calibrate --json` wrote.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:
  specprof export traces/run1 --format perfetto -o run1.json
  specprof export traces/run1 --format perfetto --steps 0..=499 -o begin.json
  specprof export traces/run1 --format jsonl | head -2
  specprof export costs.json --format sps -o sps.json")]
pub struct Args {
    /// The trace, a directory; with sps a cost table
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// What to write
    #[arg(long, value_enum, value_name = "FORMAT")]
    format: Format,
    /// Steps of the timeline, as FIRST..=LAST or FIRST..END; all of them by default (perfetto)
    #[arg(long, value_name = "RANGE", value_parser = parse_steps)]
    steps: Option<RangeInclusive<u32>>,
    /// Write to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A timeline as Chrome trace JSON
    Perfetto,
    /// Lines of JSON, see docs/jsonl.md
    Jsonl,
    /// Step rates by rows and distinct experts
    Sps,
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    if args.format != Format::Perfetto && args.steps.is_some() {
        return Err(Failure::Input("--steps goes with --format perfetto; the others are always of the whole".into()));
    }
    if args.format == Format::Sps {
        return step_rates(args, ui);
    }
    let path = traces::one(&args.trace, Kind::Traces, ui)?;
    let output = Output::open(args.output.as_deref())?.not_inside(&path)?;
    let trace = Trace::open(&path)?;
    let mut note = None;
    output.stream(ui, |out| -> Result<(), ExportError> {
        match args.format {
            Format::Jsonl => jsonl::write(&trace, out)?,
            Format::Sps => {}
            Format::Perfetto => note = Some(perfetto::write(&trace, args.steps.as_ref().unwrap_or(&(0..=u32::MAX)), out)?),
        }
        Ok(())
    })?;
    if let Some(written) = note {
        ui.detail(&format!(
            "{}, {}, {}",
            counted_plain(written.steps, "step"),
            counted_plain(written.events, "event"),
            counted_plain(written.bytes, "byte")
        ));
        if written.bytes > LARGE {
            let megabytes = written.bytes / 1_000_000;
            ui.warn(&format!("a timeline of {megabytes} MB is slow to open; --steps 0..=999 writes the first thousand steps"));
        }
    }
    Ok(())
}

/// `--format sps`.
fn step_rates(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    if args.trace.is_dir() {
        let text = "is a directory; step rates are made of a table that `specprof calibrate --json -o FILE` wrote";
        return Err(Failure::Input(format!("{}: {text}", args.trace.display())));
    }
    let output = Output::open(args.output.as_deref())?.not_over(&args.trace)?;
    let table = cost_table(&args.trace)?;
    let rates = costs::rates(&table, analysis::cost_warnings(&table, &analysis::Options::default()));
    output.finish(ui, &rates.map_err(|e| Failure::Environment(format!("cannot write step rates as JSON: {e}")))?)
}

impl From<ExportError> for Streamed {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Output(error) => Self::Output(error),
            ExportError::Trace(error) => Self::Source(error.into()),
            ExportError::Lacks(what) => Self::Source(Failure::Input(what)),
        }
    }
}

/// `3..=7`, `3..8`, `3..`, `..8` or `5`.
fn parse_steps(text: &str) -> Result<RangeInclusive<u32>, String> {
    let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("`{text}` is not a step; write FIRST..=LAST"));
    let Some((first, last)) = text.split_once("..") else {
        let step = number(text)?;
        return Ok(step..=step);
    };
    let first = if first.trim().is_empty() { 0 } else { number(first)? };
    let last = match (last.trim(), last.trim().strip_prefix('=')) {
        ("", _) => u32::MAX,
        (_, Some(last)) => number(last)?,
        (end, None) => number(end)?.checked_sub(1).ok_or("a range that ends before step 0 is empty")?,
    };
    if last < first {
        return Err(format!("steps {first} to {last} are none"));
    }
    Ok(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_steps() {
        for (text, first, last) in [("3..=7", 3, 7), ("3..8", 3, 7), ("3..", 3, u32::MAX), ("..8", 0, 7), ("5", 5, 5), ("..", 0, u32::MAX)]
        {
            assert_eq!(parse_steps(text), Ok(first..=last), "{text}");
        }
        for text in ["", "a..b", "7..=3", "..0", "-1", "1..=", "4..4"] {
            assert!(parse_steps(text).is_err(), "{text}");
        }
    }
}
