//! What engines say of accepted drafts, under one set of names.
//!
//! Only [`Acceptance::ordered`] says which step accepted what; everything else are sums over a request.

use serde_json::{Value, json};

/// Acceptance of one request, as far as its engine says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Acceptance {
    /// Whose words they are.
    pub source: &'static str,
    /// Verify steps.
    pub steps: Option<u64>,
    /// Drafts that were verified.
    pub drafted: Option<u64>,
    /// Drafts that were accepted, bonus tokens not counted.
    pub accepted: Option<u64>,
    /// Entry i: steps with i accepted drafts.
    pub histogram: Option<Vec<u64>>,
    /// Accepted and drafted of each step, in order.
    pub ordered: Option<Vec<(u32, u32)>>,
    /// Generated tokens.
    pub completion: Option<u64>,
    /// What in it contradicts itself or cannot be.
    pub doubts: Vec<String>,
}

/// A trailing run of steps without an accepted draft is called out from this length on...
const ZERO_TAIL: usize = 5;
/// ...and a decoding speed from this on, tokens per second.
const IMPLAUSIBLE_RATE: f64 = 20_000.0;

impl Acceptance {
    /// What a response says, wherever it says it; `None` when it says nothing, also when all of it is 0.
    pub fn find(response: &Value) -> Option<Self> {
        let choice = response.pointer("/choices/0").or_else(|| response.pointer("/outputs/0"));
        let at = |value: Option<&Value>, key: &str| value.and_then(|v| v.get(key)).filter(|v| v.is_object()).cloned();
        let vllm = at(response.get("metrics"), "speculative_decoding")
            .or_else(|| at(choice, "speculative_decoding_stats"))
            .or_else(|| at(choice, "spec_decode_metrics"));
        let trtllm = at(choice, "speculative_decoding").or_else(|| at(Some(response), "speculative_decoding"));
        let sglang = at(response.get("sglext"), "spec_tokens_details").or_else(|| at(Some(response), "meta_info"));
        let found = if let Some(v) = vllm {
            Self::vllm(&v)
        } else if let Some(v) = trtllm {
            Self::trtllm(&v)
        } else if let Some(v) = sglang.or_else(|| at(Some(response), "spec_info")) {
            Self::sglang(&v)
        } else if let Some(v) = at(Some(response), "timings") {
            Self::llamacpp(&v)
        } else {
            return None;
        };
        let empty = [found.steps, found.drafted, found.accepted].iter().all(|n| n.is_none_or(|n| n == 0)) && found.ordered.is_none();
        let completion = response.pointer("/usage/completion_tokens").and_then(Value::as_u64);
        (!empty).then(|| Self { completion: found.completion.or(completion), ..found }.checked())
    }

    /// vLLM 0.33: `metrics.speculative_decoding`; before its release, `choices[].speculative_decoding_stats`.
    fn vllm(v: &Value) -> Self {
        let ordered = numbers(v.get("per_step_accepted")).zip(numbers(v.get("per_step_drafted")));
        let mut doubts = Vec::new();
        let ordered = ordered.and_then(|(accepted, drafted)| {
            if accepted.len() != drafted.len() {
                doubts.push(format!("{} accepted and {} drafted counts of steps", accepted.len(), drafted.len()));
                return None;
            }
            accepted.into_iter().zip(drafted).map(|(a, d)| Some((u32::try_from(a).ok()?, u32::try_from(d).ok()?))).collect()
        });
        Self {
            source: "vllm",
            steps: number(v, &["num_spec_steps"]),
            drafted: number(v, &["num_draft_tokens"]),
            accepted: number(v, &["num_accepted_draft_tokens"]),
            histogram: histogram(v.get("acceptance_histogram")),
            ordered,
            doubts,
            ..Self::default()
        }
    }

    /// TensorRT-LLM: `choices[].speculative_decoding`, told from vLLM's by its place and its `total_` keys.
    fn trtllm(v: &Value) -> Self {
        Self {
            source: "tensorrt-llm",
            steps: number(v, &["num_spec_steps"]),
            drafted: number(v, &["total_draft_tokens"]),
            accepted: number(v, &["total_accepted_draft_tokens"]),
            histogram: histogram(v.get("acceptance_histogram")),
            ..Self::default()
        }
    }

