//! Whether an array of ids was read with the wrong strides.

use super::llamacpp_read::Block;

/// Whether the rows of a pass look like pieces of one permutation: the first revision of the proposed tool read a strided
/// view as if it were contiguous, so that the rows of a pass never share an expert.
#[derive(Debug, Default)]
pub struct Strides {
    /// Some rows of a pass share an expert: the array was read as it should be.
    shared: bool,
    /// ln of the chance that rows of independent choices would be as disjoint as these are.
    ln_chance: f64,
}

impl Strides {
    /// ln of this chance and below is no accident.
    const TOO_UNLIKELY: f64 = -14.0;

    /// Looks at one layer's rows. n rows of k of E experts are disjoint with the chance
    /// Π_{i<n} C(E - i k, k) / C(E, k) = Π_{i<n} Π_{j<k} (E - i k - j) / (E - j).
    pub fn see(&mut self, block: &Block, experts: u16) {
        let rows = block.rows();
        let mut ids = block.ids.clone();
        ids.sort_unstable();
        if rows < 2 || self.shared {
            return;
        }
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            self.shared = true;
            return;
        }
        let e = f64::from(experts);
        for row in 0..rows {
            for rank in 0..block.k {
                let left = e - (row * block.k + rank) as f64;
                self.ln_chance += (left / (e - rank as f64)).max(f64::MIN_POSITIVE).ln();
            }
        }
    }

    /// Whether the array was not read as it should have been.
    pub fn suspicious(&self) -> bool {
        !self.shared && self.ln_chance < Self::TOO_UNLIKELY
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
        strides.see(&block(2, &[0, 1, 2, 3]), 4);
        assert!((strides.ln_chance - (1f64 / 6.0).ln()).abs() < 1e-12 && !strides.suspicious());
        (0..10).for_each(|_| strides.see(&block(2, &[0, 1, 2, 3]), 4));
        assert!(strides.suspicious());
        strides.see(&block(2, &[0, 1, 1, 3]), 4);
        assert!(!strides.suspicious());
        let mut single = Strides::default();
        (0..100).for_each(|_| single.see(&block(2, &[0, 1]), 4));
        assert!(!single.suspicious());
    }
}
