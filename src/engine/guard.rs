//! Bounds for a checkpoint's own programs: its tokenizer and its chat template.
//!
//! Both come from whoever made the checkpoint. Neither may hang a recording, take all memory or end the
//! process; what real checkpoints do lies far below these bounds.

use serde_json::Value;

/// Longest chat template, bytes. Published ones have a few thousand.
pub const MAX_TEMPLATE: usize = 64 << 10;
/// Longest prompt that a template may make, bytes.
pub const MAX_RENDERED: usize = 16 << 20;
/// Steps that a template may take.
pub const FUEL: u64 = 20_000_000;
/// Stack of the thread that parses and renders: the parser descends once a nested operator.
pub const STACK: usize = 256 << 20;
/// By how much a tokenizer's replacements may lengthen a text, all of them together.
const MAX_GROWTH: f64 = 64.0;
/// Tokens that a tokenizer may add to its vocabulary. Each is searched for in every text.
const MAX_ADDED: usize = 20_000;

/// What in a `tokenizer.json` is not run, in words; `None` when it may be.
pub fn refused_tokenizer(json: &Value) -> Option<String> {
    let mut growth = 1.0;
    for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        if let Some(reason) = json.get(part).and_then(|v| refused_part(v, &mut growth, 0)) {
            return Some(format!("`{part}`: {reason}"));
        }
    }
    let added = json.get("added_tokens").and_then(Value::as_array).map_or(0, Vec::len);
    (added > MAX_ADDED).then(|| format!("{added} added tokens; at most {MAX_ADDED} are taken"))
}

fn refused_part(part: &Value, growth: &mut f64, depth: usize) -> Option<String> {
    if depth > 16 {
        return Some("nested too deeply".into());
    }
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    match kind {
        // SentencePiece's compiled table: its reader trusts the sizes in it, and a byte-level tokenizer has none.
        "Precompiled" => return Some("a SentencePiece table (`Precompiled`) is not supported".into()),
        "FixedLength" if part.get("length").and_then(Value::as_u64).unwrap_or(0) == 0 => return Some("`FixedLength` of length 0".into()),
        "Replace" => {
            let pattern = part.get("pattern").and_then(|p| p.get("String")).and_then(Value::as_str);
            if pattern == Some("") {
                return Some("`Replace` of an empty text".into());
            }
            let content = part.get("content").and_then(Value::as_str).unwrap_or_default().len() as f64;
            *growth *= (content / pattern.map_or(1, str::len) as f64).max(1.0);
            if *growth > MAX_GROWTH {
                return Some(format!("its replacements lengthen a text more than {MAX_GROWTH} times"));
            }
        }
        _ => {}
    }
    ["normalizers", "pretokenizers", "processors", "decoders"]
        .iter()
        .filter_map(|list| part.get(*list)?.as_array())
        .flatten()
        .find_map(|inner| refused_part(inner, growth, depth + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_would_hang_or_crash_is_refused() {
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
        let tens: Vec<Value> = (0..9).map(|_| replace("a", "aaaaaaaaaa")).collect();
        for (normalizer, word) in [
            (replace("", "x"), "empty"),
            (json!({"type": "Precompiled", "precompiled_charsmap": ""}), "SentencePiece"),
            (json!({"type": "Sequence", "normalizers": tens}), "lengthen"),
        ] {
            let reason = refused_tokenizer(&json!({ "normalizer": normalizer })).unwrap();
            assert!(reason.contains("normalizer") && reason.contains(word), "{reason}");
        }
        assert!(refused_tokenizer(&json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}})).is_some());
        let added: Vec<Value> = (0..=MAX_ADDED).map(|id| json!({ "id": id })).collect();
        assert!(refused_tokenizer(&json!({ "added_tokens": added })).is_some());
    }

    #[test]
    fn what_byte_level_tokenizers_do_is_taken() {
        let file = json!({
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]},
            "post_processor": null,
        });
        assert_eq!(refused_tokenizer(&file), None);
    }
}
