//! Checkpoints from disk: what loads, what is refused and how, whatever the files hold.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use specprof::engine::files::CheckpointFiles;
use specprof::engine::tensors::Component;
use specprof::engine::weights::{Attention, Mlp};
use specprof::engine::{Checkpoint, EngineError};
use std::fs;
use std::path::{Path, PathBuf};

fn golden(set: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(set).join("checkpoint")
}

/// A copy of a golden checkpoint that a test may damage.
fn copy(set: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(set)).unwrap() {
        let entry = entry.unwrap();
        fs::write(dir.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    dir
}

/// A safetensors file taken apart.
struct Shard {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl Shard {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Self { header: serde_json::from_slice(&bytes[8..8 + n]).unwrap(), data: bytes[8 + n..].to_vec() }
    }

    fn write(&self, path: &Path) {
        write_raw(path, Value::Object(self.header.clone()).to_string().as_bytes(), &self.data);
    }

    fn range(&self, name: &str) -> std::ops::Range<usize> {
        let offsets = &self.header[name]["data_offsets"];
        offsets[0].as_u64().unwrap() as usize..offsets[1].as_u64().unwrap() as usize
    }
}

fn write_raw(path: &Path, header: &[u8], data: &[u8]) {
    let bytes: Vec<u8> =
        (header.len() as u64).to_le_bytes().into_iter().chain(header.iter().copied()).chain(data.iter().copied()).collect();
    fs::write(path, bytes).unwrap();
}

const FIRST: &str = "model-00001-of-00002.safetensors";

fn error(dir: &Path) -> String {
    let text = Checkpoint::open(dir).expect_err("must be refused").to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn goldens_open_with_the_tensors_that_they_have() {
    for (set, parameters, tensors, format) in
        [("nano", 874_864, 418, "bf16"), ("fp4", 1_876_340, 397, "mxfp4"), ("int4", 1_598_628, 507, "int4")]
    {
        let checkpoint = Checkpoint::open(&golden(set)).unwrap();
        let total = checkpoint.inventory.total();
        assert_eq!((total.parameters, total.tensors), (parameters, tensors), "{set}");
        assert_eq!(checkpoint.expert_format(), format);
        assert_eq!(checkpoint.weights.layers.len(), checkpoint.config.layers);
        assert!(checkpoint.weights.mtp.is_some());
        // Stored bytes are those of the files' data.
        let stored: usize = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
            .iter()
            .map(|f| Shard::read(&golden(set).join(f)).data.len())
            .sum();
        assert_eq!(total.bytes as usize, stored, "{set}");
        assert_eq!(checkpoint.config.eos, [295]);
        assert!(checkpoint.file("tokenizer.json").unwrap().is_some() && checkpoint.file("chat_template.jinja").unwrap().is_none());
    }
}

#[test]
fn the_roles_hold_the_tensors_of_their_names() {
    let checkpoint = Checkpoint::open(&golden("nano")).unwrap();
    let shard = Shard::read(&golden("nano").join(FIRST));
    let Attention::Kda(kda) = &checkpoint.weights.layers[0].attention else { panic!("layer 0 is KDA") };
    let f32s = |name: &str| shard.data[shard.range(name)].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>();
    let decay: Vec<f32> = f32s("model.layers.0.attention.A_log").iter().map(|a| a.exp()).collect();
    assert_eq!(kda.decay_scale, decay);
    assert_eq!(kda.dt_bias, f32s("model.layers.0.attention.dt_bias"));
    let mut row = vec![0.0; kda.f.cols()];
    kda.f.decode_row(3, &mut row);
    let stored = &shard.data[shard.range("model.layers.0.attention.f_proj.weight")][3 * row.len() * 2..][..row.len() * 2];
    let want: Vec<f32> = stored.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect();
    assert_eq!(row, want);
    assert!(
        matches!(checkpoint.weights.layers[0].mlp, Mlp::Dense(_)) && matches!(checkpoint.weights.layers[2].attention, Attention::Mla(_))
    );
    assert_eq!(checkpoint.inventory.of(Component::RoutedExperts).parameters, 5 * 16 * 3 * 32 * 64);
}

#[test]
fn the_built_in_model_is_the_one_that_it_says() {
    let nano = Checkpoint::resolve(Path::new("demo")).unwrap();
    assert_eq!((nano.name.as_str(), nano.inventory.total().parameters, nano.inventory.total().tensors), ("ling-nano", 6_228_944, 1_276));
    assert_eq!(nano.config.eos.first(), Some(&2028));
    assert!(nano.file("chat_template.jinja").unwrap().is_some());
    let shape = nano.shape();
    assert_eq!((shape.bytes_per_expert, shape.moe_layers, shape.draft_layers), (Some(24_576), vec![1, 2, 3, 4, 5], vec![6]));
    assert_eq!(shape.identity.unwrap().len(), 64);
}

#[test]
fn the_identity_covers_config_tokenizer_and_headers_but_not_values() {
    let original = Checkpoint::open(&golden("nano")).unwrap().identity;
    let dir = copy("nano");
    let identity = || Checkpoint::open(dir.path()).unwrap().identity;
    assert_eq!(identity(), original);
    let path = dir.path().join(FIRST);
    let mut shard = Shard::read(&path);
    let bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    let mut touched = bytes.clone();
    touched[last] ^= 1;
    fs::write(&path, &touched).unwrap();
    assert_eq!(identity(), original);
    shard.header.insert("__metadata__".into(), json!({"format": "other"}));
    shard.write(&path);
    assert_ne!(identity(), original);
    fs::write(&path, bytes).unwrap();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert_ne!(identity(), original);
}

#[test]
fn one_error_names_all_tensors_that_do_not_fit() {
    let dir = copy("nano");
    let path = dir.path().join(FIRST);
    let mut shard = Shard::read(&path);
    for (from, to) in
        [("model.layers.0.attention.A_log", "model.layers.0.attention.A_log.weight"), ("model.layers.1.mlp.gate.weight", "stray")]
    {
        let entry = shard.header.remove(from).unwrap();
        shard.header.insert(to.into(), entry);
    }
    shard.header["model.layers.0.attention.q_proj.weight"]["shape"] = json!([32, 128]);
    shard.header["model.layers.0.attention.dt_bias"]["dtype"] = json!("I32");
    shard.write(&path);
    let text = error(dir.path());
    assert!(text.contains("2 missing: model.layers.0.attention.A_log, model.layers.1.mlp.gate.weight;"), "{text}");
    assert!(text.contains("2 unexpected: model.layers.0.attention.A_log.weight, stray;"), "{text}");
    assert!(
        text.contains("2 of a wrong shape or type: ") && text.contains("q_proj.weight is BF16 [32, 128], expected a matrix [64, 64]"),
        "{text}"
    );
    assert!(text.contains("dt_bias is I32 [64], expected BF16 or F32 [64]"), "{text}");
}

#[test]
fn long_lists_of_missing_tensors_are_cut_with_their_count() {
    let dir = copy("nano");
    let config = fs::read_to_string(dir.path().join("config.json")).unwrap();
    fs::write(dir.path().join("config.json"), config.replace("\"num_experts\": 16", "\"num_experts\": 512")).unwrap();
    let text = error(dir.path());
    // 496 experts x 3 matrices in six MoE layers (five and the MTP block's).
    assert!(text.contains("8928 missing: ") && text.contains(" and 8918 more"), "{text}");
    assert!(text.len() < 4096, "{}", text.len());
}

#[test]
fn leftovers_of_writers_are_ignored() {
    let dir = copy("nano");
    let path = dir.path().join(FIRST);
    let mut shard = Shard::read(&path);
    for name in ["model.layers.2.attention.rotary_emb.inv_freq", "model.mtp.extra.weight"] {
        let begin = shard.data.len();
        shard.data.extend([0; 8]);
        shard.header.insert(name.into(), json!({"dtype": "F32", "shape": [2], "data_offsets": [begin, begin + 8]}));
    }
    // Some writers keep the axes over which A_log is broadcast.
    shard.header["model.layers.0.attention.A_log"]["shape"] = json!([1, 1, 2, 1]);
    shard.write(&path);
    Checkpoint::open(dir.path()).unwrap();
    // Without an MTP block in the configuration, its layer is left alone.
    let config = fs::read_to_string(dir.path().join("config.json")).unwrap();
    fs::write(dir.path().join("config.json"), config.replace("\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 0"))
        .unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.weights.mtp.is_none() && checkpoint.inventory.draft.is_empty());
}

#[test]
fn small_tensors_that_are_not_finite_are_named() {
    for (tensor, value, named) in [
        ("dt_bias", f32::NAN, "model.layers.0.attention.dt_bias"),
        ("A_log", f32::NEG_INFINITY, "model.layers.0.attention.A_log"),
        ("A_log", 100.0, "exp(model.layers.0.attention.A_log)"),
    ] {
        let dir = copy("nano");
        let path = dir.path().join(FIRST);
        let mut shard = Shard::read(&path);
        let range = shard.range(&format!("model.layers.0.attention.{tensor}"));
        shard.data[range][4..8].copy_from_slice(&value.to_le_bytes());
        shard.write(&path);
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(matches!(&error, EngineError::NotFinite { what } if what == named), "{error}");
    }
}

#[test]
fn damaged_headers_are_refused() {
    let dir = copy("nano");
    let path = dir.path().join(FIRST);
    let good = fs::read(&path).unwrap();
    let (n, shard) = (u64::from_le_bytes(good[..8].try_into().unwrap()), Shard::read(&path));
    let check = |bytes: &[u8], word: &str| {
        fs::write(&path, bytes).unwrap();
        let text = error(dir.path());
        assert!(text.contains(word) && text.contains(FIRST), "{word}: {text}");
    };
    check(&[], "too short");
    check(&good[..7], "too short");
    check(&good[..200], "truncated");
    check(&good[..good.len() - 1], "truncated");
    for huge in [u64::MAX, u64::MAX - 8, 1 << 40, n + good.len() as u64] {
        check(&[&huge.to_le_bytes(), &good[8..]].concat(), "announces a header");
    }
    check(&[&0u64.to_le_bytes(), &good[8..]].concat(), "damaged header");

    let name = "model.layers.0.attention.A_log";
    let with = |entry: Value| {
        let mut header = shard.header.clone();
        header.insert(name.into(), entry);
        write_raw(&path, Value::Object(header).to_string().as_bytes(), &shard.data);
        error(dir.path())
    };
    let entry = shard.header[name].clone();
    for (key, value) in [
        ("data_offsets", json!([0, u64::MAX])),
        ("data_offsets", json!([8, 0])),
        ("data_offsets", json!([1u64 << 63, 1u64 << 63])),
        ("data_offsets", json!([-1, 8])),
        ("data_offsets", json!("x")),
        ("shape", json!([1u64 << 40, 1u64 << 40])),
        ("shape", json!([u64::MAX, 2])),
        ("shape", json!([3])),
        ("dtype", json!("F8_UNKNOWN")),
        ("dtype", json!(null)),
    ] {
        let mut entry = entry.clone();
        entry[key] = value;
        let text = with(entry);
        assert!(text.contains(FIRST), "{text}");
    }

    // The same name twice with the same place, which a JSON map would swallow.
    let header = Value::Object(shard.header.clone()).to_string();
    let twice = format!("{},\"{name}\":{entry}}}", header.strip_suffix('}').unwrap());
    write_raw(&path, twice.as_bytes(), &shard.data);
    assert!(error(dir.path()).contains("occurs twice"));
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let dir = copy("nano");
    fs::copy(dir.path().join(FIRST), dir.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert!(error(dir.path()).contains("also in another file"));
}

#[test]
fn an_index_cannot_leave_the_directory() {
    let dir = copy("nano");
    let index = dir.path().join("model.safetensors.index.json");
    for file in ["../model.safetensors", "/etc/hostname.safetensors", "a/b.safetensors", "..", "", "c:\\x.safetensors", "passwd"] {
        fs::write(&index, json!({"weight_map": {"lm_head.weight": file}}).to_string()).unwrap();
        let text = error(dir.path());
        assert!(text.contains("weight_map") && text.contains("lm_head.weight"), "{file}: {text}");
    }
    fs::write(&index, json!({"weight_map": {"lm_head.weight": "absent.safetensors"}}).to_string()).unwrap();
    assert!(error(dir.path()).contains("absent.safetensors: is not there"));
    fs::write(&index, "{\"weight_map\": {}}").unwrap();
    assert!(error(dir.path()).contains("empty"));
    fs::write(&index, "[").unwrap();
    assert!(error(dir.path()).contains("not a safetensors index"));
}

#[test]
fn quantised_companions_must_fit() {
    let dir = copy("int4");
    let path = dir.path().join(FIRST);
    let good = Shard::read(&path);
    let base = "model.layers.1.mlp.experts.0.gate_proj";
    let mut shard = Shard { header: good.header.clone(), data: good.data.clone() };
    let range = shard.range(&format!("{base}.weight_shape"));
    shard.data[range][0] ^= 1;
    shard.write(&path);
    let text = error(dir.path());
    assert!(
        text.contains("1 of a wrong shape or type: ")
            && text.contains(&format!("{base}.weight_shape says [65, 128], expected I64 [64, 128]")),
        "{text}"
    );
    assert!(!text.contains("unexpected"), "{text}");

    let mut shard = Shard { header: good.header.clone(), data: good.data.clone() };
    let scale = shard.header.remove(&format!("{base}.weight_scale")).unwrap();
    shard.header.insert("stray".into(), scale);
    shard.write(&path);
    assert!(error(dir.path()).contains(&format!("1 missing: {base}.weight_scale; 1 unexpected: stray")));

    let dir = copy("fp4");
    let path = dir.path().join(FIRST);
    let mut shard = Shard::read(&path);
    shard.header["model.layers.0.attention.f_proj.weight_scale_inv"]["shape"] = json!([1]);
    shard.header["model.layers.1.mlp.experts.0.up_proj.weight"]["shape"] = json!([128, 32]);
    shard.write(&path);
    let text = error(dir.path());
    assert!(text.contains("f_proj.weight_scale_inv is F8_E8M0 [1], expected F32 or F8_E8M0 [1, 1]"), "{text}");
    assert!(text.contains("up_proj.weight is I8 [128, 32], expected two MXFP4 values a byte [64, 64]"), "{text}");
}

#[test]
fn a_place_that_is_no_checkpoint_says_so() {
    let dir = tempfile::tempdir().unwrap();
    assert!(error(&dir.path().join("absent")).contains("does not exist"));
    assert!(error(dir.path()).contains("config.json: is not there"));
    fs::create_dir(dir.path().join("config.json")).unwrap();
    assert!(error(dir.path()).contains("not a regular file"));
}

#[test]
fn embedded_files_and_a_directory_are_the_same_model() {
    let read = |file: &str| -> &'static [u8] { Box::leak(fs::read(golden("nano").join(file)).unwrap().into_boxed_slice()) };
    let names = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        FIRST,
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ];
    let files: Vec<(&'static str, &'static [u8])> = names.iter().map(|&name| (name, read(name))).collect();
    let embedded = Checkpoint::load(CheckpointFiles::Embedded { name: "nano", files: Box::leak(files.into_boxed_slice()) }).unwrap();
    let directory = Checkpoint::open(&golden("nano")).unwrap();
    assert_eq!((embedded.identity, embedded.config, embedded.inventory), (directory.identity, directory.config, directory.inventory));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any bytes changed in a header give a model or an error, never a panic.
    #[test]
    fn mutated_headers_never_panic(set in prop::sample::select(vec!["nano", "fp4", "int4"]),
                                   changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let dir = copy(set);
        let path = dir.path().join(FIRST);
        let mut bytes = fs::read(&path).unwrap();
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (index, byte) in changes {
            bytes[index.index(end)] = byte;
        }
        fs::write(&path, bytes).unwrap();
        if let Err(error) = Checkpoint::open(dir.path()) {
            prop_assert!(error.to_string().lines().count() >= 1);
        }
    }

    /// A file cut anywhere is refused.
    #[test]
    fn truncated_files_are_refused(at in any::<prop::sample::Index>()) {
        let dir = copy("fp4");
        let path = dir.path().join(FIRST);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..at.index(bytes.len())]).unwrap();
        prop_assert!(Checkpoint::open(dir.path()).is_err());
    }

    /// Digits in shapes, offsets and types replaced by hostile numbers.
    #[test]
    fn hostile_numbers_are_refused(pick in any::<prop::sample::Index>(), key in prop::sample::select(vec!["shape", "data_offsets"]),
                                   first in prop_oneof![Just(u64::MAX), Just(1u64 << 62), any::<u64>()], second in any::<u64>()) {
        let dir = copy("int4");
        let path = dir.path().join(FIRST);
        let mut shard = Shard::read(&path);
        let names: Vec<String> = shard.header.keys().filter(|name| *name != "__metadata__").cloned().collect();
        let entry = &mut shard.header[&names[pick.index(names.len())]];
        prop_assume!(entry[key] != json!([first, second]));
        entry[key] = json!([first, second]);
        shard.write(&path);
        prop_assert!(Checkpoint::open(dir.path()).is_err());
    }
}

