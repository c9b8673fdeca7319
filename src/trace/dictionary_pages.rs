//! Decodes dictionary-encoded (and plain) pages straight into the type that the table has.
//!
//! Reading is bound by this. The library's reader goes through i32 and a cast; nine-bit indices unpacked
//! eight at a time and looked up in a table of u16 take a third of that.

#[cfg(target_arch = "x86_64")]
use super::bit_unpack;
use parquet::basic::Encoding;
use parquet::column::page::{Page, PageReader};
use parquet::errors::ParquetError;

/// A type that a column's values become.
pub(super) trait Value: Copy + PartialEq {
    /// Stands for a stored value that the column must not have.
    const BAD: Self;

    /// The value of the next plain-encoded item and its length; `None` where the bytes end.
    fn plain(bytes: &[u8], limit: u32) -> Option<(Self, usize)>;

    /// The first of a dictionary whose entries rise by one each, so that none has to be looked up; `None` of any other.
    fn first_of_rising(_dictionary: &[Self]) -> Option<Self> {
        None
    }

    /// Unpacks groups of eight indices into a dictionary that rises by one from `first`, in so far as the machine has a fast way. Gives
    /// how many values of `out` it has written, and the largest index among them.
    fn rising(_packed: &[u8], _width: u32, _first: Self, _out: &mut [Self]) -> (usize, usize) {
        (0, 0)
    }
}

fn plain_u32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?))
}

impl Value for u32 {
    const BAD: Self = Self::MAX;

    fn plain(bytes: &[u8], limit: u32) -> Option<(Self, usize)> {
        let value = plain_u32(bytes)?;
        Some((if value > limit { Self::BAD } else { value }, 4))
    }
}

impl Value for u16 {
    const BAD: Self = Self::MAX;

    fn plain(bytes: &[u8], limit: u32) -> Option<(Self, usize)> {
        let value = plain_u32(bytes)?;
        let narrow = Self::try_from(value).ok().filter(|_| value <= limit);
        Some((narrow.unwrap_or(Self::BAD), 4))
    }

    fn first_of_rising(dictionary: &[Self]) -> Option<Self> {
        let &first = dictionary.first()?;
        // The value that stands for a bad one cannot be one of them.
        let rises = dictionary.iter().zip(u32::from(first)..).all(|(&entry, wanted)| entry != Self::BAD && u32::from(entry) == wanted);
        rises.then_some(first)
    }

    fn rising(packed: &[u8], width: u32, first: Self, out: &mut [Self]) -> (usize, usize) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has it.
            return unsafe { bit_unpack::eights(packed, width, first, out) };
        }
        let _ = (packed, width, first, out);
        (0, 0)
    }
}

/// The `module` column: 0 = target, 1 = draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModuleCode(pub(super) u8);

impl ModuleCode {
    /// The code of a stored word.
    pub(super) fn of(word: &[u8]) -> Self {
        match word {
            b"target" => Self(0),
            b"draft" => Self(1),
            _ => Self::BAD,
        }
    }
}

impl Value for ModuleCode {
    const BAD: Self = Self(u8::MAX);

    fn plain(bytes: &[u8], _: u32) -> Option<(Self, usize)> {
        let len = usize::try_from(plain_u32(bytes)?).ok()?;
        let word = bytes.get(4..)?.get(..len)?;
        Some((Self::of(word), 4 + len))
    }
}

/// What follows in a page of indices.
#[derive(Debug, Clone, Copy)]
enum Run {
    /// One index, so many times.
    Same { index: usize, left: usize },
    /// So many packed indices from byte `at` on, `done` of them consumed.
    Packed { at: usize, bytes: usize, done: usize, left: usize },
}

/// The position in a page of run-length and bit-packed numbers.
#[derive(Debug, Clone, Copy)]
struct Runs {
    width: u32,
    at: usize,
    run: Run,
}

impl Runs {
    fn new(width: u32, at: usize) -> Self {
        Self { width, at, run: Run::Same { index: 0, left: 0 } }
    }

