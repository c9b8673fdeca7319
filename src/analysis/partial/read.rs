//! A partial's file back to its state. Nothing in it is taken on trust: what is not of the model, the steps or the requests that it names
//! is refused, and so are numbers that no trace comes to.

use super::entries::{COVERAGE, COVERAGE_FRACTION, DRAFT, LISTS, ONE, PREFILL, RequestText, SCALARS, TARGET};
use super::operations::{Operation, Operations};
use super::{Partial, check, pass_entries, tree_entries};
use crate::analysis::batch::{self, PassUnions};
use crate::analysis::counts::{LoadCounts, RequestSums};
use crate::analysis::pass::{Irregular, PassCounts, Plan, WindowUnion};
use crate::analysis::passes::Passes;
use crate::analysis::steps::{StepRow, StepTable};
use crate::analysis::trees::{Shape, Trees};
use crate::analysis::{AnalysisError, StepTime};
use crate::trace::manifest::WindowCompleteness;
use crate::trace::partial_file::{Entry, EntryKind, PartialFile};
use crate::trace::{Component, Phase, RequestEvent};
use std::collections::BTreeMap;
use std::path::Path;

/// No count of a trace is as large: sums over the layers of a thousand traces of it are numbers still.
const MAX_COUNT: i64 = 1 << 38;

impl Partial {
    /// Reads a partial report.
    ///
    /// # Errors
    /// When it cannot be read, is none, or contradicts itself.
    pub fn read(path: &Path) -> Result<Self, AnalysisError> {
        let file = PartialFile::open(path)?;
        let mut tables = Tables::default();
        file.each(|entry| tables.take(entry))?;
        let Tables { steps, times, draft_probs, trees, passes, requests, identities, without_pairs } = tables;
        let mut partial = Self {
            origin: path.display().to_string(),
            fingerprint: file.fingerprint(),
            name: file.name().to_owned(),
            manifest: file.manifest().clone(),
            steps,
            times,
            draft_probs,
            trees: Trees::default(),
            passes: Vec::new(),
            pass_unions: PassUnions::default(),
            requests,
            identities,
            counts: PassCounts::default(),
            without_pairs,
            operations: Operations::default(),
        };
        let wrong = |reason: String| AnalysisError::Partial { origin: path.display().to_string(), reason };
        partial.trees = trees_of(&partial.steps, trees).map_err(wrong)?;
        partial.passes = passes_of(&partial.steps, &passes).map_err(wrong)?;
        let table = partial.table()?;
        let plan = partial.plan(&table)?;
        let shared = batch::passes_of_part(&partial.manifest, &table, &partial.passes)?.unwrap_or_default();
        let mut reader = Reader {
            plan: &plan,
            passes: &shared,
            pass_unions: PassUnions::default(),
            table: &table,
            counts: PassCounts::new(plan.layers.len()),
            operations: Operations::new(&plan.layers),
            hint: 0,
        };
        file.each(|entry| reader.take(entry))?;
        let (mut counts, operations, pass_unions) = (reader.counts, reader.operations, reader.pass_unions);
        counts.sort();
        let without_loads = partial.manifest.window_completeness == WindowCompleteness::Counts;
        check::counts(&counts, &plan, without_loads).map_err(wrong)?;
        pass_entries::check(&pass_unions, &shared, plan.k, plan.experts).map_err(wrong)?;
        (partial.counts, partial.operations, partial.pass_unions) = (counts, operations, pass_unions);
        Ok(partial)
    }
}

/// What does not need the model: steps and requests.
#[derive(Default)]
struct Tables {
    steps: Vec<StepRow>,
    times: Vec<StepTime>,
    draft_probs: Vec<Option<Vec<f32>>>,
    /// Parents and path by step.
    trees: BTreeMap<u32, (Vec<i16>, Option<Vec<u16>>)>,
    /// Numbers of passes by step.
    passes: BTreeMap<u32, u32>,
    requests: Vec<RequestEvent>,
    identities: BTreeMap<u32, crate::metric::report::RequestIdentity>,
    without_pairs: Vec<u16>,
}

/// Numbers of a type, or which is none of it.
fn all<T: TryFrom<i64>>(values: &[i64]) -> Result<Vec<T>, String> {
    values.iter().map(|&n| T::try_from(n).map_err(|_| format!("{n} is out of range"))).collect()
}

