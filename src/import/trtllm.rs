//! TensorRT-LLM's expert statistics: counts by iteration and layer, or the chosen experts themselves (`*_raw`).
//!
//! A directory with `meta_info.json` and `rankR.safetensors`, keys `ITERATION_LAYER`. Each rank counts its own rows: counts are summed
//! over ranks, unless two ranks have the very same, as those that share all rows do. Writer: `tensorrt_llm/_torch/expert_statistic.py`.

use super::events::{self, Source};
use super::npy::Dtype;
use super::rows::{self, IdArray, Survey};
use super::safetensors_file::{Entry, TensorFile};
use super::{Flag, Head, ImportError, Importer, Options, Sink, flags};
use crate::trace::manifest::{IdSpace, WindowCompleteness};
use crate::trace::{FinishReason, Phase, StepRoutes};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the file beside those of the ranks.
const META: &str = "meta_info.json";
const MAX_META: u64 = 1 << 20;

/// Expert statistics.
pub struct TrtLlm;

impl Importer for TrtLlm {
    fn name(&self) -> &'static str {
        "trtllm"
    }

    fn about(&self) -> &'static str {
        "TensorRT-LLM expert statistics (EXPERT_STATISTIC_PATH): a directory, or its rankR.safetensors"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::ITERATIONS
    }

    fn sniff(&self, head: &Head) -> bool {
        if head.directory {
            return head.path.join(META).is_file();
        }
        let rank = head.path.file_name().is_some_and(|name| rank_of(&name.to_string_lossy()).is_some());
        rank && head.bytes.get(8) == Some(&b'{')
            || head.first() == Some(b'{') && head.has_key("num_experts_per_token") && head.has_key("num_experts")
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        let mut files: Vec<PathBuf> = Vec::new();
        for input in inputs {
            if input.is_dir() {
                files.extend(listed(input)?);
            } else if input.extension().is_some_and(|e| e == "json") {
                files.extend(listed(input.parent().unwrap_or(Path::new(".")))?);
            } else {
                files.push(input.clone());
            }
        }
        let [first, ..] = files.as_slice() else { return Ok(()) };
        let meta = Meta::beside(first)?;
        let mut counted = BTreeSet::new();
        for path in &files {
            let file = TensorFile::open(path).map_err(|e| ImportError::input(path, e))?;
            let keys = keys(path, &file)?;
            let counts = keys.values().all(|entry| entry.shape.len() == 1);
            // Directories may hold both: routes are more than counts.
            if counts
                && files.iter().any(|p| p.to_string_lossy().ends_with("_raw.safetensors"))
                && !path.to_string_lossy().ends_with("_raw.safetensors")
            {
                continue;
            }
            if counts {
                add_counts(path, file, keys, &meta, &mut counted, options, sink)?
            } else {
                add_routes(path, file, &keys, &meta, options, sink)?
            }
        }
        if !sink.has_begun() {
            return Err(ImportError::empty(first, "all counts are 0: nothing was recorded"));
        }
        Ok(())
    }
}

/// The rank of `rank3.safetensors` or `rank3_raw.safetensors`.
fn rank_of(name: &str) -> Option<u32> {
    let stem = name.strip_prefix("rank")?.strip_suffix(".safetensors")?;
    stem.strip_suffix("_raw").unwrap_or(stem).parse().ok()
}

/// The ranks' files of a directory, by rank.
fn listed(directory: &Path) -> Result<Vec<PathBuf>, ImportError> {
    let io = ImportError::io(directory);
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(&io)? {
        let name = entry.map_err(&io)?.file_name();
        if let Some(rank) = rank_of(&name.to_string_lossy()) {
            found.push((name.to_string_lossy().ends_with("_raw.safetensors"), rank, directory.join(&name)));
        }
    }
    found.sort();
    if found.is_empty() {
        return Err(ImportError::empty(directory, "no rankR.safetensors in it: set EXPERT_STATISTIC_ITER_RANGE and EXPERT_STATISTIC_PATH"));
    }
    Ok(found.into_iter().map(|(.., path)| path).collect())
}

