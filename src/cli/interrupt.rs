//! Ctrl-C, SIGTERM and SIGHUP: a recording is asked to end cleanly; everything else ends, without what it was still making.

use super::exit::{Failure, INTERRUPTED};
use crate::trace::temporaries;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The flag of the command that wants to end by itself.
static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Handles signals from now on.
///
/// # Errors
/// When the system does not let them be handled.
pub fn handle() -> Result<(), Failure> {
    ctrlc::set_handler(on_signal).map_err(|e| Failure::Environment(format!("cannot handle Ctrl-C: {e}")))
}

fn on_signal() {
    // The first signal asks, where somebody listens. After the second, what is committed stays readable: a trace is never worse
    // off than after a kill.
    if STOP.get().is_some_and(|stop| !stop.swap(true, Ordering::Relaxed)) {
        return;
    }
    temporaries::remove_all();
    eprintln!("error: interrupted");
    std::process::exit(i32::from(INTERRUPTED));
}

/// The flag that the first signal sets from now on, instead of ending the process.
pub fn stop_flag() -> Arc<AtomicBool> {
    Arc::clone(STOP.get_or_init(Arc::default))
}
