//! Bytes by counted unions: what windows load of experts, and the ratio that bytes alone would give.

use crate::metric::bytes::StepBytes;
use crate::metric::cost::{ByteModel, WindowBytes};
use crate::metric::report::Report;
use crate::trace::manifest::Manifest;

const ASSUMPTIONS: [&str; 4] = [
    "a step's time is the bytes of weights that it reads: launches, synchronisation, arithmetic and host time are not in it",
    "every weight that a step needs is read once, whatever its rows",
    "recurrent state and attention cache are not in it",
    "drafting and sampling are not in it",
];

/// Bytes of experts by the windows' mean unions U in L layers, B stored bytes an expert:
///
/// per window L U B; per token L U B / τ; plain decoding L k B; wasted L (wasted experts) B
///
/// 40 layers, U = 20, k = 8, B = 3 MB, τ = 2.5: 2.4 GB a window, 0.96 GB a token, 0.96 GB a token by plain decoding.
pub(super) fn of_windows(report: &Report, manifest: &Manifest, tokens_per_step: Option<f64>) -> Option<WindowBytes> {
    let overall = report.overall.as_ref()?;
    let (layers, expert) = (report.layers.iter().filter(|l| l.stats.windows > 0).count() as f64, manifest.model.bytes_per_expert? as f64);
    let per_window = layers * overall.stats.union.as_ref()?.mean * expert;
    (expert > 0.0).then(|| WindowBytes {
        per_window,
        per_token: tokens_per_step.or(report.acceptance.tokens_per_step).map(|tokens| per_window / tokens),
        per_decode_token: layers * f64::from(overall.k) * expert,
        wasted_per_window: overall.stats.wasted_mean.map(|wasted| layers * wasted * expert),
    })
}

/// The ratio of weight bytes: verify with the windows' mean union against decode with k experts a layer. `None` where the bytes
/// of other weights are unknown.
pub(super) fn model(report: &Report, manifest: &Manifest, tokens_per_step: Option<f64>) -> Option<ByteModel> {
    let overall = report.overall.as_ref()?;
    let shape = &manifest.model;
    let bytes = StepBytes {
        per_union: report.layers.len() as f64 * shape.bytes_per_expert? as f64,
        other: shape.bytes_other_per_step? as f64,
        state: 0.0,
        cache: 0.0,
        draft_pass: None,
        experts: usize::from(shape.experts),
        experts_per_token: usize::from(shape.experts_per_token),
    };
    let (rows, union) = (usize::from(overall.stats.rows), overall.stats.union.as_ref()?.mean);
    let verify_ratio = bytes.verify_ratio(rows, union);
    verify_ratio.is_finite().then(|| ByteModel {
        kind: "model".to_owned(),
        decode_bytes: bytes.decode(),
        verify_bytes: bytes.verify(rows, union),
        verify_ratio,
        speedup_if_drafts_are_free: tokens_per_step.or(report.acceptance.tokens_per_step).map(|tokens| tokens / verify_ratio),
        assumptions: ASSUMPTIONS.map(str::to_owned).to_vec(),
    })
}