fn one<T: TryFrom<i64>>(value: i64) -> Result<T, String> {
    T::try_from(value).map_err(|_| format!("{value} is out of range"))
}

/// Counts: not negative, and not larger than any trace's.
fn counts(values: &[i64]) -> Result<Vec<u64>, String> {
    match values.iter().find(|n| !(0..=MAX_COUNT).contains(*n)) {
        Some(n) => Err(format!("{n} is no count")),
        None => all(values),
    }
}

impl Tables {
    fn take(&mut self, entry: Entry) -> Result<(), String> {
        let step_id = || entry.step_id.ok_or("it has no step_id");
        match entry.kind {
            EntryKind::WithoutPairs => {
                self.without_pairs = all(&entry.values)?;
                self.without_pairs.sort_unstable();
            }
            EntryKind::Request => {
                let id = entry.request_id.ok_or("it has no request_id")?;
                let text: RequestText = serde_json::from_str(&entry.name).map_err(|e| e.to_string())?;
                if self.requests.last().is_some_and(|before| before.request_id >= id) {
                    return Err(format!("request {id} is out of order"));
                }
                self.requests.extend(text.event.map(|event| event.event(id)));
                self.identities.extend(text.identity.map(|identity| (id, identity)));
            }
            EntryKind::Step => {
                let phase = Phase::parse(&entry.name).ok_or("its phase is none")?;
                let (accepted, emitted, context_len, step_ns, target_ns, device_ns) = match entry.values[..] {
                    [a, e, c, step, target] => (a, e, c, step, target, None),
                    [a, e, c, step, target, device] => (a, e, c, step, target, Some(device)),
                    _ => return Err(format!("it has {} numbers, not 5 or 6", entry.values.len())),
                };
                let context_len = one(context_len)?;
                let step = StepRow {
                    step_id: step_id()?,
                    request_id: entry.request_id.ok_or("it has no request_id")?,
                    phase,
                    rows: entry.rows.ok_or("it has no rows")?,
                    accepted: one(accepted)?,
                    emitted: one(emitted)?,
                    context_len,
                };
                let time = StepTime { context_len, step_ns, target_ns, device_ns };
                check::step(&step, &time, entry.draft_probs.as_deref())?;
                self.steps.push(step);
                self.times.push(time);
                self.draft_probs.push(entry.draft_probs);
            }
            EntryKind::Tree if entry.name == tree_entries::PARENTS => {
                self.trees.entry(step_id()?).or_default().0 = all(&entry.values)?;
            }
            EntryKind::Tree if entry.name == tree_entries::PATH => {
                self.trees.entry(step_id()?).or_default().1 = Some(all(&entry.values)?);
            }
            EntryKind::Pass => {
                let [pass] = all(&entry.values)?[..] else { return Err("it is one number".into()) };
                self.passes.insert(step_id()?, pass);
            }
            // Of the model, or of a later minor version.
            _ => {}
        }
        Ok(())
    }
}

fn trees_of(steps: &[StepRow], shapes: BTreeMap<u32, (Vec<i16>, Option<Vec<u16>>)>) -> Result<Trees, String> {
    let mut trees = Trees::default();
    for (step_id, (parents, path)) in shapes {
        let wrong = |what: String| format!("the tree of step {step_id}: {what}");
        // An unordered table is refused by the step table; here the step is not found at worst.
        let at = steps.binary_search_by_key(&step_id, |s| s.step_id).map_err(|_| wrong("there is no such step".into()))?;
        let step = &steps[at];
        let shape = Shape::new(&parents).map_err(wrong)?;
        if shape.is_chain() || shape.rows() != usize::from(step.rows) || step.accepted > shape.deepest() {
            return Err(wrong("it does not fit its step".into()));
        }
        let shape = match path {
            Some(path) => shape.along(&path).map_err(wrong)?,
            None => shape,
        };
        trees.put(at, shape);
    }
    Ok(trees)
}

fn passes_of(steps: &[StepRow], numbers: &BTreeMap<u32, u32>) -> Result<Vec<Option<u32>>, String> {
    let mut passes = vec![None; steps.len()];
    for (step_id, pass) in numbers {
        let at =
            steps.binary_search_by_key(step_id, |s| s.step_id).map_err(|_| format!("the pass of step {step_id}: there is no such step"))?;
        passes[at] = Some(*pass);
    }
    Ok(passes)
}

