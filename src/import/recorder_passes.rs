//! Passes of SGLang's recorder to steps: windows cut, requests followed, what was accepted read off the positions.
//!
//! A recorded pass names no requests. Their rows follow each other in the batch's order; the next pass of a request begins
//! where the kept rows of this one end, so `accepted = start of the next - start of this - 1`. What the last window of a
//! request kept nobody recorded: it is left out and counted.

use super::events::{self, Source};
use super::follow::{match_batch, window_rows};
use super::pass_queue::{Ended, PassQueue, Ticket};
use super::recorder::Placement;
use super::recorder_pass::{Mode, Pass};
use super::rows::{self, IdArray, Survey};
use super::torch::{TorchFile, permuted};
use super::{ImportError, LayerAxis, Options, Sink};
use crate::metric::counted_plain;
use crate::trace::event::UNKNOWN_TOKEN;
use crate::trace::manifest::WindowCompleteness;
use crate::trace::{Phase, StepRoutes};
use std::ops::{Range, RangeInclusive};
use std::path::Path;

/// The recorder keeps so many experts of a row.
const MOST_EXPERTS: u16 = 8;
/// Tag of a request: the engine's number of the pass of each of its steps.
pub const PASS_TAG: &str = "forward_pass_ids";
/// Prompt rows of one step.
const PREFILL_ROWS: usize = 4096;

/// A request that may go on in the next pass.
struct Live {
    request: u32,
    /// Where its next row may be.
    next: RangeInclusive<u32>,
    /// Phase of its last step.
    phase: Phase,
    /// That step, waiting for what the next pass says of it.
    waiting: Option<Ticket>,
    prompt: u32,
    /// Ids of the passes that its steps were part of.
    passes: Vec<i64>,
}

/// The passes of a dump, on their way into the trace.
pub struct Passes<'a> {
    path: &'a Path,
    map: Placement,
    options: &'a Options,
    sink: &'a mut Sink,
    live: Vec<Live>,
    queue: PassQueue,
    /// Whether the pass before read prompts.
    prompts_before: bool,
    axis: Vec<u16>,
    k: usize,
    window: usize,
    /// Windows, and those of them in which every draft is token 0.
    windows: u64,
    zero_drafts: u64,
    joined: u64,
    doubtful: u64,
    unmatched_rows: u64,
}

impl<'a> Passes<'a> {
    /// Nothing yet.
    pub fn new(path: &'a Path, map: Placement, options: &'a Options, sink: &'a mut Sink) -> Self {
        Self {
            path,
            map,
            options,
            sink,
            live: Vec::new(),
            queue: PassQueue::default(),
            prompts_before: false,
            axis: Vec::new(),
            k: 0,
            window: 0,
            windows: 0,
            zero_drafts: 0,
            joined: 0,
            doubtful: 0,
            unmatched_rows: 0,
        }
    }

    fn wrong(&self, pass: &Pass, reason: impl std::fmt::Display) -> ImportError {
        ImportError::input(self.path, format!("record {}: {reason}", pass.number))
    }

    /// Imports all passes, in order.
    ///
    /// # Errors
    /// When the tensors cannot be read or contradict the lists, or windows cannot be told apart.
    pub fn import(mut self, file: &mut TorchFile, passes: Vec<Pass>) -> Result<(), ImportError> {
        let verify = || passes.iter().filter(|p| p.mode == Mode::Verify && p.real_rows() > 0);
        if verify().next().is_some() {
            let positions = verify().map(|p| p.positions.get(..p.real_rows()).unwrap_or_default());
            self.window = window_rows(positions, self.options.draft_len).map_err(|e| ImportError::input(self.path, e))?;
        }
        if let (0, Some(drafts)) = (self.window, self.options.draft_len) {
            return Err(ImportError::input(self.path, format!("--draft-len {drafts}: the dump has no verify pass; leave it out")));
        }
        let mut newest = i64::MIN;
        for pass in &passes {
            // The drafter's passes have numbers of their own: what decodes under a number that was there is one of them.
            let again = self.window > 0 && pass.id <= newest;
            let rows = pass.tokens.len() as u64;
            match pass.mode {
                Mode::Idle => continue,
                Mode::Draft => self.sink.leave_out("draft_passes", rows, "left out: the drafter's own passes"),
                Mode::Decode if again => self.sink.leave_out("draft_passes", rows, "left out: the drafter's own passes"),
                Mode::Other => self.sink.leave_out("other_passes", rows, "left out: passes of other kinds (forward_mode above 6)"),
                Mode::Extend | Mode::Mixed | Mode::Decode | Mode::Verify => {
                    newest = newest.max(pass.id);
                    self.pass(file, pass)?;
                    self.prompts_before = matches!(pass.mode, Mode::Extend | Mode::Mixed);
                }
            }
        }
        self.finish()
    }

