//! Checks that load the driver's libraries, each made by a process of its own; see [`crate::cli::probe`].

use super::super::probe::{self, Silence, ended, in_call};
use super::checks;
use super::{Check, Status};
use crate::record::cuda_device;
use std::time::Duration;

/// What a probe looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Probe {
    /// The CUDA driver, its device and the kernels on it.
    Cuda,
    /// NVML.
    Nvml,
    /// CUPTI, opened as a recording does.
    Cupti,
}

impl Probe {
    /// What is found in this process, as the line that answers whoever asked.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn answer(self) -> serde_json::Result<String> {
        match self {
            Self::Cuda => serde_json::to_string(&cuda_device(&probe::tell)),
            Self::Nvml => serde_json::to_string(&checks::nvml()),
            Self::Cupti => serde_json::to_string(&checks::cupti()),
        }
    }

    /// Its checks, made by another process, after `limit` at the latest.
    pub fn ask(self, limit: Duration) -> Vec<Check> {
        match self {
            Self::Cuda => match probe::ask(probe::CUDA, limit) {
                Ok(device) => checks::cuda(device),
                Err(silence) => vec![self.failed(silence, limit)],
            },
            Self::Nvml => vec![probe::ask("nvml", limit).unwrap_or_else(|silence| self.failed(silence, limit))],
            Self::Cupti => vec![probe::ask("cupti", limit).unwrap_or_else(|silence| self.failed(silence, limit))],
        }
    }

    /// The check that stands for all of the probe's when it gives none.
    fn failed(self, silence: Silence, limit: Duration) -> Check {
        let (name, what) = match self {
            Self::Cuda => ("cuda backend", "the CUDA driver"),
            Self::Nvml => ("nvml", "NVML"),
            Self::Cupti => ("cupti", "CUPTI"),
        };
        let (message, hint) = match silence {
            Silence::NotStarted(e) => (format!("cannot be looked at: no process for it starts: {e}"), None),
            Silence::Unreadable(e) => (format!("the probe's answer cannot be read: {e}"), None),
            Silence::Hangs(at) => {
                let hint = "look at `dmesg` for NVRM or Xid lines; a stuck device needs a reset, a driver without persistence mode may \
                            only be slow: try a longer --timeout";
                (format!("{what} did not answer within {} s: it hangs{}", limit.as_secs(), in_call(at)), Some(hint))
            }
            Silence::Ended(status, at) => {
                let hint = "driver and library may be of different versions; look at what LD_LIBRARY_PATH finds";
                (format!("the library ended the process that tried it ({}){}", ended(status), in_call(at)), Some(hint))
            }
        };
        let check = Check::new(name, Status::Unavailable, message);
        match hint {
            Some(hint) => check.hint(hint),
            None => check,
        }
    }
}
