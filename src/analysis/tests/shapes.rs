//! Trees and passes that requests share once more, by sets and loops, over random traces cut at random places.

use super::memory::{Memory, Route};
use crate::analysis::steps::StepRow;
use crate::metric::batch::BatchStats;
use crate::metric::report::{Report, WindowStats};
use crate::trace::Phase;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.into_iter().collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn same(found: Option<f64>, expected: Option<f64>) -> bool {
    match (found, expected) {
        (Some(found), Some(expected)) => close(found, expected),
        (found, expected) => found == expected,
    }
}

/// A row and its ancestors, the anchor last.
fn line(parents: &[i16], row: usize) -> Vec<usize> {
    let mut line = vec![row];
    while parents[*line.last().unwrap()] >= 0 {
        line.push(parents[*line.last().unwrap()] as usize);
    }
    line
}

/// One window of one layer, as the trace has it.
struct Window {
    parents: Vec<i16>,
    rows: Vec<Vec<u16>>,
    /// The rows that were kept, where one line of rows alone can have been.
    kept: Option<Vec<usize>>,
}

impl Window {
    fn depth(&self, row: usize) -> usize {
        line(&self.parents, row).len() - 1
    }

    fn set(&self, rows: impl Fn(usize) -> bool) -> BTreeSet<u16> {
        (0..self.rows.len()).filter(|&row| rows(row)).flat_map(|row| self.rows[row].iter().copied()).collect()
    }

    fn wasted(&self) -> Option<f64> {
        let kept = self.kept.as_ref()?;
        Some((self.set(|_| true).len() - self.set(|row| kept.contains(&row)).len()) as f64)
    }
}

fn windows(trace: &Memory, layer: u16, rows: u16) -> Vec<Window> {
    let verify = trace.steps.iter().filter(|s| s.phase == Phase::Verify && s.rows == rows);
    let of = |s: &StepRow| {
        let chosen = trace.routes.iter().filter(|r| r.step == s.step_id && r.layer == layer).map(|r| r.ids.clone()).collect();
        let chain: Vec<i16> = (0..s.rows as i16).map(|row| row - 1).collect();
        let (parents, tokens, emitted) = match trace.trees.get(&s.step_id) {
            Some((parents, tokens, emitted)) if *parents != chain => (parents.clone(), tokens.clone(), emitted.clone()),
            // What a chain accepted is told by the number alone.
            _ => (chain, vec![0; s.rows.into()], Vec::new()),
        };
        // Every line of the right length whose tokens are the emitted ones, as far as there are any.
        let fits = |row: usize| {
            let mut path = line(&parents, row);
            path.reverse();
            let told = path[1..].iter().zip(&emitted).all(|(&row, &token)| tokens[row] == token);
            (path.len() == usize::from(s.accepted) + 1 && told).then_some(path)
        };
        let mut lines: Vec<Vec<usize>> = (0..parents.len()).filter_map(fits).collect();
        let kept = if lines.len() == 1 { lines.pop() } else { None };
        Window { parents, rows: chosen, kept }
    };
    verify.map(of).collect()
}

