//! The run's facts, with which every page about a trace begins.

use super::View;
use crate::metric::Unit;
use crate::report::words::{self, counted, known};
use crate::report::wrap::plain;

impl View<'_> {
    /// Always: model, quantisation, γ, workload, device.
    pub(super) fn header(&self) -> String {
        let run = &self.report.run;
        let (m, t) = (&run.model, &self.report.totals);
        let count = |n: u64| Unit::Count.show(n as f64);
        let gamma = if self.options.unicode { "γ" } else { "draft length" };
        let model = format!(
            "{} ({}), {}, {} routed, {} experts, {} + {} shared, {}, {} per expert",
            m.name,
            m.architecture,
            counted(m.layers.into(), "layer"),
            m.moe_layers.len(),
            m.experts_words(),
            m.top_k_words(),
            known(m.shared_experts),
            if m.quantisation == "unknown" { "unknown format" } else { &m.quantisation },
            m.bytes_per_expert.map_or_else(|| "unknown bytes".to_owned(), |n| Unit::Bytes.show(n as f64))
        );
        let sampling = if run.sampling.is_none() { "unknown sampling".to_owned() } else { words::sampling(run) };
        let name = words::incomplete(run).map_or_else(|| run.name.clone(), |why| format!("{} (INCOMPLETE: {why})", run.name));
        let (verification, windows) = (words::verification(run), words::windows(run));
        let draft_len = known(run.drafter.draft_len);
        let drafting = format!("{}, {gamma} {draft_len}, {sampling}, {verification} verification, {windows}", run.drafter.label());
        let workload = format!(
            "{}, {} ({} prefill, {} decode, {} verify), {}",
            words::requests(self.report),
            counted(t.steps, "step"),
            count(t.prefill_steps),
            count(t.decode_steps),
            count(t.verify_steps),
            words::tokens(self.report)
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
