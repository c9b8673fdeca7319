//! SGLang's responses. Their ids have no shape and need the model's.

use super::{Flag, Head, ImportError, Importer, Options, Sink, flags, vllm};
use std::path::PathBuf;

/// Responses of SGLang's own endpoint (`meta_info`) and of its OpenAI endpoints (`sglext`).
pub struct SglangResponse;

impl Importer for SglangResponse {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn about(&self) -> &'static str {
        "SGLang responses with meta_info or sglext (with --model-config, for the shape of their ids)"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::IDS
    }

    fn sniff(&self, head: &Head) -> bool {
        let keys = ["meta_info", "sglext", "sgl_ext"];
        matches!(head.first(), Some(b'{' | b'['))
            && (keys.iter().any(|key| head.has_key(key)) || head.has("{\"text\"") && head.has_key("output_ids"))
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        let nothing = "no routing in this file: start SGLang with --enable-return-routed-experts and ask with return_routed_experts";
        vllm::responses(inputs, "sglang", nothing, options, sink)
    }
}
