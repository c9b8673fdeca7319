//! The paths of a command line that may be patterns.
//!
//! A shell expands patterns that are not quoted; the program expands those that come through, as they do in a quoted argument, a
//! configuration file or where there is no shell. What exists under the very name is never taken for a pattern.

use super::exit::Failure;
use glob::{MatchOptions, Pattern};
use std::path::{Path, PathBuf};

/// As a shell has it: `*` ends at a slash and matches no name that begins with a dot.
const AS_A_SHELL: MatchOptions = MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
/// Names that are shown of too many.
const SHOWN: usize = 8;

/// The paths that are meant, in the order of the arguments; those of one pattern are sorted.
///
/// # Errors
/// [`Failure::Input`] for a pattern that is none, or that matches nothing.
pub(super) fn several(arguments: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = Vec::with_capacity(arguments.len());
    for argument in arguments {
        match pattern(argument) {
            Some(pattern) => paths.extend(matches(pattern)?),
            None => paths.push(argument.clone()),
        }
    }
    Ok(paths)
}

/// The one path that is meant.
///
/// # Errors
/// As [`several`]; when a pattern matches more than one path.
pub(super) fn one(argument: &Path) -> Result<PathBuf, Failure> {
    let Some(pattern) = pattern(argument) else { return Ok(argument.to_owned()) };
    let mut found = matches(pattern)?;
    if found.len() == 1 {
        return Ok(found.remove(0));
    }
    let names: Vec<String> = found.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
    let more = if found.len() > SHOWN { format!(" and {} more", found.len() - SHOWN) } else { String::new() };
    Err(Failure::Input(format!("{pattern}: matches {} paths, and one is wanted: {}{more}", found.len(), names.join(", "))))
}

/// The argument as a pattern, unless it names something that exists or has nothing to be expanded.
fn pattern(argument: &Path) -> Option<&str> {
    let text = argument.to_str()?;
    (text.contains(['*', '?', '[']) && argument.symlink_metadata().is_err()).then_some(text)
}

/// What matches, sorted by name.
fn matches(pattern: &str) -> Result<Vec<PathBuf>, Failure> {
    let not_one = |e: glob::PatternError| {
        let literal = Pattern::escape(pattern);
        Failure::Input(format!("{pattern}: neither a path nor a pattern: {e}; a name with such characters is written {literal}"))
    };
    let mut found = Vec::new();
    for path in glob::glob_with(pattern, AS_A_SHELL).map_err(not_one)? {
        found.push(path.map_err(|e| Failure::Environment(format!("{}: cannot look into it: {}", e.path().display(), e.error())))?);
    }
    found.sort();
    if found.is_empty() {
        return Err(Failure::Input(format!("{pattern}: no such path, and as a pattern it matches none")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        names.iter().for_each(|name| std::fs::create_dir(dir.path().join(name)).unwrap());
        dir
    }

    fn names(dir: &Path, arguments: &[&str]) -> Result<Vec<String>, String> {
        let arguments: Vec<PathBuf> = arguments.iter().map(|argument| dir.join(argument)).collect();
        let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        several(&arguments).map(|paths| paths.iter().map(name).collect()).map_err(|e| e.to_string())
    }

    #[test]
    fn patterns_are_expanded_in_place_and_sorted() {
        let dir = folder(&["run-2", "run-10", "run-1", "other", ".run-0"]);
        std::fs::write(dir.path().join("run-3"), "a file").unwrap();
        assert_eq!(names(dir.path(), &["other", "run-*"]).unwrap(), ["other", "run-1", "run-10", "run-2", "run-3"]);
        assert_eq!(names(dir.path(), &["run-?", "other"]).unwrap(), ["run-1", "run-2", "run-3", "other"]);
        // A slash at the end asks for directories.
        assert_eq!(names(dir.path(), &["run-[23]/"]).unwrap(), ["run-2"]);
        // What begins with a dot is hidden, as the temporary names of traces that are being written.
        assert!(names(dir.path(), &["*-0"]).is_err());
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
        assert!(names(dir.path(), &["nil-*"]).unwrap_err().ends_with("nil-*: no such path, and as a pattern it matches none"));
        let error = names(dir.path(), &["run-[1"]).unwrap_err();
        assert!(error.contains("neither a path nor a pattern") && error.ends_with("run-[[]1"), "{error}");
        assert_eq!(one(&dir.path().join("l*")).unwrap(), dir.path().join("last"));
        let Err(Failure::Input(error)) = one(&dir.path().join("run-*")) else { panic!("two are not one") };
        assert!(error.contains("matches 2 paths") && error.contains("run-1, ") && error.ends_with("run-2"), "{error}");
        let many = folder(&["1", "2", "3", "4", "5", "6", "7", "8", "9"]);
        assert!(one(&many.path().join("?")).unwrap_err().to_string().ends_with("8 and 1 more"));
    }

    proptest! {
        /// Whatever is typed is a path, a pattern or a failure of usage.
        #[test]
        fn any_text_is_taken(text in "[a-c*?\\[\\]!\\-/.]{1,12}") {
            let dir = folder(&["a", "b", "abc"]);
            let argument = dir.path().join(text.trim_start_matches('/'));
            match several(std::slice::from_ref(&argument)) {
                Ok(paths) => prop_assert!(paths == [argument.clone()] || paths.iter().all(|path| path.exists())),
                Err(failure) => prop_assert!(matches!(failure, Failure::Input(_)), "{failure}"),
            }
        }
    }
}
