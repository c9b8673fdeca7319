//! What a step costs by its rows, experts and drafts.
//!
//! cost(W, X, d) = fixed + per_expert X + per_row W + per_block + per_draft d
//!
//! with W rows, X distinct experts summed over the layers and d drafts made. Drafters that make one draft after the other have no
//! per_block; those that make a block of drafts in one pass, whatever the window's length, have no per_draft. The unit is bytes or nanoseconds and drops out of every
//! ratio. A step without drafts is a decode step and costs what a decode step costs.

use crate::analysis::cost::MeasuredTimes;
use crate::metric::advice::CostSource;
use crate::metric::bounds::FEW_DECODE_STEPS;
use crate::metric::cost::TimeSource;
use crate::metric::{Report, Unit};
use crate::trace::manifest::Manifest;

/// What a step costs by its parts, all in one unit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Coefficients {
    /// A decode step.
    pub decode: f64,
    /// What every verify step costs.
    pub fixed: f64,
    /// One distinct expert in one layer.
    pub per_expert: f64,
    /// One row.
    pub per_row: f64,
    /// One draft.
    pub per_draft: f64,
    /// All drafts of a step together, when their number changes nothing.
    pub per_block: f64,
    /// Whether windows of the recorded length alone have a cost: no time of an expert can be told, so `per_expert` is 0 and every window costs what
    /// the mean one does.
    pub whole_only: bool,
}

/// The coefficients and where they are from.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// Where they are from.
    pub source: CostSource,
    /// The coefficients.
    pub coefficients: Coefficients,
    /// What they take for granted, in sentences.
    pub assumptions: Vec<String>,
    /// Why windows shorter than the recorded ones have no cost, as half a sentence; `None` where they have.
    pub shorter_unknown_because: Option<&'static str>,
}

/// The verify steps that measured times are of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recorded {
    /// Drafts, γ.
    pub drafts: f64,
    /// Whether they are made as a block, in one pass.
    pub block: bool,
    /// Distinct experts of a decode step, summed over the layers.
    pub decode_experts: f64,
    /// Cost of a draft in decode steps, where it was given.
    pub draft_cost: Option<f64>,
}

impl Coefficients {
    /// The costs by which a decode step and the mean verify step take what was measured, the latter touching `experts` distinct experts
    /// summed over the layers.
    ///
    /// With D and V the mean times of whole decode and verify steps, D' and V' of their passes and b the time of an expert:
    ///
    /// * per_draft = ((V - D) - (V' - D')) / γ: drafting, sampling and commit; of a block, per_block = the whole of it
    /// * per_row = (V' - D' - b (experts - decode_experts)) / γ: what is left of the pass
    /// * fixed = D - b decode_experts - per_row
    ///
    /// so that a decode step costs D and the mean verify step V, whatever b is. D = 100, V = 190, D' = 80, V' = 140, b = 2, 20 experts of 8
    /// in three drafts: per_draft = 10, per_row = (60 - 24) / 3 = 12, fixed = 72.
    pub fn through(times: &MeasuredTimes, recorded: &Recorded, experts: f64) -> Self {
        let Recorded { drafts, block, decode_experts, draft_cost } = *recorded;
        let MeasuredTimes { decode_step: decode, per_expert, .. } = *times;
        let (step, pass) = (times.verify_step - decode, times.verify - times.decode);
        let per_row = (pass - per_expert * (experts - decode_experts)) / drafts;
        let (per_draft, per_block) = match draft_cost {
            Some(share) => (share * decode, 0.0),
            None if block => (0.0, step - pass),
            None => ((step - pass) / drafts, 0.0),
        };
        let fixed = decode - per_expert * decode_experts - per_row;
        Self { decode, fixed, per_expert, per_row, per_draft, per_block, whole_only: false }
    }

    /// [`Coefficients::through`] times without that of an expert: costs of a decode step and of a window of the recorded length, which is V
    /// whatever experts it has.
    ///
    /// D = 100, V = 190 and three drafts: a window of three drafts costs 190, one of two nobody knows what.
    pub fn of_whole_windows(times: &MeasuredTimes, recorded: &Recorded) -> Self {
        let times = MeasuredTimes { per_expert: 0.0, ..*times };
        Self { whole_only: true, ..Self::through(&times, recorded, recorded.decode_experts) }
    }

