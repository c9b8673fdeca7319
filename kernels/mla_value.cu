// Values out of the latent space, gated: out[n][h] = (W_UV[h] context[n][h]) * sigmoid(gate).
//
// Grid: (ceil(v / 8), heads). Block: 128, a warp for two values. W_UV[h] are rows h * (nope + v) + nope .. + v of kv_b. `gates` is
// heads (one gate a head) or heads * v (one a value); `gate` is `[rows, gates]` before its sigmoid, `out` is `[rows, heads * v]`.
// `mla_value_rows`: for passes of more than 16 rows; grid (ceil(v / 8), heads, ceil(rows / 16)); W_UV comes again, from cache, for every 16.
// Operations: 2 * rows * heads * latent * v, on FP32 units.
// Bytes moved: half of kv_b's stored bytes (v of nope + v) + rows * (heads * latent + gates + heads * v) * 4.
// Reference: engine::mla.
#include "sp_dot.cuh"

template <class F>
SP_DEVICE void sp_values(
    const SpMatrix& kv_b, int heads, int nope, int v, const float* context, const float* gate, int gates, int rows, float* out, int* damage,
    int site) {
    const int OUT = 2, head = blockIdx.y, latent = kv_b.cols;
    const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUT;
    if (first >= v) return;
    const u8* codes[OUT];
    const u8* scales[OUT];
    int row[OUT];
    bool there[OUT];
#pragma unroll
    for (int o = 0; o < OUT; o++) {
        row[o] = head * (nope + v) + nope + first + o;
        there[o] = first + o < v;
        codes[o] = kv_b.codes + (u64)row[o] * F::size(latent);
        scales[o] = kv_b.scales;
    }
    const float* x = context + (u64)head * latent;
    const u64 stride = (u64)heads * latent;
    const int each = gates / heads;
    sp_dots<F, SP_ROWS, OUT>(
        kv_b, codes, scales, row, there, [=](int n) { return x + n * stride; }, rows, [=](int n, int o, float value, float next) {
#pragma unroll 1
            for (int i = 0; i < 2; i++) {
                int at = first + o + i;
                if (at >= v) return;
                float g = gate[(u64)n * gates + head * each + (each == 1 ? 0 : at)];
                if (!sp_finite(g)) sp_damaged(damage, site);
                out[((u64)n * heads + head) * v + at] = (i == 0 ? value : next) * sp_sigmoid(g);
            }
        });
}

extern "C" __global__ void __launch_bounds__(128)
mla_value_bf16(
    SpMatrix kv_b, int heads, int nope, int v, const float* context, const float* gate, int gates, int rows, float* out, int* damage,
    int site) {
    sp_values<SpBf16>(kv_b, heads, nope, v, context, gate, gates, rows, out, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
mla_value_fp8(
    SpMatrix kv_b, int heads, int nope, int v, const float* context, const float* gate, int gates, int rows, float* out, int* damage,
    int site) {
    sp_values<SpFp8>(kv_b, heads, nope, v, context, gate, gates, rows, out, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
mla_value_rows_bf16(
    SpMatrix kv_b, int heads, int nope, int v, const float* context, const float* gate, int gates, int rows, float* out, int* damage,
    int site) {
    const int before = blockIdx.z * SP_ROWS;
    const u64 head = (u64)before * heads;
    sp_values<SpBf16>(
        kv_b, heads, nope, v, context + head * kv_b.cols, gate + (u64)before * gates, gates, min(rows - before, SP_ROWS), out + head * v, damage, site);
}

extern "C" __global__ void __launch_bounds__(128)
mla_value_rows_fp8(
    SpMatrix kv_b, int heads, int nope, int v, const float* context, const float* gate, int gates, int rows, float* out, int* damage,
    int site) {
    const int before = blockIdx.z * SP_ROWS;
    const u64 head = (u64)before * heads;
    sp_values<SpFp8>(
        kv_b, heads, nope, v, context + head * kv_b.cols, gate + (u64)before * gates, gates, min(rows - before, SP_ROWS), out + head * v, damage, site);
}
