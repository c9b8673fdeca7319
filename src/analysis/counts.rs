//! Integer counts of windows. They add up exactly, so the result depends neither on threads nor on how a trace is cut.

use super::overlap::{MAX_PAIR_ROWS, pair_index, pairs};
use super::tree_counts::TreeCounts;

/// One over the resolution to which a window's mass coverage is rounded, so that sums of it are integers.
pub const COVERAGE_ONE: f64 = (1u64 << 40) as f64;

/// Counts over windows of one layer (or of several, merged) and one number of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowCounts {
    /// Rows per window.
    pub rows: usize,
    /// Experts per row.
    pub k: usize,
    /// Number of windows.
    pub windows: u64,
    /// Entry u: windows with a union of u.
    pub union_hist: Vec<u64>,
    /// Entry i: sum of what row i added.
    pub marginal: Vec<u64>,
    /// Sum over windows of the experts that kept rows touched.
    pub kept_experts: u64,
    /// Number of kept rows.
    pub kept_rows: u64,
    /// Sum over windows of the experts that only rejected rows touched.
    pub wasted: u64,
    /// Entry i: the part of `wasted` that row i added.
    pub wasted_by_row: Vec<u64>,
    /// Number of rejected rows.
    pub rejected_rows: u64,
    /// `[pairs][k + 1]`: windows in which the pair shares o experts. Empty where pairs are not counted.
    pub pair_hist: Vec<u64>,
    /// Entry u: of windows with a union of u and a previous window, sum of the experts that both have.
    pub reuse_shared: Vec<u64>,
    /// Entry u: number of those windows.
    pub reuse_windows: Vec<u64>,
    /// Entry B - 1: sum over windows of the mass coverage of the best B experts, in units of 1 / [`COVERAGE_ONE`].
    pub coverage: Vec<u128>,
    /// Windows that had gate weights.
    pub coverage_windows: u64,
    /// Windows that had gate weights of which no coverage can be made: none above 0, or one that is no number of at least 0.
    pub coverage_left_out: u64,
    /// Of those windows that are trees; `None` where all are chains.
    pub trees: Option<Box<TreeCounts>>,
}

impl WindowCounts {
    /// No windows of `rows` rows of `k` experts out of `experts`.
    pub fn new(rows: usize, k: usize, experts: usize) -> Self {
        let unions = (rows * k).min(experts) + 1;
        Self {
            rows,
            k,
            windows: 0,
            union_hist: vec![0; unions],
            marginal: vec![0; rows],
            kept_experts: 0,
            kept_rows: 0,
            wasted: 0,
            wasted_by_row: vec![0; rows],
            rejected_rows: 0,
            pair_hist: vec![0; if rows <= MAX_PAIR_ROWS { pairs(rows) * (k + 1) } else { 0 }],
            reuse_shared: vec![0; unions],
            reuse_windows: vec![0; unions],
            coverage: Vec::new(),
            coverage_windows: 0,
            coverage_left_out: 0,
            trees: None,
        }
    }

    /// The same without pairs.
    pub fn without_pairs(mut self) -> Self {
        self.pair_hist = Vec::new();
        self
    }

    /// How many numbers it holds.
    pub fn cells(&self) -> usize {
        let trees = if self.trees.is_some() { TreeCounts::cells(self.rows, self.k) } else { 0 };
        3 * self.union_hist.len() + 2 * self.marginal.len() + self.pair_hist.len() + 2 * self.coverage.len() + trees
    }

    /// Takes a chain's rows into account, of which those up to `accepted` were kept. `added` is what each row adds to those
    /// before. Gives its union, and that of its kept rows.
    #[inline(always)]
    pub fn add_chain(&mut self, added: &[u64], accepted: usize) -> (u64, u64) {
        let (mut union, mut kept) = (0, 0);
        for (i, ((&new, sum), wasted)) in added.iter().zip(&mut self.marginal).zip(&mut self.wasted_by_row).enumerate() {
            union += new;
            *sum += new;
            if i <= accepted {
                kept = union;
            } else {
                *wasted += new;
            }
        }
        self.kept_experts += kept;
        self.kept_rows += accepted as u64 + 1;
        self.wasted += union - kept;
        self.rejected_rows += (added.len() - 1 - accepted) as u64;
        (union, kept)
    }

    /// Adds the windows of `other`, which has the same rows, k and experts.
    pub fn merge(&mut self, other: &Self) {
        debug_assert!(self.rows == other.rows && self.k == other.k);
        self.windows += other.windows;
        self.kept_experts += other.kept_experts;
        self.kept_rows += other.kept_rows;
        self.wasted += other.wasted;
        self.rejected_rows += other.rejected_rows;
        self.coverage_windows += other.coverage_windows;
        self.coverage_left_out += other.coverage_left_out;
        if let Some(trees) = &other.trees {
            self.trees.get_or_insert_default().merge(trees);
        }
        add(&mut self.union_hist, &other.union_hist);
        add(&mut self.marginal, &other.marginal);
        add(&mut self.wasted_by_row, &other.wasted_by_row);
        add(&mut self.pair_hist, &other.pair_hist);
        add(&mut self.reuse_shared, &other.reuse_shared);
        add(&mut self.reuse_windows, &other.reuse_windows);
        if self.coverage.len() < other.coverage.len() {
            self.coverage.resize(other.coverage.len(), 0);
        }
        for (a, b) in self.coverage.iter_mut().zip(&other.coverage) {
            *a += b;
        }
    }

    /// Entry o: windows in which rows i < j share o experts.
    pub fn pair(&self, i: usize, j: usize) -> &[u64] {
        let at = pair_index(self.rows, i, j) * (self.k + 1);
        self.pair_hist.get(at..at + self.k + 1).unwrap_or_default()
    }

    /// Takes the union's share in the previous window into account.
    pub fn add_reuse(&mut self, union: usize, shared: usize) {
        if let (Some(s), Some(n)) = (self.reuse_shared.get_mut(union), self.reuse_windows.get_mut(union)) {
            *s += shared as u64;
            *n += 1;
        }
    }
}

/// Adds `b` to `a`, entry by entry.
pub fn add(a: &mut [u64], b: &[u64]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// Sums of one request's windows of one number of rows in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestSums {
    /// Number of windows.
    pub windows: u64,
    /// Sum of unions.
    pub union: u64,
    /// Sum of wasted experts.
    pub wasted: u64,
}

impl RequestSums {
    /// Adds other windows.
    pub fn merge(&mut self, other: &Self) {
        self.windows += other.windows;
        self.union += other.union;
        self.wasted += other.wasted;
    }
}

/// Routed slots by expert.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadCounts {
    /// Number of rows.
    pub rows: u64,
    /// Entry e: rows that chose expert e.
    pub by_expert: Vec<u64>,
}

impl LoadCounts {
    /// Adds other rows.
    pub fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        if self.by_expert.len() < other.by_expert.len() {
            self.by_expert.resize(other.by_expert.len(), 0);
        }
        add(&mut self.by_expert, &other.by_expert);
    }
}
