//! A model's weights on the device, by role; uploaded once and shared by the target and its draft module.

use super::device::Buffer;
use super::matrix::DeviceMatrix;
use super::upload::Upload;
use crate::engine::weights::{Attention, GatedMlp, LayerWeights, MlaQuery, Mlp, ModelWeights, MoeWeights, MtpWeights};
use crate::engine::{EngineError, ModelConfig};
use std::f64::consts::PI;

/// All weights of a model on a device.
#[derive(Debug)]
pub struct DeviceWeights {
    pub(super) embedding: DeviceMatrix,
    pub(super) final_norm: Buffer,
    pub(super) head: DeviceMatrix,
    pub(super) layers: Vec<DeviceLayer>,
    pub(super) mtp: Option<DeviceMtp>,
    /// Half turns a position, `[rope / 2]` doubles (`kernels/sp_rope.cuh`).
    pub(super) turns: Buffer,
}

#[derive(Debug)]
pub(super) struct DeviceLayer {
    pub input_norm: Buffer,
    pub post_norm: Buffer,
    pub attention: DeviceAttention,
    pub mlp: DeviceMlp,
}

#[derive(Debug)]
pub(super) enum DeviceAttention {
    Kda(Box<DeviceKda>),
    Mla(Box<DeviceMla>),
}

#[derive(Debug)]
pub(super) struct DeviceKda {
    pub q: DeviceMatrix,
    pub k: DeviceMatrix,
    pub v: DeviceMatrix,
    pub f: DeviceMatrix,
    pub g: DeviceMatrix,
    pub b: DeviceMatrix,
    pub q_conv: Buffer,
    pub k_conv: Buffer,
    pub v_conv: Buffer,
    pub decay_scale: Buffer,
    pub dt_bias: Buffer,
    pub out_norm: Buffer,
    pub out: DeviceMatrix,
}

#[derive(Debug)]
pub(super) struct DeviceMla {
    /// First projection, norm and second one of a low-rank query; else the first alone.
    pub query: DeviceMatrix,
    pub query_low: Option<(Buffer, DeviceMatrix)>,
    pub kv_a: DeviceMatrix,
    pub kv_norm: Buffer,
    pub kv_b: DeviceMatrix,
    pub gate: DeviceMatrix,
    pub out: DeviceMatrix,
}

#[derive(Debug)]
pub(super) enum DeviceMlp {
    Dense(DeviceGated),
    Moe(Box<DeviceMoe>),
}

#[derive(Debug)]
pub(super) struct DeviceMoe {
    pub router: DeviceMatrix,
    pub bias: Buffer,
    pub experts: DeviceGated,
    pub shared: DeviceGated,
}

/// A gated MLP, or those of all experts.
#[derive(Debug)]
pub(super) struct DeviceGated {
    pub gate: DeviceMatrix,
    pub up: DeviceMatrix,
    pub down: DeviceMatrix,
}

#[derive(Debug)]
pub(super) struct DeviceMtp {
    pub token_norm: Buffer,
    pub hidden_norm: Buffer,
    pub projection: DeviceMatrix,
    pub layer: DeviceLayer,
    pub final_norm: Buffer,
}

impl DeviceWeights {
    /// Copies a model's weights to the device; what a recipe makes, the device makes, and the host never has it.
    ///
    /// # Errors
    /// [`EngineError::Device`] when memory runs out or a matrix is stored in a way that no kernel reads; it is named.
    pub fn upload(up: &Upload<'_>, config: &ModelConfig, weights: &ModelWeights) -> Result<Self, EngineError> {
        let layers = weights.layers.iter().enumerate().map(|(i, w)| layer(up, &format!("layer {i}"), w));
        let uploaded = Self {
            embedding: DeviceMatrix::one(up, "word_embeddings", &weights.embedding)?,
            final_norm: up.upload(&weights.final_norm)?,
            head: DeviceMatrix::one(up, "lm_head", &weights.head)?,
            layers: layers.collect::<Result<_, _>>()?,
            mtp: weights.mtp.as_ref().map(|w| mtp(up, config, w)).transpose()?,
            turns: up.upload(&half_turns(config.qk_rope_head_dim, config.rope_theta))?,
        };
        // What fails on the way, or while the device makes it, is said here.
        up.finish()?;
        Ok(uploaded)
    }
}

