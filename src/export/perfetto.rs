//! A timeline as Chrome trace JSON, which Perfetto and chrome://tracing open.
//!
//! Processes are groups of tracks: steps, rows, layers, unions, telemetry, kernels. Slices of one track nest strictly, ids
//! are integers, events are in order of time. Rows are not timed one by one: their slices span the target's pass that they
//! belong to. So do those of layers, unless the trace has times of the layer's operations.

use super::lanes;
use super::unions::{Counter, StepUnions};
use super::{ExportError, jsonl};
use crate::analysis::trees::Shape;
use crate::trace::event::{UNKNOWN_CONTEXT, UNKNOWN_TOKEN};
use crate::trace::kernel::KernelEvent;
use crate::trace::manifest::WindowCompleteness;
use crate::trace::{Module, Phase, Steps, TelemetrySample, Trace, step_routes};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::io::Write;
use std::ops::RangeInclusive;

/// Steps of more rows than this have no tracks of rows.
const MAX_ROWS: u16 = 64;

/// Samples of the machine's state so long before and after the steps belong to them, ns.
const AROUND_NS: i64 = 1_000_000_000;

const STEPS: u32 = 1;
const ROWS: u32 = 2;
const LAYERS: u32 = 3;
const UNIONS: u32 = 4;
const TELEMETRY: u32 = 5;
const KERNELS: u32 = 6;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Steps on the timeline.
    pub steps: usize,
    /// Events, names of tracks included.
    pub events: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Writes the steps of these ids, and what belongs to them, as Chrome trace JSON.
///
/// # Errors
/// When the trace cannot be read, has none of the steps or no times of them, or the output cannot be written.
pub fn write(trace: &Trace, wanted: &RangeInclusive<u32>, out: &mut dyn Write) -> Result<Written, ExportError> {
    let steps = trace.steps_with_details()?;
    let mut order: Vec<usize> = (0..steps.len()).filter(|&i| wanted.contains(&steps.step_id[i])).collect();
    if order.is_empty() {
        let (first, last) = (steps.step_id.first(), steps.step_id.last());
        let has = first.zip(last).map_or_else(|| "no steps".to_owned(), |(a, b)| format!("steps {a} to {b}"));
        return Err(ExportError::Lacks(format!("{}: no such step; the trace has {has}", trace.dir().display())));
    }
    if order.iter().all(|&i| steps.host_end_ns[i] <= steps.host_begin_ns[i]) {
        let what = "the steps have no times, so there is no timeline of them";
        return Err(ExportError::Lacks(format!("{}: {what}; `--format {}` writes everything else", trace.dir().display(), "jsonl")));
    }
    order.sort_by_key(|&i| (steps.host_begin_ns[i], steps.step_id[i]));
    let unions = count_unions(trace, &steps, wanted)?;
    let spans: Vec<(i64, i64)> = order.iter().map(|&i| (steps.host_begin_ns[i], steps.host_end_ns[i])).collect();
    let tracks = lanes::assign(&spans);
    let kernels = Kernels::read(trace, wanted)?;
    let (first, end) = (spans[0].0, spans.iter().map(|s| s.1).max().unwrap_or(spans[0].0));
    // A sample is taken before the first step and after the last one as well.
    let near = first.saturating_sub(AROUND_NS)..=end.saturating_add(AROUND_NS);
    let telemetry: Vec<TelemetrySample> = trace.telemetry()?.into_iter().filter(|s| near.contains(&s.time_ns)).collect();
    let others = kernels.events.iter().map(|k| k.1.begin_ns).chain(telemetry.iter().map(|s| s.time_ns));
    let begin = others.fold(first, i64::min);

    let mut page = Page::new(out, begin);
    page.open(trace)?;
    let names = Names { steps: &steps, order: &order, unions: &unions, tracks: &tracks };
    names.write(&mut page, &kernels, !telemetry.is_empty())?;
    telemetry.iter().for_each(|sample| samples(&mut page, sample));
    let m = trace.manifest();
    let rejected = m.acceptance_known && m.window_completeness != WindowCompleteness::AcceptedOnly;
    let mut layout = Layout { accepted: m.acceptance_known, rejected, ..Layout::default() };
    let mut next_kernel = 0;
    for (&i, &lane) in order.iter().zip(&tracks) {
        next_kernel = kernels.slices(&mut page, next_kernel, steps.host_begin_ns[i]);
        page.flush(Some(steps.host_begin_ns[i]))?;
        let id = steps.step_id[i];
        step(&mut page, &mut layout, &steps, i, lane, unions.get(&id), kernels.layers.get(&id));
    }
    kernels.slices(&mut page, next_kernel, i64::MAX);
    page.flush(None)?;
    page.close(order.len())
}

