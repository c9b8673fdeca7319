//! Bytes that are a function of a key: made on the host when somebody looks at them, or on a device that no host ever sent them to.

use super::routing_plan::mix;
use rayon::prelude::*;
use std::sync::OnceLock;

/// What the bytes of a tensor are: the 64-bit words 0, 1, 2, ... little-endian, of which the last may be cut. `kernels/fill.cu` makes
/// the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recipe {
    /// Word n is made of `mix(key + n)`.
    pub key: u64,
    /// How.
    pub rule: Rule,
    /// How many bytes there are.
    pub bytes: usize,
}

/// How a word is made of 64 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The bits that the mask has.
    Masked(u64),
    /// Sixteen nibbles, of which a 0 becomes an 8.
    Centred,
    /// Four BF16 numbers: signed 16-bit integers times the F32 with these bits, cut to the upper half.
    Bf16(u32),
    /// This word, whatever the bits.
    Constant(u64),
}

impl Rule {
    /// The kernel's number of the rule, and its parameter.
    pub fn code(self) -> (i32, u64) {
        match self {
            Self::Masked(mask) => (0, mask),
            Self::Centred => (1, 0),
            Self::Bf16(scale) => (2, u64::from(scale)),
            Self::Constant(word) => (3, word),
        }
    }

    /// A word of random bits.
    pub fn word(self, bits: u64) -> u64 {
        const ONES: u64 = 0x1111_1111_1111_1111;
        match self {
            Self::Masked(mask) => bits & mask,
            Self::Centred => {
                let any = (bits | bits >> 1 | bits >> 2 | bits >> 3) & ONES;
                bits | (any ^ ONES) << 3
            }
            Self::Bf16(scale) => {
                let scale = f32::from_bits(scale);
                let number = |i: u32| f32::from((bits >> (16 * i)) as u16 as i16) * scale;
                (0..4).fold(0, |word, i| word | u64::from(number(i).to_bits() >> 16) << (16 * i))
            }
            Self::Constant(word) => word,
        }
    }
}

impl Recipe {
    /// The bytes.
    pub fn make(&self) -> Vec<u8> {
        let mut made = vec![0u8; self.bytes];
        // As many words a piece as a thread is worth waking for.
        const WORDS: usize = 1 << 14;
        made.par_chunks_mut(8 * WORDS).enumerate().for_each(|(piece, bytes)| {
            for (i, to) in bytes.chunks_mut(8).enumerate() {
                let word = self.rule.word(mix(self.key.wrapping_add((piece * WORDS + i) as u64)));
                to.copy_from_slice(&word.to_le_bytes()[..to.len()]);
            }
        });
        made
    }
}

/// A recipe and, once somebody has looked at them, its bytes.
#[derive(Debug)]
pub struct Made {
    recipe: Recipe,
    held: OnceLock<Vec<u8>>,
}

impl Made {
    /// Bytes that are made when they are looked at.
    pub fn new(recipe: Recipe) -> Self {
        Self { recipe, held: OnceLock::new() }
    }

    /// What they are.
    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// The bytes, which stay in memory from here on.
    pub fn bytes(&self) -> &[u8] {
        self.held.get_or_init(|| self.recipe.make())
    }

    /// Whether they are in the host's memory.
    pub fn is_held(&self) -> bool {
        self.held.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The function is part of the format: the kernel that fills device memory has to give the same bytes.
    #[test]
    fn words_by_rule() {
        assert_eq!(mix(1), 0x5692_161d_100b_05e5);
        let bits = 0xfedc_0a98_7654_3210;
        assert_eq!(Rule::Masked(0xbfbf_bfbf_bfbf_bfbf).word(bits), 0xbe9c_0a98_3614_3210);
        assert_eq!(Rule::Centred.word(bits), 0xfedc_8a98_7654_3218);
        // 0x3210 = 12816 and 0xfedc = -292, halved: 6408 = 0x45c8_4000, -146 = 0xc312_0000.
        let halved = Rule::Bf16(0.5f32.to_bits()).word(bits);
        assert_eq!((halved as u16, (halved >> 48) as u16), (0x45c8, 0xc312));
        assert_eq!(Rule::Constant(7).word(bits), 7);
    }

    #[test]
    fn bytes_are_made_when_they_are_looked_at() {
        let made = Made::new(Recipe { key: 5, rule: Rule::Masked(u64::MAX), bytes: 12 });
        assert!(!made.is_held());
        assert_eq!(made.bytes()[..8], mix(5).to_le_bytes());
        assert_eq!(made.bytes()[8..], mix(6).to_le_bytes()[..4]);
        assert!(made.is_held());
        // More than a piece: words go on counting.
        let long = Recipe { key: 9, rule: Rule::Masked(u64::MAX), bytes: 8 * 40_000 }.make();
        assert_eq!(long[8 * 39_999..], mix(9 + 39_999).to_le_bytes());
    }
}
