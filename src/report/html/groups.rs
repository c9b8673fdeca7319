//! The figures of what was asked for beyond the usual report: groups of steps, and the ranks of an expert-parallel machine.

use super::figure::{Figure, Section};
use crate::metric::groups::GroupReport;
use crate::metric::parallel::{ExpertParallel, ParallelStats};
use crate::metric::report::Report;
use crate::report::svg::{self, Frame, Line, short};
use crate::report::words::counted;
use crate::report::wrap::plain;

/// Bars of one picture at most; the table has the other groups.
const BARS: usize = 40;
/// Characters of a group's name under its bar.
const NAME: usize = 14;

/// The sections of groups and of ranks, where they were asked for.
pub fn sections(report: &Report) -> Vec<Section> {
    let groups = report.groups.as_ref().filter(|g| !g.groups.is_empty()).map(|g| {
        let of = plain(&g.by);
        Section {
            id: "by-group",
            title: "Groups compared",
            intro: format!("The windows by {of}: how many tokens a step of each group brings, and how many experts it touches."),
            figures: vec![tokens(&g.groups), unions(&g.groups)],
        }
    });
    let ranks = report.expert_parallel.as_ref().map(|p| Section {
        id: "by-rank",
        title: "Ranks compared",
        intro: format!("The windows over {} ranks, {}. The busiest rank sets the time of a layer.", p.ranks, plain(&p.placement)),
        figures: vec![busiest(p), imbalance(p)],
    });
    groups.into_iter().chain(ranks).collect()
}

fn name(group: &GroupReport) -> String {
    let name = plain(group.name.as_deref().unwrap_or(&group.key));
    if name.chars().count() > NAME { name.chars().take(NAME - 3).chain("...".chars()).collect() } else { name }
}

/// Bars of the groups of which the number is known.
fn bars(
    id: &'static str,
    title: &str,
    y: &str,
    groups: &[GroupReport],
    of: impl Fn(&GroupReport) -> Option<f64>,
) -> (Figure, Vec<(String, f64)>) {
    let known: Vec<(String, f64)> = groups.iter().filter_map(|g| Some((name(g), of(g).filter(|v| v.is_finite())?))).collect();
    let shown = &known[..known.len().min(BARS)];
    let picture = svg::bars(Frame { label: title, x: "group", y }, shown, short);
    (Figure::new(id, title, picture, "Not known: no group has windows of which this is known."), known)
}

/// How many groups are shown and over what.
fn of_groups(shown: usize, groups: &[GroupReport]) -> String {
    let steps: u64 = groups.iter().map(|g| g.verify_steps).fold(0, u64::saturating_add);
    let cut = if shown > BARS { format!(", the first {BARS} shown") } else { String::new() };
    format!("n = {}{cut}, {}", counted(shown as u64, "group"), counted(steps, "verify step"))
}

fn ends(known: &[(String, f64)], what: &str) -> String {
    let least = known.iter().reduce(|a, b| if b.1 < a.1 { b } else { a });
    let most = known.iter().reduce(|a, b| if b.1 > a.1 { b } else { a });
    match (least, most) {
        (Some(least), Some(most)) if least.1 < most.1 => {
            format!("From {} {what} ({}) to {} ({}).", short(least.1), least.0, short(most.1), most.0)
        }
        (Some(one), _) => format!("{} {what} in every group.", short(one.1)),
        _ => String::new(),
    }
}

fn tokens(groups: &[GroupReport]) -> Figure {
    let (figure, known) =
        bars("group-tokens", "Tokens per step, by group", "tokens per step", groups, |g| g.acceptance.as_ref()?.tokens_per_step);
    figure.says(ends(&known, "tokens a step"), of_groups(known.len(), groups), "tokens that a verify step brings")
}

fn unions(groups: &[GroupReport]) -> Figure {
    let (figure, known) = bars("group-unions", "Union, by group", "distinct experts", groups, |g| g.union_mean);
    figure.says(ends(&known, "experts a window"), of_groups(known.len(), groups), "experts of a window, mean over layers")
}

/// A number of the layers under a placement.
fn by_layer<'a>(p: &ExpertParallel, balanced: bool, color: &'a str, dashed: bool, of: fn(&ParallelStats) -> f64) -> Line<'a> {
    let stats = |l: &crate::metric::parallel::ParallelLayer| if balanced { l.balanced } else { l.stats };
    let points = p.layers.iter().filter_map(|l| Some((f64::from(l.layer), of(&stats(l)?)))).filter(|p| p.1.is_finite());
    Line { points: points.collect(), color, dashed, interval: None }
}

