//! `specprof record`: arguments to a plan, a plan to a trace.

use super::exit::{Failure, read_failure};
use super::interrupt::stop_flag;
use super::loading::LoadingBar;
use super::probe;
use super::run_args::{Draft, RunArgs};
use super::ui::Ui;
use crate::engine::cuda::{Opening, is_of_cupti};
use crate::engine::drafter::MAX_DRAFT_LEN;
use crate::engine::{DsparkCheckpoint, EngineError};
use crate::metric::counted_plain;
use crate::record::{BackendKind, CuptiUse, Options, Plan, Progress, Prompt, PromptSource, RecordError, Recording, WorkloadError};
use crate::trace::{Manifest, TraceError};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

const EXAMPLES: &str = "\
Examples:
  specprof record --model demo --prompt 'def main():'
  specprof record --model ./Ling-3.0-flash --workload chat,code --draft-len 4 --out traces/mixed
  specprof record --model ./Ling-3.0-flash --workload math --draft dspark \\
      --draft-model ./Ling-3.0-flash-dspark --draft-confidence 0.3
  specprof record --model ./Ling-3.0-flash --prompts chat.jsonl --baseline-steps 50 \\
      --temperature 0.6 --top-p 0.95 --top-k 20 --seed 1

A line of a prompts file is a JSON object with `prompt` (text), `messages` (a chat, rendered with
the checkpoint's template) or `token_ids`; optional are `id`, `max_new_tokens`, `tags` and, with
`messages`, `enable_thinking`.

The trace's path is printed on stdout, everything else on stderr. Ctrl-C ends a recording cleanly:
what was recorded stays, marked incomplete.";

/// Run speculative decoding with the router instrumented and write a trace
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = EXAMPLES,
    override_usage = "specprof record [OPTIONS] --model <DIR|demo> <--prompts FILE|--prompt TEXT|--workload NAME>"
)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// What runs the model
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t = Backend::Auto, help_heading = "Model")]
    backend: Backend,

    /// Build the GPU's kernels from this folder of sources by NVRTC; for their developers (with --backend cuda)
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    kernel_src: Option<PathBuf>,

    /// Who drafts: the model's MTP block, a DSpark drafter, a lookup in the text so far, or nobody
    #[arg(long, value_enum, value_name = "DRAFTER", default_value_t = Draft::Mtp, display_order = 0, help_heading = "Drafting")]
    draft: Draft,
    /// Drafts per verify step, 1 to 15 [default: 3, or all of a DSpark drafter's block]. Each continues the one before: the engine
    /// verifies chains, no trees
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_DRAFT_LEN as i64), display_order = 0, help_heading = "Drafting")]
    draft_len: Option<u16>,

    /// Prompt tokens per prefill step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..=crate::record::MAX_PREFILL_CHUNK as i64), help_heading = "Workload")]
    prefill_chunk: u16,

    /// Sampling temperature, 0 = greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, display_order = 0, help_heading = "Sampling")]
    temperature: f64,

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
    /// Time the kernels of one step in N; with N of 2 and more the manifest says what timing costs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Recording")]
    kernel_every: u32,
    /// Which pass over the prompts the kernels' times are from. A second one slows no step of the trace; exit 1 when it emits other tokens
    #[arg(long, value_enum, value_name = "PASS", default_value_t = KernelsPass::Same, help_heading = "Recording")]
    kernels_pass: KernelsPass,
    /// Run the requests a first time with nothing recorded and compare the tokens; exit 1 when they differ
    #[arg(long, help_heading = "Recording")]
    self_check: bool,
    /// Clocks, temperature and load beside the steps
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Telemetry::Auto, help_heading = "Recording")]
    telemetry: Telemetry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Backend {
    /// The best that this machine and build have
    Auto,
    /// The CPU engine
    Cpu,
    /// The first NVIDIA GPU; not yet tried on a real one
    Cuda,
}

