//! Properties of whole sessions on the built-in model: bits do not depend on cuts, rollbacks or threads.

use super::session::{LogitRows, Session};
use super::tap::{ForwardTap, NoTap};
use super::weights::{Attention, MlaQuery, Mlp};
use super::{Checkpoint, EngineError, Mtp};
use crate::engine::matrix::Matrix;
use crate::trace::Module;
use proptest::prelude::*;
use std::path::Path;
use std::sync::LazyLock;

static MODEL: LazyLock<Checkpoint> = LazyLock::new(load);

fn load() -> Checkpoint {
    Checkpoint::resolve(Path::new("demo")).expect("the built-in model")
}

fn session() -> Session<'static> {
    Session::new(&MODEL.config, &MODEL.weights)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Everything that a session remembers.
fn state(session: &Session<'_>) -> Vec<Vec<u32>> {
    let layers = 0..MODEL.config.layers;
    layers
        .flat_map(|l| [session.kda_state(l), session.conv_state(l), session.mla_cache(l)])
        .map(|part| part.map(bits).unwrap_or_default())
        .collect()
}

/// Collects routes by row: `(layer, ids, weights)`.
#[derive(Default)]
struct Routes(Vec<Vec<(usize, Vec<u16>, Vec<u32>)>>);

impl ForwardTap for Routes {
    fn wants_weights(&self) -> bool {
        true
    }

    fn routed(&mut self, module: Module, layer: usize, ids: &[u16], weights: &[f32]) {
        let k = MODEL.config.experts_per_token;
        assert_eq!((ids.len(), module == Module::Draft), (weights.len(), layer == MODEL.config.layers));
        self.0.resize(self.0.len().max(ids.len() / k), Vec::new());
        for (row, (ids, weights)) in self.0.iter_mut().zip(ids.chunks(k).zip(weights.chunks(k))) {
            row.push((layer, ids.to_vec(), bits(weights)));
        }
    }
}

/// A pass: how many of the timeline's tokens, tokens that will be rejected, and whether the pass is cut in two.
type Step = (usize, Vec<u32>, bool);

fn timeline() -> impl Strategy<Value = (Vec<u32>, Vec<Step>)> {
    let step = (1usize..9, prop::collection::vec(0u32..2041, 0..5), any::<bool>());
    (prop::collection::vec(0u32..2041, 1..40), prop::collection::vec(step, 40))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_cuts_and_rejected_rows_give_the_bits_of_one_pass((tokens, steps) in timeline()) {
        let mut whole = session();
        let mut routes = Routes::default();
        let forward = whole.forward(&tokens, LogitRows::All, &mut routes).unwrap();
        let want: Vec<_> = (0..tokens.len()).map(|n| (bits(forward.logits_row(n)), bits(forward.hidden_row(n)))).collect();
        whole.commit(usize::MAX);

        let mut cut = session();
        for (take, rejected, twice) in steps {
            let done = cut.len();
            let take = take.min(tokens.len() - done);
            if take == 0 {
                break;
            }
            let rows = [&tokens[done..done + take], &rejected].concat();
            let first = if twice { rows.len() / 2 } else { rows.len() };
            for (begin, part) in [(0, &rows[..first]), (first, &rows[first..])] {
                let mut seen = Routes::default();
                let forward = cut.forward(part, LogitRows::All, &mut seen).unwrap();
                for n in (0..part.len()).filter(|n| begin + n < take) {
                    let at = done + begin + n;
                    prop_assert_eq!(&bits(forward.logits_row(n)), &want[at].0, "logits of row {}", at);
                    prop_assert_eq!(&bits(forward.hidden_row(n)), &want[at].1, "hidden row {}", at);
                    prop_assert_eq!(&seen.0[n], &routes.0[at], "routes of row {}", at);
                }
            }
            prop_assert_eq!(cut.pending(), rows.len());
            cut.commit(take);
        }
        if cut.len() == tokens.len() {
            prop_assert_eq!(state(&cut), state(&whole));
        }
        // A pass that is rejected entirely leaves nothing, and the next step is that of the whole pass.
        cut.forward(&[5, 6, 7], LogitRows::None, &mut NoTap).unwrap();
        cut.commit(0);
        let mut again = session();
        again.prefill(&tokens[..cut.len()], 7, &mut NoTap).unwrap();
        prop_assert_eq!(state(&cut), state(&again));
    }

    #[test]
    fn draft_rows_have_the_same_bits_after_truncation((tokens, steps) in timeline()) {
        let mut target = session();
        let hidden = target.forward(&tokens, LogitRows::None, &mut NoTap).unwrap().hidden.to_vec();
        let width = MODEL.config.hidden;
        let mut whole = Mtp::new(&MODEL.config, &MODEL.weights).expect("a draft module");
        let want = whole.extend(&tokens, &hidden, LogitRows::All, &mut Routes::default()).unwrap();
        let mut cut = Mtp::new(&MODEL.config, &MODEL.weights).expect("a draft module");
        for (take, rejected, _) in steps {
            let done = cut.len();
            let take = take.min(tokens.len() - done);
            let rows = hidden[done * width..(done + take) * width].to_vec();
            let got = cut.extend(&tokens[done..done + take], &rows, LogitRows::All, &mut NoTap).unwrap();
            for n in 0..take {
                prop_assert_eq!(bits(got.logits_row(n)), bits(want.logits_row(done + n)));
                prop_assert_eq!(bits(got.hidden_row(n)), bits(want.hidden_row(done + n)));
            }
            for token in rejected {
                cut.extend(&[token], &hidden[..width], LogitRows::Last, &mut NoTap).unwrap();
            }
            cut.truncate(done + take);
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    // 96 rows pass every threshold above which work is shared out.
    let tokens: Vec<u32> = (0..96).map(|i| i * 37 % 2041).collect();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut session = session();
            let logits = bits(session.forward(&tokens, LogitRows::All, &mut NoTap).unwrap().logits);
            session.commit(50);
            (logits, state(&session))
        })
    };
    let one = run(1);
    assert_eq!(run(3), one);
    let mut plain = session();
    plain.prefill(&tokens[..50], 11, &mut NoTap).unwrap();
    assert_eq!(state(&plain), one.1);
}

