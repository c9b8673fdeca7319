//! What windows that are trees add to the counts of their length: by depth instead of by row.
//!
//! Counts by row (marginals, pairs) hold of any window and stay where they are. Of a chain, row i is at depth i: what chains
//! add by depth is the difference between the counts of all windows and those of trees.

use super::counts::{WindowCounts, add};
use super::overlap::pair_index;
use super::trees::Shape;

/// Sums over windows of one depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DepthSums {
    /// Windows that have rows of this depth.
    pub windows: u64,
    /// Those rows.
    pub rows: u64,
    /// Sum of the distinct experts of those rows.
    pub union: u64,
    /// Sum of the experts that no row of a lower depth has.
    pub added: u64,
}

/// Counts over the trees among some windows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TreeCounts {
    /// Number of trees.
    pub windows: u64,
    /// Those whose accepted rows are not known; nothing of kept and rejected rows is counted of them.
    pub unknown: u64,
    /// Entry i: their part of [`WindowCounts::marginal`].
    pub marginal: Vec<u64>,
    /// By depth.
    pub depths: Vec<DepthSums>,
    /// `[distance of rows][k + 1]`: their pairs at that distance that share o experts.
    pub by_rows: Vec<u64>,
    /// `[distance along the parents][k + 1]`: pairs of a row and its ancestor that share o experts.
    pub by_ancestors: Vec<u64>,
}

impl TreeCounts {
    /// How many numbers there are of windows of `rows` rows of `k` experts, at most.
    pub fn cells(rows: usize, k: usize) -> usize {
        rows * (5 + 2 * (k + 1))
    }

    /// Adds other trees of as many rows and experts.
    pub fn merge(&mut self, other: &Self) {
        self.windows += other.windows;
        self.unknown += other.unknown;
        for (mine, theirs) in
            [(&mut self.marginal, &other.marginal), (&mut self.by_rows, &other.by_rows), (&mut self.by_ancestors, &other.by_ancestors)]
        {
            mine.resize(mine.len().max(theirs.len()), 0);
            add(mine, theirs);
        }
        self.depths.resize(self.depths.len().max(other.depths.len()), DepthSums::default());
        for (mine, theirs) in self.depths.iter_mut().zip(&other.depths) {
            mine.windows += theirs.windows;
            mine.rows += theirs.rows;
            mine.union += theirs.union;
            mine.added += theirs.added;
        }
    }
}

/// A tree of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Tree<'a> {
    /// Its shape.
    pub shape: &'a Shape,
    /// `[rows, k]`, every id an expert of the layer.
    pub ids: &'a [u16],
    /// Entry i: experts that row i adds to the rows before.
    pub added: &'a [u64],
    /// Overlaps of its pairs; empty where they are not counted.
    pub pairs: &'a [u16],
}

/// Counts trees.
#[derive(Debug)]
pub struct TreeCounter {
    /// By expert: who saw it last.
    seen: Vec<u64>,
    at_depth: Vec<u64>,
    stamp: u64,
}

impl TreeCounter {
    /// For layers of `experts` experts.
    pub fn new(experts: usize) -> Self {
        Self { seen: vec![0; experts], at_depth: vec![0; experts], stamp: 0 }
    }

    /// Counts a tree into the counts of its layer and length; gives its union, and the union of its accepted rows where they
    /// are known.
    pub fn add(&mut self, tree: Tree<'_>, counts: &mut WindowCounts) -> (u64, Option<u64>) {
        let Tree { shape, ids, added, pairs } = tree;
        let (rows, k) = (counts.rows, counts.k);
        let row_ids = |row: u16| ids.get(usize::from(row) * k..(usize::from(row) + 1) * k).unwrap_or_default();
        let union: u64 = added.iter().sum();
        add(&mut counts.marginal, added);
        let trees = counts.trees.get_or_insert_default();
        trees.windows += 1;
        trees.marginal.resize(rows, 0);
        add(&mut trees.marginal, added);

        let depths = usize::from(shape.deepest()) + 1;
        trees.depths.resize(trees.depths.len().max(depths), DepthSums::default());
        self.stamp += 1;
        let all = self.stamp;
        let mut before = None;
        for &row in shape.order() {
            let depth = usize::from(shape.depth()[usize::from(row)]);
            let sums = &mut trees.depths[depth];
            if before != Some(depth) {
                before = Some(depth);
                self.stamp += 1;
                sums.windows += 1;
            }
            sums.rows += 1;
            sums.union += first_seen(&mut self.at_depth, row_ids(row), self.stamp);
            sums.added += first_seen(&mut self.seen, row_ids(row), all);
        }
        if !pairs.is_empty() {
            trees.by_rows.resize(rows * (k + 1), 0);
            trees.by_ancestors.resize(rows * (k + 1), 0);
            let overlap = |i: usize, j: usize| usize::from(pairs.get(pair_index(rows, i, j)).copied().unwrap_or(0)).min(k);
            for j in 1..rows {
                for i in 0..j {
                    trees.by_rows[(j - i) * (k + 1) + overlap(i, j)] += 1;
                }
                let ancestors = std::iter::successors(shape.parent(j as u16), |&row| shape.parent(row));
                for (distance, ancestor) in (1..).zip(ancestors) {
                    trees.by_ancestors[distance * (k + 1) + overlap(usize::from(ancestor), j)] += 1;
                }
            }
        }
        let Some(path) = shape.path() else {
            trees.unknown += 1;
            return (union, None);
        };
        self.stamp += 1;
        let kept: u64 = path.iter().map(|&row| first_seen(&mut self.seen, row_ids(row), self.stamp)).sum();
        // A path descends, so its rows ascend.
        for row in (0..rows as u16).filter(|row| path.binary_search(row).is_err()) {
            counts.wasted_by_row[usize::from(row)] += first_seen(&mut self.seen, row_ids(row), self.stamp);
        }
        counts.kept_experts += kept;
        counts.kept_rows += path.len() as u64;
        counts.wasted += union - kept;
        counts.rejected_rows += (rows - path.len()) as u64;
        (union, Some(kept))
    }
}

