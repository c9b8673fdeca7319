//! The line format: what `docs/jsonl.md` shows, and a whole trace through it and back.

use super::*;
use crate::trace::small;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use specprof::trace::{FinishReason, Module, Phase, Probe, RequestEvent, StepEvent, TraceError};
use std::fmt::Write;

const HEADER: &str = r#"{"type":"header","format":"specprof.jsonl/1","engine":"my-engine 1.2","model":{"name":"m","experts":64,"experts_per_token":2,"moe_layers":[1,2]}}"#;

fn written(lines: &[&str]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    (dir, path)
}

#[test]
fn the_example_of_the_documentation_is_read_as_it_says() {
    let doc = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/jsonl.md")).unwrap();
    let example = doc.split("```jsonl\n").nth(1).unwrap().split("```").next().unwrap();
    let (_dir, path) = written(&[example]);
    let t = import(&[text(&path)]);
    let m = t.manifest();
    assert_eq!((m.engine.as_str(), m.model.experts, m.drafter.kind.as_str(), m.drafter.draft_len), ("my-engine 1.2", 64, "mtp", Some(2)));
    let steps = t.trace.steps().unwrap();
    assert_eq!((steps.phase.as_slice(), steps.accepted.as_slice()), (&[Phase::Prefill, Phase::Verify][..], &[0, 1][..]));
    assert_eq!((steps.context_len.as_slice(), steps.host_times), (&[0, 3][..], false));
    let requests = t.trace.requests().unwrap();
    let r = &requests[0];
    assert_eq!((r.id.as_str(), r.prompt_tokens, r.generated_tokens, r.finish_reason), ("chat-1", 3, 2, FinishReason::Stop));
    assert_eq!(t.by_position()[&(4, 1)], [1, 4]);
    assert_eq!(t.report()["layers"][1]["union"]["mean"], 5.0);
}

