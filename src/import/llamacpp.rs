//! Expert traces of llama.cpp's forks and proposals: seven encodings, told apart by how they begin.
//!
//! A `layer,expert` lines · B `pos,layer,id0,...` · C int32 records `layer, n_tokens, k, ids` · D a table `phase,token,layer,rank,expert`
//! · E a table `user_id,query_id,layer,token_pos,expert_0,...` · F `MOETRC01` · G JSON lines with `expert_ids` and `n_tokens`.

use super::events::{self, Source};
use super::llamacpp_read::{self as read, Block, Meta, Place};
use super::rows::{self, IdArray, Survey};
use super::strides::Strides;
use super::{Flag, Head, ImportError, Importer, Options, Sink, flags, vllm};
use crate::trace::manifest::{IdSpace, WindowCompleteness};
use crate::trace::{FinishReason, Phase, StepEvent, StepRoutes};
use std::path::{Path, PathBuf};

/// Rows of one step.
const STEP_ROWS: usize = 512;

/// Which encoding a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// `layer,expert` lines.
    A,
    /// `pos,layer,id0,...` lines; negative positions are the prompt's.
    B,
    /// Little-endian int32 records.
    C,
    /// A table with one row an expert.
    D,
    /// A table with one row a token and layer.
    E,
    /// `MOETRC01`.
    F,
    /// JSON lines.
    G,
    /// A response with `timings`: acceptance only.
    Timings,
}

impl Variant {
    /// The encoding of a file that begins like this.
    pub fn of(head: &Head) -> Option<Self> {
        if head.starts_with(b"MOETRC01") {
            return Some(Self::F);
        }
        if head.first() == Some(b'{') {
            if head.has_key("expert_ids") && head.has_key("n_tokens") {
                return Some(Self::G);
            }
            return (head.has_key("timings") && !head.has_key("traceEvents")).then_some(Self::Timings);
        }
        if let Some(line) = head.first_line() {
            let columns: Vec<&str> = line.split(',').map(str::trim).collect();
            match columns.as_slice() {
                ["phase", "token", "layer", "rank", "expert"] => return Some(Self::D),
                ["user_id", "query_id", "layer", "token_pos", first, ..] if first.starts_with("expert_") => return Some(Self::E),
                [_, _] if columns.iter().all(|c| c.parse::<u16>().is_ok()) => return Some(Self::A),
                [pos, rest @ ..] if rest.len() >= 2 && pos.parse::<i64>().is_ok() && rest.iter().all(|c| c.parse::<i32>().is_ok()) => {
                    return Some(Self::B);
                }
                _ => {}
            }
        }
        read::looks_like_records(&head.bytes).then_some(Self::C)
    }
}

/// llama.cpp's expert traces.
pub struct LlamaCpp;

impl Importer for LlamaCpp {
    fn name(&self) -> &'static str {
        "llamacpp"
    }

    fn about(&self) -> &'static str {
        "expert traces of llama.cpp's forks, seven encodings"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::TRACE
    }

    fn sniff(&self, head: &Head) -> bool {
        Variant::of(head).is_some()
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        for path in inputs {
            let head = Head::read(path)?;
            let unknown = || ImportError::input(path, "not an expert trace of llama.cpp in an encoding that is known here");
            match Variant::of(&head).ok_or_else(unknown)? {
                Variant::Timings => {
                    let nothing = "no routing in this file: llama.cpp's responses do not have any";
                    vllm::responses(std::slice::from_ref(path), "llama.cpp", nothing, options, sink)?;
                }
                variant => {
                    if matches!(variant, Variant::B | Variant::D | Variant::E | Variant::F) {
                        let told: Vec<_> = flags::TRACE.iter().copied().filter(|&flag| flag != Flag::PromptTokens).collect();
                        flags::check(path, "a trace that tells its prompts itself", &told, options)?;
                    }
                    Trace::new(path, variant, options, sink).import()?;
                }
            }
        }
        Ok(())
    }
}

