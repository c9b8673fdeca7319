//! `record --backend cuda` on the emulator: the same tokens, drafts and routes as the CPU engine, and no device's times.

use crate::kernels::emulator;
use crate::quantised::rewritten;
use assert_cmd::Command;
use specprof::trace::{Component, Module, Trace, validate};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How far a gate weight of one engine may be from the other's: sums in another order.
const WEIGHT_TOLERANCE: f32 = 1e-5;

/// Runs `record` on the emulator's driver; gives exit code, stdout and stderr.
fn record(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.current_dir(dir).arg("record").args(args).env("LD_LIBRARY_PATH", emulator().parent().unwrap());
    let out = command.envs(variables.iter().copied()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

/// Records the same on both engines; gives both traces.
fn both(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> (Trace, Trace) {
    let [cpu, cuda] = ["cpu", "cuda"].map(|backend| {
        let all = [args, &["--router-probs", "--force", "--telemetry", "off", "--backend", backend, "--out", backend]].concat();
        let (code, _, stderr) = record(dir, &all, variables);
        assert_eq!(code, 0, "{backend}: {stderr}");
        Trace::open(&dir.join(backend)).unwrap()
    });
    (cpu, cuda)
}

/// Step, layer, row, module and ids of every routed row, and their weights.
type Routes = Vec<((u32, u16, u16, bool, Vec<u16>), Vec<f32>)>;

fn routes(trace: &Trace) -> Routes {
    let mut all = Vec::new();
    for unit in trace.route_units().unwrap() {
        let mut reader = unit.read(true);
        while let Some(b) = reader.next_batch().unwrap() {
            let weights = b.weights.unwrap();
            for i in 0..b.step_id.len() {
                let ids = b.ids.iter().map(|column| column[i]).collect();
                all.push(((b.step_id[i], b.layer[i], b.row[i], b.draft[i], ids), weights.iter().map(|column| column[i]).collect()));
            }
        }
    }
    all
}

/// Everything but times is the same.
fn compare(name: &str, cpu: &Trace, cuda: &Trace) {
    for trace in [cpu, cuda] {
        let validation = validate(trace).unwrap();
        assert_eq!(validation.failed(), 0, "{name}: {validation:#?}");
    }
    let (a, b) = (cpu.steps_with_details().unwrap(), cuda.steps_with_details().unwrap());
    assert!(a.len() > 5, "{name}: {} steps", a.len());
    assert_eq!((&a.phase, &a.rows, &a.accepted, &a.context_len), (&b.phase, &b.rows, &b.accepted, &b.context_len), "{name}");
    for i in 0..a.len() {
        assert_eq!(a.input_tokens.get(i), b.input_tokens.get(i), "{name}: step {i}");
        assert_eq!(a.emitted_tokens.get(i), b.emitted_tokens.get(i), "{name}: step {i}");
    }
    assert_eq!(cpu.manifest().token_hash, cuda.manifest().token_hash, "{name}");
    let (a, b) = (routes(cpu), routes(cuda));
    assert!(a.len() > 100 && a.len() == b.len(), "{name}: {} and {} routed rows", a.len(), b.len());
    for (a, b) in a.iter().zip(&b) {
        assert_eq!(a.0, b.0, "{name}");
        for (x, y) in a.1.iter().zip(&b.1) {
            assert!((x - y).abs() <= WEIGHT_TOLERANCE, "{name}: weights of {:?}: {:?} {:?}", a.0, a.1, b.1);
        }
    }
}

/// Every step has its launches, each with what it works for; what is routed has a plan and an expert product in each routed layer.
fn every_launch_is_labelled(name: &str, trace: &Trace) {
    let (model, steps, kernels) = (&trace.manifest().model, trace.steps().unwrap(), trace.kernels().unwrap());
    let mut seen = BTreeSet::new();
    for (i, &id) in steps.step_id.iter().enumerate() {
        let own: Vec<_> = kernels.iter().filter(|(step, _)| *step == id).map(|(_, kernel)| kernel).collect();
        for kernel in own.iter().filter(|k| !k.name.starts_with("cpu.")) {
            assert!(kernel.grid.is_some() && kernel.block.is_some() && kernel.shared_bytes.is_some(), "{name}: {kernel:?}");
            assert!(kernel.component != Component::Other, "{name}: {kernel:?}");
            let inside = !matches!(kernel.component, Component::Embedding | Component::Head | Component::Commit);
            let last = kernel.component == Component::Norm && kernel.layer.is_none();
            assert!(kernel.module == Module::Draft || last || kernel.layer.is_some() == inside, "{name}: {kernel:?}");
            seen.insert(kernel.name.to_string());
        }
        // Passes of 16 rows.
        let passes = usize::from(steps.rows[i]).div_ceil(16);
        for layer in 0..model.layers {
            let plans = own.iter().filter(|k| k.module == Module::Target && k.layer == Some(layer) && k.name == "moe_plan").count();
            assert_eq!(plans, if model.moe_layers.contains(&layer) { passes } else { 0 }, "{name}: step {id}, layer {layer}");
        }
        let commits = own.iter().filter(|k| k.name == "kda_commit").count();
        assert_eq!(commits, passes, "{name}: step {id}");
        let target: Vec<_> = own.iter().filter(|k| k.module == Module::Target && !k.name.starts_with("cpu.")).collect();
        assert!(target.windows(2).all(|pair| pair[0].end_ns <= pair[1].begin_ns), "{name}: step {id}: kernels of one stream overlap");
        assert!(
            target[0].begin_ns >= steps.host_begin_ns[i] && target[target.len() - 1].end_ns <= steps.host_end_ns[i],
            "{name}: step {id}"
        );
    }
    assert!(seen.len() >= 20, "{name}: {seen:?}");
}

const DEMO: [&str; 8] =
    ["--model", "demo", "--prompt", "def main():\n", "--prompt", "class Reader:\n    def read(self", "--max-new-tokens", "24"];

#[test]
fn the_built_in_model_decodes_as_on_the_cpu_and_says_that_it_was_emulated() {
    let dir = tempfile::tempdir().unwrap();
    for (name, more) in [
        ("windows of 4", &["--baseline-steps", "6"][..]),
        ("windows of 16", &["--draft-len", "15", "--ignore-eos"]),
        ("sampled", &["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--seed", "3"]),
        ("plain", &["--draft", "none"]),
        ("lookup, long prompt passes", &["--draft", "ngram", "--prefill-chunk", "20"]),
    ] {
        let (cpu, cuda) = both(dir.path(), &[&DEMO[..], more].concat(), &[]);
        compare(name, &cpu, &cuda);
        let manifest = cuda.manifest();
        assert!(manifest.emulated && manifest.complete && manifest.engine.starts_with("specprof-cuda"), "{manifest:?}");
        assert_eq!((manifest.device.kind.as_str(), manifest.device.name.as_str()), ("cuda", "specprof emulator"));
        assert!(manifest.warnings.iter().any(|w| w.code == "kernels_timed_by_events"));
        every_launch_is_labelled(name, &cuda);
        assert!(cuda.steps().unwrap().device_ns.iter().all(Option::is_none), "times of an emulated device");
        assert!(!cpu.manifest().emulated);
    }
    let report =
        Command::cargo_bin("specprof").unwrap().current_dir(dir.path()).args(["report", "cuda", "--format", "json"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(json["run"]["emulated"], true);
    let attribution = &json["cost"]["attribution"];
    assert!(attribution.is_null() || attribution.as_array().is_some_and(Vec::is_empty), "times of an emulated device: {attribution}");
    assert!(
        json["cost"]["verify_ratio"].is_null() && json["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "emulated"),
        "{json}"
    );
}

/// A missing wait would show: with this variable the emulator puts off all work until somebody waits.
#[test]
fn nothing_is_read_before_it_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let (cpu, cuda) = both(dir.path(), &[&DEMO[..], &["--baseline-steps", "3"]].concat(), &[("EMU_LAZY", "1")]);
    compare("put off", &cpu, &cuda);
}

/// Checkpoints of every stored format, of both kinds of queries and gates, with limits and without.
#[test]
fn every_reference_checkpoint_decodes_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"token_ids\": [1, 38, 75, 112, 149, 186, 223, 260, 297, 14, 51, 88, 125, 162, 199, 236, 273, 310, 27, 64], \"max_new_tokens\": 14}\n\
        {\"token_ids\": [7, 7, 250], \"max_new_tokens\": 12}\n";
    std::fs::write(dir.path().join("p.jsonl"), lines).unwrap();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let mut checkpoints: Vec<PathBuf> = std::fs::read_dir(goldens).unwrap().map(|e| e.unwrap().path().join("checkpoint")).collect();
    checkpoints.retain(|path| path.is_dir());
    checkpoints.sort();
    assert!(checkpoints.len() >= 7, "{checkpoints:?}");
    let fp8 = rewritten(1.0);
    checkpoints.push(fp8.path().to_owned());
    let mut formats = Vec::new();
    for path in checkpoints {
        let name = path.parent().unwrap().file_name().unwrap().to_str().unwrap();
        let draft = if name == "tiny8" { "ngram" } else { "mtp" };
        let args = ["--model", path.to_str().unwrap(), "--prompts", "p.jsonl", "--draft", draft, "--ignore-eos", "--baseline-steps", "2"];
        let (cpu, cuda) = both(dir.path(), &args, &[]);
        compare(name, &cpu, &cuda);
        formats.push(cuda.manifest().model.quantisation.clone());
    }
    for format in ["bf16", "fp8", "int4", "mxfp4"] {
        assert!(formats.iter().any(|f| f == format), "no checkpoint has experts in {format}: {formats:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let args = [&DEMO[..], &["--backend", "cuda", "--out", "t"]].concat();
    let (code, stdout, stderr) = record(dir.path(), &args, &[("EMU_MEMORY", "9000000")]);
    assert_eq!((code, stdout.as_str()), (3, ""), "{stderr}");
    assert!(
        stderr.lines().count() == 1 && ["--backend cuda", "weights", "caches of", "9.00 MB"].iter().all(|w| stderr.contains(w)),
        "{stderr}"
    );
    assert!(!dir.path().join("t").exists());
}

#[test]
fn what_the_cuda_engine_cannot_do_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let args = [&DEMO[..], &["--backend", "cuda", "--kernels", "cupti"]].concat();
    let (code, _, stderr) = record(dir.path(), &args, &[]);
    assert_eq!((code, stderr.lines().count()), (3, 1), "{stderr}");
    assert!(stderr.contains("--kernels cupti"), "{stderr}");
}

/// A copy of a checkpoint in which the first four bytes of `tensor` are no number.
fn damaged(dir: &Path, tensor: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/nano/checkpoint");
    let to = dir.join(tensor);
    std::fs::create_dir(&to).unwrap();
    let mut found = false;
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
            if let Some(begin) = tensors[tensor]["data_offsets"][0].as_u64() {
                bytes[header + begin as usize..][..4].fill(0xff);
                found = true;
            }
        }
        std::fs::write(to.join(path.file_name().unwrap()), bytes).unwrap();
    }
    assert!(found, "no tensor {tensor}");
    to
}

#[test]
fn damage_is_found_where_it_arises() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("p.jsonl"), "{\"token_ids\": [1, 38, 75, 112], \"max_new_tokens\": 4}\n").unwrap();
    for (tensor, words) in [
        ("model.layers.2.mlp.gate.weight", ["layer 2", "router"]),
        ("model.layers.1.attention.f_proj.weight", ["layer 1", "attention"]),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", ["layer 3", "mlp"]),
        ("lm_head.weight", ["logits", "logits"]),
    ] {
        let model = damaged(dir.path(), tensor);
        let args = ["--model", model.to_str().unwrap(), "--prompts", "p.jsonl", "--draft", "none", "--backend", "cuda", "--out", "t"];
        let (code, _, stderr) = record(dir.path(), &args, &[]);
        assert_eq!((code, stderr.lines().count()), (2, 1), "{tensor}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)) && stderr.contains("not a finite number"), "{tensor}: {stderr}");
        assert!(!dir.path().join("t").exists(), "{tensor}");
    }
}

/// A library that is called libcuda.so.1 and is none, or an old one.
#[test]
fn a_driver_without_functions_is_said_and_is_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    for (name, source) in [("nothing", ""), ("only_init", "extern \"C\" int cuInit(unsigned) { return 0; }")] {
        let place = dir.path().join(name);
        std::fs::create_dir(&place).unwrap();
        std::fs::write(place.join("driver.cpp"), source).unwrap();
        let built =
            std::process::Command::new("g++").args(["-shared", "-fPIC", "-o", "libcuda.so.1", "driver.cpp"]).current_dir(&place).status();
        assert!(built.unwrap().success());
        let run = |args: &[&str]| {
            let mut command = Command::cargo_bin("specprof").unwrap();
            let out = command.current_dir(dir.path()).args(args).env("LD_LIBRARY_PATH", &place).output().unwrap();
            (out.status.code().unwrap(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
        };
        let (code, stdout, stderr) = run(&["doctor"]);
        assert!(code == 0 && stdout.contains("lacks a function") && !stderr.contains("panicked"), "{name}: {stdout}{stderr}");
        let (code, _, stderr) = run(&[&["record", "--backend", "cuda", "--out", "t"], &DEMO[..]].concat());
        assert!(code == 3 && stderr.lines().count() == 1 && stderr.contains("lacks a function"), "{name}: {code} {stderr}");
    }
}

/// Records on the emulator with NVML's stand-in of these knobs; gives the trace.
fn with_nvml(dir: &Path, nvml: bool, knobs: &[(&str, &str)]) -> Trace {
    let driver = emulator().parent().unwrap();
    let folders = if nvml { format!("{}:{}", driver.display(), driver.join("nvml").display()) } else { driver.display().to_string() };
    let args = [&DEMO[..], &["--backend", "cuda", "--force", "--out", "run"]].concat();
    let (code, _, stderr) = record(dir, &args, &[&[("LD_LIBRARY_PATH", folders.as_str())], knobs].concat());
    assert_eq!(code, 0, "{knobs:?}: {stderr}");
    let trace = Trace::open(&dir.join("run")).unwrap();
    assert_eq!(validate(&trace).unwrap().failed(), 0);
    trace
}

fn has_warning(trace: &Trace, code: &str) -> bool {
    trace.manifest().warnings.iter().any(|w| w.code == code)
}

#[test]
fn a_throttled_device_is_told_in_manifest_and_reports() {
    let dir = tempfile::tempdir().unwrap();
    // Software power cap and thermal slowdown, from the second sample on.
    let trace = with_nvml(dir.path(), true, &[("EMU_NVML_THROTTLE", "36")]);
    let samples = trace.telemetry().unwrap();
    assert!(samples.len() >= 2, "{samples:?}");
    for sample in &samples {
        assert_eq!((sample.sm_clock_mhz, sample.memory_clock_mhz), (Some(1980), Some(3201)), "{sample:?}");
        assert_eq!((sample.power_w, sample.temperature_c, sample.memory_used_bytes), (Some(543.21), Some(61.0), Some(40 << 30)));
        assert!(sample.rss_bytes.is_some(), "the host's values stay: {sample:?}");
    }
    assert_eq!(samples[0].throttle_reasons.as_deref(), Some("gpu_idle"));
    assert_eq!(samples[1].throttle_reasons.as_deref(), Some("sw_power_cap,sw_thermal_slowdown"));
    let warning = trace.manifest().warnings.iter().find(|w| w.code == "throttled").unwrap();
    assert!(warning.message.contains(&format!("in {} of {} telemetry samples", samples.len() - 1, samples.len())), "{warning:?}");
    for format in ["json", "text", "markdown", "html"] {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let out = command.current_dir(dir.path()).args(["report", "run", "--format", format]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("the device was throttled in"), "{format}: {text}");
        assert_eq!(text.contains("throttled in up to"), format == "html", "{format}");
        if format == "json" {
            let json: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(json["warnings"].as_array().unwrap().iter().filter(|w| w["code"] == "throttled").count(), 1);
            let shares = json["telemetry"]["throttled"].as_array().unwrap();
            assert!(shares.iter().any(|share| *share == 1.0) && shares[0] == 0.0, "{shares:?}");
        }
    }
}

#[test]
fn what_nvml_does_not_tell_is_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let idle = with_nvml(dir.path(), true, &[]);
    assert!(!["throttled", "throttling_unknown", "no_device_telemetry"].iter().any(|code| has_warning(&idle, code)));

    let partly = with_nvml(dir.path(), true, &[("EMU_NVML_UNSUPPORTED", "rp")]);
    let samples = partly.telemetry().unwrap();
    assert!(samples.iter().all(|s| s.power_w.is_none() && s.throttle_reasons.is_none() && s.sm_clock_mhz == Some(1980)));
    assert!(has_warning(&partly, "throttling_unknown") && !has_warning(&partly, "throttled"));

    for (nvml, knobs, word) in [
        (false, &[][..], "libnvidia-ml.so.1 cannot be loaded"),
        (true, &[("EMU_NVML", "4")], "no permission"),
        (true, &[("EMU_NVML_UUID", "GPU-of-another-machine")], "not found"),
    ] {
        let trace = with_nvml(dir.path(), nvml, knobs);
        let samples = trace.telemetry().unwrap();
        assert!(samples.iter().all(|s| s.sm_clock_mhz.is_none() && s.power_w.is_none() && s.throttle_reasons.is_none()), "{samples:?}");
        let warning = trace.manifest().warnings.iter().find(|w| w.code == "no_device_telemetry").unwrap();
        assert!(warning.message.contains(word), "{warning:?}");
    }
}
