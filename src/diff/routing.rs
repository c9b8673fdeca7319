//! How often two runs of the same tokens were routed differently.
//!
//! A row is the same in both runs when it is of the same request and place, and every token up to it is the same: prompt rows and kept rows up
//! to the first token that differs. Rejected rows are left out, since they continue another text. Of these rows, the share whose
//! expert sets differ is the disagreement; the order of experts does not matter. Where both runs keep gate weights, those of the rows that
//! differ by the last bits of a sum are counted (`near_ties`).

use super::near_ties::{self, Choice};
use super::pairing::Pairing;
use crate::metric::report::Report;
use crate::trace::event::UNKNOWN_TOKEN;
use crate::trace::{Phase, RouteBatch, Steps, Trace, TraceError};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Most rows x layers that are held at a time; what is beyond is left out and said to be.
const MAX_CELLS: usize = 1 << 24;
/// No set is known here.
const UNKNOWN: u64 = 0;

/// How often routes differ.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Disagreement {
    /// Rows x layers that were compared.
    pub rows: u64,
    /// Of these, how many chose other sets.
    pub differing: u64,
    /// The share; `None` of no rows.
    pub share: Option<f64>,
    /// Of the differing ones, how many are near-ties: the router had the same scores. `None` without gate weights of both, or of too many.
    pub near_ties: Option<u64>,
    /// By layer, ascending.
    pub layers: Vec<LayerDisagreement>,
    /// Whether rows were left out because there are too many.
    pub truncated: bool,
}

/// One layer's part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LayerDisagreement {
    /// The layer.
    pub layer: u16,
    /// Rows that were compared.
    pub rows: u64,
    /// Of these, how many chose other sets.
    pub differing: u64,
}

/// The tokens that a request's rows read, by place, as far as they were kept.
#[derive(Debug, Default)]
struct Text(Vec<u32>);

/// A run's kept rows: texts by request, and where each step's rows belong.
struct Kept {
    texts: HashMap<u32, Text>,
    /// By step: request, place of row 0, number of kept rows.
    steps: HashMap<u32, (u32, usize, usize)>,
}

fn kept(steps: &Steps) -> Kept {
    let mut kept = Kept { texts: HashMap::new(), steps: HashMap::with_capacity(steps.len()) };
    for at in 0..steps.len() {
        let (request, place) = (steps.request_id[at], steps.context_len[at] as usize);
        // The rows of a tree do not lie at successive places, and unknown tokens are not the same text.
        if steps.parents.get(at).is_some_and(Option::is_some) || steps.input_tokens.get(at).contains(&UNKNOWN_TOKEN) {
            continue;
        }
        let rows = if steps.phase[at] == Phase::Verify { usize::from(steps.accepted[at]) + 1 } else { usize::from(steps.rows[at]) };
        let tokens = steps.input_tokens.get(at);
        let tokens = &tokens[..rows.min(tokens.len())];
        let text = &mut kept.texts.entry(request).or_default().0;
        // A gap: what follows cannot be told to be the same.
        if place != text.len() {
            continue;
        }
        text.extend_from_slice(tokens);
        kept.steps.insert(steps.step_id[at], (request, place, tokens.len()));
    }
    kept
}

