//! `specprof doctor`.

use super::exit::Failure;
use super::ui::Ui;

/// (under construction)
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: &Args, _ui: &mut Ui) -> Result<(), Failure> {
    Err(Failure::Environment("not built yet".into()))
}
