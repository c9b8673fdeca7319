//! What steps and experts cost: the report's `time` and `cost`.
//!
//! Measured numbers and those of the bytes model are never in one field: everything is measured but [`ByteModel`].

use super::Interval;
use super::bounds::MIN_EXPLAINED;
use crate::trace::Component;
use serde::{Deserialize, Serialize};

/// Whose clock the times are by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeSource {
    /// Wall time of the CPU engine, which is the device.
    Cpu,
    /// The device's clock.
    Device,
    /// The host's clock around a device's pass.
    Host,
}

/// Mean time of one layer's operations in a step, µs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LayerTime {
    /// In a verify step of the report's number of rows.
    pub verify_us: Option<f64>,
    /// Bootstrap over requests.
    #[serde(default)]
    pub verify_us_ci95: Option<Interval>,
    /// In a decode step, at the verify steps' context lengths.
    pub decode_us: Option<f64>,
    /// Bootstrap over requests.
    #[serde(default)]
    pub decode_us_ci95: Option<Interval>,
    /// The same by component, those that the layer has.
    pub by_component: Vec<ComponentTime>,
}

/// Mean time of one component in a step, µs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ComponentTime {
    /// The component.
    pub component: Component,
    /// In a verify step.
    pub verify_us: Option<f64>,
    /// Bootstrap over requests.
    #[serde(default)]
    pub verify_us_ci95: Option<Interval>,
    /// In a decode step.
    pub decode_us: Option<f64>,
    /// Bootstrap over requests.
    #[serde(default)]
    pub decode_us_ci95: Option<Interval>,
}

/// Time of the routed experts by what they had to do: T = a + b U + c W, U distinct experts, W rows.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ExpertCost {
    /// b: µs per distinct expert.
    pub us_per_expert: Option<f64>,
    /// Of b, bootstrap over requests.
    pub ci95: Option<Interval>,
    /// c: µs per row. `None` where all passes have the same number of rows: what rows cost is in the intercept then.
    pub us_per_row: Option<f64>,
    /// Of c, bootstrap over requests.
    pub us_per_row_ci95: Option<Interval>,
    /// a, µs; over all layers the mean of the layers' own.
    pub intercept_us: Option<f64>,
    /// Of a, bootstrap over requests.
    #[serde(default)]
    pub intercept_us_ci95: Option<Interval>,
    /// Share of the times' variance that the fit explains; over all layers, of the variance within layers.
    pub r2: Option<f64>,
    /// Stored bytes of one expert / b, 10^9 a second: how fast experts seem to be read.
    pub implied_gb_per_s: Option<f64>,
    /// The same at the ends of b's interval; `None` where that reaches 0.
    pub implied_gb_per_s_ci95: Option<Interval>,
    /// Steps x layers in the fit.
    pub points: u64,
    /// Why b is unknown.
    pub unknown_because: Option<String>,
    /// The times and what the fit leaves of them, by rows and union.
    pub residuals: Vec<ResidualPoint>,
}

/// Why a slope with this interval and this R² is no fact, as half a sentence; `None` where it is one, as far as is known.
#[must_use]
pub fn slope_doubt(ci95: Option<Interval>, r2: Option<f64>) -> Option<&'static str> {
    if ci95.is_some_and(|[low, high]| low <= 0.0 && high >= 0.0) {
        return Some("not told apart from 0: the times vary for other reasons");
    }
    r2.is_some_and(|r2| r2 < MIN_EXPLAINED).then_some("the fit explains next to nothing of the times: no fact")
}

impl ExpertCost {
    /// [`slope_doubt`] of this fit.
    #[must_use]
    pub fn doubt(&self) -> Option<&'static str> {
        slope_doubt(self.ci95, self.r2)
    }
}

/// Points of one number of rows and of neighbouring unions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ResidualPoint {
    /// Rows.
    pub rows: u16,
    /// Mean union.
    pub union: f64,
    /// Number of points.
    pub points: u64,
    /// Mean time, µs.
    pub mean_us: f64,
    /// Mean time less the fitted one, µs; `None` without a fit.
    pub residual_us: Option<f64>,
}

