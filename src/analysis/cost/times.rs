//! How sure the mean times of operations are: the same means by resample of the requests.
//!
//! Means are those of [`Collected::mean_ns`], of sums and steps as often as each request is drawn: with v_b and d_b the verify and decode
//! steps of a resample in octave b, verify = Σ_b S_b / Σ_b v_b and decode = Σ_b v_b (S'_b / d_b) / Σ_b v_b over the octaves that have both.

use super::collect::{COMPONENTS, Collected, DECODE, Place, VERIFY};
use crate::analysis::Options;
use crate::analysis::stats::{Clusters, percentile_interval};
use crate::metric::Interval;
use std::collections::{BTreeMap, BTreeSet};

/// Numbers by request that are kept, 8 bytes each...
const MAX_NUMBERS: usize = 1 << 22;
/// ...and that are spread out over octaves for one layer's draws.
const MAX_SPREAD: usize = 1 << 23;

/// Intervals of a verify and of a decode step's time, ns.
pub(super) type Both = [Option<Interval>; 2];

/// Times of operations by request and octave: only of the places and components that were ever seen.
#[derive(Debug, Default)]
pub(super) struct RequestTimes {
    /// By place and component: one more than the column, 0 for none.
    column_of: Vec<u32>,
    columns: usize,
    /// By request and octave: `[column][2]`, ns; short where later columns are 0.
    sums: BTreeMap<(u32, usize), Vec<[u64; 2]>>,
    numbers: usize,
    /// Whether there were too many to keep any.
    left_out: bool,
}

impl RequestTimes {
    /// Adds a step's operations, `[places][components]` in ns.
    pub fn add(&mut self, (request, bucket, phase): (u32, usize, usize), ns: &[u64]) {
        if self.left_out {
            return;
        }
        self.column_of.resize(ns.len().max(self.column_of.len()), 0);
        let row = self.sums.entry((request, bucket)).or_default();
        let before = row.len();
        for (entry, &ns) in self.column_of.iter_mut().zip(ns).filter(|(_, ns)| **ns > 0) {
            if *entry == 0 {
                self.columns += 1;
                *entry = self.columns as u32;
            }
            let column = *entry as usize - 1;
            if column >= row.len() {
                row.resize(column + 1, [0; 2]);
            }
            row[column][phase] = row[column][phase].saturating_add(ns);
        }
        self.numbers += 2 * (row.len() - before);
        if self.numbers > MAX_NUMBERS {
            *self = Self { left_out: true, ..Self::default() };
        }
    }

    /// Whether there are no intervals because there were too many times to keep.
    pub fn are_left_out(&self) -> bool {
        self.left_out
    }

    /// The column of a component in a place.
    fn column(&self, place: usize, component: usize) -> Option<usize> {
        (self.column_of.get(place * COMPONENTS + component).copied()? as usize).checked_sub(1)
    }
}

/// What is drawn.
pub(super) struct TimeDraws<'a> {
    collected: &'a Collected,
    requests: &'a [u32],
    options: &'a Options,
    /// Octaves that have steps.
    buckets: Vec<usize>,
    /// Whether verify and decode steps are of at least two requests each.
    several: [bool; 2],
}

/// Intervals of one place.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TimeIntervals {
    /// By component, in the order of their indices.
    pub by_component: [Both; COMPONENTS],
    /// Of their sum.
    pub total: Both,
}

impl TimeIntervals {
    const NONE: Self = Self { by_component: [[None; 2]; COMPONENTS], total: [None; 2] };
}

impl<'a> TimeDraws<'a> {
    /// Of `requests`, ascending.
    pub fn new(collected: &'a Collected, requests: &'a [u32], options: &'a Options) -> Self {
        let buckets: BTreeSet<usize> = collected.compared.cells.values().flat_map(|cells| cells.keys().copied()).collect();
        let several = [VERIFY, DECODE].map(|phase| collected.compared.requests_of(phase) >= 2);
        Self { collected, requests, options, buckets: buckets.into_iter().collect(), several }
    }

