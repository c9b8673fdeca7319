//! Responses of serving engines: completions, chat, token endpoints, offline dumps, batch files, streams.

use super::acceptance::Acceptance;
use super::routed::Routed;
use super::rows::IdArray;
use super::sample::Sample;
use super::{ImportError, Options};
use crate::trace::FinishReason;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A response. Only expert ids are kept apart from the rest, since they are large.
#[derive(Debug, Default, Deserialize)]
pub struct Response {
    /// Completions; in a stream, parts of them.
    #[serde(default)]
    pub choices: Option<Vec<Part>>,
    /// The same of an offline `RequestOutput`.
    #[serde(default)]
    pub outputs: Option<Vec<Part>>,
    /// Ids of all rows, at the top level.
    #[serde(default)]
    pub routed_experts: Routed,
    /// Ids of the prompt's rows (vLLM 0.21).
    #[serde(default)]
    pub prompt_routed_experts: Routed,
    /// SGLang's own endpoint.
    #[serde(default)]
    pub meta_info: Option<Part>,
    /// SGLang's additions to OpenAI's endpoints.
    #[serde(default, alias = "sgl_ext")]
    pub sglext: Option<Part>,
    /// Batch files and proxies wrap the response...
    #[serde(default)]
    pub response: Option<Box<Response>>,
    /// ...once or twice.
    #[serde(default)]
    pub body: Option<Box<Response>>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
    /// Of a stream, where the choice of each index is: a stream may have any number of them.
    #[serde(skip)]
    places: BTreeMap<String, usize>,
}

/// An object that may hold expert ids.
#[derive(Debug, Default, Deserialize)]
pub struct Part {
    /// The ids.
    #[serde(default)]
    pub routed_experts: Routed,
    /// Older SGLang has its additions in the choice.
    #[serde(default, alias = "sgl_ext")]
    pub sglext: Option<Box<Part>>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl Response {
    /// The response within its wrappings.
    pub fn unwrapped(mut self) -> Self {
        for _ in 0..3 {
            match self.response.take().or_else(|| self.body.take()) {
                Some(inner) => self = *inner,
                None => break,
            }
        }
        self
    }

    /// Every place where expert ids may be, wrappings included.
    pub fn all_routed(&mut self) -> Vec<&mut Routed> {
        let mut all = vec![&mut self.routed_experts, &mut self.prompt_routed_experts];
        let parts = self.choices.iter_mut().chain(&mut self.outputs).flatten();
        for part in parts.chain(&mut self.meta_info).chain(&mut self.sglext) {
            all.push(&mut part.routed_experts);
            let mut inner = part.sglext.as_deref_mut();
            while let Some(part) = inner {
                all.push(&mut part.routed_experts);
                inner = part.sglext.as_deref_mut();
            }
        }
        for inner in self.response.iter_mut().chain(&mut self.body) {
            all.extend(inner.all_routed());
        }
        all
    }

    /// Whether expert ids are anywhere, and whether their key is (perhaps with `null`).
    pub fn routing(&self) -> (bool, bool) {
        let mut all = vec![&self.routed_experts, &self.prompt_routed_experts];
        let parts = self.choices.iter().chain(&self.outputs).flatten().chain(&self.meta_info).chain(&self.sglext);
        for part in parts {
            all.push(&part.routed_experts);
            all.extend(part.sglext.as_deref().map(|s| &s.routed_experts));
        }
        (all.iter().any(|r| r.is_some()), all.iter().any(|r| **r != Routed::Absent))
    }

    /// Hands over one sample for each completion; the ids of one at a time are decoded.
    ///
    /// # Errors
    /// When ids cannot be decoded, naming the request, and what `take` returns.
    pub fn each_sample(
        self,
        path: &Path,
        options: &Options,
        take: &mut impl FnMut(Sample) -> Result<(), ImportError>,
    ) -> Result<(), ImportError> {
        let id = word(&self.rest, &["id", "request_id"])
            .or_else(|| word(&self.meta_info.as_ref()?.rest, &["id"]))
            .or_else(|| word(&self.rest, &["custom_id"]))
            .unwrap_or_default();
        let wrong = |reason: String| {
            let who = if id.is_empty() { String::new() } else { format!("request {}: ", id.escape_debug()) };
            ImportError::input(path, format!("{who}routed_experts: {reason}"))
        };
        let decode = |routed: Routed| routed.decode(options.known_layers(), options.known_k()).map_err(wrong);
        let count = |key: &str| {
            let meta = || self.meta_info.as_ref()?.rest.get(key);
            let n = self.rest.get("usage").and_then(|u| u.get(key)).or_else(meta).and_then(Value::as_u64);
            n.and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= u32::MAX as usize)
        };
        let (prompt_tokens, completion_tokens) = (count("prompt_tokens"), count("completion_tokens"));
        let meta_finish = self.meta_info.as_ref().and_then(|m| finish_reason(m.rest.get("finish_reason")));
        let prompt_ids = ids(self.rest.get("prompt_token_ids")).or_else(|| ids(self.rest.get("input_ids")));
        let common = Sample {
            model: word(&self.rest, &["model"]),
            prompt_tokens: prompt_tokens.or(options.prompt_tokens.map(|n| n as usize)),
            prompt_ids,
            ..Sample::default()
        };
        let acceptance = self.acceptance();
        let mut parts: Vec<Part> = self.choices.into_iter().flatten().chain(self.outputs.into_iter().flatten()).collect();
        if parts.is_empty() {
            // Endpoints without choices: the response is the only completion.
            let rest = self.rest;
            parts.push(Part { rest, ..Part::default() });
        }
        let one = parts.len() == 1;
        let mut top =
            [self.routed_experts].into_iter().chain(self.meta_info.map(|m| m.routed_experts)).chain(self.sglext.map(|s| s.routed_experts));
        let prompt_rows = decode(self.prompt_routed_experts)?;
        for (place, part) in parts.into_iter().enumerate() {
            let own = [part.routed_experts].into_iter().chain(part.sglext.map(|s| s.routed_experts)).find(Routed::is_some);
            // Additions at the top are of the first choice.
            let routed = own.or_else(|| if place == 0 { top.find(Routed::is_some) } else { None }).unwrap_or_default();
            let routed = joined(prompt_rows.clone(), decode(routed)?).map_err(wrong)?;
            let output_ids = ids(part.rest.get("token_ids")).or_else(|| ids(part.rest.get("output_ids")));
            take(Sample {
                id: if one { id.clone() } else { format!("{id}/{place}") },
                prompt_ids: ids(part.rest.get("prompt_token_ids")).or_else(|| common.prompt_ids.clone()),
                // `usage` counts all choices together.
                output_tokens: completion_tokens.filter(|_| one),
                output_ids,
                finish: finish_reason(part.rest.get("finish_reason")).or(meta_finish),
                acceptance: acceptance.clone().filter(|_| one),
                routed,
                ..common.clone()
            })?;
        }
        Ok(())
    }

