//! The model's shape from the `config.json` that its checkpoint has, of whatever architecture.

use super::ImportError;
use crate::trace::input_file;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;

/// A configuration larger than this is not one.
const MAX_BYTES: u64 = 16 << 20;

/// What a foreign configuration says of routing. Every part may be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForeignModel {
    /// Name of the checkpoint's directory, or `_name_or_path`.
    pub name: Option<String>,
    /// Architecture tag.
    pub architecture: Option<String>,
    /// Hidden layers.
    pub layers: Option<u16>,
    /// Layers with a router, ascending; `None` when the configuration does not say which.
    pub moe_layers: Option<Vec<u16>>,
    /// Multi-token-prediction layers, numbered after the hidden ones.
    pub mtp_layers: u16,
    /// Routed experts per layer.
    pub experts: Option<u16>,
    /// Experts per token.
    pub k: Option<u16>,
    /// Shared experts per layer.
    pub shared_experts: Option<u16>,
    /// Hidden size.
    pub hidden_size: Option<u32>,
    /// Intermediate size of a routed expert.
    pub expert_size: Option<u32>,
    /// Vocabulary.
    pub vocab_size: Option<u32>,
    /// `quantization_config.quant_method`, when there is one.
    pub quantisation: Option<String>,
}

impl ForeignModel {
    /// Reads a `config.json`, or the one in a checkpoint's directory.
    ///
    /// # Errors
    /// When it cannot be read, is not a JSON object, or has a number that cannot be one of a model.
    pub fn read(path: &Path) -> Result<Self, ImportError> {
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let mut json = Vec::new();
        input_file::open(&file).and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut json)).map_err(ImportError::io(&file))?;
        if json.len() as u64 > MAX_BYTES {
            return Err(ImportError::input(&file, "too large for a model's configuration"));
        }
        let mut model = Self::parse(&json).map_err(|reason| ImportError::input(&file, reason))?;
        if model.name.is_none() {
            let directory = std::path::absolute(&file).ok();
            model.name = directory.as_deref().and_then(Path::parent).and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
        }
        Ok(model)
    }

    /// Parses the text of a `config.json`. Of a multimodal model, `text_config` is read.
    ///
    /// # Errors
    /// A sentence naming the key.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(json).map_err(|e| format!("not JSON: {e}"))?;
        let Value::Object(top) = value else { return Err("not a JSON object: give the model's config.json".into()) };
        let keys = Keys { top: &top, text: top.get("text_config").and_then(Value::as_object) };
        let text = |key: &str| keys.get(key).and_then(Value::as_str).filter(|s| !s.is_empty()).map(str::to_owned);
        let layers = keys.small(&["num_hidden_layers", "n_layers", "num_layers"])?;
        let experts = keys.small(&["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"])?;
        let quantised = keys.get("quantization_config").and_then(|q| q.get("quant_method")).and_then(Value::as_str);
        Ok(Self {
            name: text("_name_or_path"),
            architecture: keys
                .get("architectures")
                .and_then(|a| a.get(0))
                .and_then(Value::as_str)
                .map(str::to_owned)
                .or_else(|| text("model_type")),
            moe_layers: layers.map(|n| keys.moe_layers(n)).transpose()?.flatten(),
            layers,
            mtp_layers: keys.small(&["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"])?.unwrap_or(0),
            experts,
            k: keys.small(&["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token"])?,
            shared_experts: keys.small(&["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"])?,
            hidden_size: keys.wide(&["hidden_size"])?,
            expert_size: keys.wide(&["moe_intermediate_size", "expert_ffn_hidden_size"])?,
            vocab_size: keys.wide(&["vocab_size"])?,
            quantisation: quantised.map(str::to_owned).or_else(|| text("torch_dtype").or_else(|| text("dtype")).map(|d| short_dtype(&d))),
        })
    }
}

fn short_dtype(name: &str) -> String {
    match name {
        "bfloat16" => "bf16".into(),
        "float32" => "f32".into(),
        "float16" => "f16".into(),
        other => other.into(),
    }
}

struct Keys<'a> {
    top: &'a Map<String, Value>,
    text: Option<&'a Map<String, Value>>,
}

