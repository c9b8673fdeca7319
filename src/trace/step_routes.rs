//! The routes of a trace, step by step.

use super::event::RouteBlock;
use super::{Module, StepRoutes, Trace, TraceError};

/// Hands over the routes of each step that has any, in order of steps. Consecutive rows of a layer are one block.
///
/// # Errors
/// When the table cannot be read, and whatever `take` says.
pub fn for_each<E: From<TraceError>>(
    trace: &Trace,
    weights: bool,
    mut take: impl FnMut(u32, &StepRoutes) -> Result<(), E>,
) -> Result<(), E> {
    let k = usize::from(trace.manifest().model.experts_per_token);
    let mut current: Option<(u32, StepRoutes)> = None;
    for unit in trace.route_units()? {
        let mut reader = unit.read(weights);
        while let Some(batch) = reader.next_batch()? {
            for i in 0..batch.len() {
                let step = batch.step_id[i];
                if let Some((done, routes)) = current.take_if(|(open, _)| *open != step) {
                    take(done, &routes)?;
                }
                let (_, routes) = current.get_or_insert_with(|| (step, StepRoutes::new(k)));
                let module = if batch.draft[i] { Module::Draft } else { Module::Target };
                add(routes, module, batch.layer[i], batch.row[i]);
                routes.ids.extend(batch.ids.iter().map(|column| column[i]));
                routes.weights.extend(batch.weights.into_iter().flatten().map(|column| column[i]));
            }
        }
    }
    match current {
        Some((step, routes)) => take(step, &routes),
        None => Ok(()),
    }
}

/// Counts a row to the last block, or begins another one with it.
fn add(routes: &mut StepRoutes, module: Module, layer: u16, row: u16) {
    match routes.blocks.last_mut() {
        Some(b) if b.module == module && b.layer == layer && b.first_row.checked_add(b.rows) == Some(row) => b.rows += 1,
        _ => routes.blocks.push(RouteBlock { layer, module, first_row: row, rows: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_rows_are_one_block() {
        let mut routes = StepRoutes::new(2);
        for (module, layer, row) in [
            (Module::Target, 1, 0),
            (Module::Target, 1, 1),
            (Module::Target, 1, 3),
            (Module::Target, 2, 4),
            (Module::Draft, 2, 5),
            (Module::Draft, 2, 5),
        ] {
            add(&mut routes, module, layer, row);
        }
        let blocks: Vec<(u16, u16, u16)> = routes.blocks.iter().map(|b| (b.layer, b.first_row, b.rows)).collect();
        assert_eq!(blocks, [(1, 0, 2), (1, 3, 1), (2, 4, 1), (2, 5, 1), (2, 5, 1)]);
    }
}
