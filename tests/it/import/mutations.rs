//! Seeded mutations of the binary formats: a trace that can be read, or an error that names the file; never a panic.
//!
//! Archives have checksums: their pickles are mutated inside and packed again, or hardly any mutation would get past them.

use super::hostile::mutate;
use super::pt::archive;
use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use specprof::import::{self as library, Importer, LayerAxis, Options, find, sniff, zip::Archive};
use std::io::Cursor;

/// What came of the mutations of one file.
#[derive(Debug, Default)]
struct Tally {
    good: u32,
    bad: u32,
}

/// Imports the files that `change` makes of a seed, and reads what was imported.
fn mutations(
    importer: &'static dyn Importer,
    options: &Options,
    rounds: u64,
    mut make: impl FnMut(&Path, &mut ChaCha8Rng) -> PathBuf,
) -> Tally {
    let mut tally = Tally::default();
    for round in 0..rounds {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(round);
        let (path, out) = (make(dir.path(), &mut rng), dir.path().join("t"));
        let _ = sniff(&path);
        match library::import(importer, std::slice::from_ref(&path), &out, options) {
            Ok(_) => {
                tally.good += 1;
                passes_check(&out, &format!("{} round {round}", importer.name()));
            }
            Err(error) => {
                tally.bad += 1;
                let message = error.to_string();
                assert!(message.contains(text(&path)) || message.contains(text(&out)), "round {round}: {message}");
                assert!(!out.exists(), "round {round}: a trace was left behind");
            }
        }
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().contains("importing")), "{left:?}");
    }
    tally
}

fn options() -> Options {
    Options { layers: LayerAxis::Unsaid, force: true, ..Options::default() }
}

fn recorder() -> &'static dyn Importer {
    find("sglang")[1]
}

/// Mutates one of the members of an archive that `wanted` names.
fn repacked(bytes: &[u8], rng: &mut ChaCha8Rng, wanted: fn(&str) -> bool) -> Vec<u8> {
    let mut file = Archive::open(Cursor::new(bytes)).unwrap();
    let names: Vec<String> = file.members().iter().map(|m| m.name.clone()).collect();
    let mut members: Vec<(String, Vec<u8>)> =
        names.into_iter().enumerate().map(|(i, name)| (name, file.read(i, 1 << 24).unwrap())).collect();
    let of_kind: Vec<usize> = (0..members.len()).filter(|&i| wanted(&members[i].0)).collect();
    let chosen = of_kind[rng.next_u32() as usize % of_kind.len()];
    mutate(&mut members[chosen].1, rng);
    archive(&members)
}

#[test]
fn pickles_and_storages() {
    let mut all = Tally::default();
    for (name, importer) in [
        ("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt", recorder()),
        ("sglang_recorder/per_token_decode_padded_cpu_rank0.pt", recorder()),
        ("sglang_recorder/per_pass_rank0.pt", recorder()),
        ("sglang_recorder/stat_buffer8.pt", recorder()),
        ("r3/verl_padded_batch.pt", find("torch")[0]),
        ("eplb/eplb_weight_layers_x_experts.pt", find("torch")[0]),
    ] {
        let bytes = std::fs::read(data(name)).unwrap();
        let options =
            Options { layers: if name.starts_with("eplb") { LayerAxis::List(vec![1, 2]) } else { LayerAxis::Unsaid }, ..options() };
        for member in [|n: &str| n.ends_with("data.pkl"), |n: &str| n.contains("/data/"), |n: &str| !n.contains("data")] {
            let tally = mutations(importer, &options, 60, |dir, rng| {
                std::fs::write(dir.join("x.pt"), repacked(&bytes, rng, member)).unwrap();
                dir.join("x.pt")
            });
            all = Tally { good: all.good + tally.good, bad: all.bad + tally.bad };
        }
        mutations(importer, &options, 30, |dir, rng| {
            let mut bytes = bytes.clone();
            mutate(&mut bytes, rng);
            std::fs::write(dir.join("x.pt"), bytes).unwrap();
            dir.join("x.pt")
        });
    }
    assert!(all.good > 100 && all.bad > 200, "{all:?}: the mutations are too weak or too strong");
}

#[test]
fn statistics_matrices_and_profiles() {
    let mut all = Tally::default();
    for (name, file, rounds) in [
        ("trtllm", "trtllm/expert_statistic/rank0.safetensors", 60),
        ("trtllm", "trtllm/expert_statistic/rank1_raw.safetensors", 60),
        ("imatrix", "imatrix/imatrix_handmade.gguf", 120),
        ("imatrix", "imatrix/imatrix_handmade_legacy.dat", 20),
        ("kineto", "kineto/synthetic_cuda_graph_steps.json", 120),
        ("kineto", "kineto/synthetic_bare_array.json", 60),
        ("nsys", "nsys/synthetic_node_mode_nvtx.sqlite", 150),
        ("nsys", "nsys/synthetic_graph_mode_nvtx.sqlite", 50),
    ] {
        let bytes = std::fs::read(data(file)).unwrap();
        let name_only = Path::new(file).file_name().unwrap();
        let tally = mutations(find(name)[0], &options(), rounds, |dir, rng| {
            let mut bytes = bytes.clone();
            mutate(&mut bytes, rng);
            std::fs::write(dir.join(name_only), bytes).unwrap();
            dir.join(name_only)
        });
        all = Tally { good: all.good + tally.good, bad: all.bad + tally.bad };
    }
    assert!(all.good > 60 && all.bad > 100, "{all:?}: the mutations are too weak or too strong");
}

#[test]
fn parquet_exports() {
    let names = ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"];
    for changed in names {
        mutations(find("nsys")[0], &options(), 40, |dir, rng| {
            let export = dir.join("export");
            std::fs::create_dir(&export).unwrap();
            for name in names {
                let mut bytes = std::fs::read(data(&format!("nsys/parquetdir/{name}.parquet"))).unwrap();
                if name == changed {
                    mutate(&mut bytes, rng);
                }
                std::fs::write(export.join(format!("{name}.parquet")), bytes).unwrap();
            }
            export
        });
    }
}

#[test]
fn a_profile_that_is_broken_leaves_the_trace_as_it_was() {
    let t = import(&[text(&data("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt"))]);
    // The recording's windows have 3 rows, the profile's 4.
    let fitting = std::fs::read_to_string(data("kineto/synthetic_cuda_graph_steps.json")).unwrap().replace("g_sq=8", "g_sq=6");
    let bytes = fitting.into_bytes();
    let (mut good, mut bad) = (0, 0);
    let dir = tempfile::tempdir().unwrap();
    for round in 0..60 {
        let mut mutated = bytes.clone();
        mutate(&mut mutated, &mut ChaCha8Rng::seed_from_u64(round));
        let path = dir.path().join("x.json");
        std::fs::write(&path, mutated).unwrap();
        let before = std::fs::read(t.path.join("manifest.json")).unwrap();
        let options = Options { into: Some(t.path.clone()), ..options() };
        match library::import(find("kineto")[0], &[path], &t.path, &options) {
            Ok(_) => good += 1,
            Err(_) => {
                bad += 1;
                assert_eq!(std::fs::read(t.path.join("manifest.json")).unwrap(), before);
            }
        }
        let trace = Trace::open(&t.path).unwrap();
        assert!(validate(&trace).unwrap().checks.iter().all(|c| c.ok));
        assert_eq!(trace.steps().unwrap().len(), 6);
    }
    assert!(good > 5 && bad > 5, "{good} added, {bad} refused");
}
