//! What the texts of ranges say: steps of engines, layers of models.

use crate::trace::{Component, Phase};

/// A forward pass, as an engine names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// What it does; `None` for the drafter's passes.
    pub phase: Option<Phase>,
    /// Of the drafter's passes, whether it follows the target's that it is part of.
    pub follows: bool,
    /// Requests in its batch, when the text says.
    pub requests: Option<u32>,
    /// Rows of the batch, when the text says.
    pub rows: Option<u32>,
    /// Tokens in the cache before it, the mean over its requests, when the text says.
    pub context: Option<u32>,
    /// The engine's number of the pass.
    pub id: Option<i64>,
}

/// Reads the name of a step: SGLang's `step[VERIFY bs=2 g_sq=8 ... forward_id=3]`, vLLM's
/// `execute_context_1(7)_generation_2(8)` and `execute_15_context_1(sq7sk7sqsq49sqsk49)_generation_2(sq8sk100sqsq32sqsk400)`.
pub fn step(text: &str) -> Option<Step> {
    if let Some(inside) = text.strip_prefix("step[").and_then(|rest| rest.strip_suffix(']')) {
        let mut words = inside.split_ascii_whitespace();
        let kind = words.next()?;
        let mut step = Step { phase: None, follows: kind.starts_with("DRAFT_EXTEND"), requests: None, rows: None, context: None, id: None };
        let (mut context, mut generation, mut tokens, mut keys) = (None, None, None, None);
        for word in words {
            let Some((key, value)) = word.split_once('=') else { continue };
            match key {
                "bs" => step.requests = value.parse().ok(),
                "toks" => tokens = value.parse().ok(),
                "c_sq" => context = value.parse::<u32>().ok(),
                "g_sq" => generation = value.parse::<u32>().ok(),
                "g_sk" => keys = value.parse::<u32>().ok(),
                "forward_id" => step.id = value.parse().ok(),
                _ => {}
            }
        }
        step.phase = match kind {
            "VERIFY" | "TARGET_VERIFY" => Some(Phase::Verify),
            "DECODE" => Some(Phase::Decode),
            "EXTEND" | "MIXED" | "PREFILL" => Some(Phase::Prefill),
            _ if kind.starts_with("DRAFT") => None,
            _ => return None,
        };
        step.rows = tokens.or_else(|| context.map_or(generation, |c| Some(c.saturating_add(generation.unwrap_or(0)))));
        if step.phase == Some(Phase::Decode) {
            step.rows = step.rows.or(step.requests);
        }
        if context.is_none_or(|c| c == 0) {
            step.context = mean_context(keys, generation, step.requests);
        }
        return Some(step);
    }
    let rest = text.strip_prefix("execute_")?;
    let at = rest.find("context_")?;
    let (context, generation) = rest.get(at + "context_".len()..)?.split_once("_generation_")?;
    let ((prompts, prompt_rows, _), (others, other_rows, keys)) = (group(context)?, group(generation)?);
    let phase = match (prompts, other_rows > others) {
        (1.., _) => Phase::Prefill,
        (0, true) => Phase::Verify,
        (0, false) => Phase::Decode,
    };
    let context = if prompts == 0 { mean_context(keys, Some(other_rows), Some(others)) } else { None };
    let (requests, rows) = (prompts.checked_add(others), prompt_rows.checked_add(other_rows));
    Some(Step { phase: Some(phase), follows: false, requests, rows, context, id: None })
}

/// Keys that are attended to, less the rows' own, by request.
fn mean_context(keys: Option<u32>, rows: Option<u32>, requests: Option<u32>) -> Option<u32> {
    keys?.checked_sub(rows?)?.checked_div(requests?)
}

/// `2(8)` or `2(sq8sk100...)`: requests, their rows, and the keys that they attend to.
fn group(text: &str) -> Option<(u32, u32, Option<u32>)> {
    let (requests, rows) = text.split_once('(')?;
    let rows = rows.strip_prefix("sq").unwrap_or(rows);
    let number = |text: &str| text.find(|c: char| !c.is_ascii_digit()).and_then(|end| text.get(..end)?.parse().ok());
    let keys = rows.split_once("sk").and_then(|(_, keys)| number(keys));
    Some((requests.parse().ok()?, number(rows)?, keys))
}

/// The layer and the part of it that a module's path names: `model.layers.3.mlp.experts` in whatever text.
pub fn module(text: &str) -> Option<(u16, Component)> {
    let at = text.find("layers.").map(|at| at + "layers.".len())?;
    let rest = text.get(at..)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let layer = rest.get(..end)?.parse().ok()?;
    let path = rest.get(end..)?;
    // The path ends with the text's quote.
    let path = path.split(['\'', '"', ',', ' ']).next().unwrap_or_default();
    Some((layer, part(path)))
}

/// What a module's path within a layer is for.
fn part(path: &str) -> Component {
    let has = |word: &str| path.contains(word);
    if has("shared_expert") {
        Component::Shared
    } else if has(".experts") {
        Component::Experts
    } else if path.ends_with(".gate") || has("router") {
        Component::Router
    } else if has("norm") {
        Component::Norm
    } else if has("mla") {
        Component::Mla
    } else if has("kda") {
        Component::Kda
    } else {
        Component::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_steps_are_read() {
        let of = |text: &str| step(text).map(|s| (s.phase, s.requests, s.rows, s.id));
        let verify = Some(Phase::Verify);
        assert_eq!(of("step[VERIFY bs=2 g_sq=8 g_sqsq=32 g_sqsk=400 g_sk=100 forward_id=3]"), Some((verify, Some(2), Some(8), Some(3))));
        assert_eq!(of("step[EXTEND bs=2 toks=8 c_sq=8 forward_id=1]"), Some((Some(Phase::Prefill), Some(2), Some(8), Some(1))));
        assert_eq!(of("step[DECODE bs=4]"), Some((Some(Phase::Decode), Some(4), Some(4), None)));
        assert_eq!(of("step[DRAFT bs=2]"), Some((None, Some(2), None, None)));
        assert_eq!(of("execute_context_1(7)_generation_0(0)"), Some((Some(Phase::Prefill), Some(1), Some(7), None)));
        assert_eq!(of("execute_context_0(0)_generation_2(8)"), Some((verify, Some(2), Some(8), None)));
        let detailed = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)";
        assert_eq!(of(detailed), Some((Some(Phase::Decode), Some(32), Some(32), None)));
        for other in [
            "ProfilerStep#6",
            "execute_model_graph_replay",
            "step[",
            "step[]",
            "execute_context_x(1)_generation_0(0)",
            "execute_context_1(7",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn modules_name_layers_and_parts() {
        let text = "{'Module': 'Qwen3MoeForCausalLM.model.layers.13.mlp.experts', 'Inputs': [[8, 2048]]}";
        assert_eq!(module(text), Some((13, Component::Experts)));
        assert_eq!(module("model.layers.2.mlp.gate"), Some((2, Component::Router)));
        assert_eq!(module("model.layers.2.mlp.shared_experts.down_proj"), Some((2, Component::Shared)));
        assert_eq!(module("model.layers.2.input_layernorm"), Some((2, Component::Norm)));
        assert_eq!(module("model.layers.2.self_attn.q_proj"), Some((2, Component::Other)));
        assert_eq!((module("model.layers."), module("model.layers.99999"), module("model.norm")), (None, None, None));
    }
}
