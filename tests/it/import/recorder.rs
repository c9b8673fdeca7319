//! SGLang's recorder and what trainers save: whole windows, followed requests, counts.

use super::pt::{P, ints, save, tensor, with_pickle};
use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use specprof::trace::Phase;
use specprof::trace::manifest::{IdSpace, WindowCompleteness};

pub const LAYERS: usize = 3;
pub const WIDTH: usize = 8;

/// One pass of the given mode; layer 0 is dense, the ids of a row depend on its token.
pub fn pass(id: i64, mode: i64, tokens: &[i64], positions: &[i64], lengths: Option<&[i64]>) -> P {
    let mut ids = vec![-1; LAYERS * tokens.len() * WIDTH];
    for layer in 1..LAYERS {
        for (row, &token) in tokens.iter().enumerate() {
            let real = token != 0 || positions[row] != 0;
            for k in 0..4 {
                let at = (layer * tokens.len() + row) * WIDTH + k;
                ids[at] = if real { ids_of(token, layer, k) } else { -1 };
            }
        }
    }
    record(id, mode, tokens, positions, lengths, tensor(&[LAYERS, tokens.len(), WIDTH], &ids))
}

pub fn ids_of(token: i64, layer: usize, k: usize) -> i32 {
    ((token as usize * 5 + layer * 3 + k * 4) % 16) as i32
}

pub fn record(id: i64, mode: i64, tokens: &[i64], positions: &[i64], lengths: Option<&[i64]>, ids: P) -> P {
    P::Dict(vec![
        ("forward_pass_id", P::Int(id)),
        ("rank", P::Int(0)),
        ("gatherer_key", P::Text("primary")),
        ("input_ids", ints(tokens.iter().copied())),
        ("positions", ints(positions.iter().copied())),
        ("extend_seq_lens", lengths.map_or(P::None, |l| ints(l.iter().copied()))),
        ("forward_mode", P::Int(mode)),
        ("topk_ids_of_layer", ids),
        ("misc_objects", P::List(Vec::new())),
    ])
}

pub fn dump(records: Vec<P>) -> Vec<u8> {
    let map = P::Tensor("LongStorage", vec![LAYERS, 16], (0..LAYERS).flat_map(|_| 0..16i64).flat_map(i64::to_le_bytes).collect());
    save(&P::Dict(vec![("records", P::List(records)), ("last_physical_to_logical_map", map)]))
}

pub fn written(dir: &TempDir, name: &str, bytes: &[u8]) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    text(&path).to_owned()
}

pub fn of_records(records: Vec<P>) -> Imported {
    let dir = tempfile::tempdir().unwrap();
    import(&[&written(&dir, "dump.pt", &dump(records))])
}

/// Phase, position, rows, accepted and emitted tokens of a request's steps.
type Step = (Phase, u32, u16, u16, Vec<u32>);

fn steps_of(t: &Imported) -> BTreeMap<u32, Vec<Step>> {
    let steps = t.trace.steps().unwrap();
    let mut found: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for i in 0..steps.len() {
        let step = (steps.phase[i], steps.context_len[i], steps.rows[i], steps.accepted[i], steps.emitted_tokens.get(i).to_vec());
        found.entry(steps.request_id[i]).or_default().push(step);
    }
    found
}

