// The token with the largest logit of each row; the lowest id wins a tie, as in engine::sampling. Where `prob` is not null, its probability
// in the plain softmax of the row as well.
//
// Grid: rows. Block: 512. Dynamic shared: 144 bytes. A logit that is not finite is noted in `damage`.
// Bytes moved: rows * (vocab + 1) * 4; with probabilities the row is read again, from cache.
#include "sp_cdf.cuh"

extern "C" __global__ void __launch_bounds__(512)
argmax(const float* logits, int vocab, u32* best, float* prob, int* damage, int site) {
    SP_DYNAMIC_SHARED(float, shared);
    int* ids = (int*)(shared + 16);
    const float* row = logits + (u64)blockIdx.x * vocab;
    float top = -sp_infinity();
    int at = vocab;
    bool finite = true;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float v = row[i];
        finite = finite && sp_finite(v);
        if (v > top || at == vocab) top = v, at = i;
    }
    if (!finite) sp_damaged(damage, site);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        float other = __shfl_xor_sync(SP_FULL, top, step);
        int where = __shfl_xor_sync(SP_FULL, at, step);
        if (where < vocab && (at == vocab || other > top || (other == top && where < at))) top = other, at = where;
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = top, ids[threadIdx.x / 32] = at;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < blockDim.x / 32; w++)
            if (ids[w] < vocab && (shared[w] > top || (shared[w] == top && ids[w] < at))) top = shared[w], at = ids[w];
        best[blockIdx.x] = at < vocab ? at : 0;
        shared[32] = top;
    }
    if (!prob) return;
    __syncthreads();
    top = shared[32];
    double sum = 0.0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) sum += (double)expf(row[i] - top);
    sum = sp_block_sum_double(sum, (double*)shared);
    if (threadIdx.x == 0) prob[blockIdx.x] = (float)(1.0 / sum);
}