#[test]
fn prefill_gives_the_last_row() {
    let tokens = [3, 14, 15, 92, 65, 35, 89];
    let mut whole = session();
    let want = bits(whole.forward(&tokens, LogitRows::Last, &mut NoTap).unwrap().logits);
    for chunk in [1, 2, 3, 7, 100] {
        let mut session = session();
        let forward = session.prefill(&tokens, chunk, &mut NoTap).unwrap();
        assert_eq!(bits(forward.logits), want);
        assert_eq!(session.len(), 7);
    }
}

#[test]
fn what_the_model_cannot_take_is_refused_and_changes_nothing() {
    let mut session = session();
    session.prefill(&[1, 2], 8, &mut NoTap).unwrap();
    let before = state(&session);
    let vocab = u32::try_from(MODEL.config.vocab).unwrap();
    let error = session.forward(&[3, vocab], LogitRows::All, &mut NoTap).unwrap_err();
    assert!(matches!(&error, EngineError::Request(text) if text.contains(&vocab.to_string())), "{error}");
    let long = vec![0; MODEL.config.max_position - 1];
    assert!(matches!(session.forward(&long, LogitRows::None, &mut NoTap), Err(EngineError::Request(_))));
    session.commit(usize::MAX);
    assert_eq!((session.len(), state(&session)), (2, before));
    let mut mtp = Mtp::new(&MODEL.config, &MODEL.weights).unwrap();
    assert!(matches!(mtp.extend(&[1], &[0.0; 3], LogitRows::All, &mut NoTap), Err(EngineError::Request(_))));
}

fn damaged(matrix: &Matrix, row: usize, value: f32) -> Matrix {
    let mut values = vec![0.0; matrix.rows() * matrix.cols()];
    for (r, out) in values.chunks_mut(matrix.cols()).enumerate() {
        matrix.decode_row(r, out);
    }
    values[row * matrix.cols() + 1] = value;
    Matrix::from_f32(matrix.rows(), matrix.cols(), &values).unwrap()
}

