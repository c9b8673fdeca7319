//! Rules: what must not happen to a number.
//!
//! ```text
//! [layer:LAYERS:]METRIC OP LIMIT
//! LAYERS  *  or a number, or FIRST-LAST
//! OP      >  <  >=  <=            the comparison that makes the rule fail
//! LIMIT   +3% -2%                 change relative to the base
//!         +0.5 -0.1               change in the number's own unit
//!         2.4                     the candidate's number itself, whatever the base has; 40% of a share
//! ```

use super::measure::{is_known, is_share};
use std::fmt;

/// Longest rule: longer ones are not written by people.
const MAX_LENGTH: usize = 200;

/// Which layers a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layers {
    /// The whole run.
    Run,
    /// Every layer, each on its own.
    All,
    /// Layers from one to another, both included.
    Range(u16, u16),
}

impl Layers {
    /// Whether a measure of this layer (`None`: of the whole run) is meant.
    pub fn matches(self, layer: Option<u16>) -> bool {
        match (self, layer) {
            (Self::Run, None) | (Self::All, Some(_)) => true,
            (Self::Range(first, last), Some(layer)) => (first..=last).contains(&layer),
            _ => false,
        }
    }
}

/// What makes a rule fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// More than the limit.
    Above,
    /// Less than the limit.
    Below,
    /// The limit or more.
    AtLeast,
    /// The limit or less.
    AtMost,
}

impl Op {
    fn as_str(self) -> &'static str {
        match self {
            Self::Above => ">",
            Self::Below => "<",
            Self::AtLeast => ">=",
            Self::AtMost => "<=",
        }
    }

    /// Whether large numbers are what fails.
    pub fn is_upper(self) -> bool {
        matches!(self, Self::Above | Self::AtLeast)
    }

    /// Whether a number without uncertainty fails.
    pub fn fails(self, value: f64, limit: f64) -> bool {
        match self {
            Self::Above => value > limit,
            Self::Below => value < limit,
            Self::AtLeast => value >= limit,
            Self::AtMost => value <= limit,
        }
    }
}

/// What the limit is about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// candidate / base - 1.
    Relative(f64),
    /// candidate - base.
    Change(f64),
    /// The candidate's number.
    Value(f64),
}

/// One rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Which layers.
    pub layers: Layers,
    /// Name of the number, as in a measure's path.
    pub path: String,
    /// The comparison.
    pub op: Op,
    /// Its other side.
    pub limit: Limit,
}

/// Why a text is no rule: one line that quotes it and says what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rule `{rule}`: {reason}")]
pub struct RuleError {
    /// The text, shortened.
    pub rule: String,
    /// What is wrong and how it should be.
    pub reason: String,
}

impl Rule {
    /// Parses a rule. Blanks around its parts do not matter.
    ///
    /// # Errors
    /// When it is none, or is about a number that no report has.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let shown: String = text.trim().chars().take(MAX_LENGTH).map(|c| if c.is_control() { '?' } else { c }).collect();
        parse(text.trim()).map_err(|reason| RuleError { rule: shown, reason })
    }
}

fn parse(text: &str) -> Result<Rule, String> {
    if text.len() > MAX_LENGTH {
        return Err(format!("longer than {MAX_LENGTH} bytes"));
    }
    let at = text.find(['<', '>']).ok_or("no comparison; write METRIC>LIMIT or METRIC<LIMIT, as `union.mean>+3%`")?;
    let (left, right) = text.split_at(at);
    let op = match (right.starts_with('>'), right[1..].starts_with('=')) {
        (true, false) => Op::Above,
        (false, false) => Op::Below,
        (true, true) => Op::AtLeast,
        (false, true) => Op::AtMost,
    };
    let written = right[op.as_str().len()..].trim();
    let limit = limit(written)?;
    let left = left.trim();
    let (layers, path) = match left.strip_prefix("layer:") {
        Some(rest) => {
            let (layers, path) = rest.split_once(':').ok_or("write layer:LAYERS:METRIC, as `layer:*:union.mean>+10%`")?;
            (self::layers(layers.trim())?, path.trim())
        }
        None => (Layers::Run, left),
    };
    match is_known(&bare(path)) {
        None => Err(format!("no report has the number `{path}`; `specprof diff --format json` lists them, as `union.mean`")),
        // A sign forgotten would turn a change into a value that no run is beyond: such a rule could never fail.
        Some(_)
            if let Limit::Value(value) = limit
                && written.ends_with('%')
                && !is_share(&bare(path)) =>
        {
            let (sign, op) = (if op.is_upper() { '+' } else { '-' }, op.as_str());
            Err(format!("`{path}` is no share; write `{op}{sign}{written}` for a change, `{op}{value}` for a value"))
        }
        Some(false) if layers != Layers::Run => Err(format!("`{path}` is not a number of layers; write it without `layer:`")),
        Some(_) => Ok(Rule { layers, path: path.to_owned(), op, limit }),
    }
}

