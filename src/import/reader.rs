//! A place in a JSON text that is read without a general parser.

/// What is read, and how far it was.
pub struct Reader<'a> {
    /// The text.
    pub text: &'a [u8],
    /// The next byte.
    pub at: usize,
}

impl Reader<'_> {
    /// The next byte that is not a blank.
    pub fn next(&mut self) -> Option<u8> {
        loop {
            let byte = *self.text.get(self.at)?;
            self.at += 1;
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
        }
    }
}
