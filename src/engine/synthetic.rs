//! Models of a released shape with made-up weights: a full-size run without a download.
//!
//! Every stored code is a function of the tensor's name and the code's place in it (splitmix64 of a hash of the name and the number of
//! the 64-bit word that holds the code: [`super::made`]), scaled so that a row of unit variance gives one of unit variance. Norms are 1. The
//! CPU engine holds the codes in memory; a device makes them itself, and no host ever has them. What such a model says means nothing; what it
//! costs is what a real one of the shape costs, its router's choices apart: see [`super::routing_plan`] for those.

use super::builtin;
use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::decode;
use super::error::EngineError;
use super::files::CheckpointFiles;
use super::inventory::Inventory;
use super::made::{Recipe, Rule};
use super::matrix::{MXFP4_GROUP, Matrix, MatrixFormat, ScaleFormat, TensorBytes};
use super::presets::{Counter, FLASH_CONFIG, Layout, Preset, TINY_CONFIG, stored_as_fp8};
use super::routing_plan::mix;
use super::tensors::{self, Component, Slot, TensorSource};
use sha2::{Digest, Sha256};
use std::path::Path;

/// What a synthetic model's name begins with.
pub const PREFIX: &str = "synthetic:";

/// Names of the shapes.
pub const SHAPES: &[&str] = &["ling-3.0-flash", "ling-3.0-tiny", "ling-nano"];

/// Rows and columns that share an FP8 scale, and columns that share an INT4 scale, as in the released checkpoints.
const FP8_BLOCK: [usize; 2] = [128, 128];
const INT4_GROUP: usize = 32;

/// Raised when the function of the weights changes.
const VERSION: &str = "specprof synthetic 1";

/// A shape and a storage without weights.
#[derive(Debug, Clone, Copy)]
pub struct Synthetic {
    /// Shape and storage.
    pub preset: Preset,
    /// The shape's name.
    shape: &'static str,
    files: &'static [(&'static str, &'static [u8])],
}

impl Synthetic {
    /// The model of a name that begins with [`PREFIX`]; `None` of other names.
    ///
    /// # Errors
    /// [`EngineError::Request`] when there is no such shape.
    pub fn find(name: &Path, layout: Layout) -> Option<Result<Self, EngineError>> {
        let wanted = name.to_str()?.strip_prefix(PREFIX)?;
        let Some(shape) = SHAPES.iter().copied().find(|shape| *shape == wanted) else {
            let text = format!("{}: no such shape; name one of {}", name.display(), names());
            return Some(Err(EngineError::Request(text)));
        };
        let (config, files) = match shape {
            "ling-3.0-flash" => (FLASH_CONFIG, &[][..]),
            "ling-3.0-tiny" => (TINY_CONFIG, &[][..]),
            _ => (builtin::nano_config(), builtin::nano_texts()),
        };
        Some(Ok(Self { preset: Preset { name: shape, config, layout }, shape, files }))
    }

    /// Its name in traces: shape and storage.
    pub fn name(&self) -> String {
        format!("synthetic-{}-{}", self.shape, self.preset.expert_format())
    }

    /// Parameters and bytes, without making any weights.
    ///
    /// # Errors
    /// None for the shapes of this file; a test makes them all.
    pub fn inventory(&self) -> Result<Inventory, EngineError> {
        self.preset.inventory()
    }

    /// The shape.
    ///
    /// # Errors
    /// As [`Synthetic::inventory`].
    pub fn config(&self) -> Result<ModelConfig, EngineError> {
        self.preset.model()
    }

    /// Makes the weights in memory, of which `available` bytes may be used.
    ///
    /// # Errors
    /// [`EngineError::Device`] with the numbers when they do not fit.
    pub fn open(&self, available: Option<u64>) -> Result<Checkpoint, EngineError> {
        let needed = self.inventory()?.total().bytes;
        if available.is_some_and(|available| needed > available) {
            let text = format!(
                "{}: {needed} bytes of weights do not fit into the {} bytes of memory that are available; take a smaller --quant or shape",
                self.name(),
                available.unwrap_or_default()
            );
            return Err(EngineError::Device(text));
        }
        self.checkpoint(true)
    }

