//! Rows that leave a pass at some points: for a drafter that is made of them, and for comparisons with reference numbers.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::device::Device;
use super::pinned::Pinned;
use crate::engine::{EngineError, ForwardTap};
use crate::trace::Module;
use std::rc::Rc;

/// A place in a pass whose residual rows somebody wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TapPoint {
    /// After a layer's attention.
    Attention(usize),
    /// After a layer.
    Layer(usize),
}

/// Rows that leave a pass at some points.
#[derive(Debug)]
pub(super) struct Taps {
    points: Vec<TapPoint>,
    /// `[points, PASS_ROWS, H]`
    rows: Buffer,
    /// The same on the host.
    brought: Pinned,
    /// Of the passes since the last [`Target::forward`] began, by point.
    host: Vec<Vec<f32>>,
}

impl Taps {
    /// Room for the rows of a pass at some points; none without points.
    pub fn new(device: &Rc<Device>, points: &[TapPoint], hidden: usize) -> Result<Option<Self>, EngineError> {
        if points.is_empty() {
            return Ok(None);
        }
        let bytes = points.len() * PASS_ROWS * hidden * 4;
        let (rows, brought) = (device.room(bytes)?, Pinned::new(device, bytes)?);
        Ok(Some(Self { points: points.to_vec(), rows, brought, host: vec![Vec::new(); points.len()] }))
    }

    /// Where the rows of a point go, if it is one of them.
    pub fn place(&self, point: TapPoint, hidden: usize) -> Option<u64> {
        Some(self.rows.float(self.points.iter().position(|p| *p == point)? * PASS_ROWS * hidden))
    }

    /// Tells a tap of the rows that were collected.
    pub fn tell(&self, tap: &mut dyn ForwardTap) {
        for (point, rows) in self.points.iter().zip(&self.host) {
            match *point {
                TapPoint::Attention(layer) => tap.after_attention(Module::Target, layer, rows),
                TapPoint::Layer(layer) => tap.after_layer(Module::Target, layer, rows),
            }
        }
    }

    /// Forgets the rows of the passes before.
    pub fn clear(&mut self) {
        self.host.iter_mut().for_each(Vec::clear);
    }

    /// Lets the stream bring all of them.
    pub fn bring(&self, hidden: usize) -> Result<(), EngineError> {
        self.brought.receive(0, self.points.len() * PASS_ROWS * hidden * 4, &self.rows)
    }

    /// Appends the `numbers` numbers of each point of a pass that was waited for.
    pub fn collect(&mut self, numbers: usize, hidden: usize) -> Result<(), EngineError> {
        for (place, to) in self.host.iter_mut().enumerate() {
            self.brought.append(place * PASS_ROWS * hidden * 4, numbers, to)?;
        }
        Ok(())
    }
}
