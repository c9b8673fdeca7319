//! The value of `routed_experts` in a response, in all the shapes that engines have given it.

use super::npy::{Dtype, Header, from_fortran};
use super::response_cut::PLACEHOLDER;
use super::rows::IdArray;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::fmt;

/// Ids of one request: 131 072 tokens of 61 layers of 8 experts have less. They are kept whole, as 32-bit numbers.
pub const MAX_IDS: usize = 1 << 26;
const TOO_MANY: &str = "more than 64 Mi expert ids in one request; ask the engine for fewer rows of the prompt";
/// Deeper lists than this are not expert ids.
const MAX_DEPTH: usize = 4;

/// The value, as it stands in the file.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Routed {
    /// The key is not there.
    #[default]
    Absent,
    /// `null`: the engine has the feature, and it was off.
    Null,
    /// What base64 held, a `.npy` file or bare little-endian integers; or why it is none. Decoded at once: the text is larger.
    Text(Result<Vec<u8>, String>),
    /// Lists that were cut out of the text before it was parsed, by their number; see `response_cut`.
    Cut(usize),
    /// Nested lists of numbers: the lengths of the levels, then the numbers.
    Nested(Vec<usize>, Vec<i32>),
    /// `{"encoding": "base64", "dtype": ..., "shape": [...], "data": ...}`
    Described {
        /// Type of the numbers.
        dtype: String,
        /// Lengths of the axes.
        shape: Vec<usize>,
        /// Base64, decoded likewise.
        data: Result<Vec<u8>, String>,
    },
}

impl Routed {
    /// Whether there is something to decode.
    pub fn is_some(&self) -> bool {
        !matches!(self, Self::Absent | Self::Null)
    }

    /// The ids as `[rows, layers, width]`; `None` when there are none. Bare integers have no shape: `layers` and `k` give it.
    ///
    /// # Errors
    /// A sentence that says what is wrong and which option would help.
    pub fn decode(self, layers: Option<u16>, k: Option<u16>) -> Result<Option<IdArray>, String> {
        match self {
            Self::Absent | Self::Null => Ok(None),
            Self::Cut(_) => Err("an object of expert ids needs `dtype`, `shape` and `data`".into()),
            Self::Nested(shape, ids) if ids.is_empty() && shape.iter().product::<usize>() == 0 => Ok(None),
            Self::Nested(shape, ids) => three_axes(&shape, ids).map(Some),
            Self::Described { dtype, shape, data } => {
                let kind = Dtype::parse(&dtype).ok_or_else(|| format!("ids of type `{}` are not read", dtype.escape_debug()))?;
                let data = data?;
                if data.len() / kind.size() > MAX_IDS {
                    return Err(TOO_MANY.into());
                }
                let mut ids = Vec::new();
                kind.decode(&data, &mut ids)?;
                let array = three_axes(&shape, ids)?;
                Ok(Some(IdArray { largest_storable: kind.largest_id(), ..array }))
            }
            Self::Text(bytes) => {
                let bytes = bytes?;
                if bytes.starts_with(b"\x93NUMPY") { npy_array(&bytes).map(Some) } else { bare(&bytes, layers, k).map(Some) }
            }
        }
    }
}

/// Base64 of either alphabet's padding rules, white space ignored.
fn decode_base64(text: &str) -> Result<Vec<u8>, String> {
    let clean: String;
    let text = if text.bytes().any(|b| b.is_ascii_whitespace()) {
        clean = text.split_ascii_whitespace().collect();
        &clean
    } else {
        text
    };
    STANDARD.decode(text).map_err(|e| format!("not base64: {e}"))
}

/// Base64 within an object.
struct Base64(Result<Vec<u8>, String>);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Base64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64 text")
            }

            fn visit_str<E>(self, text: &str) -> Result<Base64, E> {
                Ok(Base64(decode_base64(text)))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// A `.npy` file of three axes.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn npy_array(bytes: &[u8]) -> Result<IdArray, String> {
    let header = Header::parse(bytes)?;
    let data = bytes.get(header.data..).unwrap_or_default();
    if header.elements().is_some_and(|n| n > MAX_IDS) {
        return Err(TOO_MANY.into());
    }
    let need = header.elements().and_then(|n| n.checked_mul(header.dtype.size()));
    if need != Some(data.len()) {
        return Err(format!("an array of shape {:?} of {} does not have {} bytes", header.shape, header.dtype.name(), data.len()));
    }
    let mut ids = Vec::new();
    header.dtype.decode(data, &mut ids)?;
    if header.fortran {
        ids = from_fortran(&ids, &header.shape);
    }
    Ok(IdArray { largest_storable: header.dtype.largest_id(), ..three_axes(&header.shape, ids)? })
}

