//! Opens a trace and hands its tables out as plain columns. No arrow type leaves this folder.
//!
//! A trace comes from anywhere: nothing in it is believed before it is checked, and whatever is wrong is an
//! error that names the file. A trace of a newer minor version, or with more columns, is read as far as this
//! build knows it.

use super::bounds::{self, MAX_PART_PATH};
use super::manifest::{Manifest, Warning};
use super::output::{MANIFEST, MAX_MANIFEST_BYTES};
use super::part_file::{PartHandle, corrupt, leads_nowhere, open_file};
use super::routes::{self, RouteUnit};
use super::step_table::{Steps, read_steps};
use super::tables;
use super::telemetry::TelemetrySample;
use super::version::FormatVersion;
use super::{KernelEvent, Kernels, RequestEvent, TraceError, kernel_table, schema};
use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// A trace whose manifest and footers have been checked.
#[derive(Debug)]
pub struct Trace {
    dir: PathBuf,
    manifest: Manifest,
    requests: Vec<PartHandle>,
    steps: Vec<PartHandle>,
    routes: Arc<Vec<PartHandle>>,
    kernels: Vec<PartHandle>,
    telemetry: Vec<PartHandle>,
    warnings: Vec<Warning>,
}

/// What a table takes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TableSize {
    /// Name of the table.
    pub name: &'static str,
    /// Number of part files.
    pub parts: usize,
    /// Number of rows.
    pub rows: u64,
    /// Bytes of the part files.
    pub bytes: u64,
}

impl Trace {
    /// Opens the trace in `dir`.
    ///
    /// # Errors
    /// [`TraceError::NotATrace`] when there is none, [`TraceError::Version`] when it is of another major
    /// version, [`TraceError::Corrupt`] naming the file that is broken, missing or outside the directory.
    pub fn open(dir: &Path) -> Result<Self, TraceError> {
        let manifest = read_manifest(dir)?;
        let root = dir.canonicalize().map_err(|source| TraceError::Io { path: dir.to_owned(), action: "open", source })?;
        let mut seen = HashSet::new();
        let mut table = |name: &str| -> Result<Vec<PartHandle>, TraceError> {
            let parts = manifest.tables.get(name).map(Vec::as_slice).unwrap_or_default();
            parts.iter().map(|part| open_part(dir, &root, &part.path, part.rows, &mut seen)).collect()
        };
        let mut warnings = manifest.warnings.clone();
        if !manifest.complete {
            let reason = manifest.incomplete_reason.as_deref().unwrap_or("no reason given");
            warnings.push(Warning::new("incomplete", format!("the trace is incomplete ({reason}): the last steps may be missing")));
        }
        Ok(Self {
            dir: dir.to_owned(),
            requests: table(schema::REQUESTS)?,
            steps: table(schema::STEPS)?,
            routes: Arc::new(table(schema::ROUTES)?),
            kernels: table(schema::KERNELS)?,
            telemetry: table(schema::TELEMETRY)?,
            warnings,
            manifest,
        })
    }

    /// The directory, as it was given.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The run's facts.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What every report made of this trace has to say: the writer's notes, and that it is incomplete.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Parts, rows and bytes of each table.
    pub fn tables(&self) -> Vec<TableSize> {
        let size = |name, parts: &[PartHandle]| TableSize {
            name,
            parts: parts.len(),
            rows: parts.iter().map(PartHandle::rows).fold(0, u64::saturating_add),
            bytes: parts.iter().map(|p| p.bytes).sum(),
        };
        vec![
            size(schema::REQUESTS, &self.requests),
            size(schema::STEPS, &self.steps),
            size(schema::ROUTES, &self.routes),
            size(schema::KERNELS, &self.kernels),
            size(schema::TELEMETRY, &self.telemetry),
        ]
    }

