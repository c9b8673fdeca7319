//! What one layer remembers between windows: each expert's load and the step that touched it last.

use super::counts::LoadCounts;
use std::collections::HashMap;

/// Stamp of "no previous window". Steps are stamped with their index + 1, so 0 is "never touched".
pub const NO_STAMP: u32 = u32::MAX;
const NOBODY: u32 = u32::MAX;

/// An expert's stamp in the high half and its load in the low one: one load and one store a routed id.
#[derive(Debug, Clone, Copy, Default)]
struct Cell(u64);

impl Cell {
    fn stamp(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn load(self) -> u32 {
        self.0 as u32
    }

    /// The same expert with another stamp.
    fn stamped(self, stamp: u32) -> Self {
        Self(u64::from(stamp) << 32 | u64::from(self.load()))
    }

    /// Chosen by one more row of the step with that stamp.
    fn chosen(self, stamp: u32) -> Self {
        Self(u64::from(stamp) << 32 | u64::from(self.load().wrapping_add(1)))
    }
}

/// The state of one layer within a unit.
#[derive(Debug, Clone)]
pub struct LayerState {
    cells: Vec<Cell>,
    rows: u64,
    /// Request of the last window, and its stamp.
    owner: u32,
    stamp: u32,
    /// Unions of the last windows of other requests that have more windows to come.
    waiting: HashMap<u32, (u32, Box<[u16]>)>,
    waiting_ids: usize,
}

impl LayerState {
    /// A layer of `experts` experts that nothing has touched.
    pub fn new(experts: usize) -> Self {
        Self { cells: vec![Cell::default(); experts], rows: 0, owner: NOBODY, stamp: NO_STAMP, waiting: HashMap::new(), waiting_ids: 0 }
    }

    /// Request of the last window.
    #[inline]
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Stamp of the owner's last window here, [`NO_STAMP`] without one.
    #[inline]
    pub fn stamp(&self) -> u32 {
        self.stamp
    }

    /// Makes `request` the owner of the stamps. `continues` says whether a request has windows to come.
    #[cold]
    pub fn enter(&mut self, request: u32, continues: impl Fn(u32) -> bool) {
        if self.owner == request {
            return;
        }
        if self.owner != NOBODY && continues(self.owner) {
            let union = self.last_union();
            self.waiting_ids += union.len();
            self.waiting.insert(self.owner, (self.stamp, union));
        }
        self.owner = request;
        self.stamp = NO_STAMP;
        if let Some((stamp, union)) = self.waiting.remove(&request) {
            self.stamp = stamp;
            self.waiting_ids -= union.len();
            // Others may have touched these experts since; their stamps are stale and never compared again.
            for &id in &union {
                if let Some(cell) = self.cells.get_mut(usize::from(id)) {
                    *cell = cell.stamped(stamp);
                }
            }
        }
    }

    /// Experts in the unions that are kept for requests with windows to come.
    pub fn waiting_ids(&self) -> usize {
        self.waiting_ids
    }

    /// The experts of the owner's last window, ascending.
    pub fn last_union(&self) -> Box<[u16]> {
        self.cells.iter().zip(0u16..).filter(|(c, _)| c.stamp() == self.stamp).map(|(_, id)| id).collect()
    }

    /// Takes the owner's window: `ids` is `[rows, k]`. Writes how many experts each row has that no earlier one has to
    /// `added`, unless that is `None`: known by other means. Gives how many distinct experts of the window were in the
    /// owner's window before; `None` when an id is not an expert of the layer.
    #[inline]
    pub fn window(&mut self, ids: &[u16], k: usize, stamp: u32, added: Option<&mut [u64]>) -> Option<u32> {
        let before = std::mem::replace(&mut self.stamp, stamp);
        self.rows += (ids.len() / k) as u64;
        let Some(added) = added else { return touch(&mut self.cells, ids, stamp, before) };
        let mut shared = 0;
        for (row, added) in ids.chunks_exact(k).zip(added) {
            *added = 0;
            for &id in row {
                let cell = self.cells.get_mut(usize::from(id))?;
                *added += u64::from(cell.stamp() != stamp);
                shared += u32::from(cell.stamp() == before);
                *cell = cell.chosen(stamp);
            }
        }
        Some(shared)
    }

