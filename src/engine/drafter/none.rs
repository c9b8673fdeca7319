//! No drafting: every step is a plain decode step.

use super::{Drafter, Drafts, EngineError, RouteTap, Sampler};

/// The drafter that never proposes anything.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoDrafter;

impl Drafter for NoDrafter {
    fn reset(&mut self) {}

    fn observe(&mut self, _: &[u32], _: &[f32]) -> Result<(), EngineError> {
        Ok(())
    }

    fn propose(&mut self, _: &[u32], _: usize, _: &mut Sampler, _: &mut RouteTap) -> Result<Drafts, EngineError> {
        Ok(Drafts::default())
    }
}
