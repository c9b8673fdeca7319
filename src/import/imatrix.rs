//! llama.cpp's importance matrices: how often each expert was chosen, by layer.
//!
//! For the experts' weights `blk.N.ffn_{gate,up,down}_exps.weight` the tensor `<name>.counts` has one number an expert: the
//! tokens that were routed to it. The three weights of a layer count the same tokens.

use super::gguf::{Gguf, Value};
use super::{Flag, Head, ImportError, Importer, Options, Sink, flags};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Whole numbers beyond this do not all fit a 32-bit float.
const EXACT: f32 = 16_777_216.0;

/// Importance matrices.
pub struct Imatrix;

impl Importer for Imatrix {
    fn name(&self) -> &'static str {
        "imatrix"
    }

    fn about(&self) -> &'static str {
        "llama.cpp importance matrices (GGUF): how often each expert was chosen"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::NUMBERED_COUNTS
    }

    fn sniff(&self, head: &Head) -> bool {
        head.starts_with(b"GGUF") && head.has("imatrix") || is_legacy(&head.bytes)
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        for path in inputs {
            let head = Head::read(path)?;
            if is_legacy(&head.bytes) {
                let what = "no per-expert counts: an importance matrix of llama.cpp's old format (.dat) does not have them; make it again with a \
                            newer llama-imatrix, which writes GGUF";
                return Err(ImportError::empty(path, what));
            }
            counts(path, options, sink)?;
        }
        Ok(())
    }
}

/// The old format: number of entries, then for each the length of its name, the name, calls, number of values, values.
fn is_legacy(bytes: &[u8]) -> bool {
    let u32_at = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let (Some(1..=1_000_000), Some(len @ 4..=256)) = (u32_at(0), u32_at(4)) else { return false };
    let name = bytes.get(8..8 + len as usize).unwrap_or_default();
    name.ends_with(b".weight") && name.iter().all(|b| b.is_ascii_graphic())
}

/// The layer of `blk.N.ffn_gate_exps.weight.counts` and its kind.
fn layer_of(name: &str) -> Option<u16> {
    let (number, weight) = name.strip_prefix("blk.")?.split_once('.')?;
    let weight = weight.strip_suffix(".weight.counts")?;
    let of_experts = weight.starts_with("ffn_") && weight.ends_with("_exps");
    of_experts.then(|| number.parse().ok()).flatten()
}

fn counts(path: &Path, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let wrong = |reason: String| ImportError::input(path, reason);
    let read = |error: io::Error| match error.kind() {
        io::ErrorKind::InvalidData => wrong(error.to_string()),
        _ => ImportError::io(path)(error),
    };
    let mut file = Gguf::open(path).map_err(read)?;
    if file.values.get("general.type") != Some(&Value::Text("imatrix".into())) {
        return Err(wrong("a GGUF file, but not an importance matrix (general.type is not `imatrix`)".into()));
    }
    let of_layers: Vec<_> = file.tensors.iter().filter_map(|(name, entry)| Some((layer_of(name)?, name.clone(), entry.clone()))).collect();
    let mut layers: BTreeMap<u16, (String, Vec<u64>)> = BTreeMap::new();
    let mut converted = 0u64;
    for (layer, name, entry) in of_layers {
        let in_tensor = |reason: String| wrong(format!("tensor {}: {reason}", name.escape_debug()));
        if entry.shape.iter().all(|&len| len == 1) {
            converted += 1;
            continue;
        }
        let floats =
            file.floats(&entry).map_err(|e| if e.kind() == io::ErrorKind::InvalidData { in_tensor(e.to_string()) } else { read(e) })?;
        let count = |&x: &f32| match x {
            x if x >= 0.0 && x.fract() == 0.0 && x < 1e15 => Ok(x as u64),
            x => Err(in_tensor(format!("{x} is not a count"))),
        };
        if floats.iter().any(|&x| x >= EXACT) {
            sink.warn("counts_rounded", "counts beyond 16777216 are rounded: the file has them as 32-bit floats");
        }
        let found = floats.iter().map(count).collect::<Result<Vec<u64>, _>>()?;
        match layers.get(&layer) {
            Some((other, before)) if *before != found => {
                let message =
                    format!("{} and {} of one layer have other counts: the first is taken", other.escape_debug(), name.escape_debug());
                sink.warn("counts_differ", message);
            }
            Some(_) => {}
            None => {
                layers.insert(layer, (name, found));
            }
        }
    }
    if layers.is_empty() {
        let what = match converted {
            0 => "no experts: none of its tensors is of experts (blk.N.ffn_*_exps.weight)",
            _ => "no per-expert counts: it was converted from the old format, which does not have them; make it again",
        };
        return Err(ImportError::empty(path, what));
    }
    finish(path, &file, layers, options, sink)
}

