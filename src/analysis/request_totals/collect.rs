//! The pass over all units that makes the sums.

use super::gradients::{GRADIENTS, Gradients};
use super::layout::{Kept, Layout};
use crate::analysis::AnalysisError;
use crate::analysis::coverage::Coverage;
use crate::analysis::layer_state::{LayerState, NO_STAMP};
use crate::analysis::overlap::Overlaps;
use crate::analysis::pass::{Edge, Plan, stitch};
use crate::analysis::source::RouteSource;
use crate::analysis::trees::Shape;
use crate::analysis::unit::UnitPass;
use crate::analysis::window::{Window, WindowSink, outside};
use rayon::prelude::*;
use std::collections::HashMap;

/// By index of the request: `[scopes][width]` sums.
type Sums = HashMap<u32, Box<[i64]>>;
/// First and last windows of a unit.
type Edges = (Vec<Edge>, Vec<Edge>);

/// Sums the windows of one unit.
struct Collect<'a> {
    layout: &'a Layout,
    gradients: &'a Gradients,
    scopes: usize,
    overlaps: Overlaps,
    layers: Vec<Option<LayerState>>,
    sums: Sums,
    firsts: Vec<Edge>,
    added: Vec<u64>,
    pairs: Vec<u16>,
    /// Experts of a tree's kept rows.
    kept: Vec<u16>,
    coverage: Coverage,
}

impl<'a> Collect<'a> {
    fn new(plan: &Plan<'_>, layout: &'a Layout, gradients: &'a Gradients, scopes: usize) -> Self {
        Self {
            layout,
            gradients,
            scopes,
            overlaps: Overlaps::detect(plan.k),
            layers: vec![None; plan.layers.len()],
            sums: Sums::new(),
            firsts: Vec::new(),
            added: Vec::new(),
            pairs: vec![0; layout.pairs()],
            kept: Vec::new(),
            coverage: Coverage::new(plan.experts),
        }
    }

    /// The sums and the unit's edges; `last` is the index of its last step.
    fn finish(self, plan: &Plan<'_>, last: usize) -> (Sums, Edges) {
        let requests = &plan.steps.requests;
        let continues = |r: u32| requests.get(r as usize).is_some_and(|s| s.last_verify as usize > last);
        let open = |(slot, state): (usize, &Option<LayerState>)| {
            let ends = state.as_ref().map(|state| state.open_ends(continues)).unwrap_or_default();
            ends.into_iter().map(move |(request, union)| Edge { request, slot, rows: 0, union })
        };
        let lasts = self.layers.iter().enumerate().flat_map(open).collect();
        (self.sums, (self.firsts, lasts))
    }
}

/// The accepted rows of a tree of rows of `k` experts, where they are known.
fn kept_of_tree(shape: &Shape, ids: &[u16], k: usize, experts: &mut Vec<u16>) -> Option<Kept> {
    let path = shape.path()?;
    experts.clear();
    for &row in path {
        let first = usize::from(row) * k;
        experts.extend_from_slice(ids.get(first..first + k).unwrap_or_default());
    }
    experts.sort_unstable();
    experts.dedup();
    Some(Kept { rows: path.len(), experts: experts.len() as u64 })
}

/// The sums of one request in one scope.
fn cells<'s>(sums: &'s mut Sums, layout: &Layout, scopes: usize, request: u32, slot: usize) -> &'s mut [i64] {
    let width = layout.width();
    let all = sums.entry(request).or_insert_with(|| vec![0; scopes * width].into());
    let at = if scopes == 1 { 0 } else { slot * width };
    all.get_mut(at..at + width).unwrap_or_default()
}

