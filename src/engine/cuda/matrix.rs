//! Weight matrices on the device, in their stored format: `SpMatrix` of `kernels/sp_matrix.cuh`.

use super::device::Buffer;
use super::upload::Upload;
use crate::engine::EngineError;
use crate::engine::matrix::{MXFP4_GROUP, Matrix, MatrixFormat, ScaleFormat, TensorBytes};

/// `SpMatrix`: a matrix as a kernel takes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawMatrix {
    pub codes: u64,
    pub scales: u64,
    pub rows: i32,
    pub cols: i32,
    pub row_shift: i32,
    pub col_shift: i32,
}

/// `SpStrides`: bytes from one expert's tensor to the next one's.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Strides {
    pub codes: u64,
    pub scales: u64,
}

/// Formats that kernels have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    F32,
    Bf16,
    Fp8,
    Int4,
    Mxfp4,
}

/// A matrix, or as many of one shape as there are experts, one after the other.
#[derive(Debug)]
pub(super) struct DeviceMatrix {
    /// Matrix 0.
    pub raw: RawMatrix,
    pub strides: Strides,
    pub form: Form,
    _codes: Buffer,
    _scales: Option<Buffer>,
}

/// How a matrix is laid out on the device.
struct Layout {
    form: Form,
    /// Block of a scale as powers of two.
    shifts: (u32, u32),
    scale_bytes: usize,
}

fn refused(name: &str, reason: &str) -> EngineError {
    EngineError::Device(format!("CUDA: {name}: {reason}; use --backend cpu"))
}

fn layout(name: &str, m: &Matrix) -> Result<Layout, EngineError> {
    let power = |n: usize, what: &str| match n {
        n if n.is_power_of_two() => Ok(n.trailing_zeros()),
        n => Err(refused(name, &format!("{what} of {n} is no power of two, which the kernels need"))),
    };
    let wide = |n: usize| match power(n, "a scale's run of columns")? {
        shift if shift >= 4 => Ok(shift),
        _ => Err(refused(name, "the kernels need scales of 16 columns or more")),
    };
    if !m.cols().is_multiple_of(4) {
        return Err(refused(name, &format!("{} columns are not a multiple of 4, which the kernels need", m.cols())));
    }
    let plain = |form| Ok(Layout { form, shifts: (0, 0), scale_bytes: 0 });
    match m.format() {
        MatrixFormat::F32 => plain(Form::F32),
        MatrixFormat::Bf16 => plain(Form::Bf16),
        MatrixFormat::F16 => Err(refused(name, "there are no kernels for F16")),
        // Widened to F32, which is exact: a scale serves thousands of codes.
        MatrixFormat::Fp8 { block: [r, c], .. } => {
            let count = m.rows().div_ceil(*r) * m.cols().div_ceil(*c);
            Ok(Layout { form: Form::Fp8, shifts: (power(*r, "a scale's run of rows")?, wide(*c)?), scale_bytes: count * 4 })
        }
        MatrixFormat::Mxfp4 { scales } => Ok(Layout { form: Form::Mxfp4, shifts: (0, wide(MXFP4_GROUP)?), scale_bytes: scales.len() }),
        MatrixFormat::Int4 { scales, scale_format: ScaleFormat::Bf16, group } => {
            Ok(Layout { form: Form::Int4, shifts: (0, wide(*group)?), scale_bytes: scales.len() })
        }
        MatrixFormat::Int4 { .. } => Err(refused(name, "the kernels take INT4 with BF16 scales only")),
    }
}

/// Bytes that a matrix takes on the device.
pub(super) fn planned_bytes(name: &str, m: &Matrix) -> Result<usize, EngineError> {
    Ok(m.codes().len() + layout(name, m)?.scale_bytes)
}

impl DeviceMatrix {
    /// Copies matrices of one shape and format to the device, or has it make those that are made by a recipe.
    pub fn upload<'w>(
        up: &Upload<'_>,
        name: &str,
        matrices: impl ExactSizeIterator<Item = &'w Matrix> + Clone,
    ) -> Result<Self, EngineError> {
        let Some(first) = matrices.clone().next() else { return Err(refused(name, "there is no matrix")) };
        let Layout { form, shifts, scale_bytes } = layout(name, first)?;
        let codes = up.device().room(matrices.len() * first.codes().len())?;
        let scales = if scale_bytes > 0 { Some(up.device().room(matrices.len() * scale_bytes)?) } else { None };
        for (i, m) in matrices.enumerate() {
            let own = layout(name, m)?;
            if (m.rows(), m.cols(), own.form, own.shifts) != (first.rows(), first.cols(), form, shifts) {
                return Err(refused(name, &format!("expert {i} is stored in another format than expert 0")));
            }
            put(up, &codes, i * first.codes().len(), m.codes())?;
            if let Some(scales) = &scales {
                write_scales(up, scales, i * scale_bytes, m)?;
            }
        }
        let int = |n: usize| i32::try_from(n).map_err(|_| refused(name, &format!("{n} rows or columns are too many")));
        let raw = RawMatrix {
            codes: codes.at(0),
            scales: scales.as_ref().map_or(0, |s| s.at(0)),
            rows: int(first.rows())?,
            cols: int(first.cols())?,
            row_shift: int(shifts.0 as usize)?,
            col_shift: int(shifts.1 as usize)?,
        };
        let strides = Strides { codes: first.codes().len() as u64, scales: scale_bytes as u64 };
        Ok(Self { raw, strides, form, _codes: codes, _scales: scales })
    }

    /// One matrix.
    pub fn one(up: &Upload<'_>, name: &str, m: &Matrix) -> Result<Self, EngineError> {
        Self::upload(up, name, std::iter::once(m))
    }

    /// Stored bytes of one matrix, codes and scales.
    pub fn stored(&self) -> usize {
        (self.strides.codes + self.strides.scales) as usize
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.raw.rows as usize
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.raw.cols as usize
    }
}

/// Copies bytes to the device, or has it make them.
fn put(up: &Upload<'_>, to: &Buffer, offset: usize, bytes: &TensorBytes) -> Result<(), EngineError> {
    match bytes.recipe() {
        Some(recipe) => up.fill(to, offset, &recipe),
        None => up.write(to, offset, bytes.as_slice()),
    }
}

fn write_scales(up: &Upload<'_>, to: &Buffer, offset: usize, m: &Matrix) -> Result<(), EngineError> {
    match m.format() {
        MatrixFormat::Fp8 { scales, scale_format: ScaleFormat::F32, .. }
        | MatrixFormat::Mxfp4 { scales }
        | MatrixFormat::Int4 { scales, .. } => put(up, to, offset, scales),
        MatrixFormat::Fp8 { scales, scale_format, .. } => {
            let count = scales.len() / scale_format.size();
            let wide: Vec<f32> = (0..count).map(|i| scale_format.at(scales.as_slice(), i)).collect();
            up.write(to, offset, &wide)
        }
        _ => Ok(()),
    }
}
