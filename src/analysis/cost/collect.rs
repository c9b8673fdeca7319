//! Operations and step times to integer sums, in one pass over the operations.

use super::noise::Lasted;
use super::ratios::{Cell, Matched};
use super::regression::Moments;
use super::times::RequestTimes;
use super::{StepTime, Timed};
use crate::analysis::AnalysisError;
use crate::analysis::pass::{Plan, WindowUnion};
use crate::analysis::steps::{StepRow, StepTable};
use crate::metric::cost::{ContextBucket, TimeSource};
use crate::trace::event::UNKNOWN_CONTEXT;
use crate::trace::{Component, Kernels, Module, Phase};
use std::collections::BTreeMap;
use std::ops::Range;

/// Octaves of context length: 0, 1, 2-3, 4-7, ...
pub(super) const BUCKETS: usize = 33;
pub(super) const COMPONENTS: usize = Component::ALL.len();
/// Places of `sums`, in [`VERIFY`] and [`DECODE`] order.
pub(super) const VERIFY: usize = 0;
pub(super) const DECODE: usize = 1;

/// The octave of a context length: 0 for 0, else the number of its binary digits.
pub(super) fn bucket(context_len: u32) -> usize {
    (u32::BITS - context_len.leading_zeros()) as usize
}

/// Where operations are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the routed layer of this slot.
    Layer(usize),
    /// In any routed layer.
    AllLayers,
    /// Anywhere in a step.
    Everything,
}

/// Points of one slot, number of rows and union: how many, and the sum of their times, ns.
pub(super) type Grid = BTreeMap<(usize, u16, u16), (u64, u64)>;

/// Verify steps beside the decode steps that they are compared with.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// Sums over requests, by bucket.
    pub buckets: Vec<Cell>,
    /// By request, each with its buckets. Requests of a baseline trace come behind the trace's own.
    pub cells: BTreeMap<u32, BTreeMap<usize, Cell>>,
    /// By request: the verify steps and their tokens.
    pub tokens: BTreeMap<u32, (u64, u64)>,
}

impl Compared {
    /// Adds a step of that many ns in the target's pass, and in all; `tokens` are a verify step's.
    fn add(&mut self, (request, bucket, phase): (u32, usize, usize), pass: u64, whole: u64, tokens: u64) {
        let cell = self.cells.entry(request).or_default().entry(bucket).or_default();
        cell.n[phase] += 1;
        cell.pass_ns[phase] = cell.pass_ns[phase].saturating_add(pass);
        cell.step_ns[phase] = cell.step_ns[phase].saturating_add(whole);
        if phase == VERIFY {
            let (steps, sum) = self.tokens.entry(request).or_default();
            (*steps, *sum) = (*steps + 1, *sum + tokens);
        }
    }

    /// Whether fewer than two requests stand behind either side of the comparison: resamples would not differ where it matters.
    pub fn is_one_sided(&self) -> bool {
        self.requests_of(VERIFY) < 2 || self.requests_of(DECODE) < 2
    }

    /// Requests with steps of one kind.
    pub fn requests_of(&self, phase: usize) -> usize {
        self.cells.values().filter(|cells| cells.values().any(|c| c.n[phase] > 0)).count()
    }

    /// Sums the cells up over requests.
    fn sum_up(&mut self) {
        self.buckets = vec![Cell::default(); BUCKETS];
        for cells in self.cells.values() {
            cells.iter().for_each(|(&bucket, cell)| self.buckets[bucket].add(cell, 1));
        }
    }

    /// Verify and decode steps.
    pub fn steps(&self) -> (u64, u64) {
        self.buckets.iter().fold((0, 0), |(v, d), c| (v + c.n[VERIFY], d + c.n[DECODE]))
    }

    /// Mean of accepted drafts + 1 over the verify steps.
    pub fn tokens_per_step(&self) -> Option<f64> {
        let (steps, tokens) = self.tokens.values().fold((0, 0), |(s, t), (steps, tokens)| (s + steps, t + tokens));
        (steps > 0).then(|| tokens as f64 / steps as f64)
    }
}

/// The sums.
#[derive(Debug, Default)]
pub(super) struct Collected {
    /// Whether there are operations.
    pub has_operations: bool,
    slots: usize,
    /// Verify steps of the wanted number of rows, and decode steps.
    pub compared: Compared,
    /// Verify steps of every number of rows, and decode steps.
    pub all_rows: Compared,
    /// The steps of `compared`, one by one.
    pub lasted: Vec<Lasted>,
    /// `[buckets][slots + 1][components][2]`, ns; the last place is outside the routed layers.
    sums: Vec<u64>,
    /// The same by request.
    pub times: RequestTimes,
    /// By request and slot.
    pub moments: BTreeMap<u32, Vec<Moments>>,
    /// Points by what they depend on.
    pub grid: Grid,
}

