//! Collects one step's routed sets, and its operations' times, on their way out of the forward passes.

use super::ForwardTap;
use super::clock::Clock;
use crate::trace::{Component, KernelEvent, Module, StepRoutes};

/// The tap of a generation: the target's rows of the pass, and of the drafter's passes the row that made a draft.
#[derive(Debug)]
pub struct RouteTap {
    routes: StepRoutes,
    on: bool,
    weights: bool,
    draft: u16,
    clock: Option<Clock>,
    operations: Vec<KernelEvent>,
    device_ns: Option<i64>,
    tapped: TappedRows,
}

/// The outputs of some target layers in one pass.
#[derive(Debug, Default)]
pub(super) struct TappedRows {
    layers: Vec<usize>,
    hidden: usize,
    /// `[rows, layers * hidden]`
    rows: Vec<f32>,
}

impl TappedRows {
    /// Keeps the outputs of `layers`, whose rows have `hidden` numbers.
    pub fn new(layers: &[usize], hidden: usize) -> Self {
        Self { layers: layers.to_vec(), hidden, rows: Vec::new() }
    }

    /// The last pass's outputs, `[rows, layers * hidden]` in the order of the layers.
    pub fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// Takes the output of a layer, `[rows, hidden]`, if it is one of them.
    pub fn put(&mut self, layer: usize, rows: &[f32]) {
        let Some(place) = self.layers.iter().position(|l| *l == layer) else { return };
        let width = self.layers.len() * self.hidden;
        self.rows.resize(rows.len() / self.hidden.max(1) * width, 0.0);
        for (to, from) in self.rows.chunks_exact_mut(width).zip(rows.chunks_exact(self.hidden)) {
            to[place * self.hidden..][..self.hidden].copy_from_slice(from);
        }
    }
}

impl RouteTap {
    /// A tap for `k` experts per row that collects when `on`, with gate weights when `weights`.
    pub fn new(k: usize, on: bool, weights: bool) -> Self {
        Self {
            routes: StepRoutes::new(k),
            on,
            weights,
            draft: 0,
            clock: None,
            operations: Vec::new(),
            device_ns: None,
            tapped: TappedRows::default(),
        }
    }

    /// The tap, keeping the outputs of the target's `layers`, whose rows have `hidden` numbers.
    pub fn tapping(self, layers: &[usize], hidden: usize) -> Self {
        Self { tapped: TappedRows::new(layers, hidden), ..self }
    }

    /// The tapped layers' outputs in the target's last pass, `[rows, layers * hidden]` in the order of the layers.
    pub fn tapped_rows(&self) -> &[f32] {
        self.tapped.rows()
    }

    /// Times operations by `clock` from here on, or not at all.
    pub fn time_by(&mut self, clock: Option<Clock>) {
        self.clock = clock;
    }

    /// Whether anything is collected.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// The next pass of the draft module makes draft `draft` (0-based) from its last row.
    pub fn begin_draft(&mut self, draft: usize) {
        self.draft = u16::try_from(draft).unwrap_or(u16::MAX);
    }

    /// Runs `work` as an operation outside layers.
    pub fn time<T>(&mut self, module: Module, component: Component, work: impl FnOnce() -> T) -> T {
        let Some(clock) = self.clock else { return work() };
        let begin = clock.now_ns();
        let done = work();
        self.operation(module, None, component, begin, clock.now_ns());
        done
    }

    /// Hands over the operations that were timed; empty when none were wanted.
    pub fn take_operations(&mut self) -> Vec<KernelEvent> {
        // The next step has about as many.
        let room = self.operations.len();
        std::mem::replace(&mut self.operations, Vec::with_capacity(room))
    }

    /// Hands over the device's time of the step; `None` when no device has told one.
    pub fn take_device_time(&mut self) -> Option<i64> {
        self.device_ns.take()
    }

    /// Hands over what was collected and starts anew.
    pub fn take(&mut self) -> StepRoutes {
        let k = self.routes.k;
        std::mem::replace(&mut self.routes, StepRoutes::new(k))
    }
}

impl ForwardTap for RouteTap {
    fn wants_routes(&self) -> bool {
        self.on
    }

    fn wants_weights(&self) -> bool {
        self.on && self.weights
    }

    fn clock(&self) -> Option<Clock> {
        self.clock
    }

