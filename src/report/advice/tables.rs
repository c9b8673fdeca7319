//! The tables of an advice: draft lengths, groups, thresholds, budgets.

use super::{FEW, View, number};
use crate::metric::Interval;
use crate::metric::advice::{Budget, Confidence, DraftLength, GroupAdvice};
use crate::report::table::{self, Column};
use crate::report::wrap::plain;

fn span(interval: Option<Interval>) -> String {
    interval.map_or_else(|| "-".to_owned(), |[low, high]| format!("{low:.2}-{high:.2}"))
}

impl View<'_> {
    fn table(&self, columns: Vec<Column>, marked: Option<usize>) -> String {
        let bold = anstyle::Style::new().bold();
        let style = |row: usize, line: &str| {
            if self.options.color && Some(row) == marked { format!("{bold}{line}{bold:#}") } else { line.to_owned() }
        };
        table::render(columns, self.options.width, style)
    }

    pub(super) fn lengths(&self) -> String {
        let a = self.advice;
        let cells = |of: &dyn Fn(&DraftLength) -> String| a.by_draft_len.iter().map(of).collect::<Vec<_>>();
        let best = |n: u16| if Some(n) == a.best_draft_len && !self.undecided { "*" } else { "" };
        let columns = vec![
            Column::new("drafts").cells(cells(&|p| format!("{}{}", best(p.draft_len), p.draft_len))),
            Column::new("tokens/step").cells(cells(&|p| format!("{:.3}", p.tokens_per_step))),
            Column::new("95 %").optional(1).cells(cells(&|p| span(p.tokens_per_step_ci95))),
            Column::new("union").cells(cells(&|p| format!("{:.2}", p.union_mean))),
            Column::new("95 %").optional(0).cells(cells(&|p| span(p.union_ci95))),
            Column::new("step ratio").cells(cells(&|p| number(p.step_ratio))),
            Column::new("95 %").optional(2).cells(cells(&|p| span(p.step_ratio_ci95))),
            Column::new("speedup").cells(cells(&|p| number(p.speedup))),
            Column::new("95 %").optional(5).cells(cells(&|p| span(p.ci95))),
            Column::new("last draft").optional(4).cells(cells(&|p| number(p.marginal_utility))),
            Column::new("best")
                .optional(3)
                .cells(cells(&|p| p.best_share.map_or_else(|| "-".to_owned(), |s| format!("{:.0} %", s * 100.0)))),
        ];
        let marked = a.by_draft_len.iter().position(|p| Some(p.draft_len) == a.best_draft_len && !self.undecided);
        self.table(columns, marked)
    }

    pub(super) fn groups(&self, title: &str, groups: &[GroupAdvice]) -> String {
        if groups.is_empty() || (groups.len() == 1 && title == "request") {
            return String::new();
        }
        // The slowest first when only a few are shown.
        let mut shown: Vec<&GroupAdvice> = groups.iter().collect();
        if !self.options.per_layer && groups.len() > FEW {
            shown.sort_by(|a, b| a.speedup.unwrap_or(f64::INFINITY).total_cmp(&b.speedup.unwrap_or(f64::INFINITY)));
            shown.truncate(FEW);
        }
        let cells = |of: &dyn Fn(&GroupAdvice) -> String| shown.iter().map(|g| of(g)).collect::<Vec<_>>();
        let columns = vec![
            Column::new(title).left().cells(cells(&|g| plain(&g.key))),
            Column::new("requests").optional(1).cells(cells(&|g| g.requests.to_string())),
            Column::new("steps").optional(2).cells(cells(&|g| g.steps.to_string())),
            Column::new("tokens/step").cells(cells(&|g| format!("{:.3}", g.tokens_per_step))),
            Column::new("speedup").cells(cells(&|g| number(g.speedup))),
            Column::new("95 %").optional(0).cells(cells(&|g| span(g.ci95))),
            Column::new("best drafts").cells(cells(&|g| g.best_draft_len.map_or_else(|| "-".to_owned(), |n| n.to_string()))),
            Column::new("best speedup").optional(3).cells(cells(&|g| number(g.best_speedup))),
        ];
        let mut out = String::from("\n") + &self.table(columns, None);
        if shown.len() < groups.len() {
            out.push_str(&format!("the {} slowest of {} shown; all with --all\n", shown.len(), groups.len()));
        }
        out
    }

    pub(super) fn thresholds(&self) -> String {
        let Some(points) = &self.advice.confidence else { return String::new() };
        let cells = |of: &dyn Fn(&Confidence) -> String| points.iter().map(of).collect::<Vec<_>>();
        let best = self.best_threshold().map(|p| p.threshold);
        let columns = vec![
            Column::new("drafts above").cells(cells(&|p| format!("{:.2}", p.threshold))),
            Column::new("drafts").cells(cells(&|p| format!("{:.2}", p.drafts_mean))),
            Column::new("none left").optional(0).cells(cells(&|p| format!("{:.0} %", p.decode_share * 100.0))),
            Column::new("tokens/step").cells(cells(&|p| format!("{:.3}", p.tokens_per_step))),
            Column::new("union").optional(1).cells(cells(&|p| format!("{:.2}", p.union_mean))),
            Column::new("step ratio").cells(cells(&|p| number(p.step_ratio))),
            Column::new("speedup").cells(cells(&|p| number(p.speedup))),
            Column::new("95 %").optional(2).cells(cells(&|p| span(p.ci95))),
        ];
        String::from("\n") + &self.table(columns, points.iter().position(|p| Some(p.threshold) == best))
    }

    pub(super) fn budgets(&self) -> String {
        let Some(budgets) = self.advice.expert_budget.as_ref().filter(|b| !b.is_empty()) else { return String::new() };
        let cells = |of: &dyn Fn(&Budget) -> String| budgets.iter().map(of).collect::<Vec<_>>();
        let columns = vec![
            Column::new("experts at most").cells(cells(&|b| b.experts.to_string())),
            Column::new("gate mass kept").cells(cells(&|b| format!("{:.1} %", b.mass * 100.0))),
            Column::new("union").cells(cells(&|b| format!("{:.2}", b.union_mean))),
            Column::new("step ratio").cells(cells(&|b| number(b.step_ratio))),
            Column::new("speedup if acceptance stays").cells(cells(&|b| number(b.speedup))),
        ];
        String::from("\n") + &self.table(columns, None)
    }
}
