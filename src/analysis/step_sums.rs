//! What each row of a verify step adds, summed over the step's layers: the basis of everything by request, tag,
//! context length and draft length. A step takes one number a row, whatever the number of layers.

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

    /// Adds one layer's window of the step `at`. Windows of one step come one after the other.
    #[inline]
    pub fn add(&mut self, at: u32, added: &[u64]) {
        let n = self.at.len();
        let begin = self.begin(n.saturating_sub(1));
        if self.at.last() == Some(&at) && self.added.len() - begin == added.len() {
            for (sum, &new) in self.added[begin..].iter_mut().zip(added) {
                *sum += new as u32;
            }
            self.layers[n - 1] += 1;
        } else {
            self.at.push(at);
            self.layers.push(1);
            self.added.extend(added.iter().map(|&new| new as u32));
            self.ends.push(self.added.len());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example_of_two_units_out_of_order() {
        let mut late = StepSums::default();
        late.add(7, &[8, 5]);
        late.add(7, &[8, 3]);
        late.add(9, &[8, 1, 2]);
        let mut early = StepSums::default();
        early.add(2, &[8, 8]);
        early.add(2, &[8]);
        early.add(2, &[8, 8]);
        late.append(early);
        late.sort();
        let steps: Vec<(u32, u32, Vec<u32>)> = late.iter().map(|s| (s.at, s.layers, s.added.to_vec())).collect();
        assert_eq!(steps, [(2, 1, vec![8, 8]), (2, 1, vec![8]), (2, 1, vec![8, 8]), (7, 2, vec![16, 8]), (9, 1, vec![8, 1, 2])]);
        let last = late.iter().last().unwrap();
        assert_eq!((last.prefix(0), last.prefix(1), last.union()), (8, 9, 11));
        assert_eq!(StepSums::default().iter().count(), 0);
    }
}
