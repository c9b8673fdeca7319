//! What steps and experts cost: times joined with unions, verify steps matched with decode steps.
//!
//! `collect` reads the operations once into integer sums; `regression` fits experts' times, `ratios` compares steps, `draws` has both by
//! resample, `times` says how sure mean times are, `missed` whether components add up to a pass, `noise` whether a few steps decide them, `bytes` answers with bytes where no time was measured.

mod bytes;
mod collect;
mod draws;
mod missed;
mod noise;
mod ratios;
pub(in crate::analysis) mod regression;
#[cfg(test)]
pub(super) mod tests;
mod times;

use super::pass::{PassCounts, Plan};
use super::steps::{StepRow, StepTable};
use super::{AnalysisError, Input, Options};
use crate::metric::Interval;
use crate::metric::bounds::{FEW_DECODE_STEPS, NOISY_TIMES};
use crate::metric::cost::{AllRows, Attribution, ComponentTime, ExpertsSplit, LayerTime, StepCost, TimeSource};
use crate::metric::report::Report;
use crate::trace::manifest::{BATCHED_PASSES, Manifest, Warning, WindowCompleteness, word};
use crate::trace::{Component, Kernels, Phase};
use collect::{Collected, Collector, Place};
pub(in crate::analysis) use draws::{MeasuredTimes, TimeDraws};
use noise::Middles;
use ratios::{Draws, Matched};
use std::collections::{BTreeMap, BTreeSet};

/// Times of one step, beside its [`StepRow`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTime {
    /// Tokens in the cache before it.
    pub context_len: u32,
    /// Host time of the whole step, ns.
    pub step_ns: i64,
    /// Host time of the target's pass, ns.
    pub target_ns: i64,
    /// Device time of the step, ns.
    pub device_ns: Option<i64>,
}

/// The operations of a trace.
pub trait KernelSource {
    /// Whether there are any.
    fn any(&self) -> bool;

    /// Hands them over in order of steps, some at a time.
    ///
    /// # Errors
    /// When they cannot be read, or what `sink` returned.
    fn each(&self, sink: &mut dyn FnMut(&Kernels) -> Result<(), AnalysisError>) -> Result<(), AnalysisError>;
}

/// A trace's times.
#[derive(Clone, Copy)]
pub struct Timed<'a> {
    /// One a step.
    pub times: &'a [StepTime],
    /// Its operations.
    pub kernels: &'a dyn KernelSource,
}

/// Another trace of plain decoding on the same model and device, whose decode steps are compared with.
#[derive(Clone, Copy)]
pub struct Baseline<'a> {
    /// Its manifest.
    pub manifest: &'a Manifest,
    /// Its steps, ascending.
    pub steps: &'a [StepRow],
    /// Their times.
    pub timed: Timed<'a>,
}

/// Whose times a trace has; `None` when those that it has are nobody's.
fn source_of(manifest: &Manifest, timed: &Timed<'_>) -> Option<TimeSource> {
    if manifest.emulated {
        return None;
    }
    if manifest.device.kind == "cpu" {
        return timed.times.iter().any(|t| t.target_ns > 0).then_some(TimeSource::Cpu);
    }
    // A profile need not have seen every step: the others are not compared.
    if timed.times.iter().any(|t| t.device_ns.is_some()) {
        return Some(TimeSource::Device);
    }
    timed.times.iter().any(|t| t.target_ns > 0).then_some(TimeSource::Host)
}

/// Whether drafting cannot be told from the target's pass: a device's time is that of a step, and there are no operations to say what of it was
/// drafting by a module of the device.
fn drafting_is_hidden(manifest: &Manifest, collected: &Collected, source: Option<TimeSource>) -> bool {
    source == Some(TimeSource::Device) && !collected.has_operations && matches!(manifest.drafter.kind.as_str(), "mtp" | "dspark")
}

/// Whether a window's union is what its pass touched: all rows are known, and no other request's were in it.
fn unions_fit(manifest: &Manifest) -> bool {
    manifest.window_completeness == WindowCompleteness::Full && !manifest.warnings.iter().any(|w| w.code == BATCHED_PASSES)
}

