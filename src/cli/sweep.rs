//! `specprof sweep`: a grid of recordings, one comparison at the end.

use super::exit::{Failure, is_argument};
use super::interrupt::stop_flag;
use super::record::record_with_progress;
use super::report::analysis_failure;
use super::run_args::{Draft, RunArgs};
use super::text_or_json::TextOrJson;
use super::ui::{Output, Ui};
use crate::analysis::{self, Options as AnalysisOptions, Wanted};
use crate::engine::drafter::{DraftKind, MAX_DRAFT_LEN};
use crate::metric::advice::{Advice, CostSource, DraftLength};
use crate::metric::bounds::{FEW_DECODE_STEPS, FEW_REQUESTS, FEW_REQUESTS_CODE, FEW_VERIFY_STEPS, NOISY_TIMES};
use crate::metric::sweep::{SCHEMA, Sweep, SweepCell, SweepPoint};
use crate::metric::{Interval, Report};
use crate::record::sweep::{Cell, Grid, fingerprint};
use crate::record::{BackendKind, Plan};
use crate::report::{TextOptions, sweep};
use crate::trace::Trace;
use crate::trace::manifest::Warning;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  specprof sweep --model demo --prompts chat.jsonl --draft-len 1,2,4,6 --out sweeps/chat
  specprof sweep --model demo --prompt 'import os' --draft mtp,ngram,none --temperature 0,1 --out s
  specprof sweep --model ./Ling-3.0-flash --prompts chat.jsonl --by-tag kind --out sweeps/kinds

Every cell of the grid is a trace in its own directory below --out. Run the same command again to go
on after an interruption: complete recordings are kept, what is missing is recorded.";

/// Record over a grid of drafters, draft lengths, temperatures and tags, then compare
///
/// The table at the end has a line for every recording, and beside it what the longest draft length of the same drafter,
/// temperature and tag predicts (see `specprof advise`).
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = EXAMPLES,
    override_usage = "specprof sweep [OPTIONS] --model <DIR|demo> --out <DIR> <--prompts FILE|--workload NAME|...>"
)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,

    /// Who drafts (separate several by commas)
    #[arg(long, value_enum, value_name = "DRAFTER", value_delimiter = ',', default_value = "mtp", help_heading = "Grid")]
    draft: Vec<Draft>,
    /// Drafts per verify step, 1 to 15 (separate several by commas)
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,3,5", value_parser = clap::value_parser!(u16).range(1..=MAX_DRAFT_LEN as i64), help_heading = "Grid")]
    draft_len: Vec<u16>,
    /// Sampling temperatures, 0 = greedy (separate several by commas)
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "0", help_heading = "Grid")]
    temperature: Vec<f64>,
    /// Record the prompts of each value of this tag apart
    #[arg(long, value_name = "NAME", help_heading = "Grid")]
    by_tag: Option<String>,

    /// Directory of the recordings
    #[arg(long, value_name = "DIR", help_heading = "Recording")]
    out: PathBuf,
    /// Record again what is there with other parameters
    #[arg(long, help_heading = "Recording")]
    force: bool,

    #[command(flatten)]
    shape: TextOrJson,
    /// Write the comparison to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
}

const STATE: &str = "sweep.json";
/// Largest state file that is read.
const MAX_STATE_BYTES: u64 = 16 << 20;

/// `sweep.json`: what each directory was recorded with.
#[derive(Debug, Default, Serialize, Deserialize)]
struct State {
    schema: String,
    fingerprints: BTreeMap<String, String>,
}

const STATE_SCHEMA: &str = "specprof.sweep-state/1";

impl State {
    fn read(dir: &Path) -> Result<Self, Failure> {
        let path = dir.join(STATE);
        let failed = |what: String| Failure::Corrupt(format!("{}: {what}; remove it to start again", path.display()));
        let size = match path.metadata() {
            Ok(data) => data.len(),
            Err(_) => return Ok(Self { schema: STATE_SCHEMA.to_owned(), ..Self::default() }),
        };
        if size > MAX_STATE_BYTES {
            return Err(failed("too large".into()));
        }
        let bytes = std::fs::read(&path).map_err(|e| failed(format!("cannot read: {e}")))?;
        let state: Self = serde_json::from_slice(&bytes).map_err(|e| failed(format!("not the state of a sweep: {e}")))?;
        if state.schema == STATE_SCHEMA { Ok(state) } else { Err(failed("of another version".into())) }
    }

