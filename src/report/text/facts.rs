//! The run's facts, with which every page about a trace begins.

use super::{View, counted};
use crate::metric::Unit;
use crate::metric::report::RunFacts;
use crate::report::wrap::plain;
use crate::trace::manifest::{Verification, WindowCompleteness};

impl View<'_> {
    /// Always: model, quantisation, γ, workload, device.
    pub(super) fn header(&self) -> String {
        let run = &self.report.run;
        let (m, s, t) = (&run.model, &run.sampling, &self.report.totals);
        let unknown = || "unknown".to_owned();
        let count = |n: u64| Unit::Count.show(n as f64);
        let gamma = if self.options.unicode { "γ" } else { "draft length" };
        let model = format!(
            "{} ({}), {} layers, {} routed, {} experts, {} + {} shared, {}, {} per expert",
            m.name,
            m.architecture,
            m.layers,
            m.moe_layers.len(),
            m.experts_words(),
            m.top_k_words(),
            m.shared_experts.map_or_else(unknown, |n| n.to_string()),
            if m.quantisation == "unknown" { "unknown format" } else { &m.quantisation },
            m.bytes_per_expert.map_or_else(|| "unknown bytes".to_owned(), |n| Unit::Bytes.show(n as f64))
        );
        let sampling = match s {
            None => "unknown sampling".to_owned(),
            Some(s) if s.temperature == 0.0 => "greedy".to_owned(),
            Some(s) => format!("temperature {}, top-p {}, top-k {}, seed {}", s.temperature, s.top_p, s.top_k, s.seed),
        };
        let name = if run.complete { run.name.clone() } else { format!("{} (INCOMPLETE: {})", run.name, incomplete_reason(run)) };
        let verification = match run.verification {
            Verification::Exact => "exact",
            Verification::Batched => "batched",
            Verification::Unknown => "unknown",
        };
        let windows = match run.window_completeness {
            WindowCompleteness::Full => "all rows recorded",
            WindowCompleteness::AcceptedOnly => "kept rows recorded only",
            WindowCompleteness::Counts => "counts recorded only",
            WindowCompleteness::None => "no windows recorded",
        };
        let draft_len = run.drafter.draft_len.map_or_else(unknown, |n| n.to_string());
        let drafting = format!("{}, {gamma} {draft_len}, {sampling}, {verification} verification, {windows}", run.drafter.label());
        let workload = format!(
            "{}, {} ({} prefill, {} decode, {} verify), {} tokens",
            counted(t.requests, "request"),
            counted(t.steps, "step"),
            count(t.prefill_steps),
            count(t.decode_steps),
            count(t.verify_steps),
            count(t.tokens_emitted)
        );
        let units = run.device.units.map_or_else(String::new, |n| {
            format!(", {}", counted(n.into(), if run.device.kind == "cpu" { "thread" } else { "multiprocessor" }))
        });
        let emulated = if run.emulated { ", emulated" } else { "" };
        let device = format!("{}{units}, {}{emulated}", run.device.label(), run.engine);
        [("trace", &name), ("model", &model), ("drafting", &drafting), ("workload", &workload), ("device", &device)]
            .map(|(title, text)| self.lines(title, &plain(text)))
            .concat()
    }
}

fn incomplete_reason(run: &RunFacts) -> &str {
    run.incomplete_reason.as_deref().unwrap_or("no reason given")
}