#[test]
fn the_recorders_windows_hold_the_rejected_rows() {
    let expected = &json("sglang_recorder/expected.json")["per_token_spec_verify_cuda0_rank0.pt"]["records"];
    let t = import(&[text(&data("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt"))]);
    let m = t.manifest();
    assert_eq!((m.window_completeness, m.id_space, m.drafter.draft_len), (WindowCompleteness::Full, IdSpace::Physical, Some(2)));
    assert_eq!((m.model.experts, m.model.experts_per_token, m.model.moe_layers.as_slice()), (18, 4, &[2, 3, 4, 5][..]));
    // Accepted, from positions: the first request 1 and 0, the second 0 and 2.
    let accepted: Vec<Vec<u16>> = steps_of(&t).values().map(|s| s.iter().filter(|s| s.0 == Phase::Verify).map(|s| s.3).collect()).collect();
    assert_eq!(accepted, [[1, 0], [0, 2]]);
    // Every row of every window that is there, rejected or not, has the file's ids.
    let steps = t.trace.steps().unwrap();
    let mut seen = 0;
    for (step, layer, row, _, ids, _) in route_rows(&t.trace).unwrap() {
        let at = steps.step_id.binary_search(&step).unwrap();
        let (request, position) = (steps.request_id[at], steps.context_len[at] + u32::from(row));
        // The recorded row: the pass in which the request stood at this window's begin.
        let record = expected.as_array().unwrap().iter().find(|r| {
            let start = (r["positions"].as_array().unwrap().len() as u32 / 2) * request;
            let verify = steps.phase[at] == Phase::Verify;
            (r["forward_mode"] == 5) == verify && (!verify || r["positions"][start as usize] == steps.context_len[at])
        });
        let record = record.unwrap();
        let positions = record["positions"].as_array().unwrap();
        let rows: Vec<usize> = match (steps.phase[at], request) {
            (Phase::Verify, _) => (3 * request as usize..3 * request as usize + 3).collect(),
            (_, 0) => (0..5).collect(),
            _ => (5..8).collect(),
        };
        let index = rows.into_iter().find(|&i| positions[i] == position).unwrap();
        let want: Vec<u16> = serde_json::from_value(Value::Array(
            record["topk_ids_of_layer"]["data"][usize::from(layer)][index].as_array().unwrap()[..4].to_vec(),
        ))
        .unwrap();
        assert_eq!(ids, want, "step {step}, layer {layer}, row {row}");
        seen += 1;
    }
    // 8 prompt rows and 4 windows of 3 rows, in 4 layers.
    assert_eq!(seen, (8 + 12) * 4);
    assert!(t.warning("last_windows").starts_with("6 rows left out"));
    let report = t.report();
    assert_eq!(report["acceptance"]["tokens_per_step"], 1.75);
    assert!(report["layers"].as_array().unwrap().iter().all(|l| l["marginal_rejected"].is_number() && l["wasted_mean"].is_number()));
}

#[test]
fn padding_of_captured_graphs_is_no_row() {
    let t = import(&[text(&data("sglang_recorder/per_token_decode_padded_cpu_rank0.pt"))]);
    assert!(t.warning("graph_padding").starts_with("6 rows left out"));
    let steps = steps_of(&t);
    assert_eq!(steps[&0].iter().map(|s| s.1).collect::<Vec<_>>(), [0, 5, 6, 7]);
    assert_eq!(steps[&1].iter().map(|s| s.4.as_slice()).collect::<Vec<_>>(), [&[210][..], &[211], &[212], &[u32::MAX]]);
    assert_eq!(t.manifest().window_completeness, WindowCompleteness::None);
}

#[test]
fn counts_are_summed_by_layer_and_expert() {
    let expected = json("sglang_recorder/expected.json");
    let sums = |matrices: Vec<Value>| -> Vec<Vec<u64>> {
        let matrices: Vec<Vec<Vec<u64>>> = matrices.into_iter().map(|m| serde_json::from_value(m).unwrap()).collect();
        (0..6).map(|l| (0..matrices[0][l].len()).map(|e| matrices.iter().map(|m| m[l][e]).sum()).collect()).collect()
    };
    let per_pass: Vec<Value> =
        expected["per_pass_rank0.pt"]["records"].as_array().unwrap().iter().map(|r| r["global_physical_count"]["data"].clone()).collect();
    let want = sums(per_pass);
    let t = import(&[text(&data("sglang_recorder/per_pass_rank0.pt"))]);
    let counts = t.manifest().expert_counts.clone().unwrap();
    assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [2, 3, 4, 5]);
    counts.iter().for_each(|(layer, counts)| assert_eq!(*counts, want[usize::from(*layer)]));
    assert_eq!((t.manifest().id_space, t.manifest().window_completeness), (IdSpace::Physical, WindowCompleteness::Counts));
    // Slots 16 and 17 are replicas of experts 0 and 1.
    let mapped = import(&[text(&data("sglang_recorder/per_pass_rank0.pt")), "--id-space", "logical"]);
    for (layer, counts) in mapped.manifest().expert_counts.as_ref().unwrap() {
        let slots = &want[usize::from(*layer)];
        assert_eq!((counts.len(), counts[0], counts[1], counts[2]), (16, slots[0] + slots[16], slots[1] + slots[17], slots[2]));
    }
    for file in ["stat_buffer8.pt", "stat_buffer_infinite.pt"] {
        let want = sums(expected[file]["logical_count"]["data"].as_array().unwrap().clone());
        let t = import(&[text(&data(&format!("sglang_recorder/{file}")))]);
        let counts = t.manifest().expert_counts.clone().unwrap();
        assert_eq!(counts.len(), 4, "{file}");
        counts.iter().for_each(|(layer, counts)| assert_eq!(*counts, want[usize::from(*layer)], "{file}"));
        assert!(t.report()["layers"].as_array().unwrap().iter().all(|l| l["load"]["max_over_mean"].as_f64().unwrap() > 1.0));
    }
}

