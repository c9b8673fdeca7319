//! Column chunks of `routes`, encoded here: ids, layers and rows are small numbers, so each is its own index into a dictionary of all
//! numbers up to the largest, and writing is packing bits; steps and modules come in runs. The library's writer looks every value up in
//! a hash table first, which was half of what writing cost.

use super::columns::WORDS_OF_MODULES;
use bytes::Bytes;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{CompressedPage, Page, PageWriter};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::statistics::Statistics;
use parquet::file::writer::{SerializedPageWriter, TrackedWrite};
use parquet::schema::types::ColumnDescPtr;

/// Fewer rows than this are not worth a dictionary of all numbers.
pub(super) const LEAST_ROWS: usize = 1 << 15;
/// Rows of a page, a multiple of eight.
const PAGE_ROWS: usize = 1 << 16;

/// A column's chunk, and what the file's footer says of it.
pub(super) type Chunk = (Bytes, ColumnCloseResult);

/// Bits of an index up to `largest`; at least one, so that a page has bytes.
fn width(largest: u32) -> u32 {
    (u32::BITS - largest.leading_zeros()).max(1)
}

/// A required column of experts: packed indices, in which no codec finds anything.
///
/// # Errors
/// When the column is not what it should be.
pub(super) fn experts(column: ColumnDescPtr, values: &[u16]) -> Result<Chunk, ParquetError> {
    small_numbers(column, values, Compression::UNCOMPRESSED)
}

/// A required column of layers or rows: packed indices, which repeat themselves from step to step.
///
/// # Errors
/// As [`experts`].
pub(super) fn keys(column: ColumnDescPtr, values: &[u16]) -> Result<Chunk, ParquetError> {
    small_numbers(column, values, Compression::LZ4_RAW)
}

fn small_numbers(column: ColumnDescPtr, values: &[u16], codec: Compression) -> Result<Chunk, ParquetError> {
    let largest = values.iter().copied().max().unwrap_or(0);
    let dictionary: Vec<u8> = (0..=i32::from(largest)).flat_map(i32::to_le_bytes).collect();
    let mut chunk = ChunkWriter::new(codec, values.len() * width(largest.into()) as usize / 8 + 8192);
    chunk.dictionary(dictionary, u32::from(largest) + 1)?;
    for rows in values.chunks(PAGE_ROWS) {
        chunk.data(packed(rows, width(largest.into())), rows.len())?;
    }
    chunk.finish(column, None)
}

/// A required column of step ids, which ascend: runs of indices into a dictionary of those that are there.
///
/// # Errors
/// As [`experts`].
pub(super) fn steps(column: ColumnDescPtr, values: &[u32]) -> Result<Chunk, ParquetError> {
    let distinct = values.chunk_by(|a, b| a == b).filter_map(|run| run.first().copied());
    let dictionary: Vec<u8> = distinct.flat_map(u32::to_le_bytes).collect();
    let entries = (dictionary.len() / size_of::<u32>()) as u32;
    let mut chunk = ChunkWriter::new(Compression::LZ4_RAW, 2 * dictionary.len() + 8192);
    chunk.dictionary(dictionary, entries)?;
    // The index of the last run, which may go on in the next page.
    let (mut index, mut before) = (0u32, values.first().copied());
    for rows in values.chunks(PAGE_ROWS) {
        let of_runs = rows.chunk_by(|a, b| a == b).map(|run| {
            if run.first().copied() != before {
                (index, before) = (index + 1, run.first().copied());
            }
            (index, run.len())
        });
        chunk.data(runs(of_runs, width(entries.saturating_sub(1))), rows.len())?;
    }
    let range = values.iter().copied().min().zip(values.iter().copied().max());
    let statistics = range.map(|(min, max)| Statistics::int32(Some(min.cast_signed()), Some(max.cast_signed()), None, Some(0), false));
    chunk.finish(column, statistics)
}

/// A required column of modules: runs of their words' numbers.
///
/// # Errors
/// As [`experts`].
pub(super) fn modules(column: ColumnDescPtr, codes: &[i8]) -> Result<Chunk, ParquetError> {
    let dictionary = WORDS_OF_MODULES.iter().flat_map(|word| (word.len() as u32).to_le_bytes().into_iter().chain(word.bytes()));
    let mut chunk = ChunkWriter::new(Compression::LZ4_RAW, 8192);
    chunk.dictionary(dictionary.collect(), WORDS_OF_MODULES.len() as u32)?;
    for rows in codes.chunks(PAGE_ROWS) {
        let of_runs = rows.chunk_by(|a, b| a == b).map(|run| (u32::from(run[0].cast_unsigned()), run.len()));
        chunk.data(runs(of_runs, width(WORDS_OF_MODULES.len() as u32 - 1)), rows.len())?;
    }
    // Words that are there: a reader skips the column where they are one.
    let there = (0i8..).zip(WORDS_OF_MODULES).filter(|(code, _)| codes.contains(code)).map(|(_, word)| word);
    let range = there.clone().min().zip(there.max());
    let statistics = range.map(|(min, max)| Statistics::byte_array(Some(min.into()), Some(max.into()), None, Some(0), false));
    chunk.finish(column, statistics)
}

