//! Traces made to harm: numbers that ask for memory, files that are none, and a system that gives nothing.

use super::{edit_manifest, only_part, rewrite, small};
use arrow_array::builder::{ListBuilder, UInt32Builder};
use arrow_array::{ArrayRef, DictionaryArray, Float32Array, Int32Array, RecordBatch, StringArray, UInt16Array, UInt32Array};
use arrow_schema::{DataType, Field, Schema};
use assert_cmd::Command;
use parquet::file::properties::WriterProperties;
use specprof::analysis::{Options, analyze};
use specprof::trace::manifest::PartFile;
use specprof::trace::synth::Synth;
use specprof::trace::{Ending, Manifest, TelemetrySample, Trace, TraceError, TraceWriter, WriterOptions, validate};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

fn trace() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    small().write(&path).unwrap();
    (dir, path)
}

fn corrupt(path: &Path) -> String {
    match Trace::open(path).map(|_| ()) {
        Err(error @ TraceError::Corrupt { .. }) => error.to_string(),
        other => panic!("not corrupt: {other:?}"),
    }
}

fn failed(path: &Path) -> Vec<&'static str> {
    let validation = validate(&Trace::open(path).unwrap()).unwrap();
    validation.checks.iter().filter(|check| !check.ok).map(|check| check.name).collect()
}

fn with_column(batch: &RecordBatch, name: &str, column: ArrayRef) -> RecordBatch {
    let mut fields: Vec<Field> = batch.schema().fields().iter().map(|f| f.as_ref().clone()).collect();
    let mut columns = batch.columns().to_vec();
    let field = Field::new(name, column.data_type().clone(), column.null_count() > 0);
    match fields.iter().position(|f| f.name() == name) {
        Some(at) => (fields[at], columns[at]) = (field, column),
        None => {
            fields.push(field);
            columns.push(column);
        }
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

fn plain() -> WriterProperties {
    WriterProperties::builder().build()
}

/// Writes one batch as the only part of a table and puts its rows into the manifest.
fn put(path: &Path, table: &str, batch: &RecordBatch) {
    let mut file = fs::File::create(only_part(path, table)).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(&mut file, batch.schema(), Some(plain())).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    edit_manifest(path, |m| m.tables.get_mut(table).unwrap()[0].rows = batch.num_rows() as u64);
}

#[test]
fn a_manifest_beyond_the_bounds_is_corrupt_by_its_key() {
    let (_dir, path) = trace();
    let good = fs::read(path.join("manifest.json")).unwrap();
    type Edit = fn(&mut Manifest);
    let cases: [(&str, Edit); 14] = [
        ("model.layers: 4097", |m| m.model.layers = 4097),
        ("model.moe_layers: 1 after 1", |m| m.model.moe_layers = vec![1, 1]),
        ("model.moe_layers: 1 after 2", |m| m.model.moe_layers = vec![2, 1]),
        ("model.moe_layers: layer 9", |m| m.model.moe_layers = vec![1, 9]),
        ("model.draft_layers: 4 after 4", |m| m.model.draft_layers = vec![4, 4]),
        ("model.draft_layers: 5000 layers", |m| m.model.draft_layers = (0..5000).collect()),
        ("model.experts_per_token: 0", |m| m.model.experts_per_token = 0),
        ("model.experts_per_token: 17 experts per token of 16", |m| m.model.experts_per_token = 17),
        ("model.experts: 5000", |m| m.model.experts = 5000),
        ("model.experts: 8192000 experts over all layers", |m| {
            (m.model.layers, m.model.experts) = (4096, 4096);
            m.model.moe_layers = (0..1999).collect();
        }),
        ("tables: 20000 part files", |m| {
            m.tables.insert(
                "telemetry".into(),
                (0..19_997).map(|i| PartFile { path: format!("telemetry/{i}"), rows: 0, crc32: None }).collect(),
            );
        }),
        ("is listed twice", |m| {
            let twice = m.tables["steps"][0].clone();
            m.tables.get_mut("steps").unwrap().push(twice);
        }),
        ("has too long a path", |m| m.tables.get_mut("steps").unwrap()[0].path = "a/".repeat(3000)),
        ("leads nowhere", |m| m.tables.get_mut("steps").unwrap()[0].path = format!("steps/{}", "a".repeat(300))),
    ];
    for (text, edit) in cases {
        fs::write(path.join("manifest.json"), &good).unwrap();
        edit_manifest(&path, edit);
        let reason = corrupt(&path);
        assert!(reason.contains(text) && reason.contains("manifest.json"), "{reason} / {text}");
        assert!(reason.len() < 1000, "{reason}");
    }
    // Unknown keys are skipped however deep they are read, and a manifest larger than any is not read.
    let mut json: serde_json::Value = serde_json::from_slice(&good).unwrap();
    json["later"] = serde_json::json!([[{"a": 1}]]);
    fs::write(path.join("manifest.json"), json.to_string()).unwrap();
    Trace::open(&path).unwrap();
    json["later"] = "x".repeat(5 << 20).into();
    fs::write(path.join("manifest.json"), json.to_string()).unwrap();
    assert!(corrupt(&path).contains("too large"));
    // Where nothing is routed, nothing need be known of experts.
    fs::write(path.join("manifest.json"), &good).unwrap();
    edit_manifest(&path, |m| {
        (m.model.experts, m.model.experts_per_token) = (0, 0);
        (m.model.moe_layers, m.model.draft_layers) = (Vec::new(), Vec::new());
    });
    Trace::open(&path).unwrap();
}

#[cfg(unix)]
#[test]
fn links_do_not_make_parts_of_one_file() {
    use std::os::unix::fs::symlink;
    let (_dir, path) = trace();
    let part = only_part(&path, "steps");
    let list = |name: &str| {
        let rows = Trace::open(&path).unwrap().steps().unwrap().len() as u64;
        edit_manifest(&path, |m| m.tables.get_mut("steps").unwrap().push(PartFile { path: format!("steps/{name}"), rows, crc32: None }));
        let reason = corrupt(&path);
        edit_manifest(&path, |m| drop(m.tables.get_mut("steps").unwrap().pop()));
        reason
    };
    fs::hard_link(&part, path.join("steps/hard")).unwrap();
    assert!(list("hard").contains("listed twice"));
    symlink(&part, path.join("steps/soft")).unwrap();
    assert!(list("soft").contains("listed twice"));
    symlink("loop", path.join("steps/loop")).unwrap();
    assert!(list("loop").contains("leads nowhere"));
    fs::create_dir(path.join("steps/folder")).unwrap();
    assert!(list("folder").contains("not a file"));
}

/// What a pipe or a device would make wait for ever.
#[cfg(unix)]
#[test]
fn pipes_and_devices_are_refused_at_once() {
    let (_dir, path) = trace();
    let refused = |victim: &Path| {
        let (done, waited) = std::sync::mpsc::channel();
        let trace = path.clone();
        std::thread::spawn(move || done.send(Trace::open(&trace).map(|_| ()).unwrap_err().to_string()));
        let error = waited.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| panic!("waits for {}", victim.display()));
        assert!(error.contains("corrupt: not a file"), "{error}");
    };
    for victim in [only_part(&path, "steps"), only_part(&path, "routes"), path.join("manifest.json")] {
        let kept = fs::read(&victim).unwrap();
        fs::remove_file(&victim).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&victim).status().unwrap().success());
        refused(&victim);
        fs::remove_file(&victim).unwrap();
        fs::write(&victim, kept).unwrap();
    }
    let manifest = path.join("manifest.json");
    fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &manifest).unwrap();
    refused(&manifest);
}

