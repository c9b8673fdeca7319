//! How fast a device reads its memory: the rate against which kernels' times are held.

use super::device::Device;
use super::ops;
use crate::engine::EngineError;
use crate::engine::clock::Clock;
use crate::trace::{Component, Module};
use std::rc::Rc;

/// Bytes that are read, if half of what is free has them: far more than any cache.
const BYTES: usize = 1 << 30;
/// On the emulator, where no time means anything.
const FEW_BYTES: usize = 1 << 16;

/// What reading memory takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamTimes {
    /// Bytes read each time.
    pub bytes: usize,
    /// Times, ns, the first of them left out; those of an emulator mean nothing.
    pub ns: Vec<i64>,
}

impl Device {
    /// Reads memory `repeats` times over, and once before.
    ///
    /// # Errors
    /// When the device fails or CUPTI does not say what a kernel was launched for.
    pub fn stream_times(self: &Rc<Self>, repeats: u32, clock: Clock) -> Result<StreamTimes, EngineError> {
        let most = if self.is_emulated() { FEW_BYTES } else { BYTES };
        let bytes = most.min(self.free_bytes()? / 2) / 16 * 16;
        let (from, seen) = (self.zeros(bytes)?, self.zeros(4)?);
        self.start(Module::Target, Some(clock))?;
        self.label(None, Component::Other);
        for _ in 0..=repeats {
            ops::stream_read(self, from.at(0), bytes, seen.at(0))?;
        }
        self.wait()?;
        let mut kernels = self.timer.borrow_mut().finish()?;
        kernels.extend(self.taken()?);
        let ns = kernels.iter().skip(1).map(|kernel| kernel.end_ns - kernel.begin_ns).collect();
        Ok(StreamTimes { bytes, ns })
    }
}
