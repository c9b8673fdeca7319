//! Weights on their way to the device: through two page-locked buffers, of which the host fills one while the other is copied. An event
//! in each tells when its copies are done.

use super::buffer::{Buffer, Plain};
use super::device::{Device, failed};
use super::pinned::Pinned;
use super::plan::MemoryPlan;
use super::timer::{new_event, record};
use crate::engine::EngineError;
use crate::engine::made::Recipe;
use cudarc::driver::{result, sys};
use std::cell::RefCell;
use std::mem::size_of_val;
use std::rc::Rc;
use std::time::Instant;

/// A buffer has this part of the weights...
const PART: usize = 16;
/// ...but not more bytes, which take longer to copy than a copy takes to start...
const MOST: usize = 32 << 20;
/// ...and not fewer.
const LEAST: usize = 64 << 10;
/// Where copies may begin in a buffer.
const ALIGN: usize = 64;

/// What is told while a model is brought to a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Opening {
    /// What the run needs of the device's memory; it fits, and nothing has been loaded.
    Planned(MemoryPlan),
    /// Weights are on their way.
    Loading(Loading),
}

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loading {
    /// Bytes that have been sent, or are made by the device.
    pub done: usize,
    /// Bytes of all weights.
    pub total: usize,
    /// Bytes sent since loading began, 10^9 a second, with what it takes to read them; `None` where the device makes some of the weights, and of
    /// an emulated device.
    pub gb_per_s: Option<f64>,
}

/// Page-locked bytes that bringing `weights` bytes of weights takes.
pub(super) fn planned_bytes(weights: usize) -> usize {
    2 * buffer_bytes(weights)
}

fn buffer_bytes(weights: usize) -> usize {
    (weights / PART).clamp(LEAST, MOST).next_multiple_of(ALIGN)
}

/// Brings weights to a device.
pub struct Upload<'t> {
    device: Rc<Device>,
    slots: [Slot; 2],
    /// Bytes of a slot's buffer.
    room: usize,
    total: usize,
    begin: Instant,
    now: RefCell<Now>,
    told: RefCell<&'t mut dyn FnMut(Opening)>,
}

/// A page-locked buffer, and the event behind its last copy.
struct Slot {
    device: Rc<Device>,
    pinned: Pinned,
    event: sys::CUevent,
}

#[derive(Debug, Default)]
struct Now {
    /// The slot that is being filled.
    slot: usize,
    /// Bytes of it that are.
    filled: usize,
    /// Whether a slot's event has been recorded and not been waited for.
    under_way: [bool; 2],
    sent: usize,
    made: usize,
}

impl Slot {
    fn new(device: &Rc<Device>, bytes: usize) -> Result<Self, EngineError> {
        let pinned = Pinned::new(device, bytes)?;
        Ok(Self { device: Rc::clone(device), pinned, event: new_event()? })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Copies out of the buffer may be under way.
        let _ = self.device.wait();
        // SAFETY: created by `Slot::new`, and by nobody else destroyed.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

impl<'t> Upload<'t> {
    /// Buffers for `total` bytes of weights; `told` hears of every tensor.
    ///
    /// # Errors
    /// [`EngineError::Device`] when there is no page-locked memory for them.
    pub fn new(device: &Rc<Device>, total: usize, told: &'t mut dyn FnMut(Opening)) -> Result<Self, EngineError> {
        let room = buffer_bytes(total);
        let slots = [Slot::new(device, room)?, Slot::new(device, room)?];
        let (now, told) = (RefCell::default(), RefCell::new(told));
        Ok(Self { device: Rc::clone(device), slots, room, total, begin: Instant::now(), now, told })
    }

    pub(super) fn device(&self) -> &Rc<Device> {
        &self.device
    }

    /// A copy of `values`. It is there for what is put into the stream from here on.
    pub(super) fn upload<T: Plain>(&self, values: &[T]) -> Result<Buffer, EngineError> {
        let buffer = self.device.room(size_of_val(values))?;
        self.write(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// Copies `values` to byte `offset` of `to`; they have been read when this returns.
    pub(super) fn write<T: Plain>(&self, to: &Buffer, offset: usize, values: &[T]) -> Result<(), EngineError> {
        let mut at = to.inside(offset, size_of_val(values))?;
        // SAFETY: plain types are their bytes.
        let mut rest = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        let mut now = self.now.borrow_mut();
        while !rest.is_empty() {
            if now.filled == self.room {
                self.turn(&mut now)?;
            }
            let (piece, after) = rest.split_at(rest.len().min(self.room - now.filled));
            let pinned = &self.slots[now.slot].pinned;
            pinned.put_by_threads(now.filled, piece)?;
            pinned.send_to(now.filled, piece.len(), at)?;
            now.filled = (now.filled + piece.len()).next_multiple_of(ALIGN).min(self.room);
            now.sent += piece.len();
            at += piece.len() as u64;
            rest = after;
            drop(now);
            self.tell();
            now = self.now.borrow_mut();
        }
        Ok(())
    }

    /// Has the device make bytes from byte `offset` of `to` on.
    pub(super) fn fill(&self, to: &Buffer, offset: usize, recipe: &Recipe) -> Result<(), EngineError> {
        to.fill(offset, recipe)?;
        self.now.borrow_mut().made += recipe.bytes;
        self.tell();
        Ok(())
    }

    /// Waits for what was sent and made.
    pub(super) fn finish(&self) -> Result<(), EngineError> {
        self.device.wait()
    }

    /// The slot is full: the next bytes go to the other one, when its copies are done.
    fn turn(&self, now: &mut Now) -> Result<(), EngineError> {
        record(self.slots[now.slot].event, self.device.stream)?;
        now.under_way[now.slot] = true;
        now.slot = 1 - now.slot;
        now.filled = 0;
        if std::mem::take(&mut now.under_way[now.slot]) {
            // SAFETY: recorded above, a turn ago.
            let waited = unsafe { result::event::synchronize(self.slots[now.slot].event) };
            waited.map_err(|e| failed("waiting for weights on their way to the device", e))?;
        }
        Ok(())
    }

    fn tell(&self) {
        let (sent, made) = {
            let now = self.now.borrow();
            (now.sent, now.made)
        };
        let seconds = self.begin.elapsed().as_secs_f64();
        let measured = made == 0 && seconds > 0.0 && !self.device.is_emulated();
        let gb_per_s = measured.then(|| sent as f64 / seconds / 1e9);
        let loading = Loading { done: (sent + made).min(self.total), total: self.total, gb_per_s };
        (self.told.borrow_mut())(Opening::Loading(loading));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_a_part_of_the_weights_within_limits() {
        assert_eq!(buffer_bytes(0), LEAST);
        assert_eq!(buffer_bytes(16 << 20), 1 << 20);
        assert_eq!(buffer_bytes(16_000_100) % ALIGN, 0);
        assert_eq!(planned_bytes(130 << 30), 64 << 20);
    }
}
