//! What the pass needs of a trace: its steps, and the routed rows in units that threads can read independently.

use super::AnalysisError;

/// Consecutive rows of `routes`, in order of (step, layer, row), as plain columns of equal length.
#[derive(Debug, Clone, Copy)]
pub struct RouteSlice<'a> {
    /// Step of each row.
    pub step_id: &'a [u32],
    /// Absolute layer of each row.
    pub layer: &'a [u16],
    /// Row within the window.
    pub row: &'a [u16],
    /// Whether the draft module's router chose it.
    pub draft: &'a [bool],
    /// k columns of expert ids, rank order.
    pub ids: &'a [&'a [u16]],
    /// k columns of gate weights, or none.
    pub weights: &'a [&'a [f32]],
}

impl RouteSlice<'_> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.step_id.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.step_id.is_empty()
    }

    /// Whether every column has the same length.
    pub fn is_rectangular(&self) -> bool {
        let n = self.len();
        self.layer.len() == n
            && self.row.len() == n
            && self.draft.len() == n
            && self.ids.iter().all(|c| c.len() == n)
            && self.weights.iter().all(|c| c.len() == n)
    }
}

/// Routed rows in units. No step is split over two units, and units are in order of steps.
pub trait RouteSource: Sync {
    /// Number of units.
    fn units(&self) -> usize;

    /// Bytes of the files that it is read from, by which is bounded what they may stand for; of data in memory, no bound.
    fn bytes(&self) -> u64 {
        u64::MAX
    }

    /// Reads one unit from its begin to its end, handing slices to `sink`. A window may be split over two slices.
    ///
    /// # Errors
    /// When it cannot be read, or what `sink` returned.
    fn read(&self, unit: usize, sink: &mut dyn FnMut(RouteSlice<'_>) -> Result<(), AnalysisError>) -> Result<(), AnalysisError>;
}
