//! The machine that a pickle is a program of, as far as data needs it: a stack, marks, a memo, an arena of containers.

use super::pickle::{Global, Node, Storage, Tensor, Value};
use super::pickle_opcode::{Reader, name_of};

/// Values of one pickle: numbers, texts, and places in containers.
pub(super) const MAX_VALUES: usize = 8 << 20;
/// Lists, tuples, dictionaries and tensors of one pickle.
pub(super) const MAX_NODES: usize = 2 << 20;
/// Keys of one dictionary. Those that are looked into have a dozen.
const MAX_KEYS: usize = 4096;
/// Axes of a tensor.
const MAX_AXES: usize = 8;

/// The machine, on its way through one pickle.
pub struct Machine<'a> {
    reader: Reader<'a>,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    nodes: Vec<Node>,
    values: usize,
}

impl<'a> Machine<'a> {
    /// Runs through a pickle; gives the value that it is of, and the nodes that values refer to.
    ///
    /// # Errors
    /// A sentence: the global that is not data, the opcode that is not known, or where the pickle is broken.
    pub fn run(bytes: &'a [u8]) -> Result<(Value, Vec<Node>), String> {
        let mut machine =
            Self { reader: Reader::new(bytes), stack: Vec::new(), marks: Vec::new(), memo: Vec::new(), nodes: Vec::new(), values: 0 };
        loop {
            let at = machine.reader.at();
            let opcode = machine.reader.byte()?;
            if opcode == b'.' {
                let root = machine.pop()?;
                return Ok((root, machine.nodes));
            }
            machine.step(opcode).map_err(|reason| format!("the pickle, byte {at}: {reason}"))?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            // PROTO, FRAME
            0x80 => match self.reader.byte()? {
                2..=5 => Ok(()),
                other => Err(format!("protocol {other} is not read")),
            },
            0x95 => self.reader.take(8).map(|_| ()),
            b'(' => {
                self.values += 1;
                self.bounded()?;
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'}' => self.push_node(Node::Dict(Vec::new())),
            b']' => self.push_node(Node::List(Vec::new())),
            b')' => self.push_node(Node::Tuple(Vec::new())),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'K' => self.reader.byte().and_then(|n| self.push(Value::Int(i64::from(n)))),
            b'M' => self.reader.unsigned(2).and_then(|n| self.push(Value::Int(n))),
            b'J' => self.reader.unsigned(4).and_then(|n| self.push(Value::Int(i64::from(n as u32 as i32)))),
            0x8a => self.reader.long().and_then(|n| self.push(Value::Int(n))),
            b'G' => self.reader.float().and_then(|x| self.push(Value::Float(x))),
            b'X' => self.reader.text(4).and_then(|(at, len)| self.push(Value::Text(at, len))),
            0x8c => self.reader.text(1).and_then(|(at, len)| self.push(Value::Text(at, len))),
            b'q' => self.reader.byte().and_then(|n| self.put(usize::from(n))),
            b'r' => self.reader.unsigned(4).and_then(|n| self.put(usize::try_from(n).unwrap_or(usize::MAX))),
            0x94 => self.put(self.memo.len()),
            b'h' => self.reader.byte().and_then(|n| self.recall(usize::from(n))),
            b'j' => self.reader.unsigned(4).and_then(|n| self.recall(usize::try_from(n).unwrap_or(usize::MAX))),
            b't' => self.since_mark().and_then(|items| self.push_node(Node::Tuple(items))),
            0x85..=0x87 => {
                let n = usize::from(opcode - 0x84);
                let from = self.stack.len().checked_sub(n).ok_or("the stack is empty")?;
                self.above_mark(from)?;
                let items = self.stack.split_off(from);
                self.push_node(Node::Tuple(items))
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])
            }
            b'e' => self.since_mark().and_then(|items| self.append(items)),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.insert(&[key, value])
            }
            b'u' => self.since_mark().and_then(|items| self.insert(&items)),
            b'c' => {
                let (module, name) = (self.reader.line()?, self.reader.line()?);
                self.global(module, name)
            }
            // INST: makes an instance of a class, which no tensor needs.
            b'i' => {
                let (module, name) = (self.reader.line()?, self.reader.line()?);
                Err(refused(module, name))
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let text = |value| match value {
                    Value::Text(at, len) => self.reader.bytes(at, len),
                    _ => None,
                };
                let (module, name) = text(module).zip(text(name)).ok_or("a global that is not named by texts")?;
                self.global(module, name)
            }
            b'Q' => self.persistent(),
            b'R' => self.reduce(),
            other => Err(format!(
                "opcode {} is not of plain data: the file was not made by saving tensors, lists and dictionaries",
                name_of(other)
            )),
        }
    }

    /// Every value costs memory: the pickle's bytes bound them, and so does a fixed number.
    fn bounded(&self) -> Result<(), String> {
        if self.values > MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values; record in smaller pieces"));
        }
        Ok(())
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        self.values += 1;
        self.bounded()?;
        self.stack.push(value);
        Ok(())
    }

    fn push_node(&mut self, node: Node) -> Result<(), String> {
        if self.nodes.len() >= MAX_NODES {
            return Err(format!("more than {MAX_NODES} containers; record in smaller pieces"));
        }
        let at = self.nodes.len() as u32;
        self.nodes.push(node);
        self.push(Value::Node(at))
    }

    fn above_mark(&self, from: usize) -> Result<(), String> {
        if self.marks.last().is_some_and(|&mark| from < mark) { Err("the stack is empty above the mark".into()) } else { Ok(()) }
    }

    fn pop(&mut self) -> Result<Value, String> {
        self.above_mark(self.stack.len().checked_sub(1).ok_or("the stack is empty")?)?;
        self.stack.pop().ok_or_else(|| "the stack is empty".into())
    }

    fn since_mark(&mut self) -> Result<Vec<Value>, String> {
        let mark = self.marks.pop().filter(|&mark| mark <= self.stack.len()).ok_or("there is no mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn put(&mut self, at: usize) -> Result<(), String> {
        let value = *self.stack.last().ok_or("the stack is empty")?;
        // Places are given in order; there are fewer than bytes.
        if at >= self.reader.len().min(MAX_VALUES) {
            return Err(format!("place {at} of the memo is beyond the pickle's size"));
        }
        if at >= self.memo.len() {
            self.memo.resize(at + 1, None);
        }
        if let Some(place) = self.memo.get_mut(at) {
            *place = Some(value);
        }
        Ok(())
    }

    fn recall(&mut self, at: usize) -> Result<(), String> {
        let value = self.memo.get(at).copied().flatten().ok_or_else(|| format!("nothing is at place {at} of the memo"))?;
        self.push(value)
    }

    fn top(&mut self) -> Option<&mut Node> {
        match self.stack.last()? {
            Value::Node(at) => self.nodes.get_mut(*at as usize),
            _ => None,
        }
    }

    fn append(&mut self, items: Vec<Value>) -> Result<(), String> {
        match self.top() {
            Some(Node::List(list)) => {
                list.extend(items);
                Ok(())
            }
            _ => Err("items for what is not a list".into()),
        }
    }

    fn insert(&mut self, items: &[Value]) -> Result<(), String> {
        let Some(Node::Dict(entries)) = self.top() else { return Err("entries for what is not a dictionary".into()) };
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() || entries.len() + pairs.len() > MAX_KEYS {
            return Err(format!("a dictionary of more than {MAX_KEYS} keys, or a key without a value"));
        }
        entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    fn global(&mut self, module: &[u8], name: &[u8]) -> Result<(), String> {
        let known = std::str::from_utf8(module).ok().zip(std::str::from_utf8(name).ok()).and_then(|(m, n)| Global::of(m, n));
        self.push_node(Node::Global(known.ok_or_else(|| refused(module, name))?))
    }

    fn node(&self, value: Value) -> Option<&Node> {
        match value {
            Value::Node(at) => self.nodes.get(at as usize),
            _ => None,
        }
    }

    fn tuple(&self, value: Value) -> Result<&[Value], String> {
        match self.node(value) {
            Some(Node::Tuple(items)) => Ok(items),
            _ => Err("a tuple was to be here".into()),
        }
    }

    /// `('storage', torch.IntStorage, key, location, number of elements)`; the location does not matter here.
    fn persistent(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        let wrong = "a reference that is not to a tensor's storage";
        let &[Value::Text(kind, kind_len), storage, Value::Text(key, key_len), _, Value::Int(len)] = self.tuple(id)? else {
            return Err(wrong.into());
        };
        let Some(Node::Global(Global::Storage(element))) = self.node(storage) else { return Err(wrong.into()) };
        let key = self.reader.bytes(key, key_len).and_then(|k| std::str::from_utf8(k).ok()).filter(|k| k.len() <= 64);
        if self.reader.bytes(kind, kind_len) != Some(b"storage") {
            return Err(wrong.into());
        }
        let (Some(key), Ok(len)) = (key, u64::try_from(len)) else { return Err(wrong.into()) };
        let storage = Storage { element: *element, key: key.to_owned(), len };
        self.push_node(Node::Storage(Box::new(storage)))
    }

    fn reduce(&mut self) -> Result<(), String> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        match self.node(callable) {
            Some(Node::Global(Global::OrderedDict)) if self.tuple(arguments)?.is_empty() => self.push_node(Node::Dict(Vec::new())),
            Some(Node::Global(Global::RebuildTensor)) => {
                let tensor = self.tensor(arguments)?;
                self.push_node(Node::Tensor(Box::new(tensor)))
            }
            _ => Err("a call of what cannot be called".into()),
        }
    }

    /// `(storage, offset, shape, strides, requires_grad, hooks)`
    fn tensor(&self, arguments: Value) -> Result<Tensor, String> {
        let [storage, Value::Int(offset), shape, strides, ..] = *self.tuple(arguments)? else {
            return Err("a tensor without storage, offset, shape and strides".into());
        };
        let Some(Node::Storage(storage)) = self.node(storage) else { return Err("a tensor without a storage".into()) };
        let numbers = |value: Value| -> Result<Vec<u64>, String> {
            let items = self.tuple(value)?;
            let number = |v: &Value| match v {
                Value::Int(n) => u64::try_from(*n).ok(),
                _ => None,
            };
            items
                .iter()
                .take(MAX_AXES + 1)
                .map(number)
                .collect::<Option<_>>()
                .ok_or_else(|| "a tensor's shape that is not of numbers".into())
        };
        let (shape, strides) = (numbers(shape)?, numbers(strides)?);
        if shape.len() != strides.len() || shape.len() > MAX_AXES {
            return Err(format!("a tensor of {} axes and {} strides", shape.len(), strides.len()));
        }
        let offset = u64::try_from(offset).map_err(|_| "a tensor's offset is below 0")?;
        let last = shape.iter().zip(&strides).try_fold(offset, |sum, (&n, &s)| sum.checked_add(n.saturating_sub(1).checked_mul(s)?));
        if !shape.contains(&0) && last.is_none_or(|last| last >= storage.len) {
            return Err(format!("a tensor of shape {shape:?} reaches beyond its storage of {} elements", storage.len));
        }
        Ok(Tensor { storage: Storage::clone(storage), offset, shape, strides })
    }
}

/// Why a global that is not data ends the reading.
fn refused(module: &[u8], name: &[u8]) -> String {
    let whole = format!("{}.{}", String::from_utf8_lossy(module), String::from_utf8_lossy(name));
    let shown: String = whole.chars().take(120).collect();
    format!("it names `{}`, which is code and no data: refused, nothing of it was run", shown.escape_debug())
}
