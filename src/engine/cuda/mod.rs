//! The CUDA engine: the same passes as the CPU engine's, by the kernels of `kernels/`.
//!
//! The driver is found when it is wanted; nothing of CUDA is needed to build or to run anything else. A pass goes to one stream, as a
//! graph once its shape is known; logits, hidden rows and the routers' choices come back with one wait. When somebody wants times, kernels
//! are timed by CUPTI, or by events, and then they are launched one by one. What is not here yet: choice and acceptance on the device.
//!
//! **Nothing here has run on a GPU.** Tests run it on the emulator of `tests/emulator`, and a trace of the emulator says so.

mod block;
mod block_space;
mod block_weights;
mod cupti;
mod device;
mod graph;
mod images;
mod launch;
mod matrix;
mod moved;
mod mtp;
mod ops;
mod pass;
mod pinned;
mod plan;
mod planned;
mod session;
mod sides;
mod state;
mod stream;
mod symbols;
mod timer;
mod weights;
mod workspace;

pub use block::CudaDspark;
pub use cupti::{CuptiFacts, is_of_cupti};
pub use device::Device;
pub use graph::GraphUse;
pub use moved::{KernelBytes, Moved};
pub use mtp::CudaMtp;
pub use plan::MemoryPlan;
pub use session::{CudaSession, TapPoint};
pub use sides::CudaSides;
pub use stream::StreamTimes;
pub use weights::DeviceWeights;

/// Most rows of one pass of the kernels; longer ones are cut. A window has at most 16.
pub const PASS_ROWS: usize = 16;