impl WindowSink for Collect<'_> {
    fn window(&mut self, plan: &Plan<'_>, window: Window<'_>) -> Result<(), AnalysisError> {
        let Window { context, layer, slot, rows, accepted, ids, weights } = window;
        let (k, layout) = (plan.k, self.layout);
        let state = self.layers[slot].get_or_insert_with(|| LayerState::new(plan.experts));
        let requests = plan.steps.requests.as_slice();
        if state.owner() != context.request {
            state.enter(context.request, |r| requests.get(r as usize).is_some_and(|s| s.last_verify as usize > context.at));
            plan.limits.check_waiting(state.waiting_ids(), plan.layers.len())?;
        }
        let before = state.stamp();
        self.added.resize(rows, 0);
        let shared = state.window(&ids[..rows * k], k, context.at as u32 + 1, Some(&mut self.added));
        let shared = shared.ok_or_else(|| outside(context, layer, plan.experts))?;
        let cells = cells(&mut self.sums, layout, self.scopes, context.request, slot);
        let mut moved = [0i64; GRADIENTS];
        for gradient in ids[..rows * k].iter().filter_map(|&id| self.gradients.get(slot, id)) {
            moved.iter_mut().zip(gradient).for_each(|(sum, &g)| *sum = sum.saturating_add(g));
        }
        Layout::add_gradients(cells, &moved);
        if rows != layout.rows {
            return Ok(());
        }
        let tree = plan.trees.and_then(|trees| trees.get(context.at)).filter(|shape| shape.rows() == rows);
        let kept = match tree {
            None => Some(Kept::of_chain(&self.added, accepted)),
            Some(shape) => kept_of_tree(shape, ids, k, &mut self.kept),
        };
        layout.add_window(cells, &self.added, kept);
        if before != NO_STAMP {
            Layout::add_reuse(cells, self.added.iter().sum::<u64>() as usize, shared as usize);
        } else if requests.get(context.request as usize).is_some_and(|s| (s.first_verify as usize) < context.first) {
            self.firsts.push(Edge { request: context.request, slot, rows, union: state.last_union() });
        }
        if layout.pairs {
            self.overlaps.count(ids, k, rows, &mut self.pairs);
            layout.add_pairs(cells, &self.pairs, tree);
        }
        if layout.coverage > 0
            && weights.len() >= rows * k
            && let Some(curve) = self.coverage.curve(&ids[..rows * k], &weights[..rows * k])
        {
            layout.add_coverage(cells, curve);
        }
        Ok(())
    }
}

fn merge(into: &mut Sums, other: Sums) {
    for (request, cells) in other {
        match into.get_mut(&request) {
            Some(mine) => mine.iter_mut().zip(&cells).for_each(|(a, b)| *a = a.saturating_add(*b)),
            None => {
                into.insert(request, cells);
            }
        }
    }
}

/// Reads all units. Gives `[requests]` of `[scopes][width]` sums: a scope for every layer, or one for all of them.
///
/// # Errors
/// The first error of any unit.
pub(super) fn run(
    source: &dyn RouteSource,
    plan: &Plan<'_>,
    layout: &Layout,
    gradients: &Gradients,
    scopes: usize,
) -> Result<Vec<Option<Box<[i64]>>>, AnalysisError> {
    type Partial = (Sums, Vec<(usize, Edges)>);
    let unit = |(mut sums, mut edges): Partial, at: usize| -> Result<Partial, AnalysisError> {
        let mut pass = UnitPass::new(plan, Collect::new(plan, layout, gradients, scopes));
        source.read(at, &mut |slice| pass.feed(slice))?;
        let (collect, last) = pass.finish()?;
        let (found, edge) = collect.finish(plan, last);
        merge(&mut sums, found);
        edges.push((at, edge));
        Ok((sums, edges))
    };
    let both = |(mut a, mut a_edges): Partial, (b, b_edges): Partial| -> Result<Partial, AnalysisError> {
        merge(&mut a, b);
        a_edges.extend(b_edges);
        Ok((a, a_edges))
    };
    let (mut sums, mut edges) = (0..source.units()).into_par_iter().try_fold(Partial::default, unit).try_reduce(Partial::default, both)?;
    edges.sort_by_key(|(at, _)| *at);
    stitch(edges.into_iter().map(|(_, edge)| edge).collect(), |first, shared| {
        Layout::add_reuse(cells(&mut sums, layout, scopes, first.request, first.slot), first.union.len(), shared);
    });
    Ok((0u32..).zip(&plan.steps.requests).map(|(at, _)| sums.remove(&at)).collect())
}
