//! `specprof model`: what a checkpoint or a preset consists of, whether it fits, and what its verify steps would read.

mod drafter;
mod render;
mod summary;

use super::calibrate::cost_table;
use super::exit::Failure;
use super::loading::LoadingBar;
use super::record::check_kernel_src;
use super::run_args::{Quant, synthetic};
use super::text_or_json::TextOrJson;
use super::ui::Ui;
use super::{lists, probe};
use crate::engine::cuda::{CudaSides, Device};
use crate::engine::presets::{PRESETS, Preset};
use crate::engine::{Checkpoint, DsparkCheckpoint, builtin, dspark, golden};
use std::path::{Path, PathBuf};
use summary::{Asked, Summary};

/// Show a model's parameters and bytes by component, whether it fits, and a forecast of its verify ratio
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The forecast is a model of bytes, not a measurement; `specprof model MODEL --json` lists what it takes for granted.",
    after_long_help = "\
Examples:
  specprof model ling-3.0-flash
  specprof model ling-3.0-flash-fp4 --context 32768 --rows 2-9
  specprof model ./Ling-3.0-tiny --json
  specprof model ling-3.0-flash-fp8 --costs costs.json
  specprof model ./Ling-3.0-flash-dspark --target ./Ling-3.0-flash
  specprof model CHECKPOINT --golden golden.safetensors
  specprof model DRAFTER --target CHECKPOINT --golden golden.safetensors

The forecast is a model of bytes, not a measurement; `specprof model MODEL --json` lists what it takes for granted."
)]
pub struct Args {
    /// A checkpoint's folder, `demo` (the built-in model), or a preset without weights: ling-3.0-flash, ling-3.0-flash-fp8,
    /// ling-3.0-flash-fp4, ling-3.0-flash-int4, ling-3.0-tiny; or synthetic:SHAPE, as `record --model` makes it
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// How a synthetic model's weights are stored [default: bf16]
    #[arg(long, value_enum, value_name = "FORMAT")]
    quant: Option<Quant>,
    /// Context length in tokens for the bytes of the attention cache
    #[arg(long, value_name = "TOKENS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100_000_000))]
    context: u32,
    /// Times of passes on a device, as `calibrate -o` wrote them: the forecast has them beside the bytes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["target", "golden"])]
    costs: Option<PathBuf>,
    /// Rows of a verify step to forecast: numbers and ranges, such as 2-6,9
    #[arg(long, value_name = "LIST", default_value = "2-6,8,9", value_parser = parse_rows)]
    rows: Rows,
    /// Rows of a prompt's pass whose arithmetic --json counts
    #[arg(long, value_name = "ROWS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt_rows: u32,
    #[command(flatten)]
    shape: TextOrJson,
    /// The target, when MODEL is a DSpark drafter's checkpoint
    #[arg(long, value_name = "DIR|demo")]
    target: Option<PathBuf>,
    #[command(flatten)]
    golden: GoldenArgs,
}

/// Comparison with a reference's tensors: its own mode of the command, apart from everything else in this file.
#[derive(Debug, clap::Args)]
struct GoldenArgs {
    /// Run the engine on a reference's tokens and compare every tensor
    #[arg(long, value_name = "FILE", help_heading = "Golden set")]
    golden: Option<PathBuf>,
    /// Where to run it
    #[arg(long, value_enum, requires = "golden", default_value_t = GoldenBackend::Cpu, help_heading = "Golden set")]
    backend: GoldenBackend,
    /// Build the GPU's kernels from this folder of sources by NVRTC; for their developers (with --backend cuda)
    #[arg(long, value_name = "DIR", requires = "golden", help_heading = "Golden set")]
    kernel_src: Option<PathBuf>,
}

/// `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum GoldenBackend {
    /// The CPU engine
    Cpu,
    /// The CUDA engine
    Cuda,
}

