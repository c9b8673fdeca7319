//! Windows spread over the ranks of an expert-parallel machine: the `expert_parallel` section of a report.

use serde::{Deserialize, Serialize};

/// What a placement of experts does to the windows of the report's most frequent number of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertParallel {
    /// Number of ranks.
    pub ranks: u32,
    /// `contiguous`, `round-robin`, or where the placement was read from.
    pub placement: String,
    /// Rows of the windows.
    pub rows: u16,
    /// Bytes of one row's activation: hidden size times two (16-bit activations); `None` where the hidden size is unknown.
    pub row_bytes: Option<u64>,
    /// The target's routed layers, ascending.
    pub layers: Vec<ParallelLayer>,
    /// All their windows together; `None` without any.
    pub overall: Option<ParallelStats>,
    /// The same windows under a placement balanced by the loads; `None` without windows.
    pub balanced: Option<Balanced>,
    /// What these numbers take for granted.
    pub assumptions: Vec<String>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParallelLayer {
    /// Number as in the checkpoint.
    pub layer: u16,
    /// Under the placement; `None` without windows.
    pub stats: Option<ParallelStats>,
    /// Under the balanced placement.
    pub balanced: Option<ParallelStats>,
    /// 1 - balanced busiest_mean / busiest_mean.
    pub gain: Option<f64>,
}

/// Windows over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ParallelStats {
    /// Number of windows.
    pub windows: u64,
    /// Mean distinct experts of a window.
    pub union_mean: f64,
    /// Mean ranks that have any of them.
    pub ranks_touched_mean: f64,
    /// Mean of the most distinct experts on one rank: the straggler that sets the time.
    pub busiest_mean: f64,
    /// 99th percentile of the same, nearest rank.
    pub busiest_p99: u32,
    /// Mean of ceil(union / ranks): the least that any placement can have.
    pub busiest_floor_mean: f64,
    /// Mean of busiest / (union / ranks); 1 is even.
    pub imbalance_mean: f64,
    /// 99th percentile of the same, nearest rank.
    pub imbalance_p99: f64,
    /// Mean bytes of a window that leave the rows' rank when a row is sent once to every rank that it needs; `None` where the
    /// bytes of a row are unknown.
    pub token_dispatch_bytes: Option<f64>,
    /// The same when a row is sent once for every expert that it needs.
    pub expert_dispatch_bytes: Option<f64>,
    /// The same when instead the experts' weights are sent to the rows; `None` where the bytes of an expert are unknown.
    pub weight_dispatch_bytes: Option<f64>,
}

/// A placement balanced by the loads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Balanced {
    /// Whether each request was judged under a placement made of the other half of the requests.
    pub held_out: bool,
    /// The windows under it.
    pub stats: ParallelStats,
    /// 1 - its busiest_mean / the placement's.
    pub gain: f64,
}