/// Unions by step.
fn count_unions(trace: &Trace, steps: &Steps, wanted: &RangeInclusive<u32>) -> Result<BTreeMap<u32, StepUnions>, ExportError> {
    let mut counter = Counter::new(trace.manifest().model.experts);
    let mut unions = BTreeMap::new();
    step_routes::for_each(trace, false, |id, routes| {
        if wanted.contains(&id) {
            if let Ok(at) = steps.step_id.binary_search(&id) {
                let accepted = if steps.phase[at] == Phase::Verify { steps.accepted[at] } else { u16::MAX };
                unions.insert(id, counter.count(routes, accepted));
            }
        }
        Ok::<_, ExportError>(())
    })?;
    Ok(unions)
}

/// Track numbers: one for each lane and row, or lane and layer.
#[derive(Default)]
struct Layout {
    /// Whether the trace knows which drafts were accepted, and what the others chose.
    accepted: bool,
    rejected: bool,
    rows: BTreeMap<(u32, u16), u32>,
    layers: BTreeMap<(u32, u16), u32>,
}

fn track(of: &mut BTreeMap<(u32, u16), u32>, lane: u32, member: u16) -> u32 {
    // Stable whatever comes first: 65 536 members a lane.
    *of.entry((lane, member)).or_insert(lane.saturating_mul(1 << 16).saturating_add(u32::from(member)).saturating_add(1))
}

/// Whether a step has tracks of its rows and layers.
fn in_detail(steps: &Steps, i: usize) -> bool {
    steps.phase[i] != Phase::Prefill && steps.rows[i] <= MAX_ROWS
}

/// The operations of the wanted steps.
struct Kernels {
    /// By begin, the longer first.
    events: Vec<(u32, KernelEvent)>,
    /// Track of each event.
    tracks: Vec<u32>,
    /// Name of each track.
    names: Vec<String>,
    /// By step: first begin and last end of each target layer's operations.
    layers: BTreeMap<u32, BTreeMap<u16, (i64, i64)>>,
}

impl Kernels {
    fn read(trace: &Trace, wanted: &RangeInclusive<u32>) -> Result<Self, ExportError> {
        let mut events: Vec<(u32, KernelEvent)> = trace.kernels()?.into_iter().filter(|(step, _)| wanted.contains(step)).collect();
        events.sort_by_key(|(_, k)| (k.begin_ns, Reverse(k.end_ns)));
        let streams: BTreeSet<Option<u32>> = events.iter().map(|(_, k)| k.stream).collect();
        let (mut tracks, mut names) = (vec![0; events.len()], Vec::new());
        for stream in streams {
            let members: Vec<usize> = (0..events.len()).filter(|&i| events[i].1.stream == stream).collect();
            let spans: Vec<(i64, i64)> = members.iter().map(|&i| (events[i].1.begin_ns, events[i].1.end_ns)).collect();
            let first = names.len() as u32 + 1;
            for (&member, lane) in members.iter().zip(lanes::assign(&spans)) {
                tracks[member] = first + lane;
                if names.len() as u32 + 1 == first + lane {
                    let name = stream.map_or_else(|| "operations".to_owned(), |s| format!("stream {s}"));
                    names.push(if lane == 0 { name } else { format!("{name}, at once {}", lane + 1) });
                }
            }
        }
        let mut layers: BTreeMap<u32, BTreeMap<u16, (i64, i64)>> = BTreeMap::new();
        for (step, k) in events.iter().filter(|(_, k)| k.module == Module::Target) {
            if let Some(layer) = k.layer {
                let span = layers.entry(*step).or_default().entry(layer).or_insert((k.begin_ns, k.end_ns));
                *span = (span.0.min(k.begin_ns), span.1.max(k.end_ns));
            }
        }
        Ok(Self { events, tracks, names, layers })
    }

