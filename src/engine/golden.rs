//! Runs the tokens of a golden set and compares every tensor that the set names.
//!
//! Tolerances are those of a `f32` engine against `f32` references: logits 5e-4, hidden rows and states 1e-3,
//! router weights 2e-5; ids and tokens exact. A wrong formula moves logits by 0.15 and more.

use super::config::ModelConfig;
use super::error::EngineError;
use super::golden_checks::Checks;
pub use super::golden_checks::{GoldenReport, NotCompared, TensorCheck};
use super::golden_file::GoldenFile;
use super::session::LogitRows;
use super::tap::{ForwardTap, NoTap};
use super::target::{CpuSides, Inspected, Sides};
use super::weights::ModelWeights;
use crate::trace::Module;
use std::path::Path;

/// Logits of the target and of the drafts.
pub const LOGITS: f64 = 5e-4;
/// Hidden rows, recurrent states and cache rows.
pub const HIDDEN: f64 = 1e-3;
/// Gate weights.
pub const ROUTER_WEIGHTS: f64 = 2e-5;

/// Rows of a prefill pass: small, so that a prompt is cut.
const CHUNK: usize = 32;

/// Runs the tokens of the golden file `path` on the CPU and compares.
///
/// # Errors
/// When the file cannot be read, does not fit the model (shapes, ids), or the model cannot run it.
pub fn compare(config: &ModelConfig, weights: &ModelWeights, path: &Path) -> Result<GoldenReport, EngineError> {
    compare_on(config, path, |_| Ok(CpuSides { config, weights }))
}

/// As [`compare`], on the engine that `open` gives for timelines of so many tokens.
///
/// # Errors
/// As there, and those of `open`.
pub fn compare_on<S: Sides>(
    config: &ModelConfig,
    path: &Path,
    open: impl FnOnce(usize) -> Result<S, EngineError>,
) -> Result<GoldenReport, EngineError> {
    let file = GoldenFile::read(path)?;
    let tokens = file.tokens("tokens")?.ok_or_else(|| file.wrong("has no tensor `tokens`, the ids to run"))?;
    let generated = file.tensors.get("decode_logits").and_then(|t| t.shape.first().copied()).unwrap_or(0);
    let prompt = file.prompt.or(tokens.len().checked_sub(generated)).filter(|p| (1..=tokens.len()).contains(p));
    let Some(prompt) = prompt else {
        return Err(file.wrong(&format!("its prompt does not fit its {} tokens", tokens.len())));
    };
    // A chain of drafts runs over the last token.
    let chain = file.tensors.get("draft_tokens").and_then(|t| t.shape.last().copied()).unwrap_or(0);
    let sides = open(tokens.len() + chain)?;
    let mut run = Run { file: &file, config, sides: &sides, checks: Checks::new(&file), error: None };
    let hidden = run.prefill(&tokens)?;
    run.decode(&tokens, prompt)?;
    run.draft_rows(&hidden)?;
    run.draft_chains(&hidden, prompt)?;
    Ok(run.checks.report(tokens.len(), prompt, |name| (name != "mtp_next_tokens").then(|| reason(name))))
}

fn reason(name: &str) -> &'static str {
    const KNOWN: [&str; 11] = [
        "hidden.",
        "mid.",
        "router_ids.",
        "router_weights.",
        "kda_state.",
        "conv_state.",
        "mla_latent.",
        "mla_krope.",
        "mtp_",
        "draft_",
        "decode_logits",
    ];
    if name.starts_with("router_margin.") {
        "the reference's own margins, an input to its design"
    } else if KNOWN.iter().any(|k| name.starts_with(k)) {
        "the model has no such layer, or the file lacks what it belongs to"
    } else {
        "unknown name"
    }
}

/// The lowest index of the largest logit.
fn argmax(logits: &[f32]) -> i32 {
    let best = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, l)| if *l > best.1 { (i, *l) } else { best });
    i32::try_from(best.0).unwrap_or(i32::MAX)
}

struct Run<'a> {
    file: &'a GoldenFile,
    config: &'a ModelConfig,
    sides: &'a dyn Sides,
    checks: Checks<'a>,
    /// An error found in a tap, which cannot return one.
    error: Option<EngineError>,
}

