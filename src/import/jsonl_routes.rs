//! The routes of a step's line as the trace keeps them.

use super::jsonl_line::StepLine;
use super::jsonl_table::Number;
use super::rows::has_twice;
use crate::trace::{Manifest, Module, StepRoutes};
use std::mem::take;

/// In all k places of a row: not known.
const UNKNOWN_ID: u16 = u16::MAX;

/// Takes the routes out of a line. Rows that are not known are not there.
///
/// # Errors
/// A sentence naming layer and row when they do not fit the header.
pub fn routes(line: &mut StepLine, facts: &Manifest) -> Result<StepRoutes, String> {
    let model = &facts.model;
    let k = usize::from(model.experts_per_token);
    let mut routes = StepRoutes::new(k);
    let shape = [model.moe_layers.len(), line.tokens.len(), k];
    let ids = take(&mut line.routes).flat(shape, "routes", u16::from_le_bytes)?;
    let weights = take(&mut line.weights).flat(shape, "weights", |b| Number(f32::from_le_bytes(b)))?;
    for (place, &layer) in model.moe_layers.iter().enumerate() {
        let mut run = Run::new(facts, Module::Target, layer, 0);
        for (row, ids) in ids.rows(place).enumerate() {
            let known = ids.filter(|ids| !ids.iter().all(|&id| id == UNKNOWN_ID));
            match known {
                Some(ids) => run.add(row, ids, weights.row(place, row).unwrap_or_default())?,
                None => run.flush(&mut routes),
            }
        }
        run.flush(&mut routes);
    }
    let (draft, draft_weights) = (line.draft_routes.take().unwrap_or_default(), line.draft_weights.take().unwrap_or_default());
    for (entry, (layer, first, rows)) in draft.iter().enumerate() {
        let weights = draft_weights.get(entry).map(Vec::as_slice).unwrap_or_default();
        let mut run = Run::new(facts, Module::Draft, *layer, usize::from(*first));
        for (row, ids) in rows.iter().enumerate() {
            run.add(row, ids, weights.get(row).map(Vec::as_slice).unwrap_or_default())?;
        }
        run.flush(&mut routes);
    }
    Ok(routes)
}

/// Consecutive known rows of a layer.
struct Run<'a> {
    facts: &'a Manifest,
    module: Module,
    layer: u16,
    /// Number of the layer's first row.
    base: usize,
    first: usize,
    ids: Vec<u16>,
    weights: Vec<f32>,
}

impl<'a> Run<'a> {
    fn new(facts: &'a Manifest, module: Module, layer: u16, base: usize) -> Self {
        Self { facts, module, layer, base, first: 0, ids: Vec::new(), weights: Vec::new() }
    }

    fn add(&mut self, row: usize, ids: &[u16], weights: &[Number]) -> Result<(), String> {
        let model = &self.facts.model;
        let place = || format!("layer {}, row {row}", self.layer);
        if ids.len() != usize::from(model.experts_per_token) {
            return Err(format!("{}: {} experts, the header says {}", place(), ids.len(), model.experts_per_token));
        }
        if let Some(id) = ids.iter().find(|&&id| id >= model.experts) {
            return Err(format!("{}: expert {id} of {}", place(), model.experts));
        }
        if has_twice(ids) {
            return Err(format!("{}: an expert is there twice, which top-k cannot choose", place()));
        }
        if self.facts.router_weights && weights.len() != ids.len() {
            return Err(format!("{}: {} weights for {} experts", place(), weights.len(), ids.len()));
        }
        if self.ids.is_empty() {
            self.first = self.base + row;
        }
        self.ids.extend_from_slice(ids);
        if self.facts.router_weights {
            self.weights.extend(weights.iter().map(|w| w.0));
        }
        Ok(())
    }

    fn flush(&mut self, routes: &mut StepRoutes) {
        if !self.ids.is_empty() {
            routes.push(self.module, self.layer, u16::try_from(self.first).unwrap_or(u16::MAX), &self.ids, &self.weights);
            self.ids.clear();
            self.weights.clear();
        }
    }
}
