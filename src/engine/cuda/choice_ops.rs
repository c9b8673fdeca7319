//! The kernels that choose and accept tokens, one function a kernel, as `ops` has the others.

use super::device::Device;
use super::launch::Launch;
use super::ops::Damage;
use crate::engine::EngineError;
use crate::engine::sampling::Sampling;

type Done = Result<(), EngineError>;

/// The argmax of each row of logits, `[rows]` at `best`; at `prob` its probabilities, 0 = not wanted.
pub(super) fn argmax(d: &Device, logits: u64, (rows, vocab): (usize, usize), best: u64, prob: u64, damage: Damage) -> Done {
    let launch = Launch::new(d, "argmax", [rows, 1, 1], 512).shared(144).arg(logits).int(vocab);
    launch.arg(best).arg(prob).arg(damage.at).arg(damage.site).run()
}

/// The distribution that each row's token is drawn from, `[rows, vocab]` doubles at `probs`.
pub(super) fn sample(d: &Device, logits: u64, (rows, vocab): (usize, usize), s: Sampling, probs: u64, damage: Damage) -> Done {
    let launch = Launch::new(d, "sample", [rows, 1, 1], 512).shared(256 * 16 + 160).arg(logits).int(vocab);
    let launch = launch.arg(s.temperature).int(usize::try_from(s.top_k).unwrap_or(usize::MAX)).arg(s.top_p);
    launch.arg(probs).arg(damage.at).arg(damage.site).run()
}

/// The token that one uniform number draws, and at `prob` its probability, 0 = not wanted.
pub(super) fn draw(d: &Device, probs: u64, vocab: usize, uniform: u64, token: u64, prob: u64) -> Done {
    Launch::new(d, "draw", [1, 1, 1], 256).shared(256 * 8 + 16).arg(probs).int(vocab).arg(uniform).arg(token).arg(prob).run()
}

/// The greedy rule over a window of an anchor and `drafts` drafts.
pub(super) fn accept_greedy(d: &Device, window: u64, best: u64, drafts: usize, verdict: u64) -> Done {
    Launch::new(d, "accept_greedy", [1, 1, 1], 32).arg(window).arg(best).int(drafts).arg(verdict).run()
}

/// Rejection sampling over a window; `q` is 0 when the drafts were not drawn.
pub(super) fn accept_sampled(
    d: &Device,
    window: u64,
    (p, q): (u64, u64),
    uniforms: u64,
    (drafts, vocab): (usize, usize),
    verdict: u64,
) -> Done {
    let launch = Launch::new(d, "accept_sampled", [1, 1, 1], 256).shared(256 * 8 + 32).arg(window).arg(p).arg(q).arg(uniforms);
    launch.int(drafts).int(vocab).arg(verdict).run()
}
