//! `[layers][rows][k]` numbers of a line, as nested lists or as base64, in one flat vector.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{DeserializeOwned, DeserializeSeed, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// Begin and end in another list: lines are bounded, so 32 bits are enough.
type Span = (u32, u32);

/// The span of a row that is not known.
const UNKNOWN: Span = (u32::MAX, 0);

fn range((begin, end): Span) -> Range<usize> {
    begin as usize..end as usize
}

/// A weight or probability; `null` is one that is no number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Number(pub f32);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Option::<f32>::deserialize(deserializer)?.unwrap_or(f32::NAN)))
    }
}

/// Layers of rows, any of them unknown.
#[derive(Debug, Clone, PartialEq)]
pub struct Flat<T> {
    values: Vec<T>,
    /// Where each row's values are, or [`UNKNOWN`].
    rows: Vec<Span>,
    /// Where each layer's rows are; nowhere of one that is not known.
    layers: Vec<Span>,
}

impl<T> Default for Flat<T> {
    fn default() -> Self {
        Self { values: Vec::new(), rows: Vec::new(), layers: Vec::new() }
    }
}

impl<T> Flat<T> {
    /// Where the values of the row that is being read go.
    pub fn values_mut(&mut self) -> &mut Vec<T> {
        &mut self.values
    }

    /// Ends the row that is being read.
    pub fn end_row(&mut self) {
        let begin = self.rows.iter().rev().find(|row| **row != UNKNOWN).map_or(0, |row| row.1);
        self.rows.push((begin, self.values.len() as u32));
    }

    /// Adds a row that is not known.
    pub fn unknown_row(&mut self) {
        self.rows.push(UNKNOWN);
    }

    /// Ends the layer that is being read.
    pub fn end_layer(&mut self) {
        let begin = self.layers.last().map_or(0, |layer| layer.1);
        self.layers.push((begin, self.rows.len() as u32));
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The rows of a layer, as far as they are there.
    pub fn rows(&self, layer: usize) -> impl Iterator<Item = Option<&[T]>> {
        let rows = self.layers.get(layer).and_then(|&span| self.rows.get(range(span))).unwrap_or_default();
        rows.iter().map(|&row| self.known(row))
    }

    /// The values of one row; `None` where it is not known or not there.
    pub fn row(&self, layer: usize, row: usize) -> Option<&[T]> {
        let place = range(*self.layers.get(layer)?).nth(row)?;
        self.known(*self.rows.get(place)?)
    }

    fn known(&self, row: Span) -> Option<&[T]> {
        if row == UNKNOWN { None } else { self.values.get(range(row)) }
    }

    /// Full layers of `rows` rows of `k` values.
    fn full(values: Vec<T>, layers: usize, rows: usize, k: usize) -> Self {
        let spans = |n: usize, of: usize| (0..n).map(|at| ((at * of) as u32, ((at + 1) * of) as u32)).collect();
        Self { values, rows: spans(layers * rows, k), layers: spans(layers, rows) }
    }
}

/// `[layers][rows][k]` as it stands in a line.
#[derive(Debug, Clone, PartialEq)]
pub enum Table<T> {
    /// Left out or `null`.
    None,
    /// Base64 of little-endian numbers.
    Text(String),
    /// Nested lists.
    Nested(Flat<T>),
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self::None
    }
}

impl<T> Table<T> {
    /// Whether it was given.
    pub fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// The numbers, whichever way they were written. `shape` is layers, rows and k; `what` names the table.
    ///
    /// # Errors
    /// A sentence when the table does not have that shape.
    pub fn flat<const N: usize>(self, shape: [usize; 3], what: &str, of: impl Fn([u8; N]) -> T) -> Result<Flat<T>, String> {
        let [layers, rows, k] = shape;
        match self {
            Self::None => Ok(Flat::default()),
            Self::Nested(flat) => {
                if flat.layers() != layers {
                    return Err(format!("{what} of {} layers, the header has {layers} in `moe_layers`", flat.layers()));
                }
                if let Some(layer) = flat.layers.iter().map(|&span| range(span).len()).find(|&n| n > rows) {
                    return Err(format!("{what} of {layer} rows for {rows} tokens"));
                }
                Ok(flat)
            }
            Self::Text(text) => {
                let bytes = STANDARD.decode(text).map_err(|e| format!("{what}: not base64: {e}"))?;
                if Some(bytes.len()) != rows.checked_mul(layers * k * N) {
                    return Err(format!("{what}: {} bytes are not {layers} layers of {rows} rows of {k}", bytes.len()));
                }
                Ok(Flat::full(bytes.as_chunks::<N>().0.iter().map(|b| of(*b)).collect(), layers, rows, k))
            }
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Table<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TableVisitor(PhantomData))
    }
}

