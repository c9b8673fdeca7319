//! One kernel launch: a name, a grid, and arguments by value.

use super::device::{Device, failed};
use super::long_ops::Tiles;
use super::matrix::{RawMatrix, Strides};
use super::moved::Moved;
use super::ops::{Delta, Heads, KdaRows, Plan, RawProjections};
use super::timer::Launched;
use crate::engine::EngineError;
use cudarc::driver::result;
use std::ffi::c_void;

/// Types that a kernel takes by value, with the layout that it has in the kernels' sources.
pub(super) trait Parameter: Copy {}
impl Parameter for u64 {}
impl Parameter for i32 {}
impl Parameter for f32 {}
impl Parameter for f64 {}
impl Parameter for RawMatrix {}
impl Parameter for RawProjections {}
impl Parameter for Strides {}
impl Parameter for Plan {}
impl Parameter for Tiles {}
impl Parameter for KdaRows {}
impl Parameter for Delta {}
impl Parameter for Heads {}

/// A launch that is being put together. Arguments must be those of the kernel, in its order: only `ops`, `long_ops`, `block_ops` and `choice_ops` make launches.
pub(super) struct Launch<'d> {
    device: &'d Device,
    name: &'static str,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    moved: Option<Moved>,
    /// Arguments one after the other, each on a border of 8 bytes, and where each begins.
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl<'d> Launch<'d> {
    /// A launch of `name` with blocks of `block` threads.
    pub fn new(device: &'d Device, name: &'static str, grid: [usize; 3], block: u32) -> Self {
        let grid = grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Self { device, name, grid, block, shared: 0, moved: None, words: Vec::with_capacity(32), starts: Vec::with_capacity(20) }
    }

    /// Dynamic shared memory of a block, in bytes.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = u32::try_from(bytes).unwrap_or(u32::MAX);
        self
    }

    /// What it has to move.
    pub fn moves(mut self, moved: Moved) -> Self {
        self.moved = Some(moved);
        self
    }

    /// The next argument.
    pub fn arg<T: Parameter>(mut self, value: T) -> Self {
        let start = self.words.len();
        self.starts.push(start);
        self.words.resize(start + size_of::<T>().div_ceil(8), 0);
        // SAFETY: the words have room for the value's bytes, and no type here is aligned to more than 8.
        unsafe { self.words.as_mut_ptr().add(start).cast::<T>().write(value) };
        self
    }

    /// A number that the kernels take as `int`.
    pub fn int(self, value: usize) -> Self {
        self.arg(i32::try_from(value).unwrap_or(i32::MAX))
    }

    /// Starts it.
    pub fn run(mut self) -> Result<(), EngineError> {
        let function = self.device.function(self.name)?;
        let words = self.words.as_mut_ptr();
        // SAFETY: every start is inside the words.
        let mut pointers: Vec<*mut c_void> = self.starts.iter().map(|s| unsafe { words.add(*s).cast() }).collect();
        let [x, y, z] = self.grid;
        let launched = Launched {
            name: self.name,
            grid: Some(self.grid),
            block: self.block,
            registers: function.registers,
            shared_bytes: function.shared_bytes.saturating_add(self.shared),
        };
        self.device.note(self.name, self.moved);
        let (block, stream) = ((self.block, 1, 1), self.device.stream);
        self.device.launch(launched, || {
            // SAFETY: `ops` gives each kernel the parameters that its source declares; the driver copies them before it returns.
            let launched = unsafe { result::launch_kernel(function.handle, (x, y, z), block, self.shared, stream, &mut pointers) };
            launched.map_err(|e| failed(&format!("kernel {}", self.name), e))
        })
    }
}