/// A forward pass, as its layers came.
#[derive(Debug, Default)]
struct Pass {
    blocks: Vec<Block>,
}

impl Pass {
    fn rows(&self) -> usize {
        self.blocks.iter().map(Block::rows).max().unwrap_or(0)
    }
}

struct Trace<'a> {
    path: &'a Path,
    variant: Variant,
    options: &'a Options,
    sink: &'a mut Sink,
    meta: Meta,
    k: usize,
    request: Option<u32>,
    /// User's and query's name of the request that is open (E).
    name: String,
    /// Layers of a pass, in its order.
    order: Vec<u16>,
    /// Rows of the request so far.
    at: usize,
    prompt_rows: usize,
    /// Whether a pass of one row came: what has several rows afterwards is another prompt or a window.
    decoding: bool,
    windows: u64,
    strides: Strides,
}

impl<'a> Trace<'a> {
    fn new(path: &'a Path, variant: Variant, options: &'a Options, sink: &'a mut Sink) -> Self {
        Self {
            path,
            variant,
            options,
            sink,
            meta: Meta::default(),
            k: 0,
            request: None,
            name: String::new(),
            order: Vec::new(),
            at: 0,
            prompt_rows: 0,
            decoding: false,
            windows: 0,
            strides: Strides::default(),
        }
    }

    fn wrong(&self, reason: impl Into<String>) -> ImportError {
        ImportError::input(self.path, reason)
    }

    fn import(mut self) -> Result<(), ImportError> {
        let mut pass = Pass::default();
        let mut reader = read::Reader::open(self.path, self.variant, self.options.known_k())?;
        self.meta = reader.meta.clone();
        while let Some(block) = reader.next()? {
            if self.name != block.request {
                self.end_pass(std::mem::take(&mut pass))?;
                self.end_request()?;
                self.name.clone_from(&block.request);
            }
            // A pass goes through the layers upwards, each once; a table of single rows builds a layer up row by row.
            let again = pass.blocks.iter().any(|b| b.layer == block.layer) || pass.blocks.last().is_some_and(|b| block.layer < b.layer);
            if again || pass.blocks.last().is_some_and(|b| b.place != block.place) {
                let before = std::mem::take(&mut pass);
                self.same_layers(&before, &reader.place())?;
                self.end_pass(before)?;
            }
            pass.blocks.push(block);
        }
        if self.whole() && pass.blocks.len() < self.order.len() && pass.blocks.iter().zip(&self.order).all(|(b, l)| b.layer == *l) {
            self.sink.leave_out("last_pass_cut", pass.rows() as u64, "left out: the last pass ends before its last layer");
        } else {
            self.same_layers(&pass, "the end")?;
            self.end_pass(pass)?;
        }
        self.end_request()?;
        if !self.sink.has_begun() {
            return Err(ImportError::empty(self.path, "no routes in this trace"));
        }
        if self.strides.suspicious(self.options.known_experts().or(self.meta.experts)) {
            self.sink.warn(
                "read_with_wrong_strides",
                "rows of one pass never share an expert, which is no accident: the trace tool has read a strided view as contiguous, all \
                 rows but the first of each pass are wrong (update the tool)",
            );
        }
        let whole = self.whole();
        if !whole {
            self.sink.warn("no_forwards", "this encoding does not say which rows were computed together: no windows can be told");
        }
        let (windows, meta) = (self.windows, self.meta);
        if let Some(facts) = self.sink.facts_mut() {
            facts.window_completeness = if whole { WindowCompleteness::Full } else { WindowCompleteness::None };
            facts.acceptance_known = windows == 0;
            if facts.model.architecture == "unknown"
                && let Some(architecture) = meta.architecture
            {
                facts.model.architecture = architecture;
            }
            if let Some(layers) = meta.layers {
                facts.model.layers = facts.model.layers.max(layers);
            }
        }
        Ok(())
    }

    /// Whether the encoding says which rows were computed together.
    fn whole(&self) -> bool {
        matches!(self.variant, Variant::C | Variant::F | Variant::G)
    }

