//! Panics of libraries made into values.
//!
//! Some libraries panic on broken files. Where that is known to happen the call is made here, and the
//! panic's message stays off the terminal.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether a panic on this thread is caught and becomes a value.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The result of `call`, or `None` when it panicked. A panic that is caught here prints nothing.
pub fn catch<T>(call: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    QUIET.set(outer);
    result.ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_panic_becomes_none() {
        assert_eq!(super::catch(|| 7), Some(7));
        let broken: Vec<u8> = Vec::new();
        assert_eq!(super::catch(|| broken[std::hint::black_box(3)]), None);
    }
}
