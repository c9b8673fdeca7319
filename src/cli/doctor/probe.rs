//! Checks that load the driver's libraries, made by a process of their own: a driver may never return, or end its caller.
//!
//! `doctor` starts itself with the hidden `--probe NAME`, which prints its checks as JSON; what has not answered in time is
//! ended, and said to hang. A process that the kernel holds on to cannot be ended: it is not waited for.

use super::checks;
use super::{Check, Status};
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

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
    fn word(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Nvml => "nvml",
            Self::Cupti => "cupti",
        }
    }

    /// The check that stands for all of the probe's when it gives none.
    fn failed(self, message: String) -> Check {
        let name = match self {
            Self::Cuda => "cuda backend",
            Self::Nvml => "nvml",
            Self::Cupti => "cupti",
        };
        Check::new(name, Status::Unavailable, message)
    }

    /// Its checks, made in this process.
    pub fn make(self) -> Vec<Check> {
        match self {
            Self::Cuda => checks::cuda(),
            Self::Nvml => vec![checks::nvml()],
            Self::Cupti => vec![checks::cupti()],
        }
    }

    /// Its checks, made by another process, after `limit` at the latest.
    pub fn ask(self, limit: Duration) -> Vec<Check> {
        match self.start().and_then(|child| self.answer(child, limit)) {
            Ok(checks) => checks,
            Err(check) => vec![*check],
        }
    }

    fn start(self) -> Result<Child, Box<Check>> {
        let cannot = |e: std::io::Error| Box::new(self.failed(format!("cannot be looked at: no process for it starts: {e}")));
        let program = std::env::current_exe().map_err(cannot)?;
        let mut command = Command::new(program);
        command.args(["doctor", "--probe", self.word()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map_err(cannot)
    }

    fn answer(self, mut child: Child, limit: Duration) -> Result<Vec<Check>, Box<Check>> {
        let Some(status) = wait(&mut child, limit) else {
            let _ = child.kill();
            let what = match self {
                Self::Cuda => "the CUDA driver",
                Self::Nvml => "NVML",
                Self::Cupti => "CUPTI",
            };
            let text = format!("{what} did not answer within {} s: it hangs", limit.as_secs());
            let hint = "look at `dmesg` for NVRM or Xid lines; a stuck device needs a reset, a driver without persistence mode may \
                        only be slow: try a longer --timeout";
            return Err(Box::new(self.failed(text).hint(hint)));
        };
        let mut text = String::new();
        let read = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut text));
        if !status.success() || !matches!(read, Some(Ok(_))) {
            let text = format!("the library ended the process that tried it ({})", ended(status));
            let hint = "driver and library may be of different versions; look at what LD_LIBRARY_PATH finds";
            return Err(Box::new(self.failed(text).hint(hint)));
        }
        serde_json::from_str(&text).map_err(|e| Box::new(self.failed(format!("the probe's answer cannot be read: {e}"))))
    }
}

/// Waits until a process has ended, at most for `limit`. Its answer is shorter than a pipe's buffer, so it never waits for us.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        let left = limit.checked_sub(begin.elapsed())?;
        std::thread::sleep(left.min(Duration::from_millis(5)));
    }
}

fn ended(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal}");
    }
    status.code().map_or_else(|| "without a code".to_owned(), |code| format!("exit code {code}"))
}