impl Run<'_> {
    /// One pass over all tokens: logits, hidden rows, routes. Returns the rows after the final norm.
    fn prefill(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let (vocab, width, rows) = (self.config.vocab, self.config.hidden, tokens.len());
        let wanted = if self.file.tensors.contains_key("logits") { LogitRows::All } else { LogitRows::None };
        let mut session = self.sides.target()?;
        let forward = session.forward(tokens, wanted, self)?;
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        self.checks.floats("logits", &[rows, vocab], forward.logits, LOGITS)?;
        self.checks.floats("hidden_final", &[rows, width], forward.hidden, HIDDEN)?;
        Ok(forward.hidden.to_vec())
    }

    /// The prompt in chunks, then one token a pass: states after the prompt, logits and greedy tokens.
    fn decode(&mut self, tokens: &[u32], prompt: usize) -> Result<(), EngineError> {
        let sides = self.sides;
        let mut session = sides.target()?;
        let mut next = 0;
        for (i, part) in tokens[..prompt].chunks(CHUNK).enumerate() {
            let last = (i + 1) * CHUNK >= prompt;
            let forward = session.forward(part, if last { LogitRows::Last } else { LogitRows::None }, &mut NoTap)?;
            next = if last { argmax(forward.logits) } else { next };
            session.commit(part.len(), &mut NoTap)?;
        }
        self.states(&*session, prompt)?;
        let (mut logits, mut chosen) = (Vec::new(), Vec::new());
        for token in &tokens[prompt..] {
            chosen.push(next);
            let forward = session.forward(&[*token], LogitRows::All, &mut NoTap)?;
            logits.extend_from_slice(forward.logits);
            next = argmax(forward.logits);
            session.commit(1, &mut NoTap)?;
        }
        self.checks.floats("decode_logits", &[tokens.len() - prompt, self.config.vocab], &logits, LOGITS)?;
        // The prompt is given; what follows must be what the engine would say.
        let mut greedy: Vec<i32> = tokens[..prompt].iter().map(|t| i32::try_from(*t).unwrap_or(-1)).collect();
        greedy.extend(chosen);
        self.checks.ints("tokens", &[tokens.len()], &greedy)
    }

    fn states(&mut self, session: &dyn Inspected, prompt: usize) -> Result<(), EngineError> {
        let (heads, dim, taps) = (self.config.heads, self.config.head_dim, self.config.conv_kernel);
        let (latent, rope) = (self.config.kv_lora_rank, self.config.qk_rope_head_dim);
        for layer in 0..self.config.layers {
            if let (Some(state), Some(history)) = (session.kda_state(layer)?, session.conv_state(layer)?) {
                self.checks.floats(&format!("kda_state.{layer}"), &[heads, dim, dim], &state, HIDDEN)?;
                let width = heads * dim;
                // Ours is [taps - 1, (q, k, v)], the file's [(q, k, v), taps - 1].
                let turned: Vec<f32> = (0..3)
                    .flat_map(|part| history.chunks_exact(3 * width).flat_map(move |r| r[part * width..][..width].iter().copied()))
                    .collect();
                self.checks.floats(&format!("conv_state.{layer}"), &[3, taps.saturating_sub(1), width], &turned, HIDDEN)?;
            }
            if let Some(cache) = session.mla_cache(layer)? {
                let rows = cache.chunks_exact(latent + rope);
                let (latents, keys): (Vec<&[f32]>, Vec<&[f32]>) = rows.map(|r| r.split_at(latent)).unzip();
                self.checks.floats(&format!("mla_latent.{layer}"), &[prompt, latent], &latents.concat(), HIDDEN)?;
                self.checks.floats(&format!("mla_krope.{layer}"), &[prompt, rope], &keys.concat(), HIDDEN)?;
            }
        }
        Ok(())
    }

    /// The draft block over all rows.
    fn draft_rows(&mut self, hidden: &[f32]) -> Result<(), EngineError> {
        let sides = self.sides;
        let Some(mut mtp) = sides.draft()? else { return Ok(()) };
        let Some(next) = self.next_tokens(hidden)? else { return Ok(()) };
        let (vocab, width, rows) = (self.config.vocab, self.config.hidden, next.len());
        let forward = mtp.extend(&next, hidden, LogitRows::All, self)?;
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        self.checks.floats("mtp_logits", &[rows, vocab], forward.logits, LOGITS)?;
        self.checks.floats("mtp_hidden", &[rows, width], forward.hidden, HIDDEN)
    }

    fn next_tokens(&self, hidden: &[f32]) -> Result<Option<Vec<u32>>, EngineError> {
        let Some(next) = self.file.tokens("mtp_next_tokens")? else { return Ok(None) };
        if next.len() * self.config.hidden != hidden.len() {
            return Err(self.file.wrong(&format!("`mtp_next_tokens` has {} ids, `tokens` another number", next.len())));
        }
        Ok(Some(next))
    }

    /// Greedy chains from each row after the prompt; a chain's own rows leave the cache afterwards.
    fn draft_chains(&mut self, hidden: &[f32], prompt: usize) -> Result<(), EngineError> {
        let sides = self.sides;
        let Some(mut mtp) = sides.draft()? else { return Ok(()) };
        let Some(next) = self.next_tokens(hidden)? else { return Ok(()) };
        let Some(&[chains, length]) = self.file.tensors.get("draft_tokens").map(|t| &*t.shape) else { return Ok(()) };
        if chains == 0 || length == 0 || prompt - 1 + chains > next.len() {
            return Err(self.file.wrong(&format!("`draft_tokens` is [{chains}, {length}], which does not fit {} rows", next.len())));
        }
        let width = self.config.hidden;
        let (mut ids, mut logits, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for chain in 0..chains {
            let (from, to) = (mtp.len(), prompt + chain);
            let forward = mtp.extend(&next[from..to], &hidden[from * width..to * width], LogitRows::Last, &mut NoTap)?;
            let mut last = forward.hidden_row(to - from - 1).to_vec();
            let mut draft = argmax(forward.logits);
            logits.extend_from_slice(forward.logits);
            ids.push(draft);
            rows.extend_from_slice(&last);
            for _ in 1..length {
                let token = u32::try_from(draft).unwrap_or(u32::MAX);
                let forward = mtp.extend(&[token], &last, LogitRows::All, &mut NoTap)?;
                last.copy_from_slice(forward.hidden);
                draft = argmax(forward.logits);
                logits.extend_from_slice(forward.logits);
                ids.push(draft);
                rows.extend_from_slice(&last);
            }
            mtp.truncate(to);
        }
        self.checks.ints("draft_tokens", &[chains, length], &ids)?;
        self.checks.floats("draft_logits", &[chains, length, self.config.vocab], &logits, LOGITS)?;
        self.checks.floats("draft_hidden", &[chains, length, width], &rows, HIDDEN)
    }

    fn note(&mut self, result: Result<(), EngineError>) {
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
    }
}

