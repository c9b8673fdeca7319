//! Times of launches by the device's events: one is recorded after every launch, so that a kernel's time reaches from the end of
//! the one before to its own end. The gap between two launches counts with the second; the times of a pass add up to the pass.

use super::device::failed;
use crate::engine::EngineError;
use crate::engine::clock::Clock;
use crate::trace::{Component, KernelEvent, Module};
use cudarc::driver::{result, sys};
use std::borrow::Cow;

/// What a launch works for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label {
    /// `None` outside layers.
    pub layer: Option<u16>,
    pub component: Component,
    pub module: Module,
}

impl Label {
    /// The component as the trace shows it: everything of the draft module is drafting.
    pub fn shown(&self) -> Component {
        if self.module == Module::Draft { Component::Draft } else { self.component }
    }
}

/// A launch as the trace shows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Launched {
    pub name: &'static str,
    /// `None` of a copy.
    pub grid: Option<[u32; 3]>,
    pub block: u32,
    /// `None` when the driver does not say.
    pub registers: Option<u32>,
    pub shared_bytes: u32,
}

impl Launched {
    /// A copy, by a name of its own.
    pub fn copy(name: &'static str) -> Self {
        Self { name, grid: None, block: 0, registers: None, shared_bytes: 0 }
    }
}

/// A launch and what it works for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tagged {
    pub label: Label,
    pub launched: Launched,
}

/// The events of one pass. Off unless a pass is to be timed: then nothing is recorded.
#[derive(Debug)]
pub(super) struct Timer {
    /// When the first event was recorded, ns since the Unix epoch.
    since: Option<i64>,
    label: Label,
    launches: Vec<Tagged>,
    /// One more than there are launches; kept for the next pass.
    events: Vec<sys::CUevent>,
    /// The stream that the kernels run in.
    stream: sys::CUstream,
}

impl Timer {
    /// A timer of the kernels in `stream`.
    pub fn new(stream: sys::CUstream) -> Self {
        let label = Label { layer: None, component: Component::Other, module: Module::Target };
        Self { since: None, label, launches: Vec::new(), events: Vec::new(), stream }
    }

    /// Whether the pass is timed.
    pub fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// Begins a pass of a module, timed when there is a clock.
    pub fn start(&mut self, module: Module, clock: Option<Clock>) -> Result<(), EngineError> {
        self.launches.clear();
        self.since = None;
        self.label.module = module;
        if let Some(clock) = clock {
            self.record(0)?;
            self.since = Some(clock.now_ns());
        }
        Ok(())
    }

    /// What the next launches work for.
    pub fn label(&mut self, layer: Option<usize>, component: Component) {
        self.label = Label { layer: layer.map(|l| u16::try_from(l).unwrap_or(u16::MAX)), component, module: self.label.module };
    }

    /// What launches work for just now, as a trace shows it.
    pub fn shown(&self) -> Component {
        self.label.shown()
    }

    /// A launch with the label that is in force.
    pub fn tag(&self, launched: Launched) -> Tagged {
        Tagged { label: self.label, launched }
    }

    /// Something was launched. A copy's time counts with the kernel after it.
    pub fn launched(&mut self, launched: Launched) -> Result<(), EngineError> {
        if self.since.is_none() || launched.grid.is_none() {
            return Ok(());
        }
        self.launches.push(self.tag(launched));
        self.record(self.launches.len())
    }

    fn record(&mut self, number: usize) -> Result<(), EngineError> {
        if self.events.len() <= number {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(|e| failed("no event", e))?;
            self.events.push(event);
        }
        // SAFETY: the event was created above or before, and is destroyed with the timer only.
        unsafe { result::event::record(self.events[number], self.stream) }.map_err(|e| failed("recording an event", e))
    }

    /// Ends a pass and gives its launches; waits for them. Empty when it was not timed.
    pub fn finish(&mut self) -> Result<Vec<KernelEvent>, EngineError> {
        let (Some(since), count) = (self.since.take(), self.launches.len()) else { return Ok(Vec::new()) };
        // SAFETY: all of these events have been recorded in this pass.
        unsafe { result::event::synchronize(self.events[count]) }.map_err(|e| failed("waiting for a pass", e))?;
        let mut begin = since;
        let mut kernels = Vec::with_capacity(count);
        for (number, Tagged { label, launched }) in self.launches.drain(..).enumerate() {
            // SAFETY: as above.
            let elapsed = unsafe { result::event::elapsed(self.events[0], self.events[number + 1]) };
            let ms = elapsed.map_err(|e| failed("the time of an event", e))?;
            let end = since.saturating_add((f64::from(ms) * 1e6) as i64).max(begin);
            kernels.push(KernelEvent {
                layer: label.layer,
                module: label.module,
                component: label.shown(),
                name: Cow::Borrowed(launched.name),
                stream: Some(0),
                begin_ns: begin,
                end_ns: end,
                correlation_id: None,
                graph_node_id: None,
                grid: launched.grid,
                block: Some([launched.block, 1, 1]),
                registers: launched.registers,
                shared_bytes: Some(launched.shared_bytes),
            });
            begin = end;
        }
        Ok(kernels)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        for event in self.events.drain(..) {
            // SAFETY: created by this timer, which nobody else destroys them for.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
