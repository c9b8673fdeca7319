//! PyTorch's profiler (Kineto): Chrome traces as JSON, packed or not, whole or cut off.
//!
//! Kernels, the runtime's calls by their correlation id whatever they are called, and `record_function` ranges. Flows and
//! `External id` are not used: graph replays have none.

use super::kineto_number::{nanoseconds, number};
use super::loose_json::{Loose, Stop};
use super::timeline::{DeviceEvent, Launch, Span, Timeline, lane};
use super::{Flag, Head, ImportError, Importer, Options, Sink, flags, input, profile_import};
use std::collections::HashMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};

/// Kineto traces.
pub struct Kineto;

impl Importer for Kineto {
    fn name(&self) -> &'static str {
        "kineto"
    }

    fn about(&self) -> &'static str {
        "PyTorch profiler traces (.json, .json.gz): kernels with times; --into TRACE ties them to a trace's steps"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::PROFILE
    }

    fn sniff(&self, head: &Head) -> bool {
        if head.starts_with(&[0x1f, 0x8b]) {
            return head.path.to_string_lossy().ends_with(".json.gz") && begins_like_one(&unpacked(&head.path));
        }
        begins_like_one(&head.bytes)
    }

    fn adds(&self) -> bool {
        true
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        let mut timeline = Timeline::default();
        for (number, path) in inputs.iter().enumerate() {
            read(path, number as u64, &mut timeline, sink)?;
        }
        profile_import::import(inputs, "kineto", timeline, options, sink)
    }
}

/// The beginning of a packed file; empty when it cannot be unpacked.
fn unpacked(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(reader) = input::open(path) {
        let _ = std::io::Read::read_to_end(&mut std::io::Read::take(reader, 64 << 10), &mut bytes);
    }
    bytes
}

fn begins_like_one(bytes: &[u8]) -> bool {
    let has = |text: &str| bytes.windows(text.len()).any(|w| w == text.as_bytes());
    let first = bytes.iter().find(|b| !b.is_ascii_whitespace());
    match first {
        Some(b'{') => has("\"traceEvents\"") || has("\"schemaVersion\"") && has("\"deviceProperties\""),
        Some(b'[') => has("\"ph\"") && has("\"ts\""),
        _ => false,
    }
}

/// What a reading has found besides events.
#[derive(Default)]
struct Found {
    base: i64,
    dropped: u64,
    cut: bool,
}

fn read(path: &Path, number: u64, timeline: &mut Timeline, sink: &mut Sink) -> Result<(), ImportError> {
    let before = (timeline.kernels.len(), timeline.spans.len(), timeline.device_spans.len());
    let mut reading = Reading {
        json: Loose::new(input::open(path)?),
        timeline,
        number,
        threads: HashMap::new(),
        processes: HashMap::new(),
        found: Found::default(),
        event: Event::default(),
    };
    match reading.whole() {
        Ok(()) => {}
        Err(Stop::Cut) => reading.found.cut = true,
        Err(Stop::Wrong(reason)) => return Err(ImportError::input(path, format!("not a trace of PyTorch's profiler: {reason}"))),
        Err(Stop::Io(error)) => return Err(ImportError::io(path)(error)),
    }
    let (repaired, found) = (reading.json.repaired, reading.found);
    if repaired > 0 {
        sink.warn(
            "json_repaired",
            format!("{repaired} places of the file are no JSON (backslashes, control characters, nan) and were repaired"),
        );
    }
    if found.cut {
        sink.warn("profile_cut", "the profile is cut off: what came after is not in it");
    }
    sink.leave_out("events_dropped", found.dropped, "of the profile left out: events without a time");
    // The base of times may stand behind the events.
    let shift = |t: &mut i64| *t = t.saturating_add(found.base);
    timeline.kernels.iter_mut().skip(before.0).for_each(|e| (shift(&mut e.begin), shift(&mut e.end)).1);
    timeline.spans.iter_mut().skip(before.1).for_each(|s| (shift(&mut s.begin), shift(&mut s.end)).1);
    timeline.device_spans.iter_mut().skip(before.2).for_each(|s| (shift(&mut s.begin), shift(&mut s.end)).1);
    for ((process, _), launch) in &mut timeline.launches {
        if process >> 32 == number {
            shift(&mut launch.begin);
            shift(&mut launch.end);
        }
    }
    Ok(())
}

