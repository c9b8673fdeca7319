//! Exit codes and the mapping from failures. Nothing else decides how the process ends.

use crate::engine::EngineError;
use crate::trace::TraceError;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Done; for `diff` and `--check`: nothing failed.
pub const OK: u8 = 0;
/// A gate or a check failed.
pub const CHECK_FAILED: u8 = 1;
/// Usage or bad input.
pub const USAGE: u8 = 2;
/// The environment cannot do it: no GPU, no memory, no permission, no disk.
pub const ENVIRONMENT: u8 = 3;
/// A trace or report is corrupt or of an unreadable version.
pub const CORRUPT: u8 = 4;
/// Interrupted; the trace was closed and marked incomplete.
pub const INTERRUPTED: u8 = 130;

/// Why a command did not end with 0. Its text is one line.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A gate or check failed; the result was already printed.
    #[error("{0}")]
    Check(String),
    /// Wrong usage or bad input.
    #[error("{0}")]
    Input(String),
    /// The environment cannot do it.
    #[error("{0}")]
    Environment(String),
    /// A trace or report cannot be read.
    #[error("{0}")]
    Corrupt(String),
    /// Ctrl-C.
    #[error("{0}")]
    Interrupted(String),
    /// Nobody reads stdout any more; not a failure.
    #[error("broken pipe")]
    BrokenPipe,
}

impl Failure {
    /// The process's exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Check(_) => CHECK_FAILED,
            Self::Input(_) => USAGE,
            Self::Environment(_) => ENVIRONMENT,
            Self::Corrupt(_) => CORRUPT,
            Self::Interrupted(_) => INTERRUPTED,
            Self::BrokenPipe => OK,
        }
    }

    /// The process's exit status.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Self {
        let text = one_line(&error.to_string());
        match error {
            TraceError::NotATrace { .. } | TraceError::Exists { .. } | TraceError::Event { .. } => Self::Input(text),
            TraceError::Corrupt { .. } | TraceError::Version { .. } => Self::Corrupt(text),
            // A place where no folder can be made is a wrong one.
            TraceError::Io { action: "create the directory", source, .. } if is_argument(source.kind()) => Self::Input(text),
            TraceError::Io { .. } => Self::Environment(text),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let text = one_line(&error.to_string());
        if error.is_environment() { Self::Environment(text) } else { Self::Input(text) }
    }
}

/// A file of the command line that cannot be read: what is not there or is no file is a wrong argument, what the machine refuses is not.
pub(super) fn read_failure(path: &Path, error: &io::Error) -> Failure {
    let text = format!("{}: cannot read: {}", path.display(), one_line(&error.to_string()));
    if is_argument(error.kind()) { Failure::Input(text) } else { Failure::Environment(text) }
}

/// Whether an error of reading is the argument's rather than the machine's.
pub(super) fn is_argument(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, IsADirectory, NotADirectory, NotFound};
    matches!(kind, NotFound | NotADirectory | IsADirectory | InvalidInput | InvalidFilename)
}

/// One line, whatever a library put into its message.
pub(super) fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ")
}
