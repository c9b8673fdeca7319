// The input of the draft module's projection: (norm of the next token's embedding, norm of the hidden row), embedding half first.
//
// Grid: rows. Block: 256. Dynamic shared: 32 bytes. Both inputs are `[rows, width]`, `out` is `[rows, 2 * width]`. In a chain the
// hidden row is the module's own output and the token its own draft; both are in device memory.
// Bytes moved: rows * width * 4 * 4 + width * 8. Reference: engine::mtp.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
mtp_join(const float* embedded, const float* hidden, const float* token_norm, const float* hidden_norm, float eps, int width, float* out) {
    SP_DYNAMIC_SHARED(float, scratch);
    const float* e = embedded + (u64)blockIdx.x * width;
    const float* h = hidden + (u64)blockIdx.x * width;
    float* to = out + (u64)blockIdx.x * 2 * width;
    float e_sum = 0.0f, h_sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        e_sum = fmaf(e[i], e[i], e_sum);
        h_sum = fmaf(h[i], h[i], h_sum);
    }
    e_sum = sp_block_sum(e_sum, scratch);
    h_sum = sp_block_sum(h_sum, scratch);
    float e_scale = 1.0f / sqrtf(e_sum / (float)width + eps), h_scale = 1.0f / sqrtf(h_sum / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        to[i] = e[i] * e_scale * token_norm[i];
        to[width + i] = h[i] * h_scale * hidden_norm[i];
    }
}
