//! JSON values of a file one after the other, each parsed from memory: the elements of one array, or values on lines or not.

use super::ImportError;
use super::input::open;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, Read};
use std::path::Path;

/// One JSON value of several has at most this many bytes.
pub const MAX_VALUE_BYTES: u64 = 256 << 20;
/// A buffer that has grown beyond this is given back before its value is used.
const KEPT_BYTES: usize = 4 << 20;

/// Hands every JSON value of a file to `take` and gives their number.
///
/// # Errors
/// When the text is not JSON (with line and column), one value is larger than [`MAX_VALUE_BYTES`], or what `take` returns.
pub fn json_values<T: DeserializeOwned>(path: &Path, take: impl FnMut(T) -> Result<(), ImportError>) -> Result<u64, ImportError> {
    json_values_with(path, |text| serde_json::from_slice(text), take)
}

/// [`json_values`] with a parser of one's own.
///
/// # Errors
/// As [`json_values`].
pub fn json_values_with<T>(
    path: &Path,
    parse: impl Fn(&[u8]) -> serde_json::Result<T>,
    mut take: impl FnMut(T) -> Result<(), ImportError>,
) -> Result<u64, ImportError> {
    let mut values = Values::new(path, open(path)?);
    let mut count = 0;
    while let Some(value) = values.next(&parse)? {
        take(value)?;
        count += 1;
    }
    Ok(count)
}

/// A place in the text, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    line: u64,
    column: u64,
}

impl Place {
    /// The place behind this text.
    fn after(self, text: &[u8]) -> Self {
        let lines = text.iter().filter(|&&b| b == b'\n').count() as u64;
        let tail = text.iter().rev().take_while(|&&b| b != b'\n').count() as u64;
        Self { line: self.line + lines, column: if lines == 0 { self.column + tail } else { 1 + tail } }
    }
}

/// Cuts a text into values.
struct Values<'a> {
    path: &'a Path,
    reader: Box<dyn BufRead>,
    place: Place,
    /// Whether the values are elements of one array; `None` before the first byte.
    array: Option<bool>,
    /// Whether every value so far was a line of its own: then its end need not be looked for.
    lines: bool,
    /// Values so far.
    count: u64,
    value: Vec<u8>,
}

/// Where the scan of one value is.
#[derive(Default)]
struct Scan {
    depth: u32,
    string: bool,
    escaped: bool,
    begun: bool,
}

impl Scan {
    /// How many bytes belong to the value, and whether it ends with them. A value that is neither a list nor an object ends
    /// before the first byte that cannot be of it.
    fn take(&mut self, bytes: &[u8]) -> (usize, bool) {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            if self.escaped {
                self.escaped = false;
            } else if self.string {
                match bytes.get(at..).unwrap_or_default().iter().position(|&b| b == b'"' || b == b'\\') {
                    None => return (bytes.len(), false),
                    Some(n) => {
                        at += n;
                        self.escaped = bytes.get(at) == Some(&b'\\');
                        self.string = self.escaped;
                        if !self.string && self.depth == 0 {
                            return (at + 1, true);
                        }
                    }
                }
            } else {
                match byte {
                    b'"' => self.string = true,
                    b'{' | b'[' => self.depth += 1,
                    b'}' | b']' if self.depth > 0 => {
                        self.depth -= 1;
                        if self.depth == 0 {
                            return (at + 1, true);
                        }
                    }
                    b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 && self.begun => return (at, true),
                    _ => {}
                }
            }
            self.begun = true;
            at += 1;
        }
        (at, false)
    }
}

impl<'a> Values<'a> {
    fn new(path: &'a Path, reader: Box<dyn BufRead>) -> Self {
        Self { path, reader, place: Place { line: 1, column: 1 }, array: None, lines: true, count: 0, value: Vec::new() }
    }

    fn wrong(&self, what: &str, place: Place) -> ImportError {
        ImportError::input(self.path, format!("not JSON: {what} at line {} column {}", place.line, place.column))
    }