    /// Reads the next run's header when the one at hand is used up.
    fn advance(&mut self, bytes: &[u8]) -> Option<()> {
        let (Run::Same { left, .. } | Run::Packed { left, .. }) = self.run;
        if left > 0 {
            return Some(());
        }
        let mut header = 0u64;
        for shift in (0..35).step_by(7) {
            let byte = *bytes.get(self.at)?;
            self.at += 1;
            header |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let count = usize::try_from(header >> 1).ok()?;
        if header & 1 == 0 {
            let len = self.width.div_ceil(8) as usize;
            let value = bytes.get(self.at..self.at.checked_add(len)?)?;
            let index = value.iter().rev().fold(0usize, |index, &byte| index << 8 | usize::from(byte));
            self.at += len;
            self.run = Run::Same { index, left: count };
        } else {
            let available = bytes.len() - self.at;
            let len = count.checked_mul(self.width as usize)?.min(available);
            let values = if self.width == 0 { count.checked_mul(8)? } else { (len * 8 / self.width as usize).min(count.checked_mul(8)?) };
            self.run = Run::Packed { at: self.at, bytes: len, done: 0, left: values };
            self.at += len;
        }
        let (Run::Same { left, .. } | Run::Packed { left, .. }) = self.run;
        // An empty run would be read for ever.
        (left > 0).then_some(())
    }

    /// Fills `out` by way of the dictionary; `None` when the page ends early or an index is not in its table.
    fn fill<T: Value>(&mut self, bytes: &[u8], dictionary: &Dictionary<T>, mut out: &mut [T]) -> Option<()> {
        while !out.is_empty() {
            self.advance(bytes)?;
            match &mut self.run {
                Run::Same { index, left } => {
                    let n = out.len().min(*left);
                    let (now, later) = out.split_at_mut(n);
                    now.fill(*dictionary.table.get(*index)?);
                    *left -= n;
                    out = later;
                }
                Run::Packed { at, bytes: len, done, left } => {
                    let n = out.len().min(*left);
                    let (now, later) = out.split_at_mut(n);
                    unpack(bytes.get(*at..*at + *len)?, self.width, *done, dictionary, now)?;
                    *done += n;
                    *left -= n;
                    out = later;
                }
            }
        }
        Some(())
    }
}

/// Widest indices that are unpacked in groups of eight.
const GROUPED_WIDTH: u32 = 16;

/// Looks up packed indices `first`... of `packed`.
fn unpack<T: Value>(packed: &[u8], width: u32, first: usize, dictionary: &Dictionary<T>, out: &mut [T]) -> Option<()> {
    let table = &dictionary.table[..];
    // Up to the next group of eight, which begins on a byte.
    let head = (first.next_multiple_of(8) - first).min(out.len());
    let (begin, rest) = out.split_at_mut(head);
    one_by_one(packed, width, first, table, begin)?;
    let from = (first + head) / 8 * width as usize;
    let quick = match dictionary.rising {
        Some(least) if width <= GROUPED_WIDTH => {
            let (done, largest) = T::rising(packed.get(from..).unwrap_or_default(), width, least, rest);
            // What is beyond the dictionary is looked up, where it is a bad value.
            if largest < dictionary.entries { done } else { 0 }
        }
        _ => 0,
    };
    let (first, from, rest) = (first + quick, from + quick / 8 * width as usize, &mut rest[quick..]);
    let groups = rest.len() / 8;
    let (middle, end) = rest.split_at_mut(groups * 8);
    macro_rules! by_width {
        ($($w:literal)*) => {
            match width {
                $($w => by_eight::<T, $w>(packed.get(from..)?, table, middle)?,)*
                _ => one_by_one(packed, width, first + head, table, middle)?,
            }
        };
    }
    if groups > 0 {
        by_width!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
    }
    one_by_one(packed, width, first + head + groups * 8, table, end)
}

/// Groups of eight indices of `W` bits: `W` bytes each. The table must have an entry for every index of that width.
fn by_eight<T: Copy, const W: usize>(packed: &[u8], table: &[T], out: &mut [T]) -> Option<()> {
    // Of this very length, no index that the mask lets through needs a check.
    let table = table.get(..1 << W)?;
    // The last of eight begins at byte 7 * 16 / 8 = 14 at most and is loaded as four bytes.
    const LOADED: usize = 18;
    let mask = (1usize << W) - 1;
    for (group, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let at = group * W;
        let mut copy = [0u8; LOADED];
        let bytes: &[u8; LOADED] = match packed.get(at..at + LOADED) {
            Some(bytes) => bytes.try_into().ok()?,
            None => {
                let left = packed.get(at..at + W)?;
                copy[..W].copy_from_slice(left);
                &copy
            }
        };
        for (j, out) in out.iter_mut().enumerate() {
            let bit = j * W;
            let byte = bit / 8;
            let word = u32::from_le_bytes([bytes[byte], bytes[byte + 1], bytes[byte + 2], bytes[byte + 3]]);
            *out = table[(word >> (bit % 8)) as usize & mask];
        }
    }
    Some(())
}

fn one_by_one<T: Copy>(packed: &[u8], width: u32, first: usize, table: &[T], out: &mut [T]) -> Option<()> {
    let width = width as usize;
    for (i, out) in out.iter_mut().enumerate() {
        let bit = (first + i) * width;
        let end = (bit + width).div_ceil(8);
        let bytes = packed.get(bit / 8..end)?;
        let word = bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        *out = *table.get((word >> (bit % 8)) as usize & ((1 << width) - 1))?;
    }
    Some(())
}

/// The values that indices stand for.
#[derive(Debug)]
struct Dictionary<T> {
    table: Vec<T>,
    /// Entries of the column's own; what is behind them in the table is bad.
    entries: usize,
    /// See [`Value::first_of_rising`].
    rising: Option<T>,
}

impl<T: Value> Dictionary<T> {
    fn new(table: Vec<T>) -> Self {
        Self { entries: table.len(), rising: T::first_of_rising(&table), table }
    }
}

/// Where the values of the page at hand are.
#[derive(Debug)]
enum Cursor {
    Indices(Runs),
    Plain { at: usize },
}

/// The values of one column chunk, page by page.
pub(super) struct Pages<T> {
    reader: Box<dyn PageReader>,
    limit: u32,
    nullable: bool,
    dictionary: Dictionary<T>,
    page: Option<Page>,
    cursor: Cursor,
    left: usize,
    /// Whether a value beyond the limit may have come out as [`Value::BAD`].
    pub(super) has_bad: bool,
}

fn broken(what: &str) -> ParquetError {
    ParquetError::General(what.into())
}

impl<T: Value> Pages<T> {
    /// Values above `limit` come out as [`Value::BAD`]; `nullable` says whether the pages carry levels.
    pub(super) fn new(reader: Box<dyn PageReader>, limit: u32, nullable: bool) -> Self {
        let cursor = Cursor::Plain { at: 0 };
        Self { reader, limit, nullable, dictionary: Dictionary::new(Vec::new()), page: None, cursor, left: 0, has_bad: false }
    }