    /// `steps`, without input tokens and parents.
    ///
    /// # Errors
    /// [`TraceError::Corrupt`] naming the part and, where one is wrong, the column or row.
    pub fn steps(&self) -> Result<Steps, TraceError> {
        read_steps(&self.steps, self.bytes(), false, self.manifest.host_times)
    }

    /// `steps` with all columns.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn steps_with_details(&self) -> Result<Steps, TraceError> {
        read_steps(&self.steps, self.bytes(), true, self.manifest.host_times)
    }

    /// Bytes of all parts.
    fn bytes(&self) -> u64 {
        let tables = [&self.requests, &self.steps, &*self.routes, &self.kernels, &self.telemetry];
        tables.into_iter().fold(0, |sum, parts| sum.saturating_add(bounds::total_bytes(parts)))
    }

    /// `requests`, in the order in which they ended.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn requests(&self) -> Result<Vec<RequestEvent>, TraceError> {
        tables::read_requests(&self.requests)
    }

    /// Whether any operation has its time in the trace.
    pub fn has_kernels(&self) -> bool {
        self.kernels.iter().any(|part| part.rows() > 0)
    }

    /// Hands `kernels` to `sink`, some rows at a time, in order of steps. Traces before 1.1 have none.
    ///
    /// # Errors
    /// As [`Trace::steps`], and what `sink` returned.
    pub fn each_kernels<E: From<TraceError>>(&self, sink: impl FnMut(&Kernels) -> Result<(), E>) -> Result<(), E> {
        kernel_table::each(&self.kernels, sink)
    }

    /// `kernels` with all columns, each with its step. The table may be large; [`Trace::each_kernels`] keeps none of it.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn kernels(&self) -> Result<Vec<(u32, KernelEvent)>, TraceError> {
        kernel_table::read_all(&self.kernels)
    }

    /// The ids of `requests`, in the order in which they ended.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn request_ids(&self) -> Result<Vec<u32>, TraceError> {
        tables::read_request_ids(&self.requests)
    }

    /// Bytes of the part files of `routes`.
    pub fn route_bytes(&self) -> u64 {
        bounds::total_bytes(&self.routes)
    }

    /// `telemetry`, in order of time.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn telemetry(&self) -> Result<Vec<TelemetrySample>, TraceError> {
        tables::read_telemetry(&self.telemetry)
    }

    /// `routes`, cut into units that share no step, in order of steps. Each can be read on a thread of its own.
    ///
    /// # Errors
    /// [`TraceError::Corrupt`] when a part lacks a column or has it in another type.
    pub fn route_units(&self) -> Result<Vec<RouteUnit>, TraceError> {
        let model = &self.manifest.model;
        routes::plan(&self.routes, usize::from(model.experts_per_token), model.experts, self.manifest.router_weights)
    }
}

/// Bytes of a file by which its kind is told.
const HEAD: usize = 256;

/// Why what is no directory is no trace, with the way from there to one.
fn what_it_is(path: &Path) -> &'static str {
    let mut head = Vec::new();
    // A pipe would be waited for.
    let is_file = fs::metadata(path).is_ok_and(|meta| meta.is_file());
    let read = is_file.then(|| fs::File::open(path)).and_then(Result::ok).map(|file| file.take(HEAD as u64).read_to_end(&mut head));
    match (read, head.as_slice()) {
        (Some(Ok(_)), [b'P', b'A', b'R', b'1', ..]) => {
            "it is a Parquet file, not a directory: give the trace itself; a partial report is for `specprof report`"
        }
        (Some(Ok(_)), head) if is_lines(head) => {
            "it is a file of JSON lines, not a directory: make a trace of it first, by `specprof import jsonl FILE -o DIR`"
        }
        _ => "it is not a directory",
    }
}

/// Whether a file begins as `specprof export --format jsonl` writes it: with a line that names the format.
pub fn is_lines(file: &[u8]) -> bool {
    const FORMAT: &[u8] = b"\"specprof.jsonl/";
    let head = file.get(..HEAD).unwrap_or(file);
    head.starts_with(b"{") && head.windows(FORMAT.len()).any(|word| word == FORMAT)
}