    fn write(&self, dir: &Path, ui: &mut Ui) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Failure::Environment(format!("{STATE}: {e}")))?;
        Output::open(Some(&dir.join(STATE)))?.finish(ui, &(text + "\n"))
    }
}

impl Args {
    fn grid(&self) -> Grid {
        Grid {
            drafters: self.draft.iter().map(|d| d.kind()).collect(),
            draft_lens: self.draft_len.clone(),
            temperatures: self.temperature.clone(),
            tag: self.by_tag.clone(),
        }
    }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let output = Output::open(args.output.as_deref())?;
    args.run.check(&args.draft, &args.temperature)?;
    let prompts = args.run.read_prompts()?;
    let cells = args.grid().cells(&prompts);
    if cells.is_empty() {
        let tag = args.by_tag.as_deref().unwrap_or_default();
        return Err(Failure::Input(format!("--by-tag {tag}: no prompt has this tag")));
    }
    let (checkpoint, drafter) = args.run.open(BackendKind::Cpu)?;
    // Every cell is checked before the first is recorded.
    let plans = cells
        .iter()
        .map(|cell| Ok(Plan::with_drafter(&checkpoint, drafter.as_ref(), &cell.prompts(&prompts), cell.options(&args.run.options()))?))
        .collect::<Result<Vec<_>, Failure>>()?;
    std::fs::create_dir_all(&args.out).map_err(|e| {
        let text = format!("{}: cannot create: {e}", args.out.display());
        let wrong = is_argument(e.kind()) || e.kind() == std::io::ErrorKind::AlreadyExists;
        if wrong { Failure::Input(text) } else { Failure::Environment(text) }
    })?;
    record_missing(args, &cells, &plans, ui)?;

    let all =
        |model_only: bool| -> Result<Vec<Report>, Failure> { cells.iter().map(|cell| analyze(args, &cells, cell, model_only)).collect() };
    // One table has one source of costs: the measured one, unless the model of bytes knows more recordings.
    let reports = all(false)?;
    let measured = compare(&cells, &reports, CostSource::Measured);
    let known = |found: &[SweepCell]| found.iter().filter(|c| c.recorded.speedup.is_some()).count();
    let (found, unused) = if known(&measured) == cells.len() {
        (measured, None)
    } else {
        let model = compare(&cells, &all(true)?, CostSource::Model);
        if known(&model) > known(&measured) { (model, unknown_costs(&measured)) } else { (measured, None) }
    };
    let warnings = warnings(&found, &reports);
    let model = checkpoint.name.clone();
    let comparison = Sweep { schema: SCHEMA.to_owned(), model, cells: found, measured_unused_because: unused, warnings };
    let rendered = if args.shape.json() {
        let text = serde_json::to_string_pretty(&comparison);
        text.map_err(|e| Failure::Environment(format!("cannot write the comparison as JSON: {e}")))? + "\n"
    } else {
        let terminal = matches!(output, Output::Stdout);
        let width = if terminal { ui.width() } else { 120 };
        sweep::render(&comparison, &TextOptions { width, color: terminal && ui.color(), unicode: ui.unicode(), ..TextOptions::default() })
    };
    output.finish(ui, &rendered)
}

