//! Advice by measured times of planted traces: how sure it is, and whether that is true.

use crate::analysis::tests::memory::{Memory, OPTIONS};
use crate::analysis::{Baseline, Input, Options, StepTime, Timed, Wanted, analyze_input};
use crate::metric::Interval;
use crate::metric::advice::{Advice, CostSource, DraftLength};
use crate::metric::report::Report;
use crate::trace::{Component, FinishReason, Module, Phase, RequestEvent};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Drafts of every window.
const GAMMA: u16 = 3;
/// ns: a decode step, one more expert, one more row, one more draft.
const STEP: f64 = 100_000.0;
const EXPERT: f64 = 8_000.0;
const ROW: f64 = 6_000.0;
const DRAFT: f64 = 5_000.0;

/// Requests of `verify` verify steps and `decode` decode steps in one layer with k = 2, each with a level, a cost of experts, an overlap and
/// an acceptance of its own. A row either repeats the anchor's experts or adds two; a step costs
///
/// STEP + EXPERT (U - 2) + (ROW + DRAFT) drafts
///
/// on average, so that U(γ') = 2 + γ' and tokens(γ') = 1 + Σ_{j <= γ'} E q^j with the acceptance q uniform in .5...9.
struct Planted {
    rng: ChaCha8Rng,
    trace: Memory,
    noise: f64,
    /// Further noise of the experts' operations alone, which the pass does not have: ns.
    unsure: f64,
}

impl Planted {
    fn new(seed: u64, noise: f64) -> Self {
        let mut trace = Memory::new(&[1], 24, 2);
        trace.manifest.emulated = false;
        Self { rng: ChaCha8Rng::seed_from_u64(seed), trace, noise, unsure: 0.0 }
    }

    fn unit(&mut self) -> f64 {
        f64::from(self.rng.next_u32()) / 4_294_967_296.0
    }

    fn noise(&mut self) -> f64 {
        self.noise * (2.0 * self.unit() - 1.0)
    }

    fn requests(mut self, requests: u32, verify: u32, decode: u32) -> Memory {
        for request in 0..requests {
            let alike = self.unit();
            let (overlap, acceptance) = (0.2 + 0.6 * alike, 0.5 + 0.4 * alike);
            let (level, expert) = (self.noise(), EXPERT * (0.9 + 0.2 * self.unit()));
            for step in 0..verify + decode {
                let drafts = if step < verify { GAMMA } else { 0 };
                self.step(request, drafts, (overlap, acceptance), (level, expert));
            }
            self.trace.requests.push(RequestEvent {
                request_id: request,
                id: String::new(),
                prompt_tokens: 1,
                generated_tokens: 1,
                finish_reason: FinishReason::Length,
                tags: format!(r#"{{"half": "{}", "all": "yes"}}"#, request % 2),
                prompt_text: None,
                output_text: None,
            });
        }
        self.trace
    }

    fn step(&mut self, request: u32, drafts: u16, (overlap, acceptance): (f64, f64), (level, expert): (f64, f64)) {
        let mut rows = vec![vec![0, 1]];
        for row in 1..=drafts {
            rows.push(if self.unit() < overlap { vec![0, 1] } else { vec![2 * row, 2 * row + 1] });
        }
        let more = 2.0 * rows.iter().skip(1).filter(|row| row[0] > 0).count() as f64;
        let mut accepted = 0;
        while accepted < drafts && self.unit() < acceptance {
            accepted += 1;
        }
        self.trace.verify(request, accepted, &[rows]);
        if drafts == 0
            && let Some(step) = self.trace.steps.last_mut()
        {
            step.phase = Phase::Decode;
        }
        // Half of what a row costs is in the experts; drafting is no part of the pass.
        let experts = 40_000.0 + expert * more + ROW / 2.0 * f64::from(drafts) + self.noise();
        let pass = experts + 0.95 * STEP - 40_000.0 + ROW / 2.0 * f64::from(drafts) + level + self.noise();
        let whole = pass + 0.05 * STEP + DRAFT * f64::from(drafts) + self.noise();
        let step_id = self.trace.steps.last().map_or(0, |s| s.step_id);
        let operation = if self.unsure > 0.0 { experts + 2.0 * self.unsure * self.unit() } else { experts };
        let k = &mut self.trace.kernels;
        k.step_id.push(step_id);
        k.layer.push(Some(1));
        k.module.push(Module::Target);
        k.component.push(Component::Experts);
        k.begin_ns.push(1000);
        k.end_ns.push(1000 + operation.round() as i64);
        self.trace.times.push(StepTime { context_len: 64, step_ns: whole.round() as i64, target_ns: pass.round() as i64, device_ns: None });
        let probs = (1..=drafts).map(|i| 1.0 / f32::from(i)).collect();
        self.trace.draft_probs.push((drafts > 0).then_some(probs));
    }
}

fn advice(report: &Report) -> &Advice {
    report.advice.as_ref().unwrap()
}

fn recorded(report: &Report) -> &DraftLength {
    advice(report).by_draft_len.last().unwrap()
}

fn near(a: Option<Interval>, b: Option<Interval>) {
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a.iter().zip(b).all(|(a, b)| (a / b - 1.0).abs() < 1e-9), "{a:?} {b:?}");
}

