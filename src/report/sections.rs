//! What is there when asked for: groups and ranks, as sections of the text and as tables of every format.

use super::table::{self, Column};
use super::text::{FEW, TextOptions};
use super::wrap::{paragraph, plain, titled};
use crate::metric::bounds::FEW_REQUESTS;
use crate::metric::groups::{GroupReport, Groups};
use crate::metric::parallel::{ExpertParallel, ParallelLayer, ParallelStats};
use crate::metric::report::{LayerReport, Report};
use crate::metric::{Interval, Unit};

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{v:.2}"))
}

fn span(interval: Option<Interval>) -> String {
    interval.map_or_else(|| "-".to_owned(), |[low, high]| format!("{low:.2}-{high:.2}"))
}

fn cells<T>(items: &[T], of: impl Fn(&T) -> String) -> Vec<String> {
    items.iter().map(of).collect()
}

/// Acceptance and unions by group.
pub fn groups(groups: &Groups, options: &TextOptions) -> String {
    let g = &groups.groups;
    let rows = g.first().map_or(0, |g| g.rows);
    let mut out = String::from("\n");
    out.push_str(&titled("by", &format!("{}; windows of {rows} rows", plain(&groups.by)), options.width, options.color));
    out.push_str(&table::render(group_columns(groups), options.width, |_, line| line.to_owned()));
    if g.iter().any(GroupReport::has_few) {
        out.push_str(&paragraph("", &format!("! of fewer than {FEW_REQUESTS} requests: too narrow"), options.width));
    }
    out
}

/// A column of numbers with two digits for people and in full for machines.
fn two<T>(title: &str, key: &str, items: &[T], of: impl Fn(&T) -> Option<f64>) -> Column {
    Column::new(title).cells(cells(items, |item| number(of(item)))).numbers(key, items.iter().map(&of))
}

/// The table of groups, one row each.
pub fn group_columns(groups: &Groups) -> Vec<Column> {
    let g = &groups.groups;
    let name = |g: &GroupReport| g.name.as_ref().map_or_else(|| plain(&g.key), |name| format!("{} {}", plain(&g.key), plain(name)));
    let tokens = |g: &GroupReport| g.acceptance.as_ref().and_then(|a| a.tokens_per_step);
    let interval = |g: &GroupReport| g.acceptance.as_ref().and_then(|a| a.tokens_per_step_ci95);
    let whole = |title: &str, key: &str, of: fn(&GroupReport) -> u64| {
        Column::new(title).cells(cells(g, |g| of(g).to_string())).numbers(key, g.iter().map(|g| Some(of(g) as f64)))
    };
    let marked = |g: &GroupReport, interval: Option<Interval>| match interval {
        Some(_) if g.has_few() => format!("{} !", span(interval)),
        _ => span(interval),
    };
    let bound = |key: &str, of: &dyn Fn(&GroupReport) -> Option<f64>| Column::machine(key, g.iter().map(of));
    vec![
        Column::new(groups.by.split(':').next().unwrap_or("group"))
            .left()
            .cells(cells(g, name))
            .words("group", cells(g, |g| g.key.clone())),
        whole("requests", "requests", |g| g.requests).optional(1),
        whole("steps", "verify_steps", |g| g.verify_steps).optional(3),
        two("tokens/step", "tokens_per_step", g, tokens),
        Column::new("95 %").optional(2).cells(cells(g, |g| marked(g, interval(g)))),
        two("union", "union_mean", g, |g| g.union_mean),
        Column::new("95 %").optional(0).cells(cells(g, |g| marked(g, g.union_ci95))),
        two("per kept", "marginal_kept", g, |g| g.marginal_kept).optional(5),
        two("per rejected", "marginal_rejected", g, |g| g.marginal_rejected).optional(4),
        two("wasted", "wasted_mean", g, |g| g.wasted_mean),
        bound("tokens_per_step_ci95_low", &|g| Some(interval(g)?[0])),
        bound("tokens_per_step_ci95_high", &|g| Some(interval(g)?[1])),
        bound("union_ci95_low", &|g| Some(g.union_ci95?[0])),
        bound("union_ci95_high", &|g| Some(g.union_ci95?[1])),
        Column::machine("rows", g.iter().map(|g| Some(f64::from(g.rows)))),
        Column::machine("windows", g.iter().map(|g| Some(g.windows as f64))),
        Column::machine("name", []).words("name", cells(g, |g| g.name.clone().unwrap_or_default())),
    ]
}

