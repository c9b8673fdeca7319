//! `specprof.jsonl/1`, the line format that any engine can emit. `docs/jsonl.md` describes it.

use super::events;
use super::input::Lines;
use super::jsonl_cut::cut_routes;
use super::jsonl_header::manifest;
use super::jsonl_line::{KernelLine, RequestKey, RequestLine, StepLine, kind_at_begin};
use super::jsonl_routes;
use super::jsonl_rules::{self, Rules};
use super::jsonl_table::Table;
use super::{Flag, Head, ImportError, Importer, Options, Sink, flags};
use crate::trace::event::UNKNOWN_CONTEXT;
use crate::trace::{FinishReason, KernelEvent, Manifest, Phase, RequestEvent, TelemetrySample, TraceError};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The value of `format`.
pub const FORMAT: &str = "specprof.jsonl/1";
const MAX_LINE: u64 = 64 << 20;
/// A manifest is never as long as this.
const MAX_HEADER: u64 = 4 << 20;
/// Operations of one step.
const MAX_KERNELS: usize = 1 << 17;

/// The line format.
pub struct JsonLines;

impl Importer for JsonLines {
    fn name(&self) -> &'static str {
        "jsonl"
    }

    fn about(&self) -> &'static str {
        "the line format of docs/jsonl.md, which any engine can emit"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::LINES
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
    /// Requests whose own line was there.
    ended: BTreeSet<u32>,
    names: BTreeMap<String, u32>,
    numbered: bool,
    last_step: Option<u32>,
    /// The steps so far, as ranges of consecutive numbers: first and last.
    steps: Vec<(u32, u32)>,
    /// Operations of the last step that has any.
    kernels: Option<(u32, Vec<KernelEvent>)>,
    text: bool,
    rules: Rules,
    number: u64,
}

impl<'a> File<'a> {
    fn new(path: &'a Path, options: &'a Options, sink: &'a mut Sink) -> Result<Self, ImportError> {
        let mut lines = Lines::open(path)?;
        let (number, text) = lines.next(MAX_HEADER)?.ok_or_else(|| ImportError::empty(path, "the file is empty"))?;
        let wrong = |reason: String| ImportError::input(path, format!("line {number}: {reason}"));
        let header: Value = serde_json::from_slice(text).map_err(|e| wrong(format!("not JSON: {e}")))?;
        if header.get("type").and_then(Value::as_str) != Some("header") {
            return Err(wrong("the first line must be the header, {\"type\":\"header\",\"format\":\"specprof.jsonl/1\",...}".into()));
        }
        match header.get("format").and_then(Value::as_str) {
            Some(FORMAT) => {}
            other => return Err(wrong(format!("format {other:?} is not known here; {FORMAT} is"))),
        }
        let facts = manifest(&header, options).map_err(wrong)?;
        let file = Self {
            path,
            options,
            sink,
            facts,
            open: BTreeMap::new(),
            ended: BTreeSet::new(),
            names: BTreeMap::new(),
            numbered: false,
            last_step: None,
            steps: Vec::new(),
            kernels: None,
            text: false,
            rules: Rules::default(),
            number: 0,
        };
        file.with_columns(&header)
    }

