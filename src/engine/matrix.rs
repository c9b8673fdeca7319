//! A weight matrix in the format in which the checkpoint stores it.
//!
//! Nothing is converted at load: a row is decoded to `f32` when it is multiplied, so that memory
//! and bandwidth follow the bytes that are touched.

use super::decode::{self, NibblePairs};
use super::made::{Made, Recipe};
use std::ops::Range;
use std::sync::Arc;

/// Bytes that outlive the load: a mapped file or a constant of the program.
pub trait Storage: AsRef<[u8]> + Send + Sync + std::fmt::Debug {}
impl<T: AsRef<[u8]> + Send + Sync + std::fmt::Debug> Storage for T {}

/// The bytes of one tensor: within a storage, or made when they are looked at.
#[derive(Debug, Clone)]
pub struct TensorBytes(Place);

#[derive(Debug, Clone)]
enum Place {
    Stored(Arc<dyn Storage>, Range<usize>),
    Made(Arc<Made>),
}

impl TensorBytes {
    /// The bytes `range` of `storage`; `None` when they are not inside it.
    pub fn new(storage: Arc<dyn Storage>, range: Range<usize>) -> Option<Self> {
        (*storage).as_ref().get(range.clone())?;
        Some(Self(Place::Stored(storage, range)))
    }

    /// Bytes by a recipe, which are in nobody's memory yet.
    pub fn made(recipe: Recipe) -> Self {
        Self(Place::Made(Arc::new(Made::new(recipe))))
    }

    /// No bytes.
    pub fn empty() -> Self {
        static EMPTY: [u8; 0] = [];
        Self(Place::Stored(Arc::new(&EMPTY[..]), 0..0))
    }

    /// The bytes. No alignment is promised. Those of a recipe stay in memory from here on.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Place::Stored(storage, range) => &(**storage).as_ref()[range.clone()],
            Place::Made(made) => made.bytes(),
        }
    }

    /// Puts bytes by a recipe into the host's memory.
    pub fn hold(&self) {
        let _ = self.as_slice();
    }

    /// What the bytes are made by, if they are.
    pub fn recipe(&self) -> Option<Recipe> {
        match &self.0 {
            Place::Stored(..) => None,
            Place::Made(made) => Some(made.recipe()),
        }
    }

    /// Whether the host's memory, or a file of it, has them.
    pub fn is_held(&self) -> bool {
        match &self.0 {
            Place::Stored(..) => true,
            Place::Made(made) => made.is_held(),
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Place::Stored(_, range) => range.len(),
            Place::Made(made) => made.recipe().bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How the scales of an FP8 matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// One byte, a power of two.
    E8m0,
}

impl ScaleFormat {
    /// Bytes of a scale.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::E8m0 => 1,
        }
    }

    /// Scale number `index` of a packed run of them.
    pub(super) fn at(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Self::F32 => f32::from_le_bytes(bytes.as_chunks::<4>().0[index]),
            Self::Bf16 => decode::bf16(bytes.as_chunks::<2>().0[index]),
            Self::E8m0 => decode::e8m0(bytes[index]),
        }
    }
}

/// How a matrix's elements are stored.
#[derive(Debug, Clone)]
pub enum MatrixFormat {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element, the upper half of an F32.
    Bf16,
    /// 2 bytes an element, IEEE half precision.
    F16,
    /// E4M3 codes; a scale for every block of rows x columns, partial blocks at the edges.
    Fp8 {
        /// `[ceil(rows / block.0), ceil(cols / block.1)]`.
        scales: TensorBytes,
        /// Their format.
        scale_format: ScaleFormat,
        /// Rows and columns of a block.
        block: [usize; 2],
    },
    /// E2M1 codes, two a byte, low nibble first; E8M0 scales for every 32 columns.
    Mxfp4 {
        /// `[rows, cols / 32]`, one byte each.
        scales: TensorBytes,
    },
    /// Offset-8 integers, eight a little-endian word, lowest bits first; BF16 or F32 scales by group.
    Int4 {
        /// `[rows, cols / group]`.
        scales: TensorBytes,
        /// Their format.
        scale_format: ScaleFormat,
        /// Columns that share a scale.
        group: usize,
    },
}

