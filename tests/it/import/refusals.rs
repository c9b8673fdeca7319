//! What would be ignored or misread is refused, and the answer names what it is about.

use super::cases::npy;
use super::pt::{P, save, tensor};
use super::recorder::{pass, written};
use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One fixture a kind of file, with what it needs.
const KINDS: &[(&str, &str, &[&str])] = &[
    ("vllm", "vllm/completions_response_v0.33.json", &[]),
    ("sglang", "sglang/generate_response_v0.5.23.json", &["--layers", "6", "--k", "8"]),
    ("sglang", "sglang_recorder/per_token_spec_verify_cuda0_rank0.pt", &[]),
    ("sglang", "sglang_recorder/stat_buffer8.pt", &[]),
    ("llamacpp", "llamacpp/A_pr28544_layer_expert.csv", &["--k", "4"]),
    ("llamacpp", "llamacpp/F_moetrc01.moetrace", &[]),
    ("npy", "vllm/routed_experts_uint8.npy", &[]),
    ("torch", "r3/verl_padded_batch.pt", &[]),
    ("trtllm", "trtllm/expert_statistic/rank0.safetensors", &[]),
    ("imatrix", "imatrix/imatrix_handmade.gguf", &[]),
    ("kineto", "kineto/synthetic_cuda_graph_steps.json", &[]),
    ("nsys", "nsys/synthetic_node_mode_nvtx.sqlite", &[]),
];

#[test]
fn an_option_that_says_nothing_of_the_file_is_refused() {
    let values = [
        ("--layers", "moe-only"),
        ("--experts", "64"),
        ("--k", "4"),
        ("--id-space", "logical"),
        ("--axes", "tlk"),
        ("--member", "x"),
        ("--kind", "routes"),
        ("--draft-len", "1"),
        ("--prompt-tokens", "2"),
        ("--device", "0"),
    ];
    for &(name, file, needs) in KINDS {
        let importer = specprof::import::find(name)[usize::from(name == "sglang" && file.ends_with(".pt"))];
        for (flag, value) in values {
            let taken = importer.takes().iter().any(|f| f.name() == flag);
            if taken || needs.contains(&flag) {
                continue;
            }
            let path = data(file);
            let error = refused(&[&[name, text(&path), flag, value], needs].concat());
            assert!(error.contains(flag) && error.contains(name), "{file} {flag}: {error}");
        }
        for flag in ["--packed-weights", "--keep-padding"].iter().filter(|flag| !importer.takes().iter().any(|f| f.name() == **flag)) {
            let path = data(file);
            assert!(refused(&[&[name, text(&path), *flag], needs].concat()).contains(flag), "{file} {flag}");
        }
    }
    // Where only some files of a format use an option, the others refuse it.
    let at = |file: &str| data(file).to_str().unwrap().to_owned();
    let error = |file: &str, args: &[&str]| refused(&[&[at(file).as_str()], args].concat());
    assert!(error("sglang_recorder/stat_buffer8.pt", &["--draft-len", "2"]).contains("--draft-len says nothing of counts"));
    assert!(error("sglang_recorder/per_pass_rank0.pt", &["--keep-padding"]).contains("--keep-padding says nothing of counts"));
    assert!(error("sglang_recorder/per_token_decode_padded_cpu_rank0.pt", &["--draft-len", "2"]).contains("no verify pass"));
    assert!(error("llamacpp/D_phase_token_layer_rank_expert.csv", &["--prompt-tokens", "2"]).contains("--prompt-tokens says nothing"));
    assert!(error("trtllm/expert_statistic/rank0.safetensors", &["--keep-padding"]).contains("--keep-padding"));
    assert!(error("vllm/routed_experts_uint8.npy", &["--member", "ids"]).contains("--member names an array of an archive"));
    assert!(error("vllm/completions_response_v0.33.json", &["--first-dense", "1"]).contains("moe-only"));
    let counts = ["--kind", "counts", "--axes", "tle", "--packed-weights"];
    assert!(error("r3/moe_infinity_trace_capacity_layers_experts.npy", &counts).contains("--packed-weights says nothing"));
    // The help lists what each format takes.
    let help = specprof().args(["import", "--help"]).assert().success();
    let help = String::from_utf8(help.get_output().stdout.clone()).unwrap();
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&help).contains(&words(&specprof::import::flags::table())), "{help}");
}

