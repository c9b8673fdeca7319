//! The layers hold: no upward use, no third-party type outside its layer.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules from the ground up; a module may use only what stands before it or beside it.
const LAYERS: &[(&str, u8)] = &[
    ("trace", 0),
    ("metric", 0),
    ("engine", 1),
    ("import", 1),
    ("record", 2),
    ("analysis", 3),
    ("report", 4),
    ("diff", 4),
    ("export", 4),
    ("cli", 5),
];

/// Crates that may be named only below one folder.
const HOMES: &[(&str, &[&str])] = &[
    ("polars", &["analysis"]),
    ("polars_io", &["analysis"]),
    ("arrow_array", &["trace"]),
    ("arrow_schema", &["trace"]),
    ("parquet", &["trace"]),
    ("lz4_flex", &["trace"]),
    ("crc32fast", &["trace"]),
    ("safetensors", &["engine"]),
    ("tokenizers", &["engine"]),
    ("minijinja", &["engine", "report"]),
    ("minijinja_contrib", &["engine"]),
    ("memmap2", &["engine"]),
    ("flate2", &["engine", "import"]),
    ("base64", &["import"]),
    ("rusqlite", &["import"]),
    ("clap", &["cli"]),
    ("clap_complete", &["cli"]),
    ("clap_mangen", &["cli"]),
    ("glob", &["cli"]),
    ("indicatif", &["cli"]),
    ("anstream", &["report", "cli"]),
    ("ctrlc", &["cli"]),
    ("cudarc", &["engine"]),
    ("libloading", &["engine", "record"]),
    ("comfy_table", &["report", "cli"]),
    ("kuva", &["report"]),
];

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

fn level(module: &str) -> Option<u8> {
    LAYERS.iter().find(|(name, _)| *name == module).map(|(_, level)| *level)
}

/// Code of a line without its comment; good enough, since no path holds `//`.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or(line)
}

/// What breaks the layers in one file's text.
fn violations(module: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let own = level(module).unwrap_or(u8::MAX);
    for (number, line) in text.lines().enumerate() {
        let line = code(line);
        for rest in line.split("crate::").skip(1) {
            let used: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if level(&used).is_some_and(|l| l > own) {
                found.push(format!("line {}: {module} uses {used}", number + 1));
            }
        }
        for (name, homes) in HOMES {
            for (at, _) in line.match_indices(&format!("{name}::")) {
                let outside = !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
                if outside && !homes.contains(&module) {
                    found.push(format!("line {}: {name} in {module}", number + 1));
                }
            }
        }
    }
    found
}

#[test]
fn no_layer_uses_one_above_it_and_third_party_types_stay_home() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    assert!(files.len() > 20, "the sources are not where this test looks for them");
    let mut found = Vec::new();
    for file in files {
        let inside = file.strip_prefix(&src).unwrap();
        let module = inside.components().next().unwrap().as_os_str().to_str().unwrap();
        if level(module).is_none() {
            assert!(matches!(module, "lib.rs" | "main.rs"), "{} is in no layer", inside.display());
            continue;
        }
        for violation in violations(module, &fs::read_to_string(&file).unwrap()) {
            found.push(format!("{} {violation}", inside.display()));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_check_sees_what_it_must() {
    assert_eq!(violations("trace", "use crate::engine::Model;").len(), 1);
    assert_eq!(violations("engine", "let x = crate::cli::exit::OK;").len(), 1);
    assert_eq!(violations("report", "use polars::prelude::*;").len(), 1);
    assert_eq!(violations("engine", "fn f() -> parquet::errors::Result<()> {").len(), 1);
    assert!(violations("analysis", "use polars::prelude::*; use crate::trace::Phase; // crate::cli::x").is_empty());
}
