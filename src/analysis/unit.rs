//! The pass over one unit: rows to windows, which a [`WindowSink`] takes.

use super::AnalysisError;
use super::overlap::PADDING;
use super::pass::{Irregular, Plan};
use super::source::RouteSlice;
use super::transpose::{id_rows, rows_of};
use crate::trace::Phase;

/// Most expert ids of one window.
const MAX_WINDOW_IDS: usize = 1 << 24;

/// Where the rows of a step go.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// The step.
    pub step_id: u32,
    /// Index of the step.
    pub at: usize,
    /// Index of the unit's first step.
    pub first: usize,
    /// Index of its request.
    pub request: u32,
    /// What the step did.
    pub phase: Phase,
    /// Its rows.
    pub rows: usize,
    /// Its accepted drafts.
    pub accepted: usize,
}

/// One window of the target in one layer.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// Its step.
    pub context: Context,
    /// Absolute layer.
    pub layer: u16,
    /// The layer's place in the plan.
    pub slot: usize,
    /// Rows that are there.
    pub rows: usize,
    /// The last kept row.
    pub accepted: usize,
    /// `[rows, k]`, and [`PADDING`] values of any kind behind them.
    pub ids: &'a [u16],
    /// `[rows, k]`, or none.
    pub weights: &'a [f32],
}

/// What takes the windows of one unit, in order of (step, layer).
pub trait WindowSink {
    /// Takes a window of the target.
    ///
    /// # Errors
    /// When an id is not an expert.
    fn window(&mut self, plan: &Plan<'_>, window: Window<'_>) -> Result<(), AnalysisError>;

    /// Takes a row of the draft module in a verify step.
    ///
    /// # Errors
    /// When an id is not an expert.
    fn draft_row(&mut self, _plan: &Plan<'_>, _context: Context, _layer: u16, _ids: &[u16]) -> Result<(), AnalysisError> {
        Ok(())
    }

    /// Takes a row of the target in a prefill step.
    ///
    /// # Errors
    /// When an id is not an expert.
    fn prefill_row(&mut self, _plan: &Plan<'_>, _context: Context, _layer: u16, _ids: &[u16]) -> Result<(), AnalysisError> {
        Ok(())
    }

    /// Whether prefill rows are wanted.
    fn wants_prefill(&self) -> bool {
        false
    }

    /// Takes note of a window that does not have the rows of its step.
    fn irregular(&mut self, _irregular: Irregular) {}
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
            if context.phase == Phase::Prefill && self.sink.wants_prefill() {
                for i in (a..b).filter(|&i| !slice.draft[i]) {
                    self.sink.prefill_row(self.plan, context, layer, &ids[i * k..i * k + k])?;
                }
            }
            if context.phase == Phase::Verify {
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

    /// One window of the target. `ids` has `PADDING` values behind its rows.
    fn window(&mut self, context: Context, layer: u16, row: &[u16], ids: &[u16], weights: &[f32]) -> Result<(), AnalysisError> {
        let (plan, rows) = (self.plan, row.len());
        let slot = plan.slot(layer).ok_or_else(|| unlisted(context, layer))?;
        let in_order = row.iter().enumerate().all(|(i, &r)| usize::from(r) == i);
        if !in_order || (rows != context.rows && !(plan.kept_rows_only && rows < context.rows)) {
            self.sink.irregular(Irregular::one(context.step_id, layer, rows, context.rows));
            return Ok(());
        }
        self.sink.window(plan, Window { context, layer, slot, rows, accepted: context.accepted.min(rows - 1), ids, weights })
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

/// A row of a layer that the manifest does not know.
pub fn unlisted(context: Context, layer: u16) -> AnalysisError {
    let reason = "the manifest does not list it as a routed layer of the target".into();
    AnalysisError::Routes { step: context.step_id, layer, reason }
}

/// An expert that the manifest does not know.
pub fn outside(context: Context, layer: u16, experts: usize) -> AnalysisError {
    AnalysisError::Routes { step: context.step_id, layer, reason: format!("an expert id is not below {experts}") }
}
