//! What people met when they did this job: every case ends as it should.

use super::*;
use base64::Engine;
use specprof::import::acceptance::Acceptance;
use specprof::trace::manifest::WindowCompleteness;

/// A `.npy` of little-endian numbers.
pub(super) fn npy(descr: &str, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({},), }}\n", shape.join(", "));
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(bytes);
    file
}

fn written(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn int32(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// k distinct ids of a row and layer.
fn ids(row: usize, layer: usize, k: usize, experts: usize) -> impl Iterator<Item = i32> {
    (0..k).map(move |rank| ((row * 7 + layer * 3 + rank * 5) % experts) as i32)
}

#[test]
fn captures_that_were_skipped_or_switched_off_are_empty() {
    let dir = tempfile::tempdir().unwrap();
    let zeros = written(&dir, "zeros.npy", &npy("|u1", &[546, 40, 8], &vec![0; 546 * 40 * 8]));
    let error = refused(&[text(&zeros)]);
    assert!(error.contains("no routes") && error.contains("546 rows") && error.contains("silently skipped"), "{error}");
    let off = data("vllm/completions_response_routed_experts_null.json");
    assert!(refused(&[text(&off)]).contains("no routing in this file"));
    let encoded = base64::engine::general_purpose::STANDARD.encode(npy("|u1", &[4, 2, 2], &[0; 16]));
    let response =
        format!(r#"{{"usage":{{"prompt_tokens":3,"completion_tokens":2}},"choices":[{{"index":0,"routed_experts":"{encoded}"}}]}}"#);
    assert!(refused(&[text(&written(&dir, "r.json", response.as_bytes()))]).contains("all ids of 1 request(s) are padding"));
    assert!(refused(&[text(&written(&dir, "empty.json", b""))]).contains("empty"));
}

#[test]
fn hybrid_models_have_layers_without_routes() {
    let dir = tempfile::tempdir().unwrap();
    let routed = |layer: usize| layer % 9 < 4 && layer < 52;
    let cells = (0..5usize).flat_map(|row| (0..52usize).map(move |layer| (row, layer)));
    let bytes =
        int32(cells.flat_map(|(row, layer)| ids(row, layer, 4, 64).map(move |id| if routed(layer) { id } else { 0 }).collect::<Vec<_>>()));
    let path = written(&dir, "hybrid.npy", &npy("<i4", &[5, 52, 4], &bytes));
    let n = (0..52).filter(|&l| routed(l)).count();
    assert!(import(&[text(&path), "--experts", "64"]).warning("layers_not_routed").starts_with(&format!("{n} of 52")));
}

#[test]
fn ids_that_do_not_fit_their_type_are_refused_when_e_is_known() {
    let wrapped = data("r3/BAD_uint8_wrapped_384experts.npy");
    assert!(refused(&[text(&wrapped), "--experts", "384"]).contains("cannot hold 384 experts"));
    import(&[text(&data("r3/BAD_uint8_wrapped_truth_int32.npy")), "--experts", "384"]);
}

#[test]
fn packed_weights_are_hinted_at_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let cells = (0..4usize).flat_map(|row| (0..6usize).map(move |layer| (row, layer)));
    let bytes = int32(cells.flat_map(|(row, layer)| ids(row, layer, 4, 32).chain([0.25f32.to_bits() as i32; 4]).collect::<Vec<_>>()));
    let path = written(&dir, "packed.npy", &npy("<i4", &[4, 6, 8], &bytes));
    let error = refused(&[text(&path), "--experts", "32", "--layers", "all"]);
    assert!(error.contains("8 = 2 x 4") && error.contains("--packed-weights"), "{error}");
    let t = import(&[text(&path), "--experts", "32", "--layers", "all", "--packed-weights"]);
    assert!(t.manifest().router_weights);
    let rows = route_rows(&t.trace).unwrap();
    assert!(rows.len() == 24 && rows.iter().all(|r| r.5 == [0.25f32.to_bits(); 4]));
}

#[test]
fn tokens_and_rows_that_do_not_match_name_both_counts() {
    let mut response = json("vllm/completions_response_v0.33.json");
    response["choices"][0]["token_ids"].as_array_mut().unwrap().truncate(11);
    let dir = tempfile::tempdir().unwrap();
    let error = refused(&[text(&written(&dir, "cut.json", response.to_string().as_bytes()))]);
    assert!(error.contains("21 rows") && error.contains("18 tokens"), "{error}");
}

#[test]
fn minus_one_is_missing_or_a_smaller_k_and_never_an_expert() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(&dir, "m.npy", &npy("<i4", &[3, 1, 4], &int32([3, 7, 1, 2, -1, -1, -1, -1, 3, 7, -1, -1])));
    let t = import(&[text(&path), "--experts", "16", "--layers", "3-3"]);
    assert_eq!(t.by_position(), BTreeMap::from([((0, 3), vec![3, 7, 1, 2])]));
    assert!(t.warning("padding_missing").starts_with("1 row") && t.warning("partial_rows").starts_with("1 row"));
    let width = written(&dir, "w.npy", &npy("<i4", &[2, 1, 4], &int32([3, 7, -1, -1, 5, 1, -1, -1])));
    let t = import(&[text(&width), "--experts", "16", "--layers", "0-0"]);
    assert_eq!((t.manifest().model.experts_per_token, t.by_position().len()), (2, 2));
}

#[test]
fn unknown_numbers_of_experts_leave_out_what_depends_on_them() {
    let t = import(&[text(&data("vllm/completions_response_v0.33.json"))]);
    assert!(!t.manifest().model.experts_known);
    let report = t.report();
    assert_eq!((&report["overall"]["lift"], &report["overall"]["uniform_union"]), (&Value::Null, &Value::Null));
    assert!(report["overall"]["union"]["mean"].as_f64().unwrap() > 4.0);
    assert!(report["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "experts_unknown"));
}

#[test]
fn declared_windows_are_whole_and_their_acceptance_is_unknown() {
    let dir = tempfile::tempdir().unwrap();
    // 3 windows of 2 rows, 1 layer: the second row shares 0, 1, 2 of 2 experts with the first.
    let path = written(&dir, "w.npy", &npy("<i4", &[3, 2, 1, 2], &int32([1, 2, 3, 4, 1, 2, 2, 3, 1, 2, 2, 1])));
    let t = import(&[text(&path), "--axes", "wtlk", "--layers", "7-7", "--experts", "8"]);
    let m = t.manifest();
    assert_eq!((m.window_completeness, m.acceptance_known, m.drafter.draft_len), (WindowCompleteness::Full, false, Some(1)));
    let report = t.report();
    assert_eq!(report["layers"][0]["union"]["mean"], 3.0);
    assert_eq!((&report["acceptance"]["tokens_per_step"], &report["layers"][0]["wasted_mean"]), (&Value::Null, &Value::Null));
}

#[test]
fn drafters_past_their_context_are_called_out() {
    let mut response = json("vllm/completions_response_v0.33.json");
    // 2, 3, then six zeros: 3 + 4 + 6 rows of 14.
    response["metrics"]["speculative_decoding"]["per_step_accepted"] = serde_json::json!([2, 3, 0, 0, 0, 0, 0, 0]);
    response["metrics"]["speculative_decoding"]["per_step_drafted"] = serde_json::json!([3, 3, 3, 3, 3, 3, 3, 3]);
    let dir = tempfile::tempdir().unwrap();
    let t = import(&[text(&written(&dir, "tail.json", response.to_string().as_bytes())), "--experts", "64"]);
    // The histogram of the unchanged summary contradicts nothing that is used; the tail is named first or beside it.
    assert!(t.warning("acceptance_doubtful").contains("last 6 of 8"));
    assert!(t.warning("windows_unreliable").contains("13 rows, 14 generated"));
    assert_eq!(t.manifest().window_completeness, WindowCompleteness::None);
}

#[test]
fn what_engines_say_of_acceptance_is_normalised() {
    let all = json("acceptance/per_request_examples.json");
    let find = |key: &str| Acceptance::find(&all[key]);
    let sglang = find("sglang_0.5.23_histogram_only").unwrap();
    assert_eq!((sglang.steps, sglang.drafted, sglang.accepted, sglang.doubts.len()), (Some(43), Some(215), Some(63), 0));
    assert_eq!(find("sglang_old_keys").unwrap().accepted, Some(11));
    assert_eq!(find("miles_session_zeros"), None);
    assert_eq!(find("llamacpp_timings").unwrap().tokens_per_step(), None);
    assert!(find("llamacpp_timings_impossible").unwrap().doubts[0].contains("120 drafts accepted in 100"));
    assert!(find("mlx_vlm_short_reply").unwrap().doubts[0].contains("6 drafts accepted in 2"));
    assert_eq!(find("mlx_vlm_consistent").unwrap().doubts.len(), 0);
    assert!(find("mlxcel_wrong_split").unwrap().doubts[0].contains("implausible"));
    assert_eq!(find("tokenspeed").unwrap().accepted, Some(69));
    assert_eq!(find("vllm_prerelease_histogram_object").unwrap().histogram, Some(vec![39, 1, 0, 3]));
    assert_eq!(find("vllm_detailed").unwrap().steps_in_order().map(<[_]>::len), Some(5));
    let trt = Acceptance::find(&json("acceptance/choice_speculative_decoding_pr19311.json")).unwrap();
    assert_eq!((trt.source, trt.accepted, trt.doubts.len()), ("tensorrt-llm", Some(30), 0));
    let timings = refused(&[text(&data("llamacpp/server_chat_timings.json"))]);
    assert!(timings.contains("167 of 259 drafts accepted in an unknown number of verify steps"), "{timings}");
}
