//! The engine: a checkpoint of the Ling-3.0 family (BailingMoeV3) to logits, drafts and events, on the CPU or by the kernels of [`cuda`].
//!
//! Owns the architecture; knows nothing of files other than checkpoints, and nothing of reports.

mod binder;
pub mod builtin;
pub mod chat;
pub mod checkpoint;
pub mod clock;
pub mod config;
mod config_keys;
pub mod config_read;
pub mod cuda;
pub mod decode;
pub mod drafter;
pub mod dspark;
pub mod error;
pub mod files;
pub mod forecast;
pub mod golden;
mod golden_checks;
mod golden_file;
mod guard;
pub mod inventory;
mod kda;
mod lanes;
mod laps;
mod layer;
mod made;
pub mod matmul;
pub mod matrix;
mod mla;
mod moe;
pub mod mtp;
mod norm;
pub mod operations;
pub mod presets;
mod rope;
pub mod route_tap;
mod router;
pub mod routing_plan;
pub mod sampling;
mod scratch;
pub mod session;
#[cfg(test)]
mod session_tests;
pub mod shape;
pub mod shards;
mod simd;
pub mod speculate;
pub mod synthetic;
pub mod tap;
pub mod target;
pub mod tensors;
pub mod tokenizer;
pub mod verify;
pub mod weights;
mod window;

pub use checkpoint::Checkpoint;
pub use config::ModelConfig;
pub use dspark::DsparkCheckpoint;
pub use error::EngineError;
pub use mtp::Mtp;
pub use routing_plan::{Routing, RoutingPlan};
pub use session::{Forward, LogitRows, Session};
pub use tap::{ForwardTap, NoTap};
pub use weights::ModelWeights;
