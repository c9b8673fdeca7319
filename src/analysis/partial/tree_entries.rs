//! Windows that are trees, and what is counted of them, as entries.

use super::entries::{List, Scalar, number, numbers};
use crate::analysis::counts::WindowCounts;
use crate::analysis::overlap::pairs;
use crate::analysis::steps::StepRow;
use crate::analysis::tree_counts::{DepthSums, TreeCounts};
use crate::analysis::trees::Trees;
use crate::trace::partial_file::{Entry, EntryKind};

/// Names of a tree's entries.
pub(super) const PARENTS: &str = "parents";
pub(super) const PATH: &str = "path";
/// What names of counts over trees begin with.
pub(super) const PREFIX: &str = "trees.";

const SCALARS: [Scalar<TreeCounts>; 2] = [("trees.windows", |t| &mut t.windows), ("trees.unknown", |t| &mut t.unknown)];
const LISTS: [List<TreeCounts>; 3] =
    [("trees.marginal", |t| &mut t.marginal), ("trees.by_rows", |t| &mut t.by_rows), ("trees.by_ancestors", |t| &mut t.by_ancestors)];
const DEPTHS: [Scalar<DepthSums>; 4] = [
    ("trees.depth_windows", |d| &mut d.windows),
    ("trees.depth_rows", |d| &mut d.rows),
    ("trees.depth_union", |d| &mut d.union),
    ("trees.depth_added", |d| &mut d.added),
];

/// The shapes of the windows that are trees.
pub(super) fn shapes<'a>(trees: &'a Trees, steps: &'a [StepRow]) -> impl Iterator<Item = Entry> + 'a {
    trees.iter().flat_map(|(at, shape)| {
        let step_id = steps.get(at).map(|step| step.step_id);
        let entry = move |name: &str, values| Entry { step_id, ..Entry::new(EntryKind::Tree, name, values) };
        let parents = entry(PARENTS, shape.parents().iter().map(|&parent| i64::from(parent)).collect());
        let path = shape.path().map(|path| entry(PATH, path.iter().map(|&row| i64::from(row)).collect()));
        std::iter::once(parents).chain(path)
    })
}

/// What is counted of trees.
pub(super) fn counts(trees: &mut TreeCounts) -> Vec<(&'static str, Vec<i64>)> {
    let mut entries: Vec<(&'static str, Vec<i64>)> = Vec::new();
    entries.extend(SCALARS.map(|(name, of)| (name, vec![number(*of(trees))])));
    entries.extend(LISTS.map(|(name, of)| (name, numbers(of(trees)))));
    entries.extend(DEPTHS.map(|(name, of)| (name, trees.depths.iter_mut().map(|d| number(*of(d))).collect())));
    entries
}

/// Takes an entry of that name into the counts of windows of `rows` rows of `k` experts.
pub(super) fn take(trees: &mut TreeCounts, name: &str, values: Vec<u64>, (rows, k): (usize, usize)) -> Result<(), String> {
    if let Some((_, of)) = SCALARS.iter().find(|(known, _)| *known == name) {
        let [value] = values[..] else { return Err(format!("`{name}` is one number")) };
        *of(trees) = value;
    } else if let Some((_, of)) = LISTS.iter().find(|(known, _)| *known == name) {
        let most = if name == LISTS[0].0 { rows } else { rows * (k + 1) };
        if values.len() != most && !values.is_empty() {
            return Err(format!("`{name}` has {} numbers, not {most}", values.len()));
        }
        *of(trees) = values;
    } else if let Some((_, of)) = DEPTHS.iter().find(|(known, _)| *known == name) {
        if values.len() > rows {
            return Err(format!("`{name}` has {} depths of {rows} rows", values.len()));
        }
        trees.depths.resize(trees.depths.len().max(values.len()), DepthSums::default());
        trees.depths.iter_mut().zip(values).for_each(|(depth, value)| *of(depth) = value);
    }
    // Names that this build does not know are of a later minor version.
    Ok(())
}

/// Whether all windows have at least what the trees among them have: what chains have is the difference.
pub(super) fn is_part(counts: &WindowCounts) -> bool {
    let Some(trees) = &counts.trees else { return true };
    let cells = counts.k + 1;
    let at_distance = |d: usize| {
        let pairs_of = (0..counts.rows - d).map(|i| counts.pair(i, i + d));
        let mut sum = vec![0u64; cells];
        pairs_of.for_each(|pair| crate::analysis::counts::add(&mut sum, pair));
        sum
    };
    let pairs_fit = if counts.pair_hist.len() == pairs(counts.rows) * cells && !trees.by_rows.is_empty() {
        let fits = |d: usize| {
            let trees = trees.by_rows.get(d * cells..(d + 1) * cells).unwrap_or_default();
            trees.iter().zip(at_distance(d)).all(|(tree, all)| *tree <= all)
        };
        (1..counts.rows).all(fits)
    } else {
        true
    };
    let depths = trees.depths.iter().all(|d| d.windows <= trees.windows);
    let marginal = trees.marginal.iter().zip(&counts.marginal).all(|(tree, all)| tree <= all);
    trees.windows <= counts.windows && trees.unknown <= trees.windows && depths && marginal && pairs_fit
}
