//! Damaged and hostile traces: an error that names the file, never a panic.

use super::{edit_manifest, files, only_part, rewrite, route_rows, small};
use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, UInt16Array, UInt32Array};
use arrow_schema::{Field, Schema};
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;
use specprof::trace::{Trace, TraceError, validate};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Reads everything that there is to read.
fn read_all(path: &Path) -> Result<usize, TraceError> {
    let trace = Trace::open(path)?;
    let rows = route_rows(&trace)?.len();
    Ok(rows + validate(&trace)?.checks.len())
}

fn corrupt_reason(path: &Path) -> String {
    match read_all(path) {
        Err(error @ TraceError::Corrupt { .. }) => error.to_string(),
        other => panic!("not corrupt: {other:?}"),
    }
}

fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let target = to.join(file.strip_prefix(from).unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(&file, target).unwrap();
    }
}

/// Replaces or adds (`at` beyond the end) a column.
fn with_column(batch: &RecordBatch, name: &str, nullable: bool, column: ArrayRef) -> RecordBatch {
    let mut fields: Vec<Field> = batch.schema().fields().iter().map(|f| f.as_ref().clone()).collect();
    let mut columns = batch.columns().to_vec();
    let field = Field::new(name, column.data_type().clone(), nullable);
    match fields.iter().position(|f| f.name() == name) {
        Some(at) => (fields[at], columns[at]) = (field, column),
        None => {
            fields.push(field);
            columns.push(column);
        }
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

fn u16s(batch: &RecordBatch, name: &str) -> Vec<u16> {
    batch.column_by_name(name).unwrap().as_any().downcast_ref::<UInt16Array>().unwrap().values().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn damaged_bytes_never_panic(file in any::<prop::sample::Index>(), flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4), tail in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        small().write(dir.path().join("t").as_path()).unwrap();
        let all = files(&dir.path().join("t"));
        let victim = file.get(&all);
        let mut bytes = fs::read(victim).unwrap();
        for (at, mask) in flips {
            // Half of the cases aim at the footer, where lengths and offsets are.
            let from = if tail { bytes.len().saturating_sub(600) } else { 0 };
            let at = from + at.index(bytes.len() - from);
            bytes[at] ^= mask;
        }
        fs::write(victim, bytes).unwrap();
        let _ = read_all(&dir.path().join("t"));
    }

    #[test]
    fn a_cut_file_is_corrupt(file in any::<prop::sample::Index>(), at in any::<prop::sample::Index>()) {
        let dir = tempfile::tempdir().unwrap();
        small().write(dir.path().join("t").as_path()).unwrap();
        let all = files(&dir.path().join("t"));
        let victim = file.get(&all);
        let bytes = fs::read(victim).unwrap();
        // The manifest's last byte is a line feed.
        fs::write(victim, &bytes[..at.index(bytes.len() - 1)]).unwrap();
        let error = read_all(&dir.path().join("t")).unwrap_err();
        prop_assert!(matches!(error, TraceError::Corrupt { .. }), "{}", error);
        prop_assert!(error.to_string().contains(victim.file_name().unwrap().to_str().unwrap()), "{}", error);
    }
}

#[test]
fn broken_routes_are_named_by_column_and_row() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good");
    small().write(&good).unwrap();
    type Change = fn(RecordBatch) -> RecordBatch;
    let cases: [(&str, Change); 8] = [
        ("table routes has no column e2", |b| {
            let keep: Vec<usize> = (0..b.num_columns()).filter(|&i| b.schema().field(i).name() != "e2").collect();
            b.project(&keep).unwrap()
        }),
        ("column e1 is of type INT64, not INT32", |b| {
            let ids = Int64Array::from_iter_values(u16s(&b, "e1").into_iter().map(i64::from));
            with_column(&b, "e1", false, Arc::new(ids))
        }),
        ("column e0, row 7: an expert that the model does not have", |b| {
            let mut ids = u16s(&b, "e0");
            ids[7] = 16;
            with_column(&b, "e0", false, Arc::new(UInt16Array::from(ids)))
        }),
        ("column e3, rows 0 to", |b| {
            let ids = u16s(&b, "e3").into_iter().enumerate().map(|(i, id)| (i != 9).then_some(id));
            with_column(&b, "e3", true, Arc::new(ids.collect::<UInt16Array>()))
        }),
        ("a null where none may be", |b| {
            let ids = u16s(&b, "row").into_iter().enumerate().map(|(i, id)| (i != 9).then_some(id));
            with_column(&b, "row", true, Arc::new(ids.collect::<UInt16Array>()))
        }),
        ("row 11: step 0", |b| {
            let mut rows = u16s(&b, "row");
            rows.swap(10, 11);
            with_column(&b, "row", false, Arc::new(UInt16Array::from(rows)))
        }),
        ("table routes, row", |b| {
            let steps = b.column_by_name("step_id").unwrap().as_any().downcast_ref::<UInt32Array>().unwrap();
            let back = UInt32Array::from_iter_values(steps.values().iter().map(|s| 1000 - s));
            with_column(&b, "step_id", false, Arc::new(back))
        }),
        ("neither `target` nor `draft`", |b| {
            let words = arrow_array::StringArray::from_iter_values((0..b.num_rows()).map(|i| if i == 3 { "other" } else { "target" }));
            with_column(&b, "module", false, Arc::new(words))
        }),
    ];
    for (text, change) in cases {
        let path = dir.path().join("bad");
        let _ = fs::remove_dir_all(&path);
        copy(&good, &path);
        rewrite(&path, "routes", WriterProperties::builder().build(), change);
        let reason = corrupt_reason(&path);
        assert!(reason.contains(text) && reason.contains("routes/part-"), "{reason} / {text}");
    }
}

