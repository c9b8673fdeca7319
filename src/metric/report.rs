//! The report: plain structs that `analysis` fills in and `report` renders. Their JSON is the
//! machine's contract (`specprof.report/1`, described in `reports/schema/`).
//!
//! What is unknown is `None` (`null`), never 0, and a [`Warning`] says why.

use super::advice::Advice;
use super::batch::Batch;
use super::cost::{ExpertCost, LayerTime, StepCost};
use super::groups::Groups;
use super::parallel::ExpertParallel;
use super::trees::{DepthStats, PathStats};
use crate::trace::manifest::{
    DeviceInfo, DrafterInfo, IdSpace, Instrumentation, ModelShape, SamplingInfo, Verification, Warning, WindowCompleteness, zero_is_unknown,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The value of `schema` in every report of this version.
pub const SCHEMA: &str = "specprof.report/1";

/// A 95 % interval, `[low, high]`.
pub type Interval = [f64; 2];

/// Everything that is reported of one trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// Facts about the run, from the manifest.
    pub run: RunFacts,
    /// Counts over the whole trace.
    pub totals: Totals,
    /// How many drafts were kept.
    pub acceptance: Acceptance,
    /// The target's routed layers, ascending.
    pub layers: Vec<LayerReport>,
    /// The same over all of the target's routed layers; `None` without any window.
    pub overall: Option<Overall>,
    /// The draft module's own routers; `None` when the trace holds none of their rows.
    pub draft: Option<DraftReport>,
    /// The target's routers in prefill steps, which are no windows; `None` when the trace holds none of their rows.
    #[serde(default)]
    pub prefill: Option<DraftReport>,
    /// Windows and unions by request, ascending by id.
    pub by_request: Vec<RequestReport>,
    /// The machine's state during the run; `None` when the trace holds no sample.
    #[serde(default)]
    pub telemetry: Option<Telemetry>,
    /// What a verify step costs; `None` without any window.
    pub cost: Option<StepCost>,
    /// Recommended draft length; `None` without windows or without their rejected rows.
    pub advice: Option<Advice>,
    /// Acceptance and unions by group, when asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Groups>,
    /// Windows over the ranks of an expert-parallel machine, when asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_parallel: Option<ExpertParallel>,
    /// Unions of forward passes that several requests share; `None` where none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// Everything that limits the numbers above.
    pub warnings: Vec<Warning>,
}

/// The manifest's facts, under the manifest's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // each is documented in `trace::Manifest`
pub struct RunFacts {
    /// The trace's directory name.
    pub name: String,
    pub format_version: String,
    pub written_by: String,
    pub complete: bool,
    pub incomplete_reason: Option<String>,
    pub started_unix_ns: i64,
    pub ended_unix_ns: Option<i64>,
    pub model: ModelShape,
    pub drafter: DrafterInfo,
    pub sampling: Option<SamplingInfo>,
    pub verification: Verification,
    pub engine: String,
    pub device: DeviceInfo,
    pub window_completeness: WindowCompleteness,
    pub id_space: IdSpace,
    pub token_hash: Option<String>,
    pub instrumentation: Instrumentation,
    pub emulated: bool,
    pub router_weights: bool,
}

/// Counts over the whole trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// Requests that have at least one step or an entry of their own.
    pub requests: u64,
    /// All steps.
    pub steps: u64,
    /// Steps that read prompt rows.
    pub prefill_steps: u64,
    /// Steps of one row without drafts.
    pub decode_steps: u64,
    /// Steps of an anchor and drafts.
    pub verify_steps: u64,
    /// Tokens added to the outputs by all steps.
    pub tokens_emitted: u64,
}

/// How many drafts were kept, over all verify steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Acceptance {
    /// Mean accepted drafts per verify step; the bonus token is not counted.
    pub accepted_drafts_mean: Option<f64>,
    /// Mean accepted drafts + 1 (τ).
    pub tokens_per_step: Option<f64>,
    /// Mean tokens that a verify step added to the output; below τ where a request ended inside a window.
    pub emitted_per_step: Option<f64>,
    /// Bootstrap over requests.
    pub tokens_per_step_ci95: Option<Interval>,
    /// Entry i - 1: of the windows that had draft i, the share that accepted it.
    pub by_position: Vec<Option<f64>>,
    /// Entry i - 1: number of windows that had draft i.
    #[serde(default)]
    pub windows_by_position: Vec<u64>,
    /// Entry i - 1: the same among windows that accepted every draft before i.
    pub conditional_by_position: Vec<Option<f64>>,
    /// Entry a: number of verify steps with a accepted drafts, 0...γ.
    pub histogram: Vec<u64>,
}

