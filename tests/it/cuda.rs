//! `record --backend cuda` on the emulator: the same tokens, drafts and routes as the CPU engine, and no device's times.

use crate::kernels::emulator;
use crate::quantised::rewritten;
use crate::report::python;
use assert_cmd::Command;
use specprof::trace::{Component, Module, Trace, validate};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// How far a gate weight of one engine may be from the other's: sums in another order.
const WEIGHT_TOLERANCE: f32 = 1e-5;

/// Runs `record` on the emulator's driver; gives exit code, stdout and stderr.
pub(crate) fn record(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.current_dir(dir).arg("record").args(args).env("LD_LIBRARY_PATH", emulator().parent().unwrap());
    let out = command.envs(variables.iter().copied()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

/// Records the same on both engines; gives both traces.
pub(crate) fn both(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> (Trace, Trace) {
    let [cpu, cuda] = ["cpu", "cuda"].map(|backend| {
        let all = [args, &["--router-probs", "--force", "--telemetry", "off", "--backend", backend, "--out", backend]].concat();
        let (code, _, stderr) = record(dir, &all, variables);
        assert_eq!(code, 0, "{backend}: {stderr}");
        Trace::open(&dir.join(backend)).unwrap()
    });
    (cpu, cuda)
}

/// Step, layer, row, module and ids of every routed row, and their weights.
pub(crate) type Routes = Vec<((u32, u16, u16, bool, Vec<u16>), Vec<f32>)>;

pub(crate) fn routes(trace: &Trace) -> Routes {
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
pub(crate) fn compare(name: &str, cpu: &Trace, cuda: &Trace) {
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

/// Drafts' probabilities and confidences are known of the same steps, and nearly the same; gives how many were compared.
fn close_drafts(name: &str, cpu: &Trace, cuda: &Trace) -> usize {
    let (a, b) = (cpu.steps_with_details().unwrap(), cuda.steps_with_details().unwrap());
    let mut compared = 0;
    for i in 0..a.len() {
        for (x, y) in [(&a.draft_probs[i], &b.draft_probs[i]), (&a.draft_confidences[i], &b.draft_confidences[i])] {
            assert_eq!(x.as_ref().map(Vec::len), y.as_ref().map(Vec::len), "{name}: step {i}");
            for (x, y) in x.iter().flatten().zip(y.iter().flatten()) {
                assert!((x - y).abs() <= 1e-4, "{name}: step {i}: {x} {y}");
                compared += 1;
            }
        }
    }
    compared
}

/// Every step has its launches, each with what it works for; what is routed has a plan and an expert product in each routed layer.
fn every_launch_is_labelled(name: &str, trace: &Trace) {
    let (model, steps, kernels) = (&trace.manifest().model, trace.steps().unwrap(), trace.kernels().unwrap());
    let mut seen = BTreeSet::new();
    for (i, &id) in steps.step_id.iter().enumerate() {
        let own: Vec<_> = kernels.iter().filter(|(step, _)| *step == id).map(|(_, kernel)| kernel).collect();
        for kernel in own.iter().filter(|k| !k.name.starts_with("cpu.")) {
            let copy = kernel.name.starts_with("memcpy");
            let shapes = [kernel.grid.is_some(), kernel.block.is_some(), kernel.shared_bytes.is_some()];
            assert_eq!(shapes, [!copy; 3], "{name}: {kernel:?}");
            assert!(kernel.component != Component::Other, "{name}: {kernel:?}");
            let outside = matches!(
                kernel.component,
                Component::Embedding | Component::Head | Component::Sampling | Component::Commit | Component::Tap
            );
            // The final norm, and the tapped rows of a drafter.
            let last = kernel.layer.is_none() && (kernel.component == Component::Norm || copy && kernel.component == Component::Draft);
            assert!(kernel.module == Module::Draft || last || kernel.layer.is_none() == outside, "{name}: {kernel:?}");
            seen.insert(kernel.name.to_string());
        }
        // A window, or a prompt's pass of more rows, which keeps them while it runs.
        let (sorts, commits) = if steps.rows[i] > 16 { ("moe_sort", 0) } else { ("moe_plan", 1) };
        for layer in 0..model.layers {
            let of_layer = own.iter().filter(|k| k.module == Module::Target && k.layer == Some(layer));
            let found: Vec<_> = of_layer.map(|k| &*k.name).filter(|n| ["moe_plan", "moe_sort"].contains(n)).collect();
            let wanted: &[&str] = if model.moe_layers.contains(&layer) { &[sorts] } else { &[] };
            assert_eq!(found, wanted, "{name}: step {id}, layer {layer}");
        }
        assert_eq!(own.iter().filter(|k| k.name == "kda_commit").count(), commits, "{name}: step {id}");
        let scans = own.iter().filter(|k| k.name == "kda_scan").count();
        assert_eq!(scans > 0, commits == 0, "{name}: step {id}: {scans} scans");
        let target: Vec<_> = own.iter().filter(|k| k.module == Module::Target && !k.name.starts_with("cpu.")).collect();
        assert!(target.windows(2).all(|pair| pair[0].end_ns <= pair[1].begin_ns), "{name}: step {id}: kernels of one stream overlap");
        assert!(
            target[0].begin_ns >= steps.host_begin_ns[i] && target[target.len() - 1].end_ns <= steps.host_end_ns[i],
            "{name}: step {id}"
        );
    }
    assert!(seen.len() >= 20, "{name}: {seen:?}");
}

pub(crate) const DEMO: [&str; 8] =
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
        let drafted = close_drafts(name, &cpu, &cuda);
        assert_eq!(drafted > 20, !more.contains(&"--draft"), "{name}: {drafted} drafts with probabilities");
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

/// Untimed passes run as graphs, whose launches are those of the passes that were captured.
#[test]
fn passes_run_as_graphs_and_decode_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    for (name, more) in [
        ("windows of 4", &["--baseline-steps", "6"][..]),
        ("windows of 16", &["--draft-len", "15", "--ignore-eos", "--max-new-tokens", "90"]),
        ("sampled", &["--temperature", "0.8", "--seed", "3"]),
        ("plain", &["--draft", "none"]),
        ("lookup, long prompt passes", &["--draft", "ngram", "--prefill-chunk", "20"]),
    ] {
        for variables in [&[][..], &[("EMU_LAZY", "1")]] {
            let args = [&DEMO[..6], &["--kernels", "off"], more].concat();
            let args = if args.contains(&"--max-new-tokens") { args } else { [&args[..], &["--max-new-tokens", "24"]].concat() };
            let (cpu, cuda) = both(dir.path(), &args, variables);
            compare(name, &cpu, &cuda);
            let graphs = cuda.manifest().instrumentation.graphs.unwrap();
            let steps = cuda.steps().unwrap().len() as u64;
            // Every shape is launched one by one once; a plain step is one pass, whose commit is part of it.
            assert!(graphs.captured >= 2 && graphs.launches + u64::from(graphs.captured) >= steps, "{name}: {graphs:?}, {steps} steps");
            assert!(cpu.manifest().instrumentation.graphs.is_none());
        }
    }
}

/// Waits of the host, and copies to it by their bytes, of a recording of so many tokens; with the trace and the number of its steps.
fn counted(dir: &Path, tokens: &str, args: &[&str], lazy: &str) -> (u64, BTreeMap<u64, u64>, Trace, u64) {
    let counts = dir.join("counts.json");
    let model = if args.contains(&"--model") { &[][..] } else { &DEMO[..4] };
    let all = [model, &["--max-new-tokens", tokens, "--ignore-eos", "--backend", "cuda", "--force", "--telemetry", "off"]].concat();
    let all = [&all[..], &["--kernels", "off", "--router-probs", "--out", "run"], args].concat();
    let (code, _, stderr) = record(dir, &all, &[("EMU_COUNTS", counts.to_str().unwrap()), ("EMU_LAZY", lazy)]);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(counts).unwrap()).unwrap();
    let brought = json["brought"].as_object().unwrap().iter();
    let brought = brought.map(|(bytes, times)| (bytes.parse().unwrap(), times.as_u64().unwrap())).collect();
    let trace = Trace::open(&dir.join("run")).unwrap();
    // The next recording takes the place of this one.
    let steps = trace.steps().unwrap().len() as u64;
    (json["waits"].as_u64().unwrap(), brought, trace, steps)
}

/// The checkpoints of a golden's target and of a block drafter of it.
fn block_drafter(set: &str, target: &str) -> [String; 2] {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    [goldens.join(target), goldens.join("dspark").join(set)].map(|path| path.join("checkpoint").to_str().unwrap().to_owned())
}

/// After the prompt the host waits once a step, whoever drafts, and is told choices and a verdict: no logits and no hidden rows.
#[test]
fn a_step_waits_once_and_no_logits_leave_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let sampled = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--seed", "5"];
    let [target, drafter] = block_drafter("correlated", "spec");
    std::fs::write(dir.path().join("p.jsonl"), "{\"token_ids\": [1, 38, 75, 112, 9, 4]}\n{\"token_ids\": [7]}\n").unwrap();
    let block = ["--model", &target, "--draft-model", &drafter, "--prompts", "p.jsonl", "--draft", "dspark"];
    for (name, args) in [
        ("block drafter", [&block[..], &["--baseline-steps", "4"]].concat()),
        ("block drafter, sampled", [&block[..], &sampled].concat()),
        ("block drafter, windows that end by confidence", [&block[..], &["--draft-confidence", "0.3"]].concat()),
        ("greedy", vec!["--baseline-steps", "4"]),
        ("greedy, windows of 8", vec!["--draft-len", "7"]),
        ("sampled", [&sampled[..], &["--baseline-steps", "4"]].concat()),
        ("lookup", vec!["--draft", "ngram"]),
        ("lookup, sampled", [&sampled[..], &["--draft", "ngram"]].concat()),
        ("plain", vec!["--draft", "none"]),
    ] {
        for lazy in ["0", "1"] {
            let (short_waits, short, _, short_steps) = counted(dir.path(), "12", &args, lazy);
            let (long_waits, long, trace, long_steps) = counted(dir.path(), "44", &args, lazy);
            let steps = long_steps - short_steps;
            // The confidences are waited for, then the verdict.
            let wanted = if args.contains(&"--draft-confidence") { 2 * steps } else { steps };
            assert!(steps > 5 && long_waits - short_waits == wanted, "{name}: {long_waits} - {short_waits} waits in {steps} steps");
            let model = &trace.manifest().model;
            let logits = |bytes: u64| bytes.is_multiple_of(u64::from(model.vocab_size.unwrap()) * 4) && bytes > 0;
            assert!(!long.keys().any(|&bytes| logits(bytes)), "{name}: {long:?}");
            let copies = |brought: &BTreeMap<u64, u64>| brought.values().sum::<u64>();
            let chained = !args.contains(&"--draft") || args.contains(&"dspark");
            let more = copies(&long) - copies(&short);
            assert!(more >= steps && more <= steps * (1 + u64::from(chained)), "{name}: {more} copies in {steps} steps");
            let hidden = |bytes: u64| bytes.is_multiple_of(u64::from(model.hidden_size.unwrap()) * 4) && bytes > 0;
            let rows = |brought: &BTreeMap<u64, u64>| brought.iter().filter(|(bytes, _)| hidden(**bytes)).map(|(_, n)| n).sum::<u64>();
            assert_eq!(rows(&long), rows(&short), "{name}: hidden rows after the prompt: {long:?}");
        }
    }
}

#[test]
fn a_driver_that_refuses_graphs_runs_kernel_by_kernel_and_it_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let (cpu, cuda) = both(dir.path(), &[&DEMO[..], &["--kernels", "off"]].concat(), &[("EMU_NO_CAPTURE", "1")]);
    compare("no capture", &cpu, &cuda);
    let manifest = cuda.manifest();
    assert!(manifest.instrumentation.graphs.is_none());
    let refused: Vec<_> = manifest.warnings.iter().filter(|w| w.code == "cuda_graphs_refused").collect();
    assert!(refused.len() == 1 && refused[0].message.contains("CUDA_ERROR_NOT_SUPPORTED"), "{:?}", manifest.warnings);
}

/// Prompts beyond a window, of whole and of ragged passes: one pass up to 512 rows, more than that in as few as there can be, and the tokens,
/// drafts and routes of the CPU engine behind them, whatever comes before a pass and whatever the step is cut into.
#[test]
fn a_prompt_of_512_tokens_is_one_pass() {
    let dir = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/nano/checkpoint");
    let line = |n: u64| {
        format!("{}\n", serde_json::json!({"token_ids": (0..n).map(|i| (i * 37 + n) % 290).collect::<Vec<_>>(), "max_new_tokens": 6}))
    };
    std::fs::write(dir.path().join("p.jsonl"), [17, 33, 512, 535].map(line).concat()).unwrap();
    let args = ["--model", model.to_str().unwrap(), "--prompts", "p.jsonl", "--ignore-eos", "--prefill-chunk"];
    for (chunk, passes) in [("600", vec![17, 33, 512, 512, 23]), ("200", vec![17, 33, 200, 200, 112, 200, 200, 135])] {
        let (cpu, cuda) = both(dir.path(), &[&args[..], &[chunk]].concat(), &[("EMU_LAZY", "1")]);
        compare(chunk, &cpu, &cuda);
        let kernels = cuda.kernels().unwrap();
        let embedded = kernels.iter().filter(|(_, k)| k.module == Module::Target && k.name.starts_with("embed"));
        let rows: Vec<u32> = embedded.map(|(_, k)| k.grid.unwrap()[0]).filter(|rows| *rows > 16).collect();
        assert_eq!(rows, passes, "{chunk}");
    }
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

/// Every tensor of the reference sets, at the tolerances of the CPU engine: rows after each part of each layer, choices, states after the
/// prompt, logits and chains of drafts.
#[test]
fn the_references_numbers_hold_on_the_device() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    for (set, checkpoint) in [
        ("nano", "nano"),
        ("nano_long", "nano"),
        ("spec", "spec"),
        ("tiny8", "tiny8"),
        ("fp4", "fp4"),
        ("int4", "int4"),
        ("clamp", "clamp"),
        ("elemgate", "elemgate"),
    ] {
        let model = goldens.join(checkpoint).join("checkpoint");
        let file = goldens.join(set).join("golden.safetensors");
        let mut compared = Vec::new();
        for backend in ["cpu", "cuda"] {
            let mut command = Command::cargo_bin("specprof").unwrap();
            command.arg("model").arg(&model).arg("--golden").arg(&file).args(["--json", "--backend", backend]);
            let out = command.env("LD_LIBRARY_PATH", emulator().parent().unwrap()).output().unwrap();
            assert_eq!(out.status.code(), Some(0), "{set}, {backend}: {}", String::from_utf8_lossy(&out.stderr));
            let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
            let names =
                |v: &serde_json::Value| v.as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
            assert_eq!(json["passed"], true, "{set}, {backend}");
            compared.push((names(&json["checks"]), names(&json["not_compared"])));
        }
        assert!(compared[0].0.len() > 20, "{set}: {compared:?}");
        assert_eq!(compared[0], compared[1], "{set}");
    }
}

/// External drafters: causal blocks and others, anchors that draft and others, greedy, cut by confidence and sampled, over contexts of
/// more than one split of the cache.
#[test]
fn dspark_drafts_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(goldens.join("dspark/correlated/golden.json")).unwrap()).unwrap();
    let known: Vec<u64> = golden["committed"].as_array().unwrap()[..50].iter().map(|t| t.as_u64().unwrap()).collect();
    let other: Vec<u64> = (0..75).map(|i| (i * 37 + 5) % 290).collect();
    let line = |ids: &[u64], n: u32| format!("{}\n", serde_json::json!({"token_ids": ids, "max_new_tokens": n}));
    std::fs::write(dir.path().join("p.jsonl"), line(&known, 24) + &line(&other, 16) + &line(&[7], 12)).unwrap();
    let mut kept = 0;
    for (set, target, more) in [
        ("correlated", "spec", &[][..]),
        ("correlated", "spec", &["--draft-confidence", "0.3"]),
        ("correlated", "spec", &["--temperature", "0.9", "--top-p", "0.95", "--seed", "5"]),
        ("correlated", "spec", &["--temperature", "0.9", "--seed", "6", "--draft-confidence", "0.4"]),
        ("correlated", "spec", &["--baseline-steps", "30", "--draft-len", "1"]),
        ("prefixed", "nano", &["--prefill-chunk", "20"]),
        ("x_causal", "nano", &["--draft-len", "2"]),
        ("x_noanchor", "nano", &["--baseline-steps", "2"]),
    ] {
        let [model, drafter] = block_drafter(set, target);
        let args = ["--model", &model, "--draft", "dspark", "--draft-model", &drafter, "--prompts", "p.jsonl"];
        let (cpu, cuda) = both(dir.path(), &[&args[..], &["--ignore-eos"], more].concat(), &[("EMU_LAZY", "1")]);
        let name = format!("{set} {more:?}");
        compare(&name, &cpu, &cuda);
        every_launch_is_labelled(&name, &cuda);
        let judged = close_drafts(&name, &cpu, &cuda);
        assert!(judged > 20, "{name}: {judged}");
        kept += cpu.steps().unwrap().accepted.iter().map(|n| usize::from(*n)).sum::<usize>();
        let kernels = cuda.kernels().unwrap();
        for kernel in ["block_heads", "block_values", "block_attend", "block_merge", "experts_down_bf16"] {
            assert!(kernels.iter().any(|(_, k)| k.module == Module::Draft && k.name.starts_with(kernel)), "{name}: no {kernel}");
        }
    }
    assert!(kept > 20, "hardly a draft was kept: {kept}");
}