fn check(stats: &WindowStats, all: &[Window], k: usize) -> Result<(), TestCaseError> {
    let n = all.len() as f64;
    prop_assert_eq!(stats.windows as usize, all.len());
    let is_tree = |w: &Window| (0i16..).zip(&w.parents).any(|(row, &parent)| parent != row - 1);
    if !all.iter().any(is_tree) {
        prop_assert!(stats.by_depth.is_none() && stats.accepted_path.is_none());
        return Ok(());
    }
    let depths = stats.by_depth.as_ref().unwrap();
    let deepest = all.iter().flat_map(|w| (0..w.rows.len()).map(|row| w.depth(row))).max().unwrap();
    prop_assert!(depths.len() > deepest);
    for (d, found) in depths.iter().enumerate() {
        let of_depth = |w: &&Window| w.set(|row| w.depth(row) == d).len() as f64;
        let having: Vec<&Window> = all.iter().filter(|w| (0..w.rows.len()).any(|row| w.depth(row) == d)).collect();
        prop_assert_eq!((usize::from(found.depth), found.windows as usize), (d, having.len()));
        let rows: usize = all.iter().map(|w| (0..w.rows.len()).filter(|&row| w.depth(row) == d).count()).sum();
        prop_assert!(close(found.rows_mean, rows as f64 / n));
        prop_assert!(same(Some(found.union_mean), mean(having.iter().map(of_depth))));
        let prefix = |d: usize| all.iter().map(|w| w.set(|row| w.depth(row) <= d).len() as f64).sum::<f64>() / n;
        prop_assert!(close(found.prefix_union, prefix(d)));
        let above = if d > 0 { prefix(d - 1) } else { 0.0 };
        prop_assert!(close(found.marginal, prefix(d) - above));
    }
    prop_assert!(close(depths.iter().map(|d| d.marginal).sum(), stats.union.as_ref().unwrap().mean));

    let path = stats.accepted_path.as_ref().unwrap();
    let known: Vec<&Window> = all.iter().filter(|w| w.kept.is_some()).collect();
    prop_assert_eq!((path.windows as usize, path.unknown_windows as usize), (known.len(), all.len() - known.len()));
    let kept_rows = |w: &&Window| w.kept.as_ref().unwrap().len() as f64;
    let kept = |w: &&Window| w.set(|row| w.kept.as_ref().unwrap().contains(&row)).len() as f64;
    prop_assert!(same(path.rows_mean, mean(known.iter().map(kept_rows))));
    prop_assert!(same(path.union_mean, mean(known.iter().map(kept))));
    prop_assert!(same(path.wasted_mean, mean(known.iter().map(|w| w.wasted().unwrap()))));
    let told = known.len() == all.len();
    prop_assert!(same(stats.wasted_mean, path.wasted_mean.filter(|_| told)));
    let per_kept = known.iter().map(kept).sum::<f64>() / known.iter().map(kept_rows).sum::<f64>();
    prop_assert!(same(stats.marginal_kept, told.then_some(per_kept)));
    prop_assert_eq!(stats.wasted_by_row.is_some(), told);
    if let Some(by_row) = &stats.wasted_by_row {
        for (i, &wasted) in by_row.iter().enumerate() {
            let adds = |w: &Window| {
                let kept = w.kept.as_ref().unwrap();
                let before = |row: usize| kept.contains(&row) || row < i;
                (w.set(|row| before(row) || row == i).len() - w.set(before).len()) as f64
            };
            prop_assert!(same(Some(wasted), mean(all.iter().map(adds))));
        }
    }

    let shared = |w: &Window, a: usize, b: usize| w.set(|row| row == a).intersection(&w.set(|row| row == b)).count() as f64;
    let (overlaps, jaccards) = (stats.lag_overlap_frac.as_ref().unwrap(), stats.lag_jaccard.as_ref().unwrap());
    prop_assert_eq!((overlaps.len(), jaccards.len()), (deepest + 1, deepest + 1));
    for d in 1..=deepest {
        let pairs: Vec<f64> = all
            .iter()
            .flat_map(|w| (0..w.rows.len()).filter_map(move |row| Some(shared(w, row, *line(&w.parents, row).get(d)?))))
            .collect();
        prop_assert!(same(Some(overlaps[d]), mean(pairs.iter().map(|o| o / k as f64))));
        prop_assert!(same(Some(jaccards[d]), mean(pairs.iter().map(|o| o / (2.0 * k as f64 - o)))));
    }
    Ok(())
}

