//! What kernels move: the formula in the head of each source, taken down at every launch, for comparing their times with the bytes.

use crate::trace::Component;
use std::collections::BTreeMap;

/// Bytes that a launch has to move, each once: `fixed + per_expert U + per_token T` with the union U of the pass's choices in the layer and
/// the T tokens that its last row sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Whatever is chosen and cached.
    pub fixed: u64,
    /// Of each distinct expert.
    pub per_expert: u64,
    /// Of each token of the cache.
    pub per_token: u64,
}

impl Moved {
    /// So many bytes.
    pub(super) fn bytes(fixed: usize) -> Self {
        Self { fixed: fixed as u64, ..Self::default() }
    }

    /// The bytes with a union and a number of tokens.
    pub fn with(self, union: u64, tokens: u64) -> u64 {
        self.fixed + self.per_expert * union + self.per_token * tokens
    }
}

impl std::ops::AddAssign for Moved {
    fn add_assign(&mut self, other: Self) {
        self.fixed += other.fixed;
        self.per_expert += other.per_expert;
        self.per_token += other.per_token;
    }
}

/// The launches of one kernel for one component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelBytes {
    /// What they worked for.
    pub component: Component,
    /// Its name.
    pub kernel: &'static str,
    /// How many there were.
    pub launches: u32,
    /// What all of them together had to move; `None` where that depends on what only the device knows.
    pub moved: Option<Moved>,
}

/// What was launched since a pass began.
#[derive(Debug, Default)]
pub(super) struct Ledger(BTreeMap<(Component, &'static str), (u32, Option<Moved>)>);

impl Ledger {
    /// A pass begins.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// A kernel was launched.
    pub fn add(&mut self, component: Component, kernel: &'static str, moved: Option<Moved>) {
        let (launches, sum) = self.0.entry((component, kernel)).or_insert((0, Some(Moved::default())));
        *launches += 1;
        match (&mut *sum, moved) {
            (Some(sum), Some(moved)) => *sum += moved,
            (sum, _) => *sum = None,
        }
    }

    /// The launches since then, by component and name.
    pub fn kernels(&self) -> Vec<KernelBytes> {
        let all = self.0.iter();
        all.map(|(&(component, kernel), &(launches, moved))| KernelBytes { component, kernel, launches, moved }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_a_kernel_are_added_up_and_an_unknown_one_makes_all_unknown() {
        let mut ledger = Ledger::default();
        let experts = Moved { fixed: 10, per_expert: 100, per_token: 0 };
        ledger.add(Component::Experts, "down", Some(experts));
        ledger.add(Component::Experts, "down", Some(experts));
        ledger.add(Component::Mla, "attend", Some(Moved { fixed: 1, per_expert: 0, per_token: 3 }));
        ledger.add(Component::Mla, "merge", Some(Moved::bytes(5)));
        ledger.add(Component::Mla, "merge", None);
        ledger.add(Component::Mla, "merge", Some(Moved::bytes(5)));
        let of = |k: &KernelBytes| (k.kernel, k.launches, k.moved.map(|m| m.with(4, 50)));
        // 2 (10 + 4 x 100), 1 + 3 x 50.
        let all: Vec<_> = ledger.kernels().iter().map(of).collect();
        assert_eq!(all, [("attend", 1, Some(151)), ("merge", 3, None), ("down", 2, Some(820))]);
        ledger.clear();
        assert_eq!(ledger.kernels(), []);
    }
}
