//! The common way from foreign rows to a trace: numbers steps and requests, counts what was left out, writes.

use super::place::{check_free, place};
pub use super::source::{Source, step, unknown_tokens};
use super::{Flag, ImportError, Options, flags};
use crate::metric::counted_plain;
use crate::trace::expert_set::MAX_EXPERTS;
use crate::trace::manifest::{Manifest, Warning, WindowCompleteness};
use crate::trace::temporaries::{self, Kind, Making};
use crate::trace::writer::{Ending, WriterOptions};
use crate::trace::{
    FREE_LIST_VALUES, FinishReason, KernelEvent, Module, Phase, Probe, RequestEvent, StepEvent, TelemetrySample, Trace, TraceError,
    TraceWriter, manifest_fault,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Events that wait for the trace's writer.
const QUEUE: usize = 64;
/// So many times as many rows as a trace may have are written before the import gives up.
const MOST_UNVOUCHED: u64 = 32;
/// The warning's code where k is not known.
const K_UNKNOWN: &str = "experts_per_token_unknown";
const NEVER: Duration = Duration::from_secs(1 << 32);

/// Rows of one kind that were left out: how many, and the sentence around the number.
#[derive(Debug, Clone)]
struct LeftOut {
    rows: u64,
    what: String,
}

/// A trace that is being made of foreign events. Dropped without [`Sink::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Sink {
    out: PathBuf,
    temporary: PathBuf,
    /// A signal removes what lies there.
    _making: Making,
    options: Options,
    writer: Option<TraceWriter>,
    next_step: u32,
    next_request: u32,
    next_pass: u32,
    emitted: BTreeMap<u32, u32>,
    /// Largest expert id by whether it was the target's, to number experts that nobody counted.
    largest_id: Option<u16>,
    layers: BTreeSet<u16>,
    draft_layers: BTreeSet<u16>,
    /// The layers in the order in which they came first, and the place of the next one expected.
    order: Vec<(Module, u16)>,
    turn: usize,
    /// Steps behind the prompts, by the number of layers in which all of their rows have routes; `None`: in some layer some have.
    whole_layers: BTreeMap<Option<usize>, u64>,
    left_out: BTreeMap<&'static str, LeftOut>,
    warnings: Vec<Warning>,
    counts: BTreeMap<u16, Vec<u64>>,
    /// Sum of all of them.
    counted: u64,
    /// Input tokens of all steps, and what takes room in the files: expert ids and operations.
    tokens: u64,
    vouched: u64,
    /// As many rows are believed of any input.
    free_rows: u64,
    /// The options that the importer takes, for the way out of what is not known.
    takes: &'static [Flag],
    ending: Ending,
}

impl Sink {
    /// Checks that a trace can be made at `out`; nothing is written yet.
    ///
    /// # Errors
    /// [`TraceError::Exists`] when something is there, with `force` [`TraceError::NotATrace`] when that is more than a trace.
    pub fn create(out: &Path, options: &Options) -> Result<Self, ImportError> {
        check_free(out, options.force || options.into.is_some())?;
        if out.file_name().is_none() {
            return Err(ImportError::input(out, "not a name for a trace; give another -o"));
        }
        temporaries::remove_leftovers(out, Kind::Trace);
        let temporary = temporaries::place(out, Kind::Trace);
        Ok(Self {
            out: out.to_owned(),
            _making: temporaries::making(&temporary),
            temporary,
            options: options.clone(),
            writer: None,
            next_step: 0,
            next_request: 0,
            next_pass: 0,
            emitted: BTreeMap::new(),
            largest_id: None,
            layers: BTreeSet::new(),
            draft_layers: BTreeSet::new(),
            order: Vec::new(),
            turn: 0,
            whole_layers: BTreeMap::new(),
            left_out: BTreeMap::new(),
            warnings: Vec::new(),
            counts: BTreeMap::new(),
            counted: 0,
            tokens: 0,
            vouched: 0,
            free_rows: FREE_LIST_VALUES,
            takes: flags::COUNTS,
            ending: Ending::Complete,
        })
    }

    /// The same for an importer that takes these options, which warnings may name.
    #[must_use]
    pub fn taking(mut self, takes: &'static [Flag]) -> Self {
        self.takes = takes;
        self
    }

    /// Whether [`Sink::begin`] was called.
    pub fn has_begun(&self) -> bool {
        self.writer.is_some()
    }

