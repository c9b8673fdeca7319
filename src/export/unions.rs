//! How many experts each step touches in each layer.

use crate::trace::{Module, StepRoutes};

/// A target layer in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerUnion {
    /// Number as in the checkpoint.
    pub layer: u16,
    /// Distinct experts of all rows.
    pub union: u16,
    /// Distinct experts of the kept rows.
    pub kept: u16,
}

/// A step's routes, counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepUnions {
    /// The target's routed layers, ascending.
    pub layers: Vec<LayerUnion>,
    /// Entry i: experts that row i adds, summed over the layers.
    pub added: Vec<u32>,
}

impl StepUnions {
    /// Mean union over the layers.
    pub fn mean(&self) -> Option<f64> {
        let sum: u64 = self.layers.iter().map(|l| u64::from(l.union)).sum();
        (!self.layers.is_empty()).then(|| sum as f64 / self.layers.len() as f64)
    }
}

/// Counts steps one after the other.
#[derive(Debug)]
pub struct Counter {
    /// The number of the layer of a step that touched each expert last.
    touched: Vec<u64>,
    now: u64,
}

impl Counter {
    /// For layers of `experts` experts.
    pub fn new(experts: u16) -> Self {
        Self { touched: vec![0; usize::from(experts)], now: 0 }
    }

    /// Counts the target's rows; rows after `accepted` are rejected.
    pub fn count(&mut self, routes: &StepRoutes, accepted: u16) -> StepUnions {
        let mut unions = StepUnions::default();
        let mut at = 0;
        for block in &routes.blocks {
            let ids = routes.ids.get(at..at + usize::from(block.rows) * routes.k).unwrap_or_default();
            at += ids.len();
            if block.module == Module::Draft {
                continue;
            }
            if unions.layers.last().is_none_or(|l| l.layer != block.layer) {
                self.now += 1;
                unions.layers.push(LayerUnion { layer: block.layer, union: 0, kept: 0 });
            }
            let Some(layer) = unions.layers.last_mut() else { continue };
            for (row, ids) in (block.first_row..).zip(ids.chunks_exact(routes.k.max(1))) {
                let mut new = 0;
                for &id in ids {
                    if let Some(touched) = self.touched.get_mut(usize::from(id)).filter(|t| **t != self.now) {
                        *touched = self.now;
                        new += 1;
                    }
                }
                layer.union += new;
                if row <= accepted {
                    layer.kept = layer.union;
                }
                let row = usize::from(row);
                if unions.added.len() <= row {
                    unions.added.resize(row + 1, 0);
                }
                unions.added[row] += u32::from(new);
            }
        }
        unions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example_of_two_layers() {
        let mut routes = StepRoutes::new(2);
        routes.push(Module::Target, 3, 0, &[1, 2, 2, 3, 7, 1], &[]);
        routes.push(Module::Draft, 3, 0, &[5, 6], &[]);
        routes.push(Module::Target, 4, 0, &[1, 2, 1, 2, 1, 2], &[]);
        let mut counter = Counter::new(8);
        let unions = counter.count(&routes, 1);
        // {1,2} {2,3} {7,1}: 4 experts, 3 of them before the rejected row; in layer 4 all rows agree.
        let of = |layer, union, kept| LayerUnion { layer, union, kept };
        assert_eq!(unions.layers, [of(3, 4, 3), of(4, 2, 2)]);
        assert_eq!((unions.added.as_slice(), unions.mean()), (&[4, 1, 1][..], Some(3.0)));
        assert_eq!(counter.count(&routes, 1), unions);
        assert_eq!(counter.count(&StepRoutes::new(2), 0).mean(), None);
    }
}
