//! The report as JSON: the machine's contract, as the structs are.

use crate::metric::Report;
use serde::Serialize;

/// The report as indented JSON, ending in a newline.
///
/// # Errors
/// Never for a report made by `analysis`; a value that JSON cannot hold otherwise.
pub fn render(report: &Report) -> Result<String, serde_json::Error> {
    pretty(report)
}

/// Anything as indented JSON, ending in a newline.
pub(crate) fn pretty(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}
