//! A model on a device, as comparisons with reference numbers take it: every layer's rows leave its passes.

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
}

impl<'m> CudaSides<'m> {
    /// Loads a model for timelines of up to `tokens` tokens.
    ///
    /// # Errors
    /// [`EngineError::Device`] when there is no device that can take it.
    pub fn open(config: &'m ModelConfig, weights: &'m ModelWeights, tokens: usize) -> Result<Self, EngineError> {
        let device = Device::open()?;
        MemoryPlan::new(config, weights, tokens, weights.mtp.is_some())?.check(device.free_bytes()?)?;
        let weights = Rc::new(DeviceWeights::upload(&device, config, weights)?);
        Ok(Self { device, config, weights, tokens })
    }
}

impl Sides for CudaSides<'_> {
    fn target(&self) -> Result<Box<dyn Inspected + '_>, EngineError> {
        let points: Vec<TapPoint> = (0..self.config.layers).flat_map(|l| [TapPoint::Attention(l), TapPoint::Layer(l)]).collect();
        Ok(Box::new(CudaSession::new(&self.device, self.config, &self.weights, self.tokens, &points)?))
    }

    fn draft(&self) -> Result<Option<Box<dyn DraftModule + '_>>, EngineError> {
        let module = CudaMtp::new(&self.device, self.config, &self.weights, self.tokens)?;
        Ok(module.map(|module| Box::new(module) as Box<dyn DraftModule>))
    }
}
