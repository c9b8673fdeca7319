//! A profile's passes to a trace: one of their own, or into a trace whose steps they are.

use super::events::{self, Source};
use super::profile_passes::{Pass, Passes, Placed, passes};
use super::recorder::name_of;
use super::timeline::Timeline;
use super::{ImportError, Options, Sink, flags};
use crate::metric::{Unit, counted_plain};
use crate::trace::manifest::{BATCHED_PASSES, Manifest};
use crate::trace::{Component, FinishReason, KernelEvent, Module, Phase, RequestEvent, StepEvent, StepRoutes, Steps, Trace, step_routes};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Imports what was read from `inputs`.
///
/// # Errors
/// When there is no time of any kernel, or, into a trace, when passes and steps cannot be matched.
pub fn import(inputs: &[PathBuf], profiler: &str, timeline: Timeline, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let [path, ..] = inputs else { return Ok(()) };
    if timeline.kernels.is_empty() && timeline.graphs.is_empty() {
        let what = match (timeline.graph_launches, timeline.launches.len()) {
            (0, 0) => "no GPU events: no kernel and no launch was recorded (were child processes, or the GPU, left out of the profile?)"
                .to_owned(),
            (0, n) => format!("no kernels, although there are {n} launches: the GPU's own activity was not recorded"),
            (n, _) => format!("kernels missing for {n} graph launches: record the nodes of graphs (nsys --cuda-graph-trace=node)"),
        };
        return Err(ImportError::empty(path, what));
    }
    if let (Some(_), Some(path)) = (&options.into, inputs.first()) {
        flags::check(path, "a profile that is added to a trace", flags::ADDED_PROFILE, options)?;
    }
    let trace = options.into.as_deref().map(Trace::open).transpose()?;
    let routed = match &trace {
        Some(trace) => trace.manifest().model.moe_layers.clone(),
        None => options.model.as_ref().and_then(|m| m.moe_layers.clone()).unwrap_or_default(),
    };
    let found = passes(&timeline, options.device, &routed);
    if found.passes.is_empty() && found.loose.is_empty() {
        let device = options.device.unwrap_or(0);
        return Err(ImportError::empty(path, format!("no kernels of device {device}; --device N chooses another one")));
    }
    report(&found, &timeline, trace.is_some(), sink);
    match trace {
        Some(trace) => into(path, &trace, found, &timeline, profiler, options, sink),
        None => alone(path, found, &timeline, profiler, sink),
    }
}

/// Says what the profile lacks.
fn report(found: &Passes, timeline: &Timeline, into: bool, sink: &mut Sink) {
    if !timeline.graphs.is_empty() {
        let message = format!(
            "{} graph launches were recorded as wholes: times of their kernels and layers are not in the profile; record them with nsys \
             profile --cuda-graph-trace=node",
            timeline.graphs.len()
        );
        sink.warn("graphs_only", message);
    }
    if found.other_devices > 0 {
        sink.leave_out("other_devices", found.other_devices, "(kernels) left out: of other devices or processes; --device N chooses one");
    }
    if found.passes.is_empty() {
        sink.warn(
            "no_step_ranges",
            "no range names a forward pass: all kernels stand in one step, which counts as a prefill step, and steps cannot be told \
             apart (record with engine annotations or NVTX ranges)",
        );
    } else if !found.loose.is_empty() {
        let ns = found.loose.iter().filter_map(|k| k.event(timeline)).map(|e| e.end.saturating_sub(e.begin).max(0));
        let us = ns.fold(0i64, i64::saturating_add) / 1000;
        let where_to =
            if into { "" } else { "; they stand in a step of their own, the last, which is no pass and counts as a prefill step" };
        sink.warn(
            "no_range",
            format!("{} ({us} us) in no pass of the target: (no range){where_to}", counted_plain(found.loose.len(), "kernel")),
        );
    }
    if found.without_layers > 0 && timeline.graphs.is_empty() {
        let message = format!(
            "in {} of {} nothing tells which layer a kernel is of: no module ranges around launches, and not as many choices of experts \
             as the model has routed layers (--model-config says which it has)",
            found.without_layers,
            counted_plain(found.passes.len(), "pass")
        );
        sink.warn("layers_unknown", message);
    }
    if let Some(message) = unknown_kernels(found, timeline) {
        sink.warn(UNKNOWN_KERNELS, message);
    }
}

