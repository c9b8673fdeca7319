//! The grid of a sweep: which recordings there are, what each is called, and whether one that is there is the one that is wanted.

use super::plan::{Options, Plan};
use super::workload::Prompt;
use crate::engine::drafter::DraftKind;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;

/// What a sweep goes over.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Grid {
    /// Drafters.
    pub drafters: Vec<DraftKind>,
    /// Draft lengths; without effect for [`DraftKind::None`].
    pub draft_lens: Vec<u16>,
    /// Temperatures.
    pub temperatures: Vec<f64>,
    /// A tag whose values' prompts are recorded apart.
    pub tag: Option<String>,
}

/// One recording of a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// Name of its directory.
    pub name: String,
    /// Who drafts.
    pub draft: DraftKind,
    /// Drafts per step.
    pub draft_len: u16,
    /// Temperature.
    pub temperature: f64,
    /// Name and value of the tag of its prompts.
    pub tag: Option<(String, String)>,
}

/// The value of a tag of a prompt: an entry of its object, or `yes` for a word of its list.
fn tag_of(prompt: &Prompt, name: &str) -> Option<String> {
    use serde_json::Value;
    match serde_json::from_str(&prompt.tags).ok()? {
        Value::Object(mut tags) => match tags.remove(name)? {
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        },
        Value::Array(words) => words.iter().any(|w| w.as_str() == Some(name)).then(|| "yes".to_owned()),
        _ => None,
    }
}

/// A name as a directory may have it: letters, digits, `.`, `_`; anything else becomes `_`, and a hash tells such names apart.
fn safe(value: &str) -> String {
    let plain: String = value.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '.') { c } else { '_' }).take(32).collect();
    if plain == value && !plain.starts_with('.') {
        return plain;
    }
    let hash = Sha256::digest(value.as_bytes());
    format!("{}_{:02x}{:02x}{:02x}", plain.trim_start_matches('.'), hash[0], hash[1], hash[2])
}

impl Grid {
    /// The cells: by drafter, temperature, tag, then draft length, each ascending and once. Prompts without the tag are in no cell.
    pub fn cells(&self, prompts: &[Prompt]) -> Vec<Cell> {
        let tags: Vec<Option<(String, String)>> = match &self.tag {
            None => vec![None],
            Some(name) => {
                let values: BTreeSet<String> = prompts.iter().filter_map(|p| tag_of(p, name)).collect();
                values.into_iter().map(|value| Some((name.clone(), value))).collect()
            }
        };
        let mut temperatures = self.temperatures.clone();
        temperatures.sort_by(f64::total_cmp);
        temperatures.dedup();
        let lengths: BTreeSet<u16> = self.draft_lens.iter().copied().collect();
        let mut cells: Vec<Cell> = Vec::new();
        for &draft in &self.drafters {
            for &temperature in &temperatures {
                for tag in &tags {
                    let lengths: Vec<u16> = if draft == DraftKind::None { vec![0] } else { lengths.iter().copied().collect() };
                    for draft_len in lengths {
                        let mut name = format!("{}-{draft_len}-t{temperature}", draft.as_str());
                        if let Some((tag, value)) = tag {
                            name.push_str(&format!("-{}-{}", safe(tag), safe(value)));
                        }
                        if !cells.iter().any(|c| c.name == name) {
                            cells.push(Cell { name, draft, draft_len, temperature, tag: tag.clone() });
                        }
                    }
                }
            }
        }
        cells
    }
}

impl Cell {
    /// The prompts of this cell.
    pub fn prompts(&self, prompts: &[Prompt]) -> Vec<Prompt> {
        let wanted = |p: &&Prompt| self.tag.as_ref().is_none_or(|(name, value)| tag_of(p, name).as_ref() == Some(value));
        prompts.iter().filter(wanted).cloned().collect()
    }

    /// The options of this cell, the others being those of the sweep.
    pub fn options(&self, sweep: &Options) -> Options {
        let mut options = Options { draft: self.draft, draft_len: usize::from(self.draft_len.max(1)), ..sweep.clone() };
        options.sampling.temperature = self.temperature;
        if self.draft != DraftKind::Dspark {
            // No other drafter's windows end by confidence.
            options.min_survival = 0.0;
        }
        options
    }
}

/// A hash of everything that a recording depends on: the checkpoint, the options, the requests' tokens, limits and tags.
pub fn fingerprint(plan: &Plan<'_>) -> String {
    let mut hash = Sha256::new();
    hash.update(env!("CARGO_PKG_VERSION"));
    let drafter = plan.drafter.map(|drafter| &drafter.identity);
    hash.update(format!("{:?}", (&plan.checkpoint.identity, drafter, &plan.options, &plan.requests, &plan.stop_tokens)));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::workload;
    use super::*;
    use std::path::Path;

    fn prompts() -> Vec<Prompt> {
        let text = "{\"token_ids\": [1], \"tags\": {\"kind\": \"code\"}}\n{\"token_ids\": [2], \"tags\": {\"kind\": \"../x\"}}\n\
                    {\"token_ids\": [3], \"tags\": [\"kind\"]}\n{\"token_ids\": [4]}";
        workload::parse(text.as_bytes(), Path::new("p")).unwrap()
    }

    #[test]
    fn a_grid_has_each_cell_once_and_safe_names() {
        let grid = Grid {
            drafters: vec![DraftKind::Mtp, DraftKind::None, DraftKind::Mtp],
            draft_lens: vec![3, 1, 3],
            temperatures: vec![0.6, 0.0],
            tag: None,
        };
        let names: Vec<String> = grid.cells(&prompts()).into_iter().map(|c| c.name).collect();
        assert_eq!(names, ["mtp-1-t0", "mtp-3-t0", "mtp-1-t0.6", "mtp-3-t0.6", "none-0-t0", "none-0-t0.6"]);

        let tagged = Grid { drafters: vec![DraftKind::Ngram], draft_lens: vec![2], temperatures: vec![0.0], tag: Some("kind".into()) };
        let cells = tagged.cells(&prompts());
        let of: Vec<(bool, usize)> = cells.iter().map(|c| (c.name.contains('/'), c.prompts(&prompts()).len())).collect();
        assert_eq!(of, [(false, 1); 3]);
        assert_eq!((cells[1].name.as_str(), cells[2].name.as_str()), ("ngram-2-t0-kind-code", "ngram-2-t0-kind-yes"));
        assert!(cells[0].name.starts_with("ngram-2-t0-kind-_x_"), "{}", cells[0].name);
        assert_eq!(Grid { tag: Some("no".into()), ..tagged }.cells(&prompts()), []);
    }

    #[test]
    fn options_are_the_cells_own() {
        let grid = Grid { drafters: vec![DraftKind::None], draft_lens: vec![5], temperatures: vec![0.7], tag: None };
        let options = grid.cells(&prompts())[0].options(&Options { max_new_tokens: 9, ..Options::default() });
        assert_eq!((options.draft, options.draft_len, options.sampling.temperature, options.max_new_tokens), (DraftKind::None, 1, 0.7, 9));
    }
}
