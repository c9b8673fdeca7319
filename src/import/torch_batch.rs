//! Routing that trainers keep with `torch.save`: batches of verl, rollouts of slime, plain tensors, counts by layer.

use super::count_matrix::{CountMatrix, Origin};
use super::events::Source;
use super::pickle::{Tensor, Value};
use super::profile::Profile;
use super::recorder::is_torch;
use super::rows::{IdArray, Survey};
use super::torch::{LEGACY_MAGIC, TorchFile, slice};
use super::{Flag, Head, ImportError, Importer, LayerAxis, Options, Sink, flags};
use crate::trace::manifest::IdSpace;
use std::path::{Path, PathBuf};

/// Names of tensors that hold ids.
const NAMES: [&str; 3] = ["routed_experts", "rollout_routed_experts", "expert_ids"];
/// Names of tensors that hold counts by layer and expert.
const COUNT_NAMES: [&str; 2] = ["weight", "expert_load"];

/// Files of `torch.save`.
pub struct TorchBatch;

impl Importer for TorchBatch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn about(&self) -> &'static str {
        "expert ids of trainers' batches and counts [layers, experts], saved by torch (.pt)"
    }

    fn takes(&self) -> &'static [Flag] {
        flags::IDS
    }

    fn sniff(&self, head: &Head) -> bool {
        head.starts_with(LEGACY_MAGIC) || is_torch(head) && !super::recorder::Recorder.sniff(head)
    }

    fn import(&self, inputs: &[PathBuf], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        for path in inputs {
            if Head::read(path)?.starts_with(LEGACY_MAGIC) {
                return Err(ImportError::input(
                    path,
                    "torch's container of before 1.6, which is not read; convert it: python -c \"import torch,sys; \
                     d=torch.load(sys.argv[1],weights_only=True,map_location='cpu'); torch.save(d,sys.argv[1]+'.zip.pt')\" FILE",
                ));
            }
            let mut file = TorchFile::open(path)?;
            let root = file.pickle().root();
            if let Some(samples) = file.pickle().get(root, "samples").and_then(|v| file.pickle().list(v)).map(<[Value]>::to_vec) {
                rollouts(path, &mut file, &samples, options, sink)?;
                continue;
            }
            if let Some(tensor) = named(&file, root, &NAMES) {
                batch(path, &mut file, &tensor, options, sink)?;
                continue;
            }
            let bare = file.pickle().tensor(root).cloned().or_else(|| named(&file, root, &COUNT_NAMES));
            match bare {
                Some(tensor) if tensor.shape.len() == 2 => counts(path, &mut file, &tensor, options, sink)?,
                Some(tensor) if tensor.shape.len() == 3 => request(path, &mut file, &tensor, &Rows::default(), options, sink)?,
                Some(tensor) if tensor.shape.len() == 4 => batch(path, &mut file, &tensor, options, sink)?,
                Some(tensor) => return Err(file.wrong(format!("a tensor of shape {:?} is neither ids nor counts", tensor.shape))),
                None => {
                    let what = format!("no expert ids: {}; tensors are looked for as {}", file.pickle().describe(root), NAMES.join(", "));
                    return Err(ImportError::empty(path, what));
                }
            }
        }
        Ok(())
    }
}

fn named(file: &TorchFile, root: Value, names: &[&str]) -> Option<Tensor> {
    names.iter().find_map(|name| file.pickle().tensor(file.pickle().get(root, name)?)).cloned()
}

/// What is known of a request's rows.
#[derive(Default)]
struct Rows {
    /// Which rows are tokens; empty when all are.
    mask: Vec<bool>,
    tokens: Vec<u32>,
    prompt: Option<u32>,
    name: String,
}

