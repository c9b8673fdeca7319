//! Rows of which only the order is known: one array, one request, no windows.

use super::events;
use super::rows::{self, IdArray, Survey};
use super::{ImportError, Options, Sink};
use crate::trace::{FinishReason, Phase, StepRoutes};

/// Rows of one step.
const STEP_ROWS: usize = 512;

/// One request whose rows come in pieces.
#[derive(Debug)]
pub struct Profile {
    request: u32,
    id: String,
    /// Rows so far.
    at: usize,
    prompt: Option<usize>,
    k: usize,
    prompt_rows: usize,
}

impl Profile {
    /// A request of rows of `k` experts. Rows before `options.prompt_tokens` are the prompt's.
    pub fn new(sink: &mut Sink, id: &str, k: u16, options: &Options) -> Self {
        if options.prompt_tokens.is_none() {
            let message = "nobody said which rows are the prompt's: all stand in prefill steps (--prompt-tokens N tells them apart)";
            sink.warn("phase_unknown", message);
        }
        let prompt = options.prompt_tokens.map(|n| n as usize);
        Self { request: sink.request_id(), id: id.to_owned(), at: 0, prompt, k: usize::from(k), prompt_rows: 0 }
    }

    /// Adds the next rows. `tokens` are theirs, as far as they are known.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn add(
        &mut self,
        sink: &mut Sink,
        array: &IdArray,
        survey: &Survey,
        axis: &[u16],
        routed: &[bool],
        tokens: &[u32],
    ) -> Result<(), ImportError> {
        let mut row = 0;
        while row < array.rows {
            let left_of_prompt = self.prompt.map_or(usize::MAX, |p| p.saturating_sub(self.at));
            let (phase, n) = if left_of_prompt > 0 {
                (Phase::Prefill, (array.rows - row).min(STEP_ROWS).min(left_of_prompt))
            } else {
                (Phase::Decode, 1)
            };
            let known = tokens.get(row..(row + n).min(tokens.len())).unwrap_or_default();
            let mut input = known.to_vec();
            input.extend(events::unknown_tokens(n - known.len()));
            let mut step = events::step(self.request, phase, input);
            step.context_len = u32::try_from(self.at).unwrap_or(u32::MAX);
            if phase == Phase::Decode {
                // Each row of plain decoding has emitted a token.
                step.emitted_tokens = tokens.get(row + 1).map_or_else(|| events::unknown_tokens(1), |&token| vec![token]);
            }
            let mut routes = StepRoutes::new(self.k);
            rows::push(&mut routes, array, survey, row..row + n, axis, routed, sink);
            step.routes = routes;
            sink.step(step)?;
            if phase == Phase::Prefill {
                self.prompt_rows += n;
            }
            row += n;
            self.at += n;
        }
        Ok(())
    }

    /// Ends the request.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn finish(self, sink: &mut Sink) -> Result<(), ImportError> {
        let prompt = u32::try_from(self.prompt_rows).unwrap_or(u32::MAX);
        sink.end_request(self.request, self.id, prompt, FinishReason::Unknown, "{}".into())
    }
}