    fn operation(&mut self, module: Module, layer: Option<usize>, component: Component, begin_ns: i64, end_ns: i64) {
        let layer = layer.map(|layer| u16::try_from(layer).unwrap_or(u16::MAX));
        self.operations.push(KernelEvent::cpu(module, layer, component, begin_ns, end_ns));
    }

    fn after_layer(&mut self, module: Module, layer: usize, rows: &[f32]) {
        if module == Module::Target {
            self.tapped.put(layer, rows);
        }
    }

    fn device_time(&mut self, ns: i64) {
        self.device_ns = Some(ns);
    }

    fn kernel(&mut self, kernel: KernelEvent) {
        self.operations.push(kernel);
    }

    fn routed(&mut self, module: Module, layer: usize, ids: &[u16], weights: &[f32]) {
        if !self.on {
            return;
        }
        let layer = u16::try_from(layer).unwrap_or(u16::MAX);
        match module {
            Module::Target => self.routes.push(module, layer, 0, ids, weights),
            Module::Draft => {
                let last = |len: usize| len.saturating_sub(self.routes.k)..len;
                let (ids, weights) = (&ids[last(ids.len())], &weights[last(weights.len())]);
                self.routes.push(module, layer, self.draft, ids, weights);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_row_that_made_a_draft_is_kept_of_a_draft_pass() {
        let mut tap = RouteTap::new(2, true, false);
        tap.begin_draft(0);
        tap.routed(Module::Draft, 6, &[1, 2, 3, 4, 5, 6], &[]);
        tap.begin_draft(1);
        tap.routed(Module::Draft, 6, &[7, 8], &[]);
        tap.routed(Module::Target, 1, &[9, 10, 11, 12], &[]);
        let routes = tap.take();
        assert_eq!(routes.ids, [5, 6, 7, 8, 9, 10, 11, 12]);
        let blocks: Vec<_> = routes.blocks.iter().map(|b| (b.module, b.layer, b.first_row, b.rows)).collect();
        assert_eq!(blocks, [(Module::Draft, 6, 0, 1), (Module::Draft, 6, 1, 1), (Module::Target, 1, 0, 2)]);
        assert!(tap.take().blocks.is_empty());
    }

    #[test]
    fn operations_are_kept_only_with_a_clock() {
        let mut tap = RouteTap::new(2, true, false);
        assert_eq!(tap.time(Module::Target, Component::Sampling, || 7), 7);
        assert!(tap.clock().is_none() && tap.take_operations().is_empty());
        tap.time_by(Some(Clock::start()));
        assert_eq!(tap.time(Module::Draft, Component::Sampling, || 7), 7);
        tap.operation(Module::Target, Some(3), Component::Experts, 10, 30);
        let operations = tap.take_operations();
        let names: Vec<_> = operations.iter().map(|o| (o.layer, o.name.as_ref())).collect();
        assert_eq!(names, [(None, "cpu.draft.sampling"), (Some(3), "cpu.experts")]);
        assert_eq!((operations[1].begin_ns, operations[1].end_ns), (10, 30));
        assert!(tap.take_operations().is_empty());
    }

    #[test]
    fn tapped_layers_lie_side_by_side_row_by_row() {
        let mut tap = RouteTap::new(2, false, false).tapping(&[1, 4], 2);
        let layer = |n: f32, rows: usize| (0..rows).flat_map(|r| [n + r as f32 / 10.0, -n]).collect::<Vec<_>>();
        for rows in [3, 1] {
            for n in 0..5 {
                tap.after_layer(Module::Target, n, &layer(n as f32, rows));
                tap.after_layer(Module::Draft, n, &[7.0; 2]);
            }
            assert_eq!(tap.tapped_rows()[..4], [1.0, -1.0, 4.0, -4.0]);
            assert_eq!(tap.tapped_rows().len(), 4 * rows);
        }
        let mut none = RouteTap::new(2, true, true);
        none.after_layer(Module::Target, 1, &[1.0, 2.0]);
        assert!(none.tapped_rows().is_empty());
    }

    #[test]
    fn a_tap_that_is_off_keeps_nothing() {
        let mut tap = RouteTap::new(2, false, true);
        tap.routed(Module::Target, 1, &[9, 10], &[]);
        assert!(tap.take().ids.is_empty() && !tap.wants_weights());
    }
}
