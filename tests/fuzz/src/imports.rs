//! The importers: whatever is read must give a trace that keeps every rule and has a report; whatever is refused leaves nothing behind.

use crate::{options, place};
use specprof::analysis::{self, analyze_trace};
use specprof::import::{ForeignModel, Importer, Options, find, import, sniff};
use specprof::trace::{Trace, validate};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A file of the importer at `place` among those of this name.
pub fn file(name: &str, nth: usize, extension: &str, variant: u8, bytes: &[u8]) {
    let dir = place::fresh();
    // Some formats have a name that files go by.
    let path = dir.join(format!("input.{extension}"));
    place::write(&path, bytes);
    run(find(name)[nth], nth == 1, &path, variant, dir);
}

/// A directory; with the upper half of the variants, its first file alone.
pub fn directory(name: &str, variant: u8, bytes: &[u8]) {
    let dir = place::fresh();
    let path = dir.join("input");
    if place::unpack(bytes, &path).is_none() {
        return;
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect();
    files.sort();
    let input = files.into_iter().find(|f| variant >= 128 && f.is_file()).unwrap_or(path);
    run(find(name)[0], false, &input, variant, dir);
}

/// A model's configuration, which is read beside an input.
pub fn config(_: u8, bytes: &[u8]) {
    let _ = ForeignModel::parse(bytes);
}

fn run(importer: &'static dyn Importer, recorder: bool, input: &Path, variant: u8, dir: &Path) {
    let _ = sniff(input);
    let (mut options, adds) =
        if recorder { (options::of_recorder(variant), false) } else { options::of(importer.name(), variant) };
    let out = dir.join("out");
    if adds {
        base(&out);
        options.into = Some(out.clone());
    }
    match import(importer, &[input.to_owned()], &out, &options) {
        Ok(_) => keeps_all_rules(&out),
        Err(error) => {
            let message = error.to_string();
            let named = [input, &out].iter().any(|path| message.contains(&*path.to_string_lossy()));
            // Of a directory, the file in it.
            assert!(named || message.contains(&*dir.to_string_lossy()), "no file is named: {message}");
            if adds {
                keeps_all_rules(&out);
            } else {
                assert!(!out.exists(), "a trace was left behind after: {message}");
            }
        }
    }
    let left: Vec<_> = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with('.')), "left behind: {left:?}");
}

/// A copy of the trace that profiles are added to: a recording whose passes the seeds of profiles have.
fn base(to: &Path) {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let path = place::root().join("base");
        let input = place::repository("tests/data/import/sglang_recorder/per_token_spec_verify_cuda0_rank0.pt");
        import(find("sglang")[1], &[input], &path, &Options { force: true, ..Options::default() }).expect("the sample is imported");
        path
    });
    place::copy(made, to);
}

fn keeps_all_rules(path: &Path) {
    let trace = Trace::open(path).expect("what was imported can be opened");
    let broken: Vec<_> = validate(&trace).expect("and read").checks.into_iter().filter(|check| !check.ok).collect();
    assert!(broken.is_empty(), "{broken:?}");
    let options = analysis::Options { resamples: 20, ..analysis::Options::default() };
    if let Err(error) = analyze_trace(&trace, &options) {
        panic!("no report: {error}");
    }
}
