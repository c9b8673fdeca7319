//! The prompts of a run: one JSON object a line, checked line by line before anything runs.

use std::io::Read;
use std::path::{Path, PathBuf};

/// Where a prompt's tokens come from.
#[derive(Debug, Clone, PartialEq)]
pub enum PromptSource {
    /// Plain text, tokenized as it is.
    Text(String),
    /// A conversation, rendered with the checkpoint's chat template.
    Messages {
        /// Objects with `role` and `content`.
        messages: Vec<serde_json::Value>,
        /// The template's `enable_thinking`; its own default when `None`.
        enable_thinking: Option<bool>,
    },
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
    /// So many random ids of the model's vocabulary, by the run's seed and this stream.
    Random {
        /// How many.
        tokens: usize,
        /// Which of the run's streams of random ids.
        stream: u64,
    },
}

/// One prompt of the workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// What to continue.
    pub source: PromptSource,
    /// The user's name for it; empty when none was given.
    pub id: String,
    /// Tokens to generate, when it differs from the run's.
    pub max_new_tokens: Option<u32>,
    /// Tags as a JSON text, `{}` without any.
    pub tags: String,
    /// Where it was read, for errors: `file:line`, or `--prompt`.
    pub origin: String,
}

/// Why a workload cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// The file cannot be read.
    #[error("{path}: cannot read: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A line is not a prompt.
    #[error("{origin}: {message}")]
    Prompt {
        /// `file:line`, or `--prompt`.
        origin: String,
        /// What is wrong with it.
        message: String,
    },
    /// There is nothing to run.
    #[error("{path}: no prompts in it; give one JSON object a line with `prompt`, `messages` or `token_ids`", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

impl WorkloadError {
    /// An error of the prompt at `origin`.
    pub fn prompt(origin: &str, message: impl Into<String>) -> Self {
        Self::Prompt { origin: origin.to_owned(), message: message.into() }
    }
}

/// Largest prompts file.
const MAX_FILE: u64 = 256 << 20;
/// Most of an unknown key that an error repeats.
const SHOWN: usize = 40;
const KEYS: [&str; 7] = ["prompt", "messages", "token_ids", "id", "max_new_tokens", "tags", "enable_thinking"];

/// Reads a prompts file.
///
/// # Errors
/// When it cannot be read, has no prompts, or a line is not one; the line is named.
pub fn read(path: &Path) -> Result<Vec<Prompt>, WorkloadError> {
    let failed = |source| WorkloadError::Io { path: path.to_owned(), source };
    // A pipe is fine, a device without an end is not: what is read is bounded either way.
    let mut bytes = Vec::new();
    crate::trace::input_file::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(failed(std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("more than {MAX_FILE} bytes; split it"))));
    }
    parse(&bytes, path)
}

/// Prompts of the bytes of a file; `path` names it in errors. Blank lines are skipped.
///
/// # Errors
/// As [`read`].
pub fn parse(bytes: &[u8], path: &Path) -> Result<Vec<Prompt>, WorkloadError> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut prompts = Vec::new();
    for (number, line) in bytes.split(|&b| b == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let origin = format!("{}:{}", path.display(), number + 1);
        prompts.push(parse_line(line, &origin).map_err(|message| WorkloadError::Prompt { origin, message })?);
    }
    if prompts.is_empty() {
        return Err(WorkloadError::Empty { path: path.to_owned() });
    }
    Ok(prompts)
}

/// `requests` prompts of `tokens` random token ids.
pub fn random(tokens: usize, requests: usize) -> Vec<Prompt> {
    let prompt = |number: usize| Prompt {
        source: PromptSource::Random { tokens, stream: number as u64 },
        id: format!("random-{number}"),
        max_new_tokens: None,
        tags: "{}".to_owned(),
        origin: "--prompt-tokens".to_owned(),
    };
    (0..requests).map(prompt).collect()
}

