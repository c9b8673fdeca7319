//! NumPy's `.npy`: a header of ASCII and an array of numbers. Objects (pickles) are refused.

/// Headers larger than this are not of an array of numbers.
const MAX_HEADER: usize = 1 << 16;
const MAGIC: &[u8] = b"\x93NUMPY";

/// The type of an array's numbers, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the type that it is called after")]
pub enum Dtype {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
}

impl Dtype {
    /// Parses `<i4`, `|u1`, `int32`, `torch.int16`, ...
    pub fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        let name = name.trim_start_matches(['<', '|', '=']);
        Some(match name {
            "u1" | "uint8" => Self::U8,
            "i1" | "int8" => Self::I8,
            "u2" | "uint16" => Self::U16,
            "i2" | "int16" => Self::I16,
            "u4" | "uint32" => Self::U32,
            "i4" | "int32" => Self::I32,
            "u8" | "uint64" => Self::U64,
            "i8" | "int64" => Self::I64,
            "f4" | "float32" => Self::F32,
            "f8" | "float64" => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// The largest expert id that it can hold, when that is less than any model's.
    pub fn largest_id(self) -> Option<u16> {
        match self {
            Self::U8 => Some(255),
            Self::I8 => Some(127),
            _ => None,
        }
    }

    /// NumPy's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::I16 => "int16",
            Self::U32 => "uint32",
            Self::I32 => "int32",
            Self::U64 => "uint64",
            Self::I64 => "int64",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    /// Whether it holds whole numbers.
    pub fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F64)
    }

    /// Appends the numbers of `bytes` as whole numbers; a partial one at the end is ignored.
    ///
    /// # Errors
    /// The number that is not whole or does not fit 32 bits with a sign.
    pub fn decode(self, bytes: &[u8], out: &mut Vec<i32>) -> Result<(), String> {
        fn each<const N: usize>(bytes: &[u8], out: &mut Vec<i32>, of: impl Fn([u8; N]) -> Result<i32, String>) -> Result<(), String> {
            let (numbers, _) = bytes.as_chunks::<N>();
            out.reserve(numbers.len());
            for &number in numbers {
                out.push(of(number)?);
            }
            Ok(())
        }
        // Every number of a narrow type fits: no number is looked at.
        fn all<const N: usize>(bytes: &[u8], out: &mut Vec<i32>, of: impl Fn([u8; N]) -> i32) -> Result<(), String> {
            out.extend(bytes.as_chunks::<N>().0.iter().map(|&number| of(number)));
            Ok(())
        }
        fn fits<T: Copy + std::fmt::Display + TryInto<i32>>(n: T) -> Result<i32, String> {
            n.try_into().map_err(|_| format!("{n} is not an expert id"))
        }
        let whole = |x: f64| {
            if x.fract() == 0.0 && x.abs() <= f64::from(i32::MAX) { Ok(x as i32) } else { Err(format!("{x} is not an expert id")) }
        };
        match self {
            Self::U8 => all(bytes, out, |b: [u8; 1]| i32::from(b[0])),
            Self::I8 => all(bytes, out, |b| i32::from(i8::from_le_bytes(b))),
            Self::U16 => all(bytes, out, |b| i32::from(u16::from_le_bytes(b))),
            Self::I16 => all(bytes, out, |b| i32::from(i16::from_le_bytes(b))),
            Self::U32 => each(bytes, out, |b| fits(u32::from_le_bytes(b))),
            Self::I32 => all(bytes, out, i32::from_le_bytes),
            Self::U64 => each(bytes, out, |b| fits(u64::from_le_bytes(b))),
            Self::I64 => each(bytes, out, |b| fits(i64::from_le_bytes(b))),
            Self::F32 => each(bytes, out, |b| whole(f64::from(f32::from_le_bytes(b)))),
            Self::F64 => each(bytes, out, |b| whole(f64::from_le_bytes(b))),
        }
    }
}

/// What the header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Type of the numbers.
    pub dtype: Dtype,
    /// First index fastest.
    pub fortran: bool,
    /// Lengths of the axes.
    pub shape: Vec<usize>,
    /// Where the numbers begin.
    pub data: usize,
}

impl Header {
    /// Parses the beginning of a file; `bytes` has at least the header.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let rest = bytes.strip_prefix(MAGIC).ok_or("not a .npy array: it does not begin with \\x93NUMPY")?;
        let cut = || "the .npy header is cut off".to_owned();
        let (len, begin) = match *rest {
            [1, _, a, b, ..] => (usize::from(u16::from_le_bytes([a, b])), MAGIC.len() + 4),
            [2 | 3, _, a, b, c, d, ..] => (u32::from_le_bytes([a, b, c, d]) as usize, MAGIC.len() + 6),
            [version, ..] if version > 3 => return Err(format!(".npy version {version} is not known")),
            _ => return Err(cut()),
        };
        if len > MAX_HEADER {
            return Err(format!("a .npy header of {len} bytes is not of an array of numbers"));
        }
        let text = bytes.get(begin..begin + len).ok_or_else(cut)?;
        let text = std::str::from_utf8(text).map_err(|_| "the .npy header is not text".to_owned())?;
        let descr = after(text, "descr").and_then(quoted).ok_or("the .npy header has no `descr` of plain numbers")?;
        if descr.contains('O') {
            return Err("the array holds Python objects; save it as numbers (arr.astype('int32'))".into());
        }
        let dtype = Dtype::parse(descr).filter(|_| !descr.starts_with('>'));
        let dtype = dtype.ok_or_else(|| format!("an array of `{}` is not read; save it as int32", descr.escape_debug()))?;
        let fortran = match after(text, "fortran_order").map(str::trim_start) {
            Some(value) if value.starts_with("True") => true,
            Some(value) if value.starts_with("False") => false,
            _ => return Err("the .npy header has no `fortran_order`".into()),
        };
        let shape = after(text, "shape").and_then(tuple).ok_or("the .npy header has no `shape`")?;
        Ok(Self { dtype, fortran, shape, data: begin + len })
    }

    /// Number of elements, when it fits.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len))
    }
}

