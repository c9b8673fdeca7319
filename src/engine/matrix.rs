//! A weight matrix in the format in which the checkpoint stores it.
//!
//! Nothing is converted at load: a row is decoded to `f32` when it is multiplied, so that memory
//! and bandwidth follow the bytes that are touched.

use std::ops::Range;
use std::sync::Arc;

/// Bytes that outlive the load: a mapped file or a constant of the program.
pub trait Storage: AsRef<[u8]> + Send + Sync + std::fmt::Debug {}
impl<T: AsRef<[u8]> + Send + Sync + std::fmt::Debug> Storage for T {}

/// The bytes of one tensor within a storage.
#[derive(Debug, Clone)]
pub struct TensorBytes {
    storage: Arc<dyn Storage>,
    range: Range<usize>,
}

impl TensorBytes {
    /// The bytes `range` of `storage`; `None` when they are not inside it.
    pub fn new(storage: Arc<dyn Storage>, range: Range<usize>) -> Option<Self> {
        (*storage).as_ref().get(range.clone())?;
        Some(Self { storage, range })
    }

    /// The bytes. No alignment is promised.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.storage).as_ref()[self.range.clone()]
    }
}

/// How a matrix's elements are stored.
#[derive(Debug, Clone)]
pub enum MatrixFormat {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element, the upper half of an F32.
    Bf16,
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
    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Decodes row `row` into `out`, which has `cols` elements.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        match self.format {
            MatrixFormat::F32 => {
                let bytes = &self.data.as_slice()[row * self.cols * 4..][..self.cols * 4];
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            MatrixFormat::Bf16 => {
                let bytes = &self.data.as_slice()[row * self.cols * 2..][..self.cols * 2];
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
        }
    }
}