    /// The intervals of a place; none where the times of its operations by request were not kept.
    pub fn of(&self, place: Place) -> TimeIntervals {
        let times = &self.collected.times;
        let places = self.collected.places(place);
        // The place's components that were seen, and the columns that each is the sum of.
        let parts: Vec<(usize, Vec<usize>)> = (0..COMPONENTS)
            .map(|component| (component, places.clone().filter_map(|place| times.column(place, component)).collect::<Vec<_>>()))
            .filter(|(_, columns)| !columns.is_empty())
            .collect();
        // Steps come first, then the times.
        let each = 2 * (parts.len() + 1);
        let width = each * self.buckets.len();
        if parts.is_empty() || times.left_out || width.saturating_mul(self.requests.len()) > MAX_SPREAD {
            return TimeIntervals::NONE;
        }
        let mut clusters = Clusters::new(width);
        for &request in self.requests {
            clusters.push(self.buckets.iter().flat_map(|&bucket| {
                let steps = self.collected.compared.cells.get(&request).and_then(|cells| cells.get(&bucket)).map_or([0; 2], |cell| cell.n);
                let sums = times.sums.get(&(request, bucket));
                let sum = move |(_, columns): &(usize, Vec<usize>)| {
                    let at = |&column: &usize| sums.and_then(|sums| sums.get(column)).copied().unwrap_or_default();
                    columns.iter().map(at).fold([0u64; 2], |[a, b], [c, d]| [a.saturating_add(c), b.saturating_add(d)])
                };
                std::iter::once(steps).chain(parts.iter().map(sum)).flatten().map(|n| n as f64)
            }));
        }
        let matched = self.collected.is_matched();
        let draws = clusters.draws(self.options.resamples, self.options.seed, |sums| means(sums, each, matched));
        let both = |part: usize| {
            let of = |phase: usize| percentile_interval(&draws, 2 * part + phase).filter(|_| self.several[phase]);
            [of(VERIFY), of(DECODE)]
        };
        let mut found = TimeIntervals { total: both(parts.len()), ..TimeIntervals::NONE };
        for (part, (component, _)) in parts.iter().enumerate() {
            found.by_component[*component] = both(part);
        }
        found
    }
}

