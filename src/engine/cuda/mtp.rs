//! The draft module on a device, with a cache of its own, as [`crate::engine::Mtp`].

use super::PASS_ROWS;
use super::chain::ChainShape;
use super::device::Device;
use super::drafted;
use super::graph::Graphs;
use super::ops;
use super::pass::{LayerMemory, Pass};
use super::ring::{Shape, Taken};
use super::session::{HostRows, Wants};
use super::site::{Part, Site};
use super::state::MlaCaches;
use super::weights::{DeviceAttention, DeviceWeights};
use super::workspace::Workspace;
use crate::engine::moe::Limits;
use crate::engine::session::{Forward, LogitRows};
use crate::engine::target::DraftModule;
use crate::engine::{EngineError, ForwardTap, ModelConfig};
use crate::trace::{Component, Module};
use std::cell::RefCell;
use std::rc::Rc;

/// One timeline of the draft module.
#[derive(Debug)]
pub struct CudaMtp<'m> {
    pub(super) device: Rc<Device>,
    pub(super) config: &'m ModelConfig,
    weights: Rc<DeviceWeights>,
    /// Rows of windows and chains, and of long passes where there is room for any.
    pub(super) ws: Workspace,
    long: Option<Workspace>,
    cache: MlaCaches,
    pub(super) len: usize,
    out: HostRows,
    pub(super) graphs: RefCell<Graphs<Work>>,
}

/// What is launched together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Work {
    Pass(Shape),
    Chain(ChainShape),
}

/// Where a pass of the module finds and leaves things.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    /// The token after each row.
    pub tokens: u64,
    /// `[rows, H]`; may be what the pass before has left.
    pub hidden: u64,
    pub rows: usize,
    /// Its first position, 0 and its rows.
    pub span: u64,
    pub splits: usize,
    /// Which of the ring's layers its choices go to.
    pub ring: usize,
    /// Last rows with logits.
    pub wanted: usize,
}

impl<'m> CudaMtp<'m> {
    /// An empty timeline with room for `tokens` rows; `None` when the model has no such module, or not one of latent attention.
    ///
    /// # Errors
    /// When device memory runs out.
    pub fn new(
        device: &Rc<Device>,
        config: &'m ModelConfig,
        weights: &Rc<DeviceWeights>,
        tokens: usize,
    ) -> Result<Option<Self>, EngineError> {
        if !weights.mtp.as_ref().is_some_and(|m| matches!(m.layer.attention, DeviceAttention::Mla(_))) {
            return Ok(None);
        }
        Ok(Some(Self {
            ws: Workspace::new(device, config, drafted::MOST, tokens)?,
            long: Workspace::long(device, config, 1, tokens, false)?,
            cache: MlaCaches::new(device, config, 1, tokens)?,
            graphs: RefCell::new(Graphs::new(device)),
            device: Rc::clone(device),
            config,
            weights: Rc::clone(weights),
            len: 0,
            out: HostRows::default(),
        }))
    }

    /// Rows that the cache has room for.
    pub(super) fn room(&self) -> usize {
        self.cache.tokens.min(self.config.max_position)
    }

    /// Where the rows of a pass of `rows` rows are.
    fn space(&self, rows: usize) -> &Workspace {
        self.long.as_ref().filter(|_| rows > PASS_ROWS).unwrap_or(&self.ws)
    }

    fn pass(&mut self, tokens: &[u32], hidden: &[f32], wanted: usize, wants: Wants) -> Result<(), EngineError> {
        let (rows, long) = (tokens.len(), tokens.len() > PASS_ROWS);
        self.space(rows).begin(tokens, self.len)?;
        self.space(rows).begin_hidden(hidden)?;
        self.device.start(Module::Draft, wants.clock)?;
        let splits = if long { 0 } else { self.ws.splits(self.len + rows) };
        let shape = Shape { rows, wanted, pending: 0, splits, taken: wants.taken(), ending: wants.ending(), planned: false };
        match long {
            true => self.launch(shape)?,
            false => self.graphs.borrow_mut().run(Work::Pass(shape), || self.launch(shape))?,
        }
        self.device.end()?;
        self.device.wait()?;
        self.out.kernels.extend(self.device.timer.borrow_mut().finish()?);
        let (space, config) = (self.long.as_ref().filter(|_| long).unwrap_or(&self.ws), self.config);
        space.collect(shape, config, &mut self.out)?;
        self.len += rows;
        Ok(())
    }

