//! Opens a trace and hands its tables out as plain columns. No arrow type leaves this folder.
//!
//! A trace comes from anywhere: nothing in it is believed before it is checked, and whatever is wrong is an
//! error that names the file. A trace of a newer minor version, or with more columns, is read as far as this
//! build knows it.

use super::manifest::{Manifest, Warning};
use super::output::{MANIFEST, MAX_MANIFEST_BYTES};
use super::part_file::{PartHandle, corrupt};
use super::routes::{self, RouteUnit};
use super::tables::{self, Steps};
use super::telemetry::TelemetrySample;
use super::version::FormatVersion;
use super::{RequestEvent, TraceError, schema};
use std::fs::{self, File};
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
        let table = |name: &str| -> Result<Vec<PartHandle>, TraceError> {
            let parts = manifest.tables.get(name).map(Vec::as_slice).unwrap_or_default();
            parts.iter().map(|part| open_part(dir, &root, &part.path, part.rows)).collect()
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
            rows: parts.iter().map(PartHandle::rows).sum(),
            bytes: parts.iter().map(|p| p.bytes).sum(),
        };
        vec![
            size(schema::REQUESTS, &self.requests),
            size(schema::STEPS, &self.steps),
            size(schema::ROUTES, &self.routes),
            size(schema::TELEMETRY, &self.telemetry),
        ]
    }

    /// `steps`, without input tokens, parents and draft probabilities.
    ///
    /// # Errors
    /// [`TraceError::Corrupt`] naming the part and, where one is wrong, the column or row.
    pub fn steps(&self) -> Result<Steps, TraceError> {
        tables::read_steps(&self.steps, false, self.manifest.host_times)
    }

    /// `steps` with all columns.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn steps_with_details(&self) -> Result<Steps, TraceError> {
        tables::read_steps(&self.steps, true, self.manifest.host_times)
    }

    /// `requests`, in the order in which they ended.
    ///
    /// # Errors
    /// As [`Trace::steps`].
    pub fn requests(&self) -> Result<Vec<RequestEvent>, TraceError> {
        tables::read_requests(&self.requests)
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

/// Reads and checks the manifest of the trace in `dir`.
///
/// # Errors
/// As [`Trace::open`].
pub fn read_manifest(dir: &Path) -> Result<Manifest, TraceError> {
    let path = dir.join(MANIFEST);
    let file = File::open(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            let reason = if dir.is_dir() { format!("it has no {MANIFEST}") } else { "it is not a directory".into() };
            TraceError::NotATrace { path: dir.to_owned(), reason }
        }
        _ => TraceError::Io { path: path.clone(), action: "open", source },
    })?;
    let mut json = Vec::new();
    let read = file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut json);
    read.map_err(|source| TraceError::Io { path: path.clone(), action: "read", source })?;
    if json.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(corrupt(&path, "too large for a manifest"));
    }
    // The version first: a manifest of another major version need not have the fields of this one.
    let value: serde_json::Value = serde_json::from_slice(&json).map_err(|e| corrupt(&path, e.to_string()))?;
    let version = value.get("format_version").and_then(serde_json::Value::as_str).unwrap_or_default();
    let version = FormatVersion::parse(version).ok_or_else(|| corrupt(&path, "no `format_version` of the form `major.minor`"))?;
    version.check_readable(&path)?;
    let manifest: Manifest = serde_json::from_slice(&json).map_err(|e| corrupt(&path, e.to_string()))?;
    let (k, experts) = (manifest.model.experts_per_token, manifest.model.experts);
    if k > experts || experts == u16::MAX {
        return Err(corrupt(&path, format!("model: {k} experts per token of {experts}")));
    }
    Ok(manifest)
}

/// Opens a part that the manifest lists; it must be a file within the trace and have the rows that were committed.
fn open_part(dir: &Path, root: &Path, relative: &str, rows: u64) -> Result<PartHandle, TraceError> {
    let path = Path::new(relative);
    let outside = || corrupt(&dir.join(MANIFEST), format!("part `{}` is not within the trace", relative.escape_debug()));
    if relative.is_empty() || !path.components().all(|c| matches!(c, Component::Normal(_))) {
        return Err(outside());
    }
    let full = dir.join(path);
    // Also by way of a link a part must not lie elsewhere; one that is missing is reported when it is opened.
    if fs::canonicalize(&full).is_ok_and(|real| !real.starts_with(root)) {
        return Err(outside());
    }
    let part = PartHandle::open(full)?;
    if part.rows() != rows {
        return Err(part.corrupt(format!("{} rows, the manifest says {rows}", part.rows())));
    }
    Ok(part)
}
