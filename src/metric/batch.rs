//! Forward passes that several requests share, in a report: the `batch` section.

use super::Interval;
use serde::{Deserialize, Serialize};

/// Unions by request and by pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Passes with a verify step and without prompt rows; the numbers below are theirs.
    pub passes: u64,
    /// Passes with a verify step and with prompt rows, whose union says little of either.
    pub passes_with_prefill: u64,
    /// Mean requests per pass.
    pub requests_per_pass: f64,
    /// Mean rows per pass: of all windows and decode rows.
    pub rows_per_pass: f64,
    /// Entry n: passes of n requests.
    pub requests_histogram: Vec<u64>,
    /// All layers together; `None` where no layer has a whole pass.
    pub overall: Option<BatchStats>,
    /// By routed layer of the target, ascending; those without a whole pass are left out.
    pub layers: Vec<BatchLayer>,
    /// All layers together by number of requests in the pass, ascending.
    pub by_requests: Vec<BatchSize>,
}

/// Unions of some passes. A pass counts once a layer, where all rows of all its steps were recorded.
///
/// Intervals are drawn over groups of requests that share no pass with each other, and are `None` with fewer than two such groups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchStats {
    /// Passes, in several layers once a layer.
    pub passes: u64,
    /// Mean distinct experts of one request's rows in a pass.
    pub request_union_mean: f64,
    /// Its interval.
    pub request_union_ci95: Option<Interval>,
    /// Mean over passes of the sum of its requests' unions: what they would touch one after the other.
    pub union_sum_mean: f64,
    /// Its interval.
    pub union_sum_ci95: Option<Interval>,
    /// Mean distinct experts of all rows of a pass.
    pub pass_union_mean: f64,
    /// Its interval.
    pub pass_union_ci95: Option<Interval>,
    /// Sum of the requests' unions over sum of the passes' unions: by how many requests an expert of a pass is wanted. 1 where
    /// they have none in common, the number of requests where all want the same.
    pub sharing_ratio: f64,
    /// Its interval.
    pub sharing_ratio_ci95: Option<Interval>,
}

/// One layer's passes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchLayer {
    /// Number as in the checkpoint.
    pub layer: u16,
    /// Its unions.
    #[serde(flatten)]
    pub stats: BatchStats,
}

/// Passes of one number of requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchSize {
    /// Requests per pass.
    pub requests: u32,
    /// Their unions.
    #[serde(flatten)]
    pub stats: BatchStats,
}