    /// Which optional columns there are, where the header does not say: as the first step, and the first one with routes.
    fn with_columns(mut self, header: &Value) -> Result<Self, ImportError> {
        let said = |key: &str| header.get(key).and_then(Value::as_bool);
        let (mut times, mut weights) = (said("host_times"), said("router_weights"));
        let mut lines = Lines::open(self.path)?;
        lines.next(MAX_LINE)?;
        while times.is_none() || weights.is_none() {
            let Some((number, text)) = lines.next(MAX_LINE)? else { break };
            self.number = number;
            if self.kind(text)? == "step" {
                let step = self.step_line(text)?;
                times = times.or(Some(step.begin_ns.is_some() && step.end_ns.is_some()));
                if step.routes.is_some() || step.draft_routes.is_some() {
                    weights = weights.or(Some(step.weights.is_some() || step.draft_weights.is_some()));
                }
            }
        }
        (self.facts.host_times, self.facts.router_weights) = (times.unwrap_or(false), weights.unwrap_or(false));
        Ok(self)
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> ImportError {
        ImportError::input(self.path, format!("line {}: {reason}", self.number))
    }

    /// A line's type, and whether it is the first thing in it.
    fn kind(&self, text: &[u8]) -> Result<String, ImportError> {
        #[derive(Deserialize)]
        struct Kind {
            r#type: Option<Value>,
        }
        if !text.starts_with(b"{") {
            return Err(self.wrong("not a JSON object"));
        }
        if let Some(kind) = kind_at_begin(text) {
            return Ok(String::from_utf8_lossy(kind).into_owned());
        }
        let kind: Kind = serde_json::from_slice(text).map_err(|e| self.wrong(format!("not a JSON object: {e}")))?;
        match kind.r#type {
            Some(Value::String(kind)) => Ok(kind),
            _ => Err(self.wrong("not an object with a `type`")),
        }
    }

    /// A line as what its type says.
    fn parse<'t, T: Deserialize<'t>>(&self, kind: &str, text: &'t [u8]) -> Result<T, ImportError> {
        serde_json::from_slice(text).map_err(|e| self.wrong(format!("{kind}: {e}")))
    }

    /// A step's line; its routes are most of it and are read apart.
    fn step_line(&self, text: &[u8]) -> Result<StepLine, ImportError> {
        let Some((rest, routes)) = cut_routes(text) else { return self.parse("step", text) };
        let mut line: StepLine = self.parse("step", &rest)?;
        line.routes = Table::Nested(routes);
        Ok(line)
    }

    fn read(mut self) -> Result<(), ImportError> {
        let mut lines = Lines::open(self.path)?;
        lines.next(MAX_LINE)?;
        self.sink.begin_with(self.path, self.facts.clone())?;
        while let Some((number, text)) = lines.next(MAX_LINE)? {
            self.number = number;
            let kind = self.kind(text)?;
            match kind.as_str() {
                "step" => self.step(self.step_line(text)?)?,
                "kernel" => self.kernel(self.parse(&kind, text)?)?,
                "request" => self.request(self.parse(&kind, text)?)?,
                "telemetry" => self.telemetry(text)?,
                "header" => return Err(self.wrong("a second header")),
                _ => {
                    // Whatever it is, it must be JSON.
                    let _: serde::de::IgnoredAny =
                        serde_json::from_slice(text).map_err(|e| self.wrong(format!("not a JSON object: {e}")))?;
                    self.sink.leave_out("other_lines", 1, "of a type that is not known here skipped");
                }
            }
        }
        self.finish()
    }

    fn telemetry(&mut self, text: &[u8]) -> Result<(), ImportError> {
        #[derive(Deserialize)]
        struct Time {
            time_ns: Option<i64>,
        }
        let time: Time = self.parse("telemetry", text)?;
        let time_ns = time.time_ns.ok_or_else(|| self.wrong("telemetry: `time_ns` is missing"))?;
        self.rules.telemetry(time_ns).map_err(|e| self.wrong(format!("telemetry: {e}")))?;
        let sample: TelemetrySample = self.parse("telemetry", text)?;
        self.sink.telemetry(sample)
    }

    /// Collects the operations of a step: they are handed on together.
    fn kernel(&mut self, line: KernelLine<'_>) -> Result<(), ImportError> {
        let step_id = line.step_id;
        let event = line.event().map_err(|e| self.wrong(format!("kernel: {e}")))?;
        // A header that does not say how many layers there are is completed by those that have a router.
        let layers = self.facts.model.moe_layers.last().map_or(0, |&last| last.saturating_add(1)).max(self.facts.model.layers);
        jsonl_rules::kernel(&event, layers).map_err(|e| self.wrong(format!("kernel: {e}")))?;
        let at = self.steps.partition_point(|&(first, _)| first <= step_id);
        if at.checked_sub(1).and_then(|at| self.steps.get(at)).is_none_or(|&(_, last)| step_id > last) {
            return Err(self.wrong(format!("kernel: there is no step {step_id} before it; operations stand after their step")));
        }
        match &mut self.kernels {
            Some((step, kernels)) if *step == step_id => {
                if kernels.len() >= MAX_KERNELS {
                    return Err(self.wrong(format!("kernel: more than {MAX_KERNELS} operations in step {step_id}")));
                }
                kernels.push(event);
                return Ok(());
            }
            Some((step, _)) if *step > step_id => {
                let step = *step;
                return Err(self.wrong(format!("kernel: step {step_id} after step {step}; operations stand in order of their steps")));
            }
            _ => {}
        }
        self.flush_kernels()?;
        self.kernels = Some((step_id, vec![event]));
        Ok(())
    }

