//! Where a request's sums lie, and what they are.

use super::gradients::{GRADIENTS, LoadMetric};
use crate::analysis::overlap::{pair_index, pairs};
use crate::analysis::trees::Shape;
use crate::metric::report::Overall;

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
    /// Whether some windows are trees: their distances are those along the parents, and how many pairs there are of each depends on
    /// the tree, so both are summed.
    trees: bool,
}

impl Layout {
    /// The layout for what a report says over all layers.
    pub fn of(overall: &Overall) -> Self {
        let stats = &overall.stats;
        Self {
            rows: usize::from(stats.rows),
            k: usize::from(overall.k),
            pairs: stats.pairwise.is_some(),
            coverage: overall.mass_coverage.as_ref().map_or(0, Vec::len),
            trees: stats.by_depth.is_some(),
        }
    }

    /// Numbers of one request in one layer.
    pub fn width(&self) -> usize {
        self.first_coverage() + self.coverage
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
        self.first_lag() + if self.has_lags() { 2 * self.rows } else { 0 }
    }

    /// Whether overlaps by distance, and their pairs, have sums of their own: of chains they follow from those of pairs of rows.
    fn has_lags(&self) -> bool {
        self.pairs && self.trees
    }

    fn first_lag(&self) -> usize {
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

/// The kept rows of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// How many they are.
    pub rows: usize,
    /// Their distinct experts.
    pub experts: u64,
}

impl Kept {
    /// Those of a chain whose rows add `added` experts each: the rows up to `accepted`.
    pub fn of_chain(added: &[u64], accepted: usize) -> Self {
        Self { rows: accepted + 1, experts: added.iter().take(accepted + 1).sum() }
    }
}

/// How windows are added to a request's sums. `cells` are those of one request in one layer.
impl Layout {
    /// A window whose rows add `added` experts each. Where its kept rows are not known, a report says nothing of kept and rejected ones.
    pub fn add_window(&self, cells: &mut [i64], added: &[u64], kept: Option<Kept>) {
        add(cells, WINDOWS, 1);
        if let Some(kept) = kept {
            add(cells, KEPT_EXPERTS, kept.experts as i64);
            add(cells, KEPT_ROWS, kept.rows as i64);
            add(cells, REJECTED_ROWS, added.len().saturating_sub(kept.rows) as i64);
        }
        for (i, &n) in added.iter().enumerate() {
            add(cells, FIRST_ROW + i, n as i64);
        }
    }

    /// A window with a union of `union`, of which the window before had `shared`.
    pub fn add_reuse(cells: &mut [i64], union: usize, shared: usize) {
        add(cells, REUSE, fixed(shared as f64 / union.max(1) as f64));
        add(cells, REUSE_WINDOWS, 1);
    }

    /// The overlaps of a window's pairs of rows, in the order of [`pair_index`]; of a tree, distances are those along its parents.
    pub fn add_pairs(&self, cells: &mut [i64], overlaps: &[u16], tree: Option<&Shape>) {
        for i in 0..self.rows {
            for j in i + 1..self.rows {
                let at = pair_index(self.rows, i, j);
                add(cells, self.first_pair() + at, self.overlap(overlaps, i, j) as i64);
                if tree.is_none() {
                    self.add_at_lag(cells, j - i, self.overlap(overlaps, i, j));
                }
            }
        }
        let Some(shape) = tree else { return };
        for j in (1..).take(self.rows.saturating_sub(1)) {
            let ancestors = std::iter::successors(shape.parent(j), |&row| shape.parent(row));
            for (distance, ancestor) in (1..).zip(ancestors) {
                self.add_at_lag(cells, distance, self.overlap(overlaps, ancestor.into(), j.into()));
            }
        }
    }

    fn overlap(&self, overlaps: &[u16], i: usize, j: usize) -> usize {
        overlaps.get(pair_index(self.rows, i, j)).map_or(0, |&o| usize::from(o).min(self.k))
    }

    fn add_at_lag(&self, cells: &mut [i64], distance: usize, overlap: usize) {
        add(cells, self.first_jaccard() + distance, fixed(overlap as f64 / (2 * self.k - overlap) as f64));
        if self.has_lags() {
            add(cells, self.first_lag() + distance, overlap as i64);
            add(cells, self.first_lag() + self.rows + distance, 1);
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

    /// Experts of kept rows, and kept rows. As in the next one, nothing where the report has no such number.
    pub fn kept(&self) -> Option<(f64, f64)> {
        Some((self.at(KEPT_EXPERTS), self.at(KEPT_ROWS)))
    }

    /// Experts that rejected rows add to those of the kept ones, and rejected rows.
    pub fn rejected(&self) -> Option<(f64, f64)> {
        Some((self.first_rows(self.layout.rows) - self.at(KEPT_EXPERTS), self.at(REJECTED_ROWS)))
    }

    /// Experts that rows i < j share, and windows.
    pub fn pair(&self, i: usize, j: usize) -> Option<(f64, f64)> {
        let known = self.layout.pairs && i < j && j < self.layout.rows;
        known.then(|| (self.at(self.layout.first_pair() + pair_index(self.layout.rows, i, j)), self.at(WINDOWS)))
    }

    /// Whether sums of this distance are kept.
    fn has_lag(&self, d: usize) -> bool {
        self.layout.pairs && (1..self.layout.rows).contains(&d)
    }

    /// Pairs of rows at this distance.
    fn pairs_at(&self, d: usize) -> f64 {
        let layout = self.layout;
        if layout.has_lags() { self.at(layout.first_lag() + layout.rows + d) } else { self.at(WINDOWS) * (layout.rows - d) as f64 }
    }

    /// Overlap / k of rows at distance d, and their pairs. Of trees, the distance is that along the parents, as in the next one.
    pub fn lag_overlap_frac(&self, d: usize) -> Option<(f64, f64)> {
        let layout = self.layout;
        self.has_lag(d).then(|| {
            let sum = if layout.has_lags() {
                self.at(layout.first_lag() + d)
            } else {
                (0..layout.rows - d).filter_map(|i| self.pair(i, i + d)).map(|(n, _)| n).sum()
            };
            (sum / layout.k as f64, self.pairs_at(d))
        })
    }

    /// Jaccard index of rows at distance d, and their pairs.
    pub fn lag_jaccard(&self, d: usize) -> Option<(f64, f64)> {
        self.has_lag(d).then(|| (self.at(self.layout.first_jaccard() + d) / SHARE_ONE, self.pairs_at(d)))
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
