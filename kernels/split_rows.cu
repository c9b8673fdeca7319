// Rows of a pass in three terms of BF16, as tensor cores take them: sp_tiles.cuh says how they lie.
//
// Grid: (ceil(padded / 4 / 128), rows), padded = columns up to a multiple of 32. Block: 128, a thread for four columns; columns a multiple
// of 4. Row n comes from x + n * cols and goes to out + n * padded * 6 bytes. Bytes moved: rows * (cols * 4 + padded * 6).
// Reference: none is needed: the terms' sum is the number.
#include "sp_tiles.cuh"

extern "C" __global__ void __launch_bounds__(128)
split_rows(const float* x, int cols, u8* out) {
    const int unit = blockIdx.x * blockDim.x + threadIdx.x, col = unit * 4;
    if (col >= sp_padded(cols)) return;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (col < cols) v = *(const float4*)(x + (u64)blockIdx.y * cols + col);
    u32 a[3], b[3], c[3], d[3];
    sp_terms(v.x, a), sp_terms(v.y, b), sp_terms(v.z, c), sp_terms(v.w, d);
    uint4 both;
    both.x = a[0] | b[0] << 16, both.y = c[0] | d[0] << 16, both.z = a[1] | b[1] << 16, both.w = c[1] | d[1] << 16;
    uint2 third;
    third.x = a[2] | b[2] << 16, third.y = c[2] | d[2] << 16;
    u8* to = out + blockIdx.y * sp_pitch(cols);
    *(uint4*)(to + sp_first(unit)) = both;
    *(uint2*)(to + sp_third(unit)) = third;
}