    /// The next byte that is not white space, which stays.
    fn peek(&mut self) -> Result<Option<u8>, ImportError> {
        loop {
            let buffer = self.reader.fill_buf().map_err(ImportError::io(self.path))?;
            let blank = buffer.iter().take_while(|b| b.is_ascii_whitespace()).count();
            let (found, end) = (buffer.get(blank).copied(), buffer.is_empty());
            self.place = self.place.after(buffer.get(..blank).unwrap_or_default());
            self.reader.consume(blank);
            if found.is_some() || end {
                return Ok(found);
            }
        }
    }

    fn skip(&mut self) {
        self.reader.consume(1);
        self.place.column += 1;
    }

    /// The next value.
    fn next<T>(&mut self, parse: &impl Fn(&[u8]) -> serde_json::Result<T>) -> Result<Option<T>, ImportError> {
        let mut first = self.peek()?;
        if self.array.is_none() {
            self.array = Some(first == Some(b'['));
            if first == Some(b'[') {
                self.skip();
                first = self.peek()?;
            }
        }
        if self.array == Some(true) {
            match (first, self.count) {
                (Some(b']'), _) => {
                    self.skip();
                    self.array = Some(false);
                    return match self.peek()? {
                        None => Ok(None),
                        Some(_) => Err(self.wrong("trailing characters", self.place)),
                    };
                }
                (Some(b','), 1..) => {
                    self.skip();
                    first = self.peek()?;
                }
                (Some(_), 0) => {}
                (Some(_), _) => return Err(self.wrong("expected `,` or `]`", self.place)),
                (None, _) => {}
            }
            if first.is_none() {
                return Err(self.wrong("EOF while parsing a list", self.place));
            }
        }
        if first.is_none() {
            return Ok(None);
        }
        if self.array == Some(false)
            && let Some(value) = self.line(parse)?
        {
            return Ok(Some(value));
        }
        let begin = self.place;
        self.read_value()?;
        self.count += 1;
        let parsed = parse(&self.value).map_err(|error| {
            let line = error.line() as u64;
            let column = error.column() as u64 + if line <= 1 { begin.column - 1 } else { 0 };
            let text = error.to_string();
            let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
            self.wrong(what, Place { line: begin.line + line.max(1) - 1, column })
        });
        self.give_back();
        parsed.map(Some)
    }

    fn give_back(&mut self) {
        if self.value.capacity() > KEPT_BYTES {
            self.value = Vec::new();
        }
    }

    /// The next value if it is all of a line. No text of JSON has a bare line break within a string, so what parses is one value; where
    /// it does not, the line is put back, and values are cut byte by byte from then on.
    fn line<T>(&mut self, parse: &impl Fn(&[u8]) -> serde_json::Result<T>) -> Result<Option<T>, ImportError> {
        if !self.lines {
            return Ok(None);
        }
        self.value.clear();
        let line = (&mut self.reader).take(MAX_VALUE_BYTES + 1).read_until(b'\n', &mut self.value);
        line.map_err(ImportError::io(self.path))?;
        match parse(self.value.trim_ascii_end()) {
            Ok(value) if self.value.len() as u64 <= MAX_VALUE_BYTES => {
                self.place = self.place.after(if self.value.ends_with(b"\n") { b"\n" } else { &[] });
                self.count += 1;
                self.give_back();
                Ok(Some(value))
            }
            _ => {
                self.lines = false;
                let rest = std::mem::replace(&mut self.reader, Box::new(io::empty()));
                self.reader = Box::new(io::Cursor::new(std::mem::take(&mut self.value)).chain(rest));
                Ok(None)
            }
        }
    }