#[test]
fn base64_lists_and_unknown_rows() {
    let bytes: Vec<u8> = [1u16, 2, 3, 4, 5, 6, 65535, 65535].iter().flat_map(|id| id.to_le_bytes()).collect();
    let packed = format!(r#"{{"type":"step","request_id":0,"tokens":[1,2],"routes":"{}"}}"#, STANDARD.encode(bytes));
    let nested = r#"{"type":"step","request_id":0,"tokens":[1,2],"routes":[[[1,2],[3,4]],[[5,6],null]]}"#;
    let shorter = r#"{"type":"step","request_id":0,"tokens":[1,2],"routes":[[[1,2],[3,4]],[[5,6]]]}"#;
    let mut all = Vec::new();
    for step in [packed.as_str(), nested, shorter] {
        let (_dir, path) = written(&[HEADER, step]);
        all.push(route_rows(&import(&[text(&path)]).trace).unwrap());
    }
    assert_eq!(all[0].len(), 3);
    assert!(all.iter().all(|rows| *rows == all[0]));
}

#[test]
fn requests_without_an_end_were_aborted() {
    let (_dir, path) = written(&[HEADER, r#"{"type":"step","request_id":"a","tokens":[1]}"#, r#"{"type":"news"}"#]);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("t");
    specprof().args(["import", "jsonl"]).arg(&path).arg("-o").arg(&out).assert().success();
    let trace = Trace::open(&out).unwrap();
    assert_eq!(trace.requests().unwrap()[0].finish_reason, FinishReason::Aborted);
    assert!(trace.manifest().warnings.iter().any(|w| w.code == "other_lines"));
}

#[test]
fn what_breaks_the_rules_names_the_line() {
    let step = r#"{"type":"step","request_id":0,"tokens":[1,2],"accepted":1}"#;
    for (line, why) in [
        ("{", "line 3: not a JSON object"),
        ("[1]", "line 3: not a JSON object"),
        (r#"{"a":1}"#, "line 3: not an object with a `type`"),
        (HEADER, "line 3: a second header"),
        (r#"{"type":"step","request_id":0}"#, "line 3: step: missing field `tokens`"),
        (r#"{"type":"step","request_id":"x","tokens":[1]}"#, "a text here and a number before"),
        (r#"{"type":"step","request_id":0,"tokens":[1,2],"accepted":2}"#, "2 tokens and 2 accepted"),
        (r#"{"type":"step","request_id":0,"tokens":[]}"#, "0 tokens"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"step_id":0}"#, "step_id 0 does not come after"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"routes":[[[1,2]]]}"#, "routes of 1 layers"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"routes":[[[1,2],[3,4]],[]]}"#, "2 rows for 1 tokens"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"routes":[[[1,64]],[]]}"#, "layer 1, row 0: expert 64 of 64"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"routes":[[[3,3]],[]]}"#, "layer 1, row 0: an expert is there twice"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"routes":[[[1]],[]]}"#, "1 experts, the header says 2"),
        (r#"{"type":"step","request_id":0,"tokens":[1],"routes":"AAAA"}"#, "3 bytes"),
        (r#"{"type":"telemetry"}"#, "`time_ns` is missing"),
        (r#"{"type":"kernel","step_id":1,"component":"mla","begin_ns":1,"end_ns":2}"#, "line 3: kernel: there is no step 1 before it"),
        (r#"{"type":"kernel","step_id":0,"component":"soup","begin_ns":1,"end_ns":2}"#, "`soup` is not a component"),
        (r#"{"type":"kernel","step_id":0,"component":"mla","begin_ns":3,"end_ns":2}"#, "ends before it begins"),
        (r#"{"type":"kernel","step_id":0,"component":"mla","begin_ns":3}"#, "missing field `end_ns`"),
        (r#"{"type":"kernel","step_id":0,"component":"mla","begin_ns":3,"end_ns":4,"grid":[1,2]}"#, "line 3: kernel:"),
        (r#"{"type":"news"#, "line 3: not a JSON object"),
        (r#"{"type":"request","request_id":0,"finish_reason":"bored"}"#, "`bored` is not a finish_reason"),
    ] {
        let (_dir, path) = written(&[HEADER, step, line]);
        let error = refused(&["jsonl", text(&path)]);
        assert!(error.contains(why), "{line}: {error}");
    }
    for (header, why) in [
        (r#"{"type":"step"}"#, "the first line must be the header"),
        (r#"{"type":"header","format":"specprof.jsonl/9"}"#, "specprof.jsonl/1 is"),
        (r#"{"type":"header","format":"specprof.jsonl/1"}"#, "no `model`"),
        (r#"{"type":"header","format":"specprof.jsonl/1","model":{"experts":4}}"#, "no `experts_per_token`"),
        (
            r#"{"type":"header","format":"specprof.jsonl/1","model":{"experts":2,"experts_per_token":3,"moe_layers":[1]}}"#,
            "3 experts per token of 2",
        ),
        (r#"{"type":"header","format":"specprof.jsonl/1","model":{"experts":2000,"experts_per_token":3,"moe_layers":[1]}}"#, "at most 512"),
        (
            r#"{"type":"header","format":"specprof.jsonl/1","model":{"experts":4,"experts_per_token":2,"moe_layers":[2,1]}}"#,
            "do not ascend",
        ),
    ] {
        let (_dir, path) = written(&[header]);
        let error = refused(&["jsonl", text(&path)]);
        assert!(error.contains(why), "{header}: {error}");
    }
}

/// Writes events as lines, in every optional key.
struct Emit(String);

impl Probe for Emit {
    fn wants_weights(&self) -> bool {
        true
    }

    fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
        let (mut routes, mut weights, mut draft, mut draft_weights) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut ids, mut gates) = (step.routes.ids.chunks(step.routes.k), step.routes.weights.chunks(step.routes.k));
        for block in &step.routes.blocks {
            let rows: Vec<_> = ids.by_ref().take(usize::from(block.rows)).collect();
            let own: Vec<_> = gates.by_ref().take(usize::from(block.rows)).collect();
            if block.module == Module::Draft {
                draft.push(serde_json::json!([block.layer, block.first_row, rows]));
                draft_weights.push(serde_json::json!(own));
            } else {
                routes.push(serde_json::json!(rows));
                weights.push(serde_json::json!(own));
            }
        }
        let line = serde_json::json!({
            "type": "step", "request_id": step.request_id, "step_id": step.step_id, "phase": step.phase.as_str(), "accepted": step.accepted,
            "context_len": step.context_len, "tokens": step.input_tokens, "emitted": step.emitted_tokens, "draft_probs": step.draft_probs, "draft_confidences": step.draft_confidences, "pass_id": step.pass_id,
            "begin_ns": step.host_begin_ns, "end_ns": step.host_end_ns, "draft_ns": step.draft_host_ns, "target_ns": step.target_host_ns,
            "device_ns": step.device_ns, "routes": routes, "weights": weights, "draft_routes": draft, "draft_weights": draft_weights,
        });
        writeln!(self.0, "{line}").unwrap();
        Ok(())
    }

    fn request(&mut self, r: RequestEvent) -> Result<(), TraceError> {
        let line = serde_json::json!({"type": "request", "request_id": r.request_id, "id": r.id, "tags": r.tags,
            "finish_reason": r.finish_reason.as_str(), "prompt_tokens": r.prompt_tokens, "generated_tokens": r.generated_tokens});
        writeln!(self.0, "{line}").unwrap();
        Ok(())
    }
}

#[test]
fn a_whole_trace_goes_through_the_lines_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let synth = small();
    let direct = dir.path().join("direct");
    synth.write(&direct).unwrap();
    let direct = Trace::open(&direct).unwrap();
    let mut header = serde_json::to_value(direct.manifest()).unwrap();
    header["type"] = "header".into();
    header["format"] = "specprof.jsonl/1".into();
    let mut emit = Emit(format!("{header}\n"));
    synth.emit(&mut emit).unwrap();
    let path = dir.path().join("t.jsonl");
    std::fs::write(&path, &emit.0).unwrap();
    let t = import(&[text(&path)]);
    assert_eq!(t.trace.steps_with_details().unwrap(), direct.steps_with_details().unwrap());
    assert_eq!(t.trace.requests().unwrap(), direct.requests().unwrap());
    assert_eq!(route_rows(&t.trace).unwrap(), route_rows(&direct).unwrap());
    let (mine, theirs) = (t.manifest(), direct.manifest());
    assert_eq!((&mine.model, &mine.sampling, &mine.token_hash), (&theirs.model, &theirs.sampling, &theirs.token_hash));
    assert_eq!(
        (&mine.warnings, mine.started_unix_ns, mine.ended_unix_ns),
        (&theirs.warnings, theirs.started_unix_ns, theirs.ended_unix_ns)
    );
}

#[test]
fn the_python_emitter_writes_what_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let emitter = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/emit_jsonl.py");
    let path = dir.path().join("t.jsonl");
    let script = format!(
        "import sys; sys.path.insert(0, {:?}); from emit_jsonl import Emitter\n\
         e = Emitter({:?}, 'py 1', 'm', 16, 2, [1, 2])\n\
         e.step('a', [1, 2], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], emitted=[3])\n\
         e.step('a', [3, 4], [[[1, 2], [1, 3]], [[5, 6], [5, 7]]], accepted=1, emitted=[4, 5])\n\
         e.end('a', 'stop')\n",
        text(emitter.parent().unwrap()),
        text(&path)
    );
    let python = std::process::Command::new("python3").args(["-c", &script]).output().unwrap();
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    let t = import(&[text(&path)]);
    assert_eq!(t.report()["overall"]["union"]["mean"], 3.0);
    assert_eq!(t.trace.requests().unwrap()[0].generated_tokens, 3);
    let source = std::fs::read_to_string(emitter).unwrap();
    assert!(source.lines().filter(|l| !l.trim().is_empty() && !l.trim_start().starts_with('#')).count() <= 26, "twenty lines and a little");
}
