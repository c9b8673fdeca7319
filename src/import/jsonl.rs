//! `specprof.jsonl/1`, the line format that any engine can emit. `docs/jsonl.md` describes it.

use super::events;
use super::input::Lines;
use super::jsonl_header::manifest;
use super::jsonl_line::{Nested, RequestKey, RequestLine, StepLine, Table};
use super::{Head, ImportError, Importer, Options, Sink};
use crate::trace::event::UNKNOWN_CONTEXT;
use crate::trace::{FinishReason, Manifest, Module, Phase, RequestEvent, StepRoutes, TelemetrySample, TraceError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The value of `format`.
pub const FORMAT: &str = "specprof.jsonl/1";
const MAX_LINE: u64 = 64 << 20;
/// In all k places of a row: not known.
const UNKNOWN_ID: u16 = u16::MAX;

/// The line format.
pub struct JsonLines;

impl Importer for JsonLines {
    fn name(&self) -> &'static str {
        "jsonl"
    }

    fn about(&self) -> &'static str {
        "the line format of docs/jsonl.md, which any engine can emit"
    }

    fn sniff(&self, head: &Head) -> bool {
        head.first() == Some(b'{') && head.has("specprof.jsonl/")
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        match inputs {
            [path] => File::new(path, options, sink)?.read(),
            [] => Ok(()),
            [_, second, ..] => Err(ImportError::input(second, "one file makes one trace; import them into traces of their own")),
        }
    }
}

/// What is known of a request so far.
#[derive(Debug, Default)]
struct Open {
    name: Option<String>,
    context: u32,
    prompt: u32,
    emitted: u32,
}

struct File<'a> {
    path: &'a Path,
    options: &'a Options,
    sink: &'a mut Sink,
    facts: Manifest,
    /// Requests with steps and without their own line.
    open: BTreeMap<u32, Open>,
    names: BTreeMap<String, u32>,
    numbered: bool,
    last_step: Option<u32>,
    text: bool,
    number: u64,
}

impl<'a> File<'a> {
    fn new(path: &'a Path, options: &'a Options, sink: &'a mut Sink) -> Result<Self, ImportError> {
        let mut lines = Lines::open(path)?;
        let (number, text) = lines.next(MAX_LINE)?.ok_or_else(|| ImportError::empty(path, "the file is empty"))?;
        let wrong = |reason: String| ImportError::input(path, format!("line {number}: {reason}"));
        let header: Value = serde_json::from_slice(text).map_err(|e| wrong(format!("not JSON: {e}")))?;
        if header.get("type").and_then(Value::as_str) != Some("header") {
            return Err(wrong("the first line must be the header, {\"type\":\"header\",\"format\":\"specprof.jsonl/1\",...}".into()));
        }
        match header.get("format").and_then(Value::as_str) {
            Some(FORMAT) => {}
            other => return Err(wrong(format!("format {other:?} is not known here; {FORMAT} is"))),
        }
        let facts = manifest(&header, options, sink).map_err(wrong)?;
        let file = Self {
            path,
            options,
            sink,
            facts,
            open: BTreeMap::new(),
            names: BTreeMap::new(),
            numbered: false,
            last_step: None,
            text: false,
            number: 0,
        };
        file.with_columns(&header)
    }

    /// Which optional columns there are, where the header does not say: as the first step, and the first one with routes.
    fn with_columns(mut self, header: &Value) -> Result<Self, ImportError> {
        let mut lines = Lines::open(self.path)?;
        lines.next(MAX_LINE)?;
        let (mut times, mut weights) = (None, None);
        while let Some((number, text)) = lines.next(MAX_LINE)? {
            self.number = number;
            if let Some(step) = self.step_of(text)? {
                times = times.or(Some(step.begin_ns.is_some() && step.end_ns.is_some()));
                if step.routes.is_some() || step.draft_routes.is_some() {
                    weights = Some(step.weights.is_some() || step.draft_weights.is_some());
                    break;
                }
            }
        }
        let said = |key: &str| header.get(key).and_then(Value::as_bool);
        self.facts.host_times = said("host_times").or(times).unwrap_or(false);
        self.facts.router_weights = said("router_weights").or(weights).unwrap_or(false);
        Ok(self)
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> ImportError {
        ImportError::input(self.path, format!("line {}: {reason}", self.number))
    }

    fn object(&self, text: &[u8]) -> Result<(String, Value), ImportError> {
        let value: Value = serde_json::from_slice(text).map_err(|e| self.wrong(format!("not JSON: {e}")))?;
        let kind = value.get("type").and_then(Value::as_str).map(str::to_owned);
        let kind = kind.filter(|_| value.is_object()).ok_or_else(|| self.wrong("not an object with a `type`"))?;
        Ok((kind, value))
    }

    /// The step in a line, when it is one.
    fn step_of(&self, text: &[u8]) -> Result<Option<StepLine>, ImportError> {
        // Steps are almost all lines: they are read at once, and everything else a second time.
        #[derive(serde::Deserialize)]
        struct Kind {
            r#type: Option<String>,
        }
        let kind: Kind = serde_json::from_slice(text).map_err(|e| self.wrong(format!("not a JSON object: {e}")))?;
        if kind.r#type.as_deref() != Some("step") {
            return Ok(None);
        }
        serde_json::from_slice(text).map(Some).map_err(|e| self.wrong(format!("step: {e}")))
    }