/// Writes a dictionary page, then pages of indices (RLE_DICTIONARY, data page v1).
struct ChunkWriter {
    sink: TrackedWrite<Vec<u8>>,
    codec: Compression,
    written: u64,
    before_codec: u64,
    data_page_offset: u64,
    values: usize,
}

impl ChunkWriter {
    fn new(codec: Compression, capacity: usize) -> Self {
        let sink = TrackedWrite::new(Vec::with_capacity(capacity));
        Self { sink, codec, written: 0, before_codec: 0, data_page_offset: 0, values: 0 }
    }

    /// The bytes as the page has them.
    fn squeezed(&self, bytes: Vec<u8>) -> Bytes {
        if self.codec == Compression::LZ4_RAW { lz4_flex::block::compress(&bytes).into() } else { bytes.into() }
    }

    fn page(&mut self, page: Page, length: usize) -> Result<(), ParquetError> {
        let page = CompressedPage::new(page, length);
        let spec = SerializedPageWriter::new(&mut self.sink).write_page(page)?;
        self.written += spec.bytes_written;
        self.before_codec += spec.uncompressed_size as u64;
        Ok(())
    }

    fn dictionary(&mut self, bytes: Vec<u8>, entries: u32) -> Result<(), ParquetError> {
        let length = bytes.len();
        let buf = self.squeezed(bytes);
        self.page(Page::DictionaryPage { buf, num_values: entries, encoding: Encoding::PLAIN, is_sorted: false }, length)?;
        self.data_page_offset = self.written;
        Ok(())
    }

    fn data(&mut self, bytes: Vec<u8>, rows: usize) -> Result<(), ParquetError> {
        let length = bytes.len();
        let page = Page::DataPage {
            buf: self.squeezed(bytes),
            num_values: rows as u32,
            encoding: Encoding::RLE_DICTIONARY,
            // There are no levels in a required column; readers want to hear of an encoding all the same.
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        };
        self.values += rows;
        self.page(page, length)
    }

    fn finish(self, column: ColumnDescPtr, statistics: Option<Statistics>) -> Result<Chunk, ParquetError> {
        let size = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut metadata = ColumnChunkMetaData::builder(column)
            .set_compression(self.codec)
            .set_encodings(vec![Encoding::PLAIN, Encoding::RLE, Encoding::RLE_DICTIONARY])
            .set_num_values(self.values as i64)
            .set_total_compressed_size(size(self.written))
            .set_total_uncompressed_size(size(self.before_codec))
            .set_dictionary_page_offset(Some(0))
            .set_data_page_offset(size(self.data_page_offset));
        if let Some(statistics) = statistics {
            metadata = metadata.set_statistics(statistics);
        }
        let close = ColumnCloseResult {
            bytes_written: self.written,
            rows_written: self.values as u64,
            metadata: metadata.build()?,
            bloom_filter: None,
            column_index: None,
            offset_index: None,
        };
        Ok((self.sink.into_inner()?.into(), close))
    }
}

