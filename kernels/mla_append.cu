// New rows of the latent cache: the latent after its norm and the rotated key, one row a token for all heads.
//
// Grid: rows. Block: 128. Dynamic shared: 16 bytes. `compressed` is `[rows, latent + rope]`, the projection's output; row n goes
// to cache row base[0] + n, its position. `base` is in device memory: the host need not know how many tokens were kept.
// Bytes moved: rows * (latent + rope) * 4 * 2 + latent * 4. Reference: engine::mla.
#include "sp_rope.cuh"

extern "C" __global__ void __launch_bounds__(128)
mla_append(
    const float* compressed, const float* norm, float eps, const double* turns, const int* base, int latent, int rope, float* cache,
    int* damage, int site) {
    SP_DYNAMIC_SHARED(float, scratch);
    const int position = base[0] + blockIdx.x, width = latent + rope;
    const float* from = compressed + (u64)blockIdx.x * width;
    float* to = cache + (u64)position * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < latent; i += blockDim.x) sum = fmaf(from[i], from[i], sum);
    sum = sp_block_sum(sum, scratch);
    if (threadIdx.x == 0 && !sp_finite(sum)) sp_damaged(damage, site);
    float scale = 1.0f / sqrtf(sum / (float)latent + eps);
    for (int i = threadIdx.x; i < latent; i += blockDim.x) to[i] = from[i] * scale * norm[i];
    for (int j = threadIdx.x; j < rope / 2; j += blockDim.x) {
        float a = from[latent + 2 * j], b = from[latent + 2 * j + 1];
        if (!sp_finite(a) || !sp_finite(b)) sp_damaged(damage, site);
        sp_rotate(a, b, turns[j], position);
        to[latent + 2 * j] = a;
        to[latent + 2 * j + 1] = b;
    }
}
