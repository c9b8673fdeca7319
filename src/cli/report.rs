//! `specprof report`.

use super::exit::{Failure, read_failure};
use super::traces::{self, Kind};
use super::ui::{Output, Ui};
use crate::analysis::parallel::placement::{Choice, File};
use crate::analysis::partial::{self, Partial};
use crate::analysis::{self, AnalysisError, GroupBy, Options, Parallel, Wanted, parallel};
use crate::metric::Report;
use crate::report::{TextOptions, html, json, markdown, side_by_side, text};
use crate::trace::partial_file::PartialFile;
use crate::trace::{Trace, input_file};
use rayon::prelude::*;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  specprof report traces/run1 --per-layer
  specprof report traces/run1 --format json -o run1.json
  specprof report traces/run1 --format html -o run1.html
  specprof report traces/run1 --format csv --table layers -o layers.csv
  specprof report traces/run1 --baseline traces/plain
  specprof report traces/run1 --by tag:kind
  specprof report traces/run1 traces/run2
  specprof report 'traces/run-*'
  specprof report traces/shard1 --partial -o shard1.parquet
  specprof report shard1.parquet shard2.parquet
  specprof report traces/run1 --ep 8 --placement eplb.json --placement-out balanced.json

A placement file is EPLB-style JSON: `physical_to_logical_map` ([layers][slots], the expert in each
slot) or `logical_count` ([layers][experts] routed rows, which a balanced placement is made of).";

/// Numbers, tables and pictures from one or more traces
///
/// Reads a trace and shows how many experts the windows of each layer touch, how much of that chance and popularity
/// explain, what rejected drafts cost, and what limits these numbers. Several traces are shown side by side, partial
/// reports (--partial) of several traces as one. No GPU is needed.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The traces, each a directory, or partial reports, which make one report; a pattern such as 'traces/run-*' stands for all that match
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    /// Write what the report is finished from as one Parquet file, to be put together with those of other traces
    #[arg(
        long,
        requires = "output",
        conflicts_with_all = ["baseline", "per_layer", "explain", "by", "ep", "format", "table", "json"]
    )]
    partial: bool,
    /// Trace of plain decoding (same model and device), whose decode steps the verify steps are compared with
    #[arg(long, value_name = "TRACE")]
    baseline: Option<PathBuf>,
    /// Show every layer instead of the worst few
    #[arg(long)]
    per_layer: bool,
    /// Say what each number means and how it is computed (one trace, as text or Markdown)
    #[arg(long)]
    explain: bool,
    /// Acceptance and unions by group as well: request, tag:NAME, context (length) or layer
    #[arg(long, value_name = "GROUP")]
    by: Option<GroupBy>,

    /// Spread the windows over this many ranks of an expert-parallel machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = "Expert parallelism")]
    ep: Option<u16>,
    /// Where experts are: contiguous, round-robin, or a file
    #[arg(long, value_name = "HOW|FILE", default_value = "contiguous", requires = "ep", help_heading = "Expert parallelism")]
    placement: PathBuf,
    /// Write a placement balanced by this trace's loads, as a map of slots
    #[arg(long, value_name = "FILE", requires = "ep", help_heading = "Expert parallelism")]
    placement_out: Option<PathBuf>,

    /// Text for people, JSON for machines, or a page
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text, help_heading = "Output")]
    format: Format,
    /// The table that --format csv writes [default: layers]
    #[arg(long, value_enum, value_name = "TABLE", help_heading = "Output")]
    table: Option<Table>,
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
    /// Every table in GitHub's Markdown
    Markdown,
    /// One table, see --table
    Csv,
    /// One self-contained page with charts
    Html,
}

/// `--table`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Table {
    /// One row a layer, and one for all of them
    Layers,
    /// One row a depth, when windows are trees
    Depths,
    /// One row a layer, when requests share forward passes
    Passes,
    /// One row a draft position
    Acceptance,
    /// One row a request
    Requests,
    /// One row a group, with --by
    Groups,
    /// One row a layer, with --ep
    Ranks,
    /// One row a component of a step, when times are known
    Attribution,
    /// One row a draft length, when there is advice
    DraftLengths,
    /// One row a warning
    Warnings,
}

