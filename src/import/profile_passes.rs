//! A profile's kernels by forward pass: which pass, which layer, what for.
//!
//! Engines name their passes with ranges; a kernel belongs to the pass whose range was open where it was launched. Its layer is
//! that of the module range around the launch. Without such ranges (replayed graphs have none), a pass that chooses experts as
//! often as the model has routed layers tells them: what routes and what experts run from one choice to the next is of one layer.

use super::annotation::{self, Step};
use super::kernel_names;
use super::timeline::{DeviceEvent, NameId, Span, Timeline};
use crate::trace::{Component, KernelEvent, Module};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// A kernel's place; the rest of it stays in the timeline until it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Number of the kernel, or of the whole graph.
    event: u32,
    whole_graph: bool,
    /// Its layer, when it is known.
    pub layer: Option<u16>,
    /// Whose pass it is part of.
    pub module: Module,
    /// What it is for.
    pub component: Component,
    /// Whether it is a layer's choice of experts.
    choice: bool,
}

impl Placed {
    /// The kernel in the timeline.
    pub fn event<'a>(&self, timeline: &'a Timeline) -> Option<&'a DeviceEvent> {
        let events = if self.whole_graph { &timeline.graphs } else { &timeline.kernels };
        events.get(self.event as usize)
    }

    /// Whether it stands for a whole graph, of which no kernel's name is known.
    pub fn is_graph(&self) -> bool {
        self.whole_graph
    }

    /// Begin and number, by which the kernels of a pass are ordered.
    fn order(&self, timeline: &Timeline) -> (i64, u64) {
        self.event(timeline).map_or((i64::MAX, 0), |e| (e.begin, e.graph_node.unwrap_or(0)))
    }

    /// The kernel as it is written.
    pub fn kernel(&self, timeline: &Timeline) -> Option<KernelEvent> {
        let event = self.event(timeline)?;
        Some(KernelEvent {
            layer: self.layer,
            module: self.module,
            component: self.component,
            name: if self.whole_graph { Cow::Borrowed("graph") } else { Cow::Owned(timeline.name(event.name).to_owned()) },
            stream: event.stream,
            begin_ns: event.begin,
            end_ns: event.end.max(event.begin),
            correlation_id: event.correlation,
            graph_node_id: event.graph_node,
            grid: event.grid,
            block: event.block,
            registers: event.registers,
            shared_bytes: event.shared,
        })
    }
}

/// A forward pass and its kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct Pass {
    /// What its range says; `None` for the kernels in no range.
    pub step: Option<Step>,
    /// Its kernels, in order of time.
    pub kernels: Vec<Placed>,
}

impl Pass {
    /// From the begin of the first kernel to the end of the last, ns; `None` without kernels.
    pub fn device_ns(&self, timeline: &Timeline) -> Option<i64> {
        let events = || self.kernels.iter().filter_map(|k| k.event(timeline));
        let begin = events().map(|e| e.begin).min()?;
        let end = events().map(|e| e.end.max(e.begin)).max()?;
        end.checked_sub(begin)
    }

    /// Its kernels as they are written.
    pub fn events(&self, timeline: &Timeline) -> Vec<KernelEvent> {
        self.kernels.iter().filter_map(|k| k.kernel(timeline)).collect()
    }
}

/// What was found in a profile.
#[derive(Debug, Default)]
pub struct Passes {
    /// Passes of the target, in order of time; those of the drafter are in the next one.
    pub passes: Vec<Pass>,
    /// Kernels in no pass.
    pub loose: Vec<Placed>,
    /// Kernels of other devices, which are not in it.
    pub other_devices: u64,
    /// Passes in which no layer could be told.
    pub without_layers: u64,
}

/// What a name says, looked at once.
struct Names {
    steps: Vec<Option<Step>>,
    modules: Vec<Option<(u16, Component)>>,
    drafts: Vec<bool>,
    components: Vec<Component>,
    choices: Vec<bool>,
}

impl Names {
    fn of(timeline: &Timeline) -> Self {
        let all = || (0..timeline.names() as NameId).map(|id| timeline.name(id));
        Self {
            steps: all().map(annotation::step).collect(),
            modules: all().map(annotation::module).collect(),
            drafts: all().map(|name| matches!(name, "draft" | "draft_extend")).collect(),
            components: all().map(kernel_names::component).collect(),
            choices: all().map(kernel_names::is_choice).collect(),
        }
    }

    fn step(&self, name: NameId) -> Option<Step> {
        self.steps.get(name as usize).copied().flatten()
    }

    fn module(&self, name: NameId) -> Option<(u16, Component)> {
        self.modules.get(name as usize).copied().flatten()
    }
}

