//! `specprof doctor`: what this machine can do, and why not.

use super::exit::Failure;
use super::ui::{Output, Ui};
use crate::metric::Unit;
use crate::record::{machine, why_no_cuda};
use crate::report::wrap::paragraph;
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  specprof doctor          what this machine can do
  specprof doctor --json   the same for a script";

/// Say what this machine can do and why not: processor, memory, GPU, profiling
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Print JSON instead of text
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Write to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    /// Can be used.
    Ok,
    /// Can be used, with a reservation.
    Warning,
    /// Cannot be used; the message says why.
    Unavailable,
}

/// One thing looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    message: String,
    /// What to do about it.
    hint: Option<&'static str>,
}

impl Check {
    fn new(name: &'static str, status: Status, message: impl Into<String>) -> Self {
        Self { name, status, message: message.into(), hint: None }
    }

    fn hint(mut self, hint: &'static str) -> Self {
        self.hint = Some(hint);
        self
    }
}

/// Everything that `doctor` says.
#[derive(Debug, Serialize)]
struct Doctor {
    schema: &'static str,
    version: &'static str,
    /// What `--backend auto` takes on this machine.
    backend: &'static str,
    checks: Vec<Check>,
}

/// Runs the command.
///
/// # Errors
/// When stdout cannot be written.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let output = Output::open(args.output.as_deref())?;
    let doctor = Doctor { schema: "specprof.doctor/1", version: env!("CARGO_PKG_VERSION"), backend: "cpu", checks: checks() };
    if args.json {
        let json = serde_json::to_string_pretty(&doctor).map_err(|e| Failure::Environment(e.to_string()))?;
        return output.finish(ui, &format!("{json}\n"));
    }
    // A file has no terminal behind it: plain width.
    let width = if matches!(output, Output::Stdout) { ui.width() } else { 100 };
    let mut text = String::new();
    for check in &doctor.checks {
        let word = match check.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Unavailable => "unavailable",
        };
        text.push_str(&paragraph(&format!("{:<12} {word:<12} ", check.name), &check.message, width));
        if let Some(hint) = check.hint {
            text.push_str(&paragraph(&format!("{:<26}", ""), hint, width));
        }
    }
    let _ = writeln!(text, "\n`--backend auto` takes: {}", doctor.backend);
    output.finish(ui, &text)
}

fn checks() -> Vec<Check> {
    vec![processor(), memory(), gpu(), driver_library(), cupti(), nvml(), cuda_backend()]
}

fn processor() -> Check {
    let message = format!("{}, {} threads, {} kernels", machine::cpu_name(), machine::threads(), machine::simd());
    if machine::simd() == "portable" {
        return Check::new("cpu", Status::Warning, message)
            .hint("no AVX2 with FMA: the engine runs on its portable path, several times slower");
    }
    Check::new("cpu", Status::Ok, message)
}

fn memory() -> Check {
    match machine::memory() {
        Some(m) => {
            let show = |bytes: u64| Unit::Bytes.show(bytes as f64);
            Check::new("memory", Status::Ok, format!("{}, {} available", show(m.total), show(m.available)))
        }
        None => Check::new("memory", Status::Warning, "unknown: /proc/meminfo cannot be read"),
    }
}

fn gpu() -> Check {
    let devices = machine::nvidia_devices();
    match (machine::nvidia_driver(), devices.len()) {
        (Some(version), n) if n > 0 => Check::new("gpu", Status::Ok, format!("{n} NVIDIA device(s), driver {version}")),
        (Some(version), _) => Check::new("gpu", Status::Unavailable, format!("driver {version} is loaded, but there is no /dev/nvidia0"))
            .hint("in a container, pass the devices through (for Docker: --gpus all)"),
        (None, _) => Check::new("gpu", Status::Unavailable, "no NVIDIA driver is loaded"),
    }
}

fn library(name: &'static str, file: &str, why: &str) -> Check {
    match machine::shared_library(file) {
        Some(path) => Check::new(name, Status::Ok, path.display().to_string()),
        None => Check::new(name, Status::Unavailable, format!("{file} is not in the usual places or LD_LIBRARY_PATH; {why}")),
    }
}

fn driver_library() -> Check {
    library("libcuda", "libcuda.so", "it comes with the driver")
}

fn cupti() -> Check {
    let found = library("cupti", "libcupti.so", "it comes with the CUDA toolkit (extras/CUPTI)");
    if found.status == Status::Ok && machine::profiling_restricted() == Some(true) {
        return Check::new("cupti", Status::Warning, format!("{}, but the driver lets only administrators profile", found.message))
            .hint("load the module with NVreg_RestrictProfilingToAdminUsers=0, or run as root");
    }
    found
}

fn nvml() -> Check {
    library("nvml", "libnvidia-ml.so", "it comes with the driver")
}

fn cuda_backend() -> Check {
    match why_no_cuda() {
        Some(reason) => Check::new("cuda backend", Status::Unavailable, format!("{reason}; recording runs on the CPU")),
        None => Check::new("cuda backend", Status::Warning, "can be tried with `record --backend cuda`; it has run on no real GPU yet"),
    }
}