    /// Whether they are costs at all: finite, a decode step and an expert above 0. What a row adds may come out below 0 where it adds nothing.
    pub fn are_costs(&self) -> bool {
        let Self { decode, fixed, per_expert, per_row, per_draft, per_block, whole_only } = *self;
        let finite = [decode, fixed, per_expert, per_row, per_draft, per_block].iter().all(|x| x.is_finite());
        finite && decode > 0.0 && (per_expert > 0.0 || whole_only)
    }

    /// Cost of verify passes without drafting: their number, and sums over them of rows and experts.
    pub fn passes(&self, steps: f64, rows: f64, experts: f64) -> f64 {
        self.fixed * steps + self.per_row * rows + self.per_expert * experts
    }

    /// Cost of drafting in so many steps, of so many drafts in all.
    pub fn drafting(&self, steps: f64, drafts: f64) -> f64 {
        self.per_block * steps + self.per_draft * drafts
    }
}

impl StepCost {
    /// The model of bytes: a step reads every expert that it touches and all other weights once, a draft its own weights.
    ///
    /// `layers` is the number of routed layers that have windows. `draft_cost` is what one draft costs in decode steps, where the
    /// manifest does not tell. `None` when the bytes of a step or of a draft are unknown.
    pub fn model(manifest: &Manifest, layers: u32, draft_cost: Option<f64>) -> Option<Self> {
        let model = &manifest.model;
        let other = model.bytes_other_per_step.filter(|&bytes| bytes > 0)? as f64;
        let per_expert = model.bytes_per_expert.filter(|&bytes| bytes > 0)? as f64;
        let decode = other + per_expert * f64::from(model.experts_per_token) * f64::from(layers);
        let mut assumptions = vec![format!(
            "model, not measured: a step costs the bytes of weights that it reads, {} for each distinct expert and {} besides; \
             state, cache, activations, arithmetic, launches and host time are not in it",
            Unit::Bytes.show(per_expert),
            Unit::Bytes.show(other)
        )];
        let per_draft = match (draft_cost, manifest.drafter.bytes_per_draft) {
            (Some(share), _) => {
                assumptions.push(format!("a draft costs {share} decode steps, as given"));
                share * decode
            }
            (None, Some(bytes)) => {
                assumptions.push(format!("a draft reads {}", Unit::Bytes.show(bytes as f64)));
                bytes as f64
            }
            (None, None) => return None,
        };
        let coefficients = Coefficients { decode, fixed: other, per_expert, per_draft, ..Coefficients::default() };
        Some(Self { source: CostSource::Model, coefficients, assumptions, shorter_unknown_because: None })
    }