    /// Refuses a pass that has other layers than the first: records are missing, doubled or out of order, and whose rows follow
    /// nobody can say. Of encodings without passes, layers come as they are.
    fn same_layers(&mut self, pass: &Pass, end: &str) -> Result<(), ImportError> {
        let layers = || pass.blocks.iter().map(|b| b.layer);
        if !self.whole() || pass.blocks.is_empty() {
            return Ok(());
        }
        if self.order.is_empty() {
            self.order = layers().collect();
        }
        if layers().eq(self.order.iter().copied()) {
            return Ok(());
        }
        let list = |layers: &[u16]| {
            let shown: Vec<String> = layers.iter().take(8).map(u16::to_string).collect();
            format!("{}{}", shown.join(", "), if layers.len() > 8 { ", ..." } else { "" })
        };
        Err(self.wrong(format!(
            "the pass before {end} has the layers {}, the first pass {}: a record is missing, doubled or out of order",
            list(&layers().collect::<Vec<_>>()),
            list(&self.order)
        )))
    }

    /// What a pass of so many rows was.
    fn phase(&self, pass: &Pass) -> Result<Phase, ImportError> {
        let rows = pass.rows();
        match pass.blocks.first().map(|b| b.place) {
            Some(Place::Prompt) => return Ok(Phase::Prefill),
            Some(Place::Generated) if rows == 1 || !self.whole() => return Ok(Phase::Decode),
            // A fork that marks phases has told the prompt apart: what is left and has drafts is a window.
            Some(Place::Generated) => return Ok(Phase::Verify),
            _ => {}
        }
        if let Some(prompt) = self.options.prompt_tokens {
            return Ok(match rows {
                _ if self.at < prompt as usize => Phase::Prefill,
                1 => Phase::Decode,
                _ => Phase::Verify,
            });
        }
        match rows {
            1 => Ok(Phase::Decode),
            _ if !self.decoding => Ok(Phase::Prefill),
            _ => Err(self.wrong(format!(
                "a pass of {rows} rows after passes of one: another prompt, or a verify window? give --prompt-tokens N of its one request"
            ))),
        }
    }

    fn end_pass(&mut self, pass: Pass) -> Result<(), ImportError> {
        if pass.blocks.is_empty() {
            return Ok(());
        }
        let phase = self.phase(&pass)?;
        let rows = pass.rows();
        self.begin(&pass)?;
        let request = match self.request {
            Some(request) => request,
            None => *self.request.insert(self.sink.request_id()),
        };
        let mut from = 0;
        while from < rows {
            // A prompt may be cut, windows stay whole.
            let n = match phase {
                Phase::Prefill => (rows - from).min(STEP_ROWS),
                Phase::Decode => 1,
                Phase::Verify => rows,
            };
            let mut step = events::step(request, phase, events::unknown_tokens(n));
            step.context_len = u32::try_from(self.at + from).unwrap_or(u32::MAX);
            if phase != Phase::Prefill {
                step.emitted_tokens = events::unknown_tokens(1);
            }
            self.routes(&mut step, &pass, rows, from)?;
            self.sink.step(step)?;
            from += n;
        }
        self.at += rows;
        match phase {
            Phase::Prefill => self.prompt_rows += rows,
            Phase::Decode => self.decoding = true,
            Phase::Verify => self.windows += 1,
        }
        Ok(())
    }