impl Keys<'_> {
    /// The value; `null` counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        [self.text, Some(self.top)].into_iter().flatten().find_map(|map| map.get(key).filter(|v| !v.is_null()))
    }

    fn number<T: TryFrom<u64>>(&self, names: &[&str]) -> Result<Option<T>, String> {
        for name in names {
            // A list (one entry a layer, as some architectures have it) is not a number: look on.
            let Some(value) = self.get(name).filter(|v| !v.is_array()) else { continue };
            let number = value.as_u64().and_then(|n| T::try_from(n).ok());
            return number.map(Some).ok_or_else(|| format!("`{name}` is {value}, which no model has"));
        }
        Ok(None)
    }

    fn small(&self, names: &[&str]) -> Result<Option<u16>, String> {
        // u16::MAX itself marks what is not known.
        Ok(self.number::<u16>(names)?.filter(|&n| n < u16::MAX))
    }

    fn wide(&self, names: &[&str]) -> Result<Option<u32>, String> {
        self.number(names)
    }

    fn list(&self, name: &str) -> Option<Vec<u64>> {
        self.get(name)?.as_array()?.iter().map(Value::as_u64).collect()
    }

    /// Which of `layers` have a router, by the conventions of the published architectures:
    /// `first_k_dense_replace` dense layers first; `moe_layer_freq` (a period, or one flag a layer) or `decoder_sparse_step`
    /// with `mlp_only_layers`; `moe_layers` or `interleave_moe_layer_step` written out. Without any of them every layer
    /// has one.
    fn moe_layers(&self, layers: u16) -> Result<Option<Vec<u16>>, String> {
        let all = 0..layers;
        if let Some(list) = self.list("moe_layers") {
            let listed: Option<Vec<u16>> = list.iter().map(|&n| u16::try_from(n).ok().filter(|&n| n < layers)).collect();
            return listed.map(Some).ok_or_else(|| format!("`moe_layers` names a layer beyond {layers}"));
        }
        if let Some(step) = self.small(&["interleave_moe_layer_step"])?.filter(|&s| s > 0) {
            return Ok(Some(all.filter(|l| (l + 1) % step == 0).collect()));
        }
        if let Some(flags) = self.list("moe_layer_freq") {
            if flags.len() != usize::from(layers) {
                return Err(format!("`moe_layer_freq` has {} entries for {layers} layers", flags.len()));
            }
            return Ok(Some(all.filter(|&l| flags.get(usize::from(l)).is_some_and(|&f| f != 0)).collect()));
        }
        // A list of layer kinds (as hybrid models have it) does not say which have a router.
        if self.get("hybrid_override_pattern").is_some() {
            return Ok(None);
        }
        let first = self.small(&["first_k_dense_replace", "num_dense_layers"])?.unwrap_or(0);
        let frequency = self.small(&["moe_layer_freq"])?.filter(|&f| f > 0).unwrap_or(1);
        let sparse_step = self.small(&["decoder_sparse_step"])?.filter(|&f| f > 0).unwrap_or(1);
        let mlp_only = self.list("mlp_only_layers").unwrap_or_default();
        let routed = |l: &u16| {
            *l >= first && l.is_multiple_of(frequency) && (l + 1).is_multiple_of(sparse_step) && !mlp_only.contains(&u64::from(*l))
        };
        Ok(Some(all.filter(routed).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> ForeignModel {
        ForeignModel::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn reads_the_published_conventions() {
        let deepseek = parse(
            r#"{"architectures":["DeepseekV3ForCausalLM"],"num_hidden_layers":61,"first_k_dense_replace":3,"moe_layer_freq":1,
            "n_routed_experts":256,"num_experts_per_tok":8,"n_shared_experts":1,"num_nextn_predict_layers":1,"hidden_size":7168,
            "moe_intermediate_size":2048,"vocab_size":129280,"quantization_config":{"quant_method":"fp8"}}"#,
        );
        assert_eq!(deepseek.moe_layers, Some((3..61).collect()));
        assert_eq!((deepseek.layers, deepseek.mtp_layers, deepseek.experts, deepseek.k), (Some(61), 1, Some(256), Some(8)));
        assert_eq!((deepseek.quantisation.as_deref(), deepseek.expert_size), (Some("fp8"), Some(2048)));
        let qwen =
            parse(r#"{"num_hidden_layers":4,"decoder_sparse_step":2,"mlp_only_layers":[3],"num_experts":60,"torch_dtype":"bfloat16"}"#);
        assert_eq!((qwen.moe_layers, qwen.quantisation.as_deref()), (Some(vec![1]), Some("bf16")));
        let maverick = parse(r#"{"text_config":{"num_hidden_layers":6,"interleave_moe_layer_step":2,"num_local_experts":128}}"#);
        assert_eq!((maverick.moe_layers, maverick.experts), (Some(vec![1, 3, 5]), Some(128)));
        let flags = parse(r#"{"num_hidden_layers":3,"moe_layer_freq":[0,1,1]}"#);
        assert_eq!(flags.moe_layers, Some(vec![1, 2]));
        assert_eq!(parse(r#"{"num_hidden_layers":2,"hybrid_override_pattern":"ME"}"#).moe_layers, None);
        assert_eq!(parse(r#"{"num_hidden_layers":2}"#).moe_layers, Some(vec![0, 1]));
    }

    #[test]
    fn impossible_numbers_are_named() {
        let error = |json: &str| ForeignModel::parse(json.as_bytes()).unwrap_err();
        assert!(error(r#"{"num_hidden_layers":-1}"#).contains("num_hidden_layers"));
        assert!(error(r#"{"num_experts":1e9}"#).contains("num_experts"));
        assert!(error(r#"{"num_hidden_layers":2,"moe_layers":[5]}"#).contains("moe_layers"));
        assert!(error(r#"{"num_hidden_layers":2,"moe_layer_freq":[1]}"#).contains("moe_layer_freq"));
        assert!(error("[]").contains("object") && error("{").contains("JSON"));
    }
}
