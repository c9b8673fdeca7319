//! The CUDA engine: the same passes as the CPU engine's, by the kernels of `kernels/`.
//!
//! The driver is found when it is wanted; nothing of CUDA is needed to build or to run anything else. A pass goes to one stream, as a
//! graph once its shape is known; a prompt's long passes, on tensor cores, are launched kernel by kernel. Drafts are chained, and tokens
//! chosen and accepted, on the device: a step waits once, for a verdict and the routers' choices. When somebody wants times, kernels are
//! timed by CUPTI, or by events, and then they are launched one by one.
//!
//! **Nothing here has run on a GPU.** Tests run it on the emulator of `tests/emulator`, and a trace of the emulator says so.

mod block;
mod block_chain;
mod block_ops;
mod block_space;
mod block_weights;
mod buffer;
mod chain;
mod choice_ops;
mod choose;
mod cupti;
mod device;
mod drafted;
mod graph;
mod images;
mod launch;
mod long;
mod long_ops;
mod matrix;
mod moved;
mod mtp;
mod nvrtc;
mod ops;
mod pass;
mod pinned;
mod plan;
mod planned;
mod ring;
mod session;
mod sides;
mod site;
mod spans;
mod state;
mod stream;
mod symbols;
mod taps;
mod timer;
mod upload;
mod weights;
mod workspace;

pub use block::CudaDspark;
pub use block_chain::CudaDsparkDrafter;
pub use chain::CudaMtpDrafter;
pub use cupti::{CuptiFacts, CuptiSearch, CuptiState, check_cupti, is_of_cupti};
pub use device::Device;
pub use graph::GraphUse;
pub use moved::{KernelBytes, Moved};
pub use mtp::CudaMtp;
pub use plan::MemoryPlan;
pub use session::CudaSession;
pub use sides::CudaSides;
pub use stream::StreamTimes;
pub use taps::TapPoint;
pub use upload::{Loading, Opening, Upload};
pub use weights::DeviceWeights;

/// Most rows of a window, and of a pass of the kernels that decode.
pub const PASS_ROWS: usize = 16;

/// Most rows of a pass; longer ones are cut. Those of more than [`PASS_ROWS`] rows are a prompt's, and run on tensor cores.
pub const LONG_ROWS: usize = 512;
