// Attention over the latent cache for a pass of more rows than a window has: there are rows enough to keep a device busy, and no cache is
// split. context[n][h] = sum over t <= base[0] + n of softmax(scale * absorbed[n][h] . cache[t])_t * cache[t]'s latent.
//
// Grid: (ceil(rows / 2), ceil(heads / 4)). Block: 128, a warp for one head of two neighbouring rows, which share what they load of the cache.
// Bytes moved: tokens * (latent + rope) * 4 from memory, read again from cache by each four heads and each two rows; rows * heads *
// (latent + rope + latent) * 4. Operations: 2 * heads * (2 latent + rope) for each row and each token that it sees, on FP32 units.
// latent <= 512, rope <= 64. Reference: engine::mla (which takes the softmax in one piece: equal up to rounding).
#include "sp_intrin.cuh"

#define SP_PREFILL_LATENT 16
#define SP_PREFILL_ROPE 2
// Rows of a warp, and tokens whose scores are in flight together.
#define SP_QUERIES 2
#define SP_TOKENS 2

extern "C" __global__ void __launch_bounds__(128)
mla_prefill(
    const float* absorbed, const float* cache, const int* base, int rows, int heads, int latent, int rope, float scale, float* context) {
    const int NUMBERS = SP_PREFILL_LATENT + SP_PREFILL_ROPE;
    const int lane = threadIdx.x % 32, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, width = latent + rope;
    const int first = blockIdx.x * SP_QUERIES, end = base[0] + min(first + SP_QUERIES, rows);
    if (head >= heads) return;
    // Number j of a lane: of the latent, and behind it of the rotated part.
    auto load = [&](const float* from, float(&to)[NUMBERS]) {
#pragma unroll
        for (int j = 0; j < SP_PREFILL_LATENT; j++) to[j] = lane + 32 * j < latent ? from[lane + 32 * j] : 0.0f;
#pragma unroll
        for (int j = 0; j < SP_PREFILL_ROPE; j++) to[SP_PREFILL_LATENT + j] = lane + 32 * j < rope ? from[latent + lane + 32 * j] : 0.0f;
    };
    float q[SP_QUERIES][NUMBERS], sum[SP_QUERIES][SP_PREFILL_LATENT], top[SP_QUERIES], mass[SP_QUERIES];
#pragma unroll
    for (int n = 0; n < SP_QUERIES; n++) {
        // The last row stands in for one that is not there.
        load(absorbed + ((u64)min(first + n, rows - 1) * heads + head) * width, q[n]);
        top[n] = -sp_infinity(), mass[n] = 0.0f;
#pragma unroll
        for (int j = 0; j < SP_PREFILL_LATENT; j++) sum[n][j] = 0.0f;
    }
#pragma unroll 1
    for (int t = 0; t < end; t += SP_TOKENS) {
        float c[SP_TOKENS][NUMBERS];
#pragma unroll
        for (int a = 0; a < SP_TOKENS; a++) load(cache + (u64)min(t + a, end - 1) * width, c[a]);
#pragma unroll
        for (int n = 0; n < SP_QUERIES; n++) {
            float score[SP_TOKENS], next = top[n];
#pragma unroll
            for (int a = 0; a < SP_TOKENS; a++) {
                float s = 0.0f;
#pragma unroll
                for (int j = 0; j < NUMBERS; j++) s = fmaf(q[n][j], c[a][j], s);
                s = sp_warp_sum(s) * scale;
                // Tokens after a row, or beyond the last, have weight 0; every row sees token 0.
                score[a] = t + a < end && t + a <= base[0] + first + n ? s : -sp_infinity();
                next = fmaxf(next, score[a]);
            }
            const float shrink = expf(top[n] - next);
            mass[n] *= shrink;
#pragma unroll
            for (int j = 0; j < SP_PREFILL_LATENT; j++) sum[n][j] *= shrink;
#pragma unroll
            for (int a = 0; a < SP_TOKENS; a++) {
                const float p = expf(score[a] - next);
                mass[n] += p;
#pragma unroll
                for (int j = 0; j < SP_PREFILL_LATENT; j++) sum[n][j] = fmaf(p, c[a][j], sum[n][j]);
            }
            top[n] = next;
        }
    }
#pragma unroll
    for (int n = 0; n < SP_QUERIES; n++) {
        if (first + n >= rows) continue;
        float* to = context + ((u64)(first + n) * heads + head) * latent;
#pragma unroll
        for (int j = 0; j < SP_PREFILL_LATENT; j++)
            if (lane + 32 * j < latent) to[lane + 32 * j] = sum[n][j] / mass[n];
    }
}
