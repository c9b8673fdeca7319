//! Why a recording cannot start or go on.

use super::workload::WorkloadError;
use crate::engine::EngineError;
use crate::engine::speculate::SpeculateError;
use crate::trace::TraceError;
use std::path::PathBuf;

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
    /// The second pass over the prompts was not what the first was.
    #[error(
        "--kernels-pass second: the second pass is not the first: {what}; {} keeps the first, marked incomplete. Times of one are not the \
         other's: use --kernels-pass same, and look with --self-check whether the device repeats itself",
        dir.display()
    )]
    PassesDiffer {
        /// The trace.
        dir: PathBuf,
        /// What differs.
        what: String,
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
