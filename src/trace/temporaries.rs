//! Files and directories that this process is still making, so that whoever ends it can take them away first, and those that a process left
//! behind that was killed.
//!
//! Beside the target `X` they are `.X.PID.ENDING`.

use super::{MANIFEST, schema};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A file.
    File,
    /// A trace.
    Trace,
}

impl Kind {
    fn ending(self) -> &'static str {
        match self {
            Self::File => ".tmp",
            Self::Trace => ".importing",
        }
    }
}

/// Where this process makes `target`, which has a name.
pub fn place(target: &Path, kind: Kind) -> PathBuf {
    let mut name = beginning(target.file_name().unwrap_or_default());
    name.push(std::process::id().to_string());
    name.push(kind.ending());
    target.with_file_name(name)
}

fn beginning(target: &OsStr) -> OsString {
    let mut name = OsString::from(".");
    name.push(target);
    name.push(".");
    name
}

/// Removes what processes left behind that wanted to make `target` and are no more. What cannot be told, or cannot be removed, stays.
///
/// A process that runs has a lock on what it makes, and here a number that is in use: either keeps it, so that another machine's process
/// that makes something in the same directory is safe as far as its file system has locks.
pub fn remove_leftovers(target: &Path, kind: Kind) {
    let Some(name) = target.file_name() else { return };
    let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beginning = beginning(name);
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.as_encoded_bytes().strip_prefix(beginning.as_encoded_bytes());
        let pid = pid.and_then(|rest| rest.strip_suffix(kind.ending().as_bytes())).filter(|pid| pid.iter().all(u8::is_ascii_digit));
        let Some(pid) = pid.and_then(|pid| std::str::from_utf8(pid).ok()?.parse().ok()) else { continue };
        let path = entry.path();
        if is_gone(pid) && is_of(kind, &path) && is_unlocked(&path) {
            let _ = if kind == Kind::Trace { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
    }
}

/// Whether no process here has that number. Where there is no list of them it cannot be told.
fn is_gone(pid: u32) -> bool {
    let processes = Path::new("/proc");
    let process = processes.join(pid.to_string());
    processes.join("self").exists() && (fs::symlink_metadata(&process).is_err() || is_dead(&process))
}

/// Whether a process has ended and nobody has asked how: its state is `Z`, the word behind its name in brackets.
fn is_dead(process: &Path) -> bool {
    let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| matches!(rest.trim_start().chars().next(), Some('Z' | 'X')))
}

/// Whether it is what a process makes under such a name, and nothing else.
fn is_of(kind: Kind, path: &Path) -> bool {
    let Ok(found) = path.symlink_metadata() else { return false };
    match kind {
        Kind::File => found.is_file(),
        Kind::Trace if found.is_dir() => {
            let own = |name: &OsStr| {
                let name = name.to_str().unwrap_or_default();
                name == MANIFEST || name.strip_suffix(".tmp") == Some(MANIFEST) || schema::TABLES.contains(&name)
            };
            fs::read_dir(path).is_ok_and(|entries| entries.into_iter().all(|entry| entry.is_ok_and(|entry| own(&entry.file_name()))))
        }
        Kind::Trace => false,
    }
}

fn is_unlocked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
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

    #[cfg(target_os = "linux")]
    #[test]
    fn leftovers_of_the_dead_go_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join(name);
        let file = |name: &str| fs::write(of(name), "half").unwrap();
        let trace = |name: &str, inner: &str| {
            fs::create_dir_all(of(name).join("steps")).unwrap();
            fs::write(of(name).join(inner), "half").unwrap();
        };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let (dead, own) = (child.id(), std::process::id());
        // It has ended, and nobody has asked how: no other process can have its number.
        while !is_gone(dead) {
            std::thread::yield_now();
        }
        file(&format!(".t.{dead}.tmp"));
        trace(&format!(".t.{dead}.importing"), "manifest.json.tmp");
        let kept = [
            // Of live processes, of other targets, or no such names at all.
            format!(".t.{own}.tmp"),
            ".t.1.tmp".into(),
            format!(".u.{dead}.tmp"),
            format!(".t.t.{dead}.tmp"),
            format!("t.{dead}.tmp"),
            format!(".t.{dead}.tmp.tmp"),
            format!(".t.{dead}"),
            ".t.tmp".into(),
            ".t..tmp".into(),
            ".t.-3.tmp".into(),
            ".t.99999999999999.tmp".into(),
        ];
        kept.iter().for_each(|name| file(name));
        trace(&format!(".u.{dead}.importing"), "manifest.json");
        remove_leftovers(&of("u"), Kind::Trace);
        // Whatever lies in it that is of no trace keeps it.
        trace(&format!(".v.{dead}.importing"), "notes.txt");
        remove_leftovers(&of("v"), Kind::Trace);
        // As another machine's process would have it.
        let locked = File::create(of(&format!(".w.{dead}.tmp"))).unwrap();
        locked.lock().unwrap();
        remove_leftovers(&of("w"), Kind::File);
        std::os::unix::fs::symlink(of("t"), of(&format!(".x.{dead}.tmp"))).unwrap();
        remove_leftovers(&of("x"), Kind::File);

        remove_leftovers(&of("t"), Kind::File);
        assert!(!of(&format!(".t.{dead}.tmp")).exists() && of(&format!(".t.{dead}.importing")).exists());
        remove_leftovers(&of("t"), Kind::Trace);
        let mut found: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let mut wanted: Vec<String> = kept.to_vec();
        wanted.extend([format!(".v.{dead}.importing"), format!(".w.{dead}.tmp"), format!(".x.{dead}.tmp")]);
        found.sort();
        wanted.sort();
        assert_eq!(found, wanted);
        assert_eq!(place(&of("t"), Kind::Trace), of(&format!(".t.{own}.importing")));
        child.wait().unwrap();
    }
}