#[test]
fn broken_steps_are_named_by_column_and_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    rewrite(&path, "steps", WriterProperties::builder().build(), |b| {
        let words = arrow_array::StringArray::from_iter_values((0..b.num_rows()).map(|i| if i == 4 { "dance\u{1b}" } else { "verify" }));
        with_column(&b, "phase", false, Arc::new(words))
    });
    let reason = corrupt_reason(&path);
    assert!(reason.contains("table steps, row 4: column phase has the unknown word `dance\\u{1b}`"), "{reason}");
    rewrite(&path, "steps", WriterProperties::builder().build(), |b| {
        let keep: Vec<usize> = (0..b.num_columns()).filter(|&i| b.schema().field(i).name() != "emitted_tokens").collect();
        b.project(&keep).unwrap()
    });
    assert!(corrupt_reason(&path).contains("table steps has no column emitted_tokens"));
}

#[test]
fn parts_must_be_files_of_the_trace() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    let part = only_part(&path, "steps");
    let outside = dir.path().join("steps.parquet");
    fs::copy(&part, &outside).unwrap();
    let name = format!("steps/{}", part.file_name().unwrap().to_str().unwrap());
    for escape in ["../steps.parquet", outside.to_str().unwrap(), "steps/../../steps.parquet", ""] {
        edit_manifest(&path, |m| m.tables.get_mut("steps").unwrap()[0].path = escape.into());
        assert!(corrupt_reason(&path).contains("is not within the trace"), "{escape}");
    }
    edit_manifest(&path, |m| m.tables.get_mut("steps").unwrap()[0].path = name.clone());
    assert!(read_all(&path).is_ok());
    #[cfg(unix)]
    {
        fs::remove_file(&part).unwrap();
        std::os::unix::fs::symlink(&outside, &part).unwrap();
        assert!(corrupt_reason(&path).contains("is not within the trace"));
        fs::remove_file(&part).unwrap();
    }
    assert!(corrupt_reason(&path).contains("the manifest lists it, but it is not there"));
    fs::create_dir(&part).unwrap();
    assert!(corrupt_reason(&path).contains("not a file"));
    fs::remove_dir(&part).unwrap();
    fs::copy(&outside, &part).unwrap();
    edit_manifest(&path, |m| m.tables.get_mut("steps").unwrap()[0].rows += 1);
    assert!(corrupt_reason(&path).contains("the manifest says"));
}

#[test]
fn a_page_that_claims_too_much_is_refused_before_it_is_decoded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    let part = only_part(&path, "routes");
    let mut bytes = fs::read(&part).unwrap();
    // The first page begins after the magic: type (field 1), then its uncompressed size as a zigzag varint.
    assert_eq!((&bytes[..4], bytes[4], bytes[6]), (&b"PAR1"[..], 0x15, 0x15));
    let end = 7 + bytes[7..].iter().position(|b| b & 0x80 == 0).unwrap() + 1;
    bytes.splice(7..end, [0xfe, 0xff, 0xff, 0xff, 0x0f]);
    fs::write(&part, bytes).unwrap();
    let reason = corrupt_reason(&path);
    assert!(reason.contains("claims to hold 2147483647"), "{reason}");
}

#[test]
fn no_trace_is_no_corrupt_trace() {
    let dir = tempfile::tempdir().unwrap();
    let error = |path: &Path| Trace::open(path).unwrap_err();
    assert!(matches!(error(dir.path()), TraceError::NotATrace { .. }));
    assert!(matches!(error(&dir.path().join("nowhere")), TraceError::NotATrace { .. }));
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(error(&file), TraceError::NotATrace { .. }));
}

#[test]
fn dangling_references_fail_a_check() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    let failed = |path: &Path| -> Vec<&'static str> {
        let v = validate(&Trace::open(path).unwrap()).unwrap();
        v.checks.iter().filter(|c| !c.ok).map(|c| c.name).collect()
    };
    assert!(failed(&path).is_empty());
    rewrite(&path, "routes", WriterProperties::builder().build(), |b| {
        let steps = b.column_by_name("step_id").unwrap().as_any().downcast_ref::<UInt32Array>().unwrap();
        let last = steps.value(steps.len() - 1);
        let moved = UInt32Array::from_iter_values(steps.values().iter().map(|&s| if s == last { 9999 } else { s }));
        with_column(&b, "step_id", false, Arc::new(moved))
    });
    // Every layer lacks the same rows, so the layers still agree with each other.
    assert_eq!(failed(&path), ["route_step", "route_windows"]);
    small().write(&dir.path().join("u")).unwrap();
    let path = dir.path().join("u");
    rewrite(&path, "requests", WriterProperties::builder().build(), |b| {
        let ids = UInt32Array::from_iter_values((0..b.num_rows() as u32).map(|i| i + 1));
        with_column(&b, "request_id", false, Arc::new(ids))
    });
    assert_eq!(failed(&path), ["step_request", "request_tokens"]);
    edit_manifest(&path, |m| m.token_hash = Some("00".into()));
    assert!(failed(&path).contains(&"token_hash"));
}
