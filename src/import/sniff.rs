//! What kind of file it is, by how it begins.

use super::{ImportError, Importer, importers};
use crate::trace::input_file;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes that are looked at.
const HEAD_BYTES: u64 = 64 << 10;

/// The beginning of an input.
#[derive(Debug, Clone)]
pub struct Head {
    /// The input, as it was named.
    pub path: PathBuf,
    /// Whether it is a directory.
    pub directory: bool,
    /// Its first bytes, at most 64 KiB; empty for a directory.
    pub bytes: Vec<u8>,
}

impl Head {
    /// Reads the beginning of a file.
    ///
    /// # Errors
    /// When it is not there or cannot be read.
    pub fn read(path: &Path) -> Result<Self, ImportError> {
        let io = ImportError::io(path);
        if path.metadata().map_err(&io)?.is_dir() {
            return Ok(Self { path: path.to_owned(), directory: true, bytes: Vec::new() });
        }
        let mut bytes = Vec::new();
        input_file::open_regular(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut bytes)).map_err(&io)?;
        Ok(Self { path: path.to_owned(), directory: false, bytes })
    }

    /// Whether it begins with these bytes.
    pub fn starts_with(&self, magic: &[u8]) -> bool {
        self.bytes.starts_with(magic)
    }

    /// Whether the beginning holds this text.
    pub fn has(&self, text: &str) -> bool {
        !text.is_empty() && self.bytes.windows(text.len()).any(|window| window == text.as_bytes())
    }

    /// Whether the beginning holds this JSON key.
    pub fn has_key(&self, key: &str) -> bool {
        self.has(&format!("\"{key}\""))
    }

    /// The first character that is not white space.
    pub fn first(&self) -> Option<u8> {
        self.bytes.iter().copied().find(|b| !b.is_ascii_whitespace())
    }

    /// The first line, when it ends within the beginning or the file does.
    pub fn first_line(&self) -> Option<&str> {
        let line = self.bytes.split(|&b| b == b'\n').next()?;
        std::str::from_utf8(line).ok().map(str::trim_end)
    }

    /// The file name's last extension, in lower case.
    pub fn extension(&self) -> String {
        self.path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase()).unwrap_or_default()
    }
}

/// The one importer that knows a file.
///
/// # Errors
/// When none knows it, or more than one.
pub fn sniff(path: &Path) -> Result<&'static dyn Importer, ImportError> {
    let head = Head::read(path)?;
    if !head.directory && head.bytes.is_empty() {
        return Err(ImportError::empty(path, "the file is empty"));
    }
    let known: Vec<_> = importers().iter().copied().filter(|importer| importer.sniff(&head)).collect();
    let names = |list: &[&dyn Importer]| {
        let mut names: Vec<_> = list.iter().map(|i| i.name()).collect();
        names.dedup();
        names.join(", ")
    };
    if known.is_empty()
        && let Some(what) = without_routes(&head)
    {
        let reason = format!(
            "{what}, which hold no routes; import the engine's responses with routed_experts, a dump of its expert recorder or a router log \
             (docs/import.md)"
        );
        return Err(ImportError::empty(path, reason));
    }
    match known.as_slice() {
        [one] => Ok(*one),
        [] => Err(ImportError::input(path, format!("not a format that is known here; name one of {}", names(importers())))),
        several => Err(ImportError::input(path, format!("could be {}; name the format", names(several)))),
    }
}

/// What files are that engines write beside their routes: metrics in Prometheus' text format, and logs.
fn without_routes(head: &Head) -> Option<&'static str> {
    if head.starts_with(b"# HELP ") || head.starts_with(b"# TYPE ") || head.extension() == "prom" {
        return Some("metrics of a server");
    }
    (head.extension() == "log").then_some("lines of a server's log")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_and_logs_are_known_to_hold_no_routes() {
        let dir = tempfile::tempdir().unwrap();
        let error = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            sniff(&path).map(|i| i.name()).unwrap_err().to_string()
        };
        assert!(
            error("metrics.txt", "# HELP vllm:x y\n# TYPE vllm:x counter\nvllm:x 1\n")
                .contains("metrics of a server, which hold no routes")
        );
        assert!(error("server.log", "INFO ready\n").contains("a server's log"));
        let other = error("other.txt", "words\n");
        assert_eq!(other.matches("sglang").count(), 1, "{other}");
    }
}
