//! The plain structs that producers (the engine, importers) emit and the writer stores.
//!
//! They are kept apart from the stored columns: a change of the engine must not change the format.

use serde::{Deserialize, Serialize};

/// The id of a token that the producer did not give: no vocabulary is that large.
pub const UNKNOWN_TOKEN: u32 = u32::MAX;
/// A context length that the producer did not give.
pub const UNKNOWN_CONTEXT: u32 = u32::MAX;

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Prompt rows (one chunk of them), no drafts.
    Prefill,
    /// One row, no drafts.
    Decode,
    /// The anchor and at least one draft.
    Verify,
}

impl Phase {
    /// The word stored in the `phase` column.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Verify => "verify",
        }
    }

    /// The phase of a stored word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Prefill, Self::Decode, Self::Verify].into_iter().find(|p| p.as_str() == word)
    }
}

/// Whose router chose: the target model's or the draft module's. The two are never mixed in a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Module {
    /// A layer of the target model.
    Target,
    /// A layer of the drafter (the MTP block of Ling-3.0-flash is layer 42).
    Draft,
}

impl Module {
    /// The word stored in the `module` column.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Target => "target",
            Self::Draft => "draft",
        }
    }

    /// The module of a stored word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Target, Self::Draft].into_iter().find(|m| m.as_str() == word)
    }
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence token was emitted.
    Stop,
    /// The wanted number of tokens was reached.
    Length,
    /// The recording was interrupted; what was generated so far is in the trace.
    Aborted,
    /// The engine did not say.
    Unknown,
}

impl FinishReason {
    /// The word stored in the `finish_reason` column.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Aborted => "aborted",
            Self::Unknown => "unknown",
        }
    }

    /// The reason of a stored word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Stop, Self::Length, Self::Aborted, Self::Unknown].into_iter().find(|r| r.as_str() == word)
    }
}

/// One prompt and its generation, emitted when it ends.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestEvent {
    /// 0-based, in the order in which requests started.
    pub request_id: u32,
    /// The user's own name for it; empty when none was given.
    pub id: String,
    /// Length of the prompt in tokens.
    pub prompt_tokens: u32,
    /// Number of emitted tokens.
    pub generated_tokens: u32,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Free tags as a JSON text (an object or a list of words), `{}` when there are none.
    pub tags: String,
    /// Prompt text, kept only when asked for.
    pub prompt_text: Option<String>,
    /// Generated text, kept only when asked for.
    pub output_text: Option<String>,
}

/// One forward pass of the target model, with the drafting before it and the commit after it.
#[derive(Debug, Clone, PartialEq)]
pub struct StepEvent {
    /// 0-based and strictly increasing over the whole trace.
    pub step_id: u32,
    /// The request it belongs to.
    pub request_id: u32,
    /// The forward pass that it shared with steps of other requests; `None` when it had one to itself. Never decreasing, and the
    /// steps of a pass come one after the other.
    pub pass_id: Option<u32>,
    /// What the step did.
    pub phase: Phase,
    /// Accepted drafts, 0...rows-1; 0 outside verify steps. The bonus token is not counted.
    pub accepted: u16,
    /// Tokens of the request that were in the cache before this step; [`UNKNOWN_CONTEXT`] where nobody said.
    pub context_len: u32,
    /// The rows' tokens: prompt tokens, or the anchor and the drafts; [`UNKNOWN_TOKEN`] where nobody said.
    /// Its length is `rows`.
    pub input_tokens: Vec<u32>,
    /// Row that each row continues, -1 for the anchor; `None` when the window is a chain.
    pub parents: Option<Vec<i16>>,
    /// Tokens that this step added to the output: accepted drafts and the bonus token, cut where the request ended.
    pub emitted_tokens: Vec<u32>,
    /// The drafter's own probability of each draft, when known. One per draft.
    pub draft_probs: Option<Vec<f32>>,
    /// The drafter's own estimate that each draft is kept, given that those before it are, when it makes one. One per draft.
    pub draft_confidences: Option<Vec<f32>>,
    /// Begin of the step (drafting included), ns since the Unix epoch by a monotonic clock.
    pub host_begin_ns: i64,
    /// End of the step (commit included), same clock.
    pub host_end_ns: i64,
    /// Host time of drafting within the step, ns. Of drafts that a device chains without the host, the time of launching them.
    pub draft_host_ns: i64,
    /// Host time of the target's forward pass within the step, ns; with the wait for drafts that were only launched.
    pub target_host_ns: i64,
    /// Device time of the step, drafting and commit included, ns; `None` where no device ran.
    pub device_ns: Option<i64>,
    /// The routers' choices in this step.
    pub routes: StepRoutes,
}

/// The first row whose parent is no earlier row, with its parent; row 0 is the anchor and has -1.
pub fn wrong_parent(parents: &[i16]) -> Option<(usize, i16)> {
    let wrong = |(row, parent): (usize, i16)| if row == 0 { parent != -1 } else { usize::try_from(parent).map_or(true, |p| p >= row) };
    parents.iter().copied().enumerate().find(|&place| wrong(place))
}

impl StepEvent {
    /// Number of rows of the pass.
    pub fn rows(&self) -> usize {
        self.input_tokens.len()
    }
}

/// One layer's rows within [`StepRoutes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteBlock {
    /// Layer as numbered in the checkpoint (absolute, dense layers counted).
    pub layer: u16,
    /// Whose router it is.
    pub module: Module,
    /// First row of the block: 0 for the target, the draft's position for a drafter's chained passes.
    pub first_row: u16,
    /// Number of rows.
    pub rows: u16,
}

/// The routed sets of one step, flat: the ids of all blocks one after the other.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepRoutes {
    /// Experts per row.
    pub k: usize,
    /// The blocks, in the order in which they were recorded.
    pub blocks: Vec<RouteBlock>,
    /// Ids of all blocks: `[sum of rows, k]`, each row in rank order (highest score first).
    pub ids: Vec<u16>,
    /// Gate weights aligned with `ids` (normalised, scaling included); empty when not kept.
    pub weights: Vec<f32>,
}

impl StepRoutes {
    /// An empty set of routes of `k` experts per row.
    pub fn new(k: usize) -> Self {
        Self { k, ..Self::default() }
    }

    /// Appends one layer's rows. `ids` is `[rows, k]`; `weights` is the same shape or empty.
    pub fn push(&mut self, module: Module, layer: u16, first_row: u16, ids: &[u16], weights: &[f32]) {
        debug_assert!(self.k > 0 && ids.len().is_multiple_of(self.k));
        let rows = u16::try_from(ids.len() / self.k.max(1)).unwrap_or(u16::MAX);
        self.blocks.push(RouteBlock { layer, module, first_row, rows });
        self.ids.extend_from_slice(ids);
        self.weights.extend_from_slice(weights);
    }
}
