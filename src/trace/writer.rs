//! Writes a trace while it is recorded, on a thread of its own.
//!
//! Every 0.7 s, sooner where the disk is slow, what has come in is committed: part files first, then the manifest that names them,
//! each under a temporary name, synced and renamed. A process killed at any moment leaves the commit before.

use super::KernelEvent;
use super::claim::{self, Claim};
use super::columns::{RequestColumns, RouteColumns, StepColumns, TelemetryColumns};
use super::event::{StepEvent, wrong_parent};
use super::kernel_columns::KernelColumns;
use super::mailbox::Mailbox;
use super::manifest::Manifest;
use super::parts::{Table, io_error};
use super::passes::PassOrder;
use super::telemetry::TelemetrySample;
use super::token_hash::TokenHasher;
use super::version::FORMAT_VERSION;
use super::{Probe, RequestEvent, TraceError, output, schema};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How to write.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// Replace a trace that is already there.
    pub force: bool,
    /// Longest time that an event waits for its commit.
    pub flush_interval: Duration,
    /// Events that may wait for the writer's thread; the engine waits when there are more.
    pub queue: usize,
    /// Whether producers are asked for the times of operations.
    pub kernels: bool,
    /// Whether waits for the writer are the engine's and go into the manifest. An importer's are not.
    pub count_waits: bool,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self { force: false, flush_interval: Duration::from_millis(700), queue: 256, kernels: false, count_waits: true }
    }
}

/// After this long an event should be on disk; a second is what is promised.
const PROMISE: Duration = Duration::from_millis(900);

/// How a recording ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// As planned: everything is in the trace.
    Complete,
    /// Before its time, and why: `interrupted`, ...
    Incomplete(String),
}

/// The reason in the manifest of a trace that is being written.
pub const RECORDING: &str = "recording";

/// A trace that is being written. Dropped without [`TraceWriter::finish`], it is [abandoned](TraceWriter::abandon).
#[derive(Debug)]
pub struct TraceWriter {
    dir: PathBuf,
    facts: Manifest,
    mailbox: Arc<Mailbox<Message>>,
    thread: Option<JoinHandle<Result<Option<Manifest>, TraceError>>>,
    shared: Arc<Shared>,
    last_step: Option<u32>,
    passes: PassOrder,
    kernels_wanted: bool,
    last_kernels: Option<u32>,
}

/// Puts samples of the machine's state into a trace that is being written.
#[derive(Debug, Clone)]
pub struct TelemetrySink(Arc<Mailbox<Message>>);

impl TelemetrySink {
    /// Hands a sample over if there is room for it.
    pub fn offer(&self, sample: TelemetrySample) {
        self.0.offer(Message::Telemetry(Box::new(sample)));
    }
}

#[derive(Debug, Default)]
struct Shared {
    waits: AtomicU64,
    wait_ns: AtomicU64,
    /// Why the thread ended before it was told to.
    failure: Mutex<Option<TraceError>>,
}

#[derive(Debug)]
enum Message {
    Step(Box<StepEvent>),
    Kernels(u32, Vec<KernelEvent>),
    Request(Box<RequestEvent>),
    Telemetry(Box<TelemetrySample>),
    Finish(Box<Manifest>, Ending),
    Abandon(Box<Manifest>, String),
}

