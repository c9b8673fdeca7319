//! How much a pass may count. Every bound is far above real traces, and below what a machine has.
//!
//! Windows of many lengths, layers or requests have counts each, and pairs of rows grow with the square: a few kilobytes of
//! run lengths can ask for more of them than there is memory or time. Pairs are left out where they would take too much,
//! largest windows last counted; what has no meaning without the rest is refused.

use super::AnalysisError;
use super::counts::{RequestSums, WindowCounts};
use super::overlap::{MAX_PAIR_ROWS, pairs};
use super::pass::{PassCounts, Plan};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Numbers of all window counts: 128 MB of them.
const MAX_CELLS: usize = 1 << 24;
/// Numbers of the pairs' histograms among them.
const MAX_PAIR_CELLS: u64 = 1 << 22;
/// Comparisons of two experts that every trace may take for its pairs: seconds...
const FREE_COMPARISONS: u64 = 4_000_000_000;
/// ...and for each byte of `routes`. Windows of 16 rows of 8 experts take some fifty.
const COMPARISONS_PER_BYTE: u64 = 512;
/// Sums by request and layer that every trace may have...
const FREE_SUMS: u64 = 2 << 20;
/// ...and one for so many bytes of `routes`: one window of a request takes more.
const BYTES_PER_SUM: u64 = 16;
/// Experts in unions that wait for their request's next window, over all layers.
const MAX_WAITING_IDS: usize = 1 << 26;

/// The bounds of one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Numbers of rows whose pairs are not counted, although they are few enough.
    pub without_pairs: Vec<u16>,
    sums: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { without_pairs: Vec::new(), sums: u64::MAX }
    }
}

impl Limits {
    /// The bounds of a trace whose routes have that many bytes. Pairs are granted to the most frequent number of rows first.
    pub fn new(plan: &Plan<'_>, bytes: u64) -> Self {
        let mut windows: BTreeMap<u16, u64> = BTreeMap::new();
        for step in plan.steps.steps.iter().filter(|s| s.is_verify()) {
            *windows.entry(step.rows).or_default() += 1;
        }
        // Windows of kept rows may be of any number of rows up to the longest.
        if let Some((&longest, _)) = windows.last_key_value().filter(|_| plan.kept_rows_only) {
            for rows in 1..longest.min(MAX_PAIR_ROWS as u16) {
                windows.entry(rows).or_insert(0);
            }
        }
        let mut by_count: Vec<(u64, u16)> = windows.into_iter().map(|(rows, n)| (n, rows)).collect();
        by_count.sort_by_key(|&(n, rows)| (Reverse(n), rows));
        let (layers, k) = (plan.layers.len() as u64, plan.k as u64);
        let mut cells = MAX_PAIR_CELLS;
        let mut comparisons = FREE_COMPARISONS.saturating_add(bytes.saturating_mul(COMPARISONS_PER_BYTE));
        let mut without_pairs = Vec::new();
        for (n, rows) in by_count.into_iter().filter(|&(_, rows)| usize::from(rows) <= MAX_PAIR_ROWS) {
            let pairs = pairs(usize::from(rows)) as u64 * layers;
            let left = cells.checked_sub(pairs * (k + 1)).zip(comparisons.checked_sub(pairs.saturating_mul(n).saturating_mul(k * k)));
            match left {
                Some(left) => (cells, comparisons) = left,
                None => without_pairs.push(rows),
            }
        }
        without_pairs.sort_unstable();
        Self { without_pairs, sums: FREE_SUMS.saturating_add(bytes / BYTES_PER_SUM) }
    }

    /// The bounds of a partial report: what is in it was counted before, and takes the memory that its entries took.
    pub fn of_partial(without_pairs: Vec<u16>) -> Self {
        Self { without_pairs, ..Self::default() }
    }

    /// Counts of no windows of so many rows.
    pub fn window_counts(&self, plan: &Plan<'_>, rows: usize) -> WindowCounts {
        let counts = WindowCounts::new(rows, plan.k, plan.experts);
        let without = u16::try_from(rows).is_ok_and(|rows| self.without_pairs.binary_search(&rows).is_ok());
        if without { counts.without_pairs() } else { counts }
    }

