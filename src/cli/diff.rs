//! `specprof diff`.

use super::exit::{Failure, one_line, read_failure};
use super::traces;
use super::ui::{Output, Ui};
use crate::analysis::AnalysisError;
use crate::diff::gate::Status;
use crate::diff::kind::Kind;
use crate::diff::render::{github, json, junit, markdown, text};
use crate::diff::rule::Rule;
use crate::diff::rules::{self, Origin, Rules, RulesError};
use crate::diff::source::{Side, SourceError};
use crate::diff::{Comparison, DiffError, Options, diff};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What turns the rules off, the default ones, too.
const NO_RULES: &str = "none";

const EXAMPLES: &str = "\
Examples:
  specprof diff base.json candidate.json
  specprof diff traces/main traces/branch --fail-on 'union.mean>+3%' \\
      --fail-on 'layer:*:union.p99>+10%'
  specprof diff main.json branch.json --rules specprof.rules --allow device --format github

A rule is [layer:LAYERS:]METRIC OP LIMIT. It says what fails: LIMIT is a change relative to the
base (+3%), a change in the number's unit (-0.5), or a value of the candidate (2.4, 40%); OP is
> < >= <=; LAYERS is *, a number or FIRST-LAST. METRIC is a number of the report, as union.mean,
acceptance.tokens_per_step or marginal[2]; --format json lists them all.

A file of rules has one rule a line, `allow KIND, KIND` lines, and remarks behind #.

A rule fails when the 95 % interval lies beyond its limit, and is unclear, which fails nothing,
when the limit is in the interval. Without rules, these hold:
union.mean>+2%, acceptance.tokens_per_step<-2%, cost.step_ratio>+2%.

The exit code is 1 when a rule fails, and 2 when the runs are not comparable.";

/// Compare two traces or reports and fail on regressions
///
/// Says of every number whether it is better, worse, the same or unclear, by how much and how surely, and holds
/// rules against them. Runs of the same prompts are compared request by request; runs of the same windows exactly.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// What to compare with: a trace, or a report in JSON
    #[arg(value_name = "BASE")]
    base: PathBuf,
    /// What is compared: a trace, or a report in JSON
    #[arg(value_name = "CANDIDATE")]
    candidate: PathBuf,
    /// Fail when this holds (repeat for more); `none` for no rule at all
    #[arg(long, value_name = "RULE", help_heading = "Rules")]
    fail_on: Vec<String>,
    /// File of rules, one a line
    #[arg(long, value_name = "FILE", help_heading = "Rules")]
    rules: Option<PathBuf>,
    /// Fail by the numbers alone, however uncertain, and by rules that match no number
    #[arg(long, help_heading = "Rules")]
    strict: bool,
    /// Compare although the runs differ in this: model, draft_len, drafter, quantisation, id_space,
    /// device, completeness, workload (repeat, or separate by commas)
    #[arg(long, value_name = "KIND", value_parser = parse_kinds, help_heading = "Comparison")]
    allow: Vec<KindList>,
    /// Relative change in percent below which a number is the same
    #[arg(long, value_name = "PCT", default_value_t = 1.0, allow_negative_numbers = true, value_parser = parse_margin, help_heading = "Comparison")]
    margin: f64,
    /// Show every layer and every entry of curves
    #[arg(long)]
    per_layer: bool,
    /// How to show the comparison
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
    /// Tables for people
    Text,
    /// For pull requests, as long as a comment may be
    Markdown,
    /// For machines, see reports/schema
    Json,
    /// Annotations; the summary goes to the file that GITHUB_STEP_SUMMARY names
    Github,
    /// A test case a rule
    Junit,
}

/// The kinds of one `--allow`.
#[derive(Debug, Clone)]
struct KindList(Vec<Kind>);

fn parse_kinds(text: &str) -> Result<KindList, String> {
    let kinds = rules::kinds(text)?;
    if kinds.is_empty() { Err("nothing to allow".into()) } else { Ok(KindList(kinds)) }
}