    /// Starts the trace. `path` is the input that is named when the shape cannot be one.
    ///
    /// # Errors
    /// When k or the number of experts is impossible or contradicts the options, or the directory cannot be written.
    pub fn begin(&mut self, path: &Path, source: &Source) -> Result<(), ImportError> {
        let experts = self.options.known_experts();
        if let Some(known) = self.options.known_k().filter(|&k| source.k > 0 && k != source.k) {
            return Err(ImportError::input(path, format!("{} experts per row, --k or the model's configuration says {known}", source.k)));
        }
        if let Some(e) = experts.filter(|&e| e < source.k || usize::from(e) > MAX_EXPERTS) {
            let reason = format!("{} experts per row of {e}; at most {MAX_EXPERTS} experts are supported", source.k);
            return Err(ImportError::input(path, reason));
        }
        let facts = source.manifest(&self.options, experts);
        self.create_writer(facts)
    }

    fn create_writer(&mut self, facts: Manifest) -> Result<(), ImportError> {
        // Few events wait: a step of a long prompt has megabytes of routes.
        // Nobody reads it before it is whole: no small parts at commits that would be merged again.
        let options = WriterOptions { force: true, queue: QUEUE, count_waits: false, flush_interval: NEVER, kernels: false };
        self.writer = Some(TraceWriter::create(&self.temporary, facts, &options)?);
        Ok(())
    }

    /// Starts a trace whose facts are all known already.
    ///
    /// # Errors
    /// As [`Sink::begin`].
    pub fn begin_with(&mut self, path: &Path, facts: Manifest) -> Result<(), ImportError> {
        if usize::from(facts.model.experts) > MAX_EXPERTS {
            let reason = format!("{} experts; at most {MAX_EXPERTS} are supported", facts.model.experts);
            return Err(ImportError::input(path, reason));
        }
        self.create_writer(facts)
    }

    /// Says that the trace will end as an incomplete one, and why.
    pub fn incomplete(&mut self, reason: String) {
        self.ending = Ending::Incomplete(reason);
    }

