//! Dumps of SGLang's expert distribution recorder (`.pt`): routes by token and pass, or counts.
//!
//! `per_token` has all rows of each pass, those of rejected drafts included: the one engine output with whole verify windows.
//! `per_pass`, `stat` and `stat_approx` have counts by expert. Layout of 0.5.23, `srt/eplb/expert_distribution.py`.

use super::count_matrix::{CountMatrix, Origin};
use super::pickle::{Tensor, Value};
use super::recorder_pass::Pass;
use super::recorder_passes::Passes;
use super::torch::{self, TorchFile};
use super::{Flag, Head, ImportError, Importer, LayerAxis, Options, Sink, flags};
use crate::trace::manifest::IdSpace;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// SGLang's recorder.
pub struct Recorder;

impl Importer for Recorder {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn about(&self) -> &'static str {
        "dumps of SGLang's expert distribution recorder (.pt): per_token with whole verify windows, per_pass, stat"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::PASSES
    }

    fn sniff(&self, head: &Head) -> bool {
        is_torch(head) && ["forward_pass_id", "logical_count", "last_physical_to_logical_map"].iter().any(|key| head.has(key))
            || head.first() == Some(b'{')
                && !head.has_key("meta_info")
                && (head.has_key("logical_count") || head.has_key("physical_to_logical_map"))
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        let mut seen = Seen::default();
        for path in inputs {
            let head = Head::read(path)?;
            if head.first() == Some(b'{') {
                placement(path, options, sink)?;
            } else {
                dump(path, &mut seen, options, sink)?;
            }
        }
        Ok(())
    }
}

/// Whether a file begins like one that `torch.save` wrote: an archive whose first member is the pickle.
pub fn is_torch(head: &Head) -> bool {
    let name = head.bytes.get(30..head.bytes.len().min(2048)).unwrap_or_default();
    head.starts_with(b"PK\x03\x04") && name.windows(8).any(|w| w == b"data.pkl")
}

/// Counts of the recorder's own: its axis counts all hidden layers.
const LOGICAL: Origin = Origin { engine: "sglang", layers: LayerAxis::All, id_space: IdSpace::Logical };

/// What other ranks have recorded: the same passes on every one of them are one run.
#[derive(Default)]
struct Seen(BTreeSet<[u8; 32]>);

fn dump(path: &Path, seen: &mut Seen, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let mut file = TorchFile::open(path)?;
    let root = file.pickle().root();
    if let Some(counts) = file.pickle().get(root, "logical_count") {
        return stat(path, &mut file, counts, options, sink);
    }
    let records = file.pickle().get(root, "records").and_then(|r| file.pickle().list(r)).map(<[Value]>::to_vec);
    let Some(records) = records else {
        return Err(file.wrong(format!("{}, not a dump of SGLang's recorder", file.pickle().describe(root))));
    };
    if records.is_empty() {
        return Err(ImportError::empty(path, "no records: recording was not started, or nothing was served before the dump"));
    }
    let distinct: BTreeSet<u32> = records.iter().filter_map(|r| if let Value::Node(at) = r { Some(*at) } else { None }).collect();
    if distinct.len() != records.len() {
        return Err(file.wrong("a record stands twice in it, or is none"));
    }
    let map = Placement::of(&mut file, root, options)?;
    map.check(options).map_err(|e| file.wrong(e))?;
    let per_token = records.iter().any(|&r| file.pickle().get(r, "topk_ids_of_layer").is_some());
    if !seen.0.insert(fingerprint(&mut file, &records, per_token)?) {
        sink.warn("ranks_alike", format!("{}: left out, another rank has recorded the same passes", name_of(path)));
        return Ok(());
    }
    if per_token { tokens(path, &mut file, &records, map, options, sink) } else { passes(path, &mut file, &records, &map, options, sink) }
}

/// Ids and positions of all passes, or the counts of the first: what two ranks of one run have in common.
fn fingerprint(file: &mut TorchFile, records: &[Value], per_token: bool) -> Result<[u8; 32], ImportError> {
    let mut hash = Sha256::new();
    for &record in records {
        let id = file.pickle().get(record, "forward_pass_id").and_then(|v| file.pickle().int(v)).unwrap_or(-1);
        hash.update(id.to_le_bytes());
        if per_token {
            for key in ["input_ids", "positions"] {
                let list = file.pickle().get(record, key).and_then(|v| file.pickle().list(v)).unwrap_or_default();
                list.iter().filter_map(|&v| file.pickle().int(v)).for_each(|n| hash.update(n.to_le_bytes()));
            }
        } else if let Some(counts) = file.pickle().get(record, "global_physical_count").and_then(|v| file.pickle().tensor(v)).cloned() {
            hash.update(&file.read(&counts).map_err(|e| file.wrong(e))?.bytes);
        }
    }
    Ok(hash.finalize().into())
}

