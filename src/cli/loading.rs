//! What is shown while weights go to a device: bytes, and GB/s where they mean anything.

use super::ui::Ui;
use crate::engine::cuda::{Loading, Opening};
use crate::metric::Unit;
use indicatif::{ProgressBar, ProgressStyle};

/// A line on stderr; invisible where progress is.
pub(super) struct LoadingBar {
    bar: ProgressBar,
}

impl LoadingBar {
    /// A line that is not there yet.
    pub fn new(ui: &Ui) -> Self {
        let bar = ui.progress(0, "bytes");
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {elapsed}") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Shows how far it is.
    pub fn told(&self, opening: Opening) {
        if let Opening::Loading(loading) = opening {
            // The message first: each of these may draw.
            self.bar.set_message(line(loading));
            self.bar.set_length(loading.total as u64);
            self.bar.set_position(loading.done as u64);
        }
    }

    /// Takes the line away.
    pub fn end(&self) {
        if !self.bar.is_finished() {
            self.bar.finish_and_clear();
        }
    }
}

fn line(loading: Loading) -> String {
    let [done, total] = [loading.done, loading.total].map(|bytes| Unit::Bytes.show(bytes as f64));
    let rate = loading.gb_per_s.map(|rate| format!(", {rate:.2} GB/s")).unwrap_or_default();
    format!("loading {done} of {total}{rate}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_shown_where_it_is_known() {
        let loading = Loading { done: 1_500_000, total: 3_000_000_000, gb_per_s: Some(12.345) };
        assert_eq!(line(loading), "loading 1.50 MB of 3.00 GB, 12.35 GB/s");
        assert_eq!(line(Loading { gb_per_s: None, ..loading }), "loading 1.50 MB of 3.00 GB");
    }
}
