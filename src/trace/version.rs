//! The version of the trace format and what this build reads.
//!
//! # Changelog
//!
//! * **1.0**: the first: `requests`, `steps`, `routes`, `telemetry` and `manifest.json`.
//! * **1.1**: the table `kernels`; `instrumentation.copy_gb_per_s`.
//! * **1.2**: `steps.draft_confidences`; `steps.pass_id`, the forward pass that steps of several requests share; `drafter.external`; `instrumentation.warmup_requests`,
//!   `graphs`, `profiler` and `unrecorded_token_hash`; and
//!   what a foreign engine did not say: null in `sampling`, `drafter.draft_len` and sizes of `model`, `unknown` as a word,
//!   `host_times`, `acceptance_known`, `passes_known`, `irregular_steps`, `model.experts_known`, `expert_counts`; steps without host times;
//!   `model.synthetic`, `model.routing`; a device's values in `telemetry`.
//!
//! An additional column, table or manifest key is a new minor version; anything that makes an older
//! reader misunderstand the data is a new major version.

use super::TraceError;
use std::fmt;
use std::path::Path;

/// `major.minor` of the trace format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FormatVersion {
    /// Raised when an older reader would misunderstand the data.
    pub major: u32,
    /// Raised when something was added.
    pub minor: u32,
}

/// The version that this build writes. What each version brought is in the [module's](self) changelog.
pub const FORMAT_VERSION: FormatVersion = FormatVersion { major: 1, minor: 2 };

impl FormatVersion {
    /// Parses `major.minor`.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        let number = |word: &str| (!word.is_empty() && word.bytes().all(|b| b.is_ascii_digit())).then(|| word.parse().ok()).flatten();
        Some(Self { major: number(major)?, minor: number(minor)? })
    }

    /// Whether this build can read data of this version; `path` is the manifest it was found in.
    ///
    /// # Errors
    /// [`TraceError::Version`] when the major version is another one.
    pub fn check_readable(self, path: &Path) -> Result<(), TraceError> {
        if self.major == FORMAT_VERSION.major {
            return Ok(());
        }
        let hint =
            if self.major > FORMAT_VERSION.major { "use a newer specprof" } else { "use the specprof that wrote it, or record it again" };
        Err(TraceError::Version {
            path: path.to_owned(),
            found: self.to_string(),
            supported: format!("{}.x: {hint}", FORMAT_VERSION.major),
        })
    }
}

impl fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_and_prints() {
        for text in ["1.0", "1.12", "20.3"] {
            assert_eq!(FormatVersion::parse(text).unwrap().to_string(), text);
        }
        for bad in ["", "1", "1.", ".1", "1.0.0", "+1.0", "1.x", "99999999999.0"] {
            assert_eq!(FormatVersion::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn reads_any_minor_of_its_major_only() {
        let path = Path::new("manifest.json");
        let major = FORMAT_VERSION.major;
        assert!(FormatVersion { major, minor: 99 }.check_readable(path).is_ok());
        let newer = FormatVersion { major: major + 1, minor: 0 }.check_readable(path).unwrap_err().to_string();
        assert!(newer.contains("newer specprof"), "{newer}");
        let older = FormatVersion { major: major - 1, minor: 9 }.check_readable(path).unwrap_err().to_string();
        assert!(older.contains("that wrote it"), "{older}");
    }
}
