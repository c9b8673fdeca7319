//! Whether a trace's tables agree with its manifest and with each other: `inspect --check`, importers, tests.

use super::event::{UNKNOWN_TOKEN, wrong_parent};
use super::manifest::WindowCompleteness;
use super::passes::PassOrder;
use super::schema::col;
use super::step_table::Steps;
use super::{Component, ExpertSet, Manifest, Module, Phase, RequestEvent, TelemetrySample, Trace, TraceError, token_hash};
use crate::metric::counted_plain;
use serde::Serialize;
use serde::de::IgnoredAny;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;

/// One rule and whether the trace keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name of the rule.
    pub name: &'static str,
    /// Whether the trace keeps it.
    pub ok: bool,
    /// What was compared; of a broken rule, the first place where it is.
    pub detail: String,
}

/// All rules of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Validation {
    /// The rules, in the order in which they were checked.
    pub checks: Vec<Check>,
    /// Whether the trace is incomplete, so that rules about its end were relaxed.
    pub relaxed: bool,
}

impl Validation {
    /// Number of broken rules.
    pub fn failed(&self) -> usize {
        self.checks.iter().filter(|check| !check.ok).count()
    }

    fn add(&mut self, name: &'static str, broken: Option<String>, good: impl Into<String>) {
        let ok = broken.is_none();
        self.checks.push(Check { name, ok, detail: broken.unwrap_or_else(|| good.into()) });
    }
}

/// Checks every rule.
///
/// # Errors
/// [`TraceError::Corrupt`] when a table cannot be read at all.
pub fn validate(trace: &Trace) -> Result<Validation, TraceError> {
    let manifest = trace.manifest();
    let steps = trace.steps_with_details()?;
    let requests = trace.requests()?;
    let telemetry = trace.telemetry()?;
    let mut v = Validation { checks: Vec::new(), relaxed: !manifest.complete };
    check_files(&mut v, trace)?;
    check_manifest(&mut v, manifest, steps.emitted_tokens.values().contains(&UNKNOWN_TOKEN));
    check_steps(&mut v, &steps);
    check_requests(&mut v, &steps, &requests, manifest);
    check_routes(&mut v, trace, &steps)?;
    check_kernels(&mut v, trace, &steps)?;
    check_hash(&mut v, &steps, manifest);
    check_telemetry(&mut v, &telemetry);
    Ok(v)
}

/// A bit that flips in packed ids makes other ids, which break no other rule.
fn check_files(v: &mut Validation, trace: &Trace) -> Result<(), TraceError> {
    let (mut same, mut unknown, mut broken) = (0u64, 0u64, None);
    let mut buffer = vec![0; 1 << 18];
    for part in trace.manifest().tables.values().flatten() {
        let Some(wanted) = part.crc32 else {
            unknown += 1;
            continue;
        };
        let path = trace.dir().join(&part.path);
        let failed = |source| TraceError::Io { path: path.clone(), action: "read", source };
        let (mut file, mut sum) = (File::open(&path).map_err(failed)?, crc32fast::Hasher::new());
        loop {
            match file.read(&mut buffer).map_err(failed)? {
                0 => break,
                n => sum.update(&buffer[..n]),
            }
        }
        if sum.finalize() == wanted {
            same += 1;
        } else {
            broken.get_or_insert_with(|| format!("{}: its bytes are not those that were written (CRC-32)", path.display()));
        }
    }
    let of_unknown = if unknown > 0 { format!(", {unknown} without a sum") } else { String::new() };
    v.add("part_files", broken, format!("{} as written{of_unknown}", counted_plain(same, "file")));
    Ok(())
}

