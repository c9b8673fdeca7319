//! One request of a serving engine, whatever its envelope looked like, and its way into the trace.
//!
//! Engines keep the rows of tokens that stayed: the prompt's and, of each window, the anchor's and the accepted drafts'.
//! The last generated token was never fed, so `rows = prompt + generated - 1 - start`.

use super::acceptance::Acceptance;
use super::events::{self, Source};
use super::plan::Plan;
use super::rows::{self, IdArray, Survey};
use super::{ImportError, LayerAxis, Options, Sink};
use crate::metric::counted_plain;
use crate::trace::event::UNKNOWN_TOKEN;
use crate::trace::manifest::{IdSpace, WindowCompleteness};
use crate::trace::{FinishReason, Phase, StepRoutes};
use std::ops::Range;
use std::path::Path;

/// Prompt rows of one step.
const PREFILL_ROWS: usize = 512;

/// A request as far as its response says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sample {
    /// The engine's name for it.
    pub id: String,
    /// The model's name.
    pub model: Option<String>,
    /// Length of the prompt.
    pub prompt_tokens: Option<usize>,
    /// The prompt's tokens.
    pub prompt_ids: Option<Vec<u32>>,
    /// Number of generated tokens.
    pub output_tokens: Option<usize>,
    /// The generated tokens.
    pub output_ids: Option<Vec<u32>>,
    /// Why it ended; `None` when nobody said.
    pub finish: Option<FinishReason>,
    /// Accepted drafts.
    pub acceptance: Option<Acceptance>,
    /// Expert ids of the kept rows.
    pub routed: Option<IdArray>,
}

/// What all requests of a run have in common, filled as they come.
#[derive(Debug)]
pub struct Run<'a> {
    path: &'a Path,
    options: &'a Options,
    sink: &'a mut Sink,
    engine: &'static str,
    /// Layers with routes, by place on the axis, and the axis; set by the first request with routes.
    axis: Option<Vec<u16>>,
    k: usize,
    /// Requests without routes that wait for the first one with them.
    waiting: Vec<Sample>,
    windows: u64,
    loose_rows: u64,
    draft_len: u16,
    captured_nothing: u64,
    without_anything: u64,
}

impl<'a> Run<'a> {
    /// A run that nothing is known of yet. `path` is named in errors.
    pub fn new(path: &'a Path, engine: &'static str, options: &'a Options, sink: &'a mut Sink) -> Self {
        Self {
            path,
            options,
            sink,
            engine,
            axis: None,
            k: 0,
            waiting: Vec::new(),
            windows: 0,
            loose_rows: 0,
            draft_len: 0,
            captured_nothing: 0,
            without_anything: 0,
        }
    }

    /// Names the file that the next requests are from.
    pub fn set_path(&mut self, path: &'a Path) {
        self.path = path;
    }

    fn wrong(&self, sample: &Sample, reason: impl std::fmt::Display) -> ImportError {
        let who = if sample.id.is_empty() { String::new() } else { format!("request {}: ", sample.id.escape_debug()) };
        ImportError::input(self.path, format!("{who}{reason}"))
    }

    /// Takes a request.
    ///
    /// # Errors
    /// When its numbers contradict each other or the options.
    pub fn add(&mut self, mut sample: Sample) -> Result<(), ImportError> {
        for doubt in sample.acceptance.iter().flat_map(|a| &a.doubts) {
            self.sink.warn("acceptance_doubtful", format!("request {}: {doubt}", sample.id.escape_debug()));
        }
        let survey = match sample.routed.take_if(|a| self.options.packed_weights && a.width > 0) {
            Some(packed) => {
                sample.routed = Some(packed.unpack_weights().map_err(|e| self.wrong(&sample, e))?);
                self.survey(&sample)?
            }
            None => self.survey(&sample)?,
        };
        let Some((array, survey)) = sample.routed.take().zip(survey) else {
            if sample.acceptance.as_ref().and_then(Acceptance::steps_in_order).is_none() {
                self.without_anything += 1;
                return Ok(());
            }
            if self.sink.has_begun() {
                return self.emit(&sample, None);
            }
            self.waiting.push(sample);
            return Ok(());
        };
        if survey.real_rows() == 0 || survey.k == 0 {
            self.captured_nothing += 1;
            survey.report(self.sink);
            return Ok(());
        }
        if array.bare {
            super::bare::check_config(self.options).map_err(|e| self.wrong(&sample, e))?;
            if let Some(doubt) = super::bare::doubt(&array, self.options.known_experts()) {
                self.sink.warn("shape_doubtful", format!("request {}: {doubt}", sample.id.escape_debug()));
            }
        }
        self.begin(&sample, &array, &survey)?;
        for waiting in std::mem::take(&mut self.waiting) {
            self.emit(&waiting, None)?;
        }
        survey.report(self.sink);
        self.emit(&sample, Some((&array, &survey)))
    }