/// The most frequent number of rows among verify steps, the larger on a tie; 0 without any.
fn most_frequent_rows(steps: &[StepRow]) -> u16 {
    let mut counts: BTreeMap<u16, u64> = BTreeMap::new();
    steps.iter().filter(|s| s.phase == Phase::Verify).for_each(|s| *counts.entry(s.rows).or_default() += 1);
    counts.into_iter().max_by_key(|&(rows, n)| (n, rows)).map_or(0, |(rows, _)| rows)
}

/// What is known beyond the report's own `time` and `cost`.
pub struct Filled {
    /// What limits them.
    pub warnings: Vec<Warning>,
    /// The times behind step costs by resample; `None` where there are no intervals of them.
    pub draws: Option<TimeDraws>,
}

/// The requests that all intervals of costs are drawn over, ascending: those that have a time or a window. One list for all of them, so
/// that what is common to two numbers is drawn for both.
fn drawn(collected: &Collected, plan: &Plan<'_>) -> Vec<u32> {
    let windows = (0u32..).zip(&plan.steps.requests).filter(|(_, span)| span.verify_steps > 0).map(|(at, _)| at);
    let requests: BTreeSet<u32> = collected.all_rows.cells.keys().copied().chain(windows).collect();
    requests.into_iter().collect()
}

/// Fills in `time` and `cost` of a report whose unions are there already.
///
/// # Errors
/// When the operations cannot be read or contradict the other tables.
pub fn fill(
    report: &mut Report,
    input: &Input<'_>,
    plan: &Plan<'_>,
    counts: &PassCounts,
    options: &Options,
) -> Result<Filled, AnalysisError> {
    let rows = most_frequent_rows(input.steps);
    let source = source_of(input.manifest, &input.timed);
    let mut collector = Collector::new(plan, rows);
    if let Some(source) = source {
        // The rows that a pass computed are known only where all of them were recorded.
        let unions = if unions_fit(input.manifest) { counts.unions.as_slice() } else { &[] };
        collector.add(input.steps, plan.steps, &input.timed, source, unions)?;
        if let Some(baseline) = &input.baseline {
            check_baseline(input.manifest, baseline, source)?;
            collector.add_decode(baseline.steps, &StepTable::new(baseline.steps)?, &baseline.timed, source)?;
        }
    }
    let collected = collector.finish();
    let requests = drawn(&collected, plan);
    let ratios = ratios::draws(&collected.compared, &requests, options);
    let mut slopes = Vec::new();
    if collected.has_operations {
        let mut fits = regression::fit(&collected, &requests, plan, input.manifest.model.bytes_per_expert, options);
        if !unions_fit(input.manifest) {
            let why = if input.manifest.window_completeness == WindowCompleteness::Full {
                "passes were of several requests: how many experts a pass touched is not one window's union"
            } else {
                "rejected rows were not recorded: how many experts the passes touched is unknown"
            };
            fits.layers.iter_mut().chain([&mut fits.overall]).for_each(|fit| fit.unknown_because = Some(why.to_owned()));
        }
        let times = times::TimeDraws::new(&collected, &requests, options);
        for ((slot, layer), fit) in report.layers.iter_mut().enumerate().zip(fits.layers) {
            layer.time = Some(layer_time(&collected, &times, Place::Layer(slot)));
            layer.cost = Some(fit);
        }
        if let Some(overall) = &mut report.overall {
            // Operations outside layers and of dense layers are not in it.
            overall.time = Some(layer_time(&collected, &times, Place::AllLayers));
            overall.cost = Some(fits.overall);
        }
        slopes = fits.slopes;
    }
    let middles = Middles::of(&collected.lasted, &collected.compared.buckets);
    if report.overall.is_some() || collected.has_steps() {
        let all_rows = all_rows(&collected, &requests, input.manifest.acceptance_known, options);
        report.cost = Some(step_cost(report, input, &collected, source, (&ratios, all_rows, &middles)));
    }
    Ok(Filled { warnings: warnings(report, input, (&collected, &middles), source), draws: TimeDraws::join(requests, &ratios, &slopes) })
}

