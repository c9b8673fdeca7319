//! Runs a plan's requests one after the other, into a probe or into a trace.

use super::backend::Backend;
use super::bandwidth::copy_gb_per_s;
use super::facts::run_facts;
use super::overhead::TimingCost;
use super::second_pass::{self, FirstPass};
use super::{Plan, RecordError};
use crate::engine::Routing;
use crate::engine::clock::Clock;
use crate::engine::cuda::{MemoryPlan, Opening};
use crate::engine::drafter::DraftKind;
use crate::engine::speculate::{Request, Speculator};
use crate::trace::manifest::Warning;
use crate::trace::telemetry::{HostSampler, SAMPLE_INTERVAL};
use crate::trace::token_hash::TokenHasher;
use crate::trace::{
    Ending, FinishReason, KernelEvent, Manifest, Phase, Probe, RequestEvent, StepEvent, Throttling, TraceError, TraceWriter, WriterOptions,
};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// What was done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests that have ended.
    pub requests: u32,
    /// All steps.
    pub steps: u64,
    /// Steps of one row, without drafts.
    pub decode_steps: u64,
    /// Steps with drafts.
    pub verify_steps: u64,
    /// Drafts accepted in them.
    pub accepted: u64,
    /// Emitted tokens.
    pub tokens: u64,
    /// Baseline steps among the decode steps.
    pub baseline_steps: u64,
    /// Windows that the end of the context cut short.
    pub short_windows: u64,
    /// Whether the run was stopped.
    pub interrupted: bool,
}

impl Totals {
    /// τ: accepted drafts + 1 per verify step; `None` without verify steps.
    pub fn tokens_per_step(&self) -> Option<f64> {
        (self.verify_steps > 0).then(|| self.accepted as f64 / self.verify_steps as f64 + 1.0)
    }
}

/// What a progress callback is told.
#[derive(Debug, Clone, Copy)]
pub enum Progress {
    /// While the model is brought to a device, before anything is recorded.
    Opening(Opening),
    /// After every step and every request.
    Running(Running),
}

/// How far a run is.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    /// The totals.
    pub totals: Totals,
    /// Requests of the plan.
    pub requests: usize,
    /// Tokens that are no longer to come: generated, or not wanted because a request ended early.
    pub settled_tokens: u64,
    /// Whether this is the second pass over the prompts.
    pub second_pass: bool,
}

/// A finished recording.
#[derive(Debug)]
pub struct Recording {
    /// What was planned of a device's memory; `None` without a device.
    pub memory: Option<MemoryPlan>,
    /// What was done.
    pub totals: Totals,
    /// The trace's last manifest; of a run that was stopped before its first step, which leaves no trace, the facts.
    pub manifest: Manifest,
}

/// Counts what passes through to the real probe.
struct Tally<'a> {
    inner: &'a mut dyn Probe,
    totals: Totals,
    requests: usize,
    /// See [`Plan::full_window`].
    full_window: Option<usize>,
    settled: u64,
    /// Of so many steps the operations of one are timed.
    kernel_every: u32,
    cost: TimingCost,
    progress: &'a mut dyn FnMut(Progress),
}

impl Tally<'_> {
    fn report(&mut self) {
        let (totals, requests) = (self.totals, self.requests);
        (self.progress)(Progress::Running(Running { totals, requests, settled_tokens: self.settled, second_pass: false }));
    }
}