/// Records the cells that are not there yet.
fn record_missing(args: &Args, cells: &[Cell], plans: &[Plan<'_>], ui: &mut Ui) -> Result<(), Failure> {
    let mut state = State::read(&args.out)?;
    let stop = stop_flag();
    for (cell, plan) in cells.iter().zip(plans) {
        let dir = args.out.join(&cell.name);
        let (wanted, there) = (fingerprint(plan), dir.symlink_metadata().is_ok());
        let same = state.fingerprints.get(&cell.name) == Some(&wanted);
        if there && same && Trace::open(&dir).is_ok_and(|t| t.manifest().complete) {
            ui.detail(&format!("{}: complete", cell.name));
            continue;
        }
        if there && !same && !args.force {
            let text = format!("{}: was recorded with other parameters; take another --out, or --force to record it again", dir.display());
            return Err(Failure::Input(text));
        }
        state.fingerprints.insert(cell.name.clone(), wanted);
        state.write(&args.out, ui)?;
        ui.note(&format!("recording {}", cell.name));
        // What is there is this sweep's own unfinished recording, or was given up by --force.
        let recording = record_with_progress(plan, &dir, there, false, &stop, ui)?;
        if recording.totals.interrupted {
            return Err(Failure::Interrupted(format!("interrupted; run the same command again to go on with {}", cell.name)));
        }
    }
    Ok(())
}

/// The recording of plain decoding of the same temperature and tag: its steps stand in for decode steps that a recording has too few of.
fn plain_of<'a>(cells: &'a [Cell], cell: &Cell) -> Option<&'a Cell> {
    let alike = |c: &&Cell| c.draft == DraftKind::None && c.temperature == cell.temperature && c.tag == cell.tag;
    cells.iter().find(alike).filter(|_| cell.draft != DraftKind::None)
}

/// The report of a cell; by the decode steps of its recording of plain decoding where it has times and too few decode steps of its own.
fn analyze(args: &Args, cells: &[Cell], cell: &Cell, model_only: bool) -> Result<Report, Failure> {
    let wanted = Wanted { model_only, ..Wanted::default() };
    let dir = args.out.join(&cell.name);
    let trace = Trace::open(&dir)?;
    let report_of = |baseline: Option<&Trace>| analysis::analyze_wanted(&trace, baseline, &AnalysisOptions::default(), &wanted);
    let own = report_of(None).map_err(|e| analysis_failure(&dir, e))?;
    let has_few = own.cost.as_ref().is_some_and(|c| c.source.is_some() && c.compared_decode_steps() < FEW_DECODE_STEPS);
    match plain_of(cells, cell).filter(|_| has_few && !model_only) {
        Some(plain) => {
            let baseline = Trace::open(&args.out.join(&plain.name))?;
            // Where it is none, of another device, the cell's own report says why costs are unknown.
            Ok(report_of(Some(&baseline)).unwrap_or(own))
        }
        None => Ok(own),
    }
}

fn advice(report: &Report) -> Option<Advice> {
    report.advice.clone()
}

fn point(advice: &Advice, length: &DraftLength) -> SweepPoint {
    SweepPoint {
        cost_source: advice.cost_source,
        tokens_per_step: Some(length.tokens_per_step),
        tokens_per_step_ci95: length.tokens_per_step_ci95,
        union_mean: Some(length.union_mean),
        union_ci95: length.union_ci95,
        step_ratio: length.step_ratio,
        speedup: length.speedup,
        ci95: length.ci95,
    }
}

/// Whether at most a tenth of the windows are of other lengths than the advice is about.
fn few_left_out(advice: &Advice) -> bool {
    advice.steps_left_out * 10 <= advice.steps
}

/// Why cells have no costs: each reason once, behind the cells that it is of.
fn unknown_costs(cells: &[SweepCell]) -> Option<String> {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for cell in cells {
        if let Some(why) = &cell.unknown_because {
            reasons.entry(why).or_default().push(&cell.name);
        }
    }
    let said: Vec<String> = reasons.into_iter().map(|(why, names)| format!("{}: {why}", some_of(&names))).collect();
    (!said.is_empty()).then(|| said.join("; "))
}

