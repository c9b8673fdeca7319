//! The file that is written: events in order of time.

use super::Written;
use crate::export::{ExportError, jsonl};
use crate::trace::Trace;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::Write;

/// An event that waits for its turn: by time, the longer slice first, then as it came.
type Waiting = Reverse<(i64, Reverse<i64>, u64, String)>;

/// The file that is written.
pub(super) struct Page<'a> {
    out: &'a mut dyn Write,
    waiting: BinaryHeap<Waiting>,
    origin: i64,
    sequence: u64,
    events: u64,
    bytes: u64,
}

impl<'a> Page<'a> {
    pub(super) fn new(out: &'a mut dyn Write, origin: i64) -> Self {
        Self { out, waiting: BinaryHeap::new(), origin, sequence: 0, events: 0, bytes: 0 }
    }

    fn put(&mut self, text: &str) -> Result<(), ExportError> {
        self.bytes += text.len() as u64;
        self.out.write_all(text.as_bytes()).map_err(ExportError::Output)
    }

    pub(super) fn open(&mut self, trace: &Trace) -> Result<(), ExportError> {
        let m = trace.manifest();
        let kernels = if m.emulated { "an emulated device's kernels have no times and are left out" } else { "of kernels the device's" };
        let facts = json!({
            "trace": trace.dir().file_name().map(|n| n.to_string_lossy()),
            "model": m.model.name,
            "drafter": m.drafter.kind,
            "engine": m.engine,
            "device": format!("{} {}", m.device.kind, m.device.name),
            "emulated": m.emulated,
            "origin_unix_ns": self.origin,
            "times": format!("host clock, {kernels}; rows are not timed one by one and span their pass, as layers without operations do"),
            "written_by": concat!("specprof ", env!("CARGO_PKG_VERSION")),
            "everything": format!("specprof export --format jsonl gives all rows ({})", jsonl::FORMAT),
        });
        self.put(&format!("{{\"displayTimeUnit\":\"ns\",\"otherData\":{facts},\"traceEvents\":["))
    }

    fn event(&mut self, text: &str) -> Result<(), ExportError> {
        let separator = if self.events == 0 { "\n" } else { ",\n" };
        self.events += 1;
        self.put(separator)?;
        self.put(text)
    }

    pub(super) fn meta(&mut self, pid: u32, tid: u32, name: &str, args: Value) -> Result<(), ExportError> {
        self.event(&json!({ "ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args }).to_string())
    }

    /// Microseconds since the beginning, exact to the nanosecond.
    fn micros(&self, ns: i64) -> String {
        let since = ns.saturating_sub(self.origin).max(0);
        format!("{}.{:03}", since / 1000, since % 1000)
    }

    fn wait(&mut self, ts: i64, length: i64, text: String) {
        self.sequence += 1;
        self.waiting.push(Reverse((ts, Reverse(length), self.sequence, text)));
    }

    pub(super) fn slice(&mut self, (pid, tid): (u32, u32), (begin, end): (i64, i64), name: &str, category: &str, args: Value) {
        let length = end.saturating_sub(begin).max(0);
        let duration = format!("{}.{:03}", length / 1000, length % 1000);
        let (ts, name) = (self.micros(begin), Value::from(name));
        let text = format!(
            "{{\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts},\"dur\":{duration},\"name\":{name},\"cat\":\"{category}\",\"args\":{args}}}"
        );
        self.wait(begin, length, text);
    }

    pub(super) fn counter(&mut self, pid: u32, ts: i64, name: &str, args: Value) {
        let (at, name) = (self.micros(ts), Value::from(name));
        self.wait(ts, 0, format!("{{\"ph\":\"C\",\"pid\":{pid},\"tid\":0,\"ts\":{at},\"name\":{name},\"args\":{args}}}"));
    }

    /// Writes what comes before a time; everything without one.
    pub(super) fn flush(&mut self, before: Option<i64>) -> Result<(), ExportError> {
        while self.waiting.peek().is_some_and(|Reverse((ts, ..))| before.is_none_or(|before| *ts < before)) {
            if let Some(Reverse((.., text))) = self.waiting.pop() {
                self.event(&text)?;
            }
        }
        Ok(())
    }

    pub(super) fn close(mut self, steps: usize) -> Result<Written, ExportError> {
        self.put("\n]}\n")?;
        Ok(Written { steps, events: self.events, bytes: self.bytes })
    }
}
