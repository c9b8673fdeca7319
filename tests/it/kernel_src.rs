//! `--kernel-src`: kernels that are built from sources when a run begins. The emulator runs the sources that it was built from whatever it loads, so
//! that what is looked at is the image itself.

use crate::cuda::record;
use crate::kernels::emulator;
use crate::report::python;
use assert_cmd::Command;
use specprof::trace::Trace;
use std::path::{Path, PathBuf};

const DEMO: [&str; 10] =
    ["--model", "demo", "--prompt", "def main():\n", "--max-new-tokens", "8", "--kernels", "off", "--telemetry", "off"];

/// The environment whose NVRTC is the one that made the committed images.
fn environment() -> PathBuf {
    python().parent().unwrap().parent().unwrap().to_owned()
}

/// The folder of that NVRTC.
fn nvrtc() -> PathBuf {
    let script = "import importlib.metadata as m; print(next(f.locate().parent for f in m.files('nvidia-cuda-nvrtc-cu12') if f.name == 'libnvrtc.so.12'))";
    let out = Command::new(python()).args(["-c", script]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    PathBuf::from(String::from_utf8(out.stdout).unwrap().trim())
}

/// The project's own sources, by the compiler of its images, make the image that is part of the program, byte for byte.
#[test]
fn the_project_s_sources_make_the_image_of_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(kernels.join("prebuilt/report.json")).unwrap()).unwrap();
    let environment = environment();
    let own = [&DEMO[..], &["--backend", "cuda", "--out", "own"]].concat();
    let built = [&DEMO[..], &["--backend", "cuda", "--out", "built", "--kernel-src", kernels.to_str().unwrap()]].concat();
    for args in [&own, &built] {
        let (code, _, stderr) = record(dir.path(), args, &[("VIRTUAL_ENV", environment.to_str().unwrap()), ("SPECPROF_NVRTC", "")]);
        assert_eq!(code, 0, "{stderr}");
    }
    let [own, built] = ["own", "built"].map(|name| Trace::open(&dir.path().join(name)).unwrap());
    assert_eq!(own.manifest().token_hash, built.manifest().token_hash);
    let said = |trace: &Trace| trace.manifest().warnings.iter().find(|w| w.code == "kernels_from_sources").map(|w| w.message.clone());
    assert_eq!(said(&own), None);
    let (said, hash) = (said(&built).unwrap(), report["images"]["sm_90a.cubin"]["sha256"].as_str().unwrap());
    assert!(said.contains("by NVRTC 12.9 for sm_90a") && said.contains(hash), "{said}: {hash}");
}

#[test]
fn sources_that_do_not_compile_are_refused_with_the_compiler_s_log() {
    let dir = tempfile::tempdir().unwrap();
    let sources = dir.path().join("sources");
    std::fs::create_dir(&sources).unwrap();
    std::fs::write(sources.join("broken.cu"), "#include \"one.cuh\"\nextern \"C\" __global__ void broken() {\n    one(two);\n}\n").unwrap();
    std::fs::write(sources.join("one.cuh"), "static __device__ void one(int) {}\n").unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/nano");
    let (checkpoint, set) = (golden.join("checkpoint"), golden.join("golden.safetensors"));
    let (checkpoint, set) = (checkpoint.to_str().unwrap(), set.to_str().unwrap());
    for command in [
        &[&["record"][..], &DEMO, &["--out", "t"]].concat()[..],
        &["calibrate", "--model", "demo", "--rows", "1", "--repeats", "1", "--context", "4"],
        &["model", checkpoint, "--golden", set],
    ] {
        let mut specprof = Command::cargo_bin("specprof").unwrap();
        specprof.current_dir(dir.path()).args(command).args(["--backend", "cuda", "--kernel-src", "sources"]);
        let out = specprof.env("LD_LIBRARY_PATH", emulator().parent().unwrap()).env("SPECPROF_NVRTC", nvrtc()).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!((out.status.code(), stderr.lines().count()), (Some(3), 1), "{stderr}");
        for words in ["--kernel-src: sources: NVRTC 12.9", "for sm_90a", "broken.cu(3): error: identifier \"two\" is undefined"] {
            assert!(stderr.contains(words), "{words}: {stderr}");
        }
        assert!(out.stdout.is_empty() && !dir.path().join("t").exists());
    }
}

#[test]
fn what_cannot_be_built_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    std::fs::create_dir(dir.path().join("one")).unwrap();
    std::fs::write(dir.path().join("one/one.cu"), "int one;").unwrap();
    for (code, backend, sources, library, words) in [
        (2, "cpu", "one", "", "--kernel-src goes with --backend cuda"),
        (2, "cuda", "none", "", "--kernel-src none: is no folder"),
        (2, "cuda", "one/one.cu", "", "is no folder"),
        (3, "cuda", "empty", "", "empty: has no .cu"),
        (3, "cuda", "one", "/nowhere/libnvrtc.so", "SPECPROF_NVRTC names /nowhere/libnvrtc.so"),
        (3, "cuda", "one", ".", "SPECPROF_NVRTC names ., where there is no libnvrtc"),
    ] {
        let args = [&DEMO[..], &["--backend", backend, "--kernel-src", sources, "--out", "t"]].concat();
        let (found, stdout, stderr) = record(dir.path(), &args, &[("SPECPROF_NVRTC", library)]);
        assert_eq!((found, stdout.as_str(), stderr.lines().count()), (code, "", 1), "{words}: {stderr}");
        assert!(stderr.contains(words) && !dir.path().join("t").exists(), "{words}: {stderr}");
    }
}
