//! `specprof doctor`.

use assert_cmd::Command;

#[test]
fn doctor_says_the_same_in_text_and_json() {
    let json = Command::cargo_bin("specprof").unwrap().args(["doctor", "--json"]).output().unwrap();
    assert!(json.status.success());
    let report: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let text = String::from_utf8(Command::cargo_bin("specprof").unwrap().arg("doctor").output().unwrap().stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() >= 5);
    let narrow = Command::cargo_bin("specprof").unwrap().arg("doctor").env("COLUMNS", "80").output().unwrap().stdout;
    for line in String::from_utf8(narrow).unwrap().lines() {
        // Only a word that has no blank to break at, as a path, may stand out.
        let longest = line.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
        assert!(line.chars().count() <= longest.max(54) + 26, "{line}");
    }
    for check in checks {
        assert!(text.contains(check["name"].as_str().unwrap()), "{check}");
        assert!(["ok", "warning", "unavailable"].contains(&check["status"].as_str().unwrap()));
        assert!(!check["message"].as_str().unwrap().is_empty());
    }
}