/// Loads alone, of a trace without windows.
pub fn loads(report: &Report, options: &TextOptions) -> String {
    let of = |l: &LayerReport| Some((l.layer, l.experts, l.load?));
    let loads: Vec<_> = report.layers.iter().filter_map(of).collect();
    let Some(worst) = loads.iter().max_by(|a, b| a.2.max_over_mean.total_cmp(&b.2.max_over_mean)) else { return String::new() };
    let shown = if options.per_layer { loads.as_slice() } else { loads.get(..FEW).unwrap_or(&loads) };
    let text = format!("{} routed layers; most uneven is layer {} ({:.2} max / mean)", loads.len(), worst.0, worst.2.max_over_mean);
    let columns = vec![
        Column::new("layer").cells(cells(shown, |l| l.0.to_string())),
        Column::new("experts").cells(cells(shown, |l| l.1.to_string())),
        Column::new("effective").cells(cells(shown, |l| format!("{:.1}", l.2.effective_experts))),
        Column::new("entropy").optional(0).cells(cells(shown, |l| format!("{:.2}", l.2.entropy_bits))),
        Column::new("top 1 %").optional(1).cells(cells(shown, |l| format!("{:.1} %", l.2.top_1pct_share * 100.0))),
        Column::new("max / mean").cells(cells(shown, |l| format!("{:.2}", l.2.max_over_mean))),
    ];
    let mut out = titled("loads", &text, options.width, options.color);
    out.push('\n');
    out.push_str(&table::render(columns, options.width, |_, line| line.to_owned()));
    if shown.len() < loads.len() {
        out.push_str(&format!("{} of {} routed layers shown; all with --per-layer\n", shown.len(), loads.len()));
    }
    out
}

/// Windows over ranks.
pub fn parallel(report: &ExpertParallel, options: &TextOptions) -> String {
    let mut out = String::from("\n");
    let mut line = |title: &str, text: &str| out.push_str(&titled(title, text, options.width, options.color));
    let Some(overall) = &report.overall else {
        line("ranks", "unknown: no windows");
        return out;
    };
    let head = format!(
        "{} ranks, {} placement: {:.2} of them touched by a window, the busiest with {:.2} of {:.2} experts (p99 {}; {:.2} at best), \
         {:.2} times the mean (p99 {:.2})",
        report.ranks,
        plain(&report.placement),
        overall.ranks_touched_mean,
        overall.busiest_mean,
        overall.union_mean,
        overall.busiest_p99,
        overall.busiest_floor_mean,
        overall.imbalance_mean,
        overall.imbalance_p99
    );
    line("ranks", &head);
    let bytes = |n: Option<f64>| n.map_or_else(|| "unknown bytes".to_owned(), |n| Unit::Bytes.show(n));
    let sent = format!(
        "a layer and window: {} a row to each rank, {} a row to each expert, {} of weights to the rows",
        bytes(overall.token_dispatch_bytes),
        bytes(overall.expert_dispatch_bytes),
        bytes(overall.weight_dispatch_bytes)
    );
    line("sent", &sent);
    if let Some(b) = &report.balanced {
        let judged = if b.held_out { "made of the other half of the requests" } else { "made of the same windows" };
        let text = format!(
            "by load, {judged}: the busiest rank has {:.2} experts, {:.1} % fewer; {:.2} times the mean",
            b.stats.busiest_mean,
            b.gain * 100.0,
            b.stats.imbalance_mean
        );
        line("balanced", &text);
    }
    for (i, assumption) in report.assumptions.iter().enumerate() {
        line(if i == 0 { "assumed" } else { "" }, assumption);
    }
    out + &table::render(rank_columns(report), options.width, |_, line| line.to_owned())
}

