//! Experts that a plan chooses, on their way to the routers' kernels: worked out on the host, one small copy a pass.
//!
//! A plan that depends on positions alone is worked out once for each position, and for those that a next pass may have while the device is
//! busy with this one, so that no step waits for it.

use super::PASS_ROWS;
use super::device::{Buffer, Device};
use super::long::longest_pass;
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
    /// Those of a window, `[routed layers, PASS_ROWS, k]` of u16, or of a long pass, `[routed layers, rows of the longest, k]`.
    ids: Buffer,
    longest: usize,
    staged: Pinned,
    /// Those of positions 0, 1, 2, ..., `[positions, routed layers, k]`; empty with a plan of passes.
    known: Vec<u16>,
}

/// Bytes of a pass's experts, in timelines of up to `tokens` tokens.
pub(super) fn planned_bytes(routed: usize, k: usize, tokens: usize) -> usize {
    routed * longest_pass(tokens).unwrap_or(PASS_ROWS) * k * 2
}

impl PlannedRows {
    /// No plan, for a model with these routed layers and timelines of up to `tokens` tokens.
    pub fn new(device: &Rc<Device>, layers: Vec<usize>, k: usize, tokens: usize) -> Result<Self, EngineError> {
        let bytes = planned_bytes(layers.len(), k, tokens);
        let (ids, staged) = (device.room(bytes)?, Pinned::new(device, bytes)?);
        Ok(Self { plan: None, layers, k, ids, longest: longest_pass(tokens).unwrap_or(PASS_ROWS), staged, known: Vec::new() })
    }

    /// Bytes from one layer's experts to the next one's, of a pass of `rows` rows.
    fn stride(&self, rows: usize) -> usize {
        self.k * 2 * if rows > PASS_ROWS { self.longest } else { PASS_ROWS }
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
            self.staged.put(number * self.stride(rows), &ids)?;
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

    /// Lets the stream take over what [`PlannedRows::begin`] put down for a pass of `rows` rows.
    pub fn send(&self, rows: usize) -> Result<(), EngineError> {
        self.staged.send(0, self.layers.len() * self.stride(rows), &self.ids)
    }

    /// Where the experts of routed layer number `layer` are, of a pass of `rows` rows.
    pub fn layer(&self, layer: usize, rows: usize) -> u64 {
        self.ids.at(layer * self.stride(rows))
    }
}
