//! Claiming a directory for a new trace. What `--force` replaces is set aside and comes back when nothing was recorded.

use super::manifest::{Manifest, PartFile};
use super::output::{MANIFEST, MAX_MANIFEST_BYTES, write_manifest};
use super::parts::{TEMPORARY, io_error};
use super::{TraceError, schema};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Folder within the trace that holds the replaced one until the new one has a step.
pub(super) const ASIDE: &str = ".replaced";

/// A claimed directory: how to give it back, and the lock that keeps other writers out.
#[derive(Debug)]
pub(super) struct Claim {
    dir: PathBuf,
    /// Directories that were made for the trace, outermost first.
    made: Vec<PathBuf>,
    /// What of the replaced trace is its own: its listed parts, relative to the trace.
    replaced: Option<BTreeSet<PathBuf>>,
    /// Held, not read.
    _lock: Option<File>,
}

/// Makes `dir` the directory of a new trace, whose first manifest is `manifest`.
///
/// Something that is there already is left alone, except that `force` replaces a trace: its manifest and tables are
/// set aside, other files in the directory stay. Of two processes that want the same place, one gets it.
pub(super) fn claim(dir: &Path, manifest: &Manifest, force: bool) -> Result<Claim, TraceError> {
    let refuse = |reason: String| Err(TraceError::NotATrace { path: dir.to_owned(), reason });
    if dir.as_os_str().is_empty() || dir.as_os_str() == "-" {
        return refuse("a trace is a directory, not a stream; give --out a directory (./- for one of that name)".into());
    }
    let made = make(dir, force)?;
    let exists = || TraceError::Exists { path: dir.to_owned() };
    let lock = match lock(dir) {
        Ok(lock) => lock,
        Err(_) if !force => return Err(exists()),
        Err(busy) => return Err(io_error(dir, "replace the trace")(busy)),
    };
    let mut claim = Claim { dir: dir.to_owned(), made, replaced: None, _lock: lock };
    let empty = fs::read_dir(dir).map_err(io_error(dir, "read the directory"))?.next().is_none();
    if !empty {
        // Whoever was faster has it: it is not ours to take away.
        claim.made.clear();
        if !force {
            return Err(exists());
        }
        let Some(old) = Sign::read(dir) else {
            return refuse(format!("--force replaces only a trace, and this directory has no {MANIFEST} of one; give another --out"));
        };
        if let Some(foreign) = first_foreign(dir, &old.listed())? {
            return refuse(format!(
                "`{}` is not a part of the trace, and --force removes nothing else; move it away or give another --out",
                foreign.to_string_lossy().escape_debug()
            ));
        }
        claim.set_aside(&old).map_err(io_error(dir, "set the old trace aside"))?;
    }
    match write_manifest(dir, manifest) {
        Ok(()) => Ok(claim),
        Err(error) => {
            claim.undo();
            Err(error)
        }
    }
}

/// Makes the directory and the ones above it that are missing; gives those that were made, outermost first.
fn make(dir: &Path, force: bool) -> Result<Vec<PathBuf>, TraceError> {
    let failed = |path: &Path, error| Err(io_error(path, "create the directory")(error));
    let missing = |path: &Path| fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let mut made: Vec<PathBuf> = Vec::new();
    // Without `.` at its end, which nothing can be made at.
    let dir: &Path = &dir.components().collect::<PathBuf>();
    if missing(dir) {
        let mut wanted: Vec<&Path> = dir.ancestors().take_while(|p| !p.as_os_str().is_empty() && missing(p)).collect();
        wanted.reverse();
        for path in wanted {
            match fs::create_dir(path) {
                Ok(()) => made.push(path.to_owned()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    remove_empty(&made);
                    return failed(dir, error);
                }
            }
        }
    }
    match fs::symlink_metadata(dir) {
        Ok(found) if found.is_dir() => Ok(made),
        Ok(_) if force => {
            let reason = "--force replaces only a trace directory, and this is a file or a link; give another --out".into();
            Err(TraceError::NotATrace { path: dir.to_owned(), reason })
        }
        Ok(_) => Err(TraceError::Exists { path: dir.to_owned() }),
        Err(error) => failed(dir, error),
    }
}