    fn acceptance(&self) -> Option<Acceptance> {
        let part = |p: &Option<Part>| p.as_ref().map(|p| Value::Object(p.rest.clone()));
        let choice = self.choices.iter().chain(&self.outputs).flatten().next().map(|p| Value::Object(p.rest.clone()));
        let mut all = Map::new();
        for key in ["metrics", "speculative_decoding", "timings", "spec_info", "usage"] {
            if let Some(value) = self.rest.get(key) {
                all.insert(key.into(), value.clone());
            }
        }
        all.insert("choices".into(), json!(choice.into_iter().collect::<Vec<_>>()));
        all.extend(part(&self.meta_info).map(|v| ("meta_info".to_owned(), v)));
        all.extend(part(&self.sglext).map(|v| ("sglext".to_owned(), v)));
        Acceptance::find(&Value::Object(all))
    }

    /// Adds a later part of a stream.
    pub fn merge(&mut self, next: Self) {
        for part in next.choices.into_iter().flatten() {
            let choices = self.choices.get_or_insert_default();
            let index = part.rest.get("index").map(Value::to_string).unwrap_or_default();
            let place = *self.places.entry(index).or_insert(choices.len());
            match choices.get_mut(place) {
                None => choices.push(part),
                Some(choice) => choice.merge(part),
            }
        }
        for (key, value) in next.rest {
            if !value.is_null() {
                self.rest.insert(key, value);
            }
        }
        for (mine, theirs) in
            [(&mut self.routed_experts, next.routed_experts), (&mut self.prompt_routed_experts, next.prompt_routed_experts)]
        {
            if theirs.is_some() {
                *mine = theirs;
            }
        }
        self.meta_info = next.meta_info.or(self.meta_info.take());
        self.sglext = next.sglext.or(self.sglext.take());
    }
}

impl Part {
    /// Adds what a later chunk says of the same choice: tokens go on, the rest replaces.
    fn merge(&mut self, next: Self) {
        if next.routed_experts != Routed::Absent {
            self.routed_experts = next.routed_experts;
        }
        for (key, value) in next.rest {
            match (self.rest.get_mut(&key), value) {
                (_, Value::Null) => {}
                (Some(Value::Array(mine)), Value::Array(theirs)) if key == "token_ids" => mine.extend(theirs),
                (_, value) => {
                    self.rest.insert(key, value);
                }
            }
        }
    }
}

/// The prompt's rows and then the others.
fn joined(prompt: Option<IdArray>, rest: Option<IdArray>) -> Result<Option<IdArray>, String> {
    let (mut prompt, rest) = match (prompt, rest) {
        (Some(prompt), Some(rest)) => (prompt, rest),
        (prompt, rest) => return Ok(prompt.or(rest)),
    };
    if (prompt.layers, prompt.width) != (rest.layers, rest.width) {
        return Err(format!(
            "the prompt's rows have {} layers and {} experts, the others {} and {}",
            prompt.layers, prompt.width, rest.layers, rest.width
        ));
    }
    prompt.rows += rest.rows;
    prompt.ids.extend(rest.ids);
    Ok(Some(prompt))
}

