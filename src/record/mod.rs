//! Runs a workload on the engine and writes the trace: prompts in, steps out, Ctrl-C survived.
//!
//! [`Plan::new`] checks everything that can be wrong with the input, before anything is created; [`run`] then runs the
//! plan's requests into any [`crate::trace::Probe`], and [`record`] runs it into a trace.

mod backend;
mod bandwidth;
pub mod bench;
mod builtin;
pub mod calibrate;
mod error;
mod facts;
pub mod machine;
pub mod nvml;
mod overhead;
mod plan;
mod run;
mod second_pass;
pub mod sweep;
pub mod workload;

pub use backend::{BackendKind, CudaDevice, CuptiUse, cuda_device};
pub use bandwidth::copy_gb_per_s;
pub use builtin::Workload;
pub use error::RecordError;
pub use facts::{model_shape, run_facts};
pub use plan::{MAX_PREFILL_CHUNK, Options, Plan, PlannedRequest};
pub use run::{Progress, Recording, Running, Totals, record, run};
pub use workload::{Prompt, PromptSource, WorkloadError};

/// The prompts of `specprof demo`, written for it.
pub const DEMO_PROMPTS: &[u8] = include_bytes!("demo_prompts.jsonl");
