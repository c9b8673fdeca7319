//! Every statistic once more, by sets and loops, over random traces cut at random places.

use super::memory::{Memory, Route};
use crate::analysis::steps::StepRow;
use crate::metric::report::WindowStats;
use crate::trace::Phase;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

type Rows = Vec<Vec<u16>>;

struct Window {
    request: u32,
    accepted: usize,
    rows: Rows,
}

/// The target's windows of one layer in order, straight from the rows.
fn windows(trace: &Memory, layer: u16) -> Vec<Window> {
    let verify = trace.steps.iter().filter(|s| s.phase == Phase::Verify);
    let of = |s: &StepRow| Window {
        request: s.request_id,
        accepted: usize::from(s.accepted),
        rows: trace.routes.iter().filter(|r| r.step == s.step_id && r.layer == layer && !r.draft).map(|r| r.ids.clone()).collect(),
    };
    verify.map(of).filter(|w| !w.rows.is_empty()).collect()
}

fn set(rows: &[Vec<u16>]) -> BTreeSet<u16> {
    rows.iter().flatten().copied().collect()
}

fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.into_iter().collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn close(a: Option<f64>, b: Option<f64>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() < 1e-9,
        (a, b) => a == b,
    }
}

/// Compares the statistics of windows of one length with naive ones.
fn check(stats: &WindowStats, all: &[Window], k: usize, experts: usize) -> Result<(), TestCaseError> {
    let n = usize::from(stats.rows);
    let of: Vec<&Window> = all.iter().filter(|w| w.rows.len() == n).collect();
    prop_assert_eq!(stats.windows as usize, of.len());
    let unions: Vec<usize> = of.iter().map(|w| set(&w.rows).len()).collect();
    let union = stats.union.as_ref().unwrap();
    prop_assert!(close(Some(union.mean), mean(unions.iter().map(|&u| u as f64))));
    prop_assert_eq!(union.max as usize, *unions.iter().max().unwrap());
    for (u, &count) in union.histogram.iter().enumerate() {
        prop_assert_eq!(count as usize, unions.iter().filter(|&&x| x == u).count());
    }
    let prefix = |w: &Window, j: usize| set(&w.rows[..=j]).len() as f64;
    for j in 0..n {
        prop_assert!(close(Some(stats.prefix_union[j]), mean(of.iter().map(|w| prefix(w, j)))));
        let marginal = |w: &&Window| prefix(w, j) - if j > 0 { prefix(w, j - 1) } else { 0.0 };
        prop_assert!(close(Some(stats.marginal[j]), mean(of.iter().map(marginal))));
    }
    prop_assert!((stats.marginal.iter().sum::<f64>() - union.mean).abs() < 1e-9);
    let wasted = |w: &&Window| {
        let kept = set(&w.rows[..=w.accepted]);
        set(&w.rows[w.accepted + 1..]).iter().filter(|e| !kept.contains(e)).count() as f64
    };
    prop_assert!(close(stats.wasted_mean, mean(of.iter().map(wasted))));
    let by_row = stats.wasted_by_row.as_ref().unwrap();
    for j in 0..n {
        let added = |w: &&Window| if j > w.accepted { prefix(w, j) - prefix(w, j - 1) } else { 0.0 };
        prop_assert!(close(Some(by_row[j]), mean(of.iter().map(added))));
    }
    prop_assert!(close(stats.wasted_mean, Some(by_row.iter().sum())));
    let marginals = |kept: bool| {
        let rows = of.iter().flat_map(move |w| (0..n).filter(move |&i| (i <= w.accepted) == kept).map(move |i| (w, i)));
        mean(rows.map(|(w, i)| prefix(w, i) - if i > 0 { prefix(w, i - 1) } else { 0.0 }))
    };
    prop_assert!(close(stats.marginal_kept, marginals(true)));
    prop_assert!(close(stats.marginal_rejected, marginals(false)));
    let overlap = |w: &Window, i: usize, j: usize| set(&w.rows[i..=i]).intersection(&set(&w.rows[j..=j])).count() as f64;
    let (pairwise, overlaps, jaccards) =
        (stats.pairwise.as_ref().unwrap(), stats.lag_overlap_frac.as_ref().unwrap(), stats.lag_jaccard.as_ref().unwrap());
    for i in 0..n {
        for j in 0..n {
            prop_assert!(close(Some(pairwise[i][j]), mean(of.iter().map(|w| overlap(w, i, j)))));
        }
    }
    for d in 0..n {
        let pairs = || of.iter().flat_map(move |w| (0..n - d).map(move |i| overlap(w, i, i + d)));
        prop_assert!(close(Some(overlaps[d]), mean(pairs().map(|o| o / k as f64))));
        prop_assert!(close(Some(jaccards[d]), mean(pairs().map(|o| o / (2.0 * k as f64 - o)))));
    }
    let mut last: BTreeMap<u32, BTreeSet<u16>> = BTreeMap::new();
    let mut reuse = Vec::new();
    for w in all {
        let union = set(&w.rows);
        if let Some(before) = last.get(&w.request).filter(|_| w.rows.len() == n) {
            reuse.push(union.intersection(before).count() as f64 / union.len() as f64);
        }
        last.insert(w.request, union);
    }
    prop_assert!(close(stats.step_reuse, mean(reuse)));
    let rows: Vec<&Vec<u16>> = all.iter().flat_map(|w| &w.rows).collect();
    let p = |e: usize| rows.iter().filter(|r| r.contains(&(e as u16))).count() as f64 / rows.len() as f64;
    let popular: f64 = (0..experts).map(|e| 1.0 - (1.0 - p(e)).powi(n as i32)).sum();
    prop_assert!(close(stats.popularity_union, Some(popular)));
    let uniform = experts as f64 * (1.0 - (1.0 - k as f64 / experts as f64).powi(n as i32));
    prop_assert!(close(stats.uniform_union, Some(uniform)));
    Ok(())
}

