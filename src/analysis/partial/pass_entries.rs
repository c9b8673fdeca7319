//! Forward passes that requests share, as entries of a partial's file.

use super::entries::number;
use crate::analysis::AnalysisError;
use crate::analysis::batch::{PassUnions, Sums};
use crate::analysis::pass::PassCounts;
use crate::analysis::passes::{Pass, Passes};
use crate::analysis::steps::{StepRow, StepTable};
use crate::trace::partial_file::{Entry, EntryKind};

/// Sums of one group of requests in one layer.
const GROUP: &str = "group";
/// Sums of all passes of so many requests.
const REQUESTS: &str = "requests";

fn values(sums: &Sums) -> Vec<i64> {
    [sums.passes, sums.steps, sums.by_step, sums.by_pass].map(number).to_vec()
}

/// The numbers of the steps' passes.
pub(super) fn numbers<'a>(steps: &'a [StepRow], passes: &'a [Option<u32>]) -> impl Iterator<Item = Entry> + 'a {
    steps.iter().zip(passes).filter_map(|(step, pass)| {
        Some(Entry { step_id: Some(step.step_id), ..Entry::new(EntryKind::Pass, "", vec![i64::from((*pass)?)]) })
    })
}

/// The unions; a group is known by its first step in `firsts`.
pub(super) fn unions(unions: &PassUnions, firsts: &[usize], steps: &[StepRow], layers: &[u16]) -> Vec<Entry> {
    let step_of = |group: u32| firsts.get(group as usize).and_then(|&at| steps.get(at)).map(|step| step.step_id);
    let groups = unions.by_group.iter().map(|(&(group, slot), sums)| Entry {
        step_id: step_of(group),
        layer: layers.get(slot).copied(),
        ..Entry::new(EntryKind::PassUnions, GROUP, values(sums))
    });
    let sizes = unions.by_requests.iter().map(|(&requests, sums)| {
        Entry::new(EntryKind::PassUnions, REQUESTS, std::iter::once(i64::from(requests)).chain(values(sums)).collect())
    });
    groups.chain(sizes).collect()
}

/// Takes in an entry of unions. `at` is its step, `slot` its layer; of `requests` they are not looked at.
pub(super) fn take(
    unions: &mut PassUnions,
    passes: &Passes,
    name: &str,
    values: &[u64],
    at: impl FnOnce() -> Result<u32, String>,
    slot: impl FnOnce() -> Result<usize, String>,
) -> Result<(), String> {
    let sums = |values: &[u64]| match *values {
        [passes, steps, by_step, by_pass] => Ok(Sums { passes, steps, by_step, by_pass }),
        _ => Err(format!("`{name}` has {} numbers", values.len())),
    };
    match (name, values) {
        (GROUP, values) => {
            let group = passes.group_of(at()? as usize).ok_or("its step is in no pass that requests share")?;
            if unions.by_group.insert((group, slot()?), sums(values)?).is_some() {
                return Err("its group and layer are there twice".into());
            }
            Ok(())
        }
        (REQUESTS, [requests, values @ ..]) => {
            let requests = u32::try_from(*requests).map_err(|_| format!("no pass has {requests} requests"))?;
            if unions.by_requests.insert(requests, sums(values)?).is_some() {
                return Err(format!("passes of {requests} requests are there twice"));
            }
            Ok(())
        }
        _ => Err(format!("there are no unions of `{}`", name.escape_debug())),
    }
}

/// Whether these can be unions of these passes, of layers of that many experts.
///
/// A pass counts once a layer at most. With P passes of S steps and R rows of k experts: k P <= by_pass <= by_step <= k R (at least one
/// expert a pass where some rows are missing), by_pass <= E P, and what is summed by group is what is summed by size.
pub(super) fn check(unions: &PassUnions, passes: &Passes, k: usize, experts: usize) -> Result<(), String> {
    let mut most = vec![(0u64, 0u64, 0u64); passes.groups as usize];
    for Pass { steps, rows, group } in &passes.passes {
        if let Some(most) = most.get_mut(*group as usize) {
            *most = (most.0 + 1, most.1 + u64::from(*steps), most.2 + rows);
        }
    }
    let mut all = Sums::default();
    for (&(group, _), sums) in &unions.by_group {
        let (passes, steps, rows) = most.get(group as usize).copied().unwrap_or_default();
        let fits = sums.passes <= passes
            && sums.steps <= steps
            && sums.steps >= sums.passes
            && sums.by_step <= rows.saturating_mul(k as u64)
            && sums.by_pass <= sums.by_step
            && sums.by_pass <= sums.passes.saturating_mul(experts as u64)
            && sums.by_pass >= sums.passes;
        if !fits {
            return Err("unions of shared passes are more, or fewer, than those passes can have".into());
        }
        all.merge(sums);
    }
    let mut by_size = Sums::default();
    for (&requests, sums) in &unions.by_requests {
        if sums.steps != sums.passes.saturating_mul(u64::from(requests)) {
            return Err(format!("passes of {requests} requests have another number of steps"));
        }
        by_size.merge(sums);
    }
    if all != by_size {
        return Err("shared passes come to different sums by request and by size".into());
    }
    Ok(())
}

/// A part's unions by the groups of the whole; `new` has its steps' new places.
pub(super) fn renumbered(unions: &PassUnions, own: &Passes, whole: &Passes, new: &[u32]) -> Result<PassUnions, AnalysisError> {
    let group = |&at: &usize| new.get(at).and_then(|&at| whole.group_of(at as usize));
    let lost = || AnalysisError::Incomparable { reason: "steps of one pass are apart in a partial report".into() };
    let groups: Vec<u32> = own.firsts().iter().map(|at| group(at).ok_or_else(lost)).collect::<Result<_, _>>()?;
    let mut by_group = std::collections::BTreeMap::new();
    for (&(theirs, slot), sums) in &unions.by_group {
        by_group.entry((groups.get(theirs as usize).copied().ok_or_else(lost)?, slot)).or_insert_with(Sums::default).merge(sums);
    }
    Ok(PassUnions { by_group, by_requests: unions.by_requests.clone() })
}

/// The same of a part in which every step has a pass of its own: a pass's union is its window's.
pub(super) fn of_own_passes(counts: &PassCounts, table: &StepTable, whole: &Passes, new: &[u32]) -> PassUnions {
    let mut groups = vec![None; table.requests.len()];
    for (step, &at) in table.steps.iter().zip(new) {
        if let Some(group) = groups.get_mut(step.request as usize) {
            *group = group.or(whole.group_of(at as usize));
        }
    }
    let mut unions = PassUnions::default();
    for ((request, _), slots) in &counts.sums {
        let Some(group) = groups.get(*request as usize).copied().flatten() else { continue };
        for (slot, sums) in slots.iter().enumerate().filter(|(_, sums)| sums.windows > 0) {
            let sums = Sums { passes: sums.windows, steps: sums.windows, by_step: sums.union, by_pass: sums.union };
            unions.by_group.entry((group, slot)).or_default().merge(&sums);
            unions.by_requests.entry(1).or_default().merge(&sums);
        }
    }
    unions
}