fn three_axes(shape: &[usize], ids: Vec<i32>) -> Result<IdArray, String> {
    match *shape {
        [rows, layers, width] => IdArray::new(rows, layers, width, ids),
        _ => Err(format!("expert ids have the axes rows, layers and experts, these have the shape {shape:?}")),
    }
}

/// SGLang's bare int32: the model's shape says how they are cut.
fn bare(bytes: &[u8], layers: Option<u16>, k: Option<u16>) -> Result<IdArray, String> {
    let (Some(layers), Some(k)) = (layers.map(usize::from), k.map(usize::from)) else {
        return Err("the ids come without a shape; give --model-config config.json, or --layers N and --k K".into());
    };
    let row = 4 * layers * k;
    if row == 0 || !bytes.len().is_multiple_of(row) {
        return Err(format!(
            "{} bytes of ids are not rows of {layers} layers and {k} experts (4 bytes each); check --layers and --k",
            bytes.len()
        ));
    }
    if bytes.len() / 4 > MAX_IDS {
        return Err(TOO_MANY.into());
    }
    let mut ids = Vec::new();
    Dtype::I32.decode(bytes, &mut ids)?;
    Ok(IdArray { bare: true, ..IdArray::new(bytes.len() / row, layers, k, ids)? })
}

impl<'de> Deserialize<'de> for Routed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyShape)
    }
}

struct AnyShape;