const NO_RANKS: &str = "Not known: the trace has no routed verify windows.";

fn of_layers(p: &ExpertParallel) -> String {
    let windows = p.overall.map_or(0, |o| o.windows);
    format!("n = {} of {} rows, each layer counted", counted(windows, "window"), p.rows)
}

fn busiest(p: &ExpertParallel) -> Figure {
    let (id, title) = ("rank-busiest", "Experts on the busiest rank, by layer");
    let lines = [
        by_layer(p, false, "--s1", false, |s| s.busiest_mean),
        by_layer(p, true, "--s3", false, |s| s.busiest_mean),
        by_layer(p, false, "--s2", true, |s| s.busiest_floor_mean),
    ];
    let picture = svg::curves(Frame { label: title, x: "layer", y: "distinct experts" }, &[], &lines, true);
    let reading = p.overall.map_or_else(String::new, |o| {
        let balanced = p.balanced.map_or_else(String::new, |b| format!("; balanced by the loads, {}", short(b.stats.busiest_mean)));
        format!(
            "In the mean the busiest of {} ranks has {} of a window's {} experts{balanced}; evenly spread it would be {}.",
            p.ranks,
            short(o.busiest_mean),
            short(o.union_mean),
            short(o.busiest_floor_mean)
        )
    });
    Figure::new(id, title, picture, NO_RANKS).says(reading, of_layers(p), "experts, mean over windows").legend([
        ("line", "--s1", "this placement".to_owned()),
        ("line", "--s3", "balanced by the loads".to_owned()),
        ("dashed", "--s2", "evenly spread, the least there can be".to_owned()),
    ])
}

fn imbalance(p: &ExpertParallel) -> Figure {
    let (id, title) = ("rank-imbalance", "Imbalance of the ranks, by layer");
    let lines = [by_layer(p, false, "--s1", false, |s| s.imbalance_mean), by_layer(p, false, "--s2", true, |s| s.imbalance_p99)];
    let picture = svg::curves(Frame { label: title, x: "layer", y: "busiest over even" }, &[], &lines, true);
    let reading = p.overall.map_or_else(String::new, |o| {
        format!(
            "A layer takes {} times as long as evenly spread experts would, one window in a hundred {} times.",
            short(o.imbalance_mean),
            short(o.imbalance_p99)
        )
    });
    Figure::new(id, title, picture, NO_RANKS)
        .says(reading, of_layers(p), "busiest rank over an even share; 1 is even")
        .legend([("line", "--s1", "mean".to_owned()), ("dashed", "--s2", "99th percentile".to_owned())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::parallel::placement::Choice;
    use crate::analysis::tests::memory::Memory;
    use crate::analysis::{GroupBy, Parallel, Wanted};

    fn report() -> Report {
        let mut trace = Memory::new(&[1, 2], 8, 2);
        for request in 0..3u16 {
            let window = vec![vec![request, request + 1], vec![request + 1, (request + 3) % 8]];
            trace.verify(u32::from(request), request % 2, &[window.clone(), window]);
        }
        let parallel = Some(Parallel { ranks: 2, placement: Choice::Contiguous });
        trace.try_report_of(&Wanted { by: Some(GroupBy::Request), parallel, ..Wanted::default() }).unwrap()
    }

    #[test]
    fn groups_and_ranks_have_their_pictures() {
        let mut report = report();
        let found = sections(&report);
        let figures: Vec<(&str, bool)> = found.iter().flat_map(|s| &s.figures).map(|f| (f.id, f.svg.is_some())).collect();
        assert_eq!(figures, [("group-tokens", true), ("group-unions", true), ("rank-busiest", true), ("rank-imbalance", true)]);
        assert_eq!(found[0].figures[0].reading, "From 1 tokens a step (0) to 2 (1).");
        assert!(found[1].figures[0].reading.starts_with("In the mean the busiest of 2 ranks has "), "{}", found[1].figures[0].reading);
        // Names are cut and cannot be markup; of many groups the first are drawn.
        let groups = report.groups.as_mut().unwrap();
        groups.groups[0].name = Some("<script>alert(1)</script>".into());
        let one = groups.groups[0].clone();
        groups.groups.resize(100, one);
        let found = sections(&report);
        let picture = found[0].figures[1].svg.as_ref().unwrap();
        assert!(!picture.contains("<script") && found[0].figures[1].n.starts_with("n = 100 groups, the first 40 shown"));
        (report.groups, report.expert_parallel) = (None, None);
        assert!(sections(&report).is_empty());
    }
}