fn check_baseline(manifest: &Manifest, baseline: &Baseline<'_>, source: TimeSource) -> Result<(), AnalysisError> {
    let other = baseline.manifest;
    let differs = |what: &str, a: &str, b: &str| Err(AnalysisError::Baseline { reason: format!("its {what} is {b}, not {a}") });
    let identity = |m: &Manifest| m.model.identity.clone().unwrap_or_else(|| m.model.name.clone());
    if identity(manifest) != identity(other) {
        // A name says more than a fingerprint, and may be the same.
        let label = |m: &Manifest| match &m.model.identity {
            Some(identity) => format!("{} ({})", m.model.name, identity.chars().take(12).collect::<String>()),
            None => m.model.name.clone(),
        };
        return differs("model", &label(manifest), &label(other));
    }
    if (&manifest.device.kind, &manifest.device.name) != (&other.device.kind, &other.device.name) {
        return differs("device", &manifest.device.label(), &other.device.label());
    }
    let theirs = source_of(other, &baseline.timed);
    if theirs != Some(source) {
        let words = |source: Option<TimeSource>| source.map_or_else(|| "unknown".to_owned(), |source| word(&source));
        return differs("clock of the steps' times", &words(Some(source)), &words(theirs));
    }
    Ok(())
}

/// ns to µs.
fn us(ns: f64) -> f64 {
    ns / 1000.0
}

/// Mean times of the place's components that have any, ns: verify and decode.
fn component_times(collected: &Collected, place: Place) -> Vec<(Component, [Option<f64>; 2])> {
    let of = |component| {
        let both = collected.mean_ns(place, component)?;
        both.iter().any(|ns| ns.unwrap_or(0.0) > 0.0).then_some((component, both))
    };
    Component::ALL.into_iter().filter_map(of).collect()
}

fn layer_time(collected: &Collected, draws: &times::TimeDraws<'_>, place: Place) -> LayerTime {
    let components = component_times(collected, place);
    let intervals = draws.of(place);
    let total = |phase: usize| {
        let of_all = components.iter().map(|(_, both)| both[phase]).try_fold(0.0, |sum, ns| Some(sum + ns?));
        of_all.filter(|_| !components.is_empty()).map(us)
    };
    let interval = |value: Option<f64>, ns: Option<Interval>| value.and(ns).map(|ends| ends.map(us));
    let component = |&(component, [verify, decode]): &(Component, [Option<f64>; 2])| {
        let [verify_ci95, decode_ci95] = intervals.by_component[component.index()];
        ComponentTime {
            component,
            verify_us: verify.map(us),
            verify_us_ci95: interval(verify, verify_ci95),
            decode_us: decode.map(us),
            decode_us_ci95: interval(decode, decode_ci95),
        }
    };
    let (verify_us, decode_us) = (total(collect::VERIFY), total(collect::DECODE));
    LayerTime {
        verify_us,
        verify_us_ci95: interval(verify_us, intervals.total[collect::VERIFY]),
        decode_us,
        decode_us_ci95: interval(decode_us, intervals.total[collect::DECODE]),
        by_component: components.iter().map(component).collect(),
    }
}