fn width(interval: Option<Interval>) -> f64 {
    interval.map_or(0.0, |[low, high]| high - low)
}

#[test]
fn at_the_recorded_length_intervals_are_those_of_the_measured_ratio() {
    let report = Planted::new(1, 9_000.0).requests(12, 4, 2).report();
    let (cost, last) = (report.cost.as_ref().unwrap(), recorded(&report));
    assert_eq!((advice(&report).cost_source, advice(&report).resamples_left_out), (Some(CostSource::Measured), Some(0)));
    near(last.step_ratio_ci95, cost.step_ratio_ci95);
    near(last.ci95, cost.speedup_ci95);
    assert!(width(last.step_ratio_ci95) > 0.02);
    // Nothing is cut at threshold 0, and a group of all is all.
    near(advice(&report).confidence.as_ref().unwrap()[0].ci95, last.ci95);
    let tag = |key: &str| advice(&report).by_tag.iter().find(|g| g.key == key).unwrap();
    near(tag("all=yes").ci95, last.ci95);
    let [low, high] = tag("half=1").ci95.unwrap();
    assert!(low < tag("half=1").speedup.unwrap() && tag("half=1").speedup.unwrap() < high);
    // What a single request brought is what it is; what its steps cost is not sure.
    for request in &advice(&report).by_request {
        let [low, high] = request.ci95.unwrap();
        assert!(low < request.speedup.unwrap() && request.speedup.unwrap() < high, "{request:?}");
    }
    let sentence = |what: &str| advice(&report).assumptions.iter().any(|a| a.contains(what));
    assert!(sentence("with step costs drawn from the times") && !sentence("exact") && !sentence("left out"));
}

#[test]
fn so_they_are_with_the_decode_steps_of_another_trace() {
    let trace = Planted::new(2, 9_000.0).requests(12, 4, 0);
    let mut plain = Planted::new(3, 9_000.0).requests(7, 0, 4);
    plain.manifest.started_unix_ns = 7;
    let table = plain.steps.clone();
    let report = trace
        .with_input(|input| {
            let timed = Timed { times: &plain.times, kernels: &plain };
            let baseline = Some(Baseline { manifest: &plain.manifest, steps: &table, timed });
            let Input { name, manifest, steps, draft_probs, trees, passes, pass_unions, requests, routes, timed, .. } = *input;
            let input = Input { name, manifest, steps, draft_probs, trees, passes, pass_unions, requests, routes, timed, baseline };
            analyze_input(&input, &OPTIONS, &Wanted::default())
        })
        .unwrap();
    let (cost, last) = (report.cost.as_ref().unwrap(), recorded(&report));
    assert_eq!(advice(&report).cost_source, Some(CostSource::Measured));
    near(last.step_ratio_ci95, cost.step_ratio_ci95);
    near(last.ci95, cost.speedup_ci95);
    // The other trace's requests are drawn with costs alone.
    assert_eq!(last.tokens_per_step_ci95, report.acceptance.tokens_per_step_ci95);
}

#[test]
fn costs_of_too_few_requests_are_no_interval() {
    let mut trace = Planted::new(4, 9_000.0).requests(12, 4, 2);
    // All decode steps but those of one request are of prompts.
    for step in trace.steps.iter_mut().filter(|s| s.phase == Phase::Decode && s.request_id > 0) {
        step.phase = Phase::Prefill;
    }
    // Ten of them are needed.
    let steps = trace.steps.len();
    for step in trace.steps.iter_mut().filter(|s| s.phase == Phase::Prefill).take(9) {
        (step.phase, step.request_id) = (Phase::Decode, 0);
    }
    let report = trace.report();
    assert_eq!((report.totals.steps as usize, report.totals.decode_steps), (steps, 11));
    let last = recorded(&report);
    assert_eq!(advice(&report).cost_source, Some(CostSource::Measured));
    assert!(last.step_ratio.is_some() && last.speedup.is_some() && last.tokens_per_step_ci95.is_some() && last.union_ci95.is_some());
    assert_eq!((last.step_ratio_ci95, last.ci95, last.best_share), (None, None, None));
    assert!(advice(&report).by_tag.iter().chain(&advice(&report).by_request).all(|g| g.speedup.is_some() && g.ci95.is_none()));
    assert!(advice(&report).confidence.iter().flatten().all(|p| p.speedup.is_some() && p.ci95.is_none()));
    assert!(advice(&report).assumptions.iter().any(|a| a.contains("of too few requests")));
}

