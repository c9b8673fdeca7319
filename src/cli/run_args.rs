//! What `record` and `sweep` have in common: the model, its drafter's checkpoint, the prompts and how tokens are chosen.

use super::exit::Failure;
use crate::engine::drafter::DraftKind;
use crate::engine::presets::Layout;
use crate::engine::sampling::Sampling;
use crate::engine::synthetic::Synthetic;
use crate::engine::{Checkpoint, DsparkCheckpoint, Routing};
use crate::record::{BackendKind, Options, Prompt, RecordError, Workload, machine, workload};
use std::path::{Path, PathBuf};

/// Prompts of random tokens, unless --requests says otherwise.
const RANDOM_PROMPTS: u32 = 4;

/// Arguments of every recording.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what_to_run").required(true).multiple(true).args(["prompts", "prompt", "workload", "prompt_tokens"]))]
pub(super) struct RunArgs {
    /// Checkpoint directory, `demo` for the built-in model, or `synthetic:SHAPE` for made-up weights of the shape ling-3.0-flash,
    /// ling-3.0-tiny or ling-nano
    #[arg(long, value_name = "DIR|demo|synthetic:SHAPE", help_heading = "Model")]
    pub model: PathBuf,
    /// How a synthetic model's weights are stored [default: bf16]
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Model")]
    pub quant: Option<Quant>,

    /// Choose the target's experts by a seeded plan instead of its routers: uniform, zipf:S (popularity by rank^-S), or
    /// overlap:F (neighbouring rows share F of their experts)
    #[arg(long, value_name = "model|uniform|zipf:S|overlap:F", default_value_t = Routing::Model, help_heading = "Model")]
    pub routing: Routing,

    /// Checkpoint directory of a separate drafter (with --draft dspark)
    #[arg(long, value_name = "DIR", help_heading = "Drafting")]
    pub draft_model: Option<PathBuf>,
    /// End a window where the product of the drafter's confidences falls below this, from 0 (never) to 1; the first draft is
    /// always verified (with --draft dspark)
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, help_heading = "Drafting")]
    pub draft_confidence: f64,
    /// Plain decode steps to interleave over a recording, so that the verify ratio is measured in it
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Drafting")]
    pub baseline_steps: u32,

    /// File with one prompt a line, as JSON objects
    #[arg(long, value_name = "FILE.jsonl", help_heading = "Workload")]
    pub prompts: Option<PathBuf>,
    /// A prompt's text (repeat for more)
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts", help_heading = "Workload")]
    pub prompt: Vec<String>,
    /// Built-in prompts (separate several by commas)
    #[arg(long, value_enum, value_name = "NAME", value_delimiter = ',', conflicts_with_all = ["prompts", "prompt"], help_heading = "Workload")]
    pub workload: Vec<BuiltIn>,
    /// Prompts of so many random token ids
    #[arg(long, value_name = "N", conflicts_with_all = ["prompts", "prompt", "workload"], value_parser = clap::value_parser!(u32).range(1..), help_heading = "Workload")]
    pub prompt_tokens: Option<u32>,
    /// Number of prompts (with --prompt-tokens) [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000), help_heading = "Workload")]
    pub requests: Option<u32>,
    /// Tokens to generate per request, unless its line says otherwise
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Workload")]
    pub max_new_tokens: u32,
    /// Go on after an end-of-sequence token
    #[arg(long, help_heading = "Workload")]
    pub ignore_eos: bool,
    /// Whether the model thinks before it answers, in chats that do not say so themselves [default: as the template has it]
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Workload")]
    pub thinking: Option<Thinking>,
    /// Requests to run first and leave out of the trace: the first ones of the workload, which are recorded after that
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000), help_heading = "Workload")]
    pub warmup: u32,

    /// Keep the most likely tokens of this mass, 1 = all
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_p: f64,
    /// Keep this many most likely tokens, 0 = all
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    pub top_k: u32,
    /// Seed of the random numbers
    #[arg(long, value_name = "S", default_value_t = 0, help_heading = "Sampling")]
    pub seed: u64,
}

/// `--draft`.
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

/// `--workload`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum BuiltIn {
    /// Questions and requests of everyday
    Chat,
    /// Functions to write, to explain and to mend
    Code,
    /// Word problems and derivations
    Math,
    /// Texts to repeat with small changes: the easiest for a drafter
    Repeat,
}

/// `--thinking`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Thinking {
    /// It thinks first
    On,
    /// It answers at once
    Off,
}

impl Draft {
    /// The drafter.
    pub fn kind(self) -> DraftKind {
        match self {
            Self::Mtp => DraftKind::Mtp,
            Self::Dspark => DraftKind::Dspark,
            Self::Ngram => DraftKind::Ngram,
            Self::None => DraftKind::None,
        }
    }
}

