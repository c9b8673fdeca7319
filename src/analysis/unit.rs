//! The pass over one unit: rows to windows, which a [`WindowSink`] takes.

use super::AnalysisError;
use super::overlap::PADDING;
use super::pass::{Irregular, Plan};
use super::source::RouteSlice;
use super::transpose::{id_rows, rows_of};
use super::window::{Context, Window, WindowSink, unlisted};
use crate::trace::Phase;

/// How many windows ahead the ids are asked for.
const PREFETCHED: usize = 3;
/// Most expert ids of one window.
const MAX_WINDOW_IDS: usize = 1 << 24;

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

/// A window that lies in the slice at hand.
#[derive(Debug, Clone, Copy)]
struct Queued {
    /// Place of its step in the slice.
    context: usize,
    /// Its rows in the slice.
    from: usize,
    rows: usize,
}

/// One unit's pass. Feed it slices in order, then take the sink back.
pub struct UnitPass<'a, S> {
    plan: &'a Plan<'a>,
    sink: S,
    context: Option<Context>,
    /// Index of the unit's first step.
    first_step: usize,
    pending: Pending,
    has_pending: bool,
    /// Row-major ids and weights of the slice, `PADDING` ids behind them.
    ids: Vec<u16>,
    weights: Vec<f32>,
    /// The slice's windows by slot: a layer's counts stay in the cache while its windows are taken.
    queues: Vec<Vec<Queued>>,
    /// Steps of the queued windows.
    contexts: Vec<Context>,
}

