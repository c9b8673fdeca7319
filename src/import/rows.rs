//! Arrays of expert ids as foreign files have them, and which of their rows are real.
//!
//! Capture buffers hold more than routes: dense layers, padding, dummy batches, rows that were never written. Each of
//! these has a signature that top-k routing cannot produce, and only those are left out.

use super::Sink;
use crate::trace::{Module, StepRoutes};
use std::ops::Range;

/// So many identical rows in a run are a dummy batch.
pub const DUMMY_RUN: usize = 50;

/// Expert ids `[rows, layers, width]` in C order; below 0 = none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct IdArray {
    /// Tokens.
    pub rows: usize,
    /// Entries of the layer axis.
    pub layers: usize,
    /// Places for experts, at least k.
    pub width: usize,
    /// `rows x layers x width` ids.
    pub ids: Vec<i32>,
    /// Weights in the shape of `ids`, or none.
    pub weights: Vec<f32>,
    /// The largest id that the stored type holds, when that may be too small.
    pub largest_storable: Option<u16>,
    /// Whether the file has bare ids: the number of layers and of experts is what the user said.
    pub bare: bool,
}

impl IdArray {
    /// An array of this shape.
    ///
    /// # Errors
    /// A sentence when the ids are not as many as the shape says.
    pub fn new(rows: usize, layers: usize, width: usize, ids: Vec<i32>) -> Result<Self, String> {
        if rows.checked_mul(layers).and_then(|n| n.checked_mul(width)) != Some(ids.len()) {
            return Err(format!("{} ids do not make {rows} rows of {layers} layers and {width} experts", ids.len()));
        }
        // Without ids there could be any number of rows, in a file of any size.
        if rows > 0 && ids.is_empty() {
            return Err(format!("{rows} rows of {layers} layers and {width} experts have no ids"));
        }
        Ok(Self { rows, layers, width, ids, ..Self::default() })
    }

    /// The ids of one row in one layer.
    pub fn cell(&self, row: usize, layer: usize) -> &[i32] {
        let at = (row * self.layers + layer) * self.width;
        self.ids.get(at..at + self.width).unwrap_or_default()
    }

    fn cell_weights(&self, row: usize, layer: usize) -> &[f32] {
        let at = (row * self.layers + layer) * self.width;
        self.weights.get(at..at + self.width).unwrap_or_default()
    }

    /// All ids of one row.
    pub fn row(&self, row: usize) -> &[i32] {
        let n = self.layers * self.width;
        self.ids.get(row * n..(row + 1) * n).unwrap_or_default()
    }

    /// Takes the last axis apart: k ids, then the bits of k weights.
    ///
    /// # Errors
    /// A sentence when the last axis cannot be that.
    pub fn unpack_weights(self) -> Result<Self, String> {
        if !self.width.is_multiple_of(2) || self.width == 0 {
            return Err(format!("--packed-weights: the last axis has {} entries, which are not k ids and k weights", self.width));
        }
        let k = self.width / 2;
        let (mut ids, mut weights) = (Vec::with_capacity(self.ids.len() / 2), Vec::with_capacity(self.ids.len() / 2));
        for cell in self.ids.chunks_exact(self.width) {
            ids.extend_from_slice(&cell[..k]);
            weights.extend(cell[k..].iter().map(|&bits| f32::from_bits(bits.cast_unsigned())));
        }
        if let Some(bad) = weights.iter().find(|w| !w.is_finite() || **w < 0.0) {
            return Err(format!("--packed-weights: {bad} is not a gate weight"));
        }
        Ok(Self { width: k, ids, weights, ..self })
    }
}

/// What is not a route, by its signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Padding {
    /// Zeros in every layer.
    Zero,
    /// −1 in every layer.
    Missing,
    /// 0, 1, 2, ... in every layer, or running on from layer to layer.
    Arange,
    /// Every layer has one id k times.
    Equal,
    /// One of many identical rows in a run.
    Repeated,
}

impl Padding {
    /// Code and words of the warning.
    pub fn warning(self) -> (&'static str, &'static str) {
        match self {
            Self::Zero => ("padding_zero", "left out: all ids are 0 (padding, or never captured)"),
            Self::Missing => ("padding_missing", "left out: all ids are -1 (padding, or no route)"),
            Self::Arange => ("padding_arange", "left out: ids count 0, 1, 2, ... (padding)"),
            Self::Equal => ("padding_equal", "left out: every layer has one id k times (not captured)"),
            Self::Repeated => ("dummy_batch", "left out: runs of 50 or more identical rows (dummy batches); --keep-warmup keeps them"),
        }
    }
}

/// What a look through an array has found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Survey {
    /// Most experts of a row.
    pub k: usize,
    /// For each entry of the layer axis, whether it has routes.
    pub routed: Vec<bool>,
    /// Largest id.
    pub largest: i32,
    /// For each row, whether it is padding.
    pub padding: Vec<Option<Padding>>,
}

