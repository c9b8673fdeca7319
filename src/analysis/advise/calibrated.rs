//! Step costs out of a table that `calibrate` measured.

use super::step_cost::{Coefficients, StepCost};
use crate::analysis::Options;
use crate::analysis::cost::regression::{Plane, plane};
use crate::analysis::stats::{normals, percentile_interval};
use crate::metric::advice::CostSource;
use crate::metric::costs::{Cell, CostTable, MeasuredModel, Timed};
use crate::metric::{Interval, Unit};
use crate::trace::manifest::{Manifest, ModelShape};
use rayon::prelude::*;

/// Share of the variance that experts and rows must explain for their costs to be used.
const MIN_R2: f64 = 0.5;
/// Times that are drawn for the intervals of slopes, at most: of a table of very many cells there are fewer resamples.
const MAX_DRAWN: usize = 1 << 25;

/// A cell's time is taken to be at least so unsure, as a share of it: intervals of a few passes' medians may be narrow by chance.
const LEAST_DEVIATION: f64 = 0.01;

/// What a table's passes cost: µs for each distinct expert in one layer, µs a pass of all layers for each further row, and the share of the
/// variance that the two explain; the plane of least squares through the cells' medians, weighed by [`weights`].
///
/// With cells of (W, U) = (1, 2), (2, 4), (3, 2), (3, 6) at 10, 15, 12 and 20 µs in two layers, 2 µs an expert and 1 µs a row meet all
/// four; an expert in one layer is half of it.
///
/// # Errors
/// Why there is no such plane, as half a sentence.
pub fn slopes(table: &CostTable) -> Result<(f64, f64, Option<f64>), &'static str> {
    if table.cells.len() < 4 {
        return Err("fewer than four cells were measured");
    }
    let k = f64::from(table.model.experts_per_token);
    let point = |(c, v): (&Cell, &f64)| Some([f64::from(c.union) - k, f64::from(c.rows) - 1.0, c.pass?.us, *v]);
    let points: Vec<[f64; 4]> = table.cells.iter().zip(&weights(table)).filter_map(point).collect();
    let Plane { b, c, r2 } = plane(&points)?;
    Ok((b / f64::from(table.model.moe_layers), c, r2))
}

/// How much each cell counts: with the standard deviation σ of its time t, that of [`deviation`],
///
/// ```text
/// v = 1 / max(σ, 0.01 t)²
/// ```
///
/// or 1 for every cell where some time has no interval: nobody says then which are sure. A cell of 100 µs (96.08 to 103.92) has σ = 2 µs
/// and v = 1/4, one of 100 µs (100 to 492) σ = 100 µs and v = 1/10 000, one of 100 µs (100 to 100) v = 1.
fn weights(table: &CostTable) -> Vec<f64> {
    let weight = |c: &Cell| {
        let pass = c.pass?;
        let sure = deviation(&pass)?.max(LEAST_DEVIATION * pass.us);
        Some(sure.powi(-2)).filter(|v| v.is_finite() && *v > 0.0)
    };
    table.cells.iter().map(weight).collect::<Option<_>>().unwrap_or_else(|| vec![1.0; table.cells.len()])
}

/// Whether a table says something of a trace: both are of a model of the same shape and format.
///
/// # Errors
/// What differs, as a sentence without the files' names.
pub fn fits(table: &CostTable, model: &ModelShape) -> Result<(), String> {
    let differs =
        |(what, ours, theirs): Difference| format!("is of another model: {what} {ours}, the trace's {theirs}; calibrate the trace's model");
    difference(&table.model, &MeasuredModel::of(model)).map_or(Ok(()), |d| Err(differs(d)))
}