    /// Appends rows whose hidden rows are on the device, and waits; nothing is told of them. Its launches are those of the pass that was
    /// [started](Device::start) last.
    pub(super) fn append(&mut self, tokens: &[u32], hidden: u64) -> Result<(), EngineError> {
        let rows = tokens.len();
        self.ws.begin(tokens, self.len)?;
        self.ws.send()?;
        let (tokens, span, splits) = (self.ws.tokens(), self.ws.span(), self.ws.splits(self.len + rows));
        self.link(Link { tokens, hidden, rows, span, splits, ring: 0, wanted: 0 })?;
        self.ws.bring_choices(Taken::Nothing, self.config)?;
        self.device.wait()?;
        self.ws.refuse_damage(self.config)?;
        self.len += rows;
        Ok(())
    }

    /// Puts a pass into the stream.
    fn launch(&self, shape: Shape) -> Result<(), EngineError> {
        let (d, c, ws) = (&*self.device, self.config, self.space(shape.rows));
        d.label(None, Component::Embedding);
        ws.send()?;
        ws.send_hidden(shape.rows * c.hidden)?;
        self.link(Link {
            tokens: ws.tokens(),
            hidden: ws.hidden.at(0),
            rows: shape.rows,
            span: ws.span(),
            splits: shape.splits,
            ring: 0,
            wanted: shape.wanted,
        })?;
        d.label(None, Component::Head);
        ws.bring(shape, c)?;
        d.label(None, Component::Router);
        ws.bring_choices(shape.taken, c)
    }

    /// The module over some rows, up to its logits.
    pub(super) fn link(&self, link: Link) -> Result<(), EngineError> {
        let (d, c, ws, w, rows) = (&*self.device, self.config, self.space(link.rows), &*self.weights, link.rows);
        let Some(module) = &w.mtp else { return Err(EngineError::Request("the model has no draft module".to_owned())) };
        d.label(None, Component::Embedding);
        let damage = ws.damage(Site { layer: c.layers, part: Part::Embedding });
        ops::embed(d, &w.embedding, link.tokens, rows, ws.normed.at(0), damage)?;
        let norms = (module.token_norm.at(0), module.hidden_norm.at(0));
        ops::mtp_join(d, (ws.normed.at(0), link.hidden), norms, c.rms_eps, (rows, c.hidden), ws.joined.at(0))?;
        let (turns, splits, span) = (w.turns.at(0), link.splits, link.span);
        let pass = Pass { device: d, config: c, ws, turns, rows, splits, pending: 0, span, planned: None };
        pass.input(ws.joined.at(0), 2 * c.hidden)?;
        pass.dense(&module.projection, ws.joined.at(0), ws.residual.at(0), c.hidden)?;
        pass.attention(c.layers, &module.layer, &LayerMemory::Mla(self.cache.layer(0)), false)?;
        // The module's experts are never clamped.
        pass.feed_forward(c.layers, &module.layer, link.ring, Limits::default())?;
        pass.output(module.final_norm.at(0), &w.head, link.wanted)
    }
}

impl DraftModule for CudaMtp<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn extend(
        &mut self,
        next_tokens: &[u32],
        hidden: &[f32],
        logits: LogitRows,
        tap: &mut dyn ForwardTap,
    ) -> Result<Forward<'_>, EngineError> {
        let (width, rows) = (self.config.hidden, next_tokens.len());
        if hidden.len() != rows * width {
            return Err(EngineError::Request(format!(
                "{rows} draft rows need {rows} hidden rows of {width}, not {} numbers",
                hidden.len()
            )));
        }
        let room = self.room();
        if rows > room.saturating_sub(self.len) {
            return Err(EngineError::Request(format!("{rows} draft rows after {} exceed the context of {room}", self.len)));
        }
        self.out.clear(1);
        // Of a long pass only the last row has logits.
        let most = self.long.as_ref().filter(|_| logits != LogitRows::All).map_or(PASS_ROWS, |long| long.rows);
        let (before, parts, wants) = (self.len, rows.div_ceil(most), Wants::of(tap));
        for (i, (tokens, hidden)) in next_tokens.chunks(most).zip(hidden.chunks(most * width)).enumerate() {
            let wanted = match logits {
                LogitRows::All => tokens.len(),
                LogitRows::Last => usize::from(i + 1 == parts),
                LogitRows::None => 0,
            };
            if let Err(error) = self.pass(tokens, hidden, wanted, wants) {
                self.len = before;
                return Err(error);
            }
        }
        self.out.kernels.drain(..).for_each(|kernel| tap.kernel(kernel));
        if rows > 0 && wants.routes {
            tap.routed(Module::Draft, self.config.layers, &self.out.ids[0], &self.out.weights[0]);
        }
        Ok(Forward { logits: &self.out.logits, hidden: &self.out.hidden, vocab: self.config.vocab, width })
    }
}
