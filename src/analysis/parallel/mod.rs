//! Windows over the ranks of an expert-parallel machine: a placement against one that is balanced by the loads.
//!
//! The balanced placement of each layer is made of the loads of half of the requests and judged by the windows of the other half, both
//! ways round, so that it is not judged by what it was made of.

pub mod placement;
mod spread;

use super::counts::LoadCounts;
use super::pass::{self, Plan};
use super::trace_source;
use super::window::{Window, WindowSink, outside};
use super::{AnalysisError, Input};
use crate::metric::parallel::{Balanced, ExpertParallel, ParallelLayer, ParallelStats};
use crate::trace::Trace;
use placement::{Choice, LayerPlacement};
use spread::{Halves, SpreadCounts, Spreader};

/// Bytes of one activation value: 16 bits, whatever the weights are stored in.
const VALUE_BYTES: u64 = 2;

/// What to spread windows over.
#[derive(Debug, Clone, PartialEq)]
pub struct Parallel {
    /// Number of ranks, at least 1 and at most the number of experts.
    pub ranks: u16,
    /// Where experts are.
    pub placement: Choice,
}

/// Loads of all verify rows by layer and half.
struct Loads {
    layers: Vec<Halves>,
}

impl Loads {
    fn new(plan: &Plan<'_>) -> Self {
        let none = LoadCounts { rows: 0, by_expert: vec![0; plan.experts] };
        Self { layers: vec![[none.clone(), none]; plan.layers.len()] }
    }

    fn merge(&mut self, other: Self) {
        for (mine, theirs) in self.layers.iter_mut().flatten().zip(other.layers.iter().flatten()) {
            mine.merge(theirs);
        }
    }

    /// Of one layer: those that a window of this half is judged by. Both halves when one of them is empty anywhere.
    fn of_others(&self, slot: usize, half: usize, held_out: bool) -> Vec<u64> {
        let [even, odd] = &self.layers[slot];
        match (held_out, half) {
            (true, 0) => odd.by_expert.clone(),
            (true, _) => even.by_expert.clone(),
            (false, _) => even.by_expert.iter().zip(&odd.by_expert).map(|(a, b)| a + b).collect(),
        }
    }

    fn can_hold_out(&self) -> bool {
        (0..2).all(|half| self.layers.iter().any(|layer| layer[half].rows > 0))
    }
}

fn half(request: u32) -> usize {
    request as usize % 2
}

impl WindowSink for Loads {
    fn window(&mut self, plan: &Plan<'_>, window: Window<'_>) -> Result<(), AnalysisError> {
        let load = &mut self.layers[window.slot][half(window.context.request)];
        load.rows += window.rows as u64;
        for &id in &window.ids[..window.rows * plan.k] {
            let count = load.by_expert.get_mut(usize::from(id)).ok_or_else(|| outside(window.context, window.layer, plan.experts))?;
            *count += 1;
        }
        Ok(())
    }
}

/// Windows of one length under the chosen and the balanced placements.
struct Spreads<'a> {
    rows: usize,
    chosen: &'a [LayerPlacement],
    /// By half and layer.
    balanced: &'a [Vec<LayerPlacement>; 2],
    spreader: Spreader,
    layers: Vec<[SpreadCounts; 2]>,
}

impl WindowSink for Spreads<'_> {
    fn window(&mut self, plan: &Plan<'_>, window: Window<'_>) -> Result<(), AnalysisError> {
        if window.rows != self.rows {
            return Ok(());
        }
        let ids = &window.ids[..window.rows * plan.k];
        let placements = [&self.chosen[window.slot], &self.balanced[half(window.context.request)][window.slot]];
        for (placement, counts) in placements.into_iter().zip(&mut self.layers[window.slot]) {
            let added = self.spreader.add(ids, plan.k, placement, counts);
            added.ok_or_else(|| outside(window.context, window.layer, plan.experts))?;
        }
        Ok(())
    }
}

