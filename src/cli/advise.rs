//! `specprof advise`.

use super::calibrate::cost_table;
use super::exit::Failure;
use super::report::analysis_failure;
use super::text_or_json::TextOrJson;
use super::traces::{self, Kind};
use super::ui::{Output, Ui};
use crate::analysis::{self, AnalysisError, Options, Wanted};
use crate::report::{TextOptions, advice};
use crate::trace::Trace;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  specprof advise traces/run1
  specprof advise traces/run1 --json -o advice.json
  specprof advise traces/run1 --draft-cost 0.05
  specprof advise traces/run1 --costs costs.json

Record with the longest draft length of interest: shorter ones are judged by the first drafts of its
windows. Draft probabilities (mtp) add the sweep over confidence thresholds, gate weights
(record --router-probs) the one over budgets of experts.";

/// The best draft length, what it gains, where it loses and what would help
///
/// Judges every draft length up to the recorded one by the tokens that it would have emitted, the experts that it would have
/// touched and what its steps would have cost, with intervals over requests. Costs are measured times where the trace has them,
/// drawn with the requests, otherwise a model of the bytes that a step reads; the output says which.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The trace, a directory
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Trace of plain decoding (same model and device), whose decode steps the verify steps are compared with
    #[arg(long, value_name = "TRACE")]
    baseline: Option<PathBuf>,
    /// Cost of one draft in decode steps, where the trace does not tell it (a foreign drafter)
    #[arg(long, value_name = "SHARE", value_parser = share)]
    draft_cost: Option<f64>,
    /// Costs of passes and drafts from a table of `calibrate --json`, instead of the trace's own times
    #[arg(long, value_name = "TABLE", conflicts_with = "baseline")]
    costs: Option<PathBuf>,
    /// Show every request and tag instead of the slowest few
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    shape: TextOrJson,
    /// Write to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err("must be a number of at least 0".to_owned()) }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let path = traces::one(&args.trace, Kind::Traces, ui)?;
    let mut output = Output::open(args.output.as_deref())?.not_inside(&path)?;
    if let Some(costs) = &args.costs {
        output = output.not_over(costs)?;
    }
    let trace = Trace::open(&path)?;
    let baseline_path = args.baseline.as_deref().map(|path| traces::one(path, Kind::Traces, ui)).transpose()?;
    let baseline = baseline_path.as_deref().map(Trace::open).transpose()?;
    let costs = args.costs.as_deref().map(cost_table).transpose()?;
    if let (Some(table), Some(path)) = (&costs, &args.costs) {
        analysis::costs_fit(table, &trace.manifest().model).map_err(|why| Failure::Input(format!("{}: {why}", path.display())))?;
    }
    let wanted = Wanted { draft_cost: args.draft_cost, costs, ..Wanted::default() };
    let report = analysis::analyze_wanted(&trace, baseline.as_ref(), &Options::default(), &wanted).map_err(|e| {
        analysis_failure(baseline_path.as_deref().filter(|_| matches!(e, AnalysisError::Baseline { .. })).unwrap_or(&path), e)
    })?;
    let rendered = if args.shape.json() {
        advice::json(&report).map_err(|e| Failure::Environment(format!("cannot write the advice as JSON: {e}")))?
    } else {
        let terminal = matches!(output, Output::Stdout);
        let width = if terminal { ui.width() } else { 100 };
        let options = TextOptions { width, color: terminal && ui.color(), unicode: ui.unicode(), per_layer: args.all, explain: false };
        advice::render(&report, &options)
    };
    output.finish(ui, &rendered)
}
