//! What a profiler saw of a device: kernels, the calls that launched them, and named ranges; and how they belong together.
//!
//! A kernel is joined with its launch by process and correlation id, never by the id alone: processes number by themselves.
//! The launch is joined with the ranges that contain it on its own thread, in one sweep over both in order of time.

use std::collections::HashMap;

/// More kernels, launches or ranges than this are too many for one import.
pub const MAX_EVENTS: usize = 2 << 20;
/// Text of all names together.
const MAX_TEXT: usize = 64 << 20;
/// So many ranges around a launch are looked at; real ones nest a dozen deep.
const MAX_NESTING: usize = 64;

/// A name's number.
pub type NameId = u32;

/// A kernel, or a whole graph where the profiler has recorded no more of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceEvent {
    /// Begin, ns.
    pub begin: i64,
    /// End, ns.
    pub end: i64,
    /// Its name.
    pub name: NameId,
    /// The process that launched it.
    pub process: u64,
    /// The id that its launch has, too; `None` or 0 when there is none.
    pub correlation: Option<u64>,
    /// Device.
    pub device: u32,
    /// Stream.
    pub stream: Option<u32>,
    /// Node of the graph that it was.
    pub graph_node: Option<u64>,
    /// Blocks by dimension.
    pub grid: Option<[u32; 3]>,
    /// Threads by dimension.
    pub block: Option<[u32; 3]>,
    /// Registers per thread.
    pub registers: Option<u32>,
    /// Shared memory of a block, bytes.
    pub shared: Option<u32>,
}

/// A call on the host that launched something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Its thread, unique over processes.
    pub thread: u64,
    /// Begin, ns.
    pub begin: i64,
    /// End, ns.
    pub end: i64,
    /// Whether it launched a graph.
    pub graph: bool,
}

/// A named range on a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its thread, unique over processes.
    pub thread: u64,
    /// Begin, ns.
    pub begin: i64,
    /// End, ns.
    pub end: i64,
    /// Its text.
    pub name: NameId,
}

/// Everything that was read.
#[derive(Debug, Default)]
pub struct Timeline {
    /// Kernels, in any order.
    pub kernels: Vec<DeviceEvent>,
    /// Launches by process and correlation id.
    pub launches: HashMap<(u64, u64), Launch>,
    /// Ranges, in any order.
    pub spans: Vec<Span>,
    /// Ranges projected onto a device's stream, `thread` being `device << 32 | stream`.
    pub device_spans: Vec<Span>,
    /// Graphs of which only the whole was recorded.
    pub graphs: Vec<DeviceEvent>,
    /// Whether the calls are of AMD's runtime.
    pub hip: bool,
    /// Launches of graphs.
    pub graph_launches: u64,
    /// The device's name.
    pub device: Option<String>,
    names: Vec<Box<str>>,
    by_name: HashMap<Box<str>, NameId>,
    text: usize,
}

impl Timeline {
    /// The number of a name.
    ///
    /// # Errors
    /// A sentence, when all names together are too long.
    pub fn intern(&mut self, name: &str) -> Result<NameId, String> {
        if let Some(&id) = self.by_name.get(name) {
            return Ok(id);
        }
        self.text += name.len();
        if self.text > MAX_TEXT || self.names.len() >= MAX_EVENTS {
            return Err(format!("its names have more than {} MiB; profile fewer steps", MAX_TEXT >> 20));
        }
        let id = self.names.len() as NameId;
        self.names.push(name.into());
        self.by_name.insert(name.into(), id);
        Ok(id)
    }

    /// A name by its number.
    pub fn name(&self, id: NameId) -> &str {
        self.names.get(id as usize).map_or("", |name| name)
    }

    /// Number of names.
    pub fn names(&self) -> usize {
        self.names.len()
    }

    /// Whether one more of anything may come.
    ///
    /// # Errors
    /// A sentence, when there are too many.
    pub fn check(&self) -> Result<(), String> {
        let most = self.kernels.len().max(self.launches.len()).max(self.spans.len()).max(self.device_spans.len()).max(self.graphs.len());
        if most < MAX_EVENTS { Ok(()) } else { Err(format!("more than {MAX_EVENTS} kernels, launches or ranges; profile fewer steps")) }
    }

