//! Sentences and tables of windows that are trees, and of passes that several requests share.

use super::table::{self, Column};
use super::text::TextOptions;
use super::wrap::titled;
use crate::metric::batch::{Batch, BatchStats};
use crate::metric::report::{Report, WindowStats};
use crate::metric::trees::DepthStats;
use crate::metric::{Interval, Unit};

fn two(value: f64) -> String {
    format!("{value:.2}")
}

/// Numbers with two digits for people and in full for machines.
fn numbers(title: &str, key: &str, values: Vec<Option<f64>>) -> Column {
    let texts: Vec<String> = values.iter().map(|v| v.map_or_else(|| "-".to_owned(), two)).collect();
    Column::new(title).cells(texts).numbers(key, values)
}

/// Whole numbers.
fn counts(title: &str, key: &str, values: Vec<u64>) -> Column {
    let texts: Vec<String> = values.iter().map(|&n| Unit::Count.show(n as f64)).collect();
    Column::new(title).cells(texts).numbers(key, values.into_iter().map(|n| Some(n as f64)))
}

/// What the text says of trees, by depth and along the accepted paths; nothing of chains.
pub fn trees(stats: &WindowStats) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(depths) = &stats.by_depth {
        let of = |of: fn(&DepthStats) -> f64| depths.iter().map(|d| two(of(d))).collect::<Vec<_>>().join("  ");
        lines.push(format!("by depth {}; rows of that depth {}", of(|d| d.marginal), of(|d| d.rows_mean)));
    }
    if let Some(path) = &stats.accepted_path {
        let unknown = if path.unknown_windows > 0 {
            format!("unknown in {} of {} windows", Unit::Count.show(path.unknown_windows as f64), Unit::Count.show(stats.windows as f64))
        } else {
            String::new()
        };
        let known = path.rows_mean.zip(path.union_mean).zip(path.wasted_mean).map(|((rows, union), wasted)| {
            format!("{} rows with {} experts, {} more wasted on the others", two(rows), two(union), two(wasted))
        });
        let said: Vec<String> = known.into_iter().chain(Some(unknown).filter(|u| !u.is_empty())).collect();
        lines.push(format!("accepted path {}", said.join("; ")));
    }
    lines
}

/// The table of depths, over all layers.
pub fn depths(report: &Report) -> Vec<Column> {
    let depths = report.overall.as_ref().and_then(|o| o.stats.by_depth.as_deref()).unwrap_or_default();
    let of = |of: fn(&DepthStats) -> f64| depths.iter().map(|d| Some(of(d))).collect();
    vec![
        counts("depth", "depth", depths.iter().map(|d| u64::from(d.depth)).collect()),
        counts("windows", "windows", depths.iter().map(|d| d.windows).collect()),
        numbers("rows", "rows_mean", of(|d| d.rows_mean)),
        numbers("union of the depth", "union_mean", of(|d| d.union_mean)),
        numbers("union down to it", "prefix_union", of(|d| d.prefix_union)),
        numbers("adds", "marginal", of(|d| d.marginal)),
    ]
}

/// A row of the table of passes: a layer, all of them, or all of one number of requests.
type BatchRow<'a> = (String, &'a BatchStats);

fn rows(batch: &Batch) -> Vec<BatchRow<'_>> {
    let layers = batch.layers.iter().map(|l| (l.layer.to_string(), &l.stats));
    let sizes = batch.by_requests.iter().map(|s| (format!("all, {} requests", s.requests), &s.stats));
    layers.chain(batch.overall.iter().map(|o| ("all".to_owned(), o))).chain(sizes).collect()
}

/// The table of passes by layer, all layers together, and by number of requests.
pub fn passes(report: &Report) -> Vec<Column> {
    report.batch.as_ref().map_or_else(Vec::new, |batch| columns(&rows(batch)))
}

