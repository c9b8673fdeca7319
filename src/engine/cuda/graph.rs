//! Passes as CUDA graphs: captured once per shape, then launched as a whole.
//!
//! What changes from pass to pass (tokens, position, how many rows were kept) is read from device memory, to which the graph's first
//! node copies it; everything else that a launch depends on is the shape. The first pass of a shape is launched one by one, which loads
//! its kernels: loading one is not allowed while a stream is captured. Where the driver refuses a capture, passes stay as they are.

use super::cupti::is_of_cupti;
use super::device::{Device, failed};
use crate::engine::EngineError;
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;

/// Graphs of one timeline; shapes beyond these are launched one by one. Each holds some hundred nodes of host and device memory.
const MOST_GRAPHS: usize = 256;

/// What became of graphs on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GraphUse {
    /// Shapes that were captured.
    pub captured: u32,
    /// Launches of a whole graph.
    pub launches: u64,
    /// Why the driver refused a capture, if it did.
    pub refused: Option<String>,
}

/// A graph that can be launched.
#[derive(Debug)]
struct Executable {
    handle: sys::CUgraphExec,
    /// Kernels and copies, when they are profiled.
    nodes: u64,
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture`, and by nobody else destroyed; a running launch is finished first by the driver.
        let _ = unsafe { result::graph::exec_destroy(self.handle) };
    }
}

/// The graphs of one timeline, by shape.
#[derive(Debug)]
pub(super) struct Graphs<S> {
    /// `None`: seen once, not captured yet.
    known: HashMap<S, Option<Executable>>,
    /// After the graphs: these need its context.
    device: Rc<Device>,
}

impl<S: Eq + Hash> Graphs<S> {
    /// No graphs.
    pub fn new(device: &Rc<Device>) -> Self {
        Self { known: HashMap::new(), device: Rc::clone(device) }
    }

    /// Does `work`, which only puts work of this shape into the device's stream, at once or by its graph.
    pub fn run(&mut self, shape: S, work: impl Fn() -> Result<(), EngineError>) -> Result<(), EngineError> {
        if !self.device.takes_graphs() {
            return work();
        }
        let full = self.known.len() >= MOST_GRAPHS;
        match self.known.get_mut(&shape) {
            None if full => work(),
            None => {
                self.known.insert(shape, None);
                work()
            }
            Some(Some(graph)) => launch(&self.device, graph),
            Some(empty) => match capture(&self.device, &work) {
                Ok(graph) => launch(&self.device, empty.insert(graph)),
                Err(error) if is_of_cupti(&error) => Err(error),
                Err(EngineError::Device(reason)) => {
                    self.device.graphs.borrow_mut().refused = Some(reason);
                    work()
                }
                Err(other) => Err(other),
            },
        }
    }
}

fn capture(device: &Device, work: impl Fn() -> Result<(), EngineError>) -> Result<Executable, EngineError> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is the device's own, and only this thread puts work into it.
    unsafe { result::stream::begin_capture(device.stream, mode) }.map_err(|e| failed("a stream cannot be captured", e))?;
    let before = device.captured_nodes();
    device.capturing.set(true);
    let done = work();
    device.capturing.set(false);
    // SAFETY: the capture was begun above. It ends also when the work has failed.
    let ended = unsafe { result::stream::end_capture(device.stream) }.map_err(|e| failed("a capture fails", e));
    if let (Err(_), Ok(graph)) = (&done, &ended) {
        // SAFETY: the graph was just made, and is not used.
        let _ = unsafe { result::graph::destroy(*graph) };
    }
    done?;
    let graph = ended?;
    let mut executable = std::ptr::null_mut();
    // SAFETY: the graph was just made; it is no longer needed once it is instantiated.
    let made = unsafe {
        let made = sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).result();
        let _ = result::graph::destroy(graph);
        made
    };
    made.map_err(|e| failed("a graph cannot be instantiated", e))?;
    device.graphs.borrow_mut().captured += 1;
    Ok(Executable { handle: executable, nodes: device.captured_nodes() - before })
}

fn launch(device: &Device, graph: &Executable) -> Result<(), EngineError> {
    device.launch_graph(graph.nodes, || {
        // SAFETY: the executable lives as long as its timeline, which waits for every pass.
        unsafe { result::graph::launch(graph.handle, device.stream) }.map_err(|e| failed("a graph", e))
    })?;
    device.graphs.borrow_mut().launches += 1;
    Ok(())
}