/// One routed layer of the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Number as in the checkpoint.
    pub layer: u16,
    /// Experts per row; 0 when it is not known, `null` in JSON.
    #[serde(with = "zero_is_unknown")]
    pub k: u16,
    /// Routed experts of the layer (E).
    pub experts: u16,
    /// Windows of the report's most frequent number of rows.
    #[serde(flatten)]
    pub stats: WindowStats,
    /// How the layer's verify rows, of windows of any length, load its experts.
    pub load: Option<Load>,
    /// Entry e: verify rows, of windows of any length, that chose expert e; `None` without any.
    #[serde(default)]
    pub load_by_expert: Option<Vec<u64>>,
    /// Entry B - 1: mean share of a window's gate mass in its best B experts; `None` without gate weights.
    pub mass_coverage: Option<Vec<f64>>,
    /// Times of its operations; `None` when none were recorded.
    pub time: Option<LayerTime>,
    /// Cost per expert; `None` when no times of its experts were recorded.
    pub cost: Option<ExpertCost>,
    /// Windows of every other number of rows, ascending.
    pub by_rows: Vec<WindowStats>,
}

/// Statistics of windows of one number of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WindowStats {
    /// Rows per window (γ + 1).
    pub rows: u16,
    /// Number of windows.
    pub windows: u64,
    /// Distinct experts per window.
    pub union: Option<Union>,
    /// Entry j: mean distinct experts of rows 0...j. Empty without windows.
    pub prefix_union: Vec<f64>,
    /// Entry i: mean experts that row i adds. Empty without windows.
    pub marginal: Vec<f64>,
    /// Mean experts added per kept row. `None` where a window is a tree whose accepted rows are not known, as in what follows on
    /// kept and rejected rows.
    pub marginal_kept: Option<f64>,
    /// Mean experts added per rejected row.
    pub marginal_rejected: Option<f64>,
    /// Mean experts per window that only rejected rows touched.
    pub wasted_mean: Option<f64>,
    /// Entry i: mean experts that row i added as a rejected row, 0 for windows that kept it; they sum to `wasted_mean`. In trees,
    /// what it adds to the accepted rows and the rejected ones before it.
    #[serde(default)]
    pub wasted_by_row: Option<Vec<f64>>,
    /// `[rows][rows]` mean overlap in experts; the diagonal is k. `None` without windows or beyond the row limit.
    pub pairwise: Option<Vec<Vec<f64>>>,
    /// Entry d: mean overlap / k of rows at distance d (entry 0 is a row with itself: 1). The distance is that of the rows, in
    /// trees that of a row and its ancestor: 1 for its parent.
    pub lag_overlap_frac: Option<Vec<f64>>,
    /// Entry d: mean Jaccard index of rows at distance d (entry 0 is 1).
    pub lag_jaccard: Option<Vec<f64>>,
    /// Mean share of the union that was in the union of the request's previous window.
    pub step_reuse: Option<f64>,
    /// N(rows) = E (1 - (1 - k/E)^rows).
    pub uniform_union: Option<f64>,
    /// Expected union of independent rows with the observed popularity.
    pub popularity_union: Option<f64>,
    /// (uniform union - union) / (uniform union - k).
    pub lift: Option<f64>,
    /// (popularity union - union) / (popularity union - k).
    pub popularity_lift: Option<f64>,
    /// The same by depth of the rows; `None` where every window is a chain, whose row i is at depth i.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_depth: Option<Vec<DepthStats>>,
    /// Kept rows along the accepted paths; `None` where every window is a chain, whose kept rows are its first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted_path: Option<PathStats>,
}

/// The distribution of union sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Union {
    /// Mean.
    pub mean: f64,
    /// Bootstrap over requests.
    pub ci95: Option<Interval>,
    /// Median, nearest rank on the exact histogram.
    pub p50: u32,
    /// 90th percentile, nearest rank.
    pub p90: u32,
    /// 99th percentile, nearest rank.
    pub p99: u32,
    /// Largest. It has no interval: the largest of a sample is never above the population's, and no resample has a larger one, so that a
    /// bootstrap says nothing of what lies beyond.
    pub max: u32,
    /// Entry u: number of windows with a union of u.
    pub histogram: Vec<u64>,
}

/// How evenly rows fall on experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Entropy H of the shares of routed slots, bits.
    pub entropy_bits: f64,
    /// 2^H.
    pub effective_experts: f64,
    /// Share of slots on the ceil(E / 100) most loaded experts.
    pub top_1pct_share: f64,
    /// Slots of the most loaded expert over the mean of all E.
    pub max_over_mean: f64,
}