    /// The range of this number, as [`Timeline::owners`] gives it.
    pub fn span(&self, number: u32) -> Option<&Span> {
        let number = number as usize;
        self.spans.get(number).or_else(|| self.device_spans.get(number.checked_sub(self.spans.len())?))
    }

    /// For each kernel (or graph), the ranges that it belongs to: the innermost of each of `kinds`, which says whether a
    /// range's name is of a kind. `None` where it is in none. Ranges on streams are numbered behind those on threads.
    pub fn owners<const N: usize>(&self, events: &[DeviceEvent], kinds: [&dyn Fn(NameId) -> bool; N]) -> Vec<[Option<u32>; N]> {
        let mut owners = vec![[None; N]; events.len()];
        // Launches of these events by thread and time.
        let mut wanted: Vec<(u64, i64, i64, u32)> = Vec::new();
        let mut loose: Vec<u32> = Vec::new();
        for (i, event) in events.iter().enumerate() {
            let launch = event.correlation.filter(|&c| c != 0).and_then(|c| self.launches.get(&(event.process, c)));
            match launch {
                Some(l) => wanted.push((l.thread, l.begin, l.end, i as u32)),
                None => loose.push(i as u32),
            }
        }
        sweep((&self.spans, 0), &mut wanted, &kinds, &mut owners);
        // Kernels without a launch: ranges that the profiler has drawn on their stream.
        let mut wanted: Vec<(u64, i64, i64, u32)> = loose
            .into_iter()
            .filter_map(|i| events.get(i as usize).map(|e| (lane(e.device, e.stream.unwrap_or(0)), e.begin, e.end, i)))
            .collect();
        sweep((&self.device_spans, self.spans.len() as u32), &mut wanted, &kinds, &mut owners);
        owners
    }
}

/// The lane of a device's stream, as in [`Timeline::device_spans`].
pub fn lane(device: u32, stream: u32) -> u64 {
    u64::from(device) << 32 | u64::from(stream)
}

