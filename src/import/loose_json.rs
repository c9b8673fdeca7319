//! A reader of JSON that is not quite JSON, one token after the other.
//!
//! Profilers write control characters and single backslashes into texts, `nan` and `inf` where numbers belong, and end in the
//! middle when the process ends. All of that is read; the repairs are counted. What cannot be read as anything is an error
//! with its byte.

use std::io::{self, BufRead};

/// A text or number has at most this many bytes; the rest of a longer text is dropped.
const MAX_TOKEN: usize = 64 << 10;
/// Deeper nesting is not of a profile.
const MAX_DEPTH: usize = 64;

/// Why reading stopped.
#[derive(Debug)]
pub enum Stop {
    /// The text ended within a value.
    Cut,
    /// It cannot be read.
    Wrong(String),
    /// The file cannot be read.
    Io(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        // A packed file that was cut off is a text that was cut off.
        if error.kind() == io::ErrorKind::UnexpectedEof { Self::Cut } else { Self::Io(error) }
    }
}

/// The reader.
pub struct Loose<R> {
    reader: R,
    at: u64,
    /// Backslashes, words and control characters that were let pass.
    pub repaired: u64,
}

impl<R: BufRead> Loose<R> {
    /// At the begin of a text.
    pub fn new(reader: R) -> Self {
        Self { reader, at: 0, repaired: 0 }
    }

    /// An error at this place.
    pub fn wrong(&self, what: &str) -> Stop {
        Stop::Wrong(format!("byte {}: {what}", self.at))
    }