/// `meta_info.json`, when it is there.
#[derive(Default, Deserialize)]
struct Meta {
    num_experts: Option<u16>,
    num_experts_per_token: Option<u16>,
}

impl Meta {
    fn beside(file: &Path) -> Result<Self, ImportError> {
        let path = file.with_file_name(META);
        let Ok(size) = path.metadata() else { return Ok(Self::default()) };
        if size.len() > MAX_META {
            return Err(ImportError::input(&path, "too large for what it should hold"));
        }
        let json = fs::read(&path).map_err(ImportError::io(&path))?;
        serde_json::from_slice(&json)
            .map_err(|e| ImportError::input(&path, format!("not JSON with num_experts and num_experts_per_token: {e}")))
    }
}

/// Tensors by iteration and layer.
fn keys(path: &Path, file: &TensorFile) -> Result<BTreeMap<(u64, u16), Entry>, ImportError> {
    let mut found = BTreeMap::new();
    for (name, entry) in file.tensors() {
        let numbers = name.split_once('_').and_then(|(iteration, layer)| Some((iteration.parse().ok()?, layer.parse().ok()?)));
        let key =
            numbers.ok_or_else(|| ImportError::input(path, format!("tensor `{}` is not named ITERATION_LAYER", name.escape_debug())))?;
        found.insert(key, entry.clone());
    }
    if found.is_empty() {
        return Err(ImportError::empty(path, "no iterations were recorded"));
    }
    Ok(found)
}

/// Adds one rank's counts. Ranks that share their rows have the same counts, which are of one run.
fn add_counts(
    path: &Path,
    mut file: TensorFile,
    keys: BTreeMap<(u64, u16), Entry>,
    meta: &Meta,
    counted: &mut BTreeSet<[u8; 32]>,
    options: &Options,
    sink: &mut Sink,
) -> Result<(), ImportError> {
    flags::check(path, "counts of experts", flags::NUMBERED_COUNTS, options)?;
    let wrong = |reason: String| ImportError::input(path, reason);
    let (mut sums, mut hash): (BTreeMap<u16, Vec<u64>>, Sha256) = (BTreeMap::new(), Sha256::new());
    let mut experts = options.experts_of(meta.num_experts).map_err(wrong)?.map(usize::from);
    let k = options.k_of(meta.num_experts_per_token).map_err(wrong)?;
    for ((iteration, layer), entry) in keys {
        let in_tensor = |reason: String| wrong(format!("tensor {iteration}_{layer}: {reason}"));
        let numbers = file.unsigned(&entry).map_err(in_tensor)?;
        let expected = *experts.get_or_insert(numbers.len());
        if numbers.len() != expected || numbers.len() > crate::trace::expert_set::MAX_EXPERTS {
            return Err(in_tensor(format!("{} counts for {expected} experts", numbers.len())));
        }
        hash.update(iteration.to_le_bytes());
        hash.update(layer.to_le_bytes());
        numbers.iter().for_each(|n| hash.update(n.to_le_bytes()));
        let sum = sums.entry(layer).or_insert_with(|| vec![0; numbers.len()]);
        for (expert, (sum, n)) in sum.iter_mut().zip(&numbers).enumerate() {
            let more = || in_tensor(format!("expert {expert}: the counts up to this iteration add up to more than 64 bits hold"));
            *sum = sum.checked_add(*n).ok_or_else(more)?;
        }
    }
    if !counted.insert(hash.finalize().into()) {
        sink.warn("ranks_alike", "ranks with the very same counts share their rows: they are counted once");
        return Ok(());
    }
    if sums.values().flatten().all(|&n| n == 0) {
        sink.warn("ranks_empty", format!("{}: all counts are 0", super::recorder::name_of(path)));
    } else {
        sink.begin_counts(path, "tensorrt-llm", k)?;
        if let Some(facts) = sink.facts_mut() {
            facts.id_space = IdSpace::Logical;
        }
        for (layer, numbers) in &sums {
            sink.counts(path, *layer, numbers)?;
        }
    }
    Ok(())
}