impl TraceWriter {
    /// Creates the directory with a first manifest and starts the writer's thread. Of `facts`, the writer
    /// itself sets the version, completeness, hash, tables and waits.
    ///
    /// # Errors
    /// [`TraceError::Exists`] when something is there (with `force`: [`TraceError::NotATrace`] when that is
    /// not a trace), [`TraceError::Io`] when the directory cannot be written.
    pub fn create(dir: &Path, facts: Manifest, options: &WriterOptions) -> Result<Self, TraceError> {
        let shared = Arc::new(Shared::default());
        let store = Store::create(dir, &facts, options, Arc::clone(&shared))?;
        let mailbox = Arc::new(Mailbox::new(options.queue));
        let (inbox, interval) = (Arc::clone(&mailbox), options.flush_interval);
        let run = move || store.run(&inbox, interval);
        let thread =
            std::thread::Builder::new().name("trace-writer".into()).spawn(run).map_err(io_error(dir, "start the writer thread"))?;
        Ok(Self {
            dir: dir.to_owned(),
            facts,
            mailbox,
            thread: Some(thread),
            shared,
            last_step: None,
            passes: PassOrder::default(),
            kernels_wanted: options.kernels,
            last_kernels: None,
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The run's facts, to be completed before [`TraceWriter::finish`] (warnings, measured overhead).
    pub fn facts_mut(&mut self) -> &mut Manifest {
        &mut self.facts
    }

    /// Adds a sample of the machine's state, waiting for room where there is none.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn sample(&mut self, sample: TelemetrySample) -> Result<(), TraceError> {
        self.send(Message::Telemetry(Box::new(sample)))
    }

    /// Where a sampler of the machine's state puts its samples.
    pub fn telemetry(&self) -> TelemetrySink {
        TelemetrySink(Arc::clone(&self.mailbox))
    }

    /// Writes what is left and the last manifest, which it returns. What the trace replaces is gone then, whatever it holds.
    ///
    /// # Errors
    /// [`TraceError::Io`] when it cannot be written; the trace then holds what was committed before.
    pub fn finish(mut self, ending: Ending) -> Result<Manifest, TraceError> {
        let facts = Box::new(self.facts.clone());
        // A closed queue means that the thread has failed: its result says why.
        let _ = self.mailbox.post_urgent(Message::Finish(facts, ending));
        let gone = self.gone();
        self.join()?.ok_or(gone)
    }

    /// Ends a run that failed. With steps, the trace is closed as incomplete and its manifest returned. Without any,
    /// the directory is as it was before [`TraceWriter::create`], a replaced trace included, and there is no manifest.
    ///
    /// # Errors
    /// As [`TraceWriter::finish`].
    pub fn abandon(mut self, reason: String) -> Result<Option<Manifest>, TraceError> {
        let facts = Box::new(self.facts.clone());
        let _ = self.mailbox.post_urgent(Message::Abandon(facts, reason));
        self.join()
    }

    fn gone(&self) -> TraceError {
        TraceError::Io { path: self.dir.clone(), action: "write", source: io::Error::other("the writer thread is gone") }
    }

    fn join(&mut self) -> Result<Option<Manifest>, TraceError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            Some(Err(_)) | None => Err(self.gone()),
        }
    }