impl Collected {
    fn at(&self, bucket: usize, place: usize, component: Component, phase: usize) -> usize {
        ((bucket * (self.slots + 1) + place) * COMPONENTS + component.index()) * 2 + phase
    }

    /// Indices of the places that one stands for.
    pub fn places(&self, place: Place) -> Range<usize> {
        match place {
            Place::Layer(slot) => slot..slot + 1,
            Place::AllLayers => 0..self.slots,
            Place::Everything => 0..self.slots + 1,
        }
    }

    /// Whether any octave has both verify and decode steps.
    pub fn is_matched(&self) -> bool {
        self.compared.buckets.iter().any(Cell::is_matched)
    }

    /// Whether any step has a time.
    pub fn has_steps(&self) -> bool {
        !self.compared.cells.is_empty()
    }

    /// Mean over the verify steps that have decode steps to be compared with, or over all when none has.
    pub fn verify_mean_ns(&self, of: fn(&Cell) -> [u64; 2]) -> Option<f64> {
        let buckets = &self.compared.buckets;
        let compared = buckets.iter().any(Cell::is_matched);
        let used = buckets.iter().filter(|c| c.is_matched() || !compared);
        let (sum, n) = used.fold((0, 0), |(s, n), c| (s + of(c)[VERIFY], n + c.n[VERIFY]));
        (n > 0).then(|| sum as f64 / n as f64)
    }

    /// Plain mean over all decode steps.
    pub fn decode_mean_ns(&self, of: fn(&Cell) -> [u64; 2]) -> Option<f64> {
        let (sum, n) = self.compared.buckets.iter().fold((0, 0), |(s, n), c| (s + of(c)[DECODE], n + c.n[DECODE]));
        (n > 0).then(|| sum as f64 / n as f64)
    }

    /// Mean time of a decode pass at the verify steps' context lengths, or over all where none is comparable, ns.
    pub fn compared_decode_ns(&self) -> Option<f64> {
        Matched::of(&self.compared.buckets).map(|m| m.decode_ns).or_else(|| self.decode_mean_ns(|c| c.pass_ns))
    }

    /// Mean time of a component in a verify step and in a decode step, ns: over the buckets that have both, weighed by verify
    /// steps; where none has, plain means of what there is. `None` without operations.
    pub fn mean_ns(&self, place: Place, component: Component) -> Option<[Option<f64>; 2]> {
        if !self.has_operations {
            return None;
        }
        let compared = self.is_matched();
        let places = self.places(place);
        let sum =
            |bucket: usize, phase: usize| -> u64 { places.clone().map(|place| self.sums[self.at(bucket, place, component, phase)]).sum() };
        let used: Vec<(usize, &Cell)> = self.compared.buckets.iter().enumerate().filter(|(_, c)| c.is_matched() || !compared).collect();
        let steps = |phase: usize| used.iter().map(|(_, c)| c.n[phase]).sum::<u64>();
        let plain = |phase: usize| {
            let n = steps(phase);
            (n > 0).then(|| used.iter().map(|&(b, _)| sum(b, phase)).sum::<u64>() as f64 / n as f64)
        };
        if !compared {
            return Some([plain(VERIFY), plain(DECODE)]);
        }
        let weighed = |&(b, c): &(usize, &Cell)| c.n[VERIFY] as f64 * sum(b, DECODE) as f64 / c.n[DECODE] as f64;
        Some([plain(VERIFY), Some(used.iter().map(weighed).sum::<f64>() / steps(VERIFY) as f64)])
    }

    /// The buckets that have steps.
    pub fn contexts(&self) -> Vec<ContextBucket> {
        let of = |(bucket, cell): (usize, &Cell)| {
            let to = if bucket == 0 { 0 } else { u32::MAX >> (32 - bucket) };
            let from = if bucket == 0 { 0 } else { 1 << (bucket - 1) };
            (cell.n != [0, 0]).then_some(ContextBucket { from, to, verify_steps: cell.n[VERIFY], decode_steps: cell.n[DECODE] })
        };
        self.compared.buckets.iter().enumerate().filter_map(of).collect()
    }
}