    /// SGLang's `meta_info` and `spec_tokens_details`, in the words of all its versions, and of engines that took them over.
    fn sglang(v: &Value) -> Self {
        Self {
            source: "sglang",
            steps: number(v, &["spec_verify_ct"]),
            drafted: number(v, &["spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num", "spec_draft_tokens"]),
            accepted: number(v, &["spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens"]),
            histogram: histogram(v.get("spec_correct_drafts_histogram").or_else(|| v.get("spec_accept_histogram"))),
            completion: number(v, &["completion_tokens", "completion_token_num"]),
            ..Self::default()
        }
    }

    /// llama.cpp's `timings`, and mlx-vlm's, which counts rounds. Without rounds, the number of steps is not known.
    fn llamacpp(v: &Value) -> Self {
        let mut doubts = Vec::new();
        if let Some(rate) = v.get("predicted_per_second").and_then(Value::as_f64).filter(|&r| r > IMPLAUSIBLE_RATE) {
            doubts.push(format!(
                "{rate} tokens per second is implausible: the engine has counted decoding as prompt time, speed is not used"
            ));
        }
        Self {
            source: "llama.cpp",
            steps: number(v, &["draft_rounds"]),
            drafted: number(v, &["draft_n"]),
            accepted: number(v, &["draft_n_accepted"]),
            completion: number(v, &["predicted_n"]),
            doubts,
            ..Self::default()
        }
    }

    /// Checks the identities between the numbers:
    /// Σh = steps, Σ i h[i] = accepted ≤ drafted, accepted ≤ generated, and each step's accepted ≤ drafted.
    /// `generated = 1 + steps + accepted` may be missed, since the last window can be cut.
    fn checked(mut self) -> Self {
        let mut doubt = |text: String| self.doubts.push(text);
        if let (Some(accepted), Some(drafted)) = (self.accepted, self.drafted)
            && accepted > drafted
        {
            doubt(format!("{accepted} drafts accepted of {drafted}"));
        }
        if let Some(h) = &self.histogram {
            let steps: u64 = h.iter().fold(0, |sum, n| sum.saturating_add(*n));
            let accepted = h.iter().zip(0u64..).fold(0u64, |sum, (n, i)| sum.saturating_add(n.saturating_mul(i)));
            if self.steps.is_some_and(|s| s != steps) {
                doubt(format!("its histogram has {steps} steps, it counts {}", self.steps.unwrap_or(0)));
            }
            if self.accepted.is_some_and(|a| a != accepted) {
                doubt(format!("its histogram has {accepted} accepted drafts, it counts {}", self.accepted.unwrap_or(0)));
            }
        }
        if let (Some(accepted), Some(generated)) = (self.accepted, self.completion)
            && accepted > generated
        {
            doubt(format!("{accepted} drafts accepted in {generated} generated tokens"));
        }
        if let Some(ordered) = &self.ordered {
            if let Some(at) = ordered.iter().position(|(a, d)| a > d) {
                doubt(format!("step {at} accepts more drafts than it had"));
            }
            let tail = ordered.iter().rev().take_while(|(a, d)| *a == 0 && *d > 0).count();
            if tail >= ZERO_TAIL && tail < ordered.len() {
                doubt(format!("the last {tail} of {} steps accept nothing: has the drafter run past its context?", ordered.len()));
            }
        }
        self
    }

    /// Whether the steps' order can be used.
    pub fn steps_in_order(&self) -> Option<&[(u32, u32)]> {
        self.ordered.as_deref().filter(|steps| !steps.is_empty() && steps.iter().all(|(a, d)| a <= d))
    }

    /// Mean tokens per step: accepted / steps + 1; `None` when the steps were not counted.
    pub fn tokens_per_step(&self) -> Option<f64> {
        let steps = self.steps.filter(|&s| s > 0)?;
        Some(self.accepted? as f64 / steps as f64 + 1.0)
    }

    /// One sentence for people.
    pub fn sentence(&self) -> String {
        let number = |n: Option<u64>| n.map_or_else(|| "an unknown number of".to_owned(), |n| n.to_string());
        let mean = self.tokens_per_step().map_or_else(String::new, |m| format!(", {m:.2} tokens per step"));
        format!("{} of {} drafts accepted in {} verify steps{mean}", number(self.accepted), number(self.drafted), number(self.steps))
    }

    /// The sums, for a request's tags.
    pub fn to_json(&self) -> Value {
        json!({
            "source": self.source,
            "verify_steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "histogram": self.histogram,
            "ordered": self.ordered.is_some(),
        })
    }
}

fn number(v: &Value, names: &[&str]) -> Option<u64> {
    names.iter().find_map(|name| v.get(name)?.as_u64())
}