/// All routed layers of the target together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Overall {
    /// Experts per row; 0 when it is not known, `null` in JSON.
    #[serde(with = "zero_is_unknown")]
    pub k: u16,
    /// Routed experts per layer.
    pub experts: u16,
    /// Windows of all layers of the most frequent number of rows; `windows` counts a step once a layer.
    #[serde(flatten)]
    pub stats: WindowStats,
    /// Mean over layers of each layer's value.
    pub load: Option<Load>,
    /// Over all windows of all layers; `None` without gate weights.
    pub mass_coverage: Option<Vec<f64>>,
    /// Sums over the routed layers; operations outside layers and of dense layers are not in it.
    pub time: Option<LayerTime>,
    /// One slope for all layers, each with an intercept of its own.
    pub cost: Option<ExpertCost>,
    /// Windows of every other number of rows, ascending.
    pub by_rows: Vec<WindowStats>,
    /// The layer with the largest mean union (the lowest number on a tie).
    pub worst_layer: u16,
    /// How the layers' mean unions differ.
    pub layer_spread: Spread,
}

/// Spread of the layers' mean unions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Standard deviation over the layers (population, divided by their number).
    pub sd: f64,
}

/// Routers whose rows are no windows: the draft module's in verify steps, or the target's in prefill steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DraftReport {
    /// Its routed layers, ascending.
    pub layers: Vec<DraftLayer>,
}

/// One routed layer of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DraftLayer {
    /// Number as in the checkpoint.
    pub layer: u16,
    /// Routed rows.
    pub rows: u64,
    /// How they load the experts.
    pub load: Option<Load>,
}

/// One request's windows of the most frequent number of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestReport {
    /// The trace's number of the request.
    pub request_id: u32,
    /// Verify steps, of any number of rows.
    pub verify_steps: u64,
    /// Mean accepted drafts + 1.
    pub tokens_per_step: Option<f64>,
    /// Mean union over layers and windows.
    pub union_mean: Option<f64>,
    /// Mean wasted experts per layer and window.
    pub wasted_mean: Option<f64>,
    /// Sum of accepted drafts over its verify steps.
    #[serde(default)]
    pub accepted: Option<u64>,
    /// The user's name of it; `None` where it has none.
    #[serde(default)]
    pub id: Option<String>,
    /// Its tags by name; the words of a list have the value `yes`.
    #[serde(default)]
    pub tags: BTreeMap<String, String>,
    /// What it adds to each layer's means.
    #[serde(default)]
    pub sums: Option<RequestSums>,
    /// What its prompt and its tokens were; `None` where the tokens are not known.
    #[serde(default)]
    pub identity: Option<RequestIdentity>,
}

/// One request's sums by layer, in the order of the report's `layers`, over windows of the most frequent number of rows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestSums {
    /// Number of windows.
    pub windows: Vec<u64>,
    /// Sum of unions.
    pub union: Vec<u64>,
    /// Sum of wasted experts; `None` where rejected rows are not known.
    pub wasted: Option<Vec<u64>>,
}

/// Fingerprints by which the requests of two runs are told to be the same: the first 128 bits of a SHA-256 over
/// little-endian u32, hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestIdentity {
    /// Of the prompt's tokens: the rows of its prefill steps. `None` when these are not the whole prompt.
    pub prompt: Option<String>,
    /// Of the emitted tokens, in order.
    pub output: String,
    /// Of every verify step's number of rows, number of accepted drafts, input tokens and, where there are any, parents, in order. Two requests of
    /// the same prompt and windows asked the same of every router.
    pub windows: String,
}

/// The machine's state during the run, as means over spans of equal length.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Telemetry {
    /// Samples in the trace.
    pub samples: u64,
    /// Middle of each span, s since the run began.
    pub time_s: Vec<f64>,
    /// Busy share of all CPU time, 0...1; `None` for a span without a known sample, as in the others.
    pub host_load: Vec<Option<f64>>,
    /// Mean clock of the CPU cores, MHz.
    pub cpu_mhz: Vec<Option<f64>>,
    /// Clock of the device's multiprocessors, MHz.
    pub sm_clock_mhz: Vec<Option<f64>>,
    /// Power drawn by the device, W.
    pub power_w: Vec<Option<f64>>,
    /// Temperature of the device, or of the CPU where no device ran, °C.
    pub temperature_c: Vec<Option<f64>>,
    /// Memory in use on the device, or by the recording process where no device ran, bytes.
    pub memory_bytes: Vec<Option<f64>>,
    /// Share of the samples in which the driver gave a reason for running slower than it could, idling apart, 0...1.
    #[serde(default)]
    pub throttled: Vec<Option<f64>>,
}
