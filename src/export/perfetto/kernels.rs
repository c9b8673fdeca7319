//! The operations on their tracks.

use super::KERNELS;
use super::page::Page;
use crate::export::{ExportError, lanes};
use crate::trace::kernel::KernelEvent;
use crate::trace::{Module, Trace};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The operations of the wanted steps.
pub(super) struct Kernels {
    /// By begin, the longer first.
    pub(super) events: Vec<(u32, KernelEvent)>,
    /// Track of each event.
    tracks: Vec<u32>,
    /// Name of each track.
    pub(super) names: Vec<String>,
    /// By step: first begin and last end of each target layer's operations.
    pub(super) layers: BTreeMap<u32, BTreeMap<u16, (i64, i64)>>,
}

impl Kernels {
    /// Reads them; of an emulated device there are none, for their times are nobody's.
    pub(super) fn read(trace: &Trace, wanted: &RangeInclusive<u32>) -> Result<Self, ExportError> {
        let all = if trace.manifest().emulated { Vec::new() } else { trace.kernels()? };
        let mut events: Vec<(u32, KernelEvent)> = all.into_iter().filter(|(step, _)| wanted.contains(step)).collect();
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
        // Those of a second pass are behind all steps: their layers are not in the step's time.
        let in_steps = trace.manifest().instrumentation.second_pass.is_none();
        for (step, k) in events.iter().filter(|(_, k)| in_steps && k.module == Module::Target) {
            if let Some(layer) = k.layer {
                let span = layers.entry(*step).or_default().entry(layer).or_insert((k.begin_ns, k.end_ns));
                *span = (span.0.min(k.begin_ns), span.1.max(k.end_ns));
            }
        }
        Ok(Self { events, tracks, names, layers })
    }

    /// The slices from the `next`-th on that begin before a time; gives the number of the first that does not.
    pub(super) fn slices(&self, page: &mut Page<'_>, next: usize, before: i64) -> usize {
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
