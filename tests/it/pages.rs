//! `specprof report` as a page, Markdown and CSV: whole, self-contained, and harmless whatever a trace says.

use crate::trace::small;
use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use specprof::trace::manifest::Warning;
use specprof::trace::synth::PlantedTimes;
use specprof::trace::{
    Ending, KernelEvent, Module, Phase, Probe, RequestEvent, StepEvent, StepRoutes, Synth, TraceError, TraceWriter, WriterOptions,
};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tempfile::TempDir;

const HOSTILE: &str = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp;{{ 7 * 7 }}`|";

pub fn report(trace: &Path, args: &[&str]) -> String {
    let mut command = Command::cargo_bin("specprof").unwrap();
    command.arg("report").arg(trace).args(args).env("COLUMNS", "100").env("LC_ALL", "C.UTF-8");
    String::from_utf8(command.assert().success().stderr("").get_output().stdout.clone()).unwrap()
}

pub fn written(synth: &Synth, name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join(name);
    synth.write(&trace).unwrap();
    (dir, trace)
}

/// A trace whose every free word wants to be markup.
pub fn hostile() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("<b onmouseover=alert(3)>&\"'");
    let synth = small();
    let mut manifest = synth.manifest();
    for word in [&mut manifest.model.name, &mut manifest.model.architecture, &mut manifest.model.quantisation, &mut manifest.engine] {
        HOSTILE.clone_into(word);
    }
    for word in [&mut manifest.drafter.kind, &mut manifest.device.name, &mut manifest.device.kind] {
        HOSTILE.clone_into(word);
    }
    manifest.warnings.push(Warning::new(HOSTILE, HOSTILE));
    let mut writer = TraceWriter::create(&trace, manifest, &WriterOptions::default()).unwrap();
    synth.emit(&mut writer).unwrap();
    writer.finish(Ending::Incomplete(HOSTILE.into())).unwrap();
    (dir, trace)
}

const VOID: [&str; 6] = ["meta", "link", "br", "img", "input", "hr"];

/// The names of the elements of a page, in order; panics unless every one is closed in turn.
fn elements(page: &str) -> Vec<String> {
    let (mut open, mut all): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if rest.starts_with('!') {
            continue;
        }
        let (tag, behind) = rest.split_once('>').expect("a tag that does not end");
        rest = behind;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "near {}", &rest[..rest.len().min(80)]);
            continue;
        }
        let name: String = tag.chars().take_while(|c| c.is_ascii_alphanumeric()).collect();
        assert!(!name.is_empty(), "`<{tag}>` is no tag");
        assert_eq!(tag.matches('"').count() % 2, 0, "an attribute that does not end: <{tag}>");
        all.push(name.clone());
        if tag.ends_with('/') || VOID.contains(&name.as_str()) {
            continue;
        }
        if name == "script" || name == "style" {
            rest = rest.split_once(&format!("</{name}>")).expect("raw text that does not end").1;
        } else {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    all
}

fn attributes<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    page.split(&format!(" {name}=\"")).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

/// The JSON that is embedded in a page.
fn embedded(page: &str) -> Value {
    let data = page.split_once("id=\"report-data\">").unwrap().1.split_once("</script>").unwrap().0;
    serde_json::from_str(data).unwrap()
}

fn check_page(page: &str) {
    let all = elements(page);
    assert_eq!(all.iter().filter(|e| *e == "script").count(), 2, "the data and the one script");
    assert!(
        !all.iter().any(|e| ["img", "iframe", "object", "embed", "b"].contains(&e.as_str()))
            || all.iter().filter(|e| *e == "b").count() <= 8
    );
    for attribute in ["src", "href", "xlink:href", "action"] {
        for value in attributes(page, attribute) {
            assert!(value.starts_with('#') || value == "data:,", "{attribute}={value}");
        }
    }
    let (before, behind) = page.split_once("id=\"report-data\">").unwrap();
    let (data, behind) = behind.split_once("</script>").unwrap();
    assert!(!data.contains('<'), "the data can end their element");
    for part in [before, behind] {
        for forbidden in ["@import", "javascript:", "<!--", "onerror=alert(2)>", "<b onmouseover", "<script>alert"] {
            assert!(!part.contains(forbidden), "{forbidden}");
        }
        assert!(part.split("url(").skip(1).all(|rest| rest.starts_with('#')), "a picture or font from elsewhere");
    }
    let ids = attributes(page, "id");
    assert_eq!(ids.len(), ids.iter().collect::<BTreeSet<_>>().len(), "{ids:?}");
    for section in ["acceptance", "unions", "overlap", "load", "cost", "draft-length", "layers", "requests", "limits", "run"] {
        assert!(ids.contains(&section) && page.contains(&format!("href=\"#{section}\"")), "{section}");
    }
    let figures = [
        "acceptance-positions",
        "accepted-histogram",
        "union-map",
        "marginal-map",
        "wasted-map",
        "union-growth",
        "union-histogram",
        "pairwise",
        "by-lag",
        "load-map",
        "load-layers",
        "attribution",
        "time-union",
        "cost-layers",
        "telemetry",
        "speedup",
        "step-ratio",
    ];
    for id in figures {
        let figure =
            page.split(&format!("<figure id=\"{id}\">")).nth(1).unwrap_or_else(|| panic!("{id}")).split("</figure>").next().unwrap();
        let shown =
            figure.contains("<svg ") && figure.contains("role=\"img\"") && figure.contains("aria-label=") && figure.contains("Unit: ");
        assert!(shown || figure.contains("class=\"missing\">Not known: "), "{id}: {figure}");
        assert!(!shown || figure.contains(">n = "), "{id} does not say over how many");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("@media print") && page.contains("lang=\"en\""));
}

#[test]
fn the_page_is_whole_and_fetches_nothing() {
    let (_dir, trace) = written(&small(), "my-trace");
    let page = report(&trace, &["--format", "html"]);
    check_page(&page);
    assert_eq!(embedded(&page), serde_json::from_str::<Value>(&report(&trace, &["--format", "json"])).unwrap());
    // The numbers stand in the page itself, without its script: a row a layer, and one of them all.
    let table = page.split("<section id=\"layers\"").nth(1).unwrap().split("</table>").next().unwrap();
    assert_eq!(table.matches("<tr").count(), 1 + 3 + 1);
    for id in ["union-map", "marginal-map", "wasted-map", "pairwise", "load-map", "union-histogram", "acceptance-positions"] {
        let figure = page.split(&format!("<figure id=\"{id}\">")).nth(1).unwrap().split("</figure>").next().unwrap();
        assert!(figure.contains("<svg "), "{id} of a full trace has no picture");
    }
}

#[test]
fn words_of_a_trace_never_become_markup() {
    let (_dir, trace) = hostile();
    let page = report(&trace, &["--format", "html"]);
    check_page(&page);
    assert_eq!(embedded(&page)["run"]["model"]["name"], HOSTILE);
    assert!(page.contains("&lt;img src=x onerror=alert(2)&gt;") && page.contains("{{ 7 * 7 }}"), "the name is shown as it is");
    let markdown = report(&trace, &["--format", "markdown"]);
    assert!(!markdown.contains('<') && markdown.contains("&lt;img"), "{markdown}");
    for line in markdown.lines().filter(|l| l.starts_with('|')) {
        let row = line.replace("\\|", "");
        assert!(row.matches('|').count() >= 3 && row.ends_with('|'), "{line}");
    }
    let csv = report(&trace, &["--format", "csv", "--table", "warnings"]);
    assert!(csv.starts_with("code,message\n") && csv.contains("\"\"'&amp;"), "{csv}");
}

#[test]
fn every_format_has_the_same_numbers() {
    let (_dir, trace) = written(&Synth { requests: 4, ..small() }, "t");
    let json: Value = serde_json::from_str(&report(&trace, &["--format", "json"])).unwrap();
    let csv = report(&trace, &["--format", "csv"]);
    let lines: Vec<Vec<&str>> = csv.lines().map(|l| l.split(',').collect()).collect();
    assert_eq!(lines.len(), 1 + 3 + 1);
    assert!(lines.iter().all(|l| l.len() == lines[0].len()), "{csv}");
    let cell = |row: usize, key: &str| lines[row][lines[0].iter().position(|k| *k == key).unwrap_or_else(|| panic!("{key}"))];
    let number = |row: usize, key: &str| cell(row, key).parse::<f64>().unwrap();
    for (row, layer) in (1..).zip(json["layers"].as_array().unwrap()) {
        assert_eq!(cell(row, "layer"), layer["layer"].to_string());
        assert_eq!(number(row, "union_mean"), layer["union"]["mean"].as_f64().unwrap());
        assert_eq!(number(row, "union_ci95_low"), layer["union"]["ci95"][0].as_f64().unwrap());
        assert_eq!(number(row, "wasted_mean"), layer["wasted_mean"].as_f64().unwrap());
        assert_eq!(number(row, "marginal_2"), layer["marginal"][2].as_f64().unwrap());
    }
    assert_eq!((cell(4, "layer"), number(4, "lift")), ("all", json["overall"]["lift"].as_f64().unwrap()));
    let requests = report(&trace, &["--format", "csv", "--table", "requests"]);
    assert_eq!(requests.lines().count(), 1 + 4);
    let markdown = report(&trace, &["--format", "markdown"]);
    let mean = json["layers"][0]["union"]["mean"].as_f64().unwrap();
    assert!(markdown.contains(&format!("| {mean:.2} |")) && markdown.contains("## Acceptance by draft position"), "{markdown}");
    let none =
        Command::cargo_bin("specprof").unwrap().arg("report").arg(&trace).args(["--format", "csv", "--table", "draft-lengths"]).assert();
    let advice = json["advice"].is_object();
    assert_eq!(none.get_output().status.code(), Some(if advice { 0 } else { 2 }));
}

#[test]
fn text_fits_and_pipes_cleanly() {
    let (_dir, trace) = written(&small(), "t");
    for width in ["80", "120"] {
        let mut command = Command::cargo_bin("specprof").unwrap();
        let out =
            command.arg("report").arg(&trace).args(["--per-layer", "--explain"]).env("COLUMNS", width).env("LC_ALL", "C.UTF-8").assert();
        let text = String::from_utf8(out.success().get_output().stdout.clone()).unwrap();
        let limit: usize = width.parse().unwrap();
        for line in text.lines() {
            assert!(line.chars().count() <= limit && !line.chars().any(char::is_control) && line == line.trim_end(), "{width}: {line:?}");
        }
    }
}

/// Windows of every length from two rows to as many as they are made with.
struct EveryLength<'a>(&'a mut TraceWriter);

impl Probe for EveryLength<'_> {
    fn wants_weights(&self) -> bool {
        self.0.wants_weights()
    }

    fn wants_kernels(&self) -> bool {
        self.0.wants_kernels()
    }

    fn kernels(&mut self, step_id: u32, kernels: Vec<KernelEvent>) -> Result<(), TraceError> {
        self.0.kernels(step_id, kernels)
    }

    fn step(&mut self, mut step: StepEvent) -> Result<(), TraceError> {
        let made = step.rows();
        if step.phase == Phase::Verify && made > 2 {
            let rows = 2 + step.step_id as usize % (made - 1);
            step.input_tokens.truncate(rows);
            step.accepted = step.accepted.min(rows as u16 - 1);
            step.emitted_tokens.truncate(usize::from(step.accepted) + 1);
            for of_drafts in [&mut step.draft_probs, &mut step.draft_confidences].into_iter().flatten() {
                of_drafts.truncate(rows - 1);
            }
            let none = StepRoutes::new(step.routes.k);
            let all = std::mem::replace(&mut step.routes, none);
            let mut at = 0;
            for block in all.blocks {
                let wanted = if block.module == Module::Draft { rows - 1 } else { rows };
                let (length, kept) = (usize::from(block.rows) * all.k, wanted.min(usize::from(block.rows)) * all.k);
                let weights = all.weights.get(at..at + kept).unwrap_or_default();
                step.routes.push(block.module, block.layer, block.first_row, &all.ids[at..at + kept], weights);
                at += length;
            }
        }
        self.0.step(step)
    }

    fn request(&mut self, request: RequestEvent) -> Result<(), TraceError> {
        let tags = format!("{{\"kind\": \"kind-{}\"}}", request.request_id % 100);
        self.0.request(RequestEvent { tags, ..request })
    }
}

/// The most that a page has to show: 61 layers, 512 experts, 16 rows, windows of every length, gate weights, times, 512 requests.
fn largest(verify_steps: u32) -> (TempDir, PathBuf) {
    let times = PlantedTimes { base: 10.0, per_expert: 1.0, per_row: 0.5, attention: 30.0, attention_per_row: 2.0, noise: 3.0 };
    let synth = Synth {
        requests: 512,
        prompt_rows: 2,
        verify_steps,
        decode_every: 1,
        rows: 16,
        acceptance: 0.9,
        layers: (3..64).collect(),
        draft_layer: Some(64),
        weights: true,
        times: Some(times),
        ..Synth::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("largest");
    let options = WriterOptions { kernels: true, ..WriterOptions::default() };
    let mut writer = TraceWriter::create(&trace, synth.manifest(), &options).unwrap();
    synth.emit(&mut EveryLength(&mut writer)).unwrap();
    writer.finish(Ending::Complete).unwrap();
    (dir, trace)
}

#[test]
fn the_largest_page_stays_below_3_megabytes() {
    // Three steps a request have windows of every length; what more of them add are digits.
    let (_dir, trace) = largest(3);
    for by in [&[][..], &["--by", "request", "--ep", "8"], &["--by", "tag:kind"]] {
        let page = report(&trace, &[&["--format", "html"], by].concat());
        check_page(&page);
        assert!(page.len() < 3_000_000, "{by:?}: {} bytes", page.len());
        let data = embedded(&page);
        assert_eq!((data["by_request"].as_array().unwrap().len(), data["totals"]["requests"].as_u64()), (300, Some(512)));
        assert!(page.contains("The first 300 of 512 requests"));
    }
}

/// What CHANGELOG and `docs` say of sizes and seconds: `cargo test --release --test it -- --ignored --nocapture a_million_tokens`.
#[test]
#[ignore = "takes a minute, and prints seconds"]
fn a_million_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let keep = std::env::var_os("SPECPROF_KEEP_TRACES").map(PathBuf::from);
    let traces: Vec<PathBuf> = (1..3).map(|seed| keep.as_deref().unwrap_or(dir.path()).join(format!("million-{seed}"))).collect();
    for (seed, trace) in (1..).zip(&traces) {
        let synth = Synth { seed, requests: 64, verify_steps: 3907, decode_every: 0, ..Synth::default() };
        let begin = Instant::now();
        synth.write(trace).unwrap();
        println!("{}: {} tokens made in {:.1} s", trace.display(), 64 * 3907 * 4, begin.elapsed().as_secs_f64());
    }
    let run = |args: &[&str]| {
        let begin = Instant::now();
        let out = Command::cargo_bin("specprof").unwrap().args(args).assert().get_output().stdout.len();
        println!("{}: {:.2} s, {out} bytes", args.join(" "), begin.elapsed().as_secs_f64());
        assert!(out > 10_000);
        out
    };
    let [a, b] = [0, 1].map(|i| traces[i].to_str().unwrap());
    run(&["report", a, "--format", "json"]);
    let page = run(&["report", a, "--format", "html"]);
    assert!(page < 3_000_000);
    run(&["diff", a, b, "--allow", "workload", "--format", "json"]);
}

#[test]
fn a_page_without_windows_says_what_is_not_known() {
    let (dir, trace) = written(&Synth { verify_steps: 0, ..small() }, "t");
    let output = dir.path().join("r.html");
    Command::cargo_bin("specprof")
        .unwrap()
        .arg("report")
        .arg(&trace)
        .args(["--format", "html", "-o"])
        .arg(&output)
        .assert()
        .success()
        .stdout("");
    let page = fs::read_to_string(&output).unwrap();
    check_page(&page);
    assert!(page.contains("Not known: the trace has no routed verify windows."));
    let markdown = Command::cargo_bin("specprof").unwrap().arg("report").arg(&trace).args(["--format", "markdown"]).assert().success();
    markdown.stdout(contains("no\\_verify\\_steps").and(contains("NaN").not()));
}
