//! Our tensors beside a golden file's: what was compared, how far they differ, what was left out.

use super::error::EngineError;
use super::golden_file::{GoldenFile, Values};
use serde::Serialize;
use std::collections::BTreeSet;

/// One tensor's comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorCheck {
    /// Its name in the file.
    pub name: String,
    /// Numbers compared.
    pub values: usize,
    /// Worst absolute difference, or for ids and tokens how many differ; infinite when one is not a number.
    pub worst: f64,
    /// Largest difference that passes, 0 for ids and tokens.
    pub tolerance: f64,
    /// Whether it passes.
    pub passed: bool,
}

/// A tensor that was not compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotCompared {
    /// Its name in the file.
    pub name: String,
    /// Why not.
    pub reason: &'static str,
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GoldenReport {
    /// Tokens that were run.
    pub tokens: usize,
    /// How many of them are the prompt.
    pub prompt_tokens: usize,
    /// Every compared tensor, by name.
    pub checks: Vec<TensorCheck>,
    /// Tensors of the file that were not compared.
    pub not_compared: Vec<NotCompared>,
}

impl GoldenReport {
    /// Whether something was compared and everything passed.
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|c| c.passed)
    }
}

/// A comparison under way.
pub(super) struct Checks<'f> {
    pub file: &'f GoldenFile,
    checks: Vec<TensorCheck>,
}

impl<'f> Checks<'f> {
    /// Nothing compared yet.
    pub fn new(file: &'f GoldenFile) -> Self {
        Self { file, checks: Vec::new() }
    }

    /// Compares `ours` with tensor `name`, when the file has it.
    pub fn floats(&mut self, name: &str, shape: &[usize], ours: &[f32], tolerance: f64) -> Result<(), EngineError> {
        let Some(theirs) = self.theirs(name, shape, ours.len())? else { return Ok(()) };
        self.differ(name, ours.iter().zip(theirs), tolerance);
        Ok(())
    }

    /// Compares the ids `ours` with tensor `name`, when the file has it.
    pub fn ints(&mut self, name: &str, shape: &[usize], ours: &[i32]) -> Result<(), EngineError> {
        self.some_ints(name, shape, ours, |_| true)
    }

    fn fits(&self, name: &str, theirs: &[usize], ours: &[usize], len: usize) -> Result<(), EngineError> {
        if theirs == ours && ours.iter().product::<usize>() == len {
            return Ok(());
        }
        Err(self.file.wrong(&format!("`{name}` has shape {theirs:?}, this model gives {ours:?}; is it the model of this set?")))
    }

    /// As [`Checks::floats`] of the rows that `wanted` picks; a row is what the last size of `shape` counts.
    pub fn rows(
        &mut self,
        name: &str,
        shape: &[usize],
        ours: &[f32],
        wanted: impl Fn(usize) -> bool,
        tolerance: f64,
    ) -> Result<(), EngineError> {
        let Some(theirs) = self.theirs(name, shape, ours.len())? else { return Ok(()) };
        let width = shape.last().copied().unwrap_or(1).max(1);
        let rows = ours.chunks_exact(width).zip(theirs.chunks_exact(width)).enumerate().filter(|(row, _)| wanted(*row));
        self.differ(name, rows.flat_map(|(_, (ours, theirs))| ours.iter().zip(theirs)), tolerance);
        Ok(())
    }

    /// As [`Checks::ints`] of the places that `wanted` picks.
    pub fn some_ints(&mut self, name: &str, shape: &[usize], ours: &[i32], wanted: impl Fn(usize) -> bool) -> Result<(), EngineError> {
        let Some(theirs) = self.file.ints(name)? else { return Ok(()) };
        self.fits(name, &self.file.tensors[name].shape, shape, ours.len())?;
        let picked: Vec<(&i32, &i32)> = ours.iter().zip(theirs).enumerate().filter(|(i, _)| wanted(*i)).map(|(_, pair)| pair).collect();
        let worst = picked.iter().filter(|(a, b)| a != b).count() as f64;
        self.checks.push(TensorCheck { name: name.to_owned(), values: picked.len(), worst, tolerance: 0.0, passed: worst == 0.0 });
        Ok(())
    }

    /// The file's numbers of `name`, when it has it, in the shape that ours have.
    fn theirs(&self, name: &str, shape: &[usize], len: usize) -> Result<Option<&'f [f32]>, EngineError> {
        let Some(tensor) = self.file.tensors.get(name) else { return Ok(None) };
        let Values::F32(theirs) = &tensor.values else { return Err(self.file.wrong(&format!("`{name}` must be F32"))) };
        self.fits(name, &tensor.shape, shape, len)?;
        Ok(Some(theirs))
    }

    fn differ<'a>(&mut self, name: &str, pairs: impl Iterator<Item = (&'a f32, &'a f32)>, tolerance: f64) {
        let (mut values, mut worst) = (0, 0.0_f64);
        for (a, b) in pairs {
            values += 1;
            let d = (f64::from(*a) - f64::from(*b)).abs();
            // NaN would lose every comparison; it must fail.
            worst = if d.is_nan() { f64::INFINITY } else { worst.max(d) };
        }
        self.checks.push(TensorCheck { name: name.to_owned(), values, worst, tolerance, passed: worst <= tolerance });
    }

    /// What came of it. `reason` says why a tensor of the file was not compared; `None` when it is no result but an input.
    pub fn report(self, tokens: usize, prompt_tokens: usize, reason: impl Fn(&str) -> Option<&'static str>) -> GoldenReport {
        let mut checks = self.checks;
        checks.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
        let compared: BTreeSet<&str> = checks.iter().map(|c| c.name.as_str()).collect();
        let rest = self.file.tensors.keys().filter(|n| !compared.contains(n.as_str()));
        let not_compared = rest.filter_map(|name| Some(NotCompared { reason: reason(name)?, name: name.clone() })).collect();
        GoldenReport { tokens, prompt_tokens, checks, not_compared }
    }
}

/// Sort key that counts: `hidden.2` before `hidden.10`.
fn natural(name: &str) -> (&str, usize) {
    match name.rsplit_once('.') {
        Some((stem, number)) => (stem, number.parse().unwrap_or(usize::MAX)),
        None => (name, 0),
    }
}
