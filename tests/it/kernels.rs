//! The CUDA kernels without a GPU: run by the emulator against references of their own, and compiled by the real compiler for
//! every architecture. Nothing here says anything about a device's time.

use crate::report::python;
use assert_cmd::Command;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn build(name: &str, defines: &[&str]) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let output = Command::new(python()).arg(here("tests/emulator/build.py")).arg(&out).args(defines).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    out.join("libcuda.so.1")
}

/// The emulator's `libcuda.so.1`, built out of the kernels' sources. Fails without g++.
pub(crate) fn emulator() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build("emulator", &[]))
}

/// Runs checks of `parity.py`: all of them, or those whose names hold one of `names`.
fn parity(library: &Path, names: &[&str]) {
    let mut parity = Command::new(python());
    parity.arg(here("tests/emulator/parity.py")).arg(library).arg(here("kernels/prebuilt/sm_90a.cubin.gz")).args(names);
    let output = parity.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("device: specprof emulator") && text.contains(": ok ("), "{text}");
}

#[test]
fn every_kernel_agrees_with_its_reference_under_emulation() {
    parity(emulator(), &[]);
}

/// The emulator adds over a warp by a short cut; here it takes the shuffles that a device takes.
#[test]
fn sums_over_warps_are_the_same_by_shuffles() {
    parity(&build("emulator-shuffles", &["-DEMU_SHUFFLES"]), &["norm", "dense", "flash_experts", "flash_mla"]);
}

/// A fault in a kernel must not pass: each of these is put into a copy of the sources, and some check has to see it.
#[test]
fn faults_in_kernels_are_seen() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator-faults");
    let mut faults = Command::new(python());
    let output = faults.arg(here("tests/emulator/faults.py")).arg(&out).arg(here("kernels/prebuilt/sm_90a.cubin.gz")).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
}

/// A kernel with a register too many is named, in whatever image; one with its bound's is not.
#[test]
fn registers_have_a_bound() {
    let script = r#"
import json, sys
sys.path.insert(0, sys.argv[1])
import build
threads, report = build.threads_of(), json.loads((build.PREBUILT / "report.json").read_text())
assert not list(build.over(report, threads))
for kernel, most in ("dense_fp8_r1", 128), ("experts_down_fp8_r4", 168), ("kda_delta", 128), ("moe_plan", 32), ("route", 255):
    assert build.bound(kernel, threads[kernel]) == most, (kernel, build.bound(kernel, threads[kernel]))
    for image in ("sm_80.cubin", "sm_120.cubin"):
        found = report["images"][image]["kernels"][kernel]
        was = found["registers"]
        for registers, wrong in ((most, False), (most + 1, True), (None, True)):
            found["registers"] = registers
            named = list(build.over(report, threads))
            assert [n.startswith(f"{image}: {kernel}: ") for n in named] == [True] * wrong, named
        found["registers"] = was
assert build.TABLE.read_text() == build.table(report, threads)
"#;
    let output = Command::new(python()).args(["-c", script]).arg(here("kernels")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn committed_images_are_those_of_the_sources_and_nothing_spills() {
    let output = Command::new(python()).arg(here("kernels/build.py")).arg("--check").output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
}
