// Attention over the latent cache, split over its tokens, and the merge of the splits.
//
// mla_attend: grid (splits, ceil(heads / 4), rows). Block: 128, a warp for one head of one row over SP_SPLIT tokens. Row n sees
//   positions 0 .. base[0] + n. Blocks beyond a row's last token leave at once, so that a graph can be launched for the longest
//   context. Writes the split's weighted latents `[rows, heads, splits, latent]` and its (max, sum) `[rows, heads, splits, 2]`.
//   Bytes moved: tokens * (latent + rope) * 4 from memory, read again from cache by each four heads and each row; rows * heads *
//   ((latent + rope) + splits * (latent + 2)) * 4.
// mla_merge: grid (heads, rows). Block: 128. context[n][h] = sum of the splits, each times e^(its max - the largest).
//   Bytes moved: rows * heads * (splits * (latent + 2) + latent) * 4.
// latent <= 512, rope <= 64. Reference: engine::mla (which takes the softmax in one piece: equal up to rounding).
#include "sp_splits.cuh"

#define SP_LATENT 16
#define SP_ROPE 2
// Tokens whose scores are in flight together.
#define SP_AHEAD 4

extern "C" __global__ void __launch_bounds__(128, 4)
mla_attend(
    const float* absorbed, const float* cache, const int* base, int heads, int latent, int rope, float scale, int splits, float* context,
    float* stats) {
    const int lane = threadIdx.x % 32, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.z, width = latent + rope;
    const int tokens = base[0] + row + 1, begin = blockIdx.x * SP_SPLIT;
    if (head >= heads || begin >= tokens) return;
    const int end = min(begin + SP_SPLIT, tokens);
    const float* q = absorbed + ((u64)row * heads + head) * width;
    float ql[SP_LATENT], qr[SP_ROPE], sum[SP_LATENT];
#pragma unroll
    for (int j = 0; j < SP_LATENT; j++) {
        ql[j] = lane + 32 * j < latent ? q[lane + 32 * j] : 0.0f;
        sum[j] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < SP_ROPE; j++) qr[j] = lane + 32 * j < rope ? q[latent + lane + 32 * j] : 0.0f;
    float top = -sp_infinity(), mass = 0.0f;
#pragma unroll 1
    for (int t = begin; t < end; t += SP_AHEAD) {
        float score[SP_AHEAD];
#pragma unroll
        for (int a = 0; a < SP_AHEAD; a++) {
            // Beyond the end the last token stands in, with weight 0.
            const float* c = cache + (u64)min(t + a, end - 1) * width;
            float s = 0.0f;
#pragma unroll
            for (int j = 0; j < SP_LATENT; j++) s = fmaf(ql[j], lane + 32 * j < latent ? c[lane + 32 * j] : 0.0f, s);
#pragma unroll
            for (int j = 0; j < SP_ROPE; j++) s = fmaf(qr[j], lane + 32 * j < rope ? c[latent + lane + 32 * j] : 0.0f, s);
            score[a] = sp_warp_sum(s) * scale;
        }
        float next = top;
#pragma unroll
        for (int a = 0; a < SP_AHEAD; a++) {
            score[a] = t + a < end ? score[a] : -sp_infinity();
            next = fmaxf(next, score[a]);
        }
        // A whole split of -infinity or NaN shows in the norm after the layer.
        float shrink = expf(top - next);
        mass *= shrink;
#pragma unroll
        for (int j = 0; j < SP_LATENT; j++) sum[j] *= shrink;
#pragma unroll
        for (int a = 0; a < SP_AHEAD; a++) {
            const float* c = cache + (u64)min(t + a, end - 1) * width;
            float p = expf(score[a] - next);
            mass += p;
#pragma unroll
            for (int j = 0; j < SP_LATENT; j++) sum[j] = fmaf(p, lane + 32 * j < latent ? c[lane + 32 * j] : 0.0f, sum[j]);
        }
        top = next;
    }
    u64 at = ((u64)row * heads + head) * splits + blockIdx.x;
#pragma unroll
    for (int j = 0; j < SP_LATENT; j++)
        if (lane + 32 * j < latent) context[at * latent + lane + 32 * j] = sum[j];
    if (lane == 0) stats[at * 2] = top, stats[at * 2 + 1] = mass;
}

extern "C" __global__ void __launch_bounds__(128)
mla_merge(const float* context, const float* stats, const int* base, int latent, int splits, float* merged) {
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x;
    const u64 at = (u64)row * heads + head;
    const int used = (base[0] + row + SP_SPLIT) / SP_SPLIT;
    sp_merge(context + at * splits * latent, stats + at * splits * 2, used, latent, merged + at * latent);
}
