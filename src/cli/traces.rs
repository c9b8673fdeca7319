//! The paths of a command line that may be patterns.
//!
//! A shell expands patterns that are not quoted; the program expands those that come through, as they do in a quoted argument, a
//! configuration file or where there is no shell. What exists under the very name is never taken for a pattern. Of what a pattern
//! matches, only what the command can read is taken: a folder of traces has other files beside them.

use super::exit::Failure;
use super::ui::Ui;
use crate::trace::MANIFEST;
use glob::{MatchOptions, Pattern};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

/// As a shell has it: `*` ends at a slash and matches no name that begins with a dot.
const AS_A_SHELL: MatchOptions = MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
/// Any number of folders, in a pattern.
const FOLDERS: &str = "**";
/// Names that are shown of too many.
const SHOWN: usize = 8;
/// Bytes of a name that are no text stand in a pattern's text as these private characters, each as its own.
const NO_TEXT: u32 = 0x10_FF00;

/// What a pattern is to match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Traces.
    Traces,
    /// Traces, and partial reports.
    TracesAndPartials,
    /// Traces, and reports: files.
    TracesAndReports,
}

impl Kind {
    /// Whether the command can take what is there; what it is exactly, reading it will tell.
    fn is(self, path: &Path) -> bool {
        if path.is_dir() {
            return path.join(MANIFEST).is_file();
        }
        match self {
            Self::Traces => false,
            Self::TracesAndPartials => path.is_file() && begins_as_parquet(path).unwrap_or(true),
            Self::TracesAndReports => path.is_file(),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Traces => "no trace",
            Self::TracesAndPartials => "neither a trace nor a partial report",
            Self::TracesAndReports => "neither a trace nor a file",
        }
    }
}

/// Whether a file has the magic of Parquet. What cannot be read is for the command to say.
fn begins_as_parquet(path: &Path) -> io::Result<bool> {
    let mut magic = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut magic)?;
    Ok(magic == *b"PAR1")
}

/// The paths that are meant, in the order of the arguments; those of one pattern are sorted. What a pattern matches beside them is named
/// in a note.
///
/// # Errors
/// [`Failure::Input`] for a pattern that is none, or that matches nothing of this kind.
pub(super) fn several(arguments: &[PathBuf], kind: Kind, ui: &Ui) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = Vec::with_capacity(arguments.len());
    for argument in arguments {
        if is_pattern(argument) {
            let found = Found::of(argument, kind)?;
            found.note(argument, kind, ui);
            paths.extend(found.taken);
        } else {
            paths.push(argument.clone());
        }
    }
    Ok(paths)
}

/// The one path that is meant.
///
/// # Errors
/// As [`several`]; when a pattern matches more than one path of this kind.
pub(super) fn one(argument: &Path, kind: Kind, ui: &Ui) -> Result<PathBuf, Failure> {
    if !is_pattern(argument) {
        return Ok(argument.to_owned());
    }
    let mut found = Found::of(argument, kind)?;
    if found.taken.len() == 1 {
        found.note(argument, kind, ui);
        return Ok(found.taken.remove(0));
    }
    let (pattern, n) = (argument.display(), found.taken.len());
    Err(Failure::Input(format!("{pattern}: matches {n} paths, and one is wanted: {}", names(&found.taken))))
}

/// The first few names.
fn names(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
    let more = if paths.len() > SHOWN { format!(" and {} more", paths.len() - SHOWN) } else { String::new() };
    shown.join(", ") + &more
}

/// Whether the argument has something to be expanded, and is not the name of something that exists.
fn is_pattern(argument: &Path) -> bool {
    has_wildcard(&text_of(argument.as_os_str())) && argument.symlink_metadata().is_err()
}

fn has_wildcard(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// A name as text, in which names that differ differ: bytes that are no text are characters that nobody uses.
fn text_of(name: &OsStr) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.as_encoded_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().filter_map(|&byte| char::from_u32(NO_TEXT + u32::from(byte))));
    }
    text
}

/// What a pattern matches, sorted by name.
struct Found {
    taken: Vec<PathBuf>,
    /// What else it matches.
    passed_over: Vec<PathBuf>,
}

impl Found {
    fn of(pattern: &Path, kind: Kind) -> Result<Self, Failure> {
        let (taken, passed_over): (Vec<_>, Vec<_>) = matches(pattern)?.into_iter().partition(|path| kind.is(path));
        if !taken.is_empty() {
            return Ok(Self { taken, passed_over });
        }
        let pattern = pattern.display();
        Err(Failure::Input(match passed_over.as_slice() {
            [] => format!("{pattern}: no such path, and as a pattern it matches none"),
            [one] => format!("{pattern}: matches {}, which is {}", one.display(), kind.words()),
            all => format!("{pattern}: matches {} paths, and each is {}: {}", all.len(), kind.words(), names(all)),
        }))
    }

