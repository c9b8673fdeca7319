//! vLLM's responses, and streams of them.

use super::json_values::json_values_with;
use super::response::Response;
use super::sample::Run;
use super::{Flag, Head, ImportError, Importer, Options, Sink, flags, input, response_cut};
use std::path::{Path, PathBuf};

/// Longest line of a stream.
const MAX_LINE: u64 = input::MAX_VALUE_BYTES;

/// Responses of vLLM since 0.11: JSON, an array or lines of it, or a stream of server-sent events.
pub struct Vllm;

/// What to do about a file without routes.
const NOTHING: &str = "no routing in this file: start vLLM with --enable-return-routed-experts (and, for windows, \
                       --per-request-spec-decode-metrics detailed)";

impl Importer for Vllm {
    fn name(&self) -> &'static str {
        "vllm"
    }

    fn about(&self) -> &'static str {
        "vLLM responses (JSON, JSON lines, streams) with routed_experts and acceptance"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::IDS
    }

    fn sniff(&self, head: &Head) -> bool {
        if head.starts_with(b"data:") || head.starts_with(b"event:") {
            return head.has_key("choices");
        }
        let response = head.has_key("choices") || head.has_key("outputs") || head.has_key("routed_experts");
        let other = ["meta_info", "sglext", "sgl_ext", "timings", "traceEvents"].iter().any(|key| head.has_key(key));
        matches!(head.first(), Some(b'{' | b'[')) && response && !other
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        responses(inputs, "vllm", NOTHING, options, sink)
    }
}

/// Imports files of responses; `nothing` says what to do when there is nothing in them.
pub fn responses(inputs: &[PathBuf], engine: &'static str, nothing: &str, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let [first, ..] = inputs else { return Ok(()) };
    let mut run = Run::new(first, engine, options, sink);
    let (mut ids, mut keys, mut summary) = (false, false, None);
    for path in inputs {
        run.set_path(path);
        let mut take = |response: Response| {
            let response = response.unwrapped();
            let (some, named) = response.routing();
            (ids, keys) = (ids | some, keys | named);
            // Switched off is not the same as never asked for: acceptance alone is imported only in the latter case.
            let wanted = some || !named;
            response.each_sample(path, options, &mut |sample| {
                if !wanted {
                    return Ok(());
                }
                summary = summary.take().or_else(|| sample.acceptance.as_ref().map(|a| a.sentence()));
                run.add(sample)
            })
        };
        let head = Head::read(path)?;
        if head.starts_with(b"data:") || head.starts_with(b"event:") {
            stream(path, &mut take)?;
        } else {
            json_values_with(path, response_cut::parse, take)?;
        }
    }
    let nothing = match (keys && !ids, summary) {
        (true, _) => {
            "no routing in this file: routed_experts is null in every response (the feature was off, or the request was aborted)".into()
        }
        (false, Some(summary)) => format!("no routing in this file, and no windows: {summary}"),
        (false, None) => nothing.to_owned(),
    };
    run.finish(&nothing)
}

/// Puts the chunks of a stream together, one response after the other by their ids.
fn stream(path: &Path, take: &mut impl FnMut(Response) -> Result<(), ImportError>) -> Result<(), ImportError> {
    let mut lines = input::Lines::open(path)?;
    let mut open: Option<Response> = None;
    while let Some((number, line)) = lines.next(MAX_LINE)? {
        // Event names and comments are of no interest.
        let Some(data) = line.strip_prefix(b"data:") else { continue };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            open.take().map_or(Ok(()), &mut *take)?;
            continue;
        }
        let chunk: Response = response_cut::parse(data).map_err(|e| ImportError::input(path, format!("line {number}: not JSON: {e}")))?;
        let same = open.as_ref().is_none_or(|o| chunk.rest.get("id").is_none() || o.rest.get("id") == chunk.rest.get("id"));
        if !same {
            open.take().map_or(Ok(()), &mut *take)?;
        }
        open.get_or_insert_default().merge(chunk);
    }
    open.take().map_or(Ok(()), take)
}
