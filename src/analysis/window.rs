//! Windows, and what takes them.

use super::AnalysisError;
#[cfg(doc)]
use super::overlap::PADDING;
use super::pass::{Irregular, Plan};
use crate::trace::Phase;

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

/// What takes the windows of one unit: of each layer in order of steps, layers by turns.
pub trait WindowSink {
    /// Takes a window of the target.
    ///
    /// # Errors
    /// When an id is not an expert.
    fn window(&mut self, plan: &Plan<'_>, window: Window<'_>) -> Result<(), AnalysisError>;

    /// Takes windows of one layer, of one slice, in order of steps.
    ///
    /// # Errors
    /// As [`WindowSink::window`].
    fn windows<'w>(&mut self, plan: &Plan<'_>, mut windows: impl Iterator<Item = Window<'w>>) -> Result<(), AnalysisError> {
        windows.try_for_each(|window| self.window(plan, window))
    }

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

/// A row of a layer that the manifest does not know.
pub fn unlisted(context: Context, layer: u16) -> AnalysisError {
    let reason = "the manifest does not list it as a routed layer of the target".into();
    AnalysisError::Routes { step: context.step_id, layer, reason }
}

/// An expert that the manifest does not know.
pub fn outside(context: Context, layer: u16, experts: usize) -> AnalysisError {
    AnalysisError::Routes { step: context.step_id, layer, reason: format!("an expert id is not below {experts}") }
}
