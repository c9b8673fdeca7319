// Attention of a block drafter's rows over keys and values by head, split over the cache's tokens, and the merge of the splits.
//
// block_attend: grid (splits, ceil(heads / 4), rows). Block: 128, a warp for one head of one row over SP_SPLIT tokens. Row n sees
//   positions 0 .. base[0] + n when `causal`, else those of the whole block. Query head h reads key and value head
//   h / (heads / kv_heads). Writes the split's weighted values `[rows, heads, splits, dim]` and its (max, sum) `[rows, heads, splits, 2]`.
//   Bytes moved: tokens * kv_heads * dim * 8 from memory, read again from cache by each row and each query head of a group; rows *
//   heads * (dim + splits * (dim + 2)) * 4.
// block_merge: grid (heads, rows). Block: 64. out[n][h] = sum of the splits, each times e^(its max - the largest).
//   Bytes moved: rows * heads * (splits * (dim + 2) + dim) * 4.
// dim <= 256. Reference: engine::dspark::attention (which takes the softmax in one piece: equal up to rounding).
#include "sp_splits.cuh"

// Numbers of a head that a lane holds.
#define SP_HEAD 8

// Tokens that row `row` of a block of `rows` sees.
SP_DEVICE int sp_seen(const int* base, int row, int rows, int causal) { return base[0] + (causal ? row + 1 : rows); }

extern "C" __global__ void __launch_bounds__(128)
block_attend(const float* queries, const float* keys, const float* values, const int* base, int causal, int heads, int kv_heads, int dim,
             float scale, float* parts, float* stats) {
    const int lane = threadIdx.x % 32, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.z, rows = gridDim.z;
    const int tokens = sp_seen(base, row, rows, causal), begin = blockIdx.x * SP_SPLIT, splits = gridDim.x;
    if (head >= heads || begin >= tokens) return;
    const int end = min(begin + SP_SPLIT, tokens), width = kv_heads * dim, first = head / (heads / kv_heads) * dim;
    const float* q = queries + ((u64)row * heads + head) * dim;
    float own[SP_HEAD], sum[SP_HEAD];
#pragma unroll
    for (int j = 0; j < SP_HEAD; j++) {
        own[j] = lane + 32 * j < dim ? q[lane + 32 * j] : 0.0f;
        sum[j] = 0.0f;
    }
    float top = -sp_infinity(), mass = 0.0f;
#pragma unroll 2
    for (int t = begin; t < end; t++) {
        const float* k = keys + (u64)t * width + first;
        const float* v = values + (u64)t * width + first;
        float s = 0.0f;
#pragma unroll
        for (int j = 0; j < SP_HEAD; j++) s = fmaf(own[j], lane + 32 * j < dim ? k[lane + 32 * j] : 0.0f, s);
        s = sp_warp_sum(s) * scale;
        // A split of -infinity or NaN alone shows in the norm after the layer.
        const float next = fmaxf(top, s), shrink = expf(top - next), p = expf(s - next);
        mass = fmaf(mass, shrink, p);
#pragma unroll
        for (int j = 0; j < SP_HEAD; j++) sum[j] = fmaf(p, lane + 32 * j < dim ? v[lane + 32 * j] : 0.0f, sum[j] * shrink);
        top = next;
    }
    const u64 at = ((u64)row * heads + head) * splits + blockIdx.x;
#pragma unroll
    for (int j = 0; j < SP_HEAD; j++)
        if (lane + 32 * j < dim) parts[at * dim + lane + 32 * j] = sum[j];
    if (lane == 0) stats[at * 2] = top, stats[at * 2 + 1] = mass;
}

extern "C" __global__ void __launch_bounds__(64)
block_merge(const float* parts, const float* stats, const int* base, int causal, int dim, int splits, float* out) {
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x, rows = gridDim.y;
    const u64 at = (u64)row * heads + head;
    const int used = (sp_seen(base, row, rows, causal) + SP_SPLIT - 1) / SP_SPLIT;
    sp_merge(parts + at * splits * dim, stats + at * splits * 2, used, dim, out + at * dim);
}
