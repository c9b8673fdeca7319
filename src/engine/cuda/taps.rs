//! Rows that leave a pass at some points: for a drafter that is made of them, and for comparisons with reference numbers. Those of a window
//! that is judged stay on the device, where the drafter takes them.

use super::buffer::Buffer;
use super::device::Device;
use super::long::longest_pass;
use super::pinned::Pinned;
use super::{PASS_ROWS, ring::Ending};
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
    hidden: usize,
    /// Of the last pass, `[rows, points * H]`.
    pub rows: Rc<Buffer>,
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
        let bytes = points.len() * longest_pass(tokens).unwrap_or(PASS_ROWS) * hidden * 4;
        let (rows, brought) = (Rc::new(device.room(bytes)?), Pinned::new(device, bytes)?);
        Ok(Some(Self { points: points.to_vec(), hidden, rows, brought, host: vec![Vec::new(); points.len()] }))
    }

    /// Numbers from one row to the next.
    pub fn stride(&self) -> usize {
        self.points.len() * self.hidden
    }

    /// Where the rows of a point begin, if it is one of them, and the numbers from one to the next.
    pub fn place(&self, point: TapPoint) -> Option<(u64, usize)> {
        let place = self.points.iter().position(|p| *p == point)?;
        Some((self.rows.float(place * self.hidden), self.stride()))
    }

    /// Tells a tap of the rows that were collected.
    pub fn tell(&self, tap: &mut dyn ForwardTap) {
        for (point, rows) in self.points.iter().zip(&self.host) {
            match *point {
                _ if rows.is_empty() => {}
                TapPoint::Attention(layer) => tap.after_attention(Module::Target, layer, rows),
                TapPoint::Layer(layer) => tap.after_layer(Module::Target, layer, rows),
            }
        }
    }

    /// Forgets the rows of the passes before.
    pub fn clear(&mut self) {
        self.host.iter_mut().for_each(Vec::clear);
    }

    /// Rows of a pass of `rows` rows that go to the host.
    fn brought_rows(rows: usize, ending: Ending) -> usize {
        if matches!(ending, Ending::Window { .. }) { 0 } else { rows }
    }

    /// Lets the stream bring all of them, of a pass of `rows` rows, as its ending says.
    pub fn bring(&self, rows: usize, ending: Ending) -> Result<(), EngineError> {
        self.brought.receive(0, Self::brought_rows(rows, ending) * self.stride() * 4, &self.rows)
    }

    /// Appends the rows of each point of a pass of `rows` rows that was waited for.
    pub fn collect(&mut self, rows: usize, ending: Ending) -> Result<(), EngineError> {
        let (stride, bytes) = (self.stride(), self.hidden * 4);
        for row in 0..Self::brought_rows(rows, ending) {
            for (place, to) in self.host.iter_mut().enumerate() {
                self.brought.append(row * stride * 4 + place * bytes, self.hidden, to)?;
            }
        }
        Ok(())
    }
}