    /// The model for a device, which makes the matrices by their recipes: the host has only vectors, such as norms and biases. Whoever
    /// looks at a matrix here makes it here.
    ///
    /// # Errors
    /// As [`Synthetic::inventory`].
    pub fn for_device(&self) -> Result<Checkpoint, EngineError> {
        self.checkpoint(false)
    }

    fn checkpoint(&self, hold: bool) -> Result<Checkpoint, EngineError> {
        let config = self.config()?;
        let mut source = Generator { counter: Counter::new(self.preset.layout), layout: self.preset.layout, hold };
        let weights = tensors::walk(&config, &mut source)?;
        let identity = Sha256::new()
            .chain_update(VERSION)
            .chain_update(self.preset.config)
            .chain_update(self.preset.expert_format())
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(Checkpoint {
            config,
            weights,
            inventory: source.counter.inventory,
            identity,
            name: self.name(),
            files: CheckpointFiles::Embedded { name: self.shape, files: self.files },
            synthetic: true,
        })
    }
}

/// Names to ask by.
fn names() -> String {
    SHAPES.iter().map(|shape| format!("{PREFIX}{shape}")).collect::<Vec<_>>().join(", ")
}

/// Counts every tensor and makes it.
struct Generator {
    counter: Counter,
    layout: Layout,
    /// Whether the bytes of matrices are made at once.
    hold: bool,
}

impl TensorSource for Generator {
    fn matrix(&mut self, slot: Slot<'_>, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
        self.counter.matrix(slot, rows, cols)?;
        let routed = slot.component == Component::RoutedExperts;
        let made = match self.layout {
            Layout::Fp4 if routed => mxfp4(slot, rows, cols),
            Layout::Int4 if routed => int4(slot, rows, cols),
            Layout::Fp8 | Layout::Fp4 if stored_as_fp8(&slot) => fp8(slot, rows, cols),
            _ => bf16(slot, rows, cols),
        };
        let made =
            made.ok_or_else(|| EngineError::Request(format!("{}: [{rows}, {cols}] cannot be stored as {:?}", slot.name, self.layout)))?;
        if self.hold {
            made.hold();
        }
        Ok(made)
    }