fn step_cost(
    report: &Report,
    input: &Input<'_>,
    collected: &Collected,
    source: Option<TimeSource>,
    (draws, all_rows, middles): (&Draws, Option<AllRows>, &Middles),
) -> StepCost {
    let matched = Matched::of(&collected.compared.buckets);
    let intervals = draws.intervals();
    let hidden = drafting_is_hidden(input.manifest, collected, source);
    let verify_ratio = matched.and_then(|m| m.ratio(m.verify_ns, m.decode_ns)).filter(|_| !hidden);
    let step_ratio = matched.and_then(|m| m.ratio(m.verify_step_ns, m.decode_step_ns));
    let tokens_per_step = collected.compared.tokens_per_step().filter(|_| input.manifest.acceptance_known);
    let speedup = tokens_per_step.zip(step_ratio).map(|(tokens, ratio)| tokens / ratio);
    let known = |value: Option<f64>, interval| value.and(interval);
    let median = |of: [Option<noise::Middle>; 2], phase: usize| of[phase].map(|middle| us(middle.median));
    // Beside a ratio that is known, and of the same steps.
    let step_ratio_median = step_ratio.and(Middles::ratio(middles.whole));
    let attribution = attribution(collected);
    let delta = matched.map(|m| us(m.verify_step_ns - m.decode_step_ns));
    let accounted: Option<f64> = attribution.iter().map(|a| a.delta_us).try_fold(0.0, |sum, d| Some(sum + d?));
    let share = |a: Attribution| Attribution { share_of_delta: a.delta_us.zip(delta.filter(|d| *d != 0.0)).map(|(a, d)| a / d), ..a };
    let experts_split = experts_split(report, &attribution);
    StepCost {
        source: source.filter(|_| collected.has_steps()),
        verify_ratio,
        verify_ratio_ci95: known(verify_ratio, intervals.verify_ratio),
        step_ratio,
        step_ratio_ci95: known(step_ratio, intervals.step_ratio),
        break_even: step_ratio,
        break_even_ci95: known(step_ratio, intervals.step_ratio),
        speedup,
        speedup_ci95: known(speedup, intervals.speedup),
        tokens_per_step,
        verify_ratio_median: verify_ratio.and(Middles::ratio(middles.pass)),
        step_ratio_median,
        speedup_median: tokens_per_step.zip(step_ratio_median).map(|(tokens, ratio)| tokens / ratio),
        all_rows,
        verify_us: collected.verify_mean_ns(|c| c.pass_ns).map(us).filter(|_| !hidden),
        decode_us: collected.compared_decode_ns().map(us),
        verify_step_us: collected.verify_mean_ns(|c| c.step_ns).map(us),
        decode_step_us: matched.map(|m| m.decode_step_ns).or_else(|| collected.decode_mean_ns(|c| c.step_ns)).map(us),
        verify_us_median: median(middles.pass, collect::VERIFY).filter(|_| !hidden),
        decode_us_median: median(middles.pass, collect::DECODE),
        verify_step_us_median: median(middles.whole, collect::VERIFY),
        decode_step_us_median: median(middles.whole, collect::DECODE),
        contexts: collected.contexts(),
        unattributed_us: if attribution.is_empty() { None } else { delta.zip(accounted).map(|(d, a)| d - a) },
        attribution: attribution.into_iter().map(share).collect(),
        experts_split,
        bytes: bytes::of_windows(report, input.manifest, tokens_per_step),
        model: bytes::model(report, input.manifest, tokens_per_step),
    }
}

/// The comparison over windows of every length; `None` where all have the same.
fn all_rows(collected: &Collected, requests: &[u32], acceptance_known: bool, options: &Options) -> Option<AllRows> {
    let all = &collected.all_rows;
    let (verify_steps, _) = all.steps();
    if verify_steps == collected.compared.steps().0 {
        return None;
    }
    let intervals = ratios::draws(all, requests, options).intervals();
    let step_ratio = Matched::of(&all.buckets).and_then(|m| m.ratio(m.verify_step_ns, m.decode_step_ns));
    let tokens_per_step = all.tokens_per_step().filter(|_| acceptance_known);
    let speedup = tokens_per_step.zip(step_ratio).map(|(tokens, ratio)| tokens / ratio);
    Some(AllRows {
        verify_steps,
        tokens_per_step,
        tokens_per_step_ci95: tokens_per_step.and(intervals.tokens_per_step),
        step_ratio,
        step_ratio_ci95: step_ratio.and(intervals.step_ratio),
        speedup,
        speedup_ci95: speedup.and(intervals.speedup),
    })
}

fn attribution(collected: &Collected) -> Vec<Attribution> {
    let of = |(component, both): (Component, [Option<f64>; 2])| {
        let [verify_us, decode_us] = both.map(|ns| ns.map(us));
        let delta_us = verify_us.zip(decode_us).map(|(verify, decode)| verify - decode);
        Attribution { component, decode_us, verify_us, delta_us, share_of_delta: None }
    };
    component_times(collected, Place::Everything).into_iter().map(of).collect()
}

