//! `.npy` and `.npz` arrays of expert ids, or of counts by expert, with declared axes.

use super::events::{self, Source};
use super::npy::{Header, from_fortran};
use super::profile::Profile;
use super::rows::{self, IdArray, Survey};
use super::zip::Archive;
use super::{DataKind, Flag, Head, ImportError, Importer, LayerAxis, Options, Sink, flags};
use crate::trace::expert_set::MAX_EXPERTS;
use crate::trace::manifest::{IdSpace, WindowCompleteness};
use crate::trace::{FinishReason, Phase, StepRoutes, input_file};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// Ids of one piece of an array.
const PIECE: usize = 4 << 20;
/// Arrays that must be turned, and members of archives, have at most this many bytes.
const MAX_WHOLE: u64 = 256 << 20;
/// Names of members that hold ids.
const NAMES: [&str; 5] = ["routed_experts", "rollout_routed_experts", "expert_ids", "topk_ids", "topk_indices"];
/// Names of members that hold tokens.
const TOKEN_NAMES: [&str; 4] = ["tokens", "token_ids", "input_ids", "all_token_ids"];

/// NumPy arrays.
pub struct Arrays;

impl Importer for Arrays {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn about(&self) -> &'static str {
        "NumPy arrays of expert ids (.npy, .npz), axes as in --axes"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::ARRAYS
    }

    fn sniff(&self, head: &Head) -> bool {
        head.starts_with(b"\x93NUMPY") || head.starts_with(b"PK\x03\x04") && head.extension() == "npz"
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        for path in inputs {
            if options.kind == Some(DataKind::Counts) {
                flags::check(path, "an array of counts", flags::ARRAY_COUNTS, options)?;
            }
            let array = Array::find(path, options)?;
            if options.kind == Some(DataKind::Counts) { counts(&array, options, sink)? } else { routes(&array, options, sink)? }
        }
        Ok(())
    }
}

/// An array in a file, and what its axes are.
struct Array<'a> {
    path: &'a Path,
    /// Index of the member within an archive.
    member: Option<usize>,
    header: Header,
    /// One letter an axis.
    axes: Vec<char>,
    tokens: Vec<u32>,
    packed: bool,
}

impl<'a> Array<'a> {
    fn find(path: &'a Path, options: &Options) -> Result<Self, ImportError> {
        let wrong = |reason: String| ImportError::input(path, reason);
        let head = Head::read(path)?;
        if options.member.is_some() && !head.starts_with(b"PK") {
            return Err(wrong("--member names an array of an archive (.npz), and this is one array: leave it out".into()));
        }
        let (member, header, tokens) = if head.starts_with(b"PK") {
            Self::of_archive(path, options)?
        } else {
            (None, Header::parse(&head.bytes).map_err(wrong)?, Vec::new())
        };
        let default = match (options.kind.unwrap_or_default(), header.shape.len()) {
            (DataKind::Counts, 2) => "le",
            (DataKind::Counts, _) => "tle",
            (DataKind::Routes, _) => "tlk",
        };
        let axes: Vec<char> = options.axes.as_deref().unwrap_or(default).chars().collect();
        let last = if options.kind == Some(DataKind::Counts) { 'e' } else { 'k' };
        let known = |c: &char| ['w', 't', 'l', last].contains(c);
        let distinct = axes.iter().enumerate().all(|(i, c)| !axes.iter().take(i).any(|d| d == c));
        if !axes.iter().all(known) || !distinct || !axes.contains(&'l') || !axes.contains(&last) {
            return Err(wrong(format!("--axes takes each of w, t, l, {last} at most once, and l and {last} at least")));
        }
        if axes.len() != header.shape.len() {
            let names: String = axes.iter().collect();
            return Err(wrong(format!("an array of shape {:?} does not have the axes `{names}`; give --axes (and --kind)", header.shape)));
        }
        if !header.dtype.is_integer() && options.kind != Some(DataKind::Counts) {
            return Err(wrong(format!("numbers of type {} are not expert ids; counts need --kind counts", header.dtype.name())));
        }
        let need = header.elements().and_then(|n| n.checked_mul(header.dtype.size()));
        let have = path.metadata().map_err(ImportError::io(path))?.len().saturating_sub(header.data as u64);
        if need.is_none_or(|n| member.is_none() && n as u64 != have) {
            return Err(wrong(format!("an array of shape {:?} of {} does not have {have} bytes", header.shape, header.dtype.name())));
        }
        // Axes beside one of length 0 can be of any length: nothing is multiplied or counted of them.
        if header.elements() == Some(0) {
            let nothing = match options.kind.unwrap_or_default() {
                DataKind::Counts => "holds no counts: nothing was recorded",
                DataKind::Routes if axes.iter().zip(&header.shape).any(|(axis, &len)| *axis == 't' && len == 0) => {
                    "has no rows: no token was captured"
                }
                DataKind::Routes => "holds no ids: nothing was captured",
            };
            return Err(ImportError::empty(path, format!("an array of shape {:?} {nothing}", header.shape)));
        }
        Ok(Self { path, member, header, axes, tokens, packed: options.packed_weights })
    }