fn check_manifest(v: &mut Validation, manifest: &Manifest, unknown_tokens: bool) {
    let model = &manifest.model;
    let ascending = |layers: &[u16]| layers.windows(2).all(|pair| pair[0] < pair[1]);
    let counts = manifest.window_completeness == WindowCompleteness::Counts;
    // Of acceptance or times alone, the model may be known by its configuration, and how many experts a token has may not.
    let unknown = model.experts_per_token == 0 && manifest.window_completeness == WindowCompleteness::None;
    let no_routes = counts || unknown || model.moe_layers.is_empty() && model.draft_layers.is_empty();
    let broken = if !no_routes && (model.experts_per_token == 0 || model.experts_per_token > model.experts) {
        Some(format!("{} experts per token of {}", model.experts_per_token, model.experts))
    } else if !ascending(&model.moe_layers) || model.moe_layers.last().is_some_and(|&last| last >= model.layers) {
        Some(format!("moe_layers are not ascending numbers below {}", model.layers))
    } else if !ascending(&model.draft_layers) {
        Some("draft_layers are not ascending".into())
    } else {
        None
    };
    let good = format!("{} of {} experts in {} layers", model.experts_per_token, model.experts, model.moe_layers.len());
    v.add("model_shape", broken, good);
    let hashed = manifest.token_hash.is_some();
    let broken = match (manifest.complete, manifest.incomplete_reason.is_some()) {
        (true, false) if hashed != unknown_tokens => None,
        (false, true) if !hashed => None,
        (true, _) if unknown_tokens => Some("complete, but it has a reason for being incomplete or a token_hash of unknown tokens".into()),
        (true, ..) => Some("complete, but it has a reason for being incomplete or no token_hash".into()),
        (false, ..) => Some("incomplete, but without a reason or with a token_hash".into()),
    };
    v.add("completeness", broken, if manifest.complete { "complete" } else { "incomplete, and says why: rules about the end are relaxed" });
}

fn first(steps: &Steps, mut broken: impl FnMut(usize) -> Option<String>) -> Option<String> {
    (0..steps.len()).find_map(|i| broken(i).map(|what| format!("steps, row {i}: step {}: {what}", steps.step_id[i])))
}

fn check_steps(v: &mut Validation, steps: &Steps) {
    // The reader refuses steps out of order.
    v.add("step_order", None, format!("{} in ascending order", counted_plain(steps.len(), "step")));
    let broken = first(steps, |i| {
        let (rows, accepted, tokens) = (steps.rows[i], steps.accepted[i], steps.input_tokens.get(i).len());
        let phase_rows = match steps.phase[i] {
            Phase::Prefill => rows >= 1,
            Phase::Decode => rows == 1,
            Phase::Verify => rows >= 2,
        };
        if !phase_rows {
            Some(format!("{rows} rows in a {} step", steps.phase[i].as_str()))
        } else if accepted >= rows || (steps.phase[i] != Phase::Verify && accepted > 0) {
            Some(format!("{accepted} drafts accepted in a {} step of {rows} rows", steps.phase[i].as_str()))
        } else if tokens != usize::from(rows) {
            Some(format!("{tokens} input tokens in {rows} rows"))
        } else {
            None
        }
    });
    v.add("step_rows", broken, "rows, accepted drafts and input tokens agree");
    let broken = first(steps, |i| {
        let rows = usize::from(steps.rows[i]);
        let parents = steps.parents[i].as_deref();
        let known = [&steps.draft_probs, &steps.draft_confidences].map(|of| of.get(i).and_then(|list| list.as_deref()));
        let bad_shares = |list: &[f32]| list.len() + 1 != rows || list.iter().any(|q| !(0.0..=1.0).contains(q));
        if parents.is_some_and(|p| p.len() != rows || wrong_parent(p).is_some()) {
            Some(format!("parents do not fit {rows} rows"))
        } else if known.into_iter().flatten().any(bad_shares) {
            Some(format!("draft probabilities or confidences do not fit {rows} rows"))
        } else {
            None
        }
    });
    v.add("step_drafts", broken, "parents, draft probabilities and confidences fit the rows");
    let mut passes = PassOrder::default();
    let broken = first(steps, |i| passes.next(steps.pass_id[i], steps.request_id[i]).err());
    v.add("step_passes", broken, "steps of a pass are of different requests and come together");
    let broken = first(steps, |i| {
        let (emitted, most) = (steps.emitted_tokens.get(i).len(), usize::from(steps.accepted[i]) + 1);
        // Verify and decode emit at least the bonus token, unless the request was cut before it.
        (emitted > most || (emitted == 0 && steps.phase[i] != Phase::Prefill))
            .then(|| format!("{emitted} tokens emitted, {most} are possible"))
    });
    v.add(
        "step_emitted",
        broken,
        format!("{}, at most accepted drafts + 1 a step", counted_plain(steps.emitted_tokens.values().len(), "token")),
    );
    let broken = first(steps, |i| {
        let before = i.checked_sub(1).map_or(i64::MIN, |b| steps.host_begin_ns[b]);
        (steps.host_end_ns[i] < steps.host_begin_ns[i]
            || steps.host_begin_ns[i] < before
            || steps.draft_host_ns[i] < 0
            || steps.target_host_ns[i] < 0)
            .then(|| "its times run backwards".into())
    });
    v.add("step_times", broken, "steps begin in order and end after they begin");
}

