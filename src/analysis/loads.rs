//! How rows load the experts in a trace without windows: from its rows, or from counts alone.

use super::AnalysisError;
use super::counts::LoadCounts;
use super::pass::{PassCounts, Plan};
use super::source::{RouteSlice, RouteSource};
use crate::trace::Phase;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Counts every row of the target whatever its step did, prefill rows once more on their own, and the draft module's rows.
///
/// # Errors
/// When the routes cannot be read, or name a step, layer or expert that the trace does not have.
pub fn of_rows(routes: &dyn RouteSource, plan: &Plan<'_>) -> Result<PassCounts, AnalysisError> {
    let nothing = || PassCounts::new(plan.layers.len());
    let unit = |mut counts: PassCounts, unit: usize| {
        routes.read(unit, &mut |slice| add(&mut counts, plan, &slice))?;
        Ok(counts)
    };
    let both = |mut a: PassCounts, b: PassCounts| {
        a.merge(b);
        Ok(a)
    };
    (0..routes.units()).into_par_iter().try_fold(nothing, unit).try_reduce(nothing, both)
}

/// Loads from counts by layer and expert. Without k, the number of rows is not known and 0.
///
/// # Errors
/// When a layer is none of the model's, or has more experts.
pub fn of_counts(plan: &Plan<'_>, counts: Option<&BTreeMap<u16, Vec<u64>>>) -> Result<PassCounts, AnalysisError> {
    let mut all = PassCounts::new(plan.layers.len());
    for (&layer, by_expert) in counts.into_iter().flatten() {
        let load = plan.slot(layer).and_then(|slot| all.load.get_mut(slot)).filter(|_| by_expert.len() <= plan.experts);
        let load = load.ok_or_else(|| AnalysisError::Shape { reason: format!("expert_counts do not fit the model in layer {layer}") })?;
        let choices = by_expert.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
        load.rows = choices.checked_div(plan.k as u64).unwrap_or(0);
        load.by_expert.clone_from(by_expert);
        load.by_expert.resize(plan.experts, 0);
    }
    Ok(all)
}

fn add(counts: &mut PassCounts, plan: &Plan<'_>, slice: &RouteSlice<'_>) -> Result<(), AnalysisError> {
    let wrong = |at: usize, reason: String| AnalysisError::Routes {
        step: slice.step_id.get(at).copied().unwrap_or(0),
        layer: slice.layer.get(at).copied().unwrap_or(0),
        reason,
    };
    if !slice.is_rectangular() || slice.ids.len() != plan.k {
        return Err(wrong(0, format!("{} id columns where the manifest says {} experts per token", slice.ids.len(), plan.k)));
    }
    // The step of the row before, and whether it was a prefill.
    let mut step: Option<(u32, usize, bool)> = None;
    for (at, ((&layer, &draft), &id)) in slice.layer.iter().zip(slice.draft).zip(slice.step_id).enumerate() {
        let (_, _, prefill) = match step {
            Some(same) if same.0 == id => same,
            _ => {
                let found = plan.steps.find(id, step.map_or(0, |(_, at, _)| at));
                let known = found.and_then(|at| Some((id, at, plan.steps.steps.get(at)?.phase == Phase::Prefill)));
                *step.insert(known.ok_or_else(|| wrong(at, "the step is not in `steps`".into()))?)
            }
        };
        let row = |load: &mut LoadCounts| -> Result<(), AnalysisError> {
            load.by_expert.resize(plan.experts, 0);
            load.rows += 1;
            slice.ids.iter().try_for_each(|column| {
                let count = column.get(at).and_then(|&id| load.by_expert.get_mut(usize::from(id)));
                *count.ok_or_else(|| wrong(at, format!("an expert id is not below {}", plan.experts)))? += 1;
                Ok(())
            })
        };
        if draft {
            if plan.draft_layers.binary_search(&layer).is_err() {
                return Err(wrong(at, "the manifest does not list it as a routed layer of the drafter".into()));
            }
            row(counts.draft.entry(layer).or_default())?;
            continue;
        }
        let load = plan.slot(layer).and_then(|slot| counts.load.get_mut(slot));
        row(load.ok_or_else(|| wrong(at, "the manifest does not list it as a routed layer of the target".into()))?)?;
        if prefill {
            row(counts.prefill.entry(layer).or_default())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::Memory;
    use crate::trace::manifest::WindowCompleteness;

    fn trace() -> Memory {
        let mut trace = Memory::new(&[1, 2], 6, 2);
        trace.verify(0, 0, &[vec![vec![0, 1], vec![0, 2]], vec![vec![3, 4], vec![3, 5]]]);
        trace.verify(0, 1, &[vec![vec![0, 5], vec![0, 2]], vec![vec![3, 4], vec![3, 5]]]);
        trace.manifest.window_completeness = WindowCompleteness::None;
        trace
    }

    #[test]
    fn rows_load_experts_whatever_their_steps_did() {
        let mut trace = trace();
        trace.steps[0].phase = Phase::Prefill;
        let report = trace.report();
        let of = |at: usize| report.layers[at].load_by_expert.clone().unwrap();
        assert_eq!((of(0), of(1)), (vec![4, 1, 2, 0, 0, 1], vec![0, 0, 0, 4, 2, 2]));
        assert_eq!(report.prefill.as_ref().unwrap().layers.iter().map(|l| (l.layer, l.rows)).collect::<Vec<_>>(), [(1, 2), (2, 2)]);
        assert!(report.overall.is_none() && report.layers.iter().all(|l| l.stats.windows == 0));
        let warning = report.warnings.iter().find(|w| w.code == "no_windows").unwrap();
        assert!(warning.message.contains("loads are of all rows"), "{}", warning.message);
    }

    #[test]
    fn rows_that_the_manifest_does_not_know_are_refused() {
        let message = |change: &dyn Fn(&mut Memory)| {
            let mut trace = trace();
            change(&mut trace);
            trace.try_report().unwrap_err().to_string()
        };
        assert!(message(&|t| t.routes[1].layer = 3).contains("layer 3"));
        assert!(message(&|t| t.routes[1].ids[0] = 6).contains("not below 6"));
        assert!(message(&|t| t.routes[1].draft = true).contains("drafter"));
        assert!(message(&|t| t.steps.truncate(1)).contains("not in `steps`"));
    }

    #[test]
    fn counts_alone_are_loads() {
        let mut trace = trace();
        trace.routes.clear();
        trace.manifest.window_completeness = WindowCompleteness::Counts;
        trace.manifest.expert_counts = Some(BTreeMap::from([(1, vec![4, 0, 0, 0, 0, 4]), (2, vec![1, 1])]));
        let report = trace.report();
        let load = report.layers[0].load.unwrap();
        assert_eq!((load.effective_experts, load.max_over_mean), (2.0, 3.0));
        assert_eq!(report.layers[1].load_by_expert.as_deref(), Some(&[1, 1, 0, 0, 0, 0][..]));
        // Without k nobody knows of how many rows the counts are, but what was chosen is known.
        trace.manifest.model.experts_per_token = 0;
        assert!(trace.report().layers[0].load_by_expert.is_some());
        trace.manifest.expert_counts = Some(BTreeMap::from([(3, vec![1])]));
        assert!(trace.try_report().unwrap_err().to_string().contains("layer 3"));
        trace.manifest.expert_counts = Some(BTreeMap::from([(1, vec![1; 7])]));
        assert!(trace.try_report().unwrap_err().to_string().contains("layer 1"));
    }
}
