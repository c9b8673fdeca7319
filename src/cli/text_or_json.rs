//! How a command that has no other formats shows its result.

/// `--json`, or `--format` as the commands with more formats have it.
#[derive(Debug, clap::Args)]
pub(super) struct TextOrJson {
    /// JSON instead of text; `--format json` is the same
    #[arg(long, conflicts_with = "format", help_heading = "Output")]
    json: bool,
    /// Text for people, or JSON for machines
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text, hide = true, help_heading = "Output")]
    format: Format,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Text for people
    Text,
    /// JSON for machines
    Json,
}

impl TextOrJson {
    /// Whether JSON is wanted.
    pub(super) fn json(&self) -> bool {
        self.json || self.format == Format::Json
    }
}
