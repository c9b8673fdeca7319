//! What a driver's library says, asked for by a process of its own: a driver may never return, or end its caller.
//!
//! The program starts itself with the hidden `doctor --probe NAME`. The probe prints `at CALL` before each call that may not return, and its
//! answer, as one line of JSON, last. What has not answered in time is ended, and said to hang. A process that the kernel holds on to
//! cannot be ended: it is not waited for.

use super::exit::Failure;
use crate::record::{CudaDevice, cuda_device};
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The probe of the CUDA driver, which answers with [`cuda_device`]'s result.
pub(super) const CUDA: &str = "cuda";
/// What a probe's line of a call begins with.
const AT: &str = "at ";
/// Longest answer, bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Seconds that the driver has before a run is refused. One without persistence mode may take many.
const SECONDS: u64 = 60;
/// The variable that says other seconds.
const SECONDS_VARIABLE: &str = "SPECPROF_DRIVER_TIMEOUT";

/// Why a probe gave no answer.
#[derive(Debug)]
pub(super) enum Silence {
    /// No process for it starts.
    NotStarted(std::io::Error),
    /// It did not end in time; with the call that it was in.
    Hangs(Option<String>),
    /// It ended without an answer.
    Ended(ExitStatus, Option<String>),
    /// It said something else.
    Unreadable(serde_json::Error),
}

/// In a probe: says which call comes next.
pub(super) fn tell(call: &'static str) {
    let mut out = std::io::stdout().lock();
    // Nobody who listens is no reason to stop.
    let _ = writeln!(out, "{AT}{call}").and_then(|()| out.flush());
}

/// The answer of the probe `name`, after `limit` at the latest.
pub(super) fn ask<T: DeserializeOwned>(name: &str, limit: Duration) -> Result<T, Silence> {
    let end = Instant::now() + limit;
    let mut child = start(name).map_err(Silence::NotStarted)?;
    let lines = lines(&mut child);
    let (mut at, mut answer) = (None, None);
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => match line.strip_prefix(AT) {
                Some(call) => at = Some(call.to_owned()),
                None => answer = Some(line),
            },
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                return Err(Silence::Hangs(at));
            }
        }
    }
    // It has closed its output, so it is about to end; a driver may still keep it from that.
    let Some(status) = wait(&mut child, end) else {
        let _ = child.kill();
        return Err(Silence::Hangs(at));
    };
    match answer.filter(|_| status.success()) {
        Some(answer) => serde_json::from_str(&answer).map_err(Silence::Unreadable),
        None => Err(Silence::Ended(status, at)),
    }
}

fn start(name: &str) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["doctor", "--probe", name]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

/// What a child prints. A child that hangs keeps its thread, which ends with this process.
fn lines(child: &mut Child) -> Receiver<String> {
    let (to, from) = channel();
    if let Some(pipe) = child.stdout.take() {
        std::thread::spawn(move || {
            let lines = BufReader::new(pipe.take(MOST_BYTES)).lines().map_while(Result::ok);
            for line in lines {
                if to.send(line).is_err() {
                    break;
                }
            }
        });
    }
    from
}

/// Waits until a process has ended, at most until `end`.
fn wait(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        let left = end.checked_duration_since(Instant::now())?;
        std::thread::sleep(left.min(Duration::from_millis(1)));
    }
}

/// How a process ended.
pub(super) fn ended(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal}");
    }
    status.code().map_or_else(|| "without a code".to_owned(), |code| format!("exit code {code}"))
}

/// ` in CALL`, when the call is known.
pub(super) fn in_call(at: Option<String>) -> String {
    at.map_or_else(String::new, |call| format!(" in {call}"))
}

/// Refuses `--backend cuda` where the CUDA engine has no device, or its driver never returns: that is tried by another process first.
///
/// # Errors
/// [`Failure::Environment`] with the reason and the way out; [`Failure::Input`] when the time limit is no number.
pub(super) fn require_cuda() -> Result<(), Failure> {
    let limit = limit()?;
    let refused = |reason: String| Err(Failure::Environment(format!("--backend cuda: {reason}; use --backend cpu")));
    let reason = match ask::<Result<CudaDevice, String>>(CUDA, limit) {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(reason)) => reason,
        Err(Silence::Hangs(at)) => format!(
            "the driver did not return within {} s{}: it hangs (a stuck device, see `dmesg` for NVRM or Xid lines, needs a reset; for a slow \
             one set {SECONDS_VARIABLE} to more seconds)",
            limit.as_secs(),
            in_call(at)
        ),
        Err(Silence::Ended(status, at)) => format!(
            "the driver's library ended the process that tried it ({}){}: driver and library may be of different versions, look at what \
             LD_LIBRARY_PATH finds",
            ended(status),
            in_call(at)
        ),
        // Then this process is the one to try it.
        Err(Silence::NotStarted(_) | Silence::Unreadable(_)) => match cuda_device(&|_| {}) {
            Ok(_) => return Ok(()),
            Err(reason) => reason,
        },
    };
    refused(reason)
}

fn limit() -> Result<Duration, Failure> {
    let Some(text) = std::env::var_os(SECONDS_VARIABLE).filter(|text| !text.is_empty()) else { return Ok(Duration::from_secs(SECONDS)) };
    let seconds = text.to_str().and_then(|text| text.parse().ok()).filter(|seconds| (1..=3600).contains(seconds));
    let wrong = || Failure::Input(format!("{SECONDS_VARIABLE}={}: is no number of seconds from 1 to 3600", text.to_string_lossy()));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}
