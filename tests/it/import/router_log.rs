//! Router logs of community patches, made up here in the shape of the public ones.

use super::*;
use specprof::trace::manifest::WindowCompleteness;
use std::fmt::Write;

fn row(out: &mut String, token: usize, ids: &[u16]) {
    let weights = vec![0.25; ids.len()];
    writeln!(
        out,
        r#"{{"type": "route", "req_id": "r1", "token_idx": {token}, "layer": 3, "topk_ids": {ids:?}, "topk_weights": {weights:?}}}"#
    )
    .unwrap();
}

fn log(forwards: usize, restart: bool) -> String {
    let mut out =
        r#"{"type": "meta", "model_id": "m", "vllm_version": "0.15.1", "device": "gpu", "seed": 1, "layers_logged": [3], "top_k": 2}"#
            .to_owned();
    out.push('\n');
    for token in 0..70 {
        row(&mut out, token, &[9, 4]);
    }
    for forward in 0..forwards {
        for token in 0..3 {
            let at = if restart { token } else { 70 + forward * 3 + token };
            row(&mut out, at, &[token as u16, 5 + forward as u16]);
        }
    }
    out
}

fn written(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("moe_routes.jsonl");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn dummy_batches_go_and_restarts_make_forwards() {
    let (_dir, path) = written(&log(4, true));
    let t = import(&[text(&path), "--experts", "16"]);
    assert!(t.warning("dummy_batch").starts_with("70 rows"));
    let m = t.manifest();
    assert_eq!(
        (m.window_completeness, m.engine.as_str(), m.model.moe_layers.as_slice()),
        (WindowCompleteness::Full, "vllm 0.15.1", &[3][..])
    );
    let steps = t.trace.steps().unwrap();
    assert_eq!(steps.rows, [3, 3, 3, 3]);
    // Rows 0, 1, 2 and one expert of all: 4 experts a forward.
    let report = t.report();
    assert_eq!(report["layers"][0]["union"]["mean"], 4.0);
    assert_eq!(report["acceptance"]["tokens_per_step"], Value::Null);
    assert!(t.warning("batch_forwards").contains("--draft-len"));
    let kept = import(&["router-log", text(&path), "--experts", "16", "--keep-warmup"]);
    assert_eq!(kept.trace.steps().unwrap().rows, [70, 3, 3, 3, 3]);
}

#[test]
fn without_restarts_there_are_no_windows() {
    let (_dir, path) = written(&log(4, false));
    let t = import(&[text(&path), "--experts", "16"]);
    assert_eq!(t.manifest().window_completeness, WindowCompleteness::None);
    t.warning("no_forwards");
}

#[test]
fn broken_lines_are_named() {
    let (_dir, path) = written(&(log(1, true) + "{\"type\": \"route\", \"token_idx\": 0}\n"));
    assert!(refused(&[text(&path)]).contains("line 75"));
    let (_dir, path) = written(&log(1, true));
    assert!(refused(&[text(&path), "--experts", "8"]).contains("beyond 8 experts"));
}