/// Takes traces in and sums them up.
pub(super) struct Collector<'a> {
    plan: &'a Plan<'a>,
    /// Rows of the verify steps that are compared.
    rows: u16,
    out: Collected,
    /// Requests of the traces before.
    requests: u32,
}

/// What is known of a step before its operations are.
#[derive(Clone, Copy)]
struct Kind {
    phase: usize,
    request: u32,
    bucket: usize,
    /// Whether it is compared, and not only a point of the fit.
    compared: bool,
}

/// A trace's tables side by side.
struct Tables<'a> {
    rows: &'a [StepRow],
    table: &'a StepTable,
    times: &'a [StepTime],
    source: TimeSource,
    /// By (step, slot).
    unions: &'a [WindowUnion],
    decode_only: bool,
}

/// Sums of one step's operations.
struct StepSums {
    at: Option<usize>,
    /// `[slots + 1][components]`, ns.
    ns: Vec<u64>,
}

impl<'a> Collector<'a> {
    /// Nothing yet; verify steps of `rows` rows will be compared.
    pub fn new(plan: &'a Plan<'a>, rows: u16) -> Self {
        let slots = plan.layers.len();
        let out = Collected { slots, ..Collected::default() };
        Self { plan, rows, out, requests: 0 }
    }

    /// Takes in a trace. `unions` is by (step, slot), empty where the passes' rows are not known.
    pub fn add(
        &mut self,
        rows: &[StepRow],
        table: &StepTable,
        timed: &Timed<'_>,
        source: TimeSource,
        unions: &[WindowUnion],
    ) -> Result<(), AnalysisError> {
        self.take(&Tables { rows, table, times: timed.times, source, unions, decode_only: false }, timed)
    }

    /// Takes in the decode steps of another trace.
    pub fn add_decode(&mut self, rows: &[StepRow], table: &StepTable, timed: &Timed<'_>, source: TimeSource) -> Result<(), AnalysisError> {
        self.take(&Tables { rows, table, times: timed.times, source, unions: &[], decode_only: true }, timed)
    }

    /// The sums.
    pub fn finish(mut self) -> Collected {
        self.out.compared.sum_up();
        self.out.all_rows.sum_up();
        self.out
    }

    fn take(&mut self, tables: &Tables<'_>, timed: &Timed<'_>) -> Result<(), AnalysisError> {
        if !timed.kernels.any() {
            for at in 0..tables.rows.len() {
                self.step(tables, at, 0);
            }
        } else {
            self.operations(tables, timed)?;
        }
        self.requests += tables.table.requests.len() as u32;
        Ok(())
    }

    /// All steps that have operations; the others, at the end of a killed trace, have none to be compared with.
    fn operations(&mut self, tables: &Tables<'_>, timed: &Timed<'_>) -> Result<(), AnalysisError> {
        let places = self.out.slots + 1;
        self.out.has_operations = true;
        self.out.sums.resize(BUCKETS * places * COMPONENTS * 2, 0);
        let mut sums = StepSums { at: None, ns: vec![0; places * COMPONENTS] };
        timed.kernels.each(&mut |kernels: &Kernels| {
            for i in 0..kernels.len() {
                let step = kernels.step_id[i];
                if sums.at.and_then(|at| tables.rows.get(at)).is_none_or(|row| row.step_id != step) {
                    self.flush(tables, &mut sums);
                    let at = tables.table.find(step, sums.at.map_or(0, |at| at + 1));
                    sums.at = Some(at.ok_or_else(|| AnalysisError::Kernels { step, reason: "the step is not in `steps`".into() })?);
                }
                let ns = kernels.end_ns[i].checked_sub(kernels.begin_ns[i]).and_then(|ns| u64::try_from(ns).ok());
                let ns = ns.ok_or_else(|| AnalysisError::Kernels { step, reason: "an operation ends before it begins".into() })?;
                let slot = match kernels.module[i] {
                    Module::Target => kernels.layer[i].and_then(|layer| self.plan.slot(layer)),
                    Module::Draft => None,
                };
                let component = if kernels.module[i] == Module::Draft { Component::Draft } else { kernels.component[i] };
                let cell = &mut sums.ns[slot.unwrap_or(places - 1) * COMPONENTS + component.index()];
                *cell = cell.saturating_add(ns);
            }
            Ok(())
        })?;
        self.flush(tables, &mut sums);
        Ok(())
    }