    fn peek_raw(&mut self) -> Result<Option<u8>, Stop> {
        loop {
            match self.reader.fill_buf() {
                Ok(buffer) => return Ok(buffer.first().copied()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn bump(&mut self) {
        self.reader.consume(1);
        self.at += 1;
    }

    /// The next byte that is not white space, which stays.
    pub fn peek(&mut self) -> Result<Option<u8>, Stop> {
        loop {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            if buffer.is_empty() {
                return Ok(None);
            }
            let blank = buffer.iter().take_while(|b| b.is_ascii_whitespace()).count();
            let found = buffer.get(blank).copied();
            self.reader.consume(blank);
            self.at += blank as u64;
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// Takes this byte, when it is the next one.
    pub fn take(&mut self, byte: u8) -> Result<bool, Stop> {
        let is = self.peek()?.ok_or(Stop::Cut)? == byte;
        if is {
            self.bump();
        }
        Ok(is)
    }

    /// Goes on to the next element of a list or object that was opened; `false` at its end. `first` is of the caller.
    pub fn next(&mut self, close: u8, first: &mut bool) -> Result<bool, Stop> {
        let byte = self.peek()?.ok_or(Stop::Cut)?;
        if byte == close {
            self.bump();
            return Ok(false);
        }
        if byte == b',' {
            self.bump();
            *first = false;
            // A comma at the end of a list is let pass.
            if self.peek()?.ok_or(Stop::Cut)? == close {
                self.bump();
                self.repaired += 1;
                return Ok(false);
            }
            return Ok(true);
        }
        if std::mem::replace(first, false) { Ok(true) } else { Err(self.wrong("`,` or the end of a list was to be here")) }
    }

    /// Reads a text into `out`, in UTF-8.
    pub fn text(&mut self, out: &mut String) -> Result<(), Stop> {
        out.clear();
        if !self.take(b'"')? {
            return Err(self.wrong("a text was to be here"));
        }
        let mut bytes = Vec::new();
        loop {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            if buffer.is_empty() {
                return Err(Stop::Cut);
            }
            let plain = buffer.iter().take_while(|&&b| b != b'"' && b != b'\\').count();
            let run = buffer.get(..plain).unwrap_or_default();
            self.repaired += u64::from(run.iter().any(|&b| b < 0x20));
            let room = MAX_TOKEN.saturating_sub(bytes.len());
            bytes.extend_from_slice(run.get(..room.min(run.len())).unwrap_or_default());
            let end = buffer.get(plain).copied();
            let used = plain + usize::from(end.is_some());
            self.reader.consume(used);
            self.at += used as u64;
            match end {
                Some(b'"') => break,
                Some(_) => self.escape(&mut bytes)?,
                None => {}
            }
        }
        match String::from_utf8_lossy(&bytes) {
            std::borrow::Cow::Borrowed(text) => out.push_str(text),
            std::borrow::Cow::Owned(text) => {
                self.repaired += 1;
                out.push_str(&text);
            }
        }
        Ok(())
    }

    /// What a backslash stands before. Of a path on Windows the backslash itself was meant.
    fn escape(&mut self, out: &mut Vec<u8>) -> Result<(), Stop> {
        let byte = self.peek_raw()?.ok_or(Stop::Cut)?;
        let plain = match byte {
            b'"' | b'\\' | b'/' => byte,
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            b'u' => {
                self.bump();
                return self.unicode(out);
            }
            _ => {
                self.repaired += 1;
                out.push(b'\\');
                return Ok(());
            }
        };
        self.bump();
        out.push(plain);
        Ok(())
    }

    fn unicode(&mut self, out: &mut Vec<u8>) -> Result<(), Stop> {
        let mut code = 0u32;
        for _ in 0..4 {
            let byte = self.peek_raw()?.ok_or(Stop::Cut)?;
            let Some(digit) = char::from(byte).to_digit(16) else {
                self.repaired += 1;
                out.extend(b"\\u");
                return Ok(());
            };
            self.bump();
            code = code << 4 | digit;
        }
        // Halves of pairs are of no interest in names.
        let found = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
        out.extend(found.encode_utf8(&mut [0; 4]).as_bytes());
        Ok(())
    }

    /// Reads a number or word into `out`, as it stands.
    pub fn word(&mut self, out: &mut String) -> Result<(), Stop> {
        out.clear();
        self.peek()?;
        loop {
            match self.peek_raw()? {
                None if out.is_empty() => return Err(Stop::Cut),
                Some(b) if b.is_ascii_alphanumeric() || matches!(b, b'-' | b'+' | b'.' | b'_') => {
                    self.bump();
                    if out.len() < MAX_TOKEN {
                        out.push(char::from(b));
                    }
                }
                Some(b'(') if out.ends_with("nan") => {
                    // `-nan(ind)`, as another C library writes it.
                    while let Some(b) = self.peek_raw()? {
                        self.bump();
                        if b == b')' {
                            break;
                        }
                    }
                }
                _ if out.is_empty() => return Err(self.wrong("a value was to be here")),
                _ => break,
            }
        }
        let known = matches!(out.as_str(), "true" | "false" | "null");
        if !known && !out.starts_with(|c: char| c.is_ascii_digit() || c == '-' && out.len() > 1 && !out.ends_with(char::is_alphabetic)) {
            let lower = out.to_ascii_lowercase();
            if !lower.contains("nan") && !lower.contains("inf") {
                return Err(self.wrong("a value was to be here"));
            }
            self.repaired += 1;
        }
        Ok(())
    }

    /// Reads a text or a number or word into `out`, as text; other values are skipped and leave it empty.
    pub fn scalar(&mut self, out: &mut String) -> Result<(), Stop> {
        match self.peek()?.ok_or(Stop::Cut)? {
            b'"' => self.text(out),
            b'{' | b'[' => {
                out.clear();
                self.skip()
            }
            _ => self.word(out),
        }
    }

    /// Skips a value of any kind.
    pub fn skip(&mut self) -> Result<(), Stop> {
        let mut text = String::new();
        self.skip_within(0, &mut text)
    }

    fn skip_within(&mut self, depth: usize, text: &mut String) -> Result<(), Stop> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("nested too deeply"));
        }
        let open = self.peek()?.ok_or(Stop::Cut)?;
        let mut first = true;
        match open {
            b'"' => self.text(text),
            b'[' => {
                self.bump();
                while self.next(b']', &mut first)? {
                    self.skip_within(depth + 1, text)?;
                }
                Ok(())
            }
            b'{' => {
                self.bump();
                while self.next(b'}', &mut first)? {
                    self.key(text)?;
                    self.skip_within(depth + 1, text)?;
                }
                Ok(())
            }
            _ => self.word(text),
        }
    }

    /// Reads a key and the colon behind it.
    pub fn key(&mut self, out: &mut String) -> Result<(), Stop> {
        self.text(out)?;
        if self.take(b':')? { Ok(()) } else { Err(self.wrong("`:` was to be here")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(text: &str) -> Result<u64, Stop> {
        let mut json = Loose::new(text.as_bytes());
        json.skip()?;
        match json.peek()? {
            None => Ok(json.repaired),
            Some(_) => Err(json.wrong("more")),
        }
    }

    #[test]
    fn json_is_read_without_repairs() {
        for text in ["{}", "[]", "[1, -2.5e+3, \"a\\n\\u00e9\", true, null, {\"k\": [{}]}]", "\"x\"", " 7 "] {
            assert_eq!(skip(text).unwrap(), 0, "{text}");
        }
        let mut out = String::new();
        Loose::new(&b"\"a\\u00e9\\\"\""[..]).text(&mut out).unwrap();
        assert_eq!(out, "a\u{e9}\"");
    }

    #[test]
    fn what_profilers_get_wrong_is_repaired_and_counted() {
        for text in ["{\"a\": nan}", "[-nan]", "[inf]", "[-Infinity]", "[-nan(ind)]", "[1,]", "\"a\tb\"", "\"\\U\"", "\"\\uzzzz\""] {
            assert!(skip(text).unwrap() >= 1, "{text}");
        }
        let mut out = String::new();
        let mut json = Loose::new(&b"\"C:\\Users\\x.py\""[..]);
        json.text(&mut out).unwrap();
        assert!(out.starts_with("C:\\U"), "{out}");
    }

    #[test]
    fn ends_and_nonsense_are_told_apart() {
        for cut in ["", "{", "[1", "[1,", "{\"a\"", "{\"a\":", "\"a", "\"a\\"] {
            assert!(matches!(skip(cut), Err(Stop::Cut)), "{cut}");
        }
        for (wrong, at) in [("[1 2]", "byte 3"), ("{\"a\" 1}", "byte 5"), ("{a: 1}", "byte 1"), ("[hello]", "byte"), ("}", "byte 0")] {
            match skip(wrong) {
                Err(Stop::Wrong(reason)) => assert!(reason.contains(at), "{wrong}: {reason}"),
                other => panic!("{wrong}: {other:?}"),
            }
        }
        let deep = "[".repeat(100_000);
        assert!(matches!(skip(&deep), Err(Stop::Wrong(_))));
    }
}