    /// The member that holds ids: the named one, one of a usual name, or the only one of three or more axes.
    fn of_archive(path: &Path, options: &Options) -> Result<(Option<usize>, Header, Vec<u32>), ImportError> {
        let wrong = |reason: String| ImportError::input(path, reason);
        let io = ImportError::io(path);
        let mut archive = Archive::open(BufReader::new(input_file::open_regular(path).map_err(&io)?)).map_err(&io)?;
        let names: Vec<String> = archive.members().iter().map(|m| m.name.strip_suffix(".npy").unwrap_or(&m.name).to_owned()).collect();
        let index_of = |wanted: &[&str]| names.iter().position(|name| wanted.contains(&name.as_str()));
        let mut header = |index: usize| -> Result<Header, ImportError> {
            Header::parse(&archive.read(index, MAX_WHOLE).map_err(&io)?).map_err(|e| wrong(format!("{}: {e}", names[index].escape_debug())))
        };
        let chosen = match &options.member {
            Some(name) => {
                index_of(&[name]).ok_or_else(|| wrong(format!("no member `{}`; it has {}", name.escape_debug(), names.join(", "))))?
            }
            None => match index_of(&NAMES) {
                Some(index) => index,
                None => {
                    let mut deep = Vec::new();
                    for index in 0..names.len() {
                        if header(index)?.shape.len() >= 2 {
                            deep.push(index);
                        }
                    }
                    match deep.as_slice() {
                        [one] => *one,
                        [] => return Err(ImportError::empty(path, format!("no array of expert ids; it has {}", names.join(", ")))),
                        _ => return Err(wrong(format!("several arrays: {}; give --member NAME", names.join(", ")))),
                    }
                }
            },
        };
        let found = header(chosen)?;
        let mut tokens = Vec::new();
        if let Some(index) = index_of(&TOKEN_NAMES) {
            let bytes = archive.read(index, MAX_WHOLE).map_err(&io)?;
            let header = Header::parse(&bytes).map_err(&wrong)?;
            let mut ids = Vec::new();
            header.dtype.decode(bytes.get(header.data..).unwrap_or_default(), &mut ids).map_err(&wrong)?;
            tokens = ids.iter().map(|&id| u32::try_from(id).unwrap_or(u32::MAX)).collect();
        }
        Ok((Some(chosen), found, tokens))
    }

    fn wrong(&self, reason: impl Into<String>) -> ImportError {
        ImportError::input(self.path, reason)
    }

    fn len(&self, axis: char) -> usize {
        self.axes.iter().zip(&self.header.shape).find(|(a, _)| **a == axis).map_or(1, |(_, &len)| len)
    }

