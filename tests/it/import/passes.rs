//! Forward passes that requests shared: recorded ones keep together, and `batch` is what their ids give by hand.

use super::pt::{P, tensor};
use super::recorder::{LAYERS, WIDTH, ids_of, of_records, pass, record};
use super::*;
use specprof::trace::Phase;
use std::collections::BTreeSet;

const WINDOW: i64 = 4;

/// A server without chance: request r begins at position 1000 r, accepts (r + turn) mod 4 drafts, and ends after `lives[r]` windows.
struct Server {
    records: Vec<P>,
    /// By verify pass: the tokens of each of its requests, and whether the recording has all of their windows.
    passes: Vec<(Vec<Vec<i64>>, bool)>,
}

impl Server {
    fn run(lives: &[usize]) -> Self {
        let mut at: Vec<i64> = (0..lives.len() as i64).map(|r| 1000 * r).collect();
        let (mut token, mut server) = (100i64, Self { records: Vec::new(), passes: Vec::new() });
        let lengths = vec![3; lives.len()];
        let positions: Vec<i64> = at.iter().flat_map(|&p| p..p + 3).collect();
        let tokens: Vec<i64> = positions.iter().map(|p| 50 + p % 7).collect();
        server.records.push(pass(0, 1, &tokens, &positions, Some(&lengths)));
        at.iter_mut().for_each(|p| *p += 3);
        for turn in 0..*lives.iter().max().unwrap() {
            let there: Vec<usize> = (0..lives.len()).filter(|&r| turn < lives[r]).collect();
            let (mut windows, mut positions) = (Vec::new(), Vec::new());
            for &r in &there {
                windows.push((token..token + WINDOW).collect::<Vec<i64>>());
                token += WINDOW + 3;
                positions.extend(at[r]..at[r] + WINDOW);
                at[r] += 1 + (r + turn) as i64 % WINDOW;
            }
            server.records.push(pass(turn as i64 + 1, 5, &windows.concat(), &positions, None));
            let whole = there.iter().all(|&r| turn + 1 < lives[r]);
            server.passes.push((windows, whole));
        }
        server
    }
}

fn union(tokens: &[i64], layer: usize) -> BTreeSet<i32> {
    tokens.iter().flat_map(|&token| (0..4).map(move |k| ids_of(token, layer, k))).collect()
}

/// Passes, requests, sum of the requests' unions and of the passes' unions of the whole passes, in these layers.
fn by_hand(server: &Server, layers: std::ops::Range<usize>) -> (u64, usize, usize, usize) {
    let mut sums = (0, 0, 0, 0);
    for (windows, _) in server.passes.iter().filter(|p| p.1) {
        for layer in layers.clone() {
            sums.0 += 1;
            sums.1 += windows.len();
            sums.2 += windows.iter().map(|w| union(w, layer).len()).sum::<usize>();
            sums.3 += union(&windows.concat(), layer).len();
        }
    }
    sums
}

fn check(stats: &Value, (passes, requests, by_request, by_pass): (u64, usize, usize, usize)) {
    assert_eq!(stats["passes"], passes);
    let near = |key: &str, want: f64| assert!((stats[key].as_f64().unwrap() - want).abs() < 1e-12, "{key}: {} and {want}", stats[key]);
    near("request_union_mean", by_request as f64 / requests as f64);
    near("union_sum_mean", by_request as f64 / passes as f64);
    near("pass_union_mean", by_pass as f64 / passes as f64);
    near("sharing_ratio", by_request as f64 / by_pass as f64);
}

