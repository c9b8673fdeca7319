//! The options of an input's first byte: those with which a format's samples are read, and some with which they are not.

use specprof::import::{DataKind, ForeignModel, LayerAxis, Options};
use specprof::trace::manifest::IdSpace;

/// Reading goes on where a model's configuration is needed.
const CONFIG: &str = r#"{"num_hidden_layers":6,"first_k_dense_replace":1,"num_experts":128,"num_experts_per_tok":8}"#;

/// The options of `variant` for the importer `name`, and whether a profile is added to a trace.
pub fn of(name: &str, variant: u8) -> (Options, bool) {
    let plain = || Options { force: true, ..Options::default() };
    let model = || ForeignModel::parse(CONFIG.as_bytes()).ok();
    let moe_only = || Options { layers: LayerAxis::MoeOnly, first_dense: Some(1), ..plain() };
    let all = || Options { layers: LayerAxis::All, ..plain() };
    let choices: Vec<Options> = match name {
        "vllm" | "sglang" => vec![
            plain(),
            Options { experts: Some(64), ..plain() },
            Options { layers: LayerAxis::Count(6), k: Some(8), experts: Some(128), ..plain() },
            Options { model: model(), keep_padding: true, ..plain() },
            Options { prompt_tokens: Some(7), ..all() },
            Options { layers: LayerAxis::Count(6), k: Some(4), packed_weights: true, ..plain() },
        ],
        "torch" => vec![
            plain(),
            Options { layers: LayerAxis::List(vec![1, 2]), ..plain() },
            all(),
            Options { prompt_tokens: Some(3), keep_padding: true, ..moe_only() },
            Options { model: model(), ..plain() },
        ],
        "npy" => vec![
            plain(),
            all(),
            Options { prompt_tokens: Some(7), ..moe_only() },
            Options { axes: Some("wtlk".into()), ..all() },
            Options { kind: Some(DataKind::Counts), ..all() },
            Options { kind: Some(DataKind::Counts), axes: Some("tle".into()), ..all() },
            Options { packed_weights: true, keep_padding: true, ..all() },
            Options { axes: Some("ltk".into()), experts: Some(32), ..all() },
        ],
        "router-log" => vec![
            plain(),
            Options { experts: Some(16), ..plain() },
            Options { experts: Some(16), keep_padding: true, draft_len: Some(2), ..plain() },
            Options { layers: LayerAxis::Count(6), id_space: Some(IdSpace::Physical), ..plain() },
        ],
        "llamacpp" => vec![
            plain(),
            Options { k: Some(4), experts: Some(32), ..plain() },
            Options { k: Some(4), prompt_tokens: Some(6), ..plain() },
        ],
        "imatrix" => vec![plain(), Options { k: Some(2), ..plain() }, Options { model: model(), ..plain() }],
        "trtllm" => vec![plain(), Options { k: Some(2), ..plain() }, Options { keep_padding: true, ..plain() }],
        "nsys" | "kineto" => vec![plain(), plain(), Options { device: Some(1), ..plain() }],
        _ => vec![plain(), Options { id_space: Some(IdSpace::Physical), ..plain() }],
    };
    let at = usize::from(variant) % choices.len();
    let adds = matches!(name, "nsys" | "kineto") && at == 1;
    (choices.into_iter().nth(at).unwrap_or_default(), adds)
}

/// Those of SGLang's recorder.
pub fn of_recorder(variant: u8) -> Options {
    let plain = Options { force: true, ..Options::default() };
    match variant % 5 {
        1 => Options { id_space: Some(IdSpace::Logical), ..plain },
        2 => Options { draft_len: Some(2), keep_padding: true, ..plain },
        3 => Options { model: ForeignModel::parse(CONFIG.as_bytes()).ok(), ..plain },
        4 => Options { k: Some(2), layers: LayerAxis::All, ..plain },
        _ => plain,
    }
}
