//! Python pickles of plain data, as `torch.save` writes them: a value builder, never an interpreter of code.
//!
//! Of the globals that a pickle may name, only those of tensors and ordered dictionaries are known; any other ends the
//! reading with its name. Nothing is imported, called or run. Values lie in one arena and refer to each other by number:
//! a pickle that contains itself, or nests a million times, costs nothing special.

use super::pickle_machine::Machine;

/// One value; a container is a [`Node`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True`, `False`.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A float.
    Float(f64),
    /// Bytes of the pickle: begin and length.
    Text(u32, u32),
    /// Number of a node.
    Node(u32),
}

/// What a value can refer to.
#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dictionary, in order.
    Dict(Vec<(Value, Value)>),
    /// A global of the list below.
    Global(Global),
    /// A tensor's storage.
    Storage(Box<Storage>),
    /// A tensor.
    Tensor(Box<Tensor>),
}

/// The globals that are data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Global {
    /// `torch._utils._rebuild_tensor_v2`
    RebuildTensor,
    /// `collections.OrderedDict`
    OrderedDict,
    /// `torch.IntStorage` and its kind.
    Storage(Element),
}

/// Type of a storage's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// u8.
    Byte,
    /// i8.
    Char,
    /// i16.
    Short,
    /// i32.
    Int,
    /// i64.
    Long,
    /// f16.
    Half,
    /// bf16.
    BFloat16,
    /// f32.
    Float,
    /// f64.
    Double,
    /// One byte, 0 or 1.
    Bool,
}

impl Global {
    /// The global of this name, when it is data.
    pub fn of(module: &str, name: &str) -> Option<Self> {
        let element = match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => return Some(Self::RebuildTensor),
            ("collections", "OrderedDict") => return Some(Self::OrderedDict),
            ("torch", "ByteStorage") => Element::Byte,
            ("torch", "CharStorage") => Element::Char,
            ("torch", "ShortStorage") => Element::Short,
            ("torch", "IntStorage") => Element::Int,
            ("torch", "LongStorage") => Element::Long,
            ("torch", "HalfStorage") => Element::Half,
            ("torch", "BFloat16Storage") => Element::BFloat16,
            ("torch", "FloatStorage") => Element::Float,
            ("torch", "DoubleStorage") => Element::Double,
            ("torch", "BoolStorage") => Element::Bool,
            _ => return None,
        };
        Some(Self::Storage(element))
    }
}

/// Where a tensor's numbers are: member `data/KEY` of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Type of the elements.
    pub element: Element,
    /// Name of the member.
    pub key: String,
    /// Number of elements.
    pub len: u64,
}

/// A view of a storage. Lengths and strides are in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its storage.
    pub storage: Storage,
    /// First element.
    pub offset: u64,
    /// Lengths of the axes.
    pub shape: Vec<u64>,
    /// Steps along the axes.
    pub strides: Vec<u64>,
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle {
    bytes: Vec<u8>,
    nodes: Vec<Node>,
    root: Value,
}

impl Pickle {
    /// Reads a pickle of protocol 2 to 5.
    ///
    /// # Errors
    /// A sentence: the global that is not data, the opcode that is not known, or where the pickle is broken.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        if u32::try_from(bytes.len()).is_err() {
            return Err("the pickle has more than 4 GiB".into());
        }
        let (root, nodes) = Machine::run(&bytes)?;
        Ok(Self { bytes, nodes, root })
    }

    /// The value that the pickle is of.
    pub fn root(&self) -> Value {
        self.root
    }

    fn node(&self, value: Value) -> Option<&Node> {
        match value {
            Value::Node(at) => self.nodes.get(at as usize),
            _ => None,
        }
    }

    /// The elements of a list or tuple.
    pub fn list(&self, value: Value) -> Option<&[Value]> {
        match self.node(value)? {
            Node::List(items) | Node::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// The entries of a dictionary.
    pub fn dict(&self, value: Value) -> Option<&[(Value, Value)]> {
        match self.node(value)? {
            Node::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    /// The value under a text key; of several, the last.
    pub fn get(&self, dict: Value, key: &str) -> Option<Value> {
        self.dict(dict)?.iter().rev().find(|(k, _)| self.text(*k) == Some(key)).map(|(_, value)| *value)
    }

    /// A tensor.
    pub fn tensor(&self, value: Value) -> Option<&Tensor> {
        match self.node(value)? {
            Node::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// A text, when it is UTF-8.
    pub fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Text(at, len) => std::str::from_utf8(self.bytes.get(at as usize..(at as usize).checked_add(len as usize)?)?).ok(),
            _ => None,
        }
    }

    /// An integer.
    pub fn int(&self, value: Value) -> Option<i64> {
        match value {
            Value::Int(n) => Some(n),
            _ => None,
        }
    }

    /// The integers of a list, all within `u32`; `None` when it is no such list.
    pub fn u32s(&self, value: Value) -> Option<Vec<u32>> {
        self.list(value)?.iter().map(|&item| self.int(item).and_then(|n| u32::try_from(n).ok())).collect()
    }

    /// A few words on what a dictionary holds: its keys, or what else the value is.
    pub fn describe(&self, value: Value) -> String {
        match self.node(value) {
            Some(Node::Dict(entries)) => {
                let mut keys: Vec<String> = entries
                    .iter()
                    .take(8)
                    .filter_map(|(k, _)| self.text(*k))
                    .map(|k| k.chars().take(40).collect::<String>().escape_debug().to_string())
                    .collect();
                if entries.len() > keys.len() {
                    keys.push("...".into());
                }
                format!("a dictionary of {}", keys.join(", "))
            }
            Some(Node::List(items) | Node::Tuple(items)) => format!("a list of {}", items.len()),
            Some(Node::Tensor(tensor)) => format!("a tensor of shape {:?}", tensor.shape),
            _ => "a plain value".into(),
        }
    }
}

#[cfg(test)]
#[path = "pickle_tests.rs"]
mod tests;
