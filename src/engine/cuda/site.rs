//! Where in a pass a kernel has met a number that is not finite.

use crate::engine::EngineError;

/// Fails with the site that `code` names, when it names one; `take_back` makes the device forget it.
pub(super) fn refuse_damage(
    code: i32,
    take_back: impl FnOnce() -> Result<(), EngineError>,
    describe: impl Fn(Site) -> String,
) -> Result<(), EngineError> {
    let Some(site) = Site::of(code) else { return Ok(()) };
    take_back()?;
    Err(EngineError::NotFinite { what: describe(site) })
}

/// Parts of a pass in which damage can be noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Embedding,
    Input,
    Attention,
    PostNorm,
    Router,
    Experts,
    Mlp,
    Output,
    Logits,
}

const PARTS: [Part; 9] =
    [Part::Embedding, Part::Input, Part::Attention, Part::PostNorm, Part::Router, Part::Experts, Part::Mlp, Part::Output, Part::Logits];

/// A part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Site {
    pub layer: usize,
    pub part: Part,
}

impl Site {
    /// As the kernels note it; 0 is none.
    pub fn code(self) -> i32 {
        let part = PARTS.iter().position(|p| *p == self.part).unwrap_or_default();
        i32::try_from(1 + self.layer * PARTS.len() + part).unwrap_or(i32::MAX)
    }

    fn of(code: i32) -> Option<Self> {
        let code = usize::try_from(code).ok()?.checked_sub(1)?;
        Some(Self { layer: code / PARTS.len(), part: PARTS[code % PARTS.len()] })
    }

    /// In words, as the CPU engine names them.
    pub fn describe(self) -> String {
        let layer = self.layer;
        match self.part {
            Part::Embedding => "model.word_embeddings.weight".to_owned(),
            Part::Input => format!("layer {layer}: its input"),
            Part::Attention => format!("layer {layer}, attention: a projection's output"),
            Part::PostNorm => format!("layer {layer}, attention: output"),
            Part::Router => format!("layer {layer}, mlp: router logits"),
            Part::Experts => format!("layer {layer}, mlp: an expert's gate_proj or up_proj output"),
            Part::Mlp => format!("layer {layer}, mlp: gate_proj or up_proj output"),
            Part::Output => "the final norm's input or the logits".to_owned(),
            Part::Logits => "logits".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_survive_their_code() {
        for layer in [0, 1, 41, 511] {
            for part in PARTS {
                let site = Site { layer, part };
                assert_eq!(Site::of(site.code()), Some(site));
            }
        }
        assert_eq!(Site::of(0), None);
        assert_eq!(Site::of(-1), None);
    }
}