    fn survey(&self, sample: &Sample) -> Result<Option<Survey>, ImportError> {
        let Some(array) = &sample.routed else { return Ok(None) };
        let (experts, k) = (self.options.known_experts(), self.options.known_k());
        let survey = Survey::of(array, experts, self.options.keep_padding);
        survey.check(array, experts, k).map_err(|e| self.wrong(sample, e))?;
        Ok(Some(survey))
    }

    /// Starts the trace with the first request that has routes; later ones must be of its shape.
    fn begin(&mut self, sample: &Sample, array: &IdArray, survey: &Survey) -> Result<(), ImportError> {
        let convention = LayerAxis::All;
        let axis = self.options.layer_axis(array.layers, &convention, survey.has_dense()).map_err(|e| self.wrong(sample, e))?;
        match &self.axis {
            None => {
                let k = self.options.known_k().map_or(survey.k, usize::from);
                if k > survey.k {
                    let reason = format!("rows have at most {} experts, --k or the model's configuration says {k}", survey.k);
                    return Err(self.wrong(sample, reason));
                }
                let source = Source {
                    engine: self.engine.into(),
                    model_name: sample.model.clone(),
                    k: u16::try_from(k).unwrap_or(u16::MAX),
                    window_completeness: WindowCompleteness::AcceptedOnly,
                    id_space: IdSpace::Logical,
                    router_weights: !array.weights.is_empty(),
                    ..Source::default()
                };
                self.sink.begin(self.path, &source)?;
                self.k = k;
                let routed = survey.routed.iter().filter(|r| **r).count();
                if survey.has_dense() {
                    let message = format!("{routed} of {} layers have routes; the others are dense or were not captured", array.layers);
                    self.sink.warn("layers_not_routed", message);
                }
                self.axis = Some(axis);
                Ok(())
            }
            Some(before) if *before != axis => {
                Err(self.wrong(sample, format!("{} layers, other requests have {}", axis.len(), before.len())))
            }
            Some(_) if survey.k > self.k => {
                Err(self.wrong(sample, format!("rows of {} experts, other requests have {}", survey.k, self.k)))
            }
            Some(_) => Ok(()),
        }
    }

    /// Ends the run.
    ///
    /// # Errors
    /// When there was nothing to import.
    pub fn finish(mut self, nothing: &str) -> Result<(), ImportError> {
        if !self.sink.has_begun() && !self.waiting.is_empty() {
            let model_name = self.waiting.iter().find_map(|s| s.model.clone());
            self.sink
                .begin(self.path, &Source { engine: self.engine.into(), model_name, id_space: IdSpace::Logical, ..Source::default() })?;
            self.sink.warn("no_routes", "the file has no expert ids: only acceptance is known");
            for waiting in std::mem::take(&mut self.waiting) {
                self.emit(&waiting, None)?;
            }
        }
        if !self.sink.has_begun() {
            let what = match self.captured_nothing {
                0 => nothing.to_owned(),
                n => format!("no routing in this file: all ids of {n} request(s) are padding; the engine's capture was silently skipped"),
            };
            return Err(ImportError::empty(self.path, what));
        }
        if self.captured_nothing > 0 {
            self.sink.warn(
                "requests_not_captured",
                format!("{} left out: all their ids are padding", counted_plain(self.captured_nothing, "request")),
            );
        }
        if self.without_anything > 0 {
            self.sink.warn(
                "requests_without_routes",
                format!("{} left out: no expert ids and no steps", counted_plain(self.without_anything, "request")),
            );
        }
        if self.loose_rows > 0 {
            let vllm = "; vLLM says it with --per-request-spec-decode-metrics detailed";
            let how = if self.engine == "vllm" { vllm } else { "" };
            let message =
                format!("{} generated rows stand as steps of their own: nobody said which were verified together{how}", self.loose_rows);
            self.sink.warn("steps_unknown", message);
        }
        let (windows, has_axis, draft_len) = (self.windows, self.axis.is_some(), self.draft_len);
        if let Some(facts) = self.sink.facts_mut() {
            facts.window_completeness = if windows > 0 && has_axis { WindowCompleteness::AcceptedOnly } else { WindowCompleteness::None };
            facts.drafter.draft_len = (windows > 0).then_some(draft_len);
        }
        Ok(())
    }

