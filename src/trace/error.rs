//! What can be wrong with a trace, each case naming the file, table, column or row.

use std::path::PathBuf;

/// An error of reading or writing a trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// There is no trace at this path: a wrong argument, not a broken file.
    #[error("{path}: no trace here: {reason}", path = path.display())]
    NotATrace {
        /// The path that was given.
        path: PathBuf,
        /// What was looked for and not found.
        reason: String,
    },
    /// A file of the trace cannot be read as what it should be.
    #[error("{path}: corrupt: {reason}", path = path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Table, column or row, and what is wrong with it.
        reason: String,
    },
    /// The trace is of a format version that this build cannot read.
    #[error("{path}: trace format {found} is not readable by this build, which reads {supported}", path = path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// The version found.
        found: String,
        /// The versions that this build reads.
        supported: String,
    },
    /// The output directory is already there.
    #[error("{path}: already exists; give another --out, or --force to replace it", path = path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refused: no permission, no space, no such directory.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// A verb phrase: `write`, `create the directory`.
        action: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// An event that contradicts the trace it is to be written into.
    #[error("cannot record {what}")]
    Event {
        /// What is wrong with it.
        what: String,
    },
}
