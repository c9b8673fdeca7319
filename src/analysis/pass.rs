//! The pass over all units in parallel, and the sum of their counts.

use super::AnalysisError;
use super::counting::Counting;
use super::counts::{LoadCounts, RequestSums, WindowCounts};
use super::limits::Limits;
use super::source::RouteSource;
use super::step_sums::StepSums;
use super::steps::StepTable;
use super::trees::Trees;
use super::unit::UnitPass;
use super::window::WindowSink;
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};

/// Larger shapes than this (layers x experts) are taken for a broken manifest.
const MAX_CELLS: usize = 1 << 22;
const NO_SLOT: u16 = u16::MAX;

/// What the pass must know beforehand.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The steps.
    pub steps: &'a StepTable,
    /// Routed layers of the target, ascending absolute numbers. A layer's place here is its slot.
    pub layers: Vec<u16>,
    slot_of: Vec<u16>,
    /// Experts per row.
    pub k: usize,
    /// Experts per layer.
    pub experts: usize,
    /// The steps whose windows are trees, where there are any.
    pub trees: Option<&'a Trees>,
    /// Windows hold only the rows that were kept.
    pub kept_rows_only: bool,
    /// Whether each window's union is wanted, for its time.
    pub keep_unions: bool,
    /// Routed layers of the draft module.
    pub draft_layers: Vec<u16>,
    /// How much may be counted.
    pub limits: Limits,
}

impl<'a> Plan<'a> {
    /// A plan for a model of these routed layers.
    ///
    /// # Errors
    /// When the shape cannot be one of a model.
    pub fn new(steps: &'a StepTable, moe_layers: &[u16], k: u16, experts: u16, kept_rows_only: bool) -> Result<Self, AnalysisError> {
        let mut layers = moe_layers.to_vec();
        layers.sort_unstable();
        layers.dedup();
        let (k, experts) = (usize::from(k), usize::from(experts));
        if k > experts {
            return Err(AnalysisError::Shape { reason: format!("{k} experts per token of {experts}") });
        }
        if layers.len() * experts > MAX_CELLS || layers.last() == Some(&NO_SLOT) {
            return Err(AnalysisError::Shape { reason: format!("{} routed layers of {experts} experts", layers.len()) });
        }
        let mut slot_of = vec![NO_SLOT; layers.last().map_or(0, |&l| usize::from(l) + 1)];
        for (slot, &layer) in (0u16..).zip(&layers) {
            slot_of[usize::from(layer)] = slot;
        }
        Ok(Self {
            steps,
            layers,
            slot_of,
            k,
            experts,
            trees: None,
            kept_rows_only,
            keep_unions: false,
            draft_layers: Vec::new(),
            limits: Limits::default(),
        })
    }

    /// Slot of a layer.
    #[inline]
    pub fn slot(&self, layer: u16) -> Option<usize> {
        self.slot_of.get(usize::from(layer)).filter(|&&s| s != NO_SLOT).map(|&s| usize::from(s))
    }
}

/// The union of one window in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WindowUnion {
    /// Index of the step.
    pub at: u32,
    /// Slot of the layer.
    pub slot: u16,
    /// Number of distinct experts.
    pub union: u16,
}

/// A union at the border of a unit, for the reuse across it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    /// Index of the request.
    pub request: u32,
    /// Slot of the layer.
    pub slot: usize,
    /// Rows of the window (of a first window).
    pub rows: usize,
    /// Its experts, ascending.
    pub union: Box<[u16]>,
}

/// Windows that do not have the rows that their step says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Irregular {
    /// Number of windows.
    pub windows: u64,
    /// The first one: step, layer, rows found, rows expected.
    pub first: Option<(u32, u16, usize, usize)>,
}

impl Irregular {
    /// One such window.
    pub fn one(step: u32, layer: u16, found: usize, expected: usize) -> Self {
        Self { windows: 1, first: Some((step, layer, found, expected)) }
    }

    /// Adds others.
    pub fn add(&mut self, other: Self) {
        self.windows += other.windows;
        self.first = [self.first, other.first].into_iter().flatten().min();
    }
}

