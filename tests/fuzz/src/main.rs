//! Coverage-guided fuzzing of everything that reads a file. `SPECPROF_FUZZ` names the reader; README.md says how to run it.
//!
//! The first byte of an input chooses the options, the rest is the file. Readers of directories and of archives take a ZIP archive,
//! whose members are mutated one at a time and packed again: with checksums that fit, mutations get past them.

#![no_main]

mod archive;
mod bounds;
mod imports;
mod options;
mod place;
mod traces;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use std::sync::OnceLock;

/// How the bytes of an input become what is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A file.
    Plain,
    /// A file that is an archive itself.
    Archive,
    /// A directory, packed as an archive.
    Directory,
}

/// Something that reads files.
struct Reader {
    name: &'static str,
    form: Form,
    run: fn(variant: u8, bytes: &[u8]),
}

/// All of them.
const READERS: &[Reader] = &[
    Reader { name: "vllm", form: Form::Plain, run: |v, b| imports::file("vllm", 0, "json", v, b) },
    Reader { name: "sglang", form: Form::Plain, run: |v, b| imports::file("sglang", 0, "json", v, b) },
    Reader { name: "recorder", form: Form::Archive, run: |v, b| imports::file("sglang", 1, "pt", v, b) },
    Reader { name: "torch", form: Form::Archive, run: |v, b| imports::file("torch", 0, "pt", v, b) },
    Reader { name: "npy", form: Form::Plain, run: |v, b| imports::file("npy", 0, "npy", v, b) },
    Reader { name: "npz", form: Form::Archive, run: |v, b| imports::file("npy", 0, "npz", v, b) },
    Reader { name: "zip", form: Form::Plain, run: |v, b| imports::file("npy", 0, "npz", v, b) },
    Reader { name: "router-log", form: Form::Plain, run: |v, b| imports::file("router-log", 0, "jsonl", v, b) },
    Reader { name: "llamacpp", form: Form::Plain, run: |v, b| imports::file("llamacpp", 0, "csv", v, b) },
    Reader { name: "imatrix", form: Form::Plain, run: |v, b| imports::file("imatrix", 0, "gguf", v, b) },
    Reader { name: "trtllm", form: Form::Directory, run: |v, b| imports::directory("trtllm", v, b) },
    Reader { name: "nsys-sqlite", form: Form::Plain, run: |v, b| imports::file("nsys", 0, "sqlite", v, b) },
    Reader { name: "nsys-parquet", form: Form::Directory, run: |v, b| imports::directory("nsys", v, b) },
    Reader { name: "kineto", form: Form::Plain, run: |v, b| imports::file("kineto", 0, "json", v, b) },
    Reader { name: "jsonl", form: Form::Plain, run: |v, b| imports::file("jsonl", 0, "jsonl", v, b) },
    Reader { name: "config", form: Form::Plain, run: imports::config },
    Reader { name: "trace", form: Form::Directory, run: traces::trace },
    Reader { name: "report", form: Form::Plain, run: traces::report },
    Reader { name: "partial", form: Form::Plain, run: traces::partial },
    Reader { name: "costs", form: Form::Plain, run: traces::costs },
    Reader { name: "rules", form: Form::Plain, run: traces::rules },
];

fn reader() -> &'static Reader {
    static CHOSEN: OnceLock<&Reader> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("SPECPROF_FUZZ").unwrap_or_default();
        let names: Vec<_> = READERS.iter().map(|r| r.name).collect();
        READERS.iter().find(|r| r.name == name).unwrap_or_else(|| {
            eprintln!("SPECPROF_FUZZ names the reader: {}", names.join(", "));
            std::process::exit(2);
        })
    })
}

fuzz_target!(|data: &[u8]| {
    let Some((&variant, bytes)) = data.split_first() else { return };
    let began = bounds::cpu_seconds();
    (reader().run)(variant, bytes);
    let took = bounds::cpu_seconds() - began;
    assert!(took < bounds::MOST_SECONDS, "{took:.1} s of CPU for {} bytes", bytes.len());
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let packed = reader().form != Form::Plain && size > 1 && seed % 8 != 0;
    packed.then(|| archive::mutate(data, size, max_size, seed)).flatten().unwrap_or_else(|| fuzzer_mutate(data, size, max_size))
});