mod command {
    use super::*;
    use assert_cmd::Command;
    use predicates::prelude::*;

    fn specprof() -> Command {
        Command::cargo_bin("specprof").unwrap()
    }

    #[test]
    fn json_of_the_built_in_model() {
        let output = specprof().args(["model", "demo", "--json", "--rows", "1,4"]).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&json["name"], &json["total_parameters"], &json["tensors"]), (&json!("ling-nano"), &json!(6_228_944), &json!(1_276)));
        let rows = json["forecast"]["by_rows"].as_array().unwrap();
        assert_eq!((rows.len(), &rows[0]["uniform"]["union"]), (2, &json!(4.0)));
        assert!((rows[1]["uniform"]["union"].as_f64().unwrap() - 14.56).abs() < 0.005);
        assert!(json["forecast"]["kind"].as_str().unwrap().contains("not a measurement"));
        let prompt = &json["prompt_pass"];
        assert_eq!((&prompt["prompt_rows"], &prompt["context"]), (&json!(512), &json!(0)));
        let parts = prompt["parts"].as_array().unwrap();
        let sum: u64 = parts.iter().map(|part| part["operations"].as_u64().unwrap()).sum();
        assert_eq!(prompt["total_operations"], sum);
        // More than two for each active parameter but the head's, which has one row.
        let head = parts.iter().find(|part| part["component"] == "head").unwrap()["operations"].as_u64().unwrap();
        assert!(sum > 512 * (2 * json["active_parameters"].as_u64().unwrap() - head), "{prompt}");
        assert!(parts.iter().any(|part| part["component"] == "mla" && part["part"] == "attention"), "{prompt}");
        specprof().args(["model", "demo", "--prompt-rows", "0"]).assert().code(2);
    }

    #[test]
    fn tables_of_a_preset_and_of_a_folder() {
        let tables = specprof().args(["model", "ling-3.0-flash"]).env("COLUMNS", "100").assert().success().stderr("");
        tables.stdout(
            predicate::str::contains("127 486 405 600").and(predicate::str::contains("2.10x")).and(predicate::str::contains("10.35 GB")),
        );
        let tables = specprof().arg("model").arg(golden("fp4")).assert().success();
        tables.stdout(predicate::str::contains("in mxfp4").and(predicate::str::contains("identity ")));
    }

    #[test]
    fn wrong_names_and_models_are_usage_errors() {
        let refused = specprof().args(["model", "ling-9"]).assert().code(2).stdout("");
        refused.stderr(predicate::str::contains("ling-3.0-flash").and(predicate::str::contains("demo")));
        let dir = copy("nano");
        let config = fs::read_to_string(dir.path().join("config.json")).unwrap();
        fs::write(dir.path().join("config.json"), config.replace("\"kda_safe_gate\": true", "\"kda_safe_gate\": false")).unwrap();
        let refused = specprof().arg("model").arg(dir.path()).assert().code(2).stdout("");
        refused.stderr(predicate::str::contains("`kda_safe_gate` is false, which is not implemented; only true is"));
        specprof().args(["model", "demo", "--rows", "4-2"]).assert().code(2).stdout("");
    }
}
