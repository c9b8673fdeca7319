//! The report's tables, described once for text, Markdown, CSV and HTML.

use super::bars::{bar, spark};
use super::lookup::{interval, json, number};
use super::table::Column;
use super::wrap::plain;
use super::{cost, sections, shapes};
use crate::metric::Unit;
use crate::metric::advice::DraftLength;
use crate::metric::cost::slope_doubt;
use crate::metric::report::{LayerReport, Load, Report, WindowStats};
use serde_json::Value;
use std::collections::BTreeSet;

const BAR: usize = 16;
/// Most columns of tags: a hostile trace may have one for every request.
const MAX_TAGS: usize = 256;

/// A table with a name for machines and a title for people.
#[derive(Debug, Clone)]
pub struct Table {
    /// `layers`, `acceptance`, ...
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// Its columns.
    pub columns: Vec<Column>,
}

/// Names of all tables that a report can have.
pub const NAMES: [&str; 10] =
    ["layers", "depths", "passes", "acceptance", "requests", "groups", "ranks", "attribution", "draft_lengths", "warnings"];

/// Every table of which the report has rows, in the order of [`NAMES`].
pub fn all(report: &Report) -> Vec<Table> {
    let rows: Vec<LayerRow<'_>> = report.layers.iter().map(LayerRow::of).chain(all_layers(report)).collect();
    let tables = [
        Table { name: "layers", title: "Layers", columns: layers(&rows, Look::default()) },
        Table { name: "depths", title: "Rows by depth", columns: shapes::depths(report) },
        Table { name: "passes", title: "Passes that requests share", columns: shapes::passes(report) },
        Table { name: "acceptance", title: "Acceptance by draft position", columns: acceptance(report) },
        Table { name: "requests", title: "Requests", columns: requests(report) },
        Table { name: "groups", title: "Groups", columns: report.groups.as_ref().map(sections::group_columns).unwrap_or_default() },
        Table {
            name: "ranks",
            title: "Ranks by layer",
            columns: report.expert_parallel.as_ref().map(sections::rank_columns).unwrap_or_default(),
        },
        Table { name: "attribution", title: "Time of a step by component", columns: attribution(report) },
        Table { name: "draft_lengths", title: "Draft lengths", columns: draft_lengths(report) },
        Table { name: "warnings", title: "Warnings", columns: warnings(report) },
    ];
    tables.into_iter().filter(|t| t.columns.iter().any(|c| !c.texts().is_empty())).collect()
}

/// How the text shows layers.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Whether block characters can be shown.
    pub unicode: bool,
    /// The largest mean union of all layers, for the bars; `None` for no bars.
    pub most: Option<f64>,
}

impl Default for Look {
    fn default() -> Self {
        Self { unicode: true, most: None }
    }
}

/// A row of the table of layers: one layer, or all of them together.
#[derive(Debug, Clone)]
pub struct LayerRow<'a> {
    name: String,
    k: u16,
    stats: &'a WindowStats,
    load: Option<Load>,
    cost: Value,
    time: Value,
}

impl<'a> LayerRow<'a> {
    /// The row of one layer.
    pub fn of(layer: &'a LayerReport) -> Self {
        let (cost, time) = (json(&layer.cost), json(&layer.time));
        Self { name: layer.layer.to_string(), k: layer.k, stats: &layer.stats, load: layer.load, cost, time }
    }

    /// The row with a mark before its name.
    pub fn marked(mut self) -> Self {
        self.name.insert(0, '!');
        self
    }
}

/// The row of all layers together.
fn all_layers(report: &Report) -> Option<LayerRow<'_>> {
    let all = report.overall.as_ref()?;
    let (cost, time) = (json(&all.cost), json(&all.time));
    Some(LayerRow { name: "all".into(), k: all.k, stats: &all.stats, load: all.load, cost, time })
}

/// Its µs for each distinct expert.
fn slope(row: &LayerRow<'_>) -> Option<f64> {
    number(&row.cost, &["us_per_expert"])
}

