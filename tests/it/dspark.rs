//! DSpark drafters from disk: the reference's numbers, what is refused and how, whatever the files hold.

use crate::safetensors_files::{Tensors, read_all, write_checkpoint};
use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use specprof::engine::dspark::{self, DsparkCheckpoint, DsparkConfig};
use specprof::engine::golden::GoldenReport;
use specprof::engine::{Checkpoint, EngineError};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Drafter sets and the sets that their targets are of.
const SETS: [(&str, &str); 4] = [("correlated", "spec"), ("prefixed", "nano"), ("x_causal", "nano"), ("x_noanchor", "nano")];

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

pub fn drafter_dir(set: &str) -> PathBuf {
    goldens().join("dspark").join(set).join("checkpoint")
}

pub static SPEC: LazyLock<Checkpoint> = LazyLock::new(|| Checkpoint::open(&goldens().join("spec/checkpoint")).unwrap());
static NANO: LazyLock<Checkpoint> = LazyLock::new(|| Checkpoint::open(&goldens().join("nano/checkpoint")).unwrap());

fn target(name: &str) -> &'static Checkpoint {
    if name == "spec" { &SPEC } else { &NANO }
}

pub fn config(set: &str) -> Value {
    serde_json::from_slice(&std::fs::read(drafter_dir(set).join("config.json")).unwrap()).unwrap()
}

fn golden_file(set: &str) -> PathBuf {
    goldens().join("dspark").join(set).join("golden.safetensors")
}

