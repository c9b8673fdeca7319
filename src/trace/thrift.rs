//! A walk over Thrift's compact protocol, as far as it takes to distrust a Parquet file.
//!
//! The Parquet library reserves memory for as many list elements, and as many page bytes, as a file
//! claims to have. Whoever wrote the file chose those numbers, so they are compared with its size first.

/// Deepest nesting that a Parquet footer or page header has is well below this.
const MAX_DEPTH: u32 = 32;

/// A position in a byte string that holds compact-protocol data.
struct Walker<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// Checks a struct at the beginning of `bytes`: every length fits into what is left. Integer fields of the
/// struct itself are handed to `integer` with 0 and their ids, those of a struct in its field f with f and their ids.
/// Gives the struct's length, `None` when it is broken.
pub(super) fn walk_struct(bytes: &[u8], mut integer: impl FnMut(i16, i16, i64)) -> Option<usize> {
    let mut walker = Walker { bytes, at: 0 };
    walker.fields(0, 0, &mut integer)?;
    Some(walker.at)
}

impl Walker<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn skip(&mut self, len: u64) -> Option<()> {
        let end = self.at.checked_add(usize::try_from(len).ok()?)?;
        (end <= self.bytes.len()).then(|| self.at = end)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn zigzag(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    fn fields(&mut self, depth: u32, of: i16, integer: &mut dyn FnMut(i16, i16, i64)) -> Option<()> {
        let mut id = 0i16;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            id = match head >> 4 {
                0 => i16::try_from(self.zigzag()?).ok()?,
                delta => id.checked_add(i16::from(delta))?,
            };
            match head & 0x0f {
                // A boolean field's value is its type.
                1 | 2 => {}
                4..=6 => integer(of, id, self.zigzag()?),
                12 if depth == 0 => self.fields(1, id, integer)?,
                kind => self.value(kind, depth)?,
            }
        }
    }

    fn value(&mut self, kind: u8, depth: u32) -> Option<()> {
        if depth >= MAX_DEPTH {
            return None;
        }
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip(8),
            8 => {
                let len = self.varint()?;
                self.skip(len)
            }
            9 | 10 => {
                let head = self.byte()?;
                let len = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
                self.elements(len, &[head & 0x0f], depth)
            }
            11 => {
                let len = self.varint()?;
                let kinds = if len == 0 { 0 } else { self.byte()? };
                self.elements(len, &[kinds >> 4, kinds & 0x0f], depth)
            }
            12 => self.fields(depth + 1, 0, &mut |_, _, _| {}),
            13 => self.skip(16),
            _ => None,
        }
    }

    fn elements(&mut self, len: u64, kinds: &[u8], depth: u32) -> Option<()> {
        // The least that any element takes is one byte.
        if len > (self.bytes.len() - self.at) as u64 {
            return None;
        }
        (0..len).try_for_each(|_| kinds.iter().try_for_each(|&kind| self.value(kind, depth + 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hands_over_the_integers_and_the_length() {
        // 1: i32 5, 3: i64 -2, 4: binary "ab", 5: list<i32> [1, 2], stop, and a byte that is not part of it.
        let bytes = [0x15, 10, 0x26, 3, 0x18, 2, b'a', b'b', 0x19, 0x25, 2, 4, 0, 99];
        let mut seen = Vec::new();
        assert_eq!(walk_struct(&bytes, |of, id, value| seen.push((of, id, value))), Some(13));
        assert_eq!(seen, [(0, 1, 5), (0, 3, -2)]);
        // 5: a struct with 1: i32 7 and 2: a struct with 1: i32 8, which is too deep to be told; 6: i32 9.
        let bytes = [0x5c, 0x15, 14, 0x1c, 0x15, 16, 0, 0, 0x15, 18, 0];
        seen.clear();
        assert_eq!(walk_struct(&bytes, |of, id, value| seen.push((of, id, value))), Some(11));
        assert_eq!(seen, [(5, 1, 7), (0, 6, 9)]);
    }

    #[test]
    fn refuses_lengths_beyond_the_end() {
        assert_eq!(walk_struct(&[0x18, 5, b'a', 0], |_, _, _| {}), None);
        // A list of 2^31 structs in a few bytes.
        assert_eq!(walk_struct(&[0x19, 0xfc, 0x80, 0x80, 0x80, 0x80, 8, 0, 0], |_, _, _| {}), None);
        assert_eq!(walk_struct(&[0x1c; 1000], |_, _, _| {}), None);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(len) = walk_struct(&bytes, |_, _, _| {}) {
                prop_assert!(len <= bytes.len());
            }
        }
    }
}