    fn read(mut self) -> Result<(), ImportError> {
        let mut lines = Lines::open(self.path)?;
        lines.next(MAX_LINE)?;
        self.sink.begin_with(self.path, self.facts.clone())?;
        while let Some((number, text)) = lines.next(MAX_LINE)? {
            self.number = number;
            if let Some(step) = self.step_of(text)? {
                self.step(step)?;
                continue;
            }
            let (kind, value) = self.object(text)?;
            match kind.as_str() {
                "request" => {
                    let line = serde_json::from_value(value).map_err(|e| self.wrong(format!("request: {e}")))?;
                    self.request(line)?;
                }
                "telemetry" => {
                    if value.get("time_ns").is_none_or(Value::is_null) {
                        return Err(self.wrong("telemetry: `time_ns` is missing"));
                    }
                    let sample: TelemetrySample = serde_json::from_value(value).map_err(|e| self.wrong(format!("telemetry: {e}")))?;
                    self.sink.telemetry(sample)?;
                }
                "header" => return Err(self.wrong("a second header")),
                _ => self.sink.leave_out("other_lines", 1, "of a type that is not known here skipped"),
            }
        }
        self.finish()
    }

    fn request_id(&mut self, key: RequestKey) -> Result<u32, ImportError> {
        match key {
            RequestKey::Number(_) if !self.names.is_empty() => Err(self.wrong("`request_id` is a number here and a text before")),
            RequestKey::Number(id) => {
                self.numbered = true;
                Ok(id)
            }
            RequestKey::Name(_) if self.numbered => Err(self.wrong("`request_id` is a text here and a number before")),
            RequestKey::Name(name) => {
                let next = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
                let id = *self.names.entry(name.clone()).or_insert(next);
                self.open.entry(id).or_default().name.get_or_insert(name);
                Ok(id)
            }
        }
    }

    fn step(&mut self, line: StepLine) -> Result<(), ImportError> {
        let rows = line.tokens.len();
        let accepted = line.accepted.unwrap_or(0);
        let phase = match &line.phase {
            Some(word) => Phase::parse(word).ok_or_else(|| self.wrong(format!("`{}` is not a phase", word.escape_debug())))?,
            None if line.accepted.is_some() && rows > 1 => Phase::Verify,
            None if rows == 1 => Phase::Decode,
            None => Phase::Prefill,
        };
        let fits = match phase {
            Phase::Prefill => rows >= 1,
            Phase::Decode => rows == 1,
            Phase::Verify => rows >= 2,
        };
        if !fits || usize::from(accepted) >= rows || (phase != Phase::Verify && accepted > 0) {
            return Err(self.wrong(format!("{rows} tokens and {accepted} accepted drafts in a {} step", phase.as_str())));
        }
        let routes = self.routes(&line, rows)?;
        let request = self.request_id(line.request_id)?;
        let open = self.open.entry(request).or_default();
        let emitted = line.emitted.unwrap_or_default();
        let kept = if phase == Phase::Prefill { u32::try_from(rows).unwrap_or(u32::MAX) } else { u32::from(accepted) + 1 };
        let context_len = line.context_len.unwrap_or(open.context);
        if context_len != UNKNOWN_CONTEXT {
            open.context = context_len.saturating_add(kept);
        }
        open.emitted = open.emitted.saturating_add(u32::try_from(emitted.len()).unwrap_or(u32::MAX));
        if phase == Phase::Prefill {
            open.prompt = open.prompt.saturating_add(kept);
        }
        let next = match self.last_step {
            None => 0,
            Some(last) => last.checked_add(1).ok_or_else(|| self.wrong("too many steps"))?,
        };
        let step_id = line.step_id.unwrap_or(next);
        if step_id < next {
            return Err(self.wrong(format!("step_id {step_id} does not come after the step before")));
        }
        self.last_step = Some(step_id);
        let mut step = events::step(request, phase, line.tokens);
        step.step_id = step_id;
        step.accepted = accepted;
        step.context_len = context_len;
        step.parents = line.parents;
        step.emitted_tokens = emitted;
        step.draft_probs = line.draft_probs;
        step.device_ns = line.device_ns;
        step.routes = routes;
        if self.facts.host_times {
            let (Some(begin), Some(end)) = (line.begin_ns, line.end_ns) else {
                return Err(self.wrong("`begin_ns` and `end_ns` are missing; other steps have them"));
            };
            (step.host_begin_ns, step.host_end_ns) = (begin, end);
            (step.draft_host_ns, step.target_host_ns) = (line.draft_ns.unwrap_or(0), line.target_ns.unwrap_or(0));
        }
        self.sink.step_with_id(step).map_err(|error| match error {
            ImportError::Trace(TraceError::Event { what }) => self.wrong(what),
            other => other,
        })?;
        Ok(())
    }

