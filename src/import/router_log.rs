//! `moe_routes.jsonl`: the router logs of community patches to vLLM (`VLLM_LOG_MOE`).
//!
//! One object a token and layer. `token_idx` is the row in a forward pass and restarts with each of them: the restarts
//! are the only boundaries there are. `req_id` is constant and says nothing.

use super::events::{self, Source};
use super::input::Lines;
use super::rows::{DUMMY_RUN, Padding};
use super::{Flag, Head, ImportError, Importer, LayerAxis, Options, Sink, flags};
use crate::trace::manifest::{IdSpace, WindowCompleteness};
use crate::trace::{FinishReason, Module, Phase, StepRoutes};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const MAX_LINE: u64 = 1 << 20;
/// Rows of one forward pass that are kept in memory.
const MAX_ROWS: usize = 65_535;

/// Router logs.
pub struct RouterLog;

impl Importer for RouterLog {
    fn name(&self) -> &'static str {
        "router-log"
    }

    fn about(&self) -> &'static str {
        "router logs of patched vLLM (moe_routes.jsonl)"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::ROUTER_LOG
    }

    fn sniff(&self, head: &Head) -> bool {
        head.first() == Some(b'{') && head.has_key("topk_ids") && head.has_key("token_idx")
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        for path in inputs {
            Log::new(path, options, sink).read()?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Line {
    r#type: Option<String>,
    model_id: Option<String>,
    vllm_version: Option<String>,
    device: Option<String>,
    top_k: Option<u16>,
    num_experts: Option<u16>,
    token_idx: Option<u64>,
    layer: Option<u16>,
    topk_ids: Option<Vec<i32>>,
    topk_weights: Option<Vec<f32>>,
}

/// A token's choice in one layer.
#[derive(Debug, Clone, PartialEq)]
struct Choice {
    ids: Vec<u16>,
    weights: Vec<f32>,
}

/// A forward pass that is being collected: by layer, its rows.
#[derive(Debug, Default)]
struct Pass {
    layers: BTreeMap<u16, Vec<Choice>>,
    last: Option<(u16, u64)>,
}

struct Log<'a> {
    path: &'a Path,
    options: &'a Options,
    sink: &'a mut Sink,
    meta: Option<Line>,
    pass: Pass,
    request: Option<u32>,
    weights: bool,
    restarts: u64,
    /// Passes that are taken for windows.
    windows: u64,
    k: usize,
}

impl<'a> Log<'a> {
    fn new(path: &'a Path, options: &'a Options, sink: &'a mut Sink) -> Self {
        Self { path, options, sink, meta: None, pass: Pass::default(), request: None, weights: false, restarts: 0, windows: 0, k: 0 }
    }

    fn wrong(&self, line: u64, reason: impl std::fmt::Display) -> ImportError {
        ImportError::input(self.path, format!("line {line}: {reason}"))
    }

    fn read(mut self) -> Result<(), ImportError> {
        if matches!(self.options.layers, LayerAxis::All | LayerAxis::MoeOnly) {
            let reason = "--layers: a router log numbers its layers itself; say how many the model has, or which have a router";
            return Err(ImportError::input(self.path, reason));
        }
        let mut lines = Lines::open(self.path)?;
        while let Some((number, text)) = lines.next(MAX_LINE)? {
            let line: Line =
                serde_json::from_slice(text).map_err(|e| self.wrong(number, format!("not a JSON object of a router log: {e}")))?;
            match line.r#type.as_deref() {
                Some("meta") => {
                    self.options.experts_of(line.num_experts).map_err(|e| self.wrong(number, e))?;
                    self.options.k_of(line.top_k).map_err(|e| self.wrong(number, e))?;
                    self.meta = Some(line);
                }
                Some("route") | None => self.route(number, line)?,
                Some(_) => self.sink.leave_out("other_lines", 1, "of other kinds than `route` skipped"),
            }
        }
        self.end_pass()?;
        let Some(request) = self.request else {
            return Err(ImportError::empty(self.path, "no routes: every row is of a dummy batch (--keep-warmup keeps them)"));
        };
        if self.restarts == 0 {
            self.sink.warn("no_forwards", "token_idx never restarts: rows cannot be cut into forward passes, so there are no windows");
        } else if let (0, Some(drafts)) = (self.windows, self.options.draft_len) {
            let rows = u32::from(drafts) + 1;
            let message = format!("no forward pass has {rows} rows, as windows of --draft-len {drafts} would: there are no windows");
            self.sink.warn("no_windows_of_draft_len", message);
        } else {
            self.sink.warn(
                "batch_forwards",
                "windows are forward passes of whole batches, which the log does not tell from verify steps: unions are a batch's (--draft-len N \
                 takes only passes of N + 1 rows)",
            );
        }
        let asked_for_none = self.windows == 0 && self.options.draft_len.is_some();
        if let Some(facts) = self.sink.facts_mut().filter(|_| self.restarts > 0 && !asked_for_none) {
            facts.window_completeness = WindowCompleteness::Full;
        }
        self.sink.end_request(request, String::new(), 0, FinishReason::Unknown, "{}".into())
    }

    fn route(&mut self, number: u64, line: Line) -> Result<(), ImportError> {
        let (Some(token), Some(layer), Some(ids)) = (line.token_idx, line.layer, line.topk_ids) else {
            return Err(self.wrong(number, "a route needs `token_idx`, `layer` and `topk_ids`"));
        };
        let limit = self.experts().map_or(crate::trace::expert_set::MAX_EXPERTS, usize::from);
        let valid: Option<Vec<u16>> = ids.iter().map(|&id| u16::try_from(id).ok().filter(|&id| usize::from(id) < limit)).collect();
        let ids = valid.ok_or_else(|| self.wrong(number, format!("an id of {ids:?} is beyond {limit} experts")))?;
        if self.k == 0 {
            self.k = self.options.known_k().or(self.meta.as_ref().and_then(|m| m.top_k)).map_or(ids.len(), usize::from);
        }
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if ids.len() != self.k || sorted.len() != ids.len() {
            return Err(self.wrong(number, format!("{} distinct ids, {} experts per token are expected", sorted.len(), self.k)));
        }
        // A forward ends where its rows start again in a layer that had rows already.
        let restart = match self.pass.last {
            Some((before, last)) if before == layer => token <= last,
            Some(_) => self.pass.layers.get(&layer).is_some_and(|rows| rows.len() as u64 > token),
            None => false,
        };
        if restart {
            self.restarts += 1;
            self.end_pass()?;
        }
        let rows = self.pass.layers.entry(layer).or_default();
        if rows.len() >= MAX_ROWS {
            let reason =
                format!("more than {MAX_ROWS} rows without a restart of token_idx: the log does not say where forward passes begin");
            return Err(ImportError::input(self.path, format!("line {number}: {reason}")));
        }
        let weights = line.topk_weights.filter(|w| w.len() == ids.len()).unwrap_or_default();
        rows.push(Choice { ids, weights });
        self.pass.last = Some((layer, token));
        Ok(())
    }

    fn experts(&self) -> Option<u16> {
        self.options.known_experts().or_else(|| self.meta.as_ref()?.num_experts)
    }

    /// Writes the collected forward pass, without its dummy rows.
    fn end_pass(&mut self) -> Result<(), ImportError> {
        let mut layers = std::mem::take(&mut self.pass).layers;
        if layers.is_empty() {
            return Ok(());
        }
        let most = layers.values().map(Vec::len).max().unwrap_or(0);
        if layers.values().any(|rows| rows.len() != most) {
            self.sink.warn("uneven_layers", "some forward passes have other numbers of rows in other layers");
        }
        if !self.options.keep_padding {
            let (code, what) = Padding::Repeated.warning();
            for rows in layers.values_mut() {
                let before = rows.len();
                drop_runs(rows);
                self.sink.leave_out(code, (before - rows.len()) as u64, what);
            }
            layers.retain(|_, rows| !rows.is_empty());
        }
        let Some(rows) = layers.values().map(Vec::len).max() else { return Ok(()) };
        self.begin(&layers)?;
        let request = match self.request {
            Some(request) => request,
            None => *self.request.insert(self.sink.request_id()),
        };
        let window = self.options.draft_len.is_none_or(|n| usize::from(n) + 1 == rows);
        let phase = match rows {
            _ if self.restarts == 0 => Phase::Prefill,
            1 => Phase::Decode,
            _ if window => Phase::Verify,
            _ => Phase::Prefill,
        };
        self.windows += u64::from(phase == Phase::Verify);
        let mut step = events::step(request, phase, events::unknown_tokens(rows));
        if phase != Phase::Prefill {
            step.emitted_tokens = events::unknown_tokens(1);
        }
        step.routes = StepRoutes::new(self.k);
        for (layer, rows) in &layers {
            let ids: Vec<u16> = rows.iter().flat_map(|r| r.ids.iter().copied()).collect();
            let weights: Vec<f32> = if self.weights { rows.iter().flat_map(|r| r.weights.iter().copied()).collect() } else { Vec::new() };
            if self.weights && weights.len() != ids.len() {
                return Err(ImportError::input(self.path, format!("layer {layer}: some routes have `topk_weights` and some have not")));
            }
            step.routes.push(Module::Target, *layer, 0, &ids, &weights);
        }
        self.sink.step(step)?;
        Ok(())
    }

    fn begin(&mut self, layers: &BTreeMap<u16, Vec<Choice>>) -> Result<(), ImportError> {
        if self.sink.has_begun() {
            return Ok(());
        }
        // Layers are named by their numbers in the log; a list of the user's would renumber them.
        if let LayerAxis::List(list) = &self.options.layers
            && let Some(layer) = layers.keys().find(|l| !list.contains(l))
        {
            return Err(ImportError::input(self.path, format!("layer {layer} is not one of --layers")));
        }
        self.weights = layers.values().flatten().all(|choice| !choice.weights.is_empty());
        let meta = self.meta.as_ref();
        let version = meta.and_then(|m| m.vllm_version.clone()).map_or_else(String::new, |v| format!(" {v}"));
        let source = Source {
            engine: format!("vllm{version}"),
            model_name: meta.and_then(|m| m.model_id.clone()),
            device: meta.and_then(|m| m.device.clone()),
            k: u16::try_from(self.k).unwrap_or(u16::MAX),
            id_space: IdSpace::Logical,
            router_weights: self.weights,
            acceptance_known: false,
            ..Source::default()
        };
        let experts = self.experts();
        self.sink.begin(self.path, &source)?;
        if let (Some(experts), Some(facts)) = (experts, self.sink.facts_mut()) {
            facts.model.experts = experts;
            facts.model.experts_known = true;
        }
        Ok(())
    }
}

/// Drops runs of at least [`DUMMY_RUN`] identical ordered rows.
fn drop_runs(rows: &mut Vec<Choice>) {
    let mut keep = vec![true; rows.len()];
    let mut begin = 0;
    for at in 1..=rows.len() {
        if at < rows.len() && rows.get(at).map(|r| &r.ids) == rows.get(begin).map(|r| &r.ids) {
            continue;
        }
        if at - begin >= DUMMY_RUN {
            keep.get_mut(begin..at).unwrap_or_default().fill(false);
        }
        begin = at;
    }
    let mut kept = keep.into_iter();
    rows.retain(|_| kept.next().unwrap_or(true));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_go_and_what_is_between_them_stays() {
        let row = |id: u16| Choice { ids: vec![id, 9], weights: Vec::new() };
        let mut rows = vec![row(1); DUMMY_RUN];
        rows.push(row(2));
        rows.extend(vec![row(1); DUMMY_RUN - 1]);
        drop_runs(&mut rows);
        assert_eq!((rows.len(), rows[0].ids[0]), (DUMMY_RUN, 2));
    }
}