    /// The load so far.
    pub fn load(&self) -> LoadCounts {
        LoadCounts { rows: self.rows, by_expert: self.cells.iter().map(|c| u64::from(c.load())).collect() }
    }

    /// Last unions of requests that continue behind this unit.
    pub fn open_ends(&self, continues: impl Fn(u32) -> bool) -> Vec<(u32, Box<[u16]>)> {
        let owner = (self.owner != NOBODY).then(|| (self.owner, self.last_union()));
        let waiting = self.waiting.iter().map(|(&request, (_, union))| (request, union.clone()));
        owner.into_iter().chain(waiting).filter(|(request, _)| continues(*request)).collect()
    }
}

/// Stamps experts and adds to their load; gives how many had the stamp of the window before, or `None` when one is not of
/// the layer. Stamped anew by then, an expert is not counted a second time.
///
/// Its own function, so that its few values stay in registers: the counts of a window around it take all there are.
#[inline(never)]
fn touch(cells: &mut [Cell], ids: &[u16], stamp: u32, before: u32) -> Option<u32> {
    let (mut shared, mut outside) = (0u64, false);
    let before = u64::from(before) << 32;
    for &id in ids {
        if let Some(cell) = cells.get_mut(usize::from(id)) {
            // Equal stamps leave the load alone: a comparison that adds its carry.
            shared += u64::from(cell.0 ^ before < 1 << 32);
            *cell = cell.chosen(stamp);
        } else {
            outside = true;
        }
    }
    (!outside).then_some(shared as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stamp of the request's window before, shared experts, experts that each row adds.
    fn window(layer: &mut LayerState, request: u32, stamp: u32, ids: &[u16]) -> (u32, u32, Vec<u64>) {
        layer.enter(request, |_| true);
        let before = layer.stamp();
        let mut added = vec![u64::MAX; ids.len() / 2];
        let shared = layer.window(ids, 2, stamp, Some(&mut added)).unwrap();
        (before, shared, added)
    }

    #[test]
    fn worked_example_of_two_interleaved_requests() {
        let mut layer = LayerState::new(10);
        // Rows {1,2} {2,3} {1,9}: 2 + 1 + 1 experts.
        assert_eq!(window(&mut layer, 7, 1, &[1, 2, 2, 3, 1, 9]), (NO_STAMP, 0, vec![2, 1, 1]));
        // Another request in between touches the same experts.
        assert_eq!(window(&mut layer, 8, 2, &[1, 2, 3, 4]), (NO_STAMP, 0, vec![2, 2]));
        // {2,9,5,6} after {1,2,3,9}: two of four are shared.
        assert_eq!(window(&mut layer, 7, 3, &[2, 9, 9, 5, 6, 2]), (1, 2, vec![2, 1, 1]));
        // {4,9} after {1,2,3,4}, what the row adds being known.
        layer.enter(8, |_| true);
        assert_eq!((layer.stamp(), layer.window(&[4, 9], 2, 4, None)), (2, Some(1)));
        assert_eq!(layer.waiting_ids(), 4);
        assert_eq!(layer.load(), LoadCounts { rows: 9, by_expert: vec![0, 3, 5, 2, 2, 1, 1, 0, 0, 4] });
        let mut ends = layer.open_ends(|_| true);
        ends.sort();
        assert_eq!(ends, [(7, vec![2, 5, 6, 9].into()), (8, vec![4, 9].into())]);
    }

    #[test]
    fn an_id_outside_the_layer_is_told() {
        let mut layer = LayerState::new(4);
        layer.enter(0, |_| true);
        assert_eq!(layer.window(&[0, 4], 2, 1, Some(&mut [0])), None);
        assert_eq!(layer.window(&[0, 4], 2, 2, None), None);
    }
}
