//! The cost block of the text report: a plain sentence, then where the difference between the steps comes from.

use super::table::{self, Column};
use super::text::range_of;
use super::wrap::paragraph;
use crate::metric::bounds::{FEW_DECODE_STEPS, NOISY_TIMES};
use crate::metric::cost::{ExpertCost, StepCost, TimeSource};
use crate::metric::{Interval, Report, Unit};

/// Whose times they are, in words.
fn whose(source: TimeSource) -> &'static str {
    match source {
        TimeSource::Cpu => "CPU wall times",
        TimeSource::Device => "device times",
        TimeSource::Host => "host times around the device's passes",
    }
}

fn time(us: f64) -> String {
    Unit::Microseconds.show(us)
}

/// Whether the report warns that a few steps decide its mean times.
pub(super) fn is_noisy(report: &Report) -> bool {
    report.warnings.iter().any(|warning| warning.code == NOISY_TIMES)
}

/// Whether speculation pays, as far as that can be told, with its interval.
fn verdict(cost: &StepCost, speedup: f64, noisy: bool) -> String {
    let (times, decodes) = (format!("{speedup:.2} times as fast"), cost.compared_decode_steps());
    if decodes < FEW_DECODE_STEPS {
        return format!("{decodes} decode steps are too few to tell whether speculation pays, {FEW_DECODE_STEPS} are needed; {times}");
    }
    let interval = range_of(cost.speedup_ci95);
    let unclear = holds_one(cost.speedup_ci95);
    let median = cost.speedup_median.filter(|_| noisy);
    // Where a few steps decide the mean, the median leads.
    let leading = |plain: &str| match median {
        Some(median) => format!("{median:.2} times as fast{plain} by medians, {speedup:.2} by means{interval}"),
        None => format!("{times}{plain}{interval}"),
    };
    if noisy && (unclear || sides_differ(cost)) {
        return format!("not told apart from plain decoding by such noisy times, {}", leading(""));
    }
    match speedup {
        _ if unclear => format!("not told apart from plain decoding, {}", leading("")),
        speedup if speedup >= 1.0 => format!("speculation pays, {}", leading(" as plain decoding")),
        _ => format!("speculation loses, {}", leading(" as plain decoding")),
    }
}

/// Whether an interval of a speedup leaves open if it is one.
pub(super) fn holds_one(interval: Option<Interval>) -> bool {
    interval.is_some_and(|[low, high]| low <= 1.0 && high >= 1.0)
}

/// Whether the mean times say that speculation pays and the medians that it does not, or the other way round.
pub(super) fn sides_differ(cost: &StepCost) -> bool {
    let pays = |speedup: f64| speedup >= 1.0;
    cost.speedup.zip(cost.speedup_median).is_some_and(|(mean, median)| pays(mean) != pays(median))
}

/// Which of the report's verify steps the cost is of, where it is not of all.
fn which(cost: &StepCost, rows: u16, report: &Report) -> Option<String> {
    let (steps, all) = (cost.timed_verify_steps(), report.totals.verify_steps);
    (steps < all).then(|| format!("over the {steps} of {all} verify steps of {rows} rows"))
}

/// Of a drafter that need not draft: how many of the steps had drafts, which is all that the cost is of. `None` for the drafters that
/// draft in every step, whose decode steps are those of the baseline.
pub(super) fn drafted(report: &Report) -> Option<String> {
    let always = matches!(report.run.drafter.kind.as_str(), "mtp" | "dspark" | "none");
    let (verify, decode) = (report.totals.verify_steps, report.totals.decode_steps);
    (!always && verify > 0 && decode > 0).then(|| {
        let share = verify as f64 / (verify + decode) as f64 * 100.0;
        format!(
            "it holds for the {verify} of {} steps that had drafts ({share:.0} %); {decode} decode steps, those of the baseline among them, \
             gain nothing",
            verify + decode
        )
    })
}

