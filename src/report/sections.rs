//! Sections of the text report that are there when asked for: groups and ranks.

use super::table::{self, Column};
use super::text::{FEW, TextOptions};
use super::wrap::{plain, titled};
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
    let name = |g: &GroupReport| g.name.as_ref().map_or_else(|| plain(&g.key), |name| format!("{} {}", plain(&g.key), plain(name)));
    let tokens = |g: &GroupReport| g.acceptance.as_ref().and_then(|a| a.tokens_per_step);
    let columns = vec![
        Column::new(groups.by.split(':').next().unwrap_or("group")).left().cells(cells(g, name)),
        Column::new("requests").optional(1).cells(cells(g, |g| g.requests.to_string())),
        Column::new("steps").optional(3).cells(cells(g, |g| g.verify_steps.to_string())),
        Column::new("tokens/step").cells(cells(g, |g| number(tokens(g)))),
        Column::new("95 %").optional(2).cells(cells(g, |g| span(g.acceptance.as_ref().and_then(|a| a.tokens_per_step_ci95)))),
        Column::new("union").cells(cells(g, |g| number(g.union_mean))),
        Column::new("95 %").optional(0).cells(cells(g, |g| span(g.union_ci95))),
        Column::new("per kept").optional(5).cells(cells(g, |g| number(g.marginal_kept))),
        Column::new("per rejected").optional(4).cells(cells(g, |g| number(g.marginal_rejected))),
        Column::new("wasted").cells(cells(g, |g| number(g.wasted_mean))),
    ];
    out + &table::render(columns, options.width, |_, line| line.to_owned())
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
    let l = &report.layers;
    let stat = |of: fn(&ParallelStats) -> String| cells(l, |l: &ParallelLayer| l.stats.as_ref().map_or_else(|| "-".to_owned(), of));
    let columns = vec![
        Column::new("layer").cells(cells(l, |l| l.layer.to_string())),
        Column::new("union").cells(stat(|s| format!("{:.2}", s.union_mean))),
        Column::new("ranks touched").optional(3).cells(stat(|s| format!("{:.2}", s.ranks_touched_mean))),
        Column::new("busiest").cells(stat(|s| format!("{:.2}", s.busiest_mean))),
        Column::new("p99").optional(1).cells(stat(|s| s.busiest_p99.to_string())),
        Column::new("imbalance").cells(stat(|s| format!("{:.2}", s.imbalance_mean))),
        Column::new("p99").optional(2).cells(stat(|s| format!("{:.2}", s.imbalance_p99))),
        Column::new("sent by rank").optional(0).cells(stat(|s| Unit::Bytes.show_option(s.token_dispatch_bytes))),
        Column::new("balanced").cells(cells(l, |l| number(l.balanced.as_ref().map(|b| b.busiest_mean)))),
        Column::new("gain").cells(cells(l, |l| l.gain.map_or_else(|| "-".to_owned(), |g| format!("{:.1} %", g * 100.0)))),
    ];
    out + &table::render(columns, options.width, |_, line| line.to_owned())
}
