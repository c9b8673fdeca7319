// Queries taken into the latent space: absorbed[n][h] = (q_nope W_UK[h], rotated q_rope), so that attention reads the latent cache alone.
//
// Grid: (ceil(latent / 128), heads). Block: 128; latent a multiple of 4. Dynamic shared: 4 * rows * 128 * 4 bytes. `query` is
// `[rows, heads, nope + rope]`; W_UK[h] are rows h * (nope + v) .. + nope of kv_b `[heads * (nope + v), latent]`. A thread has four
// columns of every fourth row for all rows of the pass; four warps' sums are added in order.
// `mla_query_rows`: for passes of more than 16 rows; grid (ceil(latent / 128), heads, ceil(rows / 16)), shared memory for 16 rows; W_UK comes
// again, from cache, for every 16. Operations: 2 * rows * heads * nope * latent, on FP32 units.
// Bytes moved: half of kv_b's stored bytes (nope of nope + v) + rows * heads * (nope + latent + 2 * rope) * 4.
// Reference: engine::mla.
#include "sp_matrix.cuh"
#include "sp_rope.cuh"

// Columns col..col+4 of row `row`, decoded; rows begin on borders of four elements.
SP_DEVICE float4 sp_four(SpBf16, const SpMatrix& w, int row, int col) {
    uint2 v = sp_weight8(w.codes + ((u64)row * w.cols + col) * 2);
    return make_float4(sp_float(v.x << 16), sp_float(v.x & 0xffff0000u), sp_float(v.y << 16), sp_float(v.y & 0xffff0000u));
}
SP_DEVICE float4 sp_four(SpFp8, const SpMatrix& w, int row, int col) {
    u32 v = sp_weight4(w.codes + (u64)row * w.cols + col);
    float2 low = sp_e4m3x2(v & 0xffff), high = sp_e4m3x2(v >> 16);
    float scale = SpFp8::scale(w.scales, sp_scale_row(w, row) + (col >> w.col_shift));
    return make_float4(low.x * scale, low.y * scale, high.x * scale, high.y * scale);
}

struct SpHeads {
    int heads;
    int nope;
    int rope;
    int v;
};

template <class F>
SP_DEVICE void sp_absorb(
    const SpMatrix& kv_b, SpHeads m, const float* query, const double* turns, int position, int rows, float* absorbed) {
    SP_DYNAMIC_SHARED(float, partial);
    const int head = blockIdx.y, latent = kv_b.cols, size = m.nope + m.rope, width = latent + m.rope;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = blockIdx.x * 128 + lane * 4;
    float acc[SP_ROWS][4];
#pragma unroll
    for (int n = 0; n < SP_ROWS; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    if (col < latent) {
#pragma unroll 1
        for (int i = warp; i < m.nope; i += 4) {
            float4 w = sp_four(F(), kv_b, head * (m.nope + m.v) + i, col);
#pragma unroll
            for (int n = 0; n < SP_ROWS; n++)
                if (n < rows) {
                    float q = query[((u64)n * m.heads + head) * size + i];
                    acc[n][0] = fmaf(w.x, q, acc[n][0]);
                    acc[n][1] = fmaf(w.y, q, acc[n][1]);
                    acc[n][2] = fmaf(w.z, q, acc[n][2]);
                    acc[n][3] = fmaf(w.w, q, acc[n][3]);
                }
        }
    }
#pragma unroll
    for (int n = 0; n < SP_ROWS; n++)
        if (n < rows) *(float4*)(partial + ((warp * rows + n) * 32 + lane) * 4) = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    __syncthreads();
    const int own = blockIdx.x * 128 + threadIdx.x;
    for (int n = 0; n < rows; n++)
        if (own < latent) {
            float sum = 0.0f;
            for (int w = 0; w < 4; w++) sum += partial[(w * rows + n) * 128 + threadIdx.x];
            absorbed[((u64)n * m.heads + head) * width + own] = sum;
        }
    if (blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < rows * (m.rope / 2); i += blockDim.x) {
        int n = i / (m.rope / 2), j = i % (m.rope / 2);
        const float* from = query + ((u64)n * m.heads + head) * size + m.nope;
        float a = from[2 * j], b = from[2 * j + 1];
        sp_rotate(a, b, turns[j], position + n);
        float* to = absorbed + ((u64)n * m.heads + head) * width + latent;
        to[2 * j] = a;
        to[2 * j + 1] = b;
    }
}

extern "C" __global__ void __launch_bounds__(128)
mla_query_bf16(SpMatrix kv_b, SpHeads m, const float* query, const double* turns, const int* base, int rows, float* absorbed) {
    sp_absorb<SpBf16>(kv_b, m, query, turns, base[0], rows, absorbed);
}

extern "C" __global__ void __launch_bounds__(128)
mla_query_fp8(SpMatrix kv_b, SpHeads m, const float* query, const double* turns, const int* base, int rows, float* absorbed) {
    sp_absorb<SpFp8>(kv_b, m, query, turns, base[0], rows, absorbed);
}

// Where the group of rows of this block begins.
template <class F>
SP_DEVICE void sp_absorb_group(
    const SpMatrix& kv_b, SpHeads m, const float* query, const double* turns, const int* base, int rows, float* absorbed) {
    const int before = blockIdx.z * SP_ROWS;
    const u64 row = (u64)before * m.heads;
    sp_absorb<F>(
        kv_b, m, query + row * (m.nope + m.rope), turns, base[0] + before, min(rows - before, SP_ROWS), absorbed + row * (kv_b.cols + m.rope));
}

extern "C" __global__ void __launch_bounds__(128, 2)
mla_query_rows_bf16(SpMatrix kv_b, SpHeads m, const float* query, const double* turns, const int* base, int rows, float* absorbed) {
    sp_absorb_group<SpBf16>(kv_b, m, query, turns, base, rows, absorbed);
}

extern "C" __global__ void __launch_bounds__(128, 2)
mla_query_rows_fp8(SpMatrix kv_b, SpHeads m, const float* query, const double* turns, const int* base, int rows, float* absorbed) {
    sp_absorb_group<SpFp8>(kv_b, m, query, turns, base, rows, absorbed);
}