    /// Takes in the step whose operations are complete.
    fn flush(&mut self, tables: &Tables<'_>, sums: &mut StepSums) {
        let Some(at) = sums.at else { return };
        let draft = Component::Draft.index();
        let draft_ns = sums.ns[self.out.slots * COMPONENTS + draft];
        if let Some(kind) = self.step(tables, at, draft_ns) {
            if kind.compared {
                self.out.times.add((kind.request, kind.bucket, kind.phase), &sums.ns);
            }
            for (place, ns) in sums.ns.chunks_exact(COMPONENTS).enumerate() {
                if kind.compared {
                    for (component, &ns) in Component::ALL.into_iter().zip(ns) {
                        let to = self.out.at(kind.bucket, place, component, kind.phase);
                        self.out.sums[to] = self.out.sums[to].saturating_add(ns);
                    }
                }
                if place < self.out.slots {
                    self.point(tables, at, kind, place, ns[Component::Experts.index()]);
                }
            }
        }
        sums.ns.fill(0);
    }

    /// One layer's experts in one step: a point of the fit, where its union is known.
    fn point(&mut self, tables: &Tables<'_>, at: usize, kind: Kind, slot: usize, ns: u64) {
        let k = self.plan.k as u16;
        let key = (at as u32, slot as u16);
        let found = || tables.unions.binary_search_by_key(&key, |u| (u.at, u.slot)).ok().and_then(|i| tables.unions.get(i));
        // The experts of one row are distinct.
        let union = if kind.phase == DECODE { Some(k) } else { found().map(|u| u.union) };
        let (Some(union), Some(row)) = (union.filter(|_| ns > 0), tables.rows.get(at)) else { return };
        let slots = self.out.slots;
        let moments = self.out.moments.entry(kind.request).or_insert_with(|| vec![Moments::default(); slots]);
        moments[slot].add(f64::from(union) - f64::from(k), f64::from(row.rows) - 1.0, ns as f64);
        let (n, sum) = self.out.grid.entry((slot, row.rows, union)).or_default();
        (*n, *sum) = (*n + 1, sum.saturating_add(ns));
    }

    /// One step's own times. `None` for a step that is none of ours, or has no times.
    fn step(&mut self, tables: &Tables<'_>, at: usize, draft_ns: u64) -> Option<Kind> {
        let (row, time, step) = (tables.rows.get(at)?, tables.times.get(at)?, tables.table.steps.get(at)?);
        // Steps are compared at the same context length: of these nobody said it.
        if time.context_len == UNKNOWN_CONTEXT {
            return None;
        }
        let phase = match row.phase {
            Phase::Decode => DECODE,
            Phase::Verify if !tables.decode_only => VERIFY,
            Phase::Verify | Phase::Prefill => return None,
        };
        let pass = match tables.source {
            TimeSource::Cpu | TimeSource::Host => time.target_ns,
            // Of a device's step, drafting is on the device, too.
            TimeSource::Device => time.device_ns?.saturating_sub(i64::try_from(draft_ns).unwrap_or(i64::MAX)),
        };
        // Where only the device's times are known, a step is what it did on the device.
        let whole = time.device_ns.filter(|_| tables.source == TimeSource::Device && time.step_ns == 0).unwrap_or(time.step_ns);
        let (pass, whole) = (u64::try_from(pass).ok().filter(|&ns| ns > 0)?, u64::try_from(whole).ok().filter(|&ns| ns > 0)?);
        let (request, bucket) = (self.requests + step.request, bucket(time.context_len));
        let compared = phase == DECODE || row.rows == self.rows;
        let (key, tokens) = ((request, bucket, phase), u64::from(row.accepted) + 1);
        if compared {
            self.out.compared.add(key, pass, whole, tokens);
            let (bucket, phase, of_baseline) = (bucket as u8, phase as u8, tables.decode_only);
            self.out.lasted.push(Lasted { step_id: row.step_id, bucket, phase, of_baseline, pass, whole });
        }
        self.out.all_rows.add(key, pass, whole, tokens);
        Some(Kind { phase, request, bucket, compared })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_octaves() {
        for (context, expected) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (127, 7), (128, 8), (u32::MAX, 32)] {
            assert_eq!(bucket(context), expected);
        }
        let mut collected = Collected::default();
        let cell = Cell { n: [1, 2], ..Cell::default() };
        collected.compared.cells.insert(0, BTreeMap::from([(0, cell), (8, cell), (32, cell)]));
        collected.compared.sum_up();
        let ranges: Vec<_> = collected.contexts().iter().map(|c| (c.from, c.to)).collect();
        assert_eq!(ranges, [(0, 0), (128, 255), (1 << 31, u32::MAX)]);
    }
}
