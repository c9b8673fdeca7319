//! The engine against reference numbers: every set under `tests/goldens` that has a `golden.safetensors`.

use specprof::engine::golden::{self, GoldenReport};
use specprof::engine::{Checkpoint, EngineError, ForwardTap, LogitRows, Mtp, NoTap, Session};
use specprof::trace::Module;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

/// Golden files with the folder of the checkpoint that they belong to.
fn sets() -> Vec<(PathBuf, PathBuf)> {
    let mut sets = Vec::new();
    for entry in std::fs::read_dir(goldens()).expect("tests/goldens") {
        let set = entry.expect("an entry of tests/goldens").path();
        let file = set.join("golden.safetensors");
        if !file.is_file() {
            continue;
        }
        // A set without a checkpoint runs the one of the set that its golden.json names.
        let mut checkpoint = set.join("checkpoint");
        if !checkpoint.is_dir() {
            let json: serde_json::Value = serde_json::from_slice(&std::fs::read(set.join("golden.json")).unwrap()).unwrap();
            checkpoint = goldens().join(json["name"].as_str().expect("a name")).join("checkpoint");
        }
        sets.push((file, checkpoint));
    }
    sets.sort();
    sets
}

fn compare(checkpoint: &Checkpoint, file: &Path) -> Result<GoldenReport, EngineError> {
    golden::compare(&checkpoint.config, &checkpoint.weights, file)
}

#[test]
fn every_golden_set_is_within_tolerance() {
    let sets = sets();
    assert!(!sets.is_empty(), "no golden sets under tests/goldens: nothing was compared");
    for (file, checkpoint) in sets {
        let checkpoint = Checkpoint::open(&checkpoint).unwrap_or_else(|e| panic!("{e}"));
        let report = compare(&checkpoint, &file).unwrap_or_else(|e| panic!("{e}"));
        let failed: Vec<_> = report.checks.iter().filter(|c| !c.passed).collect();
        assert!(report.passed(), "{}: {failed:#?}", file.display());
        let compared = |prefix: &str| report.checks.iter().filter(|c| c.name.starts_with(prefix)).count();
        let config = &checkpoint.config;
        for (name, count) in [
            ("tokens", 1),
            ("logits", 1),
            ("decode_logits", 1),
            ("hidden_final", 1),
            ("router_ids.", config.layers - config.dense_layers),
            ("mtp_logits", config.mtp_layers),
            ("mtp_router_ids", config.mtp_layers),
            ("draft_tokens", config.mtp_layers),
            ("draft_logits", config.mtp_layers),
        ] {
            assert_eq!(compared(name), count, "{}: {name}", file.display());
        }
        for rest in &report.not_compared {
            assert!(rest.name.starts_with("router_margin."), "{}: {rest:?}", file.display());
        }
    }
}

/// Cuts of a prompt, and rows that are rejected between, on every set's checkpoint: same bits.
#[test]
fn passes_of_any_size_give_the_same_bits_on_every_checkpoint() {
    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let mut checkpoints: Vec<PathBuf> = sets().into_iter().map(|(_, checkpoint)| checkpoint).collect();
    checkpoints.dedup();
    assert!(!checkpoints.is_empty());
    for path in checkpoints {
        let model = Checkpoint::open(&path).unwrap();
        let vocab = u32::try_from(model.config.vocab).unwrap();
        let tokens: Vec<u32> = (0..29).map(|i| i * 37 % vocab).collect();
        let mut whole = Session::new(&model.config, &model.weights);
        let want = whole.forward(&tokens, LogitRows::All, &mut NoTap).unwrap();
        let want: Vec<_> = (0..tokens.len()).map(|n| bits(want.logits_row(n))).collect();
        whole.commit(usize::MAX);
        for (take, rejected) in [(1, 0), (1, 3), (2, 1), (3, 4), (5, 0), (8, 2)] {
            let mut cut = Session::new(&model.config, &model.weights);
            while cut.len() < tokens.len() {
                let done = cut.len();
                let kept = take.min(tokens.len() - done);
                let mut rows = tokens[done..done + kept].to_vec();
                rows.extend((0..rejected).map(|i| (i * 5 + 1) % vocab));
                let forward = cut.forward(&rows, LogitRows::All, &mut NoTap).unwrap();
                for n in 0..kept {
                    assert_eq!(bits(forward.logits_row(n)), want[done + n], "{} row {}", path.display(), done + n);
                }
                cut.commit(kept);
            }
            for layer in 0..model.config.layers {
                assert_eq!(cut.kda_state(layer).map(bits), whole.kda_state(layer).map(bits));
                assert_eq!(cut.conv_state(layer).map(bits), whole.conv_state(layer).map(bits));
                assert_eq!(cut.mla_cache(layer).map(bits), whole.mla_cache(layer).map(bits));
            }
        }
    }
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>, safetensors::Dtype)>;

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(n, t)| (n, (t.shape().to_vec(), t.data().to_vec(), t.dtype()))).collect()
}

