//! Runs a drafter beside its target over the steps of a golden set and compares every tensor that the set names.
//!
//! The timeline is the file's: its anchors, verify rows and accepted counts are what the two models are fed, and our own are
//! compared with them. A first difference therefore shows where it arises and is not carried into later steps.
//!
//! Tolerances are those of `f32` engines against `f64` references, end to end; ids and tokens are exact. A wrong formula moves
//! the drafter's rows by 1.5 and more.

use super::{Dspark, DsparkCheckpoint, DsparkConfig};
use crate::engine::golden_checks::{Checks, GoldenReport};
use crate::engine::golden_file::{GoldenFile, Values};
use crate::engine::route_tap::TappedRows;
use crate::engine::sampling::argmax;
use crate::engine::tap::BlockParts;
use crate::engine::{Checkpoint, EngineError, ForwardTap, LogitRows, NoTap, Session, verify};
use crate::trace::Module;
use std::path::Path;

const TAPS: f64 = 1e-3;
const FEATURES: f64 = 1e-4;
const CONTEXT: f64 = 2e-4;
const BLOCK: f64 = 1e-3;
const BLOCK_OUTPUT: f64 = 3e-4;
const LOGITS: f64 = 5e-4;
const CONFIDENCE: f64 = 2e-4;
/// Below this margin between the last chosen and the first refused expert, a rejected row may be routed otherwise.
const ROUTER_MARGIN: f32 = 1e-4;
/// Rows of a prefill pass: small, so that a prompt is cut.
const CHUNK: usize = 32;

/// Runs the steps of the golden file `path` and compares.
///
/// # Errors
/// When the file cannot be read, does not fit the models (shapes, ids), or they cannot run it.
pub fn compare(drafter: &DsparkCheckpoint, target: &Checkpoint, path: &Path) -> Result<GoldenReport, EngineError> {
    let file = GoldenFile::read(path)?;
    let steps = Steps::read(&file, &drafter.config)?;
    let mut run = Run::new(&file, drafter, target, &steps);
    run.prompt()?;
    for step in 0..steps.accepted.len() {
        run.step(step)?;
    }
    run.compare()?;
    run.plain_decoding()?;
    let tokens = run.session.len();
    Ok(run.checks.report(tokens, steps.prompt.len(), |name| match name {
        "prompt" => None,
        "draft_margin" | "verify_router_margin" => Some("the reference's own margins, an input to its design"),
        _ if name.starts_with("conf") => Some("the drafter has no confidence head"),
        _ => Some("unknown name"),
    }))
}

/// What a golden set feeds the models: S steps of D drafts.
struct Steps {
    /// `[P]`
    prompt: Vec<u32>,
    /// `[S]`
    anchors: Vec<u32>,
    /// `[S, D + 1]`
    windows: Vec<u32>,
    /// `[S]`, each 0...D.
    accepted: Vec<usize>,
    /// `[S, D + 1]`; empty when the set has none.
    router_margins: Vec<f32>,
}

impl Steps {
    fn read(file: &GoldenFile, config: &DsparkConfig) -> Result<Self, EngineError> {
        let tokens = |name: &str| file.tokens(name)?.ok_or_else(|| file.wrong(&format!("has no tensor `{name}`")));
        let (prompt, anchors, windows) = (tokens("prompt")?, tokens("step_anchor")?, tokens("verify_ids")?);
        let accepted: Vec<usize> = tokens("accepted")?.into_iter().map(|n| n as usize).collect();
        let drafts = config.drafts();
        if prompt.is_empty() || accepted.len() != anchors.len() || windows.len() != anchors.len() * (drafts + 1) {
            let reason = format!(
                "`prompt`, `step_anchor`, `verify_ids` and `accepted` are not those of a drafter of {drafts} drafts; is it the drafter of this set?"
            );
            return Err(file.wrong(&reason));
        }
        if let Some(step) = accepted.iter().position(|&n| n > drafts) {
            return Err(file.wrong(&format!("`accepted` of step {step} is {}, more than its {drafts} drafts", accepted[step])));
        }
        let router_margins = match file.tensors.get("verify_router_margin").map(|t| &t.values) {
            None => Vec::new(),
            Some(Values::F32(margins)) if margins.len() == windows.len() => margins.clone(),
            Some(_) => return Err(file.wrong("`verify_router_margin` must be F32 and have a number for each row")),
        };
        Ok(Self { prompt, anchors, windows, accepted, router_margins })
    }

