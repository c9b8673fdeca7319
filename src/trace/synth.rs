//! Seeded synthetic traces for tests, benches and examples.
//!
//! The default routing has the shape of a 512-expert model: each layer chooses by a Zipf law of its own
//! exponent (0.49 to 0.91) and permutation, and keeps each expert of the position before with p = 0.22.

use super::manifest::{
    DeviceInfo, DrafterInfo, IdSpace, Instrumentation, Manifest, ModelShape, SamplingInfo, Verification, Warning, WindowCompleteness,
};
use super::version::FORMAT_VERSION;
use super::{
    Component, Ending, ExpertSet, FinishReason, KernelEvent, Module, Phase, Probe, RequestEvent, StepEvent, StepRoutes, TraceError,
};
use super::{TraceWriter, WriterOptions};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;

/// How the experts of a row are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// k distinct experts, all equally likely, rows independent.
    Uniform,
    /// By a Zipf law whose exponent rises from `low` in the first layer to `high` in the last; each expert of
    /// the position before is kept with probability `carry`.
    Zipf {
        /// Exponent of the first layer.
        low: f64,
        /// Exponent of the last layer.
        high: f64,
        /// Probability of keeping an expert of the position before.
        carry: f64,
    },
    /// All rows of a window choose the same experts.
    Identical,
}

/// Planted times of operations, µs: what an analysis must find again.
///
/// In each layer the experts take `base + per_expert U + per_row W` for the union U of the pass's W rows, then attention takes
/// `attention + attention_per_row W`. Each gets uniform noise of +- `noise`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "the formula above says what each is")]
pub struct PlantedTimes {
    pub base: f64,
    pub per_expert: f64,
    pub per_row: f64,
    pub attention: f64,
    pub attention_per_row: f64,
    pub noise: f64,
}

/// What to make up.
#[derive(Debug, Clone, PartialEq)]
pub struct Synth {
    /// Of the random numbers: equal parameters make equal events.
    pub seed: u64,
    /// Number of requests.
    pub requests: u32,
    /// Prompt rows per request.
    pub prompt_rows: u16,
    /// Verify steps per request.
    pub verify_steps: u32,
    /// A decode step comes after so many verify steps; 0 for none.
    pub decode_every: u32,
    /// Rows of a verify step, anchor included; at least 2.
    pub rows: u16,
    /// Probability that a draft is accepted when the one before was.
    pub acceptance: f64,
    /// Layers with a router, absolute numbers.
    pub layers: Vec<u16>,
    /// A router of the draft module at this layer, with one row per draft.
    pub draft_layer: Option<u16>,
    /// Experts per layer, at most 512.
    pub experts: u16,
    /// Experts per row.
    pub k: u16,
    /// How they are chosen.
    pub routing: Routing,
    /// Whether gate weights are made, too.
    pub weights: bool,
    /// Operations and their times, for a probe that wants them.
    pub times: Option<PlantedTimes>,
}

impl Default for Synth {
    /// A small trace in the shape of a large model: 40 layers, 512 experts, top-8, 3 drafts.
    fn default() -> Self {
        Self {
            seed: 1,
            requests: 2,
            prompt_rows: 5,
            verify_steps: 10,
            decode_every: 5,
            rows: 4,
            acceptance: 0.7,
            layers: (2..42).collect(),
            draft_layer: None,
            experts: 512,
            k: 8,
            routing: Routing::Zipf { low: 0.49, high: 0.91, carry: 0.22 },
            weights: false,
            times: None,
        }
    }
}

/// Entries of a sampling table: fine enough for the rarest of 512 experts.
const TABLE: usize = 1 << 16;
/// Tokens are below this.
const VOCABULARY: u32 = 1000;
/// Begin of the first step, ns since the Unix epoch: a constant, so that traces repeat.
const EPOCH_NS: i64 = 1_700_000_000_000_000_000;
/// Length of a step, ns.
const STEP_NS: i64 = 5_000_000;
/// Time of drafting, ns.
const DRAFT_NS: i64 = 100_000;

