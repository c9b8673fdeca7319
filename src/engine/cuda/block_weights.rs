//! A DSpark drafter's weights on the device, and the bytes that a drafter takes there.

use super::PASS_ROWS;
use super::buffer::Buffer;
use super::device::Device;
use super::matrix::{self, DeviceMatrix};
use super::ops::SPLIT;
use super::weights::{DeviceGated, gated, half_turns};
use crate::engine::EngineError;
use crate::engine::dspark::{DsparkConfig, DsparkLayer, DsparkWeights};
use std::rc::Rc;

/// All weights of a drafter on a device.
#[derive(Debug)]
pub(super) struct DeviceDspark {
    pub taps: DeviceMatrix,
    pub taps_norm: Buffer,
    pub layers: Vec<DeviceBlockLayer>,
    pub final_norm: Buffer,
    /// A token's embedding, and what it says of the next token.
    pub markov: Option<(DeviceMatrix, DeviceMatrix)>,
    /// The confidence head's weights, `[H + rank]` or `[H]`, and its bias.
    pub confidence: Option<(Buffer, f32)>,
    /// Half turns a position, `[head_dim / 2]` doubles (`kernels/sp_rope.cuh`).
    pub turns: Buffer,
}

#[derive(Debug)]
pub(super) struct DeviceBlockLayer {
    pub input_norm: Buffer,
    pub post_norm: Buffer,
    pub q: DeviceMatrix,
    pub k: DeviceMatrix,
    pub v: DeviceMatrix,
    pub out: DeviceMatrix,
    pub q_norm: Buffer,
    pub k_norm: Buffer,
    pub mlp: DeviceGated,
}

impl DeviceDspark {
    /// Copies a drafter's weights to the device.
    ///
    /// # Errors
    /// [`EngineError::Device`] when memory runs out or a matrix is stored in a way that no kernel reads; it is named.
    pub fn upload(device: &Rc<Device>, config: &DsparkConfig, w: &DsparkWeights) -> Result<Self, EngineError> {
        let one = |what: &str, m| DeviceMatrix::one(device, &format!("DSpark drafter, {what}"), m);
        let layers = w.layers.iter().enumerate().map(|(i, w)| layer(device, i, w));
        Ok(Self {
            taps: one("fc", &w.taps)?,
            taps_norm: device.upload(&w.taps_norm)?,
            layers: layers.collect::<Result<_, _>>()?,
            final_norm: device.upload(&w.final_norm)?,
            markov: w.markov.as_ref().map(|m| Ok((one("markov_w1", &m.of)?, one("markov_w2", &m.next)?))).transpose()?,
            confidence: w.confidence.as_ref().map(|head| Ok::<_, EngineError>((device.upload(&head.proj)?, head.bias))).transpose()?,
            turns: device.upload(&half_turns(config.head_dim, config.rope_theta))?,
        })
    }
}

fn layer(device: &Rc<Device>, number: usize, w: &DsparkLayer) -> Result<DeviceBlockLayer, EngineError> {
    let name = format!("DSpark drafter, layer {number}");
    let one = |what: &str, m| DeviceMatrix::one(device, &format!("{name}, {what}"), m);
    let a = &w.attention;
    Ok(DeviceBlockLayer {
        input_norm: device.upload(&w.input_norm)?,
        post_norm: device.upload(&w.post_norm)?,
        q: one("q_proj", &a.q)?,
        k: one("k_proj", &a.k)?,
        v: one("v_proj", &a.v)?,
        out: one("o_proj", &a.out)?,
        q_norm: device.upload(&a.q_norm)?,
        k_norm: device.upload(&a.k_norm)?,
        mlp: gated(device, &name, std::slice::from_ref(&w.mlp))?,
    })
}

/// Bytes of a drafter by what they are for; see [`super::MemoryPlan`].
#[derive(Debug, Clone, Copy)]
pub(super) struct PlannedBlock {
    pub weights: usize,
    pub caches: usize,
    pub workspace: usize,
}

/// What a drafter takes whose context has up to `tokens` tokens.
///
/// # Errors
/// When a matrix is stored in a way that no kernel reads.
pub(super) fn planned(config: &DsparkConfig, w: &DsparkWeights, tokens: usize) -> Result<PlannedBlock, EngineError> {
    let bytes = |all: &[&crate::engine::matrix::Matrix]| -> Result<usize, EngineError> {
        all.iter().map(|m| matrix::planned_bytes("DSpark drafter", m)).sum()
    };
    let mut weights = bytes(&[&w.taps])? + (w.taps_norm.len() + w.final_norm.len()) * 4 + config.head_dim * 4;
    if let Some(m) = &w.markov {
        weights += bytes(&[&m.of, &m.next])?;
    }
    weights += w.confidence.as_ref().map_or(0, |head| head.proj.len() * 4);
    for l in &w.layers {
        let (a, m) = (&l.attention, &l.mlp);
        weights += bytes(&[&a.q, &a.k, &a.v, &a.out, &m.gate, &m.up, &m.down])?;
        weights += (l.input_norm.len() + l.post_norm.len() + a.q_norm.len() + a.k_norm.len()) * 4;
    }
    let room = tokens + config.block_size;
    let floats = block_floats(config, room);
    Ok(PlannedBlock { weights, caches: 2 * config.layers * room * config.kv_width() * 4, workspace: floats.iter().sum::<usize>() * 4 })
}

/// F32s of the buffers of a pass, in the order in which [`super::block_space::BlockSpace`] takes them.
pub(super) fn block_floats(config: &DsparkConfig, room: usize) -> [usize; 14] {
    let rows = PASS_ROWS;
    let splits = rows * config.heads * room.div_ceil(SPLIT);
    let row = rows * config.hidden;
    [
        2 * row * config.taps.len(),
        row,
        row,
        row,
        row,
        rows * (config.query_width() + 2 * config.kv_width()),
        rows * config.query_width(),
        splits * config.head_dim,
        splits * 2,
        rows * config.query_width(),
        rows * config.inter,
        rows * config.vocab,
        rows * config.markov_rank.max(1),
        config.vocab,
    ]
}
