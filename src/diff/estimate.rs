//! What one run says of one number, and by how much two runs differ in it.
//!
//! A mean over windows is a ratio R = Σ_r n_r / Σ_r d_r over requests r, and windows of one request are not independent. So requests
//! are the samples, and R moves by the request's influence u_r = (n_r - R d_r) / Σ d (first-order Taylor, as in survey statistics);
//! var(R) = m / (m - 1) Σ u_r² over the m requests with d_r > 0.
//!
//! Two runs of the same requests differ by Σ_r (u'_r - u_r): what both have in common cancels. Requests of different runs are
//! independent: variances add, degrees of freedom are Welch's. Relative changes are taken on the logarithm, where the influence
//! is u_r / R. Student's t gives intervals and p-values; with many requests they are those of a bootstrap over requests.

use super::student::{quantile, upper_tail};
use crate::metric::Interval;

/// Tail on each side of a 95 % interval.
pub const TAIL: f64 = 0.025;
/// Share of real changes of the detectable size that are seen.
const POWER_TAIL: f64 = 0.2;

/// How sure a run is of a number.
#[derive(Debug, Clone, PartialEq)]
pub enum Spread {
    /// Influence of each request, in the run's order; `None` where the request says nothing of it.
    Requests(Vec<Option<f64>>),
    /// Only its 95 % interval is known.
    Interval(Interval),
    /// Nothing is known.
    Unknown,
}

/// A number of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The number.
    pub value: f64,
    /// How sure it is.
    pub spread: Spread,
}

impl Estimate {
    /// A number without any uncertainty known.
    pub fn point(value: f64) -> Self {
        Self { value, spread: Spread::Unknown }
    }

    /// A number with a 95 % interval, or without.
    pub fn with_interval(value: f64, interval: Option<Interval>) -> Self {
        // Where it is no interval around the number, nothing is known.
        let holds = |[low, high]: &Interval| low.is_finite() && high.is_finite() && *low <= value && value <= *high;
        Self { value, spread: interval.filter(holds).map_or(Spread::Unknown, Spread::Interval) }
    }

    /// Σ n / Σ d of these requests; `None` without any denominator.
    ///
    /// (30, 10), (60, 10): R = 4.5, influences (30 - 45) / 20 = -0.75 and 0.75.
    pub fn ratio(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> Option<Self> {
        let (n, d) = pairs.clone().fold((0.0, 0.0), |(n, d), (a, b)| (n + a, d + b));
        let value = n / d;
        let influence = |(n, d): (f64, f64), sum: f64| (d > 0.0).then(|| (n - value * d) / sum);
        (d > 0.0 && value.is_finite()).then(|| Self { value, spread: Spread::Requests(pairs.map(|p| influence(p, d)).collect()) })
    }

    /// a + b x of a number x.
    pub fn affine(&self, a: f64, b: f64) -> Self {
        let spread = match &self.spread {
            Spread::Requests(u) => Spread::Requests(u.iter().map(|u| u.map(|u| b * u)).collect()),
            Spread::Interval([low, high]) => {
                let (x, y) = (a + b * low, a + b * high);
                Spread::Interval([x.min(y), x.max(y)])
            }
            Spread::Unknown => Spread::Unknown,
        };
        Self { value: a + b * self.value, spread }
    }

    /// Distance of the number itself from 0, for rules about the number and not its change.
    pub fn own(&self) -> Option<Shift> {
        match &self.spread {
            Spread::Requests(u) => Shift::of_influences(self.value, u.iter().copied()),
            Spread::Interval([low, high]) => Some(Shift::of_interval(self.value, self.value - low, high - self.value)),
            Spread::Unknown => None,
        }
    }
}

/// How the requests of two runs belong together.
#[derive(Debug, Clone, Copy)]
pub enum Pairs<'a> {
    /// Index in the base and in the candidate of the same request.
    Same(&'a [(usize, usize)]),
    /// They are different requests.
    Different,
    /// The runs asked the same of every router: there is nothing to be unsure of.
    Exact,
}

/// A difference on some scale, and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shift {
    /// The difference.
    pub at: f64,
    /// Standard error towards smaller differences.
    pub below: f64,
    /// Standard error towards larger ones.
    pub above: f64,
    /// Degrees of freedom.
    pub df: f64,
}

/// Degrees of freedom that make t normal.
const NORMAL: f64 = 1e9;

impl Shift {
    /// Without uncertainty.
    pub fn exact(at: f64) -> Self {
        Self { at, below: 0.0, above: 0.0, df: NORMAL }
    }

    fn of_interval(at: f64, below: f64, above: f64) -> Self {
        let z = quantile(TAIL, NORMAL);
        Self { at, below: below.max(0.0) / z, above: above.max(0.0) / z, df: NORMAL }
    }

    /// Standard error sqrt(m / (m - 1) Σ u²) of the m influences that are there; `None` of fewer than two.
    fn of_influences(at: f64, influences: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let (m, squares) = influences.flatten().fold((0u32, 0.0), |(m, s), u| (m + 1, s + u * u));
        let df = f64::from(m.checked_sub(2)?) + 1.0;
        let se = (f64::from(m) / df * squares).sqrt();
        se.is_finite().then_some(Self { at, below: se, above: se, df })
    }

    /// 95 % interval.
    pub fn interval(&self) -> Interval {
        let t = if self.below + self.above > 0.0 { quantile(TAIL, self.df) } else { 0.0 };
        [self.at - t * self.below, self.at + t * self.above]
    }