    /// Adds a sample of the machine's state.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn telemetry(&mut self, sample: TelemetrySample) -> Result<(), ImportError> {
        Ok(self.writer()?.sample(sample)?)
    }

    /// The run's facts, to be completed before [`Sink::finish`]; `None` before [`Sink::begin`].
    pub fn facts_mut(&mut self) -> Option<&mut Manifest> {
        self.writer.as_mut().map(TraceWriter::facts_mut)
    }

    /// The next request's number.
    pub fn request_id(&mut self) -> u32 {
        self.next_request += 1;
        self.next_request - 1
    }

    /// The next forward pass's number.
    ///
    /// # Errors
    /// When there are more than numbers.
    pub fn pass_id(&mut self) -> Result<u32, ImportError> {
        let number = self.next_pass;
        self.next_pass = number.checked_add(1).ok_or_else(|| TraceError::Event { what: format!("pass {number}: too many passes") })?;
        Ok(number)
    }

    /// Adds a step under the next number, which it returns.
    ///
    /// # Errors
    /// When it contradicts the trace, or the trace cannot be written.
    pub fn step(&mut self, step: StepEvent) -> Result<u32, ImportError> {
        self.step_with_id(StepEvent { step_id: self.next_step, ..step })
    }

    /// Adds a step that has a number of its own, which must ascend.
    ///
    /// # Errors
    /// As [`Sink::step`].
    pub fn step_with_id(&mut self, step: StepEvent) -> Result<u32, ImportError> {
        let id = step.step_id;
        self.next_step = id.checked_add(1).ok_or_else(|| TraceError::Event { what: format!("step {id}: too many steps") })?;
        *self.emitted.entry(step.request_id).or_default() += u32::try_from(step.emitted_tokens.len()).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(step.input_tokens.len() as u64);
        self.vouched = self.vouched.saturating_add(step.routes.ids.len() as u64);
        // Rows are announced by small numbers: nothing goes on for hours that cannot be read in the end.
        if self.tokens / MOST_UNVOUCHED > self.free_rows.max(self.vouched) {
            return Err(self.too_many_rows(""));
        }
        self.largest_id = self.largest_id.max(step.routes.ids.iter().max().copied());
        for block in &step.routes.blocks {
            let (module, layer) = (block.module, block.layer);
            // Steps have their layers in the same order: mostly it is the one that came there before.
            self.turn = if self.turn < self.order.len() { self.turn } else { 0 };
            if self.order.get(self.turn) != Some(&(module, layer)) {
                let layers = if module == Module::Target { &mut self.layers } else { &mut self.draft_layers };
                if layers.insert(layer) {
                    self.order.push((module, layer));
                }
                self.turn = self.order.iter().position(|known| *known == (module, layer)).unwrap_or(0);
            }
            self.turn += 1;
        }
        if step.phase != Phase::Prefill {
            let routed: usize = step.routes.blocks.iter().filter(|b| b.module == Module::Target).map(|b| usize::from(b.rows)).sum();
            let whole = routed.is_multiple_of(step.rows()).then(|| routed / step.rows().max(1));
            *self.whole_layers.entry(whole).or_default() += 1;
        }
        let wrong = |w: &&f32| **w < 0.0 || w.is_infinite();
        if let Some(weight) = step.routes.weights.iter().find(wrong) {
            return Err(TraceError::Event { what: format!("step {id}: {weight} is not a gate weight") }.into());
        }
        self.writer()?.step(step)?;
        Ok(id)
    }

    /// Adds the operations of a step that was added before; steps ascend, each comes once.
    ///
    /// # Errors
    /// When they contradict the trace, or the trace cannot be written.
    pub fn kernels(&mut self, step_id: u32, kernels: Vec<KernelEvent>) -> Result<(), ImportError> {
        self.vouched = self.vouched.saturating_add(kernels.len() as u64);
        Ok(self.writer()?.kernels(step_id, kernels)?)
    }

    /// Ends a request.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn request(&mut self, request: RequestEvent) -> Result<(), ImportError> {
        Ok(self.writer()?.request(request)?)
    }

    /// Ends a request of which only this much is known; what its steps emitted is what it generated.
    ///
    /// # Errors
    /// As [`Sink::request`].
    pub fn end_request(
        &mut self,
        request_id: u32,
        id: String,
        prompt_tokens: u32,
        finish_reason: FinishReason,
        tags: String,
    ) -> Result<(), ImportError> {
        let generated_tokens = self.emitted.remove(&request_id).unwrap_or(0);
        self.request(RequestEvent {
            request_id,
            id,
            prompt_tokens,
            generated_tokens,
            finish_reason,
            tags,
            prompt_text: None,
            output_text: None,
        })
    }

    /// Starts a trace that holds counts by expert and neither steps nor routes. Without `k`, how many rows the counts
    /// are of is not known.
    ///
    /// # Errors
    /// As [`Sink::begin`].
    pub fn begin_counts(&mut self, path: &Path, engine: &str, k: Option<u16>) -> Result<(), ImportError> {
        if self.has_begun() {
            return Ok(());
        }
        let window_completeness = WindowCompleteness::Counts;
        self.begin(path, &Source { engine: engine.into(), k: k.unwrap_or(0), window_completeness, ..Source::default() })
    }

    /// Adds how often each expert of a layer was chosen. `path` is the input that is named when they are too many.
    ///
    /// # Errors
    /// When all counts together are more than 64 bits hold.
    pub fn counts(&mut self, path: &Path, layer: u16, by_expert: &[u64]) -> Result<(), ImportError> {
        let counts = self.counts.entry(layer).or_default();
        counts.resize(counts.len().max(by_expert.len()), 0);
        for (expert, (sum, n)) in counts.iter_mut().zip(by_expert).enumerate() {
            // Whatever is summed of them later fits as well.
            self.counted = self.counted.checked_add(*n).ok_or_else(|| {
                let reason =
                    format!("layer {layer}, expert {expert}: a count of {n}, which with those before it is more than 64 bits hold");
                ImportError::input(path, reason)
            })?;
            *sum += n;
        }
        Ok(())
    }

    /// Says something under every report of the trace; of one code, the first sentence stays.
    pub fn warn(&mut self, code: &str, message: impl Into<String>) {
        if !self.warnings.iter().any(|w| w.code == code) {
            self.warnings.push(Warning::new(code, message));
        }
    }

    /// Counts rows that are left out. The warning says `N rows WHAT`, or `1 row WHAT`.
    pub fn leave_out(&mut self, code: &'static str, rows: u64, what: &str) {
        if rows > 0 {
            self.left_out.entry(code).or_insert_with(|| LeftOut { rows: 0, what: what.to_owned() }).rows += rows;
        }
    }

    /// Number of steps so far.
    pub fn steps(&self) -> u32 {
        self.next_step
    }

    /// More rows than a reader believes of files like these.
    fn too_many_rows(&self, found: &str) -> ImportError {
        let reason =
            format!("no trace can be made of this: it has {} rows, and hardly any of them has a token or routes{found}", self.tokens);
        ImportError::input(&self.out, reason)
    }

    /// Reads what was written where that may be more than its bytes can stand for.
    ///
    /// # Errors
    /// What failed, and of an input of nothing but rows that there are too many.
    fn read_back(&self) -> Result<(), ImportError> {
        if self.tokens <= self.free_rows {
            return Ok(());
        }
        match Trace::open(&self.temporary).and_then(|trace| trace.steps_with_details()) {
            Ok(_) => Ok(()),
            Err(TraceError::Corrupt { path, reason }) => {
                let found = format!(": {}: {reason}", path.strip_prefix(&self.temporary).unwrap_or(&path).display());
                // Where rows are vouched for, it is not their number.
                if self.tokens > self.free_rows.max(self.vouched) {
                    return Err(self.too_many_rows(&found));
                }
                let reason =
                    format!("no trace can be made of this: what was written of its {} rows cannot be read again{found}", self.tokens);
                Err(ImportError::input(&self.out, reason))
            }
            Err(other) => Err(other.into()),
        }
    }

    fn writer(&mut self) -> Result<&mut TraceWriter, ImportError> {
        self.writer.as_mut().ok_or_else(|| TraceError::Event { what: "an event before the trace's beginning".into() }.into())
    }

    /// Ends the trace and puts it into place.
    ///
    /// # Errors
    /// When nothing was imported, or the trace cannot be written.
    pub fn finish(mut self) -> Result<Manifest, ImportError> {
        let (seen, draft_seen) = (std::mem::take(&mut self.layers), std::mem::take(&mut self.draft_layers));
        let mut warnings = std::mem::take(&mut self.warnings);
        warnings.extend(self.left_out.iter().map(|(code, l)| Warning::new(code, format!("{} {}", counted_plain(l.rows, "row"), l.what))));
        let (largest, known_layers) = (self.largest_id, self.options.known_layers());
        let Some(mut writer) = self.writer.take() else {
            return Err(ImportError::empty(&self.out, "nothing to import in the inputs"));
        };
        let facts = writer.facts_mut();
        let model = &mut facts.model;
        if !model.experts_known {
            model.experts = largest.map_or(model.experts_per_token, |id| (id + 1).max(model.experts_per_token));
        }
        let counted = std::mem::take(&mut self.counts);
        let seen: BTreeSet<u16> = seen.into_iter().chain(counted.keys().copied()).collect();
        if !counted.is_empty() {
            let experts = counted.values().map(Vec::len).max().unwrap_or(0);
            model.experts = u16::try_from(experts).unwrap_or(u16::MAX);
            model.experts_known = true;
            facts.expert_counts = Some(counted);
        }
        let model = &mut facts.model;
        if model.moe_layers.is_empty() {
            model.moe_layers = seen.iter().copied().collect();
        }
        if let Some(stray) = seen.iter().find(|l| !model.moe_layers.contains(l)) {
            let reason =
                format!("layer {stray} is routed in the inputs, the model's configuration says that it has no router; check --layers");
            return Err(ImportError::input(&self.out, reason));
        }
        if model.draft_layers.is_empty() {
            model.draft_layers = draft_seen.into_iter().collect();
        }
        let highest = model.moe_layers.last().map_or(0, |&last| last.saturating_add(1));
        model.layers = model.layers.max(known_layers.unwrap_or(0)).max(highest);
        facts.warnings.extend(warnings);
        if facts.window_completeness == WindowCompleteness::Full {
            let layers = facts.model.moe_layers.len();
            let behind: u64 = self.whole_layers.values().sum();
            facts.irregular_steps = behind - self.whole_layers.get(&Some(layers)).copied().unwrap_or(0);
            if facts.irregular_steps > 0 {
                let message = format!(
                    "{} of {behind} steps behind the prompts lack routes of some rows or layers: their windows count in no union of those layers",
                    facts.irregular_steps
                );
                replace(&mut facts.warnings, Warning::new("irregular_steps", message));
            }
        } else {
            facts.irregular_steps = 0;
        }
        // Lines that were exported may say it already, and of the files that they were made of.
        if facts.model.experts_per_token == 0 && !facts.warnings.iter().any(|w| w.code == K_UNKNOWN) {
            let ways: Vec<_> = [Flag::K, Flag::ModelConfig].into_iter().filter(|flag| self.takes.contains(flag)).map(Flag::name).collect();
            let none = ways.len() > 1 && facts.warnings.iter().any(|w| w.code == "no_routes");
            let way = if none {
                "the input has no expert ids to count, and no number of its report needs it".into()
            } else if ways.is_empty() {
                "the input does not say it".into()
            } else {
                format!("import with {}", ways.join(" or "))
            };
            facts.warnings.push(Warning::new(K_UNKNOWN, format!("how many experts a token has is not known: {way}")));
        }
        // What is written must be read again.
        if let Some(fault) = manifest_fault(facts) {
            return Err(ImportError::input(&self.out, format!("no trace can be made of this: {fault}")));
        }
        let manifest = writer.finish(self.ending.clone())?;
        self.read_back()?;
        // The import may have taken long.
        check_free(&self.out, self.options.force || self.options.into.is_some())?;
        place(&self.temporary, &self.out)?;
        Ok(manifest)
    }
}

