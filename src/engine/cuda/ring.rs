//! What a pass is to do, and what leaves it by one copy.

use super::PASS_ROWS;

/// Where things are in the ring, in bytes: the damage note, the verdict of `kernels/accept.cu` or the draft module's probabilities, then of
/// every routed layer `[layers, PASS_ROWS, k]` ids (u16), then gate weights. A chain of drafts has one such layer a draft.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    /// Choices of one layer.
    pub slots: usize,
    /// Where the weights begin, and where they end.
    pub weights: usize,
    pub end: usize,
}

impl Ring {
    pub const VERDICT: usize = 4;
    pub const PROBS: usize = 16;
    pub const IDS: usize = (Self::PROBS + PASS_ROWS * 4).next_multiple_of(16);

    pub fn new(layers: usize, slots: usize) -> Self {
        let weights = Self::IDS + (layers * slots * 2).next_multiple_of(16);
        Self { slots, weights, end: weights + layers * slots * 4 }
    }

    /// Bytes from the beginning that hold what is wanted.
    pub fn wanted(self, taken: Taken) -> usize {
        match taken {
            Taken::Nothing => Self::IDS,
            Taken::Ids => self.weights,
            Taken::IdsAndWeights => self.end,
        }
    }
}

/// What a pass's tap takes of the routers' choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Taken {
    Nothing,
    Ids,
    IdsAndWeights,
}

/// Everything but its inputs that a pass's launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub rows: usize,
    /// Rows with logits.
    pub wanted: usize,
    /// Pending rows before it.
    pub pending: usize,
    /// Splits of the cache that are launched for.
    pub splits: usize,
    pub taken: Taken,
    pub ending: Ending,
    /// Whether a plan chooses the experts.
    pub planned: bool,
}

/// How a pass ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Ending {
    /// Logits and hidden rows go to the host.
    Logits,
    /// They stay: a pass that is run to be timed.
    Nothing,
    /// A token is chosen by the last row; hidden rows go to the host.
    Token,
    /// A window is judged and its kept rows are committed; `drafted`: the draft module left it on the device.
    Window { drafted: bool },
}

impl Shape {
    /// Hidden rows that go to the host.
    pub fn hidden_rows(self) -> usize {
        if matches!(self.ending, Ending::Window { .. } | Ending::Nothing) { 0 } else { self.rows }
    }

    /// Rows of logits that go there.
    pub fn logit_rows(self) -> usize {
        if self.ending == Ending::Logits { self.wanted } else { 0 }
    }
}
