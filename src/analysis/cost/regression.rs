//! Least squares of the experts' time on what they had to do: T = a + b U + c W.
//!
//! A point is one layer in one step: U distinct experts, W rows, T the time of its routed experts. A decode step is a point with
//! W = 1 and U = k. With S_xy = Σ (x - x̄)(y - ȳ):
//!
//! ```text
//! D = S_uu S_ww - S_uw²     b = (S_ut S_ww - S_wt S_uw) / D     c = (S_wt S_uu - S_ut S_uw) / D     a = T̄ - b Ū - c W̄
//! R² = 1 - (S_tt - b S_ut - c S_wt) / S_tt
//! ```
//!
//! With a single number of rows S_ww = 0: b = S_ut / S_uu, and what rows cost is part of the intercept. Where every union goes
//! with one number of rows (D = 0) their effects cannot be told apart, and b and c are unknown. Over all layers the S are summed
//! over layers, each about its own means: one slope, an intercept a layer. Intervals are drawn over requests: every resample is fitted anew.

use super::collect::{Collected, Grid};
use crate::analysis::Options;
use crate::analysis::pass::Plan;
use crate::analysis::stats::{self, Streams, add_times, percentile_interval};
use crate::metric::Interval;
use crate::metric::cost::{ExpertCost, ResidualPoint};

/// Below this share of U's variance that W does not explain, both say the same.
const MIN_TOLERANCE: f64 = 1e-9;
/// Points of a layer's residuals and one number of rows; more unions than that share a point with their neighbours.
const MAX_RESIDUALS: usize = 24;

/// Numbers of [`Moments`].
const MOMENTS: usize = 10;

/// Sums over points of u = U - k, w = W - 1 and t in ns: n, u, w, t, uu, uw, ww, ut, wt, tt. All but tt are integers that a
/// float holds exactly in any trace of a few days, so that their order does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Moments(pub [f64; MOMENTS]);

impl Moments {
    /// Adds a point.
    pub fn add(&mut self, u: f64, w: f64, t: f64) {
        for (sum, x) in self.0.iter_mut().zip([1.0, u, w, t, u * u, u * w, w * w, u * t, w * t, t * t]) {
            *sum += x;
        }
    }
}

/// Sums about the means.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Centred {
    points: f64,
    /// Intercepts that are fitted with the slopes.
    groups: f64,
    uu: f64,
    uw: f64,
    ww: f64,
    ut: f64,
    wt: f64,
    tt: f64,
}

impl Centred {
    fn of(m: &Moments) -> Self {
        let [n, u, w, t, uu, uw, ww, ut, wt, tt] = m.0;
        if n <= 0.0 {
            return Self::default();
        }
        let about = |xy: f64, x: f64, y: f64| xy - x / n * y;
        Self {
            points: n,
            groups: 1.0,
            uu: about(uu, u, u),
            uw: about(uw, u, w),
            ww: about(ww, w, w),
            ut: about(ut, u, t),
            wt: about(wt, w, t),
            tt: about(tt, t, t),
        }
    }

    fn add(&mut self, other: &Self) {
        self.points += other.points;
        self.groups += other.groups;
        self.uu += other.uu;
        self.uw += other.uw;
        self.ww += other.ww;
        self.ut += other.ut;
        self.wt += other.wt;
        self.tt += other.tt;
    }
}

/// Why there is no slope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unknown {
    TooFew,
    Constant,
    Collinear,
}

impl Unknown {
    fn reason(self) -> &'static str {
        match self {
            Self::TooFew => "too few steps have both the times of their experts and their unions",
            Self::Constant => "every pass touched the same number of experts: a cost per expert needs unions that vary",
            Self::Collinear => {
                "every union goes with one number of rows: what experts cost and what rows cost cannot be told apart (collinear)"
            }
        }
    }
}

/// Slopes in ns.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Slopes {
    b: f64,
    /// `None` when W does not vary.
    c: Option<f64>,
}

fn solve(s: &Centred) -> Result<Slopes, Unknown> {
    let rows_vary = s.ww > 0.5;
    if s.points < s.groups + if rows_vary { 3.0 } else { 2.0 } {
        return Err(Unknown::TooFew);
    }
    // Sums of squares of integers about their mean: what is below this is rounding.
    if s.uu <= 1e-9 * s.points.max(1.0) {
        return Err(Unknown::Constant);
    }
    if !rows_vary {
        return Ok(Slopes { b: s.ut / s.uu, c: None });
    }
    let determinant = s.uu * s.ww - s.uw * s.uw;
    if determinant <= MIN_TOLERANCE * s.uu * s.ww {
        return Err(Unknown::Collinear);
    }
    Ok(Slopes { b: (s.ut * s.ww - s.wt * s.uw) / determinant, c: Some((s.wt * s.uu - s.ut * s.uw) / determinant) })
}