/// Half turns a position of each pair of a rotated size `dim` with base `theta`, `[dim / 2]`.
pub(super) fn half_turns(dim: usize, theta: f64) -> Vec<f64> {
    (0..dim / 2).map(|j| theta.powf(-2.0 * j as f64 / dim as f64) / PI).collect()
}

fn layer(up: &Upload<'_>, name: &str, w: &LayerWeights) -> Result<DeviceLayer, EngineError> {
    let one = |what: &str, m| DeviceMatrix::one(up, &format!("{name}, {what}"), m);
    let attention = match &w.attention {
        Attention::Kda(w) => DeviceAttention::Kda(Box::new(DeviceKda {
            q: one("q_proj", &w.q)?,
            k: one("k_proj", &w.k)?,
            v: one("v_proj", &w.v)?,
            f: one("f_proj", &w.f)?,
            g: one("g_proj", &w.g)?,
            b: one("b_proj", &w.b)?,
            q_conv: up.upload(&w.q_conv)?,
            k_conv: up.upload(&w.k_conv)?,
            v_conv: up.upload(&w.v_conv)?,
            decay_scale: up.upload(&w.decay_scale)?,
            dt_bias: up.upload(&w.dt_bias)?,
            out_norm: up.upload(&w.out_norm)?,
            out: one("o_proj", &w.out)?,
        })),
        Attention::Mla(w) => {
            let (query, query_low) = match &w.query {
                MlaQuery::Full(q) => (one("q_proj", q)?, None),
                MlaQuery::LowRank { a, norm, b } => (one("q_a_proj", a)?, Some((up.upload(norm)?, one("q_b_proj", b)?))),
            };
            DeviceAttention::Mla(Box::new(DeviceMla {
                query,
                query_low,
                kv_a: one("kv_a_proj_with_mqa", &w.kv_a)?,
                kv_norm: up.upload(&w.kv_norm)?,
                kv_b: one("kv_b_proj", &w.kv_b)?,
                gate: one("g_proj", &w.gate)?,
                out: one("dense", &w.out)?,
            }))
        }
    };
    let mlp = match &w.mlp {
        Mlp::Dense(m) => DeviceMlp::Dense(gated(up, name, std::slice::from_ref(m))?),
        Mlp::Moe(MoeWeights { router, bias, experts, shared }) => DeviceMlp::Moe(Box::new(DeviceMoe {
            router: one("router", router)?,
            bias: up.upload(bias)?,
            experts: gated(up, &format!("{name}, experts"), experts)?,
            shared: gated(up, &format!("{name}, shared expert"), std::slice::from_ref(shared))?,
        })),
    };
    Ok(DeviceLayer { input_norm: up.upload(&w.input_norm)?, post_norm: up.upload(&w.post_norm)?, attention, mlp })
}

pub(super) fn gated(up: &Upload<'_>, name: &str, mlps: &[GatedMlp]) -> Result<DeviceGated, EngineError> {
    Ok(DeviceGated {
        gate: DeviceMatrix::upload(up, &format!("{name}, gate_proj"), mlps.iter().map(|m| &m.gate))?,
        up: DeviceMatrix::upload(up, &format!("{name}, up_proj"), mlps.iter().map(|m| &m.up))?,
        down: DeviceMatrix::upload(up, &format!("{name}, down_proj"), mlps.iter().map(|m| &m.down))?,
    })
}

fn mtp(up: &Upload<'_>, config: &ModelConfig, w: &MtpWeights) -> Result<DeviceMtp, EngineError> {
    Ok(DeviceMtp {
        token_norm: up.upload(&w.token_norm)?,
        hidden_norm: up.upload(&w.hidden_norm)?,
        projection: DeviceMatrix::one(up, "draft module, eh_proj", &w.projection)?,
        layer: layer(up, &format!("layer {}", config.layers), &w.layer)?,
        final_norm: up.upload(&w.final_norm)?,
    })
}
