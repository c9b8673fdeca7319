//! `manifest.json`: who wrote the trace, of what model, how, and which part files belong to it.
//!
//! The manifest is the commit record: it is replaced atomically, and a part file that it does not
//! list does not belong to the trace.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything about a run that is not a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// `major.minor`; see [`super`] for what a reader accepts.
    pub format_version: String,
    /// Program and version that wrote the trace, `specprof 0.1.0`.
    pub written_by: String,
    /// Whether the run ended as planned and everything is on disk.
    pub complete: bool,
    /// Why it is not complete: `recording`, `interrupted`, `disk full`...; `null` when it is.
    pub incomplete_reason: Option<String>,
    /// Begin of the run, ns since the Unix epoch.
    pub started_unix_ns: i64,
    /// End of the run, ns since the Unix epoch; `null` while it is being written.
    pub ended_unix_ns: Option<i64>,
    /// The model's shape.
    pub model: ModelShape,
    /// The drafter and its draft length.
    pub drafter: DrafterInfo,
    /// How tokens were chosen; `null` when the engine did not say.
    pub sampling: Option<SamplingInfo>,
    /// Whether verify and decode rows give the same bits.
    pub verification: Verification,
    /// The engine, as `specprof-cpu`, `vllm 0.33`, ...
    pub engine: String,
    /// The device that ran the model.
    pub device: DeviceInfo,
    /// What is known of the windows' rejected rows.
    pub window_completeness: WindowCompleteness,
    /// Logical or physical expert ids.
    pub id_space: IdSpace,
    /// SHA-256 over all emitted tokens in request order, hexadecimal; `null` until the run is complete.
    pub token_hash: Option<String>,
    /// Cost of the instrumentation where it was measured.
    pub instrumentation: Instrumentation,
    /// `true` wherever no real device ran; such a trace's times are not a device's times.
    pub emulated: bool,
    /// Whether the steps' host times are known; without them those columns are null.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub host_times: bool,
    /// Whether `accepted` of the verify steps is known; without it, the column is 0 and means nothing.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub acceptance_known: bool,
    /// Whether a step without `pass_id` is known to have had its forward pass to itself; without it, others may have been in it.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub passes_known: bool,
    /// Of a trace of whole windows: steps behind the prompts that lack routes of some rows or layers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub irregular_steps: u64,
    /// By layer, how often each expert was chosen, where a trace has counts and no windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_counts: Option<BTreeMap<u16, Vec<u64>>>,
    /// Whether gate weights are in `routes`.
    pub router_weights: bool,
    /// Whether prompt and output text are in `requests`.
    pub text_stored: bool,
    /// Notes of the writer for every report made of this trace.
    #[serde(default)]
    pub warnings: Vec<Warning>,
    /// Part files by table, relative to the trace, in order.
    pub tables: BTreeMap<String, Vec<PartFile>>,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_yes(value: &bool) -> bool {
    *value
}

/// A number that is never 0: what is not known is 0 here and `null` in JSON. A 0 in JSON, as older files have it, is not known either.
pub mod zero_is_unknown {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes 0 as `null`.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &u16, serializer: S) -> Result<S::Ok, S::Error> {
        Some(*value).filter(|&n| n > 0).serialize(serializer)
    }

    /// Reads `null` as 0.
    ///
    /// # Errors
    /// Those of the deserializer.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
        Ok(Option::<u16>::deserialize(deserializer)?.unwrap_or(0))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_no(value: &bool) -> bool {
    !*value
}

/// One Parquet file of a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartFile {
    /// Path relative to the trace directory.
    pub path: String,
    /// Number of rows.
    pub rows: u64,
    /// CRC-32 (that of zlib and PNG) of the file's bytes; `None` where it is not known, as of older traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
}

