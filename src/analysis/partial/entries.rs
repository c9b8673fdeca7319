//! A partial's state as the entries of its file.

use super::Partial;
use super::{pass_entries, tree_entries};
use crate::analysis::counts::{LoadCounts, RequestSums, WindowCounts};
use crate::analysis::steps::StepRow;
use crate::analysis::{AnalysisError, StepTime, batch, counts};
use crate::metric::report::RequestIdentity;
use crate::trace::FinishReason;
use crate::trace::RequestEvent;
use crate::trace::partial_file::{Entry, EntryKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What a request's entry says of it, as JSON.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct RequestText {
    /// Of a request that has an entry of its own in the trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<EventText>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<RequestIdentity>,
}

/// A [`RequestEvent`] without its texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EventText {
    pub id: String,
    pub prompt_tokens: u32,
    pub generated_tokens: u32,
    pub finish_reason: String,
    pub tags: String,
}

impl EventText {
    fn of(event: &RequestEvent) -> Self {
        Self {
            id: event.id.clone(),
            prompt_tokens: event.prompt_tokens,
            generated_tokens: event.generated_tokens,
            finish_reason: event.finish_reason.as_str().to_owned(),
            tags: event.tags.clone(),
        }
    }

    pub(super) fn event(self, request_id: u32) -> RequestEvent {
        RequestEvent {
            request_id,
            id: self.id,
            prompt_tokens: self.prompt_tokens,
            generated_tokens: self.generated_tokens,
            finish_reason: FinishReason::parse(&self.finish_reason).unwrap_or(FinishReason::Unknown),
            tags: self.tags,
            prompt_text: None,
            output_text: None,
        }
    }
}

/// A number of [`WindowCounts`], and where it is.
pub(super) type Scalar<T> = (&'static str, fn(&mut T) -> &mut u64);
/// A list of them.
pub(super) type List<T> = (&'static str, fn(&mut T) -> &mut Vec<u64>);

/// The numbers of windows of one layer and number of rows.
pub(super) const SCALARS: [Scalar<WindowCounts>; 7] = [
    ("windows", |c| &mut c.windows),
    ("kept_experts", |c| &mut c.kept_experts),
    ("kept_rows", |c| &mut c.kept_rows),
    ("wasted", |c| &mut c.wasted),
    ("rejected_rows", |c| &mut c.rejected_rows),
    ("coverage_windows", |c| &mut c.coverage_windows),
    ("coverage_left_out", |c| &mut c.coverage_left_out),
];
/// Their lists.
pub(super) const LISTS: [List<WindowCounts>; 6] = [
    ("union_histogram", |c| &mut c.union_hist),
    ("marginal", |c| &mut c.marginal),
    ("wasted_by_row", |c| &mut c.wasted_by_row),
    ("pair_histogram", |c| &mut c.pair_hist),
    ("reuse_shared", |c| &mut c.reuse_shared),
    ("reuse_windows", |c| &mut c.reuse_windows),
];
/// Entry B - 1: the sum of the coverage of the best B experts, in windows, without its fraction...
pub(super) const COVERAGE: &str = "coverage";
/// ...and its fraction, in units of 1 / [`counts::COVERAGE_ONE`].
pub(super) const COVERAGE_FRACTION: &str = "coverage_fraction";
/// One window's full coverage.
pub(super) const ONE: u128 = counts::COVERAGE_ONE as u128;

/// Names of loads.
pub(super) const TARGET: &str = "target";
pub(super) const DRAFT: &str = "draft";
pub(super) const PREFILL: &str = "prefill";

/// As the file has it. Nothing that is counted comes near the largest one.
pub(super) fn number(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(super) fn numbers(list: &[u64]) -> Vec<i64> {
    list.iter().map(|&n| number(n)).collect()
}

impl Partial {
    /// All entries; `layers` are the routed layers by slot.
    ///
    /// # Errors
    /// When the steps contradict each other.
    pub(super) fn entries<'a>(&'a self, layers: &'a [u16]) -> Result<impl Iterator<Item = Entry> + 'a, AnalysisError> {
        let table = self.table()?;
        let firsts = batch::passes_of_part(&self.manifest, &table, &self.passes)?.map(|passes| passes.firsts());
        let pass_unions = pass_entries::unions(&self.pass_unions, &firsts.unwrap_or_default(), &self.steps, layers);
        let left_out = self.counts.irregular.first.map(|(step, layer, found, expected)| {
            let first = [u64::from(step), u64::from(layer), found as u64, expected as u64];
            Entry::new(EntryKind::LeftOut, "", numbers(&[&[self.counts.irregular.windows], &first[..]].concat()))
        });
        let without = self.without_pairs.iter().map(|&rows| i64::from(rows)).collect();
        let kept = self.counts.paths.iter().collect::<std::collections::BTreeMap<_, _>>().into_iter();
        let entries = std::iter::once(Entry::new(EntryKind::WithoutPairs, "", without))
            .chain(left_out)
            .chain(self.request_entries())
            .chain(self.steps.iter().enumerate().map(|(at, step)| step_entry(step, self.times.get(at), self.draft_probs.get(at))))
            .chain(tree_entries::shapes(&self.trees, &self.steps))
            .chain(self.counts.steps.iter().filter_map(|sum| {
                let values = std::iter::once(sum.layers).chain(sum.added.iter().copied()).map(i64::from).collect();
                Some(Entry {
                    step_id: self.step_id(sum.at),
                    rows: u16::try_from(sum.added.len()).ok(),
                    ..Entry::new(EntryKind::Added, "", values)
                })
            }))
            .chain(kept.map(|(&at, &kept)| Entry { step_id: self.step_id(at), ..Entry::new(EntryKind::Kept, "", vec![number(kept)]) }))
            .chain(self.load_entries(layers))
            .chain(self.counts.groups.iter().flat_map(move |(_, slots)| {
                layers
                    .iter()
                    .zip(slots)
                    .filter_map(|(&layer, counts)| Some((layer, counts.as_ref()?)))
                    .flat_map(|(l, c)| window_entries(l, c))
            }))
            .chain(self.sum_entries())
            .chain(pass_entries::numbers(&self.steps, &self.passes))
            .chain(pass_unions)
            .chain(self.union_entries(layers.len()))
            .chain(
                self.operations
                    .iter()
                    .map(|o| Entry { step_id: Some(o.step_id), ..Entry::new(EntryKind::Operations, o.component.as_str(), numbers(o.ns)) }),
            );
        Ok(entries)
    }

    fn step_id(&self, at: u32) -> Option<u32> {
        self.steps.get(at as usize).map(|step| step.step_id)
    }

    fn request_entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let ids: BTreeSet<u32> = self.requests.iter().map(|r| r.request_id).chain(self.identities.keys().copied()).collect();
        let events: std::collections::HashMap<u32, &RequestEvent> = self.requests.iter().map(|r| (r.request_id, r)).collect();
        ids.into_iter().map(move |id| {
            let text = RequestText { event: events.get(&id).map(|e| EventText::of(e)), identity: self.identities.get(&id).cloned() };
            // Plain texts and numbers: this cannot fail.
            let text = serde_json::to_string(&text).unwrap_or_default();
            Entry { request_id: Some(id), ..Entry::new(EntryKind::Request, text, Vec::new()) }
        })
    }

    fn load_entries<'a>(&'a self, layers: &'a [u16]) -> impl Iterator<Item = Entry> + 'a {
        let of = |name: &'static str| {
            move |(&layer, load): (&u16, &LoadCounts)| Entry {
                layer: Some(layer),
                ..Entry::new(EntryKind::Load, name, numbers(&[&[load.rows], load.by_expert.as_slice()].concat()))
            }
        };
        let target = layers.iter().zip(&self.counts.load).map(of(TARGET));
        target.chain(self.counts.draft.iter().map(of(DRAFT))).chain(self.counts.prefill.iter().map(of(PREFILL)))
    }

    fn sum_entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let mut ids: Vec<u32> = self.steps.iter().map(|s| s.request_id).collect();
        ids.sort_unstable();
        ids.dedup();
        self.counts.sums.iter().map(move |((request, rows), sums)| {
            let values: Vec<u64> = sums.iter().flat_map(|&RequestSums { windows, union, wasted }| [windows, union, wasted]).collect();
            Entry {
                request_id: ids.get(*request as usize).copied(),
                rows: u16::try_from(*rows).ok(),
                ..Entry::new(EntryKind::Sums, "", numbers(&values))
            }
        })
    }

    /// The windows' unions, which come by step and slot.
    fn union_entries(&self, slots: usize) -> impl Iterator<Item = Entry> + '_ {
        self.counts.unions.chunk_by(|a, b| a.at == b.at).map(move |step| {
            let mut values = vec![-1; slots];
            for window in step {
                if let Some(value) = values.get_mut(usize::from(window.slot)) {
                    *value = i64::from(window.union);
                }
            }
            Entry { step_id: step.first().and_then(|w| self.step_id(w.at)), ..Entry::new(EntryKind::Unions, "", values) }
        })
    }
}