impl Survey {
    /// Looks through an array. `keep` keeps rows that look like padding, except those without any id.
    pub fn of(array: &IdArray, experts: Option<u16>, keep: bool) -> Self {
        let mut survey = Self { routed: vec![false; array.layers], ..Self::default() };
        survey.padding = (0..array.rows).map(|row| padding(array, row, experts)).collect();
        mark_runs(array, &mut survey.padding);
        if keep {
            survey.padding.iter_mut().for_each(|p| *p = p.filter(|p| *p == Padding::Missing));
        }
        for row in (0..array.rows).filter(|&row| survey.padding.get(row).is_some_and(Option::is_none)) {
            for (layer, routed) in survey.routed.iter_mut().enumerate() {
                let cell = array.cell(row, layer);
                if !is_dummy(cell) {
                    *routed = true;
                    survey.k = survey.k.max(cell.iter().filter(|&&id| id >= 0).count());
                }
                survey.largest = cell.iter().copied().fold(survey.largest, i32::max);
            }
        }
        survey
    }

    /// Number of real rows.
    pub fn real_rows(&self) -> usize {
        self.padding.iter().filter(|p| p.is_none()).count()
    }

    /// Whether some layers have no routes.
    pub fn has_dense(&self) -> bool {
        self.routed.iter().any(|r| !r)
    }

    /// Checks ids against the number of experts and the stored type.
    ///
    /// # Errors
    /// A sentence with the option that settles it.
    pub fn check(&self, array: &IdArray, experts: Option<u16>, k: Option<u16>) -> Result<(), String> {
        if let (Some(e), Some(largest)) = (experts, array.largest_storable)
            && u32::from(e) > u32::from(largest) + 1
        {
            return Err(format!(
                "the ids' type holds at most {largest}: it cannot hold {e} experts, larger ids have wrapped around; save wider integers"
            ));
        }
        let limit = experts.map_or(crate::trace::expert_set::MAX_EXPERTS as i32, i32::from);
        if self.largest >= limit {
            let beyond = format!("an id is {}, beyond {limit} experts", self.largest);
            let half = array.width / 2;
            let packed = array.width.is_multiple_of(2)
                && half > 0
                && (k.is_none() || k.is_some_and(|k| usize::from(k) == half))
                && looks_packed(array, limit);
            if packed {
                return Err(format!(
                    "{beyond}; the last axis has {} = 2 x {half} entries, whose second half looks like weights: give --packed-weights",
                    array.width
                ));
            }
            return Err(beyond);
        }
        if let Some(k) = k.filter(|&k| usize::from(k) < self.k) {
            return Err(format!("rows have up to {} experts, --k or the model's configuration says {k}", self.k));
        }
        Ok(())
    }

    /// Reports what is left out.
    pub fn report(&self, sink: &mut Sink) {
        for kind in [Padding::Zero, Padding::Missing, Padding::Arange, Padding::Equal, Padding::Repeated] {
            let (code, what) = kind.warning();
            sink.leave_out(code, self.padding.iter().filter(|p| **p == Some(kind)).count() as u64, what);
        }
    }
}

/// Whether the second half of each cell is bits of weights and the first half is ids.
fn looks_packed(array: &IdArray, limit: i32) -> bool {
    let half = array.width / 2;
    // Small integers are denormal floats: a weight is 0 or of a size that gates have.
    let weight = |&bits: &i32| bits == 0 || (1e-9..=64.0).contains(&f32::from_bits(bits.cast_unsigned()));
    array
        .ids
        .chunks_exact(array.width.max(1))
        .all(|cell| cell[..half].iter().all(|id| (-1..limit).contains(id)) && cell[half..].iter().all(weight))
}

/// Whether these ids cannot be a choice: none at all, or one id several times.
fn is_dummy(cell: &[i32]) -> bool {
    match cell {
        [] => true,
        [one] => *one < 0,
        [first, rest @ ..] => *first < 0 && rest.iter().all(|&id| id < 0) || rest.iter().all(|id| id == first),
    }
}

fn padding(array: &IdArray, row: usize, experts: Option<u16>) -> Option<Padding> {
    let ids = array.row(row);
    let width = array.width;
    if ids.iter().all(|&id| id < 0) {
        return Some(Padding::Missing);
    }
    if width < 2 {
        return None;
    }
    if ids.iter().all(|&id| id == 0) {
        return Some(Padding::Zero);
    }
    // Within one layer, 0, 1, 2, ... could be a choice: it must be so in several.
    let cells = || ids.chunks_exact(width);
    let arange = |cell: &[i32]| cell.iter().zip(0..).all(|(&id, want)| id == want);
    let running = |modulus: i32| ids.iter().zip(0i32..).all(|(&id, at)| id == at % modulus.max(1));
    if array.layers > 1 && (cells().all(arange) || running(experts.map_or(i32::MAX, i32::from))) {
        return Some(Padding::Arange);
    }
    cells().all(is_dummy).then_some(Padding::Equal)
}

