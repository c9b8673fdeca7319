//! Routings whose statistics are known beforehand, and traces that something is wrong with.

use super::memory::{Memory, Route};
use crate::metric::report::Report;
use crate::trace::manifest::WindowCompleteness;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `k` distinct draws with these weights.
fn draw(rng: &mut ChaCha8Rng, weights: &[f64], k: usize) -> Vec<u16> {
    let mut chosen: Vec<u16> = Vec::new();
    let total: f64 = weights.iter().sum();
    while chosen.len() < k {
        let mut at = f64::from(rng.next_u32()) / 4294967296.0 * total;
        let id = weights.iter().position(|w| {
            at -= w;
            at < 0.0
        });
        let id = id.unwrap_or(weights.len() - 1) as u16;
        if !chosen.contains(&id) {
            chosen.push(id);
        }
    }
    chosen
}

/// 20 requests of 40 windows of 4 rows in one layer, rows drawn independently.
fn independent(weights: &[f64], k: u16) -> Memory {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut trace = Memory::new(&[3], weights.len() as u16, k);
    for request in 0..20 {
        for _ in 0..40 {
            let rows = (0..4).map(|_| draw(&mut rng, weights, usize::from(k))).collect();
            let accepted = (rng.next_u32() % 4) as u16;
            trace.verify(request, accepted, &[rows]);
        }
    }
    trace
}

fn codes(report: &Report) -> Vec<&str> {
    report.warnings.iter().map(|w| w.code.as_str()).collect()
}

#[test]
fn uniform_rows_are_as_good_as_chance() {
    let report = independent(&[1.0; 128], 8).report();
    let stats = &report.layers[0].stats;
    let union = stats.union.as_ref().unwrap();
    let [low, high] = union.ci95.unwrap();
    // 29.1 is the published value for 128 / 8 and 4 rows.
    let expected = stats.uniform_union.unwrap();
    assert!(low < expected && expected < high && high - low < 0.5, "{low} {high}");
    assert!((stats.uniform_union.unwrap() - 29.1).abs() < 0.05);
    assert!(stats.lift.unwrap().abs() < 0.02 && stats.popularity_lift.unwrap().abs() < 0.02);
    assert!((stats.lag_overlap_frac.as_ref().unwrap()[1] - 8.0 / 128.0).abs() < 0.01);
}

#[test]
fn identical_rows_have_the_union_of_one() {
    let mut trace = Memory::new(&[1, 2], 64, 4);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for request in 0..3 {
        for _ in 0..10 {
            let layer = |rng: &mut ChaCha8Rng| vec![draw(rng, &[1.0; 64], 4); 5];
            let ids = [layer(&mut rng), layer(&mut rng)];
            trace.verify(request, 2, &ids);
        }
    }
    let report = trace.report();
    for stats in report.layers.iter().map(|l| &l.stats).chain(report.overall.iter().map(|o| &o.stats)) {
        assert_eq!(stats.union.as_ref().unwrap().mean, 4.0);
        assert_eq!((stats.lift, stats.wasted_mean, stats.marginal_rejected), (Some(1.0), Some(0.0), Some(0.0)));
        assert_eq!(stats.lag_jaccard.as_ref().unwrap(), &[1.0; 5]);
        assert_eq!(stats.prefix_union, [4.0; 5]);
    }
    assert_eq!(report.overall.as_ref().unwrap().worst_layer, 1, "the lowest layer on a tie");
}

#[test]
fn planted_popularity_explains_the_union() {
    let weights: Vec<f64> = (0..64).map(|e| 1.0 / f64::from(e + 1)).collect();
    let report = independent(&weights, 4).report();
    let stats = &report.layers[0].stats;
    assert!(stats.lift.unwrap() > 0.2, "rows agree far more than uniform ones: {:?}", stats.lift);
    assert!(stats.popularity_lift.unwrap().abs() < 0.02, "but not more than popularity explains: {:?}", stats.popularity_lift);
    let load = report.layers[0].load.unwrap();
    assert!(load.max_over_mean > 8.0 && load.effective_experts < 45.0);
}

#[test]
fn worst_layer_and_spread() {
    let mut trace = Memory::new(&[4, 5, 6], 64, 2);
    let (same, apart) = (vec![vec![0, 1], vec![0, 1]], vec![vec![0, 1], vec![2, 3]]);
    let half = vec![vec![0, 1], vec![1, 2]];
    for request in 0..2 {
        trace.verify(request, 0, &[same.clone(), apart.clone(), half.clone()]);
    }
    let overall = trace.report().overall.unwrap();
    assert_eq!((overall.worst_layer, overall.layer_spread.min, overall.layer_spread.max), (5, 2.0, 4.0));
    assert!((overall.layer_spread.sd - (2.0f64 / 3.0).sqrt()).abs() < 1e-12);
    assert_eq!((overall.stats.windows, overall.stats.union.unwrap().mean), (6, 3.0));
}