/// What a verify step costs against a decode step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepCost {
    /// Whose clock; `None` when no time was measured.
    pub source: Option<TimeSource>,
    /// Time of the target's pass: verify / decode at the same context lengths.
    pub verify_ratio: Option<f64>,
    /// Bootstrap over requests.
    pub verify_ratio_ci95: Option<Interval>,
    /// Time of the whole step, drafting, sampling and commit included: verify / decode.
    pub step_ratio: Option<f64>,
    /// Bootstrap over requests.
    pub step_ratio_ci95: Option<Interval>,
    /// Tokens per step at which a verify step costs what its tokens would cost by plain decoding: the step ratio.
    pub break_even: Option<f64>,
    /// Bootstrap over requests.
    pub break_even_ci95: Option<Interval>,
    /// Tokens per step of these verify steps / step ratio; below 1 speculation loses.
    pub speedup: Option<f64>,
    /// Bootstrap over requests.
    pub speedup_ci95: Option<Interval>,
    /// Tokens per step of the verify steps that the speedup is of.
    pub tokens_per_step: Option<f64>,
    /// Median over median of the times that `verify_ratio` is the ratio of means of.
    #[serde(default)]
    pub verify_ratio_median: Option<f64>,
    /// The same of whole steps, beside `step_ratio`.
    #[serde(default)]
    pub step_ratio_median: Option<f64>,
    /// Tokens per step / `step_ratio_median`.
    #[serde(default)]
    pub speedup_median: Option<f64>,
    /// The comparison over the verify steps of every number of rows; `None` where all have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all_rows: Option<AllRows>,
    /// Mean time of the target's pass in a verify step, µs.
    pub verify_us: Option<f64>,
    /// In a decode step, at the verify steps' context lengths.
    pub decode_us: Option<f64>,
    /// Mean time of a whole verify step, µs.
    pub verify_step_us: Option<f64>,
    /// Of a whole decode step, at the verify steps' context lengths.
    pub decode_step_us: Option<f64>,
    /// Median time of the target's pass in a verify step, µs, over the steps of `verify_us`.
    #[serde(default)]
    pub verify_us_median: Option<f64>,
    /// Median in a decode step, each weighed as in `decode_us`.
    #[serde(default)]
    pub decode_us_median: Option<f64>,
    /// Median time of a whole verify step, µs.
    #[serde(default)]
    pub verify_step_us_median: Option<f64>,
    /// Of a whole decode step.
    #[serde(default)]
    pub decode_step_us_median: Option<f64>,
    /// How verify and decode steps were matched by context length.
    pub contexts: Vec<ContextBucket>,
    /// Where the whole steps' difference comes from, in the order in which a step runs. Empty without times of operations.
    pub attribution: Vec<Attribution>,
    /// What of the difference no operation accounts for, µs.
    pub unattributed_us: Option<f64>,
    /// The experts' part of the difference, split by the fit over all layers.
    pub experts_split: Option<ExpertsSplit>,
    /// Expert bytes by the windows' unions: counted experts times stored bytes, not measured traffic.
    pub bytes: Option<WindowBytes>,
    /// What bytes alone say: a model, not a measurement.
    pub model: Option<ByteModel>,
}

/// What verify steps cost and gain, whatever their number of rows: what a drafter that ends its windows early comes to.
///
/// ```text
/// speedup = tokens per step / step ratio      tokens per step = Σ_s (accepted_s + 1) / n
/// step ratio = mean T_s / mean over s of the decode steps' mean time at the context length of s
/// ```
///
/// over all n verify steps s with times: a ratio of means. One step of 2 rows, 20 µs and 2 tokens, three of 4 rows, 40 µs and 4
/// tokens, a decode step of 10 µs: 14 / 4 = 3.5 tokens in 35 / 10 = 3.5 decode steps, a speedup of 1.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct AllRows {
    /// Verify steps with times.
    pub verify_steps: u64,
    /// Their mean of accepted drafts + 1.
    pub tokens_per_step: Option<f64>,
    /// Bootstrap over requests.
    #[serde(default)]
    pub tokens_per_step_ci95: Option<Interval>,
    /// Time of the whole step: verify / decode at the same context lengths.
    pub step_ratio: Option<f64>,
    /// Bootstrap over requests.
    pub step_ratio_ci95: Option<Interval>,
    /// Tokens per step / step ratio.
    pub speedup: Option<f64>,
    /// Bootstrap over requests.
    pub speedup_ci95: Option<Interval>,
}

impl StepCost {
    /// Verify steps of the report's most frequent number of rows that have times.
    #[must_use]
    pub fn timed_verify_steps(&self) -> u64 {
        self.contexts.iter().map(|c| c.verify_steps).sum()
    }

    /// Decode steps that verify steps are compared with.
    #[must_use]
    pub fn compared_decode_steps(&self) -> u64 {
        self.contexts.iter().filter(|c| c.verify_steps > 0).map(|c| c.decode_steps).sum()
    }
}

/// Steps whose context length is in one octave. Verify steps are compared with decode steps of their own bucket; the buckets
/// are weighed by their verify steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextBucket {
    /// Smallest context length.
    pub from: u32,
    /// Largest context length.
    pub to: u32,
    /// Verify steps of the report's number of rows.
    pub verify_steps: u64,
    /// Decode steps. Without any, the bucket's verify steps are left out of the comparison, and the other way round.
    pub decode_steps: u64,
}

/// One component's part of the difference between a verify and a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Attribution {
    /// The component, over all layers.
    pub component: Component,
    /// Mean time in a decode step, µs.
    pub decode_us: Option<f64>,
    /// Mean time in a verify step, µs.
    pub verify_us: Option<f64>,
    /// Their difference.
    pub delta_us: Option<f64>,
    /// Its share of the whole steps' difference.
    pub share_of_delta: Option<f64>,
}

/// Why verify's experts take longer than decode's, µs over all layers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertsSplit {
    /// More distinct experts: b (U - k) summed over layers.
    pub union_us: f64,
    /// The rest of the difference: more rows for the same experts, and what the fit leaves.
    pub shape_us: f64,
}

/// Bytes of routed experts by the windows' unions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WindowBytes {
    /// All layers' unions of a window.
    pub per_window: f64,
    /// The same / tokens per step.
    pub per_token: Option<f64>,
    /// What plain decoding reads for a token: k experts in every layer.
    pub per_decode_token: f64,
    /// Of a window, experts that only rejected rows touched; `None` where rejected rows are unknown.
    pub wasted_per_window: Option<f64>,
}

/// The ratio by bytes of weights alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ByteModel {
    /// Always `model`: no time was measured for these numbers.
    pub kind: String,
    /// Weight bytes of a decode step.
    pub decode_bytes: f64,
    /// Weight bytes of a verify step with the windows' mean unions.
    pub verify_bytes: f64,
    /// Their quotient.
    pub verify_ratio: f64,
    /// Tokens per step / that ratio: what speculation would gain if drafting were free.
    pub speedup_if_drafts_are_free: Option<f64>,
    /// What the model takes for granted.
    pub assumptions: Vec<String>,
}
