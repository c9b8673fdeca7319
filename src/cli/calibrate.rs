//! `specprof calibrate`: what a pass costs on this machine, by its rows and its union.

use super::exit::{Failure, read_failure};
use super::interrupt;
use super::loading::LoadingBar;
use super::record::{Backend, check_kernel_src};
use super::run_args::{Quant, open_model};
use super::text_or_json::TextOrJson;
use super::ui::{Output, Ui};
use super::{lists, probe};
use crate::analysis;
use crate::engine::EngineError;
use crate::metric::costs::CostTable;
use crate::record::bench::Bench;
use crate::record::calibrate::{self, Grid};
use crate::record::{BackendKind, RecordError, model_shape};
use crate::report::TextOptions;
use crate::report::costs::{self, Slopes};
use crate::trace::input_file;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most rows of a window.
const MAX_ROWS: u16 = 16;
/// Largest file that is read as a cost table.
const MAX_TABLE_BYTES: u64 = 64 << 20;

const EXAMPLES: &str = "\
Examples:
  specprof calibrate --model demo
  specprof calibrate --model ./Ling-3.0-tiny --rows 1,2,4,8 --context 2048 --json -o costs.json
  specprof calibrate --model synthetic:ling-3.0-flash --quant fp8 --backend cuda \\
      --json -o costs.json
  specprof advise traces/run1 --costs costs.json
  specprof export costs.json --format sps -o sps.json

Run it on an idle machine. A cell's union holds in every routed layer; its experts are drawn at
random for every pass and not chosen by the router, so that every union of the grid occurs.";

/// Measure step and component time by rows and union on this machine
///
/// Runs passes of some rows whose rows together wake some number of distinct experts in every layer, and says how long they take, whole
/// and by component, as medians with 95 % intervals. `advise --costs` judges draft lengths by such a table, also of traces that have no
/// times of their own; `export --format sps` writes it as step rates. On the CPU engine times are wall times; on a GPU they are those of its
/// kernels, by CUPTI where it can be used, else by an event after each kernel, without graphs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Checkpoint directory, `demo` for the built-in model, or `synthetic:SHAPE` for made-up weights of the shape ling-3.0-flash,
    /// ling-3.0-tiny or ling-nano
    #[arg(long, value_name = "DIR|demo|synthetic:SHAPE")]
    model: PathBuf,
    /// How a synthetic model's weights are stored [default: bf16]
    #[arg(long, value_enum, value_name = "FORMAT")]
    quant: Option<Quant>,
    /// What runs the model
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t = Backend::Auto)]
    backend: Backend,
    /// Rows of passes, numbers and ranges such as 1,2,4 or 1-8; a decode pass (1 row) is always measured
    #[arg(long, value_name = "LIST", num_args = 1.., default_value = "1,2,4,8", value_parser = |text: &str| List::parse(text, MAX_ROWS))]
    rows: Vec<List>,
    /// Distinct experts a layer, where a pass of so many rows can have them [default: five from the least to the most]
    #[arg(long, value_name = "LIST", num_args = 1.., value_parser = |text: &str| List::parse(text, u16::MAX))]
    unions: Vec<List>,
    /// Tokens in the caches before each pass
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Passes of each cell
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// Each kernel of a device beside the time that its bytes take at the rate at which the device reads (with --backend cuda)
    #[arg(long)]
    by_kernel: bool,
    /// Build the GPU's kernels from this folder of sources by NVRTC; for their developers (with --backend cuda)
    #[arg(long, value_name = "DIR")]
    kernel_src: Option<PathBuf>,
    /// Seed of tokens, experts and order
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    shape: TextOrJson,
    /// Write to a file instead of stdout (`-`)
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
}

/// A list of numbers; several words are one.
#[derive(Debug, Clone)]
struct List(Vec<u16>);

impl List {
    fn parse(text: &str, most: u16) -> Result<Self, String> {
        lists::numbers(text, most).map(Self)
    }