/// The name with its indices left out; what is no index stays and makes the name unknown.
fn bare(path: &str) -> String {
    let mut out = String::new();
    for (i, piece) in path.split('[').enumerate() {
        match piece.strip_suffix(']') {
            Some(index) if i > 0 && !index.is_empty() && index.len() < 4 && index.bytes().all(|b| b.is_ascii_digit()) => out.push_str("[]"),
            _ if i == 0 => out.push_str(piece),
            _ => {
                out.push('[');
                out.push_str(piece);
            }
        }
    }
    out
}

fn layers(text: &str) -> Result<Layers, String> {
    let number = |word: &str| {
        let digits = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| word.parse::<u16>().ok()).flatten().ok_or_else(|| format!("`{text}` is no layer; write *, a number, or FIRST-LAST"))
    };
    match text.split_once('-') {
        _ if text == "*" => Ok(Layers::All),
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            if first > last { Err(format!("layers {first}-{last} are none; write {last}-{first}")) } else { Ok(Layers::Range(first, last)) }
        }
        None => number(text).map(|layer| Layers::Range(layer, layer)),
    }
}

fn limit(text: &str) -> Result<Limit, String> {
    let wrong = || format!("`{text}` is no limit; write a change (+3%, -0.5) or a value (2.4)");
    let (number, percent) = match text.strip_suffix('%') {
        Some(number) => (number.trim_end(), true),
        None => (text, false),
    };
    let signed = number.starts_with(['+', '-']);
    let digits = number.strip_prefix(['+', '-']).unwrap_or(number);
    // Plain decimals only: `inf`, `nan` and exponents are slips, not limits.
    let plain = digits.bytes().all(|b| b.is_ascii_digit() || b == b'.') && digits.bytes().any(|b| b.is_ascii_digit());
    let value: f64 = if plain && digits.len() <= 20 { number.parse().map_err(|_| wrong())? } else { return Err(wrong()) };
    Ok(match (signed, percent) {
        (true, true) => Limit::Relative(value / 100.0),
        (true, false) => Limit::Change(value),
        (false, true) => Limit::Value(value / 100.0),
        (false, false) => Limit::Value(value),
    })
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layers {
            Layers::Run => {}
            Layers::All => f.write_str("layer:*:")?,
            Layers::Range(first, last) if first == last => write!(f, "layer:{first}:")?,
            Layers::Range(first, last) => write!(f, "layer:{first}-{last}:")?,
        }
        write!(f, "{}{}", self.path, self.op.as_str())?;
        match self.limit {
            // A percentage as it was typed: 3 / 100 * 100 need not be 3.
            Limit::Relative(v) => write!(f, "{:+}%", percent(v)),
            Limit::Change(v) => write!(f, "{v:+}"),
            Limit::Value(v) => write!(f, "{v}"),
        }
    }
}

