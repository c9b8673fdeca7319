//! Windows to counts: the sink of the report's pass.

use super::AnalysisError;
use super::counts::{COVERAGE_ONE, LoadCounts, RequestSums, WindowCounts};
use super::coverage::Coverage;
use super::layer_state::{LayerState, NO_STAMP};
use super::overlap::{self, MAX_PAIR_ROWS, Overlaps, pairs};
use super::pass::{Edge, Irregular, PassCounts, Plan, WindowUnion};
use super::step_sums::StepAdder;
use super::tree_counts::{Tree, TreeCounter, TreeCounts};
use super::trees::Shape;
use super::window::{Context, Window, WindowSink, outside, unlisted};

/// Counts the windows of one unit.
pub struct Counting {
    overlaps: Overlaps,
    layers: Vec<Option<LayerState>>,
    out: PassCounts,
    steps: StepAdder,
    /// What each row of the window adds.
    added: Vec<u64>,
    /// Overlaps of the window's pairs.
    pairs: Vec<u16>,
    /// Place of the current request's sums, by (request, rows).
    sums_of: Option<((u32, usize), usize)>,
    coverage: Coverage,
    trees: Option<TreeCounter>,
}

impl Counting {
    /// Nothing counted yet.
    pub fn new(plan: &Plan<'_>) -> Self {
        Self {
            overlaps: Overlaps::detect(plan.k),
            layers: vec![None; plan.layers.len()],
            out: PassCounts::new(plan.layers.len()),
            steps: StepAdder::default(),
            added: Vec::new(),
            pairs: Vec::new(),
            sums_of: None,
            coverage: Coverage::new(plan.experts),
            trees: plan.trees.map(|_| TreeCounter::new(plan.experts)),
        }
    }

    /// The counts; `last` is the index of the unit's last step.
    pub fn finish(mut self, plan: &Plan<'_>, last: usize) -> PassCounts {
        let requests = &plan.steps.requests;
        for (slot, state) in self.layers.iter().enumerate() {
            let Some(state) = state else { continue };
            self.out.load[slot] = state.load();
            let open = state.open_ends(|r| requests.get(r as usize).is_some_and(|s| s.last_verify as usize > last));
            self.out.lasts.extend(open.into_iter().map(|(request, union)| Edge { request, slot, rows: 0, union }));
        }
        self.out.steps = self.steps.finish();
        self.out
    }
}

/// What the windows of one layer and length are counted into, taken out of its places meanwhile.
struct Held {
    slot: usize,
    rows: usize,
    group: usize,
    counts: WindowCounts,
    state: LayerState,
}

impl Counting {
    /// Takes out what windows like this one are counted into.
    fn hold(&mut self, plan: &Plan<'_>, window: &Window<'_>) -> Result<Held, AnalysisError> {
        let (slot, rows) = (window.slot, window.rows);
        let group = self.out.group(rows);
        let counts = match self.out.groups[group].1[slot].take() {
            Some(counts) => counts,
            None => {
                let counts = plan.limits.window_counts(plan, rows);
                // A coverage curve has a point for every slot, each of two numbers.
                let coverage = if window.weights.is_empty() || rows > MAX_PAIR_ROWS { 0 } else { 2 * rows * plan.k };
                self.out.cells += counts.cells() + coverage;
                plan.limits.check(&self.out)?;
                counts
            }
        };
        let state = self.layers[slot].take().unwrap_or_else(|| LayerState::new(plan.experts));
        Ok(Held { slot, rows, group, counts, state })
    }

    fn put_back(&mut self, held: Held) {
        self.out.groups[held.group].1[held.slot] = Some(held.counts);
        self.layers[held.slot] = Some(held.state);
    }