/// Sorts the kernels of one device (or its graphs, where there are no more) by pass. `routed` are the model's layers with a
/// router, when they are known.
pub fn passes(timeline: &Timeline, device: Option<u32>, routed: &[u16]) -> Passes {
    let names = Names::of(timeline);
    let is_step = |name: NameId| names.step(name).is_some();
    let is_module = |name: NameId| names.module(name).is_some();
    let is_draft = |name: NameId| names.drafts.get(name as usize).copied().unwrap_or(false);
    let mut found = Passes::default();
    let mut of_spans: BTreeMap<u32, Vec<Placed>> = BTreeMap::new();
    let twins = Twins::of(timeline, &names);
    let chosen = place(timeline, device);
    for (events, whole_graphs) in [(&timeline.kernels, false), (&timeline.graphs, true)] {
        let owners = timeline.owners(events, [&is_step, &is_module, &is_draft]);
        for (number, (event, [step, module, draft])) in events.iter().zip(owners).enumerate() {
            if Some((event.device, event.process)) != chosen {
                found.other_devices += 1;
                continue;
            }
            let module = module.and_then(|i| timeline.span(i)).and_then(|s| names.module(s.name));
            let step = step.map(|i| twins.on_host(timeline, i));
            let drafting =
                draft.is_some() || step.and_then(|i| timeline.span(i)).and_then(|s| names.step(s.name)).is_some_and(|s| s.phase.is_none());
            let by_name = names.components.get(event.name as usize).copied().unwrap_or(Component::Other);
            let placed = Placed {
                event: number as u32,
                whole_graph: whole_graphs,
                layer: module.map(|(layer, _)| layer).filter(|_| !drafting),
                module: if drafting { Module::Draft } else { Module::Target },
                component: match (drafting, by_name) {
                    (true, _) => Component::Draft,
                    (false, Component::Other) => module.map_or(Component::Other, |(_, part)| part),
                    (false, known) => known,
                },
                choice: !whole_graphs && names.choices.get(event.name as usize).copied().unwrap_or(false),
            };
            match step {
                Some(span) => of_spans.entry(span).or_default().push(placed),
                None => found.loose.push(placed),
            }
        }
    }
    collect(timeline, &names, of_spans, routed, &mut found);
    found.loose.sort_by_key(|k| k.order(timeline));
    found
}

/// The device that is asked for, or the lowest that has kernels, and the first process that uses it.
fn place(timeline: &Timeline, device: Option<u32>) -> Option<(u32, u64)> {
    let events = timeline.kernels.iter().chain(&timeline.graphs);
    events.filter(|e| device.is_none_or(|d| d == e.device)).map(|e| (e.device, e.process)).min()
}

/// Ranges on streams are those on threads, drawn once more: the last one of the name that began before.
struct Twins {
    /// Begin and number of the ranges on threads, by name.
    by_name: HashMap<NameId, Vec<(i64, u32)>>,
    threads: u32,
}

impl Twins {
    fn of(timeline: &Timeline, names: &Names) -> Self {
        let mut by_name: HashMap<NameId, Vec<(i64, u32)>> = HashMap::new();
        for (i, span) in timeline.spans.iter().enumerate().filter(|(_, s)| names.step(s.name).is_some()) {
            by_name.entry(span.name).or_default().push((span.begin, i as u32));
        }
        by_name.values_mut().for_each(|list| list.sort_unstable());
        Self { by_name, threads: timeline.spans.len() as u32 }
    }

    fn on_host(&self, timeline: &Timeline, number: u32) -> u32 {
        if number < self.threads {
            return number;
        }
        let Some(span) = timeline.span(number) else { return number };
        let list = self.by_name.get(&span.name).map(Vec::as_slice).unwrap_or_default();
        let before = list.partition_point(|(begin, _)| *begin <= span.begin);
        before.checked_sub(1).and_then(|i| list.get(i)).map_or(number, |(_, i)| *i)
    }
}

/// Puts the kernels of each range into its pass; those of drafts into the target's next one, those of `DRAFT_EXTEND` into the one
/// before.
fn collect(timeline: &Timeline, names: &Names, mut of_spans: BTreeMap<u32, Vec<Placed>>, routed: &[u16], found: &mut Passes) {
    // Passes without kernels are there, too; of ranks that do the same, one thread's.
    let mut ranges: Vec<(u32, Span)> = timeline.spans.iter().enumerate().map(|(i, s)| (i as u32, *s)).collect();
    let beyond: Vec<(u32, Span)> =
        of_spans.keys().filter(|&&i| i as usize >= ranges.len()).filter_map(|&i| Some((i, *timeline.span(i)?))).collect();
    ranges.retain(|(_, s)| names.step(s.name).is_some());
    let threads: Vec<u64> = of_spans.keys().filter_map(|&i| timeline.span(i)).map(|s| s.thread).collect();
    // Without a kernel in any of them they are of another device's process.
    let thread = threads.first().copied();
    ranges.retain(|(i, s)| Some(s.thread) == thread || of_spans.contains_key(i));
    ranges.extend(beyond);
    ranges.sort_by_key(|(_, s)| (s.begin, std::cmp::Reverse(s.end)));
    let mut drafts: Vec<Placed> = Vec::new();
    for (number, span) in ranges {
        let Some(step) = names.step(span.name) else { continue };
        let kernels = of_spans.remove(&number).unwrap_or_default();
        if step.phase.is_none() {
            match found.passes.last_mut().filter(|_| step.follows) {
                Some(last) => last.kernels.extend(kernels),
                None => drafts.extend(kernels),
            }
            continue;
        }
        let mut all = std::mem::take(&mut drafts);
        all.extend(kernels);
        all.sort_by_key(|k| k.order(timeline));
        found.without_layers += u64::from(!number_layers(&mut all, routed));
        found.passes.push(Pass { step: Some(step), kernels: all });
    }
    // What was drafted for a pass that is not in the profile any more.
    found.loose.extend(drafts);
}