    fn pass(&mut self, file: &mut TorchFile, pass: &Pass) -> Result<(), ImportError> {
        let rows = pass.real_rows();
        self.sink.leave_out("graph_padding", (pass.tokens.len() - rows) as u64, "left out: padding of captured graphs");
        let mut array = self.array(file, pass)?;
        // Padding that was given experts (HIP: expert 0) had a share of the pass.
        let mut whole = array.rows == pass.tokens.len() && (rows..array.rows).all(|row| array.row(row).iter().all(|&id| id < 0));
        if array.rows != pass.tokens.len() {
            // Whose rows these are nobody can say.
            let message = format!(
                "record {} has ids of {} rows for {} tokens: ids of such passes are left out",
                pass.number,
                array.rows,
                pass.tokens.len()
            );
            self.sink.warn("rows_mismatch", message);
            self.unmatched_rows += array.rows as u64;
            array = IdArray { layers: array.layers, width: array.width, ..IdArray::default() };
        }
        if array.rows > rows {
            array.ids.truncate(rows * array.layers * array.width);
            array.rows = rows;
        }
        let experts = self.map.experts().or(self.options.known_experts());
        let survey = Survey::of(&array, experts, self.options.keep_padding);
        survey.check(&array, experts, None).map_err(|e| self.wrong(pass, e))?;
        let padded = survey.padding.iter().take(rows).filter(|p| p.is_some()).count();
        if padded == rows && rows > 0 && array.rows > 0 {
            // A pass without any route: a dense drafter's, or a warm-up's.
            self.sink.leave_out(
                "passes_without_routes",
                rows as u64,
                "left out: passes without any route (a dense drafter's, or a warm-up's)",
            );
            return Ok(());
        }
        if survey.k > 0 && self.axis.is_empty() {
            self.begin(pass, &array, &survey)?;
        }
        if self.axis.is_empty() {
            return Ok(());
        }
        if array.layers != self.axis.len() {
            return Err(self.wrong(pass, format!("ids of {} layers, the passes before have {}", array.layers, self.axis.len())));
        }
        survey.report(self.sink);
        whole &= padded == 0;
        let segments = self.segments(pass, rows)?;
        self.queue.begin(whole);
        self.batch(pass, &segments, &array, &survey)?;
        self.queue.flush(self.sink)
    }

    /// Expert ids with rows first, in the asked id space.
    fn array(&self, file: &mut TorchFile, pass: &Pass) -> Result<IdArray, ImportError> {
        let turned = permuted(&pass.ids, &[1, 0, 2]).ok_or_else(|| self.wrong(pass, "topk_ids_of_layer has not three axes"))?;
        let numbers = file.read(&turned).map_err(|e| self.wrong(pass, format!("topk_ids_of_layer: {e}")))?;
        let mut ids = numbers.ids().map_err(|e| self.wrong(pass, format!("topk_ids_of_layer: {e}")))?;
        let [rows, layers, width] = *numbers.shape.as_slice() else { return Err(self.wrong(pass, "topk_ids_of_layer has not three axes")) };
        for (cell, chunk) in ids.chunks_mut(width.max(1)).enumerate() {
            self.map.map(cell % layers.max(1), chunk);
        }
        let array = IdArray::new(rows, layers, width, ids).map_err(|e| self.wrong(pass, e))?;
        Ok(IdArray { largest_storable: numbers.dtype.largest_id(), ..array })
    }

