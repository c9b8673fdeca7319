//! `specprof generate`: shell completions and man pages, from the same definitions as the help.

use super::Cli;
use super::exit::Failure;
use super::ui::Ui;
use clap::{Command, CommandFactory};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  specprof generate completions bash > ~/.local/share/bash-completion/completions/specprof
  specprof generate man man/";

/// Write shell completions or man pages
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Print the completion script of a shell
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write a man page for every command
    Man {
        /// Directory to write into; made when it is missing
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// Runs the command.
///
/// # Errors
/// When the result cannot be written.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    match &args.what {
        What::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "specprof", &mut script);
            ui.result(&String::from_utf8_lossy(&script))
        }
        What::Man { dir } => {
            let command = Cli::command();
            std::fs::create_dir_all(dir).map_err(|e| Failure::Environment(format!("{}: cannot make it: {e}", dir.display())))?;
            write_page(dir, &command, "specprof")?;
            for sub in command.get_subcommands().filter(|s| !s.is_hide_set()) {
                write_page(dir, sub, &format!("specprof-{}", sub.get_name()))?;
            }
            Ok(())
        }
    }
}

fn write_page(dir: &Path, command: &Command, name: &str) -> Result<(), Failure> {
    let path = dir.join(format!("{name}.1"));
    let failure = |e: std::io::Error| Failure::Environment(format!("{}: cannot write: {e}", path.display()));
    let mut page = Vec::new();
    // The page's name is `specprof-report`, its synopsis `specprof report`.
    let titled = command.clone().display_name(name.to_owned()).bin_name(name.replacen('-', " ", 1));
    clap_mangen::Man::new(titled).render(&mut page).map_err(failure)?;
    std::fs::write(&path, page).map_err(failure)
}
