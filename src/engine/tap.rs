//! What a forward pass shows while it runs.

use super::clock::Clock;
use crate::trace::{Component, KernelEvent, Module};

/// A receiver of a pass's inner values. Every method has an empty default: a tap takes what it wants.
pub trait ForwardTap {
    /// Whether [`ForwardTap::routed`] wants to be told of anything.
    fn wants_routes(&self) -> bool {
        true
    }

    /// Whether [`ForwardTap::routed`] should be given gate weights.
    fn wants_weights(&self) -> bool {
        false
    }

    /// Whether the host looks at the hidden rows and logits of the tap's passes. Where it does not, a device computes them as ever and keeps
    /// them: what a pass gives back is empty, and damage in its logits is not looked for.
    fn wants_output(&self) -> bool {
        true
    }

    /// The clock that operations are timed by; `None` when their times are not wanted, and then nobody looks at one.
    fn clock(&self) -> Option<Clock> {
        None
    }

    /// An operation has ended: its begin and end by [`ForwardTap::clock`], ns. `layer` is `None` outside layers. An
    /// operation that several threads share counts once, from its first to its last instruction.
    fn operation(&mut self, module: Module, layer: Option<usize>, component: Component, begin_ns: i64, end_ns: i64) {
        let _ = (module, layer, component, begin_ns, end_ns);
    }

    /// A kernel of a device has run, by the device's times. Told after the pass, in order, when there is a [`ForwardTap::clock`].
    fn kernel(&mut self, kernel: KernelEvent) {
        let _ = kernel;
    }

    /// A device has worked so long for the step, ns, by events of its own around each pass. Told when the step is over.
    fn device_time(&mut self, ns: i64) {
        let _ = ns;
    }

    /// One routed layer's choice for the pass's rows. `ids` is `[rows, k]` in rank order;
    /// `weights` (normalised, scaled) has the same shape, or is empty when not wanted.
    fn routed(&mut self, module: Module, layer: usize, ids: &[u16], weights: &[f32]) {
        let _ = (module, layer, ids, weights);
    }

    /// The attention of a DSpark drafter's layer over a block.
    fn attended(&mut self, layer: usize, parts: BlockParts<'_>) {
        let _ = (layer, parts);
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

/// The parts of one drafter layer's attention over a block.
#[derive(Debug, Clone, Copy)]
pub struct BlockParts<'a> {
    /// Queries, normed and rotated, `[rows, heads, head_dim]`.
    pub queries: &'a [f32],
    /// Keys, normed and rotated, `[rows, kv_heads, head_dim]`.
    pub keys: &'a [f32],
    /// Values, as the keys.
    pub values: &'a [f32],
    /// Weighted values before the output projection, `[rows, heads * head_dim]`.
    pub mixed: &'a [f32],
}

/// The tap that takes nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoTap;
impl ForwardTap for NoTap {}