fn percent(share: f64) -> f64 {
    (share * 1e12).round() / 1e10
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rules_of_the_manual() {
        let rule = |text: &str| Rule::parse(text).unwrap();
        let is =
            |text: &str, layers, path: &str, op, limit| assert_eq!(rule(text), Rule { layers, path: path.into(), op, limit }, "{text}");
        is("union.mean>+3%", Layers::Run, "union.mean", Op::Above, Limit::Relative(0.03));
        is(" acceptance.tokens_per_step < -2 % ", Layers::Run, "acceptance.tokens_per_step", Op::Below, Limit::Relative(-0.02));
        is("layer:*:union.p99>+10%", Layers::All, "union.p99", Op::Above, Limit::Relative(0.1));
        is("cost.verify_ratio>2.4", Layers::Run, "cost.verify_ratio", Op::Above, Limit::Value(2.4));
        is("layer:7:wasted_mean>=+0.5", Layers::Range(7, 7), "wasted_mean", Op::AtLeast, Limit::Change(0.5));
        is("layer:2-5:marginal[1]<=-0.25", Layers::Range(2, 5), "marginal[1]", Op::AtMost, Limit::Change(-0.25));
        is("acceptance.by_position[0]<40%", Layers::Run, "acceptance.by_position[0]", Op::Below, Limit::Value(0.4));
        assert!(Layers::Range(2, 5).matches(Some(5)) && !Layers::Range(2, 5).matches(Some(6)) && !Layers::Range(2, 5).matches(None));
        assert!(Layers::All.matches(Some(0)) && !Layers::All.matches(None) && Layers::Run.matches(None) && !Layers::Run.matches(Some(1)));
    }

    #[test]
    fn errors_say_what_to_write() {
        for (text, says) in [
            ("", "no comparison"),
            ("union.mean", "union.mean>+3%"),
            ("unoin.mean>+3%", "no report has the number `unoin.mean`"),
            ("union>+3%", "no report has"),
            ("union.mean>", "no limit"),
            ("union.mean>+inf%", "no limit"),
            ("union.mean>>3", "no limit"),
            ("union.mean>1e3", "no limit"),
            ("layer:x:union.mean>+3%", "no layer"),
            ("layer:70000:union.mean>+3%", "no layer"),
            ("layer:5-2:union.mean>+3%", "write 2-5"),
            ("layer:union.mean>+3%", "layer:LAYERS:METRIC"),
            ("layer:*:acceptance.tokens_per_step<-2%", "not a number of layers"),
            ("marginal[x]>1", "no report has"),
            ("marginal>1", "no report has"),
            ("pairwise[1]>1", "no report has"),
            ("acceptance.tokens_per_step<2%", "write `<-2%` for a change, `<0.02` for a value"),
            ("layer:*:union.mean>=10%", "write `>=+10%` for a change, `>=0.1` for a value"),
        ] {
            let error = Rule::parse(text).unwrap_err().to_string();
            assert!(error.contains(says) && error.lines().count() == 1, "{text}: {error}");
        }
        assert!(Rule::parse(&"x".repeat(1000)).unwrap_err().to_string().len() < 300);
    }

    fn any_rule() -> impl Strategy<Value = Rule> {
        let layers = prop_oneof![Just(Layers::Run), Just(Layers::All), (0u16..50, 0u16..50).prop_map(|(a, b)| Layers::Range(a, a + b))];
        let path =
            prop_oneof![Just("union.mean"), Just("union.p99"), Just("marginal[3]"), Just("pairwise[0][12]"), Just("load.max_over_mean")];
        let op = prop_oneof![Just(Op::Above), Just(Op::Below), Just(Op::AtLeast), Just(Op::AtMost)];
        let limit = prop_oneof![
            (-10_000i32..10_000).prop_map(|v| Limit::Relative(f64::from(v) / 100.0 / 100.0)),
            (-10_000i32..10_000).prop_map(|v| Limit::Change(f64::from(v) / 8.0)),
            (0i32..10_000).prop_map(|v| Limit::Value(f64::from(v) / 8.0)),
        ];
        (layers, path, op, limit).prop_map(|(layers, path, op, limit)| Rule { layers, path: path.into(), op, limit })
    }

    proptest! {
        #[test]
        fn a_shown_rule_is_the_rule(rule in any_rule()) {
            let back = Rule::parse(&rule.to_string()).unwrap();
            prop_assert_eq!((back.layers, &back.path, back.op), (rule.layers, &rule.path, rule.op));
            match (back.limit, rule.limit) {
                (Limit::Relative(a), Limit::Relative(b)) => prop_assert!((a - b).abs() < 1e-12),
                (a, b) => prop_assert_eq!(a, b),
            }
            prop_assert_eq!(back.to_string(), rule.to_string());
        }

        #[test]
        fn any_text_is_a_rule_or_one_line_of_error(text in "\\PC{0,60}|[a-z.:*<>=+%0-9\\[\\]-]{0,40}") {
            if let Err(error) = Rule::parse(&text) {
                prop_assert_eq!(error.to_string().lines().count().max(1), 1);
            }
        }
    }
}
