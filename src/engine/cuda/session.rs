//! One timeline of the target on a device: passes, commits and exact rollback, as [`crate::engine::Session`]. Choosing is in `choose`.

use super::PASS_ROWS;
use super::choose::Chooser;
use super::device::Device;
use super::graph::Graphs;
use super::pass::{LayerMemory, Pass};
use super::planned::PlannedRows;
use super::ring::{Ending, Shape, Taken};
use super::site::{Part, Site};
use super::state::{KdaStates, MlaCaches};
use super::taps::{TapPoint, Taps};
use super::weights::{DeviceAttention, DeviceMlp, DeviceWeights};
use super::workspace::Workspace;
use crate::engine::clock::Clock;
use crate::engine::moe::Limits;
use crate::engine::session::{Forward, LogitRows};
use crate::engine::target::{Inspected, Judge, Target};
use crate::engine::{EngineError, ForwardTap, ModelConfig, RoutingPlan};
use crate::trace::{Component, KernelEvent, Module};
use std::borrow::Cow;
use std::cell::RefCell;
use std::rc::Rc;

/// A timeline on a device.
#[derive(Debug)]
pub struct CudaSession<'m> {
    pub(super) device: Rc<Device>,
    pub(super) config: &'m ModelConfig,
    weights: Rc<DeviceWeights>,
    /// Rows of windows, and of long passes where there is room for any.
    pub(super) ws: Workspace,
    long: Option<Workspace>,
    kda: KdaStates,
    mla: MlaCaches,
    planned: PlannedRows,
    pub(super) committed: usize,
    /// Rows that wait for a commit, and how many rows before them the last pass has committed by itself.
    pub(super) pending: usize,
    ahead: usize,
    /// Whether a pass that keeps rows by itself has failed, a long one or a judged window: some layers have gone on, and nothing takes them back.
    broken: bool,
    pub(super) out: HostRows,
    pub(super) taps: Option<Taps>,
    graphs: RefCell<Graphs<Work>>,
    /// How it chooses by itself, if it does.
    pub(super) chooser: Option<Chooser>,
}

/// What is launched together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Work {
    Pass(Shape),
    Commit,
}

/// What a pass leaves on the host.
#[derive(Debug, Default)]
pub(super) struct HostRows {
    pub hidden: Vec<f32>,
    pub logits: Vec<f32>,
    /// Of every routed layer the rows' choices.
    pub ids: Vec<Vec<u16>>,
    pub weights: Vec<Vec<f32>>,
    /// The kernels that ran, when they were timed.
    pub kernels: Vec<KernelEvent>,
}

/// What a pass's tap wants.
#[derive(Clone, Copy)]
pub(super) struct Wants {
    pub routes: bool,
    pub weights: bool,
    pub output: bool,
    pub clock: Option<Clock>,
}

impl Wants {
    pub fn of(tap: &dyn ForwardTap) -> Self {
        Self { routes: tap.wants_routes(), weights: tap.wants_weights(), output: tap.wants_output(), clock: tap.clock() }
    }

    /// How a pass ends that nobody chooses by on the device.
    pub fn ending(self) -> Ending {
        if self.output { Ending::Logits } else { Ending::Nothing }
    }

    /// What leaves the ring.
    pub fn taken(self) -> Taken {
        match (self.routes, self.weights) {
            (false, _) => Taken::Nothing,
            (true, false) => Taken::Ids,
            (true, true) => Taken::IdsAndWeights,
        }
    }
}

impl HostRows {
    pub fn clear(&mut self, routed: usize) {
        self.hidden.clear();
        self.logits.clear();
        self.kernels.clear();
        self.ids.resize(routed, Vec::new());
        self.weights.resize(routed, Vec::new());
        self.ids.iter_mut().for_each(Vec::clear);
        self.weights.iter_mut().for_each(Vec::clear);
    }
}

/// Numbers of the layers with a router.
fn routed_layers(weights: &DeviceWeights) -> impl Iterator<Item = usize> {
    weights.layers.iter().enumerate().filter(|(_, l)| matches!(l.mlp, DeviceMlp::Moe(_))).map(|(i, _)| i)
}

