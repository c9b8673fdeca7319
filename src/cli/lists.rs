//! Lists of numbers on a command line.

use std::str::FromStr;

/// Longest list: more numbers are none that somebody wanted.
const LONGEST: usize = 4096;

/// Numbers and ranges, such as `1,2,4`, `1 2 4`, `1-8` or `1..=8`; as elsewhere, `1..8` ends before 8.
///
/// # Errors
/// A sentence naming the part that is not a number from 1 to `most`, or a range of such.
pub(super) fn numbers(text: &str, most: u16) -> Result<Vec<u16>, String> {
    let number = |s: &str| match u16::from_str(s.trim()) {
        Ok(n) if (1..=most).contains(&n) => Ok(n),
        _ => Err(format!("`{}` is not a number from 1 to {most}", s.trim())),
    };
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let words = part.split_whitespace();
        if words.clone().next().is_none() {
            return Err(format!("`{text}`: a number is missing"));
        }
        for word in words {
            let inclusive = word.split_once("..=").or_else(|| word.split_once("..").is_none().then(|| word.split_once('-')).flatten());
            let (first, last) = match (inclusive, word.split_once("..")) {
                (Some((first, last)), _) => (number(first)?, number(last)?),
                // Its end may be one beyond the most.
                (None, Some((first, end))) => {
                    let end = end.parse().ok().and_then(|end: u16| end.checked_sub(1));
                    (number(first)?, end.map_or_else(|| number(""), |last| number(&last.to_string()))?)
                }
                (None, None) => (number(word)?, number(word)?),
            };
            if first > last {
                return Err(format!("`{word}` runs backwards or is empty"));
            }
            numbers.extend(first..=last);
            if numbers.len() > LONGEST {
                return Err(format!("more than {LONGEST} numbers"));
            }
        }
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges() {
        for (text, wanted) in [
            ("4", &[4][..]),
            ("1,2,4,8", &[1, 2, 4, 8]),
            ("1 2\t4", &[1, 2, 4]),
            ("1, 2 ,4", &[1, 2, 4]),
            ("2-4,9,3", &[2, 3, 4, 9, 3]),
            ("2..=4", &[2, 3, 4]),
            ("2..4 16", &[2, 3, 16]),
            ("14..17", &[14, 15, 16]),
            ("7-7", &[7]),
        ] {
            assert_eq!(numbers(text, 16).unwrap(), wanted, "{text}");
        }
        for wrong in
            ["", " ", "0", "17", "4-2", "x", "2-", "-3", "1,,2", "1,2,", "4..4", "..3", "3..", "1..=", "0..3", "15..18", "1-2-3", "1.5"]
        {
            assert!(numbers(wrong, 16).is_err(), "{wrong:?}");
        }
        assert!(numbers("5-70000", u16::MAX).is_err() && numbers("1-9999", u16::MAX).unwrap_err().contains("more than"));
        assert!(numbers("1,x", 16).unwrap_err().contains("`x` is not a number from 1 to 16"));
    }
}
