//! Traces cut by request and put together again, and files that were tampered with.

use super::{Partial, merge};
use crate::analysis::cost::tests::timed;
use crate::analysis::passes::Passes;
use crate::analysis::steps::StepTable;
use crate::analysis::tests::memory::{Memory, OPTIONS};
use crate::analysis::tests::{naive, shapes};
use crate::analysis::{AnalysisError, GroupBy, Wanted};
use crate::metric::report::{Report, RequestIdentity};
use crate::trace::manifest::{IdSpace, Warning};
use crate::trace::partial_file::{Entry, EntryKind, PartialFile, encode};
use crate::trace::{FinishReason, Kernels, Phase, RequestEvent};
use proptest::prelude::*;
use sha2::Digest;
use std::collections::HashMap;
use std::path::Path;

/// Weights, draft probabilities, requests with tags: what the random traces lack.
fn dressed(mut trace: Memory) -> Memory {
    let drafts = |rows: u16| (1..rows).map(|row| 1.0 / f32::from(row + 1)).collect();
    trace.draft_probs = trace.steps.iter().map(|s| (s.phase == Phase::Verify && s.step_id % 7 != 0).then(|| drafts(s.rows))).collect();
    for (at, route) in trace.routes.iter_mut().enumerate() {
        route.weights = route.ids.iter().map(|&id| f32::from(id + 1) / (at % 13 + 1) as f32).collect();
    }
    let mut ids: Vec<u32> = trace.steps.iter().map(|s| s.request_id).collect();
    ids.sort_unstable();
    ids.dedup();
    // One that never had a step, and one whose entry is missing.
    ids.push(77);
    let event = |&request_id: &u32| RequestEvent {
        request_id,
        id: format!("r{request_id}"),
        prompt_tokens: 3,
        generated_tokens: 9,
        finish_reason: FinishReason::Stop,
        tags: format!(r#"{{"kind": "{}"}}"#, ["chat", "code"][request_id as usize % 2]),
        prompt_text: None,
        output_text: None,
    };
    trace.requests = ids.iter().skip(1).map(event).collect();
    trace.manifest.model.bytes_other_per_step = Some(1 << 20);
    trace.manifest.drafter.bytes_per_draft = Some(1 << 16);
    trace
}

/// The requests of a trace that are in this shard.
fn shard(trace: &Memory, keep: impl Fn(u32) -> bool) -> Memory {
    let kept: Vec<usize> = (0..trace.steps.len()).filter(|&at| keep(trace.steps[at].request_id)).collect();
    let steps: Vec<_> = kept.iter().map(|&at| trace.steps[at]).collect();
    let has = |step: u32| steps.iter().any(|s| s.step_id == step);
    let k = &trace.kernels;
    let operations: Vec<usize> = (0..k.len()).filter(|&i| has(k.step_id[i])).collect();
    Memory {
        routes: trace.routes.iter().filter(|r| has(r.step)).cloned().collect(),
        draft_probs: kept.iter().filter_map(|&at| trace.draft_probs.get(at).cloned()).collect(),
        times: kept.iter().filter_map(|&at| trace.times.get(at).copied()).collect(),
        requests: trace.requests.iter().filter(|r| keep(r.request_id)).cloned().collect(),
        passes: kept.iter().map(|&at| trace.passes.get(at).copied().flatten()).collect(),
        kernels: Kernels {
            step_id: operations.iter().map(|&i| k.step_id[i]).collect(),
            layer: operations.iter().map(|&i| k.layer[i]).collect(),
            module: operations.iter().map(|&i| k.module[i]).collect(),
            component: operations.iter().map(|&i| k.component[i]).collect(),
            begin_ns: operations.iter().map(|&i| k.begin_ns[i]).collect(),
            end_ns: operations.iter().map(|&i| k.end_ns[i]).collect(),
        },
        steps: steps.clone(),
        manifest: trace.manifest.clone(),
        trees: trace.trees.clone(),
        cuts: trace.cuts.clone(),
        slice: trace.slice,
    }
}

/// Through a file.
fn partial(dir: &Path, name: &str, trace: &Memory) -> Result<Partial, AnalysisError> {
    let identity = |id: u32| RequestIdentity { prompt: None, output: format!("o{id}"), windows: format!("w{id}") };
    let identities: HashMap<u32, _> = trace.steps.iter().map(|s| (s.request_id, identity(s.request_id))).collect();
    let path = dir.join(name);
    std::fs::write(&path, trace.with_input(|input| Partial::of_input(input, identities))?.encode()?).unwrap();
    Partial::read(&path)
}

fn wanted(by: Option<&str>) -> Wanted {
    Wanted { by: by.map(|by| by.parse::<GroupBy>().unwrap()), ..Wanted::default() }
}

/// As JSON, but for what tells that it was put together.
fn json(mut report: Report) -> String {
    report.run.name = String::new();
    report.warnings.retain(|w| w.code != "merged_partials");
    report.by_request.iter_mut().for_each(|r| r.identity = None);
    serde_json::to_string_pretty(&report).unwrap()
}

/// Reports of the whole, and of its shards in two orders, by every grouping.
fn check(trace: &Memory, of: &dyn Fn(u32) -> u32) -> Result<(), TestCaseError> {
    let dir = tempfile::tempdir().unwrap();
    let mut shards = Vec::new();
    for number in 0..3 {
        let part = shard(trace, |request| of(request) == number);
        if part.steps.is_empty() && part.requests.is_empty() {
            continue;
        }
        // Shards are told apart by their runs.
        let mut part = part;
        part.manifest.started_unix_ns += i64::from(number);
        shards.push(partial(dir.path(), &number.to_string(), &part).map_err(|e| TestCaseError::fail(e.to_string()))?);
    }
    let whole = shard(trace, |_| true);
    for by in [None, Some("request"), Some("tag:kind"), Some("context"), Some("layer")] {
        let wanted = wanted(by);
        let Ok(expected) = whole.try_report_of(&wanted) else { continue };
        let mut expected = expected;
        if shards.len() > 1 {
            expected.run.ended_unix_ns = whole.manifest.ended_unix_ns;
        }
        let expected = json(expected);
        for turned in [false, true] {
            let mut given = shards.clone();
            if turned {
                given.reverse();
            }
            let mut found = merge(given).unwrap().report(None, &OPTIONS, &wanted).unwrap();
            found.run.started_unix_ns = whole.manifest.started_unix_ns;
            let found = json(found);
            let differing = found.lines().zip(expected.lines()).find(|(a, b)| a != b);
            prop_assert!(found == expected, "by {:?}: {:?}", wanted.by, differing);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn shards_give_the_report_of_the_whole(trace in naive::traces(), seed in any::<u32>()) {
        check(&dressed(trace), &|request| (seed >> (2 * (request % 4))) % 3)?;
    }

    #[test]
    fn so_do_shards_of_trees_and_of_shared_passes(trace in shapes::traces(), known in any::<bool>(), seed in any::<u32>()) {
        let mut trace = dressed(trace);
        trace.manifest.passes_known = known;
        // Requests that meet in a pass are recorded together.
        let table = StepTable::new(&trace.steps).unwrap();
        let passes = Passes::of_steps(&table, &trace.passes, true).unwrap();
        let group: HashMap<u32, u32> =
            trace.steps.iter().enumerate().filter_map(|(at, step)| Some((step.request_id, passes.group_of(at)?))).collect();
        let group_of = |request: u32| group.get(&request).map_or(request, |group| group + 1000);
        check(&trace, &|request| (seed >> (2 * (group_of(request) % 4))) % 3)?;
    }

    /// Whatever is written into an entry, the file is refused or a report comes out.
    #[test]
    fn tampered_entries_are_no_panic(
        trees in any::<bool>(), chains in naive::traces(), forests in shapes::traces(), which in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(), value in prop_oneof![Just(0), Just(-1), Just(1), Just(i64::MAX), Just(i64::MIN), Just(1 << 38), 0i64..100], how in 0..5,
    ) {
        let trace = shard(&dressed(if trees { forests } else { chains }), |_| true);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        partial(dir.path(), "p", &trace).unwrap();
        let file = PartialFile::open(&path).unwrap();
        let mut entries: Vec<Entry> = Vec::new();
        file.each(|entry| { entries.push(entry); Ok(()) }).unwrap();
        let i = which.index(entries.len());
        let entry = &mut entries[i];
        match how {
            0 if !entry.values.is_empty() => { let j = at.index(entry.values.len()); entry.values[j] = value; }
            1 => { entry.values.pop(); }
            2 => { entry.rows = Some(value as u16); entry.layer = entry.layer.map(|l| l + 1); }
            3 => { entry.step_id = Some(value as u32); entry.request_id = entry.request_id.map(|r| r + 1); }
            4 => { let double = entry.clone(); entries.push(double); }
            _ => { entries.remove(i); }
        }
        let bytes = encode(file.name(), file.manifest(), entries.into_iter()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        if let Ok(partial) = Partial::read(&path) {
            for by in [None, Some("request"), Some("context")] {
                let _ = partial.report(None, &OPTIONS, &wanted(by));
            }
            let _ = merge(vec![partial.clone(), Partial { fingerprint: [9; 32], ..partial }]).map(|both| both.report(None, &OPTIONS, &wanted(None)));
        }
    }
}

#[test]
fn times_of_shards_are_those_of_the_whole() {
    let mut trace = dressed(timed(7));
    trace.draft_probs.clear();
    // As a trace has it: one column for both.
    trace.steps.iter_mut().zip(&trace.times).for_each(|(step, time)| step.context_len = time.context_len);
    let report = trace.report();
    assert!(report.cost.as_ref().unwrap().verify_ratio_ci95.is_some() && report.layers[0].cost.as_ref().unwrap().ci95.is_some());
    // What is drawn from times by request, too.
    assert!(
        report.layers[0].time.as_ref().unwrap().decode_us_ci95.is_some() && report.advice.as_ref().unwrap().resamples_left_out.is_some()
    );
    check(&trace, &|request| request % 3).unwrap();
    check(&trace, &|_| 0).unwrap();
}

/// Two recordings whose steps, requests and passes have the same numbers, and one in which nobody met anybody.
#[test]
fn passes_stay_whole_where_steps_are_numbered_anew() {
    let dir = tempfile::tempdir().unwrap();
    let mut parts = Vec::new();
    for number in 0..3 {
        let mut trace = shapes::batches();
        trace.manifest.started_unix_ns += number;
        if number == 2 {
            trace.passes.clear();
        }
        parts.push(partial(dir.path(), &number.to_string(), &trace).unwrap());
    }
    let report = merge(parts).unwrap().report(None, &OPTIONS, &wanted(None)).unwrap();
    let batch = report.batch.unwrap();
    assert_eq!((batch.passes, &batch.requests_histogram[..]), (8, &[0, 4, 4][..]));
    // Twice the unions of the worked example, {0,1,2,3} {0,1,4,5} together 6 and twice {0,1,2,3} together 4, and four times 4.
    let layer = &batch.layers[0].stats;
    assert_eq!((layer.passes, layer.pass_union_mean, layer.sharing_ratio), (8, (6.0 + 4.0 + 6.0 + 4.0 + 16.0) / 8.0, 48.0 / 36.0));
    assert_eq!(batch.by_requests.iter().map(|s| (s.requests, s.stats.passes)).collect::<Vec<_>>(), [(1, 8), (2, 8)]);
}

#[test]
fn requests_of_one_number_are_different_requests() {
    let dir = tempfile::tempdir().unwrap();
    let mut one = Memory::new(&[1], 6, 2);
    one.verify(0, 0, &[vec![vec![0, 1], vec![0, 2]]]);
    one.verify(0, 1, &[vec![vec![0, 1], vec![0, 1]]]);
    let mut two = Memory::new(&[1], 6, 2);
    two.verify(0, 1, &[vec![vec![2, 3], vec![4, 5]]]);
    two.manifest.started_unix_ns = 5;
    let parts = [partial(dir.path(), "a", &one).unwrap(), partial(dir.path(), "b", &two).unwrap()];
    let report = |parts: Vec<Partial>| merge(parts).unwrap().report(None, &OPTIONS, &wanted(None)).unwrap();
    let found = report(parts.to_vec());
    assert_eq!(found, report(parts.iter().rev().cloned().collect()));
    // Unions 3, 2 and 4; the second request's first window has none before it.
    assert_eq!((found.totals.requests, found.totals.verify_steps, found.by_request.len()), (2, 3, 2));
    assert_eq!(found.layers[0].stats.union.as_ref().unwrap().histogram, [0, 0, 1, 1, 1]);
    assert_eq!(found.layers[0].stats.step_reuse, Some(1.0));
    let mut tokens: Vec<f64> = found.by_request.iter().filter_map(|r| r.tokens_per_step).collect();
    tokens.sort_by(f64::total_cmp);
    assert_eq!(tokens, [1.5, 2.0]);
    assert!(found.warnings.iter().any(|w| w.code == "merged_partials" && w.message.contains("2 partial reports")));
    assert_eq!(found.run.name, "memory, memory");
}

/// A trace whose requests `ids` each emit ten tokens or more, begun at a time of its own.
fn run_of(ids: &[u32], started: i64) -> Memory {
    let mut trace = Memory::new(&[1], 6, 2);
    for &id in ids {
        (0..8).for_each(|_| trace.verify(id, 1, &[vec![vec![0, 1], vec![0, 2]]]));
    }
    trace.manifest.started_unix_ns = started;
    trace
}

#[test]
fn requests_that_repeat_are_counted_and_their_files_named() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, ids: &[u32], started| partial(dir.path(), name, &run_of(ids, started)).unwrap();
    let warnings = |parts: Vec<Partial>| merge(parts).unwrap().manifest.warnings;
    let told = |warnings: &[Warning]| warnings.iter().find(|w| w.code == "repeated_requests").map(|w| w.message.clone());
    // Prompts are unknown here, and the fingerprints of tokens and windows are those of the ids.
    let message = told(&warnings(vec![of("a", &[0, 1, 2], 1), of("b", &[1, 2, 3], 2), of("c", &[7], 3)])).unwrap();
    assert!(message.starts_with("2 of 7 requests repeat others") && message.contains("too narrow"), "{message}");
    let named = |name: &str| message.contains(&dir.path().join(name).display().to_string());
    assert!(named("a") && named("b") && !named("c"), "{message}");
    assert_eq!(told(&warnings(vec![of("a", &[0, 1], 1), of("b", &[2, 3], 2)])), None);
    // Few tokens are the same by chance, and placeholders of unknown ones always.
    let mut few = run_of(&[], 1);
    few.verify(0, 1, &[vec![vec![0, 1], vec![0, 2]]]);
    let mut other = few.clone();
    other.manifest.started_unix_ns = 2;
    let parts = |a: &Memory, b: &Memory| vec![partial(dir.path(), "a", a).unwrap(), partial(dir.path(), "b", b).unwrap()];
    assert_eq!(told(&warnings(parts(&few, &other))), None);
    let mut unknown = parts(&run_of(&[0], 1), &run_of(&[0], 2));
    let hidden = |tokens: &[u32]| {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let hash: [u8; 32] = sha2::Sha256::digest(bytes).into();
        hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let emitted: usize = unknown[0].steps.iter().map(|s| s.emitted as usize).sum();
    for part in &mut unknown {
        part.identities.get_mut(&0).unwrap().output = hidden(&vec![crate::trace::event::UNKNOWN_TOKEN; emitted]);
    }
    assert_eq!(told(&warnings(unknown.clone())), None);
    unknown.iter_mut().for_each(|part| part.identities.get_mut(&0).unwrap().output = hidden(&vec![5; emitted]));
    assert!(told(&warnings(unknown)).is_some());
}

#[test]
fn notes_with_numbers_stand_by_the_names_of_their_parts() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, id: u32, notes: &[(&str, &str)]| {
        let mut trace = run_of(&[id], i64::from(id));
        trace.manifest.warnings = notes.iter().map(|(code, message)| Warning::new(code, *message)).collect();
        let mut part = partial(dir.path(), name, &trace).unwrap();
        part.name = name.to_owned();
        part
    };
    let (same, counted) = (("no_times", "there are no times"), ("not_whole", "1 pass is not whole"));
    let parts = vec![of("a", 1, &[same, counted]), of("b", 2, &[same, counted]), of("c", 3, &[same, ("own", "only this one")])];
    let found = merge(parts).unwrap().manifest.warnings;
    let texts: Vec<_> = found.iter().filter(|w| w.code != "merged_partials").map(|w| (w.code.as_str(), w.message.as_str())).collect();
    let want = [same, ("not_whole", "a: 1 pass is not whole"), ("not_whole", "b: 1 pass is not whole"), ("own", "c: only this one")];
    assert_eq!(texts, want);
    // Nothing is said to differ that is the same.
    let merged = found.iter().find(|w| w.code == "merged_partials").unwrap();
    assert!(!merged.message.contains("differ in") && !merged.message.contains("token_hash"), "{}", merged.message);
    // Many parts do not make as many notes.
    let many: Vec<Partial> = (0..9).map(|n| of(&n.to_string(), n, &[counted])).collect();
    let found = merge(many).unwrap().manifest.warnings;
    let notes: Vec<_> = found.iter().filter(|w| w.code == "not_whole").collect();
    assert_eq!(notes.len(), 3);
    assert!(notes[2].message.starts_with("2: 1 pass") && notes[2].message.contains("6 more such notes"), "{notes:?}");
}

#[test]
fn what_cannot_be_put_together_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut trace = Memory::new(&[1], 6, 2);
    trace.verify(0, 0, &[vec![vec![0, 1], vec![0, 2]]]);
    let first = partial(dir.path(), "first", &trace).unwrap();
    let error = |parts: Vec<Partial>| merge(parts).unwrap_err().to_string();
    assert!(error(vec![first.clone(), first.clone()]).contains("first are the same partial report"));
    assert!(error(Vec::new()).contains("no partial report"));
    let other = |change: &dyn Fn(&mut Memory)| {
        let mut trace = trace.clone();
        change(&mut trace);
        error(vec![first.clone(), partial(dir.path(), "other", &trace).unwrap()])
    };
    assert!(other(&|t| t.manifest.model.experts = 7).contains("numbers of experts"));
    assert!(other(&|t| t.manifest.model.moe_layers = vec![0, 1]).contains("routed layers"));
    assert!(other(&|t| t.manifest.model.name = "big".into()).contains("different models (`model.name`)"));
    let routing = other(&|t| t.manifest.model.routing = Some("zipf:1.2".into()));
    assert!(
        routing.contains("(`model.routing`)") && routing.contains("first has none") && routing.contains("other has zipf:1.2"),
        "{routing}"
    );
    assert!(other(&|t| t.manifest.drafter.bytes_per_draft = Some(7)).contains("drafters (`drafter.bytes_per_draft`)"));
    assert!(other(&|t| t.manifest.drafter.draft_len = Some(2)).contains("draft lengths"));
    let spaces = other(&|t| t.manifest.id_space = IdSpace::Physical);
    assert!(spaces.contains("id spaces") && spaces.contains("first has") && spaces.contains("other has"), "{spaces}");
    assert!(other(&|t| t.manifest.window_completeness = crate::trace::manifest::WindowCompleteness::AcceptedOnly).contains("completeness"));
    assert!(other(&|t| t.manifest.device.name = "x".into()).contains("devices"));
    assert!(other(&|t| t.manifest.passes_known = !t.manifest.passes_known).contains("shared passes"));
    // Of a partial there are no ranks.
    let parallel = crate::analysis::Parallel { ranks: 2, placement: crate::analysis::parallel::placement::Choice::Contiguous };
    let ranks = Wanted { parallel: Some(parallel), ..Wanted::default() };
    assert!(first.report(None, &OPTIONS, &ranks).unwrap_err().to_string().contains("need the routes"));
}

#[test]
fn contradictions_name_the_entry() {
    let dir = tempfile::tempdir().unwrap();
    let mut trace = Memory::new(&[1], 6, 2);
    trace.verify(0, 0, &[vec![vec![0, 1], vec![0, 2]]]);
    partial(dir.path(), "p", &trace).unwrap();
    let path = dir.path().join("p");
    let file = PartialFile::open(&path).unwrap();
    let mut entries: Vec<Entry> = Vec::new();
    file.each(|entry| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    let error = |change: &dyn Fn(&mut Entry)| {
        let mut entries = entries.clone();
        entries.iter_mut().for_each(change);
        let changed = dir.path().join("changed");
        std::fs::write(&changed, encode("p", file.manifest(), entries.into_iter()).unwrap()).unwrap();
        Partial::read(&changed).unwrap_err().to_string()
    };
    let only = |kind: EntryKind, change: fn(&mut Entry)| {
        move |entry: &mut Entry| {
            if entry.kind == kind {
                change(entry)
            }
        }
    };
    assert!(error(&only(EntryKind::Added, |e| e.step_id = Some(8))).ends_with("added: there is no step 8"));
    assert!(error(&only(EntryKind::Load, |e| e.layer = Some(3))).ends_with("layer 3 is no routed layer of the target"));
    assert!(error(&only(EntryKind::Sums, |e| e.request_id = Some(3))).ends_with("request 3 has no step"));
    assert!(
        error(&only(EntryKind::Window, |e| if e.name == "union_histogram" {
            e.values[0] = 1
        }))
        .contains("windows of 2 rows in layer 1: `union_histogram` comes to 2, the others say 1")
    );
    assert!(error(&only(EntryKind::Window, |e| e.values[0] = -1)).ends_with("-1 is no count"));
    assert!(error(&only(EntryKind::Step, |e| e.values[0] = 9)).contains("9 drafts accepted of 2 rows"));
    assert!(error(&only(EntryKind::Step, |e| e.values[3] = -1)).contains("a time of -1 ns"));
    assert!(error(&only(EntryKind::Step, |e| e.values[1] = 7)).contains("7 emitted tokens in a verify step"));
    let wasted = error(&only(EntryKind::Window, |e| {
        if e.name == "wasted" {
            e.values[0] = 50
        }
    }));
    assert!(wasted.contains("changed: ") && wasted.contains("layer 1: `wasted_by_row` comes to 1, the others say 50"), "{wasted}");
    // In the sums of the requests alone, too.
    assert!(error(&only(EntryKind::Sums, |e| e.values[2] = 4)).contains("a request has 4 wasted experts in unions of 3 in all"));
}

/// Whichever count is changed, by however little, it does not agree with the others any more.
#[test]
fn a_changed_number_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let mut trace = Memory::new(&[1, 3], 6, 2);
    trace.verify(0, 0, &[vec![vec![0, 1], vec![0, 2]], vec![vec![0, 1], vec![4, 2]]]);
    trace.verify(1, 1, &[vec![vec![0, 5], vec![0, 2], vec![1, 2]], vec![vec![0, 1], vec![4, 2], vec![3, 4]]]);
    trace.verify(0, 1, &[vec![vec![0, 3], vec![0, 4]], vec![vec![2, 1], vec![4, 0]]]);
    partial(dir.path(), "p", &trace).unwrap();
    let path = dir.path().join("p");
    let file = PartialFile::open(&path).unwrap();
    let mut entries: Vec<Entry> = Vec::new();
    file.each(|entry| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    let (mut changed, mut kinds) = (0, std::collections::BTreeSet::new());
    for (i, entry) in entries.iter().enumerate() {
        // Single windows' reuse and gate weights are sums that nothing else in the file has.
        let counted = match entry.kind {
            EntryKind::Window => !entry.name.starts_with("reuse") && !entry.name.starts_with("coverage"),
            EntryKind::Added | EntryKind::Load | EntryKind::Sums => true,
            _ => false,
        };
        for j in (0..entry.values.len()).filter(|_| counted) {
            let mut entries = entries.clone();
            entries[i].values[j] += 1;
            std::fs::write(&path, encode("p", file.manifest(), entries.into_iter()).unwrap()).unwrap();
            let error = Partial::read(&path).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("p: "), "{error}");
            changed += 1;
            kinds.insert((entry.kind.as_str(), entry.name.clone()));
        }
    }
    assert!(changed > 100 && kinds.len() >= 11, "{changed} of {kinds:?}");
}
