//! Members of a ZIP archive (`.npz`, `.pt`), read by the central directory, each bounded by the file's size.
//!
//! Stored and deflated members, ZIP64 included. No names are ever turned into paths.

use flate2::Crc;
use flate2::read::DeflateDecoder;
use std::io::{self, Read, Seek, SeekFrom};

const END: [u8; 4] = *b"PK\x05\x06";
const END64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR64: [u8; 4] = *b"PK\x06\x07";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const END_BYTES: u64 = 22;
/// More members than this are not an array file or a saved tensor.
const MAX_MEMBERS: usize = 1 << 20;
/// The central directory must be of this size at most.
const MAX_DIRECTORY: u64 = 256 << 20;
/// Deflate cannot shrink data by more than this.
const MAX_RATIO: u64 = 1032;

/// One member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Name as stored.
    pub name: String,
    /// Size of its content.
    pub size: u64,
    compressed: u64,
    deflated: bool,
    crc: u32,
    header: u64,
}

/// An archive that is open for reading.
#[derive(Debug)]
pub struct Archive<R> {
    file: R,
    bytes: u64,
    members: Vec<Member>,
}

fn bad(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

fn u16_at(bytes: &[u8], at: usize) -> io::Result<u16> {
    let field = bytes.get(at..at + 2).and_then(|b| b.try_into().ok());
    field.map(u16::from_le_bytes).ok_or_else(|| bad("the archive's directory is cut off"))
}

fn u32_at(bytes: &[u8], at: usize) -> io::Result<u32> {
    let field = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    field.map(u32::from_le_bytes).ok_or_else(|| bad("the archive's directory is cut off"))
}

fn u64_at(bytes: &[u8], at: usize) -> io::Result<u64> {
    let field = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    field.map(u64::from_le_bytes).ok_or_else(|| bad("the archive's directory is cut off"))
}

impl<R: Read + Seek> Archive<R> {
    /// Reads the central directory.
    ///
    /// # Errors
    /// When it is not a whole archive, or is encrypted, split or compressed in another way than deflate.
    pub fn open(mut file: R) -> io::Result<Self> {
        let bytes = file.seek(SeekFrom::End(0))?;
        let (count, size, offset) = find_directory(&mut file, bytes)?;
        let end = offset.checked_add(size).filter(|&end| end <= bytes && size <= MAX_DIRECTORY);
        if end.is_none() || count > MAX_MEMBERS as u64 || count.saturating_mul(46) > size {
            return Err(bad("the archive's directory does not fit the file"));
        }
        let directory = read_at(&mut file, offset, size)?;
        let mut members = Vec::new();
        let mut at = 0;
        for _ in 0..count {
            let (member, next) = member(&directory, at)?;
            members.push(member);
            at = next;
        }
        Ok(Self { file, bytes, members })
    }

    /// The members, in order.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Reads the content of the member at `index`, which must have at most `limit` bytes.
    ///
    /// # Errors
    /// When it is larger, is not there, or does not match its size and checksum.
    pub fn read(&mut self, index: usize, limit: u64) -> io::Result<Vec<u8>> {
        let member = self.members.get(index).cloned().ok_or_else(|| bad("no such member"))?;
        let wrong = |what: &str| bad(format!("member `{}`: {what}", member.name.escape_debug()));
        if member.size > limit || member.size > member.compressed.saturating_mul(MAX_RATIO).saturating_add(64) {
            return Err(wrong("larger than it can be"));
        }
        let header = read_at(&mut self.file, member.header, 30.min(self.bytes.saturating_sub(member.header)))?;
        if !header.starts_with(&LOCAL) {
            return Err(wrong("its header is not where the directory says"));
        }
        let names = u64::from(u16_at(&header, 26)?) + u64::from(u16_at(&header, 28)?);
        let begin = member.header + 30 + names;
        if begin.checked_add(member.compressed).is_none_or(|end| end > self.bytes) {
            return Err(wrong("it ends beyond the file"));
        }
        self.file.seek(SeekFrom::Start(begin))?;
        let source = (&mut self.file).take(member.compressed);
        let mut content = Vec::new();
        if member.deflated {
            DeflateDecoder::new(source).take(member.size + 1).read_to_end(&mut content)?;
        } else {
            source.take(member.size + 1).read_to_end(&mut content)?;
        }
        let mut crc = Crc::new();
        crc.update(&content);
        if content.len() as u64 != member.size || crc.sum() != member.crc {
            return Err(wrong("its content does not match its size or checksum"));
        }
        Ok(content)
    }
}

fn read_at(file: &mut (impl Read + Seek), at: u64, len: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(at))?;
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == len { Ok(bytes) } else { Err(bad("the archive is cut off")) }
}