fn floats(tensors: &Tensors, name: &str) -> Vec<f32> {
    tensors[name].1.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn ints(tensors: &Tensors, name: &str) -> Vec<i32> {
    tensors[name].1.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

fn write(tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let views = tensors
        .iter()
        .map(|(n, (shape, data, dtype))| (n.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(dir.path().join("golden.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

fn worst(name: &str, ours: &[f32], theirs: &[f32], tolerance: f32) {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    let worst =
        ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, |w: f32, d| if d.is_nan() { f32::INFINITY } else { w.max(d) });
    assert!(worst <= tolerance, "{name}: {worst} > {tolerance}");
}

#[derive(Default)]
struct Captured {
    residual: Vec<Vec<f32>>,
    ids: BTreeMap<usize, Vec<i32>>,
    weights: BTreeMap<usize, Vec<f32>>,
}

impl ForwardTap for Captured {
    fn wants_weights(&self) -> bool {
        true
    }
    fn routed(&mut self, _: Module, layer: usize, ids: &[u16], weights: &[f32]) {
        self.ids.insert(layer, ids.iter().map(|id| i32::from(*id)).collect());
        self.weights.insert(layer, weights.to_vec());
    }
    fn after_layer(&mut self, _: Module, _: usize, rows: &[f32]) {
        self.residual.push(rows.to_vec());
    }
}

/// The built-in model on its first prompt, against the evaluator that it was trained with.
#[test]
fn the_built_in_model_agrees_with_its_trainer() {
    let golden = read(&goldens().join("ling-nano/prefill0.safetensors"));
    let model = Checkpoint::resolve(Path::new("demo")).unwrap();
    let config = &model.config;
    let tokens: Vec<u32> = ints(&golden, "token_ids").into_iter().map(|t| u32::try_from(t).unwrap()).collect();
    let mut session = Session::new(config, &model.weights);
    let mut captured = Captured::default();
    let forward = session.forward(&tokens, LogitRows::All, &mut captured).unwrap();
    worst("logits", forward.logits, &floats(&golden, "logits"), 5e-4);
    worst("hidden_after_norm", forward.hidden, &floats(&golden, "hidden_after_norm"), 1e-3);
    let last = forward.logits_row(tokens.len() - 1);
    let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
    let hidden = forward.hidden.to_vec();
    let residual = floats(&golden, "residual");
    // Row block 0 is the embedding.
    worst("residual", &captured.residual.concat(), &residual[tokens.len() * config.hidden..], 1e-3);
    session.commit(usize::MAX);
    for layer in [0, 1, 3, 4] {
        worst("kda_state", session.kda_state(layer).unwrap(), &floats(&golden, &format!("kda_state.{layer}")), 1e-3);
    }

    let next: Vec<u32> = tokens[1..].iter().copied().chain([u32::try_from(best).unwrap()]).collect();
    let mut mtp = Mtp::new(config, &model.weights).unwrap();
    let forward = mtp.extend(&next, &hidden, LogitRows::All, &mut captured).unwrap();
    worst("mtp_logits", forward.logits, &floats(&golden, "mtp_logits"), 5e-4);
    worst("mtp_hidden", forward.hidden, &floats(&golden, "mtp_hidden"), 1e-3);
    let k = config.experts_per_token;
    for layer in 1..=config.layers {
        let sorted = |ids: &[i32], weights: &[f32]| -> Vec<(i32, f32)> {
            let mut pairs: Vec<(i32, f32)> = ids.iter().copied().zip(weights.iter().copied()).collect();
            pairs.chunks_mut(k).for_each(|row| row.sort_by_key(|(id, _)| *id));
            pairs
        };
        let ours = sorted(&captured.ids[&layer], &captured.weights[&layer]);
        let theirs = sorted(&ints(&golden, &format!("router_ids.{layer}")), &floats(&golden, &format!("router_weights.{layer}")));
        assert_eq!(ours.len(), tokens.len() * k);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert_eq!(ours.0, theirs.0, "layer {layer}");
            assert!((ours.1 - theirs.1).abs() <= 2e-5, "layer {layer}: {ours:?} {theirs:?}");
        }
    }
}

/// The comparison itself: it sees a difference, and takes no bad file for a good one.
#[test]
fn a_difference_is_found_and_a_bad_file_is_an_error() {
    let (file, checkpoint) = sets().into_iter().find(|(file, _)| file.ends_with("nano/golden.safetensors")).expect("the set nano");
    let model = Checkpoint::open(&checkpoint).unwrap();
    let good = read(&file);
    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = good.clone();
        change(&mut tensors);
        let dir = write(&tensors);
        compare(&model, &dir.path().join("golden.safetensors"))
    };
    // Without golden.json the prompt's length follows from decode_logits.
    let report = changed(&|_| ()).unwrap();
    assert!(report.passed() && report.prompt_tokens == 40, "{report:?}");

    for name in
        ["logits", "decode_logits", "hidden.3", "mid.0", "kda_state.1", "mla_krope.2", "mtp_logits", "draft_logits", "router_weights.4"]
    {
        for value in [2e-3_f32, f32::NAN] {
            let report = changed(&|t| {
                let data = &mut t.get_mut(name).unwrap().1;
                let old = f32::from_le_bytes(*data.first_chunk::<4>().unwrap());
                data[..4].copy_from_slice(&(old + value).to_le_bytes());
            });
            let failed: Vec<_> = report.unwrap().checks.into_iter().filter(|c| !c.passed).map(|c| c.name).collect();
            assert_eq!(failed, [name]);
        }
    }
    for name in ["router_ids.1", "draft_tokens", "mtp_router_ids"] {
        let report = changed(&|t| t.get_mut(name).unwrap().1[0] ^= 1).unwrap();
        let failed: Vec<_> = report.checks.into_iter().filter(|c| !c.passed).map(|c| (c.name, c.worst)).collect();
        assert_eq!(failed, [(name.to_owned(), 1.0)]);
    }
    let report = changed(&|t| drop(t.insert("mystery".into(), t["mid.0"].clone()))).unwrap();
    assert!(report.not_compared.iter().any(|n| n.name == "mystery" && n.reason == "unknown name"));

    let bad: [(&str, &dyn Fn(&mut Tensors)); 7] = [
        ("no tensor `tokens`", &|t| drop(t.remove("tokens"))),
        ("negative", &|t| t.get_mut("tokens").unwrap().1[..4].fill(0xff)),
        ("vocabulary", &|t| t.get_mut("tokens").unwrap().1[2] = 1),
        ("shape", &|t| t.get_mut("hidden.2").unwrap().0 = vec![64, 56]),
        ("must be I32", &|t| t.get_mut("router_ids.1").unwrap().2 = safetensors::Dtype::F32),
        ("must be F32", &|t| t.get_mut("mid.1").unwrap().2 = safetensors::Dtype::I32),
        ("does not fit", &|t| t.get_mut("draft_tokens").unwrap().0 = vec![51, 1]),
    ];
    for (text, change) in bad {
        let error = changed(change).unwrap_err().to_string();
        assert!(error.contains(text) && error.lines().count() == 1, "{text}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("golden.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    for cut in [0, 4, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..cut]).unwrap();
        assert!(matches!(compare(&model, &path), Err(EngineError::Checkpoint { .. })), "{cut} bytes");
    }
    assert!(matches!(compare(&model, &dir.path().join("absent")), Err(EngineError::Io { .. })));
}

/// Exit codes and output of `specprof model --golden`.
#[test]
fn the_command_reports_and_gates() {
    let (file, checkpoint) = sets().into_iter().find(|(file, _)| file.ends_with("nano/golden.safetensors")).expect("the set nano");
    let run = |golden: &Path, more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_specprof"));
        command.arg("model").arg(&checkpoint).arg("--golden").arg(golden).args(more);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, stdout, stderr) = run(&file, &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{stdout}");
    assert!(stdout.contains("decode_logits") && stdout.contains("all 45 tensors within tolerance"), "{stdout}");
    assert!(stdout.contains("router_margin.1"), "what is not compared is listed");

    let mut tensors = read(&file);
    tensors.get_mut("logits").unwrap().1[..4].copy_from_slice(&100.0_f32.to_le_bytes());
    let dir = write(&tensors);
    let changed = dir.path().join("golden.safetensors");
    let (code, stdout, stderr) = run(&changed, &["--json"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("beyond tolerance: logits") && stderr.lines().count() == 1, "{stderr}");
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(json["passed"], false);
    let failed: Vec<_> = json["checks"].as_array().unwrap().iter().filter(|c| c["passed"] == false).map(|c| &c["name"]).collect();
    assert_eq!(failed, ["logits"]);

    std::fs::write(&changed, b"not a golden file").unwrap();
    let (code, stdout, stderr) = run(&changed, &[]);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(2), "", 1), "{stderr}");
    let (code, stdout, stderr) = run(&file, &["--backend", "cuda"]);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(3), "", 1), "{stderr}");
}