impl Probe for Tally<'_> {
    fn wants_weights(&self) -> bool {
        self.inner.wants_weights()
    }

    fn wants_routes(&self) -> bool {
        self.inner.wants_routes()
    }

    fn wants_kernels(&self) -> bool {
        self.inner.wants_kernels()
    }

    fn kernels(&mut self, step_id: u32, kernels: Vec<KernelEvent>) -> Result<(), TraceError> {
        self.inner.kernels(step_id, kernels)
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        let totals = &mut self.totals;
        totals.steps += 1;
        totals.tokens += step.emitted_tokens.len() as u64;
        match step.phase {
            Phase::Prefill => {}
            Phase::Decode => totals.decode_steps += 1,
            Phase::Verify => {
                totals.verify_steps += 1;
                totals.accepted += u64::from(step.accepted);
                totals.short_windows += u64::from(self.full_window.is_some_and(|drafts| step.rows() <= drafts));
            }
        }
        self.settled += step.emitted_tokens.len() as u64;
        let timed = self.inner.wants_kernels() && step.step_id.is_multiple_of(self.kernel_every.max(1));
        self.cost.add(&step, timed);
        self.inner.step(step)?;
        self.report();
        Ok(())
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        self.totals.requests += 1;
        self.inner.request(request)
    }
}

/// Runs the plan's requests into `probe` until they end or `stop` is set; `clock` stamps the steps. Warm-up requests come first
/// and are told to nobody.
///
/// A stopped run is not an error: its totals say so, and its last request ends as aborted.
///
/// # Errors
/// When a pass fails or the probe cannot take an event.
pub fn run(
    plan: &Plan<'_>,
    clock: Clock,
    probe: &mut dyn Probe,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Totals, RecordError> {
    let mut speculator =
        ready(Backend::open(plan, probe.wants_kernels(), &mut |opening| progress(Progress::Opening(opening)))?, plan, clock, stop)?;
    Ok(run_requests(plan, &mut speculator, probe, stop, progress)?.0)
}

/// A speculator that the plan's warm-up requests have been run on. Their random numbers are not those of any recorded request.
pub(super) fn ready<'c>(backend: Backend<'c>, plan: &Plan<'c>, clock: Clock, stop: &AtomicBool) -> Result<Speculator<'c>, RecordError> {
    let config = &plan.checkpoint.config;
    let mut speculator = Speculator::new(config, backend.target, backend.drafter, plan.settings(), clock);
    for (number, planned) in (0..plan.options.warmup).zip(plan.requests.iter().cycle()) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let request = Request {
            request_id: u32::MAX - number,
            prompt: &planned.tokens,
            max_new_tokens: planned.max_new_tokens as usize,
            baseline_steps: 0,
        };
        speculator.warm_up(request, stop)?;
    }
    Ok(speculator)
}

/// Runs the plan's requests on a speculator that is ready for them.
pub(super) fn run_requests(
    plan: &Plan<'_>,
    speculator: &mut Speculator<'_>,
    probe: &mut dyn Probe,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Totals, TimingCost), RecordError> {
    let options = &plan.options;
    let full_window = plan.full_window();
    let mut tally = Tally {
        inner: probe,
        totals: Totals::default(),
        requests: plan.requests.len(),
        full_window,
        settled: 0,
        kernel_every: options.kernel_every,
        cost: TimingCost::default(),
        progress,
    };
    for (number, planned) in plan.requests.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            tally.totals.interrupted = true;
            break;
        }
        // What earlier requests were too short for is left to the later ones.
        let left = u64::from(options.baseline_steps).saturating_sub(tally.totals.baseline_steps);
        let share = left.div_ceil((plan.requests.len() - number) as u64);
        let before = tally.totals.tokens;
        let request = Request {
            request_id: number as u32,
            prompt: &planned.tokens,
            max_new_tokens: planned.max_new_tokens as usize,
            baseline_steps: share as usize,
        };
        let generated = speculator.run(request, &mut tally, stop)?;
        tally.totals.baseline_steps += generated.baseline_steps as u64;
        let text = |tokens: &[u32]| plan.tokenizer.as_ref().filter(|_| options.store_text).map(|t| t.decode(tokens)).transpose();
        tally.request(RequestEvent {
            request_id: request.request_id,
            id: planned.id.clone(),
            prompt_tokens: planned.tokens.len() as u32,
            generated_tokens: generated.tokens.len() as u32,
            finish_reason: generated.finish,
            tags: planned.tags.clone(),
            prompt_text: text(&planned.tokens)?,
            output_text: text(&generated.tokens)?,
        })?;
        let unused = u64::from(planned.max_new_tokens) - (tally.totals.tokens - before);
        tally.settled += unused;
        tally.report();
        if generated.finish == FinishReason::Aborted {
            tally.totals.interrupted = true;
            break;
        }
    }
    Ok((tally.totals, tally.cost))
}