impl<'a, S: WindowSink> UnitPass<'a, S> {
    /// A pass that has seen nothing.
    pub fn new(plan: &'a Plan<'a>, sink: S) -> Self {
        Self {
            plan,
            sink,
            context: None,
            first_step: 0,
            pending: Pending::default(),
            has_pending: false,
            ids: Vec::new(),
            weights: Vec::new(),
            queues: vec![Vec::new(); plan.layers.len()],
            contexts: Vec::new(),
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
        let done = self.runs(&slice, &ids, &weights).and_then(|()| self.deliver(&ids, &weights));
        self.ids = ids;
        self.weights = weights;
        done
    }

    /// Cuts a slice into runs of one step and layer. The last run may go on, so it waits.
    fn runs(&mut self, slice: &RouteSlice<'_>, ids: &[u16], weights: &[f32]) -> Result<(), AnalysisError> {
        let (n, k) = (slice.len(), self.plan.k);
        let drafts = slice.draft.contains(&true);
        self.contexts.clear();
        let mut a = 0;
        while a < n {
            let (step_id, layer) = (slice.step_id[a], slice.layer[a]);
            let goes_on = self.has_pending && self.pending.step_id == step_id && self.pending.layer == layer;
            if self.has_pending && !goes_on {
                self.finish_pending()?;
            }
            if self.contexts.last().is_none_or(|c| c.step_id != step_id) {
                let context = self.context(step_id, layer)?;
                self.contexts.push(context);
            }
            let at = self.contexts.len() - 1;
            let context = &self.contexts[at];
            let same = |i: usize| slice.step_id[i] == step_id && slice.layer[i] == layer;
            // Rows are in order: a run of the expected length is known by its last row and the one behind it.
            let expected = a + context.rows;
            let b = if context.rows > 0 && expected < n && same(expected - 1) && !same(expected) {
                expected
            } else {
                (a + 1..n).find(|&i| !same(i)).unwrap_or(n)
            };
            match context.phase {
                Phase::Prefill if self.sink.wants_prefill() => {
                    let context = *context;
                    for i in (a..b).filter(|&i| !slice.draft[i]) {
                        self.sink.prefill_row(self.plan, context, layer, &ids[i * k..i * k + k])?;
                    }
                }
                Phase::Verify => {
                    let (row, draft) = (&slice.row[a..b], &slice.draft[a..b]);
                    if goes_on || b == n {
                        let weights = if weights.is_empty() { weights } else { &weights[a * k..b * k] };
                        self.wait(step_id, layer, slice, a..b, &ids[a * k..b * k], weights)?;
                    } else if !drafts || !draft.contains(&true) {
                        self.queue(at, layer, row, a)?;
                    } else {
                        // Rows of both kinds: the window is put together by itself, behind those that wait.
                        if draft.contains(&false) {
                            self.deliver(ids, weights)?;
                        }
                        let weights = if weights.is_empty() { weights } else { &weights[a * k..b * k] };
                        self.run(self.contexts[at], layer, row, draft, &ids[a * k..b * k + PADDING], weights)?;
                    }
                }
                Phase::Prefill | Phase::Decode => {}
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
        let context = Context { step_id, at, first: self.first_step, request: step.request, phase: step.phase, rows, accepted };
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
        let rows = pending.row.len() + run.len();
        if rows > 2 * usize::from(u16::MAX) || rows * self.plan.k > MAX_WINDOW_IDS {
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
                self.sink.draft_row(self.plan, context, layer, chosen)?;
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

    /// The slot of the target's window of these rows; `None` when it is not regular.
    fn slot(&mut self, context: Context, layer: u16, row: &[u16]) -> Result<Option<usize>, AnalysisError> {
        let (plan, rows) = (self.plan, row.len());
        let slot = plan.slot(layer).ok_or_else(|| unlisted(context, layer))?;
        if is_regular(plan, &context, row) {
            return Ok(Some(slot));
        }
        self.sink.irregular(Irregular::one(context.step_id, layer, rows, context.rows));
        Ok(None)
    }

    /// Queues the target's window of these rows, which begin at row `from` of the slice; `at` is its place in `contexts`.
    fn queue(&mut self, at: usize, layer: u16, row: &[u16], from: usize) -> Result<(), AnalysisError> {
        let slot = match self.plan.slot(layer) {
            Some(slot) if is_regular(self.plan, &self.contexts[at], row) => Some(slot),
            _ => self.slot(self.contexts[at], layer, row)?,
        };
        if let Some(slot) = slot {
            self.queues[slot].push(Queued { context: at, from, rows: row.len() });
        }
        Ok(())
    }

    /// Hands the queued windows to the sink. `ids` and `weights` are the slice's.
    fn deliver(&mut self, ids: &[u16], weights: &[f32]) -> Result<(), AnalysisError> {
        let Self { plan, sink, queues, contexts, .. } = self;
        let k = plan.k;
        for (slot, queue) in queues.iter_mut().enumerate() {
            let layer = plan.layers[slot];
            let window = |(i, &Queued { context, from, rows }): (usize, &Queued)| {
                // A layer's windows are too far apart for the hardware to see what comes next.
                if let Some(next) = queue.get(i + PREFETCHED) {
                    prefetch(ids, next.from * k);
                }
                let context = contexts[context];
                let weights = if weights.is_empty() { weights } else { &weights[from * k..(from + rows) * k] };
                let ids = &ids[from * k..(from + rows) * k + PADDING];
                Window { context, layer, slot, rows, accepted: context.accepted.min(rows - 1), ids, weights }
            };
            sink.windows(plan, queue.iter().enumerate().map(window))?;
            queue.clear();
        }
        Ok(())
    }

    /// One window of the target. `ids` has `PADDING` values behind its rows.
    fn window(&mut self, context: Context, layer: u16, row: &[u16], ids: &[u16], weights: &[f32]) -> Result<(), AnalysisError> {
        let Some(slot) = self.slot(context, layer, row)? else { return Ok(()) };
        let rows = row.len();
        self.sink.window(self.plan, Window { context, layer, slot, rows, accepted: context.accepted.min(rows - 1), ids, weights })
    }

    /// The sink, and the index of the last step, after the last window.
    ///
    /// # Errors
    /// As [`UnitPass::feed`], for the last window.
    pub fn finish(mut self) -> Result<(S, usize), AnalysisError> {
        self.finish_pending()?;
        Ok((self.sink, self.context.map_or(0, |c| c.at)))
    }
}

/// Whether the rows are those of a window of that step.
fn is_regular(plan: &Plan<'_>, context: &Context, row: &[u16]) -> bool {
    let in_order = row.iter().enumerate().all(|(i, &r)| usize::from(r) == i);
    in_order && (row.len() == context.rows || (plan.kept_rows_only && row.len() < context.rows))
}

/// Asks for the cache line of `ids[at]`.
#[inline]
fn prefetch(ids: &[u16], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(id) = ids.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint about a place that is there; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(id).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (ids, at);
}
