//! Nested lists of expert ids in a response read without a general parser: they are almost all of it.
//!
//! What is not exactly even lists of whole numbers is left to the general parser, which says what is wrong with it.

use super::reader::Reader;
use super::response::Response;
use super::routed::{MAX_IDS, Routed};

/// The key of the object that stands for lists that were cut out.
pub const PLACEHOLDER: &str = "specprof_lists";
/// The end of `routed_experts` and `prompt_routed_experts`.
const KEY: &[u8] = b"routed_experts\"";

/// A response from its text.
///
/// # Errors
/// When it is not JSON or not a response.
pub fn parse(text: &[u8]) -> serde_json::Result<Response> {
    if let Some((rest, mut lists)) = cut(text)
        && let Ok(mut response) = serde_json::from_slice::<Response>(&rest)
    {
        for routed in response.all_routed() {
            if let Routed::Cut(at) = *routed {
                // Each is there once, or the text has a placeholder of its own.
                *routed = lists.get_mut(at).and_then(Option::take).map_or(Routed::Cut(at), |(shape, ids)| Routed::Nested(shape, ids));
            }
        }
        return Ok(response);
    }
    serde_json::from_slice(text)
}

type Lists = Vec<Option<(Vec<usize>, Vec<i32>)>>;

/// The text with a placeholder for each of the lists; `None` where there are none, or the general parser must look at them.
fn cut(text: &[u8]) -> Option<(Vec<u8>, Lists)> {
    let (mut rest, mut lists) = (Vec::new(), Lists::new());
    let (mut copied, mut at, mut total) = (0, 0, 0usize);
    while let Some(key) = find(text, at, KEY) {
        at = key + KEY.len();
        let mut reader = Reader { text, at };
        if reader.next() != Some(b':') || reader.next() != Some(b'[') {
            // Null, a text, or no key at all: a large text ends the search.
            if lists.is_empty() && text.get(reader.at.checked_sub(1)?) == Some(&b'"') {
                return None;
            }
            continue;
        }
        let begin = reader.at - 1;
        let (shape, ids) = reader.rows()?;
        total += ids.len();
        if total > MAX_IDS {
            return None;
        }
        rest.extend_from_slice(text.get(copied..begin)?);
        rest.extend_from_slice(format!("{{\"{PLACEHOLDER}\":{}}}", lists.len()).as_bytes());
        lists.push(Some((shape, ids)));
        (copied, at) = (reader.at, reader.at);
    }
    rest.extend_from_slice(text.get(copied..)?);
    (!lists.is_empty()).then_some((rest, lists))
}

fn find(text: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    let first = *what.first()?;
    let mut at = from;
    loop {
        at += text.get(at..)?.iter().position(|&b| b == first)?;
        if text.get(at..)?.starts_with(what) {
            return Some(at);
        }
        at += 1;
    }
}

impl Reader<'_> {
    /// Rows, layers and ids of a list of lists of lists whose first bracket was read: the lengths, then the numbers.
    fn rows(&mut self) -> Option<(Vec<usize>, Vec<i32>)> {
        let mut ids = Vec::new();
        let (mut rows, mut layers, mut width) = (0usize, None, None);
        loop {
            if self.next()? != b'[' {
                return None;
            }
            let mut here = 0usize;
            loop {
                if self.next()? != b'[' {
                    return None;
                }
                let before = ids.len();
                let mut byte = self.next()?;
                loop {
                    ids.push(self.number(byte)?);
                    match self.next()? {
                        b',' => byte = self.next()?,
                        b']' => break,
                        _ => return None,
                    }
                }
                let found = ids.len() - before;
                if *width.get_or_insert(found) != found {
                    return None;
                }
                here += 1;
                match self.next()? {
                    b',' => {}
                    b']' => break,
                    _ => return None,
                }
            }
            if *layers.get_or_insert(here) != here {
                return None;
            }
            rows += 1;
            match self.next()? {
                b',' => {}
                b']' => return Some((vec![rows, layers?, width?], ids)),
                _ => return None,
            }
        }
    }

    /// A whole number of at most nine digits, from its first byte.
    fn number(&mut self, first: u8) -> Option<i32> {
        let negative = first == b'-';
        let first = if negative { self.text.get(self.at).copied().inspect(|_| self.at += 1)? } else { first };
        let mut number = i32::from(first.wrapping_sub(b'0'));
        if number > 9 {
            return None;
        }
        let begin = self.at;
        while let Some(digit) = self.text.get(self.at).map(|b| i32::from(b.wrapping_sub(b'0'))).filter(|d| *d <= 9) {
            // JSON has no leading zeros.
            if number == 0 || self.at - begin >= 8 {
                return None;
            }
            number = number * 10 + digit;
            self.at += 1;
        }
        Some(if negative { -number } else { number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn routed(text: &str) -> (Routed, Routed) {
        let by = |response: Response| {
            let mut response = response.unwrapped();
            response.all_routed().into_iter().find(|r| **r != Routed::Absent).cloned().unwrap_or_default()
        };
        (by(parse(text.as_bytes()).unwrap()), by(serde_json::from_str(text).unwrap()))
    }

    #[test]
    fn lists_are_what_the_general_parser_reads() {
        for lists in
            ["[[[1,2]],[[3,-1]]]", "[ [ [0 , 255 ] ] ]", "[[[7]]]", "[]", "[[]]", "[[1]]", "null", "[[[123456789]]]", "[[[1234567890]]]"]
        {
            for text in [
                format!(r#"{{"choices":[{{"text":"\"routed_experts\":[","routed_experts":{lists},"x":1}}]}}"#),
                format!(r#"{{"response":{{"body":{{"meta_info":{{"routed_experts" : {lists}}}}}}}}}"#),
                format!(r#"{{"prompt_routed_experts":{lists}}}"#),
            ] {
                let (fast, general) = routed(&text);
                assert_eq!(fast, general, "{text}");
            }
        }
        assert!(cut(br#"{"routed_experts":[[[1,2]],[[3,4]]]}"#).is_some());
        // Uneven, or no whole numbers: the general parser says so.
        for bad in ["[[[1,2]],[[3]]]", "[[[1.5]]]", "[[[01]]]", "[[[1,]]]", "[[[1]],"] {
            let text = format!(r#"{{"routed_experts":{bad}}}"#);
            assert_eq!(cut(text.as_bytes()), None, "{bad}");
            let message = |e: serde_json::Error| e.to_string();
            assert_eq!(
                parse(text.as_bytes()).map_err(message).unwrap_err(),
                serde_json::from_str::<Response>(&text).map_err(message).unwrap_err()
            );
        }
        // A placeholder in the text itself stands for nothing.
        let forged = format!(r#"{{"routed_experts":{{"{PLACEHOLDER}":7}},"prompt_routed_experts":[[[1,2]]]}}"#);
        let mut response = parse(forged.as_bytes()).unwrap();
        assert!(response.all_routed().into_iter().any(|r| r.clone().decode(None, None).is_err()));
    }

    proptest! {
        #[test]
        fn noise_never_panics(tail in prop::collection::vec(prop::sample::select(b"{}[]\",:- 019".to_vec()), 0..40)) {
            let mut text = b"{\"routed_experts\":[[[".to_vec();
            text.extend(tail);
            prop_assert_eq!(parse(&text).is_ok(), serde_json::from_slice::<Response>(&text).is_ok());
        }
    }
}