fn word(map: &Map<String, Value>, keys: &[&str]) -> Option<String> {
    keys.iter().find_map(|key| match map.get(*key)? {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(n) => Some(n.to_string()),
        _ => None,
    })
}

fn ids(value: Option<&Value>) -> Option<Vec<u32>> {
    let list = value?.as_array()?;
    list.iter().map(|v| v.as_u64().and_then(|n| u32::try_from(n).ok())).collect()
}

/// The reason as a word, or in SGLang's object.
fn finish_reason(value: Option<&Value>) -> Option<FinishReason> {
    let value = value?;
    let text = value.as_str().or_else(|| value.get("type")?.as_str())?;
    match text {
        "stop" | "eos" | "tool_calls" => Some(FinishReason::Stop),
        "length" => Some(FinishReason::Length),
        "abort" | "aborted" | "cancelled" => Some(FinishReason::Aborted),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples_of(response: Response) -> Vec<Sample> {
        let mut all = Vec::new();
        let mut take = |sample| {
            all.push(sample);
            Ok(())
        };
        response.unwrapped().each_sample(Path::new("r.json"), &Options::default(), &mut take).unwrap();
        all
    }

    fn samples(json: &str) -> Vec<Sample> {
        samples_of(serde_json::from_str(json).unwrap())
    }

    #[test]
    fn envelopes_of_all_kinds_give_the_same_sample() {
        let inside = r#""usage":{"prompt_tokens":2,"completion_tokens":2},"model":"m","id":"a","prompt_token_ids":[7,8],
            "choices":[{"index":0,"finish_reason":"stop","token_ids":[9,10],"routed_experts":[[[1,2]],[[3,4]],[[5,6]]]}]"#;
        let want = samples(&format!("{{{inside}}}"));
        assert_eq!(want.len(), 1);
        let s = &want[0];
        assert_eq!(
            (s.id.as_str(), s.model.as_deref(), s.prompt_tokens, s.output_ids.as_deref()),
            ("a", Some("m"), Some(2), Some(&[9, 10][..]))
        );
        assert_eq!((s.finish, s.routed.as_ref().map(|r| r.rows)), (Some(FinishReason::Stop), Some(3)));
        assert_eq!(samples(&format!(r#"{{"custom_id":"b","response":{{"status_code":200,"body":{{{inside}}}}}}}"#)), want);
        let split = inside.replace("[[[1,2]],[[3,4]],[[5,6]]]", "[[[5,6]]]") + r#","prompt_routed_experts":[[[1,2]],[[3,4]]]"#;
        assert_eq!(samples(&format!("{{{split}}}")), want);
        let offline = r#"{"request_id":"a","model":"m","prompt_token_ids":[7,8],"usage":{"prompt_tokens":2,"completion_tokens":2},
            "outputs":[{"finish_reason":"stop","token_ids":[9,10],"routed_experts":[[[1,2]],[[3,4]],[[5,6]]]}]}"#;
        assert_eq!(samples(offline), want);
    }

    #[test]
    fn several_completions_are_several_requests() {
        let two = samples(
            r#"{"id":"a","usage":{"prompt_tokens":1,"completion_tokens":4},"metrics":{"speculative_decoding":{"num_spec_steps":3,"num_draft_tokens":3}},
            "choices":[{"index":0,"token_ids":[1,2]},{"index":1,"token_ids":[3,4]}]}"#,
        );
        let got: Vec<_> = two.iter().map(|s| (s.id.as_str(), s.output_tokens, s.acceptance.is_some())).collect();
        assert_eq!(got, [("a/0", None, false), ("a/1", None, false)]);
    }

    #[test]
    fn a_stream_is_put_together() {
        let mut all = Response::default();
        for chunk in [
            r#"{"id":"a","choices":[{"index":0,"token_ids":[1],"finish_reason":null}]}"#,
            r#"{"id":"a","choices":[{"index":0,"token_ids":[2,3],"finish_reason":"length"}]}"#,
            r#"{"id":"a","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3},
                "metrics":{"speculative_decoding":{"per_step_accepted":[1],"per_step_drafted":[2]}}}"#,
        ] {
            all.merge(serde_json::from_str(chunk).unwrap());
        }
        let s = samples_of(all).remove(0);
        assert_eq!((s.output_ids, s.finish, s.prompt_tokens), (Some(vec![1, 2, 3]), Some(FinishReason::Length), Some(4)));
        assert_eq!(s.acceptance.unwrap().ordered, Some(vec![(1, 2)]));
    }

    #[test]
    fn reasons_are_words_or_objects() {
        let reason = |json: &str| finish_reason(Some(&serde_json::from_str(json).unwrap()));
        assert_eq!(reason(r#"{"type":"length","length":12}"#), Some(FinishReason::Length));
        assert_eq!((reason("\"stop\""), reason("\"other\""), reason("null")), (Some(FinishReason::Stop), None, None));
    }
}