fn parse_margin(text: &str) -> Result<f64, String> {
    let margin: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=100.0).contains(&margin) { Ok(margin) } else { Err("not from 0 to 100".into()) }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let rules = args.rules()?;
    let mut output = Output::open(args.output.as_deref())?;
    if let Some(rules) = &args.rules {
        output = output.not_over(rules)?;
    }
    let one = |path: &Path| traces::one(path, traces::Kind::TracesAndReports, ui);
    let (base, candidate) = (one(&args.base)?, one(&args.candidate)?);
    let output = output.not_inside(&base)?.not_inside(&candidate)?.not_over(&base)?.not_over(&candidate)?;
    let base = Side::open(&base).map_err(source_failure)?;
    let candidate = Side::open(&candidate).map_err(source_failure)?;
    let options =
        Options { allow: args.allow.iter().flat_map(|list| list.0.clone()).collect(), margin: args.margin / 100.0, strict: args.strict };
    let comparison = diff(&base, &candidate, &rules, &options).map_err(|error| match error {
        DiffError::Trace(error) => Failure::from(error),
        error => Failure::Input(one_line(&error.to_string())),
    })?;
    let rendered = args.render(&comparison, matches!(output, Output::Stdout), ui)?;
    output.finish(ui, &rendered)?;
    if args.shape() == Format::Github {
        summarise(&comparison, ui)?;
    }
    let failed: Vec<String> = comparison.gates.iter().filter(|g| g.status == Status::Failed).map(|g| g.rule.to_string()).collect();
    if failed.is_empty() { Ok(()) } else { Err(Failure::Check(format!("{} failed: {}", rules_word(failed.len()), failed.join(", ")))) }
}

fn rules_word(n: usize) -> String {
    if n == 1 { "1 rule".to_owned() } else { format!("{n} rules") }
}

impl Args {
    /// The rules of the command line and the file; the default ones when there are none.
    fn rules(&self) -> Result<Rules, Failure> {
        let mut rules = match &self.rules {
            Some(path) => rules::read(path).map_err(|error| match error {
                RulesError::Io { path, source } => read_failure(&path, &source),
                error => Failure::Input(one_line(&error.to_string())),
            })?,
            None => Rules::default(),
        };
        for text in self.fail_on.iter().filter(|text| text.trim() != NO_RULES) {
            let rule = Rule::parse(text).map_err(|e| Failure::Input(format!("--fail-on: {e}")))?;
            rules.rules.push((rule, Origin::CommandLine));
        }
        if self.fail_on.iter().any(|text| text.trim() == NO_RULES) && !rules.rules.is_empty() {
            return Err(Failure::Input(format!("--fail-on {NO_RULES} is no rule at all, and there are others; leave it or them out")));
        }
        if self.fail_on.is_empty() && rules.rules.is_empty() {
            rules.rules = rules::defaults().rules;
        }
        Ok(rules)
    }

    fn shape(&self) -> Format {
        if self.json { Format::Json } else { self.format }
    }

    fn render(&self, comparison: &Comparison, terminal: bool, ui: &Ui) -> Result<String, Failure> {
        Ok(match self.shape() {
            Format::Text => {
                // A file has no terminal behind it: plain width, no colour.
                let (width, color) = if terminal { (ui.width(), ui.color()) } else { (100, false) };
                text::render(comparison, &text::TextOptions { width, color, per_layer: self.per_layer })
            }
            Format::Markdown => markdown::render(comparison, markdown::COMMENT_BYTES),
            Format::Json => {
                json::render(comparison).map_err(|e| Failure::Environment(format!("cannot write the comparison as JSON: {e}")))?
            }
            Format::Github => github::render(comparison),
            Format::Junit => junit::render(comparison),
        })
    }
}

/// Appends to the job's summary, where there is one.
fn summarise(comparison: &Comparison, ui: &Ui) -> Result<(), Failure> {
    let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|path| !path.is_empty()) else {
        ui.note("GITHUB_STEP_SUMMARY is not set: no job summary was written");
        return Ok(());
    };
    let path = Path::new(&path);
    let failure = |e: std::io::Error| Failure::Environment(format!("{}: cannot write the job summary: {e}", path.display()));
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failure)?;
    let taken = file.metadata().map_err(failure)?.len();
    file.write_all(github::summary(comparison, taken).as_bytes()).map_err(failure)
}

fn source_failure(error: SourceError) -> Failure {
    let text = one_line(&error.to_string());
    match error {
        SourceError::Trace(error) => Failure::from(error),
        SourceError::Missing { .. } | SourceError::Several { .. } | SourceError::Partial { .. } | SourceError::Lines { .. } => {
            Failure::Input(text)
        }
        SourceError::Io { path, source } => read_failure(&path, &source),
        SourceError::Analysis { source: AnalysisError::Frame { .. }, .. } => Failure::Environment(text),
        SourceError::Analysis { .. } => Failure::Corrupt(format!("{text}; `specprof inspect --check` tells more")),
        SourceError::Report { .. } | SourceError::Version { .. } => Failure::Corrupt(text),
    }
}
