//! What the user says about a file that the file does not say itself.

use super::ForeignModel;
use crate::trace::MAX_LAYERS;
use crate::trace::manifest::IdSpace;
use std::path::PathBuf;
use std::str::FromStr;

/// What the layer axis of an array counts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LayerAxis {
    /// Not said: taken from the format, the model's configuration or the data, or refused.
    #[default]
    Unsaid,
    /// Every hidden layer of the model, dense ones included.
    All,
    /// Only layers with a router.
    MoeOnly,
    /// Every hidden layer, of which there are this many.
    Count(u16),
    /// These absolute numbers, ascending.
    List(Vec<u16>),
}

impl FromStr for LayerAxis {
    type Err = String;

    /// `all`, `moe-only`, a number of layers, or absolute numbers as `3-60` or `1,3,5-7`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => return Ok(Self::All),
            "moe-only" => return Ok(Self::MoeOnly),
            _ => {}
        }
        let number = |word: &str| word.trim().parse::<u16>().map_err(|_| format!("`{word}` is not a layer number"));
        if !text.contains(['-', ',']) {
            return match number(text)? {
                0 => Err("a model has at least one layer".into()),
                n if n > MAX_LAYERS => Err(format!("{n} layers; at most {MAX_LAYERS} are supported")),
                n => Ok(Self::Count(n)),
            };
        }
        let mut layers: Vec<u16> = Vec::new();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((a, b)) => (number(a)?, number(b)?),
                None => (number(part)?, number(part)?),
            };
            if first > last || layers.last().is_some_and(|&before| before >= first) {
                return Err(format!("`{text}`: layer numbers must ascend"));
            }
            if last >= MAX_LAYERS {
                return Err(format!("layer {last}; numbers up to {} are supported", MAX_LAYERS - 1));
            }
            layers.extend(first..=last);
        }
        Ok(Self::List(layers))
    }
}

/// What an array of numbers holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DataKind {
    /// Expert ids.
    #[default]
    Routes,
    /// How often each expert was chosen.
    Counts,
}

/// Everything that the user said.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Replace a trace that is already there.
    pub force: bool,
    /// The model's `config.json`.
    pub model: Option<ForeignModel>,
    /// What the layer axis counts.
    pub layers: LayerAxis,
    /// Dense layers at the model's beginning.
    pub first_dense: Option<u16>,
    /// Routed experts per layer.
    pub experts: Option<u16>,
    /// Experts per token.
    pub k: Option<u16>,
    /// Axes of an array, one letter each: `w` windows, `t` tokens or rows, `l` layers, `k` experts, `e` counts by expert.
    pub axes: Option<String>,
    /// What an array holds; ids, unless it is said.
    pub kind: Option<DataKind>,
    /// The last axis holds k ids, then the bits of k weights as 32-bit floats.
    pub packed_weights: bool,
    /// Keep rows that look like padding or warm-up.
    pub keep_padding: bool,
    /// Logical or physical expert ids, where the format does not say.
    pub id_space: Option<IdSpace>,
    /// Drafts of a verify step, where the format does not say.
    pub draft_len: Option<u16>,
    /// Name of the array within an archive.
    pub member: Option<String>,
    /// Tokens of the prompt, where the format does not say.
    pub prompt_tokens: Option<u32>,
    /// The trace whose steps a profile's kernels are of.
    pub into: Option<PathBuf>,
    /// Which device's kernels are taken.
    pub device: Option<u32>,
}

impl Options {
    /// Routed experts per layer, when the user or the model's configuration says; the user wins.
    pub fn known_experts(&self) -> Option<u16> {
        self.experts.or_else(|| self.model.as_ref()?.experts)
    }

    /// Experts per token, likewise.
    pub fn known_k(&self) -> Option<u16> {
        self.k.or_else(|| self.model.as_ref()?.k)
    }

    /// Routed experts per layer of a file that says so itself, or may.
    ///
    /// # Errors
    /// A sentence naming both numbers, when the user or the model's configuration says another one.
    pub fn experts_of(&self, file: Option<u16>) -> Result<Option<u16>, String> {
        match (file, self.known_experts()) {
            (Some(found), Some(known)) if found != known => {
                Err(format!("{found} experts a layer, --experts or the model's configuration says {known}"))
            }
            (found, known) => Ok(found.or(known)),
        }
    }

    /// Experts per token, likewise.
    ///
    /// # Errors
    /// As [`Options::experts_of`].
    pub fn k_of(&self, file: Option<u16>) -> Result<Option<u16>, String> {
        match (file, self.known_k()) {
            (Some(found), Some(known)) if found != known => {
                Err(format!("{found} experts a token, --k or the model's configuration says {known}"))
            }
            (found, known) => Ok(found.or(known)),
        }
    }

    /// Number of hidden layers, likewise.
    pub fn known_layers(&self) -> Option<u16> {
        match &self.layers {
            LayerAxis::Count(n) => Some(*n),
            _ => self.model.as_ref()?.layers,
        }
    }