    /// Writes one request.
    fn emit(&mut self, sample: &Sample, routed: Option<(&IdArray, &Survey)>) -> Result<(), ImportError> {
        let cut = |e: String| match routed.and_then(|(array, _)| super::bare::other_shape(array, sample)) {
            Some(shape) => format!("{e} {shape}"),
            None => e,
        };
        let plan = Plan::of(sample, routed.map(|(array, _)| array.rows)).map_err(|e| self.wrong(sample, cut(e)))?;
        let request = self.sink.request_id();
        let mut at = plan.start;
        while at < plan.prompt {
            let end = (at + PREFILL_ROWS).min(plan.prompt);
            let mut step = events::step(request, Phase::Prefill, plan.tokens(sample, at..end));
            step.context_len = u32::try_from(at).unwrap_or(u32::MAX);
            step.emitted_tokens =
                if end == plan.prompt && plan.generated > Some(0) { plan.tokens(sample, end..end + 1) } else { Vec::new() };
            step.routes = self.routes(routed, at - plan.start..end - plan.start);
            self.sink.step(step)?;
            at = end;
        }
        match &plan.windows {
            Some(windows) => {
                for &window in windows {
                    self.window(sample, request, &plan, &mut at, window, routed)?;
                }
            }
            None => {
                while at < plan.end {
                    let mut step = events::step(request, Phase::Decode, plan.tokens(sample, at..at + 1));
                    step.context_len = u32::try_from(at).unwrap_or(u32::MAX);
                    step.emitted_tokens = plan.tokens(sample, at + 1..at + 2);
                    step.routes = self.routes(routed, at - plan.start..at + 1 - plan.start);
                    self.sink.step(step)?;
                    self.loose_rows += 1;
                    at += 1;
                }
            }
        }
        if let Some(doubt) = &plan.doubt {
            self.sink.warn("windows_unreliable", format!("request {}: {doubt}: its rows stand as single steps", sample.id.escape_debug()));
        }
        let tags = match &sample.acceptance {
            Some(acceptance) => serde_json::json!({ "acceptance": acceptance.to_json() }).to_string(),
            None => "{}".into(),
        };
        if let (Some(acceptance), None) = (&sample.acceptance, &plan.windows) {
            self.sink.warn(
                "acceptance_summary",
                format!("request {}: {}; in which order, nobody said", sample.id.escape_debug(), acceptance.sentence()),
            );
        }
        let prompt = u32::try_from(plan.prompt).unwrap_or(u32::MAX);
        self.sink.end_request(request, sample.id.clone(), prompt, sample.finish.unwrap_or(FinishReason::Unknown), tags)
    }

    fn window(
        &mut self,
        sample: &Sample,
        request: u32,
        plan: &Plan,
        at: &mut usize,
        (accepted, drafted): (u32, u32),
        routed: Option<(&IdArray, &Survey)>,
    ) -> Result<(), ImportError> {
        // Before anything is made of it: a number takes no room in the file.
        let rows = drafted.saturating_add(1);
        if rows > u32::from(u16::MAX) {
            return Err(self.wrong(sample, format!("{drafted} drafts in a step, whose rows are at most {}", u16::MAX)));
        }
        let kept = accepted as usize + 1;
        // The request may have ended within its last window.
        let end = (*at + kept).min(plan.end.max(*at + 1));
        if end < *at + kept {
            self.sink.leave_out("cut_windows", (*at + kept - end) as u64, "are missing: requests ended within their last window");
        }
        let mut tokens = plan.tokens(sample, *at..*at + kept);
        tokens.resize(rows as usize, UNKNOWN_TOKEN);
        let phase = if drafted > 0 { Phase::Verify } else { Phase::Decode };
        let mut step = events::step(request, phase, tokens);
        step.accepted = u16::try_from(accepted).map_err(|_| self.wrong(sample, format!("{accepted} accepted drafts in a step")))?;
        step.context_len = u32::try_from(*at).unwrap_or(u32::MAX);
        step.emitted_tokens = plan.tokens(sample, *at + 1..end + 1);
        step.routes = self.routes(routed, *at - plan.start..end - plan.start);
        self.sink.step(step)?;
        self.windows += u64::from(drafted > 0);
        self.draft_len = self.draft_len.max(u16::try_from(drafted).unwrap_or(u16::MAX));
        *at += kept;
        Ok(())
    }

    fn routes(&mut self, routed: Option<(&IdArray, &Survey)>, range: Range<usize>) -> StepRoutes {
        let mut routes = StepRoutes::new(self.k);
        if let (Some((array, survey)), Some(axis)) = (routed, &self.axis) {
            let range = range.start.min(array.rows)..range.end.min(array.rows);
            rows::push(&mut routes, array, survey, range, axis, &survey.routed, self.sink);
        }
        routes
    }
}
