//! A workload made ready for a model: token ids, limits and stop tokens, everything checked.

use super::workload::{Prompt, PromptSource, WorkloadError};
use super::{BackendKind, CuptiUse, RecordError};
use crate::engine::chat::{ChatTemplate, special_token};
use crate::engine::drafter::{self, DraftKind, Drafter, MAX_DRAFT_LEN};
use crate::engine::dspark::DsparkCheckpoint;
use crate::engine::sampling::Sampling;
use crate::engine::speculate::Settings;
use crate::engine::tokenizer::Tokenizer;
use crate::engine::{Checkpoint, EngineError, Routing, RoutingPlan};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::PathBuf;

/// Longest prefill step: the rows of a step are counted in 16 bits.
pub const MAX_PREFILL_CHUNK: usize = 8192;

/// What a recording is to do, apart from its prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Who drafts.
    pub draft: DraftKind,
    /// γ, 1...15; without effect when nobody drafts.
    pub draft_len: usize,
    /// Tokens to generate per request unless the prompt says otherwise.
    pub max_new_tokens: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Whether end-of-sequence tokens do not end a request.
    pub ignore_eos: bool,
    /// Plain decode steps to interleave over the whole run.
    pub baseline_steps: u32,
    /// Rows of one prefill step.
    pub prefill_chunk: usize,
    /// Whether gate weights are recorded.
    pub router_weights: bool,
    /// Whether prompt and output text are recorded.
    pub store_text: bool,
    /// Whether the times of the engine's operations are recorded.
    pub kernels: bool,
    /// Of so many steps those of one; at least 1.
    pub kernel_every: u32,
    /// Whether they are those of a second pass over the same prompts.
    pub second_pass: bool,
    /// Whether the requests are run a first time with nothing recorded, to compare the tokens.
    pub self_check: bool,
    /// Whether CUPTI times them on a GPU.
    pub cupti: CuptiUse,
    /// A window of a DSpark drafter ends where the product of its drafts' confidences falls below this; 0 = never.
    pub min_survival: f64,
    /// Whether the model thinks first, in chats that do not say so themselves; the template's own default when `None`.
    pub thinking: Option<bool>,
    /// Requests that are run before the first recorded one and left out: those of the plan, from the first on.
    pub warmup: u32,
    /// What runs the model.
    pub backend: BackendKind,
    /// A folder of sources that a GPU's kernels are built from, instead of those that are part of the program.
    pub kernel_src: Option<PathBuf>,
    /// What chooses the target's experts; a plan is seeded as the sampling is.
    pub routing: Routing,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            draft: DraftKind::Mtp,
            draft_len: 3,
            max_new_tokens: 128,
            sampling: Sampling::GREEDY,
            ignore_eos: false,
            baseline_steps: 0,
            prefill_chunk: 512,
            router_weights: false,
            store_text: false,
            kernels: true,
            kernel_every: 1,
            second_pass: false,
            self_check: false,
            cupti: CuptiUse::Never,
            min_survival: 0.0,
            thinking: None,
            warmup: 0,
            backend: BackendKind::Cpu,
            kernel_src: None,
            routing: Routing::Model,
        }
    }
}

/// One request of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedRequest {
    /// The prompt's tokens.
    pub tokens: Vec<u32>,
    /// Tokens to generate.
    pub max_new_tokens: u32,
    /// The user's name for it.
    pub id: String,
    /// Tags as a JSON text.
    pub tags: String,
}

/// A checked workload on a model.
#[derive(Debug)]
pub struct Plan<'c> {
    /// The model.
    pub checkpoint: &'c Checkpoint,
    /// The drafter's own checkpoint, of [`DraftKind::Dspark`].
    pub drafter: Option<&'c DsparkCheckpoint>,
    /// What to do.
    pub options: Options,
    /// The requests, in order.
    pub requests: Vec<PlannedRequest>,
    /// Tokens that end a request (configuration, generation configuration, tokenizer); kept also when they are ignored.
    pub stop_tokens: Vec<u32>,
    /// The tokenizer, when the checkpoint has one.
    pub tokenizer: Option<Tokenizer>,
}

impl<'c> Plan<'c> {
    /// [`Plan::with_drafter`] of a model that needs none.
    ///
    /// # Errors
    /// As there.
    pub fn new(checkpoint: &'c Checkpoint, prompts: &[Prompt], options: Options) -> Result<Self, RecordError> {
        Self::with_drafter(checkpoint, None, prompts, options)
    }

