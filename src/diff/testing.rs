//! A small report for the tests of this folder.

use crate::analysis::analyze;
use crate::metric::Report;
use crate::trace::Synth;
use std::sync::OnceLock;

/// Three requests, three layers, windows of 4 rows; made once.
pub(super) fn report() -> Report {
    static REPORT: OnceLock<Report> = OnceLock::new();
    let make = || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small");
        Synth { requests: 3, verify_steps: 12, layers: vec![1, 2, 4], ..Synth::default() }.write(&path).unwrap();
        analyze(&path, &crate::analysis::Options::default()).unwrap()
    };
    REPORT.get_or_init(make).clone()
}