#[test]
fn kept_rows_only_are_lower_bounds() {
    let mut trace = Memory::new(&[0], 64, 2);
    trace.manifest.window_completeness = WindowCompleteness::AcceptedOnly;
    for request in 0..2 {
        trace.verify(request, 1, &[vec![vec![0, 1], vec![1, 2], vec![5, 6]]]);
        trace.verify(request, 2, &[vec![vec![0, 1], vec![1, 2], vec![5, 6]]]);
        trace.verify(request, 1, &[vec![vec![0, 1], vec![8, 9], vec![5, 6]]]);
    }
    // The engine hid the rejected rows.
    let kept = |r: &Route| r.row <= trace.steps.iter().find(|s| s.step_id == r.step).unwrap().accepted;
    trace.routes = trace.routes.iter().filter(|r| kept(r)).cloned().collect();
    let report = trace.report();
    let layer = &report.layers[0];
    assert_eq!((layer.stats.rows, layer.stats.windows, layer.by_rows[0].rows, layer.by_rows[0].windows), (2, 4, 3, 2));
    assert_eq!(layer.stats.union.as_ref().unwrap().mean, 3.5);
    assert_eq!((layer.stats.wasted_mean, layer.stats.marginal_rejected, layer.by_rows[0].wasted_mean), (None, None, None));
    assert!(report.by_request.iter().all(|r| r.wasted_mean.is_none() && r.union_mean.is_some()));
    assert!(codes(&report).contains(&"accepted_only"), "{:?}", codes(&report));
    assert_eq!(report.acceptance.tokens_per_step, Some(7.0 / 3.0));
}

#[test]
fn windows_without_all_rows_are_left_out_and_told() {
    let mut trace = independent(&[1.0; 32], 4);
    trace.routes.retain(|r| !(r.step == 7 && r.row == 3));
    trace.routes.retain(|r| !(r.step == 9 && r.row == 1));
    let report = trace.report();
    assert_eq!(report.layers[0].stats.windows, 798);
    assert!(report.layers[0].by_rows.is_empty());
    let warning = report.warnings.iter().find(|w| w.code == "irregular_windows").unwrap();
    assert!(warning.message.contains("2 windows") && warning.message.contains("step 7, layer 3 has 3 of 4"), "{}", warning.message);
}

#[test]
fn unknown_is_null_with_a_warning() {
    let mut empty = Memory::new(&[0, 1], 16, 2);
    let report = empty.report();
    assert!(report.overall.is_none() && report.layers.iter().all(|l| l.stats.union.is_none() && l.load.is_none()));
    assert_eq!(report.acceptance.tokens_per_step, None);
    for code in ["no_verify_steps", "no_device_times", "no_advice", "emulated"] {
        assert!(codes(&report).contains(&code), "{code} in {:?}", codes(&report));
    }
    empty.verify(0, 0, &[vec![vec![0, 1], vec![1, 2]], vec![vec![0, 1], vec![1, 2]]]);
    empty.manifest.complete = false;
    empty.manifest.incomplete_reason = Some("interrupted".into());
    let report = empty.report();
    assert_eq!(report.layers[0].stats.union.as_ref().unwrap().ci95, None);
    assert_eq!(report.acceptance.tokens_per_step_ci95, None);
    assert_eq!(report.layers[0].stats.step_reuse, None, "no window has a previous one");
    assert_eq!(report.layers[0].mass_coverage, None);
    for code in ["too_few_requests", "trace_incomplete", "few_windows", "no_router_weights"] {
        assert!(codes(&report).contains(&code), "{code} in {:?}", codes(&report));
    }
    empty.manifest.window_completeness = WindowCompleteness::None;
    let report = empty.report();
    assert!(report.overall.is_none() && codes(&report).contains(&"no_windows"));
    assert_eq!(report.acceptance.tokens_per_step, Some(1.0));
}

#[test]
fn gate_mass_of_the_best_experts() {
    let mut trace = Memory::new(&[0], 16, 2);
    trace.verify(0, 0, &[vec![vec![0, 1], vec![0, 2]]]);
    trace.verify(1, 0, &[vec![vec![0, 1], vec![2, 3]]]);
    for (route, weights) in trace.routes.iter_mut().zip([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]) {
        route.weights = weights.to_vec();
    }
    let report = trace.report();
    let expected = [(0.625 + 0.25) / 2.0, (0.875 + 0.5) / 2.0, (1.0 + 0.75) / 2.0, 1.0];
    let found = report.layers[0].mass_coverage.as_ref().unwrap();
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9) && found.len() == 4, "{found:?}");
    assert!(!codes(&report).contains(&"no_router_weights"));
}

#[test]
fn contradictions_name_the_row() {
    let message = |change: &dyn Fn(&mut Memory)| {
        let mut trace = independent(&[1.0; 16], 2);
        change(&mut trace);
        trace.try_report().unwrap_err().to_string()
    };
    assert_eq!(message(&|t| t.routes[9].ids[1] = 16), "routes: step 2, layer 3: an expert id is not below 16");
    let dangling = message(&|t| {
        t.steps.remove(5);
    });
    assert_eq!(dangling, "routes: step 5, layer 3: the step is not in `steps`");
    assert!(message(&|t| t.routes[3].layer = 8).starts_with("routes: step 0, layer 8: the manifest"));
    assert!(message(&|t| t.manifest.model.experts_per_token = 3).contains("2 id columns"));
    assert!(message(&|t| t.manifest.model.experts_per_token = 0).starts_with("manifest.json"));
    assert!(message(&|t| t.routes.swap(0, 400)).contains("order"));
    assert!(message(&|t| t.steps[3].accepted = 4).starts_with("steps: step 3"));
}

#[test]
fn a_report_survives_json() {
    let report = independent(&[1.0; 32], 4).report();
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
}
