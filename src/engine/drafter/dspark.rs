//! A DSpark drafter beside its target: every window is a block of it, cut to what was asked for.
//!
//! A block is always run in its full width and cut afterwards. Its rows see each other, so that a shorter block would be another
//! one than the drafter was trained on; and the drafts of a short window are the first of a long one, which is what comparing
//! draft lengths on one recording takes for granted.
//!
//! With a confidence c_i for each draft, the window ends before the first draft whose survival c_0 ... c_i is below the threshold;
//! the first draft is always verified, so that a step that has paid for a block is a verify step. c_i is made of the row and of
//! the drafts before, never of draft i itself: whether draft i is verified is decided before it is drawn, and what comes out
//! stays distributed as plain sampling.

use super::{Drafter, Drafts, EngineError, MAX_WAITING, RouteTap, Sampler};
use crate::engine::NoTap;
use crate::engine::dspark::Dspark;
use crate::trace::{Component, Module};

/// The DSpark drafter of one request at a time.
pub struct DsparkDrafter<'m> {
    dspark: Dspark<'m>,
    /// Survival below which a window ends; 0 never ends it.
    min_survival: f64,
    /// Outputs of the target's tapped layers that are not in the context yet, `[rows, taps * H]`.
    waiting: Vec<f32>,
}

impl<'m> DsparkDrafter<'m> {
    /// A drafter whose windows end where the product of the confidences falls below `min_survival`.
    pub fn new(dspark: Dspark<'m>, min_survival: f64) -> Self {
        Self { dspark, min_survival, waiting: Vec::new() }
    }

    /// Tokens that it has been told of.
    pub fn observed(&self) -> usize {
        self.dspark.len() + self.waiting.len() / self.row_width()
    }

    fn row_width(&self) -> usize {
        self.dspark.config().taps.len() * self.dspark.config().hidden
    }
}

impl Drafter for DsparkDrafter<'_> {
    fn reset(&mut self) {
        self.dspark.truncate(0);
        self.waiting.clear();
    }

    fn tapped_layers(&self) -> &[usize] {
        &self.dspark.config().taps
    }

    fn observe_taps(&mut self, taps: &[f32]) -> Result<(), EngineError> {
        self.waiting.extend_from_slice(taps);
        if self.waiting.len() > MAX_WAITING * self.row_width() {
            self.dspark.inject(&self.waiting, &mut NoTap)?;
            self.waiting.clear();
        }
        Ok(())
    }

    fn observe(&mut self, _: &[u32], _: &[f32]) -> Result<(), EngineError> {
        Ok(())
    }

    fn propose(&mut self, history: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError> {
        let (first, most) = (self.dspark.config().first_row(), self.dspark.config().drafts());
        let wanted = limit.min(most);
        let Some(&anchor) = history.last().filter(|_| wanted > 0) else { return Ok(Drafts::default()) };
        let recorded = || tap.is_on().then(Vec::new);
        let mut drafts = Drafts { probs: recorded(), confidences: recorded(), ..Drafts::default() };
        self.dspark.inject(&self.waiting, tap)?;
        self.waiting.clear();
        self.dspark.block(anchor, first..first + wanted, tap)?;
        let (mut previous, mut survival) = (anchor, 1.0);
        for draft in 0..wanted {
            let corrected = tap.time(Module::Draft, Component::Head, || self.dspark.correct(draft, draft, previous))?;
            let confidence = corrected.confidence();
            survival *= confidence.map_or(1.0, f64::from);
            if draft > 0 && survival < self.min_survival {
                break;
            }
            tap.time(Module::Draft, Component::Sampling, || drafts.push(corrected.logits, sampler));
            previous = drafts.tokens[draft];
            match (&mut drafts.confidences, confidence) {
                (Some(list), Some(confidence)) => list.push(confidence),
                _ => drafts.confidences = None,
            }
        }
        Ok(drafts)
    }
}