#[test]
fn numbers_that_the_file_says_are_compared() {
    let at = |file: &str| data(file).to_str().unwrap().to_owned();
    for file in ["B_fork_pos_layer_ids.csv", "C_int32_records.bin", "D_phase_token_layer_rank_expert.csv", "E_user_query_prefill_only.csv"]
    {
        let error = refused(&[&at(&format!("llamacpp/{file}")), "--k", "2"]);
        assert!(error.contains("4 experts per row") && error.contains("says 2"), "{file}: {error}");
    }
    for file in ["F_moetrc01.moetrace", "G_flash_moe.jsonl"] {
        assert!(refused(&[&at(&format!("llamacpp/{file}")), "--k", "2"]).contains("4 experts per row"), "{file}");
    }
    assert!(refused(&[&at("llamacpp/F_moetrc01.moetrace"), "--experts", "16"]).contains("says 16"));
    assert!(refused(&[&at("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt"), "--experts", "64"]).contains("16 experts are placed"));
    assert!(refused(&[&at("sglang_recorder/stat_buffer8.pt"), "--experts", "64"]).contains("--experts says 64"));
    assert!(refused(&[&at("trtllm/expert_statistic/rank0.safetensors"), "--k", "3"]).contains("says 3"));
    import(&[&at("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt"), "--experts", "16", "--k", "4"]);
    // Layers that no model has.
    for layers in ["65530-65535", "70000", "5000"] {
        let error = refused(&[&at("vllm/completions_response_v0.33.json"), "--layers", layers]);
        assert!(error.contains("--layers"), "{error}");
    }
    let dense = ["--layers", "moe-only", "--first-dense", "65530"];
    assert!(refused(&[&[at("r3/moe_layers_only_shift1_int32.npy").as_str()], &dense[..]].concat()).contains("no room"));
}

#[test]
fn ranks_of_a_table_say_k() {
    let dir = tempfile::tempdir().unwrap();
    let table = |rows: &[&str]| written(&dir, "d.csv", format!("phase,token,layer,rank,expert\n{}\n", rows.join("\n")).as_bytes());
    let t = import(&[&table(&["decode,0,1,0,5", "decode,0,1,1,6", "decode,0,2,0,7", "decode,0,2,1,8"])]);
    assert_eq!(route_rows(&t.trace).unwrap().iter().map(|r| r.4.clone()).collect::<Vec<_>>(), [[5, 6], [7, 8]]);
    assert!(refused(&[&table(&["decode,0,1,0,5", "decode,0,1,2,6"])]).contains("line 3: rank 2 after rank 0"));
    assert!(refused(&[&table(&["decode,0,1,0,5", "decode,0,1,1,6", "decode,0,2,0,7", "decode,1,1,0,7"])]).contains("has 1 experts"));
    assert!(refused(&[&table(&["decode,0,1,1,5"])]).contains("the first rank is 1"));
}

#[test]
fn counts_beyond_64_bits_name_their_cell() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = vec![0u8; 2 * 2 * 3 * 8];
    // Two passes of 2 layers and 3 experts, each with 2^63 - 1 in layer 1, expert 2; and one more.
    for at in [5, 11] {
        bytes[at * 8..at * 8 + 8].copy_from_slice(&i64::MAX.to_le_bytes());
    }
    bytes[4 * 8] = 2;
    let stat = |bytes: &[u8]| {
        save(&P::Dict(vec![("rank", P::Int(0)), ("logical_count", P::Tensor("LongStorage", vec![2, 2, 3], bytes.to_vec()))]))
    };
    let error = refused(&[&written(&dir, "s.pt", &stat(&bytes))]);
    assert!(error.contains("s.pt: layer 1, expert 2: a count of 18446744073709551614"), "{error}");
    let json = r#"{"logical_count":[[0,0,18446744073709551615],[0,1,0]]}"#;
    let error = refused(&[&written(&dir, "c.json", json.as_bytes())]);
    assert!(error.contains("layer 1, expert 1"), "{error}");
    bytes[4 * 8] = 0;
    let t = import(&[&written(&dir, "s.pt", &stat(&bytes))]);
    assert_eq!(t.report()["layers"][0]["load"]["max_over_mean"], 3.0);
}

#[test]
fn empty_captures_say_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let none = save(&P::Dict(vec![("samples", P::List(vec![P::Dict(vec![("routed_experts", tensor(&[0, 2, 4], &[]))])]))]));
    assert!(refused(&[&written(&dir, "none.pt", &none)]).contains("[0, 2, 4]: no token was captured"));
    assert!(refused(&[&written(&dir, "none.npy", &npy("<i4", &[0, 2, 4], &[]))]).contains("has no rows: no token was captured"));
}

