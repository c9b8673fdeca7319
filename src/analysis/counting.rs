//! Windows to counts: the sink of the report's pass.

use super::AnalysisError;
use super::counts::{COVERAGE_ONE, LoadCounts, MAX_PAIR_ROWS, RequestSums, add};
use super::coverage::Coverage;
use super::layer_state::{Added, LayerState, NO_STAMP};
use super::overlap::{Overlaps, pairs};
use super::pass::{Edge, Irregular, PassCounts, Plan, WindowUnion};
use super::unit::{Context, Window, WindowSink, outside, unlisted};

/// Counts the windows of one unit.
pub struct Counting {
    overlaps: Overlaps,
    layers: Vec<Option<LayerState>>,
    out: PassCounts,
    /// What each row of the window adds.
    added: Vec<u64>,
    /// Overlaps of the window's pairs.
    pairs: Vec<u16>,
    /// Place of the current request's sums, by (request, rows).
    sums_of: Option<((u32, usize), usize)>,
    /// Place of the current number of rows in `out.groups`.
    group_of: Option<(usize, usize)>,
    coverage: Coverage,
}

impl Counting {
    /// Nothing counted yet.
    pub fn new(plan: &Plan<'_>) -> Self {
        Self {
            overlaps: Overlaps::detect(plan.k),
            layers: vec![None; plan.layers.len()],
            out: PassCounts::new(plan.layers.len()),
            added: Vec::new(),
            pairs: Vec::new(),
            sums_of: None,
            group_of: None,
            coverage: Coverage::new(plan.experts),
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
        self.out
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
        let Window { context, layer, slot, rows, accepted, ids, weights } = window;
        let k = plan.k;
        let stamp = context.at as u32 + 1;
        let requests = plan.steps.requests.as_slice();
        let last_of = |r: u32| requests.get(r as usize).map_or(0, |s| s.last_verify as usize);

        let group = match self.group_of {
            Some((n, at)) if n == rows => at,
            _ => self.out.group(rows),
        };
        self.group_of = Some((rows, group));
        let place = &mut self.out.groups[group].1[slot];
        if place.is_none() {
            let counts = plan.limits.window_counts(plan, rows);
            // A coverage curve has a point for every slot, each of two numbers.
            let coverage = if weights.is_empty() || rows > MAX_PAIR_ROWS { 0 } else { 2 * rows * k };
            self.out.cells += counts.cells() + coverage;
            *place = Some(counts);
            plan.limits.check(&self.out)?;
        }
        let counts = self.out.groups[group].1[slot].get_or_insert_with(|| plan.limits.window_counts(plan, rows));
        let state = self.layers[slot].get_or_insert_with(|| LayerState::new(plan.experts));
        let before = state.enter(context.request, |r| last_of(r) > context.at);
        plan.limits.check_waiting(state.waiting_ids(), plan.layers.len())?;
        self.added.clear();
        self.added.resize(rows, 0);
        let added = Added { marginal: &mut self.added, wasted: &mut counts.wasted_by_row };
        let touched = match k {
            8 => state.window::<8>(&ids[..rows * 8], 8, accepted, stamp, added),
            _ => state.window::<0>(&ids[..rows * k], k, accepted, stamp, added),
        };
        let touched = touched.ok_or_else(|| outside(context, layer, plan.experts))?;
        let union = touched.union as usize;

        if plan.keep_unions {
            self.out.unions.push(WindowUnion { at: context.at as u32, slot: slot as u16, union: touched.union as u16 });
        }
        counts.windows += 1;
        add(&mut counts.marginal, &self.added);
        if let Some(n) = counts.union_hist.get_mut(union) {
            *n += 1;
        }
        counts.kept_experts += u64::from(touched.kept);
        counts.kept_rows += accepted as u64 + 1;
        counts.wasted += u64::from(touched.union - touched.kept);
        counts.rejected_rows += (rows - 1 - accepted) as u64;
        if before != NO_STAMP {
            counts.add_reuse(union, touched.shared as usize);
        } else if requests.get(context.request as usize).is_some_and(|s| (s.first_verify as usize) < context.first) {
            // Its previous window is in an earlier unit.
            self.out.firsts.push(Edge { request: context.request, slot, rows, union: state.last_union() });
        }
        if !counts.pair_hist.is_empty() {
            self.pairs.resize(pairs(rows), 0);
            self.overlaps.count(ids, k, rows, &mut self.pairs);
            for (hist, &o) in counts.pair_hist.chunks_exact_mut(k + 1).zip(&self.pairs) {
                hist[usize::from(o).min(k)] += 1;
            }
        }
        if weights.len() >= rows * k && rows <= MAX_PAIR_ROWS {
            self.coverage.add(&ids[..rows * k], &weights[..rows * k], counts, COVERAGE_ONE);
        }
        self.out.steps.add(context.at as u32, &self.added);

        let key = (context.request, rows);
        let sums = match self.sums_of {
            Some((of, at)) if of == key => at,
            _ => {
                let at = self.out.sums(key);
                plan.limits.check(&self.out)?;
                at
            }
        };
        self.sums_of = Some((key, sums));
        if let Some(s) = self.out.sums[sums].1.get_mut(slot) {
            s.merge(&RequestSums { windows: 1, union: u64::from(touched.union), wasted: u64::from(touched.union - touched.kept) });
        }
        Ok(())
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