    fn begin(&mut self, pass: &Pass, array: &IdArray, survey: &Survey) -> Result<(), ImportError> {
        if let Some(k) = self.options.known_k().filter(|&k| k > MOST_EXPERTS) {
            let reason = format!("SGLang's recorder keeps {MOST_EXPERTS} experts of a row, the model has {k}: its routes are not whole");
            return Err(self.wrong(pass, reason));
        }
        self.axis = self.options.layer_axis(array.layers, &LayerAxis::All, survey.has_dense()).map_err(|e| self.wrong(pass, e))?;
        if let Some(facts) = self.sink.facts_mut() {
            // An earlier input has begun the trace.
            self.k = usize::from(facts.model.experts_per_token);
            return Ok(());
        }
        self.k = survey.k;
        let windows = self.window > 0;
        let source = Source {
            engine: "sglang".into(),
            drafter: if windows { "unknown".into() } else { "none".into() },
            draft_len: windows.then(|| u16::try_from(self.window - 1).unwrap_or(u16::MAX)),
            k: u16::try_from(survey.k).unwrap_or(u16::MAX),
            window_completeness: if windows { WindowCompleteness::Full } else { WindowCompleteness::None },
            id_space: self.map.id_space(),
            ..Source::default()
        };
        self.sink.begin(self.path, &source)?;
        let experts = self.map.experts();
        if let (Some(experts), Some(facts)) = (experts, self.sink.facts_mut()) {
            // Slots are more than the configuration's experts.
            facts.model.experts = experts;
            facts.model.experts_known = true;
        }
        if let Some(facts) = self.sink.facts_mut() {
            facts.id_space = self.map.id_space();
        }
        if survey.has_dense() {
            let routed = survey.routed.iter().filter(|r| **r).count();
            let message = format!("{routed} of {} layers have routes; the others are dense or were not recorded", array.layers);
            self.sink.warn("layers_not_routed", message);
        }
        Ok(())
    }

