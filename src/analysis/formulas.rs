//! The formulas of the report, each with a worked example. Counts go in, floating point comes out once, at the end.

use super::counts::{LoadCounts, WindowCounts};
use crate::metric::report::{Load, Union};
use crate::metric::trees::{DepthStats, PathStats};

/// Expected union of W independent rows of k uniform experts out of E (MoESD, NeurIPS 2025):
///
/// N(W) = E (1 - (1 - k/E)^W)
///
/// 512 experts, k = 8, 4 rows: 31.26.
pub fn uniform_union(experts: f64, k: f64, rows: usize) -> f64 {
    // 1 - x^W by expm1: exact enough for k much smaller than E.
    -experts * (rows as f64 * (-k / experts).ln_1p()).exp_m1()
}

/// Expected union of W independent rows whose experts are as unequally popular as observed:
///
/// Σ_e (1 - (1 - p_e)^W), p_e = share of the layer's verify rows that chose e
///
/// p = (1, 1/2, 1/2), 2 rows: 1 + 3/4 + 3/4 = 2.5. `None` without rows.
pub fn popularity_union(load: &LoadCounts, rows: usize) -> Option<f64> {
    let of = |&n: &u64| 1.0 - (1.0 - n as f64 / load.rows as f64).powf(rows as f64);
    (load.rows > 0).then(|| load.by_expert.iter().map(of).sum())
}

/// How far rows agree beyond an expectation:
///
/// (expected - union) / (expected - k)
///
/// 0: as the expectation; 1: every row chose the same k. Expected 31, union 23, k 8: 8/23. `None` where the expectation is k.
pub fn lift(expected: f64, union: f64, k: f64) -> Option<f64> {
    (expected - k > 1e-9).then(|| (expected - union) / (expected - k))
}

/// The value at nearest rank: the smallest with at least `share` of the counts at or below it.
///
/// Counts of 0, 1, 2, 3 = [0, 2, 1, 1]: the median (rank 2 of 4) is 1, p90 (rank 4) is 3. `None` without counts.
pub fn nearest_rank(hist: &[u64], share: f64) -> Option<u32> {
    let total: u64 = hist.iter().sum();
    let rank = ((total as f64 * share).ceil() as u64).clamp(1, total.max(1));
    let mut below = 0;
    (0u32..).zip(hist).find_map(|(value, n)| {
        below += n;
        (below >= rank && total > 0).then_some(value)
    })
}

/// Distribution of a histogram of unions, without its interval; `None` without windows.
pub fn union(hist: &[u64]) -> Option<Union> {
    let total: u64 = hist.iter().sum();
    let sum: u64 = hist.iter().zip(0u64..).map(|(n, u)| n * u).sum();
    let max = nearest_rank(hist, 1.0)?;
    Some(Union {
        mean: sum as f64 / total as f64,
        ci95: None,
        p50: nearest_rank(hist, 0.5)?,
        p90: nearest_rank(hist, 0.9)?,
        p99: nearest_rank(hist, 0.99)?,
        max,
        // What lies behind the largest is zero and says nothing.
        histogram: hist.iter().take(max as usize + 1).copied().collect(),
    })
}

/// How evenly slots fall on experts, with q_e = share of slots on e:
///
/// H = -Σ q_e log2 q_e, effective experts = 2^H, the ceil(E / 100) largest q_e, E max q_e
///
/// Slots (2, 1, 1, 0): H = 1.5, 2^H = 2.83, top 1 % (one expert) 0.5, max over mean 2. `None` without slots.
pub fn load(counts: &LoadCounts) -> Option<Load> {
    let slots = counts.by_expert.iter().fold(0u64, |sum, &n| sum.saturating_add(n));
    if slots == 0 {
        return None;
    }
    let mut sorted = counts.by_expert.clone();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let slots = slots as f64;
    let entropy: f64 = sorted.iter().filter(|&&n| n > 0).map(|&n| n as f64 / slots).map(|q| -q * q.log2()).sum();
    let top = sorted.iter().take(sorted.len().div_ceil(100)).fold(0u64, |sum, &n| sum.saturating_add(n));
    let most = sorted.first().copied().unwrap_or(0);
    Some(Load {
        // One expert gives -0 or a rounding error below 0.
        entropy_bits: entropy.max(0.0),
        effective_experts: entropy.max(0.0).exp2(),
        top_1pct_share: top as f64 / slots,
        max_over_mean: most as f64 * sorted.len() as f64 / slots,
    })
}

/// Mean share of a union that was in the previous one: mean of |U(t) ∩ U(t-1)| / |U(t)|.
///
/// Two windows with a union of 4 that share 1 and 3, one of 5 that shares 5: (1/4 + 3/4 + 1) / 3 = 2/3.
pub fn step_reuse(counts: &WindowCounts) -> Option<f64> {
    let windows: u64 = counts.reuse_windows.iter().sum();
    let of = |(&shared, union): (&u64, u64)| if shared == 0 { 0.0 } else { shared as f64 / union as f64 };
    (windows > 0).then(|| counts.reuse_shared.iter().zip(0u64..).map(of).sum::<f64>() / windows as f64)
}