/// Seven bits a byte, the lowest first.
fn varint(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// The width, then each run: twice its length as a varint, and its index in whole bytes.
fn runs(runs: impl Iterator<Item = (u32, usize)>, width: u32) -> Vec<u8> {
    let mut out = vec![width as u8];
    for (index, length) in runs {
        varint((length as u64) << 1, &mut out);
        out.extend_from_slice(&index.to_le_bytes()[..width.div_ceil(8) as usize]);
    }
    out
}

/// The width, and one run of bit-packed groups of eight; the last group is filled up with zeros.
fn packed(values: &[u16], width: u32) -> Vec<u8> {
    let groups = values.len().div_ceil(8);
    let mut out = Vec::with_capacity(groups * width as usize + 8);
    out.push(width as u8);
    varint((groups as u64) << 1 | 1, &mut out);
    let (whole, rest) = values.as_chunks::<8>();
    let mut last = [0; 8];
    last.iter_mut().zip(rest).for_each(|(place, &value)| *place = value);
    for eight in whole.iter().chain((!rest.is_empty()).then_some(&last)) {
        // Four values of at most 16 bits are at most 64 bits.
        let four = |at: usize| (0..4).fold(0u64, |word, i| word | u64::from(eight[at + i]) << (i as u32 * width));
        let word = u128::from(four(0)) | u128::from(four(4)) << (4 * width);
        out.extend_from_slice(&word.to_le_bytes()[..width as usize]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::cast::AsArray;
    use arrow_array::types::{UInt16Type, UInt32Type};
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
    use parquet::data_type::ByteArray;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use proptest::prelude::*;
    use std::sync::Arc;

    /// One by one, from the definition: value i begins at bit i * width.
    fn unpacked(packed: &[u8], width: u32, n: usize) -> Vec<u16> {
        let bit = |at: usize| u16::from(packed[at / 8] >> (at % 8) & 1);
        (0..n).map(|i| (0..width as usize).map(|b| bit(i * width as usize + b) << b).sum()).collect()
    }

    #[test]
    fn the_header_counts_groups() {
        assert_eq!(packed(&[1, 0, 1], 1), [1, 3, 0b101]);
        let packed = packed(&[511; 8 * 100], 9);
        // 100 groups: 201 as a varint.
        assert_eq!((&packed[..3], packed.len()), (&[9, 0xc9, 1][..], 3 + 900));
        assert_eq!((width(0), width(1), width(2), width(511), width(512), width(u16::MAX.into())), (1, 1, 2, 9, 10, 16));
    }

    /// Rows of a chunk as the library reads them.
    fn read_back(
        kind: &str,
        write: impl FnOnce(ColumnDescPtr) -> Result<Chunk, ParquetError>,
    ) -> (arrow_array::ArrayRef, Option<Statistics>) {
        let schema = Arc::new(parse_message_type(&format!("message routes {{ required {kind}; }}")).unwrap());
        let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::default()).unwrap();
        let (bytes, close) = write(file.schema_descr().column(0)).unwrap();
        let mut group = file.next_row_group().unwrap();
        group.append_column(&bytes, close).unwrap();
        group.close().unwrap();
        let bytes = Bytes::from(file.into_inner().unwrap());
        let builder = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap();
        let statistics = builder.metadata().row_group(0).column(0).statistics().cloned();
        let batches: Vec<_> = builder.with_batch_size(1 << 20).build().unwrap().map(|batch| batch.unwrap()).collect();
        (Arc::clone(batches[0].column(0)), statistics)
    }

    #[test]
    fn runs_go_on_from_page_to_page() {
        // Steps 3, 5 and 4 Gi - 2; the second one lies across the border of two pages.
        let values: Vec<u32> = [(3u32, PAGE_ROWS - 1), (5, 7), (u32::MAX - 1, 2)].iter().flat_map(|&(id, n)| vec![id; n]).collect();
        let (column, statistics) = read_back("int32 step_id (INTEGER(32,false))", |column| steps(column, &values));
        assert_eq!(column.as_primitive::<UInt32Type>().values()[..], values);
        assert_eq!(statistics, Some(Statistics::int32(Some(3), Some(-2), None, Some(0), false)));
    }

    #[test]
    fn modules_are_words_and_the_statistics_name_those_that_are_there() {
        for (codes, min, max) in [(vec![0i8; 5], "target", "target"), (vec![1, 1, 0, 1], "draft", "target")] {
            let (column, statistics) = read_back("binary module (STRING)", |column| modules(column, &codes));
            let words: Vec<&str> = column.as_string::<i32>().iter().flatten().collect();
            assert_eq!(words, codes.iter().map(|&code| WORDS_OF_MODULES[code as usize]).collect::<Vec<_>>());
            let of = |word: &str| ByteArray::from(word);
            assert_eq!(statistics, Some(Statistics::byte_array(Some(of(min)), Some(of(max)), None, Some(0), false)));
        }
    }

    proptest! {
        #[test]
        fn the_library_reads_what_is_written(numbers in prop::collection::vec(0u16..700, 1..300), counts in prop::collection::vec(1usize..40, 1..40)) {
            for write in [experts, keys] {
                let (column, _) = read_back("int32 layer (INTEGER(16,false))", |column| write(column, &numbers));
                prop_assert_eq!(&column.as_primitive::<UInt16Type>().values()[..], &numbers[..]);
            }
            let ids: Vec<u32> = counts.iter().zip(0u32..).flat_map(|(&n, at)| vec![at * at; n]).collect();
            let (column, _) = read_back("int32 step_id (INTEGER(32,false))", |column| steps(column, &ids));
            prop_assert_eq!(&column.as_primitive::<UInt32Type>().values()[..], &ids[..]);
        }

        #[test]
        fn packing_keeps_every_value(values in prop::collection::vec(any::<u16>(), 1..60), bits in 1u32..17) {
            let values: Vec<u16> = values.into_iter().map(|v| v & (u32::MAX >> (32 - bits)) as u16).collect();
            let packed = packed(&values, bits);
            prop_assert_eq!(packed.len(), 2 + values.len().div_ceil(8) * bits as usize);
            prop_assert_eq!(unpacked(&packed[2..], bits, values.len()), values);
        }
    }
}