fn numbers(v: Option<&Value>) -> Option<Vec<u64>> {
    v?.as_array()?.iter().map(Value::as_u64).collect()
}

/// A list, or an object with the place as the key.
fn histogram(v: Option<&Value>) -> Option<Vec<u64>> {
    const MOST: usize = 1024;
    match v? {
        Value::Object(map) => {
            let mut out = Vec::new();
            for (key, n) in map {
                let at: usize = key.parse().ok().filter(|&at| at < MOST)?;
                out.resize(out.len().max(at + 1), 0);
                *out.get_mut(at)? = n.as_u64()?;
            }
            Some(out)
        }
        list => numbers(Some(list)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(v: Value) -> Option<Acceptance> {
        Acceptance::find(&v)
    }

    #[test]
    fn a_histogram_of_a_cut_request_is_consistent() {
        let a = find(json!({"meta_info": {"completion_tokens": 106, "spec_num_correct_drafts": 63, "spec_num_proposed_drafts": 215,
            "spec_verify_ct": 43, "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3]}}))
        .unwrap();
        assert_eq!((a.steps, a.accepted, a.drafted, a.doubts.as_slice()), (Some(43), Some(63), Some(215), &[][..]));
        assert_eq!(a.sentence(), "63 of 215 drafts accepted in 43 verify steps, 2.47 tokens per step");
        assert_eq!(a.steps_in_order(), None);
    }

    #[test]
    fn old_words_and_other_engines() {
        let old = find(json!({"meta_info": {"spec_verify_ct": 188, "spec_accept_token_num": 11, "spec_draft_token_num": 940}})).unwrap();
        assert_eq!((old.steps, old.accepted, old.drafted), (Some(188), Some(11), Some(940)));
        let stats = json!({"acceptance_histogram": {"0": 39, "1": 1, "3": 3}, "num_spec_steps": 43, "num_accepted_draft_tokens": 10, "num_draft_tokens": 129});
        let early = find(json!({"choices": [{"speculative_decoding_stats": stats}]})).unwrap();
        assert_eq!((early.source, early.histogram, early.doubts.len()), ("vllm", Some(vec![39, 1, 0, 3]), 0));
        let trt = json!({"total_accepted_draft_tokens": 30, "total_draft_tokens": 60, "num_spec_steps": 20, "acceptance_histogram": [8, 0, 6, 6]});
        let trt = find(json!({"choices": [{"speculative_decoding": trt}]})).unwrap();
        assert_eq!((trt.source, trt.accepted, trt.doubts.len()), ("tensorrt-llm", Some(30), 0));
        let llama = find(json!({"timings": {"predicted_n": 140, "draft_n": 289, "draft_n_accepted": 158}})).unwrap();
        // The number of steps is not in timings and is not made up.
        assert_eq!((llama.steps, llama.tokens_per_step()), (None, None));
        assert_eq!(llama.doubts, ["158 drafts accepted in 140 generated tokens"]);
    }

    #[test]
    fn zeros_are_no_data_and_contradictions_are_called_out() {
        assert_eq!(find(json!({"spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0}})), None);
        assert_eq!(find(json!({"choices": []})), None);
        let fast = find(
            json!({"timings": {"predicted_n": 96, "predicted_per_second": 95000.0, "draft_n": 655, "draft_n_accepted": 47, "draft_rounds": 48}}),
        );
        assert!(fast.unwrap().doubts[0].contains("implausible"));
        let more =
            find(json!({"metrics": {"speculative_decoding": {"num_draft_tokens": 3, "num_accepted_draft_tokens": 4, "num_spec_steps": 1,
            "acceptance_histogram": [0, 0, 1]}}}))
            .unwrap();
        assert_eq!(more.doubts, ["4 drafts accepted of 3", "its histogram has 2 accepted drafts, it counts 4"]);
        let tail = find(
            json!({"metrics": {"speculative_decoding": {"per_step_accepted": [2, 3, 0, 0, 0, 0, 0, 0], "per_step_drafted": [3, 3, 3, 3, 3, 3, 3, 3]}}}),
        );
        let tail = tail.unwrap();
        assert!(tail.doubts[0].contains("last 6 of 8"), "{:?}", tail.doubts);
        assert_eq!(tail.steps_in_order().map(<[_]>::len), Some(8));
        let uneven =
            find(json!({"metrics": {"speculative_decoding": {"per_step_accepted": [1], "per_step_drafted": [], "num_spec_steps": 1}}}))
                .unwrap();
        assert_eq!((uneven.steps_in_order(), uneven.doubts.len()), (None, 1));
    }
}
