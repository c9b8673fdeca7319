//! Times of passes by rows and union: the experts of each pass are drawn for it instead of chosen by the router.

use super::RecordError;
use super::bench::Bench;
use super::facts::model_shape;
use crate::engine::clock::Clock;
use crate::engine::cuda::KernelBytes;
use crate::engine::{Checkpoint, EngineError, ForwardTap, LogitRows, NoTap, RoutingPlan};
use crate::metric::costs::{Cell, CostTable, KernelCost, MeasuredModel, SCHEMA, Timed};
use crate::trace::{Component, KernelEvent, Module};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Rows of a pass of the context.
const CHUNK: usize = 32;
/// Unions of each number of rows when none are asked for.
const UNIONS: usize = 5;

/// What to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    /// Rows of passes, 1 among them.
    pub rows: Vec<u16>,
    /// Unions; empty takes five from the least to the most that each number of rows can have.
    pub unions: Vec<u16>,
    /// Tokens in the caches.
    pub context_len: u32,
    /// Passes of each cell, after one that is not counted.
    pub repeats: u32,
    /// Seed of tokens, experts and order.
    pub seed: u64,
    /// Whether a device's kernels are to be told apart by name, with their bytes.
    pub by_kernel: bool,
}

impl Grid {
    /// Pairs of rows and union for `experts` experts, `k` a row, ascending; those that no window can have are left out, a decode pass
    /// is always among them.
    pub fn cells(&self, experts: u16, k: u16) -> Vec<(u16, u16)> {
        let mut cells = vec![(1, k)];
        for &rows in &self.rows {
            let most = (u32::from(rows) * u32::from(k)).min(u32::from(experts)) as u16;
            let even = |at: usize| k + ((usize::from(most - k) * at + (UNIONS - 1) / 2) / (UNIONS - 1)) as u16;
            let wanted: Vec<u16> = if self.unions.is_empty() { (0..UNIONS).map(even).collect() } else { self.unions.clone() };
            cells.extend(wanted.into_iter().filter(|union| (k..=most).contains(union)).map(|union| (rows, union)));
        }
        cells.sort_unstable();
        cells.dedup();
        cells
    }

    /// Asked-for unions that no window of any of the rows can have.
    pub fn impossible(&self, experts: u16, k: u16) -> Vec<u16> {
        let cells = self.cells(experts, k);
        self.unions.iter().copied().filter(|&wanted| !cells.iter().any(|&(_, union)| union == wanted)).collect()
    }
}

