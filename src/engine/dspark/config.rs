//! A DSpark drafter's `config.json` (ling3.md 5.2): shape, taps, block and heads.
//!
//! Writers put the same keys into `dspark_config`, into `dflash_config` or at the top level, and older ones at the top level
//! with the prefix `dspark_`. A prefixed key wins, then the order is as listed. Keys that were copied from the target
//! (`partial_rotary_factor`, `kv_lora_rank`, ...) mean nothing here and are not looked at: the whole head is rotated.

use crate::engine::config_keys::{Keys, MAX_LAYERS, MAX_WIDTH, shorten};
use crate::engine::drafter::MAX_DRAFT_LEN;
use crate::engine::{EngineError, ModelConfig};
use serde_json::Value;
use std::path::Path;

/// The architectures that are this drafter.
pub const ARCHITECTURES: [&str; 2] = ["LingDSparkModel", "Qwen3DSparkModel"];

/// Upper bound of heads x head size.
const MAX_PRODUCT: usize = 1 << 24;
/// Most layers of the target that are tapped.
const MAX_TAPS: usize = 64;

/// The shape and the rules of a DSpark drafter.
#[derive(Debug, Clone, PartialEq)]
pub struct DsparkConfig {
    /// Layers.
    pub layers: usize,
    /// H, the target's.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Size of a head, even.
    pub head_dim: usize,
    /// Intermediate size of the MLPs.
    pub inter: usize,
    /// Vocabulary rows, the target's.
    pub vocab: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// RoPE base.
    pub rope_theta: f64,
    /// Longest context.
    pub max_position: usize,
    /// Rows of a block: the anchor and masks after it.
    pub block_size: usize,
    /// The token that stands for an unknown one.
    pub mask_token: u32,
    /// Target layers whose output the context is made of, ascending.
    pub taps: Vec<usize>,
    /// Layers of the target that it was trained for, when it says so.
    pub target_layers: Option<usize>,
    /// Rank of the Markov head; 0 = none.
    pub markov_rank: usize,
    /// Whether there is a confidence head; `None` leaves it to the tensors.
    pub confidence: Option<bool>,
    /// Whether the confidence head sees the Markov embedding of the token before.
    pub confidence_with_markov: bool,
    /// Whether a row of a block sees only the rows before it.
    pub causal: bool,
    /// Whether the anchor's row makes the first draft; otherwise the row after it does.
    pub sample_from_anchor: bool,
}

impl DsparkConfig {
    /// Parses a `config.json`; `path` names it in errors. Gives also the rows and columns that share one FP8 scale.
    ///
    /// # Errors
    /// When the text is not such a configuration, or asks for what is not implemented.
    pub fn parse(path: &Path, json: &[u8]) -> Result<(Self, [usize; 2]), EngineError> {
        let top = Keys::parse(path, json)?;
        let found = top.architecture();
        if !found.as_str().is_some_and(|name| ARCHITECTURES.contains(&name)) {
            let wanted = format!("as a drafter, {} are", ARCHITECTURES.join(" and "));
            return Err(top.unsupported("architectures[0]", found, wanted));
        }
        let places = Places { dspark: top.object("dspark_config")?, dflash: top.object("dflash_config")?, top };
        places.refuse_unimplemented()?;
        let config = places.config()?;
        Ok((config, places.top.quantisation()?))
    }

    /// Drafts of a block: one a row, but for an anchor's row that makes none.
    pub fn drafts(&self) -> usize {
        self.block_size - self.first_row()
    }

    /// The block's row that makes draft 0.
    pub fn first_row(&self) -> usize {
        usize::from(!self.sample_from_anchor)
    }

    /// Width of keys and values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of queries.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of `taps`, `[rows, taps * H]`.
    ///
    /// # Errors
    /// [`EngineError::Request`] when these are no whole rows.
    pub fn tapped_rows(&self, taps: &[f32]) -> Result<usize, EngineError> {
        let each = self.taps.len() * self.hidden;
        if each == 0 || !taps.len().is_multiple_of(each) {
            return Err(EngineError::Request(format!("{} numbers are no rows of {each} of the tapped layers", taps.len())));
        }
        Ok(taps.len() / each)
    }

