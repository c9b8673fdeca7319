//! Traces whose costs were planted, and traces of which a cost cannot be known.

use crate::analysis::StepTime;
use crate::analysis::steps::StepRow;
use crate::analysis::tests::memory::{Memory, Route};
use crate::metric::advice::CostSource;
use crate::metric::cost::{ContextBucket, TimeSource};
use crate::metric::report::Report;
use crate::trace::manifest::{BATCHED_PASSES, Warning};
use crate::trace::{Component, Kernels, Module, Phase};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

const LAYERS: [u16; 2] = [3, 5];
const K: u16 = 4;
const EXPERTS: u16 = 64;

/// Times in ns of one layer's experts by (union, rows).
type Experts = fn(f64, f64) -> f64;

/// A random trace: requests of verify steps and, after every third, a decode step.
struct Planted {
    rng: ChaCha8Rng,
    trace: Memory,
    experts: Experts,
    /// +- ns of every operation.
    noise: f64,
    step_id: u32,
}

impl Planted {
    fn new(seed: u64, experts: Experts, noise: f64) -> Self {
        let mut trace = Memory::new(&LAYERS, EXPERTS, K);
        trace.manifest.emulated = false;
        Self { rng: ChaCha8Rng::seed_from_u64(seed), trace, experts, noise, step_id: 0 }
    }

    fn unit(&mut self) -> f64 {
        f64::from(self.rng.next_u32()) / 4_294_967_296.0
    }

    /// K distinct experts; `share` of them from the first eight.
    fn row(&mut self, share: f64) -> Vec<u16> {
        let mut ids = BTreeSet::new();
        while ids.len() < usize::from(K) {
            let hot = self.unit() < share;
            let below = if hot { 8.0 } else { f64::from(EXPERTS) };
            ids.insert((self.unit() * below) as u16);
        }
        ids.into_iter().collect()
    }

    fn operation(&mut self, layer: Option<u16>, module: Module, component: Component, ns: f64) -> i64 {
        let ns = (ns + self.noise * (2.0 * self.unit() - 1.0)).max(1.0).round() as i64;
        let k = &mut self.trace.kernels;
        k.step_id.push(self.step_id);
        k.layer.push(layer);
        k.module.push(module);
        k.component.push(component);
        k.begin_ns.push(1000);
        k.end_ns.push(1000 + ns);
        ns
    }

    /// Adds a step and gives its experts' sets, by layer and row.
    fn step(&mut self, request_id: u32, rows: Vec<[Vec<u16>; 2]>, context_len: u32) {
        let n = rows.len() as u16;
        let (phase, accepted) = if n > 1 { (Phase::Verify, (self.rng.next_u32() % u32::from(n)) as u16) } else { (Phase::Decode, 0) };
        self.trace.steps.push(StepRow {
            step_id: self.step_id,
            request_id,
            phase,
            rows: n,
            accepted,
            emitted: u32::from(accepted) + 1,
            context_len: 0,
        });
        // A dense layer outside the routed ones, and attention that takes longer as the context grows.
        let mut target = self.operation(Some(0), Module::Target, Component::Dense, 3_000.0);
        for (at, layer) in LAYERS.into_iter().enumerate() {
            let union: BTreeSet<u16> = rows.iter().flat_map(|r| r[at].iter().copied()).collect();
            for (row, ids) in (0u16..).zip(&rows) {
                self.trace.routes.push(Route { step: self.step_id, layer, row, draft: false, ids: ids[at].clone(), weights: vec![] });
            }
            let experts = (self.experts)(union.len() as f64, f64::from(n));
            target += self.operation(Some(layer), Module::Target, Component::Kda, 2_000.0 * f64::from(n) + 10.0 * f64::from(context_len));
            // In two pieces: they add up.
            target += self.operation(Some(layer), Module::Target, Component::Experts, experts - 500.0);
            target += self.operation(Some(layer), Module::Target, Component::Experts, 500.0);
        }
        let draft = if n > 1 { self.operation(Some(42), Module::Draft, Component::Draft, 7_000.0) } else { 0 };
        let times = StepTime { context_len, step_ns: target + draft + 900 + 100 * i64::from(n), target_ns: target + 400, device_ns: None };
        self.trace.times.push(times);
        self.step_id += 1;
    }

