//! What the tree of dependencies must not hold.

use std::process::Command;

/// Crates that open connections. None may come in, by whatever feature.
const NETWORK: &[&str] = &[
    "reqwest",
    "hyper",
    "hyper-util",
    "h2",
    "rustls",
    "ring",
    "aws-lc-rs",
    "openssl",
    "openssl-sys",
    "native-tls",
    "curl",
    "curl-sys",
    "ureq",
    "object_store",
    "quinn",
    "isahc",
    "surf",
    "attohttpc",
    "tungstenite",
    "tonic",
    "hf-hub",
    "minreq",
];

fn tree(extra: &[&str]) -> Vec<String> {
    let out = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--prefix", "none", "--format", "{p}", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .args(extra)
        .output()
        .unwrap();
    assert!(out.status.success(), "cargo tree: {}", String::from_utf8_lossy(&out.stderr));
    let mut names: Vec<String> =
        String::from_utf8(out.stdout).unwrap().lines().filter_map(|line| line.split(' ').next().map(str::to_owned)).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn no_network_client_is_in_the_tree() {
    let names = tree(&["--all-features", "-e", "normal,build,dev"]);
    assert!(names.len() > 100 && names.iter().any(|n| n == "polars"), "the tree was not read: {} crates", names.len());
    let found: Vec<_> = names.iter().filter(|n| NETWORK.contains(&n.as_str())).collect();
    assert!(found.is_empty(), "network clients in the tree: {found:?}");
}

#[test]
fn the_recorder_alone_does_without_polars() {
    let names = tree(&["--no-default-features", "-e", "normal"]);
    assert!(names.iter().any(|n| n == "parquet"), "the tree was not read");
    assert!(!names.iter().any(|n| n.starts_with("polars")), "polars is in the tree of the recorder");
}