    /// The next `out.len()` values.
    pub(super) fn fill(&mut self, mut out: &mut [T]) -> Result<(), ParquetError> {
        while !out.is_empty() {
            if self.left == 0 {
                self.next_page()?;
                continue;
            }
            let n = self.left.min(out.len());
            let (now, later) = out.split_at_mut(n);
            let bytes: &[u8] = self.page.as_ref().map(|p| p.buffer().as_ref()).unwrap_or_default();
            match &mut self.cursor {
                Cursor::Indices(runs) => {
                    runs.fill(bytes, &self.dictionary, now)
                        .ok_or_else(|| broken("a page has fewer values than it says, or an index beyond its dictionary"))?;
                }
                Cursor::Plain { at } => {
                    for value in now {
                        let (plain, len) = T::plain(bytes.get(*at..).unwrap_or_default(), self.limit)
                            .ok_or_else(|| broken("a page has fewer values than it says"))?;
                        self.has_bad |= plain == T::BAD;
                        *value = plain;
                        *at += len;
                    }
                }
            }
            self.left -= n;
            out = later;
        }
        Ok(())
    }

    fn next_page(&mut self) -> Result<(), ParquetError> {
        let page = self.reader.get_next_page()?.ok_or_else(|| broken("fewer values than the row group has rows"))?;
        let bytes: &[u8] = page.buffer().as_ref();
        let mut at = 0;
        match &page {
            Page::DictionaryPage { num_values, .. } => {
                let mut table = Vec::new();
                for _ in 0..*num_values {
                    let (value, len) = T::plain(&bytes[at..], self.limit).ok_or_else(|| broken("a dictionary is shorter than it says"))?;
                    self.has_bad |= value == T::BAD;
                    table.push(value);
                    at += len;
                }
                self.dictionary = Dictionary::new(table);
                return Ok(());
            }
            Page::DataPage { num_values, .. } if self.nullable => {
                let len = plain_u32(bytes).and_then(|len| usize::try_from(len).ok());
                let levels = len.and_then(|len| bytes.get(4..)?.get(..len)).ok_or_else(|| broken("broken levels"))?;
                only_ones(levels, *num_values)?;
                at = 4 + levels.len();
            }
            Page::DataPageV2 { num_nulls, def_levels_byte_len, rep_levels_byte_len, .. } => {
                if *num_nulls > 0 {
                    return Err(broken("a null where none may be"));
                }
                at = (*def_levels_byte_len as usize).saturating_add(*rep_levels_byte_len as usize);
            }
            Page::DataPage { .. } => {}
        }
        self.cursor = match page.encoding() {
            Encoding::PLAIN => Cursor::Plain { at },
            Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                let width = u32::from(*bytes.get(at).ok_or_else(|| broken("an empty page"))?);
                if width > 32 {
                    return Err(broken("an index of more than 32 bits"));
                }
                // Room for every index of a page that is unpacked in groups; what is beyond the dictionary comes out as bad.
                let indices = if width <= GROUPED_WIDTH { 1usize << width } else { 0 };
                if self.dictionary.table.len() < indices {
                    self.dictionary.table.resize(indices, T::BAD);
                    self.has_bad = true;
                }
                Cursor::Indices(Runs::new(width, at + 1))
            }
            other => return Err(broken(&format!("a page encoded as {other}, which its column does not announce"))),
        };
        self.left = page.num_values() as usize;
        self.page = Some(page);
        Ok(())
    }
}

