//! Traces on disk: written, read back, damaged, killed, foreign, old.

mod compat;
mod corrupt;
mod create;
mod foreign;
mod hostile;
mod kernels;
mod killed;
mod round_trip;

use arrow_array::RecordBatch;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::properties::WriterProperties;
use specprof::trace::synth::Synth;
use specprof::trace::{MANIFEST, Manifest, Trace, TraceError};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A small trace: 3 layers, 16 experts, top-4, 3 rows, with draft routes and gate weights.
pub(crate) fn small() -> Synth {
    Synth {
        verify_steps: 6,
        decode_every: 3,
        rows: 3,
        layers: vec![1, 2, 3],
        draft_layer: Some(4),
        experts: 16,
        k: 4,
        weights: true,
        ..Synth::default()
    }
}

/// The rows of all route units: step, layer, row, draft, ids, weights as bits.
pub(crate) type Row = (u32, u16, u16, bool, Vec<u16>, Vec<u32>);

pub(crate) fn route_rows(trace: &Trace) -> Result<Vec<Row>, TraceError> {
    let mut rows = Vec::new();
    for unit in trace.route_units()? {
        let mut reader = unit.read(true);
        while let Some(b) = reader.next_batch()? {
            for i in 0..b.len() {
                let weights = b.weights.unwrap_or_default().iter().map(|w| w[i].to_bits()).collect();
                rows.push((b.step_id[i], b.layer[i], b.row[i], b.draft[i], b.ids.iter().map(|c| c[i]).collect(), weights));
            }
        }
    }
    Ok(rows)
}

/// The only part file of a table.
pub(crate) fn only_part(trace: &Path, table: &str) -> PathBuf {
    let parts: Vec<_> = fs::read_dir(trace.join(table)).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(parts.len(), 1, "{parts:?}");
    parts.into_iter().next().unwrap()
}

/// Rewrites the only part of a table by another hand than the writer's.
pub(crate) fn rewrite(trace: &Path, table: &str, properties: WriterProperties, change: impl Fn(RecordBatch) -> RecordBatch) {
    let path = only_part(trace, table);
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(&path).unwrap()).unwrap().with_batch_size(1 << 20);
    let batches: Vec<RecordBatch> = builder.build().unwrap().map(|b| change(b.unwrap())).collect();
    let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batches[0].schema(), Some(properties)).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.close().unwrap();
    // As another writer would leave it.
    edit_manifest(trace, |m| m.tables.get_mut(table).into_iter().flatten().for_each(|part| part.crc32 = None));
}

pub(crate) fn edit_manifest(trace: &Path, edit: impl FnOnce(&mut Manifest)) {
    let path = trace.join(MANIFEST);
    let mut manifest: Manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(&path, serde_json::to_vec_pretty(&manifest).unwrap()).unwrap();
}

/// All files below a directory, relative.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}
