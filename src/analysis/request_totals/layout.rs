//! Where a request's sums lie, and what they are.

use super::gradients::{GRADIENTS, LoadMetric};
use crate::analysis::overlap::{pair_index, pairs};
use crate::metric::report::{Overall, Report};

/// One over the resolution to which shares are rounded, so that sums of them do not depend on their order.
pub const SHARE_ONE: f64 = (1u64 << 24) as f64;
/// The same of what a row moves a load's number by, which is small where there are many rows.
pub const GRADIENT_ONE: f64 = (1u64 << 40) as f64;

/// Sums before those whose number depends on the windows' length.
const WINDOWS: usize = 0;
const KEPT_EXPERTS: usize = 1;
const KEPT_ROWS: usize = 2;
const REJECTED_ROWS: usize = 3;
const REUSE: usize = 4;
const REUSE_WINDOWS: usize = 5;
const COVERAGE_WINDOWS: usize = 6;
const FIRST_GRADIENT: usize = 7;
const FIRST_ROW: usize = FIRST_GRADIENT + GRADIENTS;

/// What is summed, by the windows of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Layout {
    /// Rows of the windows: the report's most frequent number.
    pub rows: usize,
    /// Experts per row.
    pub k: usize,
    /// Whether overlaps of pairs are summed.
    pub pairs: bool,
    /// Entries of the curve of mass coverage.
    pub coverage: usize,
    /// Whether some windows are trees: what goes by kept rows, by lag and by position is then not by row.
    trees: bool,
}

impl Layout {
    /// The layout for what a report says.
    pub fn of(report: &Report, overall: &Overall) -> Self {
        let stats = &overall.stats;
        let trees = report.layers.iter().any(|l| std::iter::once(&l.stats).chain(&l.by_rows).any(|s| s.by_depth.is_some()));
        Self {
            rows: usize::from(stats.rows),
            k: usize::from(overall.k),
            pairs: stats.pairwise.is_some(),
            coverage: overall.mass_coverage.as_ref().map_or(0, Vec::len),
            trees,
        }
    }

    /// Numbers of one request in one layer.
    pub fn width(&self) -> usize {
        self.first_coverage() + self.coverage
    }

    /// Whether every window is a chain.
    pub fn is_of_chains(&self) -> bool {
        !self.trees
    }

    fn first_pair(&self) -> usize {
        FIRST_ROW + self.rows
    }

    /// Number of pairs of rows that are summed.
    pub fn pairs(&self) -> usize {
        if self.pairs { pairs(self.rows) } else { 0 }
    }

    fn first_jaccard(&self) -> usize {
        self.first_pair() + self.pairs()
    }

    fn first_coverage(&self) -> usize {
        self.first_jaccard() + if self.pairs { self.rows } else { 0 }
    }

    /// The number of a load that the sum at this place moves.
    pub fn gradient_at(&self, at: usize) -> Option<LoadMetric> {
        at.checked_sub(FIRST_GRADIENT).and_then(|i| LoadMetric::ALL.get(i)).copied()
    }
}

fn add(cells: &mut [i64], at: usize, n: i64) {
    if let Some(cell) = cells.get_mut(at) {
        *cell = cell.saturating_add(n);
    }
}

fn fixed(share: f64) -> i64 {
    (share * SHARE_ONE).round() as i64
}

/// How windows are added to a request's sums. `cells` are those of one request in one layer.
impl Layout {
    /// A window whose rows add `added` experts each and of which those up to `accepted` were kept.
    pub fn add_window(&self, cells: &mut [i64], added: &[u64], accepted: usize) {
        let kept: u64 = added.iter().take(accepted + 1).sum();
        add(cells, WINDOWS, 1);
        add(cells, KEPT_EXPERTS, kept as i64);
        add(cells, KEPT_ROWS, accepted as i64 + 1);
        add(cells, REJECTED_ROWS, (added.len() as i64 - 1 - accepted as i64).max(0));
        for (i, &n) in added.iter().enumerate() {
            add(cells, FIRST_ROW + i, n as i64);
        }
    }

    /// A window with a union of `union`, of which the window before had `shared`.
    pub fn add_reuse(cells: &mut [i64], union: usize, shared: usize) {
        add(cells, REUSE, fixed(shared as f64 / union.max(1) as f64));
        add(cells, REUSE_WINDOWS, 1);
    }

    /// The overlaps of a window's pairs of rows.
    pub fn add_pairs(&self, cells: &mut [i64], overlaps: &[u16]) {
        for i in 0..self.rows {
            for j in i + 1..self.rows {
                let at = pair_index(self.rows, i, j);
                let o = overlaps.get(at).map_or(0, |&o| usize::from(o).min(self.k));
                add(cells, self.first_pair() + at, o as i64);
                add(cells, self.first_jaccard() + (j - i), fixed(o as f64 / (2 * self.k - o) as f64));
            }
        }
    }

