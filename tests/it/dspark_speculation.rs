//! Speculation with a DSpark drafter: exactness at every cut, what is recorded, rollback, sampling.

use crate::dspark::{SPEC, changed, drafter_dir};
use crate::safetensors_files::{read_all, write_checkpoint};
use crate::speculation::{Keep, chi_square};
use proptest::prelude::*;
use serde_json::json;
use specprof::engine::clock::Clock;
use specprof::engine::drafter::{self, DraftKind, Drafter, Drafts};
use specprof::engine::dspark::{Dspark, DsparkCheckpoint};
use specprof::engine::route_tap::RouteTap;
use specprof::engine::sampling::{Sampler, Sampling};
use specprof::engine::{Checkpoint, LogitRows, NoTap, Session};
use specprof::record::{Options, Plan, Prompt, PromptSource, Totals, run};
use specprof::trace::{Phase, StepEvent, Trace, validate};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

static DRAFTER: LazyLock<DsparkCheckpoint> = LazyLock::new(|| DsparkCheckpoint::open(&drafter_dir("correlated"), &SPEC.config).unwrap());
/// The same weights with a block of eight, whose windows have nine rows.
static WIDE: LazyLock<DsparkCheckpoint> = LazyLock::new(|| {
    let dir = changed("correlated", |config, _| config["block_size"] = json!(8));
    DsparkCheckpoint::open(dir.path(), &SPEC.config).unwrap()
});