/// The windows of `rows` rows over the ranks.
///
/// # Errors
/// When the routes cannot be read, or the ranks or the placement do not fit the model.
pub fn analyze(input: &Input<'_>, plan: &Plan<'_>, rows: usize, parallel: &Parallel) -> Result<ExpertParallel, AnalysisError> {
    let model = &input.manifest.model;
    let ranks = usize::from(parallel.ranks);
    check_ranks(ranks, plan.experts)?;
    let chosen = parallel.placement.layers(model, &plan.layers, ranks)?;
    let loads = pass::fold(input.routes, plan, || Loads::new(plan), |a, b| a.merge(b))?;
    let held_out = loads.can_hold_out();
    let balanced = [0, 1].map(|half| {
        let of = |slot| LayerPlacement::balanced(&loads.of_others(slot, half, held_out), ranks);
        (0..plan.layers.len()).map(of).collect::<Vec<_>>()
    });
    let none = || Spreads {
        rows,
        chosen: &chosen,
        balanced: &balanced,
        spreader: Spreader::new(plan.experts, ranks),
        layers: vec![Default::default(); plan.layers.len()],
    };
    let spreads = pass::fold(input.routes, plan, none, |a, b| {
        for (mine, theirs) in a.layers.iter_mut().flatten().zip(b.layers.iter().flatten()) {
            mine.merge(theirs);
        }
    })?;

    let row_bytes = model.hidden_size.map(|hidden| u64::from(hidden) * VALUE_BYTES);
    let stats = |counts: &SpreadCounts| counts.stats(ranks, row_bytes, model.bytes_per_expert);
    let gain = |chosen: &ParallelStats, balanced: &ParallelStats| 1.0 - balanced.busiest_mean / chosen.busiest_mean;
    let layer = |(&layer, [chosen, balanced]): (&u16, &[SpreadCounts; 2])| {
        let (stats, balanced) = (stats(chosen), stats(balanced));
        ParallelLayer { layer, gain: stats.as_ref().zip(balanced.as_ref()).map(|(a, b)| gain(a, b)), stats, balanced }
    };
    let mut all = [SpreadCounts::default(), SpreadCounts::default()];
    spreads.layers.iter().for_each(|layer| all.iter_mut().zip(layer).for_each(|(sum, counts)| sum.merge(counts)));
    let (overall, under_balanced) = (stats(&all[0]), stats(&all[1]));
    Ok(ExpertParallel {
        ranks: u32::from(parallel.ranks),
        placement: parallel.placement.name().to_owned(),
        rows: rows as u16,
        row_bytes,
        layers: plan.layers.iter().zip(&spreads.layers).map(layer).collect(),
        balanced: overall.zip(under_balanced).map(|(chosen, stats)| Balanced { held_out, stats, gain: gain(&chosen, &stats) }),
        overall,
        assumptions: assumptions(held_out),
    })
}

fn check_ranks(ranks: usize, experts: usize) -> Result<(), AnalysisError> {
    if (1..=experts).contains(&ranks) {
        return Ok(());
    }
    let reason = format!("{ranks} ranks for {experts} experts a layer; give 1 to {experts}");
    Err(AnalysisError::Placement { origin: "ranks".to_owned(), reason })
}