#[test]
fn unions_of_recorded_passes_are_those_of_their_ids() {
    let server = Server::run(&[9, 6, 9, 4]);
    let t = of_records(server.records.clone());
    // Requests end in the passes 3, 5 and 8, whose last windows nobody resolved.
    assert_eq!(server.passes.iter().filter(|p| !p.1).count(), 3);
    assert!(t.warning("passes_not_whole").starts_with("3 forward passes"));
    assert!(!t.manifest().passes_known);
    let batch = &t.report()["batch"];
    check(&batch["overall"], by_hand(&server, 1..LAYERS));
    for (layer, stats) in (1..LAYERS).zip(batch["layers"].as_array().unwrap()) {
        assert_eq!(stats["layer"], layer);
        check(stats, by_hand(&server, layer..layer + 1));
    }
    // 3 whole passes of four requests, 1 of three, 2 of two: what is left of the others is in none.
    assert_eq!(batch["requests_histogram"], serde_json::json!([0, 0, 2, 1, 3]));
    // The steps of a pass come together, and it is the engine's pass of its requests' tags.
    let steps = t.trace.steps().unwrap();
    let tags: BTreeMap<u32, Vec<i64>> = t.trace.requests().unwrap().iter().map(|r| (r.request_id, tag(&r.tags))).collect();
    let (mut turn, mut of) = (BTreeMap::new(), BTreeMap::new());
    for i in 0..steps.len() {
        let nth = turn.entry(steps.request_id[i]).or_insert(0usize);
        let engine = tags[&steps.request_id[i]][*nth];
        *nth += 1;
        if let Some(pass) = steps.pass_id[i] {
            assert_eq!(*of.entry(pass).or_insert(engine), engine, "step {i}");
        } else {
            assert!([4, 6, 9].contains(&engine), "step {i} of pass {engine}");
        }
    }
    assert_eq!(of.len(), 7);
    // The lines of another engine say as much.
    let lines = t.dir.path().join("t.jsonl");
    specprof().arg("export").arg(&t.path).args(["--format", "jsonl", "-o"]).arg(&lines).assert().success();
    let again = import(&["jsonl", text(&lines)]);
    assert_eq!(again.trace.steps().unwrap().pass_id, steps.pass_id);
    assert_eq!(again.report()["batch"], *batch);
}

fn tag(tags: &str) -> Vec<i64> {
    serde_json::from_value(serde_json::from_str::<Value>(tags).unwrap()["forward_pass_ids"].clone()).unwrap()
}

/// Ids of every pass, by whether its steps have a number.
fn numbered(t: &Imported) -> Vec<(Phase, u32, Option<u32>)> {
    let steps = t.trace.steps().unwrap();
    (0..steps.len()).map(|i| (steps.phase[i], steps.request_id[i], steps.pass_id[i])).collect()
}

#[test]
fn a_pass_that_lacks_rows_has_no_number() {
    let records = || Server::run(&[3, 3]).records;
    let whole = numbered(&of_records(records()));
    assert_eq!(whole.iter().filter(|s| s.0 == Phase::Verify).map(|s| s.2).collect::<Vec<_>>(), [Some(1), Some(1), Some(2), Some(2)]);
    // Padding of a captured graph: without ids it had no expert, with expert 0 it had a share of the pass.
    for (id, numbers) in [(-1, 3), (0, 2)] {
        let mut records = records();
        let tokens: Vec<i64> = vec![200, 201, 202, 203, 210, 211, 212, 213, 0, 0, 0, 0];
        let positions: Vec<i64> = vec![3, 4, 5, 6, 1003, 1004, 1005, 1006, 0, 0, 0, 0];
        let mut ids = vec![-1; LAYERS * 12 * WIDTH];
        for layer in 1..LAYERS {
            for (row, &token) in tokens.iter().enumerate() {
                for k in 0..4 {
                    ids[(layer * 12 + row) * WIDTH + k] = if row < 8 { ids_of(token, layer, k) } else { id };
                }
            }
        }
        records[1] = record(1, 5, &tokens, &positions, None, tensor(&[LAYERS, 12, WIDTH], &ids));
        let found: BTreeSet<u32> = numbered(&of_records(records)).iter().filter_map(|s| s.2).collect();
        assert_eq!(found.len(), numbers, "padding of {id}");
    }
    // One row of one layer that is no choice.
    let mut records = records();
    let tokens: Vec<i64> = (200..208).collect();
    let mut ids = vec![-1; LAYERS * 8 * WIDTH];
    for layer in 1..LAYERS {
        for (row, &token) in tokens.iter().enumerate() {
            for k in 0..if layer == 2 && row == 5 { 3 } else { 4 } {
                ids[(layer * 8 + row) * WIDTH + k] = ids_of(token, layer, k);
            }
        }
    }
    records[2] = record(2, 5, &tokens, &[4, 5, 6, 7, 1005, 1006, 1007, 1008], None, tensor(&[LAYERS, 8, WIDTH], &ids));
    let t = of_records(records);
    assert!(t.warning("partial_rows").starts_with("1 row"));
    let verify: Vec<_> = numbered(&t).into_iter().filter(|s| s.0 == Phase::Verify).map(|s| s.2).collect();
    assert_eq!(verify, [Some(1), Some(1), None, None]);
}

#[test]
fn passes_of_several_dumps_go_on_counting() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, lives: &[usize]| super::recorder::written(&dir, name, &super::recorder::dump(Server::run(lives).records));
    let (a, b) = (write("a.pt", &[3, 3]), write("b.pt", &[4, 4, 4]));
    let t = import(&["sglang", &a, &b]);
    let passes: BTreeSet<u32> = t.trace.steps().unwrap().pass_id.into_iter().flatten().collect();
    assert_eq!(passes.into_iter().collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());
}
