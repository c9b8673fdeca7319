//! The bytes of a pickle: operands, and the names of opcodes.

/// Reads operands, each bounded by the pickle's end.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// At the begin of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// How far it is.
    pub fn at(&self) -> usize {
        self.at
    }

    /// All bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The next `n` bytes.
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let taken = end.and_then(|end| self.bytes.get(self.at..end)).ok_or_else(|| "it is cut off".to_owned())?;
        self.at += n;
        Ok(taken)
    }

    /// The next byte.
    pub fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?.first().copied().unwrap_or_default())
    }

    /// An unsigned number of at most four bytes.
    pub fn unsigned(&mut self, n: usize) -> Result<i64, String> {
        Ok(self.take(n)?.iter().rev().fold(0, |sum, &b| (sum << 8) | i64::from(b)))
    }

    /// A number with its own length.
    pub fn long(&mut self) -> Result<i64, String> {
        let n = usize::from(self.byte()?);
        let bytes = self.take(n)?;
        if n > 8 {
            return Err("a number of more than 64 bits".into());
        }
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        Ok(bytes.iter().rev().fold(if negative { -1 } else { 0 }, |sum, &b| (sum << 8) | i64::from(b)))
    }

    /// A float, big-endian.
    pub fn float(&mut self) -> Result<f64, String> {
        let bytes = self.take(8)?.try_into().map_err(|_| "it is cut off".to_owned())?;
        Ok(f64::from_be_bytes(bytes))
    }

    /// A text behind its length of `n` bytes: where it begins, and its length.
    pub fn text(&mut self, n: usize) -> Result<(u32, u32), String> {
        let len = self.unsigned(n)?;
        let at = self.at;
        self.take(usize::try_from(len).map_err(|_| "it is cut off".to_owned())?)?;
        match (u32::try_from(at), u32::try_from(len)) {
            (Ok(at), Ok(len)) => Ok((at, len)),
            _ => Err("a text beyond 4 GiB".into()),
        }
    }

    /// A line, without its end.
    pub fn line(&mut self) -> Result<&'a [u8], String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let n = rest.iter().position(|&b| b == b'\n').ok_or_else(|| "it is cut off".to_owned())?;
        self.at += n + 1;
        Ok(rest.get(..n).unwrap_or_default())
    }

    /// Bytes that were read before.
    pub fn bytes(&self, at: u32, len: u32) -> Option<&'a [u8]> {
        self.bytes.get(at as usize..(at as usize).checked_add(len as usize)?)
    }
}

/// The name of an opcode that is not read, for the message.
pub fn name_of(opcode: u8) -> String {
    let name = match opcode {
        b'b' => "BUILD",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        0x82..=0x84 => "EXT",
        b'P' => "PERSID",
        b'S' | b'T' | b'U' => "STRING",
        b'B' | b'C' | 0x8e | 0x96 => "BYTES",
        0x8f..=0x91 => "SET",
        b'0' | b'1' | b'2' => "POP or DUP",
        b'I' | b'L' | b'F' | b'V' => "a number or text of protocol 0",
        _ => return format!("0x{opcode:02x}"),
    };
    format!("{name} (0x{opcode:02x})")
}
