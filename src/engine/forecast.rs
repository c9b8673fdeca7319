//! What a checkpoint's decode and verify steps read: the bytes model of [`crate::metric::bytes`] with a model's own sizes.

use super::config::{AttentionKind, ModelConfig};
use super::inventory::Inventory;
use super::tensors::Component;
pub use crate::metric::bytes::{StepBytes, uniform_union};

/// What the forecast takes for granted, for every place that shows it.
pub const ASSUMPTIONS: &[&str] = &[
    "a step's time is its bytes: launches, synchronisation, arithmetic and host time are not in it",
    "every weight that a step needs is read once, whatever its rows; of the embedding single rows only",
    "uniform: rows choose experts independently and all experts alike; maximum: no two rows share an expert",
    "verify stages one KDA state (F32) a row and copies the accepted one; the MLA cache (BF16) is read once",
];

impl StepBytes {
    /// The bytes of a model at a context length.
    pub fn new(config: &ModelConfig, inventory: &Inventory, context: usize) -> Self {
        let experts = config.experts as f64;
        let k = config.experts_per_token as f64;
        let draft_pass = (config.mtp_layers > 0).then(|| {
            let routed = inventory.draft_of(Component::RoutedExperts).read_bytes() as f64;
            let rest = inventory.draft_total().read_bytes() as f64 - routed;
            let cache = (mla_row_bytes(config) as f64) * context as f64;
            rest + routed / experts * k + inventory.of(Component::Head).read_bytes() as f64 + cache
        });
        Self {
            per_union: inventory.of(Component::RoutedExperts).read_bytes() as f64 / experts,
            other: inventory.other_bytes_per_step() as f64,
            state: state_bytes(config) as f64,
            cache: cache_bytes_per_token(config) as f64 * context as f64,
            draft_pass,
            experts: config.experts,
            experts_per_token: config.experts_per_token,
        }
    }
}

/// Bytes of the recurrent state of all KDA layers, F32: a `[head_dim, head_dim]` matrix a head.
pub fn state_bytes(config: &ModelConfig) -> u64 {
    let layer = (config.heads * config.head_dim) as u64 * config.head_dim as u64 * 4;
    config.layers_of(AttentionKind::Kda) as u64 * layer
}

/// Bytes that a token adds to the cache of the target's MLA layers, BF16: latent and rotated key.
pub fn cache_bytes_per_token(config: &ModelConfig) -> u64 {
    config.layers_of(AttentionKind::Mla) as u64 * mla_row_bytes(config)
}

