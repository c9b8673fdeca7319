//! Column chunks of expert ids, encoded here: ids are small numbers, so each is its own index into a dictionary of all numbers up to the
//! largest, and writing is packing bits. The library's writer looks every id up in a hash table first, which was half of what writing cost.

use bytes::Bytes;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{CompressedPage, Page, PageWriter};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::writer::{SerializedPageWriter, TrackedWrite};
use parquet::schema::types::ColumnDescPtr;

/// Fewer rows than this are not worth a dictionary of all numbers.
pub(super) const LEAST_ROWS: usize = 1 << 15;
/// Rows of a page, a multiple of eight.
const PAGE_ROWS: usize = 1 << 16;

/// Bits of an index up to `largest`; at least one, so that a page has bytes.
fn width(largest: u16) -> u32 {
    (u16::BITS - largest.leading_zeros()).max(1)
}

/// A required column of u16: a dictionary page, then pages of packed indices (RLE_DICTIONARY, data page v1).
///
/// # Errors
/// When the column is not what it should be.
pub(super) fn chunk(column: ColumnDescPtr, values: &[u16]) -> Result<(Bytes, ColumnCloseResult), ParquetError> {
    let largest = values.iter().copied().max().unwrap_or(0);
    let mut sink = TrackedWrite::new(Vec::with_capacity(values.len() * width(largest) as usize / 8 + 8192));
    let mut pages = SerializedPageWriter::new(&mut sink);
    let dictionary: Vec<u8> = (0..=i32::from(largest)).flat_map(i32::to_le_bytes).collect();
    let (entries, length) = (u32::from(largest) + 1, dictionary.len());
    let page = Page::DictionaryPage { buf: dictionary.into(), num_values: entries, encoding: Encoding::PLAIN, is_sorted: true };
    let mut bytes = pages.write_page(CompressedPage::new(page, length))?.bytes_written;
    let data_page_offset = bytes;
    for rows in values.chunks(PAGE_ROWS) {
        let packed = indices(rows, width(largest));
        let length = packed.len();
        let page = Page::DataPage {
            buf: packed.into(),
            num_values: rows.len() as u32,
            encoding: Encoding::RLE_DICTIONARY,
            // There are no levels in a required column; readers want to hear of an encoding all the same.
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        };
        bytes += pages.write_page(CompressedPage::new(page, length))?.bytes_written;
    }
    let size = i64::try_from(bytes).unwrap_or(i64::MAX);
    let metadata = ColumnChunkMetaData::builder(column)
        .set_compression(Compression::UNCOMPRESSED)
        .set_encodings(vec![Encoding::PLAIN, Encoding::RLE, Encoding::RLE_DICTIONARY])
        .set_num_values(values.len() as i64)
        .set_total_compressed_size(size)
        .set_total_uncompressed_size(size)
        .set_dictionary_page_offset(Some(0))
        .set_data_page_offset(i64::try_from(data_page_offset).unwrap_or(i64::MAX))
        .build()?;
    let rows_written = values.len() as u64;
    let close =
        ColumnCloseResult { bytes_written: bytes, rows_written, metadata, bloom_filter: None, column_index: None, offset_index: None };
    Ok((sink.into_inner()?.into(), close))
}

/// The width, and one run of bit-packed groups of eight; the last group is filled up with zeros.
fn indices(values: &[u16], width: u32) -> Vec<u8> {
    let groups = values.len().div_ceil(8);
    let mut out = Vec::with_capacity(groups * width as usize + 8);
    out.push(width as u8);
    let mut header = (groups as u64) << 1 | 1;
    while header >= 0x80 {
        out.push(header as u8 | 0x80);
        header >>= 7;
    }
    out.push(header as u8);
    let (whole, rest) = values.as_chunks::<8>();
    let mut last = [0; 8];
    last.iter_mut().zip(rest).for_each(|(place, &value)| *place = value);
    for eight in whole.iter().chain((!rest.is_empty()).then_some(&last)) {
        // Eight values of at most 16 bits are at most 128 bits.
        let word = eight.iter().rev().fold(0u128, |word, &value| word << width | u128::from(value));
        out.extend_from_slice(&word.to_le_bytes()[..width as usize]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One by one, from the definition: value i begins at bit i * width.
    fn unpacked(packed: &[u8], width: u32, n: usize) -> Vec<u16> {
        let bit = |at: usize| u16::from(packed[at / 8] >> (at % 8) & 1);
        (0..n).map(|i| (0..width as usize).map(|b| bit(i * width as usize + b) << b).sum()).collect()
    }

    #[test]
    fn the_header_counts_groups() {
        assert_eq!(indices(&[1, 0, 1], 1), [1, 3, 0b101]);
        let packed = indices(&[511; 8 * 100], 9);
        // 100 groups: 201 as a varint.
        assert_eq!((&packed[..3], packed.len()), (&[9, 0xc9, 1][..], 3 + 900));
        assert_eq!((width(0), width(1), width(2), width(511), width(512), width(u16::MAX)), (1, 1, 2, 9, 10, 16));
    }

    proptest! {
        #[test]
        fn packing_keeps_every_value(values in prop::collection::vec(any::<u16>(), 1..60), bits in 1u32..17) {
            let values: Vec<u16> = values.into_iter().map(|v| v & (u32::MAX >> (32 - bits)) as u16).collect();
            let packed = indices(&values, bits);
            prop_assert_eq!(packed.len(), 2 + values.len().div_ceil(8) * bits as usize);
            prop_assert_eq!(unpacked(&packed[2..], bits, values.len()), values);
        }
    }
}
