//! A sweep for people: one line a recording, and what was predicted of it.

use super::table::{self, Column};
use super::text::TextOptions;
use super::wrap::{paragraph, plain, titled};
use crate::metric::Interval;
use crate::metric::advice::CostSource;
use crate::metric::sweep::{Sweep, SweepCell, SweepPoint};

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{v:.2}"))
}

fn with_interval(value: Option<f64>, interval: Option<Interval>) -> String {
    match (value, interval) {
        (Some(v), Some([low, high])) => format!("{v:.2} ({low:.2}-{high:.2})"),
        (value, _) => number(value),
    }
}

fn source(cell: &SweepCell) -> &'static str {
    match cell.recorded.cost_source {
        Some(CostSource::Measured) => "measured step times",
        Some(CostSource::Model) => "the model of bytes",
        None => "definition",
    }
}

/// The comparison as text.
pub fn render(sweep: &Sweep, options: &TextOptions) -> String {
    let cells = |of: &dyn Fn(&SweepCell) -> String| sweep.cells.iter().map(of).collect::<Vec<_>>();
    let predicted = |of: &dyn Fn(&SweepPoint) -> String| cells(&|c| c.predicted.as_ref().map_or_else(|| "-".to_owned(), of));
    let mut out = titled("sweep", &format!("{} recordings of {}", sweep.cells.len(), plain(&sweep.model)), options.width, options.color);
    let best = sweep.cells.iter().filter(|c| c.recorded.speedup.is_some());
    if let Some(best) = best.reduce(|best, next| if next.recorded.speedup > best.recorded.speedup { next } else { best }) {
        let text = format!("{}: {} times plain decoding, by {}", plain(&best.name), number(best.recorded.speedup), source(best));
        out.push_str(&titled("fastest", &text, options.width, options.color));
    }
    out.push('\n');
    let columns = vec![
        Column::new("recording").left().cells(cells(&|c| plain(&c.name))),
        Column::new("requests").optional(0).cells(cells(&|c| c.requests.to_string())),
        Column::new("steps").optional(1).cells(cells(&|c| c.verify_steps.to_string())),
        Column::new("tokens/step").cells(cells(&|c| with_interval(c.recorded.tokens_per_step, c.recorded.tokens_per_step_ci95))),
        Column::new("predicted").optional(5).cells(predicted(&|p| number(p.tokens_per_step))),
        Column::new("union").cells(cells(&|c| number(c.recorded.union_mean))),
        Column::new("predicted").optional(4).cells(predicted(&|p| number(p.union_mean))),
        Column::new("step ratio").optional(2).cells(cells(&|c| number(c.recorded.step_ratio))),
        Column::new("speedup").cells(cells(&|c| with_interval(c.recorded.speedup, c.recorded.ci95))),
        Column::new("predicted").optional(3).cells(predicted(&|p| number(p.speedup))),
    ];
    out.push_str(&table::render(columns, options.width, |_, line| line.to_owned()));
    if sweep.cells.iter().any(|c| c.predicted.is_some()) {
        let note = "Predicted: by the first drafts of the longest recording of the same drafter, temperature and tag. In parentheses: 95 % \
                    intervals by bootstrap over requests.";
        out.push('\n');
        out.push_str(&paragraph("", note, options.width));
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
        };
        let sweep =
            Sweep { schema: crate::metric::sweep::SCHEMA.into(), model: "m\x1b".into(), cells: vec![cell(1, Some(1.27)), cell(2, None)] };
        let text = render(&sweep, &TextOptions::default());
        assert!(text.contains("fastest     mtp-2-t0: 1.00 times"), "{text}");
        assert!(text.contains("1.25 (1.15-1.35)       1.27") && !text.contains('\x1b'), "{text}");
        for width in [60, 80] {
            assert!(render(&sweep, &TextOptions { width, ..TextOptions::default() }).lines().all(|l| l.chars().count() <= width));
        }
    }
}