/// Context, block and Markov head as one graph: the same drafts, and by CUPTI the same labels as launch by launch.
#[test]
fn a_block_drafter_runs_as_graphs() {
    let dir = tempfile::tempdir().unwrap();
    // Contexts beyond one split of the cache, and a prompt of several passes.
    let ids: Vec<u64> = (0..55).map(|i| (i * 37 + 5) % 290).collect();
    let line = |n: u32| format!("{}\n", serde_json::json!({"token_ids": ids, "max_new_tokens": n}));
    std::fs::write(dir.path().join("p.jsonl"), line(26) + &line(14)).unwrap();
    let library = cupti();
    for (set, target, more) in [
        ("correlated", "spec", &[][..]),
        ("correlated", "spec", &["--temperature", "0.9", "--top-p", "0.95", "--seed", "5"]),
        ("x_causal", "nano", &["--draft-len", "2", "--baseline-steps", "3"]),
    ] {
        let [model, drafter] = block_drafter(set, target);
        let args = ["--model", &model, "--draft", "dspark", "--draft-model", &drafter, "--prompts", "p.jsonl"];
        let args = [&args[..], &["--ignore-eos"], more].concat();
        let name = format!("{set} {more:?}");
        let (cpu, events) = both(dir.path(), &args, &[]);
        compare(&name, &cpu, &events);
        let expected = labels(&events);
        for (kernels, lazy) in [("off", "0"), ("off", "1"), ("cupti", "0"), ("cupti", "1")] {
            let with = [&args[..], &["--kernels", kernels]].concat();
            let knobs = [("EMU_LAZY", lazy), ("SPECPROF_CUPTI", library.as_str())];
            let all = [&with[..], &["--router-probs", "--force", "--telemetry", "off", "--backend", "cuda", "--out", "graphs"]].concat();
            let (code, _, stderr) = record(dir.path(), &all, &knobs);
            assert_eq!(code, 0, "{name}: {stderr}");
            let cuda = Trace::open(&dir.path().join("graphs")).unwrap();
            compare(&name, &cpu, &cuda);
            assert!(close_drafts(&name, &cpu, &cuda) > 20, "{name}");
            let (graphs, steps) = (cuda.manifest().instrumentation.graphs.unwrap(), cuda.steps().unwrap().len() as u64);
            // A verify step has two, the chain of drafts and the target's pass; the first of each shape is launched one by one.
            assert!(graphs.launches > steps && graphs.launches <= 2 * steps, "{name}: {graphs:?}, {steps} steps");
            if kernels == "cupti" {
                // Events do not time what is copied for the drafter behind the last wait.
                let mut found = labels(&cuda);
                found
                    .values_mut()
                    .for_each(|labels| labels.retain(|(.., component, name)| (*component, &**name) != (Component::Draft, "memcpy DtoD")));
                assert_eq!(found, expected, "{name}");
            }
        }
    }
}

