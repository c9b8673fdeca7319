//! The lines of `specprof.jsonl/1` as they stand in the file. `docs/jsonl.md` describes them.

use serde::de::{DeserializeOwned, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::fmt;
use std::marker::PhantomData;

/// A request's number, or its name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum RequestKey {
    /// The trace's own number.
    Number(u32),
    /// A name, to be numbered.
    Name(String),
}

/// One forward pass. `docs/jsonl.md` says what each key means.
#[derive(Debug, Deserialize)]
pub struct StepLine {
    pub request_id: RequestKey,
    pub tokens: Vec<u32>,
    pub phase: Option<String>,
    pub accepted: Option<u16>,
    #[serde(default)]
    pub emitted: Option<Vec<u32>>,
    #[serde(default)]
    pub routes: Table<u16>,
    #[serde(default)]
    pub weights: Table<f32>,
    pub step_id: Option<u32>,
    pub context_len: Option<u32>,
    pub parents: Option<Vec<i16>>,
    pub draft_probs: Option<Vec<f32>>,
    pub begin_ns: Option<i64>,
    pub end_ns: Option<i64>,
    pub draft_ns: Option<i64>,
    pub target_ns: Option<i64>,
    pub device_ns: Option<i64>,
    #[serde(default)]
    pub draft_routes: Option<Vec<(u16, u16, Vec<Vec<u16>>)>>,
    #[serde(default)]
    pub draft_weights: Option<Vec<Vec<Vec<f32>>>>,
}

/// The end of a request. `docs/jsonl.md` says what each key means.
#[derive(Debug, Deserialize)]
pub struct RequestLine {
    pub request_id: RequestKey,
    pub id: Option<String>,
    pub prompt_tokens: Option<u32>,
    pub generated_tokens: Option<u32>,
    pub finish_reason: Option<String>,
    pub tags: Option<Value>,
    pub prompt_text: Option<String>,
    pub output_text: Option<String>,
}

/// Layers, each of rows, each of k values; any of them may be unknown.
pub type Nested<T> = Vec<Option<Vec<Option<Vec<T>>>>>;

/// `[layers][rows][k]` as nested lists or as base64.
#[derive(Debug, Clone, PartialEq)]
pub enum Table<T> {
    /// Left out or `null`.
    None,
    /// Base64 of little-endian numbers.
    Text(String),
    /// Nested lists.
    Nested(Nested<T>),
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
        let mut layers = Vec::new();
        while let Some(layer) = list.next_element()? {
            layers.push(layer);
        }
        Ok(Table::Nested(layers))
    }
}
