//! Where inputs are written and traces are made: a directory in memory, where there is one.

use specprof::import::zip::Archive;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Largest file of a directory.
const MOST_BYTES: u64 = 4 << 20;

/// An empty directory for an input and what is made of it.
pub fn fresh() -> &'static Path {
    static WORK: OnceLock<PathBuf> = OnceLock::new();
    let dir = WORK.get_or_init(|| {
        let dir = root().join("work");
        fs::create_dir_all(&dir).expect("a directory for the inputs");
        dir
    });
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        remove(&entry.path());
    }
    dir
}

/// The directory of this process.
pub fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let temporary = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let root = temporary.join(format!("specprof-fuzz-{}", std::process::id()));
        fs::create_dir_all(&root).expect("a directory for the inputs");
        root
    })
}

/// A file of the repository.
pub fn repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Removes a file or a directory with all that is in it.
fn remove(path: &Path) {
    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Writes a file.
pub fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).expect("room for an input");
}

/// Unpacks a directory; `None` when the bytes are no archive, or one of names that are none of a directory's files.
pub fn unpack(bytes: &[u8], to: &Path) -> Option<()> {
    let mut archive = Archive::open(Cursor::new(bytes)).ok()?;
    let names: Vec<String> = archive.members().iter().map(|m| m.name.clone()).collect();
    if names.len() > 16 {
        return None;
    }
    fs::create_dir_all(to).ok()?;
    for (index, name) in names.iter().enumerate() {
        let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
        if name.len() > 100 || name.split('/').count() > 3 || !name.split('/').all(plain) {
            return None;
        }
        let path = to.join(name);
        fs::create_dir_all(path.parent()?).ok()?;
        fs::write(&path, archive.read(index, MOST_BYTES).ok()?).ok()?;
    }
    Some(())
}

/// Copies a directory.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("room for a copy");
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("room for a copy");
        }
    }
}
