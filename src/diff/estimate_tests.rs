use super::*;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn ratio(pairs: &[(f64, f64)]) -> Estimate {
    Estimate::ratio(pairs.iter().copied()).unwrap()
}

#[test]
fn worked_example_of_a_ratio() {
    let e = ratio(&[(30.0, 10.0), (60.0, 10.0), (0.0, 0.0)]);
    assert_eq!(e.value, 4.5);
    assert_eq!(e.spread, Spread::Requests(vec![Some(-0.75), Some(0.75), None]));
    // Two requests: se = sqrt(2 / 1 * 2 * 0.75²) = 1.5, as sd / sqrt(2) of 3 and 6 is.
    let own = e.own().unwrap();
    assert!((own.below - 1.5).abs() < 1e-12 && own.df == 1.0);
    assert!((own.interval()[1] - (4.5 + 12.706_2 * 1.5)).abs() < 1e-3);
    assert_eq!(Estimate::ratio([(3.0, 0.0)].into_iter()), None);
    assert_eq!(ratio(&[(3.0, 1.0)]).own(), None);
}

#[test]
fn worked_example_of_pairs() {
    // Requests differ a lot, their changes hardly: 10 -> 11, 20 -> 21.2, 30 -> 31.1, one window each.
    let (b, c) = (ratio(&[(10.0, 1.0), (20.0, 1.0), (30.0, 1.0)]), ratio(&[(31.1, 1.0), (11.0, 1.0), (21.2, 1.0)]));
    let paired = difference(&b, &c, Pairs::Same(&[(0, 1), (1, 2), (2, 0)])).unwrap();
    // Changes 1, 1.2, 1.1: mean 1.1, sd 0.1, se 0.1 / sqrt(3).
    assert!((paired.at - 1.1).abs() < 1e-12 && (paired.below - 0.1 / 3f64.sqrt()).abs() < 1e-12 && paired.df == 2.0);
    let apart = difference(&b, &c, Pairs::Different).unwrap();
    assert!(apart.below > 50.0 * paired.below);
    assert!((apart.df - 4.0).abs() < 1e-3, "{}", apart.df);
    assert!(paired.p_zero() < 0.01 && apart.p_zero() > 0.8);
    let exact = difference(&b, &c, Pairs::Exact).unwrap();
    assert_eq!((exact.interval(), exact.p_zero(), exact.detectable()), ([exact.at; 2], 0.0, 0.0));
}

#[test]
fn worked_example_of_intervals() {
    // Zou and Donner: 10 [9, 12] and 15 [13, 16]: 5 - sqrt(2² + 2²), 5 + sqrt(1 + 1).
    let (b, c) = (Estimate::with_interval(10.0, Some([9.0, 12.0])), Estimate::with_interval(15.0, Some([13.0, 16.0])));
    let [low, high] = difference(&b, &c, Pairs::Different).unwrap().interval();
    assert!((low - (5.0 - 8f64.sqrt())).abs() < 1e-9 && (high - (5.0 + 2f64.sqrt())).abs() < 1e-9);
    assert!(log_ratio(&b, &c, Pairs::Different).unwrap().p_zero() < 0.01);
    assert_eq!(difference(&b, &Estimate::point(3.0), Pairs::Different), None);
    assert_eq!(log_ratio(&b, &Estimate::with_interval(1.0, Some([0.0, 2.0])), Pairs::Different), None);
    assert_eq!(Estimate::with_interval(1.0, Some([2.0, 3.0])).spread, Spread::Unknown);
}

#[test]
fn worked_example_of_false_discovery() {
    let q = false_discovery(&[0.01, 0.04, 0.03, 0.5]);
    for (q, want) in q.iter().zip([0.04, 0.04 * 4.0 / 3.0, 0.04 * 4.0 / 3.0, 0.5]) {
        assert!((q - want).abs() < 1e-12);
    }
    assert!(false_discovery(&[]).is_empty());
}

/// Requests of 20 to 30 windows whose means differ by `between` and whose windows by `within`.
fn requests(rng: &mut ChaCha8Rng, n: usize, between: f64, within: f64) -> Vec<(f64, f64)> {
    let normal = |rng: &mut ChaCha8Rng| (0..12).map(|_| f64::from(rng.next_u32()) / f64::from(u32::MAX)).sum::<f64>() - 6.0;
    let request = |rng: &mut ChaCha8Rng| {
        let windows = 20 + rng.next_u32() % 11;
        let mean = 25.0 + between * normal(rng);
        ((0..windows).map(|_| mean + within * normal(rng)).sum(), f64::from(windows))
    };
    (0..n).map(|_| request(rng)).collect()
}

