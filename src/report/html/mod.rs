//! The report as one HTML file: no network, no other file, complete without JavaScript.
//!
//! Every word that comes from a trace is escaped by the template; pictures and the embedded JSON are the only
//! text that goes in as it is, and both are made here.

mod charts;
mod cost;
mod data;
mod figure;
mod groups;

use super::lookup::{interval, json, number};
use super::table::Column;
use super::tables::{self, Table};
use super::words::{self, counted, known};
use super::wrap::plain;
use crate::metric::report::Report;
use crate::metric::{METRICS, Unit};
use figure::{Grids, Section};
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Value, context};

/// Rows of a table in the page at most: a page of thousands of requests is read by nobody.
const ROWS: usize = 300;

/// The report as a page.
///
/// # Errors
/// When the report cannot be written as JSON; the text says why.
pub fn render(report: &Report) -> Result<String, String> {
    let (data, without) = data::data(report).map_err(|e| e.to_string())?;
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_template("report", include_str!("page.html")).map_err(|e| e.to_string())?;
    let template = environment.get_template("report").map_err(|e| e.to_string())?;
    let sections: Vec<Section> =
        charts::sections(report).into_iter().chain(groups::sections(report)).chain(cost::sections(report)).collect();
    let warnings: Vec<_> = report.warnings.iter().map(|w| context! { code => plain(&w.code), message => plain(&w.message) }).collect();
    let metrics: Vec<_> =
        METRICS.iter().map(|m| context! { id => m.id, unit => m.unit.name(), meaning => m.meaning, formula => m.formula }).collect();
    let page = template.render(context! {
        version => env!("CARGO_PKG_VERSION"),
        title => plain(&report.run.name),
        subtitle => subtitle(report),
        css => include_str!("page.css"),
        js => include_str!("page.js"),
        cards => cards(report),
        sections => Value::from(Serde(&sections)),
        tables => Value::from(Serde(grids(report))),
        warnings => warnings,
        facts => facts(report),
        metrics => metrics,
        without => without.join(", "),
        data => data,
    });
    page.map_err(|e| format!("{e:#}"))
}

fn subtitle(report: &Report) -> String {
    let (run, totals) = (&report.run, &report.totals);
    let text = format!(
        "{} with drafter {} ({}): {}, {}, {}{}",
        run.model.name,
        run.drafter.label(),
        run.drafter.draft_len.map_or_else(|| "unknown drafts".to_owned(), |n| counted(n.into(), "draft")),
        counted(totals.requests, "request"),
        counted(totals.verify_steps, "verify step"),
        counted(totals.tokens_emitted, "token"),
        if run.emulated { ", on an emulated device" } else { "" }
    );
    plain(&text)
}

/// Names of the two ratios of times, which are not of the same thing.
const PASS_RATIO: &str = "verify pass over decode pass";
const STEP_RATIO: &str = "whole verify step over decode step";

/// The numbers at the top, the unknown ones left out, with their intervals in small print.
fn cards(report: &Report) -> Vec<Value> {
    let cost = json(&report.cost);
    let all = report.overall.as_ref();
    let (noisy, undecided) = (super::cost::is_noisy(report), super::advice::is_undecided(report));
    let union = all.and_then(|o| o.stats.union.as_ref());
    let small = |interval: Option<crate::metric::Interval>| interval.map(|[low, high]| format!("95 %: {low:.2} to {high:.2}"));
    // Where a few steps decide the means, the medians lead.
    let timed = |key: &str| {
        let (mean, range) = (number(&cost, &[key]), small(interval(&cost, &[&format!("{key}_ci95")])));
        let median = number(&cost, &[&format!("{key}_median")]).filter(|_| noisy);
        match (median, mean) {
            (Some(median), Some(mean)) => {
                let range = range.map_or_else(String::new, |range| format!(" ({range})"));
                (Some(format!("{median:.2}")), Some(format!("noisy times: by medians; {mean:.2} by means{range}")))
            }
            _ => (mean.map(|v| format!("{v:.2}")), range),
        }
    };
    let (verify_ratio, step_ratio, speedup) = (timed("verify_ratio"), timed("step_ratio"), timed("speedup"));
    let notes = [
        ("tokens per verify step", small(report.acceptance.tokens_per_step_ci95)),
        ("experts per window and layer", small(union.and_then(|u| u.ci95))),
        (PASS_RATIO, verify_ratio.1),
        (STEP_RATIO, step_ratio.1),
        ("speedup", speedup.1),
        ("best draft length", undecided.then(|| "noisy times give no advice".to_owned())),
    ];
    let best = report.advice.as_ref().and_then(|a| a.best_draft_len).map(|n| if undecided { "not told".to_owned() } else { n.to_string() });
    let cards = [
        ("tokens per verify step", report.acceptance.tokens_per_step.map(|v| format!("{v:.2}"))),
        ("experts per window and layer", union.map(|u| format!("{:.1}", u.mean))),
        (
            "of the uniform union",
            all.and_then(|o| Some(o.stats.union.as_ref()?.mean / o.stats.uniform_union?)).map(|v| format!("{:.0} %", v * 100.0)),
        ),
        ("wasted experts per window", all.and_then(|o| o.stats.wasted_mean).map(|v| format!("{v:.2}"))),
        ("layer of the largest union", all.map(|o| o.worst_layer.to_string())),
        (PASS_RATIO, verify_ratio.0),
        (STEP_RATIO, step_ratio.0),
        ("speedup", speedup.0),
        ("best draft length", best),
    ];
    let note = |name: &str| notes.iter().find(|(of, _)| *of == name).and_then(|(_, note)| note.clone());
    cards.into_iter().filter_map(|(name, value)| value.map(|value| context! { name, value, note => note(name) })).collect()
}