impl Table {
    /// What it takes for a report to have it.
    fn needs(self) -> &'static str {
        match self {
            Self::Groups => "it needs --by GROUP, and requests",
            Self::Ranks => "it needs --ep N, and windows",
            Self::Layers => "the trace has no windows with routes",
            Self::Depths => "no verify window is a tree",
            Self::Passes => "no forward pass is known to be of several requests",
            Self::Acceptance => "nobody said how many drafts were accepted",
            Self::Requests => "the trace has no verify step",
            Self::Attribution => {
                "it needs times of verify and of decode steps, as `record --baseline-steps N` has them, or --baseline TRACE"
            }
            Self::DraftLengths => "there is no advice on draft lengths: the warnings of the report say why",
            Self::Warnings => "nothing is warned of",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Layers => "layers",
            Self::Depths => "depths",
            Self::Passes => "passes",
            Self::Acceptance => "acceptance",
            Self::Requests => "requests",
            Self::Groups => "groups",
            Self::Ranks => "ranks",
            Self::Attribution => "attribution",
            Self::DraftLengths => "draft_lengths",
            Self::Warnings => "warnings",
        }
    }
}

/// An analysis' error with the trace's name and the exit code that it means.
pub(super) fn analysis_failure(trace: &Path, error: AnalysisError) -> Failure {
    match error {
        AnalysisError::Trace(error) => Failure::from(error),
        AnalysisError::Group { .. } | AnalysisError::Placement { .. } => Failure::Input(error.to_string()),
        AnalysisError::Baseline { .. } => {
            Failure::Input(format!("{}: {error}; give one recorded with the same --model on this device", trace.display()))
        }
        AnalysisError::NoPartial { .. } => Failure::Input(format!("{}: {error}", trace.display())),
        AnalysisError::Incomparable { .. } => Failure::Input(error.to_string()),
        AnalysisError::Partial { .. } => Failure::Corrupt(error.to_string()),
        AnalysisError::Frame { .. } => Failure::Environment(format!("{}: {error}", trace.display())),
        error => Failure::Corrupt(format!("{}: {error}; `specprof inspect --check` tells more", trace.display())),
    }
}

impl Args {
    /// What is wanted beyond the usual report.
    fn wanted(&self) -> Result<Wanted, Failure> {
        let placement = match self.placement.to_str() {
            Some("contiguous") => Choice::Contiguous,
            Some("round-robin") => Choice::RoundRobin,
            _ => {
                let file = input_file::open(&self.placement).map_err(|e| read_failure(&self.placement, &e))?;
                Choice::File(File::read(&self.placement, file).map_err(|e| analysis_failure(&self.placement, e))?)
            }
        };
        Ok(Wanted { by: self.by.clone(), parallel: self.ep.map(|ranks| Parallel { ranks, placement }), ..Wanted::default() })
    }
}

/// `--partial`: what the report is finished from, as a file.
fn write_partial(args: &Args, paths: &[PathBuf], ui: &mut Ui) -> Result<(), Failure> {
    let [path] = paths else {
        let n = paths.len();
        return Err(Failure::Input(format!("--partial takes one trace, not {n}: write a file of each, and give the files to `report`")));
    };
    let output = Output::open(args.output.as_deref())?.not_inside(path)?;
    let trace = Trace::open(path)?;
    let bytes = Partial::of(&trace).and_then(|partial| partial.encode()).map_err(|e| analysis_failure(path, e))?;
    output.stream(ui, |out| out.write_all(&bytes))
}