    fn all(lists: &[Self]) -> Vec<u16> {
        lists.iter().flat_map(|list| list.0.iter().copied()).collect()
    }
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    if args.backend == Backend::Cuda {
        probe::require_cuda()?;
    }
    if args.by_kernel && args.backend != Backend::Cuda {
        return Err(Failure::Input("--by-kernel goes with --backend cuda; the CPU engine has no kernels".into()));
    }
    check_kernel_src(args.kernel_src.as_deref(), args.backend == Backend::Cuda)?;
    let output = Output::open(args.output.as_deref())?;
    let checkpoint = open_model(&args.model, args.quant, args.backend.kind())?;
    let most = checkpoint.config.max_position.saturating_sub(usize::from(MAX_ROWS));
    if args.context as usize > most {
        return Err(Failure::Input(format!("--context {}: the model has room for {most} tokens before a window", args.context)));
    }
    let grid = Grid {
        rows: List::all(&args.rows),
        unions: List::all(&args.unions),
        context_len: args.context,
        repeats: args.repeats,
        seed: args.seed,
        by_kernel: args.by_kernel,
    };
    let shape = model_shape(&checkpoint);
    let (k, impossible) = (shape.experts_per_token, grid.impossible(shape.experts, shape.experts_per_token));
    if let [first, ..] = impossible[..] {
        let text =
            format!("--unions {first}: no pass of these --rows has so many distinct experts; a row has {k}, n rows up to n times as many");
        return Err(Failure::Input(text));
    }
    let (stop, bar) = (interrupt::stop_flag(), ui.progress(1, "passes"));
    let loading = LoadingBar::new(ui);
    let bench = Bench::open(&checkpoint, args.backend.kind(), calibrate::tokens(&grid), args.kernel_src.as_deref(), &mut |opening| {
        loading.told(opening)
    });
    let measured = bench.and_then(|bench| {
        loading.end();
        calibrate::calibrate(&checkpoint, &bench, &grid, &stop, &mut |done, of| {
            bar.set_length(of);
            bar.set_position(done);
        })
    });
    bar.finish_and_clear();
    let failure = |error| match error {
        RecordError::Engine(EngineError::Device(reason)) if args.backend.kind() == BackendKind::Cuda => {
            Failure::Environment(format!("--backend cuda: {reason}"))
        }
        other => other.into(),
    };
    let Some(mut table) = measured.map_err(failure)? else { return Err(Failure::Interrupted("interrupted; nothing was written".into())) };
    let options = analysis::Options::default();
    table.warnings.extend(analysis::cost_warnings(&table, &options));
    let rendered = if args.shape.json() {
        costs::table_json(&table).map_err(|e| Failure::Environment(format!("cannot write the table as JSON: {e}")))?
    } else {
        let ci95 = analysis::cost_slope_intervals(&table, &options);
        let slopes = analysis::cost_slopes(&table).map(|(per_expert, per_row, r2)| Slopes { per_expert, per_row, r2, ci95 });
        let terminal = matches!(output, Output::Stdout);
        let width = if terminal { ui.width() } else { 100 };
        let options = TextOptions { width, color: terminal && ui.color(), unicode: ui.unicode(), per_layer: false, explain: false };
        costs::text(&table, slopes.as_ref().map_err(|why| *why), &options)
    };
    output.finish(ui, &rendered)
}

/// Reads a cost table whose times are to be used.
///
/// # Errors
/// [`Failure::Input`] when there is no such file or the table has no times, [`Failure::Corrupt`] when it is no table.
pub(super) fn cost_table(path: &Path) -> Result<CostTable, Failure> {
    let named = |text: String| format!("{}: {text}", path.display());
    let unreadable = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::InvalidData => Failure::Corrupt(named("is no text, which a cost table is".into())),
        _ => read_failure(path, &e),
    };
    let mut text = String::new();
    input_file::open(path).and_then(|file| file.take(MAX_TABLE_BYTES + 1).read_to_string(&mut text)).map_err(unreadable)?;
    if text.len() as u64 > MAX_TABLE_BYTES {
        return Err(Failure::Corrupt(named(format!("is larger than {MAX_TABLE_BYTES} bytes, which no cost table is"))));
    }
    let table = CostTable::parse(&text).map_err(|why| Failure::Corrupt(named(why)))?;
    if table.emulated {
        let why = "was made on the tests' emulator of a GPU: it counts kernels and has no times; calibrate on a device";
        return Err(Failure::Input(named(why.to_owned())));
    }
    Ok(table)
}