/// Adds a warning in place of one of its code, which lines that were exported may bring along.
fn replace(warnings: &mut Vec<Warning>, warning: Warning) {
    warnings.retain(|other| other.code != warning.code);
    warnings.push(warning);
}

impl Drop for Sink {
    fn drop(&mut self) {
        // The writer first: it writes its last manifest when it is dropped.
        drop(self.writer.take());
        if self.temporary.is_dir() {
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Synth;

    fn sink(dir: &Path, free_rows: u64) -> Sink {
        let mut sink = Sink::create(&dir.join("t"), &Options::default()).unwrap();
        sink.begin(Path::new("input"), &Source { drafter: "none".into(), ..Source::default() }).unwrap();
        sink.free_rows = free_rows;
        sink
    }

    #[test]
    fn rows_without_anything_in_them_end_an_import() {
        let dir = tempfile::tempdir().unwrap();
        let mut sink = sink(dir.path(), 10);
        let request = sink.request_id();
        let mut add = |rows: usize| sink.step(step(request, Phase::Prefill, unknown_tokens(rows)));
        // 32 times as many as are believed, and 32 times what routes vouch for.
        add(32 * 10 + 31).unwrap();
        let error = add(1).unwrap_err().to_string();
        assert!(error.contains("it has 352 rows, and hardly any of them has a token or routes"), "{error}");
        drop(sink);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_read_back_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut sink = sink(dir.path(), 10);
        let written = Synth { verify_steps: 2, ..Synth::default() }.write(&dir.path().join("other")).unwrap();
        // Without a step it leaves no folder.
        drop(sink.writer.take());
        fs::rename(dir.path().join("other"), &sink.temporary).unwrap();
        (sink.tokens, sink.vouched) = (11, 11);
        sink.read_back().unwrap();
        let part = &written.tables["steps"][0].path;
        let whole = fs::read(sink.temporary.join(part)).unwrap();
        fs::write(sink.temporary.join(part), &whole[..whole.len() / 2]).unwrap();
        let error = sink.read_back().unwrap_err().to_string();
        assert!(error.contains("of its 11 rows cannot be read again") && error.contains(part.as_str()), "{error}");
        assert!(!error.contains("hardly any"), "{error}");
        sink.vouched = 3;
        let error = sink.read_back().unwrap_err().to_string();
        assert!(error.contains("it has 11 rows, and hardly any of them") && error.contains(part.as_str()), "{error}");
        // What the machine refuses is not the input's fault.
        fs::remove_dir_all(&sink.temporary).unwrap();
        assert!(matches!(sink.read_back().unwrap_err(), ImportError::Trace(_)));
        sink.tokens = 10;
        sink.read_back().unwrap();
    }

    #[test]
    fn the_way_out_of_an_unknown_k_is_one_that_the_importer_takes() {
        let message = |takes: &'static [Flag]| {
            let dir = tempfile::tempdir().unwrap();
            let mut sink = sink(dir.path(), 10).taking(takes);
            let request = sink.request_id();
            sink.step(step(request, Phase::Prefill, unknown_tokens(1))).unwrap();
            let warnings = sink.finish().unwrap().warnings;
            warnings.into_iter().find(|w| w.code == K_UNKNOWN).unwrap().message
        };
        assert!(message(flags::COUNTS).ends_with("import with --k or --model-config"));
        assert!(message(flags::PROFILE).ends_with("import with --model-config"));
        assert!(!message(flags::LINES).contains("--"));
    }
}