impl Backend {
    /// What runs the model. A GPU is taken when it is asked for: the engine on it has not been run on one yet.
    pub fn kind(self) -> BackendKind {
        if self == Self::Cuda { BackendKind::Cuda } else { BackendKind::Cpu }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kernels {
    /// As the backend allows: on the CPU, wall time of each operation by layer and component; on a GPU, by CUPTI where it can be
    /// used, else by an event after each kernel, without graphs
    Auto,
    /// By CUPTI on a GPU, or not at all
    Cupti,
    /// Never
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum KernelsPass {
    /// The one that everything else is from
    Same,
    /// Another one over the same prompts, after the first; its kernels stand under the steps of the first
    Second,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Telemetry {
    /// What the machine tells
    Auto,
    /// None
    Off,
}

impl Args {
    /// Refuses what this build or machine cannot do, and what can be seen to be wrong before anything is opened.
    fn check(&self) -> Result<(), Failure> {
        check_kernel_src(self.kernel_src.as_deref(), self.backend == Backend::Cuda)?;
        if self.backend == Backend::Cuda {
            probe::require_cuda()?;
        }
        if self.kernels == Kernels::Cupti && self.backend != Backend::Cuda {
            let reason = "--kernels cupti: CUPTI records a GPU's kernels, and the model runs on the CPU; use --kernels auto or off";
            return Err(Failure::Environment(reason.into()));
        }
        self.run.check(&[self.draft], &[self.temperature])?;
        if self.out.as_deref() == Some(Path::new("-")) {
            return Err(Failure::Input("--out -: a trace is a directory and cannot go to stdout; name a directory".into()));
        }
        Ok(())
    }

    fn options(&self, drafter: Option<&DsparkCheckpoint>) -> Options {
        let mut options = self.run.options();
        options.draft = self.draft.kind();
        options.draft_len = match (self.draft_len, drafter) {
            (Some(drafts), _) => usize::from(drafts),
            (None, Some(drafter)) => drafter.config.drafts(),
            (None, None) => options.draft_len,
        };
        options.sampling.temperature = self.temperature;
        options.prefill_chunk = usize::from(self.prefill_chunk);
        options.router_weights = self.router_probs;
        options.store_text = self.store_text;
        // On the CPU it is the engine itself that looks at the clock.
        options.kernels = self.kernels != Kernels::Off;
        options.cupti = match self.kernels {
            Kernels::Auto => CuptiUse::IfThere,
            Kernels::Cupti => CuptiUse::Always,
            Kernels::Off => CuptiUse::Never,
        };
        options.kernel_every = self.kernel_every;
        options.second_pass = self.kernels_pass == KernelsPass::Second;
        options.self_check = self.self_check;
        options.backend = self.backend.kind();
        options.kernel_src.clone_from(&self.kernel_src);
        options
    }

    /// Options that were given and change nothing, with the reason.
    fn without_effect(&self, prompts: &[Prompt]) -> Vec<String> {
        let mut notes = Vec::new();
        if self.temperature == 0.0 && (self.run.top_p < 1.0 || self.run.top_k > 0) {
            notes.push("--top-p and --top-k have no effect at temperature 0, which is greedy".to_owned());
        }
        if self.draft == Draft::None && self.draft_len.is_some() {
            notes.push("--draft-len has no effect with --draft none: there are no drafts".to_owned());
        }
        if self.draft == Draft::None && self.run.baseline_steps > 0 {
            notes.push("--baseline-steps has no effect with --draft none: every step is a plain decode step".to_owned());
        }
        if self.kernel_every > 1 && self.kernels == Kernels::Off {
            notes.push("--kernel-every has no effect with --kernels off".to_owned());
        }
        if self.kernels_pass == KernelsPass::Second && self.kernels == Kernels::Off {
            notes.push("--kernels-pass has no effect with --kernels off".to_owned());
        }
        if self.run.thinking.is_some() && !prompts.iter().any(|p| matches!(p.source, PromptSource::Messages { enable_thinking: None, .. }))
        {
            notes.push("--thinking has no effect: no prompt is a chat that leaves it open".to_owned());
        }
        notes
    }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    args.check()?;
    // What is quickly checked comes before a large checkpoint is opened.
    let prompts = args.run.read_prompts()?;
    for ignored in args.without_effect(&prompts) {
        ui.warn(&ignored);
    }
    let (checkpoint, drafter) = args.run.open(args.backend.kind())?;
    ui.detail(&format!("{}: {} tensors, identity {}", checkpoint.name, checkpoint.inventory.total().tensors, checkpoint.identity));
    if let Some(drafter) = &drafter {
        ui.detail(&format!("{}: {} tensors, identity {}", drafter.name, drafter.inventory.total().tensors, drafter.identity));
    }
    let options = args.options(drafter.as_ref());
    let plan = Plan::with_drafter(&checkpoint, drafter.as_ref(), &prompts, options).map_err(Failure::from)?;
    let stop = stop_flag();
    let telemetry = args.telemetry == Telemetry::Auto;
    let (dir, recording) = match &args.out {
        Some(dir) => (dir.clone(), record_with_progress(&plan, dir, args.force, telemetry, &stop, ui)?),
        None => {
            let name = format!("{}-{}", checkpoint.name, plan.options.draft.as_str());
            let attempt = |dir: &Path| try_record(&plan, dir, false, telemetry, &stop, ui);
            free_directory(Path::new("traces"), &name, attempt).map_err(|error| failure(&plan, error))?
        }
    };
    if recording.totals.steps > 0 || !recording.totals.interrupted {
        ui.result(&format!("{}\n", dir.display()))?;
    }
    finish(&recording, &dir, ui)
}

/// Refuses `--kernel-src` without a GPU, or of no folder, before anything is loaded.
pub(super) fn check_kernel_src(dir: Option<&Path>, cuda: bool) -> Result<(), Failure> {
    match dir {
        Some(_) if !cuda => Err(Failure::Input("--kernel-src goes with --backend cuda; the CPU engine has no kernels".into())),
        Some(dir) if !dir.is_dir() => Err(Failure::Input(format!("--kernel-src {}: is no folder", dir.display()))),
        _ => Ok(()),
    }
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
        RecordError::Engine(error @ EngineError::Device(_)) if is_of_cupti(&error) => {
            Failure::Environment(format!("--kernels cupti: {error}"))
        }
        RecordError::Engine(EngineError::Device(reason)) => Failure::Environment(format!("--backend cuda: {reason}")),
        RecordError::Engine(error @ EngineError::NotFinite { .. }) => Failure::Input(format!("{}: {error}", plan.checkpoint.name)),
        other => other.into(),
    }
}

fn try_record(plan: &Plan<'_>, dir: &Path, force: bool, telemetry: bool, stop: &AtomicBool, ui: &Ui) -> Result<Recording, RecordError> {
    let bar = ui.progress(plan.max_tokens(), "tokens");
    let loading = LoadingBar::new(ui);
    let mut show = |progress: Progress| match progress {
        Progress::Opening(Opening::Planned(memory)) => ui.note(&format!("memory: {memory}")),
        Progress::Opening(opening) => loading.told(opening),
        Progress::Running(p) => {
            loading.end();
            bar.set_position(p.settled_tokens);
            let pass = if p.second_pass { "second pass, " } else { "" };
            bar.set_message(format!("{pass}request {}/{}", (p.totals.requests as usize + 1).min(p.requests), p.requests));
        }
    };
    let recording = crate::record::record(plan, dir, force, telemetry, stop, &mut show);
    loading.end();
    bar.finish_and_clear();
    recording
}

/// So many verify steps without any accepted draft are no accident.
const MANY_WINDOWS: u64 = 100;

/// Says what was recorded, and whether it was all.
fn finish(recording: &Recording, dir: &Path, ui: &Ui) -> Result<(), Failure> {
    for warning in &recording.manifest.warnings {
        ui.warn(&warning.message);
    }
    if recording.totals.verify_steps >= MANY_WINDOWS && recording.totals.accepted == 0 {
        ui.warn("no draft was accepted: is the drafter one of this model? one of another target records as well as its own");
    }
    if recording.totals.interrupted {
        let steps = recording.totals.steps;
        if steps == 0 {
            return Err(Failure::Interrupted("interrupted before the first step; nothing was recorded".into()));
        }
        return Err(Failure::Interrupted(format!(
            "interrupted; {} has the {} so far and is marked incomplete",
            dir.display(),
            counted_plain(steps, "step")
        )));
    }
    ui.note(&format!("{}: {}", summary(recording), dir.display()));
    match self_check(&recording.manifest, dir) {
        Some(difference) => Err(Failure::Check(difference)),
        None => {
            if let Some(hash) = &recording.manifest.instrumentation.unrecorded_token_hash {
                ui.note(&format!("--self-check: passed, the tokens are those of the same run with nothing recorded (hash {hash})"));
            }
            Ok(())
        }
    }
}

/// What is wrong when recording has changed the tokens; `None` when it has not, or was not looked at.
fn self_check(manifest: &Manifest, dir: &Path) -> Option<String> {
    let unrecorded = manifest.instrumentation.unrecorded_token_hash.as_ref()?;
    let recorded = manifest.token_hash.as_ref()?;
    (unrecorded != recorded).then(|| {
        format!(
            "--self-check: {}: the recorded run emitted other tokens (hash {recorded}) than the same run with nothing recorded ({unrecorded}); \
             the trace is not to be trusted",
            dir.display()
        )
    })
}

/// One line: steps, tokens, tokens per step.
pub(super) fn summary(recording: &Recording) -> String {
    let t = recording.totals;
    let per_step = t.tokens_per_step().map(|tau| format!(", {tau:.2} tokens per verify step")).unwrap_or_default();
    format!(
        "recorded {} in {} ({} verify, {} decode), {}{per_step}",
        counted_plain(t.requests, "request"),
        counted_plain(t.steps, "step"),
        t.verify_steps,
        t.decode_steps,
        counted_plain(t.tokens, "token")
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
            RecordError::Workload(WorkloadError::Io { path, source }) => read_failure(&path, &source),
            differ @ RecordError::PassesDiffer { .. } => Self::Check(super::exit::one_line(&differ.to_string())),
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
