//! Counts by layer and expert, summed, on their way into the trace.

use super::{ImportError, LayerAxis, Options, Sink};
use crate::trace::expert_set::MAX_EXPERTS;
use crate::trace::manifest::IdSpace;
use std::path::Path;

/// Sums of counts, `[layers, experts]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CountMatrix {
    /// Entries of the layer axis.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// `layers x experts` counts.
    pub counts: Vec<u64>,
}

/// Who counted, and what the axes are.
#[derive(Debug, Clone, PartialEq)]
pub struct Origin {
    /// The engine.
    pub engine: &'static str,
    /// What its writer is known to count as layers.
    pub layers: LayerAxis,
    /// What the expert axis counts.
    pub id_space: IdSpace,
}

impl CountMatrix {
    /// Adds a matrix of the same shape.
    ///
    /// # Errors
    /// A sentence, when the shapes differ, it is no matrix, or a sum is more than 64 bits hold.
    pub fn add(&mut self, shape: &[usize], counts: &[u64]) -> Result<(), String> {
        let [layers, experts] = *shape else { return Err(format!("the shape {shape:?}, not layers x experts")) };
        // Beside an axis of length 0 the other can have any length.
        if counts.is_empty() {
            return Err(format!("the shape {shape:?}, which holds no counts"));
        }
        if self.counts.is_empty() {
            (self.layers, self.experts, self.counts) = (layers, experts, vec![0; counts.len()]);
        }
        if (layers, experts) != (self.layers, self.experts) || counts.len() != self.counts.len() {
            return Err(format!("{layers} layers of {experts} experts, others have {} of {}", self.layers, self.experts));
        }
        for (at, (sum, n)) in self.counts.iter_mut().zip(counts).enumerate() {
            *sum = sum.checked_add(*n).ok_or_else(|| {
                format!("entry {} of the layers, expert {}: the counts add up to more than 64 bits hold", at / experts, at % experts)
            })?;
        }
        Ok(())
    }

    /// Starts the trace with these counts, or adds them to it.
    ///
    /// # Errors
    /// When all are 0, or nothing says what the layers are.
    pub fn finish(&self, path: &Path, origin: &Origin, options: &Options, sink: &mut Sink) -> Result<(), ImportError> {
        let wrong = |reason: String| ImportError::input(path, reason);
        if self.counts.iter().all(|&n| n == 0) {
            return Err(ImportError::empty(path, "empty: all counts are 0, nothing was recorded"));
        }
        if self.experts > MAX_EXPERTS {
            return Err(wrong(format!("{} experts; at most {MAX_EXPERTS} are supported", self.experts)));
        }
        let slots = origin.id_space == IdSpace::Physical;
        if let Some(said) = options.experts.filter(|&e| !slots && usize::from(e) != self.experts) {
            return Err(wrong(format!("{} experts a layer, --experts says {said}", self.experts)));
        }
        let of_layer = || self.counts.chunks(self.experts.max(1));
        let dense = of_layer().filter(|layer| layer.iter().all(|&n| n == 0)).count();
        let axis = options.layer_axis(self.layers, &origin.layers, dense > 0).map_err(wrong)?;
        sink.begin_counts(path, origin.engine, options.known_k())?;
        if let Some(facts) = sink.facts_mut() {
            facts.id_space = options.id_space.unwrap_or(origin.id_space);
        }
        if dense > 0 {
            let (n, of) = (self.layers.saturating_sub(dense), self.layers);
            sink.warn("layers_not_routed", format!("{n} of {of} layers have counts; the others are dense or were not recorded"));
        }
        for (number, layer) in axis.into_iter().zip(of_layer()).filter(|(_, layer)| layer.iter().any(|&n| n > 0)) {
            sink.counts(path, number, layer)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_one_shape_are_summed() {
        let mut sums = CountMatrix::default();
        sums.add(&[2, 3], &[1, 2, 3, 4, 5, 6]).unwrap();
        sums.add(&[2, 3], &[1, 1, 1, u64::MAX - 4, 0, 0]).unwrap();
        assert_eq!(sums.counts, [2, 3, 4, u64::MAX, 5, 6]);
        let error = sums.add(&[2, 3], &[0, 0, 0, 1, 0, 0]).unwrap_err();
        assert!(error.contains("entry 1 of the layers, expert 0"), "{error}");
        assert!(sums.add(&[3, 2], &[0; 6]).unwrap_err().contains("others have 2 of 3"));
        assert!(sums.add(&[6], &[0; 6]).unwrap_err().contains("layers x experts"));
    }
}