    /// p-value of the claim that the difference is at most `limit`: small when it is larger.
    pub fn p_above(&self, limit: f64) -> f64 {
        tail(self.at - limit, self.below, self.df)
    }

    /// p-value of the claim that the difference is at least `limit`: small when it is smaller.
    pub fn p_below(&self, limit: f64) -> f64 {
        tail(limit - self.at, self.above, self.df)
    }

    /// Two-sided p-value of no difference.
    pub fn p_zero(&self) -> f64 {
        (2.0 * self.p_above(0.0).min(self.p_below(0.0))).min(1.0)
    }

    /// The smallest difference that would be seen at 95 % in four of five such comparisons: (t_.975 + t_.8) se.
    ///
    /// se 1, many requests: 1.960 + 0.842 = 2.80.
    pub fn detectable(&self) -> f64 {
        let se = self.below.max(self.above);
        if se > 0.0 { (quantile(TAIL, self.df) + quantile(POWER_TAIL, self.df)) * se } else { 0.0 }
    }
}

fn tail(distance: f64, se: f64, df: f64) -> f64 {
    if se > 0.0 { upper_tail(distance / se, df) } else { f64::from(u8::from(distance <= 0.0)) }
}

/// Candidate minus base; `None` when the uncertainty is unknown.
pub fn difference(base: &Estimate, candidate: &Estimate, pairs: Pairs<'_>) -> Option<Shift> {
    shift(candidate.value - base.value, &scaled(base, 1.0), &scaled(candidate, 1.0), pairs, |e| e.value)
}

/// ln(candidate / base); `None` when the uncertainty is unknown or one of them is not above 0.
pub fn log_ratio(base: &Estimate, candidate: &Estimate, pairs: Pairs<'_>) -> Option<Shift> {
    let positive = base.value > 0.0 && candidate.value > 0.0;
    let by = |e: &Estimate| scaled(e, 1.0 / e.value);
    let at = (candidate.value / base.value).ln();
    if positive { shift(at, &by(base), &by(candidate), pairs, |e| e.value.ln()) } else { None }
}

/// The estimate with influences multiplied; an interval is left for `log`.
fn scaled(e: &Estimate, by: f64) -> Estimate {
    match &e.spread {
        Spread::Requests(u) => Estimate { value: e.value, spread: Spread::Requests(u.iter().map(|u| u.map(|u| u * by)).collect()) },
        _ => e.clone(),
    }
}

/// Difference on the scale `to`. Influences are on that scale already.
///
/// Where one side has only an interval: Zou and Donner's recovery of variances (2008), the distances of the limits from
/// the values added in squares.
fn shift(at: f64, base: &Estimate, candidate: &Estimate, pairs: Pairs<'_>, to: fn(&Estimate) -> f64) -> Option<Shift> {
    let of = |u: &[Option<f64>], i: usize| u.get(i).copied().flatten();
    match (pairs, &base.spread, &candidate.spread) {
        (Pairs::Exact, ..) => Some(Shift::exact(at)),
        (Pairs::Same(pairs), Spread::Requests(b), Spread::Requests(c)) => {
            let change = |&(i, j): &(usize, usize)| match (of(b, i), of(c, j)) {
                (None, None) => None,
                (b, c) => Some(c.unwrap_or(0.0) - b.unwrap_or(0.0)),
            };
            Shift::of_influences(at, pairs.iter().map(change))
        }
        (_, Spread::Requests(b), Spread::Requests(c)) => {
            let (b, c) = (Shift::of_influences(0.0, b.iter().copied())?, Shift::of_influences(0.0, c.iter().copied())?);
            let (vb, vc) = (b.below.powi(2), c.below.powi(2));
            let se = (vb + vc).sqrt();
            // Welch and Satterthwaite; without any variance every number of degrees is right.
            let df = if se > 0.0 { (vb + vc).powi(2) / (vb.powi(2) / b.df + vc.powi(2) / c.df) } else { b.df.min(c.df) };
            Some(Shift { at, below: se, above: se, df })
        }
        (_, b, c) => {
            let limits = |e: &Estimate, spread: &Spread| match spread {
                Spread::Requests(u) => {
                    let [low, high] = Shift::of_influences(0.0, u.iter().copied())?.interval();
                    Some((-low, high))
                }
                Spread::Interval([low, high]) => {
                    let on = |v: f64| to(&Estimate::point(v));
                    let (below, above) = (to(e) - on(*low), on(*high) - to(e));
                    // An interval that reaches 0 has no end on the logarithm.
                    (below.is_finite() && above.is_finite()).then_some((below, above))
                }
                Spread::Unknown => None,
            };
            let ((b_below, b_above), (c_below, c_above)) = (limits(base, b)?, limits(candidate, c)?);
            Some(Shift::of_interval(at, c_below.hypot(b_above), c_above.hypot(b_below)))
        }
    }
}

/// Benjamini and Hochberg's adjusted p-values: q_(i) = min over j >= i of p_(j) m / j. Of the claims with q <= 0.05, at most
/// 5 % are expected to be wrong.
///
/// p 0.01, 0.04, 0.03, 0.5: q 0.04, 0.0533, 0.0533, 0.5.
pub fn false_discovery(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut q = vec![1.0; p.len()];
    let mut least: f64 = 1.0;
    for (place, &at) in order.iter().enumerate().rev() {
        least = least.min(p[at] * p.len() as f64 / (place + 1) as f64);
        q[at] = least;
    }
    q
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