fn finish(
    path: &Path,
    file: &Gguf,
    layers: BTreeMap<u16, (String, Vec<u64>)>,
    options: &Options,
    sink: &mut Sink,
) -> Result<(), ImportError> {
    let wrong = |reason: String| ImportError::input(path, reason);
    let experts = layers.values().map(|(_, counts)| counts.len()).max().unwrap_or(0);
    if experts > crate::trace::expert_set::MAX_EXPERTS || layers.values().any(|(_, counts)| counts.len() != experts) {
        return Err(wrong(format!(
            "layers of up to {experts} experts, which differ or are more than {}",
            crate::trace::expert_set::MAX_EXPERTS
        )));
    }
    if let Some(known) = options.known_experts().filter(|&e| usize::from(e) != experts) {
        return Err(wrong(format!("{experts} experts, --experts or the model's configuration says {known}")));
    }
    if layers.values().all(|(_, counts)| counts.iter().all(|&n| n == 0)) {
        return Err(ImportError::empty(path, "all counts are 0: nothing was recorded"));
    }
    let never: Vec<String> = layers
        .iter()
        .flat_map(|(layer, (_, counts))| counts.iter().enumerate().filter(|(_, n)| **n == 0).map(move |(e, _)| format!("{layer}/{e}")))
        .collect();
    if !never.is_empty() {
        let shown = never.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
        let more = if never.len() > 8 { ", ..." } else { "" };
        sink.warn("never_routed", format!("{} experts were never routed to (layer/expert {shown}{more})", never.len()));
    }
    // Chunks of tokens times k is what a layer's counts sum up to: that gives k, when the file says both.
    let number = |key: &str| match file.values.get(key) {
        Some(Value::Unsigned(n)) => Some(*n),
        _ => None,
    };
    let tokens =
        number("imatrix.chunk_count").zip(number("imatrix.chunk_size")).and_then(|(n, size)| n.checked_mul(size)).filter(|&n| n > 0);
    let sums: Option<Vec<u64>> = layers.values().map(|(_, counts)| counts.iter().try_fold(0u64, |sum, &n| sum.checked_add(n))).collect();
    let found = tokens.zip(sums).and_then(|(tokens, sums)| k_of(tokens, &sums)).filter(|&k| usize::from(k) <= experts);
    sink.begin_counts(path, "llama.cpp", options.k_of(found).map_err(wrong)?)?;
    if let Some(facts) = sink.facts_mut() {
        facts.id_space = crate::trace::manifest::IdSpace::Logical;
    }
    for (layer, (_, counts)) in layers {
        sink.counts(path, layer, &counts)?;
    }
    Ok(())
}

/// k of layers whose counts have these sums, over so many tokens: at least one layer has all of its choices, and none that lacks some
/// could be of another k.
fn k_of(tokens: u64, sums: &[u64]) -> Option<u16> {
    let most = *sums.iter().max()?;
    let whole = most > 0 && most.is_multiple_of(tokens) && sums.iter().all(|sum| sum.div_ceil(tokens) == most / tokens);
    u16::try_from(most / tokens).ok().filter(|_| whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_experts_weights_are_layers() {
        assert_eq!(layer_of("blk.12.ffn_down_exps.weight.counts"), Some(12));
        assert_eq!(layer_of("blk.12.ffn_gate_up_exps.weight.counts"), Some(12));
        for other in [
            "blk.12.ffn_down_shexp.weight.counts",
            "blk.1.attn_q.weight.counts",
            "blk.x.ffn_up_exps.weight.counts",
            "blk.1.ffn_up_exps.weight.in_sum2",
        ] {
            assert_eq!(layer_of(other), None, "{other}");
        }
    }

    #[test]
    fn sums_of_counts_give_k() {
        assert_eq!(k_of(512, &[1024, 1024]), Some(2));
        // A few choices of one layer are missing.
        assert_eq!(k_of(512, &[992, 1024]), Some(2));
        for other in [&[992, 992][..], &[500, 1024], &[1024, 1025], &[0], &[]] {
            assert_eq!(k_of(512, other), None, "{other:?}");
        }
    }

    #[test]
    fn the_old_format_is_known_by_its_first_entry() {
        let mut old = 7u32.to_le_bytes().to_vec();
        old.extend(19u32.to_le_bytes());
        old.extend(b"blk.0.attn_q.weight");
        assert!(is_legacy(&old));
        assert!(!is_legacy(&old[..20]) && !is_legacy(b"GGUF") && !is_legacy(&[0; 64]));
    }
}
