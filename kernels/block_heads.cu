// Heads of a block drafter's rows, normed and rotated: out = rotate(raw / sqrt(mean(raw^2) + eps) * weight, position).
//
// Grid: (heads, rows). Block: 64. Row n is at position base[0] + n; element j of a head is rotated with element j + dim / 2. With
// `into_cache` the rows go to rows base[0] and on of `out`, else to rows 0 and on. A head that is not finite is noted in `damage`.
// Bytes moved: rows * heads * dim * 8 + dim * 4. Reference: engine::dspark::attention.
#include "sp_rope.cuh"

extern "C" __global__ void __launch_bounds__(64)
block_heads(const float* raw, const float* weight, float eps, const double* turns, const int* base, int into_cache, int dim, float* out,
            int* damage, int site) {
    SP_DYNAMIC_SHARED(float, scratch);
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x, half = dim / 2, position = base[0] + row;
    const float* from = raw + ((u64)row * heads + head) * dim;
    float* to = out + ((u64)(into_cache ? position : row) * heads + head) * dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum = fmaf(from[i], from[i], sum);
    sum = sp_block_sum(sum, scratch);
    if (threadIdx.x == 0 && !sp_finite(sum)) sp_damaged(damage, site);
    const float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int j = threadIdx.x; j < half; j += blockDim.x) {
        float a = from[j] * scale * weight[j], b = from[j + half] * scale * weight[j + half];
        sp_rotate(a, b, turns[j], position);
        to[j] = a;
        to[j + half] = b;
    }
}
