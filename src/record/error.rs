//! Why a recording cannot start or go on.

use super::workload::WorkloadError;
use crate::engine::EngineError;
use crate::engine::speculate::SpeculateError;
use crate::trace::TraceError;

/// An error of a recording. Each is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The prompts are wrong.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The checkpoint or a pass failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The model has no block to draft with.
    #[error("{model}: has no MTP block to draft with (num_nextn_predict_layers is 0); use --draft ngram or --draft none")]
    NoMtp {
        /// The model's name.
        model: String,
    },
}

impl From<SpeculateError> for RecordError {
    fn from(error: SpeculateError) -> Self {
        match error {
            SpeculateError::Engine(e) => Self::Engine(e),
            SpeculateError::Trace(e) => Self::Trace(e),
        }
    }
}
