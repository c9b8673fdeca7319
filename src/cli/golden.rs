//! `specprof model DIR --golden FILE`: the engine against a reference's numbers.

use super::exit::Failure;
use super::ui::Ui;
use crate::engine::golden::GoldenReport;
use std::fmt::Write as _;
use std::path::Path;

/// Prints a comparison with the golden file `file`.
///
/// # Errors
/// [`Failure::Check`] when a tensor is beyond its tolerance, after the result was printed.
pub(super) fn show(report: &GoldenReport, file: &Path, json: bool, ui: &mut Ui) -> Result<(), Failure> {
    let text = if json {
        let text = serde_json::to_string_pretty(&JsonReport { passed: report.passed(), report });
        text.map_err(|e| Failure::Environment(format!("cannot write JSON: {e}")))? + "\n"
    } else {
        table(report)
    };
    ui.result(&text)?;
    if report.passed() {
        return Ok(());
    }
    let failed: Vec<&str> = report.checks.iter().filter(|c| !c.passed).map(|c| c.name.as_str()).collect();
    if failed.is_empty() {
        return Err(Failure::Input(format!("{}: none of its tensors can be compared with this model", file.display())));
    }
    let (shown, more) = (failed.iter().take(5).copied().collect::<Vec<_>>().join(", "), failed.len().saturating_sub(5));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Err(Failure::Check(format!("{}: beyond tolerance: {shown}{more}", file.display())))
}

#[derive(serde::Serialize)]
struct JsonReport<'a> {
    passed: bool,
    #[serde(flatten)]
    report: &'a GoldenReport,
}

fn table(report: &GoldenReport) -> String {
    let width = report.checks.iter().map(|c| c.name.len()).max().unwrap_or(0).max(6);
    let mut text = format!("{} tokens, {} of them prompt\n\n", report.tokens, report.prompt_tokens);
    let _ = writeln!(text, "{:<width$}  {:>9}  {:>10}  {:>9}", "tensor", "values", "worst", "allowed");
    for check in &report.checks {
        let (worst, allowed) = if check.tolerance == 0.0 {
            (format!("{} differ", check.worst), "exact".to_owned())
        } else {
            (format!("{:.2e}", check.worst), format!("{:.0e}", check.tolerance))
        };
        let mark = if check.passed { "" } else { "  FAILED" };
        let _ = writeln!(text, "{:<width$}  {:>9}  {worst:>10}  {allowed:>9}{mark}", check.name, check.values);
    }
    if !report.not_compared.is_empty() {
        let _ = writeln!(text, "\nnot compared:");
        for rest in &report.not_compared {
            let _ = writeln!(text, "  {}: {}", rest.name, rest.reason);
        }
    }
    let failed = report.checks.iter().filter(|c| !c.passed).count();
    let _ = match failed {
        0 => writeln!(text, "\nall {} tensors within tolerance", report.checks.len()),
        n => writeln!(text, "\n{n} of {} tensors beyond tolerance", report.checks.len()),
    };
    text
}
