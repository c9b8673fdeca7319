//! How often numbers that need sums by request are said to change without a change, and how often a change is seen: many made-up pairs
//! of traces.

use super::compare::Verdict;
use super::*;
use crate::analysis::request_totals::tests::of_memory;
use crate::analysis::request_totals::{MAX_CELLS, RequestTotals};
use crate::analysis::tests::memory::Memory;
use crate::metric::report::RequestIdentity;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const PAIRS: u64 = 200;
/// Pairs with a change: enough to tell 95 % from 80 %.
const CHANGED: u64 = 60;
const REQUESTS: u32 = 24;
const EXPERTS: u32 = 32;

/// Traces of 24 requests of 6 to 9 windows of four rows in two layers; k = 4 of 32 experts. A prompt prefers ten experts of its own; a row
/// takes over each expert of the row before with the probability `sticky`, and draws the others, four of five from the preferred ones,
/// of the rest low numbers more often by `skew`.
fn memory(prompts: u64, windows: u64, sticky: f64, skew: f64) -> Memory {
    let mut memory = Memory::new(&[1, 2], EXPERTS as u16, 4);
    let mut scatter = ChaCha8Rng::seed_from_u64(windows);
    let chance = |rng: &mut ChaCha8Rng| f64::from(rng.next_u32()) / f64::from(u32::MAX);
    for request in 0..REQUESTS {
        let mut prompt = ChaCha8Rng::seed_from_u64(prompts.wrapping_mul(1000) + u64::from(request));
        let preferred: Vec<u16> = (0..10).map(|_| (prompt.next_u32() % EXPERTS) as u16).collect();
        for _ in 0..6 + prompt.next_u32() % 4 {
            let mut window = || {
                let mut rows: Vec<Vec<u16>> = Vec::new();
                for _ in 0..4 {
                    let mut row: Vec<u16> = Vec::new();
                    for &id in rows.last().into_iter().flatten() {
                        if chance(&mut scatter) < sticky {
                            row.push(id);
                        }
                    }
                    while row.len() < 4 {
                        let id = if chance(&mut scatter) < 0.8 {
                            preferred[scatter.next_u32() as usize % preferred.len()]
                        } else {
                            (chance(&mut scatter).powf(1.0 + skew) * f64::from(EXPERTS - 1)) as u16
                        };
                        if !row.contains(&id) {
                            row.push(id);
                        }
                    }
                    rows.push(row);
                }
                rows
            };
            let ids = [window(), window()];
            let accepted = (0..3).take_while(|_| chance(&mut scatter) < 0.7).count() as u16;
            memory.verify(request, accepted, &ids);
        }
    }
    memory
}

/// The same, half of the windows trees: two drafts of depth 1, the second of which has one below it.
fn trees(prompts: u64, windows: u64, sticky: f64) -> (Report, RequestTotals) {
    let mut memory = memory(prompts, windows, sticky, 0.0);
    for step in memory.steps.iter_mut().step_by(2) {
        step.accepted = step.accepted.min(2);
        // One accepted draft is of either branch by turns.
        let emitted = match step.accepted {
            0 => vec![99],
            1 => vec![11 + (step.step_id / 2) % 2, 99],
            _ => vec![12, 13, 99],
        };
        memory.trees.insert(step.step_id, (vec![-1, 0, 0, 2], vec![10, 11, 12, 13], emitted));
    }
    summed(&memory, prompts, windows)
}

fn trace(prompts: u64, windows: u64, sticky: f64, skew: f64) -> (Report, RequestTotals) {
    summed(&memory(prompts, windows, sticky, skew), prompts, windows)
}

fn summed(memory: &Memory, prompts: u64, windows: u64) -> (Report, RequestTotals) {
    let mut report = memory.report();
    for request in &mut report.by_request {
        let identity = |of: u64| format!("{of}-{}", request.request_id);
        request.identity = Some(RequestIdentity { prompt: Some(identity(prompts)), output: identity(windows), windows: identity(windows) });
    }
    let totals = of_memory(memory, &report, MAX_CELLS);
    (report, totals)
}

fn compared(base: &(Report, RequestTotals), candidate: &(Report, RequestTotals)) -> Comparison {
    let options = Options { allow: vec![Kind::Workload], ..Options::default() };
    diff_numbers([(&base.0, Some(&base.1)), (&candidate.0, Some(&candidate.1))], &Rules::default(), &options).unwrap()
}

fn row<'a>(c: &'a Comparison, path: &str) -> &'a Row {
    c.rows.iter().find(|r| r.layer.is_none() && r.path == path).unwrap()
}

/// Of every kind of number that needs them.
const PATHS: [&str; 14] = [
    "prefix_union[2]",
    "marginal[1]",
    "marginal[3]",
    "marginal_kept",
    "marginal_rejected",
    "pairwise[0][2]",
    "lag_overlap_frac[1]",
    "lag_jaccard[2]",
    "step_reuse",
    "popularity_union",
    "popularity_lift",
    "load.entropy_bits",
    "load.effective_experts",
    "acceptance.by_position[1]",
];

