// RMS norm of rows, with the residual addition before it: r += branch; out = r / sqrt(mean(r^2) + eps) * weight.
//
// Grid: rows. Block: 256. `branch` may be null: then nothing is added and `residual` is only read. Reference: engine::norm.
// A row that is not finite is noted in `damage` with `site`.
// Bytes moved: rows * width * 4 * (2, with a branch 4) + width * 4.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
rmsnorm(float* residual, const float* branch, const float* weight, float eps, int width, float* out, int* damage, int site) {
    SP_DYNAMIC_SHARED(float, scratch);
    u64 at = (u64)blockIdx.x * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = residual[at + i];
        if (branch) {
            v += branch[at + i];
            residual[at + i] = v;
        }
        sum = fmaf(v, v, sum);
    }
    sum = sp_block_sum(sum, scratch);
    if (threadIdx.x == 0 && !sp_finite(sum)) sp_damaged(damage, site);
    float scale = 1.0f / sqrtf(sum / (float)width + eps);
    // Every thread reads back what it wrote itself.
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[at + i] = residual[at + i] * scale * weight[i];
}
