//! The seven encodings of llama.cpp's expert traces as blocks: one layer's rows of one pass.

use super::ImportError;
use super::input::{self, Lines};
use super::llamacpp::Variant;
use serde::Deserialize;
use std::io::{BufRead, Read};
use std::path::Path;

const MAX_LINE: u64 = 64 << 20;
/// Bounds of a block's header: more than any model or micro-batch has.
const MAX_K: usize = 256;
const MAX_ROWS: usize = 65_535;
const MAX_LAYER: i32 = 4096;

/// What a header says of the model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Name.
    pub model: Option<String>,
    /// Architecture tag.
    pub architecture: Option<String>,
    /// Layers.
    pub layers: Option<u16>,
    /// Routed experts per layer.
    pub experts: Option<u16>,
}

/// Where in a request a block is, as far as its encoding says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Not said.
    Unknown,
    /// In the prompt.
    Prompt,
    /// Behind it.
    Generated,
}

/// Some rows of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Layer, as the file numbers it.
    pub layer: u16,
    /// Places for experts.
    pub k: usize,
    /// Whole rows of `k` ids.
    pub ids: Vec<i32>,
    /// Where it is.
    pub place: Place,
    /// Name of its request; empty where the encoding has none.
    pub request: String,
}

impl Block {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.ids.len().checked_div(self.k).unwrap_or(0)
    }
}

/// Whether bytes begin like records of int32 `layer, n_tokens, k, ids`.
pub fn looks_like_records(bytes: &[u8]) -> bool {
    let (words, _) = bytes.as_chunks::<4>();
    let word = |at: usize| words.get(at).map(|w| i32::from_le_bytes(*w));
    let mut at = 0;
    // Three records, or as many as there are.
    for record in 0..3 {
        let (Some(layer), Some(rows), Some(k)) = (word(at), word(at + 1), word(at + 2)) else { return record > 0 };
        let (Ok(rows), Ok(k)) = (usize::try_from(rows), usize::try_from(k)) else { return false };
        if !(0..MAX_LAYER).contains(&layer) || !(1..=MAX_ROWS).contains(&rows) || !(1..=MAX_K).contains(&k) {
            return false;
        }
        let ids = at + 3..at + 3 + rows * k;
        if !ids.clone().map_while(word).all(|id| (0..65_535).contains(&id)) {
            return false;
        }
        at = ids.end;
    }
    true
}

/// Reads blocks, in order.
pub struct Reader<'a> {
    /// What the header says.
    pub meta: Meta,
    path: &'a Path,
    variant: Variant,
    k: Option<usize>,
    lines: Option<Lines<'a>>,
    binary: Option<Box<dyn BufRead>>,
    /// A block that was begun with a line of the next one.
    next: Option<Block>,
    offset: u64,
    done: bool,
    number: u64,
    /// Experts of a token (D): those of the first that another one follows, or all there are so far.
    ranks: usize,
    /// The rank of the line before (D).
    rank: Option<usize>,
}

#[derive(Deserialize)]
struct FlashLine {
    layer: u16,
    n_tokens: usize,
    n_experts: usize,
    expert_ids: Vec<i32>,
}

#[derive(Deserialize)]
struct FileMeta {
    model: Option<String>,
    arch: Option<String>,
    n_layer: Option<u16>,
    n_expert: Option<u16>,
}

impl<'a> Reader<'a> {
    /// Opens a file of this encoding. `k` is needed where the encoding does not say it (A).
    ///
    /// # Errors
    /// When it cannot be read, or has no header that it should have.
    pub fn open(path: &'a Path, variant: Variant, k: Option<u16>) -> Result<Self, ImportError> {
        let mut reader = Self {
            meta: Meta::default(),
            path,
            variant,
            k: k.map(usize::from),
            lines: None,
            binary: None,
            next: None,
            offset: 0,
            done: false,
            number: 0,
            ranks: 0,
            rank: None,
        };
        match variant {
            Variant::C | Variant::F => reader.binary = Some(input::open(path)?),
            _ => reader.lines = Some(Lines::open(path)?),
        }
        match variant {
            Variant::A if k.is_none() => {
                let reason = "lines of `layer,expert` do not say how many experts a token has; give --k K or --model-config config.json";
                return Err(ImportError::input(path, reason));
            }
            Variant::D | Variant::E => {
                reader.line()?;
            }
            Variant::F => reader.header()?,
            _ => {}
        }
        Ok(reader)
    }