/// Mean overlap, in experts, of every pair of rows; `[rows][rows]`, the diagonal is k.
pub fn pairwise(counts: &WindowCounts) -> Option<Vec<Vec<f64>>> {
    if counts.windows == 0 || (counts.rows > 1 && counts.pair_hist.is_empty()) {
        return None;
    }
    let mean = |i: usize, j: usize| {
        // A row has no pair with itself.
        if i == j {
            return counts.k as f64;
        }
        let sum: u64 = counts.pair(i.min(j), i.max(j)).iter().zip(0u64..).map(|(n, o)| n * o).sum();
        sum as f64 / counts.windows as f64
    };
    Some((0..counts.rows).map(|i| (0..counts.rows).map(|j| mean(i, j)).collect()).collect())
}

/// Mean over the pairs of rows at each distance d = 0...rows-1 of a function of their overlap o. The distance is that along
/// the parents: of a chain it is that of the rows' numbers, of a tree it counts a row's ancestors, and rows of two branches
/// have none. Ends with the largest distance that there is.
///
/// Overlap share: o / k. Jaccard index: o / (2k - o), for two sets of k that share o have a union of 2k - o.
/// k = 8 and o = 2 and 4: shares .25 and .5, mean .375; Jaccard 1/7 and 1/3, mean .238.
pub fn by_lag(counts: &WindowCounts, of: impl Fn(f64, f64) -> f64) -> Option<Vec<f64>> {
    if counts.windows == 0 || (counts.rows > 1 && counts.pair_hist.is_empty()) {
        return None;
    }
    let k = counts.k as f64;
    let lag = |d: usize| {
        // Equal overlaps are counted together first, so that the sum has k + 1 terms whatever the number of rows.
        let mut hist = vec![0u64; counts.k + 1];
        for i in 0..counts.rows - d {
            super::counts::add(&mut hist, counts.pair(i, i + d));
        }
        if let Some(trees) = &counts.trees {
            let at = d * (counts.k + 1)..(d + 1) * (counts.k + 1);
            let of = |pairs: &[u64]| pairs.get(at.clone()).unwrap_or_default().to_vec();
            // Trees' pairs at that distance of numbers give way to those at that distance along the parents.
            hist.iter_mut().zip(of(&trees.by_rows)).for_each(|(n, tree)| *n -= tree);
            super::counts::add(&mut hist, &of(&trees.by_ancestors));
        }
        let pairs: u64 = hist.iter().sum();
        (pairs > 0).then(|| hist.iter().enumerate().map(|(o, &n)| n as f64 * of(o as f64, k)).sum::<f64>() / pairs as f64)
    };
    Some((0..counts.rows).map_while(|d| if d == 0 { Some(1.0) } else { lag(d) }).collect())
}

/// Unions by depth of the rows; `None` where every window is a chain.
///
/// A chain of k experts a row has one row at each depth, whose experts are k, and which adds what the row adds.
pub fn by_depth(counts: &WindowCounts) -> Option<Vec<DepthStats>> {
    let trees = counts.trees.as_ref()?;
    let chains = counts.windows - trees.windows;
    let depths = if chains > 0 { counts.rows } else { trees.depths.len() };
    let mut prefix = 0;
    let stats = |depth: usize| {
        let tree = trees.depths.get(depth).copied().unwrap_or_default();
        let by_row = |marginal: &[u64]| marginal.get(depth).copied().unwrap_or(0);
        let added = if chains > 0 { by_row(&counts.marginal) - by_row(&trees.marginal) } else { 0 } + tree.added;
        let windows = chains + tree.windows;
        prefix += added;
        let mean = |sum: u64| sum as f64 / counts.windows as f64;
        DepthStats {
            depth: depth as u16,
            windows,
            rows_mean: mean(chains + tree.rows),
            union_mean: (chains * counts.k as u64 + tree.union) as f64 / windows as f64,
            prefix_union: mean(prefix),
            marginal: mean(added),
        }
    };
    Some((0..depths).map(stats).collect())
}

