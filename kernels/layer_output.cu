// The output of a layer whose last branch has not been added to the residual rows yet: out = residual + branch.
//
// Grid: ceil(count / 256). Block: 256. Bytes moved: count * 12. Reference: engine::layer.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
layer_output(const float* residual, const float* branch, int count, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = residual[i] + branch[i];
}