/// Reads and checks the manifest of the trace in `dir`.
///
/// # Errors
/// As [`Trace::open`].
pub fn read_manifest(dir: &Path) -> Result<Manifest, TraceError> {
    let path = dir.join(MANIFEST);
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            let reason = if dir.is_dir() { format!("it has no {MANIFEST}") } else { what_it_is(dir).into() };
            TraceError::NotATrace { path: dir.to_owned(), reason }
        }
        _ if leads_nowhere(&source) => {
            TraceError::NotATrace { path: Path::new(&shown(&dir.to_string_lossy())).to_owned(), reason: "its path leads nowhere".into() }
        }
        _ => TraceError::Io { path: path.clone(), action: "open", source },
    };
    // A pipe in the manifest's place would be waited for.
    fs::metadata(&path).map_err(failed)?;
    let (file, _) = open_file(&path)?;
    let mut json = Vec::new();
    let read = file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut json);
    read.map_err(|source| TraceError::Io { path: path.clone(), action: "read", source })?;
    if json.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(corrupt(&path, "too large for a manifest"));
    }
    // The version first: a manifest of another major version need not have the fields of this one.
    let head: Head = serde_json::from_slice(&json).map_err(|e| corrupt(&path, e.to_string()))?;
    let version = head.format_version.as_deref().and_then(FormatVersion::parse);
    let version = version.ok_or_else(|| corrupt(&path, "no `format_version` of the form `major.minor`"))?;
    version.check_readable(&path)?;
    let manifest: Manifest = serde_json::from_slice(&json).map_err(|e| corrupt(&path, e.to_string()))?;
    bounds::check_manifest(&path, &manifest)?;
    Ok(manifest)
}

/// What is read of a manifest before its version is known to be readable. Other keys are skipped, whatever they hold.
#[derive(serde::Deserialize)]
struct Head {
    #[serde(default)]
    format_version: Option<String>,
}

/// A word from a manifest, cut to what a message can hold.
fn shown(word: &str) -> String {
    const MOST: usize = 80;
    let mut text: String = word.chars().take(MOST).collect();
    if word.chars().nth(MOST).is_some() {
        text.push_str("...");
    }
    text.escape_debug().to_string()
}

/// What tells a file from all others, under whatever names and links it is found.
fn identity(path: &Path) -> String {
    #[cfg(unix)]
    if let Ok(found) = fs::metadata(path) {
        use std::os::unix::fs::MetadataExt;
        return format!("{}/{}", found.dev(), found.ino());
    }
    path.to_string_lossy().into_owned()
}

/// Opens a part that the manifest lists; it must be a file within the trace and have the rows that were committed.
fn open_part(dir: &Path, root: &Path, relative: &str, rows: u64, seen: &mut HashSet<String>) -> Result<PartHandle, TraceError> {
    let path = Path::new(relative);
    let wrong = |what: &str| corrupt(&dir.join(MANIFEST), format!("tables: part `{}` {what}", shown(relative)));
    if relative.len() > MAX_PART_PATH {
        return Err(wrong("has too long a path"));
    }
    if relative.is_empty() || !path.components().all(|c| matches!(c, Component::Normal(_))) {
        return Err(wrong("is not within the trace"));
    }
    let full = dir.join(path);
    // Also by way of a link a part must not lie elsewhere; one that is missing is reported when it is opened.
    match fs::canonicalize(&full) {
        Ok(real) if !real.starts_with(root) => return Err(wrong("is not within the trace")),
        Ok(real) if !seen.insert(identity(&real)) => return Err(wrong("is listed twice")),
        Err(error) if leads_nowhere(&error) => return Err(wrong("has a path that leads nowhere")),
        _ => {}
    }
    let part = PartHandle::open(full)?;
    if part.rows() != rows {
        return Err(part.corrupt(format!("{} rows, the manifest says {rows}", part.rows())));
    }
    Ok(part)
}
