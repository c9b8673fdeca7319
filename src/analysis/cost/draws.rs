//! Measured times by resample: what step costs are made of, as often as requests are drawn.

use super::ratios::Draws;

/// The times that the cost of a step is made of, µs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredTimes {
    /// Mean of the target's pass in a verify step.
    pub verify: f64,
    /// Mean of the pass of a decode step, at the verify steps' context lengths.
    pub decode: f64,
    /// Mean of a whole verify step.
    pub verify_step: f64,
    /// Mean of a whole decode step, at the verify steps' context lengths.
    pub decode_step: f64,
    /// Of one more distinct expert in a layer: the slope over all layers.
    pub per_expert: f64,
}

/// The same of every resample of a trace's requests.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeDraws {
    /// The requests that were drawn, ascending: indices of the trace's own; those of a baseline come behind them.
    pub requests: Vec<u32>,
    /// By resample; no numbers where it has no matched steps, no slope where there is none.
    pub times: Vec<MeasuredTimes>,
}

impl TimeDraws {
    /// Joins the means and the slopes (ns) of the same resamples; `None` where the means have no intervals. Without slopes theirs is no number.
    pub(super) fn join(requests: Vec<u32>, ratios: &Draws, slopes: &[f64]) -> Option<Self> {
        let us = |ns: f64| ns / 1000.0;
        let times: Vec<MeasuredTimes> = ratios
            .means()
            .zip(slopes.iter().copied().chain(std::iter::repeat(f64::NAN)))
            .map(|(m, slope)| MeasuredTimes {
                verify: us(m.verify_ns),
                decode: us(m.decode_ns),
                verify_step: us(m.verify_step_ns),
                decode_step: us(m.decode_step_ns),
                per_expert: us(slope),
            })
            .collect();
        (!times.is_empty()).then_some(Self { requests, times })
    }
}
