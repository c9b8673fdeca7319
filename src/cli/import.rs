//! `specprof import`.

use super::exit::{Failure, one_line};
use super::ui::Ui;
use crate::import::{self, DataKind, ForeignModel, Head, ImportError, Importer, LayerAxis, Options};
use crate::metric::counted_plain;
use crate::trace::Manifest;
use crate::trace::manifest::{IdSpace, WindowCompleteness, requests_unknown};
use std::path::{Path, PathBuf};

/// Examples, and the options of each format.
fn long_help() -> String {
    format!(
        "Examples:
  specprof import vllm response.json -o traces/vllm --model-config config.json
  specprof import npy routed_experts.npz -o traces/npy --experts 64 \\
      --layers moe-only --first-dense 1
  specprof import moe_routes.jsonl -o traces/log --experts 60
  specprof import expert_distribution_recorder_1.pt -o traces/sglang
  specprof import nsys profile.sqlite --into traces/sglang

Formats, and the options that they take (any other is refused); docs/import.md says what each of them needs:
{}",
        import::flags::table()
    )
}

/// Make a trace from what another engine or profiler wrote
///
/// The format is recognised from the file, or named before it. What a file does not say stays unknown and is said to be;
/// what could be read in two ways is refused, naming the option that settles it.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "specprof import [OPTIONS] [FORMAT] INPUT... -o TRACE\n       specprof import [OPTIONS] nsys|kineto PROFILE... --into TRACE",
    after_long_help = long_help()
)]
pub struct Args {
    /// The format, unless the files tell, and the files
    #[arg(value_name = "INPUT", required = true, num_args = 1..)]
    inputs: Vec<PathBuf>,
    /// Directory of the trace
    #[arg(short, long = "output", visible_alias = "out", value_name = "TRACE", required_unless_present = "into")]
    output: Option<PathBuf>,
    /// Add a profile's kernels to the steps of this trace (nsys, kineto)
    #[arg(long, value_name = "TRACE", conflicts_with = "output")]
    into: Option<PathBuf>,
    /// Replace a trace that is already there
    #[arg(long)]
    force: bool,

    /// The model's config.json, or its checkpoint's directory
    #[arg(long, visible_alias = "config", value_name = "FILE", help_heading = "Model")]
    model_config: Option<PathBuf>,
    /// What the layer axis counts: all, moe-only, a number of layers, or their numbers (3-60)
    #[arg(long, value_name = "AXIS", value_parser = parse_layers, help_heading = "Model")]
    layers: Option<LayerAxis>,
    /// Dense layers at the beginning, for --layers moe-only
    #[arg(long, value_name = "N", help_heading = "Model")]
    first_dense: Option<u16>,
    /// Routed experts per layer
    #[arg(long, value_name = "E", value_parser = clap::value_parser!(u16).range(1..), help_heading = "Model")]
    experts: Option<u16>,
    /// Experts per token
    #[arg(long, visible_alias = "top-k", value_name = "K", value_parser = clap::value_parser!(u16).range(1..), help_heading = "Model")]
    k: Option<u16>,
    /// Whether expert ids are the checkpoint's numbers or slots after placement
    #[arg(long, value_enum, value_name = "SPACE", help_heading = "Model")]
    id_space: Option<Space>,

    /// Axes of an array: w windows, t tokens, l layers, k experts, e experts counted [default: tlk]
    #[arg(long, value_name = "AXES", help_heading = "Data")]
    axes: Option<String>,
    /// Name of the array within a .npz
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    member: Option<String>,
    /// What an array holds [default: routes]
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Data")]
    kind: Option<Kind>,
    /// The last axis holds k ids, then k weights as the bits of 32-bit floats
    #[arg(long, help_heading = "Data")]
    packed_weights: bool,
    /// Keep rows that look like padding, dummies or warm-up
    #[arg(long, visible_alias = "keep-warmup", help_heading = "Data")]
    keep_padding: bool,
    /// Drafts of a verify step, where the format does not say
    #[arg(long, value_name = "N", help_heading = "Data")]
    draft_len: Option<u16>,
    /// Tokens of the prompt, where the format does not say
    #[arg(long, value_name = "N", help_heading = "Data")]
    prompt_tokens: Option<u32>,
    /// The device whose kernels are taken from a profile [default: the lowest]
    #[arg(long, value_name = "N", help_heading = "Data")]
    device: Option<u32>,
}

/// `--id-space`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Space {
    /// The checkpoint's expert numbers
    Logical,
    /// Slots after replication or placement
    Physical,
}

/// `--kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// Expert ids
    Routes,
    /// How often each expert was chosen
    Counts,
}

fn parse_layers(text: &str) -> Result<LayerAxis, String> {
    text.parse()
}