#[test]
fn without_a_change_few_numbers_are_said_to_change() {
    for paired in [true, false] {
        let (mut claimed, mut low) = ([0u64; PATHS.len()], [0u64; PATHS.len()]);
        for seed in 0..PAIRS {
            let other = if paired { seed } else { seed + 5000 };
            let c = compared(&trace(seed, 2 * seed + 1, 0.5, 0.0), &trace(other, 2 * seed + 2, 0.5, 0.0));
            assert_eq!(c.pairing.is_paired(), paired);
            for (i, path) in PATHS.iter().enumerate() {
                let row = row(&c, path);
                claimed[i] += u64::from(row.q.unwrap() <= compare::FALSE_DISCOVERIES);
                low[i] += u64::from(row.p.unwrap() < 0.05);
            }
        }
        for (i, path) in PATHS.iter().enumerate() {
            assert!(claimed[i] * 20 <= PAIRS, "paired {paired}, {path}: {} of {PAIRS} claim a change", claimed[i]);
            // Tests at 5 %: 10 of 200 expected, and 20 are more than three standard errors above.
            assert!(low[i] <= 20, "paired {paired}, {path}: p < 0.05 in {} of {PAIRS}", low[i]);
        }
    }
}

/// Numbers that go by accepted rows, by ancestors or by depth.
const OF_TREES: [&str; 7] = [
    "marginal_kept",
    "marginal_rejected",
    "wasted_mean",
    "lag_overlap_frac[1]",
    "lag_jaccard[2]",
    "acceptance.by_position[1]",
    "acceptance.conditional_by_position[1]",
];

#[test]
fn trees_are_compared_by_request_as_chains_are() {
    let (mut low, mut caught) = ([0u64; OF_TREES.len()], 0);
    for seed in 0..PAIRS {
        let base = trees(seed, 2 * seed + 1, 0.5);
        let c = compared(&base, &trees(seed, 2 * seed + 2, 0.5));
        for (n, path) in low.iter_mut().zip(OF_TREES) {
            let row = row(&c, path);
            assert_eq!(row.method, compare::Method::Paired, "{path}");
            *n += u64::from(row.p.unwrap() < 0.05);
        }
        if seed < CHANGED {
            let c = compared(&base, &trees(seed, 2 * seed + 2, 0.8));
            // What kept rows add is neither good nor bad: a change of it is claimed without a verdict.
            caught += u64::from(OF_TREES[..5].iter().all(|path| row(&c, path).q.is_some_and(|q| q <= compare::FALSE_DISCOVERIES)));
        }
    }
    for (n, path) in low.iter().zip(OF_TREES) {
        assert!(*n <= 20, "{path}: p < 0.05 in {n} of {PAIRS} without a change");
    }
    assert!(caught * 20 >= 19 * CHANGED, "rows that share more are caught in {caught} of {CHANGED}");
    let c = compared(&trees(1, 1, 0.5), &trees(2, 2, 0.5));
    let without: Vec<String> = c.rows.iter().filter(|r| r.change.is_none()).map(Row::name).collect();
    assert!(without.iter().all(|name| name.ends_with("union.max")), "{without:?}");
}

#[test]
fn a_planted_change_is_caught() {
    let sticky = ["marginal[3]", "lag_overlap_frac[1]", "lag_jaccard[1]", "pairwise[0][1]", "popularity_lift"];
    let skew = ["load.entropy_bits", "load.effective_experts", "popularity_union"];
    for paired in [true, false] {
        let mut caught = [0u64; 8];
        for seed in 0..CHANGED {
            let other = if paired { seed } else { seed + 5000 };
            let base = trace(seed, 2 * seed + 1, 0.5, 0.0);
            let c = compared(&base, &trace(other, 2 * seed + 2, 0.8, 0.0));
            for (n, path) in caught.iter_mut().zip(sticky) {
                *n += u64::from(matches!(row(&c, path).verdict, Verdict::Worse | Verdict::Better));
            }
            let c = compared(&base, &trace(other, 2 * seed + 2, 0.5, 9.0));
            for (n, path) in caught[sticky.len()..].iter_mut().zip(skew) {
                // Neither direction is better: the change is in the note.
                *n += u64::from(row(&c, path).q.unwrap() <= compare::FALSE_DISCOVERIES);
            }
        }
        for (n, path) in caught.iter().zip(sticky.iter().chain(&skew)) {
            assert!(n * 20 >= 19 * CHANGED, "paired {paired}, {path}: caught in {n} of {CHANGED}");
        }
    }
}

#[test]
fn every_number_of_a_traces_routes_has_an_interval() {
    let c = compared(&trace(1, 1, 0.5, 0.0), &trace(2, 2, 0.5, 0.0));
    let without: Vec<String> = c.rows.iter().filter(|r| r.change.is_none()).map(Row::name).collect();
    // A largest value has none, and of a report alone less is known.
    assert!(without.iter().all(|name| name.ends_with("union.max")), "{without:?}");
    let (base, candidate) = (trace(1, 1, 0.5, 0.0).0, trace(2, 2, 0.5, 0.0).0);
    let options = Options { allow: vec![Kind::Workload], ..Options::default() };
    let alone = diff_reports(&base, &candidate, &Rules::default(), &options).unwrap();
    assert_eq!(alone.rows.len(), c.rows.len());
    assert!(row(&alone, "step_reuse").change.is_none() && row(&alone, "union.mean").change.is_some());
}
