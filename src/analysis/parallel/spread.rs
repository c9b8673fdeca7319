//! One window over the ranks, and the sums of many.

use super::placement::LayerPlacement;
use crate::analysis::counts::LoadCounts;
use crate::metric::parallel::ParallelStats;
use std::collections::BTreeMap;

/// Integer sums over windows of one layer (or several).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpreadCounts {
    /// (experts of the busiest rank, union) -> windows.
    pub shapes: BTreeMap<(u32, u32), u64>,
    /// Σ ranks that have an expert of the window.
    pub ranks_touched: u64,
    /// Σ over rows of the ranks that have an expert of the row.
    pub row_ranks: u64,
    /// Σ over rows of experts.
    pub row_experts: u64,
    /// Σ over distinct experts of the ranks that do not hold them.
    pub absent: u64,
}

impl SpreadCounts {
    /// Adds other windows.
    pub fn merge(&mut self, other: &Self) {
        for (&shape, n) in &other.shapes {
            *self.shapes.entry(shape).or_default() += n;
        }
        self.ranks_touched += other.ranks_touched;
        self.row_ranks += other.row_ranks;
        self.row_experts += other.row_experts;
        self.absent += other.absent;
    }

    /// The statistics of these windows on `ranks` ranks; `None` without windows.
    ///
    /// With U the union of a window, N ranks, U_r its experts on rank r and the rows on one rank, any with the same probability:
    ///
    /// * busiest = max_r |U_r|, imbalance = busiest / (|U| / N), floor = ceil(|U| / N)
    /// * token dispatch = Σ_rows |ranks of the row| (N - 1)/N row_bytes
    /// * expert dispatch = Σ_rows k (N - 1)/N row_bytes
    /// * weight dispatch = Σ_{e in U} (ranks without e)/N expert_bytes
    ///
    /// Rows {0,1} {0,2} of experts 0 1 | 2 3 on two ranks: U = {0,1,2}, busiest 2, imbalance 2 / 1.5, floor 2; the rows need 1 and 2 ranks:
    /// token dispatch 1.5 rows, expert dispatch 2 rows, weight dispatch 1.5 experts.
    pub fn stats(&self, ranks: usize, row_bytes: Option<u64>, expert_bytes: Option<u64>) -> Option<ParallelStats> {
        let windows: u64 = self.shapes.values().sum();
        if windows == 0 {
            return None;
        }
        let (n, count) = (ranks as f64, windows as f64);
        let mean = |of: &dyn Fn(u32, u32) -> f64| self.shapes.iter().map(|(&(b, u), &w)| w as f64 * of(b, u)).sum::<f64>() / count;
        let imbalance = |b: u32, u: u32| f64::from(b) * n / f64::from(u);
        let mut imbalances: Vec<(f64, u64)> = self.shapes.iter().map(|(&(b, u), &w)| (imbalance(b, u), w)).collect();
        imbalances.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Shapes ascend by the busiest rank.
        let busiest = self.shapes.iter().map(|(&(b, _), &w)| (f64::from(b), w));
        let away = (n - 1.0) / n;
        let of_rows = |sum: u64| row_bytes.map(|bytes| sum as f64 * away * bytes as f64 / count);
        Some(ParallelStats {
            windows,
            union_mean: mean(&|_, u| f64::from(u)),
            ranks_touched_mean: self.ranks_touched as f64 / count,
            busiest_mean: mean(&|b, _| f64::from(b)),
            busiest_p99: p99(busiest, windows)? as u32,
            busiest_floor_mean: mean(&|_, u| f64::from(u.div_ceil(ranks as u32))),
            imbalance_mean: mean(&imbalance),
            imbalance_p99: p99(imbalances.into_iter(), windows)?,
            token_dispatch_bytes: of_rows(self.row_ranks),
            expert_dispatch_bytes: of_rows(self.row_experts),
            weight_dispatch_bytes: expert_bytes.map(|bytes| self.absent as f64 / n * bytes as f64 / count),
        })
    }
}

