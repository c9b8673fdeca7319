//! The trace: what a run leaves behind, and the ground that every other layer stands on.
//!
//! A trace is a directory with `manifest.json` and Parquet tables of one or more parts each.
//! This module owns ids, expert sets, the events that producers emit, the column names, and the
//! reading and writing of the files. It does not know who produces events or what they mean.

#[cfg(target_arch = "x86_64")]
mod bit_unpack;
mod bounds;
mod claim;
mod columns;
mod dictionary_pages;
pub mod error;
pub mod event;
pub mod expert_set;
pub mod foreign;
pub mod input_file;
pub mod kernel;
mod kernel_columns;
pub mod kernel_table;
mod mailbox;
pub mod manifest;
mod output;
mod part_file;
pub mod partial_file;
pub mod parts;
pub mod passes;
pub mod probe;
pub mod quiet;
pub mod reader;
pub mod route_pages;
mod routes;
pub mod schema;
pub mod step_routes;
pub mod step_table;
pub mod synth;
pub mod tables;
pub mod telemetry;
pub mod temporaries;
mod thrift;
pub mod throttling;
pub mod token_hash;
pub mod validate;
pub mod version;
pub mod writer;

pub use bounds::{FREE_LIST_VALUES, MAX_LAYERS, manifest_fault};
pub use claim::check_replaceable;
pub use error::TraceError;
pub use event::{FinishReason, Module, Phase, RequestEvent, StepEvent, StepRoutes};
pub use expert_set::ExpertSet;
pub use kernel::{Component, KernelEvent};
pub use kernel_table::Kernels;
pub use manifest::{Manifest, ModelShape};
pub use output::MANIFEST;
pub use probe::Probe;
pub use reader::{Trace, is_lines};
pub use routes::{RouteBatch, RouteUnit};
pub use step_table::Steps;
pub use synth::Synth;
pub use telemetry::{DeviceSensor, HostSampler, TelemetrySample};
pub use throttling::Throttling;
pub use validate::validate;
pub use version::{FORMAT_VERSION, FormatVersion};
pub use writer::{Ending, TraceWriter, WriterOptions};
