//! Who guesses the next tokens: the model's own MTP block, a lookup in the text so far, or nobody.

mod mtp;
mod ngram;
mod none;

pub use mtp::MtpDrafter;
pub use ngram::NgramDrafter;
pub use none::NoDrafter;

use super::mtp::Mtp;
use super::route_tap::RouteTap;
use super::sampling::Sampler;
use super::verify::DraftDist;
use super::{EngineError, ModelConfig, ModelWeights};

/// Longest chain of drafts in a window.
pub const MAX_DRAFT_LEN: usize = 15;

/// Who drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftKind {
    /// The model's MTP block.
    Mtp,
    /// Lookup in prompt and output.
    Ngram,
    /// Nobody: plain decoding.
    None,
}

impl DraftKind {
    /// The word of `--draft` and of the manifest.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mtp => "mtp",
            Self::Ngram => "ngram",
            Self::None => "none",
        }
    }

    /// The drafter for a model; `None` when the model has no block for it.
    pub fn build<'m>(self, config: &'m ModelConfig, weights: &'m ModelWeights) -> Option<Box<dyn Drafter + 'm>> {
        Some(match self {
            Self::Mtp => Box::new(MtpDrafter::new(Box::new(Mtp::new(config, weights)?), config.hidden)),
            Self::Ngram => Box::new(NgramDrafter),
            Self::None => Box::new(NoDrafter),
        })
    }
}

/// The drafts of one window, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Drafts {
    /// The tokens; may be fewer than asked for, or none.
    pub tokens: Vec<u32>,
    /// What each was drawn from; empty when the request is greedy.
    pub dists: Vec<DraftDist>,
    /// The drafter's own probability of each, when it has one and somebody records it.
    pub probs: Option<Vec<f32>>,
}

/// A drafter of one request at a time.
///
/// It is told of every token that entered the target's cache ([`Drafter::observe`]) and asked for a window's
/// drafts ([`Drafter::propose`]); whether these are accepted shows in what it observes next.
pub trait Drafter {
    /// Forgets the request.
    fn reset(&mut self);

    /// The target has taken in rows: `hidden` is `[rows, H]` (after the final norm), `next_tokens` the token after each.
    ///
    /// # Errors
    /// When the drafter's own pass fails.
    fn observe(&mut self, next_tokens: &[u32], hidden: &[f32]) -> Result<(), EngineError>;

    /// Up to `limit` drafts after `history`: the request's tokens so far, the last of which is the anchor.
    ///
    /// # Errors
    /// When the drafter's own pass fails.
    fn propose(&mut self, history: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError>;
}