/// Mean verify and decode time of each part, then of their sum. `sums` has one stretch of `each` numbers an octave: verify and decode steps,
/// then verify and decode times of each part. `matched`: over octaves that have both kinds of steps, decode steps weighed by verify steps.
///
/// One octave with 2 verify and 4 decode steps and times of 20 and 12, one with 1 and 2 and 40 and 16: verify 60 / 3 = 20, decode
/// (2 (12 / 4) + 1 (16 / 2)) / 3 = 14 / 3.
fn means(sums: &[f64], each: usize, matched: bool) -> Vec<f64> {
    let mut out = vec![0.0; each];
    let mut steps = [0.0; 2];
    for octave in sums.chunks_exact(each) {
        let (Some(&[verify, decode]), times) = (octave.first_chunk::<2>(), octave.get(2..).unwrap_or_default()) else { continue };
        if matched && (verify == 0.0 || decode == 0.0) {
            continue;
        }
        steps = [steps[VERIFY] + verify, steps[DECODE] + decode];
        let weight = if matched { verify / decode } else { 1.0 };
        for (out, times) in out.chunks_exact_mut(2).zip(times.chunks_exact(2)) {
            out[VERIFY] += times[VERIFY];
            out[DECODE] += weight * times[DECODE];
        }
    }
    if matched {
        steps[DECODE] = steps[VERIFY];
    }
    // No steps, no number.
    let parts = each / 2 - 1;
    for part in 0..parts {
        for phase in [VERIFY, DECODE] {
            out[2 * part + phase] /= steps[phase];
            out[2 * parts + phase] += out[2 * part + phase];
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::cost::collect::bucket;
    use crate::analysis::cost::tests::timed;
    use crate::analysis::stats::{self, Streams};
    use crate::analysis::tests::memory::{Memory, OPTIONS};
    use crate::metric::cost::LayerTime;
    use crate::trace::{Component, Phase};

    #[test]
    fn worked_example_of_the_docs() {
        let sums = [2.0, 4.0, 20.0, 12.0, 1.0, 2.0, 40.0, 16.0];
        assert_eq!(means(&sums, 4, true), [20.0, 14.0 / 3.0, 20.0, 14.0 / 3.0]);
        // Unmatched, decode steps count alike: 28 / 6. An octave without verify steps is compared with nothing.
        assert_eq!(means(&sums, 4, false), [20.0, 28.0 / 6.0, 20.0, 28.0 / 6.0]);
        assert_eq!(means(&[&sums[..], &[0.0, 3.0, 0.0, 99.0]].concat(), 4, true), means(&sums, 4, true));
        assert!(means(&[0.0; 4], 4, true).iter().all(|mean| mean.is_nan()));
        // Two parts and their sum.
        assert_eq!(means(&[1.0, 1.0, 5.0, 2.0, 7.0, 3.0], 6, true), [5.0, 2.0, 7.0, 3.0, 12.0, 5.0]);
    }

    /// The mean of a component's (or every one's) time in these layers' verify and decode steps, of requests drawn so often, step by step.
    fn naive(trace: &Memory, rows: u16, layers: &[u16], component: Option<Component>, drawn: &[u32]) -> Vec<f64> {
        let k = &trace.kernels;
        let of = |step: u32| {
            let wanted = |i: &usize| {
                k.step_id[*i] == step && k.layer[*i].is_some_and(|l| layers.contains(&l)) && component.is_none_or(|c| c == k.component[*i])
            };
            (0..k.len()).filter(wanted).map(|i| (k.end_ns[i] - k.begin_ns[i]) as f64).sum::<f64>()
        };
        let mut octaves: BTreeMap<usize, [(f64, f64); 2]> = BTreeMap::new();
        for (step, time) in trace.steps.iter().zip(&trace.times) {
            let phase = match step.phase {
                Phase::Verify if step.rows == rows => VERIFY,
                Phase::Decode => DECODE,
                _ => continue,
            };
            let n = f64::from(drawn[step.request_id as usize]);
            let (steps, ns) = &mut octaves.entry(bucket(time.context_len)).or_default()[phase];
            (*steps, *ns) = (*steps + n, *ns + n * of(step.step_id));
        }
        let both: Vec<_> = octaves.values().filter(|[v, d]| v.0 > 0.0 && d.0 > 0.0).collect();
        let verify: f64 = both.iter().map(|[v, _]| v.0).sum();
        vec![both.iter().map(|[v, _]| v.1).sum::<f64>() / verify, both.iter().map(|[v, d]| v.0 * d.1 / d.0).sum::<f64>() / verify]
    }

    #[test]
    fn intervals_are_those_of_naive_resamples() {
        let mut trace = timed(6);
        // Three octaves, of which one has decode steps alone (every third step is one).
        for (at, time) in trace.times.iter_mut().enumerate() {
            time.context_len = [9, 70, [9, 70, 300][at / 3 % 3], 70, 9, 70][at % 6];
        }
        let report = trace.report();
        let rows = report.overall.as_ref().unwrap().stats.rows;
        let near = |found: Option<Interval>, draws: &[Vec<f64>], phase: usize| {
            let expected = percentile_interval(draws, phase).unwrap().map(|ns| ns / 1000.0);
            let found = found.unwrap();
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9 * b) && found[0] < found[1], "{found:?} {expected:?}");
        };
        let check = |time: &LayerTime, layers: &[u16]| {
            let draws = |component| {
                let of = |_, drawn: &[u32]| naive(&trace, rows, layers, component, drawn);
                stats::draws(6, (OPTIONS.resamples, OPTIONS.seed, Streams::Common), of)
            };
            let total = draws(None);
            near(time.verify_us_ci95, &total, VERIFY);
            near(time.decode_us_ci95, &total, DECODE);
            for part in &time.by_component {
                let draws = draws(Some(part.component));
                near(part.verify_us_ci95, &draws, VERIFY);
                near(part.decode_us_ci95, &draws, DECODE);
            }
        };
        for layer in &report.layers {
            check(layer.time.as_ref().unwrap(), &[layer.layer]);
        }
        check(report.overall.as_ref().unwrap().time.as_ref().unwrap(), &trace.manifest.model.moe_layers);
    }

    #[test]
    fn one_request_of_a_kind_has_no_interval() {
        let mut trace = timed(4);
        trace.steps.iter_mut().filter(|s| s.phase == Phase::Decode && s.request_id > 0).for_each(|s| s.phase = Phase::Prefill);
        let time = trace.report().layers[0].time.clone().unwrap();
        assert!(time.decode_us.is_some() && time.verify_us_ci95.is_some() && time.decode_us_ci95.is_none());
    }

    #[test]
    fn too_many_numbers_are_not_kept() {
        let mut times = RequestTimes::default();
        times.add((0, 3, VERIFY), &[0, 5, 0, 7]);
        times.add((0, 3, DECODE), &[2, 0, 0, 0]);
        assert_eq!((times.columns, times.numbers), (3, 6));
        assert_eq!(times.sums[&(0, 3)], [[5, 0], [7, 0], [0, 2]]);
        let many = vec![1; 1 << 12];
        for request in 1..600 {
            times.add((request, 3, VERIFY), &many);
        }
        assert!(times.are_left_out() && times.sums.is_empty());
    }
}