/// Takes in what is of the model.
struct Reader<'a> {
    plan: &'a Plan<'a>,
    passes: &'a Passes,
    pass_unions: PassUnions,
    table: &'a StepTable,
    counts: PassCounts,
    operations: Operations,
    /// Where the step of the last entry is.
    hint: usize,
}

impl Reader<'_> {
    fn take(&mut self, entry: Entry) -> Result<(), String> {
        match entry.kind {
            EntryKind::Added => self.added(&entry),
            EntryKind::Kept => {
                let at = self.step(&entry)?;
                let [kept] = counts(&entry.values)?[..] else { return Err("it is one number".into()) };
                self.counts.paths.insert(at, kept);
                Ok(())
            }
            EntryKind::Window => self.window(&entry),
            EntryKind::Load => self.load(&entry),
            EntryKind::Sums => self.sums(&entry),
            EntryKind::Unions => self.unions(&entry),
            EntryKind::Operations => self.operations(&entry),
            EntryKind::LeftOut => {
                let [windows, step, layer, found, expected] = counts(&entry.values)?[..] else { return Err("it is five numbers".into()) };
                let step = u32::try_from(step).map_err(|_| format!("there is no step {step}"))?;
                let layer = u16::try_from(layer).map_err(|_| format!("there is no layer {layer}"))?;
                self.counts.irregular = Irregular { windows, first: Some((step, layer, found as usize, expected as usize)) };
                Ok(())
            }
            EntryKind::PassUnions => self.pass_unions(&entry),
            EntryKind::Request | EntryKind::Step | EntryKind::Tree | EntryKind::Pass | EntryKind::WithoutPairs => Ok(()),
        }
    }

    /// Index of the entry's step.
    fn step(&mut self, entry: &Entry) -> Result<u32, String> {
        let id = entry.step_id.ok_or("it has no step_id")?;
        self.hint = self.table.find(id, self.hint).ok_or_else(|| format!("there is no step {id}"))?;
        u32::try_from(self.hint).map_err(|e| e.to_string())
    }

    fn pass_unions(&mut self, entry: &Entry) -> Result<(), String> {
        let mut unions = std::mem::take(&mut self.pass_unions);
        let (values, slot) = (counts(&entry.values)?, self.slot(entry));
        let taken = pass_entries::take(&mut unions, self.passes, &entry.name, &values, || self.step(entry), || slot);
        self.pass_unions = unions;
        taken
    }

    fn slot(&self, entry: &Entry) -> Result<usize, String> {
        let layer = entry.layer.ok_or("it has no layer")?;
        self.plan.slot(layer).ok_or_else(|| format!("layer {layer} is no routed layer of the target"))
    }

    fn added(&mut self, entry: &Entry) -> Result<(), String> {
        let at = self.step(entry)?;
        let values: Vec<u32> = all(&entry.values)?;
        let Some((&layers, added)) = values.split_first().filter(|(_, added)| !added.is_empty()) else {
            return Err("it is a number of layers and one of each row".into());
        };
        if added.len() > usize::from(u16::MAX) || layers as usize > self.plan.layers.len() {
            return Err(format!("{} rows in {layers} layers", added.len()));
        }
        self.counts.steps.push(at, layers, added);
        Ok(())
    }

    fn window(&mut self, entry: &Entry) -> Result<(), String> {
        let slot = self.slot(entry)?;
        let rows = entry.rows.map(usize::from).filter(|&rows| rows > 0).ok_or("it has no rows")?;
        let (k, plan) = (self.plan.k, self.plan);
        let group = self.counts.group(rows);
        if self.counts.groups[group].1[slot].is_none() {
            let new = plan.limits.window_counts(plan, rows);
            self.counts.cells += new.cells();
            plan.limits.check(&self.counts).map_err(|e| e.to_string())?;
            self.counts.groups[group].1[slot] = Some(new);
        }
        let Some(window) = self.counts.groups[group].1[slot].as_mut() else { return Ok(()) };
        let name = entry.name.as_str();
        if name == COVERAGE || name == COVERAGE_FRACTION {
            let fraction = name == COVERAGE_FRACTION;
            let values: Vec<u64> = if fraction { all(&entry.values)? } else { counts(&entry.values)? };
            if values.len() > rows * k || (fraction && values.iter().any(|&n| u128::from(n) >= ONE)) {
                return Err(format!("no coverage of windows of {rows} rows of {k} experts"));
            }
            window.coverage.resize(window.coverage.len().max(values.len()), 0);
            let unit = if fraction { 1 } else { ONE };
            window.coverage.iter_mut().zip(values).for_each(|(sum, n)| *sum += u128::from(n) * unit);
            return Ok(());
        }
        let values = counts(&entry.values)?;
        if name.starts_with(tree_entries::PREFIX) {
            return tree_entries::take(window.trees.get_or_insert_default(), name, values, (rows, k));
        }
        if let Some((_, of)) = SCALARS.iter().find(|(known, _)| *known == name) {
            let [value] = values[..] else { return Err(format!("`{name}` is one number")) };
            *of(window) = value;
        } else if let Some((_, of)) = LISTS.iter().find(|(known, _)| *known == name) {
            let list = of(window);
            if values.len() != list.len() {
                return Err(format!("`{name}` has {} numbers, not {}", values.len(), list.len()));
            }
            *list = values;
        }
        Ok(())
    }

    fn load(&mut self, entry: &Entry) -> Result<(), String> {
        let values = counts(&entry.values)?;
        let Some((&rows, by_expert)) = values.split_first() else { return Err("it has no numbers".into()) };
        if by_expert.len() > self.plan.experts {
            return Err(format!("{} experts of {}", by_expert.len(), self.plan.experts));
        }
        let load = LoadCounts { rows, by_expert: by_expert.to_vec() };
        let layer = entry.layer.ok_or("it has no layer")?;
        match entry.name.as_str() {
            TARGET => {
                let slot = self.slot(entry)?;
                self.counts.load[slot] = load;
            }
            DRAFT if self.plan.draft_layers.contains(&layer) => drop(self.counts.draft.insert(layer, load)),
            DRAFT => return Err(format!("layer {layer} is no routed layer of the drafter")),
            PREFILL => {
                self.slot(entry)?;
                self.counts.prefill.insert(layer, load);
            }
            other => return Err(format!("there are no loads of `{}`", other.escape_debug())),
        }
        Ok(())
    }

    fn sums(&mut self, entry: &Entry) -> Result<(), String> {
        let id = entry.request_id.ok_or("it has no request_id")?;
        let at = self.table.requests.binary_search_by_key(&id, |r| r.request_id).map_err(|_| format!("request {id} has no step"))?;
        let rows = usize::from(entry.rows.ok_or("it has no rows")?);
        let values = counts(&entry.values)?;
        if values.len() != 3 * self.plan.layers.len() {
            return Err(format!("{} numbers, three a routed layer are {}", values.len(), 3 * self.plan.layers.len()));
        }
        let at = self.counts.sums((u32::try_from(at).map_err(|e| e.to_string())?, rows));
        for (sums, values) in self.counts.sums[at].1.iter_mut().zip(values.chunks_exact(3)) {
            *sums = RequestSums { windows: values[0], union: values[1], wasted: values[2] };
        }
        Ok(())
    }

    fn unions(&mut self, entry: &Entry) -> Result<(), String> {
        let at = self.step(entry)?;
        if entry.values.len() != self.plan.layers.len() {
            return Err(format!("{} numbers of {} routed layers", entry.values.len(), self.plan.layers.len()));
        }
        for (slot, &union) in (0u16..).zip(&entry.values).filter(|(_, union)| **union >= 0) {
            let union = u16::try_from(union).ok().filter(|&u| usize::from(u) <= self.plan.experts);
            self.counts.unions.push(WindowUnion { at, slot, union: union.ok_or("a union of more experts than there are")? });
        }
        Ok(())
    }

    fn operations(&mut self, entry: &Entry) -> Result<(), String> {
        self.step(entry)?;
        let component = Component::parse(&entry.name).ok_or("its component is none")?;
        let ns: Vec<u64> = all(&entry.values)?;
        if ns.len() != self.operations.places() {
            return Err(format!("{} numbers, of the routed layers and outside them are {}", ns.len(), self.operations.places()));
        }
        if let Some(step_id) = entry.step_id {
            self.operations.push(Operation { step_id, component, ns: &ns });
        }
        Ok(())
    }
}
