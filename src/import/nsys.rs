//! Nsight Systems: kernels, launches and NVTX ranges of a SQLite or Parquet export, schema 3.x.
//!
//! `globalTid = hardware << 56 | machine << 48 | process << 24 | thread`: a process is `globalTid >> 24`, as `globalPid >> 24` is
//! of a kernel. Tables are made only when they have rows: any of them may be missing.

use super::nsys_export::Export;
use super::timeline::{DeviceEvent, Launch, Span, Timeline};
use super::{Flag, Head, ImportError, Importer, Options, Sink, annotation, flags, profile_import};
use crate::trace::foreign::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Push/pop and start/end ranges.
const RANGES: [i64; 2] = [59, 60];

/// Nsight Systems' exports.
pub struct Nsys;

impl Importer for Nsys {
    fn name(&self) -> &'static str {
        "nsys"
    }

    fn about(&self) -> &'static str {
        "Nsight Systems exports (--type=sqlite or parquetdir): kernels with times; --into TRACE ties them to a trace's steps"
    }

    fn adds(&self) -> bool {
        true
    }

    fn takes(&self) -> &'static [Flag] {
        flags::PROFILE
    }

    fn sniff(&self, head: &Head) -> bool {
        if head.directory {
            return ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "META_DATA_EXPORT", "StringIds"]
                .iter()
                .any(|table| head.path.join(format!("{table}.parquet")).is_file());
        }
        if is_report(&head.path) {
            return true;
        }
        // An interrupted export has a header of zeros.
        head.starts_with(b"SQLite format 3\0") || head.extension() == "sqlite" && head.bytes.iter().take(100).all(|&b| b == 0)
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        let mut timeline = Timeline::default();
        for path in inputs {
            let wrong = |reason: String| ImportError::input(path, reason);
            if is_report(path) {
                return Err(wrong(
                    "a report of Nsight Systems itself, which only its exporter reads: nsys export --type=sqlite FILE".into(),
                ));
            }
            let head = Head::read(path)?;
            if !head.directory && !head.starts_with(b"SQLite format 3\0") {
                return Err(wrong(
                    "not a SQLite database, or what an interrupted export left behind; run nsys export --type=sqlite again".into(),
                ));
            }
            let export = Export::open(path).map_err(wrong)?;
            Reading { export: &export, timeline: &mut timeline, names: HashMap::new() }.read(path, sink).map_err(wrong)?;
        }
        profile_import::import(inputs, "nsys", timeline, options, sink)
    }
}

/// Whether a file is called as the profiler's own reports are.
fn is_report(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "nsys-rep" || e == "qdrep")
}

struct Reading<'a> {
    export: &'a Export,
    timeline: &'a mut Timeline,
    /// Numbers of the timeline's names by id of `StringIds`.
    names: HashMap<i64, u32>,
}

/// The cell of a column as a small number.
fn small(cell: Cell<'_>) -> Option<u32> {
    cell.int().and_then(|n| u32::try_from(n).ok())
}

