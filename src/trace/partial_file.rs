//! Partial reports: one Parquet file with everything that a report is finished from.
//!
//! What a number is, its entry says: [`EntryKind`] and `name`, with the request, step, layer and number of rows that it belongs to. The
//! file's metadata has the keys [`VERSION_KEY`] (`major.minor`), `specprof.name` and `specprof.manifest` (JSON, without part files).

use super::bounds::Budget;
use super::columns::dictionary;
use super::part_file::{PartHandle, corrupt};
use super::schema::{self, col};
use super::tables::read_part;
use super::{FormatVersion, Manifest, TraceError, manifest_fault};
use arrow_array::builder::{Float32Builder, Int64Builder, ListBuilder, StringBuilder};
use arrow_array::types::{Float32Type, Int64Type, UInt16Type, UInt32Type};
use arrow_array::{ArrayRef, RecordBatch, UInt16Array, UInt32Array};
use arrow_schema::{DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The key of the metadata that makes a Parquet file a partial report; its value is the version.
pub const VERSION_KEY: &str = "specprof.partial";
/// The version that this build writes; it reads every minor of it.
pub const VERSION: FormatVersion = FormatVersion { major: 1, minor: 0 };
const NAME_KEY: &str = "specprof.name";
const MANIFEST_KEY: &str = "specprof.manifest";
/// The key of the digest of all that the file holds.
const DIGEST_KEY: &str = "specprof.digest";

/// Entries that are turned into columns together.
const BATCH: usize = 8192;
/// Most numbers in them: long lists make short batches, whose pages stay small.
const BATCH_NUMBERS: usize = 1 << 18;

/// What the numbers of an entry are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A request: `name` is JSON of its id, tags and fingerprints.
    Request,
    /// A step: `name` is its phase; accepted, emitted, context length, ns of the step, ns of the target's pass, ns of the device if known.
    Step,
    /// A window that is a tree: `parents` of its rows, and the `path` of the accepted ones where it is known.
    Tree,
    /// A verify step's sums over layers: their number, then what each row adds.
    Added,
    /// The distinct experts of a tree's accepted rows, summed over layers.
    Kept,
    /// Counts over the windows of a layer and a number of rows; `name` says which.
    Window,
    /// Rows, then those that chose each expert; `name` is `target`, `draft` or `prefill`.
    Load,
    /// A request's windows, unions and wasted experts of a number of rows: three numbers a routed layer, ascending.
    Sums,
    /// A step's union in each routed layer; -1 where it has none.
    Unions,
    /// A step's ns of the component `name` in each routed layer, and outside them.
    Operations,
    /// The number of a step's forward pass, where the trace has one.
    Pass,
    /// Unions of passes that requests share: passes, their steps, sums of the steps' unions and of the passes'. `group`: of the requests that
    /// meet those of a step, in a layer; `requests`: of all passes of so many requests, which come first.
    PassUnions,
    /// Windows that were left out, and of the first one step, layer, rows found and rows expected.
    LeftOut,
    /// Numbers of rows whose pairs are not counted.
    WithoutPairs,
}

impl EntryKind {
    const ALL: [Self; 14] = [
        Self::Request,
        Self::Step,
        Self::Tree,
        Self::Added,
        Self::Kept,
        Self::Window,
        Self::Load,
        Self::Sums,
        Self::Unions,
        Self::Operations,
        Self::Pass,
        Self::PassUnions,
        Self::LeftOut,
        Self::WithoutPairs,
    ];

    /// The word in the column `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Step => "step",
            Self::Tree => "tree",
            Self::Added => "added",
            Self::Kept => "kept",
            Self::Window => "window",
            Self::Load => "load",
            Self::Sums => "sums",
            Self::Unions => "unions",
            Self::Operations => "operations",
            Self::Pass => "pass",
            Self::PassUnions => "pass_unions",
            Self::LeftOut => "left_out",
            Self::WithoutPairs => "without_pairs",
        }
    }

    fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == word)
    }
}

/// One row of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What its numbers are.
    pub kind: EntryKind,
    /// The request as the trace numbers it.
    pub request_id: Option<u32>,
    /// The step as the trace numbers it.
    pub step_id: Option<u32>,
    /// Absolute layer.
    pub layer: Option<u16>,
    /// Rows per window, or of a pass.
    pub rows: Option<u16>,
    /// Which of several numbers of its kind; empty where there is one.
    pub name: String,
    /// The numbers.
    pub values: Vec<i64>,
    /// The drafter's probability of each draft of a step, where it is known.
    pub draft_probs: Option<Vec<f32>>,
}