/// How many of these experts had another stamp.
fn first_seen(seen: &mut [u64], ids: &[u16], stamp: u64) -> u64 {
    let mut new = 0;
    for &id in ids {
        if let Some(seen) = seen.get_mut(usize::from(id)).filter(|seen| **seen != stamp) {
            *seen = stamp;
            new += 1;
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::overlap::{Overlaps, PADDING, pairs};

    fn count(counts: &mut WindowCounts, shape: &Shape, rows: &[[u16; 2]]) -> (u64, Option<u64>) {
        let mut ids: Vec<u16> = rows.iter().flatten().copied().collect();
        let mut seen = Vec::new();
        let added: Vec<u64> = rows
            .iter()
            .map(|row| {
                let before = seen.len();
                row.iter().for_each(|id| {
                    if !seen.contains(id) {
                        seen.push(*id)
                    }
                });
                (seen.len() - before) as u64
            })
            .collect();
        let used = ids.len();
        ids.resize(used + PADDING, 0);
        let mut overlaps = vec![0; pairs(rows.len())];
        Overlaps::detect(2).count(&ids, 2, rows.len(), &mut overlaps);
        TreeCounter::new(10).add(Tree { shape, ids: &ids[..used], added: &added, pairs: &overlaps }, counts)
    }

    #[test]
    fn worked_example() {
        // The anchor {0,1}, under it {1,2} and {2,3}, under the latter {0,4}, which was accepted.
        let shape = Shape::new(&[-1, 0, 0, 2]).unwrap().accepting(&[1, 2, 3, 4], &[3, 4, 5], 2);
        let mut counts = WindowCounts::new(4, 2, 10);
        assert_eq!(count(&mut counts, &shape, &[[0, 1], [1, 2], [2, 3], [0, 4]]), (5, Some(5)));
        let trees = counts.trees.as_ref().unwrap();
        let depths: Vec<_> = trees.depths.iter().map(|d| (d.windows, d.rows, d.union, d.added)).collect();
        // At depth 1 {1,2,3}, of which 1 is the anchor's; at depth 2 {0,4}, of which 0 is.
        assert_eq!(depths, [(1, 1, 2, 2), (1, 2, 3, 2), (1, 1, 2, 1)]);
        assert_eq!((counts.marginal.as_slice(), trees.marginal.as_slice()), (&[2, 1, 1, 1][..], &[2, 1, 1, 1][..]));
        // The path {0,1} {2,3} {0,4} has all five, so row 1 wastes none.
        assert_eq!((counts.kept_rows, counts.rejected_rows, counts.wasted_by_row.as_slice()), (3, 1, &[0; 4][..]));
        // Edges: {0,1}-{1,2} 1, {0,1}-{2,3} 0, {2,3}-{0,4} 0; a grandparent: {0,1}-{0,4} 1.
        assert_eq!(trees.by_ancestors, [0, 0, 0, 2, 1, 0, 0, 1, 0, 0, 0, 0]);
        // Row distance 1: 1, 1, 0; distance 2: 0, 0; distance 3: 1.
        assert_eq!(trees.by_rows, [0, 0, 0, 1, 2, 0, 2, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn a_path_that_is_not_known_keeps_nothing() {
        let shape = Shape::new(&[-1, 0, 0]).unwrap().accepting(&[1, 2, 3], &[9], 1);
        let mut counts = WindowCounts::new(3, 2, 10);
        assert_eq!(count(&mut counts, &shape, &[[0, 1], [1, 2], [2, 3]]), (4, None));
        assert_eq!((counts.kept_rows, counts.rejected_rows, counts.wasted), (0, 0, 0));
        assert_eq!(counts.trees.unwrap().unknown, 1);
    }

    #[test]
    fn a_chain_counted_as_a_tree_has_its_rows_by_depth() {
        let shape = Shape::new(&[-1, 0, 1]).unwrap().accepting(&[1, 2, 3], &[2, 7], 1);
        let mut counts = WindowCounts::new(3, 2, 10);
        count(&mut counts, &shape, &[[0, 1], [1, 2], [2, 3]]);
        let trees = counts.trees.unwrap();
        assert_eq!(trees.depths.iter().map(|d| d.added).collect::<Vec<_>>(), counts.marginal);
        assert_eq!(trees.by_rows, trees.by_ancestors);
        assert_eq!((counts.kept_experts, counts.wasted, counts.wasted_by_row), (3, 1, vec![0, 0, 1]));
    }
}