    /// Numbers that the confidence head takes in.
    pub fn confidence_inputs(&self) -> usize {
        self.hidden + if self.confidence_with_markov { self.markov_rank } else { 0 }
    }

    /// Whether the drafter was made for a target of this shape.
    ///
    /// # Errors
    /// What does not fit, as a sentence that names both numbers.
    pub fn check_target(&self, target: &ModelConfig) -> Result<(), String> {
        let fits = |what: &str, own: usize, targets: usize| match own == targets {
            true => Ok(()),
            false => Err(format!("its {what} is {own}, the target's is {targets}; name the target that it was trained for")),
        };
        fits("hidden_size", self.hidden, target.hidden)?;
        fits("vocab_size", self.vocab, target.vocab)?;
        if let Some(layers) = self.target_layers {
            fits("num_target_layers", layers, target.layers)?;
        }
        match self.taps.last() {
            Some(&last) if last >= target.layers => {
                Err(format!("it taps layer {last}, the target has {}; name the target that it was trained for", target.layers))
            }
            _ => Ok(()),
        }
    }
}

/// The objects that a key may be in.
struct Places {
    dspark: Option<Keys>,
    dflash: Option<Keys>,
    top: Keys,
}

impl Places {
    /// The object that has a key, and the name that it has there; the top level's when none has.
    fn find<'k>(&self, key: &'k str, old: &'k str) -> (&Keys, &'k str) {
        if self.top.get(old).is_some() {
            return (&self.top, old);
        }
        let nested = [&self.dspark, &self.dflash].into_iter().flatten().find(|keys| keys.get(key).is_some());
        (nested.unwrap_or(&self.top), key)
    }

    fn refuse_unimplemented(&self) -> Result<(), EngineError> {
        let top = &self.top;
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            if top.flag(key, false)? {
                return Err(top.unsupported(key, &Value::Bool(true), "only false is"));
            }
        }
        let words = [(top, "hidden_act", "silu"), self.word("markov_head_type", "vanilla")];
        for (keys, key, wanted) in words {
            if let Some(found) = keys.get(key).filter(|v| v.as_str() != Some(wanted)) {
                return Err(keys.unsupported(key, found, format!("only \"{wanted}\" is")));
            }
        }
        if let Some(found) = top.get("rope_scaling") {
            return Err(top.unsupported("rope_scaling", found, "only null is"));
        }
        if let Some(rope) = top.object("rope_parameters")?
            && let Some(found) = rope.get("rope_type").filter(|v| v.as_str() != Some("default"))
        {
            return Err(rope.unsupported("rope_type", found, "only \"default\" is"));
        }
        if let Some(types) = top.get("layer_types") {
            let full = |list: &Vec<Value>| list.iter().all(|kind| kind.as_str() == Some("full_attention"));
            if !types.as_array().is_some_and(full) {
                return Err(top.unsupported("layer_types", types, "only \"full_attention\" in every layer is"));
            }
        }
        Ok(())
    }

    fn word<'k>(&self, key: &'k str, wanted: &'k str) -> (&Keys, &'k str, &'k str) {
        let (keys, key) = self.find(key, "dspark_markov_head_type");
        (keys, key, wanted)
    }

    fn config(&self) -> Result<DsparkConfig, EngineError> {
        let top = &self.top;
        let heads = top.required("num_attention_heads", 1, 4096)?;
        let vocab = top.required("vocab_size", 1, 1 << 24)?;
        let (keys, key) = self.find("markov_rank", "dspark_markov_rank");
        let markov_rank = keys.required(key, 0, MAX_WIDTH)?;
        let (keys, key) = self.find("mask_token_id", "dspark_noise_token_id");
        let mask_token = keys.required(key, 0, vocab as u64 - 1)? as u32;
        let (keys, key) = self.find("sample_from_anchor", "dspark_sample_from_anchor");
        let sample_from_anchor = keys.flag(key, true)?;
        let most = MAX_DRAFT_LEN + usize::from(!sample_from_anchor);
        let (keys, key) = self.find("block_size", "dspark_block_size");
        let block_size = keys.required(key, 1 + u64::from(!sample_from_anchor), most as u64)?;
        let (keys, key) = self.find("enable_confidence_head", "dspark_enable_confidence_head");
        let confidence = keys.get(key).map(|_| keys.flag(key, true)).transpose()?;
        let (keys, key) = self.find("confidence_head_with_markov", "dspark_confidence_head_with_markov");
        let confidence_with_markov = keys.flag(key, markov_rank > 0)?;
        if confidence_with_markov && markov_rank == 0 {
            return Err(keys.bad("`confidence_head_with_markov` is true and `markov_rank` is 0; one of them is wrong"));
        }
        let config = DsparkConfig {
            layers: top.required("num_hidden_layers", 1, MAX_LAYERS)?,
            hidden: top.width("hidden_size")?,
            heads,
            kv_heads: top.number("num_key_value_heads", 1, 4096)?.unwrap_or(heads),
            head_dim: top.width("head_dim")?,
            inter: top.width("intermediate_size")?,
            vocab,
            rms_eps: top.float("rms_norm_eps", 1e-6)? as f32,
            rope_theta: self.rope_theta()?,
            max_position: top.number("max_position_embeddings", 1, 1 << 32)?.unwrap_or(usize::MAX),
            block_size,
            mask_token,
            taps: self.taps()?,
            target_layers: top.number("num_target_layers", 1, MAX_LAYERS)?,
            markov_rank,
            confidence,
            confidence_with_markov,
            causal: self.causal()?,
            sample_from_anchor,
        };
        self.check_relations(&config)?;
        Ok(config)
    }

    /// Engines differ in the base that they take when there is none, so that there must be one.
    fn rope_theta(&self) -> Result<f64, EngineError> {
        let nested = self.top.object("rope_parameters")?;
        let keys = nested.as_ref().filter(|keys| keys.get("rope_theta").is_some()).unwrap_or(&self.top);
        let theta = keys.float("rope_theta", f64::NAN)?;
        if theta.is_nan() {
            return Err(keys.bad("`rope_theta` is missing; it has no default"));
        }
        if theta >= 1.0 { Ok(theta) } else { Err(keys.bad(format!("`rope_theta` is {theta}; expected at least 1"))) }
    }

    /// Layers of the target, each one's output: no offset.
    fn taps(&self) -> Result<Vec<usize>, EngineError> {
        let (keys, key) = self.find("target_layer_ids", "dspark_target_layer_ids");
        let Some(value) = keys.get(key) else { return Err(keys.bad(format!("`{key}` is missing; it has no default"))) };
        let layer = |v: &Value| v.as_u64().filter(|&n| n < MAX_LAYERS).map(|n| n as usize);
        let list: Option<Vec<usize>> =
            value.as_array().filter(|list| list.len() <= MAX_TAPS).and_then(|list| list.iter().map(layer).collect());
        match list {
            Some(list) if !list.is_empty() && list.is_sorted_by(|a, b| a < b) => Ok(list),
            _ => Err(keys.bad(format!("`{key}` is {}; expected ascending layers of the target", shorten(value)))),
        }
    }

    fn causal(&self) -> Result<bool, EngineError> {
        if let Some(keys) = self.dflash.as_ref().filter(|keys| keys.get("causal").is_some()) {
            return keys.flag("causal", false);
        }
        let (keys, key) = self.find("is_causal", "dspark_is_causal");
        keys.flag(key, false)
    }

    /// Relations between numbers that the pass relies on.
    fn check_relations(&self, c: &DsparkConfig) -> Result<(), EngineError> {
        let ensure = |ok: bool, reason: String| if ok { Ok(()) } else { Err(self.top.bad(reason)) };
        ensure(
            c.heads.is_multiple_of(c.kv_heads),
            format!("`num_attention_heads` ({}) is not a multiple of `num_key_value_heads` ({})", c.heads, c.kv_heads),
        )?;
        ensure(c.head_dim.is_multiple_of(2), format!("`head_dim` ({}) is odd", c.head_dim))?;
        ensure(
            c.heads.saturating_mul(c.head_dim) <= MAX_PRODUCT,
            format!("`num_attention_heads` ({}) x `head_dim` ({}) is too large", c.heads, c.head_dim),
        )?;
        ensure(c.rms_eps > 0.0 && c.rms_eps.is_finite(), format!("`rms_norm_eps` ({}) is not above 0", c.rms_eps))
    }
}
