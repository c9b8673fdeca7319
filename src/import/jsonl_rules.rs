//! What lines may not say of each other: what `inspect --check` would find in the trace is refused with its line.

use crate::trace::kernel::Component;
use crate::trace::{KernelEvent, Module, Phase, StepEvent};

/// Remembers what the next line has to agree with.
#[derive(Debug)]
pub struct Rules {
    /// When the step before began.
    begin_ns: i64,
    /// When the sample before was taken.
    sample_ns: i64,
}

impl Default for Rules {
    fn default() -> Self {
        Self { begin_ns: i64::MIN, sample_ns: i64::MIN }
    }
}

impl Rules {
    /// Checks a step's tokens, probabilities and times. A probability that is no number stands for one that is not known.
    ///
    /// # Errors
    /// A sentence naming the key.
    pub fn step(&mut self, step: &StepEvent) -> Result<(), String> {
        let (emitted, most) = (step.emitted_tokens.len(), usize::from(step.accepted) + 1);
        if emitted > most {
            return Err(format!("`emitted` has {emitted} tokens, accepted drafts and the bonus token are {most}"));
        }
        if emitted == 0 && step.phase != Phase::Prefill {
            return Err(format!(
                "`emitted` is empty, a {} step emits at least one token; leave it out if they are not known",
                step.phase.as_str()
            ));
        }
        for (key, list) in [("draft_probs", &step.draft_probs), ("draft_confidences", &step.draft_confidences)] {
            if let Some(q) = list.iter().flatten().find(|q| **q < 0.0 || **q > 1.0) {
                return Err(format!("`{key}` has {q}, which is no probability"));
            }
        }
        if step.host_end_ns < step.host_begin_ns || step.host_begin_ns < self.begin_ns {
            return Err("`begin_ns` is after `end_ns`, or before that of the step before".into());
        }
        if step.draft_host_ns < 0 || step.target_host_ns < 0 {
            return Err("`draft_ns` or `target_ns` is below 0".into());
        }
        self.begin_ns = step.host_begin_ns;
        Ok(())
    }

    /// Checks the order of samples.
    ///
    /// # Errors
    /// A sentence naming the key.
    pub fn telemetry(&mut self, time_ns: i64) -> Result<(), String> {
        if time_ns < self.sample_ns {
            return Err(format!("`time_ns` {time_ns} is before that of the sample before"));
        }
        self.sample_ns = time_ns;
        Ok(())
    }
}

/// Checks an operation's times, layer and component; `layers` is the number of the target's layers.
///
/// # Errors
/// A sentence naming the key.
pub fn kernel(event: &KernelEvent, layers: u16) -> Result<(), String> {
    if event.end_ns < event.begin_ns {
        return Err("it ends before it begins".into());
    }
    if let Some(layer) = event.layer.filter(|&layer| event.module == Module::Target && layer >= layers) {
        return Err(format!("`layer` {layer} of a target of {layers} layers"));
    }
    if event.module == Module::Draft && event.component != Component::Draft {
        return Err(format!("`component` {} of the draft module, whose operations are of `draft`", event.component.as_str()));
    }
    Ok(())
}

/// Checks a request's tags and its number of tokens against what its steps emitted.
///
/// # Errors
/// A sentence naming the key.
pub fn request(tags: &str, generated: u32, emitted: u32) -> Result<(), String> {
    let is_json = serde_json::from_str::<serde::de::IgnoredAny>(tags).is_ok();
    if !is_json || !tags.trim_start().starts_with(['{', '[']) {
        return Err("`tags` is a text that holds neither a JSON object nor a list".into());
    }
    if generated != emitted {
        return Err(format!("`generated_tokens` is {generated}, the request's steps emitted {emitted}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::events;
    use super::*;

    #[test]
    fn what_contradicts_itself_is_named() {
        let mut rules = Rules::default();
        let mut step = events::step(0, Phase::Verify, vec![1, 2, 3]);
        let mut error = |step: &StepEvent| rules.step(step).err().unwrap_or_default();
        assert!(error(&step).contains("`emitted` is empty, a verify step"));
        step.emitted_tokens = vec![1, 2];
        assert!(error(&step).contains("has 2 tokens, accepted drafts and the bonus token are 1"));
        step.accepted = 1;
        step.draft_probs = Some(vec![f32::NAN, 1.5]);
        assert!(error(&step).contains("`draft_probs` has 1.5"));
        step.draft_probs = Some(vec![f32::NAN, 1.0]);
        (step.host_begin_ns, step.host_end_ns) = (5, 4);
        assert!(error(&step).contains("`begin_ns`"));
        step.host_end_ns = 6;
        assert_eq!(error(&step), "");
        step.host_begin_ns = 4;
        assert!(error(&step).contains("the step before"));
        assert!(rules.telemetry(5).is_ok() && rules.telemetry(5).is_ok() && rules.telemetry(4).is_err());
        assert!(request("[1]", 2, 2).is_ok());
        assert!(request("[1", 2, 2).unwrap_err().contains("`tags`") && request("3", 2, 2).is_err());
        assert!(request("{}", 3, 2).unwrap_err().contains("is 3, the request's steps emitted 2"));
    }
}
