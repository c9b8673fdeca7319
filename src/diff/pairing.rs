//! Which request of the base is which of the candidate.
//!
//! Requests are the same when their prompts' tokens have the same fingerprint; of a prompt that was run several times, the first run
//! belongs to the first. Only runs of the same prompts throughout are compared in pairs.

use crate::metric::Noise;
use crate::metric::report::{Report, RequestReport, RunFacts};
use crate::trace::manifest::Verification;
use std::collections::{HashMap, VecDeque};

/// How two runs' requests belong together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pairing {
    /// Places in `by_request` of base and candidate, by the base's order.
    pub pairs: Vec<(usize, usize)>,
    /// Prompts that only the base ran.
    pub only_base: usize,
    /// Prompts that only the candidate ran.
    pub only_candidate: usize,
    /// Whether every request of both has a known prompt.
    pub known: bool,
    /// Whether all windows of all pairs had the same tokens, so that routers that are the same chose the same.
    pub same_windows: bool,
    /// Whether the pairs emitted the same tokens.
    pub same_output: bool,
    /// Whether verification does not depend on the batch, in both runs.
    pub repeatable: bool,
    /// Whether both reports are of one run and say the same: nothing can have changed, times included.
    pub same_report: bool,
}

fn prompt(request: &RequestReport) -> Option<&str> {
    request.identity.as_ref()?.prompt.as_deref()
}

/// Whether everything that is compared is equal, and the runs' facts are, too; a directory's name is none of them.
fn same_report(base: &Report, candidate: &Report) -> bool {
    let facts = RunFacts { name: candidate.run.name.clone(), ..base.run.clone() };
    facts == candidate.run
        && base.totals == candidate.totals
        && base.acceptance == candidate.acceptance
        && base.layers == candidate.layers
        && base.overall == candidate.overall
        && base.cost == candidate.cost
}

impl Pairing {
    /// Pairs the requests of two reports.
    pub fn of(base: &Report, candidate: &Report) -> Self {
        let known = [base, candidate].iter().all(|r| !r.by_request.is_empty() && r.by_request.iter().all(|q| prompt(q).is_some()));
        let repeatable = base.run.verification == Verification::Exact && candidate.run.verification == Verification::Exact;
        let same_report = same_report(base, candidate);
        if !known {
            return Self { repeatable, same_report, ..Self::default() };
        }
        let mut places: HashMap<&str, VecDeque<usize>> = HashMap::new();
        for (at, request) in candidate.by_request.iter().enumerate() {
            places.entry(prompt(request).unwrap_or_default()).or_default().push_back(at);
        }
        let (mut pairs, mut only_base) = (Vec::new(), 0);
        for (at, request) in base.by_request.iter().enumerate() {
            match prompt(request).and_then(|p| places.get_mut(p)).and_then(VecDeque::pop_front) {
                Some(other) => pairs.push((at, other)),
                None => only_base += 1,
            }
        }
        let only_candidate = candidate.by_request.len() - pairs.len();
        let all = |same: fn(&RequestReport, &RequestReport) -> bool| {
            let both = |&(a, b): &(usize, usize)| Some(same(base.by_request.get(a)?, candidate.by_request.get(b)?));
            only_base == 0 && only_candidate == 0 && pairs.iter().all(|pair| both(pair) == Some(true))
        };
        let same_windows = all(|a, b| {
            let of = |r: &RequestReport| r.identity.as_ref().map(|i| (i.windows.clone(), i.output.clone()));
            of(a) == of(b)
        });
        let same_output = all(|a, b| a.identity.as_ref().map(|i| &i.output) == b.identity.as_ref().map(|i| &i.output));
        Self { pairs, only_base, only_candidate, known, same_windows, same_output, repeatable, same_report }
    }

    /// Whether both ran the same prompts.
    pub fn is_paired(&self) -> bool {
        self.known && self.only_base == 0 && self.only_candidate == 0
    }

    /// Whether what does not depend on clocks is compared exactly.
    pub fn is_exact(&self) -> bool {
        self.is_paired() && self.same_windows && self.repeatable
    }

