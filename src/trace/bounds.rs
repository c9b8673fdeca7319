//! What a trace may claim to hold, measured by the bytes that it has.
//!
//! Run lengths, dictionaries and compression let a small file stand for any amount of data. Everything that is kept in
//! memory, and every loop, is bounded here by the size of the files: by a free amount that every trace may have, and by
//! so much for each byte, several times what real recordings need.

use super::manifest::{Manifest, WindowCompleteness};
use super::part_file::{PartHandle, corrupt};
use super::{TraceError, schema};
use std::collections::BTreeMap;
use std::path::Path;

/// Most layers of a model, and most routed layers of a drafter.
pub const MAX_LAYERS: u16 = 4096;
/// Most routed experts of a layer.
pub const MAX_LAYER_EXPERTS: u16 = 4096;
/// Most experts over all routed layers; counts are kept for each of them.
const MAX_MODEL_EXPERTS: usize = 1 << 20;
/// Most part files over all tables.
const MAX_PARTS: usize = 16_384;
/// Longest path of a part, in bytes.
pub(super) const MAX_PART_PATH: usize = 4096;

/// A free amount, and how much more for each byte.
#[derive(Debug, Clone, Copy)]
struct Bound {
    free: u64,
    per_byte: f64,
}

impl Bound {
    fn of(self, bytes: u64) -> u64 {
        self.free.saturating_add((bytes as f64 * self.per_byte) as u64)
    }
}

/// Rows of a table other than `routes`: the tokens of a real step alone take more than eight bytes.
const ROWS: Bound = Bound { free: 1 << 20, per_byte: 0.125 };
/// Rows of `kernels`, whose repeated shapes and near times make small rows, and of partial reports, many of whose rows are one small number.
const KERNEL_ROWS: Bound = Bound { free: 1 << 20, per_byte: 1.0 };
/// Numbers in the lists of one column that every table may have.
pub const FREE_LIST_VALUES: u64 = 8 << 20;
/// Numbers in the lists of one column.
const LIST_VALUES: Bound = Bound { free: FREE_LIST_VALUES, per_byte: 2.0 };
/// Bytes of text in a table.
const TEXT: Bound = Bound { free: 64 << 20, per_byte: 32.0 };
/// Expert ids of `routes`; a real one takes about a byte.
const IDS: Bound = Bound { free: 64 << 20, per_byte: 32.0 };
/// Bytes of the pages that are decoded at one time, one of each column.
const PAGES: Bound = Bound { free: 64 << 20, per_byte: 8.0 };
/// Rows of `routes` with fewer experts than this cost as much as if they had them.
const LEAST_K: u64 = 8;

/// What is left to be read of a table other than `routes`.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes of text.
    pub(super) text: u64,
    list_values: u64,
    used: BTreeMap<String, u64>,
}

impl Budget {
    /// The budget of a table of these parts.
    ///
    /// # Errors
    /// When they have more rows than their bytes allow.
    pub(super) fn new(table: &'static str, parts: &[PartHandle]) -> Result<Self, TraceError> {
        let bytes = total_bytes(parts);
        let most = if matches!(table, schema::KERNELS | schema::PARTIAL) { KERNEL_ROWS } else { ROWS }.of(bytes);
        let mut rows = 0u64;
        for part in parts {
            rows = rows.saturating_add(part.rows());
            if rows > most {
                return Err(part.corrupt(format!("table {table}: {rows} rows in {bytes} bytes")));
            }
        }
        Ok(Self { text: TEXT.of(bytes), list_values: LIST_VALUES.of(bytes), used: BTreeMap::new() })
    }

    /// The same with as many numbers in lists as files of `bytes` may have.
    pub(super) fn with_lists_of(mut self, bytes: u64) -> Self {
        self.list_values = LIST_VALUES.of(bytes);
        self
    }