impl Synth {
    /// The manifest that goes with the events. It says that no real device ran.
    pub fn manifest(&self) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION.to_string(),
            written_by: concat!("specprof ", env!("CARGO_PKG_VERSION")).into(),
            complete: false,
            incomplete_reason: None,
            started_unix_ns: EPOCH_NS,
            ended_unix_ns: None,
            model: ModelShape {
                name: "synthetic".into(),
                architecture: "synthetic".into(),
                identity: None,
                layers: self.layers.last().map_or(0, |last| last + 1),
                moe_layers: self.layers.clone(),
                draft_layers: self.draft_layer.into_iter().collect(),
                experts: self.experts,
                experts_known: true,
                experts_per_token: self.k,
                shared_experts: Some(1),
                hidden_size: Some(64),
                expert_size: Some(32),
                vocab_size: Some(VOCABULARY),
                quantisation: "f32".into(),
                bytes_per_expert: Some(3 * 64 * 32 * 4),
                bytes_other_per_step: Some(100 * 3 * 64 * 32 * 4),
                synthetic: false,
                routing: None,
            },
            drafter: DrafterInfo {
                kind: "ngram".into(),
                draft_len: Some(self.rows.saturating_sub(1)),
                bytes_per_draft: Some(0),
                external: None,
            },
            sampling: Some(SamplingInfo { temperature: 0.0, top_p: 1.0, top_k: 0, seed: self.seed, max_new_tokens: 0, ignore_eos: true }),
            verification: Verification::Exact,
            engine: "synthetic".into(),
            device: DeviceInfo { kind: "cpu".into(), name: "none".into(), units: None },
            window_completeness: WindowCompleteness::Full,
            id_space: IdSpace::Logical,
            token_hash: None,
            instrumentation: Instrumentation::default(),
            emulated: true,
            host_times: true,
            acceptance_known: true,
            passes_known: true,
            irregular_steps: 0,
            expert_counts: None,
            router_weights: self.weights,
            text_stored: false,
            warnings: vec![Warning::new("synthetic", "made up by a random generator: no model ran")],
            tables: BTreeMap::new(),
        }
    }

    /// Hands all events to a probe, in order.
    ///
    /// # Errors
    /// Those of the probe.
    pub fn emit(&self, probe: &mut impl Probe) -> Result<(), TraceError> {
        let mut source = Source::new(self);
        for request_id in 0..self.requests {
            source.request(request_id, probe)?;
        }
        Ok(())
    }

    /// Writes a complete trace into `dir` and gives its manifest.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, dir: &Path) -> Result<Manifest, TraceError> {
        let options = WriterOptions { kernels: self.times.is_some(), ..WriterOptions::default() };
        let mut writer = TraceWriter::create(dir, self.manifest(), &options)?;
        self.emit(&mut writer)?;
        writer.finish(Ending::Complete)
    }
}

/// One layer's router.
struct Layer {
    number: u16,
    /// Experts, each as often as it is likely; empty where all are equally likely.
    table: Vec<u16>,
    /// Experts of the position before.
    before: Vec<u16>,
}

struct Source<'a> {
    synth: &'a Synth,
    rng: ChaCha8Rng,
    carry: f64,
    layers: Vec<Layer>,
    draft: Option<Layer>,
    step_id: u32,
    /// Begin of the next step, ns.
    now: i64,
}

impl<'a> Source<'a> {
    fn new(synth: &'a Synth) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(synth.seed);
        let last = synth.layers.len().saturating_sub(1).max(1) as f64;
        let mut layer = |number, place: usize| {
            let table = match synth.routing {
                Routing::Zipf { low, high, .. } => zipf_table(&mut rng, synth.experts, low + (high - low) * place as f64 / last),
                Routing::Uniform | Routing::Identical => Vec::new(),
            };
            Layer { number, table, before: Vec::new() }
        };
        let layers = synth.layers.iter().enumerate().map(|(place, &number)| layer(number, place)).collect();
        let draft = synth.draft_layer.map(|number| layer(number, synth.layers.len()));
        let carry = if let Routing::Zipf { carry, .. } = synth.routing { carry } else { 0.0 };
        Self { synth, rng, carry, layers, draft, step_id: 0, now: EPOCH_NS }
    }

    fn request(&mut self, request_id: u32, probe: &mut impl Probe) -> Result<(), TraceError> {
        let s = self.synth;
        let mut context = 0;
        let mut emitted = 0;
        if s.prompt_rows > 0 {
            emitted += self.step(request_id, Phase::Prefill, s.prompt_rows, &mut context, probe)?;
        }
        for i in 0..s.verify_steps {
            emitted += self.step(request_id, Phase::Verify, s.rows, &mut context, probe)?;
            if s.decode_every > 0 && (i + 1) % s.decode_every == 0 {
                emitted += self.step(request_id, Phase::Decode, 1, &mut context, probe)?;
            }
        }
        probe.request(RequestEvent {
            request_id,
            id: format!("synthetic-{request_id}"),
            prompt_tokens: u32::from(s.prompt_rows),
            generated_tokens: emitted,
            finish_reason: FinishReason::Length,
            tags: "{}".into(),
            prompt_text: None,
            output_text: None,
        })
    }

