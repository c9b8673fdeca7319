//! What one layer remembers between windows: each expert's load and the step that touched it last.

use super::counts::LoadCounts;
use std::collections::HashMap;

/// Stamp of "no previous window". Steps are stamped with their index + 1, so 0 is "never touched".
pub const NO_STAMP: u32 = u32::MAX;
const NOBODY: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    stamp: u32,
    load: u32,
}

/// What a window did to its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Distinct experts.
    pub union: u32,
    /// Distinct experts of the kept rows.
    pub kept: u32,
    /// Distinct experts that the previous window's union had as well.
    pub shared: u32,
}

/// Sums over windows of the experts that each row added: `[rows]` each.
#[derive(Debug)]
pub struct Added<'a> {
    /// Of every row.
    pub marginal: &'a mut [u64],
    /// Of rejected rows.
    pub wasted: &'a mut [u64],
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

    /// Makes `request` the owner of the stamps; returns the stamp of its previous window here, [`NO_STAMP`] without one.
    /// `continues` says whether a request has windows to come.
    #[inline]
    pub fn enter(&mut self, request: u32, continues: impl Fn(u32) -> bool) -> u32 {
        if self.owner != request {
            self.switch(request, continues);
        }
        self.stamp
    }

    #[cold]
    fn switch(&mut self, request: u32, continues: impl Fn(u32) -> bool) {
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
                    cell.stamp = stamp;
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
        self.cells.iter().zip(0u16..).filter(|(c, _)| c.stamp == self.stamp).map(|(_, id)| id).collect()
    }

    /// Takes the owner's window: `ids` is `[rows, k]` (K = k, or 0 for any), `accepted` the last kept row.
    /// Adds each row's new experts to `added`. `None` when an id is not an expert of the layer.
    #[inline]
    pub fn window<const K: usize>(&mut self, ids: &[u16], k: usize, accepted: usize, stamp: u32, added: Added<'_>) -> Option<Touched> {
        let k = if K == 0 { k } else { K };
        let (mut touched, before) = (Touched::default(), self.stamp);
        let cells = self.cells.as_mut_slice();
        let mut outside = false;
        for (i, ((row, marginal), wasted)) in ids.chunks_exact(k).zip(added.marginal).zip(added.wasted).enumerate() {
            let mut new = 0;
            // The old stamps are set aside and compared eight at once: the loop that touches memory stays short.
            for ids in row.chunks(8) {
                let mut old = [stamp; 8];
                for (&id, old) in ids.iter().zip(&mut old) {
                    if let Some(cell) = cells.get_mut(usize::from(id)) {
                        *old = cell.stamp;
                        *cell = Cell { stamp, load: cell.load + 1 };
                    } else {
                        outside = true;
                    }
                }
                new += old.iter().map(|&s| u32::from(s != stamp)).sum::<u32>();
                touched.shared += old.iter().map(|&s| u32::from(s == before)).sum::<u32>();
            }
            *marginal += u64::from(new);
            *wasted += if i > accepted { u64::from(new) } else { 0 };
            touched.union += new;
            if i == accepted {
                touched.kept = touched.union;
            }
            self.rows += 1;
        }
        self.stamp = stamp;
        (!outside).then_some(touched)
    }

    /// The load so far.
    pub fn load(&self) -> LoadCounts {
        LoadCounts { rows: self.rows, by_expert: self.cells.iter().map(|c| u64::from(c.load)).collect() }
    }

    /// Last unions of requests that continue behind this unit.
    pub fn open_ends(&self, continues: impl Fn(u32) -> bool) -> Vec<(u32, Box<[u16]>)> {
        let owner = (self.owner != NOBODY).then(|| (self.owner, self.last_union()));
        let waiting = self.waiting.iter().map(|(&request, (_, union))| (request, union.clone()));
        owner.into_iter().chain(waiting).filter(|(request, _)| continues(*request)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(layer: &mut LayerState, request: u32, stamp: u32, ids: &[u16], accepted: usize) -> (u32, Touched, Vec<u64>) {
        let before = layer.enter(request, |_| true);
        let (mut marginal, mut wasted) = (vec![0; ids.len() / 2], vec![0; ids.len() / 2]);
        let added = Added { marginal: &mut marginal, wasted: &mut wasted };
        let touched = layer.window::<0>(ids, 2, accepted, stamp, added).unwrap();
        assert_eq!(wasted.iter().sum::<u64>(), u64::from(touched.union - touched.kept));
        assert!(wasted.iter().zip(&marginal).enumerate().all(|(i, (w, m))| *w == if i > accepted { *m } else { 0 }));
        (before, touched, marginal)
    }

    #[test]
    fn worked_example_of_two_interleaved_requests() {
        let mut layer = LayerState::new(10);
        // Rows {1,2} {2,3} {1,9}: 2 + 1 + 1 experts; row 2 is rejected and alone touched 9.
        let (before, touched, marginal) = window(&mut layer, 7, 1, &[1, 2, 2, 3, 1, 9], 1);
        assert_eq!((before, touched), (NO_STAMP, Touched { union: 4, kept: 3, shared: 0 }));
        assert_eq!(marginal, [2, 1, 1]);
        // Another request in between touches the same experts.
        let (before, touched, _) = window(&mut layer, 8, 2, &[1, 2, 3, 4], 1);
        assert_eq!((before, touched.shared), (NO_STAMP, 0));
        // {2,9,5,6} after {1,2,3,9}: two of four are shared.
        let (before, touched, _) = window(&mut layer, 7, 3, &[2, 9, 9, 5, 6, 2], 0);
        assert_eq!((before, touched), (1, Touched { union: 4, kept: 2, shared: 2 }));
        let (_, touched, _) = window(&mut layer, 8, 4, &[4, 9], 0);
        assert_eq!(touched.shared, 1);
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
        let added = Added { marginal: &mut [0], wasted: &mut [0] };
        assert_eq!(layer.window::<0>(&[0, 4], 2, 0, 1, added), None);
    }
}