impl<'m> CudaSession<'m> {
    /// A timeline without tokens that has room for `tokens`; the rows at the points `tapped` are told to the pass's tap.
    ///
    /// # Errors
    /// When device memory runs out.
    pub fn new(
        device: &Rc<Device>,
        config: &'m ModelConfig,
        weights: &Rc<DeviceWeights>,
        tokens: usize,
        tapped: &[TapPoint],
    ) -> Result<Self, EngineError> {
        let kda = weights.layers.iter().filter(|l| matches!(l.attention, DeviceAttention::Kda(_))).count();
        let routed: Vec<usize> = routed_layers(weights).collect();
        Ok(Self {
            ws: Workspace::new(device, config, routed.len(), tokens)?,
            long: Workspace::long(device, config, routed.len(), tokens, true)?,
            planned: PlannedRows::new(device, routed, config.experts_per_token, tokens)?,
            kda: KdaStates::new(device, config, kda)?,
            mla: MlaCaches::new(device, config, weights.layers.len() - kda, tokens)?,
            graphs: RefCell::new(Graphs::new(device)),
            device: Rc::clone(device),
            config,
            weights: Rc::clone(weights),
            committed: 0,
            pending: 0,
            ahead: 0,
            broken: false,
            out: HostRows::default(),
            taps: Taps::new(device, tapped, config.hidden, tokens)?,
            chooser: None,
        })
    }

    /// Which of the layers of its kind a layer is.
    fn number_of_kind(&self, layer: usize) -> Option<(bool, usize)> {
        let is_kda = |l: &super::weights::DeviceLayer| matches!(l.attention, DeviceAttention::Kda(_));
        let kind = is_kda(self.weights.layers.get(layer)?);
        Some((kind, self.weights.layers[..layer].iter().filter(|l| is_kda(l) == kind).count()))
    }

    /// Where the rows of a pass of `rows` rows are.
    pub(super) fn space(&self, rows: usize) -> &Workspace {
        self.long.as_ref().filter(|_| rows > PASS_ROWS).unwrap_or(&self.ws)
    }

    /// Rows of the first pass of `rows` rows with these logits: of a long one only the last row has logits.
    fn first_pass(&self, rows: usize, logits: LogitRows) -> usize {
        let most = self.long.as_ref().filter(|_| logits != LogitRows::All && self.pending == 0).map_or(PASS_ROWS, |long| long.rows);
        rows.min(most)
    }

    /// Rows of the last pass of a prompt's end of `rows` rows.
    pub(super) fn last_pass(&self, mut rows: usize) -> usize {
        loop {
            match self.first_pass(rows, LogitRows::Last) {
                first if first < rows => rows -= first,
                _ => return rows,
            }
        }
    }

    /// One pass, the last `wanted` of its rows with logits. The host waits once. Of a window that was drafted on the device only the number of
    /// its `tokens` counts. The rows of a long pass are committed by itself.
    pub(super) fn pass(&mut self, tokens: &[u32], wanted: usize, wants: Wants, ending: Ending) -> Result<(), EngineError> {
        let (rows, position) = (tokens.len(), self.committed + self.pending);
        let long = rows > PASS_ROWS;
        self.space(rows).begin(tokens, position)?;
        self.planned.begin(position, rows)?;
        self.device.start(Module::Target, wants.clock)?;
        let (splits, planned) = (if long { 0 } else { self.ws.splits(position + rows) }, self.planned.is_on());
        let shape = Shape { rows, wanted, pending: self.pending, splits, taken: wants.taken(), ending, planned };
        self.broken = long || matches!(ending, Ending::Window { .. });
        if long {
            // Prompts have many lengths and come once each: a graph of one would hardly be used again, and takes a window's place.
            self.launch(shape)?;
        } else {
            self.graphs.borrow_mut().run(Work::Pass(shape), || self.launch(shape))?;
        }
        self.device.end()?;
        self.planned.prepare(position + rows + PASS_ROWS);
        self.device.wait()?;
        self.out.kernels.extend(self.device.timer.borrow_mut().finish()?);
        let (space, config) = (self.long.as_ref().filter(|_| long).unwrap_or(&self.ws), self.config);
        space.collect(shape, config, &mut self.out)?;
        if let Some(taps) = &mut self.taps {
            taps.collect(rows, ending)?;
        }
        self.broken = false;
        if long {
            self.committed += rows;
            self.ahead += rows;
        } else {
            self.pending += rows;
        }
        Ok(())
    }

