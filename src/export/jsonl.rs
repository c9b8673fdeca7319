//! The documented line format, `docs/jsonl.md`: a header, then a line for each step, request and sample.

use super::ExportError;
use crate::trace::kernel::KernelEvent;
use crate::trace::{Module, RequestEvent, StepRoutes, Steps, TelemetrySample, Trace, step_routes};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Write;

/// The value of `format` in the header.
pub const FORMAT: &str = "specprof.jsonl/1";

/// Fields of the manifest that the importer sets itself.
const SET_BY_IMPORTER: [&str; 3] = ["format_version", "tables", "token_hash"];

/// Writes the whole trace as lines.
///
/// # Errors
/// When the trace cannot be read or the lines cannot be written.
pub fn write(trace: &Trace, out: &mut dyn Write) -> Result<(), ExportError> {
    line(out, &header(trace)?)?;
    let steps = trace.steps_with_details()?;
    let requests = trace.requests()?;
    let mut writer = Writer::new(trace, &steps, &requests, out);
    step_routes::for_each(trace, trace.manifest().router_weights, |step, routes| writer.up_to(step, routes))?;
    writer.rest()?;
    for (step, event) in trace.kernels()? {
        line(writer.out, &kernel(step, &event))?;
    }
    for sample in trace.telemetry()? {
        line(writer.out, &telemetry(&sample))?;
    }
    Ok(())
}

fn line(out: &mut dyn Write, value: &Value) -> Result<(), ExportError> {
    writeln!(out, "{value}").map_err(ExportError::Output)
}

fn header(trace: &Trace) -> Result<Value, ExportError> {
    let manifest = serde_json::to_value(trace.manifest()).map_err(|e| ExportError::Lacks(format!("manifest.json: {e}")))?;
    let mut header = Map::new();
    header.insert("type".into(), "header".into());
    header.insert("format".into(), FORMAT.into());
    let fields = manifest.as_object().cloned().unwrap_or_default();
    header.extend(fields.into_iter().filter(|(key, _)| !SET_BY_IMPORTER.contains(&key.as_str())));
    // A manifest has these only when they are false; here they stand for traces without a step that shows them, too.
    header.insert("host_times".into(), trace.manifest().host_times.into());
    Ok(Value::Object(header))
}

struct Writer<'a> {
    steps: &'a Steps,
    requests: &'a [RequestEvent],
    /// Index of the last step of each request.
    last: BTreeMap<u32, usize>,
    layers: Vec<u16>,
    next_step: usize,
    next_request: usize,
    out: &'a mut dyn Write,
}

impl<'a> Writer<'a> {
    fn new(trace: &Trace, steps: &'a Steps, requests: &'a [RequestEvent], out: &'a mut dyn Write) -> Self {
        let last = steps.request_id.iter().enumerate().map(|(i, &id)| (id, i)).collect();
        Self { steps, requests, last, layers: trace.manifest().model.moe_layers.clone(), next_step: 0, next_request: 0, out }
    }

    /// Writes the steps before `step_id`, which have no routes, then that step with its routes.
    fn up_to(&mut self, step_id: u32, routes: &StepRoutes) -> Result<(), ExportError> {
        while self.steps.step_id.get(self.next_step).is_some_and(|&id| id < step_id) {
            self.step(None)?;
        }
        if self.steps.step_id.get(self.next_step) != Some(&step_id) {
            return Err(ExportError::Lacks(format!(
                "routes: step {step_id} is not in the table `steps`; `specprof inspect --check` tells more"
            )));
        }
        self.step(Some(routes))
    }

    fn rest(&mut self) -> Result<(), ExportError> {
        while self.next_step < self.steps.len() {
            self.step(None)?;
        }
        while self.next_request < self.requests.len() {
            self.request()?;
        }
        Ok(())
    }

    /// Writes the next step, and the requests that end with it.
    fn step(&mut self, routes: Option<&StepRoutes>) -> Result<(), ExportError> {
        let (s, i) = (self.steps, self.next_step);
        self.next_step += 1;
        let mut step = Map::new();
        let mut put = |key: &str, value: Value| step.insert(key.to_owned(), value);
        put("type", "step".into());
        put("step_id", s.step_id[i].into());
        put("request_id", s.request_id[i].into());
        put("phase", s.phase[i].as_str().into());
        put("tokens", s.input_tokens.get(i).into());
        put("accepted", s.accepted[i].into());
        put("emitted", s.emitted_tokens.get(i).into());
        put("context_len", s.context_len[i].into());
        if let Some(Some(pass)) = s.pass_id.get(i) {
            put("pass_id", (*pass).into());
        }
        if let Some(Some(parents)) = s.parents.get(i) {
            put("parents", parents.as_slice().into());
        }
        if let Some(Some(probabilities)) = s.draft_probs.get(i) {
            put("draft_probs", floats(probabilities));
        }
        if let Some(Some(confidences)) = s.draft_confidences.get(i) {
            put("draft_confidences", floats(confidences));
        }
        if s.host_times {
            put("begin_ns", s.host_begin_ns[i].into());
            put("end_ns", s.host_end_ns[i].into());
            put("draft_ns", s.draft_host_ns[i].into());
            put("target_ns", s.target_host_ns[i].into());
        }
        if let Some(ns) = s.device_ns[i] {
            put("device_ns", ns.into());
        }
        if let Some(routes) = routes {
            self.routes(routes, &mut step)?;
        }
        line(self.out, &Value::Object(step))?;
        // In the order of their table, so that an import has it again.
        while self.requests.get(self.next_request).is_some_and(|r| self.last.get(&r.request_id).is_none_or(|&last| last <= i)) {
            self.request()?;
        }
        Ok(())
    }

