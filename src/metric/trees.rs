//! Windows that are trees, in a report: `by_depth` and `accepted_path` of a layer's statistics.

use serde::{Deserialize, Serialize};

/// The rows of one depth, over windows of one number of rows. A row's depth is the number of its ancestors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DepthStats {
    /// Depth; 0 is the anchor's. Of a chain it is the row.
    pub depth: u16,
    /// Windows that have rows of this depth.
    pub windows: u64,
    /// Mean number of those rows, over all windows.
    pub rows_mean: f64,
    /// Mean distinct experts of those rows, over the windows that have any.
    pub union_mean: f64,
    /// Mean distinct experts of the rows of this depth and of those below it, 0...depth, over all windows.
    pub prefix_union: f64,
    /// Mean experts that this depth adds to those below it, over all windows; they sum to the mean union.
    pub marginal: f64,
}

/// The rows that were kept: the accepted drafts of a tree are a path from its anchor.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PathStats {
    /// Windows whose kept rows are known; the means are over these.
    pub windows: u64,
    /// Windows whose kept rows are not: the emitted tokens fit more than one path, or none.
    pub unknown_windows: u64,
    /// Mean kept rows, the anchor included; `None` without any such window, as below.
    pub rows_mean: Option<f64>,
    /// Mean distinct experts of the kept rows.
    pub union_mean: Option<f64>,
    /// Mean experts of the window that no kept row touched.
    pub wasted_mean: Option<f64>,
}
