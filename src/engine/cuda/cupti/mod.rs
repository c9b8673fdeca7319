//! CUPTI: the device's own times of kernels and copies, also inside graphs.
//!
//! An id is pushed around every launch, so that a record says which launch it belongs to; a graph's records also name the node. Nodes get
//! their labels when they are captured, and their instances' by CUPTI's callback about clones. What CUPTI does not say is refused.
//!
//! **Run against the stand-in of `tests/emulator` only.** Layouts and meanings are those of NVIDIA's headers and manual.

mod join;
mod library;
mod records;
mod search;
mod shared;

pub use self::search::CuptiSearch;

use self::join::{Joined, Owner, join};
use self::library::{Library, refused};
use self::records::{CUSTOM, kind};
use self::shared::{NODE_CLONED, NODE_CREATED, RESOURCE, WAYS, Ways, shared};
use super::timer::Tagged;
use crate::engine::EngineError;
use crate::engine::clock::Clock;
use crate::trace::KernelEvent;
use std::collections::HashMap;
use std::ffi::c_void;

/// Whether an error is CUPTI's, not the device's.
pub fn is_of_cupti(error: &EngineError) -> bool {
    matches!(error, EngineError::Device(reason) if reason.starts_with(library::PREFIX))
}

/// The kinds of records that are asked for, besides calls of the driver.
const KINDS: [u32; 4] = [kind::EXTERNAL_CORRELATION, kind::CONCURRENT_KERNEL, kind::MEMCPY, kind::MEMSET];

/// The driver's functions that put kernels and copies into a stream, as CUPTI numbers them (`cupti_driver_cbid.h`): `cuLaunchKernel`,
/// `cuLaunchKernelEx`, `cuLaunchCooperativeKernel`, `cuGraphLaunch`, asynchronous copies to, from and on the device, and `cuMemsetD8Async`.
const LAUNCHES: [u32; 8] = [307, 652, 477, 514, 277, 279, 281, 216];

/// Comparisons of the two clocks; the closest one counts.
const COMPARISONS: usize = 32;

/// What is known of a profiled run when it is over.
#[derive(Debug, Clone, PartialEq)]
pub struct CuptiFacts {
    /// As `cuptiGetVersion` gives it.
    pub version: u32,
    /// Steps whose kernels were recorded.
    pub steps: u64,
    /// Kernels and copies that were launched in them.
    pub launched: u64,
    /// How many of these came without times.
    pub timeless: u64,
    /// How many did not come at all.
    pub missing: u64,
    /// Records that CUPTI says it dropped, in all.
    pub dropped: u64,
    /// Added to CUPTI's times of the first step, so that they are by the steps' clock, ns. Each step has its own.
    pub clock_shift_ns: i64,
    /// How far any of these may be off, ns.
    pub clock_error_ns: i64,
    /// The largest difference of a step's shift from the first, ns.
    pub clock_drift_ns: i64,
    /// What is known to be wrong with this version.
    pub flaw: Option<&'static str>,
}

/// Looks for a CUPTI that could be used, and does not open it: a process should do that once.
///
/// # Errors
/// When there is none, it lacks functions, or it is too old.
pub fn check_cupti() -> Result<(), EngineError> {
    Library::load().map(|_| ())
}

/// What looking for CUPTI and opening it has shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CuptiState {
    /// The library that was loaded: where from, and its version in words.
    pub library: Option<(String, String)>,
    /// Why it cannot be used; `None` when it can.
    pub refusal: Option<String>,
    /// What is known to be wrong with it all the same.
    pub flaw: Option<&'static str>,
}

impl CuptiState {
    /// Opens the profiler as a recording does, and closes it again. A library that hangs hangs this.
    pub fn find() -> Self {
        let reason = |error: EngineError| match error {
            EngineError::Device(reason) => reason.strip_prefix(library::PREFIX).unwrap_or(&reason).to_owned(),
            other => other.to_string(),
        };
        match Library::load() {
            Err(error) => Self { refusal: Some(reason(error)), ..Self::default() },
            Ok(library) => {
                let version = format!("version {} ({})", library.version, library::release(library.version));
                let (path, flaw) = (library.path.clone(), library::flaw(library.version));
                Self { library: Some((path, version)), refusal: Profiler::subscribe(library).err().map(reason), flaw }
            }
        }
    }
}

/// A subscription to CUPTI: one a process.
#[derive(Debug)]
pub(super) struct Profiler {
    library: Library,
    subscriber: *mut c_void,
    /// Whether the current step is recorded, and whether CUPTI's records are switched on.
    recording: bool,
    enabled: bool,
    /// The steps' clock, once it has been compared.
    clock: Option<Clock>,
    next: u64,
    owners: HashMap<u64, Owner>,
    /// Kernels and copies launched since the step began.
    expected: u64,
    /// Nodes captured so far.
    captured: u64,
    facts: CuptiFacts,
}

