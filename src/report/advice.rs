//! The advice for people: plain sentences first, tables after, then what it takes for granted.

mod tables;

use super::cost;
use super::json::pretty;
use super::text::{TextOptions, header};
use super::wrap::{paragraph, plain, titled};
use crate::metric::advice::{Advice, Best, Confidence, CostSource, GroupAdvice};
use crate::metric::{Interval, Report};
use serde::Serialize;

/// Groups in a table when not all are asked for.
const FEW: usize = 8;

/// The value of `schema` of the advice as JSON.
pub const SCHEMA: &str = "specprof.advice/1";

/// The advice of a report as JSON: `schema`, `run`, `advice` and `warnings`, ending in a newline.
///
/// # Errors
/// Never for a report made by `analysis`; a value that JSON cannot hold otherwise.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Document<'a> {
        schema: &'a str,
        run: &'a crate::metric::report::RunFacts,
        advice: &'a Option<Advice>,
        warnings: &'a [crate::trace::manifest::Warning],
    }
    let document = Document { schema: SCHEMA, run: &report.run, advice: &report.advice, warnings: &report.warnings };
    pretty(&document)
}

/// The advice of a report as text; it says so when there is none.
pub fn render(report: &Report, options: &TextOptions) -> String {
    let mut out = header(report, options);
    out.push('\n');
    match &report.advice {
        None => {
            let why = report.warnings.iter().find(|w| w.code == "no_advice");
            let text = why.map_or_else(|| "unknown".to_owned(), |w| format!("unknown: {}", plain(&w.message)));
            out.push_str(&titled("advice", &text, options.width, options.color));
        }
        Some(advice) => {
            let (gamma, noisy) = (report.run.drafter.draft_len, cost::is_noisy(report));
            let measured = advice.cost_source == Some(CostSource::Measured);
            let median = report.cost.as_ref().and_then(|c| c.speedup_median).filter(|_| noisy && measured);
            let (ended_by, undecided) = (ended_by(&report.run.drafter.kind), is_undecided(report));
            let view = View { advice, options, gamma, noisy, undecided, median, drafted: cost::drafted(report), ended_by };
            out.push_str(&view.sentences());
            out.push('\n');
            out.push_str(&view.lengths());
            out.push_str(&view.groups("tag", &advice.by_tag));
            out.push_str(&view.groups("request", &advice.by_request));
            out.push_str(&view.thresholds());
            out.push_str(&view.budgets());
            out.push('\n');
            for (i, assumption) in advice.assumptions.iter().enumerate() {
                out.push_str(&titled(if i == 0 { "assumed" } else { "" }, &plain(assumption), options.width, options.color));
            }
        }
    }
    for (i, warning) in report.warnings.iter().enumerate() {
        let text = format!("{}: {}", plain(&warning.code), plain(&warning.message));
        out.push_str(if i == 0 { "\n" } else { "" });
        out.push_str(&paragraph(&format!("[{}] ", i + 1), &text, options.width));
    }
    out
}

/// Whether the times are so noisy that no advice is given by them: a few steps decide the measured times, and
///
/// * the speedup of the best draft length (of the recorded one, where that is plain decoding) is not told apart from 1,
/// * or it is the best in less than half of the resamples,
/// * or by medians the recorded length is on the other side of 1.
///
/// A best of 3 drafts at 1.57 (0.30 to 3.16) in 20 % of resamples, 0.43 by medians: all three.
pub(in crate::report) fn is_undecided(report: &Report) -> bool {
    let Some(a) = report.advice.as_ref().filter(|a| a.cost_source == Some(CostSource::Measured) && cost::is_noisy(report)) else {
        return false;
    };
    let at = |n: Option<u16>| a.by_draft_len.iter().find(|p| Some(p.draft_len) == n);
    let Some(best) = at(a.best_draft_len) else { return false };
    let judged = if best.draft_len == 0 { a.by_draft_len.last() } else { Some(best) };
    judged.is_some_and(|p| cost::holds_one(p.ci95))
        || best.best_share.is_some_and(|share| share < 0.5)
        || report.cost.as_ref().is_some_and(cost::sides_differ)
}

