//! `specprof record`: arguments to a plan, a plan to a trace.

use super::exit::Failure;
use super::interrupt::stop_flag;
use super::ui::Ui;
use crate::engine::drafter::{DraftKind, MAX_DRAFT_LEN};
use crate::engine::sampling::Sampling;
use crate::engine::{Checkpoint, EngineError};
use crate::record::{Options, Plan, Progress, Prompt, RecordError, Recording, WorkloadError, workload};
use crate::trace::TraceError;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

const EXAMPLES: &str = "\
Examples:
  specprof record --model demo --prompt 'def main():'
  specprof record --model ./Ling-3.0-flash --prompts chat.jsonl --draft-len 4 --out traces/chat
  specprof record --model ./Ling-3.0-flash --prompts chat.jsonl --baseline-steps 50 \\
      --temperature 0.6 --top-p 0.95 --top-k 20 --seed 1

A line of a prompts file is a JSON object with `prompt` (text), `messages` (a chat, rendered with
the checkpoint's template) or `token_ids`; optional are `id`, `max_new_tokens`, `tags` and, with
`messages`, `enable_thinking`.

The trace's path is printed on stdout, everything else on stderr. Ctrl-C ends a recording cleanly:
what was recorded stays, marked incomplete.";

/// Run speculative decoding with the router instrumented and write a trace
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Checkpoint directory, or `demo` for the built-in model
    #[arg(long, value_name = "DIR|demo", help_heading = "Model")]
    model: PathBuf,
    /// What runs the model
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t = Backend::Auto, help_heading = "Model")]
    backend: Backend,

    /// Who drafts: the model's MTP block, a DSpark drafter, a lookup in the text so far, or nobody
    #[arg(long, value_enum, value_name = "DRAFTER", default_value_t = Draft::Mtp, help_heading = "Drafting")]
    draft: Draft,
    /// Checkpoint directory of a separate drafter (with --draft dspark)
    #[arg(long, value_name = "DIR", help_heading = "Drafting")]
    draft_model: Option<PathBuf>,
    /// Drafts per verify step, 1 to 15. Each continues the one before: the engine verifies chains, no trees
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=MAX_DRAFT_LEN as i64), help_heading = "Drafting")]
    draft_len: u16,
    /// Plain decode steps to interleave over the run, so that the verify ratio is measured in it
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Drafting")]
    baseline_steps: u32,

    /// File with one prompt a line, as JSON objects (or --prompt)
    #[arg(long, value_name = "FILE.jsonl", required_unless_present = "prompt", help_heading = "Workload")]
    prompts: Option<PathBuf>,
    /// A prompt's text (repeat for more)
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts", help_heading = "Workload")]
    prompt: Vec<String>,
    /// Tokens to generate per request, unless its line says otherwise
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Workload")]
    max_new_tokens: u32,
    /// Go on after an end-of-sequence token
    #[arg(long, help_heading = "Workload")]
    ignore_eos: bool,
    /// Prompt tokens per prefill step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..=crate::record::MAX_PREFILL_CHUNK as i64), help_heading = "Workload")]
    prefill_chunk: u16,

    /// Sampling temperature, 0 = greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, help_heading = "Sampling")]
    temperature: f64,
    /// Keep the most likely tokens of this mass, 1 = all
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, help_heading = "Sampling")]
    top_p: f64,
    /// Keep this many most likely tokens, 0 = all
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    top_k: u32,
    /// Seed of the random numbers
    #[arg(long, value_name = "S", default_value_t = 0, help_heading = "Sampling")]
    seed: u64,

    /// Directory of the trace [default: traces/MODEL-DRAFTER-N, the first N that is free]
    #[arg(long, value_name = "DIR", help_heading = "Recording")]
    out: Option<PathBuf>,
    /// Replace a trace that is already there
    #[arg(long, help_heading = "Recording")]
    force: bool,
    /// Record gate weights beside expert ids
    #[arg(long, help_heading = "Recording")]
    router_probs: bool,
    /// Record prompt and output text
    #[arg(long, help_heading = "Recording")]
    store_text: bool,
    /// Times of kernels: `auto` takes the best way, on the CPU those of the engine's operations
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Kernels::Auto, help_heading = "Recording")]
    kernels: Kernels,
    /// Clocks, temperature and load beside the steps
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Telemetry::Auto, help_heading = "Recording")]
    telemetry: Telemetry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// The best that this machine and build have
    Auto,
    /// The CPU engine
    Cpu,
    /// An NVIDIA GPU
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Draft {
    /// The model's own multi-token-prediction block, chained
    Mtp,
    /// An external DSpark drafter
    Dspark,
    /// What followed the longest earlier occurrence of the text's end
    Ngram,
    /// Plain decoding
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kernels {
    /// As the backend allows: on the CPU, wall time of each operation by layer and component
    Auto,
    /// By CUPTI on a GPU, or not at all
    Cupti,
    /// Never
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Telemetry {
    /// What the machine tells
    Auto,
    /// None
    Off,
}

impl Draft {
    /// The drafter, refusing what this build does not have.
    pub(super) fn kind(self) -> Result<DraftKind, Failure> {
        match self {
            Self::Mtp => Ok(DraftKind::Mtp),
            Self::Ngram => Ok(DraftKind::Ngram),
            Self::None => Ok(DraftKind::None),
            Self::Dspark => Err(Failure::Input("--draft dspark is not in this build yet; use --draft mtp, ngram or none".into())),
        }
    }
}

impl Args {
    /// The drafter, refusing what this build or machine cannot do.
    fn draft(&self) -> Result<DraftKind, Failure> {
        if self.backend == Backend::Cuda {
            return Err(Failure::Environment("--backend cuda: this build has no CUDA backend; use --backend cpu".into()));
        }
        if self.kernels == Kernels::Cupti {
            let reason = "--kernels cupti: CUPTI records a GPU's kernels, and the model runs on the CPU; use --kernels auto or off";
            return Err(Failure::Environment(reason.into()));
        }
        if self.draft != Draft::Dspark && self.draft_model.is_some() {
            return Err(Failure::Input("--draft-model goes with --draft dspark; the other drafters need no model of their own".into()));
        }
        self.draft.kind()
    }

    fn options(&self, draft: DraftKind) -> Options {
        Options {
            draft,
            draft_len: usize::from(self.draft_len),
            max_new_tokens: self.max_new_tokens,
            sampling: Sampling { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, seed: self.seed },
            ignore_eos: self.ignore_eos,
            baseline_steps: self.baseline_steps,
            prefill_chunk: usize::from(self.prefill_chunk),
            router_weights: self.router_probs,
            store_text: self.store_text,
            // On the CPU it is the engine itself that looks at the clock.
            kernels: self.kernels == Kernels::Auto,
        }
    }

    /// Sampling options that are no numbers to sample with, named as they are typed.
    fn check_sampling(&self) -> Result<(), Failure> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(Failure::Input(format!("--temperature {}: give 0 for greedy, or a number above it", self.temperature)));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Failure::Input(format!("--top-p {}: give a share above 0 and up to 1", self.top_p)));
        }
        if self.out.as_deref() == Some(Path::new("-")) {
            return Err(Failure::Input("--out -: a trace is a directory and cannot go to stdout; name a directory".into()));
        }
        Ok(())
    }

    /// Options that were given and change nothing, with the reason.
    fn without_effect(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.temperature == 0.0 && (self.top_p < 1.0 || self.top_k > 0) {
            notes.push("--top-p and --top-k have no effect at temperature 0, which is greedy".to_owned());
        }
        if self.draft == Draft::None && self.baseline_steps > 0 {
            notes.push("--baseline-steps has no effect with --draft none: every step is a plain decode step".to_owned());
        }
        notes
    }

    fn read_prompts(&self) -> Result<Vec<Prompt>, Failure> {
        match &self.prompts {
            Some(path) => workload::read(path).map_err(|e| RecordError::from(e).into()),
            None => Ok(workload::from_texts(&self.prompt)),
        }
    }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let draft = args.draft()?;
    args.check_sampling()?;
    let options = args.options(draft);
    // What is quickly checked comes before a large checkpoint is opened.
    let prompts = args.read_prompts()?;
    for ignored in args.without_effect() {
        ui.warn(&ignored);
    }
    let checkpoint = Checkpoint::resolve(&args.model)?;
    ui.detail(&format!("{}: {} tensors, identity {}", checkpoint.name, checkpoint.inventory.total().tensors, checkpoint.identity));
    let plan = Plan::new(&checkpoint, &prompts, options).map_err(Failure::from)?;
    let stop = stop_flag()?;
    let telemetry = args.telemetry == Telemetry::Auto;
    let (dir, recording) = match &args.out {
        Some(dir) => (dir.clone(), record_with_progress(&plan, dir, args.force, telemetry, &stop, ui)?),
        None => {
            let name = format!("{}-{}", checkpoint.name, draft.as_str());
            let attempt = |dir: &Path| try_record(&plan, dir, false, telemetry, &stop, ui);
            free_directory(Path::new("traces"), &name, attempt).map_err(|error| failure(&plan, error))?
        }
    };
    if recording.totals.steps > 0 || !recording.totals.interrupted {
        ui.result(&format!("{}\n", dir.display()))?;
    }
    finish(&recording, &dir, ui)
}

