//! What each row of a verify step adds, summed over the step's layers: the basis of everything by request, tag,
//! context length and draft length. A step takes one number a row, whatever the number of layers.

use std::collections::HashMap;

/// The layers' windows of one verify step, added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSum<'a> {
    /// Index of the step.
    pub at: u32,
    /// Layers that have a window of this number of rows.
    pub layers: u32,
    /// Entry i: experts that row i adds, summed over those layers.
    pub added: &'a [u32],
}

impl StepSum<'_> {
    /// Σ over layers of the distinct experts of rows 0...last.
    pub fn prefix(&self, last: usize) -> u64 {
        self.added.iter().take(last + 1).map(|&n| u64::from(n)).sum()
    }

    /// Σ over layers of the window's distinct experts.
    pub fn union(&self) -> u64 {
        self.prefix(self.added.len())
    }
}

/// All verify steps' sums, in columns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepSums {
    at: Vec<u32>,
    layers: Vec<u32>,
    ends: Vec<usize>,
    added: Vec<u32>,
}

impl StepSums {
    fn begin(&self, i: usize) -> usize {
        i.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }

    /// Appends a step.
    pub fn push(&mut self, at: u32, layers: u32, added: &[u32]) {
        self.at.push(at);
        self.layers.push(layers);
        self.added.extend_from_slice(added);
        self.ends.push(self.added.len());
    }

    /// Gives the steps other indices.
    pub fn renumber(&mut self, step: impl Fn(u32) -> u32) {
        self.at.iter_mut().for_each(|at| *at = step(*at));
    }

    /// Appends the steps of another unit.
    pub fn append(&mut self, other: Self) {
        let shift = self.added.len();
        self.at.extend(other.at);
        self.layers.extend(other.layers);
        self.added.extend(other.added);
        self.ends.extend(other.ends.iter().map(|end| end + shift));
    }

    /// Puts the steps into order.
    pub fn sort(&mut self) {
        if self.at.is_sorted() {
            return;
        }
        let mut order: Vec<usize> = (0..self.at.len()).collect();
        order.sort_by_key(|&i| self.at[i]);
        let mut sorted = Self::default();
        for i in order {
            sorted.at.push(self.at[i]);
            sorted.layers.push(self.layers[i]);
            sorted.added.extend_from_slice(&self.added[self.begin(i)..self.ends[i]]);
            sorted.ends.push(sorted.added.len());
        }
        *self = sorted;
    }

    /// The steps, ascending after [`StepSums::sort`]. A step whose layers have windows of different lengths comes once a length.
    pub fn iter(&self) -> impl Iterator<Item = StepSum<'_>> {
        (0..self.at.len()).map(|i| StepSum { at: self.at[i], layers: self.layers[i], added: &self.added[self.begin(i)..self.ends[i]] })
    }
}

/// The sums of one unit's steps while its windows come, in any order.
#[derive(Debug, Clone, Default)]
pub struct StepAdder {
    sums: StepSums,
    /// By place of the step in the unit: one more than its entry in `sums`, 0 for none.
    entry_of: Vec<u32>,
    /// Entries of the further lengths of steps whose layers have windows of different ones.
    others: HashMap<(u32, usize), u32>,
}

impl StepAdder {
    /// Adds one layer's window of the step `at`; `first` is the unit's first step.
    #[inline]
    pub fn add(&mut self, first: usize, at: u32, added: &[u64]) {
        let place = (at as usize).saturating_sub(first);
        let entry = match self.entry_of.get(place) {
            Some(&entry) if entry > 0 => entry,
            _ => self.enter(place, at, added.len()),
        };
        let mut i = entry as usize - 1;
        let (mut begin, mut end) = (self.sums.begin(i), self.sums.ends[i]);
        if end - begin != added.len() {
            i = self.other(at, added.len());
            (begin, end) = (self.sums.begin(i), self.sums.ends[i]);
        }
        self.sums.layers[i] += 1;
        for (sum, &new) in self.sums.added[begin..end].iter_mut().zip(added) {
            *sum += new as u32;
        }
    }

    /// The entry of a step that has none yet.
    #[cold]
    fn enter(&mut self, place: usize, at: u32, rows: usize) -> u32 {
        if place >= self.entry_of.len() {
            self.entry_of.resize(place + 1, 0);
        }
        let entry = self.begin(at, rows);
        self.entry_of[place] = entry;
        entry
    }

    /// A new entry; gives one more than its place.
    fn begin(&mut self, at: u32, rows: usize) -> u32 {
        let sums = &mut self.sums;
        sums.at.push(at);
        sums.layers.push(0);
        sums.added.resize(sums.added.len() + rows, 0);
        sums.ends.push(sums.added.len());
        sums.at.len() as u32
    }

    #[cold]
    fn other(&mut self, at: u32, rows: usize) -> usize {
        if let Some(&entry) = self.others.get(&(at, rows)) {
            return entry as usize - 1;
        }
        let entry = self.begin(at, rows);
        self.others.insert((at, rows), entry);
        entry as usize - 1
    }

    /// What was added.
    pub fn finish(self) -> StepSums {
        self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example_of_two_units_out_of_order() {
        let unit = |first, windows: &[(u32, &[u64])]| {
            let mut unit = StepAdder::default();
            windows.iter().for_each(|(at, added)| unit.add(first, *at, added));
            unit.finish()
        };
        // Layer by layer: the steps 7 and 9 of a first layer, step 7 of a second.
        let mut late = unit(6, &[(7, &[8, 5]), (9, &[8, 1, 2]), (7, &[8, 3])]);
        let early = unit(2, &[(2, &[8, 8]), (2, &[8]), (2, &[8, 8])]);
        late.append(early);
        late.sort();
        let steps: Vec<(u32, u32, Vec<u32>)> = late.iter().map(|s| (s.at, s.layers, s.added.to_vec())).collect();
        assert_eq!(steps, [(2, 2, vec![16, 16]), (2, 1, vec![8]), (7, 2, vec![16, 8]), (9, 1, vec![8, 1, 2])]);
        let last = late.iter().last().unwrap();
        assert_eq!((last.prefix(0), last.prefix(1), last.union()), (8, 9, 11));
        assert_eq!(StepSums::default().iter().count(), 0);
    }
}