    fn routes(&self, line: &StepLine, rows: usize) -> Result<StepRoutes, ImportError> {
        let model = &self.facts.model;
        let k = usize::from(model.experts_per_token);
        let mut routes = StepRoutes::new(k);
        let layers = model.moe_layers.len();
        let nested = self.table(&line.routes, rows, layers, k, "routes", |b: [u8; 2]| u16::from_le_bytes(b))?;
        let weights = self.table(&line.weights, rows, layers, k, "weights", |b: [u8; 4]| f32::from_le_bytes(b))?;
        let weight_rows = self.facts.router_weights;
        for (place, (layer, &number)) in nested.iter().zip(&model.moe_layers).enumerate() {
            let of_layer = weights.get(place).and_then(Option::as_deref).unwrap_or_default();
            let mut run = Run::default();
            for (row, ids) in layer.iter().flatten().enumerate() {
                let known = ids.as_deref().filter(|ids| !ids.iter().all(|&id| id == UNKNOWN_ID));
                let Some(ids) = known else {
                    run.flush(&mut routes, Module::Target, number);
                    continue;
                };
                let gates = of_layer.get(row).and_then(Option::as_deref).unwrap_or_default();
                self.check_row(ids, if weight_rows { Some(gates) } else { None }, number, row)?;
                run.add(row, ids, if weight_rows { gates } else { &[] });
            }
            run.flush(&mut routes, Module::Target, number);
        }
        for (entry, (layer, first, all)) in line.draft_routes.iter().flatten().enumerate() {
            let gates = line.draft_weights.as_ref().and_then(|w| w.get(entry)).map(Vec::as_slice).unwrap_or_default();
            let mut run = Run::default();
            for (row, ids) in all.iter().enumerate() {
                let gates = gates.get(row).map(Vec::as_slice).unwrap_or_default();
                self.check_row(ids, if weight_rows { Some(gates) } else { None }, *layer, row)?;
                run.add(usize::from(*first) + row, ids, if weight_rows { gates } else { &[] });
            }
            run.flush(&mut routes, Module::Draft, *layer);
        }
        Ok(routes)
    }

    fn check_row(&self, ids: &[u16], gates: Option<&[f32]>, layer: u16, row: usize) -> Result<(), ImportError> {
        let model = &self.facts.model;
        let place = format!("layer {layer}, row {row}");
        if ids.len() != usize::from(model.experts_per_token) {
            return Err(self.wrong(format!("{place}: {} experts, the header says {}", ids.len(), model.experts_per_token)));
        }
        if let Some(id) = ids.iter().find(|&&id| id >= model.experts) {
            return Err(self.wrong(format!("{place}: expert {id} of {}", model.experts)));
        }
        if gates.is_some_and(|g| g.len() != ids.len()) {
            return Err(self.wrong(format!("{place}: {} weights for {} experts", gates.map_or(0, <[f32]>::len), ids.len())));
        }
        Ok(())
    }

