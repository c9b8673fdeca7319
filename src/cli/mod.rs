//! The command line: arguments to plain options, options to calls, results to streams and exit codes.

mod advise;
mod calibrate;
mod demo;
mod diff;
mod doctor;
pub mod exit;
mod export;
mod generate;
mod golden;
mod import;
mod inspect;
mod interrupt;
mod lists;
mod loading;
mod model;
mod probe;
mod record;
mod report;
mod run_args;
mod sweep;
mod text_or_json;
mod traces;
mod ui;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use exit::Failure;
use std::process::ExitCode;
use ui::{ColorChoice, Ui};

const EXIT_CODES: &str = "\
Exit codes:
  0    done; for --check and gates: nothing failed
  1    a gate or check failed
  2    usage or bad input
  3    the environment cannot do it: no GPU, memory, permission or disk space
  4    a trace or report is corrupt or of an unreadable version
  130  interrupted; the trace was closed and marked incomplete";

/// Measure what speculative decoding costs in a sparse mixture-of-experts model
#[derive(Debug, Parser)]
#[command(name = "specprof", version, max_term_width = 100, after_help = EXIT_CODES, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Debug, clap::Args)]
struct Global {
    /// When to use colour
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = ColorChoice::Auto, help_heading = "Output")]
    color: ColorChoice,
    /// Print errors and the result only
    #[arg(short, long, global = true, help_heading = "Output")]
    quiet: bool,
    /// Print more about what is done (repeat for more)
    #[arg(short, long, global = true, action = clap::ArgAction::Count, conflicts_with = "quiet", help_heading = "Output")]
    verbose: u8,
    /// No progress bars
    #[arg(long, global = true, help_heading = "Output", env = "SPECPROF_NO_PROGRESS", value_parser = clap::builder::FalseyValueParser::new())]
    no_progress: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Doctor(doctor::Args),
    Model(model::Args),
    Record(record::Args),
    Import(import::Args),
    Inspect(inspect::Args),
    Report(report::Args),
    Advise(advise::Args),
    Sweep(sweep::Args),
    Calibrate(calibrate::Args),
    Export(export::Args),
    Diff(diff::Args),
    Generate(generate::Args),
}

/// Parses the command line, runs the command and says how the process ends.
pub fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            // Help and version go to stdout as they are; a closed pipe is not a failure.
            if !error.use_stderr() || error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
                let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
                let _ = error.print();
                return ExitCode::from(code);
            }
            Ui::new(ColorChoice::Auto, false, 0, true).error(&usage_line(&error));
            return ExitCode::from(exit::USAGE);
        }
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(exit::USAGE);
        }
    };
    let mut ui = Ui::new(cli.global.color, cli.global.quiet, cli.global.verbose, cli.global.no_progress);
    let ended = interrupt::handle().and_then(|()| threads(&cli.command)).and_then(|()| match cli.command {
        Command::Demo(args) => demo::run(&args, &mut ui),
        Command::Doctor(args) => doctor::run(&args, &mut ui),
        Command::Model(args) => model::run(&args, &mut ui),
        Command::Record(args) => record::run(&args, &mut ui),
        Command::Import(args) => import::run(&args, &mut ui),
        Command::Inspect(args) => inspect::run(&args, &mut ui),
        Command::Report(args) => report::run(&args, &mut ui),
        Command::Advise(args) => advise::run(&args, &mut ui),
        Command::Sweep(args) => sweep::run(&args, &mut ui),
        Command::Calibrate(args) => calibrate::run(&args, &mut ui),
        Command::Export(args) => export::run(&args, &mut ui),
        Command::Diff(args) => diff::run(&args, &mut ui),
        Command::Generate(args) => generate::run(&args, &mut ui),
    });
    match ended.and_then(|()| ui.flush()) {
        Ok(()) => ExitCode::from(exit::OK),
        Err(Failure::BrokenPipe) => ExitCode::from(exit::OK),
        Err(failure) => {
            ui.error(&failure.to_string());
            failure.exit_code()
        }
    }
}

/// Most worker threads, whatever the environment asks for.
const MAX_THREADS: usize = 256;

/// Starts the worker threads of the commands that compute, where a failure can still be told from a bug.
fn threads(command: &Command) -> Result<(), Failure> {
    if matches!(command, Command::Doctor(_) | Command::Inspect(_) | Command::Generate(_)) {
        return Ok(());
    }
    let wanted = std::env::var("RAYON_NUM_THREADS").ok().and_then(|n| n.parse().ok()).filter(|&n: &usize| n > 0);
    let count = wanted.unwrap_or_else(crate::record::machine::threads).min(MAX_THREADS);
    rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .build_global()
        .map_err(|e| Failure::Environment(format!("cannot start {count} worker threads: {e}; set RAYON_NUM_THREADS to fewer")))
}

/// A usage error on one line: what is wrong, a tip if there is one, and where to read on.
fn usage_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts: Vec<String> = Vec::new();
    for line in text.lines().map(str::trim) {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        match parts.last_mut() {
            // A list continues the line that announces it.
            Some(last) if !line.is_empty() && last.ends_with(':') => {
                last.push(' ');
                last.push_str(line);
            }
            _ if line.is_empty() => {}
            _ => parts.push(line.to_owned()),
        }
    }
    let command = std::env::args().nth(1).filter(|name| Cli::command().find_subcommand(name).is_some());
    let help = command.map_or_else(|| "specprof --help".to_owned(), |name| format!("specprof {name} --help"));
    format!("{}; see `{help}`", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_is_one_line() {
        for args in [
            vec!["specprof", "record", "--model", "demo"],
            vec!["specprof", "report", "--formatt", "json", "x"],
            vec!["specprof", "report", "x", "--format", "jsonn"],
            vec!["specprof", "nosuch"],
            vec!["specprof", "inspect"],
        ] {
            let line = usage_line(&Cli::try_parse_from(&args).unwrap_err());
            assert!(!line.contains('\n') && line.contains("--help`") && line.len() < 300, "{line}");
        }
        let line = usage_line(&Cli::try_parse_from(["specprof", "inspect"]).unwrap_err());
        assert!(line.contains("<TRACE>"), "{line}");
    }

    #[test]
    fn the_arguments_are_well_formed() {
        Cli::command().debug_assert();
    }
}
