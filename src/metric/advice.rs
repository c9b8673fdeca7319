//! What a recording says about the draft length: the `advice` section of a report.
//!
//! A step's cost comes from one source, measured times or the model of bytes, and all costs of one advice from the same.

use super::Interval;
use serde::{Deserialize, Serialize};

/// Where step costs come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CostSource {
    /// Bytes that a step reads.
    Model,
    /// Times of the recorded steps.
    Measured,
    /// Times of passes that `calibrate` made.
    Calibrated,
}

/// The best draft length, what others cost and bring, and what would help.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Advice {
    /// Drafts per step of the largest speedup; 0 is plain decoding. `None` when step costs are unknown.
    pub best_draft_len: Option<u16>,
    /// γ of the windows that were used: the most frequent one.
    pub recorded_draft_len: u16,
    /// Where step costs come from; `None` when they are unknown.
    pub cost_source: Option<CostSource>,
    /// Why measured times were not used; `None` where they were.
    #[serde(default)]
    pub measured_unused_because: Option<String>,
    /// Why step costs are unknown; `None` where they are known.
    #[serde(default)]
    pub unknown_because: Option<String>,
    /// Why draft lengths between plain decoding and the recorded one have no cost by measured times; `None` where they have, or where
    /// costs are not measured.
    #[serde(default)]
    pub other_lengths_unknown_because: Option<String>,
    /// Verify steps that were used.
    pub steps: u64,
    /// Verify steps of other lengths or with missing layers, which were not.
    pub steps_left_out: u64,
    /// Requests of the used steps.
    pub requests: u64,
    /// Ascending from 0 (plain decoding) to the recorded γ.
    pub by_draft_len: Vec<DraftLength>,
    /// Mean over requests of each request's own speedup at the best draft length (a mean of ratios; everything else is a ratio
    /// of sums).
    pub request_speedup_mean: Option<f64>,
    /// By `NAME=VALUE` of the requests' tags, ascending.
    pub by_tag: Vec<GroupAdvice>,
    /// By request, ascending.
    pub by_request: Vec<GroupAdvice>,
    /// What ideals would be worth; `None` when step costs, or those of other lengths, are unknown.
    pub what_if: Option<WhatIf>,
    /// Windows cut before the first draft of too low a probability, by threshold; `None` without draft probabilities.
    pub confidence: Option<Vec<Confidence>>,
    /// Windows that may touch so many experts only; `None` without gate weights.
    pub expert_budget: Option<Vec<Budget>>,
    /// Resamples that intervals of step ratios and speedups are not of, for their times give an expert no cost above 0; `None` where step
    /// costs are not drawn.
    #[serde(default)]
    pub resamples_left_out: Option<u64>,
    /// What these numbers take for granted.
    pub assumptions: Vec<String>,
}

/// One draft length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DraftLength {
    /// Drafts per step, γ'.
    pub draft_len: u16,
    /// Mean of min(accepted, γ') + 1.
    pub tokens_per_step: f64,
    /// Bootstrap over requests.
    pub tokens_per_step_ci95: Option<Interval>,
    /// Mean distinct experts a layer of rows 0...γ'.
    pub union_mean: f64,
    /// Bootstrap over requests.
    pub union_ci95: Option<Interval>,
    /// Cost of a step in decode steps. Equal to the break-even tokens per step.
    pub step_ratio: Option<f64>,
    /// Bootstrap over requests, measured step costs with them; at the recorded γ the interval of the measured step ratio.
    pub step_ratio_ci95: Option<Interval>,
    /// tokens_per_step / step_ratio. Also the utility: benefit by cost, below 1 speculation loses.
    pub speedup: Option<f64>,
    /// Of the speedup, bootstrap over requests.
    pub ci95: Option<Interval>,
    /// (τ(γ') - τ(γ' - 1)) / (ratio(γ') - ratio(γ' - 1)): what the last draft brings by what it costs.
    pub marginal_utility: Option<f64>,
    /// Share of the resamples with step costs in which this draft length is the best.
    pub best_share: Option<f64>,
}

/// The same for some requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupAdvice {
    /// `NAME=VALUE` of a tag, or the number of a request.
    pub key: String,
    /// Number of requests.
    pub requests: u64,
    /// Their verify steps that were used.
    pub steps: u64,
    /// Drafts per step of the largest speedup.
    pub best_draft_len: Option<u16>,
    /// Speedup at it.
    pub best_speedup: Option<f64>,
    /// Mean of accepted + 1, at the recorded γ.
    pub tokens_per_step: f64,
    /// Speedup at the recorded γ.
    pub speedup: Option<f64>,
    /// Bootstrap over requests, measured step costs over all that have times. A single request's is of step costs alone, `None` where
    /// those are not drawn.
    pub ci95: Option<Interval>,
}

/// A draft length and its speedup.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Drafts per step.
    pub draft_len: u16,
    /// Speedup.
    pub speedup: f64,
}

/// The best draft length under ideals, each up to the recorded γ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WhatIf {
    /// As recorded.
    pub as_recorded: Best,
    /// Every draft is accepted: τ = γ' + 1.
    pub perfect_drafter: Best,
    /// All rows of a window choose the same experts: the union is k.
    pub perfect_overlap: Best,
    /// Drafting costs nothing.
    pub free_drafting: Best,
    /// Every draft accepted and the union k.
    pub both: Best,
}

/// Windows cut by the drafter's confidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Confidence {
    /// A window ends before its first draft of a lower probability.
    pub threshold: f64,
    /// Mean drafts that are verified.
    pub drafts_mean: f64,
    /// Share of steps without any draft left: decode steps.
    pub decode_share: f64,
    /// Mean of min(accepted, drafts) + 1.
    pub tokens_per_step: f64,
    /// Mean distinct experts a layer.
    pub union_mean: f64,
    /// Cost of a step in decode steps; the draft that ends a window is paid for.
    pub step_ratio: Option<f64>,
    /// tokens_per_step / step_ratio.
    pub speedup: Option<f64>,
    /// Of the speedup, bootstrap over requests.
    pub ci95: Option<Interval>,
}

/// Windows that may touch only their best experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Most distinct experts of a window in one layer.
    pub experts: u32,
    /// Mean share of the gate mass that is kept.
    pub mass: f64,
    /// Mean of min(union, experts).
    pub union_mean: f64,
    /// Cost of a step of the recorded γ in decode steps.
    pub step_ratio: Option<f64>,
    /// Recorded tokens per step / step_ratio: as if acceptance did not suffer.
    pub speedup: Option<f64>,
}