    /// The line or byte that was read last.
    pub fn place(&self) -> String {
        if self.binary.is_some() { format!("byte {}", self.offset) } else { format!("line {}", self.number) }
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> ImportError {
        ImportError::input(self.path, format!("{}: {reason}", self.place()))
    }

    /// The next block; `None` at the end.
    ///
    /// # Errors
    /// When it is not what the encoding says, naming the line or byte.
    pub fn next(&mut self) -> Result<Option<Block>, ImportError> {
        match self.variant {
            Variant::C => self.record(),
            Variant::F => self.moetrc(),
            Variant::G => self.flash(),
            _ => self.table(),
        }
    }

    /// `MOETRC01`, the length of a JSON text, the text.
    fn header(&mut self) -> Result<(), ImportError> {
        let start = self.bytes(12)?.ok_or_else(|| self.wrong("the header is cut off"))?;
        let len = start.get(8..12).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        if len > 1 << 20 {
            return Err(self.wrong(format!("a header of {len} bytes")));
        }
        let text = self.bytes(len as usize)?.ok_or_else(|| self.wrong("the header is cut off"))?;
        let meta: FileMeta = serde_json::from_slice(&text).map_err(|e| self.wrong(format!("the header is not JSON: {e}")))?;
        self.meta = Meta { model: meta.model, architecture: meta.arch, layers: meta.n_layer, experts: meta.n_expert };
        Ok(())
    }

    /// The next `n` bytes; `None` at the end of the file.
    fn bytes(&mut self, n: usize) -> Result<Option<Vec<u8>>, ImportError> {
        let mut bytes = Vec::new();
        let Some(reader) = self.binary.as_mut() else { return Ok(None) };
        reader.take(n as u64).read_to_end(&mut bytes).map_err(ImportError::io(self.path))?;
        if bytes.is_empty() && n > 0 {
            return Ok(None);
        }
        if bytes.len() < n {
            return Err(self.wrong("the last record is cut off"));
        }
        self.offset += n as u64;
        Ok(Some(bytes))
    }

    fn block(&self, layer: i64, rows: usize, k: usize, ids: Vec<i32>, place: Place) -> Result<Block, ImportError> {
        let layer = u16::try_from(layer).ok().filter(|&l| i32::from(l) < MAX_LAYER).ok_or_else(|| self.wrong(format!("layer {layer}")))?;
        if rows == 0 || rows > MAX_ROWS || k == 0 || k > MAX_K || ids.len() != rows * k {
            return Err(self.wrong(format!("{} ids for {rows} tokens of {k} experts", ids.len())));
        }
        Ok(Block { layer, k, ids, place, request: String::new() })
    }

    fn record(&mut self) -> Result<Option<Block>, ImportError> {
        let Some(head) = self.bytes(12)? else { return Ok(None) };
        let (words, _) = head.as_chunks::<4>();
        let [layer, rows, k] = words else { return Err(self.wrong("the last record is cut off")) };
        let (layer, rows, k) = (i32::from_le_bytes(*layer), i32::from_le_bytes(*rows), i32::from_le_bytes(*k));
        let (rows, k) = (usize::try_from(rows).unwrap_or(0), usize::try_from(k).unwrap_or(0));
        if rows == 0 || rows > MAX_ROWS || k == 0 || k > MAX_K {
            return Err(self.wrong(format!("a record of {rows} tokens and {k} experts")));
        }
        let body = self.bytes(4 * rows * k)?.ok_or_else(|| self.wrong("the last record is cut off"))?;
        let ids = body.as_chunks::<4>().0.iter().map(|id| i32::from_le_bytes(*id)).collect();
        self.block(i64::from(layer), rows, k, ids, Place::Unknown).map(Some)
    }

    /// u32 step, u16 layer, u16 k, u32 n_tokens, u8 phase, u8 flags, u16 padding; then u16 ids.
    fn moetrc(&mut self) -> Result<Option<Block>, ImportError> {
        let Some(head) = self.bytes(16)? else { return Ok(None) };
        let [_, _, _, _, l0, l1, k0, k1, n0, n1, n2, n3, phase, ..] = *head.as_slice() else {
            return Err(self.wrong("the last record is cut off"));
        };
        let (layer, k) = (u16::from_le_bytes([l0, l1]), usize::from(u16::from_le_bytes([k0, k1])));
        let rows = u32::from_le_bytes([n0, n1, n2, n3]) as usize;
        if rows == 0 || rows > MAX_ROWS || k == 0 || k > MAX_K {
            return Err(self.wrong(format!("a record of {rows} tokens and {k} experts")));
        }
        let body = self.bytes(2 * rows * k)?.ok_or_else(|| self.wrong("the last record is cut off"))?;
        let ids = body.as_chunks::<2>().0.iter().map(|id| i32::from(u16::from_le_bytes(*id))).collect();
        let place = if phase == 0 { Place::Prompt } else { Place::Generated };
        self.block(i64::from(layer), rows, k, ids, place).map(Some)
    }

    fn flash(&mut self) -> Result<Option<Block>, ImportError> {
        let Some(text) = self.line()? else { return Ok(None) };
        let line: FlashLine = serde_json::from_str(&text).map_err(|e| self.wrong(format!("not a record of a flash-moe trace: {e}")))?;
        self.block(i64::from(line.layer), line.n_tokens, line.n_experts, line.expert_ids, Place::Unknown).map(Some)
    }

    fn line(&mut self) -> Result<Option<String>, ImportError> {
        let Some(lines) = self.lines.as_mut() else { return Ok(None) };
        let Some((number, line)) = lines.next(MAX_LINE)? else { return Ok(None) };
        self.number = number;
        let text = std::str::from_utf8(line).map(str::to_owned);
        text.map(Some).map_err(|_| self.wrong("not text"))
    }

    /// Encodings of lines: rows of one layer and request that follow each other are a block.
    fn table(&mut self) -> Result<Option<Block>, ImportError> {
        let mut open = self.next.take();
        while !self.done {
            let Some(text) = self.line()? else {
                self.done = true;
                break;
            };
            let row = self.row(&text)?;
            match open.as_mut() {
                None => open = Some(row),
                Some(block) if goes_on(block, &row) && block.ids.len() < MAX_ROWS * self.width(block) => block.ids.extend(row.ids),
                Some(_) => {
                    self.next = Some(row);
                    break;
                }
            }
        }
        let Some(mut block) = open else { return Ok(None) };
        if let (Variant::D, 0, Some(last)) = (self.variant, self.ranks, self.rank) {
            // The whole table is one token.
            self.ranks = last + 1;
        }
        if matches!(self.variant, Variant::A | Variant::D) {
            // One line an expert: only now it is known how many rows they are.
            block.k = self.width(&block);
            if !block.ids.len().is_multiple_of(block.k) {
                return Err(self.wrong(format!(
                    "layer {} has {} experts in a run, which are not rows of {}",
                    block.layer,
                    block.ids.len(),
                    block.k
                )));
            }
        }
        Ok(Some(block))
    }

    /// Experts of a row. Of the encodings with one line an expert, the option (A) or the ranks (D) say it.
    fn width(&self, block: &Block) -> usize {
        match self.variant {
            Variant::A => self.k.unwrap_or(1),
            Variant::D => self.ranks.max(1),
            _ => block.k,
        }
    }
}

impl Reader<'_> {
    /// Takes the rank of a line (D): a token has the ranks from 0 on, and every token as many.
    fn next_rank(&mut self, rank: usize) -> Result<(), ImportError> {
        match self.rank.replace(rank) {
            // The first token to end says how many there are.
            Some(last) if rank == 0 && self.ranks == 0 => self.ranks = last + 1,
            Some(last) if rank == 0 && last + 1 != self.ranks => {
                return Err(self.wrong(format!("the token before has {} experts, those before it {}", last + 1, self.ranks)));
            }
            None if rank == 0 => {}
            Some(last) if rank == last + 1 || rank == 0 => {}
            Some(last) => return Err(self.wrong(format!("rank {rank} after rank {last}"))),
            None => return Err(self.wrong(format!("the first rank is {rank}, not 0"))),
        }
        Ok(())
    }

