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

/// What an event was recorded after.
#[derive(Debug, Clone, Copy)]
enum Mark {
    /// What came before a pass: its first launch begins here.
    Begin,
    Launch(Tagged),
}

/// The events of the passes since the last [`Timer::finish`]. Off unless they are to be timed: then nothing is recorded.
#[derive(Debug)]
pub(super) struct Timer {
    /// When the first event was recorded, ns since the Unix epoch.
    since: Option<i64>,
    label: Label,
    marks: Vec<Mark>,
    /// At least as many as there are marks; kept for the next passes.
    events: Vec<sys::CUevent>,
    /// The stream that the kernels run in.
    stream: sys::CUstream,
}

impl Timer {
    /// A timer of the kernels in `stream`.
    pub fn new(stream: sys::CUstream) -> Self {
        let label = Label { layer: None, component: Component::Other, module: Module::Target };
        Self { since: None, label, marks: Vec::new(), events: Vec::new(), stream }
    }

    /// Whether passes are timed.
    pub fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// Begins a pass of a module, timed when there is a clock; passes before it that were not finished stay.
    pub fn start(&mut self, module: Module, clock: Option<Clock>) -> Result<(), EngineError> {
        self.label.module = module;
        let Some(clock) = clock else {
            self.marks.clear();
            self.since = None;
            return Ok(());
        };
        self.mark(Mark::Begin)?;
        self.since.get_or_insert_with(|| clock.now_ns());
        Ok(())
    }

    /// Whose launches the next ones are.
    pub fn of_module(&mut self, module: Module) {
        self.label.module = module;
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

    /// Something was launched.
    pub fn launched(&mut self, launched: Launched) -> Result<(), EngineError> {
        if self.since.is_none() {
            return Ok(());
        }
        self.mark(Mark::Launch(self.tag(launched)))
    }

    fn mark(&mut self, mark: Mark) -> Result<(), EngineError> {
        let number = self.marks.len();
        if self.events.len() <= number {
            self.events.push(new_event()?);
        }
        self.marks.push(mark);
        record(self.events[number], self.stream)
    }

    /// Ends the passes and gives their launches; waits for them. Empty when they were not timed.
    pub fn finish(&mut self) -> Result<Vec<KernelEvent>, EngineError> {
        let Some(since) = self.since.take() else { return Ok(Vec::new()) };
        let Some(last) = self.marks.len().checked_sub(1) else { return Ok(Vec::new()) };
        // SAFETY: all of these events have been recorded in these passes.
        unsafe { result::event::synchronize(self.events[last]) }.map_err(|e| failed("waiting for a pass", e))?;
        let mut begin = since;
        let mut kernels = Vec::with_capacity(last);
        for (number, mark) in self.marks.drain(..).enumerate() {
            let end = since.saturating_add(elapsed_ns(self.events[0], self.events[number])?).max(begin);
            if let Mark::Launch(Tagged { label, launched }) = mark {
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
                    block: launched.grid.map(|_| [launched.block, 1, 1]),
                    registers: launched.registers,
                    shared_bytes: launched.grid.map(|_| launched.shared_bytes),
                });
            }
            begin = end;
        }
        Ok(kernels)
    }
}

/// An event that has a time.
pub(super) fn new_event() -> Result<sys::CUevent, EngineError> {
    result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(|e| failed("no event", e))
}

/// Records an event of [`new_event`] in a stream.
pub(super) fn record(event: sys::CUevent, stream: sys::CUstream) -> Result<(), EngineError> {
    // SAFETY: the event was created and is destroyed by its owner only, with the stream's device.
    unsafe { result::event::record(event, stream) }.map_err(|e| failed("recording an event", e))
}

/// ns between two events that have been recorded and waited for.
pub(super) fn elapsed_ns(begin: sys::CUevent, end: sys::CUevent) -> Result<i64, EngineError> {
    // SAFETY: as above.
    let ms = unsafe { result::event::elapsed(begin, end) }.map_err(|e| failed("the time of an event", e))?;
    Ok((f64::from(ms) * 1e6).round() as i64)
}

impl Drop for Timer {
    fn drop(&mut self) {
        for event in self.events.drain(..) {
            // SAFETY: created by this timer, which nobody else destroys them for.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
