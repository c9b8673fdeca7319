//! Files and directories that this process is still making, so that whoever ends it can take them away first.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that `path` is being made, until the guard is dropped.
pub fn making(path: &Path) -> Making {
    unfinished().insert(path.to_owned());
    Making(path.to_owned())
}

/// Removes everything that is being made; what cannot be removed stays.
pub fn remove_all() {
    for path in unfinished().iter() {
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

/// See [`making`]. Dropping it removes nothing.
#[derive(Debug)]
pub struct Making(PathBuf);

impl Drop for Making {
    fn drop(&mut self) {
        unfinished().remove(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_or_was_never_made_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join(name);
        fs::write(of("done"), "").unwrap();
        fs::write(of("half"), "").unwrap();
        fs::create_dir_all(of("tree/inner")).unwrap();
        drop(making(&of("done")));
        let _making = [making(&of("half")), making(&of("tree")), making(&of("never"))];
        remove_all();
        assert!(of("done").exists() && !of("half").exists() && !of("tree").exists());
    }
}
