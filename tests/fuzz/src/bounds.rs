//! What an input may take: inputs are of at most some hundred KB, so whatever takes this much believes what they claim.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Bytes in one piece. A deflated member may stand for a thousand times its size.
const MOST_AT_ONCE: usize = 160 << 20;
/// Bytes in all.
const MOST_ALIVE: usize = 512 << 20;
/// Seconds of CPU.
pub const MOST_SECONDS: f64 = 5.0;

static ALIVE: AtomicUsize = AtomicUsize::new(0);
static REPORTED: AtomicBool = AtomicBool::new(false);

struct Bounded;

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

fn count(size: usize) {
    let alive = ALIVE.fetch_add(size, Relaxed) + size;
    if (size > MOST_AT_ONCE || alive > MOST_ALIVE) && !REPORTED.swap(true, Relaxed) {
        eprintln!("an allocation of {size} bytes, {alive} in all\n{}", Backtrace::force_capture());
        std::process::abort();
    }
}

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(old, layout) }
    }
}

unsafe extern "C" {
    /// The process's CPU time, in millionths of a second where POSIX is.
    safe fn clock() -> std::ffi::c_long;
}

/// CPU seconds of the process. A wall clock would count other programs' work, and pauses.
pub fn cpu_seconds() -> f64 {
    clock() as f64 / 1e6
}