fn columns(rows: &[BatchRow<'_>]) -> Vec<Column> {
    let names = || rows.iter().map(|(name, _)| name.clone());
    let of = |of: fn(&BatchStats) -> f64| rows.iter().map(|(_, s)| Some(of(s))).collect::<Vec<_>>();
    let interval = |title: &str, key: &str, order: u8, of: fn(&BatchStats) -> Option<Interval>| {
        let texts = rows.iter().map(|(_, s)| of(s).map_or_else(|| "-".to_owned(), |[low, high]| format!("{low:.2}-{high:.2}")));
        let half = rows.iter().map(|(_, s)| of(s).map(|[low, high]| (high - low) / 2.0));
        Column::new(title).optional(order).cells(texts).numbers(&format!("{key}_ci95_half"), half)
    };
    vec![
        Column::new("layer").left().cells(names()).words("layer", names()),
        counts("passes", "passes", rows.iter().map(|(_, s)| s.passes).collect()).optional(3),
        numbers("union of a request", "request_union_mean", of(|s| s.request_union_mean)),
        interval("95 %", "request_union", 0, |s| s.request_union_ci95),
        numbers("their sum", "union_sum_mean", of(|s| s.union_sum_mean)),
        interval("95 %", "union_sum", 0, |s| s.union_sum_ci95),
        numbers("union of the pass", "pass_union_mean", of(|s| s.pass_union_mean)),
        interval("95 %", "pass_union", 1, |s| s.pass_union_ci95),
        numbers("sharing", "sharing_ratio", of(|s| s.sharing_ratio)),
        interval("95 %", "sharing_ratio", 2, |s| s.sharing_ratio_ci95),
    ]
}

/// The text's section of passes.
pub fn batch(batch: &Batch, options: &TextOptions) -> String {
    let mut out = String::from("\n");
    let head = format!(
        "{} {} of {} requests and {} rows on average",
        Unit::Count.show(batch.passes as f64),
        if batch.passes == 1 { "pass" } else { "passes" },
        two(batch.requests_per_pass),
        two(batch.rows_per_pass)
    );
    let text = match &batch.overall {
        None => format!("{head}; their unions are unknown"),
        Some(o) => format!(
            "{head}: a request touches {} experts, all of a pass {}, which one after the other would be {} ({} times as many)",
            two(o.request_union_mean),
            two(o.pass_union_mean),
            two(o.union_sum_mean),
            two(o.sharing_ratio)
        ),
    };
    out.push_str(&titled("batch", &text, options.width, options.color));
    if batch.overall.is_some() {
        out.push_str(&table::render(columns(&rows(batch)), options.width, |_, line| line.to_owned()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(passes: u64, ci95: Option<Interval>) -> BatchStats {
        BatchStats {
            passes,
            request_union_mean: 6.0,
            request_union_ci95: ci95,
            union_sum_mean: 12.0,
            union_sum_ci95: None,
            pass_union_mean: 8.0,
            pass_union_ci95: None,
            sharing_ratio: 1.5,
            sharing_ratio_ci95: None,
        }
    }

    #[test]
    fn passes_in_words_and_columns() {
        let all = stats(4, Some([5.0, 7.0]));
        let mut found = Batch {
            passes: 4,
            passes_with_prefill: 0,
            requests_per_pass: 2.0,
            rows_per_pass: 6.5,
            requests_histogram: vec![0, 0, 4],
            overall: Some(all),
            layers: vec![crate::metric::batch::BatchLayer { layer: 3, stats: all }],
            by_requests: vec![crate::metric::batch::BatchSize { requests: 2, stats: all }],
        };
        let text = batch(&found, &TextOptions::default());
        for words in ["4 passes of 2.00 requests and 6.50 rows", "8.00, which one after the other would be 12.00 (1.50", "all, 2 requests"]
        {
            assert!(text.replace('\n', " ").split_whitespace().collect::<Vec<_>>().join(" ").contains(words), "{text}");
        }
        assert!(text.contains("5.00-7.00"), "{text}");
        found.overall = None;
        assert!(batch(&found, &TextOptions::default()).contains("unknown"));
    }

    #[test]
    fn trees_in_words() {
        let report = crate::report::text::tests::report();
        let mut stats = report.overall.unwrap().stats;
        assert!(trees(&stats).is_empty());
        stats.windows = 5;
        let depth = |depth, marginal| DepthStats { depth, windows: 5, rows_mean: 1.5, union_mean: 3.0, prefix_union: 9.0, marginal };
        stats.by_depth = Some(vec![depth(0, 4.0), depth(1, 2.5)]);
        let path = |known: u64| crate::metric::trees::PathStats {
            windows: known,
            unknown_windows: 5 - known,
            rows_mean: (known > 0).then_some(2.0),
            union_mean: (known > 0).then_some(5.0),
            wasted_mean: (known > 0).then_some(1.25),
        };
        stats.accepted_path = Some(path(5));
        let said = trees(&stats);
        assert_eq!(said[0], "by depth 4.00  2.50; rows of that depth 1.50  1.50");
        assert_eq!(said[1], "accepted path 2.00 rows with 5.00 experts, 1.25 more wasted on the others");
        stats.accepted_path = Some(path(0));
        assert_eq!(trees(&stats)[1], "accepted path unknown in 5 of 5 windows");
    }
}