/// Random traces of two layers: windows of trees and chains by turns, tokens that repeat, passes of one to three requests.
pub fn traces() -> impl Strategy<Value = Memory> {
    let step = (0usize..8, any::<u64>(), 0usize..5, any::<bool>());
    let shape = (1usize..6, 8usize..20, 1u32..4);
    (shape, prop::collection::vec(step, 1..24), 1usize..40, prop::collection::vec(0u32..24, 0..6)).prop_map(
        |((k, experts, together), steps, slice, mut cuts)| {
            let mut trace = Memory::new(&[2, 7], experts as u16, k as u16);
            for (at, (kind, mut random, end, joined)) in steps.into_iter().enumerate() {
                let mut draw = |below: usize| {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (random >> 33) as usize % below.max(1)
                };
                let (phase, rows) = match kind {
                    0 => (Phase::Decode, 1),
                    1 if at % 5 == 4 => (Phase::Prefill, 6),
                    2 | 3 => (Phase::Verify, 4),
                    _ => (Phase::Verify, 5),
                };
                let parents: Vec<i16> =
                    (0..rows).map(|row: usize| if kind == 2 || row == 0 { row as i16 - 1 } else { draw(row) as i16 }).collect();
                let tokens: Vec<u32> = (0..rows).map(|_| draw(3) as u32).collect();
                let mut path = line(&parents, end.min(rows - 1));
                path.reverse();
                let mut emitted: Vec<u32> = path[1..].iter().map(|&row| tokens[row]).chain([9]).collect();
                if kind == 7 {
                    emitted.truncate(1);
                }
                let accepted = if phase == Phase::Verify { path.len() as u16 - 1 } else { 0 };
                let step_id = at as u32;
                let request_id = step_id % together + if at >= 12 { 3 } else { 0 };
                if phase == Phase::Verify {
                    trace.trees.insert(step_id, (parents, tokens, emitted));
                }
                // A request may be once in a pass: the next round of requests begins another.
                let round = step_id / together + if at >= 12 { 100 } else { 0 };
                trace.passes.push(Some(round).filter(|_| joined || kind != 5));
                trace.steps.push(StepRow { step_id, request_id, phase, rows: rows as u16, accepted, emitted: 1, context_len: step_id });
                for layer in [2, 7] {
                    for row in 0..rows {
                        let mut pool: Vec<u16> = (0..experts as u16).collect();
                        let ids: Vec<u16> = (0..k).map(|_| pool.swap_remove(draw(pool.len()))).collect();
                        trace.routes.push(Route { step: step_id, layer, row: row as u16, draft: false, ids, weights: Vec::new() });
                    }
                }
            }
            // A step of its own in the middle of a pass would break the rule that its steps come together.
            let passes = trace.passes.clone();
            for at in 1..passes.len() {
                if passes[at].is_some() && passes[at - 1].is_none() && passes[..at - 1].contains(&passes[at]) {
                    trace.passes.iter_mut().filter(|pass| **pass == passes[at]).for_each(|pass| *pass = None);
                }
            }
            cuts.sort_unstable();
            cuts.dedup();
            cuts.retain(|&cut| cut > 0);
            (trace.cuts, trace.slice) = (cuts, slice);
            trace
        },
    )
}

/// Sums over passes of one layer: passes, steps, unions of steps, unions of passes.
fn naive_batch(trace: &Memory, layers: &[u16]) -> BTreeMap<u32, [f64; 4]> {
    let mut passes: Vec<Vec<&StepRow>> = Vec::new();
    for (i, step) in trace.steps.iter().enumerate() {
        match passes.last_mut() {
            Some(pass) if trace.passes[i].is_some() && i > 0 && trace.passes[i - 1] == trace.passes[i] => pass.push(step),
            _ => passes.push(vec![step]),
        }
    }
    let has = |pass: &[&StepRow], phase| pass.iter().any(|s| s.phase == phase);
    let mut sums: BTreeMap<u32, [f64; 4]> = BTreeMap::new();
    if passes.iter().all(|pass| pass.len() < 2) {
        return sums;
    }
    for pass in passes.iter().filter(|p| has(p, Phase::Verify) && !has(p, Phase::Prefill)) {
        for layer in layers {
            let set = |step: &StepRow| -> BTreeSet<u16> {
                trace.routes.iter().filter(|r| r.step == step.step_id && r.layer == *layer).flat_map(|r| r.ids.clone()).collect()
            };
            let sets: Vec<BTreeSet<u16>> = pass.iter().map(|step| set(step)).collect();
            let all: BTreeSet<u16> = sets.iter().flatten().copied().collect();
            let new = [1.0, sets.len() as f64, sets.iter().map(|s| s.len() as f64).sum(), all.len() as f64];
            let sum = sums.entry(pass.len() as u32).or_default();
            sum.iter_mut().zip(new).for_each(|(sum, new)| *sum += new);
        }
    }
    sums
}

fn check_batch(found: &BatchStats, [passes, steps, by_step, by_pass]: [f64; 4]) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.passes as f64, passes);
    prop_assert!(close(found.request_union_mean, by_step / steps));
    prop_assert!(close(found.union_sum_mean, by_step / passes));
    prop_assert!(close(found.pass_union_mean, by_pass / passes));
    prop_assert!(close(found.sharing_ratio, by_step / by_pass) && found.sharing_ratio >= 1.0);
    Ok(())
}

fn total(sums: &BTreeMap<u32, [f64; 4]>) -> [f64; 4] {
    sums.values().fold([0.0; 4], |a, b| std::array::from_fn(|i| a[i] + b[i]))
}

