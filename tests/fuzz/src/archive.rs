//! Mutations within an archive: one member is changed, and all are packed again with checksums that fit.

use libfuzzer_sys::fuzzer_mutate;
use specprof::import::zip::Archive;
use std::io::Cursor;

/// Largest member that is mutated, and most bytes by which it grows at once.
const MOST_BYTES: u64 = 1 << 20;
const GROWTH: usize = 128;

/// The new size of an input whose first byte is not the archive's; `None` when it is no archive or grows too large.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> Option<usize> {
    let mut archive = Archive::open(Cursor::new(data.get(1..size)?)).ok()?;
    let names: Vec<String> = archive.members().iter().map(|m| m.name.clone()).collect();
    let mut members = Vec::with_capacity(names.len());
    for (index, name) in names.into_iter().enumerate() {
        members.push((name, archive.read(index, MOST_BYTES).ok()?));
    }
    let chosen = (seed / 64) as usize % members.len().max(1);
    let (_, content) = members.get_mut(chosen)?;
    if seed / 8 % 64 == 1 {
        data[0] = (seed >> 16) as u8;
        return Some(size);
    }
    let len = content.len();
    content.resize(len + GROWTH, 0);
    let new = fuzzer_mutate(content, len, len + GROWTH);
    content.truncate(new);
    if seed / 8 % 64 == 2 {
        members.remove(chosen);
    }
    let packed = pack(&members);
    let target = data.get_mut(1..max_size)?.get_mut(..packed.len())?;
    target.copy_from_slice(&packed);
    Some(1 + packed.len())
}

/// An archive of stored members.
fn pack(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in members {
        let offset = out.len() as u32;
        let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for n in [crc(content), content.len() as u32, content.len() as u32] {
            common.extend(n.to_le_bytes());
        }
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0, 0]);
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.bytes());
        out.extend(content);
        directory.extend(b"PK\x01\x02\x14\0");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.bytes());
    }
    let (at, len, count) = (out.len() as u32, directory.len() as u32, members.len() as u16);
    out.extend(directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    out.extend([len.to_le_bytes(), at.to_le_bytes()].concat());
    out.extend([0, 0]);
    out
}

/// The checksum of ZIP, bit by bit from a table made once.
fn crc(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0u32; 256];
        let mut i = 0;
        while i < 256 {
            let (mut value, mut bit) = (i as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
                bit += 1;
            }
            table[i] = value;
            i += 1;
        }
        table
    };
    !bytes.iter().fold(u32::MAX, |crc, byte| TABLE[(crc as u8 ^ byte) as usize] ^ (crc >> 8))
}