#[test]
fn a_drafter_that_does_not_fit_is_refused_with_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    std::fs::write(dir.path().join("p.jsonl"), "{\"token_ids\": [1, 38, 75, 112], \"max_new_tokens\": 4}\n").unwrap();
    let [model, drafter] = [goldens.join("spec/checkpoint"), goldens.join("dspark/correlated/checkpoint")];
    let plain = ["--model", model.to_str().unwrap(), "--prompts", "p.jsonl", "--backend", "cuda", "--out", "t", "--draft"];
    // Megabytes by what they are for.
    let needed = |args: &[&str]| {
        let (code, _, stderr) = record(dir.path(), &[&plain[..], args].concat(), &[("EMU_MEMORY", "1000")]);
        assert_eq!((code, stderr.lines().count()), (3, 1), "{stderr}");
        let of = |what: &str| -> f64 {
            let (_, rest) = stderr.split_once(what).unwrap_or_else(|| panic!("{what}: {stderr}"));
            let words: Vec<_> = rest.split_whitespace().collect();
            let unit = if words[1].starts_with("kB") { 1e-3 } else { 1.0 };
            words[0].parse::<f64>().unwrap() * unit
        };
        [of("weights "), of("workspace ")]
    };
    let ([weights, workspace], [more_weights, more_workspace]) =
        (needed(&["none"]), needed(&["dspark", "--draft-model", drafter.to_str().unwrap()]));
    let stored = drafter.join("model.safetensors").metadata().unwrap().len() as f64 / 1e6;
    assert!((0.7..1.3).contains(&((more_weights - weights) / stored)), "{weights} {more_weights} {stored}");
    assert!(more_workspace > workspace && !dir.path().join("t").exists(), "{workspace} {more_workspace}");
}