struct View<'a> {
    advice: &'a Advice,
    options: &'a TextOptions,
    /// The run's draft length.
    gamma: Option<u16>,
    /// Whether the report warns of noisy times.
    noisy: bool,
    /// Whether they are too noisy for an advice.
    undecided: bool,
    /// The recorded length's speedup by medians, where times are noisy.
    median: Option<f64>,
    /// Of how many of the steps it is, where some had no drafts.
    drafted: Option<String>,
    /// Whether such windows can be recorded.
    ended_by: &'static str,
}

/// Which drafters' windows end by confidence in a recording, behind what that would be worth.
fn ended_by(drafter: &str) -> &'static str {
    match drafter {
        "dspark" => " (record --draft-confidence)",
        "mtp" => {
            "; by the recorded probabilities of mtp, whose windows cannot be recorded so here: --draft-confidence ends those of dspark alone"
        }
        _ => "; by the recorded probabilities, and not to be tried here: --draft-confidence ends windows of dspark alone",
    }
}

fn drafts(n: u16) -> String {
    match n {
        0 => "no drafts".to_owned(),
        1 => "1 draft".to_owned(),
        n => format!("{n} drafts"),
    }
}

fn range(interval: Option<Interval>) -> String {
    interval.map_or_else(String::new, |[low, high]| format!(" (95 %: {low:.2} to {high:.2})"))
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{v:.2}"))
}