/// The statistics of windows of that many rows in a layer.
fn of_rows(report: &Report, layer: usize, rows: u16) -> Option<&WindowStats> {
    let layer = report.layers.get(layer)?;
    std::iter::once(&layer.stats).chain(&layer.by_rows).find(|s| s.rows == rows && s.windows > 0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn trees_agree_with_sets(trace in traces()) {
        let report = trace.report();
        for (at, layer) in [2, 7].into_iter().enumerate() {
            for rows in [4, 5] {
                let all = windows(&trace, layer, rows);
                if let Some(stats) = of_rows(&report, at, rows) {
                    check(stats, &all, trace.manifest.model.experts_per_token.into())?;
                } else {
                    prop_assert!(all.is_empty());
                }
            }
        }
    }

    #[test]
    fn passes_agree_with_sets(trace in traces()) {
        let report = trace.report();
        let sums = naive_batch(&trace, &[2, 7]);
        let Some(batch) = &report.batch else {
            prop_assert!(sums.is_empty());
            return Ok(());
        };
        prop_assert_eq!(batch.overall.is_some(), !sums.is_empty());
        if let Some(overall) = &batch.overall {
            check_batch(overall, total(&sums))?;
        }
        prop_assert_eq!(batch.by_requests.iter().map(|s| s.requests).collect::<Vec<_>>(), sums.keys().copied().collect::<Vec<_>>());
        for size in &batch.by_requests {
            check_batch(&size.stats, sums[&size.requests])?;
            prop_assert_eq!(size.stats.passes, 2 * batch.requests_histogram[size.requests as usize]);
        }
        for layer in &batch.layers {
            check_batch(&layer.stats, total(&naive_batch(&trace, &[layer.layer])))?;
        }
    }

    #[test]
    fn cuts_do_not_matter(trace in traces()) {
        let whole = Memory { cuts: Vec::new(), slice: 1 << 20, ..trace.clone() };
        prop_assert_eq!(trace.report(), whole.report());
        let every_step = Memory { cuts: (1..trace.steps.len() as u32).collect(), slice: 1, ..trace };
        prop_assert_eq!(every_step.report(), whole.report());
    }
}

/// Two requests of two steps each: a tree of five rows, {0,1} over {1,2} and {2,3}, the latter over {0,3} and {4,5}.
pub fn tree() -> Memory {
    let mut trace = Memory::new(&[1], 10, 2);
    for (request, emitted) in [(0, vec![12, 13, 7]), (1, vec![11, 7])] {
        let window = [[0, 1], [1, 2], [2, 3], [0, 3], [4, 5]].map(|ids: [u16; 2]| ids.to_vec()).to_vec();
        trace.verify(request, emitted.len() as u16 - 1, &[window]);
        let step = trace.steps.last().unwrap().step_id;
        trace.trees.insert(step, (vec![-1, 0, 0, 2, 2], vec![10, 11, 12, 13, 14], emitted));
    }
    trace
}

#[test]
fn worked_example_of_a_tree() {
    let report = tree().report();
    let stats = &report.layers[0].stats;
    // Down the depths {0,1}, then {2,3}, then {4,5} are new; the depths themselves have 2, 3 and 4.
    let depths: Vec<_> = stats.by_depth.as_ref().unwrap().iter().map(|d| (d.rows_mean, d.union_mean, d.prefix_union, d.marginal)).collect();
    assert_eq!(depths, [(1.0, 2.0, 2.0, 2.0), (2.0, 3.0, 4.0, 2.0), (2.0, 4.0, 6.0, 2.0)]);
    // Kept: rows 0, 2, 3 with {0,1,2,3}, then 0, 1 with {0,1,2}. Row numbers alone would have said 0, 1, 2 of the first.
    let path = stats.accepted_path.unwrap();
    assert_eq!((path.windows, path.unknown_windows, path.rows_mean, path.union_mean), (2, 0, Some(2.5), Some(3.5)));
    assert_eq!((path.wasted_mean, stats.wasted_mean, stats.marginal_kept), (Some(2.5), Some(2.5), Some(7.0 / 5.0)));
    assert_eq!(stats.wasted_by_row.as_deref(), Some(&[0.0, 0.0, 0.5, 0.0, 2.0][..]));
    assert_eq!(report.by_request[0].wasted_mean, Some(2.0));
    // A draft of depth 2 is the longest that could be accepted.
    assert_eq!(report.acceptance.by_position, [Some(1.0), Some(0.5)]);
    assert_eq!(report.acceptance.histogram, [0, 1, 1]);
    assert_eq!(report.advice, None);
    assert!(report.warnings.iter().any(|w| w.code == "trees") && report.warnings.iter().all(|w| w.code != "unknown_paths"));
}

#[test]
fn kept_rows_that_nobody_told_are_null() {
    let mut trace = tree();
    trace.trees.get_mut(&1).unwrap().2 = vec![99, 7];
    let wanted = crate::analysis::Wanted { by: Some(crate::analysis::GroupBy::Request), ..Default::default() };
    let report = trace.try_report_of(&wanted).unwrap();
    let stats = &report.layers[0].stats;
    assert_eq!((stats.wasted_mean, stats.marginal_kept, stats.marginal_rejected, &stats.wasted_by_row), (None, None, None, &None));
    let path = stats.accepted_path.unwrap();
    assert_eq!((path.windows, path.unknown_windows, path.union_mean, path.wasted_mean), (1, 1, Some(4.0), Some(2.0)));
    let of = |i: usize| (report.by_request[i].wasted_mean, report.by_request[i].sums.as_ref().unwrap().wasted.clone());
    assert_eq!((of(0), of(1)), ((Some(2.0), Some(vec![2])), (None, None)));
    let groups = report.groups.unwrap().groups;
    assert_eq!((groups[0].wasted_mean, groups[0].marginal_kept), (Some(2.0), Some(4.0 / 3.0)));
    assert_eq!((groups[1].wasted_mean, groups[1].marginal_kept, groups[1].union_mean), (None, None, Some(6.0)));
    let warning = report.warnings.iter().find(|w| w.code == "unknown_paths").unwrap();
    assert!(warning.message.contains("1 of 2 trees") && warning.message.contains("steps 1;"), "{}", warning.message);
}

/// Four requests of two layers; 0 and 1 share passes, and 2 and 3 do.
pub fn batches() -> Memory {
    let mut trace = Memory::new(&[1, 4], 12, 2);
    for (request, far) in [(0, 2), (1, 4), (2, 2), (3, 2)] {
        let window = |far: u16| vec![vec![0, 1], vec![far, far + 1]];
        trace.verify(request, 0, &[window(far), window(2)]);
    }
    trace.passes = vec![Some(0), Some(0), Some(1), Some(1)];
    trace
}

#[test]
fn worked_example_of_passes() {
    let report = batches().report();
    let batch = report.batch.unwrap();
    assert_eq!((batch.passes, batch.requests_per_pass, batch.rows_per_pass), (2, 2.0, 4.0));
    // Layer 1: {0,1,2,3} and {0,1,4,5} together 6, twice {0,1,2,3} together 4. Layer 4: twice 4 of 8.
    let of = |s: &BatchStats| (s.passes, s.request_union_mean, s.union_sum_mean, s.pass_union_mean, s.sharing_ratio);
    assert_eq!(of(&batch.layers[0].stats), (2, 4.0, 8.0, 5.0, 1.6));
    assert_eq!(of(&batch.layers[1].stats), (2, 4.0, 8.0, 4.0, 2.0));
    assert_eq!(of(&batch.overall.unwrap()), (4, 4.0, 8.0, 4.5, 16.0 / 9.0));
    // Two groups of requests: drawn twice, one, or both.
    assert_eq!(batch.layers[0].stats.pass_union_ci95, Some([4.0, 6.0]));
    assert_eq!(batch.by_requests.iter().map(|s| (s.requests, of(&s.stats).3)).collect::<Vec<_>>(), [(2, 4.5)]);
    assert!(report.warnings.iter().any(|w| w.code == "shared_passes"));
}

#[test]
fn passes_that_cannot_be_judged_are_left_out() {
    // One group of requests: no interval.
    let mut trace = batches();
    trace.passes = vec![Some(0); 4];
    let report = trace.report();
    assert_eq!(report.batch.as_ref().unwrap().overall.unwrap().pass_union_ci95, None);
    assert!(report.warnings.iter().any(|w| w.code == "too_few_batches"));
    // A row is missing in one layer: that pass is not there.
    let mut trace = batches();
    trace.routes.retain(|r| (r.step, r.layer, r.row) != (1, 1, 1));
    let layers = trace.report().batch.unwrap().layers;
    assert_eq!(layers.iter().map(|l| l.stats.passes).collect::<Vec<_>>(), [1, 2]);
    // Prompt rows ran with the first pass.
    let mut trace = batches();
    trace.steps[1].phase = Phase::Prefill;
    let batch = trace.report().batch.unwrap();
    assert_eq!((batch.passes, batch.passes_with_prefill), (1, 1));
    // Numbers that break the rules.
    let mut trace = batches();
    trace.passes = vec![Some(1), Some(1), Some(0), Some(0)];
    assert!(trace.try_report().unwrap_err().to_string().contains("steps: step 2: its pass 0"));
    // Everything of its own: no block.
    trace.passes = vec![None; 4];
    assert_eq!(trace.report().batch, None);
}