    fn flush_kernels(&mut self) -> Result<(), ImportError> {
        match self.kernels.take() {
            Some((step_id, kernels)) => self.sink.kernels(step_id, kernels),
            None => Ok(()),
        }
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

    fn step(&mut self, mut line: StepLine) -> Result<(), ImportError> {
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
        let routes = jsonl_routes::routes(&mut line, &self.facts).map_err(|e| self.wrong(e))?;
        let request = self.request_id(line.request_id)?;
        if self.ended.contains(&request) {
            return Err(self.wrong(format!("a step of request {request}, whose own line stands before it; it comes after the last step")));
        }
        let open = self.open.entry(request).or_default();
        // A step behind the prompt has emitted its accepted drafts and one more, also where nobody said which tokens they are.
        let unsaid = if phase == Phase::Prefill { 0 } else { usize::from(accepted) + 1 };
        let emitted = line.emitted.unwrap_or_else(|| events::unknown_tokens(unsaid));
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
        match self.steps.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(step_id) => *last = step_id,
            _ => self.steps.push((step_id, step_id)),
        }
        let mut step = events::step(request, phase, line.tokens);
        step.step_id = step_id;
        step.accepted = accepted;
        step.context_len = context_len;
        step.parents = line.parents;
        step.emitted_tokens = emitted;
        let floats = |all: Vec<super::jsonl_table::Number>| all.into_iter().map(|p| p.0).collect();
        step.draft_probs = line.draft_probs.map(floats);
        step.draft_confidences = line.draft_confidences.map(floats);
        step.device_ns = line.device_ns;
        step.pass_id = line.pass_id;
        step.routes = routes;
        if self.facts.host_times {
            let (Some(begin), Some(end)) = (line.begin_ns, line.end_ns) else {
                return Err(self.wrong("`begin_ns` and `end_ns` are missing; other steps have them"));
            };
            (step.host_begin_ns, step.host_end_ns) = (begin, end);
            (step.draft_host_ns, step.target_host_ns) = (line.draft_ns.unwrap_or(0), line.target_ns.unwrap_or(0));
        }
        self.rules.step(&step).map_err(|e| self.wrong(e))?;
        self.sink.step_with_id(step).map_err(|error| match error {
            ImportError::Trace(TraceError::Event { what }) => self.wrong(what),
            other => other,
        })?;
        Ok(())
    }

    fn request(&mut self, line: RequestLine) -> Result<(), ImportError> {
        let request_id = self.request_id(line.request_id)?;
        if !self.ended.insert(request_id) {
            return Err(self.wrong(format!("request {request_id} has a line already")));
        }
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
        let generated_tokens = line.generated_tokens.unwrap_or(open.emitted);
        jsonl_rules::request(&tags, generated_tokens, open.emitted).map_err(|e| self.wrong(e))?;
        self.text |= line.prompt_text.is_some() || line.output_text.is_some();
        self.sink.request(RequestEvent {
            request_id,
            id: line.id.or(open.name).unwrap_or_default(),
            prompt_tokens: line.prompt_tokens.unwrap_or(open.prompt),
            generated_tokens,
            finish_reason,
            tags,
            prompt_text: line.prompt_text,
            output_text: line.output_text,
        })
    }

    fn finish(mut self) -> Result<(), ImportError> {
        self.flush_kernels()?;
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