    /// A window's curve of mass coverage; what is behind its end is 1.
    pub fn add_coverage(&self, cells: &mut [i64], curve: &[f64]) {
        add(cells, COVERAGE_WINDOWS, 1);
        for b in 0..self.coverage {
            add(cells, self.first_coverage() + b, fixed(curve.get(b).copied().unwrap_or(1.0)));
        }
    }

    /// What rows move the loads' numbers by.
    pub fn add_gradients(cells: &mut [i64], gradients: &[i64; GRADIENTS]) {
        for (i, &n) in gradients.iter().enumerate() {
            add(cells, FIRST_GRADIENT + i, n);
        }
    }
}

/// One request's sums in one layer or over all. Every pair is a numerator and a denominator: summed over requests and divided, they
/// are the report's number.
#[derive(Debug, Clone, Copy)]
pub struct Cells<'a> {
    pub(super) layout: &'a Layout,
    pub(super) cells: &'a [i64],
}

impl Cells<'_> {
    fn at(&self, at: usize) -> f64 {
        self.cells.get(at).map_or(0.0, |&n| n as f64)
    }

    fn first_rows(&self, rows: usize) -> f64 {
        (0..rows.min(self.layout.rows)).map(|i| self.at(FIRST_ROW + i)).sum()
    }

    /// Experts that row i adds, and windows.
    pub fn marginal(&self, i: usize) -> Option<(f64, f64)> {
        (i < self.layout.rows).then(|| (self.at(FIRST_ROW + i), self.at(WINDOWS)))
    }

    /// Experts of rows 0...j, and windows.
    pub fn prefix(&self, j: usize) -> Option<(f64, f64)> {
        (j < self.layout.rows).then(|| (self.first_rows(j + 1), self.at(WINDOWS)))
    }

    /// Experts of kept rows, and kept rows. `None` for trees, as in the next two.
    pub fn kept(&self) -> Option<(f64, f64)> {
        self.layout.is_of_chains().then(|| (self.at(KEPT_EXPERTS), self.at(KEPT_ROWS)))
    }

    /// Experts that rejected rows add, and rejected rows.
    pub fn rejected(&self) -> Option<(f64, f64)> {
        self.layout.is_of_chains().then(|| (self.first_rows(self.layout.rows) - self.at(KEPT_EXPERTS), self.at(REJECTED_ROWS)))
    }

    /// Experts that rows i < j share, and windows.
    pub fn pair(&self, i: usize, j: usize) -> Option<(f64, f64)> {
        let known = self.layout.pairs && i < j && j < self.layout.rows;
        known.then(|| (self.at(self.layout.first_pair() + pair_index(self.layout.rows, i, j)), self.at(WINDOWS)))
    }

    fn at_lag(&self, d: usize) -> Option<f64> {
        let known = self.layout.pairs && self.layout.is_of_chains() && (1..self.layout.rows).contains(&d);
        known.then(|| self.at(WINDOWS) * (self.layout.rows - d) as f64)
    }

    /// Overlap / k of rows at distance d, and their pairs.
    pub fn lag_overlap_frac(&self, d: usize) -> Option<(f64, f64)> {
        let pairs = self.at_lag(d)?;
        let sum: f64 = (0..self.layout.rows - d).filter_map(|i| self.pair(i, i + d)).map(|(n, _)| n).sum();
        Some((sum / self.layout.k as f64, pairs))
    }

    /// Jaccard index of rows at distance d, and their pairs.
    pub fn lag_jaccard(&self, d: usize) -> Option<(f64, f64)> {
        Some((self.at(self.layout.first_jaccard() + d) / SHARE_ONE, self.at_lag(d)?))
    }

    /// Share of the union that was in the window before, and windows that have one.
    pub fn reuse(&self) -> Option<(f64, f64)> {
        Some((self.at(REUSE) / SHARE_ONE, self.at(REUSE_WINDOWS)))
    }

    /// Share of the mass in the best b + 1 experts, and windows of which it is known.
    pub fn coverage(&self, b: usize) -> Option<(f64, f64)> {
        (b < self.layout.coverage).then(|| (self.at(self.layout.first_coverage() + b) / SHARE_ONE, self.at(COVERAGE_WINDOWS)))
    }

    /// By how much the request's rows move a load's number from that of all rows.
    pub fn load(&self, metric: LoadMetric) -> Option<f64> {
        Some(self.at(FIRST_GRADIENT + metric as usize) / GRADIENT_ONE)
    }
}
