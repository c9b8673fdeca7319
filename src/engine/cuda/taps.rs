//! Rows that leave a pass at some points: for a drafter that is made of them, and for comparisons with reference numbers.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::device::Device;
use super::long::longest_pass;
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
    /// Of a window `[points, PASS_ROWS, H]`, of a long pass `[points, rows of the longest, H]`.
    rows: Buffer,
    longest: usize,
    /// The same on the host.
    brought: Pinned,
    /// Of the passes since the last [`Target::forward`] began, by point.
    host: Vec<Vec<f32>>,
}

impl Taps {
    /// Room for the rows of a pass at some points, in timelines of up to `tokens` tokens; none without points.
    pub fn new(device: &Rc<Device>, points: &[TapPoint], hidden: usize, tokens: usize) -> Result<Option<Self>, EngineError> {
        if points.is_empty() {
            return Ok(None);
        }
        let longest = longest_pass(tokens).unwrap_or(PASS_ROWS);
        let bytes = points.len() * longest * hidden * 4;
        let (rows, brought) = (device.room(bytes)?, Pinned::new(device, bytes)?);
        Ok(Some(Self { points: points.to_vec(), rows, longest, brought, host: vec![Vec::new(); points.len()] }))
    }

    /// Rows from one point to the next, of a pass of `rows` rows.
    fn stride(&self, rows: usize) -> usize {
        if rows > PASS_ROWS { self.longest } else { PASS_ROWS }
    }

    /// Where the rows of a point go, of a pass of `rows` rows, if it is one of them.
    pub fn place(&self, point: TapPoint, rows: usize, hidden: usize) -> Option<u64> {
        Some(self.rows.float(self.points.iter().position(|p| *p == point)? * self.stride(rows) * hidden))
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

    /// Lets the stream bring all of them, of a pass of `rows` rows.
    pub fn bring(&self, rows: usize, hidden: usize) -> Result<(), EngineError> {
        self.brought.receive(0, self.points.len() * self.stride(rows) * hidden * 4, &self.rows)
    }

    /// Appends the `rows` rows of each point of a pass that was waited for.
    pub fn collect(&mut self, rows: usize, hidden: usize) -> Result<(), EngineError> {
        let stride = self.stride(rows);
        for (place, to) in self.host.iter_mut().enumerate() {
            self.brought.append(place * stride * hidden * 4, rows * hidden, to)?;
        }
        Ok(())
    }
}