    fn note(&self, pattern: &Path, kind: Kind, ui: &Ui) {
        if !self.passed_over.is_empty() {
            ui.note(&format!("{}: passed over, {}: {}", pattern.display(), kind.words(), names(&self.passed_over)));
        }
    }
}

/// All paths that match, sorted by name.
fn matches(pattern: &Path) -> Result<Vec<PathBuf>, Failure> {
    let not_one = |e: glob::PatternError| {
        let literal = Pattern::escape(&pattern.to_string_lossy());
        let pattern = pattern.display();
        Failure::Input(format!("{pattern}: neither a path nor a pattern: {e}; a name with such characters is written {literal}"))
    };
    // Of the whole, so that the place of a mistake is one in what was written.
    Pattern::new(&text_of(pattern.as_os_str())).map_err(not_one)?;
    let mut found = vec![PathBuf::new()];
    for component in pattern.components() {
        let text = text_of(component.as_os_str());
        found = match component {
            Component::Normal(_) if text == FOLDERS => {
                let mut all = found.clone();
                let mut at = 0;
                while let Some(folder) = all.get(at).cloned() {
                    at += 1;
                    // A link is not followed: it may lead back.
                    all.extend(children(&folder, None)?.into_iter().filter(|path| path.symlink_metadata().is_ok_and(|m| m.is_dir())));
                }
                all.sort();
                all.dedup();
                all
            }
            Component::Normal(_) if has_wildcard(&text) => {
                let name = Pattern::new(&text).map_err(not_one)?;
                found.iter().map(|folder| children(folder, Some(&name))).collect::<Result<Vec<_>, _>>()?.concat()
            }
            literal => found.iter().map(|folder| folder.join(literal)).collect(),
        };
    }
    let folders = pattern.as_os_str().as_encoded_bytes().ends_with(b"/");
    found.retain(|path| if folders { path.is_dir() } else { path.symlink_metadata().is_ok() });
    found.sort();
    found.dedup();
    Ok(found)
}

