//! What makes two runs incomparable, and which of it was allowed.

use super::pairing::Pairing;
use crate::metric::report::{Report, RunFacts};
use crate::trace::manifest::{IdSpace, word};
use serde::Serialize;

/// A way in which two runs can be incomparable. The words are those of `--allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Another checkpoint or another shape.
    Model,
    /// Another γ, or windows of another number of rows.
    DraftLen,
    /// Another drafter, or another confidence below which it ends windows.
    Drafter,
    /// The same shape stored in another format.
    Quantisation,
    /// Logical against physical expert ids.
    IdSpace,
    /// Another device, or an emulated one against a real one.
    Device,
    /// Other knowledge of rejected rows.
    Completeness,
    /// Other prompts, or another way of choosing tokens.
    Workload,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 8] =
        [Self::Model, Self::DraftLen, Self::Drafter, Self::Quantisation, Self::IdSpace, Self::Device, Self::Completeness, Self::Workload];

    /// The word of `--allow`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::DraftLen => "draft_len",
            Self::Drafter => "drafter",
            Self::Quantisation => "quantisation",
            Self::IdSpace => "id_space",
            Self::Device => "device",
            Self::Completeness => "completeness",
            Self::Workload => "workload",
        }
    }

    /// The kind of this word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.as_str() == word)
    }
}

/// One way in which two runs do differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The way.
    pub kind: Kind,
    /// What the base has.
    pub base: String,
    /// What the candidate has.
    pub candidate: String,
}

/// Everything that makes two runs incomparable, at most one entry a kind, in the order of [`Kind::ALL`].
pub fn differences(base: &Report, candidate: &Report, pairing: &Pairing) -> Vec<Difference> {
    Kind::ALL.into_iter().filter_map(|kind| difference(kind, base, candidate, pairing)).collect()
}

fn difference(kind: Kind, base: &Report, candidate: &Report, pairing: &Pairing) -> Option<Difference> {
    if kind == Kind::Workload
        && let Some((base, candidate)) = pairing.other_prompts()
    {
        return Some(Difference { kind, base, candidate });
    }
    let (a, b) = (fact(kind, base, &candidate.run), fact(kind, candidate, &base.run));
    (a != b).then_some(Difference { kind, base: a, candidate: b })
}

/// A fact that a manifest does not have. Against a known one it is a difference: nobody can tell that it is none.
const UNKNOWN: &str = "unknown";

/// The kinds of which neither run's manifest says anything, so that no difference in them can be seen.
pub fn unknown_to_both(base: &RunFacts, candidate: &RunFacts) -> Vec<Kind> {
    let of = |run: &RunFacts| {
        let word_known = |word: &str| word != UNKNOWN;
        [
            (Kind::DraftLen, run.drafter.draft_len.is_some()),
            (Kind::Drafter, word_known(&run.drafter.kind)),
            (Kind::Quantisation, word_known(&run.model.quantisation)),
            (Kind::IdSpace, run.id_space != IdSpace::Unknown),
            (Kind::Device, word_known(&run.device.name)),
            (Kind::Workload, run.sampling.is_some()),
        ]
    };
    of(base).into_iter().zip(of(candidate)).filter(|((_, a), (_, b))| !a && !b).map(|((kind, _), _)| kind).collect()
}

