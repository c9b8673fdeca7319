//! specprof's own files: traces, reports, partial reports, cost tables, rules. An error or a number, never a panic.

use crate::place;
use specprof::analysis::partial::{Partial, merge};
use specprof::analysis::{self, Wanted, analyze_trace};
use specprof::diff::render::{github, json, junit, markdown, text};
use specprof::diff::{Options, diff_reports, kind::Kind, rules, source::read_report};
use specprof::export::{jsonl, perfetto};
use specprof::metric::Report;
use specprof::metric::costs::CostTable;
use specprof::report::{TextOptions, costs as cost_text, html, json as report_json, markdown as report_markdown, text as report_text};
use specprof::trace::partial_file::{PartialFile, encode};
use specprof::trace::{Trace, TraceError, validate};
use std::path::Path;
use std::sync::OnceLock;

const OPTIONS: analysis::Options = analysis::Options { resamples: 20, seed: 1 };
const TEXT: TextOptions = TextOptions { width: 100, color: false, unicode: true, per_layer: true, explain: true };

/// A trace's directory: everything that is read of it, as `inspect --check`, `report` and `export` do.
pub fn trace(variant: u8, bytes: &[u8]) {
    let path = place::fresh().join("trace");
    if place::unpack(bytes, &path).is_none() {
        return;
    }
    let Ok(trace) = Trace::open(&path) else { return };
    let checked = validate(&trace);
    let _ = trace.steps_with_details();
    let _ = read_all(&trace);
    match variant % 4 {
        0 => show(analyze_trace(&trace, &OPTIONS).ok()),
        1 => drop(jsonl::write(&trace, &mut std::io::sink())),
        2 => drop(perfetto::write(&trace, &(0..=u32::MAX), &mut std::io::sink())),
        _ => {
            let Ok(partial) = Partial::of(&trace) else { return };
            let path = path.with_file_name("partial.parquet");
            place::write(&path, &partial.encode().expect("what was counted can be written"));
            // Of a trace that breaks rules, its sums may be refused.
            if checked.is_ok_and(|v| v.failed() == 0)
                && let Err(error) = Partial::read(&path)
            {
                panic!("a partial report that cannot be read back: {error}");
            }
        }
    }
}

fn read_all(trace: &Trace) -> Result<(), TraceError> {
    trace.requests()?;
    trace.telemetry()?;
    trace.kernels()?;
    for unit in trace.route_units()? {
        let mut reader = unit.read(false);
        while reader.next_batch()?.is_some() {}
    }
    Ok(())
}

/// Every form of a report.
fn show(report: Option<Report>) {
    let Some(report) = report else { return };
    let _ = report_json::render(&report).expect("a report is JSON");
    let _ = report_text::render(&report, &TEXT);
    let _ = report_markdown::render(&report);
    let _ = html::render(&report).expect("a report is a page");
}

/// A report's JSON, compared with itself and with the one of `reports/compat`.
pub fn report(variant: u8, bytes: &[u8]) {
    static OTHER: OnceLock<Report> = OnceLock::new();
    let other = OTHER.get_or_init(|| read_report(&place::repository("reports/compat/report.v1.json")).expect("the sample is read"));
    let path = place::fresh().join("report.json");
    place::write(&path, bytes);
    let Ok(report) = read_report(&path) else { return };
    let sides = match variant % 3 {
        0 => [&report, &report],
        1 => [&report, other],
        _ => [other, &report],
    };
    let options = Options { allow: Kind::ALL.to_vec(), ..Options::default() };
    let Ok(comparison) = diff_reports(sides[0], sides[1], &rules::defaults(), &options) else { return };
    let _ = text::render(&comparison, &text::TextOptions { width: 100, color: false, per_layer: true });
    let _ = markdown::render(&comparison, markdown::COMMENT_BYTES);
    let _ = json::render(&comparison).expect("a comparison is JSON");
    let _ = github::render(&comparison);
    let _ = junit::render(&comparison);
}

/// A partial report. Its digest is made to fit first, or hardly any mutation would get past it.
pub fn partial(variant: u8, bytes: &[u8]) {
    let path = place::fresh().join("partial.parquet");
    place::write(&path, bytes);
    if Partial::read(&path).is_err() && !mended(&path) {
        return;
    }
    let Ok(partial) = Partial::read(&path) else { return };
    let parts = if variant % 2 == 0 { vec![partial] } else { vec![partial, Partial::read(&path).expect("it was read before")] };
    let Ok(whole) = merge(parts) else { return };
    show(whole.report(None, &OPTIONS, &Wanted::default()).ok());
}

fn mended(path: &Path) -> bool {
    let Ok(file) = PartialFile::open(path) else { return false };
    let mut entries = Vec::new();
    let _ = file.each(|entry| {
        entries.push(entry);
        Ok(())
    });
    let Ok(bytes) = encode(file.name(), file.manifest(), entries.into_iter()) else { return false };
    place::write(path, &bytes);
    true
}

/// A table of costs, and the sentences about it.
pub fn costs(_: u8, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(table) = CostTable::parse(text) else { return };
    let options = analysis::Options { resamples: 100, seed: 1 };
    let (warnings, ci95) = (analysis::cost_warnings(&table, &options), analysis::cost_slope_intervals(&table, &options));
    let slopes = analysis::cost_slopes(&table).map(|(per_expert, per_row, r2)| cost_text::Slopes { per_expert, per_row, r2, ci95 });
    let _ = cost_text::text(&table, slopes.as_ref().map_err(|why| *why), &TEXT);
    let _ = cost_text::rates(&table, warnings).expect("rates are JSON");
    let again = cost_text::table_json(&table).expect("a table is JSON");
    assert_eq!(CostTable::parse(&again).as_ref(), Ok(&table), "a table that is another one when it is read again");
}

/// Rules of a comparison.
pub fn rules(_: u8, bytes: &[u8]) {
    let path = place::fresh().join("rules");
    place::write(&path, bytes);
    let Ok(rules) = rules::read(&path) else { return };
    for (rule, _) in &rules.rules {
        let shown = rule.to_string();
        let again = specprof::diff::rule::Rule::parse(&shown).expect("a rule is read as it is shown");
        assert_eq!(again.to_string(), shown);
    }
}