/// Runs the command.
pub fn run(args: &Args, ui: &mut Ui) -> Result<(), Failure> {
    if let Some(file) = &args.golden.golden {
        return compare(args, file, ui);
    }
    if let Some(target) = &args.target {
        let drafter = drafter::Summary::of(&DsparkCheckpoint::open(&args.model, &open(target)?.config)?);
        return match args.shape.json() {
            true => ui.result(&json(&drafter)?),
            false => ui.result(&drafter.text(ui.width(), ui.color())),
        };
    }
    let made_up = synthetic(&args.model, args.quant)?;
    let asked = Asked { context: args.context as usize, rows: &args.rows.0, prompt_rows: args.prompt_rows as usize };
    let summary = match (made_up, args.model.to_str().and_then(Preset::find)) {
        (Some(model), _) => Summary::of_synthetic(&model, asked)?,
        (None, Some(preset)) => Summary::of_preset(&preset, asked)?,
        (None, None) => Summary::of_checkpoint(&open(&args.model)?, asked),
    };
    let summary = match &args.costs {
        Some(path) => summary.with_costs(&cost_table(path)?).map_err(|why| Failure::Input(format!("{}: {why}", path.display())))?,
        None => summary,
    };
    if args.shape.json() { ui.result(&json(&summary)?) } else { ui.result(&render::text(&summary, ui.width(), ui.color())) }
}

fn json(value: &impl serde::Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::Environment(format!("cannot write JSON: {e}")))?;
    Ok(text + "\n")
}

/// `--golden`: refusals first, so that nothing large is opened for nothing.
fn compare(args: &Args, file: &Path, ui: &mut Ui) -> Result<(), Failure> {
    let cuda = args.golden.backend == GoldenBackend::Cuda;
    check_kernel_src(args.golden.kernel_src.as_deref(), cuda)?;
    if cuda && args.target.is_some() {
        let text = "--backend cuda: a drafter is compared on the CPU engine alone so far; use --backend cpu";
        return Err(Failure::Input(text.into()));
    }
    if cuda {
        probe::require_cuda()?;
    }
    let report = match &args.target {
        None => {
            let model = open(&args.model)?;
            let (config, weights) = (&model.config, &model.weights);
            match cuda {
                true => {
                    let loading = LoadingBar::new(ui);
                    let report = golden::compare_on(config, file, |tokens| {
                        let device = Device::open_with(false, args.golden.kernel_src.as_deref())?;
                        CudaSides::inspected(&device, config, weights, tokens, &mut |opening| loading.told(opening))
                    })?;
                    loading.end();
                    report
                }
                false => golden::compare(config, weights, file)?,
            }
        }
        Some(target) => {
            let target = open(target)?;
            dspark::golden::compare(&DsparkCheckpoint::open(&args.model, &target.config)?, &target, file)?
        }
    };
    super::golden::show(&report, file, args.shape.json(), ui)
}

/// Opens a checkpoint; a name that is neither folder nor preset is told what names there are.
fn open(name: &Path) -> Result<Checkpoint, Failure> {
    let known = name.as_os_str() == builtin::ALIAS || name.exists();
    if !known {
        let presets: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        let names = format!("a checkpoint's folder, `{}`, or one of {}", builtin::ALIAS, presets.join(", "));
        return Err(Failure::Input(format!("{}: no such folder or preset; name {names}", name.display())));
    }
    Ok(Checkpoint::resolve(name)?)
}

/// `--rows`: distinct numbers in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rows(Vec<usize>);

/// More rows than any drafter proposes; keeps the table readable.
const MAX_ROWS: u16 = 512;

fn parse_rows(text: &str) -> Result<Rows, String> {
    let mut rows: Vec<usize> = lists::numbers(text, MAX_ROWS)?.into_iter().map(usize::from).collect();
    rows.sort_unstable();
    rows.dedup();
    Ok(Rows(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_lists() {
        assert_eq!(parse_rows("2-4,9,3").unwrap().0, [2, 3, 4, 9]);
        for wrong in ["", "0", "4-2", "x", "2-", "513", "-3", "1,,2"] {
            assert!(parse_rows(wrong).is_err(), "{wrong:?}");
        }
    }
}