/// Number of members, size and offset of the central directory.
fn find_directory(file: &mut (impl Read + Seek), bytes: u64) -> io::Result<(u64, u64, u64)> {
    let tail_bytes = bytes.min(END_BYTES + u64::from(u16::MAX));
    let tail_at = bytes - tail_bytes;
    let tail = read_at(file, tail_at, tail_bytes)?;
    let none = || bad("not a whole ZIP archive: it has no central directory");
    let at = tail.windows(4).rposition(|window| window == END).ok_or_else(none)?;
    let end = tail.get(at..).filter(|end| end.len() as u64 >= END_BYTES).ok_or_else(none)?;
    let (disk, count) = (u16_at(end, 4)?, u16_at(end, 10)?);
    let (size, offset) = (u32_at(end, 12)?, u32_at(end, 16)?);
    let locator_at = (tail_at + at as u64).checked_sub(20);
    if let Some(locator_at) = locator_at.filter(|_| count == u16::MAX || size == u32::MAX || offset == u32::MAX) {
        let locator = read_at(file, locator_at, 20)?;
        if locator.starts_with(&LOCATOR64) {
            let at = u64_at(&locator, 8)?;
            let record = read_at(file, at, 56)?;
            if !record.starts_with(&END64) {
                return Err(bad("the archive's ZIP64 directory is not where it says"));
            }
            return Ok((u64_at(&record, 32)?, u64_at(&record, 40)?, u64_at(&record, 48)?));
        }
    }
    if disk != 0 {
        return Err(bad("the archive is split over several files"));
    }
    Ok((u64::from(count), u64::from(size), u64::from(offset)))
}

/// The member whose entry begins at `at`, and where the next one begins.
fn member(directory: &[u8], at: usize) -> io::Result<(Member, usize)> {
    let entry = directory.get(at..).filter(|entry| entry.starts_with(&CENTRAL)).ok_or_else(|| bad("the archive's directory is broken"))?;
    let (flags, method, crc) = (u16_at(entry, 8)?, u16_at(entry, 10)?, u32_at(entry, 16)?);
    let (mut compressed, mut size) = (u64::from(u32_at(entry, 20)?), u64::from(u32_at(entry, 24)?));
    let mut header = u64::from(u32_at(entry, 42)?);
    let (name_len, extra_len, comment_len) = (u16_at(entry, 28)?, u16_at(entry, 30)?, u16_at(entry, 32)?);
    let name_end = 46 + usize::from(name_len);
    let extra_end = name_end + usize::from(extra_len);
    let cut = || bad("the archive's directory is cut off");
    let name = String::from_utf8_lossy(entry.get(46..name_end).ok_or_else(cut)?).into_owned();
    let extra = entry.get(name_end..extra_end).ok_or_else(cut)?;
    zip64(extra, &mut size, &mut compressed, &mut header)?;
    let wrong = |what: &str| bad(format!("member `{}`: {what}", name.escape_debug()));
    if flags & 1 != 0 {
        return Err(wrong("it is encrypted"));
    }
    let deflated = match method {
        0 if size != compressed => return Err(wrong("stored, but its sizes differ")),
        0 => false,
        8 => true,
        other => return Err(wrong(&format!("compressed by method {other}, only deflate is read"))),
    };
    Ok((Member { name, size, compressed, deflated, crc, header }, at + extra_end + usize::from(comment_len)))
}

/// Puts the 64-bit values of the ZIP64 field in the place of those that did not fit.
fn zip64(extra: &[u8], size: &mut u64, compressed: &mut u64, header: &mut u64) -> io::Result<()> {
    let mut at = 0;
    while at + 4 <= extra.len() {
        let (id, len) = (u16_at(extra, at)?, usize::from(u16_at(extra, at + 2)?));
        let field = extra.get(at + 4..at + 4 + len).ok_or_else(|| bad("the archive's directory is broken"))?;
        if id == 1 {
            let mut from = 0;
            for value in [size, compressed, header] {
                if *value == u64::from(u32::MAX) {
                    *value = u64_at(field, from)?;
                    from += 8;
                }
            }
            return Ok(());
        }
        at += 4 + len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// `a.txt` = "hello" stored, `b.txt` = 300 times "x" deflated; written by Python's zipfile.
    const SMALL: &[u8] = include_bytes!("../../tests/data/import/small.zip");

    #[test]
    fn reads_stored_and_deflated_members() {
        let mut archive = Archive::open(Cursor::new(SMALL)).unwrap();
        let names: Vec<_> = archive.members().iter().map(|m| (m.name.as_str(), m.size)).collect();
        assert_eq!(names, [("a.txt", 5), ("b.txt", 300)]);
        assert_eq!(archive.read(0, 100).unwrap(), b"hello");
        assert_eq!(archive.read(1, 1000).unwrap(), [b'x'; 300]);
        assert!(archive.read(1, 299).unwrap_err().to_string().contains("b.txt"));
        assert!(archive.read(2, 10).is_err());
    }

    #[test]
    fn no_mutation_panics_or_reads_something_else() {
        for at in 0..SMALL.len() {
            for bit in [1u8, 0x80, 0xff] {
                let mut bytes = SMALL.to_vec();
                bytes[at] ^= bit;
                let Ok(mut archive) = Archive::open(Cursor::new(&bytes)) else { continue };
                for index in 0..archive.members().len() {
                    if let Ok(content) = archive.read(index, 1 << 20) {
                        // The checksum lets nothing else through.
                        assert!(content == b"hello" || content == [b'x'; 300] || content.is_empty(), "byte {at}");
                    }
                }
            }
            let _ = Archive::open(Cursor::new(&SMALL[..at]));
        }
    }
}