/// A fingerprint of a set that does not depend on its order, and is not [`UNKNOWN`].
fn fingerprint(ids: impl Iterator<Item = u16>) -> u64 {
    let mix = |id: u16| {
        // SplitMix64.
        let mut z = u64::from(id).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    ids.map(mix).fold(0, u64::wrapping_add).max(1)
}

/// Places of the rows that are compared: the common begin of each pair's texts, end to end.
struct Places {
    /// By the request of the base, of the candidate: first cell row, number of rows.
    base: HashMap<u32, (usize, usize)>,
    candidate: HashMap<u32, (usize, usize)>,
    rows: usize,
    truncated: bool,
}

fn places(pairs: &[(u32, u32)], base: &Kept, candidate: &Kept, most: usize) -> Places {
    let mut places = Places { base: HashMap::new(), candidate: HashMap::new(), rows: 0, truncated: false };
    for (b, c) in pairs {
        let (Some(x), Some(y)) = (base.texts.get(b), candidate.texts.get(c)) else { continue };
        let common = x.0.iter().zip(&y.0).take_while(|(x, y)| x == y).count();
        let taken = common.min(most - places.rows);
        places.truncated |= taken < common;
        places.base.insert(*b, (places.rows, taken));
        places.candidate.insert(*c, (places.rows, taken));
        places.rows += taken;
    }
    places
}

/// Reads the target's kept rows of a trace, in order: cell row, layer, and where the row is; with gate weights, if wanted.
fn walk(
    trace: &Trace,
    kept: &Kept,
    places: &HashMap<u32, (usize, usize)>,
    weights: bool,
    sink: &mut dyn FnMut(usize, u16, &RouteBatch<'_>, usize),
) -> Result<(), TraceError> {
    for unit in trace.route_units()? {
        let mut reader = unit.read(weights);
        while let Some(batch) = reader.next_batch()? {
            for i in 0..batch.len() {
                let row = usize::from(batch.row[i]);
                let Some(&(request, place, rows)) = kept.steps.get(&batch.step_id[i]) else { continue };
                let Some(&(first, taken)) = places.get(&request) else { continue };
                if batch.draft[i] || row >= rows || place + row >= taken {
                    continue;
                }
                sink(first + place + row, batch.layer[i], &batch, i);
            }
        }
    }
    Ok(())
}

/// The disagreement of two traces whose requests are paired; `None` when they are not.
///
/// # Errors
/// When one of them cannot be read.
pub fn disagreement(base: (&Trace, &Report), candidate: (&Trace, &Report), pairing: &Pairing) -> Result<Option<Disagreement>, TraceError> {
    if !pairing.is_paired() {
        return Ok(None);
    }
    let id = |report: &Report, at: usize| report.by_request.get(at).map(|r| r.request_id);
    let pairs: Vec<(u32, u32)> = pairing.pairs.iter().filter_map(|&(b, c)| id(base.1, b).zip(id(candidate.1, c))).collect();
    let mut layers: Vec<u16> = base.1.layers.iter().map(|l| l.layer).collect();
    layers.retain(|layer| candidate.1.layers.iter().any(|l| l.layer == *layer));
    let slots: HashMap<u16, usize> = layers.iter().copied().zip(0..).collect();
    let (b, c) = (kept(&base.0.steps_with_details()?), kept(&candidate.0.steps_with_details()?));
    let places = places(&pairs, &b, &c, MAX_CELLS / layers.len().max(1));
    let cell_of = |row: usize, layer: u16| slots.get(&layer).map(|slot| row * layers.len() + slot);
    let set = |batch: &RouteBatch<'_>, i: usize| fingerprint(batch.ids.iter().map(|column| column[i]));
    let mut cells = vec![UNKNOWN; places.rows * layers.len()];
    walk(base.0, &b, &places.base, false, &mut |row, layer, batch, i| {
        if let Some(cell) = cell_of(row, layer).and_then(|cell| cells.get_mut(cell)) {
            *cell = set(batch, i);
        }
    })?;
    let mut counts: BTreeMap<u16, (u64, u64)> = layers.iter().map(|&layer| (layer, (0, 0))).collect();
    let mut differing = HashSet::new();
    walk(candidate.0, &c, &places.candidate, false, &mut |row, layer, batch, i| {
        let cell = cell_of(row, layer);
        let known = cell.and_then(|cell| cells.get(cell)).copied().unwrap_or(UNKNOWN);
        if let Some((rows, n)) = counts.get_mut(&layer).filter(|_| known != UNKNOWN) {
            *rows += 1;
            if known != set(batch, i) {
                *n += 1;
                // One more than are looked at says that there are too many.
                differing.extend(cell.filter(|_| differing.len() <= near_ties::MOST));
            }
        }
    })?;
    let weighed = [base.0, candidate.0].iter().all(|trace| trace.manifest().router_weights) && differing.len() <= near_ties::MOST;
    let choices = |trace: &Trace, kept: &Kept, places: &HashMap<u32, (usize, usize)>| -> Result<HashMap<usize, Choice>, TraceError> {
        let mut found = HashMap::new();
        walk(trace, kept, places, true, &mut |row, layer, batch, i| {
            let cell = cell_of(row, layer).filter(|cell| differing.contains(cell));
            if let (Some(cell), Some(weights)) = (cell, batch.weights) {
                found.insert(cell, batch.ids.iter().zip(weights).map(|(ids, weights)| (ids[i], weights[i])).collect());
            }
        })?;
        Ok(found)
    };
    let near_ties = match (weighed, differing.is_empty()) {
        (true, false) => Some(near_ties::count(&choices(base.0, &b, &places.base)?, &choices(candidate.0, &c, &places.candidate)?)),
        (true, true) => Some(0),
        (false, _) => None,
    };
    let layers: Vec<LayerDisagreement> =
        counts.into_iter().map(|(layer, (rows, differing))| LayerDisagreement { layer, rows, differing }).collect();
    let (rows, differing) = layers.iter().fold((0, 0), |(r, d), l| (r + l.rows, d + l.differing));
    let share = (rows > 0).then(|| differing as f64 / rows as f64);
    Ok(Some(Disagreement { rows, differing, share, near_ties, layers, truncated: places.truncated }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Options, analyze_trace};
    use crate::trace::{Ending, Probe, RequestEvent, StepEvent, Synth, TraceWriter, WriterOptions};
    use std::path::Path;

    #[test]
    fn fingerprints_are_of_sets() {
        let of = |ids: &[u16]| fingerprint(ids.iter().copied());
        assert_eq!(of(&[3, 1, 2]), of(&[1, 2, 3]));
        assert_ne!(of(&[3, 1, 2]), of(&[3, 1, 4]));
        assert_ne!(of(&[]), UNKNOWN);
    }

    /// Changes some rows of one layer on their way to the writer, and tokens from a step on.
    struct Altered<'a> {
        to: &'a mut TraceWriter,
        layer: u16,
        every: u32,
        tokens_from: u32,
        swapped: bool,
        /// Factor of the second expert's weight in rows that are changed.
        off: f32,
    }

    impl Probe for Altered<'_> {
        fn step(&mut self, mut step: StepEvent) -> Result<(), TraceError> {
            let k = step.routes.k;
            let mut at = 0;
            for block in step.routes.blocks.clone() {
                if self.swapped {
                    step.routes.ids.swap(at, at + 1);
                    if !step.routes.weights.is_empty() {
                        step.routes.weights.swap(at, at + 1);
                    }
                }
                if block.layer == self.layer && step.step_id.is_multiple_of(self.every) {
                    // Row 0 is always kept. Another expert that is not in the row.
                    let row = &mut step.routes.ids[at..at + k];
                    row[0] = (0..512).find(|id| !row.contains(id)).unwrap();
                    if let Some(weight) = step.routes.weights.get_mut(at + 1) {
                        *weight *= self.off;
                    }
                }
                at += usize::from(block.rows) * k;
            }
            if step.step_id >= self.tokens_from {
                step.input_tokens.iter_mut().for_each(|t| *t += 1);
            }
            self.to.step(step)
        }

        fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
            self.to.request(request)
        }
    }

    fn altered(dir: &Path, synth: &Synth, (every, off): (u32, f32), tokens_from: u32) {
        let mut writer = TraceWriter::create(dir, synth.manifest(), &WriterOptions::default()).unwrap();
        synth.emit(&mut Altered { to: &mut writer, layer: 3, every, tokens_from, swapped: true, off }).unwrap();
        writer.finish(Ending::Complete).unwrap();
    }

    #[test]
    fn rows_of_the_same_text_are_compared_as_sets() {
        let dir = tempfile::tempdir().unwrap();
        // One request: a prefill step 0 of 5 rows, then verify steps 1...20 of 4 rows.
        let synth = Synth { requests: 1, verify_steps: 20, decode_every: 0, layers: vec![1, 3], ..Synth::default() };
        let (plain, other, short) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("c"));
        synth.write(&plain).unwrap();
        altered(&other, &synth, (4, 1.0), u32::MAX);
        altered(&short, &synth, (4, 1.0), 10);
        let open = |path: &Path| {
            let trace = Trace::open(path).unwrap();
            let report = analyze_trace(&trace, &Options::default()).unwrap();
            (trace, report)
        };
        let of = |a: &Path, b: &Path| {
            let (a, b) = (open(a), open(b));
            disagreement((&a.0, &a.1), (&b.0, &b.1), &Pairing::of(&a.1, &b.1)).unwrap().unwrap()
        };
        let (trace, _) = open(&plain);
        let steps = trace.steps().unwrap();
        // The naive count of kept rows.
        let rows_of = |until: usize| 5 + (1..until).map(|i| u64::from(steps.accepted[i]) + 1).sum::<u64>();
        let same = of(&plain, &plain);
        assert_eq!((same.rows, same.differing, same.share, same.near_ties), (2 * rows_of(21), 0, Some(0.0), None));
        // Steps 0, 4, ... 20 of layer 3 have one row that differs; the order of experts does not count.
        let changed = of(&plain, &other);
        let by_layer: Vec<_> = changed.layers.iter().map(|l| (l.layer, l.rows, l.differing)).collect();
        assert_eq!(by_layer, [(1, rows_of(21), 0), (3, rows_of(21), 6)]);
        assert!(!changed.truncated);
        // Tokens differ from step 10 on: what is before is compared, steps 0, 4 and 8 among it.
        let cut = of(&plain, &short);
        assert_eq!((cut.layers[1].rows, cut.layers[1].differing), (rows_of(10), 3));
    }

    #[test]
    fn rows_that_differ_at_equal_scores_are_near_ties() {
        let dir = tempfile::tempdir().unwrap();
        let synth = Synth { requests: 1, verify_steps: 20, decode_every: 0, layers: vec![1, 3], weights: true, ..Synth::default() };
        let open = |name: &str| {
            let trace = Trace::open(&dir.path().join(name)).unwrap();
            let report = analyze_trace(&trace, &Options::default()).unwrap();
            (trace, report)
        };
        synth.write(&dir.path().join("plain")).unwrap();
        altered(&dir.path().join("ties"), &synth, (4, 1.0002), u32::MAX);
        altered(&dir.path().join("others"), &synth, (4, 1.02), u32::MAX);
        let of = |b: &str| {
            let (a, b) = (open("plain"), open(b));
            let found = disagreement((&a.0, &a.1), (&b.0, &b.1), &Pairing::of(&a.1, &b.1)).unwrap().unwrap();
            (found.differing, found.near_ties)
        };
        assert_eq!([of("plain"), of("ties"), of("others")], [(0, Some(0)), (6, Some(6)), (6, Some(0))]);
    }

    #[test]
    fn too_many_rows_are_left_out() {
        let texts = |n: u32| HashMap::from([(n, Text(vec![1, 2, 3])), (n + 1, Text(vec![1, 9]))]);
        let (b, c) = (Kept { texts: texts(0), steps: HashMap::new() }, Kept { texts: texts(0), steps: HashMap::new() });
        let all = places(&[(0, 0), (1, 0)], &b, &c, 100);
        assert_eq!((all.rows, all.truncated, all.base[&1]), (4, false, (3, 1)));
        let few = places(&[(0, 0), (1, 0)], &b, &c, 2);
        assert_eq!((few.rows, few.truncated, few.base[&1]), (2, true, (2, 0)));
    }
}