    /// The slices from the `next`-th on that begin before a time; gives the number of the first that does not.
    fn slices(&self, page: &mut Page<'_>, next: usize, before: i64) -> usize {
        let mut at = next;
        while let Some(((step, k), track)) = self.events.get(at).zip(self.tracks.get(at)).filter(|((_, k), _)| k.begin_ns < before) {
            let mut args = json!({ "step": step, "component": k.component.as_str(), "module": k.module.as_str() });
            let known = [
                ("layer", k.layer.map(Value::from)),
                ("correlation_id", k.correlation_id.map(Value::from)),
                ("graph_node_id", k.graph_node_id.map(Value::from)),
                ("grid", k.grid.map(|g| Value::from(g.to_vec()))),
                ("block", k.block.map(|b| Value::from(b.to_vec()))),
                ("registers", k.registers.map(Value::from)),
                ("shared_bytes", k.shared_bytes.map(Value::from)),
            ];
            for (key, value) in known {
                if let Some(value) = value {
                    args[key] = value;
                }
            }
            page.slice((KERNELS, *track), (k.begin_ns, k.end_ns), &k.name, k.component.as_str(), args);
            at += 1;
        }
        at
    }
}

/// What the names of the tracks depend on.
struct Names<'a> {
    steps: &'a Steps,
    order: &'a [usize],
    unions: &'a BTreeMap<u32, StepUnions>,
    tracks: &'a [u32],
}

impl Names<'_> {
    /// Names every track that will have a slice, before the first event.
    fn write(&self, page: &mut Page<'_>, kernels: &Kernels, telemetry: bool) -> Result<(), ExportError> {
        let mut layout = Layout::default();
        let mut names: BTreeSet<(u32, u32, String)> = BTreeSet::new();
        let suffix = |lane: u32| if lane == 0 { String::new() } else { format!(", at once {}", lane + 1) };
        for (&i, &lane) in self.order.iter().zip(self.tracks) {
            names.insert((STEPS, lane + 1, format!("steps{}", suffix(lane))));
            if !in_detail(self.steps, i) {
                continue;
            }
            for row in 0..self.steps.rows[i] {
                let what = if row == 0 { "row 0, anchor".to_owned() } else { format!("row {row}") };
                names.insert((ROWS, track(&mut layout.rows, lane, row), what + &suffix(lane)));
            }
            for layer in self.unions.get(&self.steps.step_id[i]).iter().flat_map(|u| &u.layers) {
                names.insert((LAYERS, track(&mut layout.layers, lane, layer.layer), format!("layer {}{}", layer.layer, suffix(lane))));
            }
        }
        names.extend(kernels.names.iter().zip(1..).map(|(name, tid)| (KERNELS, tid, name.clone())));
        let layers = if kernels.layers.is_empty() { "layers (each spans its pass)" } else { "layers" };
        let groups = [
            (STEPS, "steps"),
            (ROWS, "rows (each spans its pass)"),
            (LAYERS, layers),
            (UNIONS, "unions, experts"),
            (TELEMETRY, "telemetry"),
            (KERNELS, "kernels and operations"),
        ];
        for (pid, name) in groups {
            let used = match pid {
                UNIONS => !self.unions.is_empty(),
                TELEMETRY => telemetry,
                _ => names.iter().any(|n| n.0 == pid),
            };
            if used {
                page.meta(pid, 0, "process_name", json!({ "name": name }))?;
                page.meta(pid, 0, "process_sort_index", json!({ "sort_index": pid }))?;
            }
        }
        for (pid, tid, name) in &names {
            page.meta(*pid, *tid, "thread_name", json!({ "name": name }))?;
            page.meta(*pid, *tid, "thread_sort_index", json!({ "sort_index": tid }))?;
        }
        Ok(())
    }
}