    /// Puts a pass into the stream.
    fn launch(&self, shape: Shape) -> Result<(), EngineError> {
        let (ws, w) = (self.space(shape.rows), &*self.weights);
        let Shape { rows, pending, splits, .. } = shape;
        let planned = shape.planned.then_some(&self.planned);
        let (turns, span) = (w.turns.at(0), ws.span());
        let pass = Pass { device: &self.device, config: self.config, ws, turns, rows, splits, pending, span, planned };
        pass.label(None, Component::Embedding);
        ws.send()?;
        if let Some(planned) = planned {
            planned.send(rows)?;
        }
        let damage = ws.damage(Site { layer: 0, part: Part::Embedding });
        super::ops::embed(&self.device, &w.embedding, self.window_at(shape.ending, rows), rows, ws.residual.at(0), damage)?;
        let (mut kda, mut mla, mut ring) = (0, 0, 0);
        for (number, layer) in w.layers.iter().enumerate() {
            let limit = |list: &[f32]| list.get(number).copied().unwrap_or(0.0);
            let limits = Limits { expert: limit(&self.config.expert_limits), shared: limit(&self.config.shared_limits) };
            let memory = match layer.attention {
                DeviceAttention::Kda(_) => {
                    kda += 1;
                    LayerMemory::Kda(&self.kda, kda - 1)
                }
                DeviceAttention::Mla(_) => {
                    mla += 1;
                    LayerMemory::Mla(self.mla.layer(mla - 1))
                }
            };
            let tapped = |point| self.taps.as_ref().and_then(|taps| taps.place(point));
            pass.attention(number, layer, &memory, number > 0)?;
            if let Some(to) = tapped(TapPoint::Attention(number)) {
                pass.copy_rows(number, to)?;
            }
            pass.feed_forward(number, layer, ring, limits)?;
            ring += usize::from(matches!(layer.mlp, DeviceMlp::Moe(_)));
            if let Some(to) = tapped(TapPoint::Layer(number)) {
                pass.copy_rows(number, to)?;
            }
        }
        pass.output(w.final_norm.at(0), &w.head, shape.wanted)?;
        self.choose(shape)?;
        if let Some(taps) = &self.taps {
            pass.label(None, Component::Draft);
            taps.bring(rows, shape.ending)?;
        }
        pass.bring(shape)?;
        match shape.ending {
            Ending::Window { .. } if self.kda.layers > 0 => {
                pass.label(None, Component::Commit);
                self.kda.commit(&self.device, ws.verdict().1)
            }
            _ => Ok(()),
        }
    }

    /// Commits the first `rows` pending rows on the device.
    fn commit_rows(&mut self, rows: usize, clock: Option<Clock>) -> Result<(), EngineError> {
        if self.kda.layers > 0 && rows > 0 {
            self.kda.begin_commit(rows)?;
            self.device.start(Module::Target, clock)?;
            self.device.label(None, Component::Commit);
            self.graphs.borrow_mut().run(Work::Commit, || self.kda.commit_said(&self.device))?;
            self.device.end()?;
            self.out.kernels.extend(self.device.timer.borrow_mut().finish()?);
        }
        self.committed += rows;
        self.pending = 0;
        Ok(())
    }

    fn forward_all(&mut self, tokens: &[u32], logits: LogitRows, wants: Wants, ending: Ending) -> Result<(), EngineError> {
        let mut rest = tokens;
        while !rest.is_empty() {
            let (part, after) = rest.split_at(self.first_pass(rest.len(), logits));
            rest = after;
            let last = rest.is_empty();
            let wanted = match logits {
                LogitRows::All => part.len(),
                LogitRows::Last => usize::from(last),
                LogitRows::None => 0,
            };
            self.pass(part, wanted, wants, if last { ending } else { wants.ending() })?;
            if !last && self.pending > 0 {
                // Rows of a pass that is longer than a window are committed as they go; see `Target::forward`.
                self.ahead += self.pending;
                self.commit_rows(self.pending, wants.clock)?;
            }
        }
        Ok(())
    }
}

