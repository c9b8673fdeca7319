//! Recordings over a grid, side by side, and what the longest of them predicted of the shorter ones.

use super::Interval;
use super::advice::CostSource;
use crate::trace::manifest::Warning;
use serde::{Deserialize, Serialize};

/// The value of `schema` in every comparison of this version.
pub const SCHEMA: &str = "specprof.sweep/1";

/// The comparison of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// [`SCHEMA`].
    pub schema: String,
    /// The model's name.
    pub model: String,
    /// The cells: by drafter, temperature, tag, then draft length.
    pub cells: Vec<SweepCell>,
    /// Why costs are not measured times, by recording, where they are the model's; `None` where they are measured.
    #[serde(default)]
    pub measured_unused_because: Option<String>,
    /// What limits the comparison.
    #[serde(default)]
    pub warnings: Vec<Warning>,
}

/// One recording of the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweepCell {
    /// Directory of its trace, below the sweep's.
    pub name: String,
    /// `mtp`, `ngram` or `none`.
    pub drafter: String,
    /// Drafts per step; 0 without a drafter.
    pub draft_len: u16,
    /// Sampling temperature.
    pub temperature: f64,
    /// `NAME=VALUE` that its prompts have in common, when the grid is over a tag.
    pub tag: Option<String>,
    /// Number of requests.
    pub requests: u64,
    /// Number of verify steps.
    pub verify_steps: u64,
    /// What was recorded.
    pub recorded: SweepPoint,
    /// Of a drafter that need not draft, the share of the steps after the prompts that had drafts; decode steps of a baseline count among
    /// the others. `None` for drafters that draft in every step.
    #[serde(default)]
    pub drafted_share: Option<f64>,
    /// The speedup over those steps all together, the ones without drafts gaining nothing; there where `drafted_share` is.
    #[serde(default)]
    pub speedup_all_steps: Option<f64>,
    /// Why the recorded speedup is unknown.
    #[serde(default)]
    pub unknown_because: Option<String>,
    /// Whether that is because too few steps were recorded.
    #[serde(default)]
    pub too_few: bool,
    /// What the longest recording of the same drafter, temperature and tag says of this draft length; `None` for itself, and where
    /// more than a tenth of its windows are not of its draft length.
    pub predicted: Option<SweepPoint>,
    /// The recording that it is predicted by.
    pub predicted_by: Option<String>,
}

impl SweepCell {
    /// The speedup that recordings are ranked by: of all steps, where some had no drafts.
    #[must_use]
    pub fn ranked(&self) -> Option<f64> {
        if self.drafted_share.is_some() { self.speedup_all_steps } else { self.recorded.speedup }
    }

    /// The interval of [`SweepCell::ranked`]; plain decoding's is exact, of all steps of a lookup none is known.
    #[must_use]
    pub fn ranked_interval(&self) -> Option<Interval> {
        match self.drafter.as_str() {
            "none" => Some([1.0, 1.0]),
            _ if self.drafted_share.is_some() => None,
            _ => self.recorded.ci95,
        }
    }
}

/// Numbers of one draft length; each interval is a bootstrap over requests.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct SweepPoint {
    /// Mean accepted drafts + 1; 1 without a drafter.
    pub tokens_per_step: Option<f64>,
    /// Its interval.
    pub tokens_per_step_ci95: Option<Interval>,
    /// Mean distinct experts of a window in one layer.
    pub union_mean: Option<f64>,
    /// Its interval.
    pub union_ci95: Option<Interval>,
    /// Where costs come from; measured and modelled speedups are not comparable.
    pub cost_source: Option<CostSource>,
    /// Cost of a step in decode steps.
    pub step_ratio: Option<f64>,
    /// tokens_per_step / step_ratio.
    pub speedup: Option<f64>,
    /// Its interval.
    pub ci95: Option<Interval>,
}
