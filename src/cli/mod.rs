//! The command line: arguments to plain options, options to calls, results to streams and exit codes.

mod demo;
mod doctor;
pub mod exit;
mod generate;
mod golden;
mod import;
mod inspect;
mod interrupt;
mod model;
mod record;
mod report;
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
    #[command(hide = true)]
    Generate(generate::Args),
}

/// Parses the command line, runs the command and says how the process ends.
pub fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            // clap prints help to stdout and errors to stderr; a closed pipe is not a failure.
            let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
            let _ = error.print();
            return ExitCode::from(code);
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
    let ended = match cli.command {
        Command::Demo(args) => demo::run(&args, &mut ui),
        Command::Doctor(args) => doctor::run(&args, &mut ui),
        Command::Model(args) => model::run(&args, &mut ui),
        Command::Record(args) => record::run(&args, &mut ui),
        Command::Import(args) => import::run(&args, &mut ui),
        Command::Inspect(args) => inspect::run(&args, &mut ui),
        Command::Report(args) => report::run(&args, &mut ui),
        Command::Generate(args) => generate::run(&args, &mut ui),
    };
    match ended.and_then(|()| ui.flush()) {
        Ok(()) => ExitCode::from(exit::OK),
        Err(Failure::BrokenPipe) => ExitCode::from(exit::OK),
        Err(failure) => {
            ui.error(&failure.to_string());
            failure.exit_code()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_well_formed() {
        Cli::command().debug_assert();
    }
}