/// What a verify step costs, and whether it pays: one or two sentences. `None` when not even bytes say anything.
pub fn sentence(cost: &StepCost, rows: u16, report: &Report) -> Option<String> {
    let (Some(verify), Some(step), Some(source)) = (cost.verify_ratio, cost.step_ratio, cost.source) else {
        let model = cost.model.as_ref()?;
        return Some(format!(
            "not measured; by a model of weight bytes alone, a verify step of {rows} rows costs {:.2} decode steps, drafting not counted",
            model.verify_ratio
        ));
    };
    let noisy = is_noisy(report);
    let (verify_range, step_range) = (range_of(cost.verify_ratio_ci95), range_of(cost.step_ratio_ci95));
    let medians = cost.verify_ratio_median.zip(cost.step_ratio_median).filter(|_| noisy);
    let mut text = match medians {
        Some((verify_median, step_median)) => format!(
            "the times are noisy: verifying {rows} rows takes {verify_median:.2} times a decode pass by medians, {verify:.2} by means, which a \
             few steps decide{verify_range}; the whole step, with drafting and sampling, {step_median:.2} times by medians, {step:.2} by \
             means{step_range}"
        ),
        None => format!(
            "verifying {rows} rows takes {verify:.2} times a decode pass{verify_range}; the whole step, with drafting and sampling, {step:.2} \
             times{step_range}"
        ),
    };
    let (step, by) = medians.map_or((step, ""), |(_, step)| (step, " by medians"));
    if let (Some(tokens), Some(speedup)) = (cost.tokens_per_step, cost.speedup) {
        let verdict = verdict(cost, speedup, noisy);
        let which = which(cost, rows, report).map_or_else(String::new, |which| format!(", {which}"));
        text.push_str(&format!(". It breaks even at {step:.2} tokens per step{by} and has {tokens:.2}: {verdict}{which}"));
        if let Some((all, [tokens, step, speedup])) = cost.all_rows.and_then(|a| Some((a, [a.tokens_per_step?, a.step_ratio?, a.speedup?])))
        {
            let interval = range_of(all.speedup_ci95);
            let n = Unit::Count.show(all.verify_steps as f64);
            text.push_str(&format!(
                "; over all {n} verify steps, whatever their rows, {tokens:.2} tokens at {step:.2} decode steps, {speedup:.2} times as \
                 fast{interval}"
            ));
        }
        if let Some(drafted) = drafted(report) {
            text.push_str(&format!("; {drafted}"));
        }
    }
    text.push_str(&format!("; {}", whose(source)));
    Some(text)
}

/// What a distinct expert costs; `None` without times of experts.
pub fn experts(cost: &ExpertCost, copy_gb_per_s: Option<f64>) -> Option<String> {
    let Some(b) = cost.us_per_expert else {
        return cost.unknown_because.as_ref().map(|why| format!("cost per expert unknown: {why}"));
    };
    let between = |interval: Option<Interval>| {
        interval.map_or_else(String::new, |[low, high]| format!(" (95 %: {} to {})", signed(low), signed(high)))
    };
    let mut text = format!("{} per distinct expert{}", signed(b), between(cost.ci95));
    if let Some(c) = cost.us_per_row {
        text.push_str(&format!(", {} per row{}", signed(c), between(cost.us_per_row_ci95)));
    }
    if let (Some(a), Some(r2)) = (cost.intercept_us, cost.r2) {
        let (besides, points) = (between(cost.intercept_us_ci95), Unit::Count.show(cost.points as f64));
        text.push_str(&format!(", {} besides{besides}, R² {r2:.2} over {points} layer passes", signed(a)));
    }
    // A slope that may be 0, or of a line that the times do not follow, implies any bandwidth.
    if let Some(doubt) = cost.doubt() {
        text.push_str(&format!("; {doubt}"));
    } else if let Some(implied) = cost.implied_gb_per_s {
        let copy = copy_gb_per_s.map_or_else(String::new, |copy| format!("; a large copy here moves {copy:.1} GB/s"));
        text.push_str(&format!("; as if experts were read at {implied:.1} GB/s{copy}"));
    }
    Some(text)
}

fn signed(us: f64) -> String {
    if us < 0.0 { format!("-{}", time(-us)) } else { time(us) }
}