impl Profiler {
    /// Subscribes; before the device has a context.
    ///
    /// # Errors
    /// When there is no CUPTI, it is too old, another profiler is attached, or there is no permission.
    pub fn open() -> Result<Self, EngineError> {
        Self::subscribe(Library::load()?)
    }

    fn subscribe(library: Library) -> Result<Self, EngineError> {
        let f = library.functions;
        // Nodes of an earlier device are no more.
        *shared() = shared::Shared::default();
        WAYS.get_or_init(|| Ways { next_record: f.next_record, node_id: f.node_id });
        let mut subscriber = std::ptr::null_mut();
        // SAFETY: the callback reads only what CUPTI gives it, and lives as long as the process.
        let subscribed = unsafe { (f.subscribe)(&raw mut subscriber, shared::resource, std::ptr::null_mut()) };
        if subscribed != 0 {
            return Err(library.failure("it takes no subscriber", subscribed));
        }
        let facts = CuptiFacts {
            version: library.version,
            steps: 0,
            launched: 0,
            timeless: 0,
            missing: 0,
            dropped: 0,
            clock_shift_ns: 0,
            clock_error_ns: 0,
            clock_drift_ns: 0,
            flaw: library::flaw(library.version),
        };
        let mut profiler = Self {
            library,
            subscriber,
            recording: false,
            enabled: false,
            clock: None,
            next: 1,
            owners: HashMap::new(),
            expected: 0,
            captured: 0,
            facts,
        };
        for callback in [NODE_CREATED, NODE_CLONED] {
            // SAFETY: the subscriber is the one from above.
            let enabled = unsafe { (f.enable_callback)(1, subscriber, RESOURCE, callback) };
            profiler.done("it does not tell of graphs' nodes", enabled)?;
        }
        // SAFETY: both callbacks live as long as the process.
        let registered = unsafe { (f.register)(shared::request, shared::complete) };
        profiler.done("it takes no buffers", registered)?;
        profiler.enable(true)?;
        Ok(profiler)
    }

    fn done(&self, what: &str, code: u32) -> Result<(), EngineError> {
        if code == 0 { Ok(()) } else { Err(self.library.failure(what, code)) }
    }

    fn enable(&mut self, on: bool) -> Result<(), EngineError> {
        if self.enabled == on {
            return Ok(());
        }
        self.enabled = on;
        let f = self.library.functions;
        let call = if on { f.enable } else { f.disable };
        self.trace_driver(on)?;
        KINDS.into_iter().try_for_each(|kind| {
            // SAFETY: a number by value.
            let switched = unsafe { call(kind) };
            self.done(&format!("records of kind {kind} cannot be switched"), switched)
        })
    }

    /// Switches records of the driver's calls, without which a kernel has no id: of those that launch something where CUPTI can tell them
    /// apart, else of all. Each costs the host time.
    fn trace_driver(&mut self, on: bool) -> Result<(), EngineError> {
        if let Some(one) = self.library.one_driver_function {
            // SAFETY: numbers by value.
            if LAUNCHES.into_iter().all(|function| unsafe { one(function, u8::from(on)) } == 0) {
                return Ok(());
            }
            // The whole kind overrides what was switched one by one.
            self.library.one_driver_function = None;
        }
        let f = self.library.functions;
        // SAFETY: a number by value.
        let switched = unsafe { if on { (f.enable)(kind::DRIVER) } else { (f.disable)(kind::DRIVER) } };
        self.done("records of the driver's calls cannot be switched", switched)
    }

    /// Compares CUPTI's clock, which is the system's and may be slewed, with the steps', which never is: the closest of some looks at both.
    /// Gives what makes CUPTI's times of now the steps'.
    fn align(&mut self, clock: Clock) -> Result<i64, EngineError> {
        let mut best: Option<(i64, i64)> = None;
        for _ in 0..COMPARISONS {
            let (before, mut stamp) = (clock.now_ns(), 0_u64);
            // SAFETY: CUPTI writes one number.
            let asked = unsafe { (self.library.functions.timestamp)(&raw mut stamp) };
            let after = clock.now_ns();
            self.done("it does not tell the time", asked)?;
            let (stamp, error) = (i64::try_from(stamp).unwrap_or(i64::MAX), (after - before) / 2);
            if best.is_none_or(|(_, least)| error < least) {
                best = Some(((before + error).saturating_sub(stamp), error));
            }
        }
        let (shift, error) = best.unwrap_or_default();
        let facts = &mut self.facts;
        facts.clock_error_ns = facts.clock_error_ns.max(error);
        if self.clock.replace(clock).is_none() {
            facts.clock_shift_ns = shift;
        }
        facts.clock_drift_ns = facts.clock_drift_ns.max(shift.saturating_sub(facts.clock_shift_ns).saturating_abs());
        Ok(shift)
    }

