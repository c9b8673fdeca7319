//! Which options each format takes. An option that a format does not use is refused: it would be ignored otherwise.

use super::{ImportError, LayerAxis, Options, importers};
use std::path::Path;

/// An option that says something of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flag {
    /// `--model-config`
    ModelConfig,
    /// `--layers`
    Layers,
    /// `--first-dense`
    FirstDense,
    /// `--experts`
    Experts,
    /// `--k`
    K,
    /// `--id-space`
    IdSpace,
    /// `--axes`
    Axes,
    /// `--member`
    Member,
    /// `--kind`
    Kind,
    /// `--packed-weights`
    PackedWeights,
    /// `--keep-padding`
    KeepPadding,
    /// `--draft-len`
    DraftLen,
    /// `--prompt-tokens`
    PromptTokens,
    /// `--device`
    Device,
}

use Flag::{
    Axes, Device, DraftLen, Experts, FirstDense, IdSpace, K, KeepPadding, Kind, Layers, Member, ModelConfig, PackedWeights, PromptTokens,
};

/// What responses with ids take, and trainers' batches.
pub const IDS: &[Flag] = &[ModelConfig, Layers, FirstDense, Experts, K, IdSpace, PackedWeights, KeepPadding, PromptTokens];
/// What SGLang's recorder takes of passes.
pub const PASSES: &[Flag] = &[ModelConfig, Layers, FirstDense, Experts, K, IdSpace, KeepPadding, DraftLen];
/// What counts by layer and expert take.
pub const COUNTS: &[Flag] = &[ModelConfig, Layers, FirstDense, Experts, K, IdSpace];
/// What counts take whose file numbers the layers.
pub const NUMBERED_COUNTS: &[Flag] = &[ModelConfig, Experts, K, IdSpace];
/// What arrays take.
pub const ARRAYS: &[Flag] =
    &[ModelConfig, Layers, FirstDense, Experts, K, IdSpace, Axes, Member, Kind, PackedWeights, KeepPadding, PromptTokens];
/// What arrays of counts take.
pub const ARRAY_COUNTS: &[Flag] = &[ModelConfig, Layers, FirstDense, Experts, K, IdSpace, Axes, Member, Kind];
/// What router logs take.
pub const ROUTER_LOG: &[Flag] = &[ModelConfig, Layers, Experts, K, IdSpace, KeepPadding, DraftLen];
/// What llama.cpp's traces take that do not tell the prompt from the rest.
pub const TRACE: &[Flag] = &[ModelConfig, Experts, K, IdSpace, PromptTokens];
/// What TensorRT-LLM's routes take.
pub const ITERATIONS: &[Flag] = &[ModelConfig, Experts, K, IdSpace, KeepPadding];
/// What profiles take.
pub const PROFILE: &[Flag] = &[ModelConfig, Device];
/// What a profile takes that is added to a trace.
pub const ADDED_PROFILE: &[Flag] = &[Device];
/// What the line format takes: its header has the rest.
pub const LINES: &[Flag] = &[IdSpace];

impl Flag {
    /// All of them, in the order of the help.
    pub const ALL: [Self; 14] = [
        ModelConfig,
        Layers,
        FirstDense,
        Experts,
        K,
        IdSpace,
        Axes,
        Member,
        Kind,
        PackedWeights,
        KeepPadding,
        DraftLen,
        PromptTokens,
        Device,
    ];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ModelConfig => "--model-config",
            Layers => "--layers",
            FirstDense => "--first-dense",
            Experts => "--experts",
            K => "--k",
            IdSpace => "--id-space",
            Axes => "--axes",
            Member => "--member",
            Kind => "--kind",
            PackedWeights => "--packed-weights",
            KeepPadding => "--keep-padding",
            DraftLen => "--draft-len",
            PromptTokens => "--prompt-tokens",
            Device => "--device",
        }
    }

    /// Whether the user gave it.
    pub fn is_given(self, options: &Options) -> bool {
        match self {
            ModelConfig => options.model.is_some(),
            Layers => options.layers != LayerAxis::Unsaid,
            FirstDense => options.first_dense.is_some(),
            Experts => options.experts.is_some(),
            K => options.k.is_some(),
            IdSpace => options.id_space.is_some(),
            Axes => options.axes.is_some(),
            Member => options.member.is_some(),
            Kind => options.kind.is_some(),
            PackedWeights => options.packed_weights,
            KeepPadding => options.keep_padding,
            DraftLen => options.draft_len.is_some(),
            PromptTokens => options.prompt_tokens.is_some(),
            Device => options.device.is_some(),
        }
    }
}