/// Prompts of the command line's texts.
pub fn from_texts(texts: &[String]) -> Vec<Prompt> {
    let of = |text: &String| Prompt {
        source: PromptSource::Text(text.clone()),
        id: String::new(),
        max_new_tokens: None,
        tags: "{}".to_owned(),
        origin: "--prompt".to_owned(),
    };
    texts.iter().map(of).collect()
}

fn parse_line(line: &[u8], origin: &str) -> Result<Prompt, String> {
    use serde_json::Value;
    let text = std::str::from_utf8(line).map_err(|_| "not UTF-8 text".to_owned())?;
    let value: Value = serde_json::from_str(text).map_err(|e| format!("not JSON at column {}: {}", e.column(), reason(&e)))?;
    let Value::Object(mut object) = value else { return Err("not a JSON object".into()) };
    if let Some(key) = object.keys().find(|k| !KEYS.contains(&k.as_str())) {
        let shown: String = key.chars().take(SHOWN).collect();
        return Err(format!("unknown key `{}`; known are {}", shown.escape_debug(), KEYS.join(", ")));
    }
    let thinking = match object.remove("enable_thinking") {
        None => None,
        Some(Value::Bool(on)) => Some(on),
        Some(_) => return Err("`enable_thinking` must be true or false".into()),
    };
    let id = match object.remove("id") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(id)) => id,
        Some(Value::Number(id)) => id.to_string(),
        Some(_) => return Err("`id` must be a text or a number".into()),
    };
    let max_new_tokens = match object.remove("max_new_tokens") {
        None | Some(Value::Null) => None,
        Some(n) => Some(
            n.as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .filter(|&n| n > 0)
                .ok_or("`max_new_tokens` must be a whole number of 1 or more")?,
        ),
    };
    let tags = match object.remove("tags") {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(tags @ Value::Object(_)) => tags.to_string(),
        Some(Value::Array(words)) if words.iter().all(Value::is_string) => Value::Array(words).to_string(),
        Some(_) => return Err("`tags` must be an object or a list of texts".into()),
    };
    let mut sources = object.into_iter();
    let source = match (sources.next(), sources.next()) {
        (Some(only), None) => only,
        (None, _) => return Err("has none of `prompt`, `messages` and `token_ids`".into()),
        (Some((a, _)), Some((b, _))) => return Err(format!("has both `{a}` and `{b}`; give one of `prompt`, `messages` and `token_ids`")),
    };
    if thinking.is_some() && source.0 != "messages" {
        return Err("`enable_thinking` goes with `messages` only".into());
    }
    let source = match source {
        (key, Value::String(text)) if key == "prompt" => PromptSource::Text(text),
        (key, Value::Array(messages)) if key == "messages" => {
            check_messages(&messages)?;
            PromptSource::Messages { messages, enable_thinking: thinking }
        }
        (key, Value::Array(ids)) if key == "token_ids" => PromptSource::Tokens(token_ids(&ids)?),
        (key, _) if key == "prompt" => return Err("`prompt` must be a text".into()),
        (key, _) => return Err(format!("`{key}` must be a list")),
    };
    Ok(Prompt { source, id, max_new_tokens, tags, origin: origin.to_owned() })
}

fn check_messages(messages: &[serde_json::Value]) -> Result<(), String> {
    if messages.is_empty() {
        return Err("`messages` is empty".into());
    }
    for (i, message) in messages.iter().enumerate() {
        let object = message.as_object().ok_or_else(|| format!("message {i} is not an object"))?;
        if !object.get("role").is_some_and(|r| r.is_string()) {
            return Err(format!("message {i} has no text `role`"));
        }
        let called = object.contains_key("tool_calls");
        if !object.get("content").is_some_and(|c| c.is_string() || c.is_array() || (called && c.is_null())) && !called {
            return Err(format!("message {i} has no `content`"));
        }
    }
    Ok(())
}

fn token_ids(ids: &[serde_json::Value]) -> Result<Vec<u32>, String> {
    let id = |(i, v): (usize, &serde_json::Value)| {
        v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| format!("`token_ids[{i}]` is not a token id"))
    };
    ids.iter().enumerate().map(id).collect()
}