/// What differs, and what it is in the table and in the other.
type Difference = (&'static str, String, String);

/// The first thing in which two models' passes differ.
fn difference(m: &MeasuredModel, other: &MeasuredModel) -> Option<Difference> {
    let known = |a: Option<u32>, b: Option<u32>| a.is_none() || b.is_none() || a == b;
    let same = [
        ("routed layers", m.moe_layers == other.moe_layers, m.moe_layers.to_string(), other.moe_layers.to_string()),
        ("experts", m.experts == other.experts, m.experts.to_string(), other.experts.to_string()),
        (
            "experts a token",
            m.experts_per_token == other.experts_per_token,
            m.experts_per_token.to_string(),
            other.experts_per_token.to_string(),
        ),
        ("the hidden size", known(m.hidden_size, other.hidden_size), word(m.hidden_size), word(other.hidden_size)),
        ("the experts' size", known(m.expert_size, other.expert_size), word(m.expert_size), word(other.expert_size)),
        ("the experts' format", m.quantisation == other.quantisation, m.quantisation.clone(), other.quantisation.clone()),
    ];
    same.into_iter().find(|(_, same, ..)| !same).map(|(what, _, ours, theirs)| (what, ours, theirs))
}

/// What verify passes cost beside a decode pass, by a table alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassCosts {
    decode: f64,
    /// µs for each distinct expert in every routed layer.
    per_union: f64,
    per_row: f64,
    k: f64,
}

impl PassCosts {
    /// The costs that `table` has for `model`.
    ///
    /// # Errors
    /// Why it gives none, as half a sentence.
    pub fn of(table: &CostTable, model: &MeasuredModel) -> Result<Self, String> {
        if let Some((what, ours, theirs)) = difference(&table.model, model) {
            return Err(format!("is of another model: {what} {ours}, not {theirs}; calibrate the model that is asked about"));
        }
        let (Coefficients { decode, per_expert, per_row, .. }, _) = told(table, |_| 0.0)?;
        let [per_union, k] = [per_expert * f64::from(table.model.moe_layers), f64::from(table.model.experts_per_token)];
        Ok(Self { decode, per_union, per_row, k })
    }

    /// Time of a verify pass of W rows and U distinct experts a layer, by that of a decode pass T: (T + b L (U - k) + c (W - 1)) / T with b, c and
    /// L layers of [`slopes`].
    pub fn verify_ratio(&self, rows: usize, union: f64) -> f64 {
        (self.decode + self.per_union * (union - self.k) + self.per_row * (rows as f64 - 1.0)) / self.decode
    }
}

/// The coefficients of a table and how much they explain.
///
/// # Errors
/// Why they are not to be used, as half a sentence.
fn told(table: &CostTable, per_draft: impl Fn(f64) -> f64) -> Result<(Coefficients, Option<f64>), String> {
    slopes(table)?;
    let timed = timed(table).ok_or("some of the table's cells have no time")?;
    let passes: Vec<f64> = timed.iter().map(|pass| pass.us).collect();
    let (coefficients, r2) = coefficients(table, (&passes, &weights(table)), per_draft).ok_or("the table has no decode pass")?;
    if coefficients.per_expert <= 0.0 {
        return Err("the calibrated time per distinct expert is not above 0; calibrate on an idle machine, with more --repeats".into());
    }
    if coefficients.per_row < 0.0 {
        return Err("the calibrated time per row is below 0; calibrate on an idle machine, with more --repeats".into());
    }
    if let Some(r2) = r2.filter(|&r2| r2 < MIN_R2) {
        return Err(format!("experts and rows explain {:.0} % of the variance of the calibrated times, too little to go by", r2 * 100.0));
    }
    Ok((coefficients, r2))
}

fn word(n: Option<u32>) -> String {
    n.map_or_else(|| "unknown".to_owned(), |n| n.to_string())
}