/// The driver gets the PTX where no code is made for the device, and where it refuses the code that is.
#[test]
fn kernels_that_a_driver_refuses_are_given_to_it_as_ptx() {
    let dir = tempfile::tempdir().unwrap();
    let args = [&DEMO[..], &["--kernels", "off"]].concat();
    for (name, knobs, warned) in [
        ("code of the major version", &[("EMU_CAPABILITY", "103")][..], false),
        ("no code for it", &[("EMU_CAPABILITY", "130"), ("EMU_NO_CUBIN", "1")], false),
        ("code is refused", &[("EMU_NO_CUBIN", "1")], true),
    ] {
        let (cpu, cuda) = both(dir.path(), &args, knobs);
        compare(name, &cpu, &cuda);
        let warnings = &cuda.manifest().warnings;
        let said: Vec<_> = warnings.iter().filter(|w| w.code == "kernels_compiled_by_driver").collect();
        assert_eq!(said.len(), usize::from(warned), "{name}: {warnings:?}");
        assert!(
            said.iter().all(|w| w.message.contains("for sm_90a do not load on specprof emulator: CUDA_ERROR_NO_BINARY_FOR_GPU")),
            "{said:?}"
        );
    }
    let all = [&args[..], &["--backend", "cuda", "--out", "t"]].concat();
    for (knobs, words) in [
        (
            &[("EMU_NO_CUBIN", "1"), ("EMU_NO_PTX", "1")][..],
            &["CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "newer driver"][..],
        ),
        (&[("EMU_CAPABILITY", "130"), ("EMU_NO_PTX", "1")], &["for compute_80 do not load", "newer driver"]),
    ] {
        let (code, stdout, stderr) = record(dir.path(), &all, knobs);
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (3, "", 1), "{stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)) && !dir.path().join("t").exists(), "{stderr}");
    }
}

/// What is printed of device and page-locked memory is what the run takes.
#[test]
fn the_printed_memory_plan_is_what_is_allocated() {
    let dir = tempfile::tempdir().unwrap();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let [spec, drafter] = [goldens.join("spec/checkpoint"), goldens.join("dspark/correlated/checkpoint")];
    std::fs::write(dir.path().join("p.jsonl"), "{\"token_ids\": [1, 38, 75, 112], \"max_new_tokens\": 4}\n").unwrap();
    let of_spec = ["--model", spec.to_str().unwrap(), "--prompts", "p.jsonl", "--draft"];
    for (name, args) in [
        ("greedy", DEMO.to_vec()),
        ("sampled", [&DEMO[..], &["--temperature", "0.8"]].concat()),
        ("nobody drafts", [&DEMO[..], &["--draft", "none", "--temperature", "0.8"]].concat()),
        ("block drafter", [&of_spec[..], &["dspark", "--draft-model", drafter.to_str().unwrap()]].concat()),
    ] {
        let counts = dir.path().join("counts.json");
        let all = [&args[..], &["--backend", "cuda", "--force", "--telemetry", "off", "--kernels", "off", "--out", "run"]].concat();
        let (code, _, stderr) = record(dir.path(), &all, &[("EMU_COUNTS", counts.to_str().unwrap())]);
        assert_eq!(code, 0, "{name}: {stderr}");
        let plan = stderr.lines().find_map(|line| line.strip_prefix("memory: ")).unwrap_or_else(|| panic!("{name}: {stderr}"));
        let bytes = |text: &str| {
            let (number, unit) = text.trim().split_once(' ').unwrap();
            number.parse::<f64>().unwrap()
                * match unit {
                    "kB" => 1e3,
                    "MB" => 1e6,
                    other => panic!("{other}: {plan}"),
                }
        };
        let (device, rest) = plan.split_once(" of device memory").unwrap();
        let pinned = rest.split_once("; ").unwrap().1.split_once(" of page-locked").unwrap().0;
        let taken: serde_json::Value = serde_json::from_slice(&std::fs::read(counts).unwrap()).unwrap();
        for (what, planned, taken) in [("device", bytes(device), &taken["device"]), ("pinned", bytes(pinned), &taken["pinned"])] {
            let taken = taken.as_f64().unwrap();
            assert!((planned / taken - 1.0).abs() < 0.02, "{name}, {what}: {planned} planned, {taken} taken: {plan}");
        }
    }
}

/// Weights go out of page-locked memory, asynchronously; what the host waits for is a few words of the sessions.
#[test]
fn weights_leave_page_locked_buffers_that_are_filled_in_turn() {
    let dir = tempfile::tempdir().unwrap();
    for (name, args) in [
        ("target", DEMO.to_vec()),
        ("block drafter", {
            let [target, drafter] = block_drafter("correlated", "spec");
            std::fs::write(dir.path().join("p.jsonl"), "{\"token_ids\": [1, 38, 75, 112], \"max_new_tokens\": 24}\n").unwrap();
            let [target, drafter] = [target, drafter].map(|path| &*path.leak());
            vec!["--model", target, "--draft-model", drafter, "--prompts", "p.jsonl", "--draft", "dspark"]
        }),
    ] {
        // Put off, a buffer that is filled again before its copies are done sends what it has then.
        for lazy in ["0", "1"] {
            let (cpu, cuda) = both(dir.path(), &args, &[("EMU_LAZY", lazy), ("EMU_COUNTS", "counts.json")]);
            compare(name, &cpu, &cuda);
            let taken: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.path().join("counts.json")).unwrap()).unwrap();
            let of = |key: &str| taken[key].as_u64().unwrap();
            // Of the device's memory, most is weights.
            assert!(of("sent_pinned") > of("device") / 2 && of("sent_waiting") < 100_000, "{name}: {taken}");
        }
    }
}

