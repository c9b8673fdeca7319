// The delta rule over the rows of a window, and its commit.
//
// State S of a head is `[value, key]`, keys together: a warp owns a few value columns and adds over keys by lanes. A row:
// decay S[v][i] *= a[i]; predict p = sum_i S[v][i] k[i]; write S[v][i] += k[i] * beta * (value[v] - p); read o[v] = sum_i
// S[v][i] q[i], in this order. Value columns do not meet.
//
// Rollback: kda_delta reads the committed state and does not write it; each row's ingredients (key, value, decay, beta) are
// staged by kda_mix. kda_commit replays the rows that are kept by the same arithmetic, so that the state has the bits of a
// pass that never had the others. How many are kept is read from device memory: acceptance needs no look by the host.
//
// kda_delta: grid (heads, ceil(dim / 16)), block 128, a warp for four value columns; dim <= 128. Rows 0..first+rows of the
//   pending ones are run and those from `first` on are read.
//   Bytes moved: state heads * dim^2 * 4 + (first + rows) * (4 P + heads) * 4 + rows * P * 4; the rows' from cache for all but one block.
// kda_scan: the same of a pass of more rows than a window has, which are kept: the state is written. Grid and block as of kda_delta.
//   Bytes moved: 2 * heads * dim^2 * 4 + rows * (4 P + heads) * 4 + rows * P * 4; the rows' from cache for all but one block.
// kda_commit: grid (heads, ceil(dim / 16), layers), block 128. Layers lie `state_stride` and `row_stride` floats apart.
//   Bytes moved: layers * (2 * heads * dim^2 * 4 + keep * (3 P + heads) * 4).
// kda_shift: moves the last taps - 1 kept rows of the convolution's input to the front. Grid (ceil(3 P / 256), layers), block 256.
//   Bytes moved: layers * 2 * (taps - 1) * 3 P * 4.
// Reference: engine::kda.
#include "sp_intrin.cuh"

// Value columns of a warp, and numbers of a column that a lane holds (dim <= 32 * SP_KEYS).
#define SP_COLUMNS 4
#define SP_KEYS 4

SP_DEVICE void sp_load_keys(const float* from, int dim, float (&to)[SP_KEYS]) {
#pragma unroll
    for (int j = 0; j < SP_KEYS; j++) {
        int i = threadIdx.x % 32 + 32 * j;
        to[j] = i < dim ? from[i] : 0.0f;
    }
}

struct SpDelta {
    int heads;
    int dim;
    const float* keys;
    const float* values;
    const float* decays;
    const float* betas;
};

// Runs rows 0..rows on a warp's columns `first_column..` of `head`. Row n's output goes to out[n - first], from `first` on; null: none.
SP_DEVICE void sp_delta_rows(
    const SpDelta& d, float (&state)[SP_COLUMNS][SP_KEYS], int head, int first_column, int rows, int first, const float* query, float* out) {
    const int width = d.heads * d.dim;
#pragma unroll 1
    for (int n = 0; n < rows; n++) {
        u64 at = (u64)n * width + head * d.dim;
        float key[SP_KEYS], decay[SP_KEYS];
        sp_load_keys(d.keys + at, d.dim, key);
        sp_load_keys(d.decays + at, d.dim, decay);
        float beta = d.betas[(u64)n * d.heads + head];
#pragma unroll
        for (int c = 0; c < SP_COLUMNS; c++) {
            float p = 0.0f;
#pragma unroll
            for (int j = 0; j < SP_KEYS; j++) {
                state[c][j] *= decay[j];
                p = fmaf(state[c][j], key[j], p);
            }
            p = sp_warp_sum(p);
            int v = first_column + c;
            float u = v < d.dim ? beta * (d.values[at + v] - p) : 0.0f;
#pragma unroll
            for (int j = 0; j < SP_KEYS; j++) state[c][j] = fmaf(key[j], u, state[c][j]);
        }
        if (out && n >= first) {
            u64 to = (u64)(n - first) * width + head * d.dim;
            float q[SP_KEYS];
            sp_load_keys(query + to, d.dim, q);
#pragma unroll
            for (int c = 0; c < SP_COLUMNS; c++) {
                float o = 0.0f;
#pragma unroll
                for (int j = 0; j < SP_KEYS; j++) o = fmaf(state[c][j], q[j], o);
                o = sp_warp_sum(o);
                if (threadIdx.x % 32 == 0 && first_column + c < d.dim) out[to + first_column + c] = o;
            }
        }
    }
}