/// The target model's shape as far as routing and cost need it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Name of the checkpoint's folder, or of the built-in model.
    pub name: String,
    /// Architecture tag.
    pub architecture: String,
    /// SHA-256 over config, tokenizer and weight headers, hexadecimal, when known.
    pub identity: Option<String>,
    /// Number of target layers, dense ones included.
    pub layers: u16,
    /// Target layers with a router, absolute numbers.
    pub moe_layers: Vec<u16>,
    /// Draft-module layers with a router, absolute numbers (42 for Ling-3.0-flash's MTP).
    pub draft_layers: Vec<u16>,
    /// Routed experts per layer (E).
    pub experts: u16,
    /// Whether `experts` is the model's number; otherwise it is the largest id that was seen, plus 1.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub experts_known: bool,
    /// Experts per token (k); 0 when it is not known, `null` in JSON.
    #[serde(with = "zero_is_unknown")]
    pub experts_per_token: u16,
    /// Shared experts per layer, when known.
    pub shared_experts: Option<u16>,
    /// Hidden size, when known.
    pub hidden_size: Option<u32>,
    /// Intermediate size of one routed expert, when known.
    pub expert_size: Option<u32>,
    /// Vocabulary size, when known.
    pub vocab_size: Option<u32>,
    /// Stored format of the routed experts: `bf16`, `f32`, `fp8`, `mxfp4`, `int4`, or `unknown`.
    pub quantisation: String,
    /// Stored bytes of one routed expert, scales included, when known.
    pub bytes_per_expert: Option<u64>,
    /// Weight bytes that every decode step reads besides routed experts, when known.
    pub bytes_other_per_step: Option<u64>,
    /// Whether the weights were made up by a seeded function: the shape is the model's, its text means nothing.
    #[serde(default, skip_serializing_if = "is_no")]
    pub synthetic: bool,
    /// What chose the target's experts, as `zipf:1.2`, where it was a plan; absent where it was the model's router.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<String>,
}

impl ModelShape {
    /// The number of routed experts in words: known, a lower bound, or unknown.
    pub fn experts_words(&self) -> String {
        match self.experts {
            0 => "unknown".into(),
            n if self.experts_known => n.to_string(),
            n => format!("at least {n}"),
        }
    }

    /// How many experts a token has, in words; 0 stands for unknown.
    pub fn top_k_words(&self) -> String {
        if self.experts_per_token == 0 { "unknown top-k".into() } else { format!("top {}", self.experts_per_token) }
    }
}

/// The drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterInfo {
    /// `mtp`, `ngram`, `dspark`, `none`, a foreign engine's word, or `unknown`.
    pub kind: String,
    /// Drafts per verify step (γ); 0 without drafting, `null` when it is not known.
    pub draft_len: Option<u16>,
    /// Weight bytes that one draft reads, where drafts are made one after the other; `null` when unknown.
    #[serde(default)]
    pub bytes_per_draft: Option<u64>,
    /// The drafter's own checkpoint; absent of a drafter that has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalDrafter>,
}

/// A drafter with a checkpoint of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExternalDrafter {
    /// Name of the checkpoint's folder.
    pub name: String,
    /// SHA-256 over configuration and weight headers, hexadecimal.
    pub identity: String,
    /// Rows of the block that every window is cut from.
    pub block_size: u16,
    /// Product of the drafts' confidences below which a window ends; `null` when windows are not cut.
    pub min_survival: Option<f64>,
}

impl DrafterInfo {
    /// The drafter's word, with the confidence below which it ends its windows where it does.
    pub fn label(&self) -> String {
        match self.external.as_ref().and_then(|external| external.min_survival) {
            Some(least) => format!("{} (confidence {least})", self.kind),
            None => self.kind.clone(),
        }
    }
}

/// How tokens were chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingInfo {
    /// 0 = greedy.
    pub temperature: f64,
    /// Nucleus mass, 1 = off.
    pub top_p: f64,
    /// Most likely tokens kept, 0 = off.
    pub top_k: u32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Upper bound of emitted tokens per request unless the request says otherwise.
    pub max_new_tokens: u32,
    /// Whether end-of-sequence tokens did not end a request.
    pub ignore_eos: bool,
}

/// Whether verify rows are computed with the same arithmetic as decode rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verification {
    /// Greedy speculative output equals plain greedy output bit for bit.
    Exact,
    /// Rows depend on the batch; near-ties may fall otherwise.
    Batched,
    /// The engine did not say.
    Unknown,
}

/// What is known of rejected rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowCompleteness {
    /// Every row of every window, rejected ones included.
    Full,
    /// Only rows that were kept: unions are lower bounds.
    AcceptedOnly,
    /// Only counts by expert.
    Counts,
    /// No windows at all.
    None,
}

/// What the expert ids mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdSpace {
    /// The checkpoint's expert numbers.
    Logical,
    /// Slots after replication or placement.
    Physical,
    /// The producer did not say.
    Unknown,
}

