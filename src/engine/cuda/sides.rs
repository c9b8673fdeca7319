//! A model on a device, as measurements and comparisons with reference numbers take it. For the latter every layer's rows leave its passes.

use super::plan::MemoryPlan;
use super::taps::TapPoint;
use super::{CudaMtp, CudaSession, Device, DeviceWeights};
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
    /// Loads a model for timelines of up to `tokens` tokens whose rows are looked at after each part of each layer.
    ///
    /// # Errors
    /// [`EngineError::Device`] when there is no device that can take it.
    pub fn open(config: &'m ModelConfig, weights: &'m ModelWeights, tokens: usize) -> Result<Self, EngineError> {
        let points = (0..config.layers).flat_map(|l| [TapPoint::Attention(l), TapPoint::Layer(l)]).collect();
        Ok(Self { points, ..Self::on(&Device::open()?, config, weights, tokens)? })
    }

    /// Loads a model on an open device for timelines of up to `tokens` tokens whose rows nobody looks at.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device cannot take it, with the numbers when memory is short.
    pub fn on(device: &Rc<Device>, config: &'m ModelConfig, weights: &'m ModelWeights, tokens: usize) -> Result<Self, EngineError> {
        MemoryPlan::new(config, weights, tokens, weights.mtp.is_some())?.check(device.free_bytes()?)?;
        let weights = Rc::new(DeviceWeights::upload(device, config, weights)?);
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