    /// Reads one value's text, to its end or the file's.
    fn read_value(&mut self) -> Result<(), ImportError> {
        self.value.clear();
        let mut scan = Scan::default();
        loop {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ImportError::io(self.path)(error)),
            };
            let (taken, ended) = scan.take(buffer);
            let text = buffer.get(..taken).unwrap_or_default();
            self.place = self.place.after(text);
            self.value.extend_from_slice(text);
            let nothing = buffer.is_empty();
            self.reader.consume(taken);
            if self.value.len() as u64 > MAX_VALUE_BYTES {
                return Err(self.wrong(&format!("one value has more than {} MiB", MAX_VALUE_BYTES >> 20), self.place));
            }
            if ended || nothing {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;
    use std::io::{BufReader, Write};

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn values(bytes: &[u8]) -> Result<Vec<Value>, ImportError> {
        let file = file(bytes);
        let mut found = Vec::new();
        json_values(file.path(), |value: Value| {
            found.push(value);
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn one_object_lines_and_an_array_are_the_same() {
        let want = vec![serde_json::json!({"a": 1}), serde_json::json!({"a": 2})];
        assert_eq!(values(b"{\"a\":1}\n{\"a\":2}\n").unwrap(), want);
        assert_eq!(values(b" [{\"a\": 1},\n {\"a\": 2}]\n").unwrap(), want);
        assert_eq!(values(b"{\n \"a\": 1\n}").unwrap(), want[..1]);
        assert_eq!(values(b"").unwrap(), Vec::<Value>::new());
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(b"{\"a\":1}").unwrap();
        let mut bytes = packed.finish().unwrap();
        let again = bytes.clone();
        bytes.extend(again);
        assert_eq!(values(&bytes).unwrap(), [want[0].clone(), want[0].clone()]);
    }

    #[test]
    fn broken_text_names_its_place() {
        for bad in ["{\"a\":1}\n{\"a\":", "[{\"a\":1},", "[{\"a\":1}] x", "{\"a\":1}\nnothing"] {
            let error = values(bad.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("line") && error.contains("column"), "{bad}: {error}");
        }
    }

    #[test]
    fn places_are_of_the_file() {
        for (text, place) in [
            ("{\"a\":1}\n{\"a\":tru}", "line 2 column 9"),
            ("[{\"a\":1},\n {\"a\":tru}]", "line 2 column 10"),
            ("{\n\"a\": 1,\n\"b\": x}", "line 3 column 6"),
            ("[{\"a\":1} {\"a\":1}]", "expected `,` or `]` at line 1 column 10"),
            ("[{\"a\":1}] x", "trailing characters at line 1 column 11"),
            ("[1,,2]", "line 1 column 4"),
            ("}", "line 1 column 1"),
        ] {
            let error = values(text.as_bytes()).unwrap_err().to_string();
            assert!(error.ends_with(place), "{text}: {error}");
        }
    }

    #[test]
    fn brackets_and_quotes_in_strings_end_nothing() {
        let odd = serde_json::json!({"a": "}]{[,\\\" \\", "b": ["\\", {"c": "\u{e9}\n"}]});
        let text = format!("{odd} {odd}\n[{odd}]");
        assert_eq!(values(text.as_bytes()).unwrap(), [odd.clone(), odd.clone(), serde_json::json!([odd])]);
        assert_eq!(values(b"1 \"x\" true [ ]").unwrap().len(), 4);
    }

    proptest! {
        #[test]
        fn it_agrees_with_the_parser_however_the_text_is_cut(numbers in prop::collection::vec(-9i32..9, 0..8), cut in 1usize..9, array: bool) {
            let all: Vec<Value> = numbers.iter().map(|n| serde_json::json!({"n": n, "s": "\"\\]", "l": [[n], []]})).collect();
            let text = if array {
                serde_json::to_string_pretty(&all).unwrap()
            } else {
                all.iter().map(Value::to_string).collect::<Vec<_>>().join("\n")
            };
            let reader = BufReader::with_capacity(cut, std::io::Cursor::new(text));
            let mut values = Values::new(Path::new("x"), Box::new(reader));
            let mut found = Vec::new();
            while let Some(value) = values.next(&|text: &[u8]| serde_json::from_slice::<Value>(text)).unwrap() {
                found.push(value);
            }
            prop_assert_eq!(found, all);
        }
    }
}