    /// Makes one step; gives the number of emitted tokens.
    fn step(&mut self, request_id: u32, phase: Phase, rows: u16, context: &mut u32, probe: &mut impl Probe) -> Result<u32, TraceError> {
        let mut accepted = 0;
        while phase == Phase::Verify && accepted + 1 < rows && chance(&mut self.rng, self.synth.acceptance) {
            accepted += 1;
        }
        let kept = if phase == Phase::Prefill { rows } else { accepted + 1 };
        let tokens = |rng: &mut ChaCha8Rng, n: u16| -> Vec<u32> { (0..n).map(|_| rng.next_u32() % VOCABULARY).collect() };
        let begin = self.now;
        let routes = self.routes(phase, rows, kept, probe.wants_weights());
        let (input_tokens, emitted_tokens) = (tokens(&mut self.rng, rows), tokens(&mut self.rng, accepted + 1));
        let draft_probs = (phase == Phase::Verify).then(|| (1..rows).map(|_| unit(&mut self.rng) as f32).collect());
        let made_up = 4_000_000 + i64::from(self.rng.next_u32() % 500_000);
        let operations = match self.synth.times {
            Some(times) if probe.wants_kernels() => self.operations(&times, rows, &routes, begin + DRAFT_NS),
            _ => Vec::new(),
        };
        let planted = operations.last().map(|last| last.end_ns - begin - DRAFT_NS);
        let target_host_ns = planted.unwrap_or(made_up);
        self.now += STEP_NS.max(target_host_ns + 2 * DRAFT_NS);
        let step = StepEvent {
            step_id: self.step_id,
            request_id,
            phase,
            accepted,
            context_len: *context,
            input_tokens,
            pass_id: None,
            parents: None,
            emitted_tokens,
            draft_confidences: draft_probs.as_ref().map(|probs: &Vec<f32>| probs.iter().map(|p| 1.0 - p / 2.0).collect()),
            draft_probs,
            host_begin_ns: begin,
            host_end_ns: self.now - 1000,
            draft_host_ns: if phase == Phase::Verify { DRAFT_NS } else { 0 },
            target_host_ns,
            device_ns: None,
            routes,
        };
        let step_id = self.step_id;
        self.step_id += 1;
        *context += u32::from(kept);
        probe.step(step)?;
        if !operations.is_empty() {
            probe.kernels(step_id, operations)?;
        }
        Ok(u32::from(accepted) + 1)
    }

    /// A layer's experts and attention, one after the other, for every routed layer of the target.
    fn operations(&mut self, times: &PlantedTimes, rows: u16, routes: &StepRoutes, begin: i64) -> Vec<KernelEvent> {
        let mut operations = Vec::with_capacity(2 * routes.blocks.len());
        let mut ids = routes.ids.chunks(routes.k.max(1));
        let (mut at, rows) = (begin, f64::from(rows));
        for block in &routes.blocks {
            let mut union = ExpertSet::EMPTY;
            ids.by_ref().take(usize::from(block.rows)).flatten().for_each(|&id| union.insert(id));
            if block.module == Module::Draft {
                continue;
            }
            let planned = [
                (Component::Experts, times.base + times.per_expert * f64::from(union.len()) + times.per_row * rows),
                (Component::Kda, times.attention + times.attention_per_row * rows),
            ];
            for (component, us) in planned {
                let us = us + times.noise * (2.0 * unit(&mut self.rng) - 1.0);
                let end = at + (us * 1000.0).max(0.0).round() as i64;
                operations.push(KernelEvent::cpu(Module::Target, Some(block.layer), component, at, end));
                at = end;
            }
        }
        operations
    }

    fn routes(&mut self, phase: Phase, rows: u16, kept: u16, weights: bool) -> StepRoutes {
        let k = usize::from(self.synth.k);
        let identical = self.synth.routing == Routing::Identical;
        let mut routes = StepRoutes::new(k);
        let mut ids = Vec::with_capacity(usize::from(rows) * k);
        let drafts = if phase == Phase::Verify { rows - 1 } else { 0 };
        let draft = self.draft.iter_mut().map(|layer| (Module::Draft, drafts, layer));
        for (module, rows, layer) in self.layers.iter_mut().map(|layer| (Module::Target, rows, layer)).chain(draft) {
            ids.clear();
            for row in 0..usize::from(rows) {
                if identical && row > 0 {
                    ids.extend_from_within(..k);
                    continue;
                }
                let begin = ids.len();
                choose(&mut self.rng, &layer.table, self.synth.experts, k, self.carry, &layer.before, &mut ids);
                layer.before.clear();
                layer.before.extend_from_slice(&ids[begin..]);
            }
            if rows == 0 {
                continue;
            }
            // The next window continues what was kept.
            let last = usize::from(kept.min(rows)) - 1;
            layer.before.clear();
            layer.before.extend_from_slice(&ids[last * k..(last + 1) * k]);
            let gates = if weights { gates(&mut self.rng, ids.len() / k.max(1), k) } else { Vec::new() };
            routes.push(module, layer.number, 0, &ids, &gates);
        }
        routes
    }
}

