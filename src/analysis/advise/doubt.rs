//! How sure step costs are, and resamples in which they are drawn together with acceptance and unions.
//!
//! Costs that were measured in steps of the trace vary with the requests that were recorded. So resample i of the requests has costs of its
//! own: with V_i, D_i, V'_i, D'_i the mean times of whole steps and passes, b_i the slope and x_i the mean experts of the windows,
//! all of resample i ([`Coefficients::through`]),
//!
//! ```text
//! cost_i(γ') = fixed_i + per_row_i (γ' + 1) + b_i x_i(γ') + per_draft_i γ'        ratio_i(γ') = cost_i(γ') / D_i
//! ```
//!
//! Costs of a calibrated table are drawn by the intervals of its times instead (`calibrated::draws`), whatever requests are drawn.
//!
//! At γ' = γ that is V_i / D_i whatever b_i is: the interval is the one of the measured step ratio. Two requests, D = 10 in both, V = 20
//! and 30, b = 1 and γ = 2: resamples of the first alone and of the second alone have step ratios of 2 and 3, both together 2.5.

use super::step_cost::{Coefficients, Recorded, StepCost};
use crate::analysis::Options;
use crate::analysis::cost::{MeasuredTimes, TimeDraws};
use crate::analysis::stats::{Clusters, Streams};
use crate::metric::advice::CostSource;

/// A request, and its sums as one row of numbers.
pub type Row = (u32, Vec<f64>);

/// How sure step costs are.
#[derive(Debug, Clone, PartialEq)]
pub enum Doubt {
    /// They are taken as exact.
    Exact,
    /// Nobody knows: whatever rests on them has no interval.
    Unknown,
    /// They are drawn.
    Drawn(Drawn),
}

/// Step costs by resample.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The requests that are drawn with them, ascending; windows that are judged are of these.
    requests: Vec<u32>,
    /// `None` where a resample gives none.
    costs: Vec<Option<Coefficients>>,
}

impl Drawn {
    /// Costs through the measured times of every resample. `windows` has the number of windows and the sum of their experts by request. With
    /// `whole_only` no resample needs a cost of experts.
    pub fn measured(times: &TimeDraws, recorded: &Recorded, windows: &[Row], whole_only: bool, options: &Options) -> Self {
        let requests = times.requests.clone();
        let sums = on(&requests, windows, 2);
        let costs = sums.numbered_draws((options.resamples, options.seed, Streams::Common), |i, sums| {
            let through = |times: &MeasuredTimes| match whole_only {
                true => Coefficients::of_whole_windows(times, &Recorded { draft_cost: None, ..*recorded }),
                false => Coefficients::through(times, recorded, sums[1] / sums[0]),
            };
            let costs = times.times.get(i).map(through);
            as_numbers(costs.filter(Coefficients::are_costs))
        });
        Self { requests, costs: costs.iter().map(|numbers| of_numbers(numbers)).collect() }
    }

    /// Costs that were drawn on their own, for windows of these requests.
    pub fn apart(costs: Vec<Option<Coefficients>>, requests: impl Iterator<Item = u32>) -> Self {
        Self { requests: requests.collect(), costs }
    }

    /// Resamples without costs: their times give an expert none above 0, or have no steps to compare.
    pub fn left_out(&self) -> u64 {
        self.costs.iter().filter(|cost| cost.is_none()).count() as u64
    }

    /// All resamples.
    pub fn resamples(&self) -> u64 {
        self.costs.len() as u64
    }
}

/// Seven numbers, none of them one where there are no costs.
fn as_numbers(costs: Option<Coefficients>) -> [f64; 7] {
    let whole_only = |c: &Coefficients| f64::from(u8::from(c.whole_only));
    costs.map_or([f64::NAN; 7], |c| [c.decode, c.fixed, c.per_expert, c.per_row, c.per_draft, c.per_block, whole_only(&c)])
}

fn of_numbers(numbers: &[f64]) -> Option<Coefficients> {
    let &[decode, fixed, per_expert, per_row, per_draft, per_block, whole_only] = numbers else { return None };
    let whole_only = whole_only == 1.0;
    Some(Coefficients { decode, fixed, per_expert, per_row, per_draft, per_block, whole_only }).filter(Coefficients::are_costs)
}

/// The rows of `requests`, zeros for those that have none.
fn on(requests: &[u32], rows: &[Row], width: usize) -> Clusters {
    let mut clusters = Clusters::new(width);
    for request in requests {
        match rows.binary_search_by_key(request, |(request, _)| *request).ok().and_then(|at| rows.get(at)) {
            Some((_, row)) => clusters.push(row.iter().copied()),
            None => clusters.push(std::iter::repeat_n(0.0, width)),
        }
    }
    clusters
}