/// Random traces of two layers: interleaved requests, windows of several lengths, decode and prefill steps in between,
/// rows of the draft module in a layer of its own and under the number of a target layer.
pub fn traces() -> impl Strategy<Value = Memory> {
    let step = (0u32..3, 0usize..10, 0u16..5, 0u64..u64::MAX, 1u32..4, any::<bool>());
    let shape = (prop_oneof![Just(8usize), 1usize..10], 10usize..40);
    (shape, prop::collection::vec(step, 1..25), 0u32..40, 1usize..60, prop::collection::vec(0u32..60, 0..4)).prop_map(
        |((k, experts), steps, first, slice, mut cuts)| {
            let layers = [2, 7];
            let mut trace = Memory::new(&layers, experts as u16, k as u16);
            trace.manifest.model.draft_layers = vec![7, 42];
            let mut step_id = first;
            for (request_id, kind, accepted, mut random, gap, drafts) in steps {
                let (phase, rows) = match kind {
                    0 => (Phase::Decode, 1),
                    1 => (Phase::Prefill, 6),
                    2 => (Phase::Verify, 2),
                    3 => (Phase::Verify, 3),
                    _ => (Phase::Verify, 4),
                };
                let accepted = if phase == Phase::Verify { accepted.min(rows - 1) } else { 0 };
                step_id += gap;
                trace.steps.push(StepRow { step_id, request_id, phase, rows, accepted, emitted: 1, context_len: step_id });
                let mut chosen = || {
                    let mut pool: Vec<u16> = (0..experts as u16).collect();
                    let mut draw = |pool: &mut Vec<u16>| {
                        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        pool.swap_remove((random >> 33) as usize % pool.len())
                    };
                    (0..k).map(|_| draw(&mut pool)).collect::<Vec<u16>>()
                };
                for layer in [2, 7, 42] {
                    for row in 0..rows {
                        let mut push = |draft, ids| trace.routes.push(Route { step: step_id, layer, row, draft, ids, weights: Vec::new() });
                        if layer != 42 {
                            push(false, chosen());
                        }
                        if drafts && layer != 2 {
                            push(true, chosen());
                        }
                    }
                }
            }
            cuts.sort_unstable();
            cuts.dedup();
            trace.cuts = cuts;
            trace.slice = slice;
            trace
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_number_agrees_with_sets(trace in traces()) {
        let report = trace.report();
        let model = &trace.manifest.model;
        let verify = trace.steps.iter().filter(|s| s.phase == Phase::Verify).count();
        prop_assert_eq!(report.totals.verify_steps as usize, verify);
        for layer in &report.layers {
            let all = windows(&trace, layer.layer);
            let (k, experts) = (usize::from(model.experts_per_token), usize::from(model.experts));
            let mut seen = 0;
            for stats in std::iter::once(&layer.stats).chain(&layer.by_rows).filter(|s| s.windows > 0) {
                check(stats, &all, k, experts)?;
                prop_assert!(stats.windows <= layer.stats.windows);
                seen += stats.windows as usize;
            }
            prop_assert_eq!(seen, all.len());
            if let Some(load) = layer.load {
                let mut counts = vec![0.0; experts];
                all.iter().flat_map(|w| &w.rows).flatten().for_each(|&e| counts[usize::from(e)] += 1.0);
                let slots: f64 = counts.iter().sum();
                let entropy: f64 = counts.iter().filter(|c| **c > 0.0).map(|c| -(c / slots) * (c / slots).log2()).sum();
                prop_assert!((load.entropy_bits - entropy).abs() < 1e-9);
                prop_assert!((load.max_over_mean - counts.iter().fold(0.0, |a: f64, b| a.max(*b)) * experts as f64 / slots).abs() < 1e-9);
            }
        }
        let drafts = |layer| {
            let in_verify = |s: u32| trace.steps.iter().any(|x| x.step_id == s && x.phase == Phase::Verify);
            trace.routes.iter().filter(|r| r.draft && r.layer == layer && in_verify(r.step)).count() as u64
        };
        for layer in report.draft.iter().flat_map(|d| &d.layers) {
            prop_assert_eq!(layer.rows, drafts(layer.layer));
        }
        prop_assert_eq!(report.draft.is_some(), drafts(7) + drafts(42) > 0);
    }

    #[test]
    fn cuts_do_not_matter(trace in traces()) {
        let whole = Memory { cuts: Vec::new(), slice: 1 << 20, ..trace.clone() };
        prop_assert_eq!(trace.report(), whole.report());
        let every_step = Memory { cuts: trace.steps.iter().map(|s| s.step_id).filter(|&s| s > 0).collect(), slice: 1, ..trace };
        prop_assert_eq!(every_step.report(), whole.report());
    }
}
