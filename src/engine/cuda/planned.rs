//! Experts that a plan chooses, on their way to the routers' kernels: worked out on the host, one small copy a pass.
//!
//! A plan that depends on positions alone is worked out once for each position, and for those that a next pass may have while the device is
//! busy with this one, so that no step waits for it.

use super::PASS_ROWS;
use super::device::{Buffer, Device};
use super::pinned::Pinned;
use crate::engine::{EngineError, RoutingPlan};
use std::rc::Rc;

/// The planned experts of a timeline's passes.
#[derive(Debug)]
pub(super) struct PlannedRows {
    plan: Option<RoutingPlan>,
    /// Numbers of the routed layers, in order.
    layers: Vec<usize>,
    k: usize,
    /// Those of a pass, `[routed layers, PASS_ROWS, k]` of u16.
    ids: Buffer,
    staged: Pinned,
    /// Those of positions 0, 1, 2, ..., `[positions, routed layers, k]`; empty with a plan of passes.
    known: Vec<u16>,
}

/// Bytes of a pass's experts.
pub(super) fn planned_bytes(routed: usize, k: usize) -> usize {
    routed * PASS_ROWS * k * 2
}

impl PlannedRows {
    /// No plan, for a model with these routed layers.
    pub fn new(device: &Rc<Device>, layers: Vec<usize>, k: usize) -> Result<Self, EngineError> {
        let bytes = planned_bytes(layers.len(), k);
        Ok(Self { plan: None, layers, k, ids: device.room(bytes)?, staged: Pinned::new(device, bytes)?, known: Vec::new() })
    }

    /// Chooses by a plan from the next pass on, or no longer.
    pub fn route_by(&mut self, plan: Option<RoutingPlan>) {
        self.plan = plan;
        self.known.clear();
    }

    /// Whether there is a plan.
    pub fn is_on(&self) -> bool {
        self.plan.is_some()
    }

    /// Puts down the experts of a pass of `rows` rows at `position`; the pass before must have been waited for.
    pub fn begin(&mut self, position: usize, rows: usize) -> Result<(), EngineError> {
        self.prepare(position + rows);
        let Some(plan) = &self.plan else { return Ok(()) };
        let (k, routed) = (self.k, self.layers.len());
        let mut ids = vec![0; rows * k];
        for (number, &layer) in self.layers.iter().enumerate() {
            if plan.is_by_position() {
                for (row, ids) in ids.chunks_exact_mut(k).enumerate() {
                    ids.copy_from_slice(&self.known[((position + row) * routed + number) * k..][..k]);
                }
            } else {
                plan.choose(layer, position, &mut ids);
            }
            self.staged.put(number * PASS_ROWS * k * 2, &ids)?;
        }
        Ok(())
    }

    /// Works out the experts of all positions before `end`.
    pub fn prepare(&mut self, end: usize) {
        let Some(plan) = self.plan.as_ref().filter(|plan| plan.is_by_position()) else { return };
        let (k, routed) = (self.k, self.layers.len());
        let each = routed * k;
        let ready = self.known.len().checked_div(each).unwrap_or(end);
        self.known.resize(self.known.len().max(end * each), 0);
        for position in ready..end {
            for (&layer, ids) in self.layers.iter().zip(self.known[position * each..][..each].chunks_exact_mut(k)) {
                plan.choose(layer, position, ids);
            }
        }
    }

    /// Lets the stream take over what [`PlannedRows::begin`] put down.
    pub fn send(&self) -> Result<(), EngineError> {
        self.staged.send(0, planned_bytes(self.layers.len(), self.k), &self.ids)
    }

    /// Where the experts of routed layer number `layer` are.
    pub fn layer(&self, layer: usize) -> u64 {
        self.ids.at(layer * PASS_ROWS * self.k * 2)
    }
}
