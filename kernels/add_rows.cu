// The sum of two rows, for rows that go elsewhere than they come from: a layer's output whose last branch has not been added to the residual
// yet, side by side with other layers' for the drafter that is made of them; a draft's logits and what the token before says of it.
//
// Grid: (ceil(width / 256), rows). Block: 256. out[n * stride + i] = a[n * width + i] + b[n * width + i]; `out` may be `a` when its stride is
// the width. Bytes moved: rows * width * 12. Reference: engine::layer, engine::dspark::Dspark::correct.
#include "sp_intrin.cuh"

extern "C" __global__ void __launch_bounds__(256)
add_rows(const float* a, const float* b, int width, float* out, int stride) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const u64 at = (u64)blockIdx.y * width + i;
    if (i < width) out[(u64)blockIdx.y * stride + i] = a[at] + b[at];
}