/// Finds for each of `wanted` (thread, begin, end, event) the innermost containing range of each kind; `first` is the first
/// range's number.
fn sweep<const N: usize>(
    (spans, first): (&[Span], u32),
    wanted: &mut [(u64, i64, i64, u32)],
    kinds: &[&dyn Fn(NameId) -> bool; N],
    owners: &mut [[Option<u32>; N]],
) {
    let mut order: Vec<u32> = (0..spans.len() as u32).collect();
    // Of ranges that begin together the longer one is outside.
    order.sort_by_key(|&i| spans.get(i as usize).map(|s| (s.thread, s.begin, std::cmp::Reverse(s.end))));
    wanted.sort_unstable();
    let mut next = order.into_iter().peekable();
    let mut open: [Vec<(i64, u32)>; N] = std::array::from_fn(|_| Vec::new());
    let mut thread = None;
    for &(on, begin, end, event) in &*wanted {
        if thread != Some(on) {
            thread = Some(on);
            open.iter_mut().for_each(Vec::clear);
        }
        while let Some(&i) = next.peek() {
            let Some(span) = spans.get(i as usize).filter(|s| (s.thread, s.begin) <= (on, begin)) else { break };
            next.next();
            if span.thread != on {
                continue;
            }
            for (stack, of_kind) in open.iter_mut().zip(kinds) {
                if of_kind(span.name) {
                    while stack.last().is_some_and(|(end, _)| *end < span.begin) {
                        stack.pop();
                    }
                    stack.push((span.end, i));
                }
            }
        }
        let Some(found) = owners.get_mut(event as usize) else { continue };
        for (stack, found) in open.iter_mut().zip(found) {
            while stack.last().is_some_and(|(end, _)| *end < begin) {
                stack.pop();
            }
            *found = stack.iter().rev().take(MAX_NESTING).find(|(until, _)| *until >= end).map(|(_, i)| first + *i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kernel(process: u64, correlation: u64) -> DeviceEvent {
        DeviceEvent { process, correlation: Some(correlation), ..DeviceEvent::default() }
    }

    #[test]
    fn the_same_correlation_in_two_processes_is_two_launches() {
        let mut t = Timeline::default();
        let (a, b) = (t.intern("step a").unwrap(), t.intern("step b").unwrap());
        assert_eq!(t.intern("step a").unwrap(), a);
        t.spans = vec![Span { thread: 1, begin: 0, end: 10, name: a }, Span { thread: 2, begin: 0, end: 10, name: b }];
        t.launches.insert((7, 5), Launch { thread: 1, begin: 2, end: 3, graph: false });
        t.launches.insert((8, 5), Launch { thread: 2, begin: 2, end: 3, graph: false });
        let owners = t.owners(&[kernel(7, 5), kernel(8, 5), kernel(9, 5), kernel(7, 0)], [&|_| true]);
        assert_eq!(owners, [[Some(0)], [Some(1)], [None], [None]]);
    }

    #[test]
    fn the_innermost_range_of_each_kind_is_found() {
        let mut t = Timeline::default();
        let (step, layer, other) = (t.intern("step").unwrap(), t.intern("layer").unwrap(), t.intern("other").unwrap());
        let span = |begin, end, name| Span { thread: 1, begin, end, name };
        // A start/end range that overlaps the step's end, and one that ends before the launch does.
        t.spans = vec![span(0, 100, step), span(10, 50, layer), span(12, 30, other), span(40, 41, layer), span(90, 150, other)];
        for (correlation, begin, end) in [(1, 15, 20), (2, 40, 45), (3, 60, 61), (4, 95, 110), (5, 200, 201)] {
            t.launches.insert((7, correlation), Launch { thread: 1, begin, end, graph: false });
        }
        let events: Vec<_> = (1..=5).map(|c| kernel(7, c)).collect();
        let owners = t.owners(&events, [&|name| name == step, &|name| name == layer, &|_| true]);
        assert_eq!(owners[0], [Some(0), Some(1), Some(2)]);
        assert_eq!(owners[1], [Some(0), Some(1), Some(1)]);
        assert_eq!(owners[2], [Some(0), None, Some(0)]);
        assert_eq!(owners[3], [None, None, Some(4)]);
        assert_eq!(owners[4], [None, None, None]);
    }

    #[test]
    fn kernels_without_a_launch_take_the_ranges_of_their_stream() {
        let mut t = Timeline::default();
        let name = t.intern("step").unwrap();
        t.device_spans = vec![Span { thread: lane(0, 7), begin: 0, end: 10, name }];
        let event = |stream, begin| DeviceEvent { begin, end: begin + 1, stream: Some(stream), ..DeviceEvent::default() };
        assert_eq!(t.owners(&[event(7, 3), event(8, 3), event(7, 30)], [&|_| true]), [[Some(0)], [None], [None]]);
    }

    proptest! {
        /// The sweep finds what a nested loop over properly nested ranges finds.
        #[test]
        fn the_sweep_is_the_nested_loop(
            spans in prop::collection::vec((0u64..2, 0i64..40, 0i64..20), 0..20),
            launches in prop::collection::vec((0u64..2, 0i64..60, 0i64..5), 0..20),
        ) {
            let mut t = Timeline::default();
            let name = t.intern("x").unwrap();
            for (thread, begin, len) in spans {
                let new = Span { thread, begin, end: begin + len, name };
                // Only ranges that nest: an overlap has no innermost.
                let nests = |s: &Span| s.thread != thread || s.end < begin || s.begin > new.end
                    || (s.begin <= begin && new.end <= s.end) || (begin <= s.begin && s.end <= new.end);
                if t.spans.iter().all(nests) && !t.spans.contains(&new) {
                    t.spans.push(new);
                }
            }
            let mut events = Vec::new();
            for (i, (thread, begin, len)) in launches.into_iter().enumerate() {
                t.launches.insert((0, i as u64 + 1), Launch { thread, begin, end: begin + len, graph: false });
                events.push(kernel(0, i as u64 + 1));
            }
            let owners = t.owners(&events, [&|_| true]);
            for (event, [owner]) in events.iter().zip(owners) {
                let l = t.launches[&(0, event.correlation.unwrap())];
                let around = t.spans.iter().filter(|s| s.thread == l.thread && s.begin <= l.begin && l.end <= s.end);
                let innermost = around.min_by_key(|s| s.end - s.begin);
                prop_assert_eq!(owner.map(|i| t.spans[i as usize]), innermost.copied());
            }
        }
    }
}