/// What a run has of a kind, as it is compared and shown. `other` says which details both runs know.
fn fact(kind: Kind, report: &Report, other: &RunFacts) -> String {
    let run = &report.run;
    match kind {
        Kind::Model => {
            let m = &run.model;
            // A largest id seen says little of the model: the number counts where both know it.
            let experts = if m.experts_known && other.model.experts_known { m.experts.to_string() } else { "some".to_owned() };
            let both = m.experts_per_token > 0 && other.model.experts_per_token > 0;
            let k = if both { m.experts_per_token.to_string() } else { "some".to_owned() };
            let made = if m.synthetic { ", synthetic weights" } else { "" };
            let routing = m.routing.as_ref().map_or_else(String::new, |plan| format!(", routing {plan}"));
            let shape = format!("{} layers, {k} of {experts} experts{made}{routing}", m.layers);
            // The fingerprint covers the stored format, so across formats it always differs: there the shape decides. A name says
            // nothing where both fingerprints are known.
            match (&m.identity, &other.model.identity) {
                _ if m.quantisation != other.model.quantisation => format!("{} ({shape})", m.architecture),
                (Some(identity), Some(theirs)) if identity == theirs => format!("{} ({shape})", m.architecture),
                (Some(identity), Some(_)) => format!("{} ({shape}, {})", m.name, identity.chars().take(12).collect::<String>()),
                _ => format!("{} ({shape})", m.name),
            }
        }
        Kind::DraftLen => {
            let rows = |r: &Report| r.overall.as_ref().map(|o| o.stats.rows);
            let draft_len = run.drafter.draft_len.map_or_else(|| UNKNOWN.to_owned(), |n| n.to_string());
            match rows(report) {
                Some(rows) => format!("{draft_len} (windows of {rows} rows)"),
                None => draft_len,
            }
        }
        Kind::Drafter => run.drafter.label(),
        Kind::Quantisation => run.model.quantisation.clone(),
        Kind::IdSpace => word(&run.id_space),
        Kind::Device => {
            let emulated = if run.emulated { ", emulated" } else { "" };
            format!("{} {}{emulated}", run.device.kind, run.device.name)
        }
        Kind::Completeness => word(&run.window_completeness),
        Kind::Workload => {
            let Some(s) = &run.sampling else { return UNKNOWN.to_owned() };
            // Seeds are left out: they are the noise that is averaged over.
            let eos = if s.ignore_eos { ", end of sequence ignored" } else { "" };
            let top_k = if s.top_k == 0 { String::new() } else { format!(", top-k {}", s.top_k) };
            format!("temperature {}, top-p {}{top_k}, at most {} tokens{eos}", s.temperature, s.top_p, s.max_new_tokens)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;
    use crate::trace::manifest::{ExternalDrafter, WindowCompleteness};

    #[test]
    fn every_word_is_parsed_back() {
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.as_str()), Some(kind));
            assert_eq!(word(&kind), kind.as_str());
        }
        assert_eq!(Kind::parse("Model"), None);
    }

    #[test]
    fn each_kind_is_found_alone() {
        let base = report();
        let kinds = |change: &dyn Fn(&mut Report)| {
            let mut candidate = base.clone();
            change(&mut candidate);
            let found = differences(&base, &candidate, &Pairing::of(&base, &candidate));
            found.iter().map(|d| d.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&|_| ()), []);
        assert_eq!(kinds(&|r| r.run.model.name = "other".into()), [Kind::Model]);
        assert_eq!(kinds(&|r| r.run.model.experts = 4), [Kind::Model]);
        assert_eq!(kinds(&|r| r.run.model.quantisation = "fp8".into()), [Kind::Quantisation]);
        assert_eq!(kinds(&|r| r.run.drafter.draft_len = Some(5)), [Kind::DraftLen]);
        assert_eq!(kinds(&|r| r.overall.as_mut().unwrap().stats.rows = 7), [Kind::DraftLen]);
        assert_eq!(kinds(&|r| r.run.drafter.kind = "none".into()), [Kind::Drafter]);
        let cut = |r: &mut Report, least| {
            let (name, identity) = ("d".to_owned(), "aa".to_owned());
            r.run.drafter.external = Some(ExternalDrafter { name, identity, block_size: 4, min_survival: least });
        };
        assert_eq!(kinds(&|r| cut(r, None)), []);
        assert_eq!(kinds(&|r| cut(r, Some(0.5))), [Kind::Drafter]);
        assert_eq!(kinds(&|r| r.run.id_space = IdSpace::Physical), [Kind::IdSpace]);
        assert_eq!(kinds(&|r| r.run.device.name = "other".into()), [Kind::Device]);
        assert_eq!(kinds(&|r| r.run.emulated = !r.run.emulated), [Kind::Device]);
        assert_eq!(kinds(&|r| r.run.window_completeness = WindowCompleteness::AcceptedOnly), [Kind::Completeness]);
        assert_eq!(kinds(&|r| r.run.sampling.as_mut().unwrap().temperature = 1.0), [Kind::Workload]);
        assert_eq!(kinds(&|r| r.run.sampling.as_mut().unwrap().seed = 77), []);
        assert_eq!(kinds(&|r| r.by_request[0].identity.as_mut().unwrap().prompt = Some("other".into())), [Kind::Workload]);
    }

    #[test]
    fn what_one_run_does_not_say_differs_from_what_the_other_says() {
        let forget = |r: &mut Report| {
            (r.run.drafter.draft_len, r.run.sampling, r.run.id_space) = (None, None, IdSpace::Unknown);
        };
        let base = report();
        let mut unknown = base.clone();
        forget(&mut unknown);
        let found = differences(&base, &unknown, &Pairing::of(&base, &unknown));
        let said: Vec<_> = found.iter().map(|d| (d.kind, d.candidate.as_str())).collect();
        assert_eq!(said, [(Kind::DraftLen, "unknown (windows of 4 rows)"), (Kind::IdSpace, "unknown"), (Kind::Workload, "unknown")]);
        // Unknown to both, it cannot be told to differ, and that is said.
        assert_eq!(differences(&unknown, &unknown, &Pairing::of(&unknown, &unknown)), []);
        assert_eq!(unknown_to_both(&unknown.run, &unknown.run), [Kind::DraftLen, Kind::IdSpace, Kind::Workload]);
        assert_eq!(unknown_to_both(&base.run, &unknown.run), []);
        // The largest id seen is not the model's number of experts.
        let mut seen = base.clone();
        (seen.run.model.experts, seen.run.model.experts_known) = (5, false);
        assert_eq!(differences(&base, &seen, &Pairing::of(&base, &seen)), []);
    }

    #[test]
    fn a_fingerprint_decides_where_both_are_known() {
        let (mut base, mut candidate) = (report(), report());
        base.run.model.identity = Some("aa".into());
        candidate.run.model.identity = Some("aa".into());
        candidate.run.model.name = "renamed".into();
        let found = |a: &Report, b: &Report| differences(a, b, &Pairing::of(a, b)).len();
        assert_eq!(found(&base, &candidate), 0);
        candidate.run.model.identity = Some("bb".into());
        candidate.run.model.name = base.run.model.name.clone();
        assert_eq!(found(&base, &candidate), 1);
        candidate.run.model.identity = None;
        assert_eq!(found(&base, &candidate), 0);
    }
}