struct TableVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for TableVisitor<T> {
    type Value = Table<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("lists by layer and row, base64 text, or null")
    }

    fn visit_unit<E: Error>(self) -> Result<Table<T>, E> {
        Ok(Table::None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Table<T>, E> {
        Ok(Table::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Table<T>, A::Error> {
        let mut flat = Flat::default();
        while list.next_element_seed(Layer(&mut flat))?.is_some() {
            flat.end_layer();
        }
        Ok(Table::Nested(flat))
    }
}

/// One layer: a list of rows, or `null`.
struct Layer<'a, T>(&'a mut Flat<T>);

impl<'de, T: DeserializeOwned> DeserializeSeed<'de> for Layer<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: DeserializeOwned> Visitor<'de> for Layer<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a layer: a list of rows, or null")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Row(&mut *self.0))?.is_some() {}
        Ok(())
    }
}

/// One row: a list of numbers, or `null`.
struct Row<'a, T>(&'a mut Flat<T>);

impl<'de, T: DeserializeOwned> DeserializeSeed<'de> for Row<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: DeserializeOwned> Visitor<'de> for Row<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row: a list of numbers, or null")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.0.unknown_row();
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(value) = list.next_element()? {
            self.0.values.push(value);
        }
        self.0.end_row();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flat(json: &str, shape: [usize; 3]) -> Result<Flat<u16>, String> {
        let table: Table<u16> = serde_json::from_str(json).map_err(|e| e.to_string())?;
        table.flat(shape, "routes", u16::from_le_bytes)
    }

    #[test]
    fn unknown_layers_and_rows_keep_their_places() {
        let table = flat("[[[1,2],null,[3,4]],null,[[5,6]]]", [3, 3, 2]).unwrap();
        let rows = |layer: usize| table.rows(layer).map(|row| row.map(<[u16]>::to_vec)).collect::<Vec<_>>();
        assert_eq!(rows(0), [Some(vec![1, 2]), None, Some(vec![3, 4])]);
        assert_eq!((rows(1), rows(2), rows(3)), (vec![], vec![Some(vec![5, 6])], vec![]));
        assert_eq!((table.row(0, 2), table.row(0, 1), table.row(1, 0), table.row(2, 1)), (Some(&[3, 4][..]), None, None, None));
        assert_eq!(flat("null", [1, 1, 1]).unwrap(), Flat::default());
    }

    #[test]
    fn what_is_no_table_is_named() {
        for (json, why) in [
            ("3", "expected lists by layer"),
            ("[3]", "expected a layer"),
            ("[[3]]", "expected a row"),
            ("[[[-1]]]", "expected u16"),
            ("[[[1]]]", "1 layers, the header has 2"),
            ("[[[1],[2]],[]]", "2 rows for 1 tokens"),
            ("\"!\"", "not base64"),
            ("\"AAA=\"", "2 bytes are not 2 layers of 1 rows of 1"),
        ] {
            let error = flat(json, [2, 1, 1]).unwrap_err();
            assert!(error.contains(why), "{json}: {error}");
        }
        let weights: Table<Number> = serde_json::from_str("[[[0.5,null]]]").unwrap();
        let weights = weights.flat([1, 1, 2], "weights", |b| Number(f32::from_le_bytes(b))).unwrap();
        assert!(weights.row(0, 0).is_some_and(|row| row[0] == Number(0.5) && row[1].0.is_nan()));
    }

    proptest! {
        #[test]
        fn lists_and_base64_are_the_same(layers in 1usize..4, rows in 1usize..4, k in 1usize..4) {
            let ids: Vec<u16> = (0..(layers * rows * k) as u16).map(|i| i * 77).collect();
            let nested: Vec<Vec<&[u16]>> = ids.chunks(rows * k).map(|layer| layer.chunks(k).collect()).collect();
            let packed = STANDARD.encode(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
            let shape = [layers, rows, k];
            let (a, b) = (flat(&serde_json::to_string(&nested).unwrap(), shape).unwrap(), flat(&format!("\"{packed}\""), shape).unwrap());
            prop_assert_eq!(&a, &b);
            prop_assert_eq!(a.row(layers - 1, rows - 1), ids.chunks(k).last());
        }
    }
}
