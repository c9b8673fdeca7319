//! Floating-point operations of a prompt's pass, by what they are for.
//!
//! Of a pass of `N` rows after `C` tokens, a multiplication and an addition being two:
//!
//! * products with weights: `2 N` for each parameter; the router's, the dense and the shared experts', and of routed experts k of E; the
//!   head's for the one row that has logits. Vectors count as matrices do; embeddings and norms of the residual stream do not count.
//! * latent attention: its absorbed `kv_b_proj`, `2 N heads latent (nope + value)`, and the tokens that rows see,
//!   `2 heads (2 latent + rope)` for each of `N C + N (N + 1) / 2`.
//! * delta attention: the recurrence, `7 N heads dim^2` (decay, what the state has for the key, update, query), and the convolutions,
//!   `2 N taps 3 heads dim`.
//!
//! What a kernel does beyond that is none of the model's work: tensor cores multiply three terms for one, and tiles have rows that nobody wants.

use super::config::{AttentionKind, ModelConfig};
use super::inventory::Inventory;
use super::tensors;
use crate::trace::Component;
use serde::Serialize;

/// Operations of a part of a component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Operations {
    /// The component that kernels are labelled with.
    pub component: Component,
    /// `products` with weights, `attention` over the cache with its absorbed products, or `recurrence` with its convolutions.
    pub part: &'static str,
    /// How many.
    pub operations: u64,
}

/// The operations of a pass of `rows` rows of the target after `context` tokens, one row of it with logits; parts that the model has.
pub fn of_prompt(config: &ModelConfig, inventory: &Inventory, rows: u64, context: u64) -> Vec<Operations> {
    let (rows, context) = (u128::from(rows), u128::from(context));
    let parameters = |component| u128::from(inventory.of(component).parameters);
    let layers = |kind| config.layers_of(kind) as u128;
    let (heads, dim, width) = (config.heads as u128, config.head_dim as u128, config.kda_width() as u128);
    let (latent, rope) = (config.kv_lora_rank as u128, config.qk_rope_head_dim as u128);
    let absorbed = layers(AttentionKind::Mla) * heads * latent * (config.qk_nope_head_dim + config.v_head_dim) as u128;
    let convolutions = layers(AttentionKind::Kda) * config.conv_kernel as u128 * 3 * width;
    let seen = rows * context + rows * (rows + 1) / 2;
    let chosen = parameters(tensors::Component::RoutedExperts) / config.experts as u128 * config.experts_per_token as u128;
    let products = |component, parameters: u128| (component, "products", 2 * rows * parameters);
    let all = [
        products(Component::Kda, parameters(tensors::Component::Kda).saturating_sub(convolutions)),
        (Component::Kda, "recurrence", layers(AttentionKind::Kda) * 7 * rows * heads * dim * dim + 2 * rows * convolutions),
        products(Component::Mla, parameters(tensors::Component::Mla).saturating_sub(absorbed)),
        (Component::Mla, "attention", 2 * rows * absorbed + layers(AttentionKind::Mla) * 2 * heads * (2 * latent + rope) * seen),
        products(Component::Dense, parameters(tensors::Component::Dense)),
        products(Component::Router, parameters(tensors::Component::Router)),
        products(Component::Experts, chosen),
        products(Component::Shared, parameters(tensors::Component::SharedExperts)),
        (Component::Head, "products", 2 * (config.vocab * config.hidden) as u128),
    ];
    let all = all.into_iter().map(|(component, part, operations)| Operations {
        component,
        part,
        operations: u64::try_from(operations).unwrap_or(u64::MAX),
    });
    all.filter(|part| part.operations > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::presets::Preset;

    /// Of one row without context: two for each active parameter, and what has none.
    #[test]
    fn operations_follow_the_shape() {
        let preset = Preset::find("ling-3.0-flash").unwrap();
        let (config, inventory) = (preset.model().unwrap(), preset.inventory().unwrap());
        let sum = |rows, context| of_prompt(&config, &inventory, rows, context).iter().map(|part| part.operations).sum::<u64>();
        let (heads, dim) = (config.heads as u64, config.head_dim as u64);
        let (kda, mla) = (config.layers_of(AttentionKind::Kda) as u64, config.layers_of(AttentionKind::Mla) as u64);
        let token = mla * 2 * heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim) as u64;
        let beside = inventory.of(tensors::Component::Norms).parameters + inventory.of(tensors::Component::RouterBias).parameters;
        let one = 2 * (inventory.active_parameters(&config) - beside) + kda * 7 * heads * dim * dim + token;
        assert_eq!(sum(1, 0), one);
        // Rows see each other and what came before; the head has one row.
        let head = 2 * (config.vocab * config.hidden) as u64;
        assert_eq!(sum(3, 10), 3 * (one - token - head) + head + token * (11 + 12 + 13));
        // By hand.
        let parts = of_prompt(&config, &inventory, 512, 0);
        let of = |component, part| parts.iter().find(|p| p.component == component && p.part == part).unwrap().operations;
        let expert = 3 * (config.hidden * config.expert_inter) as u64;
        let chosen = (config.moe_layers() * config.experts_per_token) as u64;
        assert_eq!(of(Component::Experts, "products"), 2 * 512 * chosen * expert);
        assert_eq!(of(Component::Router, "products"), 2 * 512 * (config.moe_layers() * config.experts * config.hidden) as u64);
        assert_eq!(of(Component::Head, "products"), head);
    }
}