/// b Σ_layers (mean union - k), and the rest of the experts' difference.
fn experts_split(report: &Report, attribution: &[Attribution]) -> Option<ExpertsSplit> {
    let overall = report.overall.as_ref()?;
    let slope = overall.cost.as_ref()?.us_per_expert?;
    let delta = attribution.iter().find(|a| a.component == Component::Experts)?.delta_us?;
    let more = |l: &crate::metric::report::LayerReport| Some(l.stats.union.as_ref()?.mean - f64::from(l.k));
    let union_us = slope * report.layers.iter().filter_map(more).sum::<f64>();
    Some(ExpertsSplit { union_us, shape_us: delta - union_us })
}

fn warnings(report: &Report, input: &Input<'_>, (collected, middles): (&Collected, &Middles), source: Option<TimeSource>) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut warn = |code: &str, message: String| warnings.push(Warning::new(code, message));
    if !input.manifest.host_times && source != Some(TimeSource::Device) && report.totals.steps > 0 {
        warn("no_step_times", "nobody said when steps began and ended: verify and step ratios are unknown".into());
    }
    if !collected.has_operations {
        warn("no_device_times", "the trace has no times of operations: `time`, cost per expert and the attribution are unknown".into());
    }
    if collected.times.are_left_out() {
        warn(
            "time_intervals_left_out",
            "too many requests, layers and components to keep times of: those of operations have no interval".into(),
        );
    }
    let Some(cost) = &report.cost else { return warnings };
    match source.filter(|_| collected.has_steps()) {
        Some(TimeSource::Cpu) => {
            warn("cpu_times", format!("times are wall times of the CPU engine on {}, not of a GPU", input.manifest.device.name));
        }
        Some(TimeSource::Host) => {
            warn("host_times", "the device's own times were not recorded: times are the host's around its passes".into())
        }
        Some(TimeSource::Device) | None => {}
    }
    let (verify, decode) = collected.compared.steps();
    if verify > 0 && drafting_is_hidden(input.manifest, collected, source) {
        let message = "the device's time of a step includes drafting, and no kernels were timed to tell how much: the verify ratio is unknown, \
                       the step ratio is not; record with kernels";
        warn("drafting_not_apart", message.into());
    }
    if verify > 0 && decode == 0 {
        let message = "no plain decode step was recorded: the verify ratio is unknown; record with --baseline-steps, or give a trace of \
                       plain decoding with --baseline";
        warn("no_decode_steps", message.into());
    }
    // As many as advice asks for.
    let compared = cost.compared_decode_steps();
    if (1..FEW_DECODE_STEPS).contains(&compared) {
        let message = format!(
            "only {compared} decode steps at the verify steps' context lengths: their mean, and every ratio, is uncertain beyond its interval; \
             {FEW_DECODE_STEPS} are needed (record with --baseline-steps, or give --baseline)"
        );
        warn("few_decode_steps", message);
    }
    if let Some(noise) = middles.noise() {
        let medians = match (cost.verify_ratio_median, cost.step_ratio_median) {
            (Some(verify), Some(step)) => format!(" (of medians they are {verify:.2} and {step:.2})"),
            (None, Some(step)) => format!(" (the step ratio of medians is {step:.2})"),
            (_, None) => String::new(),
        };
        let message = format!(
            "{noise}: ratios are of means, which a few steps decide{medians}; record again on a quiet machine, with more requests, or with \
             --warmup where the first steps are the long ones"
        );
        warn(NOISY_TIMES, message);
    }
    if let Some(message) = missed::warning(collected, source) {
        warn("components_miss_the_step", message);
    }
    let left_out: u64 = cost.contexts.iter().filter(|c| c.decode_steps == 0).map(|c| c.verify_steps).sum();
    if decode > 0 && left_out > 0 {
        let message = format!(
            "{left_out} of {verify} verify steps have context lengths that no decode step has: they are left out of the verify ratio, which \
             compares steps of the same octave of context length"
        );
        warn("context_mismatch", message);
    }
    if let Some(why) = report.overall.as_ref().and_then(|o| o.cost.as_ref()?.unknown_because.clone()) {
        warn("no_cost_per_expert", why);
    }
    warnings
}