/// The plane T = a + b U + c W through points of U, W, T and a weight, in their own units; c is 0 where W does not vary. Weights are divided
/// by their mean v̄, so that points still count: S_xy = Σ v/v̄ (x - x̄)(y - ȳ), about weighed means.
///
/// # Errors
/// Why there is no such plane, as half a sentence.
pub(in crate::analysis) fn plane(points: &[[f64; 4]]) -> Result<Plane, &'static str> {
    let mut moments = Moments::default();
    let mean = points.iter().map(|[.., v]| v).sum::<f64>() / points.len().max(1) as f64;
    for &[u, w, t, v] in points {
        let mut one = Moments::default();
        one.add(u, w, t);
        for (sum, x) in moments.0.iter_mut().zip(one.0) {
            *sum += v / mean * x;
        }
    }
    let centred = Centred::of(&moments);
    let slopes = solve(&centred).map_err(Unknown::reason)?;
    Ok(Plane { b: slopes.b, c: slopes.c.unwrap_or(0.0), r2: r2(&centred, slopes) })
}

/// Slopes of a plane, and the share of the variance that it explains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::analysis) struct Plane {
    pub b: f64,
    pub c: f64,
    pub r2: Option<f64>,
}

/// 1 - what is left of the variance; `None` without variance.
fn r2(s: &Centred, slopes: Slopes) -> Option<f64> {
    let left = s.tt - slopes.b * s.ut - slopes.c.unwrap_or(0.0) * s.wt;
    (s.tt > 0.0).then(|| (1.0 - left / s.tt).clamp(0.0, 1.0))
}

/// a in ns, for U and W as they are and not less k and 1.
fn intercept(m: &Moments, slopes: Slopes, k: f64) -> Option<f64> {
    let [n, u, w, t, ..] = m.0;
    // Without a slope for rows, W stays in the intercept.
    let rows = slopes.c.map_or(0.0, |c| c * (w / n + 1.0));
    (n > 0.0).then(|| t / n - slopes.b * (u / n + k) - rows)
}

/// The fits of every layer and of all together.
pub(super) struct Fits {
    pub layers: Vec<ExpertCost>,
    pub overall: ExpertCost,
    /// The slope over all layers of each resample, ns for each expert; no number where it has none. Empty where it has no interval.
    pub slopes: Vec<f64>,
}

/// Numbers of a resample for each layer and for all of them: b, c, a.
const DRAWN: usize = 3;

/// Fits the collected points; intervals are drawn over `requests`, ascending.
pub(super) fn fit(collected: &Collected, requests: &[u32], plan: &Plan<'_>, bytes_per_expert: Option<u64>, options: &Options) -> Fits {
    let slots = plan.layers.len();
    let width = slots * MOMENTS;
    let k = plan.k as f64;
    let rows: Vec<f64> = collected.moments.values().flatten().flat_map(|m| m.0).collect();
    // Requests without a point are drawn as well, and add nothing.
    let places: Vec<usize> = collected.moments.keys().filter_map(|request| requests.binary_search(request).ok()).collect();
    debug_assert_eq!(places.len(), collected.moments.len());
    let mut sums = vec![0.0; width];
    add_times(&rows, width, &vec![1; collected.moments.len()], &mut sums);
    let whole = moments_of(&sums);
    // All unions but k are of verify steps: those of a single request are the same in every resample.
    let verifies = |of: &&Vec<Moments>| of.iter().any(|m| m.0[1] > 0.0 || m.0[2] > 0.0);
    let several = collected.moments.values().filter(verifies).count() >= 2;
    let mut all = Centred::default();
    let centred: Vec<Centred> = whole.iter().map(Centred::of).collect();
    centred.iter().for_each(|s| all.add(s));
    let rows_vary: Vec<bool> = centred.iter().chain([&all]).map(|s| solve(s).is_ok_and(|slopes| slopes.c.is_some())).collect();
    let statistics = |_, times: &[u32]| {
        let times: Vec<u32> = places.iter().filter_map(|&place| times.get(place)).copied().collect();
        let mut sums = vec![0.0; width];
        add_times(&rows, width, &times, &mut sums);
        resample(&moments_of(&sums), &rows_vary, k)
    };
    let resamples = if several { options.resamples } else { 0 };
    let draws = stats::draws(requests.len(), (resamples, options.seed, Streams::Common), statistics);
    let intervals = |slot: usize| Intervals {
        b: percentile_interval(&draws, DRAWN * slot),
        c: percentile_interval(&draws, DRAWN * slot + 1),
        a: percentile_interval(&draws, DRAWN * slot + 2),
    };
    let layers = whole.iter().zip(&centred).enumerate().map(|(slot, (moments, centred))| {
        let a = |slopes| intercept(moments, slopes, k);
        report((centred, a), intervals(slot), bytes_per_expert, cells(&collected.grid, slot))
    });
    let layers: Vec<ExpertCost> = layers.collect();
    // Residuals of different layers have different intercepts: the layers' own lists have them.
    let overall = report((&all, |slopes| mean_intercept(&whole, slopes, k)), intervals(slots), bytes_per_expert, Vec::new());
    Fits { layers, overall, slopes: draws.iter().filter_map(|draw| draw.get(DRAWN * slots)).copied().collect() }
}