/// The text behind a key of the header's dictionary.
fn after<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let at = [format!("'{key}'"), format!("\"{key}\"")].iter().find_map(|k| text.find(k.as_str()).map(|at| at + k.len()))?;
    text.get(at..)?.trim_start().strip_prefix(':').map(str::trim_start)
}

fn quoted(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text.get(1..)?.split(quote).next()
}

fn tuple(text: &str) -> Option<Vec<usize>> {
    let inside = text.strip_prefix('(')?.split(')').next()?;
    inside.split(',').map(str::trim).filter(|n| !n.is_empty()).map(|n| n.trim_end_matches('L').parse().ok()).collect()
}

/// Brings an array of these axes, first index fastest, into C order.
pub fn from_fortran<T: Copy + Default>(values: &[T], shape: &[usize]) -> Vec<T> {
    let mut out = vec![T::default(); values.len()];
    let mut index = vec![0usize; shape.len()];
    // `values` in its own order: the first index counts fastest.
    for &value in values {
        let at = index.iter().zip(shape).fold(0usize, |at, (&i, &len)| at * len + i);
        if let Some(place) = out.get_mut(at) {
            *place = value;
        }
        for (i, &len) in index.iter_mut().zip(shape) {
            *i += 1;
            if *i < len {
                break;
            }
            *i = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(text: &str) -> Result<Header, String> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend(u16::try_from(text.len()).unwrap().to_le_bytes());
        bytes.extend(text.as_bytes());
        Header::parse(&bytes)
    }

    #[test]
    fn headers_are_read_and_objects_refused() {
        let h = header("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3, 4), }   \n").unwrap();
        assert_eq!((h.dtype, h.fortran, h.shape.as_slice(), h.elements()), (Dtype::I32, false, &[2, 3, 4][..], Some(24)));
        assert_eq!(header("{'descr': '|u1', 'fortran_order': True, 'shape': (5,), }").unwrap().shape, [5]);
        for (bad, why) in [
            ("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}", "objects"),
            ("{'descr': '>i4', 'fortran_order': False, 'shape': (2,)}", ">i4"),
            ("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (2,)}", "descr"),
            ("{'descr': '<i4', 'shape': (2,)}", "fortran_order"),
            ("{'descr': '<i4', 'fortran_order': False, 'shape': (-2,)}", "shape"),
            ("", "descr"),
        ] {
            let error = header(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
        assert!(Header::parse(b"\x93NUMPY\x01\x00\xff\xff{").is_err());
        assert!(Header::parse(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{").is_err());
        assert!(Header::parse(b"\x93NUMPY").is_err() && Header::parse(b"PK").is_err());
        assert_eq!(header("{'descr': '<i4', 'fortran_order': False, 'shape': (9999999999, 9999999999)}").unwrap().elements(), None);
    }

    #[test]
    fn numbers_of_all_types_are_whole_numbers() {
        let read = |dtype: Dtype, bytes: &[u8]| {
            let mut out = Vec::new();
            dtype.decode(bytes, &mut out).map(|()| out)
        };
        assert_eq!(read(Dtype::U8, &[255]), Ok(vec![255]));
        assert_eq!(read(Dtype::I8, &[255]), Ok(vec![-1]));
        assert_eq!(read(Dtype::I16, &[0xff, 0xff, 1, 0]), Ok(vec![-1, 1]));
        assert_eq!(read(Dtype::U16, &[0xff, 0xff]), Ok(vec![65535]));
        assert_eq!(read(Dtype::I64, &7i64.to_le_bytes()), Ok(vec![7]));
        assert_eq!(read(Dtype::F32, &7f32.to_le_bytes()), Ok(vec![7]));
        assert!(read(Dtype::F64, &0.5f64.to_le_bytes()).is_err());
        assert!(read(Dtype::F64, &f64::NAN.to_le_bytes()).is_err());
        assert!(read(Dtype::I64, &i64::MAX.to_le_bytes()).is_err());
        assert!(read(Dtype::U32, &u32::MAX.to_le_bytes()).is_err());
    }

    #[test]
    fn fortran_order_is_turned() {
        // Element (i, j) of a 2 x 3 array is 10 i + j; first index fastest: 0, 10, 1, 11, 2, 12.
        assert_eq!(from_fortran(&[0, 10, 1, 11, 2, 12], &[2, 3]), [0, 1, 2, 10, 11, 12]);
        assert_eq!(from_fortran(&[0, 1], &[2]), [0, 1]);
    }
}