    fn send(&mut self, message: Message) -> Result<(), TraceError> {
        if let Ok(waited) = self.mailbox.post(message) {
            if let Some(waited) = waited {
                self.shared.waits.fetch_add(1, Ordering::Relaxed);
                self.shared.wait_ns.fetch_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
            return Ok(());
        }
        let failure = self.shared.failure.lock().ok().and_then(|failure| failure.as_ref().map(copy_of));
        Err(failure.unwrap_or_else(|| self.gone()))
    }

    /// Whether an event fits the trace; columns of unequal length or unordered steps could not be read back.
    fn check(&self, step: &StepEvent) -> Result<(), TraceError> {
        let wrong = |what: String| Err(TraceError::Event { what: format!("step {}: {what}", step.step_id) });
        let rows = step.rows();
        if self.last_step.is_some_and(|last| step.step_id <= last) {
            return wrong("it does not come after the step before".into());
        }
        if rows == 0 || rows > usize::from(u16::MAX) {
            return wrong(format!("it has {rows} rows"));
        }
        if usize::from(step.accepted) >= rows {
            return wrong(format!("it accepts {} drafts in {rows} rows", step.accepted));
        }
        let of_drafts = [&step.draft_probs, &step.draft_confidences];
        if step.parents.as_ref().is_some_and(|p| p.len() != rows) || of_drafts.into_iter().flatten().any(|p| p.len() + 1 != rows) {
            return wrong(format!("parents, draft probabilities or confidences do not match its {rows} rows"));
        }
        if let Some((row, parent)) = step.parents.as_deref().and_then(wrong_parent) {
            return wrong(format!("row {row} continues row {parent}, which is not before it; row 0 has -1"));
        }
        let routes = &step.routes;
        if routes.blocks.is_empty() && routes.ids.is_empty() {
            return Ok(());
        }
        let k = usize::from(self.facts.model.experts_per_token);
        if routes.k != k {
            return wrong(format!("{} experts per row, the model has {k}", routes.k));
        }
        let route_rows: usize = routes.blocks.iter().map(|b| usize::from(b.rows)).sum();
        if routes.ids.len() != route_rows * k || routes.blocks.iter().any(|b| b.first_row.checked_add(b.rows).is_none()) {
            return wrong(format!("{} expert ids in {route_rows} routed rows", routes.ids.len()));
        }
        if self.facts.router_weights && routes.weights.len() != routes.ids.len() {
            return wrong(format!("{} gate weights for {} expert ids", routes.weights.len(), routes.ids.len()));
        }
        match routes.ids.iter().max() {
            Some(&id) if id >= self.facts.model.experts => wrong(format!("expert {id} of {}", self.facts.model.experts)),
            _ => Ok(()),
        }
    }
}

impl Probe for TraceWriter {
    fn wants_weights(&self) -> bool {
        self.facts.router_weights
    }

    fn wants_kernels(&self) -> bool {
        self.kernels_wanted
    }

    fn kernels(&mut self, step_id: u32, kernels: Vec<KernelEvent>) -> Result<(), TraceError> {
        let wrong = |what: &str| Err(TraceError::Event { what: format!("step {step_id}: {what}") });
        if self.last_step.is_none_or(|last| step_id > last) {
            return wrong("its operations come before it");
        }
        if self.last_kernels.is_some_and(|last| step_id <= last) {
            return wrong("its operations do not come after those of the step before");
        }
        if kernels.iter().any(|k| k.end_ns < k.begin_ns) {
            return wrong("an operation ends before it begins");
        }
        self.last_kernels = Some(step_id);
        if kernels.is_empty() { Ok(()) } else { self.send(Message::Kernels(step_id, kernels)) }
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        self.check(&step)?;
        let wrong = |what: String| TraceError::Event { what: format!("step {}: {what}", step.step_id) };
        self.passes.next(step.pass_id, step.request_id).map_err(wrong)?;
        self.last_step = Some(step.step_id);
        self.send(Message::Step(Box::new(step)))
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.send(Message::Request(Box::new(request)))
    }
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        if self.thread.is_some() {
            let abandon = Message::Abandon(Box::new(self.facts.clone()), "the recorder ended without closing the trace".into());
            let _ = self.mailbox.post_urgent(abandon);
            let _ = self.join();
        }
    }
}

/// `io::Error` cannot be cloned; this keeps the code and the text.
fn copy_of(error: &TraceError) -> TraceError {
    match error {
        TraceError::Io { path, action, source } => {
            let source =
                source.raw_os_error().map_or_else(|| io::Error::new(source.kind(), source.to_string()), io::Error::from_raw_os_error);
            TraceError::Io { path: path.clone(), action, source }
        }
        other => TraceError::Event { what: other.to_string() },
    }
}

/// The writer's thread: tables, manifest, hash.
struct Store {
    dir: PathBuf,
    manifest: Manifest,
    requests: Table<RequestColumns>,
    steps: Table<StepColumns>,
    routes: Table<RouteColumns>,
    kernels: Table<KernelColumns>,
    telemetry: Table<TelemetryColumns>,
    hasher: TokenHasher,
    shared: Arc<Shared>,
    claim: Claim,
    count_waits: bool,
    /// Whether a step has come in.
    has_steps: bool,
}

