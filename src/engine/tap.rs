//! What a forward pass shows while it runs.

use crate::trace::Module;

/// A receiver of a pass's inner values. Every method has an empty default: a tap takes what it wants.
pub trait ForwardTap {
    /// Whether [`ForwardTap::routed`] should be given gate weights.
    fn wants_weights(&self) -> bool {
        false
    }

    /// One routed layer's choice for the pass's rows. `ids` is `[rows, k]` in rank order;
    /// `weights` (normalised, scaled) has the same shape, or is empty when not wanted.
    fn routed(&mut self, module: Module, layer: usize, ids: &[u16], weights: &[f32]) {
        let _ = (module, layer, ids, weights);
    }

    /// The residual stream after a layer's attention, `[rows, H]`.
    fn after_attention(&mut self, module: Module, layer: usize, rows: &[f32]) {
        let _ = (module, layer, rows);
    }

    /// The residual stream after a layer, `[rows, H]`.
    fn after_layer(&mut self, module: Module, layer: usize, rows: &[f32]) {
        let _ = (module, layer, rows);
    }
}

/// The tap that takes nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoTap;
impl ForwardTap for NoTap {}
