//! Traces from what other engines and profilers wrote.
//!
//! An [`Importer`] reads one family of files and hands events to a [`Sink`], which numbers them, counts what had to be
//! left out, and writes the trace. What a file does not say stays unknown; what could be read in two ways is refused
//! with the option that settles it.

mod error;
pub mod events;
pub mod model;
mod options;
mod sniff;
pub mod zip;

pub use error::ImportError;
pub use events::{Sink, Source};
pub use model::ForeignModel;
pub use options::{DataKind, LayerAxis, Options};
pub use sniff::{Head, sniff};

use crate::trace::Manifest;
use std::path::{Path, PathBuf};

/// A reader of one family of files.
pub trait Importer: Sync {
    /// The word on the command line.
    fn name(&self) -> &'static str;

    /// One line: what it reads.
    fn about(&self) -> &'static str;

    /// Whether a file that begins like this is of the family. Two importers that both say so are an ambiguity.
    fn sniff(&self, head: &Head) -> bool;

    /// Reads all inputs, in order, into one trace.
    ///
    /// # Errors
    /// When an input cannot be read, holds nothing, or can be read in more than one way.
    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError>;
}

/// All importers, in the order in which the help lists them.
pub fn importers() -> &'static [&'static dyn Importer] {
    &[]
}

/// The importer of a name.
pub fn find(name: &str) -> Option<&'static dyn Importer> {
    importers().iter().copied().find(|importer| importer.name() == name)
}

/// Imports `inputs` into a new trace at `out`.
///
/// # Errors
/// As [`Importer::import`], and when the trace cannot be written. No trace is left behind then.
pub fn import(importer: &dyn Importer, inputs: &[PathBuf], out: &Path, options: &Options) -> Result<Manifest, ImportError> {
    let mut sink = Sink::create(out, options)?;
    importer.import(inputs, options, &mut sink)?;
    sink.finish()
}
