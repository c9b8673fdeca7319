//! Partials of several traces put together into one, as if one trace held all their requests.

use super::operations::{Operation, Operations};
use super::{Partial, pass_entries, repeats};
use crate::analysis::AnalysisError;
use crate::analysis::batch::{self, PassUnions};
use crate::analysis::pass::PassCounts;
use crate::analysis::steps::StepRow;
use crate::analysis::trees::Trees;
use crate::trace::Manifest;
use crate::trace::manifest::{Instrumentation, Warning, word};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// Most partials of one report.
const MOST: usize = 1024;
/// Names that are shown of many.
const SHOWN: usize = 3;

/// One partial of several, whatever their order.
///
/// Requests of different partials are different requests. They and their steps keep their ids where no two partials have the same one;
/// otherwise they are numbered anew, in the order of their ids, then of their files' fingerprints.
///
/// # Errors
/// [`AnalysisError::Incomparable`] when they are of different models, windows or devices, or one is given twice.
pub fn merge(mut parts: Vec<Partial>) -> Result<Partial, AnalysisError> {
    if parts.len() > MOST {
        return Err(AnalysisError::Incomparable { reason: format!("{} partial reports; at most {MOST} are put together", parts.len()) });
    }
    parts.sort_by_key(|part| part.fingerprint);
    if let Some([first, second]) =
        parts.windows(2).find_map(|pair| <&[Partial; 2]>::try_from(pair).ok().filter(|p| p[0].fingerprint == p[1].fingerprint))
    {
        let reason = format!("{} and {} are the same partial report; its requests would count twice", first.origin, second.origin);
        return Err(AnalysisError::Incomparable { reason });
    }
    // Recordings begin at times of their own; what was imported has none, and is told by its tokens.
    let recording = |part: &Partial| Some((part.manifest.started_unix_ns, part.manifest.token_hash.clone()?, part.steps.len()));
    for (at, part) in parts.iter().enumerate() {
        if let Some(same) = parts[..at].iter().find(|other| recording(part).is_some() && recording(other) == recording(part)) {
            let reason = format!("{} and {} are of the same recording; its requests would count twice", same.origin, part.origin);
            return Err(AnalysisError::Incomparable { reason });
        }
    }
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let Some((first, others)) = parts.split_first() else {
        return Err(AnalysisError::Incomparable { reason: "no partial report".into() });
    };
    others.iter().try_for_each(|other| comparable(first, other))?;

    let ids_of = |part: &Partial| {
        let of_steps = part.steps.iter().map(|s| s.request_id);
        let mut ids: Vec<u32> = of_steps.chain(part.requests.iter().map(|r| r.request_id)).chain(part.identities.keys().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let of_requests = |part: &Partial| ids_of(part).into_iter().map(|id| (id, id)).collect();
    let requests = Numbers::new(&parts.iter().map(of_requests).collect::<Vec<_>>())?;
    let steps = Numbers::new(&parts.iter().map(of_steps).collect::<Vec<_>>())?;
    let mut whole = Partial {
        origin: first.origin.clone(),
        fingerprint: first.fingerprint,
        name: name_of(&parts),
        manifest: manifest_of(&parts, requests.keep),
        steps: Vec::new(),
        times: Vec::new(),
        draft_probs: Vec::new(),
        trees: Trees::default(),
        passes: Vec::new(),
        pass_unions: PassUnions::default(),
        requests: Vec::new(),
        identities: parts
            .iter()
            .enumerate()
            .flat_map(|(of, part)| part.identities.iter().map(move |(&id, identity)| (of, id, identity)))
            .map(|(of, id, identity)| (requests.new_id(of, id), identity.clone()))
            .collect(),
        counts: PassCounts::default(),
        without_pairs: parts.iter().flat_map(|part| part.without_pairs.iter().copied()).collect(),
        operations: Operations::new(&first.layers()),
    };
    whole.without_pairs.sort_unstable();
    whole.without_pairs.dedup();
    // The pass of the step before, and its number among all.
    let (mut before, mut pass) = (None, 0u32);
    // By new number: where a step comes from.
    for (new, &(_, of, at)) in steps.order.iter().enumerate() {
        let part = &parts[of];
        let mut step = part.steps[at];
        (step.step_id, step.request_id) = (steps.id_at(new), requests.new_id(of, step.request_id));
        whole.steps.push(step);
        whole.times.push(part.times.get(at).copied().unwrap_or_default());
        whole.draft_probs.push(part.draft_probs.get(at).cloned().flatten());
        let here = part.passes.get(at).copied().flatten().map(|number| (of, number));
        pass += u32::from(here.is_some() && here != before);
        whole.passes.push(here.map(|_| pass));
        before = here;
        if let Some(shape) = part.trees.get(at) {
            whole.trees.put(new, shape.clone());
        }
    }
    for (of, part) in parts.iter().enumerate() {
        whole.requests.extend(part.requests.iter().cloned().map(|mut event| {
            event.request_id = requests.new_id(of, event.request_id);
            event
        }));
    }
    whole.requests.sort_by_key(|event| event.request_id);
    operations(&mut whole.operations, &parts, &steps);
    whole.pass_unions = pass_unions_of(&parts, &steps, &whole)?;
    whole.counts = counts_of(parts, &requests, &steps, &whole)?;
    Ok(whole)
}

/// The ids of a partial's steps, each with the one that it is put in order by: that of its pass's first step, so that passes stay whole.
fn of_steps(part: &Partial) -> Vec<(u32, u32)> {
    let mut first: Option<(u32, u32)> = None;
    let key = |(at, step): (usize, &StepRow)| {
        let pass = part.passes.get(at).copied().flatten();
        first = pass.map(|pass| first.filter(|(of, _)| *of == pass).unwrap_or((pass, step.step_id)));
        (first.map_or(step.step_id, |(_, id)| id), step.step_id)
    };
    part.steps.iter().enumerate().map(key).collect()
}

/// New numbers of requests or steps.
struct Numbers {
    /// (old id, partial, place in it), by new number.
    order: Vec<(u32, usize, usize)>,
    /// By partial: the new number of each place.
    new: Vec<Vec<u32>>,
    /// By partial: the old ids, ascending, each with its new number.
    ids: Vec<HashMap<u32, u32>>,
    /// Whether old ids are kept.
    keep: bool,
}

impl Numbers {
    /// Of old ids by partial, each behind what it is put in order by.
    fn new(ids: &[Vec<(u32, u32)>]) -> Result<Self, AnalysisError> {
        let mut order: Vec<(u32, usize, usize)> =
            ids.iter().enumerate().flat_map(|(of, ids)| ids.iter().enumerate().map(move |(at, &(key, _))| (key, of, at))).collect();
        if u32::try_from(order.len()).is_err() {
            return Err(AnalysisError::TooLarge { reason: format!("{} steps over all partial reports", order.len()) });
        }
        order.sort_unstable();
        order.iter_mut().for_each(|(id, of, at)| *id = ids[*of][*at].1);
        let keep = order.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let mut new: Vec<Vec<u32>> = ids.iter().map(|ids| vec![0; ids.len()]).collect();
        let mut by_id: Vec<HashMap<u32, u32>> = ids.iter().map(|ids| HashMap::with_capacity(ids.len())).collect();
        for (number, &(id, of, at)) in (0u32..).zip(&order) {
            new[of][at] = number;
            by_id[of].insert(id, number);
        }
        Ok(Self { order, new, ids: by_id, keep })
    }

    /// The new id of a number.
    fn id_at(&self, number: usize) -> u32 {
        match self.order.get(number) {
            Some(&(id, ..)) if self.keep => id,
            _ => number as u32,
        }
    }

    /// The new id of an old one.
    fn new_id(&self, of: usize, id: u32) -> u32 {
        self.ids[of].get(&id).map_or(id, |&number| self.id_at(number as usize))
    }
}

fn operations(to: &mut Operations, parts: &[Partial], steps: &Numbers) {
    let mut all: Vec<(u32, Operation<'_>)> = Vec::new();
    for (of, part) in parts.iter().enumerate() {
        let number = |operation: Operation<'_>| steps.ids[of].get(&operation.step_id).copied();
        all.extend(part.operations.iter().filter_map(|operation| Some((number(operation)?, operation))));
    }
    // Stable: a step's components stay in their order.
    all.sort_by_key(|(number, _)| *number);
    for (number, operation) in all {
        to.push(Operation { step_id: steps.id_at(number as usize), ..operation });
    }
}

/// The unions of shared passes of all, by the groups of the whole.
fn pass_unions_of(parts: &[Partial], steps: &Numbers, whole: &Partial) -> Result<PassUnions, AnalysisError> {
    let mut unions = PassUnions::default();
    let Some(passes) = batch::passes_of(&whole.manifest, &whole.table()?, &whole.passes)? else { return Ok(unions) };
    for (part, new) in parts.iter().zip(&steps.new) {
        let table = part.table()?;
        let theirs = match batch::passes_of_part(&part.manifest, &table, &part.passes)? {
            Some(own) => pass_entries::renumbered(&part.pass_unions, &own, &passes, new)?,
            None => pass_entries::of_own_passes(&part.counts, &table, &passes, new),
        };
        unions.merge(&theirs);
    }
    Ok(unions)
}

/// The counts of all, by the places of requests and steps in the whole.
fn counts_of(parts: Vec<Partial>, requests: &Numbers, steps: &Numbers, whole: &Partial) -> Result<PassCounts, AnalysisError> {
    let table = whole.table()?;
    let plan = whole.plan(&table)?;
    let mut counts = PassCounts::new(plan.layers.len());
    for (of, part) in parts.into_iter().enumerate() {
        // Requests of the table are those that have steps, ascending.
        let own = part.table()?;
        let place = |request: &crate::analysis::steps::RequestSpan| {
            let id = requests.new_id(of, request.request_id);
            table.requests.binary_search_by_key(&id, |r| r.request_id).map_or(u32::MAX, |at| at as u32)
        };
        let places: Vec<u32> = own.requests.iter().map(place).collect();
        let mut theirs = part.counts;
        theirs.renumber(
            |at| steps.new[of].get(at as usize).copied().unwrap_or(u32::MAX),
            |id| steps.ids[of].get(&id).map_or(id, |&number| steps.id_at(number as usize)),
            |request| places.get(request as usize).copied().unwrap_or(u32::MAX),
        );
        theirs.drop_pairs(&whole.without_pairs);
        counts.merge(theirs);
        plan.limits.check(&counts)?;
    }
    counts.sort();
    Ok(counts)
}

/// What must be the same for numbers to be of one thing.
fn comparable(a: &Partial, b: &Partial) -> Result<(), AnalysisError> {
    let differ = |what: &str, of_a: &dyn std::fmt::Display, of_b: &dyn std::fmt::Display| {
        let reason = format!(
            "partial reports of different {what} are not put together: {} has {of_a}, {} has {of_b}; make a report of each kind",
            a.origin, b.origin
        );
        Err(AnalysisError::Incomparable { reason })
    };
    let (m, n) = (&a.manifest, &b.manifest);
    if m.model.experts_per_token != n.model.experts_per_token {
        return differ("numbers of experts per token (k)", &m.model.experts_per_token, &n.model.experts_per_token);
    }
    if m.model.experts != n.model.experts {
        return differ("numbers of experts", &m.model.experts, &n.model.experts);
    }
    if m.model.moe_layers != n.model.moe_layers {
        return differ("routed layers", &m.model.moe_layers.len(), &n.model.moe_layers.len());
    }
    // Of everything else that the manifest says of them, the first key that differs.
    if let Some((key, of_m, of_n)) = first_difference(&m.model, &n.model) {
        return differ(&format!("models (`model.{key}`)"), &of_m, &of_n);
    }
    if drafting(m) != drafting(n) {
        return differ("drafters or draft lengths", &drafting(m), &drafting(n));
    }
    if let Some((key, of_m, of_n)) = first_difference(&m.drafter, &n.drafter) {
        return differ(&format!("drafters (`drafter.{key}`)"), &of_m, &of_n);
    }
    if m.id_space != n.id_space {
        return differ("id spaces", &word(&m.id_space), &word(&n.id_space));
    }
    if m.window_completeness != n.window_completeness {
        return differ("window completeness", &word(&m.window_completeness), &word(&n.window_completeness));
    }
    if m.acceptance_known != n.acceptance_known {
        return differ("knowledge of acceptance", &m.acceptance_known, &n.acceptance_known);
    }
    if m.verification != n.verification {
        return differ("verification", &word(&m.verification), &word(&n.verification));
    }
    if m.router_weights != n.router_weights {
        return differ("knowledge of gate weights", &m.router_weights, &n.router_weights);
    }
    if m.engine != n.engine {
        return differ("engines", &m.engine, &n.engine);
    }
    if (m.emulated, &m.device.kind, &m.device.name) != (n.emulated, &n.device.kind, &n.device.name) {
        return differ("devices", &m.device.label(), &n.device.label());
    }
    if m.passes_known != n.passes_known {
        return differ("knowledge of shared passes", &m.passes_known, &n.passes_known);
    }
    if m.host_times != n.host_times {
        return differ("knowledge of host times", &m.host_times, &n.host_times);
    }
    Ok(())
}

/// The first key of two things that has other values, and these.
fn first_difference<T: Serialize + PartialEq>(a: &T, b: &T) -> Option<(String, String, String)> {
    if a == b {
        return None;
    }
    let of = |value: &T| serde_json::to_value(value).ok().and_then(|value| value.as_object().cloned()).unwrap_or_default();
    let (a, b) = (of(a), of(b));
    let words = |value: Option<&Value>| match value {
        None => "none".to_owned(),
        Some(Value::Null) => "unknown".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let key = a.keys().chain(b.keys()).find(|key| words(a.get(*key)) != words(b.get(*key)));
    // What JSON does not tell apart differs all the same.
    let key = key.map_or_else(|| "name".to_owned(), Clone::clone);
    Some((key.clone(), words(a.get(&key)), words(b.get(&key))))
}

fn drafting(manifest: &Manifest) -> String {
    match manifest.drafter.draft_len {
        Some(n) => format!("{}, {n} drafts a step", manifest.drafter.label()),
        None => manifest.drafter.label().to_owned(),
    }
}

/// The names in their order, the first few of many.
fn name_of(parts: &[Partial]) -> String {
    let mut names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    names.sort_unstable();
    let shown = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}

/// The facts of all: those that differ are unknown, with a warning that names them.
fn manifest_of(parts: &[Partial], keep: bool) -> Manifest {
    let manifests = || parts.iter().map(|part| &part.manifest);
    // Ordered by fingerprint: the same whatever the order of the arguments.
    let mut whole = parts[0].manifest.clone();
    let mut unknown: Vec<&str> = Vec::new();
    whole.token_hash = None;
    whole.started_unix_ns = manifests().map(|m| m.started_unix_ns).min().unwrap_or_default();
    whole.ended_unix_ns = manifests().map(|m| m.ended_unix_ns).try_fold(i64::MIN, |last, ended| Some(last.max(ended?)));
    whole.complete = manifests().all(|m| m.complete);
    // Of several it is said which.
    let incomplete = |part: &Partial| Some(format!("{}: {}", part.name, part.manifest.incomplete_reason.as_ref()?));
    whole.incomplete_reason = parts.iter().filter_map(incomplete).min();
    whole.text_stored = false;
    whole.format_version = manifests().map(|m| m.format_version.clone()).max().unwrap_or_default();
    whole.written_by = manifests().map(|m| m.written_by.clone()).max().unwrap_or_default();
    if manifests().any(|m| m.sampling != whole.sampling) {
        whole.sampling = None;
        unknown.push("sampling");
    }
    if manifests().any(|m| m.device.units != whole.device.units) {
        whole.device.units = None;
        unknown.push("device.units");
    }
    let same =
        |of: fn(&Instrumentation) -> Option<f64>| manifests().all(|m| of(&m.instrumentation) == of(&parts[0].manifest.instrumentation));
    whole.instrumentation.writer_waits = manifests().fold(0, |sum, m| sum.saturating_add(m.instrumentation.writer_waits));
    whole.instrumentation.writer_wait_ns = manifests().fold(0, |sum, m| sum.saturating_add(m.instrumentation.writer_wait_ns));
    if !same(|i| i.overhead_share) {
        whole.instrumentation.overhead_share = None;
        unknown.push("instrumentation.overhead_share");
    }
    if !same(|i| i.copy_gb_per_s) {
        whole.instrumentation.copy_gb_per_s = None;
        unknown.push("instrumentation.copy_gb_per_s");
    }
    let mut warmups = manifests().map(|m| m.instrumentation.warmup_requests);
    whole.instrumentation.warmup_requests = warmups.try_fold(0u32, |sum, n| Some(sum.saturating_add(n?)));
    whole.warnings = warnings_of(parts);
    let mut message = format!("put together from {} partial reports, of which nobody hashed all tokens together", parts.len());
    if !unknown.is_empty() {
        message.push_str(&format!("; their runs differ in {}: unknown of the whole", unknown.join(", ")));
    }
    // Only where requests had the same numbers are they numbered anew, and resampled in another order than in one trace.
    let renumbered = "; requests are numbered anew, by their old numbers and the files' fingerprints, so that intervals may differ a little \
                      from those of one trace that holds them all";
    let message = if keep { message } else { message + renumbered };
    whole.warnings.push(Warning::new("merged_partials", message));
    whole.warnings.extend(repeats::warning(parts));
    whole
}

/// The notes of all. What every part says word for word, without a number in it, is said once. A number is one part's own, and the same one
/// in two of them is two: such notes stand by the names of their parts, the first few of a code, and how many more there are.
fn warnings_of(parts: &[Partial]) -> Vec<Warning> {
    let first = &parts[0].manifest.warnings;
    let counts = |w: &Warning| w.message.contains(|c: char| c.is_ascii_digit());
    // A single list in all of them keeps its order.
    if parts.iter().all(|part| part.manifest.warnings == *first) && !first.iter().any(counts) {
        return first.clone();
    }
    let mut by_code: BTreeMap<&str, Vec<(&str, &Warning)>> = BTreeMap::new();
    for part in parts {
        for warning in &part.manifest.warnings {
            by_code.entry(&warning.code).or_default().push((&part.name, warning));
        }
    }
    let mut all = Vec::new();
    for mut of_code in by_code.into_values() {
        of_code.sort_by_key(|(name, w)| (*name, &w.message));
        let everywhere = |w: &Warning| parts.iter().all(|part| part.manifest.warnings.contains(w));
        let (once, own): (Vec<_>, Vec<_>) = of_code.into_iter().partition(|(_, w)| !counts(w) && everywhere(w));
        let mut once: Vec<Warning> = once.into_iter().map(|(_, w)| w.clone()).collect();
        once.dedup();
        all.extend(once);
        let more = own.len().saturating_sub(SHOWN);
        let shown = own.iter().take(SHOWN).map(|(name, w)| Warning::new(&w.code, format!("{name}: {}", w.message)));
        let before = all.len();
        all.extend(shown);
        if let Some(last) = all.get_mut(before..).and_then(|own| own.last_mut()).filter(|_| more > 0) {
            last.message.push_str(&format!(" (and {more} more such notes of other partial reports, with numbers of their own)"));
        }
    }
    all
}