/// Bytes of experts, by unions.
pub fn bytes(cost: &StepCost) -> Option<String> {
    let bytes = cost.bytes?;
    let per_token = bytes.per_token.map_or_else(String::new, |b| format!(", {} a token", Unit::Bytes.show(b)));
    let wasted = bytes.wasted_per_window.map_or_else(String::new, |b| {
        format!("; {} of a window for rejected rows alone ({:.0} %)", Unit::Bytes.show(b), b / bytes.per_window * 100.0)
    });
    let plain = Unit::Bytes.show(bytes.per_decode_token);
    Some(format!(
        "experts loaded, by unions: {} a window{per_token}, {plain} a token by plain decoding{wasted}",
        Unit::Bytes.show(bytes.per_window)
    ))
}

/// Why shares of the difference between the steps say nothing, as a sentence; `None` where they do.
pub(super) fn shares_doubt(report: &Report) -> Option<&'static str> {
    let cost = report.cost.as_ref()?;
    if is_noisy(report) {
        return Some("the times are noisy: these are means, which a few steps decide, and shares of their difference are left out");
    }
    holds_one(cost.step_ratio_ci95).then_some("the whole steps' difference is not told apart from 0: shares of it are left out")
}

/// The attribution as a table, below it what it does not tell; empty without times of operations.
pub fn attribution(report: &Report, width: usize) -> String {
    let Some(cost) = report.cost.as_ref().filter(|c| !c.attribution.is_empty()) else { return String::new() };
    let show = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), signed);
    let doubt = shares_doubt(report);
    let percent = |share: Option<f64>| share.filter(|_| doubt.is_none()).map_or_else(|| "-".to_owned(), |s| format!("{:.0} %", s * 100.0));
    let total = cost.verify_step_us.zip(cost.decode_step_us).map(|(verify, decode)| verify - decode);
    let unattributed = cost.unattributed_us.zip(total.filter(|t| *t != 0.0)).map(|(u, t)| u / t);
    // The split is by the slope of experts.
    let slope_doubt = report.overall.as_ref().and_then(|o| o.cost.as_ref()?.doubt());
    let split = cost.experts_split.filter(|_| slope_doubt.is_none());
    // name, decode, verify, difference, share
    let mut rows: Vec<[String; 5]> = Vec::new();
    for a in &cost.attribution {
        rows.push([a.component.as_str().to_owned(), show(a.decode_us), show(a.verify_us), show(a.delta_us), percent(a.share_of_delta)]);
        if let Some(split) = split.filter(|_| a.component == crate::trace::Component::Experts) {
            let part = |name: &str, us: f64| {
                let share = total.filter(|t| *t != 0.0).map(|t| us / t);
                [format!("  {name}"), String::new(), String::new(), signed(us), percent(share)]
            };
            rows.push(part("more experts", split.union_us));
            rows.push(part("more rows", split.shape_us));
        }
    }
    rows.push(["unattributed".to_owned(), String::new(), String::new(), show(cost.unattributed_us), percent(unattributed)]);
    rows.push([
        "whole step".to_owned(),
        show(cost.decode_step_us),
        show(cost.verify_step_us),
        show(total),
        percent(total.filter(|t| *t != 0.0).map(|_| 1.0)),
    ]);
    if let (true, Some(decode), Some(verify)) = (is_noisy(report), cost.decode_step_us_median, cost.verify_step_us_median) {
        rows.push(["  by medians".to_owned(), time(decode), time(verify), signed(verify - decode), "-".to_owned()]);
    }
    let cells = |at: usize| rows.iter().map(|row| row[at].clone()).collect::<Vec<_>>();
    let columns = vec![
        Column::new("component").left().cells(cells(0)),
        Column::new("decode").cells(cells(1)),
        Column::new("verify").cells(cells(2)),
        Column::new("difference").cells(cells(3)),
        Column::new("share").optional(0).cells(cells(4)),
    ];
    let split_left_out = (cost.experts_split.is_some() && split.is_none())
        .then_some("what more experts and what more rows take is left out: the cost per distinct expert is not told");
    let notes = doubt.into_iter().chain(split_left_out);
    table::render(columns, width, |_, line| line.to_owned()) + &notes.map(|note| paragraph("", note, width)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::cost::{AllRows, Attribution, ContextBucket, ExpertsSplit};
    use crate::trace::Component;
    use crate::trace::manifest::Warning;

    fn report() -> Report {
        crate::analysis::tests::memory::Memory::new(&[1], 8, 2).report()
    }

    #[test]
    fn the_sentence_says_which_steps_it_is_of() {
        let mut report = report();
        report.totals.verify_steps = 114;
        let cost = measured();
        report.run.drafter.kind = "mtp".into();
        report.totals.decode_steps = 20;
        let text = sentence(&cost, 2, &report).unwrap();
        assert!(text.contains("plain decoding, over the 56 of 114 verify steps of 2 rows") && !text.contains("had drafts"), "{text}");
        // A drafter that often has nothing: its decode steps are not the baseline's alone.
        report.run.drafter.kind = "ngram".into();
        report.totals.decode_steps = 342;
        let text = sentence(&cost, 2, &report).unwrap();
        assert!(text.contains("it holds for the 114 of 456 steps that had drafts (25 %); 342 decode steps"), "{text}");
    }

    fn measured() -> StepCost {
        StepCost {
            source: Some(TimeSource::Cpu),
            verify_ratio: Some(1.8),
            verify_ratio_ci95: Some([1.7, 1.9]),
            step_ratio: Some(2.2),
            step_ratio_ci95: None,
            break_even: Some(2.2),
            break_even_ci95: None,
            speedup: Some(1.9 / 2.2),
            speedup_ci95: None,
            tokens_per_step: Some(1.9),
            verify_us: Some(900.0),
            decode_us: Some(500.0),
            verify_step_us: Some(1100.0),
            decode_step_us: Some(500.0),
            contexts: vec![ContextBucket { from: 0, to: 63, verify_steps: 56, decode_steps: 20 }],
            ..StepCost::default()
        }
    }

    #[test]
    fn the_sentence_says_whether_it_pays() {
        // The published case: 0.9 acceptance at a ratio of 2.2 is 0.86 times as fast.
        let text = sentence(&measured(), 2, &report()).unwrap();
        assert!(text.contains("1.80 times a decode pass (95 %: 1.70 to 1.90)"), "{text}");
        assert!(text.contains("breaks even at 2.20 tokens per step and has 1.90: speculation loses, 0.86 times"), "{text}");
        assert!(text.ends_with("CPU wall times"), "{text}");
        let pays = StepCost { speedup: Some(1.2), ..measured() };
        assert!(sentence(&pays, 2, &report()).unwrap().contains("speculation pays, 1.20 times"));
        // An interval that holds 1 is no verdict, on whichever side the point is.
        for speedup in [0.93, 1.02] {
            let unclear = StepCost { speedup: Some(speedup), speedup_ci95: Some([0.83, 1.03]), ..measured() };
            let expected = format!("not told apart from plain decoding, {speedup} times as fast (95 %: 0.83 to 1.03)");
            let text = sentence(&unclear, 2, &report()).unwrap();
            assert!(text.contains(&expected) && !text.contains("pays") && !text.contains("loses"), "{text}");
        }
        let mixed =
            AllRows { verify_steps: 900, tokens_per_step: Some(3.5), step_ratio: Some(2.8), speedup: Some(1.25), ..AllRows::default() };
        let text = sentence(&StepCost { all_rows: Some(mixed), ..measured() }, 4, &report()).unwrap();
        assert!(
            text.contains("; over all 900 verify steps, whatever their rows, 3.50 tokens at 2.80 decode steps, 1.25 times as fast"),
            "{text}"
        );
        let loses = StepCost { speedup: Some(0.93), speedup_ci95: Some([0.83, 0.99]), ..measured() };
        assert!(sentence(&loses, 2, &report()).unwrap().contains("speculation loses, 0.93 times"));
    }

    #[test]
    fn too_few_decode_steps_are_no_verdict() {
        let few = |decode_steps| {
            let contexts = vec![
                ContextBucket { from: 0, to: 63, verify_steps: 56, decode_steps },
                // Compared with nothing, and so none of them.
                ContextBucket { from: 64, to: 127, verify_steps: 0, decode_steps: 30 },
            ];
            let cost = StepCost { contexts, speedup: Some(1.2), speedup_ci95: Some([1.1, 1.3]), ..measured() };
            sentence(&cost, 2, &report()).unwrap()
        };
        let text = few(9);
        assert!(text.contains("9 decode steps are too few to tell whether speculation pays, 10 are needed; 1.20 times as fast"), "{text}");
        assert!(!text.contains("speculation pays, 1.20") && !text.contains("1.10 to 1.30"), "{text}");
        assert!(few(10).contains("speculation pays, 1.20 times as fast as plain decoding (95 %: 1.10 to 1.30)"));
    }

    #[test]
    fn noisy_times_stand_beside_their_medians() {
        let mut noisy = report();
        noisy.warnings.push(Warning::new(NOISY_TIMES, "a step of 9 s"));
        let medians =
            StepCost { verify_ratio_median: Some(1.25), step_ratio_median: Some(1.5), speedup_median: Some(1.9 / 1.5), ..measured() };
        let text = sentence(&medians, 2, &noisy).unwrap();
        assert!(
            text.starts_with("the times are noisy: verifying 2 rows takes 1.25 times a decode pass by medians, 1.80 by means, which a few"),
            "{text}"
        );
        assert!(text.contains("1.50 times by medians, 2.20 by means. It breaks even at 1.50 tokens per step by medians"), "{text}");
        // The mean says that it loses, the medians that it pays.
        assert!(
            text.contains("not told apart from plain decoding by such noisy times, 1.27 times as fast by medians, 0.86 by means"),
            "{text}"
        );
        let same = StepCost { speedup_median: Some(0.9), ..medians.clone() };
        assert!(sentence(&same, 2, &noisy).unwrap().contains("speculation loses, 0.90 times as fast as plain decoding by medians, 0.86"));
        // On the same side, but by an interval that has 1 in it.
        let unsure = StepCost { speedup_ci95: Some([0.3, 3.1]), ..same };
        let text = sentence(&unsure, 2, &noisy).unwrap();
        assert!(text.contains("by such noisy times, 0.90 times as fast by medians, 0.86 by means (95 %: 0.30 to 3.10)"), "{text}");
        // Quiet times have medians, too, and nobody needs them.
        let text = sentence(&medians, 2, &report()).unwrap();
        assert!(!text.contains("median") && text.contains("speculation loses"), "{text}");
    }

    #[test]
    fn what_was_not_measured_is_called_a_model() {
        let nothing = StepCost { source: None, verify_ratio: None, step_ratio: None, ..measured() };
        assert_eq!(sentence(&nothing, 4, &report()), None);
        let model = crate::metric::cost::ByteModel {
            kind: "model".into(),
            decode_bytes: 10.0,
            verify_bytes: 21.0,
            verify_ratio: 2.1,
            speedup_if_drafts_are_free: None,
            assumptions: Vec::new(),
        };
        let text = sentence(&StepCost { model: Some(model), ..nothing }, 4, &report()).unwrap();
        assert!(text.starts_with("not measured; by a model") && text.contains("2.10 decode steps"), "{text}");
    }

    #[test]
    fn shares_are_shown_of_a_difference_that_is_told() {
        let of = |component, decode_us: f64, verify_us: f64, share: f64| Attribution {
            component,
            decode_us: Some(decode_us),
            verify_us: Some(verify_us),
            delta_us: Some(verify_us - decode_us),
            share_of_delta: Some(share),
        };
        let mut report = crate::report::text::tests::report();
        report.cost = Some(StepCost {
            attribution: vec![of(Component::Experts, 400.0, 850.0, 0.75), of(Component::Kda, 100.0, 250.0, 0.25)],
            unattributed_us: Some(0.0),
            experts_split: Some(ExpertsSplit { union_us: 300.0, shape_us: 150.0 }),
            step_ratio_ci95: Some([2.0, 2.4]),
            decode_step_us_median: Some(490.0),
            verify_step_us_median: Some(980.0),
            ..measured()
        });
        let fit = |ci95| Some(ExpertCost { us_per_expert: Some(3.0), ci95: Some(ci95), r2: Some(0.9), ..ExpertCost::default() });
        report.overall.as_mut().unwrap().cost = fit([2.0, 4.0]);
        let text = attribution(&report, 80);
        assert!(text.contains("share") && text.contains("75 %") && text.contains("more experts") && text.contains("50 %"), "{text}");
        assert!(!text.contains("left out") && !text.contains("medians"), "{text}");
        // A slope that may be 0 splits nothing.
        report.overall.as_mut().unwrap().cost = fit([-2.0, 8.0]);
        let text = attribution(&report, 80);
        assert!(
            text.contains("75 %") && !text.contains("  more experts") && text.contains("what more experts and what more rows"),
            "{text}"
        );
        // A difference that may be 0 has no shares.
        report.cost.as_mut().unwrap().step_ratio_ci95 = Some([0.9, 4.0]);
        let text = attribution(&report, 80);
        assert!(!text.contains('%') && text.contains("is not told apart from 0: shares of it are left out"), "{text}");
        // Nor has one of noisy means, which stand beside medians.
        report.cost.as_mut().unwrap().step_ratio_ci95 = Some([2.0, 2.4]);
        report.warnings.push(Warning::new(NOISY_TIMES, "a step of 9 s"));
        let text = attribution(&report, 80);
        assert!(!text.contains('%') && text.contains("the times are noisy") && text.contains("by medians"), "{text}");
        assert!(text.contains("490 µs") && text.contains("980 µs") && text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(
            !table::markdown(&crate::report::tables::all(&report).into_iter().find(|t| t.name == "attribution").unwrap().columns)
                .contains("75")
        );
    }

    #[test]
    fn the_slope_has_its_unit_and_its_doubt() {
        let cost = ExpertCost {
            us_per_expert: Some(36.0),
            ci95: Some([35.0, 37.0]),
            intercept_us: Some(-1.5),
            r2: Some(0.97),
            implied_gb_per_s: Some(231.4),
            points: 12_345,
            ..ExpertCost::default()
        };
        let text = experts(&cost, Some(250.0)).unwrap();
        assert_eq!(
            text,
            "36.0 µs per distinct expert (95 %: 35.0 µs to 37.0 µs), -1.50 µs besides, R² 0.97 over 12 345 layer passes; as if experts \
             were read at 231.4 GB/s; a large copy here moves 250.0 GB/s"
        );
        let sure = ExpertCost { intercept_us_ci95: Some([-2.5, -1.25]), ..cost.clone() };
        assert!(experts(&sure, None).unwrap().contains(", -1.50 µs besides (95 %: -2.50 µs to -1.25 µs), R² 0.97"));
        let noise = ExpertCost { ci95: Some([-5.0, 77.0]), ..cost.clone() };
        let text = experts(&noise, Some(250.0)).unwrap();
        assert!(text.contains("-5.00 µs to 77.0 µs") && text.contains("not told apart from 0") && !text.contains("GB/s"), "{text}");
        // A narrow interval of a line that the times do not follow.
        let flat = ExpertCost { ci95: Some([35.0, 37.0]), r2: Some(0.004), ..noise.clone() };
        let text = experts(&flat, Some(250.0)).unwrap();
        assert!(text.contains("R² 0.00") && text.ends_with("the fit explains next to nothing of the times: no fact"), "{text}");
        assert!(!text.contains("GB/s"), "{text}");
        let unknown = ExpertCost { unknown_because: Some("collinear".into()), ..ExpertCost::default() };
        assert_eq!(experts(&unknown, None).unwrap(), "cost per expert unknown: collinear");
        assert_eq!(experts(&ExpertCost::default(), None), None);
    }
}
