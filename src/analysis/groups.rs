//! Acceptance and unions by group of steps: by request, by a tag, by context length, or by layer.

use super::acceptance::acceptance_of;
use super::pass::{PassCounts, Plan};
use super::stats::Ratios;
use super::steps::{Step, StepTable};
use super::{AnalysisError, Input, Options};
use crate::metric::groups::{GroupReport, Groups};
use crate::metric::report::LayerReport;
use crate::trace::RequestEvent;
use crate::trace::event::UNKNOWN_CONTEXT;
use crate::trace::manifest::WindowCompleteness;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Shortest range of context lengths; each further one is twice as long as all before.
const FIRST_CONTEXT: u32 = 64;

/// What to group by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupBy {
    /// The request.
    Request,
    /// A tag of the request.
    Tag(String),
    /// Tokens in the cache before the step: 0...63, 64...127, 128...255 and so on.
    Context,
    /// The layer.
    Layer,
}

impl std::str::FromStr for GroupBy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("tag", name)) if !name.is_empty() => Ok(Self::Tag(name.to_owned())),
            _ if text == "request" => Ok(Self::Request),
            _ if text == "context" => Ok(Self::Context),
            _ if text == "layer" => Ok(Self::Layer),
            _ => Err("one of request, tag:NAME, context and layer".to_owned()),
        }
    }
}

impl std::fmt::Display for GroupBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request => f.write_str("request"),
            Self::Tag(name) => write!(f, "tag:{name}"),
            Self::Context => f.write_str("context"),
            Self::Layer => f.write_str("layer"),
        }
    }
}

/// All tags of a request as (name, value): an object's entries, or a list's words with the value `yes`. What is neither is no tag.
pub fn tags(request: &RequestEvent) -> Vec<(String, String)> {
    use serde_json::Value;
    let text = |value: Value| match value {
        Value::String(text) => text,
        other => other.to_string(),
    };
    match serde_json::from_str(&request.tags) {
        Ok(Value::Object(tags)) => tags.into_iter().map(|(name, value)| (name, text(value))).collect(),
        Ok(Value::Array(words)) => words.into_iter().map(|word| (text(word), "yes".to_owned())).collect(),
        _ => Vec::new(),
    }
}

/// The range of context lengths that `length` is in: its first and last.
fn context_range(length: u32) -> (u32, u32) {
    let mut first = 0;
    let mut end = FIRST_CONTEXT;
    while length >= end {
        first = end;
        end = end.saturating_mul(2);
        if end == u32::MAX {
            break;
        }
    }
    (first, end - 1)
}

/// What is known of a window's rows.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Which were accepted.
    accepted: bool,
    /// What the rejected ones chose.
    rejected: bool,
}

/// The sums of one group's windows.
#[derive(Debug, Clone, Default)]
struct Sums {
    windows: u64,
    added: Vec<u64>,
    union: u64,
    kept_experts: u64,
    kept_rows: u64,
    rejected_rows: u64,
    /// A window is a tree whose accepted rows are not known.
    unknown: bool,
    by_request: BTreeMap<u32, (u64, u64)>,
}

/// The groups of a trace; windows are those of `rows` rows.
///
/// # Errors
/// [`AnalysisError::Group`] when no request has the tag.
pub fn groups(
    input: &Input<'_>,
    plan: &Plan<'_>,
    counts: &PassCounts,
    layers: &[LayerReport],
    rows: Option<usize>,
    by: &GroupBy,
    options: &Options,
) -> Result<Groups, AnalysisError> {
    let known = Known {
        accepted: input.manifest.acceptance_known,
        rejected: input.manifest.acceptance_known && input.manifest.window_completeness != WindowCompleteness::AcceptedOnly,
    };
    let table = plan.steps;
    let groups = match by {
        GroupBy::Layer => layers.iter().map(|layer| of_layer(layer, table)).collect(),
        GroupBy::Request => {
            let names: HashMap<u32, &str> = input.requests.iter().map(|r| (r.request_id, r.id.as_str())).collect();
            let id = |step: &Step| table.requests.get(step.request as usize).map_or(step.request, |r| r.request_id);
            let of = |id: &u32| (id.to_string(), names.get(id).filter(|name| !name.is_empty()).map(|name| (*name).to_owned()));
            collect(plan, counts, rows, options, known, id, of)
        }
        GroupBy::Context => {
            // Where nobody said how long the context was, the steps come last.
            let range = |step: &Step| match step.context_len {
                UNKNOWN_CONTEXT => (u32::MAX, u32::MAX),
                length => context_range(length),
            };
            let of = |&(first, last): &(u32, u32)| {
                (if first == UNKNOWN_CONTEXT { "(unknown)".to_owned() } else { format!("{first}-{last}") }, None)
            };
            collect(plan, counts, rows, options, known, range, of)
        }
        GroupBy::Tag(name) => {
            let values = tag_values(input.requests, name)?;
            let value = |step: &Step| table.requests.get(step.request as usize).and_then(|r| values.get(&r.request_id)).cloned();
            // `None` sorts first, but belongs behind the values.
            let key = |step: &Step| value(step).map_or((true, String::new()), |value| (false, value));
            let of = |(missing, value): &(bool, String)| (if *missing { format!("(no {name})") } else { value.clone() }, None);
            collect(plan, counts, rows, options, known, key, of)
        }
    };
    Ok(Groups { by: by.to_string(), groups })
}