/// Bytes that a token adds to one MLA layer's cache, BF16.
fn mla_row_bytes(config: &ModelConfig) -> u64 {
    (config.kv_lora_rank + config.qk_rope_head_dim) as u64 * 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::presets::Preset;

    fn preset(name: &str, context: usize) -> StepBytes {
        let preset = Preset::find(name).unwrap();
        StepBytes::new(&preset.model().unwrap(), &preset.inventory().unwrap(), context)
    }

    /// The formula with round numbers of bytes a weight: routed, head, router, rest.
    fn flash(routed: f64, head: f64, router: f64, rest: f64) -> StepBytes {
        let (heads, routers) = (402_391_040.0, 52_428_800.0);
        StepBytes {
            per_union: 0.235_929_6e9 * routed,
            other: heads * head + routers * router + (3.2155e9 - heads - routers) * rest,
            state: 73_400_320.0,
            cache: 0.0,
            draft_pass: None,
            experts: 512,
            experts_per_token: 8,
        }
    }

    fn near(got: f64, want: f64, tolerance: f64) {
        assert!((got - want).abs() <= tolerance, "{got} is not {want} +- {tolerance}");
    }

    #[test]
    fn uniform_unions_of_512_by_8() {
        for (rows, union) in [(1, 8.0), (2, 15.88), (3, 23.63), (4, 31.26), (5, 38.77), (6, 46.16), (8, 60.61), (9, 67.66)] {
            near(uniform_union(512, 8, rows), union, 0.006);
        }
        near(uniform_union(128, 8, 16), 82.0, 0.5);
        near(uniform_union(4, 4, 3), 4.0, 1e-12);
    }

    #[test]
    fn state_and_cache_of_flash() {
        let config = Preset::find("ling-3.0-flash").unwrap().model().unwrap();
        assert_eq!((state_bytes(&config), cache_bytes_per_token(&config)), (73_400_320, 8_064));
        let tiny = Preset::find("ling-3.0-tiny").unwrap().model().unwrap();
        assert_eq!((state_bytes(&tiny), cache_bytes_per_token(&tiny)), (18 << 20, 6_912));
        near(preset("ling-3.0-flash", 8192).decode() - preset("ling-3.0-flash", 0).decode(), 8192.0 * 8064.0, 1.0);
    }

    #[test]
    fn ratios_of_bf16_flash() {
        for bytes in [preset("ling-3.0-flash", 0), flash(2.0, 2.0, 2.0, 2.0)] {
            near(bytes.decode() / 1e9, 10.35, 0.005);
            for (union, ratio) in [(16.0, 1.40), (20.0, 1.58), (25.6, 1.84), (31.26, 2.10), (32.0, 2.13)] {
                near(bytes.verify_ratio(4, union), ratio, 0.006);
            }
            near(bytes.verify_ratio(6, 36.5), 2.35, 0.006);
            near(bytes.verify_ratio(9, 52.0), 3.08, 0.006);
            // Weights alone reach 2.26 at a union that four rows cannot have.
            near(bytes.weights(35.3) / bytes.weights(8.0), 2.26, 0.005);
            assert_eq!(bytes.max_union(4), 32);
            assert_eq!(bytes.verify_ratio(1, 8.0), 1.0);
        }
    }

    #[test]
    fn ratios_of_quantised_flash() {
        let fp8 = flash(1.0, 2.0, 2.0, 1.0);
        near(fp8.decode() / 1e9, 5.71, 0.01);
        near(fp8.verify_ratio(4, 25.6), 1.79, 0.006);
        near(fp8.verify_ratio(9, 52.0), 2.95, 0.006);
        let mxfp4 = flash(4.25 / 8.0, 2.0, 1.0, 1.0);
        near(mxfp4.decode() / 1e9, 4.77, 0.006);
        for (rows, union, ratio) in [(4, 16.0, 1.29), (4, 25.6, 1.54), (4, 31.26, 1.69), (6, 36.5, 1.86), (9, 52.0, 2.31)] {
            near(mxfp4.verify_ratio(rows, union), ratio, 0.006);
        }
        let int4 = flash(4.5 / 8.0, 2.0, 2.0, 2.0);
        near(int4.decode() / 1e9, 7.64, 0.006);
        near(int4.verify_ratio(4, 31.26), 1.45, 0.006);
        near(int4.verify_ratio(9, 52.0), 1.86, 0.006);
        let everything = flash(4.5 / 8.0, 4.5 / 8.0, 4.5 / 8.0, 4.5 / 8.0);
        near(everything.decode() / 1e9, 3.02, 0.006);
        near(everything.verify_ratio(6, 36.5), 2.42, 0.006);
    }

    #[test]
    fn weights_of_the_released_layouts() {
        for (name, gigabytes) in
            [("ling-3.0-flash", 10.21), ("ling-3.0-flash-fp8", 5.60), ("ling-3.0-flash-fp4", 4.72), ("ling-3.0-flash-int4", 7.49)]
        {
            near(preset(name, 0).weights(8.0) / 1e9, gigabytes, 0.01);
        }
        let int4 = preset("ling-3.0-flash-int4", 0);
        near(int4.decode() / 1e9, 7.64, 0.006);
        near(int4.verify_ratio(4, 25.6), 1.35, 0.006);
    }

    #[test]
    fn drafting_costs_a_block_and_a_head_each() {
        let bytes = preset("ling-3.0-flash", 0);
        near(bytes.draft_pass.unwrap() / 1e9, 1.00, 0.005);
        // Its own cache: 576 values of BF16 a token.
        let far = preset("ling-3.0-flash", 1_000_000).draft_pass.unwrap() - preset("ling-3.0-flash", 0).draft_pass.unwrap();
        near(far, 1152.0 * 1e6, 1.0);
        near(bytes.step_ratio(4, 28.5).unwrap(), 2.26, 0.006);
        assert_eq!(preset("ling-3.0-tiny", 0).step_ratio(4, 28.5), None);
    }
}