/// The first few names, and how many more.
fn some_of(names: &[&str]) -> String {
    const SHOWN: usize = 4;
    let more = names.len().saturating_sub(SHOWN);
    names[..names.len().min(SHOWN)].join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

/// What limits the comparison: few requests, and noisy times where costs are measured.
fn warnings(cells: &[SweepCell], reports: &[Report]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let few: Vec<&str> = cells.iter().filter(|c| c.draft_len > 0 && c.requests < FEW_REQUESTS).map(|c| c.name.as_str()).collect();
    if !few.is_empty() {
        let message = format!(
            "{} of {} recordings have fewer than {FEW_REQUESTS} requests, their intervals are too narrow or unknown: {}; give more prompts",
            few.len(),
            cells.len(),
            some_of(&few)
        );
        warnings.push(Warning::new(FEW_REQUESTS_CODE, message));
    }
    for (cell, report) in cells.iter().zip(reports).filter(|(cell, _)| cell.recorded.cost_source == Some(CostSource::Measured)) {
        if let Some(noisy) = report.warnings.iter().find(|w| w.code == NOISY_TIMES) {
            warnings.push(Warning::new(NOISY_TIMES, format!("{}: {}", cell.name, noisy.message)));
        }
    }
    warnings
}

/// Step ratio, speedup and its interval of a cell's own windows, all from `source`.
type Costs = (f64, f64, Option<Interval>);

/// Why a cell has no costs.
#[derive(Debug, PartialEq)]
struct Unknown {
    why: String,
    /// Whether more steps would help.
    too_few: bool,
}

impl<T: Into<String>> From<T> for Unknown {
    fn from(why: T) -> Self {
        Self { why: why.into(), too_few: false }
    }
}

/// # Errors
/// Why they are unknown.
fn costs(report: &Report, advice: Option<&Advice>, source: CostSource) -> Result<Costs, Unknown> {
    let too_few = |why: String| Err(Unknown { why, too_few: true });
    let no_advice = || report.warnings.iter().find(|w| w.code == "no_advice").map_or("no verify steps".to_owned(), |w| w.message.clone());
    let advice = advice.ok_or_else(no_advice)?;
    if !few_left_out(advice) {
        // Where the drafter cut many windows short itself, costs of one length are not those of the recording.
        let (rows, all) = (advice.recorded_draft_len + 1, advice.steps + advice.steps_left_out);
        return Err(format!("windows differ in length: only {} of {all} have the most frequent {rows} rows", advice.steps).into());
    }
    if advice.steps < FEW_VERIFY_STEPS {
        return too_few(format!(
            "{} steps with drafts are too few, {FEW_VERIFY_STEPS} are needed (more prompts, or --max-new-tokens)",
            advice.steps
        ));
    }
    if source == CostSource::Model {
        let last = advice.by_draft_len.last().filter(|_| advice.cost_source == Some(source));
        let known = last.and_then(|p| Some((p.step_ratio?, p.speedup?, p.ci95)));
        return known.ok_or_else(|| advice.unknown_because.as_deref().unwrap_or("step costs are unknown").into());
    }
    let cost = report.cost.as_ref().filter(|c| c.source.is_some()).ok_or("the trace has no times of steps")?;
    let decodes = cost.compared_decode_steps();
    if decodes < FEW_DECODE_STEPS {
        let why = "decode steps at the verify steps' context lengths to compare with";
        return too_few(format!("{decodes} {why}, {FEW_DECODE_STEPS} are needed (--baseline-steps)"));
    }
    let known = cost.step_ratio.zip(cost.speedup).map(|(ratio, speedup)| (ratio, speedup, cost.speedup_ci95));
    known.ok_or_else(|| "the step ratio is unknown".into())
}

/// What a cell's own report says.
fn recorded(cell: &Cell, report: &Report, costs: Option<Costs>, source: CostSource) -> SweepPoint {
    if cell.draft == DraftKind::None {
        // Plain decoding is what everything is compared with.
        return SweepPoint { tokens_per_step: Some(1.0), step_ratio: Some(1.0), speedup: Some(1.0), ..SweepPoint::default() };
    }
    let union = report.overall.as_ref().and_then(|o| o.stats.union.as_ref());
    SweepPoint {
        cost_source: costs.map(|_| source),
        step_ratio: costs.map(|(ratio, ..)| ratio),
        speedup: costs.map(|(_, speedup, _)| speedup),
        ci95: costs.and_then(|(.., interval)| interval),
        tokens_per_step: report.acceptance.tokens_per_step,
        tokens_per_step_ci95: report.acceptance.tokens_per_step_ci95,
        union_mean: union.map(|u| u.mean),
        union_ci95: union.and_then(|u| u.ci95),
    }
}

/// Share of the steps with drafts, and the speedup of all of them, (d + v τ) / (d + v ratio) with v verify and d decode steps: of a
/// drafter that finds nothing now and then. 37 verify steps of 3 tokens at 1.5 decode steps, and 156 decode steps: 267 / 211.5.
fn all_steps(cell: &Cell, report: &Report, costs: Option<Costs>) -> (Option<f64>, Option<f64>) {
    let (verify, decode) = (report.totals.verify_steps as f64, report.totals.decode_steps as f64);
    if cell.draft != DraftKind::Ngram || verify + decode == 0.0 {
        return (None, None);
    }
    let speedup = costs.map(|(ratio, speedup, _)| (decode + verify * speedup * ratio) / (decode + verify * ratio));
    (Some(verify / (verify + decode)), speedup)
}

/// The cells with costs of one source.
fn compare(cells: &[Cell], reports: &[Report], costs_of: CostSource) -> Vec<SweepCell> {
    let advices: Vec<Option<Advice>> = reports.iter().map(advice).collect();
    let of = |(at, cell): (usize, &Cell)| {
        let alike = |c: &Cell| c.draft == cell.draft && c.temperature == cell.temperature && c.tag == cell.tag;
        let longest = cells.iter().enumerate().filter(|(_, c)| alike(c)).max_by_key(|(_, c)| c.draft_len).map(|(i, _)| i);
        let source = longest.filter(|&i| i != at).and_then(|i| Some((cells.get(i)?, advices.get(i)?.as_ref()?)));
        let source = source.filter(|(from, a)| a.recorded_draft_len == from.draft_len && few_left_out(a) && a.steps >= FEW_VERIFY_STEPS);
        let predicted = source.and_then(|(_, a)| Some(point(a, a.by_draft_len.iter().find(|p| p.draft_len == cell.draft_len)?)));
        let predicted = predicted.map(|p| match p.cost_source {
            Some(source) if source != costs_of => SweepPoint { cost_source: None, step_ratio: None, speedup: None, ci95: None, ..p },
            _ => p,
        });
        let report = &reports[at];
        let own = if cell.draft == DraftKind::None { Ok(None) } else { costs(report, advices[at].as_ref(), costs_of).map(Some) };
        let (own, unknown) = own.map_or_else(|unknown| (None, Some(unknown)), |own| (own, None));
        let (drafted_share, speedup_all_steps) = all_steps(cell, report, own);
        SweepCell {
            name: cell.name.clone(),
            drafter: cell.draft.as_str().to_owned(),
            draft_len: cell.draft_len,
            temperature: cell.temperature,
            tag: cell.tag.as_ref().map(|(name, value)| format!("{name}={value}")),
            requests: report.totals.requests,
            verify_steps: report.totals.verify_steps,
            recorded: recorded(cell, report, own, costs_of),
            drafted_share,
            speedup_all_steps,
            too_few: unknown.as_ref().is_some_and(|unknown| unknown.too_few),
            unknown_because: unknown.map(|unknown| unknown.why),
            predicted_by: predicted.and(source.map(|(from, _)| from.name.clone())),
            predicted,
        }
    };
    cells.iter().enumerate().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;
    use crate::metric::cost::{ContextBucket, TimeSource};

    fn cell(draft: DraftKind) -> Cell {
        Cell { name: "c".into(), draft, draft_len: 1, temperature: 0.0, tag: None }
    }

    fn report() -> Report {
        let mut trace = Memory::new(&[1], 16, 2);
        trace.manifest.model.bytes_other_per_step = Some(40 * 12_288);
        trace.manifest.drafter.bytes_per_draft = None;
        (0..10).for_each(|request| trace.verify(request, 1, &[vec![vec![0, 1], vec![1, 2]]]));
        let mut report = trace.report();
        let cost = report.cost.as_mut().unwrap();
        (cost.source, cost.step_ratio, cost.speedup) = (Some(TimeSource::Cpu), Some(5.51), Some(0.44));
        cost.contexts = vec![ContextBucket { from: 0, to: 63, verify_steps: 10, decode_steps: 40 }];
        report
    }

    #[test]
    fn costs_are_of_one_source_and_say_why_they_are_unknown() {
        let mut report = report();
        let mut own = advice(&report).unwrap();
        assert_eq!(costs(&report, Some(&own), CostSource::Measured), Ok((5.51, 0.44, None)));
        let Unknown { why, too_few } = costs(&report, Some(&own), CostSource::Model).unwrap_err();
        assert!(!too_few && why.contains("lacks bytes_per_draft; --draft-cost"), "{why}");
        report.cost.as_mut().unwrap().contexts[0].decode_steps = 9;
        let Unknown { why, too_few } = costs(&report, Some(&own), CostSource::Measured).unwrap_err();
        assert!(too_few && why.starts_with("9 decode steps"), "{why}");
        own.steps = 9;
        for source in [CostSource::Measured, CostSource::Model] {
            let Unknown { why, too_few } = costs(&report, Some(&own), source).unwrap_err();
            assert!(too_few && why.starts_with("9 steps with drafts are too few, 10 are needed"), "{why}");
        }
        own.steps = 10;
        own.steps_left_out = 2;
        let why = costs(&report, Some(&own), CostSource::Measured).unwrap_err().why;
        assert!(why.contains("only 10 of 12 have the most frequent 2 rows"), "{why}");
    }

    #[test]
    fn cells_of_few_steps_are_not_compared_and_the_table_says_what_limits_it() {
        let mut few = report();
        few.advice.as_mut().unwrap().steps = 1;
        few.warnings.push(Warning::new(NOISY_TIMES, "a step of 9 s"));
        let mut noisy = report();
        noisy.warnings.push(Warning::new(NOISY_TIMES, "a step of 9 s"));
        let grid =
            [Cell { name: "few".into(), ..cell(DraftKind::Mtp) }, Cell { name: "noisy".into(), draft_len: 2, ..cell(DraftKind::Mtp) }];
        let mut found = compare(&grid, &[few.clone(), noisy.clone()], CostSource::Measured);
        assert_eq!((found[0].too_few, found[0].ranked(), found[1].too_few, found[1].ranked()), (true, None, false, Some(0.44)));
        assert!(unknown_costs(&found).unwrap().starts_with("few: 1 steps with drafts are too few, 10 are needed"));
        found[0].requests = 9;
        let warnings: Vec<_> = warnings(&found, &[few, noisy]).into_iter().map(|w| (w.code, w.message)).collect();
        assert_eq!(warnings.iter().map(|w| w.0.as_str()).collect::<Vec<_>>(), [FEW_REQUESTS_CODE, NOISY_TIMES]);
        // Ten requests are enough, and a cell that is not compared is not noisy.
        assert!(
            warnings[0].1.starts_with("1 of 2 recordings have fewer than 10 requests") && warnings[0].1.contains(": few;"),
            "{warnings:?}"
        );
        assert_eq!(warnings[1].1, "noisy: a step of 9 s");
        assert_eq!(some_of(&["a", "b", "c", "d", "e"]), "a, b, c, d and 1 more");
    }

    #[test]
    fn plain_decoding_of_the_same_temperature_and_tag_is_the_baseline() {
        let tag = |value: &str| Some(("kind".to_owned(), value.to_owned()));
        let plain = |name: &str, temperature, value| Cell { name: name.into(), temperature, tag: tag(value), ..cell(DraftKind::None) };
        let cells = [plain("a", 0.0, "code"), plain("b", 1.0, "code"), plain("c", 1.0, "chat")];
        let of = |temperature, value| Cell { temperature, tag: tag(value), ..cell(DraftKind::Mtp) };
        let name = |cell: &Cell| plain_of(&cells, cell).map(|c| c.name.as_str());
        assert_eq!((name(&of(1.0, "code")), name(&of(1.0, "chat")), name(&of(0.0, "chat"))), (Some("b"), Some("c"), None));
        // It is none of its own.
        assert_eq!(name(&cells[0]), None);
    }

    #[test]
    fn a_lookup_s_steps_without_drafts_gain_nothing() {
        let mut report = report();
        (report.totals.verify_steps, report.totals.decode_steps) = (37, 156);
        // 3 tokens at 1.5 decode steps.
        let (share, speedup) = all_steps(&cell(DraftKind::Ngram), &report, Some((1.5, 2.0, None)));
        assert_eq!((share, speedup), (Some(37.0 / 193.0), Some(267.0 / 211.5)));
        assert_eq!(all_steps(&cell(DraftKind::Mtp), &report, Some((1.5, 2.0, None))), (None, None));
    }
}
