//! Traces by other hands: other encodings, nullable columns, more columns, newer minors.

use super::{edit_manifest, rewrite, route_rows, small};
use arrow_array::{RecordBatch, StringArray, UInt16Array};
use arrow_schema::{Field, Schema};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder, WriterVersion};
use parquet::schema::types::ColumnPath;
use specprof::trace::{Trace, validate};
use std::sync::Arc;

/// The same columns, but declared nullable, as data frames write them.
fn nullable(batch: RecordBatch) -> RecordBatch {
    let fields: Vec<Field> = batch.schema().fields().iter().map(|f| f.as_ref().clone().with_nullable(true)).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), batch.columns().to_vec()).unwrap()
}

#[test]
fn every_encoding_is_read_the_same() {
    let base = WriterProperties::builder;
    let delta = |mut p: WriterPropertiesBuilder| {
        for name in ["step_id", "layer", "row", "e0", "e1", "e2", "e3"] {
            p = p.set_column_encoding(ColumnPath::from(name), Encoding::DELTA_BINARY_PACKED);
        }
        p.set_column_encoding(ColumnPath::from("module"), Encoding::DELTA_BYTE_ARRAY)
    };
    let kinds: Vec<(&str, WriterProperties)> = vec![
        ("default", base().build()),
        ("no statistics", base().set_statistics_enabled(EnabledStatistics::None).build()),
        ("plain", base().set_dictionary_enabled(false).set_statistics_enabled(EnabledStatistics::None).build()),
        ("delta", delta(base().set_dictionary_enabled(false)).set_statistics_enabled(EnabledStatistics::None).build()),
        ("v2 pages", base().set_writer_version(WriterVersion::PARQUET_2_0).set_compression(Compression::SNAPPY).build()),
        (
            "small pages",
            base()
                .set_data_page_row_count_limit(13)
                .set_write_batch_size(5)
                .set_compression(Compression::ZSTD(ZstdLevel::default()))
                .build(),
        ),
        ("many groups", base().set_max_row_group_row_count(Some(17)).build()),
        // Ids leave the dictionary in the middle of a chunk.
        (
            "overflowing dictionary",
            base().set_dictionary_page_size_limit(16).set_write_batch_size(8).set_data_page_row_count_limit(20).build(),
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    for (name, properties) in kinds {
        for null in [false, true] {
            let _ = std::fs::remove_dir_all(&path);
            small().write(&path).unwrap();
            let trace = Trace::open(&path).unwrap();
            let (want, steps) = (route_rows(&trace).unwrap(), trace.steps_with_details().unwrap());
            for table in ["routes", "steps", "requests"] {
                rewrite(&path, table, if table == "routes" { properties.clone() } else { WriterProperties::builder().build() }, |b| {
                    if null { nullable(b) } else { b }
                });
            }
            let trace = Trace::open(&path).unwrap();
            assert_eq!(route_rows(&trace).unwrap(), want, "{name}, nullable {null}");
            assert_eq!(trace.steps_with_details().unwrap(), steps, "{name}, nullable {null}");
            assert_eq!(validate(&trace).unwrap().failed(), 0, "{name}");
        }
    }
}

#[test]
fn newer_minors_and_more_columns_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    let add = |batch: RecordBatch| {
        let mut fields: Vec<Field> = vec![Field::new("new_words", arrow_schema::DataType::Utf8, true)];
        fields.extend(batch.schema().fields().iter().map(|f| f.as_ref().clone()));
        let mut columns: Vec<arrow_array::ArrayRef> = vec![Arc::new((0..batch.num_rows()).map(|_| None::<&str>).collect::<StringArray>())];
        columns.extend_from_slice(batch.columns());
        fields.push(Field::new("new_number", arrow_schema::DataType::UInt16, false));
        columns.push(Arc::new(UInt16Array::from(vec![7; batch.num_rows()])));
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
    };
    let want = route_rows(&Trace::open(&path).unwrap()).unwrap();
    for table in ["routes", "steps", "requests"] {
        rewrite(&path, table, WriterProperties::builder().build(), add);
    }
    edit_manifest(&path, |m| {
        m.format_version = "1.99".into();
        m.tables.insert("dreams".into(), Vec::new());
    });
    let trace = Trace::open(&path).unwrap();
    assert_eq!(route_rows(&trace).unwrap(), want);
    assert_eq!(validate(&trace).unwrap().failed(), 0);
}
