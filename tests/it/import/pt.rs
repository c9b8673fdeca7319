//! Makes `.pt` files: the archive and the pickle that `torch.save` would write of the same data.

use flate2::Crc;

/// A Python value.
#[derive(Clone)]
pub enum P {
    None,
    Int(i64),
    Text(&'static str),
    List(Vec<P>),
    Dict(Vec<(&'static str, P)>),
    /// Storage, shape and bytes; in C order.
    Tensor(&'static str, Vec<usize>, Vec<u8>),
}

/// A list of numbers.
pub fn ints(numbers: impl IntoIterator<Item = i64>) -> P {
    P::List(numbers.into_iter().map(P::Int).collect())
}

/// A tensor of 32-bit integers.
pub fn tensor(shape: &[usize], numbers: &[i32]) -> P {
    assert_eq!(shape.iter().product::<usize>(), numbers.len());
    P::Tensor("IntStorage", shape.to_vec(), numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
}

/// A file with this value.
pub fn save(root: &P) -> Vec<u8> {
    let (mut pickle, mut storages) = (b"\x80\x02".to_vec(), Vec::new());
    write(root, &mut pickle, &mut storages);
    pickle.push(b'.');
    with_pickle(&pickle, &storages)
}

/// A file with this pickle and these storages.
pub fn with_pickle(pickle: &[u8], storages: &[Vec<u8>]) -> Vec<u8> {
    let mut members = vec![("dump/data.pkl".to_owned(), pickle.to_vec()), ("dump/byteorder".to_owned(), b"little".to_vec())];
    members.extend(storages.iter().enumerate().map(|(i, bytes)| (format!("dump/data/{i}"), bytes.clone())));
    members.push(("dump/version".to_owned(), b"3\n".to_vec()));
    archive(&members)
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn int(out: &mut Vec<u8>, n: i64) {
    match i32::try_from(n) {
        Ok(n) => {
            out.push(b'J');
            out.extend(n.to_le_bytes());
        }
        Err(_) => {
            out.extend([0x8a, 8]);
            out.extend(n.to_le_bytes());
        }
    }
}

fn tuple(out: &mut Vec<u8>, numbers: &[usize]) {
    out.push(b'(');
    numbers.iter().for_each(|&n| int(out, n as i64));
    out.push(b't');
}

fn write(value: &P, out: &mut Vec<u8>, storages: &mut Vec<Vec<u8>>) {
    match value {
        P::None => out.push(b'N'),
        P::Int(n) => int(out, *n),
        P::Text(t) => text(out, t),
        P::List(items) => {
            out.extend(b"](");
            items.iter().for_each(|item| write(item, out, storages));
            out.push(b'e');
        }
        P::Dict(entries) => {
            out.extend(b"}(");
            for (key, value) in entries {
                text(out, key);
                write(value, out, storages);
            }
            out.push(b'u');
        }
        P::Tensor(storage, shape, bytes) => {
            let size = match *storage {
                "LongStorage" | "DoubleStorage" => 8,
                "ShortStorage" => 2,
                "ByteStorage" => 1,
                _ => 4,
            };
            out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            text(out, "storage");
            out.extend(format!("ctorch\n{storage}\n").bytes());
            text(out, &storages.len().to_string());
            text(out, "cuda:0");
            int(out, (bytes.len() / size) as i64);
            out.extend(b"tQ");
            int(out, 0);
            tuple(out, shape);
            let mut strides = vec![1; shape.len()];
            (1..shape.len()).rev().for_each(|i| strides[i - 1] = strides[i] * shape[i]);
            tuple(out, &strides);
            out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
            storages.push(bytes.clone());
        }
    }
}

/// An archive of stored members.
pub fn archive(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in members {
        let mut crc = Crc::new();
        crc.update(content);
        let offset = out.len() as u32;
        let mut common = Vec::new();
        for n in [20u16, 0, 0, 0, 0] {
            common.extend(n.to_le_bytes());
        }
        common.extend(crc.sum().to_le_bytes());
        common.extend((content.len() as u32).to_le_bytes());
        common.extend((content.len() as u32).to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend(0u16.to_le_bytes());
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.bytes());
        out.extend(content);
        directory.extend(b"PK\x01\x02");
        directory.extend(20u16.to_le_bytes());
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.bytes());
    }
    let (at, len, n) = (out.len() as u32, directory.len() as u32, members.len() as u16);
    out.extend(directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend(n.to_le_bytes());
    out.extend(n.to_le_bytes());
    out.extend(len.to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend(0u16.to_le_bytes());
    out
}