/// A set's drafter with a changed configuration or changed tensors.
pub fn changed(set: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> tempfile::TempDir {
    let (mut config, mut tensors) = (config(set), read_all(&drafter_dir(set)));
    change(&mut config, &mut tensors);
    write_checkpoint(&config, &tensors)
}

fn compare(dir: &Path, (set, of): (&str, &str)) -> Result<GoldenReport, EngineError> {
    let target = target(of);
    dspark::golden::compare(&DsparkCheckpoint::open(dir, &target.config)?, target, &golden_file(set))
}

fn failed(report: &GoldenReport) -> Vec<&str> {
    report.checks.iter().filter(|c| !c.passed).map(|c| c.name.as_str()).collect()
}

#[test]
fn every_set_is_within_tolerance() {
    for pair in SETS {
        let report = compare(&drafter_dir(pair.0), pair).unwrap_or_else(|e| panic!("{e}"));
        assert!(report.passed(), "{}: {:?}", pair.0, failed(&report));
        // 25 names, and five for each of two layers less the one that is counted among them.
        assert_eq!(report.checks.len(), 33, "{}", pair.0);
        let rest: Vec<&str> = report.not_compared.iter().map(|n| n.name.as_str()).collect();
        assert_eq!(rest, ["draft_margin", "verify_router_margin"], "{}", pair.0);
    }
}

#[test]
fn another_formula_is_seen() {
    type Change = fn(&mut Value, &mut Tensors);
    let changes: [(&str, Change, &str); 6] = [
        ("another base of RoPE", |c, _| c["rope_theta"] = json!(2e6), "ctx_k.0"),
        ("a causal block", |c, _| c["is_causal"] = json!(true), "block_r"),
        ("another mask", |c, _| c["mask_token_id"] = json!(308), "block_ids"),
        ("the layers before the tapped ones", |c, _| c["target_layer_ids"] = json!([0, 1, 2, 3]), "taps"),
        ("confidence without the bias", |_, t| t.get_mut("confidence_head.proj.bias").unwrap().1.fill(0), "conf_logit"),
        (
            "the Markov tables the other way round",
            |_, t| {
                let (of, next) = (t["markov_head.markov_w1.weight"].clone(), t["markov_head.markov_w2.weight"].clone());
                t.insert("markov_head.markov_w1.weight".into(), next);
                t.insert("markov_head.markov_w2.weight".into(), of);
            },
            "corrected_logits",
        ),
    ];
    for (what, change, name) in changes {
        let dir = changed("correlated", change);
        let report = compare(dir.path(), SETS[0]).unwrap();
        assert!(failed(&report).contains(&name), "{what}: {:?}", failed(&report));
    }
    let dir = changed("x_causal", |c, _| drop(c.as_object_mut().unwrap().remove("is_causal")));
    assert!(failed(&compare(dir.path(), SETS[2]).unwrap()).contains(&"block_r"), "a block sees all of itself by default");
}

/// The same settings at every place where writers put them.
#[test]
fn settings_are_found_wherever_writers_put_them() {
    let moved = ["block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "sample_from_anchor"];
    let parse = |value: &Value| DsparkConfig::parse(Path::new("config.json"), value.to_string().as_bytes()).map(|(c, _)| c);
    let mut plain = config("x_noanchor");
    plain["sample_from_anchor"] = json!(false);
    let want = parse(&plain).unwrap();
    assert_eq!((want.drafts(), want.first_row(), want.taps.as_slice()), (4, 1, &[1, 3, 4][..]));
    for place in ["dspark_config", "dflash_config"] {
        let mut nested = plain.clone();
        let object = nested.as_object_mut().unwrap();
        let inner: Value =
            moved.iter().filter_map(|key| Some(((*key).to_owned(), object.remove(*key)?))).collect::<serde_json::Map<_, _>>().into();
        object.insert(place.into(), inner);
        assert_eq!(parse(&nested).unwrap(), want, "{place}");
        // What is nested wins over the top level, and the old names over both.
        nested["block_size"] = json!(7);
        assert_eq!(parse(&nested).unwrap(), want);
        nested["dspark_block_size"] = json!(3);
        nested["dspark_noise_token_id"] = json!(9);
        let old = parse(&nested).unwrap();
        assert_eq!((old.block_size, old.mask_token), (3, 9));
    }
    let mut rope = plain.clone();
    rope.as_object_mut().unwrap().remove("rope_theta");
    assert!(parse(&rope).unwrap_err().to_string().contains("`rope_theta` is missing"));
    rope["rope_parameters"] = json!({"rope_type": "default", "rope_theta": want.rope_theta});
    // A copy of the target's own key, which means nothing here.
    rope["partial_rotary_factor"] = json!(0.5);
    assert_eq!(parse(&rope).unwrap(), want);
}

#[test]
fn what_is_not_implemented_or_impossible_is_refused_by_name() {
    let refused = |key: &str, value: Value| {
        let mut config = config("correlated");
        config[key] = value;
        let error = DsparkConfig::parse(Path::new("config.json"), config.to_string().as_bytes()).expect_err(key).to_string();
        assert!(error.starts_with("config.json: ") && error.lines().count() == 1, "{error}");
        error
    };
    for (key, value) in [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("attention_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("markov_head_type", json!("gated")),
        ("rope_scaling", json!({"type": "yarn"})),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("use_sliding_window", json!(true)),
        ("mask_token_id", json!(320)),
        ("mask_token_id", Value::Null),
        ("block_size", json!(0)),
        ("block_size", json!(17)),
        ("target_layer_ids", json!([0, 2, 2])),
        ("target_layer_ids", json!([-1, 2])),
        ("target_layer_ids", json!([])),
        ("markov_rank", Value::Null),
        ("head_dim", json!(31)),
        ("num_key_value_heads", json!(3)),
        ("rms_norm_eps", json!(0)),
        ("rope_theta", json!(0.5)),
    ] {
        let error = refused(key, value);
        let name = if key == "architectures" { "architectures[0]" } else { key };
        assert!(error.contains(&format!("`{name}`")), "{key}: {error}");
    }
    assert!(refused("dflash_config", json!(5)).contains("`dflash_config` is 5; expected an object"));
    assert!(refused("dflash_config", json!({"block_size": -3})).contains("`dflash_config.block_size` is -3"));
    assert!(refused("dspark_config", json!({"markov_rank": 0})).contains("`markov_rank` is 0"));
}

#[test]
fn a_drafter_of_another_target_is_refused() {
    let open = |dir: &Path, of: &str| DsparkCheckpoint::open(dir, &target(of).config).unwrap_err().to_string();
    let layers = open(changed("correlated", |c, _| c["num_target_layers"] = json!(12)).path(), "spec");
    assert!(layers.contains("its num_target_layers is 12, the target's is 6") && layers.contains("config.json"), "{layers}");
    let vocab = open(changed("correlated", |c, _| c["vocab_size"] = json!(640)).path(), "spec");
    assert!(vocab.contains("its vocab_size is 640, the target's is 320"), "{vocab}");
    let tapped = changed("correlated", |c, _| {
        c.as_object_mut().unwrap().remove("num_target_layers");
        c["target_layer_ids"] = json!([0, 2, 3, 6]);
    });
    assert!(open(tapped.path(), "spec").contains("it taps layer 6, the target has 6"));
    // The two roles are not mixed up.
    let model = Checkpoint::open(&drafter_dir("correlated")).unwrap_err().to_string();
    assert!(model.contains("it is a drafter") && model.contains("--draft-model"), "{model}");
    assert!(open(&goldens().join("spec/checkpoint"), "spec").contains("`architectures[0]` is \"BailingMoeV3ForCausalLM\""));
}

#[test]
fn all_tensors_that_do_not_fit_are_named_at_once() {
    let dir = changed("correlated", |_, tensors| {
        tensors.remove("fc.weight");
        tensors.remove("layers.1.self_attn.q_norm.weight");
        tensors.insert("layers.2.mlp.gate_proj.weight".into(), tensors["layers.1.mlp.gate_proj.weight"].clone());
        tensors.get_mut("norm.weight").unwrap().0 = vec![32, 2];
        let proj = tensors.get_mut("confidence_head.proj.weight").unwrap();
        *proj = (vec![1, 64], proj.1[..128].to_vec(), Dtype::BF16);
    });
    let error = DsparkCheckpoint::open(dir.path(), &SPEC.config).unwrap_err().to_string();
    for part in [
        "2 missing: fc.weight, layers.1.self_attn.q_norm.weight",
        "1 unexpected: layers.2.mlp.gate_proj.weight",
        "2 of a wrong shape or type: norm.weight is BF16 [32, 2]",
        "confidence_head.proj.weight is BF16 [1, 64]",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(error.lines().count(), 1);
    let twice = changed("correlated", |_, tensors| drop(tensors.insert("model.fc.weight".into(), tensors["fc.weight"].clone())));
    let error = DsparkCheckpoint::open(twice.path(), &SPEC.config).unwrap_err().to_string();
    assert!(error.contains("with the prefix `model.` and without it"), "{error}");
    let infinite = changed("correlated", |_, tensors| tensors.get_mut("norm.weight").unwrap().1[..2].copy_from_slice(&[0x80, 0x7f]));
    assert!(matches!(DsparkCheckpoint::open(infinite.path(), &SPEC.config), Err(EngineError::NotFinite { what }) if what == "norm.weight"));
}

/// Frozen copies may be there, may be wrong, may be absent: the target's own are used. A head that is switched off is none.
#[test]
fn copies_of_the_target_are_not_looked_at() {
    let open = |dir: &Path| DsparkCheckpoint::open(dir, &NANO.config).unwrap();
    let with = open(&drafter_dir("prefixed"));
    let names = ["model.embed_tokens.weight", "model.lm_head.weight"];
    let without = changed("prefixed", |_, tensors| assert!(names.iter().all(|name| tensors.remove(*name).is_some())));
    assert_eq!(open(without.path()).inventory, with.inventory);
    assert!(compare(without.path(), SETS[1]).unwrap().passed());

    let off = changed("x_causal", |config, _| config["enable_confidence_head"] = json!(false));
    assert!(open(off.path()).weights.confidence.is_none());
    let left_open = changed("x_causal", |config, _| drop(config.as_object_mut().unwrap().remove("enable_confidence_head")));
    assert!(open(left_open.path()).weights.confidence.is_some(), "the tensors are there");
    let report = compare(off.path(), SETS[2]).unwrap();
    assert!(report.passed() && report.not_compared.iter().any(|n| n.name == "conf_logit" && n.reason.contains("no confidence head")));
}

#[test]
fn a_damaged_weight_is_an_error_that_names_its_place() {
    let first = [0x80, 0x7f];
    for (name, place) in [
        ("fc.weight", "DSpark drafter, fc output"),
        ("layers.1.self_attn.k_proj.weight", "DSpark drafter, layer 1: k_proj output"),
        ("layers.0.mlp.up_proj.weight", "DSpark drafter, layer 0: up_proj output"),
        ("markov_head.markov_w2.weight", "DSpark drafter, Markov head"),
    ] {
        let dir = changed("correlated", |_, tensors| tensors.get_mut(name).unwrap().1[..2].copy_from_slice(&first));
        let error = compare(dir.path(), SETS[0]).unwrap_err().to_string();
        assert!(error.starts_with(place), "{name}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any value at any key: a configuration or one line, never a panic.
    #[test]
    fn any_configuration_is_taken_or_refused(
        key in prop::sample::select(config("correlated").as_object().unwrap().keys().cloned()
            .chain(["dflash_config", "dspark_config", "rope_parameters", "dspark_block_size", "quantization_config"].map(str::to_owned)).collect::<Vec<_>>()),
        value in prop::sample::select(vec![json!(null), json!(-1), json!(0), json!(1), json!(3), json!(1e300), json!(u64::MAX), json!(0.5),
            json!(""), json!("full_attention"), json!([]), json!([0]), json!([[0]]), json!([1, 5]), json!({}), json!({"block_size": 2}),
            json!({"rope_theta": 1e300}), json!({"quant_method": "fp8"}), json!(true), json!(false), json!(1 << 20), json!(4096)]),
    ) {
        let mut value_of = config("correlated");
        value_of[&key] = value;
        match DsparkConfig::parse(Path::new("config.json"), value_of.to_string().as_bytes()) {
            Ok((config, _)) => prop_assert!(config.drafts() >= 1 && config.drafts() <= 15),
            Err(error) => prop_assert_eq!(error.to_string().lines().count(), 1),
        }
        // Opened beside the tensors of the set: taken or one line.
        let dir = write_checkpoint(&value_of, &read_all(&drafter_dir("correlated")));
        if let Err(error) = DsparkCheckpoint::open(dir.path(), &SPEC.config) {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }
}

/// Exit codes and output of `specprof model DRAFTER --target DIR --golden FILE`.
#[test]
fn the_command_reports_and_gates() {
    let run = |dir: &Path, of: &str, more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_specprof"));
        command.arg("model").arg(dir).arg("--target").arg(goldens().join(of).join("checkpoint")).args(more);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let file = golden_file("correlated");
    let golden = ["--golden", file.to_str().unwrap()];
    let (code, stdout, stderr) = run(&drafter_dir("correlated"), "spec", &golden);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{stdout}");
    assert!(stdout.contains("87 tokens, 40 of them prompt") && stdout.contains("all 33 tensors within tolerance"), "{stdout}");
    let wrong = changed("correlated", |c, _| c["rope_theta"] = json!(2e6));
    let (code, stdout, stderr) = run(wrong.path(), "spec", &golden);
    assert_eq!((code, stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.contains("beyond tolerance") && stdout.contains("FAILED"), "{stderr}");
    // The wrong target, a golden file of another drafter, no golden file.
    let (code, stdout, stderr) = run(&drafter_dir("correlated"), "tiny8", &golden);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(2), "", 1), "{stderr}");
    let other = golden_file("x_noanchor");
    let (code, _, stderr) = run(&drafter_dir("prefixed"), "nano", &["--golden", other.to_str().unwrap()]);
    assert_eq!((code, stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("is it the drafter of this set?"), "{stderr}");

    // Without one, what the drafter consists of.
    let (code, stdout, _) = run(&drafter_dir("prefixed"), "nano", &[]);
    assert!(code == Some(0) && stdout.contains("a block of 6 rows makes 6 drafts"), "{stdout}");
    assert!(stdout.contains("tapped layers 0, 2, 4") && stdout.contains("Markov head"), "{stdout}");
    let (code, stdout, _) = run(&drafter_dir("x_noanchor"), "nano", &["--json"]);
    let json: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (code, &json["drafts"], &json["target_layer_ids"], &json["mask_token_id"]),
        (Some(0), &json!(4), &json!([1, 3, 4]), &json!(307))
    );
    let parts = json["components"].as_array().unwrap();
    let total: u64 = parts.iter().map(|part| part["parameters"].as_u64().unwrap()).sum();
    assert_eq!(json["total_parameters"], total);
    // What is stored, less the frozen copies, of which this set has none.
    let stored: usize = read_all(&drafter_dir("x_noanchor")).values().map(|(shape, ..)| shape.iter().product::<usize>()).sum();
    assert_eq!(total as usize, stored);
}