/// verl: `[requests, prompt + response, layers, k]`, prompts padded on the left, beside `attention_mask` and `responses`.
fn batch(path: &Path, file: &mut TorchFile, tensor: &Tensor, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    if tensor.shape.len() == 3 {
        return request(path, file, tensor, &Rows::default(), options, sink);
    }
    let root = file.pickle().root();
    let &[requests, len, _, _] = tensor.shape.as_slice() else {
        return Err(file.wrong(format!("expert ids of shape {:?}, not requests x tokens x layers x experts", tensor.shape)));
    };
    let fits = |t: &Tensor| t.shape.as_slice() == [requests, len];
    let mask = named(file, root, &["attention_mask"]);
    if let Some(mask) = mask.as_ref().filter(|m| !fits(m)) {
        return Err(file.wrong(format!("attention_mask has the shape {:?}, the ids are of {requests} x {len} tokens", mask.shape)));
    }
    let tokens = named(file, root, &["input_ids"]).filter(fits);
    let response = named(file, root, &["responses", "response_mask"]).and_then(|t| t.shape.get(1).copied()).filter(|&n| n <= len);
    for index in 0..requests {
        let part = |t: &Tensor| slice(t, index);
        let mut rows = Rows { name: if requests > 1 { index.to_string() } else { String::new() }, ..Rows::default() };
        if let Some(mask) = mask.as_ref().and_then(part) {
            let numbers = file.read(&mask).and_then(|n| n.ids()).map_err(|e| file.wrong(format!("attention_mask: {e}")))?;
            rows.mask = numbers.iter().map(|&n| n != 0).collect();
        }
        if let Some(tokens) = tokens.as_ref().and_then(part) {
            let numbers = file.read(&tokens).and_then(|n| n.ids()).map_err(|e| file.wrong(format!("input_ids: {e}")))?;
            rows.tokens = numbers.iter().map(|&n| u32::try_from(n).unwrap_or(u32::MAX)).collect();
        }
        if let Some(response) = response {
            let prompt = usize::try_from(len - response).unwrap_or(usize::MAX);
            let real = rows.mask.iter().take(prompt).filter(|&&m| m).count();
            rows.prompt = u32::try_from(if rows.mask.is_empty() { prompt } else { real }).ok();
        }
        let ids = part(tensor).ok_or_else(|| file.wrong("expert ids without requests"))?;
        request(path, file, &ids, &rows, options, sink)?;
    }
    Ok(())
}

/// slime: one dictionary a sample, with its tokens and `[tokens - 1, layers, k]` ids.
fn rollouts(path: &Path, file: &mut TorchFile, samples: &[Value], options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let mut without = 0u64;
    for (number, &sample) in samples.iter().enumerate() {
        let Some(tensor) = named(file, sample, &NAMES) else {
            without += 1;
            continue;
        };
        let pickle = file.pickle();
        let tokens = pickle.get(sample, "tokens").and_then(|v| pickle.u32s(v)).unwrap_or_default();
        let response = pickle.get(sample, "response_length").and_then(|v| pickle.int(v)).and_then(|n| usize::try_from(n).ok());
        let prompt = response.and_then(|n| tokens.len().checked_sub(n)).and_then(|n| u32::try_from(n).ok());
        if !tokens.is_empty() && tensor.shape.first().is_some_and(|&rows| rows != tokens.len() as u64 && rows + 1 != tokens.len() as u64) {
            return Err(file.wrong(format!("sample {number}: {:?} ids for {} tokens: one of them was cut", tensor.shape, tokens.len())));
        }
        request(path, file, &tensor, &Rows { mask: Vec::new(), tokens, prompt, name: number.to_string() }, options, sink)?;
    }
    if without > 0 {
        sink.warn("samples_without_routes", format!("{without} of {} samples left out: no expert ids", samples.len()));
    }
    Ok(())
}