/// Code of the warning that much of the time is of kernels that nothing says the component of.
const UNKNOWN_KERNELS: &str = "unknown_kernels";
/// A larger share of them than this is warned of.
const MOST_UNKNOWN: f64 = 0.2;
/// Names of them that are told.
const NAMED: usize = 3;
/// Characters of a name that are told: C++ ones are longer than a sentence.
const NAME_CHARS: usize = 60;

/// Of the target's kernels, those whose component neither a range nor their name tells, when they take more than
/// [`MOST_UNKNOWN`] of the kernels' time: their share, and the names that take the longest.
fn unknown_kernels(found: &Passes, timeline: &Timeline) -> Option<String> {
    let all = found.passes.iter().flat_map(|pass| &pass.kernels).chain(&found.loose);
    let (mut total, mut unknown) = (0u64, BTreeMap::<&str, u64>::new());
    for kernel in all.filter(|k| k.module == Module::Target && !k.is_graph()) {
        let Some(event) = kernel.event(timeline) else { continue };
        let ns = u64::try_from(event.end.saturating_sub(event.begin)).unwrap_or(0);
        total = total.saturating_add(ns);
        if kernel.component == Component::Other {
            let sum = unknown.entry(timeline.name(event.name)).or_default();
            *sum = sum.saturating_add(ns);
        }
    }
    let share = unknown.values().fold(0u64, |sum, &ns| sum.saturating_add(ns)) as f64 / total.max(1) as f64;
    if share <= MOST_UNKNOWN {
        return None;
    }
    let mut longest: Vec<(&str, u64)> = unknown.into_iter().collect();
    longest.sort_by_key(|&(name, ns)| (std::cmp::Reverse(ns), name));
    let of = |ns: u64| Unit::Share.show(ns as f64 / total.max(1) as f64);
    let told = |&(name, ns): &(&str, u64)| {
        let short: String = name.chars().take(NAME_CHARS).collect();
        let cut = if short.len() < name.len() { "..." } else { "" };
        format!("{short}{cut} ({})", of(ns))
    };
    let names: Vec<String> = longest.iter().take(NAMED).map(told).collect();
    Some(format!(
        "{} of the kernels' time is of kernels whose names say no component, and stands in `other`: {}{}; profile with ranges of modules (vLLM: \
         --enable-layerwise-nvtx-tracing, SGLang: --enable-layerwise-nvtx-marker) to tell what they are for",
        Unit::Share.show(share),
        names.join(", "),
        if longest.len() > NAMED { format!(" and {} more names", longest.len() - NAMED) } else { String::new() }
    ))
}

/// Passes that are said to be of several requests.
fn batched(found: &Passes) -> usize {
    found.passes.iter().filter(|p| p.step.and_then(|s| s.requests).is_some_and(|n| n > 1)).count()
}

fn were(passes: usize) -> String {
    format!("{} {}", counted_plain(passes, "pass"), if passes == 1 { "was" } else { "were" })
}

fn set_device(facts: &mut Manifest, timeline: &Timeline) {
    if facts.device.kind == "unknown" {
        facts.device.kind = if timeline.hip { "rocm".into() } else { "cuda".into() };
    }
    if let Some(name) = timeline.device.as_ref().filter(|_| facts.device.name == "unknown") {
        facts.device.name.clone_from(name);
    }
}

/// A trace of the profile alone: a step a pass, without routes.
fn alone(path: &Path, found: Passes, timeline: &Timeline, profiler: &str, sink: &mut Sink) -> Result<(), ImportError> {
    sink.begin(path, &Source { engine: profiler.to_owned(), acceptance_known: false, ..Source::default() })?;
    if let Some(facts) = sink.facts_mut() {
        set_device(facts, timeline);
    }
    sink.warn("no_routes", "a profile has no expert ids: import the engine's routes and add the profile with --into TRACE");
    let batched = batched(&found);
    if batched > 0 {
        sink.warn(BATCHED_PASSES, format!("{} of several requests: their times are the whole batch's", were(batched)));
    }
    let request = sink.request_id();
    let mut layers = 0u16;
    let rest = (!found.loose.is_empty()).then_some(Pass { step: None, kernels: found.loose });
    for pass in found.passes.into_iter().chain(rest) {
        layers = pass.kernels.iter().filter_map(|k| k.layer).map(|l| l.saturating_add(1)).fold(layers, u16::max);
        let mut step = step_of(request, &pass);
        step.device_ns = pass.device_ns(timeline);
        let id = sink.step(step)?;
        sink.kernels(id, pass.events(timeline))?;
    }
    if let Some(facts) = sink.facts_mut() {
        facts.model.layers = facts.model.layers.max(layers);
    }
    sink.end_request(request, name_of(path), 0, FinishReason::Unknown, "{}".into())
}