    /// Whether the launches from here on are recorded: when there is a clock to bring their times to.
    pub fn record(&mut self, clock: Option<Clock>) -> Result<(), EngineError> {
        let first = clock.is_some() && self.clock.is_none();
        self.recording = clock.is_some();
        self.enable(clock.is_some())?;
        if first {
            // What was launched before, weights that the device made among it, has no ids and is of no step.
            // SAFETY: a number by value; 1 = also buffers that are not full.
            let flushed = unsafe { (self.library.functions.flush)(1) };
            self.done("it gives no records", flushed)?;
            shared().records.clear();
        }
        match clock {
            Some(clock) if first => self.align(clock).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Whether launches are recorded, or were since the step began: a pass that nobody times may come after one that is timed.
    pub fn has_records(&self) -> bool {
        self.recording || self.expected > 0
    }

    /// Around a launch: its records will have the id that is pushed here.
    pub fn before(&mut self) -> Result<(), EngineError> {
        if !self.recording {
            return Ok(());
        }
        // SAFETY: numbers by value.
        let pushed = unsafe { (self.library.functions.push)(CUSTOM, self.next) };
        self.done("it takes no id of a launch", pushed)
    }

    fn after(&mut self, owner: Owner, count: u64) -> Result<(), EngineError> {
        if !self.recording {
            return Ok(());
        }
        let mut last = 0;
        // SAFETY: CUPTI writes one number.
        let popped = unsafe { (self.library.functions.pop)(CUSTOM, &raw mut last) };
        self.done("it gives no id of a launch back", popped)?;
        self.owners.insert(self.next, owner);
        self.next += 1;
        self.expected += count;
        Ok(())
    }

    /// After the launch of one kernel or copy.
    pub fn launched(&mut self, tagged: Tagged) -> Result<(), EngineError> {
        self.after(Owner::One(tagged), 1)
    }

    /// After the launch of a graph of `nodes` kernels and copies.
    pub fn launched_graph(&mut self, nodes: u64) -> Result<(), EngineError> {
        self.after(Owner::Graph, nodes)
    }

    /// A kernel or copy was captured: the node that CUPTI has just told of is it.
    pub fn captured(&mut self, tagged: Tagged) -> Result<(), EngineError> {
        let mut shared = shared();
        let node = shared.created.take().ok_or_else(|| {
            refused(
                "it does not tell the nodes of a graph when they are captured, so their kernels cannot be told apart; use --kernels off",
            )
        })?;
        shared.label(node, tagged);
        self.captured += 1;
        Ok(())
    }

    /// Nodes captured so far.
    pub fn nodes(&self) -> u64 {
        self.captured
    }

    /// The kernels and copies since the step began, in order; all of them must have ended.
    ///
    /// # Errors
    /// When CUPTI does not say what a kernel was launched for.
    pub fn take(&mut self) -> Result<Vec<KernelEvent>, EngineError> {
        if !self.has_records() {
            return Ok(Vec::new());
        }
        // As soon as the step has ended: the clocks are as far apart now as they were in it.
        let shift = match self.clock {
            Some(clock) => self.align(clock)?,
            None => self.facts.clock_shift_ns,
        };
        // SAFETY: a number by value; 1 = also buffers that are not full.
        let flushed = unsafe { (self.library.functions.flush)(1) };
        self.done("it gives no records", flushed)?;
        let mut dropped = 0;
        // SAFETY: no context, the global queue; CUPTI writes one number.
        if unsafe { (self.library.functions.dropped)(std::ptr::null_mut(), 0, &raw mut dropped) } == 0 {
            self.facts.dropped += dropped as u64;
        }
        let mut shared = shared();
        let records = std::mem::take(&mut shared.records);
        self.facts.dropped += std::mem::take(&mut shared.overflow);
        let joined = join(&records, &self.owners, &shared.nodes, shift);
        let Joined { kernels, timeless } = joined
            .map_err(|reason| refused(&format!("{}, version {}: {reason}; use --kernels off", self.library.path, self.library.version)))?;
        let expected = std::mem::take(&mut self.expected);
        self.owners.clear();
        self.facts.steps += 1;
        self.facts.launched += expected;
        self.facts.timeless += timeless;
        self.facts.missing += expected.saturating_sub(kernels.len() as u64 + timeless);
        Ok(kernels)
    }

    /// What is known of the run so far.
    pub fn facts(&self) -> CuptiFacts {
        self.facts.clone()
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        // A version that may stop for ever when records are switched off is spared that at the end.
        if self.facts.flaw.is_none() {
            let _ = self.enable(false);
        }
        // SAFETY: subscribed by `open`, and by nobody else ended.
        let _ = unsafe { (self.library.functions.unsubscribe)(self.subscriber) };
    }
}