/// One request: `[tokens, layers, k]`.
fn request(path: &Path, file: &mut TorchFile, tensor: &Tensor, rows: &Rows, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    let numbers = file.read(tensor).map_err(|e| file.wrong(e))?;
    if !numbers.dtype.is_integer() {
        return Err(file.wrong(format!("numbers of type {} are not expert ids", numbers.dtype.name())));
    }
    let [n, layers, width] = *numbers.shape.as_slice() else {
        return Err(file.wrong(format!("expert ids of shape {:?}, not tokens x layers x experts", numbers.shape)));
    };
    let ids = numbers.ids().map_err(|e| file.wrong(e))?;
    let mut array = IdArray::new(n, layers, width, ids).map_err(|e| file.wrong(e))?;
    array.largest_storable = numbers.dtype.largest_id();
    let mut tokens = rows.tokens.clone();
    if !rows.mask.is_empty() {
        let keep = |row: usize| rows.mask.get(row).copied().unwrap_or(false);
        let masked = (0..n).filter(|&row| !keep(row)).count();
        sink.leave_out("padding_masked", masked as u64, "left out: attention_mask says that they are padding");
        let kept: Vec<i32> = (0..n).filter(|&row| keep(row)).flat_map(|row| array.row(row).iter().copied()).collect();
        tokens = tokens.iter().enumerate().filter(|(row, _)| keep(*row)).map(|(_, &token)| token).collect();
        array = IdArray { rows: n - masked, ids: kept, ..array };
    }
    if options.packed_weights {
        array = array.unpack_weights().map_err(|e| file.wrong(e))?;
    }
    let (experts, known_k) = (options.known_experts(), options.known_k());
    let survey = Survey::of(&array, experts, options.keep_padding);
    survey.check(&array, experts, known_k).map_err(|e| file.wrong(e))?;
    survey.report(sink);
    if array.rows == 0 {
        let what = match n {
            0 => format!("expert ids of shape {:?}: no token was captured", tensor.shape),
            n => format!("attention_mask leaves none of {n} rows: the batch is padding alone"),
        };
        return Err(ImportError::empty(path, what));
    }
    if survey.real_rows() == 0 || survey.k == 0 {
        let what = format!("no routes: all {} rows are padding (one id in every place); was the capture silently skipped?", array.rows);
        return Err(ImportError::empty(path, what));
    }
    let axis = options.layer_axis(layers, &LayerAxis::Unsaid, survey.has_dense()).map_err(|e| file.wrong(e))?;
    if survey.has_dense() {
        let routed = survey.routed.iter().filter(|r| **r).count();
        sink.warn("layers_not_routed", format!("{routed} of {layers} layers have routes; the others are dense or were not captured"));
    }
    let k = u16::try_from(survey.k).unwrap_or(u16::MAX);
    if !sink.has_begun() {
        let source = Source {
            k,
            id_space: options.id_space.unwrap_or(IdSpace::Unknown),
            router_weights: !array.weights.is_empty(),
            ..Source::default()
        };
        sink.begin(path, &source)?;
    }
    let options = Options { prompt_tokens: options.prompt_tokens.or(rows.prompt), ..options.clone() };
    let mut profile = Profile::new(sink, &rows.name, k, &options);
    profile.add(sink, &array, &survey, &axis, &survey.routed, &tokens)?;
    profile.finish(sink)
}

/// Counts `[layers, experts]`, as load balancers take them.
fn counts(path: &Path, file: &mut TorchFile, tensor: &Tensor, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
    flags::check(path, "counts of experts", flags::COUNTS, options)?;
    let numbers = file.read(tensor).map_err(|e| file.wrong(e))?;
    let wrong = |e: String| file.wrong(format!("counts of experts by layer: {e}"));
    let mut matrix = CountMatrix::default();
    numbers.counts().and_then(|counts| matrix.add(&numbers.shape, &counts)).map_err(wrong)?;
    if options.known_experts().is_some_and(|e| usize::from(e) != matrix.experts) {
        let reason = format!("{} counts a layer, --experts or the model's configuration says another number", matrix.experts);
        return Err(file.wrong(reason));
    }
    matrix.finish(path, &Origin { engine: "unknown", layers: LayerAxis::Unsaid, id_space: IdSpace::Unknown }, options, sink)
}
