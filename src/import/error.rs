//! Why something could not be imported, each case naming the file and the way out.

use crate::trace::TraceError;
use std::path::{Path, PathBuf};

/// Reasons of more characters than this quote too much of their file.
const LONGEST: usize = 300;

/// A reason without the middle of what it quotes: its place stands at the beginning, the way out at the end.
fn short(reason: String) -> String {
    let chars = reason.chars().count();
    if chars <= LONGEST {
        return reason;
    }
    let (head, tail) = (LONGEST / 2, LONGEST / 2 - 5);
    reason.chars().take(head).chain(" ... ".chars()).chain(reason.chars().skip(chars - tail)).collect()
}

/// An error of an import.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The file cannot be opened or read.
    #[error("{path}: cannot read: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{path}: {reason}", path = path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// The line, key or array, what is wrong with it, and what to do.
        reason: String,
    },
    /// The file can be read and holds nothing to import.
    #[error("{path}: {what}", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What is not there, and how to get it.
        what: String,
    },
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

impl ImportError {
    /// A file that is not what it should be.
    pub fn input(path: &Path, reason: impl Into<String>) -> Self {
        Self::Input { path: path.to_owned(), reason: short(reason.into()) }
    }

    /// A file without anything to import.
    pub fn empty(path: &Path, what: impl Into<String>) -> Self {
        Self::Empty { path: path.to_owned(), what: short(what.into()) }
    }

    /// A closure for `map_err` on reading a file.
    pub fn io(path: &Path) -> impl Fn(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quoted_at_length_loses_its_middle() {
        let path = Path::new("x.json");
        let error = |reason: &str| ImportError::input(path, reason).to_string();
        assert_eq!(error("line 3: too long"), "x.json: line 3: too long");
        let long = format!("line 3: `{}` is no number; give --k", "é".repeat(70_000));
        let text = error(&long);
        assert_eq!(text.chars().count(), "x.json: ".len() + LONGEST);
        assert!(text.starts_with("x.json: line 3: `éé") && text.ends_with("éé` is no number; give --k"), "{text}");
    }
}
