//! A timeline as Chrome trace JSON, which Perfetto and chrome://tracing open.
//!
//! Processes are groups of tracks: steps, rows, layers, unions, telemetry, kernels. Slices of one track nest strictly, ids
//! are integers, events are in order of time. Rows are not timed one by one: their slices span the target's pass that they
//! belong to. So do those of layers, unless the trace has times of the layer's operations.

mod kernels;
mod page;

use super::ExportError;
use super::lanes;
use super::unions::{Counter, StepUnions};
use crate::analysis::trees::Shape;
use crate::trace::event::{UNKNOWN_CONTEXT, UNKNOWN_TOKEN};
use crate::trace::manifest::WindowCompleteness;
use crate::trace::{Phase, Steps, TelemetrySample, Trace, step_routes};
use kernels::Kernels;
use page::Page;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
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
        if wanted.contains(&id)
            && let Ok(at) = steps.step_id.binary_search(&id)
        {
            let accepted = if steps.phase[at] == Phase::Verify { steps.accepted[at] } else { u16::MAX };
            unions.insert(id, counter.count(routes, accepted));
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

/// Where a step's drafting and its target's pass are, `(begin, end)` each; only their lengths are recorded. A step is drafting, the pass
/// and the commit, in this order, but that a drafter reads the prompt behind the target, whose hidden rows it takes.
fn parts(phase: Phase, (begin, end): (i64, i64), draft_ns: i64, target_ns: i64) -> ((i64, i64), (i64, i64)) {
    let after = |at: i64, ns: i64| (at, at.saturating_add(ns.max(0)).min(end));
    if phase == Phase::Prefill {
        let target = after(begin, target_ns);
        return (after(target.1, draft_ns), target);
    }
    let draft = after(begin, draft_ns);
    (draft, after(draft.1, target_ns))
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
    let (draft, target) = parts(phase, (begin, end), s.draft_host_ns[i], s.target_host_ns[i]);
    let mut slices = [(draft, "draft", "draft"), (target, "target pass", "target")];
    slices.sort_by_key(|(span, ..)| *span);
    for (span, name, category) in slices.into_iter().filter(|(span, ..)| span.1 > span.0) {
        page.slice((STEPS, id), span, name, category, json!({}));
    }
    if !in_detail(s, i) {
        return;
    }
    let pass = if target.1 > target.0 { target } else { (begin, end) };
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
    // A viewer shows a counter's name and the name of its series, which is the unit.
    let known = [
        ("host load", "%", s.host_load.map(|v| v * 100.0)),
        ("CPU clock", "MHz", s.cpu_mhz),
        ("device clock", "MHz", s.sm_clock_mhz.map(f64::from)),
        ("device memory clock", "MHz", s.memory_clock_mhz.map(f64::from)),
        ("power", "W", s.power_w),
        ("temperature", "°C", s.temperature_c),
        ("device memory used", "bytes", s.memory_used_bytes.map(|v| v as f64)),
        ("memory of the process", "bytes", s.rss_bytes.map(|v| v as f64)),
    ];
    for (name, unit, value) in known {
        if let Some(value) = value.filter(|v| v.is_finite()) {
            page.counter(TELEMETRY, s.time_ns, name, json!({ unit: value }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafters_read_a_prompt_behind_the_target() {
        assert_eq!(parts(Phase::Verify, (100, 200), 30, 50), ((100, 130), (130, 180)));
        assert_eq!(parts(Phase::Prefill, (100, 200), 30, 50), ((150, 180), (100, 150)));
        // Lengths that contradict the step's own stay in it.
        assert_eq!(parts(Phase::Prefill, (100, 200), i64::MAX, i64::MAX), ((200, 200), (100, 200)));
        assert_eq!(parts(Phase::Verify, (100, 200), -5, i64::MAX), ((100, 100), (100, 200)));
    }
}
