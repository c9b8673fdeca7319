//! Built-in workloads: small sets of chats, written for this project, that differ in how well a drafter can follow them.

use super::workload::{self, Prompt, WorkloadError};
use std::path::Path;

/// A built-in set of prompts. Each prompt has an `id` and the tags `workload` (the set's name) and `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// Advice, explanations and short texts.
    Chat,
    /// Functions to write, mend, explain and test.
    Code,
    /// Word problems, proofs and calculations.
    Math,
    /// Texts to give back with small changes or none: most of the output stands in the prompt.
    Repeat,
}

impl Workload {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Chat, Self::Code, Self::Math, Self::Repeat];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Code => "code",
            Self::Math => "math",
            Self::Repeat => "repeat",
        }
    }

    /// Its prompts, in order.
    ///
    /// # Errors
    /// None: a test reads all sets. The type is that of a user's file.
    pub fn prompts(self) -> Result<Vec<Prompt>, WorkloadError> {
        let lines: &[u8] = match self {
            Self::Chat => include_bytes!("workloads/chat.jsonl"),
            Self::Code => include_bytes!("workloads/code.jsonl"),
            Self::Math => include_bytes!("workloads/math.jsonl"),
            Self::Repeat => include_bytes!("workloads/repeat.jsonl"),
        };
        workload::parse(lines, Path::new(self.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Options, Plan, PromptSource};
    use super::*;
    use crate::engine::{Checkpoint, builtin};
    use std::collections::BTreeSet;

    #[test]
    fn every_set_has_eight_chats_with_their_own_names_and_its_tag() {
        let mut ids = BTreeSet::new();
        for set in Workload::ALL {
            let prompts = set.prompts().unwrap();
            assert_eq!(prompts.len(), 8, "{}", set.name());
            for prompt in prompts {
                let tags: serde_json::Value = serde_json::from_str(&prompt.tags).unwrap();
                assert_eq!(tags["workload"], set.name());
                assert!(tags["kind"].is_string() && ids.insert(prompt.id.clone()), "{}", prompt.id);
                assert!(matches!(prompt.source, PromptSource::Messages { enable_thinking: None, .. }), "{}", prompt.id);
            }
        }
    }

    #[test]
    fn the_built_in_model_takes_all_of_them_and_thinking_shows_in_the_prompt() {
        let model = Checkpoint::load(builtin::ling_nano()).unwrap();
        for set in Workload::ALL {
            let tokens = |thinking| {
                let options = Options { thinking, ..Options::default() };
                let plan = Plan::new(&model, &set.prompts().unwrap(), options).unwrap();
                plan.requests.into_iter().map(|r| r.tokens).collect::<Vec<_>>()
            };
            let (left_open, on, off) = (tokens(None), tokens(Some(true)), tokens(Some(false)));
            // The built-in template thinks unless it is told not to.
            assert_eq!(left_open, on);
            assert!(on.iter().zip(&off).all(|(on, off)| on != off), "{}", set.name());
        }
    }

    #[test]
    fn a_chat_that_says_it_itself_keeps_its_word() {
        let model = Checkpoint::load(builtin::ling_nano()).unwrap();
        let line = br#"{"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": false}"#;
        let prompts = workload::parse(line, Path::new("p")).unwrap();
        let tokens = |thinking| Plan::new(&model, &prompts, Options { thinking, ..Options::default() }).unwrap().requests;
        assert_eq!(tokens(Some(true)), tokens(Some(false)));
    }
}
