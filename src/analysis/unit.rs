//! The pass over one unit: rows to windows, windows to counts.

use super::AnalysisError;
use super::counts::{COVERAGE_ONE, LoadCounts, MAX_PAIR_ROWS, RequestSums, WindowCounts};
use super::coverage::Coverage;
use super::layer_state::{LayerState, NO_STAMP};
use super::overlap::{Overlaps, PADDING, pairs};
use super::pass::{Edge, Irregular, PassCounts, Plan};
use super::source::RouteSlice;
use super::transpose::{id_rows, rows_of};

/// Where the rows of a step go.
#[derive(Debug, Clone, Copy)]
struct Context {
    step_id: u32,
    /// Index of the step.
    at: usize,
    request: u32,
    verify: bool,
    rows: usize,
    accepted: usize,
}

/// Rows of a window that may go on in the next slice.
#[derive(Debug, Default)]
struct Pending {
    step_id: u32,
    layer: u16,
    row: Vec<u16>,
    draft: Vec<bool>,
    ids: Vec<u16>,
    weights: Vec<f32>,
}

/// One unit's pass. Feed it slices in order, then take the counts.
pub struct UnitPass<'a> {
    plan: &'a Plan<'a>,
    overlaps: Overlaps,
    layers: Vec<Option<LayerState>>,
    out: PassCounts,
    context: Option<Context>,
    /// Index of the unit's first step.
    first_step: usize,
    pending: Pending,
    has_pending: bool,
    /// Row-major ids and weights of the slice, `PADDING` ids behind them.
    ids: Vec<u16>,
    weights: Vec<f32>,
    /// Overlaps of the window's pairs.
    pairs: Vec<u16>,
    /// Place of the current request's sums, by (request, rows).
    sums_of: Option<((u32, usize), usize)>,
    /// Place of the current number of rows in `out.groups`.
    group_of: Option<(usize, usize)>,
    coverage: Coverage,
}

impl<'a> UnitPass<'a> {
    /// A pass that has seen nothing.
    pub fn new(plan: &'a Plan<'a>) -> Self {
        Self {
            plan,
            overlaps: Overlaps::detect(plan.k),
            layers: vec![None; plan.layers.len()],
            out: PassCounts::new(plan.layers.len()),
            context: None,
            first_step: 0,
            pending: Pending::default(),
            has_pending: false,
            ids: Vec::new(),
            weights: Vec::new(),
            pairs: Vec::new(),
            sums_of: None,
            group_of: None,
            coverage: Coverage::new(plan.experts),
        }
    }

    /// Takes the next rows.
    ///
    /// # Errors
    /// When a row refers to a step, layer or expert that the trace does not have.
    pub fn feed(&mut self, slice: RouteSlice<'_>) -> Result<(), AnalysisError> {
        if !slice.is_rectangular() || slice.ids.len() != self.plan.k || !(slice.weights.is_empty() || slice.weights.len() == self.plan.k) {
            let reason = format!("{} id columns where the manifest says {} experts per token", slice.ids.len(), self.plan.k);
            return Err(AnalysisError::Routes { step: slice.step_id.first().copied().unwrap_or(0), layer: 0, reason });
        }
        let (n, k) = (slice.len(), self.plan.k);
        let mut ids = std::mem::take(&mut self.ids);
        let mut weights = std::mem::take(&mut self.weights);
        ids.resize(n * k + PADDING, 0);
        id_rows(slice.ids, &mut ids[..n * k]);
        weights.resize(if slice.weights.is_empty() { 0 } else { n * k }, 0.0);
        rows_of(slice.weights, &mut weights);
        let done = self.runs(&slice, &ids, &weights);
        self.ids = ids;
        self.weights = weights;
        done
    }

    /// Cuts a slice into runs of one step and layer. The last run may go on, so it waits.
    fn runs(&mut self, slice: &RouteSlice<'_>, ids: &[u16], weights: &[f32]) -> Result<(), AnalysisError> {
        let (n, k) = (slice.len(), self.plan.k);
        let mut a = 0;
        while a < n {
            let (step_id, layer) = (slice.step_id[a], slice.layer[a]);
            let goes_on = self.has_pending && self.pending.step_id == step_id && self.pending.layer == layer;
            if self.has_pending && !goes_on {
                self.finish_pending()?;
            }
            let context = self.context(step_id, layer)?;
            let same = |i: usize| slice.step_id[i] == step_id && slice.layer[i] == layer;
            // Rows are in order: a run of the expected length is known by its last row and the one behind it.
            let expected = a + context.rows;
            let b = if context.rows > 0 && expected < n && same(expected - 1) && !same(expected) {
                expected
            } else {
                (a + 1..n).find(|&i| !same(i)).unwrap_or(n)
            };
            if context.verify {
                let w = if weights.is_empty() { &[][..] } else { &weights[a * k..b * k] };
                if goes_on || b == n {
                    self.wait(step_id, layer, slice, a..b, &ids[a * k..b * k], w)?;
                } else {
                    self.run(context, layer, &slice.row[a..b], &slice.draft[a..b], &ids[a * k..b * k + PADDING], w)?;
                }
            }
            a = b;
        }
        Ok(())
    }