/// The one report of partial reports.
fn merged(paths: &[PathBuf], baseline: Option<(&Path, &Trace)>, wanted: &Wanted) -> Result<Report, Failure> {
    let first = paths.first().map_or(Path::new(""), PathBuf::as_path);
    let read = |path: &PathBuf| Partial::read(path).map_err(|e| analysis_failure(path, e));
    let partials = paths.par_iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let whole = partial::merge(partials).map_err(|e| analysis_failure(first, e))?;
    whole.report(baseline.map(|(_, trace)| trace), &Options::default(), wanted).map_err(|e| match (&e, baseline) {
        (AnalysisError::Baseline { .. }, Some((other, _))) => analysis_failure(other, e),
        _ => analysis_failure(first, e),
    })
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    // What would be passed over is refused before anything is read.
    if args.table.is_some() && args.format != Format::Csv {
        return Err(Failure::Input("--table goes with --format csv; the other formats have every table".into()));
    }
    let format = if args.json { Format::Json } else { args.format };
    if args.explain && !matches!(format, Format::Text | Format::Markdown) {
        return Err(Failure::Input("--explain goes with --format text and markdown; reports/schema describes the numbers of JSON".into()));
    }
    let paths = traces::several(&args.traces, Kind::TracesAndPartials, ui)?;
    if args.partial {
        return write_partial(args, &paths, ui);
    }
    // A file can only be a partial report; several of them are one report, and no trace of their own.
    let partials = paths.iter().filter(|path| path.is_file()).count();
    if let Some(missing) = paths.iter().find(|path| path.symlink_metadata().is_err()).filter(|_| partials > 0) {
        return Err(Failure::Input(format!("{}: no such file or directory; name a partial report", missing.display())));
    }
    if let Some(trace) = paths.iter().find(|path| !path.is_file()).filter(|_| partials > 0) {
        // The file may be none, which is the nearer reason.
        for file in paths.iter().filter(|path| path.is_file()) {
            PartialFile::open(file)?;
        }
        let reason = "a trace among partial reports; make a partial report of it with --partial, or give traces alone";
        return Err(Failure::Input(format!("{}: {reason}", trace.display())));
    }
    if args.per_layer && paths.len() > 1 && partials == 0 {
        return Err(Failure::Input("--per-layer goes with one trace; several are compared as a whole".into()));
    }
    if args.explain && paths.len() > 1 && partials == 0 {
        return Err(Failure::Input("--explain goes with one trace; several are compared as a whole".into()));
    }
    let mut output = Output::open(args.output.as_deref())?.not_over(&args.placement)?;
    let mut placement_out = args.placement_out.as_deref().map(|path| Output::open(Some(path))).transpose()?;
    for trace in &paths {
        output = output.not_inside(trace)?.not_over(trace)?;
        placement_out = placement_out.map(|out| out.not_inside(trace)).transpose()?;
    }
    let wanted = args.wanted()?;
    let baseline_path = args.baseline.as_deref().map(|path| traces::one(path, Kind::Traces, ui)).transpose()?;
    let baseline = baseline_path.as_deref().map(Trace::open).transpose()?;
    let mut reports = Vec::with_capacity(paths.len());
    let mut balanced = None;
    if partials > 0 {
        if placement_out.is_some() {
            return Err(Failure::Input("--placement-out needs the routes, which partial reports do not have".into()));
        }
        reports.push(merged(&paths, baseline_path.as_deref().zip(baseline.as_ref()), &wanted)?);
    }
    for path in paths.iter().filter(|_| partials == 0) {
        let trace = Trace::open(path)?;
        let report = analysis::analyze_wanted(&trace, baseline.as_ref(), &Options::default(), &wanted);
        reports.push(report.map_err(|e| match (&e, &baseline_path) {
            (AnalysisError::Baseline { .. }, Some(other)) => analysis_failure(other, e),
            _ => analysis_failure(path, e),
        })?);
        if let (Some(ranks), true, 1) = (args.ep, placement_out.is_some(), paths.len()) {
            balanced = Some(parallel::balanced_file(&trace, ranks).map_err(|e| analysis_failure(path, e))?);
        }
    }
    if let Some(out) = placement_out {
        let text = balanced.ok_or_else(|| Failure::Input("--placement-out goes with one trace".into()))?;
        out.finish(ui, &text)?;
    }
    let failed = |e: serde_json::Error| Failure::Environment(format!("cannot write the report as JSON: {e}"));
    // A file has no terminal behind it: plain width, no colour.
    let terminal = matches!(output, Output::Stdout);
    let width = if terminal { ui.width() } else { 100 };
    let color = terminal && ui.color();
    let options = TextOptions { width, color, unicode: ui.unicode(), per_layer: args.per_layer, explain: args.explain };
    let rendered = match (format, reports.as_slice()) {
        (Format::Json, [report]) => json::render(report).map_err(failed)?,
        (Format::Json, reports) => side_by_side::json(reports).map_err(failed)?,
        (Format::Text, [report]) => text::render(report, &options),
        (Format::Text, reports) => side_by_side::render(reports, &options),
        (_, [_, _, ..]) => {
            return Err(Failure::Input("--format markdown, html and csv take one trace; several are compared as text or json".into()));
        }
        (Format::Markdown, [report]) => markdown::render(report, args.explain),
        (Format::Html, [report]) => html::render(report).map_err(|e| Failure::Environment(format!("cannot write the page: {e}")))?,
        (Format::Csv, [report]) => markdown::table_csv(report, args.table.unwrap_or(Table::Layers).name()).ok_or_else(|| {
            let table = args.table.unwrap_or(Table::Layers);
            Failure::Input(format!("the report has no table `{}`: {}", table.name(), table.needs()))
        })?,
        (_, []) => String::new(),
    };
    output.finish(ui, &rendered)
}
