//! Whether a device ran slower than it could while a run was recorded.

use super::TelemetrySample;
use super::manifest::Warning;
use std::collections::BTreeMap;

/// Code of the warning that a device was slowed down.
pub const THROTTLED: &str = "throttled";

/// Words that slow nothing: no reason at all, and a device that has nothing to do.
const HARMLESS: &[&str] = &["", "none", "gpu_idle"];

/// Telemetry samples counted by why the device was slow in them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Samples that say whether there was a reason.
    pub known: u64,
    /// Those with a reason that slows; idling is none.
    pub slowed: u64,
    /// Samples by reason. A sample may have several.
    pub reasons: BTreeMap<String, u64>,
}

/// The reasons of a sample that slow a device; `None` when the sample does not say.
pub fn slowing(sample: &TelemetrySample) -> Option<impl Iterator<Item = &str>> {
    let text = sample.throttle_reasons.as_deref()?;
    Some(text.split(',').map(str::trim).filter(|word| !HARMLESS.contains(word)))
}

impl Throttling {
    /// Counts one sample.
    pub fn add(&mut self, sample: &TelemetrySample) {
        let Some(reasons) = slowing(sample) else { return };
        self.known += 1;
        let mut slowed = false;
        for reason in reasons {
            *self.reasons.entry(reason.to_owned()).or_default() += 1;
            slowed = true;
        }
        self.slowed += u64::from(slowed);
    }

    /// The counts of some samples.
    pub fn of(samples: &[TelemetrySample]) -> Self {
        let mut counts = Self::default();
        samples.iter().for_each(|sample| counts.add(sample));
        counts
    }

    /// The warning of a run in which the device was slowed; `None` of one in which it never was, or nobody knows.
    pub fn warning(&self) -> Option<Warning> {
        if self.slowed == 0 {
            return None;
        }
        let mut reasons: Vec<_> = self.reasons.iter().collect();
        // The most frequent first, then by name.
        reasons.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
        // A foreign trace may have any number of words.
        let shown: Vec<String> = reasons.iter().take(6).map(|(reason, n)| format!("{reason} {n}")).collect();
        let message = format!(
            "the device was throttled in {} of {} telemetry samples ({}): its times are not those of full clocks",
            self.slowed,
            self.known,
            shown.join(", ")
        );
        Some(Warning::new(THROTTLED, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(reasons: Option<&str>) -> TelemetrySample {
        TelemetrySample { throttle_reasons: reasons.map(str::to_owned), ..TelemetrySample::default() }
    }

    #[test]
    fn worked_example_of_five_samples() {
        let texts = [Some("none"), Some("gpu_idle"), Some("sw_power_cap,gpu_idle"), None, Some("sw_power_cap, hw_slowdown")];
        let counts = Throttling::of(&texts.map(sample));
        assert_eq!((counts.known, counts.slowed), (4, 2));
        let warning = counts.warning().unwrap();
        assert_eq!(warning.code, "throttled");
        let text =
            "the device was throttled in 2 of 4 telemetry samples (sw_power_cap 2, hw_slowdown 1): its times are not those of full clocks";
        assert_eq!(warning.message, text);
        assert_eq!(Throttling::of(&[sample(None), sample(Some("gpu_idle")), sample(Some(""))]).warning(), None);
    }

    proptest! {
        #[test]
        fn no_more_samples_are_slowed_than_known_nor_known_than_there_are(
            texts in prop::collection::vec(prop::option::of("(gpu_idle|none|a|b|a,b|a,gpu_idle|,)"), 0..40)
        ) {
            let samples: Vec<_> = texts.iter().map(|text| sample(text.as_deref())).collect();
            let counts = Throttling::of(&samples);
            prop_assert!(counts.slowed <= counts.known && counts.known <= samples.len() as u64);
            prop_assert!(counts.reasons.values().all(|n| *n <= counts.slowed));
            prop_assert!(counts.reasons.values().sum::<u64>() >= counts.slowed);
            prop_assert_eq!(counts.warning().is_some(), texts.iter().flatten().any(|t| t.contains('a') && t != "gpu_idle" || t.contains('b')));
        }
    }
}
