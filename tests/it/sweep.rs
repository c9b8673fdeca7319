//! `specprof sweep`: resumable, refused with other parameters, and in agreement with what the longest recording predicts.

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use std::fs;
use std::path::Path;

fn sweep(dir: &Path, args: &[&str]) -> Command {
    sweep_into(dir, "s", args)
}

fn sweep_into(dir: &Path, out: &str, args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("specprof").unwrap();
    let given = ["sweep", "--model", "demo", "--prompts", "p.jsonl", "--out", out];
    command.current_dir(dir).args(given).args(args).env("COLUMNS", "160").env("LC_ALL", "C.UTF-8");
    command
}

fn prompts(dir: &Path, count: usize) {
    let texts = ["import os\\n", "def main(argv):\\n", "class Reader:\\n", "for line in lines:\\n", "    return self.", "try:\\n"];
    let line =
        |i: usize| format!("{{\"prompt\": \"{}{}\", \"tags\": {{\"kind\": \"k{}\"}}}}\n", "# x\\n".repeat(i / 6), texts[i % 6], i % 2);
    fs::write(dir.join("p.jsonl"), (0..count).map(line).collect::<String>()).unwrap();
}

fn comparison(command: &mut Command) -> Value {
    let done = command.arg("--json").assert().success();
    serde_json::from_slice(&done.get_output().stdout).unwrap()
}

