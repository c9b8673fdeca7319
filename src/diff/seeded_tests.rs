//! How often rules fail without a change, and how often they see one: many made-up pairs of runs.

use super::compare::Verdict;
use super::testing::report;
use super::*;
use crate::metric::report::{LayerReport, RequestIdentity, RequestSums};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const LAYERS: u16 = 40;
const TOKENS: u32 = 64;

/// Nearly normal, standard deviation 1.
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| f64::from(rng.next_u32()) / f64::from(u32::MAX)).sum::<f64>() - 6.0
}

/// A run of so many requests of 64 tokens each. Requests differ in difficulty (4 % in unions, 0.1 in acceptance), by a draw of
/// their own; windows scatter by 3 experts, with half of that in common to all layers. `union_by` is the planted change.
fn run(requests: u32, prompts: u64, windows: u64, union_by: f64) -> Report {
    let mut report = report();
    let template = report.layers[0].clone();
    report.layers = (0..LAYERS).map(|layer| LayerReport { layer, ..template.clone() }).collect();
    let mut scatter = ChaCha8Rng::seed_from_u64(windows);
    let mut by_request = Vec::new();
    for request_id in 0..requests {
        // What belongs to the prompt is drawn by the prompt's seed alone.
        let mut prompt = ChaCha8Rng::seed_from_u64(prompts.wrapping_mul(1000) + u64::from(request_id));
        let (level, acceptance) = (25.0 * (1.0 + 0.04 * normal(&mut prompt)), 0.7 + 0.1 * normal(&mut prompt).clamp(-2.0, 2.0));
        let (mut tokens, mut steps, mut accepted) = (0, 0u64, 0u64);
        let mut union = vec![0u64; usize::from(LAYERS)];
        while tokens < TOKENS {
            let mut kept = 0;
            while kept < 3 && f64::from(scatter.next_u32()) < acceptance * f64::from(u32::MAX) {
                kept += 1;
            }
            (tokens, steps, accepted) = (tokens + kept + 1, steps + 1, accepted + u64::from(kept));
            let common = 1.5 * normal(&mut scatter);
            for sum in &mut union {
                let size = (level + common + 2.6 * normal(&mut scatter)) * (1.0 + union_by);
                *sum += size.round().clamp(8.0, 32.0) as u64;
            }
        }
        let mut request = report.by_request[0].clone();
        (request.request_id, request.verify_steps, request.accepted) = (request_id, steps, Some(accepted));
        request.sums = Some(RequestSums { windows: vec![steps; union.len()], wasted: Some(vec![steps; union.len()]), union });
        let identity = |of: u64| format!("{of}-{request_id}");
        request.identity = Some(RequestIdentity { prompt: Some(identity(prompts)), output: identity(windows), windows: identity(windows) });
        by_request.push(request);
    }
    report.by_request = by_request;
    report.totals.requests = u64::from(requests);
    restate(&mut report);
    report
}

/// The means that belong to the requests' sums.
fn restate(report: &mut Report) {
    let sums: Vec<&RequestSums> = report.by_request.iter().filter_map(|r| r.sums.as_ref()).collect();
    let mean = |slot: usize| {
        let of = |pick: fn(&RequestSums) -> &Vec<u64>| sums.iter().map(|s| pick(s)[slot]).sum::<u64>() as f64;
        of(|s| &s.union) / of(|s| &s.windows)
    };
    let means: Vec<f64> = (0..report.layers.len()).map(mean).collect();
    for (layer, mean) in report.layers.iter_mut().zip(&means) {
        layer.stats.union.as_mut().unwrap().mean = *mean;
    }
    // All layers have the same windows.
    report.overall.as_mut().unwrap().stats.union.as_mut().unwrap().mean = means.iter().sum::<f64>() / means.len() as f64;
    let (accepted, steps) = report.by_request.iter().fold((0, 0), |(a, s), r| (a + r.accepted.unwrap(), s + r.verify_steps));
    report.acceptance.accepted_drafts_mean = Some(accepted as f64 / steps as f64);
    report.acceptance.tokens_per_step = Some(accepted as f64 / steps as f64 + 1.0);
}

fn compared(base: &Report, candidate: &Report, rules: &Rules) -> Comparison {
    let options = Options { allow: vec![Kind::Workload], ..Options::default() };
    diff_reports(base, candidate, rules, &options).unwrap()
}

fn verdict_of(c: &Comparison, path: &str) -> Verdict {
    c.rows.iter().find(|r| r.layer.is_none() && r.path == path).unwrap().verdict
}

const PAIRS: u64 = 200;