    fn requests(mut self, requests: u32, rows: &dyn Fn(&mut Self) -> usize, share: &dyn Fn(&mut Self) -> f64) -> Memory {
        for request in 0..requests {
            for i in 0..9u32 {
                let (n, share) = if i % 3 == 2 { (1, 0.0) } else { (rows(&mut self), share(&mut self)) };
                let rows = (0..n).map(|_| [self.row(share), self.row(share)]).collect();
                self.step(request, rows, 64 + i);
            }
        }
        self.trace
    }
}

/// A trace of so many requests whose steps and operations have times.
pub fn timed(requests: u32) -> Memory {
    let planted = Planted::new(5, |union, rows| 177_000.0 + 36_000.0 * union + 900.0 * rows, 9_000.0);
    planted.requests(requests, &|p| 3 + (p.rng.next_u32() % 3) as usize, &|p| p.unit())
}

fn code(report: &Report, code: &str) -> bool {
    report.warnings.iter().any(|w| w.code == code)
}

fn within(interval: Option<[f64; 2]>, value: f64) -> bool {
    interval.is_some_and(|[low, high]| low <= value && value <= high)
}

#[test]
fn a_planted_cost_per_expert_is_found_again() {
    // The published fit: 177 µs + 36 µs an expert.
    let planted = Planted::new(3, |union, _| 177_000.0 + 36_000.0 * union, 9_000.0);
    let report = planted.requests(40, &|_| 4, &|p| p.unit()).report();
    for cost in report.layers.iter().map(|l| l.cost.as_ref().unwrap()).chain(report.overall.as_ref().map(|o| o.cost.as_ref().unwrap())) {
        assert!((cost.us_per_expert.unwrap() - 36.0).abs() < 0.5 && within(cost.ci95, 36.0), "{cost:?}");
        assert!((cost.intercept_us.unwrap() - 177.0).abs() < 5.0, "{cost:?}");
        assert!(within(cost.us_per_row_ci95, 0.0), "rows cost nothing: {cost:?}");
        assert!(cost.r2.unwrap() > 0.99 && cost.unknown_because.is_none());
        // 12288 bytes in 36 µs.
        assert!((cost.implied_gb_per_s.unwrap() - 0.3413).abs() < 0.006 && within(cost.implied_gb_per_s_ci95, 0.3413), "{cost:?}");
    }
    // Six verify and three decode steps a request in each layer.
    let layer = report.layers[0].cost.as_ref().unwrap();
    assert_eq!((layer.points, report.overall.as_ref().unwrap().cost.as_ref().unwrap().points), (360, 720));
    assert_eq!(layer.residuals.iter().map(|r| r.points).sum::<u64>(), 360);
    assert!(layer.residuals.iter().all(|r| r.residual_us.unwrap().abs() < 20.0), "{:?}", layer.residuals);
    let split = report.cost.as_ref().unwrap().experts_split.unwrap();
    let experts = report.cost.as_ref().unwrap().attribution.iter().find(|a| a.component == Component::Experts).unwrap();
    assert!((split.union_us + split.shape_us - experts.delta_us.unwrap()).abs() < 1e-9);
    assert!(split.shape_us.abs() < 0.03 * split.union_us, "more experts are all of it: {split:?}");
}