/// What lies in a folder under a name that matches, or under any that is not hidden.
fn children(folder: &Path, name: Option<&Pattern>) -> Result<Vec<PathBuf>, Failure> {
    let looked_into = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let cannot = |e: io::Error| Failure::Environment(format!("{}: cannot look into it: {e}", looked_into.display()));
    let entries = match fs::read_dir(looked_into) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(e) => return Err(cannot(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(cannot)?.file_name();
        let text = text_of(&entry);
        if name.map_or(!text.starts_with('.'), |name| name.matches_with(&text, AS_A_SHELL)) {
            found.push(folder.join(entry));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::ui::ColorChoice;
    use super::*;
    use proptest::prelude::*;

    /// A folder of traces of these names, as far as a pattern looks at them.
    fn folder(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        names.iter().for_each(|name| trace(&dir.path().join(name)));
        dir
    }

    fn trace(path: &Path) {
        std::fs::create_dir_all(path).unwrap();
        std::fs::write(path.join(MANIFEST), "{}").unwrap();
    }

    fn ui() -> Ui {
        Ui::new(ColorChoice::Never, true, 0, true)
    }

    fn names(dir: &Path, arguments: &[&str]) -> Result<Vec<String>, String> {
        let arguments: Vec<PathBuf> = arguments.iter().map(|argument| dir.join(argument)).collect();
        let name = |path: &PathBuf| path.strip_prefix(dir).unwrap().to_string_lossy().into_owned();
        let found = several(&arguments, Kind::TracesAndPartials, &ui());
        found.map(|paths| paths.iter().map(name).collect()).map_err(|e| e.to_string())
    }

    #[test]
    fn patterns_are_expanded_in_place_and_sorted() {
        let dir = folder(&["run-2", "run-10", "run-1", "other", ".run-0"]);
        std::fs::write(dir.path().join("run-3"), "PAR1 and more").unwrap();
        assert_eq!(names(dir.path(), &["other", "run-*"]).unwrap(), ["other", "run-1", "run-10", "run-2", "run-3"]);
        assert_eq!(names(dir.path(), &["run-?", "other"]).unwrap(), ["run-1", "run-2", "run-3", "other"]);
        // A slash at the end asks for directories.
        assert_eq!(names(dir.path(), &["run-[23]/"]).unwrap(), ["run-2"]);
        // What begins with a dot is hidden, as the temporary names of traces that are being written.
        assert!(names(dir.path(), &["*-0"]).is_err());
    }

    #[test]
    fn folders_are_gone_through() {
        let dir = folder(&["a/x/run", "a/run", "b/run", "b/other", ".c/run"]);
        assert_eq!(names(dir.path(), &["*/run"]).unwrap(), ["a/run", "b/run"]);
        assert_eq!(names(dir.path(), &["**/run"]).unwrap(), ["a/run", "a/x/run", "b/run"]);
        assert_eq!(names(dir.path(), &["a/*/../r?n"]).unwrap(), ["a/run/../run", "a/x/../run"]);
        assert!(names(dir.path(), &["a**/run"]).unwrap_err().contains("neither a path nor a pattern"));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(dir.path(), dir.path().join("a/back")).unwrap();
            assert_eq!(names(dir.path(), &["**/other"]).unwrap(), ["b/other"]);
        }
    }

    #[cfg(unix)]
    #[test]
    fn names_that_are_no_text_are_matched() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let name = |bytes: &[u8]| dir.path().join(OsStr::from_bytes(bytes));
        let (one, other) = (name(b"run-\xff"), name(b"run-\xfe\xff"));
        [&one, &other].into_iter().for_each(|path| trace(&path.join("t")));
        let found = |pattern: &[u8]| several(&[name(pattern)], Kind::Traces, &ui()).map_err(|e| e.to_string());
        assert_eq!(found(b"*/t").unwrap(), [other.join("t"), one.join("t")]);
        assert_eq!(found(b"run-?/t").unwrap(), [one.join("t")]);
        // The pattern itself need not be text either, and its bytes mean themselves.
        assert_eq!(found(b"run-\xfe*/t").unwrap(), [other.join("t")]);
        assert_eq!(found(b"run-\xfe\xff/*").unwrap(), [other.join("t")]);
        assert!(found(b"run-\xfd*").unwrap_err().contains("matches none"));
        assert!(found(b"run-\xfd[").unwrap_err().contains("neither a path nor a pattern"));
    }

    #[test]
    fn what_is_no_trace_is_passed_over() {
        let dir = folder(&["mtp-1-t0", "mtp-3-t0"]);
        std::fs::write(dir.path().join("sweep.json"), "{}").unwrap();
        std::fs::create_dir(dir.path().join("notes")).unwrap();
        assert_eq!(names(dir.path(), &["*"]).unwrap(), ["mtp-1-t0", "mtp-3-t0"]);
        assert_eq!(one(&dir.path().join("*1-t0"), Kind::Traces, &ui()).unwrap(), dir.path().join("mtp-1-t0"));
        // Named itself it is for the command to refuse.
        assert_eq!(names(dir.path(), &["sweep.json"]).unwrap(), ["sweep.json"]);
        let error = names(dir.path(), &["s*.json"]).unwrap_err();
        assert!(error.contains("sweep.json, which is neither a trace nor a partial report"), "{error}");
        let error = names(dir.path(), &["[ns]*"]).unwrap_err();
        assert!(error.contains("matches 2 paths, and each is neither") && error.ends_with("sweep.json"), "{error}");
        assert_eq!(one(&dir.path().join("s*"), Kind::TracesAndReports, &ui()).unwrap(), dir.path().join("sweep.json"));
    }

    #[test]
    fn what_exists_is_no_pattern() {
        let dir = folder(&["run-[1]", "run-1", "a*", "ab"]);
        assert_eq!(names(dir.path(), &["run-[1]", "a*"]).unwrap(), ["run-[1]", "a*"]);
        // Without anything to be expanded it is for the command to say that nothing is there.
        assert_eq!(names(dir.path(), &["nothing"]).unwrap(), ["nothing"]);
    }

    #[test]
    fn nothing_and_too_much_are_told() {
        let dir = folder(&["run-1", "run-2", "last"]);
        let one = |name: &str| one(&dir.path().join(name), Kind::Traces, &ui());
        assert!(names(dir.path(), &["nil-*"]).unwrap_err().ends_with("nil-*: no such path, and as a pattern it matches none"));
        let error = names(dir.path(), &["run-[1"]).unwrap_err();
        assert!(error.contains("neither a path nor a pattern") && error.ends_with("run-[[]1"), "{error}");
        assert_eq!(one("l*").unwrap(), dir.path().join("last"));
        let Err(Failure::Input(error)) = one("run-*") else { panic!("two are not one") };
        assert!(error.contains("matches 2 paths") && error.contains("run-1, ") && error.ends_with("run-2"), "{error}");
        (1..10).for_each(|n| trace(&dir.path().join(n.to_string())));
        assert!(one("?").unwrap_err().to_string().ends_with("8 and 1 more"));
    }

    proptest! {
        /// Whatever is typed is a path, a pattern or a failure of usage.
        #[test]
        fn any_text_is_taken(text in "[a-c*?\\[\\]!\\-/.]{1,12}") {
            let dir = folder(&["a", "b", "abc"]);
            let argument = dir.path().join(text.trim_start_matches('/'));
            match several(std::slice::from_ref(&argument), Kind::Traces, &ui()) {
                Ok(paths) => prop_assert!(paths == [argument.clone()] || paths.iter().all(|path| path.exists())),
                Err(failure) => prop_assert!(matches!(failure, Failure::Input(_)), "{failure}"),
            }
        }
    }
}
