//! Operations with their times: kernel launches of a device, or operations of the CPU engine.

use super::Module;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// What an operation works for. The words are stable: reports and importers use the same ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// Looking up the rows' token embeddings.
    Embedding,
    /// Norms before attention, feed-forward part and head.
    Norm,
    /// Kimi Delta Attention: projections, convolution, recurrence, output.
    Kda,
    /// Multi-head latent attention: projections, cache, attention, output.
    Mla,
    /// Router scores, the choice of experts, and sorting rows by expert.
    Router,
    /// Routed experts: gathering rows, their three matrices, the weighted sum.
    Experts,
    /// The shared expert.
    Shared,
    /// The feed-forward part of a dense layer.
    Dense,
    /// The output head.
    Head,
    /// Everything that a drafter does: its own layers, head, choice of drafts.
    Draft,
    /// Judging drafts and choosing tokens.
    Sampling,
    /// Making kept rows part of the state and rolling the others back.
    Commit,
    /// What the recorder adds to a step: bringing the routers' choices to the host.
    Tap,
    /// Collectives between devices.
    Communication,
    /// Time of a device's step in which nothing ran. Nobody records it: it is what a profiler's kernels leave of the device's time.
    Idle,
    /// Whatever could not be told apart.
    Other,
}

impl Component {
    /// All of them, in the order in which a step runs them.
    pub const ALL: [Self; 16] = [
        Self::Draft,
        Self::Embedding,
        Self::Norm,
        Self::Kda,
        Self::Mla,
        Self::Dense,
        Self::Router,
        Self::Experts,
        Self::Shared,
        Self::Communication,
        Self::Head,
        Self::Sampling,
        Self::Commit,
        Self::Tap,
        Self::Idle,
        Self::Other,
    ];

    /// The word stored in the `component` column.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Norm => "norm",
            Self::Kda => "kda",
            Self::Mla => "mla",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::Shared => "shared",
            Self::Dense => "dense",
            Self::Head => "head",
            Self::Draft => "draft",
            Self::Sampling => "sampling",
            Self::Commit => "commit",
            Self::Tap => "tap",
            Self::Communication => "communication",
            Self::Idle => "idle",
            Self::Other => "other",
        }
    }

    /// The component of a stored word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.as_str() == word)
    }

    /// Its place in [`Component::ALL`].
    pub fn index(self) -> usize {
        Self::ALL.iter().position(|c| *c == self).unwrap_or(Self::ALL.len() - 1)
    }
}

/// One operation within a step: a kernel launch, or an operation of the CPU engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelEvent {
    /// Layer as numbered in the checkpoint; `None` outside layers.
    pub layer: Option<u16>,
    /// Whose pass it is part of.
    pub module: Module,
    /// What it works for. Everything of the draft module is [`Component::Draft`].
    pub component: Component,
    /// The kernel's name; of the CPU engine's operations `cpu.experts`, `cpu.draft.experts`, ...
    pub name: Cow<'static, str>,
    /// The device's stream.
    pub stream: Option<u32>,
    /// Begin, ns since the Unix epoch: by the device's clock, of the CPU engine by that of `steps`.
    pub begin_ns: i64,
    /// End, same clock.
    pub end_ns: i64,
    /// The profiler's number that joins the launch on the host to its kernel.
    pub correlation_id: Option<u64>,
    /// Node of the captured graph that the kernel was.
    pub graph_node_id: Option<u64>,
    /// Blocks of the grid by dimension.
    pub grid: Option<[u32; 3]>,
    /// Threads of a block by dimension.
    pub block: Option<[u32; 3]>,
    /// Registers per thread.
    pub registers: Option<u32>,
    /// Shared memory per block, static and dynamic, bytes.
    pub shared_bytes: Option<u32>,
}

impl KernelEvent {
    /// An operation of the CPU engine, named after its component.
    pub fn cpu(module: Module, layer: Option<u16>, component: Component, begin_ns: i64, end_ns: i64) -> Self {
        let (component, name) = match module {
            Module::Target => (component, cpu_name(component)),
            Module::Draft => (Component::Draft, cpu_draft_name(component)),
        };
        Self {
            layer,
            module,
            component,
            name: Cow::Borrowed(name),
            stream: None,
            begin_ns,
            end_ns,
            correlation_id: None,
            graph_node_id: None,
            grid: None,
            block: None,
            registers: None,
            shared_bytes: None,
        }
    }
}

fn cpu_name(component: Component) -> &'static str {
    match component {
        Component::Embedding => "cpu.embedding",
        Component::Norm => "cpu.norm",
        Component::Kda => "cpu.kda",
        Component::Mla => "cpu.mla",
        Component::Router => "cpu.router",
        Component::Experts => "cpu.experts",
        Component::Shared => "cpu.shared",
        Component::Dense => "cpu.dense",
        Component::Head => "cpu.head",
        Component::Draft => "cpu.draft",
        Component::Sampling => "cpu.sampling",
        Component::Commit => "cpu.commit",
        Component::Tap => "cpu.tap",
        Component::Communication => "cpu.communication",
        Component::Idle => "cpu.idle",
        Component::Other => "cpu.other",
    }
}

fn cpu_draft_name(component: Component) -> &'static str {
    match component {
        Component::Embedding => "cpu.draft.embedding",
        Component::Norm => "cpu.draft.norm",
        Component::Kda => "cpu.draft.kda",
        Component::Mla => "cpu.draft.mla",
        Component::Router => "cpu.draft.router",
        Component::Experts => "cpu.draft.experts",
        Component::Shared => "cpu.draft.shared",
        Component::Dense => "cpu.draft.dense",
        Component::Head => "cpu.draft.head",
        Component::Draft => "cpu.draft",
        Component::Sampling => "cpu.draft.sampling",
        Component::Commit => "cpu.draft.commit",
        Component::Tap => "cpu.draft.tap",
        Component::Communication => "cpu.draft.communication",
        Component::Idle => "cpu.draft.idle",
        Component::Other => "cpu.draft.other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_places_are_unique() {
        for (place, component) in Component::ALL.into_iter().enumerate() {
            assert_eq!(Component::parse(component.as_str()), Some(component));
            assert_eq!(component.index(), place);
            assert_eq!(serde_json::to_value(component).unwrap(), component.as_str());
            assert_eq!(cpu_name(component), format!("cpu.{}", component.as_str()));
        }
        assert_eq!(Component::parse("cpu.experts"), None);
    }

    #[test]
    fn the_draft_module_never_counts_as_the_target() {
        let op = KernelEvent::cpu(Module::Draft, Some(42), Component::Experts, 1, 2);
        assert_eq!((op.component, op.name.as_ref()), (Component::Draft, "cpu.draft.experts"));
        let op = KernelEvent::cpu(Module::Target, Some(2), Component::Experts, 1, 2);
        assert_eq!((op.component, op.name.as_ref()), (Component::Experts, "cpu.experts"));
    }
}