/// Kept rows of windows of which some are trees; `None` where every window is a chain.
pub fn accepted_path(counts: &WindowCounts) -> Option<PathStats> {
    let unknown_windows = counts.trees.as_ref()?.unknown;
    let windows = counts.windows - unknown_windows;
    let mean = |sum: u64| (windows > 0).then(|| sum as f64 / windows as f64);
    Some(PathStats {
        windows,
        unknown_windows,
        rows_mean: mean(counts.kept_rows),
        union_mean: mean(counts.kept_experts),
        wasted_mean: mean(counts.wasted),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs().max(1.0)
    }

    #[test]
    fn uniform_union_of_published_shapes() {
        let published = [
            (512, 8, 2, 15.9),
            (512, 8, 4, 31.26),
            (512, 8, 6, 46.2),
            (512, 8, 9, 67.7),
            (256, 8, 4, 30.5),
            (256, 8, 8, 57.4),
            (256, 8, 15, 97.0),
            (128, 8, 4, 29.1),
            (128, 4, 4, 15.3),
            (64, 4, 2, 7.75),
            (32, 4, 8, 21.0),
            (60, 4, 25, 49.3),
        ];
        for (experts, k, rows, expected) in published {
            let n = uniform_union(f64::from(experts), f64::from(k), rows);
            assert!((n - expected).abs() < 0.06, "{experts}/{k}, {rows} rows: {n}");
        }
        assert!(close(uniform_union(16.0, 16.0, 3), 16.0));
    }

    #[test]
    fn worked_examples() {
        let load_of = |rows, by_expert: &[u64]| LoadCounts { rows, by_expert: by_expert.to_vec() };
        assert!(close(popularity_union(&load_of(4, &[4, 2, 2]), 2).unwrap(), 2.5));
        assert_eq!(popularity_union(&load_of(0, &[0, 0]), 2), None);
        assert!(close(lift(31.0, 23.0, 8.0).unwrap(), 8.0 / 23.0));
        assert_eq!(lift(8.0, 8.0, 8.0), None);
        let hist = [0, 2, 1, 1];
        assert_eq!((nearest_rank(&hist, 0.5), nearest_rank(&hist, 0.9), nearest_rank(&hist, 0.0)), (Some(1), Some(3), Some(1)));
        assert_eq!(nearest_rank(&[0, 0], 0.5), None);
        let shape = union(&[0, 2, 1, 1, 0]).unwrap();
        assert_eq!((shape.mean, shape.p50, shape.max, shape.histogram), (1.75, 1, 3, vec![0, 2, 1, 1]));
        let load = load(&load_of(2, &[1, 2, 0, 1])).unwrap();
        assert!(close(load.entropy_bits, 1.5) && close(load.effective_experts, 8f64.sqrt()));
        assert!(close(load.top_1pct_share, 0.5) && close(load.max_over_mean, 2.0));
    }

    #[test]
    fn worked_examples_of_windows() {
        let mut counts = WindowCounts::new(3, 8, 100);
        counts.windows = 1;
        for (union, shared) in [(4, 1), (4, 3), (5, 5)] {
            counts.add_reuse(union, shared);
        }
        assert!(close(step_reuse(&counts).unwrap(), 2.0 / 3.0));
        // Overlaps: (0,1) 2, (0,2) 8, (1,2) 4.
        for (pair, o) in [2, 8, 4].into_iter().enumerate() {
            counts.pair_hist[pair * 9 + o] = 1;
        }
        assert_eq!(pairwise(&counts).unwrap(), [[8.0, 2.0, 8.0], [2.0, 8.0, 4.0], [8.0, 4.0, 8.0]]);
        assert_eq!(by_lag(&counts, |o, k| o / k).unwrap(), [1.0, 0.375, 1.0]);
        let jaccard = by_lag(&counts, |o, k| o / (2.0 * k - o)).unwrap();
        assert!(close(jaccard[1], (1.0 / 7.0 + 1.0 / 3.0) / 2.0) && close(jaccard[2], 1.0));
    }

    proptest! {
        #[test]
        fn expectations_are_ordered(by_expert in prop::collection::vec(0u64..50, 8..40), rows in 1usize..20) {
            // k = slots / rows; popularity can only shrink the expected union (the sum is concave in p).
            let total: u64 = by_expert.iter().sum();
            let observed = by_expert.iter().copied().max().unwrap_or(0).max(1);
            let counts = LoadCounts { rows: observed, by_expert };
            let (experts, k) = (counts.by_expert.len() as f64, total as f64 / observed as f64);
            let popular = popularity_union(&counts, rows).unwrap();
            prop_assert!(popular <= uniform_union(experts, k, rows) + 1e-9);
            prop_assert!(popular + 1e-9 >= k.min(experts));
            if let Some(load) = load(&counts) {
                prop_assert!(load.effective_experts <= experts + 1e-9 && load.effective_experts >= 1.0);
                prop_assert!(load.max_over_mean >= 1.0 - 1e-12 && load.top_1pct_share <= 1.0);
            }
        }

        #[test]
        fn nearest_rank_is_a_sorted_element(values in prop::collection::vec(0u32..30, 1..80), share in 0.0f64..=1.0) {
            let mut hist = vec![0u64; 31];
            for &v in &values {
                hist[v as usize] += 1;
            }
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let rank = ((values.len() as f64 * share).ceil() as usize).max(1);
            prop_assert_eq!(nearest_rank(&hist, share), Some(sorted[rank - 1]));
        }
    }
}
