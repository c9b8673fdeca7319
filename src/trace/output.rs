//! The trace directory's own files: how they are created, and the manifest replaced.

use super::TraceError;
use super::manifest::Manifest;
use super::parts::{TEMPORARY, io_error};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Name of the manifest within a trace.
pub const MANIFEST: &str = "manifest.json";
/// A manifest larger than this is not one: a part takes some sixty bytes of it, and there are at most thousands.
pub(super) const MAX_MANIFEST_BYTES: u64 = 4 << 20;

/// Creates a file of the writer's own. Whatever has its name is a leftover or a trap: it is removed, a link never followed.
pub(super) fn create_new(path: &Path) -> io::Result<File> {
    match File::create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            File::create_new(path)
        }
        created => created,
    }
}

/// Replaces the manifest in one step.
pub(super) fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<(), TraceError> {
    let path = dir.join(MANIFEST);
    let temporary = dir.join(format!("{MANIFEST}{TEMPORARY}"));
    let write = || {
        let mut json = serde_json::to_vec_pretty(manifest)?;
        json.push(b'\n');
        let mut file = create_new(&temporary)?;
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