/// Everything that the pass counts.
#[derive(Debug, Clone, Default)]
pub struct PassCounts {
    /// By number of rows: the layers' windows, by slot.
    pub groups: Vec<(usize, Vec<Option<WindowCounts>>)>,
    /// Load by slot, over the target's verify rows.
    pub load: Vec<LoadCounts>,
    /// By (index of the request, number of rows): sums by slot.
    pub sums: Vec<((u32, usize), Vec<RequestSums>)>,
    sums_at: HashMap<(u32, usize), usize>,
    /// Numbers in `groups`.
    pub cells: usize,
    /// Load of the draft module's layers.
    pub draft: BTreeMap<u16, LoadCounts>,
    /// Load of the target's layers in prefill steps.
    pub prefill: BTreeMap<u16, LoadCounts>,
    /// What the rows of each verify step add, summed over its layers.
    pub steps: StepSums,
    /// By index of a step whose window is a tree: the experts of its accepted rows, summed over its layers. Not there where
    /// the accepted rows are not known.
    pub paths: HashMap<u32, u64>,
    /// Windows that were left out.
    pub irregular: Irregular,
    /// Every window's union, by (step, slot); empty unless the plan wants them.
    pub unions: Vec<WindowUnion>,
    /// First windows whose previous window is in an earlier unit.
    pub firsts: Vec<Edge>,
    /// Last windows of requests that continue in a later unit.
    pub lasts: Vec<Edge>,
}

impl PassCounts {
    /// Nothing, of that many layers.
    pub fn new(layers: usize) -> Self {
        Self { load: vec![LoadCounts::default(); layers], ..Self::default() }
    }

    /// Place of windows of `rows` rows.
    pub fn group(&mut self, rows: usize) -> usize {
        self.groups.iter().position(|(r, _)| *r == rows).unwrap_or_else(|| {
            self.groups.push((rows, vec![None; self.load.len()]));
            self.cells += self.load.len() * size_of::<Option<WindowCounts>>() / size_of::<u64>();
            self.groups.len() - 1
        })
    }

    /// Place of a request's sums.
    pub fn sums(&mut self, key: (u32, usize)) -> usize {
        *self.sums_at.entry(key).or_insert_with(|| {
            self.sums.push((key, vec![RequestSums::default(); self.load.len()]));
            self.sums.len() - 1
        })
    }

    /// Adds the counts of other units, edges excepted.
    pub fn merge(&mut self, other: Self) {
        for (rows, layers) in other.groups {
            let at = self.group(rows);
            for (mine, theirs) in self.groups[at].1.iter_mut().zip(layers) {
                match (mine.as_mut(), theirs) {
                    (Some(mine), Some(theirs)) => mine.merge(&theirs),
                    (None, theirs) => {
                        self.cells += theirs.as_ref().map_or(0, WindowCounts::cells);
                        *mine = theirs;
                    }
                    (Some(_), None) => {}
                }
            }
        }
        for (mine, theirs) in self.load.iter_mut().zip(&other.load) {
            mine.merge(theirs);
        }
        for (key, sums) in other.sums {
            let at = self.sums(key);
            for (mine, theirs) in self.sums[at].1.iter_mut().zip(&sums) {
                mine.merge(theirs);
            }
        }
        for (layer, load) in other.draft {
            self.draft.entry(layer).or_default().merge(&load);
        }
        for (layer, load) in other.prefill {
            self.prefill.entry(layer).or_default().merge(&load);
        }
        self.steps.append(other.steps);
        other.paths.into_iter().for_each(|(at, kept)| *self.paths.entry(at).or_default() += kept);
        self.irregular.add(other.irregular);
        self.unions.extend(other.unions);
    }

    /// Gives steps and requests other places: `step` and `request` are of indices, `step_id` is of the steps' ids.
    pub fn renumber(&mut self, step: impl Fn(u32) -> u32, step_id: impl Fn(u32) -> u32, request: impl Fn(u32) -> u32) {
        self.sums.iter_mut().for_each(|((at, _), _)| *at = request(*at));
        self.sums_at.clear();
        self.steps.renumber(&step);
        self.paths = std::mem::take(&mut self.paths).into_iter().map(|(at, kept)| (step(at), kept)).collect();
        self.unions.iter_mut().for_each(|union| union.at = step(union.at));
        if let Some((id, ..)) = &mut self.irregular.first {
            *id = step_id(*id);
        }
    }