/// The tree of a verify step's window; `None` for a chain.
fn tree(s: &Steps, i: usize) -> Option<Shape> {
    let parents = s.parents.get(i)?.as_deref().filter(|p| s.phase[i] == Phase::Verify && p.len() == usize::from(s.rows[i]))?;
    let shape = Shape::new(parents).ok().filter(|shape| !shape.is_chain())?;
    Some(shape.accepting(s.input_tokens.get(i), s.emitted_tokens.get(i), s.accepted[i]))
}

/// The events of one step.
fn step(
    page: &mut Page<'_>,
    layout: &mut Layout,
    s: &Steps,
    i: usize,
    lane: u32,
    unions: Option<&StepUnions>,
    timed: Option<&BTreeMap<u16, (i64, i64)>>,
) {
    let (begin, end) = (s.host_begin_ns[i], s.host_end_ns[i].max(s.host_begin_ns[i]));
    let phase = s.phase[i];
    let args = json!({
        "step": s.step_id[i],
        "request": s.request_id[i],
        "rows": s.rows[i],
        "accepted": layout.accepted.then_some(s.accepted[i]),
        "context_len": Some(s.context_len[i]).filter(|&n| n != UNKNOWN_CONTEXT),
        "emitted": s.emitted_tokens.get(i).len(),
        "device_ns": s.device_ns[i],
        "union_mean": unions.and_then(StepUnions::mean),
    });
    let id = lane + 1;
    page.slice((STEPS, id), (begin, end), phase.as_str(), "step", args);
    // The step is drafting, the target's pass, and the commit, in this order; only their lengths are recorded.
    let drafted = begin.saturating_add(s.draft_host_ns[i].max(0)).min(end);
    let passed = drafted.saturating_add(s.target_host_ns[i].max(0)).min(end);
    if drafted > begin {
        page.slice((STEPS, id), (begin, drafted), "draft", "draft", json!({}));
    }
    if passed > drafted {
        page.slice((STEPS, id), (drafted, passed), "target pass", "target", json!({}));
    }
    if !in_detail(s, i) {
        return;
    }
    let pass = if passed > drafted { (drafted, passed) } else { (begin, end) };
    let tree = tree(s, i);
    for row in 0..s.rows[i] {
        let what = match (row, &tree) {
            (0, _) => "anchor",
            _ if !layout.accepted => "draft",
            (row, None) if row <= s.accepted[i] => "kept",
            (_, None) => "rejected",
            (row, Some(tree)) => tree.path().map_or("draft", |path| if path.contains(&row) { "kept" } else { "rejected" }),
        };
        let added = unions.and_then(|u| Some(f64::from(*u.added.get(usize::from(row))?) / u.layers.len().max(1) as f64));
        let token = s.input_tokens.get(i).get(usize::from(row)).filter(|&&token| token != UNKNOWN_TOKEN);
        let args = json!({ "step": s.step_id[i], "token": token, "experts_added_mean": added });
        page.slice((ROWS, track(&mut layout.rows, lane, row)), pass, what, "row", args);
    }
    let Some(unions) = unions else { return };
    for layer in &unions.layers {
        // Times by another clock than the step's cannot be laid beside it.
        let own = timed.and_then(|t| t.get(&layer.layer)).filter(|span| begin <= span.0 && span.1 <= end);
        let time = if own.is_some() { "its operations" } else { "the pass" };
        // What was counted as kept are the first rows, which of a tree they are not.
        let wasted = (layout.rejected && tree.is_none()).then(|| layer.union - layer.kept);
        let args = json!({ "step": s.step_id[i], "union": layer.union, "wasted": wasted, "spans": time });
        let name = format!("union {}", layer.union);
        page.slice((LAYERS, track(&mut layout.layers, lane, layer.layer)), own.copied().unwrap_or(pass), &name, "layer", args);
        page.counter(UNIONS, pass.0, &format!("layer {}", layer.layer), json!({ "experts": layer.union }));
    }
    if let Some(mean) = unions.mean() {
        page.counter(UNIONS, pass.0, "mean of all layers", json!({ "experts": mean }));
    }
}

