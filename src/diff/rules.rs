//! A file of rules, kept in the user's repository.
//!
//! ```text
//! # one rule a line; everything behind a # is a remark
//! union.mean > +3%
//! layer:*:union.p99 > +10%
//! allow device, workload
//! ```

use super::kind::Kind;
use super::rule::Rule;
use crate::trace::input_file;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Largest file of rules.
const MAX_BYTES: u64 = 1 << 20;
/// Most rules: each is compared in every layer.
const MAX_RULES: usize = 1000;

/// Where a rule is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The rules that apply when none are given.
    Default,
    /// `--fail-on`.
    CommandLine,
    /// A line of a file, from 1.
    File {
        /// The file as it was given.
        path: PathBuf,
        /// The line.
        line: usize,
    },
}

/// Rules and permissions, with their origins.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rules {
    /// The rules, in order.
    pub rules: Vec<(Rule, Origin)>,
    /// What may differ.
    pub allow: Vec<Kind>,
}

/// Why a file of rules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// It cannot be read.
    #[error("{path}: cannot read: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line of it is wrong.
    #[error("{path}:{line}: {reason}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

/// What fails when nobody says otherwise: the union or the step ratio up by 2 %, tokens per step down by 2 %.
pub fn defaults() -> Rules {
    let texts = ["union.mean>+2%", "acceptance.tokens_per_step<-2%", "cost.step_ratio>+2%"];
    let rule = |text: &str| Rule::parse(text).ok().map(|rule| (rule, Origin::Default));
    Rules { rules: texts.into_iter().filter_map(rule).collect(), allow: Vec::new() }
}

/// The kinds of a list of words, separated by commas or blanks.
///
/// # Errors
/// One line that names the word and what there is.
pub fn kinds(list: &str) -> Result<Vec<Kind>, String> {
    let words = list.split([',', ' ', '\t']).filter(|word| !word.is_empty());
    let all = || Kind::ALL.map(Kind::as_str).join(", ");
    words.map(|word| Kind::parse(word).ok_or_else(|| format!("`{}` is nothing to allow; write {}", word.escape_debug(), all()))).collect()
}

/// Reads a file of rules.
///
/// # Errors
/// When it cannot be read, or a line is neither a rule, a permission nor a remark.
pub fn read(path: &Path) -> Result<Rules, RulesError> {
    let io = |source| RulesError::Io { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    input_file::open(path).map_err(io)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    let wrong = |line: usize, reason: String| RulesError::Line { path: path.to_owned(), line, reason };
    if bytes.len() as u64 > MAX_BYTES {
        return Err(wrong(1, "too large for a file of rules".into()));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong(1, "not a text in UTF-8".into()))?;
    let mut rules = Rules::default();
    for (line, text) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
        let text = text.split('#').next().unwrap_or_default().trim();
        if text.is_empty() {
            continue;
        }
        match text.split_once([' ', '\t']) {
            Some(("allow", list)) => rules.allow.extend(kinds(list).map_err(|reason| wrong(line, reason))?),
            _ => {
                let rule = Rule::parse(text).map_err(|e| wrong(line, e.to_string()))?;
                rules.rules.push((rule, Origin::File { path: path.to_owned(), line }));
            }
        }
        if rules.rules.len() > MAX_RULES {
            return Err(wrong(line, format!("more than {MAX_RULES} rules")));
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &[u8]) -> Result<Rules, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("specprof.rules");
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|e| e.to_string().replace(&dir.path().display().to_string(), ""))
    }

    #[test]
    fn a_file_has_rules_permissions_and_remarks() {
        let rules = file(b"# gates\r\n\r\nunion.mean > +3%  # why\r\nallow device, workload\n\tlayer:*:union.p99>+10%\n").unwrap();
        assert_eq!(rules.allow, [Kind::Device, Kind::Workload]);
        let shown: Vec<_> = rules.rules.iter().map(|(rule, origin)| (rule.to_string(), origin.clone())).collect();
        assert_eq!(shown[0].0, "union.mean>+3%");
        assert!(matches!(&shown[1], (rule, Origin::File { line: 5, .. }) if rule == "layer:*:union.p99>+10%"));
        assert_eq!(file(b"").unwrap(), Rules::default());
    }

    #[test]
    fn errors_name_the_line() {
        assert!(file(b"\nunion.mean\n").unwrap_err().starts_with("/specprof.rules:2: rule `union.mean`: no comparison"));
        assert!(file(b"allow everything").unwrap_err().contains(":1: `everything` is nothing to allow; write model, draft_len"));
        assert!(file(b"\xff\xfe").unwrap_err().contains("UTF-8"));
        assert!(file(&vec![b'#'; 2 << 20]).unwrap_err().contains("too large"));
        assert!(read(Path::new("/nowhere/rules")).unwrap_err().to_string().starts_with("/nowhere/rules: cannot read"));
        let many = "union.mean>+3%\n".repeat(1001);
        assert!(file(many.as_bytes()).unwrap_err().contains(":1001: more than"));
    }

    #[test]
    fn the_defaults_are_rules() {
        let shown: Vec<String> = defaults().rules.iter().map(|(r, _)| r.to_string()).collect();
        assert_eq!(shown, ["union.mean>+2%", "acceptance.tokens_per_step<-2%", "cost.step_ratio>+2%"]);
    }
}
