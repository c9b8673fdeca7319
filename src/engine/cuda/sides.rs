//! A model on a device, as measurements and comparisons with reference numbers take it. For the latter every layer's rows leave its passes.

use super::plan::MemoryPlan;
use super::taps::TapPoint;
use super::{CudaMtp, CudaSession, Device, DeviceWeights, Opening, Upload};
use crate::engine::target::{DraftModule, Inspected, Sides};
use crate::engine::{EngineError, ModelConfig, ModelWeights};
use std::rc::Rc;

/// A model on the first device, with room for timelines of some tokens.
#[derive(Debug)]
pub struct CudaSides<'m> {
    device: Rc<Device>,
    config: &'m ModelConfig,
    weights: Rc<DeviceWeights>,
    tokens: usize,
    /// Where rows leave the target's passes.
    points: Vec<TapPoint>,
}

impl<'m> CudaSides<'m> {
    /// [`CudaSides::on`], with rows that are looked at after each part of each layer.
    ///
    /// # Errors
    /// As [`CudaSides::on`].
    pub fn inspected(
        device: &Rc<Device>,
        config: &'m ModelConfig,
        weights: &'m ModelWeights,
        tokens: usize,
        told: &mut dyn FnMut(Opening),
    ) -> Result<Self, EngineError> {
        let points = (0..config.layers).flat_map(|l| [TapPoint::Attention(l), TapPoint::Layer(l)]).collect();
        Ok(Self { points, ..Self::on(device, config, weights, tokens, told)? })
    }

    /// Loads a model for timelines of up to `tokens` tokens whose rows nobody looks at.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device cannot take it, with the numbers when memory is short.
    pub fn on(
        device: &Rc<Device>,
        config: &'m ModelConfig,
        weights: &'m ModelWeights,
        tokens: usize,
        told: &mut dyn FnMut(Opening),
    ) -> Result<Self, EngineError> {
        let memory = MemoryPlan::new(config, weights, tokens, weights.mtp.is_some())?;
        memory.check(device.free_bytes()?)?;
        told(Opening::Planned(memory));
        let weights = Rc::new(DeviceWeights::upload(&Upload::new(device, memory.weights, told)?, config, weights)?);
        Ok(Self { device: Rc::clone(device), config, weights, tokens, points: Vec::new() })
    }
}

impl Sides for CudaSides<'_> {
    fn target(&self) -> Result<Box<dyn Inspected + '_>, EngineError> {
        Ok(Box::new(CudaSession::new(&self.device, self.config, &self.weights, self.tokens, &self.points)?))
    }

    fn draft(&self) -> Result<Option<Box<dyn DraftModule + '_>>, EngineError> {
        let module = CudaMtp::new(&self.device, self.config, &self.weights, self.tokens)?;
        Ok(module.map(|module| Box::new(module) as Box<dyn DraftModule>))
    }
}
