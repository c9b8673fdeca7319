//! What the numbers of a partial must be to one another. A trace's counts are sums over its windows, so that most of them can be had in two
//! ways: a file whose numbers were changed by hand does not agree with itself any more.

use super::entries::ONE;
use super::tree_entries;
use crate::analysis::StepTime;
use crate::analysis::counts::{LoadCounts, RequestSums, WindowCounts};
use crate::analysis::overlap::pairs;
use crate::analysis::pass::{PassCounts, Plan};
use crate::analysis::steps::StepRow;
use crate::trace::Phase;
use std::collections::BTreeMap;

/// Longest time of a step, ns: a hundred days.
const MAX_NS: i64 = 100 * 86_400 * 1_000_000_000;

/// Checks a step's numbers on their own.
///
/// # Errors
/// The number that no step has.
pub(super) fn step(step: &StepRow, time: &StepTime, draft_probs: Option<&[f32]>) -> Result<(), String> {
    let most = u32::from(step.accepted) + 1;
    if step.emitted > most || (step.accepted > 0 && step.phase != Phase::Verify) {
        return Err(format!("{} accepted drafts and {} emitted tokens in a {} step", step.accepted, step.emitted, step.phase.as_str()));
    }
    let times = [Some(time.step_ns), Some(time.target_ns), time.device_ns];
    if let Some(ns) = times.into_iter().flatten().find(|ns| !(0..=MAX_NS).contains(ns)) {
        return Err(format!("a time of {ns} ns"));
    }
    match draft_probs.unwrap_or_default().iter().find(|q| **q < 0.0 || **q > 1.0) {
        Some(q) => Err(format!("a draft of probability {q}")),
        None => Ok(()),
    }
}

/// Checks all counts. `without_loads`: of counts by expert it may be unknown how many rows they are of.
///
/// # Errors
/// Where they do not agree, and the number.
pub(super) fn counts(counts: &PassCounts, plan: &Plan<'_>, without_loads: bool) -> Result<(), String> {
    for (rows, slots) in &counts.groups {
        for (slot, window) in slots.iter().enumerate().filter_map(|(slot, w)| Some((slot, w.as_ref()?))) {
            let named = |what: String| format!("windows of {rows} rows in layer {}: {what}", plan.layers.get(slot).unwrap_or(&0));
            windows(window).map_err(named)?;
            requests(counts, (*rows, slot), window, plan.experts).map_err(named)?;
        }
        rows_add(counts, *rows, slots)?;
    }
    steps(counts, plan)?;
    unions(counts, plan)?;
    let load = |kind: &str, layer: u16, load: &LoadCounts| {
        let (sum, rows) = (total(&load.by_expert), u128::from(load.rows));
        // A layer without rows has no entry an expert either.
        if sum == rows * plan.k as u128 {
            return Ok(());
        }
        Err(format!(
            "load of {kind} in layer {layer}: {sum} choices of an expert, {rows} rows of {} make {}",
            plan.k,
            rows * plan.k as u128
        ))
    };
    if without_loads {
        return Ok(());
    }
    plan.layers.iter().zip(&counts.load).try_for_each(|(&layer, l)| load("the target", layer, l))?;
    counts.draft.iter().try_for_each(|(&layer, l)| load("the drafter", layer, l))?;
    counts.prefill.iter().try_for_each(|(&layer, l)| load("the prompts", layer, l))
}

fn total(numbers: &[u64]) -> u128 {
    numbers.iter().map(|&n| u128::from(n)).sum()
}

/// Σ over windows of their unions.
fn union_sum(window: &WindowCounts) -> u128 {
    (0u128..).zip(&window.union_hist).map(|(union, &n)| union * u128::from(n)).sum()
}

/// The counts of one layer and number of rows.
fn windows(w: &WindowCounts) -> Result<(), String> {
    let (n, k) = (u128::from(w.windows), w.k as u128);
    let equal = |key: &str, found: u128, wanted: u128| match found == wanted {
        true => Ok(()),
        false => Err(format!("`{key}` comes to {found}, the others say {wanted}")),
    };
    let at_most = |key: &str, found: u128, most: u128| match found <= most {
        true => Ok(()),
        false => Err(format!("`{key}` is {found}, at most {most} are possible")),
    };
    let union = union_sum(w);
    equal("union_histogram", total(&w.union_hist), n)?;
    equal("marginal", total(&w.marginal), union)?;
    w.marginal.iter().try_for_each(|&m| at_most("marginal", u128::from(m), n * k))?;
    equal("wasted_by_row", total(&w.wasted_by_row), u128::from(w.wasted))?;
    // Of trees whose accepted rows are not known, nothing is counted of kept and rejected ones.
    let whole = w.trees.as_ref().is_none_or(|trees| trees.unknown == 0);
    let parts = [
        ("kept_experts` and `wasted", w.kept_experts, w.wasted, union),
        ("kept_rows` and `rejected_rows", w.kept_rows, w.rejected_rows, n * w.rows as u128),
    ];
    for (key, a, b, all) in parts {
        let sum = u128::from(a) + u128::from(b);
        if whole { equal(key, sum, all) } else { at_most(key, sum, all) }?;
    }
    if w.pair_hist.len() == pairs(w.rows) * (w.k + 1) {
        w.pair_hist.chunks_exact(w.k + 1).try_for_each(|pair| equal("pair_histogram", total(pair), n))?;
    }
    for (union, ((&windows, &reused), &shared)) in (0u128..).zip(w.union_hist.iter().zip(&w.reuse_windows).zip(&w.reuse_shared)) {
        at_most("reuse_windows", u128::from(reused), u128::from(windows))?;
        at_most("reuse_shared", u128::from(shared), u128::from(reused) * union)?;
    }
    at_most("coverage_windows` and `coverage_left_out", u128::from(w.coverage_windows) + u128::from(w.coverage_left_out), n)?;
    w.coverage.iter().try_for_each(|&sum| at_most("coverage", sum / ONE, u128::from(w.coverage_windows)))?;
    if w.coverage.iter().any(|&sum| sum > u128::from(w.coverage_windows) * ONE) {
        return Err("`coverage` is more than all".into());
    }
    if tree_entries::is_part(w) { Ok(()) } else { Err("of its trees there are more than of all windows".into()) }
}