    /// The rows of a step's window.
    fn window(&self, step: usize) -> &[u32] {
        let rows = self.windows.len() / self.accepted.len().max(1);
        &self.windows[step * rows..][..rows]
    }
}

/// Collects tapped layers of the target and the inner rows of the drafter.
struct Capture {
    tapped: TappedRows,
    /// By layer, `[S, g, H]`.
    mid: Vec<Vec<f32>>,
    output: Vec<Vec<f32>>,
    /// Queries, keys, values and mixed values of layer 0 in the first block.
    first: Option<[Vec<f32>; 4]>,
}

impl ForwardTap for Capture {
    fn attended(&mut self, layer: usize, parts: BlockParts<'_>) {
        if layer == 0 && self.first.is_none() {
            self.first = Some([parts.queries, parts.keys, parts.values, parts.mixed].map(<[f32]>::to_vec));
        }
    }

    fn after_attention(&mut self, module: Module, layer: usize, rows: &[f32]) {
        if let (Module::Draft, Some(mid)) = (module, self.mid.get_mut(layer)) {
            mid.extend_from_slice(rows);
        }
    }

    fn after_layer(&mut self, module: Module, layer: usize, rows: &[f32]) {
        match module {
            Module::Target => self.tapped.put(layer, rows),
            Module::Draft => {
                if let Some(output) = self.output.get_mut(layer) {
                    output.extend_from_slice(rows);
                }
            }
        }
    }
}

/// Our own numbers, step after step.
#[derive(Default)]
struct Ours {
    prompt_logits: Vec<f32>,
    taps: Vec<f32>,
    features: Vec<f32>,
    context_lens: Vec<i32>,
    block_ids: Vec<i32>,
    block_positions: Vec<i32>,
    block_hidden: Vec<f32>,
    base_logits: Vec<f32>,
    corrected: Vec<f32>,
    confidence_logits: Vec<f32>,
    confidences: Vec<f32>,
    previous: Vec<i32>,
    drafts: Vec<i32>,
    windows: Vec<i32>,
    verify_logits: Vec<f32>,
    verify_argmax: Vec<i32>,
    accepted: Vec<i32>,
    /// The first anchor, then the bonus of each step.
    chosen: Vec<i32>,
    committed: Vec<i32>,
}

struct Run<'a> {
    checks: Checks<'a>,
    steps: &'a Steps,
    config: &'a DsparkConfig,
    target: &'a Checkpoint,
    session: Session<'a>,
    dspark: Dspark<'a>,
    capture: Capture,
    ours: Ours,
}

fn signed(id: u32) -> i32 {
    i32::try_from(id).unwrap_or(-1)
}

impl<'a> Run<'a> {
    fn new(file: &'a GoldenFile, drafter: &'a DsparkCheckpoint, target: &'a Checkpoint, steps: &'a Steps) -> Self {
        let config = &drafter.config;
        let layers = || vec![Vec::new(); config.layers];
        Self {
            checks: Checks::new(file),
            steps,
            config,
            target,
            session: Session::new(&target.config, &target.weights),
            dspark: Dspark::new(drafter, &target.config, &target.weights),
            capture: Capture { tapped: TappedRows::new(&config.taps, config.hidden), mid: layers(), output: layers(), first: None },
            ours: Ours::default(),
        }
    }

