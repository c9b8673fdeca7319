//! A `Copy` bitset of routed experts.

/// The largest number of routed experts per layer that a set can hold.
pub const MAX_EXPERTS: usize = 512;
const WORDS: usize = MAX_EXPERTS / 64;

/// A set of routed experts of one layer, as 512 bits.
///
/// ```
/// use specprof::trace::ExpertSet;
/// let a = ExpertSet::from_ids(&[1, 2, 300]);
/// let b = ExpertSet::from_ids(&[2, 511]);
/// assert_eq!((a.union(&b).len(), a.intersection_len(&b)), (4, 1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertSet([u64; WORDS]);

impl ExpertSet {
    /// The empty set.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// The set of these ids. Ids of [`MAX_EXPERTS`] and above wrap around: check them before.
    #[inline]
    pub fn from_ids(ids: &[u16]) -> Self {
        let mut set = Self::EMPTY;
        for &id in ids {
            set.insert(id);
        }
        set
    }

    /// Adds an expert.
    #[inline]
    pub fn insert(&mut self, id: u16) {
        self.0[usize::from(id >> 6) % WORDS] |= 1 << (id & 63);
    }

    /// Whether an expert is in the set.
    #[inline]
    pub fn contains(&self, id: u16) -> bool {
        self.0[usize::from(id >> 6) % WORDS] >> (id & 63) & 1 == 1
    }

    /// All experts of either set.
    #[inline]
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// Number of experts in both sets.
    #[inline]
    pub fn intersection_len(&self, other: &Self) -> u32 {
        self.0.iter().zip(&other.0).map(|(a, b)| (a & b).count_ones()).sum()
    }

    /// Number of experts.
    #[inline]
    pub fn len(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }

    /// Whether no expert is in it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&w| w == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_a_tree_set(a in prop::collection::vec(0u16..512, 0..40), b in prop::collection::vec(0u16..512, 0..40)) {
            let (sa, sb) = (ExpertSet::from_ids(&a), ExpertSet::from_ids(&b));
            let (ta, tb): (BTreeSet<u16>, BTreeSet<u16>) = (a.into_iter().collect(), b.into_iter().collect());
            prop_assert_eq!(sa.len() as usize, ta.len());
            prop_assert_eq!(sa.union(&sb).len() as usize, ta.union(&tb).count());
            prop_assert_eq!(sa.intersection_len(&sb) as usize, ta.intersection(&tb).count());
            prop_assert_eq!(sa.is_empty(), ta.is_empty());
            for id in 0..512 {
                prop_assert_eq!(sa.contains(id), ta.contains(&id));
            }
        }
    }
}
