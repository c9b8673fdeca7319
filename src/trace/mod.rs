//! The trace: what a run leaves behind, and the ground that every other layer stands on.
//!
//! A trace is a directory with `manifest.json` and Parquet tables of one or more parts each.
//! This module owns ids, expert sets, the events that producers emit, the column names, and the
//! reading and writing of the files. It does not know who produces events or what they mean.

pub mod error;
pub mod event;
pub mod expert_set;
pub mod manifest;
pub mod probe;

pub use error::TraceError;
pub use event::{FinishReason, Module, Phase, RequestEvent, StepEvent, StepRoutes};
pub use expert_set::ExpertSet;
pub use manifest::{Manifest, ModelShape};
pub use probe::Probe;
