//! What kernels are for, by their names: the only thing that a profile without module ranges says of them.
//!
//! The first list that has a word of the name decides. Attention of whatever kind, rotation and cache included, is `mla`: the component of
//! layers that attend to all of the context.

use crate::trace::Component;

/// Names of collectives.
const COMMUNICATION: &[&str] = &[
    "nccl",
    "rccl",
    "allreduce",
    "all_reduce",
    "cross_device_reduce",
    "allgather",
    "all_gather",
    "reduce_scatter",
    "deep_ep",
    "alltoall",
    "all_to_all",
];

/// Each routed layer has one kernel of these names.
const CHOICE: &[&str] = &["topk_gating", "topkgating", "topk_softmax", "topk_sigmoid", "topk_forward", "moe_fused_gate", "grouped_topk"];

/// The rest of the router: scores, and rows sorted by expert (`bitmatrix` and `expt_data` are of Triton's routing).
const ROUTER: &[&str] = &["moe_gate", "moe_align", "router", "routing", "bitmatrix", "expt_data"];

/// Matrices of experts and what gathers and sums their rows (`matmul_ogs` is Triton's grouped product: gather, matrices, scatter).
const EXPERTS: &[&str] =
    &["moe", "expert", "matmul_ogs", "finalize_matmul", "grouped_gemm", "group_gemm", "groupedgemm", "m_grouped", "mgrouped"];

const NORM: &[&str] = &["rmsnorm", "rms_norm", "layernorm", "layer_norm"];

const KDA: &[&str] = &["kda", "delta_rule", "gated_delta"];

/// Attention to the whole context, its rotation and its cache.
const ATTENTION: &[&str] = &[
    "mla",
    "rotary",
    "apply_rope",
    "fused_rope",
    "qk_rope",
    "unified_attention",
    "paged_attention",
    "decode_attention",
    "flash_attention",
    "flash_attn",
    "flashattn",
    "flash_fwd",
    "fmha",
    "withpagedkv",
    "fwd_kernel_stage",
    "fwd_grouped_kernel_stage",
    "reshape_and_cache",
    "reduce_segments",
];

const EMBEDDING: &[&str] = &["embedding", "indexselect"];

const SAMPLING: &[&str] = &["argmax", "sampling", "sample_", "top_p", "topp", "rejection", "verify_tree"];

/// What a kernel is for, as far as its name says; `Other` when it does not.
pub fn component(kernel: &str) -> Component {
    let name = kernel.to_ascii_lowercase();
    let any = |words: &[&str]| words.iter().any(|word| name.contains(word));
    if any(COMMUNICATION) {
        Component::Communication
    } else if any(CHOICE) || any(ROUTER) {
        Component::Router
    } else if any(EXPERTS) && !is_pointwise(&name) {
        Component::Experts
    } else if any(NORM) {
        Component::Norm
    } else if any(KDA) {
        Component::Kda
    } else if any(ATTENTION) {
        // A rotary embedding is none of tokens.
        Component::Mla
    } else if any(EMBEDDING) {
        Component::Embedding
    } else if any(SAMPLING) {
        Component::Sampling
    } else {
        Component::Other
    }
}

/// Whether a compiler made the kernel of single operations and named it after them and their neighbours: one that pads what goes into the
/// experts has their name, and none of their work.
fn is_pointwise(lower: &str) -> bool {
    ["triton_poi_", "triton_red_", "triton_per_"].iter().any(|kind| lower.starts_with(kind))
}

/// Whether a kernel is the one choice of experts that each routed layer has.
pub fn is_choice(kernel: &str) -> bool {
    let name = kernel.to_ascii_lowercase();
    CHOICE.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_by_name() {
        assert_eq!(component("void fused_moe_kernel<bf16>(Params)"), Component::Experts);
        assert_eq!(component("void moe_align_block_size_kernel<bf16>(Params)"), Component::Router);
        assert_eq!(component("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), Component::Communication);
        assert_eq!(component("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x6_tn"), Component::Other);
        assert!(is_choice("void topk_gating_softmax<bf16>(Params)") && !is_choice("moe_align_block_size_kernel"));
    }

    #[test]
    fn tritons_kernels_of_experts_are_the_experts() {
        for name in ["_matmul_ogs_NNT_bf16xbf16xmxfp4_32x256x64x1", "_matmul_ogs_NNT_bf16xbf16xmxfp4_32x256x64x1_swiglu"] {
            assert_eq!(component(name), Component::Experts, "{name}");
        }
        assert_eq!(component("_finalize_matmul_scatter_fp16"), Component::Experts);
        for name in ["_topk_forward", "_combined_routing_compute", "_combined_routing_memset", "_sum_bitmatrix_rows"] {
            assert_eq!(component(name), Component::Router, "{name}");
        }
        assert!(is_choice("_topk_forward") && !is_choice("_sum_bitmatrix_rows"));
        // Padding what goes into the experts is none of their work.
        assert_eq!(component("triton_poi_fused_constant_pad_nd_moe_forward_3"), Component::Other);
    }

    #[test]
    fn attention_has_its_rotation_and_its_cache() {
        for name in [
            "void vllm::rotary_embedding_kernel<c10::Half, false>(long const*)",
            "kernel_unified_attention_2d",
            "kernel_unified_attention_3d",
            "reduce_segments",
            "void vllm::reshape_and_cache_flash_kernel<half>(half const*)",
            "void vllm::paged_attention_v2_kernel<half>(float*)",
            "flash_fwd_splitkv_kernel",
            "void flashinfer::BatchDecodeWithPagedKVCacheKernel<1>()",
        ] {
            assert_eq!(component(name), Component::Mla, "{name}");
        }
        assert_eq!(component("void at::native::indexSelectLargeIndex<c10::Half>()"), Component::Embedding);
        assert_eq!(component("chunk_gated_delta_rule_fwd_kernel_h"), Component::Kda);
    }
}