/// Columns that share an MXFP4 scale.
pub const MXFP4_GROUP: usize = 32;

impl MatrixFormat {
    /// The word for it in traces and reports: `f32`, `bf16`, `f16`, `fp8`, `mxfp4`, `int4`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8 { .. } => "fp8",
            Self::Mxfp4 { .. } => "mxfp4",
            Self::Int4 { .. } => "int4",
        }
    }

    /// Bytes of the codes and bytes of the scales that a `[rows, cols]` matrix needs; `None` when the format cannot hold
    /// such a shape or a product overflows.
    fn sizes(&self, rows: usize, cols: usize) -> Option<(usize, usize)> {
        let elements = rows.checked_mul(cols)?;
        match *self {
            Self::F32 => Some((elements.checked_mul(4)?, 0)),
            Self::Bf16 | Self::F16 => Some((elements.checked_mul(2)?, 0)),
            Self::Fp8 { scale_format, block: [r, c], .. } if r > 0 && c > 0 => {
                let scales = rows.div_ceil(r).checked_mul(cols.div_ceil(c))?.checked_mul(scale_format.size())?;
                Some((elements, scales))
            }
            Self::Mxfp4 { .. } if cols.is_multiple_of(MXFP4_GROUP) => Some((elements / 2, elements / MXFP4_GROUP)),
            Self::Int4 { group, scale_format, .. } if group > 0 && group.is_multiple_of(8) && cols.is_multiple_of(group) => {
                Some((elements / 2, (elements / group).checked_mul(scale_format.size())?))
            }
            _ => None,
        }
    }

    fn scales(&self) -> Option<&TensorBytes> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Fp8 { scales, .. } | Self::Mxfp4 { scales } | Self::Int4 { scales, .. } => Some(scales),
        }
    }
}

/// A `[rows, cols]` weight matrix, row-major, multiplied as `y = W x`.
#[derive(Debug, Clone)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: TensorBytes,
    format: MatrixFormat,
}

impl Matrix {
    /// A matrix over stored bytes; `None` when codes or scales are not exactly as long as the shape needs.
    pub fn new(rows: usize, cols: usize, data: TensorBytes, format: MatrixFormat) -> Option<Self> {
        let (codes, scales) = format.sizes(rows, cols)?;
        let right = data.len() == codes && format.scales().map_or(0, TensorBytes::len) == scales;
        right.then_some(Self { rows, cols, data, format })
    }