/// Whether that is known and no fact.
pub fn is_slope_doubtful(row: &LayerRow<'_>) -> bool {
    slope(row).is_some() && slope_doubt(interval(&row.cost, &["ci95"]), number(&row.cost, &["r2"])).is_some()
}

/// The table of layers.
pub fn layers(rows: &[LayerRow<'_>], look: Look) -> Vec<Column> {
    let (unicode, most) = (look.unicode, look.most.unwrap_or_default());
    let k = rows.first().map_or(1.0, |l| f64::from(l.k));
    // A column of numbers: the same value rounded for people and in full for machines.
    let numbers = |title: &str, key: &str, of: &dyn Fn(&LayerRow<'_>) -> Option<f64>, show: &dyn Fn(f64) -> String| {
        let values: Vec<Option<f64>> = rows.iter().map(of).collect();
        let texts: Vec<String> = values.iter().map(|v| v.map_or_else(|| "-".to_owned(), show)).collect();
        Column::new(title).cells(texts).numbers(key, values)
    };
    let two = |v: f64| format!("{v:.2}");
    let percent = |v: f64| format!("{:.0} %", v * 100.0);
    let whole = |v: f64| format!("{v:.0}");
    let union = |r: &LayerRow<'_>| Some(r.stats.union.as_ref()?.mean);
    let ci = |r: &LayerRow<'_>| r.stats.union.as_ref()?.ci95;
    let machine = |key: &str, of: &dyn Fn(&LayerRow<'_>) -> Option<f64>| Column::machine(key, rows.iter().map(of));
    let end = |part: &Value, key: &str, at: usize| interval(part, &[key]).map(|ends| ends[at]);
    let names = || rows.iter().map(|r| r.name.clone());
    let mut columns = vec![
        Column::new("layer").cells(names()).words("layer", names().map(|n| n.trim_start_matches('!').to_owned())),
        numbers("windows", "windows", &|r| Some(r.stats.windows as f64), &whole).optional(6),
        numbers("union", "union_mean", &union, &two),
        Column::new("95 %")
            .optional(11)
            .cells(rows.iter().map(|r| ci(r).map_or_else(|| "-".to_owned(), |[low, high]| format!("{low:.1}-{high:.1}"))))
            .numbers("union_ci95_half", rows.iter().map(|r| ci(r).map(|[low, high]| (high - low) / 2.0))),
        numbers("p99", "union_p99", &|r| Some(f64::from(r.stats.union.as_ref()?.p99)), &whole).optional(10),
        numbers("of uniform", "union_of_uniform", &|r| Some(union(r)? / r.stats.uniform_union?), &percent),
        numbers("lift", "lift", &|r| r.stats.lift, &two).optional(9),
        numbers("pop. lift", "popularity_lift", &|r| r.stats.popularity_lift, &two).optional(3),
        numbers("wasted", "wasted_mean", &|r| r.stats.wasted_mean, &two),
        numbers("reuse", "step_reuse", &|r| r.stats.step_reuse, &percent).optional(8),
        numbers("lag 1", "lag_1_overlap_frac", &|r| r.stats.lag_overlap_frac.as_ref()?.get(1).copied(), &percent).optional(7),
        // People see no slope that is no fact; machines have it with its interval.
        Column::new(if unicode { "µs/expert" } else { "us/expert" })
            .optional(12)
            .cells(rows.iter().map(|r| slope(r).filter(|_| !is_slope_doubtful(r)).map_or_else(|| "-".to_owned(), two)))
            .numbers("us_per_expert", rows.iter().map(slope)),
        numbers("eff. experts", "effective_experts", &|r| Some(r.load?.effective_experts), &whole).optional(0),
        Column::new("by row")
            .left()
            .optional(5)
            .cells(rows.iter().map(|r| spark(r.stats.marginal.iter().map(|&m| Some(m)), 0.0, k, unicode))),
    ];
    if most > 0.0 {
        let bars = rows.iter().map(|r| bar(union(r).unwrap_or_default() / most, BAR, unicode));
        columns.push(Column::new("of most").left().optional(4).cells(bars));
    }
    columns.extend([
        machine("rows", &|r| Some(f64::from(r.stats.rows))),
        machine("union_p50", &|r| Some(f64::from(r.stats.union.as_ref()?.p50))),
        machine("union_p90", &|r| Some(f64::from(r.stats.union.as_ref()?.p90))),
        machine("union_max", &|r| Some(f64::from(r.stats.union.as_ref()?.max))),
        machine("union_ci95_low", &|r| Some(ci(r)?[0])),
        machine("union_ci95_high", &|r| Some(ci(r)?[1])),
        machine("uniform_union", &|r| r.stats.uniform_union),
        machine("popularity_union", &|r| r.stats.popularity_union),
        machine("marginal_kept", &|r| r.stats.marginal_kept),
        machine("marginal_rejected", &|r| r.stats.marginal_rejected),
        machine("lag_1_jaccard", &|r| r.stats.lag_jaccard.as_ref()?.get(1).copied()),
        machine("entropy_bits", &|r| Some(r.load?.entropy_bits)),
        machine("top_1pct_share", &|r| Some(r.load?.top_1pct_share)),
        machine("max_over_mean", &|r| Some(r.load?.max_over_mean)),
        machine("verify_us", &|r| number(&r.time, &["verify_us"])),
        machine("verify_us_ci95_low", &|r| end(&r.time, "verify_us_ci95", 0)),
        machine("verify_us_ci95_high", &|r| end(&r.time, "verify_us_ci95", 1)),
        machine("decode_us", &|r| number(&r.time, &["decode_us"])),
        machine("decode_us_ci95_low", &|r| end(&r.time, "decode_us_ci95", 0)),
        machine("decode_us_ci95_high", &|r| end(&r.time, "decode_us_ci95", 1)),
        machine("cost_intercept_us", &|r| number(&r.cost, &["intercept_us"])),
        machine("cost_intercept_us_ci95_low", &|r| end(&r.cost, "intercept_us_ci95", 0)),
        machine("cost_intercept_us_ci95_high", &|r| end(&r.cost, "intercept_us_ci95", 1)),
        machine("cost_r2", &|r| number(&r.cost, &["r2"])),
        machine("implied_gb_per_s", &|r| number(&r.cost, &["implied_gb_per_s"])),
    ]);
    let window_rows = rows.iter().map(|r| r.stats.marginal.len()).max().unwrap_or(0);
    for i in 0..window_rows {
        columns.push(machine(&format!("marginal_{i}"), &|r| r.stats.marginal.get(i).copied()));
    }
    for i in 0..window_rows {
        columns.push(machine(&format!("prefix_union_{i}"), &|r| r.stats.prefix_union.get(i).copied()));
    }
    columns
}

/// A column of numbers shown in a unit.
fn column(title: &str, key: &str, unit: Unit, values: Vec<Option<f64>>) -> Column {
    let texts: Vec<String> = values.iter().map(|&v| unit.show_option(v)).collect();
    Column::new(title).cells(texts).numbers(key, values)
}

/// A row for each draft position, before them that of windows that kept nothing.
pub fn acceptance(report: &Report) -> Vec<Column> {
    let a = &report.acceptance;
    let last = a.by_position.len();
    // Without windows there is no row, not a row of nothing.
    let positions = if last == 0 && a.histogram.is_empty() { 0..0 } else { 0..last + 1 };
    let at = |values: &[Option<f64>]| positions.clone().map(|i| *values.get(i.checked_sub(1)?)?).collect::<Vec<_>>();
    // Early reports do not say how many windows had the draft.
    let windows = positions.clone().map(|i| Some(*a.windows_by_position.get(i.checked_sub(1)?)? as f64)).collect();
    vec![
        column("draft", "draft", Unit::Count, positions.clone().map(|i| Some(i as f64)).collect()),
        column("n", "windows_by_position", Unit::Count, windows),
        column("accepted", "by_position", Unit::Share, at(&a.by_position)),
        column("given all before", "conditional_by_position", Unit::Share, at(&a.conditional_by_position)),
        column(
            "windows that kept exactly so many",
            "windows_kept_exactly",
            Unit::Count,
            positions.clone().map(|i| a.histogram.get(i).map(|&n| n as f64)).collect(),
        ),
    ]
}

fn requests(report: &Report) -> Vec<Column> {
    let all = &report.by_request;
    let ids = || all.iter().map(|r| r.id.clone().unwrap_or_default());
    let mut columns = vec![
        column("request", "request_id", Unit::Count, all.iter().map(|r| Some(f64::from(r.request_id))).collect()),
        Column::new("id").left().optional(0).cells(ids().map(|id| shortened(&id))).words("id", ids()),
        column("verify steps", "verify_steps", Unit::Count, all.iter().map(|r| Some(r.verify_steps as f64)).collect()),
        column("tokens per step", "tokens_per_step", Unit::Tokens, all.iter().map(|r| r.tokens_per_step).collect()),
        column("union", "union_mean", Unit::Experts, all.iter().map(|r| r.union_mean).collect()),
        column("wasted", "wasted_mean", Unit::Experts, all.iter().map(|r| r.wasted_mean).collect()),
    ];
    let tags: BTreeSet<&str> = all.iter().flat_map(|r| r.tags.keys()).map(String::as_str).collect();
    for tag in tags.into_iter().take(MAX_TAGS) {
        let values = all.iter().map(|r| r.tags.get(tag).cloned().unwrap_or_default());
        columns.push(Column::machine_words(&format!("tag:{tag}"), values));
    }
    columns
}

/// What people see of a request's name.
fn shortened(id: &str) -> String {
    let id = plain(id);
    if id.chars().count() > 24 { id.chars().take(21).chain("...".chars()).collect() } else { id }
}

/// The components, what no component explains, and the whole step.
fn attribution(report: &Report) -> Vec<Column> {
    let Some(steps) = report.cost.as_ref().filter(|cost| !cost.attribution.is_empty()) else { return Vec::new() };
    let whole = steps.verify_step_us.zip(steps.decode_step_us).map(|(verify, decode)| verify - decode);
    let share = |part: Option<f64>| part.zip(whole.filter(|w| *w != 0.0)).map(|(part, whole)| part / whole);
    // name; decode, verify, difference, share
    let mut rows: Vec<(&str, [Option<f64>; 4])> =
        steps.attribution.iter().map(|a| (a.component.as_str(), [a.decode_us, a.verify_us, a.delta_us, a.share_of_delta])).collect();
    rows.push(("unattributed", [None, None, steps.unattributed_us, share(steps.unattributed_us)]));
    rows.push(("whole step", [steps.decode_step_us, steps.verify_step_us, whole, share(whole)]));
    let names = || rows.iter().map(|(name, _)| (*name).to_owned());
    let of = |at: usize| rows.iter().map(|(_, values)| values[at]).collect::<Vec<_>>();
    let micros = |title: &str, key: &str, at: usize| {
        let texts: Vec<String> = of(at).into_iter().map(|v| v.map_or_else(|| "-".to_owned(), |v| format!("{v:.1}"))).collect();
        Column::new(title).cells(texts).numbers(key, of(at))
    };
    let shares = column("share of it", "share_of_delta", Unit::Share, of(3));
    // Machines have them in any case.
    let shares = match cost::shares_doubt(report) {
        Some(_) => shares.optional(0).cells(rows.iter().map(|_| "-".to_owned())),
        None => shares,
    };
    vec![
        Column::new("component").left().cells(names()).words("component", names()),
        micros("decode step, µs", "decode_us", 0),
        micros("verify step, µs", "verify_us", 1),
        micros("more, µs", "delta_us", 2),
        shares,
    ]
}

fn draft_lengths(report: &Report) -> Vec<Column> {
    let lengths = report.advice.as_ref().map_or(&[][..], |advice| advice.by_draft_len.as_slice());
    let of = |value: fn(&DraftLength) -> Option<f64>| lengths.iter().map(value).collect::<Vec<_>>();
    vec![
        column("drafts", "draft_len", Unit::Count, of(|p| Some(f64::from(p.draft_len)))),
        column("tokens per step", "tokens_per_step", Unit::Tokens, of(|p| Some(p.tokens_per_step))),
        column("union", "union_mean", Unit::Experts, of(|p| Some(p.union_mean))),
        column("step ratio", "step_ratio", Unit::Ratio, of(|p| p.step_ratio)),
        column("95 % from", "step_ratio_ci95_low", Unit::Ratio, of(|p| p.step_ratio_ci95.map(|ci| ci[0]))),
        column("to", "step_ratio_ci95_high", Unit::Ratio, of(|p| p.step_ratio_ci95.map(|ci| ci[1]))),
        column("speedup", "speedup", Unit::Ratio, of(|p| p.speedup)),
        column("95 % from", "speedup_ci95_low", Unit::Ratio, of(|p| p.ci95.map(|ci| ci[0]))),
        column("to", "speedup_ci95_high", Unit::Ratio, of(|p| p.ci95.map(|ci| ci[1]))),
    ]
}

fn warnings(report: &Report) -> Vec<Column> {
    let words = |of: fn(&crate::trace::manifest::Warning) -> &String| report.warnings.iter().map(of).cloned().collect::<Vec<_>>();
    vec![
        Column::new("code").left().cells(words(|w| &w.code)).words("code", words(|w| &w.code)),
        Column::new("what limits the numbers").left().cells(words(|w| &w.message)).words("message", words(|w| &w.message)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;
    use crate::report::table;
    use crate::trace::{FinishReason, RequestEvent};

    #[test]
    fn requests_have_their_names_and_a_column_for_each_tag() {
        let mut trace = Memory::new(&[1], 8, 2);
        for (request_id, id, tags) in
            [(0, "=cmd|' /c calc'!A1", r#"{"kind": "a,\"b\"", "@sum": "-2"}"#), (1, "", r#"["fast"]"#), (2, "two\nlines", "none")]
        {
            trace.verify(request_id, 1, &[vec![vec![0, 1], vec![1, 2]]]);
            trace.requests.push(RequestEvent {
                request_id,
                id: id.into(),
                prompt_tokens: 1,
                generated_tokens: 1,
                finish_reason: FinishReason::Length,
                tags: tags.into(),
                prompt_text: None,
                output_text: None,
            });
        }
        let report = trace.report();
        let csv = table::csv(&requests(&report));
        let mut lines = csv.split_inclusive('\n');
        assert_eq!(lines.next(), Some("request_id,id,verify_steps,tokens_per_step,union_mean,wasted_mean,tag:@sum,tag:fast,tag:kind\n"));
        assert_eq!(lines.next(), Some("0,\"'=cmd|' /c calc'!A1\",1,2,3,0,-2,,\"a,\"\"b\"\"\"\n"));
        assert_eq!(lines.next(), Some("1,,1,2,3,0,,yes,\n"));
        assert_eq!((lines.next(), lines.next()), (Some("2,\"two\n"), Some("lines\",1,2,3,0,,,\n")));
        assert_eq!(lines.next(), None);
        assert!(!table::markdown(&requests(&report)).contains("tag:"));
    }

    #[test]
    fn a_tag_for_every_request_does_not_make_a_table_of_their_square() {
        let mut trace = Memory::new(&[1], 8, 2);
        trace.verify(0, 1, &[vec![vec![0, 1], vec![1, 2]]]);
        let mut report = trace.report();
        report.by_request[0].tags = (0..1000).map(|i| (format!("t{i:03}"), "x".to_owned())).collect();
        assert_eq!(table::csv(&requests(&report)).lines().next().unwrap().split(',').count(), 6 + MAX_TAGS);
    }

    #[test]
    fn positions_have_their_windows() {
        let mut trace = Memory::new(&[1], 8, 2);
        let rows = |n: usize| vec![vec![vec![0u16, 1]; n]];
        trace.verify(0, 1, &rows(3));
        trace.verify(0, 1, &rows(2));
        let csv = table::csv(&acceptance(&trace.report()));
        let head = "draft,windows_by_position,by_position,conditional_by_position,windows_kept_exactly";
        assert_eq!(csv.lines().collect::<Vec<_>>(), [head, "0,,,,0", "1,2,1,1,2", "2,1,0,0,0"]);
    }
}
