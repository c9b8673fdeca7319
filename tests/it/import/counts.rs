//! Counts of experts: TensorRT-LLM's statistics, llama.cpp's importance matrices.

use super::*;
use specprof::trace::manifest::{IdSpace, WindowCompleteness};

/// A safetensors file of these tensors: name, type, shape, bytes.
fn safetensors(tensors: &[(&str, &str, &[usize], Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
    for (name, dtype, shape, bytes) in tensors {
        let at = [data.len(), data.len() + bytes.len()];
        header.insert((*name).to_owned(), serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": at }));
        data.extend(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    out.extend(data);
    out
}

fn i64s(numbers: &[i64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// The tensors of a sample: name to whole numbers.
fn read_safetensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<i64>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let numbers = match view.dtype() {
            safetensors::Dtype::I64 => view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect(),
            _ => view.data().chunks_exact(4).map(|b| i64::from(i32::from_le_bytes(b.try_into().unwrap()))).collect(),
        };
        (name, (view.shape().to_vec(), numbers))
    });
    tensors.collect()
}

#[test]
fn tensorrt_llms_counts_are_summed_over_ranks() {
    let file = data("trtllm/expert_statistic/rank0.safetensors");
    let other = data("trtllm/expert_statistic/rank1.safetensors");
    let mut want: BTreeMap<u16, Vec<u64>> = BTreeMap::new();
    let mut add = |file: &Path| {
        for (name, (_, numbers)) in read_safetensors(file) {
            let layer = name.split_once('_').unwrap().1.parse().unwrap();
            let sums = want.entry(layer).or_insert_with(|| vec![0; numbers.len()]);
            sums.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += n as u64);
        }
        want.clone()
    };
    let one = import(&[text(&file)]);
    assert_eq!(one.manifest().expert_counts, Some(add(&file)));
    let m = one.manifest();
    assert_eq!((m.model.experts, m.model.experts_per_token, m.id_space), (32, 4, IdSpace::Logical));
    assert_eq!(m.window_completeness, WindowCompleteness::Counts);
    let both = add(&other);
    assert_eq!(import(&["trtllm", text(&file), text(&other)]).manifest().expert_counts, Some(both));
    // Ranks that share their rows have the same counts: they count once.
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(&file, dir.path().join("rank5.safetensors")).unwrap();
    let twice = import(&["trtllm", text(&file), text(&dir.path().join("rank5.safetensors"))]);
    assert_eq!(twice.manifest().expert_counts, one.manifest().expert_counts);
    twice.warning("ranks_alike");
    assert_eq!(one.report()["layers"].as_array().unwrap().len(), 5);
}

#[test]
fn tensorrt_llms_choices_are_routes_by_iteration() {
    let directory = data("trtllm/expert_statistic");
    let t = import(&[text(&directory)]);
    let mut want: BTreeMap<(u32, u16, u16), Vec<u16>> = BTreeMap::new();
    let mut step = 0;
    for rank in ["rank0_raw", "rank1_raw"] {
        let tensors = read_safetensors(&directory.join(format!("{rank}.safetensors")));
        let mut by_key: BTreeMap<(u64, u16), &(Vec<usize>, Vec<i64>)> = BTreeMap::new();
        for (name, tensor) in &tensors {
            let (iteration, layer) = name.split_once('_').unwrap();
            by_key.insert((iteration.parse().unwrap(), layer.parse().unwrap()), tensor);
        }
        let mut iterations: Vec<u64> = by_key.keys().map(|k| k.0).collect();
        iterations.dedup();
        for iteration in iterations {
            for ((_, layer), (shape, numbers)) in by_key.range((iteration, 0)..=(iteration, u16::MAX)) {
                for row in 0..shape[0] {
                    let ids = numbers[row * shape[1]..(row + 1) * shape[1]].iter().map(|&id| id as u16).collect();
                    want.insert((step, *layer, row as u16), ids);
                }
            }
            step += 1;
        }
    }
    let found: BTreeMap<_, _> =
        route_rows(&t.trace).unwrap().into_iter().map(|(step, layer, row, _, ids, _)| ((step, layer, row), ids)).collect();
    assert_eq!(found, want);
    assert!(t.warning("passes_of_batches").contains("whole batch"));
}

#[test]
fn statistics_that_contradict_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(dir.path().join(name), bytes).unwrap();
        dir.path().join(name)
    };
    let a = write("rank0.safetensors", &safetensors(&[("5_1", "I64", &[4], i64s(&[1, 2, 3, 4]))]));
    let uneven = [("5_1", "I64", &[4][..], i64s(&[1, 2, 3, 4])), ("5_2", "I64", &[2][..], i64s(&[1, 2]))];
    let b = write("rank1.safetensors", &safetensors(&uneven));
    assert!(refused(&["trtllm", text(&b)]).contains("tensor 5_2: 2 counts for 4 experts"));
    write("meta_info.json", br#"{"num_experts": 8, "num_experts_per_token": 2}"#);
    assert!(refused(&["trtllm", text(&a)]).contains("tensor 5_1: 4 counts for 8 experts"));
    std::fs::remove_file(dir.path().join("meta_info.json")).unwrap();
    let zero = write("rank2.safetensors", &safetensors(&[("5_1", "I64", &[4], i64s(&[0; 4]))]));
    assert!(refused(&["trtllm", text(&zero)]).contains("all counts are 0"));
    let negative = write("rank3.safetensors", &safetensors(&[("5_1", "I64", &[4], i64s(&[1, -2, 3, 4]))]));
    assert!(refused(&["trtllm", text(&negative)]).contains("-2 is not a count"));
    let odd = write("rank4.safetensors", &safetensors(&[("weight", "I64", &[1], i64s(&[1]))]));
    assert!(refused(&["trtllm", text(&odd)]).contains("not named ITERATION_LAYER"));
    let mut cut = safetensors(&[("5_1", "I64", &[4], i64s(&[1; 4]))]);
    cut.truncate(cut.len() - 3);
    assert!(refused(&["trtllm", text(&write("rank5.safetensors", &cut))]).contains("beyond the file"));
    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("meta_info.json"), "{}").unwrap();
    assert!(refused(&[text(empty.path())]).contains("EXPERT_STATISTIC_PATH"));
    // Dense layers have no keys at all: fine.
    let some = write("rank6.safetensors", &safetensors(&[("5_3", "I64", &[4], i64s(&[1, 2, 3, 4])), ("6_3", "I64", &[4], i64s(&[1; 4]))]));
    let t = import(&["trtllm", text(&some)]);
    assert_eq!(t.manifest().expert_counts, Some(BTreeMap::from([(3, vec![2, 3, 4, 5])])));
}

/// A GGUF file of version 3: texts, then float tensors.
fn gguf(texts: &[(&str, &str)], tensors: &[(&str, &[u64], &[f32])]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((texts.len() as u64).to_le_bytes());
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.bytes());
    };
    for (key, value) in texts {
        text(&mut out, key);
        out.extend(8u32.to_le_bytes());
        text(&mut out, value);
    }
    let mut at = 0u64;
    for (name, shape, numbers) in tensors {
        text(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
        out.extend(0u32.to_le_bytes());
        out.extend(at.to_le_bytes());
        at = (at + 4 * numbers.len() as u64).next_multiple_of(32);
    }
    for (_, _, numbers) in tensors {
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
    }
    out
}

