//! A sweep for people: one line a recording, and what was predicted of it.

use super::table::{self, Column};
use super::text::TextOptions;
use super::wrap::{paragraph, plain, titled};
use crate::metric::Interval;
use crate::metric::advice::CostSource;
use crate::metric::bounds::NOISY_TIMES;
use crate::metric::sweep::{Sweep, SweepCell, SweepPoint};
use crate::trace::manifest::Warning;

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{v:.2}"))
}

fn with_interval(value: Option<f64>, interval: Option<Interval>) -> String {
    match (value, interval) {
        (Some(v), Some([low, high])) => format!("{v:.2} ({low:.2}-{high:.2})"),
        (value, _) => number(value),
    }
}

/// The speedup, or why its place is empty.
fn speedup(cell: &SweepCell) -> String {
    if cell.too_few { "too few".to_owned() } else { with_interval(cell.recorded.speedup, cell.recorded.ci95) }
}

/// Recordings of the same prompts that cannot be told from the fastest one, and whether plain decoding can.
fn as_fast(best: &SweepCell, same: &[&SweepCell]) -> String {
    const SHOWN: usize = 4;
    let Some([low, high]) = best.ranked_interval() else {
        return if best.requests < 2 { "; of one request, its interval is unknown".to_owned() } else { String::new() };
    };
    let close =
        |c: &&&SweepCell| c.name != best.name && c.drafter != "none" && c.ranked_interval().is_some_and(|[l, h]| l <= high && low <= h);
    let mut names: Vec<String> = same.iter().filter(close).map(|c| plain(&c.name)).collect();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    if best.drafter != "none" && low <= 1.0 && high >= 1.0 {
        names.insert(0, "plain decoding".to_owned());
    }
    if names.is_empty() { String::new() } else { format!("; not told apart from {}", names.join(", ")) }
}

fn source(cell: &SweepCell) -> &'static str {
    match cell.recorded.cost_source {
        Some(CostSource::Measured) => "measured step times",
        Some(CostSource::Model) => "the model of bytes",
        Some(CostSource::Calibrated) => "a calibrated table",
        None => "definition",
    }
}

/// The fastest recording of each tag, of how many it is that, and what is not compared for which reason.
fn fastest(sweep: &Sweep, options: &TextOptions) -> String {
    let line = |title: &str, text: &str| titled(title, text, options.width, options.color);
    let mut out = String::new();
    let tags: std::collections::BTreeSet<Option<&str>> = sweep.cells.iter().map(|c| c.tag.as_deref()).collect();
    for tag in tags {
        // Recordings of different prompts are not compared: what is fast for one kind says nothing of another.
        let all: Vec<&SweepCell> = sweep.cells.iter().filter(|c| c.tag.as_deref() == tag).collect();
        let known: Vec<&SweepCell> = all.iter().copied().filter(|c| c.ranked().is_some()).collect();
        let title = if out.is_empty() { "fastest" } else { "" };
        let of_tag = tag.map_or_else(String::new, |tag| format!("of {}, ", plain(tag)));
        // Plain decoding need not be recorded to be the fastest: everything is compared with it.
        let fastest = |best: &'_ SweepCell, next: &'_ SweepCell| next.ranked() > best.ranked();
        let of = |drafts: bool| known.iter().copied().filter(move |c| (c.drafter != "none") == drafts);
        let first = |drafts| of(drafts).reduce(|best, next| if fastest(best, next) { next } else { best });
        let Some(best) = first(true).or_else(|| first(false)) else {
            out.push_str(&line(title, &format!("{of_tag}unknown: none of {} recordings can be compared", all.len())));
            continue;
        };
        let with_drafts = best.drafted_share.map_or_else(String::new, |share| {
            format!(" over all its steps ({} over the {:.0} % that had drafts)", number(best.recorded.speedup), share * 100.0)
        });
        let (speedup, few) = (number(best.ranked()), known.len() < all.len());
        let of = if few { format!("; of {} of {} recordings that can be compared", known.len(), all.len()) } else { String::new() };
        let close = as_fast(best, &known);
        let is_noisy = |w: &Warning| w.code == NOISY_TIMES && w.message.strip_prefix(&best.name).is_some_and(|rest| rest.starts_with(':'));
        let noisy = if sweep.warnings.iter().any(is_noisy) { "; a few steps decide its times (noisy_times below)" } else { "" };
        let text = if best.ranked().is_some_and(|speedup| speedup < 1.0) {
            let sure =
                if close.contains("plain decoding") { "plain decoding is not told to be slower" } else { "plain decoding is faster" };
            format!(
                "{of_tag}{sure}: the best recording, {}, has {speedup} times its speed{with_drafts}, by {}{of}{close}{noisy}",
                plain(&best.name),
                source(best)
            )
        } else {
            format!("{of_tag}{}: {speedup} times plain decoding{with_drafts}, by {}{of}{close}{noisy}", plain(&best.name), source(best))
        };
        out.push_str(&line(title, &text));
    }
    if let Some(why) = &sweep.measured_unused_because {
        out.push_str(&line("costs", &format!("by the model of bytes, not by measured times: {}", plain(why))));
    }
    let mut unknown: std::collections::BTreeMap<&str, Vec<String>> = std::collections::BTreeMap::new();
    for cell in &sweep.cells {
        if let Some(why) = &cell.unknown_because {
            unknown.entry(why).or_default().push(plain(&cell.name));
        }
    }
    for (i, (why, names)) in unknown.into_iter().enumerate() {
        out.push_str(&line(if i == 0 { "unknown" } else { "" }, &format!("{}: {}", names.join(", "), plain(why))));
    }
    let spans = |source| sweep.cells.iter().any(|c| c.recorded.ci95.is_some() && c.recorded.cost_source == Some(source));
    if spans(CostSource::Model) {
        out.push_str(&line("intervals", "of speedups are of acceptance and unions alone: step costs are taken as exact"));
    } else if spans(CostSource::Measured) {
        out.push_str(&line("intervals", "of speedups are over requests, with the times of their steps"));
    }
    if sweep.cells.iter().any(|c| c.drafted_share.is_some()) {
        let text =
            "speedup is of the steps that had drafts; `all steps` counts those without, which gain nothing, and the baseline's among them";
        out.push_str(&line("lookup", text));
    }
    out
}