/// The parser's words without its own "at line 1 column 2", which would be taken for the file's line.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(line: &str) -> Result<Prompt, String> {
        parse(line.as_bytes(), Path::new("p.jsonl")).map(|mut p| p.remove(0)).map_err(|e| e.to_string())
    }

    #[test]
    fn all_three_kinds_are_read() {
        let text = "{\"prompt\": \"a\\nb\", \"id\": \"x\", \"max_new_tokens\": 5, \"tags\": {\"kind\": \"code\"}}\n\n\
                    {\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"enable_thinking\": false, \"tags\": [\"chat\"]}\r\n\
                    {\"token_ids\": [1, 2], \"id\": 7}";
        let prompts = parse(text.as_bytes(), Path::new("p.jsonl")).unwrap();
        assert_eq!(prompts[0].source, PromptSource::Text("a\nb".into()));
        assert_eq!((prompts[0].id.as_str(), prompts[0].max_new_tokens, prompts[0].tags.as_str()), ("x", Some(5), "{\"kind\":\"code\"}"));
        assert!(matches!(&prompts[1].source, PromptSource::Messages { messages, enable_thinking: Some(false) } if messages.len() == 1));
        assert_eq!((prompts[1].tags.as_str(), prompts[1].origin.as_str()), ("[\"chat\"]", "p.jsonl:3"));
        assert_eq!(prompts[2].source, PromptSource::Tokens(vec![1, 2]));
        assert_eq!((prompts[2].id.as_str(), prompts[2].tags.as_str()), ("7", "{}"));
    }

    #[test]
    fn errors_name_line_and_key() {
        let bad = |line: &str| one(line).unwrap_err();
        assert_eq!(
            bad("{\"prompt\": \"a\"}\n{\"promt\": 1}"),
            "p.jsonl:2: unknown key `promt`; known are prompt, messages, token_ids, id, max_new_tokens, tags, enable_thinking"
        );
        assert_eq!(
            bad("{\"prompt\": \"a\", \"token_ids\": [1]}"),
            "p.jsonl:1: has both `prompt` and `token_ids`; give one of `prompt`, `messages` and `token_ids`"
        );
        assert!(bad("{\"id\": 1}").contains("none of `prompt`"));
        assert!(bad("{\"prompt\": 5}").contains("`prompt` must be a text"));
        assert!(bad("{\"token_ids\": [1, -2]}").contains("`token_ids[1]`"));
        assert!(bad("{\"messages\": []}").contains("`messages` is empty"));
        assert!(bad("{\"messages\": [{\"content\": \"x\"}]}").contains("message 0 has no text `role`"));
        assert!(bad("{\"messages\": [{\"role\": \"user\"}]}").contains("message 0 has no `content`"));
        assert!(bad("{\"prompt\": \"a\", \"max_new_tokens\": 0}").contains("`max_new_tokens`"));
        assert!(bad("{\"prompt\": \"a\", \"tags\": 3}").contains("`tags`"));
        assert!(bad("{\"prompt\": \"a\", \"enable_thinking\": true}").contains("`messages` only"));
        assert!(bad("{\"prompt\": \"a\"").starts_with("p.jsonl:1: not JSON at column"));
        assert!(bad("[1]").contains("not a JSON object"));
        assert!(bad("\n \n").contains("no prompts"));
        assert!(parse(b"{\"prompt\": \"\xff\"}", Path::new("p")).unwrap_err().to_string().contains("p:1: not UTF-8"));
    }

    proptest! {
        #[test]
        fn any_bytes_give_prompts_or_one_line(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Err(e) = parse(&bytes, Path::new("p")) {
                prop_assert_eq!(e.to_string().lines().count(), 1);
            }
        }

        #[test]
        fn any_json_gives_prompts_or_one_line(key in prop::sample::select(KEYS.to_vec()), value in "[\\[{\"a-z0-9:,\\]} \\\\n-]{0,40}") {
            if let Err(e) = parse(format!("{{\"{key}\": {value}}}").as_bytes(), Path::new("p")) {
                prop_assert_eq!(e.to_string().lines().count(), 1);
            }
        }
    }
}