/// The step of a pass: of a batch, the rows of one request.
fn step_of(request: u32, pass: &Pass) -> StepEvent {
    let step = pass.step.as_ref();
    let rows = step.and_then(|s| s.rows).unwrap_or(1).max(1);
    let requests = step.and_then(|s| s.requests).unwrap_or(1).max(1);
    let (phase, rows) = match step.and_then(|s| s.phase) {
        Some(Phase::Verify) if rows.is_multiple_of(requests) && rows / requests > 1 => (Phase::Verify, rows / requests),
        Some(Phase::Decode) => (Phase::Decode, 1),
        _ => (Phase::Prefill, rows),
    };
    let rows = (rows as usize).min(usize::from(u16::MAX));
    let mut event = events::step(request, phase, events::unknown_tokens(rows));
    if let Some(context) = step.and_then(|s| s.context) {
        event.context_len = context;
    }
    if phase != Phase::Prefill {
        event.emitted_tokens = events::unknown_tokens(1);
    }
    event
}

/// Adds the kernels to the trace's own steps, of which the rest stays as it is.
fn into(
    path: &Path,
    trace: &Trace,
    found: Passes,
    timeline: &Timeline,
    profiler: &str,
    options: &Options,
    sink: &mut Sink,
) -> Result<(), ImportError> {
    let wrong = |reason: String| ImportError::input(path, reason);
    let facts = trace.manifest();
    if facts.emulated || facts.device.kind == "cpu" {
        return Err(wrong(format!("{} ran on {}: the kernels of this profile are not its own", trace.dir().display(), facts.device.kind)));
    }
    if trace.has_kernels() && !options.force {
        return Err(wrong(format!("{} has times of kernels already; --force replaces them", trace.dir().display())));
    }
    let steps = trace.steps_with_details()?;
    let requests = trace.requests()?;
    let batched = batched(&found);
    experts_of(&facts.model.moe_layers, &found).map_err(wrong)?;
    let (by_step, shared) = tie(&steps, &requests, found, timeline, sink).map_err(wrong)?;
    let mut kept = facts.clone();
    kept.tables.clear();
    set_device(&mut kept, timeline);
    // Notes of a profile that is replaced are about that one.
    kept.warnings.retain(|w| !ABOUT_PROFILES.contains(&w.code.as_str()));
    if !kept.engine.contains(profiler) {
        kept.engine = format!("{} + {profiler}", kept.engine);
    }
    let highest = by_step.values().flat_map(|t| &t.kernels).filter_map(|k| k.layer).map(|l| l.saturating_add(1)).max();
    kept.model.layers = kept.model.layers.max(highest.unwrap_or(0));
    sink.begin_with(path, kept)?;
    if !facts.complete {
        sink.incomplete(facts.incomplete_reason.clone().unwrap_or_else(|| "no reason given".into()));
    }
    if shared.max(batched) > 0 {
        let message = format!(
            "{} of several requests: a pass's kernels stand with its first request's step, its times are the whole batch's",
            were(shared.max(batched))
        );
        sink.warn(BATCHED_PASSES, message);
    }
    let mut writer = Rewrite { steps: &steps, next: 0, by_step, timeline, sink };
    step_routes::for_each(trace, facts.router_weights, |step, routes| writer.up_to(step, routes))?;
    writer.rest()?;
    for request in requests {
        sink.request(request)?;
    }
    for sample in trace.telemetry()? {
        sink.telemetry(sample)?;
    }
    Ok(())
}

/// Codes of warnings that are about the profile that was added.
const ABOUT_PROFILES: [&str; 10] = [
    "graphs_only",
    "other_devices",
    "no_step_ranges",
    "no_range",
    "layers_unknown",
    UNKNOWN_KERNELS,
    BATCHED_PASSES,
    "passes_unmatched",
    "profile_cut",
    "json_repaired",
];