impl Entry {
    /// Numbers that belong to nothing in particular.
    pub fn new(kind: EntryKind, name: impl Into<String>, values: Vec<i64>) -> Self {
        Self { kind, request_id: None, step_id: None, layer: None, rows: None, name: name.into(), values, draft_probs: None }
    }
}

/// Writes a partial report of the trace `name`. Equal content gives equal bytes.
///
/// # Errors
/// What the Parquet library says.
pub fn encode(name: &str, manifest: &Manifest, entries: impl Iterator<Item = Entry>) -> Result<Vec<u8>, TraceError> {
    let failed = |e: &dyn std::fmt::Display| TraceError::Event { what: format!("a partial report: {e}") };
    let text = serde_json::to_string(manifest).map_err(|e| failed(&e))?;
    let pair = |key: &str, value: String| KeyValue::new(key.to_owned(), value);
    let properties = WriterProperties::builder()
        .set_created_by(concat!("specprof ", env!("CARGO_PKG_VERSION")).into())
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).unwrap_or_default()))
        .set_key_value_metadata(Some(vec![
            pair(VERSION_KEY, VERSION.to_string()),
            pair(NAME_KEY, name.to_owned()),
            pair(MANIFEST_KEY, text.clone()),
        ]))
        .set_offset_index_disabled(true)
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), schema::partial(), Some(properties)).map_err(|e| failed(&e))?;
    let mut columns = Columns::new();
    let mut digest = ContentDigest::new(name, &text);
    for entry in entries {
        digest.add(&entry);
        columns.push(&entry);
        if columns.kinds.len() >= BATCH || columns.numbers >= BATCH_NUMBERS {
            writer.write(&columns.take().map_err(|e| failed(&e))?).map_err(|e| failed(&e))?;
        }
    }
    writer.write(&columns.take().map_err(|e| failed(&e))?).map_err(|e| failed(&e))?;
    writer.append_key_value_metadata(pair(DIGEST_KEY, digest.finish()));
    writer.into_inner().map_err(|e| failed(&e))
}

/// SHA-256 of a file's name, manifest and entries: a file whose bytes were damaged may still be one that can be read.
struct ContentDigest(Sha256);

impl ContentDigest {
    fn new(name: &str, manifest: &str) -> Self {
        let mut digest = Self(Sha256::new());
        digest.bytes(name.as_bytes());
        digest.bytes(manifest.as_bytes());
        digest
    }

    /// A run of bytes after its length, so that no two sequences of runs are alike.
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn add(&mut self, entry: &Entry) {
        self.0.update([entry.kind as u8]);
        let numbers = [entry.request_id, entry.step_id, entry.layer.map(u32::from), entry.rows.map(u32::from)];
        for number in numbers {
            self.0.update(number.map_or(-1, i64::from).to_le_bytes());
        }
        self.bytes(entry.name.as_bytes());
        self.0.update((entry.values.len() as u64).to_le_bytes());
        entry.values.iter().for_each(|n| self.0.update(n.to_le_bytes()));
        self.0.update(entry.draft_probs.as_ref().map_or(-1, |probs| probs.len() as i64).to_le_bytes());
        entry.draft_probs.iter().flatten().for_each(|p| self.0.update(p.to_bits().to_le_bytes()));
    }

