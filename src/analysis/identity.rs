//! What makes a request of one run the same as one of another: its prompt, its output, and the windows it was run in.

use crate::metric::report::RequestIdentity;
use crate::trace::event::UNKNOWN_TOKEN;
use crate::trace::{Phase, RequestEvent, Steps};
use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// Bytes of a fingerprint: 128 bits, enough for any number of requests.
const BYTES: usize = 16;

#[derive(Default)]
struct Hashers {
    prompt: Sha256,
    prompt_rows: u64,
    /// A prompt of nothing but token 0 is a placeholder of a producer that did not know it.
    prompt_known: bool,
    /// Whether nobody said some token of the prompt.
    prompt_gap: bool,
    output: Sha256,
    windows: Sha256,
}

/// Identities by request, from `steps` with its input tokens and parents. A prompt whose prefill rows are not as many as the
/// request says, or are all token 0 or not known, is unknown.
pub fn of(steps: &Steps, requests: &[RequestEvent]) -> HashMap<u32, RequestIdentity> {
    let mut all: HashMap<u32, Hashers> = HashMap::new();
    for at in 0..steps.len() {
        let hashers = all.entry(steps.request_id[at]).or_default();
        let input = steps.input_tokens.get(at);
        match steps.phase[at] {
            Phase::Prefill => {
                add(&mut hashers.prompt, input);
                hashers.prompt_rows += input.len() as u64;
                hashers.prompt_known |= input.iter().any(|&token| token != 0);
                hashers.prompt_gap |= input.contains(&UNKNOWN_TOKEN);
            }
            Phase::Verify => {
                add(&mut hashers.windows, &[u32::from(steps.rows[at]), u32::from(steps.accepted[at])]);
                add(&mut hashers.windows, input);
                // Rows of a tree saw other rows than those of a chain of the same tokens did.
                let parents = steps.parents.get(at).and_then(Option::as_deref).unwrap_or_default();
                if (-1i32..).zip(parents).any(|(before, &parent)| i32::from(parent) != before) {
                    parents.iter().for_each(|parent| hashers.windows.update(parent.to_le_bytes()));
                }
            }
            Phase::Decode => {}
        }
        add(&mut hashers.output, steps.emitted_tokens.get(at));
    }
    let prompt_tokens: HashMap<u32, u64> = requests.iter().map(|r| (r.request_id, u64::from(r.prompt_tokens))).collect();
    let identity = |(request_id, h): (u32, Hashers)| {
        // A request that never ended has no entry: its prefill is whole as soon as it has emitted anything.
        let whole = h.prompt_known && !h.prompt_gap && prompt_tokens.get(&request_id).is_none_or(|&n| n == h.prompt_rows);
        let prompt = whole.then(|| hex(h.prompt));
        (request_id, RequestIdentity { prompt, output: hex(h.output), windows: hex(h.windows) })
    };
    all.into_iter().map(identity).collect()
}

/// Whether a fingerprint of `tokens` emitted tokens is that of as many placeholders: tokens that nobody knew, or zeros.
pub(super) fn is_placeholder(output: &str, tokens: u64) -> bool {
    // Of more tokens than a request has, a file's claim is not worth the hashing.
    const MOST: u64 = 1 << 20;
    let of = |token: u32| {
        let mut hash = Sha256::new();
        (0..tokens.min(MOST)).for_each(|_| add(&mut hash, &[token]));
        hex(hash)
    };
    tokens > MOST || output == of(UNKNOWN_TOKEN) || output == of(0)
}

fn add(hash: &mut Sha256, tokens: &[u32]) {
    // In pieces: a call of its own for every token would take longer than the hashing.
    let mut bytes = [0; 256];
    for part in tokens.chunks(bytes.len() / 4) {
        bytes.chunks_exact_mut(4).zip(part).for_each(|(to, token)| to.copy_from_slice(&token.to_le_bytes()));
        hash.update(&bytes[..part.len() * 4]);
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().take(BYTES).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Synth, Trace};

    fn identities(synth: &Synth) -> HashMap<u32, RequestIdentity> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        synth.write(&path).unwrap();
        let trace = Trace::open(&path).unwrap();
        of(&trace.steps_with_details().unwrap(), &trace.requests().unwrap())
    }

    #[test]
    fn a_fingerprint_is_the_head_of_a_sha256() {
        // printf '\1\0\0\0\2\0\0\0' | sha256sum
        let mut hash = Sha256::default();
        add(&mut hash, &[1, 2]);
        assert_eq!(hex(hash), "34fb5c825de7ca4aea6e712f19d439c1");
        // Tokens of more than one piece, one by one and together.
        let tokens: Vec<u32> = (0..200).map(|n| n * 7919).collect();
        let (mut whole, mut single) = (Sha256::default(), Sha256::default());
        add(&mut whole, &tokens);
        tokens.iter().for_each(|token| add(&mut single, &[*token]));
        assert_eq!(hex(whole), hex(single));
    }

    #[test]
    fn equal_runs_have_equal_identities_and_other_prompts_others() {
        let synth = Synth { layers: vec![1], verify_steps: 4, ..Synth::default() };
        let (a, b) = (identities(&synth), identities(&synth));
        assert_eq!((a.len(), &a), (2, &b));
        assert_ne!(a[&0], a[&1]);
        assert!(a.values().all(|i| i.prompt.is_some()));
        let other = identities(&Synth { seed: 9, ..synth.clone() });
        assert!(other[&0].prompt != a[&0].prompt && other[&0].output != a[&0].output && other[&0].windows != a[&0].windows);
        // Without prefill steps the prompt is not known.
        assert!(identities(&Synth { prompt_rows: 0, ..synth }).values().all(|i| i.prompt.is_none()));
    }
}