impl Store {
    fn create(dir: &Path, facts: &Manifest, options: &WriterOptions, shared: Arc<Shared>) -> Result<Self, TraceError> {
        let mut manifest = facts.clone();
        manifest.format_version = FORMAT_VERSION.to_string();
        manifest.complete = false;
        manifest.incomplete_reason = Some(RECORDING.into());
        manifest.ended_unix_ns = None;
        manifest.token_hash = None;
        manifest.tables = schema::TABLES.iter().map(|&name| (name.to_owned(), Vec::new())).collect();
        let mut claim = claim::claim(dir, &manifest, options.force)?;
        let k = usize::from(facts.model.experts_per_token);
        let weights = facts.router_weights;
        let tables = || {
            let requests = Table::create(dir, schema::REQUESTS, schema::requests(), RequestColumns::new())?;
            let steps = Table::create(dir, schema::STEPS, schema::steps(facts.host_times), StepColumns::new(facts.host_times))?;
            let routes = Table::create(dir, schema::ROUTES, schema::routes(k, weights), RouteColumns::new(k, weights))?;
            let kernels = Table::create(dir, schema::KERNELS, schema::kernels(), KernelColumns::new())?;
            let telemetry = Table::create(dir, schema::TELEMETRY, schema::telemetry(), TelemetryColumns::new())?;
            output::sync_directory(dir)?;
            Ok((requests, steps, routes, kernels, telemetry))
        };
        let (requests, steps, routes, kernels, telemetry) = tables().inspect_err(|_| claim.undo())?;
        let hasher = TokenHasher::default();
        let (dir, count_waits) = (dir.to_owned(), options.count_waits);
        Ok(Self { dir, manifest, requests, steps, routes, kernels, telemetry, hasher, shared, claim, count_waits, has_steps: false })
    }

    fn run(mut self, inbox: &Mailbox<Message>, interval: Duration) -> Result<Option<Manifest>, TraceError> {
        let _receiving = inbox.receiving();
        self.receive(inbox, interval).inspect_err(|error| self.fail(error))
    }

    fn receive(&mut self, inbox: &Mailbox<Message>, interval: Duration) -> Result<Option<Manifest>, TraceError> {
        // When the oldest uncommitted event has to be on disk.
        let mut due: Option<Instant> = None;
        let mut wait = interval;
        let mut messages = Vec::new();
        loop {
            inbox.collect(&mut messages, due);
            for message in messages.drain(..) {
                due.get_or_insert_with(|| Instant::now() + wait);
                match message {
                    Message::Step(step) => {
                        self.has_steps = true;
                        self.hasher.add(step.request_id, &step.emitted_tokens);
                        self.steps.pending.push(&step);
                        self.routes.pending.push(step.step_id, &step.routes);
                    }
                    Message::Kernels(step_id, kernels) => self.kernels.pending.push(step_id, kernels),
                    Message::Request(request) => self.requests.pending.push(*request),
                    Message::Telemetry(sample) => self.telemetry.pending.push(*sample),
                    Message::Finish(facts, ending) => return self.finish(*facts, ending).map(Some),
                    Message::Abandon(facts, reason) => return self.abandon(*facts, reason),
                }
                if self.is_full() {
                    self.commit(false)?;
                    due = None;
                }
            }
            if due.is_some_and(|due| Instant::now() >= due) {
                let begin = Instant::now();
                self.commit(false)?;
                // A slow disk takes its part of the second: what comes in during a commit waits for the whole of the next.
                let slack = PROMISE.saturating_sub(2 * begin.elapsed());
                wait = interval.min(slack).max(interval / 5);
                due = None;
            }
        }
    }

    /// Closes the trace when it has steps, else gives the directory back.
    fn abandon(&mut self, facts: Manifest, reason: String) -> Result<Option<Manifest>, TraceError> {
        if self.has_steps {
            return self.finish(facts, Ending::Incomplete(reason)).map(Some);
        }
        self.claim.undo();
        Ok(None)
    }

