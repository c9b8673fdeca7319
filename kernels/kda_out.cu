// The norm and gate of the delta rule's output: mixed = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate), per head.
//
// Grid: (heads, rows). Block: 128. Dynamic shared: 16 bytes. All are `[rows, P]` but weight, `[dim]`.
// Bytes moved: rows * P * 4 * 3 + dim * 4. Reference: engine::kda.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(128)
kda_out(const float* read, const float* gate, const float* weight, float eps, int heads, int dim, float* mixed, int* damage, int site) {
    SP_DYNAMIC_SHARED(float, scratch);
    u64 at = ((u64)blockIdx.y * heads + blockIdx.x) * dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum = fmaf(read[at + i], read[at + i], sum);
    sum = sp_block_sum(sum, scratch);
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float g = gate[at + i];
        if (!sp_finite(g)) sp_damaged(damage, site);
        mixed[at + i] = read[at + i] * scale * weight[i] * sp_sigmoid(g);
    }
}
