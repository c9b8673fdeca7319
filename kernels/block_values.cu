// Values of a block drafter's rows into the cache: row n goes to row base[0] + n of `out`.
//
// Grid: (ceil(width / 256), rows). Block: 256. Bytes moved: rows * width * 8. Reference: engine::dspark::attention.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
block_values(const float* raw, const int* base, int width, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) out[((u64)base[0] + blockIdx.y) * width + i] = raw[(u64)blockIdx.y * width + i];
}
