//! Page-locked host memory: what copies run to and from while the host goes on.

use super::buffer::{Buffer, Plain};
use super::device::{Device, failed};
use super::timer::Launched;
use crate::engine::EngineError;
use cudarc::driver::result;
use rayon::prelude::*;
use std::ffi::c_void;
use std::mem::size_of_val;
use std::rc::Rc;

/// Bytes that a thread copies at a time.
const SHARE: usize = 1 << 20;

/// A piece of page-locked memory. Its contents are those of the last copy that was waited for ([`Device::wait`]); what is to be
/// sent may be changed only when the copy before has been waited for.
#[derive(Debug)]
pub(super) struct Pinned {
    device: Rc<Device>,
    at: *mut c_void,
    bytes: usize,
}

impl Pinned {
    /// Memory of `bytes` bytes, all 0.
    pub fn new(device: &Rc<Device>, bytes: usize) -> Result<Self, EngineError> {
        let bytes = bytes.max(16);
        // SAFETY: freed once, by `Pinned`. No flags: write-combined memory is slow to read.
        let at = unsafe { result::malloc_host(bytes, 0) }.map_err(|e| failed(&format!("{bytes} bytes of page-locked memory"), e))?;
        // SAFETY: the allocation has that many bytes.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device: Rc::clone(device), at, bytes })
    }

    fn inside(&self, offset: usize, bytes: usize) -> Result<*mut u8, EngineError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(EngineError::Device(format!("CUDA: {bytes} bytes at {offset} leave a host buffer of {}", self.bytes)));
        }
        // SAFETY: inside the allocation.
        Ok(unsafe { self.at.cast::<u8>().add(offset) })
    }

    /// Puts values at byte `offset`.
    pub fn put<T: Plain>(&self, offset: usize, values: &[T]) -> Result<(), EngineError> {
        let to = self.inside(offset, size_of_val(values))?;
        // SAFETY: the range was checked, and the two do not overlap.
        unsafe { to.copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(values)) };
        Ok(())
    }

    /// Puts bytes at byte `offset`, many of them by all threads: one reads memory, or a file, slower than the device takes it.
    pub fn put_by_threads(&self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        let to = self.inside(offset, bytes.len())?;
        // SAFETY: the range was checked, has been written since it was allocated, and does not overlap with `bytes`.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes.len()) };
        if bytes.len() <= SHARE {
            to.copy_from_slice(bytes);
            return Ok(());
        }
        to.par_chunks_mut(SHARE).zip(bytes.par_chunks(SHARE)).for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    /// Appends `count` values from byte `offset` on to `values`.
    pub fn append<T: Plain + Default>(&self, offset: usize, count: usize, values: &mut Vec<T>) -> Result<(), EngineError> {
        let begin = values.len();
        let from = self.inside(offset, count.saturating_mul(size_of::<T>()))?;
        values.resize(begin + count, T::default());
        let to = &mut values[begin..];
        // SAFETY: the range was checked; every bit pattern is a value of the plain types.
        unsafe { to.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, size_of_val(to)) };
        Ok(())
    }

    /// Lets the stream copy `bytes` bytes from byte `offset` on to the beginning of `to`.
    pub fn send(&self, offset: usize, bytes: usize, to: &Buffer) -> Result<(), EngineError> {
        self.send_to(offset, bytes, to.inside(0, bytes)?)
    }

    /// Lets the stream copy `bytes` bytes from byte `offset` on to the address `to`, which must be inside a buffer with them.
    pub fn send_to(&self, offset: usize, bytes: usize, to: u64) -> Result<(), EngineError> {
        let from = self.inside(offset, bytes)?;
        self.device.launch(Launched::copy("memcpy HtoD"), || {
            // SAFETY: both ranges were checked, and neither is freed before the stream has been waited for.
            let sent = unsafe { result::memcpy_htod_async(to, std::slice::from_raw_parts(from, bytes), self.device.stream) };
            sent.map_err(|e| failed("a copy to the device", e))
        })
    }

    /// Lets the stream copy the first `bytes` bytes of `from` to byte `offset`.
    pub fn receive(&self, offset: usize, bytes: usize, from: &Buffer) -> Result<(), EngineError> {
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (self.inside(offset, bytes)?, from.inside(0, bytes)?);
        self.device.launch(Launched::copy("memcpy DtoH"), || {
            // SAFETY: as above.
            let received = unsafe { result::memcpy_dtoh_async(std::slice::from_raw_parts_mut(to, bytes), from, self.device.stream) };
            received.map_err(|e| failed("a copy from the device", e))
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A copy may still run when a pass has failed.
        let _ = self.device.wait();
        // SAFETY: allocated by `Pinned::new`, and by nobody else freed.
        let _ = unsafe { result::free_host(self.at) };
    }
}