#[test]
fn too_small_a_k_does_not_drop_experts_silently() {
    let (_dir, path) = trace();
    edit_manifest(&path, |m| m.model.experts_per_token = 3);
    for arguments in [&["report"][..], &["inspect", "--check"]] {
        let out = Command::cargo_bin("specprof").unwrap().args(arguments).arg(&path).assert().code(4).stdout("");
        let stderr = String::from_utf8_lossy(&out.get_output().stderr).into_owned();
        assert!(stderr.contains("column e3") && stderr.contains("3 experts per token"), "{stderr}");
    }
    edit_manifest(&path, |m| m.model.experts_per_token = 4);
    rewrite(&path, "routes", plain(), |b| with_column(&b, "w4", b.column_by_name("w0").unwrap().clone()));
    let error = Trace::open(&path).unwrap().route_units().unwrap_err().to_string();
    assert!(error.contains("column w4"), "{error}");
}

#[test]
fn numbers_that_are_none_fail_a_check() {
    let (dir, path) = trace();
    assert!(failed(&path).is_empty());
    for bad in [f32::NAN, f32::INFINITY, -0.25] {
        let path = dir.path().join(format!("{bad}"));
        small().write(&path).unwrap();
        rewrite(&path, "routes", plain(), |b| {
            let weights = b.column_by_name("w1").unwrap().as_any().downcast_ref::<Float32Array>().unwrap();
            let last = weights.len() - 3;
            let changed = weights.values().iter().enumerate().map(|(i, &w)| if i == last { bad } else { w });
            with_column(&b, "w1", Arc::new(Float32Array::from_iter_values(changed)))
        });
        assert_eq!(failed(&path), ["route_weights"]);
    }
    // A report says how many windows it had to leave out.
    rewrite(&path, "routes", plain(), |b| {
        let weights = b.column_by_name("w1").unwrap().as_any().downcast_ref::<Float32Array>().unwrap();
        with_column(&b, "w1", Arc::new(Float32Array::from_iter_values(weights.values().iter().map(|_| f32::NAN))))
    });
    let report = analyze(&path, &Options { resamples: 10, seed: 1 }).unwrap();
    let warning = report.warnings.iter().find(|w| w.code == "coverage_left_out").unwrap();
    assert!(warning.message.starts_with("36 windows"), "{}", warning.message);

    let path = dir.path().join("telemetry");
    let mut writer = TraceWriter::create(&path, small().manifest(), &WriterOptions::default()).unwrap();
    for power_w in [Some(100.0), None, Some(f64::NAN)] {
        writer.telemetry().offer(TelemetrySample { power_w, ..TelemetrySample::default() });
    }
    small().emit(&mut writer).unwrap();
    writer.finish(Ending::Complete).unwrap();
    assert_eq!(failed(&path), ["telemetry_values"]);
}

