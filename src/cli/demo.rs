//! `specprof demo`: the built-in model, recorded and reported.

use super::exit::Failure;
use super::interrupt::stop_flag;
use super::record::{record_with_progress, summary};
use super::ui::Ui;
use crate::analysis;
use crate::engine::{Checkpoint, builtin};
use crate::record::{DEMO_PROMPTS, Options, Plan, workload};
use crate::report::{TextOptions, text};
use std::path::{Path, PathBuf};

/// Record and report the built-in model on the CPU: no arguments, no downloads
///
/// A 6-million-parameter model of the Ling-3.0 architecture, trained on Python code, continues a few
/// prompts with three MTP drafts a step, with a few plain decode steps in between to compare with. What
/// the report shows is measured, not made up; but so small a model repeats itself, which raises acceptance
/// and overlap above what a large model shows.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:\n  specprof demo\n  specprof demo --out traces/demo")]
pub struct Args {
    /// Keep the trace in this directory
    #[arg(long, value_name = "DIR", help_heading = "Recording")]
    out: Option<PathBuf>,
    /// Replace a trace that is already there
    #[arg(long, requires = "out", help_heading = "Recording")]
    force: bool,
}

/// Tokens per prompt.
const NEW_TOKENS: u32 = 96;
/// Plain decode steps in between.
const BASELINE_STEPS: u32 = 24;

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let checkpoint = Checkpoint::load(builtin::ling_nano())?;
    let prompts = workload::parse(DEMO_PROMPTS, Path::new("demo prompts")).map_err(|e| Failure::Input(e.to_string()))?;
    let options = Options { max_new_tokens: NEW_TOKENS, baseline_steps: BASELINE_STEPS, ignore_eos: true, ..Options::default() };
    let plan = Plan::new(&checkpoint, &prompts, options)?;
    let kept = match &args.out {
        Some(dir) => Place::Kept(dir.clone()),
        None => Place::temporary(),
    };
    let stop = stop_flag();
    let recording = record_with_progress(&plan, kept.path(), args.force, true, &stop, ui)?;
    if recording.totals.interrupted {
        let rest = match &kept {
            Place::Kept(dir) => format!("{} has what was recorded and is marked incomplete", dir.display()),
            Place::Temporary(_) => "nothing was kept; --out DIR keeps it".into(),
        };
        return Err(Failure::Interrupted(format!("interrupted; {rest}")));
    }
    ui.note(&summary(&recording));
    show(kept.path(), ui)?;
    match &kept {
        Place::Kept(dir) => ui.note(&format!("The trace is kept in {}.", dir.display())),
        Place::Temporary(_) => ui.note("The trace is not kept; to keep it: specprof demo --out DIR"),
    }
    Ok(())
}

/// The report of the trace, every layer of it.
fn show(dir: &Path, ui: &mut Ui) -> Result<(), Failure> {
    let report = analysis::analyze(dir, &analysis::Options::default())
        .map_err(|error| Failure::Environment(format!("{}: the demo's own trace cannot be analysed: {error}", dir.display())))?;
    let options = TextOptions { width: ui.width(), color: ui.color(), unicode: ui.unicode(), per_layer: true, explain: false };
    ui.result(&format!("{}\n", text::render(&report, &options).trim_end()))
}

/// Where the trace goes.
enum Place {
    Kept(PathBuf),
    /// Removed when the command ends.
    Temporary(PathBuf),
}

impl Place {
    fn temporary() -> Self {
        // Its own folder, so that the report calls the trace `demo` wherever it lies.
        let name = |n: u32| std::env::temp_dir().join(format!("specprof-{}-{n}", std::process::id()));
        let parent = (0..).map(name).find(|dir| dir.symlink_metadata().is_err()).unwrap_or_else(|| name(0));
        Self::Temporary(parent.join("demo"))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Kept(dir) | Self::Temporary(dir) => dir,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Self::Temporary(dir) = self {
            let _ = std::fs::remove_dir_all(dir.parent().unwrap_or(dir));
        }
    }
}
