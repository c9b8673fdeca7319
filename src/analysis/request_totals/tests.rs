//! The sums are the report's numbers, however the trace is cut and whatever the threads.

use super::*;
use crate::analysis::plan_of;
use crate::analysis::steps::StepTable;
use crate::analysis::tests::memory::Memory;
use crate::analysis::tests::shapes;
use proptest::prelude::*;

/// The sums of a trace in memory.
pub(crate) fn of_memory(memory: &Memory, report: &Report, most: usize) -> RequestTotals {
    let totals = memory.with_input(|input| {
        let table = StepTable::new(input.steps)?.with_trees(input.trees);
        let mut plan = plan_of(input.manifest, &table)?;
        plan.trees = Some(input.trees).filter(|trees| !trees.is_empty());
        of_plan(&plan, memory, report, most)
    });
    totals.unwrap()
}

/// Two layers of 12 experts, three a row: requests in turns, windows of 2, 3 and (mostly) 4 rows, gate weights.
fn trace(seed: u64, steps: usize, cuts: &[u32], slice: usize) -> Memory {
    let mut state = seed;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut memory = Memory::new(&[1, 5], 12, 3);
    for _ in 0..steps {
        let rows = [4, 4, 4, 3, 2][next(5) as usize];
        let mut window = || -> Vec<Vec<u16>> {
            (0..rows)
                .map(|_| {
                    let first = (next(5) * next(3)) as u16;
                    vec![first, (first + 1 + next(3) as u16) % 12, (first + 4 + next(4) as u16) % 12]
                })
                .collect()
        };
        let ids = [window(), window()];
        memory.verify(next(4) as u32, next(rows) as u16, &ids);
    }
    for route in &mut memory.routes {
        route.weights = (0..3).map(|_| 0.1 + next(9) as f32).collect();
    }
    memory.cuts = cuts.to_vec();
    memory.slice = slice;
    memory
}

fn value(table: Table<'_>, of: impl Fn(Cells<'_>) -> Option<(f64, f64)>) -> f64 {
    let (n, d) = table.each(of).into_iter().flatten().fold((0.0, 0.0), |(n, d), (a, b)| (n + a, d + b));
    n / d
}

fn is_of(table: Table<'_>, stats: &crate::metric::report::WindowStats, coverage: &[f64]) -> Result<(), TestCaseError> {
    let close = |name: &str, sums: f64, report: f64| {
        prop_assert!((sums - report).abs() < 1e-5, "{name}: {sums} by request, {report} in the report");
        Ok(())
    };
    for (i, &m) in stats.marginal.iter().enumerate() {
        close("marginal", value(table, |c| c.marginal(i)), m)?;
        close("prefix_union", value(table, |c| c.prefix(i)), stats.prefix_union[i])?;
    }
    stats.marginal_kept.map_or(Ok(()), |v| close("kept", value(table, |c| c.kept()), v))?;
    stats.marginal_rejected.map_or(Ok(()), |v| close("rejected", value(table, |c| c.rejected()), v))?;
    stats.step_reuse.map_or(Ok(()), |v| close("step_reuse", value(table, |c| c.reuse()), v))?;
    for (i, row) in stats.pairwise.iter().flatten().enumerate() {
        for (j, &v) in row.iter().enumerate().skip(i + 1) {
            close("pairwise", value(table, |c| c.pair(i, j)), v)?;
        }
    }
    for (d, &v) in stats.lag_overlap_frac.iter().flatten().enumerate().skip(1) {
        close("lag_overlap_frac", value(table, |c| c.lag_overlap_frac(d)), v)?;
        close("lag_jaccard", value(table, |c| c.lag_jaccard(d)), stats.lag_jaccard.as_ref().unwrap()[d])?;
    }
    for (b, &v) in coverage.iter().enumerate() {
        close("mass_coverage", value(table, |c| c.coverage(b)), v)?;
    }
    for metric in LoadMetric::ALL {
        // Together the requests are all rows: nothing is moved.
        let moved: f64 = table.each(|c| c.load(metric)).into_iter().flatten().sum();
        prop_assert!(moved.abs() < 1e-6, "{metric:?} {moved}");
    }
    Ok(())
}