/// Step costs with their doubt.
#[derive(Debug, Clone, Copy)]
pub struct Costs<'a> {
    /// `None` where they are unknown.
    pub point: Option<&'a StepCost>,
    /// How sure they are.
    pub doubt: &'a Doubt,
    /// Resamples and seed.
    pub options: &'a Options,
}

/// Whose sums are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Those of all requests that have windows: with the costs of the same draws.
    All,
    /// Those of some of them: drawn apart from the costs, which are of all.
    Some,
}

impl Costs<'_> {
    /// The coefficients, where they are known.
    pub fn coefficients(&self) -> Option<&Coefficients> {
        self.point.map(|cost| &cost.coefficients)
    }

    /// `of(sums, costs)` of every resample; `rows` ascend by request and are of `width` numbers each. No draws of a single request.
    pub fn draws(
        &self,
        (rows, width, whose): (&[Row], usize, Whose),
        of: impl Fn(&[f64], Option<&Coefficients>) -> Vec<f64> + Sync,
    ) -> Vec<Vec<f64>> {
        let Options { resamples, seed } = *self.options;
        let plain = || on(&rows.iter().map(|(request, _)| *request).collect::<Vec<_>>(), rows, width);
        match (self.doubt, whose) {
            (Doubt::Exact, _) => plain().draws(resamples, seed, |sums| of(sums, self.coefficients())),
            (Doubt::Unknown, _) => plain().draws(resamples, seed, |sums| of(sums, None)),
            (Doubt::Drawn(drawn), Whose::All) => {
                let sums = on(&drawn.requests, rows, width);
                sums.numbered_draws((resamples, seed, Streams::Common), |i, sums| of(sums, drawn.of(i)))
            }
            (Doubt::Drawn(drawn), Whose::Some) => {
                plain().numbered_draws((resamples, seed, Streams::Apart), |i, sums| of(sums, drawn.of(i)))
            }
        }
    }

    /// `of(costs)` by the costs of every resample: of sums that are what they are. Nothing where costs are not drawn.
    pub fn each(&self, of: impl Fn(&Coefficients) -> f64) -> Vec<f64> {
        match self.doubt {
            Doubt::Drawn(drawn) => drawn.costs.iter().flatten().map(of).collect(),
            Doubt::Exact | Doubt::Unknown => Vec::new(),
        }
    }

    /// Whether the draws of all requests are of no others than those of `rows`.
    pub fn drawn_are(&self, rows: &[Row]) -> bool {
        match self.doubt {
            Doubt::Drawn(drawn) => drawn.requests.iter().eq(rows.iter().map(|(request, _)| request)),
            Doubt::Exact | Doubt::Unknown => true,
        }
    }

    /// Resamples that are left out of what rests on costs; `None` where costs are not drawn.
    pub fn left_out(&self) -> Option<u64> {
        match self.doubt {
            Doubt::Drawn(drawn) => Some(drawn.left_out()),
            Doubt::Exact | Doubt::Unknown => None,
        }
    }

    /// What the intervals hold, as a sentence; `None` without costs.
    pub fn assumption(&self) -> Option<String> {
        let source = self.point?.source;
        Some(match (self.doubt, source) {
            (Doubt::Drawn(drawn), source) => {
                let left_out = match drawn.left_out() {
                    0 => String::new(),
                    n if self.point?.coefficients.whole_only => {
                        format!("; {n} of {} resamples, whose times have nothing to compare, are left out", drawn.resamples())
                    }
                    n => format!("; {n} of {} resamples, whose times give an expert no cost above 0, are left out", drawn.resamples()),
                };
                let from = match source {
                    CostSource::Calibrated => {
                        "by the table's own intervals, time by time (how far its passes are from a plane is not in them)"
                    }
                    CostSource::Measured | CostSource::Model => "from the times of each resample",
                };
                format!("intervals are over requests, with step costs drawn {from}; a single request's is of step costs alone{left_out}")
            }
            (Doubt::Unknown, _) => "step ratios and speedups have no intervals: the steps with times are of too few requests to tell how sure \
                                    step costs are"
                .to_owned(),
            (Doubt::Exact, CostSource::Model) => "intervals are of acceptance and unions alone: a model of bytes has no uncertainty of its \
                                                  own, and how far times are from bytes is not in them"
                .to_owned(),
            (Doubt::Exact, CostSource::Measured | CostSource::Calibrated) => {
                "intervals are of acceptance and unions alone: step costs are taken as exact, for the table does not say how sure its times are"
                    .to_owned()
            }
        })
    }

    /// Whether numbers that rest on costs have intervals.
    pub fn are_known(&self) -> bool {
        self.point.is_some() && *self.doubt != Doubt::Unknown
    }
}

