//! Text to token ids and back, by the checkpoint's own `tokenizer.json`.

use super::EngineError;
use std::path::{Path, PathBuf};

/// A checkpoint's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
}

impl Tokenizer {
    /// The tokenizer of a `tokenizer.json`; `path` names it in errors.
    ///
    /// # Errors
    /// When the bytes are not a tokenizer that can be built.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, EngineError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| EngineError::Checkpoint {
            path: path.to_owned(),
            reason: format!("not a tokenizer: {}", first_line(&e.to_string())),
        })?;
        // A file may ask to be cut or filled up to a length, which is right for training only.
        let _ = inner.with_truncation(None);
        inner.with_padding(None);
        Ok(Self { inner, path: path.to_owned() })
    }

    /// Ids of a text. `special` adds what the tokenizer puts around a plain text (nothing for Ling); a rendered chat has it already.
    ///
    /// # Errors
    /// When the tokenizer cannot take the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, EngineError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| self.failure(&e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of ids, special tokens included. Bytes that are no UTF-8 by themselves become U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.inner.decode(ids, false).map_err(|e| self.failure(&e.to_string()))
    }

    /// Id of a token given by its text, as in `tokenizer_config.json`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn failure(&self, reason: &str) -> EngineError {
        EngineError::Checkpoint { path: self.path.clone(), reason: first_line(reason).to_owned() }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
