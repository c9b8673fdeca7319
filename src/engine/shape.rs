//! The model's shape as traces record it.

use super::checkpoint::Checkpoint;
use super::config_read::ARCHITECTURE;
use super::weights::Mlp;
use crate::trace::manifest::ModelShape;

impl Checkpoint {
    /// Stored format of the routed experts (of the first expert; releases store all alike), `none` without any.
    pub fn expert_format(&self) -> &'static str {
        let first = |mlp: &Mlp| match mlp {
            Mlp::Dense(_) => None,
            Mlp::Moe(moe) => moe.experts.first().map(|expert| expert.gate.format().name()),
        };
        self.weights.layers.iter().find_map(|layer| first(&layer.mlp)).unwrap_or("none")
    }

    /// What a trace's manifest says about the model.
    pub fn shape(&self) -> ModelShape {
        let config = &self.config;
        // Every number was bounded when the configuration was read.
        let short = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
        let long = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        ModelShape {
            name: self.name.clone(),
            architecture: ARCHITECTURE.to_owned(),
            identity: Some(self.identity.clone()),
            layers: short(config.layers),
            moe_layers: (config.dense_layers..config.layers).map(short).collect(),
            draft_layers: (config.layers..config.layers + config.mtp_layers).map(short).collect(),
            experts: short(config.experts),
            experts_known: true,
            experts_per_token: short(config.experts_per_token),
            shared_experts: Some(short(config.shared_experts)),
            hidden_size: Some(long(config.hidden)),
            expert_size: Some(long(config.expert_inter)),
            vocab_size: Some(long(config.vocab)),
            quantisation: self.expert_format().to_owned(),
            bytes_per_expert: Some(self.inventory.bytes_per_expert(config)),
            bytes_other_per_step: Some(self.inventory.other_bytes_per_step()),
            synthetic: self.synthetic,
            routing: None,
        }
    }
}