fn step_entry(step: &StepRow, time: Option<&StepTime>, draft_probs: Option<&Option<Vec<f32>>>) -> Entry {
    let time = time.copied().unwrap_or_default();
    let mut values = vec![i64::from(step.accepted), i64::from(step.emitted), i64::from(step.context_len), time.step_ns, time.target_ns];
    values.extend(time.device_ns);
    Entry {
        request_id: Some(step.request_id),
        step_id: Some(step.step_id),
        rows: Some(step.rows),
        draft_probs: draft_probs.cloned().flatten(),
        ..Entry::new(EntryKind::Step, step.phase.as_str(), values)
    }
}

fn window_entries(layer: u16, counts: &WindowCounts) -> impl Iterator<Item = Entry> + use<> {
    let mut counts = counts.clone();
    let rows = u16::try_from(counts.rows).ok();
    let mut entries = Vec::new();
    for (name, of) in SCALARS {
        entries.push((name, vec![number(*of(&mut counts))]));
    }
    for (name, of) in LISTS {
        entries.push((name, numbers(of(&mut counts))));
    }
    if !counts.coverage.is_empty() {
        let part = |of: fn(u128) -> u128| counts.coverage.iter().map(|&sum| i64::try_from(of(sum)).unwrap_or(i64::MAX)).collect();
        entries.push((COVERAGE, part(|sum| sum / ONE)));
        entries.push((COVERAGE_FRACTION, part(|sum| sum % ONE)));
    }
    if let Some(trees) = counts.trees.as_deref_mut() {
        entries.extend(tree_entries::counts(trees));
    }
    entries.into_iter().map(move |(name, values)| Entry { layer: Some(layer), rows, ..Entry::new(EntryKind::Window, name, values) })
}