    /// A table as nested lists, whichever way it was written.
    fn table<const N: usize, T: Clone>(
        &self,
        table: &Table<T>,
        rows: usize,
        layers: usize,
        k: usize,
        what: &str,
        of: impl Fn([u8; N]) -> T,
    ) -> Result<Nested<T>, ImportError> {
        match table {
            Table::None => Ok(Vec::new()),
            Table::Nested(nested) => {
                if nested.len() != layers {
                    return Err(self.wrong(format!("{what} of {} layers, the header has {layers} in `moe_layers`", nested.len())));
                }
                if let Some(layer) = nested.iter().flatten().find(|l| l.len() > rows) {
                    return Err(self.wrong(format!("{what} of {} rows for {rows} tokens", layer.len())));
                }
                Ok(nested.clone())
            }
            Table::Text(text) => {
                let bytes = STANDARD.decode(text).map_err(|e| self.wrong(format!("{what}: not base64: {e}")))?;
                if Some(bytes.len()) != rows.checked_mul(layers * k * N) {
                    return Err(self.wrong(format!("{what}: {} bytes are not {layers} layers of {rows} rows of {k}", bytes.len())));
                }
                let values: Vec<T> = bytes.as_chunks::<N>().0.iter().map(|b| of(*b)).collect();
                let layer = |chunk: &[T]| Some(chunk.chunks(k.max(1)).map(|row| Some(row.to_vec())).collect());
                Ok(values.chunks((rows * k).max(1)).map(layer).collect())
            }
        }
    }

    fn request(&mut self, line: RequestLine) -> Result<(), ImportError> {
        let request_id = self.request_id(line.request_id)?;
        let open = self.open.remove(&request_id).unwrap_or_default();
        let finish_reason = match line.finish_reason.as_deref() {
            None => FinishReason::Length,
            Some(word) => {
                FinishReason::parse(word).ok_or_else(|| self.wrong(format!("`{}` is not a finish_reason", word.escape_debug())))?
            }
        };
        let tags = match line.tags {
            None => "{}".to_owned(),
            Some(Value::String(text)) => text,
            Some(value @ (Value::Object(_) | Value::Array(_))) => value.to_string(),
            Some(_) => return Err(self.wrong("`tags` is neither an object nor a list")),
        };
        self.text |= line.prompt_text.is_some() || line.output_text.is_some();
        self.sink.request(RequestEvent {
            request_id,
            id: line.id.or(open.name).unwrap_or_default(),
            prompt_tokens: line.prompt_tokens.unwrap_or(open.prompt),
            generated_tokens: line.generated_tokens.unwrap_or(open.emitted),
            finish_reason,
            tags,
            prompt_text: line.prompt_text,
            output_text: line.output_text,
        })
    }

    fn finish(mut self) -> Result<(), ImportError> {
        for (id, open) in std::mem::take(&mut self.open) {
            // Cut off, unless the whole trace was: then it had not ended.
            if !self.facts.complete {
                continue;
            }
            self.sink.request(RequestEvent {
                request_id: id,
                id: open.name.unwrap_or_default(),
                prompt_tokens: open.prompt,
                generated_tokens: open.emitted,
                finish_reason: FinishReason::Aborted,
                tags: "{}".into(),
                prompt_text: None,
                output_text: None,
            })?;
        }
        let (text, options) = (self.text, self.options);
        if let Some(facts) = self.sink.facts_mut() {
            facts.text_stored |= text;
            if let Some(space) = options.id_space {
                facts.id_space = space;
            }
        }
        if !self.facts.complete {
            self.sink.incomplete(self.facts.incomplete_reason.clone().unwrap_or_else(|| "the engine's trace was incomplete".into()));
        }
        Ok(())
    }
}

/// Consecutive known rows of a layer.
#[derive(Default)]
struct Run {
    first: usize,
    ids: Vec<u16>,
    weights: Vec<f32>,
}

impl Run {
    fn add(&mut self, row: usize, ids: &[u16], weights: &[f32]) {
        if self.ids.is_empty() {
            self.first = row;
        }
        self.ids.extend_from_slice(ids);
        self.weights.extend_from_slice(weights);
    }

    fn flush(&mut self, routes: &mut StepRoutes, module: Module, layer: u16) {
        if !self.ids.is_empty() {
            routes.push(module, layer, u16::try_from(self.first).unwrap_or(u16::MAX), &self.ids, &self.weights);
            self.ids.clear();
            self.weights.clear();
        }
    }
}