#[test]
fn the_longest_recording_predicts_the_shorter_ones() {
    let dir = tempfile::tempdir().unwrap();
    prompts(dir.path(), 12);
    let args = ["--draft-len", "1,2,4", "--max-new-tokens", "80", "--ignore-eos", "-q"];
    let found = comparison(sweep(dir.path(), &args).args(["--draft", "mtp,ngram"]));
    let cells = found["cells"].as_array().unwrap();
    assert_eq!(
        cells.iter().map(|c| c["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["mtp-1-t0", "mtp-2-t0", "mtp-4-t0", "ngram-1-t0", "ngram-2-t0", "ngram-4-t0"]
    );
    let mut compared = 0;
    for cell in cells.iter().filter(|c| c["drafter"] == "mtp" && !c["predicted"].is_null()) {
        assert_eq!(cell["predicted_by"], "mtp-4-t0");
        for (value, interval) in [("tokens_per_step", "tokens_per_step_ci95"), ("union_mean", "union_ci95"), ("speedup", "ci95")] {
            let number = |of: &str, at: &Value| at.as_f64().unwrap_or_else(|| panic!("{of}.{value} of {}", cell["name"]));
            let (recorded, predicted) = (&cell["recorded"], &cell["predicted"]);
            let (r, p) = (number("recorded", &recorded[value]), number("predicted", &predicted[value]));
            let [r_low, r_high, p_low, p_high] =
                [&recorded[interval][0], &recorded[interval][1], &predicted[interval][0], &predicted[interval][1]]
                    .map(|v| number(interval, v));
            println!("{} {value}: recorded {r:.3} ({r_low:.3}-{r_high:.3}), predicted {p:.3} ({p_low:.3}-{p_high:.3})", cell["name"]);
            assert!(r_low <= p_high && p_low <= r_high, "{} {value}: intervals are apart", cell["name"]);
            compared += 1;
        }
    }
    assert_eq!(compared, 6);
    // A lookup finds nothing now and then, so its recordings have decode steps and measured times; one table has one source all the same.
    let sources: Vec<&Value> = cells.iter().map(|c| &c["recorded"]["cost_source"]).filter(|s| !s.is_null()).collect();
    assert!(sources.len() >= 3 && sources.iter().all(|s| *s == sources[0]), "{sources:?}");
    // The model's, for the recordings of mtp have no decode steps; and that is said.
    assert_eq!(found["measured_unused_because"].is_string(), sources[0] == "model", "{found}");
    // With plain decoding in the grid its steps are what the others' are compared with: times, which the state of the machine moves.
    let timed = comparison(sweep(dir.path(), &args).args(["--draft", "mtp,ngram,none"]));
    let sources: Vec<&Value> =
        timed["cells"].as_array().unwrap().iter().filter(|c| c["drafter"] == "mtp").map(|c| &c["recorded"]["cost_source"]).collect();
    assert!(sources.len() == 3 && sources.iter().all(|s| *s == "measured") && timed["measured_unused_because"].is_null(), "{timed}");
    // Greedy decoding emits the same tokens whatever the drafts.
    let hash = |name: &str| {
        let manifest: Value = serde_json::from_slice(&fs::read(dir.path().join("s").join(name).join("manifest.json")).unwrap()).unwrap();
        manifest["token_hash"].clone()
    };
    assert!(hash("mtp-1-t0").is_string() && ["mtp-2-t0", "mtp-4-t0", "none-0-t0"].iter().all(|name| hash(name) == hash("mtp-1-t0")));
}

#[test]
fn finished_recordings_are_kept_and_others_are_made_again() {
    let dir = tempfile::tempdir().unwrap();
    prompts(dir.path(), 2);
    let args = ["--draft-len", "1,3", "--max-new-tokens", "12", "--ignore-eos"];
    let first = comparison(sweep(dir.path(), &args).arg("-q"));
    let manifest = |name: &str| dir.path().join("s").join(name).join("manifest.json");
    let before = fs::read(manifest("mtp-1-t0")).unwrap();
    // One recording looks as if it had been killed.
    let broken = manifest("mtp-3-t0");
    let mut value: Value = serde_json::from_slice(&fs::read(&broken).unwrap()).unwrap();
    value["complete"] = false.into();
    value["incomplete_reason"] = "recording".into();
    fs::write(&broken, value.to_string()).unwrap();
    let again = sweep(dir.path(), &args).assert().success();
    let again = again.stderr(contains("recording mtp-3-t0").and(contains("recording mtp-1-t0").not()));
    again.stdout(contains("mtp-1-t0").and(contains("Predicted: by the first drafts")));
    assert_eq!(fs::read(manifest("mtp-1-t0")).unwrap(), before, "a finished recording was touched");
    assert_eq!(comparison(sweep(dir.path(), &args).arg("-q")), first);

    // Other parameters are not mixed in.
    let other = ["--draft-len", "1,3", "--max-new-tokens", "13", "--ignore-eos"];
    sweep(dir.path(), &other).assert().code(2).stdout("").stderr(contains("other parameters").and(contains("--force")));
    sweep(dir.path(), &other).arg("--force").assert().success();
    fs::write(dir.path().join("s/sweep.json"), "{").unwrap();
    sweep(dir.path(), &args).assert().code(4).stderr(contains("sweep.json"));
}

#[test]
fn tags_are_recorded_apart_and_input_is_checked_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    prompts(dir.path(), 4);
    let args = ["--draft-len", "2", "--max-new-tokens", "8", "--ignore-eos", "-q", "--by-tag", "kind"];
    let found = comparison(&mut sweep(dir.path(), &args));
    let cells: Vec<_> = found["cells"].as_array().unwrap().iter().map(|c| (c["tag"].as_str(), c["requests"].as_u64())).collect();
    assert_eq!(cells, [(Some("kind=k0"), Some(2)), (Some("kind=k1"), Some(2))]);

    // Too few steps have no speedup, each tag is ranked apart, and it is said why there are no measured times.
    assert!(found["cells"].as_array().unwrap().iter().all(|c| c["too_few"] == true && c["recorded"]["speedup"].is_null()), "{found}");
    assert_eq!(found["warnings"][0]["code"], "few_requests");
    let text = sweep(dir.path(), &args).assert().success();
    let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
    assert!(text.contains("fastest     of kind=k0, unknown: none of 1 recordings can be compared"), "{text}");
    assert!(text.matches("  too few\n").count() == 2 && text.contains("[1] few_requests: 2 of 2 recordings"), "{text}");

    let bad = |args: &[&str]| sweep_into(dir.path(), "new", args).assert().code(2).stdout("");
    bad(&["--by-tag", "nobody"]).stderr(contains("no prompt has this tag"));
    bad(&["--draft-len", "0"]);
    bad(&["--temperature", "0,-3"]).stderr(contains("temperature"));
    bad(&["--draft", "dspark"]);
    assert!(!dir.path().join("new").exists(), "nothing is made before the whole grid is checked");
}