/// The counters of one sample.
fn samples(page: &mut Page<'_>, s: &TelemetrySample) {
    let known = [
        ("host load, %", s.host_load.map(|v| v * 100.0)),
        ("CPU clock, MHz", s.cpu_mhz),
        ("device clock, MHz", s.sm_clock_mhz.map(f64::from)),
        ("device memory clock, MHz", s.memory_clock_mhz.map(f64::from)),
        ("power, W", s.power_w),
        ("temperature, °C", s.temperature_c),
        ("device memory used, bytes", s.memory_used_bytes.map(|v| v as f64)),
        ("memory of the process, bytes", s.rss_bytes.map(|v| v as f64)),
    ];
    for (name, value) in known {
        if let Some(value) = value.filter(|v| v.is_finite()) {
            page.counter(TELEMETRY, s.time_ns, name, json!({ "value": value }));
        }
    }
}

/// An event that waits for its turn: by time, the longer slice first, then as it came.
type Waiting = Reverse<(i64, Reverse<i64>, u64, String)>;

/// The file that is written.
struct Page<'a> {
    out: &'a mut dyn Write,
    waiting: BinaryHeap<Waiting>,
    origin: i64,
    sequence: u64,
    events: u64,
    bytes: u64,
}

impl<'a> Page<'a> {
    fn new(out: &'a mut dyn Write, origin: i64) -> Self {
        Self { out, waiting: BinaryHeap::new(), origin, sequence: 0, events: 0, bytes: 0 }
    }

    fn put(&mut self, text: &str) -> Result<(), ExportError> {
        self.bytes += text.len() as u64;
        self.out.write_all(text.as_bytes()).map_err(ExportError::Output)
    }

    fn open(&mut self, trace: &Trace) -> Result<(), ExportError> {
        let m = trace.manifest();
        let facts = json!({
            "trace": trace.dir().file_name().map(|n| n.to_string_lossy()),
            "model": m.model.name,
            "drafter": m.drafter.kind,
            "engine": m.engine,
            "device": format!("{} {}", m.device.kind, m.device.name),
            "emulated": m.emulated,
            "origin_unix_ns": self.origin,
            "times": "host clock, of kernels the device's; rows are not timed one by one and span their pass, as layers without operations do",
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

    fn meta(&mut self, pid: u32, tid: u32, name: &str, args: Value) -> Result<(), ExportError> {
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

    fn slice(&mut self, (pid, tid): (u32, u32), (begin, end): (i64, i64), name: &str, category: &str, args: Value) {
        let length = end.saturating_sub(begin).max(0);
        let duration = format!("{}.{:03}", length / 1000, length % 1000);
        let (ts, name) = (self.micros(begin), Value::from(name));
        let text = format!(
            "{{\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts},\"dur\":{duration},\"name\":{name},\"cat\":\"{category}\",\"args\":{args}}}"
        );
        self.wait(begin, length, text);
    }

    fn counter(&mut self, pid: u32, ts: i64, name: &str, args: Value) {
        let (at, name) = (self.micros(ts), Value::from(name));
        self.wait(ts, 0, format!("{{\"ph\":\"C\",\"pid\":{pid},\"tid\":0,\"ts\":{at},\"name\":{name},\"args\":{args}}}"));
    }

    /// Writes what comes before a time; everything without one.
    fn flush(&mut self, before: Option<i64>) -> Result<(), ExportError> {
        while self.waiting.peek().is_some_and(|Reverse((ts, ..))| before.is_none_or(|before| *ts < before)) {
            if let Some(Reverse((.., text))) = self.waiting.pop() {
                self.event(&text)?;
            }
        }
        Ok(())
    }

    fn close(mut self, steps: usize) -> Result<Written, ExportError> {
        self.put("\n]}\n")?;
        Ok(Written { steps, events: self.events, bytes: self.bytes })
    }
}
