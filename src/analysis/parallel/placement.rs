//! Which ranks hold which experts: by rule, balanced by loads, or from an EPLB-style file.
//!
//! A file is a JSON object with one of
//!
//! * `physical_to_logical_map`: `[layers][slots]`, the expert in each slot. Slot s of P lies on rank floor(s N / P); an expert in several
//!   slots is replicated.
//! * `logical_count`: `[layers][experts]` or `[samples][layers][experts]` routed rows by expert, from which a balanced placement is made.
//!
//! There is a row for every layer of the model, dense ones included, or one for every routed layer.

use crate::analysis::AnalysisError;
use crate::trace::ModelShape;
use serde_json::Value;
use std::io::Read;
use std::path::Path;

/// Largest file that is read.
const MAX_BYTES: u64 = 256 << 20;
/// Largest number of slots a layer.
const MAX_SLOTS: usize = 1 << 16;

/// How experts are placed.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// Expert e of E on rank floor(e N / E).
    Contiguous,
    /// Expert e on rank e mod N.
    RoundRobin,
    /// As a file says.
    File(File),
}

/// A file's content.
#[derive(Debug, Clone, PartialEq)]
pub struct File {
    /// Its path, for errors and the report.
    pub origin: String,
    table: Table,
}

#[derive(Debug, Clone, PartialEq)]
enum Table {
    Map(Vec<Vec<u64>>),
    Counts(Vec<Vec<u64>>),
}

/// One layer: the ranks of each expert, ascending and distinct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPlacement {
    /// Entry e: ranks of expert e, at least one.
    pub ranks: Vec<Box<[u16]>>,
}

impl LayerPlacement {
    fn single(ranks: impl Iterator<Item = usize>) -> Self {
        Self { ranks: ranks.map(|rank| [rank as u16].into()).collect() }
    }

    /// Longest processing time first: experts in order of falling load (the lower number on a tie), each on the rank of the smallest
    /// load so far that has room (the lower one on a tie). A rank has room for ceil(E / N) experts.
    ///
    /// Loads 9, 7, 6, 5 on two ranks: 9 to the first, 7 and 6 to the second, 5 to the first: 14 and 13.
    pub fn balanced(loads: &[u64], ranks: usize) -> Self {
        let room = loads.len().div_ceil(ranks);
        let mut order: Vec<usize> = (0..loads.len()).collect();
        order.sort_by_key(|&e| (std::cmp::Reverse(loads[e]), e));
        let (mut load, mut held, mut rank_of) = (vec![0u64; ranks], vec![0; ranks], vec![0; loads.len()]);
        for expert in order {
            let rank = (0..ranks).filter(|&r| held[r] < room).min_by_key(|&r| (load[r], r)).unwrap_or(0);
            load[rank] += loads[expert];
            held[rank] += 1;
            rank_of[expert] = rank;
        }
        Self::single(rank_of.into_iter())
    }

    /// The expert in each slot when every rank has as many slots as it has experts; for a placement without replicas.
    pub fn slots(&self, ranks: usize) -> Vec<u64> {
        let on = |rank: usize| (0u64..).zip(&self.ranks).filter(move |(_, r)| r.first().is_some_and(|&r| usize::from(r) == rank));
        (0..ranks).flat_map(|rank| on(rank).map(|(expert, _)| expert)).collect()
    }
}

impl File {
    /// Reads an open file; `path` names it.
    ///
    /// # Errors
    /// When it cannot be read, is too large, or is not one of the two forms.
    pub fn read(path: &Path, file: std::fs::File) -> Result<Self, AnalysisError> {
        let origin = path.display().to_string();
        let refuse = |reason: String| AnalysisError::Placement { origin: origin.clone(), reason };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|e| refuse(format!("cannot read: {e}")))?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(refuse("too large for a placement".into()));
        }
        Self::parse(&bytes, &origin)
    }

    /// The file of these bytes; `origin` names it.
    ///
    /// # Errors
    /// As [`File::read`].
    pub fn parse(bytes: &[u8], origin: &str) -> Result<Self, AnalysisError> {
        let refuse = |reason: String| AnalysisError::Placement { origin: origin.to_owned(), reason };
        let value: Value =
            serde_json::from_slice(bytes).map_err(|e| refuse(format!("not JSON at line {}, column {}", e.line(), e.column())))?;
        let table = match (value.get("physical_to_logical_map"), value.get("logical_count")) {
            (Some(map), None) => Table::Map(matrix(map, "physical_to_logical_map").map_err(refuse)?),
            (None, Some(counts)) => Table::Counts(counts_of(counts).map_err(refuse)?),
            _ => return Err(refuse("must have one of `physical_to_logical_map` and `logical_count`".into())),
        };
        Ok(Self { origin: origin.to_owned(), table })
    }

    fn layers(&self, model: &ModelShape, layers: &[u16], ranks: usize) -> Result<Vec<LayerPlacement>, AnalysisError> {
        let refuse = |reason: String| AnalysisError::Placement { origin: self.origin.clone(), reason };
        let rows = match &self.table {
            Table::Map(rows) | Table::Counts(rows) => rows,
        };
        let all = rows.len() == usize::from(model.layers);
        if !all && rows.len() != layers.len() {
            let (have, want, routed) = (rows.len(), model.layers, layers.len());
            return Err(refuse(format!("{have} layers where the model has {want}, {routed} of them routed")));
        }
        let experts = usize::from(model.experts);
        let of = |(place, &layer): (usize, &u16)| {
            let at = if all { usize::from(layer) } else { place };
            let row = rows.get(at).map(Vec::as_slice).unwrap_or_default();
            match &self.table {
                Table::Counts(_) if row.len() == experts => Ok(LayerPlacement::balanced(row, ranks)),
                Table::Counts(_) => Err(refuse(format!("row {at} counts {} experts where the model has {experts}", row.len()))),
                Table::Map(_) => replicas(row, experts, ranks).map_err(|reason| refuse(format!("row {at}: {reason}"))),
            }
        };
        layers.iter().enumerate().map(of).collect()
    }
}

