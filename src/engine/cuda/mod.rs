//! The CUDA engine: the same passes as the CPU engine's, by the kernels of `kernels/`.
//!
//! The driver is found when it is wanted; nothing of CUDA is needed to build or to run anything else. A pass is driven by the
//! host: its launches go to one stream, then logits, hidden rows and the routers' choices come back in one wait. Kernels are
//! timed by events when somebody wants times. What is not here yet: graphs, and choice and acceptance on the device.
//!
//! **Nothing here has run on a GPU.** Tests run it on the emulator of `tests/emulator`, and a trace of the emulator says so.

mod block;
mod block_space;
mod block_weights;
mod device;
mod images;
mod launch;
mod matrix;
mod mtp;
mod ops;
mod pass;
mod plan;
mod session;
mod sides;
mod state;
mod timer;
mod weights;
mod workspace;

pub use block::CudaDspark;
pub use device::Device;
pub use mtp::CudaMtp;
pub use plan::MemoryPlan;
pub use session::{CudaSession, TapPoint};
pub use sides::CudaSides;
pub use weights::DeviceWeights;

/// Most rows of one pass of the kernels; longer ones are cut. A window has at most 16.
pub const PASS_ROWS: usize = 16;