impl RunArgs {
    /// Refuses what can be seen to be wrong before anything is opened, named as it is typed.
    pub fn check(&self, drafters: &[Draft], temperatures: &[f64]) -> Result<(), Failure> {
        if let Some(t) = temperatures.iter().find(|t| !(t.is_finite() && **t >= 0.0)) {
            return Err(Failure::Input(format!("--temperature {t}: give 0 for greedy, or a number above it")));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Failure::Input(format!("--top-p {}: give a share above 0 and up to 1", self.top_p)));
        }
        if !(0.0..=1.0).contains(&self.draft_confidence) {
            return Err(Failure::Input(format!("--draft-confidence {}: give a share from 0 to 1", self.draft_confidence)));
        }
        // A clap rule would not hold: it is dropped where what it asks for conflicts with what is there.
        if self.requests.is_some() && self.prompt_tokens.is_none() {
            return Err(Failure::Input(
                "--requests goes with --prompt-tokens; of --workload, --prompts and --prompt every prompt is a request: leave prompts out for fewer"
                    .into(),
            ));
        }
        let dspark = drafters.contains(&Draft::Dspark);
        if dspark && self.draft_model.is_none() {
            return Err(Failure::Input("--draft dspark: name the drafter's checkpoint with --draft-model DIR".into()));
        }
        if !dspark && self.draft_model.is_some() {
            return Err(Failure::Input("--draft-model goes with --draft dspark; the other drafters need no model of their own".into()));
        }
        if !dspark && self.draft_confidence > 0.0 {
            return Err(Failure::Input(
                "--draft-confidence goes with --draft dspark, whose windows alone can be ended early; what mtp's recorded probabilities would \
                 save, `specprof advise` tells"
                    .into(),
            ));
        }
        Ok(())
    }

    /// The prompts, in order.
    pub fn read_prompts(&self) -> Result<Vec<Prompt>, Failure> {
        if let Some(path) = &self.prompts {
            return workload::read(path).map_err(|e| RecordError::from(e).into());
        }
        if let Some(tokens) = self.prompt_tokens {
            return Ok(workload::random(tokens as usize, self.requests.unwrap_or(RANDOM_PROMPTS) as usize));
        }
        if self.workload.is_empty() {
            return Ok(workload::from_texts(&self.prompt));
        }
        let prompts: Result<Vec<_>, _> = self.workload.iter().map(|name| Workload::from(*name).prompts()).collect();
        prompts.map(|lists| lists.concat()).map_err(|e| RecordError::from(e).into())
    }

    /// The model, and the drafter's checkpoint where one is named.
    pub fn open(&self, backend: BackendKind) -> Result<(Checkpoint, Option<DsparkCheckpoint>), Failure> {
        let checkpoint = open_model(&self.model, self.quant, backend)?;
        let drafter = self.draft_model.as_deref().map(|dir| DsparkCheckpoint::open(dir, &checkpoint.config)).transpose()?;
        Ok((checkpoint, drafter))
    }

    /// What these arguments say of a recording; drafter, draft length and temperature are the command's own.
    pub fn options(&self) -> Options {
        Options {
            max_new_tokens: self.max_new_tokens,
            sampling: Sampling { temperature: 0.0, top_p: self.top_p, top_k: self.top_k, seed: self.seed },
            ignore_eos: self.ignore_eos,
            baseline_steps: self.baseline_steps,
            min_survival: self.draft_confidence,
            thinking: self.thinking.map(|thinking| thinking == Thinking::On),
            warmup: self.warmup,
            routing: self.routing,
            ..Options::default()
        }
    }
}

/// `--quant`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Quant {
    /// Everything BF16
    Bf16,
    /// FP8 in blocks of 128 x 128, as the released FP8 checkpoint
    Fp8,
    /// As fp8, with MXFP4 experts
    Mxfp4,
    /// As bf16, with INT4 experts
    Int4,
}

impl Quant {
    /// The storage that it stands for.
    pub fn layout(self) -> Layout {
        match self {
            Self::Bf16 => Layout::Bf16,
            Self::Fp8 => Layout::Fp8,
            Self::Mxfp4 => Layout::Fp4,
            Self::Int4 => Layout::Int4,
        }
    }
}

/// The synthetic model of a name, when it is one's; `--quant` goes with no other.
pub(super) fn synthetic(name: &Path, quant: Option<Quant>) -> Result<Option<Synthetic>, Failure> {
    match Synthetic::find(name, quant.map_or(Layout::Bf16, Quant::layout)).transpose()? {
        None if quant.is_some() => Err(Failure::Input("--quant goes with --model synthetic:SHAPE; a checkpoint is as it is stored".into())),
        found => Ok(found),
    }
}

/// Opens a checkpoint, or makes a synthetic model's weights; a device makes them by itself.
pub(super) fn open_model(name: &Path, quant: Option<Quant>, backend: BackendKind) -> Result<Checkpoint, Failure> {
    match synthetic(name, quant)? {
        Some(model) if backend == BackendKind::Cuda => Ok(model.for_device()?),
        Some(model) => Ok(model.open(machine::memory().map(|memory| memory.available))?),
        None => Ok(Checkpoint::resolve(name)?),
    }
}

impl From<BuiltIn> for Workload {
    fn from(name: BuiltIn) -> Self {
        match name {
            BuiltIn::Chat => Self::Chat,
            BuiltIn::Code => Self::Code,
            BuiltIn::Math => Self::Math,
            BuiltIn::Repeat => Self::Repeat,
        }
    }
}
