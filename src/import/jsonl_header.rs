//! The header of `specprof.jsonl/1` as a manifest.

use super::{Options, Source};
use crate::trace::Manifest;
use crate::trace::manifest::{IdSpace, WindowCompleteness};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Fields of the manifest that are not taken from the header.
const OWN: [&str; 5] = ["type", "format", "format_version", "tables", "token_hash"];

/// The manifest of a header: what it leaves out is unknown, or what the format says.
///
/// # Errors
/// A sentence naming the key.
pub fn manifest(header: &Value, options: &Options) -> Result<Manifest, String> {
    let source = Source { window_completeness: WindowCompleteness::Full, id_space: IdSpace::Logical, ..Source::default() };
    let base = serde_json::to_value(source.manifest(options, options.known_experts())).map_err(|e| e.to_string())?;
    let (Value::Object(mut base), Some(header)) = (base, header.as_object()) else { return Err("the header is not an object".into()) };
    let model = header.get("model").and_then(Value::as_object).ok_or("the header has no `model`")?;
    // Counts alone may be of nobody knows how many rows; a profile of kernels has no routes at all.
    let without_routes = matches!(header.get("window_completeness").and_then(Value::as_str), Some("counts" | "none"));
    for key in ["experts", "experts_per_token", "moe_layers"] {
        if model.get(key).is_none_or(Value::is_null) && !(without_routes && key == "experts_per_token") {
            return Err(format!("the header's `model` has no `{key}`"));
        }
    }
    base.insert("complete".into(), true.into());
    overlay(&mut base, header);
    // Left out of a header, it is true: `experts` is there.
    if !model.contains_key("experts_known") {
        base.get_mut("model").and_then(Value::as_object_mut).map(|m| m.insert("experts_known".into(), true.into()));
    }
    let mut facts: Manifest = serde_json::from_value(Value::Object(base)).map_err(|e| format!("header: {e}"))?;
    let model = &facts.model;
    if model.experts_per_token == 0 && !without_routes || model.experts_per_token > model.experts || model.experts == u16::MAX {
        return Err(format!("the header's model has {} experts per token of {}", model.experts_per_token, model.experts));
    }
    if !model.moe_layers.is_sorted_by(|a, b| a < b) || model.moe_layers.last() == Some(&u16::MAX) {
        return Err("the header's `moe_layers` do not ascend".into());
    }
    facts.tables = BTreeMap::new();
    facts.token_hash = None;
    Ok(facts)
}

/// Puts the header's values over those that are unknown; of objects, key by key.
fn overlay(base: &mut Map<String, Value>, header: &Map<String, Value>) {
    for (key, value) in header.iter().filter(|(key, _)| !OWN.contains(&key.as_str())) {
        match (base.get_mut(key), value) {
            (Some(Value::Object(mine)), Value::Object(theirs)) => overlay(mine, theirs),
            _ => {
                base.insert(key.clone(), value.clone());
            }
        }
    }
}