    fn context(&mut self, step_id: u32, layer: u16) -> Result<Context, AnalysisError> {
        if let Some(context) = self.context.filter(|c| c.step_id == step_id) {
            return Ok(context);
        }
        let steps = &self.plan.steps.steps;
        let found = self.plan.steps.find(step_id, self.context.map_or(0, |c| c.at));
        let Some((at, step)) = found.and_then(|at| steps.get(at).map(|s| (at, s))) else {
            return Err(AnalysisError::Routes { step: step_id, layer, reason: "the step is not in `steps`".into() });
        };
        if let Some(before) = self.context.filter(|c| c.at >= at) {
            let reason = format!("comes after step {}; rows must be in order", before.step_id);
            return Err(AnalysisError::Routes { step: step_id, layer, reason });
        }
        if self.context.is_none() {
            self.first_step = at;
        }
        let (rows, accepted) = (usize::from(step.rows), usize::from(step.accepted));
        let context = Context { step_id, at, request: step.request, verify: step.verify, rows, accepted };
        self.context = Some(context);
        Ok(context)
    }

    fn wait(
        &mut self,
        step_id: u32,
        layer: u16,
        slice: &RouteSlice<'_>,
        run: std::ops::Range<usize>,
        ids: &[u16],
        weights: &[f32],
    ) -> Result<(), AnalysisError> {
        let pending = &mut self.pending;
        if !self.has_pending {
            *pending = Pending { step_id, layer, ..Pending::default() };
            self.has_pending = true;
        }
        // Target and draft rows of one layer number: more than this is not a window of u16 rows.
        if pending.row.len() + run.len() > 2 * usize::from(u16::MAX) {
            return Err(AnalysisError::Routes { step: step_id, layer, reason: "more rows than a window can have".into() });
        }
        pending.row.extend_from_slice(&slice.row[run.clone()]);
        pending.draft.extend_from_slice(&slice.draft[run]);
        pending.ids.extend_from_slice(ids);
        pending.weights.extend_from_slice(weights);
        Ok(())
    }

    fn finish_pending(&mut self) -> Result<(), AnalysisError> {
        if !std::mem::take(&mut self.has_pending) {
            return Ok(());
        }
        let mut p = std::mem::take(&mut self.pending);
        p.ids.extend_from_slice(&[0; PADDING]);
        let context = self.context.filter(|c| c.step_id == p.step_id);
        let context = match context {
            Some(context) => context,
            None => self.context(p.step_id, p.layer)?,
        };
        self.run(context, p.layer, &p.row, &p.draft, &p.ids, &p.weights)
    }

    /// All rows of one verify step in one layer number: the target's, the draft module's, or both.
    fn run(
        &mut self,
        context: Context,
        layer: u16,
        row: &[u16],
        draft: &[bool],
        ids: &[u16],
        weights: &[f32],
    ) -> Result<(), AnalysisError> {
        if !draft.iter().any(|&d| d) {
            return self.window(context, layer, row, ids, weights);
        }
        let k = self.plan.k;
        let mut target = Pending::default();
        for (i, (&row, &draft)) in row.iter().zip(draft).enumerate() {
            let chosen = &ids[i * k..i * k + k];
            if draft {
                self.draft_row(context, layer, chosen)?;
            } else {
                target.row.push(row);
                target.ids.extend_from_slice(chosen);
                target.weights.extend_from_slice(weights.get(i * k..i * k + k).unwrap_or_default());
            }
        }
        if target.row.is_empty() {
            return Ok(());
        }
        target.ids.extend_from_slice(&[0; PADDING]);
        self.window(context, layer, &target.row, &target.ids, &target.weights)
    }

    fn draft_row(&mut self, context: Context, layer: u16, ids: &[u16]) -> Result<(), AnalysisError> {
        let experts = self.plan.experts;
        let load = self.out.draft.entry(layer).or_insert_with(|| LoadCounts { rows: 0, by_expert: vec![0; experts] });
        load.rows += 1;
        for &id in ids {
            let count = load.by_expert.get_mut(usize::from(id)).ok_or_else(|| outside(context, layer, experts))?;
            *count += 1;
        }
        Ok(())
    }