    /// One line of A, B, D or E as a block of one row (of A and D: of one expert).
    fn row(&mut self, text: &str) -> Result<Block, ImportError> {
        let columns: Vec<&str> = text.split(',').map(str::trim).collect();
        let number = |word: &str| word.parse::<i64>().map_err(|_| self.wrong(format!("`{}` is not a number", word.escape_debug())));
        let ids = |words: &[&str]| -> Result<Vec<i32>, ImportError> {
            words.iter().map(|w| w.parse::<i32>().map_err(|_| self.wrong(format!("`{}` is not an expert id", w.escape_debug())))).collect()
        };
        match (self.variant, columns.as_slice()) {
            (Variant::A, [layer, id]) => self.block(number(layer)?, 1, 1, ids(&[id])?, Place::Unknown),
            (Variant::B, [position, layer, rest @ ..]) if !rest.is_empty() => {
                let (position, layer, ids) = (number(position)?, number(layer)?, ids(rest)?);
                // Negative positions count down to the prompt's end.
                let place = if position < 0 { Place::Prompt } else { Place::Generated };
                self.block(layer, 1, ids.len(), ids, place)
            }
            (Variant::D, [phase, token, layer, rank, id]) => {
                number(token)?;
                let rank = usize::try_from(number(rank)?).ok().filter(|&r| r < MAX_K).ok_or_else(|| self.wrong(format!("rank {rank}")))?;
                let place = match *phase {
                    "prefill" => Place::Prompt,
                    "decode" => Place::Generated,
                    other => return Err(self.wrong(format!("`{}` is not a phase", other.escape_debug()))),
                };
                let block = self.block(number(layer)?, 1, 1, ids(&[id])?, place)?;
                self.next_rank(rank)?;
                Ok(block)
            }
            (Variant::E, [user, query, layer, position, rest @ ..]) if !rest.is_empty() => {
                number(position)?;
                let ids = ids(rest)?;
                let block = self.block(number(layer)?, 1, ids.len(), ids, Place::Prompt)?;
                Ok(Block { request: format!("{user}/{query}"), ..block })
            }
            (_, columns) => Err(self.wrong(format!("{} columns", columns.len()))),
        }
    }
}

/// Whether a row belongs to the same layer of the same pass as those before it.
fn goes_on(block: &Block, row: &Block) -> bool {
    block.layer == row.layer && block.k == row.k && block.place == row.place && block.request == row.request
}