fn check_requests(v: &mut Validation, steps: &Steps, requests: &[RequestEvent], manifest: &Manifest) {
    let mut by_id = BTreeMap::new();
    let broken = requests.iter().enumerate().find_map(|(row, request)| {
        by_id.insert(request.request_id, row).map(|_| format!("requests, row {row}: request {} is there twice", request.request_id))
    });
    v.add("request_ids", broken, counted_plain(requests.len(), "request"));
    let known = |id: u32| by_id.contains_key(&id);
    // Of an incomplete trace, requests that had not ended are not there yet.
    let broken = if manifest.complete {
        first(steps, |i| (!known(steps.request_id[i])).then(|| format!("there is no request {}", steps.request_id[i])))
    } else {
        None
    };
    v.add(
        "step_request",
        broken,
        if manifest.complete { "every step's request is there" } else { "not checked: requests that had not ended are missing" },
    );
    let mut emitted: BTreeMap<u32, u64> = BTreeMap::new();
    for i in 0..steps.len() {
        *emitted.entry(steps.request_id[i]).or_default() += steps.emitted_tokens.get(i).len() as u64;
    }
    let broken = requests.iter().enumerate().find_map(|(row, request)| {
        let sum = emitted.get(&request.request_id).copied().unwrap_or(0);
        (sum != u64::from(request.generated_tokens))
            .then(|| format!("requests, row {row}: {} tokens generated, its steps emit {sum}", request.generated_tokens))
    });
    v.add("request_tokens", broken, "generated tokens are the sum over the steps");
    let broken = requests.iter().enumerate().find_map(|(row, request)| {
        // Not built: of a long text of brackets, values would be many times larger than it.
        let is_json = serde_json::from_str::<IgnoredAny>(&request.tags).is_ok();
        (!is_json || !request.tags.trim_start().starts_with(['{', '[']))
            .then(|| format!("requests, row {row}: tags are neither a JSON object nor a list"))
    });
    v.add("request_tags", broken, "tags are JSON");
}