    /// Adds the rows `from..` of a pass to a step. The last layer may have only the rows whose logits were wanted: the last ones.
    fn routes(&mut self, step: &mut StepEvent, pass: &Pass, rows: usize, from: usize) -> Result<(), ImportError> {
        let to = from + step.rows();
        step.routes = StepRoutes::new(self.k);
        for block in &pass.blocks {
            let array = IdArray::new(block.rows(), 1, block.k, block.ids.clone()).map_err(|e| self.wrong(e))?;
            let survey = Survey { padding: vec![None; array.rows], routed: vec![true], k: self.k, largest: 0 };
            let offset = rows - array.rows;
            if offset > 0 {
                self.sink.warn("last_layer_rows", "the last layer has only the rows whose outputs were wanted");
            }
            let (first, last) = (from.max(offset), to.max(offset));
            let mut part = StepRoutes::new(self.k);
            rows::push(&mut part, &array, &survey, first - offset..last - offset, &[block.layer], &[true], self.sink);
            let shift = u16::try_from(first - from).unwrap_or(u16::MAX);
            let mut ids = part.ids.chunks_exact(self.k.max(1));
            for run in part.blocks {
                let own: Vec<u16> = ids.by_ref().take(usize::from(run.rows)).flatten().copied().collect();
                step.routes.push(run.module, run.layer, run.first_row.saturating_add(shift), &own, &[]);
            }
        }
        Ok(())
    }

    fn begin(&mut self, pass: &Pass) -> Result<(), ImportError> {
        let experts = self.options.experts_of(self.meta.experts).map_err(|e| self.wrong(e))?;
        let limit = experts.map_or(crate::trace::expert_set::MAX_EXPERTS as i32, i32::from);
        if let Some(id) = pass.blocks.iter().flat_map(|b| &b.ids).find(|&&id| id >= limit) {
            return Err(self.wrong(format!("an id is {id}, beyond {limit} experts")));
        }
        if self.variant == Variant::A {
            pass.blocks.iter().for_each(|block| self.strides.see(block));
        }
        if self.sink.has_begun() {
            self.k = self.sink.facts_mut().map_or(0, |f| usize::from(f.model.experts_per_token));
            return match pass.blocks.iter().find(|b| b.k != self.k) {
                Some(other) => {
                    Err(self.wrong(format!("rows of {} experts in layer {}, those before have {}", other.k, other.layer, self.k)))
                }
                None => Ok(()),
            };
        }
        self.k = pass.blocks.first().map_or(0, |b| b.k);
        let source = Source {
            engine: "llama.cpp".into(),
            model_name: self.meta.model.clone(),
            k: u16::try_from(self.k).unwrap_or(u16::MAX),
            id_space: IdSpace::Logical,
            ..Source::default()
        };
        self.sink.begin(self.path, &source)?;
        if let (Some(experts), Some(facts)) = (experts, self.sink.facts_mut()) {
            facts.model.experts = experts;
            facts.model.experts_known = true;
        }
        Ok(())
    }

    fn end_request(&mut self) -> Result<(), ImportError> {
        let Some(request) = self.request.take() else { return Ok(()) };
        let prompt = u32::try_from(std::mem::take(&mut self.prompt_rows)).unwrap_or(u32::MAX);
        (self.at, self.decoding) = (0, false);
        self.sink.end_request(request, self.name.clone(), prompt, FinishReason::Unknown, "{}".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_told_apart_by_their_beginning() {
        let of = |bytes: &[u8]| Variant::of(&Head { path: "x".into(), directory: false, bytes: bytes.to_vec() });
        assert_eq!(of(b"1,28\n1,29\n"), Some(Variant::A));
        assert_eq!(of(b"-4,1,28,29\n"), Some(Variant::B));
        assert_eq!(of(b"phase,token,layer,rank,expert\n"), Some(Variant::D));
        assert_eq!(of(b"user_id,query_id,layer,token_pos,expert_0\n"), Some(Variant::E));
        assert_eq!(of(b"MOETRC01...."), Some(Variant::F));
        assert_eq!(of(b"{\"layer\":1,\"n_tokens\":1,\"expert_ids\":[1]}"), Some(Variant::G));
        assert_eq!(of(&[1i32, 1, 2, 5, 6].map(i32::to_le_bytes).concat()), Some(Variant::C));
        assert_eq!(of(b"plain text, with a comma\n"), None);
        assert_eq!(of(&[0; 64]), None);
        assert_eq!(of(b""), None);
    }
}
