//! Stored bytes to `f32`: one function a format, written so that the compiler can vectorise them.
//!
//! Sources: OCP OFP8 (E4M3, "fn" variant: no infinities, 0x7f and 0xff are NaN), OCP Microscaling MX 1.0 (E2M1
//! elements, E8M0 scales), compressed-tensors `pack-quantized` (unsigned nibbles with offset 8).

/// Both nibbles of a byte as numbers, low nibble first.
pub type NibblePairs = [[f32; 2]; 256];

/// Value of every E4M3 code.
pub static E4M3: [f32; 256] = e4m3_table();
/// Value of every pair of E2M1 codes.
pub static E2M1_PAIRS: NibblePairs = pairs([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
/// Value of every pair of offset-8 integers.
pub static INT4_PAIRS: NibblePairs = pairs([-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);

const fn pairs(values: [f32; 16]) -> NibblePairs {
    let mut table = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [values[byte & 15], values[byte >> 4]];
        byte += 1;
    }
    table
}

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (sign, magnitude) = ((code as u32 >> 7) << 31, code as u32 & 0x7f);
        table[code] = if magnitude == 0x7f {
            f32::from_bits(sign | 0x7fc0_0000)
        } else {
            // Four exponent and three mantissa bits in f32's places give the value x 2^-120, subnormals included.
            f32::from_bits(sign | magnitude << 20) * f32::from_bits((120 + 127) << 23)
        };
        code += 1;
    }
    table
}

/// 2^(byte - 127); 255 is NaN.
pub fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        b => f32::from_bits(u32::from(b) << 23),
    }
}

/// Upper half of an `f32`.
pub fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Little-endian `f32`.
pub fn f32_row(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *o = f32::from_le_bytes(*b);
    }
}

/// Little-endian BF16.
pub fn bf16_row(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *o = bf16(*b);
    }
}

/// Little-endian F16.
pub fn f16_row(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *o = half::f16::from_le_bytes(*b).to_f32();
    }
}

/// E4M3 codes times one scale.
pub fn e4m3_run(bytes: &[u8], scale: f32, out: &mut [f32]) {
    for (o, &b) in out.iter_mut().zip(bytes) {
        *o = E4M3[usize::from(b)] * scale;
    }
}

/// Packed nibbles times one scale; `out` has two elements a byte.
pub fn nibble_run(bytes: &[u8], table: &NibblePairs, scale: f32, out: &mut [f32]) {
    for (o, &b) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
        let [low, high] = table[usize::from(b)];
        *o = [low * scale, high * scale];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, by arithmetic in f64.
    fn e4m3_by_definition(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa / 8.0 * 2f64.powi(-6),
            _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_e4m3_code_has_its_value() {
        for code in 0..=255u8 {
            let (got, want) = (E4M3[usize::from(code)], e4m3_by_definition(code));
            assert!(got.is_nan() && want.is_nan() || f64::from(got) == want, "{code:#04x}: {got} {want}");
        }
        assert_eq!((E4M3[0x7e], E4M3[0x01], E4M3[0x38], E4M3[0xb8]), (448.0, 2f32.powi(-9), 1.0, -1.0));
        assert!(E4M3[0x80].is_sign_negative() && E4M3[0x80] == 0.0);
        assert_eq!(E4M3.iter().filter(|v| v.is_nan()).count(), 2);
    }

    #[test]
    fn every_e8m0_code_is_its_power_of_two() {
        for code in 0..255u8 {
            assert_eq!(f64::from(e8m0(code)), 2f64.powi(i32::from(code) - 127), "{code}");
        }
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn low_nibble_comes_first() {
        let mut out = [0.0; 4];
        // 0x72: low 2 -> 1.0, high 7 -> 6.0; 0xf9: low 9 -> -0.5, high 15 -> -6.
        nibble_run(&[0x72, 0xf9], &E2M1_PAIRS, 0.5, &mut out);
        assert_eq!(out, [0.5, 3.0, -0.25, -3.0]);
        // The word 0x0000_00f0 | ... as bytes: element 0 in bits 0-3, element 1 in bits 4-7.
        nibble_run(&[0xf0, 0x98], &INT4_PAIRS, 2.0, &mut out);
        assert_eq!(out, [-16.0, 14.0, 0.0, 2.0]);
    }

    #[test]
    fn int4_words_unpack_in_bit_order() {
        let word: i32 = 0x7654_3210u32 as i32;
        let mut out = [0.0; 8];
        nibble_run(&word.to_le_bytes(), &INT4_PAIRS, 1.0, &mut out);
        let want: Vec<f32> = (0..8).map(|i| ((word as u32 >> (4 * i)) & 15) as f32 - 8.0).collect();
        assert_eq!(out.as_slice(), want);
    }

    #[test]
    fn every_f16_and_bf16_code_agrees_with_half() {
        for code in 0..=u16::MAX {
            let mut out = [0.0];
            bf16_row(&code.to_le_bytes(), &mut out);
            assert_eq!(out[0].to_bits(), u32::from(code) << 16);
            f16_row(&code.to_le_bytes(), &mut out);
            let want = half::f16::from_bits(code).to_f64();
            assert!(f64::from(out[0]) == want || out[0].is_nan() && want.is_nan());
        }
    }
}