#[test]
fn requests_are_followed_as_they_come_and_go() {
    let verify = |id, tokens: &[i64], positions: &[i64]| pass(id, 5, tokens, positions, None);
    let t = of_records(vec![
        pass(1, 1, &[11, 12, 13, 21, 22], &[0, 1, 2, 0, 1], Some(&[3, 2])),
        verify(2, &[14, 15, 16, 23, 24, 25], &[3, 4, 5, 2, 3, 4]),
        // The drafter's own passes: numbers that were there, or its mode.
        pass(2, 2, &[14, 23], &[3, 2], None),
        pass(2, 6, &[14, 23], &[3, 2], None),
        // A third request is read before the next window.
        pass(3, 1, &[31, 32], &[0, 1], Some(&[2])),
        // The first has kept two drafts, the second none.
        verify(4, &[17, 18, 19, 26, 27, 28, 33, 34, 35], &[6, 7, 8, 3, 4, 5, 2, 3, 4]),
        // The first has ended.
        verify(5, &[28, 41, 42, 36, 37, 38], &[5, 6, 7, 3, 4, 5]),
    ]);
    let steps = steps_of(&t);
    let verify = |request: u32| steps[&request].iter().filter(|s| s.0 == Phase::Verify).cloned().collect::<Vec<_>>();
    assert_eq!(verify(0), [(Phase::Verify, 3, 3, 2, vec![15, 16, 17])]);
    assert_eq!(verify(1), [(Phase::Verify, 2, 3, 0, vec![26]), (Phase::Verify, 3, 3, 1, vec![27, 28])]);
    assert_eq!(verify(2), [(Phase::Verify, 2, 3, 0, vec![36])]);
    let prefill: Vec<_> = steps.values().map(|s| (s[0].0, s[0].2, s[0].4.clone())).collect();
    assert_eq!(prefill, [(Phase::Prefill, 3, vec![14]), (Phase::Prefill, 2, vec![23]), (Phase::Prefill, 2, vec![33])]);
    assert!(t.warning("last_windows").starts_with("9 rows left out") && t.warning("draft_passes").starts_with("4 rows left out"));
    // The tags number the pass of each step.
    let requests = t.trace.requests().unwrap();
    let tags: BTreeMap<u32, Value> = requests.iter().map(|r| (r.request_id, serde_json::from_str(&r.tags).unwrap())).collect();
    assert_eq!(tags[&0]["forward_pass_ids"], serde_json::json!([1, 2]));
    assert_eq!(tags[&1]["forward_pass_ids"], serde_json::json!([1, 2, 4]));
    assert_eq!(t.manifest().id_space, IdSpace::Logical);
}

