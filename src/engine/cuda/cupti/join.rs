//! From CUPTI's records to labelled kernels: by the id that was pushed at the launch and, inside a graph, by the node's id. Neither a
//! name nor an order is ever guessed from.

use super::records::{Record, Work};
use crate::engine::cuda::timer::Tagged;
use crate::trace::KernelEvent;
use std::borrow::Cow;
use std::collections::HashMap;

/// What was launched while an id was pushed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Owner {
    /// One kernel or copy.
    One(Tagged),
    /// A whole graph; its nodes say what they are.
    Graph,
}

/// The kernels and copies of a step.
#[derive(Debug, Default)]
pub(super) struct Joined {
    /// In order of their begin.
    pub kernels: Vec<KernelEvent>,
    /// Records without times.
    pub timeless: u64,
}

/// Joins the records of a step. `shift` is added to CUPTI's times.
///
/// # Errors
/// In words, when CUPTI does not say of a kernel what it was launched for. Copies that nobody pushed an id for are of no step.
pub(super) fn join(records: &[Record], owners: &HashMap<u64, Owner>, nodes: &HashMap<u64, Tagged>, shift: i64) -> Result<Joined, String> {
    let mut ids = HashMap::new();
    for record in records {
        if let Record::External { id, correlation } = record {
            ids.insert(*correlation, *id);
        }
    }
    let mut joined = Joined::default();
    for record in records {
        let Record::Work(work) = record else { continue };
        let owner = ids.get(&work.correlation).and_then(|id| owners.get(id));
        let tagged = match owner {
            Some(Owner::One(tagged)) => tagged,
            Some(Owner::Graph) if work.node == 0 => return Err(format!("the records of graph launch {} name no node", work.correlation)),
            Some(Owner::Graph) => match nodes.get(&work.node) {
                Some(tagged) => tagged,
                None => return Err(format!("node {} of a graph was not seen when it was captured", work.node)),
            },
            None if work.launch.is_none() => continue,
            None => return Err(format!("launch {} has no id from the engine", work.correlation)),
        };
        if let Some(shape) = work.launch
            && tagged.launched.grid.is_some_and(|grid| grid != shape.grid)
        {
            let name = tagged.launched.name;
            return Err(format!("node {} is said to be {name}, but has another grid ({:?})", work.node, shape.grid));
        }
        if work.begin == 0 || work.end < work.begin {
            joined.timeless += 1;
            continue;
        }
        joined.kernels.push(event(work, tagged, shift));
    }
    joined.kernels.sort_by_key(|k| (k.begin_ns, k.end_ns));
    Ok(joined)
}

fn event(work: &Work, tagged: &Tagged, shift: i64) -> KernelEvent {
    let time = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX).saturating_add(shift);
    let (label, shape) = (tagged.label, work.launch);
    KernelEvent {
        layer: label.layer,
        module: label.module,
        component: label.shown(),
        name: Cow::Borrowed(tagged.launched.name),
        stream: Some(work.stream),
        begin_ns: time(work.begin),
        end_ns: time(work.end),
        correlation_id: Some(u64::from(work.correlation)),
        graph_node_id: (work.node != 0).then_some(work.node),
        grid: shape.map(|s| s.grid),
        block: shape.map(|s| s.block),
        registers: shape.map(|s| u32::from(s.registers)).filter(|n| *n > 0).or(tagged.launched.registers),
        shared_bytes: shape.map(|s| s.shared_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::KernelShape;
    use super::*;
    use crate::engine::cuda::timer::{Label, Launched};
    use crate::trace::{Component, Module};

    fn tagged(name: &'static str, layer: u16, component: Component, grid: [u32; 3]) -> Tagged {
        let launched = Launched { name, grid: Some(grid), block: 128, registers: None, shared_bytes: 0 };
        Tagged { label: Label { layer: Some(layer), component, module: Module::Target }, launched }
    }

    fn kernel(begin: u64, correlation: u32, node: u64, grid: [u32; 3]) -> Record {
        let launch = Some(KernelShape { grid, block: [128, 1, 1], registers: 30, shared_bytes: 16 });
        Record::Work(Work { begin, end: begin + 10, stream: 7, correlation, node, launch })
    }

    #[test]
    fn a_graphs_kernels_are_told_apart_by_their_nodes_in_any_order() {
        let owners = HashMap::from([(5, Owner::Graph), (6, Owner::One(tagged("kda_commit", 0, Component::Commit, [1, 1, 1])))]);
        let nodes =
            HashMap::from([(71, tagged("route", 3, Component::Router, [4, 1, 1])), (72, tagged("route", 9, Component::Router, [4, 1, 1]))]);
        let copy = Record::Work(Work { begin: 1, end: 2, stream: 0, correlation: 99, node: 0, launch: None });
        let records = [
            kernel(500, 8, 0, [1, 1, 1]),
            kernel(300, 7, 72, [4, 1, 1]),
            copy,
            kernel(100, 7, 71, [4, 1, 1]),
            Record::External { id: 6, correlation: 8 },
            Record::External { id: 5, correlation: 7 },
        ];
        let joined = join(&records, &owners, &nodes, 1000).unwrap();
        let seen: Vec<_> = joined.kernels.iter().map(|k| (k.layer, k.component, k.begin_ns, k.graph_node_id)).collect();
        assert_eq!(
            seen,
            [
                (Some(3), Component::Router, 1100, Some(71)),
                (Some(9), Component::Router, 1300, Some(72)),
                (Some(0), Component::Commit, 1500, None)
            ]
        );
        assert_eq!(joined.timeless, 0);
    }

    #[test]
    fn what_cupti_does_not_say_is_refused_and_times_of_zero_are_counted() {
        let owners = HashMap::from([(5, Owner::Graph)]);
        let nodes = HashMap::from([(71, tagged("route", 3, Component::Router, [4, 1, 1]))]);
        let external = Record::External { id: 5, correlation: 7 };
        for (record, word) in [
            (kernel(1, 7, 0, [4, 1, 1]), "name no node"),
            (kernel(1, 7, 70, [4, 1, 1]), "not seen"),
            (kernel(1, 6, 71, [4, 1, 1]), "no id"),
            (kernel(1, 7, 71, [5, 1, 1]), "another grid"),
        ] {
            let error = join(&[external, record], &owners, &nodes, 0).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let joined = join(&[external, kernel(0, 7, 71, [4, 1, 1])], &owners, &nodes, 0).unwrap();
        assert_eq!((joined.kernels.len(), joined.timeless), (0, 1));
    }
}
