//! What CUPTI calls back, on its own threads or in the middle of a driver's call: full buffers, and nodes of graphs that are made or
//! cloned. Nothing here may panic, for the caller is foreign.

use super::records::{self, Record};
use crate::engine::cuda::timer::Tagged;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of a buffer, and of all buffers that CUPTI may hold at a time.
const BUFFER: usize = 1 << 20;
const MOST_BUFFERS: usize = 64;
/// Records of one step that are kept; a step has some thousand.
const MOST_RECORDS: usize = 4 << 20;
/// Labelled nodes of all graphs that are kept.
const MOST_NODES: usize = 4 << 20;

/// CUPTI's domain and numbers of callbacks about graphs' nodes (`CUPTI_CB_DOMAIN_RESOURCE`).
pub(super) const RESOURCE: u32 = 3;
pub(super) const NODE_CREATED: u32 = 13;
pub(super) const NODE_CLONED: u32 = 20;

/// The functions that a callback calls itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    pub next_record: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> u32,
    pub node_id: unsafe extern "C" fn(*mut c_void, *mut u64) -> u32,
}

pub(super) static WAYS: OnceLock<Ways> = OnceLock::new();

/// What has been called back so far.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub records: Vec<Record>,
    /// Records that there was no room for.
    pub overflow: u64,
    /// Buffers that CUPTI holds.
    buffers: usize,
    /// The node that was created last and has no label yet.
    pub created: Option<u64>,
    /// What each node is, of captured graphs and of their instances.
    pub nodes: HashMap<u64, Tagged>,
}

static SHARED: LazyLock<Mutex<Shared>> = LazyLock::new(Mutex::default);

pub(super) fn shared() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Says what a node is.
    pub fn label(&mut self, node: u64, tagged: Tagged) {
        if self.nodes.len() < MOST_NODES {
            self.nodes.insert(node, tagged);
        }
    }
}

fn layout() -> Option<Layout> {
    Layout::from_size_align(BUFFER, 8).ok()
}

/// Gives CUPTI a buffer; none when it holds too many, and then it counts what it drops.
pub(super) unsafe extern "C" fn request(buffer: *mut *mut u8, size: *mut usize, most_records: *mut usize) {
    let mut given = std::ptr::null_mut();
    if let Some(layout) = layout() {
        let mut shared = shared();
        if shared.buffers < MOST_BUFFERS {
            // SAFETY: the layout has a size.
            given = unsafe { alloc_zeroed(layout) };
            shared.buffers += usize::from(!given.is_null());
        }
    }
    // SAFETY: CUPTI gives places for all three.
    unsafe {
        *buffer = given;
        *size = if given.is_null() { 0 } else { BUFFER };
        *most_records = 0;
    }
}

/// Takes a buffer back, with `valid` bytes of records in it.
pub(super) unsafe extern "C" fn complete(_context: *mut c_void, _stream: u32, buffer: *mut u8, _size: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    let valid = valid.min(BUFFER);
    let mut shared = shared();
    if let Some(ways) = WAYS.get() {
        let mut record: *mut u8 = std::ptr::null_mut();
        // SAFETY: CUPTI steps through its own buffer, and says when it ends.
        while unsafe { (ways.next_record)(buffer, valid, &raw mut record) } == 0 {
            let Some(offset) = (record as usize).checked_sub(buffer as usize).filter(|offset| *offset < valid) else { break };
            // SAFETY: the rest of the buffer that CUPTI has filled.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.add(offset), valid - offset) };
            match records::read(bytes) {
                Some(_) if shared.records.len() >= MOST_RECORDS => shared.overflow += 1,
                Some(record) => shared.records.push(record),
                None => {}
            }
        }
    }
    shared.buffers = shared.buffers.saturating_sub(1);
    if let Some(layout) = layout() {
        // SAFETY: `request` allocated it with this layout.
        unsafe { dealloc(buffer, layout) };
    }
}

/// `CUpti_ResourceData`.
#[repr(C)]
struct ResourceData {
    context: *mut c_void,
    handle: *mut c_void,
    descriptor: *const GraphData,
}

/// The beginning of `CUpti_GraphData`.
#[repr(C)]
struct GraphData {
    graph: *mut c_void,
    original_graph: *mut c_void,
    node: *mut c_void,
    original_node: *mut c_void,
}

/// A node was made or cloned.
pub(super) unsafe extern "C" fn resource(_user: *mut c_void, domain: u32, id: u32, data: *const c_void) {
    let Some(ways) = WAYS.get().filter(|_| domain == RESOURCE && !data.is_null() && (id == NODE_CREATED || id == NODE_CLONED)) else {
        return;
    };
    // SAFETY: of these two callbacks the data are a resource's, and its descriptor a graph's.
    let (node, original) = unsafe {
        let descriptor = (*data.cast::<ResourceData>()).descriptor;
        if descriptor.is_null() {
            return;
        }
        ((*descriptor).node, (*descriptor).original_node)
    };
    let number = |node: *mut c_void| {
        let mut id = 0;
        // SAFETY: the node is one that CUPTI has just named.
        (!node.is_null() && unsafe { (ways.node_id)(node, &raw mut id) } == 0).then_some(id)
    };
    let (made, from) = (number(node), if id == NODE_CLONED { number(original) } else { None });
    let mut shared = shared();
    match (made, from) {
        (Some(made), Some(from)) => {
            if let Some(tagged) = shared.nodes.get(&from).copied() {
                shared.label(made, tagged);
            }
        }
        (made, _) if id == NODE_CREATED => shared.created = made,
        _ => {}
    }
}