    /// Checks options and prompts against a model and the drafter that was opened for it.
    ///
    /// # Errors
    /// When an option is out of range or asks for a drafter that is not there, a prompt cannot be tokenized, has a token that the
    /// model does not know, or does not fit the contexts of model and drafter with what is to be generated. Prompts are named by
    /// where they were read.
    pub fn with_drafter(
        checkpoint: &'c Checkpoint,
        drafter: Option<&'c DsparkCheckpoint>,
        prompts: &[Prompt],
        options: Options,
    ) -> Result<Self, RecordError> {
        check_options(&options)?;
        if options.draft == DraftKind::Mtp && checkpoint.weights.mtp.is_none() {
            return Err(RecordError::NoMtp { model: checkpoint.name.clone() });
        }
        RoutingPlan::new(options.routing, options.sampling.seed, &checkpoint.config)?;
        let drafter = drafter.filter(|_| options.draft == DraftKind::Dspark);
        check_drafter(drafter, &options)?;
        let texts = Texts::open(checkpoint)?;
        if options.store_text && texts.tokenizer.is_none() {
            return Err(checkpoint.files.absent(TOKENIZER).into());
        }
        let context = checkpoint.config.max_position.min(drafter.map_or(usize::MAX, |d| d.config.max_position));
        let requests = prompts.iter().map(|p| texts.plan(p, checkpoint, context, &options)).collect::<Result<Vec<_>, _>>()?;
        let mut stop_tokens = checkpoint.config.eos.clone();
        if let Some(eos) = texts.eos
            && !stop_tokens.contains(&eos)
        {
            stop_tokens.push(eos);
        }
        Ok(Self { checkpoint, drafter, options, requests, stop_tokens, tokenizer: texts.tokenizer })
    }

    /// The drafter of the run's requests.
    ///
    /// # Errors
    /// When the model has no block for it, which [`Plan::with_drafter`] has refused.
    pub fn build_drafter(&self) -> Result<Box<dyn Drafter + 'c>, RecordError> {
        let model = self.checkpoint;
        let built = match self.drafter {
            Some(external) => Some(drafter::external(external, self.options.min_survival, &model.config, &model.weights)),
            None => self.options.draft.build(&model.config, &model.weights),
        };
        built.ok_or_else(|| RecordError::NoMtp { model: model.name.clone() })
    }

    /// The plan that chooses the target's experts; `None` where its router does.
    ///
    /// # Errors
    /// When the model's experts do not allow it, which [`Plan::with_drafter`] has refused.
    pub fn routing_plan(&self) -> Result<Option<RoutingPlan>, EngineError> {
        RoutingPlan::new(self.options.routing, self.options.sampling.seed, &self.checkpoint.config)
    }

    /// Drafts that every window has unless the context ends; `None` of a drafter that proposes as it likes.
    pub fn full_window(&self) -> Option<usize> {
        let full = match self.options.draft {
            DraftKind::Mtp => true,
            DraftKind::Dspark => self.options.min_survival == 0.0,
            DraftKind::Ngram | DraftKind::None => false,
        };
        full.then_some(self.options.draft_len)
    }

    /// What the engine needs to know.
    pub fn settings(&self) -> Settings {
        Settings {
            sampling: self.options.sampling,
            draft_len: self.options.draft_len,
            prefill_chunk: self.options.prefill_chunk,
            stop_tokens: if self.options.ignore_eos { Vec::new() } else { self.stop_tokens.clone() },
            kernel_every: self.options.kernel_every,
        }
    }

    /// Tokens that the run generates at most.
    pub fn max_tokens(&self) -> u64 {
        self.requests.iter().map(|r| u64::from(r.max_new_tokens)).sum()
    }
}

fn check_options(options: &Options) -> Result<(), EngineError> {
    options.sampling.check()?;
    let range = |name: &str, value: usize, max: usize| match value {
        v if (1..=max).contains(&v) => Ok(()),
        v => Err(EngineError::Request(format!("{name} {v} is not in 1...{max}"))),
    };
    range("draft length", options.draft_len, MAX_DRAFT_LEN)?;
    range("prefill chunk", options.prefill_chunk, MAX_PREFILL_CHUNK)?;
    range("max new tokens", options.max_new_tokens as usize, u32::MAX as usize)
}

/// Whether the drafter is there that the options ask for, and does what they ask of it.
fn check_drafter(drafter: Option<&DsparkCheckpoint>, options: &Options) -> Result<(), RecordError> {
    let refuse = |text: String| Err(EngineError::Request(text).into());
    if !(0.0..=1.0).contains(&options.min_survival) {
        return refuse(format!("draft confidence {} is not in 0...1", options.min_survival));
    }
    let Some(drafter) = drafter else {
        return match options.draft {
            DraftKind::Dspark => refuse("drafting with dspark needs a drafter's checkpoint; name it with --draft-model".into()),
            _ if options.min_survival > 0.0 => {
                refuse("only windows of a dspark drafter end by confidence; leave --draft-confidence out".into())
            }
            _ => Ok(()),
        };
    };
    let most = drafter.config.drafts();
    if options.draft_len > most {
        return refuse(format!(
            "draft length {} is more than the {most} drafts of a block of {}; give {most} or less",
            options.draft_len, drafter.name
        ));
    }
    if options.min_survival > 0.0 && drafter.weights.confidence.is_none() {
        return refuse(format!("{} has no confidence head; leave --draft-confidence out", drafter.name));
    }
    Ok(())
}