/// Definition levels of a column without nulls.
fn only_ones(levels: &[u8], count: u32) -> Result<(), ParquetError> {
    let mut runs = Runs::new(1, 0);
    let mut left = count as usize;
    let mut chunk = [0u16; 1024];
    let dictionary = Dictionary::new(vec![0, 1]);
    while left > 0 {
        let n = left.min(chunk.len());
        runs.fill(levels, &dictionary, &mut chunk[..n]).ok_or_else(|| broken("broken levels"))?;
        if chunk[..n].contains(&0) {
            return Err(broken("a null where none may be"));
        }
        left -= n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Packs indices as the format says: lowest bit first, groups of eight, and a run-length run before.
    fn packed(width: u32, run: (usize, usize), values: &[usize]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.push(u8::try_from(run.1 << 1).unwrap());
        bytes.extend_from_slice(&run.0.to_le_bytes()[..width.div_ceil(8) as usize]);
        let groups = values.len().div_ceil(8);
        assert!(groups < 64);
        bytes.push(u8::try_from(groups << 1 | 1).unwrap());
        let mut bits = vec![false; groups * 8 * width as usize];
        for (i, value) in values.iter().enumerate() {
            for b in 0..width as usize {
                bits[i * width as usize + b] = value >> b & 1 == 1;
            }
        }
        bytes.extend(bits.chunks(8).map(|byte| byte.iter().enumerate().map(|(b, &on)| u8::from(on) << b).sum::<u8>()));
        bytes
    }

    /// In pieces of `cut`, so that runs and groups are entered in the middle.
    fn read<T: Value>(bytes: &[u8], width: u32, dictionary: &Dictionary<T>, n: usize, cut: usize) -> Vec<T> {
        let mut runs = Runs::new(width, 0);
        let mut got = vec![T::BAD; n];
        assert!(got.chunks_mut(cut).all(|piece| runs.fill(bytes, dictionary, piece).is_some()));
        got
    }

    fn looked_up<T: Copy>(values: &[usize], run: usize, table: &[T]) -> Vec<T> {
        std::iter::repeat_n(values[0], run).chain(values.iter().copied()).map(|i| table[i]).collect()
    }

    proptest! {
        #[test]
        fn unpacks_what_was_packed(width in 1u32..=18, from in 0u16..300, run in 1usize..40, seed in prop::collection::vec(any::<usize>(), 1..300), cut in 1usize..50) {
            let mask = (1usize << width) - 1;
            let values: Vec<usize> = seed.iter().map(|v| v & mask).collect();
            let bytes = packed(width, (values[0], run), &values);
            let wide: Vec<u32> = (0..=u32::try_from(mask).unwrap()).map(|i| i * 3).collect();
            prop_assert_eq!(read(&bytes, width, &Dictionary::new(wide.clone()), run + values.len(), cut), looked_up(&values, run, &wide));
            // A dictionary that rises by one, whole or short of some entries, and one that does not.
            let narrow = |entries: usize, step: u16| -> Vec<u16> { (0..entries).map(|i| (i as u16).wrapping_mul(step).wrapping_add(from)).collect() };
            for table in [narrow(mask + 1, 1), narrow(mask.div_ceil(2).max(1), 1), narrow(mask + 1, 3)] {
                let mut dictionary = Dictionary::new(table.iter().map(|&v| v & 0x7fff).collect());
                dictionary.table.resize(mask + 1, u16::BAD);
                let want = looked_up(&values, run, &dictionary.table.clone());
                prop_assert_eq!(read(&bytes, width, &dictionary, run + values.len(), cut), want);
            }
        }

        #[test]
        fn never_panics_on_noise(width in 0u32..=32, bytes in prop::collection::vec(any::<u8>(), 0..80), n in 0usize..300) {
            for table in [vec![1u16, 2, 3], vec![1, 3, 2]] {
                let mut out = vec![0u16; n];
                if Runs::new(width, 0).fill(&bytes, &Dictionary::new(table), &mut out).is_some() {
                    prop_assert!(out.iter().all(|v| (1..=3).contains(v)));
                }
            }
        }
    }
}
