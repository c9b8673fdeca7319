//! The report as JSON: the machine's contract, as the structs are.

use crate::metric::Report;

/// The report as indented JSON, ending in a newline.
///
/// # Errors
/// Never for a report made by `analysis`; a value that JSON cannot hold otherwise.
pub fn render(report: &Report) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    Ok(text)
}