/// The requests' sums against those of all.
fn requests(counts: &PassCounts, (rows, slot): (usize, usize), window: &WindowCounts, experts: usize) -> Result<(), String> {
    let most = (rows * window.k).min(experts) as u128;
    let mut all = [0u128; 3];
    for sums in counts.sums.iter().filter(|((_, r), _)| *r == rows).filter_map(|(_, sums)| sums.get(slot)) {
        let &RequestSums { windows, union, wasted } = sums;
        if u128::from(union) > u128::from(windows) * most || wasted > union {
            return Err(format!("a request has {wasted} wasted experts in unions of {union} in all"));
        }
        all.iter_mut().zip([windows, union, wasted]).for_each(|(sum, n)| *sum += u128::from(n));
    }
    let wanted = [u128::from(window.windows), union_sum(window), u128::from(window.wasted)];
    let differs = ["windows", "union", "wasted"].into_iter().zip(all).zip(wanted).find(|((_, sum), wanted)| sum != wanted);
    match differs {
        None => Ok(()),
        Some(((key, sum), wanted)) => Err(format!("`{key}` is {wanted}, and {sum} over the requests")),
    }
}

/// What rows add, by step against by layer.
fn rows_add(counts: &PassCounts, rows: usize, slots: &[Option<WindowCounts>]) -> Result<(), String> {
    let mut by_step = vec![0u128; rows + 1];
    for step in counts.steps.iter().filter(|step| step.added.len() == rows) {
        let numbers = std::iter::once(step.layers).chain(step.added.iter().copied());
        by_step.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += u128::from(n));
    }
    let mut by_layer = vec![0u128; rows + 1];
    for window in slots.iter().flatten() {
        let numbers = std::iter::once(window.windows).chain(window.marginal.iter().copied());
        by_layer.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += u128::from(n));
    }
    match by_step.iter().zip(&by_layer).find(|(a, b)| a != b) {
        None => Ok(()),
        Some((a, b)) => Err(format!("windows of {rows} rows: what rows add is {a} over the steps, {b} over the layers")),
    }
}

/// Every step once, and none that keeps more than it touches.
fn steps(counts: &PassCounts, plan: &Plan<'_>) -> Result<(), String> {
    let id = |at: u32| plan.steps.steps.get(at as usize).map_or(at, |s| s.step_id);
    let kept = |sum: &crate::analysis::step_sums::StepSum<'_>| counts.paths.get(&sum.at).copied().filter(|&kept| kept > sum.union());
    if let Some((sum, kept)) = counts.steps.iter().find_map(|sum| Some((sum, kept(&sum)?))) {
        return Err(format!("step {} keeps {kept} experts and touches {}", id(sum.at), sum.union()));
    }
    let mut keys = counts.steps.iter().map(|sum| (sum.at, sum.added.len())).collect::<Vec<_>>();
    keys.sort_unstable();
    match keys.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(format!("step {} is added twice", id(pair[0].0))),
    }
}

/// Single windows' unions, where the file has them, against the histograms of them.
fn unions(counts: &PassCounts, plan: &Plan<'_>) -> Result<(), String> {
    if counts.unions.is_empty() {
        return Ok(());
    }
    let mut balance: BTreeMap<(u16, u16), i128> = BTreeMap::new();
    counts.unions.iter().for_each(|w| *balance.entry((w.slot, w.union)).or_default() += 1);
    for (_, slots) in &counts.groups {
        for (slot, window) in (0u16..).zip(slots) {
            for (union, &n) in (0u16..).zip(window.iter().flat_map(|w| &w.union_hist)).filter(|(_, n)| **n > 0) {
                *balance.entry((slot, union)).or_default() -= i128::from(n);
            }
        }
    }
    match balance.into_iter().find(|(_, n)| *n != 0) {
        None => Ok(()),
        Some(((slot, union), n)) => {
            let (layer, n) = (plan.layers.get(usize::from(slot)).unwrap_or(&0), n.unsigned_abs());
            Err(format!("layer {layer}: the histogram of unions and the windows' own differ by {n} windows of {union} experts"))
        }
    }
}
