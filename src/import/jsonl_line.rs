//! The lines of `specprof.jsonl/1` as they stand in the file. `docs/jsonl.md` describes them.

use super::jsonl_table::{Number, Table};
use crate::trace::Module;
use crate::trace::kernel::{Component, KernelEvent};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::borrow::Cow;

/// The type of a line that begins with it, as almost all lines do; `None` where it stands elsewhere.
pub fn kind_at_begin(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"{")?.trim_ascii_start().strip_prefix(b"\"type\"")?;
    let word = rest.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"\"")?;
    let end = word.iter().position(|&b| b == b'"')?;
    word.get(..end).filter(|word| !word.contains(&b'\\'))
}

/// A request's number, or its name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum RequestKey {
    /// The trace's own number.
    Number(u32),
    /// A name, to be numbered.
    Name(String),
}

/// One forward pass. `docs/jsonl.md` says what each key means.
#[derive(Debug, Deserialize)]
pub struct StepLine {
    /// Read already; here so that a second one is an error.
    #[serde(rename = "type")]
    pub _kind: Option<IgnoredAny>,
    pub request_id: RequestKey,
    pub tokens: Vec<u32>,
    pub phase: Option<String>,
    pub accepted: Option<u16>,
    #[serde(default)]
    pub emitted: Option<Vec<u32>>,
    #[serde(default)]
    pub routes: Table<u16>,
    #[serde(default)]
    pub weights: Table<Number>,
    pub step_id: Option<u32>,
    pub context_len: Option<u32>,
    pub parents: Option<Vec<i16>>,
    pub draft_probs: Option<Vec<Number>>,
    pub draft_confidences: Option<Vec<Number>>,
    pub pass_id: Option<u32>,
    pub begin_ns: Option<i64>,
    pub end_ns: Option<i64>,
    pub draft_ns: Option<i64>,
    pub target_ns: Option<i64>,
    pub device_ns: Option<i64>,
    #[serde(default)]
    pub draft_routes: Option<Vec<(u16, u16, Vec<Vec<u16>>)>>,
    #[serde(default)]
    pub draft_weights: Option<Vec<Vec<Vec<Number>>>>,
}

/// The end of a request. `docs/jsonl.md` says what each key means.
#[derive(Debug, Deserialize)]
pub struct RequestLine {
    pub request_id: RequestKey,
    pub id: Option<String>,
    pub prompt_tokens: Option<u32>,
    pub generated_tokens: Option<u32>,
    pub finish_reason: Option<String>,
    pub tags: Option<Value>,
    pub prompt_text: Option<String>,
    pub output_text: Option<String>,
}

/// A kernel launch, or an operation of the CPU engine. `docs/jsonl.md` says what each key means.
#[derive(Debug, Deserialize)]
pub struct KernelLine<'a> {
    /// As in [`StepLine`].
    #[serde(rename = "type")]
    pub _kind: Option<IgnoredAny>,
    pub step_id: u32,
    pub layer: Option<u16>,
    #[serde(borrow)]
    pub module: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub component: Cow<'a, str>,
    pub name: Option<String>,
    pub stream: Option<u32>,
    pub begin_ns: i64,
    pub end_ns: i64,
    pub correlation_id: Option<u64>,
    pub graph_node_id: Option<u64>,
    pub grid: Option<[u32; 3]>,
    pub block: Option<[u32; 3]>,
    pub registers: Option<u32>,
    pub shared_bytes: Option<u32>,
}

impl KernelLine<'_> {
    /// The event.
    ///
    /// # Errors
    /// A sentence when a word is none of the format's.
    pub fn event(self) -> Result<KernelEvent, String> {
        let word = self.module.as_deref().unwrap_or(Module::Target.as_str());
        let module = Module::parse(word).ok_or_else(|| format!("`{}` is not a module", word.escape_debug()))?;
        let component =
            Component::parse(&self.component).ok_or_else(|| format!("`{}` is not a component", self.component.escape_debug()))?;
        Ok(KernelEvent {
            layer: self.layer,
            module,
            component,
            name: self.name.map_or(Cow::Borrowed(component.as_str()), Cow::Owned),
            stream: self.stream,
            begin_ns: self.begin_ns,
            end_ns: self.end_ns,
            correlation_id: self.correlation_id,
            graph_node_id: self.graph_node_id,
            grid: self.grid,
            block: self.block,
            registers: self.registers,
            shared_bytes: self.shared_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_is_read_where_it_stands_first() {
        for line in [r#"{"type":"step","a":1}"#, "{ \"type\" : \"step\" }"] {
            assert_eq!(kind_at_begin(line.as_bytes()), Some(&b"step"[..]));
        }
        for line in [r#"{"a":1,"type":"step"}"#, r#"{"type":1}"#, r#"{"type":"st\u0065p"}"#, r#"{"type":"step"#, "[]", ""] {
            assert_eq!(kind_at_begin(line.as_bytes()), None, "{line}");
        }
        let twice = r#"{"type":"step","request_id":0,"tokens":[1],"type":"kernel"}"#;
        assert!(serde_json::from_str::<StepLine>(twice).unwrap_err().to_string().contains("duplicate"));
    }

    #[test]
    fn what_a_kernel_line_leaves_out_is_unknown() {
        let event = |json: &str| serde_json::from_str::<KernelLine<'_>>(json).map_err(|e| e.to_string()).and_then(KernelLine::event);
        let k = event(r#"{"step_id":3,"component":"experts","begin_ns":5,"end_ns":9}"#).unwrap();
        assert_eq!((k.module, k.component, k.name.as_ref(), k.layer, k.grid), (Module::Target, Component::Experts, "experts", None, None));
        assert!(event(r#"{"step_id":3,"component":"soup","begin_ns":5,"end_ns":9}"#).unwrap_err().contains("`soup`"));
        assert!(
            event(r#"{"step_id":3,"component":"mla","module":"m","begin_ns":5,"end_ns":9}"#).unwrap_err().contains("`m` is not a module")
        );
        assert!(event(r#"{"step_id":3,"component":"mla","begin_ns":5}"#).unwrap_err().contains("end_ns"));
    }
}
