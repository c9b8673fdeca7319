//! A step's `routes` read without a general parser: almost all of a file are these numbers.
//!
//! What is not exactly nested lists of small numbers is left to the general parser, which says what is wrong with it.

use super::jsonl_table::Flat;
use super::reader::Reader;

/// A line without its `routes`, and these; `None` where the general parser must look at it.
pub fn cut_routes(line: &[u8]) -> Option<(Vec<u8>, Flat<u16>)> {
    let begin = value_of(line, b"routes")?;
    let mut reader = Reader { text: line.get(begin..)?, at: 0 };
    let flat = reader.table()?;
    let mut rest = Vec::with_capacity(line.len() - reader.at + 4);
    rest.extend_from_slice(line.get(..begin)?);
    // The key stays, so that a second one is found.
    rest.extend_from_slice(b"null");
    rest.extend_from_slice(line.get(begin + reader.at..)?);
    Some((rest, flat))
}

/// Where the value of a key of the outermost object begins.
fn value_of(line: &[u8], key: &[u8]) -> Option<usize> {
    let (mut depth, mut at) = (0u32, 0);
    while let Some(&byte) = line.get(at) {
        at += 1;
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            b'"' => {
                let begin = at;
                loop {
                    match line.get(at)? {
                        b'"' => break,
                        b'\\' => at += 2,
                        _ => at += 1,
                    }
                }
                let word = line.get(begin..at)?;
                at += 1;
                if depth == 1 && word == key {
                    let blank =
                        |from: usize| line.get(from..).map(|rest| from + rest.iter().take_while(|b| b.is_ascii_whitespace()).count());
                    let colon = blank(at)?;
                    if line.get(colon) == Some(&b':') {
                        return blank(colon + 1);
                    }
                }
            }
            _ => {}
        }
    }
    None
}

impl Reader<'_> {
    fn is_null(&mut self) -> Option<()> {
        let rest = self.text.get(self.at..)?.strip_prefix(b"ull")?;
        self.at = self.text.len() - rest.len();
        Some(())
    }

    /// `[a, b, ...]`, of which `entry` reads each from its first byte; after it comes a comma or the end.
    fn list(&mut self, mut entry: impl FnMut(&mut Self, u8) -> Option<()>) -> Option<()> {
        let mut first = self.next()?;
        if first == b']' {
            return Some(());
        }
        loop {
            entry(self, first)?;
            match self.next()? {
                b',' => first = self.next()?,
                b']' => return Some(()),
                _ => return None,
            }
        }
    }

    fn table(&mut self) -> Option<Flat<u16>> {
        let mut flat = Flat::default();
        if self.next()? != b'[' {
            return None;
        }
        self.list(|reader, first| {
            match first {
                b'n' => reader.is_null()?,
                b'[' => reader.list(|reader, first| reader.row(first, &mut flat))?,
                _ => return None,
            }
            flat.end_layer();
            Some(())
        })?;
        Some(flat)
    }

    fn row(&mut self, first: u8, flat: &mut Flat<u16>) -> Option<()> {
        match first {
            b'n' => {
                self.is_null()?;
                flat.unknown_row();
                return Some(());
            }
            b'[' => {}
            _ => return None,
        }
        let values = flat.values_mut();
        self.list(|reader, first| {
            // JSON has no leading zeros.
            let mut number = u32::from(first.wrapping_sub(b'0'));
            if number > 9 {
                return None;
            }
            while let Some(digit) = reader.text.get(reader.at).map(|b| u32::from(b.wrapping_sub(b'0'))).filter(|d| *d <= 9) {
                if number == 0 {
                    return None;
                }
                number = number * 10 + digit;
                if number > u32::from(u16::MAX) {
                    return None;
                }
                reader.at += 1;
            }
            values.push(number as u16);
            Some(())
        })?;
        flat.end_row();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::jsonl_table::Table;
    use super::*;
    use proptest::prelude::*;

    /// The general parser's answer.
    fn general(routes: &str) -> Option<Flat<u16>> {
        match serde_json::from_str::<Table<u16>>(routes) {
            Ok(Table::Nested(flat)) => Some(flat),
            _ => None,
        }
    }

    fn cut(routes: &str) -> Option<Flat<u16>> {
        let line = format!(r#"{{"type":"step","s":"\"routes\":[","x":{{"routes":1}}, "routes" : {routes},"z":[3]}}"#);
        let (rest, flat) = cut_routes(line.as_bytes())?;
        let rest: serde_json::Value = serde_json::from_slice(&rest).unwrap();
        assert_eq!((&rest["routes"], &rest["z"][0], &rest["x"]["routes"]), (&serde_json::Value::Null, &3.into(), &1.into()));
        Some(flat)
    }

    #[test]
    fn it_reads_what_the_general_parser_reads() {
        for routes in ["[]", "[[]]", "[[[]]]", "[null,[[1,2],null, [65535,0] ] , [ ]]", "[[[1,2],[3,4]],[[5,6],[7,8]]]"] {
            assert_eq!((cut(routes), cut(routes).is_some()), (general(routes), true), "{routes}");
        }
        // Left to the general parser, valid or not.
        for routes in
            ["null", "\"AAAA\"", "3", "[3]", "[[3]]", "[[[01]]]", "[[[65536]]]", "[[[-1]]]", "[[[1.5]]]", "[[[1 2]]]", "[[[1,]]]", "[[["]
        {
            assert_eq!(cut(routes), None, "{routes}");
        }
        assert_eq!(cut_routes(br#"{"type":"step","tokens":[1]}"#), None);
        assert_eq!(cut_routes(br#"{"a":"routes"}"#), None);
    }

    proptest! {
        #[test]
        fn it_agrees_on_any_nesting(layers in prop::collection::vec(prop::option::of(prop::collection::vec(prop::option::of(prop::collection::vec(any::<u16>(), 0..4)), 0..4)), 0..4)) {
            let text = serde_json::to_string(&layers).unwrap();
            prop_assert_eq!(cut(&text), general(&text));
            let pretty = serde_json::to_string_pretty(&layers).unwrap();
            prop_assert_eq!(cut(&pretty), general(&pretty));
        }

        #[test]
        fn noise_never_panics(line in prop::collection::vec(prop::sample::select(b"{}[]\",:\\ routes1n".to_vec()), 0..40)) {
            let _ = cut_routes(&line);
        }
    }
}