/// Runs `record` with stderr on a terminal; gives what came there.
fn on_a_terminal(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> String {
    const SCRIPT: &str = "\
import fcntl, os, pty, struct, subprocess, sys, termios
master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 120, 0, 0))
child = subprocess.Popen(sys.argv[1:], stderr=slave, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
os.close(slave)
while True:
    try:
        part = os.read(master, 65536)
    except OSError:
        break
    if not part:
        break
    sys.stdout.buffer.write(part)
sys.exit(child.wait())
";
    let mut command = Command::new(python());
    command.current_dir(dir).args(["-c", SCRIPT]).arg(assert_cmd::cargo::cargo_bin("specprof")).arg("record").args(args);
    command.env("LD_LIBRARY_PATH", emulator().parent().unwrap()).env_remove("CI").env("TERM", "xterm").env_remove("NO_COLOR");
    let out = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    text
}

#[test]
fn loading_is_shown_on_a_terminal_with_a_rate_that_is_a_device_s() {
    let dir = tempfile::tempdir().unwrap();
    let args = [&DEMO[..], &["--backend", "cuda", "--force", "--telemetry", "off", "--kernels", "off", "--out", "run"]].concat();
    let shown = |more: &[&str], variables: &[(&str, &str)]| on_a_terminal(dir.path(), &[&args[..], more].concat(), variables);
    let named = shown(&[], &[("EMU_NAME", "a device under test")]);
    assert!(named.contains("loading ") && named.contains(" MB, ") && named.contains(" GB/s"), "{named}");
    let emulated = shown(&[], &[]);
    assert!(emulated.contains("loading ") && !emulated.contains("GB/s"), "{emulated}");
    for quiet in ["--no-progress", "--quiet"] {
        let text = shown(&[quiet], &[]);
        assert!(!text.contains("loading "), "{quiet}: {text}");
    }
    let (code, _, stderr) = record(dir.path(), &args, &[]);
    assert!(code == 0 && !stderr.contains("loading "), "{stderr}");
}

#[test]
fn without_page_locked_memory_the_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let args = [&DEMO[..], &["--backend", "cuda", "--out", "t"]].concat();
    let (code, stdout, stderr) = record(dir.path(), &args, &[("EMU_NO_PINNED", "1")]);
    assert_eq!((code, stdout.as_str()), (3, ""), "{stderr}");
    // The plan was told before anything was tried.
    let lines: Vec<_> = stderr.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("memory: ") && !dir.path().join("t").exists(), "{stderr}");
    assert!(lines[1].contains("bytes of page-locked memory: CUDA_ERROR_OUT_OF_MEMORY"), "{stderr}");
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

/// The emulator's libcupti.so.13.
pub(crate) fn cupti() -> String {
    emulator().parent().unwrap().join("cupti/libcupti.so.13").to_str().unwrap().to_owned()
}

/// Records on the emulator with its CUPTI; gives code, stderr and, of what was recorded, the trace.
fn profiled(dir: &Path, more: &[&str], knobs: &[(&str, &str)]) -> (i32, String, Option<Trace>) {
    let args = [&DEMO[..], &["--router-probs", "--force", "--telemetry", "off", "--backend", "cuda", "--out", "cuda"], more].concat();
    let library = cupti();
    let (code, _, stderr) = record(dir, &args, &[&[("SPECPROF_CUPTI", library.as_str())][..], knobs].concat());
    (code, stderr, if code == 0 { Some(Trace::open(&dir.join("cuda")).unwrap()) } else { None })
}

/// Layer, module, component and name of each of a step's kernels, sorted.
pub(crate) type Labels = Vec<(Option<u16>, bool, Component, String)>;

/// Labels by step; of what ran on the host, none.
pub(crate) fn labels(trace: &Trace) -> BTreeMap<u32, Labels> {
    let mut all: BTreeMap<u32, Labels> = BTreeMap::new();
    for (step, k) in trace.kernels().unwrap() {
        if !k.name.starts_with("cpu.") {
            all.entry(step).or_default().push((k.layer, k.module == Module::Draft, k.component, k.name.to_string()));
        }
    }
    all.values_mut().for_each(|labels| labels.sort());
    all
}

