//! The worked example of `docs/ci.md`: its files and its shell steps, run as they stand there.

use super::{changed, root};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The fenced blocks that have a title: (title, content).
fn titled_blocks(markdown: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut lines = markdown.lines();
    while let Some(line) = lines.next() {
        if let Some((_, title)) = line.strip_prefix("```").and_then(|info| info.split_once("title=")) {
            let content: String = lines.by_ref().take_while(|l| *l != "```").map(|l| format!("{l}\n")).collect();
            blocks.push((title.to_owned(), content));
        }
    }
    blocks
}

/// The workflow's shell steps: (name, condition, script).
fn steps(workflow: &str) -> Vec<(String, String, String)> {
    let mut steps: Vec<(String, String, String)> = Vec::new();
    let mut lines = workflow.lines().peekable();
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        if let Some(name) = text.strip_prefix("- name: ") {
            steps.push((name.to_owned(), String::new(), String::new()));
        } else if let (Some(condition), Some(step)) = (text.strip_prefix("if: "), steps.last_mut()) {
            step.1 = condition.to_owned();
        } else if let (Some(run), Some(step)) = (text.strip_prefix("run: "), steps.last_mut()) {
            if run != "|" {
                step.2 = format!("{run}\n");
                continue;
            }
            let indent = line.len() - text.len();
            while let Some(next) = lines.peek().filter(|l| l.is_empty() || l.len() - l.trim_start().len() > indent) {
                step.2.push_str(next.get(indent + 2..).unwrap_or_default());
                step.2.push('\n');
                lines.next();
            }
        }
    }
    steps
}

/// A checkout with the example's files, and a directory of programs: specprof, and a `gh` that knows one artifact.
struct Job {
    dir: TempDir,
    steps: Vec<(String, String, String)>,
}

const GH: &str = r#"#!/bin/bash
set -euo pipefail
case "$1 $2" in
  "run list") [ "$(printf '%s ' "$@")" = "run list --workflow specprof.yml --branch main --status success --limit 1 --json databaseId --jq .[0].databaseId " ]; echo 4711 ;;
  "run download") [ "$3 $4 $5 $6" = "4711 --name specprof-baseline --dir" ]; mkdir -p "$7"; cp "$ARTIFACTS/report.json" "$7/" ;;
  *) echo "unknown: $*" >&2; exit 2 ;;
esac
"#;

impl Job {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let blocks = titled_blocks(&fs::read_to_string(root().join("docs/ci.md")).unwrap());
        for (title, content) in &blocks {
            let path = dir.path().join("checkout").join(title);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let workflow = &blocks.iter().find(|(title, _)| title.ends_with("specprof.yml")).unwrap().1;
        let bin = dir.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(dir.path().join("artifacts")).unwrap();
        fs::write(bin.join("gh"), GH).unwrap();
        fs::set_permissions(bin.join("gh"), fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_specprof"), bin.join("specprof")).unwrap();
        Self { steps: steps(workflow), dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a step as GitHub does: `bash -eo pipefail` on its script.
    fn run(&self, name: &str) -> Output {
        let (_, _, script) = self.steps.iter().find(|(n, ..)| n == name).unwrap_or_else(|| panic!("no step {name}"));
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        Command::new("bash")
            .args(["-eo", "pipefail", "-c", script])
            .current_dir(self.path("checkout"))
            .env("PATH", path)
            .env("ARTIFACTS", self.path("artifacts"))
            .env("GITHUB_STEP_SUMMARY", self.path("summary.md"))
            .output()
            .unwrap()
    }

    fn ok(&self, name: &str) -> String {
        let out = self.run(name);
        assert!(out.status.success(), "{name}: {}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }
}

#[test]
fn the_shell_steps_of_the_manual_work() {
    let job = Job::new();
    let named: Vec<(&str, &str)> = job.steps.iter().map(|(name, condition, _)| (name.as_str(), condition.as_str())).collect();
    let pull = "github.event_name == 'pull_request'";
    assert_eq!(
        named,
        [
            ("Install", ""),
            ("Record", ""),
            ("Keep as baseline", "github.ref == 'refs/heads/main'"),
            ("Fetch baseline", pull),
            ("Compare", pull),
            ("Test results", "always() && github.event_name == 'pull_request'"),
        ]
    );
    // The main branch leaves its report behind; a pull request that changes nothing finds all the same.
    job.ok("Record");
    fs::copy(job.path("checkout/report.json"), job.path("artifacts/report.json")).unwrap();
    fs::remove_dir_all(job.path("checkout/traces")).unwrap();
    job.ok("Record");
    job.ok("Fetch baseline");
    let out = job.ok("Compare");
    assert!(out.contains("exactly: 6 requests of the same prompts") && !out.contains("::error"), "{out}");
    assert!(fs::read_to_string(job.path("summary.md")).unwrap().contains("### specprof: no rule failed"));
    job.ok("Test results");
    assert!(fs::read_to_string(job.path("checkout/specprof.xml")).unwrap().contains("tests=\"3\" failures=\"0\""));
    regression(&job);
}

/// A baseline that touched fewer experts, recorded on another processor.
fn regression(job: &Job) {
    let lighter = changed(&job.path("checkout/baseline/report.json"), "lighter.json", |r| {
        r["run"]["device"]["name"] = "another processor".into();
        r["overall"]["union"]["mean"] = (r["overall"]["union"]["mean"].as_f64().unwrap() * 0.9).into();
    });
    fs::rename(lighter, job.path("checkout/baseline/report.json")).unwrap();
    let out = job.run("Compare");
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{text}");
    let line = rules_line(&job.path("checkout/ci/specprof.rules"), "union.mean > +3%");
    let annotation =
        format!("::error file=ci/specprof.rules,line={line},title=specprof%3A union.mean>+3%25 failed::union.mean +11.1 %25, exact");
    assert!(text.contains(&annotation), "{text}");
    assert!(text.contains("allowed     device: "));
    job.ok("Test results");
    assert!(
        fs::read_to_string(job.path("checkout/specprof.xml"))
            .unwrap()
            .contains("<failure type=\"regression\" message=\"union.mean +11.1 %, exact\">")
    );
}

fn rules_line(path: &Path, rule: &str) -> usize {
    fs::read_to_string(path).unwrap().lines().position(|l| l == rule).unwrap() + 1
}