/// Every number of the report that has sums by request is what they say.
fn agrees(memory: &Memory) -> Result<(Report, RequestTotals), TestCaseError> {
    let report = memory.report();
    let totals = of_memory(memory, &report, MAX_CELLS);
    if let Some(overall) = &report.overall {
        is_of(totals.table(None).unwrap(), &overall.stats, overall.mass_coverage.as_deref().unwrap_or_default())?;
    }
    for (slot, layer) in report.layers.iter().enumerate().filter(|(_, l)| l.stats.windows > 0) {
        is_of(totals.table(Some(slot)).unwrap(), &layer.stats, layer.mass_coverage.as_deref().unwrap_or_default())?;
    }
    let a = &report.acceptance;
    for (i, &windows) in a.windows_by_position.iter().enumerate() {
        let sums = totals.position(i).unwrap();
        let of = |pick: fn(&PositionSums) -> u64| sums.iter().map(pick).sum::<u64>();
        prop_assert_eq!(of(|s| s.had), windows);
        prop_assert_eq!(Some(of(|s| s.kept) as f64 / windows as f64), a.by_position[i]);
        let reached = of(|s| s.reached);
        prop_assert_eq!((reached > 0).then(|| of(|s| s.kept) as f64 / reached as f64), a.conditional_by_position[i]);
    }
    Ok((report, totals))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn sums_are_the_reports_numbers(
        seed in any::<u64>(),
        steps in 3usize..60,
        mut cuts in prop::collection::vec(1u32..60, 0..4),
        slice in 1usize..40,
    ) {
        cuts.sort_unstable();
        cuts.dedup();
        cuts.retain(|&cut| (cut as usize) < steps);
        let memory = trace(seed, steps, &cuts, slice);
        let (report, totals) = agrees(&memory)?;
        let overall = report.overall.as_ref().unwrap();
        // The same without the layers, gradients rounded once instead of twice.
        let few = of_memory(&memory, &report, totals.layout.width() * 4);
        prop_assert!(few.without_layers && !few.without_any && few.table(Some(0)).is_none());
        is_of(few.table(None).unwrap(), &overall.stats, overall.mass_coverage.as_deref().unwrap_or_default())?;
        for metric in LoadMetric::ALL {
            let of = |totals: &RequestTotals| totals.table(None).unwrap().each(|c| c.load(metric));
            for (one, other) in of(&few).into_iter().zip(of(&totals)) {
                prop_assert!((one.unwrap_or(0.0) - other.unwrap_or(0.0)).abs() < 1e-6);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn sums_of_trees_are_the_reports_numbers(memory in shapes::traces()) {
        agrees(&memory)?;
    }
}

#[test]
fn worked_example_of_a_tree() {
    let memory = shapes::tree();
    let report = memory.report();
    let totals = of_memory(&memory, &report, MAX_CELLS);
    let each = |of: fn(Cells<'_>) -> Option<(f64, f64)>| totals.table(Some(0)).unwrap().each(of);
    // Kept {0,1}, {2,3}, {0,3} of the union of six; then {0,1} and {1,2}. Row numbers alone would have kept {1,2} of the first.
    assert_eq!(each(|c| c.kept()), [Some((4.0, 3.0)), Some((3.0, 2.0))]);
    assert_eq!(each(|c| c.rejected()), [Some((2.0, 2.0)), Some((3.0, 3.0))]);
    // Four parents share 1, 0, 1 and 0 experts with their children, two grandparents 1 and 0 with theirs.
    assert_eq!(each(|c| c.lag_overlap_frac(1)), [Some((1.0, 4.0)); 2]);
    assert_eq!(each(|c| c.lag_overlap_frac(2)), [Some((0.5, 2.0)); 2]);
    assert!((each(|c| c.lag_jaccard(1))[0].unwrap().0 - 2.0 / 3.0).abs() < 1e-6);
    let position = |i: usize| totals.position(i).unwrap().iter().map(|s| (s.had, s.reached, s.kept)).collect::<Vec<_>>();
    assert_eq!((position(0), position(1)), (vec![(1, 1, 1); 2], vec![(1, 1, 1), (1, 1, 0)]));
}

#[test]
fn too_many_requests_leave_everything_out() {
    let memory = trace(1, 30, &[], 100);
    let report = memory.report();
    let none = of_memory(&memory, &report, 100);
    assert!(none.without_any && none.without_layers && none.table(None).is_none() && none.position(0).is_none_or(|p| p.is_empty()));
}

#[test]
fn a_request_moves_a_load_as_leaving_it_out_does() {
    // Many alike requests: the jackknife's step is -u r to first order.
    let memory = trace(7, 400, &[], 100);
    let report = memory.report();
    let totals = of_memory(&memory, &report, MAX_CELLS);
    let without = |request: u32| {
        let mut other = memory.clone();
        let gone: Vec<u32> = other.steps.iter().filter(|s| s.request_id == request).map(|s| s.step_id).take(8).collect();
        other.steps.retain(|s| !gone.contains(&s.step_id));
        other.routes.retain(|r| !gone.contains(&r.step));
        (other.report(), of_memory(&other, &report, MAX_CELLS))
    };
    let (smaller, rest) = without(2);
    let sum =
        |totals: &RequestTotals| totals.table(Some(0)).unwrap().each(|c| c.load(LoadMetric::Entropy)).into_iter().flatten().sum::<f64>();
    let of = |report: &Report| report.layers[0].load.unwrap().entropy_bits;
    let (linear, real) = (sum(&rest) - sum(&totals), of(&smaller) - of(&report));
    assert!((linear - real).abs() < 0.15 * real.abs(), "{linear} {real}");
}