fn assumptions(held_out: bool) -> Vec<String> {
    let judged = if held_out {
        "the balanced placement of each window is made of the loads of the other half of the requests"
    } else {
        "the balanced placement is judged by the windows that it was made of: its gain is an upper bound"
    };
    [
        "a window alone at batch 1, its rows on one rank, any with the same probability; results travel back in as many bytes",
        "rows are sent as 16-bit activations of the hidden size",
        "of an expert's replicas the one on the rank with the fewest experts of the window is taken",
        judged,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// A placement of a trace's layers balanced by the loads of all its verify rows, as an EPLB-style JSON text: a row for every layer of the
/// model, dense ones (and routed ones without windows) in order of the experts.
///
/// # Errors
/// When the trace cannot be read, or the ranks do not divide the experts.
pub fn balanced_file(trace: &Trace, ranks: u16) -> Result<String, AnalysisError> {
    let model = &trace.manifest().model;
    let (n, experts) = (usize::from(ranks), usize::from(model.experts));
    check_ranks(n, experts)?;
    if !experts.is_multiple_of(n) {
        let reason = format!("{n} ranks do not divide {experts} experts, so slots cannot be numbered by rank");
        return Err(AnalysisError::Placement { origin: "ranks".to_owned(), reason });
    }
    trace_source::with_plan(trace, false, |plan, routes| {
        let loads = pass::fold(routes, plan, || Loads::new(plan), |a, b| a.merge(b))?;
        let mut rows: Vec<Vec<u64>> = vec![(0..experts as u64).collect(); usize::from(model.layers)];
        for (slot, &layer) in plan.layers.iter().enumerate() {
            if let Some(row) = rows.get_mut(usize::from(layer)) {
                *row = LayerPlacement::balanced(&loads.of_others(slot, 0, false), n).slots(n);
            }
        }
        let rows: Vec<String> = rows.iter().map(|row| row.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")).collect();
        Ok(format!("{{\"physical_to_logical_map\": [\n  [{}]\n]}}\n", rows.join("],\n  [")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Wanted;
    use crate::analysis::tests::memory::Memory;

    /// Four experts, k = 2, one layer: every window of both requests wants 0 and 1, sometimes 2.
    fn trace(requests: u32) -> Memory {
        let mut trace = Memory::new(&[1], 4, 2);
        for step in 0..8u32 {
            let last = if step < 4 { vec![0, 1] } else { vec![0, 2] };
            trace.verify(step % requests, 0, &[vec![vec![0, 1], last]]);
        }
        trace
    }

    fn spread(trace: &Memory, ranks: u16, placement: Choice) -> ExpertParallel {
        let wanted = Wanted { parallel: Some(Parallel { ranks, placement }), ..Wanted::default() };
        trace.try_report_of(&wanted).unwrap().expert_parallel.unwrap()
    }

    #[test]
    fn a_balanced_placement_parts_the_two_that_are_always_wanted() {
        let report = spread(&trace(2), 2, Choice::Contiguous);
        let overall = report.overall.unwrap();
        // Contiguous: 0 and 1 on rank 0. Busiest 2 in all eight windows; unions 2 and 3.
        assert_eq!((overall.windows, overall.busiest_mean, overall.union_mean, overall.ranks_touched_mean), (8, 2.0, 2.5, 1.5));
        assert_eq!(overall.imbalance_mean, (2.0 + 4.0 / 3.0) / 2.0);
        let balanced = report.balanced.unwrap();
        // Loads 16, 12, 4, 0: 0 | 1, then 2 joins 1 and 3 joins 0. Busiest 1 and 2.
        assert!(balanced.held_out);
        assert_eq!((balanced.stats.busiest_mean, balanced.gain), (1.5, 0.25));
        assert_eq!(report.layers[0].gain, Some(0.25));
        assert_eq!((report.row_bytes, report.rows, report.placement.as_str()), (Some(128), 2, "contiguous"));
        assert!(!spread(&trace(1), 2, Choice::RoundRobin).balanced.unwrap().held_out);
    }

    #[test]
    fn ranks_must_fit() {
        for ranks in [0, 5] {
            let wanted = Wanted { parallel: Some(Parallel { ranks, placement: Choice::Contiguous }), ..Wanted::default() };
            let error = trace(1).try_report_of(&wanted).unwrap_err().to_string();
            assert!(error.contains("give 1 to 4"), "{error}");
        }
        assert_eq!(spread(&trace(2), 1, Choice::Contiguous).overall.unwrap().token_dispatch_bytes, Some(0.0));
    }
}