impl Args {
    fn options(&self) -> Result<Options, Failure> {
        Ok(Options {
            force: self.force,
            model: self.model_config.as_deref().map(ForeignModel::read).transpose()?,
            layers: self.layers.clone().unwrap_or_default(),
            first_dense: self.first_dense,
            experts: self.experts,
            k: self.k,
            axes: self.axes.clone(),
            kind: self.kind.map(|kind| match kind {
                Kind::Routes => DataKind::Routes,
                Kind::Counts => DataKind::Counts,
            }),
            member: self.member.clone(),
            packed_weights: self.packed_weights,
            keep_padding: self.keep_padding,
            id_space: self.id_space.map(|space| match space {
                Space::Logical => IdSpace::Logical,
                Space::Physical => IdSpace::Physical,
            }),
            draft_len: self.draft_len,
            prompt_tokens: self.prompt_tokens,
            into: self.into.clone(),
            device: self.device,
        })
    }

    /// The importer and its inputs: a format's name comes first, unless a file of that name is all there is.
    fn importer(&self) -> Result<(&'static dyn Importer, &[PathBuf]), Failure> {
        let named = self.inputs.first().and_then(|first| first.to_str()).map(import::find).unwrap_or_default();
        if let (false, [_, inputs @ ..]) = (named.is_empty(), self.inputs.as_slice())
            && let Some(first) = inputs.first()
        {
            // A word that stands for several kinds of files leaves the choice to the file.
            let importer = match named.as_slice() {
                [one] => *one,
                several => {
                    let head = Head::read(first)?;
                    *several.iter().find(|i| i.sniff(&head)).or(several.first()).ok_or_else(|| Failure::Input("no inputs".into()))?
                }
            };
            return Ok((importer, inputs));
        }
        let inputs = self.inputs.as_slice();
        let missing = |path: &&PathBuf| path.symlink_metadata().is_err();
        if let Some(path) = inputs.iter().find(missing) {
            let mut names: Vec<_> = import::importers().iter().map(|i| i.name()).collect();
            names.dedup();
            let reason = if !named.is_empty() { "name the files after the format" } else { "no such file, and no format of that name" };
            return Err(Failure::Input(format!("{}: {reason}; formats are {}", path.display(), names.join(", "))));
        }
        let mut chosen: Option<&'static dyn Importer> = None;
        for path in inputs {
            let importer = import::sniff(path)?;
            if let Some(other) = chosen.filter(|other| other.name() != importer.name()) {
                let reason =
                    format!("is {}, the inputs before it are {}; import them into traces of their own", importer.name(), other.name());
                return Err(Failure::Input(format!("{}: {reason}", path.display())));
            }
            chosen = Some(importer);
        }
        chosen.map(|importer| (importer, inputs)).ok_or_else(|| Failure::Input("no inputs".into()))
    }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    let options = args.options()?;
    let (importer, inputs) = args.importer()?;
    ui.detail(&format!("reading as {}: {}", importer.name(), importer.about()));
    let output = args.into.as_ref().or(args.output.as_ref()).ok_or_else(|| Failure::Input("no -o and no --into: where to?".into()))?;
    let manifest = import::import(importer, inputs, output, &options)?;
    for warning in &manifest.warnings {
        ui.warn(&one_line(&warning.message));
    }
    ui.result(&format!("{}\n", output.display()))?;
    ui.note(&summary(&manifest, importer.name(), output));
    Ok(())
}

/// One line: format, steps, rows, what is known of the windows, where.
fn summary(manifest: &Manifest, format: &str, out: &Path) -> String {
    let rows = |table: &str| manifest.tables.get(table).into_iter().flatten().map(|part| part.rows).sum::<u64>();
    let windows = match manifest.window_completeness {
        WindowCompleteness::Full => "whole windows",
        WindowCompleteness::AcceptedOnly => "accepted rows only: unions are lower bounds",
        WindowCompleteness::Counts => "counts by expert only",
        WindowCompleteness::None => "no windows",
    };
    let kernels = match rows("kernels") {
        0 => String::new(),
        n => format!(" and {}", counted_plain(n, "kernel")),
    };
    let counted = |table: &str, noun: &str| counted_plain(rows(table), noun);
    // Rows of whole batches are not of one request each.
    let unknown = requests_unknown(&manifest.warnings);
    let requests = if unknown { "rows of unknown requests".to_owned() } else { counted("requests", "request") };
    format!(
        "imported {requests} in {} with {}{kernels} from {format} ({windows}): {}",
        counted("steps", "step"),
        counted("routes", "routed row"),
        out.display()
    )
}

impl From<ImportError> for Failure {
    fn from(error: ImportError) -> Self {
        let text = one_line(&error.to_string());
        match error {
            ImportError::Trace(error) => error.into(),
            ImportError::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => Self::Environment(text),
            _ => Self::Input(text),
        }
    }
}