#[test]
fn intervals_agree_with_a_bootstrap_over_requests() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let pairs = requests(&mut rng, 200, 1.0, 3.0);
    let interval = ratio(&pairs).own().unwrap().interval();
    let mut means: Vec<f64> = (0..4000)
        .map(|_| {
            let drawn = (0..pairs.len()).map(|_| pairs[(rng.next_u32() as usize) % pairs.len()]);
            let (n, d) = drawn.fold((0.0, 0.0), |(n, d), (a, b)| (n + a, d + b));
            n / d
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let width = means[3899] - means[99];
    assert!(((interval[1] - interval[0]) / width - 1.0).abs() < 0.1, "{interval:?} {width}");
}

#[test]
fn intervals_cover_as_often_as_they_say() {
    // 1000 intervals of 8 requests each: 95 % of them hold the true mean, within four standard errors of that share.
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let covered = (0..1000)
        .filter(|_| {
            let [low, high] = ratio(&requests(&mut rng, 8, 1.0, 3.0)).own().unwrap().interval();
            low <= 25.0 && 25.0 <= high
        })
        .count();
    assert!((922..=978).contains(&covered), "{covered}");
}

#[test]
fn changes_of_the_detectable_size_are_seen_four_times_of_five() {
    let mut rng = ChaCha8Rng::seed_from_u64(12);
    let run = |rng: &mut ChaCha8Rng, by: f64| {
        let pairs: Vec<_> = requests(rng, 64, 1.0, 3.0).into_iter().map(|(n, d)| (n + by * d, d)).collect();
        ratio(&pairs)
    };
    let size = difference(&run(&mut rng, 0.0), &run(&mut rng, 0.0), Pairs::Different).unwrap().detectable();
    let seen =
        (0..400).filter(|_| difference(&run(&mut rng, 0.0), &run(&mut rng, size), Pairs::Different).unwrap().p_zero() < 0.05).count();
    assert!((280..=360).contains(&seen), "{seen}");
}

#[test]
fn influences_are_what_leaving_a_request_out_does() {
    // The naive way: the jackknife's standard error. Both are first-order, so they agree for many requests.
    let pairs = requests(&mut ChaCha8Rng::seed_from_u64(3), 300, 1.0, 3.0);
    let total = pairs.iter().fold((0.0, 0.0), |(n, d), (a, b)| (n + a, d + b));
    let without: Vec<f64> = pairs.iter().map(|(n, d)| (total.0 - n) / (total.1 - d)).collect();
    let (m, mean) = (without.len() as f64, without.iter().sum::<f64>() / without.len() as f64);
    let jackknife = ((m - 1.0) / m * without.iter().map(|w| (w - mean).powi(2)).sum::<f64>()).sqrt();
    assert!((ratio(&pairs).own().unwrap().below / jackknife - 1.0).abs() < 0.01);
}

proptest! {
    #[test]
    fn affine_changes_keep_the_test(pairs in prop::collection::vec((1f64..100.0, 1f64..50.0), 3..20), a in -5f64..5.0, b in 0.1f64..4.0) {
        let e = ratio(&pairs);
        let (plain, moved) = (e.own().unwrap(), e.affine(a, -b).own().unwrap());
        prop_assert!((moved.below - b * plain.below).abs() <= 1e-9 * (1.0 + plain.below * b));
        prop_assert!((moved.at - (a - b * plain.at)).abs() < 1e-9 * (1.0 + plain.at.abs() * b));
    }

    #[test]
    fn a_run_does_not_differ_from_itself(pairs in prop::collection::vec((0f64..100.0, 0f64..50.0), 2..20)) {
        let Some(e) = Estimate::ratio(pairs.iter().copied()) else { return Ok(()) };
        let same: Vec<(usize, usize)> = (0..pairs.len()).map(|i| (i, i)).collect();
        if let Some(shift) = difference(&e, &e, Pairs::Same(&same)) {
            prop_assert_eq!((shift.at, shift.below, shift.p_zero()), (0.0, 0.0, 1.0));
        }
    }

    #[test]
    fn q_is_monotone_and_not_below_p(p in prop::collection::vec(0f64..1.0, 1..40)) {
        let q = false_discovery(&p);
        for i in 0..p.len() {
            prop_assert!(q[i] >= p[i] - 1e-15 && q[i] <= 1.0);
            // The naive definition, for each claim on its own.
            let naive = p.iter().filter(|x| **x >= p[i]).map(|x| x * p.len() as f64 / p.iter().filter(|y| **y <= *x).count() as f64);
            prop_assert!((q[i] - naive.fold(1.0, f64::min)).abs() < 1e-12);
        }
    }
}
