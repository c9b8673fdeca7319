//! Readers of a configuration's keys, which name the file and the key when a value is wrong.
//!
//! Every number is read with its bounds: a hostile file ends in an error and never in an overflow or a huge allocation.

use super::error::EngineError;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Upper bound of layers; far above any released model (72), low enough that per-layer lists stay small.
pub(super) const MAX_LAYERS: u64 = 1024;
/// Upper bound of every width; products of two of them fit easily in 64 bits.
pub(super) const MAX_WIDTH: u64 = 1 << 20;

/// The top-level object of a JSON file, with readers that name the key when it is wrong.
pub(super) struct Keys {
    path: PathBuf,
    /// Put before the keys of a nested object in errors, such as `dflash_config.`.
    within: String,
    map: Map<String, Value>,
}

impl Keys {
    /// The object of a JSON text; `path` names it in errors.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self, EngineError> {
        let fail = |reason: String| EngineError::Checkpoint { path: path.to_owned(), reason };
        match serde_json::from_slice(json) {
            Ok(Value::Object(map)) => Ok(Self { path: path.to_owned(), within: String::new(), map }),
            Ok(_) => Err(fail("is not a JSON object".to_owned())),
            Err(e) => Err(fail(format!("is not JSON: {e}"))),
        }
    }

    /// An error of this file.
    pub fn bad(&self, reason: impl Into<String>) -> EngineError {
        EngineError::Checkpoint { path: self.path.clone(), reason: reason.into() }
    }

    /// An error about a key that asks for what is not implemented.
    pub fn unsupported(&self, key: &str, found: &Value, wanted: impl Into<String>) -> EngineError {
        EngineError::Unsupported { path: self.path.clone(), key: self.full(key), found: shorten(found), wanted: wanted.into() }
    }

    /// The key with the objects that it is in.
    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.within)
    }

    /// The object of a key, `None` when absent.
    pub fn object(&self, key: &str) -> Result<Option<Self>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { path: self.path.clone(), within: format!("{}.", self.full(key)), map: map.clone() }))
            }
            Some(other) => Err(self.bad(format!("`{}` is {}; expected an object", self.full(key), shorten(other)))),
        }
    }

    /// The first word of `architectures`, `null` without one.
    pub fn architecture(&self) -> &Value {
        self.map.get("architectures").and_then(|v| v.get(0)).unwrap_or(&Value::Null)
    }

    /// The value; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// A whole number within `low..=high`, `None` when absent. `4.0` is accepted as 4.
    pub fn number(&self, key: &str, low: u64, high: u64) -> Result<Option<usize>, EngineError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let whole = || value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..9e15).contains(f)).map(|f| f as u64);
        match value.as_u64().or_else(whole) {
            Some(n) if (low..=high).contains(&n) => {
                usize::try_from(n).map(Some).map_err(|_| self.bad(format!("`{}` is {n}, too large", self.full(key))))
            }
            _ => Err(self.bad(format!("`{}` is {}; expected a whole number from {low} to {high}", self.full(key), shorten(value)))),
        }
    }

    /// A required width.
    pub fn width(&self, key: &str) -> Result<usize, EngineError> {
        self.required(key, 1, MAX_WIDTH)
    }

    /// A whole number that must be there.
    pub fn required(&self, key: &str, low: u64, high: u64) -> Result<usize, EngineError> {
        self.number(key, low, high)?.ok_or_else(|| self.bad(format!("`{}` is missing; it has no default", self.full(key))))
    }

    /// A finite number.
    pub fn float(&self, key: &str, default: f64) -> Result<f64, EngineError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64() {
            Some(f) if f.is_finite() => Ok(f),
            _ => Err(self.bad(format!("`{}` is {}; expected a number", self.full(key), shorten(value)))),
        }
    }

    /// True or false.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, EngineError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.bad(format!("`{}` is {}; expected true or false", self.full(key), shorten(value))))
    }

    /// Token ids given as one number or a list.
    pub fn ids(&self, key: &str) -> Result<Vec<u32>, EngineError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let list = value.as_array().map_or_else(|| std::slice::from_ref(value), Vec::as_slice);
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        let wrong = || self.bad(format!("`{}` is {}; expected a token id or a list of them", self.full(key), shorten(value)));
        list.iter().map(|v| id(v).ok_or_else(wrong)).collect()
    }
}

/// A JSON value as it fits into a line.
pub(super) fn shorten(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}
