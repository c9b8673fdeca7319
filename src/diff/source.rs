//! What is compared: a trace, or a report that was kept as JSON.

use super::ranges;
use crate::analysis::request_totals::{RequestTotals, request_totals};
use crate::analysis::{AnalysisError, Options, analyze_trace};
use crate::metric::Report;
use crate::metric::report::SCHEMA;
use crate::trace::{Trace, TraceError, input_file, is_lines};
use serde_json::Value;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Largest report file: a report of 100 000 requests and 40 layers is a tenth of it.
const MAX_BYTES: u64 = 1 << 30;

/// One side of a comparison.
#[derive(Debug)]
pub struct Side {
    /// Its numbers.
    pub report: Report,
    /// The trace, when it was given as one.
    pub trace: Option<Trace>,
    /// Its sums by request, when it was given as a trace.
    pub totals: Option<RequestTotals>,
}

/// Why a side cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// There is nothing at this path.
    #[error("{path}: neither a trace nor a report: no such file or directory", path = path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{path}: cannot read: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is no report, or a broken one.
    #[error("{path}: corrupt: {reason}", path = path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A partial report, of which no report has been made.
    #[error("{path}: it is a partial report; compare what `specprof report {path} --format json` makes of it", path = path.display())]
    Partial {
        /// The file.
        path: PathBuf,
    },
    /// The lines of an exported trace.
    #[error("{path}: it is a trace as JSON lines; make a trace of it first, by `specprof import jsonl {path} -o DIR`", path = path.display())]
    Lines {
        /// The file.
        path: PathBuf,
    },
    /// Several reports in one file: none of them is the one to compare.
    #[error("{path}: it holds several reports; give one, as `specprof report TRACE --format json` writes it", path = path.display())]
    Several {
        /// The file.
        path: PathBuf,
    },
    /// A report of a version that this build cannot read.
    #[error("{path}: report version `{found}` is not readable by this build, which reads {SCHEMA}; use a newer specprof", path = path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: String,
    },
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace contradicts itself.
    #[error("{path}: {source}", path = path.display())]
    Analysis {
        /// The trace.
        path: PathBuf,
        /// What is wrong with it.
        source: AnalysisError,
    },
}

impl Side {
    /// Opens a trace (a directory) and makes its report, or reads a report (a file).
    ///
    /// # Errors
    /// When it is neither, corrupt, or of a version that this build cannot read.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => SourceError::Missing { path: path.to_owned() },
            _ => SourceError::Io { path: path.to_owned(), source },
        })?;
        if !metadata.is_dir() {
            return Ok(Self { report: read_report(path)?, trace: None, totals: None });
        }
        let trace = Trace::open(path)?;
        let wrong = |error| match error {
            AnalysisError::Trace(error) => SourceError::Trace(error),
            source => SourceError::Analysis { path: path.to_owned(), source },
        };
        let report = analyze_trace(&trace, &Options::default()).map_err(wrong)?;
        let totals = request_totals(&trace, &report).map_err(wrong)?;
        Ok(Self { report, trace: Some(trace), totals: Some(totals) })
    }
}

/// Reads a report. Keys that this build does not know are passed over; keys that older builds did not write are unknown.
///
/// # Errors
/// As [`Side::open`].
pub fn read_report(path: &Path) -> Result<Report, SourceError> {
    let io = |source| SourceError::Io { path: path.to_owned(), source };
    let wrong = |reason: String| SourceError::Report { path: path.to_owned(), reason };
    let mut bytes = Vec::new();
    input_file::open(path).map_err(io)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(wrong("too large for a report".into()));
    }
    if bytes.starts_with(b"PAR1") {
        return Err(SourceError::Partial { path: path.to_owned() });
    }
    if is_lines(&bytes) {
        return Err(SourceError::Lines { path: path.to_owned() });
    }
    let json = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&bytes);
    // The version first: a report of another version need not have the keys of this one.
    let value: Value = serde_json::from_slice(json).map_err(|e| wrong(format!("not JSON: {e}")))?;
    match value.get("schema").and_then(Value::as_str) {
        Some(SCHEMA) => {}
        Some(found) if found.starts_with("specprof.report/") => {
            let found = found.chars().take(40).collect::<String>().escape_debug().to_string();
            return Err(SourceError::Version { path: path.to_owned(), found });
        }
        Some(found) if found.starts_with("specprof.reports/") => return Err(SourceError::Several { path: path.to_owned() }),
        _ => return Err(wrong("no report of specprof: it has no `schema`; write one by `specprof report TRACE --format json`".into())),
    }
    ranges::check_keys(&value).map_err(wrong)?;
    let report: Report = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
    if let Some(pair) = report.layers.windows(2).find(|pair| pair[0].layer >= pair[1].layer) {
        return Err(wrong(format!("layers: {} stands before {}; they must ascend", pair[0].layer, pair[1].layer)));
    }
    ranges::check_report(&report).map_err(wrong)?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;

    fn read(text: &str) -> Result<Report, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::fs::write(&path, text).unwrap();
        Side::open(&path).map(|side| side.report).map_err(|e| e.to_string().replace(&path.display().to_string(), "r.json"))
    }

    #[test]
    fn a_report_is_read_back() {
        let report = report();
        assert_eq!(read(&serde_json::to_string(&report).unwrap()).unwrap(), report);
        // A newer report of the same version has more keys.
        let mut more = serde_json::to_value(&report).unwrap();
        more["run"]["colour"] = "blue".into();
        assert_eq!(read(&more.to_string()).unwrap(), report);
    }

    #[test]
    fn broken_reports_are_named() {
        let value = serde_json::to_value(report()).unwrap();
        let with = |change: &dyn Fn(&mut Value)| {
            let mut value = value.clone();
            change(&mut value);
            read(&value.to_string()).unwrap_err()
        };
        assert!(read("").unwrap_err().starts_with("r.json: corrupt: not JSON"));
        assert!(read("{}").unwrap_err().contains("no report of specprof"));
        assert!(read(&"[".repeat(100_000)).unwrap_err().contains("not JSON"));
        assert!(with(&|v| v["schema"] = "specprof.report/2".into()).contains("version `specprof.report/2`"));
        assert!(with(&|v| v["schema"] = "specprof.reports/1".into()).contains("holds several reports; give one"));
        assert!(with(&|v| v["totals"] = 3.into()).starts_with("r.json: corrupt: "));
        assert!(with(&|v| v["layers"][1]["layer"] = 0.into()).contains("must ascend"));
        assert!(
            with(&|v| v["by_request"][1]["sums"]["union"] = vec![1].into()).contains("by_request[1].sums: those of request 1 are not of")
        );
        assert!(with(&|v| v["by_request"][0]["sums"]["windows"][0] = u64::MAX.into()).contains("larger than any number"));
        assert!(with(&|v| v["by_request"][0]["sums"]["windows"][0] = (1u64 << 41).into()).contains("larger than a trace can have"));
        assert!(Side::open(Path::new("/nowhere")).unwrap_err().to_string().contains("neither a trace nor a report"));
    }
}
