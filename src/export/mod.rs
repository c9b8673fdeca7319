//! A trace in other programs' formats: the documented line format, and a timeline for Perfetto.

pub mod jsonl;
mod lanes;
pub mod perfetto;
mod unions;

use crate::trace::TraceError;

/// Why a trace cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// What was read cannot be written; the error is the output's own.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
    /// The trace does not hold what the format needs.
    #[error("{0}")]
    Lacks(String),
}
