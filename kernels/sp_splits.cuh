// Attention split over the tokens of a cache: the length of a split, and the merge of the splits.
//
// A split's length is fixed and counted from position 0, so a row's bits do not depend on the window it is in.
#pragma once
#include "sp_intrin.cuh"

#define SP_SPLIT 64

// One head of one row by a block: merged = the sum of the first `used` splits' vectors of `size` numbers, each times
// e^(its max - the largest), over the sum of their masses so scaled. `parts` and `stats` (max, mass) begin at the head's first split.
SP_DEVICE void sp_merge(const float* parts, const float* stats, int used, int size, float* merged) {
    float top = -sp_infinity();
    for (int s = 0; s < used; s++) top = fmaxf(top, stats[s * 2]);
    float mass = 0.0f;
    for (int s = 0; s < used; s++) mass = fmaf(stats[s * 2 + 1], expf(stats[s * 2] - top), mass);
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        float sum = 0.0f;
        for (int s = 0; s < used; s++) sum = fmaf(parts[(u64)s * size + i], expf(stats[s * 2] - top), sum);
        merged[i] = sum / mass;
    }
}