/// The value of a tag by request.
fn tag_values(requests: &[RequestEvent], name: &str) -> Result<HashMap<u32, String>, AnalysisError> {
    let mut known = BTreeSet::new();
    let mut values = HashMap::new();
    for request in requests {
        for (tag, value) in tags(request) {
            if tag == name {
                values.insert(request.request_id, value);
            }
            known.insert(tag);
        }
    }
    if values.is_empty() {
        let known: Vec<String> = known.into_iter().take(8).collect();
        let hint = if known.is_empty() { "requests have no tags".to_owned() } else { format!("there are {}", known.join(", ")) };
        return Err(AnalysisError::Group { reason: format!("no request has the tag `{name}`: {hint}") });
    }
    Ok(values)
}

/// Groups verify steps by a key.
///
/// * union of a group = Σ of its windows' unions / their number, a window being one step in one layer
/// * added per kept row = Σ of prefix_union[accepted] / Σ (accepted + 1); per rejected row = Σ (union - prefix_union[accepted]) /
///   Σ (rows - 1 - accepted). Of a tree, the union of its accepted rows is in the place of prefix_union\[accepted\]
fn collect<K: Ord + Clone>(
    plan: &Plan<'_>,
    counts: &PassCounts,
    rows: Option<usize>,
    options: &Options,
    known: Known,
    key: impl Fn(&Step) -> K,
    name: impl Fn(&K) -> (String, Option<String>),
) -> Vec<GroupReport> {
    let table = plan.steps;
    let mut steps: BTreeMap<K, Vec<&Step>> = BTreeMap::new();
    for step in table.steps.iter().filter(|s| s.is_verify()) {
        steps.entry(key(step)).or_default().push(step);
    }
    let mut sums: BTreeMap<K, Sums> = BTreeMap::new();
    for sum in counts.steps.iter().filter(|s| Some(s.added.len()) == rows) {
        let Some(step) = table.steps.get(sum.at as usize) else { continue };
        let group = sums.entry(key(step)).or_default();
        let (layers, kept) = (u64::from(sum.layers), usize::from(step.accepted).min(sum.added.len().saturating_sub(1)));
        group.windows += layers;
        group.added.resize(sum.added.len(), 0);
        group.added.iter_mut().zip(sum.added).for_each(|(total, &added)| *total += u64::from(added));
        group.union += sum.union();
        let tree = plan.trees.and_then(|trees| trees.get(sum.at as usize)).filter(|shape| shape.rows() == sum.added.len());
        group.unknown |= tree.is_some_and(|shape| shape.path().is_none());
        group.kept_experts += match tree {
            Some(_) => counts.paths.get(&sum.at).copied().unwrap_or(0),
            None => sum.prefix(kept),
        };
        group.kept_rows += layers * (kept as u64 + 1);
        group.rejected_rows += layers * (sum.added.len() - 1 - kept) as u64;
        let (union, windows) = group.by_request.entry(step.request).or_default();
        *union += sum.union();
        *windows += layers;
    }
    let ratio = |sum: u64, n: u64| (n > 0).then(|| sum as f64 / n as f64);
    let report = |(key_of, steps): (&K, &Vec<&Step>)| {
        let s = sums.get(key_of).cloned().unwrap_or_default();
        let mut unions = Ratios::new(1);
        s.by_request.values().for_each(|&pair| unions.push(std::iter::once(pair)));
        let mut prefix = 0;
        let (key, name) = name(key_of);
        let requests: BTreeSet<u32> = steps.iter().map(|s| s.request).collect();
        GroupReport {
            key,
            name,
            requests: requests.len() as u64,
            verify_steps: steps.len() as u64,
            acceptance: known.accepted.then(|| acceptance_of(steps.iter().copied(), options.resamples, options.seed)),
            rows: rows.unwrap_or(0) as u16,
            windows: s.windows,
            union_mean: ratio(s.union, s.windows),
            union_ci95: unions.intervals(options.resamples, options.seed).into_iter().next().flatten(),
            prefix_union: s
                .added
                .iter()
                .map(|added| {
                    prefix += added;
                    prefix as f64 / s.windows as f64
                })
                .collect(),
            marginal_kept: ratio(s.kept_experts, s.kept_rows).filter(|_| known.accepted && !s.unknown),
            marginal_rejected: ratio(s.union - s.kept_experts, s.rejected_rows).filter(|_| known.rejected && !s.unknown),
            wasted_mean: ratio(s.union - s.kept_experts, s.windows).filter(|_| known.rejected && !s.unknown),
        }
    };
    steps.iter().map(report).collect()
}

