use super::*;
use crate::import::pickle_machine::{MAX_NODES, MAX_VALUES};

fn parse(bytes: &[u8]) -> Result<Pickle, String> {
    Pickle::parse(bytes.to_vec())
}

#[test]
fn plain_data_is_built() {
    // {'a': [1, 300, -2, 70000], 'b': (None, True, 2.5, 'x')}, protocol 2.
    let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00a]q\x01(K\x01M\x2c\x01J\xfe\xff\xff\xffJ\x70\x11\x01\x00eX\x01\x00\x00\x00b(N\x88G\x40\x04\x00\x00\x00\x00\x00\x00X\x01\x00\x00\x00xtu.";
    let pickle = parse(bytes).unwrap();
    let root = pickle.root();
    let a = pickle.get(root, "a").unwrap();
    assert_eq!(pickle.list(a).unwrap(), [Value::Int(1), Value::Int(300), Value::Int(-2), Value::Int(70000)]);
    assert_eq!(pickle.u32s(a), None);
    let b = pickle.list(pickle.get(root, "b").unwrap()).unwrap().to_vec();
    assert_eq!((b[0], b[1], b[2], pickle.text(b[3])), (Value::None, Value::Bool(true), Value::Float(2.5), Some("x")));
    assert_eq!(pickle.describe(root), "a dictionary of a, b");
    assert_eq!(parse(b"\x80\x02\x8a\x02\xff\x7f.").unwrap().root(), Value::Int(0x7fff));
    assert_eq!(parse(b"\x80\x02\x8a\x01\xff.").unwrap().root(), Value::Int(-1));
    assert_eq!(parse(b"\x80\x02\x8a\x00.").unwrap().root(), Value::Int(0));
}

#[test]
fn code_is_named_and_refused() {
    let error = parse(b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R.").unwrap_err();
    assert!(error.contains("`posix.system`") && error.contains("nothing of it was run"), "{error}");
    let error = parse(b"\x80\x04\x8c\x02os\x8c\x06system\x93.").unwrap_err();
    assert!(error.contains("`os.system`"), "{error}");
    let error = parse(b"(X\x02\x00\x00\x00lsios\nsystem\n.").unwrap_err();
    assert!(error.contains("`os.system`"), "{error}");
    // What is allowed by name is still nothing to be built, called with other arguments, or called at all.
    assert!(parse(b"\x80\x02ccollections\nOrderedDict\n)R}b.").unwrap_err().contains("BUILD"));
    assert!(parse(b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.").is_err());
    assert!(parse(b"\x80\x02ctorch\nIntStorage\n)R.").unwrap_err().contains("cannot be called"));
}

/// A tensor of the given storage length, offset, shape and strides (each below 256).
fn tensor(len: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let mut out = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x000X\x06\x00\x00\x00cuda:0".to_vec();
    out.extend([b'K', len, b't', b'Q', b'K', offset]);
    for numbers in [shape, strides] {
        out.push(b'(');
        numbers.iter().for_each(|&n| out.extend([b'K', n]));
        out.push(b't');
    }
    out.extend(b"\x89ccollections\nOrderedDict\n)RtR.");
    out
}

#[test]
fn tensors_stay_within_their_storage() {
    let pickle = parse(&tensor(12, 1, &[2, 3], &[4, 1])).unwrap();
    let found = pickle.tensor(pickle.root()).unwrap();
    assert_eq!((found.offset, found.shape.as_slice(), found.strides.as_slice()), (1, &[2, 3][..], &[4, 1][..]));
    assert_eq!((found.storage.element, found.storage.key.as_str(), found.storage.len), (Element::Int, "0", 12));
    assert!(parse(&tensor(12, 6, &[2, 3], &[4, 1])).unwrap_err().contains("beyond its storage"));
    assert!(parse(&tensor(0, 6, &[0, 3], &[4, 1])).is_ok());
    assert!(parse(&tensor(12, 0, &[2], &[1, 1])).is_err());
    assert!(parse(&tensor(255, 0, &[1; 9], &[1; 9])).unwrap_err().contains("axes"));
}

#[test]
fn what_contains_itself_and_what_nests_deeply_ends() {
    // l = []; l.append(l)
    let pickle = parse(b"\x80\x02]q\x00h\x00a.").unwrap();
    assert_eq!(pickle.list(pickle.root()).unwrap(), [pickle.root()]);
    let mut deep = b"\x80\x02".to_vec();
    deep.resize(1_000_000, b']');
    deep.resize(1_999_000, b'a');
    deep.push(b'.');
    assert!(parse(&deep).is_ok());
    // A small pickle cannot ask for a large memo, nor a large one for values without end.
    assert!(parse(b"\x80\x02Nr\xff\xff\xff\x7f.").unwrap_err().contains("beyond the pickle's size"));
    let many = vec![b'N'; MAX_VALUES + 2];
    assert!(parse(&many).unwrap_err().contains("values"));
    let many = vec![b']'; MAX_NODES + 2];
    assert!(parse(&many).unwrap_err().contains("containers"));
}

#[test]
fn broken_pickles_are_refused() {
    for bad in [
        &b""[..],
        b"\x80\x02",
        b"\x80\x09N.",
        b"K",
        b"a.",
        b"e.",
        b"u.",
        b"(K\x01u.",
        b"}(K\x01u.",
        b"h\x05.",
        b"R.",
        b"Q.",
        b"q\x00.",
        b"(.",
        b"X\xff\xff\xff\xff.",
    ] {
        assert!(parse(bad).is_err(), "{bad:?}");
    }
}