    /// Hands over pieces with the axes `[w t, l, last]`: whole windows, or rows.
    fn pieces(&self, mut take: impl FnMut(IdArray) -> Result<(), ImportError>) -> Result<(), ImportError> {
        let io = ImportError::io(self.path);
        let file = BufReader::with_capacity(1 << 20, input_file::open_regular(self.path).map_err(&io)?);
        let mut reader: Box<dyn Read> = match self.member {
            Some(index) => {
                let mut archive = Archive::open(file).map_err(&io)?;
                Box::new(std::io::Cursor::new(archive.read(index, MAX_WHOLE).map_err(&io)?))
            }
            None => Box::new(file),
        };
        std::io::copy(&mut (&mut reader).take(self.header.data as u64), &mut std::io::sink()).map_err(&io)?;
        let (size, shape) = (self.header.dtype.size(), &self.header.shape);
        let total = self.header.elements().unwrap_or(0);
        let outer = shape.first().copied().unwrap_or(0);
        // Pieces are cut along the first axis, where that is one of windows or tokens.
        let whole = self.header.fortran || !matches!(self.axes.first(), Some('w' | 't'));
        if whole && (total * size) as u64 > MAX_WHOLE {
            return Err(self.wrong(format!(
                "more than {} MiB in an order that cannot be read in pieces; save it in C order, tokens first",
                MAX_WHOLE >> 20
            )));
        }
        let inner = total.checked_div(outer).unwrap_or(0);
        let step = if whole { outer } else { (PIECE / inner.max(1)).max(1) };
        let mut at = 0;
        while at < outer {
            let n = step.min(outer - at);
            let mut bytes = Vec::new();
            let want = n * inner * size;
            (&mut reader).take(want as u64).read_to_end(&mut bytes).map_err(&io)?;
            if bytes.len() != want {
                return Err(self.wrong("the array is cut off"));
            }
            let mut ids = Vec::new();
            self.header.dtype.decode(&bytes, &mut ids).map_err(|e| self.wrong(e))?;
            drop(bytes);
            let mut shape = shape.clone();
            if let Some(first) = shape.first_mut() {
                *first = n;
            }
            if self.header.fortran {
                ids = from_fortran(&ids, &shape);
            }
            take(self.piece(ids, &shape)?)?;
            at += n;
        }
        Ok(())
    }

    fn piece(&self, ids: Vec<i32>, shape: &[usize]) -> Result<IdArray, ImportError> {
        let last = if self.axes.contains(&'e') { 'e' } else { 'k' };
        let order: Vec<usize> = ['w', 't', 'l', last].iter().filter_map(|c| self.axes.iter().position(|a| a == c)).collect();
        let ids = if order.is_sorted() { ids } else { permute(&ids, shape, &order) };
        let len = |axis: char| self.axes.iter().position(|a| *a == axis).and_then(|at| shape.get(at)).copied().unwrap_or(1);
        let mut array = IdArray::new(len('w') * len('t'), len('l'), len(last), ids).map_err(|e| self.wrong(e))?;
        array.largest_storable = self.header.dtype.largest_id();
        if self.packed { array.unpack_weights().map_err(|e| self.wrong(e)) } else { Ok(array) }
    }
}

/// Brings axes into another order: axis `order[i]` of the input becomes axis i of the output.
fn permute(values: &[i32], shape: &[usize], order: &[usize]) -> Vec<i32> {
    let mut strides = vec![1usize; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    let (lens, steps): (Vec<usize>, Vec<usize>) = order.iter().map(|&axis| (shape[axis], strides[axis])).unzip();
    let mut index = vec![0usize; lens.len()];
    let mut out = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        let at: usize = index.iter().zip(&steps).map(|(i, step)| i * step).sum();
        out.push(values.get(at).copied().unwrap_or_default());
        for (i, len) in index.iter_mut().zip(&lens).rev() {
            *i += 1;
            if *i < *len {
                break;
            }
            *i = 0;
        }
    }
    out
}

/// What the first pass over an array finds.
#[derive(Default)]
struct Found {
    k: usize,
    routed: Vec<bool>,
    real_rows: usize,
    rows: usize,
}

