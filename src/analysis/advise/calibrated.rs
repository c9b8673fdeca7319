//! Step costs out of a table that `calibrate` measured.

use super::step_cost::StepCost;
use crate::analysis::cost::regression::{Plane, plane};
use crate::metric::Unit;
use crate::metric::advice::CostSource;
use crate::metric::costs::CostTable;
use crate::trace::manifest::{Manifest, ModelShape};

/// Share of the variance that experts and rows must explain for their costs to be used.
const MIN_R2: f64 = 0.5;

/// What a table's passes cost: µs for each distinct expert in one layer, µs for each further row, and the share of the variance that the
/// two explain; the plane of least squares through the cells' medians.
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
    let points = table.cells.iter().filter_map(|c| Some([f64::from(c.union) - k, f64::from(c.rows) - 1.0, c.pass?.us]));
    let Plane { b, c, r2 } = plane(points)?;
    Ok((b / f64::from(table.model.moe_layers), c, r2))
}

/// Whether a table says something of a trace: both are of a model of the same shape and format.
///
/// # Errors
/// What differs, as a sentence without the files' names.
pub fn fits(table: &CostTable, model: &ModelShape) -> Result<(), String> {
    let m = &table.model;
    let known = |a: Option<u32>, b: Option<u32>| a.is_none() || b.is_none() || a == b;
    let same = [
        (
            "routed layers",
            usize::from(m.moe_layers) == model.moe_layers.len(),
            m.moe_layers.to_string(),
            model.moe_layers.len().to_string(),
        ),
        ("experts", m.experts == model.experts, m.experts.to_string(), model.experts.to_string()),
        (
            "experts a token",
            m.experts_per_token == model.experts_per_token,
            m.experts_per_token.to_string(),
            model.experts_per_token.to_string(),
        ),
        ("the hidden size", known(m.hidden_size, model.hidden_size), word(m.hidden_size), word(model.hidden_size)),
        ("the experts' size", known(m.expert_size, model.expert_size), word(m.expert_size), word(model.expert_size)),
        ("the experts' format", m.quantisation == model.quantisation, m.quantisation.clone(), model.quantisation.clone()),
    ];
    match same.into_iter().find(|(_, same, ..)| !same) {
        Some((what, _, ours, theirs)) => {
            Err(format!("is of another model: {what} {ours}, the trace's {theirs}; calibrate the trace's model"))
        }
        None => Ok(()),
    }
}

fn word(n: Option<u32>) -> String {
    n.map_or_else(|| "unknown".to_owned(), |n| n.to_string())
}

impl StepCost {
    /// The costs that `table` has for the trace of `manifest`, whose windows have `rows` rows.
    ///
    /// The decode step is its cell of one row and k experts; fixed = decode - per_expert k layers - per_row, so that it costs that.
    ///
    /// # Errors
    /// Why it gives none, as half a sentence.
    pub fn calibrated(table: &CostTable, manifest: &Manifest, rows: usize, draft_cost: Option<f64>) -> Result<Self, String> {
        let (per_expert, per_row, r2) = slopes(table)?;
        if per_expert <= 0.0 {
            return Err("the calibrated time per distinct expert is not above 0; calibrate on an idle machine, with more --repeats".into());
        }
        if per_row < 0.0 {
            return Err("the calibrated time per row is below 0; calibrate on an idle machine, with more --repeats".into());
        }
        if let Some(r2) = r2.filter(|&r2| r2 < MIN_R2) {
            return Err(format!(
                "experts and rows explain {:.0} % of the variance of the calibrated times, too little to go by",
                r2 * 100.0
            ));
        }
        let decode = table.decode().and_then(|cell| cell.pass).ok_or("the table has no time of a decode pass")?.us;
        let per_draft = match (draft_cost, manifest.drafter.kind.as_str(), table.draft) {
            (Some(share), ..) => share * decode,
            (None, "mtp", Some(draft)) => draft.us,
            (None, "ngram" | "none", _) => 0.0,
            (None, kind, _) => {
                return Err(format!("the table has no cost of a draft by {kind} (--draft-cost of `advise` stands in for it)"));
            }
        };
        let us = |us: f64| Unit::Microseconds.show(us);
        let mut assumptions = vec![format!(
            "calibrated, {} on {}: {} a decode pass after {} tokens of context, {} for each distinct expert and {} for each further row (least \
             squares over {} cells{}), {} a draft; choosing tokens and commit are not in it",
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
        let experts = f64::from(table.model.experts_per_token) * f64::from(table.model.moe_layers);
        let fixed = decode - per_expert * experts - per_row;
        Ok(Self { source: CostSource::Calibrated, decode, fixed, per_expert, per_row, per_draft, per_block: 0.0, assumptions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::manifest;
    use crate::metric::costs::{Cell, MeasuredModel, SCHEMA, Timed};
    use proptest::prelude::*;

    fn table(cells: &[(u16, u16, f64)]) -> CostTable {
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
        }
    }

    #[test]
    fn worked_example_of_the_docs() {
        let table = table(&[(1, 2, 10.0), (2, 4, 15.0), (3, 2, 12.0), (3, 6, 20.0)]);
        let mut manifest = manifest(&[1, 2], 64, 2);
        "mtp".clone_into(&mut manifest.drafter.kind);
        let cost = StepCost::calibrated(&table, &manifest, 4, None).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        near(cost.per_expert, 1.0);
        near(cost.per_row, 1.0);
        near(cost.fixed, 5.0);
        near(cost.per_draft, 4.0);
        // Two layers with 6 experts each, three rows, two drafts: 20 and 8.
        near(cost.passes(1.0, 3.0, 12.0) + cost.drafting(1.0, 2.0), 28.0);
        assert_eq!(cost.source, CostSource::Calibrated);
        assert!(cost.assumptions[1].contains("another device") && cost.assumptions[2].contains("up to 3 rows: costs of up to 4"));
        assert_eq!(StepCost::calibrated(&table, &manifest, 3, None).unwrap().assumptions.len(), 2);
        near(StepCost::calibrated(&table, &manifest, 3, Some(0.5)).unwrap().per_draft, 5.0);
        "eagle".clone_into(&mut manifest.drafter.kind);
        assert!(StepCost::calibrated(&table, &manifest, 4, None).unwrap_err().contains("a draft by eagle"));
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
