// How sure a block drafter is of each of its drafts, before the sigmoid: by the draft's row of the block and the Markov embedding of the token
// before it. out[d] = proj[..width] . rows[d] + proj[width..] . embedded[d] + bias.
//
// Grid: drafts. Block: 128. Dynamic shared: 16 bytes. `rank` 0: the token before does not count, and `embedded` is not read.
// Bytes moved: drafts * (width + rank) * 4 + (width + rank) * 4. Reference: engine::dspark::Dspark::correct.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(128)
confidence(const float* rows, int width, const float* embedded, int rank, const float* proj, float bias, float* out) {
    SP_DYNAMIC_SHARED(float, scratch);
    const float* row = rows + (u64)blockIdx.x * width;
    const float* token = embedded + (u64)blockIdx.x * rank;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(proj[i], row[i], sum);
    for (int i = threadIdx.x; i < rank; i += blockDim.x) sum = fmaf(proj[width + i], token[i], sum);
    sum = sp_block_sum(sum, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = sum + bias;
}
