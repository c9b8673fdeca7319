//! Takes a checkpoint's tensors by name, shape and storage format, and tells everything that does not fit in one error.

use super::decode;
use super::error::EngineError;
use super::inventory::{Amount, Inventory};
use super::matrix::{MXFP4_GROUP, Matrix, MatrixFormat, ScaleFormat};
use super::shards::{Shards, Stored};
use super::tensors::{Slot, TensorSource};
use safetensors::Dtype;

/// Names of a kind that an error lists.
const LISTED: usize = 10;
/// Missing tensors after which a load gives up counting: more than any released model has, few enough to stay small.
const MAX_MISSING: usize = 100_000;

/// What is wrong with the set of tensors.
#[derive(Debug, Default)]
struct Problems {
    missing: Vec<String>,
    missing_count: usize,
    misshapen: Vec<String>,
    misshapen_count: usize,
    not_finite: Option<String>,
}

impl Problems {
    fn missing(&mut self, name: String) {
        self.missing_count += 1;
        if self.missing.len() < LISTED {
            self.missing.push(name);
        }
    }

    fn misshapen(&mut self, text: String) {
        self.misshapen_count += 1;
        if self.misshapen.len() < LISTED {
            self.misshapen.push(text);
        }
    }
}

/// Takes tensors out of the shards as the walk asks for them; what is left at the end is unexpected.
pub(super) struct Binder {
    shards: Shards,
    fp8_block: [usize; 2],
    inventory: Inventory,
    problems: Problems,
}

impl TensorSource for Binder {
    fn matrix(&mut self, slot: Slot<'_>, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
        let base = slot.name.strip_suffix(".weight").unwrap_or(slot.name);
        let bound = match self.shards.tensors.remove(slot.name) {
            Some(stored) => self.bind(base, slot.name, stored, rows, cols),
            None => match self.shards.tensors.remove(&format!("{base}.weight_packed")) {
                Some(stored) => self.bind_int4(base, stored, rows, cols),
                None => {
                    self.problems.missing(slot.name.to_owned());
                    None
                }
            },
        };
        if self.problems.missing_count > MAX_MISSING {
            return Err(self.give_up());
        }
        let Some((matrix, tensors, note_bytes)) = bound else { return Ok(Matrix::empty()) };
        let (parameters, note_bytes) = ((rows * cols) as u64, note_bytes as u64);
        self.inventory.count(slot, Amount { parameters, bytes: matrix.bytes() as u64 + note_bytes, note_bytes, tensors });
        Ok(matrix)
    }

    fn vector(&mut self, slot: Slot<'_>, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let Some(stored) = self.shards.tensors.remove(slot.name) else {
            self.problems.missing(slot.name.to_owned());
            return if self.problems.missing_count > MAX_MISSING { Err(self.give_up()) } else { Ok(Vec::new()) };
        };
        let squeezed = |shape: &[usize]| shape.iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
        let decode: fn(&[u8], &mut [f32]) = match stored.dtype {
            Dtype::F32 => decode::f32_row,
            Dtype::BF16 => decode::bf16_row,
            Dtype::F16 => decode::f16_row,
            _ => return Ok(self.wrong(slot.name, &stored, "BF16 or F32", shape).unwrap_or_default()),
        };
        if squeezed(shape) != squeezed(&stored.shape) {
            return Ok(self.wrong(slot.name, &stored, "BF16 or F32", shape).unwrap_or_default());
        }
        let mut values = vec![0.0; shape.iter().product()];
        decode(stored.bytes.as_slice(), &mut values);
        if self.problems.not_finite.is_none() && values.iter().any(|v| !v.is_finite()) {
            self.problems.not_finite = Some(slot.name.to_owned());
        }
        self.inventory.count(slot, Amount { parameters: values.len() as u64, bytes: stored.bytes.len() as u64, note_bytes: 0, tensors: 1 });
        Ok(values)
    }
}

/// A bound matrix, the number of safetensors entries it took, and their bytes beyond the matrix's own.
type Bound = (Matrix, u64, usize);

impl Binder {
    /// A binder over the tensors of `shards`. `fp8_block`: rows and columns that share one FP8 scale.
    pub fn new(shards: Shards, fp8_block: [usize; 2]) -> Self {
        Self { shards, fp8_block, inventory: Inventory::default(), problems: Problems::default() }
    }

    /// Notes a tensor of a wrong shape or type.
    fn wrong<T>(&mut self, name: &str, stored: &Stored, types: &str, shape: &[usize]) -> Option<T> {
        self.problems.misshapen(format!("{name} is {:?} {:?}, expected {types} {shape:?}", stored.dtype, stored.shape));
        None
    }

