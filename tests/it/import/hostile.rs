//! Inputs that are broken, hostile or not what they say: one line, exit 2, nothing left behind, never a panic.

use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use specprof::import::{self as library, Options, find, sniff};
use specprof::trace::TraceError;

/// Samples of every reader, with the options that they need.
const SEEDS: &[(&str, &str)] = &[
    ("vllm", "vllm/completions_response_v0.33.json"),
    ("vllm", "vllm/completions_response_v0.21_nested_lists.json"),
    ("vllm", "acceptance/vllm_stream_sse.txt"),
    ("sglang", "sglang/generate_response_v0.5.23.json"),
    ("npy", "r3/routed_experts.npz"),
    ("npy", "r3/routed_experts_compressed_int16.npz"),
    ("npy", "vllm/routed_experts_uint8.npy"),
    ("llamacpp", "llamacpp/A_pr28544_layer_expert.csv"),
    ("llamacpp", "llamacpp/B_fork_pos_layer_ids.csv"),
    ("llamacpp", "llamacpp/C_int32_records.bin"),
    ("llamacpp", "llamacpp/D_phase_token_layer_rank_expert.csv"),
    ("llamacpp", "llamacpp/E_user_query_prefill_only.csv"),
    ("llamacpp", "llamacpp/F_moetrc01.moetrace"),
    ("llamacpp", "llamacpp/G_flash_moe.jsonl"),
];

/// Flips, cuts, repeats and overwrites pieces.
pub fn mutate(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    for _ in 0..1 + rng.next_u32() % 4 {
        if bytes.is_empty() {
            return;
        }
        let at = rng.next_u32() as usize % bytes.len();
        let len = (1 + rng.next_u32() as usize % 16).min(bytes.len() - at);
        match rng.next_u32() % 6 {
            0 => bytes[at] ^= 1 << (rng.next_u32() % 8),
            1 => bytes.truncate(at),
            2 => {
                let piece = bytes[at..at + len].to_vec();
                bytes.splice(at..at, piece);
            }
            3 => bytes[at..at + len].fill(0xff),
            4 => bytes[at] = b"0129-[]{},:\"\n\x00"[rng.next_u32() as usize % 14],
            _ => {
                bytes.drain(at..at + len);
            }
        }
    }
}

#[test]
fn seeded_mutations_end_in_a_trace_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("t");
    let options = Options { layers: library::LayerAxis::Unsaid, k: None, force: true, ..Options::default() };
    let with_shape = Options { layers: library::LayerAxis::Count(6), k: Some(4), ..options.clone() };
    let with_k = Options { k: Some(4), ..options.clone() };
    let (mut good, mut bad) = (0, 0);
    for (seed, &(name, file)) in SEEDS.iter().enumerate() {
        let bytes = std::fs::read(data(file)).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(seed as u64);
        for _ in 0..40 {
            let mut mutated = bytes.clone();
            mutate(&mut mutated, &mut rng);
            let path = dir.path().join(Path::new(file).file_name().unwrap());
            std::fs::write(&path, &mutated).unwrap();
            let _ = sniff(&path);
            let importer = find(name)[0];
            let options = match (name, file.contains("/A_")) {
                ("sglang", _) => &with_shape,
                ("llamacpp", true) => &with_k,
                _ => &options,
            };
            match library::import(importer, std::slice::from_ref(&path), &out, options) {
                Ok(_) => {
                    good += 1;
                    passes_check(&out, file);
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().contains(text(&path)) || error.to_string().contains(text(&out)), "{file}: {error}");
                }
            }
            let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(left.iter().all(|name| !name.to_string_lossy().contains("importing")), "{left:?}");
        }
    }
    assert!(good > 20 && bad > 20, "{good} imported, {bad} refused: the mutations are too weak or too strong");
}

#[test]
fn sizes_that_files_claim_are_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let huge = super::cases::npy("<i4", &[99_999_999, 60, 8], &[0; 64]);
    assert!(refused(&[text(&write("huge.npy", &huge))]).contains("does not have 64 bytes"));
    let objects = super::cases::npy("|O", &[2, 2, 2], &[0; 64]);
    assert!(refused(&[text(&write("objects.npy", &objects))]).contains("Python objects"));
    let records = [1i32, i32::MAX, i32::MAX].map(i32::to_le_bytes).concat();
    assert!(refused(&["llamacpp", text(&write("c.bin", &records))]).contains("not an expert trace"));
    let mut moetrc = b"MOETRC01".to_vec();
    moetrc.extend(u32::MAX.to_le_bytes());
    assert!(refused(&[text(&write("f.moetrace", &moetrc))]).contains("a header of 4294967295 bytes"));
    let deep = format!("{{\"choices\":[{{\"routed_experts\":{}", "[".repeat(100_000));
    assert!(refused(&[text(&write("deep.json", deep.as_bytes()))]).contains("not JSON"));
}

#[test]
fn outputs_are_not_overwritten_unless_they_are_traces() {
    let dir = tempfile::tempdir().unwrap();
    let input = data("vllm/completions_response_v0.33.json");
    let out = dir.path().join("t");
    let run = |force: bool| {
        let mut command = specprof();
        command.arg("import").arg(&input).arg("-o").arg(&out);
        if force {
            command.arg("--force");
        }
        command
    };
    run(false).assert().success();
    run(false).assert().code(2);
    run(true).assert().success();
    std::fs::write(out.join("mine.txt"), "keep").unwrap();
    run(true).assert().code(2);
    assert!(out.join("mine.txt").exists() && Trace::open(&out).is_ok());
    // A failing import leaves the old trace as it was.
    std::fs::remove_file(out.join("mine.txt")).unwrap();
    let broken = dir.path().join("broken.json");
    std::fs::write(&broken, "{\"choices\":[").unwrap();
    specprof().arg("import").arg(&broken).arg("-o").arg(&out).arg("--force").assert().code(2);
    let kept: Result<Trace, TraceError> = Trace::open(&out);
    assert_eq!(kept.unwrap().steps().unwrap().len(), 6);
}

#[test]
fn formats_are_sniffed_or_named_and_inputs_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("odd.txt");
    std::fs::write(&odd, "nothing that anybody knows\n").unwrap();
    let error = refused(&[text(&odd)]);
    assert!(error.contains("not a format that is known") && error.contains("vllm"), "{error}");
    assert!(refused(&["vllm", text(&dir.path().join("none.json"))]).contains("none.json"));
    assert!(refused(&["vlm", text(&odd)]).contains("no format of that name"));
    let (a, b) = (data("vllm/completions_response_v0.33.json"), data("llamacpp/C_int32_records.bin"));
    assert!(refused(&[text(&a), text(&b)]).contains("traces of their own"));
    let two = import(&["vllm", text(&a), text(&a), "--experts", "64"]);
    assert_eq!(two.trace.requests().unwrap().len(), 2);
}
