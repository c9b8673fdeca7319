//! The report as Markdown, for issues and job summaries, and one of its tables as CSV.

use super::table::{Column, csv, escape_markdown, markdown};
use super::tables;
use super::words::{self, counted};
use crate::metric::report::Report;
use crate::metric::{METRICS, Metric};

/// The report as Markdown: the run in a line, then every table that has rows, then, where asked for, what each number means.
pub fn render(report: &Report, explain: bool) -> String {
    let (run, totals) = (&report.run, &report.totals);
    let mut out = format!("# {}\n\n", escape_markdown(&run.name));
    let emulated = if run.emulated { ", emulated" } else { "" };
    let drafts = run.drafter.draft_len.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
    let model = format!(
        "{}, drafter {} with {drafts} drafts, on {}{emulated}: {}, {}, {}.",
        run.model.name,
        run.drafter.label(),
        run.device.label(),
        words::requests(report),
        counted(totals.verify_steps, "verify step"),
        words::tokens(report)
    );
    out.push_str(&escape_markdown(&model));
    out.push_str("\n\n");
    let mut facts = Vec::new();
    if let Some(tokens) = report.acceptance.tokens_per_step {
        let interval =
            report.acceptance.tokens_per_step_ci95.map_or_else(String::new, |[low, high]| format!(" (95 %: {low:.2} to {high:.2})"));
        facts.push(format!("**{tokens:.3}** tokens per verify step{interval}"));
    }
    if let Some((all, union)) = report.overall.as_ref().and_then(|o| Some((o, o.stats.union.as_ref()?))) {
        facts.push(format!(
            "**{:.2}** experts per window of {} and layer, p99 {}",
            union.mean,
            counted(all.stats.rows.into(), "row"),
            union.p99
        ));
        if let Some(wasted) = all.stats.wasted_mean {
            facts.push(format!("**{wasted:.2}** of them wasted on rejected rows"));
        }
        facts.push(format!("worst layer **{}**", all.worst_layer));
    }
    for fact in &facts {
        out.push_str(&format!("- {fact}\n"));
    }
    out.push('\n');
    for table in tables::all(report) {
        out.push_str(&format!("## {}\n\n{}", table.title, markdown(&table.columns)));
    }
    if explain {
        let column = |title: &str, of: &dyn Fn(&Metric) -> String| {
            let cells: Vec<String> = METRICS.iter().map(of).collect();
            Column::new(title).left().words(title, cells.clone()).cells(cells)
        };
        let columns = [
            column("number", &|m| m.id.to_owned()),
            column("unit", &|m| m.unit.name().to_owned()),
            column("meaning", &|m| m.meaning.to_owned()),
            column("formula", &|m| m.formula.to_owned()),
        ];
        out.push_str(&format!("## What each number means\n\n{}", markdown(&columns)));
    }
    out.trim_end().to_owned() + "\n"
}

/// One table of the report as CSV; `None` when the report has no rows for it.
pub fn table_csv(report: &Report, name: &str) -> Option<String> {
    tables::all(report).into_iter().find(|t| t.name == name).map(|t| csv(&t.columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::text::tests::report;

    #[test]
    fn markdown_of_every_table() {
        insta::assert_snapshot!(render(&report(), false));
    }

    #[test]
    fn numbers_are_explained_where_asked_for() {
        let (plain, explained) = (render(&report(), false), render(&report(), true));
        let table = explained.strip_prefix(plain.trim_end()).unwrap();
        assert!(METRICS.iter().all(|m| table.contains(&escape_markdown(m.id))), "{table}");
    }

    #[test]
    fn csv_of_layers_and_requests() {
        let csv = |name| table_csv(&report(), name).unwrap();
        insta::assert_snapshot!(format!("{}\n{}\n{}", csv("layers"), csv("acceptance"), csv("requests")));
        // Times were not recorded: there is no attribution.
        assert_eq!(table_csv(&report(), "attribution"), None);
        let names: Vec<_> = tables::all(&report()).iter().map(|t| t.name).collect();
        assert_eq!(names, ["layers", "acceptance", "requests", "draft_lengths", "warnings"]);
    }
}
