//! Who guesses the next tokens: the model's own MTP block, an external DSpark drafter, a lookup in the text so far, or nobody.

mod dspark;
mod mtp;
mod ngram;
mod none;

pub use dspark::DsparkDrafter;
pub use mtp::MtpDrafter;
pub use ngram::NgramDrafter;
pub use none::NoDrafter;

use super::dspark::{Dspark, DsparkCheckpoint};
use super::mtp::Mtp;
use super::route_tap::RouteTap;
use super::sampling::{Sampler, argmax, inverse_cdf, softmax_of};
use super::verify::DraftDist;
use super::{EngineError, ModelConfig, ModelWeights};

/// Longest chain of drafts in a window.
pub const MAX_DRAFT_LEN: usize = 15;

/// Observed rows that may wait in a drafter for the next proposal. Longer runs, prompts above all, are taken in at once: their
/// numbers would fill the memory.
pub(super) const MAX_WAITING: usize = MAX_DRAFT_LEN + 1;

/// Who drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftKind {
    /// The model's MTP block.
    Mtp,
    /// An external DSpark drafter.
    Dspark,
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
            Self::Dspark => "dspark",
            Self::Ngram => "ngram",
            Self::None => "none",
        }
    }

    /// The drafter for a model; `None` when the model has no block for it, and of [`DraftKind::Dspark`], which is not made of
    /// the model alone (see [`external`]).
    pub fn build<'m>(self, config: &'m ModelConfig, weights: &'m ModelWeights) -> Option<Box<dyn Drafter + 'm>> {
        Some(match self {
            Self::Mtp => Box::new(MtpDrafter::new(Box::new(Mtp::new(config, weights)?), config.hidden)),
            Self::Dspark => return None,
            Self::Ngram => Box::new(NgramDrafter),
            Self::None => Box::new(NoDrafter),
        })
    }
}

/// The DSpark drafter of `checkpoint` for the target that it was opened for, with the survival at which its windows end.
pub fn external<'m>(
    checkpoint: &'m DsparkCheckpoint,
    min_survival: f64,
    config: &'m ModelConfig,
    weights: &'m ModelWeights,
) -> Box<dyn Drafter + 'm> {
    Box::new(DsparkDrafter::new(Dspark::new(checkpoint, config, weights), min_survival))
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
    /// How sure the drafter is that each is kept, given those before, when it says so and somebody records it.
    pub confidences: Option<Vec<f32>>,
    /// Drafts that are on the target's device and nowhere else yet; then there are no others, and [`Drafter::fetch`] tells the rest of them.
    pub on_device: usize,
}

impl Drafts {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.tokens.len().max(self.on_device)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds the draft that a row of logits makes: its argmax for a greedy request, else drawn from the row's distribution
    /// under the request's own temperature and filters, which is kept as q.
    fn push(&mut self, logits: &[f32], sampler: &mut Sampler) {
        let (token, prob) = if sampler.is_greedy() {
            let token = argmax(logits);
            (token, self.probs.is_some().then(|| softmax_of(logits, token)))
        } else {
            let mut q = Vec::new();
            sampler.distribution(logits, &mut q);
            let token = inverse_cdf(&q, sampler.uniform());
            let prob = q.get(token as usize).copied().unwrap_or_default() as f32;
            self.dists.push(DraftDist::Dense(q));
            (token, Some(prob))
        };
        self.tokens.push(token);
        if let (Some(probs), Some(prob)) = (&mut self.probs, prob) {
            probs.push(prob);
        }
    }
}

/// A drafter of one request at a time.
///
/// It is told of every token that entered the target's cache ([`Drafter::observe`]) and asked for a window's
/// drafts ([`Drafter::propose`]); whether these are accepted shows in what it observes next.
pub trait Drafter {
    /// Forgets the request.
    fn reset(&mut self);

    /// Layers of the target whose outputs the drafter is made of, ascending.
    fn tapped_layers(&self) -> &[usize] {
        &[]
    }

    /// Comes before [`Drafter::observe`] of the same rows, with the outputs of the tapped layers, `[rows, layers * H]`; without any of a window
    /// whose rows stay on a device.
    ///
    /// # Errors
    /// When the drafter's own pass fails.
    fn observe_taps(&mut self, taps: &[f32]) -> Result<(), EngineError> {
        let _ = taps;
        Ok(())
    }

    /// Whether [`Drafter::observe`] must be given hidden rows: a drafter that makes nothing of them, or takes them where the target has
    /// them, needs none of a window's.
    fn needs_hidden(&self) -> bool {
        false
    }

    /// The target has taken in rows: `hidden` is `[rows, H]` (after the final norm), `next_tokens` the token after each. Of a window whose
    /// rows stay on a device it is empty, unless the drafter [needs](Drafter::needs_hidden) it.
    ///
    /// # Errors
    /// When the drafter's own pass fails.
    fn observe(&mut self, next_tokens: &[u32], hidden: &[f32]) -> Result<(), EngineError>;

    /// Up to `limit` drafts after `history`: the request's tokens so far, the last of which is the anchor.
    ///
    /// # Errors
    /// When the drafter's own pass fails.
    fn propose(&mut self, history: &[u32], limit: usize, sampler: &mut Sampler, tap: &mut RouteTap) -> Result<Drafts, EngineError>;

    /// Tells what is recorded of drafts that [`Drafter::propose`] has left on the device. The target's pass over them has been waited for,
    /// and their tokens are known.
    ///
    /// # Errors
    /// When the drafter's own pass has failed.
    fn fetch(&mut self, drafts: &mut Drafts, tap: &mut RouteTap) -> Result<(), EngineError> {
        let _ = (drafts, tap);
        Ok(())
    }
}
