//! What is to be doubted in a table that `calibrate` measured: costs of a noisy machine look like any others.

use super::calibrated::{slope_intervals, slopes};
use crate::analysis::Options;
use crate::metric::bounds::NOISY_INTERVAL;
use crate::metric::costs::{Cell, CostTable, Timed, TimedBy};
use crate::metric::{Interval, Unit};
use crate::trace::manifest::Warning;
use std::collections::BTreeMap;

/// The way out of all of them.
const AGAIN: &str = "calibrate again on an idle machine, with more --repeats";

fn us(us: f64) -> String {
    Unit::Microseconds.show(us)
}

/// What limits a table's costs; none of an emulated device's, which has no times.
///
/// * `costs_by_events`: passes of a device timed without CUPTI, launch by launch.
/// * `costs_noisy`: cells whose 95 % interval is wider than their time.
/// * `costs_unclear`: the time per distinct expert or per further row has an interval with 0 in it, or is not above 0.
/// * `costs_falling`: a pass of more rows and no fewer experts that is faster than one of less, by more than both intervals where they are known.
pub fn warnings(table: &CostTable, options: &Options) -> Vec<Warning> {
    [by_events(table), noisy(table), unclear(table, options), falling(table)].into_iter().flatten().collect()
}

fn by_events(table: &CostTable) -> Option<Warning> {
    let message = "passes ran launch by launch, without graphs, with an event after each kernel: the gap before a kernel counts with it, so \
                   that passes take longer than a recording's, those of small kernels most; `specprof doctor` says why CUPTI is not used";
    let timed = table.timed_by == Some(TimedBy::Events) && !table.emulated;
    timed.then(|| Warning::new("costs_by_events", message))
}

/// The width of an interval in times of its middle.
fn width(time: &Timed) -> Option<f64> {
    time.ci95.map(|[low, high]| (high - low) / time.us)
}

fn named(cell: &Cell) -> String {
    format!("{} row{} and {} experts", cell.rows, if cell.rows == 1 { "" } else { "s" }, cell.union)
}

fn noisy(table: &CostTable) -> Option<Warning> {
    let cells = table.cells.iter().filter_map(|cell| Some((named(cell), cell.pass?)));
    let draft = table.draft.map(|time| ("a draft".to_owned(), time));
    let wide: Vec<(String, f64)> =
        cells.chain(draft).filter_map(|(name, time)| Some((name, width(&time)?))).filter(|(_, width)| *width > NOISY_INTERVAL).collect();
    let (name, widest) = wide.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let (n, all) = (wide.len(), table.cells.len() + usize::from(table.draft.is_some()));
    let message = format!(
        "{n} of {all} times are less sure than ±{:.0} %, the least sure {name}: ±{:.0} %; {AGAIN}",
        50.0 * NOISY_INTERVAL,
        50.0 * widest
    );
    Some(Warning::new("costs_noisy", message))
}

fn unclear(table: &CostTable, options: &Options) -> Option<Warning> {
    let (per_expert, per_row, _) = slopes(table).ok()?;
    let intervals = slope_intervals(table, options);
    let doubt = |what: &str, slope: f64, interval: Option<Interval>| {
        let shown = interval.map_or_else(String::new, |[low, high]| format!(" (95 %: {} to {})", us(low), us(high)));
        match interval {
            Some([low, high]) if low <= 0.0 && high >= 0.0 => Some(format!("{what}, {}{shown}, is not told apart from 0", us(slope))),
            _ if slope <= 0.0 => Some(format!("{what}, {}{shown}, is not above 0", us(slope))),
            _ => None,
        }
    };
    let of = |at: usize| intervals.map(|intervals| intervals[at]);
    let said = [doubt("the time per distinct expert", per_expert, of(0)), doubt("the time per further row", per_row, of(1))];
    let said: Vec<String> = said.into_iter().flatten().collect();
    let message = format!("{}; {AGAIN}, or with rows and unions that are further apart", said.join("; "));
    (!said.is_empty()).then(|| Warning::new("costs_unclear", message))
}

/// A cell and its time.
type Pass<'a> = (&'a Cell, Timed);

/// In one sweep by rows. Of the passes of fewer rows only those matter that are slower than all of no more experts: a staircase, in which the last
/// step at or below some number of experts is the slowest of them.
fn falling(table: &CostTable) -> Option<Warning> {
    let mut timed: Vec<Pass<'_>> = table.cells.iter().filter_map(|cell| Some((cell, cell.pass?))).collect();
    timed.sort_by_key(|(cell, _)| (cell.rows, cell.union));
    let (low, high) =
        (|time: &Timed| time.ci95.map_or(time.us, |[low, _]| low), |time: &Timed| time.ci95.map_or(time.us, |[_, high]| high));
    let mut slowest: BTreeMap<u16, Pass<'_>> = BTreeMap::new();
    let mut faster = 0u64;
    let mut worst: Option<(f64, Pass<'_>, Pass<'_>)> = None;
    for same_rows in timed.chunk_by(|a, b| a.0.rows == b.0.rows) {
        for &(cell, time) in same_rows {
            let Some((_, &(before, least))) = slowest.range(..=cell.union).next_back() else { continue };
            if high(&time) < low(&least) {
                faster += 1;
                let by = low(&least) / high(&time);
                if worst.is_none_or(|(most, ..)| by > most) {
                    worst = Some((by, (cell, time), (before, least)));
                }
            }
        }
        for &(cell, time) in same_rows {
            if slowest.range(..=cell.union).next_back().is_some_and(|(_, (_, least))| low(least) >= low(&time)) {
                continue;
            }
            while let Some(&above) =
                slowest.range(cell.union..).next().filter(|(_, (_, least))| low(least) <= low(&time)).map(|(union, _)| union)
            {
                slowest.remove(&above);
            }
            slowest.insert(cell.union, (cell, time));
        }
    }
    let (_, (cell, time), (before, least)) = worst?;
    let message = format!(
        "{faster} of {} passes take less time than one of fewer rows and no more experts: {} {} where {} take {}; {AGAIN}",
        timed.len(),
        named(cell),
        us(time.us),
        named(before),
        us(least.us)
    );
    Some(Warning::new("costs_falling", message))
}