/// Marks runs of identical rows.
fn mark_runs(array: &IdArray, padding: &mut [Option<Padding>]) {
    let mut begin = 0;
    for row in 1..=array.rows {
        if row < array.rows && array.row(row) == array.row(begin) {
            continue;
        }
        if row - begin >= DUMMY_RUN {
            padding.get_mut(begin..row).unwrap_or_default().iter_mut().filter(|p| p.is_none()).for_each(|p| *p = Some(Padding::Repeated));
        }
        begin = row;
    }
}

/// Codes and words for cells that are left out of real rows.
const PARTIAL: (&str, &str) = ("partial_rows", "of one layer left out: fewer ids than k");
const REPEATED_IDS: (&str, &str) =
    ("repeated_ids", "of one layer left out: an id is there twice, which top-k cannot choose (was the array read with wrong strides?)");
const NOT_CAPTURED: (&str, &str) =
    ("not_captured", "of one layer left out: no ids, or one id k times, in a layer that is routed elsewhere");

/// Appends `range` of an array's rows to a step's routes, as rows `0..`. `axis` numbers the layers, `routed` says which
/// have routes. Cells that are no choice of k experts are left out and counted.
pub fn push(
    routes: &mut StepRoutes,
    array: &IdArray,
    survey: &Survey,
    range: Range<usize>,
    axis: &[u16],
    routed: &[bool],
    sink: &mut Sink,
) {
    let k = routes.k;
    let (mut ids, mut weights): (Vec<u16>, Vec<f32>) = (Vec::new(), Vec::new());
    for (layer, &number) in axis.iter().enumerate().filter(|&(layer, _)| routed.get(layer).copied().unwrap_or(false)) {
        let mut first = range.start;
        let flush = |routes: &mut StepRoutes, first: usize, ids: &mut Vec<u16>, weights: &mut Vec<f32>| {
            if !ids.is_empty() {
                let at = u16::try_from(first - range.start).unwrap_or(u16::MAX);
                routes.push(Module::Target, number, at, ids, weights);
                ids.clear();
                weights.clear();
            }
        };
        for row in range.clone() {
            let cell = array.cell(row, layer);
            let padded = survey.padding.get(row).copied().flatten().is_some();
            let left_out = if padded { None } else { choice(cell, k) };
            if padded || left_out.is_some() {
                if let Some((code, what)) = left_out {
                    sink.leave_out(code, 1, what);
                }
                flush(routes, first, &mut ids, &mut weights);
                first = row + 1;
                continue;
            }
            // Larger ones are no experts of any model, and refused as such; as few values must come of a cell as it has ids.
            let id = |&id: &i32| u16::try_from(id).unwrap_or(u16::MAX);
            if cell.len() == k {
                ids.extend(cell.iter().map(id));
            } else {
                ids.extend(cell.iter().filter(|&&id| id >= 0).map(id));
            }
            if !array.weights.is_empty() {
                let kept = cell.iter().zip(array.cell_weights(row, layer)).filter(|(id, _)| **id >= 0);
                weights.extend(kept.map(|(_, &weight)| weight));
            }
        }
        flush(routes, first, &mut ids, &mut weights);
    }
}

/// Why a cell is not a choice of k experts; `None` when it is one.
fn choice(cell: &[i32], k: usize) -> Option<(&'static str, &'static str)> {
    let found = cell.iter().filter(|&&id| id >= 0).count();
    // As many different experts as wanted, and no more: all is well. Everything else has its reason.
    let twice = has_twice(cell);
    if found == k && k > 1 && !twice {
        return None;
    }
    if is_dummy(cell) {
        return Some(NOT_CAPTURED);
    }
    if found != k {
        return Some(PARTIAL);
    }
    twice.then_some(REPEATED_IDS)
}

