//! Every help page: at most 100 columns, every option explained, examples where a person starts.

use assert_cmd::Command;

const COMMANDS: &[&str] =
    &["demo", "doctor", "model", "record", "import", "inspect", "report", "diff", "export", "advise", "sweep", "calibrate"];

fn help(command: Option<&str>) -> String {
    let mut specprof = Command::cargo_bin("specprof").unwrap();
    if let Some(command) = command {
        specprof.arg(command);
    }
    let out = specprof.arg("--help").env("COLUMNS", "200").output().unwrap();
    assert!(out.status.success());
    assert!(out.stderr.is_empty());
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn pages_fit_100_columns() {
    for command in COMMANDS.iter().map(|c| Some(*c)).chain([None]) {
        for line in help(command).lines() {
            assert!(line.chars().count() <= 100, "{command:?}: {line}");
        }
    }
}

/// A line that is broken by the page's width cannot be copied into a shell.
#[test]
fn examples_are_commands() {
    for command in COMMANDS {
        let page = help(Some(command));
        let examples = page.split("Examples:\n").nth(1).unwrap().split("\n\n").next().unwrap();
        let mut goes_on = false;
        for line in examples.lines() {
            assert!(goes_on || line.starts_with("  specprof "), "{command}: {line}");
            goes_on = line.ends_with('\\');
        }
    }
}

#[test]
fn pages_have_examples_and_the_front_page_has_every_command_and_exit_code() {
    let front = help(None);
    for command in COMMANDS {
        assert!(front.lines().any(|l| l.trim_start().starts_with(command)), "{command} is not on the front page");
        assert!(help(Some(command)).contains("Examples:\n  specprof "), "{command} has no examples");
    }
    for code in ["0 ", "1 ", "2 ", "3 ", "4 ", "130 "] {
        assert!(front.lines().any(|l| l.starts_with(&format!("  {code}"))), "exit code {code}");
    }
}

#[test]
fn wrong_usage_is_2_and_completions_are_written() {
    Command::cargo_bin("specprof").unwrap().arg("--no-such-flag").assert().code(2);
    Command::cargo_bin("specprof").unwrap().assert().code(2);
    for shell in ["bash", "zsh", "fish"] {
        let out = Command::cargo_bin("specprof").unwrap().args(["generate", "completions", shell]).output().unwrap();
        assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains("record"), "{shell}");
    }
}

#[test]
fn man_pages_are_written_for_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("not/yet/there");
    Command::cargo_bin("specprof").unwrap().args(["generate", "man"]).arg(&made).assert().success();
    for command in COMMANDS {
        let page = std::fs::read_to_string(made.join(format!("specprof-{command}.1"))).unwrap();
        assert!(page.contains(".TH specprof"), "{command}");
    }
}
