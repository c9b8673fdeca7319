//! A report's numbers by group of steps: the `groups` section.

use super::Interval;
use super::bounds::FEW_REQUESTS;
use super::report::Acceptance;
use serde::{Deserialize, Serialize};

/// Acceptance and unions by group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Groups {
    /// `request`, `tag:NAME`, `context` or `layer`.
    pub by: String,
    /// The groups: ascending by request, context length or layer, alphabetical by tag.
    pub groups: Vec<GroupReport>,
}

impl GroupReport {
    /// Whether its intervals come from so few requests that they are too narrow; a single request has none.
    #[must_use]
    pub fn has_few(&self) -> bool {
        let tokens = self.acceptance.as_ref().and_then(|a| a.tokens_per_step_ci95);
        (2..FEW_REQUESTS).contains(&self.requests) && (self.union_ci95.is_some() || tokens.is_some())
    }
}

/// One group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// The request's number, the tag's value, the range of context lengths, or the layer.
    pub key: String,
    /// The user's name of a request, where it has one.
    pub name: Option<String>,
    /// Requests with verify steps in the group.
    pub requests: u64,
    /// Verify steps of any number of rows.
    pub verify_steps: u64,
    /// How many drafts were kept; `None` by layer, which cannot differ.
    pub acceptance: Option<Acceptance>,
    /// Rows of the windows below: the report's most frequent number.
    pub rows: u16,
    /// Windows of so many rows, one a step and layer.
    pub windows: u64,
    /// Mean distinct experts of a window.
    pub union_mean: Option<f64>,
    /// Bootstrap over the group's requests.
    pub union_ci95: Option<Interval>,
    /// Entry j: mean distinct experts of rows 0...j.
    pub prefix_union: Vec<f64>,
    /// Mean experts added per kept row.
    pub marginal_kept: Option<f64>,
    /// Mean experts added per rejected row.
    pub marginal_rejected: Option<f64>,
    /// Mean experts that only rejected rows touched.
    pub wasted_mean: Option<f64>,
}