/// The keys of one event, as text.
#[derive(Default)]
struct Event {
    phase: String,
    category: String,
    name: String,
    process: String,
    thread: String,
    begin: String,
    duration: String,
    correlation: String,
    stream: String,
    device: String,
    registers: String,
    shared: String,
    node: String,
    grid: Option<[u32; 3]>,
    block: Option<[u32; 3]>,
}

struct Reading<'a, R> {
    json: Loose<R>,
    timeline: &'a mut Timeline,
    number: u64,
    threads: HashMap<(String, String), u64>,
    processes: HashMap<String, u64>,
    found: Found,
    event: Event,
}

impl<R: BufRead> Reading<'_, R> {
    fn whole(&mut self) -> Result<(), Stop> {
        match self.json.peek()?.ok_or(Stop::Cut)? {
            b'[' => self.events(),
            b'{' => {
                self.json.take(b'{')?;
                let (mut first, mut key) = (true, String::new());
                while self.json.next(b'}', &mut first)? {
                    self.json.key(&mut key)?;
                    match key.as_str() {
                        "traceEvents" => self.events()?,
                        "baseTimeNanoseconds" => {
                            self.json.scalar(&mut key)?;
                            self.found.base = key.parse().unwrap_or(0);
                        }
                        "deviceProperties" => self.devices()?,
                        _ => self.json.skip()?,
                    }
                }
                Ok(())
            }
            _ => Err(self.json.wrong("a list or an object was to be here")),
        }
    }

    /// The name of the first device.
    fn devices(&mut self) -> Result<(), Stop> {
        if !self.json.take(b'[')? {
            return self.json.skip();
        }
        let (mut first, mut text) = (true, String::new());
        while self.json.next(b']', &mut first)? {
            if !self.json.take(b'{')? {
                self.json.skip()?;
                continue;
            }
            let mut first = true;
            while self.json.next(b'}', &mut first)? {
                self.json.key(&mut text)?;
                let is_name = text == "name";
                self.json.scalar(&mut text)?;
                if is_name && self.timeline.device.is_none() && !text.is_empty() {
                    self.timeline.device = Some(text.chars().take(200).collect());
                }
            }
        }
        Ok(())
    }

    fn events(&mut self) -> Result<(), Stop> {
        if !self.json.take(b'[')? {
            return Err(self.json.wrong("traceEvents is not a list"));
        }
        let mut first = true;
        while self.json.next(b']', &mut first)? {
            if self.json.peek()?.ok_or(Stop::Cut)? != b'{' {
                self.json.skip()?;
                continue;
            }
            self.one()?;
            self.keep()?;
        }
        Ok(())
    }

    fn one(&mut self) -> Result<(), Stop> {
        let (mut first, mut key) = (true, String::new());
        let event = &mut self.event;
        for text in [
            &mut event.phase,
            &mut event.category,
            &mut event.name,
            &mut event.process,
            &mut event.thread,
            &mut event.begin,
            &mut event.duration,
            &mut event.correlation,
            &mut event.stream,
            &mut event.device,
            &mut event.registers,
            &mut event.shared,
            &mut event.node,
        ] {
            text.clear();
        }
        (event.grid, event.block) = (None, None);
        self.json.take(b'{')?;
        while self.json.next(b'}', &mut first)? {
            self.json.key(&mut key)?;
            let event = &mut self.event;
            match key.as_str() {
                "ph" => self.json.scalar(&mut event.phase)?,
                "cat" => self.json.scalar(&mut event.category)?,
                "name" => self.json.scalar(&mut event.name)?,
                "pid" => self.json.scalar(&mut event.process)?,
                "tid" => self.json.scalar(&mut event.thread)?,
                "ts" => self.json.scalar(&mut event.begin)?,
                "dur" => self.json.scalar(&mut event.duration)?,
                "args" => self.arguments(&mut key)?,
                _ => self.json.skip()?,
            }
        }
        Ok(())
    }

    fn arguments(&mut self, key: &mut String) -> Result<(), Stop> {
        if !self.json.take(b'{')? {
            return self.json.skip();
        }
        let mut first = true;
        while self.json.next(b'}', &mut first)? {
            self.json.key(key)?;
            let event = &mut self.event;
            match key.as_str() {
                "correlation" => self.json.scalar(&mut event.correlation)?,
                "stream" => self.json.scalar(&mut event.stream)?,
                "device" => self.json.scalar(&mut event.device)?,
                "registers per thread" => self.json.scalar(&mut event.registers)?,
                "shared memory" => self.json.scalar(&mut event.shared)?,
                "graph node id" => self.json.scalar(&mut event.node)?,
                "grid" => self.event.grid = self.sizes(key)?,
                "block" => self.event.block = self.sizes(key)?,
                _ => self.json.skip()?,
            }
        }
        Ok(())
    }

    fn sizes(&mut self, text: &mut String) -> Result<Option<[u32; 3]>, Stop> {
        if !self.json.take(b'[')? {
            self.json.skip()?;
            return Ok(None);
        }
        let (mut first, mut n, mut sizes) = (true, 0, [0; 3]);
        while self.json.next(b']', &mut first)? {
            self.json.scalar(text)?;
            match (sizes.get_mut(n), text.parse()) {
                (Some(place), Ok(size)) => *place = size,
                _ => n = sizes.len(),
            }
            n += 1;
        }
        Ok((n == 3).then_some(sizes))
    }

    /// Puts the event where it belongs, if anywhere.
    fn keep(&mut self) -> Result<(), Stop> {
        if self.event.phase != "X" {
            return Ok(());
        }
        let category = self.event.category.to_ascii_lowercase();
        let kind = match category.as_str() {
            "kernel" => Kind::Kernel,
            "cuda_runtime" | "cuda_driver" | "runtime" | "hip_runtime" | "hip_driver" => Kind::Launch,
            "user_annotation" => Kind::Range,
            "gpu_user_annotation" => Kind::DeviceRange,
            _ => return Ok(()),
        };
        let (Some(begin), Some(duration)) = (nanoseconds(&self.event.begin), nanoseconds(&self.event.duration)) else {
            self.found.dropped += 1;
            return Ok(());
        };
        let end = begin.saturating_add(duration.max(0));
        self.timeline.check().map_err(Stop::Wrong)?;
        let process = self.process();
        let correlation = self.event.correlation.parse().ok();
        match kind {
            Kind::Kernel => {
                let name = self.timeline.intern(&self.event.name).map_err(Stop::Wrong)?;
                let (device, stream) = (number(&self.event.device).or_else(|| number(&self.event.process)), number(&self.event.stream));
                self.timeline.kernels.push(DeviceEvent {
                    begin,
                    end,
                    name,
                    process,
                    correlation,
                    device: device.unwrap_or(0),
                    stream: stream.or_else(|| number(&self.event.thread)),
                    // Outside graphs it is 0.
                    graph_node: self.event.node.parse().ok().filter(|&node| node != 0),
                    grid: self.event.grid,
                    block: self.event.block,
                    registers: number(&self.event.registers),
                    shared: number(&self.event.shared),
                });
            }
            Kind::Launch => {
                let graph = self.event.name.contains("GraphLaunch");
                self.timeline.graph_launches += u64::from(graph);
                self.timeline.hip |= self.event.name.starts_with("hip");
                let thread = self.thread();
                if let Some(id) = correlation.filter(|&id| id != 0) {
                    self.timeline.launches.insert((process, id), Launch { thread, begin, end, graph });
                }
            }
            Kind::Range => {
                let (thread, name) = (self.thread(), self.timeline.intern(&self.event.name).map_err(Stop::Wrong)?);
                self.timeline.spans.push(Span { thread, begin, end, name });
            }
            Kind::DeviceRange => {
                let (Some(device), Some(stream)) = (number(&self.event.process), number(&self.event.thread)) else { return Ok(()) };
                let name = self.timeline.intern(&self.event.name).map_err(Stop::Wrong)?;
                self.timeline.device_spans.push(Span { thread: lane(device, stream), begin, end, name });
            }
        }
        Ok(())
    }

    /// Correlation ids are of one process, and a file is of one process: `pid` is the device of a kernel. Only merged files
    /// have words before it, which tell processes apart.
    fn process(&mut self) -> u64 {
        let words = self.event.process.trim_end_matches(|c: char| c.is_ascii_digit());
        let known = self.processes.len() as u64;
        let local = match self.processes.get(words) {
            Some(&id) => id,
            None => *self.processes.entry(words.to_owned()).or_insert(known),
        };
        self.number << 32 | local & u64::from(u32::MAX)
    }

    fn thread(&mut self) -> u64 {
        let known = self.threads.len() as u64;
        let key = (std::mem::take(&mut self.event.process), std::mem::take(&mut self.event.thread));
        let local = *self.threads.entry(key).or_insert(known);
        self.number << 32 | local & u64::from(u32::MAX)
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Kernel,
    Launch,
    Range,
    DeviceRange,
}