    /// Whether numbers of this kind are compared exactly.
    pub fn is_exact_for(&self, noise: Noise) -> bool {
        self.same_report || (noise == Noise::Exact && self.is_exact())
    }

    /// In words, what each ran that the other did not; `None` for the same prompts or unknown ones.
    pub fn other_prompts(&self) -> Option<(String, String)> {
        let words = |only: usize| format!("{} prompts ({only} only here)", self.pairs.len() + only);
        (self.known && !self.is_paired()).then(|| (words(self.only_base), words(self.only_candidate)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;
    use proptest::prelude::*;

    fn with_prompts(prompts: &[u8]) -> Report {
        let mut report = report();
        let template = report.by_request[0].clone();
        let request = |(i, p): (u32, &u8)| {
            let mut request = RequestReport { request_id: i, ..template.clone() };
            request.identity.as_mut().unwrap().prompt = Some(p.to_string());
            request
        };
        report.by_request = (0u32..).zip(prompts).map(request).collect();
        report
    }

    #[test]
    fn requests_are_paired_by_prompt_whatever_their_order() {
        let pairing = Pairing::of(&with_prompts(&[1, 2, 1]), &with_prompts(&[2, 1, 1]));
        assert_eq!(pairing.pairs, [(0, 1), (1, 0), (2, 2)]);
        assert!(pairing.is_paired() && pairing.is_exact());
        let pairing = Pairing::of(&with_prompts(&[1, 2, 3]), &with_prompts(&[1]));
        assert_eq!((pairing.pairs.len(), pairing.only_base, pairing.only_candidate, pairing.is_paired()), (1, 2, 0, false));
        assert!(pairing.other_prompts().unwrap().0.contains("3 prompts (2 only here)"));
    }

    #[test]
    fn exactness_needs_the_same_windows_and_repeatable_rows() {
        let base = with_prompts(&[1, 2]);
        let mut other = base.clone();
        other.by_request[1].identity.as_mut().unwrap().windows = "x".into();
        assert!(Pairing::of(&base, &other).is_paired() && !Pairing::of(&base, &other).is_exact());
        let mut batched = base.clone();
        batched.run.verification = Verification::Batched;
        assert!(!Pairing::of(&base, &batched).is_exact());
        let mut unknown = base.clone();
        unknown.by_request[0].identity = None;
        let pairing = Pairing::of(&base, &unknown);
        assert!(!pairing.known && !pairing.is_paired() && pairing.other_prompts().is_none());
    }

    #[test]
    fn a_report_is_its_own_whatever_it_knows_of_requests() {
        let mut base = report();
        base.by_request.iter_mut().for_each(|r| r.identity = None);
        let mut renamed = base.clone();
        renamed.run.name = "renamed".into();
        let pairing = Pairing::of(&base, &renamed);
        assert!(!pairing.is_exact() && pairing.is_exact_for(Noise::Noisy) && pairing.is_exact_for(Noise::Exact));
        renamed.overall.as_mut().unwrap().stats.step_reuse = Some(0.5);
        assert!(!Pairing::of(&base, &renamed).same_report);
        let mut later = base.clone();
        later.run.started_unix_ns += 1;
        assert!(!Pairing::of(&base, &later).same_report);
    }

    proptest! {
        #[test]
        fn every_request_is_used_once(a in prop::collection::vec(0u8..6, 1..12), b in prop::collection::vec(0u8..6, 1..12)) {
            let pairing = Pairing::of(&with_prompts(&a), &with_prompts(&b));
            prop_assert!(pairing.pairs.iter().all(|&(i, j)| a[i] == b[j]));
            // The naive count: of each prompt, as many pairs as the side that ran it less often has.
            let count = |list: &[u8], p| list.iter().filter(|x| **x == p).count();
            let pairs: usize = (0..6).map(|p| count(&a, p).min(count(&b, p))).sum();
            prop_assert_eq!((pairing.pairs.len(), pairing.only_base, pairing.only_candidate), (pairs, a.len() - pairs, b.len() - pairs));
            let mut seconds: Vec<usize> = pairing.pairs.iter().map(|p| p.1).collect();
            seconds.sort_unstable();
            seconds.dedup();
            prop_assert_eq!(seconds.len(), pairs);
        }
    }
}
