//! Device memory: a piece that is freed when it is dropped, and the values that it is filled with.

use super::device::{Device, failed};
use super::ops;
use crate::engine::EngineError;
use crate::engine::made::Recipe;
use cudarc::driver::{result, sys};
use std::mem::size_of_val;
use std::rc::Rc;

/// Types that are their bytes.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for f32 {}
impl Plain for f64 {}

/// A piece of device memory, freed when it is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    device: Rc<Device>,
    at: sys::CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    /// Memory of `bytes` bytes, whose contents are undefined.
    pub fn room(device: &Rc<Device>, bytes: usize) -> Result<Self, EngineError> {
        // The driver refuses nothing at all.
        let bytes = bytes.max(16);
        // SAFETY: the result is freed once, by `Buffer`.
        let at = unsafe { result::malloc_sync(bytes) }.map_err(|e| {
            failed(&format!("{bytes} bytes of device memory, of which others may have taken some since it was planned (see nvidia-smi)"), e)
        })?;
        Ok(Self { device: Rc::clone(device), at, bytes })
    }

    /// The address of byte `offset`.
    pub fn at(&self, offset: usize) -> u64 {
        debug_assert!(offset <= self.bytes);
        self.at + offset as u64
    }

    /// The address of number `index` of a run of F32s.
    pub fn float(&self, index: usize) -> u64 {
        self.at(index * size_of::<f32>())
    }

    /// The address of byte `offset`, when `bytes` bytes from there on are inside.
    pub fn inside(&self, offset: usize, bytes: usize) -> Result<u64, EngineError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(EngineError::Device(format!("CUDA: a copy of {bytes} bytes at {offset} leaves its buffer of {}", self.bytes)));
        }
        Ok(self.at + offset as u64)
    }

    /// Copies `values` to byte `offset`.
    pub fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<(), EngineError> {
        let to = self.inside(offset, size_of_val(values))?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside this allocation, and the call returns when `values` has been read.
        unsafe { result::memcpy_htod_sync(to, values) }.map_err(|e| failed("a copy to the device", e))
    }

    /// Has the device make bytes from byte `offset` on. The host does not wait.
    pub fn fill(&self, offset: usize, recipe: &Recipe) -> Result<(), EngineError> {
        let to = self.inside(offset, recipe.bytes)?;
        ops::fill(&self.device, to, recipe)
    }

    /// Copies from byte `offset`; waits for all work before.
    pub fn read<T: Plain>(&self, offset: usize, values: &mut [T]) -> Result<(), EngineError> {
        let from = self.inside(offset, size_of_val(values))?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside this allocation; every bit pattern is a value of the plain types.
        unsafe { result::memcpy_dtoh_sync(values, from) }
            .map_err(|e| failed("a copy from the device (an earlier kernel may have failed)", e))
    }

    /// Makes it all 0.
    pub fn clear(&self) -> Result<(), EngineError> {
        let stream = result::stream::null();
        // SAFETY: the range is this allocation.
        unsafe { result::memset_d8_async(self.at, 0, self.bytes, stream) }.map_err(|e| failed("clearing device memory", e))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = &self.device;
        // SAFETY: allocated by `Device::room`, and by nobody else freed. The driver waits for work that uses it.
        let _ = unsafe { result::free_sync(self.at) };
    }
}