fn of_layer(layer: &LayerReport, table: &StepTable) -> GroupReport {
    let stats = &layer.stats;
    GroupReport {
        key: layer.layer.to_string(),
        name: None,
        requests: table.requests.iter().filter(|r| r.verify_steps > 0).count() as u64,
        verify_steps: table.requests.iter().map(|r| r.verify_steps).sum(),
        acceptance: None,
        rows: stats.rows,
        windows: stats.windows,
        union_mean: stats.union.as_ref().map(|u| u.mean),
        union_ci95: stats.union.as_ref().and_then(|u| u.ci95),
        prefix_union: stats.prefix_union.clone(),
        marginal_kept: stats.marginal_kept,
        marginal_rejected: stats.marginal_rejected,
        wasted_mean: stats.wasted_mean,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Wanted;
    use crate::analysis::tests::memory::Memory;
    use crate::trace::FinishReason;

    fn request(request_id: u32, id: &str, tags: &str) -> RequestEvent {
        RequestEvent {
            request_id,
            id: id.into(),
            prompt_tokens: 1,
            generated_tokens: 1,
            finish_reason: FinishReason::Length,
            tags: tags.into(),
            prompt_text: None,
            output_text: None,
        }
    }

    /// Two layers of six experts, two a row. Request 0 (code): rows {0,1} {0,2} and {0,1} {2,3}; request 1 (chat): {0,1} {0,1}.
    fn trace() -> Memory {
        let mut trace = Memory::new(&[1, 2], 6, 2);
        let window = |a: [u16; 2], b: [u16; 2]| vec![a.to_vec(), b.to_vec()];
        trace.verify(0, 0, &[window([0, 1], [0, 2]), window([0, 1], [0, 1])]);
        trace.verify(1, 1, &[window([0, 1], [0, 1]), window([0, 1], [0, 1])]);
        trace.verify(0, 1, &[window([0, 1], [2, 3]), window([0, 1], [4, 5])]);
        trace.requests = vec![request(0, "first", r#"{"kind": "code", "n": 3}"#), request(1, "", r#"["chat"]"#)];
        trace
    }

    fn by(trace: &Memory, by: &str) -> Groups {
        let wanted = Wanted { by: Some(by.parse().unwrap()), ..Wanted::default() };
        trace.try_report_of(&wanted).unwrap().groups.unwrap()
    }

    #[test]
    fn worked_example_by_request() {
        let groups = by(&trace(), "request");
        assert_eq!(groups.by, "request");
        let [first, second] = groups.groups.as_slice() else { panic!("{groups:?}") };
        assert_eq!(
            (first.key.as_str(), first.name.as_deref(), second.key.as_str(), second.name.as_deref()),
            ("0", Some("first"), "1", None)
        );
        // Unions 3 and 2, then 4 and 4: 13 / 4. The first step keeps row 0 alone (2 + 2), the second both.
        assert_eq!((first.verify_steps, first.windows, first.union_mean, first.union_ci95), (2, 4, Some(3.25), None));
        assert_eq!(first.prefix_union, [2.0, 3.25]);
        assert_eq!((first.marginal_kept, first.marginal_rejected, first.wasted_mean), (Some(12.0 / 6.0), Some(0.5), Some(0.25)));
        assert_eq!(first.acceptance.as_ref().unwrap().tokens_per_step, Some(1.5));
        assert_eq!((second.union_mean, second.marginal_rejected, second.wasted_mean), (Some(2.0), None, Some(0.0)));
    }

    #[test]
    fn tags_contexts_and_layers() {
        let trace = trace();
        let keys = |name: &str| by(&trace, name).groups.iter().map(|g| (g.key.clone(), g.windows)).collect::<Vec<_>>();
        assert_eq!(keys("tag:kind"), [("code".to_owned(), 4), ("(no kind)".to_owned(), 2)]);
        assert_eq!(keys("tag:n"), [("3".to_owned(), 4), ("(no n)".to_owned(), 2)]);
        assert_eq!(keys("tag:chat"), [("yes".to_owned(), 2), ("(no chat)".to_owned(), 4)]);
        assert_eq!(keys("context"), [("0-63".to_owned(), 6)]);
        assert_eq!(keys("layer"), [("1".to_owned(), 3), ("2".to_owned(), 3)]);
        let wanted = Wanted { by: Some(GroupBy::Tag("kid".into())), ..Wanted::default() };
        let error = trace.try_report_of(&wanted).unwrap_err().to_string();
        assert!(error.contains("`kid`") && error.contains("chat, kind, n"), "{error}");
    }

    #[test]
    fn names_and_ranges() {
        for text in ["request", "tag:a:b", "context", "layer"] {
            assert_eq!(text.parse::<GroupBy>().unwrap().to_string(), text);
        }
        for text in ["", "tag", "tag:", "requests"] {
            assert!(text.parse::<GroupBy>().unwrap_err().contains("tag:NAME"));
        }
        let ranges = [(0, (0, 63)), (63, (0, 63)), (64, (64, 127)), (1000, (512, 1023)), (u32::MAX, (1 << 31, u32::MAX - 1))];
        assert_eq!(ranges.map(|(n, _)| context_range(n)), ranges.map(|(_, range)| range));
    }
}