/// Removes directories, innermost first, as far as they are empty.
fn remove_empty(made: &[PathBuf]) {
    for path in made.iter().rev() {
        if fs::remove_dir(path).is_err() {
            return;
        }
    }
}

/// Locks the directory against other writers, where the file system can.
fn lock(dir: &Path) -> io::Result<Option<File>> {
    if !cfg!(unix) {
        return Ok(None);
    }
    let Ok(file) = File::open(dir) else { return Ok(None) };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process is recording into it")),
        // No locks here: the first manifest is still created by only one.
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Whether `dir` is a trace that may be replaced as a whole: nobody writes it, and everything in its folders is its own.
///
/// # Errors
/// [`TraceError::NotATrace`] naming what is not of a trace, [`TraceError::Io`] when somebody writes it or it cannot be read.
pub fn check_replaceable(dir: &Path) -> Result<(), TraceError> {
    let refuse = |reason: String| Err(TraceError::NotATrace { path: dir.to_owned(), reason });
    lock(dir).map_err(io_error(dir, "replace the trace"))?;
    let Some(old) = Sign::read(dir) else {
        return refuse(format!("--force replaces only a trace, and this directory has no {MANIFEST} of one; give another --out"));
    };
    match first_foreign(dir, &old.listed())? {
        None => Ok(()),
        Some(foreign) => refuse(format!(
            "`{}` is not a part of the trace, and --force removes nothing else; move it away or give another --out",
            foreign.to_string_lossy().escape_debug()
        )),
    }
}

/// As much of a manifest of any version as it takes to know a trace and its files.
#[derive(Deserialize)]
struct Sign {
    #[serde(rename = "format_version")]
    _version: IgnoredAny,
    tables: BTreeMap<String, Vec<PartFile>>,
}

/// The same of a manifest whose tables are listed in another way.
#[derive(Deserialize)]
struct BareSign {
    #[serde(rename = "format_version")]
    _version: IgnoredAny,
    #[serde(rename = "tables")]
    _tables: IgnoredAny,
}

impl Sign {
    /// Of the manifest in `dir`, when there is one.
    fn read(dir: &Path) -> Option<Self> {
        let path = dir.join(MANIFEST);
        fs::symlink_metadata(&path).ok().filter(|m| m.is_file() && m.len() <= MAX_MANIFEST_BYTES)?;
        let json = fs::read(&path).ok()?;
        let bare = |sign: BareSign| Self { _version: sign._version, tables: BTreeMap::new() };
        serde_json::from_slice(&json).or_else(|_| serde_json::from_slice(&json).map(bare)).ok()
    }

    fn listed(&self) -> BTreeSet<PathBuf> {
        self.tables.values().flatten().map(|part| PathBuf::from(&part.path)).collect()
    }

    fn has_steps(&self) -> bool {
        self.tables.get(schema::STEPS).is_some_and(|parts| !parts.is_empty())
    }
}

/// The folders that a trace may have.
fn tables() -> impl Iterator<Item = &'static str> {
    schema::TABLES.into_iter().chain((!schema::TABLES.contains(&schema::KERNELS)).then_some(schema::KERNELS))
}

/// Whether a file within a table's folder is of the trace: listed, or named as the writer names parts.
fn is_own(table: &str, name: &Path, listed: &BTreeSet<PathBuf>) -> bool {
    let text = name.to_string_lossy();
    let part = text.strip_suffix(TEMPORARY).unwrap_or(&text);
    (part.starts_with("part-") && part.ends_with(".parquet")) || listed.contains(&Path::new(table).join(name))
}

/// The first thing in a table's place that `--force` must not remove.
fn first_foreign(dir: &Path, listed: &BTreeSet<PathBuf>) -> Result<Option<PathBuf>, TraceError> {
    for table in tables() {
        let path = dir.join(table);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(io_error(&path, "read the directory")(error)),
            // Of a link, the link goes, never what it names.
            Ok(found) if found.is_symlink() => continue,
            Ok(found) if !found.is_dir() => return Ok(Some(table.into())),
            Ok(_) => {}
        }
        let entries = fs::read_dir(&path).map_err(io_error(&path, "read the directory"))?;
        for entry in entries {
            let entry = entry.map_err(io_error(&path, "read the directory"))?;
            let name = PathBuf::from(entry.file_name());
            let folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if folder || !is_own(table, &name, listed) {
                return Ok(Some(Path::new(table).join(name)));
            }
        }
    }
    Ok(None)
}

