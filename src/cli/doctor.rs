//! `specprof doctor`: what this machine can do, and why not.

mod checks;
mod probe;

use super::exit::Failure;
use super::text_or_json::TextOrJson;
use super::ui::{Output, Ui};
use crate::report::wrap::paragraph;
use probe::Probe;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  specprof doctor          what this machine can do
  specprof doctor --json   the same for a script";

/// Say what this machine can do and why not: processor, memory, GPU, profiling
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    shape: TextOrJson,
    /// Write to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
    /// Longest wait for the driver's libraries, seconds. One that takes longer is said to hang
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// Make one probe's checks in this process and print them; `doctor` asks itself for this
    #[arg(long, value_enum, value_name = "PROBE", hide = true)]
    probe: Option<Probe>,
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Serialize, Deserialize)]
struct Check {
    name: String,
    status: Status,
    message: String,
    /// What to do about it.
    hint: Option<String>,
}

impl Check {
    fn new(name: &str, status: Status, message: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status, message: message.into(), hint: None }
    }

    fn hint(mut self, hint: &str) -> Self {
        self.hint = Some(hint.to_owned());
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
    if let Some(probe) = args.probe {
        let answer = probe.answer().map_err(|e| Failure::Environment(e.to_string()))?;
        return ui.result(&format!("{answer}\n"));
    }
    let output = Output::open(args.output.as_deref())?;
    let checks = checks(Duration::from_secs(args.timeout));
    let doctor = Doctor { schema: "specprof.doctor/1", version: env!("CARGO_PKG_VERSION"), backend: "cpu", checks };
    if args.shape.json() {
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
        if let Some(hint) = &check.hint {
            text.push_str(&paragraph(&format!("{:<26}", ""), hint, width));
        }
    }
    let _ = writeln!(text, "\n`--backend auto` takes: {}", doctor.backend);
    output.finish(ui, &text)
}

/// Every check, in the order in which they depend on each other. The probes run side by side.
fn checks(limit: Duration) -> Vec<Check> {
    let asked = [Probe::Cupti, Probe::Nvml, Probe::Cuda].map(|probe| std::thread::spawn(move || probe.ask(limit)));
    let mut all = checks::safe();
    all.extend(asked.into_iter().flat_map(|thread| thread.join().unwrap_or_default()));
    all
}
