//! The device's time of a step: an event before each pass and one after it, always, whether kernels are timed or not and by what.

use super::device::failed;
use super::timer::{elapsed_ns, new_event, record};
use crate::engine::EngineError;
use cudarc::driver::{result, sys};

/// The passes since the last [`Spans::take`].
#[derive(Debug)]
pub(super) struct Spans {
    /// Two a pass, kept for the next step.
    events: Vec<sys::CUevent>,
    /// Events that were recorded: an odd number while a pass is open.
    used: usize,
    /// Whether the last of them is of what nobody waits for in its step.
    late: bool,
    stream: sys::CUstream,
}

impl Spans {
    /// No passes in `stream`.
    pub fn new(stream: sys::CUstream) -> Self {
        Self { events: Vec::new(), used: 0, late: false, stream }
    }

    fn record(&mut self) -> Result<(), EngineError> {
        if self.events.len() == self.used {
            self.events.push(new_event()?);
        }
        record(self.events[self.used], self.stream)?;
        self.used += 1;
        Ok(())
    }

    /// A pass begins; one that is open ends.
    pub fn begin(&mut self) -> Result<(), EngineError> {
        self.end()?;
        self.late = false;
        self.record()
    }

    /// What has begun is waited for in the next step only, whose time it is part of unless the device was waited for again.
    pub fn is_late(&mut self) {
        self.late = true;
    }

    /// The pass that is open ends, if one is.
    pub fn end(&mut self) -> Result<(), EngineError> {
        if self.used.is_multiple_of(2) { Ok(()) } else { self.record() }
    }

    /// The sum over the passes of the time between their two events, ns; `None` without passes. Waits for the last, unless all was `waited`
    /// for but what is late: that is left for the next step, as the next passes are.
    pub fn take(&mut self, waited: bool) -> Result<Option<i64>, EngineError> {
        self.end()?;
        let used = std::mem::take(&mut self.used);
        let Some(last) = used.checked_sub(1) else { return Ok(None) };
        if !waited {
            // SAFETY: recorded above or before.
            unsafe { result::event::synchronize(self.events[last]) }.map_err(|e| failed("waiting for a step", e))?;
        }
        let left = if self.late && waited { 2 } else { 0 };
        let mut sum = None;
        for pair in self.events[..used - left].chunks_exact(2) {
            sum = Some(sum.unwrap_or(0_i64).saturating_add(elapsed_ns(pair[0], pair[1])?));
        }
        if left > 0 {
            self.events[..used].rotate_right(left);
            self.used = left;
        }
        Ok(sum)
    }

    /// Forgets the passes so far.
    pub fn forget(&mut self) {
        (self.used, self.late) = (0, false);
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        for event in self.events.drain(..) {
            // SAFETY: created by this, and by nobody else destroyed.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