/// The mean over the layers of their intercepts under common slopes.
fn mean_intercept(layers: &[Moments], slopes: Slopes, k: f64) -> Option<f64> {
    let of: Vec<f64> = layers.iter().filter_map(|m| intercept(m, slopes, k)).collect();
    (!of.is_empty()).then(|| of.iter().sum::<f64>() / of.len() as f64)
}

/// [`DRAWN`] numbers of each layer, then of all together; no numbers where there is no fit. `rows_vary` says of the same whether the whole
/// trace has a slope for rows: a resample without one fits something else, in which rows are part of experts and intercept.
fn resample(layers: &[Moments], rows_vary: &[bool], k: f64) -> Vec<f64> {
    let numbers = |s: &Centred, at: usize, a: &dyn Fn(Slopes) -> Option<f64>| match solve(s) {
        Ok(slopes) if Some(&slopes.c.is_some()) == rows_vary.get(at) => {
            [slopes.b, slopes.c.unwrap_or(f64::NAN), a(slopes).unwrap_or(f64::NAN)]
        }
        _ => [f64::NAN; DRAWN],
    };
    let mut out = Vec::with_capacity(DRAWN * (layers.len() + 1));
    let mut all = Centred::default();
    for (slot, moments) in layers.iter().enumerate() {
        let centred = Centred::of(moments);
        all.add(&centred);
        out.extend(numbers(&centred, slot, &|slopes| intercept(moments, slopes, k)));
    }
    out.extend(numbers(&all, layers.len(), &|slopes| mean_intercept(layers, slopes, k)));
    out
}

/// 95 % intervals of a fit's numbers, ns.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Intervals {
    b: Option<Interval>,
    c: Option<Interval>,
    a: Option<Interval>,
}

fn moments_of(sums: &[f64]) -> Vec<Moments> {
    sums.as_chunks::<MOMENTS>().0.iter().map(|m| Moments(*m)).collect()
}

/// ns to µs, of one or both ends.
fn us(ns: f64) -> f64 {
    ns / 1000.0
}

fn report(
    (centred, intercept): (&Centred, impl Fn(Slopes) -> Option<f64>),
    intervals: Intervals,
    bytes_per_expert: Option<u64>,
    cells: Vec<ResidualPoint>,
) -> ExpertCost {
    let solved = solve(centred);
    let slopes = solved.ok();
    let a = slopes.and_then(intercept);
    let fitted = |p: &ResidualPoint| {
        let slopes = slopes?;
        Some(us(a? + slopes.b * p.union + slopes.c.map_or(0.0, |c| c * f64::from(p.rows))))
    };
    let gb_per_s = |us_per_expert: f64| Some(bytes_per_expert.filter(|_| us_per_expert > 0.0)? as f64 / us_per_expert / 1000.0);
    let b = slopes.map(|s| us(s.b));
    let ci95 = b.and(intervals.b).map(|i| i.map(us));
    let c = slopes.and_then(|s| s.c).map(us);
    ExpertCost {
        us_per_expert: b,
        ci95,
        us_per_row: c,
        us_per_row_ci95: c.and(intervals.c).map(|i| i.map(us)),
        intercept_us: a.map(us),
        intercept_us_ci95: a.and(intervals.a).map(|i| i.map(us)),
        r2: slopes.and_then(|s| r2(centred, s)),
        implied_gb_per_s: b.and_then(gb_per_s),
        implied_gb_per_s_ci95: ci95.and_then(|[low, high]| Some([gb_per_s(high)?, gb_per_s(low)?])),
        points: centred.points as u64,
        unknown_because: solved.err().map(|why| why.reason().to_owned()),
        residuals: cells.into_iter().map(|p| ResidualPoint { residual_us: fitted(&p).map(|f| p.mean_us - f), ..p }).collect(),
    }
}