/// Slots to the ranks of each expert.
fn replicas(slots: &[u64], experts: usize, ranks: usize) -> Result<LayerPlacement, String> {
    if slots.is_empty() || !slots.len().is_multiple_of(ranks) {
        return Err(format!("{} slots cannot be spread over {ranks} ranks", slots.len()));
    }
    let per_rank = slots.len() / ranks;
    let mut of: Vec<Vec<u16>> = vec![Vec::new(); experts];
    for (slot, &expert) in slots.iter().enumerate() {
        let held = usize::try_from(expert).ok().and_then(|e| of.get_mut(e));
        let held = held.ok_or_else(|| format!("slot {slot} holds expert {expert}, the model has {experts}"))?;
        let rank = (slot / per_rank) as u16;
        if held.last() != Some(&rank) {
            held.push(rank);
        }
    }
    match of.iter().position(Vec::is_empty) {
        Some(missing) => Err(format!("expert {missing} is in no slot")),
        None => Ok(LayerPlacement { ranks: of.into_iter().map(Vec::into_boxed_slice).collect() }),
    }
}

impl Choice {
    /// The placement of each of these layers on `ranks` ranks.
    ///
    /// # Errors
    /// When a file does not fit the model or the ranks.
    pub fn layers(&self, model: &ModelShape, layers: &[u16], ranks: usize) -> Result<Vec<LayerPlacement>, AnalysisError> {
        let experts = usize::from(model.experts);
        let rule = |rank: &dyn Fn(usize) -> usize| vec![LayerPlacement::single((0..experts).map(rank)); layers.len()];
        match self {
            Self::Contiguous => Ok(rule(&|e| e * ranks / experts)),
            Self::RoundRobin => Ok(rule(&|e| e % ranks)),
            Self::File(file) => file.layers(model, layers, ranks),
        }
    }

    /// Its name in the report.
    pub fn name(&self) -> &str {
        match self {
            Self::Contiguous => "contiguous",
            Self::RoundRobin => "round-robin",
            Self::File(file) => &file.origin,
        }
    }
}

/// Rows of whole numbers.
fn matrix(value: &Value, what: &str) -> Result<Vec<Vec<u64>>, String> {
    let rows = value.as_array().filter(|rows| !rows.is_empty()).ok_or_else(|| format!("`{what}` is not a list of lists"))?;
    let row = |(at, row): (usize, &Value)| {
        let row = row.as_array().filter(|row| row.len() <= MAX_SLOTS).ok_or_else(|| format!("`{what}[{at}]` is not a list of a layer"))?;
        let entry = |(i, v): (usize, &Value)| {
            // Counts that went through floating point are whole all the same.
            let whole = v.as_f64().filter(|f| f.fract() == 0.0 && (0.0..9e15).contains(f)).map(|f| f as u64);
            v.as_u64().or(whole).ok_or_else(|| format!("`{what}[{at}][{i}]` is not a whole number of at least 0"))
        };
        row.iter().enumerate().map(entry).collect()
    };
    rows.iter().enumerate().map(row).collect()
}