/// The table of windows over ranks, one row a layer.
pub fn rank_columns(report: &ExpertParallel) -> Vec<Column> {
    let l = &report.layers;
    let stat = |title: &str, key: &str, of: fn(&ParallelStats) -> Option<f64>, show: &dyn Fn(f64) -> String| {
        let of = |l: &ParallelLayer| l.stats.as_ref().and_then(of);
        Column::new(title).cells(cells(l, |l| of(l).map_or_else(|| "-".to_owned(), show))).numbers(key, l.iter().map(of))
    };
    let digits = |v: f64| format!("{v:.2}");
    let whole = |v: f64| format!("{v:.0}");
    let bytes = |v: f64| Unit::Bytes.show(v);
    vec![
        Column::new("layer").cells(cells(l, |l| l.layer.to_string())).numbers("layer", l.iter().map(|l| Some(f64::from(l.layer)))),
        stat("union", "union_mean", |s| Some(s.union_mean), &digits),
        stat("ranks touched", "ranks_touched_mean", |s| Some(s.ranks_touched_mean), &digits).optional(3),
        stat("busiest", "busiest_mean", |s| Some(s.busiest_mean), &digits),
        stat("p99", "busiest_p99", |s| Some(f64::from(s.busiest_p99)), &whole).optional(1),
        stat("imbalance", "imbalance_mean", |s| Some(s.imbalance_mean), &digits),
        stat("p99", "imbalance_p99", |s| Some(s.imbalance_p99), &digits).optional(2),
        stat("sent by rank", "token_dispatch_bytes", |s| s.token_dispatch_bytes, &bytes).optional(0),
        two("balanced", "balanced_busiest_mean", l, |l| Some(l.balanced.as_ref()?.busiest_mean)),
        Column::new("gain")
            .cells(cells(l, |l| l.gain.map_or_else(|| "-".to_owned(), |g| format!("{:.1} %", g * 100.0))))
            .numbers("gain", l.iter().map(|l| l.gain)),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::{markdown, tables};
    use super::*;
    use crate::analysis::tests::memory::Memory;
    use crate::analysis::{GroupBy, Wanted};
    use crate::report::text::tests::report;

    /// Fourteen requests are enough, and so are eleven of chat; three of code are not.
    #[test]
    fn groups_of_few_requests_are_marked_and_counted() {
        let of = |code: u32| {
            let mut trace = Memory::new(&[1], 16, 2);
            for request in 0..14 {
                trace.verify(request, (request % 2) as u16, &[vec![vec![0, 1], vec![1, 2 + (request % 3) as u16]]]);
                trace.requests.push(crate::trace::RequestEvent {
                    request_id: request,
                    id: String::new(),
                    prompt_tokens: 1,
                    generated_tokens: 1,
                    finish_reason: crate::trace::FinishReason::Length,
                    tags: format!("{{\"kind\": \"{}\"}}", if request < code { "code" } else { "chat" }),
                    prompt_text: None,
                    output_text: None,
                });
            }
            trace.try_report_of(&Wanted { by: Some(GroupBy::Tag("kind".into())), ..Wanted::default() }).unwrap()
        };
        let report = of(3);
        let warning = |report: &Report| report.warnings.iter().find(|w| w.code == "few_requests_in_groups").map(|w| w.message.clone());
        assert!(warning(&report).unwrap().starts_with("1 of 2 groups have fewer than 10 requests"));
        let text = groups(report.groups.as_ref().unwrap(), &TextOptions { width: 200, ..TextOptions::default() });
        let line = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap();
        assert!(line("code").contains(" !") && !line("chat").contains('!'), "{text}");
        assert!(text.ends_with("! of fewer than 10 requests: too narrow\n"), "{text}");
        // A single request has no interval that could be too narrow.
        let report = of(1);
        let text = groups(report.groups.as_ref().unwrap(), &TextOptions { width: 200, ..TextOptions::default() });
        assert!(warning(&report).is_none() && !text.contains('!'), "{text}");
    }

    #[test]
    fn groups_and_ranks_are_tables_of_every_format() {
        let mut report = report();
        assert!(markdown::table_csv(&report, "groups").is_none() && markdown::table_csv(&report, "ranks").is_none());
        let group = GroupReport {
            key: "0".into(),
            name: Some("first".into()),
            requests: 1,
            verify_steps: 3,
            acceptance: None,
            rows: 4,
            windows: 15,
            union_mean: Some(7.25),
            union_ci95: Some([7.0, 7.5]),
            prefix_union: Vec::new(),
            marginal_kept: None,
            marginal_rejected: None,
            wasted_mean: Some(1.5),
        };
        report.groups = Some(Groups { by: "request".into(), groups: vec![group] });
        report.expert_parallel = Some(ExpertParallel {
            ranks: 2,
            placement: "contiguous".into(),
            rows: 4,
            row_bytes: None,
            layers: vec![ParallelLayer { layer: 3, stats: None, balanced: None, gain: Some(0.125) }],
            overall: None,
            balanced: None,
            assumptions: Vec::new(),
        });
        let csv = |name| markdown::table_csv(&report, name).unwrap();
        let row = csv("groups").lines().nth(1).unwrap().to_owned();
        assert_eq!(row, "0,1,3,,7.25,,,1.5,,,7,7.5,4,15,first");
        assert_eq!(csv("ranks").lines().nth(1).unwrap(), "3,,,,,,,,,0.125");
        let names: Vec<_> = tables::all(&report).iter().map(|t| t.name).collect();
        assert!(names.contains(&"groups") && names.contains(&"ranks"));
        let text = markdown::render(&report, false);
        assert!(text.contains("| 0 first | 1 | 3 |") && text.contains("12.5 %"), "{text}");
        let page = super::super::html::render(&report).unwrap();
        assert!(page.contains("0 first") && page.contains("12.5 %"));
    }
}