/// Records a plan behind a progress bar.
pub(super) fn record_with_progress(
    plan: &Plan<'_>,
    dir: &Path,
    force: bool,
    telemetry: bool,
    stop: &AtomicBool,
    ui: &Ui,
) -> Result<Recording, Failure> {
    try_record(plan, dir, force, telemetry, stop, ui).map_err(|error| failure(plan, error))
}

/// What only a forward pass can find is wrong with the checkpoint, not with the command line.
fn failure(plan: &Plan<'_>, error: RecordError) -> Failure {
    match error {
        RecordError::Engine(error @ EngineError::NotFinite { .. }) => Failure::Input(format!("{}: {error}", plan.checkpoint.name)),
        other => other.into(),
    }
}

fn try_record(plan: &Plan<'_>, dir: &Path, force: bool, telemetry: bool, stop: &AtomicBool, ui: &Ui) -> Result<Recording, RecordError> {
    let bar = ui.progress(plan.max_tokens(), "tokens");
    let mut show = |p: Progress| {
        bar.set_position(p.settled_tokens);
        bar.set_message(format!("request {}/{}", (p.totals.requests as usize + 1).min(p.requests), p.requests));
    };
    let recording = crate::record::record(plan, dir, force, telemetry, stop, &mut show);
    bar.finish_and_clear();
    recording
}

