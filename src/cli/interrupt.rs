//! Ctrl-C: the first one asks the recording to end cleanly, the second one ends the process.

use super::exit::{Failure, INTERRUPTED};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The flag that Ctrl-C (or SIGTERM) sets. To be called once per process.
///
/// # Errors
/// When the system does not let the signal be handled.
pub fn stop_flag() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    let on_signal = move || {
        if set.swap(true, Ordering::Relaxed) {
            // What is committed stays readable; a trace is never worse off than after a kill.
            std::process::exit(i32::from(INTERRUPTED));
        }
    };
    ctrlc::set_handler(on_signal).map_err(|e| Failure::Environment(format!("cannot handle Ctrl-C: {e}")))?;
    Ok(flag)
}