/// The value at rank ceil(.99 n) of ascending values with their numbers.
fn p99(values: impl Iterator<Item = (f64, u64)>, total: u64) -> Option<f64> {
    let rank = (total as f64 * 0.99).ceil() as u64;
    let mut below = 0;
    values.into_iter().find_map(|(value, n)| {
        below += n;
        (below >= rank).then_some(value)
    })
}

/// Spreads windows; the scratch of one thread.
#[derive(Debug)]
pub struct Spreader {
    ranks: usize,
    /// Rank that each expert of the window is taken from.
    taken: Vec<u16>,
    union: Vec<u16>,
    held: Vec<u32>,
    seen: Vec<u32>,
    row: u32,
}

const NOT_TAKEN: u16 = u16::MAX;

impl Spreader {
    /// Scratch for so many experts and ranks.
    pub fn new(experts: usize, ranks: usize) -> Self {
        Self { ranks, taken: vec![NOT_TAKEN; experts], union: Vec::new(), held: vec![0; ranks], seen: vec![0; ranks], row: 0 }
    }

    /// Adds a window of rows of k ids. Of an expert's replicas the one on the rank with the fewest experts of the window is taken (the lower
    /// rank on a tie): experts without replicas first, then the others in order of their number. `None` when an id is not an expert.
    pub fn add(&mut self, ids: &[u16], k: usize, placement: &LayerPlacement, counts: &mut SpreadCounts) -> Option<()> {
        self.union.clear();
        for &id in ids {
            let taken = self.taken.get_mut(usize::from(id))?;
            if *taken == NOT_TAKEN {
                *taken = 0;
                self.union.push(id);
            }
        }
        self.held.fill(0);
        let mut replicated: Vec<u16> = Vec::new();
        for &id in &self.union {
            let ranks = placement.ranks.get(usize::from(id))?;
            counts.absent += (self.ranks - ranks.len()) as u64;
            match ranks.as_ref() {
                &[rank] => {
                    self.taken[usize::from(id)] = rank;
                    self.held[usize::from(rank)] += 1;
                }
                _ => replicated.push(id),
            }
        }
        replicated.sort_unstable();
        for id in replicated {
            let rank = placement.ranks[usize::from(id)].iter().copied().min_by_key(|&rank| (self.held[usize::from(rank)], rank))?;
            self.taken[usize::from(id)] = rank;
            self.held[usize::from(rank)] += 1;
        }
        for row in ids.chunks_exact(k) {
            self.row = self.row.wrapping_add(1);
            for &id in row {
                let seen = &mut self.seen[usize::from(self.taken[usize::from(id)])];
                counts.row_ranks += u64::from(*seen != self.row);
                *seen = self.row;
            }
            counts.row_experts += k as u64;
        }
        let busiest = self.held.iter().copied().max().unwrap_or(0);
        counts.ranks_touched += self.held.iter().filter(|&&n| n > 0).count() as u64;
        *counts.shapes.entry((busiest, self.union.len() as u32)).or_default() += 1;
        for &id in &self.union {
            self.taken[usize::from(id)] = NOT_TAKEN;
        }
        Some(())
    }
}