/// What a profile says of one step.
#[derive(Default)]
struct Times {
    device_ns: Option<i64>,
    kernels: Vec<Placed>,
}

/// Whether the profile has kernels of experts only in layers that the trace has routes of.
fn experts_of(routed: &[u16], found: &Passes) -> Result<(), String> {
    let mut kernels =
        found.passes.iter().flat_map(|p| &p.kernels).filter(|k| k.component == Component::Experts && k.module == Module::Target);
    match kernels.find_map(|k| k.layer.filter(|layer| !routed.is_empty() && !routed.contains(layer))) {
        Some(layer) => {
            Err(format!("its passes run experts in layer {layer}, which is not routed in the trace: they are not of the same run"))
        }
        None => Ok(()),
    }
}

/// Whether a pass can be these steps, by what its range says of requests and rows. Steps that the trace lacks (a request's last window is
/// not in a recording) make it no other pass.
fn check_rows(pass: &Pass, of_pass: &[usize], steps: &Steps) -> Result<(), String> {
    let Some(step) = pass.step else { return Ok(()) };
    let number = step.id.map(|id| format!(" {id}")).unwrap_or_default();
    let different =
        |what: String| Err(format!("pass{number} of the profile {what}: they are not of the same run, and nothing was changed"));
    let rows = |i: &usize| steps.rows.get(*i).map_or(0, |&n| u32::from(n));
    let total = of_pass.iter().map(rows).fold(0u32, u32::saturating_add);
    // A prompt may be in several steps; a request is one of the batch's.
    let requests: BTreeSet<u32> = of_pass.iter().filter_map(|&i| steps.request_id.get(i).copied()).collect();
    if let Some(n) = step.requests.filter(|&n| requests.len() > n as usize) {
        return different(format!("is of {n} requests, the trace's of {}", requests.len()));
    }
    let window = step.rows.zip(step.requests).filter(|&(n, of)| step.phase == Some(Phase::Verify) && of > 0 && n.is_multiple_of(of));
    if let Some((n, of)) = window
        && let Some(own) = of_pass.iter().map(rows).find(|&own| own != n / of)
    {
        return different(format!("has {of} windows of {} rows, the trace's step {own} rows", n / of));
    }
    match step.rows.filter(|&n| total > n) {
        Some(n) => different(format!("has {n} rows, the trace's steps {total}")),
        None => Ok(()),
    }
}

/// Finds the steps of each pass: by the engine's number of the pass where both have it, else one after the other. Gives the
/// times by index of the step, and how many passes are of several steps.
fn tie(
    steps: &Steps,
    requests: &[RequestEvent],
    found: Passes,
    timeline: &Timeline,
    sink: &mut Sink,
) -> Result<(BTreeMap<usize, Times>, usize), String> {
    if found.passes.is_empty() {
        return Err("no range names a forward pass: nothing ties its kernels to steps; record with the engine's step annotations".into());
    }
    let numbered = by_pass(steps, requests);
    let with_ids = !numbered.is_empty() && found.passes.iter().any(|p| p.step.and_then(|s| s.id).is_some());
    let (mut by_step, mut shared, mut unmatched): (BTreeMap<usize, Times>, usize, u64) = (BTreeMap::new(), 0, 0);
    if !with_ids {
        in_order(steps, &found)?;
    }
    let (mut used, all) = (BTreeSet::new(), found.passes.len() as u64);
    for (number, pass) in found.passes.into_iter().enumerate() {
        let of_pass = if with_ids {
            let id = pass.step.and_then(|s| s.id);
            id.filter(|&id| used.insert(id)).and_then(|id| numbered.get(&id)).cloned().unwrap_or_default()
        } else {
            vec![number]
        };
        let phase = pass.step.and_then(|s| s.phase);
        let fits = of_pass.iter().any(|&i| steps.phase.get(i).copied() == phase);
        let [first, ..] = of_pass.as_slice() else {
            unmatched += 1;
            continue;
        };
        if !fits {
            unmatched += 1;
            continue;
        }
        check_rows(&pass, &of_pass, steps)?;
        shared += usize::from(of_pass.len() > 1);
        let device_ns = pass.device_ns(timeline);
        for &i in &of_pass {
            by_step.entry(i).or_default().device_ns = device_ns;
        }
        by_step.entry(*first).or_default().kernels = pass.kernels;
    }
    if by_step.is_empty() {
        return Err("none of its passes is one of the trace's steps: is it of the same run?".into());
    }
    if unmatched > all / 2 {
        return Err(format!(
            "{unmatched} of its {all} passes are no steps of the trace: is it of the same run? nothing was changed; profile no more than was \
             recorded"
        ));
    }
    if unmatched > 0 {
        sink.warn(
            "passes_unmatched",
            format!("{} of the profile without a step of the trace: their kernels were left out", counted_plain(unmatched, "pass")),
        );
    }
    Ok((by_step, shared))
}