    /// Takes numbers of a list column; says whether they were still within the budget.
    pub(super) fn take_list_values(&mut self, column: &str, values: u64) -> bool {
        let used = self.used.entry(column.to_owned()).or_default();
        *used = used.saturating_add(values);
        *used <= self.list_values
    }
}

/// Bytes of all parts of a table.
pub(super) fn total_bytes(parts: &[PartHandle]) -> u64 {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes))
}

/// Checks that the parts of `routes` have no more rows of k ids than their bytes allow.
pub(super) fn check_routes(parts: &[PartHandle], k: usize) -> Result<(), TraceError> {
    let bytes = total_bytes(parts);
    let mut rows = 0u64;
    for part in parts {
        rows = rows.saturating_add(part.rows());
        if rows.saturating_mul(LEAST_K.max(k as u64)) > IDS.of(bytes) {
            return Err(part.corrupt(format!("table {}: {rows} rows of {k} experts in {bytes} bytes", schema::ROUTES)));
        }
    }
    Ok(())
}

/// Most bytes of the pages of a part that are decoded at one time.
pub(super) fn page_bytes(part_bytes: u64) -> u64 {
    PAGES.of(part_bytes)
}

/// Checks the numbers of a manifest that others are computed from or allocated by.
pub(super) fn check_manifest(path: &Path, manifest: &Manifest) -> Result<(), TraceError> {
    manifest_fault(manifest).map_or(Ok(()), |fault| Err(corrupt(path, fault)))
}

/// The first number of a manifest that no reader of this build accepts, as `key: what is wrong`.
pub fn manifest_fault(manifest: &Manifest) -> Option<String> {
    let model = &manifest.model;
    let wrong = |key: &str, what: String| Some(format!("{key}: {what}"));
    if model.layers > MAX_LAYERS {
        return wrong("model.layers", format!("{} layers, at most {MAX_LAYERS} are read", model.layers));
    }
    for (key, layers) in [("model.moe_layers", &model.moe_layers), ("model.draft_layers", &model.draft_layers)] {
        if let Some(pair) = layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return wrong(key, format!("{} after {}; each layer comes once, in ascending order", pair[1], pair[0]));
        }
        if layers.len() > usize::from(MAX_LAYERS) {
            return wrong(key, format!("{} layers, at most {MAX_LAYERS} are read", layers.len()));
        }
    }
    if let Some(&last) = model.moe_layers.last().filter(|&&last| last >= model.layers) {
        return wrong("model.moe_layers", format!("layer {last} of a model of {} layers", model.layers));
    }
    let (k, experts) = (model.experts_per_token, model.experts);
    if experts > MAX_LAYER_EXPERTS {
        return wrong("model.experts", format!("{experts} experts, at most {MAX_LAYER_EXPERTS} are read"));
    }
    // Where there are no routes, the number of experts per token may be unknown.
    let routed = !(model.moe_layers.is_empty() && model.draft_layers.is_empty())
        && matches!(manifest.window_completeness, WindowCompleteness::Full | WindowCompleteness::AcceptedOnly);
    if k > experts || (routed && k == 0) {
        return wrong("model.experts_per_token", format!("{k} experts per token of {experts}"));
    }
    let cells = (model.moe_layers.len() + model.draft_layers.len()) * usize::from(experts);
    if cells > MAX_MODEL_EXPERTS {
        return wrong("model.experts", format!("{cells} experts over all layers, at most {MAX_MODEL_EXPERTS} are read"));
    }
    let parts: usize = manifest.tables.values().map(Vec::len).sum();
    if parts > MAX_PARTS {
        return wrong("tables", format!("{parts} part files, at most {MAX_PARTS} are read"));
    }
    for (layer, by_expert) in manifest.expert_counts.iter().flatten() {
        if model.moe_layers.binary_search(layer).is_err() {
            return wrong("expert_counts", format!("layer {layer} is none of moe_layers"));
        }
        if by_expert.len() > usize::from(experts) {
            return wrong("expert_counts", format!("{} experts in layer {layer}, the model has {experts}", by_expert.len()));
        }
    }
    None
}