/// Says what was recorded, and whether it was all.
fn finish(recording: &Recording, dir: &Path, ui: &Ui) -> Result<(), Failure> {
    for warning in &recording.manifest.warnings {
        ui.warn(&warning.message);
    }
    if recording.totals.interrupted {
        let steps = recording.totals.steps;
        if steps == 0 {
            return Err(Failure::Interrupted("interrupted before the first step; nothing was recorded".into()));
        }
        return Err(Failure::Interrupted(format!("interrupted; {} has the {steps} steps so far and is marked incomplete", dir.display())));
    }
    ui.note(&format!("{}: {}", summary(recording), dir.display()));
    Ok(())
}

/// One line: steps, tokens, tokens per step.
pub(super) fn summary(recording: &Recording) -> String {
    let t = recording.totals;
    let per_step = t.tokens_per_step().map(|tau| format!(", {tau:.2} tokens per verify step")).unwrap_or_default();
    format!(
        "recorded {} requests in {} steps ({} verify, {} decode), {} tokens{per_step}",
        t.requests, t.steps, t.verify_steps, t.decode_steps, t.tokens
    )
}

/// Records into the first of `NAME-1`, `NAME-2`, ... in `parent` that nobody has, also not since it was looked for.
fn free_directory<T>(
    parent: &Path,
    name: &str,
    mut record: impl FnMut(&Path) -> Result<T, RecordError>,
) -> Result<(PathBuf, T), RecordError> {
    let mut number = 1u32;
    loop {
        let dir = parent.join(format!("{name}-{number}"));
        number = number.saturating_add(1);
        if dir.symlink_metadata().is_ok() {
            continue;
        }
        match record(&dir) {
            Err(RecordError::Trace(TraceError::Exists { path })) if path == dir && number < u32::MAX => {}
            recorded => return recorded.map(|recording| (dir, recording)),
        }
    }
}

impl From<RecordError> for Failure {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Engine(e) => e.into(),
            RecordError::Trace(e) => e.into(),
            RecordError::Workload(WorkloadError::Io { ref source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                Self::Environment(error.to_string())
            }
            other => Self::Input(super::exit::one_line(&other.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_directory_is_a_fresh_one() {
        let parent = tempfile::tempdir().unwrap();
        let free = || free_directory(parent.path(), "nano-mtp", |dir| Ok(dir.file_name().unwrap().to_owned())).unwrap();
        let first = parent.path().join("nano-mtp-1");
        assert_eq!(free(), (first.clone(), "nano-mtp-1".into()));
        std::fs::create_dir(&first).unwrap();
        std::fs::write(parent.path().join("nano-mtp-2"), "a file counts as well").unwrap();
        assert_eq!(free().0, parent.path().join("nano-mtp-3"));
        // Someone else is faster twice.
        let mut tried = Vec::new();
        let (dir, ()) = free_directory(parent.path(), "nano-mtp", |dir| {
            tried.push(dir.to_owned());
            if tried.len() < 3 { Err(TraceError::Exists { path: dir.to_owned() }.into()) } else { Ok(()) }
        })
        .unwrap();
        assert_eq!(dir, parent.path().join("nano-mtp-5"));
        let failed = free_directory(parent.path(), "nano-mtp", |_| Err::<(), _>(TraceError::Event { what: "it".into() }.into()));
        assert!(failed.unwrap_err().to_string().contains("cannot record it"));
    }
}