impl Drawn {
    fn of(&self, resample: usize) -> Option<&Coefficients> {
        self.costs.get(resample)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::stats;

    const OPTIONS: Options = Options { resamples: 60, seed: 3 };
    const RECORDED: Recorded = Recorded { drafts: 2.0, block: false, decode_experts: 4.0, draft_cost: None };

    /// Two requests of one window each, whose verify steps take 20 and 30 and touch 6 and 10 experts; D = 10, b = 1.
    fn times(requests: &[u32]) -> TimeDraws {
        let of = |_, times: &[u32]| {
            let (one, two) = (f64::from(times[0]), f64::from(times[1]));
            vec![(20.0 * one + 30.0 * two) / (one + two)]
        };
        let verify = stats::draws(requests.len(), (OPTIONS.resamples, OPTIONS.seed, Streams::Common), of);
        let times = |verify: &Vec<f64>| MeasuredTimes {
            verify: verify[0] - 1.0,
            decode: 9.5,
            verify_step: verify[0],
            decode_step: 10.0,
            per_expert: 1.0,
        };
        TimeDraws { requests: requests.to_vec(), times: verify.iter().map(times).collect() }
    }

    fn of_last(row: &[f64], costs: Option<&Coefficients>) -> Vec<f64> {
        let [steps, experts] = row else { return vec![f64::NAN] };
        vec![costs.map_or(f64::NAN, |c| (c.passes(*steps, 3.0 * steps, *experts) + c.drafting(*steps, 2.0 * steps)) / c.decode / steps)]
    }

    #[test]
    fn worked_example_of_the_docs() {
        let rows: Vec<Row> = vec![(0, vec![1.0, 6.0]), (1, vec![1.0, 10.0])];
        let doubt = Doubt::Drawn(Drawn::measured(&times(&[0, 1]), &RECORDED, &rows, false, &OPTIONS));
        let costs = Costs { point: None, doubt: &doubt, options: &OPTIONS };
        let mut found: Vec<f64> = costs.draws((&rows, 2, Whose::All), of_last).into_iter().flatten().collect();
        found.sort_by(f64::total_cmp);
        let expected = |x: &f64| [2.0, 2.5, 3.0].iter().any(|y| (x - y).abs() < 1e-9);
        assert!(found.len() == 60 && found.iter().all(expected) && found[0] < 2.1 && found[59] > 2.9, "{found:?}");
        // The second request alone: its 10 experts by costs of all. V = 20 with 6 experts, so 24 with 10; 30 as recorded; 27 of both.
        let alone = costs.each(|c| of_last(&rows[1].1, Some(c))[0]);
        let expected = |x: &f64| [2.4, 2.7, 3.0].iter().any(|y| (x - y).abs() < 1e-9);
        assert!(alone.len() == 60 && alone.iter().all(expected), "{alone:?}");
        assert_eq!(costs.left_out(), Some(0));
        assert!(costs.drawn_are(&rows) && !costs.drawn_are(&rows[1..]));
    }

    #[test]
    fn requests_without_windows_are_drawn_and_add_nothing() {
        // A third request has times alone; resamples of nothing else have no windows, and no costs.
        let rows: Vec<Row> = vec![(0, vec![1.0, 6.0]), (1, vec![1.0, 10.0])];
        let mut times = times(&[0, 1, 5]);
        times.times.iter_mut().for_each(|t| t.verify_step = 25.0);
        times.times[7].per_expert = -0.1;
        times.times[8].decode_step = f64::NAN;
        let drawn = Drawn::measured(&times, &RECORDED, &rows, false, &OPTIONS);
        let empty = stats::draws(3, (OPTIONS.resamples, OPTIONS.seed, Streams::Common), |_, times| vec![f64::from(times[2])]);
        let empty: Vec<usize> = (0..60).filter(|&i| empty[i][0] == 3.0 || i == 7 || i == 8).collect();
        assert_eq!((drawn.left_out(), drawn.resamples()), (empty.len() as u64, 60));
        let doubt = Doubt::Drawn(drawn);
        let costs = Costs { point: None, doubt: &doubt, options: &OPTIONS };
        let found = costs.draws((&rows, 2, Whose::All), of_last);
        assert!((0..60).all(|i| found[i][0].is_nan() == empty.contains(&i)));
        // Two groups' draws are not those of the costs.
        assert_eq!(costs.draws((&rows, 2, Whose::Some), |row, _| row.to_vec()).len(), 60);
        assert_ne!(costs.draws((&rows, 2, Whose::Some), |row, _| row.to_vec()), costs.draws((&rows, 2, Whose::All), |row, _| row.to_vec()));
    }
}