fn routes(array: &Array<'_>, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let (experts, known_k) = (options.known_experts(), options.known_k());
    let mut found = Found::default();
    array.pieces(|piece| {
        let survey = Survey::of(&piece, experts, options.keep_padding);
        survey.check(&piece, experts, known_k).map_err(|e| array.wrong(e))?;
        survey.report(sink);
        found.k = found.k.max(survey.k);
        found.routed.resize(piece.layers, false);
        found.routed.iter_mut().zip(&survey.routed).for_each(|(all, this)| *all |= this);
        found.real_rows += survey.real_rows();
        found.rows += piece.rows;
        Ok(())
    })?;
    if found.real_rows == 0 || found.k == 0 {
        let what = format!("no routes: all {} rows are padding (one id in every place); was the capture silently skipped?", found.rows);
        return Err(ImportError::empty(array.path, what));
    }
    let dense = found.routed.iter().any(|r| !r);
    let axis = options.layer_axis(array.len('l'), &LayerAxis::Unsaid, dense).map_err(|e| array.wrong(e))?;
    if dense {
        let (n, of) = (found.routed.iter().filter(|r| **r).count(), found.routed.len());
        sink.warn("layers_not_routed", format!("{n} of {of} layers have routes; the others are dense or were not captured"));
    }
    let k = known_k.unwrap_or(u16::try_from(found.k).unwrap_or(u16::MAX));
    if usize::from(k) > found.k {
        return Err(array.wrong(format!("rows have at most {} experts, --k or the model's configuration says {k}", found.k)));
    }
    let windows = array.axes.contains(&'w');
    begin(array, options, sink, k, windows)?;
    if windows {
        emit_windows(array, options, sink, k, &axis, &found.routed)
    } else {
        emit_rows(array, options, sink, k, &axis, &found.routed)
    }
}

fn begin(array: &Array<'_>, options: &Options, sink: &mut Sink, k: u16, windows: bool) -> Result<(), ImportError> {
    if sink.has_begun() {
        let same = sink.facts_mut().is_some_and(|facts| facts.model.experts_per_token == k);
        return if same { Ok(()) } else { Err(array.wrong(format!("{k} experts per row, the inputs before it have another number"))) };
    }
    sink.begin(
        array.path,
        &Source {
            k,
            window_completeness: if windows { WindowCompleteness::Full } else { WindowCompleteness::None },
            id_space: options.id_space.unwrap_or(IdSpace::Unknown),
            router_weights: array.packed,
            acceptance_known: !windows,
            draft_len: windows.then(|| u16::try_from(array.len('t').saturating_sub(1)).unwrap_or(u16::MAX)),
            ..Source::default()
        },
    )
}

/// Every entry of the window axis is a verify step; nobody says what was accepted.
fn emit_windows(array: &Array<'_>, options: &Options, sink: &mut Sink, k: u16, axis: &[u16], routed: &[bool]) -> Result<(), ImportError> {
    if options.prompt_tokens.is_some() {
        return Err(array.wrong("--prompt-tokens: an array of verify windows has no prompt; leave it out"));
    }
    let rows = array.len('t');
    if rows < 2 {
        return Err(array.wrong(format!("windows of {rows} row(s): a verify step has an anchor and at least one draft")));
    }
    let request = sink.request_id();
    array.pieces(|piece| {
        let survey = Survey::of(&piece, options.known_experts(), options.keep_padding);
        for window in 0..piece.rows / rows {
            let mut step = events::step(request, Phase::Verify, events::unknown_tokens(rows));
            step.emitted_tokens = events::unknown_tokens(1);
            step.routes = StepRoutes::new(usize::from(k));
            rows::push(&mut step.routes, &piece, &survey, window * rows..(window + 1) * rows, axis, routed, sink);
            // A window of padding is none.
            if !step.routes.ids.is_empty() {
                sink.step(step)?;
            }
        }
        Ok(())
    })?;
    sink.end_request(request, name_of(array.path), 0, FinishReason::Unknown, "{}".into())
}

fn emit_rows(array: &Array<'_>, options: &Options, sink: &mut Sink, k: u16, axis: &[u16], routed: &[bool]) -> Result<(), ImportError> {
    let rows = array.len('t');
    if !array.tokens.is_empty() && array.tokens.len() != rows && array.tokens.len() != rows + 1 {
        return Err(array.wrong(format!("{rows} rows of routes for {} tokens: one of them was cut", array.tokens.len())));
    }
    let mut profile = Profile::new(sink, &name_of(array.path), k, options);
    let mut at = 0;
    array.pieces(|piece| {
        let survey = Survey::of(&piece, options.known_experts(), options.keep_padding);
        profile.add(sink, &piece, &survey, axis, routed, array.tokens.get(at..).unwrap_or_default())?;
        at += piece.rows;
        Ok(())
    })?;
    profile.finish(sink)
}