/// A kernel's component and name.
type Kernel = (&'static str, String);

/// Adds up a pass's operations, or the kernels of a device.
struct Meter {
    clock: Clock,
    ns: BTreeMap<&'static str, i64>,
    kernels: BTreeMap<&'static str, u32>,
    /// By component and name, ns.
    by_kernel: BTreeMap<Kernel, i64>,
    /// Begin of the first kernel and end of the last, ns.
    span: Option<(i64, i64)>,
}

impl Meter {
    fn new() -> Self {
        Self { clock: Clock::start(), ns: BTreeMap::new(), kernels: BTreeMap::new(), by_kernel: BTreeMap::new(), span: None }
    }

    fn clear(&mut self) {
        self.ns.clear();
        self.kernels.clear();
        self.by_kernel.clear();
        self.span = None;
    }

    /// The time of a pass, µs: on a device that of its kernels, else `wall`; `None` of an emulated device.
    fn us(&self, bench: &Bench<'_>, wall: f64) -> Option<f64> {
        match self.span {
            _ if bench.is_emulated() => None,
            Some((begin, end)) => Some((end - begin) as f64 / 1e3),
            None => (!bench.is_device()).then_some(wall),
        }
    }
}

impl ForwardTap for Meter {
    fn clock(&self) -> Option<Clock> {
        Some(self.clock)
    }

    fn wants_routes(&self) -> bool {
        false
    }

    fn wants_output(&self) -> bool {
        false
    }

    fn operation(&mut self, _: Module, _: Option<usize>, component: Component, begin_ns: i64, end_ns: i64) {
        *self.ns.entry(component.as_str()).or_default() += end_ns - begin_ns;
    }

    fn kernel(&mut self, kernel: KernelEvent) {
        // Copies have no grid. What they bring is for the host, and none of the model's work.
        if kernel.grid.is_none() {
            return;
        }
        let (component, ns) = (kernel.component.as_str(), kernel.end_ns - kernel.begin_ns);
        *self.ns.entry(component).or_default() += ns;
        *self.by_kernel.entry((component, kernel.name.into_owned())).or_default() += ns;
        *self.kernels.entry(component).or_default() += 1;
        let (begin, end) = self.span.unwrap_or((kernel.begin_ns, kernel.end_ns));
        self.span = Some((begin.min(kernel.begin_ns), end.max(kernel.end_ns)));
    }
}

/// Tokens of the timelines that a grid needs: its context and a window.
pub fn tokens(grid: &Grid) -> usize {
    grid.context_len as usize + usize::from(grid.rows.iter().copied().max().unwrap_or(1).max(1)) + 1
}

/// Measures a model where `bench` has it. `None` when it was interrupted. `done` is told of every pass, out of so many.
///
/// The passes of all cells take turns in an order drawn anew each round, so that a machine that slows down slows all of them. Every
/// pass starts from the same timeline and is rolled back. On a device a pass takes from the begin of its first kernel to the end of its
/// last; what an emulated device takes is not kept.
///
/// # Errors
/// When the model has no routed layer, or a pass fails.
pub fn calibrate(
    checkpoint: &Checkpoint,
    bench: &Bench<'_>,
    grid: &Grid,
    interrupted: &AtomicBool,
    done: &mut dyn FnMut(u64, u64),
) -> Result<Option<CostTable>, RecordError> {
    let shape = model_shape(checkpoint);
    if shape.moe_layers.is_empty() {
        return Err(EngineError::Request(format!("{}: has no routed layers whose cost could be measured", checkpoint.name)).into());
    }
    let config = &checkpoint.config;
    let cells = grid.cells(shape.experts, shape.experts_per_token);
    let mut rng = ChaCha8Rng::seed_from_u64(grid.seed);
    let mut token = || ((u64::from(rng.next_u32()) * config.vocab as u64) >> 32) as u32;
    let most = cells.last().map_or(1, |c| usize::from(c.0));
    let context: Vec<u32> = (0..grid.context_len).map(|_| token()).collect();
    let window: Vec<u32> = (0..most).map(|_| token()).collect();

    let (mut session, mut mtp) = (bench.sides().target()?, bench.sides().draft()?);
    let mut last = vec![0.0; config.hidden];
    for (at, part) in context.chunks(CHUNK).enumerate() {
        if interrupted.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let forward = session.forward(part, LogitRows::None, &mut NoTap)?;
        if let Some(mtp) = &mut mtp {
            // The token after each row; the last row's is the window's first.
            let end = at * CHUNK + part.len();
            let next: Vec<u32> = context[at * CHUNK + 1..end].iter().chain(context.get(end).or(window.first())).copied().collect();
            mtp.extend(&next, forward.hidden, LogitRows::None, &mut NoTap)?;
        }
        last.copy_from_slice(forward.hidden_row(part.len() - 1));
        session.commit(part.len(), &mut NoTap)?;
    }

    let mut meter = Meter::new();
    let stream_gb_per_s = if grid.by_kernel { bench.stream_gb_per_s(meter.clock)? } else { None };
    // By rows: a pass of a graph that was launched before says nothing.
    let mut launched: BTreeMap<u16, Vec<KernelBytes>> = BTreeMap::new();
    let mut passes: Vec<Passes> = cells.iter().map(|_| Passes::default()).collect();
    let mut drafts = Vec::new();
    let total = u64::from(grid.repeats + 1) * cells.len() as u64;
    let mut order: Vec<usize> = (0..cells.len()).collect();
    let mut order_rng = ChaCha8Rng::seed_from_u64(grid.seed ^ 1);
    for round in 0..=grid.repeats {
        shuffle(&mut order, &mut order_rng);
        for (n, &at) in order.iter().enumerate() {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let (rows, union) = cells[at];
            let number = u64::from(round) * cells.len() as u64 + n as u64;
            // Every pass has experts of its own.
            session.route_by(Some(RoutingPlan::exact_union(usize::from(union), grid.seed.wrapping_add(number), config)?));
            meter.clear();
            let begin = Instant::now();
            session.forward(&window[..usize::from(rows)], LogitRows::All, &mut meter)?;
            let wall = begin.elapsed();
            let kernels = if grid.by_kernel { bench.launched_kernels() } else { Vec::new() };
            if !kernels.is_empty() {
                launched.insert(rows, kernels);
            }
            session.commit(0, &mut NoTap)?;
            session.settle(&mut meter)?;
            // The first round warms caches and buffers.
            if round > 0 {
                passes[at].add(meter.us(bench, wall.as_secs_f64() * 1e6), &meter, bench.is_emulated());
            }
            done(number + 1, total);
        }
        if let Some(mtp) = &mut mtp {
            let before = mtp.len();
            meter.clear();
            let begin = Instant::now();
            mtp.extend(&window[..1], &last, LogitRows::Last, &mut meter)?;
            let wall = begin.elapsed();
            mtp.truncate(before);
            session.settle(&mut meter)?;
            if round > 0 {
                drafts.extend(meter.us(bench, wall.as_secs_f64() * 1e6));
            }
        }
    }
    bench.check()?;
    let measured = cells.into_iter().zip(passes).filter_map(|((rows, union), passes)| {
        let tokens = u64::from(grid.context_len) + u64::from(rows);
        passes.cell(rows, union, launched.get(&rows).map_or(&[], Vec::as_slice), tokens)
    });
    Ok(Some(CostTable {
        schema: SCHEMA.to_owned(),
        written_by: format!("specprof {}", env!("CARGO_PKG_VERSION")),
        engine: bench.engine(),
        device: bench.device(),
        emulated: bench.is_emulated(),
        timed_by: Some(bench.timed_by()),
        stream_gb_per_s,
        model: MeasuredModel::of(&shape),
        context_len: grid.context_len,
        repeats: grid.repeats,
        seed: grid.seed,
        draft: Timed::median(&mut drafts),
        cells: measured.collect(),
        warnings: bench.warning().into_iter().collect(),
    }))
}

/// Times of one cell's passes, µs, and the kernels of one.
#[derive(Debug, Default)]
struct Passes {
    whole: Vec<f64>,
    components: BTreeMap<&'static str, Vec<f64>>,
    kernels: BTreeMap<&'static str, u32>,
    by_kernel: BTreeMap<Kernel, Vec<f64>>,
    emulated: bool,
}

impl Passes {
    fn add(&mut self, us: Option<f64>, meter: &Meter, emulated: bool) {
        self.whole.extend(us);
        self.kernels.clone_from(&meter.kernels);
        self.emulated = emulated;
        if !emulated {
            meter.ns.iter().for_each(|(name, ns)| self.components.entry(name).or_default().push(*ns as f64 / 1e3));
            meter.by_kernel.iter().for_each(|(kernel, ns)| self.by_kernel.entry(kernel.clone()).or_default().push(*ns as f64 / 1e3));
        }
    }

    /// `None` when no pass was timed, except on an emulated device. `launched` are the kernels of such a pass; its last row sees `tokens`.
    fn cell(mut self, rows: u16, union: u16, launched: &[KernelBytes], tokens: u64) -> Option<Cell> {
        let pass = Timed::median(&mut self.whole);
        if pass.is_none() && !self.emulated {
            return None;
        }
        let of = |(name, mut times): (&str, Vec<f64>)| Some((name.to_owned(), Timed::median(&mut times)?)).filter(|(_, t)| t.us > 0.0);
        let kernels = self.kernels.into_iter().map(|(name, n)| (name.to_owned(), n)).collect();
        let by_kernel = launched.iter().map(|k| KernelCost {
            component: k.component.as_str().to_owned(),
            kernel: k.kernel.to_owned(),
            launches: k.launches,
            bytes: k.moved.map(|moved| moved.with(u64::from(union), tokens)),
            time: self.by_kernel.get_mut(&(k.component.as_str(), k.kernel.to_owned())).and_then(|times| Timed::median(times)),
        });
        let by_kernel = by_kernel.collect();
        Some(Cell { rows, union, pass, components: self.components.into_iter().filter_map(of).collect(), kernels, by_kernel })
    }
}

fn shuffle(order: &mut [usize], rng: &mut ChaCha8Rng) {
    for i in (1..order.len()).rev() {
        order.swap(i, ((u64::from(rng.next_u32()) * (i as u64 + 1)) >> 32) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::super::BackendKind;
    use super::*;
    use crate::engine::{Session, builtin};
    use crate::metric::costs::TimedBy;

    fn grid(rows: &[u16], unions: &[u16]) -> Grid {
        Grid { rows: rows.to_vec(), unions: unions.to_vec(), context_len: 40, repeats: 6, seed: 3, by_kernel: false }
    }

    #[test]
    fn cells_are_what_windows_can_have() {
        assert_eq!(grid(&[1, 2], &[]).cells(64, 4), [(1, 4), (2, 4), (2, 5), (2, 6), (2, 7), (2, 8)]);
        assert_eq!(grid(&[4], &[]).cells(64, 4), [(1, 4), (4, 4), (4, 7), (4, 10), (4, 13), (4, 16)]);
        // Never more than there are, and what no window of so many rows has is left out.
        assert_eq!(grid(&[4], &[]).cells(6, 4), [(1, 4), (4, 4), (4, 5), (4, 6)]);
        assert_eq!(grid(&[2, 4], &[3, 8, 16, 17]).cells(64, 4), [(1, 4), (2, 8), (4, 8), (4, 16)]);
        assert_eq!(grid(&[2, 4], &[3, 8, 16, 17]).impossible(64, 4), [3, 17]);
    }

    /// A planned pass has the union of its plan in every routed layer, with weights of its own, and leaves no trace in the timeline.
    #[test]
    fn passes_have_the_union_of_their_plan() {
        struct Seen(Vec<usize>);
        impl ForwardTap for Seen {
            fn wants_weights(&self) -> bool {
                true
            }
            fn routed(&mut self, _: Module, _: usize, ids: &[u16], weights: &[f32]) {
                self.0.push(ids.iter().collect::<std::collections::BTreeSet<_>>().len());
                // Normalised over the new choice, in descending order.
                let scaling = 2.5;
                assert!(weights.chunks(4).all(|row| (row.iter().sum::<f32>() - scaling).abs() < 1e-4 && row.is_sorted_by(|a, b| a >= b)));
            }
        }
        let checkpoint = Checkpoint::load(builtin::ling_nano()).unwrap();
        let mut session = Session::new(&checkpoint.config, &checkpoint.weights);
        assert!((checkpoint.config.routed_scaling - 2.5).abs() < 1e-6 && checkpoint.config.norm_topk);
        let plain = session.forward(&[1, 2, 3], LogitRows::All, &mut NoTap).unwrap().logits.to_vec();
        session.commit(0);
        session.route_by(Some(RoutingPlan::exact_union(9, 1, &checkpoint.config).unwrap()));
        let mut seen = Seen(Vec::new());
        let planned = session.forward(&[1, 2, 3], LogitRows::All, &mut seen).unwrap().logits.to_vec();
        session.commit(0);
        assert_eq!(seen.0, [9; 5]);
        assert_ne!(plain, planned);
        session.route_by(None);
        assert_eq!(session.forward(&[1, 2, 3], LogitRows::All, &mut NoTap).unwrap().logits, plain);
    }

    #[test]
    fn a_table_of_the_built_in_model_is_one_that_can_be_read() {
        let checkpoint = Checkpoint::load(builtin::ling_nano()).unwrap();
        let mut told = Vec::new();
        let grid = grid(&[1, 3], &[]);
        let bench = Bench::open(&checkpoint, BackendKind::Cpu, tokens(&grid), None, &mut |_| ()).unwrap();
        let table = calibrate(&checkpoint, &bench, &grid, &AtomicBool::new(false), &mut |n, of| told.push((n, of))).unwrap().unwrap();
        assert_eq!(told.last(), Some(&(7 * 6, 7 * 6)));
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(CostTable::parse(&text), Ok(table.clone()));
        assert_eq!(table.cells.iter().map(|c| (c.rows, c.union)).collect::<Vec<_>>(), grid.cells(64, 4));
        for cell in &table.cells {
            let pass = cell.pass.unwrap();
            assert!(
                cell.kernels.is_empty()
                    && pass.ci95.is_some()
                    && ["experts", "kda", "router", "head"].iter().all(|c| cell.components.contains_key(*c))
            );
            // No part of a pass takes longer than the longest pass.
            assert!(cell.components.values().all(|part| part.us <= pass.ci95.unwrap()[1]), "{cell:?}");
        }
        assert!(table.draft.is_some());
        assert_eq!((table.timed_by, table.emulated), (Some(TimedBy::Host), false));
        assert_eq!(calibrate(&checkpoint, &bench, &grid, &AtomicBool::new(true), &mut |_, _| {}).unwrap(), None);
    }
}