/// Prompts of tokens that the drafter's tables were made of, and of others.
fn prompts() -> Vec<Prompt> {
    let text = std::fs::read(crate::dspark::goldens().join("dspark/correlated/golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let committed = crate::speculation::ids(&golden["committed"]);
    let other = |n: u32| (0..9 + n).map(|i| (i * 37 + n * 11) % 300).collect();
    [committed[..40].to_vec(), committed[20..61].to_vec(), other(0), other(1), other(5)]
        .into_iter()
        .map(|tokens| Prompt {
            source: PromptSource::Tokens(tokens),
            id: String::new(),
            max_new_tokens: None,
            tags: "{}".into(),
            origin: "test".into(),
        })
        .collect()
}

fn generate(drafter: Option<&DsparkCheckpoint>, prompts: &[Prompt], options: Options) -> (Keep, Totals) {
    let plan = Plan::with_drafter(&SPEC, drafter, prompts, options).unwrap();
    let mut keep = Keep::default();
    let totals = run(&plan, Clock::start(), &mut keep, &AtomicBool::new(false), &mut |_| {}).unwrap();
    (keep, totals)
}

fn greedy(draft: DraftKind, draft_len: usize, min_survival: f64) -> Options {
    Options { draft, draft_len, min_survival, max_new_tokens: 40, ignore_eos: true, ..Options::default() }
}

/// Drafts that survive a threshold, the first of them in any case.
fn surviving(confidences: &[f32], min_survival: f64) -> usize {
    let mut survival = 1.0;
    let held = confidences.iter().take_while(|&&c| {
        survival *= f64::from(c);
        survival >= min_survival
    });
    held.count().max(1)
}

#[test]
fn greedy_speculation_is_plain_decoding_at_every_cut() {
    let prompts = prompts();
    let (plain, _) = generate(None, &prompts, greedy(DraftKind::None, 3, 0.0));
    let mut cut_windows = 0;
    for drafter in [&*DRAFTER, &*WIDE] {
        let most = drafter.config.drafts();
        let (whole, _) = generate(Some(drafter), &prompts, greedy(DraftKind::Dspark, most, 0.0));
        let at = |step: &StepEvent| (step.request_id, step.context_len);
        let whole_windows: BTreeMap<_, _> = whole.steps.iter().filter(|s| s.phase == Phase::Verify).map(|s| (at(s), s)).collect();
        for draft_len in [1, 2, 3, 4, 8].into_iter().filter(|&n| n <= most && (most == 4 || n != 2)) {
            for min_survival in [0.0, 0.05, 0.3, 0.8, 1.0] {
                let (keep, totals) = generate(Some(drafter), &prompts, greedy(DraftKind::Dspark, draft_len, min_survival));
                let name = format!("{draft_len} of {most} drafts, threshold {min_survival}");
                assert_eq!(keep.hash(), plain.hash(), "{name}");
                assert!(totals.accepted > 0 && totals.decode_steps == 0 && totals.short_windows == 0, "{name}: {totals:?}");
                for step in keep.steps.iter().filter(|s| s.phase == Phase::Verify) {
                    let drafts = step.rows() - 1;
                    assert!((1..=draft_len).contains(&drafts) && usize::from(step.accepted) <= drafts, "{name}");
                    let (probs, confidences) = (step.draft_probs.as_ref().unwrap(), step.draft_confidences.as_ref().unwrap());
                    assert_eq!((probs.len(), confidences.len()), (drafts, drafts), "{name}");
                    assert!(probs.iter().chain(confidences).all(|p| (0.0..=1.0).contains(p)));
                    // Where the uncut run has a window at the same place, this one is the beginning of it, cut where the rule says.
                    if let Some(whole) = whole_windows.get(&at(step)) {
                        let all = whole.draft_confidences.as_ref().unwrap();
                        assert_eq!(drafts, surviving(&all[..draft_len], min_survival), "{name}");
                        assert_eq!(step.input_tokens, whole.input_tokens[..=drafts], "{name}");
                        assert_eq!(confidences, &all[..drafts], "{name}");
                        cut_windows += usize::from(drafts < draft_len);
                    }
                }
            }
        }
    }
    assert!(cut_windows > 300, "only {cut_windows} windows were cut");
    let widest = generate(Some(&WIDE), &prompts, greedy(DraftKind::Dspark, 8, 0.0)).0;
    assert!(widest.steps.iter().any(|s| s.rows() == 9));
}

#[test]
fn baseline_steps_and_chunks_change_nothing() {
    let prompts = prompts();
    let (whole, _) = generate(Some(&DRAFTER), &prompts, greedy(DraftKind::Dspark, 4, 0.0));
    let (chunked, _) = generate(Some(&DRAFTER), &prompts, Options { prefill_chunk: 3, ..greedy(DraftKind::Dspark, 4, 0.0) });
    let windows = |keep: &Keep| -> Vec<(Vec<u32>, Vec<f32>)> {
        let verify = keep.steps.iter().filter(|s| s.phase == Phase::Verify);
        verify.map(|s| (s.input_tokens.clone(), s.draft_confidences.clone().unwrap())).collect()
    };
    assert_eq!(windows(&chunked), windows(&whole));
    let (with_baseline, totals) = generate(Some(&DRAFTER), &prompts, Options { baseline_steps: 15, ..greedy(DraftKind::Dspark, 4, 0.3) });
    assert_eq!((with_baseline.hash(), totals.decode_steps), (whole.hash(), 15));
}

#[test]
fn windows_shrink_at_the_end_of_the_context_only() {
    let checkpoint = crate::dspark::goldens().join("spec/checkpoint");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(checkpoint.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(50);
    let dir = write_checkpoint(&config, &read_all(&checkpoint));
    let target = Checkpoint::open(dir.path()).unwrap();
    let drafter = DsparkCheckpoint::open(&drafter_dir("correlated"), &target.config).unwrap();
    let tokens = |draft, drafter| {
        // The last of the 11 new tokens is never put into the cache.
        let options = Options { max_new_tokens: 11, ..greedy(draft, 4, 0.0) };
        let plan = Plan::with_drafter(&target, drafter, &prompts()[..1], options).unwrap();
        let mut keep = Keep::default();
        let totals = run(&plan, Clock::start(), &mut keep, &AtomicBool::new(false), &mut |_| {}).unwrap();
        (keep, totals)
    };
    let ((plain, _), (drafted, totals)) = (tokens(DraftKind::None, None), tokens(DraftKind::Dspark, Some(&drafter)));
    assert_eq!(drafted.hash(), plain.hash());
    assert!(totals.short_windows > 0);
    for step in drafted.steps.iter().filter(|s| s.phase == Phase::Verify) {
        assert_eq!(step.rows() as u32, 5.min(50 - step.context_len));
    }
}

#[test]
fn what_the_drafter_cannot_do_is_refused() {
    let refused = |drafter: Option<&DsparkCheckpoint>, options: Options| {
        let error = Plan::with_drafter(&SPEC, drafter, &prompts(), options).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1);
        error
    };
    assert!(refused(None, greedy(DraftKind::Dspark, 4, 0.0)).contains("--draft-model"));
    assert!(refused(Some(&DRAFTER), greedy(DraftKind::Dspark, 5, 0.0)).contains("more than the 4 drafts"));
    assert!(refused(Some(&DRAFTER), greedy(DraftKind::Dspark, 4, f64::NAN)).contains("not in 0...1"));
    assert!(refused(None, greedy(DraftKind::Ngram, 3, 0.5)).contains("--draft-confidence"));
    let blind = changed("correlated", |config, _| config["enable_confidence_head"] = json!(false));
    let blind = DsparkCheckpoint::open(blind.path(), &SPEC.config).unwrap();
    assert!(refused(Some(&blind), greedy(DraftKind::Dspark, 4, 0.5)).contains("no confidence head"));
    let (keep, _) = generate(Some(&blind), &prompts()[..1], greedy(DraftKind::Dspark, 4, 0.0));
    assert!(keep.steps.iter().all(|s| s.draft_confidences.is_none()), "what is not known is not recorded");
    let short = changed("correlated", |config, _| config["max_position_embeddings"] = json!(50));
    let short = DsparkCheckpoint::open(short.path(), &SPEC.config).unwrap();
    let error = refused(Some(&short), greedy(DraftKind::Dspark, 4, 0.0));
    assert!(error.contains("drafter's context of 50"), "{error}");
}

#[test]
fn sampled_speculation_repeats_with_its_seed() {
    let with = |seed| {
        let sampling = Sampling { temperature: 0.8, top_p: 0.95, top_k: 20, seed };
        generate(Some(&DRAFTER), &prompts(), Options { sampling, ..greedy(DraftKind::Dspark, 4, 0.2) }).0.hash()
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}

/// Cutting windows by confidence must not bend what is sampled: whether a draft is verified is decided before it is drawn.
#[test]
fn sampled_speculation_follows_the_plain_distribution_cut_or_not() {
    const RUNS: usize = 800;
    let many = vec![prompts().remove(3); RUNS];
    let triples = |drafter, draft, seed, min_survival| {
        let sampling = Sampling { temperature: 1.5, top_p: 1.0, top_k: 4, seed };
        let (keep, totals) = generate(drafter, &many, Options { sampling, max_new_tokens: 3, ..greedy(draft, 2, min_survival) });
        let mut tokens = vec![Vec::new(); RUNS];
        keep.steps.iter().for_each(|s| tokens[s.request_id as usize].extend_from_slice(&s.emitted_tokens));
        let lengths: Vec<usize> = keep.steps.iter().filter(|s| s.phase == Phase::Verify).map(StepEvent::rows).collect();
        (tokens, totals, lengths)
    };
    let (plain, ..) = triples(None, DraftKind::None, 1, 0.0);
    let (whole, totals, _) = triples(Some(&*DRAFTER), DraftKind::Dspark, 2, 0.0);
    assert!(totals.accepted > 0 && totals.accepted < 2 * totals.verify_steps, "drafts are all alike: {totals:?}");
    chi_square(&plain, &whole);
    // A threshold that cuts some windows and not others.
    let found = [0.05, 0.1, 0.2, 0.3, 0.5].into_iter().find_map(|threshold| {
        let (tokens, _, lengths) = triples(Some(&*DRAFTER), DraftKind::Dspark, 3, threshold);
        let cut = lengths.iter().filter(|&&rows| rows == 2).count();
        (cut * 10 > lengths.len() && cut * 10 < lengths.len() * 9).then_some(tokens)
    });
    chi_square(&plain, &found.expect("no threshold cuts a part of the windows"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Windows of wrong drafts, random numbers of kept rows, proposals in between: target and drafter end up as if only the kept
    /// tokens had ever been.
    #[test]
    fn forced_rejections_leave_no_trace(windows in prop::collection::vec((1usize..10, 0usize..10, any::<bool>()), 1..12), seed in 0u32..1000) {
        let (config, weights) = (&SPEC.config, &SPEC.weights);
        let text: Vec<u32> = (0..140u32).map(|i| (i * i * 7 + seed) % 300).collect();
        let taps = &WIDE.config.taps;
        let mut session = Session::new(config, weights);
        let mut drafter = drafter::external(&WIDE, 0.0, config, weights);
        let mut tap = RouteTap::new(config.experts_per_token, false, false).tapping(taps, config.hidden);
        let width = taps.len() * config.hidden;
        session.forward(&text[..10], LogitRows::None, &mut tap).unwrap();
        session.commit(10);
        drafter.observe_taps(tap.tapped_rows()).unwrap();
        for (n, (rows, kept, proposing)) in windows.into_iter().enumerate() {
            let kept = kept.min(rows - 1) + 1;
            let at = session.len();
            if proposing {
                propose(&mut *drafter, &text[..=at]);
            }
            let mut window = text[at..at + rows].to_vec();
            for (row, token) in window.iter_mut().enumerate().skip(kept) {
                *token = (*token + 1 + seed + (n * 7 + row) as u32) % 300;
            }
            session.forward(&window, LogitRows::All, &mut tap).unwrap();
            session.commit(kept);
            drafter.observe_taps(&tap.tapped_rows()[..kept * width]).unwrap();
        }
        let length = session.len();
        let mut fresh = Session::new(config, weights);
        let mut fresh_drafter = drafter::external(&WIDE, 0.0, config, weights);
        fresh.forward(&text[..length], LogitRows::None, &mut tap).unwrap();
        fresh.commit(length);
        fresh_drafter.observe_taps(tap.tapped_rows()).unwrap();
        prop_assert_eq!(propose(&mut *drafter, &text[..=length]), propose(&mut *fresh_drafter, &text[..=length]));
        let next = &text[length..length + 3];
        let bits = |session: &mut Session<'_>| session.forward(next, LogitRows::All, &mut NoTap).unwrap().logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&mut session), bits(&mut fresh));
    }

    /// The context itself, bit for bit, however it was cut, and with blocks in between.
    #[test]
    fn a_context_does_not_depend_on_its_cuts(cuts in prop::collection::vec((1usize..7, any::<bool>()), 1..10)) {
        let (config, weights) = (&SPEC.config, &SPEC.weights);
        let tokens: Vec<u32> = (0..40u32).map(|i| i * 53 % 300).collect();
        let mut tap = RouteTap::new(config.experts_per_token, false, false).tapping(&DRAFTER.config.taps, config.hidden);
        Session::new(config, weights).forward(&tokens, LogitRows::None, &mut tap).unwrap();
        let width = DRAFTER.config.taps.len() * config.hidden;
        let (mut whole, mut cut) = (Dspark::new(&DRAFTER, config, weights), Dspark::new(&DRAFTER, config, weights));
        for (rows, block) in cuts {
            let at = cut.len();
            let to = (at + rows).min(tokens.len());
            cut.inject(&tap.tapped_rows()[at * width..to * width], &mut NoTap).unwrap();
            if block {
                cut.block(tokens[to - 1], 0..4, &mut NoTap).unwrap();
            }
        }
        whole.inject(&tap.tapped_rows()[..cut.len() * width], &mut NoTap).unwrap();
        let bits = |of: &[f32]| of.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for layer in 0..DRAFTER.config.layers {
            let ((a, b), (c, d)) = (whole.context(layer).unwrap(), cut.context(layer).unwrap());
            prop_assert_eq!((bits(a), bits(b)), (bits(c), bits(d)));
        }
        let block = |d: &mut Dspark<'_>| bits(d.block(7, 0..4, &mut NoTap).unwrap().logits);
        prop_assert_eq!(block(&mut whole), block(&mut cut));
    }
}

/// Eight sampled drafts with their whole distributions, bit for bit comparable.
fn propose(drafter: &mut dyn Drafter, history: &[u32]) -> Drafts {
    let mut sampler = Sampler::new(Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, seed: 9 }, 0);
    let mut tap = RouteTap::new(SPEC.config.experts_per_token, true, false);
    drafter.propose(history, 8, &mut sampler, &mut tap).unwrap()
}

/// From the command line to the trace and its checks.
#[test]
fn a_recording_has_probability_and_confidence_of_every_draft() {
    let parent = tempfile::tempdir().unwrap();
    let prompts = parent.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"token_ids\": [1, 2, 3, 4, 5, 6, 7]}\n{\"token_ids\": [9, 8, 7]}\n").unwrap();
    let target = crate::dspark::goldens().join("spec/checkpoint");
    let record = |out: &Path, more: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("specprof").unwrap();
        command.args(["record", "--draft", "dspark", "--max-new-tokens", "30", "--ignore-eos", "-q", "--model"]).arg(&target);
        command.arg("--draft-model").arg(drafter_dir("correlated")).arg("--prompts").arg(&prompts).arg("--out").arg(out).args(more);
        command.assert().success();
        Trace::open(out).unwrap()
    };
    let whole = record(&parent.path().join("whole"), &[]);
    let cut = record(&parent.path().join("cut"), &["--draft-len", "3", "--draft-confidence", "0.3"]);
    assert_eq!(whole.manifest().token_hash, cut.manifest().token_hash);
    let drafters = [&whole, &cut].map(|trace| trace.manifest().drafter.clone());
    assert_eq!(
        drafters.each_ref().map(|d| (d.kind.as_str(), d.draft_len, d.bytes_per_draft)),
        [("dspark", Some(4), None), ("dspark", Some(3), None)]
    );
    let external = drafters.map(|d| d.external.unwrap());
    assert_eq!(external.each_ref().map(|e| (e.block_size, e.min_survival)), [(4, None), (4, Some(0.3))]);
    assert_eq!((external[0].name.as_str(), external[0].identity.as_str()), ("checkpoint", DRAFTER.identity.as_str()));
    for trace in [&whole, &cut] {
        assert_eq!(validate(trace).unwrap().failed(), 0);
        let steps = trace.steps_with_details().unwrap();
        for i in 0..steps.len() {
            let drafts = (steps.phase[i] == Phase::Verify).then(|| usize::from(steps.rows[i]) - 1);
            let lens = [&steps.draft_probs[i], &steps.draft_confidences[i]].map(|list| list.as_ref().map(Vec::len));
            assert_eq!(lens, [drafts; 2], "step {i}");
        }
    }
    assert!(cut.steps().unwrap().rows.contains(&2));
    // Drafting has its times, and no time of it counts as the target's.
    let kernels = whole.kernels().unwrap();
    assert!(kernels.iter().any(|(_, k)| k.name == "cpu.draft.commit") && kernels.iter().any(|(_, k)| k.name == "cpu.draft.head"));
}

/// A confidence head that sees the block's row alone.
#[test]
fn confidence_without_markov_features_is_the_row_s() {
    let dir = changed("correlated", |config, tensors| {
        config["confidence_head_with_markov"] = json!(false);
        let proj = tensors.get_mut("confidence_head.proj.weight").unwrap();
        proj.0 = vec![1, 64];
        proj.1.truncate(128);
    });
    let drafter = DsparkCheckpoint::open(dir.path(), &SPEC.config).unwrap();
    let head = drafter.weights.confidence.as_ref().unwrap();
    let mut dspark = Dspark::new(&drafter, &SPEC.config, &SPEC.weights);
    let hidden = dspark.block(5, 0..4, &mut NoTap).unwrap().hidden.to_vec();
    for (draft, row) in hidden.chunks(64).enumerate() {
        let want: f64 = row.iter().zip(&head.proj).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() + f64::from(head.bias);
        for previous in [5, 6] {
            let got = dspark.correct(draft, draft, previous).unwrap().confidence_logit.unwrap();
            assert!((f64::from(got) - want).abs() < 1e-4, "draft {draft}: {got} {want}");
        }
    }
    let error = dspark.correct(0, 0, 320).unwrap_err().to_string();
    assert!(error.contains("320"), "{error}");
}

/// A grid with a drafter of its own: every recording has the same tokens, and the error of a length beyond the block says so.
#[test]
fn a_sweep_takes_the_drafter() {
    let parent = tempfile::tempdir().unwrap();
    let prompts = parent.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"token_ids\": [1, 2, 3, 4, 5, 6, 7]}\n").unwrap();
    let sweep = |lengths: &str, out: &Path| {
        let mut command = assert_cmd::Command::cargo_bin("specprof").unwrap();
        command.args([
            "sweep",
            "--draft",
            "dspark,none",
            "--max-new-tokens",
            "16",
            "--ignore-eos",
            "-q",
            "--json",
            "--draft-confidence",
            "0.3",
        ]);
        command.args(["--draft-len", lengths, "--model"]).arg(crate::dspark::goldens().join("spec/checkpoint"));
        command.arg("--draft-model").arg(drafter_dir("correlated")).arg("--prompts").arg(&prompts).arg("--out").arg(out);
        command.output().unwrap()
    };
    let out = parent.path().join("sweep");
    assert!(sweep("1,4", &out).status.success());
    let hash = |cell: &str| Trace::open(&out.join(cell)).unwrap().manifest().token_hash.clone().unwrap();
    assert_eq!([hash("dspark-1-t0"), hash("dspark-4-t0")], [hash("none-0-t0"), hash("none-0-t0")]);
    let beyond = sweep("5", &parent.path().join("beyond"));
    let stderr = String::from_utf8(beyond.stderr).unwrap();
    assert!(beyond.status.code() == Some(2) && stderr.contains("give 4 or less"), "{stderr}");
}