fn check_routes(v: &mut Validation, trace: &Trace, steps: &Steps) -> Result<(), TraceError> {
    let model = &trace.manifest().model;
    let target: BTreeSet<u16> = model.moe_layers.iter().copied().collect();
    let draft: BTreeSet<u16> = model.draft_layers.iter().copied().collect();
    let mut broken_step = None;
    let mut broken_layer = None;
    let mut broken_row = None;
    let mut broken_ids = None;
    let mut broken_weight = None;
    let mut target_rows = vec![0u64; steps.len()];
    let mut by_layer: BTreeMap<u16, u64> = BTreeMap::new();
    let mut total = 0u64;
    for unit in trace.route_units()? {
        let mut reader = unit.read(true);
        // Steps ascend in both tables: one goes along with the other.
        let mut at = 0;
        while let Some(batch) = reader.next_batch()? {
            total += batch.len() as u64;
            for (rank, column) in batch.weights.iter().copied().flatten().enumerate() {
                let bad = |w: &f32| !(w.is_finite() && *w >= 0.0);
                if broken_weight.is_none()
                    && let Some(i) = column.iter().position(bad)
                {
                    let row = batch.first_row + i as u64;
                    broken_weight = Some(format!("{}, row {row}: w{rank} is {}", batch.part.display(), column[i]));
                }
            }
            for i in 0..batch.len() {
                let place = || format!("{}, row {}", batch.part.display(), batch.first_row + i as u64);
                let (step, layer, row, is_draft) = (batch.step_id[i], batch.layer[i], batch.row[i], batch.draft[i]);
                let mut set = ExpertSet::EMPTY;
                batch.ids.iter().for_each(|column| set.insert(column[i]));
                if broken_ids.is_none()
                    && usize::from(model.experts) <= super::expert_set::MAX_EXPERTS
                    && set.len() as usize != batch.ids.len()
                {
                    broken_ids = Some(format!("{}: an expert is there twice", place()));
                }
                let layers = if is_draft { &draft } else { &target };
                if broken_layer.is_none() && !layers.contains(&layer) {
                    let whose = if is_draft { "draft" } else { "target" };
                    broken_layer = Some(format!("{}: the {whose} has no routed layer {layer}", place()));
                }
                if steps.step_id.get(at) != Some(&step) {
                    at = steps.step_id.partition_point(|&id| id < step);
                }
                if steps.step_id.get(at) != Some(&step) {
                    broken_step.get_or_insert_with(|| format!("{}: there is no step {step}", place()));
                } else if !is_draft {
                    target_rows[at] += 1;
                    if steps.phase[at] != Phase::Prefill {
                        *by_layer.entry(layer).or_default() += 1;
                    }
                    if broken_row.is_none() && row >= steps.rows[at] {
                        broken_row = Some(format!("{}: row {row} of a step of {} rows", place(), steps.rows[at]));
                    }
                }
            }
        }
    }
    v.add(
        "route_order",
        None,
        format!("{} in order of step, layer and row; every id below {}", counted_plain(total, "row"), model.experts),
    );
    v.add("route_step", broken_step, "every row's step is there");
    v.add("route_layer", broken_layer, "every row's layer has a router");
    v.add("route_row", broken_row, "every row is one of its step");
    v.add("route_ids", broken_ids, "the experts of a row are distinct");
    let good =
        if trace.manifest().router_weights { "every gate weight is a number of at least 0" } else { "no gate weights were recorded" };
    v.add("route_weights", broken_weight, good);
    let full = trace.manifest().window_completeness == WindowCompleteness::Full;
    let declared = trace.manifest().irregular_steps;
    let irregular = |i: usize| {
        let want = u64::from(steps.rows[i]) * target.len() as u64;
        // Of a prefill a recorder may leave out routes: engines compute a prompt's last layer only where it is wanted.
        let left_out = steps.phase[i] == Phase::Prefill && target_rows[i] < want;
        (target_rows[i] != want && !left_out).then(|| format!("{} route rows, {want} expected", target_rows[i]))
    };
    let broken = full.then(|| match (0..steps.len()).filter(|&i| irregular(i).is_some()).count() as u64 {
        n if n == declared => None,
        n if declared > 0 => Some(format!("manifest.json, irregular_steps: {declared} steps lack routes, {n} do")),
        _ => first(steps, irregular),
    });
    let good = match declared {
        _ if !full => "not checked: the windows are not said to be full".into(),
        0 => "every window has all rows in every layer".into(),
        n => format!("as the manifest says, {n} steps lack rows; every other window has all rows in every layer"),
    };
    v.add("route_windows", broken.flatten(), good);
    let full = full && declared == 0;
    let counts: BTreeSet<u64> = target.iter().map(|layer| by_layer.get(layer).copied().unwrap_or(0)).collect();
    let broken = (full && counts.len() > 1)
        .then(|| format!("layers have from {:?} to {:?} rows", counts.first().unwrap_or(&0), counts.last().unwrap_or(&0)));
    let good = if declared == 0 { "every layer has the same number of rows behind the prompts" } else { "not checked: steps lack rows" };
    v.add("route_layers", broken, good);
    Ok(())
}

