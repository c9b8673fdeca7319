//! Whether an array of ids was read with the wrong strides.

use super::llamacpp_read::Block;
use std::collections::BTreeMap;

/// Whether the rows of a pass look like pieces of one permutation: the first revision of the proposed tool read a strided
/// view as if it were contiguous, so that the rows of a pass never share an expert.
#[derive(Debug, Default)]
pub struct Strides {
    /// Some rows of a pass share an expert: the array was read as it should be.
    shared: bool,
    /// How many layers of passes had so many rows of so many experts, all of them different.
    disjoint: BTreeMap<(usize, usize), u64>,
    largest: i32,
}

impl Strides {
    /// ln of this chance and below is no accident.
    const TOO_UNLIKELY: f64 = -14.0;

    /// Looks at one layer's rows.
    pub fn see(&mut self, block: &Block) {
        let rows = block.rows();
        self.largest = block.ids.iter().copied().fold(self.largest, i32::max);
        if rows < 2 || self.shared {
            return;
        }
        let mut ids = block.ids.clone();
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            self.shared = true;
            return;
        }
        *self.disjoint.entry((rows, block.k)).or_default() += 1;
    }

    /// ln of the chance that rows of independent choices would be as disjoint as these are. n rows of k of E experts are with the chance
    /// Π_{i<n} C(E - i k, k) / C(E, k) = Π_{i<n} Π_{j<k} (E - i k - j) / (E - j). Without E, the next power of two above all ids
    /// stands for it: with more experts, disjoint rows are more likely.
    fn ln_chance(&self, experts: Option<u16>) -> f64 {
        let e = experts.map_or_else(|| f64::from(self.largest.unsigned_abs().saturating_add(1).next_power_of_two()), f64::from);
        let of = |(&(rows, k), &times): (&(usize, usize), &u64)| {
            let places = (0..rows).flat_map(|row| (0..k).map(move |rank| (row * k + rank, rank)));
            let factor = |(taken, rank): (usize, usize)| ((e - taken as f64) / (e - rank as f64)).max(f64::MIN_POSITIVE).ln();
            places.map(factor).sum::<f64>() * times as f64
        };
        self.disjoint.iter().map(of).sum()
    }

    /// Whether the array was not read as it should have been.
    pub fn suspicious(&self, experts: Option<u16>) -> bool {
        !self.shared && self.ln_chance(experts) < Self::TOO_UNLIKELY
    }
}

#[cfg(test)]
mod tests {
    use super::super::llamacpp_read::Place;
    use super::*;

    fn block(k: usize, ids: &[i32]) -> Block {
        Block { layer: 1, k, ids: ids.to_vec(), place: Place::Unknown, request: String::new() }
    }

    #[test]
    fn disjoint_rows_are_suspicious_when_that_is_no_accident() {
        let mut strides = Strides::default();
        // 2 rows of 2 of 4 are disjoint with the chance C(2, 2) / C(4, 2) = 1/6.
        strides.see(&block(2, &[0, 1, 2, 3]));
        assert!((strides.ln_chance(Some(4)) - (1f64 / 6.0).ln()).abs() < 1e-12 && !strides.suspicious(Some(4)));
        (0..10).for_each(|_| strides.see(&block(2, &[0, 1, 2, 3])));
        assert!(strides.suspicious(Some(4)));
        // Ids up to 3 are of 4 experts at least; of many more, such rows are no surprise.
        assert!(strides.suspicious(None) && !strides.suspicious(Some(512)));
        strides.see(&block(2, &[0, 1, 1, 3]));
        assert!(!strides.suspicious(Some(4)));
        let mut single = Strides::default();
        (0..100).for_each(|_| single.see(&block(2, &[0, 1])));
        assert!(!single.suspicious(Some(4)));
    }
}