#[test]
fn chunks_of_a_prompt_are_one_request_and_mixed_passes_decode() {
    let t = of_records(vec![
        pass(1, 1, &[11, 12, 13], &[0, 1, 2], Some(&[3])),
        pass(2, 1, &[14, 15], &[3, 4], Some(&[2])),
        pass(3, 2, &[16], &[5], None),
        // A new prompt, and the row of the request that goes on.
        pass(4, 3, &[21, 22, 17], &[0, 1, 6], Some(&[2, 1])),
        pass(5, 2, &[23, 18], &[2, 7], None),
    ]);
    let steps = steps_of(&t);
    let want = [
        (Phase::Prefill, 0, 3, 0, vec![]),
        (Phase::Prefill, 3, 2, 0, vec![16]),
        (Phase::Decode, 5, 1, 0, vec![17]),
        (Phase::Decode, 6, 1, 0, vec![18]),
        (Phase::Decode, 7, 1, 0, vec![u32::MAX]),
    ];
    assert_eq!(steps[&0], want);
    assert_eq!(steps[&1], [(Phase::Prefill, 0, 2, 0, vec![23]), (Phase::Decode, 2, 1, 0, vec![u32::MAX])]);
}

#[test]
fn who_cannot_be_told_apart_is_not_guessed() {
    // Two windows of 3 at 5 and 3; then one at 6, which either may have become.
    let t = of_records(vec![
        pass(1, 5, &[14, 15, 16, 23, 24, 25], &[5, 6, 7, 3, 4, 5], None),
        pass(2, 5, &[17, 18, 19], &[6, 7, 8], None),
        pass(3, 5, &[18, 41, 42], &[7, 8, 9], None),
    ]);
    assert!(t.warning("requests_doubtful").contains("more than one request 1 time:"));
    assert!(t.warning("requests_joined").starts_with("3 requests"));
    let steps = steps_of(&t);
    assert_eq!(steps.values().flatten().collect::<Vec<_>>(), [&(Phase::Verify, 6, 3, 0, vec![18])]);
}

#[test]
fn trees_and_passes_that_do_not_add_up_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = |records: Vec<P>| refused(&[&written(&dir, "dump.pt", &dump(records))]);
    assert!(error(vec![pass(1, 5, &[1, 2, 3, 4, 5], &[5, 6, 6, 7, 7], None)]).contains("a tree"));
    assert!(error(vec![pass(1, 1, &[1, 2, 3], &[0, 1, 2], Some(&[2]))]).contains("extend_seq_lens has 2 rows, the pass 3"));
    assert!(error(Vec::new()).contains("no records"));
    let twice = save(&P::Dict(vec![("records", P::List(vec![P::Int(1), P::Int(1)])), ("last_physical_to_logical_map", P::None)]));
    assert!(refused(&["sglang", &written(&dir, "twice.pt", &twice)]).contains("a record stands twice"));
    let no_key =
        P::Dict(vec![("forward_pass_id", P::Int(1)), ("topk_ids_of_layer", tensor(&[1, 1, 8], &[1; 8])), ("forward_mode", P::Int(1))]);
    assert!(error(vec![no_key]).contains("record 0: input_ids"));
    let other = record(2, 2, &[14], &[3], None, tensor(&[2, 1, WIDTH], &[-1, -1, -1, -1, -1, -1, -1, -1, 1, 2, 3, 4, -1, -1, -1, -1]));
    assert!(
        error(vec![pass(1, 1, &[11, 12, 13], &[0, 1, 2], Some(&[3])), other])
            .contains("record 1: ids of 2 layers, the passes before have 3")
    );
    // Rows that are there twice, as a captured graph has left them, are nobody's: the tokens stay.
    let ids: Vec<i32> = (0..LAYERS as i32 * 8 * 8).map(|i| i % 16).collect();
    let doubled = record(2, 2, &[12, 22, 32, 42], &[1, 1, 1, 1], None, tensor(&[LAYERS, 8, WIDTH], &ids));
    let t = of_records(vec![pass(1, 1, &[11, 21, 31, 41], &[0, 0, 0, 0], Some(&[1, 1, 1, 1])), doubled]);
    assert!(t.warning("rows_mismatch").contains("record 1 has ids of 8 rows for 4 tokens"));
    assert_eq!(route_rows(&t.trace).unwrap().len(), 4 * 2);
    // A drafter that proposes token 0 for ever.
    let t = of_records(vec![pass(1, 5, &[14, 0, 0], &[5, 6, 7], None), pass(2, 5, &[15, 0, 0], &[6, 7, 8], None)]);
    assert!(t.warning("drafter_broken").contains("in 2 of 2 windows"));
    // The recorder keeps 8 experts of a row.
    let path = written(&dir, "k.pt", &dump(vec![pass(1, 1, &[1, 2], &[0, 1], Some(&[2]))]));
    assert!(refused(&[&path, "--k", "10"]).contains("the model has 10"));
}

