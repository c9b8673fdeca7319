// What goes into each row's update of the delta rule: the causal convolution with SiLU of q, k and v, the L2 norms, the decay
// and beta. Kimi Delta Attention as Ling-3.0 uses it (safe gate).
//
// Grid: (heads, rows). Block: 128. Dynamic shared: (2 * dim + 4) * 4 bytes. `raw` is `[taps - 1 + rows, 3 P]`, the projections q, k, v before the
// convolution, oldest row first, P = heads * dim. `first` rows were pending before this pass: row n is pending row first + n.
// conv[c] = sum_j filter[c][j] * raw[row + j][c]; q and k / sqrt(sum of squares + 1e-6), q / sqrt(dim);
// decay = exp(bound * sigmoid(scale[head] * (forget + dt_bias))); beta = sigmoid(beta logit).
// Bytes moved: rows * P * 4 * (3 * taps + 1 + 4) (a tap's row comes from cache after its first use) + P * 4 * (3 * taps + 1).
// Reference: engine::kda.
#include "sp_intrin.cuh"

struct SpKdaRows {
    // Scaled queries `[rows, P]` of this pass.
    float* query;
    // Of all pending rows: keys, values, decays `[pending, P]`, betas `[pending, heads]`.
    float* keys;
    float* values;
    float* decays;
    float* betas;
};

SP_DEVICE float sp_convolve(const float* raw, const float* filter, int taps, int stride) {
    float sum = 0.0f;
    for (int j = 0; j < taps; j++) sum = fmaf(filter[j], raw[(u64)j * stride], sum);
    return sp_silu(sum);
}

extern "C" __global__ void __launch_bounds__(128)
kda_mix(
    const float* raw, const float* q_conv, const float* k_conv, const float* v_conv, const float* forget, const float* dt_bias,
    const float* decay_scale, float bound, const float* beta, int heads, int dim, int taps, int first, SpKdaRows to, int* damage, int site) {
    SP_DYNAMIC_SHARED(float, shared);
    float* scratch = shared + 2 * dim;
    const int head = blockIdx.x, row = blockIdx.y, width = heads * dim;
    const float* window = raw + (u64)(first + row) * 3 * width;
    float q_sum = 0.0f, k_sum = 0.0f;
    bool finite = true;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        int c = head * dim + i;
        u64 pending = (u64)(first + row) * width + c;
        float q = sp_convolve(window + c, q_conv + (u64)c * taps, taps, 3 * width);
        float k = sp_convolve(window + width + c, k_conv + (u64)c * taps, taps, 3 * width);
        to.values[pending] = sp_convolve(window + 2 * width + c, v_conv + (u64)c * taps, taps, 3 * width);
        shared[i] = q;
        shared[dim + i] = k;
        q_sum = fmaf(q, q, q_sum);
        k_sum = fmaf(k, k, k_sum);
        float f = forget[(u64)row * width + c];
        to.decays[pending] = expf(bound * sp_sigmoid(decay_scale[head] * (f + dt_bias[c])));
        // Sigmoids would hide an infinity.
        const float* current = window + (u64)(taps - 1) * 3 * width + c;
        finite = finite && sp_finite(f) && sp_finite(current[0]) && sp_finite(current[width]) && sp_finite(current[2 * width]);
    }
    if (!finite) sp_damaged(damage, site);
    q_sum = sp_block_sum(q_sum, scratch);
    k_sum = sp_block_sum(k_sum, scratch);
    float q_norm = 1.0f / sqrtf(q_sum + 1e-6f), k_norm = 1.0f / sqrtf(k_sum + 1e-6f), scale = 1.0f / sqrtf((float)dim);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        int c = head * dim + i;
        to.query[(u64)row * width + c] = shared[i] * q_norm * scale;
        to.keys[(u64)(first + row) * width + c] = shared[dim + i] * k_norm;
    }
    if (threadIdx.x == 0) {
        float b = beta[(u64)row * heads + head];
        if (!sp_finite(b)) sp_damaged(damage, site);
        to.betas[(u64)(first + row) * heads + head] = sp_sigmoid(b);
    }
}
