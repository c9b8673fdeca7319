// The routed experts' outputs, weighed and added in rank order, plus the shared expert's: what a layer's experts give a row.
//
// Grid: (ceil(hidden / 256), rows). Block: 256. `routed` is `[slots, hidden]`; `out` holds the shared expert's output before and
// the sum after. The order of additions is rank order, then the shared expert, and so independent of the row's company.
// Bytes moved: rows * hidden * 4 * (k + 2) + rows * k * 8. Reference: `combine` in engine::moe.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
moe_combine(const float* routed, const float* weights, const int* slot_of, int k, int hidden, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    const float* w = weights + (u64)blockIdx.y * k;
    const int* slots = slot_of + (u64)blockIdx.y * k;
    float sum = 0.0f;
    for (int rank = 0; rank < k; rank++) sum = fmaf(w[rank], routed[(u64)slots[rank] * hidden + i], sum);
    out[(u64)blockIdx.y * hidden + i] += sum;
}
