//! The CPU engine: a checkpoint of the Ling-3.0 family (BailingMoeV3) to logits, drafts and events.
//!
//! Owns the architecture; knows nothing of files other than checkpoints, and nothing of reports.

pub mod config;
pub mod error;
pub mod matrix;
pub mod tap;
pub mod weights;

pub use config::ModelConfig;
pub use error::EngineError;
pub use tap::{ForwardTap, NoTap};
pub use weights::ModelWeights;