    /// A tensor stored under its own name: plain, FP8 with block scales, or MXFP4 packed into bytes.
    fn bind(&mut self, base: &str, name: &str, stored: Stored, rows: usize, cols: usize) -> Option<Bound> {
        let shape = [rows, cols];
        let format = match stored.dtype {
            Dtype::F32 => MatrixFormat::F32,
            Dtype::BF16 => MatrixFormat::Bf16,
            Dtype::F16 => MatrixFormat::F16,
            Dtype::F8_E4M3 => {
                if stored.shape != shape {
                    return self.wrong(name, &stored, "F8_E4M3", &shape);
                }
                let block = self.fp8_block;
                let (scale_name, scale) = self.companion(base, "weight_scale_inv")?;
                let wanted = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
                let scale_format = match scale.dtype {
                    Dtype::F32 => ScaleFormat::F32,
                    Dtype::BF16 => ScaleFormat::Bf16,
                    Dtype::F8_E8M0 | Dtype::U8 => ScaleFormat::E8m0,
                    _ => return self.wrong(&scale_name, &scale, "F32 or F8_E8M0", &wanted),
                };
                if scale.shape != wanted {
                    return self.wrong(&scale_name, &scale, "F32 or F8_E8M0", &wanted);
                }
                let format = MatrixFormat::Fp8 { scales: scale.bytes, scale_format, block };
                return Some((self.whole(name, rows, cols, stored, format)?, 2, 0));
            }
            Dtype::I8 | Dtype::U8 => {
                let packed = [rows, cols / 2];
                if stored.shape != packed || !cols.is_multiple_of(MXFP4_GROUP) {
                    return self.wrong(name, &stored, "two MXFP4 values a byte", &packed);
                }
                let (scale_name, scale) = self.companion(base, "weight_scale_inv")?;
                let wanted = [rows, cols / MXFP4_GROUP];
                if !matches!(scale.dtype, Dtype::F8_E8M0 | Dtype::U8) || scale.shape != wanted {
                    return self.wrong(&scale_name, &scale, "F8_E8M0", &wanted);
                }
                let format = MatrixFormat::Mxfp4 { scales: scale.bytes };
                return Some((self.whole(name, rows, cols, stored, format)?, 2, 0));
            }
            _ => return self.wrong(name, &stored, "BF16, F32, F16, F8_E4M3 or packed I8", &shape),
        };
        if stored.shape != shape {
            return self.wrong(name, &stored, "a matrix", &shape);
        }
        Some((self.whole(name, rows, cols, stored, format)?, 1, 0))
    }

    /// compressed-tensors' `pack-quantized`: `weight_packed`, `weight_scale`, `weight_shape`.
    fn bind_int4(&mut self, base: &str, stored: Stored, rows: usize, cols: usize) -> Option<Bound> {
        let name = format!("{base}.weight_packed");
        // Both companions leave the shards even when one is wrong, so that the other is not called unexpected.
        let (scale, shape) = (self.companion(base, "weight_scale"), self.companion(base, "weight_shape"));
        let ((scale_name, scale), (shape_name, shape)) = (scale?, shape?);
        let packed = [rows, cols / 8];
        if stored.dtype != Dtype::I32 || stored.shape != packed || !cols.is_multiple_of(8) {
            return self.wrong(&name, &stored, "I32", &packed);
        }
        let original: Vec<i64> = shape.bytes.as_slice().as_chunks::<8>().0.iter().map(|n| i64::from_le_bytes(*n)).collect();
        if shape.dtype != Dtype::I64 || shape.shape != [2] || original != [rows as i64, cols as i64] {
            self.problems.misshapen(format!("{shape_name} says {original:?}, expected I64 [{rows}, {cols}]"));
            return None;
        }
        let scale_format = match scale.dtype {
            Dtype::BF16 => Some(ScaleFormat::Bf16),
            Dtype::F32 => Some(ScaleFormat::F32),
            _ => None,
        };
        // The group is what the scales say: columns per scale.
        let group = match *scale.shape {
            [r, groups] if r == rows && groups > 0 && cols.is_multiple_of(groups) && (cols / groups).is_multiple_of(8) => {
                Some(cols / groups)
            }
            _ => None,
        };
        let (Some(scale_format), Some(group)) = (scale_format, group) else {
            return self.wrong(&scale_name, &scale, "BF16", &[rows, cols / 32]);
        };
        let format = MatrixFormat::Int4 { scales: scale.bytes, scale_format, group };
        Some((self.whole(&name, rows, cols, stored, format)?, 3, shape.bytes.len()))
    }

    fn companion(&mut self, base: &str, suffix: &str) -> Option<(String, Stored)> {
        let name = format!("{base}.{suffix}");
        match self.shards.tensors.remove(&name) {
            Some(stored) => Some((name, stored)),
            None => {
                self.problems.missing(name);
                None
            }
        }
    }

    fn whole(&mut self, name: &str, rows: usize, cols: usize, stored: Stored, format: MatrixFormat) -> Option<Matrix> {
        let matrix = Matrix::new(rows, cols, stored.bytes, format);
        if matrix.is_none() {
            self.problems.misshapen(format!("{name} has not the bytes of a [{rows}, {cols}] matrix"));
        }
        matrix
    }

    fn give_up(&self) -> EngineError {
        let reason = format!("lacks more than {MAX_MISSING} tensors that config.json describes; the two do not belong together");
        EngineError::Checkpoint { path: self.shards.path.clone(), reason }
    }

    /// All problems as one error, or the inventory. Tensors that nobody asked for are one, unless they are `ignored`.
    pub fn finish(self, ignored: impl Fn(&str) -> bool) -> Result<Inventory, EngineError> {
        let Self { shards, inventory, problems, .. } = self;
        let mut unexpected: Vec<&String> = shards.tensors.keys().filter(|name| !ignored(name)).collect();
        unexpected.sort_unstable();
        let mut parts = Vec::new();
        let mut list = |what: &str, count: usize, names: &mut dyn Iterator<Item = &String>| {
            if count > 0 {
                let shown: Vec<&str> = names.take(LISTED).map(String::as_str).collect();
                let more = if count > shown.len() { format!(" and {} more", count - shown.len()) } else { String::new() };
                parts.push(format!("{count} {what}: {}{more}", shown.join(", ")));
            }
        };
        list("missing", problems.missing_count, &mut problems.missing.iter());
        list("unexpected", unexpected.len(), &mut unexpected.into_iter());
        list("of a wrong shape or type", problems.misshapen_count, &mut problems.misshapen.iter());
        if !parts.is_empty() {
            return Err(EngineError::Checkpoint {
                path: shards.path,
                reason: format!("tensors do not fit config.json: {}", parts.join("; ")),
            });
        }
        match problems.not_finite {
            Some(what) => Err(EngineError::NotFinite { what }),
            None => Ok(inventory),
        }
    }
}