#[test]
fn damaged_weights_are_named_by_layer_tensor_and_row() {
    type Damage = fn(&mut Checkpoint, f32) -> &'static str;
    let cases: [Damage; 6] = [
        |m, v| {
            let Attention::Kda(w) = &mut m.weights.layers[1].attention else { panic!("layer 1 is KDA") };
            w.f = damaged(&w.f, 3, v);
            "layer 1, attention: f_proj output (model.layers.1.attention.f_proj.weight, row 3)"
        },
        |m, v| {
            let Attention::Mla(w) = &mut m.weights.layers[2].attention else { panic!("layer 2 is MLA") };
            let MlaQuery::Full(q) = &mut w.query else { panic!("a full query") };
            *q = damaged(q, 9, v);
            "layer 2, attention: query (model.layers.2.attention.q_proj.weight, row 9)"
        },
        |m, v| {
            let Mlp::Dense(w) = &mut m.weights.layers[0].mlp else { panic!("layer 0 is dense") };
            w.down = damaged(&w.down, 2, v);
            "layer 0, mlp: output (model.layers.0.mlp.down_proj.weight, row 2)"
        },
        |m, v| {
            let Mlp::Moe(w) = &mut m.weights.layers[3].mlp else { panic!("layer 3 has experts") };
            w.router = damaged(&w.router, 63, v);
            "layer 3, mlp: router logits (model.layers.3.mlp.gate.weight, row 63)"
        },
        |m, v| {
            let Mlp::Moe(w) = &mut m.weights.layers[5].mlp else { panic!("layer 5 has experts") };
            w.shared.up = damaged(&w.shared.up, 4, v);
            "layer 5, mlp: up_proj output (model.layers.5.mlp.shared_experts.up_proj.weight, row 4)"
        },
        |m, v| {
            m.weights.head = damaged(&m.weights.head, 700, v);
            "logits (lm_head.weight, row 700)"
        },
    ];
    for case in cases {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut model = load();
            let want = case(&mut model, value);
            let mut session = Session::new(&model.config, &model.weights);
            let error = session.forward(&[1, 2, 3], LogitRows::All, &mut NoTap).unwrap_err();
            assert!(error.to_string().starts_with(want), "{error}");
            assert_eq!(session.pending(), 0);
        }
    }
}

#[test]
fn a_pass_that_fails_deep_in_the_model_leaves_the_timeline_as_it_was() {
    // An expert of the last layer that some token chooses and the prefix does not.
    let (prefix, last) = ([11, 12, 13], MODEL.config.layers - 1);
    let chosen = |tokens: &[u32]| -> Vec<u16> {
        let mut routes = Routes::default();
        session().forward(tokens, LogitRows::None, &mut routes).unwrap();
        let blocks = routes.0.iter().flatten().filter(|(layer, ..)| *layer == last);
        blocks.flat_map(|(_, ids, _)| ids.clone()).collect()
    };
    let used = chosen(&[&prefix[..], &[20]].concat());
    let hit = |token: &u32| chosen(&[&prefix[..], &[*token]].concat()).into_iter().find(|e| !used.contains(e));
    let (bad, expert) = (21..200).find_map(|token| Some((token, hit(&token)?))).expect("a token with another expert");

    let mut model = load();
    let Mlp::Moe(moe) = &mut model.weights.layers[last].mlp else { panic!("the last layer has experts") };
    let expert = &mut moe.experts[usize::from(expert)];
    expert.down = damaged(&expert.down, 0, f32::NAN);
    let mut session = Session::new(&model.config, &model.weights);
    session.forward(&prefix[..2], LogitRows::None, &mut NoTap).unwrap();
    session.commit(1);
    session.forward(&prefix[1..], LogitRows::None, &mut NoTap).unwrap();
    let error = session.forward(&[bad], LogitRows::All, &mut NoTap).unwrap_err();
    assert!(matches!(error, EngineError::NotFinite { .. }), "{error}");
    assert_eq!(session.pending(), 2);
    let logits = bits(session.forward(&[20], LogitRows::All, &mut NoTap).unwrap().logits);
    session.commit(usize::MAX);

    let mut healthy = self::session();
    let want = bits(healthy.forward(&[&prefix[..], &[20]].concat(), LogitRows::Last, &mut NoTap).unwrap().logits);
    healthy.commit(usize::MAX);
    assert_eq!(logits, want);
    assert_eq!(state(&session), state(&healthy));
}