impl Reading<'_> {
    fn read(mut self, path: &Path, sink: &mut Sink) -> Result<(), String> {
        let kernels = self.export.table("CUPTI_ACTIVITY_KIND_KERNEL");
        let graphs = self.export.table("CUPTI_ACTIVITY_KIND_GRAPH_TRACE");
        let runtime = self.export.table("CUPTI_ACTIVITY_KIND_RUNTIME");
        let nvtx = self.export.table("NVTX_EVENTS");
        if kernels.is_none() && runtime.is_none() && nvtx.is_none() && self.export.table("META_DATA_EXPORT").is_none() {
            return Err("none of the tables of an Nsight Systems export is in it".into());
        }
        let base = self.session_begin()?;
        let first = self.timeline.kernels.len();
        if let Some(table) = &kernels {
            self.kernels(table, base)?;
        }
        if let Some(table) = &graphs {
            self.graphs(table, base)?;
        }
        let wanted: HashSet<(u64, u64)> = self
            .timeline
            .kernels
            .iter()
            .skip(first)
            .chain(&self.timeline.graphs)
            .filter_map(|e| Some((e.process, e.correlation?)))
            .collect();
        if let Some(table) = &runtime {
            self.launches(table, &wanted, base)?;
        }
        match &nvtx {
            Some(table) => self.ranges(table, base)?,
            None => {
                let name = super::recorder::name_of(path);
                sink.warn("no_nvtx", format!("{name} has no NVTX ranges: record with --trace=cuda,nvtx"));
            }
        }
        self.device()
    }

    /// ns since the Unix epoch at which the session began; 0 when nobody says.
    fn session_begin(&self) -> Result<i64, String> {
        let Some(table) = self.export.table("TARGET_INFO_SESSION_START_TIME") else { return Ok(0) };
        let mut begin = 0;
        self.export.rows(&table, &["utcEpochNs"], |row| {
            begin = row.first().and_then(|c| c.int()).unwrap_or(begin);
            Ok(())
        })?;
        Ok(begin)
    }

    fn kernels(&mut self, table: &str, base: i64) -> Result<(), String> {
        let columns = [
            "start",
            "end",
            "deviceId",
            "streamId",
            "correlationId",
            "globalPid",
            "shortName",
            "demangledName",
            "graphNodeId",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
            "registersPerThread",
            "staticSharedMemory",
            "dynamicSharedMemory",
        ];
        let first = self.timeline.kernels.len();
        let timeline = &mut *self.timeline;
        // Until their names are read, kernels have the number of the name's id.
        let mut ids: HashMap<i64, u32> = HashMap::new();
        self.export.rows(table, &columns, |row| {
            let &[
                start,
                end,
                device,
                stream,
                correlation,
                process,
                short,
                demangled,
                node,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                registers,
                fixed,
                dynamic,
            ] = row
            else {
                return Ok(());
            };
            let event = event([start, end, device, stream, correlation, process], base).ok_or("a kernel without start or end")?;
            let name = demangled.int().or(short.int()).unwrap_or(-1);
            let next = u32::try_from(ids.len()).unwrap_or(u32::MAX);
            let name = *ids.entry(name).or_insert(next);
            let sizes = |x, y, z| Some([small(x)?, small(y)?, small(z)?]);
            let shared = match (small(fixed), small(dynamic)) {
                (None, None) => None,
                (a, b) => Some(a.unwrap_or(0).saturating_add(b.unwrap_or(0))),
            };
            timeline.check()?;
            timeline.kernels.push(DeviceEvent {
                name,
                graph_node: node.int().and_then(|n| u64::try_from(n).ok()).filter(|&n| n != 0),
                grid: sizes(gx, gy, gz),
                block: sizes(bx, by, bz),
                registers: small(registers),
                shared,
                ..event
            });
            Ok(())
        })?;
        self.load_names(&ids.keys().copied().collect())?;
        let mut names = vec![0; ids.len()];
        for (id, number) in ids {
            let name = self.name(id)?;
            if let Some(place) = names.get_mut(number as usize) {
                *place = name;
            }
        }
        for kernel in self.timeline.kernels.iter_mut().skip(first) {
            kernel.name = names.get(kernel.name as usize).copied().unwrap_or_default();
        }
        Ok(())
    }

    /// Graphs of which only the whole was recorded; where kernels of nodes are there, they are what counts.
    fn graphs(&mut self, table: &str, base: i64) -> Result<(), String> {
        let timeline = &mut *self.timeline;
        let name = timeline.intern("graph")?;
        self.export.rows(table, &["start", "end", "deviceId", "streamId", "correlationId", "globalPid"], |row| {
            let &[start, end, device, stream, correlation, process] = row else { return Ok(()) };
            let event = event([start, end, device, stream, correlation, process], base).ok_or("a graph without start or end")?;
            timeline.check()?;
            timeline.graphs.push(DeviceEvent { name, ..event });
            Ok(())
        })
    }

    /// Calls that launched what is there; their names do not matter.
    fn launches(&mut self, table: &str, wanted: &HashSet<(u64, u64)>, base: i64) -> Result<(), String> {
        let timeline = &mut *self.timeline;
        let nothing = timeline.kernels.is_empty() && timeline.graphs.is_empty();
        self.export.rows(table, &["start", "end", "globalTid", "correlationId"], |row| {
            let &[start, end, thread, correlation] = row else { return Ok(()) };
            let (Some(begin), Some(end), Some(thread)) = (start.int(), end.int(), thread.int()) else { return Ok(()) };
            let Some(correlation) = correlation.int().and_then(|n| u64::try_from(n).ok()) else { return Ok(()) };
            let key = (process_of(Cell::Int(thread)), correlation);
            // Without any kernel, their number says what is missing.
            if nothing || wanted.contains(&key) {
                timeline.check()?;
                let launch = Launch {
                    thread: thread.cast_unsigned(),
                    begin: begin.saturating_add(base),
                    end: end.saturating_add(base),
                    graph: false,
                };
                timeline.launches.insert(key, launch);
            }
            Ok(())
        })
    }

    /// Ranges that name passes, drafts or modules. One that is still open at the end goes on until the last kernel.
    fn ranges(&mut self, table: &str, base: i64) -> Result<(), String> {
        let mut found: Vec<(i64, Option<i64>, i64, i64)> = Vec::new();
        let mut texts: BTreeMap<String, i64> = BTreeMap::new();
        let mut ids = BTreeSet::new();
        self.export.rows(table, &["start", "end", "eventType", "text", "textId", "globalTid"], |row| {
            let &[start, end, kind, text, id, thread] = row else { return Ok(()) };
            let (Some(begin), Some(thread)) = (start.int(), thread.int()) else { return Ok(()) };
            if !kind.int().is_some_and(|kind| RANGES.contains(&kind)) {
                return Ok(());
            }
            // Texts of their own are numbered below 0.
            let name = match (text.text(), id.int()) {
                (Some(text), _) if is_wanted(text) => {
                    let next = -2 - texts.len() as i64;
                    *texts.entry(text.to_owned()).or_insert(next)
                }
                (None, Some(id)) if id >= 0 => {
                    ids.insert(id);
                    id
                }
                _ => return Ok(()),
            };
            if found.len() >= super::timeline::MAX_EVENTS || texts.len() > super::timeline::MAX_EVENTS / 16 {
                return Err(format!("more than {} ranges; profile fewer steps", super::timeline::MAX_EVENTS));
            }
            found.push((begin.saturating_add(base), end.int().map(|end| end.saturating_add(base)), thread, name));
            Ok(())
        })?;
        self.load_names(&ids)?;
        for (text, id) in texts {
            let name = self.timeline.intern(&text)?;
            self.names.insert(id, name);
        }
        let last = self.timeline.kernels.iter().map(|k| k.end).max().unwrap_or(i64::MAX);
        for (begin, end, thread, id) in found {
            let Some(&name) = self.names.get(&id) else { continue };
            if !is_wanted(self.timeline.name(name)) {
                continue;
            }
            self.timeline.check()?;
            self.timeline.spans.push(Span { thread: thread.cast_unsigned(), begin, end: end.unwrap_or(last).max(begin), name });
        }
        Ok(())
    }

    /// The name of the first GPU.
    fn device(&mut self) -> Result<(), String> {
        let Some(table) = self.export.table("TARGET_INFO_GPU") else { return Ok(()) };
        let mut found: Option<(i64, String)> = None;
        self.export.rows(&table, &["id", "name"], |row| {
            if let [id, Cell::Text(name)] = row {
                let id = id.int().unwrap_or(i64::MAX);
                if found.as_ref().is_none_or(|(first, _)| id < *first) {
                    found = Some((id, name.chars().take(200).collect()));
                }
            }
            Ok(())
        })?;
        self.timeline.device = self.timeline.device.take().or(found.map(|(_, name)| name));
        Ok(())
    }

    fn load_names(&mut self, ids: &BTreeSet<i64>) -> Result<(), String> {
        for (id, text) in self.export.strings(ids)? {
            let name = self.timeline.intern(&text)?;
            self.names.insert(id, name);
        }
        Ok(())
    }

    fn name(&mut self, id: i64) -> Result<u32, String> {
        match self.names.get(&id) {
            Some(&name) => Ok(name),
            None => self.timeline.intern("(unnamed)"),
        }
    }
}

/// Whether a range's text names a pass, a draft or a module.
fn is_wanted(text: &str) -> bool {
    annotation::step(text).is_some() || annotation::module(text).is_some() || matches!(text, "draft" | "draft_extend")
}

/// What kernels and graphs have in common: begin, end, device, stream, correlation and process. `None` without a begin or an end.
fn event([start, end, device, stream, correlation, process]: [Cell<'_>; 6], base: i64) -> Option<DeviceEvent> {
    Some(DeviceEvent {
        begin: start.int()?.saturating_add(base),
        end: end.int()?.saturating_add(base),
        process: process_of(process),
        correlation: correlation.int().and_then(|n| u64::try_from(n).ok()),
        device: small(device).unwrap_or(0),
        stream: small(stream),
        ..DeviceEvent::default()
    })
}

/// The process of a `globalTid` or `globalPid`.
fn process_of(cell: Cell<'_>) -> u64 {
    cell.int().map_or(0, |n| n.cast_unsigned() >> 24)
}