    /// Keys of the manifest that the model of bytes needs and that are unknown; a draft's is not needed with `draft_cost`.
    pub fn missing(manifest: &Manifest, draft_cost: Option<f64>) -> Vec<&'static str> {
        let known = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes > 0);
        let keys = [
            ("bytes_per_expert", known(manifest.model.bytes_per_expert)),
            ("bytes_other_per_step", known(manifest.model.bytes_other_per_step)),
            ("bytes_per_draft", draft_cost.is_some() || manifest.drafter.bytes_per_draft.is_some()),
        ];
        keys.into_iter().filter(|(_, known)| !known).map(|(key, _)| key).collect()
    }

    /// The measured times of a report whose verify steps are `recorded`, with `experts` distinct experts on average, summed over the layers:
    /// [`Coefficients::through`] them, or [`Coefficients::of_whole_windows`] where the cost of an expert is unknown or not above 0: the recorded length needs none.
    ///
    /// # Errors
    /// Why measured times give no costs, as half a sentence: a verify ratio is unknown, or fewer than ten decode steps stand behind it.
    pub fn measured(report: &Report, recorded: &Recorded, experts: f64) -> Result<Self, String> {
        let cost = report.cost.as_ref().ok_or("the trace has no times of steps")?;
        let clock = cost.source.ok_or("the trace has no times of steps")?;
        let decodes = cost.compared_decode_steps();
        if decodes < FEW_DECODE_STEPS {
            let why = format!("{decodes} decode steps at the verify steps' context lengths are too few, {FEW_DECODE_STEPS} are needed");
            return Err(why + " (record with --baseline-steps, or give --baseline)");
        }
        let source = match clock {
            TimeSource::Cpu => "wall times of the CPU engine",
            TimeSource::Device => "the device's times",
            TimeSource::Host => "the host's times around the device's passes",
        };
        let (Some(decode_step), Some(decode)) = (cost.decode_step_us, cost.decode_us) else {
            return Err("the time of a decode step is unknown".into());
        };
        let (Some(verify_ratio), Some(step_ratio)) = (cost.verify_ratio, cost.step_ratio) else {
            return Err("the verify ratio is unknown".into());
        };
        let slope = report.overall.as_ref().and_then(|o| o.cost.as_ref()?.us_per_expert);
        let (per_expert, shorter_unknown_because) = match slope {
            None => (0.0, Some("the time per distinct expert is unknown")),
            Some(slope) if slope <= 0.0 => (0.0, Some("the fitted time per distinct expert is not above 0")),
            Some(slope) => (slope, None),
        };
        let (verify, verify_step) = (decode * verify_ratio, decode_step * step_ratio);
        let times = MeasuredTimes { verify, decode, verify_step, decode_step, per_expert };
        let us = |us: f64| Unit::Microseconds.show(us);
        if let Some(why) = shorter_unknown_because {
            // A cost of drafts that was given would contradict the ratio that was measured.
            let recorded = Recorded { draft_cost: None, ..*recorded };
            let assumptions = vec![format!(
                "measured, {source}: {} a decode step, {} a verify step, whatever its experts; {why}, so what windows of other lengths cost is \
                 not told: record with them (`sweep`), or give a table of `calibrate` (--costs)",
                us(decode_step),
                us(verify_step)
            )];
            let coefficients = Coefficients::of_whole_windows(&times, &recorded);
            return Ok(Self { source: CostSource::Measured, coefficients, assumptions, shorter_unknown_because });
        }
        let coefficients = Coefficients::through(&times, recorded, experts);
        let mut assumptions = vec![format!(
            "measured, {source}: {} a decode step, {} a verify step; {} of a pass for each distinct expert (least squares), the rest of it in \
             proportion to the further rows, drafting and commit {}",
            us(decode_step),
            us(verify_step),
            us(per_expert),
            if coefficients.per_block == 0.0 { "to the drafts" } else { "the same for any number of drafts, which are made as one block" }
        )];
        assumptions.extend(recorded.draft_cost.map(|share| format!("a draft costs {share} decode steps, as given")));
        Ok(Self { source: CostSource::Measured, coefficients, assumptions, shorter_unknown_because })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::memory::manifest;
    use proptest::prelude::*;

    /// Two layers, k = 2: 12 288 bytes an expert, 4 * 12 288 other ones, so that a decode step reads eight experts' worth.
    fn known() -> Manifest {
        let mut manifest = manifest(&[1, 2], 6, 2);
        manifest.model.bytes_other_per_step = Some(4 * 12_288);
        manifest.drafter.bytes_per_draft = Some(12_288);
        manifest
    }

    #[test]
    fn worked_example() {
        let cost = StepCost::model(&known(), 2, None).unwrap();
        assert_eq!((cost.source, cost.coefficients.decode / 12_288.0), (CostSource::Model, 8.0));
        // A verify step of 3 rows with unions of 4 and 5 and 2 drafts: 4 + 9 + 2 = 15.
        assert_eq!((cost.coefficients.passes(1.0, 3.0, 9.0) + cost.coefficients.drafting(1.0, 2.0)) / 12_288.0, 15.0);
        // Half a decode step a draft.
        assert_eq!(StepCost::model(&known(), 2, Some(0.5)).unwrap().coefficients.per_draft / 12_288.0, 4.0);
        assert!(cost.assumptions[0].starts_with("model, not measured"));
    }

    #[test]
    fn worked_example_of_measured_times() {
        let mut trace = crate::analysis::tests::memory::Memory::new(&[1, 2], 64, 4);
        trace.verify(0, 1, &[vec![vec![0, 1, 2, 3]; 4], vec![vec![0, 1, 2, 3]; 4]]);
        let mut report = trace.report();
        let measured = |report: &Report, block, draft_cost| {
            StepCost::measured(report, &Recorded { drafts: 3.0, block, decode_experts: 8.0, draft_cost }, 20.0)
        };
        assert_eq!(measured(&report, false, None), Err("the trace has no times of steps".into()));
        let cost = report.cost.as_mut().unwrap();
        (cost.source, cost.decode_us, cost.decode_step_us) = (Some(TimeSource::Cpu), Some(80.0), Some(100.0));
        (cost.verify_ratio, cost.step_ratio) = (Some(1.75), Some(1.9));
        cost.contexts = vec![crate::metric::cost::ContextBucket { from: 0, to: 63, verify_steps: 1, decode_steps: 10 }];
        let fit = |us_per_expert| Some(crate::metric::cost::ExpertCost { us_per_expert, ..Default::default() });
        // Without a cost of experts a window of three drafts costs its 190, whatever experts it has, and no other costs anything known.
        for (slope, says) in [(None, "distinct expert is unknown"), (Some(-0.2), "is not above 0")] {
            report.overall.as_mut().unwrap().cost = fit(slope);
            for given in [None, Some(0.3)] {
                let cost = measured(&report, false, given).unwrap();
                assert!(cost.coefficients.whole_only && cost.coefficients.are_costs());
                assert!(cost.shorter_unknown_because.unwrap().contains(says) && cost.assumptions[0].contains(says));
                for experts in [8.0, 20.0, 25.0] {
                    let spent = cost.coefficients.passes(1.0, 4.0, experts) + cost.coefficients.drafting(1.0, 3.0);
                    assert!((spent - 190.0).abs() < 1e-9, "{spent}");
                }
            }
        }
        report.cost.as_mut().unwrap().contexts[0].decode_steps = 9;
        assert!(measured(&report, false, None).unwrap_err().starts_with("9 decode steps"));
        report.cost.as_mut().unwrap().contexts[0].decode_steps = 10;
        report.overall.as_mut().unwrap().cost = fit(Some(2.0));
        let StepCost { coefficients: cost, assumptions, .. } = measured(&report, false, None).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        near(cost.per_draft, 10.0);
        near(cost.per_row, 12.0);
        near(cost.fixed, 72.0);
        near(cost.passes(1.0, 4.0, 20.0) + cost.drafting(1.0, 3.0), 190.0);
        near(cost.passes(1.0, 1.0, 8.0), 100.0);
        near(measured(&report, false, Some(0.3)).unwrap().coefficients.per_draft, 30.0);
        // A block costs its 30 however many drafts are verified.
        let StepCost { coefficients: block, assumptions: of_blocks, .. } = measured(&report, true, None).unwrap();
        near(block.drafting(1.0, 1.0), 30.0);
        near(block.passes(1.0, 4.0, 20.0) + block.drafting(1.0, 3.0), 190.0);
        assert!(of_blocks[0].contains("one block") && assumptions[0].ends_with("to the drafts"));
        near(measured(&report, true, Some(0.3)).unwrap().coefficients.drafting(1.0, 2.0), 60.0);
    }

    #[test]
    fn unknown_bytes_give_no_cost() {
        let mut manifest = known();
        manifest.drafter.bytes_per_draft = None;
        assert_eq!(StepCost::model(&manifest, 2, None), None);
        assert_eq!(StepCost::missing(&manifest, None), ["bytes_per_draft"]);
        assert!(StepCost::missing(&manifest, Some(0.1)).is_empty());
        assert!(StepCost::model(&manifest, 2, Some(0.0)).is_some());
        manifest.model.bytes_other_per_step = None;
        assert_eq!(StepCost::model(&manifest, 2, Some(0.1)), None);
        assert_eq!(StepCost::missing(&manifest, Some(0.1)), ["bytes_other_per_step"]);
    }

    proptest! {
        #[test]
        fn a_decode_step_and_the_mean_verify_step_cost_what_they_took(
            (verify, decode, over, more) in (1.0f64..900.0, 1.0f64..90.0, 0.0f64..90.0, 0.0f64..90.0), per_expert in -5.0f64..50.0,
            drafts in 1u16..9, block in any::<bool>(), experts in 8.0f64..99.0,
        ) {
            let times = MeasuredTimes { verify, decode, verify_step: verify + over + more, decode_step: decode + over, per_expert };
            let drafts = f64::from(drafts);
            let recorded = Recorded { drafts, block, decode_experts: 8.0, draft_cost: None };
            let cost = Coefficients::through(&times, &recorded, experts);
            let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * (1.0 + a.abs() + experts * per_expert.abs());
            prop_assert!(close(cost.passes(1.0, 1.0, 8.0), times.decode_step) && close(cost.decode, times.decode_step));
            prop_assert!(close(cost.passes(1.0, drafts + 1.0, experts) + cost.drafting(1.0, drafts), times.verify_step));
            prop_assert_eq!(cost.are_costs(), per_expert > 0.0);
            // A draft less is cheaper by its row, its experts and its own time, a block's as a whole.
            let shorter = cost.passes(1.0, drafts, 8.0) + cost.drafting(1.0, drafts - 1.0);
            let saved = per_expert * (experts - 8.0) + cost.per_row + cost.per_draft;
            prop_assert!(close(times.verify_step - shorter, saved));
        }
    }
}
