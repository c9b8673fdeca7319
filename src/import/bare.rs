//! Ids without a shape: whether the layers and experts that the user gave can be theirs.

use super::llamacpp_read::{Block, Place};
use super::rows::IdArray;
use super::sample::Sample;
use super::strides::Strides;
use super::{LayerAxis, Options};

/// Refuses a `--layers` or `--k` that the model's configuration contradicts.
///
/// # Errors
/// A sentence with both numbers.
pub fn check_config(options: &Options) -> Result<(), String> {
    let Some(model) = &options.model else { return Ok(()) };
    let said = match options.layers {
        LayerAxis::Count(n) => Some(n),
        _ => None,
    };
    for (option, said, of_model) in [("--layers", said, model.layers), ("--k", options.k, model.k)] {
        if let (Some(said), Some(n)) = (said, of_model)
            && said != n
        {
            return Err(format!("the ids come without a shape: {option} says {said}, the model's configuration {n}; leave {option} out"));
        }
    }
    Ok(())
}

/// What layers times experts must be for as many rows as the request has; `None` when its tokens or ids do not say.
pub fn other_shape(array: &IdArray, sample: &Sample) -> Option<String> {
    let prompt = sample.prompt_ids.as_ref().map(Vec::len).or(sample.prompt_tokens)?;
    let generated = sample.output_ids.as_ref().map(Vec::len).or(sample.output_tokens)?;
    let rows = prompt.checked_add(generated)?.checked_sub(1).filter(|&n| n > 0)?;
    let (ids, given) = (array.ids.len(), array.layers.checked_mul(array.width)?);
    if !array.bare || !ids.is_multiple_of(rows) || ids / rows == given {
        return None;
    }
    Some(format!(
        "or --layers and --k are others: the ids have no shape, and {rows} rows have {} ids each; layers x experts per token must be that, {} x \
         {} = {given} were given",
        ids / rows,
        array.layers,
        array.width
    ))
}

/// Says so when groups of neighbouring layers never share an expert in any row: a layer's choice was cut into several.
pub fn doubt(array: &IdArray, experts: Option<u16>) -> Option<String> {
    let parts = (2..=array.layers.min(16)).filter(|n| array.layers.is_multiple_of(*n));
    for n in parts {
        let mut strides = Strides::default();
        for ids in array.ids.chunks_exact(n * array.width.max(1)) {
            // Dense layers have one id all over.
            if ids.iter().all(|id| Some(id) == ids.first()) || ids.iter().any(|&id| id < 0) {
                continue;
            }
            strides.see(&Block { layer: 0, k: array.width, ids: ids.to_vec(), place: Place::Unknown, request: String::new() });
        }
        if strides.suspicious(experts) {
            return Some(format!(
                "of every {n} neighbouring layers none ever share an expert, which is no accident: are they one layer of {} experts per token? \
                 the ids have no shape, and --layers {} --k {} would fit them as well",
                n * array.width,
                array.layers / n,
                n * array.width
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Rows of 6 layers with 8 different experts of 32 each, drawn at random.
    fn ids() -> Vec<i32> {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut ids = Vec::new();
        for _ in 0..16 * 6 {
            let mut left: Vec<i32> = (0..32).collect();
            ids.extend((0..8).map(|_| left.swap_remove(rng.random_range(0..left.len()))));
        }
        ids
    }

    fn array(layers: usize, width: usize) -> IdArray {
        let ids = ids();
        IdArray { bare: true, ..IdArray::new(ids.len() / layers / width, layers, width, ids).unwrap() }
    }

    #[test]
    fn a_layer_that_was_cut_into_two_is_noticed() {
        assert_eq!(doubt(&array(6, 8), None), None);
        assert!(doubt(&array(12, 4), None).unwrap().contains("--layers 6 --k 8"));
        assert!(doubt(&array(24, 2), Some(32)).unwrap().contains("--layers 12 --k 4"));
        // Of many experts, rows seldom share one.
        assert_eq!(doubt(&array(12, 4), Some(512)), None);
    }

    #[test]
    fn the_shape_that_would_fit_is_named() {
        let sample = Sample { prompt_tokens: Some(5), output_tokens: Some(12), ..Sample::default() };
        assert!(other_shape(&array(6, 4), &sample).unwrap().contains("16 rows have 48 ids each"));
        assert_eq!(other_shape(&array(6, 8), &sample), None);
        let shaped = IdArray { bare: false, ..array(6, 4) };
        assert_eq!(other_shape(&shaped, &sample), None);
    }

    #[test]
    fn a_configuration_is_not_contradicted() {
        let model = super::super::ForeignModel { layers: Some(6), k: Some(8), ..Default::default() };
        let options = |k| Options { model: Some(model.clone()), k, ..Options::default() };
        assert!(check_config(&options(Some(8))).is_ok() && check_config(&options(None)).is_ok());
        assert!(check_config(&options(Some(4))).unwrap_err().contains("--k says 4, the model's configuration 8"));
    }
}