#[test]
fn resamples_without_a_cost_of_experts_are_left_out_and_counted() {
    // Noise of 15 experts: of some resamples the slope is below 0.
    let unsure = (0..20).find_map(|seed| {
        let report = Planted { unsure: 15.0 * EXPERT, ..Planted::new(seed, 9_000.0) }.requests(6, 4, 2).report();
        let slope = report.overall.as_ref()?.cost.as_ref()?.clone();
        (slope.us_per_expert? > 0.0 && slope.ci95?[0] < 0.0).then_some(report)
    });
    let report = unsure.unwrap();
    let advice = advice(&report);
    let left_out = advice.resamples_left_out.unwrap();
    assert!(left_out > OPTIONS.resamples as u64 / 40 && left_out < OPTIONS.resamples as u64, "{left_out}");
    let said = format!("{left_out} of {} resamples", OPTIONS.resamples);
    assert!(advice.assumptions.iter().any(|a| a.contains(&said)), "{:?}", advice.assumptions);
    let shares: f64 = advice.by_draft_len.iter().map(|p| p.best_share.unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9);
}

/// A slope below 0 takes nothing from the measured ratio of the recorded length, and gives nothing to other lengths.
#[test]
fn the_recorded_length_needs_no_cost_of_experts() {
    let slow = (0..60).find_map(|seed| {
        let mut planted = Planted { unsure: 60.0 * EXPERT, ..Planted::new(seed, 9_000.0) };
        planted.trace.manifest.model.bytes_other_per_step = Some(1 << 20);
        planted.trace.manifest.drafter.bytes_per_draft = Some(1 << 16);
        let report = planted.requests(12, 4, 2).report();
        (report.overall.as_ref()?.cost.as_ref()?.us_per_expert? < 0.0).then_some(report)
    });
    let report = slow.unwrap();
    let (cost, last, advice) = (report.cost.as_ref().unwrap(), recorded(&report), advice(&report));
    // The bytes are known, and are not asked.
    assert_eq!((advice.cost_source, &advice.measured_unused_because), (Some(CostSource::Measured), &None));
    assert!(advice.other_lengths_unknown_because.as_ref().unwrap().contains("not above 0"));
    assert!((last.step_ratio.unwrap() / cost.step_ratio.unwrap() - 1.0).abs() < 1e-9);
    near(last.step_ratio_ci95, cost.step_ratio_ci95);
    near(last.ci95, cost.speedup_ci95);
    for between in &advice.by_draft_len[1..usize::from(GAMMA)] {
        assert!(between.tokens_per_step > 1.0 && between.step_ratio.is_none() && between.speedup.is_none() && between.ci95.is_none());
        assert_eq!(between.best_share, None);
    }
    assert!([Some(0), Some(GAMMA)].contains(&advice.best_draft_len) && advice.what_if.is_none() && advice.resamples_left_out == Some(0));
    assert!(advice.confidence.iter().flatten().all(|p| p.speedup.is_none() && p.tokens_per_step > 0.0));
}

#[test]
fn bytes_have_no_uncertainty_and_it_is_said() {
    let mut trace = Planted::new(5, 9_000.0).requests(12, 4, 2);
    trace.manifest.model.bytes_other_per_step = Some(1 << 20);
    trace.manifest.drafter.bytes_per_draft = Some(1 << 16);
    let report = trace.try_report_of(&Wanted { model_only: true, ..Wanted::default() }).unwrap();
    assert_eq!((advice(&report).cost_source, advice(&report).resamples_left_out), (Some(CostSource::Model), None));
    assert!(advice(&report).assumptions.iter().any(|a| a.contains("a model of bytes has no uncertainty")));
    assert!(recorded(&report).ci95.is_some() && advice(&report).by_request.iter().all(|g| g.ci95.is_none()));
    assert_eq!(recorded(&report).tokens_per_step_ci95, report.acceptance.tokens_per_step_ci95);
}

/// 600 planted traces of 160 requests, half of which have a tag: intervals hold the true speedup of shorter windows, and of a tag's requests, as often as they say.
#[test]
fn intervals_hold_the_truth_as_often_as_they_say() {
    let runs = 600;
    // E q^j of q uniform in .5...9.
    let power = |j: i32| (0.9f64.powi(j + 1) - 0.5f64.powi(j + 1)) / (0.4 * f64::from(j + 1));
    let truth = |drafts: i32| {
        let tokens = 1.0 + (1..=drafts).map(power).sum::<f64>();
        tokens * STEP / (STEP + f64::from(drafts) * (EXPERT + ROW + DRAFT))
    };
    assert!((truth(1) - 1.7 / 1.19).abs() < 1e-12);
    let mut held = [0u32; 3];
    for seed in 0..runs {
        let trace = Planted::new(seed, 12_000.0).requests(160, 4, 2);
        let report = trace.with_input(|input| analyze_input(input, &Options { resamples: 400, seed }, &Wanted::default())).unwrap();
        let advice = advice(&report);
        assert_eq!(advice.cost_source, Some(CostSource::Measured));
        let half = advice.by_tag.iter().find(|g| g.key == "half=0").unwrap();
        let intervals = [(advice.by_draft_len[1].ci95, 1), (advice.by_draft_len[2].ci95, 2), (half.ci95, 3)];
        for (held, (interval, drafts)) in held.iter_mut().zip(intervals) {
            let [low, high] = interval.unwrap();
            *held += u32::from(low <= truth(drafts) && truth(drafts) <= high);
        }
    }
    let shares = held.map(|held| f64::from(held) / runs as f64);
    assert!(shares.iter().all(|share| (0.93..=0.97).contains(share)), "{shares:?}");
}