/// What a table's steps cost, by its times or by others in their place: `passes` are those of the cells, in their order. The decode step is its
/// cell of one row and k experts; fixed = decode - per_expert k layers - per_row, so that it costs that.
fn coefficients(
    table: &CostTable,
    (passes, weights): (&[f64], &[f64]),
    per_draft: impl Fn(f64) -> f64,
) -> Option<(Coefficients, Option<f64>)> {
    let k = f64::from(table.model.experts_per_token);
    let cells = table.cells.iter().zip(weights);
    let points: Vec<[f64; 4]> = cells.zip(passes).map(|((c, &v), &us)| [f64::from(c.union) - k, f64::from(c.rows) - 1.0, us, v]).collect();
    let Plane { b, c: per_row, r2 } = plane(&points).ok()?;
    let layers = f64::from(table.model.moe_layers);
    let per_expert = b / layers;
    let decode = *passes.get(table.cells.iter().position(|c| c.rows == 1 && c.union == table.model.experts_per_token)?)?;
    let fixed = decode - per_expert * k * layers - per_row;
    Some((Coefficients { decode, fixed, per_expert, per_row, per_draft: per_draft(decode), ..Coefficients::default() }, r2))
}

/// Where the cost of a draft is from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Drafting {
    /// A share of a decode step.
    Share(f64),
    /// The table.
    Timed(Timed),
}

impl Drafting {
    fn of(table: &CostTable, manifest: &Manifest, draft_cost: Option<f64>) -> Result<Self, String> {
        match (draft_cost, manifest.drafter.kind.as_str(), table.draft) {
            (Some(share), ..) => Ok(Self::Share(share)),
            (None, "mtp", Some(draft)) => Ok(Self::Timed(draft)),
            (None, "ngram" | "none", _) => Ok(Self::Share(0.0)),
            (None, kind, _) => Err(format!("the table has no cost of a draft by {kind} (--draft-cost of `advise` stands in for it)")),
        }
    }

    fn us(self, decode: f64) -> f64 {
        match self {
            Self::Share(share) => share * decode,
            Self::Timed(draft) => draft.us,
        }
    }
}

/// The time of every cell; `None` where one has none, as on an emulated device.
fn timed(table: &CostTable) -> Option<Vec<Timed>> {
    table.cells.iter().map(|cell| cell.pass).collect()
}

/// Step costs of a table as unsure as its cells are: resample i has each time drawn from the normal law about the measured median whose
/// middle 95 % are as wide as its interval, each apart from the others. `None` where some time has no interval: then nobody says how
/// sure it is.
///
/// A cell of 20 µs (18 to 22) is drawn with a standard deviation of 4 / (2 x 1.96) = 1.02 µs.
pub fn draws(table: &CostTable, manifest: &Manifest, draft_cost: Option<f64>, options: &Options) -> Option<Vec<Option<Coefficients>>> {
    let drafting = Drafting::of(table, manifest, draft_cost).ok()?;
    let timed = timed(table)?;
    let deviations: Vec<f64> = timed.iter().map(deviation).collect::<Option<_>>()?;
    let weights = weights(table);
    let of_draft = match drafting {
        Drafting::Share(_) => 0.0,
        Drafting::Timed(draft) => deviation(&draft)?,
    };
    let draw = |resample: usize| {
        let normal = normals((resample, options.seed), table.cells.len() + 1);
        let passes: Vec<f64> = timed.iter().zip(&deviations).zip(&normal).map(|((pass, sd), z)| pass.us + sd * z).collect();
        let more = of_draft * normal.last().copied().unwrap_or_default();
        let (costs, _) = coefficients(table, (&passes, &weights), |decode| drafting.us(decode) + more)?;
        costs.are_costs().then_some(costs)
    };
    Some((0..options.resamples).into_par_iter().map(draw).collect())
}

/// 95 % intervals of the slopes, µs for each distinct expert in one layer and for each further row, from the draws of [`draws`]; `None` where a
/// time has no interval, or there are no slopes.
pub fn slope_intervals(table: &CostTable, options: &Options) -> Option<[Interval; 2]> {
    slopes(table).ok()?;
    let (timed, weights) = (timed(table)?, weights(table));
    let deviations: Vec<f64> = timed.iter().map(deviation).collect::<Option<_>>()?;
    let draw = |resample: usize| {
        let normal = normals((resample, options.seed), table.cells.len() + 1);
        let passes: Vec<f64> = timed.iter().zip(&deviations).zip(&normal).map(|((pass, sd), z)| pass.us + sd * z).collect();
        coefficients(table, (&passes, &weights), |_| 0.0)
            .map_or_else(|| vec![f64::NAN; 2], |(costs, _)| vec![costs.per_expert, costs.per_row])
    };
    let resamples = options.resamples.min(MAX_DRAWN / table.cells.len().max(1)).max(100);
    let draws: Vec<Vec<f64>> = (0..resamples).into_par_iter().map(draw).collect();
    Some([percentile_interval(&draws, 0)?, percentile_interval(&draws, 1)?])
}