fn counts(array: &Array<'_>, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let (layers, experts) = (array.len('l'), array.len('e'));
    if options.known_experts().is_some_and(|e| usize::from(e) != experts) {
        return Err(array.wrong(format!("{experts} counts a layer, --experts or the model's configuration says another number")));
    }
    if options.known_k().is_some_and(|k| usize::from(k) == experts && k > 1) {
        return Err(
            array.wrong(format!("{experts} numbers a layer, as many as a token has experts, are ids and no counts; leave --kind out"))
        );
    }
    let mut sums = vec![0u64; layers * experts];
    // Whoever says how many experts there are has said that the columns are they.
    let mut doubt = options.known_experts().is_none().then(IdsAsCounts::default);
    array.pieces(|piece| {
        for row in 0..piece.rows {
            if let Some(doubt) = &mut doubt {
                doubt.add(piece.row(row), experts);
            }
            for (at, (sum, &n)) in sums.iter_mut().zip(piece.row(row)).enumerate() {
                let more = u64::try_from(n).ok().and_then(|n| sum.checked_add(n));
                let place = || format!("entry {} of the layers, expert {}: a count of {n}", at / experts, at % experts);
                *sum = more.ok_or_else(|| array.wrong(place()))?;
            }
        }
        Ok(())
    })?;
    if doubt.is_some_and(|doubt| doubt.is_certain()) {
        let reason = format!(
            "these are ids, not counts: every row has {experts} different numbers, none of a count's size, and layers of one row have different \
             sums; leave --kind out, or give --experts {experts} if they are counts of so many experts"
        );
        return Err(array.wrong(reason));
    }
    if sums.iter().all(|&n| n == 0) {
        return Err(ImportError::empty(array.path, "all counts are 0: nothing was recorded"));
    }
    let dense = sums.chunks(experts.max(1)).any(|layer| layer.iter().all(|&n| n == 0));
    let axis = options.layer_axis(layers, &LayerAxis::Unsaid, dense).map_err(|e| array.wrong(e))?;
    sink.begin_counts(array.path, "unknown", options.known_k())?;
    for (&number, layer) in axis.iter().zip(sums.chunks(experts.max(1))).filter(|(_, layer)| layer.iter().any(|&n| n > 0)) {
        sink.counts(array.path, number, layer)?;
    }
    Ok(())
}

/// Fewer rows than this may have different numbers by chance.
const FEWEST_ROWS: usize = 4;

/// Whether what is said to be counts are ids: those of a row differ and are below the most experts that there are. Counts of one pass
/// have the same sum in every layer, k a token, and are equal here and there, most of all to 0.
#[derive(Debug, Default)]
struct IdsAsCounts {
    rows: usize,
    /// A row has a number twice, or one that is no id.
    not_ids: bool,
    /// Layers of one row have different sums.
    sums_differ: bool,
}

impl IdsAsCounts {
    /// `row`: `[layers, experts]` numbers.
    fn add(&mut self, row: &[i32], experts: usize) {
        if self.not_ids || experts > MAX_EXPERTS {
            self.not_ids = true;
            return;
        }
        let mut sum = None;
        // A layer without a router has one number in every place, in both.
        for layer in row.chunks(experts.max(1)).filter(|layer| layer.iter().any(|n| *n != layer[0])) {
            self.rows += 1;
            let distinct = |(i, n): (usize, &i32)| (0..MAX_EXPERTS as i32).contains(n) && !layer[..i].contains(n);
            self.not_ids |= !layer.iter().enumerate().all(distinct);
            let of = layer.iter().map(|&n| i64::from(n)).sum::<i64>();
            self.sums_differ |= *sum.get_or_insert(of) != of;
        }
    }

    fn is_certain(&self) -> bool {
        self.rows >= FEWEST_ROWS && !self.not_ids && self.sums_differ
    }
}

fn name_of(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_permuted() {
        // [l, t, k] = [2, 3, 1] to [t, l, k].
        assert_eq!(permute(&[0, 1, 2, 10, 11, 12], &[2, 3, 1], &[1, 0, 2]), [0, 10, 1, 11, 2, 12]);
        assert_eq!(permute(&[1, 2, 3, 4], &[2, 2], &[1, 0]), [1, 3, 2, 4]);
    }
}