fn check_kernels(v: &mut Validation, trace: &Trace, steps: &Steps) -> Result<(), TraceError> {
    let model = &trace.manifest().model;
    let mut total = 0u64;
    let (mut broken_step, mut broken_layer, mut broken_time, mut broken_component) = (None, None, None, None);
    let mut at = 0;
    trace.each_kernels(|rows| {
        for i in 0..rows.len() {
            let place = || format!("kernels, row {}", total + i as u64);
            let (step, module) = (rows.step_id[i], rows.module[i]);
            while steps.step_id.get(at).is_some_and(|&id| id < step) {
                at += 1;
            }
            if broken_step.is_none() && steps.step_id.get(at) != Some(&step) {
                broken_step = Some(format!("{}: there is no step {step}", place()));
            }
            let known = |layer: u16| match module {
                Module::Target => layer < model.layers,
                Module::Draft => true,
            };
            if let Some(layer) = rows.layer[i].filter(|&layer| broken_layer.is_none() && !known(layer)) {
                broken_layer = Some(format!("{}: layer {layer} of a target of {} layers", place(), model.layers));
            }
            if broken_time.is_none() && rows.end_ns[i] < rows.begin_ns[i] {
                broken_time = Some(format!("{}: it ends before it begins", place()));
            }
            if broken_component.is_none() && module == Module::Draft && rows.component[i] != Component::Draft {
                let word = rows.component[i].as_str();
                broken_component = Some(format!("{}: the draft module's operation has the target's component {word}", place()));
            }
        }
        total += rows.len() as u64;
        Ok::<_, TraceError>(())
    })?;
    v.add("kernel_step", broken_step, format!("{total} operations in order of steps, every step is there"));
    v.add("kernel_layer", broken_layer, "every operation's layer is there");
    v.add("kernel_times", broken_time, "operations end after they begin");
    v.add("kernel_component", broken_component, "operations of the draft module are told apart");
    Ok(())
}

fn check_hash(v: &mut Validation, steps: &Steps, manifest: &Manifest) {
    // Requests in ascending order, their steps in order: sorted places, so that no token is copied.
    let mut order: Vec<usize> = (0..steps.len()).collect();
    order.sort_by_key(|&i| steps.request_id[i]);
    let computed = token_hash::of_lists(order.iter().map(|&i| steps.emitted_tokens.get(i)));
    let broken = match &manifest.token_hash {
        Some(stored) if *stored != computed => Some(format!("the manifest has {stored}, the steps give {computed}")),
        _ => None,
    };
    let good =
        if manifest.token_hash.is_some() { computed } else { "not checked: an incomplete trace or one of unknown tokens has none".into() };
    v.add("token_hash", broken, good);
}

fn check_telemetry(v: &mut Validation, samples: &[TelemetrySample]) {
    let broken = samples.windows(2).position(|pair| pair[1].time_ns < pair[0].time_ns);
    let broken = broken.map(|i| format!("telemetry, row {}: time runs backwards", i + 1));
    v.add("telemetry_order", broken, format!("{} in order of time", counted_plain(samples.len(), "sample")));
    let broken = samples.iter().enumerate().find_map(|(i, sample)| {
        let numbers = [
            (col::POWER_W, sample.power_w),
            (col::TEMPERATURE_C, sample.temperature_c),
            (col::HOST_LOAD, sample.host_load),
            (col::CPU_MHZ, sample.cpu_mhz),
        ];
        let (name, value) = numbers.into_iter().find_map(|(name, value)| value.filter(|v| !v.is_finite()).map(|v| (name, v)))?;
        Some(format!("telemetry, row {i}: {name} is {value}"))
    });
    v.add("telemetry_values", broken, "every value is a number or unknown");
}