    fn vector(&mut self, slot: Slot<'_>, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        self.counter.vector(slot, shape)?;
        let mut values = vec![1.0; shape.iter().product()];
        let key = key(slot.name);
        // A number of -1...1 by place.
        let unit = |at: usize| (mix(key.wrapping_add(at as u64)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        if slot.name.contains("conv1d") {
            let scale = (3.0 / shape[shape.len() - 1] as f32).sqrt();
            values.iter_mut().enumerate().for_each(|(at, v)| *v = unit(at) * scale);
        } else if slot.name.ends_with(".dt_bias") {
            values.iter_mut().enumerate().for_each(|(at, v)| *v = unit(at) - 3.0);
        } else if slot.name.ends_with(".A_log") {
            values.iter_mut().enumerate().for_each(|(at, v)| *v = unit(at));
        } else if slot.name.ends_with(".expert_bias") {
            values.fill(0.0);
        }
        Ok(values)
    }
}

/// How much larger than its input a matrix makes its output. The head's logits are spread, so that the choice of a token is none
/// between ties.
fn gain(slot: &Slot<'_>) -> f32 {
    if slot.component == Component::Head { 3.0 } else { 1.0 }
}

/// FNV-1a of a name, mixed.
fn key(name: &str) -> u64 {
    mix(name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
}

/// A tensor's codes by a rule.
fn codes(name: &str, bytes: usize, rule: Rule) -> TensorBytes {
    TensorBytes::made(Recipe { key: key(name), rule, bytes })
}

/// `count` times the same scale of 1, 2 or 4 bytes.
fn scales<const N: usize>(scale: [u8; N], count: usize) -> TensorBytes {
    let word = u64::from_le_bytes(std::array::from_fn(|i| scale[i % N]));
    TensorBytes::made(Recipe { key: 0, rule: Rule::Constant(word), bytes: count * N })
}

/// Two bytes, the upper half of an F32.
fn bf16_bits(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// Uniform in 2^15 steps between -a and a, a = gain sqrt(3 / cols).
fn bf16(slot: Slot<'_>, rows: usize, cols: usize) -> Option<Matrix> {
    // The embedding is looked up, not summed over.
    let inputs = if slot.component == Component::Embedding { 1.0 } else { cols as f32 };
    let scale = gain(&slot) * (3.0 / inputs).sqrt() / 32768.0;
    let codes = codes(slot.name, rows.checked_mul(cols)?.checked_mul(2)?, Rule::Bf16(scale.to_bits()));
    Matrix::new(rows, cols, codes, MatrixFormat::Bf16)
}

/// The scale that makes codes of mean square `square` a matrix of the slot's gain.
fn scale(slot: &Slot<'_>, cols: usize, square: f32) -> f32 {
    gain(slot) / (square * cols as f32).sqrt()
}

fn mean_square(values: impl Iterator<Item = f32> + Clone) -> f32 {
    values.clone().map(|v| v * v).sum::<f32>() / values.count() as f32
}

/// All codes below the second highest exponent alike: neither NaN nor single weights that outweigh a row.
fn fp8(slot: Slot<'_>, rows: usize, cols: usize) -> Option<Matrix> {
    const MASK: u64 = 0xbfbf_bfbf_bfbf_bfbf;
    let square = mean_square((0..=255u8).filter(|code| code & 0x40 == 0).map(|code| decode::E4M3[usize::from(code)]));
    let blocks = rows.div_ceil(FP8_BLOCK[0]) * cols.div_ceil(FP8_BLOCK[1]);
    let scales = scales(scale(&slot, cols, square).to_le_bytes(), blocks);
    let format = MatrixFormat::Fp8 { scales, scale_format: ScaleFormat::F32, block: FP8_BLOCK };
    Matrix::new(rows, cols, codes(slot.name, rows.checked_mul(cols)?, Rule::Masked(MASK)), format)
}

/// All codes alike; the scale is the nearest power of two.
fn mxfp4(slot: Slot<'_>, rows: usize, cols: usize) -> Option<Matrix> {
    let square = mean_square(decode::E2M1_PAIRS[..16].iter().map(|pair| pair[0]));
    let exponent = scale(&slot, cols, square).log2().round() as i32 + 127;
    let scales = scales([u8::try_from(exponent).ok()?], rows * (cols / MXFP4_GROUP));
    Matrix::new(rows, cols, codes(slot.name, rows.checked_mul(cols)? / 2, Rule::Masked(u64::MAX)), MatrixFormat::Mxfp4 { scales })
}

/// Codes 0 ... 15 alike stand for -8 ... 7; a code 0 becomes an 8, which is a weight of 0, so that the mean is 0.
fn int4(slot: Slot<'_>, rows: usize, cols: usize) -> Option<Matrix> {
    // Squares of -7 ... 7, and twice that of 0.
    let square = (1..=7).map(|v| 2 * v * v).sum::<i32>() as f32 / 16.0;
    let scales = scales(bf16_bits(scale(&slot, cols, square)).to_le_bytes(), rows * (cols / INT4_GROUP));
    let format = MatrixFormat::Int4 { scales, scale_format: ScaleFormat::Bf16, group: INT4_GROUP };
    Matrix::new(rows, cols, codes(slot.name, rows.checked_mul(cols)? / 2, Rule::Centred), format)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::session::{LogitRows, Session};
    use crate::engine::tap::NoTap;

    const LAYOUTS: [Layout; 4] = [Layout::Bf16, Layout::Fp8, Layout::Fp4, Layout::Int4];

    fn nano(layout: Layout) -> Synthetic {
        Synthetic::find(Path::new("synthetic:ling-nano"), layout).unwrap().unwrap()
    }

    #[test]
    fn names_and_memory() {
        assert!(Synthetic::find(Path::new("demo"), Layout::Bf16).is_none());
        let wrong = Synthetic::find(Path::new("synthetic:ling"), Layout::Bf16).unwrap().unwrap_err().to_string();
        assert!(wrong.contains("synthetic:ling-3.0-flash, synthetic:ling-3.0-tiny, synthetic:ling-nano"), "{wrong}");
        let flash = Synthetic::find(Path::new("synthetic:ling-3.0-flash"), Layout::Fp8).unwrap().unwrap();
        assert_eq!((flash.name(), flash.inventory().unwrap().total().bytes), ("synthetic-ling-3.0-flash-fp8".to_owned(), 128_427_158_944));
        let refused = flash.open(Some(1 << 30)).unwrap_err();
        assert!(refused.is_environment() && refused.to_string().contains("128427158944 bytes of weights do not fit into the 1073741824"));
    }

    /// Every matrix, whatever its storage, gives an input of unit variance an output of its gain, and has no mean.
    #[test]
    fn matrices_have_their_gain() {
        let slot = |name, component| Slot { name, component, draft: false };
        type Make = fn(Slot<'_>, usize, usize) -> Option<Matrix>;
        // Scales of MXFP4 are powers of two.
        let makers: [(Make, f64); 4] = [(bf16, 0.03), (fp8, 0.03), (int4, 0.03), (mxfp4, 0.42)];
        for (make, tolerance) in makers {
            let matrix = make(slot("a.weight", Component::Dense), 96, 512).unwrap();
            let mut row = vec![0.0; 512];
            let (mut squares, mut sum) = (0.0, 0.0);
            for r in 0..96 {
                matrix.decode_row(r, &mut row);
                assert!(row.iter().all(|v| v.is_finite()));
                squares += row.iter().map(|v| f64::from(v * v)).sum::<f64>();
                sum += row.iter().map(|v| f64::from(*v)).sum::<f64>();
            }
            let gain = (squares / 96.0).sqrt();
            assert!((gain - 1.0).abs() < tolerance, "{:?}: {gain}", matrix.format().name());
            // The mean of 49 152 weights of deviation 1/sqrt(512).
            assert!((sum / 49_152.0).abs() < 4.0 / (512.0_f64 * 49_152.0).sqrt() * 1.5, "{}: {sum}", matrix.format().name());
            let codes = |name| make(slot(name, Component::Dense), 96, 512).unwrap().codes().as_slice().to_vec();
            assert_eq!(codes("a.weight"), matrix.codes().as_slice());
            assert_ne!(codes("b.weight"), matrix.codes().as_slice());
        }
    }

    /// What a device is given is what the CPU engine holds, and nothing of it is made on the host.
    #[test]
    fn a_model_for_a_device_is_the_same_and_in_no_memory() {
        for layout in LAYOUTS {
            let (held, made) = (nano(layout).open(None).unwrap(), nano(layout).for_device().unwrap());
            assert_eq!((&held.identity, &held.inventory), (&made.identity, &made.inventory));
            assert!(held.weights.head.is_held() && !made.weights.head.is_held() && !made.weights.embedding.is_held());
            for (a, b) in [(&held.weights.head, &made.weights.head), (&held.weights.embedding, &made.weights.embedding)] {
                assert!(a.codes().recipe().is_some() && a.codes().recipe() == b.codes().recipe());
                assert_eq!(a.codes().as_slice(), b.codes().as_slice());
            }
        }
    }

    #[test]
    fn every_storage_runs_with_finite_and_spread_logits() {
        for layout in LAYOUTS {
            let model = nano(layout).open(None).unwrap();
            assert_eq!(model.inventory, nano(layout).inventory().unwrap());
            let mut session = Session::new(&model.config, &model.weights);
            let tokens: Vec<u32> = (0..40).map(|i| i * 37 % model.config.vocab as u32).collect();
            let pass = session.forward(&tokens, LogitRows::All, &mut NoTap).unwrap();
            let (n, vocab) = (pass.logits.len() as f32, pass.vocab);
            let deviation = (pass.logits.iter().map(|l| l * l).sum::<f32>() / n).sqrt();
            assert!((1.0..10.0).contains(&deviation), "{layout:?}: {deviation}");
            let best: std::collections::BTreeSet<u32> = pass.logits.chunks(vocab).map(crate::engine::sampling::argmax).collect();
            assert!(best.len() > 10, "{layout:?}: {best:?}");
        }
    }
}