#[test]
fn axes_beside_an_empty_one_are_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let many = 1usize << 40;
    // As many rows as one likes, in a file of a few bytes.
    let rows = written(&dir, "rows.npy", &npy("<i4", &[many, 0, 8], &[]));
    assert!(refused(&[&rows]).contains("[1099511627776, 0, 8] holds no ids: nothing was captured"));
    let windows = written(&dir, "windows.npy", &npy("<i4", &[1, 0, many, many], &[]));
    assert!(refused(&["npy", &windows, "--axes", "lkwt"]).contains("holds no ids"));
    let counts = written(&dir, "counts.npy", &npy("<i8", &[0, 1 << 20, 1 << 20], &[]));
    assert!(refused(&["npy", &counts, "--kind", "counts"]).contains("holds no counts: nothing was recorded"));
    let response = r#"{"choices":[{"routed_experts":{"dtype":"int32","shape":[4000000000,0,8],"data":""}}],
        "usage":{"prompt_tokens":4000000000,"completion_tokens":1}}"#;
    assert!(refused(&[&written(&dir, "r.json", response.as_bytes())]).contains("4000000000 rows of 0 layers and 8 experts have no ids"));
    let stat = save(&P::Dict(vec![("rank", P::Int(0)), ("logical_count", tensor(&[many, 0, 3], &[]))]));
    assert!(refused(&[&written(&dir, "stat.pt", &stat)]).contains("logical_count: the shape [0, 3], which holds no counts"));
}

#[test]
fn rows_of_unknown_tokens_can_be_read_again() {
    let (dir, rows) = (tempfile::tempdir().unwrap(), 8_600_000);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut ids = vec![0xff; 2 * rows];
    for cell in ids.chunks_exact_mut(2).take(200_000) {
        let random = rng.next_u32();
        cell.copy_from_slice(&[random as u8 & 63, 64 + (random >> 8) as u8 % 64]);
    }
    // More tokens than any trace may have, in steps of a few bytes: here it is the routes that vouch for them.
    let read_again = |name: &str, ids: &[u8]| {
        let t = import(&[&written(&dir, name, &npy("|i1", &[rows, 1, 2], ids)), "--layers", "all", "--experts", "128"]);
        assert_eq!(t.trace.steps_with_details().unwrap().rows.iter().map(|&n| usize::from(n)).sum::<usize>(), rows, "{name}");
    };
    read_again("some.npy", &ids);
    // With few of them the tables are still large enough; where they are not, the import is refused.
    ids[2000..].fill(0xff);
    read_again("few.npy", &ids);
}

#[test]
fn views_of_one_number_are_not_read_without_end() {
    let dir = tempfile::tempdir().unwrap();
    // 2^40 passes of one layer and one expert, all at the same place: strides of 0.
    let pickle = b"\x80\x02}(X\x0d\x00\x00\x00logical_countctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n\
        LongStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00(\x8a\x06\x00\x00\x00\x00\x00\x01K\x01K\x01t(K\x00K\x00K\x00t\x89\
        ccollections\nOrderedDict\n)RtRu.";
    let file = super::pt::with_pickle(pickle, &[vec![1, 0, 0, 0, 0, 0, 0, 0]]);
    let error = refused(&[&written(&dir, "s.pt", &file)]);
    assert!(error.contains("s.pt: logical_count: its tensors have more than 8 times the file's bytes"), "{error}");
}

