// Dense projections: out[n] = W x[n] for the 1 to 16 rows of a pass, W read once. Head, router and every projection use it. Projections of
// the same rows in the same format are one launch: alone, most have too few warps to keep memory busy, and end before it is.
//
// Grid: over the projections, of each ceil(W.rows / outputs of a block), beginning with block `first`. Block: 32 or 128, a warp for four
// outputs. Row n comes from x + n * x_stride and goes to the projection's out + n * stride. `_rN` takes up to N rows; the bits of a row are
// the same with each of them. With more than four rows the products of scaled formats outweigh the bytes on a device without tensor-core use;
// see kernels/README.md.
// Bytes moved: stored bytes of each W (codes and scales) + rows * (W.cols + W.rows) * 4; x is read again by each warp, from cache.
// `dense_f32_rows`: for passes of more rows, which other formats have dense_tiles for; block 128, grid (ceil(W.rows / 16), ceil(rows / 16)), and W
// comes again, from cache, for every 16 rows. Operations: 2 * W.rows * W.cols * rows, on FP32 units.
// Reference: engine::matmul.
#include "sp_dot.cuh"

#define SP_PROJECTIONS 6

// Up to SP_PROJECTIONS matrices of as many columns; the blocks of number m begin with block first[m].
struct SpProjections {
    SpMatrix w[SP_PROJECTIONS];
    float* out[SP_PROJECTIONS];
    int stride[SP_PROJECTIONS];
    int first[SP_PROJECTIONS];
    int count;
};

template <class F, int ROWS>
SP_DEVICE void sp_dense(const SpMatrix& w, int block, const float* x, int x_stride, float* out, int out_stride, int rows) {
    const int OUT = 4;
    int first = (block * (blockDim.x / 32) + threadIdx.x / 32) * OUT;
    if (first >= w.rows) return;
    const u8* codes[OUT];
    const u8* scales[OUT];
    int row[OUT];
    bool there[OUT];
#pragma unroll
    for (int o = 0; o < OUT; o++) {
        row[o] = first + o;
        there[o] = row[o] < w.rows;
        codes[o] = w.codes + (u64)row[o] * F::size(w.cols);
        scales[o] = w.scales;
    }
    sp_dots<F, ROWS, OUT>(w, codes, scales, row, there, [=](int n) { return x + (u64)n * x_stride; }, rows, [=](int n, int o, float v, float next) {
        float* to = out + (u64)n * out_stride + first + o;
        if (first + o < w.rows) to[0] = v;
        if (first + o + 1 < w.rows) to[1] = next;
    });
}

template <class F, int ROWS>
SP_DEVICE void sp_project(const SpProjections& p, const float* x, int x_stride, int rows) {
    const int block = blockIdx.x;
    int m = 0;
    while (m + 1 < p.count && block >= p.first[m + 1]) m++;
    const SpMatrix w = p.w[m];
    sp_dense<F, ROWS>(w, block - p.first[m], x, x_stride, p.out[m], p.stride[m], rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_r1(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpF32, 1>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_r4(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpF32, 4>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_r16(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpF32, 16>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_bf16_r1(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpBf16, 1>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_bf16_r4(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpBf16, 4>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_bf16_r16(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpBf16, 16>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_fp8_r1(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpFp8, 1>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_fp8_r4(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpFp8, 4>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_fp8_r16(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpFp8, 16>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_int4_r1(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpInt4, 1>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_int4_r4(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpInt4, 4>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_int4_r16(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpInt4, 16>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_mxfp4_r1(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpMxfp4, 1>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_mxfp4_r4(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpMxfp4, 4>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_mxfp4_r16(const __grid_constant__ SpProjections p, const float* x, int x_stride, int rows) {
    sp_project<SpMxfp4, 16>(p, x, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(128)
dense_f32_rows(SpMatrix w, const float* x, int x_stride, float* out, int out_stride, int rows) {
    const int before = blockIdx.y * SP_ROWS;
    x += (u64)before * x_stride;
    sp_dense<SpF32, SP_ROWS>(w, blockIdx.x, x, x_stride, out + (u64)before * out_stride, out_stride, min(rows - before, SP_ROWS));
}