/// Every kernel of every step has the label that it has when each is launched by itself and timed by an event, graphs or not,
/// whatever the version's records look like and in whatever order they come.
#[test]
fn cupti_labels_every_kernel_of_every_graph() {
    let dir = tempfile::tempdir().unwrap();
    let (cpu, events) = both(dir.path(), &[&DEMO[..], &["--baseline-steps", "4"]].concat(), &[]);
    let expected = labels(&events);
    for (name, knobs) in [
        ("as of CUDA 13.0", &[][..]),
        ("as of CUDA 12.1", &[("EMU_CUPTI_KERNEL_SIZE", "208"), ("EMU_CUPTI_VERSION", "18")]),
        ("as of CUDA 13.5", &[("EMU_CUPTI_KERNEL_SIZE", "248"), ("EMU_CUPTI_UNKNOWN", "1")]),
        ("backwards", &[("EMU_CUPTI_REVERSE", "1")]),
        ("put off", &[("EMU_LAZY", "1")]),
        ("no graphs", &[("EMU_NO_CAPTURE", "1")]),
    ] {
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", "cupti", "--baseline-steps", "4"], knobs);
        assert_eq!(code, 0, "{name}: {stderr}");
        let trace = trace.unwrap();
        compare(name, &cpu, &trace);
        let facts = trace.manifest().instrumentation.profiler.clone().unwrap();
        assert_eq!((facts.name.as_str(), facts.kernel_every, facts.timeless, facts.missing), ("cupti", 1, 0, 0), "{name}");
        assert_eq!(facts.steps, trace.steps().unwrap().len() as u64, "{name}");
        assert!(facts.clock_shift_ns != 0 && facts.clock_error_ns >= 0, "{name}: {facts:?}");
        let mut found = labels(&trace);
        let recorded: usize = found.values().map(Vec::len).sum();
        assert_eq!(facts.launched, recorded as u64, "{name}");
        // Events do not time what is copied for the drafter behind the last wait.
        found
            .values_mut()
            .for_each(|labels| labels.retain(|(.., component, name)| (*component, &**name) != (Component::Draft, "memcpy DtoD")));
        assert_eq!(found, expected, "{name}");
        let kernels = trace.kernels().unwrap();
        let on_device = || kernels.iter().map(|(_, k)| k).filter(|k| !k.name.starts_with("cpu."));
        let in_graphs = on_device().filter(|k| k.graph_node_id.is_some()).count();
        assert_eq!(in_graphs > recorded / 2, name != "no graphs", "{name}: {in_graphs} of {recorded}");
        assert!(on_device().all(|k| k.correlation_id.is_some() && k.component != Component::Other && k.end_ns > k.begin_ns), "{name}");
        let codes: Vec<_> = trace.manifest().warnings.iter().map(|w| w.code.as_str()).collect();
        assert!(!codes.contains(&"kernels_timed_by_events") && !codes.contains(&"cupti_records_lost"), "{name}: {codes:?}");
        assert!(trace.manifest().emulated && trace.manifest().instrumentation.overhead_share.is_none(), "{name}");
    }
}

/// Two events around each pass give a step's device time, whatever times kernels. A stand-in under another name: its times are the host's, and
/// only what must hold of any times is looked at.
#[test]
fn the_device_s_time_of_a_step_is_known_whatever_times_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let library = cupti();
    for (kernels, cupti) in [("auto", "/nowhere/libcupti.so"), ("cupti", library.as_str()), ("off", "/nowhere/libcupti.so")] {
        for draft in ["mtp", "ngram"] {
            let args =
                ["--backend", "cuda", "--kernels", kernels, "--draft", draft, "--baseline-steps", "6", "--telemetry", "off", "--force"];
            let args = [&DEMO[..], &args, &["--prefill-chunk", "20", "--out", "named"]].concat();
            let (code, _, stderr) = record(dir.path(), &args, &[("EMU_NAME", "a device under test"), ("SPECPROF_CUPTI", cupti)]);
            assert_eq!(code, 0, "{stderr}");
            let trace = Trace::open(&dir.path().join("named")).unwrap();
            assert!(!trace.manifest().emulated && validate(&trace).unwrap().failed() == 0);
            let (steps, operations) = (trace.steps().unwrap(), trace.kernels().unwrap());
            for (i, id) in steps.step_id.iter().enumerate() {
                let device = steps.device_ns[i].unwrap();
                let whole = steps.host_end_ns[i] - steps.host_begin_ns[i];
                assert!(device > 0 && device <= whole + 1000, "{kernels}, {draft}, step {id}: {device} ns on the device of {whole}");
                if kernels == "cupti" {
                    // By the stand-in's clock, work begins 300 ns after the work before it: every launch and copy of the step is in the table,
                    // and no other.
                    let own: Vec<_> = operations.iter().filter(|(step, k)| step == id && !k.name.starts_with("cpu.")).collect();
                    let sum: i64 = own.iter().map(|(_, k)| k.end_ns - k.begin_ns + 300).sum();
                    assert!((sum - device).abs() <= 2 + device / 1_000_000, "{draft}, step {id}: {} of {sum} ns in {device}", own.len());
                    assert!(own.iter().any(|(_, k)| k.component == Component::Tap), "{draft}, step {id}: no copy of the routers' choices");
                }
                if kernels == "auto" {
                    let own = operations.iter().filter(|(step, k)| step == id && !k.name.starts_with("cpu."));
                    let sum: i64 = own.map(|(_, k)| k.end_ns - k.begin_ns).sum();
                    assert!(sum > 0 && sum <= device + 1000, "{draft}, step {id}: kernels of {sum} ns in {device}");
                }
            }
            let mut command = Command::cargo_bin("specprof").unwrap();
            let report = command.current_dir(dir.path()).args(["report", "named", "--format", "json"]).output().unwrap();
            let json: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
            let apart = kernels != "off" || draft == "ngram";
            assert_eq!(json["cost"]["source"], "device", "{kernels}, {draft}: {}", json["cost"]);
            assert_eq!(json["cost"]["verify_ratio"].is_number(), apart, "{kernels}, {draft}: {}", json["cost"]);
            assert!(json["cost"]["step_ratio"].is_number());
            let warnings = json["warnings"].as_array().unwrap();
            assert!(!warnings.iter().any(|w| w["code"] == "components_miss_the_step"), "{kernels}, {draft}: {warnings:?}");
            let found = json["cost"]["attribution"].as_array().unwrap().iter();
            let of: BTreeMap<&str, f64> = found.map(|a| (a["component"].as_str().unwrap(), a["verify_us"].as_f64().unwrap())).collect();
            assert_eq!(of.contains_key("idle"), kernels == "cupti", "{kernels}, {draft}: {of:?}");
            if kernels == "cupti" {
                // What is not drafting is the pass.
                let sum: f64 = of.iter().filter(|(name, _)| **name != "draft").map(|(_, us)| us).sum();
                let pass = json["cost"]["verify_us"].as_f64().unwrap();
                assert!((sum / pass - 1.0).abs() < 1e-3 && of["tap"] > 0.0, "{draft}: {sum} of {pass}: {of:?}");
            }
            assert_eq!(warnings.iter().any(|w| w["code"] == "drafting_not_apart"), !apart, "{kernels}, {draft}");
        }
    }
}