#[test]
fn without_a_change_default_rules_fail_in_at_most_5_percent() {
    for paired in [true, false] {
        let (mut failed, mut claimed, mut layers) = (0, 0, 0);
        for seed in 0..PAIRS {
            let other = if paired { seed } else { seed + 5000 };
            let (base, candidate) = (run(64, seed, 2 * seed + 1, 0.0), run(64, other, 2 * seed + 2, 0.0));
            let c = compared(&base, &candidate, &rules::defaults());
            assert_eq!(c.pairing.is_paired(), paired);
            assert!(!c.pairing.is_exact());
            failed += u32::from(c.failed());
            claimed += u32::from(
                ["union.mean", "acceptance.tokens_per_step"].iter().any(|p| matches!(verdict_of(&c, p), Verdict::Worse | Verdict::Better)),
            );
            layers += u32::from(c.rows.iter().any(|r| r.layer.is_some() && matches!(r.verdict, Verdict::Worse | Verdict::Better)));
        }
        assert!(failed * 20 <= 200, "paired {paired}: the rules fail in {failed} of {PAIRS}");
        // Verdicts are tests at 5 %: 10 of 200, and 20 are more than three standard errors above.
        assert!(claimed <= 20 && layers <= 20, "paired {paired}: {claimed} and {layers} of {PAIRS} claim a change");
    }
}

#[test]
fn a_planted_5_percent_is_caught() {
    for paired in [true, false] {
        let caught = (0..PAIRS).filter(|&seed| {
            let other = if paired { seed } else { seed + 5000 };
            let c = compared(&run(64, seed, 2 * seed + 1, 0.0), &run(64, other, 2 * seed + 2, 0.05), &rules::defaults());
            c.gates[0].status == Status::Failed
        });
        let caught = caught.count();
        assert!(caught * 100 >= 95 * PAIRS as usize, "paired {paired}: {caught} of {PAIRS}");
    }
}

#[test]
fn the_size_that_could_be_seen_is_seen() {
    // Plant what one comparison says it could see: verdicts find it in about four of five.
    let of = |c: &Comparison| c.rows.iter().find(|r| r.layer.is_none() && r.path == "union.mean").unwrap().detectable().unwrap();
    let size = of(&compared(&run(64, 1, 3, 0.0), &run(64, 7001, 4, 0.0), &Rules::default()));
    assert!((0.005..0.05).contains(&size), "{size}");
    let seen = (0..PAIRS).filter(|&seed| {
        let c = compared(&run(64, seed, 2 * seed + 1, 0.0), &run(64, seed + 5000, 2 * seed + 2, size), &Rules::default());
        c.rows.iter().find(|r| r.layer.is_none() && r.path == "union.mean").unwrap().p.unwrap() < 0.05
    });
    let seen = seen.count();
    assert!((130..=188).contains(&seen), "{seen} of {PAIRS} at {size}");
}

#[test]
fn a_run_is_the_same_as_itself() {
    let base = run(64, 1, 1, 0.0);
    let c = compared(&base, &base, &rules::defaults());
    assert!(c.pairing.is_exact() && !c.failed());
    assert!(c.rows.iter().all(|row| row.verdict == Verdict::Same), "{:?}", c.rows.iter().find(|r| r.verdict != Verdict::Same));
    // Also by intervals alone, without the requests' sums.
    let mut old = base.clone();
    for request in &mut old.by_request {
        (request.sums, request.accepted, request.identity) = (None, None, None);
    }
    let c = compared(&old, &old, &rules::defaults());
    assert!(!c.failed() && c.warnings.iter().any(|w| w.code == "prompts_unknown"));
    assert_eq!(c.count(Verdict::Worse, false) + c.count(Verdict::Better, false), 0);
}

#[test]
fn incomparable_runs_are_refused_by_name() {
    let (base, mut candidate) = (run(4, 1, 1, 0.0), run(4, 1, 1, 0.0));
    candidate.run.drafter.draft_len = Some(5);
    candidate.run.device.name = "other".into();
    let refused = diff_reports(&base, &candidate, &Rules::default(), &Options::default()).unwrap_err().to_string();
    assert!(refused.contains("draft_len: 3 (windows of 4 rows) against 5") && refused.ends_with("--allow draft_len,device"), "{refused}");
    let options = Options { allow: vec![Kind::DraftLen], ..Options::default() };
    let refused = diff_reports(&base, &candidate, &Rules::default(), &options).unwrap_err().to_string();
    assert!(refused.ends_with("--allow device"), "{refused}");
    // The file of rules may allow as well.
    let rules = Rules { allow: vec![Kind::Device], ..Rules::default() };
    let c = diff_reports(&base, &candidate, &rules, &options).unwrap();
    assert_eq!(c.differences.iter().map(|d| d.kind).collect::<Vec<_>>(), [Kind::DraftLen, Kind::Device]);
}