#[test]
fn rows_and_unions_are_told_apart() {
    // More rows touch more experts: without W in the fit, the slope of U would take the rows' cost as well.
    let experts: Experts = |union, rows| 50_000.0 + 4_000.0 * union + 20_000.0 * rows;
    let rows = |p: &mut Planted| 2 + (p.unit() * 5.0) as usize;
    let report = Planted::new(5, experts, 3_000.0).requests(60, &rows, &|p| p.unit()).report();
    let cost = report.overall.as_ref().unwrap().cost.as_ref().unwrap();
    assert!((cost.us_per_expert.unwrap() - 4.0).abs() < 0.15 && within(cost.ci95, 4.0), "{cost:?}");
    assert!((cost.us_per_row.unwrap() - 20.0).abs() < 0.6 && within(cost.us_per_row_ci95, 20.0), "{cost:?}");
    assert!((cost.intercept_us.unwrap() - 50.0).abs() < 1.0, "{cost:?}");
    let points: Vec<_> = report.layers[0].cost.as_ref().unwrap().residuals.iter().map(|r| (r.union, r.mean_us)).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (u, t) = (mean(|p| p.0), mean(|p| p.1));
    let alone = points.iter().map(|p| (p.0 - u) * (p.1 - t)).sum::<f64>() / points.iter().map(|p| (p.0 - u).powi(2)).sum::<f64>();
    assert!(alone > 5.5, "the confounder is really there: {alone}");
}

#[test]
fn collinear_rows_and_unions_are_told_and_null() {
    let mut planted = Planted::new(7, |union, _| 10_000.0 + 1_000.0 * union, 100.0);
    for request in 0..4 {
        for i in 0..6u16 {
            // No two rows share an expert: U = k W.
            let n = [1, 2, 4][usize::from(i % 3)];
            let ids = |row: u16| (row * K..row * K + K).collect::<Vec<u16>>();
            planted.step(request, (0..n).map(|row| [ids(row), ids(row)]).collect(), 64);
        }
    }
    let report = planted.trace.report();
    for cost in [report.layers[1].cost.as_ref().unwrap(), report.overall.as_ref().unwrap().cost.as_ref().unwrap()] {
        assert_eq!((cost.us_per_expert, cost.us_per_row, cost.ci95, cost.r2, cost.implied_gb_per_s), (None, None, None, None, None));
        assert!(cost.unknown_because.as_ref().unwrap().contains("collinear"));
        assert!(cost.residuals.iter().all(|r| r.residual_us.is_none() && r.mean_us > 10.0));
    }
    assert!(code(&report, "no_cost_per_expert"));
    assert_eq!(report.cost.unwrap().experts_split, None);
}

#[test]
fn the_attribution_adds_up() {
    let report = Planted::new(9, |union, _| 20_000.0 + 2_000.0 * union, 0.0).requests(6, &|_| 3, &|_| 0.3).report();
    let cost = report.cost.as_ref().unwrap();
    let of = |component| cost.attribution.iter().find(|a| a.component == component).unwrap();
    let near = |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 0.01, "{a:?} is not {b}");
    // 3 rows of 2 µs against one, in two layers; contexts are of one octave, 64 to 72, in the same mix.
    near(of(Component::Dense).delta_us, 0.0);
    near(of(Component::Draft).verify_us, 7.0);
    near(of(Component::Draft).decode_us, 0.0);
    let (verify, decode) = (cost.verify_step_us.unwrap(), cost.decode_step_us.unwrap());
    let sum: f64 = cost.attribution.iter().map(|a| a.delta_us.unwrap()).sum();
    near(cost.unattributed_us, verify - decode - sum);
    // What the steps have beyond their operations: 0.9 + 0.1 rows.
    near(cost.unattributed_us, 0.2);
    let shares: f64 = cost.attribution.iter().map(|a| a.share_of_delta.unwrap()).sum();
    assert!((shares + cost.unattributed_us.unwrap() / (verify - decode) - 1.0).abs() < 1e-9);
    near(cost.step_ratio, verify / decode);
    near(cost.verify_ratio, cost.verify_us.unwrap() / cost.decode_us.unwrap());
    assert_eq!(cost.break_even, cost.step_ratio);
    near(cost.speedup, report.acceptance.tokens_per_step.unwrap() / cost.step_ratio.unwrap());
    assert!(within(cost.verify_ratio_ci95, cost.verify_ratio.unwrap()) && within(cost.speedup_ci95, cost.speedup.unwrap()));
    assert_eq!((cost.source, cost.tokens_per_step), (Some(TimeSource::Cpu), report.acceptance.tokens_per_step));
    // Layers: their experts and attention, nothing of the dense layer.
    let layer = report.layers[0].time.as_ref().unwrap();
    let components: Vec<_> = layer.by_component.iter().map(|c| c.component).collect();
    assert_eq!(components, [Component::Kda, Component::Experts]);
    near(layer.verify_us, layer.by_component.iter().map(|c| c.verify_us.unwrap()).sum());
    let union = report.layers[0].stats.union.as_ref().unwrap().mean;
    near(layer.by_component[1].verify_us, 20.0 + 2.0 * union);
    near(layer.by_component[1].decode_us, 28.0);
    let all = report.overall.as_ref().unwrap().time.as_ref().unwrap();
    let layers: f64 = report.layers.iter().map(|l| l.time.as_ref().unwrap().verify_us.unwrap()).sum();
    near(all.verify_us, layers);
    assert!(code(&report, "cpu_times") && !code(&report, "no_device_times"));
}

