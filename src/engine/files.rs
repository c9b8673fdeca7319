//! Where a checkpoint's files come from: a directory, or constants of the program.

use super::error::EngineError;
use super::matrix::Storage;
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest tokenizer or index that is read into memory. Published ones have some ten million bytes.
const MAX_READ: u64 = 256 << 20;
/// Largest configuration or template. Published ones have some ten thousand bytes.
const MAX_SMALL: u64 = 8 << 20;

/// Most entries of a folder that are looked at for a checkpoint.
const MAX_FOLDERS: usize = 1000;

/// Bound of a file that is read whole.
fn max_read(file: &str) -> u64 {
    if file == "tokenizer.json" || file.ends_with(".index.json") { MAX_READ } else { MAX_SMALL }
}

/// The named files of one checkpoint.
#[derive(Debug, Clone)]
pub enum CheckpointFiles {
    /// Files of this directory.
    Directory(PathBuf),
    /// Files inside the program.
    Embedded {
        /// The checkpoint's name.
        name: &'static str,
        /// File name and content.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl CheckpointFiles {
    /// The directory's own name, or the embedded checkpoint's.
    pub fn name(&self) -> String {
        match self {
            Self::Directory(dir) => {
                // `.` and `..` have no name of their own.
                let full = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
                full.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned())
            }
            Self::Embedded { name, .. } => (*name).to_owned(),
        }
    }

    /// What to call a file in errors.
    pub fn path(&self, file: &str) -> PathBuf {
        match self {
            Self::Directory(dir) => dir.join(file),
            Self::Embedded { name, .. } => Path::new(name).join(file),
        }
    }

    /// The whole content of a small file, `None` when there is no such file.
    ///
    /// # Errors
    /// When it exists and cannot be read.
    pub fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>, EngineError> {
        match self {
            Self::Directory(dir) => {
                let path = dir.join(file);
                let io = |action| io_error(&path, action);
                let Some(open) = open(&path)? else { return Ok(None) };
                let length = open.metadata().map_err(io("read"))?.len();
                let mut content = Vec::new();
                let most = max_read(file);
                open.take(most + 1).read_to_end(&mut content).map_err(io("read"))?;
                if length.max(content.len() as u64) > most {
                    return Err(EngineError::Checkpoint { reason: format!("is larger than {most} bytes, which no such file is"), path });
                }
                Ok(Some(Cow::Owned(content)))
            }
            Self::Embedded { .. } => Ok(self.embedded(file).map(Cow::Borrowed)),
        }
    }

    /// As [`CheckpointFiles::read`], of a file that must be there.
    ///
    /// # Errors
    /// Also when there is no such file.
    pub fn require(&self, file: &str) -> Result<Cow<'static, [u8]>, EngineError> {
        self.read(file)?.ok_or_else(|| self.absent(file))
    }

    /// Maps a large file, `None` when there is no such file.
    ///
    /// # Errors
    /// When it exists and cannot be mapped.
    pub fn map(&self, file: &str) -> Result<Option<Arc<dyn Storage>>, EngineError> {
        match self {
            Self::Directory(dir) => {
                let path = dir.join(file);
                let Some(open) = open(&path)? else { return Ok(None) };
                // SAFETY: the mapping is private and read-only and nothing in this program writes to the file. Another
                // process that truncates it while it is mapped ends this one with SIGBUS, as with every mapped reader.
                let map = unsafe { memmap2::Mmap::map(&open) }.map_err(io_error(&path, "map"))?;
                Ok(Some(Arc::new(map)))
            }
            Self::Embedded { .. } => Ok(self.embedded(file).map(|content| Arc::new(content) as Arc<dyn Storage>)),
        }
    }

    /// The error for a file that must be there and is not.
    pub fn absent(&self, file: &str) -> EngineError {
        let reason = match (self, self.subfolder_with(file)) {
            (Self::Embedded { .. }, _) => "is not there: a synthetic model of this shape takes no text; give token ids by `token_ids` in \
                                           --prompts, or by --prompt-tokens"
                .to_owned(),
            (Self::Directory(_), Some(folder)) => format!("is not there, but in a folder of this one; name {}", folder.display()),
            (Self::Directory(_), None) => "is not there; name the folder of a checkpoint in the Hugging Face layout, or `demo`".to_owned(),
        };
        EngineError::Checkpoint { path: self.path(file), reason }
    }

    /// A folder of this one that has a file of this name, the first by name.
    fn subfolder_with(&self, file: &str) -> Option<PathBuf> {
        let Self::Directory(dir) = self else { return None };
        let folders = std::fs::read_dir(dir).ok()?.take(MAX_FOLDERS).filter_map(Result::ok).map(|entry| entry.path());
        folders.filter(|folder| folder.join(file).is_file()).min()
    }

    fn embedded(&self, file: &str) -> Option<&'static [u8]> {
        match self {
            Self::Directory(_) => None,
            Self::Embedded { files, .. } => files.iter().find(|(name, _)| *name == file).map(|(_, content)| *content),
        }
    }
}

/// Opens a regular file; `None` when there is none.
fn open(path: &Path) -> Result<Option<File>, EngineError> {
    // Looked at before it is opened: opening a pipe would wait for a writer.
    match std::fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error(path, "open")(e)),
        Ok(about) if !about.is_file() => {
            return Err(EngineError::Checkpoint { path: path.to_owned(), reason: "is not a regular file".to_owned() });
        }
        Ok(_) => {}
    }
    File::open(path).map(Some).map_err(io_error(path, "open"))
}

fn io_error(path: &Path, action: &'static str) -> impl Fn(io::Error) -> EngineError {
    move |source| EngineError::Io { path: path.to_owned(), action, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_lies_in_a_folder_is_told_with_that_folder() {
        let dir = tempfile::tempdir().unwrap();
        let files = CheckpointFiles::Directory(dir.path().to_owned());
        assert!(files.absent("config.json").to_string().contains("name the folder of a checkpoint"));
        let folder = dir.path().join("checkpoint");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("config.json"), "{}").unwrap();
        assert!(files.absent("config.json").to_string().ends_with(&format!("name {}", folder.display())));
        assert!(files.absent("model.safetensors").to_string().contains("name the folder of a checkpoint"));
    }
}