#[test]
fn ranks_that_recorded_the_same_are_one_run() {
    let file = data("sglang_recorder/per_token_spec_verify_cuda0_rank0.pt");
    let t = import(&["sglang", text(&file), text(&file)]);
    assert_eq!(t.trace.requests().unwrap().len(), 2);
    assert!(t.warning("ranks_alike").contains("another rank has recorded the same passes"));
}

#[test]
fn empty_counts_and_foreign_placements_are_empty() {
    let dir = tempfile::tempdir().unwrap();
    let zeros = save(&P::Dict(vec![("rank", P::Int(0)), ("logical_count", tensor(&[2, 3, 4], &[0; 24]))]));
    assert!(refused(&[&written(&dir, "zeros.pt", &zeros)]).contains("empty: all counts are 0"));
    assert!(refused(&[text(&data("eplb/sglang_init_expert_location_physical_to_logical.json"))]).contains("no counts: a placement"));
    let t = import(&[text(&data("eplb/sglang_init_expert_location_logical_count.json"))]);
    assert_eq!(t.manifest().expert_counts.as_ref().unwrap()[&1], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]);
}

#[test]
fn trainers_batches_lose_their_padding() {
    let expected = json("r3/expected.json");
    let t = import(&[text(&data("r3/verl_padded_batch.pt")), "--prompt-tokens", "6"]);
    assert_eq!(t.by_position(), matrix(&expected["routed_experts"], 0));
    assert!(t.warning("padding_masked").starts_with("6 rows left out") && t.warning("padding_zero").starts_with("1 row left out"));
    // slime: one dictionary a sample.
    let rows: Vec<i32> = serde_json::from_value::<Vec<Vec<Vec<i32>>>>(expected["routed_experts"].clone()).unwrap().concat().concat();
    let tokens: Vec<i64> = serde_json::from_value(expected["tokens"].clone()).unwrap();
    let sample = P::Dict(vec![
        ("tokens", ints(tokens.clone())),
        ("response_length", P::Int(6)),
        ("rollout_routed_experts", tensor(&[11, 6, 4], &rows)),
    ]);
    let without = P::Dict(vec![("tokens", ints([1, 2]))]);
    let dir = tempfile::tempdir().unwrap();
    let file = save(&P::Dict(vec![("rollout_id", P::Int(0)), ("samples", P::List(vec![sample, without]))]));
    let t = import(&[&written(&dir, "rollout.pt", &file)]);
    assert_eq!(t.by_position(), matrix(&expected["routed_experts"], 0));
    assert!(t.warning("samples_without_routes").starts_with("1 of 2"));
    let phases = t.trace.steps().unwrap().phase;
    assert_eq!(phases.iter().filter(|p| **p == Phase::Decode).count(), 5);
    // Tokens that were cut, ids that were not.
    let cut = P::Dict(vec![("tokens", ints(tokens[..6].to_vec())), ("routed_experts", tensor(&[11, 6, 4], &rows))]);
    let file = save(&P::Dict(vec![("samples", P::List(vec![cut]))]));
    assert!(refused(&[&written(&dir, "cut.pt", &file)]).contains("for 6 tokens"));
    // Counts by layer need to be told what the layers are.
    let counts = data("eplb/eplb_weight_layers_x_experts.pt");
    assert!(refused(&[text(&counts)]).contains("--layers"));
    let t = import(&[text(&counts), "--layers", "3-4"]);
    assert_eq!(t.manifest().expert_counts.as_ref().unwrap()[&3], [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]);
}

