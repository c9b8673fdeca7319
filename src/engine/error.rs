//! What can be wrong with a checkpoint or a request, each case naming file, tensor or key.

use std::path::PathBuf;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file of the checkpoint cannot be opened or mapped.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// A verb phrase.
        action: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file of the checkpoint does not hold what it must.
    #[error("{path}: {reason}", path = path.display())]
    Checkpoint {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The configuration asks for something that the engine does not implement.
    #[error("{path}: `{key}` is {found}, which is not implemented; {wanted}", path = path.display())]
    Unsupported {
        /// config.json.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What would be accepted.
        wanted: String,
    },
    /// A value became NaN or infinite in the forward pass.
    #[error("{what} is not a finite number; the weights are damaged or of another format")]
    NotFinite {
        /// Layer and tensor.
        what: String,
    },
    /// A device or its driver cannot do it.
    #[error("{0}")]
    Device(String),
    /// A prompt, token or option that the model cannot take.
    #[error("{0}")]
    Request(String),
}

impl EngineError {
    /// Whether the machine rather than the input is to blame (exit 3 rather than 2).
    pub fn is_environment(&self) -> bool {
        matches!(self, Self::Device(_))
            || matches!(self, Self::Io { source, .. } if !matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory | std::io::ErrorKind::IsADirectory))
    }
}
