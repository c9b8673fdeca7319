//! Choosing where the logits are: the token after a prompt, and which drafts of a window are kept, by the rules of
//! [`crate::engine::verify`]. The host is told a verdict of a few numbers. It draws the uniform numbers, as for the CPU engine, and sends
//! them with the pass, so that both engines draw the same tokens.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::choice_ops;
use super::drafted::Drafted;
use super::ring::{Ending, Shape};
use super::session::{CudaSession, Wants};
use super::site::{Part, Site};
use crate::engine::drafter::Drafts;
use crate::engine::sampling::{Sampler, Sampling};
use crate::engine::session::{Forward, LogitRows};
use crate::engine::target::{Judge, Judged};
use crate::engine::verify::{DraftDist, Verdict};
use crate::engine::{EngineError, ForwardTap, ModelConfig};
use crate::trace::Component;
use std::rc::Rc;

/// How a session chooses.
#[derive(Debug)]
pub(super) struct Chooser {
    sampling: Sampling,
    /// The distribution of each row, `[PASS_ROWS, vocab]` doubles; none when it is greedy.
    probs: Option<Buffer>,
    pub drafted: Rc<Drafted>,
}

/// Bytes of device memory of a chooser; `drafts`: the draft module leaves distributions, too.
pub(super) fn planned_bytes(config: &ModelConfig, sampling: Sampling, drafts: bool) -> usize {
    let rows = PASS_ROWS + if drafts { super::drafted::MOST } else { 0 };
    super::drafted::BYTES + if sampling.is_greedy() { 0 } else { rows * config.vocab * 8 }
}

impl CudaSession<'_> {
    /// The session, choosing by itself; `drafts`: a draft module of the same device leaves it windows.
    ///
    /// # Errors
    /// When device memory runs out.
    pub fn choosing(mut self, sampling: Sampling, drafts: bool) -> Result<Self, EngineError> {
        let probs = || self.device.room(PASS_ROWS * self.config.vocab * 8);
        self.chooser = Some(Chooser {
            sampling,
            probs: if sampling.is_greedy() { None } else { Some(probs()?) },
            drafted: Rc::new(Drafted::new(&self.device, self.config, drafts && !sampling.is_greedy())?),
        });
        Ok(self)
    }

    /// Where the tokens of a pass of `rows` rows are.
    pub(super) fn window_at(&self, ending: Ending, rows: usize) -> u64 {
        match (ending, &self.chooser) {
            (Ending::Window { drafted: true }, Some(chooser)) => chooser.drafted.window(0),
            _ => self.space(rows).tokens(),
        }
    }

    /// Puts the choices of a pass into the stream: over its rows with logits.
    pub(super) fn choose(&self, shape: Shape) -> Result<(), EngineError> {
        let (Some(chooser), Ending::Token | Ending::Window { .. }) = (&self.chooser, shape.ending) else { return Ok(()) };
        let (d, ws, vocab) = (&*self.device, self.space(shape.rows), self.config.vocab);
        d.label(None, Component::Sampling);
        let damage = ws.damage(Site { layer: 0, part: Part::Logits });
        let (logits, window, size) = (ws.logits.at(0), self.window_at(shape.ending, shape.rows), (shape.wanted, vocab));
        let (drafts, verdict) = (shape.wanted - 1, ws.verdict().0);
        let Some(probs) = &chooser.probs else {
            choice_ops::argmax(d, logits, size, ws.best.at(0), 0, damage)?;
            return choice_ops::accept_greedy(d, window, ws.best.at(0), drafts, verdict);
        };
        choice_ops::sample(d, logits, size, chooser.sampling, probs.at(0), damage)?;
        let q = if shape.ending == (Ending::Window { drafted: true }) { chooser.drafted.dist(0, vocab) } else { 0 };
        choice_ops::accept_sampled(d, window, (probs.at(0), q), ws.uniforms(), (drafts, vocab), verdict)
    }

    /// Says what the choices of a pass of `rows` rows with `drafts` drafts are drawn with.
    fn begin_choice(&self, rows: usize, drafts: usize, sampler: &mut Sampler) -> Result<(), EngineError> {
        if self.chooser.as_ref().is_none_or(|c| c.sampling != sampler.sampling()) {
            return Err(EngineError::Request("the session chooses by other rules than the request's".to_owned()));
        }
        if sampler.is_greedy() {
            return Ok(());
        }
        let uniforms: Vec<f64> = (0..=drafts).map(|_| sampler.uniform()).collect();
        self.space(rows).begin_uniforms(&uniforms)
    }
}

impl Judge for CudaSession<'_> {
    fn takes(&self, drafts: &Drafts) -> bool {
        // Distributions that the host has drawn from stay with it: they are as large as the logits.
        drafts.dists.iter().all(|dist| *dist == DraftDist::OneHot)
    }

    fn prompt_end(&mut self, tokens: &[u32], sampler: &mut Sampler, tap: &mut dyn ForwardTap) -> Result<(Forward<'_>, u32), EngineError> {
        let last = self.last_pass(tokens.len());
        self.begin_choice(last, 0, sampler)?;
        self.forward_to(tokens, LogitRows::Last, tap, Ending::Token)?;
        let (_, token, _) = self.space(last).collect_verdict(1, self.config)?;
        Ok((self.results(), token))
    }

    fn window(&mut self, anchor: u32, drafts: &Drafts, sampler: &mut Sampler, tap: &mut dyn ForwardTap) -> Result<Judged, EngineError> {
        let rows = drafts.len() + 1;
        if self.pending > 0 || rows > PASS_ROWS {
            let text = format!("a window of {rows} rows after {} pending ones cannot be judged", self.pending);
            return Err(EngineError::Request(text));
        }
        let mut tokens = vec![anchor];
        tokens.extend(&drafts.tokens);
        self.check(&tokens, rows)?;
        // Those that the host does not know count as rows only.
        tokens.resize(rows, anchor);
        self.begin_choice(rows, drafts.len(), sampler)?;
        self.begin_results();
        let wants = Wants::of(tap);
        self.pass(&tokens, rows, wants, Ending::Window { drafted: drafts.on_device > 0 })?;
        let (accepted, next, window) = self.ws.collect_verdict(rows, self.config)?;
        self.pending = 0;
        self.committed += accepted + 1;
        self.tell(tap, wants);
        Ok(Judged { drafts: window[1..].to_vec(), verdict: Verdict { accepted, next } })
    }
}
