//! The fingerprint of a run's output.

use super::event::UNKNOWN_TOKEN;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// SHA-256 over all emitted tokens: requests in ascending order of `request_id`, within a request in the
/// order of its steps, each token as a little-endian u32.
///
/// ```
/// use specprof::trace::token_hash::TokenHasher;
/// let mut late_first = TokenHasher::default();
/// late_first.add(1, &[3]);
/// late_first.add(0, &[1, 2]);
/// let mut in_order = TokenHasher::default();
/// in_order.add(0, &[1]);
/// in_order.add(0, &[2]);
/// in_order.add(1, &[3]);
/// assert_eq!(late_first.finish(), in_order.finish());
/// ```
#[derive(Debug, Clone, Default)]
pub struct TokenHasher(BTreeMap<u32, Vec<u32>>);

impl TokenHasher {
    /// Adds what one step of a request emitted.
    pub fn add(&mut self, request_id: u32, emitted: &[u32]) {
        self.0.entry(request_id).or_default().extend_from_slice(emitted);
    }

    /// The hash in hexadecimal, `None` when a token is not known: equal hashes must mean equal tokens.
    pub fn finish_known(&self) -> Option<String> {
        let known = !self.0.values().flatten().any(|&token| token == UNKNOWN_TOKEN);
        known.then(|| self.finish())
    }

    /// The hash in hexadecimal.
    pub fn finish(&self) -> String {
        of_lists(self.0.values().map(Vec::as_slice))
    }
}

/// The hash of lists of tokens that are in the order that it wants, in hexadecimal.
pub(super) fn of_lists<'a>(lists: impl Iterator<Item = &'a [u32]>) -> String {
    let mut hash = Sha256::new();
    for token in lists.flatten() {
        hash.update(token.to_le_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_sha256_of_the_little_endian_tokens() {
        // printf '\1\0\0\0\2\0\0\0' | sha256sum
        let mut hasher = TokenHasher::default();
        hasher.add(0, &[1, 2]);
        assert_eq!(hasher.finish(), "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f");
        assert_eq!(hasher.finish_known(), Some(hasher.finish()));
        hasher.add(2, &[UNKNOWN_TOKEN]);
        assert_eq!(hasher.finish_known(), None);
        assert_eq!(TokenHasher::default().finish(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