    /// A matrix of these numbers, for tests and built weights; `None` when there are not `rows * cols` of them.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Option<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let length = bytes.len();
        Self::new(rows, cols, TensorBytes::new(Arc::new(bytes), 0..length)?, MatrixFormat::F32)
    }

    /// The matrix without rows and columns.
    pub fn empty() -> Self {
        Self { rows: 0, cols: 0, data: TensorBytes::empty(), format: MatrixFormat::F32 }
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How it is stored.
    pub fn format(&self) -> &MatrixFormat {
        &self.format
    }

    /// Stored bytes, scales included.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.format.scales().map_or(0, TensorBytes::len)
    }

    /// The stored codes of all rows, without scales.
    pub(super) fn codes(&self) -> &TensorBytes {
        &self.data
    }

    /// Puts codes and scales that are made by a recipe into the host's memory.
    pub fn hold(&self) {
        self.data.hold();
        self.format.scales().into_iter().for_each(TensorBytes::hold);
    }

    /// Whether codes and scales are in the host's memory or a file of it.
    pub fn is_held(&self) -> bool {
        self.data.is_held() && self.format.scales().is_none_or(TensorBytes::is_held)
    }

    /// The stored bytes of rows `rows` when they are plain BF16, for kernels that decode in registers.
    pub(super) fn bf16_rows(&self, rows: Range<usize>) -> Option<&[u8]> {
        match self.format {
            MatrixFormat::Bf16 => self.data.as_slice().get(rows.start * self.cols * 2..rows.end * self.cols * 2),
            _ => None,
        }
    }

    /// Decodes row `row` into `out`, which has `cols` elements.
    ///
    /// # Panics
    /// When `row` is not below [`Matrix::rows`].
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        let cols = self.cols;
        let out = &mut out[..cols];
        let data = self.data.as_slice();
        match &self.format {
            MatrixFormat::F32 => decode::f32_row(&data[row * cols * 4..][..cols * 4], out),
            MatrixFormat::Bf16 => decode::bf16_row(&data[row * cols * 2..][..cols * 2], out),
            MatrixFormat::F16 => decode::f16_row(&data[row * cols * 2..][..cols * 2], out),
            MatrixFormat::Fp8 { scales, scale_format, block: [block_rows, block_cols] } => {
                let per_row = cols.div_ceil(*block_cols);
                let size = scale_format.size();
                let scales = &scales.as_slice()[row / block_rows * per_row * size..][..per_row * size];
                let codes = &data[row * cols..][..cols];
                for (i, (codes, out)) in codes.chunks(*block_cols).zip(out.chunks_mut(*block_cols)).enumerate() {
                    decode::e4m3_run(codes, scale_format.at(scales, i), out);
                }
            }
            MatrixFormat::Mxfp4 { scales } => {
                let scales = &scales.as_slice()[row * (cols / MXFP4_GROUP)..][..cols / MXFP4_GROUP];
                nibbles(&data[row * cols / 2..][..cols / 2], &decode::E2M1_PAIRS, MXFP4_GROUP, |i| decode::e8m0(scales[i]), out);
            }
            MatrixFormat::Int4 { scales, scale_format, group } => {
                let per_row = cols / group * scale_format.size();
                let scales = &scales.as_slice()[row * per_row..][..per_row];
                nibbles(&data[row * cols / 2..][..cols / 2], &decode::INT4_PAIRS, *group, |i| scale_format.at(scales, i), out);
            }
        }
    }
}