/// Runs the plan into a trace at `dir`. A stopped or failed run leaves a trace that is closed and says why it ends there;
/// without a step it leaves nothing, and a trace that `force` was to replace is still there.
///
/// # Errors
/// When the directory cannot be claimed or written, or a pass fails.
pub fn record(
    plan: &Plan<'_>,
    dir: &Path,
    force: bool,
    telemetry: bool,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Recording, RecordError> {
    let clock = Clock::start();
    let kernels = plan.options.kernels;
    // Before the first pass: what the second lacks would come late.
    let mut first = if kernels && plan.options.second_pass { Some(FirstPass::prepare(plan)?) } else { None };
    let timed = kernels && first.is_none();
    let mut unrecorded = None;
    let mut planned = false;
    if plan.options.self_check {
        // Whoever waits for the first run is told of it as of the second one, but of their plan, which is the same, only once.
        unrecorded = unrecorded_hash(plan, clock, stop, &mut |opening| {
            planned |= matches!(opening, Opening::Planned(_));
            progress(Progress::Opening(opening));
        })?;
    }
    // Before anything is created: a device may not be there, or have too little memory.
    let backend = Backend::open(plan, timed, &mut |opening| {
        if !(planned && matches!(opening, Opening::Planned(_))) {
            progress(Progress::Opening(opening));
        }
    })?;
    let mut facts = run_facts(plan, clock.started_ns());
    facts.instrumentation.unrecorded_token_hash = unrecorded;
    backend.describe(&mut facts, timed);
    let (witness, memory) = (backend.witness(), backend.memory);
    let sensor = if telemetry { backend.sensor(&mut facts) } else { None };
    let has_sensor = sensor.is_some();
    // What the experts' times are compared with; without them it would only delay the start.
    facts.instrumentation.copy_gb_per_s = kernels.then(copy_gb_per_s).flatten();
    let mut writer = TraceWriter::create(dir, facts, &WriterOptions { force, kernels, ..WriterOptions::default() })?;
    let sink = writer.telemetry();
    let sampler = || telemetry.then(|| HostSampler::start(sink, SAMPLE_INTERVAL, sensor)).transpose();
    // Samples begin with the recorded requests.
    let ended =
        ready(backend, plan, clock, stop).and_then(|speculator| Ok((speculator, sampler()?))).and_then(|(mut speculator, sampler)| {
            let ended = match &mut first {
                Some(first) => run_requests(plan, &mut speculator, &mut first.through(&mut writer), stop, progress),
                None => run_requests(plan, &mut speculator, &mut writer, stop, progress),
            };
            let throttling = sampler.map(HostSampler::finish).unwrap_or_default();
            // Also of a run that fails: what is kept of it carries the warning.
            writer.facts_mut().warnings.extend(of_telemetry(&throttling, has_sensor));
            ended
        });
    if ended.is_ok() {
        witness.describe(writer.facts_mut(), plan.options.kernel_every);
    }
    // The device of the first pass is given back before the second opens one.
    drop(witness);
    let ended = ended.and_then(|(mut totals, cost)| {
        if let Some(first) = first.as_ref().filter(|_| !totals.interrupted) {
            totals.interrupted = second_pass::run(plan, clock, dir, first, &mut writer, stop, progress)?;
        }
        Ok((totals, cost))
    });
    match ended {
        Ok((totals, cost)) => {
            let warnings = warnings(plan, &totals);
            let facts = writer.facts_mut();
            facts.instrumentation.overhead_share = cost.share().filter(|_| !facts.emulated);
            let unknown = (timed && plan.options.kernel_every > 1).then(|| overhead_unknown(facts, &cost)).flatten();
            facts.warnings.extend(unknown.into_iter().chain(warnings));
            if totals.steps == 0 && totals.interrupted {
                let manifest = writer.facts_mut().clone();
                writer.abandon("interrupted".to_owned())?;
                return Ok(Recording { memory, totals, manifest });
            }
            let ending = if totals.interrupted { Ending::Incomplete("interrupted".to_owned()) } else { Ending::Complete };
            let manifest = writer.finish(ending)?;
            Ok(Recording { memory, totals, manifest })
        }
        Err(error) => {
            // The run's own error is the one to tell; the writer's, if it failed as well, is the same or follows from it.
            let _ = writer.abandon(format!("failed: {error}"));
            Err(error)
        }
    }
}

/// What the device's telemetry limits.
fn of_telemetry(throttling: &Throttling, has_sensor: bool) -> Option<Warning> {
    if has_sensor && throttling.known == 0 {
        let text = "the device does not say whether it was throttled: a slowed run cannot be told from another";
        return Some(Warning::new("throttling_unknown", text));
    }
    throttling.warning()
}

/// Takes the tokens and nothing else.
#[derive(Default)]
struct TokensOnly(TokenHasher);

impl Probe for TokensOnly {
    fn wants_routes(&self) -> bool {
        false
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        self.0.add(step.request_id, &step.emitted_tokens);
        Ok(())
    }

    fn request(&mut self, _: RequestEvent) -> Result<(), TraceError> {
        Ok(())
    }
}

/// The hash of the tokens that the plan emits when nothing is recorded: neither choices leave the routers nor operations are timed.
/// `None` when it was stopped.
fn unrecorded_hash(
    plan: &Plan<'_>,
    clock: Clock,
    stop: &AtomicBool,
    opening: &mut dyn FnMut(Opening),
) -> Result<Option<String>, RecordError> {
    let mut tokens = TokensOnly::default();
    let mut told = |progress: Progress| {
        if let Progress::Opening(told) = progress {
            opening(told);
        }
    };
    let totals = run(plan, clock, &mut tokens, stop, &mut told)?;
    Ok((!totals.interrupted).then(|| tokens.0.finish()))
}

/// Why what timing costs, which `--kernel-every` was to show, is not known; `None` when it is.
fn overhead_unknown(facts: &Manifest, cost: &TimingCost) -> Option<Warning> {
    if facts.instrumentation.overhead_share.is_some() {
        return None;
    }
    let why = if facts.emulated {
        "the device is emulated, and its times mean nothing".to_owned()
    } else {
        let pairs = cost.pairs();
        format!("{pairs} pairs of a timed step and an untimed one like it are too few, 10 are needed; record more tokens")
    };
    Some(Warning::new("overhead_unknown", format!("what timing the kernels costs is unknown: {why}")))
}

fn warnings(plan: &Plan<'_>, totals: &Totals) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let (wanted, made) = (u64::from(plan.options.baseline_steps), totals.baseline_steps);
    if made < wanted && !totals.interrupted {
        let message = format!("{made} of {wanted} baseline steps were made: the requests were too short for more");
        warnings.push(Warning::new("baseline_short", message));
    }
    if plan.checkpoint.synthetic {
        let message = "the weights are made up: times and bytes are those of the shape, but tokens, acceptance and routes are no model's";
        warnings.push(Warning::new("synthetic_weights", message));
    }
    if plan.options.routing != Routing::Model {
        let message = format!(
            "experts were chosen by the plan {}, not by the model's routers: unions and overlaps are the plan's, and what the model says \
             is not what it was trained to say",
            plan.options.routing
        );
        warnings.push(Warning::new("planned_routing", message));
    }
    if plan.options.draft == DraftKind::Dspark {
        let message = "a block of this drafter costs the same however many of its drafts are verified: advice on other draft lengths, \
                       which spreads drafting evenly over the drafts, is too kind to short ones";
        warnings.push(Warning::new("block_drafter", message));
    }
    if totals.short_windows > 0 {
        let message = format!("{} windows have fewer drafts because the model's context ended", totals.short_windows);
        warnings.push(Warning::new("context_end", message));
    }
    warnings
}