impl ForwardTap for Run<'_> {
    fn wants_weights(&self) -> bool {
        true
    }

    fn routed(&mut self, module: Module, layer: usize, ids: &[u16], weights: &[f32]) {
        let k = self.config.experts_per_token.max(1);
        let shape = [ids.len() / k, k];
        let mut sorted: Vec<(i32, f32)> = ids.iter().map(|id| i32::from(*id)).zip(weights.iter().copied()).collect();
        for row in sorted.chunks_mut(k) {
            row.sort_by_key(|(id, _)| *id);
        }
        let (ids, weights): (Vec<i32>, Vec<f32>) = sorted.into_iter().unzip();
        let [ids_name, weights_name] = match module {
            Module::Target => [format!("router_ids.{layer}"), format!("router_weights.{layer}")],
            Module::Draft => ["mtp_router_ids".to_owned(), "mtp_router_weights".to_owned()],
        };
        let result =
            self.checks.ints(&ids_name, &shape, &ids).and_then(|()| self.checks.floats(&weights_name, &shape, &weights, ROUTER_WEIGHTS));
        self.note(result);
    }

    fn after_attention(&mut self, module: Module, layer: usize, rows: &[f32]) {
        if module == Module::Target {
            let shape = [rows.len() / self.config.hidden, self.config.hidden];
            let result = self.checks.floats(&format!("mid.{layer}"), &shape, rows, HIDDEN);
            self.note(result);
        }
    }

    fn after_layer(&mut self, module: Module, layer: usize, rows: &[f32]) {
        if module == Module::Target {
            let shape = [rows.len() / self.config.hidden, self.config.hidden];
            let result = self.checks.floats(&format!("hidden.{layer}"), &shape, rows, HIDDEN);
            self.note(result);
        }
    }
}
