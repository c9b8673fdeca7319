//! What speculation asks of the two sides of a model, wherever they run.

use super::drafter::Drafts;
use super::laps::Laps;
use super::mtp::Mtp;
use super::routing_plan::RoutingPlan;
use super::sampling::Sampler;
use super::session::{Forward, LogitRows, Session};
use super::tap::ForwardTap;
use super::verify::Verdict;
use super::{EngineError, ModelConfig, ModelWeights, mtp};
use crate::trace::{Component, Module};
use std::borrow::Cow;

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

    /// Runs `tokens` after the committed and pending ones; they become pending. A pass that is longer than a window of 16 rows is a
    /// prompt's: a device may not be able to take any of its rows back.
    ///
    /// # Errors
    /// As [`Session::forward`]; where a device fails in such a pass, or behind the first of several, the timeline is of no use until
    /// [`Target::reset`].
    fn forward(&mut self, tokens: &[u32], logits: LogitRows, tap: &mut dyn ForwardTap) -> Result<Forward<'_>, EngineError>;

    /// Commits the first `rows` pending rows and rolls the others back; the tap is told of the time.
    ///
    /// # Errors
    /// When a device fails.
    fn commit(&mut self, rows: usize, tap: &mut dyn ForwardTap) -> Result<(), EngineError>;

    /// The target as one that chooses tokens by itself; `None` where its logits are chosen by.
    fn judge(&mut self) -> Option<&mut dyn Judge> {
        None
    }

    /// Chooses the experts of the routed layers by a plan instead of their routers from the next pass on, or by the routers again.
    fn route_by(&mut self, plan: Option<RoutingPlan>);

    /// Tells the tap of what a profiler has seen of the step's kernels. Called when the step's end has been stamped: it may take its time.
    ///
    /// # Errors
    /// When the profiler fails, or does not say what a kernel was launched for.
    fn settle(&mut self, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let _ = tap;
        Ok(())
    }
}

/// A target that chooses where its logits are, by the rules of [`super::verify`] and the sampler's own random numbers: the logits of what it
/// judges go nowhere.
pub trait Judge {
    /// Whether it can judge a window with these drafts: by distributions that it has, or without any.
    fn takes(&self, drafts: &Drafts) -> bool;

    /// Runs the end of a prompt as [`Target::forward`] does, and chooses the token after it. The rows become pending; no logits come back.
    ///
    /// # Errors
    /// As there, and for a sampler of other rules than the target was made for.
    fn prompt_end(&mut self, tokens: &[u32], sampler: &mut Sampler, tap: &mut dyn ForwardTap) -> Result<(Forward<'_>, u32), EngineError>;

    /// Runs `anchor` and the drafts after the committed rows, decides which drafts are kept and what follows them, and commits their rows
    /// and the anchor's: no commit comes after. No row may be pending. Hidden rows stay where they are.
    ///
    /// # Errors
    /// As above.
    fn window(&mut self, anchor: u32, drafts: &Drafts, sampler: &mut Sampler, tap: &mut dyn ForwardTap) -> Result<Judged, EngineError>;
}

/// A window that was judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// The drafts, which the host may not have known before.
    pub drafts: Vec<u32>,
    /// What became of them.
    pub verdict: Verdict,
}

/// A target whose memory can be looked at. Each is `None` for a layer of the other kind.
pub trait Inspected: Target {
    /// A KDA layer's committed state, `[heads, K, V]`.
    ///
    /// # Errors
    /// When a device fails, as for the others.
    fn kda_state(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError>;

    /// The last committed rows of a KDA layer's q, k, v before the convolution, `[conv_kernel - 1, 3 * heads * head_dim]`.
    ///
    /// # Errors
    /// As above.
    fn conv_state(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError>;

    /// The committed rows of an MLA layer's cache, `[len, kv_lora_rank + qk_rope_head_dim]`.
    ///
    /// # Errors
    /// As above.
    fn mla_cache(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError>;
}

/// A model's two sides on some engine, each made anew.
pub trait Sides {
    /// A timeline without tokens.
    ///
    /// # Errors
    /// When a device fails.
    fn target(&self) -> Result<Box<dyn Inspected + '_>, EngineError>;

    /// An empty timeline of the draft module; `None` when the model has none.
    ///
    /// # Errors
    /// When a device fails.
    fn draft(&self) -> Result<Option<Box<dyn DraftModule + '_>>, EngineError>;
}

/// A model on the CPU.
#[derive(Debug, Clone, Copy)]
pub struct CpuSides<'m> {
    /// Its shape.
    pub config: &'m ModelConfig,
    /// Its weights.
    pub weights: &'m ModelWeights,
}

impl Sides for CpuSides<'_> {
    fn target(&self) -> Result<Box<dyn Inspected + '_>, EngineError> {
        Ok(Box::new(Session::new(self.config, self.weights)))
    }

    fn draft(&self) -> Result<Option<Box<dyn DraftModule + '_>>, EngineError> {
        Ok(Mtp::new(self.config, self.weights).map(|module| Box::new(module) as Box<dyn DraftModule>))
    }
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

    fn route_by(&mut self, plan: Option<RoutingPlan>) {
        Session::route_by(self, plan);
    }
}

impl Inspected for Session<'_> {
    fn kda_state(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError> {
        Ok(Session::kda_state(self, layer).map(Cow::Borrowed))
    }

    fn conv_state(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError> {
        Ok(Session::conv_state(self, layer).map(Cow::Borrowed))
    }

    fn mla_cache(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError> {
        Ok(Session::mla_cache(self, layer).map(Cow::Borrowed))
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