/// The device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// `cpu` or `cuda`.
    pub kind: String,
    /// Name as the system gives it.
    pub name: String,
    /// Worker threads (CPU) or streaming multiprocessors (GPU).
    pub units: Option<u32>,
}

impl DeviceInfo {
    /// Kind and name for people; `unknown` once where neither is known.
    pub fn label(&self) -> String {
        if self.kind == self.name { self.kind.clone() } else { format!("{} {}", self.kind, self.name) }
    }
}

/// What the recording itself did and cost.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Instrumentation {
    /// Times the engine had to wait for the writer because its queue was full; nothing was dropped.
    pub writer_waits: u64,
    /// Total of those waits, ns.
    pub writer_wait_ns: u64,
    /// Measured share of the step time that the instrumentation costs, when measured.
    pub overhead_share: Option<f64>,
    /// Bandwidth of a large copy on the device that ran the model, measured when the recording began: bytes read
    /// plus bytes written, 10^9 a second; `null` when it was not measured.
    #[serde(default)]
    pub copy_gb_per_s: Option<f64>,
    /// Requests that were run before the first recorded one and are not in the trace; absent when nobody said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_requests: Option<u32>,
    /// How passes ran as CUDA graphs; absent where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<GraphCounts>,
    /// The profiler that recorded the kernels; absent where there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profiler: Option<ProfilerFacts>,
    /// The pass that the kernels' times are from; absent where it is the one that the steps are from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_pass: Option<SecondPass>,
    /// Of `record --self-check`: the hash of the tokens that the same run emits with nothing recorded. The trace's `token_hash` is that of
    /// the recorded run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unrecorded_token_hash: Option<String>,
}

/// What a profiler recorded, and by which clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfilerFacts {
    /// `cupti`.
    pub name: String,
    /// The version that it gives itself.
    pub version: u32,
    /// Of so many steps the kernels of one were recorded.
    pub kernel_every: u32,
    /// Steps whose kernels were recorded.
    pub steps: u64,
    /// Kernels and copies that were launched in them.
    pub launched: u64,
    /// Of these, how many have no times and are not in the trace.
    pub timeless: u64,
    /// Of these, how many have no record.
    pub missing: u64,
    /// Added to the profiler's times of the first step to make them the steps' clock's, ns.
    pub clock_shift_ns: i64,
    /// How far that may be off, ns; the most of all steps.
    pub clock_error_ns: i64,
    /// The clocks are compared at every step: the largest difference of a step's shift from the first, ns. `null` where they were compared
    /// once.
    #[serde(default)]
    pub clock_drift_ns: Option<i64>,
}

/// A second pass over the same prompts, in which the kernels were timed. Their times are of this pass, their steps those of the first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecondPass {
    /// When its first request began, ns since the Unix epoch.
    pub started_unix_ns: i64,
    /// Its steps, each the same as in the first.
    pub steps: u64,
    /// SHA-256 over its tokens, as the trace's `token_hash` is over those of the first.
    pub token_hash: String,
}

/// Passes that a device ran as graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphCounts {
    /// Shapes of passes that were captured.
    pub captured: u32,
    /// Passes and commits that ran as one launch of a graph, those of warm-up requests among them.
    pub launches: u64,
}

/// Code of the warning that passes were of several requests: their times are not those of one step's rows.
pub const BATCHED_PASSES: &str = "batched_passes";
/// Code of the warning that kernels were timed by an event after each launch: the gap before a kernel is part of its time.
pub const KERNELS_TIMED_BY_EVENTS: &str = "kernels_timed_by_events";

/// Whether warnings say that a trace's request stands for rows or passes of several, which nobody told apart. Of a profile alone it does;
/// one that was added to a trace has that trace's requests.
pub fn requests_unknown(warnings: &[Warning]) -> bool {
    let has = |code: &str| warnings.iter().any(|w| w.code == code);
    has("passes_of_batches") || has("batch_forwards") || (has(BATCHED_PASSES) && has("no_routes"))
}

/// A note that belongs under every report of the trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Stable word for machines.
    pub code: String,
    /// One sentence for people.
    pub message: String,
}

impl Warning {
    /// A warning of this code and sentence.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into() }
    }
}
/// The word by which a manifest's enum is stored.
pub fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}