    /// [`Counting::count_all`] with the vector instructions that were detected.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,popcnt,bmi1")]
    fn count_with_vectors<'w>(&mut self, plan: &Plan<'_>, windows: impl Iterator<Item = Window<'w>>) -> Result<(), AnalysisError> {
        self.count_all(plan, windows, |ids, rows, hist, added| !hist.is_empty() && overlap::add_window(ids, rows, hist, added))
    }

    /// Counts windows. `add_window` may take on their pairs and what their rows add, see [`overlap::add_window`].
    #[inline(always)]
    fn count_all<'w>(
        &mut self,
        plan: &Plan<'_>,
        windows: impl Iterator<Item = Window<'w>>,
        add_window: impl Fn(&[u16], usize, &mut [u64], &mut [u64]) -> bool,
    ) -> Result<(), AnalysisError> {
        let mut held: Option<Held> = None;
        for window in windows {
            let like = |held: &Held| held.slot == window.slot && held.rows == window.rows;
            if !held.as_ref().is_some_and(like) {
                if let Some(before) = held.take() {
                    self.put_back(before);
                }
                held = Some(self.hold(plan, &window)?);
            }
            if let Some(Held { counts, state, .. }) = &mut held {
                self.count(plan, window, counts, state, &add_window)?;
            }
        }
        if let Some(last) = held {
            self.put_back(last);
        }
        Ok(())
    }

    /// Counts a window into its layer's counts of its length.
    #[inline(always)]
    fn count(
        &mut self,
        plan: &Plan<'_>,
        window: Window<'_>,
        counts: &mut WindowCounts,
        state: &mut LayerState,
        add_window: &impl Fn(&[u16], usize, &mut [u64], &mut [u64]) -> bool,
    ) -> Result<(), AnalysisError> {
        let Window { context, layer, slot, rows, accepted, ids, weights } = window;
        let k = plan.k;
        let stamp = context.at as u32 + 1;
        let requests = plan.steps.requests.as_slice();
        if state.owner() != context.request {
            let last_of = |r: u32| requests.get(r as usize).map_or(0, |s| s.last_verify as usize);
            state.enter(context.request, |r| last_of(r) > context.at);
            plan.limits.check_waiting(state.waiting_ids(), plan.layers.len())?;
        }
        let before = state.stamp();
        self.added.resize(rows, 0);
        let known = add_window(ids, rows, &mut counts.pair_hist, &mut self.added);
        let shared = state.window(&ids[..rows * k], k, stamp, if known { None } else { Some(&mut self.added) });
        let shared = shared.ok_or_else(|| outside(context, layer, plan.experts))?;

        let tree = plan.trees.and_then(|trees| trees.get(context.at)).filter(|shape| shape.rows() == rows);
        let (union, kept) = match tree {
            None => counts.add_chain(&self.added, accepted),
            Some(shape) => self.count_tree(plan, shape, context.at, ids, counts)?,
        };
        if plan.keep_unions {
            self.out.unions.push(WindowUnion { at: context.at as u32, slot: slot as u16, union: union as u16 });
        }
        counts.windows += 1;
        if let Some(n) = counts.union_hist.get_mut(union as usize) {
            *n += 1;
        }
        if before != NO_STAMP {
            counts.add_reuse(union as usize, shared as usize);
        } else if requests.get(context.request as usize).is_some_and(|s| (s.first_verify as usize) < context.first) {
            // Its previous window is in an earlier unit.
            self.out.firsts.push(Edge { request: context.request, slot, rows, union: state.last_union() });
        }
        if !known && !counts.pair_hist.is_empty() {
            self.pairs.resize(pairs(rows), 0);
            self.overlaps.count(ids, k, rows, &mut self.pairs);
            for (hist, &o) in counts.pair_hist.chunks_exact_mut(k + 1).zip(&self.pairs) {
                hist[usize::from(o).min(k)] += 1;
            }
        }
        if weights.len() >= rows * k && rows <= MAX_PAIR_ROWS {
            self.coverage.add(&ids[..rows * k], &weights[..rows * k], counts, COVERAGE_ONE);
        }
        self.steps.add(context.first, context.at as u32, &self.added);

        let key = (context.request, rows);
        let sums = match self.sums_of {
            Some((of, at)) if of == key => at,
            _ => {
                let at = self.out.sums(key);
                plan.limits.check(&self.out)?;
                self.sums_of = Some((key, at));
                at
            }
        };
        if let Some(s) = self.out.sums[sums].1.get_mut(slot) {
            s.merge(&RequestSums { windows: 1, union, wasted: union - kept });
        }
        Ok(())
    }
}