#[test]
fn records_that_are_lost_or_have_no_times_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    for (knob, words) in [(("EMU_CUPTI_DROP", "5"), "it says that it dropped 5"), (("EMU_CUPTI_ZERO", "50"), "CUPTI gave no times of ")] {
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", "cupti"], &[knob]);
        assert_eq!(code, 0, "{stderr}");
        let trace = trace.unwrap();
        let facts = trace.manifest().instrumentation.profiler.clone().unwrap();
        let recorded: usize = labels(&trace).values().map(Vec::len).sum();
        assert!(facts.timeless + facts.missing > 0, "{facts:?}");
        assert_eq!(facts.launched, recorded as u64 + facts.timeless + facts.missing, "{facts:?}");
        let lost: Vec<_> = trace.manifest().warnings.iter().filter(|w| w.code == "cupti_records_lost").collect();
        assert!(lost.len() == 1 && lost[0].message.contains(words), "{:?}", trace.manifest().warnings);
    }
}

#[test]
fn a_cupti_that_cannot_be_used_is_said_and_auto_takes_events() {
    for (knob, words) in [
        (("EMU_CUPTI_BUSY", "1"), "another profiler is attached"),
        (("EMU_CUPTI_DENIED", "1"), "no permission to profile"),
        (("EMU_CUPTI_VERSION", "17"), "has version 17"),
        (("SPECPROF_CUPTI", "/nowhere/libcupti.so"), "cannot be loaded"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (code, stderr, _) = profiled(dir.path(), &["--kernels", "cupti"], &[knob]);
        assert_eq!((code, stderr.lines().count()), (3, 1), "{knob:?}: {stderr}");
        assert!(stderr.contains("--kernels cupti") && stderr.contains(words), "{knob:?}: {stderr}");
        assert!(!dir.path().join("cuda").exists(), "{knob:?}");
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", "auto"], &[knob]);
        assert_eq!(code, 0, "{knob:?}: {stderr}");
        let trace = trace.unwrap();
        let by_events: Vec<_> = trace.manifest().warnings.iter().filter(|w| w.code == "kernels_timed_by_events").collect();
        assert!(by_events.len() == 1 && by_events[0].message.contains(words), "{knob:?}: {by_events:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    // What it does not say while it records is never guessed.
    for (knob, words) in [("EMU_CUPTI_NO_NODES", "name no node"), ("EMU_CUPTI_SILENT", "does not tell the nodes")] {
        let (code, stderr, _) = profiled(dir.path(), &["--kernels", "cupti"], &[(knob, "1")]);
        assert!(code == 3 && stderr.contains("--kernels cupti") && stderr.contains(words), "{knob}: {code} {stderr}");
    }
    // The file, and the folder that it is in.
    let file = cupti();
    let folder = Path::new(&file).parent().unwrap().to_str().unwrap();
    for (kernels, named) in [("auto", file.as_str()), ("cupti", folder)] {
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", kernels], &[("SPECPROF_CUPTI", named)]);
        assert!(code == 0 && trace.unwrap().manifest().instrumentation.profiler.is_some(), "{named}: {stderr}");
    }
    let empty = tempfile::tempdir().unwrap();
    let (code, stderr, _) = profiled(dir.path(), &["--kernels", "cupti"], &[("SPECPROF_CUPTI", empty.path().to_str().unwrap())]);
    assert!(code == 3 && stderr.contains("a folder without libcupti.so"), "{code} {stderr}");
}

/// A clock that runs 5 % fast would have kernels leave their steps within a few; compared at every step, they stay.
#[test]
fn kernels_stay_in_their_steps_however_the_clocks_drift() {
    let dir = tempfile::tempdir().unwrap();
    for (rate, least, most) in [("50000", 0.03, 0.06), ("0", 0.0, 0.01)] {
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", "cupti"], &[("EMU_CUPTI_CLOCK", rate)]);
        assert_eq!(code, 0, "{stderr}");
        let trace = trace.unwrap();
        let (steps, kernels) = (trace.steps().unwrap(), trace.kernels().unwrap());
        let whole = (steps.host_end_ns[steps.len() - 1] - steps.host_begin_ns[0]) as f64;
        let facts = trace.manifest().instrumentation.profiler.clone().unwrap();
        let drift = facts.clock_drift_ns.unwrap() as f64;
        assert!(drift >= least * whole && drift <= most * whole + 1e6, "{rate}: {facts:?} in {whole} ns");
        let mut seen = 0;
        for (step, kernel) in kernels.iter().filter(|(_, k)| !k.name.starts_with("cpu.")) {
            let i = steps.step_id.iter().position(|id| id == step).unwrap();
            let (begin, end) = (steps.host_begin_ns[i], steps.host_end_ns[i]);
            // The step's own share of the drift, and how long it takes to get to look at the clocks.
            let slack = (end - begin) / 10 + 2_000_000;
            assert!(kernel.begin_ns >= begin - slack && kernel.end_ns <= end + slack, "{rate}: step {step}, {begin} to {end}: {kernel:?}");
            seen += 1;
        }
        assert!(seen > 500, "{seen}");
    }
}

/// Calls of the driver that launch nothing are not traced where CUPTI can tell them apart; where it cannot, all are, and labels are the same.
#[test]
fn only_launches_are_traced() {
    let dir = tempfile::tempdir().unwrap();
    let counts = dir.path().join("counts.json");
    let mut seen = Vec::new();
    for whole in ["0", "1"] {
        let knobs = [("EMU_CUPTI_WHOLE", whole), ("EMU_CUPTI_COUNTS", counts.to_str().unwrap())];
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", "cupti", "--kernel-every", "2"], &knobs);
        assert_eq!(code, 0, "{stderr}");
        let traced: BTreeMap<u32, u64> = serde_json::from_slice(&std::fs::read(&counts).unwrap()).unwrap();
        seen.push((traced, labels(&trace.unwrap())));
    }
    let [(launches, some), (all, every)] = seen.as_slice() else { panic!("{seen:?}") };
    assert!(some == every && !some.is_empty());
    // cuLaunchKernel and cuGraphLaunch; cuEventRecord and cuStreamSynchronize.
    assert!([307, 514].iter().all(|function| launches[function] > 10), "{launches:?}");
    assert!([119, 126].iter().all(|function| !launches.contains_key(function) && all[function] > 10), "{launches:?} {all:?}");
    assert_eq!(launches.iter().collect::<Vec<_>>(), all.iter().filter(|(f, _)| launches.contains_key(f)).collect::<Vec<_>>());
}

/// What timing costs is measured by a device's times, and those of an emulated one are none.
#[test]
fn what_timing_costs_an_emulated_device_is_unknown_and_it_is_said() {
    let dir = tempfile::tempdir().unwrap();
    for kernels in ["cupti", "auto"] {
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", kernels, "--kernel-every", "2", "--draft", "none"], &[]);
        assert_eq!(code, 0, "{stderr}");
        let trace = trace.unwrap();
        assert_eq!(trace.manifest().instrumentation.overhead_share, None);
        let told: Vec<_> = trace.manifest().warnings.iter().filter(|w| w.code == "overhead_unknown").collect();
        assert!(told.len() == 1 && told[0].message.contains("emulated"), "{told:?}");
    }
}

/// The version that may stop when records are switched off is named before it can.
#[test]
fn a_version_with_known_faults_is_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    for (version, faulty) in [("130000", true), ("130001", false), ("28", false)] {
        let (code, stderr, trace) = profiled(dir.path(), &["--kernels", "cupti"], &[("EMU_CUPTI_VERSION", version)]);
        assert_eq!((code, stderr.contains("before update 1")), (0, faulty), "{version}: {stderr}");
        assert_eq!(has_warning(&trace.unwrap(), "cupti_13_0"), faulty, "{version}");
        // Nobody is warned of what is not used.
        let (_, stderr, trace) = profiled(dir.path(), &["--kernels", "off"], &[("EMU_CUPTI_VERSION", version)]);
        assert!(!has_warning(&trace.unwrap(), "cupti_13_0"), "{version}: {stderr}");
    }
}

#[test]
fn one_step_in_n_has_kernels_and_all_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let (code, stderr, whole) = profiled(dir.path(), &["--kernels", "cupti"], &[]);
    assert_eq!(code, 0, "{stderr}");
    let all = labels(&whole.unwrap());
    let (code, stderr, some) = profiled(dir.path(), &["--kernels", "cupti", "--kernel-every", "3"], &[]);
    assert_eq!(code, 0, "{stderr}");
    let some = labels(&some.unwrap());
    assert!(some.len() > 3 && some.iter().all(|(step, labels)| step % 3 == 0 && labels == &all[step]));
    assert_eq!(some.len(), all.keys().filter(|step| *step % 3 == 0).count());
}

#[test]
fn a_self_check_compares_with_a_run_that_records_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for backend in ["cpu", "cuda"] {
        let args = [&DEMO[..], &["--temperature", "0.7", "--backend", backend, "--self-check", "--out", backend]].concat();
        let (code, _, stderr) = record(dir.path(), &args, &[]);
        assert_eq!(code, 0, "{stderr}");
        // Both runs take the same memory.
        assert_eq!(stderr.matches("memory: ").count(), usize::from(backend == "cuda"), "{stderr}");
        let trace = Trace::open(&dir.path().join(backend)).unwrap();
        let manifest = trace.manifest();
        assert!(manifest.token_hash.is_some() && manifest.instrumentation.unrecorded_token_hash == manifest.token_hash, "{backend}");
    }
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
    // A window's kernels, and those of a long pass.
    let long: Vec<u32> = (0..20).map(|i| (i * 37 + 1) % 290).collect();
    for (file, tokens) in [("p.jsonl", &long[..4]), ("long.jsonl", &long[..])] {
        let line = format!("{}\n", serde_json::json!({"token_ids": tokens, "max_new_tokens": 4}));
        std::fs::write(dir.path().join(file), line).unwrap();
    }
    for (tensor, words) in [
        ("model.layers.2.mlp.gate.weight", ["layer 2", "router"]),
        ("model.layers.1.attention.f_proj.weight", ["layer 1", "attention"]),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", ["layer 3", "mlp"]),
        ("lm_head.weight", ["logits", "logits"]),
    ] {
        let model = damaged(dir.path(), tensor);
        for prompts in ["p.jsonl", "long.jsonl"] {
            let args = ["--model", model.to_str().unwrap(), "--prompts", prompts, "--draft", "none", "--backend", "cuda", "--out", "t"];
            let (code, _, stderr) = record(dir.path(), &args, &[]);
            let name = format!("{tensor}, {prompts}");
            // The memory plan, which was told before loading, and the error.
            let lines: Vec<&str> = stderr.lines().collect();
            assert!(code == 2 && lines.len() == 2 && lines[0].starts_with("memory: "), "{name}: {code} {stderr}");
            assert!(words.iter().all(|word| lines[1].contains(word)) && lines[1].contains("not a finite number"), "{name}: {stderr}");
            assert!(!dir.path().join("t").exists(), "{name}");
        }
    }
}

/// A library that is called libcuda.so.1 and is none, or an old one.
#[test]
fn a_driver_without_functions_is_said_and_is_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let old = "extern \"C\" int cuInit(unsigned) { return 0; } extern \"C\" int cuDriverGetVersion(int* v) { *v = 11040; return 0; }";
    for (name, source, words) in [
        ("nothing", "", ["cuInit and ", "does not say its version"]),
        ("only_init", "extern \"C\" int cuInit(unsigned) { return 0; }", ["cuDriverGetVersion and ", "does not say its version"]),
        ("old", old, ["cuGetErrorName and ", "is of CUDA 11.4"]),
    ] {
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
        assert!(words.iter().all(|word| stderr.contains(word)), "{name}: {stderr}");
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

pub(crate) fn has_warning(trace: &Trace, code: &str) -> bool {
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
            // A long run's first point stands for more samples than the first.
            let (first, rest) = shares.split_first().unwrap();
            assert!(first.as_f64().unwrap() < 1.0 && !rest.is_empty() && rest.iter().all(|s| s.is_null() || *s == 1.0), "{shares:?}");
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