/// One rank's chosen experts: a step an iteration. Which requests the rows are of nobody recorded.
fn add_routes(
    path: &Path,
    mut file: TensorFile,
    keys: &BTreeMap<(u64, u16), Entry>,
    meta: &Meta,
    options: &Options,
    sink: &mut Sink,
) -> Result<(), ImportError> {
    let said = |e: String| ImportError::input(path, e);
    let experts = options.experts_of(meta.num_experts).map_err(said)?;
    let known_k = options.k_of(meta.num_experts_per_token).map_err(said)?;
    let request = sink.request_id();
    let mut iterations: Vec<u64> = keys.keys().map(|(iteration, _)| *iteration).collect();
    iterations.dedup();
    for iteration in iterations {
        let layers = keys.range((iteration, 0)..=(iteration, u16::MAX));
        let rows = layers.clone().filter_map(|(_, entry)| entry.shape.first().copied()).max().unwrap_or(0);
        let rows = usize::try_from(rows).ok().filter(|&n| n > 0 && n <= usize::from(u16::MAX));
        let rows =
            rows.ok_or_else(|| ImportError::input(path, format!("iteration {iteration} has no rows, or more than a pass can have")))?;
        let mut step = events::step(request, Phase::Prefill, events::unknown_tokens(rows));
        for (&(_, layer), entry) in layers {
            let wrong = |reason: String| ImportError::input(path, format!("tensor {iteration}_{layer}: {reason}"));
            let &[n, width] = entry.shape.as_slice() else { return Err(wrong(format!("the shape {:?}, not rows x experts", entry.shape))) };
            if n as usize != rows {
                return Err(wrong(format!("{n} rows, other layers of the iteration have {rows}")));
            }
            let width = usize::try_from(width).unwrap_or(usize::MAX);
            let ids = file.ids(entry).map_err(wrong)?;
            let array = IdArray::new(rows, 1, width, ids).map_err(wrong)?;
            let survey = Survey::of(&array, experts, options.keep_padding);
            survey.check(&array, experts, known_k).map_err(wrong)?;
            if !sink.has_begun() {
                if let Some(k) = known_k.filter(|&k| usize::from(k) > survey.k && survey.k > 0) {
                    return Err(wrong(format!(
                        "rows have at most {} experts, meta_info.json, --k or the configuration says {k}",
                        survey.k
                    )));
                }
                let source = Source {
                    engine: "tensorrt-llm".into(),
                    k: known_k.unwrap_or(u16::try_from(survey.k).unwrap_or(u16::MAX)),
                    window_completeness: WindowCompleteness::None,
                    id_space: IdSpace::Logical,
                    ..Source::default()
                };
                sink.begin(path, &source)?;
                if let (Some(experts), Some(facts)) = (experts, sink.facts_mut()) {
                    facts.model.experts = experts;
                    facts.model.experts_known = true;
                }
                sink.warn(
                    "passes_of_batches",
                    "a step is an iteration of a whole batch: which requests its rows are of, and which were drafts, nobody recorded; the rows of \
                     each rank's file stand as one request",
                );
            }
            let k = sink.facts_mut().map_or(0, |f| usize::from(f.model.experts_per_token));
            if step.routes.k == 0 {
                step.routes = StepRoutes::new(k);
            }
            rows::push(&mut step.routes, &array, &survey, 0..rows, &[layer], &[true], sink);
        }
        sink.step(step)?;
    }
    sink.end_request(request, super::recorder::name_of(path), 0, FinishReason::Unknown, "{}".into())
}

/// Types that statistics are stored in.
pub fn dtype(name: &str) -> Option<Dtype> {
    Some(match name {
        "U8" => Dtype::U8,
        "I8" => Dtype::I8,
        "U16" => Dtype::U16,
        "I16" => Dtype::I16,
        "U32" => Dtype::U32,
        "I32" => Dtype::I32,
        "U64" => Dtype::U64,
        "I64" => Dtype::I64,
        "F32" => Dtype::F32,
        "F64" => Dtype::F64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_from_names() {
        assert_eq!((rank_of("rank3.safetensors"), rank_of("rank12_raw.safetensors")), (Some(3), Some(12)));
        assert_eq!((rank_of("model.safetensors"), rank_of("rank.safetensors"), rank_of("rank1.json")), (None, None, None));
    }
}