/// A row of packed nibbles with a scale for every `group` of them.
fn nibbles(codes: &[u8], table: &NibblePairs, group: usize, scale: impl Fn(usize) -> f32, out: &mut [f32]) {
    if group == 32 {
        // The released group size, with lengths that the compiler knows.
        for (i, (codes, out)) in codes.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<32>().0).enumerate() {
            decode::nibble_run(codes, table, scale(i), out);
        }
        return;
    }
    for (i, (codes, out)) in codes.chunks_exact(group / 2).zip(out.chunks_exact_mut(group)).enumerate() {
        decode::nibble_run(codes, table, scale(i), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(bytes: Vec<u8>) -> TensorBytes {
        let length = bytes.len();
        TensorBytes::new(Arc::new(bytes), 0..length).unwrap()
    }

    fn decoded(matrix: &Matrix) -> Vec<f32> {
        let mut out = vec![0.0; matrix.rows() * matrix.cols()];
        for (row, out) in out.chunks_mut(matrix.cols()).enumerate() {
            matrix.decode_row(row, out);
        }
        out
    }

    #[test]
    fn plain_formats_hold_their_numbers() {
        let values = [1.0, -2.5, 0.0, 448.0, 3.0, -0.125];
        assert_eq!(decoded(&Matrix::from_f32(2, 3, &values).unwrap()), values);
        let bf16 = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        assert_eq!(decoded(&Matrix::new(2, 3, bytes(bf16), MatrixFormat::Bf16).unwrap()), values);
        let f16 = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        assert_eq!(decoded(&Matrix::new(2, 3, bytes(f16), MatrixFormat::F16).unwrap()), values);
    }

    #[test]
    fn fp8_blocks_are_partial_at_the_edges() {
        // 3 x 5 in blocks of 2 x 2: scales [2, 3]. All codes 0x38 = 1.0, so the result is the scale.
        let scales = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let want = [1., 1., 2., 2., 3., 1., 1., 2., 2., 3., 4., 4., 5., 5., 6.];
        let f32s = bytes(scales.iter().flat_map(|s| s.to_le_bytes()).collect());
        let format = MatrixFormat::Fp8 { scales: f32s, scale_format: ScaleFormat::F32, block: [2, 2] };
        let matrix = Matrix::new(3, 5, bytes(vec![0x38; 15]), format).unwrap();
        assert_eq!(decoded(&matrix), want);
        assert_eq!((matrix.bytes(), matrix.format().name()), (15 + 24, "fp8"));

        let e8m0 = bytes(vec![127, 128, 129, 126, 127, 130]);
        let format = MatrixFormat::Fp8 { scales: e8m0, scale_format: ScaleFormat::E8m0, block: [2, 2] };
        let matrix = Matrix::new(3, 5, bytes(vec![0xb8; 15]), format).unwrap();
        assert_eq!(decoded(&matrix), [-1., -1., -2., -2., -4., -1., -1., -2., -2., -4., -0.5, -0.5, -1., -1., -8.]);
    }

    #[test]
    fn mxfp4_rows_use_their_own_scales() {
        let mut codes = vec![0x00; 2 * 32];
        codes[0] = 0x42; // row 0: elements 0, 1 = 1.0, 2.0
        codes[16] = 0x0f; // row 0: element 32 = -6.0 in group 1
        codes[32 + 31] = 0x70; // row 1: element 63 = 6.0
        let matrix = Matrix::new(2, 64, bytes(codes), MatrixFormat::Mxfp4 { scales: bytes(vec![127, 126, 125, 129]) }).unwrap();
        let out = decoded(&matrix);
        assert_eq!((out[0], out[1], out[32], out[127]), (1.0, 2.0, -3.0, 24.0));
        assert_eq!(out.iter().filter(|v| **v != 0.0).count(), 4);
        assert_eq!(matrix.bytes(), 64 + 4);
    }

    #[test]
    fn int4_is_offset_by_eight_for_any_group() {
        for group in [16usize, 32] {
            let cols = 64;
            let codes: Vec<u8> = (0..cols / 2).map(|j| ((2 * j % 16) | (((2 * j + 1) % 16) << 4)) as u8).collect();
            let scales: Vec<u8> = (0..cols / group).flat_map(|g| half::bf16::from_f32(g as f32 + 1.0).to_le_bytes()).collect();
            let format = MatrixFormat::Int4 { scales: bytes(scales), scale_format: ScaleFormat::Bf16, group };
            let matrix = Matrix::new(1, cols, bytes(codes), format).unwrap();
            let want: Vec<f32> = (0..cols).map(|i| ((i % 16) as f32 - 8.0) * (1 + i / group) as f32).collect();
            assert_eq!(decoded(&matrix), want);
        }
    }

    #[test]
    fn lengths_that_do_not_fit_the_shape_are_refused() {
        assert!(Matrix::new(2, 3, bytes(vec![0; 11]), MatrixFormat::Bf16).is_none());
        assert!(Matrix::new(usize::MAX, 2, bytes(vec![0; 12]), MatrixFormat::F32).is_none());
        let mxfp4 = |scales| MatrixFormat::Mxfp4 { scales: bytes(vec![127; scales]) };
        assert!(Matrix::new(1, 48, bytes(vec![0; 24]), mxfp4(1)).is_none(), "48 columns are not whole groups");
        assert!(Matrix::new(1, 64, bytes(vec![0; 32]), mxfp4(1)).is_none());
        assert!(Matrix::new(1, 64, bytes(vec![0; 32]), mxfp4(2)).is_some());
        assert!(TensorBytes::new(Arc::new(vec![0u8; 4]), 2..5).is_none());
        #[expect(clippy::reversed_empty_ranges, reason = "a hostile range")]
        let reversed = TensorBytes::new(Arc::new(vec![0u8; 4]), 3..2);
        assert!(reversed.is_none());
    }
}