/// Appends k distinct experts: those carried over, then new ones.
fn choose(rng: &mut ChaCha8Rng, table: &[u16], experts: u16, k: usize, carry: f64, before: &[u16], ids: &mut Vec<u16>) {
    let mut chosen = ExpertSet::EMPTY;
    let mut left = k;
    // One random number decides about all experts of the row before: 16 bits each for four of them.
    let threshold = (carry * 65_536.0) as u64;
    for four in before.chunks(if carry > 0.0 { 4 } else { usize::MAX }).filter(|_| carry > 0.0) {
        let bits = rng.next_u64();
        for (i, &id) in four.iter().enumerate() {
            if bits >> (16 * i) & 0xffff < threshold {
                chosen.insert(id);
                ids.push(id);
                left -= 1;
            }
        }
    }
    while left > 0 {
        let bits = rng.next_u64();
        for draw in [bits as u16, (bits >> 16) as u16, (bits >> 32) as u16, (bits >> 48) as u16] {
            let id = match table.get(usize::from(draw)) {
                Some(&id) => id,
                None => ((u32::from(draw) * u32::from(experts)) >> 16) as u16,
            };
            if left > 0 && !chosen.contains(id) {
                chosen.insert(id);
                ids.push(id);
                left -= 1;
            }
        }
    }
}

/// Each expert of a random permutation as often as a Zipf law says, at least once.
fn zipf_table(rng: &mut ChaCha8Rng, experts: u16, exponent: f64) -> Vec<u16> {
    let mut order: Vec<u16> = (0..experts).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
    let shares: Vec<f64> = (1..=order.len()).map(|rank| (rank as f64).powf(-exponent)).collect();
    let total: f64 = shares.iter().sum();
    let spare = (TABLE - order.len()) as f64;
    let mut table = Vec::with_capacity(TABLE);
    for (&expert, share) in order.iter().zip(&shares) {
        table.resize(table.len() + 1 + (share / total * spare) as usize, expert);
    }
    // What rounding down has left goes to the most popular.
    table.resize(TABLE, order.first().copied().unwrap_or(0));
    table
}

/// Gate weights that fall with the rank and sum to 1.
fn gates(rng: &mut ChaCha8Rng, rows: usize, k: usize) -> Vec<f32> {
    let mut weights = Vec::with_capacity(rows * k);
    for _ in 0..rows {
        let mut row: Vec<f64> = (0..k).map(|_| 0.05 + unit(rng)).collect();
        row.sort_by(|a, b| b.total_cmp(a));
        let sum: f64 = row.iter().sum();
        weights.extend(row.iter().map(|w| (w / sum) as f32));
    }
    weights
}

fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn chance(rng: &mut ChaCha8Rng, p: f64) -> bool {
    unit(rng) < p
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts neighbours' common experts.
    #[derive(Default)]
    struct Overlap {
        common: u64,
        pairs: u64,
    }

    impl Probe for Overlap {
        fn step(&mut self, step: StepEvent) -> Result<(), TraceError> {
            let mut rows = step.routes.ids.chunks(step.routes.k);
            for block in &step.routes.blocks {
                let sets: Vec<_> = rows.by_ref().take(usize::from(block.rows)).map(ExpertSet::from_ids).collect();
                assert!(sets.iter().all(|set| set.len() == 8), "k distinct experts");
                for pair in sets.windows(2) {
                    self.common += u64::from(pair[0].intersection_len(&pair[1]));
                    self.pairs += 1;
                }
            }
            Ok(())
        }

        fn request(&mut self, _: RequestEvent) -> Result<(), TraceError> {
            Ok(())
        }
    }

    fn overlap(routing: Routing) -> f64 {
        let mut probe = Overlap::default();
        Synth { verify_steps: 100, requests: 1, routing, ..Synth::default() }.emit(&mut probe).unwrap();
        probe.common as f64 / probe.pairs as f64
    }

    #[test]
    fn neighbours_overlap_as_intended() {
        let zipf = overlap(Synth::default().routing);
        // 8 * 0.22 carried over, and what skewed popularity adds.
        assert!((1.8..2.4).contains(&zipf), "{zipf}");
        let uniform = overlap(Routing::Uniform);
        assert!((0.08..0.18).contains(&uniform), "{uniform}");
        assert_eq!(overlap(Routing::Identical), 8.0);
    }
}