/// Which logical expert each slot held when the dump was made.
pub struct Placement {
    /// `[layers][slots]`; empty when the dump has none.
    logical: Vec<Vec<u16>>,
    /// Whether every slot holds the expert of its own number.
    identity: bool,
    /// Whether ids are turned into logical ones.
    mapped: bool,
}

impl Placement {
    fn of(file: &mut TorchFile, root: Value, options: &Options) -> Result<Self, ImportError> {
        let tensor = file.pickle().get(root, "last_physical_to_logical_map").and_then(|v| file.pickle().tensor(v)).cloned();
        let Some(tensor) = tensor else {
            if options.id_space == Some(IdSpace::Logical) {
                return Err(file.wrong("--id-space logical: the dump has no last_physical_to_logical_map; leave it out, or say physical"));
            }
            return Ok(Self { logical: Vec::new(), identity: false, mapped: false });
        };
        let numbers = file.read(&tensor).map_err(|e| file.wrong(format!("last_physical_to_logical_map: {e}")))?;
        let ids = numbers.ids().map_err(|e| file.wrong(format!("last_physical_to_logical_map: {e}")))?;
        let [_, slots] = *numbers.shape.as_slice() else {
            return Err(file.wrong(format!("last_physical_to_logical_map has the shape {:?}, not layers x slots", numbers.shape)));
        };
        let id = |id: &i32| u16::try_from(*id).map_err(|_| file.wrong(format!("last_physical_to_logical_map: {id} is not an expert")));
        let logical = ids.chunks(slots.max(1)).map(|layer| layer.iter().map(id).collect()).collect::<Result<Vec<Vec<u16>>, _>>()?;
        let identity = logical.iter().all(|layer| layer.iter().enumerate().all(|(slot, &id)| slot == usize::from(id)));
        Ok(Self { logical, identity, mapped: !identity && options.id_space == Some(IdSpace::Logical) })
    }

    /// Slots of a layer.
    pub fn slots(&self) -> Option<u16> {
        self.logical.first().and_then(|layer| u16::try_from(layer.len()).ok())
    }

    /// Experts of a layer in the space that ids are in after [`Placement::map`].
    pub fn experts(&self) -> Option<u16> {
        if self.mapped { self.logical.iter().flatten().max().map(|id| id.saturating_add(1)) } else { self.slots() }
    }

    /// Compares the number of experts with what the user says: the experts that are placed, of whatever number of slots.
    fn check(&self, options: &Options) -> Result<(), String> {
        let placed = self.logical.iter().flatten().max().map(|id| id.saturating_add(1));
        match (placed, options.experts) {
            (Some(placed), Some(said)) if placed != said => {
                Err(format!("{placed} experts are placed by last_physical_to_logical_map, --experts says {said}"))
            }
            _ => Ok(()),
        }
    }

    /// What ids mean after [`Placement::map`].
    pub fn id_space(&self) -> IdSpace {
        if self.identity || self.mapped { IdSpace::Logical } else { IdSpace::Physical }
    }

    /// Turns the slots of one layer into experts, when that was asked for.
    pub fn map(&self, layer: usize, ids: &mut [i32]) {
        if let Some(logical) = self.logical.get(layer).filter(|_| self.mapped) {
            for id in ids {
                *id = usize::try_from(*id).ok().and_then(|slot| logical.get(slot)).map_or(*id, |&expert| i32::from(expert));
            }
        }
    }

    /// Adds up the slots of each expert, when that was asked for.
    fn sum_up(&self, matrix: &mut CountMatrix) -> Result<(), String> {
        let Some(experts) = self.experts().map(usize::from).filter(|_| self.mapped) else { return Ok(()) };
        let mut sums = vec![0u64; matrix.layers * experts];
        for (layer, row) in matrix.counts.chunks(matrix.experts.max(1)).enumerate() {
            let mut ids: Vec<i32> = (0..row.len()).map(|slot| i32::try_from(slot).unwrap_or(i32::MAX)).collect();
            self.map(layer, &mut ids);
            for (id, n) in ids.iter().zip(row) {
                let at = usize::try_from(*id).ok().filter(|&id| id < experts).map(|id| layer * experts + id);
                if let Some(sum) = at.and_then(|at| sums.get_mut(at)) {
                    *sum = sum.checked_add(*n).ok_or_else(|| {
                        format!("entry {layer} of the layers, expert {id}: the counts of its slots add up to more than 64 bits hold")
                    })?;
                }
            }
        }
        (matrix.experts, matrix.counts) = (experts, sums);
        Ok(())
    }