/// Standard deviation of the law that a time is drawn from; `None` of one without an interval.
fn deviation(time: &Timed) -> Option<f64> {
    time.ci95.map(|[low, high]| (high - low) / (2.0 * 1.96))
}

impl StepCost {
    /// The costs that `table` has for the trace of `manifest`, whose windows have `rows` rows.
    ///
    /// # Errors
    /// Why it gives none, as half a sentence.
    pub fn calibrated(table: &CostTable, manifest: &Manifest, rows: usize, draft_cost: Option<f64>) -> Result<Self, String> {
        let drafting = Drafting::of(table, manifest, draft_cost);
        let (coefficients, r2) = told(table, |decode| drafting.as_ref().map_or(0.0, |d| d.us(decode)))?;
        let Coefficients { decode, per_expert, per_row, per_draft, .. } = coefficients;
        drafting?;
        let us = |us: f64| Unit::Microseconds.show(us);
        let mut assumptions = vec![format!(
            "calibrated, {} on {}: {} a decode pass after {} tokens of context, {} for each distinct expert in one layer and {} a pass, of all \
             layers, for each further row (least squares over {} cells{}), {} a draft; choosing tokens and commit are not in it",
            table.engine,
            table.device,
            us(decode),
            table.context_len,
            us(per_expert),
            us(per_row),
            table.cells.len(),
            r2.map_or_else(String::new, |r2| format!(", R² {r2:.2}")),
            us(per_draft)
        )];
        if table.device != manifest.device.name {
            assumptions.push(format!("the trace was recorded on {}, another device than the table's", manifest.device.name));
        }
        if table.model.name != manifest.model.name {
            assumptions.push(format!("the table is of {}, a model of the same shape", table.model.name));
        }
        let most = table.cells.iter().map(|c| usize::from(c.rows)).max().unwrap_or(1);
        if most < rows {
            assumptions.push(format!("the table has passes of up to {most} rows: costs of up to {rows} are extrapolated"));
        }
        Ok(Self { source: CostSource::Calibrated, coefficients, assumptions, shorter_unknown_because: None })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::analysis::tests::memory::manifest;
    use crate::metric::costs::{MeasuredModel, SCHEMA};
    use proptest::prelude::*;

    pub fn table(cells: &[(u16, u16, f64)]) -> CostTable {
        let cell = |&(rows, union, us): &(u16, u16, f64)| Cell {
            rows,
            union,
            pass: Some(Timed { us, ci95: None }),
            components: [].into(),
            kernels: [].into(),
            by_kernel: Vec::new(),
        };
        let shape = manifest(&[1, 2], 64, 2).model;
        CostTable {
            schema: SCHEMA.into(),
            written_by: "test".into(),
            engine: "test".into(),
            device: "a device".into(),
            emulated: false,
            timed_by: None,
            stream_gb_per_s: None,
            model: MeasuredModel {
                name: shape.name,
                moe_layers: 2,
                experts: shape.experts,
                experts_per_token: 2,
                hidden_size: shape.hidden_size,
                expert_size: shape.expert_size,
                quantisation: shape.quantisation,
                synthetic: false,
            },
            context_len: 16,
            repeats: 9,
            seed: 0,
            draft: Some(Timed { us: 4.0, ci95: None }),
            cells: cells.iter().map(cell).collect(),
            warnings: Vec::new(),
        }
    }

    /// The cells of the docs are met by one plane: each ratio is the cell's time by that of a decode pass, 10 µs.
    #[test]
    fn worked_example_of_passes() {
        let cells = [(1, 2, 10.0), (2, 4, 15.0), (3, 2, 12.0), (3, 6, 20.0)];
        let table = table(&cells);
        let costs = PassCosts::of(&table, &table.model).unwrap();
        for (rows, union, us) in cells {
            assert!((costs.verify_ratio(usize::from(rows), f64::from(union)) - us / 10.0).abs() < 1e-9, "{rows} {union}");
        }
        assert!((costs.verify_ratio(2, 2.5) - 1.2).abs() < 1e-9);
        let other = MeasuredModel { experts: 128, ..table.model.clone() };
        assert!(PassCosts::of(&table, &other).unwrap_err().contains("experts 64, not 128"));
        let flat = super::tests::table(&[(1, 2, 10.0), (2, 4, 9.0), (3, 2, 12.0), (3, 6, 8.0)]);
        assert!(PassCosts::of(&flat, &flat.model).is_err());
    }

    #[test]
    fn worked_example_of_the_docs() {
        let table = table(&[(1, 2, 10.0), (2, 4, 15.0), (3, 2, 12.0), (3, 6, 20.0)]);
        let mut manifest = manifest(&[1, 2], 64, 2);
        "mtp".clone_into(&mut manifest.drafter.kind);
        let cost = StepCost::calibrated(&table, &manifest, 4, None).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        let of = cost.coefficients;
        near(of.per_expert, 1.0);
        near(of.per_row, 1.0);
        near(of.fixed, 5.0);
        near(of.per_draft, 4.0);
        // Two layers with 6 experts each, three rows, two drafts: 20 and 8.
        near(of.passes(1.0, 3.0, 12.0) + of.drafting(1.0, 2.0), 28.0);
        assert_eq!(cost.source, CostSource::Calibrated);
        assert!(cost.assumptions[1].contains("another device") && cost.assumptions[2].contains("up to 3 rows: costs of up to 4"));
        assert_eq!(StepCost::calibrated(&table, &manifest, 3, None).unwrap().assumptions.len(), 2);
        near(StepCost::calibrated(&table, &manifest, 3, Some(0.5)).unwrap().coefficients.per_draft, 5.0);
        "eagle".clone_into(&mut manifest.drafter.kind);
        assert!(StepCost::calibrated(&table, &manifest, 4, None).unwrap_err().contains("a draft by eagle"));
    }

    #[test]
    fn a_cell_that_is_not_sure_spoils_no_plane() {
        // Five cells on a plane of 1 µs an expert and layer and 3 µs a row, known to 2 %, and a sixth that preemption made 400 µs too long.
        let plane = [(1, 2), (2, 2), (2, 4), (3, 2), (3, 6)]
            .map(|(rows, union)| (rows, union, 96.0 + 2.0 * f64::from(union) + 3.0 * f64::from(rows - 1)));
        let mut table = table(&[&plane[..], &[(3, 4, 510.0)]].concat());
        let unweighted = slopes(&table).unwrap();
        assert!((unweighted.1 - 3.0).abs() > 20.0, "{unweighted:?}");
        let interval = |pass: &mut Timed, high: f64| pass.ci95 = Some([pass.us - 3.92, high]);
        table.cells.iter_mut().filter_map(|c| c.pass.as_mut()).for_each(|pass| interval(pass, pass.us + 3.92));
        interval(table.cells[5].pass.as_mut().unwrap(), 4500.0);
        let v = weights(&table);
        assert!((v[0] - 0.25).abs() < 1e-12 && v[5] < 1e-6, "{v:?}");
        let (per_expert, per_row, r2) = slopes(&table).unwrap();
        assert!((per_expert - 1.0).abs() < 0.01 && (per_row - 3.0).abs() < 0.02 && r2.unwrap() > 0.95, "{per_expert} {per_row} {r2:?}");
        // What is drawn is weighed alike: the bad cell's width does not come back by the intervals.
        let [of_expert, of_row] = slope_intervals(&table, &Options { resamples: 400, seed: 5 }).unwrap();
        assert!(of_expert[1] - of_expert[0] < 4.0 && of_row[1] - of_row[0] < 10.0, "{of_expert:?} {of_row:?}");
    }

    /// Times that a loaded machine can give, by which more rows or experts would cost less.
    #[test]
    fn times_that_make_no_sense_are_not_used() {
        let mut manifest = manifest(&[1, 2], 64, 2);
        "mtp".clone_into(&mut manifest.drafter.kind);
        let why = |cells: &[(u16, u16, f64)]| StepCost::calibrated(&table(cells), &manifest, 3, None).unwrap_err();
        assert!(why(&[(1, 2, 30.0), (2, 2, 20.0), (3, 2, 10.0), (3, 4, 12.0)]).contains("per row is below 0"));
        assert!(why(&[(1, 2, 10.0), (2, 2, 20.0), (3, 2, 30.0), (3, 4, 22.0)]).contains("per distinct expert is not above 0"));
        assert!(why(&[(1, 2, 10.0), (2, 2, 50.0), (3, 2, 10.0), (3, 6, 60.0), (2, 4, 10.0)]).contains("of the variance"));
    }

    /// Cells of (rows, union) whose times are 5 + 1 an expert and layer + 3 a row, each the median of so many times with noise.
    fn noisy(seed: u64, repeats: usize) -> CostTable {
        let mut times = normals((seed as usize, 11), 12 * repeats + repeats).into_iter();
        let mut timed = |us: f64| Timed::median(&mut times.by_ref().take(repeats).map(|z| us + 2.0 * z).collect::<Vec<_>>()).unwrap();
        let mut table = table(&[(1, 2, 0.0)]);
        table.draft = Some(timed(40.0));
        let cells = [(1, 2), (2, 2), (2, 3), (2, 4), (3, 2), (3, 4), (3, 6), (4, 2), (4, 4), (4, 6), (4, 8)];
        let cell = |(rows, union)| {
            let pass = timed(50.0 + 2.0 * f64::from(union) + 3.0 * f64::from(rows - 1));
            Cell { rows, union, pass: Some(pass), components: [].into(), kernels: [].into(), by_kernel: Vec::new() }
        };
        table.cells = cells.map(cell).into();
        table
    }

    #[test]
    fn costs_are_as_unsure_as_the_cells() {
        let mut manifest = manifest(&[1, 2], 64, 2);
        "mtp".clone_into(&mut manifest.drafter.kind);
        let options = Options { resamples: 400, seed: 5 };
        let of = |table: &CostTable, number: fn(&Coefficients) -> f64| {
            let draws = draws(table, &manifest, None, &options).unwrap();
            percentile_interval(&draws.iter().map(|c| vec![c.as_ref().map_or(f64::NAN, number)]).collect::<Vec<_>>(), 0).unwrap()
        };
        // A decode step of 20 µs (18 to 22) and a draft of 4 µs (3 to 5), drawn as wide as that.
        let mut exact = table(&[(1, 2, 20.0), (2, 4, 25.0), (3, 2, 22.0), (3, 6, 30.0)]);
        exact.cells.iter_mut().flat_map(|c| &mut c.pass).for_each(|pass| pass.ci95 = Some([pass.us - 2.0, pass.us + 2.0]));
        exact.draft = Some(Timed { us: 4.0, ci95: Some([3.0, 5.0]) });
        let near = |[low, high]: [f64; 2], expected: [f64; 2]| {
            assert!((low - expected[0]).abs() < 0.3 && (high - expected[1]).abs() < 0.3, "{low} {high}");
        };
        near(of(&exact, |c| c.decode), [18.0, 22.0]);
        near(of(&exact, |c| c.per_draft), [3.0, 5.0]);
        // One time without an interval leaves nothing to draw from; a draft that is not used may have none.
        exact.draft = Some(Timed { us: 4.0, ci95: None });
        assert_eq!(draws(&exact, &manifest, None, &options), None);
        assert!(draws(&exact, &manifest, Some(0.1), &options).unwrap().iter().all(|c| c.is_some_and(|c| c.per_draft == 0.1 * c.decode)));
        exact.cells[1].pass.as_mut().unwrap().ci95 = None;
        assert_eq!(draws(&exact, &manifest, Some(0.1), &options), None);
    }

    /// 600 tables of medians of 15 times: the intervals hold the true cost of two drafts as often as they say, or a little more: those of the
    /// medians are rounded outwards.
    #[test]
    fn intervals_of_tables_hold_the_truth() {
        let mut manifest = manifest(&[1, 2], 64, 2);
        "mtp".clone_into(&mut manifest.drafter.kind);
        // Three rows with five experts in each of two layers.
        let ratio = |c: &Coefficients| (c.passes(1.0, 3.0, 10.0) + c.drafting(1.0, 2.0)) / c.decode;
        let truth = (50.0 + 10.0 + 6.0 + 80.0) / 54.0;
        let held = (0..600).filter(|&seed| {
            let draws = draws(&noisy(seed, 15), &manifest, None, &Options { resamples: 400, seed }).unwrap();
            let [low, high] = percentile_interval(&draws.iter().map(|c| vec![ratio(&c.unwrap())]).collect::<Vec<_>>(), 0).unwrap();
            low <= truth && truth <= high
        });
        let share = held.count() as f64 / 600.0;
        assert!((0.93..=0.985).contains(&share), "{share}");
    }

    #[test]
    fn slopes_are_as_unsure_as_the_cells() {
        // On cells at the corners of a rectangle, two experts and two rows apart, a slope is half the difference of means of two times: its
        // standard deviation is that of a time, 1 µs, over 2; an expert in one of two layers is half of that.
        let mut table = table(&[(1, 2, 50.0), (1, 4, 58.0), (3, 2, 60.0), (3, 4, 68.0)]);
        let options = Options { resamples: 2000, seed: 5 };
        assert_eq!(slope_intervals(&table, &options), None);
        table.cells.iter_mut().flat_map(|c| &mut c.pass).for_each(|pass| pass.ci95 = Some([pass.us - 1.96, pass.us + 1.96]));
        let [per_expert, per_row] = slope_intervals(&table, &options).unwrap();
        let near = |[low, high]: Interval, middle: f64, half: f64| {
            assert!((low - (middle - half)).abs() < 0.12 && (high - (middle + half)).abs() < 0.12, "{low} {high}");
        };
        near(per_expert, 2.0, 0.49);
        near(per_row, 5.0, 0.98);
    }

    #[test]
    fn a_table_of_another_model_is_named() {
        let (own, good) = (manifest(&[1, 2], 64, 2).model, table(&[(1, 2, 10.0)]));
        assert_eq!(fits(&good, &own), Ok(()));
        let mut other = good.clone();
        other.model.experts = 32;
        assert!(fits(&other, &own).unwrap_err().contains("experts 32, the trace's 64"));
        other = good.clone();
        other.model.quantisation = "fp8".into();
        assert!(fits(&other, &own).unwrap_err().contains("format fp8"));
        assert_eq!(slopes(&good), Err("fewer than four cells were measured"));
    }

    proptest! {
        #[test]
        fn planted_slopes_are_found(a in 1.0f64..100.0, b in 0.1f64..9.0, c in 0.0f64..9.0) {
            let cells: Vec<_> = [(1, 2), (2, 2), (2, 4), (4, 2), (4, 5), (4, 8)]
                .map(|(w, u)| (w, u, a + b * f64::from(u) * 2.0 + c * f64::from(w - 1)))
                .into();
            let (per_expert, per_row, r2) = slopes(&table(&cells)).unwrap();
            prop_assert!((per_expert - b).abs() < 1e-6 && (per_row - c).abs() < 1e-6 && r2.unwrap() > 0.999_999);
        }
    }
}