#[cfg(test)]
mod tests {
    use super::super::calibrated::tests::table;
    use super::*;

    const OPTIONS: Options = Options { resamples: 400, seed: 5 };

    /// Cells of (rows, union, µs, half the interval).
    fn measured(cells: &[(u16, u16, f64, f64)]) -> CostTable {
        let mut table = table(&cells.iter().map(|&(rows, union, us, _)| (rows, union, us)).collect::<Vec<_>>());
        for (cell, (.., half)) in table.cells.iter_mut().zip(cells) {
            cell.pass.as_mut().unwrap().ci95 = cell.pass.map(|pass| [pass.us - half, pass.us + half]);
        }
        table
    }

    fn of(cells: &[(u16, u16, f64, f64)]) -> Vec<(String, String)> {
        warnings(&measured(cells), &OPTIONS).into_iter().map(|w| (w.code, w.message)).collect()
    }

    #[test]
    fn a_quiet_table_has_none() {
        // 10 µs, 2 µs an expert in one of two layers each, 1 µs a row.
        assert_eq!(of(&[(1, 2, 10.0, 0.2), (2, 4, 15.0, 0.2), (3, 2, 12.0, 0.2), (3, 6, 20.0, 0.2)]), []);
        // Without intervals the medians alone are asked.
        assert_eq!(warnings(&table(&[(1, 2, 10.0), (2, 4, 15.0), (3, 2, 12.0), (3, 6, 20.0)]), &OPTIONS), []);
        // Too few cells for slopes are said elsewhere.
        assert_eq!(of(&[(1, 2, 10.0, 1.0)]), []);
    }

    /// Gaps between launches count only where there is no CUPTI, and an emulated device has no times of either kind.
    #[test]
    fn times_by_events_are_told() {
        let cells = [(1, 2, 10.0, 0.2), (2, 4, 15.0, 0.2), (3, 2, 12.0, 0.2), (3, 6, 20.0, 0.2)];
        for (timed_by, emulated, wanted) in [
            (Some(TimedBy::Events), false, &["costs_by_events"][..]),
            (Some(TimedBy::Events), true, &[]),
            (Some(TimedBy::Cupti), false, &[]),
            (Some(TimedBy::Host), false, &[]),
            (None, false, &[]),
        ] {
            let table = CostTable { timed_by, emulated, ..measured(&cells) };
            let found = warnings(&table, &OPTIONS);
            assert_eq!(found.iter().map(|w| w.code.as_str()).collect::<Vec<_>>(), wanted, "{timed_by:?}");
            assert!(found.iter().all(|w| w.message.contains("launch by launch") && w.message.contains("specprof doctor")), "{found:?}");
        }
    }

    #[test]
    fn noise_is_named_with_its_worst_cell() {
        let found = of(&[(1, 2, 10.0, 0.2), (2, 4, 15.0, 8.0), (3, 2, 12.0, 0.2), (3, 6, 20.0, 200.0)]);
        assert_eq!(found[0].0, "costs_noisy");
        assert!(
            found[0].1.starts_with("2 of 5 times are less sure than ±50 %, the least sure 3 rows and 6 experts: ±1000 %; calibrate again")
        );
        // Intervals of ±200 µs leave nothing of 1 µs an expert.
        assert!(found[1].0 == "costs_unclear" && found[1].1.contains("is not told apart from 0"), "{found:?}");
    }

    #[test]
    fn slopes_that_cannot_be_and_rows_that_make_passes_faster_are_told() {
        let found = of(&[(1, 2, 30.0, 0.2), (2, 2, 20.0, 0.2), (3, 2, 10.0, 0.2), (3, 4, 12.0, 0.2)]);
        let codes: Vec<_> = found.iter().map(|(code, _)| code.as_str()).collect();
        assert_eq!(codes, ["costs_unclear", "costs_falling"]);
        assert!(
            // -10 to the last bits of a sum, which decide how many digits are shown.
            found[0].1.starts_with("the time per further row, -10.0")
                && found[0].1.contains("(95 %: -10.")
                && found[0].1.contains("is not above 0"),
            "{found:?}"
        );
        let expected = "3 of 4 passes take less time than one of fewer rows and no more experts: 3 rows and 2 experts 10.0 µs where 1 row and 2 \
                        experts take 30.0 µs";
        assert!(found[1].1.starts_with(expected), "{found:?}");
        // Within their intervals they are no finding.
        let unsure = of(&[(1, 2, 10.2, 0.2), (2, 2, 10.0, 0.2), (3, 2, 12.0, 0.2), (3, 6, 20.0, 0.2)]);
        assert!(unsure.iter().all(|(code, _)| code != "costs_falling"), "{unsure:?}");
    }
}