/// Removes what is a trace's own in `dir`: parts, empty folders, the manifest.
fn remove_own(dir: &Path, listed: &BTreeSet<PathBuf>) {
    for table in tables() {
        let path = dir.join(table);
        if fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink()) {
            let _ = fs::remove_file(&path);
            continue;
        }
        for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
            let folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if !folder && is_own(table, Path::new(&entry.file_name()), listed) {
                let _ = fs::remove_file(entry.path());
            }
        }
        let _ = fs::remove_dir(&path);
    }
    let _ = fs::remove_file(dir.join(format!("{MANIFEST}{TEMPORARY}")));
    let _ = fs::remove_file(dir.join(MANIFEST));
}

/// Moves a trace's folders, then its manifest; what is not there is passed over.
fn move_trace(from: &Path, to: &Path) -> io::Result<()> {
    for name in tables().chain([MANIFEST]) {
        match fs::rename(from.join(name), to.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl Claim {
    /// Puts the old trace aside. What a killed process has set aside before is the trace to come back, unless that
    /// process had recorded steps since.
    fn set_aside(&mut self, old: &Sign) -> io::Result<()> {
        let aside = self.dir.join(ASIDE);
        let waiting = Sign::read(&aside).filter(|_| fs::symlink_metadata(&aside).is_ok_and(|m| m.is_dir()));
        if let Some(waiting) = waiting {
            if !old.has_steps() {
                remove_own(&self.dir, &old.listed());
                self.replaced = Some(waiting.listed());
                return Ok(());
            }
            remove_own(&aside, &waiting.listed());
        }
        match fs::create_dir(&aside) {
            // Left by a process that was killed while it moved: the rest follows now.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && fs::symlink_metadata(&aside)?.is_dir() => {}
            made => made?,
        }
        self.replaced = Some(old.listed());
        move_trace(&self.dir, &aside).inspect_err(|_| {
            let _ = move_trace(&aside, &self.dir);
            let _ = fs::remove_dir(&aside);
        })
    }

    /// The new trace stays: the replaced one goes.
    pub(super) fn settle(&mut self) {
        self.made.clear();
        if let Some(listed) = self.replaced.take() {
            let aside = self.dir.join(ASIDE);
            remove_own(&aside, &listed);
            let _ = fs::remove_dir(&aside);
        }
    }

    /// Nothing was recorded: everything is as it was before the claim. What cannot be moved back stays in its folder.
    pub(super) fn undo(&mut self) {
        remove_own(&self.dir, &BTreeSet::new());
        if self.replaced.take().is_some() {
            let aside = self.dir.join(ASIDE);
            let _ = move_trace(&aside, &self.dir);
            let _ = fs::remove_dir(&aside);
        }
        remove_empty(&std::mem::take(&mut self.made));
    }
}

/// Removes part files that the manifest does not list and files that were being written: room for a last word.
pub(super) fn remove_unlisted(dir: &Path, manifest: &Manifest) {
    let listed: BTreeSet<PathBuf> = manifest.tables.values().flatten().map(|part| PathBuf::from(&part.path)).collect();
    for table in tables() {
        for entry in fs::read_dir(dir.join(table)).into_iter().flatten().flatten() {
            let name = PathBuf::from(entry.file_name());
            if is_own(table, &name, &BTreeSet::new()) && !listed.contains(&Path::new(table).join(&name)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
    let _ = fs::remove_file(dir.join(format!("{MANIFEST}{TEMPORARY}")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::synth::Synth;

    #[test]
    fn room_for_the_last_word_is_made_of_what_is_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        let manifest = Synth { verify_steps: 2, ..Synth::default() }.write(&path).unwrap();
        let (own, foreign) = (["routes/part-00009.parquet", "steps/part-00009.parquet.tmp", "manifest.json.tmp"], "steps/notes.txt");
        for name in own.into_iter().chain([foreign]) {
            fs::write(path.join(name), "x").unwrap();
        }
        remove_unlisted(&path, &manifest);
        assert!(own.iter().all(|name| !path.join(name).exists()));
        assert!(path.join(foreign).exists());
        assert!(manifest.tables.values().flatten().all(|part| path.join(&part.path).exists()));
    }
}