    fn routes(&self, routes: &StepRoutes, step: &mut Map<String, Value>) -> Result<(), ExportError> {
        let mut target = vec![Value::Null; self.layers.len()];
        let mut weights = target.clone();
        let (mut draft, mut draft_weights) = (Vec::new(), Vec::new());
        let mut at = 0;
        for block in &routes.blocks {
            let range = at..at + usize::from(block.rows) * routes.k;
            at = range.end;
            let rows = |of: &dyn Fn(usize) -> Value| range.clone().step_by(routes.k.max(1)).map(of).collect::<Vec<_>>();
            let ids = rows(&|i| routes.ids.get(i..i + routes.k).unwrap_or_default().into());
            let of_weights = rows(&|i| floats(routes.weights.get(i..i + routes.k).unwrap_or_default()));
            if block.module == Module::Draft {
                draft.push(json!([block.layer, block.first_row, ids]));
                draft_weights.push(Value::Array(of_weights));
                continue;
            }
            let Ok(slot) = self.layers.binary_search(&block.layer) else {
                return Err(ExportError::Lacks(format!("routes: layer {} is not one of the manifest's moe_layers", block.layer)));
            };
            place(&mut target[slot], block.first_row, ids);
            place(&mut weights[slot], block.first_row, of_weights);
        }
        let kept = !routes.weights.is_empty();
        if target.iter().any(|layer| !layer.is_null()) {
            step.insert("routes".into(), Value::Array(target));
            if kept {
                step.insert("weights".into(), Value::Array(weights));
            }
        }
        if !draft.is_empty() {
            step.insert("draft_routes".into(), Value::Array(draft));
            if kept {
                step.insert("draft_weights".into(), Value::Array(draft_weights));
            }
        }
        Ok(())
    }

    fn request(&mut self) -> Result<(), ExportError> {
        let Some(r) = self.requests.get(self.next_request) else { return Ok(()) };
        self.next_request += 1;
        // Kept as text where writing it again as JSON would not give the same text.
        let tags = serde_json::from_str::<Value>(&r.tags).ok().filter(|v| (v.is_object() || v.is_array()) && v.to_string() == r.tags);
        let mut request = json!({
            "type": "request",
            "request_id": r.request_id,
            "id": r.id,
            "prompt_tokens": r.prompt_tokens,
            "generated_tokens": r.generated_tokens,
            "finish_reason": r.finish_reason.as_str(),
            "tags": tags.unwrap_or_else(|| r.tags.as_str().into()),
        });
        for (key, text) in [("prompt_text", &r.prompt_text), ("output_text", &r.output_text)] {
            if let Some(text) = text {
                request[key] = text.as_str().into();
            }
        }
        line(self.out, &request)
    }
}

/// Numbers in the fewest digits that give them again as `f32`; what is no number is `null`.
fn floats(values: &[f32]) -> Value {
    values.iter().map(|v| v.to_string().parse::<f64>().ok().filter(|v| v.is_finite())).collect()
}

/// Puts rows into a layer at their place; rows that are not known before them are `null`.
fn place(layer: &mut Value, first_row: u16, rows: Vec<Value>) {
    if layer.is_null() {
        *layer = Value::Array(Vec::new());
    }
    if let Value::Array(known) = layer {
        known.resize(known.len().max(usize::from(first_row)), Value::Null);
        known.extend(rows);
    }
}

/// An object without the keys whose values are unknown.
fn known(all: &Value) -> Value {
    let known = all.as_object().into_iter().flatten().filter(|(_, v)| !v.is_null());
    Value::Object(known.map(|(k, v)| (k.clone(), v.clone())).collect())
}

fn kernel(step: u32, k: &KernelEvent) -> Value {
    known(&json!({
        "type": "kernel",
        "step_id": step,
        "layer": k.layer,
        "module": k.module.as_str(),
        "component": k.component.as_str(),
        "name": k.name,
        "stream": k.stream,
        "begin_ns": k.begin_ns,
        "end_ns": k.end_ns,
        "correlation_id": k.correlation_id,
        "graph_node_id": k.graph_node_id,
        "grid": k.grid,
        "block": k.block,
        "registers": k.registers,
        "shared_bytes": k.shared_bytes,
    }))
}

fn telemetry(s: &TelemetrySample) -> Value {
    known(&json!({
        "type": "telemetry",
        "time_ns": s.time_ns,
        "sm_clock_mhz": s.sm_clock_mhz,
        "memory_clock_mhz": s.memory_clock_mhz,
        "power_w": s.power_w,
        "temperature_c": s.temperature_c,
        "throttle_reasons": s.throttle_reasons,
        "memory_used_bytes": s.memory_used_bytes,
        "host_load": s.host_load,
        "cpu_mhz": s.cpu_mhz,
        "rss_bytes": s.rss_bytes,
    }))
}
