//! Tables of other programs in Parquet files: columns by name, whole numbers and texts, with the same distrust as a trace's own.

use super::bounds::Budget;
use super::part_file::{PartHandle, guarded};
use super::{TraceError, schema};
use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use std::path::Path;

/// Rows that are decoded at one time.
const BATCH_ROWS: usize = 4096;

/// One value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell<'a> {
    /// None, or of a type that is neither a whole number nor a text.
    Null,
    /// A whole number; one that does not fit is null.
    Int(i64),
    /// A text.
    Text(&'a str),
}

impl<'a> Cell<'a> {
    /// The whole number.
    pub fn int(self) -> Option<i64> {
        match self {
            Self::Int(n) => Some(n),
            _ => None,
        }
    }

    /// The text.
    pub fn text(self) -> Option<&'a str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// A Parquet file that is open.
#[derive(Debug)]
pub struct ForeignTable {
    part: PartHandle,
}

impl ForeignTable {
    /// Opens a file and checks its footer.
    ///
    /// # Errors
    /// When it is no Parquet file, or claims more than its bytes can stand for.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Ok(Self { part: PartHandle::open(path.to_owned())? })
    }

    /// Names of the columns that are not nested.
    pub fn columns(&self) -> Vec<String> {
        self.part.metadata.schema().fields().iter().map(|f| f.name().clone()).collect()
    }

    /// Hands over the wanted columns of all rows. A column that is not there is null in each.
    ///
    /// # Errors
    /// When the file cannot be decoded, and what `take` returned.
    pub fn each<E: From<TraceError>>(&self, columns: &[&str], mut take: impl FnMut(&[Cell<'_>]) -> Result<(), E>) -> Result<(), E> {
        let part = &self.part;
        // Its rows may be as small as those of operations.
        Budget::new(schema::KERNELS, std::slice::from_ref(part))?;
        let fields = part.metadata.schema();
        let places: Vec<Option<usize>> = columns.iter().map(|name| fields.index_of(name).ok()).collect();
        let mut file = part.reopen()?;
        let mask = ProjectionMask::roots(part.footer().file_metadata().schema_descr(), places.iter().flatten().copied());
        for group in part.footer().row_groups() {
            let mut together = 0u64;
            for (_, chunk) in group.columns().iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf)) {
                together = together.saturating_add(part.check_pages(&mut file, chunk)?.largest);
            }
            part.check_page_bytes(together)?;
        }
        let build = || {
            let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, part.metadata.clone());
            builder.with_projection(mask).with_batch_size(BATCH_ROWS).build()
        };
        let mut reader = guarded(&part.path, build)?;
        while let Some(batch) = guarded(&part.path, || reader.next().transpose().map_err(Into::into))? {
            let arrays: Vec<Option<&ArrayRef>> = columns.iter().map(|name| batch.column_by_name(name)).collect();
            let mut row = vec![Cell::Null; columns.len()];
            for i in 0..batch.num_rows() {
                for (cell, array) in row.iter_mut().zip(&arrays) {
                    *cell = array.map_or(Cell::Null, |array| cell_of(array, i));
                }
                take(&row)?;
            }
        }
        Ok(())
    }
}

fn cell_of(array: &ArrayRef, i: usize) -> Cell<'_> {
    if array.is_null(i) {
        return Cell::Null;
    }
    let number = match array.data_type() {
        DataType::Int8 => Some(i64::from(array.as_primitive::<Int8Type>().value(i))),
        DataType::Int16 => Some(i64::from(array.as_primitive::<Int16Type>().value(i))),
        DataType::Int32 => Some(i64::from(array.as_primitive::<Int32Type>().value(i))),
        DataType::Int64 => Some(array.as_primitive::<Int64Type>().value(i)),
        DataType::UInt8 => Some(i64::from(array.as_primitive::<UInt8Type>().value(i))),
        DataType::UInt16 => Some(i64::from(array.as_primitive::<UInt16Type>().value(i))),
        DataType::UInt32 => Some(i64::from(array.as_primitive::<UInt32Type>().value(i))),
        DataType::UInt64 => i64::try_from(array.as_primitive::<UInt64Type>().value(i)).ok(),
        DataType::Boolean => Some(i64::from(array.as_boolean().value(i))),
        DataType::Utf8 => return Cell::Text(array.as_string::<i32>().value(i)),
        DataType::LargeUtf8 => return Cell::Text(array.as_string::<i64>().value(i)),
        _ => None,
    };
    number.map_or(Cell::Null, Cell::Int)
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Float64Array, RecordBatch, StringArray, UInt8Array, UInt64Array};
    use std::sync::Arc;

    #[test]
    fn columns_are_found_by_name_whatever_their_width() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("a", Arc::new(UInt8Array::from(vec![Some(7), None]))),
            ("b", Arc::new(UInt64Array::from(vec![1 << 60, u64::MAX]))),
            ("c", Arc::new(StringArray::from(vec!["x", "y"]))),
            ("d", Arc::new(Float64Array::from(vec![0.5, 1.0]))),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = parquet::arrow::ArrowWriter::try_new(std::fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let table = ForeignTable::open(&path).unwrap();
        assert_eq!(table.columns(), ["a", "b", "c", "d"]);
        let mut rows = Vec::new();
        table
            .each(&["c", "none", "b", "a", "d"], |row| {
                let unknown = row[1] == Cell::Null && row[4] == Cell::Null;
                rows.push((row[0].text().unwrap().to_owned(), row[2].int(), row[3].int(), unknown));
                Ok::<_, TraceError>(())
            })
            .unwrap();
        let want = [("x".to_owned(), Some(1 << 60), Some(7), true), ("y".to_owned(), None, None, true)];
        assert_eq!(rows, want);
        assert!(ForeignTable::open(&dir.path().join("none")).is_err());
    }
}
