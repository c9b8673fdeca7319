//! The trace directory: claiming it for a new trace, replacing its manifest.

use super::manifest::Manifest;
use super::parts::{TEMPORARY, io_error};
use super::{TraceError, schema};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Name of the manifest within a trace.
pub const MANIFEST: &str = "manifest.json";
/// A manifest larger than this is not one.
pub(super) const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// Makes `dir` the directory of a new trace, whose first manifest is `manifest`.
///
/// Something that is there already is left alone, except that `force` empties a trace: its tables are
/// removed, other files in the directory stay.
pub(super) fn claim(dir: &Path, manifest: &Manifest, force: bool) -> Result<(), TraceError> {
    match fs::symlink_metadata(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(dir).map_err(io_error(dir, "create the directory"))?;
        }
        Err(error) => return Err(io_error(dir, "create the directory")(error)),
        Ok(found) if found.is_dir() => {
            let empty = fs::read_dir(dir).map_err(io_error(dir, "read the directory"))?.next().is_none();
            if !empty && !force {
                return Err(TraceError::Exists { path: dir.to_owned() });
            }
            if !empty && !is_trace(dir) {
                let reason = format!("--force replaces only a trace, and this directory has no {MANIFEST} of one; give another --out");
                return Err(TraceError::NotATrace { path: dir.to_owned(), reason });
            }
        }
        Ok(_) if force => {
            let reason = "--force replaces only a trace directory, and this is a file or a link; give another --out".into();
            return Err(TraceError::NotATrace { path: dir.to_owned(), reason });
        }
        Ok(_) => return Err(TraceError::Exists { path: dir.to_owned() }),
    }
    // The new manifest first: a process killed in between leaves an empty trace, not half of the old one.
    write_manifest(dir, manifest)?;
    for table in schema::TABLES.into_iter().chain([schema::KERNELS]) {
        let path = dir.join(table);
        let removed = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(found) if found.is_dir() => fs::remove_dir_all(&path),
            // Of a link, the link goes, never what it names.
            Ok(_) => fs::remove_file(&path),
        };
        removed.map_err(io_error(&path, "remove the old table"))?;
    }
    Ok(())
}

/// Whether the directory holds a manifest, of whatever version.
fn is_trace(dir: &Path) -> bool {
    let path = dir.join(MANIFEST);
    let small_file = fs::symlink_metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= MAX_MANIFEST_BYTES);
    let json = small_file.then(|| fs::read(&path).ok()).flatten();
    let value: Option<serde_json::Value> = json.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    value.is_some_and(|v| v.get("format_version").is_some() && v.get("tables").is_some())
}

/// Replaces the manifest in one step.
pub(super) fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<(), TraceError> {
    let path = dir.join(MANIFEST);
    let temporary = dir.join(format!("{MANIFEST}{TEMPORARY}"));
    let write = || {
        let mut json = serde_json::to_vec_pretty(manifest)?;
        json.push(b'\n');
        let mut file = File::create(&temporary)?;
        file.write_all(&json)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        io_error(&path, "write")(error)
    })?;
    sync_directory(dir)
}

/// Makes renames in a directory survive a power cut, where directories can be opened.
pub(super) fn sync_directory(dir: &Path) -> Result<(), TraceError> {
    if cfg!(unix) {
        File::open(dir).and_then(|d| d.sync_all()).map_err(io_error(dir, "write"))?;
    }
    Ok(())
}