    fn finish(&mut self, facts: Manifest, ending: Ending) -> Result<Manifest, TraceError> {
        let tables = std::mem::take(&mut self.manifest.tables);
        self.manifest = Manifest { tables, ..facts };
        self.manifest.format_version = FORMAT_VERSION.to_string();
        (self.manifest.complete, self.manifest.incomplete_reason, self.manifest.token_hash) = match ending {
            Ending::Complete => (true, None, self.hasher.finish_known()),
            Ending::Incomplete(reason) => (false, Some(reason), None),
        };
        self.manifest.ended_unix_ns.get_or_insert_with(unix_ns);
        self.commit(true)?;
        self.claim.settle();
        Ok(self.manifest.clone())
    }

    /// Parts, then the manifest that names them, then the removal of what they replace.
    fn commit(&mut self, last: bool) -> Result<(), TraceError> {
        let mut obsolete = Vec::new();
        self.routes.flush(last, &mut obsolete)?;
        self.steps.flush(last, &mut obsolete)?;
        self.kernels.flush(last, &mut obsolete)?;
        self.requests.flush(last, &mut obsolete)?;
        self.telemetry.flush(last, &mut obsolete)?;
        let tables = BTreeMap::from([
            (schema::REQUESTS.to_owned(), self.requests.parts()),
            (schema::STEPS.to_owned(), self.steps.parts()),
            (schema::ROUTES.to_owned(), self.routes.parts()),
            (schema::KERNELS.to_owned(), self.kernels.parts()),
            (schema::TELEMETRY.to_owned(), self.telemetry.parts()),
        ]);
        for (name, parts) in &tables {
            if self.manifest.tables.get(name) != Some(parts) {
                output::sync_directory(&self.dir.join(name))?;
            }
        }
        let next = Manifest { tables, ..self.manifest.clone() };
        self.manifest = self.write_manifest(next)?;
        if self.is_kept() {
            self.claim.settle();
        }
        for path in obsolete {
            // A file that stays does not belong to the trace: the manifest does not list it.
            let _ = fs::remove_file(path);
        }
        Ok(())
    }

    /// Whether a table has as much as it may hold back.
    fn is_full(&self) -> bool {
        self.routes.is_full() || self.kernels.is_full() || self.steps.is_full() || self.requests.is_full() || self.telemetry.is_full()
    }

    /// Whether the manifest on disk has a step.
    fn is_kept(&self) -> bool {
        self.manifest.tables.get(schema::STEPS).is_some_and(|parts| !parts.is_empty())
    }

    fn write_manifest(&self, mut manifest: Manifest) -> Result<Manifest, TraceError> {
        if self.count_waits {
            manifest.instrumentation.writer_waits = self.shared.waits.load(Ordering::Relaxed);
            manifest.instrumentation.writer_wait_ns = self.shared.wait_ns.load(Ordering::Relaxed);
        }
        output::write_manifest(&self.dir, &manifest)?;
        Ok(manifest)
    }

    /// Says in the manifest, where it can still be written, why the trace ends here, and to the engine.
    fn fail(&mut self, error: &TraceError) {
        let reason = match error {
            TraceError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => "disk full".to_owned(),
            other => other.to_string(),
        };
        if let Ok(mut failure) = self.shared.failure.lock() {
            *failure = Some(copy_of(error));
        }
        if !self.is_kept() {
            self.claim.undo();
            return;
        }
        // What the manifest does not list takes the room that its last word may need.
        claim::remove_unlisted(&self.dir, &self.manifest);
        // The tables are those of the commit before: `commit` sets them only when it has succeeded.
        let incomplete = Manifest {
            complete: false,
            token_hash: None,
            incomplete_reason: Some(format!("cannot write: {reason}")),
            ..self.manifest.clone()
        };
        let _ = self.write_manifest(incomplete);
    }
}

/// Now, ns since the Unix epoch.
pub(super) fn unix_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}