    /// The rows of each request, by the kind of pass.
    fn segments(&self, pass: &Pass, rows: usize) -> Result<Vec<Range<usize>>, ImportError> {
        match (pass.mode, &pass.lengths) {
            (Mode::Verify, _) => {
                if !rows.is_multiple_of(self.window) {
                    return Err(self.wrong(pass, format!("{rows} rows are not windows of {}", self.window)));
                }
                let windows: Vec<_> = (0..rows / self.window).map(|i| i * self.window..(i + 1) * self.window).collect();
                let chain = |w: &Range<usize>| {
                    pass.positions.get(w.clone()).unwrap_or_default().windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]))
                };
                match windows.iter().find(|w| !chain(w)) {
                    Some(w) => Err(self.wrong(pass, format!("rows {} to {} are not at consecutive positions", w.start, w.end - 1))),
                    None => Ok(windows),
                }
            }
            (Mode::Decode, _) => Ok((0..rows).map(|i| i..i + 1).collect()),
            (_, Some(lengths)) => {
                let mut at = 0usize;
                let mut segments = Vec::new();
                for &n in lengths.iter().filter(|&&n| n > 0) {
                    let end = at.saturating_add(n as usize);
                    segments.push(at..end);
                    at = end;
                }
                if at == rows { Ok(segments) } else { Err(self.wrong(pass, format!("extend_seq_lens has {at} rows, the pass {rows}"))) }
            }
            (_, None) => Err(self.wrong(pass, "a prompt's pass without extend_seq_lens")),
        }
    }

    /// Finds the requests of a pass again and adds their steps.
    fn batch(&mut self, pass: &Pass, segments: &[Range<usize>], array: &IdArray, survey: &Survey) -> Result<(), ImportError> {
        let start = |segment: &Range<usize>| pass.positions.get(segment.start).copied().unwrap_or(0);
        let starts: Vec<u32> = segments.iter().map(start).collect();
        let prompts = matches!(pass.mode, Mode::Extend | Mode::Mixed);
        let chunk = if prompts && self.prompts_before { self.chunk(&starts) } else { None };
        let expected: Vec<_> = self.live.iter().map(|l| l.next.clone()).collect();
        let one_row = |segment: &Range<usize>| !prompts || pass.mode == Mode::Mixed && segment.len() == 1;
        // Nobody goes on where there is no such position.
        let places: Vec<u32> = starts.iter().zip(segments).map(|(&at, s)| if one_row(s) { at } else { u32::MAX }).collect();
        let found = match_batch(&expected, &places);
        self.doubtful += found.doubtful as u64;
        let mut before: Vec<Option<Live>> = std::mem::take(&mut self.live).into_iter().map(Some).collect();
        let mut chunk = chunk;
        let mut next = Vec::with_capacity(segments.len());
        for ((segment, &at), matched) in segments.iter().zip(&starts).zip(&found.before) {
            let known = chunk.take().or_else(|| matched.and_then(|i| before.get_mut(i).and_then(Option::take)));
            let goes_on = known.is_some() && one_row(segment);
            let mut live = match known {
                Some(mut live) => {
                    let token = pass.tokens.get(segment.start).copied().unwrap_or(UNKNOWN_TOKEN);
                    self.resolve(&mut live, at, token, goes_on);
                    live
                }
                None => {
                    self.joined += u64::from(!prompts);
                    Live {
                        request: self.sink.request_id(),
                        next: 0..=0,
                        phase: Phase::Decode,
                        waiting: None,
                        prompt: at,
                        passes: Vec::new(),
                    }
                }
            };
            let phase = match pass.mode {
                Mode::Verify => Phase::Verify,
                Mode::Decode => Phase::Decode,
                _ if goes_on => Phase::Decode,
                _ => Phase::Prefill,
            };
            self.add(pass, segment, (at, phase), &mut live, array, survey)?;
            next.push(live);
        }
        if pass.mode == Mode::Extend {
            // Running requests wait while prompts are read, and stand before them afterwards.
            self.live = before.into_iter().flatten().chain(next).collect();
            return Ok(());
        }
        for ended in before.into_iter().flatten() {
            self.end(ended)?;
        }
        self.live = next;
        Ok(())
    }

    /// The prompt that the pass before has begun and this one goes on with: the last there, the first here.
    fn chunk(&mut self, starts: &[u32]) -> Option<Live> {
        let last = self.live.last().filter(|l| l.waiting.is_some() && l.phase == Phase::Prefill)?;
        if starts.first().is_some_and(|at| last.next.contains(at)) { self.live.pop() } else { None }
    }

    /// Completes the waiting step of a request that goes on at `at` with `token`.
    fn resolve(&mut self, live: &mut Live, at: u32, token: u32, goes_on: bool) {
        let Some(ticket) = live.waiting.take() else { return };
        let Some(step) = self.queue.step(ticket) else { return };
        match step.phase {
            // Another chunk of the prompt: nothing was emitted.
            Phase::Prefill if !goes_on => {}
            Phase::Prefill | Phase::Decode => step.emitted_tokens = vec![token],
            Phase::Verify => {
                let accepted = at.saturating_sub(step.context_len).saturating_sub(1);
                step.accepted = u16::try_from(accepted).unwrap_or(u16::MAX);
                step.emitted_tokens = step.input_tokens.get(1..=accepted as usize).unwrap_or_default().to_vec();
                step.emitted_tokens.push(token);
            }
        }
        self.queue.settle(ticket);
    }

    /// Adds the steps of one request in one pass; the last one waits.
    fn add(
        &mut self,
        pass: &Pass,
        segment: &Range<usize>,
        (at, phase): (u32, Phase),
        live: &mut Live,
        array: &IdArray,
        survey: &Survey,
    ) -> Result<(), ImportError> {
        let piece = if phase == Phase::Prefill { PREFILL_ROWS } else { segment.len() };
        let mut from = segment.start;
        while from < segment.end {
            let to = (from + piece).min(segment.end);
            if let Some(earlier) = live.waiting.take() {
                self.queue.settle(earlier);
            }
            let mut step = events::step(live.request, phase, pass.tokens.get(from..to).unwrap_or_default().to_vec());
            step.context_len = at.saturating_add(u32::try_from(from - segment.start).unwrap_or(u32::MAX));
            step.routes = StepRoutes::new(self.k);
            if self.k > 0 && array.rows > 0 {
                rows::push(&mut step.routes, array, survey, from..to, &self.axis, &survey.routed, self.sink);
            }
            // Cells that are no choice are missing in the middle of the pass.
            let routed = survey.routed.iter().filter(|r| **r).count();
            if step.routes.blocks.iter().map(|b| usize::from(b.rows)).sum::<usize>() != routed * (to - from) {
                self.queue.lacks_rows();
            }
            live.phase = phase;
            live.waiting = Some(self.queue.push(step));
            live.passes.push(pass.id);
            from = to;
        }
        let len = u32::try_from(segment.len()).unwrap_or(u32::MAX);
        let end = at.saturating_add(len);
        live.next = if phase == Phase::Verify { at.saturating_add(1)..=end } else { end..=end };
        match phase {
            Phase::Prefill => live.prompt = end,
            Phase::Verify => {
                self.windows += 1;
                let drafts = pass.tokens.get(segment.start + 1..segment.end).unwrap_or_default();
                self.zero_drafts += u64::from(!drafts.is_empty() && drafts.iter().all(|&token| token == 0));
            }
            Phase::Decode => {}
        }
        Ok(())
    }

    /// Ends a request that is in no batch any more.
    fn end(&mut self, mut live: Live) -> Result<(), ImportError> {
        if let Some(ticket) = live.waiting.take() {
            if live.phase == Phase::Verify {
                live.passes.pop();
                let rows = self.queue.leave_out(ticket).map_or(0, |step| step.input_tokens.len());
                let what = "left out: the last window of a request, of which nobody recorded how much was accepted";
                self.sink.leave_out("last_windows", rows as u64, what);
            } else {
                if let Some(step) = self.queue.step(ticket) {
                    step.emitted_tokens = events::unknown_tokens(1);
                }
                self.queue.settle(ticket);
            }
        }
        if live.passes.is_empty() {
            return Ok(());
        }
        let tags = serde_json::json!({ PASS_TAG: live.passes }).to_string();
        self.queue.end(Ended { request: live.request, prompt: live.prompt, tags }, self.sink)
    }

    fn finish(mut self) -> Result<(), ImportError> {
        for live in std::mem::take(&mut self.live) {
            self.end(live)?;
        }
        std::mem::take(&mut self.queue).finish(self.sink)?;
        if !self.sink.has_begun() {
            return Err(ImportError::empty(self.path, "no routes in any record: only passes without ids were recorded"));
        }
        self.sink.leave_out("unmatched_rows", self.unmatched_rows, "of ids left out: they are not as many as the pass has tokens");
        if self.joined > 0 {
            let message = format!(
                "{} that ran when the recording began, or were lost sight of: the prompts are not in it",
                counted_plain(self.joined, "request")
            );
            self.sink.warn("requests_joined", message);
        }
        if self.doubtful > 0 {
            let message = format!(
                "positions fitted more than one request {}: such requests are taken for new ones",
                counted_plain(self.doubtful, "time")
            );
            self.sink.warn("requests_doubtful", message);
        }
        if self.zero_drafts > 0 && self.zero_drafts * 2 > self.windows {
            let message = format!(
                "in {} of {} windows every draft is token 0: the drafter is broken, overlap and acceptance mean nothing",
                self.zero_drafts, self.windows
            );
            self.sink.warn("drafter_broken", message);
        }
        Ok(())
    }
}