/// The comparison as text.
pub fn render(sweep: &Sweep, options: &TextOptions) -> String {
    let cells = |of: &dyn Fn(&SweepCell) -> String| sweep.cells.iter().map(of).collect::<Vec<_>>();
    let predicted = |of: &dyn Fn(&SweepPoint) -> String| cells(&|c| c.predicted.as_ref().map_or_else(|| "-".to_owned(), of));
    let mut out = titled("sweep", &format!("{} recordings of {}", sweep.cells.len(), plain(&sweep.model)), options.width, options.color);
    out.push_str(&fastest(sweep, options));
    out.push('\n');
    let mut columns = vec![
        Column::new("recording").left().cells(cells(&|c| plain(&c.name))),
        Column::new("requests").optional(0).cells(cells(&|c| c.requests.to_string())),
        Column::new("steps").optional(1).cells(cells(&|c| c.verify_steps.to_string())),
        Column::new("tokens/step").cells(cells(&|c| with_interval(c.recorded.tokens_per_step, c.recorded.tokens_per_step_ci95))),
        Column::new("predicted").optional(5).cells(predicted(&|p| number(p.tokens_per_step))),
        Column::new("union").optional(7).cells(cells(&|c| number(c.recorded.union_mean))),
        Column::new("predicted").optional(4).cells(predicted(&|p| number(p.union_mean))),
        Column::new("step ratio").optional(2).cells(cells(&|c| number(c.recorded.step_ratio))),
        Column::new("speedup").cells(cells(&speedup)),
        Column::new("predicted").optional(3).cells(predicted(&|p| number(p.speedup))),
    ];
    if sweep.cells.iter().any(|c| c.drafted_share.is_some()) {
        let share = |c: &SweepCell| c.drafted_share.map_or_else(|| "-".to_owned(), |s| format!("{:.0} %", s * 100.0));
        columns.push(Column::new("had drafts").optional(6).cells(cells(&share)));
        columns.push(Column::new("all steps").cells(cells(&|c| number(c.speedup_all_steps))));
    }
    out.push_str(&table::render(columns, options.width, |_, line| line.to_owned()));
    if sweep.cells.iter().any(|c| c.predicted.is_some()) {
        let note = "Predicted: by the first drafts of the longest recording of the same drafter, temperature and tag. In parentheses: 95 % \
                    intervals by bootstrap over requests.";
        out.push('\n');
        out.push_str(&paragraph("", note, options.width));
    }
    for (i, warning) in sweep.warnings.iter().enumerate() {
        out.push_str(if i == 0 { "\n" } else { "" });
        out.push_str(&paragraph(&format!("[{}] ", i + 1), &plain(&format!("{}: {}", warning.code, warning.message)), options.width));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_stand_beside_what_was_recorded() {
        let point = |tokens: f64| SweepPoint {
            tokens_per_step: Some(tokens),
            tokens_per_step_ci95: Some([tokens - 0.1, tokens + 0.1]),
            union_mean: Some(10.0 * tokens),
            cost_source: Some(CostSource::Model),
            speedup: Some(tokens / 1.5),
            ..SweepPoint::default()
        };
        let cell = |draft_len: u16, predicted: Option<f64>| SweepCell {
            name: format!("mtp-{draft_len}-t0"),
            drafter: "mtp".into(),
            draft_len,
            temperature: 0.0,
            tag: None,
            requests: 4,
            verify_steps: 100,
            recorded: point(1.0 + f64::from(draft_len) / 4.0),
            predicted: predicted.map(point),
            predicted_by: predicted.map(|_| "mtp-2-t0".into()),
            drafted_share: None,
            speedup_all_steps: None,
            unknown_because: None,
            too_few: false,
        };
        let sweep = Sweep {
            schema: crate::metric::sweep::SCHEMA.into(),
            model: "m\x1b".into(),
            cells: vec![cell(1, Some(1.27)), cell(2, None)],
            measured_unused_because: None,
            warnings: Vec::new(),
        };
        let text = render(&sweep, &TextOptions::default());
        assert!(text.contains("fastest     mtp-2-t0: 1.00 times"), "{text}");
        assert!(text.contains("1.25 (1.15-1.35)       1.27") && !text.contains('\x1b'), "{text}");
        assert!(!text.contains("can be compared"), "{text}");
        // A lookup is ranked by all its steps, and what is unknown is counted and told.
        let mut sweep = sweep;
        let mut lookup = cell(3, None);
        (lookup.name, lookup.recorded.speedup) = ("ngram-3-t0".into(), Some(1.91));
        lookup.recorded.ci95 = Some([1.8, 2.0]);
        (lookup.drafted_share, lookup.speedup_all_steps) = (Some(0.19), Some(1.19));
        let mut unknown = cell(4, None);
        (unknown.name, unknown.recorded.speedup, unknown.unknown_because) = ("dspark-4-t0".into(), None, Some("no bytes".into()));
        sweep.cells.extend([lookup, unknown]);
        let text = render(&sweep, &TextOptions { width: 200, ..TextOptions::default() });
        assert!(text.contains("ngram-3-t0: 1.19 times plain decoding over all its steps (1.91 over the 19 % that had drafts)"), "{text}");
        assert!(text.contains("of 3 of 4 recordings that can be compared") && text.contains("dspark-4-t0: no bytes"), "{text}");
        assert!(text.contains("intervals   of speedups are of acceptance and unions alone: step costs are taken as exact"), "{text}");
        // A cell of too few steps has no number, tags are ranked apart, and what cannot be told apart is named.
        for (cell, ci95) in sweep.cells.iter_mut().zip([[0.7, 1.2], [0.9, 1.1]]) {
            (cell.recorded.ci95, cell.tag) = (Some(ci95), Some("kind=code".into()));
        }
        (sweep.cells[3].too_few, sweep.cells[3].tag) = (true, Some("kind=\x1bx".into()));
        sweep.measured_unused_because = Some("mtp-1-t0: 3 decode steps".into());
        sweep.warnings = vec![Warning::new("few_requests", "4 of 4 recordings")];
        let text = render(&sweep, &TextOptions { width: 200, ..TextOptions::default() });
        let best = "fastest     ngram-3-t0: 1.19 times plain decoding over all its steps (1.91 over the 19 % that had drafts), by the model of bytes\n";
        assert!(text.contains(best), "{text}");
        let close =
            "of kind=code, mtp-2-t0: 1.00 times plain decoding, by the model of bytes; not told apart from plain decoding, mtp-1-t0\n";
        assert!(text.contains(close) && text.contains("of kind=?x, unknown: none of 1 recordings can be compared"), "{text}");
        assert!(text.contains("costs       by the model of bytes, not by measured times: mtp-1-t0: 3 decode steps"), "{text}");
        assert!(text.contains("   too few") && text.ends_with("\n[1] few_requests: 4 of 4 recordings\n"), "{text}");
        // Where plain decoding is faster than every recording, that is the first thing said.
        let mut slow = sweep.clone();
        slow.cells.truncate(1);
        let mut plain = slow.cells[0].clone();
        (plain.name, plain.drafter, plain.draft_len, plain.recorded.speedup) = ("none-0-t0".into(), "none".into(), 0, Some(1.0));
        slow.cells.push(plain);
        slow.warnings = vec![Warning::new(NOISY_TIMES, "mtp-1-t0: a step of 9 s")];
        for (ci95, says) in [
            ([0.7, 0.85], "plain decoding is faster: the best recording, mtp-1-t0, has 0.77 times its speed"),
            ([0.7, 1.2], "plain decoding is not told to be slower: the best"),
        ] {
            (slow.cells[0].recorded.speedup, slow.cells[0].recorded.ci95) = (Some(0.77), Some(ci95));
            let text = render(&slow, &TextOptions { width: 400, ..TextOptions::default() });
            assert!(
                text.contains(&format!("fastest     of kind=code, {says}")) && text.contains("; a few steps decide its times"),
                "{text}"
            );
        }
        for width in [60, 80] {
            assert!(render(&sweep, &TextOptions { width, ..TextOptions::default() }).lines().all(|l| l.chars().count() <= width));
        }
    }
}
