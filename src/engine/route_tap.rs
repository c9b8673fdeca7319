//! Collects one step's routed sets on their way out of the forward passes.

use super::ForwardTap;
use crate::trace::{Module, StepRoutes};

/// The tap of a generation: the target's rows of the pass, and of the drafter's passes the row that made a draft.
#[derive(Debug)]
pub struct RouteTap {
    routes: StepRoutes,
    on: bool,
    weights: bool,
    draft: u16,
}

impl RouteTap {
    /// A tap for `k` experts per row that collects when `on`, with gate weights when `weights`.
    pub fn new(k: usize, on: bool, weights: bool) -> Self {
        Self { routes: StepRoutes::new(k), on, weights, draft: 0 }
    }

    /// Whether anything is collected.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// The next pass of the draft module makes draft `draft` (0-based) from its last row.
    pub fn begin_draft(&mut self, draft: usize) {
        self.draft = u16::try_from(draft).unwrap_or(u16::MAX);
    }

    /// Hands over what was collected and starts anew.
    pub fn take(&mut self) -> StepRoutes {
        let k = self.routes.k;
        std::mem::replace(&mut self.routes, StepRoutes::new(k))
    }
}

impl ForwardTap for RouteTap {
    fn wants_weights(&self) -> bool {
        self.on && self.weights
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
    fn a_tap_that_is_off_keeps_nothing() {
        let mut tap = RouteTap::new(2, false, true);
        tap.routed(Module::Target, 1, &[9, 10], &[]);
        assert!(tap.take().ids.is_empty() && !tap.wants_weights());
    }
}
