//! `specprof report`.

use super::exit::Failure;
use super::ui::{Output, Ui};
use crate::analysis::{self, AnalysisError, Options};
use crate::report::{TextOptions, json, text};
use std::path::PathBuf;

/// Numbers, tables and pictures from a trace
///
/// Reads a trace and shows how many experts the windows of each layer touch, how much of that chance and popularity
/// explain, what rejected drafts cost, and what limits these numbers. No GPU is needed.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:
  specprof report traces/run1 --per-layer
  specprof report traces/run1 --format json -o run1.json")]
pub struct Args {
    /// The trace, a directory
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Show every layer instead of the worst few
    #[arg(long)]
    per_layer: bool,
    /// Say what each number means and how it is computed
    #[arg(long)]
    explain: bool,
    /// Text for people or JSON for machines
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text, help_heading = "Output")]
    format: Format,
    /// The same as --format json
    #[arg(long, conflicts_with = "format", help_heading = "Output")]
    json: bool,
    /// Write to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Tables and bars
    Text,
    /// The report's contract, see reports/schema
    Json,
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let output = Output::open(args.output.as_deref())?.not_inside(&args.trace)?;
    let report = analysis::analyze(&args.trace, &Options::default()).map_err(|error| match error {
        AnalysisError::Trace(error) => Failure::from(error),
        error @ AnalysisError::Frame { .. } => Failure::Environment(format!("{}: {error}", args.trace.display())),
        error => Failure::Corrupt(format!("{}: {error}; `specprof inspect --check` tells more", args.trace.display())),
    })?;
    let format = if args.json { Format::Json } else { args.format };
    let rendered = match format {
        Format::Json => json::render(&report).map_err(|e| Failure::Environment(format!("cannot write the report as JSON: {e}")))?,
        Format::Text => {
            // A file has no terminal behind it: plain width, no colour.
            let terminal = matches!(output, Output::Stdout);
            let width = if terminal { ui.width() } else { 100 };
            let color = terminal && ui.color();
            text::render(&report, &TextOptions { width, color, unicode: ui.unicode(), per_layer: args.per_layer, explain: args.explain })
        }
    };
    output.finish(ui, &rendered)
}