/// Indices of the steps of each numbered pass: the recorder's numbers stand in the requests' tags, one for each of their steps.
fn by_pass(steps: &Steps, requests: &[RequestEvent]) -> BTreeMap<i64, Vec<usize>> {
    let mut lists: BTreeMap<u32, std::vec::IntoIter<i64>> = BTreeMap::new();
    for request in requests {
        let tags: serde_json::Value = serde_json::from_str(&request.tags).unwrap_or_default();
        let ids: Option<Vec<i64>> = tags
            .get(super::recorder_passes::PASS_TAG)
            .and_then(|v| v.as_array())
            .and_then(|list| list.iter().map(serde_json::Value::as_i64).collect());
        if let Some(ids) = ids {
            lists.insert(request.request_id, ids.into_iter());
        }
    }
    let mut found: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for (i, request) in steps.request_id.iter().enumerate() {
        if let Some(id) = lists.get_mut(request).and_then(Iterator::next) {
            found.entry(id).or_default().push(i);
        }
    }
    found
}

/// Whether passes and steps are the same ones in the same order.
fn in_order(steps: &Steps, found: &Passes) -> Result<(), String> {
    let (n, of) = (found.passes.len(), steps.len());
    if n != of {
        return Err(format!(
            "{n} passes in the profile, {of} steps in the trace, and nothing numbers them: profile exactly the steps of the trace, or record \
             with numbered passes (SGLang's detailed annotations)"
        ));
    }
    if found.passes.iter().any(|pass| pass.step.and_then(|s| s.requests).is_some_and(|n| n > 1)) {
        return Err("passes of several requests without numbers: which steps they are of nobody says; record with numbered passes".into());
    }
    let same = |(pass, (phase, rows)): (&Pass, (&Phase, &u16))| {
        let Some(step) = pass.step else { return false };
        step.phase == Some(*phase) && step.rows.is_none_or(|n| n == u32::from(*rows))
    };
    match found.passes.iter().zip(steps.phase.iter().zip(&steps.rows)).position(|pair| !same(pair)) {
        Some(i) => Err(format!("pass {i} of the profile and step {i} of the trace do different things: they are not of the same run")),
        None => Ok(()),
    }
}

/// Writes the steps again, with their times.
struct Rewrite<'a> {
    steps: &'a Steps,
    next: usize,
    by_step: BTreeMap<usize, Times>,
    timeline: &'a Timeline,
    sink: &'a mut Sink,
}

impl Rewrite<'_> {
    /// Writes the steps before `step_id`, which have no routes, then that one.
    fn up_to(&mut self, step_id: u32, routes: &StepRoutes) -> Result<(), ImportError> {
        while self.steps.step_id.get(self.next).is_some_and(|&id| id < step_id) {
            self.step(StepRoutes::default())?;
        }
        self.step(routes.clone())
    }

    fn rest(&mut self) -> Result<(), ImportError> {
        while self.next < self.steps.len() {
            self.step(StepRoutes::default())?;
        }
        Ok(())
    }

    fn step(&mut self, routes: StepRoutes) -> Result<(), ImportError> {
        let (s, i) = (self.steps, self.next);
        self.next += 1;
        let times = self.by_step.remove(&i).unwrap_or_default();
        let Some(event) = s.event(i) else { return Ok(()) };
        let id = self.sink.step_with_id(StepEvent { device_ns: times.device_ns, routes, ..event })?;
        let kernels: Vec<KernelEvent> = times.kernels.iter().filter_map(|k| k.kernel(self.timeline)).collect();
        if kernels.is_empty() { Ok(()) } else { self.sink.kernels(id, kernels) }
    }
}
