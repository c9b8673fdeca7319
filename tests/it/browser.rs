//! Pages in headless Chromium: nothing on the console, nothing cut off at 1280 and 400 px.
//!
//! The browser is `$SPECPROF_CHROMIUM`, or the first of the usual names on the path. Without one these tests fail: they
//! cannot say anything then.

use crate::pages::{hostile, report, written};
use specprof::trace::Synth;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

fn chromium() -> OsString {
    let runs = |name: &OsString| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    let named = std::env::var_os("SPECPROF_CHROMIUM").into_iter();
    named.chain(NAMES.map(OsString::from)).find(runs).expect("no Chromium: install one, or name it in SPECPROF_CHROMIUM")
}

/// Opens a page of `tests/browser` beside these files; gives the text of its element `found`, and what the console says.
pub fn shown(page: &str, files: &[(&str, &str)]) -> (String, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let opened = dir.path().join(page);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser").join(page), &opened).unwrap();
    let mut command = Command::new(chromium());
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions"]);
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--allow-file-access-from-files"]);
    command.args(["--enable-logging=stderr", "--window-size=1400,1000", "--timeout=120000", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", dir.path().join("profile").display()));
    let out = command.arg(format!("file://{}", opened.display())).output().unwrap();
    let dom = String::from_utf8_lossy(&out.stdout).into_owned();
    let log = String::from_utf8_lossy(&out.stderr).into_owned();
    let found = dom.split_once(r#"<pre id="found">"#).and_then(|(_, rest)| rest.split_once("</pre>"));
    let found = found.unwrap_or_else(|| panic!("no answer of the browser: {log}")).0;
    let found = found.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u{a0}").replace("&amp;", "&");
    (found, log.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned).collect())
}

/// Opens the page at both widths; gives what is cut off and what the console says.
fn faults(page: &str) -> (String, Vec<String>) {
    shown("check.html", &[("page.html", page)])
}

#[test]
fn the_sample_is_whole_at_every_width() {
    let page = report(Path::new("traces/samples/ling-nano"), &["--format", "html"]);
    assert_eq!(faults(&page), ("[]".into(), vec![]));
}

#[test]
fn forty_layers_and_hostile_names_fit_as_well() {
    let (_dir, flash) = written(&Synth { layers: (2..42).collect(), ..Synth::default() }, "flash-shaped");
    assert_eq!(faults(&report(&flash, &["--format", "html"])), ("[]".into(), vec![]));
    let (_dir, trace) = hostile();
    assert_eq!(faults(&report(&trace, &["--format", "html"])), ("[]".into(), vec![]));
}

#[test]
fn what_is_cut_off_or_fails_is_seen() {
    let wide = "<!doctype html><h1>wide</h1><div style='width: 700px; height: 3px'></div><script>nothing.at()</script>";
    let (found, console) = faults(wide);
    assert!(found.contains("400 px: the page is 7") && !found.contains("1280 px"), "{found}");
    assert!(console.iter().any(|line| line.contains("nothing is not defined")), "{console:?}");
    let (found, _) = faults("<!doctype html><h1>x</h1><svg width=50 height=20><text x=0 y=10>much longer than this</text></svg>");
    assert!(found.contains("1280 px: chart text"), "{found}");
}