/// Whether an id is there twice; what is below 0 is none.
pub(super) fn has_twice<T: Copy + Ord + Default>(cell: &[T]) -> bool {
    /// More ids than this are sorted: comparing all with all would take longer.
    const FEW: usize = 16;
    let none_below = T::default();
    if let Ok(eight) = <&[T; 8]>::try_from(cell) {
        // The usual number, known beforehand: all of it in registers.
        let at_distance =
            |lag: usize| (0..8 - lag).fold(false, |twice, at| twice | (eight[at] == eight[at + lag] && eight[at] >= none_below));
        return (1..8).fold(false, |twice, lag| twice | at_distance(lag));
    }
    if cell.len() <= FEW {
        // By their distance, so that vectors of neighbours are compared.
        let at_distance = |lag: usize| cell.iter().zip(&cell[lag..]).fold(false, |twice, (a, b)| twice | (a == b && *a >= none_below));
        return (1..cell.len()).any(at_distance);
    }
    let mut ids: Vec<T> = cell.iter().copied().filter(|&id| id >= none_below).collect();
    ids.sort_unstable();
    ids.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(rows: &[&[&[i32]]]) -> IdArray {
        let (layers, width) = (rows[0].len(), rows[0][0].len());
        IdArray::new(rows.len(), layers, width, rows.iter().flat_map(|r| r.iter().flat_map(|c| c.iter().copied())).collect()).unwrap()
    }

    #[test]
    fn paddings_have_signatures_and_routes_have_not() {
        let a = array(&[
            &[&[0, 0], &[5, 3]],
            &[&[0, 0], &[0, 0]],
            &[&[-1, -1], &[-1, -1]],
            &[&[0, 1], &[0, 1]],
            &[&[0, 1], &[2, 3]],
            &[&[4, 4], &[7, 7]],
            &[&[0, 0], &[0, 1]],
        ]);
        let survey = Survey::of(&a, Some(8), false);
        let want =
            [None, Some(Padding::Zero), Some(Padding::Missing), Some(Padding::Arange), Some(Padding::Arange), Some(Padding::Equal), None];
        assert_eq!(survey.padding, want);
        assert_eq!((survey.routed.as_slice(), survey.k, survey.largest, survey.real_rows()), (&[false, true][..], 2, 5, 2));
        // Running on, modulo 4: 0 1 2 3, then 0 1 for the third layer.
        let running = array(&[&[&[0, 1], &[2, 3], &[0, 1]]]);
        assert_eq!(Survey::of(&running, Some(4), false).padding, [Some(Padding::Arange)]);
        assert_eq!(Survey::of(&running, Some(8), false).padding, [None]);
        // Kept on request, except where there is nothing to keep.
        let kept = Survey::of(&a, Some(8), true);
        assert_eq!((kept.real_rows(), kept.padding[2]), (6, Some(Padding::Missing)));
    }

    #[test]
    fn long_runs_are_dummy_batches() {
        let cell: &[&[i32]] = &[&[3, 1]];
        let other: &[&[i32]] = &[&[1, 3]];
        let mut rows = vec![cell; DUMMY_RUN - 1];
        assert_eq!(Survey::of(&array(&rows), None, false).real_rows(), DUMMY_RUN - 1);
        rows.push(cell);
        rows.push(other);
        let survey = Survey::of(&array(&rows), None, false);
        assert_eq!((survey.real_rows(), survey.padding[0]), (1, Some(Padding::Repeated)));
        assert_eq!(Survey::of(&array(&rows), None, true).real_rows(), DUMMY_RUN + 1);
    }

    #[test]
    fn cells_that_top_k_cannot_choose_are_told_apart() {
        assert_eq!(choice(&[3, 7, -1, -1], 2), None);
        assert_eq!(choice(&[3, 7, -1, -1], 4), Some(PARTIAL));
        assert_eq!(choice(&[3, 7, 3], 3), Some(REPEATED_IDS));
        assert_eq!(choice(&[3, 3, 3], 3), Some(NOT_CAPTURED));
        assert_eq!(choice(&[-1, -1], 2), Some(NOT_CAPTURED));
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_way_out() {
        let mut a = array(&[&[&[1, 2]]]);
        a.largest_storable = Some(255);
        let survey = Survey::of(&a, Some(384), false);
        assert!(survey.check(&a, Some(384), None).unwrap_err().contains("cannot hold 384 experts"));
        assert!(survey.check(&a, Some(256), None).is_ok());
        assert!(survey.check(&a, Some(2), None).unwrap_err().contains("an id is 2"));
        assert!(survey.check(&a, None, Some(1)).unwrap_err().contains("--k"));
        let bits = 0.25f32.to_bits().cast_signed();
        let packed = array(&[&[&[1, 2, bits, bits]]]);
        let error = Survey::of(&packed, Some(8), false).check(&packed, Some(8), None).unwrap_err();
        assert!(error.contains("4 = 2 x 2") && error.contains("--packed-weights"), "{error}");
        let unpacked = packed.unpack_weights().unwrap();
        assert_eq!((unpacked.width, unpacked.ids.as_slice(), unpacked.weights.as_slice()), (2, &[1, 2][..], &[0.25, 0.25][..]));
        assert!(array(&[&[&[1, 2, 3]]]).unpack_weights().is_err());
        assert!(IdArray::new(2, 2, 2, vec![0; 7]).is_err() && IdArray::new(usize::MAX, 2, 2, Vec::new()).is_err());
    }
}