#[test]
fn importance_matrices_have_counts_by_expert() {
    let expected = json("imatrix/imatrix_expected.json");
    let t = import(&[text(&data("imatrix/imatrix_handmade.gguf"))]);
    let counts = t.manifest().expert_counts.clone().unwrap();
    assert_eq!(serde_json::to_value(&counts).unwrap(), expected["counts"]);
    // Layer 1 lacks 32 choices of its experts, layer 2 has all of them.
    assert_eq!(u64::from(t.manifest().model.experts_per_token), expected["n_used"].as_u64().unwrap());
    assert!(t.warning("never_routed").contains("2 experts were never routed to (layer/expert 1/3, 2/7)"));
    let report = t.report();
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers.iter().map(|l| l["layer"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    assert!(layers.iter().all(|l| l["load"]["entropy_bits"].is_number() && l["union"].is_null()));
    let error = refused(&[text(&data("imatrix/imatrix_handmade_legacy.dat"))]);
    assert!(error.contains("no per-expert counts") && error.contains("GGUF"), "{error}");
}

#[test]
fn importance_matrices_give_k_where_their_chunks_do() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: Vec<u8>| {
        std::fs::write(dir.path().join(name), bytes).unwrap();
        dir.path().join(name)
    };
    let kind = [("general.type", "imatrix")];
    let name = "blk.3.ffn_up_exps.weight.counts";
    let good = write("good.gguf", gguf(&kind, &[(name, &[1, 4], &[1.0, 2.0, 0.0, 5.0]), ("blk.0.attn_q.weight.counts", &[1, 1], &[8.0])]));
    let t = import(&[text(&good), "--k", "2"]);
    assert_eq!(
        (t.manifest().expert_counts.clone(), t.manifest().model.experts_per_token),
        (Some(BTreeMap::from([(3, vec![1, 2, 0, 5])])), 2)
    );
    let converted = write("converted.gguf", gguf(&kind, &[(name, &[1, 1], &[8.0])]));
    assert!(refused(&[text(&converted)]).contains("converted from the old format"));
    let half = write("half.gguf", gguf(&kind, &[(name, &[1, 2], &[1.5, 2.0])]));
    assert!(refused(&[text(&half)]).contains("1.5 is not a count"));
    // 3 times this is 1 in 64 bits, and 2^65 + 1 in truth.
    let wrapped = write("wrapped.gguf", gguf(&kind, &[(name, &[3, 0xaaaa_aaaa_aaaa_aaab], &[8.0])]));
    assert!(refused(&[text(&wrapped)]).contains("larger than any file"));
    let model = write("model.gguf", gguf(&[("general.type", "model"), ("x", "imatrix")], &[]));
    assert!(refused(&[text(&model)]).contains("not an importance matrix"));
    let mut huge = gguf(&kind, &[(name, &[1 << 40, 4], &[1.0])]);
    assert!(refused(&[text(&write("huge.gguf", huge.clone()))]).contains("cut off"));
    huge[8..16].fill(0xff);
    assert!(refused(&[text(&write("many.gguf", huge))]).contains("do not fit the file"));
}

/// A `.npy` file of 32-bit numbers.
fn npy(dir: &Path, name: &str, shape: &str, numbers: &[i32]) -> PathBuf {
    let header = format!("{{'descr': '<i4', 'fortran_order': False, 'shape': ({shape}), }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn ids_are_not_taken_for_counts() {
    let dir = tempfile::tempdir().unwrap();
    // Three tokens, two layers, four of 60 experts; the first layer is dense.
    let ids: Vec<i32> =
        [[0, 0, 0, 0], [3, 17, 41, 58], [0, 0, 0, 0], [41, 2, 9, 30], [0, 0, 0, 0], [8, 1, 59, 20], [0, 0, 0, 0], [5, 0, 7, 9]].concat();
    let two: Vec<i32> = [[3, 17, 41, 58], [41, 2, 9, 30], [8, 1, 59, 20], [5, 0, 7, 9]].concat();
    let one_layer = npy(dir.path(), "one.npy", "4, 2, 4", &ids);
    let path = npy(dir.path(), "ids.npy", "2, 2, 4", &two);
    let error = refused(&["npy", text(&path), "--kind", "counts", "--layers", "all"]);
    assert!(error.contains("these are ids, not counts: every row has 4 different numbers") && error.contains("--experts 4"), "{error}");
    assert!(refused(&["npy", text(&path), "--kind", "counts", "--layers", "all", "--k", "4"]).contains("are ids and no counts"));
    // Whoever insists is believed.
    let said = import(&["npy", text(&path), "--kind", "counts", "--layers", "all", "--experts", "4"]);
    assert_eq!(said.manifest().expert_counts.as_ref().unwrap()[&0], [11, 18, 100, 78]);
    // Of one layer no sums differ within a row: it cannot be told.
    import(&["npy", text(&one_layer), "--kind", "counts", "--layers", "all"]);
    // Counts of two passes of 6 and 3 tokens of two experts: the same sum in both layers, and zeros.
    let counts = [[6, 0, 1, 5], [2, 4, 3, 3], [3, 0, 1, 2], [0, 3, 2, 1]].concat();
    import(&["npy", text(&npy(dir.path(), "counts.npy", "2, 2, 4", &counts)), "--kind", "counts", "--layers", "all"]);
    let distinct = [[6, 0, 1, 5], [2, 4, 1, 5], [3, 0, 1, 2], [0, 3, 2, 1]].concat();
    import(&["npy", text(&npy(dir.path(), "distinct.npy", "2, 2, 4", &distinct)), "--kind", "counts", "--layers", "all"]);
}