    /// Makes the first `rows` rows of the target's last pass context.
    fn inject(&mut self, rows: usize) -> Result<(), EngineError> {
        let taps = &self.capture.tapped.rows()[..rows * self.config.taps.len() * self.config.hidden];
        self.ours.taps.extend_from_slice(taps);
        self.ours.features.extend_from_slice(self.dspark.inject(taps, &mut NoTap)?);
        Ok(())
    }

    fn prompt(&mut self) -> Result<(), EngineError> {
        let prompt = &self.steps.prompt;
        for chunk in prompt.chunks(CHUNK) {
            let forward = self.session.forward(chunk, LogitRows::Last, &mut self.capture)?;
            self.ours.prompt_logits.clear();
            self.ours.prompt_logits.extend_from_slice(forward.logits);
            self.session.commit(chunk.len());
            self.inject(chunk.len())?;
        }
        self.ours.committed.extend(prompt.iter().map(|&id| signed(id)));
        let anchor = signed(argmax(&self.ours.prompt_logits));
        self.ours.chosen.push(anchor);
        self.ours.committed.push(anchor);
        Ok(())
    }

    fn step(&mut self, step: usize) -> Result<(), EngineError> {
        let (anchor, context) = (self.steps.anchors[step], self.session.len());
        self.draft(anchor, context)?;
        let window = self.steps.window(step);
        let forward = self.session.forward(window, LogitRows::All, &mut self.capture)?;
        let best: Vec<u32> = forward.logits.chunks_exact(self.config.vocab).map(argmax).collect();
        self.ours.verify_logits.extend_from_slice(forward.logits);
        self.ours.verify_argmax.extend(best.iter().map(|&id| signed(id)));
        let verdict = verify::greedy(&window[1..], &best);
        self.ours.accepted.push(i32::try_from(verdict.accepted).unwrap_or(i32::MAX));
        self.ours.chosen.push(signed(verdict.next));
        self.ours.committed.extend(window[1..=verdict.accepted].iter().map(|&id| signed(id)));
        self.ours.committed.push(signed(verdict.next));
        let kept = self.steps.accepted[step] + 1;
        self.session.commit(kept);
        self.inject(kept)
    }

