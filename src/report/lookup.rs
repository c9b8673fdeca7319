//! Numbers out of costs by the path of their keys.

use serde::Serialize;
use serde_json::Value;

/// A part of a report as JSON, whatever type it has; `null` where it cannot be.
pub fn json(part: &impl Serialize) -> Value {
    serde_json::to_value(part).unwrap_or(Value::Null)
}

/// The number at a path of keys; `None` where there is none.
pub fn number(part: &Value, path: &[&str]) -> Option<f64> {
    path.iter().try_fold(part, |at, key| at.get(key))?.as_f64().filter(|v| v.is_finite())
}

/// The interval `[low, high]` at a path of keys.
pub fn interval(part: &Value, path: &[&str]) -> Option<[f64; 2]> {
    let pair = path.iter().try_fold(part, |at, key| at.get(key))?.as_array()?;
    match pair.as_slice() {
        [low, high] => Some([low.as_f64()?, high.as_f64()?]),
        _ => None,
    }
}

/// The word at a key; empty where there is none.
pub fn word<'a>(part: &'a Value, key: &str) -> &'a str {
    part.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The objects of a list at a key; none where there is no list.
pub fn list<'a>(part: &'a Value, key: &str) -> &'a [Value] {
    part.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_there_is_unknown() {
        let part = json!({"a": {"b": 2, "ci95": [1, 3.5]}, "name": "x", "list": [1, 2]});
        assert_eq!((number(&part, &["a", "b"]), number(&part, &["a", "c"]), number(&part, &["name"])), (Some(2.0), None, None));
        assert_eq!(
            (interval(&part, &["a", "ci95"]), interval(&part, &["a", "b"]), interval(&part, &["list"])),
            (Some([1.0, 3.5]), None, Some([1.0, 2.0]))
        );
        assert_eq!((word(&part, "name"), word(&part, "a"), list(&part, "list").len(), list(&part, "a").len()), ("x", "", 2, 0));
        assert_eq!(json(&None::<f64>), Value::Null);
    }
}
