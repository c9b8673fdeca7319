//! Choices of experts that are made for a measurement instead of by the router.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Draws windows whose rows together wake a wanted number of distinct experts.
///
/// A window of R rows with k experts each can have any union U of k ... min(E, R k). U experts are drawn without replacement; rank j
/// of row r gets the (r k + j mod U)-th of them. U >= k consecutive ones differ, so a row's experts are distinct, and R k >= U places
/// hold all of them.
#[derive(Debug, Clone)]
pub struct ExactUnion {
    rng: ChaCha8Rng,
    k: usize,
    /// All experts, in the order in which the last draws left them.
    pool: Vec<u16>,
}

impl ExactUnion {
    /// Draws among `experts` experts, `k` a row.
    pub fn new(experts: u16, k: usize, seed: u64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed), k, pool: (0..experts).collect() }
    }

    /// The unions that a window of `rows` rows can have; empty when a row cannot have k distinct experts.
    pub fn possible(&self, rows: usize) -> std::ops::RangeInclusive<usize> {
        self.k..=(rows * self.k).min(self.pool.len())
    }

    /// Fills `ids`, `[rows, k]`, so that `union` experts are in it.
    ///
    /// # Panics
    /// When `union` is not [possible](Self::possible).
    pub fn draw(&mut self, union: usize, ids: &mut [u16]) {
        assert!(self.possible(ids.len() / self.k.max(1)).contains(&union), "no window has {union} experts");
        for i in 0..union {
            // The high half of a product: the bias is below E / 2^32.
            let left = (self.pool.len() - i) as u64;
            self.pool.swap(i, i + ((u64::from(self.rng.next_u32()) * left) >> 32) as usize);
        }
        ids.iter_mut().enumerate().for_each(|(place, id)| *id = self.pool[place % union]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn worked_example() {
        // Three rows of two among five: four experts fill six places, the first two twice.
        let mut draws = ExactUnion::new(5, 2, 7);
        assert_eq!(draws.possible(3), 2..=5);
        let mut ids = [0; 6];
        draws.draw(4, &mut ids);
        assert_eq!(ids[..2], ids[4..]);
        assert_eq!(BTreeSet::from(ids).len(), 4);
    }

    #[test]
    fn every_expert_is_drawn_as_often() {
        let mut draws = ExactUnion::new(16, 2, 1);
        let (mut counts, mut ids) = ([0u32; 16], [0; 6]);
        for _ in 0..4000 {
            draws.draw(4, &mut ids);
            BTreeSet::from(ids).into_iter().for_each(|id| counts[usize::from(id)] += 1);
        }
        // 1000 each, with a standard deviation of some 27.
        assert!(counts.iter().all(|&n| (860..1140).contains(&n)), "{counts:?}");
    }

    proptest! {
        #[test]
        fn rows_are_distinct_and_the_union_is_as_wanted(experts in 1u16..300, k in 1usize..9, rows in 1usize..17, at in 0.0f64..=1.0, seed: u64) {
            prop_assume!(k <= usize::from(experts));
            let mut draws = ExactUnion::new(experts, k, seed);
            let possible = draws.possible(rows);
            let union = possible.start() + ((possible.end() - possible.start()) as f64 * at) as usize;
            let mut ids = vec![0; rows * k];
            for _ in 0..3 {
                draws.draw(union, &mut ids);
                prop_assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), union);
                prop_assert!(ids.iter().all(|&id| id < experts));
                prop_assert!(ids.chunks(k).all(|row| row.iter().collect::<BTreeSet<_>>().len() == k));
            }
        }
    }
}