    /// One window of the target. `ids` has `PADDING` values behind its rows.
    fn window(&mut self, context: Context, layer: u16, row: &[u16], ids: &[u16], weights: &[f32]) -> Result<(), AnalysisError> {
        let (plan, k, rows) = (self.plan, self.plan.k, row.len());
        let Some(slot) = plan.slot(layer) else {
            let reason = "the manifest does not list it as a routed layer of the target".into();
            return Err(AnalysisError::Routes { step: context.step_id, layer, reason });
        };
        let in_order = row.iter().enumerate().all(|(i, &r)| usize::from(r) == i);
        if !in_order || (rows != context.rows && !(plan.kept_rows_only && rows < context.rows)) {
            self.out.irregular.add(Irregular::one(context.step_id, layer, rows, context.rows));
            return Ok(());
        }
        let accepted = context.accepted.min(rows - 1);
        let stamp = context.at as u32 + 1;
        let requests = plan.steps.requests.as_slice();
        let last_of = |r: u32| requests.get(r as usize).map_or(0, |s| s.last_verify as usize);

        let group = match self.group_of {
            Some((n, at)) if n == rows => at,
            _ => self.out.group(rows),
        };
        self.group_of = Some((rows, group));
        let counts = self.out.groups[group].1[slot].get_or_insert_with(|| WindowCounts::new(rows, k, plan.experts));
        let state = self.layers[slot].get_or_insert_with(|| LayerState::new(plan.experts));
        let before = state.enter(context.request, |r| last_of(r) > context.at);
        let touched = match k {
            8 => state.window::<8>(&ids[..rows * 8], 8, accepted, stamp, &mut counts.marginal),
            _ => state.window::<0>(&ids[..rows * k], k, accepted, stamp, &mut counts.marginal),
        };
        let touched = touched.ok_or_else(|| outside(context, layer, plan.experts))?;
        let union = touched.union as usize;

        counts.windows += 1;
        if let Some(n) = counts.union_hist.get_mut(union) {
            *n += 1;
        }
        counts.kept_experts += u64::from(touched.kept);
        counts.kept_rows += accepted as u64 + 1;
        counts.wasted += u64::from(touched.union - touched.kept);
        counts.rejected_rows += (rows - 1 - accepted) as u64;
        if before != NO_STAMP {
            counts.add_reuse(union, touched.shared as usize);
        } else if requests.get(context.request as usize).is_some_and(|s| (s.first_verify as usize) < self.first_step) {
            // Its previous window is in an earlier unit.
            self.out.firsts.push(Edge { request: context.request, slot, rows, union: state.last_union() });
        }
        if rows <= MAX_PAIR_ROWS {
            self.pairs.resize(pairs(rows), 0);
            self.overlaps.count(ids, k, rows, &mut self.pairs);
            for (hist, &o) in counts.pair_hist.chunks_exact_mut(k + 1).zip(&self.pairs) {
                hist[usize::from(o).min(k)] += 1;
            }
        }
        if weights.len() >= rows * k && rows <= MAX_PAIR_ROWS {
            self.coverage.add(&ids[..rows * k], &weights[..rows * k], counts, COVERAGE_ONE);
        }

        let key = (context.request, rows);
        let sums = match self.sums_of {
            Some((of, at)) if of == key => at,
            _ => self.out.sums(key),
        };
        self.sums_of = Some((key, sums));
        if let Some(s) = self.out.sums[sums].1.get_mut(slot) {
            s.merge(&RequestSums { windows: 1, union: u64::from(touched.union), wasted: u64::from(touched.union - touched.kept) });
        }
        Ok(())
    }

    /// The counts of everything that was fed.
    ///
    /// # Errors
    /// As [`UnitPass::feed`], for the last window.
    pub fn finish(mut self) -> Result<PassCounts, AnalysisError> {
        self.finish_pending()?;
        let last = self.context.map_or(0, |c| c.at);
        let requests = &self.plan.steps.requests;
        for (slot, state) in self.layers.iter().enumerate() {
            let Some(state) = state else { continue };
            self.out.load[slot] = state.load();
            let open = state.open_ends(|r| requests.get(r as usize).is_some_and(|s| s.last_verify as usize > last));
            self.out.lasts.extend(open.into_iter().map(|(request, union)| Edge { request, slot, rows: 0, union }));
        }
        Ok(self.out)
    }
}

fn outside(context: Context, layer: u16, experts: usize) -> AnalysisError {
    AnalysisError::Routes { step: context.step_id, layer, reason: format!("an expert id is not below {experts}") }
}