    /// Checks what was counted so far.
    ///
    /// # Errors
    /// [`AnalysisError::TooLarge`].
    pub fn check(&self, counts: &PassCounts) -> Result<(), AnalysisError> {
        let layers = counts.load.len();
        if counts.cells > MAX_CELLS {
            let lengths = counts.groups.len();
            let reason = format!("its windows of {lengths} lengths in {layers} layers have more counts than any recording's");
            return Err(AnalysisError::TooLarge { reason });
        }
        self.check_sums((counts.sums.len() as u64).saturating_mul(layers as u64))
    }

    /// Checks a number of sums by request, or by group of requests, and layer.
    ///
    /// # Errors
    /// [`AnalysisError::TooLarge`].
    pub fn check_sums(&self, sums: u64) -> Result<(), AnalysisError> {
        if sums > self.sums {
            let size = size_of::<RequestSums>();
            let reason = format!("{sums} sums of {size} bytes by request and layer, its files can stand for {}", self.sums);
            return Err(AnalysisError::TooLarge { reason });
        }
        Ok(())
    }

    /// Checks the unions that one layer keeps for requests with windows to come.
    ///
    /// # Errors
    /// [`AnalysisError::TooLarge`].
    #[inline]
    pub fn check_waiting(&self, ids: usize, layers: usize) -> Result<(), AnalysisError> {
        if ids > MAX_WAITING_IDS / layers.max(1) {
            return Err(AnalysisError::TooLarge { reason: "more requests take turns than can be kept apart".into() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;

    #[test]
    fn pairs_are_left_out_where_they_are_too_many_and_nothing_else_is() {
        // 2016 pairs of 201 possible overlaps in 11 layers: more than 2^22 histogram entries.
        let layers: Vec<u16> = (1..12).collect();
        let mut trace = Memory::new(&layers, 400, 200);
        let window = |rows: u16| vec![(0..rows).map(|row| (row..row + 200).collect::<Vec<u16>>()).collect::<Vec<_>>(); 11];
        for _ in 0..3 {
            trace.verify(0, 0, &window(2));
        }
        trace.verify(1, 5, &window(64));
        let report = trace.report();
        let overall = report.overall.unwrap();
        let short = &overall.stats;
        assert_eq!((short.rows, short.pairwise.as_ref().unwrap()[0][1]), (2, 199.0));
        let long = &overall.by_rows[0];
        assert_eq!((long.rows, long.windows, long.union.as_ref().unwrap().mean), (64, 11, 263.0));
        assert!(long.pairwise.is_none() && long.lag_jaccard.is_none() && long.lag_overlap_frac.is_none());
        assert_eq!(long.wasted_mean, Some(58.0));
        let warning = report.warnings.iter().find(|w| w.code == "pairs_left_out").unwrap();
        assert!(warning.message.contains("of 64 rows"), "{}", warning.message);
    }

    #[test]
    fn counts_beyond_the_bounds_are_refused() {
        let limits = Limits { without_pairs: Vec::new(), sums: 10 };
        let mut counts = PassCounts::new(5);
        counts.sums((0, 4));
        counts.sums((1, 4));
        counts.sums((1, 4));
        limits.check(&counts).unwrap();
        counts.sums((2, 4));
        assert!(limits.check(&counts).unwrap_err().to_string().contains("15 sums"));
        let mut counts = PassCounts::new(4096);
        for rows in 1..400 {
            counts.group(rows);
        }
        let error = Limits::default().check(&counts).unwrap_err().to_string();
        assert!(error.contains("399 lengths in 4096 layers"), "{error}");
        assert!(limits.check_waiting(1 << 26, 1).is_ok() && limits.check_waiting(1 << 26, 2).is_err());
    }

    #[test]
    fn draft_rows_of_a_layer_that_the_manifest_does_not_list_are_refused() {
        let mut trace = Memory::new(&[2], 20, 2);
        trace.verify(0, 0, &[vec![vec![1, 2], vec![3, 4]]]);
        let mut draft = trace.routes[0].clone();
        (draft.layer, draft.draft) = (43, true);
        trace.routes.push(draft);
        let error = trace.try_report().unwrap_err().to_string();
        assert!(error.contains("layer 43") && error.contains("drafter"), "{error}");
        trace.manifest.model.draft_layers = vec![42, 43];
        assert_eq!(trace.report().draft.unwrap().layers[0].layer, 43);
    }
}