impl CudaSession<'_> {
    /// Refuses tokens that are none, and more than there is room for.
    pub(super) fn check(&self, tokens: &[u32], rows: usize) -> Result<(), EngineError> {
        let (vocab, position) = (self.config.vocab, self.committed + self.pending);
        if self.broken {
            return Err(EngineError::Request("a pass over this timeline has failed; reset it first".to_owned()));
        }
        if let Some(token) = tokens.iter().find(|t| usize::try_from(**t).is_ok_and(|t| t >= vocab)) {
            return Err(EngineError::Request(format!("token id {token} is not below the vocabulary size {vocab}")));
        }
        let room = self.mla.tokens.min(self.config.max_position);
        if rows > room.saturating_sub(position) {
            return Err(EngineError::Request(format!("{rows} tokens after {position} exceed the context of {room}")));
        }
        if self.pending > 0 && self.pending + rows > PASS_ROWS {
            let text = format!(
                "{rows} rows after {} pending ones are more than {PASS_ROWS}, which is what a pass on the device has",
                self.pending
            );
            return Err(EngineError::Request(text));
        }
        Ok(())
    }

    /// Forgets the results of the passes before.
    pub(super) fn begin_results(&mut self) {
        let routed = self.weights.layers.iter().filter(|l| matches!(l.mlp, DeviceMlp::Moe(_))).count();
        self.out.clear(routed);
        self.taps.iter_mut().for_each(Taps::clear);
    }

    /// Tells a tap of the passes since then.
    pub(super) fn tell(&mut self, tap: &mut dyn ForwardTap, wants: Wants) {
        self.out.kernels.drain(..).for_each(|kernel| tap.kernel(kernel));
        if wants.routes {
            let routed = self.weights.layers.iter().enumerate().filter(|(_, l)| matches!(l.mlp, DeviceMlp::Moe(_)));
            for ((number, _), (ids, values)) in routed.zip(self.out.ids.iter().zip(&self.out.weights)) {
                tap.routed(Module::Target, number, ids, values);
            }
        }
        self.taps.iter().for_each(|taps| taps.tell(tap));
    }

    /// Runs tokens of any number, the last pass with an ending, and tells the tap.
    pub(super) fn forward_to(
        &mut self,
        tokens: &[u32],
        logits: LogitRows,
        tap: &mut dyn ForwardTap,
        ending: Ending,
    ) -> Result<(), EngineError> {
        self.check(tokens, tokens.len())?;
        self.begin_results();
        let wants = Wants::of(tap);
        let done = self.forward_all(tokens, logits, wants, ending);
        // Parts before the one that failed are committed, and nobody has been told.
        self.broken |= done.is_err() && self.ahead > 0;
        done?;
        self.tell(tap, wants);
        Ok(())
    }

    /// What the last passes have left on the host.
    pub(super) fn results(&self) -> Forward<'_> {
        Forward { logits: &self.out.logits, hidden: &self.out.hidden, vocab: self.config.vocab, width: self.config.hidden }
    }
}

impl Target for CudaSession<'_> {
    fn reset(&mut self) -> Result<(), EngineError> {
        (self.committed, self.pending, self.ahead, self.broken) = (0, 0, 0, false);
        self.device.forget_times();
        self.kda.clear()
    }

    fn len(&self) -> usize {
        self.committed - self.ahead
    }

    fn forward(&mut self, tokens: &[u32], logits: LogitRows, tap: &mut dyn ForwardTap) -> Result<Forward<'_>, EngineError> {
        let ending = Wants::of(tap).ending();
        self.forward_to(tokens, logits, tap, ending)?;
        Ok(self.results())
    }

    fn commit(&mut self, rows: usize, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let rows = rows.saturating_sub(self.ahead).min(self.pending);
        self.commit_rows(rows, tap.clock())?;
        self.ahead = 0;
        self.out.kernels.drain(..).for_each(|kernel| tap.kernel(kernel));
        Ok(())
    }

    fn judge(&mut self) -> Option<&mut dyn Judge> {
        if self.chooser.is_some() { Some(self) } else { None }
    }

    fn route_by(&mut self, plan: Option<RoutingPlan>) {
        self.planned.route_by(plan);
    }

    fn settle(&mut self, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        self.device.settle(tap)
    }
}

impl Inspected for CudaSession<'_> {
    fn kda_state(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError> {
        let Some((true, number)) = self.number_of_kind(layer) else { return Ok(None) };
        self.kda.read_state(number).map(|state| Some(state.into()))
    }

    fn conv_state(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError> {
        let Some((true, number)) = self.number_of_kind(layer) else { return Ok(None) };
        self.kda.read_history(number).map(|rows| Some(rows.into()))
    }

    fn mla_cache(&self, layer: usize) -> Result<Option<Cow<'_, [f32]>>, EngineError> {
        let Some((false, number)) = self.number_of_kind(layer) else { return Ok(None) };
        self.mla.read(number, self.committed).map(|rows| Some(rows.into()))
    }
}
