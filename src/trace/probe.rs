//! How a producer hands its events over.

use super::{KernelEvent, RequestEvent, StepEvent, TraceError};

/// A receiver of a run's events: the trace writer, a counter in a test, or nothing at all.
///
/// Steps come in order of `step_id`; a request comes after its last step. An error means that the
/// run must stop, for what follows could not be kept.
pub trait Probe {
    /// Whether gate weights should be collected beside the expert ids.
    fn wants_weights(&self) -> bool {
        false
    }

    /// Whether routed sets should be collected at all.
    fn wants_routes(&self) -> bool {
        true
    }

    /// Whether the times of a step's operations should be collected.
    fn wants_kernels(&self) -> bool {
        false
    }

    /// Takes the operations of a step that was handed over before; steps in ascending order, each at most once.
    ///
    /// # Errors
    /// As [`Probe::step`].
    fn kernels(&mut self, step_id: u32, kernels: Vec<KernelEvent>) -> Result<(), TraceError> {
        let _ = (step_id, kernels);
        Ok(())
    }

    /// Takes one step.
    ///
    /// # Errors
    /// When it cannot be kept (the disk is full, the writer has failed).
    fn step(&mut self, step: StepEvent) -> Result<(), TraceError>;

    /// Takes one ended request.
    ///
    /// # Errors
    /// As [`Probe::step`].
    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError>;
}

/// A probe that drops everything: recording switched off.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoProbe;

impl Probe for NoProbe {
    fn wants_routes(&self) -> bool {
        false
    }

    fn step(&mut self, _: StepEvent) -> Result<(), TraceError> {
        Ok(())
    }

    fn request(&mut self, _: RequestEvent) -> Result<(), TraceError> {
        Ok(())
    }
}