impl Counting {
    /// Counts a window that is a tree; gives its union, and that of its accepted rows, which is the union where those are not
    /// known.
    #[cold]
    #[inline(never)]
    fn count_tree(
        &mut self,
        plan: &Plan<'_>,
        shape: &Shape,
        at: usize,
        ids: &[u16],
        counts: &mut WindowCounts,
    ) -> Result<(u64, u64), AnalysisError> {
        let rows = shape.rows();
        if counts.trees.is_none() {
            self.out.cells += TreeCounts::cells(rows, plan.k);
            plan.limits.check(&self.out)?;
        }
        let pairs = if counts.pair_hist.is_empty() { 0 } else { pairs(rows) };
        self.pairs.resize(pairs, 0);
        if pairs > 0 {
            self.overlaps.count(ids, plan.k, rows, &mut self.pairs);
        }
        let counter = self.trees.get_or_insert_with(|| TreeCounter::new(plan.experts));
        let tree = Tree { shape, ids, added: &self.added, pairs: &self.pairs };
        let (union, kept) = counter.add(tree, counts);
        if let Some(kept) = kept {
            *self.out.paths.entry(at as u32).or_default() += kept;
        }
        Ok((union, kept.unwrap_or(union)))
    }
}

/// Adds a row to a load; `None` when an id is not an expert.
fn add_row(load: &mut LoadCounts, ids: &[u16], experts: usize) -> Option<()> {
    load.by_expert.resize(experts, 0);
    load.rows += 1;
    ids.iter().try_for_each(|&id| load.by_expert.get_mut(usize::from(id)).map(|count| *count += 1))
}

impl WindowSink for Counting {
    fn window(&mut self, plan: &Plan<'_>, window: Window<'_>) -> Result<(), AnalysisError> {
        self.windows(plan, std::iter::once(window))
    }

    fn windows<'w>(&mut self, plan: &Plan<'_>, windows: impl Iterator<Item = Window<'w>>) -> Result<(), AnalysisError> {
        #[cfg(target_arch = "x86_64")]
        if let Overlaps::Avx2(_) = self.overlaps {
            // SAFETY: the value is the proof that the CPU has the features.
            return unsafe { self.count_with_vectors(plan, windows) };
        }
        self.count_all(plan, windows, |_, _, _, _| false)
    }

    fn draft_row(&mut self, plan: &Plan<'_>, context: Context, layer: u16, ids: &[u16]) -> Result<(), AnalysisError> {
        if plan.draft_layers.binary_search(&layer).is_err() {
            let reason = "the manifest does not list it as a routed layer of the drafter".into();
            return Err(AnalysisError::Routes { step: context.step_id, layer, reason });
        }
        let load = self.out.draft.entry(layer).or_default();
        add_row(load, ids, plan.experts).ok_or_else(|| outside(context, layer, plan.experts))
    }

    fn prefill_row(&mut self, plan: &Plan<'_>, context: Context, layer: u16, ids: &[u16]) -> Result<(), AnalysisError> {
        if plan.slot(layer).is_none() {
            return Err(unlisted(context, layer));
        }
        let load = self.out.prefill.entry(layer).or_default();
        add_row(load, ids, plan.experts).ok_or_else(|| outside(context, layer, plan.experts))
    }

    fn wants_prefill(&self) -> bool {
        true
    }

    fn irregular(&mut self, irregular: Irregular) {
        self.out.irregular.add(irregular);
    }
}
