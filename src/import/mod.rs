//! Traces from what other engines and profilers wrote.
//!
//! An [`Importer`] reads one family of files and hands events to a [`Sink`], which numbers them, counts what had to be
//! left out, and writes the trace. What a file does not say stays unknown; what could be read in two ways is refused
//! with the option that settles it.

pub mod acceptance;
mod annotation;
mod arrays;
mod bare;
mod count_matrix;
mod error;
pub mod events;
pub mod flags;
mod follow;
mod gguf;
mod imatrix;
pub mod input;
mod json_values;
mod jsonl;
mod jsonl_cut;
mod jsonl_header;
mod jsonl_line;
mod jsonl_routes;
mod jsonl_rules;
mod jsonl_table;
mod kernel_names;
mod kineto;
mod kineto_number;
mod llamacpp;
mod llamacpp_read;
mod loose_json;
pub mod model;
pub mod npy;
mod nsys;
mod nsys_export;
mod options;
mod pass_queue;
mod pickle;
mod pickle_machine;
mod pickle_opcode;
mod place;
mod plan;
mod profile;
mod profile_import;
mod profile_passes;
mod reader;
mod recorder;
mod recorder_pass;
mod recorder_passes;
mod response;
mod response_cut;
pub mod routed;
mod router_log;
pub mod rows;
mod safetensors_file;
mod sample;
mod sglang;
mod sniff;
mod source;
mod strides;
mod timeline;
mod torch;
mod torch_batch;
mod trtllm;
mod vllm;
pub mod zip;

pub use error::ImportError;
pub use events::{Sink, Source};
pub use flags::Flag;
pub use model::ForeignModel;
pub use options::{DataKind, LayerAxis, Options};
pub use sniff::{Head, sniff};

use crate::trace::{Manifest, TraceError};
use std::path::{Path, PathBuf};

/// A reader of one family of files.
pub trait Importer: Sync {
    /// The word on the command line.
    fn name(&self) -> &'static str;

    /// One line: what it reads.
    fn about(&self) -> &'static str;

    /// Whether a file that begins like this is of the family. Two importers that both say so are an ambiguity.
    fn sniff(&self, head: &Head) -> bool;

    /// The options that it uses; any other is refused. Where only some of its files use one, the importer refuses it of the others.
    fn takes(&self) -> &'static [Flag];

    /// Whether what it reads can be added to a trace that is there ([`Options::into`]).
    fn adds(&self) -> bool {
        false
    }

    /// Reads all inputs, in order, into one trace.
    ///
    /// # Errors
    /// When an input cannot be read, holds nothing, or can be read in more than one way.
    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError>;
}

/// All importers, in the order in which the help lists them.
pub fn importers() -> &'static [&'static dyn Importer] {
    &[
        &vllm::Vllm,
        &sglang::SglangResponse,
        &recorder::Recorder,
        &llamacpp::LlamaCpp,
        &arrays::Arrays,
        &router_log::RouterLog,
        &jsonl::JsonLines,
        &torch_batch::TorchBatch,
        &trtllm::TrtLlm,
        &imatrix::Imatrix,
        &kineto::Kineto,
        &nsys::Nsys,
    ]
}

/// The importers of a name; more than one where a word stands for several kinds of files.
pub fn find(name: &str) -> Vec<&'static dyn Importer> {
    importers().iter().copied().filter(|importer| importer.name() == name).collect()
}

/// Imports `inputs` into a new trace at `out`.
///
/// # Errors
/// As [`Importer::import`], and when the trace cannot be written. No trace is left behind then.
pub fn import(importer: &dyn Importer, inputs: &[PathBuf], out: &Path, options: &Options) -> Result<Manifest, ImportError> {
    if let (Some(trace), false) = (&options.into, importer.adds()) {
        let adding: Vec<_> = importers().iter().filter(|i| i.adds()).map(|i| i.name()).collect();
        let reason = format!("--into adds the kernels of a profile ({}), {} has none", adding.join(", "), importer.name());
        return Err(ImportError::input(trace, reason));
    }
    if let Some(path) = inputs.first() {
        flags::check(path, importer.name(), importer.takes(), options)?;
    }
    let mut sink = Sink::create(out, options)?.taking(importer.takes());
    importer.import(inputs, options, &mut sink).map_err(|error| match (error, inputs.first()) {
        // An event that contradicts the trace comes from the input.
        (ImportError::Trace(TraceError::Event { what }), Some(path)) => ImportError::input(path, format!("cannot import {what}")),
        (other, _) => other,
    })?;
    sink.finish()
}