    /// Says what the ids are.
    fn report(&self, sink: &mut Sink) {
        if self.mapped {
            sink.warn(
                "slots_mapped",
                "slots were turned into experts by the last placement of the dump; passes before a rebalancing had another one",
            );
        } else if self.id_space() == IdSpace::Physical {
            let message = "ids are slots after placement: replicas of an expert count as experts of their own (--id-space logical maps them by \
                           the dump's last placement)";
            sink.warn("physical_ids", message);
        }
    }
}

/// `per_token`: every pass with the routes of all its rows.
fn tokens(
    path: &Path,
    file: &mut TorchFile,
    records: &[Value],
    map: Placement,
    options: &Options,
    sink: &mut Sink,
) -> Result<(), ImportError> {
    let mut read = Vec::new();
    for (number, &record) in records.iter().enumerate() {
        read.push(Pass::of(file.pickle(), record, number).map_err(|e| file.wrong(e))?);
    }
    map.report(sink);
    Passes::new(path, map, options, sink).import(file, read)
}

/// `per_pass`: one matrix of counts a pass.
fn passes(
    path: &Path,
    file: &mut TorchFile,
    records: &[Value],
    map: &Placement,
    options: &Options,
    sink: &mut Sink,
) -> Result<(), ImportError> {
    flags::check(path, "counts by pass", flags::COUNTS, options)?;
    let mut sums = CountMatrix::default();
    for (number, &record) in records.iter().enumerate() {
        let tensor = file.pickle().get(record, "global_physical_count").and_then(|v| file.pickle().tensor(v)).cloned();
        let tensor =
            tensor.ok_or_else(|| file.wrong(format!("record {number} has neither topk_ids_of_layer nor global_physical_count")))?;
        add(&mut sums, file, &tensor).map_err(|e| file.wrong(format!("record {number}, global_physical_count: {e}")))?;
    }
    map.sum_up(&mut sums).map_err(|e| file.wrong(e))?;
    map.report(sink);
    sums.finish(path, &Origin { id_space: map.id_space(), ..LOGICAL }, options, sink)
}

/// `stat`: `[buffer, layers, experts]`, or `[layers, experts]` of a placement. The buffer is a ring: its order is no time.
fn stat(path: &Path, file: &mut TorchFile, counts: Value, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    flags::check(path, "counts of experts", flags::COUNTS, options)?;
    let tensor = file.pickle().tensor(counts).cloned().ok_or_else(|| file.wrong("logical_count is not a tensor"))?;
    let mut sums = CountMatrix::default();
    let mut add = |part: &Tensor| add(&mut sums, file, part).map_err(|e| file.wrong(format!("logical_count: {e}")));
    match *tensor.shape.as_slice() {
        [_, _] => add(&tensor)?,
        // One at a time: with strides of 0, a shape can announce any number of them.
        [n, _, _] => (0..n).filter_map(|i| torch::slice(&tensor, i)).try_for_each(|part| add(&part))?,
        ref other => return Err(file.wrong(format!("logical_count has the shape {other:?}, not passes x layers x experts"))),
    }
    sums.finish(path, &LOGICAL, options, sink)
}

/// Adds a tensor's counts.
fn add(sums: &mut CountMatrix, file: &mut TorchFile, tensor: &Tensor) -> Result<(), String> {
    let numbers = file.read(tensor)?;
    sums.add(&numbers.shape, &numbers.counts()?)
}

/// `--init-expert-location`: counts or a placement as JSON.
fn placement(path: &Path, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    #[derive(serde::Deserialize)]
    struct Location {
        logical_count: Option<Vec<Vec<u64>>>,
    }
    flags::check(path, "counts of experts", flags::COUNTS, options)?;
    let mut found = false;
    super::input::json_values(path, |location: Location| {
        let Some(rows) = location.logical_count else { return Ok(()) };
        found = true;
        let experts = rows.first().map_or(0, Vec::len);
        if rows.iter().any(|row| row.len() != experts) {
            return Err(ImportError::input(path, "logical_count: its rows have different lengths"));
        }
        CountMatrix { layers: rows.len(), experts, counts: rows.concat() }.finish(path, &LOGICAL, options, sink)
    })?;
    let what = "no counts: a placement says where experts are, not how often they are chosen";
    if found { Ok(()) } else { Err(ImportError::empty(path, what)) }
}

/// A file's name for a message.
pub fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().escape_debug().to_string()).unwrap_or_default()
}