    /// The block of a step and the chain of drafts that comes of it.
    fn draft(&mut self, anchor: u32, context: usize) -> Result<(), EngineError> {
        let (ours, size) = (&mut self.ours, self.config.block_size);
        let position = |at: usize| i32::try_from(at).unwrap_or(i32::MAX);
        ours.context_lens.push(position(context));
        let block = self.dspark.block(anchor, 0..size, &mut self.capture)?;
        ours.block_ids.extend(block.ids.iter().map(|&id| signed(id)));
        ours.block_positions.extend((context..context + size).map(position));
        ours.block_hidden.extend_from_slice(block.hidden);
        ours.base_logits.extend_from_slice(block.logits);
        let mut previous = anchor;
        ours.windows.push(signed(anchor));
        for draft in 0..self.config.drafts() {
            ours.previous.push(signed(previous));
            let corrected = self.dspark.correct(draft, draft + self.config.first_row(), previous)?;
            ours.corrected.extend_from_slice(corrected.logits);
            ours.confidence_logits.extend(corrected.confidence_logit);
            ours.confidences.extend(corrected.confidence());
            previous = argmax(corrected.logits);
            ours.drafts.push(signed(previous));
            ours.windows.push(signed(previous));
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), EngineError> {
        let (config, ours, checks) = (self.config, &self.ours, &mut self.checks);
        let (steps, size, drafts) = (self.steps.accepted.len(), config.block_size, config.drafts());
        let (width, vocab, tokens) = (config.hidden, config.vocab, self.dspark.len());
        checks.floats("prompt_logits", &[vocab], &ours.prompt_logits, LOGITS)?;
        checks.floats("taps", &[tokens, config.taps.len(), width], &ours.taps, TAPS)?;
        checks.floats("z", &[tokens, width], &ours.features, FEATURES)?;
        for layer in 0..config.layers {
            if let Some((keys, values)) = self.dspark.context(layer) {
                let shape = [tokens, config.kv_heads, config.head_dim];
                checks.floats(&format!("ctx_k.{layer}"), &shape, keys, CONTEXT)?;
                checks.floats(&format!("ctx_v.{layer}"), &shape, values, CONTEXT)?;
            }
            let block = [steps, size, width];
            checks.floats(&format!("block_mid.{layer}"), &block, &self.capture.mid[layer], BLOCK)?;
            checks.floats(&format!("block_h.{layer}"), &block, &self.capture.output[layer], BLOCK)?;
        }
        if let Some([queries, keys, values, mixed]) = &self.capture.first {
            let of = |heads| [size, heads, config.head_dim];
            checks.floats("s0_q", &of(config.heads), queries, CONTEXT)?;
            checks.floats("s0_k", &of(config.kv_heads), keys, CONTEXT)?;
            checks.floats("s0_v", &of(config.kv_heads), values, CONTEXT)?;
            checks.floats("s0_attn", &[size, config.query_width()], mixed, CONTEXT)?;
        }
        checks.floats("block_r", &[steps, size, width], &ours.block_hidden, BLOCK_OUTPUT)?;
        checks.floats("base_logits", &[steps, size, vocab], &ours.base_logits, LOGITS)?;
        checks.floats("corrected_logits", &[steps, drafts, vocab], &ours.corrected, LOGITS)?;
        if !ours.confidences.is_empty() {
            checks.floats("conf_logit", &[steps, drafts], &ours.confidence_logits, CONFIDENCE)?;
            checks.floats("confidence", &[steps, drafts], &ours.confidences, CONFIDENCE)?;
        }
        checks.ints("step_n", &[steps], &ours.context_lens)?;
        checks.ints("step_anchor", &[steps], &ours.chosen[..steps])?;
        checks.ints("bonus", &[steps], &ours.chosen[1..])?;
        checks.ints("block_ids", &[steps, size], &ours.block_ids)?;
        checks.ints("block_positions", &[steps, size], &ours.block_positions)?;
        checks.ints("markov_prev", &[steps, drafts], &ours.previous)?;
        checks.ints("drafts", &[steps, drafts], &ours.drafts)?;
        checks.ints("verify_ids", &[steps, drafts + 1], &ours.windows)?;
        checks.ints("accepted", &[steps], &ours.accepted)?;
        // A rejected row may be routed otherwise where two experts are as good as equal; kept rows have a margin by design.
        let kept = |row: usize| row % (drafts + 1) <= self.steps.accepted[row / (drafts + 1)];
        let sure = |row: usize| kept(row) || self.steps.router_margins.get(row).is_some_and(|&margin| margin >= ROUTER_MARGIN);
        checks.rows("verify_logits", &[steps, drafts + 1, vocab], &ours.verify_logits, sure, LOGITS)?;
        checks.some_ints("verify_argmax", &[steps, drafts + 1], &ours.verify_argmax, kept)?;
        let theirs = checks.file.ints("committed")?.map_or(0, <[i32]>::len);
        let mut committed = ours.committed.clone();
        committed.resize(theirs, -1);
        checks.ints("committed", &[theirs], &committed)
    }

    /// Speculation must give what the target says alone.
    fn plain_decoding(&mut self) -> Result<(), EngineError> {
        let Some(wanted) = self.checks.file.ints("plain_greedy")?.map(<[i32]>::len) else { return Ok(()) };
        let mut session = Session::new(&self.target.config, &self.target.weights);
        let mut next = argmax(session.prefill(&self.steps.prompt, CHUNK, &mut NoTap)?.logits);
        let mut plain = Vec::new();
        for at in 0..wanted {
            plain.push(signed(next));
            if at + 1 < wanted {
                next = argmax(session.forward(&[next], LogitRows::All, &mut NoTap)?.logits);
                session.commit(1);
            }
        }
        self.checks.ints("plain_greedy", &[wanted], &plain)
    }
}