    /// In hexadecimal.
    fn finish(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Entries on their way into the file.
struct Columns {
    kinds: Vec<i8>,
    request_id: Vec<Option<u32>>,
    step_id: Vec<Option<u32>>,
    layer: Vec<Option<u16>>,
    rows: Vec<Option<u16>>,
    names: StringBuilder,
    values: ListBuilder<Int64Builder>,
    draft_probs: ListBuilder<Float32Builder>,
    numbers: usize,
}

impl Columns {
    fn new() -> Self {
        let item = |data_type| Field::new("item", data_type, false);
        Self {
            kinds: Vec::new(),
            request_id: Vec::new(),
            step_id: Vec::new(),
            layer: Vec::new(),
            rows: Vec::new(),
            names: StringBuilder::new(),
            values: ListBuilder::new(Int64Builder::new()).with_field(item(DataType::Int64)),
            draft_probs: ListBuilder::new(Float32Builder::new()).with_field(item(DataType::Float32)),
            numbers: 0,
        }
    }

    fn push(&mut self, entry: &Entry) {
        self.kinds.push(entry.kind as i8);
        self.request_id.push(entry.request_id);
        self.step_id.push(entry.step_id);
        self.layer.push(entry.layer);
        self.rows.push(entry.rows);
        self.names.append_value(&entry.name);
        self.values.values().append_slice(&entry.values);
        self.values.append(true);
        self.draft_probs.values().append_slice(entry.draft_probs.as_deref().unwrap_or_default());
        self.draft_probs.append(entry.draft_probs.is_some());
        self.numbers += entry.values.len();
    }

    fn take(&mut self) -> Result<RecordBatch, arrow_schema::ArrowError> {
        self.numbers = 0;
        let words = EntryKind::ALL.map(EntryKind::as_str);
        let columns: Vec<ArrayRef> = vec![
            dictionary(std::mem::take(&mut self.kinds), &words)?,
            Arc::new(UInt32Array::from(std::mem::take(&mut self.request_id))),
            Arc::new(UInt32Array::from(std::mem::take(&mut self.step_id))),
            Arc::new(UInt16Array::from(std::mem::take(&mut self.layer))),
            Arc::new(UInt16Array::from(std::mem::take(&mut self.rows))),
            Arc::new(self.names.finish()),
            Arc::new(self.values.finish()),
            Arc::new(self.draft_probs.finish()),
        ];
        RecordBatch::try_new(schema::partial(), columns)
    }
}

/// A partial report on disk.
#[derive(Debug)]
pub struct PartialFile {
    part: PartHandle,
    name: String,
    manifest: Manifest,
    /// The manifest as it is stored, and the digest of all.
    stored: (String, String),
    fingerprint: [u8; 32],
}

impl PartialFile {
    /// Opens it.
    ///
    /// # Errors
    /// When it cannot be read, is no partial report, or one of a version that this build cannot read.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let nothing = |reason: &str| TraceError::NotATrace { path: path.to_owned(), reason: reason.to_owned() };
        let no_partial = "neither a directory nor a partial report as `report --partial` writes it";
        let cannot = |action| move |source| TraceError::Io { path: path.to_owned(), action, source };
        match path.metadata() {
            Ok(found) if found.is_file() => {}
            Ok(_) => return Err(nothing(no_partial)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(nothing("no such file or directory")),
            Err(e) => return Err(cannot("open")(e)),
        }
        let mut file = File::open(path).map_err(cannot("open"))?;
        let mut magic = [0; 4];
        if file.read_exact(&mut magic).is_err() || magic != *b"PAR1" {
            return Err(nothing(no_partial));
        }
        let part = PartHandle::open(path.to_owned())?;
        let pairs = part.footer().file_metadata().key_value_metadata().map(Vec::as_slice).unwrap_or_default();
        let value = |key: &str| pairs.iter().find(|pair| pair.key == key).and_then(|pair| pair.value.as_deref());
        let Some(found) = value(VERSION_KEY) else { return Err(nothing(no_partial)) };
        let version = FormatVersion::parse(found).ok_or_else(|| corrupt(path, "its version is none"))?;
        if version.major != VERSION.major {
            let supported = format!("partial reports of {}.x", VERSION.major);
            return Err(TraceError::Version { path: path.to_owned(), found: version.to_string(), supported });
        }
        let missing = |key: &str| corrupt(path, format!("its metadata has no {key}"));
        let name = value(NAME_KEY).ok_or_else(|| missing(NAME_KEY))?.to_owned();
        let text = value(MANIFEST_KEY).ok_or_else(|| missing(MANIFEST_KEY))?;
        let stored = (text.to_owned(), value(DIGEST_KEY).ok_or_else(|| missing(DIGEST_KEY))?.to_owned());
        let manifest: Manifest = serde_json::from_str(text).map_err(|e| corrupt(path, format!("{MANIFEST_KEY}: {e}")))?;
        if let Some(fault) = manifest_fault(&manifest) {
            return Err(corrupt(path, format!("{MANIFEST_KEY}: {fault}")));
        }
        let fingerprint = sha256(&mut file).map_err(cannot("read"))?;
        Ok(Self { part, name, manifest, stored, fingerprint })
    }

    /// The file.
    pub fn path(&self) -> &PathBuf {
        &self.part.path
    }

    /// The name of the trace that it was made of.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// That trace's manifest, without part files.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// SHA-256 of the file.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Hands over all entries, in order; an error of the sink is about that entry.
    ///
    /// # Errors
    /// When the file cannot be read or has more than its bytes can stand for, and what the sink says.
    pub fn each(&self, mut sink: impl FnMut(Entry) -> Result<(), String>) -> Result<(), TraceError> {
        let mut budget = Budget::new(schema::PARTIAL, std::slice::from_ref(&self.part))?;
        let mut digest = ContentDigest::new(&self.name, &self.stored.0);
        read_part(&self.part, schema::PARTIAL, &schema::partial(), &mut budget, |rows, budget| {
            let kinds = rows.words(col::KIND, EntryKind::parse)?;
            let mut entries: Vec<Entry> = kinds.into_iter().map(|kind| Entry::new(kind, "", Vec::new())).collect();
            let request = rows.maybe_numbers::<UInt32Type>(col::REQUEST_ID)?;
            entries.iter_mut().zip(request).for_each(|(entry, id)| entry.request_id = id);
            let step = rows.maybe_numbers::<UInt32Type>(col::STEP_ID)?;
            entries.iter_mut().zip(step).for_each(|(entry, id)| entry.step_id = id);
            let layer = rows.maybe_numbers::<UInt16Type>(col::LAYER)?;
            entries.iter_mut().zip(layer).for_each(|(entry, layer)| entry.layer = layer);
            let lengths = rows.maybe_numbers::<UInt16Type>(col::ROWS)?;
            entries.iter_mut().zip(lengths).for_each(|(entry, rows)| entry.rows = rows);
            let names = rows.texts(col::NAME, budget)?;
            entries.iter_mut().zip(names).for_each(|(entry, name)| entry.name = name.unwrap_or_default());
            let mut to = entries.iter_mut();
            rows.lists::<Int64Type>(col::VALUES, |list| match (to.next(), list) {
                (Some(entry), Some(list)) => {
                    entry.values = list.to_vec();
                    true
                }
                _ => false,
            })?;
            let mut to = entries.iter_mut();
            rows.lists::<Float32Type>(col::DRAFT_PROBS, |list| {
                if let Some(entry) = to.next() {
                    entry.draft_probs = list.map(<[f32]>::to_vec);
                }
                true
            })?;
            for (at, entry) in entries.into_iter().enumerate() {
                let kind = entry.kind.as_str();
                digest.add(&entry);
                sink(entry).map_err(|what| rows.error(at, &format!("{kind}: {what}")))?;
            }
            Ok(())
        })?;
        if digest.finish() != self.stored.1 {
            return Err(corrupt(self.path(), "its rows are not those that were written: make it again from its trace"));
        }
        Ok(())
    }
}

fn sha256(file: &mut File) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    file.rewind()?;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().into()),
            n => hash.update(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Synth;

    fn sample() -> (Manifest, Vec<Entry>) {
        let dir = tempfile::tempdir().unwrap();
        let manifest = Synth { verify_steps: 2, ..Synth::default() }.write(&dir.path().join("t")).unwrap();
        let mut entries = vec![Entry::new(EntryKind::WithoutPairs, "", vec![3, -4, i64::MAX])];
        for step in 0..20_000u32 {
            entries.push(Entry {
                request_id: Some(step / 7),
                step_id: Some(step),
                rows: Some(4),
                draft_probs: (step % 3 == 0).then(|| vec![0.5, 0.25]),
                ..Entry::new(EntryKind::Step, "verify", vec![1, 2, i64::from(step)])
            });
        }
        entries.push(Entry { layer: Some(3), ..Entry::new(EntryKind::Load, "draft", (0..600_000).collect()) });
        (manifest, entries)
    }

    #[test]
    fn entries_come_back_as_they_were() {
        let (manifest, entries) = sample();
        let bytes = encode("run", &manifest, entries.iter().cloned()).unwrap();
        assert_eq!(bytes, encode("run", &manifest, entries.iter().cloned()).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.parquet");
        std::fs::write(&path, &bytes).unwrap();
        let file = PartialFile::open(&path).unwrap();
        assert_eq!((file.name(), file.manifest()), ("run", &manifest));
        let mut found = Vec::new();
        file.each(|entry| {
            found.push(entry);
            Ok(())
        })
        .unwrap();
        assert!(found == entries);
        let error = file.each(|entry| if entry.layer.is_some() { Err("no such layer".into()) } else { Ok(()) }).unwrap_err();
        assert!(error.to_string().ends_with("table partial, row 20001: load: no such layer"), "{error}");
    }

    #[test]
    fn other_files_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        let open = || PartialFile::open(&path).unwrap_err();
        assert!(matches!(open(), TraceError::NotATrace { .. }));
        for text in ["", "{}", "PAR"] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(open(), TraceError::NotATrace { .. }), "{text}");
        }
        let (manifest, entries) = sample();
        let bytes = encode("run", &manifest, entries.into_iter().take(100)).unwrap();
        // Cut anywhere behind the magic, it is a broken Parquet file.
        for end in (4..bytes.len()).step_by(bytes.len() / 40) {
            std::fs::write(&path, &bytes[..end]).unwrap();
            assert!(matches!(open(), TraceError::Corrupt { .. }), "{end}");
        }
    }
}
