//! The two sides of a model on some engine, opened to be measured, and what a table says of where they are.

use super::RecordError;
use super::backend::{BackendKind, CuptiUse, open_device};
use super::machine;
use crate::engine::clock::Clock;
use crate::engine::cuda::{CudaSides, CuptiFacts, Device, KernelBytes, Opening, StreamTimes};
use crate::engine::target::{CpuSides, Sides};
use crate::engine::{Checkpoint, EngineError};
use crate::metric::costs::TimedBy;
use crate::trace::manifest::Warning;
use std::path::Path;
use std::rc::Rc;

/// How often memory is read to see how fast that goes.
const STREAM_REPEATS: u32 = 15;

/// A model on an engine.
pub struct Bench<'m> {
    sides: Box<dyn Sides + 'm>,
    /// `None` on the CPU.
    device: Option<Rc<Device>>,
}

impl<'m> Bench<'m> {
    /// Loads a model for timelines of up to `tokens` tokens, on a device with kernels built from `kernel_src`, if that is given. What is brought to
    /// a device is `told`.
    ///
    /// # Errors
    /// [`EngineError::Device`] when there is no device that can take it, with the numbers when memory is short.
    pub fn open(
        checkpoint: &'m Checkpoint,
        backend: BackendKind,
        tokens: usize,
        kernel_src: Option<&Path>,
        told: &mut dyn FnMut(Opening),
    ) -> Result<Self, RecordError> {
        let (config, weights) = (&checkpoint.config, &checkpoint.weights);
        if backend == BackendKind::Cpu {
            return Ok(Self { sides: Box::new(CpuSides { config, weights }), device: None });
        }
        let (device, _) = open_device(CuptiUse::IfThere, kernel_src)?;
        let sides = CudaSides::on(&device, config, weights, tokens, told)?;
        Ok(Self { sides: Box::new(sides), device: Some(device) })
    }

    /// What is to be said of the device's kernels; see [`Device::image_warning`].
    pub fn warning(&self) -> Option<Warning> {
        self.device.as_ref()?.image_warning().cloned()
    }

    /// The sides.
    pub fn sides(&self) -> &dyn Sides {
        &*self.sides
    }

    /// The engine, as in a manifest.
    pub fn engine(&self) -> String {
        let kind = if self.device.is_some() { "cuda" } else { "cpu" };
        format!("specprof-{kind} {}", env!("CARGO_PKG_VERSION"))
    }

    /// The device's name.
    pub fn device(&self) -> String {
        self.device.as_ref().map_or_else(machine::cpu_name, |device| device.name().to_owned())
    }

    /// Whether it is a device beside the host.
    pub fn is_device(&self) -> bool {
        self.device.is_some()
    }

    /// Whether the device is the tests' emulator, whose times mean nothing.
    pub fn is_emulated(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_emulated())
    }

    /// By whose clock passes are timed.
    pub fn timed_by(&self) -> TimedBy {
        match &self.device {
            None => TimedBy::Host,
            Some(device) if device.cupti().is_some() => TimedBy::Cupti,
            Some(_) => TimedBy::Events,
        }
    }

    /// The kernels that were launched one by one, or captured, since the last pass began, and what they have to move; none on the CPU.
    pub fn launched_kernels(&self) -> Vec<KernelBytes> {
        self.device.as_ref().map_or_else(Vec::new, |device| device.launched_kernels())
    }

    /// GB (10^9 bytes) that the device reads a second, by the median of some times; `None` on the CPU and on an emulated device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn stream_gb_per_s(&self, clock: Clock) -> Result<Option<f64>, RecordError> {
        let Some(device) = &self.device else { return Ok(None) };
        let StreamTimes { bytes, mut ns } = device.stream_times(STREAM_REPEATS, clock)?;
        ns.sort_unstable();
        let median = ns.get(ns.len() / 2).filter(|ns| **ns > 0 && !device.is_emulated());
        Ok(median.map(|ns| bytes as f64 / *ns as f64))
    }

    /// Refuses times of passes some of whose kernels are not in them.
    ///
    /// # Errors
    /// [`EngineError::Device`] with how many are missing.
    pub fn check(&self) -> Result<(), RecordError> {
        let Some(CuptiFacts { launched, timeless, missing, .. }) = self.device.as_ref().and_then(|device| device.cupti()) else {
            return Ok(());
        };
        if timeless + missing == 0 {
            return Ok(());
        }
        let text =
            format!("CUPTI gave no times of {} of {launched} kernels and copies: the passes' times would be too short", timeless + missing);
        Err(EngineError::Device(text).into())
    }
}