#[test]
fn bytes_are_counted_and_the_model_is_called_one() {
    let mut trace = Planted::new(11, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(4, &|_| 3, &|_| 0.5);
    trace.manifest.model.bytes_other_per_step = Some(1_000_000);
    let report = trace.report();
    let (cost, overall) = (report.cost.as_ref().unwrap(), report.overall.as_ref().unwrap());
    let (union, tokens) = (overall.stats.union.as_ref().unwrap().mean, report.acceptance.tokens_per_step.unwrap());
    let bytes = cost.bytes.unwrap();
    assert_eq!(bytes.per_window, 2.0 * union * 12_288.0);
    assert_eq!((bytes.per_token, bytes.per_decode_token), (Some(bytes.per_window / tokens), 2.0 * 4.0 * 12_288.0));
    assert_eq!(bytes.wasted_per_window, Some(2.0 * overall.stats.wasted_mean.unwrap() * 12_288.0));
    let model = cost.model.as_ref().unwrap();
    assert_eq!((model.kind.as_str(), model.decode_bytes), ("model", 1_000_000.0 + 2.0 * 4.0 * 12_288.0));
    assert_eq!(model.verify_ratio, (1_000_000.0 + bytes.per_window) / model.decode_bytes);
    assert!(model.assumptions.len() >= 3);
    trace.manifest.model.bytes_other_per_step = None;
    assert_eq!(trace.report().cost.unwrap().model, None);
}

#[test]
fn without_decode_steps_no_ratio_is_measured() {
    let mut trace = Planted::new(13, |union, _| 2_000.0 + 100.0 * union, 10.0).requests(4, &|_| 3, &|_| 0.5);
    trace.manifest.model.bytes_other_per_step = Some(1_000_000);
    let verify: BTreeSet<u32> = trace.steps.iter().filter(|s| s.phase == Phase::Verify).map(|s| s.step_id).collect();
    let keep: Vec<bool> = trace.steps.iter().map(|s| verify.contains(&s.step_id)).collect();
    let mut at = keep.iter();
    trace.times.retain(|_| *at.next().unwrap());
    trace.steps.retain(|s| verify.contains(&s.step_id));
    trace.routes.retain(|r| verify.contains(&r.step));
    let kernels = std::mem::take(&mut trace.kernels);
    for i in (0..kernels.len()).filter(|&i| verify.contains(&kernels.step_id[i])) {
        trace.kernels.step_id.push(kernels.step_id[i]);
        trace.kernels.layer.push(kernels.layer[i]);
        trace.kernels.module.push(kernels.module[i]);
        trace.kernels.component.push(kernels.component[i]);
        trace.kernels.begin_ns.push(kernels.begin_ns[i]);
        trace.kernels.end_ns.push(kernels.end_ns[i]);
    }
    let report = trace.report();
    let cost = report.cost.as_ref().unwrap();
    assert_eq!((cost.verify_ratio, cost.step_ratio, cost.break_even, cost.speedup, cost.speedup_ci95), (None, None, None, None, None));
    assert!(cost.verify_us.unwrap() > 0.0 && cost.decode_us.is_none() && cost.unattributed_us.is_none());
    assert!(cost.attribution.iter().all(|a| a.verify_us.is_some() && a.delta_us.is_none()));
    assert!(code(&report, "no_decode_steps") && cost.model.is_some());
    // One number of rows: the slope of the union is known all the same.
    let experts = report.overall.as_ref().unwrap().cost.as_ref().unwrap();
    assert!((experts.us_per_expert.unwrap() - 0.1).abs() < 0.01 && experts.us_per_row.is_none(), "{experts:?}");
}

#[test]
fn one_request_on_either_side_has_no_interval() {
    let report = |verify: u32, decode: u32| {
        let planted = Planted::new(5, |union, _| 10_000.0 + 36.0 * union, 5.0);
        let mut trace = planted.requests(4, &|p| 2 + (p.unit() * 3.0) as usize, &|p| p.unit());
        // The later requests have verify steps only, or decode steps only.
        for step in &mut trace.steps {
            let keep = if step.phase == Phase::Verify { step.request_id < verify } else { step.request_id >= 4 - decode };
            if !keep {
                step.phase = Phase::Prefill;
            }
        }
        trace.report()
    };
    for (verify, decode) in [(1, 3), (3, 1)] {
        let report = report(verify, decode);
        let cost = report.cost.as_ref().unwrap();
        assert!(cost.step_ratio.is_some() && cost.speedup.is_some(), "{cost:?}");
        assert_eq!((cost.verify_ratio_ci95, cost.step_ratio_ci95, cost.speedup_ci95), (None, None, None));
        assert_eq!(report.overall.unwrap().cost.unwrap().ci95.is_some(), verify > 1);
    }
    assert!(report(2, 2).cost.unwrap().speedup_ci95.is_some());
}

#[test]
fn contexts_that_do_not_meet_are_left_out_and_told() {
    let mut planted = Planted::new(15, |union, _| 2_000.0 + 100.0 * union, 0.0);
    for request in 0..3 {
        for context in [70, 75, 300] {
            let rows = (0..3).map(|_| [planted.row(0.2), planted.row(0.2)]).collect();
            planted.step(request, rows, context);
        }
        let row = [planted.row(0.2), planted.row(0.2)];
        planted.step(request, vec![row], 100);
    }
    let report = planted.trace.report();
    let cost = report.cost.as_ref().unwrap();
    let near = ContextBucket { from: 64, to: 127, verify_steps: 6, decode_steps: 3 };
    assert_eq!(cost.contexts, [near, ContextBucket { from: 256, to: 511, verify_steps: 3, decode_steps: 0 }]);
    let warning = report.warnings.iter().find(|w| w.code == "context_mismatch").unwrap();
    assert!(warning.message.starts_with("3 of 9"), "{}", warning.message);
    assert!(code(&report, "few_decode_steps") && cost.verify_ratio.is_some());
}

#[test]
fn a_disturbed_step_is_named_and_the_medians_do_not_move() {
    let trace = Planted::new(5, |union, _| 20_000.0 + 2_000.0 * union, 500.0).requests(12, &|_| 3, &|_| 0.3);
    let calm = trace.report();
    assert!(!code(&calm, "noisy_times") && !code(&calm, "few_requests") && !code(&calm, "few_decode_steps"));
    let mut noisy = trace.clone();
    // Steps go verify, verify, decode: step 20 is a decode step, and it now takes a hundred times as long.
    let time = &mut noisy.times[20];
    (time.step_ns, time.target_ns) = (100 * time.step_ns, 100 * time.target_ns);
    let report = noisy.report();
    let message = &report.warnings.iter().find(|w| w.code == "noisy_times").unwrap().message;
    assert!(
        message.starts_with("decode steps take ") && message.contains("step 20 (") && !message.contains("verify steps take"),
        "{message}"
    );
    let (calm, cost) = (calm.cost.unwrap(), report.cost.unwrap());
    assert!(cost.step_ratio.unwrap() < 0.5 * calm.step_ratio.unwrap());
    // One step more above the middle: the next one is a little longer.
    assert!((cost.step_ratio_median.unwrap() / calm.step_ratio_median.unwrap() - 1.0).abs() < 0.02);
    let medians = cost.verify_step_us_median.unwrap() / cost.decode_step_us_median.unwrap();
    let near = |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 1e-12 * b, "{a:?} is not {b}");
    near(cost.step_ratio_median, medians);
    near(cost.speedup_median, cost.tokens_per_step.unwrap() / medians);
    // A step that no octave compares is none of the mean.
    noisy.times[20].context_len = 5000;
    assert!(!code(&noisy.report(), "noisy_times"));
    // Where there is no ratio, there is none of medians.
    noisy.times.iter_mut().zip(&noisy.steps).filter(|(_, s)| s.phase == Phase::Decode).for_each(|(t, _)| t.context_len = 5000);
    let cost = noisy.report().cost.unwrap();
    assert_eq!((cost.step_ratio, cost.step_ratio_median, cost.verify_ratio_median, cost.speedup_median), (None, None, None, None));
    assert!(cost.verify_us_median.is_some() && cost.decode_us_median.is_some());
}