    /// Absolute numbers of an axis of `found` layers. `convention` is what the format's writer is known to do; `dense`
    /// says whether the data show layers that were not routed, which only an axis of all hidden layers has.
    ///
    /// # Errors
    /// A sentence with the option that settles it, when the numbers do not fit or nobody says what the axis counts.
    pub fn layer_axis(&self, found: usize, convention: &LayerAxis, dense: bool) -> Result<Vec<u16>, String> {
        let found = u16::try_from(found).map_err(|_| format!("{found} layers are more than any model has"))?;
        let said = if self.layers == LayerAxis::Unsaid { convention } else { &self.layers };
        let config = self.model.as_ref();
        let differs = |what: &str, n: usize| Err(format!("the layer axis has {found} entries, {what} {n}; give --layers as it is"));
        match said {
            LayerAxis::List(list) if list.len() == usize::from(found) => Ok(list.clone()),
            LayerAxis::List(list) => differs("--layers lists", list.len()),
            LayerAxis::Count(n) if *n == found => Ok((0..found).collect()),
            LayerAxis::Count(n) => differs("--layers says", usize::from(*n)),
            LayerAxis::All => match config.and_then(|c| c.layers.map(|n| (n, c.mtp_layers))) {
                Some((n, mtp)) if found != n && found != n + mtp => differs("the model's configuration says", usize::from(n)),
                _ => Ok((0..found).collect()),
            },
            LayerAxis::MoeOnly => match (self.first_dense, config.and_then(|c| c.moe_layers.as_deref())) {
                (Some(first), _) => match first.checked_add(found).filter(|&end| end <= MAX_LAYERS) {
                    Some(end) => Ok((first..end).collect()),
                    None => Err(format!("--first-dense {first} leaves no room for {found} layers")),
                },
                (None, Some(moe)) if moe.len() == usize::from(found) => Ok(moe.to_vec()),
                (None, Some(moe)) => differs("the model's configuration has routed layers:", moe.len()),
                (None, None) => Err("--layers moe-only needs --first-dense N or --model-config config.json to number the layers".into()),
            },
            LayerAxis::Unsaid => match config.and_then(|c| Some((c.layers?, c.moe_layers.as_deref()?))) {
                Some((n, _)) if n == found => Ok((0..found).collect()),
                Some((_, moe)) if moe.len() == usize::from(found) => Ok(moe.to_vec()),
                Some((n, moe)) => Err(format!(
                    "the layer axis has {found} entries, the model's configuration {n} layers, {} of them routed; give --layers as it is",
                    moe.len()
                )),
                None if dense => Ok((0..found).collect()),
                None => Err(format!(
                    "{found} layers, and nothing says whether these are all layers of the model or only those with a router; give --layers \
                     all, or --layers moe-only with --first-dense N, or --model-config config.json"
                )),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_axes_are_read_as_written() {
        let parse = |text: &str| text.parse::<LayerAxis>();
        assert_eq!(parse("all"), Ok(LayerAxis::All));
        assert_eq!(parse("moe-only"), Ok(LayerAxis::MoeOnly));
        assert_eq!(parse("61"), Ok(LayerAxis::Count(61)));
        assert_eq!(parse("3-5"), Ok(LayerAxis::List(vec![3, 4, 5])));
        assert_eq!(parse("1,3,5-6"), Ok(LayerAxis::List(vec![1, 3, 5, 6])));
        for bad in ["4097", "65530-65535", "4096-4096", "", "0", "x", "5-3", "3,3", "1,0", "70000", "1-2-3"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_layer_axis_that_nobody_explains_is_refused() {
        let options = Options::default();
        let error = options.layer_axis(5, &LayerAxis::Unsaid, false).unwrap_err();
        assert!(error.contains("--layers moe-only") && error.contains("--layers all"), "{error}");
        assert_eq!(options.layer_axis(3, &LayerAxis::Unsaid, true), Ok(vec![0, 1, 2]));
        assert_eq!(options.layer_axis(3, &LayerAxis::All, false), Ok(vec![0, 1, 2]));
        let options = Options { layers: LayerAxis::MoeOnly, first_dense: Some(1), ..Options::default() };
        assert_eq!(options.layer_axis(2, &LayerAxis::All, false), Ok(vec![1, 2]));
        assert!(Options { first_dense: None, ..options.clone() }.layer_axis(2, &LayerAxis::All, false).is_err());
        assert!(Options { first_dense: Some(u16::MAX), ..options }.layer_axis(2, &LayerAxis::All, false).is_err());
        let model = ForeignModel { layers: Some(4), moe_layers: Some(vec![1, 2, 3]), ..ForeignModel::default() };
        let options = Options { model: Some(model), ..Options::default() };
        assert_eq!(options.layer_axis(4, &LayerAxis::Unsaid, false), Ok(vec![0, 1, 2, 3]));
        assert_eq!(options.layer_axis(3, &LayerAxis::Unsaid, false), Ok(vec![1, 2, 3]));
        assert!(options.layer_axis(2, &LayerAxis::Unsaid, true).is_err());
    }
}
