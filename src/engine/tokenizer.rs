//! Text to token ids and back, by the checkpoint's own `tokenizer.json`.

use super::EngineError;
use super::guard::refused_tokenizer;
use crate::trace::quiet;
use std::path::{Path, PathBuf};

const BROKEN: &str = "the tokenizer library failed on a text with this tokenizer";

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
        let wrong = |reason: String| EngineError::Checkpoint { path: path.to_owned(), reason };
        let json: serde_json::Value = serde_json::from_slice(bytes).map_err(|e| wrong(format!("not a tokenizer: not JSON: {e}")))?;
        if let Some(reason) = refused_tokenizer(&json) {
            return Err(wrong(format!("not a tokenizer that can be used: {reason}")));
        }
        drop(json);
        let built = quiet::catch(|| tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| first_line(&e.to_string()).to_owned()));
        let mut inner = built
            .unwrap_or_else(|| Err("the tokenizer library cannot build it".to_owned()))
            .map_err(|reason| wrong(format!("not a tokenizer: {reason}")))?;
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
        let encoding = quiet::catch(|| self.inner.encode_fast(text, special)).ok_or_else(|| self.failure(BROKEN))?;
        Ok(encoding.map_err(|e| self.failure(&e.to_string()))?.get_ids().to_vec())
    }

    /// Text of ids, special tokens included. Bytes that are no UTF-8 by themselves become U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, EngineError> {
        quiet::catch(|| self.inner.decode(ids, false)).ok_or_else(|| self.failure(BROKEN))?.map_err(|e| self.failure(&e.to_string()))
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
