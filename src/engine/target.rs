//! What speculation asks of the two sides of a model, wherever they run.

use super::laps::Laps;
use super::mtp::Mtp;
use super::session::{Forward, LogitRows, Session};
use super::tap::ForwardTap;
use super::{EngineError, mtp};
use crate::trace::{Component, Module};

/// One timeline of a target model.
pub trait Target {
    /// Forgets every token.
    ///
    /// # Errors
    /// When a device fails.
    fn reset(&mut self) -> Result<(), EngineError>;

    /// Committed tokens.
    fn len(&self) -> usize;

    /// Whether no token is committed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Runs `tokens` after the committed and pending ones; they become pending. Of a pass that is longer than a window of
    /// 16 rows a device may not be able to take back all but the last 16.
    ///
    /// # Errors
    /// As [`Session::forward`].
    fn forward(&mut self, tokens: &[u32], logits: LogitRows, tap: &mut dyn ForwardTap) -> Result<Forward<'_>, EngineError>;

    /// Commits the first `rows` pending rows and rolls the others back; the tap is told of the time.
    ///
    /// # Errors
    /// When a device fails.
    fn commit(&mut self, rows: usize, tap: &mut dyn ForwardTap) -> Result<(), EngineError>;
}

/// One timeline of a multi-token-prediction block.
pub trait DraftModule {
    /// Rows in its cache.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps the first `len` rows.
    fn truncate(&mut self, len: usize);

    /// Appends rows.
    ///
    /// # Errors
    /// As [`mtp::Mtp::extend`].
    fn extend(
        &mut self,
        next_tokens: &[u32],
        hidden: &[f32],
        logits: LogitRows,
        tap: &mut dyn ForwardTap,
    ) -> Result<Forward<'_>, EngineError>;
}

impl Target for Session<'_> {
    fn reset(&mut self) -> Result<(), EngineError> {
        Session::clear(self);
        Ok(())
    }

    fn len(&self) -> usize {
        Session::len(self)
    }

    fn forward(&mut self, tokens: &[u32], logits: LogitRows, tap: &mut dyn ForwardTap) -> Result<Forward<'_>, EngineError> {
        Session::forward(self, tokens, logits, tap)
    }

    fn commit(&mut self, rows: usize, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let mut laps = Laps::start(tap, Module::Target, None);
        Session::commit(self, rows);
        laps.lap(Component::Commit);
        Ok(())
    }
}

impl DraftModule for Mtp<'_> {
    fn len(&self) -> usize {
        mtp::Mtp::len(self)
    }

    fn truncate(&mut self, len: usize) {
        mtp::Mtp::truncate(self, len);
    }

    fn extend(
        &mut self,
        next_tokens: &[u32],
        hidden: &[f32],
        logits: LogitRows,
        tap: &mut dyn ForwardTap,
    ) -> Result<Forward<'_>, EngineError> {
        mtp::Mtp::extend(self, next_tokens, hidden, logits, tap)
    }
}