/// `[layers][experts]`, or the sum over `[samples]` of it.
fn counts_of(value: &Value) -> Result<Vec<Vec<u64>>, String> {
    let what = "logical_count";
    let samples = match value.as_array() {
        Some(samples) if samples.iter().all(|s| s.get(0).is_some_and(Value::is_array)) && !samples.is_empty() => samples,
        _ => return matrix(value, what),
    };
    let mut sum: Vec<Vec<u64>> = Vec::new();
    for sample in samples {
        let layers = matrix(sample, what)?;
        if sum.is_empty() {
            sum = layers;
            continue;
        }
        if sum.len() != layers.len() || sum.iter().zip(&layers).any(|(a, b)| a.len() != b.len()) {
            return Err(format!("the samples of `{what}` have different shapes"));
        }
        for (total, count) in sum.iter_mut().flatten().zip(layers.iter().flatten()) {
            *total = total.saturating_add(*count);
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::manifest;
    use proptest::prelude::*;

    fn ranks(placement: &LayerPlacement) -> Vec<Vec<u16>> {
        placement.ranks.iter().map(|r| r.to_vec()).collect()
    }

    fn parse(text: &str) -> Result<File, String> {
        File::parse(text.as_bytes(), "p.json").map_err(|e| e.to_string())
    }

    #[test]
    fn worked_examples() {
        let model = manifest(&[1, 2], 4, 2).model;
        let of = |choice: &Choice| ranks(&choice.layers(&model, &[1, 2], 2).unwrap()[1]);
        assert_eq!(of(&Choice::Contiguous), [[0], [0], [1], [1]]);
        assert_eq!(of(&Choice::RoundRobin), [[0], [1], [0], [1]]);
        let balanced = LayerPlacement::balanced(&[9, 7, 6, 5], 2);
        assert_eq!((ranks(&balanced), balanced.slots(2)), (vec![vec![0], vec![1], vec![1], vec![0]], vec![0, 3, 1, 2]));
        // Three layers in the file: the model has layers 0, 1, 2. Expert 0 is on both ranks of layer 2.
        let map = r#"{"physical_to_logical_map": [[0,1,2,3,0,1],[0,1,2,3,0,1],[0,1,2,3,0,0]]}"#;
        assert_eq!(of(&Choice::File(parse(map).unwrap())), [vec![0, 1], vec![0], vec![0], vec![1]]);
        // Two layers: the routed ones. Samples are added up.
        let counts = r#"{"logical_count": [[[1,1,1,1],[4,7,1,5]],[[1,1,1,1],[5,0,5.0,0]]]}"#;
        assert_eq!(of(&Choice::File(parse(counts).unwrap())), [[0], [1], [1], [0]]);
    }

    #[test]
    fn broken_files_are_told_apart() {
        let model = manifest(&[1, 2], 4, 2).model;
        let fails = |text: &str| match parse(text) {
            Ok(file) => file.layers(&model, &[1, 2], 2).unwrap_err().to_string(),
            Err(error) => error,
        };
        for (text, said) in [
            ("[", "p.json: not JSON at line 1"),
            ("{}", "one of `physical_to_logical_map`"),
            (r#"{"logical_count": 3}"#, "not a list of lists"),
            (r#"{"logical_count": [[1, -2]]}"#, "[0][1]"),
            (r#"{"logical_count": [[1, 2.5]]}"#, "[0][1]"),
            (r#"{"logical_count": [[1,2,3,4]]}"#, "1 layers where the model has 3, 2 of them routed"),
            (r#"{"logical_count": [[1,2,3],[1,2,3]]}"#, "row 0 counts 3 experts"),
            (r#"{"logical_count": [[[1,2]],[[1]]]}"#, "different shapes"),
            (r#"{"physical_to_logical_map": [[0,1,2],[0,1,2]]}"#, "3 slots cannot be spread over 2 ranks"),
            (r#"{"physical_to_logical_map": [[0,1,2,4],[0,1,2,3]]}"#, "slot 3 holds expert 4"),
            (r#"{"physical_to_logical_map": [[0,1,2,2],[0,1,2,3]]}"#, "expert 3 is in no slot"),
        ] {
            assert!(fails(text).contains(said), "{text}: {}", fails(text));
        }
    }

    proptest! {
        #[test]
        fn balanced_is_a_placement_that_fits(loads in prop::collection::vec(0u64..1000, 1..70), ranks in 1usize..12) {
            let placement = LayerPlacement::balanced(&loads, ranks);
            let mut held = vec![0; ranks];
            placement.ranks.iter().for_each(|r| held[usize::from(r[0])] += 1);
            prop_assert!(held.iter().all(|&n| n <= loads.len().div_ceil(ranks)));
            let mut slots = placement.slots(ranks);
            slots.sort_unstable();
            prop_assert_eq!(slots, (0..loads.len() as u64).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_give_a_file_or_one_line(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Err(e) = File::parse(&bytes, "p") {
                prop_assert_eq!(e.to_string().lines().count(), 1);
            }
        }
    }
}
