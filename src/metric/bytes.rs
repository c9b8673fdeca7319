//! The bytes model of a step: formulas that the forecast of a checkpoint and the report of a trace share.
//!
//! With E routed experts of which a token chooses k, R(U) the bytes of U distinct experts in every MoE layer, N the bytes of all
//! other weights (the embedding's one row left out), S the recurrent state of KDA (F32) and C the MLA cache (BF16):
//!
//! ```text
//! decode       = R(k) + N + 2 S + C                 the state is read and written
//! verify(W, U) = R(U) + N + (W + 3) S + C           it is read once, W states are staged, the commit reads and writes one
//! union        = E (1 - (1 - k/E)^W)                when rows choose independently and uniformly
//! ```
//!
//! Times follow bytes only as far as a step is limited by memory bandwidth; launches, synchronisation and arithmetic are not in it.

/// Bytes of one step by what they are read for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepBytes {
    /// One distinct routed expert in every MoE layer.
    pub per_union: f64,
    /// All other weights.
    pub other: f64,
    /// KDA's state.
    pub state: f64,
    /// MLA's cache at the context length.
    pub cache: f64,
    /// One pass of the MTP block, its own MLA cache and the head, when there is a block.
    pub draft_pass: Option<f64>,
    /// E.
    pub experts: usize,
    /// k.
    pub experts_per_token: usize,
}

impl StepBytes {
    /// Bytes of a decode step.
    pub fn decode(&self) -> f64 {
        self.weights(self.experts_per_token as f64) + 2.0 * self.state + self.cache
    }

    /// Bytes of a verify step of `rows` rows that touches `union` distinct experts in each MoE layer. A single row has nothing to
    /// roll back: it is a decode step.
    pub fn verify(&self, rows: usize, union: f64) -> f64 {
        let states = if rows > 1 { rows as f64 + 3.0 } else { 2.0 };
        self.weights(union) + states * self.state + self.cache
    }

    /// Verify ratio: verify step by decode step.
    pub fn verify_ratio(&self, rows: usize, union: f64) -> f64 {
        self.verify(rows, union) / self.decode()
    }

    /// Step ratio: the same with `rows - 1` passes of the MTP block before it; `None` without a block.
    pub fn step_ratio(&self, rows: usize, union: f64) -> Option<f64> {
        let drafts = rows.saturating_sub(1) as f64 * self.draft_pass?;
        Some((self.verify(rows, union) + drafts) / self.decode())
    }

    /// Bytes of weights alone that a step with this union reads.
    pub fn weights(&self, union: f64) -> f64 {
        union * self.per_union + self.other
    }

    /// Expected union of `rows` rows under independent uniform routing.
    pub fn uniform_union(&self, rows: usize) -> f64 {
        uniform_union(self.experts, self.experts_per_token, rows)
    }

    /// The largest union that `rows` rows can have.
    pub fn max_union(&self, rows: usize) -> usize {
        self.experts_per_token.saturating_mul(rows).min(self.experts)
    }
}

/// E (1 - (1 - k/E)^W).
pub fn uniform_union(experts: usize, experts_per_token: usize, rows: usize) -> f64 {
    let experts = experts as f64;
    experts * (1.0 - (1.0 - experts_per_token as f64 / experts).powf(rows as f64))
}
