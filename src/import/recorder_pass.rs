//! One record of SGLang's recorder.

use super::pickle::{Pickle, Tensor, Value};

/// What a pass was, by the engine's numbers; those above 5 have moved between versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Prompts, or chunks of them.
    Extend,
    /// Prompts, then single rows of requests that go on.
    Mixed,
    /// One row a request.
    Decode,
    /// A window a request.
    Verify,
    /// Nothing.
    Idle,
    /// The drafter's.
    Draft,
    /// Anything else.
    Other,
}

/// One record, without its ids.
pub struct Pass {
    /// Its place in the dump.
    pub number: usize,
    /// The engine's number of the pass.
    pub id: i64,
    /// What it did.
    pub mode: Mode,
    /// The rows' tokens.
    pub tokens: Vec<u32>,
    /// The rows' positions.
    pub positions: Vec<u32>,
    /// Rows of each request, of prompts.
    pub lengths: Option<Vec<u32>>,
    /// Expert ids `[layers, rows, 8]`.
    pub ids: Tensor,
}

impl Pass {
    /// Reads a record's plain values.
    ///
    /// # Errors
    /// The record and the key that is missing or is not what it should be.
    pub fn of(pickle: &Pickle, record: Value, number: usize) -> Result<Self, String> {
        let wrong = |what: &str| format!("record {number}: {what}");
        let numbers = |key: &str| {
            pickle.get(record, key).and_then(|v| pickle.u32s(v)).ok_or_else(|| wrong(&format!("{key} is not a list of numbers")))
        };
        let mode = pickle.get(record, "forward_mode").and_then(|v| pickle.int(v)).ok_or_else(|| wrong("forward_mode is not a number"))?;
        let ids = pickle
            .get(record, "topk_ids_of_layer")
            .and_then(|v| pickle.tensor(v))
            .ok_or_else(|| wrong("topk_ids_of_layer is not a tensor"))?;
        let lengths = match pickle.get(record, "extend_seq_lens") {
            None | Some(Value::None) => None,
            Some(value) => Some(pickle.u32s(value).ok_or_else(|| wrong("extend_seq_lens is not a list of numbers"))?),
        };
        let (tokens, positions) = (numbers("input_ids")?, numbers("positions")?);
        if ids.shape.len() != 3 || tokens.len() != positions.len() {
            return Err(wrong(&format!(
                "topk_ids_of_layer has the shape {:?}, for {} tokens and {} positions",
                ids.shape,
                tokens.len(),
                positions.len()
            )));
        }
        Ok(Self {
            number,
            id: pickle.get(record, "forward_pass_id").and_then(|v| pickle.int(v)).unwrap_or(-1),
            mode: match mode {
                1 => Mode::Extend,
                3 => Mode::Mixed,
                2 => Mode::Decode,
                4 => Mode::Idle,
                5 => Mode::Verify,
                6 => Mode::Draft,
                _ => Mode::Other,
            },
            tokens,
            positions,
            lengths,
            ids: ids.clone(),
        })
    }

    /// Rows before the padding of a captured graph: rows of token 0 at position 0, where no request can go on.
    pub fn real_rows(&self) -> usize {
        let rows = self.tokens.len();
        if !matches!(self.mode, Mode::Decode | Mode::Verify) {
            return rows;
        }
        let padded = self.tokens.iter().zip(&self.positions).rev().take_while(|&(&token, &position)| token == 0 && position == 0).count();
        rows - padded
    }
}