#[test]
fn answers_do_not_quote_whole_files() {
    let dir = tempfile::tempdir().unwrap();
    let word = "é".repeat(20_000);
    for (name, content) in [
        ("log.jsonl", format!(r#"{{"type":"route","token_idx":0,"layer":0,"topk_ids":[{}9999999]}}"#, "1,".repeat(9000))),
        ("d.csv", format!("phase,token,layer,rank,expert\n{word},0,1,0,5\n")),
        (
            "t.jsonl",
            format!(
                r#"{{"type":"header","format":"specprof.jsonl/1","model":{{"experts":"{word}","experts_per_token":2,"moe_layers":[1]}}}}"#
            ),
        ),
        ("r.json", format!(r#"{{"choices":[{{"routed_experts":"{word}"}}]}}"#)),
    ] {
        let error = refused(&[&written(&dir, name, content.as_bytes())]);
        assert!(error.chars().count() < 330 + dir.path().to_str().unwrap().len(), "{name}: {} characters", error.chars().count());
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_directory_of_many_empty_arrays_is_read_once() {
    // An array of 300 000 empty arrays of u8: 12 bytes each.
    let n = 300_000u64;
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend([0u64, 1].map(u64::to_le_bytes).concat());
    bytes.extend(7u64.to_le_bytes());
    bytes.extend(b"imatrix");
    bytes.extend([9u32, 9].map(u32::to_le_bytes).concat());
    bytes.extend(n.to_le_bytes());
    for _ in 0..n {
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
    }
    let dir = tempfile::tempdir().unwrap();
    let path = written(&dir, "arrays.gguf", &bytes);
    let clock = std::time::Instant::now();
    assert!(refused(&["imatrix", &path]).contains("not an importance matrix"));
    assert!(clock.elapsed().as_secs() < 10, "{:?}", clock.elapsed());
}

#[test]
fn an_unknown_k_is_null_everywhere() {
    let counts = data("eplb/eplb_weight_layers_x_experts.pt");
    let t = import(&[text(&counts), "--layers", "3-4"]);
    assert!(t.warning("experts_per_token_unknown").contains("--k"));
    let manifest: Value = serde_json::from_slice(&std::fs::read(t.path.join("manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["model"]["experts_per_token"], manifest["model"]["experts"].as_u64()), (&Value::Null, Some(12)));
    let report = t.report();
    assert_eq!(report["run"]["model"]["experts_per_token"], Value::Null);
    assert!(report["layers"].as_array().unwrap().iter().all(|l| l["k"].is_null()));
    let inspect = specprof().arg("inspect").arg(&t.path).assert().success();
    let said = String::from_utf8_lossy(&inspect.get_output().stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("unknown of 12 experts per token"), "{said}");
    // It is no difference from a number that somebody knows.
    let known = import(&[text(&counts), "--layers", "3-4", "--k", "2"]);
    assert_eq!(known.report()["layers"][0]["k"], 2);
    let diff = specprof().arg("diff").args([&t.path, &known.path]).assert();
    let text_of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let out = text_of(&diff.get_output().stdout) + &text_of(&diff.get_output().stderr);
    assert!(!out.contains(", 0 of 12 experts") && !out.contains(", 2 of 12 experts"), "{out}");
    // An older trace has a 0 there.
    let mut old = manifest.clone();
    old["model"]["experts_per_token"] = 0.into();
    std::fs::write(t.path.join("manifest.json"), old.to_string()).unwrap();
    assert_eq!(t.report()["run"]["model"]["experts_per_token"], Value::Null);
    // Lines carry counts there and back.
    let lines = known.dir.path().join("t.jsonl");
    specprof().arg("export").arg(&t.path).args(["--format", "jsonl", "-o"]).arg(&lines).assert().success();
    let again = import(&["jsonl", text(&lines)]);
    assert_eq!((again.manifest().model.experts_per_token, &again.manifest().expert_counts), (0, &t.manifest().expert_counts));
}

#[test]
fn passes_with_other_layers_than_the_first_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let record = |layer: i32, rows: i32| {
        [vec![layer, rows, 2], (0..rows * 2).collect()].concat().iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>()
    };
    let file = |layers: &[i32]| written(&dir, "c.bin", &layers.iter().flat_map(|&l| record(l, 1)).collect::<Vec<u8>>());
    assert_eq!(import(&[&file(&[1, 2, 3, 1, 2, 3])]).trace.steps().unwrap().len(), 2);
    for layers in [&[1, 2, 3, 1, 3, 2][..], &[1, 2, 2, 3], &[1, 2, 3, 2, 3], &[1, 3, 2, 1, 2, 3], &[1, 2, 3, 1, 3, 1, 2, 3]] {
        let error = refused(&["llamacpp", &file(layers)]);
        assert!(error.contains("missing, doubled or out of order"), "{layers:?}: {error}");
    }
    // A tool that was stopped has not written the last pass to its end.
    let t = import(&[&file(&[1, 2, 3, 1, 2])]);
    assert_eq!(t.trace.steps().unwrap().len(), 1);
    assert!(t.warning("last_pass_cut").starts_with("1 row"));
}

#[test]
fn steps_that_lack_routes_are_counted() {
    let t = super::recorder::of_records(vec![
        pass(1, 5, &[14, 15, 16], &[5, 6, 7], None),
        pass(2, 5, &[17, 18, 19], &[6, 7, 8], None),
        pass(3, 5, &[17, 18, 19], &[7, 8, 9], None),
    ]);
    assert_eq!(t.manifest().irregular_steps, 0);
    // Another number than there are is found.
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(t.path.join("manifest.json")).unwrap()).unwrap();
    manifest["irregular_steps"] = 1.into();
    std::fs::write(t.path.join("manifest.json"), manifest.to_string()).unwrap();
    let out = specprof().arg("inspect").arg(&t.path).arg("--check").assert().code(1);
    let said = String::from_utf8_lossy(&out.get_output().stdout).into_owned();
    assert!(said.contains("irregular_steps: 1 steps lack routes, 0 do"), "{said}");
}