#[test]
fn pickles_that_would_run_code_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (pickle, name) in [
        (&b"\x80\x02}(X\x0d\x00\x00\x00logical_countcposix\nsystem\nX\x02\x00\x00\x00id\x85Ru."[..], "posix.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93X\x0d\x00\x00\x00logical_count\x85R.", "builtins.eval"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nX\x0d\x00\x00\x00logical_count.", "numpy.core.multiarray._reconstruct"),
    ] {
        let path = written(&dir, "hostile.pt", &with_pickle(pickle, &[]));
        let error = refused(&[&path]);
        assert!(error.contains(&format!("`{name}`")) && error.contains("nothing of it was run"), "{error}");
    }
    // torch's old container is told apart, with the way out.
    let old = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.".to_vec();
    let error = refused(&[&written(&dir, "old.pt", &old)]);
    assert!(error.contains("weights_only=True"), "{error}");
    // A view without end: 2^40 elements that are all the same one.
    let mut pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00".to_vec();
    pickle.extend(b"(\x8a\x06\x00\x00\x00\x00\x00\x01K\x01K\x01t(K\x00K\x01K\x01t\x89ccollections\nOrderedDict\n)RtR.");
    let error = refused(&["torch", &written(&dir, "view.pt", &with_pickle(&pickle, &[vec![0; 4]]))]);
    assert!(error.contains("times the file's bytes") || error.contains("at most"), "{error}");
}

/// A server that starts, verifies and ends requests at random; what it accepted is found again, or said to be unknown.
#[test]
fn what_a_random_server_accepted_is_found_again() {
    const WINDOW: i64 = 4;
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut below = |n: u32| i64::from(rng.next_u32() % n);
    // Position of the next window's anchor, by request in the batch's order.
    let mut batch: Vec<i64> = Vec::new();
    let (mut records, mut truth, mut anchors, mut token) = (Vec::new(), BTreeMap::new(), Vec::new(), 100i64);
    for pass_id in 1..=150 {
        if batch.len() < 3 || below(5) == 0 {
            let lengths: Vec<i64> = (0..1 + below(2)).map(|_| 1 + below(40)).collect();
            let positions: Vec<i64> = lengths.iter().flat_map(|&n| 0..n).collect();
            let tokens: Vec<i64> = positions.iter().map(|p| 50 + p).collect();
            records.push(pass(pass_id, 1, &tokens, &positions, Some(&lengths)));
            batch.extend(&lengths);
            anchors.extend(lengths.iter().map(|_| 0i64));
            continue;
        }
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        for anchor in &mut anchors {
            *anchor = token;
            tokens.extend(token..token + WINDOW);
            token += WINDOW;
        }
        batch.iter().for_each(|&start| positions.extend(start..start + WINDOW));
        records.push(pass(pass_id, 5, &tokens, &positions, None));
        // What is kept, and who ends: of the last window of a request nobody records it.
        let kept: Vec<(i64, bool)> = batch.iter().map(|_| (below(WINDOW as u32), below(12) == 0)).collect();
        for (&anchor, &(accepted, ends)) in anchors.iter().zip(&kept) {
            truth.insert(anchor as u32, (!ends).then_some(accepted as u16));
        }
        let stays: Vec<usize> = (0..batch.len()).filter(|&i| !kept[i].1).collect();
        batch = stays.iter().map(|&i| batch[i] + kept[i].0 + 1).collect();
        anchors = stays.iter().map(|&i| anchors[i]).collect();
    }
    let t = of_records(records);
    let steps = t.trace.steps_with_details().unwrap();
    let mut found = 0;
    for i in (0..steps.len()).filter(|&i| steps.phase[i] == Phase::Verify) {
        let anchor = steps.input_tokens.get(i)[0];
        assert_eq!(truth[&anchor], Some(steps.accepted[i]), "the window of token {anchor}");
        found += 1;
    }
    // Those in flight at the end, and those in doubt, are missing.
    let known = truth.values().flatten().count();
    assert!(found * 10 >= known * 9, "{found} of {known} windows");
}