impl<'de> Visitor<'de> for AnyShape {
    type Value = Routed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expert ids: nested lists, base64 text, an object with `shape` and `data`, or null")
    }

    fn visit_unit<E>(self) -> Result<Routed, E> {
        Ok(Routed::Null)
    }

    fn visit_none<E>(self) -> Result<Routed, E> {
        Ok(Routed::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Routed, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_str<E>(self, text: &str) -> Result<Routed, E> {
        Ok(Routed::Text(decode_base64(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Routed, A::Error> {
        let (mut shape, mut ids) = (Vec::new(), Vec::new());
        Nest { depth: 0, shape: &mut shape, ids: &mut ids }.visit_seq(list)?;
        Ok(Routed::Nested(shape.into_iter().map(Option::unwrap_or_default).collect(), ids))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Routed, A::Error> {
        let (mut dtype, mut shape, mut data) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                PLACEHOLDER => return map.next_value().map(Routed::Cut),
                "dtype" => dtype = Some(map.next_value::<String>()?),
                "shape" => shape = Some(map.next_value::<Vec<usize>>()?),
                "data" => data = Some(map.next_value::<Base64>()?.0),
                "encoding" => {
                    let encoding: String = map.next_value()?;
                    if encoding != "base64" {
                        return Err(A::Error::custom(format!("ids in the encoding `{}`; only base64 is read", encoding.escape_debug())));
                    }
                }
                _ => {
                    map.next_value::<Value>()?;
                }
            }
        }
        match (dtype, shape, data) {
            (Some(dtype), Some(shape), Some(data)) => Ok(Routed::Described { dtype, shape, data }),
            _ => Err(A::Error::custom("an object of expert ids needs `dtype`, `shape` and `data`")),
        }
    }
}

/// One level of nested lists, which must all be of one length.
struct Nest<'a> {
    depth: usize,
    shape: &'a mut Vec<Option<usize>>,
    ids: &'a mut Vec<i32>,
}

impl<'de> DeserializeSeed<'de> for Nest<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Nest<'_> {
    fn number<E: Error>(self, id: Option<i32>) -> Result<(), E> {
        if self.depth < self.shape.len() {
            return Err(E::custom("expert ids: a number where a list was before"));
        }
        if self.ids.len() >= MAX_IDS {
            return Err(E::custom(TOO_MANY));
        }
        self.ids.push(id.ok_or_else(|| E::custom("expert ids: a number that is not an id"))?);
        Ok(())
    }
}

impl<'de> Visitor<'de> for Nest<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("lists of expert ids")
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<(), E> {
        self.number(i32::try_from(n).ok())
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<(), E> {
        self.number(i32::try_from(n).ok())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let depth = self.depth;
        if depth >= MAX_DEPTH {
            return Err(A::Error::custom("expert ids: lists nested too deeply"));
        }
        if depth == self.shape.len() {
            if !self.ids.is_empty() {
                return Err(A::Error::custom("expert ids: a list where a number was before"));
            }
            self.shape.push(None);
        }
        let mut len = 0usize;
        while list.next_element_seed(Nest { depth: depth + 1, shape: &mut *self.shape, ids: &mut *self.ids })?.is_some() {
            len += 1;
        }
        let place = self.shape.get_mut(depth).ok_or_else(|| A::Error::custom("expert ids: lists nested unevenly"))?;
        match place.replace(len) {
            Some(before) if before != len => Err(A::Error::custom(format!("expert ids: a list of {len} where others have {before}"))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(json: &str) -> Result<Routed, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    fn decode(json: &str) -> Result<Option<IdArray>, String> {
        parse(json)?.decode(Some(1), Some(2))
    }

    #[test]
    fn every_shape_gives_the_same_ids() {
        let want = IdArray::new(2, 1, 2, vec![1, 2, 3, 4]).unwrap();
        assert_eq!(decode("[[[1,2]],[[3,4]]]").unwrap(), Some(want.clone()));
        let bare = STANDARD.encode([1i32, 2, 3, 4].map(i32::to_le_bytes).concat());
        assert_eq!(decode(&format!("\"{bare}\"")).unwrap(), Some(IdArray { bare: true, ..want.clone() }));
        let short = STANDARD.encode([1i16, 2, 3, 4].map(i16::to_le_bytes).concat());
        let described = format!(r#"{{"encoding":"base64","dtype":"int16","shape":[2,1,2],"data":"{short}","x":[1]}}"#);
        assert_eq!(decode(&described).unwrap(), Some(want.clone()));
        let text = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 1, 2), }";
        let mut npy = b"\x93NUMPY\x01\x00".to_vec();
        npy.extend(u16::try_from(text.len()).unwrap().to_le_bytes());
        npy.extend(text.as_bytes());
        npy.extend([1, 3, 2, 4]);
        let npy = decode(&format!("\"{}\"", STANDARD.encode(npy))).unwrap().unwrap();
        assert_eq!((npy.largest_storable, IdArray { largest_storable: None, ..npy }), (Some(255), want));
        assert_eq!((parse("null").unwrap(), parse("null").unwrap().is_some()), (Routed::Null, false));
        assert_eq!(decode("[]").unwrap(), None);
    }

    #[test]
    fn what_is_uneven_or_not_ids_is_named() {
        for (bad, why) in [
            ("[[[1,2]],[[3]]]", "a list of 1 where others have 2"),
            ("[[[1,2]],[3]]", "a number where a list was"),
            ("[1,[2]]", "a list where a number was"),
            ("[[[[[1]]]]]", "too deeply"),
            ("[[[1.5,2]]]", "expected lists of expert ids"),
            ("[[[99999999999,2]]]", "not an id"),
            ("[[1,2],[3,4]]", "shape [2, 2]"),
            ("\"!\"", "base64"),
            ("\"AAAA\"", "3 bytes"),
            (r#"{"dtype":"int16","shape":[2]}"#, "needs `dtype`"),
            (r#"{"encoding":"hex","dtype":"int16","shape":[2],"data":""}"#, "hex"),
            (r#"{"dtype":"int16","shape":[9,9,9],"data":"AAAA"}"#, "9 rows"),
            ("3", "expected expert ids"),
        ] {
            let error = decode(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
        let error = parse("\"AAAAAAAAAAA=\"").unwrap().decode(None, Some(2)).unwrap_err();
        assert!(error.contains("--model-config"), "{error}");
    }

    proptest! {
        #[test]
        fn nested_lists_are_flat_in_c_order(rows in 1usize..4, layers in 1usize..4, width in 1usize..4) {
            let ids: Vec<i32> = (0..(rows * layers * width) as i32).collect();
            let nested: Vec<Vec<&[i32]>> = ids.chunks(layers * width).map(|row| row.chunks(width).collect()).collect();
            let json = serde_json::to_string(&nested).unwrap();
            let array = decode(&json).unwrap().unwrap();
            prop_assert_eq!((array.rows, array.layers, array.width), (rows, layers, width));
            prop_assert_eq!(array.ids, ids);
        }
    }
}