impl View<'_> {
    fn lines(&self, title: &str, text: &str) -> String {
        titled(title, text, self.options.width, self.options.color)
    }

    fn sentences(&self) -> String {
        let a = self.advice;
        let recorded = a.by_draft_len.last();
        let mut out = String::new();
        let Some(best) = a.best_draft_len.and_then(|n| a.by_draft_len.iter().find(|p| p.draft_len == n)) else {
            let tokens = recorded.map_or_else(String::new, |p| format!("{:.2} tokens per step", p.tokens_per_step));
            let why = a.unknown_because.as_ref().map_or_else(String::new, |why| format!(": {}", plain(why)));
            let text = format!("what a step costs is unknown, so is the best draft length{why}");
            let recorded = format!("recorded with {}: {tokens}", self.recorded_windows());
            return self.lines("advice", &text) + &self.lines("", &recorded);
        };
        let source = match (a.cost_source, &a.measured_unused_because) {
            (Some(CostSource::Measured), _) if self.noisy => "by measured step times, which are noisy (noisy_times below)".to_owned(),
            (Some(CostSource::Measured), _) => "by measured step times".to_owned(),
            (Some(CostSource::Calibrated), _) => "by a calibrated table of costs".to_owned(),
            (_, Some(why)) => format!("by the model of bytes, not by measured times ({})", plain(why)),
            (_, None) => "by the model of bytes, not by measured times".to_owned(),
        };
        let of_known = if a.other_lengths_unknown_because.is_some() { "the recorded draft length is not" } else { "no draft length is" };
        let first = if self.undecided {
            let share = best.best_share.map_or_else(String::new, |s| format!(", the best in {:.0} % of resamples", s * 100.0));
            let by_means = match best.draft_len {
                0 => format!("by means no drafts would be best{share}"),
                n => format!("by means {} would be best, {}{}{share}", drafts(n), number(best.speedup), range(best.ci95)),
            };
            let by_medians = self.median.map_or_else(String::new, |m| format!("; by medians {m:.2} with {}", self.recorded_windows()));
            format!("no advice from these times, a few steps decide their means (noisy_times below): {by_means}{by_medians}")
        } else if best.draft_len == 0 {
            format!("do not speculate: {of_known} faster than plain decoding, {source}")
        } else {
            let doubt = if best.ci95.is_some_and(|[low, _]| low <= 1.0) { "; not told apart from plain decoding" } else { "" };
            format!(
                "use {}: {:.2} times plain decoding{}, {source}{doubt}",
                drafts(best.draft_len),
                best.speedup.unwrap_or(f64::NAN),
                range(best.ci95)
            )
        };
        out.push_str(&self.lines("advice", &first));
        if let Some(drafted) = &self.drafted {
            out.push_str(&self.lines("", drafted));
        }
        if a.by_draft_len.iter().any(|p| p.ci95.is_some()) {
            let what = match (a.resamples_left_out, a.cost_source) {
                (Some(_), Some(CostSource::Calibrated)) => "over requests, with the table's own intervals",
                (Some(_), _) => "over requests, with the times of their steps",
                (None, Some(CostSource::Model)) => "of acceptance and unions alone: bytes have no uncertainty",
                (None, _) => "of acceptance and unions alone: step costs are taken as exact",
            };
            out.push_str(&self.lines("", &format!("intervals are {what}")));
        }
        if let Some(why) = &a.other_lengths_unknown_because {
            let text = format!("what other draft lengths would bring is not told by measured times ({})", plain(why));
            out.push_str(&self.lines("", &text));
        }
        if let Some(share) = best.best_share.filter(|_| a.requests > 1 && !self.undecided) {
            out.push_str(&self.lines("", &format!("the best in {:.0} % of resamples of the {} requests", share * 100.0, a.requests)));
        }
        if let Some(at) = recorded.filter(|at| at.draft_len != best.draft_len) {
            let by_medians = self.median.map_or_else(String::new, |median| format!(", {median:.2} by medians"));
            let (speedup, range) = (at.speedup.unwrap_or(f64::NAN), range(at.ci95));
            let text = format!("recorded with {}: {speedup:.2}{range}{by_medians}", self.recorded_windows());
            out.push_str(&self.lines("", &text));
        } else if a.steps_left_out > 0 {
            out.push_str(&self.lines("", &format!("judged by {}", self.recorded_windows())));
        } else if best.draft_len > 0 && !self.undecided {
            out.push_str(&self.lines("", "the longest that was recorded; longer ones may be better still"));
        }
        if let Some(ratio) = best.step_ratio.filter(|_| best.draft_len > 0 && !self.undecided) {
            let text = format!(
                "{:.2} tokens per step for the cost of {ratio:.2} decode steps, which is where it breaks even; union {:.2}",
                best.tokens_per_step, best.union_mean
            );
            out.push_str(&self.lines("", &text));
        }
        out.push_str(&self.lines("loses", &self.losing()));
        if let Some(what_if) = a.what_if.as_ref().filter(|_| !self.undecided) {
            let of = |b: &Best| format!("{:.2} with {}", b.speedup, drafts(b.draft_len));
            let text = format!(
                "a perfect drafter {}; rows that all agree {}; both {}; drafts for free {} (now {})",
                of(&what_if.perfect_drafter),
                of(&what_if.perfect_overlap),
                of(&what_if.both),
                of(&what_if.free_drafting),
                of(&what_if.as_recorded)
            );
            out.push_str(&self.lines("worth", &text));
        }
        // None that is worse than the advice itself, or than plain decoding.
        let least = best.speedup.unwrap_or(1.0).max(1.0);
        let whole = |point: &Confidence| a.confidence.iter().flatten().next().is_some_and(|first| first.threshold == point.threshold);
        let is_worth_it = |point: &&Confidence| whole(point) || point.speedup.is_some_and(|s| s > least);
        if let Some(point) = self.best_threshold().filter(|point| !self.undecided && is_worth_it(point)) {
            let text = if whole(point) {
                "ending windows early, where the drafter is not sure, does not pay: no threshold beats whole windows".to_owned()
            } else {
                format!(
                    "ending windows before drafts below {:.2}: {:.2}{} with {:.2} drafts a step{}",
                    point.threshold,
                    point.speedup.unwrap_or(f64::NAN),
                    range(point.ci95),
                    point.drafts_mean,
                    self.ended_by
                )
            };
            out.push_str(&self.lines("confidence", &text));
        }
        out
    }

    /// Which windows the advice is of: of a run whose windows differ, those of one length only.
    fn recorded_windows(&self) -> String {
        let a = self.advice;
        let (length, all) = (a.recorded_draft_len, a.steps + a.steps_left_out);
        if a.steps_left_out == 0 && self.gamma.is_none_or(|gamma| gamma == length) {
            return drafts(length);
        }
        format!("windows of {} rows, the most frequent ({} of {all})", u32::from(length) + 1, a.steps)
    }

    fn best_threshold(&self) -> Option<&Confidence> {
        let known = self.advice.confidence.iter().flatten().filter(|p| p.speedup.is_some());
        known.reduce(|best, next| if next.speedup > best.speedup { next } else { best })
    }

    /// Where the recorded draft length is slower than plain decoding.
    fn losing(&self) -> String {
        let a = self.advice;
        if self.undecided {
            return "not told by such noisy times".to_owned();
        }
        // What shows as 1.00 is not listed as a loss.
        let below = |group: &&GroupAdvice| group.speedup.is_some_and(|s| (s * 100.0).round() < 100.0);
        let name = |group: &GroupAdvice| format!("{} ({})", plain(&group.key), number(group.speedup));
        let tags: Vec<String> = a.by_tag.iter().filter(below).map(name).take(FEW).collect();
        let requests: Vec<String> = a.by_request.iter().filter(below).map(name).collect();
        let with = match self.gamma {
            Some(gamma) if gamma != a.recorded_draft_len => format!("windows of {} rows", u32::from(a.recorded_draft_len) + 1),
            _ => drafts(a.recorded_draft_len),
        };
        let mut text = match requests.len() {
            0 => {
                let open = a.by_request.iter().filter(|r| cost::holds_one(r.ci95)).count();
                match open {
                    0 => format!("nowhere: with {with} no request is slower than by plain decoding"),
                    n => format!(
                        "not told: with {with} no request is slower on average, but {n} of {} intervals reach 1",
                        a.by_request.len()
                    ),
                }
            }
            n => {
                let some = requests.iter().take(FEW).cloned().collect::<Vec<_>>().join(", ");
                let more = if n > FEW { ", ..." } else { "" };
                format!("with {with} in {n} of {} requests: {some}{more}", a.by_request.len())
            }
        };
        if !tags.is_empty() {
            text.push_str(&format!("; by tag {}", tags.join(", ")));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;

    /// Three requests of four experts a row, whose rows agree ever less; a code tag that accepts more.
    fn report() -> Report {
        let mut trace = Memory::new(&[1, 2], 64, 4);
        trace.manifest.model.bytes_other_per_step = Some(40 * 12288);
        trace.manifest.drafter.bytes_per_draft = Some(3 * 12288);
        for request in 0..3u16 {
            for step in 0..40u16 {
                let row = |i: u16| (0..4).map(|e| (step * 3 + request + e * 16 + i * (request + 1) / 2) % 64).collect();
                let accepted = [(step + 2) % 4, (step % 4) / 2, 0][usize::from(request)];
                trace.verify(u32::from(request), accepted, &[(0..4).map(row).collect(), (0..4).map(row).collect()]);
                trace.draft_probs.push(Some((1..4).map(|i| 0.9 - f32::from(i * (step % 4)) * 0.0625).collect()));
            }
            trace.requests.push(crate::trace::RequestEvent {
                request_id: u32::from(request),
                id: String::new(),
                prompt_tokens: 1,
                generated_tokens: 1,
                finish_reason: crate::trace::FinishReason::Length,
                tags: format!("{{\"kind\": \"{}\"}}", if request < 2 { "code" } else { "chat\\u001b[31m" }),
                prompt_text: None,
                output_text: None,
            });
        }
        trace.report()
    }

    #[test]
    fn sentences_come_before_tables() {
        insta::assert_snapshot!(render(&report(), &TextOptions::default()));
    }

    #[test]
    fn nothing_is_wider_than_the_terminal_or_escapes() {
        for width in [60, 80, 100, 160] {
            let text = render(&report(), &TextOptions { width, ..TextOptions::default() });
            for line in text.lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
                assert!(!line.chars().any(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn json_has_the_contract_and_comes_back() {
        let value: serde_json::Value = serde_json::from_str(&json(&report()).unwrap()).unwrap();
        assert_eq!(value["schema"], SCHEMA);
        let advice: Advice = serde_json::from_value(value["advice"].clone()).unwrap();
        assert_eq!(serde_json::to_value(&advice).unwrap(), value["advice"]);
        assert_eq!(advice.by_draft_len.len(), 4);
    }

    #[test]
    fn sentences_say_which_windows_and_whose_costs() {
        let mut report = report();
        let mut advice = report.advice.clone().unwrap();
        advice.measured_unused_because = Some("the fitted time per distinct expert is not above 0".into());
        advice.steps_left_out = advice.steps;
        advice.by_request[0].speedup = Some(0.998);
        let shown = |report: &mut Report, advice: &Advice| {
            report.advice = Some(advice.clone());
            // Unfolded: sentences are looked for, not lines.
            let text = render(report, &TextOptions { width: 400, ..TextOptions::default() });
            assert!(!text.contains("(1.00)"), "{text}");
            text
        };
        report.run.drafter.draft_len = Some(5);
        let text = shown(&mut report, &advice);
        assert!(text.contains("not by measured times (the fitted time per distinct expert is not above 0)"), "{text}");
        assert!(text.contains("windows of 4 rows, the most frequent (120 of 240)") && !text.contains("recorded with 3 drafts"), "{text}");
        assert!(text.contains("unions alone: bytes have no uncertainty"), "{text}");
        advice.cost_source = Some(CostSource::Measured);
        assert!(shown(&mut report, &advice).contains("step costs are taken as exact"));
        advice.resamples_left_out = Some(0);
        assert!(shown(&mut report, &advice).contains("intervals are over requests, with the times of their steps"));
        // Noisy, but the best length is told from plain decoding, and no other is the best as often.
        advice.by_draft_len[1].ci95 = Some([1.05, 1.65]);
        report.warnings.push(crate::trace::manifest::Warning::new("noisy_times", "decode steps take long"));
        let text = shown(&mut report, &advice);
        assert!(
            text.contains("by measured step times, which are noisy (noisy_times below)") && text.contains("] noisy_times: decode"),
            "{text}"
        );
        advice.steps_left_out = 0;
        report.run.drafter.draft_len = Some(3);
        report.run.drafter.kind = "mtp".into();
        let text = shown(&mut report, &advice);
        assert!(!text.contains("the most frequent") && !text.contains("had drafts"), "{text}");
        report.run.drafter.kind = "ngram".into();
        report.totals.decode_steps = 360;
        assert!(shown(&mut report, &advice).contains("it holds for the 120 of 480 steps that had drafts (25 %)"));
    }

    /// Three drafts at 1.57 (0.30 to 3.16), the best in 20 % of resamples of noisy times; 0.43 by medians.
    #[test]
    fn noisy_times_give_no_advice() {
        let mut report = report();
        report.warnings.push(crate::trace::manifest::Warning::new("noisy_times", "a step of 16 ms"));
        let mut advice = report.advice.clone().unwrap();
        (advice.cost_source, advice.best_draft_len) = (Some(CostSource::Measured), Some(3));
        let last = advice.by_draft_len.last_mut().unwrap();
        (last.speedup, last.ci95, last.best_share) = (Some(1.57), Some([0.3, 3.16]), Some(0.2));
        (report.advice, report.cost) = (Some(advice), Some(crate::metric::cost::StepCost::default()));
        let cost = report.cost.as_mut().unwrap();
        (cost.speedup, cost.speedup_median) = (Some(1.57), Some(0.43));
        let shown = |report: &Report| render(report, &TextOptions { width: 400, ..TextOptions::default() });
        let text = shown(&report);
        assert!(
            text.contains("advice      no advice from these times, a few steps decide their means (noisy_times below): by means 3 drafts"),
            "{text}"
        );
        assert!(text.contains("1.57 (95 %: 0.30 to 3.16), the best in 20 % of resamples; by medians 0.43 with 3 drafts"), "{text}");
        assert!(text.contains("loses       not told by such noisy times") && !text.contains("use 3") && !text.contains("*3"), "{text}");
        // Each of the three is enough, and none of them is an advice.
        let with = |ci95, share, median| {
            let mut report = report.clone();
            let last = report.advice.as_mut().unwrap().by_draft_len.last_mut().unwrap();
            (last.ci95, last.best_share) = (Some(ci95), Some(share));
            report.cost.as_mut().unwrap().speedup_median = Some(median);
            is_undecided(&report)
        };
        assert!(with([0.9, 1.9], 0.9, 1.5) && with([1.2, 1.9], 0.4, 1.5) && with([1.2, 1.9], 0.9, 0.9));
        assert!(!with([1.2, 1.9], 0.9, 1.5));
        // Quiet times are advice.
        report.warnings.clear();
        assert!(!is_undecided(&report) && shown(&report).contains("use 3 drafts: 1.57"));
    }

    #[test]
    fn what_is_measured_at_one_length_says_nothing_of_others() {
        let mut report = report();
        let advice = report.advice.as_mut().unwrap();
        (advice.cost_source, advice.best_draft_len) = (Some(CostSource::Measured), Some(0));
        advice.other_lengths_unknown_because = Some("the fitted time per distinct expert is not above 0".into());
        for request in &mut advice.by_request {
            (request.speedup, request.ci95) = (Some(1.1), Some([0.9, 1.3]));
        }
        advice.by_tag.clear();
        let text = render(&report, &TextOptions { width: 400, ..TextOptions::default() });
        assert!(text.contains("do not speculate: the recorded draft length is not faster than plain decoding, by measured"), "{text}");
        assert!(text.contains("other draft lengths would bring is not told by measured times (the fitted time"), "{text}");
        assert!(text.contains("not told: with 3 drafts no request is slower on average, but 3 of 3 intervals reach 1"), "{text}");
    }

    #[test]
    fn confidence_is_advised_where_it_helps_and_says_who_can() {
        let mut report = report();
        let advice = report.advice.clone().unwrap();
        let best = advice.by_draft_len.iter().find(|p| Some(p.draft_len) == advice.best_draft_len).unwrap().speedup.unwrap();
        let mut shown = |drafter: &str, speedup: f64| {
            let mut points = advice.confidence.clone().unwrap();
            points.iter_mut().skip(1).for_each(|p| p.speedup = Some(0.5));
            points[3].speedup = Some(speedup);
            points[0].speedup = Some(0.4);
            report.run.drafter.kind = drafter.into();
            report.advice = Some(Advice { confidence: Some(points), ..advice.clone() });
            render(&report, &TextOptions { width: 400, ..TextOptions::default() })
        };
        let text = shown("mtp", best * 1.5);
        assert!(text.contains("recorded probabilities of mtp") && text.contains("those of dspark alone"), "{text}");
        assert!(shown("dspark", best * 1.5).contains("(record --draft-confidence)"));
        // What is worse than the advice is none.
        assert!(!shown("mtp", best * 0.99).contains("ending windows before"));
    }

    #[test]
    fn unknown_costs_are_said() {
        let mut trace = Memory::new(&[1], 8, 2);
        trace.verify(0, 1, &[vec![vec![0, 1], vec![2, 3]]]);
        let text = render(&trace.report(), &TextOptions::default());
        assert!(text.contains("what a step costs is unknown") && text.contains("no_step_cost"), "{text}");
        assert!(text.contains("lacks") && text.contains("bytes_other_per_step"), "{text}");
        let none = render(&Memory::new(&[1], 8, 2).report(), &TextOptions::default());
        assert!(none.contains("advice      unknown: a best draft length needs") && none.contains("no_advice"), "{none}");
    }
}