/// Refuses options that files of this kind do not use.
///
/// # Errors
/// Naming the option, what the file is, and what it takes.
pub fn check(path: &Path, what: &str, takes: &[Flag], options: &Options) -> Result<(), ImportError> {
    let given = |flag: &&Flag| flag.is_given(options);
    if let Some(flag) = Flag::ALL.iter().filter(given).find(|flag| !takes.contains(flag)) {
        let names: Vec<_> = takes.iter().map(|flag| flag.name()).collect();
        let reason = format!("{} says nothing of {what}: leave it out (it takes {})", flag.name(), names.join(", "));
        return Err(ImportError::input(path, reason));
    }
    if options.first_dense.is_some() && options.layers != LayerAxis::MoeOnly {
        return Err(ImportError::input(path, "--first-dense numbers the layers of --layers moe-only, which is not given"));
    }
    Ok(())
}

/// Columns of a help page.
const COLUMNS: usize = 100;

/// The options of each format, a line a format or two, as the help shows them. A word that stands for several kinds of files takes
/// what any of them takes.
pub fn table() -> String {
    let mut names: Vec<_> = importers().iter().map(|i| i.name()).collect();
    names.dedup();
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0);
    let mut table = String::new();
    for name in names {
        let taken = |flag: &Flag| importers().iter().any(|i| i.name() == name && i.takes().contains(flag));
        let mut line = format!("  {name:width$} ");
        for flag in Flag::ALL.into_iter().filter(taken).map(Flag::name) {
            if line.len() + 1 + flag.len() > COLUMNS {
                table.push_str(&line);
                table.push('\n');
                line = " ".repeat(width + 3);
            }
            line.push(' ');
            line.push_str(flag);
        }
        table.push_str(&line);
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::{DataKind, ForeignModel};
    use super::*;
    use crate::trace::manifest::IdSpace as Space;

    /// Options that say this one thing.
    fn only(flag: Flag) -> Options {
        let mut options = Options::default();
        match flag {
            ModelConfig => options.model = Some(ForeignModel::default()),
            Layers => options.layers = LayerAxis::MoeOnly,
            FirstDense => (options.layers, options.first_dense) = (LayerAxis::MoeOnly, Some(1)),
            Experts => options.experts = Some(8),
            K => options.k = Some(2),
            IdSpace => options.id_space = Some(Space::Logical),
            Axes => options.axes = Some("tlk".into()),
            Member => options.member = Some("x".into()),
            Kind => options.kind = Some(DataKind::Routes),
            PackedWeights => options.packed_weights = true,
            KeepPadding => options.keep_padding = true,
            DraftLen => options.draft_len = Some(1),
            PromptTokens => options.prompt_tokens = Some(1),
            Device => options.device = Some(0),
        }
        options
    }

    #[test]
    fn what_a_format_does_not_take_is_refused_by_name() {
        for importer in importers() {
            for flag in Flag::ALL {
                let answer = check(Path::new("x"), importer.name(), importer.takes(), &only(flag));
                assert_eq!(answer.is_ok(), importer.takes().contains(&flag), "{} {}", importer.name(), flag.name());
                if let Err(error) = answer {
                    let text = error.to_string();
                    assert!(text.contains("--") && text.contains(importer.name()), "{text}");
                }
            }
        }
        let alone = Options { first_dense: Some(1), ..Options::default() };
        assert!(check(Path::new("x"), "vllm", IDS, &alone).unwrap_err().to_string().contains("moe-only"));
        assert!(check(Path::new("x"), "jsonl", LINES, &Options::default()).is_ok());
    }

    #[test]
    fn every_format_has_a_line() {
        let table = table();
        assert_eq!(table.lines().filter(|line| !line.starts_with("   ")).count(), 11);
        assert!(table.lines().all(|line| line.len() <= COLUMNS && !line.ends_with(' ')), "{table}");
        assert!(table.contains("  jsonl       --id-space\n") && table.contains("  nsys        --model-config --device\n"), "{table}");
    }
}