#[test]
fn lists_of_run_lengths_are_bounded() {
    let (_dir, path) = trace();
    rewrite(&path, "steps", plain(), |b| {
        let mut lists = ListBuilder::new(UInt32Builder::new()).with_field(Field::new("item", DataType::UInt32, false));
        let zeros = vec![0u32; (9 << 20) / b.num_rows()];
        for _ in 0..b.num_rows() {
            lists.values().append_slice(&zeros);
            lists.append(true);
        }
        with_column(&b, "emitted_tokens", Arc::new(lists.finish()))
    });
    assert!(fs::metadata(only_part(&path, "steps")).unwrap().len() < 100_000);
    let error = Trace::open(&path).unwrap().steps().unwrap_err().to_string();
    assert!(error.contains("column emitted_tokens: more numbers than"), "{error}");
}

#[test]
fn one_text_for_a_thousand_requests_is_bounded() {
    let (_dir, path) = trace();
    let n = 300;
    let batch = {
        let all = |value: u32| Arc::new(UInt32Array::from_iter_values((0..n).map(|_| value))) as ArrayRef;
        let words = |word: &str| {
            let keys = Int32Array::from_iter_values((0..n).map(|_| 0));
            Arc::new(DictionaryArray::new(keys, Arc::new(StringArray::from_iter_values([word])))) as ArrayRef
        };
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("request_id", Arc::new(UInt32Array::from_iter_values(0..n))),
            ("id", words("")),
            ("prompt_tokens", all(5)),
            ("generated_tokens", all(0)),
            ("finish_reason", words("length")),
            ("tags", words("{}")),
            ("prompt_text", words(&"x".repeat(900_000))),
            ("output_text", words("y")),
        ];
        RecordBatch::try_from_iter(columns).unwrap()
    };
    put(&path, "requests", &batch);
    let trace = Trace::open(&path).unwrap();
    // Where no text is needed, none is read.
    assert_eq!(trace.request_ids().unwrap().len(), 300);
    let error = trace.requests().unwrap_err().to_string();
    assert!(error.contains("more text than the file can hold"), "{error}");
}

#[test]
fn rows_of_run_lengths_are_bounded() {
    let (_dir, path) = trace();
    let n = 9 << 20;
    let same = |value: u16| Arc::new(UInt16Array::from_iter_values(std::iter::repeat_n(value, n))) as ArrayRef;
    let words =
        DictionaryArray::new(Int32Array::from_iter_values(std::iter::repeat_n(0, n)), Arc::new(StringArray::from_iter_values(["target"])));
    let mut columns: Vec<(String, ArrayRef)> = vec![
        ("step_id".into(), Arc::new(UInt32Array::from_iter_values(std::iter::repeat_n(0, n)))),
        ("layer".into(), same(1)),
        ("row".into(), same(0)),
        ("module".into(), Arc::new(words)),
    ];
    columns.extend((0..4).map(|rank| (format!("e{rank}"), same(rank))));
    edit_manifest(&path, |m| m.router_weights = false);
    put(&path, "routes", &RecordBatch::try_from_iter(columns).unwrap());
    let error = Trace::open(&path).unwrap().route_units().unwrap_err().to_string();
    assert!(error.contains("9437184 rows of 4 experts in"), "{error}");
}

/// Without files to open, nothing is wrong with the trace.
#[cfg(unix)]
#[test]
fn too_many_open_files_is_no_corrupt_trace() {
    let (_dir, path) = trace();
    Synth { requests: 3, ..small() }.write(&path.with_file_name("u")).unwrap();
    let program = assert_cmd::cargo::cargo_bin("specprof");
    let mut refused = 0;
    for arguments in ["report", "inspect --check"] {
        for limit in 3..24 {
            let script = format!("ulimit -n {limit}; exec '{}' {arguments} '{}'", program.display(), path.display());
            let out = std::process::Command::new("sh").arg("-c").arg(script).output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
            match out.status.code() {
                Some(0) => {}
                Some(3) => refused += 1,
                // The shell or the loader could not even start it.
                Some(126 | 127) => {}
                other => panic!("{other:?} with {limit} files: {stderr}"),
            }
            assert!(!stderr.contains("corrupt"), "{stderr}");
        }
    }
    assert!(refused > 0, "no limit was low enough");
}