#[test]
fn advice_by_a_slope_that_is_not_told_apart_from_0_is_doubted() {
    let report = |seed: u64, per_expert: f64| {
        let experts: Experts = if per_expert > 0.0 { |union, _| 20_000.0 + 2_000.0 * union } else { |_, _| 40_000.0 };
        Planted::new(seed, experts, 4_000.0).requests(12, &|_| 3, &|p| p.unit()).report()
    };
    // Experts that cost nothing: half of the seeds have a slope above 0 by chance, and advice goes by it.
    let by_chance = (0..20).map(|seed| report(seed, 0.0)).find(|report| {
        let cost = report.overall.as_ref().unwrap().cost.as_ref().unwrap();
        cost.us_per_expert.unwrap() > 0.0 && within(cost.ci95, 0.0)
    });
    let by_chance = by_chance.unwrap();
    assert!(code(&by_chance, "costs_unclear"), "{:?}", by_chance.warnings);
    let planted = report(1, 2.0);
    assert_eq!(planted.advice.as_ref().unwrap().cost_source, Some(CostSource::Measured));
    assert!(!code(&planted, "costs_unclear"));
}

#[test]
fn times_of_no_device_are_never_shown() {
    let mut trace = Planted::new(17, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(3, &|_| 3, &|_| 0.5);
    trace.manifest.emulated = true;
    trace.manifest.model.bytes_other_per_step = Some(1_000_000);
    let report = trace.report();
    let cost = report.cost.as_ref().unwrap();
    assert_eq!((cost.source, cost.verify_us, cost.verify_ratio, cost.attribution.len()), (None, None, None, 0));
    assert!(cost.model.is_some() && report.layers[0].time.is_none() && report.layers[0].cost.is_none());
    assert!(code(&report, "emulated") && code(&report, "no_device_times"));
}

#[test]
fn a_device_s_clock_is_used_where_it_was_recorded() {
    let mut trace = Planted::new(19, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(3, &|_| 3, &|_| 0.5);
    trace.manifest.device.kind = "cuda".into();
    let report = trace.report();
    assert_eq!(report.cost.as_ref().unwrap().source, Some(TimeSource::Host));
    assert!(code(&report, "host_times"));
    // On the device a step is its target and, in verify steps, 7 µs of drafting.
    for (time, step) in trace.times.iter_mut().zip(&trace.steps) {
        time.device_ns = Some(if step.phase == Phase::Verify { 37_000 } else { 20_000 });
    }
    let cost = trace.report().cost.unwrap();
    assert_eq!((cost.source, cost.verify_ratio), (Some(TimeSource::Device), Some(1.5)));
    // Without operations nobody knows what of a step was drafting, unless nothing on the device drafts.
    trace.kernels = Kernels::default();
    for (kind, verify_ratio) in [("mtp", None), ("dspark", None), ("ngram", Some(1.85))] {
        trace.manifest.drafter.kind = kind.into();
        let report = trace.report();
        assert_eq!(code(&report, "drafting_not_apart"), verify_ratio.is_none(), "{kind}");
        let cost = report.cost.unwrap();
        assert_eq!((cost.source, cost.verify_ratio), (Some(TimeSource::Device), verify_ratio), "{kind}");
        assert_eq!((cost.verify_us.is_none(), cost.decode_us), (verify_ratio.is_none(), Some(20.0)), "{kind}");
        assert!(cost.step_ratio.is_some(), "{kind}");
    }
}

#[test]
fn operations_without_their_step_are_an_error() {
    let mut trace = Planted::new(21, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(1, &|_| 3, &|_| 0.5);
    let last = trace.kernels.len() - 1;
    trace.kernels.step_id[last] = 99;
    assert_eq!(trace.try_report().unwrap_err().to_string(), "kernels: step 99: the step is not in `steps`");
    trace.kernels.step_id[last] = 8;
    trace.kernels.end_ns[last] = 0;
    assert_eq!(trace.try_report().unwrap_err().to_string(), "kernels: step 8: an operation ends before it begins");
}

#[test]
fn kept_rows_only_have_no_cost_per_expert() {
    let mut trace = Planted::new(23, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(3, &|_| 3, &|_| 0.5);
    trace.manifest.window_completeness = crate::trace::manifest::WindowCompleteness::AcceptedOnly;
    let report = trace.report();
    let cost = report.layers[0].cost.as_ref().unwrap();
    assert!(cost.us_per_expert.is_none() && cost.unknown_because.as_ref().unwrap().contains("rejected rows"), "{cost:?}");
    assert!(report.cost.unwrap().verify_ratio.is_some(), "the steps' own times do not depend on it");
}

#[test]
fn steps_that_a_profile_has_not_seen_are_not_compared() {
    let mut trace = Planted::new(29, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(3, &|_| 3, &|_| 0.5);
    trace.manifest.device.kind = "cuda".into();
    trace.manifest.host_times = false;
    let mut seen = 0;
    for (i, (time, step)) in trace.times.iter_mut().zip(&trace.steps).enumerate() {
        (time.step_ns, time.target_ns) = (0, 0);
        time.device_ns = (i % 3 != 0).then_some(if step.phase == Phase::Verify { 37_000 } else { 20_000 });
        seen += u64::from(time.device_ns.is_some() && step.phase != Phase::Prefill);
    }
    let report = trace.report();
    assert!(!code(&report, "no_step_times"));
    let cost = report.cost.unwrap();
    // Without host times a step is what it did on the device, drafting included.
    assert_eq!((cost.source, cost.verify_ratio, cost.step_ratio), (Some(TimeSource::Device), Some(1.5), Some(1.85)));
    assert_eq!(cost.contexts.iter().map(|c| c.verify_steps + c.decode_steps).sum::<u64>(), seen);
}

#[test]
fn passes_of_several_requests_have_no_cost_per_expert() {
    let mut trace = Planted::new(31, |union, _| 2_000.0 + 100.0 * union, 0.0).requests(3, &|_| 3, &|_| 0.5);
    trace.manifest.warnings.push(Warning::new(BATCHED_PASSES, "several"));
    let report = trace.report();
    let cost = report.layers[0].cost.as_ref().unwrap();
    assert!(cost.us_per_expert.is_none() && cost.unknown_because.as_ref().unwrap().contains("several requests"), "{cost:?}");
}

/// A request of verify steps of (rows, accepted, ns of the step), and a decode step of 10 µs.
fn lengths(requests: u32, steps: &[(u16, u16, i64)]) -> Memory {
    let mut trace = Memory::new(&[3], EXPERTS, 1);
    trace.manifest.emulated = false;
    for request_id in 0..requests {
        for &(rows, accepted, ns) in steps.iter().chain([&(1, 0, 10_000)]) {
            let step_id = trace.steps.len() as u32;
            let phase = if rows > 1 { Phase::Verify } else { Phase::Decode };
            trace.steps.push(StepRow { step_id, request_id, phase, rows, accepted, emitted: u32::from(accepted) + 1, context_len: 7 });
            trace.times.push(StepTime { context_len: 7, step_ns: ns, target_ns: ns, device_ns: None });
            trace.routes.extend((0..rows).map(|row| Route { step: step_id, layer: 3, row, draft: false, ids: vec![row], weights: vec![] }));
        }
    }
    trace
}

#[test]
fn windows_of_several_lengths_are_compared_as_a_whole_too() {
    // The example of `AllRows`.
    let report = lengths(2, &[(2, 1, 20_000), (4, 3, 40_000), (4, 3, 40_000), (4, 3, 40_000)]).report();
    let cost = report.cost.unwrap();
    assert_eq!((cost.tokens_per_step, cost.step_ratio, cost.speedup), (Some(4.0), Some(4.0), Some(1.0)));
    let all = cost.all_rows.unwrap();
    assert_eq!((all.verify_steps, all.tokens_per_step, all.step_ratio, all.speedup), (8, Some(3.5), Some(3.5), Some(1.0)));
    // Requests that are alike have points for intervals.
    assert_eq!((all.step_ratio_ci95, all.speedup_ci95), (Some([3.5, 3.5]), Some([1.0, 1.0])));
    // One length is compared once.
    assert_eq!(lengths(2, &[(4, 3, 40_000), (4, 0, 40_000)]).report().cost.unwrap().all_rows, None);
    // Without acceptance there is a ratio, but no speedup.
    let mut unknown = lengths(2, &[(2, 0, 20_000), (4, 0, 40_000)]);
    unknown.manifest.acceptance_known = false;
    let all = unknown.report().cost.unwrap().all_rows.unwrap();
    assert_eq!((all.tokens_per_step, all.step_ratio, all.speedup), (None, Some(3.0), None));
}

#[test]
fn all_lengths_agree_with_plain_sums() {
    let trace = timed(9);
    let all = trace.report().cost.unwrap().all_rows.unwrap();
    let of = |phase: Phase| trace.steps.iter().zip(&trace.times).filter(move |(s, _)| s.phase == phase);
    let mean = |phase: Phase| of(phase).map(|(_, t)| t.step_ns as f64).sum::<f64>() / of(phase).count() as f64;
    // All contexts are in one octave.
    let ratio = mean(Phase::Verify) / mean(Phase::Decode);
    let tokens = of(Phase::Verify).map(|(s, _)| f64::from(s.accepted) + 1.0).sum::<f64>() / of(Phase::Verify).count() as f64;
    assert_eq!(all.verify_steps as usize, of(Phase::Verify).count());
    assert!((all.step_ratio.unwrap() - ratio).abs() < 1e-9 && (all.tokens_per_step.unwrap() - tokens).abs() < 1e-12);
    assert!((all.speedup.unwrap() - tokens / ratio).abs() < 1e-9 && within(all.speedup_ci95, tokens / ratio));
}

/// Device times of 4 % more than the operations, by step, and of 2 %.
#[test]
fn components_that_do_not_add_up_to_the_pass_are_said() {
    for (percent, said) in [(98, false), (102, false), (96, true), (104, true)] {
        let mut trace = Planted::new(9, |union, _| 20_000.0 + 2_000.0 * union, 0.0).requests(6, &|_| 3, &|_| 0.3);
        trace.manifest.device.kind = "cuda".to_owned();
        for (step, time) in trace.steps.iter().zip(&mut trace.times) {
            let of = |i: &usize| trace.kernels.step_id[*i] == step.step_id;
            let sum: i64 = (0..trace.kernels.len()).filter(of).map(|i| trace.kernels.end_ns[i] - trace.kernels.begin_ns[i]).sum();
            let drafting = if step.rows > 1 { 7_000 } else { 0 };
            time.device_ns = Some(drafting + (sum - drafting) * percent / 100);
        }
        let report = trace.report();
        assert_eq!(report.cost.as_ref().unwrap().source, Some(TimeSource::Device));
        assert_eq!(code(&report, "components_miss_the_step"), said, "{percent}: {:?}", report.warnings);
    }
    // Of a CPU's steps nobody expects it.
    let report = Planted::new(9, |union, _| 20_000.0 + 2_000.0 * union, 0.0).requests(6, &|_| 3, &|_| 0.3).report();
    assert!(!code(&report, "components_miss_the_step"));
}