    /// Forgets the pairs of windows of these numbers of rows.
    pub fn drop_pairs(&mut self, without_pairs: &[u16]) {
        let dropped = self.groups.iter_mut().filter(|(rows, _)| without_pairs.iter().any(|&r| usize::from(r) == *rows));
        for counts in dropped.flat_map(|(_, slots)| slots.iter_mut().flatten()) {
            counts.pair_hist = Vec::new();
            if let Some(trees) = &mut counts.trees {
                (trees.by_rows, trees.by_ancestors) = (Vec::new(), Vec::new());
            }
        }
    }

    /// Puts everything into an order that does not depend on threads.
    pub fn sort(&mut self) {
        self.groups.sort_by_key(|(rows, _)| *rows);
        self.sums.sort_by_key(|(key, _)| *key);
        self.unions.sort_unstable();
        self.sums_at.clear();
        self.steps.sort();
    }
}

/// Hands each first window with the experts that it shares with the one before, in an earlier unit, to `reuse`. The units' first and last
/// windows come in order.
pub fn stitch(edges: Vec<(Vec<Edge>, Vec<Edge>)>, mut reuse: impl FnMut(&Edge, usize)) {
    let mut last: HashMap<(u32, usize), Box<[u16]>> = HashMap::new();
    for (firsts, lasts) in edges {
        for first in firsts {
            if let Some(before) = last.get(&(first.request, first.slot)) {
                reuse(&first, shared(&first.union, before));
            }
        }
        last.extend(lasts.into_iter().map(|edge| ((edge.request, edge.slot), edge.union)));
    }
}

/// Number of common entries of two ascending lists.
fn shared(a: &[u16], b: &[u16]) -> usize {
    a.iter().filter(|id| b.binary_search(id).is_ok()).count()
}

/// Reads all units, on as many threads as rayon has.
///
/// # Errors
/// The first error of any unit.
pub fn run(source: &dyn RouteSource, plan: &Plan<'_>) -> Result<PassCounts, AnalysisError> {
    type Partial = (PassCounts, Vec<(usize, (Vec<Edge>, Vec<Edge>))>);
    let nothing = || -> Partial { (PassCounts::new(plan.layers.len()), Vec::new()) };
    let unit = |(mut sum, mut edges): Partial, at: usize| -> Result<Partial, AnalysisError> {
        let mut pass = UnitPass::new(plan, Counting::new(plan));
        source.read(at, &mut |slice| pass.feed(slice))?;
        let (counting, last) = pass.finish()?;
        let mut counts = counting.finish(plan, last);
        edges.push((at, (std::mem::take(&mut counts.firsts), std::mem::take(&mut counts.lasts))));
        sum.merge(counts);
        plan.limits.check(&sum)?;
        Ok((sum, edges))
    };
    let both = |(mut a, mut a_edges): Partial, (b, b_edges): Partial| -> Result<Partial, AnalysisError> {
        a.merge(b);
        plan.limits.check(&a)?;
        a_edges.extend(b_edges);
        Ok((a, a_edges))
    };
    // Unit by unit: a thread that took several at once would still be busy when the others have no work left.
    let units = (0..source.units()).into_par_iter().with_max_len(1);
    let (mut counts, mut edges) = units.try_fold(nothing, unit).try_reduce(nothing, both)?;
    edges.sort_by_key(|(at, _)| *at);
    stitch(edges.into_iter().map(|(_, edge)| edge).collect(), |first, shared| {
        let at = counts.group(first.rows);
        if let Some(Some(counts)) = counts.groups[at].1.get_mut(first.slot) {
            counts.add_reuse(first.union.len(), shared);
        }
    });
    counts.sort();
    Ok(counts)
}

/// Reads all units with a sink each, and merges the sinks. `merge` must not depend on the order.
///
/// # Errors
/// The first error of any unit.
pub fn fold<S: WindowSink + Send>(
    source: &dyn RouteSource,
    plan: &Plan<'_>,
    make: impl Fn() -> S + Sync + Send,
    merge: impl Fn(&mut S, S) + Sync + Send,
) -> Result<S, AnalysisError> {
    let unit = |sink: S, at: usize| -> Result<S, AnalysisError> {
        let mut pass = UnitPass::new(plan, sink);
        source.read(at, &mut |slice| pass.feed(slice))?;
        Ok(pass.finish()?.0)
    };
    let both = |mut a: S, b: S| -> Result<S, AnalysisError> {
        merge(&mut a, b);
        Ok(a)
    };
    (0..source.units()).into_par_iter().try_fold(&make, unit).try_reduce(&make, both)
}