SP_DEVICE void sp_load_state(const float* state, int dim, int first_column, float (&to)[SP_COLUMNS][SP_KEYS]) {
#pragma unroll
    for (int c = 0; c < SP_COLUMNS; c++)
#pragma unroll
        for (int j = 0; j < SP_KEYS; j++) {
            int i = threadIdx.x % 32 + 32 * j, v = first_column + c;
            to[c][j] = i < dim && v < dim ? state[(u64)v * dim + i] : 0.0f;
        }
}

extern "C" __global__ void __launch_bounds__(128)
kda_delta(const float* state, SpDelta d, int first, int rows, const float* query, float* out) {
    const int head = blockIdx.x, column = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * SP_COLUMNS;
    if (column >= d.dim) return;
    float s[SP_COLUMNS][SP_KEYS];
    sp_load_state(state + (u64)head * d.dim * d.dim, d.dim, column, s);
    sp_delta_rows(d, s, head, column, first + rows, first, query, out);
}

SP_DEVICE void sp_store_state(const float (&from)[SP_COLUMNS][SP_KEYS], int dim, int first_column, float* state) {
#pragma unroll
    for (int c = 0; c < SP_COLUMNS; c++)
#pragma unroll
        for (int j = 0; j < SP_KEYS; j++) {
            int i = threadIdx.x % 32 + 32 * j, v = first_column + c;
            if (i < dim && v < dim) state[(u64)v * dim + i] = from[c][j];
        }
}

extern "C" __global__ void __launch_bounds__(128)
kda_scan(float* state, SpDelta d, int rows, const float* query, float* out) {
    const int head = blockIdx.x, column = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * SP_COLUMNS;
    if (column >= d.dim) return;
    float* own = state + (u64)head * d.dim * d.dim;
    float s[SP_COLUMNS][SP_KEYS];
    sp_load_state(own, d.dim, column, s);
    sp_delta_rows(d, s, head, column, rows, 0, query, out);
    sp_store_state(s, d.dim, column, own);
}

extern "C" __global__ void __launch_bounds__(128)
kda_commit(float* state, u64 state_stride, SpDelta d, u64 row_stride, u64 beta_stride, const int* keep) {
    const int head = blockIdx.x, column = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * SP_COLUMNS;
    const int rows = keep[0];
    if (column >= d.dim || rows == 0) return;
    const u64 layer = blockIdx.z;
    d.keys += layer * row_stride;
    d.values += layer * row_stride;
    d.decays += layer * row_stride;
    d.betas += layer * beta_stride;
    float* own = state + layer * state_stride + (u64)head * d.dim * d.dim;
    float s[SP_COLUMNS][SP_KEYS];
    sp_load_state(own, d.dim, column, s);
    sp_delta_rows(d, s, head, column, rows, 0, 0, 0);
    sp_store_state(s, d.dim, column, own);
}

extern "C" __global__ void __launch_bounds__(256)
kda_shift(float* raw, u64 raw_stride, int width, int taps, const int* keep) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width) return;
    float* own = raw + blockIdx.y * raw_stride + c;
    u64 kept = (u64)keep[0] * width;
    // A thread moves its channel front to back: what it overwrites it has read.
    for (int j = 0; j < taps - 1; j++) own[(u64)j * width] = own[(u64)j * width + kept];
}