/// Numbers the layers of routing and experts by the choices of a pass; gives whether any layer is known.
fn number_layers(kernels: &mut [Placed], routed: &[u16]) -> bool {
    if kernels.iter().any(|k| k.layer.is_some()) {
        return true;
    }
    let choices = kernels.iter().filter(|k| k.choice && k.module == Module::Target).count();
    if choices == 0 || choices != routed.len() {
        return false;
    }
    let mut layers = routed.iter().copied();
    let mut layer = None;
    for kernel in kernels.iter_mut().filter(|k| k.module == Module::Target) {
        if kernel.choice {
            layer = layers.next();
        }
        if matches!(kernel.component, Component::Router | Component::Experts) {
            kernel.layer = layer;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::timeline::{Launch, lane};

    /// Two passes with a draft before the second; kernels at 100 ns steps.
    fn timeline() -> Timeline {
        let mut t = Timeline::default();
        let names = ["step[EXTEND bs=1 toks=4 forward_id=1]", "step[DRAFT bs=1]", "step[VERIFY bs=1 g_sq=3 forward_id=2]"];
        for (i, name) in names.into_iter().enumerate() {
            let name = t.intern(name).unwrap();
            t.spans.push(Span { thread: 9, begin: 1000 * i as i64, end: 1000 * i as i64 + 900, name });
        }
        let kernels = ["topk_gating_softmax", "fused_moe_kernel", "flash_fwd", "topk_gating_softmax", "fused_moe_kernel"];
        for (pass, at) in [0i64, 2000].into_iter().enumerate() {
            t.launches.insert((1, pass as u64 + 1), Launch { thread: 9, begin: at + 10, end: at + 20, graph: true });
            for (i, name) in kernels.into_iter().enumerate() {
                let (name, begin) = (t.intern(name).unwrap(), at + 100 * (i as i64 + 1));
                let graph_node = Some(i as u64);
                t.kernels.push(DeviceEvent {
                    begin,
                    end: begin + 50,
                    name,
                    process: 1,
                    correlation: Some(pass as u64 + 1),
                    graph_node,
                    ..DeviceEvent::default()
                });
            }
        }
        let name = t.intern("draft_head").unwrap();
        t.launches.insert((1, 7), Launch { thread: 9, begin: 1010, end: 1020, graph: false });
        t.kernels.push(DeviceEvent { begin: 1100, end: 1130, name, process: 1, correlation: Some(7), ..DeviceEvent::default() });
        t.kernels.push(DeviceEvent { begin: 5000, end: 5007, name, process: 1, correlation: None, ..DeviceEvent::default() });
        t.kernels.push(DeviceEvent { begin: 5000, end: 5007, name, process: 1, device: 3, ..DeviceEvent::default() });
        t
    }

    #[test]
    fn kernels_are_in_their_pass_and_drafts_in_the_next() {
        let found = passes(&timeline(), None, &[1, 2]);
        let ids: Vec<_> = found.passes.iter().map(|p| (p.step.and_then(|s| s.id), p.kernels.len())).collect();
        assert_eq!(ids, [(Some(1), 5), (Some(2), 6)]);
        let verify = &found.passes[1];
        assert_eq!(
            (verify.kernels[0].module, verify.kernels[0].component, verify.kernels[0].layer),
            (Module::Draft, Component::Draft, None)
        );
        assert_eq!(verify.device_ns(&timeline()), Some(2550 - 1100));
        let layers: Vec<_> = verify.kernels[1..].iter().map(|k| (k.component, k.layer)).collect();
        let want = [
            (Component::Router, Some(1)),
            (Component::Experts, Some(1)),
            (Component::Mla, None),
            (Component::Router, Some(2)),
            (Component::Experts, Some(2)),
        ];
        assert_eq!(layers, want);
        assert_eq!((found.loose.len(), found.other_devices, found.without_layers), (1, 1, 0));
        // As many choices as layers, or no layers at all.
        assert_eq!(passes(&timeline(), None, &[1, 2, 3]).without_layers, 2);
        assert!(passes(&timeline(), None, &[]).passes.iter().flat_map(|p| &p.kernels).all(|k| k.layer.is_none()));
        assert_eq!(passes(&timeline(), Some(3), &[]).loose.len(), 1);
    }

    #[test]
    fn ranges_on_streams_stand_for_those_on_threads() {
        let mut t = timeline();
        t.launches.clear();
        let name = t.spans[2].name;
        t.device_spans.push(Span { thread: lane(0, 0), begin: 2090, end: 2600, name });
        let found = passes(&t, None, &[1, 2]);
        let ids: Vec<_> = found.passes.iter().map(|p| (p.step.and_then(|s| s.id), p.kernels.len())).collect();
        assert_eq!(ids, [(Some(1), 0), (Some(2), 5)]);
    }
}