/// The tables, that of layers first; every table that a page always has is there, with or without rows.
fn grids(report: &Report) -> Vec<Grids> {
    let all = tables::all(report);
    let of = |name: &str| all.iter().find(|t| t.name == name).map_or(&[][..], |t: &Table| &t.columns[..]);
    let grid = |id, title, columns: &[Column], intro: String| Grids { intro, ..Grids::of(id, title, columns, ROWS) };
    let mut layers =
        grid("layers", "Layers", of("layers"), "Routed layers of the target; the worst is marked, the last row is all of them.".into());
    let worst = report.overall.as_ref().map(|o| o.worst_layer);
    let count = report.layers.len();
    for (i, row) in layers.rows.iter_mut().enumerate() {
        if i >= count {
            row.class = "all";
        } else if report.layers.get(i).map(|l| l.layer) == worst {
            row.class = "worst";
        }
    }
    let requests = match report.by_request.len() {
        0 => "No requests.".to_owned(),
        n if n > ROWS => format!("The first {ROWS} of {n} requests; all of them with --format csv --table requests."),
        _ => "Windows of the most frequent number of rows.".to_owned(),
    };
    let groups = match report.groups.as_ref().map_or(0, |g| g.groups.len()) {
        n if n > ROWS => format!("The first {ROWS} of {n} groups; all of them with --format csv --table groups."),
        _ => "Acceptance and unions by group, as asked for with --by.".to_owned(),
    };
    let positions = "The share of the windows that had a draft there (n) and kept it, and the share of those that had kept all before.";
    let mut grids = vec![layers, grid("positions", "Acceptance by draft position", of("acceptance"), positions.into())];
    // Those of windows and passes of a kind that most traces have none of.
    let kinds = [
        ("depths", "Rows by depth", "All layers; a row's depth is the number of rows above it in its tree."),
        ("groups", "Groups", groups.as_str()),
        ("ranks", "Ranks by layer", "Windows over the ranks of an expert-parallel machine, as asked for with --ep."),
        ("passes", "Passes that requests share", "Unions of one request's rows and of all rows of a forward pass."),
    ];
    for (id, title, intro) in kinds {
        if all.iter().any(|t| t.name == id) {
            grids.push(grid(id, title, of(id), intro.into()));
        }
    }
    grids.push(grid("requests", "Requests", of("requests"), requests));
    grids
}

/// The run's facts in words.
fn facts(report: &Report) -> Vec<(&'static str, String)> {
    let (run, totals) = (&report.run, &report.totals);
    let m = &run.model;
    let bytes = m.bytes_per_expert.map_or_else(|| "unknown".to_owned(), |n| Unit::Bytes.show(n as f64));
    let state = words::incomplete(run).map_or_else(|| "complete".to_owned(), |why| format!("incomplete: {why}"));
    let facts = [
        ("trace", run.name.clone()),
        ("state", state),
        ("model", format!("{} ({})", m.name, m.architecture)),
        ("layers", format!("{}, {} of them routed", m.layers, m.moe_layers.len())),
        ("experts", format!("{} of {}, and {} shared", m.top_k_words(), m.experts_words(), known(m.shared_experts))),
        ("bytes per expert", format!("{bytes} ({})", m.quantisation)),
        ("drafter", format!("{}, {} drafts per step", run.drafter.label(), known(run.drafter.draft_len))),
        ("sampling", words::sampling(run)),
        ("verification", words::verification(run).to_owned()),
        ("windows", words::windows(run).to_owned()),
        (
            "steps",
            format!("{}: {} prefill, {} decode, {} verify", totals.steps, totals.prefill_steps, totals.decode_steps, totals.verify_steps),
        ),
        ("device", format!("{}{}", run.device.label(), if run.emulated { " (emulated)" } else { "" })),
        ("engine", run.engine.clone()),
        ("written by", format!("{}, trace format {}", run.written_by, run.format_version)),
        ("token hash", run.token_hash.clone().unwrap_or_else(|| "none".to_owned())),
    ];
    facts.into_iter().map(|(name, value)| (name, plain(&value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::text::tests::report;

    /// A page without its style, script, data and pictures.
    fn words(page: &str) -> String {
        let mut out = page.to_owned();
        for (begin, end) in [("<style>", "</style>"), ("<script", "</script>"), ("<svg", "</svg>")] {
            while let Some(from) = out.find(begin) {
                let to = out[from..].find(end).map_or(out.len(), |at| from + at + end.len());
                out.replace_range(from..to, "...");
            }
        }
        out
    }

    #[test]
    fn the_words_of_the_page() {
        insta::assert_snapshot!(words(&render(&report()).unwrap()));
    }
}