/// Loads of one layer, from the requests of even and of odd index.
pub type Halves = [LoadCounts; 2];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn single(ranks: &[u16]) -> LayerPlacement {
        LayerPlacement { ranks: ranks.iter().map(|&r| [r].into()).collect() }
    }

    #[test]
    fn worked_example() {
        let mut counts = SpreadCounts::default();
        Spreader::new(4, 2).add(&[0, 1, 0, 2], 2, &single(&[0, 0, 1, 1]), &mut counts).unwrap();
        let stats = counts.stats(2, Some(10), Some(100)).unwrap();
        assert_eq!((stats.union_mean, stats.ranks_touched_mean, stats.busiest_mean, stats.busiest_floor_mean), (3.0, 2.0, 2.0, 2.0));
        assert_eq!((stats.imbalance_mean, stats.imbalance_p99, stats.busiest_p99), (2.0 / 1.5, 2.0 / 1.5, 2));
        assert_eq!(
            (stats.token_dispatch_bytes, stats.expert_dispatch_bytes, stats.weight_dispatch_bytes),
            (Some(15.0), Some(20.0), Some(150.0))
        );
        let unknown = counts.stats(2, None, None).unwrap();
        assert_eq!((unknown.token_dispatch_bytes, unknown.weight_dispatch_bytes, unknown.busiest_mean), (None, None, 2.0));
        assert_eq!(SpreadCounts::default().stats(2, None, None), None);
    }

    #[test]
    fn replicas_go_where_there_is_least() {
        let placement = LayerPlacement { ranks: [&[0, 1][..], &[0], &[0], &[1]].map(Box::from).to_vec() };
        let mut counts = SpreadCounts::default();
        // 1 and 2 are on rank 0, so 0 is taken from rank 1.
        Spreader::new(4, 2).add(&[0, 1, 1, 2], 2, &placement, &mut counts).unwrap();
        assert_eq!(counts.shapes, BTreeMap::from([((2, 3), 1)]));
        assert_eq!((counts.absent, counts.row_ranks), (2, 3));
        assert_eq!(Spreader::new(4, 2).add(&[4, 1], 2, &placement, &mut counts), None);
    }

    proptest! {
        #[test]
        fn it_agrees_with_sets(
            windows in prop::collection::vec(prop::collection::vec(prop::sample::subsequence((0u16..12).collect::<Vec<_>>(), 3), 1..5), 1..30),
            ranks_of in prop::collection::vec(0u16..4, 12)
        ) {
            let placement = single(&ranks_of);
            let mut counts = SpreadCounts::default();
            let mut spreader = Spreader::new(12, 4);
            let (mut touched, mut busiest, mut imbalance, mut token) = (0.0, Vec::new(), Vec::new(), 0.0);
            for rows in &windows {
                spreader.add(&rows.concat(), 3, &placement, &mut counts).unwrap();
                let union: BTreeSet<u16> = rows.iter().flatten().copied().collect();
                let on = |rank: u16| union.iter().filter(|&&e| ranks_of[usize::from(e)] == rank).count();
                touched += (0..4).filter(|&r| on(r) > 0).count() as f64;
                let most = (0..4).map(on).max().unwrap();
                busiest.push(most);
                imbalance.push(most as f64 / (union.len() as f64 / 4.0));
                for home in 0..4 {
                    for row in rows {
                        let away: BTreeSet<u16> = row.iter().map(|&e| ranks_of[usize::from(e)]).filter(|&r| r != home).collect();
                        token += away.len() as f64 / 4.0;
                    }
                }
            }
            let n = windows.len() as f64;
            let stats = counts.stats(4, Some(1), Some(1)).unwrap();
            busiest.sort_unstable();
            imbalance.sort_by(f64::total_cmp);
            let p99 = (n * 0.99).ceil() as usize - 1;
            prop_assert_eq!((stats.windows as usize, stats.busiest_p99 as usize), (windows.len(), busiest[p99]));
            for (found, expected) in [
                (stats.ranks_touched_mean, touched / n),
                (stats.busiest_mean, busiest.iter().sum::<usize>() as f64 / n),
                (stats.imbalance_mean, imbalance.iter().sum::<f64>() / n),
                (stats.imbalance_p99, imbalance[p99]),
                (stats.token_dispatch_bytes.unwrap(), token / n),
            ] {
                prop_assert!((found - expected).abs() < 1e-9, "{} {}", found, expected);
            }
            prop_assert!(stats.busiest_mean >= stats.busiest_floor_mean && stats.imbalance_mean >= 1.0 - 1e-12);
        }
    }
}
