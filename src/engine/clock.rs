//! Time stamps that never go backwards and can still be compared with the system's clock.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A monotonic clock, tied to the Unix epoch once at its creation.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
    start_unix_ns: i64,
}

impl Clock {
    /// A clock that agrees with the system's clock now.
    pub fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { start: Instant::now(), start_unix_ns: i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX) }
    }

    /// Now, ns since the Unix epoch.
    pub fn now_ns(&self) -> i64 {
        self.start_unix_ns.saturating_add(i64::try_from(self.start.elapsed().as_nanos()).unwrap_or(i64::MAX))
    }

    /// When the clock was created, ns since the Unix epoch.
    pub fn started_ns(&self) -> i64 {
        self.start_unix_ns
    }
}
