//! What the numbers of a report can be, so that a file with impossible ones is refused instead of compared.
//!
//! Two checks: every known key has a range of its own, whatever object it is in ([`check_keys`]); and what a number may be by the others
//! (a union by its rows, a share by its parts) is checked of the report as it was read ([`check_report`]). Keys that this build does not
//! know are passed over.

mod keys;
mod parts;

pub use keys::check_keys;
pub use parts::check_report;

/// Means are rounded.
const SLACK: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::super::source::read_report;
    use super::super::testing::report;
    use super::keys::{Null, Range, rule};
    use crate::metric::report::Report;
    use proptest::prelude::*;
    use serde_json::Value;

    fn read(value: &Value) -> Result<Report, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::fs::write(&path, value.to_string()).unwrap();
        read_report(&path).map_err(|e| e.to_string().replace(&path.display().to_string(), "r.json"))
    }

    /// Paths of all numbers of the analysis, as keys and indices, with the last key.
    fn numbers(value: &Value, path: &str, key: &str, out: &mut Vec<(String, String)>) {
        match value {
            Value::Object(object) => object.iter().for_each(|(k, v)| numbers(v, &format!("{path}/{k}"), k, out)),
            Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| numbers(v, &format!("{path}/{i}"), key, out)),
            Value::Number(_) => out.push((path.to_owned(), key.to_owned())),
            _ => {}
        }
    }

    fn all_numbers(report: &Value) -> Vec<(String, String)> {
        let mut out = Vec::new();
        numbers(report, "", "", &mut out);
        out.retain(|(path, _)| !path.starts_with("/run/") && !path.starts_with("/warnings/"));
        out
    }

    /// `/layers/0/union/mean` as errors write it.
    fn as_said(path: &str) -> String {
        let mut out = String::new();
        for part in path.split('/').skip(1) {
            match part.parse::<usize>() {
                Ok(i) => out.push_str(&format!("[{i}]")),
                Err(_) if out.is_empty() => out.push_str(part),
                Err(_) => out.push_str(&format!(".{part}")),
            }
        }
        out
    }

    #[test]
    fn impossible_numbers_are_refused_by_name() {
        let value = serde_json::to_value(report()).unwrap();
        let with = |path: &str, to: Value| {
            let mut value = value.clone();
            *value.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = to;
            read(&value).unwrap_err()
        };
        assert_eq!(with("/acceptance/tokens_per_step", 0.into()), "r.json: corrupt: acceptance.tokens_per_step: 0 is less than 1");
        assert!(with("/acceptance/tokens_per_step", (-2).into()).contains("acceptance.tokens_per_step: -2 is less than 1"));
        assert!(with("/acceptance/tokens_per_step", 2.75.into()).contains("is not one more than accepted_drafts_mean"));
        assert!(
            with("/acceptance/tokens_per_step_ci95", vec![9, 1].into()).contains("acceptance.tokens_per_step_ci95: [9, 1] is no interval")
        );
        assert!(with("/overall/union/mean", 1e308.into()).contains("overall.union.mean: 1e+308 is larger than any number"));
        assert!(with("/overall/union/mean", Value::Null).contains("overall.union.mean: null where only a number can be"));
        assert!(with("/layers/1/union/mean", 32.5.into()).contains("layers[1].union.mean: 32.5 is above 32, the most of 4 rows of 8"));
        assert!(with("/acceptance/by_position/0", 1.5.into()).contains("acceptance.by_position[0]: 1.5 is not from 0 to 1"));
        assert!(with("/layers/0/marginal/2", 8.5.into()).contains("layers[0].marginal[2]: 8.5 is above 8"));
        assert!(with("/layers/0/prefix_union/0", Value::Null).contains("layers[0].prefix_union[0]: null"));
        assert!(with("/layers/0/k", "8".into()).contains("layers[0].k: not a number"));
        assert!(
            with("/by_request/1/sums/union/0", 100_000.into()).contains("by_request[1].sums: in layer 0 of the list, request 1 has more")
        );
    }

    /// Keys of a schema that are numbers or lists of them.
    fn numeric_keys(schema: &Value, out: &mut Vec<String>) {
        for (key, of) in schema["properties"].as_object().into_iter().flatten() {
            let text = of.to_string();
            if !text.contains("\"properties\"") && (text.contains("\"number\"") || text.contains("\"integer\"")) {
                out.push(key.clone());
            }
        }
        match schema {
            Value::Object(object) => object.values().for_each(|part| numeric_keys(part, out)),
            Value::Array(list) => list.iter().for_each(|part| numeric_keys(part, out)),
            _ => {}
        }
    }

    #[test]
    fn every_number_of_a_report_has_a_range() {
        let mut found = all_numbers(&serde_json::to_value(report()).unwrap());
        let kept: Value = serde_json::from_str(include_str!("../../reports/compat/report.v1.json")).unwrap();
        found.extend(all_numbers(&kept));
        for (path, key) in found {
            assert!(rule(&key).is_some(), "{path}");
        }
        // And every one that the schema speaks of.
        let schema: Value = serde_json::from_str(include_str!("../../reports/schema/report.v1.schema.json")).unwrap();
        let mut keys = Vec::new();
        let definitions = schema["$defs"].as_object().unwrap().iter().filter(|(name, _)| name.as_str() != "run").map(|(_, d)| d);
        definitions.for_each(|definition| numeric_keys(definition, &mut keys));
        assert!(keys.len() > 150, "{}", keys.len());
        for key in keys {
            assert!(rule(&key).is_some(), "{key}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Any number of a real report, made impossible in any way that there is for it, is refused by its path.
        #[test]
        fn a_mutated_report_is_refused(at in any::<prop::sample::Index>(), way in 0usize..5) {
            let mut value = serde_json::to_value(report()).unwrap();
            let numbers = all_numbers(&value);
            let (path, key) = at.get(&numbers);
            let (range, null) = rule(key).unwrap();
            let entry = path.rsplit('/').next().unwrap().parse::<usize>().is_ok();
            let bad: Value = match (way, range) {
                (0, _) => 1e308.into(),
                (1, Range::From(least)) => (least - 0.5).into(),
                (1, Range::Share) => (-0.1).into(),
                (2, Range::Share | Range::UpToOne) => 1.1.into(),
                (3, _) if null == Null::Never || (entry && null == Null::Fine) => Value::Null,
                (_, _) => "x".into(),
            };
            *value.pointer_mut(path).unwrap() = bad;
            let error = read(&value).unwrap_err();
            prop_assert!(error.starts_with("r.json: corrupt: ") && error.contains(&as_said(path)), "{path}: {error}");
        }

        /// Whatever number is put in its place, reading gives a report or says why not.
        #[test]
        fn no_number_panics(at in any::<prop::sample::Index>(), number in any::<f64>(), whole in any::<Option<i64>>()) {
            let mut value = serde_json::to_value(report()).unwrap();
            let numbers = all_numbers(&value);
            let (path, _) = at.get(&numbers);
            *value.pointer_mut(path).unwrap() = whole.map_or_else(|| Value::from(number), Value::from);
            if let Ok(read) = read(&value) {
                let options = super::super::Options { allow: super::super::kind::Kind::ALL.to_vec(), ..Default::default() };
                super::super::diff_reports(&report(), &read, &super::super::rules::defaults(), &options).unwrap();
            }
        }
    }
}