/// Seeded ids below `vocab`.
fn random_ids(tokens: usize, stream: u64, vocab: usize, seed: u64) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    (0..tokens).map(|_| random.random_range(0..vocab as u32)).collect()
}

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

/// A checkpoint's tokenizer and what belongs to it.
struct Texts {
    tokenizer: Option<Tokenizer>,
    eos: Option<u32>,
    config: Option<(Vec<u8>, PathBuf)>,
}

impl Texts {
    fn open(checkpoint: &Checkpoint) -> Result<Self, EngineError> {
        let files = &checkpoint.files;
        let bytes = checkpoint.file(TOKENIZER)?;
        let tokenizer = bytes.map(|b| Tokenizer::from_bytes(&b, &files.path(TOKENIZER))).transpose()?;
        let config = checkpoint.file(TOKENIZER_CONFIG)?.map(|b| (b.into_owned(), files.path(TOKENIZER_CONFIG)));
        let word = config.as_ref().map(|(bytes, path)| special_token(bytes, path, "eos_token")).transpose()?.flatten();
        let eos = tokenizer.as_ref().zip(word).and_then(|(t, word)| t.id_of(&word));
        Ok(Self { tokenizer, eos, config })
    }

    /// `context`: tokens that may be in the cache.
    fn plan(&self, prompt: &Prompt, checkpoint: &Checkpoint, context: usize, options: &Options) -> Result<PlannedRequest, RecordError> {
        let refuse = |message: String| WorkloadError::prompt(&prompt.origin, message);
        let tokens = match &prompt.source {
            PromptSource::Tokens(ids) => ids.clone(),
            PromptSource::Random { tokens, .. } if *tokens > context => {
                return Err(refuse(format!("{tokens} prompt tokens do not fit the model's context of {context}; give fewer")).into());
            }
            PromptSource::Random { tokens, stream } => random_ids(*tokens, *stream, checkpoint.config.vocab, options.sampling.seed),
            PromptSource::Text(text) => self.tokenizer(checkpoint)?.encode(text, true)?,
            PromptSource::Messages { messages, enable_thinking } => {
                let template = self.template(checkpoint)?.ok_or_else(|| {
                    let name = &checkpoint.name;
                    refuse(format!(
                        "{name}: has no chat template, and built-in workloads are chats; give plain text by --prompt, or by --prompts with \
                             `prompt` instead of `messages`"
                    ))
                })?;
                let text = template.render(messages, enable_thinking.or(options.thinking)).map_err(|e| refuse(e.to_string()))?;
                self.tokenizer(checkpoint)?.encode(&text, false)?
            }
        };
        if tokens.is_empty() {
            return Err(refuse("the prompt has no tokens; give at least one".into()).into());
        }
        let config = &checkpoint.config;
        if let Some((at, id)) = tokens.iter().enumerate().find(|(_, id)| **id as usize >= config.vocab) {
            return Err(refuse(format!("token {at} is {id}, the model's vocabulary ends at {}", config.vocab - 1)).into());
        }
        let max_new_tokens = prompt.max_new_tokens.unwrap_or(options.max_new_tokens);
        // The last generated token is never put into the cache.
        let needed = tokens.len() as u64 + u64::from(max_new_tokens) - 1;
        if needed > context as u64 {
            let length = tokens.len();
            let message = format!(
                "{length} prompt tokens and {max_new_tokens} new ones do not fit the {} context of {context}; shorten the prompt or lower max_new_tokens",
                if context < config.max_position { "drafter's" } else { "model's" }
            );
            return Err(refuse(message).into());
        }
        Ok(PlannedRequest { tokens, max_new_tokens, id: prompt.id.clone(), tags: prompt.tags.clone() })
    }

    fn tokenizer(&self, checkpoint: &Checkpoint) -> Result<&Tokenizer, EngineError> {
        self.tokenizer.as_ref().ok_or_else(|| checkpoint.files.absent(TOKENIZER))
    }

    fn template(&self, checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>, EngineError> {
        let jinja = checkpoint.file(TEMPLATE)?;
        let path = checkpoint.files.path(TEMPLATE);
        let config = self.config.as_ref().map(|(bytes, path)| (bytes.as_slice(), path.as_path()));
        ChatTemplate::from_files(jinja.as_deref().map(|b| (b, path.as_path())), config)
    }
}
