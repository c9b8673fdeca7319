//! Why something could not be imported, each case naming the file and the way out.

use crate::trace::TraceError;
use std::path::{Path, PathBuf};

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
        Self::Input { path: path.to_owned(), reason: reason.into() }
    }

    /// A file without anything to import.
    pub fn empty(path: &Path, what: impl Into<String>) -> Self {
        Self::Empty { path: path.to_owned(), what: what.into() }
    }

    /// A closure for `map_err` on reading a file.
    pub fn io(path: &Path) -> impl Fn(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}
