//! Requests that several partial reports have: the same prompt run again is no new evidence.

use super::Partial;
use crate::analysis::identity;
use crate::trace::manifest::Warning;
use std::collections::{BTreeMap, BTreeSet};

/// Files that are named of many.
const SHOWN: usize = 4;
/// Fewer emitted tokens than this are the same in two requests by chance, where nobody knows the prompt.
const LEAST_TOKENS: u64 = 8;

/// The warning that requests of different parts have equal prompts, tokens and windows: bootstrapped as if they were independent, they make
/// intervals too narrow. `None` when there are none.
pub(super) fn warning(parts: &[Partial]) -> Option<Warning> {
    // By fingerprint of prompt, output and windows: how many requests of each part.
    let mut found: BTreeMap<(Option<&str>, &str, &str), BTreeMap<usize, u64>> = BTreeMap::new();
    for (of, part) in parts.iter().enumerate() {
        let mut emitted: BTreeMap<u32, u64> = BTreeMap::new();
        for step in &part.steps {
            *emitted.entry(step.request_id).or_default() += u64::from(step.emitted);
        }
        for (id, identity) in &part.identities {
            let tokens = emitted.get(id).copied().unwrap_or(0);
            // Without a prompt the tokens must tell, and placeholders of unknown ones do not.
            if identity.prompt.is_none() && (tokens < LEAST_TOKENS || identity::is_placeholder(&identity.output, tokens)) {
                continue;
            }
            let key = (identity.prompt.as_deref(), identity.output.as_str(), identity.windows.as_str());
            *found.entry(key).or_default().entry(of).or_default() += 1;
        }
    }
    let (mut repeats, mut files) = (0u64, BTreeSet::new());
    for of_parts in found.values().filter(|of_parts| of_parts.len() > 1) {
        // Those of one part are that trace's own affair.
        repeats += of_parts.values().sum::<u64>() - of_parts.values().max().copied().unwrap_or(0);
        files.extend(of_parts.keys().filter_map(|&of| parts.get(of)).map(|part| part.origin.as_str()));
    }
    if repeats == 0 {
        return None;
    }
    let requests: u64 = parts.iter().map(|part| part.identities.len() as u64).sum();
    let mut names = files.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if files.len() > SHOWN {
        names.push_str(&format!(" and {} more", files.len() - SHOWN));
    }
    let message = format!(
        "{repeats} of {requests} requests repeat others, with the same prompt, tokens and windows in {names}: they are counted as independent, \
         so that intervals are too narrow; put only one of these files in, or record other prompts"
    );
    Some(Warning::new("repeated_requests", message))
}