/// A slot's points, those of neighbouring unions together where there are many.
fn cells(grid: &Grid, slot: usize) -> Vec<ResidualPoint> {
    let mut by_rows: Vec<(u16, Vec<(u16, u64, u64)>)> = Vec::new();
    for (&(_, rows, union), &(n, ns)) in grid.range((slot, 0, 0)..=(slot, u16::MAX, u16::MAX)) {
        match by_rows.last_mut().filter(|(r, _)| *r == rows) {
            Some((_, cells)) => cells.push((union, n, ns)),
            None => by_rows.push((rows, vec![(union, n, ns)])),
        }
    }
    let together = |rows: u16, cells: &[(u16, u64, u64)]| {
        let (mut points, mut unions, mut total) = (0u64, 0.0, 0.0);
        for &(union, n, ns) in cells {
            (points, unions, total) = (points + n, unions + f64::from(union) * n as f64, total + ns as f64);
        }
        let mean = |sum: f64| sum / points as f64;
        ResidualPoint { rows, union: mean(unions), points, mean_us: us(mean(total)), residual_us: None }
    };
    let of_rows = |(rows, cells): (u16, Vec<(u16, u64, u64)>)| {
        let size = cells.len().div_ceil(MAX_RESIDUALS).max(1);
        cells.chunks(size).map(|c| together(rows, c)).collect::<Vec<_>>()
    };
    by_rows.into_iter().flat_map(of_rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::steps::StepTable;
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn moments(points: &[(f64, f64, f64)]) -> Moments {
        let mut moments = Moments::default();
        points.iter().for_each(|&(u, w, t)| moments.add(u, w, t));
        moments
    }

    fn near(a: f64, b: f64, scale: f64) -> bool {
        (a - b).abs() <= 1e-9 * scale.max(1.0)
    }

    #[test]
    fn worked_example() {
        // T = 7 + 3 U + 2 W with k = 4, so u = U - 4 and w = W - 1: (U, W) = (4, 1) (6, 3) (8, 3) (9, 3).
        let points = [(4.0, 1.0), (6.0, 3.0), (8.0, 3.0), (9.0, 3.0)].map(|(u, w)| (u - 4.0, w - 1.0, 7.0 + 3.0 * u + 2.0 * w));
        let m = moments(&points);
        let s = Centred::of(&m);
        let slopes = solve(&s).unwrap();
        assert!(near(slopes.b, 3.0, 1.0) && near(slopes.c.unwrap(), 2.0, 1.0), "{slopes:?}");
        assert!(near(intercept(&m, slopes, 4.0).unwrap(), 7.0, 1.0));
        assert!(near(r2(&s, slopes).unwrap(), 1.0, 1.0));
        // One number of rows: 2 W is part of the intercept.
        let m = moments(&points[1..]);
        let slopes = solve(&Centred::of(&m)).unwrap();
        assert!(near(slopes.b, 3.0, 1.0) && slopes.c.is_none());
        assert!(near(intercept(&m, slopes, 4.0).unwrap(), 13.0, 1.0));
    }

    #[test]
    fn a_fit_that_explains_half() {
        // u = 0 0 2 2, t = 1 3 3 5: S_uu = 4, S_ut = 4, S_tt = 8; b = 1, R² = 1 - (8 - 4) / 8.
        let s = Centred::of(&moments(&[(0.0, 0.0, 1.0), (0.0, 0.0, 3.0), (2.0, 0.0, 3.0), (2.0, 0.0, 5.0)]));
        let slopes = solve(&s).unwrap();
        assert_eq!((slopes.b, r2(&s, slopes)), (1.0, Some(0.5)));
    }

    #[test]
    fn what_cannot_be_known_is_told() {
        let why = |points: &[(f64, f64, f64)]| solve(&Centred::of(&moments(points))).unwrap_err();
        assert_eq!(why(&[]), Unknown::TooFew);
        assert_eq!(why(&[(1.0, 0.0, 1.0), (2.0, 0.0, 2.0)]), Unknown::TooFew);
        assert_eq!(why(&[(3.0, 0.0, 1.0), (3.0, 0.0, 2.0), (3.0, 0.0, 4.0)]), Unknown::Constant);
        // Rows that share nothing: U = k W.
        let points: Vec<_> = (0..40).map(|i| (f64::from(i % 4) * 8.0, f64::from(i % 4), f64::from(i))).collect();
        assert_eq!(why(&points), Unknown::Collinear);
        // Decode and verify, each with one union.
        let two: Vec<_> = (0..40).map(|i| (f64::from(i % 2) * 7.0, f64::from(i % 2) * 3.0, f64::from(i))).collect();
        assert_eq!(why(&two), Unknown::Collinear);
    }

    #[test]
    fn layers_of_other_levels_do_not_bend_the_common_slope() {
        // Two layers with the same slope 5; the one with larger unions is 1000 faster. Pooled, the slope would be negative.
        let layer =
            |from: u32, level: f64| moments(&(from..from + 4).map(|u| (f64::from(u), 0.0, level + 5.0 * f64::from(u))).collect::<Vec<_>>());
        let mut all = Centred::of(&layer(0, 2000.0));
        all.add(&Centred::of(&layer(10, 1000.0)));
        assert!(near(solve(&all).unwrap().b, 5.0, 1.0));
    }

    #[test]
    fn many_unions_share_a_point() {
        let grid: Grid =
            (0..100u16).map(|u| ((3, 4, u), (1 + u64::from(u % 2), 1000 * u64::from(u)))).chain([((4, 1, 8), (1, 5))]).collect();
        let points = cells(&grid, 3);
        assert!(points.len() <= MAX_RESIDUALS && points.iter().all(|p| p.rows == 4));
        assert_eq!(points.iter().map(|p| p.points).sum::<u64>(), 150);
        let total: f64 = points.iter().map(|p| p.mean_us * p.points as f64).sum();
        assert!(near(total, (0..100).map(f64::from).sum(), 5000.0), "{total}");
        assert_eq!(cells(&grid, 4), [ResidualPoint { rows: 1, union: 8.0, points: 1, mean_us: 0.005, residual_us: None }]);
    }

    /// 800 runs of 100 requests whose points share a disturbance: the 95 % interval holds the planted slope as often as it says.
    #[test]
    fn the_interval_holds_the_truth_as_often_as_it_says() {
        let runs = 800;
        let plan_steps = StepTable::default();
        let plan = Plan::new(&plan_steps, &[3], 4, 64, false).unwrap();
        let mut held = 0;
        for seed in 0..runs {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut unit = || f64::from(rng.next_u32()) / 4_294_967_296.0;
            let mut collected = Collected::default();
            for request in 0..100u32 {
                let (shared, tilt) = (unit() - 0.5, unit() - 0.5);
                let mut m = Moments::default();
                for _ in 0..8 {
                    let u = (unit() * 12.0).floor();
                    m.add(u, 3.0, 177_000.0 + 36_000.0 * u + 40_000.0 * shared + 4_000.0 * tilt * u + 30_000.0 * (unit() - 0.5));
                }
                collected.moments.insert(request, vec![m]);
            }
            let requests: Vec<u32> = collected.moments.keys().copied().collect();
            let fits = fit(&collected, &requests, &plan, Some(1), &Options { resamples: 400, seed });
            let [low, high] = fits.layers[0].ci95.unwrap();
            held += u32::from(low <= 36.0 && 36.0 <= high);
        }
        let share = f64::from(held) / runs as f64;
        assert!((0.93..=0.97).contains(&share), "{share}");
    }

    proptest! {
        /// The slopes are those that no small change makes better.
        #[test]
        fn least_squares(points in prop::collection::vec((0u16..30, 0u16..5, 0u32..1_000_000), 5..60)) {
            let points: Vec<_> = points.iter().map(|&(u, w, t)| (f64::from(u), f64::from(w), f64::from(t))).collect();
            let m = moments(&points);
            let s = Centred::of(&m);
            let Ok(slopes) = solve(&s) else { return Ok(()) };
            let a = intercept(&m, slopes, 0.0).unwrap();
            // U and W as in `add`: less k = 0 and less 1.
            let error = |a: f64, b: f64, c: f64| points.iter().map(|&(u, w, t)| (t - a - b * u - c * (w + 1.0)).powi(2)).sum::<f64>();
            let (b, c) = (slopes.b, slopes.c.unwrap_or(0.0));
            let best = error(a, b, c);
            for (da, db, dc) in [(10.0, 0.0, 0.0), (-10.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, -1.0, 0.0), (0.0, 0.0, 1.0), (3.0, -1.0, 1.0)] {
                if slopes.c.is_some() || dc == 0.0 {
                    prop_assert!(error(a + da, b + db, c + dc) >= best * (1.0 - 1e-9));
                }
            }
            let left = 1.0 - best / s.tt;
            prop_assert!(s.tt == 0.0 || (r2(&s, slopes).unwrap() - left).abs() < 1e-6);
        }
    }
}
